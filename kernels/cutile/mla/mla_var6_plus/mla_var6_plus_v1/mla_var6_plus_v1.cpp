#include "cutile/hybrid/attend_both_paths_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla {
namespace {

class MlaVar6PlusV1Plan : public AttendBothPathsPlan {
 public:
  MlaVar6PlusV1Plan() : AttendBothPathsPlan("mla_var6_plus_v1", Rows::of_one_head, {"new_Bb", "new_Bs", "new_Bn"}) {
    tiling.Bm = 16;
  }
  void validate() const override {
    validate_hybrid(problem);
    validate_tiles();
    validate_division();
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override { return pipeline(tensors); }

 private:
  std::vector<AttendBothPathsTiling> candidates() const override {
    return divisions(tile_of_rows(rows_of_one_head(), 4));
  }

  // Both paths in one block wait for each other. Against v4, s = 16 and 32 (docs/kernels/mla-var6-plus.md): 3.6 and 3.2
  // times its time, and more with few decompressed tokens.
  const HybridParts& parts_of_time() const override {
    static const HybridParts parts =
        of_cutile({.overlap = 0.93 / 3.2, .beside = figures_of("cutile.mla.mla_var6_plus_v4"), .cut = true});
    return parts;
  }
};

HYPERMLA_REGISTER(MlaVar6PlusV1Plan,
                  "the hybrid with blocks in proportion to the time of each path, tokens cut into parts")

}  // namespace
}  // namespace hypermla
