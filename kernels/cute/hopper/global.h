// Signals between thread blocks through global memory, what they write there for each other, and loads that are issued
// without waits.
#pragma once

#include "constants.h"
#include "shared.h"

namespace hypermla::cute {

// Loads that are issued one after the other without a wait between them. Otherwise, for want of registers, the compiler
// lets one arrive before it issues the next. What is not wanted is 0.
template <class T>
__device__ __forceinline__ T load_at_once(const void* from, bool wanted);
template <>
__device__ __forceinline__ u32 load_at_once(const void* from, bool wanted) {
  u32 x = 0;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.volatile.global.b32 %0, [%1];\n}"
               : "+r"(x)
               : "l"(from), "r"(static_cast<int>(wanted)));
  return x;
}
template <>
__device__ __forceinline__ float2 load_at_once(const void* from, bool wanted) {
  float2 x = {};
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p ld.volatile.global.v2.f32 {%0, %1}, [%2];\n}"
               : "+f"(x.x), "+f"(x.y)
               : "l"(from), "r"(static_cast<int>(wanted)));
  return x;
}
template <>
__device__ __forceinline__ uint4 load_at_once(const void* from, bool wanted) {
  uint4 x = {};
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p ld.volatile.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
               : "l"(from), "r"(static_cast<int>(wanted)));
  return x;
}
template <>
__device__ __forceinline__ float load_at_once(const void* from, bool wanted) {
  return __uint_as_float(load_at_once<u32>(from, wanted));
}
template <>
__device__ __forceinline__ float4 load_at_once(const void* from, bool wanted) {
  const uint4 x = load_at_once<uint4>(from, wanted);
  return {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
}

// What another thread block reads, once, by load_last() or copy_ahead<Keep::evict_first>(). L2 keeps it until then,
// while tokens pass through: else some of it goes to memory and back.
__device__ __forceinline__ void store_to_stay(uint4* to, uint4 x) {
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w), "l"(static_cast<u64>(Keep::evict_last))
               : "memory");
}
// As load_at_once(), what L2 need not keep then.
__device__ __forceinline__ uint4 load_last(const void* from) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from), "l"(static_cast<u64>(Keep::evict_first)));
  return x;
}

__device__ __forceinline__ void fence_all() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Adds behind all that this thread knows to be written.
__device__ __forceinline__ unsigned long long add_release(unsigned long long* to, unsigned long long more) {
  unsigned long long before;
  asm volatile("atom.release.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(to), "l"(more) : "memory");
  return before;
}
__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* from) {
  unsigned long long x;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
  return x;
}

}  // namespace hypermla::cute
