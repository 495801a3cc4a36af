// What bounds a kernel and what to try next, from numbers: a small engine over conf/profile_rules.json, so that
// thresholds are data that anyone can read, argue with and change.
//
//   signals   named numbers of a stage: counters under their own names, and quantities made from them, times and costs
//   classes   in order; the first whose conditions all hold names the bottleneck
//   issues    all whose conditions hold: what stands out, whatever the class
//   opportunities   all whose conditions hold, with an estimate of the gain; ranked by it
//
// A condition is [signal, operator, value, margin]. One whose signal is missing does not hold. The confidence of a
// class is how far the weakest of its conditions is from tipping over, in units of `margin`: high from 1, medium
// from 0.4, else low.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "hypermla/profile/signals.h"

namespace hypermla {

class Rules {
 public:
  // Throws Error naming the file and the rule that is not as described above.
  static Rules load(const std::filesystem::path& path);
  static Rules parse(const Json& rules, const std::string& name);

  Bottleneck classify(const Signals& signals) const;
  // In the order of the file.
  std::vector<Issue> issues(const Signals& signals) const;
  // The most promising first.
  std::vector<Opportunity> opportunities(const Signals& signals, std::size_t count) const;
  // All signals that some rule reads.
  std::vector<std::string> signals() const;

 private:
  struct Condition {
    std::string signal, op;
    double value = 0, margin = 1;
  };
  struct Gain {
    std::string formula, signal;
    double parameter = 0;
  };
  struct Rule {
    std::string name, id, why;
    std::vector<Condition> when;
    Gain gain;  // of an opportunity
  };
  enum class Kind { classification, issue, opportunity };
  static Rule parse_rule(const Json& rule, const std::string& file, Kind kind);
  static bool holds(const Condition& condition, const Signals& signals);
  static std::string describe(const Condition& condition, const Signals& signals);
  static bool holds(const Rule& rule, const Signals& signals);
  static double gain(const Rule& rule, const Signals& signals);

  std::vector<Rule> classes_, issues_, opportunities_;
};

// Gives every stage its signals, bottleneck and issues, and the profile the bottleneck and the three best opportunities
// of the stage that takes longest.
void assess(Profile& profile, const Rules& rules);

}  // namespace hypermla
