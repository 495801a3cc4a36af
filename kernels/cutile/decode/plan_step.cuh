// Once per step: lengths and queries of all requests, cut to the capacity, and the request of every query.
//
// grid = 1
#pragma once

#include "tile.h"

namespace hypermla {

// `most`: requests of the capacity, rounded up to a power of two. lengths and query_starts may be missing; then all
// requests have max_tokens tokens or `queries` queries. -> step: int [3, capacity], the first query, the queries and
// the tokens of each; request_of: int [all_queries], -1 for a query of no request; status: bits of DecodeStatus.
template <int most>
[[using cutile: hint(0, num_worker_warps_per_cta = 8)]] __tile_global__ void plan_step(
    const int* __restrict__ lengths, const int* __restrict__ query_starts, int has_lengths, int has_starts,
    int requests, int capacity, int queries, int all_queries, int max_tokens, int* __restrict__ step,
    int* __restrict__ request_of, int* __restrict__ status) {
  using Ints = ct::tile<int, ct::shape<most>>;
  using Word = ct::tile<int, ct::shape<1>>;
  const auto zero = ct::zeros<Ints>();                 // (most)
  const auto r = ct::iota<Ints>();                     // (most)
  const auto there = r < requests;                     // (most)
  auto length = ct::full<Ints>(max_tokens);            // (most)
  auto first = r * queries, behind = first + queries;  // (most)
  if (has_lengths) length = ct::load_masked(lengths + r, there, 0);
  if (has_starts) {
    first = ct::load_masked(query_starts + r, there, 0);
    behind = ct::load_masked(query_starts + (r + 1), there, 0);
  }
  const auto wrong_tokens = ct::select(there & ((length < 0) | (length > max_tokens)), zero + 1, zero);  // (most)
  const auto wrong_queries = ct::select(there & ((first < 0) | (behind < first) | (behind > all_queries) |
                                                 (behind - first > queries) | ((r == 0) & (first > 0))),
                                        zero + 2, zero);                                           // (most)
  const auto count = ct::select(there & (wrong_queries == 0), behind - first, zero);               // (most)
  const auto tokens = ct::select(there, ct::max(ct::min(length, zero + max_tokens), zero), zero);  // (most)
  ct::store_masked(step + r, first, r < capacity);
  ct::store_masked(step + capacity + r, count, r < capacity);
  ct::store_masked(step + 2 * capacity + r, tokens, r < capacity);
  for (auto i : ct::irange(0, (all_queries + most - 1) / most)) {
    const auto query = r + i * most;  // (most)
    ct::store_masked(request_of + query, zero - 1, query < all_queries);
  }
  for (auto i : ct::irange(0, queries)) ct::store_masked(request_of + (first + i), r, count > i);
  const auto found = ct::reduce_max(wrong_tokens, ct::integral_constant<0>{}) +
                     ct::reduce_max(wrong_queries, ct::integral_constant<0>{});  // (1)
  const auto one = ct::iota<Word>();                                             // (1)
  ct::store_masked(status + one, ct::reshape(found, ct::shape<1>{}), one == 0);
}

}  // namespace hypermla
