#include "flash_attention_v1.h"

#include <algorithm>

#include "hypermla/plan/registry.h"
#include "mla/attention_time.h"
#include "mla/decompressed/decompressed_plan.h"

namespace hypermla::cute {
namespace {

constexpr int kBlock = 64;  // tokens
constexpr unsigned kThreads = 384;

class FlashAttentionV1Plan : public AttentionPlan<DecompressedProblem, FlashAttentionV1Tiling> {
 public:
  FlashAttentionV1Plan() : AttentionPlan({"prefixes", "after", "parts"}) {}
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
    if (tiling.rows != 16 && tiling.rows != 32 && tiling.rows != 64)
      fail("--rows={} is not supported: choose 16, 32 or 64", tiling.rows);
    if (tiling.blocks < 0) fail("--blocks={} is not supported: choose how many, or 0 for all", tiling.blocks);
    if (items(tiling) > 1 << 30)
      fail(
          "--b={} --h={} --s={} is not supported: it makes {} items of two heads and {} queries, of which at most "
          "1073741824 are counted",
          at.b, at.h, at.s, items(tiling), tiling.rows);
  }

  void use_default_tiling() override { tiling = candidates().front(); }

  Path path() const override { return Path::decompressed; }
  // docs/kernels/cute-flash-attention-v1.md: 1892, 1920, 1954 us at s = 16, 32, 64, and from 40 SMs 640, 870 and 920
  // cycles for 64 tokens of a head; the envelope of 2026-11-21: s = 128 2788 us (3011), s = 256 4544 us (5315).
  // Its two consumers have a head each: b = 1, h = 32, s = 128, t = 8192 take 121 us (97.6 with the base version).
  std::vector<Figures> figures() const override {
    return {{.rows = 16, .burst = 0.3, .sustained = 0.3, .memory = 0.975, .readers = 0.3, .tiles_of_block = 2},
            {.rows = 32, .burst = 0.45, .sustained = 0.45, .memory = 0.975, .readers = 0.3, .tiles_of_block = 2},
            {.rows = 64, .burst = 0.80, .sustained = 0.765, .memory = 0.975, .readers = 0.3, .tiles_of_block = 2}};
  }
  TimeEstimate time(const Ceilings& ceilings) const override { return decompressed_time(problem, figures(), ceilings); }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    CuteKernelSpec<DecompressedProblem, FlashAttentionV1Tiling> spec;
    spec.name = "flash_attention_v1";
    spec.header = beside(__FILE__, "flash_attention_v1.cuh");
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
    spec.cost = decompressed_cost(problem);
    // Padded rows are computed, and every tile of rows reads the keys and values.
    spec.executed = [at = problem, cost = spec.cost](const FlashAttentionV1Tiling& of) {
      return Cost{cost.flops * padding(at.s, of.rows) * padding(at.t, kBlock), cost.bytes * ceil_div(at.s, of.rows)};
    };
    spec.at_compile_time = [](FlashAttentionV1Tiling at) {
      at.blocks = 0;
      return at;
    };
    spec.launch = [self = *this, tensors](const FlashAttentionV1Tiling& at) {
      KernelLaunch launch;
      const int blocks = at.blocks > 0 ? at.blocks : self.target.processors;
      launch.grid = {unsigned(std::min<std::int64_t>(self.items(at), blocks)), 1, 1};
      launch.shape = {kThreads, flash_attention_v1_shared_bytes(at.rows), 1, false};
      launch.constants = std::string(sizeof(int), '\0');  // the counter of drawn items: every launch leaves it 0
      launch.arguments = [self, tensors, rows = at.rows](void* counter) {
        const DecompressedProblem& of = self.problem;
        auto data = [&](const char* name) { return tensors.at(name).data; };
        const std::int64_t heads = std::int64_t{of.b} * of.h;
        return Arguments(
            FlashAttentionV1Arguments{.q_map = make_matrix_map(of.dtype, data("q"), of.s, of.d, heads, rows, 2),
                                      .qpe_map = make_matrix_map(of.dtype, data("qpe"), of.s, of.p, heads, rows, 1),
                                      .k_map = make_matrix_map(of.dtype, data("k"), of.t, of.d, heads, kBlock, 2),
                                      .kpe_map = make_matrix_map(of.dtype, data("kpe"), of.t, of.p, of.b, kBlock, 1),
                                      .v_map = make_matrix_map(of.dtype, data("v"), of.t, of.d, heads, kBlock, 2),
                                      .o_map = make_matrix_map(of.dtype, data("o"), of.s, of.d, heads, rows, 2),
                                      .o = data("o"),
                                      .lse = static_cast<float*>(data("lse")),
                                      .lengths = of.ragged ? static_cast<const int*>(data("lengths")) : nullptr,
                                      .counter = static_cast<int*>(counter),
                                      .scale_log2 = softmax_scale(of.d, of.p) * kLog2e,
                                      .b = of.b,
                                      .h = of.h,
                                      .s = of.s,
                                      .t = of.t});
      };
      return launch;
    };
    return std::make_unique<CuteKernel>(std::move(spec));
  }

 private:
  std::int64_t items(const FlashAttentionV1Tiling& at) const {
    return std::int64_t{problem.b} * ceil_div(problem.h, 2) * ceil_div(problem.s, at.rows);
  }

  // {rows, blocks}: the fewest rows that hold all queries first.
  std::vector<FlashAttentionV1Tiling> candidates() const {
    const int least = problem.s <= 16 ? 16 : problem.s <= 32 ? 32 : 64;
    std::vector<FlashAttentionV1Tiling> all = {{least, 0}};
    for (int rows : {16, 32, 64})
      if (rows != least) all.push_back({rows, 0});
    return all;
  }
};

HYPERMLA_REGISTER(FlashAttentionV1Plan,
                  "attention over decompressed keys and values for few queries: streams from few multiprocessors")

}  // namespace
}  // namespace hypermla::cute
