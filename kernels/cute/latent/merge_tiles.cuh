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
#include "latent/item_rows.cuh"
#include "latent/start.cuh"

namespace hypermla::cute::latent {

inline constexpr int kMergeWarps = 8;                        // of the two consumer warpgroups
inline constexpr int kMergeThreads = 32 * kMergeWarps + 32;  // theirs, and those of the warp that watches
// How long a thread block waits for others, about 0.3 ms: they may not all have found a place, since a stream may have
// fewer multiprocessors than the device. The last thread block to arrive merges the share of one that leaves.
inline constexpr u32 kMergePatience = 1 << 19;  // clocks

// The running maximum that a row of a tile begins with. The rows behind the request's last are of no query. Theirs
// never rises, so they have no part in the votes by which maxima rise for all rows of a warp or tile at once, and their
// weights are zeros: like the queries, these cost a product less power.
__device__ __forceinline__ float first_maximum(int row, int rows) { return row < rows ? kLeastScore : -kLeastScore; }

// Named. The consumers meet apart from the producers. A team has a barrier of its own for each size of teams: nothing
// lies between two tiles, so some warps may be at the next one's while others of them still meet for the one before.
// Between the consumers and the warp that watches each has one direction: one side arrives, the other waits. Where both
// wait, each in code of its own, the hardware does the same, and compute-sanitizer's synccheck calls them divergent.
enum MergeBarrier {
  kMergeHeard = 5,  // to the warp that watches: the parts are written, and later the items are read
  kMergeTeams = 6,
  kMergeComplete = 13,  // to the consumers: what is known of the items' tiles
  kMergeOthers = 14,
  kMergeItems = 15,  // to the consumers: which items are merged; where they meet, too
};
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

  __device__ __forceinline__ void raise(float2 to) {
    total = {total.x * exp2_fast(top.x - to.x), total.y * exp2_fast(top.y - to.y)};
    top = to;
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

// Whether the item is a part whose tile is merged at the end of the kernel.
__device__ __forceinline__ bool is_merged(const WorkItem& item) { return item.slot >= 0 && item.join == kJoinsNone; }

// A part of which another thread block takes up what the same warp of it has. Each lane has written its own.
__device__ __forceinline__ void give_part(MergeState& part) {
  __syncwarp();
  if (lane_id() == 0) add_release(&part.arrived, 1);
}
// Until all warps have given it, since one of them may have what another one wants. A vote, so that the compiler knows
// the warp to stay together: else what follows loses its uniform registers.
__device__ __forceinline__ void wait_for_part(const MergeState& part) {
  while (__any_sync(~0u, static_cast<u32>(load_acquire(&part.arrived)) != kMergeWarps)) {
  }
}
__device__ __forceinline__ void part_is_taken_up(MergeState& part) {
  __syncwarp();
  if (lane_id() == 0 && add_release(&part.arrived, 1ull << 32) >> 32 == kMergeWarps - 1) part.arrived = 0;
}

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

// The sinks of the two rows of which the lane holds columns of a chunk.
template <class Tile>
__device__ __forceinline__ float2 sinks_of(const LatentArguments& with, const WorkItem& item, int chunk) {
  const int row = item.row_tile * Tile::kRows + Tile::row(chunk, lane_id());
  return {with.sink(row), with.sink(row + Tile::kNextRow)};
}

// Where the floats of a part are of the two rows of which the lane holds columns of a chunk.
template <class Tile>
struct FloatsPlace {
  const float *lse, *power;

  FloatsPlace() = default;
  __device__ __forceinline__ FloatsPlace(const LatentArguments& with, int slot, int chunk) {
    constexpr int kFloats = Tile::kRows * part_row_floats(Tile::kRows);
    lse = with.lse_part + slot * static_cast<long long>(kFloats);
    if constexpr (Tile::kAlike) {
      lse += Tile::floats_at(Tile::piece(chunk), Tile::row(chunk, lane_id()));
    } else {
      lse += Tile::row(chunk, lane_id());
      power = lse + (1 + Tile::piece(chunk)) * Tile::kRows;
    }
  }
  static __device__ __forceinline__ float2 load_rows(const float* from, bool wanted) {
    if constexpr (Tile::kNextRow == 1)
      return load_at_once<float2>(from, wanted);
    else
      return {load_at_once<float>(from, wanted), load_at_once<float>(from + Tile::kNextRow, wanted)};
  }
  // {log-sum-exp, power of two} twice.
  __device__ __forceinline__ float4 load(bool wanted) const {
    if constexpr (Tile::kAlike) {
      return load_at_once<float4>(lse, wanted);
    } else {
      const float2 lse_of = load_rows(lse, wanted), power_of = load_rows(power, wanted);
      return {lse_of.x, power_of.x, lse_of.y, power_of.y};
    }
  }
};

// Lanes that have the same two rows of a chunk: four neighbours where rows are 8 apart, as rows on M are, else every
// fourth lane.
template <class Tile>
struct Sharers {
  static constexpr bool are_neighbours = Tile::kNextRow == 8;
  static constexpr int kPairs = are_neighbours ? 8 : 4, kCount = 32 / kPairs;
  static constexpr int kLogCount = are_neighbours ? 2 : 3, kNext = are_neighbours ? 1 : 4;  // lanes to the next
  static __device__ __forceinline__ int pair(int lane) { return are_neighbours ? lane >> 2 : lane & 3; }
  static __device__ __forceinline__ int number(int lane) { return are_neighbours ? lane & 3 : lane >> 2; }
};

// What merges have in shared memory.
template <class Tile>
struct MergeScratch {
  using Same = Sharers<Tile>;
  static constexpr int kParts = 24;   // of a warp, at most: so teams are made, see MergeShare
  static constexpr int kCopied = 30;  // of all its chunks at once, at most
  static constexpr int kWeighed = Same::are_neighbours ? kParts : 32;  // likewise, weights
  static constexpr int kSums = Tile::kAlike ? 1 : Same::kCount;        // chunks at once, at most
  struct OfWarp {
    uint4 parts[kCopied][32];
    float2 weights[kWeighed][Same::kPairs];  // [part][pair of rows]: what parts are multiplied by
    RowSums sums[kSums][Same::kPairs];       // [chunk]
    float2 factors[kSums][Same::kPairs];     // of the merged rows
    TwoRows rows[32];                        // what the warp has of a chunk, for its team
  } warps[kMergeWarps];
};

// The log-sum-exps of the rows of a chunk, where no other chunk before has the same rows. By one of the lanes that have
// them.
template <class Tile>
__device__ __forceinline__ void store_merged_lse(const LatentArguments& with, const WorkItem& item, int chunk,
                                                 const RowSums& sums) {
  if (chunk >= Tile::kPeriod || (!Tile::kAlike && (chunk & 3) != 0)) return;
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
  // Parts of which a warp, `member` of its team, has every team-th.
  __device__ __forceinline__ int parts_of(int member, int parts) const {
    return (parts - member + (1 << log_team) - 1) >> log_team;
  }
  // Whether the weights of `here` parts of several chunks are found at once.
  __device__ __forceinline__ bool weighs_several(int here) const {
    return !Tile::kAlike && log_team == 0 && here <= Sharers<Tile>::kCount && end - begin > kMergeWarps;
  }
  // Chunks that a warp merges at once, from its chunk `first` on.
  __device__ __forceinline__ int at_once(int first, int here) const {
    return weighs_several(here) || (Tile::kAlike && log_team == 0) ? (end - first + kMergeWarps - 1) / kMergeWarps : 1;
  }
};

// Merges a share of a tile, of which all parts that a warp needs come to lie in shared memory at once. One short code
// serves any number of parts: between other kernels instructions are cold, and come no faster than what is merged.
// Returns false where the tile is not complete.
//
// What parts are multiplied by is found by all lanes at once. It is the same for all chunks of a warp where these are
// alike. Else, of as many parts as lanes share rows or fewer, all chunks' is found at once: 1, 2, 4 or all of those
// lanes take a chunk. Of more parts, or by teams, one chunk comes after the other.
template <DType dtype, class Tile, class IsComplete>
__device__ __forceinline__ bool merge_share(const LatentArguments& with, const WorkItem& item,
                                            const MergeShare<Tile>& share, int warp, MergeScratch<Tile>& scratch,
                                            IsComplete is_complete) {
  using Same = Sharers<Tile>;
  using Scratch = MergeScratch<Tile>;
  constexpr bool alike = Tile::kAlike;
  constexpr int kOwn = Scratch::kWeighed / Same::kCount;  // weights of a lane
  constexpr int kPart = Tile::kRows * 64;                 // uint4
  const int lane = lane_id(), count = item.parts, team = 1 << share.log_team;
  const int pair = Same::pair(lane), sharer = Same::number(lane);
  const int member = warp & (team - 1), number = warp >> share.log_team;
  const auto team_sync = [&] { named_sync(barrier_of_team(team, number), team * 32); };
  auto& own = scratch.warps[warp];
  const u32 places = shared_address(&own.parts[0][lane]), staging = shared_address(own.rows);
  const int slot = item.slot - item.part + member;
  const uint4* const parts = static_cast<const uint4*>(with.o_part) + slot * static_cast<long long>(kPart) + lane;
  const int here = share.parts_of(member, count);
  const bool several = share.weighs_several(here);
  const int log_group = several ? 32 - __clz(here - 1) : Same::kLogCount;
  // The lane's weight j is that of a part of the n-th of the chunks at work.
  const auto part_of = [&](int j) {
    const int at = sharer + j * Same::kCount;
    return several ? at & ((1 << log_group) - 1) : at;
  };
  const auto chunk_of = [&](int j) { return several ? (sharer + j * Same::kCount) >> log_group : 0; };

#pragma unroll 1
  for (int first = share.begin + number;;) {
    const int chunks = share.at_once(first, here);
    const int own_chunk = alike ? first : first + sharer * kMergeWarps;
    // Weights that lanes have, at most.
    const int used = ((several ? chunks << log_group : here) + Same::kCount - 1) >> Same::kLogCount;
    // What needs no parts is found while they are waited for.
    const typename Tile::Output out(with, item, first);
    const float2 sinks = sinks_of<Tile>(with, item, own_chunk);
    FloatsPlace<Tile> floats[kOwn];
#pragma unroll
    for (int j = 0; j < kOwn; ++j)
      floats[j] = FloatsPlace<Tile>(with, slot + part_of(j) * team, first + chunk_of(j) * kMergeWarps);
    if (!is_complete()) return false;
    if (first >= share.end) return true;
    float4 of_part[kOwn];
#pragma unroll
    for (int j = 0; j < kOwn; ++j) of_part[j] = {-kInfinity, 0.0f, -kInfinity, 0.0f};
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      if (!alike && j >= used) break;
      const bool exists = part_of(j) < here && chunk_of(j) < chunks;
      of_part[j] = floats[j].load(exists);
      if (!exists) of_part[j].x = of_part[j].z = -kInfinity;
    }
    // Of few parts all chunks at once, else all parts.
    constexpr int kNextPart = sizeof own.parts[0];
    const int next_chunk = kNextPart * here;
    const bool few = here < 4;
    const int at_once = few ? chunks : here, from_next = few ? kMergeWarps * 32 : team * kPart,
              to_next = few ? next_chunk : kNextPart;
#pragma unroll 1
    for (int i = 0; i < (few ? here : chunks); ++i) {
      const uint4* from = parts + first * 32 + i * (few ? team * kPart : kMergeWarps * 32);
      u32 to = places + i * (few ? kNextPart : next_chunk);
#pragma unroll 4
      for (int j = 0; j < at_once; ++j, from += from_next, to += to_next) copy_ahead<Keep::evict_first>(to, from);
    }
    // The largest log-sum-exps, weights, and their sums; where all lanes take one chunk, of all their parts.
    constexpr int kSums = alike ? 1 : kOwn;
    RowSums sums[kSums];
    const auto join = [&](auto of, auto two) {
      if (!alike && !several) {
#pragma unroll
        for (int j = 1; j < kSums; ++j) of(0) = two(of(0), of(j));
      }
      const auto with_lane = [&](float2& x, int step) {
        x = two(x, float2{__shfl_xor_sync(~0u, x.x, step), __shfl_xor_sync(~0u, x.y, step)});
      };
#pragma unroll 1
      for (int step = Same::kNext; step < Same::kNext << log_group; step *= 2) {
        with_lane(of(0), step);
        if (alike || !several || used == 1) continue;
#pragma unroll
        for (int j = 1; j < kSums; ++j) with_lane(of(j), step);
      }
      if (!alike && !several) {
#pragma unroll
        for (int j = 1; j < kSums; ++j) of(j) = of(0);
      }
    };
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      float2& top = sums[alike ? 0 : j].top;
      top = {fmaxf(top.x, of_part[j].x), fmaxf(top.y, of_part[j].z)};
    }
    const auto top = [&](int j) -> float2& { return sums[j].top; };
    const auto total = [&](int j) -> float2& { return sums[j].total; };
    join(top, [](float2 x, float2 y) { return float2{fmaxf(x.x, y.x), fmaxf(x.y, y.y)}; });
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      if (!alike && j >= used) break;
      const float2 w = sums[alike ? 0 : j].weigh({of_part[j].x, of_part[j].z});
      const int at = alike ? part_of(j) : chunk_of(j) * here + part_of(j);
      if (alike || (part_of(j) < here && chunk_of(j) < chunks))
        own.weights[at][pair] = {w.x * of_part[j].y, w.y * of_part[j].w};
    }
    join(total, [](float2 x, float2 y) { return float2{x.x + y.x, x.y + y.y}; });
    // A chunk for each of the lanes that have the same rows, or the same for all.
    const int of_chunk = alike || sharer >= chunks ? 0 : sharer;
    RowSums merged = sums[0];
    if (team > 1 || several) {
#pragma unroll
      for (int j = 0; j < kSums; ++j) {
        if (part_of(j) == 0 && chunk_of(j) < chunks) own.sums[chunk_of(j)][pair] = sums[j];
      }
      if (team > 1)
        team_sync();
      else
        __syncwarp();
      merged = own.sums[of_chunk][pair];
    }
    const float2 own_top = merged.top;
    if (team > 1) {  // each lane takes one of the team, or two
      const auto sums_of = [&](int i) -> const RowSums& { return scratch.warps[warp - member + i].sums[0][pair]; };
      merged = sums_of(sharer & (team - 1));
      if (team > Same::kCount) merged.add(sums_of(sharer + Same::kCount));
#pragma unroll 1
      for (int step = Same::kNext; step < min(team, Same::kCount) * Same::kNext; step *= 2)
        merged.add(RowSums{{__shfl_xor_sync(~0u, merged.top.x, step), __shfl_xor_sync(~0u, merged.top.y, step)},
                           {__shfl_xor_sync(~0u, merged.total.x, step), __shfl_xor_sync(~0u, merged.total.y, step)}});
    }
    const float2 inverse = merged.inverse(sinks);
    if (sharer < (alike ? 1 : chunks))
      own.factors[of_chunk][pair] = {exp2_fast(own_top.x - merged.top.x) * inverse.x,
                                     exp2_fast(own_top.y - merged.top.y) * inverse.y};
    wait_for_copies();
    __syncwarp();
    const uint4* part = &own.parts[0][lane];
    const float2(*weight)[Same::kPairs] = own.weights;
#pragma unroll 1
    for (int i = 0; i < chunks; i += 2) {
      // Two sums at once: of two chunks, or of the halves of one's parts.
      const bool two = i + 1 < chunks;
      const int half = two ? 0 : (here + 1) / 2, of_each = two ? here : half;
      const uint4* const other = part + (two ? here : half) * 32;
      const float2(*const other_weight)[Same::kPairs] = weight + (two ? alike ? 0 : here : half);
      TwoRows all, more;
#pragma unroll 2
      for (int n = 0; n < of_each; ++n) {
        const bool exists = n + half < here;  // of the second half
        all.add(part[n * 32], weight[n][pair]);
        more.add(other[exists ? n * 32 : 0], exists ? other_weight[n][pair] : float2{});
      }
      part += 2 * here * 32;
      if (!alike) weight += 2 * here;
      if (!two) all.add(more, {1.0f, 1.0f});
      all.scale(own.factors[alike ? 0 : i][pair]);
      if (team > 1) {  // a single chunk
        own.rows[lane] = all;
        team_sync();
        if (member == 0) {
#pragma unroll 1
          for (int n = 1; n < team; ++n) all.add(scratch.warps[warp + n].rows[lane], {1.0f, 1.0f});
        }
      }
      if (member == 0) out.template write<dtype>(first + i * kMergeWarps, all, staging);
      if (two) {
        more.scale(own.factors[alike ? 0 : i + 1][pair]);
        out.template write<dtype>(first + (i + 1) * kMergeWarps, more, staging);
      }
      if (team > 1) team_sync();  // what the others have has been read
    }
    if (member == 0 && sharer < (alike ? 1 : chunks)) store_merged_lse<Tile>(with, item, own_chunk, merged);
    first += team == 1 ? chunks * kMergeWarps : kMergeWarps >> share.log_team;
    __syncwarp();  // the weights have been read
    if (first >= share.end) return true;
  }
}

// Looks at 32 items of the thread block from `first` on; a whole warp.
__device__ __forceinline__ void collect(CutItems& cut, const WorkItem* items, int first, const LatentArguments& with) {
  const int lane = lane_id(), i = first + lane;
  const bool exists = i < with.rounds;
  items += i;
  const u32 behind = __ballot_sync(~0u, !exists || items->begin == items->end);  // from its lowest bit on
  const u32 set = __ballot_sync(~0u, exists && is_merged(*items)) & ((behind & -behind) - 1);
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
  if (threadIdx.x / 32 != kWatchingWarp) return;
  const int lane = lane_id();
  // Found anew where it is needed, which saves registers: producers have few.
  const auto items = [&] { return with.work + static_cast<long long>(block_id()) * with.rounds; };
  collect(cut, items(), 0, with);
  named_arrive(kMergeItems, kMergeThreads);
  wait_for_previous();  // which turns the bit, too
  const auto state_of = [&](const WorkItem& item) -> MergeState& { return with.merges[item.slot - item.part]; };
  bool turned = false;  // the highest bit of `arrived`, the same for all tiles until they are complete
  if (cut.count > 0) turned = top_bit(*const_cast<volatile u64*>(&state_of(cut.items[0]).arrived));
  named_sync(kMergeHeard, kMergeThreads);  // the parts are written
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
      if (is_merged(item) && static_cast<u32>(lane) < __ffs(behind) - 1u) {
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
    named_arrive(kMergeComplete, kMergeThreads);
    if (next < 0) return;
    named_sync(kMergeHeard, kMergeThreads);  // all have read the items
    collect(cut, items(), next, with);
  }
}

// What follows the last item of the consumers, 256 threads from 0 on.
//
// Tile says how a partial output lies in memory: kRows rows of 512 columns; lane l of chunk c holds four columns each
// of row(c, l) and of the row kNextRow behind it, the same rows every kPeriod chunks (see Sharers). piece() is that of
// a row's columns (see part_pieces). kAlike: every eighth chunk, as a warp takes them, has the same rows and piece;
// then floats_at() is where the floats of these rows are in a part. Its Output, made of a warp's first chunk, writes
// the merged rows of a chunk and is given 512 bytes of shared memory for the warp.
template <DType dtype, class Tile>
__device__ __forceinline__ void merge_tiles(const LatentArguments& with, CutItems& cut, MergeScratch<Tile>& scratch) {
  named_arrive(kMergeHeard, kMergeThreads);  // the parts are written
  named_sync(kMergeItems, kMergeThreads);    // the items are known, and shared memory is free
  const auto wait = [] { named_sync(kMergeComplete, kMergeThreads); };
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
        if (!merge_share<dtype>(with, item, share, warp, scratch, is_complete)) break;
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
    named_arrive(kMergeHeard, kMergeThreads);  // all have read the items
  }
}

}  // namespace hypermla::cute::latent
