// What ran when: a timeline of device operations, driver calls and named ranges, and what follows from it. All pure,
// so that recorded timelines are tests; times are nanoseconds of one clock.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hypermla/profile/profile.h"

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
  std::uint32_t thread = 0, correlation = 0;
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

inline double microseconds(std::uint64_t nanoseconds) { return double(nanoseconds) * 1e-3; }
std::vector<const DeviceOperation*> by_start(const Timeline& timeline);
// What a stage is called, of its kernel's demangled name: "flash_mla" of "void hypermla::cute::flash_mla<...>(...)".
std::string stage_name(std::string kernel);

// The reports of `nsys stats` under its own column names, so that scripts read either.
std::string cuda_gpu_trace_csv(const Timeline& timeline);
std::string cuda_api_sum_csv(const Timeline& timeline);
std::string nvtx_gpu_proj_trace_csv(const Timeline& timeline);
// The operations of a cuda_gpu_trace report, ours or nsys', without those that took no time. Throws Error where a time
// is no number.
std::vector<DeviceOperation> parse_cuda_gpu_trace(const std::string& csv);
// The calls of nsys' cuda_api_trace report.
std::vector<DriverCall> parse_cuda_api_trace(const std::string& csv);

// For chrome://tracing and ui.perfetto.dev: a row for every stream, one for the host, arrows from launches to what
// they launched; where there are samples, a track for the tensor pipe and one for DRAM.
std::string chrome_trace_json(const Timeline& timeline);

// Concurrency, overlaps, gaps, the critical path, and for every kernel the samples that lie within its runs. Throws
// Error when nothing ran.
TimelineFigures analyse(const Timeline& timeline);

}  // namespace hypermla
