// Elementwise operations: one broadcasting loop, `map`, and the operators and functions that are calls of it.
#pragma once

#include <cmath>

#include "tile_type.h"

namespace cuda::tiles {
namespace host {

// An operand of map(): where its elements are and how they repeat under broadcasting to Out.
template <class T, class Out>
class Source {
 public:
  explicit Source(T operand)
      : operand_(operand.swapped() ? operand.dense() : std::move(operand)), data_(operand_.data()) {}

  static constexpr bool kFlat = size_of<shape_of<T>> == size_of<Out>;
  static constexpr std::size_t kStep = aligned_extent<shape_of<T>>(Out::rank(), Out::rank() - 1) == 1 ? 0 : 1;
  auto at(std::size_t offset, std::size_t i) const noexcept { return cast<wide<element_of<T>>>(data_[offset + i]); }

  // Offset of the row (all dimensions but the last) with this number.
  static constexpr std::size_t offset(std::size_t row) noexcept {
    std::size_t result = 0, stride = aligned_extent<shape_of<T>>(Out::rank(), Out::rank() - 1);
    for (std::size_t dim = Out::rank() - 1; dim-- > 0;) {
      const std::size_t extent = aligned_extent<shape_of<T>>(Out::rank(), dim);
      if (extent != 1) result += (row % Out::static_extent(dim)) * stride;
      stride *= extent;
      row /= Out::static_extent(dim);
    }
    return result;
  }

  // Whether the result may be written over this operand.
  template <class E>
  bool reusable() const {
    return kFlat && sizeof(E) == sizeof(element_of<T>) && operand_.buffer().unique();
  }
  Buffer take() { return std::move(operand_).take().buffer(); }

 private:
  T operand_;
  const element_of<T>* data_;
};

template <class T, class Out>
requires(!is_tile<T>) class Source<T, Out> {
 public:
  explicit Source(T value) noexcept : value_(cast<wide<T>>(value)) {}
  static constexpr bool kFlat = true;
  static constexpr std::size_t kStep = 0;
  auto at(std::size_t, std::size_t) const noexcept { return value_; }
  static constexpr std::size_t offset(std::size_t) noexcept { return 0; }
  template <class E>
  static constexpr bool reusable() {
    return false;
  }
  Buffer take() { return {}; }

 private:
  wide<T> value_;
};

// f applied to the elements (in their wide types) of the operands broadcast to shape S. The result lies in the memory
// of the first operand that is a temporary of the right size: `s * scale - max` makes one tile, not two.
template <class E, class S, class F, class... T>
tile<E, S> map(F f, T... operands) {
  return [&](Source<T, S>... source) {
    Buffer memory;
    ((!memory && source.template reusable<E>() ? void(memory = source.take()) : void()), ...);
    tile<E, S> result = memory ? tile<E, S>(std::move(memory)) : tile<E, S>::make();
    E* out = result.data();
    if constexpr ((Source<T, S>::kFlat && ...)) {
#pragma GCC ivdep
      for (std::size_t i = 0; i < size_of<S>; ++i) {
        out[i] = cast<E>(f(source.at(0, is_tile<T> ? i : 0)...));
      }
    } else {
      constexpr std::size_t length = S::static_extent(S::rank() - 1);
      for (std::size_t row = 0; row < size_of<S> / length; ++row) {
        [&](auto... offset) {
#pragma GCC ivdep
          for (std::size_t i = 0; i < length; ++i) {
            out[row * length + i] = cast<E>(f(source.at(offset, i * Source<T, S>::kStep)...));
          }
        }(Source<T, S>::offset(row)...);
      }
    }
    return result;
  }(Source<T, S>(std::move(operands))...);
}

// f of two operands, both converted to Common first.
template <class E, class Common, class F, class A, class B>
auto map_binary(F f, A a, B b) {
  using C = wide<Common>;
  auto g = [f](auto x, auto y) { return f(static_cast<C>(x), static_cast<C>(y)); };
  if constexpr (!is_tile<A> && !is_tile<B>) {
    return cast<E>(g(cast<wide<A>>(a), cast<wide<B>>(b)));
  } else {
    using S = broadcast_of<shape_of<A>, shape_of<B>>;
    static_assert(broadcastable<shape_of<A>, S> && broadcastable<shape_of<B>, S>, "shapes that do not broadcast");
    return map<E, S>(g, std::move(a), std::move(b));
  }
}

template <class F, class A>
auto map_unary(F f, A a) {
  if constexpr (is_tile<A>) {
    return map<element_of<A>, shape_of<A>>(f, std::move(a));
  } else {
    return cast<A>(f(cast<wide<A>>(a)));
  }
}

template <class A, class B>
concept meeting = operand<A> && operand<B> && !std::is_void_v<arithmetic_element<A, B>>;
// Comparing treats a scalar as a tile: the types meet in the wider of both.
template <class A, class B>
concept comparable = operand<A> && operand<B> && !std::is_void_v<common_element<element_of<A>, element_of<B>>>;
template <class A>
concept integral_operand = operand<A> && std::is_integral_v<element_of<A>>;

// A number wins over a NaN, as in fmax. Without branches, for the vectoriser; vectors may be passed too.
inline constexpr auto larger = [](auto a, auto b) { return ((a > b) | (b != b)) ? a : b; };
inline constexpr auto smaller = [](auto a, auto b) { return ((a < b) | (b != b)) ? a : b; };

}  // namespace host

#define HYPERMLA_TILE_ARITHMETIC(symbol, constraint)                                                   \
  template <class A, class B>                                                                          \
  requires(host::operands<A, B> && host::meeting<A, B> && constraint) auto operator symbol(A a, B b) { \
    using E = host::arithmetic_element<A, B>;                                                          \
    auto f = [](auto x, auto y) { return x symbol y; };                                                \
    return host::map_binary<E, E>(f, std::move(a), std::move(b));                                      \
  }
HYPERMLA_TILE_ARITHMETIC(+, true)
HYPERMLA_TILE_ARITHMETIC(-, true)
HYPERMLA_TILE_ARITHMETIC(*, true)
HYPERMLA_TILE_ARITHMETIC(/, true)
HYPERMLA_TILE_ARITHMETIC(%, host::integral_operand<A>)
HYPERMLA_TILE_ARITHMETIC(&, host::integral_operand<A>)
HYPERMLA_TILE_ARITHMETIC(|, host::integral_operand<A>)
HYPERMLA_TILE_ARITHMETIC(^, host::integral_operand<A>)
HYPERMLA_TILE_ARITHMETIC(<<, host::integral_operand<A>)
HYPERMLA_TILE_ARITHMETIC(>>, host::integral_operand<A>)
#undef HYPERMLA_TILE_ARITHMETIC

#define HYPERMLA_TILE_COMPARISON(symbol)                                                    \
  template <class A, class B>                                                               \
  requires(host::operands<A, B> && host::comparable<A, B>) auto operator symbol(A a, B b) { \
    using Common = host::common_element<host::element_of<A>, host::element_of<B>>;          \
    auto f = [](auto x, auto y) { return x symbol y; };                                     \
    return host::map_binary<bool, Common>(f, std::move(a), std::move(b));                   \
  }
HYPERMLA_TILE_COMPARISON(<)
HYPERMLA_TILE_COMPARISON(<=)
HYPERMLA_TILE_COMPARISON(>)
HYPERMLA_TILE_COMPARISON(>=)
HYPERMLA_TILE_COMPARISON(==)
HYPERMLA_TILE_COMPARISON(!=)
#undef HYPERMLA_TILE_COMPARISON

template <class A, class B>
requires host::operands<A, B>
auto operator&&(A a, B b) {
  auto f = [](auto x, auto y) { return static_cast<bool>(static_cast<bool>(x) & static_cast<bool>(y)); };
  return host::map_binary<bool, bool>(f, std::move(a), std::move(b));
}
template <class A, class B>
requires host::operands<A, B>
auto operator||(A a, B b) {
  auto f = [](auto x, auto y) { return static_cast<bool>(static_cast<bool>(x) | static_cast<bool>(y)); };
  return host::map_binary<bool, bool>(f, std::move(a), std::move(b));
}
template <class E, class S>
auto operator!(tile<E, S> a) {
  return host::map<bool, S>([](auto x) { return !x; }, std::move(a));
}
template <class E, class S>
auto operator-(tile<E, S> a) {
  return host::map<E, S>([](auto x) { return -x; }, std::move(a));
}
template <class E, class S>
auto operator+(tile<E, S> a) {
  return a;
}
template <std::integral E, class S>
auto operator~(tile<E, S> a) {
  return host::map<E, S>([](auto x) { return ~x; }, std::move(a));
}

// A pointer and a tile of integers give the tile of pointers that load() and store() take.
template <class P, class B>
requires(host::operands<P*, B>&& host::integral_operand<B>) auto operator+(P* a, B b) {
  return host::map<P*, host::shape_of<B>>([](auto pointer, auto i) { return pointer + i; }, a, std::move(b));
}
template <class P, class S, class B>
requires host::integral_operand<B>
auto operator+(tile<P*, S> a, B b) {
  using Result = host::broadcast_of<S, host::shape_of<B>>;
  return host::map<P*, Result>([](auto pointer, auto i) { return pointer + i; }, std::move(a), std::move(b));
}

template <class A, class B>
requires host::meeting<A, B>
auto max(A a, B b) {
  using E = host::arithmetic_element<A, B>;
  return host::map_binary<E, E>(host::larger, std::move(a), std::move(b));
}
template <class A, class B>
requires host::meeting<A, B>
auto min(A a, B b) {
  using E = host::arithmetic_element<A, B>;
  return host::map_binary<E, E>(host::smaller, std::move(a), std::move(b));
}
// Rounds towards positive infinity, for any signs.
template <class A, class B>
requires(host::meeting<A, B>&& host::integral_operand<A>&& host::integral_operand<B>) auto ceildiv(A a, B b) {
  using E = host::arithmetic_element<A, B>;
  auto f = [](auto x, auto y) { return x / y + (x % y != 0 && (x < 0) == (y < 0)); };
  return host::map_binary<E, E>(f, std::move(a), std::move(b));
}

template <host::operand A>
auto abs(A a) {
  return host::map_unary([](auto x) { return x < 0 ? -x : (x == 0 ? decltype(x){} : x); }, std::move(a));
}
template <host::operand A>
auto sqrt(A a) {
  return host::map_unary([](auto x) { return std::sqrt(x); }, std::move(a));
}
template <host::operand A>
auto exp(A a) {
  return host::map_unary([](auto x) { return std::exp(x); }, std::move(a));
}
template <host::operand A>
auto log(A a) {
  return host::map_unary([](auto x) { return std::log(x); }, std::move(a));
}
template <class E, class S>
auto isnan(tile<E, S> a) {
  return host::map<bool, S>([](auto x) { return x != x; }, std::move(a));
}
template <class E, class S>
auto isinf(tile<E, S> a) {
  return host::map<bool, S>([](auto x) { return x - x != x - x && x == x; }, std::move(a));
}

template <class A, class B, class E, class S>
auto fma(A a, B b, tile<E, S> c) {
  return host::map<E, S>([](auto x, auto y, auto z) { return std::fma(x, y, z); }, std::move(a), std::move(b),
                         std::move(c));
}

// Where the condition (which broadcasts) holds the first, else the second.
template <host::operand C, host::operand T>
T select(C condition, T yes, T no) {
  if constexpr (host::is_tile<T>) {
    static_assert(host::broadcastable<host::shape_of<C>, host::shape_of<T>>, "the condition does not broadcast");
    auto f = [](auto c, auto x, auto y) { return c ? x : y; };
    return host::map<host::element_of<T>, host::shape_of<T>>(f, std::move(condition), std::move(yes), std::move(no));
  } else {
    return condition ? yes : no;
  }
}

template <class E, class T>
auto element_cast(T value) {
  if constexpr (!host::is_tile<T>) {
    return host::cast<E>(value);
  } else if constexpr (std::is_same_v<E, host::element_of<T>>) {
    return value;
  } else {
    return tile<E, host::shape_of<T>>(std::move(value));
  }
}

}  // namespace cuda::tiles
