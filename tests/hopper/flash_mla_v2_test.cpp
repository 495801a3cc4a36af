// flash_mla_v2 for Hopper over caches and queries in FP8, run as C++ threads.
#include "latent_case.h"

#include "mla/flash_mla/flash_mla_v2/flash_mla_v2.cuh"

namespace hypermla::cute {
namespace {

constexpr LatentProblem of_page(int page, bool shards = false) {
  LatentProblem at = latent_case::problem_of(page, shards);
  at.fp8 = 576;
  return at;
}

struct Case : latent_case::Case {
  Case(int page, int heads) : latent_case::Case{page, heads, 576} { fp8_queries = true; }

  // Outputs of many tokens are small beside the tolerance of each, so they are compared as one vector, too: rounding
  // the weights to e4m3 makes 2e-4 of it.
  template <class Kernel>
  void check(const Kernel& kernel, int rows = 64) const {
    EXPECT_LE(latent_case::Case::check(rows, 2, 512, kernel), 4e-4);
  }
};

TEST(HopperKernels, FlashMlaV2IsTheDefinition) {
  constexpr LatentProblem of_16 = of_page(16), of_64 = of_page(64), of_128 = of_page(128);
  const auto with_16 = [](const LatentArguments& with) { flash_mla_v2<of_16, {}>(with); };
  const auto with_64 = [](const LatentArguments& with) { flash_mla_v2<of_64, {}>(with); };
  const auto with_128 = [](const LatentArguments& with) { flash_mla_v2<of_128, {}>(with); };
  Case(64, 16).check(with_64);
  Case of_few_heads(16, 5);
  of_few_heads.with_sinks = true;
  of_few_heads.check(with_16);
  Case longer(128, 16);  // once round the ring and further, and items of one block between others
  longer.lengths = {770, 20, 1000, 64};
  longer.check(with_128);
}

TEST(HopperKernels, FlashMlaV2TakesFewRows) {
  constexpr LatentProblem of_64 = of_page(64);
  const auto of_16_rows = [](const LatentArguments& with) { flash_mla_v2<of_64, {16}>(with); };
  const auto of_32_rows = [](const LatentArguments& with) { flash_mla_v2<of_64, {32}>(with); };
  const auto of_48_rows = [](const LatentArguments& with) { flash_mla_v2<of_64, {48}>(with); };
  Case(64, 4).check(of_16_rows, 16);
  Case(64, 12).check(of_48_rows, 48);
  Case two_axes(64, 8);
  two_axes.two_axes = two_axes.with_sinks = true;
  two_axes.lengths = {370, 20, 500, 64};
  two_axes.queries = {4, 1, 3, 2};
  two_axes.sharp = 16;
  two_axes.check(of_32_rows, 32);
  Case parts(64, 16);  // two, three and seven
  parts.lengths = {150, 200, 450};
  parts.queries = {3, 1, 2};
  parts.parts = {2, 3, 7};
  parts.workers = 2;
  parts.check(of_48_rows, 48);
  parts.queries = {2, 1, 2};
  parts.check(of_32_rows, 32);
  parts.queries = {1, 1, 1};
  parts.check(of_16_rows, 16);
  Case many(64, 12);  // a team of all warps
  many.lengths = {1600};
  many.queries = {1};
  many.parts = {25};
  many.check(of_16_rows, 16);
}

TEST(HopperKernels, FlashMlaV2RaisesItsMaximaLate) {
  constexpr LatentProblem of_64 = of_page(64);
  const auto kernel = [](const LatentArguments& with) { flash_mla_v2<of_64, {}>(with); };
  Case sharp(64, 16);
  sharp.lengths = {700, 300, 20, 500};
  sharp.sharp = 16;
  sharp.check(kernel);
  sharp.sharp = 0;  // a factor of zeros: all tokens weigh the same, and those behind the end nothing
  sharp.check(kernel);
}

// A tensor core that went on with a sum would lose 3 % of it here, 5.5e-4 by the measure of check().
TEST(HopperKernels, FlashMlaV2AddsUpManyTokens) {
  constexpr LatentProblem of_64 = of_page(64);
  const auto of_16_rows = [](const LatentArguments& with) { flash_mla_v2<of_64, {16}>(with); };
  const auto of_64_rows = [](const LatentArguments& with) { flash_mla_v2<of_64, {}>(with); };
  Case many(64, 16);
  many.lengths = {4000};
  many.queries = {1};
  many.parts = {1};
  many.positive = true;
  many.sharp = 0;  // all weigh the same
  many.check(of_16_rows, 16);
  many.check(of_64_rows);
}

TEST(HopperKernels, FlashMlaV2AttendsToItsShardOfAContext) {
  constexpr LatentProblem of_64 = of_page(64, true);
  const auto with_64 = [](const LatentArguments& with) { flash_mla_v2<of_64, {}>(with); };
  Case whole(64, 5);
  whole.parts = {1, 1, 1, 1, 3, 1};
  whole.lengths = {258, 3, 131, 1, 514, 0};
  whole.queries = {8, 3, 5, 1, 12, 2};
  whole.of_shard(0, 2, 1).check(64, 2, 512, with_64);
  whole.of_shard(1, 2, 16).check(64, 2, 512, with_64);
  whole.queries = {8, 3, 5, 1, 9, 2};
  whole.of_shard(1, 2, 16).check(48, 2, 512, [](const LatentArguments& with) { flash_mla_v2<of_64, {48}>(with); });
}

TEST(HopperKernels, FlashMlaV2MergesPartsOfManyTiles) {
  constexpr LatentProblem of_64 = of_page(64);
  const auto kernel = [](const LatentArguments& with) { flash_mla_v2<of_64, {}>(with); };
  Case few(64, 16);  // two, three and seven parts
  few.lengths = {150, 200, 450};
  few.queries = {4, 1, 3};
  few.parts = {2, 3, 7};
  few.workers = 2;
  few.check(kernel);
  Case many(64, 16);  // a team of two warps
  many.lengths = {1600, 250};
  many.queries = {2, 4};
  many.parts = {25, 4};
  many.check(kernel);
}

}  // namespace
}  // namespace hypermla::cute
