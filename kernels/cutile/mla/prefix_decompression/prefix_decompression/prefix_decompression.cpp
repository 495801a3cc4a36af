#include "prefix_decompression.h"

#include "hypermla/plan/registry.h"
#include "mla/attention_plan.h"

namespace hypermla {
namespace {

class PrefixDecompressionPlan : public TypedPlan<PrefixDecompressionProblem, PrefixDecompressionTiling> {
 public:
  void validate() const override {
    require_positive("b", problem.b);
    require_positive("t", problem.t);
    require_positive("h", problem.h);
    require_power_of_two("d", problem.d, 16, 256);
    require_power_of_two("k", problem.k, 16, 1024);
    require_half_precision(problem.dtype);
    require_power_of_two("Bm", tiling.Bm, 16, 256);
    require_power_of_two("Bd", tiling.Bd, 16, problem.d);
    require_power_of_two("Bk", tiling.Bk, 16, problem.k);
    require_power_of_two("num_warps", tiling.num_warps, 1, 32);
    require_positive("occupancy", tiling.occupancy);
  }
  void use_default_tiling() override { tiling = candidates().front(); }

  std::vector<TensorSpec> tensors() const override {
    const auto& [b, t, h, d, k, dtype] = problem;
    return {{"z", Role::input, dtype, {b, t, k}},
            {"wk", Role::input, dtype, {h, k, d}},
            {"wv", Role::input, dtype, {h, k, d}},
            {"k", Role::output, dtype, {b, h, t, d}},
            {"v", Role::output, dtype, {b, h, t, d}}};
  }
  // A group is one head of one prefix.
  ReferenceShape reference_shape() const override {
    return {std::int64_t{problem.b} * problem.h, 4.0 * problem.t * problem.k * problem.d};
  }
  ReferenceOutputs reference(std::int64_t group, const InputReader& input) const override {
    const auto& [b, t, h, d, k, dtype] = problem;
    const RowReader rows{input};
    const std::vector<float> z = rows("z", group / h, t, k);
    auto product = [&, t = t, k = k, d = d](const std::vector<float>& w) {
      std::vector<double> sums(std::size_t(t) * d, 0.0);
      for (int i = 0; i < t; ++i)
        for (int c = 0; c < k; ++c)
          for (int column = 0; column < d; ++column) sums[i * d + column] += double(z[i * k + c]) * w[c * d + column];
      return sums;
    };
    return {{"k", product(rows("wk", group % h, k, d))}, {"v", product(rows("wv", group % h, k, d))}};
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    const PrefixDecompressionProblem at = problem;
    CtKernelSpec<PrefixDecompressionProblem, PrefixDecompressionTiling> spec;
    spec.name = "prefix_decompression";
    spec.header = beside(__FILE__, "prefix_decompression.cuh");
    spec.problem = {.b = 0, .t = 0, .h = 0, .d = at.d, .k = at.k, .dtype = at.dtype};
    spec.tiling = tiling;
    spec.candidates = candidates();
    const double tokens = double(at.b) * at.t, width = dtype_bytes(at.dtype);
    spec.cost = {4 * tokens * at.h * at.k * at.d, width * (tokens * at.k + 2.0 * at.h * at.d * (at.k + tokens))};
    spec.grid = [at](const PrefixDecompressionTiling& tiling) {
      return Grid{ceil_div(at.t, tiling.Bm), unsigned(at.h), unsigned(at.b * (at.d / tiling.Bd))};
    };
    spec.arguments = [at, tensors](const PrefixDecompressionTiling&) {
      auto pointer = [&](const char* name) { return tensors.at(name).data; };
      return Arguments(pointer("z"), pointer("wk"), pointer("wv"), pointer("k"), pointer("v"), at.b, at.t, at.h);
    };
    spec.executed = [at, cost = spec.cost](const PrefixDecompressionTiling& tiling) {
      return Cost{cost.flops * padding(at.t, tiling.Bm), cost.bytes};
    };
    return std::make_unique<CtKernel>(std::move(spec));
  }

 private:
  // {Bm, Bd, Bk, num_warps, occupancy}: the best guess leads, the tuner measures the others. Two accumulators of 128 x
  // 128 are 128 registers of each of 256 threads.
  std::vector<PrefixDecompressionTiling> candidates() const {
    std::vector<PrefixDecompressionTiling> tilings;
    if (target.has_large_blocks())
      tilings = {{128, 128, 64, 8, 1}, {64, 128, 64, 4, 1}, {128, 64, 64, 4, 2}};
    else if (target.is_gpu())
      tilings = {{64, 64, 32, 4, 2}};
    else
      tilings = {{64, 128, 128, 1, 1}};
    for (PrefixDecompressionTiling& tiling : tilings) {
      tiling.Bd = std::min(tiling.Bd, problem.d);
      tiling.Bk = std::min(tiling.Bk, problem.k);
    }
    return tilings;
  }
};

HYPERMLA_REGISTER(PrefixDecompressionPlan, "keys and values of a shared prefix from its latents, once for all requests")

}  // namespace
}  // namespace hypermla
