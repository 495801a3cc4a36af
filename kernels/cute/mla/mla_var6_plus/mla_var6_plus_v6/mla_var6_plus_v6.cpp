#include "mla_var6_plus_v6.h"

#include <algorithm>

#include "cute/hybrid/division_plan.h"
#include "hypermla/plan/registry.h"

namespace hypermla::cute {
namespace {

constexpr int kRows = 64, kBlock = 64;  // of a latent tile; tokens
constexpr unsigned kThreads = 384;
// Of an H200, by the time lines in docs/kernels/cute-mla-var6-plus-v6.md.
constexpr PathRates kRates = {4.4e12, 57e9, 3.3e12};

class MlaVar6PlusV6Plan : public TypedPlan<MlaVar6PlusV6Problem, MlaVar6PlusV6Tiling> {
 public:
  void choose(const DeviceSpec& device) override { choose_new_tokens(problem, "cute.mla.mla_var6_plus_v6", device); }
  void validate() const override {
    const MlaVar6PlusV6Problem& at = problem;
    validate_hybrid(at);
    if (at.prefixes > 0) fail("--prefixes={} is not supported by this version: v0 takes shared prefixes", at.prefixes);
    if (at.d != 128 || at.p != 64 || at.k != 512)
      fail(
          "--d={} --p={} --k={} is not supported: this kernel is made for 128, 64 and 512 columns; the cutile kernels "
          "take others (--language=cutile)",
          at.d, at.p, at.k);
    require_half_precision(at.dtype);
    const int n = new_tokens(at);
    // The mask would end in the latent part, and each request has a length of its own only on the device.
    if (at.causal && n > 0 && n < at.t && (at.ragged || n < at.s))
      fail(
          "--causal with --n={} is not supported here: give n=0, n={} or, without --ragged, from s={} on, or "
          "take v0 or v5",
          n, at.t, at.s);
    constexpr std::int64_t kMost = 1 << 28;
    if (std::int64_t{at.h} * at.s > 1 << 24 || latent_items() > kMost || new_items(16) > kMost)
      fail("--b={} --h={} --s={} is not supported: h * s may be at most 16777216, and b * h * s at most 17179869184",
           at.b, at.h, at.s);
    if (tiling.rows != 16 && tiling.rows != 32 && tiling.rows != 64)
      fail("--rows={} is not supported: choose 16, 32 or 64", tiling.rows);
    if (tiling.streams < 1 || tiling.streams > target.processors)
      fail("--streams={} is not supported: it must be from 1 to the {} multiprocessors that there are", tiling.streams,
           target.processors);
  }

  void use_default_tiling() override {
    if (has_extents(problem)) tiling = candidates().front();  // else validate() says what is wrong
  }

  std::vector<TensorSpec> tensors() const override {
    const MlaVar6PlusV6Problem& at = problem;
    std::vector<TensorSpec> all = hybrid_tensors(at);
    if (!both()) return all;
    for (const char* of : {"latent", "new"}) {
      all.push_back({std::string("o_") + of, Role::workspace, at.dtype, {at.b, at.h, at.s, at.d}});
      all.push_back({std::string("lse_") + of, Role::workspace, DType::float32, {at.b, at.h, at.s}});
    }
    return all;
  }
  InputRules input_rules(std::uint64_t) const override { return hybrid_input_rules(problem); }
  ReferenceShape reference_shape() const override { return hybrid_reference_shape(problem); }
  ReferenceOutputs reference(std::int64_t group, const InputReader& input) const override {
    return hybrid_reference(problem, group, input);
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    const MlaVar6PlusV6Problem& at = problem;
    CuteKernelSpec<MlaVar6PlusV6Problem, MlaVar6PlusV6Tiling> spec;
    spec.name = "mla_var6_plus_v6";
    spec.header = beside(__FILE__, "mla_var6_plus_v6.cuh");
    // Which kinds of tokens there are makes three kernels.
    spec.problem = {.b = 0,
                    .s = 0,
                    .t = (latent_tokens(at) > 0) + (new_tokens(at) > 0),
                    .n = new_tokens(at) > 0,
                    .h = 0,
                    .d = at.d,
                    .p = at.p,
                    .k = at.k,
                    .dtype = at.dtype,
                    .causal = at.causal};
    spec.tiling = tiling;
    spec.candidates = candidates();
    spec.cost = hybrid_cost(at);
    // Padded rows and the parts of the hybrid, written and read.
    spec.executed = [at, cost = spec.cost, both = both()](const MlaVar6PlusV6Tiling& of) {
      const double parts = both ? 4.0 * at.b * at.h * at.s * (at.d * double(dtype_bytes(at.dtype)) + 4) : 0;
      return Cost{cost.flops * padding(at.s, of.rows), cost.bytes + parts};
    };
    spec.at_compile_time = [](MlaVar6PlusV6Tiling of) { return MlaVar6PlusV6Tiling{.rows = of.rows, .streams = 0}; };
    spec.launch = [self = *this, tensors](const MlaVar6PlusV6Tiling& of) {
      KernelLaunch launch;
      const std::int64_t latent = self.latent_items(), all = latent + self.new_items(of.rows);
      launch.grid = {unsigned(std::min<std::int64_t>(all, self.target.processors)), 1, 1};
      launch.shape = {kThreads, kMlaVar6PlusV6SharedBytes, 1, false};
      // The queue and the rows of each tile that arrived: every launch leaves them 0.
      launch.constants = std::string(8 + 4 * std::size_t(self.problem.b) * self.row_tiles(), '\0');
      launch.arguments = [self, tensors, of, latent, all](void* counters) {
        const MlaVar6PlusV6Problem& at = self.problem;
        auto data = [&](const char* name) -> void* { return tensors.contains(name) ? tensors.at(name).data : nullptr; };
        const std::int64_t heads = std::int64_t{at.b} * at.h, rows = std::int64_t{at.h} * at.s;
        const int o = latent_tokens(at), n = new_tokens(at);
        const bool tokens_first = at.tokens_first && !self.both();  // of what the decompressed items write
        const int streams = self.both() ? of.streams : latent ? 0 : self.target.processors;  // one kind: from its end
        const std::int64_t out_row = 2 * at.d * (tokens_first ? at.h : 1);
        return Arguments(
            self.map(data("qc"), rows, at.k, at.b, kRows, 2), self.map(data("qpe"), rows, at.p, at.b, kRows, 1),
            self.map(data("z"), o, at.k, at.b, kBlock, 2), self.map(data("kpe"), o, at.p, at.b, kBlock, 1),
            self.map(data("w"), at.k, at.d, at.h, 64, 2), self.map(data("q"), at.s, at.d, heads, of.rows, 2),
            self.map(data("qpe"), at.s, at.p, heads, of.rows, 1), self.map(data("k"), n, at.d, heads, kBlock, 2),
            self.map(data("kpe_new"), n, at.p, at.b, kBlock, 1), self.map(data("v"), n, at.d, heads, kBlock, 2),
            n ? make_tensor_map(at.dtype, data(self.both() ? "o_new" : "o"),
                                {{at.s, out_row, of.rows},
                                 {at.h * std::int64_t{tokens_first ? 2 : 2 * at.s}, 128, 2},
                                 {at.b, 2 * rows * at.d, 1}})
              : TensorMap{},
            data("o_latent"), data("lse_latent"), data("o_new"), data("lse_new"), data("o"), data("lse"),
            data("lengths"), data("new_lengths"), counters, softmax_scale(at.d, at.p) * kLog2e, at.b, at.h, at.s, o, n,
            int(at.tokens_first), streams, int(latent), int(all));
      };
      return launch;
    };
    return std::make_unique<CuteKernel>(std::move(spec));
  }

 private:
  bool both() const { return has_both_parts(problem); }
  std::int64_t row_tiles() const { return ceil_div(problem.h * problem.s, kRows); }
  std::int64_t latent_items() const { return latent_tokens(problem) ? problem.b * row_tiles() : 0; }
  std::int64_t new_items(int rows) const {
    return new_tokens(problem) ? std::int64_t{problem.b} * ceil_div(problem.h, 2) * ceil_div(problem.s, rows) : 0;
  }

  // As many thread blocks begin with decompressed items as make both paths equally long.
  int streams() const {
    auto time = [&](int processors) { return kRates.seconds(problem, processors, target.processors); };
    if (!both()) return target.processors;  // and nothing to divide
    int best = 1;
    for (int processors = 1; processors < target.processors; ++processors)
      if (time(processors) < time(best)) best = processors;
    return best;
  }

  // {rows, streams}: the fewest rows that hold all queries; the model's share of streams and its neighbours.
  std::vector<MlaVar6PlusV6Tiling> candidates() const {
    const int rows = problem.s <= 16 ? 16 : problem.s <= 32 ? 32 : 64, model = streams();
    std::vector<MlaVar6PlusV6Tiling> all = {{rows, model}};
    for (int other : {model - 8, model - 4, model + 4, model + 8})
      if (both() && other > 0 && other < target.processors) all.push_back({rows, other});
    return all;
  }

  // [batch, rows, columns] in boxes of `box_groups` groups of 64 columns; nothing to read: none.
  TensorMap map(const void* data, std::int64_t rows, int columns, std::int64_t batch, int box_rows,
                int box_groups) const {
    if (!data) return {};
    return make_matrix_map(problem.dtype, data, rows, columns, batch, box_rows, box_groups);
  }
};

HYPERMLA_REGISTER(MlaVar6PlusV6Plan,
                  "the hybrid on Hopper in one launch: both kinds of work from one queue, the last arrivals merge")

}  // namespace
}  // namespace hypermla::cute
