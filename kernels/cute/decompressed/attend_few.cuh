// Attention over decompressed keys and values for few queries, the part of flash_attention_v1.cuh that one thread block
// does: its consumers and its loads of tokens.
#pragma once

#include "hopper/constants.h"
#include "hopper/fragments.h"
#include "hopper/mbarrier.h"
#include "hopper/ring.h"
#include "hopper/rows.h"
#include "hopper/tma.h"
#include "hopper/warpgroup.h"
#include "hopper/wgmma.h"

namespace hypermla::cute::decompressed {

inline constexpr int kConsumers = 2;  // and heads of an item
inline constexpr int kItems = 2;      // places for drawn items

// Heads of a request, one for each consumer, and a tile of their rows.
struct Item {
  int request;  // -1: no more items
  int head;     // the first of them
  int row;      // first query
  int tokens;   // length of the request
  int blocks;   // of tokens that some query sees
  int unused[3];
};

template <int N>
struct SharedWeights {
  Array<Bytes<N * 128>, kConsumers> weights;  // [consumer]
};
template <>
struct SharedWeights<64> {};  // those of 64 rows stay in registers

template <int N>
struct Shared : SharedWeights<N> {
  static constexpr bool kSwapped = N < 64;                      // rows on the N side
  static constexpr int kRing = N == 16 ? 6 : 5;                 // stages of a consumer's ring
  static constexpr int kRopes = N == 16 ? 2 : N == 32 ? 4 : 5;  // stages for RoPE boxes
  static constexpr int kQueries = kSwapped ? kConsumers : 1;    // places for queries
  static constexpr u32 kPairBytes = 2 * kBoxBytes;
  static constexpr u32 kRowBytes = N * 128;  // a box of N rows
  static_assert(kRowBytes % 1024 == 0);

  Array<Bytes<3 * kRowBytes>, kQueries> queries;
  Array<Bytes<kBoxBytes>, kRopes> ropes;
  Array<Array<Bytes<kPairBytes>, kRing>, kConsumers> pairs;  // [consumer]
  RingBarriers<kRing, kConsumers> rings;
  RingBarriers<kRopes> rope_ring;
  Barriers<kConsumers> query_full;
  Barriers<kQueries> query_empty;
  RingBarriers<kItems> item_ring;
  alignas(16) Item items[kItems];
  // [consumer][warp][pair of rows]: maxima, in the end sums; not used with 64 rows.
  float2 of_warps[kConsumers][4][N / 2];
};

template <int N>
struct ItemOrder {
  int b, h, s, t;
  const int* __restrict__ lengths;

  __device__ int tiles() const { return (s + N - 1) / N; }
  __device__ int groups() const { return (h + kConsumers - 1) / kConsumers; }
  __device__ int items() const { return b * groups() * tiles(); }
  // Items of the same keys come one after the other.
  template <bool causal>
  __device__ Item at(int index) const {
    if (index >= items()) return {-1, 0, 0, 0, 0, {}};
    const int row = index % tiles() * N, group = index / tiles() % groups(), request = index / tiles() / groups();
    const int tokens = lengths ? lengths[request] : t;
    const int seen = causal ? tokens - s + min(row + N, s) : tokens;
    return {request, kConsumers * group, row, tokens, (max(seen, 0) + kTile - 1) / kTile, {}};
  }
};

// The items, one after the other, as all but the scheduler see them.
template <int N>
struct Items {
  const Shared<N>& shared;
  Ring<kItems> ring;

  __device__ __forceinline__ explicit Items(const Shared<N>& shared)
      : shared(shared), ring(shared.item_ring, Side::consumer) {}
  __device__ __forceinline__ Item next() {
    ring.wait_until_full();
    const Item item = shared.items[ring.stage];
    barrier_arrive(ring.empty());
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

  __device__ unsigned short* rows_at(int head, int row) const {
    return o + (static_cast<long long>(head) * s + row) * 128;
  }
  __device__ void store_box(u32 staging, int row, int head) const {
    tma_store(o_map, staging, row, 0, head);
    tma_store_read_wait();
  }
};

// Named barriers of consumer 0; those of consumer 1 have the next number.
enum NamedBarrier { kMeet = 1, kVote = 3 };

// What both kinds of consumers share: the places of the token block at work, and what is done to boxes.
template <int N>
struct Consumer {
  using Layout = Shared<N>;
  const Layout& shared;
  const int number;
  // At the keys of the block at work. 1 stage ahead are its values, 2 ahead the keys of the block after it.
  Ring<Layout::kRing, kConsumers> ring;
  Ring<Layout::kRopes> rope;

  __device__ __forceinline__ Consumer(const Layout& shared, int number)
      : shared(shared),
        number(number),
        ring(shared.rings, Side::consumer, number),
        rope(shared.rope_ring, Side::consumer) {}

  __device__ __forceinline__ void release(int ahead) const { warp_arrive(ring.empty(ahead)); }
  __device__ __forceinline__ u32 values() const { return shared.pairs[number][ring.stage_at(1)]; }
  // Values behind the end of the request, from token `first` of the block on, may be anything: their weights are 0, but
  // 0 * NaN would spoil the output. The warps of the consumer meet before they multiply by them.
  __device__ __forceinline__ void zero_values(int first) const {
    const int thread = thread_id() & 127;
#pragma unroll 1
    for (int r = first + (thread >> 3); r < kTile; r += 16) {
      store_zeros(values() + r * 128 + (thread & 7) * 16);
      store_zeros(values() + kBoxBytes + r * 128 + (thread & 7) * 16);
    }
    async_fence();
  }
};

// A tile of which no row sees a token.
__device__ __forceinline__ void write_nothing(unsigned short* o, float* lse, int rows) {
  const int thread = thread_id() & 127;
  for (int i = thread; i < rows * 16; i += 128)
    reinterpret_cast<uint4*>(o + i / 16 * 128)[i % 16] = make_uint4(0, 0, 0, 0);
  for (int i = thread; i < rows; i += 128) lse[i] = -kInfinity;
}

// A consumer with rows on the N side: the scores of a block beside the products of the one before, then the softmax.
// Thread t holds, of scores and outputs, tokens or columns r and r + 8 (wgmma.h) of rows 8i + 2 * (t % 4) and the one
// after it.
template <auto problem, auto tiling>
__device__ __forceinline__ void attend_swapped(int number, Shared<tiling.rows>& shared, Items<tiling.rows> items,
                                               const Output output, float scale_log2, int h, int s) {
  constexpr DType dtype = problem.dtype;
  constexpr int N = tiling.rows, kOctets = N / 8;
  using Layout = Shared<tiling.rows>;
  const int thread = thread_id() & 127, warp = thread >> 5, lane = lane_id();
  const int token_in_block = warp * 16 + (lane >> 2);  // of this thread's first token; the second is 8 on
  const int row = 2 * (lane & 3);                      // of this thread's first row of an octet; the second is 1 on

  float o[2][N / 2];    // (128, N)
  float p[N / 2] = {};  // (64, N) scores, then weights
  RowsOnN<N> running(warp, lane);
  Consumer<tiling.rows> consumer(shared, number);
  u32 query_phase = 0;

  const u32 query = operand_k_major(shared.queries[number % Layout::kQueries]);
  const u32 key = operand_k_major(shared.pairs[number]);
  const u32 value = operand_mn_major(shared.pairs[number]);
  const u32 weights = shared.weights[number];  // (N, 64)
  const u32 in_box = place_of_lane(warp, lane);
  auto& of_warps = shared.of_warps[number];

  auto keys_full = [&](int ahead) {
    consumer.ring.wait_until_full(ahead);
    consumer.rope.wait_until_full();
  };
  auto keys_done = [&](int ahead) {
    pin<N / 2>(p);
    consumer.release(ahead);
    warp_arrive(consumer.rope.empty());
    consumer.rope.next();
  };
  // S^T = K Q^T of the block at work, or of the one after it.
  auto scores = [&](int ahead) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      mma<dtype, N>(p, key + (2 * consumer.ring.stage_at(ahead) + i / 4) * kNextBox + i % 4 * 2,
                    query + i / 4 * (Layout::kRowBytes >> 4) + i % 4 * 2, i != 0);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma<dtype, N>(p, operand_k_major(shared.ropes[consumer.rope.stage]) + i * 2,
                    query + 2 * (Layout::kRowBytes >> 4) + i * 2, 1);
    }
  };
  auto products = [&] {  // O^T += V^T P^T
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      mma<dtype, N, Major::k, Major::mn>(o[i / 4],
                                         value + (2 * consumer.ring.stage_at(1) + i / 4) * kNextBox + i % 4 * 128,
                                         operand_k_major(weights) + i % 4 * 2, 1);
    }
  };
  auto softmax = [&] { running.weigh(p, o, scale_log2, of_warps, kVote + number, kMeet + number); };
  auto store_weights = [&] {
    store_rows_on_n<dtype, N>(weights + in_box, p);
    async_fence();
    named_sync(kMeet + number, 128);
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
      write_nothing(output.rows_at(head, tile_row), tile_lse, min(N, s - tile_row));
      continue;
    }
    // Tokens that every row of the tile sees. Blocks behind it are masked element by element.
    const int seen_by_all = problem.causal ? tokens - s + tile_row + 1 : tokens;
    running.reset();
#pragma unroll
    for (int i = 0; i < N / 2; ++i) o[0][i] = o[1][i] = 0.0f;
    barrier_wait(shared.query_full[number], query_phase);
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
      consumer.ring.wait_until_full(1);
      pin<N>(&o[0][0]);
      mma_fence();
      scores(2);
      products();
      mma_commit();
      mma_wait<0>();
      pin<N>(&o[0][0]);
      keys_done(2);
      consumer.release(1);
      consumer.ring.next(2);
      mask(block * kTile);
      softmax();  // its vote tells, too, that all warps have read the weights
      store_weights();
    }
    warp_arrive(shared.query_empty[number % Layout::kQueries]);
    consumer.ring.wait_until_full(1);
    if (blocks * kTile > tokens) {
      consumer.zero_values(tokens - (blocks - 1) * kTile);
      named_sync(kMeet + number, 128);
    }
    pin<N>(&o[0][0]);
    mma_fence();
    products();
    mma_commit();
    mma_wait<0>();
    pin<N>(&o[0][0]);

    running.store_sums(of_warps[warp]);
    named_sync(kMeet + number, 128);  // all warps have read the values, too
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      float2 all = of_warps[0][4 * i + (lane & 3)];
#pragma unroll
      for (int w = 1; w < 4; ++w) {
        const float2 other = of_warps[w][4 * i + (lane & 3)];
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
        if (tile_row + at < s) tile_lse[at] = log_sum(running.maximum[2 * i], all.x) * kLn2;
        if (tile_row + at + 1 < s) tile_lse[at + 1] = log_sum(running.maximum[2 * i + 1], all.y) * kLn2;
      }
    }
    const u32 staging = consumer.values();
    store_rows_on_n<dtype, N>(staging + in_box, o[0]);
    store_rows_on_n<dtype, N>(staging + Layout::kRowBytes + in_box, o[1]);
    async_fence();
    named_sync(kMeet + number, 128);
    if (thread == 0) output.store_box(staging, tile_row, head);
    __syncwarp();
    consumer.release(1);
    consumer.ring.next(2);
  }
  if (thread == 0) tma_store_wait();
}

// A consumer with rows on the M side, in the same order. Thread t holds columns or tokens 8i + 2 * (t % 4) and the one
// after it of rows r and r + 8 (wgmma.h).
template <auto problem, auto tiling>
__device__ __forceinline__ void attend(int number, Shared<tiling.rows>& shared, Items<tiling.rows> items,
                                       const Output output, float scale_log2, int h, int s) {
  constexpr DType dtype = problem.dtype;
  constexpr int N = tiling.rows;
  using Layout = Shared<tiling.rows>;
  const int thread = thread_id() & 127, warp = thread >> 5, lane = lane_id();
  const int row = warp * 16 + (lane >> 2);  // of this thread's first row; the second is 8 on

  float o[64];       // (64, 128)
  float p[32] = {};  // (64, 64) scores, then weights; set, or they would take registers from the start of the kernel on
  u32 packed[16];    // (64, 64) weights as the A operand
  u32 q[48];         // (64, 192) queries as the A operand
  float2 maximum = {kLeastScore, kLeastScore}, sum = {}, factors = {1.0f, 1.0f};  // of rows r and r + 8
  Consumer<tiling.rows> consumer(shared, number);
  u32 query_phase = 0;

  const u32 key = operand_k_major(shared.pairs[number]);
  const u32 value = operand_mn_major(shared.pairs[number]);

  auto keys_full = [&](int ahead) {
    consumer.ring.wait_until_full(ahead);
    consumer.rope.wait_until_full();
  };
  // S = Q K^T of the block at work, or of the one after it.
  auto scores = [&](int ahead) {
    mma_fence();
#pragma unroll
    for (int box = 0; box < 2; ++box) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mma<dtype, 64>(p, q + 16 * box + 4 * i, key + (2 * consumer.ring.stage_at(ahead) + box) * kNextBox + i * 2,
                       box != 0 || i != 0);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma<dtype, 64>(p, q + 32 + 4 * i, operand_k_major(shared.ropes[consumer.rope.stage]) + i * 2, 1);
    }
    mma_commit();
  };
  auto scores_done = [&](int ahead) {
    pin<32>(p);
    consumer.release(ahead);
    warp_arrive(consumer.rope.empty());
    consumer.rope.next();
  };
  auto products = [&] {  // O += P V
    mma_fence();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mma<dtype, 64, Major::mn>(o + 32 * m, packed + 4 * i,
                                  value + (2 * consumer.ring.stage_at(1) + m) * kNextBox + i * 128, 1);
      }
    }
    mma_commit();
  };
  auto products_done = [&] {
    pin<64>(o);
    consumer.release(1);
    consumer.ring.next(2);
  };
  // Scores to weights, in place; returns whether the output has to be rescaled. A row lies in one warp.
  auto softmax = [&] {
    bool raise = false;
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      raise |= fmaf(fmaxf(p[i], p[i + 1]), scale_log2, -maximum.x) > kRescaleThreshold;
      raise |= fmaf(fmaxf(p[i + 2], p[i + 3]), scale_log2, -maximum.y) > kRescaleThreshold;
    }
    raise = __any_sync(~0u, raise);
    if (raise) {
      factors = raise_maxima(maximum, largest_scores<32>(p), scale_log2);
      sum.x *= factors.x;
      sum.y *= factors.y;
    }
    weigh_rows<32>(p, scale_log2, maximum, sum);
    return raise;
  };
  auto pack_weights = [&] {
#pragma unroll
    for (int i = 0; i < 16; ++i) packed[i] = pack<dtype>(p[2 * i], p[2 * i + 1]);
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
      write_nothing(tile_o, tile_lse, rows);
      continue;
    }
    const int seen_by_all = problem.causal ? tokens - s + tile_row + 1 : tokens;
    maximum = {kLeastScore, kLeastScore};
    sum = {};
#pragma unroll
    for (int i = 0; i < 64; ++i) o[i] = 0.0f;
    barrier_wait(shared.query_full[number], query_phase);
    query_phase ^= 1;
    {
      const u32 from = shared.queries[number % Layout::kQueries] + place_of_row(warp * 16, lane);
#pragma unroll
      for (int i = 0; i < 12; ++i) load_matrices(q + 4 * i, (from ^ (i % 4 << 5)) + i / 4 * Layout::kRowBytes);
    }

    auto mask = [&](int token) {  // from `token` on
      if (token + kTile <= seen_by_all) return;
      int seen0 = tokens, seen1 = tokens;
      if (problem.causal) {
        seen0 = min(seen0, tokens - s + tile_row + row + 1);
        seen1 = min(seen1, tokens - s + tile_row + row + 9);
      }
      const int first = token + 2 * (lane & 3);
      mask_rows<32>(p, {seen0 - first, seen1 - first});
    };

    keys_full(0);
    scores(0);
    mma_wait<0>();
    scores_done(0);
    warp_arrive(
        shared.query_empty
            [number % Layout::kQueries]);  // not earlier: the queries may be on their way to the registers until then
    mask(0);
    softmax();
    pack_weights();
#pragma unroll 1
    for (int block = 1; block < blocks; ++block) {
      keys_full(2);
      consumer.ring.wait_until_full(1);
      scores(2);
      products();
      mma_wait<1>();
      scores_done(2);
      mask(block * kTile);
      const bool raised = softmax();
      mma_wait<0>();
      products_done();
      if (raised) rescale_rows<64>(o, factors);
      pack_weights();
    }
    consumer.ring.wait_until_full(1);
    if (blocks * kTile > tokens) {
      consumer.zero_values(tokens - (blocks - 1) * kTile);
      named_sync(kMeet + number, 128);
    }
    products();
    mma_wait<0>();
    products_done();

    sum = sum_of_rows(sum);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float all = half ? sum.y : sum.x;
      store_row<dtype>(tile_o + (row + 8 * half) * 128, o, half, all == 0.0f ? 0.0f : __fdividef(1.0f, all),
                       row + 8 * half < rows);
    }
    if ((lane & 3) == 0) {
      if (row < rows) tile_lse[row] = log_sum(maximum.x, sum.x) * kLn2;
      if (row + 8 < rows) tile_lse[row + 8] = log_sum(maximum.y, sum.y) * kLn2;
    }
  }
}

// A thread that loads the keys and values of one consumer.
template <int N>
__device__ __forceinline__ void load_tokens(int consumer, Shared<N>& shared, Items<N> items, const TensorMap& k_map,
                                            const TensorMap& v_map, int h) {
  using Layout = Shared<N>;
  Ring<Layout::kRing, kConsumers> ring(shared.rings, Side::producer, consumer);
  for (;;) {
    const Item item = items.next();
    if (item.request < 0) break;
    const int head = item.request * h + min(item.head + consumer, h - 1);
    for (int block = 0; block < item.blocks; ++block) {
      for (const TensorMap* map : {&k_map, &v_map}) {
        const u32 full = ring.full();
        ring.wait_until_empty();
        barrier_expect(full, Layout::kPairBytes);
        tma_load(shared.pairs[consumer][ring.stage], *map, block * kTile, 0, head, full);
        ring.next();
      }
    }
  }
}

}  // namespace hypermla::cute::decompressed
