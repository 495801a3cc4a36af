#include <algorithm>
#include <cstdio>

#include "hypermla/api/environment.h"
#include "hypermla/base/error.h"
#include "hypermla/base/pattern.h"
#include "hypermla/cli/commands.h"
#include "hypermla/cli/options.h"
#include "hypermla/plan/registry.h"
#include "hypermla/profile/devlog.h"
#include "hypermla/profile/next.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

bool has_counters(const fs::path& run) try {
  const Profile profile = load_profile(run);
  return std::any_of(profile.stages.begin(), profile.stages.end(),
                     [](const ProfileStage& stage) { return !stage.metrics.empty(); });
} catch (const Error&) {  // said when it is the only one
  return false;
}

// Of one second: <time>Z, <time>Z-2, .., <time>Z-10.
std::pair<std::string, int> time_of(const std::string& run) {
  const std::size_t end = run.find("Z-");
  return end == std::string::npos ? std::pair(run, 1) : std::pair(run.substr(0, end + 1), std::atoi(&run[end + 2]));
}

// The newest run of one of these kernels below out/profiles/<mode>/<kernel>/<problem>/<time>/; those with counters come
// before those without.
std::string newest_run(const std::vector<KernelEntry>& entries, const std::string& asked) {
  std::string best;
  std::pair<bool, std::pair<std::string, int>> newest;
  std::error_code absent;
  for (const auto& mode : fs::directory_iterator("out/profiles", absent))
    for (const KernelEntry& entry : entries)
      for (const auto& problem : fs::directory_iterator(mode.path() / entry.full_name(), absent))
        for (const auto& run : fs::directory_iterator(problem.path(), absent)) {
          if (!fs::exists(run.path() / "profile.json", absent)) continue;
          const std::pair key(has_counters(run.path()), time_of(run.path().filename()));
          if (key < newest) continue;
          newest = key;
          best = run.path();
        }
  if (best.empty())
    fail("there is no profile of {} below out/profiles; run `hypermla kernel {} --b=32 --s=16 --t=4096`, or name one",
         asked, asked);
  return best;
}

}  // namespace

int next_command(const Words& words) {
  std::string kernel, baseline;
  std::vector<std::string> rest;
  bool json = false;
  CLI::App app(
      "What bounds a kernel, and the task for its next version: stages, bottleneck, root cause, what to try and what "
      "was\n"
      "refuted, the change against a baseline; language, ideas with their cards, constraints, trials, gates.\n",
      "hypermla next");
  app.add_option("KERNEL", kernel, "a design, drafts included, or a version by its full name")->required();
  app.add_option("RUN", rest,
                 "[its version] [a run] (default: the newest of all versions below out/profiles, those with counters "
                 "first)")
      ->expected(0, 2);
  app.add_option("--baseline", baseline, "a run of the version before, of the same problem");
  app.add_flag("--json", json, "as JSON");
  if (!parse(app, words)) return 0;
  const Environment environment = Environment::detect();
  // As elsewhere, v7 is a version; a run of that name is ./v7.
  const bool versioned = !rest.empty() && Pattern("v[0-9]+").match(rest.front());
  const std::string version = versioned ? rest.front() : "";
  if (versioned) rest.erase(rest.begin());
  if (rest.size() > 1) fail("'{}' is not expected here; see {} --help", rest.back(), app.get_name());
  const std::vector<KernelEntry> entries = Registry::instance().named(kernel, version);
  const std::string asked = versioned ? kernel + " " + version : kernel;
  const std::string run = rest.empty() ? newest_run(entries, asked) : rest.front();
  const Rules rules = Rules::load(environment.profile_tools.rules);
  const Cards cards = Cards::load(environment.profile_tools.cards);
  NextInput input{.profile = load_profile(run), .run = run};
  assess(input.profile, rules, cards);
  const auto entry = std::find_if(entries.begin(), entries.end(),
                                  [&](const KernelEntry& one) { return one.full_name() == input.profile.kernel; });
  if (entry == entries.end()) fail("{} is a profile of {}, not of {}", run, input.profile.kernel, asked);
  if (!baseline.empty()) {
    input.baseline = load_profile(baseline);
    assess(*input.baseline, rules, cards);
  }
  input.design = entry->design;
  const std::string directory = "kernels/" + entry->directory;
  input.directory = environment.is_own(*entry) ? (environment.project_of(*entry) / directory).string() : directory;
  for (const KernelEntry& one : Registry::instance().all()) {
    if (one.design != entry->design || one.layer != entry->layer) continue;
    input.next_version = std::max(input.next_version, std::stoi(one.version.substr(1)) + 1);
    input.bases.emplace(one.language, one.full_name());
  }
  for (const fs::path unbuilt : environment.unbuilt_kernels()) {  // language/layer/design/version
    const fs::path design = unbuilt.parent_path();
    if (design.filename() == entry->design && design.parent_path().filename() == entry->layer)
      input.next_version =
          std::max(input.next_version, std::stoi(version_in(unbuilt.filename(), entry->design).substr(1)) + 1);
  }
  const auto had = [&](int version) {
    return has_devlog(environment.root, input.design, version) ||
           has_devlog(environment.project_of(*entry), input.design, version);
  };
  while (had(input.next_version)) ++input.next_version;
  const Json step = next_step(input, cards);
  fmt::print("{}", json ? step.dump(2) + "\n" : render_next_step(step));
  return 0;
}

}  // namespace hypermla
