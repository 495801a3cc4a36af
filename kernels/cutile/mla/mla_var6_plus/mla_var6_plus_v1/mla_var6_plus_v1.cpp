#include "mla_var6_plus_v1.h"

#include "cutile/hybrid/hybrid_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla {
namespace {

class MlaVar6PlusV1Plan : public HybridPlan<MlaVar6PlusV1Tiling> {
 public:
  void choose(const DeviceSpec& device) override { choose_new_tokens(problem, "cutile.mla.mla_var6_plus_v1", device); }
  void validate() const override {
    validate_hybrid(problem);
    validate_tiles();
    validate_division();
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    return specialized_pipeline(tensors, "mla_var6_plus_v1", beside(__FILE__, "mla_var6_plus_v1.cuh"), undivided);
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
    return divisions(tiling);
  }
};

HYPERMLA_REGISTER(MlaVar6PlusV1Plan,
                  "the hybrid with blocks in proportion to the time of each path, tokens cut into parts")

}  // namespace
}  // namespace hypermla
