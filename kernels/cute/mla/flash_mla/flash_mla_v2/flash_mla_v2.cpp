#include "flash_mla_v2.h"

#include "cute/latent/latent_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla::cute {
namespace {

class FlashMlaV2Plan : public LatentPlan<FlashMlaV2Tiling> {
 public:
  bool only_decodes() const override { return true; }
  // results/nvidia-h200/engine_fp8.json: b32 s16 h128 497 us, s4 131, b128 s1 138; for few requests docs/log/engine.md,
  // for few rows docs/log/cute-flash-mla-v2.md. Products are of e4m3, twice as many in a second; those of the scores
  // have 64 rows in any tile.
  std::vector<Figures> figures() const override {
    const int rows = fitting_rows();
    const double part = rows / 64.0, rate = this->by_zeros() * 2 * part / (1 + part);
    const double less = 0.02 * (64 - rows);  // partial outputs are shorter, and merged sooner
    return {{.rows = rows,
             .burst = (rows == 64 ? 1.36 : 1.47) * rate,  // sums of 64 rows' outputs take time beside products
             .sustained = (rows == 64 ? 1.3 : 1.42) * rate,
             .memory = rows == 64 ? 0.93 : 0.95,
             .launches = {.full = 1.6 - less / 2, .half = 4 - less, .few = 4.2 - less}}};
  }

 protected:
  std::vector<int> tile_rows() const override { return {16, 32, 48, 64}; }
  LatentVersion version(const FlashMlaV2Tiling& at) const override {
    return {.name = "flash_mla_v2",
            .header = beside(__FILE__, "flash_mla_v2.cuh"),
            .shape = {kFlashMlaV2Threads, kFlashMlaV2SharedBytes, this->side_by_side(64), true},
            .rows = at.rows,
            .gathers_fp8 = false,
            // v0's, in blocks of 0.9 us where its take 1.4, but for parts (docs/log/engine.md).
            .costs = {.item = 3, .combine = 4, .partial = at.rows == 64 ? 0.04 : 0.015},
            .traffic = 0.01f};  // 36.9 KB at 4.5 TB/s against 0.9 us
  }

  // The least tile that holds all rows, if there is one. Eviction as v0's.
  int fitting_rows() const {
    const std::int64_t rows = std::int64_t{problem.h} * problem.s;
    return rows > 48 ? 64 : int(ceil_div(rows, 16)) * 16;
  }
  std::vector<FlashMlaV2Tiling> candidates() const override {
    const int rows = fitting_rows();
    std::vector<FlashMlaV2Tiling> all = {{rows, false}, {rows, true}};
    if (row_tiles({rows}) <= 2) std::swap(all[0], all[1]);
    return all;
  }

  bool takes(const MlaDecodeOptions& options) const override { return options.fp8_queries && options.page >= 16; }
  std::shared_ptr<LatentPlan> shared_copy() const override { return std::make_shared<FlashMlaV2Plan>(*this); }
};

HYPERMLA_REGISTER(FlashMlaV2Plan,
                  "attention in the latent space with products of e4m3: caches and queries in FP8, by MlaDecode")

}  // namespace
}  // namespace hypermla::cute
