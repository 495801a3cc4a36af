#include "hypermla/compile/nvrtc.h"

#include <dlfcn.h>

#include <mutex>

#include "hypermla/base/error.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

// The part of NVRTC's C interface used here. Declared by hand, since any CUDA 13 builds the package, and nvrtc.h has
// the Tile IR calls only from 13.3 on.
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
  int (*cubin_size)(Program, std::size_t*);
  int (*cubin)(Program, char*);
  int (*ptx_size)(Program, std::size_t*);
  int (*ptx)(Program, char*);

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
    load(cubin_size, "nvrtcGetCUBINSize");
    load(cubin, "nvrtcGetCUBIN");
    load(ptx_size, "nvrtcGetPTXSize");
    load(ptx, "nvrtcGetPTX");
  }
};

const Nvrtc& nvrtc(const fs::path& cuda_root) {
  static const Nvrtc library(cuda_root);  // one toolkit per process
  return library;
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

NvrtcResult nvrtc_compile(const fs::path& cuda_root, const BackendInput& input, NvrtcCode wanted,
                          std::vector<std::string> options) {
  static std::mutex one_at_a_time;  // NVRTC compiles serially within a process anyway
  std::lock_guard lock(one_at_a_time);
  const Nvrtc& compiler = nvrtc(cuda_root);
  options.push_back("-I" + (cuda_root / "include").string());
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
  const int status = compiler.compile(program, int(arguments.size()), arguments.data());
  auto get = [&](auto size_of, auto bytes_of) {
    std::size_t size = 0;
    size_of(program, &size);
    std::string bytes(size, '\0');
    bytes_of(program, bytes.data());
    return bytes;
  };
  const auto text = [&](auto size_of, auto bytes_of) {
    const std::string bytes = get(size_of, bytes_of);
    return bytes.substr(0, bytes.find('\0'));
  };
  NvrtcResult result;
  result.log = text(compiler.log_size, compiler.log);
  if (status != 0) fail_compilation(input, "NVRTC", status, result.log);
  result.code =
      wanted == NvrtcCode::tile_ir ? get(compiler.tile_size, compiler.tile) : get(compiler.cubin_size, compiler.cubin);
  if (wanted == NvrtcCode::cubin) result.ptx = text(compiler.ptx_size, compiler.ptx);
  return result;
}

}  // namespace hypermla
