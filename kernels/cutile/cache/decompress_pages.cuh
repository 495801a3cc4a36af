// Keys or values of a prefix from its latents in the paged cache (the up-projections of DeepSeek-V2, arXiv 2405.04434,
// section 2.1): one product of 64 tokens and a head for each block. Pages have any number of tokens, so the rows of the
// cache are gathered, 16 bytes at a time.
//
// grid = (ceil(tokens / 64), heads)
#pragma once

#include "cutile/strided_view.cuh"
#include "decompress_pages.h"
#include "tile.h"

namespace hypermla {

// The rows of the cache in which a block's tokens lie.
template <int Bm>
struct CacheRows {
  ct::tile<long long, ct::shape<Bm, 1>> first;  // (Bm, 1), elements
  ct::tile<bool, ct::shape<Bm, 1>> exists;      // (Bm, 1)
};

// Those of the tokens from `token` on. None of tokens behind the last, and where the table names no page of the cache.
template <int Bm>
inline CacheRows<Bm> cache_rows(const int* __restrict__ table, int token, int tokens, int page, int pages,
                                long long page_stride, long long token_stride) {
  using Ints = ct::tile<int, ct::shape<Bm, 1>>;
  const auto own = ct::iota<Ints>() + token;                                     // (Bm, 1)
  const auto entry = ct::load_masked(table + own / page, own < tokens, -1);      // (Bm, 1)
  const auto exists = (entry >= 0) & (entry < pages);                            // (Bm, 1)
  const auto known = ct::select(exists, entry, ct::zeros<Ints>());               // (Bm, 1)
  const auto of_page = ct::element_cast<long long>(known) * page_stride;         // (Bm, 1)
  const auto of_token = ct::element_cast<long long>(own % page) * token_stride;  // (Bm, 1)
  return {of_page + of_token, exists};
}

// N columns of them, the `column`-th such; zeros for rows that do not exist.
template <int N, int Bm, class Element>
inline auto gather_rows(const Element* __restrict__ cache, CacheRows<Bm> rows, int column) {  // (Bm, N)
  const auto columns = ct::iota<ct::tile<int, ct::shape<N>>>() + column * N;                  // (N)
  const auto places = rows.first + ct::element_cast<long long>(columns);                      // (Bm, N)
  return ct::load_masked(ct::assume_aligned<16>(cache) + places, ct::broadcast<ct::shape<Bm, N>>(rows.exists),
                         Element(0.0f));
}

// cache [pages, page, 512] and w [heads, 512, 128] by their strides, of which `outer` is the one that is not 1; table:
// the request's row -> out [tokens, heads, 128]. latent_innermost: w lies as [heads, 128, 512].
template <DType dtype, bool latent_innermost>
[[using cutile: hint(0, num_worker_warps_per_cta = 8)]] __tile_global__ void decompress_pages(
    const element_t<dtype>* __restrict__ cache, const int* __restrict__ table, const element_t<dtype>* __restrict__ w,
    element_t<dtype>* __restrict__ out, int tokens, int page, int pages, long long page_stride, long long token_stride,
    long long w_head, long long w_outer, long long out_token, long long out_head) {
  using Element = element_t<dtype>;
  constexpr int Bm = kTokensOfBlock, Bk = 64, K = 512, N = 128;
  const int tile = ct::bid().x, head = ct::bid().y;
  const auto rows = cache_rows<Bm>(table, tile * Bm, tokens, page, pages, ct::assume_divisible<8>(page_stride),
                                   ct::assume_divisible<8>(token_stride));
  const Element* const own = w + head * w_head;
  auto sums = ct::zeros<ct::tile<float, ct::shape<Bm, N>>>();  // (Bm, N)
  for (auto c : ct::irange(0, K / Bk)) {
    auto z = gather_rows<Bk>(cache, rows, c);  // (Bm, Bk)
    if constexpr (latent_innermost) {
      auto view = strided_view<1, N, Bk, K>(own, 1, N, K, w_outer);
      auto weights = ct::reshape(view.load_masked(0, 0, c), ct::shape<N, Bk>{});  // (N, Bk)
      sums = ct::mma(z, ct::transpose(weights), sums);                            // (Bm, N)
    } else {
      auto view = strided_view<1, Bk, N, N>(own, 1, K, N, w_outer);
      auto weights = ct::reshape(view.load_masked(0, c, 0), ct::shape<Bk, N>{});  // (Bk, N)
      sums = ct::mma(z, weights, sums);                                           // (Bm, N)
    }
  }
  auto view = strided_view<1, Bm, N, N>(out + head * out_head, 1, tokens, N, out_token);
  view.store_masked(ct::reshape(ct::element_cast<Element>(sums), ct::shape<1, Bm, N>{}), 0, tile, 0);
}

// The rotary part of the same tokens, for every head: cache [pages, page, 64] -> out [tokens, heads, 64].
template <DType dtype>
[[using cutile: hint(0, num_worker_warps_per_cta = 4)]] __tile_global__ void repeat_rope(
    const element_t<dtype>* __restrict__ cache, const int* __restrict__ table, element_t<dtype>* __restrict__ out,
    int tokens, int page, int pages, long long page_stride, long long token_stride, long long out_token,
    long long out_head) {
  constexpr int Bm = kTokensOfBlock, P = 64;
  const int tile = ct::bid().x, head = ct::bid().y;
  const auto rows = cache_rows<Bm>(table, tile * Bm, tokens, page, pages, ct::assume_divisible<8>(page_stride),
                                   ct::assume_divisible<8>(token_stride));
  auto view = strided_view<1, Bm, P, P>(out + head * out_head, 1, tokens, P, out_token);
  view.store_masked(ct::reshape(gather_rows<P>(cache, rows, 0), ct::shape<1, Bm, P>{}), 0, tile, 0);
}

}  // namespace hypermla
