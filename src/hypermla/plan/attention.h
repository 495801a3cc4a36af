// What every attention kernel of one form shares, whatever its version: tensors, limits, reference and cost. The functions
// take any problem struct with the usual fields.
//
//   decompressed  q [B,H,S,D], qpe [B,H,S,P], k and v [B,H,T,D], kpe [B,T,P] -> o [B,H,S,D], lse [B,H,S]
//   latent        qc [B,H,S,K], qpe [B,H,S,P], z [B,T,K], kpe [B,T,P]        -> o [B,H,S,K], lse [B,H,S]
//
//   output decompression  o_latent [B,H,S,K], w [H,K,D]                    -> o [B,H,S,D]
//
// lse is the natural logarithm of the sum of exp(score), fp32. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
#pragma once

#include <random>

#include "hypermla/plan/reference.h"
#include "hypermla/plan/typed_plan.h"
#include "hypermla/roofline/attention_cost.h"

namespace hypermla {

template <class Problem>
AttentionShape attention_shape(const Problem& at) {
  return {.b = at.b,
          .s = at.s,
          .t = at.t,
          .h = at.h,
          .d = at.d,
          .p = at.p,
          .k = at.k,
          .bytes_per_element = double(dtype_bytes(at.dtype))};
}

// Tokens that a query sees on average: all, or for causal attention t - s + i + 1 of query i, at least none.
inline double mean_tokens_seen(int s, int t, bool causal) {
  if (!causal) return t;
  return t >= s ? t - (s - 1) / 2.0 : t * (t + 1.0) / (2.0 * s);
}

// The lengths of ragged requests that checks and measurements use: of all kinds up to t, one of them 0. Known to the plan, so
// that costs are those of what is run.
inline std::vector<int> sample_lengths(int b, int t) {
  std::vector<int> lengths(b, t);
  std::mt19937 random(1);
  const int least = t / 32;
  for (int i = 1; i < b; ++i) lengths[i] = i == 2 ? 0 : least + int(random() % unsigned(t - least + 1));
  return lengths;
}

// The first axes of tensors are indices; `rows(name, i, n, w)` reads the i-th block of n rows of w elements.
struct RowReader {
  const InputReader& input;
  std::vector<float> operator()(const char* name, std::int64_t index, int rows, int width) const {
    return input(name, index * rows * width, std::int64_t{rows} * width);
  }
};

template <class Problem>
void validate_decompressed(const Problem& problem) {
  require_positive("b", problem.b);
  require_positive("s", problem.s);
  require_positive("t", problem.t);
  require_positive("h", problem.h);
  require_power_of_two("d", problem.d, 16, 256);
  require_power_of_two("p", problem.p, 16, 256);
  require_half_precision(problem.dtype);
}

template <class Problem>
std::vector<TensorSpec> decompressed_tensors(const Problem& problem) {
  const auto& [b, s, t, h, d, p, dtype, causal] = problem;
  return {{"q", Role::input, dtype, {b, h, s, d}}, {"qpe", Role::input, dtype, {b, h, s, p}},
          {"k", Role::input, dtype, {b, h, t, d}}, {"v", Role::input, dtype, {b, h, t, d}},
          {"kpe", Role::input, dtype, {b, t, p}},  {"o", Role::output, dtype, {b, h, s, d}},
          {"lse", Role::output, DType::float32, {b, h, s}}};
}

// A group is one head of one batch element.
template <class Problem>
ReferenceShape decompressed_reference_shape(const Problem& problem) {
  return {std::int64_t{problem.b} * problem.h, 2.0 * problem.s * problem.t * (2 * problem.d + problem.p)};
}

template <class Problem>
ReferenceOutputs decompressed_reference(const Problem& problem, std::int64_t group, const InputReader& input) {
  const auto& [b, s, t, h, d, p, dtype, causal] = problem;
  const RowReader rows{input};
  const std::int64_t batch = group / h;
  AttentionReference result = attention_reference(
      join_columns(rows("q", group, s, d), rows("qpe", group, s, p), d, p),
      join_columns(rows("k", group, t, d), rows("kpe", batch, t, p), d, p), rows("v", group, t, d), s, t, d + p, d,
      softmax_scale(d, p), causal);
  return {{"o", std::move(result.o)}, {"lse", std::move(result.lse)}};
}

// Arithmetic over the tokens that are seen; KPE counts once per batch element, for the kernels share it between the heads.
template <class Problem>
Cost decompressed_cost(const Problem& problem) {
  const auto& [b, s, t, h, d, p, dtype, causal] = problem;
  const double bh = double(b) * h, width = dtype_bytes(dtype);
  return {2 * bh * s * mean_tokens_seen(s, t, causal) * (2 * d + p),
          width * (bh * s * (2 * d + p) + 2 * bh * t * d + double(b) * t * p) + 4 * bh * s};
}

template <class Problem>
void validate_latent(const Problem& problem) {
  validate_decompressed(problem);
  require_power_of_two("k", problem.k, 16, 1024);
}

template <class Problem>
std::vector<TensorSpec> latent_tensors(const Problem& problem) {
  const auto& [b, s, t, h, d, p, k, dtype, causal] = problem;
  return {{"qc", Role::input, dtype, {b, h, s, k}}, {"qpe", Role::input, dtype, {b, h, s, p}},
          {"z", Role::input, dtype, {b, t, k}},     {"kpe", Role::input, dtype, {b, t, p}},
          {"o", Role::output, dtype, {b, h, s, k}}, {"lse", Role::output, DType::float32, {b, h, s}}};
}

template <class Problem>
ReferenceShape latent_reference_shape(const Problem& problem) {
  return {std::int64_t{problem.b} * problem.h, 2.0 * problem.s * problem.t * (2 * problem.k + problem.p)};
}

template <class Problem>
ReferenceOutputs latent_reference(const Problem& problem, std::int64_t group, const InputReader& input) {
  const auto& [b, s, t, h, d, p, k, dtype, causal] = problem;
  const RowReader rows{input};
  const std::int64_t batch = group / h;
  const std::vector<float> z = rows("z", batch, t, k);
  AttentionReference result = attention_reference(join_columns(rows("qc", group, s, k), rows("qpe", group, s, p), k, p),
                                                  join_columns(z, rows("kpe", batch, t, p), k, p), z, s, t, k + p, k,
                                                  softmax_scale(d, p), causal);
  return {{"o", std::move(result.o)}, {"lse", std::move(result.lse)}};
}

template <class Problem>
Cost latent_cost(const Problem& problem) {
  const auto& [b, s, t, h, d, p, k, dtype, causal] = problem;
  const double rows = double(b) * h * s;
  return {2 * rows * mean_tokens_seen(s, t, causal) * (2 * k + p),
          dtype_bytes(dtype) * (rows * (2 * k + p) + double(b) * t * (k + p)) + 4 * rows};
}

// What a latent kernel executes: padded rows and tokens, and the scores once more for every Bv of the value columns.
template <class Problem, class Tiling>
Cost latent_executed(const Problem& problem, const Tiling& tiling) {
  const double k = problem.k, p = problem.p;
  const Cost cost = latent_cost(problem);
  const double padded = padding(problem.h * problem.s, tiling.Bm) * padding(problem.t, tiling.Bn);
  return {cost.flops * padded * ((k + p) * (k / tiling.Bv) + k) / (2 * k + p), cost.bytes};
}

template <class Problem>
std::vector<TensorSpec> output_decompression_tensors(const Problem& problem) {
  const auto& [b, s, h, d, k, dtype] = problem;
  return {{"o_latent", Role::input, dtype, {b, h, s, k}},
          {"w", Role::input, dtype, {h, k, d}},
          {"o", Role::output, dtype, {b, h, s, d}}};
}

// A group is one head of one batch element.
template <class Problem>
ReferenceShape output_decompression_reference_shape(const Problem& problem) {
  return {std::int64_t{problem.b} * problem.h, 2.0 * problem.s * problem.k * problem.d};
}

template <class Problem>
ReferenceOutputs output_decompression_reference(const Problem& problem, std::int64_t group, const InputReader& input) {
  const auto& [b, s, h, d, k, dtype] = problem;
  const RowReader rows{input};
  const std::vector<float> latent = rows("o_latent", group, s, k), w = rows("w", group % h, k, d);
  std::vector<double> o(std::size_t(s) * d, 0.0);
  for (int i = 0; i < s; ++i)
    for (int c = 0; c < k; ++c)
      for (int column = 0; column < d; ++column) o[i * d + column] += double(latent[i * k + c]) * w[c * d + column];
  return {{"o", std::move(o)}};
}

template <class Problem>
Cost output_decompression_cost(const Problem& problem) {
  const auto& [b, s, h, d, k, dtype] = problem;
  return output_decompression_cost(
      AttentionShape{.b = b, .s = s, .h = h, .d = d, .k = k, .bytes_per_element = double(dtype_bytes(dtype))});
}

}  // namespace hypermla
