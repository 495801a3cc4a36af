// What threads of a warpgroup say to each other and to the scheduler: named barriers, register shares, 8x8 matrix
// stores, programmatic launch. Barrier 0 is __syncthreads().
#pragma once

#include "mbarrier.h"

namespace hypermla::cute {

__device__ __forceinline__ u32 lane_id() {
  u32 lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

__device__ __forceinline__ u32 thread_id() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// The same value from all lanes, told to the compiler: the result lies in a uniform register, so loops and branches on
// it do not count as divergent (wgmma may not be in flight over a branch that could diverge).
__device__ __forceinline__ int uniform(int value) {
  int same;
  asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(same) : "r"(value));
  return same;
}

template <int id, int threads>
__device__ __forceinline__ void named_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(id), "n"(threads) : "memory");
}

template <int id, int threads>
__device__ __forceinline__ void named_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(id), "n"(threads) : "memory");
}

template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Four 8x8 matrices of 16-bit elements from the fragments of a warp; lane l gives the address of row l % 8 of matrix
// l / 8.
__device__ __forceinline__ void store_matrices(u32 shared, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

__device__ __forceinline__ void store_zeros(u32 shared) {  // 16 bytes
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(shared), "r"(0) : "memory");
}

// Programmatic launch: the next kernel of the stream may start / wait here until the previous one has finished.
__device__ __forceinline__ void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// 2^x; results below the smallest normal number become 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace hypermla::cute
