// What a thread does with bytes on their way to shared memory: loads that stay in their place, numbers of e4m3 widened.
#pragma once

#include "fragments.h"

namespace hypermla::cute {

// 16 bytes that are read once, or zeros. As an ordinary load: the assembler moves loads of constants ahead, for which a
// thread that prefetches by itself has no registers.
__device__ __forceinline__ uint4 load_in_place(const unsigned char* from, bool wanted) {
  uint4 x = {};
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p ld.global.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
      : "l"(from), "r"(static_cast<int>(wanted)));
  return x;
}

__device__ __forceinline__ void store_line(u32 shared, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// Four e4m3 as fp16, two and two; exact.
__device__ __forceinline__ uint2 halves_of_e4m3(u32 word) {
  uint2 x;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(x.x), "=r"(x.y)
      : "r"(word));
  return x;
}

// 8 e4m3 times a scale, as bf16.
__device__ __forceinline__ uint4 widen_e4m3(u32 first, u32 second, float scale) {
  const auto two = [scale](u32 halves) {
    const float2 x = unpack<DType::float16>(halves);
    return pack<DType::bfloat16>(x.x * scale, x.y * scale);
  };
  const uint2 a = halves_of_e4m3(first), b = halves_of_e4m3(second);
  return {two(a.x), two(a.y), two(b.x), two(b.y)};
}

}  // namespace hypermla::cute
