// FlashMLA for Hopper over single tokens for few rows: 16 at a time, the M side of products that a warp makes alone
// (mma.sync). Tokens lie in shared memory as they lie in the cache. Of those in FP8 a lane widens to fp16 what it
// multiplies itself.
//
// Rows: all heads share the latents, so the queries of a request are rows of one matrix, all heads' (LatentArguments).
// A thread block takes work items (latent/work.h): 16 rows against a range of token blocks of 64.
//
// Roles (384 threads):
//   warps 0 .. 7      consumers: the scores and weights of 8 tokens of a block each, then 64 columns of the output
//                     each, over all tokens of the block
//   warpgroup 2       producer: a thread for each token starts its copy, wherever it lies; one loads queries
//
// A block, for a consumer: S (16, 8 tokens) = Q Z^T, with all of Q in its registers, then the softmax. All warps share
// the running maxima, which rise only when some score exceeds its own by more than kRescaleThreshold: they vote on
// that. The weights P meet in shared memory. Then O (16, 64 of 512) += P Z.
//
// A token is 576 numbers of 16 bits; or, in FP8, 656 bytes in DeepSeek's form, 512 e4m3 | 4 fp32 scales, of 128 columns
// each | 64 bf16 of RoPE, or 576 e4m3 with one scale for all. The one scale multiplies scores and outputs at the end;
// queries over such tokens may be e4m3 with one scale, too. Of four scales each multiplies the sums of its 128 columns
// in the scores, in fp32. In the output it multiplies the weights, one set of them for each 128 columns. So that those
// fit into fp16, running maxima are of scores plus the logarithm of the power of two of the token's largest scale, and
// sums of weights are without the power.
//
// The order of columns in the scores: a lane of four that share a token takes 16 bytes at a time, so the 16 columns of
// a product are not neighbours in memory. Its queries are in the same order (place_queries). The order of columns in
// the output, in FP8: ldmatrix transposes pairs of bytes, so even columns and odd ones of 16 are two products.
//
// Shared memory (struct FewRowsShared): queries, 9 boxes of 16 rows x 64 columns, of e4m3 4 of 128 and one of 64 |
// weights (16 rows x 64 tokens), in the form of 656 bytes for each 128 columns | a ring of half token blocks, whose
// lines are such that neither 8 tokens at one column nor 2 tokens at 4 units meet in a bank | barriers, row values.
//
// grid = any, by the work list; 384 threads, flash_mla_v4_shared_bytes(problem.fp8) of dynamic shared memory.
#pragma once

#include "flash_mla_v4.h"
#include "hopper/constants.h"
#include "hopper/e4m3.h"
#include "hopper/fp8.h"
#include "hopper/fragments.h"
#include "hopper/mbarrier.h"
#include "hopper/mma.h"
#include "hopper/rows.h"
#include "hopper/tma.h"
#include "hopper/warpgroup.h"
#include "latent/arguments.h"
#include "latent/copy_tokens.cuh"
#include "latent/item_rows.cuh"
#include "latent/merge_tiles.cuh"
#include "latent/start.cuh"

namespace hypermla::cute {

template <int fp8>
struct FewRowsShared {
  static constexpr u32 kBox = kFlashMlaV4Rows * 128;  // bytes
  static constexpr u32 kLine = flash_mla_v4_line(fp8);
  static constexpr int kHalves = flash_mla_v4_halves(fp8);

  Bytes<9 * kBox> queries;
  Array<Bytes<kBox>, flash_mla_v4_weights(fp8)> weights;
  Array<Bytes<kTile / 2 * kLine>, kHalves> tokens;
  Barriers<kHalves> full, empty;
  Barrier queries_full, queries_empty;
  u32 present[kHalves][2];             // [half block][16 tokens]: bit r says whether token r is there
  float of_warps[8][kFlashMlaV4Rows];  // candidates for maxima, in the end sums of weights
  latent::CutItems cut;
};

// How partial outputs lie: [slot][warp][16 columns][lane]. A lane has four neighbouring columns, or two and the two
// that are 8 further on.
template <bool neighbours>
struct FewRowsTile {
  static constexpr int kRows = kFlashMlaV4Rows, kNextRow = 8, kPeriod = 1;
  static constexpr bool kAlike = false;
  static __device__ __forceinline__ int row(int, int lane) { return lane >> 2; }
  static __device__ __forceinline__ int piece(int chunk) { return chunk / 4; }

  // The lane's columns of 16 from `row` on.
  template <DType dtype>
  static __device__ __forceinline__ void store(unsigned short* row, float4 x) {
    const uint2 both = {pack<dtype>(x.x, x.y), pack<dtype>(x.z, x.w)};
    if constexpr (neighbours) {
      reinterpret_cast<uint2*>(row)[lane_id() & 3] = both;
    } else {
      u32* const to = reinterpret_cast<u32*>(row) + (lane_id() & 3);
      to[0] = both.x;
      to[4] = both.y;
    }
  }

  struct Output {
    unsigned short *first, *second;  // the lane's rows, or null

    __device__ __forceinline__ Output(const LatentArguments& with, const WorkItem& item, int chunk)
        : first(latent::row_of_tile<kRows>(with, item, row(chunk, lane_id()))),
          second(latent::row_of_tile<kRows>(with, item, row(chunk, lane_id()) + kNextRow)) {}
    template <DType dtype>
    __device__ __forceinline__ void write(int chunk, const latent::TwoRows& x, u32) const {
      if (first) store<dtype>(first + chunk * 16, x.first);
      if (second) store<dtype>(second + chunk * 16, x.second);
    }
  };
};

// One warp that multiplies.
template <auto problem>
struct FewRowsConsumer {
  static constexpr bool wide = problem.fp8 == 0, one_scale = problem.fp8 == 576, scales_of_columns = problem.fp8 == 656;
  static constexpr DType dtype = wide ? problem.dtype : DType::float16;  // of products, but for RoPE
  using Layout = FewRowsShared<problem.fp8>;
  using Tile = FewRowsTile<!wide>;
  static constexpr int kRows = kFlashMlaV4Rows;
  static constexpr u32 kLine = Layout::kLine;
  enum NamedBarrier { kMeet = 1, kVote = 2, kWeighed = 3 };  // the merge has those from 5 on

  Layout& shared;
  const LatentArguments& with;
  const int warp;
  u32 q[36][4];                 // the queries of each product, RoPE's are the last four
  float o[8][4];                // 8 columns each; in FP8, of each 16 the even ones, then the odd ones
  float p[4];                   // scores, then weights: of two rows, of two tokens each
  float scales[2][4];           // of the two tokens, over their powers of two
  float inverse[2], powers[2];  // of the powers of two, and their logarithms
  float2 maximum, sum;          // of the two rows; sum: of the lane's own weights

  __device__ __forceinline__ FewRowsConsumer(Layout& shared, const LatentArguments& with, int warp)
      : shared(shared), with(with), warp(warp) {}

  static __device__ __forceinline__ int group() { return lane_id() >> 2; }  // of four lanes: rows group() and 8 more
  static __device__ __forceinline__ int in_group() { return lane_id() & 3; }

  // Queries to registers: of a lane's 16 bytes of a token, word s or two words are its part of the s-th product. Under
  // tokens in FP8 in fp16, but for RoPE of 16 bits. With q_scale they are e4m3.
  __device__ __forceinline__ void place_queries() {
    if (one_scale && with.q_scale)
      place_e4m3();
    else
      place_wide();
    __syncwarp();
    warp_arrive(shared.queries_empty);
  }
  __device__ __forceinline__ void place_e4m3() {
    const auto load = [&](int first, u32 box, u32 at, u32 next_row) {  // four products
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4 of = load_shared(shared.queries + box + at + r * next_row);
        const u32 words[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          const uint2 x = halves_of_e4m3(words[s]);
          q[first + s][r] = x.x;
          q[first + s][r + 2] = x.y;
        }
      }
    };
#pragma unroll
    for (int n = 0; n < 8; ++n)  // 128 columns, the lane's first or second 16 of them
      load(4 * n, n / 2 * Layout::kBox, swizzled(group(), 2 * in_group() + n % 2), 8 * 128);
    load(32, 4 * Layout::kBox, swizzled_64(group(), in_group()), 8 * 64);
  }
  __device__ __forceinline__ void place_wide() {
    const auto load = [&](int first, int box, int unit, bool widen) {  // two products
      u32 x[2][4];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4 of = load_shared(shared.queries + box * Layout::kBox + swizzled(group() + 8 * r, unit));
        const u32 words[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 both = unpack<DType::bfloat16>(words[i]);
          x[r][i] = widen ? pack<DType::float16>(both.x, both.y) : words[i];
        }
      }
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) q[first + s][i] = x[i % 2][2 * s + i / 2];
      }
    };
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      if constexpr (wide) {  // 64 columns, the lane's first or second 8 of them
        load(2 * n, n / 2, 2 * in_group() + n % 2, false);
      } else {  // 128 columns, the lane's first or second 16 of them, half of those
        const int unit = 2 * in_group() + n / 2 % 2;
        load(2 * n, n / 4 * 2 + (unit >> 2), (unit & 3) * 2 + n % 2, true);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) load(32 + 2 * n, 8, 2 * in_group() + n, one_scale);
  }

  // Scores of the warp's tokens of a block to p.
  __device__ __forceinline__ void scores(int place) {
    const u32 line = shared.tokens[place] + (warp % 4 * 8 + group()) * kLine;
    float sums[4][4] = {};  // of 128 columns each in FP8
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = 0.0f;
    const auto multiply = [&](float* d, int product, u32 word) {
      const uint2 x = halves_of_e4m3(word);
      mma_warp<dtype>(d, q[product], x.x, x.y);
    };
    const auto multiply_wide = [&](float* d, int product, uint4 x) {
      mma_warp<problem.dtype>(d, q[product], x.x, x.y);
      mma_warp<problem.dtype>(d, q[product + 1], x.z, x.w);
    };
    // Products that follow each other are of different sums: one waits for the one before of its own.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (wide) {
#pragma unroll
        for (int n = 0; n < 9; ++n)
          multiply_wide(n < 8 ? sums[n % 4] : p, 4 * n + 2 * h, load_shared(line + (8 * n + 2 * in_group() + h) * 16));
        continue;
      }
      u32 words[4][4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint4 x = load_shared(line + (8 * n + 2 * in_group() + h) * 16);
        words[n][0] = x.x;
        words[n][1] = x.y;
        words[n][2] = x.z;
        words[n][3] = x.w;
      }
      if constexpr (scales_of_columns) {
        multiply_wide(p, 32 + 2 * h, load_shared(line + latent::kRopeAt + (2 * in_group() + h) * 16));
      } else if (h == 0) {
        const uint4 x = load_shared(line + latent::kNarrowRopeAt + in_group() * 16);
        multiply(p, 32, x.x);
        multiply(p, 33, x.y);
        multiply(p, 34, x.z);
        multiply(p, 35, x.w);
      }
#pragma unroll
      for (int s = 0; s < 4; ++s) {
#pragma unroll
        for (int n = 0; n < 4; ++n) multiply(sums[n], (2 * n + h) * 4 + s, words[n][s]);
      }
    }
    if constexpr (!scales_of_columns) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[i] += (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
    } else {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint4 all =
            load_shared(shared.tokens[place] + (warp % 4 * 8 + 2 * in_group() + e) * kLine + latent::kScalesAt);
        const u32 words[4] = {all.x, all.y, all.z, all.w};
        constexpr u32 kPower = 0x7f800000;  // not below 2^-63, so that its inverse is finite
        const u32 largest = max(max(all.x & kPower, all.y & kPower), max(all.z & kPower, all.w & kPower));
        const u32 power = max(largest, 64u << 23);
        inverse[e] = __uint_as_float((254u << 23) - power);
        powers[e] = static_cast<float>(static_cast<int>(power >> 23) - 127);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float scale = __uint_as_float(words[n]);
          p[e] = fmaf(sums[n][e], scale, p[e]);
          p[2 + e] = fmaf(sums[n][2 + e], scale, p[2 + e]);
          scales[e][n] = scale * inverse[e];
        }
      }
    }
  }

  // Scores to weights times the powers of two of tokens, in place, against the running maxima of those products, which
  // all warps raise together. The sums are of weights alone. The weights to shared memory.
  __device__ __forceinline__ void softmax(float scale_log2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = scales_of_columns ? fmaf(p[i], scale_log2, powers[i % 2]) : p[i] * scale_log2;
    const float2 largest = {fmaxf(p[0], p[1]), fmaxf(p[2], p[3])};
    if (named_any(kVote, 256, largest.x - maximum.x > kRescaleThreshold || largest.y - maximum.y > kRescaleThreshold))
      raise_maxima(largest);
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = exp2_fast(p[i] - (i < 2 ? maximum.x : maximum.y));
    if constexpr (!scales_of_columns) {
      sum = {sum.x + p[0] + p[1], sum.y + p[2] + p[3]};
    } else {
      sum = {fmaf(p[1], inverse[1], fmaf(p[0], inverse[0], sum.x)),
             fmaf(p[3], inverse[1], fmaf(p[2], inverse[0], sum.y))};
    }
    const u32 first = swizzled(group(), warp) + in_group() * 4, second = first + 8 * 128;
#pragma unroll
    for (int n = 0; n < flash_mla_v4_weights(problem.fp8); ++n) {
      const float x = scales_of_columns ? scales[0][n] : 1.0f, y = scales_of_columns ? scales[1][n] : 1.0f;
      unsigned char* const to = shared.weights.elements[n].bytes;
      *reinterpret_cast<u32*>(to + first) = pack<dtype>(p[0] * x, p[1] * y);
      *reinterpret_cast<u32*>(to + second) = pack<dtype>(p[2] * x, p[3] * y);
    }
  }

  __device__ __forceinline__ void raise_maxima(float2 largest) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      largest.x = fmaxf(largest.x, __shfl_xor_sync(~0u, largest.x, step));
      largest.y = fmaxf(largest.y, __shfl_xor_sync(~0u, largest.y, step));
    }
    if (in_group() == 0) {
      shared.of_warps[warp][group()] = largest.x;
      shared.of_warps[warp][group() + 8] = largest.y;
    }
    named_sync(kMeet, 256);
    const float2 before = maximum;
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      maximum.x = fmaxf(maximum.x, shared.of_warps[w][group()]);
      maximum.y = fmaxf(maximum.y, shared.of_warps[w][group() + 8]);
    }
    const float2 by = {rescale_factor(before.x, maximum.x), rescale_factor(before.y, maximum.y)};
    sum = {sum.x * by.x, sum.y * by.y};
    rescale_rows<32>(&o[0][0], by);
  }

  // O += P Z of the warp's columns. Frees the tokens.
  __device__ __forceinline__ void weigh_values(const int (&places)[2]) {
    const int lane = lane_id();
    const u32 weights = shared.weights[scales_of_columns ? warp / 2 : 0] + place_of_row(0, lane);
    const u32 in_half = (lane & 15) * kLine + warp * (wide ? 128 : 64) + (lane >> 4) * 16;
    const u32 from[2] = {shared.tokens[places[0]] + in_half, shared.tokens[places[1]] + in_half};
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // 16 tokens
      u32 a[4], raw[4][4];
      load_matrices(a, weights ^ k << 5);
#pragma unroll
      for (int i = 0; i < (wide ? 4 : 2); ++i) load_transposed(raw[i], from[k / 2] + k % 2 * 16 * kLine + i * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // 16 columns
        if constexpr (wide) {
          mma_warp<dtype>(o[2 * i], a, raw[i][0], raw[i][1]);
          mma_warp<dtype>(o[2 * i + 1], a, raw[i][2], raw[i][3]);
        } else {
          const uint2 low = halves_of_e4m3(__byte_perm(raw[i / 2][i % 2 * 2], 0, 0x3120));
          const uint2 high = halves_of_e4m3(__byte_perm(raw[i / 2][i % 2 * 2 + 1], 0, 0x3120));
          mma_warp<dtype>(o[2 * i], a, low.x, high.x);
          mma_warp<dtype>(o[2 * i + 1], a, low.y, high.y);
        }
      }
      if (k % 2 == 1) {
        __syncwarp();
        warp_arrive(shared.empty[places[k / 2]]);
      }
    }
  }

  __device__ __forceinline__ void attend(const WorkItem* __restrict__ work) {
    const float cache_scale = one_scale ? *with.cache_scale : 1.0f;
    const float q_scale = one_scale && with.q_scale ? *with.q_scale : 1.0f;
    const float scale_log2 = latent::scale_log2_of(with, cache_scale * q_scale);
    int place = 0;  // of the block's first half
    u32 phase = 0, queries_phase = 0;
    WorkItem item = *work;
#pragma unroll 1
    for (;;) {
      const int begin = uniform(item.begin), end = uniform(item.end), tokens = uniform(item.tokens);
      if (begin == end) break;
      const int tile_row = uniform(item.row_tile) * kRows;
      const int rows = uniform(item.queries) * with.heads - tile_row;  // from the tile's first row on
      const int all = problem.shards ? uniform(item.whole) : tokens;
      // So many of the tile's rows do not see a token, where causal.
      auto hidden = [&](int token) {
        return ((problem.shards ? with.shards.position(token) : token) - all) * with.heads + rows;
      };
      maximum = {latent::first_maximum(group(), rows), latent::first_maximum(group() + 8, rows)};
      sum = {};
#pragma unroll
      for (int i = 0; i < 32; ++i) o[i / 4][i % 4] = 0.0f;
      barrier_wait(shared.queries_full, queries_phase);
      queries_phase ^= 1;
      place_queries();

#pragma unroll 1
      for (int block = begin; block < end; ++block) {
        const bool turns = place + 1 == Layout::kHalves;  // the ring, between the halves
        const int places[2] = {place, turns ? 0 : place + 1}, own = warp < 4 ? places[0] : places[1];
        barrier_wait(shared.full[own], phase ^ (turns && warp >= 4));
        scores(own);
        if (problem.causal && hidden(block * kTile + kTile - 1) > 0) {
          const int token = block * kTile + warp * 8 + 2 * in_group();
          const int of[2] = {hidden(token), hidden(token + 1)};
#pragma unroll
          for (int i = 0; i < 4; ++i) p[i] = group() + i / 2 * 8 < of[i % 2] ? -kInfinity : p[i];
        }
        const u32 present = shared.present[own][warp >> 1 & 1] >> (warp & 1) * 8 & 0xff;
        if (present != 0xff) {
#pragma unroll
          for (int i = 0; i < 4; ++i) p[i] = present >> (2 * in_group() + i % 2) & 1 ? p[i] : -kInfinity;
        }
        softmax(scale_log2);
        named_sync(kWeighed, 256);
        weigh_values(places);
        place += 2;
        if (place >= Layout::kHalves) {
          place -= Layout::kHalves;
          phase ^= 1;
        }
      }

      // What is needed of this item, and the next one: they arrive during the exchange.
      const int request = work->request, first_row = work->first_row, slot_of_item = work->slot;
      item = *++work;
      finish(request, first_row, tile_row, rows, uniform(slot_of_item), cache_scale);
    }
  }

  // The end of an item: outputs, or a part of them.
  __device__ __forceinline__ void finish(int request, int first_row, int tile_row, int rows, int part,
                                         float cache_scale) {
    const int row = group();  // of the tile, and the one 8 behind it
    const float2 own = sum_of_rows(sum);
    if (in_group() == 0) {
      shared.of_warps[warp][row] = own.x;
      shared.of_warps[warp][row + 8] = own.y;
    }
    named_sync(kMeet, 256);
    float2 all = {};
#pragma unroll
    for (int w = 0; w < 8; ++w) all = {all.x + shared.of_warps[w][row], all.y + shared.of_warps[w][row + 8]};
    const auto share = [&](int r, float maximum, float all) {
      const float divisor = latent::divisor_of(with, part, tile_row + r, maximum, all);
      if (warp == 0 && in_group() == 0)
        latent::store_lse<kRows>(with, request, first_row, tile_row, rows, part, r, log_sum(maximum, all), all);
      return divisor == 0.0f ? 0.0f : cache_scale / divisor;
    };
    rescale_rows<32>(&o[0][0], {share(row, maximum.x, all.x), share(row + 8, maximum.y, all.y)});
    // Four of 16 columns of the first or second row, as Tile has them.
    const auto columns = [&](int i, int half) {
      const float *x = o[2 * i] + 2 * half, *y = o[2 * i + 1] + 2 * half;
      return wide ? float4{x[0], x[1], y[0], y[1]} : float4{x[0], y[0], x[1], y[1]};
    };
    if (part < 0) {
      const auto store = [&](int r, int half) {
        if (r >= rows) return;
        unsigned short* const out =
            static_cast<unsigned short*>(with.o) + with.o_rows.offset(request, first_row, tile_row + r) + warp * 64;
#pragma unroll
        for (int i = 0; i < 4; ++i) Tile::template store<problem.dtype>(out + 16 * i, columns(i, half));
      };
      store(row, 0);
      store(row + 8, 1);
      return;
    }
    constexpr int kFloats = kRows * part_row_floats(kRows);
    float* const loads = with.lse_part + part * static_cast<long long>(kFloats) + (1 + warp) * kRows + row;
    const float2 by = latent::scale_part<Tile::kNextRow>(largest_of_rows<32>(&o[0][0]), loads, in_group() == 0);
    uint4* const out = static_cast<uint4*>(with.o_part) + part * (kRows * 64LL) + warp * 128 + lane_id();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      constexpr DType of = DType::float16;
      const float4 x = columns(i, 0), y = columns(i, 1);
      store_to_stay(out + i * 32, make_uint4(pack<of>(x.x * by.x, x.y * by.x), pack<of>(y.x * by.y, y.y * by.y),
                                             pack<of>(x.z * by.x, x.w * by.x), pack<of>(y.z * by.y, y.w * by.y)));
    }
  }
};

// Query boxes: 16 rows and 2 groups of qc_map, 1 of qpe_map; e4m3 count by pairs. The maps of the cache are not used.
template <LatentProblem problem, FlashMlaV4Tiling>
__global__ void __launch_bounds__(kFlashMlaV4Threads, 1) flash_mla_v4(const __grid_constant__ LatentArguments with) {
  static_assert(problem.k == 512 && problem.p == 64, "the layouts are made for 512 latent and 64 RoPE columns");
  static_assert(problem.page == 1, "tokens are gathered");
  static_assert(!problem.fp8 || problem.dtype == DType::bfloat16, "what queries are converted from");
  static_assert(problem.tokens_first && !problem.after, "what the masks are made for");
  using Layout = FewRowsShared<problem.fp8>;
  static_assert(sizeof(Layout) == flash_mla_v4_shared_bytes(problem.fp8));
  static_assert(sizeof(Layout) <= kMaxSharedBytes);
  extern __shared__ __align__(1024) unsigned char dynamic[];
  Layout& shared = *reinterpret_cast<Layout*>(dynamic);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 5), 0);
  latent::ask_for_code();
  if (threadIdx.x == 0) {
    for (int place = 0; place < Layout::kHalves; ++place) {
      barrier_init(shared.full[place], 64 + 2);
      barrier_init(shared.empty[place], 8);
    }
    barrier_init(shared.queries_full, 1);
    barrier_init(shared.queries_empty, 8);
    barrier_init_done();
  }
  if (threadIdx.x == 256) {
    tma_prefetch_map(with.qc_map);
    tma_prefetch_map(with.qpe_map);
  }
  __syncthreads();
  wait_for_previous();  // if launched programmatically, all before this ran beside the end of the previous kernel
  launch_next();
  const WorkItem* __restrict__ work = with.own_work();
  if (warp >= 8) {
    // Of two pools a producer keeps more.
    give_registers<problem.fp8 ? 40 : 56>();
    latent::copy_tokens<problem, kFlashMlaV4Rows, keep_gathered(problem.causal)>(shared, work, with);
    latent::watch_tiles(shared.cut, with);
    return;
  }
  take_registers<problem.fp8 ? 232 : 224>();
  FewRowsConsumer<problem>(shared, with, warp).attend(work);
  using Tile = FewRowsTile<problem.fp8 != 0>;
  using Scratch = latent::MergeScratch<Tile>;  // in the place of tokens
  static_assert(sizeof(Scratch) <= sizeof(shared.tokens));
  latent::merge_tiles<problem.dtype, Tile>(with, shared.cut,
                                           *reinterpret_cast<Scratch*>(shared.tokens.elements[0].bytes));
}

}  // namespace hypermla::cute
