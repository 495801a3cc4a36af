// The kernels behind MlaCacheOps (include/hypermla/mla_cache.h).
#pragma once

#include <memory>

#include "hypermla/compile/compiler.h"
#include "hypermla/device/device.h"
#include "hypermla/mla_cache.h"

namespace hypermla {

// Each takes what was found to be valid, with work in it.
class CacheKernels {
 public:
  virtual ~CacheKernels() = default;
  virtual void merge_states(const MlaCacheOps::Merge& with, StreamHandle stream) = 0;
  virtual void append(const MlaCacheOps::Append& with, StreamHandle stream) = 0;
  virtual void decompress_prefix(const MlaCacheOps::Decompress& with, StreamHandle stream) = 0;
  virtual void split_prefixes(const MlaCacheOps::Split& with, StreamHandle stream) = 0;
};

// Throw Error for arguments that no device takes.
void validate(const MlaCacheOps::Merge& with);
void validate(const MlaCacheOps::Append& with);
void validate(const MlaCacheOps::Decompress& with);
void validate(const MlaCacheOps::Split& with);

// On a CPU, in fp32 and without tiles: what the kernels are checked against.
std::unique_ptr<CacheKernels> make_cache_reference(DType dtype, const Device& device);
// On a GPU, compiled and loaded (kernels/cute/cache/cache_plan.cpp).
std::unique_ptr<CacheKernels> make_cache_kernels(DType dtype, Compiler& compiler, Device& device);

// What is compiled for it: merge_states, append in each form of a cache, the two kernels of split_prefixes, and
// decompress_prefix, for Hopper or portable.
std::vector<KernelSource> cache_sources(DType dtype, const std::string& arch);

}  // namespace hypermla
