#include "hypermla/tune/tune_n.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "hypermla/base/error.h"
#include "hypermla/base/hash.h"
#include "hypermla/device/measure.h"
#include "hypermla/plan/choice.h"
#include "hypermla/plan/inputs.h"
#include "hypermla/tune/history.h"

namespace hypermla {
namespace {

// The problem with another n, and its default tiling. Validates nothing.
std::unique_ptr<KernelPlan> plan_of(const KernelEntry& entry, const PlannedDevice& planned, Json problem, int n) {
  std::unique_ptr<KernelPlan> plan = entry.make();
  plan->target = planned.target;
  problem["n"] = n;
  set_problem(*plan, problem);
  return plan;
}

double predicted_seconds(const KernelPlan& plan, const DeviceSpec& device) try {
  return plan.time(ceilings_of(device, plan.dtype(), Load::burst)).seconds;
} catch (const Error&) {
  return INFINITY;
}

// Of the kernels that any n launches: a change of one of them starts a new history.
TuningHistory history_of(const KernelEntry& entry, const PlannedDevice& planned, const Json& problem,
                         const std::vector<int>& candidates, const DeviceInfo& info, const Compiler& compiler,
                         const std::filesystem::path& root) {
  std::set<std::string> kernels;
  for (const int n : candidates) {
    const std::unique_ptr<Executable> executable = plan_empty(*plan_of(entry, planned, problem, n));
    for (const TiledKernel* kernel : executable->kernels())
      kernels.insert(kernel->name() + "-" + compiler.fingerprint(kernel->header()));
  }
  const std::unique_ptr<KernelPlan> open = entry.make();
  from_json(open->problem_fields(), problem);
  return {root, entry.full_name() + "-n-" + content_hash(fmt::format("{}", fmt::join(kernels, " "))),
          problem_key(*open), info.name + "-" + info.arch};
}

std::vector<int> candidates_of(const KernelEntry& entry, const PlannedDevice& planned, const Json& problem) {
  std::vector<int> candidates = n_to_measure(*plan_of(entry, planned, problem, -1), planned.spec);
  std::erase_if(candidates, [&](int n) {
    try {
      plan_of(entry, planned, problem, n)->validate();
      return false;
    } catch (const Error&) {  // such as a mask that ends inside a part
      return true;
    }
  });
  return candidates;
}

}  // namespace

std::vector<int> n_to_measure(KernelPlan& plan, const DeviceSpec& device) {
  const auto field = [&](std::string_view name) -> int& {
    for (const FieldRef& one : plan.problem_fields())
      if (one.name == name) return *std::get<int*>(one.value);
    fail("a kernel without --{} has no number of decompressed tokens to measure", name);
  };
  int& n = field("n");
  const int t = field("t"), said = n;
  const int far = t > 64 ? std::max(64, t / 16 / 64 * 64) : std::max(1, t / 4);
  std::set<int> all = {0, t};
  const auto add = [&](int one) {
    if (one > 0 && one < t) all.insert(one);
  };
  const int between = t > 64 ? best_interior_n(plan, device) : t / 2;
  for (const int centre : {choose_n(plan, device), between})
    for (const int one : {centre - far, centre, centre + far}) add(one);
  for (const FieldRef& one : plan.problem_fields()) {
    if (one.name != "n" || one.words.empty()) continue;
    FieldRef(one).parse("roofline");
    plan.choose(device);
    add(n);
  }
  n = said;
  return {all.begin(), all.end()};
}

TunedN tune_n(const KernelEntry& entry, const PlannedDevice& planned, const Json& problem,
              const std::shared_ptr<Device>& device, Compiler& compiler, std::uint64_t seed,
              const AutotuneOptions& options) {
  const std::vector<int> values = candidates_of(entry, planned, problem);
  if (values.empty()) fail("{} takes this problem with no n; give another --t or --s", entry.full_name());
  std::vector<Candidate> candidates;
  for (const int n : values)
    candidates.push_back({{{"n", n}}, predicted_seconds(*plan_of(entry, planned, problem, n), planned.spec)});
  const TuningHistory store =
      history_of(entry, planned, problem, values, device->info(), compiler, options.history_root);
  // All are measured, however long the model thinks that they take: an end must be seen to lose.
  Tuner tuner(candidates, {.samples_max = 9, .prune_ratio = INFINITY}, options.retune ? Json(nullptr) : store.load());
  TunedN result;
  result.stage = {.kernel = "n", .history = store.path()};
  std::set<int> tuned;  // in this call
  while (const auto index = tuner.next()) {
    const int n = values[*index];
    if (options.poll) options.poll();
    AutotuneOptions of_tilings = options;
    of_tilings.retune = options.retune && tuned.insert(n).second;
    if (options.progress)
      of_tilings.progress = [&](AutotuneOptions::Progress at) {
        at.kernel = fmt::format("{} with n={}", at.kernel, n);
        options.progress(at);
      };
    try {
      const std::unique_ptr<KernelPlan> plan = plan_of(entry, planned, problem, n);
      if (const double bytes = tensor_bytes(*plan); !(bytes < 0.95 * double(device->info().memory_bytes)))
        fail("the tensors for n={} need {:.1f} GB", n, bytes * 1e-9);
      const AllocatedTensors tensors(*plan, device, seed);
      const std::unique_ptr<Executable> executable = plan->plan(tensors.tensors());
      autotune(*plan, *executable, compiler, *device, planned.spec, of_tilings);
      if (options.begin) options.begin(*plan, *executable);
      const Timing timing = measure_hot(
          *device, [&](StreamHandle stream) { executable->run(stream); }, tuner.samples_wanted(*index));
      tuner.record(*index, timing.seconds);
    } catch (const Error& error) {
      tuner.skip(*index, error.what());
    }
    store.save(tuner.history());
    ++result.stage.measured;
  }
  result.stage.skipped = tuner.skipped();
  if (!tuner.best())
    fail("no number of decompressed tokens works here; {}", fmt::join(remarks({.stages = {result.stage}}), "; "));
  result.n = values[*tuner.best()];
  result.stage.tiling = {{"n", result.n}};
  for (std::size_t i = 0; i < values.size(); ++i)
    if (const double seconds = tuner.median_seconds(int(i)); std::isfinite(seconds))
      result.measured.push_back({values[i], seconds});
  return result;
}

std::optional<int> remembered_n(const KernelEntry& entry, const PlannedDevice& planned, const Json& problem,
                                const Device& device, const Compiler& compiler,
                                const std::filesystem::path& history_root) {
  const std::vector<int> values = candidates_of(entry, planned, problem);
  if (values.empty()) return std::nullopt;
  std::vector<Candidate> candidates;
  for (const int n : values) candidates.push_back({{{"n", n}}, 0});
  const Tuner tuner(candidates, {},
                    history_of(entry, planned, problem, values, device.info(), compiler, history_root).load());
  if (!tuner.best()) return std::nullopt;
  return values[*tuner.best()];
}

}  // namespace hypermla
