#include "mla/combine/combine_plan.h"

#include <tuple>

namespace hypermla {

void validate_combine(const CombineProblem& at) {
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

std::vector<TensorSpec> tensors_of(const CombineProblem& at) {
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

// Some rows of some parts are empty, and where there are several rows the last one of all parts. Of the others at
// most every fourth row is empty in a part of either kind, so that most rows have something to merge.
InputRules input_rules_of(const CombineProblem& at, std::uint64_t) {
  const std::int64_t rows = std::int64_t{at.b} * at.h * at.s, count = std::min<std::int64_t>((rows - 1) / 4, 32);
  InputRules rules;
  int kind = 0;
  for (const auto& [o, lse, parts, width] : {std::tuple("o_latent", "lse_latent", at.latent_parts, at.k),
                                             std::tuple("o_new", "lse_new", at.decompressed_parts, at.d)}) {
    auto empty = [&, o = o, lse = lse, width = width](std::int64_t row) {
      rules.minus_infinity[lse].push_back({row, 1});
      rules.unread[o].push_back({row * width, width});
    };
    for (std::int64_t i = 0; parts && i < count; ++i) empty(i % parts * rows + i * ((rows - 1) / count) + kind);
    for (int part = 0; rows > 1 && part < parts; ++part) empty(part * rows + rows - 1);
    ++kind;
  }
  return rules;
}

ReferenceShape reference_shape_of(const CombineProblem& at) {
  const double flops = 2.0 * at.s *
                       ((at.latent_parts > 0) * double(at.k) * at.d + double(at.latent_parts) * at.k +
                        double(at.decompressed_parts) * at.d);
  if (at.tokens_first) return {at.b, flops * at.h};
  return {std::int64_t{at.b} * at.h, flops};
}

ReferenceOutputs reference_of(const CombineProblem& at, std::int64_t group, const InputReader& input) {
  const int s = at.s, k = at.k, d = at.d;
  const std::int64_t heads = std::int64_t{at.b} * at.h;
  std::vector<double> o, all_lse, reach;
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
      reach.push_back(sum[i] > 0 ? std::fabs(largest[i]) : 0);
    }
    return out;
  };
  if (!at.tokens_first) {
    o = one_head(group);
    return {{"o", std::move(o)}, {"lse", std::move(all_lse)}, {"lse_reach", std::move(reach)}};
  }
  o.resize(std::size_t(s) * at.h * d);
  for (int head = 0; head < at.h; ++head) {
    const std::vector<double> one = one_head(group * at.h + head);
    for (int i = 0; i < s; ++i) std::copy_n(&one[std::size_t(i) * d], d, &o[(std::size_t(i) * at.h + head) * d]);
  }
  return {{"o", std::move(o)}, {"lse", std::move(all_lse)}, {"lse_reach", std::move(reach)}};
}

Cost combine_cost(const CombineProblem& at) {
  const double rows = double(at.b) * at.h * at.s, width = dtype_bytes(at.dtype);
  const double M = at.latent_parts, R = at.decompressed_parts;
  return {2 * rows * (M > 0 ? double(at.k) * at.d : 0) + 2 * rows * (M * at.k + R * at.d),
          rows * (M * (width * at.k + 4) + R * (width * at.d + 4) + width * at.d + 4) +
              (M > 0 ? width * at.h * at.k * at.d : 0)};
}

}  // namespace hypermla
