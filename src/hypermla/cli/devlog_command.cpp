#include <algorithm>
#include <cstdio>

#include "hypermla/api/environment.h"
#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/cli/options.h"
#include "hypermla/cli/subcommand.h"
#include "hypermla/plan/registry.h"
#include "hypermla/profile/devlog.h"
#include "hypermla/profile/rules.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

DevlogVersion version_of(const KernelEntry& entry) {
  return {entry.full_name(), entry.version, "kernels/" + entry.directory, entry.draft, entry.make()->only_decodes()};
}

DevlogRun judged_run(const Environment& environment, const std::string& path) {
  std::error_code ignored;
  const fs::path file = fs::is_directory(path, ignored) ? fs::path(path) / "profile.json" : fs::path(path);
  DevlogRun run{load_profile(file), file};
  assess(run.profile, Rules::load(environment.profile_tools.rules), Cards());
  return run;
}

int devlog_add(const Words& words) {
  std::string root, kernel, version, run, baseline;
  DevlogTexts texts;
  CLI::App app(
      "Adds the entry of a version to its log in docs/log; that of a kernel of your own lies beside it\n"
      "(docs/own-kernels.md). Device, clocks, problem, times, rates and bottleneck come from the profile, what they\n"
      "are against from the baseline. A text that states a figure which no profile holds is refused.\n",
      "hypermla devlog add");
  app.add_option("KERNEL", kernel, "language.layer.design, or in full with its version")->required();
  app.add_option("VERSION", version, "v0, v1, ... (default: that of the name)");
  app.add_option("--profile", run, "a run of it: its directory below out/profiles, or a record")->required();
  app.add_option("--baseline", baseline, "a run of the version before, of the same problem");
  app.add_option("--changed", texts.changed, "what is new, in a sentence")->required();
  app.add_option("--why", texts.why, "what it was to show")->required();
  app.add_option("--insight", texts.insight, "what the next version should know")->required();
  app.add_option("--root", root, "a checkout whose docs/log is meant (default: where this program's sources are)");
  if (!parse(app, words)) return 0;
  const Environment environment = Environment::detect();
  const DevlogRun measured = judged_run(environment, run);
  std::optional<DevlogRun> before;
  if (!baseline.empty()) before = judged_run(environment, baseline);
  // Of a design that several languages and versions have, the one that was profiled.
  const auto entries = Registry::instance().named(kernel, version);
  const auto profiled = std::find_if(entries.begin(), entries.end(), [&](const KernelEntry& entry) {
    return entry.full_name() == measured.profile.kernel;
  });
  const KernelEntry& entry = profiled == entries.end() ? entries.front() : *profiled;
  const fs::path path = checkout_of(root, environment.project_of(entry));
  if (root.empty() && !fs::exists(path / version_of(entry).directory))
    fail("{} is not in {}; point HYPERMLA_KERNELS at its directory", entry.full_name(), (path / "kernels").string());
  const fs::path log = add_devlog_entry(path, version_of(entry), texts, measured, before);
  const fs::path index = path / "docs/index.md";
  const bool listed =
      environment.is_own(entry) ||
      (fs::exists(index) && read_file(index).find("log/" + log.filename().string()) != std::string::npos);
  fmt::print("added to {}{}\n", log.string(), listed ? "" : "; link it from docs/index.md");
  return 0;
}

// Logs lie beside their kernels: those of this repository in it, those of the user's own in their project.
struct Project {
  fs::path root;
  std::vector<DevlogVersion> versions;
};
std::vector<Project> projects(const Environment& environment, const std::string& root) {
  std::vector<Project> all = {{checkout_of(root, environment.root), {}}};
  if (root.empty() && !environment.own_kernels.empty()) all.push_back({environment.own_kernels.parent_path(), {}});
  for (const KernelEntry& entry : Registry::instance().all()) {
    if (environment.is_own(entry)) {
      if (root.empty()) all.back().versions.push_back(version_of(entry));
    } else if (fs::exists(environment.kernel_root() / entry.directory)) {  // not one built in from another directory
      all.front().versions.push_back(version_of(entry));
    }
  }
  if (!root.empty()) return all;
  for (const std::string& unbuilt : environment.unbuilt_kernels()) {
    const fs::path directory = unbuilt;  // language/layer/design/version
    const std::string name = directory.filename(), design = directory.parent_path().filename();
    std::string place = directory.parent_path().parent_path();
    std::replace(place.begin(), place.end(), '/', '.');
    all.back().versions.push_back({place + "." + name, version_in(name, design), "kernels/" + unbuilt, /*draft=*/true});
  }
  return all;
}

int devlog_lint(const Words& words) {
  std::string root;
  bool fix = false;
  CLI::App app(
      "Finds versions without an entry in docs/log, entries whose figures are not those of their profiles, and "
      "entries\n"
      "that link no profile and do not say why.\n"
      "Exit status: 0 when nothing is wrong, else 1.\n",
      "hypermla devlog lint");
  app.add_flag("--fix", fix,
               "first write the figures anew of entries whose profiles were linked, measured or judged again");
  app.add_option("--root", root, "a checkout whose docs/log is meant (default: where this program's sources are)");
  if (!parse(app, words)) return 0;
  const Environment environment = Environment::detect();
  const Rules rules = Rules::load(environment.profile_tools.rules);
  std::size_t versions = 0;
  bool right = true;
  for (const Project& project : projects(environment, root)) {
    if (fix)
      for (const std::string& kernel : refresh_devlogs(project.root, rules))
        fmt::print("{}: figures written anew; read its insight again\n", kernel);
    const bool own = project.root == environment.own_kernels.parent_path();
    for (const std::string& problem : lint_devlogs(project.root, project.versions, rules)) {
      fmt::print("{}{}\n", own ? (project.root / "").string() : "", problem);
      right = false;
    }
    versions += project.versions.size();
  }
  if (right) fmt::print("{} versions, each has its entry\n", versions);
  return right ? 0 : 1;
}

}  // namespace

int devlog_command(const Words& words) {
  return run_subcommand("devlog",
                        {{"add", "KERNEL --profile=RUN ...", "the entry of a version, from its profile", devlog_add},
                         {"lint", "", "versions without an entry, figures that no profile holds", devlog_lint}},
                        words);
}

}  // namespace hypermla
