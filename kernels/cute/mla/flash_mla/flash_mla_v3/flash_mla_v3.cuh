// FlashMLA for Hopper over tokens in FP8 and queries in 16 bits. Tokens lie in shared memory as they lie in the cache,
// and the warps that multiply them widen them in registers, where they are the A operand: fp16, or bf16 where they are.
//
// Rows: all heads share the latents, so the queries of a request are rows of one matrix, all heads' (LatentArguments).
// A thread block takes work items (latent/work.h): N = 32 or 64 rows against a range of token blocks of 64. The rows
// are on the N side of wgmma, tokens and latent columns on the M side, as in flash_mla_v1.
//
// Roles (512 threads):
//   warpgroups 0, 1   values: columns 0..255 or 256..511 of the output
//   warpgroup 2       producer: a thread for each token starts its copy, wherever it lies; one loads queries
//   warpgroup 3       scores and weights of all blocks
//
// Scores: S^T (64 tokens, N) = Z Q^T of a block, then the softmax down the tokens. The running maxima rise only when
// some score exceeds its own by more than kRescaleThreshold: the warps vote on that. The weights P^T go to the values
// through shared memory: O^T (256 of 512, N) += Z^T P^T. Values are held back until the next block's scores are done,
// so that they run beside its softmax, where the tensor cores would rest, and not beside its products.
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
// grid = any, by the work list; 512 threads, flash_mla_v3_shared_bytes(bytes of a token, N) of dynamic shared memory.
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
  static constexpr int kSlots = flash_mla_v3_slots(N), kHalves = 2 * kSlots;

  Bytes<9 * kRowBytes> queries;
  Array<Bytes<kRowBytes>, 2> weights;               // of every second block
  Array<Bytes<kTile / 2 * kLine>, kHalves> tokens;  // two halves are a slot
  Barriers<kHalves> full, empty;
  Barriers<2> scored;                       // of every second block that is not the first of its item
  Barriers<2> weights_full, weights_empty;  // of every second block
  Barrier queries_full, queries_empty;
  Barriers<2> sums_full, sums_empty;  // of every second item
  u32 present[kHalves][2];            // [half block][16 tokens]: bit r says whether token r is there
  // Of every fourth block, since values are at most two blocks behind scores. Scales over their token's power of two,
  // as fp16: [block][128 columns], then the tokens 32 k + 8 i + 2 j + e of the block at [k][j][i][e].
  alignas(16) unsigned short scales[4][4][kTile];
  volatile int raised[4];        // whether maxima rose
  float2 factors[4][N / 2];      // [block][pair of rows]: of sums and outputs, when maxima rise
  float2 maxima[N / 2];          // [pair of rows]
  float2 of_warps[4][N / 2];     // [warp of the scores][pair of rows]: candidates for maxima
  float2 sums[4][N / 2];         // [warp of the scores][pair of rows]: of their weights
  float all[2][N], top[2][N];    // [item][row]: the sum of the weights, the running maximum
  alignas(16) u32 powers[2][4];  // [item][warp of the scores]: the largest of its tokens' powers of two, as bits
  float inverse[2][2][N];        // [item][half][row]: what outputs are multiplied by
  latent::CutItems cut;
};

// The merge has those from 5 on. Of the values: one of each warpgroup.
enum NamedBarrier { kScores = 1, kVote = 2, kValues = 3 };

// What all warpgroups that multiply share.
template <auto problem, int N>
struct Fragments {
  static constexpr bool one_scale = problem.fp8 == 576;
  using Layout = WidenedShared<problem.fp8, N>;
  static constexpr int kLine = Layout::kLine;

  Layout& shared;
  const LatentArguments& with;

  static __device__ __forceinline__ int thread() { return thread_id() & 127; }
  static __device__ __forceinline__ int warp() { return thread() >> 5; }
  static __device__ __forceinline__ int group() { return lane_id() >> 2; }  // of four lanes
  static __device__ __forceinline__ int in_group() { return lane_id() & 3; }
};

// The warpgroup of the scores.
template <auto problem, int N>
struct Scores : Fragments<problem, N> {
  using Base = Fragments<problem, N>;
  using Base::one_scale, Base::kLine, Base::shared, Base::with;
  using typename Base::Layout;

  // Read once: a special register takes long. A shuffle hides where it comes from, else a compiler reads it anew.
  int own_thread = __shfl_sync(~0u, thread_id() & 127, cute::lane_id());
  __device__ __forceinline__ int thread() const { return own_thread; }
  __device__ __forceinline__ int lane_id() const { return own_thread & 31; }
  __device__ __forceinline__ int warp() const { return own_thread >> 5; }
  __device__ __forceinline__ int group() const { return lane_id() >> 2; }
  __device__ __forceinline__ int in_group() const { return own_thread & 3; }

  float p[N / 2];      // S^T (64, N), then weights
  float inverse[2];    // of the powers of two of the thread's two tokens
  u32 power = 0;       // the largest of those of the item, as bits
  float2 sums[N / 8];  // of the weights of the thread's tokens, by pairs of rows

  __device__ __forceinline__ Scores(Layout& shared, const LatentArguments& with) : Base{shared, with} {}

  // Fragments of p are of rows 8 i + 2 in_group() and the one after it: pair 4 i + in_group() of all. This one's sums
  // the lane keeps, if it is the one that does.
  __device__ __forceinline__ int own_pair() const { return group() * N / 64 * 4 + in_group(); }
  __device__ __forceinline__ bool adds() const { return N == 64 || !(group() & 1); }
  __device__ __forceinline__ float2& own_sum() { return shared.sums[warp()][own_pair()]; }

  // Queries from the order in which they are loaded to that of the products: bytes 4 s .. 4 s + 3 of a thread's 16 are
  // columns 2 j, 2 j + 1, 2 j + 8, 2 j + 9 of the s-th product, j the thread's number among four. In fp16, but for RoPE
  // in bf16.
  __device__ __forceinline__ void place_queries() {
    forget_origin(own_thread);
    const int thread = own_thread;
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
    for (int first = thread >> 4; first < 4 * N; first += 8 * kAtOnce) {  // 128 columns of a row, by 16 threads
      const int part = thread & 15, h = part >> 3, s = part >> 1 & 3, b = part & 1;
      u32 x[kAtOnce][4];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int row = (first + 8 * n) >> 2, box = 2 * (first & 3);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int unit = 2 * j + h;  // of 16 columns
          x[n][j] = halves(word(box + (unit >> 2), row, (unit & 3) * 32 + s * 8 + b * 4));
        }
      }
      __syncwarp();
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int row = (first + 8 * n) >> 2, box = 2 * (first & 3);
        store_line(shared.queries + (box + h) * Layout::kRowBytes + swizzled(row, 2 * s + b),
                   make_uint4(x[n][0], x[n][1], x[n][2], x[n][3]));
      }
    }
#pragma unroll 1
    for (int i = thread >> 3; i < N; i += 16) {  // RoPE
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
    named_sync(kScores, 128);
  }

  // A product: p += A B, B that many products into the queries. A warp that multiplies from registers waits until the
  // product before has read its operand, so each is issued as soon as its operand is widened: beside the one before.
  template <DType dtype>
  __device__ __forceinline__ void multiply_queries(const u32 (&a)[4], int product, bool begin) {
    mma_fence();
    mma_few<dtype, N>(p, a, operand_k_major(shared.queries) + product / 4 * (Layout::kRowBytes >> 4) + product % 4 * 2,
                      !begin);
    mma_commit();
  }

  // Scores of a block to p.
  __device__ __forceinline__ void score(int slot, int number) {
    const u32 line = shared.tokens[2 * slot] + (warp() * 16 + group()) * kLine;
    const int j = in_group();
    u32 a[4][4];            // of products in flight
    uint4 low[3], high[3];  // 16 bytes of the thread's two tokens, and the next ones
    uint2 of_columns[2];    // of the thread's tokens: scales of 128 columns each, over the token's power of two
    const u32 units = line + 2 * j * 16;
    auto load = [&](int to, u32 from) {
      low[to] = load_shared(from);
      high[to] = load_shared(from + 8 * kLine);
    };
    auto load_columns = [&](int box) { load(box % 3, units + (box / 2 * 8 + box % 2) * 16); };
    if constexpr (one_scale) {
      load(2, line + j * 16 + latent::kNarrowRopeAt);
      load_columns(0);
      load_columns(1);
    } else {
      load(0, units + latent::kRopeAt);
      load(1, units + latent::kRopeAt + 16);
      u32 of_token[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 all = load_shared(line + i * 8 * kLine + latent::kScalesAt);
        constexpr u32 kPower = 0x7f800000;  // not below 2^-63, so that RoPE stays finite
        const u32 largest =
            max(max(max(all.x & kPower, all.y & kPower), max(all.z & kPower, all.w & kPower)), 64u << 23);
        power = max(power, largest);
        inverse[i] = __uint_as_float((254u << 23) - largest);
        of_token[i] = pack<DType::bfloat16>(inverse[i], inverse[i]);
        const auto pair = [&](u32 a, u32 b) {
          return pack<DType::float16>(__uint_as_float(a) * inverse[i], __uint_as_float(b) * inverse[i]);
        };
        of_columns[i] = {pair(all.x, all.y), pair(all.z, all.w)};
      }
      load_columns(2);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const u32 of[8] = {low[n].x, high[n].x, low[n].y, high[n].y, low[n].z, high[n].z, low[n].w, high[n].w};
        load_columns(n);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          u32(&to)[4] = a[2 * n + i];
#pragma unroll
          for (int k = 0; k < 4; ++k) to[k] = multiply_bfloats(of[4 * i + k], of_token[k % 2]);
          multiply_queries<DType::bfloat16>(to, 32 + 2 * n + i, n + i == 0);
        }
      }
    }
    constexpr int kFirst = one_scale ? -1 : 0;  // RoPE first
#pragma unroll
    for (int n = kFirst; n < 8; ++n) {  // 64 columns each
      u32 by[2];
#pragma unroll
      for (int i = 0; i < 2 && !one_scale; ++i)
        by[i] = __byte_perm(n < 4 ? of_columns[i].x : of_columns[i].y, 0, n / 2 % 2 ? 0x3232 : 0x1010);
      const uint4 &x = low[(n + 3) % 3], &y = high[(n + 3) % 3];
      const u32 words[4][2] = {{x.x, y.x}, {x.y, y.y}, {x.z, y.z}, {x.w, y.w}};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!one_scale || n > kFirst) mma_wait<3>();
        u32(&to)[4] = a[i];
#pragma unroll
        for (int token = 0; token < 2; ++token) {
          uint2 wide = halves_of_e4m3(words[i][token]);
          if (!one_scale) wide = {multiply_halves(wide.x, by[token]), multiply_halves(wide.y, by[token])};
          to[token] = wide.x;
          to[token + 2] = wide.y;
        }
        if (!one_scale && n == 3 && i == 0) tell_scales(of_columns, number);
        if (i == 3 && n < 5) load_columns(n + 3);
        multiply_queries<DType::float16>(to, (n < 0 ? 32 : 4 * n) + i, one_scale && n == kFirst && i == 0);
      }
    }
    mma_wait<0>();
    pin<N / 2>(p);
  }

  // The scales of a block, for the values.
  __device__ __forceinline__ void tell_scales(const uint2 (&of_columns)[2], int number) {
    // Of the thread's first token; the other one's are 2 on.
    unsigned short* const to =
        &shared.scales[number & 3][in_group()][warp() / 2 * 32 + group() / 2 * 8 + warp() % 2 * 4 + group() % 2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 two = in_group() & 2 ? of_columns[i].y : of_columns[i].x;
      to[2 * i] = static_cast<unsigned short>(in_group() & 1 ? two >> 16 : two);
    }
  }

  // Scores to weights times the powers of two of tokens, in place, against the running maxima of those products. The
  // sums are of weights alone.
  __device__ __forceinline__ void softmax(float scale_log2, int number) {
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
    const bool raise = named_any(kVote, 128, above);
    if (raise) raise_maxima(maximum, scale_log2, number);
    if (thread() == 0) shared.raised[number & 3] = raise;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      float* const x = p + 4 * i;
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = exp2_fast(over(x[e], e & 1 ? maximum[i].y : maximum[i].x));
      if (one_scale)
        sums[i] = {sums[i].x + (x[0] + x[2]), sums[i].y + (x[1] + x[3])};
      else
        sums[i] = {fmaf(x[2], inverse[1], fmaf(x[0], inverse[0], sums[i].x)),
                   fmaf(x[3], inverse[1], fmaf(x[1], inverse[0], sums[i].y))};
    }
  }

  // The sums of the warp's tokens, to shared memory.
  __device__ __forceinline__ void leave_sums() {
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
    if (adds()) own_sum() = sums[0];
  }

  __device__ __forceinline__ void raise_maxima(float2 (&maximum)[N / 8], float scale_log2, int number) {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const float2 largest = largest_of_lanes({fmaxf(p[4 * i], p[4 * i + 2]), fmaxf(p[4 * i + 1], p[4 * i + 3])});
      if (lane_id() < 4) shared.of_warps[warp()][4 * i + lane_id()] = largest;
    }
    named_sync(kScores, 128);
    if (thread() < N / 2) {
      const float2 before = shared.maxima[thread()];
      float2 now = before;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 other = shared.of_warps[w][thread()];
        now = {fmaxf(now.x, other.x * scale_log2), fmaxf(now.y, other.y * scale_log2)};
      }
      shared.maxima[thread()] = now;
      shared.factors[number & 3][thread()] = {rescale_factor(before.x, now.x), rescale_factor(before.y, now.y)};
    }
    named_sync(kScores, 128);
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      maximum[i] = shared.maxima[4 * i + in_group()];
      const float2 by = shared.factors[number & 3][4 * i + in_group()];
      sums[i] = {sums[i].x * by.x, sums[i].y * by.y};
    }
  }

  __device__ __forceinline__ void attend() {
    const float scale_log2 = latent::scale_log2_of(with, one_scale ? *with.cache_scale : 1.0f);
    int slot = 0, number = 0;  // of the next block
    int later = 0;             // blocks so far that are not the first of their item
    u32 phase = 0;             // of that slot
    WorkItem item = with.own_work()[0];
#pragma unroll 1
    for (int place = 0;; ++place) {  // of the item
      const int begin = uniform(item.begin), end = uniform(item.end), tokens = uniform(item.tokens);
      if (begin == end) break;
      const int tile_row = uniform(item.row_tile) * N;
      const int rows = uniform(item.queries) * with.heads - tile_row;  // from the tile's first row on
      const int all = problem.shards ? uniform(item.whole) : tokens;
      // So many of the tile's rows do not see a token, where causal.
      auto hidden = [&](int token) {
        return ((problem.shards ? with.shards.position(token) : token) - all) * with.heads + rows;
      };
#pragma unroll
      for (int i = 0; i < N / 8; ++i) sums[i] = {};
      if (const int pair = thread(); pair < N / 2)
        shared.maxima[pair] = {latent::first_maximum(2 * pair, rows), latent::first_maximum(2 * pair + 1, rows)};
      barrier_wait(shared.queries_full, place & 1);
      place_queries();

#pragma unroll 1
      for (int block = begin; block < end; ++block) {
        barrier_wait(shared.full[2 * slot + (warp() >> 1)], phase);
        score(slot, number);
        if (block > begin) {
          if (lane_id() == 0) barrier_arrive(shared.scored[later & 1]);
          ++later;
        }
        const u32 present = shared.present[2 * slot + (warp() >> 1)][warp() & 1];
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
        if (block + 1 == end) warp_arrive(shared.queries_empty);
        softmax(scale_log2, number);
        const int of = number & 1;
        barrier_wait(shared.weights_empty[of], (number >> 1 & 1) ^ 1);
        store_rows_on_n<DType::float16, N>(shared.weights[of] + place_of_lane(warp(), lane_id()), p);
        async_fence();
        barrier_arrive(shared.weights_full[of]);
        ++number;
        if (++slot == Layout::kSlots) {
          slot = 0;
          phase ^= 1;
        }
      }

      item = with.own_work()[place + 1];
      const int of = place & 1;
      leave_sums();
      barrier_wait(shared.sums_empty[of], (place >> 1 & 1) ^ 1);
      named_sync(kScores, 128);
      if (const int row = thread(); row < N) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < 4; ++w) sum += reinterpret_cast<const float*>(shared.sums[w])[row];
        shared.all[of][row] = sum;
        shared.top[of][row] = reinterpret_cast<const float*>(shared.maxima)[row];
      }
      power = __reduce_max_sync(~0u, power);
      if (lane_id() == 0) shared.powers[of][warp()] = power;
      power = 0;
      barrier_arrive(shared.sums_full[of]);
      named_sync(kScores, 128);  // sums and maxima are read
    }
  }
};

// A warpgroup of the values.
template <auto problem, int N>
struct Values : Fragments<problem, N> {
  using Base = Fragments<problem, N>;
  using Base::one_scale, Base::kLine, Base::shared, Base::with;
  using Base::thread, Base::warp, Base::group, Base::in_group;
  using typename Base::Layout;

  const int half;     // of the columns
  float o[4][N / 2];  // O^T (256, N): 64 columns each

  __device__ __forceinline__ Values(Layout& shared, const LatentArguments& with, int half)
      : Base{shared, with}, half(half) {}

  // O^T += Z^T P^T of a block. Frees its tokens.
  __device__ __forceinline__ void weigh_values(int slot, int number) {
    const u32 weights = operand_k_major(shared.weights[number & 1]);
    const u32 from = shared.tokens[2 * slot] + lane_id() * kLine + (half * 16 + warp()) * 16;
    u32 a[2][8];
    u32 raw[4];  // of 8 tokens each: two tokens, two columns
    uint4 scales = {};
    auto load = [&](int n) {  // 32 tokens and 64 columns
      load_transposed(raw, from + n / 4 * 32 * kLine + n % 4 * 64);
      if (one_scale || n % 2) return;
      scales = reinterpret_cast<const uint4*>(shared.scales[number & 3][2 * half + n / 2 % 2])[n / 4 * 4 + in_group()];
    };
    load(0);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (n > 1) mma_wait<1>();
      if (n == 5) warp_arrive(shared.empty[2 * slot]);
      u32* const to = a[n % 2];
      const u32 by[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint2 x = halves_of_e4m3(__byte_perm(raw[i], 0, 0x3120));
        if (!one_scale) x = {multiply_halves(x.x, by[i]), multiply_halves(x.y, by[i])};
        to[2 * i] = x.x;
        to[2 * i + 1] = x.y;
      }
      if (n < 7) load(n + 1);
      mma_fence();
#pragma unroll
      for (int i = 0; i < 2; ++i) mma_few<DType::float16, N>(o[n % 4], to + 4 * i, weights + (n / 4 * 2 + i) * 2, 1);
      mma_commit();
    }
    mma_wait<0>();
    pin<2 * N>(&o[0][0]);
    warp_arrive(shared.empty[2 * slot + 1]);
  }

  // Outputs, by what the scores have said.
  __device__ __forceinline__ void rescale(int number) {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const float2 by = shared.factors[number & 3][4 * i + in_group()];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        o[m][4 * i] *= by.x;
        o[m][4 * i + 1] *= by.y;
        o[m][4 * i + 2] *= by.x;
        o[m][4 * i + 3] *= by.y;
      }
    }
  }

  __device__ __forceinline__ void attend() {
    int slot = 0, number = 0;  // of the next block
    int later = 0;             // of the next block that is not the first of its item
    WorkItem item = with.own_work()[0];
#pragma unroll 1
    for (int place = 0;; ++place) {  // of the item
      const int begin = uniform(item.begin), end = uniform(item.end);
      if (begin == end) break;
      const int tile_row = uniform(item.row_tile) * N;
      const int rows = uniform(item.queries) * with.heads - tile_row;  // from the tile's first row on
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) o[m][i] = 0.0f;
      }
#pragma unroll 1
      for (int block = begin; block < end; ++block) {
        barrier_wait(shared.weights_full[number & 1], number >> 1 & 1);
        if (block + 1 < end) {
          barrier_wait(shared.scored[later & 1], later >> 1 & 1);
          ++later;
        }
        if (uniform(shared.raised[number & 3])) rescale(number);
        pin<2 * N>(&o[0][0]);
        weigh_values(slot, number);
        __syncwarp();  // all lanes have read scales and factors
        warp_arrive(shared.weights_empty[number & 1]);
        ++number;
        slot = slot + 1 == Layout::kSlots ? 0 : slot + 1;
      }

      // What is needed of this item, and the next one: they arrive during the exchange.
      const WorkItem* const work = with.own_work() + place;
      const int request = work->request, first_row = work->first_row, slot_of_item = work->slot;
      item = work[1];
      finish(place, request, first_row, tile_row, rows, uniform(slot_of_item));
    }
  }

  // The end of an item: outputs, or a part of them.
  __device__ __forceinline__ void finish(int place, int request, int first_row, int tile_row, int rows, int part) {
    const int of = place & 1;
    barrier_wait(shared.sums_full[of], place >> 1 & 1);
    // A part's normalised values, over twice the largest power of two of its tokens' scales, do not exceed 448.
    float store = one_scale ? *with.cache_scale : 1.0f;
    if (part >= 0) {
      const uint4 powers = load_shared(shared_address(shared.powers[of]));
      const u32 largest = max(max(powers.x, powers.y), max(powers.z, powers.w));
      const u32 power = min(largest, 252u << 23) + (1u << 23);
      store = one_scale ? latent::kPartScale : latent::kPartScale * __uint_as_float((254u << 23) - power);
      const float load =
          one_scale ? *with.cache_scale / latent::kPartScale : __uint_as_float(power) / latent::kPartScale;
      constexpr int kFloats = N * part_row_floats(N);
      if (half == 0 && thread() < N) with.lse_part[part * static_cast<long long>(kFloats) + N + thread()] = load;
    }
    if (const int row = thread(); row < N) {
      const float all = shared.all[of][row], top = shared.top[of][row];
      const float divisor = latent::divisor_of(with, part, tile_row + row, top, all);
      shared.inverse[of][half][row] = divisor == 0.0f ? 0.0f : store / divisor;
      if (half == 0) latent::store_lse<N>(with, request, first_row, tile_row, rows, part, row, log_sum(top, all), all);
    }
    named_sync(kValues + half, 128);
    warp_arrive(shared.sums_empty[of]);
    if (part < 0) {
      latent::store_outputs<problem.dtype, N>(with, request, first_row, tile_row, rows, half, o,
                                              [&](int row) { return shared.inverse[of][half][row]; });
    } else {
      latent::store_part<N>(with, part, half, o, [&](int i) {
        const int row = 8 * i + 2 * in_group();
        return float2{shared.inverse[of][half][row], shared.inverse[of][half][row + 1]};
      });
    }
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
    for (int half = 0; half < Layout::kHalves; ++half) {
      barrier_init(shared.full[half], 64 + 2);
      barrier_init(shared.empty[half], 8);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared.scored[i], 4);
      barrier_init(shared.weights_full[i], 128);
      barrier_init(shared.weights_empty[i], 8);
      barrier_init(shared.sums_full[i], 128);
      barrier_init(shared.sums_empty[i], 8);
    }
    barrier_init(shared.queries_full, 1);
    barrier_init(shared.queries_empty, 4);
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
    give_registers<32>();
    const WorkItem* __restrict__ work = with.own_work();
    latent::copy_tokens<problem, tiling.rows>(shared, work, with);
    latent::watch_tiles(shared.cut, with);
    return;
  }
  if (role == 3) {
    give_registers<112>();
    Scores<problem, tiling.rows>(shared, with).attend();
    return;
  }
  take_registers<184>();
  Values<problem, tiling.rows>(shared, with, uniform(role)).attend();
  using Tile = latent::RowsOnNPairs<tiling.rows>;
  using Scratch = latent::MergeScratch<Tile>;  // in the place of queries, weights and tokens
  static_assert(sizeof(Scratch) <= sizeof(shared.queries) + sizeof(shared.weights) + sizeof(shared.tokens));
  latent::merge_tiles<problem.dtype, Tile>(with, shared.cut, *reinterpret_cast<Scratch*>(shared.queries.bytes));
}

}  // namespace hypermla::cute
