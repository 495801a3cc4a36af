// The compilers, found at run time. None is needed to run what a cache already holds.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "hypermla/base/fields.h"

namespace hypermla {

struct Toolchain {
  // Root of the CUDA wheels or toolkit: {bin/tileiras, bin/ptxas, lib/libnvrtc.so.13, include}. Empty: not found.
  std::filesystem::path cuda_root;
  // C++20 compiler for kernels on the CPU. Empty: not found.
  std::filesystem::path cxx;
  // Where CUDA was looked for, for the sentence that says it is missing.
  std::vector<std::filesystem::path> searched;

  // The first root of `cuda_roots` that holds NVRTC and tileiras; the first of `compilers` that is on `path`.
  static Toolchain find(const std::vector<std::filesystem::path>& cuda_roots, const std::vector<std::string>& compilers,
                        const std::string& path);
};

// What was found, with versions: for `hypermla device` and for the entry's report.
Json describe(const Toolchain& toolchain);

}  // namespace hypermla
