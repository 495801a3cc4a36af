// FlashMLA for Hopper over a cache in FP8 with one factor for all tokens, and queries in FP8: all products are of e4m3,
// at twice the rate of bfloat16, and nothing is widened. Rows, work items and merges are those of flash_mla (v0), but a
// tile has N = 16, 32, 48 or 64 rows.
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
// Roles (512 threads):
//   warpgroup 0   values: columns   0..255 of the output
//   warpgroup 1   values: columns 256..511 of the output
//   warpgroup 2   producer: one warp loads tokens, a thread of another one queries
//   warpgroup 3   scores and weights of all blocks
//
// Scores run ahead of values, by as many blocks as there are slots, and over the end of an item. The products of the
// next block's scores are issued in between the steps of a block's softmax, so that neither waits for the other.
//
// Products of values begin anew for every block and are added up in registers: what the tensor core itself adds up
// loses bits with every product (hopper/e4m3.h), a quarter of the mean of 16384 tokens.
//
// A score at the running maximum of its row weighs 2^kWeightBits, and none weighs more than 2^(kWeightBits + kLag),
// which is below 448: the maximum rises when a score exceeds it by more than kLag. Then sums and outputs are rescaled,
// of those rows alone whose warp asked for it. What lies 2^-17 below the running maximum rounds to nothing. Outputs are
// divided by the sum of the rounded weights, so that a row of few large ones, or of many equal ones, is exact for any
// rounding; the log-sum-exp is of the weights before.
//
// Of a tile of fewer rows the scores, whose rows are on M, are products of 64. The other rows are what lies behind a
// box of queries, and nobody uses what comes of them.
//
// Shared memory (struct E4m3Shared): queries, 4 boxes of N rows x 128 bytes and one of 64 bytes (RoPE) | 5 token blocks
// of 64 tokens in the same form, a ring | barriers, row values. Once the scores of a block are done, its weights (64
// rows x 64 bytes) replace its RoPE box.
//
// Pages of 64 or 128 tokens are loaded like a dense cache, those of 16 or 32 as boxes of a page. What lies behind the
// end of a request is not loaded; its scores are hidden, and its values are zeroed after them, since 0 * NaN is NaN.
//
// grid = any multiple of the cluster, by the work list; 512 threads, kFlashMlaV2SharedBytes of dynamic shared memory.
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
  Barriers<kSlots> weights_ready;
  Barrier queries_full, queries_empty;
  Barriers<2> sums_full, sums_empty;                 // [item, even or odd]
  alignas(16) volatile int raised[kSlots][4];        // [slot][warp]: did the warp raise its maximum
  alignas(16) volatile float factor[kSlots][kTile];  // [slot][row]: of the outputs, where the maximum rose
  float sum[2][kTile], rounded[2][kTile];            // [item][row]: of the weights, and of what they were rounded to
  float of_row[2][kTile];                            // [item][row]: the running maximum
  alignas(16) float inverse[2][2][kTile];            // [item][half][row]: what the outputs are multiplied by
  latent::CutItems cut;
};
static_assert(sizeof(E4m3Shared) == kFlashMlaV2SharedBytes && kFlashMlaV2SharedBytes <= kMaxSharedBytes);

enum NamedBarrier { kScores = 1, kValues = 2 };  // of a warpgroup: 2 and 3 of those of the values

// Where a warpgroup is in the ring of token blocks.
struct Cursor {
  int slot = 0;
  u32 phase = 0;
  __device__ __forceinline__ Cursor next() const {
    return slot + 1 == kSlots ? Cursor{0, phase ^ 1} : Cursor{slot + 1, phase};
  }
};

// The warpgroup of the scores: scores and weights of all blocks.
template <auto problem, int N>
__device__ __forceinline__ void weigh_tokens(E4m3Shared& shared, const LatentArguments& with) {
  const float scale_log2 = latent::scale_log2_of(with, *with.q_scale * *with.cache_scale);
  const u32 q = operand_k_major(shared.queries);
  constexpr u32 kQueryBox = N * 128;
  const u32 q_rope = operand_k_major(shared.queries + kBoxes * kQueryBox);
  const u32 key = operand_k_major(shared.slots);
  float p[2][32];                // (64, 64) scores, then weights, of a block and the next one
  float2 maximum, sum, rounded;  // of rows r and r + 8
  Cursor at;
  // Here and below threads read their index anew, which saves a register.
  auto row = [&] { return ((thread_id() >> 5) & 3) * 16 + (lane_id() >> 2); };

  WorkItem item = with.own_work()[0];
#pragma unroll 1
  for (int number = 0;;) {  // of the item; an address would need two registers
    const int begin = uniform(item.begin), end = uniform(item.end), tokens = uniform(item.tokens);
    if (begin == end) break;
    const int tile_row = uniform(item.row_tile) * N, queries = uniform(item.queries);
    const latent::SeenTokens<problem> seen(with, item, queries, tokens);
    const int rows = min(queries * with.heads - tile_row, N);  // of the tile
    maximum = {latent::first_maximum(row(), rows), latent::first_maximum(row() + 8, rows)};
    sum = rounded = {};
    int block = begin;

    // Issues a fifth of the products S = Q Z^T: a box of the latent part, the last time the RoPE part.
    auto score = [&](float* scores, int slot, int box) {
      const u32 keys = key + slot * (kBlockBytes >> 4);
      if (box < kBoxes) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          mma_e4m3<Line::bytes_128>(scores, q + box * (kQueryBox >> 4) + i * 2, keys + box * kNextBox + i * 2,
                                    box + i != 0);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) mma_e4m3<Line::bytes_64>(scores, q_rope + 2 * i, keys + (kRopeAt >> 4) + 2 * i, 1);
        mma_commit();
      }
    };
    auto mask = [&](float* scores) {
      const int first = block * kTile;
      if (first + kTile <= seen.by_all) return;
      int seen0 = seen.by_all, seen1 = seen.by_all;
      if (problem.causal) {
        const int query0 = (tile_row + row()) / with.heads, query1 = (tile_row + row() + 8) / with.heads;
        seen0 = problem.shards ? with.shards.count(seen.whole - seen.masked + 1 + query0) : seen.by_all + query0;
        seen1 = problem.shards ? with.shards.count(seen.whole - seen.masked + 1 + query1) : seen.by_all + query1;
      }
      const int column = first + 2 * (lane_id() & 3);
      mask_rows<32>(scores, {seen0 - column, seen1 - column});
    };
    // Scores to weights, in the order of tokens above, which replace the RoPE box of their block. `more`: there is a
    // next block, whose scores are begun meanwhile.
    auto weigh = [&]<bool more>(float* now, [[maybe_unused]] float* then) {
      const Cursor next = at.next();
      auto score_next = [&](int box) {
        if constexpr (more) score(then, next.slot, box);
      };
      mma_wait<0>();
      pin<32>(now);
      if constexpr (more) {
        barrier_wait(shared.full[next.slot], next.phase);
        mma_fence();
      } else {
        warp_arrive(shared.queries_empty);
      }
      score_next(0);
      mask(now);
      const float2 largest = largest_scores<32>(now);
      const bool raise = __any_sync(
          ~0u, fmaf(largest.x, scale_log2, -maximum.x) > kLag || fmaf(largest.y, scale_log2, -maximum.y) > kLag);
      score_next(1);
      float2 factors = {};
      if (raise) {
        factors = raise_maxima(maximum, largest, scale_log2);
        sum = {sum.x * factors.x, sum.y * factors.y};
        rounded = {rounded.x * factors.x, rounded.y * factors.y};
      }
      named_sync(kScores, 128);  // all warps have finished to read the box
      if (lane_id() == 0) shared.raised[at.slot][(thread_id() >> 5) & 3] = raise;
      if (raise && (lane_id() & 3) == 0) {
        shared.factor[at.slot][row()] = factors.x;
        shared.factor[at.slot][row() + 8] = factors.y;
      }
      // Unit lane / 16 of the lane's row; two units on, bit 5 is turned over.
      const u32 to = shared.slots[at.slot] + kRopeAt +
                     swizzled_64(((thread_id() >> 5) & 3) * 16 + (lane_id() & 15), lane_id() >> 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // 32 tokens each
        score_next(2 + i);
        float* const x = now + 16 * i;
        weigh_rows<16>(x, scale_log2, {maximum.x - kWeightBits, maximum.y - kWeightBits}, sum);
        const u32 first[2] = {pack_e4m3(x[0], x[1], x[4], x[5]), pack_e4m3(x[8], x[9], x[12], x[13])},
                  second[2] = {pack_e4m3(x[2], x[3], x[6], x[7]), pack_e4m3(x[10], x[11], x[14], x[15])};
        rounded = {rounded.x + sum_of_e4m3(first), rounded.y + sum_of_e4m3(second)};
        store_matrices(to ^ i << 5, first[0], second[0], first[1], second[1]);
      }
      score_next(4);
      async_fence();
      barrier_arrive(shared.weights_ready[at.slot]);
      at = next;
      ++block;
    };

    barrier_wait(shared.queries_full, number & 1);
    barrier_wait(shared.full[at.slot], at.phase);
    mma_fence();
#pragma unroll
    for (int box = 0; box <= kBoxes; ++box) score(p[0], at.slot, box);
#pragma unroll 1
    while (block + 2 < end) {
      weigh.template operator()<true>(p[0], p[1]);
      weigh.template operator()<true>(p[1], p[0]);
    }
    if (block + 1 < end) {
      weigh.template operator()<true>(p[0], p[1]);
      weigh.template operator()<false>(p[1], p[0]);
    } else {
      weigh.template operator()<false>(p[0], p[1]);
    }

    item = with.own_work()[number + 1];
    const int of = number & 1;
    const float2 sums = sum_of_rows(sum), all_rounded = sum_of_rows(rounded);
    barrier_wait(shared.sums_empty[of], (number >> 1 & 1) ^ 1);
    if ((lane_id() & 3) == 0) {
      shared.sum[of][row()] = sums.x;
      shared.sum[of][row() + 8] = sums.y;
      shared.rounded[of][row()] = all_rounded.x;
      shared.rounded[of][row() + 8] = all_rounded.y;
      shared.of_row[of][row()] = maximum.x;
      shared.of_row[of][row() + 8] = maximum.y;
    }
    barrier_arrive(shared.sums_full[of]);
    ++number;
  }
}

// A warpgroup of the values: `half` of the output's columns.
template <auto problem, int N>
__device__ __forceinline__ void weigh_values(E4m3Shared& shared, const LatentArguments& with, int half) {
  float o[4][N / 2];    // (256, N) of the warpgroup, O^T: 64 columns each
  float sums[N / 2];    // (64, N) of a block
  u32 values[2][2][4];  // (64, 64) Z^T each as the A operand: [32 tokens]
  const u32 key = operand_k_major(shared.slots);
  Cursor at;

  auto wait_for_weights = [&](const Cursor& of) { barrier_wait(shared.weights_ready[of.slot], of.phase); };
  auto rescale = [&] {  // outputs, by what the warps of the scores have said
    const uint4 raised = load_shared(shared_address(const_cast<const int*>(shared.raised[at.slot])));
    if (!__any_sync(~0u, raised.x | raised.y | raised.z | raised.w)) return;
    const u32 by_warp[4] = {raised.x, raised.y, raised.z, raised.w};
#pragma unroll
    for (int w = 0; w < N / 16; ++w) {
      if (!__any_sync(~0u, by_warp[w])) continue;
#pragma unroll
      for (int i = 2 * w; i < 2 * w + 2; ++i) {
        const int first = 8 * i + 2 * (lane_id() & 3);
        const float x = shared.factor[at.slot][first], y = shared.factor[at.slot][first + 1];
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
  // 16 columns of the warp, of token `lane`; of every second 64 columns bit 6 is turned over.
  const u32 of_lane = shared.slots + half * 2 * kBoxBytes + swizzled(lane_id(), (thread_id() >> 5) & 3);
  auto columns = [&](int slot, int m, int k) {  // 64 of them, of 32 tokens
    return ((of_lane + slot * kBlockBytes) ^ m % 2 * 64) + m / 2 * kBoxBytes + k * 32 * 128;
  };
  auto transpose = [&](int m) {  // 64 columns as an A operand
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      u32 pairs[4];  // of 8 tokens each: two tokens, two columns
      load_transposed(pairs, columns(uniform(at.slot), m, k));
      u32* const a = values[m % 2][k];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a[2 * i] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x6420);
        a[2 * i + 1] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x7531);
      }
    }
  };
  auto multiply = [&](int m) {  // Z^T P^T of a block
    const u32 weights = key + uniform(at.slot) * (kBlockBytes >> 4) + (kRopeAt >> 4);
    mma_fence();
    mma_e4m3<N, false>(sums, values[m % 2][0], weights);
    mma_e4m3<N, true>(sums, values[m % 2][1], weights + 2);
    mma_commit();
  };
  auto add = [&](int m) {  // what is multiplied
    mma_wait<0>();
    pin<N / 2>(sums);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) o[m][i] += sums[i];
  };

  WorkItem item = with.own_work()[0];
#pragma unroll 1
  for (int number = 0;;) {
    const int begin = uniform(item.begin), end = uniform(item.end), tokens = uniform(item.tokens);
    if (begin == end) break;
    const int tile_row = uniform(item.row_tile) * N, queries = uniform(item.queries);
    const int rows = queries * with.heads - tile_row;  // from the tile's first row on
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) o[m][i] = 0.0f;
    }
    wait_for_weights(at);
#pragma unroll 1
    for (int block = begin; block < end; ++block) {
      if (const int left = tokens - block * kTile; left < kTile) {  // what lies behind the end, of the warp's columns
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          if (static_cast<int>(lane_id()) + 32 * k < left) continue;
#pragma unroll
          for (int m = 0; m < 4; ++m) store_zeros(columns(at.slot, m, k));
        }
        async_fence();  // before the next load into the slot
        __syncwarp();
      }
      transpose(0);
      multiply(0);
      rescale();
#pragma unroll
      for (int m = 1; m < 4; ++m) {
        transpose(m);
        add(m - 1);
        multiply(m);
      }
      if (block + 1 < end) wait_for_weights(at.next());  // beside the products
      add(3);
      __syncwarp();  // all lanes have read the factors
      warp_arrive(shared.empty[at.slot]);
      at = at.next();
    }

    // What is needed of this item, and the next one: they arrive during the exchange.
    const WorkItem* const work = with.own_work() + number;
    const int request = work->request, first_row = work->first_row, slot_of_item = work->slot;
    item = work[1];
    const int of = number & 1;
    barrier_wait(shared.sums_full[of], number >> 1 & 1);
    const int part = uniform(slot_of_item);
    float* const of_part = with.lse_part + part * static_cast<long long>(N * part_row_floats(N));
    if (const int r = thread_id() & 127; r < N) {  // a row each
      const float all = shared.sum[of][r], divisor = shared.rounded[of][r];
      const float top = shared.of_row[of][r] - kWeightBits;
      float inverse = divisor == 0.0f ? 0.0f : 1.0f / divisor;
      if (part < 0) {
        inverse *= *with.cache_scale;
        if (const float sink = exp2_fast(with.sink(tile_row + r) - top); sink > 0.0f) inverse *= all / (all + sink);
      } else {
        inverse *= latent::kPartScale;
      }
      shared.inverse[of][half][r] = inverse;
      if (half == 0) {
        latent::store_lse<N>(with, request, first_row, tile_row, rows, part, r, log_sum(top, all), all);
        if (part >= 0) of_part[N + r] = *with.cache_scale / latent::kPartScale;
      }
    }
    named_sync(kValues + half, 128);
    warp_arrive(shared.sums_empty[of]);
    if (part < 0) {
      latent::store_outputs<problem.dtype, N>(with, request, first_row, tile_row, rows, half, o,
                                              [&](int r) { return shared.inverse[of][half][r]; });
    } else {
      const int octet_row = 2 * (lane_id() & 3);
      latent::store_part<N>(with, part, half, o, [&](int i) {
        const int first = i * 8 + octet_row;
        return float2{shared.inverse[of][half][first], shared.inverse[of][half][first + 1]};
      });
    }
    ++number;
  }
}

// The warp that loads tokens. A page is a batch element of the maps, the next 32 of which the lanes read ahead.
template <auto problem, auto tiling>
__device__ __forceinline__ void load_tokens(E4m3Shared& shared, const LatentArguments& with) {
  constexpr int kPages = pages_of_block(problem.page);
  constexpr int kStep = kTile / kPages;  // tokens of a box
  constexpr Keep keep = tiling.evict_first ? Keep::evict_first : Keep::normal;
  const int lane = lane_id();
  int slot = 0;
  u32 phase = 1;
  for (int number = 0;; ++number) {  // of the item; an address would need two registers
    const WorkItem item = with.own_work()[number];
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
      auto page_at = [&](int j) { return __shfl_sync(~0u, pages, block * kPages + j - window); };
      [[maybe_unused]] const int only = kPages == 1 ? page_at(0) : 0;
      const int used = min(kPages, max(0, (item.tokens - block * kTile + kStep - 1) / kStep));
      const u32 full = shared.full[slot], to = shared.slots[slot];
      barrier_wait(shared.empty[slot], phase);
      if (++slot == kSlots) {
        slot = 0;
        phase ^= 1;
      }
      if (lane == 0) {
        if (used == 0) {
          barrier_arrive(full);
        } else {
          barrier_expect(full, used * (kBlockBytes / kPages));
        }
      }
      if constexpr (kPages == 1) {
        if (lane != 0 || used == 0) continue;
        const int row = block * kTile % problem.page;
        tma_load<keep>(to, with.z_map, row, 0, only, full);
        tma_load<keep>(to + 2 * kBoxBytes, with.z_map, row, 2, only, full);
        tma_load<keep>(to + kRopeAt, with.kpe_map, row, 0, only, full);
      } else {
#pragma unroll
        for (int j = 0; j < kPages; ++j) {  // pages one by one: together they would need more than 24 registers
          const int page = page_at(j);
          if (lane != 0 || j >= used) continue;
#pragma unroll
          for (int box = 0; box < kBoxes; ++box)
            tma_load<keep>(to + box * kBoxBytes + j * kStep * 128, with.z_map, 0, box, page, full);
          tma_load<keep>(to + kRopeAt + j * kStep * 64, with.kpe_map, 0, 0, page, full);
        }
      }
    }
  }
}

// Bytes are loaded as pairs. Query boxes: tiling.rows rows and 2 groups of 64 pairs of qc_map, 1 of 32 of qpe_map.
// Token boxes: 64 rows, or a smaller page; 2 groups of z_map, 1 where pages are smaller, and 1 of 32 pairs of kpe_map.
template <LatentProblem problem, FlashMlaV2Tiling tiling>
__global__ void __launch_bounds__(kFlashMlaV2Threads, 1) flash_mla_v2(const __grid_constant__ LatentArguments with) {
  static_assert(problem.k == 512 && problem.p == 64, "the layouts are made for 512 latent and 64 RoPE columns");
  static_assert(problem.fp8 == 576 && problem.page >= 16 && problem.dtype == DType::bfloat16);
  static_assert(problem.tokens_first && !problem.after, "what the masks are made for");
  constexpr int N = tiling.rows;
  static_assert(N % 16 == 0 && N <= kTile, "tiles of 16, 32, 48 or 64 rows");
  extern __shared__ __align__(1024) unsigned char dynamic[];
  E4m3Shared& shared = *reinterpret_cast<E4m3Shared*>(dynamic);
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 7), 0);
  latent::ask_for_code();
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kSlots; ++slot) {
      barrier_init(shared.full[slot], 1);
      barrier_init(shared.empty[slot], 8);
      barrier_init(shared.weights_ready[slot], 128);
    }
    for (int item = 0; item < 2; ++item) {
      barrier_init(shared.sums_full[item], 128);
      barrier_init(shared.sums_empty[item], 8);
    }
    barrier_init(shared.queries_full, 1);
    barrier_init(shared.queries_empty, 4);
    barrier_init_done();
  }
  if (threadIdx.x == 256) {
    for (const TensorMap* map : {&with.qc_map, &with.qpe_map, &with.z_map, &with.kpe_map}) tma_prefetch_map(*map);
  }
  __syncthreads();
  wait_for_previous();  // if launched programmatically, all before this ran beside the end of the previous kernel
  launch_next();
  if (role == 2) {
    give_registers<24>();
    if (threadIdx.x < 288) load_tokens<problem, tiling>(shared, with);
    if (threadIdx.x == 288) {
      latent::load_all_queries(with.own_work(), [&](const WorkItem& item, u32 phase) {
        barrier_wait(shared.queries_empty, phase);
        latent::load_queries<N, kBoxes, 2, kBlockBytes / kTile * N>(shared.queries, item, with, shared.queries_full);
      });
    }
    latent::watch_tiles(shared.cut, with);
    return;
  }
  if (role == 3) {
    give_registers<104>();
    weigh_tokens<problem, N>(shared, with);
    return;
  }
  take_registers<192>();
  weigh_values<problem, N>(shared, with, role);
  using Tile = latent::RowsOnNPairs<N>;
  using Scratch = latent::MergeScratch<Tile>;  // in the place of tokens
  static_assert(sizeof(Scratch) <= kSlots * kBlockBytes);
  latent::merge_tiles<problem.dtype, Tile>(with, shared.cut,
                                           *reinterpret_cast<Scratch*>(shared.slots.elements[0].bytes));
}

}  // namespace hypermla::cute
