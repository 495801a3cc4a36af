// A tensor as kernels see it: a pointer to dense, row-major elements on some device, which the caller owns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "hypermla/dtype.h"

namespace hypermla {

struct Tensor {
  void* data = nullptr;
  DType dtype = DType::bfloat16;
  std::vector<std::int64_t> shape;

  std::int64_t elements() const {
    return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
  }
  std::size_t bytes() const {
    return static_cast<std::size_t>(elements()) * (dtype == DType::float32 || dtype == DType::int32 ? 4 : 2);
  }
};

}  // namespace hypermla
