// What follows from an output decompression, for every version.
//
//   o_latent [B,H,S,K], w [H,K,D] -> o [B,H,S,D]
#pragma once

#include "mla/attention_plan.h"
#include "mla/output_decompression/output_decompression.h"

namespace hypermla {

std::vector<TensorSpec> tensors_of(const OutputDecompressionProblem& at);
inline InputRules input_rules_of(const OutputDecompressionProblem&, std::uint64_t) { return {}; }
ReferenceShape reference_shape_of(const OutputDecompressionProblem& at);  // a group is one head of one batch element
ReferenceOutputs reference_of(const OutputDecompressionProblem& at, std::int64_t group, const InputReader& input);
Cost output_decompression_cost(const OutputDecompressionProblem& at);

}  // namespace hypermla
