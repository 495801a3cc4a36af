// The calls of hypermla.h that check, profile and verify a kernel on inputs of their own.
#include <gtest/gtest.h>

#include <filesystem>

#include "hypermla/hypermla.h"
#include "support.h"

namespace hypermla::runs_test {
namespace {
using testing_support::contains;
using testing_support::error_of;

const std::map<std::string, std::string> kSmall = {{"b", "1"}, {"s", "2"}, {"h", "2"}};

TEST(Runs, CheckKernelComparesWithTheReference) {
  const CheckSummary summary =
      check_kernel("output_decompression", kSmall, DeviceHandle("cpu"), {.language = "cutile", .seed = 7});
  EXPECT_TRUE(summary.passed);
  EXPECT_EQ(summary.kernel, "cutile.mla.output_decompression");
  EXPECT_EQ(summary.seed, 7u);
  ASSERT_FALSE(summary.outputs.empty());
  for (const CheckedOutput& one : summary.outputs) {
    EXPECT_EQ(one.output, "o");
    EXPECT_TRUE(one.passed) << one.inputs;
    EXPECT_LT(one.relative_error, 0.01) << one.inputs;
  }
  EXPECT_TRUE(contains(error_of([] { check_kernel("output_decompresion", kSmall, DeviceHandle("cpu")); }),
                       "did you mean output_decompression?"));
  EXPECT_TRUE(contains(error_of([] {
                         check_kernel("output_decompression", {{"t", "2"}}, DeviceHandle("cpu"));
                       }),
                       "'t'"));
}

TEST(Runs, ProfileKernelMeasuresAndWritesTheRun) {
  const testing_support::TempDir dir;
  const std::string out = dir.path() / "run";
  const ProfileSummary summary = profile_kernel("output_decompression", kSmall, "event", DeviceHandle("cpu"), {},
                                                {.out_dir = out, .bench_runs = 1});
  EXPECT_EQ(summary.directory, out);
  EXPECT_TRUE(std::filesystem::exists(dir.path() / "run/profile.json"));
  EXPECT_TRUE(std::filesystem::exists(dir.path() / "run/report.md"));
  EXPECT_GT(summary.burst.median_us, 0);
  EXPECT_TRUE(summary.bottleneck.has_value());
  ASSERT_EQ(summary.stages.size(), 1u);
  EXPECT_EQ(summary.stages[0].name, "output_decompression");
  EXPECT_TRUE(contains(error_of([] { profile_kernel("output_decompression", kSmall, "events", DeviceHandle("cpu")); }),
                       "unknown profiling mode 'events'"));
}

// A case takes longer than a unit test may, since all kernels of a version are compiled before the first:
// tests/package/python_test.py waits for that.
TEST(Runs, VerifyKernelsLooksBeforeItRuns) {
  const testing_support::TempDir dir;
  const DeviceHandle cpu("cpu");
  const auto refusal = [&](const VerifyOptions& options) {
    return error_of([&] { verify_kernels("output_decompression", cpu, options); });
  };
  EXPECT_TRUE(contains(refusal({.version = "v77"}), "no version 'v77'"));
  EXPECT_TRUE(contains(refusal({.version = "v0", .language = "cute"}), "is written for Hopper GPUs"));
  EXPECT_TRUE(contains(refusal({.record = dir.write("verified.json", "no JSON")}), "verified.json"));
  EXPECT_TRUE(verify_kernels("", cpu, {.language = "cute"}).empty()) << "of all, those that run there";
}

}  // namespace
}  // namespace hypermla::runs_test
