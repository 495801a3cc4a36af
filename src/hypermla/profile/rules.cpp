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

Rules::Rule Rules::parse_rule(const Json& json, const std::string& file, bool is_class) try {
  const std::set<std::string> known = signal_names();
  Rule rule{json.at(is_class ? "class" : "name"), json.at("why"), {}};
  for (const Json& when : json.at("when")) {
    Judgement judgement{{when.at(0), when.at(1), when.at(2)}};
    if (is_class) judgement.margin = when.at(3);
    const auto& [signal, op, value] = judgement.condition;
    if (op != "<" && op != ">=") fail("{}: '{}' compares with '{}'; use < or >=", file, rule.name, op);
    if (!(judgement.margin > 0)) fail("{}: '{}' has a margin that is not positive", file, rule.name);
    if (!known.count(signal))
      fail("{}: '{}' reads the signal '{}', which no profile has; did you mean '{}'?", file, rule.name, signal,
           nearest(signal, {known.begin(), known.end()}));
    rule.when.push_back(judgement);
  }
  if (rule.when.empty()) fail("{}: '{}' has no condition", file, rule.name);
  return rule;
} catch (const Json::exception&) {
  fail("{}: the rule {} is not as src/hypermla/profile/rules.h describes", file, json.dump());
}

Rules Rules::parse(const Json& json, const std::string& name) try {
  if (json.value("schema", 0) != kRulesSchema)
    fail("{} is not a file of profile rules of schema {}; restore it from the repository", name, kRulesSchema);
  Rules rules;
  auto parse_all = [&](const char* list, bool classes) {
    if (!json.contains(list) || !json[list].is_array()) fail("{} has no list '{}'", name, list);
    std::vector<Rule> parsed;
    for (const Json& rule : json[list]) parsed.push_back(parse_rule(rule, name, classes));
    return parsed;
  };
  rules.classes_ = parse_all("classes", true);
  rules.issues_ = parse_all("issues", false);
  return rules;
} catch (const Json::exception&) {
  fail("{} is not a file of profile rules; restore it from the repository", name);
}

Rules Rules::load(const std::filesystem::path& path) {
  const Json json = read_json(path);
  if (json.is_discarded()) fail("{} is not JSON; restore it from the repository", path.string());
  return parse(json, path.string());
}

bool Rules::Rule::holds(const Signals& signals) const {
  return std::all_of(when.begin(), when.end(), [&](const Judgement& one) { return one.condition.holds(signals); });
}

Bottleneck Rules::classify(const Signals& signals) const {
  for (const Rule& rule : classes_) {
    if (!rule.holds(signals)) continue;
    double distance = HUGE_VAL;
    bool counted = true;  // times and costs are no evidence of what a kernel waits for
    Bottleneck found{.kind = rule.name, .why = rule.why};
    for (const auto& [condition, margin] : rule.when) {
      if (condition.signal.rfind("achieved_", 0) == 0) counted = false;
      distance = std::min(distance, std::abs(signals.at(condition.signal) - condition.value) / margin);
      found.evidence.push_back(condition.describe(signals));
    }
    found.confidence = distance >= 1 && counted ? "high" : distance >= 0.4 ? "medium" : "low";
    return found;
  }
  return {.kind = "unknown", .confidence = "low", .why = "No rule applies to what was measured."};
}

std::vector<Issue> Rules::issues(const Signals& signals) const {
  std::vector<Issue> all;
  for (const Rule& rule : issues_)
    if (rule.holds(signals)) all.push_back({rule.name, rule.when.front().condition.describe(signals), rule.why});
  return all;
}

std::vector<CardMatch> match_cards(const Profile& profile, const ProfileStage& stage, const Cards& cards) {
  // A stage is a kernel of the same language and layer: cute.mla.flash_mla in cute.mla.mla_var6_plus_v5. What was
  // found out about the whole holds for the stage of its name, and for all where none has it.
  const std::string place = profile.kernel.substr(0, profile.kernel.rfind('.') + 1);
  std::vector<std::string> kernels = {place + stage.name};
  for (const std::string& member : stage.members) kernels.push_back(place + member);
  const bool is_stage = std::any_of(profile.stages.begin(), profile.stages.end(),
                                    [&](const ProfileStage& one) { return place + one.name == profile.kernel; });
  if (!is_stage) kernels.push_back(profile.kernel);
  return cards.match(stage_signals(profile, stage), kernels);
}

double share_of_time(const Profile& profile, const ProfileStage& stage) {
  const auto time_of = [&](const ProfileStage& one) {
    const Signals signals = stage_signals(profile, one);
    const auto time = signals.find("time_us");
    return time == signals.end() ? 0 : time->second;
  };
  double all = 0;
  int judged = 0;
  for (const ProfileStage& one : profile.stages) {
    if (!one.group.empty()) continue;
    all += time_of(one);
    ++judged;
  }
  return all > 0 ? time_of(stage) / all : 1.0 / judged;
}

std::vector<Opportunity> advise(const Profile& profile, const Cards& cards, std::size_t count) {
  std::vector<Opportunity> found;
  for (const ProfileStage& stage : profile.stages) {
    if (!stage.group.empty()) continue;
    const double share = share_of_time(profile, stage);
    for (const CardMatch& match : match_cards(profile, stage, cards)) {
      const Card& card = *match.card;
      const double gain = share * match.gain_percent;
      if (gain < 1) continue;
      found.push_back({card.id, card.title, gain, match.trigger, card.advice, "docs/knowledge/" + card.file.string(),
                       match.refuted ? fmt::format("{} ({})", match.refuted->figure, match.refuted->where) : "",
                       profile.stages.size() > 1 ? stage.name : ""});
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const Opportunity& a, const Opportunity& b) {
    return std::pair(!a.refuted.empty(), -a.gain_percent) < std::pair(!b.refuted.empty(), -b.gain_percent);
  });
  const auto refuted =
      std::find_if(found.begin(), found.end(), [](const Opportunity& one) { return !one.refuted.empty(); });
  const auto fresh = std::size_t(refuted - found.begin());
  if (fresh > count) found.erase(found.begin() + std::ptrdiff_t(count), refuted);
  return found;
}

void assess(Profile& profile, const Rules& rules, const Cards& cards) {
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
  }
  profile.opportunities = advise(profile, cards, 3);
}

}  // namespace hypermla
