#include "hypermla/profile/compare.h"

#include <gtest/gtest.h>

#include "hypermla/profile/rules.h"
#include "support.h"

namespace hypermla {
namespace {
using testing_support::checkout;
using testing_support::contains;
using testing_support::error_of;

Json recorded() {
  Json profile = Json::parse(read_file(checkout() / "tests/unit/recorded/flash_mla_split_kv.json"));
  assess(profile, Rules::load(checkout() / "conf/profile_rules.json"));
  return profile;
}

// The same run, with every time of the flavour multiplied.
Json scaled(Json profile, double factor, double clock = 1, const char* flavour = "cold") {
  Json& timing = profile["timing"][flavour];
  for (const char* key : {"median_us", "low_us", "high_us"}) timing[key] = timing[key].get<double>() * factor;
  if (timing.contains("sm_MHz")) timing["sm_MHz"] = timing["sm_MHz"].get<double>() * clock;
  return profile;
}

TEST(Compare, Intervals) {
  const Interval a{98, 100, 102};
  EXPECT_EQ(compare_intervals(a, {98, 100.5, 103}, 0.01), Verdict::same);
  EXPECT_EQ(compare_intervals(a, {90, 92, 97.9}, 0.01), Verdict::faster);
  EXPECT_EQ(compare_intervals(a, {102.1, 108, 110}, 0.01), Verdict::slower);
  EXPECT_EQ(compare_intervals(a, {95, 97, 99}, 0.01), Verdict::unclear) << "they overlap";
  EXPECT_EQ(compare_intervals({50, 100, 200}, {50, 100.9, 200}, 0.01), Verdict::same);
  EXPECT_EQ(compare_intervals(a, {NAN, NAN, NAN}, 0.01), Verdict::unclear);
}

TEST(Compare, ARunIsTheSameAsItself) {
  const Json result = compare_profiles(recorded(), recorded());
  EXPECT_EQ(result["verdict"], "SAME");
  EXPECT_TRUE(result["deltas"].empty());
}

TEST(Compare, FasterAndSlowerInTimeAndCycles) {
  const Json faster = compare_profiles(recorded(), scaled(recorded(), 0.8));
  EXPECT_EQ(faster["verdict"], "FASTER");
  EXPECT_EQ(faster["time"]["cold"]["cycles_verdict"], "FASTER");
  EXPECT_NEAR(faster["time"]["cold"]["change_percent"].get<double>(), -20, 1e-9);
  EXPECT_EQ(compare_profiles(recorded(), scaled(recorded(), 1.25))["verdict"], "SLOWER");
}

TEST(Compare, AClockThatMovedDecidesNothing) {
  // 20 % less time at a 25 % higher clock: as many cycles.
  const Json result = compare_profiles(recorded(), scaled(recorded(), 0.8, 1.25));
  EXPECT_EQ(result["verdict"], "UNCLEAR");
  EXPECT_TRUE(contains(result["why"], "the clock moved"));
  EXPECT_EQ(result["time"]["cold"]["verdict"], "FASTER");
  EXPECT_EQ(result["time"]["cold"]["cycles_verdict"], "SAME");
}

TEST(Compare, DeltasComeByRelevance) {
  Json changed = recorded();
  changed["stages"][0]["signals"]["registers"] = 255;
  changed["stages"][0]["signals"]["tensor_pct"] = changed["stages"][0]["signals"]["tensor_pct"].get<double>() + 10;
  changed["stages"][0]["signals"]["l2_hit_pct"] = changed["stages"][0]["signals"]["l2_hit_pct"].get<double>() + 0.5;
  changed["stages"][0]["tiling"]["Bn"] = 128;
  const Json result = compare_profiles(recorded(), changed);
  std::vector<std::string> names;
  for (const Json& one : result["deltas"]) names.push_back(one["name"]);
  EXPECT_EQ(names, (std::vector<std::string>{"tensor_pct", "registers", "tiling Bn"}));
  EXPECT_NEAR(result["deltas"][0]["change"].get<double>(), 10, 1e-9) << "in points";
  const std::string text = render_comparison(result);
  EXPECT_EQ(text.rfind("SAME: cold ", 0), 0u);
  EXPECT_TRUE(contains(text, "| flash_mla_split_kv | tiling Bn | 64 | 128 | +100.0 % |"));
}

TEST(Compare, RefusesOtherProblemsAndOtherFiles) {
  Json other = recorded();
  other["problem"]["s"] = 2;
  EXPECT_TRUE(contains(error_of([&] { compare_profiles(recorded(), other); }), "different problems"));
  const testing_support::TempDir dir;
  EXPECT_TRUE(contains(error_of([&] { load_profile(dir.write("x.json", "{}")); }), "is not a profile"));
  EXPECT_TRUE(contains(error_of([&] { load_profile(dir.path()); }), "profile.json"));
  dir.write("run/profile.json", recorded().dump());
  EXPECT_EQ(load_profile(dir.path() / "run"), recorded());
}

TEST(Compare, OtherDevicesAreNamedAndCyclesLeftOut) {
  Json other = recorded();
  other["device"]["name"] = "NVIDIA H100";
  const Json result = compare_profiles(recorded(), other);
  EXPECT_EQ(result["note"], "different devices: NVIDIA H200 and NVIDIA H100");
  EXPECT_FALSE(result["time"]["cold"].contains("cycles_verdict"));
}

}  // namespace
}  // namespace hypermla
