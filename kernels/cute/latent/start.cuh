// How the thread blocks of a launch start: apart from each other and from those of the next kernel, their code on its
// way.
#pragma once

#include "hopper/code.h"
#include "hopper/constants.h"
#include "hopper/warpgroup.h"
#include "latent/arguments.h"

namespace hypermla::cute::latent {

// Of the producers, warps that have nothing else to do: one asks ahead (ask_ahead.cuh), the last one for code and, in
// the end, watches for parts (merge_tiles.cuh).
inline constexpr unsigned kAskingWarp = 10, kWatchingWarp = 11;

// Whether more row tiles than two neighbours read the tokens of an item.
__device__ __forceinline__ bool many_share(const WorkItem& item, const LatentArguments& with) {
  return item.queries * with.heads > 2 * kTile;
}

// Thread blocks that start together load together, and memory rests in between: loads take longer until the blocks have
// drifted apart, after some 30 blocks of tokens. So they start apart, but for neighbours, which may read the same
// tokens, where the first item has enough blocks to gain more than that costs. The threads that load.
inline constexpr int kLeastToStartApart = 12;  // token blocks
inline constexpr u32 kStartApart = 50;         // clocks
__device__ __forceinline__ void start_apart(const WorkItem& first, const LatentArguments& with) {
  if (first.end - first.begin < kLeastToStartApart || many_share(first, with)) return;
  pass_clocks(blockIdx.x / 2 * kStartApart);
}

// Lets the thread blocks of the next kernel start beside these, unless that costs more than it gains. They take the
// multiprocessors in the order in which these leave them, so row tiles that read the same tokens do not lie side by
// side, where their reads merge on the way to L2. Two tiles are a cluster (LatentPlan::side_by_side); with more, the
// next kernel waits for the end of a long list. A warp that has nothing else to do.
inline constexpr int kLongList = 32;  // token blocks, some 50 us
__device__ __forceinline__ void launch_next_if_short(const WorkItem* __restrict__ work, const LatentArguments& with) {
  int blocks = 0;
  for (; work->begin != work->end; ++work) {
    if (many_share(*work, with)) blocks += work->end - work->begin;
    if (blocks > kLongList) return;
  }
  launch_next();
}

// Asks L2 for the code of the kernel, each thread block for some lines of it. Between two calls an engine reads more
// weights than L2 holds, so code comes from memory, and a thread block waits for one line after the other: 44 clocks
// for each eight instructions, from L2 14. Together the thread blocks wait once. All threads call it, before all else;
// a warp that has nothing else to do then asks.
__device__ __forceinline__ void ask_for_code() {
  constexpr unsigned kLine = 128;
  if (threadIdx.x / 32 != kWatchingWarp) return;
  const CodeRange code = code_range();
  const unsigned threads = gridDim.x * 32;
#pragma unroll 1
  for (u64 line = code.begin + (blockIdx.x + gridDim.x * lane_id()) * kLine; line < code.end; line += threads * kLine)
    prefetch_line(line);
}

}  // namespace hypermla::cute::latent
