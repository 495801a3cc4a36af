// The counters of the hardware, under the names that CUPTI and ncu share, and how a table words them.
#pragma once

#include <string>
#include <vector>

#include "hypermla/profile/profile.h"

namespace hypermla {

struct Counter {
  const char* name;   // "dram__bytes_read.sum"
  const char* label;  // "DRAM read"
  const char* unit;   // of the scaled value: "GB"
  double scale = 1;   // from the counter's own unit to `unit`
};

// All, in the order of the reports. Times and rates, pipes, memory, instructions, then why warps wait.
const std::vector<Counter>& counter_catalogue();
std::vector<std::string> metric_names();  // those of a GPU

// Null for a name outside the catalogue.
const Counter* find_counter(const std::string& name);

// What was counted in a stage, in the order of the catalogue.
std::vector<Metric> metrics_of(const ProfileStage& stage);

// Rows "stage,metric,value,unit,source": as counted, and under the labels and units of the reports.
std::string raw_metrics_csv(const Profile& profile);
std::string formatted_metrics_csv(const Profile& profile);
// One row per stage: measured time, work and traffic against what the algorithm needs and what the roofline allows.
std::string roofline_metrics_csv(const Profile& profile);

}  // namespace hypermla
