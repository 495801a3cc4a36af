// flash_mla_v4 for Hopper, few rows over single tokens, run as C++ threads.
#include "latent_case.h"

#include "mla/flash_mla/flash_mla_v4/flash_mla_v4.cuh"

namespace hypermla::cute {
namespace {

using latent_case::Case;

constexpr LatentProblem of_fp8(int token_bytes, bool shards = false, bool causal = true) {
  LatentProblem at = latent_case::problem_of(1, shards);  // pages of any size: tokens are gathered
  at.fp8 = token_bytes;
  at.causal = causal;
  return at;
}

void check(const Case& of) {
  constexpr LatentProblem of_656 = of_fp8(656), of_576 = of_fp8(576), of_16_bits = of_fp8(0);
  const double difference = of.check(16, 2, 384, [&](const LatentArguments& with) {
    of.fp8 == 656   ? flash_mla_v4<of_656, {}>(with)
    : of.fp8 == 576 ? flash_mla_v4<of_576, {}>(with)
                    : flash_mla_v4<of_16_bits, {}>(with);
  });
  EXPECT_LE(difference, 1e-5);  // also of queries in e4m3, whose outputs may differ by more elsewhere
}

TEST(HopperKernels, FlashMlaV4IsTheDefinition) {
  check(Case{64, 4, 656});
  check(Case{16, 3, 576});
  check(Case{1, 3});
  Case own{1, 3};
  own.before = {2, 0, 1, 3, 0};  // token blocks that are attended to elsewhere
  check(own);
  Case holes{1, 4, 656, true};
  holes.with_sinks = true;
  check(holes);
  holes.fp8 = 0;
  check(holes);
  holes.fp8 = 656;
  Case one{1, 16, 656, true};
  one.lengths = {770, 20, 1000, 64};  // twice round the ring and further
  one.queries = {1, 1, 1, 1};
  check(one);
  one.fp8 = 576;
  one.page = 16;
  one.fp8_queries = true;
  check(one);
  Case rows{1, 4, 576};
  rows.fp8_queries = rows.two_axes = true;
  check(rows);
  rows.sharp = 0;
  check(rows);
  rows.fp8 = 656;
  rows.fp8_queries = false;
  check(rows);
  constexpr LatentProblem of_lists = of_fp8(656, false, false);  // of chosen tokens
  holes.causal = false;
  holes.check(16, 2, 384, [](const LatentArguments& with) { flash_mla_v4<of_lists, {}>(with); });
}

TEST(HopperKernels, FlashMlaV4AttendsToItsShardOfAContext) {
  constexpr LatentProblem of_656 = of_fp8(656, true);
  const auto kernel = [](const LatentArguments& with) { flash_mla_v4<of_656, {}>(with); };
  Case whole{64, 2, 656};
  whole.parts = {1, 1, 1, 1, 3, 1};
  whole.lengths = {258, 3, 131, 1, 514, 0};
  whole.queries = {8, 3, 5, 1, 7, 2};
  whole.of_shard(0, 2, 1).check(16, 2, 384, kernel);
  whole.of_shard(1, 2, 16).check(16, 2, 384, kernel);
  constexpr LatentProblem of_16_bits = of_fp8(0, true);
  whole.page = 1;
  whole.fp8 = 0;
  whole.of_shard(1, 2, 1).check(16, 2, 384, [](const LatentArguments& with) { flash_mla_v4<of_16_bits, {}>(with); });
}

TEST(HopperKernels, FlashMlaV4MergesParts) {
  Case few{1, 4, 656};  // two, three and seven parts
  few.lengths = {150, 200, 450};
  few.queries = {4, 1, 3};
  few.parts = {2, 3, 7};
  few.workers = 2;
  check(few);
  few.fp8 = 576;
  check(few);
  few.fp8_queries = true;
  check(few);
  few.fp8_queries = false;
  few.fp8 = 0;
  few.with_sinks = true;
  check(few);
  few.lengths = {330, 400, 1600};  // more parts than lanes that share rows; a team for each chunk
  few.parts = {5, 6, 25};
  check(few);
}

}  // namespace
}  // namespace hypermla::cute
