#include "hypermla/plan/choice.h"

#include <gtest/gtest.h>

#include <set>
#include <tuple>

#include "hypermla/plan/typed_plan.h"
#include "support.h"

namespace hypermla::choice_test {
namespace {
using testing_support::checkout;
using testing_support::contains;
using testing_support::error_of;

struct StubProblem {
  int b = 32;
  int s = 1;
  int t = 4096;
  int n = -1;
  int h = 128;
  int d = 128;
  int k = 512;
  DType dtype = DType::bfloat16;
  int prefixes = 0;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("b", self.b, "");
    field("s", self.s, "");
    field("t", self.t, "");
    field("n", self.n, "");
    field("h", self.h, "");
    field("d", self.d, "");
    field("k", self.k, "");
    field("dtype", self.dtype, "");
    field("prefixes", self.prefixes, "");
  }
};
struct StubTiling {
  int Bm = 0;

  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Bm", self.Bm, "");
  }
};

// A hybrid as far as the choice is concerned; it refuses what no model has settled.
class StubPlan : public TypedPlan<StubProblem, StubTiling> {
 public:
  void choose(const DeviceSpec& device) override {
    if (problem.n < 0) problem.n = choose_n(*this, device);
  }
  void use_default_tiling() override { tiling.Bm = problem.n > 0 ? 64 : 16; }
  void validate() const override {
    if (problem.n < 0 || problem.n > problem.t) fail("--n={} is not supported", problem.n);
  }
  // Each latent token costs 1, a decompressed one 1 / s; tokens of one kind only cost `end` in addition.
  TimeEstimate time(const Ceilings&) const override {
    const double one_kind = problem.n == 0 || problem.n == problem.t ? end : 0;
    return {problem.t - problem.n + double(problem.n) / problem.s + one_kind};
  }
  std::vector<TensorSpec> tensors() const override { return {}; }
  ReferenceShape reference_shape() const override { return {}; }
  ReferenceOutputs reference(std::int64_t, const InputReader&) const override { return {}; }
  std::unique_ptr<Executable> plan(const Tensors&) const override { return nullptr; }

  double end = 0;
};

// As the project has them, or drafts.
void add(Registry& registry, const std::string& kernel, bool draft = false) {
  const KernelEntry real = Registry::instance().find(kernel);
  registry.add("/kernels/" + real.directory + "/" + real.name() + ".cpp", real.summary, real.make, draft);
}
// Every design.
Registry example(bool cute_drafts = false) {
  Registry registry;
  for (const char* name : {"flash_mla", "flash_mla_split_kv", "flash_attention", "mla_var6_plus", "mla_var6_plus_v1",
                           "mla_var6_plus_v2", "output_decompression"})
    add(registry, std::string("cutile.mla.") + name);
  for (const char* name : {"flash_mla", "flash_mla_v1", "flash_attention", "mla_var6_plus", "mla_var6_plus_v5"})
    add(registry, std::string("cute.mla.") + name, cute_drafts);
  return registry;
}

const DeviceSpec& h200() {
  static const DeviceTable table = DeviceTable::load(checkout() / "conf/devices.json");
  return table.find("NVIDIA H200");
}
const PlannedDevice& on_h200() {
  static const PlannedDevice device{{"sm_90", 132}, h200()};
  return device;
}

std::string chosen(const ChoiceProblem& problem, const Registry& registry = example()) {
  const auto ranking = rank_kernels(registry, problem, on_h200());
  const RankedKernel& best = choice(ranking);
  return std::string(path_name(best.path)) + " " + best.entry.full_name();
}

TEST(Choice, IsTheFastestKernelThatWasMeasured) {
  EXPECT_EQ(chosen({.b = 32, .s = 1}), "latent cute.mla.flash_mla");
  EXPECT_EQ(chosen({.b = 32, .s = 1, .h = 16}), "latent cute.mla.flash_mla_v1");
  for (int b : {32, 128, 512}) {
    EXPECT_EQ(chosen({.b = b, .s = 1, .h = 32}), "latent cute.mla.flash_mla_v1") << b;
    EXPECT_EQ(chosen({.b = b, .s = 1, .h = 64}), "latent cute.mla.flash_mla") << b;
  }
  EXPECT_EQ(chosen({.b = 1, .s = 1}), "latent cute.mla.flash_mla_v1");
  EXPECT_EQ(chosen({.b = 1, .s = 1, .t = 131072}), "latent cute.mla.flash_mla");
  for (int s : {2, 4, 8, 16}) EXPECT_EQ(chosen({.b = 32, .s = s}), "latent cute.mla.flash_mla") << s;
  EXPECT_EQ(chosen({.b = 32, .s = 32}), "hybrid cute.mla.mla_var6_plus_v5");
  EXPECT_EQ(chosen({.b = 32, .s = 64}), "decompressed cutile.mla.flash_attention");
  EXPECT_EQ(chosen({.b = 32, .s = 128}), "decompressed cute.mla.flash_attention");
  EXPECT_EQ(chosen({.b = 4, .s = 4096, .causal = true}), "decompressed cute.mla.flash_attention");
}

TEST(Choice, NeverTakesADraftWhereThereIsAnother) {
  EXPECT_EQ(chosen({.b = 32, .s = 16}, example(true)), "latent cutile.mla.flash_mla");
  EXPECT_TRUE(rank_kernels(example(true), {.b = 32, .s = 16}, on_h200()).front().entry.draft);  // but shows it
  Registry drafts;
  add(drafts, "cute.mla.flash_mla", true);
  add(drafts, "cute.mla.output_decompression");
  EXPECT_EQ(chosen({}, drafts), "latent cute.mla.flash_mla");
}

TEST(Choice, LeavesOutWhatDoesNotRunThere) {
  for (const RankedKernel& one : rank_kernels(example(), {.b = 32, .s = 16}, {{"sm_120", 170}, h200()}))
    EXPECT_EQ(one.entry.language, "cutile") << one.entry.full_name();
  EXPECT_TRUE(
      contains(error_of([] { rank_kernels(example(), {.dtype = DType::float32}, on_h200()); }), "no kernel for sm_90"));
}

TEST(Choice, RanksFastestFirstAndNewestOfEqualOnes) {
  Registry registry = example();
  for (const char* name : {"mla_var6_plus_v8", "mla_var6_plus_v9"})  // without a path: as the base version
    registry.add(std::string("/kernels/cutile/mla/mla_var6_plus/") + name + "/" + name + ".cpp", "",
                 [] { return std::make_unique<StubPlan>(); });
  const auto ranking = rank_kernels(registry, {.b = 32, .s = 16}, on_h200());
  double before = 0;
  for (const RankedKernel& one : ranking) {
    EXPECT_GE(one.sustained.seconds, before);
    EXPECT_GE(one.sustained.seconds, one.burst.seconds * 0.999);
    before = one.sustained.seconds;
  }
  std::vector<std::string> hybrids;
  for (const RankedKernel& one : ranking)
    if (one.path == Path::hybrid && one.entry.language == "cutile") hybrids.push_back(one.entry.version);
  EXPECT_EQ(hybrids, (std::vector<std::string>{"v2", "v9", "v8", "v0", "v1"}));
}

TEST(Choice, SharedPrefixesGoThroughTheHybrid) {
  ChoiceProblem problem{.b = 32, .s = 4, .prefix = 8192, .own = 1024};
  const auto ranking = rank_kernels(example(), problem, on_h200());
  EXPECT_EQ(ranking.front().path, Path::shared_prefix);
  EXPECT_EQ(ranking.front().n, 8192);
  // Nothing is shared by requests that each have a prefix of their own, and few rows stay unshared.
  problem.prefixes = 32;
  EXPECT_EQ(rank_kernels(example(), problem, on_h200()).front().path, Path::latent);
}

TEST(Choice, MakesThePlansOfAPath) {
  ChoiceProblem problem{.b = 3, .s = 2, .prefix = 100, .own = 28};
  std::set<Path> paths;
  for (const RankedKernel& one : rank_kernels(example(), problem, on_h200())) {
    SCOPED_TRACE(one.entry.full_name());
    paths.insert(one.path);
    const auto plans = plans_of(example(), one, problem, on_h200());
    ASSERT_EQ(plans.size(), one.path == Path::latent ? 2 : 1);
    const Json first = to_json(plans[0]->problem_fields());
    EXPECT_EQ(first.at("t"), 128);
    EXPECT_EQ(first.value("n", one.n), one.n);
    EXPECT_EQ(first.value("prefixes", 0), one.path == Path::shared_prefix ? 1 : 0);
    EXPECT_EQ(plans[0]->target.processors, 132);
    if (plans.size() > 1) {
      EXPECT_EQ(to_json(plans[1]->problem_fields()).at("b"), 3);
    }
  }
  EXPECT_EQ(paths.size(), 4);
}

// As many decompressed tokens as a prefix has, or all where the prefix is all there is, are not yet shared.
TEST(Choice, OnlyTheSharedPathShares) {
  using Row = std::tuple<std::string, Path, int>;
  const auto rows = [](const ChoiceProblem& problem) {
    std::set<Row> rows;
    for (const RankedKernel& one : rank_kernels(example(), problem, on_h200())) {
      const auto plans = plans_of(example(), one, problem, on_h200());
      EXPECT_EQ(to_json(plans[0]->problem_fields()).value("prefixes", 0), one.path == Path::shared_prefix ? 1 : 0)
          << one.entry.full_name();
      if (one.path != Path::shared_prefix) rows.insert({one.entry.full_name(), one.path, one.n});
    }
    return rows;
  };
  ChoiceProblem problem{.b = 32, .s = 16};
  const std::set<Row> without = rows(problem);
  for (const auto& [kernel, path, n] : without) {
    if (n == 0) continue;
    problem.prefix = n;
    EXPECT_EQ(rows(problem), without) << kernel << " n=" << n;
  }
}

// A kernel that nothing is known of, nor of its base version, is not set against others.
TEST(Choice, LeavesOutWhatHasNoPath) {
  Registry registry = example();
  const std::size_t before = rank_kernels(registry, {}, on_h200()).size();
  registry.add("/kernels/cutile/mla/new_design/new_design/new_design.cpp", "",
               [] { return std::make_unique<StubPlan>(); });
  EXPECT_EQ(rank_kernels(registry, {}, on_h200()).size(), before);
}

TEST(Choice, RefusesWhatHasNoMeaning) {
  const struct {
    ChoiceProblem problem;
    const char* message;
  } cases[] = {{{.b = 0}, "--b=0"},
               {{.t = 0}, "--t=0"},
               {{.prefix = -1}, "--prefix=-1"},
               {{.t = 100, .prefix = 101}, "only --t=100"},
               {{.prefixes = 33}, "--prefixes=33"},
               {{.prefixes = 0}, "--prefixes=0"},
               {{.d = -3}, "--d=-3 is not supported: it must be at least 1"},
               {{.p = 0}, "--p=0 is not supported: it must be at least 1"},
               {{.k = 0}, "--k=0 is not supported: it must be at least 1"},
               {{.b = 2147483647}, "--b=2147483647 is not supported: it must be at most 65535"},
               {{.b = 2147483647, .s = 2147483647, .t = 2147483647}, "--b=2147483647"},
               {{.t = 2147483647}, "--t=2147483647"},
               {{.prefix = 2147483647, .own = 2147483647}, "--prefix=2147483647"}};
  for (const auto& [problem, message] : cases)
    EXPECT_TRUE(contains(error_of([&problem = problem] { rank_kernels(example(), problem, on_h200()); }), message))
        << message;
}

// What the user leaves open is settled for the device, before the tiling follows from it.
TEST(PlanHook, SettlesWhatIsLeftToTheModel) {
  StubPlan plan;
  EXPECT_TRUE(contains(error_of([&] { plan.validate(); }), "--n=-1"));
  plan.choose(h200());
  plan.use_default_tiling();
  plan.validate();
  EXPECT_EQ(plan.problem.n, 0);
  EXPECT_EQ(plan.tiling.Bm, 16);
  plan.problem.n = 17;  // what the user says stays
  plan.choose(h200());
  EXPECT_EQ(plan.problem.n, 17);
  plan.problem = {.s = 256};
  plan.choose(h200());
  EXPECT_EQ(plan.problem.n, 4096);
}

// An n between the ends must gain more than the model errs by; which one is best does not depend on that.
TEST(ChosenN, IsAnEndUnlessThereIsMuchToGain) {
  StubPlan plan;
  plan.problem.n = 17;
  plan.problem.s = 2;  // n = t takes t / 2, n = t - 64 takes 32 more
  for (const auto& [end, n] : {std::pair{0, 4096}, {120, 4096}, {150, 4032}}) {
    plan.end = end;
    EXPECT_EQ(best_interior_n(plan, h200()), 4032) << end;
    EXPECT_EQ(choose_n(plan, h200()), n) << end;
    EXPECT_EQ(plan.problem.n, 17);
  }
  plan.problem.t = 64;
  EXPECT_EQ(best_interior_n(plan, h200()), 0);
}

}  // namespace
}  // namespace hypermla::choice_test
