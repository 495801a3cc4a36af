// Copies of 16 bytes from global to shared memory, thread by thread: for rows that lie anywhere, where the copy engine
// would take an instruction for each of them.
#pragma once

#include "constants.h"
#include "mbarrier.h"

namespace hypermla::cute {

// 16 bytes, past L1. No memory clobber: they are read behind a barrier only, and a clobber would serialise the address
// computations.
template <Keep keep = Keep::normal>
__device__ __forceinline__ void copy_ahead(u32 shared, const void* global) {
  if constexpr (keep == Keep::normal)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global));
  else
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "l"(static_cast<u64>(keep)));
}

// As copy_ahead(), or zeros.
__device__ __forceinline__ void copy_ahead_or_zero(u32 shared, const void* global, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(wanted ? 16 : 0));
}

// Arrives at a barrier once all copies that this thread has started are there. The barrier counts every thread. Copies
// are ordinary accesses: a warp that reads them by wgmma puts async_fence() between the wait and it.
__device__ __forceinline__ void barrier_arrive_when_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace hypermla::cute
