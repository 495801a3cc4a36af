// Attention over decompressed keys and values for few queries, the part of flash_attention_v1.cuh that one thread block
// does: its teams and its loads of tokens.
#pragma once

#include "hopper/constants.h"
#include "hopper/fragments.h"
#include "hopper/mbarrier.h"
#include "hopper/tma.h"
#include "hopper/warpgroup.h"
#include "hopper/wgmma.h"

namespace hypermla::cute::decompressed {

inline constexpr int kTile = 64;          // tokens of a block, columns of a box
inline constexpr int kTeams = 2;  // and heads of an item
inline constexpr int kItems = 2;  // places for drawn items

template <int N>
struct SharedPlan {
  static constexpr bool kSwapped = N < 64;                      // rows on the N side
  static constexpr int kRing = N == 16 ? 6 : 5;                 // places of a team's ring
  static constexpr int kRopes = N == 16 ? 2 : N == 32 ? 4 : 5;  // places for RoPE boxes
  static constexpr int kQueries = kSwapped ? kTeams : 1;        // places for queries
  static constexpr u32 kPairBytes = 2 * kBoxBytes;
  static constexpr u32 kRowBytes = N * 128;  // a box of N rows
  static constexpr u32 queries = 0;
  static constexpr u32 weights = queries + kQueries * 3 * kRowBytes;  // [team]
  static constexpr u32 ropes = weights + (kSwapped ? kTeams * kRowBytes : 0);
  static constexpr u32 ring = ropes + kRopes * kBoxBytes;  // [team]
  static constexpr u32 barriers = ring + kTeams * kRing * kPairBytes;
  static constexpr u32 items = barriers + 384;          // [kItems]
  static constexpr u32 of_warps = items + kItems * 32;  // [team][warp][row] float: maxima, in the end sums
  static constexpr u32 bytes = of_warps + (kSwapped ? kTeams * 4 * N * 4 : 0);
  static_assert(kRowBytes % 1024 == 0 && bytes <= kMaxSharedBytes);
  static_assert((2 * kTeams * (kRing + 1) + 2 * kRopes + 2 * kItems) * 8 <= 384);

  u32 base;
  __device__ u32 query(int team) const { return base + queries + team % kQueries * 3 * kRowBytes; }
  __device__ u32 rope(int place) const { return base + ropes + place * kBoxBytes; }
  __device__ u32 pair(int team, int place) const { return base + ring + (team * kRing + place) * kPairBytes; }
  __device__ u32 full(int team, int place) const { return base + barriers + (team * kRing + place) * 8; }
  __device__ u32 empty(int team, int place) const { return full(kTeams + team, place); }
  __device__ u32 rope_full(int place) const { return full(2 * kTeams, place); }
  __device__ u32 rope_empty(int place) const { return rope_full(kRopes + place); }
  __device__ u32 query_full(int team) const { return rope_full(2 * kRopes + team); }
  __device__ u32 query_empty(int team) const { return query_full(kTeams + team % kQueries); }
  __device__ u32 item_full(int place) const { return query_full(2 * kTeams + place); }
  __device__ u32 item_empty(int place) const { return item_full(kItems + place); }
};

// Heads of a request, one for each team, and a tile of their rows.
struct Item {
  int request;  // -1: no more items
  int head;     // the first of them
  int row;      // first query
  int tokens;   // length of the request
  int blocks;   // of tokens that some query sees
  int unused[3];
};

template <int N>
struct ItemOrder {
  int b, h, s, t;
  const int* __restrict__ lengths;

  __device__ int tiles() const { return (s + N - 1) / N; }
  __device__ int groups() const { return (h + kTeams - 1) / kTeams; }
  __device__ int items() const { return b * groups() * tiles(); }
  // Items of the same keys come one after the other.
  template <bool causal>
  __device__ Item at(int index) const {
    if (index >= items()) return {-1, 0, 0, 0, 0, {}};
    const int row = index % tiles() * N, group = index / tiles() % groups(), request = index / tiles() / groups();
    const int tokens = lengths ? lengths[request] : t;
    const int seen = causal ? tokens - s + min(row + N, s) : tokens;
    return {request, kTeams * group, row, tokens, (max(seen, 0) + kTile - 1) / kTile, {}};
  }
};

// Goes round the places of a ring; the phase is the parity that a consumer waits for.
template <int places>
struct Ring {
  int place = 0;
  u32 phase = 0;
  __device__ __forceinline__ void next() {
    phase ^= place == places - 1;
    place = place == places - 1 ? 0 : place + 1;
  }
};

// The items, one after the other, as all but the drawing thread see them.
template <int N>
struct Items {
  const unsigned char* shared;
  SharedPlan<N> plan;
  Ring<kItems> ring = {};

  __device__ __forceinline__ Item next() {
    barrier_wait(plan.item_full(ring.place), ring.phase);
    const Item item = *reinterpret_cast<const Item*>(shared + SharedPlan<N>::items + ring.place * 32);
    barrier_arrive(plan.item_empty(ring.place));
    ring.next();
    return item;
  }
};

// Outputs [B * H, S, 128], boxes of them by o_map.
struct Output {
  const TensorMap& o_map;
  unsigned short* __restrict__ o;
  float* __restrict__ lse;
  int s;

  static constexpr int row_stride() { return 128; }
  __device__ unsigned short* rows_at(int head, int row) const {
    return o + (static_cast<long long>(head) * s + row) * 128;
  }
  __device__ void store_box(u32 staging, int row, int head) const {
    tma_store(o_map, staging, row, 0, head);
    tma_store_read_wait();
  }
};

// Named barriers of a team; by number, since both teams run the same code.
enum NamedBarrier { kTeam = 1, kVote = 3 };

// What both kinds of teams share: the places of the token block at work, and what is done to boxes.
template <int N>
struct Team {
  using Plan = SharedPlan<N>;
  const Plan plan;
  const int team;
  Ring<Plan::kRing> ring = {};  // at the keys
  Ring<Plan::kRopes> rope = {};

  // Of the keys (0) and values (1) of the block at work, and of the keys of the block after it (2).
  __device__ __forceinline__ int place(int i) const {
    const int sum = ring.place + i;
    return sum >= Plan::kRing ? sum - Plan::kRing : sum;
  }
  __device__ __forceinline__ void wait(int i) const {
    barrier_wait(plan.full(team, place(i)), ring.phase ^ (ring.place + i >= Plan::kRing));
  }
  __device__ __forceinline__ void release(u32 barrier) const {
    if (lane_id() == 0) barrier_arrive(barrier);
  }
  __device__ __forceinline__ void release_pair(int i) const { release(plan.empty(team, place(i))); }
  __device__ __forceinline__ void next_block() {
    const int next = ring.place + 2;
    ring.phase ^= next >= Plan::kRing;
    ring.place = next >= Plan::kRing ? next - Plan::kRing : next;
  }
  // Values behind the end of the request, from token `first` of the block on, may be anything: their weights are 0, but
  // 0 * NaN would spoil the output. The team meets before it multiplies by them.
  __device__ __forceinline__ void zero_values(int first) const {
    const int thread = thread_id() & 127;
#pragma unroll 1
    for (int r = first + (thread >> 3); r < kTile; r += 16) {
      store_zeros(plan.pair(team, place(1)) + r * 128 + (thread & 7) * 16);
      store_zeros(plan.pair(team, place(1)) + kBoxBytes + r * 128 + (thread & 7) * 16);
    }
    async_fence();
  }
};

// A tile of which no row sees a token.
__device__ __forceinline__ void write_nothing(unsigned short* o, int row_stride, float* lse, int rows) {
  const int thread = thread_id() & 127;
  for (int i = thread; i < rows * 16; i += 128)
    reinterpret_cast<uint4*>(o + i / 16 * row_stride)[i % 16] = make_uint4(0, 0, 0, 0);
  for (int i = thread; i < rows; i += 128) lse[i] = -kInfinity;
}

// A team with rows on the N side: the scores of a block beside the products of the one before, then the softmax.
// Thread t holds, of scores and outputs, tokens or columns r and r + 8 (wgmma.h) of rows 8i + 2 * (t % 4) and the one
// after it.
template <auto problem, auto tiling>
__device__ __forceinline__ void attend_swapped(int number, unsigned char* shared, const SharedPlan<tiling.rows> plan,
                                               Items<tiling.rows> items, const Output output, float scale_log2, int h,
                                               int s) {
  constexpr DType dtype = problem.dtype;
  constexpr int N = tiling.rows, kOctets = N / 8;
  using Plan = SharedPlan<tiling.rows>;
  const int thread = thread_id() & 127, warp = thread >> 5, lane = lane_id();
  const int token_in_block = warp * 16 + (lane >> 2);  // of this thread's first token; the second is 8 on
  const int row = 2 * (lane & 3);                      // of this thread's first row of an octet; the second is 1 on

  float o[2][N / 2];             // (128, N)
  float p[N / 2] = {};           // (64, N) scores, then weights
  float top[N / 4], sum[N / 4];  // of rows 8i + row, 8i + row + 1 at [2i], [2i + 1]; maxima in units of log2
  Team<tiling.rows> team{plan, number};
  u32 query_phase = 0;

  const u32 query = operand_k_major(plan.query(number));
  const u32 key = operand_k_major(plan.pair(number, 0));
  const u32 value = operand_mn_major(plan.pair(number, 0));
  const u32 weights = plan.base + Plan::weights + number * Plan::kRowBytes;  // (N, 64)
  // Where this lane stores a transposed fragment in a box of N rows: row 8 (lane / 16) + lane % 8 of two octets.
  const u32 transposed = ((lane >> 4) * 8 + (lane & 7)) * 128 + (((2 * warp + (lane >> 3 & 1)) ^ (lane & 7)) << 4);
  float2* const of_warps = reinterpret_cast<float2*>(shared + Plan::of_warps) + number * 4 * (N / 2);

  auto store_fragment = [&](u32 box, const float* d) {  // (64, N) transposed: (N, 64), 16-bit
#pragma unroll
    for (int i = 0; i < 4 * kOctets; i += 8) {
      store_transposed(box + transposed + i * 256, pack<dtype>(d[i], d[i + 1]), pack<dtype>(d[i + 2], d[i + 3]),
                       pack<dtype>(d[i + 4], d[i + 5]), pack<dtype>(d[i + 6], d[i + 7]));
    }
  };
  auto keys_full = [&](int ahead) {
    team.wait(ahead);
    barrier_wait(plan.rope_full(team.rope.place), team.rope.phase);
  };
  auto keys_done = [&](int ahead) {
    pin<N / 2>(p);
    team.release_pair(ahead);
    team.release(plan.rope_empty(team.rope.place));
    team.rope.next();
  };
  // S^T = K Q^T of the block at work, or of the one after it.
  auto scores = [&](int ahead) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      mma<dtype, N>(p, key + (2 * team.place(ahead) + i / 4) * kNextBox + i % 4 * 2,
                                query + i / 4 * (Plan::kRowBytes >> 4) + i % 4 * 2, i != 0);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma<dtype, N>(p, operand_k_major(plan.rope(team.rope.place)) + i * 2,
                                query + 2 * (Plan::kRowBytes >> 4) + i * 2, 1);
    }
  };
  auto products = [&] {  // O^T += V^T P^T
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      mma<dtype, N, Major::k, Major::mn>(o[i / 4], value + (2 * team.place(1) + i / 4) * kNextBox + i % 4 * 128,
                               operand_k_major(weights) + i % 4 * 2, 1);
    }
  };
  auto raise_maxima = [&] {
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      float a = fmaxf(p[4 * i], p[4 * i + 2]), b = fmaxf(p[4 * i + 1], p[4 * i + 3]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        a = fmaxf(a, __shfl_xor_sync(~0u, a, step));
        b = fmaxf(b, __shfl_xor_sync(~0u, b, step));
      }
      if (lane < 4) of_warps[warp * (N / 2) + 4 * i + lane] = {a, b};
    }
    named_sync(kTeam + number, 128);
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      float2 best = of_warps[4 * i + (lane & 3)];
#pragma unroll
      for (int w = 1; w < 4; ++w) {
        const float2 other = of_warps[w * (N / 2) + 4 * i + (lane & 3)];
        best = {fmaxf(best.x, other.x), fmaxf(best.y, other.y)};
      }
      const float a = fmaxf(top[2 * i], best.x * scale_log2), b = fmaxf(top[2 * i + 1], best.y * scale_log2);
      const float x = exp2_fast(fmaxf(top[2 * i] - a, kLeastExponent)), y = exp2_fast(fmaxf(top[2 * i + 1] - b, kLeastExponent));
      top[2 * i] = a;
      top[2 * i + 1] = b;
      sum[2 * i] *= x;
      sum[2 * i + 1] *= y;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        o[m][4 * i] *= x;
        o[m][4 * i + 1] *= y;
        o[m][4 * i + 2] *= x;
        o[m][4 * i + 3] *= y;
      }
    }
  };
  auto softmax = [&] {  // scores to weights, in place
    bool raise = false;
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      raise |= fmaf(fmaxf(p[4 * i], p[4 * i + 2]), scale_log2, -top[2 * i]) > kRescaleThreshold;
      raise |= fmaf(fmaxf(p[4 * i + 1], p[4 * i + 3]), scale_log2, -top[2 * i + 1]) > kRescaleThreshold;
    }
    if (named_any(kVote + number, 128, raise)) raise_maxima();
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) p[4 * i + j] = exp2_fast(fmaf(p[4 * i + j], scale_log2, -top[2 * i + (j & 1)]));
      sum[2 * i] += p[4 * i] + p[4 * i + 2];
      sum[2 * i + 1] += p[4 * i + 1] + p[4 * i + 3];
    }
  };
  auto store_weights = [&] {
    store_fragment(weights, p);
    async_fence();
    named_sync(kTeam + number, 128);
  };

#pragma unroll 1
  for (;;) {
    const Item item = items.next();
    const int request = uniform(item.request), tokens = uniform(item.tokens), blocks = uniform(item.blocks);
    const int tile_row = uniform(item.row);
    if (request < 0) break;
    const int head = request * h + min(uniform(item.head) + number, h - 1);
    float* const tile_lse = output.lse + static_cast<long long>(head) * s + tile_row;
    if (blocks == 0) {
      write_nothing(output.rows_at(head, tile_row), output.row_stride(), tile_lse, min(N, s - tile_row));
      continue;
    }
    // Tokens that every row of the tile sees. Blocks behind it are masked element by element.
    const int seen_by_all = problem.causal ? tokens - s + tile_row + 1 : tokens;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      top[i] = kLeastScore;
      sum[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < N / 2; ++i) o[0][i] = o[1][i] = 0.0f;
    barrier_wait(plan.query_full(number), query_phase);
    query_phase ^= 1;

    auto mask = [&](int token) {  // from `token` on
      if (token + kTile <= seen_by_all) return;
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        const int of = tile_row + i / 4 * 8 + row + (i & 1);
        const int seen = problem.causal ? min(tokens, tokens + 1 - s + of) : tokens;
        if (token + token_in_block + (i & 2) * 4 >= seen) p[i] = -kInfinity;
      }
    };

    keys_full(0);
    mma_fence();
    scores(0);
    mma_commit();
    mma_wait<0>();
    keys_done(0);
    mask(0);
    softmax();
    store_weights();
#pragma unroll 1
    for (int block = 1; block < blocks; ++block) {
      keys_full(2);
      team.wait(1);
      pin<N>(&o[0][0]);
      mma_fence();
      scores(2);
      products();
      mma_commit();
      mma_wait<0>();
      pin<N>(&o[0][0]);
      keys_done(2);
      team.release_pair(1);
      team.next_block();
      mask(block * kTile);
      softmax();  // its vote tells, too, that all warps have read the weights
      store_weights();
    }
    team.release(plan.query_empty(number));
    team.wait(1);
    if (blocks * kTile > tokens) {
      team.zero_values(tokens - (blocks - 1) * kTile);
      named_sync(kTeam + number, 128);
    }
    pin<N>(&o[0][0]);
    mma_fence();
    products();
    mma_commit();
    mma_wait<0>();
    pin<N>(&o[0][0]);

#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      float a = sum[2 * i], b = sum[2 * i + 1];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        a += __shfl_xor_sync(~0u, a, step);
        b += __shfl_xor_sync(~0u, b, step);
      }
      if (lane < 4) of_warps[warp * (N / 2) + 4 * i + lane] = {a, b};
    }
    named_sync(kTeam + number, 128);  // all warps have read the values, too
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      float2 all = of_warps[4 * i + (lane & 3)];
#pragma unroll
      for (int w = 1; w < 4; ++w) {
        const float2 other = of_warps[w * (N / 2) + 4 * i + (lane & 3)];
        all = {all.x + other.x, all.y + other.y};
      }
      const float x = all.x == 0.0f ? 0.0f : __fdividef(1.0f, all.x),
                  y = all.y == 0.0f ? 0.0f : __fdividef(1.0f, all.y);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        o[m][4 * i] *= x;
        o[m][4 * i + 1] *= y;
        o[m][4 * i + 2] *= x;
        o[m][4 * i + 3] *= y;
      }
      if (warp == 0 && lane < 4) {
        const int at = 8 * i + row;
        if (tile_row + at < s) tile_lse[at] = all.x == 0.0f ? -kInfinity : (top[2 * i] + log2_fast(all.x)) * kLn2;
        if (tile_row + at + 1 < s)
          tile_lse[at + 1] = all.y == 0.0f ? -kInfinity : (top[2 * i + 1] + log2_fast(all.y)) * kLn2;
      }
    }
    const u32 staging = plan.pair(number, team.place(1));
    store_fragment(staging, o[0]);
    store_fragment(staging + Plan::kRowBytes, o[1]);
    async_fence();
    named_sync(kTeam + number, 128);
    if (thread == 0) output.store_box(staging, tile_row, head);
    __syncwarp();
    team.release_pair(1);
    team.next_block();
  }
  if (thread == 0) tma_store_wait();
}

// A team with rows on the M side, in the same order. Thread t holds columns or tokens 8i + 2 * (t % 4) and the one
// after it of rows r and r + 8 (wgmma.h).
template <auto problem, auto tiling>
__device__ __forceinline__ void attend(int number, const SharedPlan<tiling.rows> plan, Items<tiling.rows> items,
                                       const Output output, float scale_log2, int h, int s) {
  constexpr DType dtype = problem.dtype;
  constexpr int N = tiling.rows;
  using Plan = SharedPlan<tiling.rows>;
  const int thread = thread_id() & 127, warp = thread >> 5, lane = lane_id();
  const int row = warp * 16 + (lane >> 2);  // of this thread's first row; the second is 8 on

  float o[64];       // (64, 128)
  float p[32] = {};  // (64, 64) scores, then weights; set, or they would take registers from the start of the kernel on
  u32 packed[16];    // (64, 64) weights as the A operand
  u32 q[48];         // (64, 192) queries as the A operand
  // Of rows r and r + 8; maxima in units of log2.
  float top0 = kLeastScore, top1 = kLeastScore, sum0 = 0.0f, sum1 = 0.0f;
  float shrink0 = 1.0f, shrink1 = 1.0f;
  Team<tiling.rows> team{plan, number};
  u32 query_phase = 0;

  const u32 key = operand_k_major(plan.pair(number, 0));
  const u32 value = operand_mn_major(plan.pair(number, 0));

  auto keys_full = [&](int ahead) {
    team.wait(ahead);
    barrier_wait(plan.rope_full(team.rope.place), team.rope.phase);
  };
  // S = Q K^T of the block at work, or of the one after it.
  auto scores = [&](int ahead) {
    mma_fence();
#pragma unroll
    for (int box = 0; box < 2; ++box) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mma<dtype, 64>(p, q + 16 * box + 4 * i, key + (2 * team.place(ahead) + box) * kNextBox + i * 2,
                                box != 0 || i != 0);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma<dtype, 64>(p, q + 32 + 4 * i, operand_k_major(plan.rope(team.rope.place)) + i * 2, 1);
    }
    mma_commit();
  };
  auto scores_done = [&](int ahead) {
    pin<32>(p);
    team.release_pair(ahead);
    team.release(plan.rope_empty(team.rope.place));
    team.rope.next();
  };
  auto products = [&] {  // O += P V
    mma_fence();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mma<dtype, 64, Major::mn>(o + 32 * m, packed + 4 * i, value + (2 * team.place(1) + m) * kNextBox + i * 128, 1);
      }
    }
    mma_commit();
  };
  auto products_done = [&] {
    pin<64>(o);
    team.release_pair(1);
    team.next_block();
  };
  auto raise_maxima = [&] {
    float a = fmaxf(p[0], p[1]), b = fmaxf(p[2], p[3]);
#pragma unroll
    for (int i = 1; i < 8; ++i) {
      a = fmaxf(a, fmaxf(p[4 * i], p[4 * i + 1]));
      b = fmaxf(b, fmaxf(p[4 * i + 2], p[4 * i + 3]));
    }
    a = fmaxf(a, __shfl_xor_sync(~0u, a, 1));
    b = fmaxf(b, __shfl_xor_sync(~0u, b, 1));
    a = fmaxf(top0, fmaxf(a, __shfl_xor_sync(~0u, a, 2)) * scale_log2);
    b = fmaxf(top1, fmaxf(b, __shfl_xor_sync(~0u, b, 2)) * scale_log2);
    shrink0 = exp2_fast(fmaxf(top0 - a, kLeastExponent));
    shrink1 = exp2_fast(fmaxf(top1 - b, kLeastExponent));
    top0 = a;
    top1 = b;
    sum0 *= shrink0;
    sum1 *= shrink1;
  };
  // Scores to weights, in place; whether the output has to shrink. A row lies in one warp.
  auto softmax = [&] {
    bool raise = false;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      raise |= fmaf(fmaxf(p[4 * i], p[4 * i + 1]), scale_log2, -top0) > kRescaleThreshold;
      raise |= fmaf(fmaxf(p[4 * i + 2], p[4 * i + 3]), scale_log2, -top1) > kRescaleThreshold;
    }
    raise = __any_sync(~0u, raise);
    if (raise) raise_maxima();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      p[4 * i] = exp2_fast(fmaf(p[4 * i], scale_log2, -top0));
      p[4 * i + 1] = exp2_fast(fmaf(p[4 * i + 1], scale_log2, -top0));
      p[4 * i + 2] = exp2_fast(fmaf(p[4 * i + 2], scale_log2, -top1));
      p[4 * i + 3] = exp2_fast(fmaf(p[4 * i + 3], scale_log2, -top1));
      sum0 += p[4 * i] + p[4 * i + 1];
      sum1 += p[4 * i + 2] + p[4 * i + 3];
    }
    return raise;
  };
  auto pack_weights = [&] {
#pragma unroll
    for (int i = 0; i < 16; ++i) packed[i] = pack<dtype>(p[2 * i], p[2 * i + 1]);
  };
  // Four threads hold two columns of a row each: they exchange among four such groups, and each stores 16 bytes.
  auto store_output = [&](unsigned short* to, int rows, float factor0, float factor1) {
    const int stride = output.row_stride();
    uint4* out = reinterpret_cast<uint4*>(to + row * stride) + (lane & 3);
    auto exchange = [&](u32& low, u32& high, int bit) {
      const u32 other = __shfl_xor_sync(~0u, lane & bit ? low : high, bit);
      (lane & bit ? low : high) = other;
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = half ? factor1 : factor0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* from = o + 16 * i + 4 * j + 2 * half;
          x[j] = pack<dtype>(from[0] * factor, from[1] * factor);
        }
        exchange(x[0], x[1], 1);
        exchange(x[2], x[3], 1);
        exchange(x[0], x[2], 2);
        exchange(x[1], x[3], 2);
        if (row + 8 * half < rows) out[half * stride + i * 4] = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  };

#pragma unroll 1
  for (;;) {
    const Item item = items.next();
    const int request = uniform(item.request), tokens = uniform(item.tokens), blocks = uniform(item.blocks);
    const int tile_row = uniform(item.row);
    if (request < 0) break;
    const int head = request * h + min(uniform(item.head) + number, h - 1);
    const int rows = min(N, s - tile_row);
    float* const tile_lse = output.lse + static_cast<long long>(head) * s + tile_row;
    unsigned short* const tile_o = output.rows_at(head, tile_row);
    if (blocks == 0) {
      write_nothing(tile_o, output.row_stride(), tile_lse, rows);
      continue;
    }
    const int seen_by_all = problem.causal ? tokens - s + tile_row + 1 : tokens;
    top0 = top1 = kLeastScore;
    sum0 = sum1 = 0.0f;
#pragma unroll
    for (int i = 0; i < 64; ++i) o[i] = 0.0f;
    barrier_wait(plan.query_full(number), query_phase);
    query_phase ^= 1;
    {
      const int own = warp * 16 + (lane & 15);
      const u32 from = plan.query(number) + own * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll
      for (int i = 0; i < 12; ++i) load_matrices(q + 4 * i, (from ^ (i % 4 << 5)) + i / 4 * Plan::kRowBytes);
    }

    auto mask = [&](int token) {  // from `token` on
      if (token + kTile <= seen_by_all) return;
      int seen0 = tokens, seen1 = tokens;
      if (problem.causal) {
        seen0 = min(seen0, tokens - s + tile_row + row + 1);
        seen1 = min(seen1, tokens - s + tile_row + row + 9);
      }
      seen0 -= token + 2 * (lane & 3);
      seen1 -= token + 2 * (lane & 3);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        p[4 * i] = 8 * i < seen0 ? p[4 * i] : -kInfinity;
        p[4 * i + 1] = 8 * i + 1 < seen0 ? p[4 * i + 1] : -kInfinity;
        p[4 * i + 2] = 8 * i < seen1 ? p[4 * i + 2] : -kInfinity;
        p[4 * i + 3] = 8 * i + 1 < seen1 ? p[4 * i + 3] : -kInfinity;
      }
    };

    keys_full(0);
    scores(0);
    mma_wait<0>();
    scores_done(0);
    team.release(plan.query_empty(number));  // not earlier: the queries may be on their way to the registers until then
    mask(0);
    softmax();
    pack_weights();
#pragma unroll 1
    for (int block = 1; block < blocks; ++block) {
      keys_full(2);
      team.wait(1);
      scores(2);
      products();
      mma_wait<1>();
      scores_done(2);
      mask(block * kTile);
      const bool raised = softmax();
      mma_wait<0>();
      products_done();
      if (raised) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          o[4 * i] *= shrink0;
          o[4 * i + 1] *= shrink0;
          o[4 * i + 2] *= shrink1;
          o[4 * i + 3] *= shrink1;
        }
      }
      pack_weights();
    }
    team.wait(1);
    if (blocks * kTile > tokens) {
      team.zero_values(tokens - (blocks - 1) * kTile);
      named_sync(kTeam + number, 128);
    }
    products();
    mma_wait<0>();
    products_done();

    sum0 += __shfl_xor_sync(~0u, sum0, 1);
    sum1 += __shfl_xor_sync(~0u, sum1, 1);
    sum0 += __shfl_xor_sync(~0u, sum0, 2);
    sum1 += __shfl_xor_sync(~0u, sum1, 2);
    store_output(tile_o, rows, sum0 == 0.0f ? 0.0f : __fdividef(1.0f, sum0),
                 sum1 == 0.0f ? 0.0f : __fdividef(1.0f, sum1));
    if ((lane & 3) == 0) {
      if (row < rows) tile_lse[row] = sum0 == 0.0f ? -kInfinity : (top0 + log2_fast(sum0)) * kLn2;
      if (row + 8 < rows) tile_lse[row + 8] = sum1 == 0.0f ? -kInfinity : (top1 + log2_fast(sum1)) * kLn2;
    }
  }
}

// A thread that loads the keys and values of one team.
template <int N>
__device__ __forceinline__ void load_tokens(int team, const SharedPlan<N> plan, Items<N> items, const TensorMap& k_map,
                                            const TensorMap& v_map, int h) {
  using Plan = SharedPlan<N>;
  Ring<Plan::kRing> ring{0, 1};  // it waits for empty places
  for (;;) {
    const Item item = items.next();
    if (item.request < 0) break;
    const int head = item.request * h + min(item.head + team, h - 1);
    for (int block = 0; block < item.blocks; ++block) {
      for (const TensorMap* map : {&k_map, &v_map}) {
        const u32 full = plan.full(team, ring.place);
        barrier_wait(plan.empty(team, ring.place), ring.phase);
        barrier_expect(full, Plan::kPairBytes);
        tma_load(plan.pair(team, ring.place), *map, block * kTile, 0, head, full);
        ring.next();
      }
    }
  }
}

}  // namespace hypermla::cute::decompressed
