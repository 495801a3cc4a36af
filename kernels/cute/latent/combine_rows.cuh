// Merges the partial outputs of tiles of few rows, weighted by their log-sum-exp: combine_parts.cuh for kernels that
// hold the output transposed, N rows to a tile.
//
// grid = (combine items, 1 to N / 2), 128 to 1024 threads; a block merges 8 rows x 128 columns of a tile at a time.
// What else is said there holds here.
#pragma once

#include "combine_rows.h"
#include "latent/merge_parts.cuh"
#include "work.h"

namespace hypermla::cute {

// o_part [slots, 4, N / 8, 128] uint4 in the order of the kernel's fragments, 16-bit elements; lse_part [slots, N]
// (log2) fp32 -> o [B, rows, 512] and lse [B, rows] in lse_unit per log2. N = tile_rows.
template <CombineRowsProblem problem, CombineRowsTiling tiling>
__global__ void __launch_bounds__(1024)
    combine_rows(const CombineItem* __restrict__ items, const uint4* o_part, const float* lse_part,
                 unsigned short* __restrict__ o, float* __restrict__ lse, float lse_unit, int rows, int tile_rows) {
  extern __shared__ __align__(16) unsigned char shared[];
  static_assert(sizeof(latent::Merged) * 128 == kCombineGroupBytes);
  const int N = tile_rows, thread = threadIdx.x & 127, lane = threadIdx.x & 31;
  const int row = 2 * (lane & 3);  // of the octet, in the fragment; and the one after it
  const CombineItem item = items[blockIdx.x];
  launch_next();
  wait_for_previous();  // also without work: a kernel that waits for this one relies on the kernel before, too
  if (item.slots == 0) return;

#pragma unroll 1
  for (int unit = blockIdx.y; unit < N / 2; unit += gridDim.y) {  // 8 rows x twice 64 columns
    const int pair = unit % 4, octet = unit / 4;
    const uint4* parts = o_part + (item.first_slot * 4LL + pair) * (N * 16) + octet * 128 + thread;
    const float* lse_parts = lse_part + item.first_slot * static_cast<long long>(N) + octet * 8 + row;
    const latent::Merged all = latent::merge<problem.dtype>(
        item.slots, reinterpret_cast<latent::Merged*>(shared),
        [&](int first, int i, bool wanted) { return latent::load_at_once(parts + (first + i) * (N * 64), wanted); },
        [&](int first, int i, bool wanted) {
          const float* of = lse_parts + (first + i) * N;
          return float2{latent::load_at_once(of, wanted), latent::load_at_once(of + 1, wanted)};
        });
    if (threadIdx.x >= 128) continue;
    const int first_row = item.row_tile * N + octet * 8;
    const long long rows_before = static_cast<long long>(item.request) * rows + first_row;
    if (pair == 0 && thread < 4) {
      const float2 log_sum = all.lse(lse_unit);
      if (first_row + row < rows) lse[rows_before + row] = log_sum.x;
      if (first_row + row + 1 < rows) lse[rows_before + row + 1] = log_sum.y;
    }
    const u32 words[4] = {
        pack<problem.dtype>(all.first.x, all.second.x), pack<problem.dtype>(all.first.y, all.second.y),
        pack<problem.dtype>(all.first.z, all.second.z), pack<problem.dtype>(all.first.w, all.second.w)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 word = transpose_fragment(words[i]);  // the lane's row is lane / 4, its columns are row and row + 1
      if (first_row + lane / 4 < rows) {
        const int column = (2 * pair + i / 2) * 64 + thread / 32 * 16 + i % 2 * 8 + row;
        *reinterpret_cast<u32*>(o + (rows_before + lane / 4) * 512 + column) = word;
      }
    }
  }
}

}  // namespace hypermla::cute
