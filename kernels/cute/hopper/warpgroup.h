// What the threads of a warpgroup share and ask of the hardware: their indices, named barriers, shares of the
// registers, programmatic launch. Barrier 0 is __syncthreads().
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

__device__ __forceinline__ u32 block_id() {
  u32 block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

// A value that all lanes share, in a form in which the compiler knows it: in a uniform register, so that loops and
// branches on it do not count as divergent (wgmma may not be in flight over a branch that could diverge).
__device__ __forceinline__ int uniform(int value) {
  int same;
  asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(same) : "r"(value));
  return same;
}

// The same object of shared memory, whose address is in a register from here on. Where an object is named, a compiler
// works its address out anew, and asks a special register for it (SR_CgaCtaId), which takes some 25 clocks each time.
template <class T>
__device__ __forceinline__ T& held_address(T& object) {
  u32 address = shared_address(&object);
  asm volatile("" : "+r"(address));
  return *static_cast<T*>(__cvta_shared_to_generic(address));
}

// Makes a compiler forget where a value comes from. What is worked out from it is then worked out where it is needed,
// and not kept in registers from before a loop on.
__device__ __forceinline__ void forget_origin(int& value) { asm volatile("" : "+r"(value)); }

// One arrival of a whole warp, when its first lane comes by.
__device__ __forceinline__ void warp_arrive(u32 barrier) {
  if (lane_id() == 0) barrier_arrive(barrier);
}

// Named barriers, 1 to 15. sync meets `threads` threads, the arrivals of others among them; arrive does not wait.
__device__ __forceinline__ void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// A meeting that tells whether any of the threads said yes.
__device__ __forceinline__ bool named_any(int barrier, int threads, bool yes) {
  int any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.b32 %0, 1, 0, q;\n}"
               : "=r"(any)
               : "r"(static_cast<int>(yes)), "r"(barrier), "r"(threads)
               : "memory");
  return any;
}

template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Lets at least so many clocks pass.
__device__ __forceinline__ void pass_clocks(u32 clocks) {
  u32 begin, now;
  asm volatile("mov.u32 %0, %clock;" : "=r"(begin));
  do {
    asm volatile("mov.u32 %0, %clock;" : "=r"(now));
  } while (now - begin < clocks);
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

// 1 / x, off by one unit in the last place at most; of 0 and of numbers below the smallest normal one an infinity.
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace hypermla::cute
