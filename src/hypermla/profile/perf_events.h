// Counters of a CPU through the kernel's perf_event_open: cycles, instructions, cache and branch misses of all
// threads of this process, in user space.
#pragma once

#include <functional>
#include <map>
#include <string>

namespace hypermla {

// Counts while `work` runs, by the names of counter_catalogue(); what this CPU lacks is absent. Counters that had to
// take turns are scaled to the whole time. Throws Error saying why when there are none.
std::map<std::string, double> count_cpu(const std::function<void()>& work);

}  // namespace hypermla
