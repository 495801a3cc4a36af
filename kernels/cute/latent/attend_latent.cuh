// Attention over the latent cache, the part of flash_mla.cuh that one thread block does: its consumers and its loads of
// boxes.
#pragma once

#include "hopper/constants.h"
#include "hopper/fragments.h"
#include "hopper/mbarrier.h"
#include "hopper/rows.h"
#include "hopper/tma.h"
#include "hopper/warpgroup.h"
#include "hopper/wgmma.h"
#include "latent/arguments.h"
#include "latent/item_rows.cuh"
#include "latent/load_queries.cuh"
#include "latent/merge_tiles.cuh"
#include "latent/start.cuh"

namespace hypermla::cute::latent {

inline constexpr int kPairs = 4;      // of latent boxes, of a block of tokens or of queries
inline constexpr int kRope = kPairs;  // what follows them: the RoPE box
inline constexpr u32 kPairBytes = 2 * kBoxBytes;

// Pairs of latent boxes are loaded into a ring, in the order in which their readers free them. It has places for the
// two blocks of which the consumers compute and, with `spare`, for one pair more, so that each load is asked for
// earlier. Then the queries' RoPE columns are in registers, and come by way of the ring.
template <bool spare>
struct Shared {
  static constexpr int kPlaces = 2 * kPairs + spare;
  static constexpr int kQueryGroups = kPairs + !spare;  // that have a place of their own
  Bytes<kPairs * kPairBytes + (spare ? 0 : kBoxBytes)> queries;
  Array<Bytes<kPairBytes>, kPlaces> pairs;
  Array<Bytes<kBoxBytes>, 2> ropes;  // of the even block and of the odd one, then their weights
  Barriers<kPlaces> full, empty;
  Barriers<2> rope_full, rope_empty;
  Barriers<kQueryGroups> queries_full;
  Barriers<2> weights_ready;
  Barrier queries_empty;
  Barrier exchanged;                 // what the warpgroups hand each other at the end of an item
  volatile int raised[2][4];         // [slot][warp]: did the warp raise its maximum
  volatile float maximum[2][kTile];  // [slot][row]
  volatile float sum[2][kTile];      // [warpgroup][row]
  alignas(16) u32 present[2][4];     // [slot][16 tokens]: which of gathered tokens there are, see mask_absent()
  CutItems cut;
};

// A place of the ring, and the phase of its barriers.
template <bool spare>
struct RingPlace {
  static constexpr int kPlaces = Shared<spare>::kPlaces;
  int at = 0;
  u32 phase = 0;

  __device__ __forceinline__ RingPlace behind(int n) const {  // n <= kPlaces
    const int next = at + n;
    return next >= kPlaces ? RingPlace{next - kPlaces, phase ^ 1} : RingPlace{next, phase};
  }
  // Behind all places of an item, of which this is the first.
  __device__ __forceinline__ RingPlace behind(const WorkItem& item) const {
    const int next = at + spare + (item.end - item.begin + 1) / 2 * (2 * kPairs), rounds = next / kPlaces;
    return {next - rounds * kPlaces, phase ^ (rounds & 1)};
  }
};
// The place of a pair among those of its block, which lie in the order in which their readers free them; and the pair
// of such a place.
__device__ constexpr int order_of_release(int slot, int i) { return slot == 0 || i == 0 || i > 2 ? i : 3 - i; }

// Hides the scores of gathered tokens that are not there. Token 16 w + r of a block is bit 8 (r % 4) + r / 4 of word w:
// so a warp of the gather finds its word by one vote (gather_tokens.cuh).
inline constexpr u32 kAllPresent = 0x0f0f0f0f;
template <int n>
__device__ __forceinline__ void mask_absent(float* p, const volatile u32 (&present)[4]) {
  const u32 lane = lane_id() & 3;  // its columns: 8 i + 2 lane and the one after it
#pragma unroll
  for (int i = 0; i < n / 4; ++i) {
    const u32 bits = present[i / 2] >> (16 * (lane & 1) + lane / 2) >> i % 2 * 2;
    if (!(bits & 1)) p[4 * i] = p[4 * i + 2] = -kInfinity;
    if (!(bits >> 8 & 1)) p[4 * i + 1] = p[4 * i + 3] = -kInfinity;
  }
}

enum NamedBarrier { kEvenScoresIssued = 1, kOddScoresIssued = 2, kWarpgroup0 = 3, kWarpgroup1 = 4 };

// How partial outputs lie: [slot][16 columns][half][thread of a warpgroup], the order of the consumers' fragments.
// Their floats: [slot][half][warp][8 rows r], of each row r and r + 8 {log-sum-exp, power} twice.
struct RowsOnM {
  static constexpr int kRows = kTile, kNextRow = 8, kPeriod = 4;
  static constexpr bool kAlike = true;
  static __device__ __forceinline__ int row(int chunk, int lane) { return (chunk & 3) * 16 + (lane >> 2); }
  static __device__ __forceinline__ int piece(int chunk) { return chunk >> 2 & 1; }  // the half
  static __device__ constexpr int floats_at(int half, int row) { return ((half * 4 + row / 16) * 8 + row % 8) * 4; }

  // 16 columns of 16 rows, which leave by 16 bytes of a lane: half of the columns of row lane / 2.
  struct Output {
    unsigned short* to;  // null behind the end of the request

    __device__ __forceinline__ Output(const LatentArguments& with, const WorkItem& item, int chunk) {
      const int lane = lane_id();
      to = row_of_tile<kRows>(with, item, (chunk & 3) * 16 + lane / 2);
      if (to) to += (chunk >> 2 & 1) * 256 + lane % 2 * 8;
    }
    // `staging`: 512 bytes of the warp. Rows of 32 bytes, whose halves change places in every other four.
    template <DType dtype>
    __device__ __forceinline__ void write(int chunk, const TwoRows& x, u32 staging) const {
      const int lane = lane_id();
      const auto place = [&](int row, int half) { return staging + row * 32 + (half ^ (row >> 2 & 1)) * 16; };
      store_matrices(place(lane & 15, lane >> 4), pack<dtype>(x.first.x, x.first.y),
                     pack<dtype>(x.second.x, x.second.y), pack<dtype>(x.first.z, x.first.w),
                     pack<dtype>(x.second.z, x.second.w));
      __syncwarp();
      const uint4 words = load_shared(place(lane >> 1, lane & 1));
      if (to) *reinterpret_cast<uint4*>(to + (chunk >> 3) * 16) = words;
      __syncwarp();
    }
  };
};

template <DType>
struct Typed {};

// Takes up what another thread block has of the same rows, as one more block of tokens: its part, in `slot`, is
// relative to its log-sum-exp.
__device__ __forceinline__ void take_up_part(float (&o)[128], float2& maximum, float2& sum, int half, int row,
                                             const LatentArguments& with, int slot) {
  wait_for_part(with.merges[slot]);
  const float4 of_rows = load_at_once<float4>(
      with.lse_part + slot * (kTile * part_row_floats(kTile)) + RowsOnM::floats_at(half, row), true);
  const uint4* const from = static_cast<const uint4*>(with.o_part) + slot * 4096LL + half * 128 + (thread_id() & 127);
  const float2 top = {fmaxf(maximum.x, of_rows.x), fmaxf(maximum.y, of_rows.z)};
  const float2 own = {exp2_fast(maximum.x - top.x), exp2_fast(maximum.y - top.y)};
  const float2 weight = {exp2_fast(of_rows.x - top.x), exp2_fast(of_rows.z - top.y)};
  sum = {fmaf(sum.x, own.x, weight.x), fmaf(sum.y, own.y, weight.y)};
  maximum = top;
  const float2 factor = {weight.x * of_rows.y, weight.y * of_rows.w};
  constexpr int kAtOnce = 4;
#pragma unroll
  for (int first = 0; first < 16; first += kAtOnce) {
    uint4 x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) x[i] = load_last(from + (first + i) * 256);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float* const to = o + 8 * (first + i);
      const u32 words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = unpack<DType::float16>(words[j]);
        const float of_own = j % 2 ? own.y : own.x, of_pair = j % 2 ? factor.y : factor.x;
        to[2 * j] = fmaf(pair.x, of_pair, to[2 * j] * of_own);
        to[2 * j + 1] = fmaf(pair.y, of_pair, to[2 * j + 1] * of_own);
      }
    }
  }
  part_is_taken_up(with.merges[slot]);
}

// Consumer warpgroup `half`. `work`: its items, one after the other. How an item begins and ends is one code for both,
// which fills the instruction cache once; only the products between are in two orders.
template <auto problem, bool spare>
__device__ __forceinline__ void attend(int half, Shared<spare>& shared, const WorkItem* __restrict__ work,
                                       const LatentArguments& with) {
  constexpr DType dtype = problem.dtype;
  const float scale_log2 = with.scale_log2;
  const int own_barrier = kWarpgroup0 + half;
  using Place = RingPlace<spare>;
  constexpr bool gathered = is_gathered(problem.page);
  const int warp = (thread_id() >> 5) & 3, lane = lane_id();

  float o[128];  // (64, 256) of the warpgroup: o[4i], o[4i + 1] columns 8i + 2 (lane % 4) of row r, then of row r + 8
  float p[32] = {};                                                               // (64, 64) scores, then weights
  u32 packed[16];                                                                 // (64, 64) weights as the A operand
  u32 rope_queries[spare ? 16 : 1];                                               // (64, 64) likewise
  float2 maximum = {kLeastScore, kLeastScore}, sum = {}, factors = {1.0f, 1.0f};  // of rows r and r + 8
  int raise = 0;
  u32 phase = 0, queries_phase = 0, item_phase = 0;
  Place even;  // the first place of the even block at work; without a spare one always the ring's first

  const u32 q = operand_k_major(shared.queries);
  const u32 keys = operand_k_major(shared.pairs), values = operand_mn_major(shared.pairs);
  const u32 rope_key = operand_k_major(shared.ropes[half]);
  const u32 weights = operand_k_major(shared.ropes[1 - half]);                 // those of the other warpgroup
  const u32 weights_row = shared.ropes[half] + place_of_row(warp * 16, lane);  // of this lane's own

  auto place_of = [&](int slot, int pair) {
    const int number = slot * kPairs + order_of_release(slot, pair);
    return spare ? even.behind(number) : Place{number, phase};
  };
  auto next_blocks = [&] {
    if (spare) even = even.behind(2 * kPairs);
  };
  auto row = [&] { return ((thread_id() >> 5) & 3) * 16 + (lane_id() >> 2); };
  auto scores = [&](int pair) {  // S += Q Z^T over one pair of boxes
    mma_fence();
#pragma unroll
    for (int i = 0; i < (pair == kRope ? 4 : 8); ++i) {
      const int offset = i / 4 * kNextBox + i % 4 * 2;
      if (pair == kRope && spare)
        mma<dtype, 64>(p, rope_queries + (spare ? 4 * i : 0), rope_key + offset, 1);
      else
        mma<dtype, 64>(p, q + 2 * pair * kNextBox + offset,
                       (pair == kRope ? rope_key : keys + place_of(half, pair).at * 2 * kNextBox) + offset,
                       pair != 0 || i != 0);
    }
  };
  auto wait_until_loaded = [&](int pair) {
    if (pair == kRope) {
      barrier_wait(shared.rope_full[half], phase);
    } else {
      const Place place = place_of(half, pair);
      barrier_wait(shared.full[place.at], place.phase);
    }
    // What threads have copied is ordered before wgmma here, and for the other warpgroup before weights_ready.
    if (gathered) async_fence();
  };
  auto free = [&](int slot, int pair) { warp_arrive(shared.empty[place_of(slot, pair).at]); };
  auto scores_when_loaded = [&](int pair) {
    wait_until_loaded(pair);
    scores(pair);
  };
  auto values_of_own = [&](int columns) {  // O += P Z over 128 columns, P from registers
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma<dtype, 128, Major::mn>(o + 64 * columns, packed + 4 * i,
                                 values + place_of(half, 2 * half + columns).at * 2 * kNextBox + 128 * i, 1);
    }
    mma_commit();
  };
  auto values_of_other = [&](int columns) {  // O += P Z over 128 columns, P from the other warpgroup's box
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma<dtype, 128, Major::mn>(o + 64 * columns, weights + 2 * i,
                                 values + place_of(1 - half, 2 * half + columns).at * 2 * kNextBox + 128 * i, 1);
    }
    mma_commit();
  };
  auto adopt_maximum = [&](int slot) {  // of the other warpgroup, if it raised it
    if (__any_sync(~0u, shared.raised[slot][(thread_id() >> 5) & 3])) {
      const float a = shared.maximum[slot][row()], b = shared.maximum[slot][row() + 8];
      const float2 by = {rescale_factor(maximum.x, a), rescale_factor(maximum.y, b)};
      maximum = {a, b};
      sum = {sum.x * by.x, sum.y * by.y};
      rescale_rows<128>(o, by);
    }
  };
  auto softmax = [&] {  // scores to weights, in place; tells the other warpgroup when the maximum was raised
    const float2 largest = largest_scores<32>(p);
    raise = 0;
    if (__any_sync(~0u, fmaf(largest.x, scale_log2, -maximum.x) > kRescaleThreshold ||
                            fmaf(largest.y, scale_log2, -maximum.y) > kRescaleThreshold)) {
      factors = raise_maxima(maximum, largest, scale_log2);
      sum = {sum.x * factors.x, sum.y * factors.y};
      raise = 1;
      if ((lane_id() & 3) == 0) {
        shared.maximum[half][row()] = maximum.x;
        shared.maximum[half][row() + 8] = maximum.y;
      }
    }
    if (lane_id() == 0) shared.raised[half][(thread_id() >> 5) & 3] = raise;
    weigh_rows<32>(p, scale_log2, maximum, sum);
  };
  auto hand_over_weights = [&] {  // into the RoPE box of the own slot, which all warps have finished to read
    named_sync(own_barrier, 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      packed[4 * i] = pack<dtype>(p[8 * i], p[8 * i + 1]);
      packed[4 * i + 1] = pack<dtype>(p[8 * i + 2], p[8 * i + 3]);
      packed[4 * i + 2] = pack<dtype>(p[8 * i + 4], p[8 * i + 5]);
      packed[4 * i + 3] = pack<dtype>(p[8 * i + 6], p[8 * i + 7]);
      store_matrices(weights_row ^ (i << 5), packed[4 * i], packed[4 * i + 1], packed[4 * i + 2], packed[4 * i + 3]);
    }
    async_fence();
    barrier_arrive(shared.weights_ready[half]);
  };

  WorkItem item = *work;
#pragma unroll 1
  for (;;) {
    const int begin = uniform(item.begin), end = uniform(item.end), tokens = uniform(item.tokens);
    if (begin == end) break;
    const int tile_row = uniform(item.row_tile) * kTile, queries = uniform(item.queries);
    // Blocks over the end of the request also get their values zeroed, since 0 * NaN of an unused cache entry would
    // spoil the output.
    const SeenTokens<problem> seen(with, item, queries, tokens);
    int token = begin * kTile + half * kTile;          // first token of the next block that this warpgroup scores
    const int rows = queries * with.heads - tile_row;  // from the tile's first row on
    maximum = {first_maximum(row(), rows), first_maximum(row() + 8, rows)};
    sum = {};
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0.0f;

    auto zero_values = [&](int slot, int first) {  // of the tokens behind the request's end, own columns
      const int thread = thread_id() & 127;
#pragma unroll 1
      for (int r = max(tokens - first, 0) + (thread >> 3); r < kTile; r += 16) {
#pragma unroll
        for (int box = 0; box < 4; ++box) {
          store_zeros(shared.pairs[place_of(slot, 2 * half + box / 2).at] + box % 2 * kBoxBytes + r * 128 +
                      (thread & 7) * 16);
        }
      }
      async_fence();
    };
    bool absent = false;
    auto look_for_absent = [&] {  // in the own block, while its scores are in flight
      if (!gathered) return;
      const uint4 present = load_shared(shared_address(&shared.present[half]));
      absent = (present.x & present.y & present.z & present.w) != kAllPresent;
    };
    auto mask = [&] {  // the scores of the own block
      if (token + kTile > seen.by_all) {
        int seen0 = seen.by_all, seen1 = seen.by_all;
        if (problem.causal) {
          auto query_of = [&](int r) { return problem.tokens_first ? r / with.heads : r % queries; };
          if constexpr (problem.shards) {
            seen0 = with.shards.count(seen.whole - seen.masked + 1 + query_of(tile_row + row()));
            seen1 = with.shards.count(seen.whole - seen.masked + 1 + query_of(tile_row + row() + 8));
          } else {
            seen0 += query_of(tile_row + row());
            seen1 += query_of(tile_row + row() + 8);
          }
          if (problem.after) {
            seen0 = min(seen0, tokens);
            seen1 = min(seen1, tokens);
          }
        }
        const int first = token + 2 * (lane_id() & 3);
        mask_rows<32>(p, {seen0 - first, seen1 - first});
        if (!gathered && token + kTile > tokens) zero_values(half, token);
      }
      if (gathered && absent) mask_absent<32>(p, *const_cast<volatile u32(*)[4]>(&shared.present[half]));
      token += 2 * kTile;
    };
    auto mask_other = [&](int first) {  // the values of the other warpgroup's block
      if (!gathered && first + kTile > tokens) {
        zero_values(1 - half, first);
        named_sync(own_barrier, 128);
      }
    };

    int pairs = (end - begin) / 2;         // whole pairs
    const int single = (end - begin) & 1;  // a last even block without an odd one
    const Place queries_place = even;      // of their RoPE columns
#pragma unroll
    for (u32& x : rope_queries) x = 0;  // those of the item before are not kept
    if (spare) even = even.behind(1);
    auto take_queries = [&] {
      if constexpr (spare) {
        barrier_wait(shared.full[queries_place.at], queries_place.phase);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          load_matrices(rope_queries + 4 * i,
                        (shared.pairs[queries_place.at] + place_of_row(warp * 16, lane)) ^ i << 5);
      }
    };
    if (half == 0) {
      auto even_block = [&] {  // its scores are in flight
        named_arrive(kEvenScoresIssued, 256);
        look_for_absent();
        mma_wait<0>();
        pin<32>(p);
        mask();
        softmax();
        hand_over_weights();
        if (raise) rescale_rows<128>(o, factors);
        named_sync(kOddScoresIssued, 256);
        pin<128>(o);
        mma_fence();
        values_of_own(0);
        values_of_own(1);
        mma_wait<1>();
        free(0, 0);
        mma_wait<0>();
        pin<128>(o);
        free(0, 1);
        warp_arrive(shared.rope_empty[0]);
      };
      auto odd_block = [&] {  // leaves its products in flight
        barrier_wait(shared.weights_ready[1], phase);
        adopt_maximum(1);
        mask_other(token - kTile);
        pin<128>(o);
        mma_fence();
        values_of_other(0);
        values_of_other(1);
        phase ^= 1;
      };
#pragma unroll
      for (int pair = 0; pair <= kRope; ++pair) {
        if (pair == kRope && spare)
          take_queries();
        else
          barrier_wait(shared.queries_full[pair], queries_phase);
        scores_when_loaded(pair);
      }
      mma_commit();
      queries_phase ^= 1;
      even_block();
#pragma unroll 1
      for (int i = pairs - 1 + single; i > 0; --i) {
        odd_block();
        const u32 freed0 = shared.empty[place_of(1, 0).at], freed1 = shared.empty[place_of(1, 1).at];
        next_blocks();
        scores_when_loaded(0);
        mma_commit();
        mma_wait<2>();
        warp_arrive(freed0);
        scores_when_loaded(1);
        mma_commit();
        mma_wait<2>();
        warp_arrive(freed1);
        warp_arrive(shared.rope_empty[1]);
        scores_when_loaded(2);
        scores_when_loaded(3);
        scores_when_loaded(4);
        mma_commit();
        even_block();
      }
      warp_arrive(shared.queries_empty);
      if (!single) {
        odd_block();
        mma_wait<0>();
        pin<128>(o);
      }
    } else {
      if (half != 1) __builtin_unreachable();  // so that places are constants here, too
      if (pairs == 0)
        warp_arrive(shared.queries_empty);
      else
        take_queries();
      // Behind the first even scores, for which warpgroup 0 has taken them, too.
      bool has_queries = spare;
      auto free_queries = [&] {
        if (has_queries) warp_arrive(shared.empty[queries_place.at]);
        has_queries = false;
      };
#pragma unroll 1
      while (pairs > 0) {
        wait_until_loaded(0);
        named_sync(kEvenScoresIssued, 256);
        free_queries();
        scores(0);
        scores_when_loaded(2);
        scores_when_loaded(1);
        scores_when_loaded(3);
        scores_when_loaded(4);
        mma_commit();
        named_arrive(kOddScoresIssued, 256);
        look_for_absent();
        mma_wait<0>();
        pin<32>(p);
        if (pairs == 1) warp_arrive(shared.queries_empty);
        barrier_wait(shared.weights_ready[0], phase);
        adopt_maximum(0);
        pin<128>(o);
        mma_fence();
        mask();
        softmax();
        mma_fence();
        values_of_other(0);
        hand_over_weights();
        mma_fence();
        values_of_other(1);
        if (gathered) {  // which takes longer than boxes: its next pair is asked for earlier
          mma_wait<1>();
          free(0, 2);
        }
        mma_wait<0>();
        pin<128>(o);
        if (!gathered) free(0, 2);
        free(0, 3);
        warp_arrive(shared.rope_empty[0]);
        if (raise) rescale_rows<128>(o, factors);
        pin<128>(o);
        mma_fence();
        values_of_own(0);
        values_of_own(1);
        mma_wait<1>();
        if (pairs + single > 1) free(1, 2);
        mma_wait<0>();
        pin<128>(o);
        phase ^= 1;
        --pairs;
        if (pairs + single == 0) break;
        free(1, 3);
        warp_arrive(shared.rope_empty[1]);
        next_blocks();
      }
      if (single) {
        named_sync(kEvenScoresIssued, 256);
        free_queries();
        named_arrive(kOddScoresIssued, 256);
        barrier_arrive(shared.weights_ready[1]);  // none, but the barrier's phase has to keep step
        barrier_wait(shared.weights_ready[0], phase);
        adopt_maximum(0);
        mask_other(token - kTile);
        pin<128>(o);
        mma_fence();
        values_of_other(0);
        values_of_other(1);
        mma_wait<0>();
        pin<128>(o);
        free(0, 2);
        free(0, 3);
        warp_arrive(shared.rope_empty[0]);
      }
    }
    // Places of the own columns of the odd block, through which the output leaves.
    const Place out_places[2] = {place_of(1, 2 * half), place_of(1, 2 * half + 1)};
    if (single) {  // the producer hands them over empty
      if (half == 0) barrier_wait(shared.weights_ready[1], phase);
      barrier_wait(shared.full[out_places[0].at], out_places[0].phase);
      barrier_wait(shared.full[out_places[1].at], out_places[1].phase);
      barrier_wait(shared.rope_full[1], phase);
      phase ^= 1;
    }
    next_blocks();

    // What is needed of this item, and the next one: they arrive during the exchange.
    const int request = work->request, first_row = work->first_row, slot_of_item = work->slot;
    item = *++work;
    // Both warpgroups summed their own blocks, against the same maximum by now.
    sum = sum_of_rows(sum);
    if ((lane_id() & 3) == 0) {
      shared.sum[half][row()] = sum.x;
      shared.sum[half][row() + 8] = sum.y;
    }
    barrier_arrive(shared.exchanged);
    barrier_wait(shared.exchanged, item_phase);
    sum = {shared.sum[0][row()] + shared.sum[1][row()], shared.sum[0][row() + 8] + shared.sum[1][row() + 8]};
    item_phase ^= 1;
    int slot = uniform(slot_of_item);
    const auto join = [&] { return uniform(work[-1].join); };  // read again, for want of registers
    if (!gathered && slot >= 0 && join() == kTakesUp) {
      take_up_part(o, maximum, sum, half, row(), with, slot + 1);
      slot = -1;  // an output from here on
    }
    const auto inverse_of = [&](float sum, float maximum, int row) {
      const float divisor = divisor_of(with, slot, tile_row + row, maximum, sum);
      return divisor == 0.0f ? 0.0f : reciprocal_fast(divisor);
    };
    float2 inverse = {inverse_of(sum.x, maximum.x, row()), inverse_of(sum.y, maximum.y, row() + 8)};
    const float2 logs = {log_sum(maximum.x, sum.x), log_sum(maximum.y, sum.y)};
    auto fragment = [&]<DType type>(Typed<type>, int i) {  // 16 columns
      return make_uint4(pack<type>(o[8 * i] * inverse.x, o[8 * i + 1] * inverse.x),
                        pack<type>(o[8 * i + 2] * inverse.y, o[8 * i + 3] * inverse.y),
                        pack<type>(o[8 * i + 4] * inverse.x, o[8 * i + 5] * inverse.x),
                        pack<type>(o[8 * i + 6] * inverse.y, o[8 * i + 7] * inverse.y));
    };
    if (slot < 0) {
      const u32 staging[2] = {shared.pairs[out_places[0].at], shared.pairs[out_places[1].at]};
      const u32 line = (((thread_id() >> 5) & 3) * 16 + (lane_id() & 15)) * 128;
      const int unit = lane_id() >> 4, swizzle = lane_id() & 7;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const uint4 x = fragment(Typed<dtype>(), i);
        store_matrices(staging[i / 8] + i / 4 % 2 * kBoxBytes + line + (((2 * (i & 3) + unit) ^ swizzle) << 4), x.x,
                       x.y, x.z, x.w);
      }
      __syncwarp();
      const int first = ((thread_id() >> 5) & 3) * 16;
      const u32 from = (lane_id() < 16 ? staging[0] : staging[1]) + (lane_id() >> 3 & 1) * kBoxBytes + first * 128;
      copy_rows<16>(with, request, first_row, tile_row, first, rows, half,
                    [&](int r) { return from + swizzled(r, lane_id() & 7); });
      async_fence();  // the copy engine comes next
      __syncwarp();   // one lane says that all have read
      if (half == 0 && (lane_id() & 3) == 0) {
        store_lse<kTile>(with, request, first_row, tile_row, rows, slot, row(), logs.x, sum.x);
        store_lse<kTile>(with, request, first_row, tile_row, rows, slot, row() + 8, logs.y, sum.y);
      }
    } else {  // see RowsOnM: every access is whole lines
      const float2 largest = largest_of_rows<128>(o);
      const PartScale scale[2] = {PartScale(largest.x * inverse.x), PartScale(largest.y * inverse.y)};
      if ((lane_id() & 3) == 0)
        *reinterpret_cast<float4*>(with.lse_part + slot * (kTile * part_row_floats(kTile)) +
                                   RowsOnM::floats_at(half, row())) =
            make_float4(logs.x, scale[0].load, logs.y, scale[1].load);
      inverse = {inverse.x * scale[0].store, inverse.y * scale[1].store};
      uint4* out = static_cast<uint4*>(with.o_part) + slot * 4096LL + half * 128 + (thread_id() & 127);
#pragma unroll
      for (int i = 0; i < 16; ++i) store_to_stay(out + i * 256, fragment(Typed<DType::float16>(), i));
      if (!gathered && join() == kGives) give_part(with.merges[slot]);
    }
    warp_arrive(shared.empty[out_places[0].at]);
    warp_arrive(shared.empty[out_places[1].at]);
    warp_arrive(shared.rope_empty[1]);
  }
}

// A pair of boxes, or as much of it as a page of several has; its bytes arrive at `full`. One thread. `to`: the place
// of the first row.
template <Keep keep, int pages>
__device__ __forceinline__ void load_pair(u32 to, const LatentArguments& with, int pair, int row, int batch, u32 full) {
  constexpr u32 kBytes = kBoxBytes / pages;  // 64 columns
  barrier_expect(full, pair == kRope ? kBytes : 2 * kBytes);
  if (pair == kRope) {
    tma_load<keep>(to, with.kpe_map, row, 0, batch, full);
    return;
  }
  tma_load<keep>(to, with.z_map, row, 2 * pair, batch, full);
  if (pages > 1) tma_load<keep>(to + kBoxBytes, with.z_map, row, 2 * pair + 1, batch, full);
}

// When their place is free, in `phase`. `place`: of the ring, with a spare one, for the RoPE columns. One thread.
template <auto tiling, bool spare>
__device__ __forceinline__ void load_queries(Shared<spare>& shared, const WorkItem& item, const LatentArguments& with,
                                             RingPlace<spare> place, u32 phase) {
  constexpr Keep keep = tiling.evict_first ? Keep::evict_first : Keep::normal;
  const QueryBox at(with, item, kTile);
  barrier_wait(shared.queries_empty, phase);
  // Only now: the ring is less than two rounds behind this place, so a phase names one of them.
  if (spare) barrier_wait(shared.empty[place.at], place.phase ^ 1);
  auto load_rope = [&](u32 to, u32 full) {
    barrier_expect(full, kBoxBytes);
    at.load<keep>(to, with.qpe_map, 0, full);
  };
  if (spare) load_rope(shared.pairs[place.at], shared.full[place.at]);
  for (int pair = 0; pair < kPairs; ++pair) {
    const u32 full = shared.queries_full[pair];
    barrier_expect(full, kPairBytes);
    at.load<keep>(shared.queries + pair * kPairBytes, with.qc_map, 2 * pair, full);
  }
  if (!spare) load_rope(shared.queries + kPairs * kPairBytes, shared.queries_full[kRope]);
}

// Warps that load. A warp takes 48 clocks for each instruction of the copy engine, so where a page is less than a block
// each warp loads one page of every block: a single one would take 1700 clocks for four pages, most of a block's time.
template <auto problem>
inline constexpr int kLoaders = pages_of_block(problem.page);

// A warp that loads, `part` of kLoaders; of a dense cache its first lane alone. Pages of 64 or 128 tokens are loaded
// like a dense cache.
template <auto problem, auto tiling, bool spare>
__device__ __forceinline__ void load(int part, Shared<spare>& shared, const WorkItem* __restrict__ work,
                                     const LatentArguments& with) {
  constexpr bool paged = problem.page > 0;
  constexpr int kPages = kLoaders<problem>;  // of a block
  constexpr int kStep = kTile / kPages;      // tokens of a box
  constexpr Keep keep = tiling.evict_first ? Keep::evict_first : Keep::normal;
  const int lane = lane_id(), first = part * kStep;  // of a block's tokens
  u32 phase = 1, queries_phase = 1;
  RingPlace<spare> place;
  start_apart(*work, with);
  for (;; ++work) {
    const WorkItem item = *work;
    if (item.begin == item.end) break;
    const RingPlace<spare> queries_place = place;
    if (spare) place = place.behind(1);
    if (spare && kPages > 1 && part > 0) {
      barrier_wait(shared.empty[queries_place.at], queries_place.phase ^ 1);
      if (lane == 0) barrier_arrive(shared.full[queries_place.at]);
    }
    // The next 32 pages, a lane each; those behind them are on their way.
    const int* __restrict__ table = with.block_table + static_cast<long long>(item.request) * with.table_width;
    auto page_of = [&](int box) { return box * kStep < item.tokens ? table[box * kStep / max(problem.page, 1)] : 0; };
    int window = item.begin * kPages, pages = paged ? page_of(window + lane) : 0,
        next_pages = paged ? page_of(window + 32 + lane) : 0;
    for (int block = item.begin; block < item.end || ((block - item.begin) & 1); ++block) {
      const int slot = (block - item.begin) & 1;
      int row = block * kTile + first, batch = item.request;
      bool exists = block < item.end;
      if constexpr (paged) {
        if (block * kPages == window + 32) {
          window += 32;
          pages = next_pages;
          next_pages = page_of(window + 32 + lane);
        }
        batch = __shfl_sync(~0u, pages, block * kPages + part - window);
        exists = exists && row < item.tokens;  // what lies behind them is zeroed before it is read
        row %= max(problem.page, 1);
      }
#pragma unroll
      for (int i = 0; i <= kRope; ++i) {
        const int pair = order_of_release(slot, i);
        const u32 to = pair == kRope ? shared.ropes[slot] : shared.pairs[place.at],
                  full = pair == kRope ? shared.rope_full[slot] : shared.full[place.at];
        if (pair == kRope) {
          barrier_wait(shared.rope_empty[slot], phase);
        } else {
          barrier_wait(shared.empty[place.at], place.phase ^ 1);
          place = place.behind(1);
        }
        if (lane != 0) continue;
        if (exists) {
          load_pair<keep, kPages>(to + first * 128, with, pair, row, batch, full);
        } else {
          barrier_arrive(full);
        }
      }
      if (kPages > 1 && block == item.begin && part == 0) {  // the queries' place is free later than a slot
        if (lane == 0) load_queries<tiling>(shared, item, with, queries_place, queries_phase);
        queries_phase ^= 1;
      }
      if (slot) phase ^= 1;
    }
  }
}

}  // namespace hypermla::cute::latent
