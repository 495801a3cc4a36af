#include <dlfcn.h>

#include <chrono>
#include <mutex>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/base/process.h"
#include "hypermla/compile/backends.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

// The part of NVRTC's C interface used here (nvrtc.h of CUDA 13.3 and newer: the Tile IR calls are its last additions).
struct Nvrtc {
  using Program = struct ProgramTag*;
  int (*version)(int*, int*);
  int (*create)(Program*, const char*, const char*, int, const char* const*, const char* const*);
  int (*destroy)(Program*);
  int (*add_name)(Program, const char*);
  int (*compile)(Program, int, const char* const*);
  int (*log_size)(Program, std::size_t*);
  int (*log)(Program, char*);
  int (*tile_size)(Program, std::size_t*);
  int (*tile)(Program, char*);

  explicit Nvrtc(const fs::path& cuda_root) {
    const fs::path path = nvrtc_library(cuda_root);
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) fail("NVRTC does not load ({}); run ./hypermla once to install the pinned wheels", dlerror());
    auto load = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      if (!function) fail("{} lacks {}: CUDA Tile C++ needs CUDA 13.3 or newer", path.string(), name);
    };
    load(version, "nvrtcVersion");
    load(create, "nvrtcCreateProgram");
    load(destroy, "nvrtcDestroyProgram");
    load(add_name, "nvrtcAddNameExpression");
    load(compile, "nvrtcCompileProgram");
    load(log_size, "nvrtcGetProgramLogSize");
    load(log, "nvrtcGetProgramLog");
    load(tile_size, "nvrtcGetTileIRSize");
    load(tile, "nvrtcGetTileIR");
  }
};

const Nvrtc& nvrtc(const fs::path& cuda_root) {
  static const Nvrtc library(cuda_root);  // one toolkit per process
  return library;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The first lines that name an error: a template's backtrace is of no use in one sentence.
std::string first_errors(const std::string& log) {
  const std::size_t at = log.find("error");
  const std::size_t begin = at == std::string::npos ? 0 : log.rfind('\n', at) + 1;
  return log.substr(begin, 600);
}

std::string to_tile_ir(const Nvrtc& compiler, const BackendInput& input, const fs::path& cuda_root) {
  static std::mutex one_at_a_time;  // NVRTC compiles serially within a process anyway
  std::lock_guard lock(one_at_a_time);
  std::vector<std::string> options = {"-enable-tile", "-tile-only", "-default-tile", "-std=c++20", "-lineinfo",
                                      "-arch=" + input.arch, "-I" + (cuda_root / "include").string()};
  for (const fs::path& path : input.include_paths) options.push_back("-I" + path.string());
  std::vector<const char*> arguments;
  for (const std::string& option : options) arguments.push_back(option.c_str());

  Nvrtc::Program program = nullptr;
  compiler.create(&program, input.source.c_str(), "kernel.cu", 0, nullptr, nullptr);
  struct Destroy {
    const Nvrtc& compiler;
    Nvrtc::Program program;
    ~Destroy() { compiler.destroy(&program); }
  } destroy{compiler, program};
  compiler.add_name(program, input.instance.c_str());  // instantiates the template
  if (compiler.compile(program, int(arguments.size()), arguments.data()) != 0) {
    std::size_t size = 0;
    compiler.log_size(program, &size);
    std::string log(size, '\0');
    compiler.log(program, log.data());
    fail("{} does not compile for {}: {}", input.instance, input.arch, first_errors(log));
  }
  std::size_t size = 0;
  compiler.tile_size(program, &size);
  std::string tile_ir(size, '\0');
  compiler.tile(program, tile_ir.data());
  return tile_ir;
}

}  // namespace

fs::path nvrtc_library(const fs::path& cuda_root) {
  std::error_code unreadable;  // is as good as absent
  for (const char* directory : {"lib", "lib64"})
    if (fs::path path = cuda_root / directory / "libnvrtc.so.13"; fs::exists(path, unreadable)) return path;
  return {};
}

std::string nvrtc_version(const fs::path& cuda_root) {
  int major = 0, minor = 0;
  nvrtc(cuda_root).version(&major, &minor);
  return fmt::format("{}.{}", major, minor);
}

BackendOutput compile_tile(const fs::path& cuda_root, const BackendInput& input) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string tile_ir = to_tile_ir(nvrtc(cuda_root), input, cuda_root);
  const double nvrtc_seconds = seconds_since(begin);

  const Scratch scratch(input.work_directory / "compile", Scratch::Kind::directory);
  const std::string ir_path = (scratch.path() / "kernel.tileir").string();
  const std::string cubin_path = (scratch.path() / "kernel.cubin").string();
  write_new_file(ir_path, tile_ir);
  // Without CUDA_ROOT tileiras takes whatever libnvvm an older toolkit offers, and fails without saying so.
  const ProcessOptions options{.environment = {{"CUDA_ROOT", cuda_root.string()},
                                               {"CUDA_HOME", cuda_root.string()},
                                               {"PATH", (cuda_root / "bin").string() + ":/usr/bin:/bin"},
                                               {"TMPDIR", scratch.path().string()}}};
  const ProcessResult assembled = run_process({(cuda_root / "bin/tileiras").string(), "--gpu-name=" + input.arch,
                                               "--lineinfo", "--remarks=all", "-o", cubin_path, ir_path},
                                              options);
  if (assembled.status != 0)
    fail("tileiras refuses {} for {}: {}", input.instance, input.arch, first_errors(assembled.err + assembled.out));

  BackendOutput output;
  output.files["kernel.cubin"] = read_file(cubin_path);
  output.files["remarks.txt"] = assembled.out + assembled.err;
  output.files["kernel.tileir.txt"] = 
      run_process({(cuda_root / "bin/tileirdisasm").string(), ir_path}, options).out;
  const CubinResources resources = read_cubin(output.files["kernel.cubin"]);
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
