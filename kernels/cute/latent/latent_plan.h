// What the plans of all versions of the latent kernel for Hopper share: limits, workspace, and the planning of their
// work, on the host or on the device. A version adds its tilings, its kernel and the merge of its parts.
#pragma once

#include <algorithm>
#include <tuple>

#include "cute/latent/combine_parts.h"
#include "cute/latent/plan_requests.h"
#include "cute/latent/work_plan.h"
#include "mla/latent/latent_plan.h"

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

template <class Tiling>
class LatentPlan : public AttentionPlan<LatentProblem, Tiling> {
 public:
  using AttentionPlan<LatentProblem, Tiling>::problem;
  using AttentionPlan<LatentProblem, Tiling>::tiling;
  using AttentionPlan<LatentProblem, Tiling>::target;

  LatentPlan() { problem.b = 32; }
  void use_default_tiling() override {
    if (std::min({problem.b, problem.s, problem.t, problem.h}) >= 1) tiling = candidates().front();  // else validate()
  }

  void validate() const override {
    const LatentProblem& at = problem;
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
    if (at.page > 0 && at.pages != 0 && at.pages < table_width(at))
      fail("--pages={} is not supported: one request of {} tokens already has {}", at.pages, at.t, table_width(at));
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
    const LatentProblem& at = problem;
    std::vector<TensorSpec> all = tensors_of(at);
    auto add = [&](const char* name, Role role, DType dtype, std::vector<std::int64_t> shape) {
      all.push_back({name, role, dtype, std::move(shape)});
    };
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
  float lse_unit() const { return problem.lse_base2 ? 1.0f : kLn2; }
  int split_blocks() const { return problem.split / kTokenBlock; }
  int row_tiles(const Tiling& at) const { return int(ceil_div(problem.h * problem.s, division(at).rows)); }
  double part_bytes(const Tiling& at) const { return division(at).rows * (problem.k * dtype_bytes(problem.dtype) + 4.0); }

  std::int64_t token_blocks() const {
    std::int64_t blocks = 0;
    for (int tokens : lengths_of(problem)) blocks += ceil_div(tokens, kTokenBlock);
    return blocks;
  }

  // Orders the candidates: with padded rows, and partial outputs written and read.
  Cost executed_cost(const Tiling& at) const {
    Cost cost = latent_cost(problem);
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
    return plan_work(lengths_of(problem), row_tiles(at), target.processors, split_blocks(), division(at).costs);
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
  LatentProblem at_compile_time() const {
    LatentProblem at{};
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
    return map(operand, columns, problem.page ? problem.page : problem.t,
               problem.page ? pool_pages(problem) : problem.b, box_rows, box_groups);
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
