// Stands in for kernels/cute/hopper/fragments.h where kernels run as C++ threads: vectors, and pairs of 16-bit
// elements.
#pragma once

#include <cmath>

#include "hypermla/base/half.h"
#include "warpgroup.h"

struct float2 {
  float x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace hypermla::cute {

// A GPU's passes over every NaN, glibc's returns a signalling one.
inline float fmaxf(float x, float y) { return y > x || std::isnan(x) ? y : x; }

template <DType dtype>
unsigned pack(float low, float high) {
  return from_float(low, dtype) | unsigned{from_float(high, dtype)} << 16;
}
template <DType dtype>
float2 unpack(unsigned packed) {
  return {to_float(std::uint16_t(packed), dtype), to_float(std::uint16_t(packed >> 16), dtype)};
}

}  // namespace hypermla::cute
