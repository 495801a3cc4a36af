#include "output_decompression.h"

#include <algorithm>

#include "hypermla/plan/registry.h"
#include "mla/attention_time.h"
#include "mla/output_decompression/output_decompression_plan.h"

namespace hypermla {
namespace {

class OutputDecompressionPlan : public AttentionPlan<OutputDecompressionProblem, OutputDecompressionTiling> {
 public:
  void validate() const override {
    require_positive("b", problem.b);
    require_positive("s", problem.s);
    require_positive("h", problem.h);
    require_power_of_two("d", problem.d, 16, 256);
    require_power_of_two("k", problem.k, 16, 1024);
    require_half_precision(problem.dtype);
    require_power_of_two("Bb", tiling.Bb, 1, 256);
    require_power_of_two("Bs", tiling.Bs, 1, 256);
    require_power_of_two("Bd", tiling.Bd, 16, problem.d);
    require_power_of_two("Bk", tiling.Bk, 16, problem.k);
    require_power_of_two("num_warps", tiling.num_warps, 1, 32);
    require_positive("occupancy", tiling.occupancy);
    if (tiling.Bb * tiling.Bs < 16)
      fail("--Bb={} --Bs={} is not supported: a block needs at least 16 rows", tiling.Bb, tiling.Bs);
  }
  void use_default_tiling() override { tiling = candidates().front(); }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    const OutputDecompressionProblem at = problem;
    CtKernelSpec<OutputDecompressionProblem, OutputDecompressionTiling> spec;
    spec.name = "output_decompression";
    spec.header = beside(__FILE__, "output_decompression.cuh");
    spec.problem = {.b = 0, .s = 0, .h = 0, .d = at.d, .k = at.k, .dtype = at.dtype};
    spec.tiling = tiling;
    spec.candidates = candidates();
    spec.cost = output_decompression_cost(at);
    spec.grid = [at](const OutputDecompressionTiling& tiling) {
      return Grid{ceil_div(at.b, tiling.Bb) * ceil_div(at.s, tiling.Bs), unsigned(at.h), unsigned(at.d / tiling.Bd)};
    };
    spec.arguments = [at, tensors](const OutputDecompressionTiling&) {
      return Arguments(tensors.at("o_latent").data, tensors.at("w").data, tensors.at("o").data, at.b, at.h, at.s);
    };
    // Padded rows are computed too.
    spec.executed = [at, cost = spec.cost](const OutputDecompressionTiling& tiling) {
      return Cost{cost.flops * padding(at.b, tiling.Bb) * padding(at.s, tiling.Bs), cost.bytes};
    };
    return std::make_unique<CtKernel>(std::move(spec));
  }

  // results/nvidia-h200/output_decompression-b32-s16.json: 33.1 us for 101 MB.
  std::vector<Figures> figures() const override {
    return {{.burst = 0.88, .sustained = 0.88, .memory = 0.66, .launches = {0, 0, 0}}};
  }
  TimeEstimate time(const Ceilings& ceilings) const override {
    return output_decompression_time(problem, figures(), ceilings);
  }

 private:
  // {Bb, Bs, Bd, Bk, num_warps, occupancy}: the best first guess leads, the tuner measures the others. A block covers
  // as many queries of a batch element as there are, and fills up with batch elements.
  std::vector<OutputDecompressionTiling> candidates() const {
    std::vector<OutputDecompressionTiling> tilings;
    auto add = [&](int rows, int Bd, int Bk, int num_warps, int occupancy) {
      const int Bs = std::min(int(std::bit_ceil(unsigned(std::max(problem.s, 1)))), rows);
      tilings.push_back({rows / Bs, Bs, std::min(Bd, problem.d), std::min(Bk, problem.k), num_warps, occupancy});
    };
    if (problem.s == 1) {
      add(32, 128, 64, 4, 2);
      add(64, 128, 64, 4, 2);
      add(64, 64, 64, 4, 3);
      add(16, 128, 64, 4, 3);
    } else {
      add(64, 128, 32, 4, 2);
      add(64, 128, 64, 4, 2);
      if (target.has_large_blocks()) add(128, 128, 64, 8, 1);
    }
    return tilings;
  }
};

HYPERMLA_REGISTER(OutputDecompressionPlan, "latent outputs times the value projection of their head")

}  // namespace
}  // namespace hypermla
