#include "flash_attention.h"

#include "cutile/prefill/prefill_plan.h"
#include "hypermla/plan/registry.h"
#include "mla/attention_time.h"
#include "mla/decompressed/decompressed_plan.h"

namespace hypermla {
namespace {

class FlashAttentionPlan : public AttentionPlan<DecompressedProblem, FlashAttentionTiling> {
 public:
  FlashAttentionPlan() : AttentionPlan({"ragged", "prefixes", "after", "parts"}) {}
  void validate() const override {
    validate_attention(problem);
    require_power_of_two("Bm", tiling.Bm, 16, 256);
    require_power_of_two("Bn", tiling.Bn, 16, 256);
    require_power_of_two("num_warps", tiling.num_warps, 1, 32);
    require_positive("occupancy", tiling.occupancy);
  }
  void use_default_tiling() override { tiling = candidates().front(); }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    const DecompressedProblem at = problem;
    CtKernelSpec<DecompressedProblem, FlashAttentionTiling> spec;
    spec.name = "flash_attention";
    spec.header = beside(__FILE__, "flash_attention.cuh");
    spec.problem = {.b = 0, .s = 0, .t = 0, .h = 0, .d = at.d, .p = at.p, .dtype = at.dtype, .causal = at.causal};
    spec.tiling = tiling;
    spec.candidates = candidates();
    spec.cost = decompressed_cost(at);
    spec.grid = [at](const FlashAttentionTiling& tiling) {
      return Grid{ceil_div(at.s, tiling.Bm), unsigned(at.h), unsigned(at.b)};
    };
    spec.arguments = [at, tensors](const FlashAttentionTiling&) {
      auto pointer = [&](const char* name) { return tensors.at(name).data; };
      return Arguments(pointer("q"), pointer("qpe"), pointer("k"), pointer("v"), pointer("kpe"), pointer("o"),
                       pointer("lse"), softmax_scale(at.d, at.p), at.b, at.h, at.s, at.t);
    };
    // Padded rows and tokens are computed too.
    spec.executed = [at, cost = spec.cost](const FlashAttentionTiling& tiling) {
      return Cost{cost.flops * padding(at.s, tiling.Bm) * padding(at.t, tiling.Bn), cost.bytes};
    };
    return std::make_unique<CtKernel>(std::move(spec));
  }

  std::unique_ptr<PrefillKernels> prefill(const MlaPrefillOptions& options) const override {
    FlashAttentionPlan self = *this;
    self.problem.s = options.max_query_tokens;
    self.use_default_tiling();
    FlashAttentionTiling& of = self.tiling;
    if (options.query_rows && !target.has_large_blocks()) of.num_warps = 8;  // 4 would keep a stack frame of 48 bytes
    return make_portable_prefill(options, {of.Bm, of.Bn, of.num_warps, of.occupancy});
  }

  Path path() const override { return Path::decompressed; }
  // results/nvidia-h200/flash_attention-*.json: b1 s512 t8192 513 us (592), b32 s128 2413 us (2881); tiles of 64 rows
  // at s = 128 took 3.31 ms, and of 32 rows, by mma.sync, 2.54 ms at s = 32 (docs/log/flash-attention.md), which is
  // used for those of 16 rows, too; 0.975 of the reads at s = 32 and 64, from 96 SMs on, sustained, too (the envelope
  // of 2026-11-21). Without WGMMA tiles of 16 rows are taken to reach what larger ones do.
  std::vector<Figures> figures() const override {
    return {{.rows = 16, .burst = 0.2, .sustained = 0.2, .memory = 0.975, .elsewhere = 0.66, .readers = 0.73},
            {.rows = 64, .burst = 0.66, .sustained = 0.66, .memory = 0.975, .readers = 0.73},
            {.rows = 128, .burst = 0.88, .sustained = 0.825, .memory = 0.975, .readers = 0.73}};
  }
  TimeEstimate time(const Ceilings& ceilings) const override { return decompressed_time(problem, figures(), ceilings); }

 private:
  // {Bm, Bn, num_warps, occupancy}: the best first guess leads, the tuner measures the others. None of the GPU's keeps
  // a stack frame (Bn = 256, and Bm = 32 with Bn = 64, would).
  std::vector<FlashAttentionTiling> candidates() const {
    const int s = problem.s;
    if (!target.is_gpu()) {
      if (s <= 16) return {{16, 64, 1, 1}, {16, 128, 1, 1}};
      return {{64, 64, 1, 1}, {32, 64, 1, 1}, {64, 128, 1, 1}};
    }
    if (!target.has_large_blocks()) {
      if (s <= 16) return {{16, 64, 4, 2}, {16, 32, 4, 4}};
      return {{64, 64, 4, 1}, {16, 64, 4, 2}};
    }
    if (s <= 16) return {{16, 128, 4, 2}, {16, 64, 4, 2}, {16, 32, 4, 4}, {16, 64, 4, 1}};
    if (s <= 64) return {{64, 64, 4, 2}, {32, 32, 4, 2}, {64, 128, 4, 1}, {64, 32, 4, 2}, {16, 128, 4, 2}};
    return {{128, 128, 8, 1}, {128, 64, 8, 1}, {64, 64, 4, 2}, {64, 128, 4, 1}};
  }
};

HYPERMLA_REGISTER(FlashAttentionPlan, "attention over decompressed keys and values, for prefill (s >= 128)")

}  // namespace
}  // namespace hypermla
