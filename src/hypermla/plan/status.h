// What planners on a device say of values that the host does not see.
#pragma once

#include <vector>

#include "hypermla/plan/plan.h"

namespace hypermla {

// An int32 workspace of this name holds DecodeStatus bits of the last run in its first word. That of a stage is called
// "<prefix>.plan_status" (plan/stage.h).
inline constexpr const char* kPlanStatus = "plan_status";

// The bits that a planner left at `status`, in the device's memory. Waits for the device.
int read_status(Device& device, const int* status);

// Waits for the device. Throws Error when the last run was given lengths beyond what is bound. `tensors` are those of a
// run that was made: before, a workspace holds anything.
void check_status(const std::vector<TensorSpec>& specs, const Tensors& tensors, Device& device);

}  // namespace hypermla
