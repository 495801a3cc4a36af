// flash_mla (v0) with another way for tokens in FP8, whose cache may be dense, too: two warpgroups gather and widen
// them (latent/gather_fp8.cuh), where v0 has one. All else is v0: its header says what a thread block does and in which
// order.
//
// Roles (384 threads, 512 where tokens are FP8):
//   warpgroup 0   consumer: columns   0..255 of the output, scores and weights of the even blocks
//   warpgroup 1   consumer: columns 256..511 of the output, scores and weights of the odd blocks
//   warpgroup 2   producer: loads queries and token blocks
//   warpgroup 3   producer, for FP8 only
//
// grid = any, by the work list; 384 or 512 threads, kFlashMlaV2SharedBytes of dynamic shared memory.
#pragma once

#include "flash_mla_v2.h"
#include "latent/attend_latent.cuh"
#include "latent/gather_fp8.cuh"
#include "latent/gather_tokens.cuh"

namespace hypermla::cute {

using namespace latent;

static_assert(sizeof(Shared) == kFlashMlaV2SharedBytes);

// Query boxes: 64 rows and 2 groups of qc_map, 1 of qpe_map. Token boxes: 64 rows, or a smaller page; 2 groups of
// z_map, 1 where pages are smaller, and 1 of kpe_map. Where pages are smaller than 16 tokens the maps of the cache are
// not used.
template <LatentProblem problem, FlashMlaV2Tiling tiling>
__global__ void __launch_bounds__(problem.fp8 ? kFlashMlaV2Fp8Threads : kFlashMlaV2Threads, 1)
    flash_mla_v2(const __grid_constant__ Fp8Arguments with) {
  static_assert(problem.k == 512 && problem.p == 64, "the layouts are made for 512 latent and 64 RoPE columns");
  static_assert(!problem.fp8 || (problem.page == 1 && problem.dtype == DType::bfloat16), "tokens of fp8 are gathered");
  extern __shared__ __align__(1024) unsigned char dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  constexpr bool gathered = problem.page > 0 && problem.page < kLeastBox;
  constexpr int kArrivals = problem.fp8 ? kFp8Threads : gathered ? 128 : 1;  // at a pair of boxes
  constexpr int kRopeArrivals = gathered ? kArrivals + kArrivals / 32 : 1;   // each warp for its present rows, too
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 7), 0);
  if (threadIdx.x == 0) {
    for (int pair = 0; pair < kBoxPairs; ++pair) {
      for (int slot = 0; slot < 2; ++slot) {
        barrier_init(shared.full[slot][pair], pair == kRope ? kRopeArrivals : kArrivals);
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
  if (role >= 2) {
    give_registers<problem.fp8 ? 48 : gathered ? 72 : 40>();
    if (!gathered) collect_ahead(shared.cut, work, with);
    if constexpr (problem.fp8) {
      gather_fp8_by_eight<tiling.token_bytes, tiling>(shared, work, with);
    } else if constexpr (gathered) {
      gather<tiling>(shared, work, with);
    } else if (problem.page > 0 ? threadIdx.x < 288 : threadIdx.x == 256) {
      load<problem, tiling>(shared, work, with);
    }
    if (gathered && threadIdx.x < 384) collect_ahead(shared.cut, work, with);
    return;
  }
  take_registers<problem.fp8 ? 208 : gathered ? 216 : 232>();
  if (role == 0)
    attend<problem, 0>(shared, work, with);
  else
    attend<problem, 1>(shared, work, with);
  merge_tiles<problem.dtype, RowsOnM>(with, work, shared.cut, *reinterpret_cast<MergeScratch*>(shared.queries.bytes));
}

}  // namespace hypermla::cute
