#include "hypermla/knowledge/predicate.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>

#include "hypermla/base/error.h"

namespace hypermla {
namespace {

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

bool read_number(const std::string& word, double& value) {
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  return error == std::errc{} && end == word.data() + word.size() && std::isfinite(value);
}

}  // namespace

bool Condition::holds(const Signals& signals) const {
  const auto found = signals.find(signal);
  if (found == signals.end()) return false;
  return op == "<" ? found->second < value : found->second >= value;
}

std::string Condition::describe(const Signals& signals) const {
  return fmt::format("{} = {:.4g} {} {:g}", signal, signals.at(signal), op, value);
}

Predicate Predicate::parse(const std::string& text) {
  const std::vector<std::string> words = words_of(text);
  Predicate predicate;
  for (std::size_t i = 0; i < words.size(); i += 4) {
    Condition condition;
    const bool complete = i + 2 < words.size() && (words[i + 1] == "<" || words[i + 1] == ">=") &&
                          read_number(words[i + 2], condition.value);
    const bool ends = i + 3 == words.size();
    if (!complete || !(ends || (words[i + 3] == "and" && i + 4 < words.size())))
      fail("'{}' is no predicate; write conditions such as 'waves < 1 and dram_pct >= 70'", text);
    condition.signal = words[i];
    condition.op = words[i + 1];
    predicate.conditions.push_back(condition);
  }
  if (predicate.conditions.empty()) fail("a predicate without a condition would always hold; state one");
  return predicate;
}

bool Predicate::holds(const Signals& signals) const {
  return std::all_of(conditions.begin(), conditions.end(), [&](const Condition& one) { return one.holds(signals); });
}

std::string Predicate::describe(const Signals& signals) const {
  std::string text;
  for (const Condition& one : conditions) text += (text.empty() ? "" : ", ") + one.describe(signals);
  return text;
}

Gain Gain::parse(const std::string& text) {
  const std::vector<std::string> words = words_of(text);
  Gain gain;
  if (words.size() != 3 || (words[0] != "toward" && words[0] != "excess" && words[0] != "share") ||
      !read_number(words[2], gain.parameter))
    fail("'{}' estimates no gain; write toward, excess or share, a metric and a number: 'toward tensor_pct 70'", text);
  if (!(gain.parameter > 0) || (words[0] == "share" && gain.parameter > 1))
    fail("'{}' estimates no gain; its number must be positive, and a share at most 1", text);
  gain.formula = words[0];
  gain.signal = words[1];
  return gain;
}

double Gain::percent(const Signals& signals) const {
  const auto found = signals.find(signal);
  if (found == signals.end()) return 0;
  const double value = found->second;
  double share = 0;
  if (formula == "toward")
    share = 1 - value / parameter;
  else if (formula == "excess")
    share = value > 0 ? 1 - parameter / value : 0;
  else
    share = value / 100 * parameter;
  if (const auto fraction = signals.find("roofline_fraction"); fraction != signals.end())
    share = std::min(share, 1 - fraction->second);
  return std::round(100 * std::clamp(share, 0.0, 1.0));
}

}  // namespace hypermla
