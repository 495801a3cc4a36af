#include "flash_mla_split_kv.h"

#include <algorithm>
#include <cmath>

#include "cutile/decode/decode_plan.h"
#include "flash_mla_split_kv_reduce.h"
#include "hypermla/plan/configure.h"
#include "hypermla/plan/registry.h"
#include "mla/attention_time.h"
#include "mla/latent/latent_plan.h"

namespace hypermla {
namespace {

constexpr int kMaxSplits = 128;

class FlashMlaSplitKvPlan : public AttentionPlan<LatentProblem, FlashMlaSplitKvTiling> {
 public:
  FlashMlaSplitKvPlan() : AttentionPlan(kLatentServing) {}
  void validate() const override {
    validate_latent(problem);
    require_power_of_two("Bm", tiling.Bm, 16, 256);
    require_power_of_two("Bn", tiling.Bn, 16, 256);
    require_power_of_two("Bv", tiling.Bv, 16, problem.k);
    require_power_of_two("Bk", tiling.Bk, 16, problem.k);
    require_power_of_two("num_warps", tiling.num_warps, 1, 32);
    require_positive("occupancy", tiling.occupancy);
    require_power_of_two("reduce_Bm", reduce_tiling.Bm, 1, 256);
    require_power_of_two("reduce_Bv", reduce_tiling.Bv, 16, problem.k);
    require_power_of_two("reduce_num_warps", reduce_tiling.num_warps, 1, 32);
    require_positive("reduce_occupancy", reduce_tiling.occupancy);
    if (tiling.splits < 1 || tiling.splits > kMaxSplits)
      fail("--splits={} is not supported: it must be from 1 to {}", tiling.splits, kMaxSplits);
  }
  void use_default_tiling() override {
    tiling = candidates().front();
    reduce_tiling = reduce_candidates().front();
  }
  std::vector<FieldRef> tiling_fields() override {
    std::vector<FieldRef> fields = fields_of(tiling);
    fields.push_back({"reduce_Bm", "rows per block of the reduction", &reduce_tiling.Bm});
    fields.push_back({"reduce_Bv", "output columns per block of the reduction", &reduce_tiling.Bv});
    fields.push_back({"reduce_num_warps", "warps of a block of the reduction", &reduce_tiling.num_warps});
    fields.push_back({"reduce_occupancy", "blocks of the reduction on one multiprocessor", &reduce_tiling.occupancy});
    return fields;
  }

  std::vector<TensorSpec> tensors() const override {
    std::vector<TensorSpec> tensors = tensors_of(problem);
    const LatentProblem& at = problem;
    const int splits = most_splits();
    tensors.push_back({"o_part", Role::workspace, at.dtype, {splits, at.b, at.h, at.s, at.k}});
    tensors.push_back({"lse_part", Role::workspace, DType::float32, {splits, at.b, at.h, at.s}});
    return tensors;
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    std::unique_ptr<CtKernel> parts = attention(tensors);
    std::unique_ptr<CtKernel> merged = reduction(tensors, *parts);
    std::vector<std::unique_ptr<Executable>> stages;
    stages.push_back(std::move(parts));
    stages.push_back(std::move(merged));
    return std::make_unique<KernelPipeline>("flash_mla_split_kv", std::move(stages));
  }

  Path path() const override { return Path::latent; }
  std::string followed_by() const override { return "output_decompression"; }
  // results/nvidia-h200/flash_mla_split_kv-b32-s1.json: 84.8 us, stage 1 as flash_mla.
  std::vector<Figures> figures() const override {
    return {{.rows = 64,
             .burst = 0.655,
             .sustained = 0.655,
             .memory = 0.92,
             .readers = 0.73,
             .launches = {.full = 2.8, .half = 2.8, .few = 2.8}}};
  }
  TimeEstimate time(const Ceilings& ceilings) const override {
    const double seen = mean_tokens_seen(problem, problem.t);
    return estimate(latent_times_in_parts(attention_shape(problem), seen, figures().front(), ceilings), ceilings);
  }

  // Hopper has kernels of its own: there this one decodes where it is asked for.
  std::unique_ptr<DecodeKernels> decode(const MlaDecodeOptions& options) const override {
    if (architecture(target.arch).runs_cute && options.kernel.empty()) return nullptr;
    const auto self = std::make_shared<FlashMlaSplitKvPlan>(*this);
    self->problem = {.b = options.max_requests,
                     .s = options.max_queries,
                     .t = options.max_tokens,
                     .h = options.heads,
                     .dtype = options.dtype,
                     .causal = options.causal};
    self->use_default_tiling();
    return make_paged_decode(options, target, [self](const DeviceSpec& device, int tokens) {
      FlashMlaSplitKvPlan at = *self;
      at.problem.t = tokens;
      return expected_seconds(at, device);
    });
  }

 private:
  static LatentProblem at_compile_time(const LatentProblem& at) {
    return {.b = 0, .s = 0, .t = 0, .h = 0, .d = 0, .p = at.p, .k = at.k, .dtype = at.dtype, .causal = at.causal};
  }

  std::unique_ptr<CtKernel> attention(const Tensors& tensors) const {
    const LatentProblem at = problem;
    CtKernelSpec<LatentProblem, FlashMlaSplitKvTiling> spec;
    spec.name = "flash_mla_split_kv";
    spec.header = beside(__FILE__, "flash_mla_split_kv.cuh");
    spec.problem = at_compile_time(at);
    spec.tiling = tiling;
    spec.candidates = candidates();
    spec.cost = latent_cost(at);
    spec.grid = [at](const FlashMlaSplitKvTiling& tiling) {
      return Grid{ceil_div(at.h * at.s, tiling.Bm), unsigned(at.k / tiling.Bv), unsigned(tiling.splits * at.b)};
    };
    spec.at_compile_time = [](FlashMlaSplitKvTiling tiling) {
      tiling.splits = 0;
      return tiling;
    };
    spec.arguments = [at, tensors](const FlashMlaSplitKvTiling& tiling) {
      auto pointer = [&](const char* name) { return tensors.at(name).data; };
      return Arguments(pointer("qc"), pointer("qpe"), pointer("z"), pointer("kpe"), pointer("o_part"),
                       pointer("lse_part"), softmax_scale(at.d, at.p), at.b, at.h, at.s, at.t, tiling.splits);
    };
    // The partial outputs are written here and read by the reduction.
    spec.executed = [at](const FlashMlaSplitKvTiling& tiling) {
      Cost cost = latent_executed(at, tiling.Bm, tiling.Bn, tiling.Bv);
      cost.bytes += 2.0 * tiling.splits * partial_bytes(at);
      return cost;
    };
    return std::make_unique<CtKernel>(std::move(spec));
  }

  std::unique_ptr<CtKernel> reduction(const Tensors& tensors, const CtKernel& parts) const {
    const LatentProblem at = problem;
    CtKernelSpec<LatentProblem, FlashMlaSplitKvReduceTiling> spec;
    spec.name = "flash_mla_split_kv_reduce";
    spec.header = beside(__FILE__, "flash_mla_split_kv_reduce.cuh");
    spec.problem = at_compile_time(at);
    spec.tiling = reduce_tiling;
    spec.candidates = reduce_candidates();
    const auto splits = [&parts] { return parts.tiling().at("splits").get<int>(); };
    spec.cost = {0, tiling.splits * partial_bytes(at) + double(at.b) * at.h * at.s * at.k * dtype_bytes(at.dtype)};
    spec.grid = [at](const FlashMlaSplitKvReduceTiling& tiling) {
      return Grid{ceil_div(at.b * at.h * at.s, tiling.Bm), unsigned(at.k / tiling.Bv), 1};
    };
    spec.arguments = [at, tensors, splits](const FlashMlaSplitKvReduceTiling&) {
      auto pointer = [&](const char* name) { return tensors.at(name).data; };
      return Arguments(pointer("o_part"), pointer("lse_part"), pointer("o"), pointer("lse"), at.b, at.h, at.s,
                       splits());
    };
    spec.executed = [cost = spec.cost](const FlashMlaSplitKvReduceTiling&) { return cost; };
    return std::make_unique<CtKernel>(std::move(spec));
  }

  // Partial output and log-sum-exp of one split.
  static double partial_bytes(const LatentProblem& at) {
    return double(at.b) * at.h * at.s * (at.k * dtype_bytes(at.dtype) + 4);
  }

  // The workspace holds as many parts as any tiling in use makes.
  int most_splits() const {
    int most = tiling.splits;
    for (const FlashMlaSplitKvTiling& candidate : candidates()) most = std::max(most, candidate.splits);
    return most;
  }

  // As many splits as fill the processors once: one block more would start a second wave.
  int one_wave_of_splits() const {
    const double blocks = double(problem.b) * ceil_div(problem.h * problem.s, 64);
    return std::clamp(int(target.processors / std::max(blocks, 1.0)), 1,
                      std::min(kMaxSplits, int(ceil_div(std::max(problem.t, 1), 64))));
  }

  // {Bm, Bn, Bv, Bk, splits, num_warps, occupancy}: the best first guess leads, the tuner measures the others.
  std::vector<FlashMlaSplitKvTiling> candidates() const {
    const int wave = one_wave_of_splits();
    std::vector<FlashMlaSplitKvTiling> tilings;
    auto add = [&](FlashMlaSplitKvTiling tiling) {
      tiling.Bv = std::min(tiling.Bv, problem.k);
      tiling.Bk = std::min(tiling.Bk, problem.k);
      tilings.push_back(tiling);
    };
    for (int splits : {wave, 1, 2, 4, 8, 16}) {
      if (splits > 2 * wave || (splits == wave && !tilings.empty())) continue;
      if (!target.is_gpu())
        add({64, 64, 512, 512, splits, 1, 1});
      else if (target.has_large_blocks())
        add({64, 64, 512, 128, splits, 8, 1});
      else if (target.is_small_blackwell())
        add({64, 32, 512, 128, splits, 8, 1});
      else
        add({32, 32, 128, 64, splits, 8, 1});
    }
    if (target.has_large_blocks()) {
      add({64, 64, 512, 256, wave, 8, 1});
      add({64, 64, 512, 512, wave, 8, 1});
    }
    return tilings;
  }

  std::vector<FlashMlaSplitKvReduceTiling> reduce_candidates() const {
    std::vector<FlashMlaSplitKvReduceTiling> tilings = {{4, 512, 4, 4}, {4, 256, 4, 4},  {2, 512, 4, 4},
                                                        {8, 128, 4, 4}, {16, 128, 4, 4}, {1, 128, 4, 4}};
    // Without TMA the compiler (13.5.37) fails on some, and says that their source is not the cause.
    if (target.is_gpu() && !architecture(target.arch).tma) tilings = {{4, 512, 4, 4}, {16, 128, 4, 4}, {1, 128, 4, 4}};
    // Many parts of few rows: small blocks, or most processors would have none.
    if (tiling.splits >= 32) std::swap(tilings.front(), tilings.back());
    for (FlashMlaSplitKvReduceTiling& tiling : tilings) tiling.Bv = std::min(tiling.Bv, problem.k);
    return tilings;
  }

  FlashMlaSplitKvReduceTiling reduce_tiling;
};

HYPERMLA_REGISTER(FlashMlaSplitKvPlan, "flash_mla with the tokens split over blocks, then a reduction: small batches")

}  // namespace
}  // namespace hypermla
