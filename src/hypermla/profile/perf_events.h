// Counters of a CPU through the kernel's perf_event_open: cycles, instructions, cache and branch misses of all
// threads of this process, in user space.
#pragma once

#include <functional>
#include <map>
#include <string>

namespace hypermla {

struct CpuCounters {
  std::map<std::string, double> values;  // by the names of metric_catalogue(); what this CPU lacks is absent
  std::string missing;                   // why there are none; empty when there are
};

// Counts while `work` runs. Counters that had to take turns are scaled to the whole time.
CpuCounters count_cpu(const std::function<void()>& work);

}  // namespace hypermla
