#include "mla_var6_plus_v2.h"

#include "cutile/hybrid/hybrid_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla {
namespace {

class MlaVar6PlusV2Plan : public HybridPlan<MlaVar6PlusV2Problem, MlaVar6PlusV2Tiling> {
 public:
  void choose(const DeviceSpec& device) override { choose_new_tokens(problem, "cutile.mla.mla_var6_plus_v2", device); }
  void validate() const override {
    validate_hybrid(problem);
    require_power_of_two("Bm", tiling.Bm, 16, 128);
    require_power_of_two("Bn", tiling.Bn, 16, 256);
    require_power_of_two("Bv", tiling.Bv, 16, problem.k);
    require_power_of_two("Bk", tiling.Bk, 16, problem.k);
    require_positive("latent_blocks", tiling.latent_blocks);
    require_positive("new_blocks", tiling.new_blocks);
    require_parts("latent_parts", tiling.latent_parts);
    require_parts("new_parts", tiling.new_parts);
    require_power_of_two("num_warps", tiling.num_warps, 1, 32);
    require_positive("occupancy", tiling.occupancy);
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    std::unique_ptr<CtKernel> attention = specialized_attention(
        tensors, "mla_var6_plus_v2", beside(__FILE__, "mla_var6_plus_v2.cuh"), [](MlaVar6PlusV2Tiling tiling) {
          tiling.latent_blocks = tiling.new_blocks = tiling.latent_parts = tiling.new_parts = 0;
          return tiling;
        });
    std::unique_ptr<CtKernel> combined = combine(tensors, *attention);
    std::vector<std::unique_ptr<Executable>> stages;
    stages.push_back(std::move(attention));
    stages.push_back(std::move(combined));
    return std::make_unique<KernelPipeline>("mla_var6_plus_v2", std::move(stages));
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
    // The model's division leads; it knows neither what a block can read alone nor the clock under load.
    std::vector<MlaVar6PlusV2Tiling> tilings;
    for (const double shift : {1.0, 0.8, 1.25}) {
      const HybridCut cut =
          in_proportion(problem, with_blocks(problem, tiles(tiling), 1, 1, 1, 1), target.processors, shift);
      for (const bool whole : {false, true}) {
        tiling.latent_blocks = std::max(1, cut.latent.blocks);
        tiling.new_blocks = std::max(1, cut.decompressed.blocks);
        tiling.latent_parts = whole ? 1 : std::max(1, cut.latent.parts);
        tiling.new_parts = whole ? 1 : std::max(1, cut.decompressed.parts);
        tilings.push_back(tiling);
      }
    }
    return tilings;
  }
};

HYPERMLA_REGISTER(MlaVar6PlusV2Plan, "the hybrid with the queries of all heads as rows of the latent products")

}  // namespace
}  // namespace hypermla
