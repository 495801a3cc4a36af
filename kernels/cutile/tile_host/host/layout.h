// Operations that move elements and change none.
#pragma once

#include <algorithm>

#include "tile_type.h"

namespace cuda::tiles {
namespace host {

// The tile of shape S whose element at an index (one number per dimension) is that of `from` at offset_at(index).
template <class S, class E, class From, class OffsetAt>
tile<E, S> rearrange(const tile<E, From>& source, OffsetAt offset_at) {
  const auto from = source.dense();
  auto result = tile<E, S>::make();
  std::array<std::size_t, S::rank() + 1> index{};
  for (std::size_t i = 0; i < size_of<S>; ++i) {
    result.data()[i] = from.data()[offset_at(index)];
    for (std::size_t d = S::rank(); d-- > 0 && ++index[d] == S::static_extent(d);) index[d] = 0;
  }
  return result;
}

template <class S>
constexpr std::size_t stride(std::size_t dim) {
  std::size_t result = 1;
  while (++dim < S::rank()) result *= S::static_extent(dim);
  return result;
}

}  // namespace host

// Dimension d of the result is dimension mapping(d) of the operand.
template <std::size_t... order>
struct dimension_map {
  static constexpr std::size_t mapping(std::size_t d) noexcept { return std::array{order...}[d]; }

  constexpr dimension_map() = default;
  template <class... T>
  requires(sizeof...(T) > 0) constexpr explicit dimension_map(T...) noexcept {}
};
template <auto... order>
dimension_map(integral_constant<order>...) -> dimension_map<static_cast<std::size_t>(order)...>;

namespace host {
template <class Map, class S, class Dims = std::make_index_sequence<S::rank()>>
struct Permuted;
template <class Map, class S, std::size_t... d>
struct Permuted<Map, S, std::index_sequence<d...>> {
  using type = shape<S::static_extent(Map::mapping(d))...>;
};
}  // namespace host

template <class Map, class E, class S>
auto permute(tile<E, S> x, Map = {}) {
  using Result = typename host::Permuted<Map, S>::type;
  constexpr bool swaps_last_two = [] {
    for (std::size_t d = 0; d < S::rank(); ++d) {
      const std::size_t expected = d + 2 == S::rank() ? d + 1 : d + 1 == S::rank() ? d - 1 : d;
      if (Map::mapping(d) != expected) return false;
    }
    return S::rank() >= 2;
  }();
  if constexpr (swaps_last_two) {
    return tile<E, Result>(x.buffer(), !x.swapped());
  } else {
    return host::rearrange<Result>(x, [](const auto& index) {
      std::size_t offset = 0;
      for (std::size_t d = 0; d < S::rank(); ++d) offset += index[d] * host::stride<S>(Map::mapping(d));
      return offset;
    });
  }
}

// Swaps the first two dimensions, of any rank.
template <class E, class S>
auto transpose(tile<E, S> x) {
  return [&]<std::size_t... d>(std::index_sequence<d...>) {
    return permute<dimension_map<(d < 2 ? 1 - d : d)...>>(std::move(x));
  }
  (std::make_index_sequence<S::rank()>{});
}

template <tile_shape To, class E, class S>
requires(host::size_of<To> == host::size_of<S>) auto reshape(tile<E, S> x, To = {}) {
  return tile<E, To>(x.dense().buffer());
}

template <tile_shape To, class E, class S>
requires host::broadcastable<S, To>
auto broadcast(tile<E, S> x, To = {}) {
  return host::rearrange<To>(x, [](const auto& index) {
    std::size_t offset = 0;
    for (std::size_t d = 0; d < S::rank(); ++d) {
      if (S::static_extent(d) != 1) offset += index[d + To::rank() - S::rank()] * host::stride<S>(d);
    }
    return offset;
  });
}
template <tile_shape To, class T>
requires host::is_scalar<T>
auto broadcast(T x, To = {}) { return full<tile<T, To>>(x); }

// The part of shape To at the given place, counted in parts, not in elements.
template <tile_shape To, class E, class S, class... Index>
requires(sizeof...(Index) == To::rank() && To::rank() == S::rank()) auto extract(tile<E, S> x, To, Index... part) {
  const std::array<std::size_t, To::rank()> at{static_cast<std::size_t>(part)...};
  for (std::size_t d = 0; d < To::rank(); ++d) {
    if ((at[d] + 1) * To::static_extent(d) > S::static_extent(d)) host::trap("extract of a part outside of the tile");
  }
  return host::rearrange<To>(x, [&](const auto& index) {
    std::size_t offset = 0;
    for (std::size_t d = 0; d < To::rank(); ++d) {
      offset += (at[d] * To::static_extent(d) + index[d]) * host::stride<S>(d);
    }
    return offset;
  });
}

namespace host {
template <class A, class B, std::size_t dim, class Dims = std::make_index_sequence<A::rank()>>
struct Joined;
template <class A, class B, std::size_t dim, std::size_t... d>
struct Joined<A, B, dim, std::index_sequence<d...>> {
  static_assert(((d == dim || A::static_extent(d) == B::static_extent(d)) && ...), "tiles differ where they meet");
  using type = shape<(A::static_extent(d) + (d == dim ? B::static_extent(d) : 0))...>;
};
}  // namespace host

// The second tile behind the first one, along a dimension.
template <auto dim, class E, class A, class B>
requires(A::rank() == B::rank() && dim >= 0 && static_cast<std::size_t>(dim) < A::rank()) auto cat(
    tile<E, A> a, tile<E, B> b, integral_constant<dim> = {}) {
  constexpr std::size_t first = A::static_extent(dim) * host::stride<A>(dim),
                        second = B::static_extent(dim) * host::stride<B>(dim);
  const auto from_a = a.dense(), from_b = b.dense();
  auto result = tile<E, typename host::Joined<A, B, dim>::type>::make();
  E* to = result.data();
  for (std::size_t i = 0; i < host::size_of<A> / first; ++i) {
    to = std::copy_n(from_a.data() + i * first, first, to);
    to = std::copy_n(from_b.data() + i * second, second, to);
  }
  return result;
}

}  // namespace cuda::tiles
