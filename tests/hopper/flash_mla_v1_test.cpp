// flash_mla_v1 for Hopper over requests of several queries, run as plain C++.
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
  Case{16, 3}.check(16, 8, 384, with_16);
  Case{64, 8}.check(32, 8, 384, with_64);
}

TEST(HopperKernels, FlashMlaV1AttendsToItsShardOfAContext) {
  using latent_case::Case;
  constexpr LatentProblem of_16 = latent_case::problem_of(16, true), of_64 = latent_case::problem_of(64, true);
  constexpr FlashMlaV1Tiling narrow{.rows = 16}, wide{.rows = 32};
  const auto with_16 = [](const LatentArguments& with) { flash_mla_v1<of_16, narrow>(with); };
  const auto with_64 = [](const LatentArguments& with) { flash_mla_v1<of_64, wide>(with); };
  // Limits at the ends of turns and blocks, drafts in the turn of another, requests of which a shard has nothing.
  Case whole{16, 3};
  whole.parts = {1, 1, 1, 1, 3, 1};
  whole.lengths = {258, 3, 131, 1, 514, 0};
  whole.queries = {5, 3, 4, 1, 5, 2};
  for (const int turn : {1, 16})
    for (const int shard : {0, 1}) whole.of_shard(shard, 2, turn).check(16, 8, 384, with_16);
  whole.page = 64;
  whole.queries = {10, 3, 5, 1, 9, 2};
  whole.of_shard(1, 3, 4).check(32, 8, 384, with_64);
}

TEST(HopperKernels, FlashMlaV1AttendsToWhatIsBehindASharedPrefix) {
  constexpr LatentProblem of_16 = latent_case::problem_of(16), of_64 = latent_case::problem_of(64);
  constexpr FlashMlaV1Tiling narrow{.rows = 16}, wide{.rows = 32};
  latent_case::Case own{16, 3};
  own.lengths = {258, 131, 514, 200};
  own.queries = {5, 3, 2, 1};
  own.before = {3, 2, 2, 0};  // two blocks are left, the new tokens alone, many in parts, all
  own.parts = {1, 1, 3, 1};
  own.check(16, 8, 384, [](const LatentArguments& with) { flash_mla_v1<of_16, narrow>(with); });
  own.page = 64;
  own.check(32, 8, 384, [](const LatentArguments& with) { flash_mla_v1<of_64, wide>(with); });
}

TEST(HopperKernels, FlashMlaV1MergesPartsOfManyTiles) {
  using latent_case::Case;
  constexpr LatentProblem of_64 = latent_case::problem_of(64);
  constexpr FlashMlaV1Tiling narrow{.rows = 16}, wide{.rows = 32};
  const auto narrow_of = [](const LatentArguments& with) { flash_mla_v1<of_64, narrow>(with); };
  const auto wide_of = [](const LatentArguments& with) { flash_mla_v1<of_64, wide>(with); };
  // Teams of 8, 2, 4, 1 and 8 warps after each other; by one thread block, and by some that leave their shares to the
  // last.
  const std::vector<int> lengths = {1600, 450, 830, 140, 1700}, queries = {2, 1, 2, 1, 3}, parts = {25, 7, 13, 2, 26};
  Case{64, 4, 0, false, lengths, queries, parts, 1}.check(16, 8, 384, narrow_of);
  Case{64, 4, 0, false, lengths, queries, parts, 3}.check(16, 8, 384, narrow_of);
  Case wide_tiles{64, 8, 0, false, {900, 330, 200, 700}, {4, 1, 2, 3}, {13, 5, 3, 10}, 2};
  wide_tiles.with_sinks = true;
  wide_tiles.check(32, 8, 384, wide_of);
}

// Of one row of 4096 tokens in 32 parts. Rounded to bfloat16, parts made it more than the output's rounding does.
TEST(HopperKernels, FlashMlaV1KeepsTheBitsOfParts) {
  constexpr LatentProblem of_64 = latent_case::problem_of(64);
  constexpr FlashMlaV1Tiling narrow{.rows = 16};
  const auto kernel = [](const LatentArguments& with) { flash_mla_v1<of_64, narrow>(with); };
  const double difference = latent_case::Case{64, 1, 0, false, {4096}, {1}, {32}, 1}.check(16, 8, 384, kernel);
  EXPECT_LE(difference, 1.8e-6);  // it is 1.5e-6
}

TEST(HopperKernels, PartsOfRowsComeNearToFloat16) {
  for (const float largest : {0x1p-111f, 0x1.8p-20f, 1.0f, 40.0f, 3e38f}) {
    const latent::PartScale scale(largest);
    EXPECT_EQ(scale.store * scale.load, 1);
    EXPECT_GE(largest * scale.store, 0x1p14f);
    EXPECT_LT(largest * scale.store, 0x1p15f);
  }
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float largest : {0.0f, 0x1p-140f, infinity, std::nanf(""), -std::nanf("")}) {  // which stay what they are
    const latent::PartScale scale(largest);
    EXPECT_EQ(scale.store * scale.load, 1);
    EXPECT_LT(scale.store, infinity);
  }
}

}  // namespace
}  // namespace hypermla::cute
