// flash_mla for Hopper over requests of several queries, run as C++ threads.
#include "latent_case.h"

#include "mla/flash_mla/flash_mla/flash_mla.cuh"

namespace hypermla::cute {
namespace {

TEST(HopperKernels, FlashMlaIsTheDefinition) {
  using latent_case::Case;
  constexpr LatentProblem of_16 = latent_case::problem_of(16), of_64 = latent_case::problem_of(64);
  const auto with_16 = [](const LatentArguments& with) { flash_mla<of_16, {}>(with); };
  const auto with_64 = [](const LatentArguments& with) { flash_mla<of_64, {}>(with); };
  Case{16, 5}.check<LatentArguments>(64, 2, 384, with_16);
  Case{64, 16}.check<LatentArguments>(64, 2, 384, with_64);
}

}  // namespace
}  // namespace hypermla::cute
