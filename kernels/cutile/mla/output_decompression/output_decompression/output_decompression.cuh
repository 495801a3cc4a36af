// Decompression of the latent outputs of FlashMLA: one matrix product per head (the value half of the up-projection of
// DeepSeek-V2, arXiv 2405.04434).
//
// The matrix belongs to a head, so the queries of all batch elements that share a head are stacked as rows: Bb batch
// elements times Bs queries make the rows of one block, which keeps the tensor cores filled when there is one query.
//
// grid = (ceil(b / Bb) * ceil(s / Bs), h, d / Bd)
#pragma once

#include "output_decompression.h"
#include "tile.h"

namespace hypermla {

// o_latent [B,H,S,K], w [H,K,D] -> o [B,H,S,D]
template <OutputDecompressionProblem problem, OutputDecompressionTiling tiling>
[[using cutile: hint(0, occupancy = tiling.occupancy,
                     num_worker_warps_per_cta = tiling.num_warps)]] __tile_global__ void
output_decompression(const element_t<problem.dtype>* __restrict__ o_latent_ptr,
                     const element_t<problem.dtype>* __restrict__ w_ptr, element_t<problem.dtype>* __restrict__ o_ptr,
                     int b, int h, int s) {
  using Element = element_t<problem.dtype>;
  constexpr int Bb = tiling.Bb, Bs = tiling.Bs, Bd = tiling.Bd, Bk = tiling.Bk, K = problem.k, D = problem.d;
  constexpr int Bm = Bb * Bs;
  constexpr auto dyn = ct::dynamic_extent;

  const int query_blocks = (s + Bs - 1) / Bs;
  const int batches = int(ct::bid().x) / query_blocks, queries = int(ct::bid().x) % query_blocks;
  const int head = ct::bid().y, columns = ct::bid().z;

  ct::partition_view o_latent_view{
      ct::tensor_span{ct::assume_aligned<16>(o_latent_ptr),
                      ct::extents<unsigned, dyn, dyn, dyn, K>{unsigned(b), unsigned(h), unsigned(s)}},
      ct::shape<Bb, 1, Bs, Bk>{}};
  ct::partition_view w_view{
      ct::tensor_span{ct::assume_aligned<16>(w_ptr), ct::extents<unsigned, dyn, K, D>{unsigned(h)}},
      ct::shape<1, Bk, Bd>{}};
  ct::partition_view o_view{
      ct::tensor_span{ct::assume_aligned<16>(o_ptr),
                      ct::extents<unsigned, dyn, dyn, dyn, D>{unsigned(b), unsigned(h), unsigned(s)}},
      ct::shape<Bb, 1, Bs, Bd>{}};

  auto acc = ct::zeros<ct::tile<float, ct::shape<Bm, Bd>>>();  // (Bm, Bd)
  for (auto c : ct::irange(0, K / Bk)) {
    auto rows = ct::reshape(o_latent_view.load_masked(batches, head, queries, c), ct::shape<Bm, Bk>{});  // (Bm, Bk)
    auto w = ct::reshape(w_view.load(head, c, columns), ct::shape<Bk, Bd>{});                            // (Bk, Bd)
    acc = ct::mma(rows, w, acc);                                                                         // (Bm, Bd)
  }
  o_view.store_masked(ct::reshape(ct::element_cast<Element>(acc), ct::shape<Bb, 1, Bs, Bd>{}), batches, head, queries,
                      columns);
}

}  // namespace hypermla
