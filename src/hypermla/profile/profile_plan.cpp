#include <random>
#include <typeinfo>

#include "hypermla/base/error.h"
#include "hypermla/plan/configure.h"
#include "hypermla/plan/inputs.h"
#include "hypermla/profile/profile.h"

namespace hypermla {
namespace {

// Plans do not know who registered them, but every version has a class of its own.
KernelEntry entry_of(const KernelPlan& plan) {
  for (const KernelEntry& entry : Registry::instance().all()) {
    const std::unique_ptr<KernelPlan> made = entry.make();
    const KernelPlan& candidate = *made;
    if (typeid(candidate) == typeid(plan)) return entry;
  }
  fail("no registered kernel has this plan; take one from Registry::instance().find(...).make()");
}

std::vector<std::string> relaunch_command(const std::filesystem::path& program, const KernelEntry& entry,
                                          KernelPlan& plan, bool tuned) {
  std::vector<std::string> command = {program.string(), "kernel",
                                      entry.language + "." + entry.layer + "." + entry.design, entry.version};
  auto add = [&](const std::vector<FieldRef>& fields) {
    for (const FieldRef& field : fields) command.push_back(fmt::format("--{}={}", field.name, field.text()));
  };
  add(plan.problem_fields());
  if (!tuned) {
    add(plan.tiling_fields());
    command.push_back("--no_autotune");
  }
  command.push_back("--prof_type=disabled");
  return command;
}

}  // namespace

ProfileResult profile(const ProfileContext& context, KernelPlan& given, ProfileMode mode,
                      const ProfileOptions& options) {
  KernelEntry entry = entry_of(given);
  KernelPlan* plan = &given;
  std::unique_ptr<KernelPlan> other;
  if (!options.version.empty()) {
    entry = Registry::instance().find(entry.language + "." + entry.layer + "." + entry.design, options.version);
    other = configure({entry}, {given.target, context.spec}, {.problem = to_json(given.problem_fields())}).plan;
    plan = other.get();
  }
  plan->validate();
  const AllocatedTensors tensors(*plan, context.device, std::random_device{}());
  const std::unique_ptr<Executable> executable = plan->plan(tensors.tensors());
  AutotuneResult tuning;
  const bool tuned = !context.history_root.empty();
  if (tuned) {
    AutotuneOptions autotune_options;
    autotune_options.history_root = context.history_root;
    tuning = autotune(*plan, *executable, context.compiler, *context.device, context.spec, autotune_options);
  } else {
    executable->prepare(context.compiler, *context.device);
  }
  ProfileTools tools = context.tools;
  if (tools.relaunch.empty() && !tools.program.empty())
    tools.relaunch = relaunch_command(tools.program, entry, *plan, tuned);
  return profile({.kernel = entry,
                  .plan = *plan,
                  .executable = *executable,
                  .device = *context.device,
                  .spec = context.spec,
                  .tuning = tuning,
                  .out_dir = options.out_dir,
                  .bench_runs = options.bench_runs,
                  .label = options.label,
                  .tools = tools},
                 mode);
}

}  // namespace hypermla
