#include "cute/decompressed/prefill_plan.h"

#include <limits>
#include <numbers>

#include "hypermla/plan/status.h"
#include "hypermla/plan/typed_plan.h"

namespace hypermla::cute {

static_assert(int(cute::kWrongTokenStarts) == int(hypermla::kWrongTokenStarts) &&
              int(cute::kWrongQueryStarts) == int(hypermla::kWrongQueryStarts));

std::string PrefillPlan::explain() const {
  return fmt::format(
      "the schedule of cute.mla.flash_attention, tiles of {} queries and blocks of {} tokens, on {} multiprocessors, "
      "{}, with a workspace of {:.3f} MB",
      kRows, kBlock, processors_,
      options_.batch_invariant ? "each over all tokens" : "whose tokens are cut where there are few of them",
      workspace_bytes() / 1e6);
}

// The list, counters of parts, rows of queries, and parts.
std::size_t PrefillPlan::arrived_at() const {
  return sizeof(PrefillList) + std::size_t(options_.max_requests) * sizeof(PrefillItem);
}
std::size_t PrefillPlan::rows_at() const { return arrived_at() + slots() * sizeof(*PrefillParts{}.arrived); }
std::size_t PrefillPlan::parts_at() const {
  const std::size_t rows = options_.query_rows ? options_.max_query_tokens * sizeof(int) : 0;
  return (rows_at() + rows + 255) / 256 * 256;
}
std::size_t PrefillPlan::workspace_bytes() const {
  return parts_at() + slots() * kRows * (kPartColumns + 1) * sizeof(float);
}

std::vector<KernelSource> PrefillPlan::sources() const {
  const auto source = [](const std::string& name, const auto& options, int arguments) {
    return KernelSource{
        name,
        "cute/decompressed/" + name + ".cuh",
        "hypermla::cute::" + name + "<" + type_name(typeid(options)) + fields_initializer(options) + ">",
        {arguments}};
  };
  return {source("plan_prefill", PlanPrefillTiling{}, sizeof(PlanPrefillArguments)),
          source("prefill", PrefillProblem{options_.dtype, options_.causal, options_.query_rows},
                 sizeof(PrefillArguments))};
}

void PrefillPlan::prepare(Compiler& compiler, Device& device, void* workspace) {
  device_ = device.shared_from_this();
  std::vector<std::unique_ptr<Function>> functions =
      load_all(compiler, device, sources(),
               {{unsigned(PlanPrefillTiling{}.threads), 0, 1, true}, {kTileThreads, kTileSharedBytes, 1, true}});
  planner_ = std::move(functions[0]);
  attention_ = std::move(functions[1]);
  device.fill(workspace, 0, sizeof(PrefillList));  // without a plan there are no tiles
  const MlaPrefillOptions& at = options_;
  int* const rows = reinterpret_cast<int*>(static_cast<char*>(workspace) + rows_at());
  plan_ = {.planned_rows = rows,
           .list = static_cast<PrefillList*>(workspace),
           .arrived = reinterpret_cast<unsigned long long*>(static_cast<char*>(workspace) + arrived_at()),
           .heads = at.heads,
           .all_queries = at.max_query_tokens,
           .max_tokens = at.max_tokens,
           .causal = at.causal,
           .processors = processors_,
           .slots = int(slots())};
  float* const lse = reinterpret_cast<float*>(static_cast<char*>(workspace) + parts_at());
  with_ = {.list = plan_.list,
           .parts = {.o = lse + slots() * kRows, .lse = lse, .arrived = plan_.arrived},
           .scale_log2 = at.scale * std::numbers::log2e_v<float>,
           .lse_unit = at.lse_base2 ? 1.0f : std::numbers::ln2_v<float>,
           .empty_lse = (at.empty_lse_positive ? 1 : -1) * std::numeric_limits<float>::infinity(),
           .heads = at.heads,
           .query_rows = rows};
}

void PrefillPlan::plan(const PrefillStep& step, StreamHandle stream) {
  plan_.query_starts = step.query_starts;
  plan_.token_starts = step.token_starts;
  plan_.query_rows = step.query_rows;
  plan_.requests = step.requests;
  void* arguments[] = {&plan_};
  planner_->launch({1, 1, 1}, arguments, stream);
}

void PrefillPlan::set(const MlaPrefillTensors& with) {
  using Rows = MlaPrefillTensors::Rows;
  static_assert(kRows == kBlock, "one box for queries and for tokens");
  const int heads = options_.heads;
  // Without tokens nothing is loaded, but a map needs memory: that of the queries.
  const bool any = with.tokens > 0;
  const int tokens = any ? with.tokens : with.query_tokens;
  const Rows &k_nope = any ? with.k_nope : with.q_nope, &k_rope = any ? with.k_rope : with.q_rope,
             &v = any ? with.v : with.q_nope;
  const auto box_map = [&](const Rows& of, int rows, int columns, int of_heads, int box_rows, int box_groups) {
    const std::int64_t head_stride = of_heads > 1 ? of.head_stride : columns;  // of one head it may be anything
    return maps_.of(
        {options_.dtype,
         of.data,
         {{{rows, 2 * of.token_stride, box_rows}, {columns / 64, 128, box_groups}, {of_heads, 2 * head_stride, 1}}}});
  };
  const auto map = [&](const Rows& of, int rows, int columns, int of_heads) {
    return box_map(of, rows, columns, of_heads, kRows, columns / 64);
  };
  with_.rope_heads = k_rope.head_stride == 0 ? 1 : heads;
  with_.q_map = map(with.q_nope, with.query_tokens, 128, heads);
  with_.qpe_map = map(with.q_rope, with.query_tokens, 64, heads);
  if (options_.query_rows) {
    with_.q_row_map = box_map(with.q_nope, with.query_tokens, 128, heads, 1, 1);
    with_.qpe_row_map = box_map(with.q_rope, with.query_tokens, 64, heads, 1, 1);
  }
  with_.k_map = map(k_nope, tokens, 128, heads);
  with_.kpe_map = map(k_rope, tokens, 64, with_.rope_heads);
  with_.v_map = map(v, tokens, 128, heads);
  with_.o = with.o;
  with_.lse = with.lse;
  with_.o_token_stride = with.o_token_stride;
  with_.o_head_stride = with.o_head_stride;
  with_.lse_token_stride = with.lse_token_stride;
  with_.lse_head_stride = with.lse_head_stride;
  with_.query_tokens = with.query_tokens;
}

void PrefillPlan::run(const MlaPrefillTensors& with, StreamHandle stream) {
  if (with != last_) {
    require_tensors(options_, with);
    last_ = {};  // nothing is the same again if this throws
    set(with);
    last_ = with;
  }
  void* arguments[] = {&with_};
  attention_->launch({unsigned(processors_), 1, 1}, arguments, stream);
}

int PrefillPlan::status() const { return read_status(*device_, &plan_.list->status); }

}  // namespace hypermla::cute
