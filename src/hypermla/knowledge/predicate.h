// Conditions over named numbers, as rules and knowledge cards state them: "waves < 1 and dram_pct >= 70".
#pragma once

#include <map>
#include <string>
#include <vector>

namespace hypermla {

// Named numbers of one stage of a profile; profile/signals.h makes them.
using Signals = std::map<std::string, double>;

struct Condition {
  std::string signal, op;  // "<" or ">="
  double value = 0;

  // One whose signal is missing does not hold.
  bool holds(const Signals& signals) const;
  // "waves = 0.97 < 1". The signal must be there.
  std::string describe(const Signals& signals) const;
};

// Conditions that must all hold.
struct Predicate {
  std::vector<Condition> conditions;

  // Throws Error for a text that is no such predicate.
  static Predicate parse(const std::string& text);
  bool holds(const Signals& signals) const;
  std::string describe(const Signals& signals) const;  // joined by ", "
};

// How much of a stage's time an idea could save, estimated from one signal; an upper bound that ranks ideas and
// promises nothing. As text:
//   "toward tensor_pct 70"     a rate that rises to 70
//   "excess dram_over_algorithmic_bytes 1"   an amount that falls to 1
//   "share xu_pct 0.4"         of a percentage of the time 0.4 goes
struct Gain {
  std::string formula, signal;
  double parameter = 0;

  static Gain parse(const std::string& text);  // throws Error
  // In percent, rounded; never more than the roofline leaves (the signal roofline_fraction). 0 without the signal.
  double percent(const Signals& signals) const;
};

}  // namespace hypermla
