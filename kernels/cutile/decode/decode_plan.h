// Decoding in CUDA Tile C++ as MlaDecode calls it: for the GPUs that have no kernels of their own, and for the CPU.
#pragma once

#include <functional>
#include <memory>

#include "hypermla/plan/decode.h"
#include "hypermla/plan/plan.h"

namespace hypermla {

// Null for options that it does not take: caches in FP8, shards, shared prefixes. `seconds`: as
// DecodeKernels::seconds().
std::unique_ptr<DecodeKernels> make_paged_decode(const MlaDecodeOptions& options, const Target& target,
                                                 std::function<double(const DeviceSpec&, int tokens)> seconds);

}  // namespace hypermla
