#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <random>

#include "hypermla/base/error.h"
#include "hypermla/cli/commands.h"
#include "hypermla/cli/options.h"
#include "hypermla/cli/progress.h"
#include "hypermla/cli/session.h"
#include "hypermla/plan/check.h"
#include "hypermla/plan/registry.h"
#include "hypermla/profile/profilers.h"
#include "hypermla/tune/tune_n.h"

namespace hypermla {
namespace {

struct Flags {
  std::string device = "auto";
  std::string language;
  bool no_autotune = false;
  bool retune = false;
  int tune_max_iters = 0;
  std::string prof_type = "annotation";
  std::string out_dir;
  std::string label;
  bool check = false;
  int bench_runs = 20;
  std::uint64_t seed = 0;
};

void add_flags(CLI::App& app, Flags& flags) {
  app.add_option("--device", flags.device, "auto (the first GPU, else the CPU), cpu, cuda or cuda:N")->group("Run");
  app.add_option("--language", flags.language, "cute or cutile (default: the fastest that runs on the device)")
      ->group("Run");
  app.add_flag("--check", flags.check, "compare with the reference; exit status 1 when it differs")->group("Run");
  add_seed(app, flags.seed, "of the random inputs; 0 draws a fresh one")->group("Run");
  app.add_flag("--no_autotune", flags.no_autotune,
               "use the tiling flags; one that is not given has the default for the problem, as shown above")
      ->group("Tune");
  app.add_flag("--retune", flags.retune, "forget what was measured, and which tilings were rejected, before")
      ->group("Tune");
  app.add_option("--tune_max_iters", flags.tune_max_iters, "candidates to measure per kernel; 0: all")
      ->check(whole_within(0, 1000000))
      ->group("Tune");
  app.add_option("--prof_type", flags.prof_type, "annotation (default), event, ncu, nsys or disabled")
      ->group("Profile");
  app.add_option("--bench_runs", flags.bench_runs, "cold runs that are timed (default 20); bursts: up to 7 of them")
      ->check(whole_within(1, 1000000))
      ->group("Profile");
  app.add_option("--label", flags.label, "a word of yours for this run, kept in its profile")->group("Profile");
  app.add_option("--out_dir", flags.out_dir,
                 "where the profile goes: a new or empty directory (default out/profiles/<mode>/<kernel>/...)")
      ->group("Profile");
}

// Before anything is compiled or tuned: the tools of a GPU say nothing about a CPU.
void require_gpu_for(ProfileMode mode, const Device& device) {
  if ((mode == ProfileMode::ncu || mode == ProfileMode::nsys) && !device.is_gpu())
    fail(
        "--prof_type={} looks into a GPU, and this kernel would run on the CPU; use --prof_type=annotation or "
        "--prof_type=event",
        profile_mode_name(mode));
}

// A flag that another flag makes meaningless is refused, for it would do nothing and say nothing.
void refuse_idle_flags(const CLI::App& app, const Flags& flags, ProfileMode mode, const Settings& said) {
  auto refuse = [&](std::initializer_list<const char*> idle, const char* beside) {
    for (const char* flag : idle)
      if (app.count(flag) > 0) fail("{} does nothing with {}: leave out one of the two", flag, beside);
  };
  if (flags.no_autotune)
    refuse({"--retune", "--tune_max_iters"}, "--no_autotune");
  else if (!said.tiling.empty())
    fail("--{0} is for --no_autotune: add that, or leave out --{0} and let the tuner choose",
         said.tiling.items().begin().key());
  if (mode == ProfileMode::disabled) refuse({"--out_dir", "--label", "--bench_runs"}, "--prof_type=disabled");
}

// The help of one version. The defaults of its tiling are those for the problem that the command line describes, as far
// as it can be read, on the present device or, where the version does not run there, on a Hopper GPU.
void print_help(const KernelEntry& entry, const std::string& name, const Session& session, const Settings& asked) {
  CLI::App app(fmt::format("{}\n", entry.summary), name);
  Settings said;
  Flags flags;
  add_problem_fields(app, {entry}, said);
  const PlannedDevice on = entry.runs_on(session.planned.target.arch)
                               ? session.planned
                               : PlannedDevice{Target::of_arch("sm_90"), session.devices.of_arch("sm_90")};
  const auto plan = [&] {
    try {
      return described(entry, on, {.problem = asked.problem}).plan;
    } catch (const Error&) {
      return described(entry, on, {}).plan;
    }
  }();
  add_tiling_fields(app, *plan, said);
  add_flags(app, flags);
  parse(app, {"--help"});
}

std::string fields_text(const Json& fields) {
  std::string text;
  for (const auto& [name, value] : fields.items()) text += fmt::format(" {}={}", name, value.dump());
  return text;
}

// Compiles what the cache lacks, and says so where that takes long.
void prepare(Executable& executable, Session& session, Progress& progress) {
  auto compile = [&](TiledKernel* kernel) {
    return session.compiler.compile_ahead(kernel->source(kernel->tiling()), session.device->info().arch);
  };
  for (TiledKernel* kernel : executable.kernels()) compile(kernel);
  for (TiledKernel* kernel : executable.kernels()) {
    const auto compiled = compile(kernel);
    if (compiled.wait_for(std::chrono::milliseconds(500)) != std::future_status::ready)
      progress.say("compiling " + kernel->name());
    compiled.wait();
  }
  progress.clear();
  executable.prepare(session.compiler, *session.device);
}

// What is said where a kernel of it crashes.
void begin(const KernelEntry& entry, KernelPlan& plan, Executable& executable, const Session& session) {
  session.runs(fmt::format("{} {}", entry.full_name(), run_text(plan, executable)));
}

AutotuneOptions tuning_options(const KernelEntry& entry, const Flags& flags, const Session& session,
                               Progress& progress) {
  AutotuneOptions options;
  options.history_root = session.environment.history_root();
  options.retune = flags.retune;
  options.tuner.max_iterations = flags.tune_max_iters;
  options.begin = [&](KernelPlan& plan, Executable& executable) { begin(entry, plan, executable, session); };
  options.progress = [&](const AutotuneOptions::Progress& at) {
    const std::string counts =
        fmt::format("tuning {}: {} of {} tilings measured{}{}", at.kernel, at.measured, at.planned - at.rejected,
                    at.rejected ? fmt::format(", {} rejected", at.rejected) : "",
                    at.best_seconds > 0 ? fmt::format(", best {:.1f} us", at.best_seconds * 1e6) : "");
    if (at.doing == "done")
      progress.keep(counts);
    else
      progress.show(counts + ", " + at.doing, double(at.measured + at.rejected) / std::max(at.planned, 1));
  };
  return options;
}

AutotuneResult choose_tilings(const KernelEntry& entry, const Flags& flags, KernelPlan& plan, Executable& executable,
                              Session& session, Progress& progress) {
  if (!flags.no_autotune)
    return autotune(plan, executable, session.compiler, *session.device, session.planned.spec,
                    tuning_options(entry, flags, session, progress));
  prepare(executable, session, progress);
  return {};
}

void print_tuned_n(const TunedN& tuned, int t) {
  std::string times;
  const TunedN::Point* best = &tuned.measured.front();
  const TunedN::Point* between = nullptr;
  for (const TunedN::Point& one : tuned.measured) {
    times += fmt::format("{}n={} {:.1f} us", times.empty() ? "" : ", ", one.n, one.seconds * 1e6);
    if (one.n == tuned.n) best = &one;
    if (one.n > 0 && one.n < t && (!between || one.seconds < between->seconds)) between = &one;
  }
  fmt::print("chosen    n={}, the fastest of those measured: {}\n", tuned.n, times);
  if (between && between != best)
    fmt::print("          all tokens {}: {:.1f} us, against {:.1f} us with the best n between the ends, {}\n",
               tuned.n == 0 ? "latent" : "decompressed", best->seconds * 1e6, between->seconds * 1e6, between->n);
}

std::vector<KernelEntry> find_kernels(const std::string& name, const std::string& version, const std::string& arch,
                                      const std::string& language, bool anywhere) {
  try {
    return Registry::instance().find_all(name, version, arch, language);
  } catch (const Error&) {
    if (!anywhere) throw;
    return Registry::instance().find_all(name, version, "sm_90", language);
  }
}

// Flags of kernels of this name that do not run on this device: --page is one of Hopper's.
void refuse_flags_of_others(const CLI::App& app, const Words& rest, const std::string& kernel,
                            const std::string& arch) {
  for (const KernelEntry& entry : Registry::instance().named(kernel, "")) {
    if (entry.runs_on(arch)) continue;
    const std::unique_ptr<KernelPlan> plan = entry.make();
    for (const FieldRef& field : plan->problem_fields()) {
      const std::string flag = "--" + std::string(field.name);
      const bool given = std::any_of(rest.begin(), rest.end(), [&](const std::string& word) {
        return word == flag || word.rfind(flag + "=", 0) == 0;
      });
      if (given && !app.get_option_no_throw(flag))
        fail("{} is a flag of {}, which does not run on this device; leave it out, or name a device that runs it", flag,
             entry.full_name());
    }
  }
}

void print_profile(const Profile& profile, const std::filesystem::path& directory) {
  profile.timing.for_each([](const char* flavour, const Times& times) {
    fmt::print(
        "{:<9} {:>10.1f} us  {:>8.2f} TFLOP/s  {:>7.1f} GB/s  {:>5.1f} % of the roofline  ({} runs, 5 to 95 %: "
        "{:.1f} to {:.1f} us)\n",
        flavour, times.median_us, times.tflops, times.gbps, 100 * times.roofline_fraction, times.repetitions,
        times.low_us, times.high_us);
  });
  if (profile.host_us_per_run) fmt::print("run()     {:>10.1f} us of host time\n", *profile.host_us_per_run);
  if (const auto& bottleneck = profile.bottleneck)
    fmt::print("bound     {} (confidence {}): {}\n", bottleneck->kind, bottleneck->confidence, bottleneck->why);
  for (const Opportunity& next : profile.opportunities) {
    const std::string id = next.stage.empty() ? next.id : fmt::format("{}, in {}", next.id, next.stage);
    if (next.refuted.empty())
      fmt::print("next      {} - est. {:.0f} % - {} ({})\n", next.name, next.gain_percent, next.trigger, id);
    else
      fmt::print("refuted   {} ({}): {}\n", next.name, id, next.refuted);
  }
  if (!profile.missing.empty()) fmt::print("missing   {}\n", profile.missing);
  fmt::print("report    {}\n", (directory / "report.md").string());
}

}  // namespace

int kernel_command(const Words& words) {
  if (words.empty() || words[0] == "--help" || words[0] == "-h") {
    fmt::print(
        "Usage: hypermla kernel <kernel> [version] [flags]\n\n"
        "Run, tune, check and profile one kernel. `hypermla kernel <kernel> --help` lists its flags.\n\n");
    list_command();
    if (words.empty()) fail("which kernel? For example: hypermla kernel flash_attention --b=1 --s=16 --t=1024");
    return 0;
  }
  const bool versioned = words.size() > 1 && words[1].rfind("-", 0) != 0;
  const Words rest(words.begin() + (versioned ? 2 : 1), words.end());
  // The device decides the language, and that decides which flags there are. Help is given for what does not run here,
  // too.
  Session session(flag_value(rest, "--device", "auto"));
  const bool help =
      std::any_of(rest.begin(), rest.end(), [](const std::string& word) { return word == "--help" || word == "-h"; });
  const std::vector<KernelEntry> entries = find_kernels(
      words[0], versioned ? words[1] : "", session.device->info().arch, flag_value(rest, "--language"), help);

  const std::string name = "hypermla kernel " + words[0];
  CLI::App app("", name);
  app.set_help_flag();  // print_help() knows more
  Settings said;
  add_problem_fields(app, entries, said);
  for (const KernelEntry& one : entries) add_tiling_fields(app, *one.make(), said);
  Flags flags;
  add_flags(app, flags);
  if (help) {
    Words others = rest;
    std::erase_if(others, [](const std::string& word) { return word == "--help" || word == "-h"; });
    try {
      parse(app, others);
    } catch (const Error&) {
      said = {};
    }
    print_help(entries.front(), name, session, said);
    const std::vector<KernelEntry> on_hopper =
        Registry::instance().find_all(words[0], versioned ? words[1] : "", "sm_90", flag_value(rest, "--language"));
    if (on_hopper.front().language != entries.front().language)
      fmt::print("\nOn a Hopper GPU kernels in {0} are the fast ones, whose flags --language={0} --help says.\n",
                 on_hopper.front().language);
    return 0;
  }
  refuse_flags_of_others(app, rest, words[0], session.device->info().arch);
  parse(app, rest);
  const ProfileMode mode = profile_mode_from_name(flags.prof_type);
  require_gpu_for(mode, *session.device);
  refuse_idle_flags(app, flags, mode, said);
  require_utf8("--label", flags.label);
  if (mode != ProfileMode::disabled) {
    require_out_dir(flags.out_dir);
    require_knowledge(session.environment.profile_tools);
  }
  ConfiguredPlan configured = configure(entries, session.planned, said);
  const std::uint64_t seed = flags.seed ? flags.seed : std::random_device{}();
  const DeviceInfo& info = session.device->info();
  if (flags.device == "auto" && !session.device->is_gpu())
    fmt::print("no GPU here ({}): running the same kernel on the CPU\n", *cuda_unavailable());
  const KernelEntry entry = configured.entry;
  fmt::print("{} {} on {} ({}, {} {})\n", entry.full_name(), entry.version, info.name, info.arch, info.processors,
             session.device->is_gpu() ? "SMs" : "cores");
  Progress progress;
  std::optional<TunedN> tuned;
  if (configured.chosen.contains("n") && said.problem.value("n", "-1") == "-1" && !flags.no_autotune) {
    Json problem = to_json(configured.plan->problem_fields());
    problem["n"] = -1;
    tuned = tune_n(entry, session.planned, problem, session.device, session.compiler, seed,
                   tuning_options(entry, flags, session, progress));
    flags.retune = false;  // that was for its tilings, too
    problem["n"] = tuned->n;
    configured = configure({entry}, session.planned, {.offered = problem});
    progress.clear();
    print_tuned_n(*tuned, problem.at("t"));
  } else if (!configured.chosen.empty()) {
    fmt::print("chosen   {}\n", fields_text(configured.chosen));
  }
  const std::unique_ptr<KernelPlan> plan = std::move(configured.plan);

  require_memory(*plan, info);
  AllocatedTensors tensors(*plan, session.device, seed);
  std::unique_ptr<Executable> executable = plan->plan(tensors.tensors());
  AutotuneResult tuning = choose_tilings(entry, flags, *plan, *executable, session, progress);
  begin(entry, *plan, *executable, session);
  if (tuned) tuning.stages.insert(tuning.stages.begin(), tuned->stage);
  for (const std::string& remark : remarks(tuning)) fmt::print("tuning    {}\n", remark);
  for (TiledKernel* kernel : launched_kernels(*executable))
    fmt::print("tiling    {}:{}\n", kernel->name(), fields_text(kernel->tiling()));

  bool passed = true;
  std::optional<Profile::Check> checked;
  if (flags.check) {
    checked = Profile::Check{true, {}};
    progress.show("checking against the reference");
    const auto checks = check_inputs(entry, *plan, *executable, tensors, session.device, session.compiler, seed);
    progress.clear();
    for (const auto& [inputs, result] : checks) {
      fmt::print("check     {} (seed {}, {})\n{}", result.passed ? "passed" : "FAILED", seed, inputs, to_text(result));
      passed &= result.passed;
      for (const OutputError& one : result.outputs) {
        double& worst = checked->relative_errors[one.output];
        worst = std::max(worst, one.relative_norm);
      }
    }
    checked->passed = passed;
  }
  if (mode != ProfileMode::disabled && passed) {
    std::fflush(stdout);
    progress.say("profiling, mode " + flags.prof_type);
    const auto [found, directory] = profile({.kernel = entry,
                                             .plan = *plan,
                                             .executable = *executable,
                                             .device = *session.device,
                                             .spec = session.planned.spec,
                                             .tuning = tuning,
                                             .out_dir = flags.out_dir,
                                             .bench_runs = flags.bench_runs,
                                             .label = flags.label,
                                             .device_name = flags.device,
                                             .seed = seed,
                                             .check = checked,
                                             .tools = session.environment.profile_tools},
                                            mode);
    progress.clear();
    print_profile(found, directory);
    if (!found.missing.empty()) return 1;
  }
  if (mode == ProfileMode::disabled && !flags.check) run_for_profilers(*executable, *session.device);
  return passed ? 0 : 1;
}

int list_command() {
  for (const KernelEntry& entry : Registry::instance().all())
    fmt::print("{:<34} {:<4} {}{}\n", entry.language + "." + entry.layer + "." + entry.design, entry.version,
               entry.draft ? "draft: " : "", entry.summary);
  return 0;
}

}  // namespace hypermla
