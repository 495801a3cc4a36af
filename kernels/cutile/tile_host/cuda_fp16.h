// IEEE half precision as storage. Arithmetic happens in float, as on a GPU.
#pragma once

struct __half {
  _Float16 value;

  __half() = default;
  explicit(false) __half(float x) noexcept : value(static_cast<_Float16>(x)) {}  // rounds to nearest even
  operator float() const noexcept { return static_cast<float>(value); }
};
