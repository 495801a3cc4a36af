// Reductions along one dimension, which stays with extent 1: sum(t, integral_constant<1>{}) or sum<1>(t).
#pragma once

#include "elementwise.h"
#include "simd.h"

namespace cuda::tiles {
namespace host {

// f over the lanes, which it folds onto each other in halves.
template <std::size_t width = kLanes / 2, class F, std::size_t... lane>
float fold(Floats v, F f, std::index_sequence<lane...> lanes) {
  v = f(v, Floats(__builtin_shufflevector(v, v, (lane ^ width)...)));
  if constexpr (width > 1) {
    return fold<width / 2>(v, f, lanes);
  } else {
    return v[0];
  }
}

// One row of floats, a vector at a time: the order of the additions differs from a scalar loop's, as it does on a GPU.
template <class F>
float reduce_row(const float* row, std::size_t length, F f) {
  if (length < kLanes) {
    float result = row[0];
    for (std::size_t i = 1; i < length; ++i) result = f(result, row[i]);
    return result;
  }
  Floats partial = load_floats(row);
  for (std::size_t i = kLanes; i < length; i += kLanes) partial = f(partial, load_floats(row + i));
  return fold(partial, f, std::make_index_sequence<kLanes>{});
}

template <std::size_t dim, class E, class S, class F>
auto reduce(const tile<E, S>& operand, F f) {
  using Result = tile<E, reduced<dim, S>>;
  constexpr std::size_t length = S::static_extent(dim);
  constexpr std::size_t inner = [] {
    std::size_t size = 1;
    for (std::size_t d = dim + 1; d < S::rank(); ++d) size *= S::static_extent(d);
    return size;
  }();
  const auto source = operand.dense();
  const E* from = source.data();
  Result result = Result::make();
  E* to = result.data();
  for (; to != result.data() + Result::kSize; to += inner, from += length * inner) {
    if constexpr (inner == 1 && std::is_same_v<E, float>) {
      *to = reduce_row(from, length, f);
    } else {
      wide<E> partial[inner];
      for (std::size_t i = 0; i < inner; ++i) partial[i] = cast<wide<E>>(from[i]);
      for (std::size_t j = 1; j < length; ++j) {
        for (std::size_t i = 0; i < inner; ++i) partial[i] = f(partial[i], cast<wide<E>>(from[j * inner + i]));
      }
      for (std::size_t i = 0; i < inner; ++i) to[i] = cast<E>(partial[i]);
    }
  }
  return result;
}

}  // namespace host

template <auto dim, class E, class S>
requires(dim >= 0 && dim < S::rank()) auto sum(tile<E, S> x, integral_constant<dim> = {}) {
  return host::reduce<dim>(x, [](auto a, auto b) { return a + b; });
}
template <auto dim, class E, class S>
requires(dim >= 0 && dim < S::rank()) auto prod(tile<E, S> x, integral_constant<dim> = {}) {
  return host::reduce<dim>(x, [](auto a, auto b) { return a * b; });
}
template <auto dim, class E, class S>
requires(dim >= 0 && dim < S::rank()) auto reduce_max(tile<E, S> x, integral_constant<dim> = {}) {
  return host::reduce<dim>(x, host::larger);
}
template <auto dim, class E, class S>
requires(dim >= 0 && dim < S::rank()) auto reduce_min(tile<E, S> x, integral_constant<dim> = {}) {
  return host::reduce<dim>(x, host::smaller);
}
template <auto dim, class E, class S>
requires(dim >= 0 && dim < S::rank()) auto all_of(tile<E, S> x, integral_constant<dim> = {}) {
  return host::reduce<dim>(element_cast<bool>(std::move(x)), [](bool a, bool b) { return a && b; });
}
template <auto dim, class E, class S>
requires(dim >= 0 && dim < S::rank()) auto any_of(tile<E, S> x, integral_constant<dim> = {}) {
  return host::reduce<dim>(element_cast<bool>(std::move(x)), [](bool a, bool b) { return a || b; });
}

}  // namespace cuda::tiles
