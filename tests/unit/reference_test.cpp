// The reference against a definition that shares none of its steps: no maximum, no blocks, long double.
#include "hypermla/plan/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace hypermla::reference_test {
namespace {

std::vector<float> random_floats(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

struct Shape {
  int s, t, e, dv;
};

class ReferenceTest : public testing::TestWithParam<Shape> {};

TEST_P(ReferenceTest, IsTheDefinition) {
  const auto [s, t, e, dv] = GetParam();
  const double scale = 1 / std::sqrt(double(e));
  const std::vector<float> q = random_floats(std::size_t(s) * e, 1), k = random_floats(std::size_t(t) * e, 2),
                           v = random_floats(std::size_t(t) * dv, 3);
  for (const bool causal : {false, true}) {
    const AttentionReference result = attention_reference(q, k, v, s, t, e, dv, scale, causal);
    ASSERT_EQ(result.o.size(), std::size_t(s) * dv);
    ASSERT_EQ(result.lse.size(), std::size_t(s));
    for (int i = 0; i < s; ++i) {
      long double sum = 0;
      std::vector<long double> o(dv, 0.0L);
      for (int j = 0; j < t; ++j) {
        if (causal && j > t - s + i) continue;  // the last query sees the last token
        long double score = 0;
        for (int c = 0; c < e; ++c) score += static_cast<long double>(q[i * e + c]) * k[j * e + c];
        const long double weight = std::exp(score * scale);
        sum += weight;
        for (int c = 0; c < dv; ++c) o[c] += weight * v[j * dv + c];
      }
      if (sum == 0) {
        EXPECT_EQ(result.lse[i], -std::numeric_limits<double>::infinity());
        for (int c = 0; c < dv; ++c) EXPECT_EQ(result.o[i * dv + c], 0);
        continue;
      }
      EXPECT_NEAR(result.lse[i], double(std::log(sum)), 1e-12) << "row " << i;
      for (int c = 0; c < dv; ++c) EXPECT_NEAR(result.o[i * dv + c], double(o[c] / sum), 1e-12) << i << " " << c;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ReferenceTest,
                         testing::Values(Shape{1, 1, 1, 1}, Shape{1, 7, 16, 3}, Shape{5, 5, 17, 8}, Shape{4, 9, 33, 16},
                                         Shape{7, 3, 20, 5},  // causal: four queries see nothing
                                         Shape{9, 1, 48, 2}));

// exp(score) alone would overflow or vanish.
TEST(Reference, SurvivesLargeScores) {
  const AttentionReference large = attention_reference({1000}, {1, 2}, {10, 20}, 1, 2, 1, 1, 1, false);
  EXPECT_DOUBLE_EQ(large.lse[0], 2000);
  EXPECT_DOUBLE_EQ(large.o[0], 20);
  const AttentionReference small = attention_reference({-1000}, {1, 1}, {10, 20}, 1, 2, 1, 1, 1, false);
  EXPECT_NEAR(small.lse[0], -1000 + std::log(2.0), 1e-12);
  EXPECT_DOUBLE_EQ(small.o[0], 15);
}

TEST(Reference, JoinsColumns) {
  EXPECT_EQ(join_columns({1, 2, 3, 4}, {5, 6}, 2, 1), (std::vector<float>{1, 2, 5, 3, 4, 6}));
  EXPECT_EQ(join_columns({1, 2, 3}, {4, 5, 6, 7, 8, 9}, 1, 2), (std::vector<float>{1, 4, 5, 2, 6, 7, 3, 8, 9}));
}

}  // namespace
}  // namespace hypermla::reference_test
