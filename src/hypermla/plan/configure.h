// The one function that turns field names and their values, as a user gives them, into a plan that runs or is
// predicted.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "hypermla/plan/registry.h"
#include "hypermla/roofline/device_spec.h"

namespace hypermla {

// The device that a plan is made for: the present one, or one to predict for.
struct PlannedDevice {
  Target target;
  DeviceSpec spec;
};

// Values by field name: JSON of the field's type, or the text that a user types.
struct Settings {
  Json problem = Json::object();
  Json tiling = Json::object();   // the other fields of the tiling keep their defaults for the problem
  Json offered = Json::object();  // also of the problem, but a plan takes only the fields that it has
};

struct ConfiguredPlan {
  KernelEntry entry;
  std::unique_ptr<KernelPlan> plan;
  Json chosen;  // the problem fields that the model settled, with their values
};

// A plan of a kernel with what was said of its problem, which it need not take: nothing is settled, tiled or validated.
// Throws Error for an unknown field, and where require_extents() does.
std::unique_ptr<KernelPlan> plan_with(const KernelEntry& entry, const PlannedDevice& device, const Settings& said);

// How long a kernel takes by its own account (KernelPlan::time) under the load that lasts, by which rank_kernels()
// ranks kernels of all designs, too. Infinite where it gives no account, or the device's figures are not known.
double expected_seconds(const KernelPlan& plan, const DeviceSpec& device);

// The plan of that one of `entries` (as Registry::find_all() gives them) which is the fastest for the problem on the
// device; the first of several that are as fast, or whose time is not known. Fields that are not said have the defaults
// of the first. Throws Error for an unknown field, for a value that does not fit, and where validate() does.
ConfiguredPlan configure(const std::vector<KernelEntry>& entries, const PlannedDevice& device, const Settings& said);

// The same of one kernel, but not validated: for help, which is given for a problem that is refused, too.
ConfiguredPlan described(const KernelEntry& entry, const PlannedDevice& device, const Settings& said);

// Throws Error for extents that no memory holds. Planning, whose time grows with the requests, is so bounded, and its
// integers do not overflow. `fields` are those of a problem.
void require_extents(const std::vector<FieldRef>& fields);

// Gives a plan another problem, with the default tiling for its target. `values` names every field. Validates nothing.
void set_problem(KernelPlan& plan, const Json& values);

// Sets the fields that `values` names. For an unknown one it throws an Error that names `owner` and the nearest field.
void set_fields(const std::string& owner, const std::vector<FieldRef>& fields, const Json& values);

// Those of `values` whose problem field the plan has.
Json known_fields(KernelPlan& plan, const Json& values);

}  // namespace hypermla
