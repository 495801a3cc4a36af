#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>

#include "hypermla/base/date.h"
#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/base/json_file.h"
#include "hypermla/cli/commands.h"
#include "hypermla/cli/options.h"
#include "hypermla/cli/session.h"
#include "hypermla/plan/cases.h"
#include "hypermla/plan/check.h"
#include "hypermla/plan/registry.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

// Of a case; beyond, a sample of the outputs is compared.
constexpr double kReferenceFlops = 1e9;

struct Tally {
  int cases = 0, failed = 0;
  std::map<std::string, double> worst;  // relative error by output
};

void run_case(const KernelEntry& entry, KernelPlan& plan, Executable& executable, AllocatedTensors& tensors,
              Session& session, Tally& tally) {
  executable.prepare(session.compiler, *session.device);
  const CheckResult result = check(plan, executable, tensors, *session.device, 1, kReferenceFlops);
  ++tally.cases;
  for (const OutputError& error : result.outputs)
    tally.worst[error.output] = std::max(tally.worst[error.output], error.relative_norm);
  if (result.passed) return;
  ++tally.failed;
  fmt::print("FAILED {} {}\n", entry.full_name(), problem_key(plan));
  for (TiledKernel* kernel : executable.kernels()) fmt::print("  {} {}\n", kernel->name(), kernel->tiling().dump());
  fmt::print("{}", to_text(result));
}

// Every case with its default tiling, and every candidate tiling on some.
Tally verify(const KernelEntry& entry, Session& session) {
  std::unique_ptr<KernelPlan> plan = entry.make();
  plan->target = Target::of(session.device->info());
  for (const KernelSource& source : verification_sources(*plan))
    session.compiler.compile_ahead(source, session.device->info().arch);
  Tally tally;
  std::uint64_t seed = std::uint64_t(std::time(nullptr));
  int cases = 0;
  for (const Json& problem : correctness_cases(*plan)) {
    set_problem(*plan, problem);
    // Every second case has scores that keep growing.
    AllocatedTensors tensors(*plan, session.device, seed += 1000, cases++ % 2 == 1);
    std::unique_ptr<Executable> executable = plan->plan(tensors.tensors());
    run_case(entry, *plan, *executable, tensors, session, tally);
    if (!tries_all_tilings(problem)) continue;
    for (TiledKernel* kernel : executable->kernels()) {
      const Json chosen = kernel->tiling();
      for (const Json& tiling : kernel->candidates()) {
        if (tiling == chosen) continue;
        kernel->set_tiling(tiling);
        run_case(entry, *plan, *executable, tensors, session, tally);
      }
      kernel->set_tiling(chosen);
    }
  }
  return tally;
}

// Of every kernel that some case runs.
Json fingerprints(const KernelEntry& entry, const Compiler& compiler) {
  std::map<std::string, std::string> all;
  const std::unique_ptr<KernelPlan> plan = entry.make();
  for (const KernelSource& source : verification_sources(*plan))
    if (!all.count(source.name)) all[source.name] = compiler.fingerprint(source.header);
  return all;
}

// By kernel and device. An absent file has none; one that holds anything else is refused, not overwritten.
Json read_records(const fs::path& path) {
  std::error_code unreadable;  // read_json() says why
  if (fs::status(path, unreadable).type() == fs::file_type::not_found) return Json::object();
  const Json records = read_json(path);
  const auto all_objects = [](const Json& of) {
    return of.is_object() && std::all_of(of.begin(), of.end(), [](const Json& one) { return one.is_object(); });
  };
  if (!all_objects(records) || !std::all_of(records.begin(), records.end(), all_objects))
    fail("{} holds no records of `hypermla verify`; restore or remove it, or name another file by --record",
         path.string());
  return records;
}

}  // namespace

int verify_command(const Words& words) {
  std::string kernel, version, device = "auto", record;
  bool records_only = false;
  CLI::App app(
      "Run the correctness cases of every kernel, or of one, on this device, against the reference.\n"
      "On a GPU the result is recorded: kernel fingerprint, device, driver, date, cases and worst errors.\n",
      "hypermla verify");
  app.add_option("kernel", kernel, "one kernel (default: all)");
  app.add_option("version", version, "its version");
  app.add_option("--device", device, "auto (the first GPU, else the CPU), cpu, cuda or cuda:N");
  app.add_option("--record", record, "where to record (default: results/verified.json, and only on a GPU)");
  app.add_flag("--records_only", records_only, "run nothing; check that every kernel's record matches its source");
  if (!parse(app, words)) return 0;

  std::vector<KernelEntry> entries = Registry::instance().all();
  const Environment environment = Environment::detect();
  const bool explicit_record = !record.empty();
  const fs::path path = explicit_record ? fs::path(record) : environment.root / "results/verified.json";

  if (records_only) {
    if (!kernel.empty()) entries = {Registry::instance().find(kernel, version)};
    const Json records = read_records(path);
    const Compiler compiler(environment.compiler_config());
    int stale = 0;
    for (const KernelEntry& entry : entries) {
      bool matches = false;
      const Json by_device = records.value(entry.full_name(), Json::object());
      for (const auto& [name, one] : by_device.items())
        matches |=
            one.value("fingerprint", Json()) == fingerprints(entry, compiler) && one.value("failed", Json()) == 0;
      stale += !matches && !entry.draft;
      fmt::print("{:<40} {}\n", entry.full_name(),
                 matches       ? "recorded"
                 : entry.draft ? "a draft, not recorded"
                               : "NOT RECORDED: run `hypermla verify` on a GPU");
    }
    return stale ? 1 : 0;
  }

  Session session(device);
  const std::string& arch = session.device->info().arch;
  if (!kernel.empty()) entries = {Registry::instance().find(kernel, version, arch)};
  std::erase_if(entries, [&](const KernelEntry& entry) { return !entry.runs_on(arch); });
  const bool recorded = session.device->is_gpu() || explicit_record;
  if (recorded) read_records(path);  // what cannot be recorded is said before hours of cases, not after them
  fmt::print("verifying on {} ({})\n", session.device->info().name, session.device->info().arch);
  int failed = 0;
  for (const KernelEntry& entry : entries) {
    const auto begin = std::chrono::steady_clock::now();
    const Tally tally = verify(entry, session);
    failed += tally.failed;
    std::string worst;
    for (const auto& [output, error] : tally.worst) worst += fmt::format("  {} {:.1e}", output, error);
    fmt::print("{:<40} {} cases, {} failed, worst relative error{}  ({:.1f} s)\n", entry.full_name(), tally.cases,
               tally.failed, worst, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    std::fflush(stdout);
    if (!recorded) continue;
    Json records = read_records(path);
    Json& one = records[entry.full_name()][session.device->info().name];
    one = {{"fingerprint", fingerprints(entry, session.compiler)},
           {"arch", session.device->info().arch},
           {"driver", session.device->info().driver},
           {"date", utc_now()},
           {"cases", tally.cases},
           {"failed", tally.failed},
           {"worst_relative_error", tally.worst}};
    make_directories(fs::absolute(path).parent_path());
    write_file_atomic(path, records.dump(2) + "\n");
  }
  return failed ? 1 : 0;
}

}  // namespace hypermla
