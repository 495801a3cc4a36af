// What ran when: a timeline of device operations, driver calls and named ranges, and what follows from it. All pure,
// so that recorded timelines are tests; times are nanoseconds of one clock.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hypermla/base/fields.h"

namespace hypermla {

struct DeviceOperation {
  std::string name;
  enum class Kind { kernel, copy, fill } kind = Kind::kernel;
  std::uint64_t start = 0, end = 0;
  std::uint32_t device = 0, context = 0, stream = 0, correlation = 0;
  int grid[3] = {0, 0, 0}, block[3] = {0, 0, 0};
  int registers = 0, static_shared = 0, dynamic_shared = 0;
  std::uint64_t bytes = 0;  // of a copy or fill
};

struct DriverCall {
  std::string name;
  std::uint64_t start = 0, end = 0;
  std::uint32_t process = 0, thread = 0, correlation = 0;
};

// A stage, as the host entered and left it.
struct HostRange {
  std::string name;
  std::uint64_t start = 0, end = 0;
  std::uint32_t process = 0, thread = 0;
  std::vector<std::uint32_t> correlations;  // of the calls made inside
};

// How busy the device was on average between two points in time, in percent of its peak.
struct CounterSample {
  std::uint64_t start = 0, end = 0;
  double tensor_pct = 0, dram_pct = 0;
};

struct Timeline {
  std::vector<DeviceOperation> operations;
  std::vector<DriverCall> calls;
  std::vector<HostRange> ranges;
  std::vector<CounterSample> samples;  // in order, of the whole device
  std::string no_samples;              // why there are none
};

// The reports of `nsys stats` under its own column names, so that scripts read either.
std::string cuda_gpu_trace_csv(const Timeline& timeline);
std::string cuda_api_sum_csv(const Timeline& timeline);
std::string nvtx_gpu_proj_trace_csv(const Timeline& timeline);
// The operations of a cuda_gpu_trace report, ours or nsys'.
std::vector<DeviceOperation> parse_cuda_gpu_trace(const std::string& csv);
// The calls of nsys' cuda_api_trace report.
std::vector<DriverCall> parse_cuda_api_trace(const std::string& csv);

// For chrome://tracing and ui.perfetto.dev: a row for every stream, one for the host, arrows from launches to what
// they launched; where there are samples, a track for the tensor pipe and one for DRAM.
std::string chrome_trace_json(const Timeline& timeline);

// {"span_us", "busy_us", "sum_us", "idle_us", "concurrency", "overlaps": [...], "gaps": [...], "critical_path":
// [...]}.
//   busy         time in which anything ran
//   concurrency  sum over busy: 1 when nothing overlaps
//   overlaps     for every pair of kernel names the time both ran, and its share of the shorter one
//   gaps         times in which nothing ran, longest first
//   critical path  the chain that ends last: before each operation the one that ended last before it started
//   samples      {"count", "interval_us"}, and for every kernel that one lies within "tensor_pct", "dram_pct" and,
//                unless it works out of the caches, "bubble_pct": the share of its time in which neither was used
//   no_samples   why there are none
Json analyse(const Timeline& timeline);
std::string render_timeline(const Json& analysis);  // Markdown

}  // namespace hypermla
