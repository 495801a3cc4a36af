// Tensors in memory and the tiles in them: tensor_span, partition_view, and loads and stores through tiles of pointers.
#pragma once

#include "elementwise.h"

namespace cuda::tiles {

// How far elements are apart, in elements; one that is `dynamic_extent` is given to the constructor.
template <std::integral Index, std::size_t... Sizes>
class strides : public extents<Index, Sizes...> {
 public:
  using extents<Index, Sizes...>::extents;
};
// Where the elements of a tensor lie.
template <class Extents, class Strides>
struct layout_strided_mapping {
  layout_strided_mapping(Extents extents, Strides strides) noexcept : extents(extents), strides(strides) {}
  Extents extents;
  Strides strides;
};

// A tensor at `data`, row-major or by a mapping. The extents are what accesses are checked against, so state the true
// ones.
template <class Element, class Extents>
class tensor_span {
 public:
  using element_type = Element;
  using value_type = std::remove_cv_t<Element>;
  using extents_type = Extents;
  using index_type = typename Extents::index_type;

  constexpr tensor_span(Element* data, Extents extents) noexcept : data_(data), extents_(extents) {
    std::size_t stride = 1;
    for (std::size_t d = Extents::rank(); d-- > 0; stride *= extents.extent(d)) strides_[d] = stride;
  }
  template <class Strides>
  constexpr tensor_span(Element* data, layout_strided_mapping<Extents, Strides> mapping) noexcept
      : data_(data), extents_(mapping.extents) {
    for (std::size_t d = 0; d < Extents::rank(); ++d) strides_[d] = mapping.strides.extent(d);
  }
  constexpr Element* data_handle() const noexcept { return data_; }
  constexpr index_type extent(std::size_t dim) const noexcept { return extents_.extent(dim); }
  constexpr std::size_t stride(std::size_t dim) const noexcept { return strides_[dim]; }

 private:
  Element* data_;
  Extents extents_;
  std::array<std::size_t, Extents::rank()> strides_{};
};

// What load_masked puts where the tensor ends.
enum class view_padding : unsigned char { zero, negative_zero, positive_inf, negative_inf, nan };
template <view_padding Value>
struct view_padding_constant {
  static constexpr view_padding value = Value;
};
using view_padding_zero_t = view_padding_constant<view_padding::zero>;
using view_padding_negative_zero_t = view_padding_constant<view_padding::negative_zero>;
using view_padding_positive_inf_t = view_padding_constant<view_padding::positive_inf>;
using view_padding_negative_inf_t = view_padding_constant<view_padding::negative_inf>;
using view_padding_nan_t = view_padding_constant<view_padding::nan>;

namespace host {

template <class E>
E padding_value(view_padding padding) {
  if constexpr (is_float<E>) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const float values[] = {0.0f, -0.0f, infinity, -infinity, std::numeric_limits<float>::quiet_NaN()};
    return cast<E>(values[static_cast<int>(padding)]);
  } else {
    return E{};
  }
}

}  // namespace host

// The tensor cut into tiles of one shape. Indices count tiles, not elements.
// Errors: an unmasked access that is not wholly inside of the tensor, and a negative index, are traps. A masked load
// pads, and a masked store leaves out, what lies beyond the edge.
template <class Span, tile_shape Shape>
requires(Shape::rank() == Span::extents_type::rank() && Shape::rank() > 0) class partition_view {
  static constexpr std::size_t kRank = Shape::rank();

 public:
  using span_type = Span;
  using index_type = typename Span::index_type;
  using view_shape_type = Shape;
  using view_tile_type = tile<typename Span::value_type, Shape>;

  constexpr partition_view(Span span, Shape) noexcept : span_(span) {}
  constexpr const Span& span() const noexcept { return span_; }

  template <class... Index>
  requires(sizeof...(Index) == kRank) view_tile_type load(Index... index)
  const { return read(locate<false>({static_cast<std::int64_t>(index)...}), view_padding::zero); }
  template <view_padding padding = view_padding::zero, class... Index>
  requires(sizeof...(Index) == kRank) view_tile_type load_masked(Index... index)
  const { return read(locate<true>({static_cast<std::int64_t>(index)...}), padding); }
  template <view_padding padding, class... Index>
  requires(sizeof...(Index) == kRank) view_tile_type load_masked(view_padding_constant<padding>, Index... index)
  const { return load_masked<padding>(index...); }
  template <class E, class... Index>
  requires(sizeof...(Index) == kRank && host::widens<E, typename Span::value_type>) void store(tile<E, Shape> value,
                                                                                               Index... index) const {
    write(locate<false>({static_cast<std::int64_t>(index)...}), std::move(value));
  }
  template <class E, class... Index>
  requires(sizeof...(Index) == kRank &&
           host::widens<E, typename Span::value_type>) void store_masked(tile<E, Shape> value, Index... index) const {
    write(locate<true>({static_cast<std::int64_t>(index)...}), std::move(value));
  }

 private:
  struct Place {
    typename Span::element_type* corner;
    std::array<std::size_t, kRank> valid;   // elements of the tile inside of the tensor, per dimension
    std::array<std::size_t, kRank> stride;  // of the tensor, in elements
    bool whole;
  };

  template <bool masked>
  Place locate(std::array<std::int64_t, kRank> index) const {
    Place place{span_.data_handle(), {}, {}, true};
    std::int64_t corner = 0;
    for (std::size_t d = kRank; d-- > 0;) {
      const std::int64_t size = Shape::static_extent(d), extent = span_.extent(d), first = index[d] * size;
      if (index[d] < 0 || (!masked && first + size > extent)) {
        host::trap("tile %lld of %lld elements along dimension %zu is outside of the tensor, which has %lld",
                   static_cast<long long>(index[d]), static_cast<long long>(size), d, static_cast<long long>(extent));
      }
      place.valid[d] = static_cast<std::size_t>(std::clamp<std::int64_t>(extent - first, 0, size));
      place.whole = place.whole && place.valid[d] == static_cast<std::size_t>(size);
      place.stride[d] = span_.stride(d);
      corner += first * static_cast<std::int64_t>(span_.stride(d));
    }
    // A tile wholly beyond the edge has nothing to point to.
    if (std::find(place.valid.begin(), place.valid.end(), 0u) == place.valid.end()) place.corner += corner;
    return place;
  }

  // move(offset in the tile, offset in the tensor, count) for each run of elements that both have in one piece. The
  // rows of a tile as wide as the tensor are one run.
  template <std::size_t d = 0, class Move>
  static void for_runs(const Place& place, Move move, std::size_t in_tile = 0, std::size_t in_tensor = 0) {
    constexpr std::size_t step = [] {
      std::size_t size = 1;
      for (std::size_t i = d + 1; i < kRank; ++i) size *= Shape::static_extent(i);
      return size;
    }();
    // A tile that reaches over an inner edge has gaps, though its strides may happen to fit: 16 queries of a head that
    // has 1, where there are 16 heads.
    bool gaps = false;
    for (std::size_t i = d + 1; i < kRank; ++i) gaps = gaps || place.valid[i] != std::size_t(Shape::static_extent(i));
    if (place.stride[d] == step && !gaps) {
      if (place.valid[d]) move(in_tile, in_tensor, place.valid[d] * step);
    } else if constexpr (d + 1 < kRank) {
      for (std::size_t i = 0; i < place.valid[d]; ++i) {
        for_runs<d + 1>(place, move, in_tile + i * step, in_tensor + i * place.stride[d]);
      }
    }
  }

  static view_tile_type read(const Place& place, view_padding padding) {
    using E = typename Span::value_type;
    auto result = place.whole ? view_tile_type::make() : full<view_tile_type>(host::padding_value<E>(padding));
    E* to = result.data();
    for_runs(place, [&](std::size_t in_tile, std::size_t in_tensor, std::size_t count) {
      const E* from = place.corner + in_tensor;
      // Loops over tokens load the next tile next: ask for it now, so that it arrives while this one is computed with.
      constexpr std::size_t line = 64 / sizeof(E);
      for (std::size_t i = 0; i < count; i += line) __builtin_prefetch(from + count + i, 0, 2);
      std::copy_n(from, count, to + in_tile);
    });
    return result;
  }

  static void write(const Place& place, view_tile_type value) {
    value = value.dense();
    const auto* from = value.data();
    for_runs(place, [&](std::size_t in_tile, std::size_t in_tensor, std::size_t count) {
      std::copy_n(from + in_tile, count, place.corner + in_tensor);
    });
  }

  Span span_;
};

// Gather and scatter through a tile of pointers.
template <class P, class S>
auto load(tile<P*, S> pointers) {
  using E = std::remove_cv_t<P>;
  auto result = tile<E, S>::make();
  std::transform(pointers.data(), pointers.data() + tile<E, S>::kSize, result.data(), [](P* p) { return *p; });
  return result;
}
// Where the mask (which broadcasts) is false the padding is taken, and nothing is read.
template <class P, class S, class M, class V>
auto load_masked(tile<P*, S> pointers, M mask, V padding) {
  using E = std::remove_cv_t<P>;
  return host::map<E, S>(
      [](P* p, auto m, auto v) { return m ? static_cast<host::wide<E>>(*p) : static_cast<host::wide<E>>(v); },
      std::move(pointers), std::move(mask), std::move(padding));
}
template <class P, class S, class M>
auto load_masked(tile<P*, S> pointers, M mask) {
  return load_masked(std::move(pointers), std::move(mask), 0);
}
template <class P, class S, class E, class M>
void store_masked(tile<P*, S> pointers, tile<E, S> value, M mask) {
  auto f = [](P* p, auto v, auto m) { return m ? (*p = host::cast<P>(v), true) : false; };
  host::map<bool, S>(f, std::move(pointers), std::move(value), std::move(mask));
}
template <class P, class S, class E>
void store(tile<P*, S> pointers, tile<E, S> value) {
  store_masked(std::move(pointers), std::move(value), true);
}
template <class P>
requires host::is_scalar<P> std::remove_cv_t<P> load(P* pointer) { return *pointer; }
template <class P, class V>
requires(host::is_scalar<P>&& host::is_scalar<V>) void store(P* pointer, V value) { *pointer = host::cast<P>(value); }

}  // namespace cuda::tiles
