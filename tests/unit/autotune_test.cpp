// The loop around the tuner, on a device whose time per tiling the test writes.
#include "hypermla/tune/autotune.h"

#include <gtest/gtest.h>

#include <map>

#include "support.h"

namespace hypermla::autotune_test {
namespace {
namespace fs = std::filesystem;
using testing_support::contains;
using testing_support::error_of;
using testing_support::FakeDevice;
using testing_support::TempDir;
using testing_support::write_fake_compiler;

struct ProbeProblem {
  int n = 5;
  DType dtype = DType::bfloat16;
  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("n", self.n, "");
    field("dtype", self.dtype, "");
  }
};
struct ProbeTiling {
  int Bm = 64;
  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Bm", self.Bm, "");
  }
};

// A pipeline of kernels with the same candidates. All are predicted alike, but for what `slowdown` names.
class ProbePlan : public KernelPlan {
 public:
  std::vector<std::string> stages = {"first"};
  ProbeProblem problem;
  ProbeTiling tiling;
  std::vector<ProbeTiling> candidates = {{16}, {32}, {64}, {128}};
  std::map<int, double> slowdown;  // of the prediction
  int most_together = 0;  // above it the sum of the tilings of stages that run at once is refused; 0: one by one

  std::vector<FieldRef> problem_fields() override { return fields_of(problem); }
  std::vector<FieldRef> tiling_fields() override { return fields_of(tiling); }
  void use_default_tiling() override {}
  void validate() const override {}
  DType dtype() const override { return problem.dtype; }
  std::vector<TensorSpec> tensors() const override { return {}; }
  ReferenceShape reference_shape() const override { return {}; }
  ReferenceOutputs reference(std::int64_t, const InputReader&) const override { return {}; }
  std::unique_ptr<Executable> plan(const Tensors&) const override {
    std::vector<std::unique_ptr<Executable>> all;
    for (const std::string& name : stages) {
      CtKernelSpec<ProbeProblem, ProbeTiling> spec;
      spec.name = name;
      spec.header = "cutile/test/" + name + ".cuh";
      spec.tiling = tiling;
      spec.candidates = candidates;
      spec.cost = {1e9, 1e6};
      spec.grid = [](const ProbeTiling&) { return Grid{4, 1, 1}; };
      spec.arguments = [](const ProbeTiling& at) { return Arguments(at.Bm); };
      spec.executed = [slowdown = slowdown](const ProbeTiling& at) {
        const auto found = slowdown.find(at.Bm);
        return Cost{1e9 * (found == slowdown.end() ? 1 : found->second), 1e6};
      };
      all.push_back(std::make_unique<CtKernel>(std::move(spec)));
    }
    if (most_together) {
      return std::make_unique<ConcurrentKernels>("probe", std::move(all),
                                                 [most = most_together](const std::vector<TiledKernel*>& kernels) {
                                                   int sum = 0;
                                                   for (const TiledKernel* kernel : kernels)
                                                     sum += kernel->tiling().at("Bm").get<int>();
                                                   if (sum > most) fail("{} do not fit", sum);
                                                 });
    }
    return std::make_unique<KernelPipeline>("probe", std::move(all));
  }
};

struct Interrupted {};  // no Error: as if the process had been stopped

class AutotuneTest : public testing::Test {
 protected:
  AutotuneTest() {
    dir_.write("kernels/cutile/tile_host/entry.h", "");
    for (const char* name : {"first", "second"}) dir_.write("kernels/cutile/test/" + std::string(name) + ".cuh", name);
    config_.kernel_root = dir_.path() / "kernels";
    config_.include_root = dir_.path() / "include";
    config_.cache = dir_.path() / "cache";
    config_.toolchain.cxx = write_fake_compiler(dir_, "Bm = 13}");
    spec_.name = "probe";
    spec_.bfloat16_tflops = 1;
    spec_.peak_gbps = 1000;
    spec_.sm_count = 4;
    options_.history_root = dir_.path() / "history";
    // Well apart, so that the first pass decides; 10 ms, so that a recording holds two runs.
    seconds_["first"] = {{16, 0.040}, {32, 0.010}, {64, 0.030}, {128, 0.020}};
    seconds_["second"] = {{16, 0.010}, {32, 0.050}, {64, 0.040}, {128, 0.030}};
    device_.on_launch = [this](const fs::path& artifact, Grid, void** arguments) {
      const std::string entry = artifact.parent_path().filename().string();
      const std::string name = entry.substr(0, entry.find('-'));
      const int Bm = *static_cast<int*>(arguments[0]);
      ++launches_[Bm];
      if (fatal_after_ && name == "first" && launches_.size() > std::size_t(fatal_after_)) throw Interrupted();
      if (broken_.count(Bm)) fail("tiling {} reads out of bounds", Bm);
      device_.now += seconds_[name].at(Bm);
    };
  }

  AutotuneResult tune() {
    launches_.clear();
    executable_ = plan_.plan({});
    Compiler compiler(config_);
    return autotune(plan_, *executable_, compiler, device_, spec_, options_);
  }
  int chosen(const AutotuneResult& result, int stage = 0) { return result.stages.at(stage).tiling.at("Bm").get<int>(); }

  TempDir dir_;
  CompilerConfig config_;
  DeviceSpec spec_;
  AutotuneOptions options_;
  ProbePlan plan_;
  FakeDevice device_;
  std::unique_ptr<Executable> executable_;
  std::map<std::string, std::map<int, double>> seconds_;
  std::map<int, int> launches_;  // by tiling, in the last tune()
  std::map<int, bool> broken_;
  int fatal_after_ = 0;  // candidates that may run before the interruption; 0: none comes
};

TEST_F(AutotuneTest, PicksTheFastestAndLeavesItPrepared) {
  const AutotuneResult result = tune();
  ASSERT_EQ(result.stages.size(), 1u);
  EXPECT_EQ(result.stages[0].kernel, "first");
  EXPECT_EQ(chosen(result), 32);
  EXPECT_EQ(launches_.size(), 4u);
  EXPECT_GE(result.stages[0].measured, 4);
  TiledKernel* kernel = executable_->kernels()[0];
  EXPECT_EQ(kernel->tiling(), (Json{{"Bm", 32}}));
  launches_.clear();
  executable_->run(nullptr);
  EXPECT_EQ(launches_, (std::map<int, int>{{32, 1}}));
}

TEST_F(AutotuneTest, RemembersAndForgetsOnDemand) {
  const AutotuneResult first = tune();
  EXPECT_TRUE(fs::exists(first.stages[0].history));
  EXPECT_TRUE(contains(first.stages[0].history.string(), (dir_.path() / "history/first-").string()));
  const AutotuneResult second = tune();
  EXPECT_EQ(chosen(second), 32);
  EXPECT_EQ(second.stages[0].measured, 0);
  EXPECT_TRUE(launches_.empty());

  seconds_["first"][64] = 0.005;
  EXPECT_EQ(chosen(tune()), 32);
  options_.retune = true;
  EXPECT_EQ(chosen(tune()), 64);
  options_.retune = false;
  EXPECT_EQ(chosen(tune()), 64);  // and the new result is what is remembered
  EXPECT_TRUE(launches_.empty());
}

TEST_F(AutotuneTest, AResultCountsForOneSourceProblemAndDevice) {
  tune();
  plan_.problem.n = 6;
  tune();
  EXPECT_EQ(launches_.size(), 4u);
  plan_.problem.n = 5;
  tune();
  EXPECT_TRUE(launches_.empty());
  dir_.write("kernels/cutile/test/first.cuh", "improved");
  tune();
  EXPECT_EQ(launches_.size(), 4u);

  device_.rename("Fake 2");
  tune();
  EXPECT_EQ(launches_.size(), 4u);
  device_.rename("Fake 1");
  tune();
  EXPECT_TRUE(launches_.empty());
}

TEST_F(AutotuneTest, AnInterruptionLosesNothingThatWasMeasured) {
  fatal_after_ = 2;
  EXPECT_THROW(tune(), Interrupted);
  std::map<int, int> before = launches_;
  ASSERT_EQ(before.size(), 3u);  // two measured, the third under way
  int unfinished = 0;
  fatal_after_ = 0;
  const AutotuneResult resumed = tune();
  EXPECT_EQ(chosen(resumed), 32);
  for (const auto& [Bm, count] : before) {
    if (!launches_.count(Bm) || launches_[Bm] == 0) continue;
    // Of those that were measured before, only the leader may be looked at again.
    if (Bm != 32 && count > 1) ADD_FAILURE() << "measured again: " << Bm;
    ++unfinished;
  }
  EXPECT_GE(unfinished, 1);
  tune();
  EXPECT_TRUE(launches_.empty());
}

// The compiler would take ten minutes; neither the tuner nor the destructor of Compiler waits for it.
TEST_F(AutotuneTest, CanBeEndedWhileItWaitsForACompiler) {
  dir_.write_program(config_.toolchain.cxx.filename(), "#!/bin/sh\n[ \"$1\" = --version ] || exec sleep 600\n");
  int calls = 0;
  options_.poll = [&] {
    if (++calls == 3) throw Interrupted();
  };
  EXPECT_THROW(tune(), Interrupted);
}

TEST_F(AutotuneTest, ACandidateThatFailsIsRejectedWithItsReason) {
  plan_.candidates = {{13}, {16}, {32}, {128}};  // 13 does not compile; the default, 64, is tried as well
  broken_[32] = true;
  const AutotuneResult result = tune();
  EXPECT_EQ(chosen(result), 128);
  std::map<int, std::string> rejected;
  for (const Json& entry : Json::parse(read_file(result.stages[0].history)))
    if (entry.contains("rejected")) rejected[entry["tiling"]["Bm"].get<int>()] = entry["rejected"].get<std::string>();
  EXPECT_EQ(rejected.size(), 2u);
  EXPECT_TRUE(contains(rejected[13], "this tiling is refused")) << rejected[13];
  EXPECT_TRUE(contains(rejected[32], "reads out of bounds")) << rejected[32];
  EXPECT_TRUE(launches_.count(64));
  EXPECT_EQ(chosen(tune()), 128);
  EXPECT_FALSE(launches_.count(32));  // not tried again
}

// The compiler, with one more way to fail while the file "full" exists.
void fill_disk(const TempDir& dir, const fs::path& compiler) {
  dir.write("full", "");
  const std::string script = read_file(compiler);
  const std::size_t at = script.find("if grep");
  dir.write_program(compiler.filename(),
                    script.substr(0, at) + "if [ -e '" + (dir.path() / "full").string() +
                        "' ] && grep -q 'Bm = 32}' \"$source\"; then echo 'ld: final link failed: No space left on "
                        "device' >&2; exit 1; fi\n" +
                        script.substr(at));
}

TEST_F(AutotuneTest, AFailureThatPassesIsSaidAndNotRemembered) {
  fill_disk(dir_, config_.toolchain.cxx);
  const AutotuneResult result = tune();
  EXPECT_EQ(chosen(result), 128);
  EXPECT_EQ(result.stages[0].skipped.begin()->second, 1);
  ASSERT_EQ(remarks(result).size(), 1u);
  EXPECT_TRUE(contains(remarks(result)[0], "1 tiling of first could not be tried")) << remarks(result)[0];
  EXPECT_TRUE(contains(remarks(result)[0], "No space left on device")) << remarks(result)[0];
  EXPECT_FALSE(contains(read_file(result.stages[0].history), "rejected"));
  fs::remove(dir_.path() / "full");
  const AutotuneResult again = tune();
  EXPECT_EQ(chosen(again), 32);
  EXPECT_EQ(remarks(again), std::vector<std::string>{});
}

TEST_F(AutotuneTest, AVerdictHoldsForTheCompilerThatGaveIt) {
  plan_.candidates = {{13}, {64}};
  seconds_["first"][13] = 0.001;
  const std::string script = read_file(config_.toolchain.cxx);
  for (int run = 0; run < 2; ++run) {  // the second remembers
    const AutotuneResult result = tune();
    EXPECT_EQ(chosen(result), 64);
    ASSERT_EQ(remarks(result).size(), 1u);
    EXPECT_TRUE(contains(remarks(result)[0], "1 tiling of first rejected")) << remarks(result)[0];
    EXPECT_TRUE(contains(remarks(result)[0], "--retune")) << remarks(result)[0];
    const std::string better = script.substr(0, script.find("if grep")) + "cp \"$source\" \"$output\"\n";
    dir_.write_program(config_.toolchain.cxx.filename(), better);  // of the same version
  }
  std::string newer = read_file(config_.toolchain.cxx);
  newer.replace(newer.find("compiler 1.0"), 12, "compiler 1.1");
  dir_.write_program(config_.toolchain.cxx.filename(), newer);
  const AutotuneResult result = tune();
  EXPECT_EQ(chosen(result), 13);
  EXPECT_EQ(remarks(result), std::vector<std::string>{});
}

TEST_F(AutotuneTest, NoneLeftIsASentenceWithTheReason) {
  for (const int Bm : {16, 32, 64, 128}) broken_[Bm] = true;
  const std::string message = error_of([&] { tune(); });
  EXPECT_TRUE(contains(message, "no tiling of first works here")) << message;
  EXPECT_TRUE(contains(message, "reads out of bounds")) << message;
}

// A compiler's message names the tiling, so that one mistake has as many messages as there are tilings.
TEST_F(AutotuneTest, OneMistakeIsNotSaidToBeSeveral) {
  config_.toolchain.cxx = write_fake_compiler(dir_, "Bm = 1");  // 16 and 128
  ASSERT_EQ(remarks(tune()).size(), 1u);
  const std::string remark = remarks(tune())[0];
  EXPECT_TRUE(contains(remark, "2 tilings of first rejected")) << remark;
  EXPECT_TRUE(contains(remark, ", one of them because ")) << remark;
  EXPECT_TRUE(contains(remark, "this tiling is refused")) << remark;
  EXPECT_FALSE(contains(remark, "other")) << remark;
  plan_.candidates = {{16}, {64}};
  EXPECT_TRUE(contains(remarks(tune())[0], "forgets it), because ")) << remarks(tune())[0];
}

TEST_F(AutotuneTest, WithoutACompilerOnlyWhatIsCachedIsACandidate) {
  const auto plan = plan_.plan({});
  TiledKernel* kernel = plan->kernels()[0];
  {
    Compiler compiler(config_);
    for (const int Bm : {16, 128}) compiler.compile(kernel->source({{"Bm", Bm}}), "generic");
  }
  config_.toolchain = {};
  const AutotuneResult result = tune();
  EXPECT_EQ(chosen(result), 128);
  EXPECT_EQ(launches_.size(), 2u);

  fs::remove_all(config_.cache);
  const std::string message = error_of([&] { tune(); });
  EXPECT_TRUE(contains(message, "no tiling of first is in the cache for generic and no compiler was found")) << message;
}

TEST_F(AutotuneTest, StagesAreTunedInOrderOverTheWholeExecutable) {
  plan_.stages = {"first", "second"};
  std::vector<std::string> order;
  options_.progress = [&](const AutotuneOptions::Progress& at) {
    if (order.empty() || order.back() != at.kernel) order.push_back(at.kernel);
    EXPECT_EQ(at.planned, 4);
    if (at.measured > 0) {
      EXPECT_GE(at.best_seconds, 0.01 + 0.01);  // both stages are in every figure
    }
  };
  const AutotuneResult result = tune();
  EXPECT_EQ(order, (std::vector<std::string>{"first", "second"}));
  EXPECT_EQ(chosen(result, 0), 32);
  EXPECT_EQ(chosen(result, 1), 16);
  EXPECT_EQ(executable_->kernels()[0]->tiling()["Bm"], 32);
  EXPECT_EQ(executable_->kernels()[1]->tiling()["Bm"], 16);
  EXPECT_NE(result.stages[0].history, result.stages[1].history);
}

// What a user is shown: never more tilings than there are, and an end that is one.
TEST_F(AutotuneTest, ProgressCountsTilings) {
  plan_.candidates = {{13}, {16}, {32}, {128}};  // 13 does not compile; the default, 64, is tried as well
  std::vector<AutotuneOptions::Progress> told;
  options_.progress = [&](const AutotuneOptions::Progress& at) { told.push_back(at); };
  const AutotuneResult result = tune();
  ASSERT_GT(told.size(), 5u);
  for (const AutotuneOptions::Progress& at : told) {
    EXPECT_LE(at.measured + at.rejected, at.planned);
    EXPECT_EQ(at.planned, 5);
    EXPECT_EQ(at.doing == "done", &at == &told.back());
  }
  EXPECT_EQ(told.front().doing, "compiling");
  EXPECT_EQ(told.front().measured, 0);
  EXPECT_EQ(told.back().measured, 4);
  EXPECT_EQ(told.back().rejected, 1);
  ASSERT_EQ(result.stages[0].rejected.size(), 1u);
  EXPECT_EQ(result.stages[0].rejected.begin()->second, 1);
  EXPECT_TRUE(contains(result.stages[0].rejected.begin()->first, "does not compile"));

  told.clear();
  EXPECT_EQ(tune().stages[0].rejected.size(), 1u) << "it is remembered";
  EXPECT_TRUE(told.empty()) << "nothing was done";
}

TEST_F(AutotuneTest, ProgressOfALimitEndsAtTheLimit) {
  options_.tuner.max_iterations = 2;
  std::vector<AutotuneOptions::Progress> told;
  options_.progress = [&](const AutotuneOptions::Progress& at) { told.push_back(at); };
  tune();
  for (const AutotuneOptions::Progress& at : told) EXPECT_EQ(at.planned, 2);
  EXPECT_EQ(told.back().measured, 2);
}

TEST_F(AutotuneTest, ALimitStopsAtThePredictedBest) {
  plan_.slowdown = {{16, 3}, {32, 2}, {128, 1.5}};
  options_.tuner.max_iterations = 2;
  EXPECT_EQ(chosen(tune()), 128);
  EXPECT_EQ(launches_.size(), 2u);
  EXPECT_TRUE(launches_.count(64));
}

TEST_F(AutotuneTest, AHopelessPredictionIsNeverRun) {
  plan_.slowdown = {{32, 100}};
  EXPECT_EQ(chosen(tune()), 128);
  EXPECT_FALSE(launches_.count(32));
}

// Members are tuned one by one. What does not fit beside the present tilings of the others is not measured, and not
// held against it when they change.
TEST_F(AutotuneTest, LeavesOutWhatDoesNotFitBesideTheOthers) {
  plan_.stages = {"first", "second"};
  plan_.most_together = 150;
  seconds_["first"] = {{16, 0.040}, {32, 0.020}, {64, 0.030}, {128, 0.005}};
  const AutotuneResult together = tune();
  EXPECT_EQ(chosen(together, 0), 32) << "128 would be faster, but not beside 64";
  EXPECT_EQ(chosen(together, 1), 16);
  EXPECT_FALSE(contains(read_file(together.stages[0].history), "128"));
  plan_.tiling.Bm = 16;
  const AutotuneResult again = tune();
  EXPECT_EQ(chosen(again, 0), 128) << "beside 16 it fits";
  EXPECT_EQ(chosen(again, 1), 16);
}

}  // namespace
}  // namespace hypermla::autotune_test
