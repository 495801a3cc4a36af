// Multiplies every tile of an array several times while the next ones are read: what tensor cores and memory give when
// both are asked, which under a power cap is less than each gives alone.
//
// grid = (any number of blocks)
#pragma once

#include "stream_product.h"
#include "tile.h"

namespace hypermla {

// a [128, 64], data [rows, 128] -> sums [blocks, 1]. Block i walks over the tiles i, i + blocks, ... of 64 rows,
// `steps` of them, counted modulo `distinct`: with as many as there are blocks each stays with one tile, and nothing
// comes from memory.
template <StreamProductProblem problem, StreamProductTiling tiling>
[[using cutile: hint(0, occupancy = tiling.occupancy,
                     num_worker_warps_per_cta = tiling.num_warps)]] __tile_global__ void
stream_product(const element_t<DType::bfloat16>* __restrict__ a_ptr,
               const element_t<DType::bfloat16>* __restrict__ data_ptr, float* __restrict__ sum_ptr, int rows,
               int steps, int distinct) {
  constexpr int kM = 128, kN = 128, kK = 64;
  constexpr auto dyn = ct::dynamic_extent;
  const int block = ct::bid().x, blocks = ct::num_blocks().x;
  ct::partition_view a_view{
      ct::tensor_span{ct::assume_aligned<16>(a_ptr), ct::extents<unsigned, dyn, kK>{unsigned(kM)}},
      ct::shape<kM, kK>{}};
  ct::partition_view data{
      ct::tensor_span{ct::assume_aligned<16>(data_ptr), ct::extents<unsigned, dyn, kN>{unsigned(rows)}},
      ct::shape<kK, kN>{}};
  ct::partition_view sums{
      ct::tensor_span{ct::assume_aligned<16>(sum_ptr), ct::extents<unsigned, dyn, 1>{unsigned(blocks)}},
      ct::shape<1, 1>{}};

  auto a = a_view.load(0, 0);                                    // (128, 64)
  auto total = ct::zeros<ct::tile<float, ct::shape<kM, kN>>>();  // (128, 128)
  for (auto step : ct::irange(0, steps)) {
    auto tile = data.load((block + step * blocks) % distinct, 0);                                 // (64, 128)
    for (int product = 0; product < tiling.products; ++product) total = ct::mma(a, tile, total);  // (128, 128)
  }
  auto of_rows = ct::sum(total, ct::integral_constant<1>{});           // (128, 1)
  sums.store(ct::sum(of_rows, ct::integral_constant<0>{}), block, 0);  // (1, 1)
}

}  // namespace hypermla
