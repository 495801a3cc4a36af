#include "flash_mla_v2.h"

#include "cute/latent/latent_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla::cute {
namespace {

class FlashMlaV2Plan : public LatentPlan<FlashMlaV2Tiling> {
 public:
  std::unique_ptr<DecodeKernels> decode(const MlaDecodeOptions& options) const override {
    FlashMlaV2Plan of = *this;
    if (const int bytes = fp8_bytes(options.cache_format)) of.token_bytes_ = bytes;
    return of.LatentPlan::decode(options);
  }
  void validate() const override {
    LatentPlan::validate();
    validate_prefetch(tiling.prefetch);
    if (tiling.token_bytes != (problem.fp8 ? token_bytes_ : 0))
      fail("--token_bytes={} is not supported here: MlaDecode sets it for its cache in FP8; leave it out",
           tiling.token_bytes);
  }
  // Those of flash_mla (v0), which differs in FP8 only; not measured.
  std::vector<Figures> figures() const override {
    return {{.rows = 64,
             .burst = 1.01,
             .sustained = 0.97,
             .memory = 0.92,
             .launches = {.full = 0.8, .half = 2.3, .few = 3.4}}};
  }

 protected:
  LatentVersion version(const FlashMlaV2Tiling&) const override {
    return {.name = "flash_mla_v2",
            .header = beside(__FILE__, "flash_mla_v2.cuh"),
            .shape = {problem.fp8 ? kFlashMlaV2Fp8Threads : kFlashMlaV2Threads, kFlashMlaV2SharedBytes, 1, true},
            .rows = 64,
            .query_groups = 2,
            .costs = {},
            .traffic = 0.012f,  // 73.7 KB at 4.5 TB/s against 1.4 us
            .fp8_arguments = true};
  }

  // {evict_first, prefetch}. With few row tiles to read them tokens are used up at once, unless the tiles drift apart
  // over long requests; where the tiles of all requests are few, too, the start of the kernel counts.
  std::vector<FlashMlaV2Tiling> candidates() const override {
    std::vector<FlashMlaV2Tiling> all = {{false, 0}, {true, 0}};
    if (may_prefetch()) all.push_back({true, 2});
    const std::int64_t of_request = row_tiles({}), tiles = of_request * problem.b;
    for (FlashMlaV2Tiling& one : all) one.token_bytes = problem.fp8 ? token_bytes_ : 0;
    if (of_request <= 2 && 3 * tiles <= target.processors)
      std::swap(all.front(), all.back());
    else if (of_request <= (problem.ragged ? 2 : 8))
      std::swap(all[0], all[1]);
    return all;
  }

  bool takes(const MlaDecodeOptions&) const override { return true; }
  std::shared_ptr<LatentPlan> shared_copy() const override { return std::make_shared<FlashMlaV2Plan>(*this); }

 private:
  int token_bytes_ = kFp8TokenBytes;
};

HYPERMLA_REGISTER_DRAFT(FlashMlaV2Plan,
                        "attention in the latent space for Hopper: as v0; tokens in FP8 are widened by eight warps")

}  // namespace
}  // namespace hypermla::cute
