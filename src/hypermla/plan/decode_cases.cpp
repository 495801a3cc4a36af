#include "hypermla/plan/decode_cases.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <numeric>
#include <random>

#include "hypermla/base/half.h"
#include "hypermla/plan/fp8_tokens.h"
#include "hypermla/plan/reference.h"

namespace hypermla {
namespace {

constexpr int kLatent = 512, kRope = 64, kWidth = kLatent + kRope;
constexpr float kQueryScale = 0.01f;    // of queries in FP8
constexpr std::uint16_t kNan = 0xffff;  // in either type of 16 bits

std::string_view format_name(MlaCacheFormat format) {
  constexpr std::string_view kNames[] = {"as_queries", "fp8_656", "fp8_576"};
  return kNames[int(format)];
}

}  // namespace

std::string to_text(const DecodeCase& of) {
  const MlaDecodeOptions& at = of.options;
  std::string text = fmt::format("decode heads={} requests={} max_tokens={} page={} dtype={}", at.heads,
                                 of.lengths.size(), at.max_tokens, at.page, dtype_name(at.dtype));
  const auto add = [&](const char* name, auto value, auto usual) {
    if (value != usual) text += fmt::format(" {}={}", name, value);
  };
  add("max_queries", at.max_queries, 1);
  add("causal", at.causal, !at.sparse);
  add("sparse", at.sparse, false);
  add("cache_format", format_name(at.cache_format), format_name(MlaCacheFormat::as_queries));
  add("fp8_queries", at.fp8_queries, false);
  add("split", at.split, 0);
  add("lse_base2", at.lse_base2, false);
  add("empty_lse_positive", at.empty_lse_positive, false);
  if (at.shards > 1) text += fmt::format(" shards={} shard={} interleave={}", at.shards, at.shard, at.interleave);
  add("shared_prefixes", of.shared, 0);
  add("sinks", of.sinks, false);
  return text + (of.growing ? ", growing scores" : "");
}

std::vector<DecodeCase> decode_cases(const std::string& kernel, const KernelPlan& plan) {
  using enum MlaCacheFormat;
  const std::vector<int> lengths = {1000, 999, 0, 1, 64, 130, 300, 1000, 65, 0};
  const std::vector<int> drafts = {1, 2, 3, 1, 4, 0, 2, 3, 4, 0}, few = {1, 2, 2, 1, 2, 0, 2, 1, 2, 0};
  const std::vector<int> one = {1, 1, 1, 1, 1, 0, 1, 1, 1, 0};
  std::vector<int> many, sharing;
  for (int r = 0; r < 150; ++r) many.push_back(110 + r);
  for (int r = 0; r < 120; ++r) sharing.push_back(r % 40 == 39 ? 300 : 707 + r);
  const DecodeCase dense[] = {
      {{.heads = 16}, lengths, {}},
      {{.heads = 3, .max_queries = 4, .page = 16}, lengths, drafts, true},
      {{.heads = 128, .max_queries = 2}, lengths, few, false, true},
      {{.heads = 64,
        .max_queries = 3,
        .page = 32,
        .causal = false,
        .scale = 0.05f,
        .split = 128,
        .lse_base2 = true,
        .empty_lse_positive = true},
       lengths,
       few,
       true},
      {{.heads = 20, .max_queries = 4, .page = 1}, lengths, drafts, true, true},
      {{.heads = 16, .max_queries = 4, .page = 16, .shards = 3, .shard = 1, .interleave = 16}, lengths, drafts},
      {{.heads = 16, .page = 128}, {9000}, {}, true, true},
      {{.heads = 7}, many, {}},
      {{.heads = 16, .max_queries = 4, .dtype = DType::float16}, lengths, drafts, true},
      {{.heads = 8, .shared_prefixes = true}, sharing, {}, false, false, 640},
  };
  // Many tokens, where a kernel may do otherwise than with few; too many for a CPU.
  const std::vector<int> long_ones = {8000, 7999, 0, 1, 512, 1040, 2400, 8000, 520, 0};
  const DecodeCase many_tokens[] = {
      {{.heads = 64, .max_queries = 4, .page = 16, .shards = 2, .shard = 1, .interleave = 16}, long_ones, drafts},
      {{.heads = 96, .max_queries = 2, .dtype = DType::float16}, long_ones, few, true, true},
      {{.heads = 32, .max_queries = 4}, long_ones, drafts, true},
  };
  // Numbers of rows for which queries in FP8 have tiles of their own.
  const DecodeCase few_rows[] = {
      {{.heads = 8, .max_queries = 4}, lengths, drafts, true, true},
      {{.heads = 12, .max_queries = 4, .page = 32}, lengths, drafts},
  };
  const DecodeCase sparse[] = {
      {{.heads = 16, .page = 16}, lengths, {}},
      {{.heads = 3, .page = 16, .empty_lse_positive = true}, lengths, one, true},
      {{.heads = 128}, lengths, {}, true, true},
      {{.heads = 64, .scale = 0.05f, .split = 128, .lse_base2 = true}, lengths, one},
      {{.heads = 128}, {2048, 2048}, {}},
      {{.heads = 16, .page = 1, .dtype = DType::float16}, lengths, one, true},
  };
  struct Form {
    MlaCacheFormat format;
    bool sparse, fp8_queries;
  };
  constexpr Form kForms[] = {{as_queries, false, false}, {as_queries, true, false}, {fp8_656, false, false},
                             {fp8_656, true, false},     {fp8_576, false, false},   {fp8_576, true, false},
                             {fp8_576, false, true}};
  std::vector<DecodeCase> cases;
  for (const Form& form : kForms) {
    std::vector<DecodeCase> of_form(std::begin(dense), std::end(dense));
    if (form.sparse) of_form.assign(std::begin(sparse), std::end(sparse));
    if (form.format == as_queries && !form.sparse && plan.target.is_gpu())
      of_form.insert(of_form.end(), std::begin(many_tokens), std::end(many_tokens));
    if (form.fp8_queries && plan.target.is_gpu())
      of_form.insert(of_form.end(), std::begin(few_rows), std::end(few_rows));
    for (DecodeCase& of : of_form) {
      MlaDecodeOptions& at = of.options;
      if (form.format != as_queries && (at.dtype == DType::float16 || at.shared_prefixes)) continue;
      at.sparse = form.sparse;
      at.cache_format = form.format;
      at.fp8_queries = form.fp8_queries;
      at.max_tokens = *std::max_element(of.lengths.begin(), of.lengths.end());
      at.max_requests = int(of.lengths.size()) + 1;
      if (!of.queries.empty()) at.max_query_tokens = std::accumulate(of.queries.begin(), of.queries.end(), 0);
      at.kernel = kernel;
      settle(at);
      if (plan.decode(at)) cases.push_back(std::move(of));
    }
  }
  return cases;
}

// The log-sum-exp of tokens of 656 bytes: their factors may be rounded to 11 bits, and so may a number times its
// factor, to 2^-11 each. A factor's error is that of 128 products at once: it is that share of their sum, which for
// random numbers is up to four times 1/22 of the reach, so 2^-13.5 in all. (Simulated, 7680 rows of growing scores: at
// most 2^-14.3.) One factor for all numbers loses nothing. Of queries in FP8 a tensor core cuts the sums of products to
// 13 bits (DeepSeek-V3, arXiv 2412.19437, section 3.3.2), in 18 steps. A log-sum-exp follows its row's largest scores,
// which of 1000 tokens are 3 to 5 times what random signs leave of the reach, 1/22. (Simulated, the largest score of
// each of 64000 rows: cut by up to 1.34 times 2^-13 of the reach.) So 2^-13 is allowed, and of queries in FP8 2^-12.
// The weights of these are e4m3, each off by up to 2^-4 of itself, and so may be the norm of the output. That is for
// products of e4m3; a kernel that widens such queries is nearer, as tests/hopper asks of it. Where scores grow, the few
// tokens that count have weights that are off by as much as their scores: outputs of tokens of 656 bytes by twice the
// usual. (Simulated, 6400 rows: at most 1.1 times.)
Tolerance decode_tolerance(const MlaDecodeOptions& at, DType output) {
  Tolerance allowed = tolerance(output, at.dtype);
  const bool of_lse = output == DType::float32;
  if (at.fp8_queries) {
    allowed.elementwise = of_lse ? 0x1p-12 : 0x1p-2;
    if (!of_lse) allowed.norm = 0x1p-4;
  } else if (at.cache_format == MlaCacheFormat::fp8_656) {
    allowed.elementwise = of_lse ? 0x1p-13 : 2 * allowed.elementwise;
  }
  return allowed;
}

DecodeStep::DecodeStep(DecodeCase of, const std::shared_ptr<Device>& device, std::uint64_t seed)
    : of_(std::move(of)), device_(device), fp8_(fp8_bytes(of_.options.cache_format)) {
  for (int r = 0; r < requests(); ++r)
    starts_.push_back(starts_.back() + (of_.queries.empty() ? of_.options.max_queries : of_.queries[r]));
  std::mt19937 random{std::mt19937::result_type(seed)};
  choose_slots(random);
  fill_cache(random);
  fill_queries(random);
  const auto copy = [&](const auto& values) {
    Buffer buffer(device_, values.size() * sizeof values[0] + 16);  // of no values, too
    device_->copy_to_device(buffer.data(), values.data(), values.size() * sizeof values[0]);
    return buffer;
  };
  lengths_ = copy(of_.lengths);
  query_starts_ = copy(starts_);
  table_ = copy(host_table_);
  cache_ = copy(host_cache_);
  q_ = copy(host_q_);
  sinks_ = copy(host_sinks_);
  factors_ = copy(std::vector<float>{cache_scale(), kQueryScale});
  const std::size_t rows = std::size_t(queries() + 1) * of_.options.heads;
  o_ = Buffer(device_, rows * kLatent * 2);
  lse_ = Buffer(device_, rows * 4);
  host_cache_ = {};
  poison();
}

// Pages in any order. A list has slots twice, some that are none, and blocks of 64 without any.
void DecodeStep::choose_slots(std::mt19937& random) {
  const MlaDecodeOptions& at = of_.options;
  slots_.resize(requests());
  if (at.sparse) {
    pages_ = at.max_tokens / at.page + 3;
    width_ = at.max_tokens + 1;
    const int slots = pages_ * at.page;
    host_table_.assign(std::size_t(requests()) * width_, 0);  // behind the end: a slot that is NaN
    for (int r = 0; r < requests(); ++r)
      for (int i = 0; i < of_.lengths[r]; ++i) {
        int& slot = host_table_[std::size_t(r) * width_ + i];
        slot = 1 + int(random() % unsigned(slots - 1));
        if ((r % 2 && i / 64 == 1) || random() % 7 == 0) slot = random() % 2 ? -1 : slots + int(random() % 9);
        if (slot >= 0 && slot < slots) slots_[r].push_back(slot);
      }
    return;
  }
  width_ = (at.max_tokens + at.page - 1) / at.page + 1;
  host_table_.assign(std::size_t(requests()) * width_, 1 << 30);  // behind the end: no page
  const auto pages_of = [&](int tokens) { return (tokens + at.page - 1) / at.page; };
  std::vector<int> here(requests());
  for (int r = 0; r < requests(); ++r) {
    for (int token = 0; token < of_.lengths[r]; ++token) here[r] += this->here(token);
    pages_ += pages_of(here[r]);
  }
  pages_ = std::max(pages_, 1);
  std::vector<int> free(pages_);
  std::iota(free.begin(), free.end(), 0);
  std::shuffle(free.begin(), free.end(), random);
  int owner = -1;  // of the shared pages
  for (int r = 0; r < requests(); ++r) {
    int* const row = &host_table_[std::size_t(r) * width_];
    const bool shares = of_.shared && of_.lengths[r] > of_.shared;
    if (shares && owner < 0) owner = r;
    for (int i = 0; i < here[r]; ++i) {
      if (i % at.page == 0) {
        const bool another = shares && owner != r && i < of_.shared;
        row[i / at.page] = another ? host_table_[std::size_t(owner) * width_ + i / at.page] : free.back();
        if (!another) free.pop_back();
      }
      slots_[r].push_back(row[i / at.page] * at.page + i % at.page);
    }
  }
}

void DecodeStep::fill_cache(std::mt19937& random) {
  const MlaDecodeOptions& at = of_.options;
  std::normal_distribution<float> normal;
  const std::size_t bytes_of_token = fp8_ ? fp8_ : 2 * kWidth;
  // As AllocatedTensors has it, from 1 to 16. In FP8 scores are less exact the larger they are, and so are outputs.
  const float most = fp8_ ? 4 : 16;
  std::vector<float> grown(std::size_t(pages_) * at.page, 0.0f);  // of a slot that some request has
  for (const std::vector<int>& slots : slots_)
    for (std::size_t i = 0; i < slots.size(); ++i)
      if (float& of = grown[slots[i]]; of == 0) of = of_.growing ? 1 + (most - 1) * float(i) / float(slots.size()) : 1;
  tokens_.assign(grown.size() * kWidth, 0.0f);
  host_cache_.assign(std::size_t(pages_) * between() * at.page * bytes_of_token, 0xff);  // NaN in every type
  for (std::size_t slot = 0; slot < grown.size(); ++slot) {
    if (grown[slot] == 0) continue;
    float* const token = &tokens_[slot * kWidth];
    const std::size_t place = slot + slot / at.page * (between() - 1) * at.page;
    unsigned char* const bytes = &host_cache_[place * bytes_of_token];
    if (fp8_) {
      // With one factor for all, numbers grow to what they may be.
      draw_fp8_token(random, fp8_, of_.growing && fp8_ == 576 ? grown[slot] / most : grown[slot], bytes);
      read_fp8_token(bytes, fp8_, cache_scale(), token);
      continue;
    }
    for (int c = 0; c < kWidth; ++c) {
      const std::uint16_t bits = from_float(normal(random) * grown[slot], at.dtype);
      token[c] = to_float(bits, at.dtype);
      std::memcpy(bytes + 2 * c, &bits, 2);
    }
  }
}

void DecodeStep::fill_queries(std::mt19937& random) {
  const MlaDecodeOptions& at = of_.options;
  std::normal_distribution<float> normal;
  // In FP8 two numbers are one of these, and the row behind the last is half as long.
  const std::size_t row = std::size_t(at.heads) * kWidth, numbers = queries() * row;
  host_q_.assign(numbers + row, kNan);
  auto* const bytes = reinterpret_cast<unsigned char*>(host_q_.data());
  for (std::size_t i = 0; i < numbers; ++i)
    if (at.fp8_queries)
      bytes[i] = e4m3_from_float(normal(random) / kQueryScale);
    else
      host_q_[i] = from_float(normal(random), at.dtype);
  if (at.fp8_queries) std::fill(bytes + numbers, bytes + 2 * host_q_.size(), 0xff);
  for (int h = 0; of_.sinks && h < at.heads; ++h)
    host_sinks_.push_back(h == 0 ? std::numeric_limits<float>::infinity() : 3 * normal(random));
}

bool DecodeStep::here(int token) const {
  const MlaDecodeOptions& at = of_.options;
  return token / at.interleave % at.shards == at.shard;
}
float DecodeStep::cache_scale() const { return of_.growing ? 0.016f : 0.004f; }
int DecodeStep::between() const { return of_.options.sparse ? 1 : 2; }

const int* DecodeStep::lengths() const {
  const bool whole =
      std::all_of(of_.lengths.begin(), of_.lengths.end(), [&](int length) { return length == of_.options.max_tokens; });
  return of_.options.sparse && whole ? nullptr : static_cast<const int*>(lengths_.data());
}
const int* DecodeStep::query_starts() const {
  return of_.queries.empty() ? nullptr : static_cast<const int*>(query_starts_.data());
}

MlaDecodeTensors DecodeStep::tensors() const {
  const MlaDecodeOptions& at = of_.options;
  MlaDecodeTensors all =
      MlaDecodeTensors::fused(at.heads, at.page, q_.data(), queries() + 1, cache_.data(), pages_, block_table(), width_,
                              o_.data(), static_cast<float*>(lse_.data()), at.cache_format, at.fp8_queries);
  all.latent_page_stride *= between();
  all.rope_page_stride *= between();
  const auto* const factors = static_cast<const float*>(factors_.data());
  if (at.cache_format == MlaCacheFormat::fp8_576) all.cache_scale = factors;
  if (at.fp8_queries) all.q_scale = factors + 1;
  if (of_.sinks) all.sinks = static_cast<const float*>(sinks_.data());
  return all;
}

void DecodeStep::poison() {
  device_->fill(o_.data(), 0xff, o_.bytes());
  device_->fill(lse_.data(), 0xff, lse_.bytes());
}

ReferenceOutputs DecodeStep::reference(std::int64_t query) const {
  const MlaDecodeOptions& at = of_.options;
  // The last request that begins here is the one that has it: those before it have no queries.
  const int request = int(std::upper_bound(starts_.begin(), starts_.end(), int(query)) - starts_.begin()) - 1;
  int seen = int(slots_[request].size());
  const int length = of_.lengths[request];
  if (at.causal)
    for (int t = std::max(0, length - (starts_[request + 1] - int(query)) + 1); t < length; ++t) seen -= here(t);
  std::vector<float> q, keys, values;
  for (std::size_t i = 0; i < std::size_t(at.heads) * kWidth; ++i) {
    const std::size_t place = std::size_t(query) * at.heads * kWidth + i;
    q.push_back(at.fp8_queries
                    ? e4m3_to_float(reinterpret_cast<const unsigned char*>(host_q_.data())[place]) * kQueryScale
                    : to_float(host_q_[place], at.dtype));
  }
  for (int i = 0; i < seen; ++i) {
    const float* const token = &tokens_[std::size_t(slots_[request][i]) * kWidth];
    keys.insert(keys.end(), token, token + kWidth);
    values.insert(values.end(), token, token + kLatent);
  }
  AttentionReference made = attention_reference(q, keys, values, at.heads, seen, kWidth, kLatent, at.scale, false);
  for (int h = 0; h < at.heads; ++h) {
    double& lse = made.lse[h];
    if (of_.sinks && seen)
      for (int c = 0; c < kLatent; ++c) made.o[std::size_t(h) * kLatent + c] /= 1 + std::exp(host_sinks_[h] - lse);
    if (!seen && at.empty_lse_positive) lse = -lse;
    if (at.lse_base2) lse *= std::numbers::log2e, made.reach[h] *= std::numbers::log2e;
  }
  return {{"o", std::move(made.o)}, {"lse", std::move(made.lse)}, {"lse_reach", std::move(made.reach)}};
}

CheckResult DecodeStep::compare(std::uint64_t seed, double budget_flops) const {
  const MlaDecodeOptions& at = of_.options;
  std::vector<std::uint16_t> o(o_.bytes() / 2);
  std::vector<float> lse(lse_.bytes() / 4);
  device_->copy_to_host(o.data(), o_.data(), o_.bytes());
  device_->copy_to_host(lse.data(), lse_.data(), lse_.bytes());
  // Kernels add a sink's weight in fp32. Where it is 2^126 times that of all tokens, the row may be zeros; numbers of
  // tokens are below 2^7.
  Tolerance allowed = decode_tolerance(at, at.dtype);
  if (of_.sinks) allowed.rounding = std::max(allowed.rounding, 0x1p-119);
  double tokens = 0;
  for (int r = 0; r < requests(); ++r) tokens += double(slots_[r].size()) * (starts_[r + 1] - starts_[r]);
  const ComparedOutput outputs[] = {{"o",
                                     at.dtype,
                                     {queries(), at.heads, kLatent},
                                     allowed,
                                     [&](std::int64_t first, std::int64_t count) {
                                       std::vector<float> values;
                                       for (std::int64_t i = first; i < first + count; ++i)
                                         values.push_back(to_float(o[i], at.dtype));
                                       return values;
                                     }},
                                    {"lse",
                                     DType::float32,
                                     {queries(), at.heads},
                                     decode_tolerance(at, DType::float32),
                                     [&](std::int64_t first, std::int64_t count) {
                                       return std::vector<float>(lse.begin() + first, lse.begin() + first + count);
                                     }}};
  CheckResult result = compare_outputs(
      {queries(), 2.0 * tokens / queries() * at.heads * (kWidth + kLatent)}, {std::begin(outputs), std::end(outputs)},
      [&](std::int64_t query) { return reference(query); }, seed, budget_flops);
  for (OutputError& error : result.outputs) {
    const ComparedOutput& output = outputs[error.output == "lse"];
    const std::int64_t behind = output.elements(), row = behind / queries();
    const std::vector<float> rest = output.read(behind, row);
    const auto written = std::find_if(rest.begin(), rest.end(), [](float value) { return !std::isnan(value); });
    if (written == rest.end()) continue;
    error.passed = result.passed = false;
    error.worst = HUGE_VAL;
    error.worst_position = {queries(), (written - rest.begin()) / (row / at.heads)};
    error.got = *written;
    error.expected = std::nan("");  // nobody's
  }
  return result;
}

CheckResult DecodeStep::check(DecodeKernels& kernels, std::uint64_t seed, double budget_flops) {
  poison();
  const bool shares = of_.options.shared_prefixes;
  kernels.plan(lengths(), query_starts(), requests(), shares ? block_table() : nullptr, shares ? width_ : 0,
               device_->stream());
  for (int layer = 0; layer < 2; ++layer) kernels.run(tensors(), device_->stream());
  device_->synchronize();
  CheckResult result = compare(seed, budget_flops);
  if (const int status = kernels.status()) {
    OutputError& error = result.outputs.emplace_back();
    error.output = "status";  // of lengths and queries within the capacity
    error.worst = HUGE_VAL;
    error.got = status;
    result.passed = false;
  }
  return result;
}

}  // namespace hypermla
