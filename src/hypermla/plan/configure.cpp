#include "hypermla/plan/configure.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <optional>

#include "hypermla/base/error.h"
#include "hypermla/roofline/kernel_time.h"

namespace hypermla {
namespace {

// Whether the fields of a problem that a plan lacks are all as in `unsaid`: switched off.
bool has_what_is_on(KernelPlan& plan, const Json& problem, const Json& unsaid) {
  const Json known = known_fields(plan, problem);
  for (const auto& [name, value] : problem.items())
    if (!known.contains(name) && value != unsaid.at(name)) return false;
  return true;
}

ConfiguredPlan tiled(const KernelEntry& entry, std::unique_ptr<KernelPlan> plan, const DeviceSpec& device,
                     const Json& tiling) {
  ConfiguredPlan made{entry, std::move(plan), Json::object()};
  const Json before = to_json(made.plan->problem_fields());
  made.plan->choose(device);
  const Json after = to_json(made.plan->problem_fields());
  for (const auto& [name, value] : after.items())
    if (value != before.at(name)) made.chosen[name] = value;
  made.plan->use_default_tiling();
  set_fields(entry.full_name(), made.plan->tiling_fields(), tiling);
  return made;
}

ConfiguredPlan finished(const KernelEntry& entry, std::unique_ptr<KernelPlan> plan, const DeviceSpec& device,
                        const Json& tiling) {
  ConfiguredPlan made = tiled(entry, std::move(plan), device, tiling);
  made.plan->validate();
  return made;
}

}  // namespace

std::unique_ptr<KernelPlan> plan_with(const KernelEntry& entry, const PlannedDevice& device, const Settings& said) {
  std::unique_ptr<KernelPlan> plan = entry.make();
  plan->target = device.target;
  set_fields(entry.full_name(), plan->problem_fields(), known_fields(*plan, said.offered));
  set_fields(entry.full_name(), plan->problem_fields(), said.problem);
  require_extents(plan->problem_fields());
  return plan;
}

double expected_seconds(const KernelPlan& plan, const DeviceSpec& device) {
  if (device.arch.empty()) return INFINITY;  // a CPU, or a device without an entry
  try {
    return plan.time(ceilings_of(device, plan.dtype(), Load::sustained)).seconds;
  } catch (const Error&) {
    return INFINITY;
  }
}

ConfiguredPlan configure(const std::vector<KernelEntry>& entries, const PlannedDevice& device, const Settings& said) {
  if (entries.empty()) fail("there is no kernel to choose from");
  const KernelEntry& first = entries.front();
  std::unique_ptr<KernelPlan> plan = plan_with(first, device, said);
  const Json problem = to_json(plan->problem_fields());  // before n is chosen, which every version does for itself
  std::optional<ConfiguredPlan> best;
  std::exception_ptr refused;
  try {
    best = finished(first, std::move(plan), device.spec, said.tiling);
  } catch (const Error&) {
    refused = std::current_exception();
  }
  if (best && (entries.size() == 1 || device.spec.arch.empty())) return std::move(*best);  // nothing to rank by
  const Json unsaid = to_json(first.make()->problem_fields());
  double least = best ? expected_seconds(*best->plan, device.spec) : INFINITY;
  for (std::size_t i = 1; i < entries.size(); ++i) {
    try {
      std::unique_ptr<KernelPlan> other = plan_with(entries[i], device, {.offered = problem});
      if (!has_what_is_on(*other, problem, unsaid)) continue;
      ConfiguredPlan made = finished(entries[i], std::move(other), device.spec, said.tiling);
      const double seconds = expected_seconds(*made.plan, device.spec);
      if (best && !(seconds < least)) continue;
      best = std::move(made);
      least = seconds;
    } catch (const Error&) {  // it does not take the problem
    }
  }
  if (!best) std::rethrow_exception(refused);
  return std::move(*best);
}

ConfiguredPlan described(const KernelEntry& entry, const PlannedDevice& device, const Settings& said) {
  return tiled(entry, plan_with(entry, device, said), device.spec, said.tiling);
}

void require_extents(const std::vector<FieldRef>& fields) {
  // 65535: what CUDA allows a grid along two of its axes. 2^24: lengths are exact as floats.
  const std::map<std::string_view, int> most = {{"b", 65535},         {"h", 65535},        {"prefixes", 65535},
                                                {"s", 1 << 24},       {"t", 1 << 24},      {"n", 1 << 24},
                                                {"private", 1 << 24}, {"prefix", 1 << 24}, {"after", 1 << 24}};
  std::map<std::string_view, double> extents = {{"b", 1}, {"h", 1}, {"s", 1}, {"t", 1}, {"pages", 0}};
  for (const FieldRef& field : fields) {
    if (!std::holds_alternative<int*>(field.value)) continue;
    const int value = *std::get<int*>(field.value);
    if (const auto found = most.find(field.name); found != most.end() && value > found->second)
      fail("--{}={} is not supported: it must be at most {}", field.name, value, found->second);
    extents[field.name] = value;
  }
  const double rows = extents["b"] * extents["h"] * extents["s"], tokens = extents["b"] * extents["t"];
  if (rows > 1 << 30)
    fail("--b={} --h={} --s={} are {} rows of queries: more than 2^30 are not supported", extents["b"], extents["h"],
         extents["s"], rows);
  if (extents["pages"] == 0 && tokens > 0x1p34)  // 1 TB with the least width
    fail("--b={} --t={} are {} tokens, which no memory holds: choose fewer", extents["b"], extents["t"], tokens);
}

void set_problem(KernelPlan& plan, const Json& values) {
  from_json(plan.problem_fields(), values);
  plan.use_default_tiling();
}

void set_fields(const std::string& owner, const std::vector<FieldRef>& fields, const Json& values) {
  for (const auto& [name, value] : values.items()) {
    const auto found =
        std::find_if(fields.begin(), fields.end(), [&, &name = name](const FieldRef& one) { return one.name == name; });
    if (found == fields.end()) {
      std::vector<std::string> names;
      for (const FieldRef& field : fields) names.emplace_back(field.name);
      fail("{} has no field '{}'; did you mean {}?", owner, name, nearest(name, names));
    }
    FieldRef field = *found;
    if (value.is_string())
      field.parse(value.get<std::string>());
    else
      field.set(value);
  }
}

Json known_fields(KernelPlan& plan, const Json& values) {
  Json known = Json::object();
  for (const FieldRef& field : plan.problem_fields())
    if (const auto found = values.find(std::string(field.name)); found != values.end()) known[found.key()] = *found;
  return known;
}

}  // namespace hypermla
