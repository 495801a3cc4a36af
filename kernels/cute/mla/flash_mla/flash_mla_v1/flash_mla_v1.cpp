#include "flash_mla_v1.h"

#include "cute/latent/latent_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla::cute {
namespace {

class FlashMlaV1Plan : public LatentPlan<FlashMlaV1Tiling> {
 public:
  void validate() const override {
    LatentPlan::validate();
    if (tiling.cluster != 1 && tiling.cluster != 2)
      fail("--cluster={} is not supported: choose 1 or 2", tiling.cluster);
    validate_prefetch(tiling.prefetch);
  }
  // results/nvidia-h200/cute-flash_mla_v1-*.json: b1 10.5 us, h16 38.3 us; 1.05 us a tile of 32 rows and 64 tokens. By
  // tiles of 16 rows b1 t2048 of 16 to 48 rows takes 8.1 to 8.3 us, b2 t131072 of 48 rows 102 us
  // (docs/log/cute-flash-mla-v1.md).
  std::vector<Figures> figures() const override {
    // Pages of 1 token are loaded one by one: 907 us where the base version takes 83, 31 blocks of 64 tokens by each
    // multiprocessor. So 29 us for a block, some 12 launches, however few there are.
    const double gathered = problem.page == 1 ? 0.09 : 1, first_block = problem.page == 1 ? 12 : 0;
    // Several tiles of 32 rows ask L2 for nothing ahead: b8 t32768 of 48 rows takes 89.2 us, and 77.9 by the base
    // version. One or two requests have twice as many pieces, and begin sooner: b1 t2048 of 64 rows 9.2 and 10.4 us
    // (docs/log/engine.md, also of what begin and end take). One tile reads faster: b128 t4096 139.9 us, and 142.0.
    const std::int64_t tiles = ceil_div(problem.h * problem.s, 32);
    const double memory_of_32 = tiles == 1 ? 0.94 : 0.8;
    const double few_of_32 = tiles > 2 && problem.b > 2 ? 3.9 : 3.4;
    return {{.rows = 16,
             .burst = 0.46,
             .sustained = 0.46,
             .memory = 0.95 * gathered,
             .launches = {.full = 1.2, .half = 1.5, .few = 3.1 + first_block}},
            {.rows = 32,
             .burst = 0.71,
             .sustained = 0.71,
             .memory = memory_of_32 * gathered,
             .launches = {.full = 1.4, .half = tiles == 1 ? 1.5 : 3.2, .few = few_of_32 + first_block}}};
  }

 protected:
  std::vector<int> tile_rows() const override { return {16, 32}; }
  // Costs fitted on an H200, in units of a block of tokens against a tile (about 1.1 us).
  LatentVersion version(const FlashMlaV1Tiling& at) const override {
    return {.name = "flash_mla_v1",
            .header = beside(__FILE__, "flash_mla_v1.cuh"),
            .shape = {384, flash_mla_v1_shared_bytes(at.rows), unsigned(at.cluster), true},
            .rows = at.rows,
            .query_groups = 8,
            .costs = {.item = 2, .combine = 2, .partial = 0.01},
            .traffic = 0.015f,  // 73.7 KB at 4.5 TB/s against 1.1 us
            .ahead = at.prefetch};
  }

  // 32 rows cost less per row, 16 rows less at the ends: partial outputs are half as long. So 16 where they are all,
  // and where a multiprocessor has but a few blocks of tokens. For requests of any length, which are shorter than they
  // may be, where that is so of most lengths (docs/log/cute-flash-mla-v1.md). Side by side, row tiles share the reads
  // of their tokens.
  std::vector<FlashMlaV1Tiling> candidates() const override {
    const int rows = problem.h * problem.s;
    const bool ends_count = one_tiling() ? rows <= 48 && std::int64_t{problem.b} * rows <= 128
                                         : token_blocks() * ceil_div(rows, 16) <= 8 * target.processors;
    const bool few = rows <= 16 || (problem.split == 0 && ends_count);  // with a split the same sums in any batch
    const int tile = few ? 16 : 32;
    // What other tiles of the request read as well is there soon enough.
    const int prefetch = rows > tile || !may_prefetch() ? 0 : few ? 3 : 2;
    if (problem.split > 0) return {{tile, 1, true, prefetch}};
    const FlashMlaV1Tiling first{.rows = tile, .cluster = rows > tile ? 2 : 1, .prefetch = prefetch};
    return distinct({first, {16, 1, true}, {16, 2, true}, {32, 1, true}, {32, 2, true}, {32, 2, false}});
  }

  // Where its blocks are placed is nothing to the kernel, and what it asks for ahead it learns at run time.
  FlashMlaV1Tiling tiling_at_compile_time(FlashMlaV1Tiling at) const override {
    at.cluster = 1;
    at.prefetch = 0;
    return at;
  }

  std::shared_ptr<LatentPlan> shared_copy() const override { return std::make_shared<FlashMlaV1Plan>(*this); }
};

HYPERMLA_REGISTER(FlashMlaV1Plan,
                  "attention in the latent space for few rows: they take the columns of wgmma, 16 or 32 at a time")

}  // namespace
}  // namespace hypermla::cute
