// How tensor maps are made (hypermla/tensor_map.h).
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

#include "hypermla/dtype.h"
#include "hypermla/tensor_map.h"

namespace hypermla {

// A tensor of 16-bit elements seen as (64 columns, rows, groups of 64 columns, batch), the innermost axis first: a box
// of `box_rows` rows and `box_groups` groups lies in shared memory with the 128-byte swizzle, one group after the
// other. Reads outside the tensor give zeros, writes there are dropped.
struct TensorMapShape {
  std::int64_t rows = 0, groups = 0, batch = 0;
  std::int64_t row_bytes = 0;    // from a row to the next
  std::int64_t batch_bytes = 0;  // from a batch element to the next
  int box_rows = 64, box_groups = 1;
};

// Throws Error when the driver refuses: no such engine, or a misaligned tensor. `data` is 16-byte aligned device
// memory. Null gives an empty map without a driver: for plans that are compiled or predicted only.
TensorMap make_tensor_map(DType dtype, const void* data, const TensorMapShape& shape);

// The same of matrices [batch, rows, columns] that follow each other; `row_bytes` from a row to the next, 0: no gaps.
inline TensorMap make_matrix_map(DType dtype, const void* data, std::int64_t rows, int columns, std::int64_t batch,
                                 int box_rows, int box_groups, std::int64_t row_bytes = 0) {
  if (row_bytes == 0) row_bytes = 2 * columns;
  return make_tensor_map(dtype, data,
                         {.rows = rows,
                          .groups = columns / 64,
                          .batch = batch,
                          .row_bytes = row_bytes,
                          .batch_bytes = rows * row_bytes,
                          .box_rows = box_rows,
                          .box_groups = box_groups});
}

// One axis of a tensor and of its boxes, other than the innermost one.
struct TensorMapAxis {
  std::int64_t extent = 0;
  std::int64_t stride_bytes = 0;  // a multiple of 16
  int box = 1;
  bool operator==(const TensorMapAxis&) const = default;
};
// The same for 64 columns and up to 4 further axes in any order; boxes lie in shared memory with the first axis
// innermost. 32 columns are lines of 64 bytes with the 64-byte swizzle.
TensorMap make_tensor_map(DType dtype, const void* data, const std::vector<TensorMapAxis>& axes, int columns = 64);

// All that a map is made from.
struct TensorMapSource {
  DType dtype = DType::bfloat16;
  const void* data = nullptr;
  std::array<TensorMapAxis, 4> axes;  // the last one of extent 0: there are three
  int columns = 64;
  bool operator==(const TensorMapSource&) const = default;
};
TensorMap make_tensor_map(const TensorMapSource& source);

// Maps that were made before. An engine calls with the same tensors in every step, those of its layers in turn, and
// asking the driver for a map takes longer than finding it. For one thread at a time.
class TensorMapCache {
 public:
  using Make = std::function<TensorMap(const TensorMapSource&)>;
  static constexpr std::size_t kMost = 1024;  // then it starts anew: tensors may always lie elsewhere

  explicit TensorMapCache(Make make = [](const TensorMapSource& source) { return make_tensor_map(source); })
      : make_(std::move(make)) {}

  // The reference holds until the next call.
  const TensorMap& of(const TensorMapSource& source);

 private:
  struct Hash {
    std::size_t operator()(const TensorMapSource& source) const;
  };
  Make make_;
  std::unordered_map<TensorMapSource, TensorMap, Hash> maps_;
};

}  // namespace hypermla
