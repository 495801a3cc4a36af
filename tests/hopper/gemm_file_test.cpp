// The matrix product of examples/kernels for Hopper, run as plain C++ against the reference in its own file.
#include <gtest/gtest.h>

#include "emulated_hopper.h"

#define HYPERMLA_DEVICE
#include "../../examples/kernels/gemm_cute.cu"
#undef HYPERMLA_DEVICE
#define GemmTiles GemmTilesOfHost  // the two parts are compiled apart
#include "../../examples/kernels/gemm_cute.cu"
#undef GemmTiles

namespace hypermla::cute {
namespace {

TEST(HopperKernels, MatrixProductOfAFile) {
  const std::int64_t m = 203, n = 320, k = 192, sizes[] = {m, n, k};  // tiles end in the middle
  std::vector<std::uint16_t> a(m * k), b(n * k), c(m * n, 0xffff);
  unsigned random = 1;
  for (auto* values : {&a, &b})
    for (std::uint16_t& value : *values)
      value = from_float(float(int((random = random * 1664525 + 1013904223) >> 24) - 128) / 64, DType::bfloat16);
  const auto map = [](const void* data, std::int64_t rows, std::int64_t columns, int box_rows, int box_groups) {
    return emulated::map_of(data, {rows, columns / 64, 1, 2 * columns, 2 * rows * columns, box_rows, box_groups});
  };
  const TensorMap a_map = map(a.data(), m, k, 128, 1), b_map = map(b.data(), n, k, 256, 1),
                  c_map = map(c.data(), m, n, 64, 2);
  emulated::run(3, 384, [&] {
    gemm(a_map, b_map, c_map, ::GemmTiles{2, 2, 1, int(k / 64)});
  });  // one block makes two tiles

  const void* inputs[] = {a.data(), b.data()};
  const int dtypes[] = {int(DType::bfloat16), int(DType::bfloat16)};
  std::vector<double> expected(n);
  double* outputs[] = {expected.data()};
  for (std::int64_t row = 0; row < m; ++row) {
    reference(Row({row, sizes, inputs, dtypes, outputs, 3, 2, 1}));
    for (std::int64_t j = 0; j < n; ++j) {
      const double got = to_float(c[row * n + j], DType::bfloat16);
      ASSERT_TRUE(std::abs(got - expected[j]) <= 0.01 + 0.01 * std::abs(expected[j])) << row << ", " << j;
    }
  }
}

}  // namespace
}  // namespace hypermla::cute
