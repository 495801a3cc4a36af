// What follows from a hybrid, for every version and language.
//
// Of the t tokens of a request n are attended to decompressed and o = t - n in the latent space, in one softmax:
//
//   prefixes = 0   the newest n tokens are decompressed, each request has its own:
//                  sequence = o latent, then n decompressed
//   prefixes = G   the first n tokens are decompressed and stored once for each of G prefixes:
//                  sequence = the n tokens of the prefix that `prefix` names, then o latent ones of its own
//
//   q [B,H,S,D], qc [B,H,S,K], qpe [B,H,S,P], z [B,O,K], kpe [B,O,P], k and v [G,H,N,D], kpe_new [G,N,P], w [H,K,D]
//   -> o [B,H,S,D] (tokens first: [B,S,H,D]), lse [B,H,S]                        without prefixes B stands for G
//
// Score = (qc z^T + qpe kpe^T) scale for a latent token, (q k^T + qpe kpe_new^T) scale for a decompressed one; value =
// z w or v. Causal: query i sees the first L - s + i + 1 tokens of a sequence of L. Ragged: int32 `lengths` [B] are the
// latent tokens of the requests, `new_lengths` [G] the tokens of the stores; both may be 0. Without latent or without
// decompressed tokens their tensors are left out: (qc, z, kpe, w, lengths) or (q, k, v, kpe_new, new_lengths, prefix).
//
// Sources: DeepSeek-V2, arXiv 2405.04434, section 2.1; the shared prefix: TyphoonMLA, arXiv 2509.21081.
#pragma once

#include "mla/attention_plan.h"
#include "mla/hybrid/hybrid.h"

namespace hypermla {

// FLOP per byte at which the arithmetic and the traffic of an H200 take equally long: 725 TFLOP/s sustained matrix
// products over 4.58 TB/s (docs/devices/nvidia-h200.md).
inline constexpr double kHybridRidge = 158;

// Values of n that KernelPlan::choose() settles: by the times that the plan itself predicts, and by the roofline.
inline constexpr int kByModel = -1, kByRoofline = -2;

// The decompressed tokens of a request: n. For n < 0 KernelPlan::choose() has put a number in its place. Where choose()
// was not called, as for a plan that is only described, it is the n of perfect overlap.
int decompressed_tokens(const HybridProblem& at);
inline int latent_tokens(const HybridProblem& at) { return at.t - decompressed_tokens(at); }
inline bool has_both_parts(const HybridProblem& at) { return latent_tokens(at) > 0 && decompressed_tokens(at) > 0; }
// How many sets of n decompressed tokens there are.
inline int token_stores(const HybridProblem& at) { return at.prefixes ? at.prefixes : at.b; }

// Whether every extent is in its range, so that it can be divided by: a default tiling needs that, before validate()
// says what is wrong.
bool has_extents(const HybridProblem& at);
void validate_hybrid(const HybridProblem& at);

// What checks and measurements run on; known to the plan, so that costs are those of what is run.
struct HybridSample {
  std::vector<int> lengths;               // of every request, in the latent part
  std::vector<int> decompressed_lengths;  // of every store
  std::vector<int> store;                 // of every request
};
HybridSample hybrid_sample(const HybridProblem& at);

std::vector<TensorSpec> tensors_of(const HybridProblem& at);
InputRules input_rules_of(const HybridProblem& at, std::uint64_t seed);
// A group is one head of one request; with tokens first one request, for its outputs lie together.
ReferenceShape reference_shape_of(const HybridProblem& at);
ReferenceOutputs reference_of(const HybridProblem& at, std::int64_t group, const InputReader& input);

// (query, token) pairs of one head, over all requests.
struct HybridPairs {
  double latent = 0, decompressed = 0;
};
HybridPairs hybrid_pairs(const HybridProblem& at);

// Of one path alone, as a kernel of its own that writes O_latent or O_new and the log-sum-exp. K, V, KPE count once per
// store.
Cost hybrid_latent_cost(const HybridProblem& at);
Cost hybrid_decompressed_cost(const HybridProblem& at);
// Of both in one kernel, which reads QPE once. Without mask, lengths and prefixes: mla_var6_plus_cost() and the
// log-sum-exps.
Cost hybrid_attention_cost(const HybridProblem& at);
// Of the whole problem, O_latent and O_new staying where they are made: the floor of every version.
Cost hybrid_cost(const HybridProblem& at);

}  // namespace hypermla
