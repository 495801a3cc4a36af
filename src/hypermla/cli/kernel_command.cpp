#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <random>

#include "hypermla/base/error.h"
#include "hypermla/cli/commands.h"
#include "hypermla/cli/options.h"
#include "hypermla/cli/session.h"
#include "hypermla/plan/check.h"
#include "hypermla/plan/registry.h"
#include "hypermla/profile/profilers.h"

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
  app.add_option("--seed", flags.seed, "of the random inputs; 0 draws a fresh one")->group("Run");
  app.add_flag("--no_autotune", flags.no_autotune, "use the tiling flags, or the default tiling")->group("Tune");
  app.add_flag("--retune", flags.retune, "forget what was measured, and which tilings were rejected, before")
      ->group("Tune");
  app.add_option("--tune_max_iters", flags.tune_max_iters, "candidates to measure per kernel; 0: all")
      ->check(CLI::Range(0, 1'000'000).description(""))
      ->group("Tune");
  app.add_option("--prof_type", flags.prof_type, "annotation (default), event, ncu, nsys or disabled")
      ->group("Profile");
  app.add_option("--bench_runs", flags.bench_runs, "repetitions of a measurement (default 20)")
      ->check(CLI::Range(1, 1'000'000).description(""))
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

// In floating point, which no size overflows. Memory that is promised but not there would end the process later.
void require_memory(const KernelPlan& plan, const DeviceInfo& info) {
  double bytes = 0;
  for (const TensorSpec& spec : plan.tensors()) {
    double tensor = dtype_bytes(spec.dtype);
    for (std::int64_t extent : spec.shape) tensor *= double(extent);
    bytes += tensor;
  }
  if (!(bytes < double(info.memory_bytes)))
    fail("the tensors need {:.1f} GB, but this device has {:.1f} GB; choose a smaller b, h or t", bytes * 1e-9,
         info.memory_bytes * 1e-9);
}

// On a terminal one line that is rewritten, elsewhere a line for every kernel.
class Progress {
 public:
  void show(const AutotuneOptions::Progress& at) {
    last_ = fmt::format("tuning {}: {} of at most {} measurements, best {:.1f} us", at.kernel, at.measured,
                        std::max(at.measured, at.candidates), at.best_seconds * 1e6);
    if (!::isatty(2)) return;
    const int width = 24, done = std::min(width, width * at.measured / std::max(at.candidates, 1));
    fmt::print(stderr, "\r\033[K[{:=<{}}{: <{}}] {}", "", done, "", width - done, last_);
    std::fflush(stderr);
  }
  void finish() {
    if (last_.empty()) return;
    fmt::print(stderr, "{}{}\n", ::isatty(2) ? "\r\033[K" : "", last_);
    last_.clear();
  }

 private:
  std::string last_;
};

std::string fields_text(const Json& fields) {
  std::string text;
  for (const auto& [name, value] : fields.items()) text += fmt::format(" {}={}", name, value.dump());
  return text;
}

AutotuneResult choose_tilings(const Flags& flags, KernelPlan& plan, Executable& executable, Session& session) {
  if (flags.no_autotune) {
    executable.prepare(session.compiler, *session.device);
    return {};
  }
  AutotuneOptions options;
  options.history_root = session.environment.history_root();
  options.retune = flags.retune;
  options.tuner.max_iterations = flags.tune_max_iters;
  Progress progress;
  options.progress = [&](const AutotuneOptions::Progress& at) { progress.show(at); };
  AutotuneResult result = autotune(plan, executable, session.compiler, *session.device, session.planned.spec, options);
  progress.finish();
  return result;
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

void print_profile(const Profile& profile, const std::filesystem::path& directory) {
  profile.timing.for_each([](const char* flavour, const Times& times) {
    fmt::print("{:<9} {:>10.1f} us  {:>8.2f} TFLOP/s  {:>7.1f} GB/s  {:>5.1f} % of the roofline\n", flavour,
               times.median_us, times.tflops, times.gbps, 100 * times.roofline_fraction);
  });
  if (profile.host_us_per_run) fmt::print("run()     {:>10.1f} us of host time\n", *profile.host_us_per_run);
  if (const auto& bottleneck = profile.bottleneck)
    fmt::print("bound     {} (confidence {}): {}\n", bottleneck->kind, bottleneck->confidence, bottleneck->why);
  for (const Opportunity& next : profile.opportunities)
    fmt::print("next      {} - est. {:.0f} % - {} ({})\n", next.name, next.gain_percent, next.trigger, next.id);
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

  CLI::App app(fmt::format("{}\n", entries.front().summary), "hypermla kernel " + words[0]);
  Settings said;
  add_fields(app, help ? std::vector{entries.front()} : entries, said, true);
  Flags flags;
  add_flags(app, flags);
  if (!parse(app, rest)) return 0;
  const ProfileMode mode = profile_mode_from_name(flags.prof_type);
  require_gpu_for(mode, *session.device);
  if (mode != ProfileMode::disabled) require_out_dir(flags.out_dir);
  const auto [entry, plan, chosen] = configure(entries, session.planned, said);
  const std::uint64_t seed = flags.seed ? flags.seed : std::random_device{}();
  const DeviceInfo& info = session.device->info();
  if (flags.device == "auto" && !session.device->is_gpu())
    fmt::print("no GPU here ({}): running the same kernel on the CPU\n", *cuda_unavailable());
  fmt::print("{} {} on {} ({}, {} {})\n", entry.full_name(), entry.version, info.name, info.arch, info.processors,
             session.device->is_gpu() ? "SMs" : "cores");
  if (!chosen.empty()) fmt::print("chosen   {}\n", fields_text(chosen));

  require_memory(*plan, info);
  AllocatedTensors tensors(*plan, session.device, seed);
  std::unique_ptr<Executable> executable = plan->plan(tensors.tensors());
  const AutotuneResult tuning = choose_tilings(flags, *plan, *executable, session);
  for (const std::string& remark : remarks(tuning)) fmt::print("tuning    {}\n", remark);
  for (TiledKernel* kernel : launched_kernels(*executable))
    fmt::print("tiling    {}:{}\n", kernel->name(), fields_text(kernel->tiling()));

  bool passed = true;
  if (flags.check) {
    const CheckResult result = check(*plan, *executable, tensors, *session.device, seed);
    fmt::print("check     {} (seed {})\n{}", result.passed ? "passed" : "FAILED", seed, to_text(result));
    passed = result.passed;
  }
  if (mode != ProfileMode::disabled && passed) {
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
                                             .seed = flags.seed,
                                             .tools = session.environment.profile_tools},
                                            mode);
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
