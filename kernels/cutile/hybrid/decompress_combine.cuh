// The last stage of the hybrid: merges partial outputs by their log-sum-exp and takes the latent ones to the head
// dimension (the value half of the up-projection of DeepSeek-V2, arXiv 2405.04434), in one matrix product per head.
//
// The matrix belongs to a head, so the queries of all batch elements that share a head are stacked as rows: Bb batch
// elements times Bs queries, at least 16, or there were no tensor cores to use for one query. The merge is the prologue
// of the product: a latent part enters it scaled by the weights of its rows, so that no merged output is written and
// read again.
//
// grid = (ceil(b / Bb) * ceil(s / Bs), h, d / Bd)
#pragma once

#include "cutile/hybrid/decompress_combine.h"
#include "cutile/weighted_rows.cuh"

namespace hypermla {

// o_latent [M,B,H,S,K], lse_latent [M,B,H,S], o_new [R,B,H,S,D], lse_new [R,B,H,S], w [H,K,D] -> o [B,H,S,D] or, tokens
// first, [B,S,H,D]; lse [B,H,S]. All lse natural logarithm, fp32. A row of a part with lse = -inf is empty and its
// output is not used; a row that is empty in all parts gets o = 0 and lse = -inf. M and R may be 0.
template <CombineProblem problem, DecompressCombineTiling tiling>
[[using cutile: hint(0, occupancy = tiling.occupancy,
                     num_worker_warps_per_cta = tiling.num_warps)]] __tile_global__ void
decompress_combine(const element_t<problem.dtype>* __restrict__ o_latent_ptr, const float* __restrict__ lse_latent_ptr,
                   const element_t<problem.dtype>* __restrict__ o_new_ptr, const float* __restrict__ lse_new_ptr,
                   const element_t<problem.dtype>* __restrict__ w_ptr, element_t<problem.dtype>* __restrict__ o_ptr,
                   float* __restrict__ lse_ptr, int b, int h, int s, int latent_parts, int decompressed_parts) {
  using Element = element_t<problem.dtype>;
  constexpr int Bb = tiling.Bb, Bs = tiling.Bs, Bd = tiling.Bd, Bk = tiling.Bk, K = problem.k, D = problem.d;
  constexpr int Bm = Bb * Bs;
  constexpr auto dyn = ct::dynamic_extent;
  using Chunk = ct::tile<float, ct::shape<Bm, Bk>>;

  const int query_blocks = (s + Bs - 1) / Bs;
  const int batches = int(ct::bid().x) / query_blocks, queries = int(ct::bid().x) % query_blocks;
  const int head = ct::bid().y, columns = ct::bid().z;
  const unsigned B = b, H = h, S = s, M = latent_parts, R = decompressed_parts;

  ct::partition_view o_latent_view{
      ct::tensor_span{ct::assume_aligned<16>(o_latent_ptr), ct::extents<unsigned, dyn, dyn, dyn, dyn, K>{M, B, H, S}},
      ct::shape<1, Bb, 1, Bs, Bk>{}};
  ct::partition_view lse_latent_view{
      ct::tensor_span{ct::assume_aligned<16>(lse_latent_ptr), ct::extents<unsigned, dyn, dyn, dyn, dyn>{M, B, H, S}},
      ct::shape<1, Bb, 1, Bs>{}};
  ct::partition_view o_new_view{
      ct::tensor_span{ct::assume_aligned<16>(o_new_ptr), ct::extents<unsigned, dyn, dyn, dyn, dyn, D>{R, B, H, S}},
      ct::shape<1, Bb, 1, Bs, Bd>{}};
  ct::partition_view lse_new_view{
      ct::tensor_span{ct::assume_aligned<16>(lse_new_ptr), ct::extents<unsigned, dyn, dyn, dyn, dyn>{R, B, H, S}},
      ct::shape<1, Bb, 1, Bs>{}};
  ct::partition_view w_view{ct::tensor_span{ct::assume_aligned<16>(w_ptr), ct::extents<unsigned, dyn, K, D>{H}},
                            ct::shape<1, Bk, Bd>{}};
  ct::partition_view lse_view{
      ct::tensor_span{ct::assume_aligned<16>(lse_ptr), ct::extents<unsigned, dyn, dyn, dyn>{B, H, S}},
      ct::shape<Bb, 1, Bs>{}};

  MergedParts<Bm, Bd> merged;
  for (auto m : ct::irange(0, latent_parts)) {
    auto lse_part = lse_latent_view.load_masked(m, batches, head, queries);  // (1, Bb, 1, Bs)
    merged.see(ct::reshape(lse_part, ct::shape<Bm, 1>{}));                   // (Bm, 1)
  }
  for (auto r : ct::irange(0, decompressed_parts)) {
    auto lse_part = lse_new_view.load_masked(r, batches, head, queries);  // (1, Bb, 1, Bs)
    merged.see(ct::reshape(lse_part, ct::shape<Bm, 1>{}));                // (Bm, 1)
  }

  for (auto m : ct::irange(0, latent_parts)) {
    auto lse_part = ct::reshape(lse_latent_view.load_masked(m, batches, head, queries), ct::shape<Bm, 1>{});  // (Bm, 1)
    auto weight = merged.weight(lse_part);                                                                    // (Bm, 1)
    for (auto c : ct::irange(0, K / Bk)) {
      auto loaded = o_latent_view.load_masked(m, batches, head, queries, c);          // (1, Bb, 1, Bs, Bk)
      auto part = ct::element_cast<float>(ct::reshape(loaded, ct::shape<Bm, Bk>{}));  // (Bm, Bk)
      // An empty row may hold anything, NaN too.
      auto rows = ct::select(weight > 0.0f, part * weight, ct::zeros<Chunk>());  // (Bm, Bk)
      auto w = ct::reshape(w_view.load(head, c, columns), ct::shape<Bk, Bd>{});  // (Bk, Bd)
      merged.acc = ct::mma(ct::element_cast<Element>(rows), w, merged.acc);      // (Bm, Bd)
    }
  }
  for (auto r : ct::irange(0, decompressed_parts)) {
    auto lse_part = ct::reshape(lse_new_view.load_masked(r, batches, head, queries), ct::shape<Bm, 1>{});  // (Bm, 1)
    auto weight = merged.weight(lse_part);                                                                 // (Bm, 1)
    auto loaded = o_new_view.load_masked(r, batches, head, queries, columns);        // (1, Bb, 1, Bs, Bd)
    auto part = ct::element_cast<float>(ct::reshape(loaded, ct::shape<Bm, Bd>{}));   // (Bm, Bd)
    merged.acc = ct::select(weight > 0.0f, merged.acc + part * weight, merged.acc);  // (Bm, Bd)
  }

  auto o = ct::element_cast<Element>(merged.output());  // (Bm, Bd)
  if constexpr (problem.tokens_first) {
    ct::partition_view o_view{
        ct::tensor_span{ct::assume_aligned<16>(o_ptr), ct::extents<unsigned, dyn, dyn, dyn, D>{B, S, H}},
        ct::shape<Bb, Bs, 1, Bd>{}};
    o_view.store_masked(ct::reshape(o, ct::shape<Bb, Bs, 1, Bd>{}), batches, queries, head, columns);
  } else {
    ct::partition_view o_view{
        ct::tensor_span{ct::assume_aligned<16>(o_ptr), ct::extents<unsigned, dyn, dyn, dyn, D>{B, H, S}},
        ct::shape<Bb, 1, Bs, Bd>{}};
    o_view.store_masked(ct::reshape(o, ct::shape<Bb, 1, Bs, Bd>{}), batches, head, queries, columns);
  }
  if (columns == 0) {
    auto lse = merged.lse();  // (Bm, 1)
    lse_view.store_masked(ct::reshape(lse, ct::shape<Bb, 1, Bs>{}), batches, head, queries);
  }
}

}  // namespace hypermla
