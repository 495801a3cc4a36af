// Attention for many queries over decompressed keys and values (DeepSeek-V2, arXiv 2405.04434) with online softmax
// (FlashAttention, arXiv 2205.14135), for requests of any lengths that follow each other in tensors with the tokens
// first.
//
// A block owns Bm queries of a head of a request. What lies behind a request's queries and tokens is another's and may
// be NaN: it is outside of the views, and read as zeros. With problem.rows queries lie anywhere in the tensors: those
// of a block are gathered, and their outputs scattered.
//
// grid = (all_queries / Bm + capacity, heads)
#pragma once

#include "cutile/strided_view.cuh"
#include "cutile/weighted_rows.cuh"
#include "prefill.h"

namespace hypermla {

// R x N of `rows` rows of N columns, `stride` apart; of one at least, so that the view is not empty.
template <int R, int N, class Element>
inline auto rows_view(Element* __restrict__ first, int rows, long long stride) {
  return strided_view<1, R, N, N>(first, 1, rows > 0 ? rows : 1, N, stride);
}

// The rows of the tensors in which a block's queries are, the first of them first[0], of `left`; -1: they have no such.
template <int R>
inline auto own_rows(const int* __restrict__ first, int left, int query_tokens) {  // (R, 1)
  using Ints = ct::tile<int, ct::shape<R, 1>>;
  const auto number = ct::iota<Ints>();                                           // (R, 1)
  const auto row = ct::load_masked(first + number, number < left, query_tokens);  // (R, 1)
  return ct::select(row < query_tokens, row, ct::full<Ints>(-1));
}

// Where N columns of rows lie, (R, 1) of any of a tensor's, `stride` apart.
template <int N, class Rows>
inline auto places_of(Rows rows, long long stride) {                                       // (R, N)
  const auto first = ct::element_cast<long long>(rows) * ct::assume_divisible<8>(stride);  // (R, 1)
  return first + ct::element_cast<long long>(ct::iota<ct::tile<int, ct::shape<N>>>());     // (R, N)
}

// q, k, v and o by their strides, places [kPlaces, capacity] and planned_rows as place_requests() leaves them -> o, lse
// by its strides. query_tokens, tokens: of the tensors. lse_unit: what one unit of log2 is; empty_lse: of a query that
// sees no token.
template <PrefillProblem problem, PrefillTiling tiling>
[[using cutile: hint(0, occupancy = tiling.occupancy,
                     num_worker_warps_per_cta = tiling.num_warps)]] __tile_global__ void
attend_requests(const element_t<problem.dtype>* __restrict__ q_ptr,
                const element_t<problem.dtype>* __restrict__ qpe_ptr,
                const element_t<problem.dtype>* __restrict__ k_ptr,
                const element_t<problem.dtype>* __restrict__ kpe_ptr,
                const element_t<problem.dtype>* __restrict__ v_ptr, const int* __restrict__ places,
                const int* __restrict__ planned_rows, element_t<problem.dtype>* __restrict__ o_ptr,
                float* __restrict__ lse_ptr, float scale_log2, float lse_unit, float empty_lse, int capacity,
                int query_tokens, int all_tokens, long long q_token, long long q_head, long long qpe_token,
                long long qpe_head, long long k_token, long long k_head, long long kpe_token, long long kpe_head,
                long long v_token, long long v_head, long long o_token, long long o_head, long long lse_token,
                long long lse_head) {
  using Element = element_t<problem.dtype>;
  constexpr int Bm = tiling.Bm, Bn = tiling.Bn, N = kPrefillColumns, P = kPrefillRope;
  using Rows = ct::tile<float, ct::shape<Bm, 1>>;
  using Ends = ct::tile<int, ct::shape<Bm, 1>>;
  using Scores = ct::tile<float, ct::shape<Bm, Bn>>;

  const int block = ct::bid().x, head = ct::bid().y;
  int request = 0;  // the last one that begins at this block or before
  for (auto i : ct::irange(0, 11)) {
    const int next = request + (1024 >> i), known = next < capacity ? next : 0;
    request = next < capacity && places[kFirstBlock * capacity + known] <= block ? next : request;
  }
  const int own_query = (block - places[kFirstBlock * capacity + request]) * Bm;
  const int first_query = places[kFirstQuery * capacity + request], queries = places[kQueries * capacity + request];
  const int first_token = places[kFirstToken * capacity + request], tokens = places[kTokens * capacity + request];
  const long long query = (long long)(first_query) + own_query;
  // Queries from this block's first one on that the tensors have, and tokens likewise.
  const int wanted = own_query < 0 ? 0 : queries - own_query;
  const int left = problem.rows || query + wanted <= query_tokens ? wanted : int(query_tokens - query);
  const int there = first_token + (long long)(tokens) <= all_tokens ? tokens : all_tokens - first_token;
  const long long row = left > 0 ? query : 0;
  const int row_tile = left > 0 ? 0 : 1;

  auto q = ct::zeros<ct::tile<Element, ct::shape<Bm, N>>>();    // (Bm, N)
  auto qpe = ct::zeros<ct::tile<Element, ct::shape<Bm, P>>>();  // (Bm, P)
  if constexpr (problem.rows) {
    const auto own = own_rows<Bm>(planned_rows + row, left, query_tokens);  // (Bm, 1)
    q = ct::load_masked(ct::assume_aligned<16>(q_ptr + head * q_head) + places_of<N>(own, q_token),
                        ct::broadcast<ct::shape<Bm, N>>(own >= 0), Element(0.0f));
    qpe = ct::load_masked(ct::assume_aligned<16>(qpe_ptr + head * qpe_head) + places_of<P>(own, qpe_token),
                          ct::broadcast<ct::shape<Bm, P>>(own >= 0), Element(0.0f));
  } else {
    auto q_view = rows_view<Bm, N>(q_ptr + row * q_token + head * q_head, left, q_token);
    auto qpe_view = rows_view<Bm, P>(qpe_ptr + row * qpe_token + head * qpe_head, left, qpe_token);
    q = ct::reshape(q_view.load_masked(0, row_tile, 0), ct::shape<Bm, N>{});
    qpe = ct::reshape(qpe_view.load_masked(0, row_tile, 0), ct::shape<Bm, P>{});
  }
  const long long token_row = there > 0 ? first_token : 0;
  auto k_view = rows_view<Bn, N>(k_ptr + token_row * k_token + head * k_head, there, k_token);
  auto kpe_view = rows_view<Bn, P>(kpe_ptr + token_row * kpe_token + head * kpe_head, there, kpe_token);
  auto v_view = rows_view<Bn, N>(v_ptr + token_row * v_token + head * v_head, there, v_token);
  OnlineSoftmax<Bm, N> rows;

  const int last_query = own_query + (left < Bm ? left : Bm) - 1;
  const int seen_by_all = problem.causal ? tokens - queries + own_query + 1 : tokens;
  const int seen_by_last = problem.causal ? tokens - queries + last_query + 1 : tokens;
  const int seen_by_any = left <= 0 ? 0 : seen_by_last < there ? seen_by_last : there;
  const int whole_tiles = seen_by_all > 0 ? (seen_by_all < there ? seen_by_all : there) / Bn : 0;
  const int tiles_seen = seen_by_any > 0 ? (seen_by_any + Bn - 1) / Bn : 0;

  for (auto j : ct::irange(0, tiles_seen)) {
    auto k = ct::reshape(k_view.load_masked(0, j, 0), ct::shape<Bn, N>{});      // (Bn, N)
    auto kpe = ct::reshape(kpe_view.load_masked(0, j, 0), ct::shape<Bn, P>{});  // (Bn, P)
    auto v = ct::reshape(v_view.load_masked(0, j, 0), ct::shape<Bn, N>{});      // (Bn, N)
    auto scores = ct::mma(q, ct::transpose(k), ct::zeros<Scores>());            // (Bm, Bn)
    scores = ct::mma(qpe, ct::transpose(kpe), scores);                          // (Bm, Bn)
    if (j >= whole_tiles) {
      const auto token = ct::iota<ct::tile<int, ct::shape<Bn>>>() + j * Bn;  // (Bn)
      auto end = ct::full<Ends>(there);                                      // (Bm, 1)
      if constexpr (problem.causal) end = ct::min(end, ct::iota<Ends>() + (tokens - queries + own_query + 1));
      scores = ct::select(token < end, scores, ct::full<Scores>(-kInfinity));  // (Bm, Bn)
    }
    auto weights = rows.weights(scores, scale_log2);  // (Bm, Bn)
    rows.add(ct::element_cast<Element>(weights), v);
  }

  auto o = ct::element_cast<Element>(rows.output());                                                   // (Bm, N)
  auto lse = ct::select(rows.row_sum == 0.0f, ct::full<Rows>(empty_lse), rows.lse_log2() * lse_unit);  // (Bm, 1)
  if constexpr (problem.rows) {
    const auto own = own_rows<Bm>(planned_rows + row, left, query_tokens);  // (Bm, 1), again: registers are few
    ct::store_masked(ct::assume_aligned<16>(o_ptr + head * o_head) + places_of<N>(own, o_token), o,
                     ct::broadcast<ct::shape<Bm, N>>(own >= 0));
    ct::store_masked(lse_ptr + head * lse_head + ct::element_cast<long long>(own) * lse_token, lse, own >= 0);
  } else {
    auto o_view = rows_view<Bm, N>(o_ptr + row * o_token + head * o_head, left, o_token);
    o_view.store_masked(ct::reshape(o, ct::shape<1, Bm, N>{}), 0, row_tile, 0);
    const auto i = ct::iota<ct::tile<int, ct::shape<Bm>>>();  // (Bm)
    ct::store_masked(lse_ptr + row * lse_token + head * lse_head + ct::element_cast<long long>(i) * lse_token,
                     ct::reshape(lse, ct::shape<Bm>{}), i < left);
  }
}

}  // namespace hypermla
