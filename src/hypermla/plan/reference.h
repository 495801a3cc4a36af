// Attention of one head in double precision, written for clarity. Kernels are compared with it.
#pragma once

#include <vector>

namespace hypermla {

struct AttentionReference {
  std::vector<double> o;    // (s, dv)
  std::vector<double> lse;  // (s): natural logarithm of the sum of exp(score)
  // (s): a bound on every partial sum of a score, from the norms of the query and of the tokens that it sees.
  std::vector<double> reach;
};

// o = softmax(q k^T * scale) v with q (s, e), k (t, e), v (t, dv), all row-major. When causal, query i sees the tokens
// up to t - s + i; a query that sees none gets o = 0 and lse = -inf.
AttentionReference attention_reference(const std::vector<float>& q, const std::vector<float>& k,
                                       const std::vector<float>& v, int s, int t, int e, int dv, double scale,
                                       bool causal);

// Rows of a and b side by side: (rows, na) and (rows, nb) -> (rows, na + nb).
std::vector<float> join_columns(const std::vector<float>& a, const std::vector<float>& b, int na, int nb);

}  // namespace hypermla
