// Merges the partial outputs of the tiles that the latent kernel cut over several work items, weighted by their
// log-sum-exp.
//
// grid = (combine items, 1 to 32), 128 to 1024 threads. A block merges 64 rows x 16 columns of a tile at a time. Each
// group of 128 threads merges its share of the parts: many parts need many groups, to keep enough loads in flight. An
// item without slots is skipped: a list that is made on the device has room for the worst case.
// Dynamic shared memory: kCombineGroupBytes for each group but the first. Every thread computes the weights of its own
// rows: sharing them would need two more waits.
// Launched programmatically: it waits for the kernel before it, but reads its list earlier. The kernel that made the
// list had ended when the kernel before let this one start.
#pragma once

#include "combine_parts.h"
#include "latent/merge_parts.cuh"
#include "work.h"

namespace hypermla::cute {

// o_part [slots, 16, 2, 128] uint4 in the order of the latent kernel's fragments, 16-bit elements; lse_part [slots, 64]
// (log2) fp32 -> o [B, rows, 512] and lse [B, rows] in lse_unit per log2.
template <CombinePartsProblem problem, CombinePartsTiling tiling>
__global__ void __launch_bounds__(1024)
    combine_parts(const CombineItem* __restrict__ items, const uint4* o_part, const float* lse_part,
                  unsigned short* __restrict__ o, float* __restrict__ lse, float lse_unit, int rows) {
  extern __shared__ __align__(16) unsigned char shared[];
  static_assert(sizeof(latent::Merged) * 128 == kCombineGroupBytes);
  const int thread = threadIdx.x & 127,
            row = thread / 32 * 16 + thread % 32 / 4;  // of the tile; and the one 8 after it
  const CombineItem item = items[blockIdx.x];
  launch_next();
  wait_for_previous();
  if (item.slots == 0) return;

#pragma unroll 1
  for (int unit = blockIdx.y; unit < 32; unit += gridDim.y) {  // 16 columns, of the left or the right half
    const uint4* parts = o_part + (item.first_slot * 32LL + unit) * 128 + thread;
    const float* lse_parts = lse_part + item.first_slot * 64LL + row;
    const latent::Merged all = latent::merge<problem.dtype>(
        item.slots, reinterpret_cast<latent::Merged*>(shared),
        [&](int first, int i, bool wanted) { return latent::load_at_once(parts + first * 4096 + i * 4096, wanted); },
        [&](int first, int i, bool wanted) {
          const float* of = lse_parts + first * 64 + i * 64;
          return float2{latent::load_at_once(of, wanted), latent::load_at_once(of + 8, wanted)};
        });
    if (threadIdx.x >= 128) continue;
    const int first_row = item.row_tile * 64 + row;
    const long long row_of_all = static_cast<long long>(item.request) * rows + first_row;
    const bool low = first_row < rows, high = first_row + 8 < rows;
    if (unit == 0 && (thread & 3) == 0) {
      const float2 log_sum = all.lse(lse_unit);
      if (low) lse[row_of_all] = log_sum.x;
      if (high) lse[row_of_all + 8] = log_sum.y;
    }
    u32* out = reinterpret_cast<u32*>(o + row_of_all * 512 + unit % 2 * 256 + unit / 2 * 16 + 2 * (thread & 3));
    if (low) {
      out[0] = pack<problem.dtype>(all.first.x, all.first.y);
      out[4] = pack<problem.dtype>(all.first.z, all.first.w);
    }
    if (high) {
      out[8 * 256] = pack<problem.dtype>(all.second.x, all.second.y);
      out[8 * 256 + 4] = pack<problem.dtype>(all.second.z, all.second.w);
    }
  }
}

}  // namespace hypermla::cute
