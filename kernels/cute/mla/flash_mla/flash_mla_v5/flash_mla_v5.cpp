#include "flash_mla_v5.h"

#include "cute/latent/latent_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla::cute {
namespace {

class FlashMlaV5Plan : public LatentPlan<FlashMlaV5Tiling> {
 public:
  bool only_decodes() const override { return true; }
  std::vector<Figures> figures() const override {
    return {{.rows = kFlashMlaV5Rows,
             .burst = 0.75,
             .sustained = 0.75,
             .memory = 0.8,
             .launches = {.full = 2, .half = 6, .few = 6}}};
  }

 protected:
  LatentVersion version(const FlashMlaV5Tiling& at) const override {
    return {.name = "flash_mla_v5",
            .header = beside(__FILE__, "flash_mla_v5.cuh"),
            .shape = {kFlashMlaV5Threads, flash_mla_v5_shared_bytes(at.weights), kFlashMlaV5Blocks, true},
            .rows = kFlashMlaV5Rows,
            .query_groups = 1,
            .blocks = kFlashMlaV5Blocks,
            .costs = {},         // v0's
            .traffic = 0.005f};  // v3's
  }

  std::vector<FlashMlaV5Tiling> candidates() const override { return {{1}, {2}}; }

  bool takes(const MlaDecodeOptions& options) const override {
    return options.cache_format == MlaCacheFormat::fp8_656 && !options.fp8_queries;
  }
  std::shared_ptr<LatentPlan> shared_copy() const override { return std::make_shared<FlashMlaV5Plan>(*this); }
};

HYPERMLA_REGISTER_DRAFT(FlashMlaV5Plan,
                        "attention in the latent space over caches in FP8 by clusters of two blocks, for 128 rows, by "
                        "MlaDecode")

}  // namespace
}  // namespace hypermla::cute
