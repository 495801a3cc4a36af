// What kernels reach of the ceilings of a device, measured by running them: "reach" of roofline/device_spec.h.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hypermla/plan/configure.h"
#include "hypermla/plan/registry.h"

namespace hypermla {

struct MeasuredReach {
  Json reach = Json::object();
  std::vector<std::string> remarks;  // what was run, and what could not be: a sentence each
};

// For each path, and each limit that a path may meet, runs the kernel that the model would take for a problem which
// meets that limit, and finds the number with which its plan predicts the time that it took. `planned` has the device's
// ceilings, and what it says of reach is not used. A term is left out where no kernel of the path meets it, or none
// runs.
MeasuredReach measure_reach(const Registry& registry, PlannedDevice planned, const std::shared_ptr<Device>& device,
                            Compiler& compiler);

// The number f, from 1/64 to 64, at which `seconds` gives `measured`; it falls as f grows. Empty where it does not
// depend on f, or not enough.
std::optional<double> reach_of_time(const std::function<double(double)>& seconds, double measured);

}  // namespace hypermla
