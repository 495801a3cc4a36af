// tf32: a float with 10 mantissa bits, kept in a float's four bytes.
#pragma once

#include <bit>
#include <cstdint>

struct __nv_tf32 {
  float value;

  __nv_tf32() = default;
  // Rounds to nearest even; NaN and infinity are kept.
  constexpr explicit(false) __nv_tf32(float x) noexcept : value(x) {
    const auto word = std::bit_cast<std::uint32_t>(x);
    if ((word & 0x7f800000) != 0x7f800000) {
      value = std::bit_cast<float>((word + 0xfff + ((word >> 13) & 1)) & ~std::uint32_t{0x1fff});
    }
  }
  constexpr operator float() const noexcept { return value; }
};
