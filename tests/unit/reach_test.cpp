// What kernels reach on a device, and the only figures that were published of another card than the H200.
#include "hypermla/tune/reach.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "hypermla/plan/choice.h"
#include "support.h"

namespace hypermla::reach_test {
namespace {
using testing_support::checkout;

const DeviceTable& devices() {
  static const DeviceTable table = DeviceTable::load(checkout() / "conf/devices.json");
  return table;
}
const PlannedDevice& rtx5090() {
  static const PlannedDevice device{{"sm_120", 170}, devices().find("NVIDIA GeForce RTX 5090")};
  return device;
}

// b=32, t=4096, bfloat16, microseconds: what the original HyperMLA measured there (docs/predictions.md). MLAvar6+ is V2
// at s = 1 and V3 at s = 16.
struct Published {
  int s;
  double latent, decompressed, hybrid;
  const char* version;
};
const Published kPublished[] = {{1, 419, 6781, 829, "v2"}, {16, 5161, 6727, 4444, "v3"}};

TEST(Rtx5090, TakesWhatWasPublished) {
  for (const Published& one : kPublished) {
    std::map<Path, double> best;
    double hybrid = 0;
    for (const RankedKernel& ranked : rank_kernels(Registry::instance(), {.b = 32, .s = one.s}, rtx5090())) {
      const double us = ranked.sustained.seconds * 1e6;
      if (!best.count(ranked.path)) best[ranked.path] = us;  // the ranking begins with the fastest
      if (ranked.path == Path::hybrid && ranked.entry.version == one.version) hybrid = us;
    }
    EXPECT_NEAR(best[Path::latent] / one.latent, 1, 0.15) << "s=" << one.s;
    EXPECT_NEAR(best[Path::decompressed] / one.decompressed, 1, 0.15) << "s=" << one.s;
    EXPECT_NEAR(hybrid / one.hybrid, 1, 0.15) << "s=" << one.s;
  }
}

// Latent below hybrid below decompressed for one query, the hybrid first for 16.
TEST(Rtx5090, PathsAreRankedAsPublished) {
  for (const Published& one : kPublished) {
    std::vector<Path> order;
    for (const RankedKernel& ranked : rank_kernels(Registry::instance(), {.b = 32, .s = one.s}, rtx5090()))
      if (std::find(order.begin(), order.end(), ranked.path) == order.end()) order.push_back(ranked.path);
    const std::vector<Path> published = one.s == 1 ? std::vector{Path::latent, Path::hybrid, Path::decompressed}
                                                   : std::vector{Path::hybrid, Path::latent, Path::decompressed};
    EXPECT_EQ(order, published) << "s=" << one.s;
  }
}

// At s = 16 both kinds of tokens are used there, which is what the original's flagship does.
TEST(Rtx5090, TheFlagshipInterpolates) {
  const auto plan = configure({Registry::instance().find("cutile.mla.mla_var6_plus_v4")}, rtx5090(),
                              {.problem = {{"b", 32}, {"s", 16}, {"t", 4096}}});
  const int n = plan.chosen.at("n");
  EXPECT_GT(n, 1000);
  EXPECT_LT(n, 3000);
}

TEST(Reach, IsPartOfTheCeilingsAndOneWhereItIsNotKnown) {
  const Ceilings there = ceilings_of(rtx5090().spec, DType::bfloat16, Load::burst);
  EXPECT_LT(there.latent.tensor, 1);
  EXPECT_EQ(there.latent.memory, 1);
  EXPECT_FALSE(there.tall_tiles);
  const Ceilings h200 = ceilings_of(devices().find("NVIDIA H200"), DType::bfloat16, Load::burst);
  for (const Reach& reach : {h200.latent, h200.decompressed, h200.hybrid}) {
    EXPECT_EQ(reach.tensor, 1);
    EXPECT_EQ(reach.memory, 1);
    EXPECT_EQ(reach.overlap, 1);
  }
  EXPECT_TRUE(h200.tall_tiles);
}

// Kernels of one path are slower by its number, those of another path are as they were.
TEST(Reach, SlowsThePathThatItIsOf) {
  DeviceSpec slow = devices().find("NVIDIA H200");
  slow.measured["reach"] = {{"latent", {{"tensor", 0.5}}}};
  const auto seconds = [](const char* kernel, const DeviceSpec& spec) {
    const auto plan = configure({Registry::instance().find(kernel)}, {{}, devices().find("NVIDIA H200")},
                                {.offered = {{"b", 32}, {"s", 16}, {"t", 4096}}})
                          .plan;
    return plan->time(ceilings_of(spec, plan->dtype(), Load::burst)).seconds;
  };
  const DeviceSpec& as_it_is = devices().find("NVIDIA H200");
  for (const char* kernel : {"cute.mla.flash_mla", "cutile.mla.flash_mla", "cutile.mla.flash_mla_split_kv"})
    EXPECT_NEAR(seconds(kernel, slow) / seconds(kernel, as_it_is), 2, 0.1) << kernel;
  for (const char* kernel : {"cute.mla.flash_attention", "cutile.mla.flash_attention"})
    EXPECT_EQ(seconds(kernel, slow), seconds(kernel, as_it_is)) << kernel;
}

TEST(Reach, FollowsFromAMeasuredTime) {
  const auto seconds = [](double reach) { return 1 / reach + 0.25; };  // and launches
  EXPECT_NEAR(reach_of_time(seconds, 2.25).value(), 0.5, 1e-3);
  EXPECT_NEAR(reach_of_time(seconds, 0.75).value(), 2, 1e-2);
  EXPECT_FALSE(reach_of_time(seconds, 0.2)) << "the rest alone takes longer";
  EXPECT_FALSE(reach_of_time(seconds, 1000));
  EXPECT_FALSE(reach_of_time([](double) { return 1.0; }, 1)) << "something else decides";
}

}  // namespace
}  // namespace hypermla::reach_test
