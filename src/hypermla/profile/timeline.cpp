#include "hypermla/profile/timeline.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <map>

#include "hypermla/base/error.h"
#include "hypermla/profile/metrics.h"

namespace hypermla {
namespace {

using Kind = DeviceOperation::Kind;

std::vector<const DeviceOperation*> by_start(const std::vector<DeviceOperation>& operations) {
  std::vector<const DeviceOperation*> sorted;
  for (const DeviceOperation& operation : operations) sorted.push_back(&operation);
  std::stable_sort(sorted.begin(), sorted.end(), [](auto* a, auto* b) { return a->start < b->start; });
  return sorted;
}

double us(std::uint64_t nanoseconds) { return double(nanoseconds) * 1e-3; }

struct Span {
  std::uint64_t start, end;
};

// The times in which at least one of the operations ran, in order.
std::vector<Span> merged(const std::vector<const DeviceOperation*>& sorted) {
  std::vector<Span> spans;
  for (const DeviceOperation* operation : sorted) {
    if (!spans.empty() && operation->start <= spans.back().end)
      spans.back().end = std::max(spans.back().end, operation->end);
    else
      spans.push_back({operation->start, operation->end});
  }
  return spans;
}

std::uint64_t total(const std::vector<Span>& spans) {
  std::uint64_t sum = 0;
  for (const Span& span : spans) sum += span.end - span.start;
  return sum;
}

std::uint64_t shared(const std::vector<Span>& a, const std::vector<Span>& b) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const std::uint64_t start = std::max(a[i].start, b[j].start), end = std::min(a[i].end, b[j].end);
    if (start < end) sum += end - start;
    if (a[i].end < b[j].end)
      ++i;
    else
      ++j;
  }
  return sum;
}

constexpr double kUsedPercent = 10;  // below it a bubble: what is still there is the end of an earlier load or store

// What was sampled while these operations ran, by the samples that lie within one of them.
void add_samples(Json& kernel, const std::vector<const DeviceOperation*>& runs,
                 const std::vector<CounterSample>& samples) {
  double time = 0, tensor = 0, dram = 0, bubbles = 0;
  for (const DeviceOperation* run : runs) {
    auto sample = std::lower_bound(samples.begin(), samples.end(), run->start,
                                   [](const CounterSample& one, std::uint64_t start) { return one.start < start; });
    for (; sample != samples.end() && sample->end <= run->end; ++sample) {
      const double length = us(sample->end - sample->start);
      time += length;
      tensor += length * sample->tensor_pct;
      dram += length * sample->dram_pct;
      if (sample->tensor_pct < kUsedPercent && sample->dram_pct < kUsedPercent) bubbles += length;
    }
  }
  if (time == 0) return;
  tensor /= time, dram /= time;
  kernel.update({{"tensor_pct", tensor}, {"dram_pct", dram}});
  // One that uses neither at any time works out of the caches: there are no bubbles in that.
  if (std::max(tensor, dram) >= kUsedPercent) kernel["bubble_pct"] = 100 * bubbles / time;
}

double quantile(const std::vector<double>& sorted, double q) {
  const double at = q * double(sorted.size() - 1);
  const auto below = std::size_t(at);
  const auto above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - double(below)) * (sorted[above] - sorted[below]);
}

}  // namespace

std::string cuda_gpu_trace_csv(const Timeline& timeline) {
  std::string text =
      "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),Bytes (MB),"
      "Throughput (MB/s),SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name\n";
  for (const DeviceOperation* operation : by_start(timeline.operations)) {
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

namespace {

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
  std::uint64_t number(std::size_t row, const char* name) const {
    return std::strtoull(text(row, name).c_str(), nullptr, 10);
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

std::vector<DeviceOperation> parse_cuda_gpu_trace(const std::string& csv) {
  const Table table(csv, "cuda_gpu_trace",
                    {"Start (ns)", "Duration (ns)", "CorrId", "GrdX", "Bytes (MB)", "Strm", "Name"});
  std::vector<DeviceOperation> operations;
  for (std::size_t row = 0; row < table.size(); ++row) {
    auto number = [&](const char* name) { return int(table.number(row, name)); };
    DeviceOperation operation;
    operation.name = table.text(row, "Name");
    operation.start = table.number(row, "Start (ns)");
    operation.end = operation.start + table.number(row, "Duration (ns)");
    operation.correlation = std::uint32_t(table.number(row, "CorrId"));
    operation.device = std::uint32_t(table.number(row, "Device"));
    operation.context = std::uint32_t(table.number(row, "Ctx"));
    operation.stream = std::uint32_t(table.number(row, "Strm"));
    operation.kind = !table.text(row, "GrdX").empty()                     ? Kind::kernel
                     : operation.name.find("memset") != std::string::npos ? Kind::fill
                                                                          : Kind::copy;
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
    const std::uint64_t start = table.number(row, "Start (ns)");
    calls.push_back({table.text(row, "Name"), start, start + table.number(row, "Duration (ns)"),
                     std::uint32_t(table.number(row, "Pid")), std::uint32_t(table.number(row, "Tid")),
                     std::uint32_t(table.number(row, "CorrID"))});
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

std::string chrome_trace_json(const Timeline& timeline) {
  std::uint64_t origin = ~std::uint64_t{0};
  for (const auto& operation : timeline.operations) origin = std::min(origin, operation.start);
  for (const auto& call : timeline.calls) origin = std::min(origin, call.start);
  for (const auto& range : timeline.ranges) origin = std::min(origin, range.start);
  for (const auto& sample : timeline.samples) origin = std::min(origin, sample.start);
  // Not 0, which Perfetto takes for the idle process; and it names rows by their number, whatever the process.
  constexpr int kGpu = 1, kHost = 2;
  constexpr std::uint32_t kStages = 3;
  Json events = Json::array();
  auto name = [&](const char* what, int process, std::uint32_t thread, const std::string& text) {
    Json event = {{"ph", "M"}, {"name", what}, {"pid", process}, {"args", {{"name", text}}}};
    if (thread) event["tid"] = thread;
    events.push_back(std::move(event));
  };
  auto slice = [&](const std::string& category, const std::string& text, int process, std::uint32_t thread,
                   std::uint64_t start, std::uint64_t end, Json details) {
    events.push_back({{"ph", "X"},
                      {"cat", category},
                      {"name", text},
                      {"pid", process},
                      {"tid", thread},
                      {"ts", us(start - origin)},
                      {"dur", us(end - start)},
                      {"args", std::move(details)}});
  };
  name("process_name", kGpu, 0, "GPU");
  name("process_name", kHost, 0, "host");
  std::map<std::uint32_t, bool> streams, threads;
  for (const auto& operation : timeline.operations)
    if (!std::exchange(streams[operation.stream], true))
      name("thread_name", kGpu, operation.stream, fmt::format("stream {}", operation.stream));
  if (!timeline.ranges.empty()) name("thread_name", kHost, kStages, "stages");
  for (const auto& call : timeline.calls)
    if (!std::exchange(threads[call.thread], true))
      name("thread_name", kHost, call.thread, fmt::format("thread {}", call.thread));

  for (const auto& range : timeline.ranges)
    slice("stage", range.name, kHost, kStages, range.start, range.end, Json::object());
  std::map<std::uint32_t, const DriverCall*> launches;
  for (const auto& call : timeline.calls) {
    slice("api", call.name, kHost, call.thread, call.start, call.end, {{"correlation", call.correlation}});
    launches[call.correlation] = &call;
  }
  for (const auto& operation : timeline.operations) {
    Json details = {{"correlation", operation.correlation}};
    if (operation.kind == Kind::kernel)
      details.update({{"grid", {operation.grid[0], operation.grid[1], operation.grid[2]}},
                      {"block", {operation.block[0], operation.block[1], operation.block[2]}},
                      {"registers", operation.registers},
                      {"shared_bytes", operation.static_shared + operation.dynamic_shared}});
    else
      details["bytes"] = operation.bytes;
    slice(operation.kind == Kind::kernel ? "kernel" : "memory", operation.name, kGpu, operation.stream, operation.start,
          operation.end, details);
    const auto launch = launches.find(operation.correlation);
    if (launch == launches.end()) continue;
    const DriverCall& call = *launch->second;
    events.push_back({{"ph", "s"},
                      {"cat", "launch"},
                      {"name", "launch"},
                      {"id", operation.correlation},
                      {"pid", kHost},
                      {"tid", call.thread},
                      {"ts", us(call.start - origin)}});
    events.push_back({{"ph", "f"},
                      {"bp", "e"},
                      {"cat", "launch"},
                      {"name", "launch"},
                      {"id", operation.correlation},
                      {"pid", kGpu},
                      {"tid", operation.stream},
                      {"ts", us(operation.start - origin)}});
  }
  // A counter keeps its value until the next event of its track.
  for (const CounterSample& sample : timeline.samples)
    for (const auto& [track, value] : {std::pair{"tensor pipe", sample.tensor_pct}, {"DRAM", sample.dram_pct}})
      events.push_back({{"ph", "C"},
                        {"name", track},
                        {"pid", kGpu},
                        {"ts", us(sample.start - origin)},
                        {"args", {{"%", std::round(10 * value) / 10}}}});
  return Json{{"displayTimeUnit", "ns"}, {"traceEvents", events}}.dump() + "\n";
}

Json analyse(const Timeline& timeline) {
  const auto sorted = by_start(timeline.operations);
  if (sorted.empty()) fail("nothing ran on the device while it was watched");
  const std::vector<Span> busy = merged(sorted);
  const std::uint64_t begin = busy.front().start, end = busy.back().end;
  std::uint64_t sum = 0;
  std::map<std::string, std::vector<const DeviceOperation*>> kernels;
  std::map<std::uint32_t, bool> streams;
  for (const DeviceOperation* operation : sorted) {
    sum += operation->end - operation->start;
    streams[operation->stream] = true;
    if (operation->kind == Kind::kernel) kernels[operation->name].push_back(operation);
  }
  Json result;
  result["operations"] = sorted.size();
  result["streams"] = streams.size();
  result["span_us"] = us(end - begin);
  result["busy_us"] = us(total(busy));
  result["sum_us"] = us(sum);
  result["idle_us"] = us(end - begin - total(busy));
  result["concurrency"] = total(busy) ? double(sum) / double(total(busy)) : 0;

  result["kernels"] = Json::array();
  for (const auto& [name, runs] : kernels) {
    std::uint64_t time = 0;
    for (const DeviceOperation* run : runs) time += run->end - run->start;
    result["kernels"].push_back(
        {{"name", name}, {"runs", runs.size()}, {"sum_us", us(time)}, {"mean_us", us(time) / double(runs.size())}});
    add_samples(result["kernels"].back(), runs, timeline.samples);
  }
  if (!timeline.samples.empty()) {
    std::vector<double> lengths;
    for (const CounterSample& sample : timeline.samples) lengths.push_back(us(sample.end - sample.start));
    std::sort(lengths.begin(), lengths.end());
    result["samples"] = {{"count", lengths.size()}, {"interval_us", quantile(lengths, 0.5)}};
  } else if (!timeline.no_samples.empty()) {
    result["no_samples"] = timeline.no_samples;
  }
  result["overlaps"] = Json::array();
  for (auto a = kernels.begin(); a != kernels.end(); ++a)
    for (auto b = std::next(a); b != kernels.end(); ++b) {
      const auto x = merged(a->second), y = merged(b->second);
      const std::uint64_t both = shared(x, y), shorter = std::min(total(x), total(y));
      result["overlaps"].push_back({{"a", a->first},
                                    {"b", b->first},
                                    {"us", us(both)},
                                    {"share", shorter ? double(both) / double(shorter) : 0}});
    }

  std::vector<std::pair<std::uint64_t, Json>> gaps;
  for (std::size_t i = 1; i < busy.size(); ++i) {
    const auto before =
        std::find_if(sorted.begin(), sorted.end(), [&](auto* one) { return one->end == busy[i - 1].end; });
    const auto after =
        std::find_if(sorted.begin(), sorted.end(), [&](auto* one) { return one->start == busy[i].start; });
    const std::uint64_t length = busy[i].start - busy[i - 1].end;
    gaps.emplace_back(length, Json{{"us", us(length)}, {"after", (*before)->name}, {"before", (*after)->name}});
  }
  std::stable_sort(gaps.begin(), gaps.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  result["gaps"] = Json::array();
  for (std::size_t i = 0; i < std::min<std::size_t>(gaps.size(), 10); ++i) result["gaps"].push_back(gaps[i].second);

  const DeviceOperation* at =
      *std::max_element(sorted.begin(), sorted.end(), [](auto* a, auto* b) { return a->end < b->end; });
  std::vector<const DeviceOperation*> path = {at};
  for (;;) {
    const DeviceOperation* before = nullptr;
    for (const DeviceOperation* one : sorted)
      if (one != at && one->end <= at->start && (!before || one->end > before->end)) before = one;
    if (!before) break;
    path.push_back(at = before);
  }
  result["critical_path"] = Json::array();
  for (auto step = path.rbegin(); step != path.rend(); ++step)
    result["critical_path"].push_back(
        {{"name", (*step)->name},
         {"us", us((*step)->end - (*step)->start)},
         {"waited_us", step == path.rbegin() ? 0 : us((*step)->start - (*std::prev(step))->end)}});
  return result;
}

std::string render_timeline(const Json& analysis) {
  auto number = [&](const char* key) { return analysis.at(key).get<double>(); };
  std::string text = "## Timeline\n\n";
  text +=
      fmt::format("{} operations on {} streams in {:.1f} us: {:.1f} us busy, {:.1f} us idle; concurrency {:.2f}.\n\n",
                  analysis.at("operations").get<int>(), analysis.at("streams").get<int>(), number("span_us"),
                  number("busy_us"), number("idle_us"), number("concurrency"));
  const bool sampled = analysis.contains("samples");
  text += fmt::format("| kernel | runs | mean us | sum us |{}\n|---|---|---|---|{}\n",
                      sampled ? " tensor % | DRAM % | neither, % of the time |" : "", sampled ? "---|---|---|" : "");
  for (const Json& one : analysis.at("kernels")) {
    text += fmt::format("| {} | {} | {:.1f} | {:.1f} |", one["name"].get<std::string>(), one["runs"].get<int>(),
                        one["mean_us"].get<double>(), one["sum_us"].get<double>());
    for (const char* name : {"tensor_pct", "dram_pct", "bubble_pct"})
      if (sampled) text += one.contains(name) ? fmt::format(" {:.1f} |", one[name].get<double>()) : " - |";
    text += "\n";
  }
  if (sampled)
    text += fmt::format("\nTracks of tensor pipe and DRAM in chrome_trace.json: {} samples, {:.1f} us each.\n",
                        analysis["samples"]["count"].get<int>(), analysis["samples"]["interval_us"].get<double>());
  else if (analysis.contains("no_samples"))
    text += fmt::format("\nNo tracks of tensor pipe and DRAM in chrome_trace.json: {}.\n",
                        analysis["no_samples"].get<std::string>());
  if (!analysis.at("overlaps").empty()) {
    text += "\n| pair | both run, us | of the shorter |\n|---|---|---|\n";
    for (const Json& one : analysis["overlaps"])
      text += fmt::format("| {} and {} | {:.1f} | {:.0f} % |\n", one["a"].get<std::string>(),
                          one["b"].get<std::string>(), one["us"].get<double>(), 100 * one["share"].get<double>());
  }
  if (!analysis.at("gaps").empty()) {
    text += "\n| gap us | after | before |\n|---|---|---|\n";
    for (const Json& one : analysis["gaps"])
      text += fmt::format("| {:.1f} | {} | {} |\n", one["us"].get<double>(), one["after"].get<std::string>(),
                          one["before"].get<std::string>());
  }
  // A long chain is its kernels and how often each comes.
  std::vector<std::pair<std::string, int>> steps;
  double waited = 0;
  for (const Json& one : analysis.at("critical_path")) {
    waited += one["waited_us"].get<double>();
    if (steps.empty() || steps.back().first != one["name"].get<std::string>()) steps.emplace_back(one["name"], 0);
    ++steps.back().second;
  }
  text += "\nCritical path: ";
  for (std::size_t i = 0; i < std::min<std::size_t>(steps.size(), 12); ++i)
    text += (i ? ", " : "") + steps[i].first + (steps[i].second > 1 ? fmt::format(" x{}", steps[i].second) : "");
  if (steps.size() > 12) text += fmt::format(", and {} more", steps.size() - 12);
  return text + fmt::format("; {:.1f} us of it waiting.\n\n", waited);
}

}  // namespace hypermla
