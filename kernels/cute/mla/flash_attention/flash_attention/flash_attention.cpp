#include "flash_attention.h"

#include <algorithm>

#include "hypermla/plan/attention.h"
#include "hypermla/plan/registry.h"

namespace hypermla::cute {
namespace {

constexpr int kRows = 128, kBlock = 128;  // queries of a tile, tokens of a block
constexpr unsigned kThreads = 384;
constexpr float kLog2e = 1.4426950408889634f;

class FlashAttentionPlan : public TypedPlan<FlashAttentionProblem, FlashAttentionTiling> {
 public:
  void validate() const override {
    const FlashAttentionProblem& at = problem;
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
  }

  void use_default_tiling() override { tiling = candidates().front(); }
  // Rows are padded to 128: few queries are faster in CUDA Tile, which pads to 16 and streams as fast.
  bool recommended() const override { return problem.s > 64 || problem.ragged; }

  std::vector<TensorSpec> tensors() const override {
    std::vector<TensorSpec> all = decompressed_tensors(dense());
    if (problem.ragged) all.push_back({"lengths", Role::input, DType::int32, {problem.b}});
    return all;
  }

  InputRules input_rules(std::uint64_t) const override {
    InputRules rules;
    const FlashAttentionProblem& at = problem;
    rules.growing = {{"kpe", at.t, at.p}};
    if (!at.ragged) return rules;
    const std::vector<int> tokens = rules.integers["lengths"] = sample_lengths(at.b, at.t);
    auto unread = [&](const char* name, std::int64_t head, int used, int width) {
      if (used < at.t) rules.unread[name].push_back({(head * at.t + used) * width, std::int64_t{at.t - used} * width});
    };
    for (int r = 0; r < at.b; ++r) {
      unread("kpe", r, tokens[r], at.p);
      for (int head = r * at.h; head < (r + 1) * at.h; ++head) {
        unread("k", head, tokens[r], at.d);
        unread("v", head, tokens[r], at.d);
      }
    }
    return rules;
  }

  ReferenceShape reference_shape() const override { return decompressed_reference_shape(dense()); }
  ReferenceOutputs reference(std::int64_t group, const InputReader& input) const override {
    if (!problem.ragged) return decompressed_reference(dense(), group, input);
    const FlashAttentionProblem& at = problem;
    const RowReader rows{input};
    const std::int64_t request = group / at.h;
    const int tokens = int(input("lengths", request, 1)[0]);
    auto used = [&](const char* name, std::int64_t index, int width) {
      return input(name, index * at.t * width, std::int64_t{tokens} * width);
    };
    AttentionReference result = attention_reference(
        join_columns(rows("q", group, at.s, at.d), rows("qpe", group, at.s, at.p), at.d, at.p),
        join_columns(used("k", group, at.d), used("kpe", request, at.p), at.d, at.p), used("v", group, at.d), at.s,
        tokens, at.d + at.p, at.d, softmax_scale(at.d, at.p), at.causal);
    return {{"o", std::move(result.o)}, {"lse", std::move(result.lse)}};
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    CuteKernelSpec<FlashAttentionProblem, FlashAttentionTiling> spec;
    spec.name = "flash_attention";
    spec.header = beside(__FILE__, "flash_attention.cuh");
    spec.problem = {.b = 0,
                    .s = 0,
                    .t = 0,
                    .h = 0,
                    .d = problem.d,
                    .p = problem.p,
                    .dtype = problem.dtype,
                    .causal = problem.causal};
    spec.tiling = tiling;
    spec.candidates = candidates();
    spec.cost = cost();
    // Padded rows and tokens are computed too.
    spec.executed = [at = problem, cost = spec.cost](const FlashAttentionTiling&) {
      return Cost{cost.flops * padding(at.s, kRows) * padding(at.t, kBlock), cost.bytes};
    };
    spec.at_compile_time = [](FlashAttentionTiling) { return FlashAttentionTiling{}; };
    spec.launch = [self = *this, tensors](const FlashAttentionTiling& at) {
      KernelLaunch launch;
      launch.grid = {unsigned(std::min<std::int64_t>(self.tiles(), self.target.processors)), 1, 1};
      launch.shape = {kThreads, kFlashAttentionSharedBytes, 1, false};
      launch.constants = std::string(sizeof(int), '\0');  // the counter of drawn tiles: every launch leaves it 0
      launch.arguments = [self, tensors, at](void* counter) {
        const FlashAttentionProblem& of = self.problem;
        auto data = [&](const char* name) { return tensors.at(name).data; };
        const std::int64_t heads = std::int64_t{of.b} * of.h;
        return Arguments(self.map(data("q"), of.s, of.d, heads, kRows), self.map(data("qpe"), of.s, of.p, heads, kRows),
                         self.map(data("k"), of.t, of.d, heads, kBlock),
                         self.map(data("kpe"), of.t, of.p, of.b, kBlock),
                         self.map(data("v"), of.t, of.d, heads, kBlock), data("o"), data("lse"),
                         of.ragged ? data("lengths") : nullptr, counter, softmax_scale(of.d, of.p) * kLog2e, of.b, of.h,
                         of.s, of.t, self.heads_per_section(at));
      };
      return launch;
    };
    return std::make_unique<CuteKernel>(std::move(spec));
  }

 private:
  // The problem without lengths, as the functions of plan/attention.h take it.
  struct Dense {
    int b, s, t, h, d, p;
    DType dtype;
    bool causal;
  };
  Dense dense() const {
    return {problem.b, problem.s, problem.t, problem.h, problem.d, problem.p, problem.dtype, problem.causal};
  }

  std::int64_t tiles() const { return std::int64_t{problem.b} * problem.h * ceil_div(problem.s, kRows); }
  int heads_per_section(const FlashAttentionTiling& at) const {
    const std::int64_t head_bytes = std::int64_t{problem.t} * 2 * problem.d * dtype_bytes(problem.dtype);
    return int(std::clamp<std::int64_t>((std::int64_t{at.section} << 20) / head_bytes, 1,
                                        std::int64_t{problem.b} * problem.h));
  }

  // {section}: about half of an H200's L2 first.
  std::vector<FlashAttentionTiling> candidates() const { return {{32}, {16}, {8}}; }

  Cost cost() const {
    const FlashAttentionProblem& at = problem;
    if (!at.ragged) return decompressed_cost(dense());
    Cost all{0, 0};
    for (int tokens : sample_lengths(at.b, at.t)) {
      Dense one = dense();
      one.b = 1;
      one.t = tokens;
      const Cost cost = decompressed_cost(one);
      all.flops += cost.flops;
      all.bytes += cost.bytes;
    }
    return all;
  }

  TensorMap map(const void* data, int rows, int columns, std::int64_t batch, int box_rows) const {
    const std::int64_t row_bytes = columns * dtype_bytes(problem.dtype);
    return make_tensor_map(problem.dtype, data,
                           {rows, columns / 64, batch, row_bytes, rows * row_bytes, box_rows, columns / 64});
  }
};

HYPERMLA_REGISTER(FlashAttentionPlan,
                  "attention over decompressed keys and values, scheduled by hand for Hopper: prefill, ragged lengths")

}  // namespace
}  // namespace hypermla::cute
