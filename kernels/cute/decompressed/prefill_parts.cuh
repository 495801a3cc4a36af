// Tiles of the prefill kernel whose tokens are cut into parts (prefill_list.h). A thread block stores its part in fp32;
// that which stores a tile's last one merges all of them by their log-sum-exps, in their order, so that the bits of the
// output do not depend on which was last. The two consumer warpgroups, of 64 rows each, do so apart from each other.
#pragma once

#include "hopper/constants.h"
#include "hopper/global.h"
#include "hopper/warpgroup.h"
#include "prefill_list.h"

namespace hypermla::cute {

// Rows `row` and row + 8 of a part, as the products leave them in `o` (hopper/rows.h), times `factors`. lse: in log2.
// Only what the tile has: of few queries most rows are nobody's.
__device__ __forceinline__ void store_part(const PrefillParts& parts, const PrefillTile& tile, int row, const float* o,
                                           float2 factors, float2 lse) {
  const long long at = static_cast<long long>(tile.first_slot + tile.part) * kRows + row;
  const bool first = row < tile.rows, second = row + 8 < tile.rows;
  const int column = lane_id() & 3;
  float2* const to = reinterpret_cast<float2*>(parts.o + at * kPartColumns) + column;
  constexpr int kNextRow = 8 * kPartColumns / 2;
#pragma unroll
  for (int i = 0; i < kPartColumns / 8; ++i) {
    if (first) to[4 * i] = {o[4 * i] * factors.x, o[4 * i + 1] * factors.x};
    if (second) to[4 * i + kNextRow] = {o[4 * i + 2] * factors.y, o[4 * i + 3] * factors.y};
  }
  if (column == 0) {
    parts.lse[at] = lse.x;
    parts.lse[at + 8] = lse.y;
  }
}

// Whether the warpgroup, all of whose threads call it behind store_part(), has stored the last of the tile's parts.
__device__ __forceinline__ bool parts_are_complete(const PrefillParts& parts, const PrefillTile& tile, int group,
                                                   int barrier) {
  named_sync(barrier, 128);
  bool last = false;
  if ((thread_id() & 127) == 0) {
    fence_all();
    unsigned* const arrived = parts.arrived + 2 * tile.first_slot + group;
    last = atomicAdd(arrived, 1u) == static_cast<unsigned>(tile.parts - 1);
    if (last) *arrived = 0;  // for the next launch
    fence_all();
  }
  return named_any(barrier, 128, last);
}

// Merges the rows of a warpgroup. store(row, columns, maximum, sum): 4 columns for each lane of a warp, and the maximum
// and sum of which the row's log-sum-exp is made.
template <int rows, class Store>
__device__ __forceinline__ void merge_parts(const PrefillParts& parts, const PrefillTile& tile, int group,
                                            Store store) {
  constexpr int kAtOnce = 8;
  const int lane = lane_id(), warp = thread_id() >> 5 & 3;
  const int first = group * rows + warp * (rows / 4), last = min(first + rows / 4, tile.rows);
#pragma unroll 1
  for (int row = first; row < last; row += kAtOnce) {
    float4 columns[kAtOnce] = {};
    float maximum[kAtOnce], sum[kAtOnce] = {};
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) maximum[j] = kLeastScore;
#pragma unroll 1
    for (int part = 0; part < tile.parts; ++part) {
      const long long at = static_cast<long long>(tile.first_slot + part) * kRows + row;
      const float lses = load_at_once<float>(parts.lse + at + lane % kAtOnce, true);
      float4 more[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        more[j] = load_at_once<float4>(parts.o + (at + j) * kPartColumns + 4 * lane, true);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const float lse = __shfl_sync(~0u, lses, j), top = fmaxf(maximum[j], lse);
        const float before = exp2_fast(maximum[j] - top), weight = exp2_fast(lse - top);
        columns[j] = {columns[j].x * before + more[j].x * weight, columns[j].y * before + more[j].y * weight,
                      columns[j].z * before + more[j].z * weight, columns[j].w * before + more[j].w * weight};
        sum[j] = sum[j] * before + weight;
        maximum[j] = top;
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const float by = sum[j] == 0.0f ? 0.0f : __fdividef(1.0f, sum[j]);
      store(row + j, float4{columns[j].x * by, columns[j].y * by, columns[j].z * by, columns[j].w * by}, maximum[j],
            sum[j]);
    }
  }
}

}  // namespace hypermla::cute
