// flash_mla for Hopper over caches in FP8, run as plain C++.
#include "latent_case.h"

#include "mla/flash_mla/flash_mla/flash_mla.cuh"

namespace hypermla::cute {
namespace {

constexpr LatentProblem of_fp8(int token_bytes) {
  LatentProblem at = latent_case::problem_of(1);  // whatever its pages: tokens are gathered
  at.fp8 = token_bytes;
  return at;
}

TEST(HopperKernels, FlashMlaWidensTokens) {
  using latent_case::Case;
  constexpr LatentProblem of_656 = of_fp8(656), of_576 = of_fp8(576);
  const auto with_656 = [](const LatentArguments& with) { flash_mla<of_656, {}>(with); };
  const auto with_576 = [](const LatentArguments& with) { flash_mla<of_576, {}>(with); };
  Case{64, 16, 656}.check(64, 2, 512, with_656);
  Case{16, 5, 576}.check(64, 2, 512, with_576);
  Case{1, 16, 656, true}.check(64, 2, 512, with_656);
}

}  // namespace
}  // namespace hypermla::cute
