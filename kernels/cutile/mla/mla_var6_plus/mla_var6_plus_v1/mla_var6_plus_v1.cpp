#include "cutile/hybrid/attend_both_paths_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla {
namespace {

class MlaVar6PlusV1Plan : public AttendBothPathsPlan {
 public:
  MlaVar6PlusV1Plan()
      : AttendBothPathsPlan("mla_var6_plus_v1", Rows::of_one_head, {"new_Bb", "new_Bs", "new_Bn"}) { tiling.Bm = 16; }
  void choose(const DeviceSpec& device) override { choose_new_tokens(problem, "cutile.mla.mla_var6_plus_v1", device); }
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
};

HYPERMLA_REGISTER(MlaVar6PlusV1Plan,
                  "the hybrid with blocks in proportion to the time of each path, tokens cut into parts")

}  // namespace
}  // namespace hypermla
