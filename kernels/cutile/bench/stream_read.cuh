// Reads an array once and keeps a sum per block: what memory delivers when nothing else is asked of it.
//
// grid = (any number of blocks)
#pragma once

#include "stream_read.h"
#include "tile.h"

namespace hypermla {

// data [rows, 256] -> sums [blocks, 1]. Block i reads the tiles i, i + blocks, ...
template <StreamReadProblem problem, StreamReadTiling tiling>
[[using cutile: hint(0, occupancy = tiling.occupancy)]] __tile_global__ void stream_read(
    const float* __restrict__ data_ptr, float* __restrict__ sum_ptr, int rows) {
  constexpr int Br = tiling.Br, kColumns = 256;
  constexpr auto dyn = ct::dynamic_extent;
  const int block = ct::bid().x, blocks = ct::num_blocks().x;
  ct::partition_view data{
      ct::tensor_span{ct::assume_aligned<16>(data_ptr), ct::extents<unsigned, dyn, kColumns>{unsigned(rows)}},
      ct::shape<Br, kColumns>{}};
  ct::partition_view sums{
      ct::tensor_span{ct::assume_aligned<16>(sum_ptr), ct::extents<unsigned, dyn, 1>{unsigned(blocks)}},
      ct::shape<1, 1>{}};

  const int tiles = rows / Br;
  const int steps = block < tiles ? (tiles - block + blocks - 1) / blocks : 0;
  auto total = ct::zeros<ct::tile<float, ct::shape<Br, kColumns>>>();  // (Br, 256)
  for (auto step : ct::irange(0, steps)) total = total + data.load(block + step * blocks, 0);
  auto of_rows = ct::sum(total, ct::integral_constant<1>{});           // (Br, 1)
  sums.store(ct::sum(of_rows, ct::integral_constant<0>{}), block, 0);  // (1, 1)
}

}  // namespace hypermla
