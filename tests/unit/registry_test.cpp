#include <gtest/gtest.h>

#include <set>

#include "hypermla/plan/configure.h"
#include "support.h"

namespace hypermla::registry_test {
namespace {
using testing_support::contains;
using testing_support::error_of;

std::unique_ptr<KernelPlan> no_plan() { return nullptr; }

Registry example() {
  Registry registry;
  for (const char* directory :
       {"cutile/mla/flash_mla/flash_mla_v10", "cutile/mla/flash_mla/flash_mla", "cute/mla/flash_mla/flash_mla",
        "cutile/mla/flash_mla/flash_mla_v2", "cutile/mla/attention/attention_v1"}) {
    const std::string name = std::filesystem::path(directory).filename().string();
    registry.add("/home/somebody/kernels/" + std::string(directory) + "/" + name + ".cpp", "about " + name, no_plan);
  }
  return registry;
}

TEST(RegistryTest, TakesTheNamesFromThePlace) {
  const KernelEntry base = example().find("cutile.mla.flash_mla");
  EXPECT_EQ(base.language, "cutile");
  EXPECT_EQ(base.layer, "mla");
  EXPECT_EQ(base.design, "flash_mla");
  EXPECT_EQ(base.version, "v0");
  EXPECT_EQ(base.directory, "cutile/mla/flash_mla/flash_mla");
  EXPECT_EQ(base.summary, "about flash_mla");
  EXPECT_EQ(base.name(), "flash_mla");
  EXPECT_EQ(base.full_name(), "cutile.mla.flash_mla");
  const KernelEntry tenth = example().find("cutile.mla.flash_mla", "v10");
  EXPECT_EQ(tenth.version, "v10");
  EXPECT_EQ(tenth.directory, "cutile/mla/flash_mla/flash_mla_v10");
  EXPECT_EQ(tenth.name(), "flash_mla_v10");
  EXPECT_EQ(tenth.full_name(), "cutile.mla.flash_mla_v10");
}

TEST(RegistryTest, SortsVersionsByTheirNumber) {
  std::vector<std::string> names;
  for (const KernelEntry& entry : example().all()) names.push_back(entry.full_name());
  EXPECT_EQ(names, (std::vector<std::string>{"cute.mla.flash_mla", "cutile.mla.attention_v1", "cutile.mla.flash_mla",
                                             "cutile.mla.flash_mla_v2", "cutile.mla.flash_mla_v10"}));
}

TEST(RegistryTest, FindsBySeveralSpellings) {
  const Registry registry = example();
  for (const char* kernel : {"flash_mla", "flash-mla", "cute.mla.flash-mla"})
    EXPECT_EQ(registry.find(kernel).directory, "cute/mla/flash_mla/flash_mla") << kernel;
  EXPECT_EQ(registry.find("flash-mla", "v0").directory, "cute/mla/flash_mla/flash_mla");
  EXPECT_EQ(registry.find("flash-mla", "v2").directory, "cutile/mla/flash_mla/flash_mla_v2");  // only there
  // What name() and full_name() say is found again.
  for (const KernelEntry& entry : registry.all()) {
    EXPECT_EQ(registry.find(entry.full_name()).directory, entry.directory);
    EXPECT_EQ(registry.find(entry.name()).name(), entry.name());
  }
}

TEST(RegistryTest, TakesTheFastestLanguageThatRunsOnTheTarget) {
  const Registry registry = example();
  EXPECT_EQ(registry.find("flash_mla", "", "sm_90").language, "cute");
  for (const char* arch : {"x86-64-v4", "sm_80", "sm_100", "sm_120"})
    EXPECT_EQ(registry.find("flash_mla", "", arch).language, "cutile") << arch;
  EXPECT_EQ(registry.find("flash_mla", "", "sm_90", "cutile").language, "cutile");
  EXPECT_EQ(registry.find("flash_mla", "v2", "sm_90").language, "cutile");
  const std::string elsewhere = error_of([&] { registry.find("flash_mla", "", "sm_80", "cute"); });
  EXPECT_TRUE(contains(elsewhere, "cute.mla.flash_mla is written for Hopper GPUs (sm_90) and this target is sm_80"))
      << elsewhere;
  EXPECT_TRUE(contains(elsewhere, "; take cutile.mla.flash_mla, which runs everywhere")) << elsewhere;
  EXPECT_EQ(error_of([&] { registry.find("cute.mla.flash_mla", "", "sm_80"); }), elsewhere);
  // What the hint names must exist.
  Registry more = example();
  more.add("/x/kernels/cute/mla/flash_mla/flash_mla_v1/flash_mla_v1.cpp", "", no_plan);
  more.add("/x/kernels/cute/mla/other/other/other.cpp", "", no_plan);
  const std::string another = error_of([&] { more.find("flash_mla", "v1", "sm_80"); });
  EXPECT_TRUE(contains(another, "this version exists for no other target, but cutile.mla.flash_mla")) << another;
  EXPECT_FALSE(contains(another, "; take ")) << another;
  EXPECT_TRUE(contains(error_of([&] { more.find("other", "", "sm_80"); }), "it exists for no other target"));
  const std::string nowhere = error_of([&] { registry.find("attention", "v1", "sm_90", "cute"); });
  EXPECT_TRUE(contains(nowhere, "no kernel 'attention' in the language 'cute'")) << nowhere;
  const std::string version = error_of([&] { registry.find("flash_mla", "v2", "sm_90", "cute"); });
  EXPECT_TRUE(contains(version, "no version 'v2' in cute")) << version;
  const std::string versions = error_of([&] { registry.find("flash_mla", "v7"); });
  EXPECT_TRUE(contains(versions, "There are: cute v0, cutile v0, cutile v2, cutile v10")) << versions;
}

// A plan that is fast where problems are long, and takes none of less than two queries.
class FastFrom : public KernelPlan {
 public:
  explicit FastFrom(int least) : least_(least) {}
  std::vector<FieldRef> problem_fields() override { return {{"s", "", &s_}}; }
  std::vector<FieldRef> tiling_fields() override { return {}; }
  void use_default_tiling() override {}
  void validate() const override {
    if (s_ < 2 && least_ > 16) fail("s={} is too few", s_);
  }
  TimeEstimate time(const Ceilings&) const override { return {.seconds = s_ >= least_ ? 1.0 : 2.0 + least_}; }
  DType dtype() const override { return DType::bfloat16; }
  std::vector<TensorSpec> tensors() const override { return {}; }
  ReferenceShape reference_shape() const override { return {}; }
  ReferenceOutputs reference(std::int64_t, const InputReader&) const override { return {}; }
  std::unique_ptr<Executable> plan(const Tensors&) const override { return nullptr; }

 private:
  int least_, s_ = 1;
};

TEST(RegistryTest, DraftsNeverTakeThePlaceOfARecordedKernel) {
  Registry registry;
  registry.add("/x/kernels/cutile/mla/attention/attention/attention.cpp", "", no_plan);
  registry.add("/x/kernels/cute/mla/attention/attention/attention.cpp", "", no_plan, true);
  registry.add("/x/kernels/cute/mla/attention/attention_v1/attention_v1.cpp", "", no_plan, true);
  EXPECT_EQ(registry.find("attention").language, "cutile");
  EXPECT_EQ(registry.find_all("attention").size(), 1u);
  // What a command reads about them is another matter: a profile of a draft is one of its design.
  EXPECT_EQ(registry.named("attention").size(), 3u);
  EXPECT_EQ(registry.named("attention", "", "cutile").size(), 1u);
  EXPECT_EQ(registry.named("attention", "v1").size(), 1u);
  EXPECT_EQ(registry.find("attention", "", "sm_90", "cute").language, "cute");
  EXPECT_EQ(registry.find("cute.mla.attention").language, "cute");
  EXPECT_EQ(registry.find("attention", "v1").language, "cute");  // there is no other
  EXPECT_TRUE(registry.find("attention", "v1").draft);
  EXPECT_EQ(registry.all().size(), 3u);
}

TEST(RegistryTest, TheProblemDecidesBetweenVersionsAndLanguages) {
  Registry registry;
  for (const auto& [version, least] : {std::pair{"cutile/mla/attention/attention/attention", 16},
                                       {"cute/mla/attention/attention/attention", 128},
                                       {"cute/mla/attention/attention_v1/attention_v1", 32}})
    registry.add("/x/kernels/" + std::string(version) + ".cpp", "",
                 [least = least] { return std::make_unique<FastFrom>(least); });
  DeviceSpec known;
  known.name = "a GPU", known.arch = "sm_90", known.bfloat16_tflops = 100, known.peak_gbps = 1000;
  auto taken = [&](int s, const std::string& arch, const std::string& language = "", const DeviceSpec* spec = nullptr,
                   const std::string& version = "") {
    const ConfiguredPlan chosen = configure(registry.find_all("attention", version, arch, language),
                                            {{arch, 1}, spec ? *spec : DeviceSpec{}}, {.problem = {{"s", s}}});
    EXPECT_EQ(chosen.plan->target.arch, arch);
    return chosen.entry.full_name();
  };
  EXPECT_EQ(taken(128, "sm_90", "", &known), "cute.mla.attention");  // as fast as the others: the first
  EXPECT_EQ(taken(64, "sm_90", "", &known), "cute.mla.attention_v1");
  EXPECT_EQ(taken(16, "sm_90", "", &known), "cutile.mla.attention");
  EXPECT_EQ(taken(16, "sm_90", "cute", &known), "cute.mla.attention_v1");
  EXPECT_EQ(taken(16, "sm_90", "", &known, "v1"), "cute.mla.attention_v1");
  EXPECT_EQ(taken(1, "sm_90", "", &known), "cutile.mla.attention");  // the others refuse it
  EXPECT_EQ(error_of([&] { taken(1, "sm_90", "cute", &known); }), "s=1 is too few");
  EXPECT_EQ(taken(16, "sm_90"), "cute.mla.attention");  // a device of unknown speed: the first
  EXPECT_EQ(taken(128, "sm_80"), "cutile.mla.attention");
}

TEST(RegistryTest, SuggestsWhatIsNear) {
  const Registry registry = example();
  const std::string kernel = error_of([&] { registry.find("flash-mal"); });
  EXPECT_TRUE(contains(kernel, "unknown kernel 'flash-mal'; did you mean flash_mla?")) << kernel;
  const std::string version = error_of([&] { registry.find("cutile.mla.flash_mla", "v11"); });
  EXPECT_TRUE(contains(version, "no version 'v11'; did you mean v10? There are: v0, v2, v10")) << version;
  const std::string base = error_of([&] { registry.find("attention", "v0"); });
  EXPECT_TRUE(contains(base, "no version 'v0'")) << base;
  EXPECT_EQ(registry.find("attention").version, "v1");  // the only one
  EXPECT_TRUE(contains(error_of([] { Registry().find("x"); }), "unknown kernel 'x'"));
}

TEST(RegistryTest, RefusesDirectoriesThatBreakTheRule) {
  Registry registry;
  for (const char* file : {"a.cpp", "kernels/cutile/mla/a/a.cpp", "/x/kernel/cutile/mla/a/a/a.cpp",
                           "/x/kernels/cutile/mla/a/b/b.cpp", "/x/kernels/cutile/mla/a/a_v/a_v.cpp",
                           "/x/kernels/cutile/mla/a/a_2/a_2.cpp", "/x/kernels/cutile/mla/a/a_vx/a_vx.cpp",
                           "/x/kernels/cutile/mla/a/a_v2b/a.cpp", "/x/kernels/cutile/mla/a/ab_v2/a.cpp",
                           "/x/kernels/cutile/mla/a/a_v0/a.cpp",  // the base version has no suffix
                           "/x/kernels/cutile/mla/a/a_v02/a.cpp", "/x/kernels/cutile/mla/a/a_v99999999999/a.cpp"}) {
    EXPECT_THROW(registry.add(file, "", no_plan), Error) << file;
  }
  EXPECT_TRUE(registry.all().empty());
}

TEST(RegistryTest, ThisBuildsKernelsAreThereAndDistinct) {
  std::set<std::string> names;
  for (const KernelEntry& entry : Registry::instance().all()) {
    EXPECT_TRUE(names.insert(entry.full_name()).second) << entry.full_name();
    EXPECT_TRUE(
        std::filesystem::exists(testing_support::checkout() / "kernels" / entry.directory / (entry.name() + ".cpp")));
    EXPECT_FALSE(entry.summary.empty()) << entry.full_name();
    EXPECT_NE(entry.make(), nullptr);
  }
  for (const char* kernel : {"flash_attention", "flash_mla", "flash_mla_split_kv", "output_decompression"})
    EXPECT_TRUE(names.count(std::string("cutile.mla.") + kernel)) << kernel;
  EXPECT_TRUE(names.count("cute.mla.flash_mla"));
}

}  // namespace
}  // namespace hypermla::registry_test
