// FlashMLA for few rows. The rows of a tile are on the N side of wgmma ("swap AB"), tokens and latent columns on the M
// side. So 16 rows cost a quarter of the 64 to which the base version pads: in products, in shared memory and in
// partial outputs. With few rows, or few tokens for each multiprocessor, memory and the start and end of the kernel set
// the time, not the tensor cores. The schedule is therefore simple and the ring of tokens deep.
//
// Rows: all heads share the latents, so the queries of a request are rows of one matrix, all heads' (LatentArguments).
// A thread block takes work items (latent/work.h): N = 16 or 32 rows against a range of token blocks of 64.
//
// Roles (384 threads):
//   warpgroups 0, 1   consumers: each takes every second token block and has its own maxima, sums and output (512, N),
//                     which are merged once, at the end of an item
//   warpgroup 2       producer: one warp loads tokens, two do of small pages; a thread of another warp loads queries
//
// A block, for a consumer: S^T (64 tokens, N) = Z Q^T, then the softmax down the tokens. A thread holds 2 tokens of
// N / 4 rows, so maxima cross lanes and warps. They are raised only when some score exceeds its running maximum by more
// than kRescaleThreshold; the warps vote on that. The weights P^T go through shared memory. Then O^T (512, N) += Z^T
// P^T with the same boxes of Z, as a transposed A operand.
//
// Shared memory (struct Shared; boxes of 64 tokens x 64 columns, 8192 bytes, 128-byte swizzle): queries, 9 boxes of N
// rows | weights of consumer 0, 1 (N rows x 64 tokens) | RoPE boxes of 2 blocks | ring of pairs of latent boxes, 4 a
// block | barriers and row values. The ring's 11 (N = 16) or 10 (N = 32) pairs are at least 2.5 blocks, so that the
// next block is being loaded while both consumers work. At the end of an item the places of a consumer's last block
// take what the consumers exchange, and the output on its way out.
//
// Clusters share nothing. They only place thread blocks side by side whose row tiles read the same tokens, since reads
// of neighbours are merged on their way to L2.
//
// grid = any multiple of the cluster, by the work list; 384 threads, flash_mla_v1_shared_bytes(N) of dynamic shared
// memory.
#pragma once

#include "flash_mla_v1.h"
#include "latent/ask_ahead.cuh"
#include "latent/attend_on_n.cuh"
#include "latent/start.cuh"

namespace hypermla::cute {

// Query boxes: tiling.rows rows and 8 groups of q.latent, 1 of q.rope. Token boxes: 64 rows and 2 groups of z_map, or a
// smaller page and 1 group, and 1 group of kpe_map.
template <LatentProblem problem, FlashMlaV1Tiling tiling>
__global__ void __launch_bounds__(384, 1) flash_mla_v1(const __grid_constant__ LatentArguments with) {
  static_assert(tiling.rows == 16 || tiling.rows == 32, "tiles of 16 or 32 rows");
  static_assert(problem.page == 0 || problem.page % kTile == 0 || kTile % problem.page == 0, "blocks and pages nest");
  static_assert(problem.k == 512 && problem.p == 64, "the layouts are made for 512 latent and 64 RoPE columns");
  constexpr bool trades_registers = tiling.rows == 32;  // 16 rows need no more than all threads start with
  constexpr Keep keep = tiling.evict_first ? Keep::evict_first : Keep::normal;
  using Layout = latent::on_n::Shared<tiling.rows>;
  static_assert(sizeof(Layout) == flash_mla_v1_shared_bytes(tiling.rows) && sizeof(Layout) <= kMaxSharedBytes);
  extern __shared__ __align__(1024) unsigned char dynamic[];
  Layout& shared = *reinterpret_cast<Layout*>(dynamic);
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 7), 0);
  latent::ask_for_code();
  if (threadIdx.x == 0) latent::on_n::init_barriers<problem>(shared);
  if (threadIdx.x == 256) {
    for (const TensorMap* map : {&with.q.latent, &with.q.rope, &with.z_map, &with.kpe_map}) tma_prefetch_map(*map);
  }
  __syncthreads();
  if constexpr (!is_gathered(problem.page)) {
    if (threadIdx.x / 32 == latent::kAskingWarp) latent::ask_ahead<problem>(with);
  }
  // The threads that load wait for the previous kernel, and the others for what they load; all of them where that
  // kernel makes the work list.
  if (with.planned) wait_for_previous();
  const WorkItem* __restrict__ work = with.own_work();
  if (role == 2) {
    if constexpr (trades_registers) give_registers<40>();
    return latent::on_n::produce<problem, keep>(shared, work, with, with.q);
  }
  if constexpr (trades_registers) take_registers<232>();
  latent::on_n::consume<problem>(uniform(role), shared, work, with);
}

}  // namespace hypermla::cute
