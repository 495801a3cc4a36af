// How the hybrid with two kernels at once divides a GPU between them, and what it refuses.
#include <gtest/gtest.h>

#include "hypermla/plan/configure.h"
#include "hypermla/plan/registry.h"
#include "support.h"

namespace hypermla::concurrent_plan_test {
namespace {
using testing_support::contains;
using testing_support::error_of;

std::unique_ptr<KernelPlan> v4(const Json& problem, const Target& target = {}) {
  std::unique_ptr<KernelPlan> plan = Registry::instance().find("cutile.mla.mla_var6_plus", "v4").make();
  plan->target = target;
  set_problem(*plan, problem);
  return plan;
}
// The multiprocessors that the blocks of a kernel take.
int processors(const TiledKernel& kernel) {
  return kernel.tiling().at("blocks").get<int>() / kernel.tiling().at("occupancy").get<int>();
}

TEST(ConcurrentPlan, DefaultBudgetsFillTheDevice) {
  for (const int s : {1, 16, 32, 128})
    for (const int n : {64, 1000, 2048, 4000})
      for (const int prefixes : {0, 1}) {
        const auto plan = v4({{"b", 32}, {"s", s}, {"t", 4096}, {"n", n}, {"prefixes", prefixes}});
        plan->validate();
        const auto executable = plan_empty(*plan);
        const std::vector<ConcurrentKernels*> groups = executable->groups();
        ASSERT_EQ(groups.size(), 1u);
        const std::vector<TiledKernel*> kernels = groups[0]->kernels();
        EXPECT_EQ(processors(*kernels[0]) + processors(*kernels[1]), 132) << "s " << s << " n " << n;
        EXPECT_EQ(groups[0]->partition(), (std::vector<int>{processors(*kernels[0]), processors(*kernels[1])}));
        EXPECT_EQ(processors(*kernels[1]) % 8, 0) << "what the hardware splits by";
        // The tuner's tilings keep the budgets.
        for (TiledKernel* kernel : kernels)
          for (const Json& tiling : kernel->candidates()) {
            kernel->set_tiling(tiling);
            EXPECT_NO_THROW(executable->validate_tilings()) << tiling;
          }
      }
}

TEST(ConcurrentPlan, MoreDecompressedTokensTakeMoreOfTheDevice) {
  int before = 0;
  for (const int n : {64, 1000, 2048, 3000, 4000}) {
    const auto executable = plan_empty(*v4({{"b", 32}, {"s", 32}, {"t", 4096}, {"n", n}}));
    const int now = processors(*executable->kernels()[1]);
    EXPECT_GE(now, before) << n;
    before = now;
  }
  EXPECT_GE(before, 88);
}

TEST(ConcurrentPlan, OnePathNeedsNoGroup) {
  for (const int n : {0, 500}) {
    const auto executable = plan_empty(*v4({{"b", 2}, {"s", 1}, {"t", 500}, {"n", n}, {"h", 16}}));
    EXPECT_TRUE(executable->groups().empty());
    const std::vector<TiledKernel*> launched = launched_kernels(*executable);
    ASSERT_EQ(launched.size(), 2u) << "one path and the combination";
    EXPECT_EQ(processors(*launched[0]), 132);
  }
}

TEST(ConcurrentPlan, BudgetsThatDoNotFitAreRefused) {
  auto refusal = [](const Json& tiling) {
    const auto plan = v4({{"b", 32}, {"s", 16}, {"t", 4096}, {"n", 1000}});
    from_json(plan->tiling_fields(), tiling);
    return error_of([&] { plan->validate(); });
  };
  EXPECT_EQ(refusal({{"partition", false}, {"latent_blocks", 100}, {"decompressed_blocks", 64}}), "");
  EXPECT_EQ(refusal({{"partition", false}, {"latent_blocks", 100}, {"decompressed_blocks", 66}}),
            "the blocks of 100 mla_var6_plus_v4_latent and 66 mla_var6_plus_v4_decompressed need 133 SMs at once, and "
            "there are "
            "132; lower their budgets");
  EXPECT_EQ(refusal({{"partition", false}, {"latent_blocks", 33}, {"decompressed_blocks", 66}}), "")
      << "flagged, not refused";
  EXPECT_EQ(refusal({{"partition", true}, {"latent_blocks", 100}, {"decompressed_blocks", 64}}), "");
  EXPECT_EQ(
      refusal({{"partition", true}, {"latent_blocks", 99}, {"decompressed_blocks", 66}}),
      "mla_var6_plus_v4_latent has 99 blocks, but its partition of 92 SMs holds 92; give it fewer blocks or more SMs");
  EXPECT_TRUE(contains(refusal({{"decompressed_Bs", 8}}), "a unit needs at least 16 rows"));
}

// On a CPU one path runs after the other: each has all cores, and no budget binds.
TEST(ConcurrentPlan, OnACpuBothHaveAllOfIt) {
  const auto plan = v4({{"b", 2}, {"s", 3}, {"t", 500}, {"n", 100}, {"h", 16}}, {"x86-64-v3", 6});
  plan->validate();
  const auto executable = plan_empty(*plan);
  EXPECT_TRUE(executable->groups()[0]->partition().empty());
  EXPECT_EQ(processors(*executable->kernels()[0]), 6);
  EXPECT_EQ(processors(*executable->kernels()[1]), 6);
}

}  // namespace
}  // namespace hypermla::concurrent_plan_test
