// The one way from what was said, names of fields and their values, to a plan that runs or is predicted.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "hypermla/plan/registry.h"
#include "hypermla/roofline/device_spec.h"

namespace hypermla {

// What a plan is made for: the present device, or one that is predicted for.
struct PlannedDevice {
  Target target;
  DeviceSpec spec;
};

// Values by field name: JSON of the field's type, or the text that a user types.
struct Settings {
  Json problem = Json::object();
  Json tiling = Json::object();   // the other fields of the tiling keep their defaults for the problem
  Json offered = Json::object();  // of the problem, too, but a plan takes only those whose field it has
};

struct ConfiguredPlan {
  KernelEntry entry;
  std::unique_ptr<KernelPlan> plan;
  Json chosen;  // the problem fields that the model settled, with their values
};

// The plan of the first of `entries` (fastest first, as Registry::find_all() gives them) that recommends itself for the
// problem on the device, or of the last. Throws Error for a field that it has not, for a value that does not fit, and
// where validate() does.
ConfiguredPlan configure(const std::vector<KernelEntry>& entries, const PlannedDevice& device, const Settings& said);

// Gives a plan another problem, all of it said, with the default tiling for its target. Validates nothing.
void set_problem(KernelPlan& plan, const Json& values);

// Sets the fields that `values` names. Throws Error that names `owner` and the nearest field for one that it has not.
void set_fields(const std::string& owner, const std::vector<FieldRef>& fields, const Json& values);

// Of `values` those whose problem field the plan has.
Json known_fields(KernelPlan& plan, const Json& values);

}  // namespace hypermla
