// Keys and values of a prefix from its latents, made once for all requests that share it (the up-projections of
// DeepSeek-V2, arXiv 2405.04434, section 2.1). wv is the w of decompress_combine and of output_decompression.
//
// A block makes keys and values of the same tokens and head, so that the latents are loaded once for both products.
//
// grid = (ceil(t / Bm), h, b * (d / Bd))
#pragma once

#include "prefix_decompression.h"
#include "tile.h"

namespace hypermla {

// z [B,T,K], wk and wv [H,K,D] -> k and v [B,H,T,D]
template <PrefixDecompressionProblem problem, PrefixDecompressionTiling tiling>
[[using cutile: hint(0, occupancy = tiling.occupancy,
                     num_worker_warps_per_cta = tiling.num_warps)]] __tile_global__ void
prefix_decompression(const element_t<problem.dtype>* __restrict__ z_ptr,
                     const element_t<problem.dtype>* __restrict__ wk_ptr,
                     const element_t<problem.dtype>* __restrict__ wv_ptr, element_t<problem.dtype>* __restrict__ k_ptr,
                     element_t<problem.dtype>* __restrict__ v_ptr, int b, int t, int h) {
  using Element = element_t<problem.dtype>;
  constexpr int Bm = tiling.Bm, Bd = tiling.Bd, Bk = tiling.Bk, K = problem.k, D = problem.d;
  constexpr auto dyn = ct::dynamic_extent;
  using Accumulator = ct::tile<float, ct::shape<Bm, Bd>>;

  const int m = ct::bid().x, head = ct::bid().y;
  const int prefix = int(ct::bid().z) / (D / Bd), columns = int(ct::bid().z) % (D / Bd);
  const unsigned B = b, T = t, H = h;
  ct::extents<unsigned, dyn, K, D> weight_extents{H};
  ct::extents<unsigned, dyn, dyn, dyn, D> output_extents{B, H, T};
  ct::partition_view z_view{ct::tensor_span{ct::assume_aligned<16>(z_ptr), ct::extents<unsigned, dyn, dyn, K>{B, T}},
                            ct::shape<1, Bm, Bk>{}};
  ct::partition_view wk_view{ct::tensor_span{ct::assume_aligned<16>(wk_ptr), weight_extents}, ct::shape<1, Bk, Bd>{}};
  ct::partition_view wv_view{ct::tensor_span{ct::assume_aligned<16>(wv_ptr), weight_extents}, ct::shape<1, Bk, Bd>{}};
  ct::partition_view k_view{ct::tensor_span{ct::assume_aligned<16>(k_ptr), output_extents}, ct::shape<1, 1, Bm, Bd>{}};
  ct::partition_view v_view{ct::tensor_span{ct::assume_aligned<16>(v_ptr), output_extents}, ct::shape<1, 1, Bm, Bd>{}};

  auto k = ct::zeros<Accumulator>(), v = ct::zeros<Accumulator>();  // (Bm, Bd)
  for (auto c : ct::irange(0, K / Bk)) {
    auto z = ct::reshape(z_view.load_masked(prefix, m, c), ct::shape<Bm, Bk>{});  // (Bm, Bk)
    auto wk = ct::reshape(wk_view.load(head, c, columns), ct::shape<Bk, Bd>{});   // (Bk, Bd)
    auto wv = ct::reshape(wv_view.load(head, c, columns), ct::shape<Bk, Bd>{});   // (Bk, Bd)
    k = ct::mma(z, wk, k);                                                        // (Bm, Bd)
    v = ct::mma(z, wv, v);                                                        // (Bm, Bd)
  }
  using Stored = ct::shape<1, 1, Bm, Bd>;
  k_view.store_masked(ct::reshape(ct::element_cast<Element>(k), Stored{}), prefix, head, m, columns);
  v_view.store_masked(ct::reshape(ct::element_cast<Element>(v), Stored{}), prefix, head, m, columns);
}

}  // namespace hypermla
