// Decoding over a paged latent cache: attention with absorbed projections (DeepSeek-V2, arXiv 2405.04434) and online
// softmax (FlashAttention, arXiv 2205.14135), parts of the tokens at a time (Flash-Decoding). merge_parts.cuh merges
// them.
//
// A block owns Bq queries of Bh heads of a request, Bv value columns and one part of the request's tokens. The tokens
// of a part follow each other; a request without tokens, or with fewer than its part begins at, leaves o = 0 and lse =
// -inf. What lies behind a request's tokens in its last page may be read, but changes nothing, even if it is NaN; what
// lies behind in its row of the table is not read.
//
// The cache is one view of all pages, [pages, page, columns] by its strides, so that its tensor map is the same
// throughout: a map that changed from page to page gave wrong tokens on an H200, and without TMA values reach shared
// memory two bytes at a time, which took nine times as long.
//
// grid = (ceil(queries / Bq) * ceil(heads / Bh), parts * (512 / Bv), requests)
#pragma once

#include "cutile/weighted_rows.cuh"
#include "decode.h"
#include "cutile/strided_view.cuh"

namespace hypermla {

// N columns of Bn tokens from `first` on, the `column`-th such, of a view of all pages; zeros for pages that are none
// of the cache. In the last page of a request they are followed by what others left there.
template <int Bn, int page, int N, class View>
inline auto load_tokens(View view, const int* __restrict__ table, int pages, int first, int column) {  // (Bn, N)
  const int entry = table[first / page];
  const bool there = entry >= 0 && entry < pages;
  return ct::reshape(view.load_masked(there ? entry : pages, first % page / Bn, column), ct::shape<Bn, N>{});
}
// The same for single tokens at any place: zeros for entries that are no token. Of 64 tokens 16 bytes are loaded at
// once, not 2. Of 32 that made it slower (32 x 128 columns: 8.7 ms, not 5.5).
template <int N, class Element, class Slots, class Mask>
inline auto gather_tokens(const Element* __restrict__ cache, long long stride, Slots slots, Mask there,
                          int column) {  // (Bn, N)
  constexpr int Bn = Slots::shape_type::static_extent(0), together = Bn == 64 ? 8 : 1;
  const auto columns = ct::iota<ct::tile<int, ct::shape<N>>>() + column * N;  // (N)
  const auto places = ct::element_cast<long long>(slots) * ct::assume_divisible<together>(stride) +
                      ct::element_cast<long long>(columns);  // (Bn, N)
  return ct::load_masked(ct::assume_aligned<2 * together>(cache) + places, ct::broadcast<ct::shape<Bn, N>>(there),
                         Element(0.0f));
}

// q by its strides, cache [pages, page, ..] by its strides, table [requests, table_stride], step as plan_step() leaves
// it -> o_part [all_queries, parts, heads, 512], lse_part [all_queries, parts, heads] in units of log2. part_tokens: a
// multiple of Bn after which every request is cut; 0: into `parts` equal ones. slots: tokens that the cache has.
template <PagedDecodeProblem problem, PagedDecodeTiling tiling>
[[using cutile: hint(0, occupancy = tiling.occupancy,
                     num_worker_warps_per_cta = tiling.num_warps)]] __tile_global__ void
attend_pages(const element_t<problem.dtype>* __restrict__ qc_ptr, const element_t<problem.dtype>* __restrict__ qpe_ptr,
             const element_t<problem.dtype>* __restrict__ z_ptr, const element_t<problem.dtype>* __restrict__ kpe_ptr,
             const int* __restrict__ table, const int* __restrict__ step, element_t<problem.dtype>* __restrict__ o_ptr,
             float* __restrict__ lse_ptr, float scale_log2, int heads, int capacity, int parts, int part_tokens,
             int slots, long long qc_token, long long qc_head, long long qpe_token, long long qpe_head,
             long long z_page, long long z_token, long long kpe_page, long long kpe_token, long long table_stride) {
  using Element = element_t<problem.dtype>;
  constexpr int Bh = tiling.Bh, Bq = tiling.Bq, Bm = Bq * Bh, Bn = tiling.Bn, Bv = tiling.Bv, Bk = tiling.Bk;
  constexpr int K = kDecodeLatent, P = kDecodeRope, page = problem.page;
  using Ends = ct::tile<int, ct::shape<Bm, 1>>;
  using Scores = ct::tile<float, ct::shape<Bm, Bn>>;

  const int head_tiles = (heads + Bh - 1) / Bh;
  const int head_tile = int(ct::bid().x) % head_tiles, first_query = int(ct::bid().x) / head_tiles * Bq;
  const int columns = int(ct::bid().y) % (K / Bv), part = int(ct::bid().y) / (K / Bv), request = ct::bid().z;
  const int first = step[request], queries = step[capacity + request], tokens = step[2 * capacity + request];
  const int* const own = table + request * table_stride;
  const int left = queries - first_query;  // queries from the first one of this block on

  const int pages = slots / page, in_last_page = tokens > 0 ? (tokens - 1) % page + 1 : 1;
  auto key_view = strided_view<1, Bn, Bk, K>(z_ptr, pages, page, z_page, z_token);
  auto kpe_view = strided_view<1, Bn, P, P>(kpe_ptr, pages, page, kpe_page, kpe_token);
  auto value_view = strided_view<1, Bn, Bv, K>(z_ptr, pages, page, z_page, z_token);
  auto last_view = strided_view<1, Bn, Bv, K>(z_ptr, pages, in_last_page, z_page, z_token);
  // Of this block's queries, of which none may exist.
  const long long query = left > 0 ? first + first_query : 0;
  const int own_queries = left > 0 ? left : 1, query_tile = left > 0 ? 0 : 1;
  auto qc_view = strided_view<Bq, Bh, K, K>(qc_ptr + query * qc_token, own_queries, heads, qc_token, qc_head);
  auto qpe_view = strided_view<Bq, Bh, P, P>(qpe_ptr + query * qpe_token, own_queries, heads, qpe_token, qpe_head);
  auto qc = ct::reshape(qc_view.load_masked(query_tile, head_tile, 0), ct::shape<Bm, K>{});    // (Bm, K)
  auto qpe = ct::reshape(qpe_view.load_masked(query_tile, head_tile, 0), ct::shape<Bm, P>{});  // (Bm, P)
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
      auto kpe = load_tokens<Bn, page, P>(kpe_view, own, pages, j * Bn, 0);  // (Bn, P)
      scores = ct::mma(qpe, ct::transpose(kpe), scores);                     // (Bm, Bn)
      for (auto c : ct::irange(0, K / Bk)) {
        auto key = load_tokens<Bn, page, Bk>(key_view, own, pages, j * Bn, c);                     // (Bn, Bk)
        scores = ct::mma(ct::extract(qc, ct::shape<Bm, Bk>{}, 0, c), ct::transpose(key), scores);  // (Bm, Bn)
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
      // Behind the last token come zeros, by a view of its own: a weight of 0 does not make a NaN harmless. Each branch
      // loads: where a load before them served both, 32 requests of 4096 tokens and 128 heads took 135 us, not 85.
      if (j * Bn + Bn <= tokens)
        rows.add(weights, load_tokens<Bn, page, Bv>(value_view, own, pages, j * Bn, columns));
      else
        rows.add(weights, load_tokens<Bn, page, Bv>(last_view, own, pages, j * Bn, columns));
    }
  }

  auto o = ct::element_cast<Element>(rows.output());  // (Bm, Bv)
  auto lse = rows.lse_log2();                         // (Bm, 1)
  const long long row = (query * parts + part) * heads;
  auto o_view = strided_view<Bq, Bh, Bv, K>(o_ptr + row * K, own_queries, heads, parts * heads * K, K);
  ct::extents<unsigned, ct::dynamic_extent, ct::dynamic_extent> lse_extents{unsigned(own_queries), unsigned(heads)};
  ct::strides<unsigned, ct::dynamic_extent, 1> lse_strides{unsigned(parts * heads)};
  ct::partition_view lse_view{ct::tensor_span{lse_ptr + row, ct::layout_strided_mapping{lse_extents, lse_strides}},
                              ct::shape<Bq, Bh>{}};
  o_view.store_masked(ct::reshape(o, ct::shape<Bq, Bh, Bv>{}), query_tile, head_tile, columns);
  if (columns == 0) lse_view.store_masked(ct::reshape(lse, ct::shape<Bq, Bh>{}), query_tile, head_tile);
}

}  // namespace hypermla
