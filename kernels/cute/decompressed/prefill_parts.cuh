// Tiles of the prefill kernel whose tokens are cut into parts (prefill_list.h). A thread block stores its part in fp32;
// that which stores a tile's last one merges all of them by their log-sum-exps, in their order, so that the bits of the
// output do not depend on which was last. Where every part has a thread block of its own, these wait for each other,
// and each merges a share of the rows. The two consumer warpgroups, of 64 rows each, do so apart from each other.
#pragma once

#include "hopper/constants.h"
#include "hopper/global.h"
#include "hopper/warpgroup.h"
#include "prefill_arrival.cuh"
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

// Merges a share of the rows of a warpgroup, from `row` on, each warp every `step`-th. store(row, columns, maximum,
// sum): 4 columns for each lane of a warp, and the maximum and sum of which the row's log-sum-exp is made.
template <class Store>
__device__ __forceinline__ void merge_rows(const PrefillParts& parts, const PrefillTile& tile, int row, int step,
                                           int end, Store store) {
  constexpr int kAtOnce = 4;  // rows, and parts: as many loads as registers are free for are on their way
  const int lane = lane_id(), count = tile.parts;
#pragma unroll 1
  for (; row < end; row += kAtOnce * step) {
    float4 columns[kAtOnce] = {};
    float maximum[kAtOnce], sum[kAtOnce] = {};
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) maximum[j] = kLeastScore;
#pragma unroll 1
    for (int part = 0; part < count; part += kAtOnce) {
      const long long at = static_cast<long long>(tile.first_slot + part) * kRows + row;
      const int of_part = lane / kAtOnce % kAtOnce, of_row = lane % kAtOnce * step;  // this lane's log-sum-exp
      const float lses =
          load_at_once<float>(parts.lse + at + of_part * kRows + of_row, part + of_part < count && row + of_row < end);
      float4 more[kAtOnce][kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
          more[k][j] = load_at_once<float4>(parts.o + (at + k * kRows + j * step) * kPartColumns + 4 * lane,
                                            part + k < count && row + j * step < end);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        float weight[kAtOnce], top = maximum[j];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          weight[k] = __shfl_sync(~0u, lses, k * kAtOnce + j);
          if (part + k >= count) weight[k] = -kInfinity;
          top = fmaxf(top, weight[k]);
        }
        const float before = exp2_fast(maximum[j] - top);
        maximum[j] = top;
        sum[j] *= before;
        columns[j] = {columns[j].x * before, columns[j].y * before, columns[j].z * before, columns[j].w * before};
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          weight[k] = exp2_fast(weight[k] - top);
          sum[j] += weight[k];
          columns[j].x += more[k][j].x * weight[k];
          columns[j].y += more[k][j].y * weight[k];
          columns[j].z += more[k][j].z * weight[k];
          columns[j].w += more[k][j].w * weight[k];
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const float by = sum[j] == 0.0f ? 0.0f : __fdividef(1.0f, sum[j]);
      if (row + j * step < end)
        store(row + j * step, float4{columns[j].x * by, columns[j].y * by, columns[j].z * by, columns[j].w * by},
              maximum[j], sum[j]);
    }
  }
}

// What follows store_part(), of all threads of a warpgroup.
template <class Store>
__device__ __forceinline__ void merge_parts(const PrefillParts& parts, const PrefillTile& tile, int group, int barrier,
                                            Store store) {
  constexpr int kWarps = 4;
  const int first = group * kGroupRows, end = min(first + kGroupRows, tile.rows);
  if (first >= end) return;
  named_sync(barrier, 128);
  PartsLeft found;
  if ((thread_id() & 127) == 0) found = arrive(parts.arrived + tile.first_slot + group, tile);
  if (!named_any(barrier, 128, found.complete)) return;
  const int shares = tile.together ? tile.parts : 1, warp = thread_id() >> 5 & (kWarps - 1);
  const auto merge = [&](int share) {
    merge_rows(parts, tile, first + warp + kWarps * share, kWarps * shares, end, store);
  };
  merge(tile.together ? tile.part : 0);
  if (named_any(barrier, 128, found.shares_of != 0)) {
#pragma unroll 1
    for (int share = 0; share < shares; ++share)
      if (named_any(barrier, 128, found.shares_of >> share & 1)) merge(share);
  }
}

}  // namespace hypermla::cute
