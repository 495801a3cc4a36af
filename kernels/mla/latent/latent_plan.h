// What follows from an attention in the latent space, for every version.
//
//   qc [B,H,S,K], qpe [B,H,S,P], z [B,T,K], kpe [B,T,P] -> o [B,H,S,K], lse [B,H,S]
// tokens first: [B,S,H,..] instead of [B,H,S,..]; fused: q [B,H,S,K+P], cache [B,T,K+P]; paged: the caches are [pages,
// page, ..], and block_table [B, ceil(T/page)];
//   in FP8: cache [pages, page, bytes of a token / 2], two bytes an element, and of 576 bytes cache_scale [1]; with
//   queries in e4m3, too, these have half as many columns, and there is q_scale [1]
//   ragged: lengths [B], each at most T; ragged, causal and after > 0: after_lengths [B], each at most `after`
#pragma once

#include "mla/attention_plan.h"
#include "mla/latent/latent.h"

namespace hypermla {

// What belongs to the cache of a server: a version without it offers plain attention over dense tensors.
inline const std::vector<std::string_view> kLatentServing = {
    "ragged", "page", "pages", "fused", "scale", "lse_base2", "split", "after", "tokens_first", "fp8", "shards"};

inline float score_scale(const LatentProblem& at) { return at.scale > 0 ? at.scale : softmax_scale(at.d, at.p); }
inline bool reads_after_lengths(const LatentProblem& at) { return at.ragged && at.causal && at.after > 0; }
// The cache is one tensor, latent and RoPE columns side by side; 16-bit elements of a token in it.
inline bool has_one_cache(const LatentProblem& at) { return at.fused || at.fp8; }
inline int cache_width(const LatentProblem& at) { return at.fp8 ? at.fp8 / 2 : at.k + at.p; }
inline int table_width(const LatentProblem& at) { return int(ceil_div(at.t, std::max(at.page, 1))); }
inline std::int64_t pool_pages(const LatentProblem& at) {
  return at.pages ? at.pages : std::int64_t{at.b} * table_width(at);
}
// The lengths of the requests that checks and measurements run on.
std::vector<int> lengths_of(const LatentProblem& at);

// With any extents that are powers of two; a version may have closer limits.
void validate_latent(const LatentProblem& at);
std::vector<TensorSpec> tensors_of(const LatentProblem& at, bool fp8_queries = false);
InputRules input_rules_of(const LatentProblem& at, std::uint64_t seed, bool fp8_queries = false);
ReferenceShape reference_shape_of(
    const LatentProblem& at);  // a group is one head of one request, or tokens first one request
ReferenceOutputs reference_of(const LatentProblem& at, std::int64_t group, const InputReader& input,
                              bool fp8_queries = false);
// Tokens that a query of a request of so many sees on average, by the mask and what lies behind them (`after`).
double mean_tokens_seen(const LatentProblem& at, int tokens);
Cost latent_cost(const LatentProblem& at, bool fp8_queries = false);
// Executed by tiles of Bm rows x Bn tokens: padded rows and tokens, and the scores once more for every Bv of the value
// columns.
Cost latent_executed(const LatentProblem& at, int Bm, int Bn, int Bv);

}  // namespace hypermla
