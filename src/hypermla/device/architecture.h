// What the architectures of GPUs differ in, as far as plans and the model of times ask: the one list of them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace hypermla {

struct Architecture {
  std::string_view name = {};  // "sm_90"
  int processors = 0;          // SMs of a typical GPU, for compilation ahead of time
  int shared_kb = 0;           // shared memory that a block may have
  bool tma = false;            // copies tiles by the Tensor Memory Accelerator
  bool runs_cute = false;      // the kernels in CUDA C++ are written for it

  // Datacentre GPUs since Hopper: 227 KB of shared memory per block and wgmma or tcgen05.
  bool has_large_blocks() const { return tma && shared_kb >= 227; }
  // RTX 50 and DGX Spark: TMA, but small blocks and no tcgen05.
  bool is_small_blackwell() const { return tma && !has_large_blocks(); }
};

// From the oldest to the newest.
const std::vector<Architecture>& architectures();
// Of one that is not listed, and of a CPU ("x86-64-v4"): without anything.
Architecture architecture(const std::string& arch);

inline bool is_gpu_arch(const std::string& arch) { return arch.starts_with("sm_"); }

}  // namespace hypermla
