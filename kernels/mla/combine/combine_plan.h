// What follows from a merge of latent (M) and decompressed (R) parts, for every version: a kernel of its own, and
// the last stage of every pipeline of the hybrid.
//
//   o_latent [M,B,H,S,K], lse_latent [M,B,H,S], o_new [R,B,H,S,D], lse_new [R,B,H,S], w [H,K,D]
//   -> o [B,H,S,D] (tokens first: [B,S,H,D]), lse [B,H,S]
//
// Parts are normalised, their log-sum-exp is natural and fp32. A row of a part with lse = -inf is empty: what its
// outputs hold must not matter. Without parts of a kind their tensors (and w) are left out.
#pragma once

#include "mla/attention_plan.h"
#include "mla/combine/combine.h"

namespace hypermla {

void validate_combine(const CombineProblem& at);
std::vector<TensorSpec> tensors_of(const CombineProblem& at);
InputRules input_rules_of(const CombineProblem& at, std::uint64_t seed);
ReferenceShape reference_shape_of(
    const CombineProblem& at);  // a group is one head of one request; tokens first: one request
ReferenceOutputs reference_of(const CombineProblem& at, std::int64_t group, const InputReader& input);
Cost combine_cost(const CombineProblem& at);

}  // namespace hypermla
