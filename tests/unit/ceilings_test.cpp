#include "hypermla/tune/ceilings.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "hypermla/roofline/kernel_time.h"

namespace hypermla::ceilings_test {
namespace {

TEST(PowerShare, IsWhatReadsTakeFromTensorWork) {
  EXPECT_DOUBLE_EQ(power_share_of(1.25, 1, 1), 0.25);
  EXPECT_DOUBLE_EQ(power_share_of(2.7, 2, 2), 0.35);
  // x + a y = 1 with the sustained figures of an H200: 595 TFLOP/s beside 3300 GB/s, 725 and 4580 alone.
  EXPECT_NEAR(power_share_of(1, 595.0 / 725, 3300.0 / 4580), 0.25, 0.005);
}

TEST(PowerShare, StaysAFigureWhateverTheNoise) {
  EXPECT_DOUBLE_EQ(power_share_of(0.99, 1, 1), 0.01);
  EXPECT_DOUBLE_EQ(power_share_of(3, 1, 1), 1);
}

TEST(CeilingSources, AreTheProbes) {
  std::vector<std::string> names;
  for (const KernelSource& source : ceiling_sources()) names.push_back(source.name);
  EXPECT_EQ(names, (std::vector<std::string>{"stream_read", "stream_product"}));
}

}  // namespace
}  // namespace hypermla::ceilings_test
