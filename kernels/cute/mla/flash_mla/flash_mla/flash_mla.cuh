// FlashMLA for Hopper: attention over the latent cache with absorbed projections (DeepSeek-V2, arXiv 2405.04434) and
// online softmax (FlashAttention, arXiv 2205.14135). As in DeepSeek's FlashMLA two warpgroups hold the output of 64
// rows; the order of the products is our own.
//
// Rows: all heads share the latents, so the queries of a request are rows of one matrix, all heads' (LatentArguments).
// A thread block takes work items (latent/work.h). An item is 64 rows against a range of token blocks of 64. The blocks
// are taken in pairs: an even and an odd one.
//
// Roles (384 threads):
//   warpgroup 0   consumer: columns   0..255 of the output, scores and weights of the even blocks
//   warpgroup 1   consumer: columns 256..511 of the output, scores and weights of the odd blocks
//   warpgroup 2   producer: loads queries and token blocks
//
// Order of the products for a pair: S(even) | S(odd) | O += P(even) Z(even) | O += P(odd) Z(odd). So the softmax of the
// even block runs beside S(odd), and that of the odd block beside O += P(even) Z(even). Two named barriers keep this
// order. Both warpgroups share one running maximum. It is raised only when a score exceeds it by more than
// kRescaleThreshold; the new maximum then goes to the other warpgroup through shared memory, with the weights.
//
// Shared memory (struct Shared in latent/attend_latent.cuh; boxes of 64 rows x 64 columns, 8192 bytes, at multiples of
// 1024 bytes): queries, 9 boxes | the even token block, 9 boxes | the odd one, 9 boxes | barriers, row values. The last
// box of each is RoPE. Once the scores of a block are done, its weights P replace its RoPE box. A token block is loaded
// and freed in pairs of boxes. Outputs leave through the place of the odd block.
//
// Paged caches: a page is a batch element of the maps of the tokens. The producer warp reads the block table ahead, a
// page a lane. Pages of 16 or 32 tokens are loaded box by box. Pages of 1 token are gathered by all threads of
// warpgroup 2. Pages behind the end of a request are not loaded; their scores are masked and their values zeroed.
//
// The consumers and the loads of boxes are in latent/attend_latent.cuh, the merge of tiles that were cut, which the
// consumers do at the end, in latent/merge_tiles.cuh.
//
// grid = any, by the work list; 384 threads, kFlashMlaSharedBytes of dynamic shared memory.
#pragma once

#include "flash_mla.h"
#include "hopper/gather.h"
#include "latent/attend_latent.cuh"

namespace hypermla::cute {

using namespace latent;

static_assert(sizeof(Shared) == kFlashMlaSharedBytes);

// The warpgroup that gathers the tokens of pages of 1. A warp copies 16 rows of every block, 16 bytes a thread and
// copy; 8 threads copy the 64 columns of a box. Each thread's copies of a pair of boxes arrive at the pair's barrier by
// themselves, and the consumers order them before wgmma. So no thread waits for its own copies, and the threads do not
// meet: beside wgmma a meeting, or a look at what has arrived, takes hundreds of cycles.
template <FlashMlaTiling tiling>
__device__ __forceinline__ void gather(Shared& shared, const WorkItem* __restrict__ work, const LatentArguments& with) {
  constexpr int kRows = 4;  // of a thread, 4 apart
  const int thread = thread_id() & 127, unit = thread & 7, first_row = thread / 32 * 16 + thread / 8 % 4;
  const u32 to = shared.slots[0] + first_row * 128 + ((unit ^ (first_row & 3)) << 4);
  const unsigned char* __restrict__ z = static_cast<const unsigned char*>(with.z) + unit * 16;
  const unsigned char* __restrict__ kpe = static_cast<const unsigned char*>(with.kpe) + unit * 16;
  u32 phase = 1, queries_phase = 1;
  for (;; ++work) {
    const int begin = work->begin, end = work->end, tokens = work->tokens;
    if (begin == end) break;
    const int* __restrict__ table = with.block_table + static_cast<long long>(work->request) * with.table_width;
    int place[kRows], next[kRows];  // rows of the pool, for this block and the next; -1: none
    auto read_places = [&](int block) {
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const int token = block * kTile + first_row + 4 * j;
        next[j] = block < end && token < tokens ? table[token] : -1;
      }
    };
    read_places(begin);
    for (int block = begin; block < end || ((block - begin) & 1); ++block) {
      const int slot = (block - begin) & 1;
#pragma unroll
      for (int j = 0; j < kRows; ++j) place[j] = next[j];
      read_places(block + 1);
      // Whether the next pair is free is asked before the copies of this one.
      bool is_free = barrier_test(shared.empty[slot][0], phase);
#pragma unroll
      for (int i = 0; i < kBoxPairs; ++i) {
        const int pair = order_of_release(slot, i);
        if (!is_free) barrier_wait(shared.empty[slot][pair], phase);
        if (i + 1 < kBoxPairs) is_free = barrier_test(shared.empty[slot][order_of_release(slot, i + 1)], phase);
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
          if (place[j] < 0) continue;
          // Row and row + 4 lie 512 bytes apart, and by the swizzle bit 6 of their units differs.
          const u32 box = ((to + slot * kOperandBytes) ^ (j & 1) << 6) + 2 * pair * kBoxBytes + j * 512;
          if (i == kRope) {
            copy_ahead(box, kpe + static_cast<long long>(place[j]) * with.kpe_stride);
          } else {
            const unsigned char* from = z + static_cast<long long>(place[j]) * with.z_stride + pair * 256;
            copy_ahead(box, from);
            copy_ahead(box + kBoxBytes, from + 128);
          }
        }
        barrier_arrive_when_copied(shared.full[slot][pair]);
      }
      if (block == begin && thread == 0) {
        barrier_wait(shared.queries_empty, queries_phase);
        queries_phase ^= 1;
        load_queries<tiling>(shared, *work, with);
      }
      __syncwarp();
      if (slot) phase ^= 1;
    }
  }
}

// Query boxes: 64 rows and 2 groups of qc_map, 1 of qpe_map. Token boxes: 64 rows, or a smaller page; 2 groups of
// z_map, 1 where pages are smaller, and 1 of kpe_map. Where pages are smaller than 16 tokens the maps of the cache are
// not used.
template <LatentProblem problem, FlashMlaTiling tiling>
__global__ void __launch_bounds__(384, 1) flash_mla(const __grid_constant__ LatentArguments with) {
  static_assert(problem.k == 512 && problem.p == 64, "the layouts are made for 512 latent and 64 RoPE columns");
  extern __shared__ __align__(1024) unsigned char dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  constexpr bool gathered = problem.page > 0 && problem.page < kLeastBox;
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 7), 0);
  if (threadIdx.x == 0) {
    for (int pair = 0; pair < kBoxPairs; ++pair) {
      for (int slot = 0; slot < 2; ++slot) {
        barrier_init(shared.full[slot][pair], gathered ? 128 : 1);
        barrier_init(shared.empty[slot][pair], pair == kRope ? 8 : 4);
      }
      barrier_init(shared.queries_full[pair], 1);
    }
    barrier_init(shared.weights_ready[0], 128);
    barrier_init(shared.weights_ready[1], 128);
    barrier_init(shared.queries_empty, 8);
    barrier_init(shared.exchanged, 256);
    barrier_init_done();
  }
  if (threadIdx.x == 256) {
    for (const TensorMap* map : {&with.qc_map, &with.qpe_map, &with.z_map, &with.kpe_map}) tma_prefetch_map(*map);
  }
  __syncthreads();
  if (tiling.prefetch > 0 && problem.page == 0 && threadIdx.x == 256) {  // the work list is a constant of the host
    // An opaque copy of the index: else the compiler advances `work` here, and not behind the waits as below.
    int own = blockIdx.x;
    asm volatile("" : "+r"(own));
    const WorkItem item = with.work[static_cast<long long>(own) * with.rounds];
    for (int block = item.begin; block < min(item.begin + tiling.prefetch, item.end); ++block) {
      for (int pair = 0; pair < kRope; ++pair) tma_prefetch(with.z_map, block * kTile, 2 * pair, item.request);
      tma_prefetch(with.kpe_map, block * kTile, 0, item.request);
    }
  }
  wait_for_previous();  // if launched programmatically, all before this ran beside the end of the previous kernel
  launch_next();
  // Not before the waits: the producer would lose its uniform registers.
  const WorkItem* __restrict__ work = with.work + static_cast<long long>(blockIdx.x) * with.rounds;
  if (role == 2) {
    give_registers<gathered ? 72 : 40>();
    if (!gathered) collect_ahead(shared.cut, work, with);
    if constexpr (gathered) {
      gather<tiling>(shared, work, with);
      collect_ahead(shared.cut, work, with);
    } else if (problem.page > 0 ? threadIdx.x < 288 : threadIdx.x == 256) {
      load<problem, tiling>(shared, work, with);
    }
    return;
  }
  take_registers<gathered ? 216 : 232>();
  if (role == 0)
    attend<problem, 0>(shared, work, with);
  else
    attend<problem, 1>(shared, work, with);
  merge_tiles<problem.dtype, RowsOnM>(with, work, shared.cut, *reinterpret_cast<MergeScratch*>(shared.queries.bytes));
}

}  // namespace hypermla::cute
