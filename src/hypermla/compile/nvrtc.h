// NVRTC, the compiler library of the CUDA toolkit, found at run time: one translation unit in, device code out.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "hypermla/compile/backends.h"

namespace hypermla {

enum class NvrtcCode { tile_ir, cubin };

struct NvrtcResult {
  std::string code;
  std::string ptx;  // beside a cubin
  std::string log;  // ptxas' remarks too, where an option asks for them
};

// Instantiates input.instance and compiles it with `options` and the include paths of the input and of the toolkit.
// Throws as the backends do.
NvrtcResult nvrtc_compile(const std::filesystem::path& cuda_root, const BackendInput& input, NvrtcCode wanted,
                          std::vector<std::string> options);

}  // namespace hypermla
