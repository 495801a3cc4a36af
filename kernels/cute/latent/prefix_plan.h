// MlaDecode with shared prefixes: two attentions of the latent kernels, over the prefixes that requests share, once for
// all queries of a group, and over the tokens that are each request's own; then their merge.
#pragma once

#include "cute/latent/decode_plan.h"
#include "cute/latent/shared_prefixes.h"
#include "hypermla/plan/plan.h"

namespace hypermla::cute {

// `own`: attends where nothing is shared, as without shared_prefixes.
std::unique_ptr<DecodeKernels> with_shared_prefixes(const MlaDecodeOptions& options, std::unique_ptr<LatentDecode> own,
                                                    const Target& target);

// The attention to prefixes as a MlaDecode of its own: a group is a request without a causal mask, whose log-sum-exps
// are in base 2.
MlaDecodeOptions options_of_prefixes(const MlaDecodeOptions& options);

}  // namespace hypermla::cute
