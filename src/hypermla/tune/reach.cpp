#include "hypermla/tune/reach.h"

#include <cmath>

#include "hypermla/base/error.h"
#include "hypermla/device/measure.h"
#include "hypermla/plan/choice.h"
#include "hypermla/plan/inputs.h"

namespace hypermla {
namespace {

// A problem whose time one term of a path decides. The parts of the hybrid come first: it is made of them.
struct Probe {
  Path path;
  const char* term;
  ChoiceProblem on_gpu, on_cpu;
};
const Probe kProbes[] = {
    {Path::latent, "tensor", {.b = 32, .s = 16}, {.b = 1, .s = 16, .t = 512, .h = 16}},
    {Path::latent, "memory", {.b = 64, .s = 1, .h = 8}, {.b = 16, .s = 1, .t = 1024, .h = 1}},
    {Path::decompressed, "memory", {.b = 32, .s = 16}, {.b = 4, .s = 1, .t = 2048, .h = 16}},
    {Path::decompressed, "tensor", {.b = 4, .s = 1024}, {.b = 1, .s = 128, .t = 512, .h = 4}},
    {Path::hybrid, "overlap", {.b = 32, .s = 16}, {.b = 1, .s = 16, .t = 512, .h = 16}},
};

// The fastest of five bursts of attention alone, without what may follow it.
double measured_seconds(const KernelPlan& plan, const std::shared_ptr<Device>& device, Compiler& compiler) {
  const AllocatedTensors tensors(plan, device, 1);
  const std::unique_ptr<Executable> executable = plan.plan(tensors.tensors());
  executable->prepare(compiler, *device);
  return measure_burst(
             *device, [&](StreamHandle stream) { executable->run(stream); }, 5)
      .median();
}

// Halves the batch until the tensors fit.
std::unique_ptr<KernelPlan> fitting_plan(const Registry& registry, const RankedKernel& ranked, ChoiceProblem problem,
                                         const PlannedDevice& planned, std::size_t memory) {
  for (;; problem.b /= 2) {
    std::unique_ptr<KernelPlan> plan = std::move(plans_of(registry, ranked, problem, planned).front());
    if (tensor_bytes(*plan) < 0.6 * double(memory)) return plan;
    if (problem.b == 1) fail("its tensors do not fit");
  }
}

}  // namespace

std::optional<double> reach_of_time(const std::function<double(double)>& seconds, double measured) {
  double low = 1.0 / 64, high = 64;
  if (!(seconds(0.5) > 1.02 * seconds(1)) || !(seconds(high) < measured && measured < seconds(low)))
    return std::nullopt;
  for (int i = 0; i < 60; ++i) {
    const double middle = std::sqrt(low * high);
    (seconds(middle) > measured ? low : high) = middle;
  }
  return std::round(1000 * low) / 1000;
}

MeasuredReach measure_reach(const Registry& registry, PlannedDevice planned, const std::shared_ptr<Device>& device,
                            Compiler& compiler) {
  MeasuredReach found;
  planned.spec.measured.erase("reach");
  for (const Probe& probe : kProbes) {
    const ChoiceProblem& problem = device->is_gpu() ? probe.on_gpu : probe.on_cpu;
    const std::string path(path_name(probe.path)), what = path + " " + probe.term;
    std::string why = "no kernel of that path meets that limit";
    for (const RankedKernel& one : rank_kernels(registry, problem, planned)) {
      if (one.path != probe.path || one.entry.draft) continue;
      try {
        const auto plan = fitting_plan(registry, one, problem, planned, device->info().memory_bytes);
        const auto seconds = [&](double reach) {
          DeviceSpec spec = planned.spec;
          spec.measured["reach"][path][probe.term] = reach;
          return plan->time(ceilings_of(spec, plan->dtype(), Load::burst)).seconds;
        };
        if (!(seconds(0.5) > 1.02 * seconds(1))) continue;  // another limit binds it
        const double measured = measured_seconds(*plan, device, compiler);
        const auto reach = reach_of_time(seconds, measured);
        if (!reach) {
          why = fmt::format("{} took {:.1f} us, which the model reaches with no such number", one.entry.full_name(),
                            measured * 1e6);
          continue;
        }
        planned.spec.measured["reach"][path][probe.term] = *reach;
        found.remarks.push_back(fmt::format("{} {}: {} took {:.1f} us for {}", what, *reach, one.entry.full_name(),
                                            measured * 1e6, problem_key(*plan)));
        why.clear();
        break;
      } catch (const Error& error) {
        why = one.entry.full_name() + ": " + error.what();
      }
    }
    if (!why.empty()) found.remarks.push_back(what + " not measured: " + why);
  }
  found.reach = planned.spec.measured.value("reach", Json::object());
  return found;
}

}  // namespace hypermla
