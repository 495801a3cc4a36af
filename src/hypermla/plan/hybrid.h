// What every version of the hybrid shares, in every language: tensors, limits, inputs, reference and cost. The functions take
// any problem struct with the fields b, s, t, n, h, d, p, k, dtype, causal, ragged, prefixes and tokens_first.
//
// Of the t tokens of a request n are attended to decompressed and o = t - n in the latent space, in one softmax:
//
//   prefixes = 0   the newest n tokens are decompressed, each request has its own: sequence = o latent, then n decompressed
//   prefixes = G   the first n tokens are decompressed and stored once for each of G prefixes: sequence = the n tokens of the
//                  prefix that `prefix` names for the request, then o latent tokens of its own
//
//   q [B,H,S,D], qc [B,H,S,K], qpe [B,H,S,P], z [B,O,K], kpe [B,O,P], k and v [G,H,N,D], kpe_new [G,N,P], w [H,K,D]
//   -> o [B,H,S,D] (tokens first: [B,S,H,D]), lse [B,H,S]                        without prefixes B stands for G
//
// Score = (qc z^T + qpe kpe^T) scale for a latent token, (q k^T + qpe kpe_new^T) scale for a decompressed one; value = z w or
// v. Causal: query i sees the first L - s + i + 1 tokens of a sequence of L. Ragged: int32 `lengths` [B] are the latent tokens
// of the requests, `new_lengths` [G] the tokens of the stores; both may be 0. Without latent or without decompressed tokens
// their tensors are left out: (qc, z, kpe, w, lengths) or (q, k, v, kpe_new, new_lengths, prefix).
//
// Sources: DeepSeek-V2, arXiv 2405.04434, section 2.1; the shared prefix: TyphoonMLA, arXiv 2509.21081.
#pragma once

#include <algorithm>

#include "hypermla/plan/attention.h"
#include "hypermla/roofline/attention_time.h"

namespace hypermla {

// FLOP per byte at which the arithmetic and the traffic of an H200 take equally long: 725 TFLOP/s sustained matrix products
// over 4.58 TB/s (docs/devices/nvidia-h200.md).
inline constexpr double kHybridRidge = 158;

// n = -1: the n that the model of attention_time.h takes on a device for the version `kernel` of the hybrid.
template <class Problem>
void choose_new_tokens(Problem& at, std::string_view kernel, const DeviceSpec& device) {
  if (at.n >= 0 || at.prefixes > 0) return;
  at.n = choose_n(kernel, attention_shape(at), device, at.dtype);
}

// The decompressed tokens of a request: n, or for n = -1, where no device has chosen, what perfect overlap would ask for.
template <class Problem>
int new_tokens(const Problem& at) {
  if (at.n >= 0) return at.n;
  return n_star(attention_shape(at), kHybridRidge, 64);
}
template <class Problem>
int latent_tokens(const Problem& at) {
  return at.t - new_tokens(at);
}
template <class Problem>
bool has_both_parts(const Problem& at) {
  return latent_tokens(at) > 0 && new_tokens(at) > 0;
}
// How many sets of n decompressed tokens there are.
template <class Problem>
int token_stores(const Problem& at) {
  return at.prefixes ? at.prefixes : at.b;
}

// Whether every extent is in its range, so that it can be divided by: a default tiling needs that, before validate() says what
// is wrong.
template <class Problem>
bool has_extents(const Problem& at) {
  return std::min({at.b, at.s, at.t, at.h, at.d, at.p, at.k}) >= 1 && at.n >= -1 && at.n <= at.t && at.prefixes >= 0;
}

template <class Problem>
void validate_hybrid(const Problem& at) {
  validate_latent(at);
  if (at.prefixes < 0) fail("--prefixes={} is not supported: it must be 0 (none shared) or their number", at.prefixes);
  if (at.n < -1 || at.n > at.t)
    fail("--n={} is not supported: it must be from 0 to t={}, or -1 for the number that the cost model chooses", at.n,
         at.t);
  if (at.prefixes && at.n < 0) fail("--prefixes={} needs the length of the prefix: give it as --n", at.prefixes);
}

// What checks and measurements run on; known to the plan, so that costs are those of what is run.
struct HybridSample {
  std::vector<int> lengths;      // of every request, in the latent part
  std::vector<int> new_lengths;  // of every store
  std::vector<int> store;        // of every request
};
template <class Problem>
HybridSample hybrid_sample(const Problem& at) {
  const int o = latent_tokens(at), n = new_tokens(at), stores = token_stores(at);
  HybridSample sample{std::vector<int>(at.b, o), std::vector<int>(stores, n), std::vector<int>(at.b)};
  if (at.ragged) {
    sample.lengths = sample_lengths(at.b, o);
    sample.new_lengths = sample_lengths(stores, n);
    std::reverse(sample.new_lengths.begin(),
                 sample.new_lengths.end());  // empty for other requests than the latent part
  }
  for (int i = 0; i < at.b; ++i) sample.store[i] = i % stores;
  if (at.prefixes) {
    std::mt19937 random(2);
    for (int i = at.b - 1; i > 0; --i) std::swap(sample.store[i], sample.store[random() % unsigned(i + 1)]);
  }
  return sample;
}

template <class Problem>
std::vector<TensorSpec> hybrid_tensors(const Problem& at) {
  const int o = latent_tokens(at), n = new_tokens(at), stores = token_stores(at);
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
  if (at.ragged && o) add("lengths", Role::input, DType::int32, {at.b});
  if (at.ragged && n) add("new_lengths", Role::input, DType::int32, {stores});
  if (at.prefixes && n) add("prefix", Role::input, DType::int32, {at.b});
  if (at.tokens_first)
    add("o", Role::output, at.dtype, {at.b, at.s, at.h, at.d});
  else
    add("o", Role::output, at.dtype, {at.b, at.h, at.s, at.d});
  add("lse", Role::output, DType::float32, {at.b, at.h, at.s});
  return all;
}

template <class Problem>
InputRules hybrid_input_rules(const Problem& at) {
  const int o = latent_tokens(at), n = new_tokens(at), stores = token_stores(at);
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
    rules.integers["new_lengths"] = sample.new_lengths;
    for (int g = 0; g < stores; ++g) {
      unread("kpe_new", g, sample.new_lengths[g], n, at.p);
      for (int head = g * at.h; head < (g + 1) * at.h; ++head) {
        unread("k", head, sample.new_lengths[g], n, at.d);
        unread("v", head, sample.new_lengths[g], n, at.d);
      }
    }
  }
  return rules;
}

// A group is one head of one request; with tokens first one request, for its outputs lie together.
template <class Problem>
ReferenceShape hybrid_reference_shape(const Problem& at) {
  const double o = latent_tokens(at), n = new_tokens(at);
  const double flops = 2.0 * at.s * (o * (2 * at.k + at.p) + n * (2 * at.d + at.p) + (o > 0) * double(at.k) * at.d);
  if (at.tokens_first) return {at.b, flops * at.h};
  return {std::int64_t{at.b} * at.h, flops};
}

// One softmax over the joined sequence, with keys and values side by side: a latent token is (z, 0, kpe) with the value (z, 0),
// a decompressed one (0, k, kpe_new) with (0, v). So the output's first K columns are the latent part, to be multiplied by w.
template <class Problem>
AttentionReference hybrid_head_reference(const Problem& at, int request, int head, const InputReader& input) {
  const int o = latent_tokens(at), n = new_tokens(at), s = at.s;
  const int k = o ? at.k : 0, d = n ? at.d : 0, p = at.p, width = k + d + p, values = k + d;
  const int store = at.prefixes && n ? int(input("prefix", request, 1)[0]) : at.prefixes ? 0 : request;
  const int latent = at.ragged && o ? int(input("lengths", request, 1)[0]) : o;
  const int fresh = at.ragged && n ? int(input("new_lengths", store, 1)[0]) : n;
  const std::int64_t query_head = std::int64_t{request} * at.h + head, token_head = std::int64_t{store} * at.h + head;
  auto read = [&](const char* name, std::int64_t index, int extent, int rows, int columns) {
    return rows ? input(name, index * extent * columns, std::int64_t{rows} * columns) : std::vector<float>();
  };
  auto place = [](std::vector<float>& to, int to_width, int row, int column, const std::vector<float>& from,
                  int from_width) {
    for (std::size_t i = 0; from_width && i < from.size() / from_width; ++i)
      std::copy_n(&from[i * from_width], from_width, &to[(row + i) * to_width + column]);
  };
  const int tokens = latent + fresh, first_latent = at.prefixes ? fresh : 0, first_new = at.prefixes ? 0 : latent;
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
  if (fresh) {
    place(keys, width, first_new, k, read("k", token_head, n, fresh, d), d);
    place(keys, width, first_new, k + d, read("kpe_new", store, n, fresh, p), p);
    place(sums, values, first_new, k, read("v", token_head, n, fresh, d), d);
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
  return {std::move(out), std::move(joined.lse)};
}

template <class Problem>
ReferenceOutputs hybrid_reference(const Problem& at, std::int64_t group, const InputReader& input) {
  if (!at.tokens_first) {
    AttentionReference one = hybrid_head_reference(at, int(group / at.h), int(group % at.h), input);
    return {{"o", std::move(one.o)}, {"lse", std::move(one.lse)}};
  }
  std::vector<double> o(std::size_t(at.s) * at.h * at.d), lse;
  for (int head = 0; head < at.h; ++head) {
    const AttentionReference one = hybrid_head_reference(at, int(group), head, input);
    for (int i = 0; i < at.s; ++i)
      std::copy_n(&one.o[std::size_t(i) * at.d], at.d, &o[(std::size_t(i) * at.h + head) * at.d]);
    lse.insert(lse.end(), one.lse.begin(), one.lse.end());
  }
  return {{"o", std::move(o)}, {"lse", std::move(lse)}};
}

// (query, token) pairs of one head, over all requests.
struct HybridPairs {
  double latent = 0, decompressed = 0;
};
template <class Problem>
HybridPairs hybrid_pairs(const Problem& at) {
  const HybridSample sample = hybrid_sample(at);
  HybridPairs pairs;
  for (int r = 0; r < at.b; ++r) {
    const int latent = sample.lengths[r], fresh = sample.new_lengths[sample.store[r]];
    const double tokens = latent + fresh, all = at.s * mean_tokens_seen(at.s, latent + fresh, at.causal);
    const double first_tokens = at.prefixes ? fresh : latent;
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

// Of one path alone, as a kernel of its own that writes O_latent or O_new and the log-sum-exp. K, V, KPE count once per store.
template <class Problem>
Cost hybrid_latent_cost(const Problem& at) {
  if (latent_tokens(at) == 0) return {};
  const double rows = double(at.b) * at.h * at.s, width = dtype_bytes(at.dtype);
  Cost cost{2.0 * at.h * hybrid_pairs(at).latent * (2 * at.k + at.p), rows * (width * (at.p + 2 * at.k) + 4)};
  for (const int tokens : hybrid_sample(at).lengths) cost.bytes += width * tokens * (at.k + at.p);
  cost.bytes += at.ragged ? 4.0 * at.b : 0;
  return cost;
}
template <class Problem>
Cost hybrid_decompressed_cost(const Problem& at) {
  if (new_tokens(at) == 0) return {};
  const double rows = double(at.b) * at.h * at.s, width = dtype_bytes(at.dtype);
  Cost cost{2.0 * at.h * hybrid_pairs(at).decompressed * (2 * at.d + at.p), rows * (width * (at.p + 2 * at.d) + 4)};
  for (const int tokens : hybrid_sample(at).new_lengths) cost.bytes += width * tokens * (2.0 * at.h * at.d + at.p);
  cost.bytes += 4.0 * ((at.ragged ? token_stores(at) : 0) + (at.prefixes ? at.b : 0));
  return cost;
}

// Of both in one kernel, which reads QPE once. Without mask, lengths and prefixes: mla_var6_plus_cost() and the log-sum-exps.
template <class Problem>
Cost hybrid_attention_cost(const Problem& at) {
  Cost cost = hybrid_latent_cost(at) + hybrid_decompressed_cost(at);
  if (latent_tokens(at) && new_tokens(at)) cost.bytes -= double(dtype_bytes(at.dtype)) * at.b * at.h * at.s * at.p;
  return cost;
}

// Of the whole problem, O_latent and O_new staying where they are made: the floor of every version.
template <class Problem>
Cost hybrid_cost(const Problem& at) {
  const int o = latent_tokens(at), n = new_tokens(at);
  const double rows = double(at.b) * at.h * at.s, width = dtype_bytes(at.dtype);
  Cost cost = hybrid_attention_cost(at);
  cost.flops += o ? 2 * rows * at.k * at.d : 0;
  cost.bytes += width * (o ? double(at.h) * at.k * at.d : 0) + (width * at.d + 4) * rows;
  cost.bytes -= width * rows * ((o ? at.k : 0) + (n ? at.d : 0)) + 4 * rows * ((o > 0) + (n > 0));
  return cost;
}

// The merge and the output decompression as a kernel of its own, and the last stage of every pipeline. The functions take any
// problem struct with the fields b, s, h, d, k, dtype, latent_parts (M), decompressed_parts (R) and tokens_first.
//
//   o_latent [M,B,H,S,K], lse_latent [M,B,H,S], o_new [R,B,H,S,D], lse_new [R,B,H,S], w [H,K,D] -> o, lse as above
//
// Parts are normalised, their log-sum-exp is natural and fp32. A row of a part with lse = -inf is empty: what its outputs hold
// must not matter. Without parts of a kind their tensors (and w) are left out.
template <class Problem>
void validate_decompress_combine(const Problem& at) {
  require_positive("b", at.b);
  require_positive("s", at.s);
  require_positive("h", at.h);
  require_power_of_two("d", at.d, 16, 256);
  require_power_of_two("k", at.k, 16, 1024);
  require_half_precision(at.dtype);
  for (const auto& [name, parts] :
       {std::pair("latent_parts", at.latent_parts), {"decompressed_parts", at.decompressed_parts}})
    if (parts < 0 || parts > 1024) fail("--{}={} is not supported: it must be from 0 to 1024", name, parts);
  if (at.latent_parts + at.decompressed_parts == 0)
    fail("--latent_parts=0 --decompressed_parts=0 leave nothing to merge: give at least one part");
}

template <class Problem>
std::vector<TensorSpec> decompress_combine_tensors(const Problem& at) {
  const int M = at.latent_parts, R = at.decompressed_parts;
  std::vector<TensorSpec> all;
  auto add = [&](const char* name, Role role, DType dtype, std::vector<std::int64_t> shape) {
    all.push_back({name, role, dtype, std::move(shape)});
  };
  if (M) {
    add("o_latent", Role::input, at.dtype, {M, at.b, at.h, at.s, at.k});
    add("lse_latent", Role::input, DType::float32, {M, at.b, at.h, at.s});
  }
  if (R) {
    add("o_new", Role::input, at.dtype, {R, at.b, at.h, at.s, at.d});
    add("lse_new", Role::input, DType::float32, {R, at.b, at.h, at.s});
  }
  if (M) add("w", Role::input, at.dtype, {at.h, at.k, at.d});
  if (at.tokens_first)
    add("o", Role::output, at.dtype, {at.b, at.s, at.h, at.d});
  else
    add("o", Role::output, at.dtype, {at.b, at.h, at.s, at.d});
  add("lse", Role::output, DType::float32, {at.b, at.h, at.s});
  return all;
}

// Some rows of some parts are empty, and the last row of all of them.
template <class Problem>
InputRules decompress_combine_input_rules(const Problem& at) {
  const std::int64_t rows = std::int64_t{at.b} * at.h * at.s;
  InputRules rules;
  for (const auto& [o, lse, parts, width] : {std::tuple("o_latent", "lse_latent", at.latent_parts, at.k),
                                             std::tuple("o_new", "lse_new", at.decompressed_parts, at.d)}) {
    auto empty = [&, o = o, lse = lse, width = width](std::int64_t row) {
      rules.minus_infinity[lse].push_back({row, 1});
      rules.unread[o].push_back({row * width, width});
    };
    for (int i = 0; parts && i < 32; ++i) empty((i % parts) * rows + i * 997 % rows);
    for (int part = 0; part < parts; ++part) empty(part * rows + rows - 1);
  }
  return rules;
}

// A group is one head of one request; with tokens first one request.
template <class Problem>
ReferenceShape decompress_combine_reference_shape(const Problem& at) {
  const double flops = 2.0 * at.s *
                       ((at.latent_parts > 0) * double(at.k) * at.d + double(at.latent_parts) * at.k +
                        double(at.decompressed_parts) * at.d);
  if (at.tokens_first) return {at.b, flops * at.h};
  return {std::int64_t{at.b} * at.h, flops};
}

template <class Problem>
ReferenceOutputs decompress_combine_reference(const Problem& at, std::int64_t group, const InputReader& input) {
  const int s = at.s, k = at.k, d = at.d;
  const std::int64_t heads = std::int64_t{at.b} * at.h;
  std::vector<double> o, all_lse;
  auto one_head = [&](std::int64_t query_head) {
    std::vector<double> latent(std::size_t(s) * k), out(std::size_t(s) * d), sum(s), largest(s, -HUGE_VAL);
    auto for_parts = [&](auto visit) {
      for (int m = 0; m < at.latent_parts; ++m) visit(m, "o_latent", "lse_latent", k, latent);
      for (int r = 0; r < at.decompressed_parts; ++r) visit(r, "o_new", "lse_new", d, out);
    };
    for_parts([&](int part, const char*, const char* lse, int, std::vector<double>&) {
      const std::vector<float> of_rows = input(lse, (part * heads + query_head) * s, s);
      for (int i = 0; i < s; ++i) largest[i] = std::max(largest[i], double(of_rows[i]));
    });
    for_parts([&](int part, const char* name, const char* lse, int width, std::vector<double>& to) {
      const std::vector<float> of_rows = input(lse, (part * heads + query_head) * s, s);
      const std::vector<float> from = input(name, (part * heads + query_head) * s * width, std::int64_t{s} * width);
      for (int i = 0; i < s; ++i) {
        if (std::isinf(of_rows[i])) continue;
        const double weight = std::exp(of_rows[i] - largest[i]);
        sum[i] += weight;
        for (int c = 0; c < width; ++c) to[std::size_t(i) * width + c] += weight * from[std::size_t(i) * width + c];
      }
    });
    if (at.latent_parts) {
      const std::vector<float> w = input("w", query_head % at.h * k * d, std::int64_t{k} * d);
      for (int i = 0; i < s; ++i)
        for (int c = 0; c < k; ++c)
          for (int column = 0; column < d; ++column)
            out[std::size_t(i) * d + column] += latent[std::size_t(i) * k + c] * w[std::size_t(c) * d + column];
    }
    for (int i = 0; i < s; ++i) {
      for (int column = 0; sum[i] > 0 && column < d; ++column) out[std::size_t(i) * d + column] /= sum[i];
      all_lse.push_back(sum[i] > 0 ? largest[i] + std::log(sum[i]) : -HUGE_VAL);
    }
    return out;
  };
  if (!at.tokens_first) {
    o = one_head(group);
    return {{"o", std::move(o)}, {"lse", std::move(all_lse)}};
  }
  o.resize(std::size_t(s) * at.h * d);
  for (int head = 0; head < at.h; ++head) {
    const std::vector<double> one = one_head(group * at.h + head);
    for (int i = 0; i < s; ++i) std::copy_n(&one[std::size_t(i) * d], d, &o[(std::size_t(i) * at.h + head) * d]);
  }
  return {{"o", std::move(o)}, {"lse", std::move(all_lse)}};
}

template <class Problem>
Cost decompress_combine_cost(const Problem& at) {
  const double rows = double(at.b) * at.h * at.s, width = dtype_bytes(at.dtype);
  const double M = at.latent_parts, R = at.decompressed_parts;
  return {2 * rows * (M > 0 ? double(at.k) * at.d : 0) + 2 * rows * (M * at.k + R * at.d),
          rows * (M * (width * at.k + 4) + R * (width * at.d + 4) + width * at.d + 4) +
              (M > 0 ? width * at.h * at.k * at.d : 0)};
}

}  // namespace hypermla
