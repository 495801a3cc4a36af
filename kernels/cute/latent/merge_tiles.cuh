// The end of the latent kernels: tiles that were cut over several work items are merged from their partial outputs by
// their log-sum-exp. A thread block that wrote one of the n parts of a tile merges an n-th of the tile, when all parts
// are there. So the work is even for any number of parts, and no thread block waits for tiles that it had no part in.
//
// The parts of a tile fall into chunks of 32 uint4, one for each lane of a warp. A warp merges a chunk or, of many
// parts, a team of warps, each of which adds every team-th part. In which order parts are added follows from their
// number alone.
#pragma once

#include "hopper/constants.h"
#include "hopper/fragments.h"
#include "hopper/global.h"
#include "hopper/warpgroup.h"
#include "latent/arguments.h"

namespace hypermla::cute::latent {

inline constexpr int kMergeWarps = 8;  // of the two consumer warpgroups
// How long a thread block waits for others, about 0.3 ms: they may not all have found a place, since a stream may have
// fewer multiprocessors than the device. The last thread block to arrive merges the share of one that leaves.
inline constexpr int kMergePatience = 1 << 19;  // clocks

// The running maximum that a row of a tile begins with. The rows behind the request's last are those of other requests.
// Theirs never rises: maxima rise for all rows of a warp or tile at once, and the request's bits shall not depend on
// its neighbours in the tile.
__device__ __forceinline__ float first_maximum(int row, int rows) { return row < rows ? kLeastScore : -kLeastScore; }

// Named. The consumers meet apart from the producers. A team has a barrier of its own for each size of teams: nothing
// lies between two tiles, so some warps may be at the next one's while others of them still meet for the one before.
enum MergeBarrier { kMergeAll = 5, kMergeTeams = 6, kMergeConsumers = 13 };
__device__ __forceinline__ int barrier_of_team(int team, int number) {  // 6 | 7, 8 | 9 to 12
  return kMergeTeams - 1 + kMergeWarps / team + number;
}

// What a piece of a row is multiplied by where it is stored as a part, and where it is read: powers of two. `largest`
// comes to lie in [2^14, 2^15), infinities stay what they are.
struct PartScale {
  float store, load;
  __device__ __forceinline__ explicit PartScale(float largest) {
    const u32 exponent = max(__float_as_uint(largest) >> 23 & 255, 15u);
    store = __uint_as_float((268 - exponent) << 23);
    load = __uint_as_float((exponent - 14) << 23);
  }
};

// Of a piece of two rows, `next_row` apart: returns the factors of the store; one thread writes those of the load.
template <int next_row>
__device__ __forceinline__ float2 scale_part(float2 largest, float* loads, bool writes) {
  const PartScale first(largest.x), second(largest.y);
  if (writes) {
    loads[0] = first.load;
    loads[next_row] = second.load;
  }
  return {first.store, second.store};
}

// Four columns each of two rows.
struct TwoRows {
  float4 first = {}, second = {};

  // Words of float16: two of the first row, two of the second, and again.
  __device__ __forceinline__ void add(uint4 x, float2 w) {
    constexpr DType of = DType::float16;
    const float2 a = unpack<of>(x.x), b = unpack<of>(x.y), c = unpack<of>(x.z), d = unpack<of>(x.w);
    first = {first.x + w.x * a.x, first.y + w.x * a.y, first.z + w.x * c.x, first.w + w.x * c.y};
    second = {second.x + w.y * b.x, second.y + w.y * b.y, second.z + w.y * d.x, second.w + w.y * d.y};
  }
  __device__ __forceinline__ void scale(float2 by) {
    first = {first.x * by.x, first.y * by.x, first.z * by.x, first.w * by.x};
    second = {second.x * by.y, second.y * by.y, second.z * by.y, second.w * by.y};
  }
};

// Of two rows the largest log-sum-exp (log2) and the sum of the weights relative to it.
struct RowSums {
  float2 top = {kLeastScore, kLeastScore}, total = {};

  // Raises `top`; what was weighed before counts so much.
  __device__ __forceinline__ float2 raise(float2 to) {
    const float2 by = {exp2_fast(top.x - to.x), exp2_fast(top.y - to.y)};
    total = {total.x * by.x, total.y * by.y};
    top = to;
    return by;
  }
  __device__ __forceinline__ float2 weigh(float2 lse) {
    const float2 w = {exp2_fast(lse.x - top.x), exp2_fast(lse.y - top.y)};
    total = {total.x + w.x, total.y + w.y};
    return w;
  }
  __device__ __forceinline__ float2 inverse(float2 sink) const {
    const float2 all = {total.x + exp2_fast(sink.x - top.x), total.y + exp2_fast(sink.y - top.y)};
    return {all.x == 0.0f ? 0.0f : 1.0f / all.x, all.y == 0.0f ? 0.0f : 1.0f / all.y};
  }
  // Of the merged rows, in `unit` per log2; `empty` without tokens.
  __device__ __forceinline__ float2 lse(float unit, float empty) const {
    return {total.x == 0.0f ? empty : (top.x + log2_fast(total.x)) * unit,
            total.y == 0.0f ? empty : (top.y + log2_fast(total.y)) * unit};
  }
};

// What the warps of a team hand each other.
struct MergeScratch {
  TwoRows rows[kMergeWarps][32];
  RowSums sums[kMergeWarps][32];
};

// The next items of a thread block that cover but a part of their tile.
struct CutItems {
  WorkItem items[32];
  volatile int count;
  volatile int next;       // of the list, behind those that were looked at; -1: no more
  volatile int turned;     // the highest bit of `arrived`, the same for all tiles until they are complete
  volatile u32 complete;   // those whose tiles are complete
  volatile int inherits;   // whether another thread block left us its share
  volatile int inherited;  // the next such part of the tile at work
};

// The high half of `arrived` turns its highest bit over when all parts of a tile are there, from either value. The low
// half counts thread blocks that have left before.
__device__ __forceinline__ bool top_bit(u64 x) { return static_cast<long long>(x) < 0; }

// Gives the own share of the tile up, unless the tile has become complete.
__device__ __forceinline__ bool leave(MergeState& tile, MergeState& own, bool turned) {
  own.left = 1;
  fence_all();
  if (top_bit(atomicAdd(&tile.arrived, 1ull)) == turned) return true;
  fence_all();  // what the others wrote before is read next
  own.left = 0;
  atomicAdd(&tile.arrived, ~0ull);
  return false;
}

// Where the parts of a tile lie, for one lane.
template <class Tile>
struct Parts {
  static constexpr int kDistance = Tile::kRows * 64;  // uint4 of a partial output
  static constexpr int kFloats = Tile::kRows * part_row_floats(Tile::kRows);
  const uint4* o;
  const float* lse;
  int count;

  __device__ __forceinline__ Parts(const LatentArguments& with, const WorkItem& item)
      : o(static_cast<const uint4*>(with.o_part) + (item.slot - item.part) * static_cast<long long>(kDistance) +
          lane_id()),
        lse(with.lse_part + (item.slot - item.part) * static_cast<long long>(kFloats)),
        count(item.parts) {}
  __device__ __forceinline__ uint4 load(int part, int chunk, bool wanted = true) const {
    return load_at_once(o + part * kDistance + chunk * 32, wanted && part < count);
  }
  __device__ __forceinline__ float2 load_lse(int part, int row) const {
    return load_rows(lse + part * kFloats + row, part < count, -kInfinity);
  }
  __device__ __forceinline__ float2 load_scale(int part, int chunk, bool wanted = true) const {
    const int at = (1 + Tile::piece(chunk)) * Tile::kRows + Tile::row(chunk, lane_id());
    return load_rows(lse + part * kFloats + at, wanted && part < count, 0.0f);
  }
  static __device__ __forceinline__ float2 load_rows(const float* from, bool wanted, float otherwise) {
    return {load_at_once(from, wanted, otherwise), load_at_once(from + Tile::kNextRow, wanted, otherwise)};
  }
};

// The sinks of the two rows of which the lane holds columns of a chunk.
template <class Tile>
__device__ __forceinline__ float2 sinks_of(const LatentArguments& with, const WorkItem& item, int chunk) {
  const int row = item.row_tile * Tile::kRows + Tile::row(chunk, lane_id());
  return {with.sink(row), with.sink(row + Tile::kNextRow)};
}

// Merges chunks begin .. end - 1 of a tile of at most `most` parts, by single warps.
template <DType dtype, class Tile, int most>
__device__ __forceinline__ void merge_few(const LatentArguments& with, const WorkItem& item, int begin, int end) {
  constexpr int kAtOnce = Tile::kLoads / most;
  constexpr int kStep = Tile::kPeriod > kMergeWarps ? Tile::kPeriod : kMergeWarps;
  constexpr bool kOnePiece = Tile::kPieceStep == kStep;  // of all chunks of a warp
  const Parts<Tile> parts(with, item);
#pragma unroll 1
  for (int first = begin + static_cast<int>(threadIdx.x >> 5); first < min(end, begin + kStep); first += kMergeWarps) {
    uint4 x[kAtOnce][most];
    float2 scale[kOnePiece ? 1 : kAtOnce][most];
    const auto load = [&](int chunk) {
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
#pragma unroll
        for (int i = 0; i < most; ++i) x[u][i] = parts.load(i, chunk + u * kStep, chunk + u * kStep < end);
        if (kOnePiece) continue;
#pragma unroll
        for (int i = 0; i < most; ++i) scale[u][i] = parts.load_scale(i, chunk + u * kStep, chunk + u * kStep < end);
      }
    };
    float2 w[most];
    load(first);
#pragma unroll
    for (int i = 0; i < most; ++i) {
      w[i] = parts.load_lse(i, Tile::row(first, lane_id()));
      if (kOnePiece) scale[0][i] = parts.load_scale(i, first);
    }
    RowSums sums;
    float2 top = sums.top;
#pragma unroll
    for (int i = 0; i < most; ++i) top = {fmaxf(top.x, w[i].x), fmaxf(top.y, w[i].y)};
    sums.top = top;
#pragma unroll
    for (int i = 0; i < most; ++i) w[i] = sums.weigh(w[i]);
    const float2 inverse = sums.inverse(sinks_of<Tile>(with, item, first));
#pragma unroll
    for (int i = 0; i < most; ++i) {
      w[i] = {w[i].x * inverse.x, w[i].y * inverse.y};
      if (kOnePiece) w[i] = {w[i].x * scale[0][i].x, w[i].y * scale[0][i].y};
    }
    const typename Tile::Output out(with, item, first, sums);
#pragma unroll 1
    for (int chunk = first; chunk < end; chunk += kAtOnce * kStep) {
      if (chunk > first) load(chunk);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (chunk + u * kStep >= end) break;
        TwoRows all;
#pragma unroll
        for (int i = 0; i < most; ++i) {
          const float2 by = kOnePiece ? float2{1.0f, 1.0f} : scale[u][i];
          all.add(x[u][i], {w[i].x * by.x, w[i].y * by.y});
        }
        out.template write<dtype>(chunk + u * kStep, all);
      }
    }
  }
}

// The same of many parts, by teams of warps.
template <DType dtype, class Tile>
__device__ __forceinline__ void merge_many(const LatentArguments& with, const WorkItem& item, int begin, int end,
                                           int team, MergeScratch& scratch) {
  const int warp = threadIdx.x >> 5, lane = lane_id(), member = warp & (team - 1), number = warp / team;
  const auto team_sync = [&] { named_sync(barrier_of_team(team, number), team * 32); };
  constexpr int kLoads = Tile::kLoads;
  const Parts<Tile> parts(with, item);
#pragma unroll 1
  for (int chunk = begin + number; chunk < end; chunk += kMergeWarps / team) {
    TwoRows all;
    RowSums sums;
#pragma unroll 1
    for (int part = member; part - member < item.parts; part += kLoads * team) {
      uint4 x[kLoads];
      float2 lse[kLoads], scale[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) x[i] = parts.load(part + i * team, chunk);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        lse[i] = parts.load_lse(part + i * team, Tile::row(chunk, lane));
        scale[i] = parts.load_scale(part + i * team, chunk);
      }
      float2 top = sums.top;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) top = {fmaxf(top.x, lse[i].x), fmaxf(top.y, lse[i].y)};
      all.scale(sums.raise(top));
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const float2 w = sums.weigh(lse[i]);
        all.add(x[i], {w.x * scale[i].x, w.y * scale[i].y});
      }
    }
#pragma unroll 1
    for (int half = team / 2; half > 0; half /= 2) {
      team_sync();  // what was handed over before has been read
      if (member >= half && member < 2 * half) {
        scratch.rows[warp][lane] = all;
        scratch.sums[warp][lane] = sums;
      }
      team_sync();
      if (member >= half) continue;
      TwoRows other = scratch.rows[warp + half][lane];
      RowSums of_other = scratch.sums[warp + half][lane];
      const float2 top = {fmaxf(sums.top.x, of_other.top.x), fmaxf(sums.top.y, of_other.top.y)};
      all.scale(sums.raise(top));
      other.scale(of_other.raise(top));
      const float4 &x = other.first, &y = other.second;
      all.first = {all.first.x + x.x, all.first.y + x.y, all.first.z + x.z, all.first.w + x.w};
      all.second = {all.second.x + y.x, all.second.y + y.y, all.second.z + y.z, all.second.w + y.w};
      sums.total = {sums.total.x + of_other.total.x, sums.total.y + of_other.total.y};
    }
    if (member > 0) continue;
    all.scale(sums.inverse(sinks_of<Tile>(with, item, chunk)));
    typename Tile::Output(with, item, chunk, sums).template write<dtype>(chunk, all);
  }
}

// Looks at 32 items of the thread block from `first` on; a whole warp.
__device__ __forceinline__ void collect(CutItems& cut, const WorkItem* items, int first, const LatentArguments& with) {
  const int lane = lane_id(), i = first + lane;
  const WorkItem item = i < with.rounds ? items[i] : WorkItem{};
  const u32 behind = __ballot_sync(~0u, item.begin == item.end);  // from its lowest bit on
  const u32 set = __ballot_sync(~0u, item.slot >= 0) & ((behind & -behind) - 1);
  if (set >> lane & 1) cut.items[__popc(set & ((1u << lane) - 1))] = item;
  if (lane == 0) {
    cut.count = __popc(set);
    cut.next = behind ? -1 : first + 32;
  }
  __syncwarp();
}

// The first look, by the last warp of the producers while the consumers have other work. These hear of it in
// merge_tiles().
__device__ __forceinline__ void collect_ahead(CutItems& cut, const WorkItem* items, const LatentArguments& with) {
  if (threadIdx.x < 352) return;
  collect(cut, items, 0, with);
  wait_for_previous();  // which turns the bit, too
  if (lane_id() == 0 && cut.count > 0)
    cut.turned = top_bit(*const_cast<volatile u64*>(&with.merges[cut.items[0].slot - cut.items[0].part].arrived));
  named_arrive(kMergeAll, 32 * kMergeWarps + 32);
}

// What follows the last item of the consumers, 256 threads from 0 on. `items`: those of the thread block.
//
// Tile says how a partial output lies in memory: kRows rows of 512 columns; lane l of chunk c holds four columns each
// of row(c, l) and of the row kNextRow behind it, the same rows every kPeriod chunks. piece() is that of a row's
// columns (see part_pieces), the same every kPieceStep chunks. Its Output writes the merged rows of a lane: made of the
// first chunk, it takes every kPeriod-th. kLoads is how many loads registers can wait for.
template <DType dtype, class Tile>
__device__ __forceinline__ void merge_tiles(const LatentArguments& with, const WorkItem* items, CutItems& cut,
                                            MergeScratch& scratch) {
  constexpr int kChunks = Tile::kRows * 2;  // of a tile
  const int lane = lane_id();
  const bool first_warp = threadIdx.x < 32;
  named_sync(kMergeAll, 32 * kMergeWarps + 32);  // the parts are written, and shared memory is free
  if (cut.count == 0 && cut.next < 0) return;

  u64 before = 0, own = 0;  // of `arrived` of the lane's tile; what the lane added
  bool inherits = false;
  const auto arrive = [&](const WorkItem& item) {
    own = static_cast<u64>(item.part == 0 ? 0x80000000u - (item.parts - 1) : 1) << 32;
    before = atomicAdd(&with.merges[item.slot - item.part].arrived, own);
  };
  const auto look_back = [&](const WorkItem& item) {  // were we the last, and has another thread block left?
    const u32 left = static_cast<u32>(before);
    if (left == 0 || top_bit(before) == top_bit(before + own)) return;
    atomicAdd(&with.merges[item.slot - item.part].arrived, -static_cast<u64>(left));
    inherits = true;
  };
  if (first_warp) {  // arrives at all tiles, before it waits for any
    fence_all();
    if (lane < cut.count) arrive(cut.items[lane]);
    if (cut.next >= 0) {
      if (lane < cut.count) look_back(cut.items[lane]);
      for (int first = cut.next; first >= 0;) {
        const int i = first + lane;
        const WorkItem item = i < with.rounds ? items[i] : WorkItem{};
        const u32 behind = __ballot_sync(~0u, item.begin == item.end);
        if (item.slot >= 0 && static_cast<u32>(lane) < __ffs(behind) - 1u) {
          arrive(item);
          look_back(item);
        }
        first = behind ? -1 : first + 32;
      }
      const bool turned = __any_sync(~0u, top_bit(before));
      if (lane == 0) cut.turned = turned;
      before = 0;  // was looked at
    }
  }
#pragma unroll 1
  for (;;) {
    if (first_warp) {
      __syncwarp();
      const int count = cut.count;
      bool complete = lane >= count;
      const WorkItem& item = cut.items[complete ? 0 : lane];
      MergeState& tile = with.merges[item.slot - item.part];
      const bool turned = cut.turned;
      const long long start = clock64();
      do {
        if (!complete) complete = top_bit(load_acquire(&tile.arrived)) != turned;
      } while (!__all_sync(~0u, complete || clock64() - start >= kMergePatience));  // lanes may read different clocks
      if (!complete) complete = !leave(tile, with.merges[item.slot], turned);
      if (lane < count) look_back(item);
      before = 0;
      const u32 all = __ballot_sync(~0u, complete && lane < count);
      const bool any_inherits = __any_sync(~0u, inherits);
      if (lane == 0) {
        cut.complete = all;
        cut.inherits = any_inherits;
      }
    }
    named_sync(kMergeConsumers, 32 * kMergeWarps);
    // Of each tile the own share and, if there are some, those that others have left.
#pragma unroll 1
    for (u32 left = cut.complete; left; left &= left - 1) {
      const WorkItem& item = cut.items[__ffs(left) - 1];
      int team = 1;
      while (team < kMergeWarps && 3 * team * kChunks < 2 * item.parts * kMergeWarps) team *= 2;
#pragma unroll 1
      for (int part = item.part, next = 0; part < item.parts; part = next++) {
        const int begin = part * kChunks / item.parts, behind = (part + 1) * kChunks / item.parts;
        if (item.parts <= 2)
          merge_few<dtype, Tile, 2>(with, item, begin, behind);
        else if (item.parts <= 4)
          merge_few<dtype, Tile, 4>(with, item, begin, behind);
        else if (item.parts <= 8 && team == 1)
          merge_few<dtype, Tile, 8>(with, item, begin, behind);
        else
          merge_many<dtype, Tile>(with, item, begin, behind, team, scratch);
        if (!cut.inherits) break;
        // One thread reads the marks for all, since a thread block that tries to leave too late sets its own mark for a
        // moment.
        if (threadIdx.x == 0) {
          volatile int* const marks = &with.merges[item.slot - item.part].left;
          constexpr int kNext = sizeof(MergeState) / sizeof(int);
          if (part != item.part) marks[part * kNext] = 0;  // the own one is not set
          while (next < item.parts && marks[next * kNext] == 0) ++next;
          cut.inherited = next;
        }
        named_sync(kMergeConsumers, 32 * kMergeWarps);
        next = cut.inherited;
        named_sync(kMergeConsumers, 32 * kMergeWarps);  // all have read it
      }
    }
    const int next = cut.next;
    if (next < 0) return;
    named_sync(kMergeConsumers, 32 * kMergeWarps);  // all have read the items
    if (first_warp) collect(cut, items, next, with);
    named_sync(kMergeConsumers, 32 * kMergeWarps);
  }
}

}  // namespace hypermla::cute::latent
