#include "mla_var6_plus_v1.h"

#include "cutile/hybrid/hybrid_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla {
namespace {

class MlaVar6PlusV1Plan : public HybridPlan<MlaVar6PlusV1Problem, MlaVar6PlusV1Tiling> {
 public:
  void choose(const DeviceSpec& device) override { choose_new_tokens(problem, "cutile.mla.mla_var6_plus_v1", device); }
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
        tensors, "mla_var6_plus_v1", beside(__FILE__, "mla_var6_plus_v1.cuh"), [](MlaVar6PlusV1Tiling tiling) {
          tiling.latent_blocks = tiling.new_blocks = tiling.latent_parts = tiling.new_parts = 0;
          return tiling;
        });
    std::unique_ptr<CtKernel> combined = combine(tensors, *attention);
    std::vector<std::unique_ptr<Executable>> stages;
    stages.push_back(std::move(attention));
    stages.push_back(std::move(combined));
    return std::make_unique<KernelPipeline>("mla_var6_plus_v1", std::move(stages));
  }

 private:
  // 32 rows lose to 64 that are half empty (docs/kernels/flash-attention.md).
  int rows() const { return problem.s <= 16 ? 16 : 64; }

  static HybridCut tiles(const MlaVar6PlusV1Tiling& tiling) {
    return {{tiling.Bm, tiling.Bn, tiling.Bv, 1}, {1, tiling.Bm, tiling.Bn}};
  }
  std::function<HybridCut(const MlaVar6PlusV1Tiling&)> cutting() const override {
    return [at = problem](const MlaVar6PlusV1Tiling& tiling) {
      return with_blocks(at, tiles(tiling), tiling.latent_parts, tiling.latent_blocks, tiling.new_parts,
                         tiling.new_blocks);
    };
  }

  std::vector<MlaVar6PlusV1Tiling> candidates() const override {
    MlaVar6PlusV1Tiling tiling;
    tiling.Bm = rows();
    if (!target.is_gpu()) {
      tiling.Bk = 512;
      tiling.num_warps = 1;
    } else if (target.arch == "sm_120" || target.arch == "sm_121") {
      tiling.Bn = 32;
    } else if (!target.has_large_blocks()) {
      tiling = {.Bm = std::min(rows(), 32), .Bn = 32, .Bv = 128, .Bk = 64, .num_warps = 4};
    }
    tiling.Bv = std::min(tiling.Bv, problem.k);
    tiling.Bk = std::min(tiling.Bk, problem.k);
    // The model's division leads; it knows neither what a block can read alone nor the clock under load.
    std::vector<MlaVar6PlusV1Tiling> tilings;
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

HYPERMLA_REGISTER(MlaVar6PlusV1Plan,
                        "the hybrid with blocks in proportion to the time of each path, tokens cut into parts")

}  // namespace
}  // namespace hypermla
