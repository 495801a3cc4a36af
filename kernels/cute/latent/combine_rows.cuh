// Merges the partial outputs of tiles of few rows, weighted by their log-sum-exp: combine_parts.cuh for kernels that
// hold the output transposed, N rows to a tile.
//
// grid = (combine items, 1 to N), 128 to 512 threads; a block merges 8 rows x 64 columns of a tile at a time, each
// group of 128 threads its share of the parts: many parts want many groups, for enough loads in flight. An item without
// slots is nothing to do.
// Dynamic shared memory: 4096 bytes a group but the first. Every thread weighs its own rows, from the same few lines:
// cheaper than to share the weights, which would wait twice.
// Launched programmatically: it waits for the kernel before it. The items are there before that one starts.
#pragma once

#include "combine_rows.h"
#include "hopper/warpgroup.h"
#include "hopper/wgmma_narrow.h"
#include "work.h"

namespace hypermla::cute {

// Two rows and two columns each of merged outputs, and the rows' largest log-sum-exp and weights.
struct Merged {
  float4 sum;
  float2 top, total;

  __device__ void shrink(float2 to) {
    const float2 by = {exp2_fast(top.x - to.x), exp2_fast(top.y - to.y)};
    sum = {sum.x * by.x, sum.y * by.y, sum.z * by.x, sum.w * by.y};
    total = {total.x * by.x, total.y * by.y};
    top = to;
  }
};

// o_part [slots, 8, N / 8, 128] float4 in the order of the kernel's fragments, lse_part [slots, N] (log2), both fp32 ->
// o [B, rows, 512] and lse [B, rows] in lse_unit per log2. N = tile_rows.
template <CombineRowsProblem problem, CombineRowsTiling tiling>
__global__ void __launch_bounds__(512, 2)
    combine_rows(const CombineItem* __restrict__ items, const float* o_part, const float* lse_part,
                 unsigned short* __restrict__ o, float* __restrict__ lse, float lse_unit, int rows, int tile_rows) {
  constexpr int kBatch = 8;  // parts that a thread loads at a time
  constexpr float kLowest = -1e30f, kInfinity = __builtin_bit_cast(float, 0x7f800000);
  extern __shared__ __align__(16) Merged others[];  // [group - 1][thread]
  const int N = tile_rows, groups = blockDim.x / 128;
  const int thread = threadIdx.x & 127, group = threadIdx.x >> 7, lane = threadIdx.x & 31;
  const int row = 2 * (lane & 3);  // of the octet, in the fragment; and the one after it
  const CombineItem item = items[blockIdx.x];
  launch_next();
  wait_for_previous();  // even if there is nothing to do: who waits for this kernel relies on the one before it, too
  if (item.slots == 0) return;

#pragma unroll 1
  for (int unit = blockIdx.y; unit < N; unit += gridDim.y) {  // 8 rows x 64 columns
    const int m = unit % 8, octet = unit / 8;
    const float4* parts =
        reinterpret_cast<const float4*>(o_part) + (item.first_slot * 8LL + m) * (N * 16) + octet * 128 + thread;
    const float2* lse_parts =
        reinterpret_cast<const float2*>(lse_part + item.first_slot * static_cast<long long>(N) + octet * 8 + row);
    Merged all{{}, {kLowest, kLowest}, {}};
#pragma unroll 1
    for (int first = group; first < item.slots; first += kBatch * groups) {
      float4 x[kBatch];
      float2 part[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int slot = first + i * groups;
        const bool exists = slot < item.slots;
        part[i] = exists ? __ldcg(lse_parts + slot * (N / 2)) : float2{-kInfinity, -kInfinity};
        x[i] = exists ? __ldcg(parts + slot * (N * 128)) : float4{};
      }
      float2 top = all.top;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) top = {fmaxf(top.x, part[i].x), fmaxf(top.y, part[i].y)};
      all.shrink(top);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float2 w = {exp2_fast(part[i].x - top.x), exp2_fast(part[i].y - top.y)};
        all.total = {all.total.x + w.x, all.total.y + w.y};
        all.sum = {all.sum.x + w.x * x[i].x, all.sum.y + w.y * x[i].y, all.sum.z + w.x * x[i].z,
                   all.sum.w + w.y * x[i].w};
      }
    }
    if (groups > 1) {
      if (unit != static_cast<int>(blockIdx.y)) __syncthreads();  // the last unit's have been read
      if (group > 0) others[threadIdx.x - 128] = all;
      __syncthreads();
      if (group > 0) continue;
#pragma unroll 1
      for (int g = 0; g < groups - 1; ++g) {
        Merged other = others[g * 128 + thread];
        const float2 top = {fmaxf(all.top.x, other.top.x), fmaxf(all.top.y, other.top.y)};
        all.shrink(top);
        other.shrink(top);
        all.sum = {all.sum.x + other.sum.x, all.sum.y + other.sum.y, all.sum.z + other.sum.z, all.sum.w + other.sum.w};
        all.total = {all.total.x + other.total.x, all.total.y + other.total.y};
      }
    }
    const int first_row = item.row_tile * N + octet * 8;
    const long long rows_before = static_cast<long long>(item.request) * rows + first_row;
    if (m == 0 && thread < 4) {
      auto log_sum = [&](float top, float total) {
        return total == 0.0f ? -kInfinity : (top + log2_fast(total)) * lse_unit;
      };
      if (first_row + row < rows) lse[rows_before + row] = log_sum(all.top.x, all.total.x);
      if (first_row + row + 1 < rows) lse[rows_before + row + 1] = log_sum(all.top.y, all.total.y);
    }
    const float x = all.total.x == 0.0f ? 0.0f : __fdividef(1.0f, all.total.x);
    const float y = all.total.y == 0.0f ? 0.0f : __fdividef(1.0f, all.total.y);
    const u32 low = transpose_fragment(pack<problem.dtype>(all.sum.x * x, all.sum.y * y));
    const u32 high = transpose_fragment(pack<problem.dtype>(all.sum.z * x, all.sum.w * y));
    if (first_row + lane / 4 < rows) {  // transposed: the lane's row is lane / 4, its columns are row and row + 1
      u32* out = reinterpret_cast<u32*>(o + (rows_before + lane / 4) * 512 + m * 64 + thread / 32 * 16 + row);
      out[0] = low;
      out[4] = high;
    }
  }
}

}  // namespace hypermla::cute
