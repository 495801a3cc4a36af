#include <algorithm>
#include <cmath>
#include <set>

#include "hypermla/base/error.h"
#include "hypermla/profile/timeline.h"

namespace hypermla {
namespace {

// Not 0, which Perfetto takes for the idle process; and it names rows by their number alone, not by their process.
constexpr int kGpu = 1, kHost = 2;
constexpr std::uint32_t kStages = 3;  // the row of the host's ranges

std::uint64_t first_time(const Timeline& timeline) {
  std::uint64_t first = ~std::uint64_t{0};
  for (const auto& operation : timeline.operations) first = std::min(first, operation.start);
  for (const auto& call : timeline.calls) first = std::min(first, call.start);
  for (const auto& range : timeline.ranges) first = std::min(first, range.start);
  for (const auto& sample : timeline.samples) first = std::min(first, sample.start);
  return first;
}

class ChromeTrace {
 public:
  explicit ChromeTrace(const Timeline& timeline) : timeline_(timeline), origin_(first_time(timeline)) {}

  std::string text() {
    name_rows();
    add_host();
    for (const DeviceOperation& operation : timeline_.operations) add_operation(operation);
    add_samples();
    return Json{{"displayTimeUnit", "ns"}, {"traceEvents", events_}}.dump() + "\n";
  }

 private:
  void name_process(int process, const std::string& text) {
    events_.push_back({{"ph", "M"}, {"name", "process_name"}, {"pid", process}, {"args", {{"name", text}}}});
  }
  void name_row(int process, std::uint32_t row, const std::string& text) {
    events_.push_back(
        {{"ph", "M"}, {"name", "thread_name"}, {"pid", process}, {"args", {{"name", text}}}, {"tid", row}});
  }
  void name_rows() {
    name_process(kGpu, "GPU");
    name_process(kHost, "host");
    std::set<std::uint32_t> streams, threads;
    for (const DeviceOperation& operation : timeline_.operations)
      if (streams.insert(operation.stream).second)
        name_row(kGpu, operation.stream, fmt::format("stream {}", operation.stream));
    if (!timeline_.ranges.empty()) name_row(kHost, kStages, "stages");
    for (const DriverCall& call : timeline_.calls)
      if (threads.insert(call.thread).second) name_row(kHost, call.thread, fmt::format("thread {}", call.thread));
  }

  template <class Timed>
  void add_slice(const char* category, int process, std::uint32_t row, const Timed& timed, const Json& details) {
    events_.push_back({{"ph", "X"},
                       {"cat", category},
                       {"name", timed.name},
                       {"pid", process},
                       {"tid", row},
                       {"ts", microseconds(timed.start - origin_)},
                       {"dur", microseconds(timed.end - timed.start)},
                       {"args", details}});
  }
  void add_host() {
    for (const HostRange& range : timeline_.ranges) add_slice("stage", kHost, kStages, range, Json::object());
    for (const DriverCall& call : timeline_.calls)
      add_slice("api", kHost, call.thread, call, {{"correlation", call.correlation}});
  }
  void add_operation(const DeviceOperation& operation) {
    const bool is_kernel = operation.kind == DeviceOperation::Kind::kernel;
    Json details = {{"correlation", operation.correlation}};
    if (is_kernel)
      details.update({{"grid", operation.grid},
                      {"block", operation.block},
                      {"registers", operation.registers},
                      {"shared_bytes", operation.static_shared + operation.dynamic_shared}});
    else
      details["bytes"] = operation.bytes;
    add_slice(is_kernel ? "kernel" : "memory", kGpu, operation.stream, operation, details);
    const auto launch = std::find_if(timeline_.calls.rbegin(), timeline_.calls.rend(),
                                     [&](const DriverCall& call) { return call.correlation == operation.correlation; });
    if (launch != timeline_.calls.rend()) add_arrow(*launch, operation);
  }
  void add_arrow(const DriverCall& launch, const DeviceOperation& operation) {
    Json begin = {{"ph", "s"}, {"cat", "launch"}, {"name", "launch"}, {"id", operation.correlation}};
    Json end = {{"ph", "f"}, {"bp", "e"}, {"cat", "launch"}, {"name", "launch"}, {"id", operation.correlation}};
    begin.update({{"pid", kHost}, {"tid", launch.thread}, {"ts", microseconds(launch.start - origin_)}});
    end.update({{"pid", kGpu}, {"tid", operation.stream}, {"ts", microseconds(operation.start - origin_)}});
    events_.push_back(begin);
    events_.push_back(end);
  }

  // A counter keeps its value until the next event of its track.
  void add_samples() {
    for (const CounterSample& sample : timeline_.samples)
      for (const auto& [track, value] : {std::pair{"tensor pipe", sample.tensor_pct}, {"DRAM", sample.dram_pct}})
        events_.push_back({{"ph", "C"},
                           {"name", track},
                           {"pid", kGpu},
                           {"ts", microseconds(sample.start - origin_)},
                           {"args", {{"%", std::round(10 * value) / 10}}}});
  }

  const Timeline& timeline_;
  const std::uint64_t origin_;
  Json events_ = Json::array();
};

}  // namespace

std::string chrome_trace_json(const Timeline& timeline) { return ChromeTrace(timeline).text(); }

}  // namespace hypermla
