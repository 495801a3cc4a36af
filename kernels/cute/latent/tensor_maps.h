// The maps of the tensors that the latent kernels load boxes of, as LatentArguments names their axes.
#pragma once

#include "hypermla/device/tensor_map.h"

namespace hypermla::cute {

inline constexpr int kTokenBlock = 64;  // tokens that a kernel attends to at once

// Rows of queries along two axes, of which requests follow each other along the outer one; strides in elements.
struct RowAxes {
  std::int64_t inner, inner_stride, outer, outer_stride;
};
// Boxes of `rows` rows, which inner rows divide or are divided by, and `groups` groups of 64 columns.
TensorMapSource rows_source(DType dtype, const void* data, int columns, const RowAxes& axes, int rows, int groups);

// A cache as `batches` of `tokens` tokens: its pages, or where page = 0 the requests of a dense one.
struct CacheShape {
  std::int64_t tokens, batches;
  int page;
};
TensorMapSource tokens_source(DType dtype, const void* data, int columns, const CacheShape& shape,
                              std::int64_t token_stride, std::int64_t batch_stride);

}  // namespace hypermla::cute
