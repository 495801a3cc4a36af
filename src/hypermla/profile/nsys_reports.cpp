// The reports of `nsys stats`, written and read.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <map>

#include "hypermla/base/error.h"
#include "hypermla/device/measure.h"
#include "hypermla/profile/csv.h"
#include "hypermla/profile/timeline.h"

namespace hypermla {
namespace {

using Kind = DeviceOperation::Kind;

// A CSV report by column names.
class Table {
 public:
  Table(const std::string& csv, const char* report, std::initializer_list<const char*> needed) : rows_(parse_csv(csv)) {
    if (rows_.empty()) fail("the report {} is empty; was anything launched?", report);
    for (std::size_t i = 0; i < rows_[0].size(); ++i) columns_[rows_[0][i]] = i;
    for (const char* name : needed)
      if (!columns_.count(name))
        fail("the report {} has no column '{}'; this version of nsys is not known here", report, name);
  }
  std::size_t size() const { return rows_.size() - 1; }
  // Empty where a row or the whole report has no such field.
  std::string text(std::size_t row, const char* name) const {
    const auto column = columns_.find(name);
    const auto& fields = rows_[row + 1];
    return column != columns_.end() && column->second < fields.size() ? fields[column->second] : std::string();
  }
  // 0 where there is no such field, as in a copy of a kernel's.
  std::uint64_t number(std::size_t row, const char* name) const {
    return std::strtoull(text(row, name).c_str(), nullptr, 10);
  }
  // What every row has.
  std::uint64_t time(std::size_t row, const char* name) const {
    const std::string digits = text(row, name);
    if (digits.empty() || digits.find_first_not_of("0123456789") != std::string::npos)
      fail("'{}' is '{}' in row {} of a report of nsys, and no number; profile again", name, digits, row + 1);
    return number(row, name);
  }
  // Megabytes as bytes.
  std::uint64_t bytes(std::size_t row, const char* name) const {
    return std::uint64_t(std::llround(std::strtod(text(row, name).c_str(), nullptr) * 1e6));
  }

 private:
  std::vector<std::vector<std::string>> rows_;
  std::map<std::string, std::size_t> columns_;
};

}  // namespace

std::string stage_name(std::string kernel) {
  kernel.resize(std::min(kernel.size(), kernel.find_first_of("<(")));  // arguments of a template say nothing
  return kernel.substr(kernel.find_last_of(" :") + 1);
}

std::string cuda_gpu_trace_csv(const Timeline& timeline) {
  std::string text =
      "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),Bytes (MB),"
      "Throughput (MB/s),SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name\n";
  for (const DeviceOperation* operation : by_start(timeline)) {
    const std::uint64_t duration = operation->end - operation->start;
    text += fmt::format("{},{},{},", operation->start, duration, operation->correlation);
    if (operation->kind == Kind::kernel)
      text += fmt::format("{},{},{},{},{},{},{},{:.3f},{:.3f},,,,,", operation->grid[0], operation->grid[1],
                          operation->grid[2], operation->block[0], operation->block[1], operation->block[2],
                          operation->registers, operation->static_shared * 1e-6, operation->dynamic_shared * 1e-6);
    else
      text += fmt::format(",,,,,,,,,{:.3f},{:.3f},,,", double(operation->bytes) * 1e-6,
                          duration ? double(operation->bytes) * 1e3 / double(duration) : 0);
    text += fmt::format("{},{},,{},{}\n", operation->device, operation->context, operation->stream,
                        csv_field(operation->name));
  }
  return text;
}

std::vector<DeviceOperation> parse_cuda_gpu_trace(const std::string& csv) {
  const Table table(csv, "cuda_gpu_trace",
                    {"Start (ns)", "Duration (ns)", "CorrId", "GrdX", "Bytes (MB)", "Strm", "Name"});
  std::vector<DeviceOperation> operations;
  for (std::size_t row = 0; row < table.size(); ++row) {
    auto number = [&](const char* name) { return int(table.number(row, name)); };
    DeviceOperation operation;
    operation.name = table.text(row, "Name");
    operation.start = table.time(row, "Start (ns)");
    operation.end = operation.start + table.time(row, "Duration (ns)");
    if (operation.end == operation.start) continue;
    operation.correlation = std::uint32_t(table.number(row, "CorrId"));
    operation.device = std::uint32_t(table.number(row, "Device"));
    operation.context = std::uint32_t(table.number(row, "Ctx"));
    operation.stream = std::uint32_t(table.number(row, "Strm"));
    operation.kind = !table.text(row, "GrdX").empty()                     ? Kind::kernel
                     : operation.name.find("memset") != std::string::npos ? Kind::fill
                                                                          : Kind::copy;
    if (operation.kind == Kind::kernel) operation.name = stage_name(operation.name);
    operation.bytes = table.bytes(row, "Bytes (MB)");
    const char* const grid[] = {"GrdX", "GrdY", "GrdZ"};
    const char* const block[] = {"BlkX", "BlkY", "BlkZ"};
    for (int i = 0; i < 3; ++i) {
      operation.grid[i] = number(grid[i]);
      operation.block[i] = number(block[i]);
    }
    operation.registers = number("Reg/Trd");
    operation.static_shared = int(table.bytes(row, "StcSMem (MB)"));
    operation.dynamic_shared = int(table.bytes(row, "DymSMem (MB)"));
    operations.push_back(operation);
  }
  return operations;
}

std::vector<DriverCall> parse_cuda_api_trace(const std::string& csv) {
  const Table table(csv, "cuda_api_trace", {"Start (ns)", "Duration (ns)", "Name", "CorrID"});
  std::vector<DriverCall> calls;
  for (std::size_t row = 0; row < table.size(); ++row) {
    const std::uint64_t start = table.time(row, "Start (ns)");
    calls.push_back({table.text(row, "Name"), start, start + table.time(row, "Duration (ns)"),
                     std::uint32_t(table.number(row, "Tid")), std::uint32_t(table.number(row, "CorrID"))});
  }
  return calls;
}

std::string cuda_api_sum_csv(const Timeline& timeline) {
  std::map<std::string, std::vector<double>> by_name;
  double all = 0;
  for (const DriverCall& call : timeline.calls) {
    by_name[call.name].push_back(double(call.end - call.start));
    all += by_name[call.name].back();
  }
  std::vector<std::pair<double, std::string>> rows;
  for (auto& [name, times] : by_name) {
    std::sort(times.begin(), times.end());
    double sum = 0, squares = 0;
    for (double time : times) sum += time;
    const double mean = sum / double(times.size());
    for (double time : times) squares += (time - mean) * (time - mean);
    const double deviation = times.size() > 1 ? std::sqrt(squares / double(times.size() - 1)) : 0;
    rows.emplace_back(sum, fmt::format("{:.1f},{:.0f},{},{:.1f},{:.1f},{:.0f},{:.0f},{:.1f},{}\n",
                                       all > 0 ? 100 * sum / all : 0, sum, times.size(), mean, quantile(times, 0.5),
                                       times.front(), times.back(), deviation, csv_field(name)));
  }
  std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::string text = "Time (%),Total Time (ns),Num Calls,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name\n";
  for (const auto& [sum, row] : rows) text += row;
  return text;
}

std::string nvtx_gpu_proj_trace_csv(const Timeline& timeline) {
  std::string text =
      "Name,Projected Start (ns),Projected Duration (ns),Orig Start (ns),Orig Duration (ns),Style,PID,TID,"
      "NumGPUOps,Lvl,NumChild,RangeId,ParentId,RangeStack\n";
  int id = 0;
  for (const HostRange& range : timeline.ranges) {
    ++id;
    std::uint64_t start = ~std::uint64_t{0}, end = 0;
    int count = 0;
    for (const DeviceOperation& operation : timeline.operations)
      if (std::find(range.correlations.begin(), range.correlations.end(), operation.correlation) !=
          range.correlations.end()) {
        start = std::min(start, operation.start);
        end = std::max(end, operation.end);
        ++count;
      }
    if (count == 0) continue;
    text += fmt::format("{},{},{},{},{},PushPop,{},{},{},0,0,{},,:{}\n", csv_field(range.name), start, end - start,
                        range.start, range.end - range.start, range.process, range.thread, count, id, id);
  }
  return text;
}

}  // namespace hypermla
