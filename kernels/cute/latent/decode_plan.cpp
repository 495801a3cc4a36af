#include "cute/latent/decode_plan.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numbers>

#include "hypermla/base/error.h"
#include "hypermla/plan/executable.h"
#include "hypermla/plan/status.h"

namespace hypermla::cute {
namespace {

constexpr std::int64_t kLatent = 512, kRope = 64;

static_assert(int(cute::kWrongTokens) == int(hypermla::kWrongTokens) &&
              int(cute::kWrongQueries) == int(hypermla::kWrongQueries));

std::int64_t divided_up(std::int64_t value, std::int64_t divisor) { return (value + divisor - 1) / divisor; }

}  // namespace

PlanRequestsArguments planner_arguments(const LatentVersion& version, const WorkLists& lists,
                                        const RequestLimits& limits) {
  if (lists.workers > kMaxWorkers)
    fail("{} multiprocessors are not supported: work is planned for at most {}", lists.workers, kMaxWorkers);
  if (!std::has_single_bit(unsigned(version.rows)) && std::int64_t{limits.heads} * limits.queries > version.rows)
    fail("tiles of {} rows are not supported for {} heads and {} queries: one has to hold them all", version.rows,
         limits.heads, limits.queries);
  return {.items = lists.items,
          .merges = lists.merges,
          .status = lists.status,
          .heads = limits.heads,
          .tile_rows = int(std::bit_ceil(unsigned(version.rows))),  // which a tile of others holds whole
          .workers = lists.workers,
          .rounds = lists.rounds,
          .queries = limits.queries,
          .max_tokens = limits.max_tokens,
          .all_queries = limits.all_queries,
          .overhead = version.costs.overhead(),
          .merge_cost = float(version.costs.combine),
          .part_cost = float(version.costs.partial),
          .traffic = version.traffic,
          .joins = version.joins};
}

int blocks_ahead(const LatentVersion& version, int requests, int heads, int queries) {
  return requests * divided_up(std::int64_t{heads} * queries, version.rows) <= version.ahead_tiles ? version.ahead : 0;
}

LatentArguments attention_arguments(const WorkLists& lists, int heads, float scale, bool lse_base2,
                                    bool empty_lse_positive) {
  return {.work = lists.items,
          .merges = lists.merges,
          .o_part = lists.o_part,
          .lse_part = lists.lse_part,
          .scale_log2 = scale * std::numbers::log2e_v<float>,
          .lse_unit = lse_base2 ? 1.0f : std::numbers::ln2_v<float>,
          .empty_lse = (empty_lse_positive ? 1 : -1) * std::numeric_limits<float>::infinity(),
          .query_inner = {},
          .heads = heads,
          .rounds = lists.rounds,
          .planned = lists.status != nullptr};
}

static_assert(std::int64_t{MlaDecode::kMaxShards} * MlaDecode::kMaxInterleave * MlaDecode::kMaxTokens <= std::int64_t{1}
                                                                                                             << 32,
              "a Divisor divides numbers below 2^32 / by");

int most_tokens_here(const MlaDecodeOptions& at) { return Shards(at.shards, 0, at.interleave).count(at.max_tokens); }

LatentDecode::LatentDecode(const MlaDecodeOptions& options, LatentDecodeSpec spec)
    : options_(options), spec_(std::move(spec)) {
  const MlaDecodeOptions& at = options_;
  const std::int64_t row_tiles = divided_up(std::int64_t{at.heads} * at.max_queries, spec_.version.rows);
  const std::int64_t tiles =
      std::min(at.max_requests * row_tiles,
               divided_up(std::int64_t{at.heads} * at.max_query_tokens, spec_.version.rows) + at.max_requests);
  const int most_tokens = most_tokens_here(at);
  const std::int64_t blocks = divided_up(most_tokens, kTokenBlock);
  const int split = int(at.split / kTokenBlock), overhead = spec_.version.costs.overhead();
  if (row_tiles > 65535 || tiles * (blocks + overhead) > 1 << 30)
    fail(
        "max_requests={} with heads={}, max_queries={} and max_tokens={} is not supported: these are more blocks of "
        "work than the planner counts; make several MlaDecode of fewer requests",
        at.max_requests, at.heads, at.max_queries, at.max_tokens);
  if (at.max_query_tokens > MlaDecode::most_query_tokens(at.heads))
    fail(
        "max_query_tokens={} with heads={} is not supported: tokens * heads * heads must be less than 2^32; make "
        "several MlaDecode of fewer requests",
        at.max_query_tokens, at.heads);
  if (split && divided_up(blocks, split) > kMaxParts)
    fail("split={} is not supported: {} tokens make {} parts, and at most {} are merged; choose a larger split",
         at.split, most_tokens, divided_up(blocks, split), kMaxParts);
  sizes_ = request_list_sizes(spec_.workers, at.max_requests, row_tiles, tiles, blocks, split, overhead,
                              spec_.version.costs.combine, spec_.version.costs.partial);
  std::size_t end = 0;
  auto take = [&](std::size_t bytes) {
    const std::size_t begin = end;
    end += (bytes + 255) / 256 * 256;
    return begin;
  };
  take(sizeof(int));
  items_at_ = take(std::size_t(sizes_.rounds) * spec_.workers * sizeof(WorkItem));
  merges_at_ = take(std::size_t(sizes_.slots) * sizeof(MergeState));
  lse_part_at_ = take(std::size_t(sizes_.slots) * spec_.version.rows * part_row_floats(spec_.version.rows) * 4);
  o_part_at_ = take(std::size_t(sizes_.slots) * spec_.version.rows * kLatent * 2);
  workspace_bytes_ = end;
}

std::string LatentDecode::explain() const {
  return fmt::format(
      "{}, {}: up to {} rows (heads x queries) of a request in tiles of {}, on {} multiprocessors, with a "
      "workspace of {:.1f} MB{}",
      "cute.mla." + spec_.version.name, options_.kernel.empty() ? "the fastest for this capacity" : "as pinned",
      options_.heads * options_.max_queries, spec_.version.rows, spec_.workers, workspace_bytes_ / 1e6,
      explain_shards(options_));
}

void LatentDecode::prepare(Compiler& compiler, Device& device, void* workspace) {
  device_ = device.shared_from_this();
  const auto attention = compiler.compile_ahead(spec_.attention, device.info().arch);
  const CacheEntry planner = compiler.compile(spec_.planner, device.info().arch);
  planner_ = load(device, planner, {unsigned(PlanRequestsTiling{}.threads), 0, 1, true});
  attention_ = load(device, attention.get(), spec_.version.shape);

  char* const base = static_cast<char*>(workspace);
  device.fill(base, 0, o_part_at_);  // without a plan there is no work
  const MlaDecodeOptions& at = options_;
  const WorkLists lists = {.items = reinterpret_cast<WorkItem*>(base + items_at_),
                           .merges = reinterpret_cast<MergeState*>(base + merges_at_),
                           .status = reinterpret_cast<int*>(base),
                           .o_part = base + o_part_at_,
                           .lse_part = reinterpret_cast<float*>(base + lse_part_at_),
                           .workers = spec_.workers,
                           .rounds = int(sizes_.rounds)};
  plan_ = planner_arguments(
      spec_.version, lists,
      {.heads = at.heads, .queries = at.max_queries, .max_tokens = at.max_tokens, .all_queries = at.max_query_tokens});
  with_ = attention_arguments(lists, at.heads, at.scale, at.lse_base2, at.empty_lse_positive);
  with_.shards = plan_.shards = Shards(at.shards, at.shard, at.interleave);
}

void LatentDecode::plan(const int* lengths, const int* query_starts, int requests, const int*, std::int64_t,
                        StreamHandle stream) {
  plan_.lengths = lengths;
  plan_.query_starts = query_starts;
  plan_.requests = requests;
  with_.requests = requests;  // the tables of the layers have as many rows
  with_.ahead = blocks_ahead(spec_.version, requests, options_.heads, options_.max_queries);
  void* arguments[] = {&plan_};
  planner_->launch({kPlanRequestsBlocks, 1, 1}, arguments, stream);
}

// Rows that follow each other at one distance are one axis; else heads and queries are two, of which a tile is a box.
void LatentDecode::set_queries(const MlaDecodeTensors& with) {
  const int heads = options_.heads, rows = spec_.version.rows;
  const auto is_one_axis = [&](const MlaDecodeTensors::Rows& q) { return q.token_stride == heads * q.head_stride; };
  const bool one_axis = is_one_axis(with.q_latent) && is_one_axis(with.q_rope);
  if (!one_axis && heads % rows != 0 && rows % heads != 0)
    fail(
        "q of {} heads with a token stride of {} and a head stride of {} is not supported: make it contiguous, with a "
        "token stride of heads times the head stride",
        heads, with.q_latent.token_stride, with.q_latent.head_stride);
  const int inner = one_axis ? 1 : heads;
  const std::int64_t places = std::int64_t{with.query_tokens} * heads / inner;
  const auto map = [&](MlaDecodeTensors::Rows q, int columns, int groups) {
    if (options_.fp8_queries) {  // pairs of bytes
      q = {q.data, q.token_stride / 2, q.head_stride / 2};
      columns /= 2;
    }
    const RowAxes axes = {inner, q.head_stride, places, one_axis ? q.head_stride : q.token_stride};
    return maps_.of(rows_source(options_.dtype, q.data, columns, axes, rows, groups));
  };
  with_.qc_map = map(with.q_latent, kLatent, spec_.version.query_groups);
  with_.qpe_map = map(with.q_rope, kRope, 1);
  with_.query_inner = Divisor(inner);
  with_.query_places = int(places);
}

void LatentDecode::set_cache(const MlaDecodeTensors& with) {
  // Where tokens are gathered no map is used; one has to be there.
  const bool fp8 = fp8_bytes(options_.cache_format), gathered = options_.sparse || (fp8 && spec_.version.gathers_fp8);
  const CacheShape shape =
      gathered ? CacheShape{1, with.pages * options_.page, 1} : CacheShape{options_.page, with.pages, options_.page};
  const void* const rope_data = fp8 ? with.cache_latent : with.cache_rope;
  const auto map = [&](const void* data, std::int64_t columns, std::int64_t token_stride, std::int64_t page_stride) {
    if (gathered) page_stride = token_stride = fp8 ? with.latent_token_stride / 2 : token_stride;
    return maps_.of(tokens_source(options_.dtype, data, int(columns), shape, token_stride, page_stride));
  };
  if (fp8 && !gathered) {  // pairs of bytes, of lines that are loaded as they lie
    const std::int64_t token = with.latent_token_stride / 2, page = with.latent_page_stride / 2;
    with_.z_map = map(with.cache_latent, kLatent / 2, token, page);
    with_.kpe_map = map(static_cast<const char*>(with.cache_latent) + kLatent, kRope / 2, token, page);
    return;
  }
  with_.z_map = map(with.cache_latent, kLatent, with.latent_token_stride, with.latent_page_stride);
  with_.kpe_map = map(rope_data, kRope, with.rope_token_stride, with.rope_page_stride);
  with_.z = with.cache_latent;
  with_.kpe = with.cache_rope;
}

void LatentDecode::run(const MlaDecodeTensors& with, StreamHandle stream) {
  if (with != last_) {
    require_tensors(options_, with);
    const bool same_queries = with.q_latent == last_.q_latent && with.q_rope == last_.q_rope &&
                              with.query_tokens == last_.query_tokens;  // of other layers, in the same memory
    last_ = {};  // nothing is the same again if one of these throws
    if (!same_queries) set_queries(with);
    set_cache(with);
    const auto in_int = [](const char* name, std::int64_t value) {
      if (value > std::numeric_limits<int>::max()) fail("{}={} is not supported: it must fit 31 bits", name, value);
      return int(value);
    };
    with_.table_width = in_int("table_stride", with.table_stride);
    if (fp8_bytes(options_.cache_format)) {
      const std::int64_t between = with.latent_page_stride / with.latent_token_stride;  // places of a page to the next
      with_.tokens = unsigned(in_int("pages * latent_page_stride / latent_token_stride", with.pages * between));
      with_.z_stride = in_int("latent_token_stride", with.latent_token_stride);
      with_.page = Divisor(options_.sparse ? 1 : options_.page);
      with_.page_places = options_.sparse ? 1 : int(between);
    } else if (options_.page == 1 || options_.sparse) {
      with_.tokens = unsigned(in_int("pages * page", with.pages * options_.page));
      with_.z_stride = in_int("2 bytes * latent_page_stride / page", 2 * with.latent_page_stride / options_.page);
      with_.kpe_stride = in_int("2 bytes * rope_page_stride / page", 2 * with.rope_page_stride / options_.page);
      with_.page = Divisor(1);
    }
    with_.cache_scale = with.cache_scale;
    with_.q_scale = with.q_scale;
    with_.sinks = with.sinks;
    with_.block_table = with.block_table;
    with_.o = with.o;
    with_.lse = with.lse;
    const int heads = options_.heads;
    with_.o_rows = {Divisor(heads), with.o_token_stride, with.o_head_stride, 0};
    with_.lse_rows = {Divisor(heads), with.lse_token_stride, with.lse_head_stride, with.lse_request_stride};
    last_ = with;
  }
  void* arguments[] = {&with_};
  attention_->launch({unsigned(spec_.workers), 1, 1}, arguments, stream);
}

int LatentDecode::status() const { return read_status(*device_, plan_.status); }

}  // namespace hypermla::cute
