#include "cutile/hybrid/attend_both_paths_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla {
namespace {

class MlaVar6PlusV2Plan : public AttendBothPathsPlan {
 public:
  MlaVar6PlusV2Plan() : AttendBothPathsPlan("mla_var6_plus_v2", Rows::of_all_heads, {"new_Bb", "new_Bs", "new_Bn"}) {}
  void validate() const override {
    validate_hybrid(problem);
    validate_tiles();
    validate_division();
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override { return pipeline(tensors); }

 private:
  std::vector<AttendBothPathsTiling> candidates() const override { return divisions(tile_of_rows(64, 8)); }

  // Both paths in one block wait for each other. Against v4, s = 16 and 32 (docs/kernels/mla-var6-plus.md): 2.4 and 2.2
  // times its time, and more with few decompressed tokens.
  const HybridParts& parts_of_time() const override {
    static const HybridParts parts =
        of_cutile({.overlap = 0.93 / 2.4, .beside = figures_of("cutile.mla.mla_var6_plus_v4"), .cut = true});
    return parts;
  }
};

HYPERMLA_REGISTER(MlaVar6PlusV2Plan, "the hybrid with the queries of all heads as rows of the latent products")

}  // namespace
}  // namespace hypermla
