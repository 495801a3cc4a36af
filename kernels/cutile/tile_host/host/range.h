// Where a block is, its loops, and the promises a kernel makes to the compiler (checked here).
#pragma once

#include "tile_type.h"

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace cuda::tiles {
namespace host {

struct Position {
  uint3 block;
  dim3 grid;
};
inline thread_local Position position;  // set by launch.h before each block

}  // namespace host

inline uint3 bid() noexcept { return host::position.block; }
inline dim3 num_blocks() noexcept { return host::position.grid; }

// for (auto i : irange(first, last, step)), with i < last.
template <std::integral T>
class irange {
 public:
  class iterator {
   public:
    constexpr iterator(T at, T step) noexcept : at_(at), step_(step) {}
    constexpr T operator*() const noexcept { return at_; }
    constexpr iterator& operator++() noexcept {
      at_ = static_cast<T>(at_ + step_);
      return *this;
    }
    constexpr bool operator==(T last) const noexcept { return at_ >= last; }

   private:
    T at_, step_;
  };

  constexpr irange(T first, T last, T step = 1) : first_(first), last_(last), step_(step) {
    if (step <= 0) host::trap("irange needs a positive step");
  }
  constexpr iterator begin() const noexcept { return {first_, step_}; }
  constexpr T end() const noexcept { return last_; }

 private:
  T first_, last_, step_;
};
template <class A, class B>
irange(A, B) -> irange<host::arithmetic_element<A, B>>;
template <class A, class B, class C>
irange(A, B, C) -> irange<host::arithmetic_element<host::arithmetic_element<A, B>, C>>;

template <auto alignment, class T>
T* assume_aligned(T* pointer, integral_constant<alignment> = {}) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % alignment) {
    host::trap("a pointer is not aligned to the %lld bytes that the kernel assumes", static_cast<long long>(alignment));
  }
  return pointer;
}
template <auto divisor, std::integral T>
T assume_divisible(T value, integral_constant<divisor> = {}) {
  if (value % divisor) {
    host::trap("%lld is not divisible by %lld as assumed", static_cast<long long>(value),
               static_cast<long long>(divisor));
  }
  return value;
}

}  // namespace cuda::tiles
