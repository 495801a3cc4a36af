// What bounds a kernel, from numbers: a small engine over conf/profile_rules.json, so that thresholds are data that
// you can read, argue with and change. What to try next comes from the knowledge cards: knowledge/cards.h.
//
//   signals   named numbers of a stage: counters under their own names, and quantities made from them, times and costs
//   classes   in order; the first whose conditions all hold names the bottleneck
//   issues    all whose conditions hold: what stands out, in any class
//
// A condition is [signal, operator, value], of a class [signal, operator, value, margin]. One whose signal is missing
// does not hold. The confidence of a class is how far the weakest of its conditions is from tipping over, in units of
// `margin`: high from 1, but not by time and cost alone; medium from 0.4, else low.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "hypermla/knowledge/cards.h"
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

 private:
  struct Judgement {
    Condition condition;
    double margin = 1;
  };
  struct Rule {
    std::string name, why;
    std::vector<Judgement> when;
    bool holds(const Signals& signals) const;
  };
  static Rule parse_rule(const Json& rule, const std::string& file, bool is_class);

  std::vector<Rule> classes_, issues_;
};

// The cards that a stage fires, with what they promise of its own time.
std::vector<CardMatch> match_cards(const Profile& profile, const ProfileStage& stage, const Cards& cards);
// The part of the profile's time that a stage takes; of those that are judged (no members of groups) they add up to 1.
double share_of_time(const Profile& profile, const ProfileStage& stage);
// What the cards advise for all stages, by what that gains of the whole: the most promising `count` that are not
// refuted for the stage's kernel, then all that are. Less than a percent of the whole is left out.
std::vector<Opportunity> advise(const Profile& profile, const Cards& cards, std::size_t count);

// Gives every stage its signals, bottleneck and issues, and the profile the bottleneck of the stage that takes longest
// and what the cards advise.
void assess(Profile& profile, const Rules& rules, const Cards& cards);

}  // namespace hypermla
