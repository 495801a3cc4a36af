// Development logs: entries from profiles, figures that no profile holds, and what lint finds; and the task that a
// profile leads to.
#include "hypermla/profile/devlog.h"

#include <gtest/gtest.h>

#include "hypermla/profile/next.h"
#include "support.h"

namespace hypermla::devlog_test {
namespace {
using testing_support::checkout;
using testing_support::contains;
using testing_support::error_of;
using testing_support::TempDir;

const Rules& shipped_rules() {
  static const Rules rules = Rules::load(checkout() / "conf/profile_rules.json");
  return rules;
}
const Cards& shipped() {
  static const Cards cards = Cards::load(checkout() / "docs/knowledge");
  return cards;
}

Profile recorded(const std::string& name = "flash_mla_split_kv") {
  Profile profile = load_profile(checkout() / "tests/unit/recorded" / (name + ".json"));
  assess(profile, shipped_rules(), shipped());
  return profile;
}

const DevlogVersion kVersion = {"cutile.mla.flash_mla_split_kv", "v0",
                                "kernels/cutile/mla/flash_mla_split_kv/flash_mla_split_kv"};
const DevlogTexts kTexts = {"Tokens are split over blocks.", "More blocks than one wave.", "The merge is short."};

// A checkout with a record, and the same run 10 % faster beside it.
struct Logs {
  Logs() {
    run.path = dir.write("results/run.json", to_json(run.profile).dump());
    for (Times* times : {&before.profile.timing.cold, &before.profile.timing.burst})
      for (double* time : {&times->median_us, &times->low_us, &times->high_us}) *time *= 1.25;
    before.path = dir.write("results/before.json", to_json(before.profile).dump());
    make_directories(dir.path() / "docs/log");
  }
  std::filesystem::path add(const DevlogTexts& texts = kTexts, bool with_baseline = true) {
    return add_devlog_entry(dir.path(), kVersion, texts, run, with_baseline ? std::optional(before) : std::nullopt);
  }
  std::vector<std::string> lint() const { return lint_devlogs(dir.path(), {kVersion}, shipped_rules()); }
  TempDir dir;
  DevlogRun run{recorded(), ""}, before{recorded(), ""};
};

TEST(Devlog, AnEntryHoldsWhatTheProfilesMeasured) {
  Logs logs;
  const auto path = logs.add();
  EXPECT_EQ(path, logs.dir.path() / "docs/log" / "flash-mla-split-kv.md");
  const std::string text = read_file(path);
  for (const char* part : {"# flash-mla-split-kv: log\n", "## Version v0 of cutile.mla.flash_mla_split_kv\n",
                           "- Location: `kernels/cutile/mla/flash_mla_split_kv/flash_mla_split_kv`\n",
                           "- Changed: Tokens are split over blocks.\n", "- Measured: NVIDIA H200 (sm_90",
                           "b=32 s=1 t=4096 h=128", "[profile](../../results/run.json)",
                           "- Baseline: cutile.mla.flash_mla_split_kv, ", "[profile](../../results/before.json)",
                           "- Bottleneck: latency-bound (confidence ", "- Insight: The merge is short.\n"})
    EXPECT_TRUE(contains(text, part)) << part << "\n" << text;
  const double burst = logs.run.profile.timing.burst.median_us;
  EXPECT_TRUE(contains(text, fmt::format("| duration, burst, us | {:.1f} | {:.1f} | -20.0 % |", burst, burst * 1.25)))
      << text;
  const double cold = logs.run.profile.timing.cold.median_us;
  EXPECT_TRUE(contains(text, fmt::format("| duration, cold, us | {:.1f} | {:.1f} | -20.0 % |", cold, cold * 1.25)))
      << text;
  EXPECT_TRUE(contains(text, "\n| verdict | FASTER | - | - |\n\n")) << text;
  EXPECT_TRUE(
      contains(text, fmt::format("| tensor pipe, % | {:.1f} |", logs.run.profile.stages[0].signals.at("tensor_pct"))))
      << text;
  for (std::istringstream lines(text); std::getline(lines, logs.run.profile.label);)
    EXPECT_LE(logs.run.profile.label.size(), 120u);
  EXPECT_EQ(logs.lint(), (std::vector<std::string>{}));
}

TEST(Devlog, FiguresThatNoProfileHoldsAreRefused) {
  Logs logs;
  const auto& profile = logs.run.profile;
  auto refusal = [&](const std::string& insight, bool with_baseline = true) {
    return error_of([&] {
      require_measured("--insight", insight, logs.run, with_baseline ? std::optional(logs.before) : std::nullopt);
    });
  };
  EXPECT_EQ(refusal("Tiles of 128 x 256 elements."), "");
  EXPECT_NE(refusal("It is 128 x as fast."), "");
  EXPECT_EQ(refusal(fmt::format("It takes {:.1f} us, {:.0f} TFLOP/s, {:.1f} GB/s.", profile.timing.burst.median_us,
                                profile.timing.burst.tflops, profile.timing.burst.gbps)),
            "");
  EXPECT_EQ(refusal(fmt::format("{:.4f} ms", profile.timing.burst.median_us / 1000)), "");
  EXPECT_EQ(refusal("20 % less, that is 1.25x."), "") << "one run against the other";
  EXPECT_EQ(refusal("Tiles of 64 rows, s = 16, 3 stages."), "") << "no figures of a measurement";
  EXPECT_TRUE(contains(refusal("It takes 12.3 us."), "--insight says '12.3 us', which no profile of this entry holds"));
  EXPECT_TRUE(contains(refusal("It takes 12.3us."), "12.3us"));
  const double burst = profile.timing.burst.median_us;
  for (const char* unit : {"\u00b5s", "\u03bcs", " microseconds"})
    EXPECT_EQ(refusal(fmt::format("{:.1f}{}", burst, unit)), "") << unit;
  EXPECT_EQ(refusal(fmt::format("{:.7f} s, {},{:03} ns", burst / 1e6, int(std::lround(burst * 1e3)) / 1000,
                                int(std::lround(burst * 1e3)) % 1000)),
            "");
  EXPECT_EQ(refusal("20 percent less, 1.25\u00d7, 1.25 times; at b=32 s=16 t = 4096 s = 1, 3 streams"), "");
  for (const char* wrong : {"12.3 \u00b5s", "12.3 microseconds", "12 ns", "77 s", "77 percent", "7.7 times",
                            "7.7\u00d7", "7777 TFLOPS", "1,777.5 us", "77 seconds"})
    EXPECT_TRUE(contains(refusal(wrong), fmt::format("says '{}', which no profile", wrong))) << refusal(wrong);
  EXPECT_TRUE(contains(refusal("It is 1.25x.", false), "which no profile of this entry holds"));
  EXPECT_NE(refusal(fmt::format("{:.2f} us", profile.timing.burst.median_us + 0.01)), "") << "all digits count";
  const DevlogTexts invented = {"Less.", "It was to take 777 us.", "None."};
  EXPECT_TRUE(contains(error_of([&] { logs.add(invented); }), "--why says '777 us'"));
  EXPECT_FALSE(std::filesystem::exists(logs.dir.path() / "docs/log" / "flash-mla-split-kv.md")) << "nothing is left";
}

TEST(Devlog, EntriesThatWillNotDoAreRefused) {
  Logs logs;
  EXPECT_TRUE(contains(error_of([&] { logs.add({" ", "b", "c"}); }), "--changed is empty"));
  logs.add();
  EXPECT_TRUE(contains(error_of([&] { logs.add(); }), "has an entry of cutile.mla.flash_mla_split_kv already"));
  DevlogRun other = logs.run;
  other.profile.kernel = "cute.mla.flash_mla";
  EXPECT_TRUE(contains(error_of([&] { add_devlog_entry(logs.dir.path(), kVersion, kTexts, other, std::nullopt); }),
                       "the profile is of cute.mla.flash_mla, not of"));
}

TEST(Devlog, LintFindsWhatIsWrong) {
  Logs logs;
  ASSERT_EQ(logs.lint().size(), 1u);
  EXPECT_TRUE(contains(logs.lint()[0], "cutile.mla.flash_mla_split_kv has no entry"));
  const auto path = logs.add();
  const std::string right = read_file(path);
  auto finds = [&](const std::string& from, const std::string& to, const std::string& expected) {
    std::string text = right;
    ASSERT_NE(text.find(from), std::string::npos) << from;
    text.replace(text.find(from), from.size(), to);
    write_file_atomic(path, text);
    ASSERT_EQ(logs.lint().size(), 1u) << expected;
    EXPECT_TRUE(contains(logs.lint()[0], expected)) << logs.lint()[0];
  };
  finds("| TFLOP/s | ", "| TFLOP/s | 9", "its measured half is not that of results/run.json");
  finds("- Bottleneck: latency-bound", "- Bottleneck: compute-bound", "its measured half is not");
  finds("- Insight:", "- Bottleneck: compute-bound\n- Insight:", "its measured half is not");
  finds("- Insight:", "\n| metric | value | before | change |\n\n- Insight:", "its measured half is not");
  finds("../../results/run.json", "../../results/gone.json", "gone.json");
  finds("- Insight: The merge is short.", "", "'Insight' is missing");
  finds("kernels/cutile/mla/flash_mla_split_kv/", "kernels/cute/mla/flash_mla_split_kv/",
        "its location is kernels/cutile");
  finds("## Version v0 of cutile.mla.flash_mla_split_kv", "## Notes", "has no entry");
  write_file_atomic(path, right + right);
  ASSERT_EQ(logs.lint().size(), 1u);
  EXPECT_TRUE(contains(logs.lint()[0], "another one stands in flash-mla-split-kv.md"));
  write_file_atomic(path, right + "\n## Version v7 of cutile.mla.gone\n");
  ASSERT_EQ(logs.lint().size(), 1u);
  EXPECT_TRUE(contains(logs.lint()[0], "there is no such version"));
}

// Figures come from profiles; where there can be none, from the records of benchmarks, and the entry says why.
TEST(Devlog, AnEntryWithoutAProfileSaysWhy) {
  Logs logs;
  logs.dir.write("results/bench.json", R"({"rows": [{"ours": {"burst_us": 174.561, "sustained_us": 180.24}}]})");
  DevlogVersion version = kVersion;
  const auto lint = [&](const std::string& measured, const std::string& more) {
    logs.dir.write(
        "docs/log/flash-mla-split-kv.md",
        fmt::format("# x\n\n## Version v0 of {}\n\n- Location: `{}`\n- Changed: a\n- Why: b\n- Measured: {}\n{}"
                    "- Insight: c\n",
                    kVersion.kernel, kVersion.directory, measured, more));
    const auto problems = lint_devlogs(logs.dir.path(), {version}, shipped_rules());
    EXPECT_LE(problems.size(), 1u);
    return problems.empty() ? "" : problems[0];
  };
  const std::string why = "- Not profiled: there is no GPU\n", record = "[record](../../results/bench.json)";
  EXPECT_TRUE(contains(lint("NVIDIA H200, 174.6 us", ""), "it has no profile: link one behind 'Measured:'"));
  EXPECT_TRUE(contains(lint("NVIDIA H200, 174.6 us in the " + record, ""), "it has no profile"));
  EXPECT_TRUE(contains(lint("", why), "'Measured' is missing"));
  EXPECT_EQ(lint("not yet", why), "");
  EXPECT_TRUE(
      contains(lint("174.6 us", why), "'Measured' says '174.6 us', but no record of this entry holds a figure"));
  EXPECT_EQ(lint("174.6 us, 0.1802 ms sustained, in the " + record, why), "");
  EXPECT_TRUE(contains(lint("174.7 us, in the " + record, why), "'174.7 us', which no record of this entry holds"));
  EXPECT_TRUE(contains(lint("174.6 us, in the [record](../../results/gone.json)", why), "gone.json"));
  EXPECT_TRUE(contains(lint("not yet", why + "\n| metric | value | before | change |\n"), "a table and no profile"));
  version.only_decodes = true;
  EXPECT_TRUE(contains(lint("not yet", why), "it is for MlaDecode: link the record of a benchmark"));
  EXPECT_EQ(lint("174.6 us, in the " + record, why), "");
}

// What `add` writes of a run that is not kept stands for a draft, until it is recorded.
TEST(Devlog, OnlyADraftMayKeepItsProfileElsewhere) {
  Logs logs;
  logs.run.path = logs.dir.write("out/run/profile.json", to_json(logs.run.profile).dump());
  const auto path = logs.add(kTexts, false);
  DevlogVersion version = kVersion;
  version.draft = true;
  EXPECT_EQ(lint_devlogs(logs.dir.path(), {version}, shipped_rules()), (std::vector<std::string>{}));
  ASSERT_EQ(logs.lint().size(), 1u);
  EXPECT_TRUE(contains(logs.lint()[0], "it has no profile"));
  // A link is all that has to be written by hand.
  std::string text = read_file(path);
  const std::string named = "`run/profile.json`, not kept here";
  text.replace(text.find(named), named.size(), "[profile](../../results/run.json)");
  write_file_atomic(path, text);
  EXPECT_EQ(logs.lint(), (std::vector<std::string>{}));
  text.replace(text.find("- Measured:"), text.find("- Insight:") - text.find("- Measured:"),
               "- Measured: [profile](../../results/run.json)\n- Baseline: [profile](../../results/before.json)\n"
               "- Not profiled: it was not\n");
  write_file_atomic(path, text);
  ASSERT_EQ(logs.lint().size(), 1u);
  EXPECT_EQ(refresh_devlogs(logs.dir.path(), shipped_rules()), (std::vector<std::string>{kVersion.kernel}));
  EXPECT_EQ(logs.lint(), (std::vector<std::string>{}));
  EXPECT_TRUE(contains(read_file(path), " | -20.0 % |"));
  EXPECT_FALSE(contains(read_file(path), "Not profiled"));
  // A profile of another kernel, or a baseline of another problem, is none of this entry.
  Profile other = logs.run.profile;
  other.problem["b"] = 7;
  write_file_atomic(logs.before.path, to_json(other).dump());
  ASSERT_EQ(logs.lint().size(), 1u);
  other.kernel = "cute.mla.flash_mla";
  write_file_atomic(logs.dir.path() / "results/run.json", to_json(other).dump());
  ASSERT_EQ(logs.lint().size(), 1u);
  EXPECT_TRUE(contains(logs.lint()[0], "results/run.json is a profile of cute.mla.flash_mla; link one of"));
}

// Entries were written before the table had a cold time and a verdict: they are right, and stay as they are.
TEST(Devlog, AnEarlierEntryIsRight) {
  Logs logs;
  const auto path = logs.add();
  const std::string now = read_file(path);
  const auto without = [](std::string text, const std::string& row) {
    const std::size_t begin = text.find(row);
    EXPECT_NE(begin, std::string::npos) << row;
    return text.erase(begin, text.find('\n', begin) + 1 - begin);
  };
  const std::string earlier = without(without(now, "| duration, cold, us "), "| verdict ");
  write_file_atomic(path, earlier);
  EXPECT_EQ(logs.lint(), (std::vector<std::string>{}));
  EXPECT_TRUE(refresh_devlogs(logs.dir.path(), shipped_rules()).empty());
  EXPECT_EQ(read_file(path), earlier);
  for (const std::string& wrong : {without(now, "| verdict "), without(now, "| duration, cold, us "),
                                   without(earlier, "| duration, burst, us ")}) {
    write_file_atomic(path, wrong);
    ASSERT_EQ(logs.lint().size(), 1u);
    EXPECT_TRUE(contains(logs.lint()[0], "its measured half is not that of")) << logs.lint()[0];
    EXPECT_EQ(refresh_devlogs(logs.dir.path(), shipped_rules()).size(), 1u);
    EXPECT_EQ(read_file(path), now);
  }
}

TEST(Devlog, WithoutABaselineThereIsNoVerdict) {
  Logs logs;
  const std::string text = read_file(logs.add(kTexts, false));
  EXPECT_TRUE(contains(text, "| duration, cold, us | "));
  EXPECT_FALSE(contains(text, "| verdict |"));
}

// A kernel that is measured again gets its new figures, and keeps what people wrote.
TEST(Devlog, FiguresFollowTheRecord) {
  Logs logs;
  const auto path = logs.add();
  EXPECT_TRUE(refresh_devlogs(logs.dir.path(), shipped_rules()).empty());
  const std::string before = read_file(path);
  Times& burst = logs.run.profile.timing.burst;
  burst.low_us = burst.median_us = burst.high_us = 12345.6;
  write_file_atomic(logs.run.path, to_json(logs.run.profile).dump());
  EXPECT_EQ(logs.lint().size(), 1u);
  EXPECT_EQ(refresh_devlogs(logs.dir.path(), shipped_rules()), (std::vector<std::string>{kVersion.kernel}));
  EXPECT_EQ(logs.lint(), (std::vector<std::string>{}));
  const std::string after = read_file(path);
  EXPECT_TRUE(contains(after, "| duration, burst, us | 12345.6 |"));
  EXPECT_TRUE(contains(after, "- Bottleneck: latency-bound"));
  EXPECT_EQ(after.substr(0, after.find("- Measured")), before.substr(0, before.find("- Measured")));
  EXPECT_EQ(after.substr(after.find("- Insight")), before.substr(before.find("- Insight")));
}

// Where people add items between those of the tool, or wrap lines as another system does, they keep them.
TEST(Devlog, WhatPeopleWroteStays) {
  Logs logs;
  const auto path = logs.add();
  std::string text = read_file(path);
  const std::string first = "- Roofline: 99.\n  And a second line.\n\n| what | is |\n|---|---|\n| a | b |\n",
                    second = "- Clocks: as found.\n\n```\n## No heading\n- Insight: none\n```\n";
  text.insert(text.find("- Bottleneck:"), first + "\n");
  text.insert(text.find("- Insight:"), second);
  write_file_atomic(path, text);
  EXPECT_EQ(logs.lint(), (std::vector<std::string>{}));
  Times& burst = logs.run.profile.timing.burst;
  burst.low_us = burst.median_us = burst.high_us = 12345.6;
  write_file_atomic(logs.run.path, to_json(logs.run.profile).dump());
  EXPECT_EQ(refresh_devlogs(logs.dir.path(), shipped_rules()), (std::vector<std::string>{kVersion.kernel}));
  EXPECT_EQ(logs.lint(), (std::vector<std::string>{}));
  const std::string after = read_file(path);
  EXPECT_TRUE(contains(after, first + "\n" + second + "- Insight: The merge is short.\n")) << after;
  std::string other_ends;
  for (const char letter : after) other_ends += letter == '\n' ? std::string("\r\n") : std::string(1, letter);
  write_file_atomic(path, other_ends);
  EXPECT_EQ(logs.lint(), (std::vector<std::string>{}));
}

TEST(Devlog, ARateOfZeroHasNoChange) {
  Logs logs;
  logs.before.profile.timing.burst.gbps = 0;
  EXPECT_TRUE(contains(read_file(logs.add()), "| 0.00 | - |\n"));
}

// What stands behind an entry is none of it, whatever the entry lacks; and one that is wrong stops no other.
TEST(Devlog, FiguresAreWrittenWithinTheirEntryAlone) {
  Logs logs;
  const auto path = logs.add();
  Times& burst = logs.run.profile.timing.burst;
  burst.low_us = burst.median_us = burst.high_us = 12345.6;
  write_file_atomic(logs.run.path, to_json(logs.run.profile).dump());
  const std::string before = read_file(path);
  const std::string first = before.substr(0, before.find("- Insight:")),
                    next = "\n## Version v7 of cute.mla.flash_mla_v7\n\n- Changed: all.\n- Insight: none.\n";
  write_file_atomic(path, first + next);
  EXPECT_TRUE(refresh_devlogs(logs.dir.path(), shipped_rules()).empty());
  EXPECT_EQ(read_file(path), first + next);
  const std::string gone = "# a: log\n\n## Version v0 of a.b.c\n\n- Measured: [profile](../../results/gone.json)\n";
  logs.dir.write("docs/log/" + std::string("a.md"), gone);
  write_file_atomic(path, before + next);
  EXPECT_EQ(refresh_devlogs(logs.dir.path(), shipped_rules()), (std::vector<std::string>{kVersion.kernel}));
  EXPECT_TRUE(contains(read_file(path), "| duration, burst, us | 12345.6 |"));
  EXPECT_TRUE(read_file(path).ends_with(next));
}

// A version with a log of its own, one of its design, and one of another language.
TEST(Devlog, EveryVersionFindsItsLog) {
  Logs logs;
  auto log = [&](const char* kernel, const char* version, const char* directory) {
    logs.run.profile.kernel = kernel;
    const auto path = add_devlog_entry(logs.dir.path(), {kernel, version, directory}, kTexts, logs.run, std::nullopt);
    return path.filename().string();
  };
  write_file_atomic(logs.dir.path() / "docs/log" / "cute-fast-v2.md", "# own\n");
  write_file_atomic(logs.dir.path() / "docs/log" / "cute-fast.md", "# of the design\n");
  write_file_atomic(logs.dir.path() / "docs/log" / "slow.md", "# of both languages\n");
  EXPECT_EQ(log("cute.mla.fast_v2", "v2", "kernels/cute/mla/fast/fast_v2"), "cute-fast-v2.md");
  EXPECT_EQ(log("cute.mla.fast_v3", "v3", "kernels/cute/mla/fast/fast_v3"), "cute-fast.md");
  EXPECT_EQ(log("cute.mla.slow", "v0", "kernels/cute/mla/slow/slow"), "slow.md");
  EXPECT_EQ(log("cutile.mla.new_one", "v0", "kernels/cutile/mla/new_one/new_one"), "new-one.md");
  EXPECT_TRUE(has_devlog(logs.dir.path(), "fast", 2));
  EXPECT_FALSE(has_devlog(logs.dir.path(), "fast", 4));
}

TEST(Next, ASummaryAndATask) {
  Profile before = recorded();
  for (double* time : {&before.timing.cold.median_us, &before.timing.cold.low_us, &before.timing.cold.high_us})
    *time *= 2;
  const NextInput input{.profile = recorded(),
                        .run = "results/run.json",
                        .baseline = before,
                        .design = "flash_mla_split_kv",
                        .directory = kVersion.directory,
                        .next_version = 3};
  const Json step = next_step(input, shipped());
  const Json& profile = step["profile"];
  EXPECT_EQ(profile["stages"].size(), input.profile.stages.size());
  EXPECT_EQ(profile["stages"][0]["tensor_pct"], input.profile.stages[0].signals.at("tensor_pct"));
  EXPECT_EQ(profile["bottleneck"], "latency-bound");
  const std::string cause = profile["root_cause"];
  EXPECT_LE(std::count(cause.begin(), cause.end(), '.'), 3) << "two sentences, and a number";
  ASSERT_EQ(profile["opportunities"].size(), 3u);
  EXPECT_EQ(profile["opportunities"][1]["id"], "O11");
  EXPECT_TRUE(contains(profile["opportunities"][1]["trigger"], "occupancy_pct = "));
  EXPECT_EQ(profile["baseline"][0]["metric"], "cold, us");
  EXPECT_TRUE(contains(profile["baseline"][0]["change"], "-50.0 %"));
  const Json& task = step["task"];
  EXPECT_EQ(task["task"], "cutile.mla.flash_mla_split_kv -> cutile.mla.flash_mla_split_kv_v3");
  EXPECT_EQ(task["language"], "cutile") << "grouping heads needs no warps by hand";
  EXPECT_EQ(task["optimizations"][0]["card"], "docs/knowledge/optimizations/head-grouping.md");
  EXPECT_EQ(task["start"], "./hypermla clone cutile.mla.flash_mla_split_kv v3");
  EXPECT_EQ(task["gates"][0]["command"], task["start"]);
  EXPECT_TRUE(contains(task["gates"][1]["command"], "verify cutile.mla.flash_mla_split_kv_v3"));
  const Json& same = task["gates"][5];  // what the next gate compares is of one problem
  EXPECT_EQ(same["gate"], "profiled as the run was");
  EXPECT_TRUE(contains(same["command"], "kernel cutile.mla.flash_mla_split_kv_v3 --b=32 --s=1 --t=4096 --h=128 "));
  EXPECT_TRUE(contains(same["command"], " --dtype=bfloat16 ")) << same;
  EXPECT_EQ(task["gates"][6]["command"],
            "./hypermla compare results/run.json <that run of cutile.mla.flash_mla_split_kv_v3>");
  const std::string text = render_next_step(step);
  for (const char* part :
       {"# Profile: cutile.mla.flash_mla_split_kv v0 | b=32 s=1 t=4096", "| tensor % |",
        "**Bottleneck: latency-bound**", "## Against the baseline", "# Task: ", "## Constraints",
        "Start with `./hypermla clone cutile.mla.flash_mla_split_kv v3`, a copy of `kernels/cutile/mla/",
        "- registers: below 128 a thread is the aim", "- b=32 s=16 t=4096: drafted tokens", "`./hypermla kb lint`"})
    EXPECT_TRUE(contains(text, part)) << part << "\n" << text;
}

TEST(Next, TheLanguageFollowsFromTheControlThatTheBestIdeaNeeds) {
  NextInput input{.profile = recorded(), .run = "run", .design = "flash_mla_split_kv"};
  std::erase_if(input.profile.opportunities, [](const Opportunity& one) { return one.id != "O11"; });
  const Json task = next_step(input, shipped())["task"];
  EXPECT_EQ(task["language"], "cute");
  EXPECT_TRUE(contains(task["why_language"], "O11"));
  EXPECT_EQ(task["task"], "cutile.mla.flash_mla_split_kv -> cute.mla.flash_mla_split_kv_v1");
  EXPECT_FALSE(task.contains("start")) << "there is nothing to copy in that language";
  EXPECT_TRUE(contains(task["gates"][0]["command"], "verify cute.mla.flash_mla_split_kv_v1"));
  EXPECT_TRUE(contains(render_next_step(next_step(input, shipped())),
                       "Start by hand with cute.mla.flash_mla_split_kv_v1: a copy stays in its language"));
  input.bases = {{"cute", "cute.mla.flash_mla_split_kv_v4"}, {"cutile", "cutile.mla.flash_mla_split_kv"}};
  input.next_version = 5;
  const Json step = next_step(input, shipped());
  EXPECT_EQ(step["task"]["start"], "./hypermla clone cute.mla.flash_mla_split_kv_v4 v5");
  EXPECT_EQ(step["task"]["gates"][0]["command"], step["task"]["start"]);
  EXPECT_TRUE(contains(render_next_step(step),
                       "Start with `./hypermla clone cute.mla.flash_mla_split_kv_v4 v5`; a copy "
                       "stays in its language"));
}

}  // namespace
}  // namespace hypermla::devlog_test
