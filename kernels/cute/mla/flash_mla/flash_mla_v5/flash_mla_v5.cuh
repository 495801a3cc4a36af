// FlashMLA for Hopper over tokens in FP8 and queries in bfloat16, by clusters of two thread blocks. Each block has half
// of the latent columns: it widens its half of every token once, for 128 rows. As in flash_mla_v3 rows are on N, tokens
// are widened in registers, and scores have a warpgroup of their own.
//
// Rows: all heads share the latents, so the queries of a request are rows of one matrix, all heads' (LatentArguments).
// A cluster takes work items (latent/work.h): 128 rows against a range of token blocks of 64. Block c of the cluster has
// columns 256 c .. 256 c + 255 of latents and outputs, and columns 32 c .. 32 c + 31 of RoPE. Rows 64 c .. 64 c + 63 are
// its own ones: it makes their weights.
//
// Roles (512 threads):
//   warpgroups 0, 1   values: 128 columns of the output each
//   warpgroup 2       producer: copies tokens, and one of its threads queries
//   warpgroup 3       scores of all rows over the block's columns, and weights of its own rows
//
// A token block, for the scores: S^T (64 tokens, 128 rows) over the own columns is but a part. The part of the other
// block's rows is sent to it; to that of the own rows what the other one sends is added one token block later, when it
// has arrived. The softmax follows in steps, each beside a product of the next scores (tiling.beside), and the weights
// go to the values of both blocks: O^T (256 columns, 128 rows) += Z^T P^T. Maxima, factors and sums of a row are known
// to the block whose row it is; factors go with the weights, and at the end of an item what outputs are multiplied by.
//
// What was sent is overwritten only when it was read. Scores have two places: whoever sends those of a token block has
// got the weights of two blocks before, and these were made of the scores that lay there. Weights have one place or two
// (tiling.weights), and barriers at which the values of both blocks say that they are read.
//
// Tokens of 656 bytes and what becomes of their scales: flash_mla_v3.cuh. Here a line of shared memory has 256 e4m3, 32
// bf16 of RoPE and the four scales of a token, which is such that neither 8 tokens at one column nor 2 tokens at 4 units
// meet in a bank.
//
// grid = 2 blocks a worker, by the work list; 512 threads, clusters of 2. Each block merges the columns that it wrote.
#pragma once

#include "flash_mla_v5.h"
#include "hopper/cluster.h"
#include "hopper/constants.h"
#include "hopper/copies.h"
#include "hopper/e4m3.h"
#include "hopper/fragments.h"
#include "hopper/gather.h"
#include "hopper/mbarrier.h"
#include "hopper/rows.h"
#include "hopper/tma.h"
#include "hopper/warpgroup.h"
#include "hopper/widened.h"
#include "latent/arguments.h"
#include "latent/copy_tokens.cuh"
#include "latent/item_rows.cuh"
#include "latent/load_queries.cuh"
#include "latent/merge_tiles.cuh"
#include "latent/rows_on_n_pairs.cuh"
#include "latent/start.cuh"

namespace hypermla::cute {

// What becomes of the rows of a block when their maxima rise.
struct alignas(16) Raise {
  float2 factors[32];  // [pair of rows]: of sums and outputs
  int raised, padding[3];
};

template <int kWeights>
struct HalvesShared {
  static constexpr int kRows = kFlashMlaV5Rows, kOwn = kRows / 2;
  static constexpr u32 kBox = kRows * 128;  // bytes of 64 columns of all rows
  static constexpr u32 kLine = 336, kRopeAt = 256, kScalesAt = 320;
  static constexpr int kHalves = kWeights == 2 ? 7 : 8;

  Bytes<5 * kBox> queries;  // 4 boxes of latents, one of RoPE whose lines are half empty
  Array<Bytes<kBox>, kWeights> weights;
  Array<Bytes<kBox>, 2> inbox;                      // [of every second block][4 registers][thread]: scores
  Array<Bytes<kTile / 2 * kLine>, kHalves> tokens;  // a half block each
  Barriers<kHalves> full, empty;
  Barriers<2> scores_there, scored;  // of every second block
  Barriers<kWeights> weights_full, weights_empty;
  Barrier queries_full, queries_empty;
  Barriers<2> inverse_full, inverse_empty;  // of every second item
  u32 present[kHalves][2];                  // [half block][16 tokens]: bit r says whether token r is there
  // Of every fourth block. Scales over their token's power of two, as in flash_mla_v3: [block][128 columns][token]. And
  // the inverses of the powers, in the same order.
  alignas(16) unsigned short scales[4][2][kTile];
  float inverses[4][kTile];
  Raise raise[4][2];             // [of every fourth block][block of the cluster]
  float2 maxima[kOwn / 2];       // [pair of own rows]
  float2 of_warps[4][kOwn / 2];  // [warp of the scores][pair of own rows]: candidates for maxima; sums of weights
  alignas(16) u32 powers[4];     // [warp of the scores]: the largest of the item's powers of two, as bits
  alignas(16) float inverse[2][kRows];  // [item][row]: what outputs are multiplied by
  latent::CutItems cut;
};

// The merge has those from 5 on.
enum HalvesBarrier { kHalvesScores = 1, kHalvesVote = 2 };

template <auto problem, int kWeights>
struct HalvesFragments {
  using Layout = HalvesShared<kWeights>;
  static constexpr int kRows = Layout::kRows, kOwn = Layout::kOwn, kLine = Layout::kLine;

  Layout& shared;
  const LatentArguments& with;
  const u32 to_peer;  // from an address in this block to the same place in the other one

  __device__ __forceinline__ HalvesFragments(Layout& shared, const LatentArguments& with)
      : shared(shared), with(with), to_peer(uniform(in_peer(shared.queries) - shared.queries)) {}

  static __device__ __forceinline__ int thread() { return thread_id() & 127; }
  static __device__ __forceinline__ int warp() { return thread() >> 5; }
  static __device__ __forceinline__ int group() { return lane_id() >> 2; }  // of four lanes
  static __device__ __forceinline__ int in_group() { return lane_id() & 3; }
  // The half block behind one.
  static __device__ __forceinline__ int after(int half) { return half + 1 == Layout::kHalves ? 0 : half + 1; }
  __device__ __forceinline__ u32 there(u32 address) const { return address + to_peer; }
};

// The warpgroup of the scores; beside: steps of a softmax that are taken beside the next products; rank: of the block in
// its cluster.
template <auto problem, int kWeights, int beside, int rank>
struct HalvesScores : HalvesFragments<problem, kWeights> {
  using Base = HalvesFragments<problem, kWeights>;
  using Base::after, Base::there;
  using Base::kLine, Base::kRows, Base::kOwn, Base::shared, Base::with;
  using typename Base::Layout;

  const int self = thread_id() & 127;
  __device__ __forceinline__ int thread() const { return self; }
  __device__ __forceinline__ int warp() const { return self >> 5; }
  __device__ __forceinline__ int lane() const { return self & 31; }
  __device__ __forceinline__ int group() const { return lane() >> 2; }
  __device__ __forceinline__ int in_group() const { return self & 3; }

  float p[kRows / 2];     // S^T (64, 128) over the own columns
  float own[kOwn / 2];    // of the own rows, of the block before; then weights
  u32 a[2][4];            // tokens of the products in flight
  u32 power = 0;          // the largest of the item's powers, as bits
  float2 sums[kOwn / 8];  // of the weights of the thread's tokens, by pairs of rows

  __device__ __forceinline__ HalvesScores(Layout& shared, const LatentArguments& with) : Base(shared, with) {}

  // Fragments of own rows are of rows 8 i + 2 in_group() and the one after it: pair 4 i + in_group().
  __device__ __forceinline__ float2& own_sum() { return shared.of_warps[warp()][group() * 4 + in_group()]; }

  // Queries from the order in which they are loaded to that of the products, as in flash_mla_v3. In fp16, but for RoPE
  // in bf16, of which the own columns come to the begin of the line.
  __device__ __forceinline__ void place_queries() {
    const int thread = this->thread();
    auto word = [&](int box, int row, int byte) {
      return *reinterpret_cast<const u32*>(shared.queries.bytes + box * Layout::kBox + swizzled(row, byte >> 4) +
                                           (byte & 15));
    };
    auto halves = [](u32 x) {
      const float2 of = unpack<DType::bfloat16>(x);
      return pack<DType::float16>(of.x, of.y);
    };
    constexpr int kAtOnce = 8;  // so that the loads of many are on their way together
#pragma unroll 1
    for (int first = thread >> 4; first < 2 * kRows; first += 8 * kAtOnce) {  // 128 columns of a row, by 16 threads
      const int part = thread & 15, h = part >> 3, s = part >> 1 & 3, b = part & 1;
      u32 x[kAtOnce][4];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int row = (first + 8 * n) >> 1, box = 2 * (first & 1);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int unit = 2 * j + h;  // of 16 columns
          x[n][j] = halves(word(box + (unit >> 2), row, (unit & 3) * 32 + s * 8 + b * 4));
        }
      }
      __syncwarp();
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int row = (first + 8 * n) >> 1, box = 2 * (first & 1);
        store_line(shared.queries + (box + h) * Layout::kBox + swizzled(row, 2 * s + b),
                   make_uint4(x[n][0], x[n][1], x[n][2], x[n][3]));
      }
    }
#pragma unroll 1
    for (int i = thread >> 2; i < kRows; i += 32) {  // RoPE
      const int part = thread & 3;
      u32 x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = word(4, i, rank * 64 + j * 16 + (part >> 1) * 8 + (part & 1) * 4);
      __syncwarp();
      store_line(shared.queries + 4 * Layout::kBox + swizzled(i, part), make_uint4(x[0], x[1], x[2], x[3]));
    }
    async_fence();
    named_sync(kHalvesScores, 128);
  }

  // A product: p += A B, B that many products into the queries.
  template <DType dtype>
  __device__ __forceinline__ void multiply_queries(const u32 (&a)[4], int product, bool begin) {
    mma_fence();
    mma_few<dtype, kRows>(p, a, operand_k_major(shared.queries) + product / 4 * (Layout::kBox >> 4) + product % 4 * 2,
                          !begin);
    mma_commit();
  }

  // What is left of a scale, twice in fp16.
  static __device__ __forceinline__ u32 left_of(u32 scale, float inverse) {
    const float left = __uint_as_float(scale) * inverse;
    return pack<DType::float16>(left, left);
  }

  // Where what is told of the thread's first token lies among that of a block's; the other's is 2 on.
  __device__ __forceinline__ int told_at() const {
    return warp() / 2 * 32 + group() / 2 * 8 + warp() % 2 * 4 + group() % 2;
  }

  // The part of a block's scores to p. step(k) is done while product k is made; the last products are in flight when it
  // returns.
  template <class Step>
  __device__ __forceinline__ void score(int half, int number, const Step& step) {
    const u32 line = shared.tokens[half] + ((warp() & 1) * 16 + group()) * kLine;
    const int j = in_group();
    const u32 units = line + 2 * j * 16;
    uint4 low, high;  // 16 bytes of the thread's two tokens
    auto load = [&](u32 from) {
      low = load_shared(from);
      high = load_shared(from + 8 * kLine);
    };
    load(line + j * 16 + Layout::kRopeAt);
    u32 by[2];  // [token]: the scale of the columns at work, 128 of them, over the token's power of two
    u32 of_token[2];
    unsigned short* const scales = &shared.scales[number & 3][0][told_at()];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 all = load_shared(line + i * 8 * kLine + Layout::kScalesAt);
      constexpr u32 kPower = 0x7f800000;  // not below 2^-63, so that RoPE stays finite
      const u32 largest = max(max(max(all.x & kPower, all.y & kPower), max(all.z & kPower, all.w & kPower)), 64u << 23);
      power = max(power, largest);
      const float inverse = __uint_as_float((254u << 23) - largest);
      of_token[i] = pack<DType::bfloat16>(inverse, inverse);
      by[i] = left_of(rank ? all.z : all.x, inverse);
      // For the values, and for what follows here.
      if (j == 0) {
        scales[2 * i] = static_cast<unsigned short>(by[i]);
        scales[kTile + 2 * i] = static_cast<unsigned short>(left_of(rank ? all.w : all.y, inverse));
        shared.inverses[number & 3][told_at() + 2 * i] = inverse;
      }
    }
    __syncwarp();
    {
      const u32 of[8] = {low.x, high.x, low.y, high.y, low.z, high.z, low.w, high.w};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32(&to)[4] = a[i];
#pragma unroll
        for (int k = 0; k < 4; ++k) to[k] = multiply_bfloats(of[4 * i + k], of_token[k % 2]);
        if (i == 0) forget<kRows / 2>(p);
        multiply_queries<DType::bfloat16>(to, 16 + i, i == 0);
        if (i == 1) load(units);
        step(i);
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {  // 64 columns each
      const u32 words[4][2] = {{low.x, high.x}, {low.y, high.y}, {low.z, high.z}, {low.w, high.w}};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mma_wait<1>();
        u32(&to)[4] = a[i % 2];
#pragma unroll
        for (int token = 0; token < 2; ++token) {
          uint2 wide = halves_of_e4m3(words[i][token]);
          wide = {multiply_halves(wide.x, by[token]), multiply_halves(wide.y, by[token])};
          to[token] = wide.x;
          to[token + 2] = wide.y;
        }
        if (i == 3 && n < 3) load(units + ((n + 1) / 2 * 8 + (n + 1) % 2) * 16);
        if (i == 3 && n == 1) {  // the other 128 columns
#pragma unroll
          for (int token = 0; token < 2; ++token) by[token] = __byte_perm(scales[kTile + 2 * token], 0, 0x1010);
        }
        multiply_queries<DType::float16>(to, 4 * n + i, false);
        step(2 + 4 * n + i);
      }
    }
  }
  __device__ __forceinline__ void end_scores() {
    mma_wait<0>();
    pin<kRows / 2>(p);
  }

  // The part of the other block's rows, to it.
  __device__ __forceinline__ void send_scores(int of) {
    const u32 to = there(shared.inbox[of] + thread() * 16), barrier = there(shared.scores_there[of]);
    const float* const x = p + (rank ? 0 : kOwn / 2);
#pragma unroll
    for (int i = 0; i < kOwn / 8; ++i)
      send(to + i * 2048, __float_as_uint(x[4 * i]), __float_as_uint(x[4 * i + 1]), __float_as_uint(x[4 * i + 2]),
           __float_as_uint(x[4 * i + 3]), barrier);
  }
  // What scores over a token's columns are multiplied by, and what is added to the sum: then weights are times the
  // token's power of two.
  __device__ __forceinline__ float2 unit_of(float inverse) const {
    const u32 exponent = 254 - (__float_as_uint(inverse) >> 23);  // of the power, with its bias
    return {with.scale_log2 * __uint_as_float(exponent << 23), static_cast<float>(static_cast<int>(exponent) - 127)};
  }
  __device__ __forceinline__ void keep_scores(int number) {
    const float* const x = p + (rank ? kOwn / 2 : 0);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float2 unit = unit_of(shared.inverses[number & 3][told_at() + 2 * e]);
#pragma unroll
      for (int i = 0; i < kOwn / 8; ++i) {
        own[4 * i + 2 * e] = fmaf(x[4 * i + 2 * e], unit.x, unit.y);
        own[4 * i + 2 * e + 1] = fmaf(x[4 * i + 2 * e + 1], unit.x, unit.y);
      }
    }
  }
  __device__ __forceinline__ void expect_scores(int of) {
    if (thread() == 0) barrier_expect(shared.scores_there[of], Layout::kBox);
  }
  // The softmax of the block before, in 12 steps, each of which is short enough to be done beside a product: what the
  // other block has of the scores is added, it is looked for scores above their maxima, and the weights are stored. They
  // are times the powers of two of tokens, against the running maxima of those products; the sums are of weights alone.
  static constexpr int kSteps = 12;
  float inverse[2];  // of the powers of two of the thread's two tokens
  int most;          // above a maximum, as bits: these are in the order of numbers from 0 on
  bool unseen;       // whether an own row of the item may have seen no token before the block
  bool raised;       // whether maxima have risen in the block
  template <class Mask>
  __device__ __forceinline__ void weigh(int step, int number, const Mask& mask) {
    if (step == 0) {
      wait_for_peer(shared.scores_there[number & 1], number >> 1 & 1);
      inverse[0] = shared.inverses[number & 3][told_at()];
      inverse[1] = shared.inverses[number & 3][told_at() + 2];
      most = 0;
    }
#pragma unroll
    for (int i = step % 4 * 2; i < step % 4 * 2 + 2; ++i) {
      float* const x = own + 4 * i;
      if (step < 4) {
        const uint4 more = load_shared(shared.inbox[number & 1] + thread() * 16 + i * 2048);
        const float first = unit_of(inverse[0]).x, second = unit_of(inverse[1]).x;
        x[0] = fmaf(__uint_as_float(more.x), first, x[0]);
        x[1] = fmaf(__uint_as_float(more.y), first, x[1]);
        x[2] = fmaf(__uint_as_float(more.z), second, x[2]);
        x[3] = fmaf(__uint_as_float(more.w), second, x[3]);
        continue;
      }
      if (step < 8) {
        const float2 maximum = shared.maxima[4 * i + in_group()];
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] -= e & 1 ? maximum.y : maximum.x;
#pragma unroll
        for (int e = 0; e < 4; e += 2) most = max(max(most, __float_as_int(x[e])), __float_as_int(x[e + 1]));
        continue;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = exp2_fast(x[e]);
      sums[i] = {fmaf(x[2], inverse[1], fmaf(x[0], inverse[0], sums[i].x)),
                 fmaf(x[3], inverse[1], fmaf(x[1], inverse[0], sums[i].y))};
    }
    if (step == 3) {
      expect_scores(number & 1);
      mask();
      raised = unseen;
      if (unseen) raise_maxima<true>(number);
    }
    if (step == 7) {
      if (named_any(kHalvesVote, 128, most > __float_as_int(kRescaleThreshold))) raised |= raise_maxima<false>(number);
      if (thread() == 0) shared.raise[number & 3][rank].raised = raised;
      wait_for_peer(shared.weights_empty[place_of_weights(number)], (number / kWeights & 1) ^ 1);
    }
    if (step >= 8)
      store_rows_on_n<DType::float16, 16>(own_weights(number) + place_of_lane(warp(), lane()) + (step - 8) * 2048,
                                          own + (step - 8) * 8);
  }

  // Raises maxima to the block's scores or, where rows have maxima, to those that are above these by as much as `own`
  // says. What is above a maximum that no score has set would not be known to more than that one's own precision.
  // Returns whether any has risen: it may have been a NaN that looked like it, which is not to change the bits of other
  // rows.
  template <bool of_scores>
  __device__ __forceinline__ bool raise_maxima(int number) {
#pragma unroll
    for (int i = 0; i < kOwn / 8; ++i) {
      const float2 largest =
          largest_of_lanes({fmaxf(own[4 * i], own[4 * i + 2]), fmaxf(own[4 * i + 1], own[4 * i + 3])});
      if (lane() < 4) shared.of_warps[warp()][4 * i + lane()] = largest;
    }
    named_sync(kHalvesScores, 128);
    bool none = false;  // whether a row has no maximum yet
    float2 before = {}, largest = {};
    if (thread() < kOwn / 2) {
      before = shared.maxima[thread()];
      if (of_scores) largest = before;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 other = shared.of_warps[w][thread()];
        largest = {fmaxf(largest.x, other.x), fmaxf(largest.y, other.y)};
      }
    }
    if (!of_scores && !named_any(kHalvesVote, 128, fmaxf(largest.x, largest.y) > kRescaleThreshold)) return false;
    if (thread() < kOwn / 2) {
      const float2 now = of_scores ? largest : float2{before.x + largest.x, before.y + largest.y};
      shared.maxima[thread()] = now;
      shared.raise[number & 3][rank].factors[thread()] = {rescale_factor(before.x, now.x),
                                                          rescale_factor(before.y, now.y)};
      if (!of_scores) shared.of_warps[0][thread()] = {now.x - before.x, now.y - before.y};
      none = now.x == kLeastScore || now.y == kLeastScore;
    }
    if (of_scores)
      unseen = named_any(kHalvesVote, 128, none);
    else
      named_sync(kHalvesScores, 128);
#pragma unroll
    for (int i = 0; i < kOwn / 8; ++i) {
      const float2 by = shared.raise[number & 3][rank].factors[4 * i + in_group()];
      sums[i] = {sums[i].x * by.x, sums[i].y * by.y};
      if (of_scores) continue;
      const float2 rise = shared.of_warps[0][4 * i + in_group()];
#pragma unroll
      for (int e = 0; e < 4; ++e) own[4 * i + e] -= e & 1 ? rise.y : rise.x;
    }
    return true;
  }

  // The sums of the warp's tokens, to shared memory.
  __device__ __forceinline__ void leave_sums() {
    // Of 8 lanes that share rows each keeps a share of them.
#pragma unroll
    for (int step = 16, count = kOwn / 8; step >= 4; step /= 2, count /= 2) {
      const bool upper = lane() & step;
#pragma unroll
      for (int i = 0; i < count / 2; ++i) {
        const float2 kept = upper ? sums[i + count / 2] : sums[i], given = upper ? sums[i] : sums[i + count / 2];
        sums[i] = {kept.x + __shfl_xor_sync(~0u, given.x, step), kept.y + __shfl_xor_sync(~0u, given.y, step)};
      }
    }
    own_sum() = sums[0];
  }

  static __device__ __forceinline__ int place_of_weights(int number) { return kWeights == 2 ? number & 1 : 0; }
  __device__ __forceinline__ u32 own_weights(int number) const {
    return shared.weights[place_of_weights(number)] + rank * (Layout::kBox / 2);
  }
  // Weights of the own rows, which are stored, to the values of both blocks.
  __device__ __forceinline__ void hand_on(int number) {
    async_fence();
    named_sync(kHalvesScores, 128);
    if (thread() == 0) {
      const u32 raise = shared_address(&shared.raise[number & 3][rank]), rows = own_weights(number),
                barrier = shared.weights_full[place_of_weights(number)];
      barrier_expect(barrier, Layout::kBox / 2 + sizeof(Raise));
      copy_to_peer<Layout::kBox / 2>(there(rows), rows, there(barrier));
      copy_to_peer<sizeof(Raise)>(there(raise), raise, there(barrier));
    }
    __syncwarp();
  }

  __device__ __forceinline__ void attend() {
    int half = 0, number = 0;  // of the next block: its first half, in the ring
    int before = 0;            // the warp's half of the block before
    u32 phases = 0;            // of the halves of the ring
    WorkItem item = with.template own_work<kFlashMlaV5Blocks>()[0];
#pragma unroll 1
    for (int place = 0;; ++place) {  // of the item
      const int begin = uniform(item.begin), end = uniform(item.end), tokens = uniform(item.tokens);
      if (begin == end) break;
      const int tile_row = uniform(item.row_tile) * kRows;
      const int rows = uniform(item.queries) * with.heads - tile_row;  // from the tile's first row on
      const int all = problem.shards ? uniform(item.whole) : tokens;
      // So many of the tile's rows do not see a token, where causal.
      auto hidden = [&](int token) {
        return ((problem.shards ? with.shards.position(token) : token) - all) * with.heads + rows;
      };
#pragma unroll
      for (int i = 0; i < kOwn / 8; ++i) sums[i] = {};
      unseen = true;
      if (const int pair = thread(); pair < kOwn / 2)
        shared.maxima[pair] = {latent::first_maximum(rank * kOwn + 2 * pair, rows),
                               latent::first_maximum(rank * kOwn + 2 * pair + 1, rows)};
      barrier_wait(shared.queries_full, place & 1);
      place_queries();

      // Of the block before, whose scores over the own columns are kept.
      auto mask = [&](int block, int half) {
        if (problem.causal && hidden(block * kTile + kTile - 1) > rank * kOwn) {
          const int token = block * kTile + warp() * 16 + group();  // the thread's first; the second is 8 on
          const int first = rank * kOwn + 2 * in_group(), of[2] = {hidden(token) - first, hidden(token + 8) - first};
#pragma unroll
          for (int i = 0; i < kOwn / 2; ++i) own[i] = i / 4 * 8 + (i & 1) < of[i >> 1 & 1] ? -kInfinity : own[i];
        }
        const u32 present = shared.present[half][warp() & 1];
        if (present != 0xffff) {
          const bool low = present >> group() & 1, high = present >> group() >> 8 & 1;
#pragma unroll
          for (int i = 0; i < kOwn / 2; ++i) own[i] = (i & 2 ? high : low) ? own[i] : -kInfinity;
        }
      };
#pragma unroll 1
      for (int block = begin; block < end; ++block) {
        const int second = after(half), mine = warp() < 2 ? half : second;
        const auto step = [&](int k) {
          if (beside == 0 || block == begin || k < 18 - beside) return;
          weigh(k - (18 - beside), number - 1, [&] { mask(block - 1, before); });
        };
        barrier_wait(shared.full[mine], phases >> mine & 1);
        score(mine, number, step);
        // What was sent two blocks ago has been read. At the begin of an item one knows it of the last block.
        if (const int sent = number - (block > begin ? 2 : 1); sent >= 0)
          wait_for_peer(shared.weights_full[place_of_weights(sent)], sent / kWeights & 1);
        if (beside == kSteps && block > begin) hand_on(number - 1);
        end_scores();
        warp_arrive(shared.scored[number & 1]);
        if (block + 1 == end) warp_arrive(shared.queries_empty);
        send_scores(number & 1);
        if (beside < kSteps && block > begin) {
#pragma unroll
          for (int k = beside; k < kSteps; ++k) weigh(k, number - 1, [&] { mask(block - 1, before); });
          hand_on(number - 1);
        }
        keep_scores(number);
        before = mine;
        phases ^= 1u << half ^ 1u << second;
        ++number;
        half = after(second);
      }
#pragma unroll
      for (int k = 0; k < kSteps; ++k) weigh(k, number - 1, [&] { mask(end - 1, before); });
      hand_on(number - 1);

      finish(place, tile_row, rows);
      item = with.template own_work<kFlashMlaV5Blocks>()[place + 1];
    }
  }

  // The end of an item: what outputs are multiplied by, and their log-sum-exps.
  __device__ __forceinline__ void finish(int place, int tile_row, int rows) {
    const WorkItem* const work = with.template own_work<kFlashMlaV5Blocks>() + place;
    const int request = work->request, first_row = work->first_row, part = uniform(work->slot), of = place & 1;
    named_sync(kHalvesScores, 128);  // candidates for maxima are read
    leave_sums();
    power = __reduce_max_sync(~0u, power);
    if (lane() == 0) shared.powers[warp()] = power;
    power = 0;
    wait_for_peer(shared.inverse_empty[of], (place >> 1 & 1) ^ 1);
    named_sync(kHalvesScores, 128);
    if (thread() < kOwn) {
      const int row = rank * kOwn + thread();
      float all = 0.0f;
#pragma unroll
      for (int w = 0; w < 4; ++w) all += reinterpret_cast<const float*>(shared.of_warps[w])[thread()];
      const float top = reinterpret_cast<const float*>(shared.maxima)[thread()];
      // A part's normalised values, over twice the largest power of two of its tokens' scales, do not exceed 448.
      float store = 1.0f;
      if (part >= 0) {
        const uint4 powers = load_shared(shared_address(shared.powers));
        const u32 largest = max(max(powers.x, powers.y), max(powers.z, powers.w));
        const u32 power = min(largest, 252u << 23) + (1u << 23);
        store = latent::kPartScale * __uint_as_float((254u << 23) - power);
        constexpr int kFloats = kRows * part_row_floats(kRows);
        with.lse_part[part * static_cast<long long>(kFloats) + kRows + row] =
            __uint_as_float(power) / latent::kPartScale;
      }
      const float divisor = latent::divisor_of(with, part, tile_row + row, top, all);
      shared.inverse[of][row] = divisor == 0.0f ? 0.0f : store / divisor;
      latent::store_lse<kRows>(with, request, first_row, tile_row, rows, part, row, log_sum(top, all), all);
    }
    async_fence();
    named_sync(kHalvesScores, 128);  // sums and maxima are read, too
    if (thread() == 0) {
      constexpr u32 kBytes = kOwn * sizeof(float);
      const u32 own = shared_address(&shared.inverse[of][rank * kOwn]), barrier = shared.inverse_full[of];
      barrier_expect(barrier, kBytes);
      copy_to_peer<kBytes>(there(own), own, there(barrier));
    }
    __syncwarp();
  }
};

// A warpgroup of the values.
template <auto problem, int kWeights>
struct HalvesValues : HalvesFragments<problem, kWeights> {
  using Base = HalvesFragments<problem, kWeights>;
  using Base::kLine, Base::kRows, Base::shared, Base::with;
  using Base::thread, Base::warp, Base::group, Base::in_group, Base::after, Base::there;
  using typename Base::Layout;

  const int side;         // which of the two
  float o[2][kRows / 2];  // O^T (128, 128): 64 columns each

  __device__ __forceinline__ HalvesValues(Layout& shared, const LatentArguments& with, int side)
      : Base(shared, with), side(side) {}

  // O^T += Z^T P^T of a block. Frees its tokens.
  __device__ __forceinline__ void weigh_values(int half, int number) {
    const u32 weights = operand_k_major(shared.weights[kWeights == 2 ? number & 1 : 0]);
    const int second = after(half);
    const u32 column = lane_id() * kLine + (side * 8 + warp()) * 16;
    const u32 from[2] = {shared.tokens[half] + column, shared.tokens[second] + column};
    u32 a[2][4];  // of products in flight
    u32 raw[4];   // of 8 tokens each: two tokens, two columns
    uint4 scales = {};
    auto load = [&](int n) {  // 32 tokens and 64 columns
      load_transposed(raw, from[n / 2] + n % 2 * 64);
      if (n % 2 == 0) scales = reinterpret_cast<const uint4*>(shared.scales[number & 3][side])[n / 2 * 4 + in_group()];
    };
    load(0);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const u32 by[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (n > 0) mma_wait<1>();
        u32* const to = a[i];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint2 x = halves_of_e4m3(__byte_perm(raw[2 * i + j], 0, 0x3120));
          to[2 * j] = multiply_halves(x.x, by[2 * i + j]);
          to[2 * j + 1] = multiply_halves(x.y, by[2 * i + j]);
        }
        if (i == 1 && n % 2 == 1) warp_arrive(shared.empty[n < 2 ? half : second]);
        if (i == 1 && n < 3) load(n + 1);
        mma_fence();
        mma_few<DType::float16, kRows>(o[n % 2], to, weights + (n / 2 * 2 + i) * 2, 1);
        mma_commit();
      }
    }
    mma_wait<0>();
    pin<kRows>(&o[0][0]);
  }

  // Outputs, by what the scores have said of the rows of a block of the cluster.
  template <int of>
  __device__ __forceinline__ void rescale(int number) {
    const Raise& raise = shared.raise[number & 3][of];
    if (!uniform(raise.raised)) return;
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      const float2 by = raise.factors[4 * i + in_group()];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float* const x = o[m] + of * (kRows / 4) + 4 * i;
        x[0] *= by.x;
        x[1] *= by.y;
        x[2] *= by.x;
        x[3] *= by.y;
      }
    }
  }

  __device__ __forceinline__ void attend() {
    int half = 0, number = 0;  // of the next block
    WorkItem item = with.template own_work<kFlashMlaV5Blocks>()[0];
#pragma unroll 1
    for (int place = 0;; ++place) {  // of the item
      const int begin = uniform(item.begin), end = uniform(item.end);
      if (begin == end) break;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) o[m][i] = 0.0f;
      }
#pragma unroll 1
      for (int block = begin; block < end; ++block) {
        const int of = kWeights == 2 ? number & 1 : 0;
        wait_for_peer(shared.weights_full[of], number / kWeights & 1);
        if (kWeights == 2 && block + 2 < end) barrier_wait(shared.scored[number & 1], (number + 2) >> 1 & 1);
        rescale<0>(number);
        rescale<1>(number);
        pin<kRows>(&o[0][0]);
        weigh_values(half, number);
        __syncwarp();  // all lanes have read scales and factors
        if (lane_id() == 0) {
          barrier_arrive(shared.weights_empty[of]);
          arrive_at_peer(there(shared.weights_empty[of]));
        }
        __syncwarp();
        ++number;
        half = after(after(half));
      }

      // What is needed of this item, and the next one: they arrive during the exchange.
      const WorkItem* const work = with.template own_work<kFlashMlaV5Blocks>() + place;
      const int request = work->request, first_row = work->first_row, part = uniform(work->slot);
      const int tile_row = uniform(work->row_tile) * kRows, rows = uniform(work->queries) * with.heads - tile_row;
      item = work[1];
      finish(place, request, first_row, tile_row, rows, part);
    }
  }

  // The end of an item: outputs, or a part of them.
  __device__ __forceinline__ void finish(int place, int request, int first_row, int tile_row, int rows, int part) {
    const int of = place & 1, piece = static_cast<int>(cluster_rank()) * 2 + side;
    wait_for_peer(shared.inverse_full[of], place >> 1 & 1);
    if (part < 0) {
      latent::store_outputs<problem.dtype, kRows, 2>(with, request, first_row, tile_row, rows, piece, o, [&](int row) {
        asm volatile("" ::: "memory");
        return shared.inverse[of][row];
      });
    } else {
      latent::store_part<kRows, 1>(with, part, piece, o, [&](int i) {
        return *reinterpret_cast<const float2*>(&shared.inverse[of][8 * i + 2 * in_group()]);
      });
    }
    __syncwarp();
    if (lane_id() == 0) {
      barrier_arrive(shared.inverse_empty[of]);
      arrive_at_peer(there(shared.inverse_empty[of]));
    }
    __syncwarp();
  }
};

// The warpgroup that copies tokens, the own columns of them: a warp 16 of each block. A place of the ring is for half a
// block. An entry of the table that names no row of the pool is no token: its place is zeroed, and its scores are
// hidden.
template <auto problem, int kWeights>
__device__ __forceinline__ void copy_halves(HalvesShared<kWeights>& shared, const LatentArguments& with) {
  using Layout = HalvesShared<kWeights>;
  // What follows from the thread or the item is found anew where it is needed, since producers have few registers.
  const auto lane = [] { return static_cast<int>(lane_id()); };
  const auto warp = [] { return static_cast<int>(thread_id() >> 5) & 3; };
  const auto work = [&](int place) { return with.template own_work<kFlashMlaV5Blocks>() + place; };
  const auto load_queries = [&](int place) {
    if (warp() > 0 || lane() > 0) return;
    barrier_wait(shared.queries_empty, (place & 1) ^ 1);
    const latent::QueryPlace at(with, *work(place), Layout::kRows);
    const u32 to = shared.queries, full = shared.queries_full;
    barrier_expect(full, 5 * Layout::kBox);
#pragma unroll 1
    for (int group = 0; group < 4; ++group)
      tma_load(to + group * Layout::kBox, with.qc_map, at.inner, at.outer, cluster_rank() * 4 + group, full);
    tma_load(to + 4 * Layout::kBox, with.qpe_map, at.inner, at.outer, 0, full);
  };
  // Of the lane's token of a block; what is to be made of it is made where it is used.
  const auto token_of = [&](int block) { return block * kTile + warp() * 16 + (lane() & 15); };
  const auto entry_of = [&](int place, int block) {
    const WorkItem* const item = work(place);
    const int token = token_of(block);
    if (block >= item->end || token >= item->tokens) return 0;
    return with.block_table[static_cast<u64>(static_cast<u32>(item->request)) * static_cast<u32>(with.table_width) +
                            with.page.divide(token)];
  };
  int in_ring = warp() >> 1;  // of the warp's half of the next block
  u32 phase = 1;
#pragma unroll 1
  for (int place = 0;; ++place) {  // of the item
    int block = work(place)->begin;
    if (block == work(place)->end) break;
    int next = entry_of(place, block);
    // While the table is read; later ones when the queries before are not needed any more.
    if (place == 0) load_queries(0);
    __syncwarp();
#pragma unroll 1
    for (bool begun = false; block < work(place)->end; ++block, begun = true) {
      int at = -1;  // of the token in the pool; -1: there is none
      if (const int token = token_of(block); token < work(place)->tokens)
        at = with.place_of(next * with.page_places + token - with.page.divide(token) * with.page.by);
      next = entry_of(place, block + 1);
      const u32 present = __ballot_sync(~0u, at >= 0) & 0xffff;
      barrier_wait(shared.empty[in_ring], phase);
      if (lane() == 0) {
        *const_cast<volatile u32*>(&shared.present[in_ring][warp() & 1]) = present;
        barrier_arrive(shared.full[in_ring]);
      }
      __syncwarp();
      const u32 to = shared.tokens[in_ring] + (warp() & 1) * 16 * Layout::kLine;
      const auto copy = [&](int of, u32 to, u32 byte) {
        copy_ahead_or_zero(
            to,
            static_cast<const unsigned char*>(with.z) +
                (static_cast<u64>(static_cast<u32>(max(of, 0))) * static_cast<u32>(with.z_stride) + byte),
            of >= 0);
      };
#pragma unroll 2
      for (int i = 0; i < 8; ++i)
        copy(__shfl_sync(~0u, at, 2 * i + (lane() >> 4)),
             to + (2 * i + (lane() >> 4)) * Layout::kLine + (lane() & 15) * 16,
             cluster_rank() * 256 + (lane() & 15) * 16);
#pragma unroll 1
      for (int i = 0; i < 2; ++i)
        copy(__shfl_sync(~0u, at, 8 * i + (lane() >> 2)),
             to + (8 * i + (lane() >> 2)) * Layout::kLine + Layout::kRopeAt + (lane() & 3) * 16,
             latent::kRopeAt + cluster_rank() * 64 + (lane() & 3) * 16);
      if (lane() < 16) copy(at, to + lane() * Layout::kLine + Layout::kScalesAt, latent::kScalesAt);
      barrier_arrive_when_copied(shared.full[in_ring]);
      __syncwarp();
      in_ring += 2;
      if (in_ring >= Layout::kHalves) {
        in_ring -= Layout::kHalves;
        phase ^= 1;
      }
      if (!begun && place > 0) load_queries(place);
      __syncwarp();
    }
  }
}

// Query boxes: 128 rows and 1 group of qc_map and of qpe_map. The maps of the cache are not used.
template <LatentProblem problem, FlashMlaV5Tiling tiling>
__global__ void __launch_bounds__(kFlashMlaV5Threads, 1) flash_mla_v5(const __grid_constant__ LatentArguments with) {
  static_assert(problem.k == 512 && problem.p == 64, "the layouts are made for 512 latent and 64 RoPE columns");
  static_assert(problem.fp8 == 656 && problem.page == 1 && problem.dtype == DType::bfloat16,
                "tokens of fp8 with four scales are gathered");
  static_assert(problem.tokens_first && !problem.after, "what the masks are made for");
  using Layout = HalvesShared<tiling.weights>;
  static_assert(sizeof(Layout) <= flash_mla_v5_shared_bytes(tiling.weights));
  static_assert(flash_mla_v5_shared_bytes(tiling.weights) <= kMaxSharedBytes);
  extern __shared__ __align__(1024) unsigned char dynamic[];
  Layout& shared = *reinterpret_cast<Layout*>(dynamic);
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 7), 0);
  latent::ask_for_code();
  if (threadIdx.x == 0) {
    for (int half = 0; half < Layout::kHalves; ++half) {
      barrier_init(shared.full[half], 64 + 2);
      barrier_init(shared.empty[half], 8);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared.scores_there[i], 1);
      barrier_init(shared.scored[i], 4);
      barrier_init(shared.inverse_full[i], 1);
      barrier_init(shared.inverse_empty[i], 16);
    }
    for (int i = 0; i < tiling.weights; ++i) {
      barrier_init(shared.weights_full[i], 1);
      barrier_init(shared.weights_empty[i], 16);
    }
    barrier_init(shared.queries_full, 1);
    barrier_init(shared.queries_empty, 4);
    barrier_init_done();
  }
  if (threadIdx.x == 256) {
    tma_prefetch_map(with.qc_map);
    tma_prefetch_map(with.qpe_map);
  }
  cluster_sync();
  wait_for_previous();  // if launched programmatically, all before this ran beside the end of the previous kernel
  launch_next();
  if (role == 2) {
    give_registers<24>();
    copy_halves<problem>(shared, with);
    leave_cluster();
    latent::watch_tiles<kFlashMlaV5Blocks>(shared.cut, with);
    return;
  }
  if (role == 3) {
    take_registers<152>();
    const auto attend = [&](auto scores) {
      scores.expect_scores(0);
      scores.expect_scores(1);
      scores.attend();
    };
    if (cluster_rank() == 0)
      attend(HalvesScores<problem, tiling.weights, tiling.beside, 0>(shared, with));
    else
      attend(HalvesScores<problem, tiling.weights, tiling.beside, 1>(shared, with));
    leave_cluster();
    return;
  }
  take_registers<168>();
  HalvesValues<problem, tiling.weights>(shared, with, uniform(role)).attend();
  cluster_sync();  // all outputs of the cluster are written, and no message is on its way
  using Tile = latent::RowsOnNPairs<Layout::kRows>;
  static_assert(Tile::kBlocks == kFlashMlaV5Blocks);
  using Scratch = latent::MergeScratch<Tile>;  // in the place of queries, weights and tokens
  static_assert(sizeof(Scratch) <=
                sizeof(shared.queries) + sizeof(shared.weights) + sizeof(shared.inbox) + sizeof(shared.tokens));
  latent::merge_tiles<problem.dtype, Tile>(with, shared.cut, *reinterpret_cast<Scratch*>(shared.queries.bytes));
}

}  // namespace hypermla::cute
