// The copy engine: boxes of a tensor that the host described by a tensor map, between global and shared memory.
//
// Maps have the 128-byte swizzle, and are 4-D, (64 columns, and three other axes), or 5-D. Most are (64 columns, rows,
// groups of 64 columns, batch), after which the coordinates below are named. A box of 64 rows is 8192 bytes, and
// element (r, c) lies at r * 128 + ((c / 8) ^ (r % 8)) * 16 + c % 8 * 2. Rows beyond the end of a batch element are
// read as zeros and not written.
#pragma once

#include "constants.h"
#include "hypermla/tensor_map.h"
#include "mbarrier.h"

namespace hypermla::cute {

__device__ __forceinline__ void tma_prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Loads the box at (row, group, batch); its bytes arrive at `barrier`. One thread.
template <Keep keep = Keep::normal>
__device__ __forceinline__ void tma_load(u32 shared, const TensorMap& map, int row, int group, int batch, u32 barrier) {
  if constexpr (keep == Keep::normal) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(shared),
        "l"(&map), "r"(barrier), "r"(0), "r"(row), "r"(group), "r"(batch)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
        "l"(&map), "r"(barrier), "r"(0), "r"(row), "r"(group), "r"(batch), "l"(static_cast<u64>(keep))
        : "memory");
  }
}

// The same of a map that has a fifth axis, `last`.
template <Keep keep = Keep::normal>
__device__ __forceinline__ void tma_load(u32 shared, const TensorMap& map, int row, int group, int batch, int last,
                                         u32 barrier) {
  if constexpr (keep == Keep::normal) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
        "[%2];" ::"r"(shared),
        "l"(&map), "r"(barrier), "r"(0), "r"(row), "r"(group), "r"(batch), "r"(last)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared),
        "l"(&map), "r"(barrier), "r"(0), "r"(row), "r"(group), "r"(batch), "r"(last), "l"(static_cast<u64>(keep))
        : "memory");
  }
}

// Brings the box into L2 only: harmless where the data is not yet what it will be. One thread.
__device__ __forceinline__ void tma_prefetch(const TensorMap& map, int row, int group, int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(0), "r"(row),
               "r"(group), "r"(batch)
               : "memory");
}

// Stores a box. One thread, after the threads that wrote it fenced (async_fence) and met at a barrier.
__device__ __forceinline__ void tma_store(const TensorMap& map, u32 shared, int row, int group, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared), "r"(0), "r"(row), "r"(group), "r"(batch)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until the stores of this thread have read shared memory.
__device__ __forceinline__ void tma_store_read_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Until the stores of this thread are done.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders this thread's ordinary shared-memory accesses before later ones of the copy engine and of wgmma.
__device__ __forceinline__ void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace hypermla::cute
