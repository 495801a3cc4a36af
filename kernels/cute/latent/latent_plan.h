// What the plans of all versions of the latent kernel for Hopper share: limits, workspace, and the planning of their
// work, on the host or on the device. A version adds its tilings and its kernel.
#pragma once

#include <algorithm>
#include <bit>
#include <limits>

#include "cute/latent/decode_plan.h"
#include "cute/latent/prefix_plan.h"
#include "hypermla/plan/configure.h"
#include "hypermla/plan/decode_cases.h"
#include "hypermla/plan/status.h"
#include "mla/attention_time.h"
#include "mla/latent/latent_plan.h"

namespace hypermla::cute {

// How much room a work list takes.
struct WorkSizes {
  std::int64_t slots = 0, items = 0, rounds = 0;
  int workers = 0;
};

template <class Tiling>
class LatentPlan : public AttentionPlan<LatentProblem, Tiling> {
 public:
  using AttentionPlan<LatentProblem, Tiling>::problem;
  using AttentionPlan<LatentProblem, Tiling>::tiling;
  using AttentionPlan<LatentProblem, Tiling>::target;

  LatentPlan() : AttentionPlan<LatentProblem, Tiling>({"shards"}) {}

  std::vector<FieldRef> problem_fields() override {
    std::vector<FieldRef> fields = AttentionPlan<LatentProblem, Tiling>::problem_fields();
    for (FieldRef& field : fields)
      if (field.name == "fp8")  // which is of commands, too
        field.help =
            "bytes of a token in FP8: 656 (512 e4m3, 4 fp32 scales, 64 bf16 of RoPE) or 576 (e4m3, one scale for "
            "all); 0: elements of dtype";
    fields.push_back({"fp8_queries", "queries in e4m3, too, with one scale for all; with --fp8=576", &fp8_queries});
    return fields;
  }
  bool fp8_queries = false;  // no kernel's template argument

  void use_default_tiling() override {
    if (std::min({problem.b, problem.s, problem.t, problem.h}) >= 1) tiling = candidates().front();  // else validate()
  }

  void validate() const override {
    const LatentProblem& at = problem;
    // First, since tiles of so many rows are counted below.
    const std::vector<int> rows = tile_rows();
    if (!rows.empty() && std::find(rows.begin(), rows.end(), version(tiling).rows) == rows.end())
      fail("--rows={} is not supported: choose {}", version(tiling).rows, fmt::join(rows, " or "));
    const std::pair<const char*, int> extents[] = {{"b", at.b}, {"s", at.s}, {"t", at.t}, {"h", at.h}, {"d", at.d}};
    for (const auto& [name, value] : extents) require_positive(name, value);
    if (at.k != 512 || at.p != 64)
      fail(
          "--k={} --p={} is not supported: this kernel is made for 512 latent and 64 RoPE columns; the cutile kernels "
          "take others (--language=cutile)",
          at.k, at.p);
    require_half_precision(at.dtype);
    if (at.t > 1 << 20) fail("--t={} is not supported: a request has at most 1048576 tokens", at.t);
    if (std::int64_t{at.h} * at.s > 1 << 24)
      fail("--h={} --s={} is not supported: h * s may be at most 16777216", at.h, at.s);
    if (at.page != 0 && at.page != 1 && at.page != 16 && at.page != 32 && at.page != 64 && at.page != 128)
      fail("--page={} is not supported: choose 1, 16, 32, 64 or 128, or 0 for a dense cache", at.page);
    if (at.page == 0 && at.pages != 0) fail("--pages={} needs a page size: add --page=64", at.pages);
    if (at.page > 0 && at.pages != 0 && at.pages < table_width(at))
      fail("--pages={} is not supported: one request of {} tokens already has {}", at.pages, at.t, table_width(at));
    if (at.ragged && at.b > kMaxPlannedRequests)
      fail("--b={} is not supported with --ragged: it must be at most {}", at.b, kMaxPlannedRequests);
    const int tile_rows = version(tiling).rows;
    if (!std::has_single_bit(unsigned(tile_rows)) && std::int64_t{at.h} * at.s > tile_rows)
      fail("--rows={} is not supported with --h={} --s={}: one tile has to hold their {} rows; choose a power of two",
           tile_rows, at.h, at.s, std::int64_t{at.h} * at.s);
    validate_fp8();
    const std::int64_t tiles = row_tiles(tiling);
    if (at.ragged && (tiles > 65535 || at.b * tiles * (ceil_div(at.t, kTokenBlock) + 2) > 1 << 30))
      fail(
          "--b={} --h={} --s={} --t={} is not supported with --ragged: these are more blocks of work than the planner "
          "counts",
          at.b, at.h, at.s, at.t);
    if (!is_scale(at.scale))
      fail("--scale={} is not supported: it must be from 2^-60 to 2^60, or 0 for 1 / sqrt(d + p)", at.scale);
    if (at.after < 0 || at.after > 1 << 20)
      fail("--after={} is not supported: it must be from 0 to 1048576 tokens", at.after);
    if (at.split < 0 || at.split % kTokenBlock)
      fail("--split={} is not supported: it must be a multiple of {}", at.split, kTokenBlock);
    if (at.split > 0 && ceil_div(at.t, at.split) > kMaxParts)
      fail("--split={} is not supported: {} tokens make {} parts, and at most {} are merged; choose a larger split",
           at.split, at.t, ceil_div(at.t, at.split), kMaxParts);
  }

  Path path() const override { return Path::latent; }
  std::string followed_by() const override { return "output_decompression"; }
  TimeEstimate time(const Ceilings& ceilings) const override {
    std::vector<Figures> figures = this->figures();
    if (one_tiling_) std::erase_if(figures, [&](const Figures& of) { return of.rows != version(tiling).rows; });
    return latent_time(problem, figures, ceilings);
  }

  Tolerance allowed(DType output) const override {
    return decode_tolerance({.dtype = problem.dtype, .cache_format = cache_format(), .fp8_queries = fp8_queries},
                            output);
  }
  InputRules input_rules(std::uint64_t seed) const override { return input_rules_of(problem, seed, fp8_queries); }
  ReferenceOutputs reference(std::int64_t group, const InputReader& input) const override {
    return reference_of(problem, group, input, fp8_queries);
  }

  std::vector<TensorSpec> tensors() const override {
    const LatentProblem& at = problem;
    std::vector<TensorSpec> all = tensors_of(at, fp8_queries);
    auto add = [&](const char* name, Role role, DType dtype, std::vector<std::int64_t> shape) {
      all.push_back({name, role, dtype, std::move(shape)});
    };
    // One workspace serves every candidate: the tuner runs them all over the same tensors.
    std::vector<Tiling> tilings = candidates();
    tilings.push_back(tiling);
    std::int64_t part_rows = 1, part_floats = 1, items = 0, slots = 0;
    for (const Tiling& one : tilings) {
      const WorkSizes sizes = this->sizes(one);
      const int rows = version(one).rows;
      part_rows = std::max(part_rows, sizes.slots * rows);
      part_floats = std::max(part_floats, sizes.slots * rows * part_row_floats(rows));
      items = std::max(items, sizes.items);
      slots = std::max(slots, sizes.slots);
    }
    add("o_part", Role::workspace, at.dtype, {part_rows, at.k});
    add("lse_part", Role::workspace, DType::float32, {part_floats});
    if (at.ragged) {
      add("work", Role::workspace, DType::int32, {items, sizeof(WorkItem) / 4});
      add("merges", Role::workspace, DType::int32, {slots, sizeof(MergeState) / 4});
      add(kPlanStatus, Role::workspace, DType::int32, {1});
    }
    return all;
  }

  std::unique_ptr<Executable> plan(const Tensors& tensors) const override {
    std::unique_ptr<CuteKernel> main = attention(tensors);
    if (!problem.ragged) return main;
    const std::string name = main->name();
    std::vector<std::unique_ptr<Executable>> stages;
    stages.push_back(planning(tensors, *main));
    stages.push_back(std::move(main));
    return std::make_unique<KernelPipeline>(name, std::move(stages));
  }

  std::unique_ptr<DecodeKernels> decode(const MlaDecodeOptions& options) const override {
    if (!takes(options)) return nullptr;
    std::unique_ptr<LatentDecode> own = latent_decode(options);
    return options.shared_prefixes ? with_shared_prefixes(options, std::move(own), target) : std::move(own);
  }

 protected:
  virtual std::vector<Tiling> candidates() const = 0;
  virtual LatentVersion version(const Tiling& at) const = 0;
  // Whether there is one tiling for requests of any length up to problem.t: MlaDecode's, else the tuner may take any.
  bool one_tiling() const { return one_tiling_; }
  // Of a tile, where its rows are an option.
  virtual std::vector<int> tile_rows() const { return {}; }
  // Whether MlaDecode may call it for a cache of that form: sparse, or in FP8.
  virtual bool takes(const MlaDecodeOptions& options) const {
    return !options.sparse && !fp8_bytes(options.cache_format);
  }
  // A copy of the version's own plan, for what outlives this one.
  virtual std::shared_ptr<LatentPlan> shared_copy() const = 0;
  // The tiling as a template argument, where the kernel learns some of its fields at run time.
  virtual Tiling tiling_at_compile_time(Tiling at) const { return at; }

  // Without shared prefixes.
  std::unique_ptr<LatentDecode> latent_decode(const MlaDecodeOptions& options) const {
    const int fp8 = fp8_bytes(options.cache_format);
    const std::shared_ptr<LatentPlan> self = shared_copy();
    self->problem = {.b = options.max_requests,
                     .s = options.max_queries,
                     .t = most_tokens_here(options),
                     .h = options.heads,
                     .dtype = options.dtype,
                     .causal = options.causal,
                     .ragged = true,
                     .page = options.sparse ? 1 : options.page,
                     .fused = true,
                     .split = options.split,
                     .tokens_first = true,
                     .fp8 = fp8,
                     .shards = options.shards > 1};
    self->fp8_queries = options.fp8_queries;
    self->one_tiling_ = true;
    self->use_default_tiling();
    const Tensors tensors = empty_tensors(*self);
    const std::unique_ptr<CuteKernel> main = self->attention(tensors);
    const std::unique_ptr<CuteKernel> planner = self->planning(tensors, *main);
    const auto source = [](const CuteKernel& kernel) { return kernel.source(kernel.tiling()); };
    const auto seconds = [self, options](const DeviceSpec& device, int tokens) {
      const std::shared_ptr<LatentPlan> at = self->shared_copy();
      MlaDecodeOptions shorter = options;
      shorter.max_tokens = tokens;
      at->problem.t = most_tokens_here(shorter);
      return expected_seconds(*at, device);
    };
    LatentVersion of = self->version(self->tiling);
    of.shape = main->shape();
    return std::make_unique<LatentDecode>(options, LatentDecodeSpec{.version = of,
                                                                    .seconds = seconds,
                                                                    .attention = source(*main),
                                                                    .planner = source(*planner),
                                                                    .workers = target.processors});
  }

  MlaCacheFormat cache_format() const {
    using enum MlaCacheFormat;
    return problem.fp8 == 0 ? as_queries : problem.fp8 == kFp8TokenBytes ? fp8_656 : fp8_576;
  }
  // Whether MlaDecode may call it for such a cache and queries.
  bool takes_cache() const {
    MlaDecodeOptions as = {.heads = problem.h,
                           .max_requests = problem.b,
                           .max_queries = problem.s,
                           .max_tokens = problem.t,
                           .page = problem.page,
                           .cache_format = cache_format(),
                           .fp8_queries = fp8_queries};
    if (takes(as)) return true;
    as.sparse = problem.page == 1 && problem.s == 1 && !problem.causal;
    return as.sparse && takes(as);
  }
  void validate_fp8() const {
    const LatentProblem& at = problem;
    if (at.fp8 != 0 && at.fp8 != 576 && at.fp8 != kFp8TokenBytes)
      fail("--fp8={} is not supported: choose 656 or 576 bytes a token, or 0 for a cache in --dtype", at.fp8);
    if (fp8_queries && at.fp8 != 576)
      fail("--fp8={} is not supported with --fp8_queries: add --fp8=576, or leave --fp8_queries out", at.fp8);
    if (at.fp8 && at.page == 0)
      fail("--page=0 is not supported with --fp8={}: add --page=64, or --page=1 for lists of chosen tokens", at.fp8);
    if (!takes_cache() && !at.fp8)
      fail("--fp8=0 is not supported: this version is for caches in FP8; add --fp8=656 or 576, and --page=64");
    if (!takes_cache())
      fail(
          "--fp8={}{} --page={} is not supported by this version; `hypermla choose` with these flags lists those that "
          "take it",
          at.fp8, fp8_queries ? " --fp8_queries" : "", at.page);
    if (at.fp8 && at.dtype != DType::bfloat16)
      fail("--dtype={} is not supported with --fp8={}: choose bfloat16", dtype_name(at.dtype), at.fp8);
    if (this->only_decodes() && at.after)
      fail("--after={} is not supported by this version: choose --after=0", at.after);
    if (this->only_decodes() && at.s > 1 && !at.tokens_first)
      fail("--s={} is not supported by this version unless tokens come first: add --tokens_first", at.s);
  }

  // Those tilings that no one before them is equal to.
  static std::vector<Tiling> distinct(std::initializer_list<Tiling> all) {
    std::vector<Tiling> found;
    for (const Tiling& one : all) {
      const auto is_one = [&](const Tiling& other) { return fields_json(other) == fields_json(one); };
      if (std::none_of(found.begin(), found.end(), is_one)) found.push_back(one);
    }
    return found;
  }

  // What is loaded by boxes may be asked for before the kernels before this one are done.
  bool may_prefetch() const { return !is_gathered(problem.page); }
  void validate_prefetch(int blocks) const {
    if (blocks != 0 && !(may_prefetch() && blocks > 0))
      fail(
          "--prefetch={} is not supported here: it needs a dense cache or pages of {} tokens or more; choose "
          "--prefetch=0",
          blocks, kLeastBox);
  }
  int split_blocks() const { return problem.split / kTokenBlock; }
  int row_tiles(const Tiling& at) const { return int(ceil_div(problem.h * problem.s, version(at).rows)); }
  // Thread blocks of a cluster, which only places them beside each other: the two row tiles of a request read the same
  // tokens, and reads of neighbours merge on their way to L2. More than two: launch_next_if_short() in start.cuh.
  unsigned side_by_side(int rows) const { return ceil_div(problem.h * problem.s, rows) == 2 ? 2 : 1; }
  double part_bytes(const Tiling& at) const {
    const int rows = version(at).rows;
    return rows * (problem.k * dtype_bytes(problem.dtype) + 4.0 * part_row_floats(rows));
  }

  // For figures of tiles of 64 rows, by how much their tensor work is faster than that of whole tiles: the rows that
  // nobody has are zeros, which take less power, 0.8 of it. docs/log/engine.md: 128 requests of 4096 tokens under
  // queries in e4m3 took 77.3 us (82.7 sustained) with 16 heads in such tiles, 82.6 (92.3) with 64.
  double by_zeros() const { return 1 / (0.8 + 0.2 / padding(problem.h * problem.s, 64)); }

  std::int64_t token_blocks() const {
    std::int64_t blocks = 0;
    for (int tokens : lengths_of(problem)) blocks += ceil_div(tokens, kTokenBlock);
    return blocks;
  }

  // Orders the candidates: with padded rows, and partial outputs written and read.
  Cost executed_cost(const Tiling& at) const {
    Cost cost = latent_cost(problem, fp8_queries);
    const double padded = padding(problem.h * problem.s, version(at).rows);
    cost.flops *= padded;
    cost.fp8_flops *= padded;
    cost.bytes += 2 * part_bytes(at) * double(sizes(at).slots);
    return cost;
  }
  WorkPlan work_plan(const Tiling& at) const {
    return plan_work(lengths_of(problem), row_tiles(at), target.processors, split_blocks(), version(at).costs,
                     problem.h * problem.s, problem.s, version(at).joins);
  }
  WorkSizes sizes(const Tiling& at) const {
    if (!problem.ragged) {
      const WorkPlan plan = work_plan(at);
      return {plan.slots, std::int64_t(plan.items.size()), plan.rounds, plan.grid};
    }
    const WorkCosts costs = version(at).costs;
    const std::int64_t tiles = row_tiles(at);
    const RequestListSizes lists =
        request_list_sizes(target.processors, problem.b, tiles, problem.b * tiles, ceil_div(problem.t, kTokenBlock),
                           split_blocks(), costs.overhead(), costs.combine, costs.partial);
    return {.slots = lists.slots,
            .items = lists.rounds * target.processors,
            .rounds = lists.rounds,
            .workers = target.processors};
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
    at.page = problem.fp8 && version(tiling).gathers_fp8 ? 1 : problem.page;
    at.tokens_first = problem.tokens_first || this->only_decodes();  // one query is first either way
    at.fp8 = problem.fp8;
    at.shards = problem.shards;
    return at;
  }

  std::unique_ptr<CuteKernel> attention(const Tensors& tensors) const {
    CuteKernelSpec<LatentProblem, Tiling> spec;
    const LatentVersion present = version(tiling);
    spec.name = present.name;
    spec.header = present.header;
    spec.problem = at_compile_time();
    spec.tiling = tiling;
    spec.candidates = candidates();
    spec.cost = latent_cost(problem, fp8_queries);
    const std::shared_ptr<const LatentPlan> self = shared_copy();
    spec.executed = [self](const Tiling& at) { return self->executed_cost(at); };
    spec.at_compile_time = [self](const Tiling& at) { return self->tiling_at_compile_time(at); };
    spec.launch = [self, tensors](const Tiling& at) {
      const WorkSizes sizes = self->sizes(at);
      const LatentVersion version = self->version(at);
      KernelLaunch launch;
      launch.grid = {unsigned(sizes.workers), 1, 1};
      launch.shape = version.shape;
      // A cluster only places thread blocks beside each other. An odd number of them runs without clusters.
      if (sizes.workers % int(launch.shape.cluster)) launch.shape.cluster = 1;
      if (!self->problem.ragged) launch.constants = self->constants(at);
      launch.arguments = [self, tensors, version, sizes](void* constants) {
        return Arguments(self->arguments(tensors, version, constants, sizes));
      };
      return launch;
    };
    return std::make_unique<CuteKernel>(std::move(spec));
  }

  std::unique_ptr<CuteKernel> planning(const Tensors& tensors, const CuteKernel& main) const {
    CuteKernelSpec<PlanRequestsProblem, PlanRequestsTiling> spec;
    spec.name = "plan_requests";
    spec.header = "cute/latent/plan_requests.cuh";
    spec.problem = {.split = split_blocks(), .shards = problem.shards};
    spec.candidates = {{}};
    spec.cost = {0, 4.0 * problem.b};
    spec.executed = [cost = spec.cost](const PlanRequestsTiling&) { return cost; };
    spec.launch = [self = shared_copy(), tensors, &main](const PlanRequestsTiling& threads) {
      const auto at = fields_from_json<Tiling>(main.tiling());
      KernelLaunch launch;
      launch.grid = {kPlanRequestsBlocks, 1, 1};
      launch.shape = {unsigned(threads.threads), 0, 1, true};
      launch.arguments = [self, tensors, sizes = self->sizes(at), version = self->version(at)](void* constants) {
        const LatentProblem& of = self->problem;
        PlanRequestsArguments with =
            planner_arguments(version, self->lists(tensors, constants, sizes),
                              {.heads = of.h, .queries = of.s, .max_tokens = of.t, .all_queries = of.b * of.s});
        with.lengths = static_cast<const int*>(tensors.at("lengths").data);
        with.requests = of.b;
        return Arguments(with);
      };
      return launch;
    };
    return std::make_unique<CuteKernel>(std::move(spec));
  }

 private:
  bool one_tiling_ = false;

  // A work list made here: items, and a MergeState of each slot.
  std::string constants(const Tiling& at) const {
    const WorkPlan plan = work_plan(at);
    std::string all(reinterpret_cast<const char*>(plan.items.data()), plan.items.size() * sizeof(WorkItem));
    all.append(plan.slots * sizeof(MergeState), '\0');
    return all;
  }

  // In the workspace or, where the host knows all lengths, behind each other in `constants`.
  WorkLists lists(const Tensors& tensors, void* constants, const WorkSizes& sizes) const {
    const auto data = [&](const char* name) { return tensors.at(name).data; };
    WorkLists lists = {.o_part = data("o_part"),
                       .lse_part = static_cast<float*>(data("lse_part")),
                       .workers = sizes.workers,
                       .rounds = int(sizes.rounds)};
    lists.items = static_cast<WorkItem*>(problem.ragged ? data("work") : constants);
    lists.merges = problem.ragged ? static_cast<MergeState*>(data("merges"))
                                  : reinterpret_cast<MergeState*>(lists.items + sizes.items);
    if (problem.ragged) lists.status = static_cast<int*>(data(kPlanStatus));
    return lists;
  }

  // Over the tensors of the plan, all dense.
  LatentArguments arguments(const Tensors& tensors, const LatentVersion& version, void* constants,
                            const WorkSizes& sizes) const {
    const LatentProblem& of = problem;
    const auto data = [&](const char* name) { return tensors.at(name).data; };
    // The operands, fused or not, from their first columns on.
    const auto operand = [&](const char* fused, const char* apart, int column) {
      char* const begin = static_cast<char*>(data(of.fused ? fused : apart));
      return static_cast<void*>(begin && of.fused ? begin + 2 * column : begin);
    };
    const int pair = fp8_queries ? 2 : 1;  // numbers of what counts as an element
    const int latent_width = of.fused ? of.k + of.p : of.k, rope_width = of.fused ? of.k + of.p : of.p;
    const std::int64_t rows = std::int64_t{of.b} * of.h * of.s;
    const auto query_map = [&](void* from, int columns, int width, int groups) {
      return make_tensor_map(rows_source(of.dtype, from, columns,
                                         {.inner = 1, .inner_stride = width, .outer = rows, .outer_stride = width},
                                         version.rows, groups));
    };
    CacheShape shape = {
        .tokens = of.page ? of.page : of.t, .batches = of.page ? pool_pages(of) : of.b, .page = of.page};
    if (of.fp8 && version.gathers_fp8) shape = {1, pool_pages(of) * of.page, 1};  // of which no map is used
    void* const z = of.fp8 ? data("cache") : operand("cache", "z", 0);
    void* const kpe = !of.fp8                     ? operand("cache", "kpe", of.k)
                      : version.gathers_fp8 || !z ? z
                                                  : static_cast<char*>(z) + of.k;
    LatentArguments with =
        attention_arguments(lists(tensors, constants, sizes), of.h, score_scale(of), of.lse_base2, false);
    with.qc_map = query_map(operand("q", "qc", 0), of.k / pair, latent_width / pair, version.query_groups);
    with.qpe_map = query_map(operand("q", "qpe", of.k / pair), of.p / pair, rope_width / pair, 1);
    const auto token_map = [&](void* from, int columns, std::int64_t width) {
      return make_tensor_map(tokens_source(of.dtype, from, columns, shape, width, width * shape.tokens));
    };
    with.z_map = token_map(z, of.k / pair, of.fp8 ? cache_width(of) : latent_width);
    with.kpe_map = token_map(kpe, of.p / pair, of.fp8 ? cache_width(of) : rope_width);
    with.z = z;
    with.kpe = kpe;
    with.block_table = of.page ? static_cast<const int*>(data("block_table")) : nullptr;
    with.after_lengths = reads_after_lengths(of) ? static_cast<const int*>(data("after_lengths")) : nullptr;
    with.o = data("o");
    with.lse = static_cast<float*>(data("lse"));
    with.o_rows = {Divisor(1), of.k, 0, 0};
    with.lse_rows = {Divisor(1), 1, 0, 0};
    with.query_places = int(rows);
    with.table_width = table_width(of);
    with.requests = of.b;
    with.ahead = blocks_ahead(version, of.b, of.h, of.s);
    with.tokens = unsigned(of.fp8 || of.page == 1 ? pool_pages(of) * of.page : 0);
    with.z_stride = of.fp8 ? of.fp8 : 2 * latent_width;
    with.kpe_stride = 2 * rope_width;
    if (of.fp8) {
      with.page = Divisor(of.page);
      with.page_places = of.page;
      if (of.fp8 == 576) with.cache_scale = static_cast<const float*>(data("cache_scale"));
      if (fp8_queries) with.q_scale = static_cast<const float*>(data("q_scale"));
    }
    with.after = of.after;
    return with;
  }
};

}  // namespace hypermla::cute
