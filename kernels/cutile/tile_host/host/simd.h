// Vectors of the machine's width through the compiler's vector extensions: the same source for AVX2, AVX-512 and
// others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace cuda::tiles::host {

#if defined(__AVX512F__)
inline constexpr std::size_t kLanes = 16;
inline constexpr std::size_t kVectorRegisters = 32;
#elif defined(__AVX__)
inline constexpr std::size_t kLanes = 8;
inline constexpr std::size_t kVectorRegisters = 16;
#else
inline constexpr std::size_t kLanes = 4;
inline constexpr std::size_t kVectorRegisters = 16;
#endif

// Lane by lane: Floats, and Words of the same width.
using Floats [[gnu::vector_size(kLanes * 4)]] = float;
using Words [[gnu::vector_size(kLanes * 4)]] = std::uint32_t;
using Ints [[gnu::vector_size(kLanes * 4)]] = std::int32_t;
using Shorts [[gnu::vector_size(kLanes * 2)]] = std::uint16_t;

template <class Vector>
Vector load_vector(const void* from) noexcept {
  Vector result;
  std::memcpy(&result, from, sizeof(Vector));
  return result;
}
inline Floats load_floats(const float* from) noexcept { return load_vector<Floats>(from); }
template <class Vector>
void store_vector(void* to, Vector value) noexcept {
  std::memcpy(to, &value, sizeof(Vector));
}
inline Floats splat(float value) noexcept { return value - Floats{}; }

// Transposes kLanes vectors of kLanes 32-bit lanes: log2(kLanes) rounds, each exchanging blocks of twice the size.
template <std::size_t width, class Vector, std::size_t... lane>
void exchange(Vector& a, Vector& b, std::index_sequence<lane...>) noexcept {
  const Vector low = __builtin_shufflevector(a, b, (lane & width ? kLanes + (lane & ~width) : lane)...);
  b = __builtin_shufflevector(a, b, (lane & width ? kLanes + lane : (lane | width))...);
  a = low;
}
template <std::size_t width = 1, class Vector>
[[gnu::always_inline]] inline void transpose_lanes(Vector (&rows)[kLanes]) noexcept {
  if constexpr (width < kLanes) {
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kLanes; ++i) {
      if (!(i & width)) exchange<width>(rows[i], rows[i | width], std::make_index_sequence<kLanes>{});
    }
    transpose_lanes<width * 2>(rows);
  }
}

}  // namespace cuda::tiles::host
