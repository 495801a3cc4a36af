#include <chrono>
#include <cstdio>
#include <ctime>
#include <set>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/cli/commands.h"
#include "hypermla/cli/options.h"
#include "hypermla/cli/session.h"
#include "hypermla/plan/registry.h"
#include "hypermla/plan/verify.h"

namespace hypermla {

int verify_command(const Words& words) {
  std::string kernel, version, device = "auto", given, awaits;
  bool records_only = false;
  std::uint64_t seed = 0;
  CLI::App app(
      "Run the correctness cases of every kernel, or of one, on this device, against the reference; of one that\n"
      "MlaDecode calls also steps of an engine, as MlaDecode runs them.\n"
      "On a GPU the result is recorded: fingerprints of the kernels and of their launches, device, driver, date,\n"
      "cases and worst errors.\n",
      "hypermla verify");
  app.add_option("kernel", kernel, "one kernel (default: all)");
  app.add_option("version", version, "its version");
  app.add_option("--device", device, "auto (the first GPU, else the CPU), cpu, cuda or cuda:N");
  app.add_option("--record", given,
                 "where to record (default, and only on a GPU: results/verified.json; of kernels of your own the file "
                 "verified.json in HYPERMLA_KERNELS)");
  app.add_flag("--records_only", records_only,
               "run nothing; check that every kernel's record matches its source and its launches");
  add_seed(app, seed, "of the random inputs, which the first line of a run says; 0 draws a fresh one");
  app.add_option("--awaits_gpu", awaits,
                 "run nothing; of every kernel without a matching record, write why it changed where there was no GPU. "
                 "Drafts are left out: they need no record. --records_only then lists the kernel as waiting, until it "
                 "changes again or a GPU records it");
  if (!parse(app, words)) return 0;
  const bool waits_for_gpu = app.count("--awaits_gpu") > 0;
  if (waits_for_gpu) {
    if (records_only) fail("--records_only only looks, and --awaits_gpu writes; leave one of them out");
    require_utf8("--awaits_gpu", awaits);
    if (awaits.find_first_not_of(" \t\n") == std::string::npos) fail("--awaits_gpu is empty; say why in a sentence");
  }
  std::error_code unknown;  // a path without rights, a loop of links, or a name that is too long
  if (records_only && !given.empty() && !std::filesystem::exists(given, unknown))
    fail("there is no {} that can be read; --records_only checks records that `hypermla verify` wrote", given);

  std::vector<KernelEntry> entries = Registry::instance().all();
  const Environment environment = Environment::detect();
  const auto path_of = [&](const KernelEntry& entry) {
    return given.empty() ? environment.record_of(entry) : std::filesystem::path(given);
  };

  if (records_only || waits_for_gpu) {
    if (!kernel.empty()) entries = {Registry::instance().find(kernel, version)};
    const Compiler compiler(environment.compiler_config());
    int stale = 0;
    for (const KernelEntry& entry : entries) {
      const Json records = read_records(path_of(entry));
      const auto found = [&]() -> std::string {
        if (has_record(records, entry, compiler)) return "recorded";
        if (entry.draft) return "a draft, not recorded";
        if (waits_for_gpu) record_waiting(path_of(entry), entry, awaits, compiler);
        if (const auto waits = awaits_gpu(waits_for_gpu ? read_records(path_of(entry)) : records, entry, compiler))
          return "awaits a GPU " + *waits;
        ++stale;
        return "NOT RECORDED: run `hypermla verify` on a GPU";
      };
      std::string said;
      try {
        said = found();
      } catch (const Error& error) {  // such as a kernel that is not there; those behind it are looked at all the same
        ++stale;
        said = fmt::format("FAILED, so NOT RECORDED: {}", error.what());
      }
      fmt::print("{:<40} {}\n", entry.full_name(), said);
    }
    return stale ? 1 : 0;
  }

  Session session(device);
  const std::string& arch = session.device->info().arch;
  if (!kernel.empty()) entries = {Registry::instance().find(kernel, version, arch)};
  std::erase_if(entries, [&](const KernelEntry& entry) { return !entry.runs_on(arch); });
  const bool recorded = session.device->is_gpu() || !given.empty();
  std::set<std::filesystem::path> paths;  // what cannot be recorded is said before hours of cases, not after them
  for (const KernelEntry& entry : entries) {
    if (!recorded || !paths.insert(path_of(entry)).second) continue;
    read_records(path_of(entry));
    require_writable(std::filesystem::absolute(path_of(entry)).parent_path());
  }
  if (seed == 0) seed = std::uint64_t(std::time(nullptr));
  fmt::print("verifying on {} ({}), seed {}\n", session.device->info().name, session.device->info().arch, seed);
  int failed = 0;
  for (const KernelEntry& entry : entries) {
    const auto begin = std::chrono::steady_clock::now();
    Tally tally;
    try {
      tally = verify(entry, session.device, session.compiler,
                     {.say = [](const std::string& lines) { fmt::print("{}", lines); },
                      .begin = [&](const std::string& what) { session.runs(what); },
                      .seed = seed});
    } catch (const Error& error) {  // those behind it are verified all the same
      ++failed;
      fmt::print("FAILED {}: {}\n", entry.full_name(), error.what());
      std::fflush(stdout);
      continue;
    }
    failed += tally.failed;
    std::string worst;
    for (const auto& [output, error] : tally.worst) worst += fmt::format("  {} {:.1e}", output, error);
    fmt::print("{:<40} {} cases, {} failed, worst relative error{}  ({:.1f} s)\n", entry.full_name(), tally.cases,
               tally.failed, worst, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    std::fflush(stdout);
    if (recorded) record(path_of(entry), entry, tally, *session.device, session.compiler);
  }
  return failed ? 1 : 0;
}

}  // namespace hypermla
