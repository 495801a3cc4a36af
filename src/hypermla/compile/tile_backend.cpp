#include <chrono>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/base/process.h"
#include "hypermla/compile/nvrtc.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

std::string tileiras_version(const fs::path& cuda_root) {
  const std::string text = run_process({(cuda_root / "bin/tileiras").string(), "--version"}).out;
  const std::size_t at = text.find(", V");
  return "tileiras" + (at == std::string::npos ? "" : text.substr(at + 1, text.find('\n', at) - at - 1));
}

BackendOutput compile_tile(const fs::path& cuda_root, const BackendInput& input) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string tile_ir =
      nvrtc_compile(cuda_root, input, NvrtcCode::tile_ir,
                    {"-enable-tile", "-tile-only", "-default-tile", "-std=c++20", "-lineinfo", "-arch=" + input.arch})
          .code;
  const double nvrtc_seconds = seconds_since(begin);

  const Scratch scratch(input.work_directory / "compile", Scratch::Kind::directory);
  const std::string ir_path = (scratch.path() / "kernel.tileir").string();
  const std::string cubin_path = (scratch.path() / "kernel.cubin").string();
  write_new_file(ir_path, tile_ir);
  // Without CUDA_ROOT tileiras loads the libnvvm of an older toolkit, if there is one, and fails without naming the
  // cause.
  const ProcessOptions options{.environment = {{"CUDA_ROOT", cuda_root.string()},
                                               {"CUDA_HOME", cuda_root.string()},
                                               {"LC_ALL", "C"},
                                               {"PATH", (cuda_root / "bin").string() + ":/usr/bin:/bin"},
                                               {"TMPDIR", scratch.path().string()}},
                               .stop = input.stop};
  const ProcessResult assembled = run_process({(cuda_root / "bin/tileiras").string(), "--gpu-name=" + input.arch,
                                               "--lineinfo", "--remarks=all", "-o", cubin_path, ir_path},
                                              options);
  if (assembled.status != 0) fail_compilation(input, "tileiras", assembled.status, assembled.err + assembled.out);

  BackendOutput output;
  output.files["kernel.cubin"] = read_file(cubin_path);
  output.files["remarks.txt"] = assembled.out + assembled.err;
  output.files["kernel.tileir.txt"] = run_process({(cuda_root / "bin/tileirdisasm").string(), ir_path}, options).out;
  const CubinResources resources = read_cubin(output.files["kernel.cubin"]);
  if (resources.allocates)
    throw CompileError(fmt::format(
        "{} takes memory from the heap of the GPU, which costs tens of microseconds each time: a variable of it needs "
        "an address, as one that a lambda captures by reference; capture it by value",
        resources.function));
  output.report["artifact"] = "kernel.cubin";
  output.report["function"] = resources.function;
  output.report["registers"] = resources.registers;
  output.report["frame_bytes"] = resources.frame_bytes;
  output.report["shared_bytes"] = resources.shared_bytes;
  output.report["compiler"] = "NVRTC " + nvrtc_version(cuda_root) + " + tileiras";
  output.report["seconds"] = {{"nvrtc", nvrtc_seconds}, {"total", seconds_since(begin)}};
  return output;
}

}  // namespace hypermla
