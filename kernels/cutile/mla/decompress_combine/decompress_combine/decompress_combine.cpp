// The kernel and its tiling are in cutile/hybrid, for they are also the last stage of every version of mla_var6_plus.
#include "cutile/hybrid/decompress_combine_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla {
namespace {

class DecompressCombinePlan : public AttentionPlan<CombineProblem, DecompressCombineTiling> {
 public:
  void validate() const override {
    validate_combine(problem);
    validate_combine_tiling(problem, tiling);
  }
  void use_default_tiling() override { tiling = combine_candidates(problem, target).front(); }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    const CombineParts parts{problem.latent_parts, problem.decompressed_parts};
    return combine_kernel(problem, tiling, combine_candidates(problem, target), tensors, [parts] { return parts; });
  }

  // As output_decompression: results/nvidia-h200/output_decompression-b32-s16.json.
  std::vector<Figures> figures() const override {
    return {{.burst = 0.88, .sustained = 0.88, .memory = 0.66, .launches = {0, 0, 0}}};
  }
};

HYPERMLA_REGISTER(DecompressCombinePlan,
                  "merge of latent and decompressed partial outputs, fused with the output decompression")

}  // namespace
}  // namespace hypermla
