#include "flash_mla_v3.h"

#include "cute/latent/latent_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla::cute {
namespace {

class FlashMlaV3Plan : public LatentPlan<FlashMlaV3Tiling> {
 public:
  bool only_decodes() const override { return true; }
  // results/nvidia-h100-80gb-hbm3/{sparse,engine_fp8}.json: lists of 2048 tokens, 1 to 256 queries of 64 and 128 heads;
  // dense b128 h128 244 us, b32 s16 h128 911 us; of an H200 dense b128 h16 98.6 us.
  std::vector<Figures> figures() const override {
    const bool lists = problem.page == 1;
    if (problem.h * problem.s <= 32)
      return {{.rows = 32,
               .burst = lists ? 0.46 : 0.57,
               .sustained = lists ? 0.46 : 0.57,
               .memory = lists ? 0.7 : 0.8,
               .launches = {.full = 2, .half = 3, .few = lists ? 4.5 : 3.7}}};
    return {{.rows = 64,
             .burst = (lists ? 0.68 : 0.81) * this->by_zeros(),
             .sustained = (lists ? 0.69 : 0.81) * this->by_zeros(),
             .memory = lists ? 0.8 : 0.9,
             .launches = {.full = 2, .half = 5, .few = 5}}};
  }

 protected:
  std::vector<int> tile_rows() const override { return {32, 64}; }
  LatentVersion version(const FlashMlaV3Tiling& at) const override {
    return {.name = "flash_mla_v3",
            .header = beside(__FILE__, "flash_mla_v3.cuh"),
            .shape = {kFlashMlaV3Threads, flash_mla_v3_shared_bytes(problem.fp8, at.rows), 1, true},
            .rows = at.rows,
            .traffic = 0.005f};  // 42 KB at 4.5 TB/s against 2 us; v0's costs
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
