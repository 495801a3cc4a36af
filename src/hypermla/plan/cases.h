// The problems on which a kernel is checked: edges of every dimension, for any plan with the usual field names.
#pragma once

#include <vector>

#include "hypermla/plan/registry.h"

namespace hypermla {

// Small problems for correctness: s from 1 to 129, ragged t, h from 1 to 128, every dtype, causal or not.
std::vector<Json> correctness_cases(KernelPlan& plan);

// Typical problems of deployments, for compilation ahead of time: s = 1, 16, 32, 64, 128 at b = 32, t = 4096.
std::vector<Json> representative_problems(KernelPlan& plan);

// Whether `hypermla verify` runs a case with every candidate tiling, not only with the default: the ragged ones in
// bfloat16.
bool tries_all_tilings(const Json& correctness_case);

// The kernels of a plan with its present problem: with the present tilings, or also with every candidate.
std::vector<KernelSource> kernel_sources(const KernelPlan& plan, bool candidates);
// The kernels of its prefill() for a type, causal or not.
std::vector<KernelSource> prefill_sources(const KernelPlan& plan, DType dtype);
// What MlaDecode compiles of a plan: for any number of heads, queries and requests, both types and all pages; cut at
// every 512 tokens times a power of two, or freely; dense, or sparse with both forms of the cache; in bfloat16 and cut
// freely also for GPUs that share contexts, and with shared prefixes. Dense attention is causal here, as all
// decoding is except for drafters without a causal mask.
std::vector<KernelSource> decode_sources(const KernelPlan& plan);
// The kernels of all that `hypermla verify` runs of a version, each once: the correctness cases and those of
// plan/decode_cases.h.
std::vector<KernelSource> verification_sources(const KernelEntry& entry, const Target& target);
// 32 hex digits over the launches of its correctness cases on a GPU such as an H200: tilings, grids, shapes and sizes
// of arguments. What arguments hold is not in it, nor are the steps of MlaDecode.
std::string verification_launches(const KernelEntry& entry);

}  // namespace hypermla
