// bfloat16 as storage: the upper half of a float. Arithmetic happens in float, as on a GPU.
#pragma once

#include <bit>
#include <cstdint>

struct __nv_bfloat16 {
  std::uint16_t bits;

  __nv_bfloat16() = default;
  // Rounds to nearest even; a NaN stays one (it becomes quiet).
  constexpr explicit(false) __nv_bfloat16(float value) noexcept : bits(round(std::bit_cast<std::uint32_t>(value))) {}
  constexpr operator float() const noexcept { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

 private:
  static constexpr std::uint16_t round(std::uint32_t word) noexcept {
    const std::uint32_t nearest = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    const std::uint32_t quiet = (word >> 16) | 0x40;
    return static_cast<std::uint16_t>((word & 0x7fffffff) > 0x7f800000 ? quiet : nearest);
  }
};
