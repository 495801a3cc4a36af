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
      "Adds the entry of a version to its log in docs/log. Device, clocks, problem, times, rates and the bottleneck "
      "come\n"
      "from the profile, and from the baseline what they are against. A text that states a figure which no profile "
      "holds\n"
      "is refused.\n",
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
  const fs::path path = root.empty() ? environment.root : fs::path(root);
  const fs::path log = add_devlog_entry(path, version_of(entry), texts, measured, before);
  const fs::path index = path / "docs/index.md";
  const bool listed = fs::exists(index) && read_file(index).find("log/" + log.filename().string()) != std::string::npos;
  fmt::print("added to {}{}\n", log.string(), listed ? "" : "; link it from docs/index.md");
  return 0;
}

int devlog_lint(const Words& words) {
  std::string root;
  bool fix = false;
  CLI::App app(
      "Finds versions without an entry in docs/log, entries whose figures are not those of their profiles, and entries\n"
      "that link no profile and do not say why.\n"
      "Exit status: 0 when nothing is wrong, else 1.\n",
      "hypermla devlog lint");
  app.add_flag("--fix", fix, "first write the figures anew of entries whose profiles were linked or measured again");
  app.add_option("--root", root, "a checkout whose docs/log is meant (default: where this program's sources are)");
  if (!parse(app, words)) return 0;
  const Environment environment = Environment::detect();
  const fs::path checkout = root.empty() ? environment.root : fs::path(root);
  if (fix)
    for (const std::string& kernel : refresh_devlogs(checkout, Rules::load(environment.profile_tools.rules)))
      fmt::print("{}: figures written anew; read its insight again\n", kernel);
  std::vector<DevlogVersion> versions;
  for (const KernelEntry& entry : Registry::instance().all()) versions.push_back(version_of(entry));
  const auto problems = lint_devlogs(checkout, versions);
  for (const std::string& problem : problems) fmt::print("{}\n", problem);
  if (problems.empty()) fmt::print("{} versions, each has its entry\n", versions.size());
  return problems.empty() ? 0 : 1;
}

}  // namespace

int devlog_command(const Words& words) {
  return run_subcommand("devlog",
                        {{"add", "KERNEL --profile=RUN ...", "the entry of a version, from its profile", devlog_add},
                         {"lint", "", "versions without an entry, figures that no profile holds", devlog_lint}},
                        words);
}

}  // namespace hypermla
