// The part of a plan that follows from its two structs.
#pragma once

#include <bit>
#include <cmath>

#include "hypermla/plan/memory_rows.h"
#include "hypermla/plan/plan.h"

namespace hypermla {

template <class Problem, class Tiling>
class TypedPlan : public KernelPlan {
 public:
  std::vector<FieldRef> problem_fields() override { return fields_of(problem); }
  std::vector<FieldRef> tiling_fields() override { return fields_of(tiling); }
  DType dtype() const override { return problem.dtype; }

  Problem problem;
  Tiling tiling;
};

// Preconditions that kernels share. All throw Error with the field, its value and what is supported.
inline void require_positive(const char* name, int value) {
  if (value < 1) fail("--{}={} is not supported: it must be at least 1", name, value);
}
inline void require_power_of_two(const char* name, int value, int least, int most) {
  if (value < least || value > most || !std::has_single_bit(unsigned(value)))
    fail("--{}={} is not supported: it must be a power of two from {} to {}", name, value, least, most);
}
inline void require_half_precision(DType dtype, const char* name = "--dtype") {
  if (dtype != DType::bfloat16 && dtype != DType::float16)
    fail("{}={} is not supported: choose bfloat16 or float16", name, dtype_name(dtype));
}
// Memory of the device that is aligned to so many bytes; a tensor that is not given is, too.
inline void require_aligned(const char* name, const void* data, unsigned bytes, bool missing = false) {
  if (missing || reinterpret_cast<std::uintptr_t>(data) % bytes)
    fail("{} must point to memory of the device that is aligned to {} bytes", name, bytes);
}
inline void require_address(const char* name, const void* data, unsigned bytes = 16) {
  require_aligned(name, data, bytes, !data);
}
// Kernels in CUDA Tile C++ count strides in 32 bits: else their loads would not be TMA's.
inline void require_32_bit_stride(const char* name, std::int64_t stride) {
  if (stride >> 32)
    fail("{}={} is not supported by this kernel: it must be less than 2^32; copy the tensor first", name, stride);
}
// Rows of an output, `width` elements each, do not overlap.
inline void require_rows_apart(const char* name, std::int64_t tokens, std::int64_t token_stride, std::int64_t heads,
                               std::int64_t head_stride, std::int64_t width) {
  if (!rows_apart({nullptr, tokens, token_stride, heads, head_stride, width}))
    fail("{} with a token stride of {} and a head stride of {} is not supported: its rows would overlap", name,
         token_stride, head_stride);
}

inline unsigned ceil_div(int value, int divisor) { return unsigned((value + divisor - 1) / divisor); }

// How much larger an extent becomes when it is cut into whole tiles.
inline double padding(int extent, int tile) { return double(ceil_div(extent, tile)) * tile / extent; }

inline constexpr float kLog2e = 1.4426950408889634f;  // scores in units of log2, for exp2
// The softmax scale of DeepSeek-V2 (arXiv 2405.04434, section 2.1): one over the root of the whole query dimension.
inline float softmax_scale(int d, int p) { return 1.0f / std::sqrt(float(d + p)); }
// Whether scores may be multiplied by it: 0 stands for softmax_scale(); others are so far from the ends of a float that
// a kernel may multiply them by the powers of two of tokens in FP8 and by log2(e).
inline bool is_scale(float scale) { return scale == 0 || (scale >= 0x1p-60f && scale <= 0x1p60f); }

}  // namespace hypermla
