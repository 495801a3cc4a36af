#include "hypermla/profile/devlog.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <sstream>
#include <string_view>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/base/json_file.h"
#include "hypermla/base/pattern.h"
#include "hypermla/profile/compare.h"
#include "hypermla/profile/profilers.h"
#include "hypermla/profile/signals.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLogs = "docs/log";
constexpr const char* kTable = "| metric | value | before | change |";
constexpr const char* kCold = "duration, cold, us";
constexpr const char* kNotKept = ", not kept here";

// One item of a list, in lines of at most 120 columns.
std::string item(const std::string& name, const std::string& text) {
  std::istringstream words(text);
  std::string all, line = "- " + name + ":";
  for (std::string word; words >> word;) {
    if (line.size() + 1 + word.size() > 120) {
      all += line + "\n";
      line = " ";
    }
    line += " " + word;
  }
  return all + line + "\n";
}

std::string fields_text(const Json& fields) {
  std::string text;
  for (const auto& [name, value] : fields.items())
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", name,
                        value.is_string() ? value.get<std::string>() : value.dump());
  return text;
}

std::string clocks_text(const std::optional<Profile::Clocks>& clocks) {
  return !clocks ? "clocks as found" : clocks->locked ? "clocks locked" : "clocks not locked";
}

// A profile in the repository is a link from docs/log; one elsewhere may be gone tomorrow, and is only named.
std::string link_text(const fs::path& root, const fs::path& path) {
  const fs::path inside = fs::weakly_canonical(path).lexically_relative(fs::weakly_canonical(root));
  if (inside.empty() || *inside.begin() == ".." || *inside.begin() == "out")
    return fmt::format("`{}`{}",
                       path.filename() == "profile.json" ? path.parent_path().filename().string() + "/profile.json"
                                                         : path.filename().string(),
                       kNotKept);
  return fmt::format("[profile](../../{})", inside.generic_string());
}

// The stage that the profile is judged by.
const ProfileStage& judged_stage(const Profile& profile) {
  const auto named = [&](const ProfileStage& stage) {
    return profile.bottleneck && stage.name == profile.bottleneck->stage;
  };
  const auto found = std::find_if(profile.stages.begin(), profile.stages.end(), named);
  if (profile.stages.empty()) fail("the profile of {} has no stage; profile it again", profile.kernel);
  return found == profile.stages.end() ? profile.stages.front() : *found;
}

struct Row {
  const char* name;
  double value;         // NaN: not measured
  bool points = false;  // of a percentage: changes are differences
};

std::vector<Row> rows_of(const Profile& profile) {
  const Signals signals = stage_signals(profile, judged_stage(profile));
  auto counted = [&](const char* signal) {
    const auto found = signals.find(signal);
    return found == signals.end() ? std::nan("") : found->second;
  };
  const Times& burst = profile.timing.burst;
  const auto& sustained = profile.timing.sustained;
  return {{kCold, profile.timing.cold.median_us},
          {"duration, burst, us", burst.median_us},
          {"duration, sustained, us", sustained ? sustained->median_us : std::nan("")},
          {"TFLOP/s", burst.tflops},
          {"GB/s", burst.gbps},
          {"occupancy, %", counted("occupancy_pct"), true},
          {"tensor pipe, %", counted("tensor_pct"), true}};
}

std::string figure_text(double value) {
  return value < 10 ? fmt::format("{:.2f}", value) : fmt::format("{:.1f}", value);
}

// What comes from profiles and never changes: everything but the judgement. `earlier`: as entries have it that were
// written before the table had a cold time and a verdict.
std::string measured_half(const fs::path& root, const DevlogRun& run, const std::optional<DevlogRun>& baseline,
                          bool earlier = false) {
  const Profile& now = run.profile;
  const auto& device = now.device;
  std::string text = item(
      "Measured", fmt::format("{} ({}{}), {}, {}, mode {}, {}, {}", device.name, device.arch,
                              device.driver.empty() ? "" : ", driver " + device.driver, clocks_text(now.clocks),
                              fields_text(now.problem), now.mode, now.date.substr(0, 10), link_text(root, run.path)));
  if (baseline)
    text += item("Baseline",
                 fmt::format("{}{}, {}, {}", baseline->profile.kernel,
                             baseline->profile.device.name == device.name ? "" : " on " + baseline->profile.device.name,
                             baseline->profile.date.substr(0, 10), link_text(root, baseline->path)));
  text += fmt::format("\n{}\n|---|---|---|---|\n", kTable);
  const std::vector<Row> values = rows_of(now), before = baseline ? rows_of(baseline->profile) : std::vector<Row>();
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (earlier && std::string_view(values[i].name) == kCold) continue;
    const double value = values[i].value, old = baseline ? before[i].value : std::nan("");
    std::string change = "-";
    if (std::isfinite(value) && std::isfinite(old) && (values[i].points || old != 0))
      change = values[i].points ? fmt::format("{:+.1f} points", value - old)
                                : fmt::format("{:+.1f} %", 100 * (value / old - 1));
    text += fmt::format("| {} | {} | {} | {} |\n", values[i].name,
                        std::isfinite(value) ? figure_text(value) : "not measured",
                        std::isfinite(old) ? figure_text(old) : "-", change);
  }
  if (baseline && !earlier)
    text += fmt::format("| verdict | {} | - | - |\n", verdict_name(compare_profiles(baseline->profile, now).verdict));
  return text + "\n";
}

std::string judgement(const Profile& profile) {
  const Bottleneck found = profile.bottleneck.value_or(Bottleneck{.kind = "not judged"});
  return item("Bottleneck", fmt::format("{}{}{}{}", found.kind,
                                        found.confidence.empty() ? "" : " (confidence " + found.confidence + ")",
                                        found.evidence.empty() ? "" : ": ", fmt::join(found.evidence, ", ")));
}

void collect_numbers(const Json& json, const std::string& key,
                     const std::function<void(const std::string&, double)>& take) {
  if (json.is_object())
    for (const auto& [name, value] : json.items()) collect_numbers(value, name, take);
  else if (json.is_array())
    for (const Json& value : json) collect_numbers(value, key, take);
  else if (json.is_number())
    take(key, json.get<double>());
}

using Figures = std::map<std::string, std::vector<double>>;  // by their units, as texts write them

// All figures of a record.
Figures figures_of(const Json& record) {
  Figures held;
  auto ends = [](const std::string& key, const char* end) { return key.ends_with(end); };
  collect_numbers(record, "", [&](const std::string& key, double value) {
    if (ends(key, "_us") || key == "host_us_per_run") held["us"].push_back(value);
    if (ends(key, "_pct") || ends(key, ".pct") || key.find(".pct_of") != std::string::npos || key == "gain_percent")
      held["%"].push_back(value);
    if (ends(key, "_fraction") || key == "share") held["%"].push_back(100 * value);
    if (ends(key, "tflops")) held["TFLOP/s"].push_back(value);
    if (ends(key, "gbps") || ends(key, "_GBps")) held["GB/s"].push_back(value);
    if (key == "watts") held["W"].push_back(value);
    if (ends(key, "_MHz")) held["MHz"].push_back(value);
    if (ends(key, "_over_algorithmic_bytes") || ends(key, "_over_algorithmic_flops") || ends(key, "_over_burst"))
      held["x"].push_back(value);
  });
  return held;
}

Figures figures_of(const Profile& profile) {
  Profile judged = profile;
  for (ProfileStage& stage : judged.stages) stage.signals = stage_signals(profile, stage);
  Figures held = figures_of(to_json(judged));
  profile.timing.for_each([&](const char*, const Times& times) {
    if (times.watts) held["J"].push_back(*times.watts * times.median_us * 1e-6);
  });
  return held;
}

// What one run is against the other.
void add_changes(const Profile& now, const Profile& before, Figures& held) {
  const Comparison comparison = compare_profiles(before, now);
  for (const Comparison::Row& row : comparison.times) {
    held["%"].push_back(row.change_percent);
    if (row.cycles) held["%"].push_back(row.cycles->change_percent);
    held["x"].push_back(row.a.median / row.b.median);
    held["x"].push_back(row.b.median / row.a.median);
  }
  for (const Comparison::Delta& delta : comparison.deltas) held["%"].push_back(delta.change);
}

// Throws Error where a text states a figure with a unit that none of `held` rounds to.
void require_held(const std::string& what, const std::string& text, Figures held, const std::string& source) {
  // A unit that is a thousand of another.
  for (const auto& [large, small] : {std::pair{"ms", "us"}, {"TB/s", "GB/s"}, {"GHz", "MHz"}})
    for (const double value : held[small]) held[large].push_back(value / 1000);
  for (const double value : held["J"]) held["mJ"].push_back(value * 1000);
  for (const double value : held["us"]) {
    held["ns"].push_back(value * 1000);
    held["s"].push_back(value / 1e6);
  }

  // "128 x 256" are dimensions, and "b=32 s=16" a problem.
  const Pattern figure(
      "(\\d+(?:,\\d{3})*(?:\\.(\\d+))?)\\s*"
      "(ns|nanoseconds?|us|\u00b5s|\u03bcs|microseconds?|ms|milliseconds?|s|seconds?|%|percent|"
      "(?:x|\u00d7|times)(?!\\s*\\d)|TFLOP/s|TFLOPS|TFLOPs|GB/s|TB/s|W|MHz|GHz|J|mJ)(?![\\w/]|\\s*=)");
  const std::map<std::string, std::string> same = {
      {"nanosecond", "ns"},  {"nanoseconds", "ns"},  {"\u00b5s", "us"},     {"\u03bcs", "us"},
      {"microsecond", "us"}, {"microseconds", "us"}, {"millisecond", "ms"}, {"milliseconds", "ms"},
      {"second", "s"},       {"seconds", "s"},       {"percent", "%"},      {"\u00d7", "x"},
      {"times", "x"},        {"TFLOPS", "TFLOP/s"},  {"TFLOPs", "TFLOP/s"}};
  for (const auto& [at, said] : figure.search_all(text)) {
    std::string number = said[1];
    number.erase(std::remove(number.begin(), number.end(), ','), number.end());  // thousands
    const double value = std::strtod(number.c_str(), nullptr);                   // too many digits: infinite
    const double step = std::pow(10.0, -double(said[2].length()));
    const auto spelling = same.find(said[3]);
    const std::string unit = spelling == same.end() ? said[3] : spelling->second;
    const std::vector<double>& all = held[unit];
    auto distance = [&](double one) { return std::abs(std::abs(one) - value); };
    const auto nearest_one =
        std::min_element(all.begin(), all.end(), [&](double a, double b) { return distance(a) < distance(b); });
    if (nearest_one == all.end())
      fail("{} says '{}', but no {} of this entry holds a figure in {}", what, said[0], source, unit);
    if (!(distance(*nearest_one) <= step / 2 + 1e-9 * value))
      fail("{} says '{}', which no {} of this entry holds (the nearest is {:.4g} {}); state what was measured", what,
           said[0], source, *nearest_one, unit);
  }
}

struct Entry {
  std::string version, kernel, text;
  // The text behind "- <name>:", lines joined; empty where there is none.
  std::string field(const std::string& name) const {
    std::istringstream lines(text);
    std::string found;
    bool inside = false;
    for (std::string line; std::getline(lines, line);) {
      if (line.rfind("- " + name + ":", 0) == 0) {
        inside = true;
        line = line.substr(name.size() + 3);
      } else if (inside && line.rfind("  ", 0) != 0) {
        break;
      }
      if (inside) found += line.substr(std::min(line.size(), line.find_first_not_of(' '))) + " ";
    }
    while (!found.empty() && found.back() == ' ') found.pop_back();
    return found;
  }
};

// A log whose lines end as Unix' do; and the same with blanks for its fenced blocks, whose lines are no headings.
std::string read_log(const fs::path& path) {
  std::string log = read_file(path);
  for (std::size_t at = 0; (at = log.find("\r\n", at)) != std::string::npos;) log.erase(at, 1);
  return log;
}
std::string without_fences(std::string log) {
  bool fenced = false;
  for (std::size_t begin = 0; begin < log.size();) {
    const std::size_t end = std::min(log.find('\n', begin), log.size());
    const bool fence = log.compare(begin, 3, "```") == 0;
    if (fence || fenced) std::fill(log.begin() + std::ptrdiff_t(begin), log.begin() + std::ptrdiff_t(end), ' ');
    fenced ^= fence;
    begin = end + 1;
  }
  return log;
}

std::vector<Entry> entries_of(const std::string& log) {
  std::vector<Entry> entries;
  std::istringstream lines(without_fences(log));
  const Pattern heading(R"(## Version (v\d+) of (\S+))");
  bool inside = false;
  for (std::string line; std::getline(lines, line);) {
    if (const auto match = heading.match(line)) {
      entries.push_back({match->groups[1], match->groups[2], ""});
      inside = true;
    } else if (line.rfind("## ", 0) == 0 || line.rfind("# ", 0) == 0) {
      inside = false;
    } else if (inside) {
      entries.back().text += line + "\n";
    }
  }
  return entries;
}

std::vector<fs::path> logs_of(const fs::path& root) {
  std::vector<fs::path> logs;
  std::error_code absent;
  for (const auto& entry : fs::directory_iterator(root / kLogs, absent))
    if (entry.path().extension() == ".md") logs.push_back(entry.path());
  std::sort(logs.begin(), logs.end());
  return logs;
}

fs::path log_of(const fs::path& root, const DevlogVersion& version) {
  const bool cute = version.kernel.rfind("cute.", 0) == 0;
  const fs::path directory = version.directory;
  std::string design = directory.parent_path().filename();
  std::replace(design.begin(), design.end(), '_', '-');
  const std::string own = (cute ? "cute-" : "") + design;
  for (const std::string& name : {own + "-" + version.version, own, design})
    if (const fs::path path = root / kLogs / (name + ".md"); fs::exists(path)) return path;
  return root / kLogs / (own + ".md");
}

// The files that a field of an entry links as [profile](...) or as [record](...).
std::vector<fs::path> linked(const fs::path& root, const std::string& field, const std::string& as) {
  std::vector<fs::path> files;
  for (const Pattern::Found& link : Pattern("\\[" + as + "\\]\\(([^)]+)\\)").search_all(field))
    files.push_back((root / kLogs / link.groups[1]).lexically_normal());
  return files;
}
// The profile that a field links; empty when it links none.
fs::path linked_profile(const fs::path& root, const std::string& field) {
  const std::vector<fs::path> files = linked(root, field, "profile");
  return files.empty() ? fs::path() : files.front();
}

// The profiles that an entry links, judged; nothing where it links none.
struct Linked {
  DevlogRun run;
  std::optional<DevlogRun> baseline;
};
std::optional<Linked> linked_by(const fs::path& root, const Entry& entry, const Rules& rules) {
  const fs::path run = linked_profile(root, entry.field("Measured"));
  if (run.empty()) return std::nullopt;
  const fs::path before = linked_profile(root, entry.field("Baseline"));
  Linked linked{{load_profile(run), run}, {}};
  if (!before.empty()) linked.baseline = DevlogRun{load_profile(before), before};
  if (linked.run.profile.kernel != entry.kernel)
    fail("{} is a profile of {}; link one of {}", run.lexically_relative(root).string(), linked.run.profile.kernel,
         entry.kernel);
  if (linked.baseline) compare_profiles(linked.baseline->profile, linked.run.profile);  // of one problem, or a sentence
  assess(linked.run.profile, rules, Cards());
  return linked;
}

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) ++found;
  return found;
}

// Whether all that the tool writes stands there, and nothing that looks like it.
bool is_of(const fs::path& root, const Entry& entry, const Linked& linked) {
  const auto has_half = [&](bool earlier) {
    return count(entry.text, measured_half(root, linked.run, linked.baseline, earlier)) == 1;
  };
  return (has_half(false) || has_half(true)) && count(entry.text, kTable) == 1 &&
         count("\n" + entry.text, "\n" + judgement(linked.run.profile)) == 1 &&
         count("\n" + entry.text, "\n- Bottleneck:") == 1;
}

// What an entry without a profile lacks: a reason, or records that hold its figures. Throws Error naming it.
void require_exception(const fs::path& root, const Entry& entry, const DevlogVersion& version) {
  const std::string measured = entry.field("Measured");
  const bool has_table = entry.text.find(kTable) != std::string::npos;
  if (entry.field("Not profiled").empty()) {
    if (version.draft && has_table && measured.ends_with(kNotKept)) return;  // as add_devlog_entry() wrote it
    fail(
        "it has no profile: link one behind 'Measured:', as in [profile](../../results/...), and run `hypermla devlog "
        "lint --fix`, or say why there is none in a line '- Not profiled: ...'");
  }
  if (has_table) fail("it has a table and no profile that holds its figures; link that, or drop the table");
  const std::vector<fs::path> records = linked(root, measured, "record");
  if (version.only_decodes && records.empty())
    fail("it is for MlaDecode: link the record of a benchmark behind 'Measured:', as in [record](../../results/...)");
  Figures held;
  for (const fs::path& record : records) {
    const Json json = read_json(record);
    if (json.is_discarded()) fail("{} is not JSON; link a record", record.lexically_relative(root).string());
    for (const auto& [unit, values] : figures_of(json))
      held[unit].insert(held[unit].end(), values.begin(), values.end());
  }
  require_held("'Measured'", measured, held, "record");
}

// What stands between "Measured" and "Insight" beside what the tool writes there: its items, which a line that says why
// there is no profile gives way to, and its table.
std::string written_by_people(const std::string& part) {
  const Pattern made("- (Measured|Baseline|Bottleneck|Not profiled):.*");
  std::istringstream lines(part);
  std::string kept;
  bool in_item = false, in_table = false;
  for (std::string line; std::getline(lines, line);) {
    in_item = made.match(line) || (in_item && line.rfind("  ", 0) == 0);
    in_table = line == kTable || (in_table && line.rfind("|", 0) == 0);
    if (!in_item && !in_table && !(line.empty() && (kept.empty() || kept.ends_with("\n\n")))) kept += line + "\n";
  }
  while (kept.ends_with("\n\n")) kept.pop_back();
  return kept;
}

}  // namespace

void require_measured(const std::string& what, const std::string& text, const DevlogRun& run,
                      const std::optional<DevlogRun>& baseline) {
  auto held = figures_of(run.profile);
  if (baseline) {
    for (const auto& [unit, values] : figures_of(baseline->profile))
      held[unit].insert(held[unit].end(), values.begin(), values.end());
    add_changes(run.profile, baseline->profile, held);
  }
  require_held(what, text, std::move(held), "profile");
}

fs::path add_devlog_entry(const fs::path& root, const DevlogVersion& version, const DevlogTexts& texts,
                          const DevlogRun& run, const std::optional<DevlogRun>& baseline) {
  if (run.profile.kernel != version.kernel)
    fail("the profile is of {}, not of {}; name the kernel that was profiled", run.profile.kernel, version.kernel);
  if (baseline) compare_profiles(baseline->profile, run.profile);  // of one problem, or a sentence
  for (const auto& [what, text] :
       {std::pair{"--changed", &texts.changed}, {"--why", &texts.why}, {"--insight", &texts.insight}}) {
    if (text->find_first_not_of(" \n\t") == std::string::npos) fail("{} is empty; say it in a sentence", what);
    require_utf8(what, *text);
    require_measured(what, *text, run, baseline);
  }
  const fs::path path = log_of(root, version);
  make_directories(path.parent_path());
  const FileDescriptor lock = lock_directory(path.parent_path());  // of two entries at once none is lost
  sweep_scratch(path.parent_path());
  for (const fs::path& log : logs_of(root))
    for (const Entry& entry : entries_of(read_log(log)))
      if (entry.kernel == version.kernel)
        fail("{} has an entry of {} already; edit its texts there", log.string(), version.kernel);

  std::string log = fs::exists(path) ? read_file(path) : fmt::format("# {}: log\n", path.stem().string());
  log += fmt::format("\n## Version {} of {}\n\n", version.version, version.kernel);
  log += item("Location", "`" + version.directory + "`") + item("Changed", texts.changed) + item("Why", texts.why);
  log += measured_half(root, run, baseline);
  log += judgement(run.profile);
  log += item("Insight", texts.insight);
  write_file_atomic(path, log);
  return path;
}

std::vector<std::string> lint_devlogs(const fs::path& root, const std::vector<DevlogVersion>& versions,
                                      const Rules& rules) {
  std::vector<std::string> problems;
  std::map<std::string, std::string> seen;  // kernel: its log
  for (const fs::path& log : logs_of(root)) {
    for (const Entry& entry : entries_of(read_log(log))) {
      auto say = [&](const std::string& what) {
        problems.push_back(fmt::format("{}: the entry of {} {}: {}", log.lexically_relative(root).string(),
                                       entry.kernel, entry.version, what));
      };
      const auto version = std::find_if(versions.begin(), versions.end(),
                                        [&](const DevlogVersion& one) { return one.kernel == entry.kernel; });
      if (version == versions.end() || version->version != entry.version) {
        say("there is no such version");
        continue;
      }
      if (const auto [first, is_new] = seen.emplace(entry.kernel, log.filename()); !is_new)
        say("another one stands in " + first->second);
      for (const char* name : {"Location", "Changed", "Why", "Measured", "Insight"})
        if (entry.field(name).empty()) say(fmt::format("'{}' is missing", name));
      if (const std::string place = entry.field("Location"); !place.empty() && place != "`" + version->directory + "`")
        say("its location is " + version->directory);
      try {
        const auto linked = linked_by(root, entry, rules);
        if (!linked && !entry.field("Measured").empty()) require_exception(root, entry, *version);
        if (linked && !is_of(root, entry, *linked))
          say(fmt::format("its measured half is not that of {}, once; `hypermla devlog lint --fix` writes it",
                          linked->run.path.lexically_relative(root).string()));
      } catch (const Error& error) {
        say(error.what());
      }
    }
  }
  for (const DevlogVersion& version : versions)
    if (!seen.count(version.kernel))
      problems.push_back(fmt::format("{}: {} has no entry; `hypermla devlog add {} --profile=<run>` adds one",
                                     log_of(root, version).lexically_relative(root).string(), version.kernel,
                                     version.kernel));
  return problems;
}

std::vector<std::string> refresh_devlogs(const fs::path& root, const Rules& rules) {
  std::vector<std::string> kernels;
  const std::vector<fs::path> logs = logs_of(root);
  if (logs.empty()) return kernels;
  const FileDescriptor lock = lock_directory(logs.front().parent_path());
  for (const fs::path& log : logs) {
    const std::string old = read_log(log);
    std::string text = old;
    for (const Entry& entry : entries_of(old)) try {
        const auto linked = linked_by(root, entry, rules);
        if (!linked || is_of(root, entry, *linked)) continue;
        const std::string plain = without_fences(text);
        const std::size_t heading = plain.find(fmt::format("## Version {} of {}\n", entry.version, entry.kernel));
        const std::size_t next = std::min(plain.find("\n# ", heading), plain.find("\n## ", heading));
        const std::size_t begin = plain.find("\n- Measured:", heading) + 1,
                          end = plain.find("\n- Insight:", heading) + 1;
        if (begin == 0 || end == 0 || end >= next || end < begin) continue;  // lint says what is missing
        const std::string made = measured_half(root, linked->run, linked->baseline) + judgement(linked->run.profile);
        text.replace(begin, end - begin, made + written_by_people(text.substr(begin, end - begin)));
        kernels.push_back(entry.kernel);
      } catch (const Error&) {  // lint says it
      }
    if (text != old) write_file_atomic(log, text);
  }
  return kernels;
}

bool has_devlog(const fs::path& root, const std::string& design, int version) {
  std::string name = design;
  std::replace(name.begin(), name.end(), '_', '-');
  name += "-v" + std::to_string(version) + ".md";
  return fs::exists(root / kLogs / name) || fs::exists(root / kLogs / ("cute-" + name));
}

}  // namespace hypermla
