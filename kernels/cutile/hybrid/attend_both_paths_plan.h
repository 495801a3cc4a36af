// The plan of the versions of the hybrid that are attend_both_paths and then a merge: a version says which tilings it
// takes, and what of them its user chooses.
#pragma once

#include "cutile/hybrid/attend_both_paths.h"
#include "cutile/hybrid/hybrid_plan.h"

namespace hypermla {

class AttendBothPathsPlan : public HybridPlan<AttendBothPathsTiling> {
 public:
  std::vector<FieldRef> tiling_fields() override {
    std::vector<FieldRef> fields = without(fields_of(tiling), derived_);
    fields.push_back({"Bh", "heads whose queries are rows of one latent matrix, a divisor of h", &heads_});
    return fields;
  }
  void use_default_tiling() override {
    if (has_extents(problem)) heads_ = rows_ == Rows::of_all_heads ? problem.h : 1;
    HybridPlan::use_default_tiling();
  }

 protected:
  // The queries of all heads are rows of one latent product, or those of one head.
  enum class Rows { of_one_head, of_all_heads };
  // `derived` fields of the tiling are no flags, for they follow from others: without tiles of its own the decompressed
  // path has the rows and tokens of the latent one.
  AttendBothPathsPlan(std::string name, Rows rows, std::vector<std::string_view> derived = {})
      : name_(std::move(name)), rows_(rows), derived_(std::move(derived)) {}

  // The tiling with what follows from its flags.
  virtual AttendBothPathsTiling whole(AttendBothPathsTiling tiling) const {
    if (!derived_.empty()) tiling.new_Bb = 1, tiling.new_Bs = tiling.Bm, tiling.new_Bn = tiling.Bn;
    return tiling;
  }

  // No blocks and parts for a path without tokens, and no more blocks than units.
  std::function<HybridCut(const AttendBothPathsTiling&)> cutting() const override {
    return [at = problem, heads = heads_](const AttendBothPathsTiling& tiling) {
      HybridCut cut{{tiling.Bm, tiling.Bn, tiling.Bv, heads}, {tiling.new_Bb, tiling.new_Bs, tiling.new_Bn}};
      if (latent_tokens(at)) {
        cut.latent.parts = tiling.latent_parts;
        cut.latent.blocks = int(std::min<double>(tiling.latent_blocks, units_of(at, cut.latent)));
      }
      if (decompressed_tokens(at)) {
        cut.decompressed.parts = tiling.new_parts;
        cut.decompressed.blocks = int(std::min<double>(tiling.new_blocks, units_of(at, cut.decompressed)));
      }
      return cut;
    };
  }

  // One tile for both paths where they have no tiles of their own: the best one measured, as far as blocks hold it. A
  // CPU and GPUs with small blocks take fewer warps.
  AttendBothPathsTiling tile_of_rows(int rows, int warps_of_small_blocks) const {
    AttendBothPathsTiling tiling{.Bm = rows};
    if (!target.is_gpu())
      tiling.Bk = 512, tiling.num_warps = 1;
    else if (target.is_small_blackwell())
      tiling.Bn = 32;
    else if (!target.has_large_blocks())
      tiling = {.Bm = std::min(rows, 32), .Bn = 32, .Bv = 128, .Bk = 64, .num_warps = warps_of_small_blocks};
    tiling.Bv = std::min(tiling.Bv, problem.k);
    tiling.Bk = std::min(tiling.Bk, problem.k);
    return tiling;
  }
  // Of the queries of one head; 32 rows lose to 64 that are half empty (docs/kernels/flash-attention.md).
  int rows_of_one_head() const { return problem.s <= 16 ? 16 : 64; }

  void validate_tiles() const {
    require_power_of_two("Bm", tiling.Bm, 16, 128);
    require_power_of_two("Bn", tiling.Bn, 16, 256);
    require_power_of_two("Bv", tiling.Bv, 16, problem.k);
    require_power_of_two("Bk", tiling.Bk, 16, problem.k);
    require_power_of_two("num_warps", tiling.num_warps, 1, 32);
    require_positive("occupancy", tiling.occupancy);
    require_positive("Bh", heads_);
    require_heads(heads_, problem.h);
  }
  void validate_division() const {
    require_positive("latent_blocks", tiling.latent_blocks);
    require_positive("new_blocks", tiling.new_blocks);
    require_parts("latent_parts", tiling.latent_parts);
    require_parts("new_parts", tiling.new_parts);
  }
  // The kernel learns its division at run time.
  static AttendBothPathsTiling undivided(AttendBothPathsTiling tiling) {
    tiling.latent_blocks = tiling.new_blocks = tiling.latent_parts = tiling.new_parts = 0;
    return tiling;
  }
  // Divided as the model says, the latent share scaled by `shift`.
  AttendBothPathsTiling divided(AttendBothPathsTiling tiling, double shift = 1) const {
    tiling.latent_blocks = tiling.new_blocks = tiling.latent_parts = tiling.new_parts = 1;
    const HybridCut cut = in_proportion(problem, cutting()(whole(tiling)), target.processors, shift);
    tiling.latent_blocks = std::max(1, cut.latent.blocks);
    tiling.new_blocks = std::max(1, cut.decompressed.blocks);
    tiling.latent_parts = std::max(1, cut.latent.parts);
    tiling.new_parts = std::max(1, cut.decompressed.parts);
    return tiling;
  }
  // The model's division leads; it knows neither what a block can read alone nor the clock under load.
  std::vector<AttendBothPathsTiling> divisions(const AttendBothPathsTiling& tiling) const {
    std::vector<AttendBothPathsTiling> tilings;
    for (const double shift : {1.0, 0.8, 1.25}) {
      tilings.push_back(divided(tiling, shift));
      tilings.push_back(tilings.back());
      tilings.back().latent_parts = tilings.back().new_parts = 1;
    }
    return tilings;
  }

  // `only_merge`: the one tiling of the merge; null: what its own plan would try.
  std::unique_ptr<Executable> pipeline(const Tensors& tensors,
                                       const DecompressCombineTiling* only_merge = nullptr) const {
    std::unique_ptr<CtKernel> attention = attention_kernel(tensors);
    auto parts = [attention = attention.get(), cut = cutting()] {
      const HybridCut now = cut(fields_from_json<AttendBothPathsTiling>(attention->tiling()));
      return CombineParts{now.latent.parts, now.decompressed.parts};
    };
    const CombineProblem last = combine_problem(cutting()(whole(tiling)));
    const std::vector<DecompressCombineTiling> tilings =
        only_merge ? std::vector{*only_merge} : combine_candidates(last, target);
    std::vector<std::unique_ptr<Executable>> stages;
    stages.push_back(std::move(attention));
    stages.push_back(combine_kernel(last, tilings.front(), tilings, tensors, parts));
    return std::make_unique<KernelPipeline>(name_, std::move(stages));
  }

 private:
  std::unique_ptr<CtKernel> attention_kernel(const Tensors& tensors) const {
    CtKernelSpec<HybridProblem, AttendBothPathsTiling> spec;
    spec.name = "attend_both_paths";
    spec.header = "cutile/hybrid/attend_both_paths.cuh";
    spec.problem = at_compile_time();
    spec.tiling = whole(tiling);
    for (const AttendBothPathsTiling& one : candidates()) spec.candidates.push_back(whole(one));
    spec.cost = hybrid_attention_cost(problem);
    spec.at_compile_time = undivided;
    spec.grid = [cut = cutting()](const AttendBothPathsTiling& tiling) {
      const HybridCut at = cut(tiling);
      return Grid{unsigned(at.latent.blocks + at.decompressed.blocks), 1, 1};
    };
    spec.arguments = [at = problem, heads = heads_, cut = cutting(), tensors](const AttendBothPathsTiling& tiling) {
      const HybridCut now = cut(tiling);
      auto of = [&](const char* name) { return tensors.count(name) ? tensors.at(name).data : nullptr; };
      return Arguments(of("q"), of("qc"), of("qpe"), of("z"), of("kpe"), of("k"), of("v"), of("kpe_new"), of("lengths"),
                       of("new_lengths"), of("prefix"), of("o_latent"), of("lse_latent"), of("o_new"), of("lse_new"),
                       softmax_scale(at.d, at.p), at.b, at.h, at.s, latent_tokens(at), decompressed_tokens(at),
                       at.prefixes, int(at.ragged), heads, now.latent.parts, now.latent.blocks, now.decompressed.parts);
    };
    spec.executed = [at = problem, cut = cutting()](const AttendBothPathsTiling& tiling) {
      return executed_by(at, cut(tiling));
    };
    return std::make_unique<CtKernel>(std::move(spec));
  }

  std::string name_;
  Rows rows_;
  int heads_ = 1;  // Bh: the kernel learns it at run time
  std::vector<std::string_view> derived_;
};

}  // namespace hypermla
