#include "mla/latent/latent_plan.h"

#include <array>
#include <bit>
#include <cstring>
#include <random>

#include "hypermla/base/half.h"
#include "hypermla/plan/fp8_tokens.h"

namespace hypermla {
namespace {

// The first queries of a request, for which a causal mask hides some of its tokens; the others see all of them.
int masked_queries(const LatentProblem& at, int after) { return at.causal ? std::max(at.s - after, 0) : 0; }

}  // namespace

std::vector<int> lengths_of(const LatentProblem& at) {
  return at.ragged ? sample_lengths(at.b, at.t) : std::vector<int>(at.b, at.t);
}

void validate_latent(const LatentProblem& at) {
  validate_attention(at);
  require_power_of_two("k", at.k, 16, 1024);
}

std::vector<TensorSpec> tensors_of(const LatentProblem& at, bool fp8_queries) {
  std::vector<TensorSpec> all;
  auto add = [&](const char* name, Role role, DType dtype, std::vector<std::int64_t> shape) {
    all.push_back({name, role, dtype, std::move(shape)});
  };
  // Of queries and outputs.
  auto add_rows = [&](const char* name, Role role, DType dtype, std::initializer_list<std::int64_t> columns) {
    std::vector<std::int64_t> shape = {at.b, at.h, at.s};
    if (at.tokens_first) std::swap(shape[1], shape[2]);
    shape.insert(shape.end(), columns);
    add(name, role, dtype, std::move(shape));
  };
  const std::int64_t batches = at.page ? pool_pages(at) : at.b, tokens = at.page ? at.page : at.t;
  const int of_pair = fp8_queries ? 2 : 1;
  if (at.fused) {
    add_rows("q", Role::input, at.dtype, {(at.k + at.p) / of_pair});
  } else {
    add_rows("qc", Role::input, at.dtype, {at.k / of_pair});
    add_rows("qpe", Role::input, at.dtype, {at.p / of_pair});
  }
  if (has_one_cache(at)) {
    add("cache", Role::input, at.dtype, {batches, tokens, cache_width(at)});
  } else {
    add("z", Role::input, at.dtype, {batches, tokens, at.k});
    add("kpe", Role::input, at.dtype, {batches, tokens, at.p});
  }
  if (at.fp8 == 576) add("cache_scale", Role::input, DType::float32, {1});
  if (fp8_queries) add("q_scale", Role::input, DType::float32, {1});
  if (at.ragged) all.push_back({"lengths", Role::input, DType::int32, {at.b}, at.t});
  if (reads_after_lengths(at)) all.push_back({"after_lengths", Role::input, DType::int32, {at.b}, at.after});
  if (at.page) add("block_table", Role::input, DType::int32, {at.b, table_width(at)});
  add_rows("o", Role::output, at.dtype, {at.k});
  add_rows("lse", Role::output, DType::float32, {});
  return all;
}

InputRules input_rules_of(const LatentProblem& at, std::uint64_t seed, bool fp8_queries) {
  InputRules rules;
  const std::vector<int> tokens = lengths_of(at);
  const std::int64_t width = cache_width(at);
  auto unread = [&](std::int64_t first_row, std::int64_t rows) {
    if (rows <= 0) return;
    if (has_one_cache(at)) {
      rules.unread["cache"].push_back({first_row * width, rows * width});
    } else {
      rules.unread["z"].push_back({first_row * at.k, rows * at.k});
      rules.unread["kpe"].push_back({first_row * at.p, rows * at.p});
    }
  };
  if (at.fp8) {
    constexpr int kTokens = 1021;  // a prime
    std::mt19937 random{std::mt19937::result_type(seed)};
    std::vector<unsigned char> bytes(std::size_t(kTokens) * at.fp8);
    for (int i = 0; i < kTokens; ++i) draw_fp8_token(random, at.fp8, 1, &bytes[std::size_t(i) * at.fp8]);
    rules.repeated["cache"].assign(bytes.begin(), bytes.end());
    const auto repeat = [&](const char* name, float value) {
      const auto of = std::bit_cast<std::array<char, 4>>(value);
      rules.repeated[name].assign(of.begin(), of.end());
    };
    if (at.fp8 == 576) repeat("cache_scale", 0.004f);
    if (fp8_queries) {
      constexpr float kScale = 0.01f;
      repeat("q_scale", kScale);
      std::normal_distribution<float> normal;
      std::vector<char> queries(std::size_t(kTokens) * 576);
      for (char& one : queries) one = std::bit_cast<char>(e4m3_from_float(normal(random) / kScale));
      for (const char* name : {"q", "qc", "qpe"}) rules.repeated[name] = queries;
    }
  }
  if (at.ragged) rules.integers["lengths"] = tokens;
  if (reads_after_lengths(at)) rules.integers["after_lengths"] = sample_lengths(at.b, at.after);
  if (at.page) {
    std::vector<int> free(pool_pages(at));
    for (int i = 0; i < int(free.size()); ++i) free[i] = i;
    std::shuffle(free.begin(), free.end(), std::mt19937_64(seed));
    // A pool smaller than the batch needs (prefixes that requests share) gives its pages out again.
    std::vector<int>& table = rules.integers["block_table"];
    std::vector<int> used(free.size(), 0);  // slots of a page, from the first on
    std::size_t next = 0;
    for (int r = 0; r < at.b; ++r)
      for (int i = 0; i < table_width(at); ++i) {
        const int left = std::clamp(tokens[r] - i * at.page, 0, at.page);
        table.push_back(left > 0 ? free[next++ % free.size()] : 1 << 30);  // an entry that must not be followed
        if (left > 0) used[table.back()] = std::max(used[table.back()], left);
      }
    for (std::size_t i = 0; i < used.size(); ++i) unread(std::int64_t(i) * at.page + used[i], at.page - used[i]);
  } else {
    for (int r = 0; r < at.b; ++r) unread(std::int64_t{r} * at.t + tokens[r], at.t - tokens[r]);
    rules.growing = {{at.fused ? "cache" : "kpe", at.t, at.fused ? at.k + at.p : at.p}};
  }
  return rules;
}

ReferenceShape reference_shape_of(const LatentProblem& at) {
  const double flops = 2.0 * at.s * at.t * (2 * at.k + at.p);
  if (at.tokens_first) return {at.b, flops * at.h};
  return {std::int64_t{at.b} * at.h, flops};
}

namespace {

// Bytes, two of which were read as a bfloat16.
std::vector<unsigned char> bytes_of(const std::vector<float>& pairs) {
  std::vector<unsigned char> all(2 * pairs.size());
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const auto pair = std::uint16_t(std::bit_cast<std::uint32_t>(pairs[i]) >> 16);
    std::memcpy(&all[2 * i], &pair, 2);
  }
  return all;
}

// What tokens in FP8 stand for.
std::vector<float> numbers_of(const std::vector<unsigned char>& all, int bytes, float cache_scale) {
  std::vector<float> numbers(all.size() / bytes * 576);
  for (std::size_t token = 0; token * bytes < all.size(); ++token)
    read_fp8_token(&all[token * bytes], bytes, cache_scale, &numbers[token * 576]);
  return numbers;
}

ReferenceOutputs head_reference(const LatentProblem& at, std::int64_t group, const InputReader& input,
                                bool fp8_queries) {
  const RowReader rows{input};
  const std::int64_t request = group / at.h;
  const int tokens = at.ragged ? int(input("lengths", request, 1)[0]) : at.t;
  std::vector<float> table;
  if (at.page) table = input("block_table", request * table_width(at), table_width(at));
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
  const auto queries = [&](const char* name, int columns) {
    if (!fp8_queries) return rows(name, group, at.s, columns);
    const float scale = input("q_scale", 0, 1)[0];
    std::vector<float> numbers;
    for (const unsigned char one : bytes_of(rows(name, group, at.s, columns / 2)))
      numbers.push_back(e4m3_to_float(one) * scale);
    return numbers;
  };
  q = at.fused ? queries("q", width) : join_columns(queries("qc", at.k), queries("qpe", at.p), at.k, at.p);
  if (has_one_cache(at)) {
    keys = cache("cache", cache_width(at));
    if (at.fp8) keys = numbers_of(bytes_of(keys), at.fp8, at.fp8 == 576 ? input("cache_scale", 0, 1)[0] : 1);
    for (int i = 0; i < tokens; ++i) z.insert(z.end(), &keys[i * width], &keys[i * width] + at.k);
  } else {
    z = cache("z", at.k);
    keys = join_columns(z, cache("kpe", at.p), at.k, at.p);
  }
  ReferenceOutputs outputs;
  auto attend = [&](int first, int last, bool causal) {  // queries
    const AttentionReference one =
        attention_reference({q.begin() + std::ptrdiff_t(first) * width, q.begin() + std::ptrdiff_t(last) * width}, keys,
                            z, last - first, tokens, width, at.k, score_scale(at), causal);
    outputs["o"].insert(outputs["o"].end(), one.o.begin(), one.o.end());
    outputs["lse"].insert(outputs["lse"].end(), one.lse.begin(), one.lse.end());
    outputs["lse_reach"].insert(outputs["lse_reach"].end(), one.reach.begin(), one.reach.end());
  };
  const int masked =
      masked_queries(at, reads_after_lengths(at) ? int(input("after_lengths", request, 1)[0]) : at.after);
  if (masked > 0) attend(0, masked, true);
  if (masked < at.s) attend(masked, at.s, false);
  for (const char* name : {"lse", "lse_reach"})
    for (double& value : outputs[name]) value *= at.lse_base2 ? kLog2e : 1;
  return outputs;
}

}  // namespace

ReferenceOutputs reference_of(const LatentProblem& at, std::int64_t group, const InputReader& input, bool fp8_queries) {
  if (!at.tokens_first) return head_reference(at, group, input, fp8_queries);
  // One request, whose heads are read as if they came first, and written as they come.
  LatentProblem heads_first = at;
  heads_first.tokens_first = false;
  ReferenceOutputs all = {{"o", std::vector<double>(std::size_t(at.s) * at.h * at.k)},
                          {"lse", std::vector<double>(std::size_t(at.s) * at.h)},
                          {"lse_reach", std::vector<double>(std::size_t(at.s) * at.h)}};
  for (int head = 0; head < at.h; ++head) {
    const InputReader one = [&](const std::string& name, std::int64_t first, std::int64_t count) {
      if (name != "q" && name != "qc" && name != "qpe") return input(name, first, count);
      const std::int64_t width = count / at.s;
      std::vector<float> rows;
      for (int i = 0; i < at.s; ++i) {
        const std::vector<float> row = input(name, ((group * at.s + i) * at.h + head) * width, width);
        rows.insert(rows.end(), row.begin(), row.end());
      }
      return rows;
    };
    const ReferenceOutputs of_head = head_reference(heads_first, group * at.h + head, one, fp8_queries);
    for (int i = 0; i < at.s; ++i) {
      std::copy_n(&of_head.at("o")[std::size_t(i) * at.k], at.k, &all["o"][(std::size_t(i) * at.h + head) * at.k]);
      for (const char* name : {"lse", "lse_reach"}) all[name][std::size_t(i) * at.h + head] = of_head.at(name)[i];
    }
  }
  return all;
}

double mean_tokens_seen(const LatentProblem& at, int tokens) {
  const int masked = masked_queries(at, at.after);
  return ((at.s - masked) * double(tokens) + (masked ? masked * mean_tokens_seen(masked, tokens, true) : 0)) / at.s;
}

Cost latent_cost(const LatentProblem& at, bool fp8_queries) {
  const double width = dtype_bytes(at.dtype), rows = double(at.h) * at.s;
  Cost cost{0,
            at.b * (rows * (width * (2 * at.k + at.p) + 4) + 4.0 * at.ragged + (at.page ? 4.0 * table_width(at) : 0))};
  if (fp8_queries) cost.bytes -= at.b * rows * (at.k + at.p);  // of two bytes each
  for (int tokens : lengths_of(at)) {
    cost.flops += 2 * at.h * at.s * mean_tokens_seen(at, tokens) * (2 * at.k + at.p);
    cost.bytes += (at.fp8 ? 2 : width) * tokens * cache_width(at);
  }
  if (fp8_queries) cost.fp8_flops = cost.flops;
  return cost;
}

Cost latent_executed(const LatentProblem& at, int Bm, int Bn, int Bv) {
  const double k = at.k, p = at.p;
  const Cost cost = latent_cost(at);
  const double padded = padding(at.h * at.s, Bm) * padding(at.t, Bn);
  return {cost.flops * padded * ((k + p) * (k / Bv) + k) / (2 * k + p), cost.bytes};
}

}  // namespace hypermla
