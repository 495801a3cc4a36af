#include "hypermla/tune/autotune.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "hypermla/compile/backends.h"
#include "hypermla/device/measure.h"
#include "hypermla/tune/history.h"

namespace hypermla {
namespace {

// The present tiling is one even when the list lacks it, so tuning never ends below the default. On a machine without a
// compiler, those that the cache holds.
//
// Those that do not go with the present tilings of the kernels beside it are left out, and nothing is remembered of it:
// they may do when those change.
std::vector<Candidate> present_candidates(TiledKernel& kernel, Executable& executable, const Compiler& compiler,
                                          const std::string& arch, const DeviceSpec& spec, DType dtype) {
  const Json present = kernel.tiling();
  std::vector<Json> tilings = kernel.candidates();
  std::erase_if(tilings, [&](const Json& tiling) {
    try {
      kernel.set_tiling(tiling);
      executable.validate_tilings();
      return false;
    } catch (const Error&) {
      return true;
    }
  });
  kernel.set_tiling(present);
  if (std::find(tilings.begin(), tilings.end(), present) == tilings.end()) tilings.push_back(present);
  std::vector<Candidate> candidates;
  for (const Json& tiling : tilings)
    if (compiler.available(kernel.source(tiling), arch))
      candidates.push_back({tiling, kernel.predict_seconds(tiling, spec, dtype)});
  if (candidates.empty())
    fail(
        "no tiling of {} is in the cache for {} and no compiler was found; run ./hypermla once to install the pinned "
        "wheels, or carry a cache filled by `hypermla compile --arch={} --candidates`",
        kernel.name(), arch, arch);
  return candidates;
}

void wait(const std::shared_future<CacheEntry>& compiled, const std::function<void()>& poll) {
  do
    if (poll) poll();
  while (compiled.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready);
}

AutotuneResult::Stage tune_kernel(TiledKernel& kernel, KernelPlan& plan, Executable& executable, Compiler& compiler,
                                  Device& device, const DeviceSpec& spec, const AutotuneOptions& options) {
  const std::vector<Candidate> candidates =
      present_candidates(kernel, executable, compiler, device.info().arch, spec, plan.dtype());
  const TuningHistory store(options.history_root, kernel.name() + "-" + compiler.fingerprint(kernel.header()),
                            problem_key(plan), device.info().name + "-" + device.info().arch);
  TunerOptions tuner_options = options.tuner;
  tuner_options.compiler = compiler.compiler(device.info().arch);
  Tuner tuner(candidates, tuner_options, options.retune ? Json(nullptr) : store.load());
  AutotuneResult::Stage stage{.kernel = kernel.name(), .history = store.path()};

  // What fails here is no fault of this kernel's candidates.
  std::vector<std::shared_future<CacheEntry>> others;
  for (TiledKernel* other : executable.kernels())
    if (other != &kernel) others.push_back(compiler.compile_ahead(other->source(other->tiling()), device.info().arch));
  for (const auto& compiled : others) {
    wait(compiled, options.poll);
    compiled.get();
  }

  auto tell = [&](const char* doing) {
    if (!options.progress) return;
    AutotuneOptions::Progress at{kernel.name(), doing, tuner.measured(), 0, tuner.planned(), 0};
    for (const Tuner::LeftOut& out : {tuner.rejected(), tuner.skipped()})
      for (const auto& [why, times] : out) at.rejected += times;
    if (tuner.best()) at.best_seconds = tuner.median_seconds(*tuner.best());
    options.progress(at);
  };
  const int ahead = std::max(1, compiler.config().jobs);
  while (auto index = tuner.next()) {
    const Json& tiling = candidates[*index].tiling;
    std::shared_future<CacheEntry> compiled = compiler.compile_ahead(kernel.source(tiling), device.info().arch);
    for (int next : tuner.upcoming(ahead))
      compiler.compile_ahead(kernel.source(candidates[next].tiling), device.info().arch);
    const bool known = tuner.median_seconds(*index) < INFINITY;
    bool loaded = false;
    tell(known ? "comparing the best" : "compiling");
    wait(compiled, options.poll);
    try {
      compiled.get();
      if (!known) tell("measuring");
      kernel.set_tiling(tiling);
      executable.prepare(compiler, device);
      loaded = true;
      if (options.begin) options.begin(plan, executable);
      const Timing timing = measure_hot(
          device, [&](StreamHandle stream) { executable.run(stream); }, tuner.samples_wanted(*index));
      tuner.record(*index, timing.seconds);
    } catch (const CompileError& error) {
      tuner.reject(*index, error.what());
    } catch (const Error& error) {
      loaded ? tuner.reject(*index, error.what()) : tuner.skip(*index, error.what());
    }
    store.save(tuner.history());
    ++stage.measured;
  }
  if (stage.measured) tell("done");
  stage.rejected = tuner.rejected();
  stage.skipped = tuner.skipped();
  if (!tuner.best())
    fail("no tiling of {} works here; {}", kernel.name(), fmt::join(remarks({.stages = {stage}}), "; "));
  stage.tiling = candidates[*tuner.best()].tiling;
  kernel.set_tiling(stage.tiling);
  executable.prepare(compiler, device);
  return stage;
}

}  // namespace

std::vector<std::string> remarks(const AutotuneResult& result) {
  std::vector<std::string> sentences;
  auto say = [&](const Tuner::LeftOut& left_out, std::string_view kernel, std::string_view consequence,
                 std::string_view hint) {
    if (left_out.empty()) return;
    int count = 0;
    for (const auto& [why, times] : left_out) count += times;
    // Messages may differ where the mistake is one: they name the tiling.
    sentences.push_back(fmt::format("{} tiling{} of {} {} ({}), {}because {}", count, count == 1 ? "" : "s", kernel,
                                    consequence, hint, left_out.size() > 1 ? "one of them " : "",
                                    left_out.begin()->first));
  };
  for (const AutotuneResult::Stage& stage : result.stages) {
    say(stage.skipped, stage.kernel, "could not be tried", "they will be the next time");
    say(stage.rejected, stage.kernel, "rejected", "which is remembered: --retune, or tune(retune=True), forgets it");
  }
  return sentences;
}

AutotuneResult autotune(KernelPlan& plan, Executable& executable, Compiler& compiler, Device& device,
                        const DeviceSpec& spec, const AutotuneOptions& options) {
  AutotuneResult result;
  for (TiledKernel* kernel : launched_kernels(executable))
    result.stages.push_back(tune_kernel(*kernel, plan, executable, compiler, device, spec, options));
  return result;
}

}  // namespace hypermla
