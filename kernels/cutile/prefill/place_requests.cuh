// Once per step: where the requests of a prefill lie, cut to the capacity, and at which block of the attention each
// begins.
//
// Request r with the queries from q on begins at block q / Bm + r: at least as many blocks follow, until the next one
// begins, as it has tiles of Bm queries. So no sum over the requests before it is needed; some blocks have nothing to
// do.
//
// grid = 1
#pragma once

#include "prefill.h"
#include "tile.h"

namespace hypermla {

// `most`: requests of the capacity, rounded up to a power of two; has_rows: whether queries lie in rows that the plan
// names. query_starts, token_starts [requests + 1], query_rows [query_starts[requests]] -> places: int [kPlaces,
// capacity]; planned_rows: the rows; status: bits of PrefillStatus. Where query_starts fall no request has queries:
// requests would share some. Nor where a row does not exist.
template <int most, int Bm, bool has_rows>
[[using cutile: hint(0, num_worker_warps_per_cta = 8)]] __tile_global__ void place_requests(
    const int* __restrict__ query_starts, const int* __restrict__ token_starts, const int* __restrict__ query_rows,
    int requests, int capacity, int all_queries, int max_tokens, int* __restrict__ places,
    int* __restrict__ planned_rows, int* __restrict__ status) {
  using Ints = ct::tile<int, ct::shape<most>>;
  using Word = ct::tile<int, ct::shape<1>>;
  constexpr ct::integral_constant<0> over_requests{};
  const auto zero = ct::zeros<Ints>();                                       // (most)
  const auto r = ct::iota<Ints>();                                           // (most)
  const auto there = r < requests;                                           // (most)
  const auto query = ct::load_masked(query_starts + r, there, 0);            // (most)
  const auto query_end = ct::load_masked(query_starts + (r + 1), there, 0);  // (most)
  const auto token = ct::load_masked(token_starts + r, there, 0);            // (most)
  const auto token_end = ct::load_masked(token_starts + (r + 1), there, 0);  // (most)
  const auto falls = ct::select(query_end < query, zero + 1, zero);          // (most)
  auto any_falls = ct::reduce_max(falls, over_requests);                     // (1)
  auto left_out = (query < 0) | (query_end > all_queries) | (falls > 0);     // (most)
  if constexpr (has_rows) {
    constexpr int kAtOnce = 1024;
    using Rows = ct::tile<int, ct::shape<kAtOnce>>;
    const int first = query_starts[0], end = query_starts[requests];
    const int count = requests == 0 || end < 0 ? 0 : end < all_queries ? end : all_queries;
    for (auto i : ct::irange(0, (count + kAtOnce - 1) / kAtOnce)) {
      const auto number = ct::iota<Rows>() + i * kAtOnce;             // (kAtOnce)
      const auto own = (number >= first) & (number < count);          // (kAtOnce)
      const auto row = ct::load_masked(query_rows + number, own, 0);  // (kAtOnce)
      const auto is_none = ct::select((row < 0) | (row >= all_queries), ct::full<Rows>(1), ct::zeros<Rows>());
      any_falls = ct::max(any_falls, ct::reduce_max(is_none, over_requests));  // (1)
      ct::store_masked(planned_rows + number, row, own);
    }
    left_out = left_out | (any_falls > 0);
  }
  const auto no_tokens = (token < 0) | (token_end < token);                              // (most)
  const auto all_tokens = ct::select(no_tokens, zero, token_end - token);                // (most)
  const auto tokens = ct::min(all_tokens, zero + max_tokens);                            // (most)
  const auto queries = ct::select(left_out | (any_falls > 0), zero, query_end - query);  // (most)
  const auto block = ct::min(ct::max(query, zero), zero + all_queries) / Bm + r;         // (most)
  const auto behind_all = zero + 0x7fffffff;                                             // (most)
  const auto stored = r < capacity;                                                      // (most)
  ct::store_masked(places + kFirstBlock * capacity + r, ct::select(there, block, behind_all), stored);
  ct::store_masked(places + kFirstQuery * capacity + r, query, stored);
  ct::store_masked(places + kQueries * capacity + r, ct::select(there, queries, zero), stored);
  ct::store_masked(places + kFirstToken * capacity + r, token, stored);
  ct::store_masked(places + kTokens * capacity + r, tokens, stored);
  const auto wrong_tokens = ct::select(there & (no_tokens | (all_tokens > max_tokens)), zero + 1, zero);  // (most)
  const auto wrong_queries = ct::select(there & left_out, zero + 2, zero);                                // (most)
  const auto found = ct::reduce_max(wrong_tokens, over_requests) + ct::reduce_max(wrong_queries, over_requests);  // (1)
  const auto one = ct::iota<Word>();                                                                              // (1)
  ct::store_masked(status + one, ct::reshape(found, ct::shape<1>{}), one == 0);
}

}  // namespace hypermla
