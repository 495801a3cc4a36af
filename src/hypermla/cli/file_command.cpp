// Stand-alone kernel files: docs/kernel-files.md.
#include <atomic>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "hypermla/base/error.h"
#include "hypermla/cli/commands.h"
#include "hypermla/cli/options.h"
#include "hypermla/cli/session.h"
#include "hypermla/cli/signals.h"
#include "hypermla/device/architecture.h"
#include "hypermla/device/measure.h"
#include "hypermla/plan/kernel_file.h"
#include "hypermla/roofline/kernel_time.h"

namespace hypermla {
namespace {

std::atomic<bool> has_verdict{false};

// So does exit(), behind which the status would be that of a file which passed.
void say_what_ends() {
  say_where_it_crashes(
      "the kernel file crashed or ended the program; look in describe(), reference() and the kernel for an access "
      "outside of a tensor, for an array that no stack has room for, or for exit()");
  // Each thread of the reference that calls exit() takes one of these, or it would go on to the end.
  for (unsigned i = 0; i <= std::thread::hardware_concurrency(); ++i)
    std::atexit([] {
      if (!has_verdict) end_as_crashed();
    });
}

struct FileFlags {
  std::string device = "auto", arch;
  double rtol = -1, atol = -1;  // negative: the file's
  double seconds = 0;
  std::uint64_t seed = 1;
  bool json = false;
};

std::int64_t whole_number(const std::string& flag, const std::string& text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size())
    fail("--{}={} is not supported: it must be a whole number", flag, text);
  return value;
}

// Everything that both commands need before they run: the file's host part, and the flags.
struct FileCommand {
  FileCommand(const Words& words, const std::string& name, const std::string& summary, bool timed)
      : words(words), name("hypermla " + name), summary(summary), timed(timed) {}
  FileCommand(const FileCommand&) = delete;
  ~FileCommand() { has_verdict = true; }  // or an error; exit() destroys nothing

  // False: help was printed.
  bool open() {
    const bool file_given = !words.empty() && words[0].rfind("-", 0) != 0;
    const Words rest(words.begin() + file_given, words.end());
    session = std::make_unique<Session>(flag_value(rest, "--device", "auto"));
    say_what_ends();
    if (file_given) library = std::make_unique<FileLibrary>(words[0], session->compiler);
    CLI::App app(summary, name + " <file>");
    const auto tolerance = [&](const char* flag, double& value, const char* help) {
      app.add_option(flag, value, help)->check(within(0, 1e30));
    };
    tolerance("--rtol", flags.rtol, "allowed difference relative to the reference (default: the file's)");
    tolerance("--atol", flags.atol, "allowed difference besides (default: the file's)");
    app.add_option("--device", flags.device, "auto (the first GPU, else the CPU), cpu, cuda or cuda:N");
    app.add_option("--seconds", flags.seconds,
                   timed ? "how long a GPU is kept busy before a sustained figure (default 1)"
                         : "for the reference; what takes longer is compared in a sample of rows (default 5)")
        ->check(within(0, 3600));
    add_seed(app, flags.seed, "of the random inputs (default 1)");
    if (!timed)
      app.add_option("--arch", flags.arch,
                     "compile the checked and the timed sizes for this GPU, sm_90, and run nothing");
    app.add_flag("--json", flags.json, "print one JSON object instead of text");
    flags.seconds = timed ? 1 : 5;
    std::map<std::string, std::string> texts;
    if (library) {
      for (const FileSize& size : library->describe({}, false, processors()).sizes) {
        if (app.get_option_no_throw("--" + size.name))
          fail("{} has a size called {}, which is a flag of this command; rename it", library->name(), size.name);
        app.add_option("--" + size.name, texts[size.name],
                       fmt::format("{} (default {} timed on a GPU, else {})", size.help, size.timed, size.checked))
            ->type_name("INT")
            ->group("Sizes of the problem");
      }
    }
    if (!parse(app, rest)) return false;
    if (!library) fail("which file? For example: {} examples/kernels/gemm_cutile.cu", name);
    for (const auto& [size, text] : texts)
      if (!text.empty()) given[size] = whole_number(size, text);
    return true;
  }

  // Of the present device or, where the file's language runs on GPUs only, of a Hopper GPU.
  int processors() const {
    return session->device->is_gpu() ? session->device->info().processors : Target::of_arch("sm_90").processors;
  }
  FileProblem describe(bool for_timing) const { return library->describe(given, for_timing, processors()); }
  // A kernel for GPUs, and none is here: it is compiled only.
  bool compile_only(const FileProblem& problem) const {
    return problem.language == "cute" && !session->device->is_gpu();
  }
  void say_device() const {
    const DeviceInfo& info = session->device->info();
    if (flags.json) return;
    if (flags.device == "auto" && !session->device->is_gpu())
      fmt::print("no GPU here ({}): running the same kernel on the CPU\n", *cuda_unavailable());
    fmt::print("{} on {} ({}, {} {})\n", library->name(), info.name, info.arch, info.processors,
               session->device->is_gpu() ? "SMs" : "cores");
  }

  Words words;
  std::string name, summary;
  bool timed;
  FileFlags flags;
  std::unique_ptr<Session> session;
  std::unique_ptr<FileLibrary> library;
  std::map<std::string, std::int64_t> given;
};

std::string sizes_text(const FileProblem& problem) {
  std::string text;
  for (std::size_t i = 0; i < problem.sizes.size(); ++i)
    text += fmt::format(" {}={}", problem.sizes[i].name, problem.values[i]);
  return text;
}

Json sizes_json(const FileProblem& problem) {
  Json sizes = Json::object();
  for (std::size_t i = 0; i < problem.sizes.size(); ++i) sizes[problem.sizes[i].name] = problem.values[i];
  return sizes;
}

void say_problem(const FileProblem& problem) {
  fmt::print("problem  {}\n", sizes_text(problem));
  for (const FileTensor& tensor : problem.tensors)
    fmt::print("{}    {:<8} [{}] {}, aligned to 16 bytes, moved by {} ({} bytes)\n",
               tensor.role == Role::input ? "input " : "output", tensor.name, fmt::join(tensor.shape, ", "),
               dtype_name(tensor.dtype), tensor.vector, tensor.vector * dtype_bytes(tensor.dtype));
}

std::string resources_text(const Json& report) {
  const int frame = report.value("frame_bytes", 0);
  return fmt::format("{} registers, {} B frame, {} B shared{}", report.value("registers", 0), frame,
                     report.value("shared_bytes", 0), frame > 0 ? ": registers are spilled" : "");
}

void say_entry(const CacheEntry& entry) {
  if (entry.report.contains("registers")) fmt::print("compiled  {}\n", resources_text(entry.report));
}

// The device part for a GPU that is not here.
void compile_for(const FileCommand& command, const std::string& arch) {
  if (!is_gpu_arch(arch)) fail("--arch={} is no GPU's; write sm_90, for example", arch);
  Target::of_arch(arch);  // throws where there is none of that name
  Json compiled = Json::array();
  for (const bool timed : {false, true}) {
    const FileProblem problem = command.describe(timed);
    const CacheEntry entry = command.session->compiler.compile(command.library->source(problem), arch);
    compiled.push_back({{"sizes", sizes_json(problem)}, {"report", entry.report}});
    if (!command.flags.json)
      fmt::print("problem  {}\ncompiled  {}\n", sizes_text(problem), resources_text(entry.report));
  }
  if (command.flags.json)
    fmt::print("{}\n", Json{{"kernel", command.library->name()}, {"compiled_only", compiled}}.dump(2));
}

// Status 3, for that is not what was asked for.
int compile_only(const FileCommand& command) {
  compile_for(command, "sm_90");
  const std::string none = command.flags.device == "cpu" ? "--device=cpu" : *cuda_unavailable();
  print_error(
      fmt::format("hypermla: {} is written for GPUs and none is here: it was compiled for sm_90, but neither run nor "
                  "checked ({})\n",
                  command.library->name(), none.substr(0, none.find(';'))));  // behind it is advice for other kernels
  return 3;
}

// Prints the result; the sentence of a failure goes to the standard error.
bool report(const FileCommand& command, const FileProblem& problem, const FileCheck& check) {
  if (!command.flags.json) {
    fmt::print("check     {}:{}, compared {} of {} rows\n", check.failure.empty() ? "passed" : "FAILED",
               sizes_text(problem), check.rows_compared, check.rows);
    for (const FileOutputError& one : check.outputs)
      fmt::print("  {:<8} {}  worst at [{}]: got {:.6g}, expected {:.6g}, off by {:.3g} where {:.3g} is allowed\n",
                 one.output, one.wrong ? "FAILED" : "ok    ", fmt::join(one.position, ", "), one.got, one.expected,
                 std::fabs(one.got - one.expected), one.allowed);
  }
  if (check.failure.empty()) return true;
  std::fflush(stdout);
  print_error(fmt::format("hypermla: {}: {}\n", command.library->path().filename().string(), check.failure));
  return false;
}

Json check_json(const FileProblem& problem, const FileCheck& check) {
  Json outputs = Json::array();
  for (const FileOutputError& one : check.outputs)
    outputs.push_back({{"name", one.output},
                       {"compared", one.compared},
                       {"wrong", one.wrong},
                       {"worst_at", one.position},
                       {"got", one.got},
                       {"expected", one.expected},
                       {"allowed", one.allowed}});
  return {{"sizes", sizes_json(problem)}, {"passed", check.failure.empty()},      {"failure", check.failure},
          {"rows", check.rows},           {"rows_compared", check.rows_compared}, {"outputs", outputs}};
}

// The ceilings of the device for the file's main type; empty where they are not known.
std::optional<Ceilings> ceilings(const FileCommand& command, const FileProblem& problem, Load load) {
  try {
    return ceilings_of(command.session->planned.spec, problem.tensors.front().dtype, load);
  } catch (const Error&) {
    return std::nullopt;
  }
}

Json timing_json(const FileCommand& command, const FileProblem& problem, const Timing& timing, Load load) {
  const double seconds = timing.median();
  Json one = {{"median_us", seconds * 1e6},
              {"low_us", timing.low() * 1e6},
              {"high_us", timing.high() * 1e6},
              {"repetitions", timing.seconds.size()},
              {"GBps", problem.cost.bytes / seconds * 1e-9},
              {"tflops", problem.cost.flops / seconds * 1e-12}};
  if (timing.sm_mhz) one["sm_mhz"] = *timing.sm_mhz;
  if (timing.watts) one["watts"] = *timing.watts;
  if (const auto most = ceilings(command, problem, load)) {
    one["of_bandwidth"] = problem.cost.bytes / seconds / most->bytes;
    one["of_arithmetic"] = problem.cost.flops / seconds / most->flops;
    one["ceiling_GBps"] = most->bytes * 1e-9;
    one["ceiling_tflops"] = most->flops * 1e-12;
  }
  return one;
}

void say_timing(const char* flavour, const Json& one) {
  std::string parts;
  if (one.contains("of_bandwidth"))
    parts = fmt::format("  {:.1f} % of {:.0f} GB/s, {:.1f} % of {:.4g} TFLOP/s",
                        100 * one["of_bandwidth"].get<double>(), one["ceiling_GBps"].get<double>(),
                        100 * one["of_arithmetic"].get<double>(), one["ceiling_tflops"].get<double>());
  fmt::print("{:<9} {:>10.1f} us  {:>8.2f} TFLOP/s  {:>7.1f} GB/s{}  ({} runs, 5 to 95 %: {:.1f} to {:.1f} us)\n",
             flavour, one["median_us"].get<double>(), one["tflops"].get<double>(), one["GBps"].get<double>(), parts,
             one["repetitions"].get<int>(), one["low_us"].get<double>(), one["high_us"].get<double>());
}

}  // namespace

int verify_file_command(const Words& words) {
  FileCommand command(
      words, "verify-file",
      "Compile a stand-alone kernel file, run it and compare with the reference that it holds. Exit status "
      "1: it\ndiffers; 3: it was compiled only.\n",
      false);
  if (!command.open()) return 0;
  const FileProblem small = command.describe(false);
  if (!command.flags.arch.empty()) return compile_for(command, command.flags.arch), 0;
  if (command.compile_only(small)) return compile_only(command);
  command.say_device();
  std::vector<FileProblem> problems = {small};
  // Small sizes show what happens at edges, large ones what happens in the middle.
  if (command.session->device->is_gpu())
    if (FileProblem large = command.describe(true); large.values != small.values) problems.push_back(std::move(large));
  bool passed = true;
  Json checks = Json::array();
  for (const FileProblem& problem : problems) {
    if (!command.flags.json) say_problem(problem);
    FileRun run(*command.library, problem, command.session->device, command.session->compiler, command.flags.seed);
    if (!command.flags.json) say_entry(run.entry());
    const FileCheck check = run.check(command.flags.rtol, command.flags.atol, command.flags.seconds);
    passed &= report(command, problem, check);
    checks.push_back(check_json(problem, check));
  }
  if (command.flags.json)
    fmt::print("{}\n", Json{{"kernel", command.library->name()},
                            {"device", command.session->device->info().name},
                            {"passed", passed},
                            {"checks", checks}}
                           .dump(2));
  return passed ? 0 : 1;
}

int bench_file_command(const Words& words) {
  FileCommand command(
      words, "bench-file",
      "Time a stand-alone kernel file after a short check: median, spread, and which part of the device's "
      "ceilings\nit reaches. Exit status 1: it is wrong; 3: it was compiled only.\n",
      true);
  if (!command.open()) return 0;
  Device& device = *command.session->device;
  const FileProblem problem = command.describe(device.is_gpu());
  if (command.compile_only(problem)) return compile_only(command);
  if (!(problem.cost.bytes > 0 || problem.cost.flops > 0))
    fail("{} does not say how much work it is; call work() in describe()", command.library->name());
  command.say_device();
  if (!command.flags.json) say_problem(problem);
  FileRun run(*command.library, problem, command.session->device, command.session->compiler, command.flags.seed);
  if (!command.flags.json) say_entry(run.entry());
  const FileCheck check = run.check(command.flags.rtol, command.flags.atol, 1);
  if (!report(command, problem, check)) {
    if (command.flags.json)
      fmt::print("{}\n", Json{{"kernel", command.library->name()}, {"check", check_json(problem, check)}}.dump(2));
    return 1;
  }

  const Work work = [&](StreamHandle stream) { run.run(stream); };
  Json timing = Json::object();
  timing["burst"] = timing_json(command, problem, measure_burst(device, work, 7), Load::burst);
  if (device.is_gpu())
    timing["sustained"] =
        timing_json(command, problem, measure_sustained(device, work, command.flags.seconds), Load::sustained);
  const bool cached = problem.cost.bytes < 4.0 * double(device.info().cache_bytes);
  if (command.flags.json) {
    fmt::print("{}\n", Json{{"kernel", command.library->name()},
                            {"language", problem.language},
                            {"device", {{"name", device.info().name}, {"driver", device.info().driver}}},
                            {"sizes", sizes_json(problem)},
                            {"fits_cache", cached},
                            {"report", run.entry().report},
                            {"check", check_json(problem, check)},
                            {"timing", timing}}
                           .dump(2));
    return 0;
  }
  for (const auto& [flavour, one] : timing.items()) say_timing(flavour.c_str(), one);
  if (cached)
    fmt::print(
        "note      the tensors are less than four times the cache of {:.0f} MB: part of them is read from there\n",
        device.info().cache_bytes / 1048576.0);
  return 0;
}

}  // namespace hypermla
