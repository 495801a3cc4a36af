#include "hypermla/plan/verify.h"

#include <algorithm>
#include <ctime>

#include "hypermla/base/date.h"
#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/base/json_file.h"
#include "hypermla/plan/cases.h"
#include "hypermla/plan/check.h"
#include "hypermla/plan/configure.h"
#include "hypermla/plan/decode_cases.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

// Of a case; beyond, a sample of the outputs is compared.
constexpr double kReferenceFlops = 1e9;

// Stands in a version's records beside the names of devices.
constexpr const char* kWaiting = "awaits a GPU";

// What the cases of one version share.
struct Verification {
  const KernelEntry& entry;
  KernelPlan& plan;
  const std::shared_ptr<Device>& device;
  Compiler& compiler;
  const VerifyHooks& hooks;
  Tally tally = {};

  void run(Executable& executable, AllocatedTensors& tensors) {
    const std::string what = begin(run_text(plan, executable));
    executable.prepare(compiler, *device);
    count(check(plan, executable, tensors, *device, 1, kReferenceFlops), what);
  }
  void run(const DecodeCase& of, std::uint64_t seed) {
    const std::string what = begin(to_text(of) + "\n");
    const std::unique_ptr<DecodeKernels> kernels = plan.decode(of.options);
    const Buffer workspace(device, kernels->workspace_bytes());
    device->fill(workspace.data(), 0xff, workspace.bytes());
    kernels->prepare(compiler, *device, workspace.data());
    count(DecodeStep(of, device, seed).check(*kernels, 1, kReferenceFlops), what);
  }
  std::string begin(const std::string& run) {
    const std::string what = fmt::format("{} {}", entry.full_name(), run);
    if (hooks.begin) hooks.begin(what);
    return what;
  }
  void count(const CheckResult& result, const std::string& what) {
    ++tally.cases;
    for (const OutputError& error : result.outputs)
      tally.worst[error.output] = std::max(tally.worst[error.output], error.relative_norm);
    if (result.passed) return;
    ++tally.failed;
    if (hooks.say) hooks.say("FAILED " + what + to_text(result));
  }
};

// What a record is of: the kernels and, where it says so, what their plan launches.
Json sources_of(const KernelEntry& entry, const Compiler& compiler) {
  return {{"fingerprint", fingerprints(entry, compiler)}, {"launches", verification_launches(entry)}};
}
bool is_of(const Json& record, const Json& sources) {
  return record.value("fingerprint", Json()) == sources.at("fingerprint") &&
         record.value("launches", sources.at("launches")) == sources.at("launches");
}

// Reads, changes and writes them; nothing is lost to a process that does the same.
template <class Change>
void change_records(const fs::path& path, const Change& change) {
  const fs::path directory = fs::absolute(path).parent_path();
  make_directories(directory);
  const FileDescriptor lock = lock_directory(directory);
  sweep_scratch(directory);
  Json records = read_records(path);
  change(records);
  write_file_atomic(path, records.dump(2) + "\n");
}

}  // namespace

Tally verify(const KernelEntry& entry, const std::shared_ptr<Device>& device, Compiler& compiler,
             const VerifyHooks& hooks) {
  const std::unique_ptr<KernelPlan> plan = entry.make();
  plan->target = Target::of(device->info());
  for (const KernelSource& source : verification_sources(entry, plan->target))
    compiler.compile_ahead(source, device->info().arch);
  Verification all{entry, *plan, device, compiler, hooks};
  std::uint64_t seed = hooks.seed ? hooks.seed : std::uint64_t(std::time(nullptr));
  int cases = 0;
  for (const Json& problem : correctness_cases(*plan)) {
    set_problem(*plan, problem);
    // Every second case has scores that keep growing.
    AllocatedTensors tensors(*plan, device, seed += 1000, cases++ % 2 == 1);
    const std::unique_ptr<Executable> executable = plan->plan(tensors.tensors());
    all.run(*executable, tensors);
    if (!tries_all_tilings(problem)) continue;
    for (TiledKernel* kernel : executable->kernels()) {
      const Json chosen = kernel->tiling();
      for (const Json& tiling : kernel->candidates()) {
        if (tiling == chosen) continue;
        kernel->set_tiling(tiling);
        all.run(*executable, tensors);
      }
      kernel->set_tiling(chosen);
    }
  }
  for (const DecodeCase& one : decode_cases(entry.full_name(), *plan)) all.run(one, seed += 1000);
  return all.tally;
}

Json fingerprints(const KernelEntry& entry, const Compiler& compiler) {
  std::map<std::string, std::string> all;
  for (const KernelSource& source : verification_sources(entry, {}))
    if (!all.count(source.name)) all[source.name] = compiler.fingerprint(source.header);
  return all;
}

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

bool has_record(const Json& records, const KernelEntry& entry, const Compiler& compiler) {
  const Json by_device = records.value(entry.full_name(), Json::object()), now = sources_of(entry, compiler);
  return std::any_of(by_device.begin(), by_device.end(), [&](const Json& one) {
    const Json arch = one.value("arch", Json());
    return is_of(one, now) && one.value("failed", Json()) == 0 && arch.is_string() &&
           is_gpu_arch(arch.get<std::string>());
  });
}

std::optional<std::string> awaits_gpu(const Json& records, const KernelEntry& entry, const Compiler& compiler) {
  Json waiting = records.value(entry.full_name(), Json::object()).value(kWaiting, Json::object());
  if (!is_of(waiting, sources_of(entry, compiler))) return std::nullopt;
  if (!waiting["date"].is_string() || !waiting["why"].is_string()) return std::nullopt;
  return fmt::format("since {}: {}", waiting["date"].get<std::string>(), waiting["why"].get<std::string>());
}

void record(const fs::path& path, const KernelEntry& entry, const Tally& tally, const Device& device,
            const Compiler& compiler) {
  change_records(path, [&](Json& records) {
    Json& of_kernel = records[entry.full_name()];
    if (device.is_gpu() && of_kernel.contains(kWaiting)) of_kernel.erase(kWaiting);
    Json& one = of_kernel[device.info().name] = sources_of(entry, compiler);
    one.update({{"arch", device.info().arch},
                {"driver", device.info().driver},
                {"date", utc_now()},
                {"cases", tally.cases},
                {"failed", tally.failed},
                {"worst_relative_error", tally.worst}});
  });
}

void record_waiting(const fs::path& path, const KernelEntry& entry, const std::string& why, const Compiler& compiler) {
  change_records(path, [&](Json& records) {
    Json& waiting = records[entry.full_name()][kWaiting] = sources_of(entry, compiler);
    waiting.update({{"date", utc_now()}, {"why", why}});
  });
}

}  // namespace hypermla
