// --check, on a plan whose outputs are perturbed one element at a time.
#include "hypermla/plan/check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "support.h"

namespace hypermla::check_test {
namespace {
using testing_support::contains;
using testing_support::error_of;

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// Outputs o [b, h, n] (16 bits) and lse [b, h] (fp32), in b * h groups.
class PerturbedPlan : public KernelPlan {
 public:
  DType type = DType::bfloat16;
  int b = 2, h = 3, n = 32;
  double flops = 1;
  double reach = 30;
  bool without_lse = false, without_reach = false, one_too_many = false;
  std::function<double(std::int64_t index)> o = [](std::int64_t i) { return i % 2 ? 1.0 : -1.0; };
  std::function<double(std::int64_t index)> lse = [](std::int64_t i) { return double(i + 1); };
  mutable std::set<std::int64_t> asked;
  mutable std::mutex mutex;

  std::vector<FieldRef> problem_fields() override { return {}; }
  std::vector<FieldRef> tiling_fields() override { return {}; }
  void use_default_tiling() override {}
  void validate() const override {}
  DType dtype() const override { return type; }
  std::vector<TensorSpec> tensors() const override {
    return {{"x", Role::input, type, {4}},
            {"o", Role::output, type, {b, h, n}},
            {"lse", Role::output, DType::float32, {b, h}},
            {"scratch", Role::workspace, DType::float32, {3}}};
  }
  ReferenceShape reference_shape() const override { return {b * h, flops}; }
  ReferenceOutputs reference(std::int64_t group, const InputReader&) const override {
    std::lock_guard lock(mutex);
    asked.insert(group);
    ReferenceOutputs outputs;
    for (int i = 0; i < n; ++i) outputs["o"].push_back(o(group * n + i));
    if (one_too_many) outputs["o"].push_back(0);
    if (!without_lse) outputs["lse"].push_back(lse(group));
    if (!without_reach) outputs["lse_reach"].push_back(reach);
    return outputs;
  }
  std::unique_ptr<Executable> plan(const Tensors&) const override { return nullptr; }
};

class CheckTest : public testing::Test {
 public:
  // Writes the right outputs, then lets the test spoil them.
  CheckResult after(const std::function<void()>& spoil, double budget = 4e9, std::uint64_t seed = 1) {
    tensors_ = std::make_unique<AllocatedTensors>(plan_, device_, 1);
    for (std::int64_t i = 0; i < at("o").elements(); ++i) put_o(i, plan_.o(i));
    for (std::int64_t i = 0; i < at("lse").elements(); ++i) put_lse(i, plan_.lse(i));
    spoil();
    return check_outputs(plan_, *tensors_, *device_, seed, budget);
  }
  bool passes_after(const std::function<void()>& spoil) { return after(spoil).passed; }
  const Tensor& at(const char* name) const { return tensors_->tensors().at(name); }
  void put_o(std::int64_t i, double value) {
    static_cast<std::uint16_t*>(at("o").data)[i] = to_half_bits(float(value), plan_.type);
  }
  void put_lse(std::int64_t i, double value) { static_cast<float*>(at("lse").data)[i] = float(value); }

  PerturbedPlan plan_;
  std::shared_ptr<testing_support::FakeDevice> device_ = std::make_shared<testing_support::FakeDevice>();
  std::unique_ptr<AllocatedTensors> tensors_;
};

TEST_F(CheckTest, PassesWhatIsRight) {
  const CheckResult result = after([] {});
  EXPECT_TRUE(result.passed);
  EXPECT_EQ(result.groups, 6);
  EXPECT_EQ(result.groups_checked, 6);
  ASSERT_EQ(result.outputs.size(), 2u);  // inputs and workspace are not compared
  EXPECT_EQ(result.outputs[0].output, "o");
  EXPECT_EQ(result.outputs[1].output, "lse");
  for (const OutputError& error : result.outputs) {
    EXPECT_TRUE(error.passed);
    EXPECT_EQ(error.relative_norm, 0);
    EXPECT_EQ(error.worst, 0);
  }
}

TEST_F(CheckTest, OneNanFailsWhereverItIs) {
  for (const std::int64_t i : {0, 31, 32, 100, 191}) {
    EXPECT_FALSE(passes_after([&] { put_o(i, std::nan("")); })) << i;
  }
  EXPECT_FALSE(passes_after([&] { put_lse(5, std::nan("")); }));
}

TEST_F(CheckTest, AnElementThatNobodyWritesFails) {
  struct WriteAllBut : Executable {
    WriteAllBut(CheckTest& owner, std::int64_t skipped) : Executable("fake"), test(owner), skip(skipped) {}
    void prepare(Compiler&, Device&) override {}
    void run(StreamHandle) override {
      for (std::int64_t i = 0; i < test.at("o").elements(); ++i)
        if (i != skip) test.put_o(i, test.plan_.o(i));
      for (std::int64_t i = 0; i < test.at("lse").elements(); ++i) test.put_lse(i, test.plan_.lse(i));
    }
    std::vector<TiledKernel*> kernels() override { return {}; }
    Cost cost() const override { return {}; }
    Prediction predict(const DeviceSpec&, DType) const override { return {}; }
    CheckTest& test;
    std::int64_t skip;
  };
  after([] {});  // the right outputs of an earlier run lie there and must not help
  WriteAllBut all(*this, -1), some(*this, 77);
  EXPECT_TRUE(check(plan_, all, *tensors_, *device_, 1).passed);
  const CheckResult result = check(plan_, some, *tensors_, *device_, 1);
  EXPECT_FALSE(result.passed);
  EXPECT_EQ(result.outputs[0].worst_position, (std::vector<std::int64_t>{0, 2, 13}));
}

TEST_F(CheckTest, InfinitiesMustAgree) {
  plan_.lse = [](std::int64_t i) { return i == 2 ? -kInfinite : double(i + 1); };
  EXPECT_TRUE(passes_after([] {}));
  EXPECT_FALSE(passes_after([&] { put_lse(2, kInfinite); }));
  EXPECT_FALSE(passes_after([&] { put_lse(2, -3e38); }));
  EXPECT_FALSE(passes_after([&] { put_lse(2, std::nan("")); }));
  EXPECT_FALSE(passes_after([&] { put_lse(3, -kInfinite); }));
  EXPECT_FALSE(passes_after([&] { put_o(3, kInfinite); }));
}

TEST_F(CheckTest, ANanOfTheReferenceIsNeverRight) {
  plan_.lse = [](std::int64_t i) { return i == 2 ? std::nan("") : 1.0; };
  EXPECT_FALSE(passes_after([] {}));
}

TEST_F(CheckTest, NamesTheWorstPosition) {
  const CheckResult result = after([&] {
    put_o(2, -0.75);
    put_o((1 * 3 + 2) * 32 + 17, 0.25);  // (1, 2, 17)
    put_o(101, 0.9);
  });
  EXPECT_FALSE(result.passed);
  const OutputError& o = result.outputs[0];
  EXPECT_FALSE(o.passed);
  EXPECT_EQ(o.worst_position, (std::vector<std::int64_t>{1, 2, 17}));
  EXPECT_EQ(o.got, 0.25);
  EXPECT_EQ(o.expected, 1);
  EXPECT_DOUBLE_EQ(o.worst, 0.75 / 2);  // over |expected| + rms
  EXPECT_TRUE(result.outputs[1].passed);
  EXPECT_TRUE(contains(to_text(result), "FAILED"));
  EXPECT_TRUE(contains(to_text(result), "[1, 2, 17]: got 0.25, expected 1"));
}

TEST_F(CheckTest, ANanIsWorseThanAnything) {
  const CheckResult result = after([&] {
    put_o(2, 3e38);
    put_o(40, std::nan(""));
  });
  EXPECT_EQ(result.outputs[0].worst_position, (std::vector<std::int64_t>{0, 1, 8}));
  EXPECT_TRUE(std::isnan(result.outputs[0].got));
}

// rms = |expected| = 1: an element may be off by 2 * elementwise.
TEST_F(CheckTest, TheElementwiseToleranceIsABoundary) {
  plan_.n = 4096;  // so that one element moves the norm too little to matter
  for (const DType type : {DType::bfloat16, DType::float16}) {
    plan_.type = type;
    const double limit = 2 * tolerance(type, type).elementwise, step = type == DType::bfloat16 ? 1.0 / 128 : 1.0 / 1024;
    const double inside = 1 + std::floor(limit / step) * step, outside = inside + step;  // both exact in the type
    EXPECT_TRUE(passes_after([&] { put_o(1, inside); })) << dtype_name(type);
    EXPECT_FALSE(passes_after([&] { put_o(1, outside); })) << dtype_name(type);
    EXPECT_FALSE(passes_after([&] { put_o(1, 1 - limit * 1.1); })) << dtype_name(type);
  }
  EXPECT_LT(tolerance(DType::float16, DType::float16).elementwise,
            tolerance(DType::bfloat16, DType::bfloat16).elementwise);
  EXPECT_LT(tolerance(DType::float32, DType::bfloat16).elementwise,
            tolerance(DType::float16, DType::float16).elementwise);
}

// float16 has steps of 2^-24 near zero. A row may be so small that half a step is more than its share.
TEST_F(CheckTest, SmallRowsMayLoseHalfOfTheSmallestStep) {
  plan_.type = DType::float16;
  for (const double right : {0.49 * 0x1p-24, 1.49 * 0x1p-24, 3.51 * 0x1p-24, 10.49 * 0x1p-24}) {
    plan_.o = [=](std::int64_t i) { return i % 2 ? right : -right; };
    EXPECT_TRUE(passes_after([] {})) << right;
    EXPECT_FALSE(passes_after([&] { put_o(1, right + 0x1p-23); })) << right;
    EXPECT_FALSE(passes_after([&] { put_o(1, std::nan("")); })) << right;
  }
}

// Of an fp32 output the numbers that it is made from count, however small it is.
TEST_F(CheckTest, TheReachSetsTheToleranceOfFp32) {
  plan_.lse = [](std::int64_t) { return 0.25; };
  const double limit = tolerance(DType::float32, plan_.type).elementwise * (1 + 0.25 + plan_.reach);
  EXPECT_TRUE(passes_after([&] { put_lse(1, 0.25 + 0.99 * limit); }));
  EXPECT_FALSE(passes_after([&] { put_lse(1, 0.25 + 1.01 * limit); }));
  EXPECT_FALSE(passes_after([&] { put_lse(1, 0.25 - 1.01 * limit); }));
  plan_.without_reach = true;
  EXPECT_TRUE(contains(error_of([&] { after([] {}); }), "does not say how far the numbers behind lse reach"));
}

// A bias that no single element betrays.
TEST_F(CheckTest, TheNormFailsWhereElementsPass) {
  const double bias = 1 + 2.0 / 128;  // exact in bfloat16; well below 2 * elementwise
  const CheckResult result = after([&] {
    for (std::int64_t i = 0; i < at("o").elements(); ++i) put_o(i, bias * plan_.o(i));
  });
  EXPECT_LE(result.outputs[0].worst, tolerance(plan_.type, plan_.type).elementwise);
  EXPECT_NEAR(result.outputs[0].relative_norm, bias - 1, 1e-12);
  EXPECT_FALSE(result.passed);
}

// Rows that see no token must be exactly zero.
TEST_F(CheckTest, ZerosMustBeZero) {
  plan_.o = [](std::int64_t) { return 0.0; };
  EXPECT_TRUE(passes_after([] {}));
  EXPECT_TRUE(passes_after([&] { put_o(5, -0.0); }));
  EXPECT_FALSE(passes_after([&] { put_o(5, 1e-6); }));
}

TEST_F(CheckTest, SamplesWhatItCannotAfford) {
  plan_.b = 50;
  plan_.h = 2;
  plan_.n = 2;
  plan_.flops = 10;
  EXPECT_EQ(after([] {}, 1000).groups_checked, 100);
  EXPECT_EQ(plan_.asked.size(), 100u);

  plan_.asked.clear();
  const CheckResult sample = after([] {}, 75);
  EXPECT_TRUE(sample.passed);
  EXPECT_EQ(sample.groups, 100);
  EXPECT_EQ(sample.groups_checked, 7);
  EXPECT_EQ(plan_.asked.size(), 7u);
  EXPECT_TRUE(plan_.asked.count(0) && plan_.asked.count(99));
  EXPECT_TRUE(contains(to_text(sample), "a random sample: 7 of 100 groups")) << to_text(sample);

  const std::set<std::int64_t> first = plan_.asked;
  plan_.asked.clear();
  after([] {}, 75);
  EXPECT_EQ(plan_.asked, first);  // the seed decides
  plan_.asked.clear();
  after([] {}, 75, 2);
  EXPECT_NE(plan_.asked, first);

  plan_.asked.clear();
  EXPECT_EQ(after([] {}, 0).groups_checked, 2);  // both ends, even if they exceed the budget
  EXPECT_EQ(plan_.asked, (std::set<std::int64_t>{0, 99}));
  EXPECT_FALSE(after([&] { put_o(199, 5); }, 0).passed);
  EXPECT_TRUE(contains(to_text(after([] {})), "compared all 100 groups"));
}

TEST_F(CheckTest, AReferenceThatFailsOrForgetsAnOutputIsAnError) {
  plan_.without_lse = true;
  EXPECT_TRUE(contains(error_of([&] { after([] {}); }), "does not make its output lse"));
  plan_.without_lse = false;
  plan_.one_too_many = true;
  EXPECT_TRUE(contains(error_of([&] { after([] {}); }), "makes 33 elements of o in a group, not 32"));
  plan_.one_too_many = false;
  plan_.o = [](std::int64_t i) -> double { return i == 100 ? throw Error("no memory") : 1.0; };
  tensors_.reset();
  EXPECT_EQ(error_of([&] {
              AllocatedTensors tensors(plan_, device_, 1);
              check_outputs(plan_, tensors, *device_, 1);
            }),
            "no memory");
}

}  // namespace
}  // namespace hypermla::check_test
