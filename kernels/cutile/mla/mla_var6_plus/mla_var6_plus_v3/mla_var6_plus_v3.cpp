#include <array>

#include "cutile/hybrid/attend_both_paths_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla {
namespace {

// Tiles of one path, before its blocks and parts are chosen.
struct LatentTile {
  int Bm, Bn, Bv, Bk;
};
struct DecompressedTile {
  int Bb, Bs, Bn;
};

class MlaVar6PlusV3Plan : public AttendBothPathsPlan {
 public:
  MlaVar6PlusV3Plan() : AttendBothPathsPlan("mla_var6_plus_v3", Rows::of_all_heads) {}
  void validate() const override {
    validate_hybrid(problem);
    validate_tiles();
    require_power_of_two("new_Bb", tiling.new_Bb, 1, 128);
    require_power_of_two("new_Bs", tiling.new_Bs, 1, 128);
    require_power_of_two("new_Bn", tiling.new_Bn, 16, 256);
    if (tiling.new_Bb * tiling.new_Bs < 16 || tiling.new_Bb * tiling.new_Bs > 128)
      fail("--new_Bb={} --new_Bs={} is not supported: their product, the rows of a unit, must be from 16 to 128",
           tiling.new_Bb, tiling.new_Bs);
    if (tiling.new_Bb > 1 && problem.prefixes == 0)
      fail("--new_Bb={} needs requests that share decompressed tokens: give --prefixes, or --new_Bb=1", tiling.new_Bb);
    validate_division();
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override { return pipeline(tensors); }

 private:
  // What a thread holds and a block stores, as far as the sources tell: 128 fp32 accumulators are the most that compile
  // without spills beside their scores (docs/kernels/flash-mla.md), and a block has 227 KiB. Scores of fewer than one
  // 16 x 8 product for every warp spill, too.
  static constexpr int kWarps = 8, kAccumulators = 128, kHeld = 160, kSharedBytes = 227 << 10,
                       kLeastScores = 16 * 8 * kWarps;
  bool fits(const LatentTile& tile) const {
    const int threads = 32 * kWarps, k = problem.k, p = problem.p;
    const int shared = tile.Bm * (k + p) + 2 * tile.Bn * tile.Bk + tile.Bn * (tile.Bv + p) + tile.Bm * tile.Bn;
    return tile.Bm * tile.Bv <= kAccumulators * threads && tile.Bm * (tile.Bv + tile.Bn) <= kHeld * threads &&
           tile.Bm * tile.Bn >= kLeastScores && shared * 2 <= kSharedBytes;
  }
  bool fits(const DecompressedTile& tile) const {
    const int threads = 32 * kWarps, rows = tile.Bb * tile.Bs, d = problem.d, p = problem.p;
    return rows * (d + tile.Bn) <= kHeld * threads && rows * tile.Bn >= kLeastScores &&
           (rows * (d + p) + 2 * tile.Bn * (2 * d + p)) * 2 <= kSharedBytes;
  }
  // The space has 4 x 3 x 3 x 4 tiles of the latent path, 3 x 3 of the other, and as many divisions of the blocks and
  // cuts of the tokens as one likes. The paths are independent until blocks are divided, so the two best tiles of each
  // are enough to choose from, and the rest follows from the model. Of equally fast tiles the first listed wins: the
  // best measured one.
  std::vector<AttendBothPathsTiling> candidates() const override {
    if (!target.has_large_blocks()) return portable_candidates();
    auto best_two = [&](auto tiles, auto time) {
      std::erase_if(tiles, [&](const auto& tile) { return !fits(tile); });
      std::stable_sort(tiles.begin(), tiles.end(), [&](const auto& a, const auto& b) { return time(a) < time(b); });
      tiles.resize(std::min<std::size_t>(tiles.size(), 2));
      return tiles;
    };
    std::vector<LatentTile> latent;
    for (const int Bv : {512, 256, 128})
      for (const int Bm : {64, 128, 32, 16})
        for (const int Bn : {64, 32, 128})
          for (const int Bk : {128, 256, 64, 512})
            if (Bv <= problem.k && Bk <= problem.k) latent.push_back({Bm, Bn, Bv, Bk});
    if (latent.empty()) latent.push_back({64, 64, problem.k, problem.k});
    const bool paired = has_both_parts(problem);
    latent = best_two(latent, [&](const LatentTile& tile) {
      return path_work(problem, LatentCut{tile.Bm, tile.Bn, tile.Bv, problem.h, latent_tokens(problem) > 0, 1});
    });
    std::vector<DecompressedTile> decompressed;
    // 32 rows lose to 64 that are half empty (docs/kernels/flash-attention.md).
    for (const int rows : problem.s > 16 ? std::array{64, 128, 16} : std::array{16, 64, 128})
      for (const int Bn : {64, 128, 32})
        decompressed.push_back({1, rows, Bn});  // stacked requests take tileiras many minutes
    decompressed = best_two(decompressed, [&](const DecompressedTile& tile) {
      return path_work(problem, DecompressedCut{tile.Bb, tile.Bs, tile.Bn, decompressed_tokens(problem) > 0, 1});
    });

    std::vector<std::pair<double, AttendBothPathsTiling>> all;
    for (const LatentTile& a : latent)
      for (const DecompressedTile& b : decompressed)
        for (const double shift : {1.0, 0.7, 0.85, 1.2, 1.4}) {
          if (!paired && shift != 1) continue;
          const AttendBothPathsTiling tiling =
              divided({a.Bm, a.Bn, a.Bv, a.Bk, b.Bb, b.Bs, b.Bn, 1, 1, 1, 1, kWarps, 1}, shift);
          all.push_back({later_end(problem, cutting()(tiling)), tiling});
        }
    std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<AttendBothPathsTiling> tilings;
    for (std::size_t i = 0; i < std::min<std::size_t>(all.size(), 6); ++i) tilings.push_back(all[i].second);
    return tilings;
  }

  // One tile of each path for GPUs with small blocks and for CPUs, divided as the model says.
  std::vector<AttendBothPathsTiling> portable_candidates() const {
    AttendBothPathsTiling tiling{64, 32, 512, 128, 1, 16, 64, 1, 1, 1, 1, kWarps, 1};
    if (!target.is_gpu())
      tiling = {64, 64, 512, 512, 1, 16, 64, 1, 1, 1, 1, 1, 1};
    else if (!target.is_small_blackwell())
      tiling = {32, 32, 128, 64, 1, 16, 32, 1, 1, 1, 1, kWarps, 1};
    tiling.Bv = std::min(tiling.Bv, problem.k);
    tiling.Bk = std::min(tiling.Bk, problem.k);
    tiling.new_Bs = problem.s <= 16 ? 16 : 64;
    if (problem.prefixes && !target.is_gpu()) {
      if (problem.s == 1) tiling.new_Bs = 1;
      tiling.new_Bb = 64 / tiling.new_Bs;
    }
    return {divided(tiling)};
  }

  // Both paths in one block wait for each other. Against v4, s = 16 and 32 (docs/kernels/mla-var6-plus.md): 1.7 and 2.2
  // times its time, and more with few decompressed tokens.
  const HybridParts& parts_of_time() const override {
    static const HybridParts parts =
        of_cutile({.overlap = 0.93 / 2.0, .beside = figures_of("cutile.mla.mla_var6_plus_v4"), .cut = true});
    return parts;
  }
};

HYPERMLA_REGISTER(MlaVar6PlusV3Plan, "the hybrid with tiles of their own for each path, chosen by the model")

}  // namespace
}  // namespace hypermla
