// The rule engine, on profiles recorded on an H200 and on signals made up to sit beside a threshold.
#include "hypermla/profile/rules.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "hypermla/base/json_file.h"
#include "hypermla/profile/metrics.h"
#include "support.h"

namespace hypermla::rules_test {
namespace {
using testing_support::checkout;
using testing_support::contains;
using testing_support::error_of;

Rules shipped() { return Rules::load(checkout() / "conf/profile_rules.json"); }
Cards shipped_cards() { return Cards::load(checkout() / "docs/knowledge"); }

Profile load(const std::string& name) { return load_profile(checkout() / "tests/unit/recorded" / (name + ".json")); }

Profile recorded(const std::string& name) {
  Profile profile = load(name);
  assess(profile, shipped(), shipped_cards());
  return profile;
}

std::vector<std::string> ids(const Profile& profile) {
  std::vector<std::string> result;
  for (const Opportunity& one : profile.opportunities) result.push_back(one.id);
  return result;
}

std::vector<std::string> names(const std::vector<Issue>& issues) {
  std::vector<std::string> result;
  for (const Issue& one : issues) result.push_back(one.name);
  return result;
}

TEST(Rules, JudgeRecordedProfiles) {
  const Profile attention = recorded("flash_attention");
  EXPECT_EQ(attention.bottleneck->kind, "memory-bound");
  EXPECT_EQ(attention.bottleneck->confidence, "high");
  EXPECT_TRUE(attention.opportunities.empty()) << "at 95 % of the roofline nothing is left";

  const Profile split = recorded("flash_mla_split_kv");
  EXPECT_EQ(split.bottleneck->kind, "latency-bound");
  EXPECT_EQ(split.bottleneck->stage, "flash_mla_split_kv") << "the stage that takes longest";
  EXPECT_EQ(ids(split), (std::vector<std::string>{"O2", "O11", "O1"}));
  EXPECT_EQ(names(split.stages[0].issues), (std::vector<std::string>{"few blocks", "low occupancy", "power cap"}));

  EXPECT_EQ(recorded("output_decompression").bottleneck->kind, "latency-bound");
}

TEST(Rules, SignalsFollowFromARecordedProfile) {
  const Profile profile = recorded("output_decompression");
  const Signals signals = stage_signals(profile, profile.stages[0]);
  // 2 b s h k d, as a counter of the hardware and as the cost model: a known count.
  const double product = 2.0 * 32 * 16 * 128 * 512 * 128;
  EXPECT_NEAR(signals.at("executed_flops") / product, 1, 0.01);
  EXPECT_NEAR(signals.at("executed_over_algorithmic_flops"), 1, 0.01);
  EXPECT_DOUBLE_EQ(signals.at("blocks"), 8 * 128);
  EXPECT_DOUBLE_EQ(signals.at("waves"), 8 * 128 / (132 * 2.0));
  EXPECT_NEAR(signals.at("tail_pct"), 100 * (1 - signals.at("waves") / 4), 1e-9);
  EXPECT_NEAR(signals.at("dram_bytes"), signals.at("dram__bytes_read.sum") + signals.at("dram__bytes_write.sum"), 1);
  EXPECT_NEAR(signals.at("time_us"), 32.8, 0.5) << "of the burst";
  EXPECT_EQ(signals.count("spill_instructions"), 1u);
  EXPECT_DOUBLE_EQ(signals.at("causal"), 0);
}

TEST(Rules, ATilingThatIsDamagedIsNamed) {
  Json json = read_json(checkout() / "tests/unit/recorded/output_decompression.json");
  const testing_support::TempDir directory;
  for (const Json& wrong : {Json("two"), Json()}) {
    json["stages"][0]["tiling"]["occupancy"] = wrong;
    const auto file = directory.write("profile.json", json.dump());
    EXPECT_EQ(error_of([&] { load_profile(file); })
                  .find(file.string() +
                        " is not a profile ('occupancy' of "
                        "output_decompression is " +
                        wrong.dump()),
              0u);
  }
}

// The mode nsys counts nothing, but it samples.
TEST(Rules, SamplesOfATimelineAreSignals) {
  Profile profile = load("output_decompression");
  ProfileStage& stage = profile.stages[0];
  profile.timeline.emplace().kernels = {{"somebody_else", 1, 9, 9, 99, 99, 99}, {stage.name, 1, 9, 9, 41, 72, 12}};
  const double counted = stage_signals(profile, stage).at("tensor_pct");
  EXPECT_NE(counted, 41) << "what was counted is the better number";
  stage.metrics.clear();
  const Signals signals = stage_signals(profile, stage);
  EXPECT_DOUBLE_EQ(signals.at("tensor_pct"), 41);
  EXPECT_DOUBLE_EQ(signals.at("dram_pct"), 72);
  assess(profile, shipped(), shipped_cards());
  EXPECT_EQ(profile.bottleneck->kind, "memory-bound");
  const auto bubbles = [](const Issue& issue) { return issue.trigger == "bubble_pct = 12 >= 10"; };
  EXPECT_TRUE(std::any_of(stage.issues.begin(), stage.issues.end(), bubbles));
}

TimelineFigures two_paths(double long_us, double both_us, double share) {
  const std::string longer = "flash_mla_split_kv", shorter = "flash_mla_split_kv_reduce";
  TimelineFigures figures;
  figures.kernels = {{longer, 1, long_us, long_us, {}, {}, {}}, {shorter, 1, 60, 60, {}, {}, {}}};
  figures.overlaps = {{longer, shorter, both_us, share}};
  return figures;
}

// Two paths on two streams; `tokens` got as many blocks as `latent`, which has more to do. Made up.
TEST(Rules, UnequalPathsWithEqualBlocks) {
  Profile profile = load("flash_mla_split_kv");
  auto judge = [&](double long_us, double both_us, double share) {
    profile.timeline = two_paths(long_us, both_us, share);
    assess(profile, shipped(), shipped_cards());
    return ids(profile);
  };
  const auto has = [](const std::vector<std::string>& ids) { return std::count(ids.begin(), ids.end(), "A1"); };
  EXPECT_EQ(has(judge(240, 60, 1)), 1) << fmt::format("{}", fmt::join(ids(profile), " "));
  EXPECT_DOUBLE_EQ(profile.stages[0].signals.at("alone_pct"), 75);
  EXPECT_DOUBLE_EQ(profile.stages[1].signals.at("alone_pct"), 0);
  EXPECT_EQ(has(judge(66, 60, 1)), 0) << "about as long as each other";
  EXPECT_EQ(has(judge(240, 6, 0.1)), 0) << "one after the other, with a common edge";
  EXPECT_EQ(profile.stages[0].signals.count("alone_pct"), 0u);
}

// An idea is worth what its stage can gain of the whole, in whichever stage it fires.
TEST(Rules, AdviceIsRankedOverAllStages) {
  const Cards cards = shipped_cards();
  Profile profile = load("flash_mla_split_kv");
  const auto in_second = [&](double second_us) {
    profile.stages[1].burst->median_us = second_us;
    assess(profile, shipped(), cards);
    std::vector<std::string> found;
    double last = HUGE_VAL;
    for (const Opportunity& one : profile.opportunities) {
      if (!one.refuted.empty()) continue;
      EXPECT_LE(one.gain_percent, last);
      last = one.gain_percent;
      if (one.stage == profile.stages[1].name) found.push_back(one.id);
    }
    return found;
  };
  const double first_us = profile.stages[0].burst->median_us;
  EXPECT_EQ(in_second(first_us / 1000).size(), 0u) << "a thousandth of the time cannot gain a percent";
  const std::vector<std::string> equal = in_second(first_us * 0.99);
  ASSERT_FALSE(equal.empty());
  EXPECT_EQ(profile.bottleneck->stage, profile.stages[0].name) << "the longer one";
  double shares = 0;
  for (const ProfileStage& stage : profile.stages) shares += share_of_time(profile, stage);
  EXPECT_NEAR(shares, 1, 1e-12);
  for (const Opportunity& one : profile.opportunities) {
    const ProfileStage& stage = profile.stages[one.stage == profile.stages[0].name ? 0 : 1];
    for (const CardMatch& match : match_cards(profile, stage, cards)) {
      if (match.card->id != one.id) continue;
      EXPECT_NEAR(one.gain_percent, match.gain_percent * share_of_time(profile, stage), 1e-9) << one.id;
    }
  }
}

// Two kernels at once are judged as one stage, by what their budgets fill together.
TEST(Rules, AGroupIsJudgedInPlaceOfItsMembers) {
  Profile profile = load("flash_mla_split_kv");
  auto judge = [&](int first_blocks, int second_blocks) {
    std::vector<ProfileStage>& stages = profile.stages;
    stages.resize(2);
    stages[0].group = stages[1].group = "paths";
    stages[0].grid = {first_blocks, 1, 1};
    stages[1].grid = {second_blocks, 1, 1};
    stages[0].tiling = {{"occupancy", 1}};
    stages[1].tiling = {{"occupancy", 2}};
    stages[0].registers = 255;
    ProfileStage group;
    group.name = "paths";
    group.members = {stages[0].name, stages[1].name};
    group.grid = {first_blocks + second_blocks, 1, 1};
    group.flops = 1e12;
    group.bytes = 1e9;
    group.predicted_us = 100;
    group.burst = stages[0].burst;
    group.burst->median_us = 500;
    stages.push_back(group);
    assess(profile, shipped(), shipped_cards());
    const auto idle = [](const Opportunity& one) { return one.name == "Give every SM a block"; };
    return std::count_if(profile.opportunities.begin(), profile.opportunities.end(), idle);
  };
  auto signals = [&](int stage) -> const Signals& { return profile.stages[std::size_t(stage)].signals; };
  EXPECT_EQ(judge(100, 64), 0) << "100 SMs and 32";
  EXPECT_DOUBLE_EQ(signals(2).at("group_waves"), 1);
  EXPECT_DOUBLE_EQ(signals(2).at("registers"), 255) << "the most of a member";
  EXPECT_EQ(profile.bottleneck->stage, "paths");
  EXPECT_EQ(signals(0).count("waves"), 0u) << "a member does not fill the device, and shall not";
  EXPECT_EQ(signals(0).count("sm_idle_pct"), 0u);
  EXPECT_EQ(judge(66, 32), 1) << "50 SMs have no block";
  profile.stages[0].processors = 44;
  judge(66, 32);
  EXPECT_DOUBLE_EQ(signals(0).at("waves"), 1.5) << "of its partition";
  // How long a member goes on alone is the group's trouble.
  profile.timeline = two_paths(240, 60, 1);
  judge(100, 64);
  EXPECT_DOUBLE_EQ(signals(2).at("alone_pct"), 75);
}

struct Judged {
  double tensor, dram;
  const char* name;
};

TEST(Rules, ThresholdsOfTheClasses) {
  const Rules rules = shipped();
  for (const Judged& one : {Judged{60, 69.9, "compute-bound"}, Judged{59.9, 70, "memory-bound"},
                            Judged{60, 70, "balanced"}, Judged{59.9, 69.9, "latency-bound"}})
    EXPECT_EQ(rules.classify({{"tensor_pct", one.tensor}, {"dram_pct", one.dram}, {"waves", 2}}).kind, one.name)
        << one.tensor << " " << one.dram;
  EXPECT_EQ(rules.classify({{"tensor_pct", 20}, {"dram_pct", 20}, {"waves", 0.5}}).kind, "underfilled");
  EXPECT_EQ(rules.classify({{"tensor_pct", 20}, {"dram_pct", 20}, {"xu_pct", 80}}).kind, "special-function-bound");
  EXPECT_EQ(rules.classify({{"tensor_pct", 20}, {"dram_pct", 20}, {"memory_pct", 80}}).kind, "cache-bound");
  EXPECT_EQ(rules.classify({}).kind, "unknown");
}

TEST(Rules, ConfidenceIsTheDistanceToTheNearestThreshold) {
  const Rules rules = shipped();
  auto confidence = [&](double tensor, double dram) {
    return rules.classify({{"tensor_pct", tensor}, {"dram_pct", dram}, {"waves", 2}}).confidence;
  };
  EXPECT_EQ(confidence(30, 85), "high");
  EXPECT_EQ(confidence(30, 77), "medium");
  EXPECT_EQ(confidence(59, 95), "low");
}

TEST(Rules, WithoutCountersTimeAndCostDecide) {
  const Rules rules = shipped();
  const Bottleneck judged = rules.classify({{"achieved_compute_pct", 10}, {"achieved_memory_pct", 95}});
  EXPECT_EQ(judged.kind, "memory-bound");
  EXPECT_EQ(judged.evidence[0], "achieved_memory_pct = 95 >= 70");
  for (const Judged& one :
       {Judged{1000, 10, "compute-bound"}, Judged{10, 1000, "memory-bound"}, Judged{85, 85, "balanced"},
        Judged{1000, 1000, "balanced"}, Judged{0, 0, "latency-bound"}}) {
    const Bottleneck found = rules.classify({{"achieved_compute_pct", one.tensor}, {"achieved_memory_pct", one.dram}});
    EXPECT_EQ(found.kind, one.name);
    EXPECT_EQ(found.confidence, "medium") << one.name;
  }
}

TEST(Rules, RefuseWhatTheyDoNotUnderstand) {
  auto refusal = [](const char* text) { return error_of([&] { Rules::parse(Json::parse(text), "my.json"); }); };
  EXPECT_TRUE(contains(refusal("{}"), "my.json is not a file of profile rules of schema 1; restore it"));
  EXPECT_TRUE(contains(refusal(R"({"schema": 1, "classes": [{"class": "c", "why": "w", "when": [["a", ">", 1, 1]]}]})"),
                       "'c' compares with '>'; use < or >="));
  EXPECT_TRUE(contains(refusal(R"({"schema": 1, "classes": [{"class": "c", "why": "w", "when": [["a", "<", 1, 0]]}]})"),
                       "margin that is not positive"));
  EXPECT_TRUE(
      contains(refusal(R"({"schema": 1, "classes": [{"class": "c", "when": [["a", "<", 1, 1]]}]})"), "is not as"));
  EXPECT_TRUE(
      contains(refusal(R"({"schema": 1, "classes": [{"class": "c", "why": "w", "when": [["wave", "<", 1, 1]]}]})"),
               "my.json: 'c' reads the signal 'wave', which no profile has; did you mean 'waves'?"));
  EXPECT_TRUE(contains(refusal(R"({"schema": 1, "classes": []})"), "my.json has no list 'issues'"));
  EXPECT_TRUE(contains(refusal(R"({"schema": 1, "issues": []})"), "my.json has no list 'classes'"));
  EXPECT_TRUE(contains(refusal(R"({"schema": 1, "classes": [], "issues": [{"name": "n", "why": "w", "when": []}]})"),
                       "no condition"));
  for (const char* text : {"[]", "7", R"({"schema": "1"})", R"({"schema": 1, "classes": 3})",
                           R"({"schema": 1, "classes": [], "issues": [{"name": "n", "why": "w", "when": [[]]}]})",
                           R"({"schema": 1, "classes": [], "issues": [[]]})"}) {
    const std::string said = refusal(text);
    EXPECT_TRUE(contains(said, "my.json") && !contains(said, "json.exception")) << text << ": " << said;
  }
}

// A rule or a card over a misspelt signal would never fire, without any error.
TEST(Rules, EverySignalThatMayBeNamedIsComputed) {
  Profile profile = recorded("flash_mla_split_kv");
  profile.timing.sustained = profile.timing.burst;
  profile.timeline = two_paths(9, 9, 1);
  profile.timeline->kernels[0].bubble_pct = 0;
  Signals all;
  ProfileStage group;
  group.name = "paths";
  group.members = {"flash_mla_split_kv"};
  profile.stages.push_back(group);
  profile.stages[0].group = "paths";
  profile.stages[0].processors = 66;
  for (const ProfileStage& stage : profile.stages) all.merge(stage_signals(profile, stage));
  const std::set<std::string> names = signal_names();
  for (const std::string& name : names) {
    if (find_counter(name)) continue;
    EXPECT_EQ(all.count(name), 1u) << name;
  }
}

// The report of the latent kernel used to propose what its own log refutes.
TEST(Rules, RefutedAdviceIsShownAsRefuted) {
  Profile profile = load("flash_mla_split_kv");
  profile.kernel = "cute.mla.flash_mla";
  profile.version = "v0";
  profile.stages.resize(1);
  profile.stages[0].name = "flash_mla";
  profile.stages[0].grid = {128, 1, 1};
  profile.stages[0].tiling = Json::object();
  const auto split = [&] {
    assess(profile, shipped(), shipped_cards());
    const auto& all = profile.opportunities;
    EXPECT_TRUE(
        std::is_partitioned(all.begin(), all.end(), [](const Opportunity& one) { return one.refuted.empty(); }));
    const auto found = std::find_if(all.begin(), all.end(), [](const Opportunity& one) { return one.id == "O1"; });
    return found == all.end() ? Opportunity() : *found;
  };
  EXPECT_TRUE(contains(split().refuted, "762.7 us instead of 751.7")) << "128 of 132 SMs have a block";
  EXPECT_TRUE(contains(split().refuted, "docs/log/cute-flash-mla.md#"));
  EXPECT_EQ(split().card, "docs/knowledge/optimizations/split-kv.md");
  const std::string report = render_report(profile);
  EXPECT_TRUE(contains(report, "Measured before on this kernel, and refuted:"));
  EXPECT_TRUE(contains(report, "762.7 us instead of 751.7"));
  profile.stages[0].grid = {64, 1, 1};
  EXPECT_EQ(split().id, "O1");
  EXPECT_EQ(split().refuted, "") << "that half of the SMs may idle was not measured";
}

}  // namespace
}  // namespace hypermla::rules_test
