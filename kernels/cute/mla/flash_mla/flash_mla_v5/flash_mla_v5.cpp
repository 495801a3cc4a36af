#include "flash_mla_v5.h"

#include "cute/latent/latent_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla::cute {
namespace {

class FlashMlaV5Plan : public LatentPlan<FlashMlaV5Tiling> {
 public:
  bool only_decodes() const override { return true; }
  // Predicted, not measured: between v0 over bfloat16 and v3.
  std::vector<Figures> figures() const override {
    return {{.rows = 64, .burst = 0.8, .sustained = 0.8, .memory = 0.8, .launches = {.full = 2, .half = 6, .few = 6}}};
  }

 protected:
  LatentVersion version(const FlashMlaV5Tiling&) const override {
    return {.name = "flash_mla_v5",
            .header = beside(__FILE__, "flash_mla_v5.cuh"),
            .shape = {kFlashMlaV5Threads, kFlashMlaV5SharedBytes, 1, true},
            .rows = 64,
            .query_groups = 2,
            .costs = {},         // v0's
            .traffic = 0.005f};  // v3's
  }

  std::vector<FlashMlaV5Tiling> candidates() const override { return {{}}; }

  bool takes(const MlaDecodeOptions& options) const override {
    return options.cache_format == MlaCacheFormat::fp8_656 && !options.fp8_queries;
  }
  std::shared_ptr<LatentPlan> shared_copy() const override { return std::make_shared<FlashMlaV5Plan>(*this); }
};

HYPERMLA_REGISTER_DRAFT(
    FlashMlaV5Plan,
    "attention in the latent space over caches in FP8, widened in shared memory by warps of its own, "
    "by MlaDecode")

}  // namespace
}  // namespace hypermla::cute
