#include <cstdio>

#include "hypermla/base/error.h"
#include "hypermla/cli/commands.h"
#include "hypermla/cli/options.h"
#include "hypermla/cli/session.h"
#include "hypermla/plan/registry.h"

namespace hypermla {

int predict_command(const Words& words) {
  if (words.empty() || words[0].rfind("-", 0) == 0) {
    fmt::print(
        "Usage: hypermla predict <kernel> [version] [problem flags]\n\n"
        "Roofline time of a kernel on every device of conf/devices.json and every measured one, without running it.\n");
    if (words.empty()) fail("which kernel? For example: hypermla predict flash_mla --b=32 --s=16 --t=4096");
    return 0;
  }
  const bool versioned = words.size() > 1 && words[1].rfind("-", 0) != 0;
  const std::shared_ptr<Device> device = make_device("auto");
  const Target target = Target::of(device->info());
  const std::vector<KernelEntry> entries =
      Registry::instance().find_all(words[0], versioned ? words[1] : "", target.arch);
  bool helped = false;
  const auto [entry, plan] = choose_plan(entries, {}, [&](KernelPlan& candidate) {
    CLI::App app(fmt::format("{}\n", entries.front().summary), "hypermla predict " + words[0]);
    add_fields(app, candidate.problem_fields(), "Problem");
    helped = helped || !parse(app, {words.begin() + (versioned ? 2 : 1), words.end()});
  });
  if (helped) return 0;
  const DeviceTable table = Environment::detect().devices();
  plan->choose(spec_for(table, *device));
  plan->use_default_tiling();
  plan->validate();

  const std::unique_ptr<Executable> executable = plan_empty(*plan);
  const Cost cost = executable->cost();
  fmt::print("{} {}: {:.4g} GFLOP, {:.4g} GB, {:.1f} FLOP/byte\n", entry.full_name(), problem_key(*plan),
             cost.flops * 1e-9, cost.bytes * 1e-9, cost.intensity());
  for (const std::string& name : table.names()) {
    const DeviceSpec& spec = table.find(name);
    const Prediction prediction = executable->predict(spec, plan->dtype());
    fmt::print("{:<28} {:>12.1f} us  {} bound, ridge {:.1f}\n", name, prediction.seconds * 1e6,
               bound_name(prediction.bound), ridge(spec, plan->dtype()));
  }
  return 0;
}

}  // namespace hypermla
