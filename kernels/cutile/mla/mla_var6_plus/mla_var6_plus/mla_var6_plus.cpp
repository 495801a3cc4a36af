#include "cutile/hybrid/attend_both_paths_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla {
namespace {

class MlaVar6PlusPlan : public AttendBothPathsPlan {
 public:
  MlaVar6PlusPlan()
      : AttendBothPathsPlan(
            "mla_var6_plus", Rows::of_one_head,
            {"new_Bb", "new_Bs", "new_Bn", "latent_blocks", "new_blocks", "latent_parts", "new_parts"}) {
    tiling.Bm = 16;
  }
  std::vector<FieldRef> tiling_fields() override {
    std::vector<FieldRef> fields = AttendBothPathsPlan::tiling_fields();
    fields.insert(fields.begin() + 4, {"blocks", "blocks of the launch, half of them for each path", &blocks_});
    return fields;
  }
  void use_default_tiling() override {
    AttendBothPathsPlan::use_default_tiling();
    blocks_ = target.processors;
  }
  void validate() const override {
    validate_hybrid(problem);
    validate_tiles();
    require_positive("blocks", blocks_);
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    // The rows of one request only, padded to the 16 that tensor cores need; a CPU has the merge of the other versions.
    const DecompressCombineTiling one_request{
        1, rows_of_one_head(), std::min(128, problem.d), std::min(64, problem.k), 4, 2};
    return pipeline(tensors, target.is_gpu() ? &one_request : nullptr);
  }

 private:
  AttendBothPathsTiling whole(AttendBothPathsTiling tiling) const override {
    tiling.latent_blocks = tiling.new_blocks = has_both_parts(problem) ? std::max(1, blocks_ / 2) : blocks_;
    return AttendBothPathsPlan::whole(tiling);
  }

  std::vector<AttendBothPathsTiling> candidates() const override {
    std::vector<AttendBothPathsTiling> tilings = {tile_of_rows(rows_of_one_head(), 4)};
    if (target.has_large_blocks()) {
      tilings.push_back(tilings.front());
      tilings.back().Bk = std::min(256, problem.k);
    }
    return tilings;
  }

  // Both paths in one block wait for each other. Against v4, s = 16 and 32 (docs/kernels/mla-var6-plus.md): 6.1 and 2.3
  // times its time.
  const HybridParts& parts_of_time() const override {
    static const HybridParts parts = of_cutile({.together = Together::in_halves, .overlap = 0.93 / 2.1});
    return parts;
  }

  int blocks_ = 132;
};

HYPERMLA_REGISTER(MlaVar6PlusPlan, "latent and decompressed tokens in one softmax, half of the blocks for each")

}  // namespace
}  // namespace hypermla
