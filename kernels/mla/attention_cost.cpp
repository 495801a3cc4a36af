#include "mla/attention_cost.h"

#include <algorithm>
#include <cmath>

#include "hypermla/base/error.h"

namespace hypermla {
namespace {

// The extents as double: products of seven of them do not fit an int.
struct Extents {
  double b, s, t, h, d, p, k, w;
};

Extents extents_of(const AttentionShape& shape) {
  if (std::min({shape.b, shape.s, shape.t, shape.h, shape.d, shape.p, shape.k}) < 1 || !(shape.bytes_per_element > 0)) {
    fail(
        "an attention shape needs extents of at least 1, not b={} s={} t={} h={} d={} p={} k={} with {} bytes per "
        "element",
        shape.b, shape.s, shape.t, shape.h, shape.d, shape.p, shape.k, shape.bytes_per_element);
  }
  return {double(shape.b), double(shape.s), double(shape.t), double(shape.h),
          double(shape.d), double(shape.p), double(shape.k), shape.bytes_per_element};
}

}  // namespace

Cost flash_attention_cost(const AttentionShape& shape) {
  const auto [b, s, t, h, d, p, k, w] = extents_of(shape);
  return {.flops = 2 * b * h * s * t * (2 * d + p), .bytes = w * b * h * (s + t) * (2 * d + p)};
}

Cost flash_mla_cost(const AttentionShape& shape) {
  const auto [b, s, t, h, d, p, k, w] = extents_of(shape);
  return {.flops = 2 * b * h * s * t * (2 * k + p), .bytes = w * (b * h * s * (2 * k + p) + b * t * (k + p))};
}

Cost mla_var6_plus_cost(const AttentionShape& shape, int n) {
  const auto [b, s, t, h, d, p, k, w] = extents_of(shape);
  if (n < 0 || n > shape.t) fail("n={} decompressed tokens must lie between 0 and t={}", n, shape.t);
  const double o = t - n;
  const double queries = b * h * s * (p + d + k);
  const double tokens = b * o * k + b * t * p + 2 * b * h * n * d;
  const double outputs = b * h * s * (d + k);
  return {.flops = 2 * b * h * s * (t * p + 2 * n * d + 2 * o * k), .bytes = w * (queries + tokens + outputs)};
}

Cost output_decompression_cost(const AttentionShape& shape) {
  const auto [b, s, t, h, d, p, k, w] = extents_of(shape);
  return {.flops = 2 * b * h * s * k * d, .bytes = w * (b * h * s * k + h * k * d + b * h * s * d)};
}

double n_balance(const AttentionShape& shape, double ridge) {
  const auto [b, s, t, h, d, p, k, w] = extents_of(shape);
  const double surplus = 2 * h * s * t * (2 * k + p) - ridge * w * (h * s * (p + 2 * d + 2 * k) + t * (k + p));
  const double per_token = 4 * h * s * (k - d) + ridge * w * (2 * h * d - k);
  return surplus / per_token;
}

int n_star(const AttentionShape& shape, double ridge, int tile) {
  if (!(ridge > 0)) fail("n_star needs a positive ridge, not {} FLOP per byte", ridge);
  if (tile < 1) fail("n_star needs a tile of at least 1 token, not {}", tile);
  const auto bytes_of_time = [&](int n) {
    const Cost cost = mla_var6_plus_cost(shape, n);
    return std::max(cost.flops / ridge, cost.bytes);
  };
  int best = 0;
  const auto consider = [&](int n) {
    if (bytes_of_time(n) < bytes_of_time(best)) best = n;
  };
  const double balance = n_balance(shape, ridge);
  if (balance > 0 && balance < shape.t) {
    const int below = static_cast<int>(balance) / tile * tile;
    consider(below);
    if (below < shape.t - tile) consider(below + tile);
  }
  consider(shape.t);
  return best;
}

}  // namespace hypermla
