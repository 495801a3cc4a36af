#include "flash_attention.h"

#include <algorithm>

#include "cute/decompressed/attend_tiles.h"
#include "cute/decompressed/prefill_plan.h"
#include "hypermla/plan/registry.h"
#include "mla/attention_time.h"
#include "mla/decompressed/decompressed_plan.h"
#include "plan_prefixes.h"

namespace hypermla::cute {
namespace {

static_assert(kBlock == kPartTokens);
constexpr std::size_t kCounterBytes = 16;

class FlashAttentionPlan : public AttentionPlan<DecompressedProblem, FlashAttentionTiling> {
 public:
  void validate() const override {
    const DecompressedProblem& at = problem;
    const std::pair<const char*, int> extents[] = {{"b", at.b}, {"s", at.s}, {"t", at.t}, {"h", at.h}};
    for (const auto& [name, value] : extents) require_positive(name, value);
    if (at.d != 128 || at.p != 64)
      fail(
          "--d={} --p={} is not supported: this kernel is made for 128 columns and 64 RoPE columns; the cutile kernel "
          "takes others (--language=cutile)",
          at.d, at.p);
    require_half_precision(at.dtype);
    if (tiles() > 1 << 30)
      fail("--b={} --h={} --s={} is not supported: it makes {} tiles of {} queries, and at most 1073741824 are counted",
           at.b, at.h, at.s, tiles(), kRows);
    require_positive("section", tiling.section);
    validate_prefixes();
  }

  void use_default_tiling() override { tiling = candidates().front(); }

  Path path() const override { return Path::decompressed; }
  // docs/kernels/cute-flash-attention.md: 1 x 16384 causal 13191 us, b32 s128 2051 us, 4 x 4096 3584 us (sustained
  // 4253). 40 of 132 SMs read at 0.88 of the full rate (docs/devices/nvidia-h200.md).
  std::vector<Figures> figures() const override {
    return {{.rows = kRows, .burst = 1.08, .sustained = 0.955, .memory = 0.975, .readers = 0.3}};
  }
  TimeEstimate time(const Ceilings& ceilings) const override { return decompressed_time(problem, figures(), ceilings); }

  std::vector<TensorSpec> tensors() const override {
    std::vector<TensorSpec> all = tensors_of(problem);
    if (plans_on_device()) {
      const std::int64_t chunk_words = std::int64_t(sizeof(ChunkCount) + most_chunks() * sizeof(Chunk)) / 4;
      all.push_back({"order", Role::workspace, DType::int32, {problem.b}});
      all.push_back({"chunks", Role::workspace, DType::int32, {chunk_words}});
    }
    return all;
  }

  std::unique_ptr<PrefillKernels> prefill(const MlaPrefillOptions& options) const override {
    return std::make_unique<PrefillPlan>(options, target);
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    std::unique_ptr<CuteKernel> kernel = attention(tensors);
    if (!plans_on_device()) return kernel;
    std::vector<std::unique_ptr<Executable>> stages;
    stages.push_back(planning(tensors));
    stages.push_back(std::move(kernel));
    return std::make_unique<KernelPipeline>("flash_attention", std::move(stages));
  }

 private:
  std::unique_ptr<CuteKernel> attention(const Tensors& tensors) const {
    CuteKernelSpec<DecompressedProblem, FlashAttentionTiling> spec;
    spec.name = "flash_attention";
    spec.header = beside(__FILE__, "flash_attention.cuh");
    spec.problem = {.b = 0,
                    .s = 0,
                    .t = 0,
                    .h = 0,
                    .d = problem.d,
                    .p = problem.p,
                    .dtype = problem.dtype,
                    .causal = problem.causal,
                    .prefixes = problem.prefixes > 0};
    spec.tiling = tiling;
    spec.candidates = candidates();
    spec.cost = decompressed_cost(problem);
    // Padded rows and tokens are computed too.
    spec.executed = [at = problem, cost = spec.cost](const FlashAttentionTiling&) {
      const double rows = at.prefixes && at.s <= kRows ? padding(at.b, requests_per_tile(at.s)) : padding(at.s, kRows);
      return Cost{cost.flops * rows * padding(at.t, kBlock), cost.bytes};
    };
    spec.at_compile_time = [](FlashAttentionTiling) { return FlashAttentionTiling{}; };
    spec.launch = [self = *this, tensors](const FlashAttentionTiling& at) {
      KernelLaunch launch;
      launch.grid = {unsigned(std::min<std::int64_t>(self.tiles(), self.target.processors)), 1, 1};
      launch.shape = {kTileThreads, kTileSharedBytes, 1, self.problem.prefixes > 0};
      launch.constants = self.constants();
      launch.arguments = [self, tensors, at](void* constants) {
        const DecompressedProblem& of = self.problem;
        auto data = [&](const char* name) { return tensors.at(name).data; };
        const std::int64_t heads = std::int64_t{of.b} * of.h, token_heads = std::int64_t{token_stores(of)} * of.h;
        const int q_rows = of.prefixes ? std::min(of.s, kRows) : kRows, q_groups = of.prefixes ? 1 : of.d / 64;
        const auto ints = [&](const char* name, bool wanted) {
          return wanted ? static_cast<const int*>(data(name)) : nullptr;
        };
        const bool planned = self.plans_on_device();
        void* const chunks = planned ? data("chunks") : static_cast<char*>(constants) + kCounterBytes;
        return Arguments(FlashAttentionArguments{
            .q_map = make_matrix_map(of.dtype, data("q"), of.s, of.d, heads, q_rows, q_groups),
            .qpe_map = make_matrix_map(of.dtype, data("qpe"), of.s, of.p, heads, q_rows, 1),
            .k_map = make_matrix_map(of.dtype, data("k"), of.t, of.d, token_heads, kBlock, of.d / 64),
            .kpe_map = make_matrix_map(of.dtype, data("kpe"), of.t, of.p, token_stores(of), kBlock, 1),
            .v_map = make_matrix_map(of.dtype, data("v"), of.t, of.d, token_heads, kBlock, of.d / 64),
            .o = data("o"),
            .lse = static_cast<float*>(data("lse")),
            .lengths = ints("lengths", of.ragged),
            .counter = static_cast<int*>(constants),
            .chunk_list = static_cast<const ChunkCount*>(chunks),
            .order = ints("order", planned),
            .after_lengths = ints("after_lengths", reads_after_lengths(of)),
            .scale_log2 = softmax_scale(of.d, of.p) * kLog2e,
            .b = of.b,
            .h = of.h,
            .s = of.s,
            .t = of.t,
            .heads_per_section = self.heads_per_section(at),
            .after = of.after});
      };
      return launch;
    };
    return std::make_unique<CuteKernel>(std::move(spec));
  }

  std::unique_ptr<CuteKernel> planning(const Tensors& tensors) const {
    CuteKernelSpec<PlanPrefixesProblem, PlanPrefixesTiling> spec;
    spec.name = "plan_prefixes";
    spec.header = beside(__FILE__, "plan_prefixes.cuh");
    spec.candidates = {{}};
    spec.cost = {0, 4.0 * problem.b};
    spec.executed = [cost = spec.cost](const PlanPrefixesTiling&) { return cost; };
    spec.launch = [at = problem, tensors](const PlanPrefixesTiling& threads) {
      KernelLaunch launch;
      launch.grid = {1, 1, 1};
      launch.shape = {unsigned(threads.threads), 0, 1, true};
      launch.arguments = [at, tensors](void*) {
        auto data = [&](const char* name) { return tensors.at(name).data; };
        const auto ints = [&](const char* name) { return static_cast<int*>(data(name)); };
        return Arguments(PlanPrefixesArguments{.prefix = ints("prefix"),
                                               .lengths = at.ragged ? ints("lengths") : nullptr,
                                               .order = ints("order"),
                                               .count = static_cast<ChunkCount*>(data("chunks")),
                                               .b = at.b,
                                               .s = at.s,
                                               .t = at.t,
                                               .prefixes = at.prefixes,
                                               .parts = at.parts});
      };
      return launch;
    };
    return std::make_unique<CuteKernel>(std::move(spec));
  }

  void validate_prefixes() const {
    const DecompressedProblem& at = problem;
    hypermla::validate_prefixes(at.prefixes, at.b);
    if (at.prefixes > kMaxPrefixes)
      fail("--prefixes={} is not supported: it must be at most {}", at.prefixes, kMaxPrefixes);
    if (at.prefixes == 0 && (at.after != 0 || at.parts != 1))
      fail("--after={} --parts={} need a prefix: add --prefixes=1", at.after, at.parts);
    if (at.prefixes > 1 && at.b > kMaxPrefixRequests)
      fail("--b={} is not supported with several prefixes: it must be at most {}", at.b, kMaxPrefixRequests);
    if (at.after < 0 || at.after > 1 << 20)
      fail("--after={} is not supported: it must be from 0 to 1048576 tokens", at.after);
    if (at.parts < 1 || at.parts > 128) fail("--parts={} is not supported: it must be from 1 to 128", at.parts);
  }

  // Else all is known: which requests share which tokens.
  bool plans_on_device() const { return problem.prefixes > 1 || (problem.prefixes == 1 && problem.ragged); }
  // Every prefix may leave one chunk unfilled.
  std::int64_t most_chunks() const {
    const std::int64_t full = ceil_div(problem.b, requests_per_tile(problem.s));
    return (full + problem.prefixes - 1) * tiles_per_request(problem.s) * problem.parts;
  }
  // The counter of drawn tiles, which every launch leaves 0, and the chunks of the one prefix.
  std::string constants() const {
    const DecompressedProblem& at = problem;
    std::string bytes(kCounterBytes, '\0');
    if (at.prefixes != 1) return bytes;
    auto add = [&](const auto& record) { bytes.append(reinterpret_cast<const char*>(&record), sizeof(record)); };
    const int chunks = chunk_count(at.b, at.s, at.parts);
    add(ChunkCount{chunks});
    for (int i = 0; i < chunks; ++i) add(chunk_at(i, 0, 0, at.b, at.t, at.s, at.parts));
    return bytes;
  }
  // At most, where the device makes the list.
  std::int64_t tiles() const {
    if (problem.prefixes) return most_chunks() * problem.h;
    return std::int64_t{problem.b} * problem.h * ceil_div(problem.s, kRows);
  }
  int heads_per_section(const FlashAttentionTiling& at) const {
    const std::int64_t head_bytes = std::int64_t{problem.t} * 2 * problem.d * dtype_bytes(problem.dtype);
    const std::int64_t heads = std::int64_t{problem.b} * problem.h;
    const std::int64_t fit = (std::int64_t{at.section} << 20) / head_bytes;
    return heads_of_section(int(heads), int(std::clamp<std::int64_t>(fit, 1, heads)));
  }

  // {section}: about half of an H200's L2 first.
  std::vector<FlashAttentionTiling> candidates() const { return {{32}, {16}, {8}}; }
};

HYPERMLA_REGISTER(FlashAttentionPlan,
                  "attention over decompressed keys and values, scheduled by hand for Hopper: prefill, ragged lengths")

}  // namespace
}  // namespace hypermla::cute
