// Floating-point numbers of 16 and 8 bits on the CPU, by their bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "hypermla/dtype.h"

namespace hypermla {

inline float to_float(std::uint16_t bits, DType dtype) {
  if (dtype == DType::bfloat16) return std::bit_cast<float>(std::uint32_t{bits} << 16);
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float value = exponent == 31  ? mantissa ? std::nanf("") : std::numeric_limits<float>::infinity()
                       : exponent == 0 ? std::ldexp(float(mantissa), -24)
                                      : std::ldexp(float(mantissa + 1024), exponent - 25);
  return bits >> 15 ? -value : value;
}

inline std::uint16_t from_float(float value, DType dtype) {  // to nearest, ties to even
  if (value != value) return dtype == DType::bfloat16 ? 0x7fc0 : 0x7e00;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if (dtype == DType::bfloat16) return std::uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  const std::uint16_t sign = std::uint16_t(bits >> 16 & 0x8000);
  const float magnitude = std::abs(value);
  if (!(magnitude < 65520.0f)) return sign | 0x7c00;
  if (magnitude < 6.103515625e-5f) return std::uint16_t(sign | std::lrint(std::ldexp(magnitude, 24)));
  const std::uint32_t rest = std::bit_cast<std::uint32_t>(magnitude);
  return std::uint16_t(sign | ((rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13));
}

// e4m3: 4 bits of exponent, 3 of mantissa, no infinity (OCP 8-bit Floating Point Specification, 2023).
inline float e4m3_to_float(std::uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const float value = exponent == 15 && mantissa == 7 ? std::nanf("")
                      : exponent == 0                 ? std::ldexp(float(mantissa), -9)
                                                      : std::ldexp(float(mantissa + 8), exponent - 10);
  return bits >> 7 ? -value : value;
}
inline std::uint8_t e4m3_from_float(float value) {  // to nearest, ties to even; beyond 448 to 448
  if (value != value) return 0x7f;
  const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::fmin(std::abs(value), 448.0f);
  const int exponent = std::max(std::ilogb(magnitude), -6);  // of the multiples of 2^(exponent - 3) it is rounded to
  return std::uint8_t(sign + (exponent + 6) * 8 + std::lrint(std::ldexp(magnitude, 3 - exponent)));
}

}  // namespace hypermla
