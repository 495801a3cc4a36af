// FlashMLA for Hopper over tokens in FP8 and queries in 16 bits. Tokens lie in shared memory as they lie in the cache,
// and the warps that multiply them widen them in registers, where they are the A operand: fp16, or bf16 where they are.
//
// Rows: all heads share the latents, so the queries of a request are rows of one matrix, all heads' (LatentArguments).
// A thread block takes work items (latent/work.h): N = 32 or 64 rows against a range of token blocks of 64. The rows
// are on the N side of wgmma, tokens and latent columns on the M side, as in flash_mla_v1.
//
// Roles (384 threads):
//   warpgroups 0, 1   consumers: the scores and weights of the even or the odd block of a pair, then columns 0..255 or
//                     256..511 of the output, of both blocks
//   warpgroup 2       producer: a thread for each token starts its copy, wherever it lies; one loads queries
//
// A pair of blocks, for a consumer: S^T (64 tokens, N) = Z Q^T of its block, then the softmax down the tokens. Both
// share the running maxima, which rise only when some score exceeds its own by more than kRescaleThreshold: the warps
// of both vote on that. The weights P^T go to the other consumer through shared memory. Then O^T (256 of 512, N) += Z^T
// P^T.
//
// A token is 656 bytes in DeepSeek's form, 512 e4m3 | 4 fp32 scales, of 128 columns each | 64 bf16 of RoPE, or 576 e4m3
// with one scale for all. The one scale multiplies scores and outputs at the end. Of four, the power of two of the
// largest multiplies the token's scores, and what is left of each its columns, in fp16. For the output the power goes
// into the token's weight (softmax()), and its values are multiplied by what is left of each scale, in fp16, as in the
// scores. The sums of weights are without the power.
//
// The order of columns in the scores: a thread of four that share a token takes 16 bytes at a time, so the 16 columns
// of a product are not neighbours in memory. The queries lie in the same order (place_queries). The order of columns in
// the output: ldmatrix transposes pairs of bytes, so rows g and g + 8 of 16 of M are columns 2 g and 2 g + 1.
//
// Shared memory (struct WidenedShared): queries, 9 boxes of N rows x 64 columns | weights of two blocks (N rows x 64
// tokens) | a ring of token blocks, 3 (N = 64) or 4 (N = 32), freed by halves, whose lines are such that neither 8
// tokens at one column nor 2 tokens at 4 units meet in a bank | barriers, row values.
//
// grid = any, by the work list; 384 threads, flash_mla_v3_shared_bytes(bytes of a token, N) of dynamic shared memory.
#pragma once

#include "flash_mla_v3.h"
#include "hopper/bulk.h"
#include "hopper/constants.h"
#include "hopper/e4m3.h"
#include "hopper/fragments.h"
#include "hopper/mbarrier.h"
#include "hopper/rows.h"
#include "hopper/tma.h"
#include "hopper/warpgroup.h"
#include "hopper/widened.h"
#include "latent/arguments.h"
#include "latent/copy_tokens.cuh"
#include "latent/item_rows.cuh"
#include "latent/merge_tiles.cuh"
#include "latent/rows_on_n_pairs.cuh"
#include "latent/start.cuh"

namespace hypermla::cute {

template <int token_bytes, int N>
struct WidenedShared {
  static constexpr u32 kRowBytes = N * 128;  // a box of N rows
  static constexpr u32 kLine = flash_mla_v3_line(token_bytes);
  static constexpr int kSlots = flash_mla_v3_slots(N);

  Bytes<9 * kRowBytes> queries;
  Array<Bytes<kRowBytes>, 2> weights;  // of the even block, of the odd one
  Array<Bytes<kTile * kLine>, kSlots> tokens;
  Array<Barriers<2>, kSlots> full, empty;  // [slot][32 tokens]
  Barrier queries_full, queries_empty;
  u32 present[kSlots][4];  // [slot][warp]: bit r says whether token 16 warp + r is there
  // Over their token's power of two, as fp16: [parity of the pair][block][128 columns], then the tokens
  // 32 k + 8 i + 2 j + e of the block at [k][j][i][e].
  alignas(16) unsigned short scales[2][2][4][kTile];
  float2 maxima[N / 2];       // [pair of rows]
  float2 factors[N / 2];      // [pair of rows]: of sums and outputs, when maxima rise
  float2 of_warps[8][N / 2];  // [warp of the consumers][pair of rows]: candidates for maxima
  float2 sums[8][N / 2];      // [warp of the consumers][pair of rows]: of their weights
  float inverse[N];           // what outputs are multiplied by
  latent::CutItems cut;
};

// Of both consumers. The merge has those from 5 on.
enum NamedBarrier { kMeet = 1, kVote = 2, kWeighed = 3 };

// One consumer.
template <auto problem, int N>
struct Consumer {
  static constexpr bool one_scale = problem.fp8 == 576;
  using Layout = WidenedShared<problem.fp8, N>;
  static constexpr int kLine = Layout::kLine;

  Layout& shared;
  const LatentArguments& with;
  const int half;     // which of the two
  float o[4][N / 2];  // O^T (256, N): 64 columns each
  float p[N / 2];     // S^T (64, N), then weights
  float inverse[2];   // of the powers of two of the thread's two tokens

  __device__ __forceinline__ Consumer(Layout& shared, const LatentArguments& with, int half)
      : shared(shared), with(with), half(half) {}

  static __device__ __forceinline__ int thread() { return thread_id() & 127; }
  static __device__ __forceinline__ int warp() { return thread() >> 5; }
  static __device__ __forceinline__ int group() { return lane_id() >> 2; }  // of four lanes
  static __device__ __forceinline__ int in_group() { return lane_id() & 3; }
  // Fragments of p and o are of rows 8 i + 2 in_group() and the one after it: pair 4 i + in_group() of all. This one's
  // sums the lane keeps, if it is the one that does.
  static __device__ __forceinline__ int own_pair() { return group() * N / 64 * 4 + in_group(); }
  static __device__ __forceinline__ bool adds() { return N == 64 || !(group() & 1); }
  __device__ __forceinline__ float2& own_sum() { return shared.sums[half * 4 + warp()][own_pair()]; }

  // Queries from the order in which they are loaded to that of the products: bytes 4 s .. 4 s + 3 of a thread's 16 are
  // columns 2 j, 2 j + 1, 2 j + 8, 2 j + 9 of the s-th product, j the thread's number among four. In fp16, but for RoPE
  // in bf16. Both consumers, a part each.
  __device__ __forceinline__ void place_queries() {
    const int thread = thread_id() & 255;
    auto word = [&](int box, int row, int byte) {
      return *reinterpret_cast<const u32*>(shared.queries.bytes + box * Layout::kRowBytes + swizzled(row, byte >> 4) +
                                           (byte & 15));
    };
    auto halves = [](u32 x) {
      const float2 of = unpack<DType::bfloat16>(x);
      return pack<DType::float16>(of.x, of.y);
    };
    constexpr int kAtOnce = N / 8;  // so that the loads of many are on their way together
#pragma unroll 1
    for (int first = thread >> 4; first < 4 * N; first += 16 * kAtOnce) {  // 128 columns of a row, by 16 threads
      const int part = thread & 15, h = part >> 3, s = part >> 1 & 3, b = part & 1;
      u32 x[kAtOnce][4];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int row = (first + 16 * n) >> 2, box = 2 * (first & 3);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int unit = 2 * j + h;  // of 16 columns
          x[n][j] = halves(word(box + (unit >> 2), row, (unit & 3) * 32 + s * 8 + b * 4));
        }
      }
      __syncwarp();
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int row = (first + 16 * n) >> 2, box = 2 * (first & 3);
        store_line(shared.queries + (box + h) * Layout::kRowBytes + swizzled(row, 2 * s + b),
                   make_uint4(x[n][0], x[n][1], x[n][2], x[n][3]));
      }
    }
#pragma unroll 1
    for (int i = thread >> 3; i < N; i += 32) {  // RoPE
      const int part = thread & 7;
      u32 x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (one_scale) {
          x[j] = halves(word(8, i, j * 32 + (part >> 1) * 8 + (part & 1) * 4));
        } else {
          x[j] = word(8, i, (2 * j + (part >> 2)) * 16 + (part >> 1 & 1) * 8 + (part & 1) * 4);
        }
      }
      __syncwarp();
      store_line(shared.queries + 8 * Layout::kRowBytes + swizzled(i, part), make_uint4(x[0], x[1], x[2], x[3]));
      __syncwarp();
    }
    async_fence();
    named_sync(kMeet, 256);
  }

  // Products at once: p += A B, B the queries from the first product's on. The A operands of as many before may be in
  // flight.
  template <DType dtype, int products>
  __device__ __forceinline__ void multiply_queries(const u32* a, int first, bool begin) {
    const u32 q = operand_k_major(shared.queries) + first / 4 * (Layout::kRowBytes >> 4) + first % 4 * 2;
    mma_fence();
#pragma unroll
    for (int i = 0; i < products; ++i) mma_few<dtype, N>(p, a + 4 * i, q + 2 * i, !begin || i > 0);
    mma_commit();
  }

  // Scores of a block to p.
  __device__ __forceinline__ void scores(int slot, int parity) {
    const u32 line = shared.tokens[slot] + (warp() * 16 + group()) * kLine;
    const int j = in_group();
    u32 a[2][16];     // of four products at once
    uint4 low, high;  // 16 bytes of the thread's two tokens
    auto load = [&](int unit) {
      low = load_shared(line + unit * 16);
      high = load_shared(line + 8 * kLine + unit * 16);
    };
    auto load_columns = [&](int box) { load(box / 2 * 8 + 2 * j + box % 2); };
    if constexpr (one_scale) {
      load(latent::kNarrowRopeAt / 16 + j);
    } else {
      u32 of_token[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 all = load_shared(line + i * 8 * kLine + latent::kScalesAt);
        constexpr u32 kPower = 0x7f800000;  // not below 2^-63, so that RoPE stays finite
        const u32 largest = max(max(all.x & kPower, all.y & kPower), max(all.z & kPower, all.w & kPower));
        inverse[i] = __uint_as_float((254u << 23) - max(largest, 64u << 23));
        of_token[i] = pack<DType::bfloat16>(inverse[i], inverse[i]);
      }
      tell_scales(slot, parity);
      load(latent::kRopeAt / 16 + 2 * j);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const u32 of[8] = {low.x, high.x, low.y, high.y, low.z, high.z, low.w, high.w};
#pragma unroll
        for (int k = 0; k < 8; ++k) a[n][k] = multiply_bfloats(of[k], of_token[k % 2]);
        n == 0 ? load(latent::kRopeAt / 16 + 2 * j + 1) : load_columns(0);
        multiply_queries<DType::bfloat16, 2>(a[n], 32 + 2 * n, n == 0);
      }
    }
    u32 by[2];                                  // the scales of 128 columns, over the token's power of two
    constexpr int kFirst = one_scale ? -1 : 0;  // RoPE first
#pragma unroll
    for (int n = kFirst; n < 8; ++n) {  // 64 columns each
      if (!one_scale || n >= kFirst + 2) mma_wait<1>();
      if (!one_scale && n % 2 == 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float scale = scale_of(slot, i, n / 2) * inverse[i];
          by[i] = pack<DType::float16>(scale, scale);
        }
      }
      const u32 x[8] = {low.x, high.x, low.y, high.y, low.z, high.z, low.w, high.w};
      u32* const to = a[n & 1];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint2 wide = halves_of_e4m3(x[i]);
        if (!one_scale) wide = {multiply_halves(wide.x, by[i % 2]), multiply_halves(wide.y, by[i % 2])};
        to[i / 2 * 4 + i % 2] = wide.x;
        to[i / 2 * 4 + i % 2 + 2] = wide.y;
      }
      if (n < 7) load_columns(n + 1);
      multiply_queries<DType::float16, 4>(to, n < 0 ? 32 : 4 * n, one_scale && n == kFirst);
    }
    mma_wait<0>();
    pin<N / 2>(p);
  }

  // Of the thread's first or second token, and 128 columns.
  __device__ __forceinline__ float scale_of(int slot, int token, int columns) const {
    return reinterpret_cast<const float*>(shared.tokens.elements[slot].bytes +
                                          (warp() * 16 + group() + 8 * token) * kLine + latent::kScalesAt)[columns];
  }

  // The scales of the own block, for weigh_values().
  __device__ __forceinline__ void tell_scales(int slot, int parity) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float scale = scale_of(slot, i, in_group()) * inverse[i];
      const int token = warp() * 16 + group() + 8 * i;
      const int at = token / 32 * 32 + token % 8 / 2 * 8 + token % 32 / 8 * 2 + token % 2;
      shared.scales[parity][half][in_group()][at] = static_cast<unsigned short>(pack<DType::float16>(scale, scale));
    }
  }

  // Scores to weights times the powers of two of tokens, in place, against the running maxima of those products, which
  // both consumers raise together. The sums are of weights alone.
  __device__ __forceinline__ void softmax(float scale_log2) {
    if constexpr (!one_scale) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const u32 exponent = 254 - (__float_as_uint(inverse[e]) >> 23);  // of the power, with its bias
        const float by = scale_log2 * __uint_as_float(exponent << 23);
        const float more = static_cast<float>(static_cast<int>(exponent) - 127);
#pragma unroll
        for (int i = 0; i < N / 8; ++i) {
          p[4 * i + 2 * e] = fmaf(p[4 * i + 2 * e], by, more);
          p[4 * i + 2 * e + 1] = fmaf(p[4 * i + 2 * e + 1], by, more);
        }
      }
      scale_log2 = 1.0f;
    }
    const auto over = [=](float x, float maximum) { return one_scale ? fmaf(x, scale_log2, -maximum) : x - maximum; };
    float2 maximum[N / 8];
    bool above = false;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      maximum[i] = shared.maxima[4 * i + in_group()];
      above |= over(fmaxf(p[4 * i], p[4 * i + 2]), maximum[i].x) > kRescaleThreshold;
      above |= over(fmaxf(p[4 * i + 1], p[4 * i + 3]), maximum[i].y) > kRescaleThreshold;
    }
    if (named_any(kVote, 256, above)) raise_maxima(maximum, scale_log2);
    float2 sums[N / 8];
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      float* const x = p + 4 * i;
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = exp2_fast(over(x[e], e & 1 ? maximum[i].y : maximum[i].x));
      if (one_scale)
        sums[i] = {x[0] + x[2], x[1] + x[3]};
      else
        sums[i] = {fmaf(x[2], inverse[1], x[0] * inverse[0]), fmaf(x[3], inverse[1], x[1] * inverse[0])};
    }
    // Of 8 lanes that share rows each keeps a share of them.
#pragma unroll
    for (int step = 16, count = N / 8; step >= 4; step /= 2, count /= 2) {
      const bool upper = lane_id() & step;
      if (count > 1) {
#pragma unroll
        for (int i = 0; i < count / 2; ++i) {
          const float2 kept = upper ? sums[i + count / 2] : sums[i], given = upper ? sums[i] : sums[i + count / 2];
          sums[i] = {kept.x + __shfl_xor_sync(~0u, given.x, step), kept.y + __shfl_xor_sync(~0u, given.y, step)};
        }
      } else {
        sums[0].x += __shfl_xor_sync(~0u, sums[0].x, step);
        sums[0].y += __shfl_xor_sync(~0u, sums[0].y, step);
      }
    }
    if (float2& sum = own_sum(); adds()) sum = {sum.x + sums[0].x, sum.y + sums[0].y};
  }

  // The warp's largest numbers of the rows of [4i] and [4i + 1], to of_warps.
  __device__ __forceinline__ void leave_largest(int i, float2 largest) {
    if (lane_id() < 4) shared.of_warps[half * 4 + warp()][4 * i + lane_id()] = largest;
  }

  __device__ __forceinline__ void raise_maxima(float2 (&maximum)[N / 8], float scale_log2) {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      leave_largest(i, largest_of_lanes({fmaxf(p[4 * i], p[4 * i + 2]), fmaxf(p[4 * i + 1], p[4 * i + 3])}));
    }
    named_sync(kMeet, 256);
    if (half == 0 && thread() < N / 2) {
      const float2 before = shared.maxima[thread()];
      float2 now = before;
#pragma unroll
      for (int w = 0; w < 8; ++w) {
        const float2 other = shared.of_warps[w][thread()];
        now = {fmaxf(now.x, other.x * scale_log2), fmaxf(now.y, other.y * scale_log2)};
      }
      shared.maxima[thread()] = now;
      shared.factors[thread()] = {rescale_factor(before.x, now.x), rescale_factor(before.y, now.y)};
    }
    named_sync(kMeet, 256);
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      maximum[i] = shared.maxima[4 * i + in_group()];
      const float2 by = shared.factors[4 * i + in_group()];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        o[m][4 * i] *= by.x;
        o[m][4 * i + 1] *= by.y;
        o[m][4 * i + 2] *= by.x;
        o[m][4 * i + 3] *= by.y;
      }
    }
    const float2 by = shared.factors[own_pair()];
    if (float2& sum = own_sum(); adds()) sum = {sum.x * by.x, sum.y * by.y};
  }

  // O^T += Z^T P^T of the even or the odd block of a pair. Frees its tokens.
  __device__ __forceinline__ void weigh_values(int slot, int block, int parity) {
    const u32 weights = operand_k_major(shared.weights[block]);
    const u32 from = shared.tokens[slot] + lane_id() * kLine + (half * 16 + warp()) * 16;
    u32 a[2][16];
    u32 raw[2][4];  // of 8 tokens each: two tokens, two columns
    uint4 scales = {};
    auto load = [&](int n) {  // 32 tokens and 128 columns
#pragma unroll
      for (int i = 0; i < 2; ++i) load_transposed(raw[i], from + n / 2 * 32 * kLine + (n % 2 * 2 + i) * 64);
      if (one_scale) return;
      scales = reinterpret_cast<const uint4*>(shared.scales[parity][block][2 * half + n % 2])[n / 2 * 4 + in_group()];
    };
    load(0);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n > 1) mma_wait<1>();
      if (n == 3) warp_arrive(shared.empty[slot][0]);
      const u32 by[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint2 x = halves_of_e4m3(__byte_perm(raw[i / 4][i % 4], 0, 0x3120));
        if (!one_scale) x = {multiply_halves(x.x, by[i % 4]), multiply_halves(x.y, by[i % 4])};
        a[n & 1][2 * i] = x.x;
        a[n & 1][2 * i + 1] = x.y;
      }
      if (n < 3) load(n + 1);
      mma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        mma_few<DType::float16, N>(o[n % 2 * 2 + i / 2], a[n & 1] + 4 * i, weights + (n / 2 * 2 + i % 2) * 2, 1);
      mma_commit();
    }
    mma_wait<0>();
    pin<2 * N>(&o[0][0]);
    warp_arrive(shared.empty[slot][1]);
  }

  __device__ __forceinline__ void attend() {
    const float cache_scale = one_scale ? *with.cache_scale : 1.0f, scale_log2 = with.scale_log2 * cache_scale;
    int slot = 0, parity = 0;          // of the next even block, of its pair
    u32 phase = 0, queries_phase = 0;  // of that slot
    auto after = [](int at) { return at + 1 == Layout::kSlots ? 0 : at + 1; };
    WorkItem item = with.own_work()[0];
#pragma unroll 1
    for (int number = 0;;) {  // of the item; an address would need two registers
      const int begin = uniform(item.begin), end = uniform(item.end), tokens = uniform(item.tokens);
      if (begin == end) break;
      const int tile_row = uniform(item.row_tile) * N;
      const int rows = uniform(item.queries) * with.heads - tile_row;  // from the tile's first row on
      const int all = problem.shards ? uniform(item.whole) : tokens;
      // So many of the tile's rows do not see a token, where causal.
      auto hidden = [&](int token) {
        return ((problem.shards ? with.shards.position(token) : token) - all) * with.heads + rows;
      };
      auto first_maxima = [&](int pair) {
        return float2{latent::first_maximum(2 * pair, rows), latent::first_maximum(2 * pair + 1, rows)};
      };
      if (adds()) own_sum() = {};
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) o[m][i] = 0.0f;
      }
      if (half == 0 && thread() < N / 2) shared.maxima[thread()] = first_maxima(thread());
      barrier_wait(shared.queries_full, queries_phase);
      queries_phase ^= 1;
      place_queries();

#pragma unroll 1
      for (int first = begin; first < end; first += 2) {
        const int block = first + half, odd = after(slot);
        const bool has_odd = first + 1 < end;
        if (half == 0 || has_odd) {
          const int at = half ? odd : slot;
          barrier_wait(shared.full[at][warp() >> 1], phase ^ (at < slot));
          scores(at, parity);
          const u32 present = shared.present[at][warp()];
          if (problem.causal && hidden(block * kTile + kTile - 1) > 0) {
            const int token = block * kTile + warp() * 16 + group();  // the thread's first; the second is 8 on
            const int of[2] = {hidden(token) - 2 * in_group(), hidden(token + 8) - 2 * in_group()};
#pragma unroll
            for (int i = 0; i < N / 2; ++i) p[i] = i / 4 * 8 + (i & 1) < of[i >> 1 & 1] ? -kInfinity : p[i];
          }
          if (present != 0xffff) {
            const bool low = present >> group() & 1, high = present >> group() >> 8 & 1;
#pragma unroll
            for (int i = 0; i < N / 2; ++i) p[i] = (i & 2 ? high : low) ? p[i] : -kInfinity;
          }
        } else {
#pragma unroll
          for (int i = 0; i < N / 2; ++i) p[i] = -kInfinity;
          inverse[0] = inverse[1] = 1.0f;
        }
        if (first + 2 >= end) warp_arrive(shared.queries_empty);
        softmax(scale_log2);
        store_rows_on_n<DType::float16, N>(shared.weights[half] + place_of_lane(warp(), lane_id()), p);
        async_fence();
        named_sync(kWeighed, 256);
        pin<2 * N>(&o[0][0]);
        weigh_values(slot, 0, parity);
        if (has_odd) {
          weigh_values(odd, 1, parity);
          slot = odd;
          phase ^= odd == 0;
        }
        slot = after(slot);
        phase ^= slot == 0;
        parity ^= 1;
      }

      // What is needed of this item, and the next one: they arrive during the exchange.
      const WorkItem* const work = with.own_work() + number++;
      const int request = work->request, first_row = work->first_row, slot_of_item = work->slot;
      item = work[1];
      finish(request, first_row, tile_row, rows, uniform(slot_of_item), cache_scale);
    }
  }

  // The end of an item: outputs, or a part of them.
  __device__ __forceinline__ void finish(int request, int first_row, int tile_row, int rows, int part,
                                         float cache_scale) {
    named_sync(kMeet, 256);
    constexpr int kFloats = N * part_row_floats(N);
    float* const of_part = with.lse_part + part * static_cast<long long>(kFloats);
    if (const int row = thread(); half == 0 && row < N) {
      float all = 0.0f;
#pragma unroll
      for (int w = 0; w < 8; ++w) all += reinterpret_cast<const float*>(shared.sums[w])[row];
      const float top = reinterpret_cast<const float*>(shared.maxima)[row];
      const float divisor = latent::divisor_of(with, part, tile_row + row, top, all);
      shared.inverse[row] = divisor == 0.0f ? 0.0f : cache_scale / divisor;
      latent::store_lse<N>(with, request, first_row, tile_row, rows, part, row, log_sum(top, all), all);
    }
    named_sync(kWeighed, 256);
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float by = shared.inverse[8 * i + 2 * in_group() + e];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          o[m][4 * i + e] *= by;
          o[m][4 * i + 2 + e] *= by;
        }
      }
    }
    if (part < 0) {
      latent::store_outputs<problem.dtype, N>(with, request, first_row, tile_row, rows, half, o,
                                              [](int) { return 1.0f; });
      return;
    }
#pragma unroll
    for (int i = 0; i < N / 8; ++i) leave_largest(i, largest_of_columns<4>(o, i));
    named_sync(kMeet, 256);
    float2 stores[N / 8];
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      float2 most = shared.of_warps[half * 4 + warp()][4 * i + in_group()];
      if (N == 64) {  // a piece is the columns of all warps
#pragma unroll
        for (int w = 1; w < 4; ++w) {
          const float2 other = shared.of_warps[half * 4 + (warp() ^ w)][4 * i + in_group()];
          most = {fmaxf(most.x, other.x), fmaxf(most.y, other.y)};
        }
      }
      float* const loads = of_part + (1 + (N == 64 ? half : half * 4 + warp())) * N + 8 * i + 2 * lane_id();
      stores[i] = latent::scale_part<1>(most, loads, lane_id() < 4 && (N < 64 || warp() == 0));
    }
    latent::store_part<N>(with, part, half, o, [&](int i) { return stores[i]; });
  }
};

// Query boxes: tiling.rows rows and 2 groups of qc_map, 1 of qpe_map. The maps of the cache are not used.
template <LatentProblem problem, FlashMlaV3Tiling tiling>
__global__ void __launch_bounds__(kFlashMlaV3Threads, 1) flash_mla_v3(const __grid_constant__ LatentArguments with) {
  static_assert(problem.k == 512 && problem.p == 64, "the layouts are made for 512 latent and 64 RoPE columns");
  static_assert(problem.fp8 && problem.page == 1 && problem.dtype == DType::bfloat16, "tokens of fp8 are gathered");
  static_assert(problem.tokens_first && !problem.after, "what the masks are made for");
  static_assert(tiling.rows == 32 || tiling.rows == 64, "tiles of 32 or 64 rows");
  using Layout = WidenedShared<problem.fp8, tiling.rows>;
  static_assert(sizeof(Layout) == flash_mla_v3_shared_bytes(problem.fp8, tiling.rows));
  static_assert(flash_mla_v3_shared_bytes(problem.fp8, tiling.rows) <= kMaxSharedBytes);
  extern __shared__ __align__(1024) unsigned char dynamic[];
  Layout& shared = *reinterpret_cast<Layout*>(dynamic);
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 7), 0);
  latent::ask_for_code();
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Layout::kSlots; ++slot) {
      for (int tokens = 0; tokens < 2; ++tokens) {
        barrier_init(shared.full[slot][tokens], 64 + 2);
        barrier_init(shared.empty[slot][tokens], 8);
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
  __syncthreads();
  wait_for_previous();  // if launched programmatically, all before this ran beside the end of the previous kernel
  launch_next();
  if (role == 2) {
    give_registers<24>();
    const WorkItem* __restrict__ work = with.own_work();
    latent::copy_tokens<problem, tiling.rows>(shared, work, with);
    latent::watch_tiles(shared.cut, with);
    return;
  }
  take_registers<240>();
  Consumer<problem, tiling.rows>(shared, with, uniform(role)).attend();
  using Tile = latent::RowsOnNPairs<tiling.rows>;
  using Scratch = latent::MergeScratch<Tile>;  // in the place of queries, weights and tokens
  static_assert(sizeof(Scratch) <= sizeof(shared.queries) + sizeof(shared.weights) + sizeof(shared.tokens));
  latent::merge_tiles<problem.dtype, Tile>(with, shared.cut, *reinterpret_cast<Scratch*>(shared.queries.bytes));
}

}  // namespace hypermla::cute
