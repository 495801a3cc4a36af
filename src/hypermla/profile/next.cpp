#include "hypermla/profile/next.h"

#include <algorithm>

#include "hypermla/base/error.h"
#include "hypermla/base/process.h"
#include "hypermla/profile/compare.h"

namespace hypermla {
namespace {

// The trial matrix: decoding, and decoding of several drafted tokens.
constexpr int kTrialQueries[] = {1, 16};

Json stage_rows(const Profile& profile) {
  Json rows = Json::array();
  for (const ProfileStage& stage : profile.stages) {
    Json row = {{"stage", stage.name}};
    for (const auto& [name, signal] : {std::pair{"us", "time_us"},
                                       {"tensor_pct", "tensor_pct"},
                                       {"dram_pct", "dram_pct"},
                                       {"occupancy_pct", "occupancy_pct"}})
      if (const auto found = stage.signals.find(signal); found != stage.signals.end()) row[name] = found->second;
    row["bottleneck"] = stage.bottleneck ? stage.bottleneck->kind : "not judged";
    row["key_issue"] = stage.issues.empty() ? "none" : stage.issues.front().name + ": " + stage.issues.front().trigger;
    rows.push_back(row);
  }
  return rows;
}

const ProfileStage* stage_named(const Profile& profile, const std::string& name) {
  for (const ProfileStage& stage : profile.stages)
    if (stage.name == name) return &stage;
  return nullptr;
}

// Two sentences at most: what bounds it, and what stands out.
std::string root_cause(const Profile& profile) {
  const Bottleneck& found = *profile.bottleneck;
  std::string text = found.why;
  const ProfileStage* stage = stage_named(profile, found.stage);
  if (stage && !stage->issues.empty()) {
    const Issue& issue = stage->issues.front();
    text += fmt::format(" What stands out: {} ({}), that is, {}.", issue.name, issue.trigger, issue.why);
  }
  return text;
}

Json comparison_rows(const Comparison& comparison) {
  Json rows = Json::array();
  for (const Comparison::Row& row : comparison.times)
    rows.push_back({{"metric", row.time + ", us"},
                    {"previous", row.a.median},
                    {"current", row.b.median},
                    {"change", fmt::format("{:+.1f} % ({})", row.change_percent, verdict_name(row.verdict))}});
  for (const Comparison::Delta& delta : comparison.deltas)
    rows.push_back({{"metric", delta.stage + ": " + delta.name},
                    {"previous", delta.a},
                    {"current", delta.b},
                    {"change", fmt::format("{:+.1f} {}", delta.change, delta.unit)}});
  return rows;
}

Json constraints(const std::string& language, const ProfileStage* stage) {
  const bool explicit_warps = language == "cute";
  Json list = Json::array();
  auto now = [](const std::optional<int>& value) { return value ? fmt::format("{} now", *value) : "not known yet"; };
  const auto registers = stage ? stage->registers : std::nullopt;
  list.push_back(
      explicit_warps
          ? fmt::format("registers: threads x registers at launch within 65536, no spills ({})", now(registers))
          : fmt::format("registers: below 128 a thread is the aim, 255 the ceiling, no frame ({})", now(registers)));
  const auto occupancy = stage ? stage->signals.find("occupancy_pct") : Signals::const_iterator();
  const bool counted = stage && occupancy != stage->signals.end();
  list.push_back(fmt::format("occupancy: {}{}",
                             counted ? fmt::format("{:.1f} % now", occupancy->second) : "not counted",
                             explicit_warps ? "; one block per SM is fine where its pipeline is full"
                                            : "; at least 25 %, or as many blocks as the hint `occupancy` asks for"));
  const auto shared = stage ? stage->shared_bytes : std::nullopt;
  list.push_back(fmt::format("shared memory: within 227 KiB a block on sm_90{}",
                             shared ? fmt::format(" (the compiler counts {} bytes now)", *shared) : ""));
  list.push_back(explicit_warps ? "control: warps, barriers and pipelines placed by hand (cute)"
                                : "control: tiles, order of blocks and hints to the compiler (cutile)");
  list.push_back("one idea; the predicted gain is stated before it is measured");
  return list;
}

// A copy stays in its language: of the profiled version, or of the design's first one in the language of the task.
std::string start_command(const NextInput& input, const std::string& language) {
  std::string original = input.profile.kernel;
  if (original.rfind(language + ".", 0) != 0) {
    const auto base = input.bases.find(language);
    if (base == input.bases.end()) return "";
    original = base->second;
  }
  return fmt::format("clone {} v{}", original, input.next_version);
}

Json gates(const NextInput& input, const std::string& kernel, const std::string& language) {
  Json list = Json::array();
  auto add = [&](const std::string& gate, const std::string& command) {
    list.push_back({{"gate", gate}, {"command", "./hypermla " + command}});
  };
  if (const std::string start = start_command(input, language); !start.empty())
    add("begun as a copy, a draft until it is recorded", start);
  add("correct on all cases; on a GPU recorded", "verify " + kernel);
  add("no spills, every tiling", fmt::format("compile {} --arch=sm_90 --candidates --forbid_spills", kernel));
  for (const int queries : kTrialQueries)
    add(fmt::format("profiled at b=32 s={} t=4096", queries),
        fmt::format("kernel {} --b=32 --s={} --t=4096 --check", kernel, queries));
  std::string flags;
  for (const auto& [field, value] : input.profile.problem.items())
    flags +=
        " " + shell_word(fmt::format("--{}={}", field, value.is_string() ? value.get<std::string>() : value.dump()));
  add("profiled as the run was", fmt::format("kernel {}{} --check", kernel, flags));
  add("no regression", fmt::format("compare {} <that run of {}>", shell_word(input.run), kernel));
  add("the version has its entry", fmt::format("devlog add {} --profile=<run> --baseline={} --changed=.. --why=.. "
                                               "--insight=..",
                                               kernel, shell_word(input.run)));
  add("no version without an entry", "devlog lint");
  add("what others can use is a card", fmt::format("kb add languages/{}/optimizations/<name> --title=..", language));
  add("the cards are right", "kb lint");
  return list;
}

std::string cell(const Json& row, const char* key) {
  if (!row.contains(key)) return "-";
  return row[key].is_number() ? fmt::format("{:.4g}", row[key].get<double>()) : row[key].get<std::string>();
}

std::string table(const Json& rows, const std::vector<std::pair<const char*, const char*>>& columns) {
  std::string head = "|", rule = "|", text;
  for (const auto& [key, title] : columns) {
    head += fmt::format(" {} |", title);
    rule += "---|";
  }
  for (const Json& row : rows) {
    text += "|";
    for (const auto& [key, title] : columns) text += " " + cell(row, key) + " |";
    text += "\n";
  }
  return head + "\n" + rule + "\n" + text + "\n";
}

std::string problem_text(const Json& problem) {
  std::string text;
  for (const char* name : {"b", "s", "t", "n", "h", "dtype"})
    if (problem.contains(name))
      text += fmt::format("{}{}={}", text.empty() ? "" : " ", name,
                          problem[name].is_string() ? problem[name].get<std::string>() : problem[name].dump());
  return text;
}

// How the version is begun, in a sentence.
std::string start_text(const Json& task) {
  const std::string from = task["from"], language = task["language"], made = task["task"];
  if (!task.contains("start")) {
    const std::string kernel = made.substr(made.rfind(' ') + 1);
    return fmt::format("Start by hand with {}: a copy stays in its language, and the design of `{}` has none in {}.",
                       kernel, from, language);
  }
  return fmt::format("Start with `{}`{}.", task["start"].get<std::string>(),
                     made.rfind(language + ".", 0) == 0
                         ? fmt::format(", a copy of `{}`", from)
                         : fmt::format("; a copy stays in its language, so it is not one of `{}`", from));
}

}  // namespace

Json next_step(const NextInput& input, const Cards& cards) {
  const Profile& profile = input.profile;
  if (!profile.bottleneck) fail("the profile of {} was not judged; is conf/profile_rules.json there?", profile.kernel);
  Json summary = {{"kernel", profile.kernel},
                  {"version", profile.version},
                  {"device", profile.device.name},
                  {"date", profile.date},
                  {"mode", profile.mode},
                  {"run", input.run},
                  {"problem", profile.problem},
                  {"stages", stage_rows(profile)},
                  {"bottleneck", profile.bottleneck->kind},
                  {"confidence", profile.bottleneck->confidence},
                  {"root_cause", root_cause(profile)},
                  {"opportunities", Json::array()},
                  {"refuted", Json::array()}};
  Json optimizations = Json::array();
  const Card* explicit_card = nullptr;
  for (const Opportunity& one : profile.opportunities) {
    if (!one.refuted.empty()) {
      summary["refuted"].push_back(
          {{"id", one.id}, {"name", one.name}, {"trigger", one.trigger}, {"figure", one.refuted}, {"card", one.card}});
      if (!one.stage.empty()) summary["refuted"].back()["stage"] = one.stage;
      continue;
    }
    summary["opportunities"].push_back({{"id", one.id},
                                        {"name", one.name},
                                        {"gain_percent", one.gain_percent},
                                        {"trigger", one.trigger},
                                        {"card", one.card}});
    if (!one.stage.empty()) summary["opportunities"].back()["stage"] = one.stage;
    const Card& card = cards.find(one.id);
    if (optimizations.empty() && card.control == "explicit") explicit_card = &card;
    optimizations.push_back(
        {{"name", one.stage.empty() ? one.name : fmt::format("{}, in {}", one.name, one.stage)},
         {"rationale", fmt::format("{} {}: at most {:.0f} %.", one.why, one.trigger, one.gain_percent)},
         {"card", one.card}});
  }
  if (input.baseline) {
    const Comparison comparison = compare_profiles(*input.baseline, profile);
    summary["baseline"] = comparison_rows(comparison);
    if (!comparison.note.empty()) summary["baseline_note"] = comparison.note;
  }

  // The language follows from the control that the most promising idea needs.
  const std::string own = profile.kernel.substr(0, profile.kernel.find('.'));
  const std::string language = explicit_card ? "cute" : own;
  const std::string why = explicit_card && own != "cute" ? fmt::format("{} ({}) places warps by hand, which {} cannot",
                                                                       explicit_card->title, explicit_card->id, own)
                                                         : "what the ideas need, the kernel's own language offers";
  const std::string version = "v" + std::to_string(input.next_version);
  const std::string layer = profile.kernel.substr(own.size() + 1, profile.kernel.rfind('.') - own.size() - 1);
  const std::string kernel = fmt::format("{}.{}.{}_{}", language, layer, input.design, version);
  Json step = {{"profile", summary},
               {"task",
                {{"task", fmt::format("{} -> {}", profile.kernel, kernel)},
                 {"from", input.directory},
                 {"bottleneck", fmt::format("{} in {}", profile.bottleneck->kind, profile.bottleneck->stage)},
                 {"language", language},
                 {"why_language", why},
                 {"optimizations", optimizations},
                 {"constraints", constraints(language, stage_named(profile, profile.bottleneck->stage))},
                 {"trials",
                  {"b=32 s=1 t=4096: decoding", "b=32 s=16 t=4096: drafted tokens",
                   "a third shape only where the evidence asks for it"}},
                 {"gates", gates(input, kernel, language)}}}};
  if (const std::string start = start_command(input, language); !start.empty())
    step["task"]["start"] = "./hypermla " + start;
  return step;
}

std::string render_next_step(const Json& step) {
  const Json& profile = step["profile"];
  const Json& task = step["task"];
  auto text_of = [](const Json& json, const char* key) { return json[key].get<std::string>(); };
  auto id_of = [&](const Json& one) {
    return text_of(one, "id") + (one.contains("stage") ? ", in " + text_of(one, "stage") : "");
  };
  std::string text =
      fmt::format("# Profile: {} {} | {}\n\n{}, {} mode, {}, `{}`\n\n", text_of(profile, "kernel"),
                  text_of(profile, "version"), problem_text(profile["problem"]), text_of(profile, "device"),
                  text_of(profile, "mode"), text_of(profile, "date"), text_of(profile, "run"));
  text += table(profile["stages"], {{"stage", "stage"},
                                    {"us", "us"},
                                    {"tensor_pct", "tensor %"},
                                    {"dram_pct", "DRAM %"},
                                    {"occupancy_pct", "occupancy %"},
                                    {"bottleneck", "bottleneck"},
                                    {"key_issue", "key issue"}});
  text += fmt::format("**Bottleneck: {}** (confidence {}). Root cause: {}\n\n", text_of(profile, "bottleneck"),
                      text_of(profile, "confidence"), text_of(profile, "root_cause"));
  text += "## Opportunities, by estimated gain\n\n";
  int number = 0;
  for (const Json& one : profile["opportunities"])
    text += fmt::format("{}. {} ({}) - est. {:.0f} % - {} - `{}`\n", ++number, text_of(one, "name"), id_of(one),
                        one["gain_percent"].get<double>(), text_of(one, "trigger"), text_of(one, "card"));
  if (number == 0) text += "No card that was not refuted for this kernel promises a percent of its time.\n";
  for (const Json& one : profile["refuted"])
    text += fmt::format("- Refuted before: {} ({}): {}\n", text_of(one, "name"), id_of(one), text_of(one, "figure"));
  if (profile.contains("baseline")) {
    text += "\n## Against the baseline\n\n";
    if (profile.contains("baseline_note")) text += fmt::format("Note: {}.\n\n", text_of(profile, "baseline_note"));
    text += table(profile["baseline"],
                  {{"metric", "metric"}, {"previous", "previous"}, {"current", "current"}, {"change", "change"}});
  }
  text += fmt::format("\n# Task: {}\n\n{} Bottleneck: {}. Language: {} ({}).\n\n## Apply\n\n", text_of(task, "task"),
                      start_text(task), text_of(task, "bottleneck"), text_of(task, "language"),
                      text_of(task, "why_language"));
  for (const Json& one : task["optimizations"])
    text +=
        fmt::format("- {}: {} Card: `{}`.\n", text_of(one, "name"), text_of(one, "rationale"), text_of(one, "card"));
  if (task["optimizations"].empty())
    text += "- Nothing that a card knows. Find one cause in the profile and name the metric that shows it.\n";
  text += "\n## Constraints\n\n";
  for (const Json& one : task["constraints"]) text += "- " + one.get<std::string>() + "\n";
  text += "\n## Trials\n\n";
  for (const Json& one : task["trials"]) text += "- " + one.get<std::string>() + "\n";
  text += "\n## Gates\n\n";
  for (const Json& one : task["gates"])
    text += fmt::format("- {}: `{}`\n", text_of(one, "gate"), text_of(one, "command"));
  return text;
}

}  // namespace hypermla
