#include <chrono>

#include "hypermla/base/error.h"
#include "hypermla/compile/nvrtc.h"

namespace hypermla {

BackendOutput compile_cuda(const std::filesystem::path& cuda_root, const BackendInput& input) {
  const auto begin = std::chrono::steady_clock::now();
  // Include directories of CUTLASS and of the CCCL it needs: their wheels put them beside the CUDA root and in it. They
  // come after the project's own directories and, like everything of the compilers, are not part of a kernel's key.
  BackendInput with_cutlass = input;
  with_cutlass.include_paths.push_back(cuda_root.parent_path().parent_path() / "cutlass_library/source/include");
  with_cutlass.include_paths.push_back(cuda_root / "include/cccl");
  // sm_90a, not sm_90: wgmma and setmaxnreg exist only there. Older GPUs have no such instructions of their own.
  const std::string own = std::stoi(input.arch.substr(3)) < 90 ? "" : "a";
  NvrtcResult compiled = nvrtc_compile(
      cuda_root, with_cutlass, NvrtcCode::cubin,
      {"-std=c++20", "-default-device", "--generate-line-info", "-Xptxas=-v", "-arch=" + input.arch + own});
  // ptxas serialises wgmma where it cannot prove that no other code touches the accumulators. It reports that only as
  // advice.
  if (const std::size_t at = compiled.log.find("(C75"); at != std::string::npos)
    throw CompileError(fmt::format("{} would lose the asynchrony of wgmma on {}; ptxas says: {}", input.instance,
                                   input.arch, compiled.log.substr(at, compiled.log.find('\n', at) - at)));

  BackendOutput output;
  const CubinResources resources = read_cubin(compiled.code);
  // Of kernels that have code_range() in them, for the PTX names every file: others may read the timer for themselves.
  const bool asks = compiled.ptx.find("/hopper/code.h\"") != std::string::npos;
  if (asks && input.arch == "sm_90") name_code_range(compiled.code);
  output.files["kernel.cubin"] = std::move(compiled.code);
  output.files["kernel.ptx"] = std::move(compiled.ptx);
  output.files["remarks.txt"] = std::move(compiled.log);
  output.report["artifact"] = "kernel.cubin";
  output.report["function"] = resources.function;
  output.report["registers"] = resources.registers;
  output.report["frame_bytes"] = resources.frame_bytes;
  output.report["shared_bytes"] = resources.shared_bytes;
  output.report["compiler"] = "NVRTC " + nvrtc_version(cuda_root);
  output.report["seconds"] = {
      {"total", std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()}};
  return output;
}

}  // namespace hypermla
