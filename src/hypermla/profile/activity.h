// The timeline of a GPU, recorded in this process through CUPTI's activity records.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "hypermla/device/device.h"
#include "hypermla/profile/cupti.h"
#include "hypermla/profile/timeline.h"

namespace hypermla {

struct NamedWork {
  std::string name;
  Work work;
};

// Runs `repetitions` times everything in `stages`, in order, and returns what the driver and the GPU did. Kernels
// may overlap: recording serialises nothing. Counters are sampled meanwhile where the device lets us; where it does
// not, `no_samples` says why. Throws Error when CUPTI refuses, or when nothing was recorded.
Timeline record_timeline(const cupti::Library& library, Device& device, const std::vector<NamedWork>& stages,
                         int repetitions);

}  // namespace hypermla
