// exp2 and log2 on vectors of floats. Written out, because the C library's are calls per element, and -ffast-math,
// which would have the compiler use its vector library, breaks the arithmetic of infinities that an online softmax
// rests on.
#pragma once

#include <limits>

#include "elementwise.h"
#include "simd.h"

namespace cuda::tiles {
namespace host {

inline Floats pick(Ints condition, Floats yes, Floats no) noexcept { return condition ? yes : no; }

// 2^x with a relative error below 2e-7. -inf gives 0, +inf gives +inf, NaN stays; subnormal results are kept.
inline Floats exp2(Floats x) noexcept {
  x = pick(x < splat(-151.0f), splat(-151.0f), x);  // 2^-151 rounds to 0
  x = pick(x > splat(129.0f), splat(129.0f), x);    // and 2^129 to infinity; a NaN passes both
  const Floats shift = splat(12582912.0f);          // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const Floats shifted = x + shift;
  const Ints n = (Ints)((Words)shifted - (Words)shift);
  const Floats f = x - (shifted - shift);  // in [-1/2, 1/2]
  // exp(f ln 2): the Taylor coefficients ln(2)^i / i!; the first one left out is below 2^-29.
  Floats p = splat(1.5252734e-5f);
  p = p * f + splat(1.5403530e-4f);
  p = p * f + splat(1.3333558e-3f);
  p = p * f + splat(9.6181291e-3f);
  p = p * f + splat(5.5504109e-2f);
  p = p * f + splat(2.4022651e-1f);
  p = p * f + splat(6.9314718e-1f);
  p = p * f + splat(1.0f);
  // Two factors of 2^(n/2), so that neither leaves the range of normal numbers.
  const Ints half = n >> 1;
  return p * (Floats)((Words)(half + 127) << 23) * (Floats)((Words)(n - half + 127) << 23);
}

// log2(x) with a relative error below 3e-7. 0 gives -inf, negative numbers NaN, +inf and NaN stay.
inline Floats log2(Floats x) noexcept {
  const Floats infinity = splat(std::numeric_limits<float>::infinity());
  const Ints small = x < splat(std::numeric_limits<float>::min());
  const Floats normal = pick(small, x * splat(8388608.0f), x);  // a subnormal times 2^23
  // x = 2^e * m with m in [sqrt(1/2), sqrt(2)).
  const Ints e = (Ints)((Words)normal - (Words)splat(0.70710678f)) >> 23;
  const Floats m = (Floats)((Words)normal - ((Words)e << 23));
  // log(m) = 2 atanh(s), as a series in s, |s| < 0.172.
  const Floats s = (m - splat(1.0f)) / (m + splat(1.0f));
  const Floats z = s * s;
  Floats p = splat(3.2059890e-1f);
  p = p * z + splat(4.1219858e-1f);
  p = p * z + splat(5.7707802e-1f);
  p = p * z + splat(9.6179669e-1f);
  p = p * z + splat(2.8853901f);
  const Floats exponent = __builtin_convertvector(e, Floats) - pick(small, splat(23.0f), splat(0.0f));
  Floats result = exponent + p * s;
  result = pick(x == infinity, x, result);
  result = pick(x == splat(0.0f), -infinity, result);
  return pick((x < splat(0.0f)) | (x != x), splat(std::numeric_limits<float>::quiet_NaN()), result);
}

template <class E, class S, class F>
tile<E, S> map_vectors(tile<E, S> x, F f) {
  if constexpr (!std::is_same_v<E, float>) {
    return element_cast<E>(map_vectors(element_cast<float>(std::move(x)), f));
  } else {
    tile<E, S> result = std::move(x).take();
    float* data = result.data();
    constexpr std::size_t whole = size_of<S> / kLanes * kLanes;
    for (std::size_t i = 0; i < whole; i += kLanes) store_vector(data + i, f(load_floats(data + i)));
    if constexpr (whole == 0) {
      Floats few = splat(0.0f);
      std::memcpy(&few, data, sizeof(float) * size_of<S>);
      few = f(few);
      std::memcpy(data, &few, sizeof(float) * size_of<S>);
    }
    return result;
  }
}

}  // namespace host

enum class subnormals_rounding_mode : unsigned char { preserve_subnormals, round_subnormals_to_zero };
template <subnormals_rounding_mode Value>
struct subnormals_rounding_mode_constant {
  static constexpr subnormals_rounding_mode value = Value;
};
using preserve_subnormals_t = subnormals_rounding_mode_constant<subnormals_rounding_mode::preserve_subnormals>;
using round_subnormals_to_zero_t =
    subnormals_rounding_mode_constant<subnormals_rounding_mode::round_subnormals_to_zero>;

template <class T>
requires(host::operand<T>&& host::is_float<tile_element_t<T>>) T exp2(T x) {
  if constexpr (host::is_tile<T>) {
    return host::map_vectors(std::move(x), [](host::Floats v) { return host::exp2(v); });
  } else {
    return host::cast<T>(std::exp2(host::cast<host::wide<T>>(x)));
  }
}
// Rounding subnormal results to zero is cheaper on a GPU, and no different here.
template <class T, subnormals_rounding_mode mode>
requires std::is_same_v < tile_element_t<T>,
float > T exp2(T x, subnormals_rounding_mode_constant<mode>) {
  x = exp2(std::move(x));
  if constexpr (mode == subnormals_rounding_mode::round_subnormals_to_zero) {
    x = host::map_unary([](float y) { return y < std::numeric_limits<float>::min() ? 0.0f : y; }, std::move(x));
  }
  return x;
}

template <class T>
requires(host::operand<T>&& host::is_float<tile_element_t<T>>) T log2(T x) {
  if constexpr (host::is_tile<T>) {
    return host::map_vectors(std::move(x), [](host::Floats v) { return host::log2(v); });
  } else {
    return host::cast<T>(std::log2(host::cast<host::wide<T>>(x)));
  }
}

}  // namespace cuda::tiles
