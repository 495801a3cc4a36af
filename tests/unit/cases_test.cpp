// What holds for every registered kernel.
#include "hypermla/plan/cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "cutile/mla/flash_mla/flash_mla/flash_mla.h"
#include "hypermla/plan/configure.h"
#include "hypermla/plan/inputs.h"
#include "hypermla/plan/registry.h"
#include "hypermla/plan/typed_plan.h"
#include "support.h"

namespace hypermla::cases_test {
namespace {
using testing_support::contains;

std::vector<std::string> full_names() {
  std::vector<std::string> names;
  for (const KernelEntry& entry : Registry::instance().all())
    if (!entry.make()->only_decodes()) names.push_back(entry.full_name());
  return names;
}

constexpr const char* kShared = "attend_both_paths";

bool has_field(KernelPlan& plan, std::string_view name) {
  const std::vector<FieldRef> fields = plan.problem_fields();
  return std::any_of(fields.begin(), fields.end(), [&](const FieldRef& field) { return field.name == name; });
}

class EveryKernel : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    for (const KernelEntry& entry : Registry::instance().all())
      if (entry.full_name() == GetParam()) {
        plan_ = entry.make();
        name_ = entry.name();
      }
    ASSERT_NE(plan_, nullptr);
  }
  std::vector<Json> problems() {
    std::vector<Json> all = correctness_cases(*plan_);
    for (Json& one : representative_problems(*plan_)) all.push_back(std::move(one));
    return all;
  }
  // The values that a field takes over the correctness cases.
  template <class T>
  std::set<T> values(const char* field) {
    std::set<T> found;
    for (const Json& one : correctness_cases(*plan_)) found.insert(one.at(field).get<T>());
    return found;
  }
  // Sets the plan's own tiling fields. A later stage's carry the rest of that stage's name in front: reduce_Bm.
  // A kernel that is several versions has fields of theirs. Other kernels that several plans share, and stages from the
  // registry, have none of a plan's fields.
  void set_tiling(const std::string& kernel, const Json& tiling) {
    if (kernel == kShared) {
      for (FieldRef& field : plan_->tiling_fields())
        if (const std::string field_name(field.name); tiling.contains(field_name)) field.set(tiling.at(field_name));
      return;
    }
    if (kernel.rfind(name_, 0) != 0) return;
    const std::string prefix = kernel == name_ ? "" : kernel.substr(name_.size() + 1) + "_";
    Json prefixed = Json::object();
    for (const auto& [name, value] : tiling.items()) prefixed[prefix + name] = value;
    from_json(plan_->tiling_fields(), prefixed);
  }

  std::unique_ptr<KernelPlan> plan_;
  std::string name_;
};
INSTANTIATE_TEST_SUITE_P(Registered, EveryKernel, testing::ValuesIn(full_names()), [](const auto& which) {
  std::string name = which.param;
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
});

TEST_P(EveryKernel, ItsCasesCoverTheEdges) {
  if (has_field(*plan_, "s")) {
    for (const int s : {1, 2, 3, 16, 17, 32, 33, 64, 65, 128, 129}) EXPECT_TRUE(values<int>("s").count(s)) << s;
  }
  for (const int h : {1, 2, 3, 5, 16, 128}) EXPECT_TRUE(values<int>("h").count(h)) << h;
  EXPECT_TRUE(values<int>("b").count(1) && values<int>("b").count(3));
  EXPECT_EQ(values<std::string>("dtype"), (std::set<std::string>{"bfloat16", "float16"}));
  if (has_field(*plan_, "causal")) {
    EXPECT_EQ(values<bool>("causal"), (std::set<bool>{false, true}));
  }
  if (has_field(*plan_, "t")) {
    const std::set<int> t = values<int>("t");
    EXPECT_TRUE(t.count(1) && t.count(63) && t.count(64) && t.count(65));
    EXPECT_TRUE(std::any_of(t.begin(), t.end(), [](int value) { return value > 512 && value % 16 != 0; }));
    bool more_queries_than_tokens = !has_field(*plan_, "s");
    for (const Json& one : correctness_cases(*plan_)) more_queries_than_tokens |= one.value("s", 0) > one["t"];
    EXPECT_TRUE(more_queries_than_tokens);  // causal rows that see nothing
  }
  const std::vector<Json> cases = correctness_cases(*plan_);
  for (std::size_t i = 0; i < cases.size(); ++i)
    EXPECT_EQ(std::count(cases.begin(), cases.end(), cases[i]), 1) << cases[i].dump();
}

TEST(Cases, TheLatentKernelForHopperHasItsVariants) {
  const std::unique_ptr<KernelPlan> plan = Registry::instance().find("cute.mla.flash_mla").make();
  std::set<int> pages;
  int ragged = 0, fused = 0, base2 = 0, split = 0;
  for (const Json& one : correctness_cases(*plan)) {
    pages.insert(one["page"].get<int>());
    ragged += one["ragged"].get<bool>();
    fused += one["fused"].get<bool>();
    base2 += one["lse_base2"].get<bool>();
    split += one["split"] != 0;
  }
  EXPECT_EQ(pages, (std::set<int>{0, 1, 16, 32, 64, 128}));
  EXPECT_GE(std::min({ragged, fused, base2, split}), 5);
}

// Two row tiles of a request read the same tokens, so their thread blocks lie side by side; of an odd number of
// processors one would lie alone.
TEST(Cases, TwoRowTilesOfARequestAreACluster) {
  const auto cluster_of = [](int rows, int processors) {
    const std::unique_ptr<KernelPlan> plan = Registry::instance().find("cute.mla.flash_mla").make();
    plan->target.processors = processors;
    Json problem = to_json(plan->problem_fields());
    problem.update({{"b", 8}, {"s", 1}, {"t", 4096}, {"h", rows}, {"ragged", true}});
    set_problem(*plan, problem);
    plan->use_default_tiling();
    const std::unique_ptr<Executable> run = plan->plan(empty_tensors(*plan));
    for (const TiledKernel* kernel : run->kernels())
      if (kernel->name() == "flash_mla") return kernel->shape().cluster;
    return 0u;
  };
  EXPECT_EQ(cluster_of(64, 132), 1);
  EXPECT_EQ(cluster_of(65, 132), 2);
  EXPECT_EQ(cluster_of(128, 132), 2);
  EXPECT_EQ(cluster_of(128, 131), 1);
  EXPECT_EQ(cluster_of(129, 132), 1);
}

// A kernel that writes o = 0 and lse = -inf must fail every case: rows are empty in places, never most of them.
TEST(Cases, NoMergeIsOfEmptyRowsOnly) {
  for (const KernelEntry& entry : Registry::instance().all()) {
    if (entry.design != "decompress_combine") continue;
    const std::unique_ptr<KernelPlan> plan = entry.make();
    std::vector<Json> problems = correctness_cases(*plan);
    for (Json one = problems.front(); one["s"] != 140; one["s"] = one["s"].get<int>() + 1) problems.push_back(one);
    for (const Json& one : problems) {
      set_problem(*plan, one);
      SCOPED_TRACE(one.dump());
      const std::int64_t rows = one["b"].get<std::int64_t>() * one["h"].get<int>() * one["s"].get<int>();
      const int parts = one["latent_parts"].get<int>() + one["decompressed_parts"].get<int>();
      std::map<std::int64_t, std::set<std::pair<std::string, std::int64_t>>> empty;  // parts of a row
      for (const auto& [lse, ranges] : plan->input_rules(1).minus_infinity)
        for (const auto& [first, count] : ranges) empty[first % rows].insert({lse, first / rows});
      const auto nothing =
          std::count_if(empty.begin(), empty.end(), [&](const auto& row) { return int(row.second.size()) == parts; });
      EXPECT_LE(2 * nothing, rows);
      EXPECT_EQ(nothing > 0, rows > 1);
    }
  }
}

// So that one command means one problem, in every version and language.
TEST(Forms, VersionsAndLanguagesShareTheirDefaults) {
  std::map<std::string, Json> of_design;
  for (const KernelEntry& entry : Registry::instance().all()) {
    Json& known = of_design[entry.layer + "." + entry.design];
    const Json defaults = to_json(entry.make()->problem_fields());
    for (const auto& [name, value] : defaults.items()) {
      if (!known.contains(name)) known[name] = value;
      EXPECT_EQ(known[name], value) << entry.full_name() << " --" << name;
    }
  }
}

TEST(Forms, NoMorePrefixesThanRequestsAndNoNegativeNWithoutAMeaning) {
  int with_prefixes = 0, with_n = 0;
  for (const KernelEntry& entry : Registry::instance().all()) {
    const Json defaults = to_json(entry.make()->problem_fields());
    auto refusal = [&](const Json& fields) -> std::string {
      try {
        configure({entry}, {{}, {}}, {.offered = fields});
      } catch (const Error& error) {
        return error.what();
      }
      return "";
    };
    if (defaults.contains("prefixes") && refusal({{"b", 3}, {"prefixes", 3}, {"n", 10}}).empty()) {
      ++with_prefixes;
      const std::string why = refusal({{"b", 2}, {"prefixes", 3}, {"n", 10}});
      EXPECT_EQ(why, "--prefixes=3 is not supported: it must be 0 (none shared), or from 1 to the 2 requests")
          << entry.full_name();
    }
    if (defaults.contains("n")) {
      ++with_n;
      EXPECT_EQ(refusal({{"n", -3}}).rfind("--n=-3 is not supported", 0), 0u) << entry.full_name();
    }
  }
  EXPECT_GE(with_prefixes, 6);
  EXPECT_GE(with_n, 7);
}

TEST_P(EveryKernel, SupportsItsCasesWithEveryCandidate) {
  for (const Json& problem : problems()) {
    SCOPED_TRACE(problem.dump());
    set_problem(*plan_, problem);
    ASSERT_NO_THROW(plan_->validate());
    const Json defaults = to_json(plan_->tiling_fields());
    const std::unique_ptr<Executable> executable = plan_empty(*plan_);
    ASSERT_FALSE(executable->kernels().empty());
    for (TiledKernel* kernel : executable->kernels()) {
      const std::vector<Json>& candidates = kernel->candidates();
      EXPECT_NE(std::find(candidates.begin(), candidates.end(), kernel->tiling()), candidates.end())
          << kernel->name() << " lacks its default " << kernel->tiling().dump();
      for (const Json& candidate : candidates) {
        set_tiling(kernel->name(), candidate);
        EXPECT_NO_THROW(plan_->validate()) << kernel->name() << candidate.dump();
        kernel->set_tiling(candidate);
        const Grid grid = kernel->grid();
        const bool its_own =
            kernel->name() == kShared || kernel->name() == GetParam().substr(GetParam().rfind('.') + 1);
        EXPECT_GE(grid.blocks(), its_own ? 1 : 0) << candidate.dump();
        EXPECT_LE(grid.y, 65535u);  // CUDA's limits
        EXPECT_LE(grid.z, 65535u);
        from_json(plan_->tiling_fields(), defaults);
      }
    }
  }
}

// One workspace serves every candidate: the tuner runs them all over the same tensors.
TEST_P(EveryKernel, ItsTensorsDoNotDependOnTheCandidate) {
  for (const Json& problem : problems()) {
    set_problem(*plan_, problem);
    const Tensors before = empty_tensors(*plan_);
    const std::unique_ptr<Executable> executable = plan_empty(*plan_);
    TiledKernel* first = executable->kernels().front();
    for (const Json& candidate : first->candidates()) {
      set_tiling(first->name(), candidate);
      for (const auto& [name, tensor] : empty_tensors(*plan_)) EXPECT_EQ(tensor.shape, before.at(name).shape) << name;
    }
  }
}

TEST_P(EveryKernel, RefusesTilesThatAreNone) {
  const Json defaults = to_json(plan_->tiling_fields()), problem = to_json(plan_->problem_fields());
  for (const bool ragged : {false, true}) {  // where tiles are counted for the planner
    if (ragged && !problem.contains("ragged")) continue;
    if (ragged) from_json(plan_->problem_fields(), {{"ragged", true}});
    for (const auto& [name, value] : defaults.items()) {
      for (const int wrong : {0, -1}) {
        if (value.is_boolean() || value == wrong) continue;  // 0 may say that the plan chooses
        from_json(plan_->tiling_fields(), {{name, wrong}});
        EXPECT_THROW(plan_->validate(), Error) << "--" << name << "=" << wrong;
      }
      from_json(plan_->tiling_fields(), defaults);
    }
    EXPECT_NO_THROW(plan_->validate());
  }
}

// The versions that only MlaDecode calls, which commands take with these flags.
TEST(Registered, VersionsOfMlaDecodeRefuseTilesThatAreNone) {
  int found = 0;
  for (const KernelEntry& entry : Registry::instance().all()) {
    const std::unique_ptr<KernelPlan> plan = entry.make();
    if (!plan->only_decodes() || !to_json(plan->tiling_fields()).contains("rows")) continue;
    // Lists over a cache in FP8, or what is left: queries in FP8, too.
    from_json(plan->problem_fields(), {{"fp8", 656}, {"page", 1}, {"pages", 4096}, {"ragged", true}});
    try {
      plan->validate();
    } catch (const Error&) {
      from_json(plan->problem_fields(), {{"fp8", 576}, {"page", 64}, {"fp8_queries", true}});
    }
    EXPECT_NO_THROW(plan->validate()) << entry.full_name();
    for (const int wrong : {0, -1, 7, 48}) {  // 48 holds not all rows
      from_json(plan->tiling_fields(), {{"rows", wrong}});
      EXPECT_THROW(plan->validate(), Error) << entry.full_name() << " --rows=" << wrong;
    }
    ++found;
  }
  EXPECT_GE(found, 1);
}

TEST_P(EveryKernel, RefusesProblemsThatAreNone) {
  const Json defaults = to_json(plan_->problem_fields());
  for (const auto& [name, value] : defaults.items()) {
    if (!value.is_number()) continue;
    for (const int wrong : {0, -1}) {
      if (wrong == 0 && value == 0) continue;                                 // an option that is off
      if (name == "n" || (wrong == 0 && name.ends_with("_parts"))) continue;  // none is fine; the plan chooses n for -1
      set_problem(*plan_, defaults);
      from_json(plan_->problem_fields(), {{name, wrong}});
      EXPECT_THROW(plan_->validate(), Error) << "--" << name << "=" << wrong;
    }
  }
  set_problem(*plan_, defaults);
  set_problem(*plan_, {{"dtype", "float32"}});
  EXPECT_THROW(plan_->validate(), Error);
}

// The default tiling comes first, and must survive what validate() then refuses: a crash fails this test.
TEST_P(EveryKernel, MakesADefaultTilingForProblemsThatAreNone) {
  const Json defaults = to_json(plan_->problem_fields());
  Json shared = defaults;
  if (defaults.contains("n")) shared.update({{"n", 100}, {"prefixes", 1}});
  for (const Json& start : {defaults, shared})
    for (const char* name : {"b", "s", "t", "h", "d", "p", "k"})
      for (const int wrong : {0, -1, -1000}) {
        if (!start.contains(name)) continue;
        Json one = start;
        one[name] = wrong;
        set_problem(*plan_, one);
        EXPECT_THROW(plan_->validate(), Error) << "--" << name << "=" << wrong;
      }
}

TEST_P(EveryKernel, ItsTensorsAndItsReferenceFitTogether) {
  for (const Json& problem : problems()) {
    SCOPED_TRACE(problem.dump());
    set_problem(*plan_, problem);
    const ReferenceShape shape = plan_->reference_shape();
    EXPECT_GE(shape.groups, 1);
    EXPECT_GT(shape.flops_per_group, 0);
    int outputs = 0;
    std::set<std::string> names;
    for (const TensorSpec& spec : plan_->tensors()) {
      EXPECT_TRUE(names.insert(spec.name).second) << spec.name;
      EXPECT_FALSE(spec.shape.empty()) << spec.name;
      for (const std::int64_t extent : spec.shape) EXPECT_GE(extent, 1) << spec.name;
      if (spec.role != Role::output) continue;
      ++outputs;
      EXPECT_EQ(Tensor({nullptr, spec.dtype, spec.shape}).elements() % shape.groups, 0) << spec.name;
    }
    EXPECT_GE(outputs, 1);
  }
}

// Runs the reference where it is cheap: it makes every output, of the right size, and of numbers.
TEST_P(EveryKernel, ItsReferenceMakesEveryOutput) {
  int ran = 0;
  for (const Json& problem : correctness_cases(*plan_)) {
    set_problem(*plan_, problem);
    const ReferenceShape shape = plan_->reference_shape();
    if (shape.flops_per_group > 3e6) continue;
    ++ran;
    SCOPED_TRACE(problem.dump());
    const AllocatedTensors tensors(*plan_, std::make_shared<testing_support::FakeDevice>(), 1);
    const ReferenceOutputs outputs = plan_->reference(shape.groups - 1, tensors.reader());
    for (const TensorSpec& spec : plan_->tensors()) {
      if (spec.role != Role::output) continue;
      ASSERT_TRUE(outputs.count(spec.name)) << spec.name;
      EXPECT_EQ(std::int64_t(outputs.at(spec.name).size()) * shape.groups, tensors.tensors().at(spec.name).elements());
      for (const double value : outputs.at(spec.name)) EXPECT_FALSE(std::isnan(value)) << spec.name;
    }
  }
  EXPECT_GE(ran, 1);
}

TEST_P(EveryKernel, IsPredictedOnEveryKnownDevice) {
  const DeviceTable devices = DeviceTable::load(testing_support::checkout() / "conf/devices.json");
  ASSERT_GE(devices.names().size(), 3u);
  for (const std::string& name : devices.names()) {
    const DeviceSpec& spec = devices.find(name);
    for (const Json& problem : problems()) {
      SCOPED_TRACE(name + " " + problem.dump());
      set_problem(*plan_, problem);
      const std::unique_ptr<Executable> executable = plan_empty(*plan_);
      const Cost cost = executable->cost();
      EXPECT_GT(cost.flops, 0);
      EXPECT_GT(cost.bytes, 0);
      const Prediction prediction = executable->predict(spec, plan_->dtype());
      EXPECT_TRUE(std::isfinite(prediction.seconds) && prediction.seconds > 0);
      // Not below the roofline of the whole.
      EXPECT_GE(prediction.seconds * 1.000001, predict(cost, spec, plan_->dtype()).seconds);
      for (TiledKernel* kernel : executable->kernels())
        for (const Json& candidate : kernel->candidates()) {
          // What a tiling executes is never less than the algorithm.
          const double seconds = kernel->predict_seconds(candidate, spec, plan_->dtype());
          if (seconds == 0) continue;  // with this tiling there is nothing to do
          EXPECT_GE(seconds * 1.000001, kernel->predict(spec, plan_->dtype()).seconds) << candidate.dump();
        }
    }
  }
}

// Compulsory traffic: no kernel can move less than its inputs and outputs.
TEST_P(EveryKernel, ItsCostCountsEveryTensorOnce) {
  for (const Json& problem : problems()) {
    set_problem(*plan_, problem);
    if (problem.value("ragged", false) || problem.value("page", 0)) continue;  // caches are longer than what is read
    double bytes = 0;
    for (const TensorSpec& spec : plan_->tensors())
      if (spec.role != Role::workspace) bytes += double(Tensor({nullptr, spec.dtype, spec.shape}).bytes());
    EXPECT_GE(plan_empty(*plan_)->cost().bytes * 1.000001, bytes) << problem.dump();
  }
}

TEST_P(EveryKernel, ItsInstanceNamesEveryField) {
  const std::unique_ptr<Executable> executable = plan_empty(*plan_);
  for (TiledKernel* kernel : executable->kernels()) {
    const KernelSource source = kernel->source(kernel->tiling());
    EXPECT_TRUE(source.instance.rfind("hypermla::" + kernel->name() + "<", 0) == 0 ||
                source.instance.rfind("hypermla::cute::" + kernel->name() + "<", 0) == 0)
        << source.instance;
    for (const auto& [name, value] : kernel->tiling().items()) {
      const std::string field = "." + name + " = ";
      EXPECT_TRUE(contains(source.instance, field + value.dump()) ||
                  contains(source.instance, field + "0"))  // at run time
          << name << " in " << source.instance;
    }
    for (const char* at_run_time : {"b", "s", "h"}) {
      const std::string field = "." + std::string(at_run_time) + " = ";
      EXPECT_EQ(contains(source.instance, field), contains(source.instance, field + "0")) << source.instance;
    }
    EXPECT_TRUE(std::filesystem::exists(testing_support::checkout() / "kernels" / source.header)) << source.header;
  }
}

// The representative problems differ in what is known at run time alone, so one compilation serves all that tile alike.
TEST_P(EveryKernel, ItsSourceDependsOnTheTilingAndNotOnRunTimeExtents) {
  const char* rows = has_field(*plan_, "s") ? "s" : "t";
  Json first = {{"b", 3}, {rows, 20}, {"h", 7}}, second = {{"b", 64}, {rows, 1}, {"h", 128}};
  if (has_field(*plan_, "n")) first["n"] = second["n"] = 64;  // of a hybrid: both kinds of tokens in both
  set_problem(*plan_, first);
  const auto one = plan_empty(*plan_);
  const std::vector<TiledKernel*> kernels = one->kernels();
  set_problem(*plan_, second);
  const auto other = plan_empty(*plan_);
  for (std::size_t i = 0; i < std::min(kernels.size(), other->kernels().size()); ++i) {
    if (other->kernels()[i]->header() != kernels[i]->header()) continue;  // a stage that suits the other problem better
    const Json tiling = kernels[i]->tiling();
    EXPECT_EQ(other->kernels()[i]->source(tiling).instance, kernels[i]->source(tiling).instance);
  }
}

TEST_P(EveryKernel, ItsKeyNamesEveryProblemApart) {
  std::set<std::string> keys;
  for (const Json& problem : problems()) {
    set_problem(*plan_, problem);
    keys.insert(problem_key(*plan_));
  }
  EXPECT_EQ(keys.size(), problems().size());
}

// A plan of one kernel, whose launch a test changes.
struct Launches {
  unsigned rows = 16;
  int clusters = 1, arguments = 1;
  std::vector<FlashMlaTiling> candidates = {{.Bm = 64}, {.Bm = 32}};
  std::vector<Figures> figures = {};
};
class LaunchingPlan : public TypedPlan<LatentProblem, FlashMlaTiling> {
 public:
  explicit LaunchingPlan(Launches launches) : launches_(std::move(launches)) {}
  void use_default_tiling() override { tiling = {}; }
  void validate() const override {}
  std::vector<TensorSpec> tensors() const override { return {}; }
  ReferenceShape reference_shape() const override { return {}; }
  ReferenceOutputs reference(std::int64_t, const InputReader&) const override { return {}; }
  std::vector<Figures> figures() const override { return launches_.figures; }
  std::unique_ptr<Executable> plan(const Tensors&) const override {
    CuteKernelSpec<LatentProblem, FlashMlaTiling> spec;
    spec.name = "launching";
    spec.tiling = tiling;
    spec.candidates = launches_.candidates;
    spec.launch = [launches = launches_, s = problem.s](const FlashMlaTiling&) {
      KernelLaunch launch{
          .grid = {ceil_div(s, int(launches.rows)), 1, 1}, .shape = {}, .constants = {}, .arguments = {}};
      launch.shape.cluster = unsigned(launches.clusters);
      launch.arguments = [more = launches.arguments > 1, s](void*) { return more ? Arguments(s, s) : Arguments(s); };
      return launch;
    };
    return std::make_unique<CuteKernel>(std::move(spec));
  }

 private:
  Launches launches_;
};

// What a record of `verify` holds of a plan: how it launches its kernels, and not how fast it says that they are.
TEST(Launches, AreNotThoseOfAnotherPlan) {
  const auto launches = [](const Launches& of) {
    KernelEntry entry;
    entry.make = [&] { return std::make_unique<LaunchingPlan>(of); };
    return verification_launches(entry);
  };
  const std::string honest = launches({});
  EXPECT_EQ(launches({}), honest);
  EXPECT_EQ(launches({.figures = {{.rows = 64, .burst = 1.5}}}), honest);
  for (const Launches& other :
       {Launches{.rows = 8}, Launches{.clusters = 2}, Launches{.arguments = 2}, Launches{.candidates = {{.Bm = 64}}}})
    EXPECT_NE(launches(other), honest);
}

}  // namespace
}  // namespace hypermla::cases_test
