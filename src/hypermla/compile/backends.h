// The ways from a kernel's source to a file that a device can load. Each returns the files of a cache entry.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "hypermla/base/fields.h"
#include "hypermla/error.h"

namespace hypermla {

struct BackendOutput {
  std::map<std::string, std::string> files;  // name -> bytes
  Json report;                               // artifact, function, registers, frame_bytes, shared_bytes, compiler, ...
};

struct BackendInput {
  std::string source;    // text of the translation unit: includes one kernel header
  std::string instance;  // the template instance to compile
  std::string arch;      // sm_90, x86-64-v4
  std::vector<std::filesystem::path> include_paths;
  std::filesystem::path work_directory;  // where intermediate files may be written
  std::stop_token stop = {};             // ends the compiler, where it is a program
  std::string exports = {};  // for compile_host: what the source itself exports, in place of an instance's entry
};

// The verdict of a compiler about a source: it does not compile, and it will not until one of the two changes. All
// other causes that keep a kernel from being compiled are another Error: a full disk, too little memory, a wrong flag,
// a compiler that was killed or is missing.
class CompileError : public Error {
 public:
  using Error::Error;
};

// Throws for a compiler that failed with this log: CompileError if the log names an error in the source. `status` is
// that of a process (base/process.h).
[[noreturn]] void fail_compilation(const BackendInput& input, const std::string& compiler, int status,
                                   const std::string& log);

// The backends throw CompileError or another Error, with the compiler's own first lines.
//
// CUDA Tile C++ -> Tile IR (NVRTC, in this process, one at a time) -> cubin (tileiras).
BackendOutput compile_tile(const std::filesystem::path& cuda_root, const BackendInput& input);
// CUDA C++ for one architecture (sm_90 means sm_90a) -> cubin, by NVRTC alone. Throws CompileError when ptxas
// serialises wgmma.
BackendOutput compile_cuda(const std::filesystem::path& cuda_root, const BackendInput& input);
// CUDA Tile C++ -> shared library for this CPU, through the host compiler.
BackendOutput compile_host(const std::filesystem::path& cxx, const BackendInput& input,
                           const std::vector<std::string>& extra_flags);

std::filesystem::path nvrtc_library(const std::filesystem::path& cuda_root);  // empty when there is none
std::string nvrtc_version(const std::filesystem::path& cuda_root);
std::string tileiras_version(const std::filesystem::path& cuda_root);  // "tileiras V13.5.37"
std::string cxx_version(const std::filesystem::path& cxx);

// What a cubin says of its one kernel, read from the ELF without a GPU or a tool.
struct CubinResources {
  std::string function;
  int registers = 0;
  int frame_bytes = 0;  // per thread; spills live here, and a kernel without a frame has none
  int shared_bytes = 0;
  bool allocates = false;       // takes memory from the heap of the GPU while it runs
  std::vector<int> parameters;  // bytes of each, in order
};
CubinResources read_cubin(const std::string& cubin);
// Bytes of each parameter of the kernel in a library for a CPU (tile_host/entry.h); none where it does not say.
std::optional<std::vector<int>> library_parameters(const std::string& library);

// Lets a kernel for sm_90 find its own code, as kernels/cute/hopper/code.h has it: of two reads of the 64 bits of the
// global timer in its function the first becomes the address of the next instruction, the other that of the function's
// end. Returns whether there were two; if not, nothing is changed.
bool name_code_range(std::string& cubin);

}  // namespace hypermla
