#include "mla/decompressed/decompressed_plan.h"

#include <random>

namespace hypermla {
namespace {

std::vector<int> sample_prefixes(const DecompressedProblem& at) {
  std::vector<int> prefix(at.b);
  std::mt19937 random(2);
  for (int& one : prefix) one = int(random() % unsigned(at.prefixes));
  return prefix;
}

std::vector<int> lengths_of(const DecompressedProblem& at) {
  return at.ragged ? sample_lengths(token_stores(at), at.t) : std::vector<int>(token_stores(at), at.t);
}

}  // namespace

std::vector<TensorSpec> tensors_of(const DecompressedProblem& at) {
  const auto& [b, s, t, h, d, p, dtype, causal, ragged, prefixes, after, parts] = at;
  const int stores = token_stores(at);
  std::vector<TensorSpec> all = {
      {"q", Role::input, dtype, {b, h, s, d}},         {"qpe", Role::input, dtype, {b, h, s, p}},
      {"k", Role::input, dtype, {stores, h, t, d}},    {"v", Role::input, dtype, {stores, h, t, d}},
      {"kpe", Role::input, dtype, {stores, t, p}},     {"o", Role::output, dtype, {b, h, s, d}},
      {"lse", Role::output, DType::float32, {b, h, s}}};
  for (TensorSpec& spec : all)
    if (parts > 1 && spec.role == Role::output) spec.shape.insert(spec.shape.begin(), parts);
  if (ragged) all.push_back({"lengths", Role::input, DType::int32, {stores}, t});
  if (prefixes) all.push_back({"prefix", Role::input, DType::int32, {b}, prefixes - 1});
  if (reads_after_lengths(at)) all.push_back({"after_lengths", Role::input, DType::int32, {b}, after});
  return all;
}

InputRules input_rules_of(const DecompressedProblem& at, std::uint64_t) {
  InputRules rules;
  rules.growing = {{"kpe", at.t, at.p}};
  if (at.prefixes) rules.integers["prefix"] = sample_prefixes(at);
  if (reads_after_lengths(at)) rules.integers["after_lengths"] = sample_lengths(at.b, at.after);
  if (!at.ragged) return rules;
  const std::vector<int> tokens = rules.integers["lengths"] = lengths_of(at);
  auto unread = [&](const char* name, std::int64_t head, int used, int width) {
    if (used < at.t) rules.unread[name].push_back({(head * at.t + used) * width, std::int64_t{at.t - used} * width});
  };
  for (int r = 0; r < token_stores(at); ++r) {
    unread("kpe", r, tokens[r], at.p);
    for (int head = r * at.h; head < (r + 1) * at.h; ++head) {
      unread("k", head, tokens[r], at.d);
      unread("v", head, tokens[r], at.d);
    }
  }
  return rules;
}

ReferenceShape reference_shape_of(const DecompressedProblem& at) {
  return {std::int64_t{at.b} * at.h * at.parts, 2.0 * at.s * at.t * (2 * at.d + at.p) / at.parts};
}

ReferenceOutputs reference_of(const DecompressedProblem& at, std::int64_t group, const InputReader& input) {
  const RowReader rows{input};
  const int heads = at.b * at.h, part = int(group / heads), query_head = int(group % heads);
  const int request = query_head / at.h, store = at.prefixes ? int(input("prefix", request, 1)[0]) : request;
  const std::int64_t head = std::int64_t{store} * at.h + query_head % at.h;
  const int tokens = at.ragged ? int(input("lengths", store, 1)[0]) : at.t;
  const int after = reads_after_lengths(at) ? int(input("after_lengths", request, 1)[0]) : at.after;
  const int per_part = int(ceil_div(ceil_div(tokens, kPartTokens), at.parts)) * kPartTokens;
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
    outputs["lse_reach"].insert(outputs["lse_reach"].end(), one.reach.begin(), one.reach.end());
  };
  // Where a mask ends inside or before the part, query by query.
  if (!at.causal || (at.parts == 1 && after == 0) || last <= tokens + after - at.s + 1)
    attend(0, at.s, last, at.causal && at.parts == 1 && after == 0);
  else
    for (int i = 0; i < at.s; ++i) attend(i, 1, std::min(last, tokens + after - at.s + i + 1), false);
  return outputs;
}

Cost decompressed_cost(const DecompressedProblem& at) {
  const std::vector<int> lengths = lengths_of(at), prefix = at.prefixes ? sample_prefixes(at) : std::vector<int>();
  const double width = dtype_bytes(at.dtype), rows = double(at.h) * at.s, columns = 2 * at.d + at.p;
  Cost all{0,
           at.b * rows * (width * (columns + (at.parts - 1) * at.d) + 4 * at.parts) + (at.prefixes ? 4.0 * at.b : 0)};
  for (int r = 0; r < at.b; ++r)
    all.flops +=
        2 * rows * columns * (at.prefixes ? lengths[prefix[r]] : mean_tokens_seen(at.s, lengths[r], at.causal));
  for (const int tokens : lengths) all.bytes += width * tokens * (2.0 * at.h * at.d + at.p);
  return all;
}

}  // namespace hypermla
