// What follows from an attention over decompressed keys and values, for every version.
//
//   q [B,H,S,D], qpe [B,H,S,P], k and v [B,H,T,D], kpe [B,T,P] -> o [B,H,S,D], lse [B,H,S]
//
// With prefixes G stands for B in k, v and kpe, and int32 `prefix` [B] names each request's. Ragged: int32 `lengths`
// [B] or [G]; with prefixes, causal and after > 0 also `after_lengths` [B], each at most `after`. Parts: o
// [parts,B,H,S,D] and lse.
#pragma once

#include "mla/attention_plan.h"
#include "mla/decompressed/decompressed.h"

namespace hypermla {

// Sets of keys and values.
inline int token_stores(const DecompressedProblem& at) { return at.prefixes ? at.prefixes : at.b; }
inline bool reads_after_lengths(const DecompressedProblem& at) {
  return at.prefixes && at.ragged && at.causal && at.after > 0;
}

std::vector<TensorSpec> tensors_of(const DecompressedProblem& at);
InputRules input_rules_of(const DecompressedProblem& at, std::uint64_t seed);
ReferenceShape reference_shape_of(const DecompressedProblem& at);  // a group is one head of one request in one part
ReferenceOutputs reference_of(const DecompressedProblem& at, std::int64_t group, const InputReader& input);
// Arithmetic over the tokens that are seen, with prefixes over all; tokens are read once for all requests of a prefix,
// and KPE once for all heads.
Cost decompressed_cost(const DecompressedProblem& at);

}  // namespace hypermla
