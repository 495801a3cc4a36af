#include "hypermla/profile/compare.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"

namespace hypermla {
namespace {

// Signals by relevance: what the time is made of first. A change smaller than a percent (of the value, or one point
// of a percentage) is noise.
constexpr const char* kSignals[] = {
    "time_us",           "tensor_pct", "dram_pct",        "executed_flops",   "dram_bytes",  "occupancy_pct",
    "l2_hit_pct",        "xu_pct",     "stall_wgmma_pct", "stall_memory_pct", "sm_idle_pct", "spill_instructions",
    "bank_conflict_pct", "registers",  "shared_bytes",    "frame_bytes",      "waves",       "blocks"};

Interval interval(const Json& timing, double scale) {
  return {timing.at("low_us").get<double>() * scale, timing.at("median_us").get<double>() * scale,
          timing.at("high_us").get<double>() * scale};
}

double percent(double a, double b) { return a != 0 ? 100 * (b / a - 1) : b == 0 ? 0 : 100; }

std::optional<Json> delta(const std::string& stage, const std::string& name, double a, double b) {
  const bool points = name.size() > 4 && name.compare(name.size() - 4, 4, "_pct") == 0;
  const double change = points ? b - a : percent(a, b);
  if (!(std::abs(change) >= 1)) return std::nullopt;
  return Json{{"stage", stage}, {"name", name},     {"a", a},
              {"b", b},         {"change", change}, {"unit", points ? "points" : "%"}};
}

Json deltas(const Json& a, const Json& b) {
  Json all = Json::array();
  for (const Json& left : a.at("stages"))
    for (const Json& right : b.at("stages")) {
      // Versions rename their kernels; a stage is the same one when its name or, in equal pipelines, its place is.
      const std::size_t i = std::size_t(&left - &a["stages"][0]), j = std::size_t(&right - &b["stages"][0]);
      const bool same = a["stages"].size() == b["stages"].size() ? i == j : left.at("name") == right.at("name");
      if (!same) continue;
      const Json x = left.value("signals", Json::object()), y = right.value("signals", Json::object());
      for (const char* name : kSignals)
        if (x.contains(name) && y.contains(name))
          if (auto one = delta(right.at("name"), name, x[name], y[name])) all.push_back(*one);
      for (const auto& [field, value] : left.at("tiling").items())
        if (value.is_number() && right.at("tiling").contains(field) && right["tiling"][field] != value)
          all.push_back({{"stage", right.at("name")},
                         {"name", "tiling " + field},
                         {"a", value},
                         {"b", right["tiling"][field]},
                         {"change", percent(value, right["tiling"][field])},
                         {"unit", "%"}});
    }
  return all;
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

Json load_profile(const std::filesystem::path& path) {
  std::error_code ignored;
  const auto file = std::filesystem::is_directory(path, ignored) ? path / "profile.json" : path;
  Json profile = Json::parse(read_file(file), nullptr, false);
  if (!profile.is_object() || !profile.contains("timing") || !profile.contains("stages"))
    fail("{} is not a profile; give the directory of a run below out/profiles, or its profile.json", file.string());
  return profile;
}

Json compare_profiles(const Json& a, const Json& b, double noise) {
  if (a.at("problem") != b.at("problem"))
    fail("the runs are of different problems ({} and {}); profile both with the same flags", a["problem"].dump(),
         b["problem"].dump());
  Json result;
  result["a"] = a.at("kernel");
  result["b"] = b.at("kernel");
  result["problem"] = a["problem"];
  const bool same_device = a.at("device").at("name") == b.at("device").at("name");
  if (!same_device)
    result["note"] = fmt::format("different devices: {} and {}", a["device"]["name"].get<std::string>(),
                                 b["device"]["name"].get<std::string>());
  Verdict verdict = Verdict::unclear;
  std::string why = "the runs share no kind of timing";
  result["time"] = Json::object();
  for (const char* flavour : {"cold", "burst", "sustained"}) {  // the last one found is not better: the first decides
    if (!a.at("timing").contains(flavour) || !b.at("timing").contains(flavour)) continue;
    const Json &x = a["timing"][flavour], &y = b["timing"][flavour];
    const Verdict in_time = compare_intervals(interval(x, 1), interval(y, 1), noise);
    Json row = {{"a_us", x["median_us"]},
                {"b_us", y["median_us"]},
                {"change_percent", percent(x["median_us"], y["median_us"])},
                {"verdict", verdict_name(in_time)}};
    Verdict both = in_time;
    std::string reason =
        fmt::format("{} {:.1f} us against {:.1f} us ({:+.1f} %)", flavour, y["median_us"].get<double>(),
                    x["median_us"].get<double>(), row["change_percent"].get<double>());
    if (same_device && x.contains("sm_MHz") && y.contains("sm_MHz")) {
      const Interval left = interval(x, x["sm_MHz"]), right = interval(y, y["sm_MHz"]);
      const Verdict in_cycles = compare_intervals(left, right, noise);
      row["a_cycles"] = left.median;
      row["b_cycles"] = right.median;
      row["cycles_change_percent"] = percent(left.median, right.median);
      row["cycles_verdict"] = verdict_name(in_cycles);
      reason += fmt::format(", in cycles {:+.1f} %", row["cycles_change_percent"].get<double>());
      if (in_cycles != in_time) {
        both = Verdict::unclear;
        reason += fmt::format("; time says {} and cycles say {}: the clock moved", verdict_name(in_time),
                              verdict_name(in_cycles));
      }
    }
    if (result["time"].empty()) {
      verdict = both;
      why = reason;
    }
    result["time"][flavour] = row;
  }
  result["verdict"] = verdict_name(verdict);
  result["why"] = why;
  if (a.contains("classification") && b.contains("classification"))
    result["bottleneck"] = {{"a", a["classification"]["class"]}, {"b", b["classification"]["class"]}};
  result["deltas"] = deltas(a, b);
  return result;
}

std::string render_comparison(const Json& comparison) {
  std::string text =
      fmt::format("{}: {}\n", comparison.at("verdict").get<std::string>(), comparison.at("why").get<std::string>());
  if (comparison.contains("note")) text += "Note: " + comparison["note"].get<std::string>() + ".\n";
  if (comparison.contains("bottleneck"))
    text += fmt::format("Bottleneck: {} before, {} now.\n", comparison["bottleneck"]["a"].get<std::string>(),
                        comparison["bottleneck"]["b"].get<std::string>());
  text += "\n| time | A us | B us | change | cycles | verdict |\n|---|---|---|---|---|---|\n";
  for (const auto& [flavour, row] : comparison.at("time").items())
    text += fmt::format("| {} | {:.1f} | {:.1f} | {:+.1f} % | {} | {} |\n", flavour, row["a_us"].get<double>(),
                        row["b_us"].get<double>(), row["change_percent"].get<double>(),
                        row.contains("cycles_change_percent")
                            ? fmt::format("{:+.1f} %", row["cycles_change_percent"].get<double>())
                            : "-",
                        row["verdict"].get<std::string>());
  if (comparison.at("deltas").empty()) return text + "\nNothing else changed by a percent or more.\n";
  text += "\n| stage | what | A | B | change |\n|---|---|---|---|---|\n";
  for (const Json& one : comparison["deltas"])
    text += fmt::format("| {} | {} | {:.5g} | {:.5g} | {:+.1f} {} |\n", one["stage"].get<std::string>(),
                        one["name"].get<std::string>(), one["a"].get<double>(), one["b"].get<double>(),
                        one["change"].get<double>(), one["unit"].get<std::string>());
  return text;
}

}  // namespace hypermla
