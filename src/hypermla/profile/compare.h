// Two profiles of one problem: is the second faster?
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "hypermla/profile/profile.h"

namespace hypermla {

// By intervals, 5th to 95th percentile of the repetitions: apart is FASTER or SLOWER; medians within `noise` of each
// other are SAME; anything else is UNCLEAR, and so is what fewer than seven repetitions or two devices say. Said in
// time and, where both runs know their clock, in cycles; when those two disagree, the clock decided and not the
// kernel: UNCLEAR.
enum class Verdict { same, faster, slower, unclear };
std::string verdict_name(Verdict verdict);  // "SAME", ...

struct Interval {
  double low = 0, median = 0, high = 0;
};
Verdict compare_intervals(const Interval& a, const Interval& b, double noise);

// Of B against A.
struct Comparison {
  struct Cycles {
    double a = 0, b = 0, change_percent = 0;
    Verdict verdict = Verdict::unclear;
  };
  struct Row {
    std::string time;  // "cold", "burst" or "sustained"
    Interval a, b;     // in microseconds
    double change_percent = 0;
    Verdict verdict = Verdict::unclear;
    std::optional<Cycles> cycles;  // where both runs are of one device and know their clock
    int repetitions = 0;           // of the run that has fewer
  };
  struct Delta {
    std::string stage, name;
    double a = 0, b = 0, change = 0;
    std::string unit;  // of the change: "%" or "points"
  };
  std::string kernel_a, kernel_b;
  Json problem;
  std::string note;        // what makes them hard to compare; may be empty
  std::vector<Row> times;  // the first decides, unless another is SLOWER
  Verdict verdict = Verdict::unclear;
  std::string why;                         // what decided first
  std::string bottleneck_a, bottleneck_b;  // empty where a run was not judged
  std::vector<Delta> deltas;               // what changed by a percent or more, the most relevant first
};

// Throws Error when the problems differ, or a time is none.
Comparison compare_profiles(const Profile& a, const Profile& b, double noise = 0.01);
Json to_json(const Comparison& comparison);
std::string render_comparison(const Comparison& comparison);  // Markdown

}  // namespace hypermla
