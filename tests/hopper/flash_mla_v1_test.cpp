// flash_mla_v1 for Hopper over requests of several queries, run as C++ threads.
#include "latent_case.h"

#include "mla/flash_mla/flash_mla_v1/flash_mla_v1.cuh"

namespace hypermla::cute {
namespace {

TEST(HopperKernels, FlashMlaV1IsTheDefinition) {
  using latent_case::Case;
  constexpr LatentProblem of_16 = latent_case::problem_of(16), of_64 = latent_case::problem_of(64);
  constexpr FlashMlaV1Tiling narrow{.rows = 16}, wide{.rows = 32};
  const auto with_16 = [](const LatentArguments& with) { flash_mla_v1<of_16, narrow>(with); };
  const auto with_64 = [](const LatentArguments& with) { flash_mla_v1<of_64, wide>(with); };
  Case{16, 3}.check<LatentArguments>(16, 8, 384, with_16);
  Case{64, 8}.check<LatentArguments>(32, 8, 384, with_64);
}

}  // namespace
}  // namespace hypermla::cute
