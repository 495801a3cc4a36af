// FlashMLA for Hopper over tokens in FP8 and queries in bfloat16: tokens become fp16 in shared memory, by eight warps that
// do nothing else, and flash_mla's consumers multiply them.
//
// Rows, items, consumers, the order of their products and of their releases: flash_mla.cuh, latent/attend_latent.cuh.
// But products are of fp16, also of queries, which the consumers narrow once an item.
//
// Roles (512 threads):
//   warpgroups 0, 1   consumers, as in flash_mla
//   warpgroups 2, 3   producers of the even and of the odd blocks: load and widen tokens; one loads queries
//
// A producer holds the columns of the next pair of boxes of its slot in registers, 16 bytes of each of four tokens a lane.
// Once the pair of boxes is free it widens them to there and loads the next: it has the time of two blocks for five
// pairs. So the way from memory does not stand between the end of a pair's products and the next tokens in its place.
//
// A token is 656 bytes in DeepSeek's form: 512 e4m3 | 4 fp32 scales, of 128 columns each, a pair of boxes | 64 bf16 of
// RoPE. A number is multiplied by its scale's mantissa and by its power of two, in fp16.
//
// grid = any, by the work list; 512 threads, kFlashMlaV5SharedBytes of dynamic shared memory.
#pragma once

#include "flash_mla_v5.h"
#include "hopper/fp8.h"
#include "hopper/widened.h"
#include "latent/attend_latent.cuh"
#include "latent/copy_tokens.cuh"

namespace hypermla::cute {

using namespace latent;

struct WidenShared {
  Bytes<kOperandBytes> queries;
  Array<Bytes<kOperandBytes>, 2> slots;
  Array<Barriers<kBoxPairs>, 2> full, empty;
  Barriers<kBoxPairs> queries_full;
  Barriers<2> weights_ready;
  Barrier queries_empty;
  Barrier exchanged;                 // what the warpgroups hand each other at the end of an item
  volatile int raised[2][4];         // [slot][warp]: did the warp raise its maximum
  volatile float maximum[2][kTile];  // [slot][row]
  volatile float sum[2][kTile];      // [warpgroup][row]
  // [slot][producing warp]: bit r says whether token 16 warp + r is there.
  alignas(8) unsigned short present[2][4];
  CutItems cut;
};
static_assert(sizeof(WidenShared) <= kFlashMlaV5SharedBytes && kFlashMlaV5SharedBytes <= kMaxSharedBytes);

inline constexpr int kNarrowed = 14;  // a named barrier of the consumers; the merge has those from 5 to 13

// Hides the scores of tokens that are not there: of columns 8 i + 2 (lane % 4) and the one after it.
__device__ __forceinline__ void hide_absent(float* p, const unsigned short (&present)[4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 bits = *const_cast<const volatile unsigned short*>(&present[i / 2]) >> (i % 2 * 8 + 2 * (lane_id() & 3));
    if (!(bits & 1)) p[4 * i] = p[4 * i + 2] = -kInfinity;
    if (!(bits & 2)) p[4 * i + 1] = p[4 * i + 3] = -kInfinity;
  }
}

// Queries to fp16, in place, by both consumers.
template <DType from>
__device__ __forceinline__ void narrow_queries(WidenShared& shared, u32 phase) {
  const u32 place = shared.queries + (thread_id() & 255) * 16;
  constexpr int kUnits = 3;  // of 16 bytes a thread, at a time
  for (int pair = 0; pair < kBoxPairs; ++pair) barrier_wait(shared.queries_full[pair], phase);
#pragma unroll 1
  for (int first = 0; first < static_cast<int>(kOperandBytes / 4096); first += kUnits) {
    uint4 x[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) x[i] = load_shared(place + (first + i) * 4096);
    const auto halves = [](u32 x) {
      const float2 of = unpack<from>(x);
      return pack<DType::float16>(of.x, of.y);
    };
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
      store_line(place + (first + i) * 4096,
                 make_uint4(halves(x[i].x), halves(x[i].y), halves(x[i].z), halves(x[i].w)));
  }
  async_fence();
  named_sync(kNarrowed, 256);
}

// One consumer warpgroup. `work`: its items, one after the other.
template <auto problem, int half>
__device__ __forceinline__ void attend_wide(WidenShared& shared, const WorkItem* __restrict__ work,
                                            const LatentArguments& with) {
  constexpr DType dtype = DType::float16;  // of all operands
  const float scale_log2 = with.scale_log2;
  constexpr int kOwnBarrier = kWarpgroup0 + half;
  const int warp = (thread_id() >> 5) & 3, lane = lane_id();

  float o[128];  // (64, 256) of the warpgroup: o[4i], o[4i + 1] columns 8i + 2 (lane % 4) of row r, then of row r + 8
  float p[32] = {};                                                               // (64, 64) scores, then weights
  u32 packed[16];                                                                 // (64, 64) weights as the A operand
  float2 maximum = {kLeastScore, kLeastScore}, sum = {}, factors = {1.0f, 1.0f};  // of rows r and r + 8
  int raise = 0;
  u32 phase = 0, queries_phase = 0, item_phase = 0;

  const u32 q = operand_k_major(shared.queries);
  const u32 key = operand_k_major(shared.slots[half]);
  const u32 value0 = operand_mn_major(shared.slots[0] + half * 4 * kBoxBytes);
  const u32 value1 = operand_mn_major(shared.slots[1] + half * 4 * kBoxBytes);
  const u32 weights = operand_k_major(shared.slots[1 - half] + 8 * kBoxBytes);  // those of the other warpgroup
  const u32 weights_row = shared.slots[half] + 8 * kBoxBytes + place_of_row(warp * 16, lane);  // of this lane's own

  auto row = [&] { return ((thread_id() >> 5) & 3) * 16 + (lane_id() >> 2); };
  auto scores = [&](int pair) {  // S += Q Z^T over one pair of boxes
    mma_fence();
#pragma unroll
    for (int i = 0; i < (pair == kRope ? 4 : 8); ++i) {
      const int offset = (2 * pair + i / 4) * kNextBox + i % 4 * 2;
      mma<dtype, 64>(p, q + offset, key + offset, pair != 0 || i != 0);
    }
  };
  auto wait_until_loaded = [&](int pair) { barrier_wait(shared.full[half][pair], phase); };
  auto scores_when_loaded = [&](int pair) {
    wait_until_loaded(pair);
    scores(pair);
  };
  auto values_of_own = [&](int columns) {  // O += P Z over 128 columns, P from registers
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma<dtype, 128, Major::mn>(o + 64 * columns, packed + 4 * i,
                                 (half ? value1 : value0) + 128 * i + columns * 2 * kNextBox, 1);
    }
    mma_commit();
  };
  auto values_of_other = [&](int columns) {  // O += P Z over 128 columns, P from the other warpgroup's box
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma<dtype, 128, Major::mn>(o + 64 * columns, weights + 2 * i,
                                 (half ? value0 : value1) + 128 * i + columns * 2 * kNextBox, 1);
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
    named_sync(kOwnBarrier, 128);
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
    const SeenTokens<problem> seen(with, item, queries, tokens);
    int token = begin * kTile + half * kTile;          // first token of the next block that this warpgroup scores
    const int rows = queries * with.heads - tile_row;  // from the tile's first row on
    maximum = {first_maximum(row(), rows), first_maximum(row() + 8, rows)};
    sum = {};
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0.0f;

    bool absent = false;
    auto look_for_absent = [&] {  // in the own block, while its scores are in flight
      const volatile u32* const present = reinterpret_cast<const volatile u32*>(shared.present[half]);
      absent = (present[0] & present[1]) != ~0u;
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
      }
      if (absent) hide_absent(p, shared.present[half]);
      token += 2 * kTile;
    };
    narrow_queries<problem.dtype>(shared, queries_phase);
    queries_phase ^= 1;
    int pairs = (end - begin) / 2;         // whole pairs
    const int single = (end - begin) & 1;  // a last even block without an odd one
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
        warp_arrive(shared.empty[0][0]);
        mma_wait<0>();
        pin<128>(o);
        warp_arrive(shared.empty[0][1]);
        warp_arrive(shared.empty[0][kRope]);
      };
      auto odd_block = [&] {  // leaves its products in flight
        barrier_wait(shared.weights_ready[1], phase);
        adopt_maximum(1);
        pin<128>(o);
        mma_fence();
        values_of_other(0);
        values_of_other(1);
        phase ^= 1;
      };
#pragma unroll
      for (int pair = 0; pair < kBoxPairs; ++pair) scores_when_loaded(pair);
      mma_commit();
      even_block();
#pragma unroll 1
      for (int i = pairs - 1 + single; i > 0; --i) {
        odd_block();
        scores_when_loaded(0);
        mma_commit();
        mma_wait<2>();
        warp_arrive(shared.empty[1][0]);
        scores_when_loaded(1);
        mma_commit();
        mma_wait<2>();
        warp_arrive(shared.empty[1][1]);
        warp_arrive(shared.empty[1][kRope]);
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
      if (pairs == 0) warp_arrive(shared.queries_empty);
#pragma unroll 1
      while (pairs > 0) {
        wait_until_loaded(0);
        named_sync(kEvenScoresIssued, 256);
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
        mma_wait<0>();
        pin<128>(o);
        warp_arrive(shared.empty[0][2]);
        warp_arrive(shared.empty[0][3]);
        warp_arrive(shared.empty[0][kRope]);
        if (raise) rescale_rows<128>(o, factors);
        pin<128>(o);
        mma_fence();
        values_of_own(0);
        values_of_own(1);
        mma_wait<1>();
        if (pairs + single > 1) warp_arrive(shared.empty[1][2]);
        mma_wait<0>();
        pin<128>(o);
        phase ^= 1;
        --pairs;
        if (pairs + single == 0) break;
        warp_arrive(shared.empty[1][3]);
        warp_arrive(shared.empty[1][kRope]);
      }
      if (single) {
        named_sync(kEvenScoresIssued, 256);
        named_arrive(kOddScoresIssued, 256);
        barrier_arrive(shared.weights_ready[1]);  // none, but the barrier's phase has to keep step
        barrier_wait(shared.weights_ready[0], phase);
        adopt_maximum(0);
        pin<128>(o);
        mma_fence();
        values_of_other(0);
        values_of_other(1);
        mma_wait<0>();
        pin<128>(o);
        warp_arrive(shared.empty[0][2]);
        warp_arrive(shared.empty[0][3]);
        warp_arrive(shared.empty[0][kRope]);
      }
    }
    if (single) {  // the producer hands over slot 1 empty, for the output
      if (half == 0) barrier_wait(shared.weights_ready[1], phase);
      barrier_wait(shared.full[1][2 * half], phase);
      barrier_wait(shared.full[1][2 * half + 1], phase);
      barrier_wait(shared.full[1][kRope], phase);
      phase ^= 1;
    }

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
    const int slot = uniform(slot_of_item);
    const auto inverse_of = [&](float sum, float maximum, int row) {
      const float divisor = divisor_of(with, slot, tile_row + row, maximum, sum);
      return divisor == 0.0f ? 0.0f : 1.0f / divisor;
    };
    float2 inverse = {inverse_of(sum.x, maximum.x, row()), inverse_of(sum.y, maximum.y, row() + 8)};
    if (half == 0 && (lane_id() & 3) == 0) {
      const float log0 = log_sum(maximum.x, sum.x), log1 = log_sum(maximum.y, sum.y);
      store_lse<kTile>(with, request, first_row, tile_row, rows, slot, row(), log0, sum.x);
      store_lse<kTile>(with, request, first_row, tile_row, rows, slot, row() + 8, log1, sum.y);
    }
    auto fragment = [&]<DType type>(Typed<type>, int i) {  // 16 columns
      return make_uint4(pack<type>(o[8 * i] * inverse.x, o[8 * i + 1] * inverse.x),
                        pack<type>(o[8 * i + 2] * inverse.y, o[8 * i + 3] * inverse.y),
                        pack<type>(o[8 * i + 4] * inverse.x, o[8 * i + 5] * inverse.x),
                        pack<type>(o[8 * i + 6] * inverse.y, o[8 * i + 7] * inverse.y));
    };
    if (slot < 0) {
      const u32 staging = shared.slots[1] + half * 4 * kBoxBytes;
      const u32 out = staging + (((thread_id() >> 5) & 3) * 16 + (lane_id() & 15)) * 128;
      const int unit = lane_id() >> 4, swizzle = lane_id() & 7;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const uint4 x = fragment(Typed<problem.dtype>(), i);
        store_matrices(out + i / 4 * kBoxBytes + (((2 * (i & 3) + unit) ^ swizzle) << 4), x.x, x.y, x.z, x.w);
      }
      __syncwarp();
      // A warp copies the rows that it wrote, 256 columns each.
      unsigned short* out_rows = static_cast<unsigned short*>(with.o) + half * 256 + lane_id() * 8;
      const int first = ((thread_id() >> 5) & 3) * 16;
      const u32 from = staging + (lane_id() >> 3) * kBoxBytes + first * 128;
      RowWalk walk(with.o_rows, request, first_row, tile_row + first);
#pragma unroll 4
      for (int r = 0; r < 16; ++r, walk.advance(with.o_rows)) {
        if (first + r < rows)
          *reinterpret_cast<uint4*>(out_rows + walk.at) = load_shared(from + swizzled(r, lane_id() & 7));
      }
      async_fence();  // the copy engine comes next
      __syncwarp();   // one lane says that all have read
    } else {          // see RowsOnM: every access is whole lines
      const float2 largest = largest_of_rows<128>(o);
      float* loads = with.lse_part + slot * (kTile * part_row_floats(kTile)) + (1 + half) * kTile + row();
      const float2 store = scale_part<8>({largest.x * inverse.x, largest.y * inverse.y}, loads, (lane_id() & 3) == 0);
      inverse = {inverse.x * store.x, inverse.y * store.y};
      uint4* out = static_cast<uint4*>(with.o_part) + slot * 4096LL + half * 128 + (thread_id() & 127);
#pragma unroll
      for (int i = 0; i < 16; ++i) out[i * 256] = fragment(Typed<DType::float16>(), i);
    }
    warp_arrive(shared.empty[1][2 * half]);
    warp_arrive(shared.empty[1][2 * half + 1]);
    warp_arrive(shared.empty[1][kRope]);
  }
}

// A producer, a warpgroup for the blocks of each slot; a warp widens 16 tokens. An entry of the table that names no row of
// the pool is no token: its place is zeroed, and the consumers hide its scores.
template <auto problem, int slot>
struct WidenProducer {
  WidenShared& shared;
  const LatentArguments& with;

  uint4 raw[4];                // of the next pair of boxes: of tokens 4 j + of_four()
  float scale;                 // of token lane % 16, and the pair's columns
  int place;                   // of token lane % 16 of the block at work, at least 0
  u32 present;                 // of the warp's tokens in it
  int entry;                   // of the block after it
  int number = 0, block, end;  // whose entry that is, and its item

  __device__ __forceinline__ WidenProducer(WidenShared& shared, const LatentArguments& with)
      : shared(shared), with(with) {}

  static __device__ __forceinline__ u32 warp() { return (thread_id() >> 5) & 3; }
  // A lane has 16 columns, a unit of eight, of four tokens. Of eight lanes, which share two tokens, no two meet in a bank
  // when they store.
  static __device__ __forceinline__ u32 unit() { return (lane_id() & 3) | (lane_id() >> 4) << 2; }
  static __device__ __forceinline__ u32 of_four() { return lane_id() >> 2 & 3; }
  __device__ __forceinline__ bool exists(u32 j) const { return present >> (4 * j + of_four()) & 1; }

  __device__ __forceinline__ void load(int pair) {
    const unsigned char* const z = static_cast<const unsigned char*>(with.z);
    const auto token = [&](int of) { return static_cast<u64>(static_cast<u32>(of)) * static_cast<u32>(with.z_stride); };
    const unsigned char* const from = z + unit() * 16 + (pair == kRope ? kRopeAt : pair * 128);
#pragma unroll
    for (u32 j = 0; j < 4; ++j)
      raw[j] =
          load_at_once(reinterpret_cast<const uint4*>(from + token(__shfl_sync(~0u, place, 4 * j + of_four()))), true);
    scale = __ldg(reinterpret_cast<const float*>(z + kScalesAt + min(pair, 3) * 4 + token(place)));
  }

  // What is held, to its pair of boxes.
  __device__ __forceinline__ void widen(int pair) const {
    const u32 line = shared.slots[0] + slot * kOperandBytes + 2 * pair * kBoxBytes + (warp() * 16 + of_four()) * 128;
    if (pair == kRope) {
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        const u32 keep = -static_cast<u32>(exists(j));
        const auto halves = [&](u32 x) {
          const float2 of = unpack<problem.dtype>(x & keep);
          return pack<DType::float16>(of.x, of.y);
        };
        store_line(line + j * 512 + ((unit() ^ of_four() ^ (j & 1) * 4) << 4),
                   make_uint4(halves(raw[j].x), halves(raw[j].y), halves(raw[j].z), halves(raw[j].w)));
      }
      return;
    }
    const u32 first = line + (unit() >> 2) * kBoxBytes + (((unit() & 3) * 2 ^ of_four()) << 4);
    // Of token lane % 16: the mantissa and the power of two of its scale, in fp16.
    const u32 bits = __float_as_uint(scale);
    const u32 factors =
        pack<DType::float16>(__uint_as_float((bits & 0x807fffff) | 0x3f800000), __uint_as_float(bits & 0x7f800000));
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
      const u32 keep = -static_cast<u32>(exists(j));
      const u32 both = __shfl_sync(~0u, factors, 4 * j + of_four()) & keep;
      const u32 mantissa = __byte_perm(both, 0, 0x1010), power = __byte_perm(both, 0, 0x3232);
      const auto wide = [&](u32 low, u32 high) {
        const uint2 a = halves_of_e4m3(low & keep), b = halves_of_e4m3(high & keep);
        const auto times = [&](u32 x) { return multiply_halves(multiply_halves(x, mantissa), power); };
        return make_uint4(times(a.x), times(a.y), times(b.x), times(b.y));
      };
      const u32 to = (first ^ (j & 1) * 64) + j * 512;
      store_line(to, wide(raw[j].x, raw[j].y));
      store_line(to ^ 16, wide(raw[j].z, raw[j].w));
    }
  }

  __device__ __forceinline__ const WorkItem* item() const { return with.own_work() + number; }
  __device__ __forceinline__ void begin_item() {
    block = item()->begin + slot;
    end = item()->end;
  }
  __device__ __forceinline__ int token() const {
    return block * kTile + static_cast<int>(warp() * 16 + (lane_id() & 15));
  }
  __device__ __forceinline__ void read_entry() {
    const int* __restrict__ table =
        with.block_table + static_cast<u64>(static_cast<u32>(item()->request)) * static_cast<u32>(with.table_width);
    entry = -1;
    if (block < end && token() < item()->tokens) entry = table[with.page.divide(token())];
  }
  // To the block whose entry was read. Behind the last even block of an item without an odd one comes an empty one.
  __device__ __forceinline__ void next_block() {
    const int found = with.place_of(entry * with.page_places + token() - with.page.divide(token()) * with.page.by);
    present = __ballot_sync(~0u, found >= 0) & 0xffff;
    place = max(found, 0);
    load(order_of_release(slot, 0));
    block += 2;
    if (block - slot >= end) {
      ++number;
      begin_item();
    }
    read_entry();
  }

  __device__ __forceinline__ void run() {
    begin_item();
    if (block - slot == end) return;
    read_entry();
#pragma unroll 1
    for (u32 phase = 1; block - slot < end; phase ^= 1) {
      const int of = number;  // the item of the block that is widened next
      const bool begins = slot == 0 && warp() == 0 && block == item()->begin;
      next_block();
#pragma unroll 1
      for (int i = 0; i < kBoxPairs; ++i) {
        const int pair = order_of_release(slot, i);
        barrier_wait(shared.empty[slot][pair], phase);
        if (i == 0 && lane_id() == 0)
          *const_cast<volatile unsigned short*>(&shared.present[slot][warp()]) = static_cast<unsigned short>(present);
        widen(pair);
        async_fence();
        barrier_arrive(shared.full[slot][pair]);
        if (i + 1 < kBoxPairs) load(order_of_release(slot, i + 1));
      }
      if (begins) {  // behind the tokens: the queries' place is free later than a slot
        if (lane_id() == 0) {
          barrier_wait(shared.queries_empty, (of & 1) ^ 1);
          load_queries_of(with.own_work()[of]);
        }
        __syncwarp();
      }
    }
  }

  __device__ __forceinline__ void load_queries_of(const WorkItem& item) const {
    const QueryPlace at(with, item, kTile);
    for (int pair = 0; pair < kBoxPairs; ++pair) {
      const u32 full = shared.queries_full[pair];
      barrier_expect(full, pair == kRope ? kBoxBytes : 2 * kBoxBytes);
      tma_load(shared.queries + 2 * pair * kBoxBytes, pair == kRope ? with.qpe_map : with.qc_map, at.inner, at.outer,
               pair == kRope ? 0 : 2 * pair, full);
    }
  }
};

// Query boxes: 64 rows and 2 groups of qc_map, 1 of qpe_map. The maps of the cache are not used.
template <LatentProblem problem, FlashMlaV5Tiling>
__global__ void __launch_bounds__(kFlashMlaV5Threads, 1) flash_mla_v5(const __grid_constant__ LatentArguments with) {
  static_assert(problem.k == 512 && problem.p == 64, "the layouts are made for 512 latent and 64 RoPE columns");
  static_assert(problem.fp8 == 656 && problem.page == 1 && problem.dtype == DType::bfloat16,
                "tokens of fp8 with four scales are gathered");
  static_assert(problem.tokens_first && !problem.after, "what the masks are made for");
  extern __shared__ __align__(1024) unsigned char dynamic[];
  WidenShared& shared = *reinterpret_cast<WidenShared*>(dynamic);
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 7), 0);
  if (threadIdx.x == 0) {
    for (int pair = 0; pair < kBoxPairs; ++pair) {
      for (int slot = 0; slot < 2; ++slot) {
        barrier_init(shared.full[slot][pair], 128);
        barrier_init(shared.empty[slot][pair], pair == kRope ? 8 : 4);
      }
      barrier_init(shared.queries_full[pair], 1);
    }
    barrier_init(shared.weights_ready[0], 128);
    barrier_init(shared.weights_ready[1], 128);
    barrier_init(shared.queries_empty, 8);
    barrier_init(shared.exchanged, 256);
    barrier_init_done();
  }
  if (threadIdx.x == 256) {
    tma_prefetch_map(with.qc_map);
    tma_prefetch_map(with.qpe_map);
  }
  __syncthreads();
  wait_for_previous();  // if launched programmatically, all before this ran beside the end of the previous kernel
  launch_next();
  if (role >= 2) {
    give_registers<48>();
    if (role == 2)
      WidenProducer<problem, 0>(shared, with).run();
    else
      WidenProducer<problem, 1>(shared, with).run();
    if (threadIdx.x / 32 == 11) collect_ahead(shared.cut, with.own_work(), with);
    return;
  }
  take_registers<208>();
  if (role == 0)
    attend_wide<problem, 0>(shared, with.own_work(), with);
  else
    attend_wide<problem, 1>(shared, with.own_work(), with);
  merge_tiles<problem.dtype, RowsOnM>(with, with.own_work(), shared.cut,
                                      *reinterpret_cast<MergeScratch*>(shared.queries.bytes));
}

}  // namespace hypermla::cute
