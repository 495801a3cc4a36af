#include "mla/hybrid/hybrid_plan.h"

#include <random>

namespace hypermla {

int decompressed_tokens(const HybridProblem& at) {
  if (at.n >= 0) return at.n;
  return n_star(attention_shape(at), kHybridRidge, 64);
}

bool has_extents(const HybridProblem& at) {
  return std::min({at.b, at.s, at.t, at.h, at.d, at.p, at.k}) >= 1 && at.n >= kByRoofline && at.n <= at.t &&
         at.prefixes >= 0;
}

void validate_hybrid(const HybridProblem& at) {
  validate_attention(at);
  require_power_of_two("k", at.k, 16, 1024);
  validate_prefixes(at.prefixes, at.b);
  if (at.n < kByRoofline || at.n > at.t)
    fail("--n={} is not supported: it must be from 0 to t={}, -1 for what is chosen, or roofline", at.n, at.t);
  if (at.prefixes && at.n < 0) fail("--prefixes={} needs the length of the prefix: give it as --n", at.prefixes);
}

HybridSample hybrid_sample(const HybridProblem& at) {
  const int o = latent_tokens(at), n = decompressed_tokens(at), stores = token_stores(at);
  HybridSample sample{std::vector<int>(at.b, o), std::vector<int>(stores, n), std::vector<int>(at.b)};
  if (at.ragged) {
    sample.lengths = sample_lengths(at.b, o);
    sample.decompressed_lengths = sample_lengths(stores, n);
    std::reverse(sample.decompressed_lengths.begin(),
                 sample.decompressed_lengths.end());  // empty for other requests than the latent part
  }
  for (int i = 0; i < at.b; ++i) sample.store[i] = i % stores;
  if (at.prefixes) {
    std::mt19937 random(2);
    for (int i = at.b - 1; i > 0; --i) std::swap(sample.store[i], sample.store[random() % unsigned(i + 1)]);
  }
  return sample;
}

std::vector<TensorSpec> tensors_of(const HybridProblem& at) {
  const int o = latent_tokens(at), n = decompressed_tokens(at), stores = token_stores(at);
  std::vector<TensorSpec> all;
  auto add = [&](const char* name, Role role, DType dtype, std::vector<std::int64_t> shape) {
    all.push_back({name, role, dtype, std::move(shape)});
  };
  if (n) add("q", Role::input, at.dtype, {at.b, at.h, at.s, at.d});
  if (o) add("qc", Role::input, at.dtype, {at.b, at.h, at.s, at.k});
  add("qpe", Role::input, at.dtype, {at.b, at.h, at.s, at.p});
  if (o) {
    add("z", Role::input, at.dtype, {at.b, o, at.k});
    add("kpe", Role::input, at.dtype, {at.b, o, at.p});
  }
  if (n) {
    add("k", Role::input, at.dtype, {stores, at.h, n, at.d});
    add("v", Role::input, at.dtype, {stores, at.h, n, at.d});
    add("kpe_new", Role::input, at.dtype, {stores, n, at.p});
  }
  if (o) add("w", Role::input, at.dtype, {at.h, at.k, at.d});
  if (at.ragged && o) all.push_back({"lengths", Role::input, DType::int32, {at.b}, o});
  if (at.ragged && n) all.push_back({"new_lengths", Role::input, DType::int32, {stores}, n});
  if (at.prefixes && n) all.push_back({"prefix", Role::input, DType::int32, {at.b}, at.prefixes - 1});
  if (at.tokens_first)
    add("o", Role::output, at.dtype, {at.b, at.s, at.h, at.d});
  else
    add("o", Role::output, at.dtype, {at.b, at.h, at.s, at.d});
  add("lse", Role::output, DType::float32, {at.b, at.h, at.s});
  return all;
}

InputRules input_rules_of(const HybridProblem& at, std::uint64_t) {
  const int o = latent_tokens(at), n = decompressed_tokens(at), stores = token_stores(at);
  const HybridSample sample = hybrid_sample(at);
  InputRules rules;
  if (o >= n)
    rules.growing = {"kpe", o, at.p};
  else
    rules.growing = {"kpe_new", n, at.p};
  if (at.prefixes && n) rules.integers["prefix"] = sample.store;
  if (!at.ragged) return rules;
  auto unread = [&](const char* name, std::int64_t index, int used, int tokens, int width) {
    if (used < tokens)
      rules.unread[name].push_back({(index * tokens + used) * width, std::int64_t{tokens - used} * width});
  };
  if (o) {
    rules.integers["lengths"] = sample.lengths;
    for (int r = 0; r < at.b; ++r) {
      unread("z", r, sample.lengths[r], o, at.k);
      unread("kpe", r, sample.lengths[r], o, at.p);
    }
  }
  if (n) {
    rules.integers["new_lengths"] = sample.decompressed_lengths;
    for (int g = 0; g < stores; ++g) {
      unread("kpe_new", g, sample.decompressed_lengths[g], n, at.p);
      for (int head = g * at.h; head < (g + 1) * at.h; ++head) {
        unread("k", head, sample.decompressed_lengths[g], n, at.d);
        unread("v", head, sample.decompressed_lengths[g], n, at.d);
      }
    }
  }
  return rules;
}

ReferenceShape reference_shape_of(const HybridProblem& at) {
  const double o = latent_tokens(at), n = decompressed_tokens(at);
  const double flops = 2.0 * at.s * (o * (2 * at.k + at.p) + n * (2 * at.d + at.p) + (o > 0) * double(at.k) * at.d);
  if (at.tokens_first) return {at.b, flops * at.h};
  return {std::int64_t{at.b} * at.h, flops};
}

namespace {

// One softmax over the joined sequence, with keys and values side by side: a latent token is (z, 0, kpe) with the value
// (z, 0), a decompressed one (0, k, kpe_new) with (0, v). So the output's first K columns are the latent part, to be
// multiplied by w.
AttentionReference hybrid_head_reference(const HybridProblem& at, int request, int head, const InputReader& input) {
  const int o = latent_tokens(at), n = decompressed_tokens(at), s = at.s;
  const int k = o ? at.k : 0, d = n ? at.d : 0, p = at.p, width = k + d + p, values = k + d;
  const int store = at.prefixes && n ? int(input("prefix", request, 1)[0]) : at.prefixes ? 0 : request;
  const int latent = at.ragged && o ? int(input("lengths", request, 1)[0]) : o;
  const int decompressed = at.ragged && n ? int(input("new_lengths", store, 1)[0]) : n;
  const std::int64_t query_head = std::int64_t{request} * at.h + head, token_head = std::int64_t{store} * at.h + head;
  auto read = [&](const char* name, std::int64_t index, int extent, int rows, int columns) {
    return rows ? input(name, index * extent * columns, std::int64_t{rows} * columns) : std::vector<float>();
  };
  auto place = [](std::vector<float>& to, int to_width, int row, int column, const std::vector<float>& from,
                  int from_width) {
    for (std::size_t i = 0; from_width && i < from.size() / from_width; ++i)
      std::copy_n(&from[i * from_width], from_width, &to[(row + i) * to_width + column]);
  };
  const int tokens = latent + decompressed, first_latent = at.prefixes ? decompressed : 0,
            first_decompressed = at.prefixes ? 0 : latent;
  std::vector<float> queries(std::size_t(s) * width), keys(std::size_t(tokens) * width),
      sums(std::size_t(tokens) * values);
  if (o) place(queries, width, 0, 0, read("qc", query_head, s, s, k), k);
  if (n) place(queries, width, 0, k, read("q", query_head, s, s, d), d);
  place(queries, width, 0, k + d, read("qpe", query_head, s, s, p), p);
  if (latent) {
    const std::vector<float> z = read("z", request, o, latent, k);
    place(keys, width, first_latent, 0, z, k);
    place(keys, width, first_latent, k + d, read("kpe", request, o, latent, p), p);
    place(sums, values, first_latent, 0, z, k);
  }
  if (decompressed) {
    place(keys, width, first_decompressed, k, read("k", token_head, n, decompressed, d), d);
    place(keys, width, first_decompressed, k + d, read("kpe_new", store, n, decompressed, p), p);
    place(sums, values, first_decompressed, k, read("v", token_head, n, decompressed, d), d);
  }
  AttentionReference joined =
      attention_reference(queries, keys, sums, s, tokens, width, values, softmax_scale(at.d, p), at.causal);
  std::vector<double> out(std::size_t(s) * at.d, 0.0);
  const std::vector<float> w = read("w", head, k, k, at.d);
  for (int i = 0; i < s; ++i) {
    const double* row = &joined.o[std::size_t(i) * values];
    double* to = &out[std::size_t(i) * at.d];
    for (int c = 0; c < k; ++c)
      for (int column = 0; column < at.d; ++column) to[column] += row[c] * w[std::size_t(c) * at.d + column];
    for (int column = 0; column < d; ++column) to[column] += row[k + column];
  }
  return {std::move(out), std::move(joined.lse), std::move(joined.reach)};
}

}  // namespace

ReferenceOutputs reference_of(const HybridProblem& at, std::int64_t group, const InputReader& input) {
  if (!at.tokens_first) {
    AttentionReference one = hybrid_head_reference(at, int(group / at.h), int(group % at.h), input);
    return {{"o", std::move(one.o)}, {"lse", std::move(one.lse)}, {"lse_reach", std::move(one.reach)}};
  }
  std::vector<double> o(std::size_t(at.s) * at.h * at.d), lse, reach;
  for (int head = 0; head < at.h; ++head) {
    const AttentionReference one = hybrid_head_reference(at, int(group), head, input);
    for (int i = 0; i < at.s; ++i)
      std::copy_n(&one.o[std::size_t(i) * at.d], at.d, &o[(std::size_t(i) * at.h + head) * at.d]);
    lse.insert(lse.end(), one.lse.begin(), one.lse.end());
    reach.insert(reach.end(), one.reach.begin(), one.reach.end());
  }
  return {{"o", std::move(o)}, {"lse", std::move(lse)}, {"lse_reach", std::move(reach)}};
}

HybridPairs hybrid_pairs(const HybridProblem& at) {
  const HybridSample sample = hybrid_sample(at);
  HybridPairs pairs;
  for (int r = 0; r < at.b; ++r) {
    const int latent = sample.lengths[r], decompressed = sample.decompressed_lengths[sample.store[r]];
    const double tokens = latent + decompressed, all = at.s * mean_tokens_seen(at.s, latent + decompressed, at.causal);
    const double first_tokens = at.prefixes ? decompressed : latent;
    // Of queries that see 1, 2, ..., `last` tokens: the pairs in the part that the sequence begins with.
    auto pairs_up_to = [&](double last) {
      const double within = std::min(last, first_tokens);
      return within * (within + 1) / 2 + (last - within) * first_tokens;
    };
    const double first =
        at.causal ? pairs_up_to(tokens) - pairs_up_to(std::max(tokens - at.s, 0.0)) : at.s * first_tokens;
    pairs.latent += at.prefixes ? all - first : first;
    pairs.decompressed += at.prefixes ? first : all - first;
  }
  return pairs;
}

Cost hybrid_latent_cost(const HybridProblem& at) {
  if (latent_tokens(at) == 0) return {};
  const double rows = double(at.b) * at.h * at.s, width = dtype_bytes(at.dtype);
  Cost cost{2.0 * at.h * hybrid_pairs(at).latent * (2 * at.k + at.p), rows * (width * (at.p + 2 * at.k) + 4)};
  for (const int tokens : hybrid_sample(at).lengths) cost.bytes += width * tokens * (at.k + at.p);
  cost.bytes += at.ragged ? 4.0 * at.b : 0;
  return cost;
}

Cost hybrid_decompressed_cost(const HybridProblem& at) {
  if (decompressed_tokens(at) == 0) return {};
  const double rows = double(at.b) * at.h * at.s, width = dtype_bytes(at.dtype);
  Cost cost{2.0 * at.h * hybrid_pairs(at).decompressed * (2 * at.d + at.p), rows * (width * (at.p + 2 * at.d) + 4)};
  for (const int tokens : hybrid_sample(at).decompressed_lengths)
    cost.bytes += width * tokens * (2.0 * at.h * at.d + at.p);
  cost.bytes += 4.0 * ((at.ragged ? token_stores(at) : 0) + (at.prefixes ? at.b : 0));
  return cost;
}

Cost hybrid_attention_cost(const HybridProblem& at) {
  Cost cost = hybrid_latent_cost(at) + hybrid_decompressed_cost(at);
  if (latent_tokens(at) && decompressed_tokens(at))
    cost.bytes -= double(dtype_bytes(at.dtype)) * at.b * at.h * at.s * at.p;
  return cost;
}

Cost hybrid_cost(const HybridProblem& at) {
  const int o = latent_tokens(at), n = decompressed_tokens(at);
  const double rows = double(at.b) * at.h * at.s, width = dtype_bytes(at.dtype);
  Cost cost = hybrid_attention_cost(at);
  cost.flops += o ? 2 * rows * at.k * at.d : 0;
  cost.bytes += width * (o ? double(at.h) * at.k * at.d : 0) + (width * at.d + 4) * rows;
  cost.bytes -= width * rows * ((o ? at.k : 0) + (n ? at.d : 0)) + 4 * rows * ((o > 0) + (n > 0));
  return cost;
}

}  // namespace hypermla
