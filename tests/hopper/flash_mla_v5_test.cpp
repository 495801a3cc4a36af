// flash_mla_v5 for Hopper, clusters of two blocks over caches in FP8, run as C++ threads.
#include "latent_case.h"

#include "mla/flash_mla/flash_mla_v5/flash_mla_v5.cuh"

namespace hypermla::cute {
namespace {

using latent_case::Case;

constexpr LatentProblem of_fp8(bool shards = false, bool causal = true) {
  LatentProblem at = latent_case::problem_of(1, shards);  // pages of any size: tokens are gathered
  at.fp8 = 656;
  at.causal = causal;
  return at;
}

template <LatentProblem problem>
void check(Case of) {
  of.cluster = 2;
  {
    SCOPED_TRACE("tiling {1, 12}");
    of.check(kFlashMlaV5Rows, 1, kFlashMlaV5Threads, [](const LatentArguments& with) {
      flash_mla_v5<problem, {1, 12}>(with);
    });
  }
  {
    SCOPED_TRACE("tiling {2, 7}");
    of.check(kFlashMlaV5Rows, 1, kFlashMlaV5Threads, [](const LatentArguments& with) {
      flash_mla_v5<problem, {2, 7}>(with);
    });
  }
  {
    SCOPED_TRACE("tiling {1, 0}");
    of.check(kFlashMlaV5Rows, 1, kFlashMlaV5Threads, [](const LatentArguments& with) {
      flash_mla_v5<problem, {1, 0}>(with);
    });
  }
}

TEST(HopperKernels, FlashMlaV5IsTheDefinition) {
  constexpr LatentProblem plain = of_fp8(), of_lists = of_fp8(false, false);
  Case few{64, 32, 656};
  few.lengths = {258, 3, 0};
  few.queries = {4, 3, 1};
  few.parts = {1, 1, 1};
  check<plain>(few);
  Case holes{1, 16, 656, true};
  holes.with_sinks = true;
  holes.lengths = {770, 20, 450, 64};  // several times round the ring
  holes.queries = {8, 5, 1, 2};
  holes.parts = {1, 1, 1, 1};
  check<plain>(holes);
  holes.causal = false;
  check<of_lists>(holes);
}

TEST(HopperKernels, FlashMlaV5AttendsToItsShardOfAContext) {
  constexpr LatentProblem shards = of_fp8(true);
  Case whole{64, 10, 656};
  whole.parts = {1, 3, 1};
  whole.lengths = {258, 514, 0};
  whole.queries = {8, 12, 2};
  check<shards>(whole.of_shard(0, 2, 1));
  check<shards>(whole.of_shard(1, 2, 16));
}

TEST(HopperKernels, FlashMlaV5MergesParts) {
  constexpr LatentProblem plain = of_fp8();
  Case few{1, 32, 656};  // two, three and seven parts
  few.lengths = {150, 200, 450};
  few.queries = {4, 1, 3};
  few.parts = {2, 3, 7};
  few.workers = 2;
  check<plain>(few);
}

}  // namespace
}  // namespace hypermla::cute
