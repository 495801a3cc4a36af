#include "flash_mla_v2.h"

#include "cute/latent/latent_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla::cute {
namespace {

class FlashMlaV2Plan : public LatentPlan<FlashMlaV2Tiling> {
 public:
  bool only_decodes() const override { return true; }
  // results/nvidia-h200/engine_fp8.json: b32 s16 h128 499 us, s4 131, b128 s1 140; for few requests docs/log/engine.md.
  // Products are of e4m3, twice as many in a second.
  std::vector<Figures> figures() const override {
    return {{.rows = 64,
             .burst = 1.47 * this->by_zeros(),
             .sustained = 1.42 * this->by_zeros(),
             .memory = 0.93,
             .launches = {.full = 1.6, .half = 4, .few = 4.2}}};
  }

 protected:
  LatentVersion version(const FlashMlaV2Tiling&) const override {
    return {.name = "flash_mla_v2",
            .header = beside(__FILE__, "flash_mla_v2.cuh"),
            .shape = {kFlashMlaV2Threads, kFlashMlaV2SharedBytes, this->side_by_side(64), true},
            .gathers_fp8 = false,
            // v0's, in blocks of 0.85 us where its take 1.4, but for parts (docs/log/engine.md).
            .costs = {.item = 3, .combine = 4, .partial = 0.04},
            .traffic = 0.01f};  // 36.9 KB at 4.5 TB/s against 0.85 us
  }

  // As v0's.
  std::vector<FlashMlaV2Tiling> candidates() const override {
    std::vector<FlashMlaV2Tiling> all = {{false}, {true}};
    if (row_tiles({}) <= 2) std::swap(all[0], all[1]);
    return all;
  }

  bool takes(const MlaDecodeOptions& options) const override { return options.fp8_queries && options.page >= 16; }
  std::shared_ptr<LatentPlan> shared_copy() const override { return std::make_shared<FlashMlaV2Plan>(*this); }
};

HYPERMLA_REGISTER(FlashMlaV2Plan,
                  "attention in the latent space with products of e4m3: caches and queries in FP8, by MlaDecode")

}  // namespace
}  // namespace hypermla::cute
