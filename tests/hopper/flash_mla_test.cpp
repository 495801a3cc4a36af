// flash_mla for Hopper over requests of several queries, run as plain C++.
#include <bit>

#include "latent_case.h"

#include "mla/flash_mla/flash_mla/flash_mla.cuh"

namespace hypermla::cute {
namespace {

// With and without a spare place for a pair of boxes.
template <LatentProblem problem>
void check_both(latent_case::Case of) {
  of.check(64, 2, 384, [](const LatentArguments& with) { flash_mla<problem, {}>(with); });
  of.check(64, 2, 384, [](const LatentArguments& with) { flash_mla<problem, FlashMlaTiling{.spare = true}>(with); });
}

TEST(HopperKernels, FlashMlaIsTheDefinition) {
  using latent_case::Case;
  constexpr LatentProblem of_16 = latent_case::problem_of(16), of_32 = latent_case::problem_of(32),
                          of_64 = latent_case::problem_of(64);
  check_both<of_16>(Case{16, 5});
  check_both<of_32>(Case{32, 5});
  check_both<of_64>(Case{64, 16});
}

TEST(HopperKernels, FlashMlaGathersTokens) {
  constexpr LatentProblem of_1 = latent_case::problem_of(1);
  const auto kernel = [](const LatentArguments& with) { flash_mla<of_1, {}>(with); };
  latent_case::Case{1, 16, 0, true}.check(64, 2, 384, kernel);
}

TEST(HopperKernels, FlashMlaAttendsToItsShardOfAContext) {
  using latent_case::Case;
  constexpr LatentProblem of_16 = latent_case::problem_of(16, true), of_64 = latent_case::problem_of(64, true);
  // Limits at the ends of turns and blocks, drafts in the turn of another, requests of which a shard has nothing.
  Case whole{16, 5};
  whole.parts = {1, 1, 1, 1, 3, 1};
  whole.lengths = {258, 3, 131, 1, 514, 0};
  whole.queries = {8, 3, 5, 1, 12, 2};
  check_both<of_16>(whole.of_shard(0, 2, 1));
  check_both<of_16>(whole.of_shard(1, 2, 16));
  whole.page = 64;
  check_both<of_64>(whole.of_shard(1, 3, 4));
}

TEST(HopperKernels, FlashMlaAttendsToSharedPrefixesAndToWhatIsBehindThem) {
  using latent_case::Case;
  constexpr auto without_mask = [](LatentProblem at) {
    at.causal = false;
    return at;
  };
  constexpr LatentProblem of_16 = latent_case::problem_of(16), of_64 = latent_case::problem_of(64);
  constexpr LatentProblem all_of_16 = without_mask(of_16), all_of_64 = without_mask(of_64);
  Case own{16, 5}, prefixes{16, 5};
  own.lengths = {258, 131, 514, 200};
  own.queries = {8, 3, 12, 1};
  own.before = {3, 2, 2, 0};
  own.parts = {1, 1, 3, 1};
  check_both<of_16>(own);
  prefixes.causal = false;
  prefixes.lengths = {192, 128, 64, 384};
  prefixes.queries = {8, 3, 12, 7};
  prefixes.parts = {1, 1, 1, 3};
  check_both<all_of_16>(prefixes);
  own.page = prefixes.page = 64;
  check_both<of_64>(own);
  check_both<all_of_64>(prefixes);
}

TEST(HopperKernels, FlashMlaMergesPartsOfManyTiles) {
  using latent_case::Case;
  constexpr LatentProblem of_64 = latent_case::problem_of(64);
  // Two, three and seven parts; a team of two warps, and single ones that begin before it has ended.
  check_both<of_64>(Case{64, 16, 0, false, {150, 200, 450}, {4, 1, 3}, {2, 3, 7}, 2});
  check_both<of_64>(Case{64, 16, 0, false, {1600, 250}, {2, 4}, {25, 4}, 1});
  // All parts of a chunk are a single warp's, which copies them at once.
  check_both<of_64>(Case{64, 16, 0, false, {1270}, {1}, {20}, 1});
}

TEST(HopperKernels, FlashMlaTakesUpTheOtherOfTwoParts) {
  using latent_case::Case;
  constexpr LatentProblem of_16 = latent_case::problem_of(16), of_64 = latent_case::problem_of(64);
  // Beside tiles that are merged and whole ones; an odd block before or behind the cut, all of a part masked.
  Case two{64, 16, 0, false, {150, 200, 450, 64, 300, 66}, {4, 1, 3, 2, 2, 4}, {2, 1, 2, 1, 3, 2}, 2};
  two.joins = true;
  check_both<of_64>(two);
  two.with_sinks = true;
  two.page = 16;
  check_both<of_16>(two);
  two.before = {1, 0, 2, 0, 1, 0};
  check_both<of_16>(two);
}

// The floats of a part are those that the workspace has room for.
static_assert(RowsOnM::floats_at(1, kTile - 1) + 4 == kTile * part_row_floats(kTile));

// A tile whose chunks are alike or not, and whose lanes share rows as those of rows on M or on N.
template <int rows, int next_row, bool alike>
struct TileOf {
  static constexpr int kRows = rows, kNextRow = next_row;
  static constexpr bool kAlike = alike;
};
template <class Tile>
void check_shares() {
  using Scratch = MergeScratch<Tile>;
  for (int parts = 1; parts <= kMaxParts; ++parts) {
    for (int part = 0; part < parts; ++part) {
      const MergeShare<Tile> share(part, parts);
      EXPECT_EQ(share.begin, part * 2 * Tile::kRows / parts) << part << " of " << parts;
      EXPECT_EQ(share.end, (part + 1) * 2 * Tile::kRows / parts) << part << " of " << parts;
      if (parts == 1) continue;  // never merged
      // What a warp of merge_share() has room for.
      const int here = share.parts_of(0, parts), chunks = share.at_once(share.begin, here);
      EXPECT_LE(here, Scratch::kParts) << parts;
      EXPECT_LE(chunks * here, Scratch::kCopied) << parts;
      if (share.weighs_several(here)) {
        EXPECT_LE(chunks, Scratch::kSums) << parts;
        EXPECT_LE(chunks * static_cast<int>(std::bit_ceil(static_cast<unsigned>(here))), Scratch::kWeighed) << parts;
      } else {
        EXPECT_LE(here, Scratch::kWeighed) << parts;
      }
    }
  }
}

// Though by float.
TEST(HopperKernels, FlashMlaDividesMergesExactly) {
  check_shares<TileOf<64, 8, true>>();   // flash_mla
  check_shares<TileOf<16, 1, false>>();  // flash_mla_v1
  check_shares<TileOf<32, 1, false>>();  // flash_mla_v1, flash_mla_v3
  check_shares<TileOf<64, 1, false>>();  // flash_mla_v2, flash_mla_v3
  check_shares<TileOf<16, 8, false>>();  // flash_mla_v4
}

}  // namespace
}  // namespace hypermla::cute
