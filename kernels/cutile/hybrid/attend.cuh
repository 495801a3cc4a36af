// The two kinds of work of the hybrid, one unit at a time, for kernels whose blocks do either: attention over latent tokens and
// over decompressed tokens, both leaving normalised partial outputs with their log-sum-exp. Online softmax as in FlashAttention
// (arXiv 2205.14135). mla/hybrid/hybrid_plan.h says what the tensors are.
//
// A request's tokens begin wherever its own storage does and are as many as it has, so that what lies behind them is never
// loaded, not even to be masked: a weight of 0 does not make a NaN harmless.
#pragma once

#include "tile.h"

namespace hypermla {

// What all blocks know at run time. `stores` sets of n decompressed tokens: one for each request, or for each prefix.
struct HybridExtents {
  int b, h, s, o, n, prefixes, ragged;
};

// The lengths of a request and where they are; pointers of tensors that a problem does not have are null and not read.
struct HybridLengths {
  const int* __restrict__ latent;  // (B)
  const int* __restrict__ fresh;   // (stores)
  const int* __restrict__ prefix;  // (B)
};

inline int store_of(const HybridExtents& at, const HybridLengths& lengths, int request) {
  if (at.prefixes > 0 && at.n > 0) return lengths.prefix[request];
  return request;
}
inline int latent_length(const HybridExtents& at, const HybridLengths& lengths, int request) {
  if (at.ragged && at.o > 0) return lengths.latent[request];
  return at.o;
}
inline int new_length(const HybridExtents& at, const HybridLengths& lengths, int store) {
  if (at.ragged && at.n > 0) return lengths.fresh[store];
  return at.n;
}

// Below every real score, and finite: a row of masked scores then has weights exp2(-inf - kLowest) = 0, not NaN.
inline constexpr float kLowest = -1e30f;
// Weights below the smallest normal number may become 0; without this every exp2 pays for scaling them up and back.
inline constexpr ct::round_subnormals_to_zero_t kFlush{};

// Bm rows x Bn tokens, Bv value columns of a unit, Bk latent columns of one load for the scores.
struct LatentTiles {
  int Bm, Bn, Bv, Bk;
};

inline int latent_units(const HybridExtents& at, LatentTiles tiles, int k, int heads, int parts) {
  return parts * (at.b * (at.h / heads)) * ((heads * at.s + tiles.Bm - 1) / tiles.Bm) * (k / tiles.Bv);
}

// qc [B,H,S,K], qpe [B,H,S,P], z [B,O,K], kpe [B,O,P] -> o_latent [parts,B,H,S,K], lse_latent [parts,B,H,S].
// All heads read the same latents, so the queries of `heads` heads, a divisor of h, are rows of one matrix: row = head * s +
// query. A unit is one part of the tokens of one request for Bm of these rows and Bv value columns.
template <DType dtype, int K, int P, LatentTiles tiles, bool causal>
inline void attend_latent(const element_t<dtype>* __restrict__ qc_ptr, const element_t<dtype>* __restrict__ qpe_ptr,
                          const element_t<dtype>* __restrict__ z_ptr, const element_t<dtype>* __restrict__ kpe_ptr,
                          element_t<dtype>* __restrict__ o_ptr, float* __restrict__ lse_ptr, HybridLengths lengths,
                          HybridExtents at, float scale, int heads, int parts, int unit) {
  using Element = element_t<dtype>;
  constexpr int Bm = tiles.Bm, Bn = tiles.Bn, Bv = tiles.Bv, Bk = tiles.Bk;
  constexpr auto dyn = ct::dynamic_extent;
  using Rows = ct::tile<float, ct::shape<Bm, 1>>;
  using Ends = ct::tile<int, ct::shape<Bm, 1>>;
  using Scores = ct::tile<float, ct::shape<Bm, Bn>>;

  // Neighbours share the tokens of a request.
  const int rows = heads * at.s, groups = at.b * (at.h / heads), row_blocks = (rows + Bm - 1) / Bm;
  const int columns = unit % (K / Bv), m = unit / (K / Bv) % row_blocks;
  const int group = unit / (K / Bv) / row_blocks % groups, part = unit / (K / Bv) / row_blocks / groups;
  const int request = group / (at.h / heads);
  const int tokens = latent_length(at, lengths, request);
  const int fresh = new_length(at, lengths, store_of(at, lengths, request));
  const unsigned row_count = rows, token_count = tokens;

  ct::extents<unsigned, dyn, dyn, K> row_extents{unsigned(groups), row_count};
  ct::extents<unsigned, dyn, dyn, P> rope_extents{unsigned(groups), row_count};
  ct::extents<unsigned, dyn, dyn, K> part_extents{unsigned(parts * groups), row_count};
  ct::extents<unsigned, dyn, dyn> lse_extents{unsigned(parts * groups), row_count};
  const long long first_token = (long long)request * at.o;
  ct::tensor_span qc_span{ct::assume_aligned<16>(qc_ptr), row_extents};
  ct::tensor_span qpe_span{ct::assume_aligned<16>(qpe_ptr), rope_extents};
  ct::tensor_span z_span{ct::assume_aligned<16>(z_ptr + first_token * K), ct::extents<unsigned, dyn, K>{token_count}};
  ct::tensor_span kpe_span{ct::assume_aligned<16>(kpe_ptr + first_token * P),
                           ct::extents<unsigned, dyn, P>{token_count}};
  ct::tensor_span o_span{ct::assume_aligned<16>(o_ptr), part_extents};
  ct::tensor_span lse_span{ct::assume_aligned<16>(lse_ptr), lse_extents};
  ct::partition_view qc_view{qc_span, ct::shape<1, Bm, K>{}};
  ct::partition_view qpe_view{qpe_span, ct::shape<1, Bm, P>{}};
  ct::partition_view key_view{z_span, ct::shape<Bn, Bk>{}};
  ct::partition_view value_view{z_span, ct::shape<Bn, Bv>{}};
  ct::partition_view kpe_view{kpe_span, ct::shape<Bn, P>{}};
  ct::partition_view o_view{o_span, ct::shape<1, Bm, Bv>{}};
  ct::partition_view lse_view{lse_span, ct::shape<1, Bm>{}};

  auto qc = ct::reshape(qc_view.load_masked(group, m, 0), ct::shape<Bm, K>{});                    // (Bm, K)
  auto qpe = ct::reshape(qpe_view.load_masked(group, m, 0), ct::shape<Bm, P>{});                  // (Bm, P)
  auto row_max = ct::full<Rows>(kLowest);  // (Bm, 1), in units of log2
  auto row_sum = ct::zeros<Rows>();                                                               // (Bm, 1)
  auto acc = ct::zeros<ct::tile<float, ct::shape<Bm, Bv>>>();                                     // (Bm, Bv)
  const float scale_log2 = scale * kLog2e;

  // Query i sees the latent tokens below `tokens`, and when causal below first_end + i. They come first in the sequence, or
  // behind a shared prefix. A block that reaches over several heads holds every query.
  const int first_end = at.prefixes > 0 ? tokens - at.s + 1 : tokens + fresh - at.s + 1;
  const int first_row = m * Bm;
  const int first_query = first_row % at.s + Bm <= at.s ? first_row % at.s : 0;
  const int last_query = first_row % at.s + Bm <= at.s ? first_query + Bm - 1 : at.s - 1;
  const int seen_by_all = causal && first_end + first_query < tokens ? first_end + first_query : tokens;
  const int seen_by_any = causal && first_end + last_query < tokens ? first_end + last_query : tokens;
  const int whole_tiles = seen_by_all > 0 ? seen_by_all / Bn : 0;
  const int tiles_seen = seen_by_any > 0 ? (seen_by_any + Bn - 1) / Bn : 0;
  const int tiles_of_part = ((tokens + Bn - 1) / Bn + parts - 1) / parts;
  const int begin_tile = part * tiles_of_part;
  const int end_tile = begin_tile + tiles_of_part < tiles_seen ? begin_tile + tiles_of_part : tiles_seen;

  for (auto j : ct::irange(begin_tile, end_tile)) {
    auto kpe = kpe_view.load_masked(j, 0);                                                        // (Bn, P)
    auto scores = ct::mma(qpe, ct::transpose(kpe), ct::zeros<Scores>());                          // (Bm, Bn)
    for (auto c : ct::irange(0, K / Bk)) {
      auto key = key_view.load_masked(j, c);                                                      // (Bn, Bk)
      auto query = ct::extract(qc, ct::shape<Bm, Bk>{}, 0, c);                                    // (Bm, Bk)
      scores = ct::mma(query, ct::transpose(key), scores);                                        // (Bm, Bn)
    }
    auto value = value_view.load_masked(j, columns);                                              // (Bn, Bv)
    if (j >= whole_tiles) {
      auto token = ct::reshape(ct::iota<ct::tile<int, ct::shape<Bn>>>(), ct::shape<1, Bn>{}) + j * Bn;  // (1, Bn)
      auto row = ct::reshape(ct::iota<ct::tile<int, ct::shape<Bm>>>(), ct::shape<Bm, 1>{}) + first_row;  // (Bm, 1)
      auto end = causal ? ct::min(row % at.s + first_end, ct::full<Ends>(tokens)) : ct::full<Ends>(tokens);  // (Bm, 1)
      scores = ct::select(token < end, scores, ct::full<Scores>(-kInfinity));                     // (Bm, Bn)
    }
    auto new_max = ct::max(row_max, ct::reduce_max(scores, ct::integral_constant<1>{}) * scale_log2);  // (Bm, 1)
    auto weights = ct::exp2(scores * scale_log2 - new_max, kFlush);                               // (Bm, Bn)
    auto rescale = ct::exp2(row_max - new_max, kFlush);                                           // (Bm, 1)
    row_sum = row_sum * rescale + ct::sum(weights, ct::integral_constant<1>{});                   // (Bm, 1)
    acc = ct::mma(ct::element_cast<Element>(weights), value, acc * rescale);                      // (Bm, Bv)
    row_max = new_max;                                                                            // (Bm, 1)
  }

  auto divisor = ct::select(row_sum == 0.0f, ct::full<Rows>(1.0f), row_sum);                      // (Bm, 1)
  auto o = ct::element_cast<Element>(acc * (1.0f / divisor));                                     // (Bm, Bv)
  o_view.store_masked(ct::reshape(o, ct::shape<1, Bm, Bv>{}), part * groups + group, m, columns);
  if (columns == 0) {
    auto lse = (row_max + ct::log2(row_sum)) * kLn2;                                              // (Bm, 1)
    lse_view.store_masked(ct::reshape(lse, ct::shape<1, Bm>{}), part * groups + group, m);
  }
}

// Rows = Bs queries of each of Bb requests (1 unless prefixes are shared) x Bn tokens.
struct DecompressedTiles {
  int Bb, Bs, Bn;
};

inline int decompressed_units(const HybridExtents& at, DecompressedTiles tiles, int parts) {
  return parts * at.h * ((at.b + tiles.Bb - 1) / tiles.Bb) * ((at.s + tiles.Bs - 1) / tiles.Bs);
}

// q [B,H,S,D], qpe [B,H,S,P], k and v [G,H,N,D], kpe [G,N,P] -> o_new [parts,B,H,S,D], lse_new [parts,B,H,S].
// A unit is one part of the tokens for Bs queries of one head of Bb requests. Where these have different prefixes all are
// walked over and rows see their own only: requests that are sorted by prefix cost no extra.
template <DType dtype, int D, int P, DecompressedTiles tiles, bool causal>
inline void attend_decompressed(const element_t<dtype>* __restrict__ q_ptr,
                                const element_t<dtype>* __restrict__ qpe_ptr,
                                const element_t<dtype>* __restrict__ k_ptr, const element_t<dtype>* __restrict__ v_ptr,
                                const element_t<dtype>* __restrict__ kpe_ptr, element_t<dtype>* __restrict__ o_ptr,
                                float* __restrict__ lse_ptr, HybridLengths lengths, HybridExtents at, float scale,
                                int parts, int unit) {
  using Element = element_t<dtype>;
  constexpr int Bb = tiles.Bb, Bs = tiles.Bs, Bm = Bb * Bs, Bn = tiles.Bn;
  constexpr auto dyn = ct::dynamic_extent;
  using Rows = ct::tile<float, ct::shape<Bm, 1>>;
  using Ends = ct::tile<int, ct::shape<Bm, 1>>;
  using Scores = ct::tile<float, ct::shape<Bm, Bn>>;

  // Neighbours share the tokens of a prefix.
  const int query_blocks = (at.s + Bs - 1) / Bs, request_blocks = (at.b + Bb - 1) / Bb;
  const int queries = unit % query_blocks, requests = unit / query_blocks % request_blocks;
  const int head = unit / query_blocks / request_blocks % at.h, part = unit / query_blocks / request_blocks / at.h;
  const unsigned B = at.b, H = at.h, S = at.s;

  ct::extents<unsigned, dyn, dyn, dyn, D> row_extents{B, H, S};
  ct::extents<unsigned, dyn, dyn, dyn, dyn, D> part_extents{unsigned(parts), B, H, S};
  ct::extents<unsigned, dyn, dyn, dyn, dyn> lse_extents{unsigned(parts), B, H, S};
  ct::partition_view q_view{ct::tensor_span{ct::assume_aligned<16>(q_ptr), row_extents}, ct::shape<Bb, 1, Bs, D>{}};
  ct::partition_view qpe_view{
      ct::tensor_span{ct::assume_aligned<16>(qpe_ptr), ct::extents<unsigned, dyn, dyn, dyn, P>{B, H, S}},
      ct::shape<Bb, 1, Bs, P>{}};
  ct::partition_view o_view{ct::tensor_span{ct::assume_aligned<16>(o_ptr), part_extents}, ct::shape<1, Bb, 1, Bs, D>{}};
  ct::partition_view lse_view{ct::tensor_span{ct::assume_aligned<16>(lse_ptr), lse_extents}, ct::shape<1, Bb, 1, Bs>{}};

  auto q = ct::reshape(q_view.load_masked(requests, head, queries, 0), ct::shape<Bm, D>{});       // (Bm, D)
  auto qpe = ct::reshape(qpe_view.load_masked(requests, head, queries, 0), ct::shape<Bm, P>{});   // (Bm, P)
  auto row_max = ct::full<Rows>(kLowest);  // (Bm, 1), in units of log2
  auto row_sum = ct::zeros<Rows>();                                                               // (Bm, 1)
  auto acc = ct::zeros<ct::tile<float, ct::shape<Bm, D>>>();                                      // (Bm, D)
  const float scale_log2 = scale * kLog2e;

  // The stores of the requests, and where their queries' sight ends: query i sees the decompressed tokens of its store, and
  // when causal below first_end + i. They come last in the sequence, or before `latent` tokens of the request.
  const int first_request = requests * Bb, first_query = queries * Bs;
  int first_store = store_of(at, lengths, first_request), last_store = first_store;
  int least_behind = at.prefixes > 0 ? latent_length(at, lengths, first_request) : 0;  // tokens behind the store
  auto row_store = ct::full<Ends>(first_store), row_behind = ct::full<Ends>(least_behind);        // (Bm, 1)
  auto row = ct::reshape(ct::iota<ct::tile<int, ct::shape<Bm>>>(), ct::shape<Bm, 1>{});           // (Bm, 1)
  if constexpr (Bb > 1) {
    const int end_request = first_request + Bb < at.b ? first_request + Bb : at.b;
    for (auto request : ct::irange(first_request + 1, end_request)) {
      const int store = store_of(at, lengths, request), behind = latent_length(at, lengths, request);
      first_store = store < first_store ? store : first_store;
      last_store = store > last_store ? store : last_store;
      least_behind = behind < least_behind ? behind : least_behind;
      row_store = ct::select(row / Bs == request - first_request, ct::full<Ends>(store), row_store);  // (Bm, 1)
      row_behind = ct::select(row / Bs == request - first_request, ct::full<Ends>(behind), row_behind);  // (Bm, 1)
    }
  }

  for (auto store : ct::irange(first_store, last_store + 1)) {
    const int tokens = new_length(at, lengths, store);
    const long long first_token = (long long)store * at.n, first_head_token = ((long long)store * at.h + head) * at.n;
    ct::extents<unsigned, dyn, D> token_extents{unsigned(tokens)};
    ct::partition_view k_view{ct::tensor_span{ct::assume_aligned<16>(k_ptr + first_head_token * D), token_extents},
                              ct::shape<Bn, D>{}};
    ct::partition_view v_view{ct::tensor_span{ct::assume_aligned<16>(v_ptr + first_head_token * D), token_extents},
                              ct::shape<Bn, D>{}};
    ct::extents<unsigned, dyn, P> rope_extents{unsigned(tokens)};
    ct::partition_view kpe_view{ct::tensor_span{ct::assume_aligned<16>(kpe_ptr + first_token * P), rope_extents},
                                ct::shape<Bn, P>{}};

    const int first_end = tokens + least_behind - at.s + 1;
    const int seen_by_all = causal && first_end + first_query < tokens ? first_end + first_query : tokens;
    const int whole_tiles = first_store == last_store && seen_by_all > 0 ? seen_by_all / Bn : 0;
    // Of one request the tiles that no query sees are left out, too.
    const int last_end = first_end + (first_query + Bs < at.s ? first_query + Bs : at.s) - 1;
    const int seen_by_any = causal && Bb == 1 && last_end < tokens ? last_end : tokens;
    const int tiles_seen = seen_by_any > 0 ? (seen_by_any + Bn - 1) / Bn : 0;
    const int tiles_of_part = ((tokens + Bn - 1) / Bn + parts - 1) / parts;
    const int begin_tile = part * tiles_of_part;
    const int end_tile = begin_tile + tiles_of_part < tiles_seen ? begin_tile + tiles_of_part : tiles_seen;

    for (auto j : ct::irange(begin_tile, end_tile)) {
      auto k = k_view.load_masked(j, 0);                                                          // (Bn, D)
      auto kpe = kpe_view.load_masked(j, 0);                                                      // (Bn, P)
      auto v = v_view.load_masked(j, 0);                                                          // (Bn, D)
      auto scores = ct::mma(q, ct::transpose(k), ct::zeros<Scores>());                            // (Bm, Bn)
      scores = ct::mma(qpe, ct::transpose(kpe), scores);                                          // (Bm, Bn)
      if (j >= whole_tiles) {
        auto token = ct::reshape(ct::iota<ct::tile<int, ct::shape<Bn>>>(), ct::shape<1, Bn>{}) + j * Bn;  // (1, Bn)
        auto end = ct::full<Ends>(tokens);                                                        // (Bm, 1)
        if constexpr (causal) end = ct::min(end, row % Bs + row_behind + (tokens - at.s + 1 + first_query));  // (Bm, 1)
        if constexpr (Bb > 1) end = ct::select(row_store == store, end, ct::zeros<Ends>());       // (Bm, 1)
        scores = ct::select(token < end, scores, ct::full<Scores>(-kInfinity));                   // (Bm, Bn)
      }
      auto new_max = ct::max(row_max, ct::reduce_max(scores, ct::integral_constant<1>{}) * scale_log2);  // (Bm, 1)
      auto weights = ct::exp2(scores * scale_log2 - new_max, kFlush);                             // (Bm, Bn)
      auto rescale = ct::exp2(row_max - new_max, kFlush);                                         // (Bm, 1)
      row_sum = row_sum * rescale + ct::sum(weights, ct::integral_constant<1>{});                 // (Bm, 1)
      acc = ct::mma(ct::element_cast<Element>(weights), v, acc * rescale);                        // (Bm, D)
      row_max = new_max;                                                                          // (Bm, 1)
    }
  }

  auto divisor = ct::select(row_sum == 0.0f, ct::full<Rows>(1.0f), row_sum);                      // (Bm, 1)
  auto o = ct::element_cast<Element>(acc * (1.0f / divisor));                                     // (Bm, D)
  auto lse = (row_max + ct::log2(row_sum)) * kLn2;                                                // (Bm, 1)
  o_view.store_masked(ct::reshape(o, ct::shape<1, Bb, 1, Bs, D>{}), part, requests, head, queries, 0);
  lse_view.store_masked(ct::reshape(lse, ct::shape<1, Bb, 1, Bs>{}), part, requests, head, queries);
}

}  // namespace hypermla
