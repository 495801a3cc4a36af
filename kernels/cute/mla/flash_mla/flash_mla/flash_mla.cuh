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
//   warpgroup 2   producer: loads queries and token blocks, and waits for the parts of others
//
// Order of the products for a pair: S(even) | S(odd) | O += P(even) Z(even) | O += P(odd) Z(odd). So the softmax of the
// even block runs beside S(odd), and that of the odd block beside O += P(even) Z(even). Two named barriers keep this
// order. Both warpgroups share one running maximum. It is raised only when a score exceeds it by more than
// kRescaleThreshold; the new maximum then goes to the other warpgroup through shared memory, with the weights.
//
// Shared memory (struct Shared in latent/attend_latent.cuh; boxes of 64 rows x 64 columns, 8192 bytes, at multiples of
// 1024 bytes): queries, 8 boxes and the one of RoPE | a ring of pairs of latent boxes, 8 places | the RoPE boxes of the
// even and of the odd block | barriers, row values. A token block is loaded and freed in pairs of boxes. Once its
// scores are done, its weights P replace its RoPE box. Outputs leave through places of the odd block. With tiling.spare
// the ring has a ninth place, so that each pair is asked for one earlier; the queries' RoPE columns are in registers
// then, to which they come by way of the ring.
//
// Paged caches: a page is a batch element of the maps of the tokens. The producer warp reads the block table ahead, a
// page a lane; a thread of another warp loads the queries. Pages of 16 or 32 tokens are loaded by a warp each, the
// queries by the first of them. Pages of 1 token are gathered by all threads of warpgroup 2 (latent/gather_tokens.cuh).
// Pages behind the end of a request are not loaded; their scores are masked and their values zeroed.
//
// The consumers and the loads of boxes are in latent/attend_latent.cuh; the merge of tiles that were cut, which the
// consumers do at the end while the producers' last warp watches for parts, is in latent/merge_tiles.cuh.
//
// grid = any multiple of the cluster, by the work list; 384 threads, flash_mla_shared_bytes() of dynamic shared memory.
// Clusters share nothing and only place thread blocks beside each other.
#pragma once

#include "flash_mla.h"
#include "latent/ask_ahead.cuh"
#include "latent/attend_latent.cuh"
#include "latent/gather_tokens.cuh"
#include "latent/start.cuh"

namespace hypermla::cute {

using namespace latent;

// Query boxes: 64 rows and 2 groups of qc_map, 1 of qpe_map. Token boxes: 64 rows, or a smaller page; 2 groups of
// z_map, 1 where pages are smaller, and 1 of kpe_map. Where pages are smaller than 16 tokens the maps of the cache are
// not used.
template <LatentProblem problem, FlashMlaTiling tiling>
__global__ void __launch_bounds__(kFlashMlaThreads, 1) flash_mla(const __grid_constant__ LatentArguments with) {
  static_assert(problem.k == 512 && problem.p == 64, "the layouts are made for 512 latent and 64 RoPE columns");
  static_assert(!problem.fp8, "tokens are in the type of the queries");
  extern __shared__ __align__(1024) unsigned char dynamic[];
  constexpr bool gathered = is_gathered(problem.page);
  static_assert(!(gathered && tiling.spare), "threads that gather have registers that a spare place takes");
  using Layout = Shared<tiling.spare>;
  static_assert(sizeof(Layout) == flash_mla_shared_bytes(tiling.spare) && sizeof(Layout) <= kMaxSharedBytes);
  Layout& shared = *reinterpret_cast<Layout*>(dynamic);
  constexpr int kArrivals = gathered ? kGatherThreads : kLoaders<problem>;    // at a pair
  constexpr int kRopeArrivals = kArrivals + (gathered ? kArrivals / 32 : 0);  // each warp for its present rows, too
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 7), 0);
  ask_for_code();
  if (threadIdx.x == 0) {
    for (int place = 0; place < Layout::kPlaces; ++place) {
      barrier_init(shared.full[place], kArrivals);
      barrier_init(shared.empty[place], 4);
    }
    for (int slot = 0; slot < 2; ++slot) {
      barrier_init(shared.rope_full[slot], kRopeArrivals);
      barrier_init(shared.rope_empty[slot], 8);
    }
    for (int group = 0; group < Layout::kQueryGroups; ++group) barrier_init(shared.queries_full[group], 1);
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
  const unsigned warp = threadIdx.x / 32;
  if constexpr (!gathered) {
    if (warp == kAskingWarp) ask_ahead<problem>(with);
  }
  wait_for_previous();  // if launched programmatically, all before this ran beside the end of the previous kernel
  if constexpr (gathered) launch_next();
  // Not before the waits: the producer would lose its uniform registers.
  const WorkItem* __restrict__ work = with.own_work();
  if (role >= 2) {
    give_registers<gathered ? 72 : 40>();
    if constexpr (gathered) {
      gather<tiling, tiling.evict_first ? keep_gathered(problem.causal) : Keep::normal>(shared, work, with);
      watch_tiles(shared.cut, with);
    } else {
      constexpr int kWarps = kLoaders<problem>;
      if (warp == kAskingWarp) launch_next_if_short(work, with);
      if (problem.page > 0 ? warp < 8 + kWarps : threadIdx.x == 256)
        load<problem, tiling>(kWarps > 1 ? uniform(warp - 8) : 0, shared, work, with);
      if (kWarps == 1 && threadIdx.x == 288) {
        RingPlace<tiling.spare> place;
        load_all_queries(work, [&](const WorkItem& item, u32 phase) {
          load_queries<tiling>(shared, item, with, place, phase);
          place = place.behind(item);
        });
      }
      watch_tiles(shared.cut, with);
    }
    return;
  }
  take_registers<gathered ? 216 : 232>();
  attend<problem>(role, shared, work, with);
  using Scratch = MergeScratch<RowsOnM>;  // in the place of the queries and of the tokens behind them
  static_assert(sizeof(Scratch) <= sizeof(shared.queries) + sizeof(shared.pairs));
  merge_tiles<problem.dtype, RowsOnM>(with, shared.cut, *reinterpret_cast<Scratch*>(shared.queries.bytes));
}

}  // namespace hypermla::cute
