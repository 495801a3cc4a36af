// What the plans of all versions of the latent kernel for Hopper share: problem, tensors, inputs, reference, cost, and the
// planning of their work, on the host or on the device. A version adds its tilings, its kernel and the merge of its parts.
//
//   qc [B,H,S,512], qpe [B,H,S,64], z [B,T,512], kpe [B,T,64] -> o [B,H,S,512], lse [B,H,S]
//   fused: q [B,H,S,576], cache [B,T,576]; paged: the caches are [pages, page, ..], and block_table [B, ceil(T/page)];
//   ragged: lengths [B], each at most T; ragged, causal and after > 0: after_lengths [B], each at most `after`
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <tuple>

#include "cute/latent/combine_parts.h"
#include "cute/latent/plan_requests.h"
#include "cute/latent/work_plan.h"
#include "hypermla/plan/attention.h"

namespace hypermla::cute {

inline constexpr int kTokenBlock = 64;
inline constexpr float kLn2 = 0.6931471805599453f;

// How a tiling of a version divides the work.
struct Division {
  int rows = 64;  // of a tile
  WorkCosts costs;
};

// How much room a work list takes.
struct WorkSizes {
  std::int64_t slots = 0, items = 0, combines = 0, rounds = 0;
  int workers = 0;
};

template <class Problem, class Tiling>
class LatentPlan : public TypedPlan<Problem, Tiling> {
 public:
  using TypedPlan<Problem, Tiling>::problem;
  using TypedPlan<Problem, Tiling>::tiling;
  using TypedPlan<Problem, Tiling>::target;

  void use_default_tiling() override {
    if (std::min({problem.b, problem.s, problem.t, problem.h}) >= 1) tiling = candidates().front();  // else validate()
  }

  void validate() const override {
    const Problem& at = problem;
    const std::pair<const char*, int> extents[] = {{"b", at.b}, {"s", at.s}, {"t", at.t}, {"h", at.h}, {"d", at.d}};
    for (const auto& [name, value] : extents) require_positive(name, value);
    if (at.k != 512 || at.p != 64)
      fail("--k={} --p={} is not supported: this kernel is made for 512 latent and 64 RoPE columns; the cutile kernels "
           "take others (--language=cutile)", at.k, at.p);
    require_half_precision(at.dtype);
    if (at.t > 1 << 20) fail("--t={} is not supported: a request has at most 1048576 tokens", at.t);
    if (std::int64_t{at.h} * at.s > 1 << 24) fail("--h={} --s={} is not supported: h * s may be at most 16777216", at.h, at.s);
    if (at.page != 0 && at.page != 1 && at.page != 16 && at.page != 32 && at.page != 64 && at.page != 128)
      fail("--page={} is not supported: choose 1, 16, 32, 64 or 128, or 0 for a dense cache", at.page);
    if (at.page == 0 && at.pages != 0) fail("--pages={} needs a page size: add --page=64", at.pages);
    if (at.page > 0 && at.pages != 0 && at.pages < table_width())
      fail("--pages={} is not supported: one request of {} tokens already has {}", at.pages, at.t, table_width());
    if (at.ragged && at.b > kMaxPlannedRequests)
      fail("--b={} is not supported with --ragged: it must be at most {}", at.b, kMaxPlannedRequests);
    if (!(at.scale >= 0)) fail("--scale={} is not supported: it must be positive, or 0 for 1 / sqrt(d + p)", at.scale);
    if (at.after < 0 || at.after > 1 << 20)
      fail("--after={} is not supported: it must be from 0 to 1048576 tokens", at.after);
    if (at.split < 0 || at.split % kTokenBlock)
      fail("--split={} is not supported: it must be a multiple of {}", at.split, kTokenBlock);
    if (at.split > 0 && ceil_div(at.t, at.split) > kMaxParts)
      fail("--split={} is not supported: {} tokens make {} parts, and at most {} are merged; choose a larger split",
           at.split, at.t, ceil_div(at.t, at.split), kMaxParts);
  }

  std::vector<TensorSpec> tensors() const override {
    const Problem& at = problem;
    std::vector<TensorSpec> all;
    auto add = [&](const char* name, Role role, DType dtype, std::vector<std::int64_t> shape) {
      all.push_back({name, role, dtype, std::move(shape)});
    };
    const std::int64_t batches = at.page ? pool_pages() : at.b, tokens = at.page ? at.page : at.t;
    if (at.fused) {
      add("q", Role::input, at.dtype, {at.b, at.h, at.s, at.k + at.p});
      add("cache", Role::input, at.dtype, {batches, tokens, at.k + at.p});
    } else {
      add("qc", Role::input, at.dtype, {at.b, at.h, at.s, at.k});
      add("qpe", Role::input, at.dtype, {at.b, at.h, at.s, at.p});
      add("z", Role::input, at.dtype, {batches, tokens, at.k});
      add("kpe", Role::input, at.dtype, {batches, tokens, at.p});
    }
    if (at.ragged) add("lengths", Role::input, DType::int32, {at.b});
    if (reads_after_lengths()) add("after_lengths", Role::input, DType::int32, {at.b});
    if (at.page) add("block_table", Role::input, DType::int32, {at.b, table_width()});
    add("o", Role::output, at.dtype, {at.b, at.h, at.s, at.k});
    add("lse", Role::output, DType::float32, {at.b, at.h, at.s});
    // One workspace serves every candidate: the tuner runs them all over the same tensors.
    std::vector<Tiling> tilings = candidates();
    tilings.push_back(tiling);
    std::int64_t part_rows = 1, items = 0, combines = 0;
    for (const Tiling& one : tilings) {
      const WorkSizes sizes = this->sizes(one);
      part_rows = std::max(part_rows, sizes.slots * division(one).rows);
      items = std::max(items, sizes.items);
      combines = std::max(combines, sizes.combines);
    }
    add("o_part", Role::workspace, at.dtype, {part_rows, at.k});
    add("lse_part", Role::workspace, DType::float32, {part_rows});
    if (at.ragged) {
      add("work", Role::workspace, DType::int32, {items, sizeof(WorkItem) / 4});
      add("combine_work", Role::workspace, DType::int32, {combines, sizeof(CombineItem) / 4});
    }
    return all;
  }

  InputRules input_rules(std::uint64_t seed) const override {
    InputRules rules;
    const Problem& at = problem;
    const std::vector<int> tokens = lengths();
    const std::int64_t width = at.k + at.p;
    auto unread = [&](std::int64_t first_row, std::int64_t rows) {
      if (rows <= 0) return;
      if (at.fused) {
        rules.unread["cache"].push_back({first_row * width, rows * width});
      } else {
        rules.unread["z"].push_back({first_row * at.k, rows * at.k});
        rules.unread["kpe"].push_back({first_row * at.p, rows * at.p});
      }
    };
    if (at.ragged) rules.integers["lengths"] = tokens;
    if (reads_after_lengths()) rules.integers["after_lengths"] = sample_lengths(at.b, at.after);
    if (at.page) {
      std::vector<int> free(pool_pages());
      for (int i = 0; i < int(free.size()); ++i) free[i] = i;
      std::shuffle(free.begin(), free.end(), std::mt19937_64(seed));
      // A pool smaller than the batch needs (prefixes that requests share) gives its pages out again.
      std::vector<int>& table = rules.integers["block_table"];
      std::vector<int> used(free.size(), 0);  // slots of a page, from the first on
      std::size_t next = 0;
      for (int r = 0; r < at.b; ++r)
        for (int i = 0; i < table_width(); ++i) {
          const int left = std::clamp(tokens[r] - i * at.page, 0, at.page);
          table.push_back(left > 0 ? free[next++ % free.size()] : 1 << 30);  // an entry that nobody may follow
          if (left > 0) used[table.back()] = std::max(used[table.back()], left);
        }
      for (std::size_t i = 0; i < used.size(); ++i) unread(std::int64_t(i) * at.page + used[i], at.page - used[i]);
    } else {
      for (int r = 0; r < at.b; ++r) unread(std::int64_t{r} * at.t + tokens[r], at.t - tokens[r]);
      rules.growing = {{at.fused ? "cache" : "kpe", at.t, at.fused ? at.k + at.p : at.p}};
    }
    return rules;
  }

  ReferenceShape reference_shape() const override {
    return {std::int64_t{problem.b} * problem.h, 2.0 * problem.s * problem.t * (2 * problem.k + problem.p)};
  }
  ReferenceOutputs reference(std::int64_t group, const InputReader& input) const override {
    const Problem& at = problem;
    const RowReader rows{input};
    const std::int64_t request = group / at.h;
    const int tokens = at.ragged ? int(input("lengths", request, 1)[0]) : at.t;
    std::vector<float> table;
    if (at.page) table = input("block_table", request * table_width(), table_width());
    // `width` columns of the request's tokens, dense.
    auto cache = [&](const char* name, int width) {
      std::vector<float> all;
      for (int token = 0; token < tokens;) {
        const int count = at.page ? std::min(at.page, tokens - token) : tokens;
        const std::int64_t first = at.page ? std::int64_t(table[token / at.page]) * at.page : request * at.t;
        const std::vector<float> piece = input(name, first * width, std::int64_t{count} * width);
        all.insert(all.end(), piece.begin(), piece.end());
        token += count;
      }
      return all;
    };
    const int width = at.k + at.p;
    std::vector<float> q, keys, z;
    if (at.fused) {
      q = rows("q", group, at.s, width);
      keys = cache("cache", width);
      for (int i = 0; i < tokens; ++i) z.insert(z.end(), &keys[i * width], &keys[i * width] + at.k);
    } else {
      q = join_columns(rows("qc", group, at.s, at.k), rows("qpe", group, at.s, at.p), at.k, at.p);
      z = cache("z", at.k);
      keys = join_columns(z, cache("kpe", at.p), at.k, at.p);
    }
    ReferenceOutputs outputs;
    auto attend = [&](int first, int last, bool causal) {  // queries
      const AttentionReference one = attention_reference(
          {q.begin() + std::ptrdiff_t(first) * width, q.begin() + std::ptrdiff_t(last) * width}, keys, z, last - first,
          tokens, width, at.k, scale(), causal);
      outputs["o"].insert(outputs["o"].end(), one.o.begin(), one.o.end());
      outputs["lse"].insert(outputs["lse"].end(), one.lse.begin(), one.lse.end());
    };
    const int masked = masked_queries(reads_after_lengths() ? int(input("after_lengths", request, 1)[0]) : at.after);
    if (masked > 0) attend(0, masked, true);
    if (masked < at.s) attend(masked, at.s, false);
    if (at.lse_base2)
      for (double& value : outputs["lse"]) value *= kLog2e;
    return outputs;
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    std::unique_ptr<CuteKernel> main = attention(tensors);
    const std::string name = main->name();
    std::unique_ptr<CuteKernel> merge = combine(tensors, *main);
    std::vector<std::unique_ptr<Executable>> stages;
    if (problem.ragged) stages.push_back(planning(tensors, *main));
    stages.push_back(std::move(main));
    stages.push_back(std::move(merge));
    return std::make_unique<KernelPipeline>(name, std::move(stages));
  }

 protected:
  virtual std::vector<Tiling> candidates() const = 0;
  virtual Division division(const Tiling& at) const = 0;
  virtual std::unique_ptr<CuteKernel> attention(const Tensors& tensors) const = 0;
  // Merges what `main` leaves in parts; follows its tiling.
  virtual std::unique_ptr<CuteKernel> combine(const Tensors& tensors, const CuteKernel& main) const = 0;

  // Tokens may be asked for before the kernels before this one are done only where the host knows which.
  bool may_prefetch() const { return problem.page == 0 && !problem.ragged; }
  void validate_prefetch(int blocks) const {
    if (blocks != 0 && !(may_prefetch() && blocks > 0))
      fail("--prefetch={} is not supported here: it needs a dense cache, and no --ragged; choose --prefetch=0", blocks);
  }
  bool reads_after_lengths() const { return problem.ragged && problem.causal && problem.after > 0; }
  // The first queries of a request, for which a causal mask hides some of its tokens; the others see all of them.
  int masked_queries(int after) const { return problem.causal ? std::max(problem.s - after, 0) : 0; }
  float scale() const { return problem.scale > 0 ? problem.scale : softmax_scale(problem.d, problem.p); }
  float lse_unit() const { return problem.lse_base2 ? 1.0f : kLn2; }
  int table_width() const { return int(ceil_div(problem.t, std::max(problem.page, 1))); }
  std::int64_t pool_pages() const { return problem.pages ? problem.pages : std::int64_t{problem.b} * table_width(); }
  int split_blocks() const { return problem.split / kTokenBlock; }
  int row_tiles(const Tiling& at) const { return int(ceil_div(problem.h * problem.s, division(at).rows)); }
  double part_bytes(const Tiling& at) const { return division(at).rows * (problem.k * dtype_bytes(problem.dtype) + 4.0); }

  std::vector<int> lengths() const {
    return problem.ragged ? sample_lengths(problem.b, problem.t) : std::vector<int>(problem.b, problem.t);
  }
  std::int64_t token_blocks() const {
    std::int64_t blocks = 0;
    for (int tokens : lengths()) blocks += ceil_div(tokens, kTokenBlock);
    return blocks;
  }

  Cost total_cost() const {
    const Problem& at = problem;
    const double width = dtype_bytes(at.dtype), rows = double(at.h) * at.s;
    Cost cost{0, at.b * (rows * (width * (2 * at.k + at.p) + 4) + 4.0 * at.ragged + (at.page ? 4.0 * table_width() : 0))};
    const int masked = masked_queries(at.after);
    for (int tokens : lengths()) {
      const double seen = (at.s - masked) * double(tokens) + (masked ? masked * mean_tokens_seen(masked, tokens, true) : 0);
      cost.flops += 2 * at.h * seen * (2 * at.k + at.p);
      cost.bytes += width * tokens * (at.k + at.p);
    }
    return cost;
  }
  // Orders the candidates: with padded rows, and partial outputs written and read.
  Cost executed_cost(const Tiling& at) const {
    Cost cost = total_cost();
    cost.flops *= padding(problem.h * problem.s, division(at).rows);
    cost.bytes += 2 * part_bytes(at) * double(sizes(at).slots);
    return cost;
  }
  Cost combine_cost() const {
    const WorkSizes now = sizes(tiling);
    const auto tiles = std::min<std::int64_t>(now.combines, std::int64_t{problem.b} * row_tiles(tiling));
    return {0, part_bytes(tiling) * double(now.slots) +
                   double(tiles) * division(tiling).rows * problem.k * dtype_bytes(problem.dtype)};
  }

  WorkPlan work_plan(const Tiling& at) const {
    return plan_work(lengths(), row_tiles(at), target.processors, split_blocks(), division(at).costs);
  }
  RequestSchedule schedule(const Tiling& at) const { return schedule_requests(row_tiles(at), target.processors); }
  WorkSizes sizes(const Tiling& at) const {
    if (!problem.ragged) {
      const WorkPlan plan = work_plan(at);
      return {plan.slots, std::int64_t(plan.items.size()), std::int64_t(plan.combines.size()), plan.rounds, plan.grid};
    }
    const RequestSchedule plan = schedule(at);
    const RequestListSizes lists = list_sizes(at);
    return {.slots = plan.side * lists.slots_per_tile,
            .items = lists.rounds * plan.workers(),
            .combines = lists.combines,
            .rounds = lists.rounds,
            .workers = plan.workers()};
  }
  RequestListSizes list_sizes(const Tiling& at) const {
    const WorkCosts costs = division(at).costs;
    return request_list_sizes(schedule(at), problem.b, ceil_div(problem.t, kTokenBlock), split_blocks(),
                              costs.overhead(), costs.combine, costs.partial);
  }
  // The lists as bytes for the device.
  std::string item_bytes(const Tiling& at) const { return bytes_of(work_plan(at).items); }
  std::string combine_bytes(const Tiling& at) const { return bytes_of(work_plan(at).combines); }

  // The kernel that merges what `main` leaves in parts, of which `spec` names source and candidates. A tile's columns are
  // shared by blocks_of(tiling, main's tiling, tiles, groups) thread blocks, its parts by `groups` of 128 threads, so that
  // each has all its loads, of four parts, in flight at once. Where cuts are fixed so are the groups, whatever the batch or
  // the candidate: in which order parts are added decides the last bits. more(main's tiling): further arguments, a tuple.
  template <class MergeProblem, class MergeTiling, class BlocksOf, class More>
  std::unique_ptr<CuteKernel> merging(CuteKernelSpec<MergeProblem, MergeTiling> spec, const Tensors& tensors,
                                      const CuteKernel& main, BlocksOf blocks_of, More more) const {
    spec.problem = {.dtype = problem.dtype};
    spec.cost = combine_cost();
    spec.executed = [cost = spec.cost](const MergeTiling&) { return cost; };
    spec.at_compile_time = [](MergeTiling) { return MergeTiling{}; };
    if (split_blocks()) std::erase_if(spec.candidates, [](const MergeTiling& one) { return one.groups != 0; });
    spec.launch = [self = shared_copy(), tensors, &main, blocks_of, more](const MergeTiling& tiling) {
      const auto at = fields_from_json<Tiling>(main.tiling());
      const WorkSizes sizes = self->sizes(at);
      const std::int64_t tiles = std::max<std::int64_t>(sizes.combines, 1);
      const std::int64_t parts =
          self->problem.ragged ? ceil_div(self->schedule(at).groups, self->problem.b) : sizes.slots / tiles;
      unsigned groups = unsigned(tiling.groups);
      if (groups == 0) groups = self->split_blocks() ? 4 : parts > 16 ? 8 : parts > 8 ? 4 : parts > 4 ? 2 : 1;
      KernelLaunch launch;
      launch.grid = {unsigned(sizes.combines), sizes.combines ? blocks_of(tiling, at, tiles, groups) : 0, 1};
      launch.shape = {128 * groups, kCombineGroupBytes * (groups - 1), 1, true};
      if (!self->problem.ragged) launch.constants = self->combine_bytes(at);
      launch.arguments = [self, tensors, last = more(at)](void* constants) {
        auto data = [&](const char* name) { return tensors.at(name).data; };
        return std::apply(
            [&](auto... rest) {
              return Arguments(self->problem.ragged ? data("combine_work") : constants, data("o_part"), data("lse_part"),
                               data("o"), data("lse"), self->lse_unit(), self->problem.h * self->problem.s, rest...);
            },
            last);
      };
      return launch;
    };
    return std::make_unique<CuteKernel>(std::move(spec));
  }

  // What the kernel is compiled for; the rest it learns at run time.
  Problem at_compile_time() const {
    Problem at{};
    at.b = at.s = at.t = at.h = at.d = 0;
    at.k = problem.k;
    at.p = problem.p;
    at.dtype = problem.dtype;
    at.causal = problem.causal;
    at.after = problem.causal && problem.after > 0;
    at.page = problem.page;
    return at;
  }

  // The operands, fused or not: a tensor, and the first of its columns.
  struct Operand {
    Tensor tensor;
    int first_column = 0;
    void* data() const { return tensor.data ? static_cast<char*>(tensor.data) + first_column * 2 : nullptr; }
    int row_bytes() const { return int(tensor.shape.back()) * 2; }
  };
  struct Operands {
    Operand qc, qpe, z, kpe, o;
  };
  Operands operands(const Tensors& tensors) const {
    const int rope = problem.fused ? problem.k : 0;
    auto of = [&](const char* fused, const char* apart, int column) {
      return Operand{tensors.at(problem.fused ? fused : apart), column};
    };
    return {of("q", "qc", 0), of("q", "qpe", rope), of("cache", "z", 0), of("cache", "kpe", rope), {tensors.at("o"), 0}};
  }
  // Boxes of rows of queries or outputs, and of tokens, dense or paged.
  TensorMap row_map(const Operand& operand, int columns, int box_rows, int box_groups) const {
    return map(operand, columns, problem.h * problem.s, problem.b, box_rows, box_groups);
  }
  TensorMap token_map(const Operand& operand, int columns, int box_rows, int box_groups) const {
    return map(operand, columns, problem.page ? problem.page : problem.t, problem.page ? pool_pages() : problem.b, box_rows,
               box_groups);
  }

 private:
  template <class Item>
  static std::string bytes_of(const std::vector<Item>& items) {
    return {reinterpret_cast<const char*>(items.data()), items.size() * sizeof(Item)};
  }
  TensorMap map(const Operand& operand, int columns, int rows, std::int64_t batch, int box_rows, int box_groups) const {
    return make_matrix_map(problem.dtype, operand.data(), rows, columns, batch, box_rows, box_groups, operand.row_bytes());
  }

  std::unique_ptr<CuteKernel> planning(const Tensors& tensors, const CuteKernel& main) const {
    CuteKernelSpec<PlanRequestsProblem, PlanRequestsTiling> spec;
    spec.name = "plan_requests";
    spec.header = "cute/latent/plan_requests.cuh";
    spec.problem = {.split = split_blocks()};
    spec.candidates = {{}};
    spec.cost = {0, 4.0 * problem.b};
    spec.executed = [cost = spec.cost](const PlanRequestsTiling&) { return cost; };
    spec.launch = [self = shared_copy(), tensors, &main](const PlanRequestsTiling& threads) {
      const auto at = fields_from_json<Tiling>(main.tiling());
      KernelLaunch launch;
      launch.grid = {1, 1, 1};
      launch.shape = {unsigned(threads.threads), 0, 1, true};
      launch.arguments = [self, tensors, at](void*) {
        auto data = [&](const char* name) { return tensors.at(name).data; };
        const RequestSchedule plan = self->schedule(at);
        const RequestListSizes lists = self->list_sizes(at);
        const WorkCosts costs = self->division(at).costs;
        return Arguments(data("lengths"), data("work"), data("combine_work"), self->problem.b, self->row_tiles(at),
                         plan.side, plan.passes, plan.groups, int(lists.rounds), costs.overhead(),
                         float(costs.combine), float(costs.partial), int(lists.slots_per_tile), int(lists.combines));
      };
      return launch;
    };
    return std::make_unique<CuteKernel>(std::move(spec));
  }

 protected:
  // A copy of the version's own plan, for what outlives this one.
  virtual std::shared_ptr<const LatentPlan> shared_copy() const = 0;
};

}  // namespace hypermla::cute
