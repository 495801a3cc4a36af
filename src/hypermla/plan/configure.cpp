#include "hypermla/plan/configure.h"

#include <algorithm>

#include "hypermla/base/error.h"

namespace hypermla {

ConfiguredPlan configure(const std::vector<KernelEntry>& entries, const PlannedDevice& device, const Settings& said) {
  for (const KernelEntry& entry : entries) {
    ConfiguredPlan made{entry, entry.make(), Json::object()};
    KernelPlan& plan = *made.plan;
    plan.target = device.target;
    set_fields(entry.full_name(), plan.problem_fields(), known_fields(plan, said.offered));
    set_fields(entry.full_name(), plan.problem_fields(), said.problem);
    const Json before = to_json(plan.problem_fields());
    plan.choose(device.spec);
    const Json after = to_json(plan.problem_fields());
    for (const auto& [name, value] : after.items())
      if (value != before.at(name)) made.chosen[name] = value;
    if (&entry != &entries.back() && !plan.recommended()) continue;
    plan.use_default_tiling();
    set_fields(entry.full_name(), plan.tiling_fields(), said.tiling);
    plan.validate();
    return made;
  }
  fail("there is no kernel to choose from");
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
