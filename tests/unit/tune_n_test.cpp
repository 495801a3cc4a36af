// The tuner varies n: on a device whose time for each n the test writes.
#include "hypermla/tune/tune_n.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "hypermla/plan/choice.h"
#include "hypermla/plan/registry.h"
#include "hypermla/plan/typed_plan.h"
#include "support.h"

namespace hypermla::tune_n_test {
namespace {
using testing_support::checkout;
using testing_support::contains;
using testing_support::error_of;
using testing_support::FakeDevice;
using testing_support::TempDir;
using testing_support::write_fake_compiler;

struct SplitProblem {
  int t = 1024;
  int n = -1;
  DType dtype = DType::bfloat16;
  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("t", self.t, "");
    field("n", self.n, "");
    field("dtype", self.dtype, "");
  }
};
struct SplitTiling {
  int Bm = 64;
  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Bm", self.Bm, "");
  }
};

// The model of this hybrid says that all tokens should be latent, and that 320 are best between the ends.
class SplitPlan : public TypedPlan<SplitProblem, SplitTiling> {
 public:
  void choose(const DeviceSpec& device) override {
    if (problem.n == -1) problem.n = choose_n(*this, device);
    if (problem.n == -2) problem.n = 16 * (problem.t / 40);
  }
  std::vector<FieldRef> problem_fields() override {
    std::vector<FieldRef> fields = fields_of(problem);
    fields[1].words = {{"roofline", -2}};
    return fields;
  }
  void use_default_tiling() override {}
  void validate() const override {
    if (problem.n == refused) fail("n={} is refused", problem.n);
  }
  TimeEstimate time(const Ceilings&) const override {
    if (problem.n == 0) return {.seconds = 0.5};
    return {.seconds = problem.n == problem.t ? 9.0 : 1 + std::fabs(problem.n - 320) / 1e3};
  }
  std::vector<TensorSpec> tensors() const override {
    return {{"k", Role::input, DType::bfloat16, {problem.n == too_large ? std::int64_t{1} << 40 : 64}}};
  }
  ReferenceShape reference_shape() const override { return {}; }
  ReferenceOutputs reference(std::int64_t, const InputReader&) const override { return {}; }
  std::unique_ptr<Executable> plan(const Tensors&) const override {
    CtKernelSpec<SplitProblem, SplitTiling> spec;
    spec.name = "split";
    spec.header = "cutile/test/split.cuh";
    spec.tiling = tiling;
    spec.candidates = {{32}, {64}};
    spec.cost = {1e9, 1e6};
    spec.grid = [](const SplitTiling&) { return Grid{4, 1, 1}; };
    spec.arguments = [n = problem.n](const SplitTiling& at) { return Arguments(n, at.Bm); };
    spec.executed = [](const SplitTiling&) { return Cost{1e9, 1e6}; };
    return std::make_unique<CtKernel>(std::move(spec));
  }
  static inline int refused = -1, too_large = -1;
};

class TuneN : public testing::Test {
 protected:
  TuneN() {
    SplitPlan::refused = SplitPlan::too_large = -1;
    dir_.write("kernels/cutile/tile_host/entry.h", "");
    dir_.write("kernels/cutile/test/split.cuh", "split");
    config_.kernel_root = dir_.path() / "kernels";
    config_.include_root = dir_.path() / "include";
    config_.cache = dir_.path() / "cache";
    config_.toolchain.cxx = write_fake_compiler(dir_, "Bm = 13}");
    planned_.spec.name = "probe";
    planned_.spec.bfloat16_tflops = 1;
    planned_.spec.peak_gbps = 1000;
    planned_.spec.sm_count = 4;
    options_.history_root = dir_.path() / "history";
    entry_ = {.language = "cutile",
              .layer = "mla",
              .design = "split",
              .version = "v0",
              .directory = "cutile/test",
              .summary = "",
              .make = [] { return std::make_unique<SplitPlan>(); }};
    device_->on_launch = [this](const std::filesystem::path&, Grid, void** arguments) {
      const int n = *static_cast<int*>(arguments[0]), Bm = *static_cast<int*>(arguments[1]);
      ++launches_[n];
      device_->now += seconds_(n) * (Bm == 32 ? 1 : 2);
    };
  }

  TunedN tune() {
    launches_.clear();
    Compiler compiler(config_);
    return tune_n(entry_, planned_, problem_, device_, compiler, 1, options_);
  }
  std::optional<int> remembered() {
    Compiler compiler(config_);
    return remembered_n(entry_, planned_, problem_, *device_, compiler, options_.history_root);
  }
  static std::set<int> values(const TunedN& tuned) {
    std::set<int> all;
    for (const TunedN::Point& one : tuned.measured) all.insert(one.n);
    return all;
  }

  TempDir dir_;
  CompilerConfig config_;
  PlannedDevice planned_;
  AutotuneOptions options_;
  KernelEntry entry_;
  Json problem_ = {{"t", 1024}, {"n", -1}, {"dtype", "bfloat16"}};
  std::shared_ptr<FakeDevice> device_ = std::make_shared<FakeDevice>();
  std::function<double(int)> seconds_ = [](int n) { return 0.010 + std::fabs(n - 400) * 1e-4; };
  std::map<int, int> launches_;  // by n, in the last tune()
};

TEST_F(TuneN, MeasuresBothEndsTheChoiceTheBestBetweenTheRooflineAndNeighbours) {
  SplitPlan plan;
  EXPECT_EQ(n_to_measure(plan, planned_.spec), (std::vector<int>{0, 64, 256, 320, 384, 400, 1024}));
  EXPECT_EQ(plan.problem.n, -1) << "as it was";
  plan.problem.t = 40;  // fewer than a step of the model
  EXPECT_EQ(n_to_measure(plan, planned_.spec), (std::vector<int>{0, 10, 16, 20, 30, 40}));
  plan.problem.t = 1;
  EXPECT_EQ(n_to_measure(plan, planned_.spec), (std::vector<int>{0, 1}));
}

TEST_F(TuneN, TakesWhatIsFastestNotWhatTheModelSays) {
  const TunedN tuned = tune();
  EXPECT_EQ(tuned.n, 400);
  EXPECT_EQ(values(tuned), (std::set<int>{0, 64, 256, 320, 384, 400, 1024}));
  EXPECT_EQ(tuned.stage.kernel, "n");
  EXPECT_EQ(tuned.stage.tiling, (Json{{"n", 400}}));
  for (const TunedN::Point& one : tuned.measured) EXPECT_NEAR(one.seconds, seconds_(one.n), 1e-9) << "its best tiling";
}

TEST_F(TuneN, AnEndMayWin) {
  seconds_ = [](int n) { return 0.010 + n * 1e-4; };
  EXPECT_EQ(tune().n, 0);
}

TEST_F(TuneN, RemembersPerProblemSourceAndDevice) {
  EXPECT_EQ(remembered(), std::nullopt);
  tune();
  EXPECT_EQ(remembered(), 400);
  const TunedN again = tune();
  EXPECT_EQ(again.n, 400);
  EXPECT_EQ(again.stage.measured, 0);
  EXPECT_TRUE(launches_.empty());
  EXPECT_EQ(again.measured.size(), 7u);

  seconds_ = [](int n) { return 0.010 + n * 1e-4; };
  options_.retune = true;
  EXPECT_EQ(tune().n, 0);
  options_.retune = false;
  EXPECT_EQ(remembered(), 0);

  problem_["t"] = 512;
  EXPECT_EQ(remembered(), std::nullopt);
  problem_["t"] = 1024;
  device_->rename("Fake 2");
  EXPECT_EQ(remembered(), std::nullopt);
  device_->rename("Fake 1");
  dir_.write("kernels/cutile/test/split.cuh", "improved");
  EXPECT_EQ(remembered(), std::nullopt);
}

TEST_F(TuneN, LeavesOutWhatIsRefusedOrDoesNotFit) {
  SplitPlan::refused = 400;
  SplitPlan::too_large = 1024;
  const TunedN tuned = tune();
  EXPECT_EQ(tuned.n, 384);
  EXPECT_EQ(values(tuned), (std::set<int>{0, 64, 256, 320, 384}));
  ASSERT_EQ(tuned.stage.skipped.size(), 1u);
  EXPECT_TRUE(contains(tuned.stage.skipped.begin()->first, "the tensors for n=1024 need"));
}

// The whole command-line road of `--n=roofline`: the word, the closed form, and what docs/predictions.md lists.
TEST(Roofline, IsAWordForN) {
  const DeviceTable table = DeviceTable::load(checkout() / "conf/devices.json");
  for (const char* kernel : {"cutile.mla.mla_var6_plus_v4", "cute.mla.mla_var6_plus_v5"})
    for (const auto& [s, n] : {std::pair{1, 0}, {16, 976}, {32, 1696}, {256, 4096}}) {
      const Settings said{.problem = {{"b", "32"}, {"s", std::to_string(s)}, {"t", "4096"}, {"n", "roofline"}}};
      const ConfiguredPlan made = configure({Registry::instance().find(kernel)}, {{}, table.find("NVIDIA H200")}, said);
      EXPECT_EQ(made.chosen, (Json{{"n", n}})) << kernel << " s=" << s;
    }
  const Settings shared{.problem = {{"prefixes", "1"}, {"n", "roofline"}}};
  EXPECT_TRUE(contains(
      error_of([&] {
        configure({Registry::instance().find("cutile.mla.mla_var6_plus_v4")}, {{}, table.find("NVIDIA H200")}, shared);
      }),
      "needs the length of the prefix"));
  EXPECT_TRUE(contains(error_of([&] {
                         configure({Registry::instance().find("cutile.mla.mla_var6_plus_v4")},
                                   {{}, table.find("NVIDIA H200")}, {.problem = {{"n", "rooflin"}}});
                       }),
                       "give it an integer of 32 bits, or roofline"));
}

}  // namespace
}  // namespace hypermla::tune_n_test
