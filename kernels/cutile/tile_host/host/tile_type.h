// tile<Element, Shape>, the factories, and the rules by which element types meet.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_tf32.h>

#include <algorithm>
#include <limits>

#include "extents.h"
#include "storage.h"

namespace cuda::tiles {

template <class Element, class Shape>
class tile;

namespace host {

template <class T>
inline constexpr bool is_tile = false;
template <class E, class S>
inline constexpr bool is_tile<tile<E, S>> = true;
template <class T>
inline constexpr bool is_small_float =
    std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half> || std::is_same_v<T, __nv_tf32>;
template <class T>
inline constexpr bool is_float = std::is_floating_point_v<T> || is_small_float<T>;
template <class T>
inline constexpr bool is_scalar = std::is_integral_v<T> || is_float<T> || std::is_pointer_v<T>;

template <class T>
concept operand = is_tile<T> || is_scalar<T>;
// At least one is a tile, so that the built-in operators stay alone among scalars.
template <class... T>
concept operands = (operand<T> && ...) && (is_tile<T> || ...);

template <class T>
struct parts {
  using element = T;
  using shape = tiles::shape<>;
};
template <class E, class S>
struct parts<tile<E, S>> {
  using element = E;
  using shape = S;
};
template <class T>
using element_of = typename parts<T>::element;
template <class T>
using shape_of = typename parts<T>::shape;

// Arithmetic on an element happens in this type.
template <class E>
using wide = std::conditional_t<is_small_float<E>, float, E>;

template <class To, class From>
constexpr To cast(From value) noexcept {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (is_small_float<To>) {
    return To(static_cast<float>(static_cast<wide<From>>(value)));
  } else {
    return static_cast<To>(static_cast<wide<From>>(value));
  }
}

template <class E>
inline constexpr int float_rank = std::is_same_v<E, double>      ? 4
                                  : std::is_same_v<E, float>     ? 3
                                  : std::is_same_v<E, __nv_tf32> ? 2
                                                                 : 1;

// Whether every value of From is one of To. NVIDIA's header converts implicitly only then, except that arithmetic also
// takes an integer for a float.
template <class From, class To>
concept braces_to = requires(From x) {
  To{x};
};
template <class From, class To>
inline constexpr bool widens = [] {
  if constexpr (std::is_same_v<From, To>) {
    return true;
  } else if constexpr (is_float<From> && is_float<To>) {
    return float_rank<From> < float_rank<To>;
  } else if constexpr (std::is_integral_v<From> && std::is_integral_v<To>) {
    return braces_to<From, To>;
  } else {
    return std::is_pointer_v<From> && std::is_pointer_v<To> && std::is_convertible_v<From, To>;
  }
}();
template <class From, class To>
inline constexpr bool joins = widens<From, To> || (std::is_integral_v<From> && is_float<To>);

// The element type in which two elements meet; void when neither converts to the other.
template <class A, class B>
using common_element = std::conditional_t<joins<B, A>, A, std::conditional_t<joins<A, B>, B, void>>;
// Tile with scalar keeps the tile's element type.
template <class A, class B>
using arithmetic_element = std::conditional_t<
    is_tile<A> && !is_tile<B>, std::conditional_t<joins<B, element_of<A>>, element_of<A>, void>,
    std::conditional_t<is_tile<B> && !is_tile<A>, std::conditional_t<joins<A, element_of<B>>, element_of<B>, void>,
                       common_element<element_of<A>, element_of<B>>>>;

}  // namespace host

// A value of Shape::rank() dimensions, row-major. Copying shares the memory; what writes to shared memory copies it.
template <class Element, class Shape>
class tile {
  static_assert(tile_shape<Shape>, "the extents of a tile are powers of two");

 public:
  using element_type = Element;
  using shape_type = Shape;
  using index_type = typename Shape::index_type;
  static constexpr std::size_t kSize = host::size_of<Shape>;

  tile() = default;  // uninitialised: to read it is a trap

  template <class Other>
  requires(Shape::rank() == 0 && host::is_scalar<Other>) explicit(!host::widens<Other, Element>) tile(Other value)
      : tile(host::Buffer(kSize * sizeof(Element))) {
    *data() = host::cast<Element>(value);
  }

  template <class Other>
  requires(!std::is_same_v<Other, Element>) explicit(!host::widens<Other, Element>) tile(tile<Other, Shape> other)
      : tile(host::Buffer(kSize * sizeof(Element))) {
    const Other* from = other.dense().data();
    std::transform(from, from + kSize, data(), host::cast<Element, Other>);
  }

  template <class Other>
  requires(kSize == 1 && host::is_scalar<Other>) explicit operator Other() const { return host::cast<Other>(*data()); }

  // Not part of the language, from here on.

  explicit tile(host::Buffer buffer, bool swapped = false) noexcept : buffer_(std::move(buffer)), swapped_(swapped) {}
  static tile make() { return tile(host::Buffer(kSize * sizeof(Element))); }

  const host::Buffer& buffer() const {
    if (!buffer_) host::trap("a tile was read before it was written");
    return buffer_;
  }
  Element* data() const { return static_cast<Element*>(buffer().data()); }

  // Swapped: the memory holds the last two dimensions exchanged. transpose() makes such a tile without moving data; mma
  // reads it as it is, everything else through dense().
  bool swapped() const noexcept { return swapped_; }
  tile dense() const {
    if (!swapped_) return *this;
    tile result = make();
    if constexpr (Shape::rank() >= 2) {
      constexpr std::size_t rows = Shape::static_extent(Shape::rank() - 2);
      constexpr std::size_t cols = Shape::static_extent(Shape::rank() - 1);
      Element* to = result.data();
      for (const Element* from = data(); from != data() + kSize; from += rows * cols, to += rows * cols) {
        for (std::size_t i = 0; i < rows; ++i) {
          for (std::size_t j = 0; j < cols; ++j) to[i * cols + j] = from[j * rows + i];
        }
      }
    }
    return result;
  }

  // The same value in memory that no other tile reads.
  tile take() && {
    if (swapped_) return dense();
    if (buffer().unique()) return std::move(*this);
    tile result = make();
    std::copy_n(data(), kSize, result.data());
    return result;
  }

 private:
  host::Buffer buffer_;
  bool swapped_ = false;
};

template <class E>
tile(E) -> tile<E, shape<>>;

template <class T>
using tile_element_t = host::element_of<std::remove_cv_t<T>>;
template <class T>
using tile_shape_t = host::shape_of<std::remove_cv_t<T>>;

template <class T>
requires host::is_tile<T> T full(tile_element_t<T> value) {
  T result = T::make();
  std::fill_n(result.data(), T::kSize, value);
  return result;
}
template <class T>
requires host::is_tile<T> T zeros() { return full<T>(host::cast<tile_element_t<T>>(0)); }
template <class T>
requires host::is_tile<T> T ones() { return full<T>(host::cast<tile_element_t<T>>(1)); }

// 0, 1, 2, ... in row-major order.
template <class T>
requires(host::is_tile<T>&& std::is_integral_v<tile_element_t<T>>) T iota() {
  T result = T::make();
  for (std::size_t i = 0; i < T::kSize; ++i) result.data()[i] = static_cast<tile_element_t<T>>(i);
  return result;
}

}  // namespace cuda::tiles
