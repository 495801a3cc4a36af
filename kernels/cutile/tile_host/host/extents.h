// integral_constant, extents and the shape arithmetic (broadcast, reduction, permutation) that tile types are made of.
#pragma once

#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace cuda::tiles {

template <std::integral auto Value>
struct integral_constant {
  using value_type = decltype(Value);
  static constexpr value_type value = Value;
  constexpr operator value_type() const noexcept { return Value; }
  constexpr value_type operator()() const noexcept { return Value; }
};

namespace literals {
// 128_ic is integral_constant<128>.
template <char... digits>
constexpr auto operator""_ic() noexcept {
  constexpr int value = [] {
    int result = 0;
    ((result = digits == '\'' ? result : result * 10 + (digits - '0')), ...);
    return result;
  }();
  return integral_constant<value>{};
}
}  // namespace literals

inline constexpr std::size_t dynamic_extent = static_cast<std::size_t>(-1);

// Sizes of a tensor. A size that is `dynamic_extent` is given to the constructor, which takes either those sizes or
// all.
template <std::integral Index, std::size_t... Sizes>
class extents {
 public:
  using index_type = Index;
  using rank_type = std::size_t;
  static constexpr std::size_t rank() noexcept { return sizeof...(Sizes); }
  static constexpr std::size_t rank_dynamic() noexcept { return (std::size_t{0} + ... + (Sizes == dynamic_extent)); }
  static constexpr std::size_t static_extent(std::size_t dim) noexcept { return kSizes[dim]; }

  constexpr extents() = default;
  template <class... Given>
  requires(sizeof...(Given) > 0 && (sizeof...(Given) == rank() || sizeof...(Given) == rank_dynamic()) &&
           (std::is_convertible_v<Given, Index> && ...)) constexpr explicit extents(Given... given) noexcept {
    const std::array<Index, sizeof...(Given)> values{static_cast<Index>(given)...};
    std::size_t next = 0;
    for (std::size_t dim = 0; dim < rank(); ++dim) {
      if (sizeof...(Given) == rank()) next = dim;
      if (kSizes[dim] == dynamic_extent) sizes_[dim] = values[next++];
    }
  }

  constexpr Index extent(std::size_t dim) const noexcept { return sizes_[dim]; }

 private:
  // One more element than sizes, because the rank may be zero.
  static constexpr std::array<std::size_t, sizeof...(Sizes) + 1> kSizes{Sizes..., 0};
  std::array<Index, sizeof...(Sizes) + 1> sizes_{(Sizes == dynamic_extent ? Index{0} : static_cast<Index>(Sizes))...,
                                                 0};
};

template <std::size_t... Sizes>
using shape = extents<std::uint32_t, Sizes...>;

namespace host {

template <class T>
inline constexpr std::size_t extent_or_dynamic = dynamic_extent;
template <auto Value>
inline constexpr std::size_t extent_or_dynamic<integral_constant<Value>> = Value;

template <class Shape>
inline constexpr std::size_t size_of = [] {
  std::size_t size = 1;
  for (std::size_t dim = 0; dim < Shape::rank(); ++dim) size *= Shape::static_extent(dim);
  return size;
}();

// Extent `dim` of Shape seen as one of `rank` dimensions, aligned at the right; 1 where it has none.
template <class Shape>
constexpr std::size_t aligned_extent(std::size_t rank, std::size_t dim) {
  const std::size_t missing = rank - Shape::rank();
  return dim < missing ? 1 : Shape::static_extent(dim - missing);
}

// Mutual, right-aligned broadcast of two shapes.
template <class A, class B>
inline constexpr std::size_t common_rank = A::rank() > B::rank() ? A::rank() : B::rank();
template <class A, class B>
constexpr std::size_t broadcast_extent(std::size_t d) {
  const std::size_t a = aligned_extent<A>(common_rank<A, B>, d), b = aligned_extent<B>(common_rank<A, B>, d);
  return a == 1 ? b : a;
}
template <class A, class B, class Dims = std::make_index_sequence<common_rank<A, B>>>
struct Broadcast;
template <class A, class B, std::size_t... d>
struct Broadcast<A, B, std::index_sequence<d...>> {
  using type = shape<broadcast_extent<A, B>(d)...>;
};
template <class A, class B>
using broadcast_of = typename Broadcast<A, B>::type;
template <class From, class To>
inline constexpr bool broadcastable = [] {
  if (From::rank() > To::rank()) return false;
  for (std::size_t d = 0; d < To::rank(); ++d) {
    const std::size_t from = aligned_extent<From>(To::rank(), d);
    if (from != 1 && from != To::static_extent(d)) return false;
  }
  return true;
}();

// S with extent 1 in dimension dim.
template <std::size_t dim, class S, class Dims = std::make_index_sequence<S::rank()>>
struct Reduced;
template <std::size_t dim, class S, std::size_t... d>
struct Reduced<dim, S, std::index_sequence<d...>> {
  using type = shape<(d == dim ? 1 : S::static_extent(d))...>;
};
template <std::size_t dim, class S>
using reduced = typename Reduced<dim, S>::type;

template <class T>
inline constexpr bool is_tile_shape = false;
template <class Index, std::size_t... Sizes>
inline constexpr bool is_tile_shape<extents<Index, Sizes...>> = (std::has_single_bit(Sizes) && ...);

}  // namespace host

template <class... T>
extents(T...) -> extents<std::uint32_t, host::extent_or_dynamic<T>...>;

template <class T>
concept tile_shape = host::is_tile_shape<std::remove_cv_t<T>>;

}  // namespace cuda::tiles
