// How long a hybrid takes: what it is made of is data of its version, and the plan answers from that.
#pragma once

#include "hypermla/plan/choice.h"
#include "mla/hybrid/hybrid_plan.h"

namespace hypermla {

// How a hybrid runs its two parts.
enum class Together { at_once, in_halves, in_turn };  // in halves: at once, on half of the processors each

// Where there are figures of several tiles, the fastest counts.
struct HybridParts {
  Together together = Together::at_once;
  // Two parts at once slow each other down in L2 and memory, by 7 to 10 % each; on partitions one also ends before the
  // other (docs/choice.md).
  double overlap = 0.93;
  std::vector<Figures> beside = {};  // the decompressed part beside the latent one, tokens of each request's own
  std::vector<Figures> latent = {};  // the parts alone
  bool cut = false;                  // latent tokens are cut until blocks that own tiles fill the processors
  std::vector<Figures> decompressed = {};
  std::vector<Figures> shared = {};  // the decompressed part over tokens that requests share
  Figures combine = {};              // what follows the parts
};

std::vector<Figures> figures_of(const std::vector<KernelEntry>& kernels);
// Of one kernel by its full name, "cutile.mla.flash_mla". Throws Error for an unknown one.
std::vector<Figures> figures_of(const std::string& kernel);

// Its combine included. Throws Error unless 0 <= n <= t.
TimeEstimate hybrid_time(const HybridParts& parts, const HybridProblem& at, const Ceilings& ceilings);

// What the plans of all hybrids share for the choice.
template <class Tiling>
class TimedHybridPlan : public AttentionPlan<HybridProblem, Tiling> {
 public:
  using AttentionPlan<HybridProblem, Tiling>::problem;

  std::vector<FieldRef> problem_fields() override {
    std::vector<FieldRef> fields = AttentionPlan<HybridProblem, Tiling>::problem_fields();
    for (FieldRef& field : fields) {
      if (field.name != "n") continue;
      field.help =
          "decompressed tokens of each request; -1: the tuner measures some (docs/choice.md), without it the model "
          "chooses; roofline: the n of docs/cost-analysis.md; with prefixes their length";
      field.words = {{"roofline", kByRoofline}};
    }
    return fields;
  }
  void choose(const DeviceSpec& device) override {
    if (problem.prefixes != 0) return;
    if (problem.n == kByModel) problem.n = choose_n(*this, device);
    // 16: the multiple that docs/predictions.md lists.
    if (problem.n == kByRoofline) problem.n = n_star(attention_shape(problem), ridge(device, problem.dtype), 16);
  }
  Path path() const override { return problem.prefixes > 0 ? Path::shared_prefix : Path::hybrid; }
  TimeEstimate time(const Ceilings& ceilings) const override { return hybrid_time(parts_of_time(), problem, ceilings); }

 protected:
  // It is asked for often, so it is made once.
  virtual const HybridParts& parts_of_time() const = 0;
};

}  // namespace hypermla
