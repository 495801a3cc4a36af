// The end of the latent kernels: tiles that were cut over several work items are merged from their partial outputs by
// their log-sum-exp. A thread block that wrote one of the n parts of a tile merges an n-th of the tile, when all parts
// are there. So the work is even for any number of parts, and no thread block waits for tiles that it had no part in.
//
// The parts of a tile fall into chunks of 32 uint4, one for each lane of a warp. A warp merges a chunk or, of many
// parts, a team of warps, each of which adds every team-th part. In which order parts are added follows from their
// number alone.
#pragma once

#include "hopper/constants.h"
#include "hopper/copies.h"
#include "hopper/fragments.h"
#include "hopper/gather.h"
#include "hopper/global.h"
#include "hopper/warpgroup.h"
#include "latent/arguments.h"

namespace hypermla::cute::latent {

inline constexpr int kMergeWarps = 8;  // of the two consumer warpgroups
// How long a thread block waits for others, about 0.3 ms: they may not all have found a place, since a stream may have
// fewer multiprocessors than the device. The last thread block to arrive merges the share of one that leaves.
inline constexpr u32 kMergePatience = 1 << 19;  // clocks

// The running maximum that a row of a tile begins with. The rows behind the request's last are those of other requests.
// Theirs never rises: maxima rise for all rows of a warp or tile at once, and the request's bits shall not depend on
// its neighbours in the tile.
__device__ __forceinline__ float first_maximum(int row, int rows) { return row < rows ? kLeastScore : -kLeastScore; }

// Named. The consumers meet apart from the producers. A team has a barrier of its own for each size of teams: nothing
// lies between two tiles, so some warps may be at the next one's while others of them still meet for the one before.
enum MergeBarrier { kMergeAll = 5, kMergeTeams = 6, kMergeConsumers = 13, kMergeOthers = 14, kMergeRead = 15 };
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
  __device__ __forceinline__ void add(const TwoRows& x, float2 w) {
    const float4 &a = x.first, &b = x.second;
    first = {fmaf(a.x, w.x, first.x), fmaf(a.y, w.x, first.y), fmaf(a.z, w.x, first.z), fmaf(a.w, w.x, first.w)};
    second = {fmaf(b.x, w.y, second.x), fmaf(b.y, w.y, second.y), fmaf(b.z, w.y, second.z), fmaf(b.w, w.y, second.w)};
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
  __device__ __forceinline__ void add(RowSums of) {
    const float2 to = {fmaxf(top.x, of.top.x), fmaxf(top.y, of.top.y)};
    raise(to);
    of.raise(to);
    total = {total.x + of.total.x, total.y + of.total.y};
  }
  __device__ __forceinline__ float2 inverse(float2 sink) const {
    const float2 all = {total.x + exp2_fast(sink.x - top.x), total.y + exp2_fast(sink.y - top.y)};
    return {all.x == 0.0f ? 0.0f : reciprocal_fast(all.x), all.y == 0.0f ? 0.0f : reciprocal_fast(all.y)};
  }
  // Of the merged rows, in `unit` per log2; `empty` without tokens.
  __device__ __forceinline__ float2 lse(float unit, float empty) const {
    return {total.x == 0.0f ? empty : (top.x + log2_fast(total.x)) * unit,
            total.y == 0.0f ? empty : (top.y + log2_fast(total.y)) * unit};
  }
};

// Whether all chunks of a warp, which takes each eighth, have the same rows and are of the same piece: then what parts
// are multiplied by is found once for all of them (merge_copied).
template <class Tile>
inline constexpr bool are_copied = (Tile::kPieceStep == kMergeWarps) && (kMergeWarps % Tile::kPeriod == 0);

// What merges have in shared memory.
inline constexpr int kMergeLoads = 16;  // chunks of parts that a warp of merge_many() has on their way at once
template <class Tile, bool copied = are_copied<Tile>>
struct MergeScratch {
  struct OfWarp {
    uint4 parts[kMergeLoads][32];
    float2 weights[kMergeLoads][8];  // [load][pair of rows]: what parts are multiplied by
    RowSums sums[8];                 // [pair of rows]
    TwoRows rows[32];                // what the warp has of a chunk, for its team
  } warps[kMergeWarps];
};
template <class Tile>
struct MergeScratch<Tile, true> {
  static constexpr int kParts = 24;   // of a warp, at most: so teams are made, see MergeShare
  static constexpr int kCopied = 30;  // of all its chunks with the same rows, at most
  struct OfWarp {
    uint4 parts[kCopied][32];
    float2 weights[kParts][8];  // [part][pair of rows]: what parts are multiplied by
    RowSums sums[8];            // [pair of rows]
    TwoRows rows[32];           // what the warp has of a chunk, for its team
  } warps[kMergeWarps];
};

// The next items of a thread block that cover but a part of their tile.
struct CutItems {
  WorkItem items[32];
  volatile int count;
  volatile int next;       // of the list, behind those that were looked at; -1: no more
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
  __device__ __forceinline__ uint4 load(int part, int chunk, bool wanted) const {
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

// The output's row of which the lane holds columns of a chunk, or the one `next` behind it; null behind the end of the
// request.
template <class Tile>
__device__ __forceinline__ unsigned short* output_row(const LatentArguments& with, const WorkItem& item, int chunk,
                                                      int next) {
  const int at = item.row_tile * Tile::kRows + Tile::row(chunk, lane_id()) + next;
  if (at >= item.queries * with.heads) return nullptr;
  return static_cast<unsigned short*>(with.o) + with.o_rows.offset(item.request, item.first_row, at);
}

// Lanes that have the same two rows of a chunk: four neighbours where rows are 8 apart, as rows on M are, else every
// fourth lane.
template <class Tile>
struct Sharers {
  static constexpr bool are_neighbours = Tile::kNextRow == 8;
  static constexpr int kPairs = are_neighbours ? 8 : 4, kCount = 32 / kPairs;
  static __device__ __forceinline__ int pair(int lane) { return are_neighbours ? lane >> 2 : lane & 3; }
  static __device__ __forceinline__ int number(int lane) { return are_neighbours ? lane & 3 : lane >> 2; }
  static __device__ __forceinline__ bool is_first(u32 lane) { return are_neighbours ? (lane & 3) == 0 : lane < 4; }

  template <class Join>
  static __device__ __forceinline__ float2 all(float2 x, Join join) {
    constexpr int kFirst = are_neighbours ? 1 : 4;
#pragma unroll
    for (int step = kFirst; step < kFirst * kCount; step *= 2) {
      x = {join(x.x, __shfl_xor_sync(~0u, x.x, step)), join(x.y, __shfl_xor_sync(~0u, x.y, step))};
    }
    return x;
  }
  static __device__ __forceinline__ float2 largest(float2 x) {
    return all(x, [](float x, float y) { return fmaxf(x, y); });
  }
  static __device__ __forceinline__ float2 sum(float2 x) {
    return all(x, [](float x, float y) { return x + y; });
  }
};

// The log-sum-exps of the rows of a chunk, where no other chunk before has the same rows.
template <class Tile>
__device__ __forceinline__ void store_merged_lse(const LatentArguments& with, const WorkItem& item, int chunk,
                                                 const RowSums& sums) {
  const bool is_first = Sharers<Tile>::is_first(lane_id()) && (Sharers<Tile>::are_neighbours || (chunk & 3) == 0);
  if (chunk >= Tile::kPeriod || !is_first) return;
  const int at = item.row_tile * Tile::kRows + Tile::row(chunk, lane_id()), rows = item.queries * with.heads;
  const float2 lse = sums.lse(with.lse_unit, with.empty_lse);
  if (at < rows) with.lse[with.lse_rows.offset(item.request, item.first_row, at)] = lse.x;
  const int second = at + Tile::kNextRow;
  if (second < rows) with.lse[with.lse_rows.offset(item.request, item.first_row, second)] = lse.y;
}

// A part's share of the merge of its tile: chunks begin .. end - 1, by teams of 1 << log_team warps.
template <class Tile>
struct MergeShare {
  static constexpr int kChunks = Tile::kRows * 2;
  int begin, end;
  int log_team = 0;

  __device__ __forceinline__ MergeShare(int part, int parts) {
    // Exact, since numbers are far smaller than float's precision; integer divisions take longer.
    const float chunks = static_cast<float>(kChunks) / static_cast<float>(parts),
                half = 0.5f / static_cast<float>(parts);
    begin = static_cast<int>(fmaf(static_cast<float>(part), chunks, half));
    end = static_cast<int>(fmaf(static_cast<float>(part + 1), chunks, half));
    while (kMergeWarps >> log_team > 1 && 3 * kChunks << log_team < 2 * kMergeWarps * parts) ++log_team;
  }
};

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
#pragma unroll
    for (int i = 0; i < most; ++i) {
      w[i] = parts.load_lse(i, Tile::row(first, lane_id()));
      if (kOnePiece) scale[0][i] = parts.load_scale(i, first);
    }
    load(first);
    const typename Tile::Output out(with, item, first);  // while they are on their way
    const float2 sinks = sinks_of<Tile>(with, item, first);
    RowSums sums;
    float2 top = sums.top;
#pragma unroll
    for (int i = 0; i < most; ++i) top = {fmaxf(top.x, w[i].x), fmaxf(top.y, w[i].y)};
    sums.top = top;
#pragma unroll
    for (int i = 0; i < most; ++i) w[i] = sums.weigh(w[i]);
    const float2 inverse = sums.inverse(sinks);
#pragma unroll
    for (int i = 0; i < most; ++i) {
      w[i] = {w[i].x * inverse.x, w[i].y * inverse.y};
      if (kOnePiece) w[i] = {w[i].x * scale[0][i].x, w[i].y * scale[0][i].y};
    }
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
    store_merged_lse<Tile>(with, item, first, sums);
  }
}

// The same of many parts, by teams of warps. A warp copies 16 parts of a chunk at once. While they are on their way it
// finds what they are multiplied by, once for all lanes that have the same rows, and where the output goes.
//
// The loops are kept although they could be written out, since instructions are cold here: an engine runs other kernels
// between two of these, so they come from L2 or from memory, some 50 to 100 clocks a line of eight.
template <DType dtype, class Tile>
__device__ __forceinline__ void merge_many(const LatentArguments& with, const WorkItem& item,
                                           const MergeShare<Tile>& share, int warp, MergeScratch<Tile>& scratch) {
  using Same = Sharers<Tile>;
  constexpr int kSharers = Same::kCount, kOwn = kMergeLoads / kSharers;
  const int lane = lane_id(), count = item.parts, team = 1 << share.log_team;
  const int pair = Same::pair(lane), sharer = Same::number(lane);
  const int member = warp & (team - 1), number = warp >> share.log_team;
  const auto team_sync = [&] { named_sync(barrier_of_team(team, number), team * 32); };
  auto& own = scratch.warps[warp];
  const u32 places = shared_address(&own.parts[0][lane]);
  const Parts<Tile> parts(with, item);

#pragma unroll 1
  for (int chunk = share.begin + number; chunk < share.end; chunk += kMergeWarps >> share.log_team) {
    typename Tile::Output out;
    TwoRows all;
    RowSums sums;
    bool last = false;
#pragma unroll 1
    for (int base = member; !last; base += team * kMergeLoads) {  // once, but of very many parts
      float2 lse[kOwn], scale[kOwn];
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const int part = base + (sharer + j * kSharers) * team;
        lse[j] = parts.load_lse(part, Tile::row(chunk, lane));
        scale[j] = parts.load_scale(part, chunk);
      }
      const int here = min(kMergeLoads, (count - base + team - 1) >> share.log_team);
      const uint4* at = parts.o + base * Parts<Tile>::kDistance + chunk * 32;
#pragma unroll 4
      for (int i = 0; i < here; ++i, at += team * Parts<Tile>::kDistance) copy_ahead(places + i * 512, at);
      last = base - member + team * kMergeLoads >= count;
      if (last && member == 0) out = typename Tile::Output(with, item, chunk);

      float2 top = sums.top;
#pragma unroll
      for (int j = 0; j < kOwn; ++j) top = {fmaxf(top.x, lse[j].x), fmaxf(top.y, lse[j].y)};
      RowSums own_sums = {Same::largest(top)};
      all.scale(sums.raise(own_sums.top));
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const float2 w = own_sums.weigh(lse[j]);
        own.weights[sharer + j * kSharers][pair] = {w.x * scale[j].x, w.y * scale[j].y};
      }
      const float2 total = Same::sum(own_sums.total);
      sums.total = {sums.total.x + total.x, sums.total.y + total.y};
      if (last && sharer == 0) own.sums[pair] = sums;
      if (last && team > 1) team_sync();
      wait_for_copies();
      __syncwarp();  // the weights of all lanes
#pragma unroll 4
      for (int i = 0; i < here; ++i) all.add(own.parts[i][lane], own.weights[i][pair]);
      __syncwarp();  // they have been read
    }
    // Each lane takes one of the team, or two.
    const auto sums_of = [&](int i) { return scratch.warps[warp - member + i].sums[pair]; };
    RowSums of_team = sums_of(sharer & (team - 1));
    if (team > kSharers) of_team.add(sums_of(sharer + kSharers));
    of_team.raise(Same::largest(of_team.top));
    const float once = team < kSharers ? static_cast<float>(team) / kSharers : 1.0f;  // each was taken so often
    of_team.total = Same::sum({of_team.total.x * once, of_team.total.y * once});
    const float2 inverse = of_team.inverse(sinks_of<Tile>(with, item, chunk));
    all.scale({exp2_fast(sums.top.x - of_team.top.x) * inverse.x, exp2_fast(sums.top.y - of_team.top.y) * inverse.y});
    if (team > 1) {
      own.rows[lane] = all;
      team_sync();
    }
    if (member == 0) {
#pragma unroll 1
      for (int i = 1; i < team; ++i) all.add(scratch.warps[warp + i].rows[lane], {1.0f, 1.0f});
      out.template write<dtype>(chunk, all);
      store_merged_lse<Tile>(with, item, chunk, of_team);
    }
    // What the others have has been read, or the sums by all lanes.
    if (team > 1)
      team_sync();
    else
      __syncwarp();
  }
}

// Merges a share of a tile of which all parts that a warp needs come to lie in shared memory at once. One short code
// serves any number of parts: between other kernels instructions are cold, and come no faster than what is merged.
template <DType dtype, class Tile, class IsComplete>
__device__ __forceinline__ bool merge_copied(const LatentArguments& with, const WorkItem& item,
                                             const MergeShare<Tile>& share, int warp, MergeScratch<Tile>& scratch,
                                             IsComplete is_complete) {
  using Same = Sharers<Tile>;
  constexpr int kOwn = MergeScratch<Tile>::kParts / Same::kCount, kStep = Parts<Tile>::kDistance;
  const int lane = lane_id(), count = item.parts, team = 1 << share.log_team;
  const int pair = Same::pair(lane), sharer = Same::number(lane);
  const int member = warp & (team - 1), number = warp >> share.log_team;
  const auto team_sync = [&] { named_sync(barrier_of_team(team, number), team * 32); };
  auto& own = scratch.warps[warp];
  const u32 places = shared_address(&own.parts[0][lane]), staging = shared_address(own.rows);
  const int slot = item.slot - item.part;
  const uint4* const parts =
      static_cast<const uint4*>(with.o_part) + (slot + member) * static_cast<long long>(kStep) + lane;
  const int here = (count - member + team - 1) >> share.log_team;  // parts of the warp
  int first = share.begin + number;
  const float4* floats = Tile::floats(with, slot + member + sharer * team, Tile::piece(first), Tile::row(first, lane));
  typename Tile::Output out(with, item, first);
  float2 sinks = sinks_of<Tile>(with, item, first);
  if (!is_complete()) return false;

#pragma unroll 1
  for (;;) {               // chunks that have the same rows and piece
    float4 of_part[kOwn];  // log-sum-exp and power of two rows
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const bool exists = member + (sharer + j * Same::kCount) * team < count;
      of_part[j] = load_at_once(floats + j * (Same::kCount * Tile::kFloats) * team, exists && first < share.end);
      if (!exists) of_part[j].x = of_part[j].z = -kInfinity;
    }
    if (first >= share.end) break;
    // Of few parts all chunks at once, else all parts.
    constexpr int kNextPart = sizeof own.parts[0];
    const int chunks = (share.end - first + kMergeWarps - 1) / kMergeWarps, next_chunk = kNextPart * here;
    const bool few = here < 4;
    const int at_once = few ? chunks : here, from_next = few ? kMergeWarps * 32 : team * kStep,
              to_next = few ? next_chunk : kNextPart;
#pragma unroll 1
    for (int i = 0; i < (few ? here : chunks); ++i) {
      const uint4* from = parts + first * 32 + i * (few ? team * kStep : kMergeWarps * 32);
      u32 to = places + i * (few ? kNextPart : next_chunk);
#pragma unroll 4
      for (int j = 0; j < at_once; ++j, from += from_next, to += to_next) copy_ahead(to, from);
    }
    RowSums sums;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) sums.top = {fmaxf(sums.top.x, of_part[j].x), fmaxf(sums.top.y, of_part[j].z)};
    sums.top = Same::largest(sums.top);
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const float2 w = sums.weigh({of_part[j].x, of_part[j].z});
      own.weights[sharer + j * Same::kCount][pair] = {w.x * of_part[j].y, w.y * of_part[j].w};
    }
    sums.total = Same::sum(sums.total);
    RowSums of_team = sums;
    if (team > 1) {
      if (sharer == 0) own.sums[pair] = sums;
      team_sync();
      of_team = {};
#pragma unroll 1
      for (int i = 0; i < team; ++i) of_team.add(scratch.warps[warp - member + i].sums[pair]);
    }
    const float2 inverse = of_team.inverse(sinks);
    const float2 by = {exp2_fast(sums.top.x - of_team.top.x) * inverse.x,
                       exp2_fast(sums.top.y - of_team.top.y) * inverse.y};
    wait_for_copies();
    __syncwarp();  // the weights of all lanes
    const uint4* part = &own.parts[0][lane];
#pragma unroll 1
    for (int chunk = first; chunk < share.end; chunk += 2 * kMergeWarps) {
      // Two sums at once: of two chunks, or of the halves of one's parts. Behind the last part weights are 0.
      const bool two = chunk + kMergeWarps < share.end;
      const int half = two ? 0 : (here + 1) / 2, of_each = two ? here : half;
      const uint4* const other = part + (two ? here : half) * 32;
      TwoRows all, more;
#pragma unroll 2
      for (int i = 0; i < of_each; ++i) {
        all.add(part[i * 32], own.weights[i][pair]);
        more.add(other[min(i, here - 1 - half) * 32], own.weights[i + half][pair]);
      }
      part += 2 * here * 32;
      if (!two) all.add(more, {1.0f, 1.0f});
      all.scale(by);
      if (team > 1) {  // a single chunk
        own.rows[lane] = all;
        team_sync();
        if (member == 0) {
#pragma unroll 1
          for (int i = 1; i < team; ++i) all.add(scratch.warps[warp + i].rows[lane], {1.0f, 1.0f});
        }
      }
      if (member == 0) out.template write<dtype>(chunk, all, staging);
      if (two) {
        more.scale(by);
        out.template write<dtype>(chunk + kMergeWarps, more, staging);
      }
      if (team > 1) team_sync();  // what the others have has been read
    }
    if (member == 0) store_merged_lse<Tile>(with, item, first, of_team);
    first += kMergeWarps >> share.log_team;
    if (team == 1 || first >= min(share.end, share.begin + kMergeWarps)) break;
    __syncwarp();  // the weights have been read
    floats = Tile::floats(with, slot + member + sharer * team, Tile::piece(first), Tile::row(first, lane));
    out = typename Tile::Output(with, item, first);
    sinks = sinks_of<Tile>(with, item, first);
  }
  return true;
}

// Looks at 32 items of the thread block from `first` on; a whole warp.
__device__ __forceinline__ void collect(CutItems& cut, const WorkItem* items, int first, const LatentArguments& with) {
  const int lane = lane_id(), i = first + lane;
  const bool exists = i < with.rounds;
  items += i;
  const u32 behind = __ballot_sync(~0u, !exists || items->begin == items->end);  // from its lowest bit on
  const u32 set = __ballot_sync(~0u, exists && items->slot >= 0) & ((behind & -behind) - 1);
  if (set >> lane & 1) {  // in pieces, since producers have few registers
    const uint4* const from = reinterpret_cast<const uint4*>(items);
    uint4* const to = reinterpret_cast<uint4*>(&cut.items[__popc(set & ((1u << lane) - 1))]);
#pragma unroll 1
    for (unsigned part = 0; part < sizeof(WorkItem) / sizeof(uint4); ++part) to[part] = from[part];
  }
  if (lane == 0) {
    cut.count = __popc(set);
    cut.next = behind ? -1 : first + 32;
  }
  __syncwarp();
}

// The last warp of the producers, when it has nothing else to do. It finds the tiles of the thread block that were cut,
// tells others when the thread block's parts are there, and waits for theirs, while the consumers prepare their merges.
// merge_tiles() hears of it.
__device__ __forceinline__ void watch_tiles(CutItems& cut, const LatentArguments& with) {
  if (threadIdx.x < 352) return;
  const int lane = lane_id();
  // Found anew where it is needed, which saves registers: producers have few.
  const auto items = [&] { return with.work + static_cast<long long>(block_id()) * with.rounds; };
  collect(cut, items(), 0, with);
  wait_for_previous();  // which turns the bit, too
  const auto state_of = [&](const WorkItem& item) -> MergeState& { return with.merges[item.slot - item.part]; };
  bool turned = false;  // the highest bit of `arrived`, the same for all tiles until they are complete
  if (cut.count > 0) turned = top_bit(*const_cast<volatile u64*>(&state_of(cut.items[0]).arrived));
  named_sync(kMergeAll, 32 * kMergeWarps + 32);  // the parts are written
  if (cut.count == 0 && cut.next < 0) return;

  u32 left = 0;  // of the lane's tile, as it arrived last of all: thread blocks that have left
  bool inherits = false;
  const auto arrive = [&](const WorkItem& item) {
    const u32 own = item.part == 0 ? 0x80000000u - (item.parts - 1) : 1;
    const u64 before = add_release(&state_of(item).arrived, static_cast<u64>(own) << 32);
    const u32 high = static_cast<u32>(before >> 32);
    left = (high ^ (high + own)) >> 31 ? static_cast<u32>(before) : 0;
    return high >> 31 != 0;
  };
  const auto look_back = [&](const WorkItem& item) {
    if (left == 0) return;
    atomicAdd(&state_of(item).arrived, -static_cast<u64>(left));
    inherits = true;
    left = 0;
  };
  // Arrives at all tiles, before it waits for any.
  if (lane < cut.count) arrive(cut.items[lane]);
  if (cut.next >= 0) {
    if (lane < cut.count) look_back(cut.items[lane]);
    bool seen = false;
    for (int first = cut.next; first >= 0;) {
      const int i = first + lane;
      const WorkItem item = i < with.rounds ? items()[i] : WorkItem{};
      const u32 behind = __ballot_sync(~0u, item.begin == item.end);
      if (item.slot >= 0 && static_cast<u32>(lane) < __ffs(behind) - 1u) {
        seen = arrive(item);
        look_back(item);
      }
      first = behind ? -1 : first + 32;
    }
    if (cut.count == 0) turned = __any_sync(~0u, seen);
  }
#pragma unroll 1
  for (;;) {
    const int count = cut.count;
    bool complete = lane >= count;
    const WorkItem& item = cut.items[complete ? 0 : lane];
    if (count > 0) {
      MergeState& tile = state_of(item);
      const u32 start = static_cast<u32>(clock64());
      do {  // all lanes, which may read different clocks
        if (!complete) complete = top_bit(load_acquire(&tile.arrived)) != turned;
      } while (!__all_sync(~0u, complete || static_cast<u32>(clock64()) - start >= kMergePatience));
      if (!complete) complete = !leave(tile, with.merges[item.slot], turned);
      if (lane < count) look_back(item);
    }
    const u32 all = __ballot_sync(~0u, complete && lane < count);
    const bool any_inherits = __any_sync(~0u, inherits);
    if (lane == 0) {
      cut.complete = all;
      cut.inherits = any_inherits;
    }
    const int next = cut.next;
    named_arrive(kMergeConsumers, 32 * kMergeWarps + 32);
    if (next < 0) return;
    named_sync(kMergeRead, 32 * kMergeWarps + 32);  // all have read the items
    collect(cut, items(), next, with);
  }
}

// What follows the last item of the consumers, 256 threads from 0 on.
//
// Tile says how a partial output lies in memory: kRows rows of 512 columns; lane l of chunk c holds four columns each
// of row(c, l) and of the row kNextRow behind it, the same rows every kPeriod chunks (see Sharers). piece() is
// that of a row's columns (see part_pieces), the same every kPieceStep chunks. Its Output writes the merged rows of a
// lane: made of the first chunk, it takes every kPeriod-th. kLoads is how many loads of merge_few() registers can wait
// for. Where parts are copied, floats() is where the floats of two rows of a piece lie, kFloats how many such a part
// has, and write() is given 512 bytes of shared memory for the warp.
template <DType dtype, class Tile>
__device__ __forceinline__ void merge_tiles(const LatentArguments& with, CutItems& cut, MergeScratch<Tile>& scratch) {
  named_sync(kMergeAll, 32 * kMergeWarps + 32);  // the parts are written, and shared memory is free
  const auto wait = [] { named_sync(kMergeConsumers, 32 * kMergeWarps + 32); };
  const int warp = uniform(threadIdx.x >> 5);
  bool first_items = true;
  if (cut.count == 0 && cut.next < 0) return;
#pragma unroll 1
  for (;; first_items = false) {
    // Of the first items all that can be done is done before the wait; those behind them are known after it.
    if (!first_items) wait();
    const int count = uniform(cut.count);
    if (first_items && count == 0) wait();
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const WorkItem& item = cut.items[i];
      MergeShare<Tile> share(item.part, item.parts);
      bool known = false;
      const auto is_complete = [&] {
        if (!known && first_items && i == 0) wait();
        known = true;
        return (cut.complete >> i & 1) != 0;
      };
#pragma unroll 1
      for (int next = 0;;) {  // the own share and, if there are some, those that others have left
        constexpr bool is_large = Tile::kRows == 64;  // else less code, for single warps have little to do
        if constexpr (are_copied<Tile>) {
          if (!merge_copied<dtype>(with, item, share, warp, scratch, is_complete)) break;
        } else {
          if (!is_complete()) break;
          if (share.log_team > 0 || item.parts > (is_large ? 8 : 4))
            merge_many<dtype, Tile>(with, item, share, warp, scratch);
          else if (is_large && item.parts > 4)
            merge_few<dtype, Tile, 8>(with, item, share.begin, share.end);
          else if (is_large && item.parts <= 2)
            merge_few<dtype, Tile, 2>(with, item, share.begin, share.end);
          else
            merge_few<dtype, Tile, 4>(with, item, share.begin, share.end);
        }
        if (!cut.inherits) break;
        // One thread reads the marks for all, since a thread block that tries to leave too late sets its own mark for a
        // moment.
        if (threadIdx.x == 0) {
          volatile int* const marks = &with.merges[item.slot - item.part].left;
          constexpr int kNext = sizeof(MergeState) / sizeof(int);
          if (next > 0) marks[(next - 1) * kNext] = 0;  // the own one is not set
          while (next < item.parts && marks[next * kNext] == 0) ++next;
          cut.inherited = next;
        }
        named_sync(kMergeOthers, 32 * kMergeWarps);
        next = cut.inherited;
        named_sync(kMergeOthers, 32 * kMergeWarps);  // all have read it
        if (next == item.parts) break;
        share = MergeShare<Tile>(next++, item.parts);
      }
    }
    if (cut.next < 0) return;
    named_sync(kMergeRead, 32 * kMergeWarps + 32);  // all have read the items
  }
}

}  // namespace hypermla::cute::latent
