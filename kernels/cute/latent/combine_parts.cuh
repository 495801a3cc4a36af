// Merges the partial outputs of the tiles that the latent kernel cut over several work items, weighted by their log-sum-exp.
//
// grid = (combine items, 1 to 32, a power of two), 256 threads; each block merges its share of the columns of one tile of
// 64 rows. A few tiles of many parts want many blocks each, many tiles few. An item without slots is nothing to do: a list
// that is made on the device has room for the worst case.
// Launched programmatically: it waits for the kernel before it.
#pragma once

#include "combine_parts.h"
#include "hopper/warpgroup.h"
#include "hopper/wgmma.h"
#include "work.h"

namespace hypermla::cute {

// o_part [slots, 32, 256] float4 in the order of the latent kernel's fragments, lse_part [slots, 64] (log2), both fp32 ->
// o [B, rows, 512] and lse [B, rows] in lse_unit per log2.
template <CombinePartsProblem problem, CombinePartsTiling tiling>
__global__ void __launch_bounds__(256) combine_parts(const CombineItem* __restrict__ items, const float* o_part,
                                                     const float* lse_part, unsigned short* __restrict__ o,
                                                     float* __restrict__ lse, float lse_unit, int rows) {
  constexpr DType dtype = problem.dtype;
  constexpr int kBatch = 8;  // loads in flight per thread
  constexpr float kLowest = -1e30f, kInfinity = __builtin_bit_cast(float, 0x7f800000);
  __shared__ float weight[kMaxParts][64];
  const int thread = threadIdx.x;
  wait_for_previous();
  const CombineItem item = items[blockIdx.x];
  if (item.slots == 0) return;
  const float4* parts = reinterpret_cast<const float4*>(o_part) + item.first_slot * 32LL * 256 + thread;
  const float* lse_parts = lse_part + item.first_slot * 64LL;
  auto load_batch = [&](float4 (&x)[kBatch], int first, int column) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < item.slots) x[i] = __ldcg(parts + ((first + i) * 32 + column) * 256);
    }
  };
  // The first batch is on its way while the weights are made.
  float4 x[kBatch];
  load_batch(x, 0, blockIdx.y);
  for (int first = 0; first < item.slots * 64; first += kBatch * 256) {
    float part[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = first + i * 256 + thread;
      part[i] = index < item.slots * 64 ? __ldcg(lse_parts + index) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = first + i * 256 + thread;
      if (index < item.slots * 64) weight[index / 64][index % 64] = part[i];
    }
  }
  __syncthreads();
  {  // Four threads per row, side by side in a warp.
    const int row = thread >> 2;
    float top = kLowest, total = 0.0f;
    for (int i = thread & 3; i < item.slots; i += 4) top = fmaxf(top, weight[i][row]);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    for (int i = thread & 3; i < item.slots; i += 4) {
      const float w = exp2_fast(weight[i][row] - top);
      weight[i][row] = w;
      total += w;
    }
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    for (int i = thread & 3; i < item.slots; i += 4) weight[i][row] *= inverse;
    const int r = item.row_tile * 64 + row;
    if (blockIdx.y == 0 && (thread & 3) == 0 && r < rows) {
      lse[static_cast<long long>(item.request) * rows + r] =
          total == 0.0f ? -kInfinity : (top + log2_fast(total)) * lse_unit;
    }
  }
  __syncthreads();
  const int row = ((thread >> 5) & 3) * 16 + (thread & 31) / 4, r = item.row_tile * 64 + row;
  u32* out = reinterpret_cast<u32*>(o + (static_cast<long long>(item.request) * rows + r) * 512 + (thread >> 7) * 256 +
                                    2 * (thread & 3));
  for (int column = blockIdx.y; column < 32; column += gridDim.y) {  // in units of 8
    float4 sum = {};
    for (int first = 0; first < item.slots; first += kBatch) {
      if (first != 0 || column != static_cast<int>(blockIdx.y)) load_batch(x, first, column);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i >= item.slots) break;
        const float w0 = weight[first + i][row], w1 = weight[first + i][row + 8];
        sum.x += w0 * x[i].x;
        sum.y += w0 * x[i].y;
        sum.z += w1 * x[i].z;
        sum.w += w1 * x[i].w;
      }
    }
    if (r < rows) out[4 * column] = pack<dtype>(sum.x, sum.y);
    if (r + 8 < rows) out[4 * column + 8 * 256] = pack<dtype>(sum.z, sum.w);
  }
}

}  // namespace hypermla::cute
