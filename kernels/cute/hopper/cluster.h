// Two thread blocks of a cluster: each writes into the other's shared memory. Goal: what two blocks need that hand each
// other partial results. No goal: larger clusters, multicast.
//
// Bytes that were sent arrive at a barrier of the receiver, which expects them (barrier_expect()) and waits for them by
// wait_for_peer(). Both blocks must be there before anything is sent, and stay until all has arrived: cluster_sync() at
// the begin and at the end.
#pragma once

#include "mbarrier.h"

namespace hypermla::cute {

// Which of the two this block is, 0 or 1.
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of both blocks meet; what each wrote before, all see after.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The others need not wait for this thread any more. It may end, and meets nobody again.
__device__ __forceinline__ void leave_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// The place of the other block's shared memory that has this address in one's own.
__device__ __forceinline__ u32 in_peer(u32 shared) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(cluster_rank() ^ 1));
  return there;
}

// 16 bytes to the other block; they arrive at a barrier there. Both addresses are of in_peer().
__device__ __forceinline__ void send(u32 to, u32 a, u32 b, u32 c, u32 d, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier)
               : "memory");
}

// So many bytes of one's own shared memory, a multiple of 16, by the copy engine. One thread, behind the fences
// (async_fence) of those that have written them. `to` and `barrier` are of in_peer().
template <int bytes>
__device__ __forceinline__ void copy_to_peer(u32 to, u32 from, u32 barrier) {
  static_assert(bytes % 16 == 0);
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "n"(bytes), "r"(barrier)
               : "memory");
}

// One arrival at a barrier of the other block, of in_peer().
__device__ __forceinline__ void arrive_at_peer(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// As barrier_wait(), for what the other block has sent. Only shared memory is ordered: an order of all memory by the
// cluster (.acquire.cluster) would empty L1 each time.
__device__ __forceinline__ void wait_for_peer(u32 barrier, u32 parity) { barrier_wait(barrier, parity); }

}  // namespace hypermla::cute
