// flash_mla_v3 for Hopper over caches in FP8 and queries in bfloat16, run as C++ threads.
#include "latent_case.h"

#include "mla/flash_mla/flash_mla_v3/flash_mla_v3.cuh"

namespace hypermla::cute {
namespace {

using latent_case::Case;

constexpr LatentProblem of_fp8(int token_bytes, bool shards = false, bool causal = true) {
  LatentProblem at = latent_case::problem_of(1, shards);  // pages of any size: tokens are gathered
  at.fp8 = token_bytes;
  at.causal = causal;
  return at;
}

template <int rows>
void check(const Case& of) {
  constexpr LatentProblem of_656 = of_fp8(656), of_576 = of_fp8(576);
  of.check(rows, 2, 512, [&](const LatentArguments& with) {
    of.fp8 == 656 ? flash_mla_v3<of_656, {rows}>(with) : flash_mla_v3<of_576, {rows}>(with);
  });
}

TEST(HopperKernels, FlashMlaV3IsTheDefinition) {
  check<64>(Case{64, 16, 656});
  check<32>(Case{16, 5, 576});
  Case holes{1, 16, 656, true};
  holes.with_sinks = true;
  check<64>(holes);
  Case few{1, 8, 656, true};
  few.lengths = {770, 20, 1000, 64};  // once round the ring and further
  check<32>(few);
  check<64>(Case{128, 16, 576});
  constexpr LatentProblem of_lists = of_fp8(656, false, false);  // of chosen tokens
  holes.causal = false;
  holes.check(64, 2, 512, [](const LatentArguments& with) { flash_mla_v3<of_lists, {}>(with); });
}

TEST(HopperKernels, FlashMlaV3AttendsToItsShardOfAContext) {
  constexpr LatentProblem of_656 = of_fp8(656, true);
  const auto kernel = [](const LatentArguments& with) { flash_mla_v3<of_656, {}>(with); };
  Case whole{64, 5, 656};
  whole.parts = {1, 1, 1, 1, 3, 1};
  whole.lengths = {258, 3, 131, 1, 514, 0};
  whole.queries = {8, 3, 5, 1, 12, 2};
  whole.of_shard(0, 2, 1).check(64, 2, 512, kernel);
  whole.of_shard(1, 2, 16).check(64, 2, 512, kernel);
}

TEST(HopperKernels, FlashMlaV3MergesParts) {
  Case few{1, 16, 656};  // two, three and seven parts
  few.lengths = {150, 200, 450};
  few.queries = {4, 1, 3};
  few.parts = {2, 3, 7};
  few.workers = 2;
  check<64>(few);
  few.with_sinks = true;
  few.queries = {2, 1, 2};
  few.fp8 = 576;
  check<32>(few);
  // Four chunks of a warp at once, two one after the other, a team for each.
  Case many = few;
  many.lengths = {330, 650, 1600};
  many.queries = {4, 2, 1};
  many.parts = {5, 10, 25};
  check<64>(many);
}

}  // namespace
}  // namespace hypermla::cute
