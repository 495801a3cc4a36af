// What a thread does with lines of shared memory: numbers of e4m3 and bf16 become fp16.
#pragma once

#include "fragments.h"

namespace hypermla::cute {

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

// A factor as fp16, twice beside itself: its mantissa, 1 to 2, and its power of two, which alone may be below fp16's
// normal numbers.
struct HalfFactor {
  u32 mantissa, power;

  __device__ __forceinline__ explicit HalfFactor(float factor) {
    const u32 bits = __float_as_uint(factor);
    const float m = __uint_as_float((bits & 0x807fffff) | 0x3f800000), p = __uint_as_float(bits & 0x7f800000);
    mantissa = pack<DType::float16>(m, m);
    power = pack<DType::float16>(p, p);
  }
};

// 8 e4m3 times a factor, as fp16.
__device__ __forceinline__ uint4 widen_e4m3(u32 first, u32 second, HalfFactor factor) {
  const auto times = [factor](u32 x) {
    asm("mul.rn.f16x2 %0, %0, %1;\nmul.rn.f16x2 %0, %0, %2;" : "+r"(x) : "r"(factor.mantissa), "r"(factor.power));
    return x;
  };
  const uint2 a = halves_of_e4m3(first), b = halves_of_e4m3(second);
  return {times(a.x), times(a.y), times(b.x), times(b.y)};
}

// 8 bf16 as fp16: the same numbers, but that those from 65520 on become infinite and those below 2^-24 lose bits.
__device__ __forceinline__ uint4 halves_of_bf16(uint4 x) {
  const auto two = [](u32 both) {
    const float2 of = unpack<DType::bfloat16>(both);
    return pack<DType::float16>(of.x, of.y);
  };
  return {two(x.x), two(x.y), two(x.z), two(x.w)};
}

}  // namespace hypermla::cute
