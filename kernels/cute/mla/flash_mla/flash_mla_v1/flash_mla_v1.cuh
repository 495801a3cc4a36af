// FlashMLA for few rows. The rows of a tile are on the N side of wgmma ("swap AB"), tokens and latent columns on the M
// side. So 16 rows cost a quarter of the 64 to which the base version pads: in products, in shared memory and in
// partial outputs. With few rows, or few tokens for each multiprocessor, memory and the start and end of the kernel set
// the time, not the tensor cores. The schedule is therefore simple and the ring of tokens deep.
//
// Rows: all heads share the latents, so the queries of a request are rows of one matrix, all heads' (LatentArguments).
// A thread block takes work items (latent/work.h): N = 16 or 32 rows against a range of token blocks of 64.
//
// Roles (384 threads):
//   warpgroups 0, 1   consumers: each takes every second token block and has its own maxima, sums and output (512, N),
//                     which are merged once, at the end of an item
//   warpgroup 2       producer: one warp loads tokens, two do of small pages; a thread of another warp loads queries
//
// A block, for a consumer: S^T (64 tokens, N) = Z Q^T, then the softmax down the tokens. A thread holds 2 tokens of
// N / 4 rows, so maxima cross lanes and warps. They are raised only when some score exceeds its running maximum by more
// than kRescaleThreshold; the warps vote on that. The weights P^T go through shared memory. Then O^T (512, N) += Z^T
// P^T with the same boxes of Z, as a transposed A operand.
//
// Shared memory (struct Shared; boxes of 64 tokens x 64 columns, 8192 bytes, 128-byte swizzle): queries, 9 boxes of N
// rows | weights of consumer 0, 1 (N rows x 64 tokens) | RoPE boxes of 2 blocks | ring of pairs of latent boxes, 4 a
// block | barriers and row values. The ring's 11 (N = 16) or 10 (N = 32) pairs are at least 2.5 blocks, so that the
// next block is being loaded while both consumers work. At the end of an item the places of a consumer's last block
// take what the consumers exchange, and the output on its way out.
//
// Clusters share nothing. They only place thread blocks side by side whose row tiles read the same tokens, since reads
// of neighbours are merged on their way to L2.
//
// grid = any multiple of the cluster, by the work list; 384 threads, flash_mla_v1_shared_bytes(N) of dynamic shared
// memory.
#pragma once

#include "flash_mla_v1.h"
#include "hopper/constants.h"
#include "hopper/fragments.h"
#include "hopper/mbarrier.h"
#include "hopper/rows.h"
#include "hopper/tma.h"
#include "hopper/warpgroup.h"
#include "hopper/wgmma.h"
#include "latent/arguments.h"
#include "latent/ask_ahead.cuh"
#include "latent/item_rows.cuh"
#include "latent/load_queries.cuh"
#include "latent/merge_tiles.cuh"
#include "latent/rows_on_n.cuh"
#include "latent/start.cuh"

namespace hypermla::cute {

inline constexpr int kPairs = 4;  // pairs of latent boxes of a block

template <int N>
struct Shared {
  static constexpr int kRing = N == 16 ? 11 : 10;  // places for pairs of latent boxes
  static constexpr u32 kRowBytes = N * 128;        // a box of N rows

  Bytes<9 * kRowBytes> queries;
  Array<Bytes<kRowBytes>, 2> weights;  // [consumer]
  Array<Bytes<kBoxBytes>, 2> ropes;    // free again after the scores
  Array<Bytes<2 * kBoxBytes>, kRing> latents;
  // Loaded, by token block and pair (kPairs: RoPE); four blocks' worth, so that the one waited for before at the same
  // barrier was the consumer's own, or of an item whose scores are all done: no waiter falls two phases behind.
  Array<Barriers<kPairs + 1>, 4> full;
  Barriers<kRing> latent_empty;
  Barriers<2> rope_empty;
  Barrier queries_full, queries_empty;
  Barrier exchanged;                         // what the consumers hand each other at the end of an item
  alignas(16) float2 of_warps[2][4][N / 2];  // [consumer][warp][pair of rows]: candidates for the maximum
  float2 sums[2][2][4][N / 2];               // [item parity][consumer][warp]
  float2 maxima[2][2][N / 2];                // [item parity][consumer]
  float4 factors[2][N / 2];                  // [consumer] {own, other} of two rows: of the outputs that are merged
  latent::CutItems cut;
  static_assert(kRowBytes % 1024 == 0);
};

// How partial outputs lie: [slot][pair of fragments][octet of rows][thread of a warpgroup], in the order of the
// consumers' fragments.
template <int N>
struct RowsOnNTile {
  static constexpr int kRows = N, kNextRow = 1, kPeriod = N / 2;
  static constexpr bool kAlike = false;
  static __device__ __forceinline__ int row(int chunk, int lane) { return chunk / 4 % (N / 8) * 8 + 2 * (lane & 3); }

  static __device__ __forceinline__ int piece(int chunk) { return chunk / (2 * kPeriod) * 4 + (chunk & 3); }

  struct Output {
    static constexpr int kOctets = N / 16;  // of a warp, which takes every eighth chunk
    unsigned short* rows[kOctets];          // row lane / 4 of each, or null

    __device__ __forceinline__ Output(const LatentArguments& with, const WorkItem& item, int chunk) {
#pragma unroll
      for (int i = 0; i < kOctets; ++i)
        rows[i] = latent::row_of_tile<N>(with, item, RowsOnNTile::row(chunk % 8 + 8 * i, 0) + lane_id() / 4);
    }
    template <DType dtype>
    __device__ __forceinline__ void write(int chunk, const latent::TwoRows& x, u32) const {
      const u32 words[4] = {pack<dtype>(x.first.x, x.second.x), pack<dtype>(x.first.y, x.second.y),
                            pack<dtype>(x.first.z, x.second.z), pack<dtype>(x.first.w, x.second.w)};
      const int lane = lane_id();
      unsigned short* const row = kOctets > 1 && (chunk & 8) ? rows[kOctets - 1] : rows[0];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 word = transpose_fragment(words[i]);
        const int at = (2 * (chunk / kPeriod) + i / 2) * 64 + (chunk & 3) * 16 + i % 2 * 8 + 2 * (lane & 3);
        if (row) *reinterpret_cast<u32*>(row + at) = word;
      }
    }
  };
};

// Named barriers of consumer 0; those of consumer 1 have the next number.
enum NamedBarrier { kMeet = 1, kVote = 3 };

// The same code serves both consumers, and so fills the instruction cache once: what differs is which columns lie
// where. A consumer answers for the output columns 256 consumer .. 256 consumer + 255, and finds them in the first two
// places of its blocks; its fragments o[m] are those of columns 64 (m ^ 4 consumer) .. 64 (m ^ 4 consumer) + 63.
template <LatentProblem problem, FlashMlaV1Tiling tiling>
__device__ __forceinline__ void attend(int consumer, Shared<tiling.rows>& shared, const WorkItem* __restrict__ work,
                                       const LatentArguments& with) {
  constexpr DType dtype = problem.dtype;
  const float scale_log2 = with.scale_log2;
  constexpr int N = tiling.rows, kOctets = N / 8;
  using Layout = Shared<N>;
  const int thread = thread_id() & 127, warp = thread >> 5, lane = lane_id();
  const int token_in_block = warp * 16 + (lane >> 2);  // of this thread's first token; the second is 8 on
  const int row = 2 * (lane & 3);                      // of this thread's first row of an octet; the second is 1 on

  float o[8][N / 2];  // (512, N) / consumer
  float p[N / 2];     // (64, N) scores, then weights
  RowsOnN<N> running(warp, lane);
  int sequence = 0;  // of the item's first token block among those of this thread block
  u32 queries_phase = 0;
  int parity = 0;

  const u32 query = operand_k_major(shared.queries);
  const u32 key = operand_k_major(shared.latents);
  const u32 value = operand_mn_major(shared.latents);
  const u32 weights = shared.weights[consumer];
  const u32 in_box = place_of_lane(warp, lane);

  auto place_of = [&](int at, int pair) { return (kPairs * static_cast<u32>(at) + pair) % Layout::kRing; };

  WorkItem item = *work;
#pragma unroll 1
  for (;;) {
    const int begin = uniform(item.begin), end = uniform(item.end), tokens = uniform(item.tokens);
    if (begin == end) break;
    const int tile_row = uniform(item.row_tile) * N, request = uniform(item.request), slot = uniform(item.slot);
    const int queries = uniform(item.queries), first_row = uniform(item.first_row);
    const int rows = queries * with.heads - tile_row;  // from the tile's first row on
    // Blocks over the end of the request also get their values zeroed, since 0 * NaN of an unused cache entry would
    // spoil the output.
    const latent::SeenTokens<problem> seen(with, item, queries, tokens);
    const bool both = end - begin > 1;  // else the item is consumer 0's alone
    running.reset();
#pragma unroll
    for (int i = 0; i < N / 4; ++i) running.maximum[i] = latent::first_maximum(i / 2 * 8 + row + i % 2, rows);
#pragma unroll
    for (int m = 0; m < 8; ++m) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) o[m][i] = 0.0f;
    }
    barrier_wait(shared.queries_full, queries_phase);
    queries_phase ^= 1;
    if (consumer == 1 && !both) {
      warp_arrive(shared.queries_empty);
      ++sequence;
      item = *++work;
      continue;
    }

    int at = sequence + consumer;  // the consumer's token block among those of this thread block
#pragma unroll 1
    for (int block = begin + consumer; block < end; block += 2, at += 2) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        barrier_wait(shared.full[at & 3][pair], at >> 2 & 1);
        mma_fence();
        const u32 boxes = key + place_of(at, pair) * 2 * kNextBox;
        const u32 columns = query + (pair ^ 2 * consumer) * 2 * (Layout::kRowBytes >> 4);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          mma<dtype, N>(p, boxes + i / 4 * kNextBox + i % 4 * 2, columns + i / 4 * (Layout::kRowBytes >> 4) + i % 4 * 2,
                        pair != 0 || i != 0);
        }
      }
      barrier_wait(shared.full[at & 3][kPairs], at >> 2 & 1);
      mma_fence();
      const u32 rope = operand_k_major(shared.ropes[at & 1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mma<dtype, N>(p, rope + i * 2, query + 8 * (Layout::kRowBytes >> 4) + i * 2, 1);
      }
      mma_commit();
      mma_wait<0>();
      pin<N / 2>(p);
      warp_arrive(shared.rope_empty[at & 1]);
      const bool last = block + 2 >= end;
      if (last) warp_arrive(shared.queries_empty);

      const int token = block * kTile;
      if (token + kTile > seen.by_all) {
        const int own = token + token_in_block;
        // Tokens first: a row of query row / heads sees `own` if (own - seen.by_all + 1) heads <= row.
        const int first_of_own = (own - seen.by_all + 1) * with.heads;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
          const int of = tile_row + i / 4 * 8 + row + (i & 1), later = (i & 2) * 4;
          if constexpr (problem.causal && problem.shards) {  // likewise, by the tokens' places in the request
            const int own_of_whole = with.shards.position(own + later);
            if (of < (own_of_whole - seen.whole + seen.masked) * with.heads) p[i] = -kInfinity;
          } else if constexpr (problem.causal && problem.tokens_first && !problem.after) {
            if (of < first_of_own + later * with.heads) p[i] = -kInfinity;
          } else {
            int by_row = seen.by_all;
            if (problem.causal) by_row += problem.tokens_first ? of / with.heads : of % queries;
            if (problem.after) by_row = min(by_row, tokens);
            if (own + later >= by_row) p[i] = -kInfinity;
          }
        }
        if (token + kTile > tokens) {
#pragma unroll 1
          for (int r = max(tokens - token, 0) + (thread >> 3); r < kTile; r += 16) {
#pragma unroll
            for (int box = 0; box < 2 * kPairs; ++box) {
              store_zeros(shared.latents[place_of(at, box / 2)] + (box & 1) * kBoxBytes + r * 128 + (thread & 7) * 16);
            }
          }
        }
      }
      running.weigh(p, o, scale_log2, shared.of_warps[consumer], kVote + consumer, kMeet + consumer);
      store_rows_on_n<dtype, N>(weights + in_box, p);
      async_fence();
      named_sync(kMeet + consumer, 128);
      pin<4 * N>(&o[0][0]);
      mma_fence();
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const u32 boxes = value + place_of(at, pair) * 2 * kNextBox;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          mma<dtype, N, Major::k, Major::mn>(o[2 * pair + i / 4], boxes + i / 4 * kNextBox + i % 4 * 128,
                                             operand_k_major(weights) + i % 4 * 2, 1);
        }
        mma_commit();
      }
      auto release_pair = [&](int pair) {
        if (!last) warp_arrive(shared.latent_empty[place_of(at, pair)]);
      };
      mma_wait<3>();
      release_pair(0);
      mma_wait<2>();
      release_pair(1);
      mma_wait<1>();
      release_pair(2);
      mma_wait<0>();
      pin<4 * N>(&o[0][0]);
      release_pair(3);
    }
    at -= 2;  // the consumer's last block, whose latents are still in their places

    item = *++work;  // arrives during the exchange
    // The row values of the consumer.
    auto& sums = shared.sums[parity];
    auto& maxima = shared.maxima[parity];
    auto& factors = shared.factors[consumer];
    running.store_sums(sums[consumer][warp]);
    if (warp == 0 && lane < 4) {
#pragma unroll
      for (int i = 0; i < kOctets; ++i)
        maxima[consumer][4 * i + lane] = {running.maximum[2 * i], running.maximum[2 * i + 1]};
    }
    named_sync(kMeet + consumer, 128);  // all warps have read the latents, and the sums are there
    // What a consumer hands over to the other, its fragments o[4] to o[7], lies in the first places of its last block.
    constexpr int kExchangePairs = N / 16;
    auto handed = [&](int of, int m) {
      return reinterpret_cast<float4*>(shared.latents.elements[place_of(of, m * kExchangePairs / 4)].bytes) +
             m % (4 / kExchangePairs) * (kOctets * 128) + thread;
    };
    if (both) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int i = 0; i < kOctets; ++i) {
          const float* x = o[4 + m] + 4 * i;
          handed(at, m)[i * 128] = make_float4(x[0], x[1], x[2], x[3]);
        }
      }
      barrier_arrive(shared.exchanged);
      barrier_wait(shared.exchanged, parity);
    }
    if (warp == 0 && lane < N) {  // a row each: by what the outputs of this and of the other consumer count
      auto total = [&](int of) {
        const float* x = reinterpret_cast<const float*>(sums[of]) + lane;
        return x[0] + x[N] + x[2 * N] + x[3 * N];
      };
      const float* row_maxima = reinterpret_cast<const float*>(maxima) + lane;
      const float own_maximum = row_maxima[consumer * N],
                  other_maximum = both ? row_maxima[(consumer ^ 1) * N] : kLeastScore;
      const float best = fmaxf(own_maximum, other_maximum);
      const float own = exp2_fast(own_maximum - best), other = exp2_fast(other_maximum - best);
      const float all = total(consumer) * own + (both ? total(consumer ^ 1) * other : 0.0f);
      const float divisor = latent::divisor_of(with, slot, tile_row + lane, best, all);
      const float inverse = divisor == 0.0f ? 0.0f : __fdividef(1.0f, divisor);
      reinterpret_cast<float2*>(factors)[lane] = {own * inverse, other * inverse};
      if (consumer == 0)
        latent::store_lse<N>(with, request, first_row, tile_row, rows, slot, lane, log_sum(best, all), all);
    }
    named_sync(kMeet + consumer, 128);
    auto scale = [&](int m) {
#pragma unroll
      for (int i = 0; i < kOctets; ++i) {
        const float4 by = factors[4 * i + (lane & 3)];
        o[m][4 * i] *= by.x;
        o[m][4 * i + 1] *= by.z;
        o[m][4 * i + 2] *= by.x;
        o[m][4 * i + 3] *= by.z;
      }
    };
#pragma unroll
    for (int m = 0; m < 4; ++m) scale(m);
    if (both) {
      const int last_of_item = end - begin - 1;
      const int others =
          sequence + last_of_item - ((last_of_item ^ consumer ^ 1) & 1);  // the other consumer's last block
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int i = 0; i < kOctets; ++i) {
          const float4 by = factors[4 * i + (lane & 3)], y = handed(others, m)[i * 128];
          o[m][4 * i] += y.x * by.y;
          o[m][4 * i + 1] += y.y * by.w;
          o[m][4 * i + 2] += y.z * by.y;
          o[m][4 * i + 3] += y.w * by.w;
        }
      }
      async_fence();
      __syncwarp();
#pragma unroll
      for (int pair = 0; pair < kExchangePairs; ++pair) warp_arrive(shared.latent_empty[place_of(others, pair)]);
      parity ^= 1;
    } else {
#pragma unroll
      for (int m = 4; m < 8; ++m) scale(m);
#pragma unroll
      for (int pair = 0; pair < kExchangePairs; ++pair) warp_arrive(shared.latent_empty[place_of(at, pair)]);
    }
    // Columns 256 consumer .. from o[0] to o[3] on, and where a consumer is alone the others from o[4] to o[7] on.
    auto write = [&](int half) {
      if (slot >= 0) {
        float2 scales[kOctets];
        float* loads = with.lse_part + static_cast<long long>(slot) * (N * part_row_floats(N)) +
                       (1 + (consumer ^ half) * 4 + warp) * N;
#pragma unroll
        for (int i = 0; i < kOctets; ++i)
          scales[i] = latent::scale_part<1>(largest_of_columns<4>(o + 4 * half, i), loads + 8 * i + row, lane < 4);
        latent::store_part<N>(with, slot, consumer ^ half, o + 4 * half, [&](int i) { return scales[i]; });
      } else {  // through one of the last two places of the consumer's last block
        const u32 staging = shared.latents[place_of(at, 2 + half)];
#pragma unroll
        for (int m = 0; m < 4; ++m)
          store_rows_on_n<dtype, N>(staging + m * Layout::kRowBytes + in_box, o[4 * half + m]);
        named_sync(kMeet + consumer, 128);
        // A warp copies a quarter of the rows, 256 columns each.
        const u32 from = staging + lane / 8 * Layout::kRowBytes;
        latent::copy_rows<N / 4>(with, request, first_row, tile_row, warp * (N / 4), rows, consumer ^ half,
                                 [&](int r) { return from + swizzled(warp * (N / 4) + r, lane & 7); });
        async_fence();  // the copy engine comes next
        __syncwarp();   // one lane says that all have read
      }
    };
    write(0);
    if (!both) write(1);
#pragma unroll
    for (int pair = kExchangePairs; pair < kPairs; ++pair) warp_arrive(shared.latent_empty[place_of(at, pair)]);
    sequence += end - begin;
  }
}

// Warps that load tokens. A warp takes 48 clocks for each instruction of the copy engine, so two share small pages.
template <LatentProblem problem>
inline constexpr int kLoaders = problem.page > 0 && problem.page < kTile ? 2 : 1;

// A warp that loads tokens, `part` of kLoaders; of a dense cache its first lane alone. A page is a batch element of the
// maps. A block that lies in one page is loaded like one of a dense cache: the lanes read the block table ahead, a
// block each. One of smaller pages is loaded page by page, by a lane each, into the rows of its boxes.
template <LatentProblem problem, FlashMlaV1Tiling tiling>
__device__ __forceinline__ void load_tokens(int part, Shared<tiling.rows>& shared, const WorkItem* __restrict__ work,
                                            const LatentArguments& with) {
  constexpr int kRing = Shared<tiling.rows>::kRing;
  constexpr bool paged = problem.page > 0;
  constexpr int kPages = pages_of_block(problem.page);
  constexpr int kOwnPages = kPages / kLoaders<problem>, kPagesOfLane = (kOwnPages + 31) / 32;
  const int first_page = part * kOwnPages;
  constexpr Keep keep = tiling.evict_first ? Keep::evict_first : Keep::normal;
  const TensorMap &z_map = with.z_map, &kpe_map = with.kpe_map;
  const int lane = lane_id();
  int place = 0;
  u32 phase = 1;
  WorkItem item = *work;
  wait_for_previous();  // if launched programmatically, all before this ran beside the end of the previous kernel
  launch_next();
  for (int sequence = 0; item.begin != item.end; item = *++work) {
    const int* __restrict__ table = with.block_table + static_cast<long long>(item.request) * with.table_width;
    auto page_at = [&](int token) { return token < item.tokens ? table[token / max(problem.page, 1)] : 0; };
    int pages[kPagesOfLane] = {}, next_pages[kPagesOfLane];
    auto read_pages = [&](int block) {  // of a block of several
#pragma unroll
      for (int i = 0; i < kPagesOfLane; ++i) {
        const int page = lane + 32 * i;
        next_pages[i] = page < kOwnPages ? page_at(block * kTile + (first_page + page) * problem.page) : 0;
      }
    };
    if constexpr (kPages > 1) read_pages(item.begin);
    for (int block = item.begin; block < item.end; ++block, ++sequence) {
      const int consumer = (block - item.begin) & 1, first = block * kTile;
      // Pages behind the end of the request are not loaded; what the block computes of them is masked and zeroed.
      int row = first, batch = item.request, loaded = kPages;
      if constexpr (kPages > 1) {
#pragma unroll
        for (int i = 0; i < kPagesOfLane; ++i) pages[i] = next_pages[i];
        read_pages(block + 1);
        loaded = max(min(max(item.tokens - first + problem.page - 1, 0) / problem.page - first_page, kOwnPages), 0);
      } else if constexpr (paged) {
        if ((block - item.begin) % 32 == 0) pages[0] = page_at((block + lane) * kTile);
        batch = __shfl_sync(~0u, pages[0], (block - item.begin) % 32);
        loaded = row < item.tokens;
        row %= problem.page;
      }
      auto load = [&](u32 to, const TensorMap& map, int group, int groups, u32 full) {
        if (lane == 0 || !paged) {
          if (loaded == 0) {
            barrier_arrive(full);
          } else {
            barrier_expect(full, loaded * (groups * kBoxBytes / kPages));
            if (kPages == 1) tma_load<keep>(to, map, row, group, batch, full);
          }
        }
        if constexpr (kPages > 1) {
          __syncwarp();
#pragma unroll
          for (int i = 0; i < kPagesOfLane; ++i) {
            const int page = lane + 32 * i;
            if (page >= loaded) continue;
            for (int g = 0; g < groups; ++g) {
              const u32 at = to + g * kBoxBytes + (first_page + page) * (kBoxBytes / kPages);
              tma_load<keep>(at, map, 0, group + g, pages[i], full);
            }
          }
        }
      };
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        barrier_wait(shared.latent_empty[place], phase);
        load(shared.latents[place], z_map, 2 * (pair ^ 2 * consumer), 2, shared.full[sequence & 3][pair]);
        if (++place == kRing) {
          place = 0;
          phase ^= 1;
        }
      }
      barrier_wait(shared.rope_empty[sequence & 1], ~(sequence >> 1) & 1);
      load(shared.ropes[sequence & 1], kpe_map, 0, 1, shared.full[sequence & 3][kPairs]);
    }
  }
}

// The thread that loads queries: apart from the tokens', which may run ahead of the item at work.
template <FlashMlaV1Tiling tiling>
__device__ __forceinline__ void load_queries(Shared<tiling.rows>& shared, const WorkItem* __restrict__ work,
                                             const LatentArguments& with) {
  using Layout = Shared<tiling.rows>;
  WorkItem item = *work;
  wait_for_previous();
  for (u32 phase = 1; item.begin != item.end; phase ^= 1, item = *++work) {
    barrier_wait(shared.queries_empty, phase);
    latent::load_queries<tiling.rows, 8, 8, 9 * Layout::kRowBytes>(shared.queries, item, with, shared.queries_full);
  }
}

// Query boxes: tiling.rows rows and 8 groups of qc_map, 1 of qpe_map. Token boxes: 64 rows and 2 groups of z_map, or a
// smaller page and 1 group, and 1 group of kpe_map.
template <LatentProblem problem, FlashMlaV1Tiling tiling>
__global__ void __launch_bounds__(384, 1) flash_mla_v1(const __grid_constant__ LatentArguments with) {
  static_assert(tiling.rows == 16 || tiling.rows == 32, "tiles of 16 or 32 rows");
  static_assert(problem.page == 0 || problem.page % kTile == 0 || kTile % problem.page == 0, "blocks and pages nest");
  static_assert(problem.k == 512 && problem.p == 64, "the layouts are made for 512 latent and 64 RoPE columns");
  static_assert(!problem.shards || (problem.tokens_first && !problem.after), "what the masks of shards are made for");
  constexpr bool trades_registers = tiling.rows == 32;  // 16 rows need no more than all threads start with
  using Layout = Shared<tiling.rows>;
  static_assert(sizeof(Layout) == flash_mla_v1_shared_bytes(tiling.rows) && sizeof(Layout) <= kMaxSharedBytes);
  extern __shared__ __align__(1024) unsigned char dynamic[];
  Layout& shared = *reinterpret_cast<Layout*>(dynamic);
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 7), 0);
  latent::ask_for_code();
  if (threadIdx.x == 0) {
    for (int block = 0; block < 4; ++block)
      for (int pair = 0; pair <= kPairs; ++pair) barrier_init(shared.full[block][pair], kLoaders<problem>);
    for (int place = 0; place < Layout::kRing; ++place) barrier_init(shared.latent_empty[place], 4);
    for (int place = 0; place < 2; ++place) barrier_init(shared.rope_empty[place], 4);
    barrier_init(shared.queries_full, 1);
    barrier_init(shared.queries_empty, 8);
    barrier_init(shared.exchanged, 256);
    barrier_init_done();
  }
  if (threadIdx.x == 256) {
    for (const TensorMap* map : {&with.qc_map, &with.qpe_map, &with.z_map, &with.kpe_map}) tma_prefetch_map(*map);
  }
  __syncthreads();
  if constexpr (!is_gathered(problem.page)) {
    if (threadIdx.x / 32 == latent::kAskingWarp) latent::ask_ahead<problem>(with);
  }
  // The threads that load wait for the previous kernel, and the others for what they load; all of them where that
  // kernel makes the work list.
  if (with.planned) wait_for_previous();
  const WorkItem* __restrict__ work = with.own_work();
  if (role == 2) {
    if constexpr (trades_registers) give_registers<40>();
    const unsigned warp = threadIdx.x / 32;
    const bool second = kLoaders<problem> == 2 && warp == latent::kAskingWarp;
    if (problem.page > 0 ? warp == 8 || second : threadIdx.x == 256)
      load_tokens<problem, tiling>(uniform(second), shared, work, with);
    if (threadIdx.x == 288) load_queries<tiling>(shared, work, with);
    latent::watch_tiles(shared.cut, with);
    return;
  }
  if constexpr (trades_registers) take_registers<232>();
  const int consumer = uniform(role);
  attend<problem, tiling>(consumer, shared, work, with);
  using Tile = RowsOnNTile<tiling.rows>;
  using Scratch = latent::MergeScratch<Tile>;  // in the place of tokens
  static_assert(sizeof(Scratch) <= sizeof(shared.latents));
  latent::merge_tiles<problem.dtype, Tile>(with, shared.cut,
                                           *reinterpret_cast<Scratch*>(shared.latents.elements[0].bytes));
}

}  // namespace hypermla::cute
