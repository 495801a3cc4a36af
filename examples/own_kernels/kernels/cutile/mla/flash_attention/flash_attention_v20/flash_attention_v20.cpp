#include "flash_attention_v20.h"

#include "hypermla/plan/registry.h"
#include "mla/decompressed/decompressed_plan.h"

namespace hypermla {
namespace {

class FlashAttentionV20Plan : public AttentionPlan<DecompressedProblem, FlashAttentionV20Tiling> {
 public:
  FlashAttentionV20Plan() : AttentionPlan({"ragged", "prefixes", "after", "parts"}) {}
  void validate() const override {
    validate_attention(problem);
    require_power_of_two("Bm", tiling.Bm, 16, 256);
    require_power_of_two("Bn", tiling.Bn, 16, 256);
    require_power_of_two("num_warps", tiling.num_warps, 1, 32);
    require_positive("occupancy", tiling.occupancy);
    if (ceil_div(problem.s, tiling.Bm) > 65535)  // CUDA's limit of the second axis
      fail("--s={} --Bm={} is not supported: more than 65535 blocks of queries", problem.s, tiling.Bm);
  }
  void use_default_tiling() override { tiling = candidates().front(); }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    const DecompressedProblem at = problem;
    CtKernelSpec<DecompressedProblem, FlashAttentionV20Tiling> spec;
    spec.name = "flash_attention_v20";
    spec.header = beside(__FILE__, "flash_attention_v20.cuh");
    spec.problem = {.b = 0, .s = 0, .t = 0, .h = 0, .d = at.d, .p = at.p, .dtype = at.dtype, .causal = at.causal};
    spec.tiling = tiling;
    spec.candidates = candidates();
    spec.cost = decompressed_cost(at);
    spec.grid = [at](const FlashAttentionV20Tiling& tiling) {
      return Grid{unsigned(at.h), ceil_div(at.s, tiling.Bm), unsigned(at.b)};
    };
    spec.arguments = [at, tensors](const FlashAttentionV20Tiling&) {
      auto pointer = [&](const char* name) { return tensors.at(name).data; };
      return Arguments(pointer("q"), pointer("qpe"), pointer("k"), pointer("v"), pointer("kpe"), pointer("o"),
                       pointer("lse"), softmax_scale(at.d, at.p), at.b, at.h, at.s, at.t);
    };
    // Padded rows and tokens are computed too.
    spec.executed = [at, cost = spec.cost](const FlashAttentionV20Tiling& tiling) {
      return Cost{cost.flops * padding(at.s, tiling.Bm) * padding(at.t, tiling.Bn), cost.bytes};
    };
    return std::make_unique<CtKernel>(std::move(spec));
  }

 private:
  // {Bm, Bn, num_warps, occupancy}: those of the base version that are not for GPUs with small blocks.
  std::vector<FlashAttentionV20Tiling> candidates() const {
    const int s = problem.s;
    if (!target.is_gpu()) {
      if (s <= 16) return {{16, 64, 1, 1}, {16, 128, 1, 1}};
      return {{64, 64, 1, 1}, {32, 64, 1, 1}, {64, 128, 1, 1}};
    }
    if (s <= 16) return {{16, 128, 4, 2}, {16, 64, 4, 2}, {16, 32, 4, 4}, {16, 64, 4, 1}};
    if (s <= 64) return {{64, 64, 4, 2}, {32, 32, 4, 2}, {64, 128, 4, 1}, {64, 32, 4, 2}, {16, 128, 4, 2}};
    return {{128, 128, 8, 1}, {128, 64, 8, 1}, {64, 64, 4, 2}, {64, 128, 4, 1}};
  }
};

HYPERMLA_REGISTER_DRAFT(FlashAttentionV20Plan, "an example of a version outside of the repository: heads side by side")

}  // namespace
}  // namespace hypermla
