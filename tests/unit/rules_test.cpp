// The rule engine, on profiles recorded on an H200 and on signals made up to sit beside a threshold.
#include "hypermla/profile/rules.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "hypermla/profile/metrics.h"
#include "support.h"

namespace hypermla {
namespace {
using testing_support::checkout;
using testing_support::contains;
using testing_support::error_of;

Rules shipped() { return Rules::load(checkout() / "conf/profile_rules.json"); }

Json recorded(const std::string& name) {
  Json profile = Json::parse(read_file(checkout() / "tests/unit/recorded" / (name + ".json")));
  assess(profile, shipped());
  return profile;
}

std::vector<std::string> names(const Json& list, const char* key) {
  std::vector<std::string> result;
  for (const Json& one : list) result.push_back(one.at(key));
  return result;
}

TEST(Rules, JudgeRecordedProfiles) {
  const Json attention = recorded("flash_attention");
  EXPECT_EQ(attention["classification"]["class"], "memory-bound");
  EXPECT_EQ(attention["classification"]["confidence"], "high");
  EXPECT_TRUE(attention["opportunities"].empty()) << "at 95 % of the roofline nothing is left";

  const Json split = recorded("flash_mla_split_kv");
  EXPECT_EQ(split["classification"]["class"], "latency-bound");
  EXPECT_EQ(split["classification"]["stage"], "flash_mla_split_kv") << "the stage that takes longest";
  EXPECT_EQ(names(split["opportunities"], "id"), (std::vector<std::string>{"O2", "O11", "O1"}));
  EXPECT_EQ(names(split["stages"][0]["issues"], "name"),
            (std::vector<std::string>{"few blocks", "low occupancy", "power cap"}));

  EXPECT_EQ(recorded("output_decompression")["classification"]["class"], "latency-bound");
}

TEST(Rules, SignalsFollowFromARecordedProfile) {
  const Json profile = recorded("output_decompression");
  const Signals signals = stage_signals(profile, 0);
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

// The mode nsys counts nothing, but it samples.
TEST(Rules, SamplesOfATimelineAreSignals) {
  Json profile = Json::parse(read_file(checkout() / "tests/unit/recorded/output_decompression.json"));
  profile["timeline"] = {
      {"kernels",
       {{{"name", "somebody_else"}, {"tensor_pct", 99}, {"dram_pct", 99}, {"bubble_pct", 99}},
        {{"name", "output_decompression"}, {"tensor_pct", 41}, {"dram_pct", 72}, {"bubble_pct", 12}}}}};
  const double counted = stage_signals(profile, 0).at("tensor_pct");
  EXPECT_NE(counted, 41) << "what was counted is the better number";
  profile["stages"][0].erase("metrics");
  const Signals signals = stage_signals(profile, 0);
  EXPECT_DOUBLE_EQ(signals.at("tensor_pct"), 41);
  EXPECT_DOUBLE_EQ(signals.at("dram_pct"), 72);
  assess(profile, shipped());
  EXPECT_EQ(profile["classification"]["class"], "memory-bound");
  EXPECT_TRUE(contains(profile["stages"][0]["issues"].dump(), "bubble_pct = 12 >= 10"));
}

// Two paths on two streams; `tokens` got as many blocks as `latent`, which has more to do. Made up.
TEST(Rules, UnequalPathsWithEqualBlocks) {
  Json profile = Json::parse(read_file(checkout() / "tests/unit/recorded/flash_mla_split_kv.json"));
  const std::string longer = "flash_mla_split_kv", shorter = "flash_mla_split_kv_reduce";
  auto judge = [&](double long_us, double both_us, double share) {
    profile["timeline"] = {{"kernels", {{{"name", longer}, {"sum_us", long_us}}, {{"name", shorter}, {"sum_us", 60}}}},
                           {"overlaps", {{{"a", longer}, {"b", shorter}, {"us", both_us}, {"share", share}}}}};
    assess(profile, shipped());
    return names(profile["opportunities"], "id");
  };
  const auto has = [](const std::vector<std::string>& ids) { return std::count(ids.begin(), ids.end(), "A1"); };
  EXPECT_EQ(has(judge(240, 60, 1)), 1) << profile["opportunities"];
  EXPECT_DOUBLE_EQ(profile["stages"][0]["signals"]["alone_pct"], 75);
  EXPECT_DOUBLE_EQ(profile["stages"][1]["signals"]["alone_pct"], 0);
  EXPECT_EQ(has(judge(66, 60, 1)), 0) << "about as long as each other";
  EXPECT_EQ(has(judge(240, 6, 0.1)), 0) << "one after the other, with a common edge";
  EXPECT_EQ(profile["stages"][0]["signals"].count("alone_pct"), 0u);
}

// Two kernels at once are judged as one stage, by what their budgets fill together.
TEST(Rules, AGroupIsJudgedInPlaceOfItsMembers) {
  Json profile = Json::parse(read_file(checkout() / "tests/unit/recorded/flash_mla_split_kv.json"));
  auto judge = [&](int first_blocks, int second_blocks) {
    Json& stages = profile["stages"];
    while (stages.size() > 2) stages.erase(2);
    for (int i : {0, 1}) stages[i]["group"] = "paths";
    stages[0]["grid"] = {first_blocks, 1, 1};
    stages[1]["grid"] = {second_blocks, 1, 1};
    stages[0]["tiling"] = {{"occupancy", 1}};
    stages[1]["tiling"] = {{"occupancy", 2}};
    stages[0]["registers"] = 255;
    Json group = {{"name", "paths"},
                  {"members", {stages[0]["name"], stages[1]["name"]}},
                  {"tiling", Json::object()},
                  {"grid", {first_blocks + second_blocks, 1, 1}},
                  {"flops", 1e12},
                  {"bytes", 1e9},
                  {"predicted_us", 100}};
    group["burst"] = stages[0]["burst"];
    group["burst"]["median_us"] = 500;
    stages.push_back(group);
    assess(profile, shipped());
    return names(profile["opportunities"], "name");
  };
  const auto has = [](const std::vector<std::string>& list) {
    return std::count(list.begin(), list.end(), "Give every SM a block");
  };
  EXPECT_EQ(has(judge(100, 64)), 0) << "100 SMs and 32";
  EXPECT_DOUBLE_EQ(profile["stages"][2]["signals"]["group_waves"], 1);
  EXPECT_DOUBLE_EQ(profile["stages"][2]["signals"]["registers"], 255) << "the most of a member";
  EXPECT_EQ(profile["classification"]["stage"], "paths");
  EXPECT_EQ(profile["stages"][0]["signals"].count("waves"), 0u) << "a member does not fill the device, and shall not";
  EXPECT_EQ(profile["stages"][0]["signals"].count("sm_idle_pct"), 0u);
  EXPECT_EQ(has(judge(66, 32)), 1) << "50 SMs have no block";
  profile["stages"][0]["processors"] = 44;
  judge(66, 32);
  EXPECT_DOUBLE_EQ(profile["stages"][0]["signals"]["waves"], 1.5) << "of its partition";
  // How long a member goes on alone is the group's trouble.
  profile["timeline"] = {
      {"kernels",
       {{{"name", "flash_mla_split_kv"}, {"sum_us", 240}}, {{"name", "flash_mla_split_kv_reduce"}, {"sum_us", 60}}}},
      {"overlaps", {{{"a", "flash_mla_split_kv"}, {"b", "flash_mla_split_kv_reduce"}, {"us", 60}, {"share", 1}}}}};
  judge(100, 64);
  EXPECT_DOUBLE_EQ(profile["stages"][2]["signals"]["alone_pct"], 75);
}

struct Judged {
  double tensor, dram;
  const char* name;
};

TEST(Rules, ThresholdsOfTheClasses) {
  const Rules rules = shipped();
  for (const Judged& one : {Judged{60, 69.9, "compute-bound"}, Judged{59.9, 70, "memory-bound"},
                            Judged{60, 70, "balanced"}, Judged{59.9, 69.9, "latency-bound"}})
    EXPECT_EQ(rules.classify({{"tensor_pct", one.tensor}, {"dram_pct", one.dram}, {"waves", 2}})["class"], one.name)
        << one.tensor << " " << one.dram;
  EXPECT_EQ(rules.classify({{"tensor_pct", 20}, {"dram_pct", 20}, {"waves", 0.5}})["class"], "underfilled");
  EXPECT_EQ(rules.classify({{"tensor_pct", 20}, {"dram_pct", 20}, {"xu_pct", 80}})["class"], "special-function-bound");
  EXPECT_EQ(rules.classify({{"tensor_pct", 20}, {"dram_pct", 20}, {"memory_pct", 80}})["class"], "cache-bound");
  EXPECT_EQ(rules.classify({})["class"], "unknown");
}

TEST(Rules, ConfidenceIsTheDistanceToTheNearestThreshold) {
  const Rules rules = shipped();
  auto confidence = [&](double tensor, double dram) {
    return rules.classify({{"tensor_pct", tensor}, {"dram_pct", dram}, {"waves", 2}})["confidence"].get<std::string>();
  };
  EXPECT_EQ(confidence(30, 85), "high");
  EXPECT_EQ(confidence(30, 77), "medium");
  EXPECT_EQ(confidence(59, 95), "low");
}

TEST(Rules, WithoutCountersTimeAndCostDecide) {
  const Rules rules = shipped();
  const Json judged = rules.classify({{"achieved_compute_pct", 10}, {"achieved_memory_pct", 95}});
  EXPECT_EQ(judged["class"], "memory-bound");
  EXPECT_NE(judged["confidence"], "high");
  EXPECT_EQ(judged["evidence"][0], "achieved_memory_pct = 95 >= 70");
}

TEST(Rules, GainsStayBelowTheRoofline) {
  const Rules rules = Rules::parse(Json::parse(R"({"schema": 1, "opportunities": [
    {"id": "X1", "name": "toward", "when": [["a", "<", 60, 1]], "gain": ["toward", "a", 50], "why": "w"},
    {"id": "X2", "name": "excess", "when": [["b", ">=", 2, 1]], "gain": ["excess", "b", 1], "why": "w"},
    {"id": "X3", "name": "share", "when": [["c", ">=", 10, 1]], "gain": ["share", "c", 0.5], "why": "w"}]})"),
                                   "test");
  const Signals signals = {{"a", 40}, {"b", 4}, {"c", 60}};
  auto gains = [&](Signals with, std::size_t count) {
    std::vector<std::pair<std::string, double>> found;
    for (const Json& one : rules.opportunities(with, count)) found.emplace_back(one["id"], one["gain_percent"]);
    return found;
  };
  using Gains = std::vector<std::pair<std::string, double>>;
  EXPECT_EQ(gains(signals, 9), (Gains{{"X2", 75}, {"X3", 30}, {"X1", 20}}));
  EXPECT_EQ(gains(signals, 1), (Gains{{"X2", 75}}));
  Signals near = signals;
  near["roofline_fraction"] = 0.75;
  EXPECT_EQ(gains(near, 9), (Gains{{"X2", 25}, {"X3", 25}, {"X1", 20}}));
  near["roofline_fraction"] = 1.2;  // faster than the model: nothing to promise
  EXPECT_TRUE(gains(near, 9).empty());
}

TEST(Rules, RefuseWhatTheyDoNotUnderstand) {
  auto refusal = [](const char* text) { return error_of([&] { Rules::parse(Json::parse(text), "my.json"); }); };
  EXPECT_TRUE(contains(refusal("{}"), "my.json is not a file of profile rules of schema 1"));
  EXPECT_TRUE(contains(refusal(R"({"schema": 1, "classes": [{"class": "c", "why": "w", "when": [["a", ">", 1, 1]]}]})"),
                       "'c' compares with '>'; use < or >="));
  EXPECT_TRUE(contains(refusal(R"({"schema": 1, "classes": [{"class": "c", "why": "w", "when": [["a", "<", 1, 0]]}]})"),
                       "margin that is not positive"));
  EXPECT_TRUE(
      contains(refusal(R"({"schema": 1, "classes": [{"class": "c", "when": [["a", "<", 1, 1]]}]})"), "is not as"));
  EXPECT_TRUE(contains(refusal(R"({"schema": 1, "issues": [{"name": "n", "why": "w", "when": []}]})"), "no condition"));
  EXPECT_TRUE(contains(refusal(R"({"schema": 1, "opportunities": [{"id": "O1", "name": "n", "why": "w",
                                   "when": [["a", "<", 1, 1]], "gain": ["magic", "a", 1]}]})"),
                       "use toward, excess or share"));
}

// A rule over a misspelt signal would never fire, and nobody would notice.
TEST(Rules, EverySignalThatARuleReadsIsComputed) {
  Json profile = recorded("flash_mla_split_kv");
  profile["timing"]["sustained"] = profile["timing"]["burst"];
  profile["timeline"] = {{"kernels", {{{"name", "flash_mla_split_kv"}, {"bubble_pct", 0}, {"sum_us", 9}}}},
                         {"overlaps", {{{"a", "flash_mla_split_kv"}, {"b", "reduce"}, {"us", 9}, {"share", 1}}}}};
  Signals all;
  profile["stages"].push_back({{"name", "paths"}, {"members", {"flash_mla_split_kv"}}, {"grid", {1, 1, 1}}});
  profile["stages"][0]["group"] = "paths";
  profile["stages"][0]["processors"] = 66;
  for (std::size_t i = 0; i < profile["stages"].size(); ++i) all.merge(stage_signals(profile, i));
  for (const std::string& name : shipped().signals()) EXPECT_EQ(all.count(name), 1u) << name;
}

TEST(Rules, EveryCatalogEntryIsOfTheCatalog) {
  for (const Json& rule : Json::parse(read_file(checkout() / "conf/profile_rules.json"))["opportunities"]) {
    const std::string id = rule["id"];
    const int number = std::stoi(id.substr(1));
    EXPECT_TRUE((id[0] == 'O' && number >= 1 && number <= 11) || (id[0] == 'A' && number >= 1 && number <= 8)) << id;
  }
}

}  // namespace
}  // namespace hypermla
