// What is counted, under the names that CUPTI and ncu share, and how a report words it.
#pragma once

#include <string>
#include <vector>

#include "hypermla/base/fields.h"

namespace hypermla {

struct Metric {
  const char* name;   // "dram__bytes_read.sum"
  const char* label;  // "DRAM read"
  const char* unit;   // of the scaled value: "GB"
  double scale = 1;   // from the counter's own unit to `unit`
};

// All, in the order of the reports. Times and rates, pipes, memory, instructions, then why warps wait.
const std::vector<Metric>& metric_catalogue();
std::vector<std::string> metric_names();

// Null for a name outside the catalogue.
const Metric* find_metric(const std::string& name);

// Rows "stage,metric,value,unit,source": as counted, and under the labels and units of the reports.
std::string raw_metrics_csv(const Json& profile);
std::string formatted_metrics_csv(const Json& profile);
// One row per stage: measured time, work and traffic against what the algorithm needs and what the roofline allows.
std::string roofline_metrics_csv(const Json& profile);

// A field of a CSV file, quoted where RFC 4180 asks for it.
std::string csv_field(const std::string& text);
// The rows of a CSV file, quotes resolved; a row may span lines.
std::vector<std::vector<std::string>> parse_csv(const std::string& text);

}  // namespace hypermla
