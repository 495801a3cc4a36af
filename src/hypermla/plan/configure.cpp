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
    require_extents(plan.problem_fields());
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
