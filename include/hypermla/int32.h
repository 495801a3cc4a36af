// The element type of lengths and block tables. It is none of DType's own names because no kernel computes in it: they are
// what kernels are compiled for, this is only what some tensors hold.
#pragma once

#include "hypermla/dtype.h"

namespace hypermla {

inline constexpr DType kInt32 = static_cast<DType>(3);

}  // namespace hypermla
