// flash_mla_v2 for Hopper over caches in FP8, run as C++ threads.
#include "latent_case.h"

#include "mla/flash_mla/flash_mla_v2/flash_mla_v2.cuh"

namespace hypermla::cute {
namespace {

constexpr LatentProblem of_fp8() {
  LatentProblem at = latent_case::problem_of(1);  // whatever its pages: tokens are gathered
  at.fp8 = true;
  return at;
}

TEST(HopperKernels, FlashMlaV2WidensTokens) {
  using latent_case::Case;
  constexpr LatentProblem problem = of_fp8();
  constexpr FlashMlaV2Tiling deepseek{.token_bytes = 656}, one_scale{.token_bytes = 576};
  const auto with_656 = [](const Fp8Arguments& with) { flash_mla_v2<problem, deepseek>(with); };
  const auto with_576 = [](const Fp8Arguments& with) { flash_mla_v2<problem, one_scale>(with); };
  Case{64, 16, 656}.check<Fp8Arguments>(64, 2, 512, with_656);
  Case{16, 5, 576}.check<Fp8Arguments>(64, 2, 512, with_576);
  Case{1, 16, 656, true}.check<Fp8Arguments>(64, 2, 512, with_656);
}

}  // namespace
}  // namespace hypermla::cute
