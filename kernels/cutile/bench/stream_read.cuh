// Reads an array once and keeps a sum per block: what memory delivers when nothing else is asked of it.
//
// grid = (any number of blocks)
#pragma once

#include "stream_read.h"
#include "tile.h"

namespace hypermla {

// data [rows, 1024], sums [blocks]. Block i reads the tiles i, i + blocks, ...
template <StreamReadProblem problem, StreamReadTiling tiling>
__tile_global__ void stream_read(const float* __restrict__ data_ptr, float* __restrict__ sum_ptr, int rows) {
  constexpr int kColumns = 1024;
  using Sum = ct::tile<float, ct::shape<tiling.Br, kColumns>>;
  ct::partition_view data{
      ct::tensor_span{ct::assume_aligned<16>(data_ptr), ct::extents<unsigned, ct::dynamic_extent, kColumns>{unsigned(rows)}},
      ct::shape<tiling.Br, kColumns>{}};
  ct::partition_view sums{
      ct::tensor_span{ct::assume_aligned<16>(sum_ptr), ct::extents<unsigned, ct::dynamic_extent, 1>{unsigned(ct::num_blocks().x)}},
      ct::shape<1, 1>{}};
  auto total = ct::zeros<Sum>();  // (Br, 1024)
  for (int i = int(ct::bid().x); i < rows / tiling.Br; i += int(ct::num_blocks().x)) total = total + data.load(i, 0);
  auto rows_sum = ct::sum(total, ct::integral_constant<1>{});  // (Br, 1)
  sums.store(ct::sum(rows_sum, ct::integral_constant<0>{}), int(ct::bid().x), 0);  // (1, 1)
}

}  // namespace hypermla
