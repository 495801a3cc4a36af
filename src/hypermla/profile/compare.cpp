#include "hypermla/profile/compare.h"

#include <algorithm>
#include <cmath>

#include "hypermla/base/error.h"
#include "hypermla/plan/registry.h"

namespace hypermla {
namespace {

// Signals by relevance: what the time is made of first. A change smaller than a percent (of the value, or one point
// of a percentage) is noise.
constexpr const char* kSignals[] = {
    "time_us",           "tensor_pct", "dram_pct",        "executed_flops",   "dram_bytes",  "occupancy_pct",
    "l2_hit_pct",        "xu_pct",     "stall_wgmma_pct", "stall_memory_pct", "sm_idle_pct", "spill_instructions",
    "bank_conflict_pct", "registers",  "shared_bytes",    "frame_bytes",      "waves",       "blocks"};

// Repetitions of a time that says which of two kernels is faster. By simulation, with normal, uniform and exponential
// noise: the intervals of kernels that are alike lie apart once in 8 comparisons of three with three repetitions, once
// in 80 of five with five, once in 800 of seven with seven, which is what a burst has.
constexpr int kFewest = 7;

Interval interval(const Times& times, double scale = 1) {
  return {times.low_us * scale, times.median_us * scale, times.high_us * scale};
}

double percent(double a, double b) { return a != 0 ? 100 * (b / a - 1) : b == 0 ? 0 : 100; }

void add_signal(std::vector<Comparison::Delta>& deltas, const std::string& stage, const std::string& name, double a,
                double b) {
  const bool points = name.ends_with("_pct");
  const double change = points ? b - a : percent(a, b);
  if (std::abs(change) >= 1) deltas.push_back({stage, name, a, b, change, points ? "points" : "%"});
}

void add_stage(std::vector<Comparison::Delta>& deltas, const ProfileStage& a, const ProfileStage& b) {
  for (const char* name : kSignals)
    if (a.signals.count(name) && b.signals.count(name))
      add_signal(deltas, b.name, name, a.signals.at(name), b.signals.at(name));
  const auto number = [](const Json& value) {  // a switch is 0 or 1
    return value.is_boolean() ? double(value.get<bool>()) : value.is_number() ? value.get<double>() : std::nan("");
  };
  for (const auto& [field, value] : a.tiling.items()) {
    const double x = number(value), y = number(b.tiling.value(field, Json()));
    if (std::abs(x - y) > 0) deltas.push_back({b.name, "tiling " + field, x, y, percent(x, y), "%"});
  }
}

std::vector<Comparison::Delta> find_deltas(const Profile& a, const Profile& b) {
  std::vector<Comparison::Delta> all;
  // Versions rename their kernels; a stage is the same one when its name or, in equal pipelines, its place is.
  const bool by_place = a.stages.size() == b.stages.size();
  for (std::size_t i = 0; i < a.stages.size(); ++i)
    for (std::size_t j = 0; j < b.stages.size(); ++j)
      if (by_place ? i == j : a.stages[i].name == b.stages[j].name) add_stage(all, a.stages[i], b.stages[j]);
  return all;
}

Comparison::Row compare_times(const std::string& name, const Times& a, const Times& b, bool same_device, double noise) {
  Comparison::Row row{name,
                      interval(a),
                      interval(b),
                      percent(a.median_us, b.median_us),
                      compare_intervals(interval(a), interval(b), noise),
                      {},
                      {}};
  if (same_device && a.sm_mhz && b.sm_mhz) {
    const Interval x = interval(a, *a.sm_mhz), y = interval(b, *b.sm_mhz);
    row.cycles = {x.median, y.median, percent(x.median, y.median), compare_intervals(x, y, noise)};
  }
  row.repetitions = std::min(a.repetitions, b.repetitions);
  if (row.repetitions < kFewest) {
    row.verdict = Verdict::unclear;
    if (row.cycles) row.cycles->verdict = Verdict::unclear;
  }
  return row;
}

// Versions of one design need not offer the same fields. One that only the other has says nothing at its default.
bool same_problem(const Profile& a, const Profile& b) {
  if (a.problem == b.problem) return true;
  const std::vector<KernelEntry> all = Registry::instance().all();
  const auto entry_of = [&](const Profile& run) {
    return std::find_if(all.begin(), all.end(), [&](const KernelEntry& one) { return one.full_name() == run.kernel; });
  };
  const auto first = entry_of(a), second = entry_of(b);
  if (first == all.end() || second == all.end() || first->design != second->design) return false;
  const auto within = [](const Profile& run, const KernelEntry& entry, const Json& other) {
    const Json defaults = to_json(entry.make()->problem_fields());
    for (const auto& [field, value] : run.problem.items())
      if (value != (other.contains(field) ? other[field] : defaults.value(field, Json()))) return false;
    return true;
  };
  return within(a, *first, b.problem) && within(b, *second, a.problem);
}

bool clock_moved(const Comparison::Row& row) { return row.cycles && row.cycles->verdict != row.verdict; }

// `verdict`: that of this time, where the headline's is another.
std::string reason(const Comparison::Row& row, const std::string& verdict = "") {
  std::string text =
      fmt::format("{}{} {:.1f} us against {:.1f} us ({:+.1f} %)", row.time,
                  verdict.empty() ? "" : " is " + verdict + ",", row.b.median, row.a.median, row.change_percent);
  if (row.cycles) text += fmt::format(", in cycles {:+.1f} %", row.cycles->change_percent);
  if (clock_moved(row))
    text += fmt::format("; time says {} and cycles say {}: the clock moved", verdict_name(row.verdict),
                        verdict_name(row.cycles->verdict));
  if (row.repetitions < kFewest)
    text += fmt::format("; {} repetitions are too few, profile with --bench_runs={} or more", row.repetitions, kFewest);
  return text;
}

}  // namespace

std::string verdict_name(Verdict verdict) {
  constexpr const char* kNames[] = {"SAME", "FASTER", "SLOWER", "UNCLEAR"};
  return kNames[int(verdict)];
}

Verdict compare_intervals(const Interval& a, const Interval& b, double noise) {
  if (std::abs(b.median / a.median - 1) <= noise) return Verdict::same;
  if (b.high < a.low) return Verdict::faster;
  if (b.low > a.high) return Verdict::slower;
  return Verdict::unclear;
}

Comparison compare_profiles(const Profile& a, const Profile& b, double noise) {
  for (const Profile* run : {&a, &b})
    run->timing.for_each([&](const char* name, const Times& times) {
      if (!is_possible(times))
        fail("the {} time of run {} is {}, which no run takes; profile it again", name, run == &a ? "A" : "B",
             to_text(times));
    });
  if (!same_problem(a, b))
    fail("the runs are of different problems ({} and {}); profile both with the same flags", a.problem.dump(),
         b.problem.dump());
  Comparison result;
  result.kernel_a = a.kernel;
  result.kernel_b = b.kernel;
  result.problem = a.problem;
  const bool same_device = a.device.name == b.device.name;
  if (!same_device)
    result.note = fmt::format("different devices: {} and {}", a.device.name, b.device.name);
  else if (a.clocks && b.clocks && a.clocks->locked != b.clocks->locked)
    result.note = fmt::format("only run {} had its clocks locked", a.clocks->locked ? "A" : "B");
  auto compare = [&](const char* name, const Times& x, const Times& y) {
    result.times.push_back(compare_times(name, x, y, same_device, noise));
  };
  compare("cold", a.timing.cold, b.timing.cold);
  compare("burst", a.timing.burst, b.timing.burst);
  if (a.timing.sustained && b.timing.sustained) compare("sustained", *a.timing.sustained, *b.timing.sustained);
  const Comparison::Row& first = result.times.front();
  result.verdict = clock_moved(first) ? Verdict::unclear : first.verdict;
  result.why = reason(first);
  // What is slower in any of the times passes no gate, be it that its clock moved: more power lowers it.
  const auto slower = std::find_if(result.times.begin() + 1, result.times.end(),
                                   [](const Comparison::Row& row) { return row.verdict == Verdict::slower; });
  if (slower != result.times.end() && result.verdict != Verdict::slower) {
    const bool doubtful = result.verdict == Verdict::faster || clock_moved(*slower);
    result.why = reason(*slower, doubtful ? verdict_name(Verdict::slower) : "") + "; " +
                 reason(first, verdict_name(result.verdict));
    result.verdict = doubtful ? Verdict::unclear : Verdict::slower;
  }
  if (!same_device) {
    result.verdict = Verdict::unclear;
    result.why = "the devices differ; " + result.why;
  }
  if (a.bottleneck && b.bottleneck) {
    result.bottleneck_a = a.bottleneck->kind;
    result.bottleneck_b = b.bottleneck->kind;
  }
  result.deltas = find_deltas(a, b);
  return result;
}

Json to_json(const Comparison& comparison) {
  Json json = {{"a", comparison.kernel_a}, {"b", comparison.kernel_b}, {"problem", comparison.problem}};
  if (!comparison.note.empty()) json["note"] = comparison.note;
  for (const Comparison::Row& row : comparison.times) {
    Json& time = json["time"][row.time] = {{"a_us", row.a.median},
                                           {"a_low_us", row.a.low},
                                           {"a_high_us", row.a.high},
                                           {"b_us", row.b.median},
                                           {"b_low_us", row.b.low},
                                           {"b_high_us", row.b.high},
                                           {"change_percent", row.change_percent},
                                           {"verdict", verdict_name(row.verdict)}};
    if (row.cycles)
      time.update({{"a_cycles", row.cycles->a},
                   {"b_cycles", row.cycles->b},
                   {"cycles_change_percent", row.cycles->change_percent},
                   {"cycles_verdict", verdict_name(row.cycles->verdict)}});
  }
  json["verdict"] = verdict_name(comparison.verdict);
  json["why"] = comparison.why;
  if (!comparison.bottleneck_a.empty())
    json["bottleneck"] = {{"a", comparison.bottleneck_a}, {"b", comparison.bottleneck_b}};
  json["deltas"] = Json::array();
  for (const auto& [stage, name, a, b, change, unit] : comparison.deltas)
    json["deltas"].push_back(
        {{"stage", stage}, {"name", name}, {"a", a}, {"b", b}, {"change", change}, {"unit", unit}});
  return json;
}

std::string render_comparison(const Comparison& comparison) {
  std::string text = fmt::format("{}: {}\n", verdict_name(comparison.verdict), comparison.why);
  if (!comparison.note.empty()) text += "Note: " + comparison.note + ".\n";
  if (!comparison.bottleneck_a.empty())
    text += fmt::format("Bottleneck: {} before, {} now.\n", comparison.bottleneck_a, comparison.bottleneck_b);
  text += "\n| time | A us | B us | change | cycles | verdict |\n|---|---|---|---|---|---|\n";
  const auto spread = [](const Interval& one) {
    return fmt::format("{:.1f} ({:.1f} to {:.1f})", one.median, one.low, one.high);
  };
  for (const Comparison::Row& row : comparison.times)
    text += fmt::format("| {} | {} | {} | {:+.1f} % | {} | {} |\n", row.time, spread(row.a), spread(row.b),
                        row.change_percent, row.cycles ? fmt::format("{:+.1f} %", row.cycles->change_percent) : "-",
                        verdict_name(row.verdict));
  if (comparison.deltas.empty()) return text + "\nNothing else changed by a percent or more.\n";
  text += "\n| stage | what | A | B | change |\n|---|---|---|---|---|\n";
  for (const auto& [stage, name, a, b, change, unit] : comparison.deltas)
    text += fmt::format("| {} | {} | {:.5g} | {:.5g} | {:+.1f} {} |\n", stage, name, a, b, change, unit);
  return text;
}

}  // namespace hypermla
