#include "hypermla/plan/inputs.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "support.h"

namespace hypermla::inputs_test {
namespace {

constexpr int kBfloat16Exponent = 8, kFloat16Exponent = 5;
int exponent_bits(DType dtype) { return dtype == DType::bfloat16 ? kBfloat16Exponent : kFloat16Exponent; }

// What the bits of a 16-bit float mean, from the definition of such formats (IEEE 754-2019, section 3.4).
double meaning(std::uint16_t bits, DType dtype) {
  const int exponents = exponent_bits(dtype), fractions = 15 - exponents;
  const int bias = (1 << (exponents - 1)) - 1;
  const int exponent = (bits & 0x7fff) >> fractions, fraction = bits & ((1 << fractions) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == (1 << exponents) - 1)
    return fraction ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(double(fraction), 1 - bias - fractions);
  return sign * std::ldexp(double(fraction + (1 << fractions)), exponent - bias - fractions);
}

class HalfBits : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, HalfBits, testing::Values(DType::bfloat16, DType::float16),
                         [](const auto& which) { return std::string(dtype_name(which.param)); });

TEST_P(HalfBits, EveryPatternMeansItsValueAndComesBack) {
  for (unsigned pattern = 0; pattern <= 0xffff; ++pattern) {
    const auto bits = std::uint16_t(pattern);
    const double expected = meaning(bits, GetParam());
    const float value = from_half_bits(bits, GetParam());
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << std::hex << pattern;
      ASSERT_TRUE(std::isnan(meaning(to_half_bits(value, GetParam()), GetParam()))) << std::hex << pattern;
      continue;
    }
    ASSERT_EQ(double(value), expected) << std::hex << pattern;
    ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << std::hex << pattern;  // also of zero
    ASSERT_EQ(to_half_bits(value, GetParam()), bits) << std::hex << pattern;
  }
}

// Between every two neighbours: the middle goes to the even one, and a hair beside it to the nearer one.
TEST_P(HalfBits, RoundsToNearestEven) {
  const unsigned infinity = GetParam() == DType::bfloat16 ? 0x7f80 : 0x7c00;
  for (unsigned low = 0; low + 1 < infinity; ++low) {
    for (const unsigned sign : {0u, 0x8000u}) {
      const double below = meaning(std::uint16_t(low), GetParam()), above = meaning(std::uint16_t(low + 1), GetParam());
      const float middle = float((below + above) / 2);
      const float s = sign ? -1.0f : 1.0f;
      const auto even = std::uint16_t((low % 2 == 0 ? low : low + 1) | sign);
      ASSERT_EQ(to_half_bits(s * middle, GetParam()), even) << std::hex << low;
      ASSERT_EQ(to_half_bits(s * std::nextafter(middle, 0.0f), GetParam()), low | sign) << std::hex << low;
      ASSERT_EQ(to_half_bits(s * std::nextafter(middle, HUGE_VALF), GetParam()), (low + 1) | sign) << std::hex << low;
    }
  }
}

TEST_P(HalfBits, OverflowsToInfinityHalfWayBeyondTheLargest) {
  const unsigned infinity = GetParam() == DType::bfloat16 ? 0x7f80 : 0x7c00;
  const double largest = meaning(std::uint16_t(infinity - 1), GetParam());
  const double step = largest - meaning(std::uint16_t(infinity - 2), GetParam());
  const auto limit = float(largest + step / 2);
  EXPECT_EQ(to_half_bits(limit, GetParam()), infinity);
  EXPECT_EQ(to_half_bits(-limit, GetParam()), infinity | 0x8000);
  EXPECT_EQ(to_half_bits(std::nextafter(limit, 0.0f), GetParam()), infinity - 1);
  EXPECT_EQ(to_half_bits(HUGE_VALF, GetParam()), infinity);
  EXPECT_EQ(to_half_bits(std::numeric_limits<float>::max(), GetParam()), infinity);
}

// A NaN whose payload lies only in the bits that are cut off must not become an infinity.
TEST_P(HalfBits, EveryNanStaysOne) {
  for (const std::uint32_t bits : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0x7fc00000u, 0xffffffffu}) {
    const float nan = std::bit_cast<float>(bits);
    EXPECT_TRUE(std::isnan(meaning(to_half_bits(nan, GetParam()), GetParam()))) << std::hex << bits;
  }
}

// A plan that is nothing but tensors.
class TensorsOnly : public KernelPlan {
 public:
  explicit TensorsOnly(std::vector<TensorSpec> specs) : specs_(std::move(specs)) {}
  std::vector<FieldRef> problem_fields() override { return {}; }
  std::vector<FieldRef> tiling_fields() override { return {}; }
  void use_default_tiling() override {}
  void validate() const override {}
  DType dtype() const override { return DType::bfloat16; }
  std::vector<TensorSpec> tensors() const override { return specs_; }
  ReferenceShape reference_shape() const override { return {}; }
  ReferenceOutputs reference(std::int64_t, const InputReader&) const override { return {}; }
  std::unique_ptr<Executable> plan(const Tensors&) const override { return nullptr; }
  InputRules input_rules(std::uint64_t) const override { return rules; }

  InputRules rules;

 private:
  std::vector<TensorSpec> specs_;
};

std::vector<float> all_of(const AllocatedTensors& tensors, const std::string& name) {
  return tensors.reader()(name, 0, tensors.tensors().at(name).elements());
}

TEST(Inputs, AreStandardNormalDistinctAndDrawnFromTheSeed) {
  const auto device = std::make_shared<testing_support::FakeDevice>();
  const TensorsOnly plan({{"a", Role::input, DType::bfloat16, {100, 200}},
                          {"b", Role::input, DType::bfloat16, {20000}},
                          {"c", Role::input, DType::float16, {20000}},
                          {"d", Role::input, DType::float32, {20000}}});
  const AllocatedTensors first(plan, device, 7), again(plan, device, 7), other(plan, device, 8000);
  for (const char* name : {"a", "b", "c", "d"}) {
    const std::vector<float> values = all_of(first, name);
    EXPECT_EQ(values, all_of(again, name));
    EXPECT_NE(values, all_of(other, name));
    const double n = double(values.size());
    const double mean = std::accumulate(values.begin(), values.end(), 0.0) / n;
    const double square = std::inner_product(values.begin(), values.end(), values.begin(), 0.0) / n;
    EXPECT_NEAR(mean, 0, 5 / std::sqrt(n));  // five standard deviations
    EXPECT_NEAR(square, 1, 5 * std::sqrt(2 / n));
  }
  // Types round, so equal draws would be near, not equal.
  for (const char* one : {"a", "b", "c", "d"})
    for (const char* two : {"a", "b", "c", "d"}) {
      if (!(std::string(one) < two)) continue;
      const std::vector<float> x = all_of(first, one), y = all_of(first, two);
      int alike = 0;
      for (std::size_t i = 0; i < x.size(); ++i) alike += std::fabs(x[i] - y[i]) < 0.01f;
      EXPECT_LT(alike, int(x.size()) / 50) << one << " " << two;
    }
}

TEST(Inputs, LongTensorsRepeatWithAPrimePeriod) {
  constexpr std::int64_t kPeriod = 1048573;
  const auto device = std::make_shared<testing_support::FakeDevice>();
  const std::int64_t count = 5 * kPeriod + 1234;  // the copies double, and the last is cut
  for (const DType dtype : {DType::bfloat16, DType::float32}) {
    const TensorsOnly plan({{"a", Role::input, dtype, {count}}});
    const std::vector<float> values = all_of(AllocatedTensors(plan, device, 3), "a");
    for (std::int64_t i = kPeriod; i < count; ++i) ASSERT_EQ(values[i], values[i - kPeriod]) << i;
    for (const std::int64_t shorter :
         {1 << 16, 1 << 19, 1 << 20}) {  // no stride of a kernel hits the same numbers again
      int equal = 0;
      for (std::int64_t i = 0; i < 10000; ++i) equal += values[i] == values[i + shorter];
      EXPECT_LT(equal, 300) << shorter;
    }
  }
}

TEST(Inputs, PoisonMakesNanOfAllThatIsWritten) {
  const auto device = std::make_shared<testing_support::FakeDevice>();
  const TensorsOnly plan({{"in", Role::input, DType::float32, {33}},
                          {"b", Role::output, DType::bfloat16, {5, 7}},
                          {"h", Role::output, DType::float16, {35}},
                          {"f", Role::workspace, DType::float32, {35}}});
  AllocatedTensors tensors(plan, device, 1);
  const std::vector<float> input = all_of(tensors, "in");
  for (int round = 0; round < 2; ++round) {
    for (const char* name : {"b", "h", "f"}) {
      for (const float value : all_of(tensors, name)) ASSERT_TRUE(std::isnan(value)) << name;
      device->fill(tensors.tensors().at(name).data, 0, tensors.tensors().at(name).bytes());
      EXPECT_EQ(all_of(tensors, name)[34], 0);
    }
    tensors.poison();
  }
  EXPECT_EQ(all_of(tensors, "in"), input);
}

TEST(Inputs, FollowTheRulesOfThePlan) {
  const auto device = std::make_shared<testing_support::FakeDevice>();
  TensorsOnly plan({{"cache", Role::input, DType::bfloat16, {2, 64, 8}}, {"lengths", Role::input, DType::int32, {2}}});
  EXPECT_TRUE(testing_support::contains(testing_support::error_of([&] { AllocatedTensors(plan, device, 1); }),
                                        "do not give the 2 values of lengths"));
  plan.rules.integers["lengths"] = {64, 1 << 20};
  const std::vector<float> plain = all_of(AllocatedTensors(plan, device, 1), "cache");
  plan.rules.unread["cache"] = {{8, 3}, {1020, 4}};
  plan.rules.growing = {{"cache", 64, 8}};
  EXPECT_EQ(all_of(AllocatedTensors(plan, device, 1), "lengths"), (std::vector<float>{64, 1 << 20}));
  const std::vector<float> still = all_of(AllocatedTensors(plan, device, 1), "cache");
  const std::vector<float> growing = all_of(AllocatedTensors(plan, device, 1, true), "cache");
  for (int i = 0; i < 1024; ++i) {
    const bool unread = (i >= 8 && i < 11) || i >= 1020;
    ASSERT_EQ(std::isnan(still[i]), unread) << i;
    ASSERT_EQ(std::isnan(growing[i]), unread) << i;
    if (unread) continue;
    ASSERT_EQ(still[i], plain[i]) << i;
    const double factor = 1 + 15 * double(i / 8 % 64) / 64;
    ASSERT_NEAR(growing[i], factor * plain[i], 0.004 * std::fabs(factor * plain[i])) << i;  // rounded to bfloat16
  }
}

TEST(Inputs, ReadsAnyPiece) {
  testing_support::FakeDevice device;
  std::vector<std::uint16_t> halves;
  for (int i = 0; i < 10; ++i) halves.push_back(to_half_bits(float(i), DType::float16));
  EXPECT_EQ(read_floats(device, {halves.data(), DType::float16, {10}}, 3, 4), (std::vector<float>{3, 4, 5, 6}));
  std::vector<float> floats = {1, 2, 3};
  EXPECT_EQ(read_floats(device, {floats.data(), DType::float32, {3}}, 1, 2), (std::vector<float>{2, 3}));
}

}  // namespace
}  // namespace hypermla::inputs_test
