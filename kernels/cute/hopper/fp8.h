// What a thread does with lines of shared memory: numbers of e4m3 become fp16.
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

}  // namespace hypermla::cute
