#include "flash_mla_v4.h"

#include "cute/latent/latent_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla::cute {
namespace {

class FlashMlaV4Plan : public LatentPlan<FlashMlaV4Tiling> {
 public:
  void validate() const override {
    if (!problem.fp8 && problem.page != 1)
      fail("--page={} is not supported by this version without --fp8: add --page=1, or --fp8=656 or 576", problem.page);
    LatentPlan::validate();
  }
  bool only_decodes() const override { return true; }
  // results/nvidia-h200/{sparse,engine_fp8}.json, and the log for 32 heads and more: a tile and 64 tokens take 1.27 us
  // in FP8, 1.6 in 16 bits, the beginning and the end 8 to 10 us, less where tokens follow each other.
  std::vector<Figures> figures() const override {
    const bool lists = problem.page == 1;
    const bool shares = !lists && problem.h * problem.s > kFlashMlaV4Rows;  // several tiles read the same tokens
    if (problem.fp8)
      return {{.rows = kFlashMlaV4Rows,
               .burst = shares ? 0.35 : 0.39,
               .sustained = shares ? 0.38 : 0.42,
               .memory = lists ? 0.95 : 0.9,
               .launches = {.full = lists ? 3.3 : 2.5, .half = lists ? 4.1 : 3.5, .few = lists ? 4.1 : 3.5}}};
    return {{.rows = kFlashMlaV4Rows,
             .burst = 0.23,
             .sustained = 0.25,
             .memory = 0.94,
             .launches = {.full = 2.5, .half = 3.2, .few = 4}}};
  }

 protected:
  LatentVersion version(const FlashMlaV4Tiling&) const override {
    return {.name = "flash_mla_v4",
            .header = beside(__FILE__, "flash_mla_v4.cuh"),
            .shape = {kFlashMlaV4Threads, flash_mla_v4_shared_bytes(problem.fp8), 1, true},
            .rows = kFlashMlaV4Rows,
            .costs = {.partial = 0.01},  // v0's, but parts have a quarter of its rows
            .traffic = problem.fp8 ? 0.005f : 0.012f};
  }

  std::vector<FlashMlaV4Tiling> candidates() const override { return {{}}; }

  bool takes(const MlaDecodeOptions& options) const override {
    return fp8_bytes(options.cache_format) || options.sparse || options.page == 1;
  }
  std::shared_ptr<LatentPlan> shared_copy() const override { return std::make_shared<FlashMlaV4Plan>(*this); }
};

HYPERMLA_REGISTER(FlashMlaV4Plan,
                  "attention in the latent space over gathered tokens for few rows, 16 at a time, by MlaDecode")

}  // namespace
}  // namespace hypermla::cute
