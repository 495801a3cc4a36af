// FlashMLA for Hopper over tokens in FP8 and queries in bfloat16, by clusters of two thread blocks. Each block has half
// of the latent columns: it widens its half of every token once, for 128 rows.
//
// Rows: all heads share the latents, so the queries of a request are rows of one matrix, all heads' (LatentArguments).
// A cluster takes work items (latent/work.h): 128 rows against a range of token blocks of 64. Block c of the cluster has
// columns 256 c .. 256 c + 255 of latents and outputs, and columns 32 c .. 32 c + 31 of RoPE.
//
// Roles (512 threads):
//   warpgroups 0, 1   consumers: rows 0..63 or 64..127, all of the block's columns
//   warpgroups 2, 3   producers: load queries, copy and widen tokens
//
// A token block, for a consumer: S (64 rows, 64 tokens) = Q Z^T over its columns is but a part of the scores. Block c
// needs the whole scores of 32 tokens, 32 c on: it sends its part of the others to the other block, adds what it gets
// to its own, and makes weights of the sums. It sends the weights, too, so that both blocks have those of 64 tokens:
// O (64, 256) += P Z. A block's own 32 tokens come first in its shared memory, so in both they are the same registers.
// The scores of the next token block are on their way meanwhile.
//
// Running maxima: both blocks begin a token block with the same ones. Each raises its own when a score exceeds it by
// more than kRescaleThreshold, and sends it with the weights; then both take the larger one.
//
// A message is overwritten only after it was read: whoever sends scores has got weights that were sent after the scores
// before were read, and whoever sends weights has got scores that were sent after the weights before were read. So the
// messages need no other barriers, and each has one place.
//
// A token is 656 bytes in DeepSeek's form: 512 e4m3 | 4 fp32 scales, of 128 columns each | 64 bf16 of RoPE. The power of
// two of the largest scale multiplies the token's scores and goes into its weight; what is left of each scale multiplies
// its columns, in fp16, and RoPE, in bf16, is divided by the power. The sums of weights are without the power. Queries
// become fp16, too, but for RoPE. A token comes as it is into the upper half of its place, where it is widened; the next
// block is on its way meanwhile.
//
// Shared memory (struct HalvesShared; boxes of 64 columns, lines of 128 bytes with the 128-byte swizzle): queries, 4
// boxes of 128 rows and RoPE | three token blocks, 4 boxes of 64 rows each | their RoPE, two in a box | scores, weights
// and sums of the other block | barriers.
//
// grid = 2 blocks a worker, by the work list; 512 threads, clusters of 2, kFlashMlaV5SharedBytes of dynamic shared
// memory. Block 0 of a cluster merges (latent/merge_tiles.cuh).
#pragma once

#include "flash_mla_v5.h"
#include "hopper/cluster.h"
#include "hopper/copies.h"
#include "hopper/constants.h"
#include "hopper/fp8.h"
#include "hopper/fragments.h"
#include "hopper/gather.h"
#include "hopper/mbarrier.h"
#include "hopper/rows.h"
#include "hopper/tma.h"
#include "hopper/warpgroup.h"
#include "hopper/wgmma.h"
#include "hopper/widened.h"
#include "latent/arguments.h"
#include "latent/copy_tokens.cuh"
#include "latent/item_rows.cuh"
#include "latent/load_queries.cuh"
#include "latent/merge_tiles.cuh"

namespace hypermla::cute {

inline constexpr u32 kQueryBox = kFlashMlaV5Rows * 128;  // bytes
inline constexpr u32 kOfThreads = 128 * 16;              // 16 bytes of each thread of a warpgroup
inline constexpr int kHalf = kTile / 2;                  // tokens of which a block makes the weights

// What the other block sends to a warpgroup.
struct Messages {
  Bytes<4 * kOfThreads> scores;   // [4 registers][thread]: of the own tokens, summed over the other's columns
  Bytes<2 * kOfThreads> weights;  // [4 registers][thread]: of the other's tokens
  Bytes<512> maxima, sums;        // [warp][8 threads], two floats: of rows r and r + 8
  Barriers<4> scores_there, weights_there, sums_there;  // [warp]
  static constexpr u32 kScoresBytes = 4 * 512, kWeightsBytes = 2 * 512 + 128, kSumsBytes = 128;  // of a warp
};

struct HalvesShared {
  Bytes<5 * kQueryBox> queries;
  Array<Bytes<4 * kBoxBytes>, kFlashMlaV5Slots> latents;
  Array<Bytes<kBoxBytes>, (kFlashMlaV5Slots + 1) / 2> rope;  // of an even and an odd slot
  Messages messages[2];                                      // [warpgroup]
  Barriers<kFlashMlaV5Slots> full, empty;
  Barrier queries_full, queries_empty;
  // [slot][producing warp]: bit r says whether token 8 warp + r is there.
  alignas(16) unsigned short present[kFlashMlaV5Slots][8];
  alignas(16) float2 powers[kFlashMlaV5Slots][kTile];  // [slot][token]: the power of two times scale_log2, and its logarithm
  float inverse[kFlashMlaV5Slots][kTile];  // [slot][token]: of the power
  Array<Bytes<kTile * 16>, kFlashMlaV5Slots> scales;   // [slot][token], fp32
  latent::CutItems cut;
};
static_assert(sizeof(HalvesShared) <= kFlashMlaV5SharedBytes && kFlashMlaV5SharedBytes <= kMaxSharedBytes);

// How partial outputs lie: [slot][block of the cluster][16 columns][warpgroup][thread].
struct RowsOfCluster {
  static constexpr int kRows = kFlashMlaV5Rows, kNextRow = 8, kPeriod = 8, kPieceStep = 128, kLoads = 16;
  static __device__ __forceinline__ int row(int chunk, int lane) { return (chunk & 7) * 16 + (lane >> 2); }
  static __device__ __forceinline__ int piece(int chunk) { return chunk >> 7; }  // the block of the cluster

  struct Output {
    u32 *first, *second;  // of column 2 (lane % 4) of the two rows; null behind the end of the request

    __device__ __forceinline__ Output(const LatentArguments& with, const WorkItem& item, int chunk,
                                      const latent::RowSums& sums) {
      const int at = item.row_tile * kRows + row(chunk, lane_id()), rows = item.queries * with.heads;
      const bool writes_lse = chunk < kPeriod && (lane_id() & 3) == 0;
      const float2 lse = sums.lse(with.lse_unit, with.empty_lse);
      auto place = [&](int at, float lse) -> u32* {
        if (at >= rows) return nullptr;
        if (writes_lse) with.lse[with.lse_rows.offset(item.request, item.first_row, at)] = lse;
        return reinterpret_cast<u32*>(static_cast<unsigned short*>(with.o) +
                                      with.o_rows.offset(item.request, item.first_row, at) + 2 * (lane_id() & 3));
      };
      first = place(at, lse.x);
      second = place(at + kNextRow, lse.y);
    }
    template <DType dtype>
    __device__ __forceinline__ void write(int chunk, const latent::TwoRows& x) const {
      const int column = (chunk >> 3) * 16;
      auto write = [&](u32* row, float4 y) {
        if (!row) return;
        row[column / 2] = pack<dtype>(y.x, y.y);
        row[column / 2 + 4] = pack<dtype>(y.z, y.w);
      };
      write(first, x.first);
      write(second, x.second);
    }
  };
};

// The items of this cluster. Each role reads the address itself: else it would be spilled.
__device__ __forceinline__ const WorkItem* own_work(const LatentArguments& with) {
  return with.work + static_cast<long long>(blockIdx.x / kFlashMlaV5Blocks) * with.rounds;
}

// Of a consumer. The merge has those from 5 on.
enum HalvesBarrier { kOwnRows = 1 };  // and the one after it

// One consumer.
template <auto problem>
struct HalvesConsumer {
  static constexpr DType dtype = DType::float16;  // of the products, but for RoPE

  HalvesShared& shared;
  const LatentArguments& with;
  const int group;  // which of the two
  const u32 rank;   // of the block in its cluster
  const u32 there;  // from an address in this block to the same place in the other one
  Messages& messages;

  float o[128];                  // (64, 256): o[4i], o[4i + 1] columns 8i + 2 (lane % 4) of row r, then of row r + 8
  float p[32];                   // (64, 64) scores over the own columns
  float own[16];                 // (64, 32) scores of the own tokens, then weights
  u32 packed[16];                // (64, 64) weights as the A operand, the own tokens' first
  float2 maximum, sum;           // of rows r and r + 8, of the own tokens
  float2 base;                   // the maxima that o is relative to
  int slot = 0;                  // of the token block at work
  u32 phases = 0;                // bit 0: of the next slot; bit 1: of messages

  __device__ __forceinline__ HalvesConsumer(HalvesShared& shared, const LatentArguments& with, int group)
      : shared(shared),
        with(with),
        group(group),
        rank(uniform(cluster_rank())),
        there(uniform(in_peer(shared.queries) - shared.queries)),
        messages(shared.messages[group]) {}

  static __device__ __forceinline__ int thread() { return thread_id() & 127; }
  static __device__ __forceinline__ int warp() { return thread() >> 5; }
  __device__ __forceinline__ int row() const { return group * kTile + warp() * 16 + (lane_id() >> 2); }
  static __device__ __forceinline__ bool speaks() { return (lane_id() & 3) == 0; }  // for the four that share rows
  static __device__ __forceinline__ u32 of_rows() { return warp() * 128 + (lane_id() >> 2) * 16; }
  static __device__ __forceinline__ int after(int slot) { return slot + 1 == kFlashMlaV5Slots ? 0 : slot + 1; }

  // What the other block will send next.
  static __device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    if (lane_id() == 0) barrier_expect(barrier, bytes);
  }
  __device__ __forceinline__ void expect_all() {
    expect(messages.scores_there[warp()], Messages::kScoresBytes);
    expect(messages.weights_there[warp()], Messages::kWeightsBytes);
    expect(messages.sums_there[warp()], Messages::kSumsBytes);
  }

  // The own rows to fp16, but for RoPE.
  __device__ __forceinline__ void narrow_queries() {
    const u32 from = shared.queries + group * kBoxBytes + thread() * 16;  // a unit of every 2 KB
    constexpr int kUnits = kBoxBytes / kOfThreads;                       // of a box
#pragma unroll 1
    for (int box = 0; box < 4; ++box) {
      uint4 x[kUnits];
#pragma unroll
      for (int i = 0; i < kUnits; ++i) x[i] = load_shared(from + box * kQueryBox + i * kOfThreads);
      const auto halves = [](u32 x) {
        const float2 of = unpack<problem.dtype>(x);
        return pack<dtype>(of.x, of.y);
      };
#pragma unroll
      for (int i = 0; i < kUnits; ++i)
        store_line(from + box * kQueryBox + i * kOfThreads,
                   make_uint4(halves(x[i].x), halves(x[i].y), halves(x[i].z), halves(x[i].w)));
    }
    async_fence();
    named_sync(kOwnRows + group, 128);
  }

  // p = Q Z^T; leaves its products in flight.
  __device__ __forceinline__ void scores(int slot) {
    const u32 q = operand_k_major(shared.queries) + group * kNextBox;
    const u32 keys = operand_k_major(shared.latents[slot]);
    const u32 rope = operand_k_major(shared.rope[slot / 2]) + slot % 2 * 4;
    mma_fence();
#pragma unroll
    for (int i = 0; i < 16; ++i)
      mma<dtype, 64>(p, q + i / 4 * (kQueryBox >> 4) + i % 4 * 2, keys + i / 4 * kNextBox + i % 4 * 2, i != 0);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      mma<problem.dtype, 64>(p, q + 4 * (kQueryBox >> 4) + rank * 4 + i * 2, rope + i * 2, 1);
    mma_commit();
  }
  __device__ __forceinline__ void wait_until_loaded(int slot) { barrier_wait(shared.full[slot], phases & 1); }

  // The other block's part of p; keeps the own one.
  __device__ __forceinline__ void send_scores() {
    const u32 to = messages.scores + thread() * 16 + there, barrier = messages.scores_there[warp()] + there;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const x = p + 16 + 4 * i;
      send(to + i * kOfThreads, __float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
           __float_as_uint(x[3]), barrier);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) own[i] = p[i];
  }
  __device__ __forceinline__ void add_scores() {
    const u32 barrier = messages.scores_there[warp()], from = messages.scores + thread() * 16;
    wait_for_peer(barrier, phases >> 1);
    expect(barrier, Messages::kScoresBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 x = load_shared(from + i * kOfThreads);
      own[4 * i] += __uint_as_float(x.x);
      own[4 * i + 1] += __uint_as_float(x.y);
      own[4 * i + 2] += __uint_as_float(x.z);
      own[4 * i + 3] += __uint_as_float(x.w);
    }
  }

  // Scores of tokens that are not there.
  __device__ __forceinline__ void mask_absent(int slot) {
    const volatile u32* const two = reinterpret_cast<const volatile u32*>(shared.present[slot]);  // warps each
    const u32 all = __byte_perm(two[0], two[1], 0x6420);
    if (all == ~0u) return;
    const u32 seen = all >> 2 * (lane_id() & 3);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(seen >> 8 * i & 1)) own[4 * i] = own[4 * i + 2] = -kInfinity;
      if (!(seen >> 8 * i & 2)) own[4 * i + 1] = own[4 * i + 3] = -kInfinity;
    }
  }

  // Weights of the own tokens, times their powers of two, against the running maxima of those products; sends them.
  __device__ __forceinline__ void softmax(int slot) {
    const int lane = lane_id() & 3;  // has tokens 8 i + 2 lane and the one after it
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 x = load_shared(shared_address(&shared.powers[slot][8 * i + 2 * lane]));
      const float2 by = {__uint_as_float(x.x), __uint_as_float(x.z)}, more = {__uint_as_float(x.y), __uint_as_float(x.w)};
      own[4 * i] = fmaf(own[4 * i], by.x, more.x);
      own[4 * i + 1] = fmaf(own[4 * i + 1], by.y, more.y);
      own[4 * i + 2] = fmaf(own[4 * i + 2], by.x, more.x);
      own[4 * i + 3] = fmaf(own[4 * i + 3], by.y, more.y);
    }
    const float2 largest = largest_scores<16>(own);
    if (__any_sync(~0u, largest.x - maximum.x > kRescaleThreshold || largest.y - maximum.y > kRescaleThreshold)) {
      const float2 by = raise_maxima(maximum, largest, 1.0f);
      sum = {sum.x * by.x, sum.y * by.y};
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) own[i] = exp2_fast(own[i] - (i & 2 ? maximum.y : maximum.x));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 inverse = *reinterpret_cast<const float2*>(&shared.inverse[slot][8 * i + 2 * lane]);
      sum.x = fmaf(own[4 * i], inverse.x, fmaf(own[4 * i + 1], inverse.y, sum.x));
      sum.y = fmaf(own[4 * i + 2], inverse.x, fmaf(own[4 * i + 3], inverse.y, sum.y));
    }
    const u32 to = messages.weights + thread() * 16 + there, barrier = messages.weights_there[warp()] + there;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) packed[4 * i + j] = pack<dtype>(own[8 * i + 2 * j], own[8 * i + 2 * j + 1]);
      send(to + i * kOfThreads, packed[4 * i], packed[4 * i + 1], packed[4 * i + 2], packed[4 * i + 3], barrier);
    }
    if (speaks())
      send(messages.maxima + of_rows() + there, __float_as_uint(maximum.x), __float_as_uint(maximum.y), 0, 0, barrier);
  }

  // Weights that are relative to a lower maximum.
  __device__ __forceinline__ void scale_weights(u32* of, float2 by) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 x = unpack<dtype>(of[i]);
      const float factor = i & 1 ? by.y : by.x;
      of[i] = pack<dtype>(x.x * factor, x.y * factor);
    }
  }
  __device__ __forceinline__ void receive_weights() {
    const u32 barrier = messages.weights_there[warp()], from = messages.weights + thread() * 16;
    wait_for_peer(barrier, phases >> 1);
    expect(barrier, Messages::kWeightsBytes);
    phases ^= 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 x = load_shared(from + i * kOfThreads);
      packed[8 + 4 * i] = x.x;
      packed[9 + 4 * i] = x.y;
      packed[10 + 4 * i] = x.z;
      packed[11 + 4 * i] = x.w;
    }
    const uint4 x = load_shared(messages.maxima + of_rows());
    const float2 other = {__uint_as_float(x.x), __uint_as_float(x.y)};
    if (__any_sync(~0u, other.x != base.x || other.y != base.y || maximum.x != base.x || maximum.y != base.y)) {
      const float2 top = {fmaxf(maximum.x, other.x), fmaxf(maximum.y, other.y)};
      const auto to_top = [&](float2 x) { return float2{rescale_factor(x.x, top.x), rescale_factor(x.y, top.y)}; };
      rescale_rows<128>(o, to_top(base));
      scale_weights(packed + 8, to_top(other));
      const float2 by = to_top(maximum);
      scale_weights(packed, by);
      sum = {sum.x * by.x, sum.y * by.y};
      maximum = base = top;
    }
  }

  // O += P Z. Frees the token block.
  __device__ __forceinline__ void values(int slot) {
    const u32 of = operand_mn_major(shared.latents[slot]);
    pin<128>(o);
    mma_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        mma<dtype, 128, Major::mn>(o + 64 * half, packed + 4 * i, of + 128 * i + half * 2 * kNextBox, 1);
    }
    mma_commit();
    mma_wait<0>();
    pin<128>(o);
    __syncwarp();  // one lane says that all have read what is told of the tokens
    warp_arrive(shared.empty[slot]);
  }

  __device__ __forceinline__ void attend() {
    WorkItem item = *own_work(with);
#pragma unroll 1
    for (int number = 0;;) {  // of the item; an address would need more registers
      const int begin = uniform(item.begin), end = uniform(item.end), tokens = uniform(item.tokens);
      if (begin == end) break;
      const int tile_row = uniform(item.row_tile) * kFlashMlaV5Rows, queries = uniform(item.queries);
      const int rows = queries * with.heads - tile_row;  // from the tile's first row on
      const latent::SeenTokens<problem> seen(with, item, queries, tokens);
      maximum = base = {latent::first_maximum(row(), rows), latent::first_maximum(row() + 8, rows)};
      sum = {};
#pragma unroll
      for (int i = 0; i < 128; ++i) o[i] = 0.0f;

      // Of the tokens of a block that are the own ones: what is not there, and what rows do not see.
      auto mask = [&](int slot, int block) {
        if (problem.causal && (block + 1) * kTile > seen.by_all) {
          const auto seen_by = [&](int row) {
            const int query = (tile_row + row) / with.heads;
            if constexpr (problem.shards) return with.shards.count(seen.whole - seen.masked + 1 + query);
            return seen.by_all + query;
          };
          const int first = block * kTile + rank * kHalf + 2 * (lane_id() & 3);
          mask_rows<16>(own, {seen_by(row()) - first, seen_by(row() + 8) - first});
        }
        mask_absent(slot);
      };
      auto begin_block = [&](int slot) {
        wait_until_loaded(slot);
        phases ^= after(slot) == 0;
        scores(slot);
      };
      auto end_scores = [&] {
        mma_wait<0>();
        pin<32>(p);
      };
      auto weigh = [&](int slot, int block) {
        add_scores();
        mask(slot, block);
        softmax(slot);
      };

      barrier_wait(shared.queries_full, number & 1);
      narrow_queries();
      begin_block(slot);
      end_scores();
      send_scores();
#pragma unroll 1
      for (int block = begin; block + 1 < end; ++block) {
        const int next = uniform(after(slot));
        begin_block(next);
        weigh(slot, block);
        end_scores();
        receive_weights();
        send_scores();
        values(slot);
        slot = next;
      }
      warp_arrive(shared.queries_empty);
      weigh(slot, end - 1);
      receive_weights();
      values(slot);
      slot = after(slot);

      finish(number);
      item = own_work(with)[++number];
    }
  }

  // The end of an item: outputs, or a part of them.
  __device__ __forceinline__ void finish(int number) {
    const WorkItem item = own_work(with)[number];  // read again: else it would be kept all the time
    sum = sum_of_rows(sum);
    const u32 barrier = messages.sums_there[warp()];
    if (speaks())
      send(messages.sums + of_rows() + there, __float_as_uint(sum.x), __float_as_uint(sum.y), 0, 0, barrier + there);
    const int request = item.request, first_row = item.first_row, part = uniform(item.slot),
              tile_row = item.row_tile * kFlashMlaV5Rows, rows = item.queries * with.heads - tile_row;
    wait_for_peer(barrier, number & 1);
    expect(barrier, Messages::kSumsBytes);
    const uint4 x = load_shared(messages.sums + of_rows());
    sum = {sum.x + __uint_as_float(x.x), sum.y + __uint_as_float(x.y)};
    const auto inverse_of = [&](float sum, float maximum, int row) {
      const float divisor = latent::divisor_of(with, part, tile_row + row, maximum, sum);
      return divisor == 0.0f ? 0.0f : 1.0f / divisor;
    };
    float2 inverse = {inverse_of(sum.x, maximum.x, row()), inverse_of(sum.y, maximum.y, row() + 8)};
    if (rank == 0 && speaks()) {
      constexpr int kRows = kFlashMlaV5Rows;
      latent::store_lse<kRows>(with, request, first_row, tile_row, rows, part, row(), log_sum(maximum.x, sum.x), sum.x);
      latent::store_lse<kRows>(with, request, first_row, tile_row, rows, part, row() + 8, log_sum(maximum.y, sum.y),
                               sum.y);
    }
    if (part < 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = row() + 8 * half;
        unsigned short* const to = static_cast<unsigned short*>(with.o) + rank * 256 +
                                   with.o_rows.offset(request, first_row, tile_row + min(at, rows - 1));
#pragma unroll
        for (int columns = 0; columns < 2; ++columns)
          store_row<problem.dtype>(to + columns * 128, o + 64 * columns, half, half ? inverse.y : inverse.x, at < rows);
      }
      return;
    }
    const float2 largest = largest_of_rows<128>(o);
    constexpr int kFloats = kFlashMlaV5Rows * part_row_floats(kFlashMlaV5Rows);
    float* const loads =
        with.lse_part + part * static_cast<long long>(kFloats) + (1 + rank) * kFlashMlaV5Rows + row();
    const float2 store = latent::scale_part<8>({largest.x * inverse.x, largest.y * inverse.y}, loads, speaks());
    inverse = {inverse.x * store.x, inverse.y * store.y};
    uint4* const out = static_cast<uint4*>(with.o_part) + part * (kFlashMlaV5Rows * 64LL) + rank * 4096 + group * 128 +
                       thread();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      constexpr DType of = DType::float16;
      const float* const x = o + 8 * i;
      out[i * 256] = make_uint4(pack<of>(x[0] * inverse.x, x[1] * inverse.x), pack<of>(x[2] * inverse.y, x[3] * inverse.y),
                                pack<of>(x[4] * inverse.x, x[5] * inverse.x), pack<of>(x[6] * inverse.y, x[7] * inverse.y));
    }
  }
};

// The producers: a warp 8 tokens of each block. An entry of the table that names no row of the pool is no token: its
// place is zeroed, and the consumers hide its scores.
//
// A lane copies and widens 16 columns, a unit of 16 bytes, of tokens 2 i + upper() of the warp's. It comes to the upper
// half of the token's place, and becomes two units. Of eight lanes, which share two tokens, no two meet in a bank.
template <auto problem>
struct HalvesProducer {
  HalvesShared& shared;
  const LatentArguments& with;
  const u32 rank = cluster_rank();

  __device__ __forceinline__ HalvesProducer(HalvesShared& shared, const LatentArguments& with)
      : shared(shared), with(with) {}

  static __device__ __forceinline__ u32 warp() { return (thread_id() >> 5) & 7; }
  static __device__ __forceinline__ u32 token_row() { return warp() * 8 + (lane_id() & 7); }
  static __device__ __forceinline__ u32 unit() { return (lane_id() & 3) | lane_id() >> 3 << 2; }
  static __device__ __forceinline__ u32 upper() { return lane_id() >> 2 & 1; }
  // Of the first of the lane's tokens, and from there of its i-th, unit `u` further on.
  __device__ __forceinline__ u32 first_place(int slot, u32 box, u32 u) const {
    return shared.latents[slot] + box * kBoxBytes + swizzled(warp() * 8 + upper(), u);
  }
  static __device__ __forceinline__ u32 place_of(u32 first, u32 i, u32 u = 0) {
    return (first ^ (2 * i ^ u) << 4) + i * 256;
  }
  __device__ __forceinline__ u32 narrow(int slot) const {
    return first_place(slot, 2 + (unit() >> 3), (unit() & 7) ^ upper() << 2);
  }
  __device__ __forceinline__ u32 wide(int slot) const { return first_place(slot, unit() >> 2, (unit() & 3) * 2); }
  // Of RoPE it has 8 columns of token lane / 4.
  __device__ __forceinline__ u32 rope(int slot) const {
    return shared.rope[slot / 2] + swizzled(warp() * 8 + lane_id() / 4, slot % 2 * 4 + (lane_id() & 3));
  }
  __device__ __forceinline__ u32 scales(int slot) const { return shared.scales[slot] + token_row() * 16; }

  // Starts the copies of tokens to a slot; place: of token lane % 8, -1: none.
  __device__ __forceinline__ void copy(int slot, int place) {
    const u32 present = __ballot_sync(~0u, place >= 0) & 0xff;
    if (lane_id() == 0)
      *const_cast<volatile unsigned short*>(&shared.present[slot][warp()]) = static_cast<unsigned short>(present);
    const auto copy_from = [&](u32 to, int of, u32 byte) {
      const unsigned char* const first = static_cast<const unsigned char*>(with.z) + byte;
      const u32 token = max(of, 0);
      copy_ahead_or_zero(to, first + static_cast<u64>(token) * static_cast<u32>(with.z_stride), of >= 0);
    };
    const u32 to = narrow(slot);
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
      copy_from(place_of(to, i), __shfl_sync(~0u, place, 2 * i + upper()), rank * 256 + unit() * 16);
    copy_from(rope(slot), __shfl_sync(~0u, place, lane_id() / 4), latent::kRopeAt + rank * 64 + (lane_id() & 3) * 16);
    if (lane_id() < 8) copy_from(scales(slot), place, latent::kScalesAt);
    close_copies();
  }

  // What was copied becomes what is multiplied.
  __device__ __forceinline__ void widen(int slot) {
    const uint4 all = load_shared(scales(slot));
    constexpr u32 kPower = 0x7f800000;  // not below 2^-63, so that RoPE stays finite
    const u32 largest =
        max(max(max(all.x & kPower, all.y & kPower), max(all.z & kPower, all.w & kPower)), 64u << 23);
    const float inverse = __uint_as_float((254u << 23) - largest);
    // Of token lane % 8: what is left of the two scales, in fp16; the power's inverse, twice in bf16.
    const u32 left = pack<DType::float16>(__uint_as_float(rank ? all.z : all.x) * inverse,
                                          __uint_as_float(rank ? all.w : all.y) * inverse);
    const u32 of_token = pack<DType::bfloat16>(inverse, inverse);
    if (lane_id() < 8) {
      shared.powers[slot][token_row()] = {__uint_as_float(largest) * with.scale_log2,
                                          static_cast<float>(static_cast<int>(largest >> 23) - 127)};
      shared.inverse[slot][token_row()] = inverse;
    }
    {
      const u32 by = __shfl_sync(~0u, of_token, lane_id() / 4);
      const uint4 x = load_shared(rope(slot));
      store_line(rope(slot), make_uint4(multiply_bfloats(x.x, by), multiply_bfloats(x.y, by), multiply_bfloats(x.z, by),
                                        multiply_bfloats(x.w, by)));
    }
    const u32 from = narrow(slot), to = wide(slot);
    constexpr u32 kAtOnce = 2;
#pragma unroll
    for (u32 begin = 0; begin < 4; begin += kAtOnce) {
      uint4 latents[kAtOnce];
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) latents[i] = load_shared(place_of(from, begin + i));
      __syncwarp();  // all have read what is overwritten
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        const u32 by = __byte_perm(__shfl_sync(~0u, left, 2 * (begin + i) + upper()), 0, unit() < 8 ? 0x1010 : 0x3232);
        const auto widened = [&](u32 low, u32 high) {
          const uint2 a = halves_of_e4m3(low), b = halves_of_e4m3(high);
          return make_uint4(multiply_halves(a.x, by), multiply_halves(a.y, by), multiply_halves(b.x, by),
                            multiply_halves(b.y, by));
        };
        store_line(place_of(to, begin + i), widened(latents[i].x, latents[i].y));
        store_line(place_of(to, begin + i, 1), widened(latents[i].z, latents[i].w));
      }
    }
    async_fence();
    barrier_arrive(shared.full[slot]);
  }

  __device__ __forceinline__ void run() {
    int number = 0;  // of the next block's item; an address would need more registers
    int block, end, entry;
    const auto item = [&] { return own_work(with) + number; };
    const auto token = [&] { return block * kTile + static_cast<int>(token_row() ^ (rank * kHalf)); };
    const auto begin_item = [&] {
      block = item()->begin;
      end = item()->end;
    };
    const auto read_entry = [&] {
      const int* __restrict__ table =
          with.block_table + static_cast<u64>(static_cast<u32>(item()->request)) * static_cast<u32>(with.table_width);
      entry = -1;
      if (token() < item()->tokens) entry = table[with.page.divide(token())];
    };
    // Of the block whose entry was read, which becomes the one after it. No page at -1 has a token.
    const auto next_place = [&] {
      const int place = with.place_of(entry * with.page_places + token() - with.page.divide(token()) * with.page.by);
      if (++block == end) {
        ++number;
        begin_item();
      }
      if (block != end) read_entry();
      return place;
    };
    begin_item();
    if (block == end) return;
    int slot = 0, queries_of = 0;  // of the next copies; the item of the queries that come next
    u32 phase = 1;
    const auto copy_next = [&] {
      copy(slot, next_place());
      slot = slot + 1 == kFlashMlaV5Slots ? 0 : slot + 1;
      phase ^= slot == 0;
    };
    read_entry();
    load_queries(queries_of++);
    copy_next();
#pragma unroll 1
    for (int at = 0, more = 1; more;) {  // at: the slot to widen
      // The next copies begin before or behind the widening of this block: a slot may be free later than its consumers
      // wait for this one.
      const int of = number;
      more = block != end;
      bool copied = false;
      if (more) {
        copied = __all_sync(~0u, barrier_test(shared.empty[slot], phase));
        if (copied) copy_next();
      }
      if (copied)
        wait_for_groups<1>();
      else
        wait_for_groups<0>();
      __syncwarp();  // a lane's scales are copied by another one
      widen(at);
      at = at + 1 == kFlashMlaV5Slots ? 0 : at + 1;
      if (more && !copied) {
        barrier_wait(shared.empty[slot], phase);
        copy_next();
      }
      // Behind the last block of the item before, without which the consumers would not free its queries.
      if (more && of == queries_of) load_queries(queries_of++);
    }
  }

  // The own columns of those of an item, by one thread.
  __device__ __forceinline__ void load_queries(int number) const {
    if (warp() == 0 && lane_id() == 0) {
      barrier_wait(shared.queries_empty, (number & 1) ^ 1);
      const latent::QueryPlace at(with, own_work(with)[number], kFlashMlaV5Rows);
      const u32 to = shared.queries, full = shared.queries_full;
      barrier_expect(full, 5 * kQueryBox);
#pragma unroll
      for (int group = 0; group < 4; ++group)
        tma_load(to + group * kQueryBox, with.qc_map, at.inner, at.outer, rank * 4 + group, full);
      tma_load(to + 4 * kQueryBox, with.qpe_map, at.inner, at.outer, 0, full);
    }
    __syncwarp();
  }
};

// Query boxes: 128 rows and 1 group of qc_map and of qpe_map. The maps of the cache are not used.
template <LatentProblem problem, FlashMlaV5Tiling>
__global__ void __launch_bounds__(kFlashMlaV5Threads, 1) flash_mla_v5(const __grid_constant__ LatentArguments with) {
  static_assert(problem.k == 512 && problem.p == 64, "the layouts are made for 512 latent and 64 RoPE columns");
  static_assert(problem.fp8 == 656 && problem.page == 1 && problem.dtype == DType::bfloat16,
                "tokens of fp8 with four scales are gathered");
  static_assert(problem.tokens_first && !problem.after, "what the masks are made for");
  extern __shared__ __align__(1024) unsigned char dynamic[];
  HalvesShared& shared = *reinterpret_cast<HalvesShared*>(dynamic);
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 7), 0);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kFlashMlaV5Slots; ++slot) {
      barrier_init(shared.full[slot], 256);
      barrier_init(shared.empty[slot], 8);
    }
    for (Messages& messages : shared.messages) {
      for (int warp = 0; warp < 4; ++warp) {
        barrier_init(messages.scores_there[warp], 1);
        barrier_init(messages.weights_there[warp], 1);
        barrier_init(messages.sums_there[warp], 1);
      }
    }
    barrier_init(shared.queries_full, 1);
    barrier_init(shared.queries_empty, 8);
    barrier_init_done();
  }
  if (threadIdx.x == 256) {
    tma_prefetch_map(with.qc_map);
    tma_prefetch_map(with.qpe_map);
  }
  cluster_sync();
  wait_for_previous();  // if launched programmatically, all before this ran beside the end of the previous kernel
  launch_next();
  if (role >= 2) {
    give_registers<48>();
    HalvesProducer<problem>(shared, with).run();
    if (threadIdx.x / 32 == 11) latent::collect_ahead(shared.cut, own_work(with), with);  // block 1 makes no use of it
    cluster_sync();
    return;
  }
  take_registers<208>();
  HalvesConsumer<problem> consumer(shared, with, uniform(role));
  consumer.expect_all();
  consumer.attend();
  cluster_sync();  // all outputs of the cluster are written, and no message is on its way
  if (cluster_rank() != 0) return;
  static_assert(sizeof(latent::MergeScratch) <= sizeof(shared.latents));
  latent::merge_tiles<problem.dtype, RowsOfCluster>(
      with, own_work(with), shared.cut, *reinterpret_cast<latent::MergeScratch*>(shared.latents.elements[0].bytes));
}

}  // namespace hypermla::cute
