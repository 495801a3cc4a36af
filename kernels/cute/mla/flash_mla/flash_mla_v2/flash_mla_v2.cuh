// FlashMLA for Hopper over a cache in FP8 with one factor for all tokens, and queries in FP8: all products are of e4m3,
// at twice the rate of bfloat16, and nothing is widened. Rows, work items and merges are those of flash_mla (v0).
//
// wgmma takes bytes only where both operands run along their lines. So queries and keys are multiplied where they lie,
// rows on M. The values' tokens, which have to run along the lines for O = P Z, run across them. That product is
// therefore O^T = Z^T P^T, rows on N: A is Z^T from registers, into which ldmatrix transposes pairs of bytes, and a
// byte permutation parts the pairs. Nothing is written back to shared memory.
//
// The order of tokens in a fragment: a lane of ldmatrix holds, of each 8 tokens, two that follow each other, and of two
// such eights it makes four bytes that wgmma takes for tokens that follow each other. The weights lie in the same
// order: of 16 tokens byte 4 j + e is token 2 j + e (e = 0, 1) or 2 j + 6 + e (e = 2, 3), which is what a thread of the
// scores holds. Likewise rows g and g + 8 of 16 of M are columns 2 g and 2 g + 1 of the values.
//
// Roles (384 threads):
//   warpgroup 0   consumer: columns   0..255 of the output, scores and weights of the even blocks
//   warpgroup 1   consumer: columns 256..511 of the output, scores and weights of the odd blocks
//   warpgroup 2   producer: one warp loads tokens, a thread of another one queries
//
// Order of the products for a pair: S(even) | S(odd) | O += P(even) Z(even) | O += P(odd) Z(odd). The softmax of the
// even block runs beside S(odd), that of the odd block beside O += P(even) Z(even), and the transposition of the even
// block beside the scores. Two named barriers keep this order. Both warpgroups share one running maximum.
//
// A score at the running maximum of its row weighs 2^kWeightBits, and none weighs more than 2^(kWeightBits + kLag),
// which is below 448: the maximum rises when a score exceeds it by more than kLag. Then sums and outputs are rescaled,
// of those rows alone whose warp asked for it. What lies 2^-17 below the running maximum rounds to nothing. Outputs are
// divided by the sum of the rounded weights, so that a row of few large ones, or of many equal ones, is exact for any
// rounding; the log-sum-exp is of the weights before.
//
// Shared memory (struct E4m3Shared): queries, 4 boxes of 64 rows x 128 bytes and one of 64 bytes (RoPE) | 5 token
// blocks of 64 tokens in the same form, a ring | barriers, row values. Once the scores of a block are done, its weights
// (64 rows x 64 bytes) replace its RoPE box.
//
// Pages of 64 or 128 tokens are loaded like a dense cache, those of 16 or 32 as boxes of a page. What lies behind the
// end of a request is not loaded; its scores are hidden, and its values are zeroed in registers, since 0 * NaN is NaN.
//
// grid = any multiple of the cluster, by the work list; 384 threads, kFlashMlaV2SharedBytes of dynamic shared memory.
// Clusters share nothing and only place thread blocks beside each other.
#pragma once

#include "flash_mla_v2.h"
#include "hopper/constants.h"
#include "hopper/e4m3.h"
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
#include "latent/rows_on_n_pairs.cuh"
#include "latent/start.cuh"

namespace hypermla::cute {

inline constexpr int kSlots = 5;  // token blocks in shared memory
inline constexpr int kBoxes = 4;  // of 128 bytes of the latent part
inline constexpr u32 kRopeAt = kBoxes * kBoxBytes, kBlockBytes = kRopeAt + kTile * 64;
inline constexpr float kWeightBits = 7.0f, kLag = 1.75f;

struct E4m3Shared {
  Bytes<kBlockBytes> queries;
  Array<Bytes<kBlockBytes>, kSlots> slots;
  Barriers<kSlots> full, empty;
  Barriers<2> weights_ready;  // of the even block, of the odd one
  Barrier queries_full, queries_empty;
  Barrier exchanged;                            // what the warpgroups hand each other at the end of an item
  alignas(16) volatile int raised[2][4];        // [warpgroup][warp]: did the warp raise its maximum
  volatile float maximum[2][kTile];             // [warpgroup][row]
  alignas(16) volatile float factor[2][kTile];  // [warpgroup][row]: of sums and outputs, where the maximum rose
  float sum[2][kTile], rounded[2][kTile];       // [warpgroup][row]: of the weights, and of what they were rounded to
  float of_row[kTile];                          // the running maximum
  alignas(16) float inverse[2][kTile];          // [warpgroup][row]: what the outputs are multiplied by
  latent::CutItems cut;
};
static_assert(sizeof(E4m3Shared) == kFlashMlaV2SharedBytes && kFlashMlaV2SharedBytes <= kMaxSharedBytes);

// Bytes from the start of a box of lines of 64 bytes to 16 of them (e4m3.h).
__device__ __forceinline__ u32 swizzled_64(u32 line, u32 unit) { return line * 64 + ((unit ^ (line / 2 % 4)) << 4); }

enum NamedBarrier { kEvenScoresIssued = 1, kOddScoresIssued = 2, kWarpgroup0 = 3, kWarpgroup1 = 4 };

// Parts are normalised by their weights, so no number of them exceeds those of the cache: 448. That times this is below
// float16's largest.
inline constexpr float kPartScale = 128.0f;

// How partial outputs lie: all pieces have one factor.
struct RowsOnN64 : latent::RowsOnNPairs<kTile> {
  static __device__ __forceinline__ int piece(int) { return 0; }
};

// One consumer warpgroup.
template <auto problem, int half>
__device__ __forceinline__ void attend(E4m3Shared& shared, const LatentArguments& with) {
  constexpr int kOwnBarrier = kWarpgroup0 + half;
  const float scale_log2 = with.scale_log2 * *with.q_scale * *with.cache_scale;

  float o[4][32];       // (256, 64) of the warpgroup, O^T: 64 columns each
  float p[32] = {};     // (64, 64) scores, then weights
  u32 values[4][2][4];  // (256, 64) Z^T as the A operand: [64 columns][32 tokens]
  float2 maximum = {kLeastScore, kLeastScore}, sum = {}, rounded = {};  // of rows r and r + 8 of the scores
  int slot = 0;                                                         // of the next even block
  u32 phase = 0;                                                        // of that slot
  u32 even_phase = 0, odd_phase = 0;                                    // of the weights
  u32 item_phase = 0;                                                   // of the queries and of the exchange

  const u32 q = operand_k_major(shared.queries);
  const u32 q_rope = operand_k_major(shared.queries + kRopeAt);
  const u32 key = operand_k_major(shared.slots);
  // Here and below threads read their index anew, which saves a register.
  auto row = [&] { return ((thread_id() >> 5) & 3) * 16 + (lane_id() >> 2); };
  auto after = [&](int at) { return at + 1 == kSlots ? 0 : at + 1; };
  auto wait_until_loaded = [&](int ahead) {  // the even block's slot, or the one behind it
    const int at = ahead ? after(slot) : slot;
    barrier_wait(shared.full[at], phase ^ (at < slot));
  };
  auto scores = [&](int at) {  // S = Q Z^T
    const u32 keys = key + at * (kBlockBytes >> 4);
    mma_fence();
#pragma unroll
    for (int i = 0; i < 4 * kBoxes; ++i) {
      const int offset = i / 4 * kNextBox + i % 4 * 2;
      mma_e4m3<Line::bytes_128>(p, q + offset, keys + offset, i != 0);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) mma_e4m3<Line::bytes_64>(p, q_rope + 2 * i, keys + (kRopeAt >> 4) + 2 * i, 1);
    mma_commit();
  };
  auto weigh_values = [&](int at, int begin, int end) {  // O^T += Z^T P^T, of fragments begin to end
    const u32 weights = key + at * (kBlockBytes >> 4) + (kRopeAt >> 4);
    mma_fence();
#pragma unroll
    for (int m = begin; m < end; ++m) {
#pragma unroll
      for (int k = 0; k < 2; ++k) mma_e4m3(o[m], values[m][k], weights + 2 * k);
    }
    mma_commit();
  };
  auto rescale = [&](int of) {  // outputs, by what a warpgroup has said
    const uint4 raised = load_shared(shared_address(const_cast<const int*>(shared.raised[of])));
    if (!__any_sync(~0u, raised.x | raised.y | raised.z | raised.w)) return;
    const u32 by_warp[4] = {raised.x, raised.y, raised.z, raised.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (!__any_sync(~0u, by_warp[w])) continue;
#pragma unroll
      for (int i = 2 * w; i < 2 * w + 2; ++i) {
        const int first = 8 * i + 2 * (lane_id() & 3);
        const float x = shared.factor[of][first], y = shared.factor[of][first + 1];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          o[m][4 * i] *= x;
          o[m][4 * i + 1] *= y;
          o[m][4 * i + 2] *= x;
          o[m][4 * i + 3] *= y;
        }
      }
    }
  };
  auto scale_sums = [&](float2 by) {
    sum = {sum.x * by.x, sum.y * by.y};
    rounded = {rounded.x * by.x, rounded.y * by.y};
  };
  auto adopt_maximum = [&](int of) {  // of the other warpgroup, if it raised it
    if (__any_sync(~0u, shared.raised[of][(thread_id() >> 5) & 3])) {
      maximum = {shared.maximum[of][row()], shared.maximum[of][row() + 8]};
      scale_sums({shared.factor[of][row()], shared.factor[of][row() + 8]});
    }
    rescale(of);
  };
  // Scores to weights, in the order of tokens above, which replace the RoPE box of the own block.
  auto softmax = [&](int at) {
    const float2 largest = largest_scores<32>(p);
    const bool raise = __any_sync(
        ~0u, fmaf(largest.x, scale_log2, -maximum.x) > kLag || fmaf(largest.y, scale_log2, -maximum.y) > kLag);
    float2 factors = {};
    if (raise) {
      factors = raise_maxima(maximum, largest, scale_log2);
      scale_sums(factors);
    }
    named_sync(kOwnBarrier, 128);  // all warps have finished to read the box, and what they said of the block before
    if (lane_id() == 0) shared.raised[half][(thread_id() >> 5) & 3] = raise;
    if (raise && (lane_id() & 3) == 0) {
      shared.maximum[half][row()] = maximum.x;
      shared.maximum[half][row() + 8] = maximum.y;
      shared.factor[half][row()] = factors.x;
      shared.factor[half][row() + 8] = factors.y;
    }
    // Unit lane / 16 of the lane's row; two units on, bit 5 is turned over.
    const u32 to =
        shared.slots[at] + kRopeAt + swizzled_64(((thread_id() >> 5) & 3) * 16 + (lane_id() & 15), lane_id() >> 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // 32 tokens each
      float* const x = p + 16 * i;
      weigh_rows<16>(x, scale_log2, {maximum.x - kWeightBits, maximum.y - kWeightBits}, sum);
      const u32 first[2] = {pack_e4m3(x[0], x[1], x[4], x[5]), pack_e4m3(x[8], x[9], x[12], x[13])},
                second[2] = {pack_e4m3(x[2], x[3], x[6], x[7]), pack_e4m3(x[10], x[11], x[14], x[15])};
      rounded = {rounded.x + sum_of_e4m3(first), rounded.y + sum_of_e4m3(second)};
      store_matrices(to ^ i << 5, first[0], second[0], first[1], second[1]);
    }
    async_fence();
    barrier_arrive(shared.weights_ready[half]);
  };

  WorkItem item = with.own_work()[0];
#pragma unroll 1
  for (int number = 0;;) {  // of the item; an address would need two registers
    const int begin = uniform(item.begin), end = uniform(item.end), tokens = uniform(item.tokens);
    if (begin == end) break;
    const int tile_row = uniform(item.row_tile) * kTile, queries = uniform(item.queries);
    const latent::SeenTokens<problem> seen(with, item, queries, tokens);
    int token = begin * kTile;                         // first of the even block
    const int rows = queries * with.heads - tile_row;  // from the tile's first row on
    maximum = {latent::first_maximum(row(), rows), latent::first_maximum(row() + 8, rows)};
    sum = rounded = {};
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int i = 0; i < 32; ++i) o[m][i] = 0.0f;
    }

    auto mask = [&](int first) {  // the scores of the own block, whose first token that is
      if (first + kTile <= seen.by_all) return;
      int seen0 = seen.by_all, seen1 = seen.by_all;
      if (problem.causal) {
        const int query0 = (tile_row + row()) / with.heads, query1 = (tile_row + row() + 8) / with.heads;
        seen0 = problem.shards ? with.shards.count(seen.whole - seen.masked + 1 + query0) : seen.by_all + query0;
        seen1 = problem.shards ? with.shards.count(seen.whole - seen.masked + 1 + query1) : seen.by_all + query1;
      }
      const int column = first + 2 * (lane_id() & 3);
      mask_rows<32>(p, {seen0 - column, seen1 - column});
    };
    // Fragments from `begin` to `end` of a block's values as A operands; of tokens behind the request's end zeros.
    auto transpose_values = [&](int at, int first, int begin, int end) {
      // 16 columns of the warp, of token `lane`: of an odd fragment, bit 6 is turned over.
      const u32 even = shared.slots[at] + half * 2 * kBoxBytes + swizzled(lane_id(), (thread_id() >> 5) & 3),
                odd = even ^ 64;
#pragma unroll
      for (int m = begin; m < end; ++m) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          u32 pairs[4];  // of 8 tokens each: two tokens, two columns
          load_transposed(pairs, (m % 2 ? odd : even) + m / 2 * kBoxBytes + k * 32 * 128);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            values[m][k][2 * i] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x6420);
            values[m][k][2 * i + 1] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x7531);
          }
        }
      }
      const int left = tokens - first;
      if (left >= kTile) return;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = 32 * k + 16 * i + 2 * (lane_id() & 3);
          const u32 there = (at < left ? 0xffu : 0) | (at + 1 < left ? 0xff00u : 0) | (at + 8 < left ? 0xff0000u : 0) |
                            (at + 9 < left ? 0xff000000u : 0);
#pragma unroll
          for (int m = begin; m < end; ++m) {
            values[m][k][2 * i] &= there;
            values[m][k][2 * i + 1] &= there;
          }
        }
      }
    };
    auto pin_outputs = [&] { pin<128>(&o[0][0]); };
    auto release = [&](int at) { warp_arrive(shared.empty[at]); };
    auto next_pair = [&] {
      token += 2 * kTile;
      slot += 2;
      if (slot >= kSlots) {
        slot -= kSlots;
        phase ^= 1;
      }
    };

    int pairs = (end - begin) / 2;         // whole pairs
    const int single = (end - begin) & 1;  // a last even block without an odd one
    barrier_wait(shared.queries_full, item_phase);
    if (half == 0) {
      auto even_block = [&] {  // its scores are in flight
        named_arrive(kEvenScoresIssued, 256);
        transpose_values(slot, token, 0, 4);
        mma_wait<0>();
        pin<32>(p);
        mask(token);
        softmax(slot);
        barrier_wait(shared.weights_ready[0], even_phase);
        even_phase ^= 1;
        rescale(0);
        named_sync(kOddScoresIssued, 256);
        pin_outputs();
        weigh_values(slot, 0, 4);
        mma_wait<0>();
        pin_outputs();
        release(slot);
      };
      auto odd_block = [&] {  // leaves its products in flight
        wait_until_loaded(1);
        transpose_values(after(slot), token + kTile, 0, 4);
        barrier_wait(shared.weights_ready[1], odd_phase);
        odd_phase ^= 1;
        adopt_maximum(1);
        pin_outputs();
        weigh_values(after(slot), 0, 4);
      };
      wait_until_loaded(0);
      scores(slot);
      even_block();
#pragma unroll 1
      for (int i = pairs - 1 + single; i > 0; --i) {
        odd_block();
        const int odd = after(slot);
        next_pair();
        wait_until_loaded(0);
        scores(slot);
        mma_wait<1>();
        pin_outputs();
        release(odd);
        even_block();
      }
      warp_arrive(shared.queries_empty);
      if (!single) {
        odd_block();
        mma_wait<0>();
        pin_outputs();
        release(after(slot));
      }
    } else {
      auto wait_for_even_weights = [&] {
        barrier_wait(shared.weights_ready[0], even_phase);
        even_phase ^= 1;
        adopt_maximum(0);
        pin_outputs();
      };
      if (pairs == 0) warp_arrive(shared.queries_empty);
#pragma unroll 1
      for (int i = pairs; i > 0; --i) {
        const int odd = after(slot);
        wait_until_loaded(1);
        named_sync(kEvenScoresIssued, 256);
        scores(odd);
        named_arrive(kOddScoresIssued, 256);
        wait_until_loaded(0);
        transpose_values(slot, token, 0, 2);
        mma_wait<0>();
        pin<32>(p);
        if (i == 1) warp_arrive(shared.queries_empty);
        wait_for_even_weights();
        weigh_values(slot, 0, 2);  // for all there are too few registers beside the softmax
        mask(token + kTile);
        softmax(odd);
        transpose_values(slot, token, 2, 4);
        weigh_values(slot, 2, 4);
        mma_wait<0>();
        pin_outputs();
        release(slot);
        transpose_values(odd, token + kTile, 0, 4);
        barrier_wait(shared.weights_ready[1], odd_phase);
        odd_phase ^= 1;
        rescale(1);
        pin_outputs();
        weigh_values(odd, 0, 4);
        mma_wait<0>();
        pin_outputs();
        release(odd);
        if (i > 1 || single) next_pair();
      }
      if (single) {
        named_sync(kEvenScoresIssued, 256);
        named_arrive(kOddScoresIssued, 256);
        wait_until_loaded(0);
        transpose_values(slot, token, 0, 4);
        wait_for_even_weights();
        weigh_values(slot, 0, 4);
        mma_wait<0>();
        pin_outputs();
        release(slot);
      }
    }
    // `slot` is that of the last even block.
    const int behind = slot + 2 - single;
    phase ^= behind >= kSlots;
    slot = behind >= kSlots ? behind - kSlots : behind;

    // What is needed of this item, and the next one: they arrive during the exchange.
    const WorkItem* const work = with.own_work() + number++;
    const int request = work->request, first_row = work->first_row, slot_of_item = work->slot;
    item = work[1];
    // Both warpgroups summed their own blocks, against the same maximum by now.
    const float2 sums = sum_of_rows(sum), all_rounded = sum_of_rows(rounded);
    if ((lane_id() & 3) == 0) {
      shared.sum[half][row()] = sums.x;
      shared.sum[half][row() + 8] = sums.y;
      shared.rounded[half][row()] = all_rounded.x;
      shared.rounded[half][row() + 8] = all_rounded.y;
      if (half == 0) {
        shared.of_row[row()] = maximum.x;
        shared.of_row[row() + 8] = maximum.y;
      }
    }
    barrier_arrive(shared.exchanged);
    barrier_wait(shared.exchanged, item_phase);
    item_phase ^= 1;
    const int part = uniform(slot_of_item);
    float* const of_part = with.lse_part + part * static_cast<long long>(kTile * part_row_floats(kTile));
    if (const int r = thread_id() & 127; r < kTile) {  // a row each
      const float all = shared.sum[0][r] + shared.sum[1][r];
      const float divisor = shared.rounded[0][r] + shared.rounded[1][r];
      const float top = shared.of_row[r] - kWeightBits;
      float inverse = divisor == 0.0f ? 0.0f : 1.0f / divisor;
      if (part < 0) {
        inverse *= *with.cache_scale;
        if (const float sink = exp2_fast(with.sink(tile_row + r) - top); sink > 0.0f) inverse *= all / (all + sink);
      } else {
        inverse *= kPartScale;
      }
      shared.inverse[half][r] = inverse;
      if (half == 0) {
        latent::store_lse<kTile>(with, request, first_row, tile_row, rows, part, r, log_sum(top, all), all);
        if (part >= 0) of_part[kTile + r] = *with.cache_scale / kPartScale;
      }
    }
    named_sync(kOwnBarrier, 128);
    if (part < 0) {
      latent::store_outputs<problem.dtype, kTile>(with, request, first_row, tile_row, rows, half, o,
                                                  [&](int r) { return shared.inverse[half][r]; });
    } else {
      const int octet_row = 2 * (lane_id() & 3);
      latent::store_part<kTile>(with, part, half, o, [&](int i) {
        const int first = i * 8 + octet_row;
        return float2{shared.inverse[half][first], shared.inverse[half][first + 1]};
      });
    }
  }
}

// The warp that loads tokens. A page is a batch element of the maps, the next 32 of which the lanes read ahead.
template <auto problem, auto tiling>
__device__ __forceinline__ void load_tokens(E4m3Shared& shared, const WorkItem* __restrict__ work,
                                            const LatentArguments& with) {
  constexpr int kPages = pages_of_block(problem.page);
  constexpr int kStep = kTile / kPages;  // tokens of a box
  constexpr Keep keep = tiling.evict_first ? Keep::evict_first : Keep::normal;
  const int lane = lane_id();
  int slot = 0;
  u32 phase = 1;
  for (;; ++work) {
    const WorkItem item = *work;
    if (item.begin == item.end) break;
    const int* __restrict__ table = with.block_table + static_cast<long long>(item.request) * with.table_width;
    auto page_of = [&](int box) { return box * kStep < item.tokens ? table[box * kStep / problem.page] : 0; };
    int window = item.begin * kPages, pages = page_of(window + lane), next_pages = page_of(window + 32 + lane);
    for (int block = item.begin; block < item.end; ++block) {
      if (block * kPages == window + 32) {
        window += 32;
        pages = next_pages;
        next_pages = page_of(window + 32 + lane);
      }
      int page[kPages];
#pragma unroll
      for (int j = 0; j < kPages; ++j) page[j] = __shfl_sync(~0u, pages, block * kPages + j - window);
      const int used = min(kPages, max(0, (item.tokens - block * kTile + kStep - 1) / kStep));
      const u32 full = shared.full[slot], to = shared.slots[slot];
      barrier_wait(shared.empty[slot], phase);
      if (++slot == kSlots) {
        slot = 0;
        phase ^= 1;
      }
      if (lane != 0) continue;
      if (used == 0) {
        barrier_arrive(full);
        continue;
      }
      barrier_expect(full, used * (kBlockBytes / kPages));
      if constexpr (kPages == 1) {
        const int row = block * kTile % problem.page;
        tma_load<keep>(to, with.z_map, row, 0, page[0], full);
        tma_load<keep>(to + 2 * kBoxBytes, with.z_map, row, 2, page[0], full);
        tma_load<keep>(to + kRopeAt, with.kpe_map, row, 0, page[0], full);
      } else {
#pragma unroll
        for (int j = 0; j < kPages; ++j) {
          if (j >= used) break;
#pragma unroll
          for (int box = 0; box < kBoxes; ++box)
            tma_load<keep>(to + box * kBoxBytes + j * kStep * 128, with.z_map, 0, box, page[j], full);
          tma_load<keep>(to + kRopeAt + j * kStep * 64, with.kpe_map, 0, 0, page[j], full);
        }
      }
    }
  }
}

// Bytes are loaded as pairs. Query boxes: 64 rows and 2 groups of 64 pairs of qc_map, 1 of 32 of qpe_map. Token boxes:
// 64 rows, or a smaller page; 2 groups of z_map, 1 where pages are smaller, and 1 of 32 pairs of kpe_map.
template <LatentProblem problem, FlashMlaV2Tiling tiling>
__global__ void __launch_bounds__(kFlashMlaV2Threads, 1) flash_mla_v2(const __grid_constant__ LatentArguments with) {
  static_assert(problem.k == 512 && problem.p == 64, "the layouts are made for 512 latent and 64 RoPE columns");
  static_assert(problem.fp8 == 576 && problem.page >= 16 && problem.dtype == DType::bfloat16);
  static_assert(problem.tokens_first && !problem.after, "what the masks are made for");
  extern __shared__ __align__(1024) unsigned char dynamic[];
  E4m3Shared& shared = *reinterpret_cast<E4m3Shared*>(dynamic);
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 7), 0);
  latent::ask_for_code();
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kSlots; ++slot) {
      barrier_init(shared.full[slot], 1);
      barrier_init(shared.empty[slot], 8);
    }
    barrier_init(shared.weights_ready[0], 128);
    barrier_init(shared.weights_ready[1], 128);
    barrier_init(shared.queries_full, 1);
    barrier_init(shared.queries_empty, 8);
    barrier_init(shared.exchanged, 256);
    barrier_init_done();
  }
  if (threadIdx.x == 256) {
    for (const TensorMap* map : {&with.qc_map, &with.qpe_map, &with.z_map, &with.kpe_map}) tma_prefetch_map(*map);
  }
  __syncthreads();
  wait_for_previous();  // if launched programmatically, all before this ran beside the end of the previous kernel
  launch_next();
  if (role == 2) {
    give_registers<40>();
    const WorkItem* __restrict__ work = with.own_work();
    if (threadIdx.x < 288) load_tokens<problem, tiling>(shared, work, with);
    if (threadIdx.x == 288) {
      latent::load_all_queries(work, [&](const WorkItem& item, u32 phase) {
        barrier_wait(shared.queries_empty, phase);
        latent::load_queries<kTile, kBoxes, 2, kBlockBytes>(shared.queries, item, with, shared.queries_full);
      });
    }
    latent::watch_tiles(shared.cut, with);
    return;
  }
  take_registers<232>();
  if (role == 0)
    attend<problem, 0>(shared, with);
  else
    attend<problem, 1>(shared, with);
  using Scratch = latent::MergeScratch<RowsOnN64>;  // in the place of tokens
  static_assert(sizeof(Scratch) <= kSlots * kBlockBytes);
  latent::merge_tiles<problem.dtype, RowsOnN64>(with, shared.cut,
                                                *reinterpret_cast<Scratch*>(shared.slots.elements[0].bytes));
}

}  // namespace hypermla::cute
