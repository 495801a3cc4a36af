#include "hypermla/device/tensor_map.h"

#include <algorithm>

#include "hypermla/device/driver.h"

namespace hypermla {

static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));

TensorMap make_tensor_map(DType dtype, const void* data, const std::vector<TensorMapAxis>& axes, int columns) {
  if (!data) return {};
  std::vector<cuuint64_t> extents = {cuuint64_t(columns)}, strides;
  std::vector<cuuint32_t> box = {cuuint32_t(columns)}, steps(axes.size() + 1, 1);
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
                                       columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                       CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
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

TensorMap make_tensor_map(const TensorMapSource& source) {
  std::vector<TensorMapAxis> axes(source.axes.begin(), source.axes.end());
  if (axes.back().extent == 0) axes.pop_back();
  return make_tensor_map(source.dtype, source.data, axes, source.columns);
}

const TensorMap& TensorMapCache::of(const TensorMapSource& source) {
  if (const auto found = maps_.find(source); found != maps_.end()) return found->second;
  const TensorMap map = make_(source);
  if (maps_.size() == kMost) maps_.clear();
  return maps_[source] = map;
}

// Tensors of one address differ in their extents or strides, and addresses in bits that a page's size hides.
std::size_t TensorMapCache::Hash::operator()(const TensorMapSource& source) const {
  std::uint64_t hash = reinterpret_cast<std::uintptr_t>(source.data) >> 4;
  for (const TensorMapAxis& axis : source.axes)
    hash = (hash ^ std::uint64_t(axis.extent) ^ std::uint64_t(axis.stride_bytes) << 24) * 0x9e3779b97f4a7c15u;
  return hash ^ hash >> 32;
}

}  // namespace hypermla
