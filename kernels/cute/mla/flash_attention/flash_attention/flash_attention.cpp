#include "flash_attention.h"

#include <algorithm>

#include "hypermla/plan/attention.h"
#include "hypermla/plan/registry.h"
#include "plan_prefixes.h"

namespace hypermla::cute {
namespace {

constexpr int kRows = 128, kBlock = 128;  // queries of a tile, tokens of a block
constexpr unsigned kThreads = 384;
constexpr std::size_t kCounterBytes = 16;

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
    validate_prefixes();
  }

  void use_default_tiling() override { tiling = candidates().front(); }
  // Rows are padded to 128: few queries are faster in CUDA Tile, which pads to 16 and streams as fast.
  bool recommended() const override { return problem.s > 64 || problem.ragged || problem.prefixes; }

  std::vector<TensorSpec> tensors() const override {
    const FlashAttentionProblem& at = problem;
    std::vector<TensorSpec> all = decompressed_tensors(dense());
    for (TensorSpec& spec : all) {
      if (spec.name == "k" || spec.name == "v" || spec.name == "kpe") spec.shape[0] = stores();
      if (at.parts > 1 && spec.role == Role::output) spec.shape.insert(spec.shape.begin(), at.parts);
    }
    auto add = [&](const char* name, Role role, std::vector<std::int64_t> shape) {
      all.push_back({name, role, DType::int32, std::move(shape)});
    };
    if (at.ragged) add("lengths", Role::input, {stores()});
    if (at.prefixes) add("prefix", Role::input, {at.b});
    if (reads_after_lengths()) add("after_lengths", Role::input, {at.b});
    if (plans_on_device()) {
      add("order", Role::workspace, {at.b});
      add("chunks", Role::workspace, {std::int64_t(sizeof(ChunkCount) + most_chunks() * sizeof(Chunk)) / 4});
    }
    return all;
  }

  InputRules input_rules(std::uint64_t) const override {
    InputRules rules;
    const FlashAttentionProblem& at = problem;
    rules.growing = {{"kpe", at.t, at.p}};
    if (at.prefixes) rules.integers["prefix"] = sample_prefixes();
    if (reads_after_lengths()) rules.integers["after_lengths"] = sample_lengths(at.b, at.after);
    if (!at.ragged) return rules;
    const std::vector<int> tokens = rules.integers["lengths"] = sample_lengths(stores(), at.t);
    auto unread = [&](const char* name, std::int64_t head, int used, int width) {
      if (used < at.t) rules.unread[name].push_back({(head * at.t + used) * width, std::int64_t{at.t - used} * width});
    };
    for (int r = 0; r < stores(); ++r) {
      unread("kpe", r, tokens[r], at.p);
      for (int head = r * at.h; head < (r + 1) * at.h; ++head) {
        unread("k", head, tokens[r], at.d);
        unread("v", head, tokens[r], at.d);
      }
    }
    return rules;
  }

  // A group is one head of one request in one part.
  ReferenceShape reference_shape() const override {
    ReferenceShape shape = decompressed_reference_shape(dense());
    return {shape.groups * problem.parts, shape.flops_per_group / problem.parts};
  }
  ReferenceOutputs reference(std::int64_t group, const InputReader& input) const override {
    const FlashAttentionProblem& at = problem;
    const RowReader rows{input};
    const int heads = at.b * at.h, part = int(group / heads), query_head = int(group % heads);
    const int request = query_head / at.h, store = at.prefixes ? int(input("prefix", request, 1)[0]) : request;
    const std::int64_t head = std::int64_t{store} * at.h + query_head % at.h;
    const int tokens = at.ragged ? int(input("lengths", store, 1)[0]) : at.t;
    const int after = reads_after_lengths() ? int(input("after_lengths", request, 1)[0]) : at.after;
    const int per_part = int(ceil_div(ceil_div(tokens, kBlock), at.parts)) * kBlock;
    const int first = std::min(part * per_part, tokens), last = std::min(first + per_part, tokens);
    const std::vector<float> q =
        join_columns(rows("q", query_head, at.s, at.d), rows("qpe", query_head, at.s, at.p), at.d, at.p);
    auto used = [&](const char* name, std::int64_t index, int width, int count) {
      return input(name, (index * at.t + first) * width, std::int64_t{count} * width);
    };
    ReferenceOutputs outputs;
    auto attend = [&](int query, int queries, int end, bool causal) {
      const int count = std::max(end - first, 0), width = at.d + at.p;
      const AttentionReference one = attention_reference(
          {q.begin() + std::ptrdiff_t(query) * width, q.begin() + std::ptrdiff_t(query + queries) * width},
          join_columns(used("k", head, at.d, count), used("kpe", store, at.p, count), at.d, at.p),
          used("v", head, at.d, count), queries, count, width, at.d, softmax_scale(at.d, at.p), causal);
      outputs["o"].insert(outputs["o"].end(), one.o.begin(), one.o.end());
      outputs["lse"].insert(outputs["lse"].end(), one.lse.begin(), one.lse.end());
    };
    // Where a mask ends inside or before the part, query by query.
    if (!at.causal || (at.parts == 1 && after == 0) || last <= tokens + after - at.s + 1)
      attend(0, at.s, last, at.causal && at.parts == 1 && after == 0);
    else
      for (int i = 0; i < at.s; ++i) attend(i, 1, std::min(last, tokens + after - at.s + i + 1), false);
    return outputs;
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
                    .causal = problem.causal,
                    .prefixes = problem.prefixes > 0};
    spec.tiling = tiling;
    spec.candidates = candidates();
    spec.cost = cost();
    // Padded rows and tokens are computed too.
    spec.executed = [at = problem, cost = spec.cost](const FlashAttentionTiling&) {
      const double rows = at.prefixes && at.s <= kRows ? padding(at.b, requests_per_tile(at.s)) : padding(at.s, kRows);
      return Cost{cost.flops * rows * padding(at.t, kBlock), cost.bytes};
    };
    spec.at_compile_time = [](FlashAttentionTiling) { return FlashAttentionTiling{}; };
    spec.launch = [self = *this, tensors](const FlashAttentionTiling& at) {
      KernelLaunch launch;
      launch.grid = {unsigned(std::min<std::int64_t>(self.tiles(), self.target.processors)), 1, 1};
      launch.shape = {kThreads, kFlashAttentionSharedBytes, 1, self.problem.prefixes > 0};
      launch.constants = self.constants();
      launch.arguments = [self, tensors, at](void* constants) {
        const FlashAttentionProblem& of = self.problem;
        auto data = [&](const char* name) { return tensors.at(name).data; };
        const std::int64_t heads = std::int64_t{of.b} * of.h, token_heads = std::int64_t{self.stores()} * of.h;
        const int q_rows = of.prefixes ? std::min(of.s, kRows) : kRows, q_groups = of.prefixes ? 1 : of.d / 64;
        return Arguments(make_matrix_map(of.dtype, data("q"), of.s, of.d, heads, q_rows, q_groups),
                         make_matrix_map(of.dtype, data("qpe"), of.s, of.p, heads, q_rows, 1),
                         make_matrix_map(of.dtype, data("k"), of.t, of.d, token_heads, kBlock, of.d / 64),
                         make_matrix_map(of.dtype, data("kpe"), of.t, of.p, self.stores(), kBlock, 1),
                         make_matrix_map(of.dtype, data("v"), of.t, of.d, token_heads, kBlock, of.d / 64), data("o"),
                         data("lse"), of.ragged ? data("lengths") : nullptr, constants,
                         softmax_scale(of.d, of.p) * kLog2e, of.b, of.h, of.s, of.t, self.heads_per_section(at),
                         self.plans_on_device() ? data("chunks") : static_cast<char*>(constants) + kCounterBytes,
                         self.plans_on_device() ? data("order") : nullptr,
                         self.reads_after_lengths() ? data("after_lengths") : nullptr, of.after);
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
        return Arguments(data("prefix"), at.ragged ? data("lengths") : nullptr, data("order"), data("chunks"), at.b,
                         at.s, at.t, at.prefixes, at.parts);
      };
      return launch;
    };
    return std::make_unique<CuteKernel>(std::move(spec));
  }

  void validate_prefixes() const {
    const FlashAttentionProblem& at = problem;
    if (at.prefixes < 0 || at.prefixes > kMaxPrefixes)
      fail("--prefixes={} is not supported: it must be from 0 (none shared) to {}", at.prefixes, kMaxPrefixes);
    if (at.prefixes == 0 && (at.after != 0 || at.parts != 1))
      fail("--after={} --parts={} need a prefix: add --prefixes=1", at.after, at.parts);
    if (at.prefixes > 1 && at.b > kMaxPrefixRequests)
      fail("--b={} is not supported with several prefixes: it must be at most {}", at.b, kMaxPrefixRequests);
    if (at.after < 0 || at.after > 1 << 20)
      fail("--after={} is not supported: it must be from 0 to 1048576 tokens", at.after);
    if (at.parts < 1 || at.parts > 128) fail("--parts={} is not supported: it must be from 1 to 128", at.parts);
  }

  // Sets of keys and values.
  int stores() const { return problem.prefixes ? problem.prefixes : problem.b; }
  bool reads_after_lengths() const { return problem.prefixes && problem.ragged && problem.causal && problem.after > 0; }
  // Else all is known: which requests share which tokens.
  bool plans_on_device() const { return problem.prefixes > 1 || (problem.prefixes == 1 && problem.ragged); }
  // Every prefix may leave one chunk unfilled.
  std::int64_t most_chunks() const {
    const std::int64_t full = ceil_div(problem.b, requests_per_tile(problem.s));
    return (full + problem.prefixes - 1) * tiles_per_request(problem.s) * problem.parts;
  }
  // The counter of drawn tiles, which every launch leaves 0, and the chunks of the one prefix.
  std::string constants() const {
    const FlashAttentionProblem& at = problem;
    std::string bytes(kCounterBytes, '\0');
    if (at.prefixes != 1) return bytes;
    auto add = [&](const auto& record) { bytes.append(reinterpret_cast<const char*>(&record), sizeof(record)); };
    const int chunks = chunk_count(at.b, at.s, at.parts);
    add(ChunkCount{chunks});
    for (int i = 0; i < chunks; ++i) add(chunk_at(i, 0, 0, at.b, at.t, at.s, at.parts));
    return bytes;
  }
  std::vector<int> sample_prefixes() const {
    std::vector<int> prefix(problem.b);
    std::mt19937 random(2);
    for (int& one : prefix) one = int(random() % unsigned(problem.prefixes));
    return prefix;
  }

  // The problem without lengths, as the functions of plan/attention.h take it.
  struct Dense {
    int b, s, t, h, d, p;
    DType dtype;
    bool causal;
  };
  Dense dense() const {
    return {problem.b, problem.s, problem.t, problem.h, problem.d, problem.p, problem.dtype, problem.causal};
  }

  // At most, where the device makes the list.
  std::int64_t tiles() const {
    if (problem.prefixes) return most_chunks() * problem.h;
    return std::int64_t{problem.b} * problem.h * ceil_div(problem.s, kRows);
  }
  int heads_per_section(const FlashAttentionTiling& at) const {
    const std::int64_t head_bytes = std::int64_t{problem.t} * 2 * problem.d * dtype_bytes(problem.dtype);
    return int(std::clamp<std::int64_t>((std::int64_t{at.section} << 20) / head_bytes, 1,
                                        std::int64_t{problem.b} * problem.h));
  }

  // {section}: about half of an H200's L2 first.
  std::vector<FlashAttentionTiling> candidates() const { return {{32}, {16}, {8}}; }

  Cost cost() const {
    const FlashAttentionProblem& at = problem;
    if (at.prefixes) return prefix_cost();
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

  // Keys and values are read once for all requests of a prefix. The mask is left out of the count.
  Cost prefix_cost() const {
    const FlashAttentionProblem& at = problem;
    const std::vector<int> lengths = at.ragged ? sample_lengths(stores(), at.t) : std::vector<int>(stores(), at.t);
    const double width = dtype_bytes(at.dtype), rows = double(at.h) * at.s, columns = 2 * at.d + at.p;
    Cost all{0, at.b * rows * (width * (columns + (at.parts - 1) * at.d) + 4 * at.parts) + 4.0 * at.b};
    for (const int prefix : sample_prefixes()) all.flops += 2 * rows * lengths[prefix] * columns;
    for (const int tokens : lengths) all.bytes += width * tokens * (2.0 * at.h * at.d + at.p);
    return all;
  }
};

HYPERMLA_REGISTER(FlashAttentionPlan,
                  "attention over decompressed keys and values, scheduled by hand for Hopper: prefill, ragged lengths")

}  // namespace
}  // namespace hypermla::cute
