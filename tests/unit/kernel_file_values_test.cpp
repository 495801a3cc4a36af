// How the reference of a kernel file reads 16-bit elements: as the library does, for all bit patterns.
#include <gtest/gtest.h>

#include <cmath>

#include "hypermla/base/half.h"
#include "hypermla/kernel_file.h"

namespace hypermla::kernel_file_values_test {
namespace {

TEST(KernelFileValues, AreThoseOfTheLibrary) {
  for (const DType dtype : {DType::bfloat16, DType::float16})
    for (unsigned bits = 0; bits < 65536; ++bits) {
      const auto half = std::uint16_t(bits);
      const double value = Values(&half, dtype)[0], expected = to_float(half, dtype);
      ASSERT_TRUE(value == expected || (std::isnan(value) && std::isnan(expected))) << int(dtype) << ", " << bits;
    }
}

TEST(KernelFileValues, OfWholeNumbersAndFloats) {
  const float real = 0.1f;
  const std::int32_t whole = -7;
  EXPECT_EQ(Values(&real, DType::float32)[0], double(0.1f));
  EXPECT_EQ(Values(&whole, DType::int32)[0], -7.0);
}

}  // namespace
}  // namespace hypermla::kernel_file_values_test
