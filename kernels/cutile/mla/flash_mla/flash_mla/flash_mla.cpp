#include "flash_mla.h"

#include <algorithm>

#include "hypermla/plan/registry.h"
#include "mla/attention_time.h"
#include "mla/latent/latent_plan.h"

namespace hypermla {
namespace {

class FlashMlaPlan : public AttentionPlan<LatentProblem, FlashMlaTiling> {
 public:
  FlashMlaPlan() : AttentionPlan(kLatentServing) {}
  void validate() const override {
    validate_latent(problem);
    require_power_of_two("Bm", tiling.Bm, 16, 256);
    require_power_of_two("Bn", tiling.Bn, 16, 256);
    require_power_of_two("Bv", tiling.Bv, 16, problem.k);
    require_power_of_two("Bk", tiling.Bk, 16, problem.k);
    require_power_of_two("num_warps", tiling.num_warps, 1, 32);
    require_positive("occupancy", tiling.occupancy);
    require_heads(tiling.Bh, problem.h);
    require_power_of_two("num_ctas", tiling.num_ctas, 1, 8);
    if (tiling.num_ctas > 1 && !target.has_large_blocks())
      fail("--num_ctas={} is not supported: {} has no clusters of thread blocks", tiling.num_ctas, target.arch);
  }
  void use_default_tiling() override { tiling = candidates().front(); }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    const LatentProblem at = problem;
    CtKernelSpec<LatentProblem, FlashMlaTiling> spec;
    spec.name = "flash_mla";
    spec.header = beside(__FILE__, "flash_mla.cuh");
    spec.problem = {
        .b = 0, .s = 0, .t = 0, .h = 0, .d = 0, .p = at.p, .k = at.k, .dtype = at.dtype, .causal = at.causal};
    spec.tiling = tiling;
    spec.candidates = candidates();
    spec.cost = latent_cost(at);
    spec.grid = [at](const FlashMlaTiling& tiling) {
      const int heads = tiling.Bh ? tiling.Bh : at.h;
      return Grid{at.h / heads * ceil_div(heads * at.s, tiling.Bm), unsigned(at.k / tiling.Bv), unsigned(at.b)};
    };
    spec.arguments = [at, tensors](const FlashMlaTiling&) {
      auto pointer = [&](const char* name) { return tensors.at(name).data; };
      return Arguments(pointer("qc"), pointer("qpe"), pointer("z"), pointer("kpe"), pointer("o"), pointer("lse"),
                       softmax_scale(at.d, at.p), at.b, at.h, at.s, at.t);
    };
    spec.executed = [at](const FlashMlaTiling& tiling) { return latent_executed(at, tiling.Bm, tiling.Bn, tiling.Bv); };
    return std::make_unique<CtKernel>(std::move(spec));
  }

  Path path() const override { return Path::latent; }
  std::string followed_by() const override { return "output_decompression"; }
  // results/nvidia-h200/flash_mla-b32-s16.json: 1180 us, 1288 us sustained; docs/kernels/flash-mla.md, s = 1 to 8.
  std::vector<Figures> figures() const override {
    return {{.rows = 64, .burst = 0.655, .sustained = 0.655, .memory = 0.92, .readers = 0.73}};
  }
  TimeEstimate time(const Ceilings& ceilings) const override { return latent_time(problem, figures(), ceilings); }

 private:
  // {Bm, Bn, Bv, Bk, num_warps, occupancy}: the best first guess leads, the tuner measures the others. Two warpgroups
  // (8 warps) hold the whole 64 x 512 accumulator; GPUs with small blocks make the scores several times instead.
  std::vector<FlashMlaTiling> candidates() const {
    std::vector<FlashMlaTiling> tilings;
    if (!target.is_gpu())
      tilings = {{64, 64, 512, 512, 1, 1}, {64, 128, 512, 512, 1, 1}, {32, 64, 512, 512, 1, 1}};
    else if (target.has_large_blocks())
      tilings = {{64, 64, 512, 128, 8, 1}, {64, 64, 512, 256, 8, 1}, {64, 64, 512, 64, 8, 1},  {64, 64, 512, 512, 8, 1},
                 {64, 32, 512, 128, 8, 1}, {128, 64, 256, 64, 8, 1}, {64, 128, 256, 128, 4, 1}};
    else if (target.is_small_blackwell())
      tilings = {{64, 32, 512, 128, 8, 1}};
    else
      tilings = {{32, 32, 128, 64, 8, 1}};
    for (FlashMlaTiling& tiling : tilings) {
      tiling.Bv = std::min(tiling.Bv, problem.k);
      tiling.Bk = std::min(tiling.Bk, problem.k);
    }
    return tilings;
  }
};

HYPERMLA_REGISTER(FlashMlaPlan, "attention in the latent space with absorbed projections, for decoding (s = 1)")

}  // namespace
}  // namespace hypermla
