// Barriers in shared memory that count arrivals and arriving bytes. Goal: the few operations a producer and its
// consumers need. No goal: cluster-wide barriers.
//
// A barrier alternates between phases of parity 0 and 1. wait(b, parity) returns once the phase of that parity is over,
// so a consumer starts with parity 0, and a producer that waits for empty buffers starts with parity 1, which a fresh
// barrier passes. A waiter may not fall two phases behind.
#pragma once

#include "shared.h"

namespace hypermla::cute {

struct Barrier {
  u64 state;
  __device__ __forceinline__ operator u32() const { return shared_address(this); }
};
template <int n>
using Barriers = Array<Barrier, n>;

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the copy engine; one thread, before the block's __syncthreads().
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival that also tells how many bytes the copy engine will bring in this phase.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nwait_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over_%=;\nbra wait_%=;\nover_%=:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace hypermla::cute
