// Hardware counters of a GPU, read in this process through CUPTI's range profiler.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "hypermla/device/device.h"
#include "hypermla/profile/counter_host.h"
#include "hypermla/profile/cupti.h"

namespace hypermla {

struct CounterRange {
  std::string name;
  // Enqueued once for every pass, so it must do the same each time.
  Work work;
  // One kernel is counted from its first to its last cycle. Anything else (several kernels that may run at once,
  // copies) is counted together, from the host's point of view: some 15 us longer than the work itself.
  bool one_kernel = true;
};

struct Counters {
  std::string chip;                                   // "GH100"
  int passes = 0;                                     // how often every range ran
  std::vector<std::string> unknown;                   // metrics that this chip does not have
  std::vector<std::map<std::string, double>> ranges;  // metric to value, in the order of the ranges
};

// Every pass of a range finds the L2 flushed. Throws Error saying why when the counters cannot be read: no
// permission, another profiler, not a GPU that CUPTI knows.
Counters read_counters(const cupti::Library& library, Device& device, const std::vector<std::string>& metrics,
                       const std::vector<CounterRange>& ranges);

// Needs no GPU: which of the metrics the chip does not have, and how many passes the others take together.
struct MetricCheck {
  std::vector<std::string> unknown;
  int passes = 0;
};
MetricCheck check_metrics(const cupti::Library& library, const std::string& chip,
                          const std::vector<std::string>& metrics,
                          CUpti_ProfilerType use = CUPTI_PROFILER_TYPE_RANGE_PROFILER);

}  // namespace hypermla
