// Two profiles of one problem: is the second faster?
#pragma once

#include <filesystem>
#include <string>

#include "hypermla/base/fields.h"

namespace hypermla {

// By intervals, 5th to 95th percentile of the repetitions: apart is FASTER or SLOWER; medians within `noise` of each
// other are SAME; anything else is UNCLEAR. Said in time and, where both runs know their clock, in cycles; when
// those two disagree, the clock decided and not the kernel: UNCLEAR.
enum class Verdict { same, faster, slower, unclear };
std::string verdict_name(Verdict verdict);  // "SAME", ...

struct Interval {
  double low = 0, median = 0, high = 0;
};
Verdict compare_intervals(const Interval& a, const Interval& b, double noise);

// {"verdict", "why", "time": {flavour: {...}}, "deltas": [{"stage", "name", "a", "b", "change_percent"}, ...]} of B
// against A, the largest relevant delta first. Throws Error when the problems differ.
Json compare_profiles(const Json& a, const Json& b, double noise = 0.01);
std::string render_comparison(const Json& comparison);  // Markdown

// The profile.json of a run: its directory or the file itself.
Json load_profile(const std::filesystem::path& path);

}  // namespace hypermla
