#include "flash_mla_v3.h"

#include "cute/latent/latent_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla::cute {
namespace {

class FlashMlaV3Plan : public LatentPlan<FlashMlaV3Tiling> {
 public:
  void validate() const override {
    fail(
        "cute.mla.flash_mla_v3 is not supported as a command: it attends to a cache in FP8, which only MlaDecode has; "
        "set cache_format and kernel=cute.mla.flash_mla_v3 of its options");
  }
  bool only_decodes() const override { return true; }
  Path path() const override { return Path::none; }  // as a command it does not run: it is not ranked
  // results/nvidia-h200/sparse.json: 2.6 and 1.8 us a tile of 64 or 32 rows and 64 tokens, up to 16 us where they are
  // few. Tokens have 0.57 of the bytes that the model counts.
  std::vector<Figures> figures() const override {
    return {{.rows = 32,
             .burst = 0.42,
             .sustained = 0.46,
             .memory = 1.65,
             .launches = {.full = 2.2, .half = 4.5, .few = 4.6}},
            {.rows = 64,
             .burst = 0.57,
             .sustained = 0.62,
             .memory = 1.65,
             .launches = {.full = 2.5, .half = 6.5, .few = 6.4}}};
  }

 protected:
  LatentVersion version(const FlashMlaV3Tiling& at) const override {
    return {.name = "flash_mla_v3",
            .header = beside(__FILE__, "flash_mla_v3.cuh"),
            .shape = {kFlashMlaV3Threads, flash_mla_v3_shared_bytes(problem.fp8, at.rows), 1, true},
            .rows = at.rows,
            .query_groups = 2,
            .costs = {},         // v0's
            .traffic = 0.005f};  // 42 KB at 4.5 TB/s against 2 us
  }

  std::vector<FlashMlaV3Tiling> candidates() const override {
    if (problem.h * problem.s <= 32) return {{32}, {64}};
    return {{64}, {32}};
  }

  bool takes(const MlaDecodeOptions& options) const override {
    return fp8_bytes(options.cache_format) && !options.fp8_queries;
  }
  std::shared_ptr<LatentPlan> shared_copy() const override { return std::make_shared<FlashMlaV3Plan>(*this); }
};

HYPERMLA_REGISTER(FlashMlaV3Plan,
                  "attention in the latent space over caches in FP8, widened in registers, by MlaDecode")

}  // namespace
}  // namespace hypermla::cute
