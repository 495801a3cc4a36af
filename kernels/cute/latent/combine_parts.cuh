// Merges the partial outputs of the tiles that the latent kernel cut over several work items, weighted by their log-sum-exp.
//
// grid = (combine items, 1 to 64), 128 to 512 threads; a block merges 64 rows x 8 columns of a tile at a time, each
// group of 128 threads its share of the parts: many parts want many groups, for enough loads in flight. An item without
// slots is nothing to do: a list that is made on the device has room for the worst case.
// Dynamic shared memory: 4096 bytes a group but the first. Every thread weighs its own rows, from the same few lines:
// cheaper than to share the weights, which would wait twice.
// Launched programmatically: it waits for the kernel before it.
#pragma once

#include "combine_parts.h"
#include "hopper/warpgroup.h"
#include "hopper/wgmma.h"
#include "work.h"

namespace hypermla::cute {

// Two columns each of two rows of merged outputs, and the rows' largest log-sum-exp and weights.
struct Merged {
  float4 sum;
  float2 top, total;

  __device__ void shrink(float2 to) {
    const float2 by = {exp2_fast(top.x - to.x), exp2_fast(top.y - to.y)};
    sum = {sum.x * by.x, sum.y * by.x, sum.z * by.y, sum.w * by.y};
    total = {total.x * by.x, total.y * by.y};
    top = to;
  }
};

// o_part [slots, 32, 2, 128] float4 in the order of the latent kernel's fragments, lse_part [slots, 64] (log2), both fp32
// -> o [B, rows, 512] and lse [B, rows] in lse_unit per log2.
template <CombinePartsProblem problem, CombinePartsTiling tiling>
__global__ void __launch_bounds__(512)
    combine_parts(const CombineItem* __restrict__ items, const float* o_part, const float* lse_part,
                  unsigned short* __restrict__ o, float* __restrict__ lse, float lse_unit, int rows) {
  constexpr int kBatch = 8;  // parts that a thread loads at a time
  constexpr float kLowest = -1e30f, kInfinity = __builtin_bit_cast(float, 0x7f800000);
  extern __shared__ __align__(16) Merged others[];  // [group - 1][thread]
  const int groups = blockDim.x / 128, thread = threadIdx.x & 127, group = threadIdx.x >> 7;
  const int row = thread / 32 * 16 + thread % 32 / 4;  // of the tile; and the one 8 after it
  launch_next();
  wait_for_previous();
  const CombineItem item = items[blockIdx.x];
  if (item.slots == 0) return;

#pragma unroll 1
  for (int unit = blockIdx.y; unit < 64; unit += gridDim.y) {  // 8 columns of 32, of the left or the right half
    const float4* parts = reinterpret_cast<const float4*>(o_part) + (item.first_slot * 64LL + unit) * 128 + thread;
    const float* lse_parts = lse_part + item.first_slot * 64LL + row;
    Merged all{{}, {kLowest, kLowest}, {}};
#pragma unroll 1
    for (int first = group; first < item.slots; first += kBatch * groups) {
      float4 x[kBatch];
      float2 part[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int slot = first + i * groups;
        const bool exists = slot < item.slots;
        part[i].x = exists ? __ldcg(lse_parts + slot * 64) : -kInfinity;
        part[i].y = exists ? __ldcg(lse_parts + slot * 64 + 8) : -kInfinity;
        x[i] = exists ? __ldcg(parts + slot * 8192) : float4{};
      }
      float2 top = all.top;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) top = {fmaxf(top.x, part[i].x), fmaxf(top.y, part[i].y)};
      all.shrink(top);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float2 w = {exp2_fast(part[i].x - top.x), exp2_fast(part[i].y - top.y)};
        all.total = {all.total.x + w.x, all.total.y + w.y};
        all.sum = {all.sum.x + w.x * x[i].x, all.sum.y + w.x * x[i].y, all.sum.z + w.y * x[i].z,
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
    const int first_row = item.row_tile * 64 + row;
    const long long row_of_all = static_cast<long long>(item.request) * rows + first_row;
    const bool low = first_row < rows, high = first_row + 8 < rows;
    if (unit == 0 && (thread & 3) == 0) {
      auto log_sum = [&](float top, float total) {
        return total == 0.0f ? -kInfinity : (top + log2_fast(total)) * lse_unit;
      };
      if (low) lse[row_of_all] = log_sum(all.top.x, all.total.x);
      if (high) lse[row_of_all + 8] = log_sum(all.top.y, all.total.y);
    }
    const float a = all.total.x == 0.0f ? 0.0f : 1.0f / all.total.x,
                b = all.total.y == 0.0f ? 0.0f : 1.0f / all.total.y;
    u32* out = reinterpret_cast<u32*>(o + row_of_all * 512 + unit % 2 * 256 + unit / 2 * 8 + 2 * (thread & 3));
    if (low) out[0] = pack<problem.dtype>(all.sum.x * a, all.sum.y * a);
    if (high) out[8 * 256] = pack<problem.dtype>(all.sum.z * b, all.sum.w * b);
  }
}

}  // namespace hypermla::cute
