#include "mla_var6_plus.h"

#include "cutile/hybrid/hybrid_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla {
namespace {

class MlaVar6PlusPlan : public HybridPlan<MlaVar6PlusTiling> {
 public:
  void choose(const DeviceSpec& device) override { choose_new_tokens(problem, "cutile.mla.mla_var6_plus", device); }
  void validate() const override {
    validate_hybrid(problem);
    validate_tiles();
    require_positive("blocks", tiling.blocks);
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    // The rows of one request only, padded to the 16 that tensor cores need.
    const DecompressCombineTiling one_request{1, rows(), std::min(128, problem.d), std::min(64, problem.k), 4, 2};
    auto compiled = [](MlaVar6PlusTiling tiling) {
      tiling.blocks = 0;
      return tiling;
    };
    return specialized_pipeline(tensors, "mla_var6_plus", beside(__FILE__, "mla_var6_plus.cuh"), compiled,
                                &one_request);
  }

 private:
  // 32 rows lose to 64 that are half empty (docs/kernels/flash-attention.md).
  int rows() const { return problem.s <= 16 ? 16 : 64; }

  std::function<HybridCut(const MlaVar6PlusTiling&)> cutting() const override {
    return [at = problem](const MlaVar6PlusTiling& tiling) {
      const bool both = has_both_parts(at);
      const int blocks = both ? std::max(1, tiling.blocks / 2) : tiling.blocks;
      return with_blocks(at, {{tiling.Bm, tiling.Bn, tiling.Bv, 1}, {1, tiling.Bm, tiling.Bn}}, 1, blocks, 1, blocks);
    };
  }

  std::vector<MlaVar6PlusTiling> candidates() const override {
    std::vector<MlaVar6PlusTiling> tilings;
    const int blocks = target.processors;
    if (!target.is_gpu())
      tilings = {{rows(), 64, 512, 512, blocks, 1, 1}};
    else if (target.has_large_blocks())
      tilings = {{rows(), 64, 512, 128, blocks, 8, 1}, {rows(), 64, 512, 256, blocks, 8, 1}};
    else if (target.arch == "sm_120" || target.arch == "sm_121")
      tilings = {{rows(), 32, 512, 128, blocks, 8, 1}};
    else
      tilings = {{std::min(rows(), 32), 32, 128, 64, blocks, 4, 1}};
    for (MlaVar6PlusTiling& tiling : tilings) {
      tiling.Bv = std::min(tiling.Bv, problem.k);
      tiling.Bk = std::min(tiling.Bk, problem.k);
    }
    return tilings;
  }
};

HYPERMLA_REGISTER(MlaVar6PlusPlan, "latent and decompressed tokens in one softmax, half of the blocks for each")

}  // namespace
}  // namespace hypermla
