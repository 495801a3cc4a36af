// What every CUDA Tile C++ kernel of this project starts from. On a GPU <cuda_tile.h> is NVIDIA's header; on a CPU it
// is kernels/cutile/tile_host/cuda_tile.h, the same subset in plain C++20.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_tile.h>

#include "hypermla/dtype.h"

namespace ct = cuda::tiles;

namespace hypermla {

template <DType dtype>
struct ElementOf {
  using type = __nv_bfloat16;
};
template <>
struct ElementOf<DType::float16> {
  using type = __half;
};
template <>
struct ElementOf<DType::float32> {
  using type = float;
};
template <DType dtype>
using element_t = typename ElementOf<dtype>::type;

// NVRTC defines no INFINITY, and 1e38f * 1e38f is no constant expression there.
inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

// exp(x) = exp2(x * kLog2e), log(x) = log2(x) * kLn2.
inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// No finite score and no log-sum-exp of any is below it. It is finite: a row of which nothing is seen then has weights
// exp2(-inf - kLowest) = 0, not NaN.
inline constexpr float kLowest = -0x1.fffffep127f;
// Weights below the smallest normal number may become 0; without this every exp2 pays for scaling them up and back.
inline constexpr ct::round_subnormals_to_zero_t kFlush{};

}  // namespace hypermla
