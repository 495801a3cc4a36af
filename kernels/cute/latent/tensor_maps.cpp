#include "cute/latent/tensor_maps.h"

#include <algorithm>

namespace hypermla::cute {

TensorMapSource rows_source(DType dtype, const void* data, int columns, const RowAxes& at, int rows, int groups) {
  const int box = int(std::min<std::int64_t>(rows, at.inner));
  const std::int64_t stride = 2 * at.outer_stride;
  const auto before = reinterpret_cast<std::uintptr_t>(data) - std::uintptr_t(at.outer * stride);
  return {dtype,
          data ? reinterpret_cast<const void*>(before) : nullptr,
          {{{at.inner, 2 * at.inner_stride, box},
            {at.outer, stride, rows / box},
            {std::max(columns / 64, 1), 128, groups},
            {at.outer + 1, stride, 1}}},
          std::min(columns, 64)};
}

TensorMapSource tokens_source(DType dtype, const void* data, int columns, const CacheShape& shape,
                              std::int64_t token_stride, std::int64_t batch_stride) {
  const int box = shape.page ? std::min(shape.page, kTokenBlock) : kTokenBlock;
  return {dtype,
          data,
          {{{shape.tokens, 2 * token_stride, box},
            {std::max(columns / 64, 1), 128, columns <= 64 || box < kTokenBlock ? 1 : 2},
            {shape.batches, 2 * batch_stride, 1}}},
          std::min(columns, 64)};
}

}  // namespace hypermla::cute
