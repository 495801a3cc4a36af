// Second stage of FlashMLA with split tokens: merges the parts of a row by their log-sum-exp.
//
// A part that saw no token has lse = -inf and gets weight 0, so empty splits need no special case.
//
// grid = (ceil(b * h * s / Bm), k / Bv)
#pragma once

#include "cutile/weighted_rows.cuh"
#include "flash_mla_split_kv_reduce.h"

namespace hypermla {

// o_part [splits,B,H,S,K], lse_part [splits,B,H,S] -> o [B,H,S,K], lse [B,H,S] (both lse natural logarithm, fp32).
template <LatentProblem problem, FlashMlaSplitKvReduceTiling tiling>
[[using cutile: hint(0, occupancy = tiling.occupancy,
                     num_worker_warps_per_cta = tiling.num_warps)]] __tile_global__ void
flash_mla_split_kv_reduce(const element_t<problem.dtype>* __restrict__ o_part_ptr,
                          const float* __restrict__ lse_part_ptr, element_t<problem.dtype>* __restrict__ o_ptr,
                          float* __restrict__ lse_ptr, int b, int h, int s, int splits) {
  using Element = element_t<problem.dtype>;
  constexpr int Bm = tiling.Bm, Bv = tiling.Bv, K = problem.k;
  constexpr auto dyn = ct::dynamic_extent;

  const int m = ct::bid().x, columns = ct::bid().y;
  const unsigned rows = unsigned(b) * h * s, parts = splits;
  ct::partition_view o_part_view{
      ct::tensor_span{ct::assume_aligned<16>(o_part_ptr), ct::extents<unsigned, dyn, dyn, K>{parts, rows}},
      ct::shape<1, Bm, Bv>{}};
  ct::partition_view lse_part_view{
      ct::tensor_span{ct::assume_aligned<16>(lse_part_ptr), ct::extents<unsigned, dyn, dyn>{parts, rows}},
      ct::shape<1, Bm>{}};
  ct::partition_view o_view{ct::tensor_span{ct::assume_aligned<16>(o_ptr), ct::extents<unsigned, dyn, K>{rows}},
                            ct::shape<Bm, Bv>{}};
  ct::partition_view lse_view{ct::tensor_span{ct::assume_aligned<16>(lse_ptr), ct::extents<unsigned, dyn>{rows}},
                              ct::shape<Bm>{}};

  MergedParts<Bm, Bv> merged;
  for (auto part : ct::irange(0, splits)) {
    merged.see(ct::reshape(lse_part_view.load_masked(part, m), ct::shape<Bm, 1>{}));  // (Bm, 1)
  }
  for (auto part : ct::irange(0, splits)) {
    auto lse_part = ct::reshape(lse_part_view.load_masked(part, m), ct::shape<Bm, 1>{});        // (Bm, 1)
    auto o_part = ct::reshape(o_part_view.load_masked(part, m, columns), ct::shape<Bm, Bv>{});  // (Bm, Bv)
    auto weight = merged.weight(lse_part);                                                      // (Bm, 1)
    merged.acc = merged.acc + ct::element_cast<float>(o_part) * weight;                         // (Bm, Bv)
  }

  o_view.store_masked(ct::element_cast<Element>(merged.output()), m, columns);
  if (columns == 0) {
    auto lse = merged.lse();  // (Bm, 1)
    lse_view.store_masked(ct::reshape(lse, ct::shape<Bm>{}), m);
  }
}

}  // namespace hypermla
