#include "mla_var6_plus_v2.h"

#include "cutile/hybrid/hybrid_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla {
namespace {

class MlaVar6PlusV2Plan : public HybridPlan<MlaVar6PlusV2Tiling> {
 public:
  void choose(const DeviceSpec& device) override { choose_new_tokens(problem, "cutile.mla.mla_var6_plus_v2", device); }
  void validate() const override {
    validate_hybrid(problem);
    validate_tiles();
    validate_division();
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    return specialized_pipeline(tensors, "mla_var6_plus_v2", beside(__FILE__, "mla_var6_plus_v2.cuh"), undivided);
  }

 private:
  HybridCut tiles(const MlaVar6PlusV2Tiling& tiling) const {
    return {{tiling.Bm, tiling.Bn, tiling.Bv, problem.h}, {1, tiling.Bm, tiling.Bn}};
  }
  std::function<HybridCut(const MlaVar6PlusV2Tiling&)> cutting() const override {
    return [self = *this](const MlaVar6PlusV2Tiling& tiling) {
      return with_blocks(self.problem, self.tiles(tiling), tiling.latent_parts, tiling.latent_blocks, tiling.new_parts,
                         tiling.new_blocks);
    };
  }

  std::vector<MlaVar6PlusV2Tiling> candidates() const override {
    MlaVar6PlusV2Tiling tiling;
    if (!target.is_gpu()) {
      tiling.Bk = 512;
      tiling.num_warps = 1;
    } else if (target.arch == "sm_120" || target.arch == "sm_121") {
      tiling.Bn = 32;
    } else if (!target.has_large_blocks()) {
      tiling = {.Bm = 32, .Bn = 32, .Bv = 128, .Bk = 64};
    }
    tiling.Bv = std::min(tiling.Bv, problem.k);
    tiling.Bk = std::min(tiling.Bk, problem.k);
    return divisions(tiling);
  }
};

HYPERMLA_REGISTER(MlaVar6PlusV2Plan, "the hybrid with the queries of all heads as rows of the latent products")

}  // namespace
}  // namespace hypermla
