// Attention over latent tokens and over decompressed tokens, one unit of work at a time, both leaving normalised
// partial outputs with their log-sum-exp: the two paths of the hybrid, and the kernels that are one of them. Online
// softmax as in FlashAttention (arXiv 2205.14135). mla/hybrid/hybrid_plan.h says what the tensors are.
//
// A request's tokens begin wherever its own storage does and are as many as it has, so that what lies behind them is
// never loaded, not even to be masked: a weight of 0 does not make a NaN harmless. `dense`: there are neither lengths
// nor prefixes, and the tokens of all requests are one tensor. On sm_90 that takes 9 instructions out of the 607 of
// flash_mla's loop, which a base pointer for every request puts there.
//
// Tiles that no query of a unit sees are not visited, and only those at the causal diagonal and at the end of the
// tokens are masked. That is a branch inside one loop, not a second loop: on sm_90 a loop per kind of tile costs 4 to
// 15 %, because each holds load buffers of its own. Steps are written out, not put into lambdas: captured views lose
// their aliasing guarantee and with it TMA. A row that sees no token gets o = 0 and lse = -inf.
#pragma once

#include "cutile/weighted_rows.cuh"

namespace hypermla {

// What all blocks know at run time. `stores` sets of n decompressed tokens: one for each request, or for each prefix.
struct HybridExtents {
  int b, h, s, o, n, prefixes, ragged;
};

// The lengths of a request and where they are; pointers of tensors that a problem does not have are null, and not read.
struct HybridLengths {
  const int* __restrict__ latent;        // (B)
  const int* __restrict__ decompressed;  // (stores)
  const int* __restrict__ prefix;        // (B)
};

inline int store_of(const HybridExtents& at, const HybridLengths& lengths, int request) {
  if (at.prefixes > 0 && at.n > 0) return lengths.prefix[request];
  return request;
}
inline int latent_length(const HybridExtents& at, const HybridLengths& lengths, int request) {
  if (at.ragged && at.o > 0) return lengths.latent[request];
  return at.o;
}
inline int decompressed_length(const HybridExtents& at, const HybridLengths& lengths, int store) {
  if (at.ragged && at.n > 0) return lengths.decompressed[store];
  return at.n;
}

// Bn tokens x N of their W columns at a time: of `outer` tensors of `count` tokens, or of one that begins at `first`.
template <bool dense, int Bn, int N, int W, class Element>
inline auto token_view(const Element* __restrict__ tokens, long long first, unsigned outer, unsigned count) {
  if constexpr (dense) {
    ct::extents<unsigned, ct::dynamic_extent, ct::dynamic_extent, W> extents{outer, count};
    return ct::partition_view{ct::tensor_span{ct::assume_aligned<16>(tokens), extents}, ct::shape<1, Bn, N>{}};
  } else {
    ct::extents<unsigned, ct::dynamic_extent, W> extents{count};
    return ct::partition_view{ct::tensor_span{ct::assume_aligned<16>(tokens + first * W), extents}, ct::shape<Bn, N>{}};
  }
}
template <bool dense, int Bn, int N, class View>
inline auto load_tokens(View view, int outer, int j, int columns) {  // (Bn, N)
  if constexpr (dense)
    return ct::reshape(view.load_masked(outer, j, columns), ct::shape<Bn, N>{});
  else
    return view.load_masked(j, columns);
}

// Bm rows x Bn tokens, Bv value columns of a unit, Bk latent columns of one load for the scores.
struct LatentTiles {
  int Bm, Bn, Bv, Bk;
};

// The latent path: all heads read the same latents, so the queries of `heads` heads, a divisor of h, are rows of one
// matrix, of which there are `groups`: row = head * s + query.
struct LatentWork {
  int heads, groups, parts;
};
// One part of the tokens of a request for Bm rows of a group and Bv value columns.
struct LatentUnit {
  int request, group, rows, columns, part;
};

inline LatentWork latent_work(const HybridExtents& at, int heads, int parts) {
  return {heads, at.b * (at.h / heads), parts};
}
inline int latent_units(const HybridExtents& at, const LatentWork& of, LatentTiles tiles, int k) {
  return of.parts * of.groups * ((of.heads * at.s + tiles.Bm - 1) / tiles.Bm) * (k / tiles.Bv);
}
// Neighbours share the tokens of a request.
inline LatentUnit latent_unit(const HybridExtents& at, const LatentWork& of, LatentTiles tiles, int k, int unit) {
  const int row_blocks = (of.heads * at.s + tiles.Bm - 1) / tiles.Bm, columns = k / tiles.Bv;
  const int group = unit / columns / row_blocks % of.groups;
  return {group / (at.h / of.heads), group, unit / columns % row_blocks, unit % columns,
          unit / columns / row_blocks / of.groups};
}

// qc [B,H,S,K], qpe [B,H,S,P], z [B,O,K], kpe [B,O,P] -> o_latent [parts,B,H,S,K], lse_latent [parts,B,H,S]. The
// queries stay in shared memory; the latents come in chunks of Bk columns for the scores and once more as values.
template <DType dtype, int K, int P, LatentTiles tiles, bool causal, bool dense = false>
inline void attend_latent(const element_t<dtype>* __restrict__ qc_ptr, const element_t<dtype>* __restrict__ qpe_ptr,
                          const element_t<dtype>* __restrict__ z_ptr, const element_t<dtype>* __restrict__ kpe_ptr,
                          element_t<dtype>* __restrict__ o_ptr, float* __restrict__ lse_ptr, HybridLengths lengths,
                          HybridExtents at, float scale, LatentWork of, LatentUnit unit) {
  using Element = element_t<dtype>;
  constexpr int Bm = tiles.Bm, Bn = tiles.Bn, Bv = tiles.Bv, Bk = tiles.Bk;
  constexpr auto dyn = ct::dynamic_extent;
  using Ends = ct::tile<int, ct::shape<Bm, 1>>;
  using Scores = ct::tile<float, ct::shape<Bm, Bn>>;

  const int request = unit.request, group = unit.group, m = unit.rows, columns = unit.columns, part = unit.part;
  const int groups = of.groups, parts = of.parts;
  const int tokens = latent_length(at, lengths, request);
  const int decompressed = decompressed_length(at, lengths, store_of(at, lengths, request));
  const unsigned row_count = of.heads * at.s, token_count = tokens;

  ct::extents<unsigned, dyn, dyn, K> row_extents{unsigned(groups), row_count};
  ct::extents<unsigned, dyn, dyn, P> rope_extents{unsigned(groups), row_count};
  ct::extents<unsigned, dyn, dyn, K> part_extents{unsigned(parts * groups), row_count};
  ct::extents<unsigned, dyn, dyn> lse_extents{unsigned(parts * groups), row_count};
  const long long first_token = (long long)request * at.o;
  ct::tensor_span qc_span{ct::assume_aligned<16>(qc_ptr), row_extents};
  ct::tensor_span qpe_span{ct::assume_aligned<16>(qpe_ptr), rope_extents};
  ct::tensor_span o_span{ct::assume_aligned<16>(o_ptr), part_extents};
  ct::tensor_span lse_span{ct::assume_aligned<16>(lse_ptr), lse_extents};
  ct::partition_view qc_view{qc_span, ct::shape<1, Bm, K>{}};
  ct::partition_view qpe_view{qpe_span, ct::shape<1, Bm, P>{}};
  auto key_view = token_view<dense, Bn, Bk, K>(z_ptr, first_token, at.b, token_count);
  auto value_view = token_view<dense, Bn, Bv, K>(z_ptr, first_token, at.b, token_count);
  auto kpe_view = token_view<dense, Bn, P, P>(kpe_ptr, first_token, at.b, token_count);
  ct::partition_view o_view{o_span, ct::shape<1, Bm, Bv>{}};
  ct::partition_view lse_view{lse_span, ct::shape<1, Bm>{}};

  auto qc = ct::reshape(qc_view.load_masked(group, m, 0), ct::shape<Bm, K>{});    // (Bm, K)
  auto qpe = ct::reshape(qpe_view.load_masked(group, m, 0), ct::shape<Bm, P>{});  // (Bm, P)
  OnlineSoftmax<Bm, Bv> rows;
  const float scale_log2 = scale * kLog2e;

  // Query i sees the latent tokens below `tokens`, and when causal below first_end + i. They come first in the
  // sequence, or behind a shared prefix. A block that reaches over several heads holds every query.
  const int first_end = at.prefixes > 0 ? tokens - at.s + 1 : tokens + decompressed - at.s + 1;
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
    auto kpe = load_tokens<dense, Bn, P>(kpe_view, request, j, 0);        // (Bn, P)
    auto scores = ct::mma(qpe, ct::transpose(kpe), ct::zeros<Scores>());  // (Bm, Bn)
    for (auto c : ct::irange(0, K / Bk)) {
      auto key = load_tokens<dense, Bn, Bk>(key_view, request, j, c);  // (Bn, Bk)
      auto query = ct::extract(qc, ct::shape<Bm, Bk>{}, 0, c);         // (Bm, Bk)
      scores = ct::mma(query, ct::transpose(key), scores);             // (Bm, Bn)
    }
    auto value = load_tokens<dense, Bn, Bv>(value_view, request, j, columns);  // (Bn, Bv)
    if (j >= whole_tiles) {
      auto token = ct::reshape(ct::iota<ct::tile<int, ct::shape<Bn>>>(), ct::shape<1, Bn>{}) + j * Bn;       // (1, Bn)
      auto row = ct::reshape(ct::iota<ct::tile<int, ct::shape<Bm>>>(), ct::shape<Bm, 1>{}) + first_row;      // (Bm, 1)
      auto end = causal ? ct::min(row % at.s + first_end, ct::full<Ends>(tokens)) : ct::full<Ends>(tokens);  // (Bm, 1)
      scores = ct::select(token < end, scores, ct::full<Scores>(-kInfinity));                                // (Bm, Bn)
    }
    auto weights = rows.weights(scores, scale_log2);  // (Bm, Bn)
    rows.add(ct::element_cast<Element>(weights), value);
  }

  auto o = ct::element_cast<Element>(rows.output());  // (Bm, Bv)
  o_view.store_masked(ct::reshape(o, ct::shape<1, Bm, Bv>{}), part * groups + group, m, columns);
  if (columns == 0) {
    auto lse = rows.lse_log2() * kLn2;  // (Bm, 1)
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

// One part of the tokens for Bs queries of one head of Bb requests.
struct DecompressedUnit {
  int requests, head, queries, part;
};
// Neighbours share the tokens of a prefix.
inline DecompressedUnit decompressed_unit(const HybridExtents& at, DecompressedTiles tiles, int unit) {
  const int query_blocks = (at.s + tiles.Bs - 1) / tiles.Bs, request_blocks = (at.b + tiles.Bb - 1) / tiles.Bb;
  return {unit / query_blocks % request_blocks, unit / query_blocks / request_blocks % at.h, unit % query_blocks,
          unit / query_blocks / request_blocks / at.h};
}

// q [B,H,S,D], qpe [B,H,S,P], k and v [G,H,N,D], kpe [G,N,P] -> o_new [parts,B,H,S,D], lse_new [parts,B,H,S]. Where
// the requests of a unit have different prefixes all of theirs are walked over and rows see their own only: requests
// that are sorted by prefix cost no extra.
template <DType dtype, int D, int P, DecompressedTiles tiles, bool causal, bool dense = false>
inline void attend_decompressed(const element_t<dtype>* __restrict__ q_ptr,
                                const element_t<dtype>* __restrict__ qpe_ptr,
                                const element_t<dtype>* __restrict__ k_ptr, const element_t<dtype>* __restrict__ v_ptr,
                                const element_t<dtype>* __restrict__ kpe_ptr, element_t<dtype>* __restrict__ o_ptr,
                                float* __restrict__ lse_ptr, HybridLengths lengths, HybridExtents at, float scale,
                                int parts, DecompressedUnit unit) {
  using Element = element_t<dtype>;
  constexpr int Bb = tiles.Bb, Bs = tiles.Bs, Bm = Bb * Bs, Bn = tiles.Bn;
  constexpr auto dyn = ct::dynamic_extent;
  using Ends = ct::tile<int, ct::shape<Bm, 1>>;
  using Scores = ct::tile<float, ct::shape<Bm, Bn>>;

  const int requests = unit.requests, head = unit.head, queries = unit.queries, part = unit.part;
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

  auto q = ct::reshape(q_view.load_masked(requests, head, queries, 0), ct::shape<Bm, D>{});      // (Bm, D)
  auto qpe = ct::reshape(qpe_view.load_masked(requests, head, queries, 0), ct::shape<Bm, P>{});  // (Bm, P)
  OnlineSoftmax<Bm, D> rows;
  const float scale_log2 = scale * kLog2e;

  // The stores of the requests, and where their queries' sight ends: query i sees the decompressed tokens of its
  // store, and when causal below first_end + i. They come last in the sequence, or before `latent` tokens of the
  // request.
  const int first_request = requests * Bb, first_query = queries * Bs;
  int first_store = store_of(at, lengths, first_request), last_store = first_store;
  int least_behind = at.prefixes > 0 ? latent_length(at, lengths, first_request) : 0;       // tokens behind the store
  auto row_store = ct::full<Ends>(first_store), row_behind = ct::full<Ends>(least_behind);  // (Bm, 1)
  auto row = ct::reshape(ct::iota<ct::tile<int, ct::shape<Bm>>>(), ct::shape<Bm, 1>{});     // (Bm, 1)
  if constexpr (Bb > 1) {
    const int end_request = first_request + Bb < at.b ? first_request + Bb : at.b;
    for (auto request : ct::irange(first_request + 1, end_request)) {
      const int store = store_of(at, lengths, request), behind = latent_length(at, lengths, request);
      first_store = store < first_store ? store : first_store;
      last_store = store > last_store ? store : last_store;
      least_behind = behind < least_behind ? behind : least_behind;
      row_store = ct::select(row / Bs == request - first_request, ct::full<Ends>(store), row_store);     // (Bm, 1)
      row_behind = ct::select(row / Bs == request - first_request, ct::full<Ends>(behind), row_behind);  // (Bm, 1)
    }
  }

  for (auto store : ct::irange(first_store, last_store + 1)) {
    int tokens = decompressed_length(at, lengths, store);
    if constexpr (Bb > 1) {
      // A store between them that none of the requests has may hold anything: weights of 0 would not hide a NaN.
      const int end_request = first_request + Bb < at.b ? first_request + Bb : at.b;
      int readers = 0;
      for (auto request : ct::irange(first_request, end_request))
        readers += store_of(at, lengths, request) == store ? 1 : 0;
      tokens = readers > 0 ? tokens : 0;
    }
    const int store_head = store * at.h + head;
    auto k_view = token_view<dense, Bn, D, D>(k_ptr, (long long)store_head * at.n, at.b * at.h, tokens);
    auto v_view = token_view<dense, Bn, D, D>(v_ptr, (long long)store_head * at.n, at.b * at.h, tokens);
    auto kpe_view = token_view<dense, Bn, P, P>(kpe_ptr, (long long)store * at.n, at.b, tokens);

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
      auto k = load_tokens<dense, Bn, D>(k_view, store_head, j, 0);     // (Bn, D)
      auto kpe = load_tokens<dense, Bn, P>(kpe_view, store, j, 0);      // (Bn, P)
      auto v = load_tokens<dense, Bn, D>(v_view, store_head, j, 0);     // (Bn, D)
      auto scores = ct::mma(q, ct::transpose(k), ct::zeros<Scores>());  // (Bm, Bn)
      scores = ct::mma(qpe, ct::transpose(kpe), scores);                // (Bm, Bn)
      if (j >= whole_tiles) {
        auto token = ct::reshape(ct::iota<ct::tile<int, ct::shape<Bn>>>(), ct::shape<1, Bn>{}) + j * Bn;      // (1, Bn)
        auto end = ct::full<Ends>(tokens);                                                                    // (Bm, 1)
        if constexpr (causal) end = ct::min(end, row % Bs + row_behind + (tokens - at.s + 1 + first_query));  // (Bm, 1)
        if constexpr (Bb > 1) end = ct::select(row_store == store, end, ct::zeros<Ends>());                   // (Bm, 1)
        scores = ct::select(token < end, scores, ct::full<Scores>(-kInfinity));  // (Bm, Bn)
      }
      auto weights = rows.weights(scores, scale_log2);  // (Bm, Bn)
      rows.add(ct::element_cast<Element>(weights), v);
    }
  }

  auto o = ct::element_cast<Element>(rows.output());  // (Bm, D)
  auto lse = rows.lse_log2() * kLn2;                  // (Bm, 1)
  o_view.store_masked(ct::reshape(o, ct::shape<1, Bb, 1, Bs, D>{}), part, requests, head, queries, 0);
  lse_view.store_masked(ct::reshape(lse, ct::shape<1, Bb, 1, Bs>{}), part, requests, head, queries);
}

}  // namespace hypermla
