#include "hypermla/profile/compare.h"

#include <gtest/gtest.h>

#include "hypermla/profile/rules.h"
#include "support.h"

namespace hypermla::compare_test {
namespace {
using testing_support::checkout;
using testing_support::contains;
using testing_support::error_of;

Profile recorded() {
  Profile profile = load_profile(checkout() / "tests/unit/recorded/flash_mla_split_kv.json");
  assess(profile, Rules::load(checkout() / "conf/profile_rules.json"), Cards());
  return profile;
}

// The same run, with its cold times and their clock multiplied.
Profile scaled(Profile profile, double factor, double clock = 1) {
  Times& cold = profile.timing.cold;
  for (double* time : {&cold.median_us, &cold.low_us, &cold.high_us}) *time *= factor;
  *cold.sm_mhz *= clock;
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
  const Comparison result = compare_profiles(recorded(), recorded());
  EXPECT_EQ(result.verdict, Verdict::same);
  EXPECT_TRUE(result.deltas.empty());
}

TEST(Compare, FasterAndSlowerInTimeAndCycles) {
  const Comparison faster = compare_profiles(recorded(), scaled(recorded(), 0.8));
  EXPECT_EQ(faster.verdict, Verdict::faster);
  ASSERT_EQ(faster.times.size(), 3u);
  EXPECT_EQ(faster.times[0].time, "cold");
  EXPECT_EQ(faster.times[0].cycles->verdict, Verdict::faster);
  EXPECT_NEAR(faster.times[0].change_percent, -20, 1e-9);
  EXPECT_EQ(compare_profiles(recorded(), scaled(recorded(), 1.25)).verdict, Verdict::slower);
}

// The gate is "no regression, burst and sustained".
TEST(Compare, SlowerInAnyTimeIsSlower) {
  for (const bool sustained : {false, true}) {
    Profile slow = recorded();
    Times& times = sustained ? *slow.timing.sustained : slow.timing.burst;
    for (double* time : {&times.median_us, &times.low_us, &times.high_us}) *time *= 2;
    const Comparison result = compare_profiles(recorded(), slow);
    EXPECT_EQ(result.times[0].verdict, Verdict::same);
    EXPECT_EQ(result.verdict, Verdict::slower);
    // The headline begins with the time that decided, not with the one that a verdict is mostly of.
    const std::string decided = sustained ? "sustained " : "burst ";
    EXPECT_EQ(render_comparison(result).rfind("SLOWER: " + decided, 0), 0u) << result.why;
    EXPECT_TRUE(contains(result.why, "; cold is SAME, ")) << result.why;
    const Comparison both = compare_profiles(recorded(), scaled(slow, 0.8));
    EXPECT_EQ(both.verdict, Verdict::unclear) << "and faster when cold";
    EXPECT_EQ(both.why.rfind(decided + "is SLOWER, ", 0), 0u) << both.why;
    EXPECT_TRUE(contains(both.why, "; cold is FASTER, ")) << both.why;
    Profile noisy = slow;  // cold intervals that overlap
    noisy.timing.cold.high_us *= 3, noisy.timing.cold.median_us *= 1.5;
    const Comparison overlap = compare_profiles(recorded(), noisy);
    EXPECT_EQ(overlap.times[0].verdict, Verdict::unclear);
    EXPECT_EQ(render_comparison(overlap).rfind("SLOWER: " + decided, 0), 0u) << overlap.why;
    EXPECT_TRUE(contains(overlap.why, "; cold is UNCLEAR, ")) << overlap.why;
    EXPECT_EQ(compare_profiles(slow, recorded()).verdict, Verdict::same) << "the first decides else";
    *slow.timing.sustained->sm_mhz /= 2;
    EXPECT_EQ(compare_profiles(recorded(), slow).verdict, sustained ? Verdict::unclear : Verdict::slower)
        << "as many cycles";
  }
}

TEST(Compare, AClockThatMovedDecidesNothing) {
  // 20 % less time at a 25 % higher clock: as many cycles.
  const Comparison result = compare_profiles(recorded(), scaled(recorded(), 0.8, 1.25));
  EXPECT_EQ(result.verdict, Verdict::unclear);
  EXPECT_TRUE(contains(result.why, "the clock moved"));
  EXPECT_EQ(result.times[0].verdict, Verdict::faster);
  EXPECT_EQ(result.times[0].cycles->verdict, Verdict::same);
}

TEST(Compare, DeltasComeByRelevance) {
  Profile changed = recorded();
  changed.stages[0].signals["registers"] = 255;
  changed.stages[0].signals["tensor_pct"] += 10;
  changed.stages[0].signals["l2_hit_pct"] += 0.5;
  changed.stages[0].tiling["Bn"] = 128;
  const Comparison result = compare_profiles(recorded(), changed);
  std::vector<std::string> names;
  for (const Comparison::Delta& one : result.deltas) names.push_back(one.name);
  EXPECT_EQ(names, (std::vector<std::string>{"tensor_pct", "registers", "tiling Bn"}));
  EXPECT_NEAR(result.deltas[0].change, 10, 1e-9) << "in points";
  const std::string text = render_comparison(result);
  EXPECT_EQ(text.rfind("SAME: cold ", 0), 0u);
  EXPECT_TRUE(contains(text, "| flash_mla_split_kv | tiling Bn | 64 | 128 | +100.0 % |"));
  Profile before = recorded();
  before.stages[0].tiling["ragged"] = false, changed.stages[0].tiling["ragged"] = true;
  EXPECT_TRUE(contains(render_comparison(compare_profiles(before, changed)), "| tiling ragged | 0 | 1 | +100.0 % |"));
}

TEST(Compare, RefusesOtherProblems) {
  Profile other = recorded();
  other.problem["s"] = 2;
  EXPECT_TRUE(contains(error_of([&] { compare_profiles(recorded(), other); }), "different problems"));
}

// cute.mla.flash_attention_v1 knows nothing of shared prefixes.
TEST(Compare, FieldsThatOneVersionDoesNotOffer) {
  Profile base = recorded(), version = recorded();
  base.kernel = "cute.mla.flash_attention", version.kernel = "cute.mla.flash_attention_v1";
  version.problem = {{"b", 32}, {"s", 32}, {"t", 4096}, {"dtype", "bfloat16"}};
  base.problem = version.problem;
  base.problem.update({{"prefixes", 0}, {"after", 0}, {"parts", 1}});
  const auto refusal = [](const Profile& a, const Profile& b) { return error_of([&] { compare_profiles(a, b); }); };
  EXPECT_EQ(refusal(base, version), "");
  EXPECT_EQ(refusal(version, base), "");
  base.problem["prefixes"] = 1;
  EXPECT_TRUE(contains(refusal(base, version), "different problems"));
  base.problem["prefixes"] = 0;
  version.kernel = "cute.mla.flash_mla";
  EXPECT_TRUE(contains(refusal(base, version), "different problems")) << "of another design";
  version.kernel = "cute.mla.flash_attention_v1";
  version.problem["s"] = 16;
  EXPECT_TRUE(contains(refusal(base, version), "different problems"));
}

TEST(Compare, ATimeThatIsNoneDecidesNothing) {
  for (const double factor : {0.0, -1.0, double(NAN)})
    EXPECT_TRUE(contains(error_of([&] { compare_profiles(recorded(), scaled(recorded(), factor)); }),
                         "the cold time of run B is"))
        << factor;
  for (auto spoil : std::vector<void (*)(Times&)>{
           [](Times& times) { times.low_us = times.median_us + 1; }, [](Times& times) { times.high_us = HUGE_VAL; },
           [](Times& times) { times.low_us = 0; }, [](Times& times) { times.high_us = times.low_us; },
           [](Times& times) { times.repetitions = 0; }}) {
    Profile other = recorded();
    spoil(other.timing.burst);
    EXPECT_TRUE(contains(error_of([&] { compare_profiles(recorded(), other); }), "the burst time of run B is"));
  }
  Profile torn = recorded();
  torn.stages[0].tiling["Bn"] = "wide";
  EXPECT_NO_THROW(compare_profiles(recorded(), torn)) << "of another type";
}

TEST(Compare, FewRepetitionsDecideNothing) {
  for (const int few : {1, 6}) {
    Profile a = recorded(), b = scaled(recorded(), 0.8);
    b.timing.cold.repetitions = few;
    const Comparison result = compare_profiles(a, b);
    EXPECT_EQ(result.verdict, Verdict::unclear) << few;
    EXPECT_EQ(result.times[0].cycles->verdict, Verdict::unclear) << few;
    EXPECT_TRUE(contains(result.why, "repetitions are too few, profile with --bench_runs=7 or more")) << result.why;
    EXPECT_EQ(compare_profiles(b, b).verdict, Verdict::unclear) << few;
  }
}

TEST(Compare, AsJson) {
  const Json json = to_json(compare_profiles(recorded(), scaled(recorded(), 0.8)));
  EXPECT_EQ(json["verdict"], "FASTER");
  EXPECT_EQ(json["time"]["cold"]["cycles_verdict"], "FASTER");
  EXPECT_EQ(json["time"]["burst"]["verdict"], "SAME");
  const Times& burst = recorded().timing.burst;
  EXPECT_EQ(json["time"]["burst"]["a_low_us"], burst.low_us);
  EXPECT_EQ(json["time"]["burst"]["b_high_us"], burst.high_us);
  EXPECT_TRUE(
      contains(render_comparison(compare_profiles(recorded(), recorded())),
               fmt::format("| burst | {:.1f} ({:.1f} to {:.1f}) |", burst.median_us, burst.low_us, burst.high_us)));
  EXPECT_FALSE(json["time"]["burst"].contains("cycles_verdict")) << "a burst knows no clock";
  EXPECT_EQ(json["bottleneck"], (Json{{"a", "latency-bound"}, {"b", "latency-bound"}}));
}

TEST(Compare, OtherDevicesAreNamedAndCyclesLeftOut) {
  Profile other = recorded();
  other.device.name = "NVIDIA H100";
  const Comparison result = compare_profiles(recorded(), other);
  EXPECT_EQ(result.note, "different devices: NVIDIA H200 and NVIDIA H100");
  EXPECT_FALSE(result.times[0].cycles);
  EXPECT_EQ(result.verdict, Verdict::unclear);
  EXPECT_EQ(result.why.rfind("the devices differ; cold ", 0), 0u) << result.why;
}

TEST(Compare, ClocksThatOnlyOneRunHadLockedAreNoted) {
  Profile a = recorded(), b = recorded();
  a.clocks = Profile::Clocks{}, b.clocks = Profile::Clocks{1980, {}, true};
  EXPECT_EQ(compare_profiles(a, b).note, "only run B had its clocks locked");
  EXPECT_EQ(compare_profiles(b, b).note, "");
}

}  // namespace
}  // namespace hypermla::compare_test
