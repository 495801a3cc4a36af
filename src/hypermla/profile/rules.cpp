#include "hypermla/profile/rules.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "hypermla/base/error.h"
#include "hypermla/base/json_file.h"

namespace hypermla {
namespace {

constexpr int kRulesSchema = 1;

}  // namespace

Rules::Rule Rules::parse_rule(const Json& json, const std::string& file, Kind kind) try {
  Rule rule;
  rule.name = json.at(kind == Kind::classification ? "class" : "name");
  if (kind == Kind::opportunity) rule.id = json.at("id");
  rule.why = json.at("why");
  for (const Json& when : json.at("when")) {
    Condition condition{when.at(0), when.at(1), when.at(2), when.at(3)};
    if (condition.op != "<" && condition.op != ">=")
      fail("{}: '{}' compares with '{}'; use < or >=", file, rule.name, condition.op);
    if (!(condition.margin > 0)) fail("{}: '{}' has a margin that is not positive", file, rule.name);
    rule.when.push_back(condition);
  }
  if (rule.when.empty()) fail("{}: '{}' has no condition", file, rule.name);
  if (kind == Kind::opportunity) {
    const Json& gain = json.at("gain");
    rule.gain = {gain.at(0), gain.at(1), gain.at(2)};
    if (const std::string& formula = rule.gain.formula;
        formula != "toward" && formula != "excess" && formula != "share")
      fail("{}: '{}' estimates its gain by '{}'; use toward, excess or share", file, rule.name, formula);
  }
  return rule;
} catch (const Json::exception&) {
  fail("{}: the rule {} is not as src/hypermla/profile/rules.h describes", file, json.dump());
}

Rules Rules::parse(const Json& json, const std::string& name) try {
  if (json.value("schema", 0) != kRulesSchema)
    fail("{} is not a file of profile rules of schema {}", name, kRulesSchema);
  Rules rules;
  auto parse_all = [&](const char* list, Kind kind) {
    std::vector<Rule> parsed;
    for (const Json& rule : json.value(list, Json::array())) parsed.push_back(parse_rule(rule, name, kind));
    return parsed;
  };
  rules.classes_ = parse_all("classes", Kind::classification);
  rules.issues_ = parse_all("issues", Kind::issue);
  rules.opportunities_ = parse_all("opportunities", Kind::opportunity);
  return rules;
} catch (const Json::exception&) {
  fail("{} is not a file of profile rules; restore it from the repository", name);
}

Rules Rules::load(const std::filesystem::path& path) {
  const Json json = read_json(path);
  if (json.is_discarded()) fail("{} is not JSON; restore it from the repository", path.string());
  return parse(json, path.string());
}

bool Rules::holds(const Condition& condition, const Signals& signals) {
  const auto found = signals.find(condition.signal);
  if (found == signals.end()) return false;
  return condition.op == "<" ? found->second < condition.value : found->second >= condition.value;
}

bool Rules::holds(const Rule& rule, const Signals& signals) {
  return std::all_of(rule.when.begin(), rule.when.end(), [&](const Condition& one) { return holds(one, signals); });
}

std::string Rules::describe(const Condition& condition, const Signals& signals) {
  return fmt::format("{} = {:.4g} {} {:g}", condition.signal, signals.at(condition.signal), condition.op,
                     condition.value);
}

Bottleneck Rules::classify(const Signals& signals) const {
  for (const Rule& rule : classes_) {
    if (!holds(rule, signals)) continue;
    double distance = HUGE_VAL;
    Bottleneck found{.kind = rule.name, .why = rule.why};
    for (const Condition& condition : rule.when) {
      distance = std::min(distance, std::abs(signals.at(condition.signal) - condition.value) / condition.margin);
      found.evidence.push_back(describe(condition, signals));
    }
    found.confidence = distance >= 1 ? "high" : distance >= 0.4 ? "medium" : "low";
    return found;
  }
  return {.kind = "unknown", .confidence = "low", .why = "no rule applies to what was measured"};
}

std::vector<Issue> Rules::issues(const Signals& signals) const {
  std::vector<Issue> all;
  for (const Rule& rule : issues_)
    if (holds(rule, signals)) all.push_back({rule.name, describe(rule.when.front(), signals), rule.why});
  return all;
}

// The share of the time that would go, as a fraction.
double Rules::gain(const Rule& rule, const Signals& signals) {
  const auto& [formula, signal, parameter] = rule.gain;
  const auto found = signals.find(signal);
  if (found == signals.end()) return 0;
  const double value = found->second;
  double share = 0;
  if (formula == "toward")
    share = 1 - value / parameter;  // a rate that rises to `parameter`
  else if (formula == "excess")
    share = value > 0 ? 1 - parameter / value : 0;  // an amount that falls to `parameter`
  else
    share = value / 100 * parameter;  // `parameter` of a percentage of the time goes
  // Nothing gets faster than the roofline.
  if (const auto fraction = signals.find("roofline_fraction"); fraction != signals.end())
    share = std::min(share, 1 - fraction->second);
  return std::clamp(share, 0.0, 1.0);
}

std::vector<Opportunity> Rules::opportunities(const Signals& signals, std::size_t count) const {
  std::vector<Opportunity> found;
  for (const Rule& rule : opportunities_) {
    if (!holds(rule, signals)) continue;
    const double percent = std::round(100 * gain(rule, signals));
    if (percent >= 1) found.push_back({rule.id, rule.name, percent, describe(rule.when.front(), signals), rule.why});
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Opportunity& a, const Opportunity& b) { return a.gain_percent > b.gain_percent; });
  found.resize(std::min(count, found.size()));
  return found;
}

std::vector<std::string> Rules::signals() const {
  std::set<std::string> names;
  for (const auto* rules : {&classes_, &issues_, &opportunities_})
    for (const Rule& rule : *rules) {
      for (const Condition& condition : rule.when) names.insert(condition.signal);
      if (!rule.gain.signal.empty()) names.insert(rule.gain.signal);
    }
  return {names.begin(), names.end()};
}

void assess(Profile& profile, const Rules& rules) {
  double longest = -1;
  for (ProfileStage& stage : profile.stages) {
    stage.signals = stage_signals(profile, stage);
    stage.bottleneck = rules.classify(stage.signals);
    stage.issues = rules.issues(stage.signals);
    const auto time = stage.signals.find("time_us");
    const double microseconds = time == stage.signals.end() ? 0 : time->second;
    if (microseconds <= longest || !stage.group.empty()) continue;
    longest = microseconds;
    profile.bottleneck = stage.bottleneck;
    profile.bottleneck->stage = stage.name;
    profile.opportunities = rules.opportunities(stage.signals, 3);
  }
}

}  // namespace hypermla
