#include "hypermla/plan/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

// The loops below are compiled for several CPU generations; the best one is chosen when the program starts.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define HYPERMLA_FOR_EVERY_CPU __attribute__((target_clones("default", "arch=haswell", "arch=skylake-avx512")))
#else
#define HYPERMLA_FOR_EVERY_CPU
#endif

namespace hypermla {
namespace {

// Sixteen partial sums, so that the compiler may vectorise without reordering what the source says.
HYPERMLA_FOR_EVERY_CPU double dot(const float* a, const float* b, int n) {
  double sums[16] = {};
  int i = 0;
  for (; i + 16 <= n; i += 16)
    for (int lane = 0; lane < 16; ++lane) sums[lane] += double(a[i + lane]) * double(b[i + lane]);
  double total = 0;
  for (; i < n; ++i) total += double(a[i]) * double(b[i]);
  for (double sum : sums) total += sum;
  return total;
}

HYPERMLA_FOR_EVERY_CPU void add_scaled(double* sum, double weight, const float* row, int n) {
  for (int i = 0; i < n; ++i) sum[i] += weight * double(row[i]);
}

}  // namespace

AttentionReference attention_reference(const std::vector<float>& q, const std::vector<float>& k,
                                       const std::vector<float>& v, int s, int t, int e, int dv, double scale,
                                       bool causal) {
  AttentionReference result;
  result.o.assign(std::size_t(s) * dv, 0.0);
  result.lse.assign(s, -std::numeric_limits<double>::infinity());
  result.reach.assign(s, 0.0);
  std::vector<double> scores(t), longest(t);  // longest: the largest norm up to a token
  for (int j = 0; j < t; ++j) {
    const double norm = std::sqrt(dot(&k[std::size_t(j) * e], &k[std::size_t(j) * e], e));
    longest[j] = j > 0 ? std::max(longest[j - 1], norm) : norm;
  }
  for (int i = 0; i < s; ++i) {
    const int seen = causal ? std::clamp(t - s + i + 1, 0, t) : t;
    if (seen == 0) continue;
    for (int j = 0; j < seen; ++j) scores[j] = scale * dot(&q[std::size_t(i) * e], &k[std::size_t(j) * e], e);
    const double largest = *std::max_element(scores.begin(), scores.begin() + seen);
    double sum = 0;
    for (int j = 0; j < seen; ++j) sum += scores[j] = std::exp(scores[j] - largest);
    for (int j = 0; j < seen; ++j)
      add_scaled(&result.o[std::size_t(i) * dv], scores[j] / sum, &v[std::size_t(j) * dv], dv);
    result.lse[i] = largest + std::log(sum);
    result.reach[i] = scale * longest[seen - 1] * std::sqrt(dot(&q[std::size_t(i) * e], &q[std::size_t(i) * e], e));
  }
  return result;
}

std::vector<float> join_columns(const std::vector<float>& a, const std::vector<float>& b, int na, int nb) {
  const std::size_t rows = a.size() / na;
  std::vector<float> joined;
  joined.reserve(a.size() + b.size());
  for (std::size_t row = 0; row < rows; ++row) {
    joined.insert(joined.end(), a.begin() + row * na, a.begin() + (row + 1) * na);
    joined.insert(joined.end(), b.begin() + row * nb, b.begin() + (row + 1) * nb);
  }
  return joined;
}

}  // namespace hypermla
