#include <algorithm>
#include <map>
#include <set>

#include "hypermla/base/error.h"
#include "hypermla/device/measure.h"
#include "hypermla/profile/timeline.h"

namespace hypermla {
namespace {

using Operations = std::vector<const DeviceOperation*>;  // by start

struct Span {
  std::uint64_t start, end;
};

// The times in which at least one of the operations ran, in order.
std::vector<Span> merged(const Operations& sorted) {
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

// Of all, whether or not they overlap.
std::uint64_t sum_of(const Operations& operations) {
  std::uint64_t sum = 0;
  for (const DeviceOperation* operation : operations) sum += operation->end - operation->start;
  return sum;
}

constexpr double kUsedPercent = 10;  // below it a bubble: what is still there is the end of an earlier load or store

// What was sampled while these operations ran, by the samples that lie within one of them.
void add_samples(TimelineFigures::Kernel& kernel, const Operations& runs, const std::vector<CounterSample>& samples) {
  double time = 0, tensor = 0, dram = 0, bubbles = 0;
  for (const DeviceOperation* run : runs) {
    auto sample = std::lower_bound(samples.begin(), samples.end(), run->start,
                                   [](const CounterSample& one, std::uint64_t start) { return one.start < start; });
    for (; sample != samples.end() && sample->end <= run->end; ++sample) {
      const double length = microseconds(sample->end - sample->start);
      time += length;
      tensor += length * sample->tensor_pct;
      dram += length * sample->dram_pct;
      if (sample->tensor_pct < kUsedPercent && sample->dram_pct < kUsedPercent) bubbles += length;
    }
  }
  if (time == 0) return;
  kernel.tensor_pct = tensor / time;
  kernel.dram_pct = dram / time;
  // One that uses neither at any time works out of the caches: there are no bubbles in that.
  if (std::max(*kernel.tensor_pct, *kernel.dram_pct) >= kUsedPercent) kernel.bubble_pct = 100 * bubbles / time;
}

TimelineFigures::Samples describe(const std::vector<CounterSample>& samples) {
  std::vector<double> lengths;
  for (const CounterSample& sample : samples) lengths.push_back(microseconds(sample.end - sample.start));
  return {int(lengths.size()), quantile(lengths, 0.5)};
}

std::vector<TimelineFigures::Gap> gaps_between(const std::vector<Span>& busy, const Operations& sorted) {
  std::vector<TimelineFigures::Gap> gaps;
  for (std::size_t i = 1; i < busy.size(); ++i) {
    const auto before =
        std::find_if(sorted.begin(), sorted.end(), [&](auto* one) { return one->end == busy[i - 1].end; });
    const auto after =
        std::find_if(sorted.begin(), sorted.end(), [&](auto* one) { return one->start == busy[i].start; });
    gaps.push_back({microseconds(busy[i].start - busy[i - 1].end), (*before)->name, (*after)->name});
  }
  std::stable_sort(gaps.begin(), gaps.end(), [](const auto& a, const auto& b) { return a.us > b.us; });
  gaps.resize(std::min<std::size_t>(gaps.size(), 10));
  return gaps;
}

std::vector<TimelineFigures::Step> critical_path(const Operations& sorted) {
  const DeviceOperation* at =
      *std::max_element(sorted.begin(), sorted.end(), [](auto* a, auto* b) { return a->end < b->end; });
  std::vector<TimelineFigures::Step> path;
  for (;;) {
    const DeviceOperation* before = nullptr;
    for (const DeviceOperation* one : sorted)
      if (one != at && one->end <= at->start && (!before || one->end > before->end)) before = one;
    path.push_back({at->name, microseconds(at->end - at->start), before ? microseconds(at->start - before->end) : 0});
    if (!before) break;
    at = before;
  }
  std::reverse(path.begin(), path.end());
  return path;
}

}  // namespace

std::vector<const DeviceOperation*> by_start(const Timeline& timeline) {
  Operations sorted;
  for (const DeviceOperation& operation : timeline.operations) sorted.push_back(&operation);
  std::stable_sort(sorted.begin(), sorted.end(), [](auto* a, auto* b) { return a->start < b->start; });
  return sorted;
}

TimelineFigures analyse(const Timeline& timeline) {
  const Operations sorted = by_start(timeline);
  if (sorted.empty()) fail("nothing ran on the device while it was watched");
  std::map<std::string, Operations> kernels;
  std::set<std::uint32_t> streams;
  for (const DeviceOperation* operation : sorted) {
    streams.insert(operation->stream);
    if (operation->kind == DeviceOperation::Kind::kernel) kernels[operation->name].push_back(operation);
  }
  const std::vector<Span> busy = merged(sorted);
  const std::uint64_t span = busy.back().end - busy.front().start;

  TimelineFigures figures;
  figures.operations = int(sorted.size());
  figures.streams = int(streams.size());
  figures.span_us = microseconds(span);
  figures.busy_us = microseconds(total(busy));
  figures.sum_us = microseconds(sum_of(sorted));
  figures.idle_us = microseconds(span - total(busy));
  figures.concurrency = total(busy) ? figures.sum_us / figures.busy_us : 0;
  for (const auto& [name, runs] : kernels) {
    TimelineFigures::Kernel& kernel = figures.kernels.emplace_back();
    kernel.name = name;
    kernel.runs = int(runs.size());
    kernel.sum_us = microseconds(sum_of(runs));
    kernel.mean_us = kernel.sum_us / kernel.runs;
    add_samples(kernel, runs, timeline.samples);
  }
  if (timeline.samples.empty())
    figures.no_samples = timeline.no_samples;
  else
    figures.samples = describe(timeline.samples);
  for (auto a = kernels.begin(); a != kernels.end(); ++a)
    for (auto b = std::next(a); b != kernels.end(); ++b) {
      const auto x = merged(a->second), y = merged(b->second);
      const std::uint64_t both = shared(x, y), shorter = std::min(total(x), total(y));
      figures.overlaps.push_back(
          {a->first, b->first, microseconds(both), shorter ? double(both) / double(shorter) : 0});
    }
  figures.gaps = gaps_between(busy, sorted);
  figures.critical_path = critical_path(sorted);
  return figures;
}

std::string render_timeline(const TimelineFigures& figures) {
  const bool sampled = figures.samples.has_value();
  std::string text = fmt::format(
      "## Timeline\n\n{} operations on {} streams in {:.1f} us: {:.1f} us busy, {:.1f} us idle; concurrency "
      "{:.2f}.\n\n",
      figures.operations, figures.streams, figures.span_us, figures.busy_us, figures.idle_us, figures.concurrency);
  text += fmt::format("| kernel | runs | mean us | sum us |{}\n|---|---|---|---|{}\n",
                      sampled ? " tensor % | DRAM % | neither, % of the time |" : "", sampled ? "---|---|---|" : "");
  for (const auto& kernel : figures.kernels) {
    text += fmt::format("| {} | {} | {:.1f} | {:.1f} |", kernel.name, kernel.runs, kernel.mean_us, kernel.sum_us);
    for (const std::optional<double>& percent : {kernel.tensor_pct, kernel.dram_pct, kernel.bubble_pct})
      if (sampled) text += percent ? fmt::format(" {:.1f} |", *percent) : " - |";
    text += "\n";
  }
  if (sampled)
    text += fmt::format("\nTracks of tensor pipe and DRAM in chrome_trace.json: {} samples, {:.1f} us each.\n",
                        figures.samples->count, figures.samples->interval_us);
  else if (!figures.no_samples.empty())
    text += fmt::format("\nNo tracks of tensor pipe and DRAM in chrome_trace.json: {}.\n", figures.no_samples);
  if (!figures.overlaps.empty()) text += "\n| pair | both run, us | of the shorter |\n|---|---|---|\n";
  for (const auto& [a, b, us, share] : figures.overlaps)
    text += fmt::format("| {} and {} | {:.1f} | {:.0f} % |\n", a, b, us, 100 * share);
  if (!figures.gaps.empty()) text += "\n| gap us | after | before |\n|---|---|---|\n";
  for (const auto& [us, after, before] : figures.gaps) text += fmt::format("| {:.1f} | {} | {} |\n", us, after, before);
  // A long chain is its kernels and how often each comes.
  std::vector<std::pair<std::string, int>> steps;
  double waited = 0;
  for (const auto& step : figures.critical_path) {
    waited += step.waited_us;
    if (steps.empty() || steps.back().first != step.name) steps.emplace_back(step.name, 0);
    ++steps.back().second;
  }
  text += "\nCritical path: ";
  for (std::size_t i = 0; i < std::min<std::size_t>(steps.size(), 12); ++i)
    text += (i ? ", " : "") + steps[i].first + (steps[i].second > 1 ? fmt::format(" x{}", steps[i].second) : "");
  if (steps.size() > 12) text += fmt::format(", and {} more", steps.size() - 12);
  return text + fmt::format("; {:.1f} us of it waiting.\n\n", waited);
}

}  // namespace hypermla
