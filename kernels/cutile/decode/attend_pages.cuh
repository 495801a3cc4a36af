// Decoding over a paged latent cache: attention with absorbed projections (DeepSeek-V2, arXiv 2405.04434) and online
// softmax (FlashAttention, arXiv 2205.14135), parts of the tokens at a time (Flash-Decoding). merge_parts.cuh merges
// them.
//
// A block owns Bq queries of Bh heads of a request, Bv value columns and one part of the request's tokens. The tokens
// of a part follow each other; a request without tokens, or with fewer than its part begins at, leaves o = 0 and lse =
// -inf. What lies behind a request's tokens, in the cache or in its row of the table, is not read.
//
// grid = (ceil(queries / Bq) * ceil(heads / Bh), parts * (512 / Bv), requests)
#pragma once

#include "cutile/weighted_rows.cuh"
#include "decode.h"

namespace hypermla {

// Query tokens and their heads lie anywhere: (tokens, heads, columns) by two strides.
struct DecodeRows {
  long long token, head;
};

// Here and below, rows and tokens that do not exist are loaded as a tile behind the end of a view, which reads as
// zeros. A view of 0 rows would not do: on Hopper it becomes a tensor map without an end.

// Columns 0 to N of Bq query tokens from `token` on, of which there are `left`; zeros behind them.
template <int Bq, int Bh, int N, class Element>
inline auto load_rows(const Element* __restrict__ q, DecodeRows at, int heads, int head_tile, int token,
                      int left) {  // (Bq Bh, N)
  if constexpr (Bq == 1) {
    const long long place = left > 0 ? token * at.token : 0;
    ct::extents<unsigned, ct::dynamic_extent, ct::dynamic_extent> extents{unsigned(heads),
                                                                          ct::assume_divisible<8>(unsigned(at.head))};
    return ct::partition_view{ct::tensor_span{ct::assume_aligned<16>(q + place), extents}, ct::shape<Bh, N>{}}
        .load_masked(left > 0 ? head_tile : heads, 0);
  } else {
    return ct::cat(load_rows<Bq / 2, Bh, N>(q, at, heads, head_tile, token, left),
                   load_rows<Bq / 2, Bh, N>(q, at, heads, head_tile, token + Bq / 2, left - Bq / 2),
                   ct::integral_constant<0>{});
  }
}

struct DecodeCache {
  long long page, token;  // strides
};

// N columns of Bn tokens from `first` on, the `column`-th such; zeros behind the `length` tokens that there are, and
// for pages that are none of the cache, which has `slots` tokens.
template <int Bn, int page, int N, class Element>
inline auto load_tokens(const Element* __restrict__ cache, DecodeCache at, const int* __restrict__ pages, int slots,
                        int first, int length, int column) {  // (Bn, N)
  if constexpr (Bn <= page) {
    const int known = first < length ? first : length - 1, left = length - first, entry = pages[known / page];
    const bool there = entry >= 0 && entry < slots / page;
    const long long place = (there ? entry : 0) * at.page + known % page * at.token;
    ct::extents<unsigned, ct::dynamic_extent, ct::dynamic_extent> extents{unsigned(left < 1    ? 1
                                                                                   : left < Bn ? left
                                                                                               : Bn),
                                                                          ct::assume_divisible<8>(unsigned(at.token))};
    ct::partition_view view{ct::tensor_span{ct::assume_aligned<16>(cache + place), extents}, ct::shape<Bn, N>{}};
    // A tensor map that changes from step to step gave wrong tokens on an H200. Older GPUs, which have none, spill
    // where they read this hint.
    [[using cutile: hint(900, allow_tma = false), hint(1000, allow_tma = false), hint(1030, allow_tma = false),
      hint(1100, allow_tma = false), hint(1200, allow_tma = false), hint(1210, allow_tma = false)]] auto tokens =
        view.load_masked(left > 0 && there ? 0 : 1, column);
    return tokens;
  } else {
    return ct::cat(load_tokens<Bn / 2, page, N>(cache, at, pages, slots, first, length, column),
                   load_tokens<Bn / 2, page, N>(cache, at, pages, slots, first + Bn / 2, length, column),
                   ct::integral_constant<0>{});
  }
}
// The same for single tokens at any place: zeros for entries that are no token.
template <int N, class Element, class Slots, class Mask>
inline auto gather_tokens(const Element* __restrict__ cache, long long stride, Slots slots, Mask there,
                          int column) {  // (Bn, N)
  constexpr int Bn = Slots::shape_type::static_extent(0);
  const auto columns = ct::iota<ct::tile<int, ct::shape<N>>>() + column * N;                               // (N)
  const auto places = ct::element_cast<long long>(slots) * stride + ct::element_cast<long long>(columns);  // (Bn, N)
  return ct::load_masked(cache + places, ct::broadcast<ct::shape<Bn, N>>(there), Element(0.0f));
}

// q by its strides, cache [pages, page, ..] by its strides, table [requests, table_stride], step as plan_step() leaves
// it -> o_part [parts, all_queries, heads, 512], lse_part [parts, all_queries, heads] in units of log2. part_tokens: a
// multiple of Bn after which every request is cut; 0: into `parts` equal ones. slots: tokens that the cache has.
template <PagedDecodeProblem problem, PagedDecodeTiling tiling>
[[using cutile: hint(0, occupancy = tiling.occupancy,
                     num_worker_warps_per_cta = tiling.num_warps)]] __tile_global__ void
attend_pages(const element_t<problem.dtype>* __restrict__ qc_ptr, const element_t<problem.dtype>* __restrict__ qpe_ptr,
             const element_t<problem.dtype>* __restrict__ z_ptr, const element_t<problem.dtype>* __restrict__ kpe_ptr,
             const int* __restrict__ table, const int* __restrict__ step, element_t<problem.dtype>* __restrict__ o_ptr,
             float* __restrict__ lse_ptr, float scale_log2, int heads, int capacity, int all_queries, int parts,
             int part_tokens, int slots, long long qc_token, long long qc_head, long long qpe_token, long long qpe_head,
             long long z_page, long long z_token, long long kpe_page, long long kpe_token, long long table_stride) {
  using Element = element_t<problem.dtype>;
  constexpr int Bh = tiling.Bh, Bq = tiling.Bq, Bm = Bq * Bh, Bn = tiling.Bn, Bv = tiling.Bv, Bk = tiling.Bk;
  constexpr int K = kDecodeLatent, P = kDecodeRope, page = problem.page;
  constexpr auto dyn = ct::dynamic_extent;
  using Ends = ct::tile<int, ct::shape<Bm, 1>>;
  using Scores = ct::tile<float, ct::shape<Bm, Bn>>;

  const int head_tiles = (heads + Bh - 1) / Bh;
  const int head_tile = int(ct::bid().x) % head_tiles, first_query = int(ct::bid().x) / head_tiles * Bq;
  const int columns = int(ct::bid().y) % (K / Bv), part = int(ct::bid().y) / (K / Bv), request = ct::bid().z;
  const int first = step[request], queries = step[capacity + request], tokens = step[2 * capacity + request];
  const int* const own = table + request * table_stride;
  const int left = queries - first_query;  // queries from the first one of this block on

  auto qc = load_rows<Bq, Bh, K>(qc_ptr, {qc_token, qc_head}, heads, head_tile, first + first_query, left);  // (Bm, K)
  auto qpe = load_rows<Bq, Bh, P>(qpe_ptr, {qpe_token, qpe_head}, heads, head_tile, first + first_query,
                                  left);  // (Bm, P)
  OnlineSoftmax<Bm, Bv> rows;

  const int last_query = first_query + (left < Bq ? left : Bq) - 1;
  const int seen_by_all = problem.causal ? tokens - queries + first_query + 1 : tokens;
  const int seen_by_any = left <= 0 ? 0 : problem.causal ? tokens - queries + last_query + 1 : tokens;
  const int whole_tiles = seen_by_all > 0 ? seen_by_all / Bn : 0;
  const int tiles_seen = seen_by_any > 0 ? (seen_by_any + Bn - 1) / Bn : 0;
  const int tiles_of_part = part_tokens > 0 ? part_tokens / Bn : ((tokens + Bn - 1) / Bn + parts - 1) / parts;
  const int begin_tile = part * tiles_of_part;
  const int end_tile = begin_tile + tiles_of_part < tiles_seen ? begin_tile + tiles_of_part : tiles_seen;

  for (auto j : ct::irange(begin_tile, end_tile > begin_tile ? end_tile : begin_tile)) {
    auto scores = ct::zeros<Scores>();                                     // (Bm, Bn)
    const auto token = ct::iota<ct::tile<int, ct::shape<Bn>>>() + j * Bn;  // (Bn)
    if constexpr (page == 1) {
      const auto slot = ct::load_masked(own + token, token < tokens, -1);                // (Bn)
      const auto there = ct::reshape((slot >= 0) & (slot < slots), ct::shape<Bn, 1>{});  // (Bn, 1)
      const auto at = ct::select(there, ct::reshape(slot, ct::shape<Bn, 1>{}),
                                 ct::zeros<ct::tile<int, ct::shape<Bn, 1>>>());  // (Bn, 1)
      auto kpe = gather_tokens<P>(kpe_ptr, kpe_page, at, there, 0);              // (Bn, P)
      scores = ct::mma(qpe, ct::transpose(kpe), scores);                         // (Bm, Bn)
      for (auto c : ct::irange(0, K / Bk)) {
        auto key = gather_tokens<Bk>(z_ptr, z_page, at, there, c);                                 // (Bn, Bk)
        scores = ct::mma(ct::extract(qc, ct::shape<Bm, Bk>{}, 0, c), ct::transpose(key), scores);  // (Bm, Bn)
      }
      scores = ct::select(ct::transpose(there), scores, ct::full<Scores>(-kInfinity));  // (Bm, Bn)
    } else {
      auto kpe = load_tokens<Bn, page, P>(kpe_ptr, {kpe_page, kpe_token}, own, slots, j * Bn, tokens, 0);  // (Bn, P)
      scores = ct::mma(qpe, ct::transpose(kpe), scores);                                                   // (Bm, Bn)
      for (auto c : ct::irange(0, K / Bk)) {
        auto key = load_tokens<Bn, page, Bk>(z_ptr, {z_page, z_token}, own, slots, j * Bn, tokens, c);  // (Bn, Bk)
        scores = ct::mma(ct::extract(qc, ct::shape<Bm, Bk>{}, 0, c), ct::transpose(key), scores);       // (Bm, Bn)
      }
    }
    if (j >= whole_tiles) {
      const auto query = ct::iota<Ends>() / Bh + first_query;  // (Bm, 1)
      auto end = ct::full<Ends>(tokens);                       // (Bm, 1)
      if constexpr (problem.causal) end = ct::min(query + (tokens - queries + 1), end);
      scores = ct::select(token < end, scores, ct::full<Scores>(-kInfinity));  // (Bm, Bn)
    }
    const auto weights = ct::element_cast<Element>(rows.weights(scores, scale_log2));  // (Bm, Bn)
    if constexpr (page == 1) {  // read again: kept beside the softmax, slots cost 400 to 500 bytes of stack
      const auto slot = ct::load_masked(own + token, token < tokens, -1);                // (Bn)
      const auto there = ct::reshape((slot >= 0) & (slot < slots), ct::shape<Bn, 1>{});  // (Bn, 1)
      const auto at = ct::select(there, ct::reshape(slot, ct::shape<Bn, 1>{}),
                                 ct::zeros<ct::tile<int, ct::shape<Bn, 1>>>());  // (Bn, 1)
      rows.add(weights, gather_tokens<Bv>(z_ptr, z_page, at, there, columns));
    } else {
      auto value =
          load_tokens<Bn, page, Bv>(z_ptr, {z_page, z_token}, own, slots, j * Bn, tokens, columns);  // (Bn, Bv)
      rows.add(weights, value);
    }
  }

  auto o = ct::element_cast<Element>(rows.output());  // (Bm, Bv)
  auto lse = rows.lse_log2();                         // (Bm, 1)
  ct::extents<unsigned, dyn, K> part_extents{unsigned(heads)};
  ct::extents<unsigned, dyn> lse_extents{unsigned(heads)};
  for (auto i : ct::irange(0, Bq)) {
    const int tile = i < left ? head_tile : head_tiles;
    const long long row = (long long)(part)*all_queries + (i < left ? first + first_query + i : 0);
    ct::partition_view o_view{ct::tensor_span{ct::assume_aligned<16>(o_ptr + row * heads * K), part_extents},
                              ct::shape<Bh, Bv>{}};
    ct::partition_view lse_view{ct::tensor_span{lse_ptr + row * heads, lse_extents}, ct::shape<Bh>{}};
    o_view.store_masked(ct::extract(o, ct::shape<Bh, Bv>{}, i, 0), tile, columns);
    if (columns == 0)
      lse_view.store_masked(ct::reshape(ct::extract(lse, ct::shape<Bh, 1>{}, i, 0), ct::shape<Bh>{}), tile);
  }
}

}  // namespace hypermla
