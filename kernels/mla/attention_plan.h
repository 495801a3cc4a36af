// What the plans of all forms of attention share. A form is a directory here: <form>.h has its problem, and
// <form>_plan.h what follows from the problem, for every version and language: tensors, inputs, reference,
// limits, cost.
//
// Sources: DeepSeek-V2, arXiv 2405.04434, section 2.1. lse is the natural logarithm of the sum of exp(score), fp32.
#pragma once

#include <algorithm>
#include <vector>

#include "hypermla/plan/reference.h"
#include "hypermla/plan/typed_plan.h"
#include "mla/attention_cost.h"

namespace hypermla {

// Tokens that a query sees on average: all, or for causal attention t - s + i + 1 of query i, at least none.
double mean_tokens_seen(int s, int t, bool causal);

// The lengths of ragged requests that checks and measurements use: of all kinds up to t, one of them 0. Known to the
// plan, so that costs are those of what is run.
std::vector<int> sample_lengths(int b, int t);

// The first axes of tensors are indices; `rows(name, i, n, w)` reads the i-th block of n rows of w elements.
struct RowReader {
  const InputReader& input;
  std::vector<float> operator()(const char* name, std::int64_t index, int rows, int width) const {
    return input(name, index * rows * width, std::int64_t{rows} * width);
  }
};

// Limits of the fields that all problems have.
template <class Problem>
void validate_attention(const Problem& at) {
  require_positive("b", at.b);
  require_positive("s", at.s);
  require_positive("t", at.t);
  require_positive("h", at.h);
  require_power_of_two("d", at.d, 16, 256);
  require_power_of_two("p", at.p, 16, 256);
  require_half_precision(at.dtype);
}

// Bh, the heads whose queries are rows of one latent matrix; 0: all.
inline void require_heads(int heads, int h) {
  if (heads < 0 || (heads > 0 && h % heads != 0))
    fail("--Bh={} is not supported: it must divide the {} heads, or be 0 for all of them", heads, h);
}

// 0: none are shared. A prefix that no request reads would only cost memory.
void validate_prefixes(int prefixes, int requests);

std::vector<FieldRef> without(std::vector<FieldRef> fields, const std::vector<std::string_view>& names);

// The plan of a version of the form of `Problem`, for which <form>_plan.h has tensors_of() and the others.
template <class Problem, class Tiling>
class AttentionPlan : public TypedPlan<Problem, Tiling> {
 public:
  using TypedPlan<Problem, Tiling>::problem;
  using TypedPlan<Problem, Tiling>::tiling;
  using TypedPlan<Problem, Tiling>::target;

  // `unsupported` fields of the problem keep their defaults: this version does not offer them.
  explicit AttentionPlan(std::vector<std::string_view> unsupported = {}) : unsupported_(std::move(unsupported)) {}

  std::vector<FieldRef> problem_fields() override { return without(fields_of(problem), unsupported_); }
  std::vector<TensorSpec> tensors() const override { return tensors_of(problem); }
  InputRules input_rules(std::uint64_t seed) const override { return input_rules_of(problem, seed); }
  ReferenceShape reference_shape() const override { return reference_shape_of(problem); }
  ReferenceOutputs reference(std::int64_t group, const InputReader& input) const override {
    return reference_of(problem, group, input);
  }

 private:
  std::vector<std::string_view> unsupported_;
};

}  // namespace hypermla
