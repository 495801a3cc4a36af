#include "hypermla/plan/prefill.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "hypermla/base/error.h"
#include "hypermla/device/pool.h"
#include "hypermla/plan/inputs.h"
#include "hypermla/plan/memory_rows.h"
#include "hypermla/plan/typed_plan.h"

namespace hypermla {

void settle(MlaPrefillOptions& at) {
  auto within = [](const char* name, int value, int most) {
    if (value < 1 || value > most) fail("{}={} is not supported: it must be from 1 to {}", name, value, most);
  };
  within("heads", at.heads, MlaPrefill::kMaxHeads);
  within("max_requests", at.max_requests, MlaPrefill::kMaxRequests);
  within("max_query_tokens", at.max_query_tokens, MlaPrefill::kMaxQueryTokens);
  within("max_tokens", at.max_tokens, MlaPrefill::kMaxTokens);
  require_half_precision(at.dtype, "dtype");
  if (!is_scale(at.scale))
    fail("scale={} is not supported: it must be from 2^-60 to 2^60, or 0 for 1 / sqrt(128 + 64)", at.scale);
  if (at.scale == 0) at.scale = softmax_scale(128, 64);
}

void require_tensors(const MlaPrefillOptions& at, const MlaPrefillTensors& with) {
  if (with.query_tokens < 0 || with.tokens < 0)
    fail("query_tokens={} and tokens={} are not supported: they must not be negative", with.query_tokens, with.tokens);
  const auto require = [&](const char* name, const void* data, std::int64_t token_stride, std::int64_t head_stride,
                           bool shared_heads) {
    require_address(name, data);
    const auto stride = [&](const char* axis, std::int64_t value, bool or_zero) {
      if (value % 8 || value < 0 || (value == 0 && !or_zero))
        fail("{}.{}={} is not supported: it must be a positive multiple of 8 elements", name, axis, value);
    };
    stride("token_stride", token_stride, false);
    if (at.heads > 1) stride("head_stride", head_stride, shared_heads);
  };
  const std::pair<const char*, const MlaPrefillTensors::Rows*> inputs[] = {{"q_nope", &with.q_nope},
                                                                           {"q_rope", &with.q_rope},
                                                                           {"k_nope", &with.k_nope},
                                                                           {"k_rope", &with.k_rope},
                                                                           {"v", &with.v}};
  for (const auto& [name, rows] : inputs)
    if (with.tokens > 0 || rows == &with.q_nope || rows == &with.q_rope)
      require(name, rows->data, rows->token_stride, rows->head_stride, rows == &with.k_rope);
  require("o", with.o, with.o_token_stride, with.o_head_stride, false);
  if (!with.lse) fail("lse is missing: give its address");
  require_aligned("lse", with.lse, 4);
  for (const auto& [name, rows] : inputs)
    if (with.o == rows->data && (with.tokens > 0 || name[0] == 'q'))
      fail("o must have memory of its own: blocks read queries, keys and values after others have written");
    else if (with.lse == rows->data && (with.tokens > 0 || name[0] == 'q'))
      fail("lse must have memory of its own: blocks read queries, keys and values after others have written");
  require_rows_apart("o", with.query_tokens, with.o_token_stride, at.heads, with.o_head_stride, 128);
  require_rows_apart("lse", with.query_tokens, with.lse_token_stride, at.heads, with.lse_head_stride, 1);
  const int queries = std::min(with.query_tokens, at.max_query_tokens);
  if (queries > 0 &&
      overlap(memory_rows(with.o, 2, queries, with.o_token_stride, at.heads, with.o_head_stride, 128),
              memory_rows(with.lse, 4, queries, with.lse_token_stride, at.heads, with.lse_head_stride, 1)))
    fail("lse overlaps o: give it memory of its own");
}

MlaPrefillTensors MlaPrefillTensors::dense(int heads, const void* q, int query_tokens, const void* k, const void* v,
                                           int tokens, void* o, float* lse) {
  const auto rows = [&](const void* data, int width, int column) {
    return Rows{static_cast<const char*>(data) + 2 * column, std::int64_t{heads} * width, width};
  };
  return {.q_nope = rows(q, 192, 0),
          .q_rope = rows(q, 192, 128),
          .query_tokens = query_tokens,
          .k_nope = rows(k, 192, 0),
          .k_rope = rows(k, 192, 128),
          .v = rows(v, 128, 0),
          .tokens = tokens,
          .o = o,
          .o_token_stride = std::int64_t{heads} * 128,
          .o_head_stride = 128,
          .lse = lse,
          .lse_token_stride = heads,
          .lse_head_stride = 1};
}

namespace {

class PrefillReference : public PrefillKernels {
 public:
  explicit PrefillReference(const MlaPrefillOptions& options) : options_(options) {}

  std::string explain() const override { return "a plain reference in fp32: this device is a CPU"; }
  std::size_t workspace_bytes() const override { return 256; }
  std::vector<KernelSource> sources() const override { return {}; }
  void prepare(Compiler&, Device& device, void*) override { threads_ = device.info().processors; }
  int status() const override { return 0; }

  void plan(const PrefillStep& step, StreamHandle) override {
    const auto& [query_starts, token_starts, query_rows, requests] = step;
    for (int r = 0; r < requests; ++r) {
      const auto require = [&](const char* name, const int* starts, std::int64_t most) {
        if (starts[r] < 0 || starts[r + 1] < starts[r])
          fail("{}[{}] and the one after it are {} and {}; they must not be negative, nor fall", name, r, starts[r],
               starts[r + 1]);
        if (starts[r + 1] - starts[r] > most)
          fail("{}[{}] and the one after it give {} tokens; a request has at most {}", name, r,
               starts[r + 1] - starts[r], most);
      };
      require("query_starts", query_starts, options_.max_query_tokens);
      require("token_starts", token_starts, options_.max_tokens);
    }
    if (requests > 0 && query_starts[requests] > options_.max_query_tokens)
      fail("query_starts ends with {}; a step has at most max_query_tokens={}", query_starts[requests],
           options_.max_query_tokens);
    const int queries = requests > 0 ? query_starts[requests] : 0;
    for (int i = requests > 0 ? query_starts[0] : 0; query_rows && i < queries; ++i)
      if (query_rows[i] < 0 || query_rows[i] >= options_.max_query_tokens)
        fail("query_rows[{}] is {}; it must be from 0 to max_query_tokens={} less one", i, query_rows[i],
             options_.max_query_tokens);
    query_starts_.assign(1, 0);
    token_starts_.assign(1, 0);
    rows_.resize(queries);
    for (int i = 0; i < queries; ++i) rows_[i] = query_rows ? query_rows[i] : i;
    if (requests == 0) return;
    query_starts_.assign(query_starts, query_starts + requests + 1);
    token_starts_.assign(token_starts, token_starts + requests + 1);
  }

  void run(const MlaPrefillTensors& with, StreamHandle) override {
    require_tensors(options_, with);
    int queries = 0;
    for (int i = query_starts_.front(); i < query_starts_.back(); ++i) queries = std::max(queries, rows_[i] + 1);
    if (with.query_tokens < queries || with.tokens < token_starts_.back())
      fail("the plan has {} queries and {} tokens, but the tensors have {} and {}; give tensors with a row for each",
           queries, token_starts_.back(), with.query_tokens, with.tokens);
    if (query_starts_.front() == query_starts_.back()) return;  // padding only: nothing to wake threads for
    const std::uint64_t requests = query_starts_.size() - 1;
    const std::string error = pool_.run(requests * options_.heads, threads_, [&](std::uint64_t i) {
      attend(with, int(i / options_.heads), int(i % options_.heads));
      return nullptr;
    });
    if (!error.empty()) fail("{}", error);
  }

 private:
  static constexpr int kColumns = 128, kRope = 64, kWidth = kColumns + kRope;

  using Rows = MlaPrefillTensors::Rows;
  void read(float* to, const Rows& from, std::int64_t token, int head, int columns) const {
    const auto* row =
        static_cast<const std::uint16_t*>(from.data) + token * from.token_stride + head * from.head_stride;
    for (int c = 0; c < columns; ++c) to[c] = from_half_bits(row[c], options_.dtype);
  }
  // One head of one request.
  void attend(const MlaPrefillTensors& with, int request, int head) const {
    const int first = query_starts_[request], queries = query_starts_[request + 1] - first;
    const int first_token = token_starts_[request], tokens = token_starts_[request + 1] - first_token;
    if (queries == 0) return;
    std::vector<float> keys(std::size_t(tokens) * kWidth), values(std::size_t(tokens) * kColumns), scores(tokens);
    for (int t = 0; t < tokens; ++t) {
      read(&keys[std::size_t(t) * kWidth], with.k_nope, first_token + t, head, kColumns);
      read(&keys[std::size_t(t) * kWidth + kColumns], with.k_rope, first_token + t, head, kRope);
      read(&values[std::size_t(t) * kColumns], with.v, first_token + t, head, kColumns);
    }
    for (int i = 0; i < queries; ++i) {
      const std::int64_t query = rows_[first + i];
      const int seen = options_.causal ? std::max(0, tokens - queries + i + 1) : tokens;
      float q[kWidth], o[kColumns] = {};
      read(q, with.q_nope, query, head, kColumns);
      read(q + kColumns, with.q_rope, query, head, kRope);
      float most = -std::numeric_limits<float>::infinity(), sum = 0;
      for (int t = 0; t < seen; ++t) {
        float score = 0;
        for (int c = 0; c < kWidth; ++c) score += q[c] * keys[std::size_t(t) * kWidth + c];
        most = std::max(most, scores[t] = score * options_.scale);
      }
      for (int t = 0; t < seen; ++t) {
        const float weight = std::exp(scores[t] - most);
        sum += weight;
        for (int c = 0; c < kColumns; ++c) o[c] += weight * values[std::size_t(t) * kColumns + c];
      }
      auto* to = static_cast<std::uint16_t*>(with.o) + query * with.o_token_stride + head * with.o_head_stride;
      for (int c = 0; c < kColumns; ++c) to[c] = to_half_bits(seen ? o[c] / sum : 0.0f, options_.dtype);
      const float empty = (options_.empty_lse_positive ? 1 : -1) * std::numeric_limits<float>::infinity();
      with.lse[query * with.lse_token_stride + head * with.lse_head_stride] =
          seen ? (most + std::log(sum)) * (options_.lse_base2 ? kLog2e : 1.0f) : empty;
    }
  }

  MlaPrefillOptions options_;
  Pool pool_;
  int threads_ = 1;
  std::vector<int> query_starts_, token_starts_, rows_;  // rows_: of the tensors, of each query
};

}  // namespace

std::unique_ptr<PrefillKernels> make_prefill_reference(const MlaPrefillOptions& options) {
  return std::make_unique<PrefillReference>(options);
}

}  // namespace hypermla
