// FlashAttention for few queries. The work is to stream keys and values, from as few multiprocessors as can use the
// full memory bandwidth, so that the others are free for other work. What a multiprocessor moves through its shared
// memory bounds it, and padded rows cost energy. Hence:
//
//   up to 32 queries  rows on the N side of wgmma ("swap AB"): S^T = K Q^T, O^T = V^T P^T, 16 or 32 rows, not 64
//   up to 64 queries  rows on the M side, queries and weights in registers: shared memory is read for keys and values
//
// An item is two heads of a request, with one tile of rows each. Each of two consumer warpgroups takes one head and
// walks over the tokens in blocks of 64. Both use the same RoPE keys, which are loaded once. A consumer computes the
// scores of a block beside the products of the block before; its softmax runs beside the other consumer's products. No
// barrier orders the two. Of an odd number of heads the last one is computed by both.
//
// Roles (384 threads):
//   warpgroups 0, 1   consumers, one head each
//   warpgroup 2       four threads: two producers load the keys and values of consumer 0 and 1, a third loads RoPE
//                     keys; the scheduler draws items and loads their queries
//
// Items are drawn from a counter ahead of the consumers, so that loads do not pause between items, and requests of
// different lengths need no work list.
//
// Shared memory (struct Shared in decompressed/attend_few.cuh; boxes of 64 tokens x 64 columns, 8192 bytes, 128-byte
// swizzle): weights of consumer 0, 1 (rows x 64 tokens; with 64 rows none) | queries: 3 boxes of `rows` rows for each
// consumer, with 64 rows 3 boxes for both in turns | RoPE boxes | a ring of stages for each consumer, two boxes of keys
// or of values each | barriers, items and row values. A stage is filled by one copy: the copy engine takes about 34
// cycles for a copy and 2.4 for a row of 128 bytes. The output leaves through the last stage of values (16 and 32 rows)
// or from registers (64).
//
// The consumers and the loads of tokens are in decompressed/attend_few.cuh.
//
// grid = any, at most one thread block per item; 384 threads, flash_attention_v1_shared_bytes(rows) of dynamic shared
// memory.
#pragma once

#include "decompressed/attend_few.cuh"
#include "flash_attention_v1.h"

namespace hypermla::cute {

using namespace decompressed;

// The thread that loads RoPE keys.
template <int N>
__device__ __forceinline__ void load_ropes(Shared<N>& shared, const TensorMap& kpe_map) {
  Items<N> items(shared);
  Ring<Shared<N>::kRopes> ring(shared.rope_ring, Side::producer);
  for (;;) {
    const Item item = items.next();
    if (item.request < 0) break;
    for (int block = 0; block < item.blocks; ++block) {
      const u32 full = ring.full();
      ring.wait_until_empty();
      barrier_expect(full, kBoxBytes);
      tma_load(shared.ropes[ring.stage], kpe_map, block * kTile, 0, item.request, full);
      ring.next();
    }
  }
}

// The thread that draws items, the first by its place in the grid, the others from the counter, and loads their
// queries. Every item is followed by one draw, and the last of all draws leaves the counter at 0.
template <DecompressedProblem problem, FlashAttentionV1Tiling tiling>
__device__ __forceinline__ void draw(Shared<tiling.rows>& shared, const ItemOrder<tiling.rows> order, int* counter,
                                     const TensorMap& q_map, const TensorMap& qpe_map) {
  using Layout = Shared<tiling.rows>;
  const int items = order.items();
  Ring<kItems> ring(shared.item_ring, Side::producer);
  int place = 0;
  u32 phase = 1;
  int index = blockIdx.x;
  for (;;) {
    const Item item = order.template at<problem.causal>(index);
    ring.wait_until_empty();
    shared.items[ring.stage] = item;
    barrier_arrive(ring.full());
    ring.next();
    if (item.request < 0) break;
    const int drawn = atomicAdd(counter, 1);
    if (item.blocks > 0) {
#pragma unroll
      for (int consumer = 0; consumer < kConsumers; ++consumer) {
        const int head = item.request * order.h + min(item.head + consumer, order.h - 1);
        const u32 full = shared.query_full[consumer], to = shared.queries[consumer % Layout::kQueries];
        barrier_wait(shared.query_empty[consumer % Layout::kQueries], phase);
        barrier_expect(full, 3 * Layout::kRowBytes);
        tma_load(to, q_map, item.row, 0, head, full);
        tma_load(to + 2 * Layout::kRowBytes, qpe_map, item.row, 0, head, full);
        if (++place == Layout::kQueries) {
          place = 0;
          phase ^= 1;
        }
      }
    }
    if (drawn == items - 1) *counter = 0;
    index = gridDim.x + drawn;
  }
}

// A query that sees no token gets o = 0 and lse = -inf. Causal: query i sees the tokens below length - s + i + 1.
template <DecompressedProblem problem, FlashAttentionV1Tiling tiling>
__global__ void __launch_bounds__(384, 1) flash_attention_v1(const __grid_constant__ FlashAttentionV1Arguments with) {
  static_assert(tiling.rows == 16 || tiling.rows == 32 || tiling.rows == 64, "tiles of 16, 32 or 64 rows");
  static_assert(problem.d == 128 && problem.p == 64, "the layouts are made for 128 columns and 64 RoPE columns");
  using Layout = Shared<tiling.rows>;
  static_assert(sizeof(Layout) == flash_attention_v1_shared_bytes(tiling.rows) && sizeof(Layout) <= kMaxSharedBytes);
  extern __shared__ __align__(1024) unsigned char dynamic[];
  Layout& shared = *reinterpret_cast<Layout*>(dynamic);
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 7), 0);
  if (threadIdx.x == 0) {
    shared.rings.init(1, 4);
    for (int consumer = 0; consumer < kConsumers; ++consumer) barrier_init(shared.query_full[consumer], 1);
    for (int place = 0; place < Layout::kQueries; ++place) barrier_init(shared.query_empty[place], 4);
    shared.rope_ring.init(1, 4 * kConsumers);
    shared.item_ring.init(1, 129 * kConsumers + 1);
    barrier_init_done();
  }
  if (threadIdx.x == 256) {
    for (const TensorMap* map : {&with.q_map, &with.qpe_map, &with.k_map, &with.kpe_map, &with.v_map, &with.o_map})
      tma_prefetch_map(*map);
  }
  __syncthreads();
  const int h = with.h, s = with.s;
  if (role < kConsumers) {
    const int consumer = uniform(role);
    const Items<tiling.rows> items(shared);
    const Output output{with.o_map, static_cast<unsigned short*>(with.o), with.lse, s};
    if constexpr (Layout::kSwapped) {
      attend_swapped<problem, tiling>(consumer, shared, items, output, with.scale_log2, h, s);
    } else {
      take_registers<232>();
      attend<problem, tiling>(consumer, shared, items, output, with.scale_log2, h, s);
    }
  } else {
    if constexpr (tiling.rows == 64) give_registers<40>();
    const int warp = (threadIdx.x >> 5) - 4 * kConsumers;
    if (threadIdx.x & 31) return;
    if (warp < kConsumers) {
      load_tokens(warp, shared, Items<tiling.rows>(shared), with.k_map, with.v_map, h);
    } else if (warp == kConsumers) {
      load_ropes(shared, with.kpe_map);
    } else {
      draw<problem, tiling>(shared, ItemOrder<tiling.rows>{with.b, h, s, with.t, with.lengths}, with.counter,
                            with.q_map, with.qpe_map);
    }
  }
}

}  // namespace hypermla::cute
