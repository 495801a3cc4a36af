#include "hypermla/device/tensor_map.h"

#include <algorithm>

#include "hypermla/device/driver.h"

namespace hypermla {

static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));

TensorMap make_tensor_map(DType dtype, const void* data, const std::vector<TensorMapAxis>& axes) {
  if (!data) return {};
  constexpr int kColumns = 64;  // 128 bytes, a line of the swizzle
  std::vector<cuuint64_t> extents = {kColumns}, strides;
  std::vector<cuuint32_t> box = {kColumns}, steps(axes.size() + 1, 1);
  for (const TensorMapAxis& axis : axes) {
    extents.push_back(cuuint64_t(axis.extent));
    strides.push_back(cuuint64_t(axis.stride_bytes));
    box.push_back(cuuint32_t(axis.box));
  }
  const CUtensorMapDataType type =
      dtype == DType::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  alignas(64) CUtensorMap map;
  HYPERMLA_CUDA(cuTensorMapEncodeTiled(&map, type, cuuint32_t(box.size()), const_cast<void*>(data), extents.data(),
                                       strides.data(), box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
                                       CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  TensorMap result;
  std::copy(std::begin(map.opaque), std::end(map.opaque), std::begin(result.opaque));
  return result;
}

TensorMap make_tensor_map(DType dtype, const void* data, const TensorMapShape& shape) {
  return make_tensor_map(dtype, data,
                         {{shape.rows, shape.row_bytes, shape.box_rows},
                          {shape.groups, 128, shape.box_groups},
                          {shape.batch, shape.batch_bytes, 1}});
}

}  // namespace hypermla
