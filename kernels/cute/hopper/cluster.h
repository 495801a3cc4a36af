// Clusters: thread blocks that can reach each other's shared memory. Addresses are 32-bit: cluster_address names the same
// place in the shared memory of another rank.
#pragma once

#include "mbarrier.h"

namespace hypermla::cute {

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all thread blocks of the cluster.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 cluster_address(u32 shared, u32 rank) {
  u32 address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

__device__ __forceinline__ void cluster_store(u32 address, float a, float b) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ void cluster_store(u32 address, float a, float b, float c, float d) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

// Arrives at a barrier of another rank; what this thread wrote before is visible to those who wait there.
__device__ __forceinline__ void cluster_arrive(u32 barrier_address) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier_address) : "memory");
}

// barrier_wait for arrivals of other ranks.
__device__ __forceinline__ void cluster_barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nwait_%=:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over_%=;\nbra wait_%=;\nover_%=:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace hypermla::cute
