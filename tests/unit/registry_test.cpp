#include "hypermla/plan/registry.h"

#include <gtest/gtest.h>

#include <set>

#include "support.h"

namespace hypermla {
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

TEST(RegistryTest, SuggestsWhatIsNear) {
  const Registry registry = example();
  const std::string kernel = error_of([&] { registry.find("flash-mal"); });
  EXPECT_TRUE(contains(kernel, "unknown kernel 'flash-mal'; did you mean flash_mla?")) << kernel;
  const std::string version = error_of([&] { registry.find("cutile.mla.flash_mla", "v11"); });
  EXPECT_TRUE(contains(version, "no version 'v11'; did you mean v10? There are: v0, v2, v10")) << version;
  const std::string base = error_of([&] { registry.find("attention"); });
  EXPECT_TRUE(contains(base, "no version 'v0'")) << base;
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
        std::filesystem::exists(testing_support::checkout() / "kernels" / entry.directory / (entry.name() + ".cuh")));
    EXPECT_FALSE(entry.summary.empty()) << entry.full_name();
    EXPECT_NE(entry.make(), nullptr);
  }
  for (const char* kernel : {"flash_attention", "flash_mla", "flash_mla_split_kv", "output_decompression"})
    EXPECT_TRUE(names.count(std::string("cutile.mla.") + kernel)) << kernel;
}

}  // namespace
}  // namespace hypermla
