// Prefill in CUDA Tile C++ as MlaPrefill calls it: for the GPUs that have no kernels of their own.
#pragma once

#include <memory>

#include "cutile/prefill/prefill.h"
#include "hypermla/plan/plan.h"
#include "hypermla/plan/prefill.h"

namespace hypermla {

std::unique_ptr<PrefillKernels> make_portable_prefill(const MlaPrefillOptions& options, const PrefillTiling& tiling);

}  // namespace hypermla
