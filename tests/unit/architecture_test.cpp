// What plans ask of an architecture, against what each of them is known to be.
#include "hypermla/device/architecture.h"

#include <gtest/gtest.h>

#include "hypermla/plan/registry.h"

namespace hypermla {
namespace {

TEST(Architectures, SayWhatPlansAsk) {
  KernelEntry of_cute, of_cutile;
  of_cute.language = "cute", of_cutile.language = "cutile";
  std::string large, small_blackwell, with_more_than_100_kb, cute;
  for (const Architecture& one : architectures()) {
    const std::string name(one.name);
    const Target target = Target::of_arch(name);
    EXPECT_TRUE(target.is_gpu() && target.processors > 0) << name;
    if (target.has_large_blocks()) large += name + " ";
    if (target.is_small_blackwell()) small_blackwell += name + " ";
    if (one.shared_kb > 100) with_more_than_100_kb += name + " ";
    if (of_cute.runs_on(name)) cute += name + " ";
    EXPECT_TRUE(of_cutile.runs_on(name)) << name;
  }
  EXPECT_EQ(large, "sm_90 sm_100 sm_103 ");
  EXPECT_EQ(small_blackwell, "sm_120 sm_121 ");
  EXPECT_EQ(with_more_than_100_kb, "sm_80 sm_87 sm_90 sm_100 sm_103 ");
  EXPECT_EQ(cute, "sm_90 ");
}

TEST(Architectures, OthersAreTakenForTheSmallest) {
  for (const char* const arch : {"sm_75", "sm_999", "x86-64-v4"}) {
    const Target target{arch, 20};
    EXPECT_EQ(target.is_gpu(), arch[0] == 's');
    EXPECT_FALSE(target.has_large_blocks() || target.is_small_blackwell() || architecture(arch).runs_cute) << arch;
  }
}

}  // namespace
}  // namespace hypermla
