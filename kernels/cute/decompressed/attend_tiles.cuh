// FlashAttention (Dao et al., arXiv 2205.14135; online softmax) for Hopper, over decompressed keys and values with
// separate RoPE columns (DeepSeek-V2, arXiv 2405.04434): the body of the kernels for many queries. Two warpgroups in
// turns, and products beside the softmax, as in FlashAttention-3 (Shah et al., arXiv 2407.08608). Our own: the tiles of
// a thread block form one stream of token blocks, so the pipeline does not drain between tiles.
//
// A tile is 128 queries of one head. A thread block walks over the tokens 128 at a time, from the last one that a query
// sees to the first: masked blocks come first. Thread blocks are persistent: each draws its next tile from a counter.
//
// Roles (384 threads):
//   warpgroups 0, 1   consumers: 64 queries each, held in registers: scores, softmax, output
//   warpgroup 2       one warp is the scheduler, which draws tiles; one thread is the producer, which loads
//
// Order within a consumer, block j: issue S(j + 1) | issue O += P(j) V(j) | softmax of S(j + 1). The two consumers
// issue in turns (named barriers), so that the softmax of one runs beside the products of the other. At the end of a
// tile its last product goes first, then the scores of the next tile; the output is stored while those are computed.
//
// Running maximum: that of the tile's first block. It is raised only when a later block has large weights. The sum of a
// block's weights, which is needed anyway, shows that: a block whose sum is large is scored once more. So most blocks
// need no search for a maximum.
//
// A kernel says which tiles there are and where their rows and tokens lie: struct `Tiles`, passed by value, with
//
//   dtype, causal       the types of the products, and the mask
//   has_other_rows      whether the rows behind those of a tile may be another request's
//   may_be_half         whether the second warpgroup lets tiles go by in which it has no rows
//   has_parts           whether a tile may be of some of its queries' tokens only: then it has is_part(tile),
//                       store_part(..) and merge_parts(..), as prefill_parts.cuh has them
//   with                the kernel's arguments: q_map, qpe_map, k_map, kpe_map, v_map, scale_log2
//   Tile                what the scheduler hands over: up to 8 integers, among them `head` (negative: there are no more
//                       tiles), `tokens` of the request, and how many `blocks` of them some query of the tile sees
//   count()             of all tiles
//   draw(shared, index) the scheduler's warp writes tile number `index`; returns its head
//   take_queries(shared, ring, tile)
//                       the producer loads the queries of a tile that has blocks
//   first_block(tile), token(tile, block), head(tile), rope_head(tile)
//                       the tokens of the tile, as coordinates in the maps
//   seen(tile, row), seen_by_all(tile, first_row)
//                       how many tokens a row sees, and every row from first_row on
//   is_followed(tile)   whether anything but zeros may lie behind the tokens of the request
//   query(tile, row)    which one of all, -1: there is none; asked for by has_other_rows and may_be_half
//   place(tile, row)    of a row's outputs, -1: there are none; o(tile, place) and lse(tile, place) are their addresses
//   reads_places        whether place() reads memory, so that it is asked for where a tile begins
//   lse_of(maximum, sum), empty_lse()
//                       log-sum-exps as they are stored
//
// Shared memory (struct Shared; 1024-byte aligned, boxes of 64 columns with the 128-byte swizzle): ring of 3 x 48 KiB:
// queries or keys, 128 rows of 2 boxes and the RoPE box, a tile's queries before its keys | ring of 2 x 32 KiB: values
// of 128 tokens, 2 boxes | barriers and the drawn tile.
//
// grid = up to one thread block per multiprocessor; 384 threads, kTileSharedBytes of dynamic shared memory.
#pragma once

#include "attend_tiles.h"
#include "hopper/constants.h"
#include "hopper/fragments.h"
#include "hopper/mbarrier.h"
#include "hopper/ring.h"
#include "hopper/rows.h"
#include "hopper/tma.h"
#include "hopper/warpgroup.h"
#include "hopper/wgmma.h"
#include "hypermla/tensor_map.h"

namespace hypermla::cute {

inline constexpr float kLargeSum = 16384.0f;  // of 32 weights: fp16 holds it, and so it holds each of them
inline constexpr int kKeyStages = 3, kValueStages = 2;
inline constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;  // of a thread
static_assert(2 * kConsumerRegisters + kProducerRegisters <= 3 * 168,
              "a thread block starts with 168 for each thread; more would be waited for in vain");
inline constexpr u32 kKeyBox = kBlock * 128;  // bytes of 64 columns of a token block

struct Shared {
  Array<Bytes<3 * kKeyBox>, kKeyStages> keys;
  Array<Bytes<2 * kKeyBox>, kValueStages> values;
  RingBarriers<kKeyStages> key_ring;
  RingBarriers<kValueStages> value_ring;
  Barrier tile_full, tile_empty;
  alignas(16) int tile[8];  // drawn by the scheduler, read by the producer and the consumers
  int heads[kRows];         // more that a kernel's own draw() and take_queries() say to each other
};
static_assert(sizeof(Shared) == kTileSharedBytes && sizeof(Shared) <= kMaxSharedBytes);

template <class Tile>
__device__ __forceinline__ Tile read_tile(const Shared& shared, u32& phase) {
  static_assert(sizeof(Tile) % 16 == 0 && sizeof(Tile) <= sizeof(shared.tile));
  barrier_wait(shared.tile_full, phase);
  phase ^= 1;
  Tile tile;
#pragma unroll
  for (unsigned i = 0; i < sizeof(Tile) / 16; ++i)
    reinterpret_cast<int4*>(&tile)[i] = reinterpret_cast<const int4*>(shared.tile)[i];
  return tile;
}

// Named barriers whose number depends on the warpgroup: both run the same code, for the instruction cache's sake.
enum NamedBarrier { kTurn0 = 1, kTurn1 = 2, kGroup0 = 3, kGroup1 = 4 };

// One consumer warpgroup.
template <class Tiles>
__device__ __forceinline__ void attend(Shared& shared, int group, const Tiles tiles) {
  using Tile = typename Tiles::Tile;
  constexpr DType dtype = Tiles::dtype;
  const float scale_log2 = tiles.with.scale_log2;
  float o[64];     // (64, 128): o[4i], o[4i + 1] columns 8i + 2 (lane % 4) of row r, then of row r + 8
  float p[64];     // (64, 128) scores, then weights
  u32 packed[32];  // (64, 128) weights as the A operand
  u32 q[48];       // (64, 192) queries as the A operand
  float2 maximum = {kLeastScore, kLeastScore}, sum = {}, factors = {1.0f, 1.0f};  // of rows r and r + 8
  float2 block_sum;                                                               // of the weights of one block
  u32 tile_phase = 0;
  Ring<kKeyStages> key_ring(shared.key_ring, Side::consumer);
  Ring<kValueStages> value_ring(shared.value_ring, Side::consumer);

  const u32 keys = operand_k_major(shared.keys);
  const u32 values = operand_mn_major(shared.values, kKeyBox);

  auto row = [&] { return group * kGroupRows + static_cast<int>(((thread_id() >> 5) & 3) * 16 + (lane_id() >> 2)); };
  auto has_rows = [&](const Tile& of, int of_group) {
    if constexpr (!Tiles::may_be_half)
      return true;
    else
      return tiles.query(of, of_group * kGroupRows) >= 0;
  };
  auto take_turn = [&] { named_sync(kTurn0 + group, 256); };
  auto pass_turn = [&] { named_arrive(kTurn0 + 1 - group, 256); };
  auto keys_done = [&] {
    warp_arrive(key_ring.empty());
    key_ring.next();
  };
  auto scores = [&] {  // S = Q K^T
    const u32 key = keys + key_ring.stage * (sizeof(shared.keys.elements[0]) >> 4);
    mma_fence();
#pragma unroll
    for (int i = 0; i < 12; ++i) {
      mma<dtype, 128>(p, q + 4 * i, key + i / 4 * (kKeyBox >> 4) + i % 4 * 2, i != 0);
    }
    mma_commit();
  };
  // Queries come through the ring of keys, before the first block of their tile. Returns the barrier of their stage,
  // which is free when the products that take them from the registers have been issued, not earlier: until then they
  // may be on their way.
  auto load_queries = [&](const Tile& of) {
    key_ring.wait_until_full();
    const int lane = lane_id();
    const int first = group * kGroupRows + static_cast<int>((thread_id() >> 5) & 3) * 16;  // row of the warp
    const u32 from = shared.keys[key_ring.stage] + place_of_row(first, lane);
#pragma unroll
    for (int i = 0; i < 12; ++i) load_matrices(q + 4 * i, (from ^ (i % 4 << 5)) + i / 4 * kKeyBox);
    // Rows of another request become zeros, so that they do not decide when maxima are raised.
    if constexpr (Tiles::has_other_rows) {
      const bool first = tiles.query(of, row()) >= 0, second = tiles.query(of, row() + 8) >= 0;
#pragma unroll
      for (int i = 0; i < 48; ++i) q[i] = (i % 2 ? second : first) ? q[i] : 0;
    }
    const u32 done = key_ring.empty();
    key_ring.next();
    key_ring.wait_until_full();
    return done;
  };
  auto products = [&] {  // O += P V
    value_ring.wait_until_full();
    const u32 value = values + value_ring.stage * (sizeof(shared.values.elements[0]) >> 4);
    mma_fence();
#pragma unroll
    for (int i = 0; i < 8; ++i) mma<dtype, 128, Major::mn>(o, packed + 4 * i, value + 128 * i, 1);
    mma_commit();
  };
  auto products_done = [&] {
    pin<64>(o);
    warp_arrive(value_ring.empty());
    value_ring.next();
  };
  // Scores to weights against the maximum at hand, in place, and their sums in this block.
  auto weigh = [&] {
    block_sum = {};
    weigh_rows<64>(p, scale_log2, maximum, block_sum);
  };
  auto raise_maximum = [&] { factors = raise_maxima(maximum, largest_scores<64>(p), scale_log2); };
  auto pack_weights = [&] {
#pragma unroll
    for (int i = 0; i < 32; ++i) packed[i] = pack<dtype>(p[2 * i], p[2 * i + 1]);
  };

  auto next_tile = [&] {
    Tile tile = read_tile<Tile>(shared, tile_phase);
#pragma unroll
    for (unsigned i = 0; i < sizeof(Tile) / 4; ++i)
      reinterpret_cast<int*>(&tile)[i] = uniform(reinterpret_cast<int*>(&tile)[i]);
    barrier_arrive(
        shared.tile_empty);  // every reader for itself, as every writer below: racecheck follows nothing else
    return tile;
  };
  auto store_lse = [&](const Tile& tile, float2 value) {
    if ((lane_id() & 3) == 0) {
      const long long first = tiles.place(tile, row()), second = tiles.place(tile, row() + 8);
      if (first >= 0) *tiles.lse(tile, first) = value.x;
      if (second >= 0) *tiles.lse(tile, second) = value.y;
    }
  };
  auto store_output = [&](const Tile& tile, float2 by) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const long long to = tiles.place(tile, row() + 8 * half);
      store_row<dtype>(tiles.o(tile, to), o, half, half ? by.y : by.x, to >= 0);
    }
  };
  // The next tile of which some token is seen; the others are answered on the way.
  auto next_seen_tile = [&] {
    Tile tile = next_tile();
    while (tile.head >= 0 && tile.blocks == 0) {
      for (int i = thread_id() & 127; i < kGroupRows * 16; i += 128) {
        const long long to = tiles.place(tile, group * kGroupRows + i / 16);
        if (to >= 0) reinterpret_cast<uint4*>(tiles.o(tile, to))[i % 16] = make_uint4(0, 0, 0, 0);
      }
      store_lse(tile, {tiles.empty_lse(), tiles.empty_lse()});
      tile = next_tile();
    }
    return tile;
  };

  // A tile in which this warpgroup has no rows goes by: to multiply zeros takes as long as anything else.
  auto pass_over = [&](const Tile& of) {
    key_ring.wait_until_full();  // the queries
    keys_done();
#pragma unroll 1
    for (int i = of.blocks; i > 0; --i) {
      key_ring.wait_until_full();
      keys_done();
      value_ring.wait_until_full();
      warp_arrive(value_ring.empty());
      value_ring.next();
    }
  };

  Tile tile = next_seen_tile();
  u32 queries_done = 0;
  // The scores of the first block of the next tile with rows, where no products go before them. False: there is none.
  auto begin = [&] {
    if constexpr (Tiles::may_be_half) {
      while (tile.head >= 0 && !has_rows(tile, group)) {
        pass_over(tile);
        tile = next_seen_tile();
      }
    }
    if (tile.head < 0) return false;
    queries_done = load_queries(tile);
    scores();
    warp_arrive(queries_done);
    mma_wait<0>();
    if (group == 1) pass_turn();
    return true;
  };
  if (!begin()) return;

#pragma unroll 1
  for (;;) {                                  // the scores of the tile's first block are there
    const bool in_turns = has_rows(tile, 1);  // with the other warpgroup
    int2 places;  // of rows r and r + 8
    if constexpr (Tiles::reads_places)
      places = {static_cast<int>(tiles.place(tile, row())), static_cast<int>(tiles.place(tile, row() + 8))};
    pin<64>(p);
    keys_done();
    int token = (tiles.first_block(tile) + tile.blocks - 1) * kBlock;
    const int seen_by_all = tiles.seen_by_all(tile, group * kGroupRows);
    auto mask = [&] {
      const int seen0 = tiles.seen(tile, row()), seen1 = tiles.seen(tile, row() + 8);
      const int first = token + 2 * (lane_id() & 3);
      mask_rows<64>(p, {seen0 - first, seen1 - first});
    };
    maximum = {kLeastScore, kLeastScore};
    if (token + kBlock > seen_by_all) mask();
    raise_maximum();
    weigh();
    sum = block_sum;
    pack_weights();
#pragma unroll
    for (int i = 0; i < 64; ++i) o[i] = 0.0f;
    if (token + kBlock > tile.tokens && tiles.is_followed(tile)) {
      // Unused tokens behind the end of the request: their weights are 0, but 0 * NaN would spoil the output. Both
      // warpgroups write these zeros, each before its own product.
      value_ring.wait_until_full();
      const int thread = thread_id() & 127;
      for (int i = tile.tokens - token + (thread >> 3); i < kBlock; i += 16) {
        store_zeros(shared.values[value_ring.stage] + i * 128 + (thread & 7) * 16);
        store_zeros(shared.values[value_ring.stage] + kKeyBox + i * 128 + (thread & 7) * 16);
      }
      async_fence();
      named_sync(kGroup0 + group, 128);
    }

#pragma unroll 1
    for (int i = tile.blocks - 1; i > 0; --i) {
      token -= kBlock;
      key_ring.wait_until_full();
      if (in_turns) take_turn();
      scores();
      products();
      if (in_turns) pass_turn();
      mma_wait<1>();
      pin<64>(p);
      if (token + kBlock > seen_by_all) mask();
      weigh();
      mma_wait<0>();
      products_done();
      // Some weight may be large: against a raised maximum, from the scores once more.
      if (__any_sync(~0u, named_any(kGroup0 + group, 128, block_sum.x > kLargeSum || block_sum.y > kLargeSum))) {
        scores();
        mma_wait<0>();
        pin<64>(p);
        if (token + kBlock > seen_by_all) mask();
        raise_maximum();
        weigh();
        sum = {sum.x * factors.x, sum.y * factors.y};
        rescale_rows<64>(o, factors);
      }
      keys_done();
      sum = {sum.x + block_sum.x, sum.y + block_sum.y};
      pack_weights();
    }

    const Tile next = next_seen_tile();
    const bool goes_on = next.head >= 0 && has_rows(next, group);
    if (goes_on) queries_done = load_queries(next);
    if (in_turns) take_turn();
    products();
    // Without a next tile of what lies there: a branch around these would serialise them. Where the next one goes by
    // that is its queries, which the first warpgroup has waited for before it passed the turn.
    scores();
    if (goes_on) warp_arrive(queries_done);
    if (in_turns && (goes_on || group == 0)) pass_turn();
    sum = sum_of_rows(sum);
    mma_wait<1>();
    products_done();
    const float2 inverse = {sum.x == 0.0f ? 0.0f : __fdividef(1.0f, sum.x),
                            sum.y == 0.0f ? 0.0f : __fdividef(1.0f, sum.y)};
    bool part = false;
    if constexpr (Tiles::has_parts) part = tiles.is_part(tile);
    if (!part) {
      if constexpr (Tiles::reads_places) {
        store_row<dtype>(tiles.o(tile, places.x), o, 0, inverse.x, places.x >= 0);
        store_row<dtype>(tiles.o(tile, places.y), o, 1, inverse.y, places.y >= 0);
        if ((lane_id() & 3) == 0 && places.x >= 0) *tiles.lse(tile, places.x) = tiles.lse_of(maximum.x, sum.x);
        if ((lane_id() & 3) == 0 && places.y >= 0) *tiles.lse(tile, places.y) = tiles.lse_of(maximum.y, sum.y);
      } else {
        store_output(tile, inverse);
        store_lse(tile, {tiles.lse_of(maximum.x, sum.x), tiles.lse_of(maximum.y, sum.y)});
      }
    } else if constexpr (Tiles::has_parts) {
      // Here, beside the products: behind them the compiler would spill registers.
      tiles.store_part(tile, row(), o, inverse, {log_sum(maximum.x, sum.x), log_sum(maximum.y, sum.y)});
      tiles.merge_parts(tile, group, kGroup0 + group);
    }
    mma_wait<0>();
    if (next.head < 0) break;
    tile = next;
    if constexpr (Tiles::may_be_half) {
      if (!goes_on && !begin()) break;
    }
  }
}

// The warp that draws tiles: the first by its place in the grid, the others from the counter, one ahead of the math
// warpgroups, but not before the producer is at the last block of the present tile. A thread block that drew earlier
// would take a tile which another could begin before, and short tiles behind long ones would even out nothing. Every
// tile is followed by one draw, and the last of all to draw leaves the counter at 0.
template <class Tiles>
__device__ __forceinline__ void draw(Shared& shared, Tiles tiles, int* counter) {
  const int count = tiles.count();
  int index = blockIdx.x;
  u32 phase = 1;
  for (;;) {
    const int head = tiles.draw(shared, index);
    barrier_arrive(shared.tile_full);
    if (head < 0) break;
    phase ^= 1;
    barrier_wait(shared.tile_empty, phase);
    int drawn = 0;
    if (lane_id() == 0) {
      drawn = atomicAdd(counter, 1);
      if (drawn == count - 1) *counter = 0;
    }
    index = gridDim.x + __shfl_sync(~0u, drawn, 0);
  }
}

// Loads 128 rows of a head, queries or keys, and their RoPE columns into the next stage of the ring.
__device__ __forceinline__ void load_rows(Shared& shared, Ring<kKeyStages>& ring, const TensorMap& map,
                                          const TensorMap& rope_map, int row, int head, int rope_head) {
  const u32 to = shared.keys[ring.stage];
  const u32 full = ring.full();
  ring.wait_until_empty();
  barrier_expect(full, sizeof(shared.keys.elements[0]));
  tma_load(to, map, row, 0, head, full);
  tma_load(to + 2 * kKeyBox, rope_map, row, 0, rope_head, full);
  ring.next();
}

// The thread that loads.
template <class Tiles>
__device__ __forceinline__ void load(Shared& shared, const Tiles tiles) {
  u32 tile_phase = 0;
  Ring<kKeyStages> key_ring(shared.key_ring, Side::producer);
  Ring<kValueStages> value_ring(shared.value_ring, Side::producer);
  int value_head = -1, value_token = 0;  // loaded behind the keys of the block after it, in the order of use
  auto load_values = [&] {
    if (value_head < 0) return;
    const u32 full = value_ring.full();
    value_ring.wait_until_empty();
    barrier_expect(full, sizeof(shared.values.elements[0]));
    tma_load(shared.values[value_ring.stage], tiles.with.v_map, value_token, 0, value_head, full);
    value_ring.next();
    value_head = -1;
  };
  for (;;) {
    const auto tile = read_tile<typename Tiles::Tile>(shared, tile_phase);
    if (tile.head < 0) break;
    tiles.take_queries(shared, key_ring, tile);
    load_values();
    const int first = tiles.first_block(tile);
    if (tile.blocks == 0) barrier_arrive(shared.tile_empty);
    for (int block = first + tile.blocks - 1; block >= first; --block) {
      if (block == first) barrier_arrive(shared.tile_empty);
      const int token = tiles.token(tile, block);
      load_rows(shared, key_ring, tiles.with.k_map, tiles.with.kpe_map, token, tiles.head(tile), tiles.rope_head(tile));
      load_values();
      value_head = tiles.head(tile);
      value_token = token;
    }
  }
  load_values();
}

// A thread block, from its start to its end. `begin` comes before the first tile is drawn.
template <class Tiles, class Begin>
__device__ __forceinline__ void attend_tiles(const Tiles tiles, int* counter, Begin begin) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 7), 0);
  if (threadIdx.x == 0) {
    shared.key_ring.init(1, 8);
    shared.value_ring.init(1, 8);
    barrier_init(shared.tile_full, 32);
    barrier_init(shared.tile_empty, 257);
    barrier_init_done();
  }
  if (threadIdx.x == 256) {
    for (const TensorMap* map :
         {&tiles.with.q_map, &tiles.with.qpe_map, &tiles.with.k_map, &tiles.with.kpe_map, &tiles.with.v_map})
      tma_prefetch_map(*map);
  }
  __syncthreads();
  begin();
  if (role < 2) {
    take_registers<kConsumerRegisters>();
    attend(shared, role, tiles);
  } else {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == 256) load(shared, tiles);
    if (threadIdx.x / 32 == 9) draw(shared, tiles, counter);
  }
}

}  // namespace hypermla::cute
