// FlashAttention (Dao et al., arXiv 2205.14135; online softmax) for Hopper, over decompressed keys and values with a
// separate RoPE part whose keys all heads share (DeepSeek-V2, arXiv 2405.04434). Two warpgroups in turns, and products
// beside the softmax, as in FlashAttention-3 (Shah et al., arXiv 2407.08608). Our own: the tiles of a thread block form
// one stream of token blocks, so the pipeline does not drain between tiles.
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
// Prefixes: a tile holds the queries of as many whole requests of one prefix as fit (or 128 queries of one request);
// each request and column group is one copy. A list made by plan_prefixes says which. The tokens of a prefix may be cut
// into parts.
//
// Shared memory (struct Shared; 1024-byte aligned, boxes of 64 columns with the 128-byte swizzle): ring of 3 x 48 KiB:
// queries or keys, 128 rows of 2 boxes and the RoPE box, a tile's queries before its keys | ring of 2 x 32 KiB: values
// of 128 tokens, 2 boxes | barriers and the drawn tile.
//
// grid = min(tiles, multiprocessors); 384 threads, kFlashAttentionSharedBytes of dynamic shared memory.
#pragma once

#include "flash_attention.h"
#include "hopper/constants.h"
#include "hopper/fragments.h"
#include "hopper/mbarrier.h"
#include "hopper/ring.h"
#include "hopper/rows.h"
#include "hopper/tma.h"
#include "hopper/warpgroup.h"
#include "hopper/wgmma.h"
#include "plan_prefixes.h"

namespace hypermla::cute {

inline constexpr int kRows = 128, kGroupRows = 64;  // queries of a tile, of a warpgroup
inline constexpr int kBlock = 128;                  // tokens of a block
inline constexpr float kLargeSum = 16384.0f;        // of 32 weights: fp16 holds it, and so it holds each of them
inline constexpr int kKeyStages = 3, kValueStages = 2;
inline constexpr u32 kKeyBox = kBlock * 128;  // bytes of 64 columns of a token block

// 128 queries of one head: drawn by the scheduler, read by the producer and the consumers.
struct Tile {
  int head;    // of all heads of all batch elements or prefixes; -1: no more tiles
  int row;     // first query
  int tokens;  // length of the request or prefix
  int blocks;  // that some query sees
  // With prefixes, see Chunk.
  int first = 0, requests = 0, first_block = 0, part = 0;
};

struct Shared {
  Array<Bytes<3 * kKeyBox>, kKeyStages> keys;
  Array<Bytes<2 * kKeyBox>, kValueStages> values;
  RingBarriers<kKeyStages> key_ring;
  RingBarriers<kValueStages> value_ring;
  Barrier tile_full, tile_empty;
  alignas(16) Tile tile;
  int heads[kRows];  // with prefixes: of every request of a tile
};
static_assert(sizeof(Shared) == kFlashAttentionSharedBytes && sizeof(Shared) <= kMaxSharedBytes);

// The rows of prefixes, see plan_prefixes.h.
struct Chunks {
  const ChunkCount* count;  // of the list behind it
  const int* order;         // requests by prefix; null: as they come
  const int* after_lengths;
  int after;

  __device__ __forceinline__ int request(int index) const { return order ? order[index] : index; }
};

// The order of tiles: sections of heads whose keys and values fit L2 together; in a section, causal tiles that see the
// most tokens first, so that the last wave is made of short ones.
struct TileOrder {
  int b, h, s, t;
  int heads_per_section;
  const int* lengths;
  Chunks chunks;

  template <bool causal>
  __device__ __forceinline__ Tile at(int index) const {
    const int row_tiles = (s + kRows - 1) / kRows, heads = b * h;
    if (index >= heads * row_tiles) return {-1, 0, 0, 0};
    const int first_head = index / (heads_per_section * row_tiles) * heads_per_section;
    const int section = min(heads_per_section, heads - first_head);
    const int within = index - first_head * row_tiles;
    const int head = first_head + within % section;
    const int m = causal ? row_tiles - 1 - within / section : within / section;
    const int tokens = lengths ? lengths[head / h] : t;
    const int seen = causal ? min(tokens, tokens - s + (m + 1) * kRows) : tokens;
    return {head, m * kRows, tokens, seen > 0 ? (seen + kBlock - 1) / kBlock : 0};
  }
};

template <bool prefixes>
__device__ __forceinline__ Tile read_tile(const Shared& shared, u32& phase) {
  barrier_wait(shared.tile_full, phase);
  phase ^= 1;
  const int4* words = reinterpret_cast<const int4*>(&shared.tile);
  const int4 tile = words[0];
  if constexpr (!prefixes) return {tile.x, tile.y, tile.z, tile.w};
  const int4 more = words[1];
  return {tile.x, tile.y, tile.z, tile.w, more.x, more.y, more.z, more.w};
}

// Named barriers whose number depends on the warpgroup: both run the same code, for the instruction cache's sake.
enum NamedBarrier { kTurn0 = 1, kTurn1 = 2, kGroup0 = 3, kGroup1 = 4 };

// One consumer warpgroup.
template <DecompressedProblem problem>
__device__ __forceinline__ void attend(Shared& shared, int group, unsigned short* __restrict__ o_ptr,
                                       float* __restrict__ lse_ptr, float scale_log2, int b, int h, int s, int t,
                                       const Chunks chunks) {
  constexpr DType dtype = problem.dtype;
  constexpr bool prefixes = problem.prefixes != 0;
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
  auto load_queries = [&] {
    key_ring.wait_until_full();
    const int lane = lane_id();
    const int own = group * kGroupRows + static_cast<int>((thread_id() >> 5) & 3) * 16 + (lane & 15);  // row
    const u32 from = shared.keys[key_ring.stage] + own * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll
    for (int i = 0; i < 12; ++i) load_matrices(q + 4 * i, (from ^ (i % 4 << 5)) + i / 4 * kKeyBox);
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
    const Tile read = read_tile<prefixes>(shared, tile_phase);
    Tile tile{uniform(read.head), uniform(read.row), uniform(read.tokens), uniform(read.blocks)};
    if constexpr (prefixes) {
      tile.first = uniform(read.first);
      tile.requests = uniform(read.requests);
      tile.first_block = uniform(read.first_block);
      tile.part = uniform(read.part);
    }
    barrier_arrive(
        shared.tile_empty);  // every reader for itself, as every writer below: racecheck follows nothing else
    return tile;
  };
  // Row r of a tile among the rows of all outputs; -1: there is none.
  auto output_row = [&](const Tile& tile, int r) -> long long {
    if constexpr (prefixes) {
      const int index = s > kRows ? 0 : r / s, query = s > kRows ? tile.row + r : r - index * s;
      if (index >= tile.requests || query >= s) return -1;
      const long long head =
          (static_cast<long long>(tile.part) * b + chunks.request(tile.first + index)) * h + tile.head % h;
      return head * s + query;
    }
    return tile.row + r < s ? static_cast<long long>(tile.head) * s + tile.row + r : -1;
  };
  auto store_lse = [&](const Tile& tile, float2 value) {
    if ((lane_id() & 3) == 0) {
      const long long first = output_row(tile, row()), second = output_row(tile, row() + 8);
      if (first >= 0) lse_ptr[first] = value.x;
      if (second >= 0) lse_ptr[second] = value.y;
    }
  };
  auto store_output = [&](const Tile& tile, float2 by) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const long long to = output_row(tile, row() + 8 * half);
      store_row<dtype>(o_ptr + to * 128, o, half, half ? by.y : by.x, to >= 0);
    }
  };
  // The next tile of which some token is seen; the others are answered on the way.
  auto next_seen_tile = [&] {
    Tile tile = next_tile();
    while (tile.head >= 0 && tile.blocks == 0) {
      for (int i = thread_id() & 127; i < kGroupRows * 16; i += 128) {
        const long long to = output_row(tile, group * kGroupRows + i / 16);
        if (to >= 0) reinterpret_cast<uint4*>(o_ptr + to * 128)[i % 16] = make_uint4(0, 0, 0, 0);
      }
      store_lse(tile, {-kInfinity, -kInfinity});
      tile = next_tile();
    }
    return tile;
  };

  Tile tile = next_seen_tile();
  if (tile.head < 0) return;
  u32 queries_done = load_queries();
  scores();
  warp_arrive(queries_done);
  mma_wait<0>();
  if (group == 1) pass_turn();

#pragma unroll 1
  for (;;) {  // the scores of the tile's first block are there
    pin<64>(p);
    keys_done();
    int token = (tile.first_block + tile.blocks - 1) * kBlock;
    // Tokens that row r sees; queries of a request with a prefix see its own tokens behind that, too.
    auto seen = [&](int r) {
      if constexpr (!problem.causal) return tile.tokens;
      if constexpr (!prefixes) return min(tile.tokens, tile.tokens - s + tile.row + r + 1);
      const int index = s > kRows ? 0 : r / s, query = s > kRows ? tile.row + r : r - index * s;
      int after = chunks.after;
      if (chunks.after_lengths)
        after = index < tile.requests ? chunks.after_lengths[chunks.request(tile.first + index)] : 0;
      return min(tile.tokens, tile.tokens + after - s + query + 1);
    };
    // Tokens that every row of the warpgroup sees.
    const int first_query = prefixes && s <= kRows ? 0 : tile.row + group * kGroupRows;
    const int seen_by_all =
        problem.causal ? min(tile.tokens,
                             tile.tokens + (prefixes && !chunks.after_lengths ? chunks.after : 0) - s + first_query + 1)
                       : tile.tokens;
    auto mask = [&] {
      const int seen0 = seen(row()), seen1 = seen(row() + 8);
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
    if (token + kBlock > tile.tokens && tile.tokens < t) {
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
      take_turn();
      scores();
      products();
      pass_turn();
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
    if (next.head >= 0) queries_done = load_queries();
    take_turn();
    products();
    scores();  // without a next tile of what lies there: a branch around these would serialise them
    if (next.head >= 0) warp_arrive(queries_done);
    if (next.head >= 0 || group == 0) pass_turn();
    sum = sum_of_rows(sum);
    mma_wait<1>();
    products_done();
    store_output(tile,
                 {sum.x == 0.0f ? 0.0f : __fdividef(1.0f, sum.x), sum.y == 0.0f ? 0.0f : __fdividef(1.0f, sum.y)});
    store_lse(tile, {log_sum(maximum.x, sum.x) * kLn2, log_sum(maximum.y, sum.y) * kLn2});
    mma_wait<0>();
    if (next.head < 0) break;
    tile = next;
  }
}

// The warp that draws tiles: the first by its place in the grid, the others from the counter, one ahead of the math
// warpgroups. Every thread block draws one number too many, and the last of all to draw leaves the counter at 0.
template <DecompressedProblem problem>
__device__ __forceinline__ void draw(Shared& shared, const TileOrder order, int* counter) {
  constexpr bool prefixes = problem.prefixes != 0;
  const int chunk_count = prefixes ? order.chunks.count->chunks : 0;
  const int tiles = prefixes ? order.h * chunk_count : order.b * order.h * ((order.s + kRows - 1) / kRows);
  int index = blockIdx.x;
  u32 phase = 1;
  const int lane = lane_id();
  for (;;) {
    Tile tile;
    if constexpr (prefixes) {
      const int head = index / chunk_count;
      const Chunk* chunk = reinterpret_cast<const Chunk*>(order.chunks.count + 1) + (index - head * chunk_count);
      tile.head = -1;
      if (head < order.h) {
        if (lane < 2) reinterpret_cast<int4*>(&shared.tile)[lane] = reinterpret_cast<const int4*>(chunk)[lane];
        tile.head = chunk->prefix * order.h + head;
#pragma unroll 1
        for (int i = lane; i < chunk->requests; i += 32)
          shared.heads[i] = order.chunks.request(chunk->first + i) * order.h + head;
      }
      __syncwarp();
      if (lane == 0) shared.tile.head = tile.head;
    } else {
      tile = order.template at<problem.causal>(index);
      if (lane == 0) *reinterpret_cast<int4*>(&shared.tile) = make_int4(tile.head, tile.row, tile.tokens, tile.blocks);
    }
    barrier_arrive(shared.tile_full);
    if (tile.head < 0) break;
    phase ^= 1;
    barrier_wait(shared.tile_empty, phase);
    int drawn = 0;
    if (lane == 0) {
      drawn = atomicAdd(counter, 1);
      if (drawn == tiles - 1) *counter = 0;
    }
    index = gridDim.x + __shfl_sync(~0u, drawn, 0);
  }
}

// The thread that loads.
template <bool prefixes>
__device__ __forceinline__ void load(Shared& shared, int h, int s, const TensorMap& q_map, const TensorMap& qpe_map,
                                     const TensorMap& k_map, const TensorMap& kpe_map, const TensorMap& v_map) {
  u32 tile_phase = 0;
  Ring<kKeyStages> key_ring(shared.key_ring, Side::producer);
  Ring<kValueStages> value_ring(shared.value_ring, Side::producer);
  int value_head = -1, value_block = 0;  // loaded behind the keys of the block after it, in the order of use
  auto load_keys = [&](const TensorMap& map, const TensorMap& rope_map, int row, int head, int rope_head) {
    const u32 to = shared.keys[key_ring.stage];
    const u32 full = key_ring.full();
    key_ring.wait_until_empty();
    barrier_expect(full, sizeof(shared.keys.elements[0]));
    tma_load(to, map, row, 0, head, full);
    tma_load(to + 2 * kKeyBox, rope_map, row, 0, rope_head, full);
    key_ring.next();
  };
  auto load_requests = [&](const Tile& tile) {
    const u32 to = shared.keys[key_ring.stage];
    const u32 full = key_ring.full();
    key_ring.wait_until_empty();
    const int rows = min(s, kRows);
    barrier_expect(full, tile.requests * rows * 384);
    u32 place = to;
    const int* head = shared.heads;
    for (int i = 0; i < tile.requests; ++i, ++head, place += rows * 128) {
      tma_load(place, q_map, tile.row, 0, *head, full);
      tma_load(place + kKeyBox, q_map, tile.row, 1, *head, full);
      tma_load(place + 2 * kKeyBox, qpe_map, tile.row, 0, *head, full);
    }
    key_ring.next();
  };
  auto load_values = [&] {
    if (value_head < 0) return;
    const u32 full = value_ring.full();
    value_ring.wait_until_empty();
    barrier_expect(full, sizeof(shared.values.elements[0]));
    tma_load(shared.values[value_ring.stage], v_map, value_block * kBlock, 0, value_head, full);
    value_ring.next();
    value_head = -1;
  };
  for (;;) {
    const Tile tile = read_tile<prefixes>(shared, tile_phase);
    if (tile.head < 0) break;
    if constexpr (prefixes) {
      if (tile.blocks > 0) load_requests(tile);
      barrier_arrive(shared.tile_empty);
    } else {
      barrier_arrive(shared.tile_empty);
      if (tile.blocks > 0) load_keys(q_map, qpe_map, tile.row, tile.head, tile.head);
    }
    load_values();
    for (int block = tile.first_block + tile.blocks - 1; block >= tile.first_block; --block) {
      load_keys(k_map, kpe_map, block * kBlock, tile.head, tile.head / h);
      load_values();
      value_head = tile.head;
      value_block = block;
    }
  }
  load_values();
}

// A query that sees no token gets o = 0 and lse = -inf. Causal: query i sees the tokens below length - s + i + 1.
template <DecompressedProblem problem, FlashAttentionTiling tiling>
__global__ void __launch_bounds__(384, 1) flash_attention(const __grid_constant__ FlashAttentionArguments with) {
  constexpr bool prefixes = problem.prefixes != 0;
  static_assert(problem.d == 128 && problem.p == 64, "the layouts are made for 128 columns and 64 RoPE columns");
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
    for (const TensorMap* map : {&with.q_map, &with.qpe_map, &with.k_map, &with.kpe_map, &with.v_map})
      tma_prefetch_map(*map);
  }
  __syncthreads();
  if constexpr (prefixes) wait_for_previous();  // plan_prefixes
  const Chunks chunks{with.chunk_list, with.order, with.after_lengths, with.after};
  const int b = with.b, h = with.h, s = with.s, t = with.t;
  if (role < 2) {
    take_registers<240>();
    attend<problem>(shared, role, static_cast<unsigned short*>(with.o), with.lse, with.scale_log2, b, h, s, t, chunks);
  } else {
    give_registers<24>();
    if (threadIdx.x == 256)
      load<prefixes>(shared, h, s, with.q_map, with.qpe_map, with.k_map, with.kpe_map, with.v_map);
    if (threadIdx.x / 32 == 9)
      draw<problem>(shared, TileOrder{b, h, s, t, with.heads_per_section, with.lengths, chunks}, with.counter);
  }
}

}  // namespace hypermla::cute
