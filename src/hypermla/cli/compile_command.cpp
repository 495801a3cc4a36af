#include <algorithm>
#include <cstdio>
#include <set>

#include "hypermla/base/error.h"
#include "hypermla/cli/commands.h"
#include "hypermla/cli/options.h"
#include "hypermla/cli/session.h"
#include "hypermla/plan/cache_ops.h"
#include "hypermla/plan/cases.h"
#include "hypermla/plan/registry.h"
#include "hypermla/tune/ceilings.h"

namespace hypermla {
namespace {

struct Job {
  KernelSource source;
  std::string arch;
  std::shared_future<CacheEntry> entry;
};

void add_arch(CLI::App& app, std::vector<std::string>& archs) {
  app.add_option("--arch", archs, "targets: sm_80, sm_90, ..., or cpu for this processor (default: the present device)")
      ->delimiter(',');
}

// What is wrong with the flags the whole command line says.
Words archs_in(Words words) {
  Words archs;
  CLI::App app;
  app.set_help_flag();
  app.allow_extras();
  add_arch(app, archs);
  std::reverse(words.begin(), words.end());  // CLI11 takes them from the back
  try {
    app.parse(words);
  } catch (const CLI::ParseError&) {
  }
  return archs;
}

}  // namespace

int compile_command(const Words& words) {
  std::string name = "all";
  std::string version;
  Words rest = words;
  if (!rest.empty() && rest[0].rfind("-", 0) != 0) {
    name = rest[0];
    rest.erase(rest.begin());
  }
  if (!rest.empty() && rest[0].rfind("-", 0) != 0) {
    version = rest[0];
    rest.erase(rest.begin());
  }

  if (name == "all" && !version.empty()) fail("'{}' is not expected here; see hypermla compile --help", version);

  // Targets decide languages, and languages decide which flags exist.
  const std::string language_flag = flag_value(rest, "--language");
  std::vector<std::string> archs = archs_in(rest);
  if (archs.empty()) {
    const std::shared_ptr<Device> present = make_device("auto");
    archs = {present->is_gpu() ? present->info().arch : "cpu"};
  }
  std::vector<Target> targets;
  for (const std::string& arch : archs)
    targets.push_back(arch == "cpu" ? Target::of(make_cpu_device()->info()) : Target::of_arch(arch));

  std::string language;
  bool candidates = false, cases = false, decode = false, forbid_spills = false;
  CLI::App app(
      "Compile kernels ahead of time into the cache; no GPU is needed.\n"
      "Without a kernel, or with `all`: every kernel for the problems that deployments see.\n",
      "hypermla compile [<kernel>|all] [version]");
  add_arch(app, archs);
  app.add_option("--language", language, "cute or cutile (default: the fastest that runs on the target)");
  app.add_flag("--candidates", candidates,
               "every tiling that the tuner may try, not only the default, and the kernels of MlaPrefill");
  app.add_flag("--cases", cases, "everything that `hypermla verify` runs, for a machine without compilers");
  app.add_flag("--decode", decode,
               "everything that MlaDecode, MlaPrefill and MlaCacheOps run, for an installation without compilers");
  app.add_flag("--forbid_spills", forbid_spills, "exit status 1 when a kernel keeps registers in memory");
  std::vector<std::vector<KernelEntry>> entries;  // of each target; none: all kernels
  if (name != "all") {
    for (const Target& target : targets)
      entries.push_back(Registry::instance().find_all(name, version, target.arch, language_flag));
  } else if (const std::vector<KernelEntry> all = Registry::instance().all();
             !language_flag.empty() && std::none_of(all.begin(), all.end(), [&](const KernelEntry& entry) {
               return entry.language == language_flag;
             })) {
    fail("there is no language '{}'; take cute or cutile", language_flag);
  }
  Settings said;
  for (const std::vector<KernelEntry>& of_target : entries) add_problem_fields(app, of_target, said);
  for (const std::vector<KernelEntry>& of_target : entries)
    for (const KernelEntry& one : of_target) add_tiling_fields(app, *one.make(), said);
  if (!parse(app, rest)) return 0;
  const auto says = [&](const Json& fields, const char* what) {
    if (!fields.empty() && (cases || decode))
      fail("--{} says a {}, but --{} compiles those that its runs take; leave one of them out", fields.begin().key(),
           what, cases ? "cases" : "decode");
  };
  says(said.tiling, "tiling");
  says(said.problem, "problem");
  if (cases && decode) fail("--cases and --decode compile kernels for different runs; leave one of them out");
  if (cases && candidates) fail("--cases compiles the tilings that its runs take; leave it or --candidates out");

  const Environment environment = Environment::detect();
  const DeviceTable devices = known_devices(environment);
  Compiler compiler(worker_config(environment));
  std::vector<Job> jobs;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const Target& target = targets[i];
    const PlannedDevice on{target, devices.of_arch(target.arch)};
    std::vector<KernelSource> sources;
    const auto add = [&](const std::vector<KernelSource>& more) {
      sources.insert(sources.end(), more.begin(), more.end());
    };
    // Neither `verify` nor an engine's calls plan for the figures of a device, as configure() does.
    const auto called = [&](const KernelEntry& entry) {
      if (cases) return verification_sources(entry, target);
      const std::unique_ptr<KernelPlan> plan = plan_with(entry, on, {});
      std::vector<KernelSource> called_by_engines = decode_sources(*plan);
      for (const DType dtype : {DType::bfloat16, DType::float16})
        for (KernelSource& source : prefill_sources(*plan, dtype)) called_by_engines.push_back(std::move(source));
      return called_by_engines;
    };
    if (!entries.empty()) {
      const bool said_none = said.problem.empty() && said.tiling.empty();
      if (said_none && entries[i].front().make()->only_decodes()) {  // what a plan is by default is not for it
        add(called(entries[i].front()));
      } else {
        const auto [entry, plan, chosen] = configure(entries[i], on, said);
        add(cases || decode ? called(entry) : kernel_sources(*plan, candidates));
        if (candidates) add(prefill_sources(*plan, plan->dtype()));
      }
    } else {
      if (!decode && language != "cute") sources = ceiling_sources();  // of `hypermla device --measure`
      bool any = false;
      if (decode && target.is_gpu())
        for (const DType dtype : {DType::bfloat16, DType::float16}) add(cache_sources(dtype, target.arch));
      for (const KernelEntry& entry : Registry::instance().all()) {
        if (!entry.runs_on(target.arch) || (!language.empty() && entry.language != language)) continue;
        any = true;
        if (decode && entry.draft) continue;  // MlaDecode takes one only where it is pinned
        if (cases || decode) {
          add(called(entry));
          continue;
        }
        const std::unique_ptr<KernelPlan> plan = plan_with(entry, on, {});
        if (candidates) add(prefill_sources(*plan, plan->dtype()));
        for (const Json& problem : representative_problems(*plan))
          add(kernel_sources(*configure({entry}, on, {.problem = problem}).plan, candidates));
      }
      if (!any)
        fail("no kernel in the language '{}' is for {}; leave out one of --language and --arch", language, target.arch);
    }
    std::set<std::string> seen;
    for (const KernelSource& source : sources)
      if (seen.insert(source.instance).second)
        jobs.push_back({source, target.arch, compiler.compile_ahead(source, target.arch)});
  }
  int failed = 0, spilled = 0;
  for (Job& job : jobs) {
    try {
      const Json& report = job.entry.get().report;
      const int frame = report.value("frame_bytes", 0);
      spilled += frame > 0;
      const std::string& instance = job.source.instance;
      const std::size_t fields = instance.rfind('{');  // a kernel of the cache has none
      fmt::print("{:<22} {:<10} {:>3} registers {:>5} B frame {:>7} B shared  {}\n", job.source.name, job.arch,
                 report.value("registers", 0), frame, report.value("shared_bytes", 0),
                 fields == std::string::npos ? instance : instance.substr(fields));
    } catch (const Error& error) {
      ++failed;
      fmt::print("{:<22} {:<10} FAILED {}\n", job.source.name, job.arch, error.what());
    }
    std::fflush(stdout);
  }
  fmt::print("{} compiled, {} failed, {} with a stack frame; cache {}\n", int(jobs.size()) - failed, failed, spilled,
             compiler.config().cache.string());
  return failed > 0 || (forbid_spills && spilled > 0) ? 1 : 0;
}

}  // namespace hypermla
