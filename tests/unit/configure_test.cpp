#include "hypermla/plan/configure.h"

#include <gtest/gtest.h>

#include <limits>

#include "hypermla/api/environment.h"
#include "support.h"

namespace hypermla::configure_test {
namespace {
using testing_support::checkout;
using testing_support::contains;
using testing_support::error_of;

DeviceTable table() { return DeviceTable::load(checkout() / "conf/devices.json"); }
const char* const kH200 = "NVIDIA H200";
const char* const kRtx5090 = "NVIDIA GeForce RTX 5090";

ConfiguredPlan configured(const char* device, const char* kernel, const Settings& said) {
  const PlannedDevice on = planned_device(table(), device);
  return configure(Registry::instance().find_all(kernel, "", on.target.arch), on, said);
}

TEST(Configure, ThePlanIsForTheDeviceThatIsPredictedFor) {
  const Settings said{.problem = {{"b", "32"}, {"s", 16}, {"t", 4096}}};
  for (const auto& [device, arch, processors, language] :
       {std::tuple{kH200, "sm_90", 132, "cute"}, {kRtx5090, "sm_120", 170, "cutile"}}) {
    const auto [entry, plan, chosen] = configured(device, "mla_var6_plus", said);
    EXPECT_EQ(plan->target.arch, arch);
    EXPECT_EQ(plan->target.processors, processors);
    EXPECT_EQ(entry.language, language);
    EXPECT_EQ(to_json(plan->problem_fields()).at("n"), chosen.at("n"));
    EXPECT_GE(chosen.at("n"), 0);
  }
}

TEST(Configure, EachStepFollowsFromTheOnesBefore) {
  // Tiling fields lie over the default tiling of the problem: with one query that is another one than with 128.
  const auto tiling = [](int s, const Json& said) {
    return to_json(
        configured(kH200, "cutile.mla.flash_attention", {.problem = {{"s", s}}, .tiling = said}).plan->tiling_fields());
  };
  EXPECT_NE(tiling(1, {})["Bm"], tiling(128, {})["Bm"]);
  EXPECT_EQ(tiling(128, {{"Bn", "32"}})["Bm"], tiling(128, {})["Bm"]);
  EXPECT_EQ(tiling(128, {{"Bn", "32"}})["Bn"], 32);
}

TEST(Configure, WhatIsOfferedIsTakenWhereThePlanHasIt) {
  const auto [entry, plan, chosen] = configured(kH200, "output_decompression", {.offered = {{"s", 3}, {"t", 4096}}});
  EXPECT_EQ(to_json(plan->problem_fields()).at("s"), 3);
  EXPECT_TRUE(chosen.empty());
}

TEST(Configure, WhatIsWrongIsOneSentence) {
  const auto error = [](const Settings& said) {
    return error_of([&] { configured(kH200, "cutile.mla.flash_attention", said); });
  };
  EXPECT_EQ(error({.problem = {{"bb", 1}}}), "cutile.mla.flash_attention has no field 'bb'; did you mean b?");
  EXPECT_EQ(error({.problem = {{"Bm", 16}}}), "cutile.mla.flash_attention has no field 'Bm'; did you mean b?");
  EXPECT_EQ(error({.tiling = {{"Bx", 1}}}), "cutile.mla.flash_attention has no field 'Bx'; did you mean Bm?");
  EXPECT_EQ(error({.problem = {{"b", "x"}}}), "b cannot be 'x'; give it an integer of 32 bits");
  EXPECT_EQ(error({.problem = {{"b", 1.5}}}), "b cannot be 1.5; give it an integer of 32 bits");
  EXPECT_EQ(error({.problem = {{"b", 0}}}), "--b=0 is not supported: it must be at least 1");
  EXPECT_EQ(error({.tiling = {{"Bm", 3}}}), "--Bm=3 is not supported: it must be a power of two from 16 to 256");
}

// Planning grows with the requests: what no memory holds must end before it.
TEST(Configure, ExtentsThatNoMemoryHoldsAreRefusedFirst) {
  constexpr int kMost = std::numeric_limits<int>::max();
  for (const KernelEntry& entry : Registry::instance().all()) {
    for (const FieldRef& field : entry.make()->problem_fields()) {
      const std::string name(field.name);
      if (name != "b" && name != "s" && name != "t" && name != "h" && name != "n" && name != "prefixes") continue;
      const Settings said{.problem = {{name, kMost}}};
      const PlannedDevice on = planned_device(table(), entry.runs_on("sm_120") ? kRtx5090 : kH200);
      EXPECT_TRUE(
          contains(error_of([&] { configure({entry}, on, said); }), "--" + name + "=2147483647 is not supported"))
          << entry.full_name();
    }
  }
  EXPECT_TRUE(contains(error_of([] {
                         configured(kH200, "flash_mla", {.problem = {{"b", 60000}, {"s", 60000}}});
                       }),
                       "more than 2^30 are not supported"));
  EXPECT_TRUE(contains(error_of([] {
                         configured(kH200, "flash_mla", {.problem = {{"b", 60000}, {"t", 1 << 20}}});
                       }),
                       "which no memory holds"));
  // A pool holds what requests share.
  EXPECT_EQ(error_of([] {
              configured(kH200, "cute.mla.flash_mla",
                         {.problem = {{"b", 60000}, {"t", 1 << 20}, {"page", 64}, {"pages", 20000}, {"h", 16}}});
            }),
            "");
}

}  // namespace
}  // namespace hypermla::configure_test
