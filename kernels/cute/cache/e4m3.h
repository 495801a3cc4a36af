// Values of 16 bits become e4m3, 16 at a time. They are divided by a factor, not multiplied by its reciprocal: so they
// are rounded as other libraries round them, and their caches have the same bytes.
#pragma once

#include "cache_ops.h"
#include "hopper/fragments.h"

namespace hypermla::cute {

inline constexpr float kMostE4m3 = 448.0f;

// Two numbers as e4m3, the first in the low byte: to nearest, ties to even, beyond 448 to 448. NaN stays NaN.
__device__ __forceinline__ unsigned pack_two_e4m3(float low, float high) {
#if __CUDA_ARCH__ >= 890
  unsigned short packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
#else
  const auto e4m3 = [](float x) {
    if (x != x) return 0x7f;
    const int sign = __float_as_int(x) >> 24 & 0x80;
    const float magnitude = fminf(fabsf(x), kMostE4m3);
    if (magnitude < 0x1p-6f) return sign | static_cast<int>(rintf(magnitude * 0x1p9f));  // multiples of 2^-9
    const int bits = __float_as_int(magnitude) - (120 << 23);  // the exponent's bias: 7 instead of 127
    return sign | (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
  };
  return static_cast<unsigned>(e4m3(low) | e4m3(high) << 8);
#endif
}

struct Sixteen {
  float2 pairs[8];
};
template <DType dtype>
__device__ __forceinline__ Sixteen sixteen(uint4 first, uint4 second) {
  return {{unpack<dtype>(first.x), unpack<dtype>(first.y), unpack<dtype>(first.z), unpack<dtype>(first.w),
           unpack<dtype>(second.x), unpack<dtype>(second.y), unpack<dtype>(second.z), unpack<dtype>(second.w)}};
}
__device__ __forceinline__ uint4 e4m3_of(const Sixteen& x, float factor) {
  const auto four = [&](int i) {
    const float2 a = x.pairs[i], b = x.pairs[i + 1];
    return pack_two_e4m3(a.x / factor, a.y / factor) | pack_two_e4m3(b.x / factor, b.y / factor) << 16;
  };
  return make_uint4(four(0), four(2), four(4), four(6));
}

}  // namespace hypermla::cute
