#include "mla/attention_plan.h"

#include <random>

namespace hypermla {

double mean_tokens_seen(int s, int t, bool causal) {
  if (!causal) return t;
  return t >= s ? t - (s - 1) / 2.0 : t * (t + 1.0) / (2.0 * s);
}

std::vector<int> sample_lengths(int b, int t) {
  std::vector<int> lengths(b, t);
  std::mt19937 random(1);
  const int least = t / 32;
  for (int i = 1; i < b; ++i) lengths[i] = i == 2 ? 0 : least + int(random() % unsigned(t - least + 1));
  return lengths;
}

void validate_prefixes(int prefixes, int requests) {
  if (prefixes < 0 || prefixes > requests)
    fail("--prefixes={} is not supported: it must be 0 (none shared), or from 1 to the {} requests", prefixes,
         requests);
}

std::vector<FieldRef> without(std::vector<FieldRef> fields, const std::vector<std::string_view>& names) {
  std::erase_if(fields, [&](const FieldRef& one) { return std::count(names.begin(), names.end(), one.name) > 0; });
  return fields;
}

}  // namespace hypermla
