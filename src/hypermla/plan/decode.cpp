#include "hypermla/plan/decode.h"

#include <cmath>
#include <limits>
#include <vector>

#include "hypermla/base/error.h"
#include "hypermla/base/half.h"
#include "hypermla/device/pool.h"
#include "hypermla/plan/fp8_tokens.h"
#include "hypermla/plan/typed_plan.h"

namespace hypermla {

namespace {

// A request of a planner has less than 65536 row tiles of 64 rows; that of a prefix may have all queries.
constexpr std::int64_t kMaxSharingRows = 65535 * 64;

}  // namespace

double usual_seconds(const DecodeKernels& kernels, const DeviceSpec& device, const MlaDecodeOptions& options) {
  constexpr int kStep = 4, kShort = 512;
  double logarithms = 0;
  int count = 0, tokens = options.max_tokens;
  do {
    logarithms += std::log(kernels.seconds(device, tokens));
    ++count;
    tokens /= kStep;
  } while (!options.sparse && tokens >= kShort);
  return std::exp(logarithms / count);
}

void settle(MlaDecodeOptions& at) {
  auto within = [](const char* name, std::int64_t value, std::int64_t most) {
    if (value < 1 || value > most) fail("{}={} is not supported: it must be from 1 to {}", name, value, most);
  };
  within("heads", at.heads, MlaDecode::kMaxHeads);
  within("max_requests", at.max_requests, MlaDecode::kMaxRequests);
  within("max_queries", at.max_queries, MlaDecode::kMaxQueries);
  within("max_tokens", at.max_tokens, MlaDecode::kMaxTokens);
  const std::int64_t all = std::int64_t{at.max_requests} * at.max_queries;
  if (at.max_query_tokens == 0) at.max_query_tokens = int(all);
  within("max_query_tokens", at.max_query_tokens, all);
  if (at.page != 1 && at.page != 16 && at.page != 32 && at.page != 64 && at.page != 128)
    fail("page={} is not supported: choose 1, 16, 32, 64 or 128", at.page);
  require_half_precision(at.dtype, "dtype");
  require_cache_format(at.cache_format);
  if (!is_scale(at.scale))
    fail("scale={} is not supported: it must be from 2^-60 to 2^60, or 0 for 1 / sqrt(128 + 64)", at.scale);
  if (at.scale == 0) at.scale = softmax_scale(128, 64);
  if (at.sparse && at.max_queries != 1)
    fail(
        "max_queries={} is not supported with sparse: every query has a list of its own, so make it 1 and max_requests "
        "the queries of a step",
        at.max_queries);
  if (at.sparse) at.causal = false;
  if (fp8_bytes(at.cache_format) && at.dtype != DType::bfloat16)
    fail("a cache in FP8 is supported for bfloat16 queries only; make dtype bfloat16");
  if (at.fp8_queries && (at.cache_format != MlaCacheFormat::fp8_576 || at.sparse))
    fail("queries in FP8 are supported for caches in fp8_576 that are not sparse; leave fp8_queries out");
  if (at.split < 0 || at.split % 64) fail("split={} is not supported: it must be a multiple of 64", at.split);
  within("shards", at.shards, MlaDecode::kMaxShards);
  within("interleave", at.interleave, MlaDecode::kMaxInterleave);
  if (at.shard < 0 || at.shard >= at.shards)
    fail("shard={} is not supported with shards={}: it must be from 0 to shards - 1", at.shard, at.shards);
  if (at.interleave > 1 && at.shards == 1)
    fail("interleave={} has no meaning with shards=1: leave it out, or say how many shards there are", at.interleave);
  if (at.shards > 1 && at.sparse)
    fail(
        "shards={} is not supported with sparse: a list of chosen tokens names tokens of this cache alone; "
        "leave shards out",
        at.shards);
  if (at.shared_prefixes && (at.sparse || fp8_bytes(at.cache_format) || at.split || at.shards > 1))
    fail("shared_prefixes is not supported with {}; leave one of them out",
         at.sparse       ? "sparse: every query has a list of its own"
         : at.shards > 1 ? "shards"
         : at.split      ? "split: what is shared depends on the batch, and so do the bits of an output"
                         : "a cache in FP8");
  if (at.shared_prefixes && std::int64_t{at.heads} * at.max_query_tokens > kMaxSharingRows)
    fail(
        "max_query_tokens={} with heads={} is not supported with shared_prefixes: heads * max_query_tokens may be at "
        "most {}; make several MlaDecode of fewer requests, or leave shared_prefixes out",
        at.max_query_tokens, at.heads, kMaxSharingRows);
}

std::string explain_shards(const MlaDecodeOptions& at) {
  return at.shards == 1 ? ""
                        : fmt::format(", for shard {} of {}, which take turns of {} token{}", at.shard, at.shards,
                                      at.interleave, at.interleave > 1 ? "s" : "");
}

void require_tensors(const MlaDecodeOptions& at, const MlaDecodeTensors& with) {
  const int fp8 = fp8_bytes(at.cache_format);
  if (at.shards > 1 && with.sinks)
    fail("sinks are not supported with shards: a sink counts once and not in every shard; apply it after the merge");
  if (at.shared_prefixes && with.sinks)
    fail(
        "sinks are not supported with shared_prefixes: a sink counts once and not in every part; leave one of them "
        "out");
  if (with.query_tokens < 1 || with.pages < 1)  // first: of none there may be no memory
    fail("{}={} is not supported: there must be at least one", with.pages < 1 ? "pages" : "query_tokens",
         with.pages < 1 ? with.pages : with.query_tokens);
  const std::pair<const char*, const void*> pointers[] = {{"q_latent", with.q_latent.data},
                                                          {"q_rope", with.q_rope.data},
                                                          {"cache_latent", with.cache_latent},
                                                          {"cache_rope", fp8 ? with.cache_latent : with.cache_rope},
                                                          {"o", with.o}};
  for (const auto& [name, data] : pointers) require_address(name, data);
  if (!with.block_table || !with.lse) fail("{} is missing: give its address", with.lse ? "block_table" : "lse");
  // Counts may say more than there is, so that where inputs end is not known here.
  for (const void* input : {with.q_latent.data, with.q_rope.data, with.cache_latent, with.cache_rope,
                            static_cast<const void*>(with.block_table), static_cast<const void*>(with.sinks),
                            static_cast<const void*>(with.cache_scale), static_cast<const void*>(with.q_scale)})
    for (const auto& [name, output] : {std::pair<const char*, const void*>("o", with.o), {"lse", with.lse}})
      if (output == input)
        fail("{} must have memory of its own: blocks read their inputs after others have written", name);
  const std::pair<const char*, const void*> words[] = {{"block_table", with.block_table},
                                                       {"lse", with.lse},
                                                       {"sinks", with.sinks},
                                                       {"cache_scale", with.cache_scale},
                                                       {"q_scale", with.q_scale}};
  for (const auto& [name, data] : words) require_aligned(name, data, 4);
  const std::pair<const char*, std::int64_t> strides[] = {{"q_latent.token_stride", with.q_latent.token_stride},
                                                          {"q_latent.head_stride", with.q_latent.head_stride},
                                                          {"q_rope.token_stride", with.q_rope.token_stride},
                                                          {"q_rope.head_stride", with.q_rope.head_stride},
                                                          {"latent_page_stride", with.latent_page_stride},
                                                          {"latent_token_stride", with.latent_token_stride},
                                                          {"rope_page_stride", fp8 ? 8 : with.rope_page_stride},
                                                          {"rope_token_stride", fp8 ? 8 : with.rope_token_stride},
                                                          {"o_token_stride", with.o_token_stride},
                                                          {"o_head_stride", with.o_head_stride}};
  for (const auto& [name, stride] : strides) {
    const int multiple = at.fp8_queries && name[0] == 'q' ? 16 : 8;  // 16 bytes
    if (stride <= 0 || stride % multiple)
      fail("{}={} is not supported: it must be a positive multiple of {} elements", name, stride, multiple);
  }
  if (with.table_stride < 1) fail("table_stride={} is not supported: it must be positive", with.table_stride);
  require_rows_apart("o", with.query_tokens, with.o_token_stride, at.heads, with.o_head_stride, 512);
  // By requests it has as many queries as the longest of the step, which may be fewer than the most; how many requests
  // there are is not known here.
  if (with.lse_request_stride == 0) {
    require_rows_apart("lse", with.query_tokens, with.lse_token_stride, at.heads, with.lse_head_stride, 1);
    const int queries = std::min(with.query_tokens, at.max_query_tokens);
    if (overlap(memory_rows(with.o, 2, queries, with.o_token_stride, at.heads, with.o_head_stride, 512),
                memory_rows(with.lse, 4, queries, with.lse_token_stride, at.heads, with.lse_head_stride, 1)))
      fail("lse overlaps o: give it memory of its own");
  } else if (with.lse_request_stride < 0 || (at.max_queries > 1 && with.lse_token_stride <= 0) ||
             (at.heads > 1 && with.lse_head_stride <= 0))
    fail(
        "lse with strides of {}, {} and {} from request to request, query to query and head to head is not supported: "
        "they must be positive",
        with.lse_request_stride, with.lse_token_stride, with.lse_head_stride);
  else if (!rows_apart(
               {nullptr, std::min(at.max_requests, 2), with.lse_request_stride, at.heads, with.lse_head_stride, 1}))
    fail("lse with strides of {} from request to request and {} from head to head is not supported: rows would overlap",
         with.lse_request_stride, with.lse_head_stride);
  if (fp8 && (with.latent_token_stride % 16 || with.latent_token_stride < fp8))
    fail("latent_token_stride={} is not supported: tokens of {} bytes are a multiple of 16 bytes apart",
         with.latent_token_stride, fp8);
  if (fp8 && (with.latent_page_stride % with.latent_token_stride ||
              with.latent_page_stride < at.page * with.latent_token_stride))
    fail("latent_page_stride={} is not supported: pages of {} tokens of FP8 are a multiple of {} bytes apart",
         with.latent_page_stride, at.page, with.latent_token_stride);
  require_cache_scale(at.cache_format, with.cache_scale);
  if (at.fp8_queries && !with.q_scale) fail("q_scale is missing: give the address of the factor of the queries");
  if (!at.fp8_queries && with.q_scale) fail("q_scale has no meaning but for queries in FP8; leave it out");
  const bool follow = with.latent_page_stride == at.page * with.latent_token_stride &&
                      (fp8 || with.rope_page_stride == at.page * with.rope_token_stride);
  if (at.sparse && !follow)
    fail(
        "latent_page_stride={} is not supported for sparse attention: pages must follow each other, {} tokens of {} "
        "elements apart",
        with.latent_page_stride, at.page, with.latent_token_stride);
}

std::vector<int> fixed_splits() {
  std::vector<int> splits;
  for (int split = 512; split <= MlaDecode::kMaxTokens; split *= 2) splits.push_back(split);
  return splits;
}

int fixed_split(MlaDecodeOptions options, std::size_t bytes,
                const std::function<std::size_t(const MlaDecodeOptions&)>& workspace_bytes) {
  for (const int split : fixed_splits()) {
    options.split = split;
    if (split >= options.max_tokens) break;
    try {
      if (workspace_bytes(options) <= bytes) break;
    } catch (const Error&) {
      continue;  // more parts than kernels merge
    }
  }
  return options.split;
}

MlaDecodeTensors MlaDecodeTensors::fused(int heads, int page, const void* q, int query_tokens, const void* cache,
                                         std::int64_t pages, const int* block_table, std::int64_t table_stride, void* o,
                                         float* lse, MlaCacheFormat cache_format, bool fp8_queries) {
  const auto behind = [](const void* data, int bytes = 2) { return static_cast<const char*>(data) + bytes * 512; };
  MlaDecodeTensors tensors = {.q_latent = {q, std::int64_t{heads} * 576, 576},
                              .q_rope = {behind(q, fp8_queries ? 1 : 2), std::int64_t{heads} * 576, 576},
                              .query_tokens = query_tokens,
                              .cache_latent = cache,
                              .cache_rope = behind(cache),
                              .latent_page_stride = std::int64_t{page} * 576,
                              .latent_token_stride = 576,
                              .rope_page_stride = std::int64_t{page} * 576,
                              .rope_token_stride = 576,
                              .pages = pages,
                              .block_table = block_table,
                              .table_stride = table_stride,
                              .o = o,
                              .o_token_stride = std::int64_t{heads} * 512,
                              .o_head_stride = 512,
                              .lse = lse,
                              .lse_token_stride = heads,
                              .lse_head_stride = 1};
  if (const int bytes = fp8_bytes(cache_format)) {
    tensors.cache_rope = nullptr;
    tensors.latent_token_stride = bytes;
    tensors.latent_page_stride = std::int64_t{page} * bytes;
    tensors.rope_page_stride = tensors.rope_token_stride = 0;
  }
  return tensors;
}

namespace {

class DecodeReference : public DecodeKernels {
 public:
  explicit DecodeReference(const MlaDecodeOptions& options) : options_(options) {}

  double seconds(const DeviceSpec&, int) const override { return 0; }
  std::string explain() const override {
    return "a plain reference in fp32: this device is a CPU" + explain_shards(options_);
  }
  std::size_t workspace_bytes() const override { return 256; }
  std::vector<KernelSource> sources() const override { return {}; }
  void prepare(Compiler&, Device& device, void*) override { threads_ = device.info().processors; }
  int status() const override { return 0; }

  void plan(const int* lengths, const int* query_starts, int requests, const int*, std::int64_t,
            StreamHandle) override {
    std::vector<int> starts(1, 0);
    for (int r = 0; r < requests; ++r)
      starts.push_back(query_starts ? query_starts[r + 1] : starts.back() + options_.max_queries);
    if (query_starts && query_starts[0] != 0) fail("query_starts[0] is {}; it must be 0", query_starts[0]);
    const std::vector<int> whole(lengths ? 0 : requests, options_.max_tokens);
    if (!lengths) lengths = whole.data();
    for (int r = 0; r < requests; ++r) {
      const int queries = starts[r + 1] - starts[r];
      if (lengths[r] < 0 || lengths[r] > options_.max_tokens)
        fail("lengths[{}] is {}; it must be from 0 to max_tokens={}", r, lengths[r], options_.max_tokens);
      if (queries < 0 || queries > options_.max_queries)
        fail("query_starts[{}] and the one after it give {} queries; a request has 0 to max_queries={}", r, queries,
             options_.max_queries);
    }
    if (starts.back() > options_.max_query_tokens)
      fail("query_starts ends with {}; a step has at most max_query_tokens={}", starts.back(),
           options_.max_query_tokens);
    lengths_.assign(lengths, lengths + requests);
    starts_ = std::move(starts);
  }

  void run(const MlaDecodeTensors& with, StreamHandle) override {
    require_tensors(options_, with);
    require_table(with);
    for (int r = 0; r < int(lengths_.size()); ++r) {
      if (starts_[r + 1] == starts_[r]) continue;
      const std::vector<float> tokens = options_.sparse ? read_chosen(with, r) : read_tokens(with, r);
      const std::string error =
          pool_.run(std::uint64_t(starts_[r + 1] - starts_[r]) * options_.heads, threads_, [&](std::uint64_t i) {
            attend(with, r, int(i / options_.heads), int(i % options_.heads), tokens);
            return nullptr;
          });
      if (!error.empty()) fail("{}", error);
    }
  }

 private:
  static constexpr int kLatent = 512, kRope = 64, kWidth = kLatent + kRope;

  const std::uint16_t* at(const void* data, std::int64_t offset) const {
    return static_cast<const std::uint16_t*>(data) + offset;
  }
  // Appends the numbers that a token stands for.
  void read_token(const MlaDecodeTensors& with, std::int64_t page, std::int64_t slot,
                  std::vector<float>& tokens) const {
    const std::size_t first = tokens.size();
    tokens.resize(first + kWidth);
    float* const to = tokens.data() + first;
    const std::int64_t place = page * with.latent_page_stride + slot * with.latent_token_stride;
    if (const int bytes = fp8_bytes(options_.cache_format)) {
      read_fp8_token(static_cast<const unsigned char*>(with.cache_latent) + place, bytes,
                     with.cache_scale ? *with.cache_scale : 1, to);
      return;
    }
    const auto* z = at(with.cache_latent, place);
    const auto* rope = at(with.cache_rope, page * with.rope_page_stride + slot * with.rope_token_stride);
    for (int c = 0; c < kWidth; ++c) to[c] = to_float(c < kLatent ? z[c] : rope[c - kLatent], options_.dtype);
  }
  // Whether a token of a request is in this cache.
  bool here(int token) const { return token / options_.interleave % options_.shards == options_.shard; }
  // The tokens of a query's list that there are.
  std::vector<float> read_chosen(const MlaDecodeTensors& with, int query) const {
    std::vector<float> tokens;
    for (int i = 0; i < lengths_[query]; ++i) {
      const int slot = with.block_table[query * with.table_stride + i];
      if (slot >= 0 && slot < with.pages * options_.page)
        read_token(with, slot / options_.page, slot % options_.page, tokens);
    }
    return tokens;
  }
  // Calls what(place, page) for each token of a request that is in this cache.
  template <class What>
  void each_token(const MlaDecodeTensors& with, int request, const What& what) const {
    int place = 0;
    for (int t = 0; t < lengths_[request]; ++t) {
      if (!here(t)) continue;
      what(place, with.block_table[request * with.table_stride + place / options_.page]);
      ++place;
    }
  }
  // Every page that a request needs is there, which is known before anything is written. Lists of chosen tokens may
  // have any entries.
  void require_table(const MlaDecodeTensors& with) const {
    for (int r = 0; r < int(lengths_.size()) && !options_.sparse; ++r) {
      if (starts_[r + 1] == starts_[r]) continue;
      each_token(with, r, [&](int place, int page) {
        if (page < 0 || page >= with.pages)
          fail("block_table[{}][{}] is {}; the cache has {} pages", r, place / options_.page, page, with.pages);
      });
    }
  }
  std::vector<float> read_tokens(const MlaDecodeTensors& with, int request) const {
    std::vector<float> tokens;
    each_token(with, request, [&](int place, int page) { read_token(with, page, place % options_.page, tokens); });
    return tokens;
  }
  void attend(const MlaDecodeTensors& with, int request, int query, int head, const std::vector<float>& tokens) const {
    const std::int64_t token = starts_[request] + query;
    const int queries = starts_[request + 1] - starts_[request];
    int seen = int(tokens.size() / kWidth);
    if (options_.causal)  // without those behind the query
      for (int t = std::max(0, lengths_[request] - queries + query + 1); t < lengths_[request]; ++t) seen -= here(t);
    std::vector<float> q(kWidth), scores(seen), o(kLatent, 0.0f);
    const auto read_query = [&](const MlaDecodeTensors::Rows& from, int first, int columns) {
      const std::int64_t place = token * from.token_stride + head * from.head_stride;
      for (int c = 0; c < columns; ++c)
        q[first + c] = options_.fp8_queries
                           ? e4m3_to_float(static_cast<const unsigned char*>(from.data)[place + c]) * *with.q_scale
                           : to_float(at(from.data, place)[c], options_.dtype);
    };
    read_query(with.q_latent, 0, kLatent);
    read_query(with.q_rope, kLatent, kRope);
    float most = -std::numeric_limits<float>::infinity(), sum = 0;
    for (int t = 0; t < seen; ++t) {
      double score = 0;
      for (int c = 0; c < kWidth; ++c) score += double(q[c]) * tokens[std::size_t(t) * kWidth + c];
      most = std::max(most, scores[t] = float(score * options_.scale));
    }
    for (int t = 0; t < seen; ++t) {
      const float weight = std::exp(scores[t] - most);
      sum += weight;
      for (int c = 0; c < kLatent; ++c) o[c] += weight * tokens[std::size_t(t) * kWidth + c];
    }
    auto* to = static_cast<std::uint16_t*>(with.o) + token * with.o_token_stride + head * with.o_head_stride;
    const float sink = with.sinks ? std::exp(with.sinks[head] - most) : 0.0f;
    for (int c = 0; c < kLatent; ++c) to[c] = from_float(seen ? o[c] / (sum + sink) : 0.0f, options_.dtype);
    const float empty =
        options_.empty_lse_positive ? std::numeric_limits<float>::infinity() : -std::numeric_limits<float>::infinity();
    const float lse = seen ? (most + std::log(sum)) * (options_.lse_base2 ? kLog2e : 1.0f) : empty;
    const std::int64_t row = with.lse_request_stride ? request * with.lse_request_stride + query * with.lse_token_stride
                                                     : token * with.lse_token_stride;
    with.lse[row + head * with.lse_head_stride] = lse;
  }

  MlaDecodeOptions options_;
  Pool pool_;
  int threads_ = 1;
  std::vector<int> lengths_, starts_;
};

}  // namespace

std::unique_ptr<DecodeKernels> make_decode_reference(const MlaDecodeOptions& options) {
  return std::make_unique<DecodeReference>(options);
}

}  // namespace hypermla
