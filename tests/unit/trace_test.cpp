// The timeline: from records to files and figures.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "hypermla/profile/csv.h"
#include "hypermla/profile/timeline.h"
#include "support.h"

namespace hypermla::trace_test {
namespace {
using testing_support::contains;
using testing_support::error_of;

DeviceOperation kernel(const std::string& name, std::uint64_t start, std::uint64_t end, std::uint32_t stream,
                       std::uint32_t correlation) {
  DeviceOperation operation;
  operation.name = name;
  operation.start = start;
  operation.end = end;
  operation.stream = stream;
  operation.correlation = correlation;
  operation.grid[0] = 132;
  operation.grid[1] = operation.grid[2] = 1;
  operation.block[0] = 384;
  operation.block[1] = operation.block[2] = 1;
  operation.registers = 168;
  operation.static_shared = 222000;
  return operation;
}

// Two streams: `latent` and `tokens` overlap for 20 of 60 us; after a gap of 30 us `combine` ends everything.
Timeline example() {
  Timeline timeline;
  timeline.operations = {kernel("latent", 1'010'000, 1'110'000, 7, 1), kernel("tokens", 1'090'000, 1'150'000, 8, 2),
                         kernel("combine", 1'180'000, 1'200'000, 7, 3)};
  DeviceOperation fill = kernel("[CUDA memset]", 1'000'000, 1'010'000, 7, 4);
  fill.kind = DeviceOperation::Kind::fill;
  fill.bytes = 2'000'000;
  timeline.operations.push_back(fill);
  timeline.calls = {{"cuLaunchKernelEx", 990'000, 994'000, 43, 1},
                    {"cuLaunchKernelEx", 996'000, 998'000, 43, 2},
                    {"cuLaunchKernelEx", 998'500, 999'500, 43, 3},
                    {"cuCtxSynchronize", 999'600, 1'199'600, 43, 9}};
  timeline.ranges = {{"mla", 989'000, 999'550, 42, 43, {1, 2, 3}}};
  // Of 20 us; `latent` uses the tensor pipe in its second half only, and one lies across its end; `combine` works out
  // of the L2.
  auto sample = [&](std::uint64_t start, double tensor, double dram) {
    timeline.samples.push_back({start, start + 20'000, tensor, dram});
  };
  sample(990'000, 0, 0.04);
  sample(1'010'000, 2, 4);
  sample(1'030'000, 4, 9);
  sample(1'050'000, 60, 20);
  sample(1'070'000, 62, 27);
  sample(1'095'000, 99, 99);
  sample(1'180'000, 0, 3);
  return timeline;
}

TEST(Timeline, Figures) {
  const TimelineFigures figures = analyse(example());
  EXPECT_EQ(figures.operations, 4);
  EXPECT_EQ(figures.streams, 2);
  EXPECT_DOUBLE_EQ(figures.span_us, 200);
  EXPECT_DOUBLE_EQ(figures.busy_us, 170);
  EXPECT_DOUBLE_EQ(figures.idle_us, 30);
  EXPECT_DOUBLE_EQ(figures.sum_us, 190);
  EXPECT_NEAR(figures.concurrency, 190.0 / 170, 1e-12);
  ASSERT_EQ(figures.overlaps.size(), 3u);
  for (const auto& [a, b, us, share] : figures.overlaps) {
    const bool both = a == "latent" && b == "tokens";
    EXPECT_DOUBLE_EQ(us, both ? 20 : 0) << a << b;
    EXPECT_NEAR(share, both ? 20.0 / 60 : 0, 1e-12) << a << b;
  }
  ASSERT_EQ(figures.gaps.size(), 1u);
  EXPECT_DOUBLE_EQ(figures.gaps[0].us, 30);
  EXPECT_EQ(figures.gaps[0].after, "tokens");
  EXPECT_EQ(figures.gaps[0].before, "combine");
  std::vector<std::string> path;
  for (const TimelineFigures::Step& step : figures.critical_path) path.push_back(step.name);
  EXPECT_EQ(path.back(), "combine");
  EXPECT_EQ(path[path.size() - 2], "tokens") << "the one that ended last before combine began";
  EXPECT_DOUBLE_EQ(figures.critical_path.back().waited_us, 30);
  EXPECT_TRUE(contains(render_timeline(figures), "| latent and tokens | 20.0 | 33 % |"));
  EXPECT_TRUE(contains(error_of([] { analyse({}); }), "nothing ran"));
}

TEST(Timeline, GpuTraceHasTheColumnsOfNsysAndReadsBack) {
  const Timeline timeline = example();
  const std::string csv = cuda_gpu_trace_csv(timeline);
  EXPECT_EQ(csv.substr(0, csv.find('\n')),
            "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),Bytes "
            "(MB),Throughput "
            "(MB/s),SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name");
  const std::size_t columns = parse_csv(csv)[0].size();
  for (const auto& row : parse_csv(csv)) EXPECT_EQ(row.size(), columns);
  const auto read = parse_cuda_gpu_trace(csv);
  ASSERT_EQ(read.size(), 4u);
  EXPECT_EQ(read[0].name, "[CUDA memset]") << "by start";
  EXPECT_EQ(read[0].kind, DeviceOperation::Kind::fill);
  EXPECT_EQ(read[0].bytes, 2'000'000u);
  EXPECT_EQ(read[1].name, "latent");
  EXPECT_EQ(read[1].start, 1'010'000u);
  EXPECT_EQ(read[1].end, 1'110'000u);
  EXPECT_EQ(read[1].stream, 7u);
  EXPECT_EQ(read[1].grid[0], 132);
  EXPECT_EQ(read[1].block[0], 384);
  EXPECT_EQ(read[1].static_shared, 222000);
  Timeline again;
  again.operations = read;
  EXPECT_EQ(render_timeline(analyse(again)), render_timeline(analyse({timeline.operations, {}, {}, {}, {}})));
  EXPECT_TRUE(contains(error_of([] { parse_cuda_gpu_trace("a,b\n1,2\n"); }), "no column 'Start (ns)'"));
}

// nsys writes names in full, and operations too short for its clock; two of these at one time used to hang analyse().
TEST(Timeline, GpuTraceOfNsys) {
  const std::string columns = "Start (ns),Duration (ns),CorrId,GrdX,Bytes (MB),Strm,Name\n",
                    fill = "2000,0,2,,0.0,7,[CUDA memset]\n";
  const auto read = parse_cuda_gpu_trace(
      columns + "1000,500,1,132,,7,\"void hypermla::cute::flash_mla<(hypermla::X)1, int>(const bf16 *, int)\"\n" +
      fill + fill + "3000,9,3,,0.1,7,[CUDA memcpy Device-to-Device]\n");
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(read[0].name, "flash_mla");
  EXPECT_EQ(read[1].name, "[CUDA memcpy Device-to-Device]");
  for (const char* name : {"flash_mla", "hypermla::flash_mla", "void flash_mla<1>(int)", "flash_mla(a::b *)"})
    EXPECT_EQ(stage_name(name), "flash_mla") << name;
  for (const char* row : {"x,5,1,1,,7,k\n", "5,,1,1,,7,k\n", "5\n"})
    EXPECT_TRUE(contains(error_of([&] { parse_cuda_gpu_trace(columns + row); }), "in row 1 of a report of nsys"))
        << row;
  EXPECT_TRUE(contains(error_of([] { parse_cuda_api_trace("Start (ns),Duration (ns),Name,CorrID\n1,-,x,1\n"); }),
                       "'Duration (ns)' is '-'"));
}

TEST(Timeline, ApiSumIsSortedByTime) {
  const auto rows = parse_csv(cuda_api_sum_csv(example()));
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[1], (std::vector<std::string>{"96.6", "200000", "1", "200000.0", "200000.0", "200000", "200000", "0.0",
                                               "cuCtxSynchronize"}));
  EXPECT_EQ(rows[2], (std::vector<std::string>{"3.4", "7000", "3", "2333.3", "2000.0", "1000", "4000", "1527.5",
                                               "cuLaunchKernelEx"}));
}

TEST(Timeline, ProjectionSpansWhatARangeLaunched) {
  const auto rows = parse_csv(nvtx_gpu_proj_trace_csv(example()));
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].size(), rows[1].size());
  EXPECT_EQ(rows[1][0], "mla");
  EXPECT_EQ(rows[1][1], "1010000");
  EXPECT_EQ(rows[1][2], "190000");
  EXPECT_EQ(rows[1][8], "3");
}

TEST(Timeline, ChromeTraceHasARowPerStreamAndAnArrowPerLaunch) {
  const Json trace = Json::parse(chrome_trace_json(example()));
  int arrows = 0, rows = 0;
  for (const Json& event : trace["traceEvents"]) {
    if (event["ph"] == "s") {
      ++arrows;
      for (const Json& end : trace["traceEvents"])
        if (end["ph"] == "f" && end["id"] == event["id"]) {
          EXPECT_LE(event["ts"].get<double>(), end["ts"].get<double>());
        }
    }
    if (event["ph"] == "M" && event["name"] == "thread_name" && event["pid"] == 1) ++rows;
    if (event["ph"] == "X") {
      EXPECT_GE(event["ts"].get<double>(), 0) << "relative to the first event";
    }
    if (event["ph"] == "X" && event["name"] == "tokens") {
      EXPECT_DOUBLE_EQ(event["ts"], 101);
      EXPECT_DOUBLE_EQ(event["dur"], 60);
      EXPECT_EQ(event["tid"], 8);
    }
  }
  EXPECT_EQ(arrows, 3);
  EXPECT_EQ(rows, 2);
}

TEST(Timeline, SamplesBelongToTheKernelThatTheyLieIn) {
  const TimelineFigures figures = analyse(example());
  ASSERT_TRUE(figures.samples);
  EXPECT_EQ(figures.samples->count, 7);
  EXPECT_DOUBLE_EQ(figures.samples->interval_us, 20);
  EXPECT_EQ(figures.no_samples, "");
  for (const TimelineFigures::Kernel& kernel : figures.kernels) {
    EXPECT_EQ(kernel.bubble_pct.has_value(), kernel.name != "combine") << "caches are no bubbles";
    if (kernel.name != "latent") continue;
    EXPECT_DOUBLE_EQ(*kernel.tensor_pct, 32) << "without the sample across its end";
    EXPECT_DOUBLE_EQ(*kernel.dram_pct, 15);
    EXPECT_DOUBLE_EQ(*kernel.bubble_pct, 50);
  }
  const std::string report = render_timeline(figures);
  EXPECT_TRUE(contains(report, "| latent | 1 | 100.0 | 100.0 | 32.0 | 15.0 | 50.0 |")) << report;
  EXPECT_TRUE(contains(report, "| tokens | 1 | 60.0 | 60.0 | 99.0 | 99.0 | 0.0 |")) << "where two run, both" << report;
  EXPECT_TRUE(contains(report, "| combine | 1 | 20.0 | 20.0 | 0.0 | 3.0 | - |")) << report;
  EXPECT_TRUE(contains(report, "Tracks of tensor pipe and DRAM in chrome_trace.json: 7 samples, 20.0 us each."));

  Timeline refused = example();
  refused.samples.clear();
  refused.no_samples = "PM sampling: not permitted";
  const std::string without = render_timeline(analyse(refused));
  EXPECT_TRUE(contains(without, "No tracks of tensor pipe and DRAM in chrome_trace.json: PM sampling: not permitted."));
  EXPECT_TRUE(contains(without, "| latent | 1 | 100.0 | 100.0 |\n")) << without;
  const Json trace = Json::parse(chrome_trace_json(refused));
  for (const Json& event : trace["traceEvents"]) EXPECT_NE(event["ph"], "C");
}

TEST(Timeline, CountersAreTracksBesideTheStreams) {
  const Json trace = Json::parse(chrome_trace_json(example()));
  std::map<std::string, std::vector<double>> times, values;
  for (const Json& event : trace["traceEvents"]) {
    if (event["ph"] != "C") continue;
    EXPECT_EQ(event["pid"], 1) << "the process of the streams";
    times[event["name"]].push_back(event["ts"]);
    values[event["name"]].push_back(event["args"]["%"]);
  }
  ASSERT_EQ(times.size(), 2u);
  EXPECT_EQ(times["DRAM"], (std::vector<double>{1, 21, 41, 61, 81, 106, 191})) << "since the range began at 989 us";
  EXPECT_EQ(times["tensor pipe"], times["DRAM"]);
  EXPECT_EQ(values["tensor pipe"], (std::vector<double>{0, 2, 4, 60, 62, 99, 0}));
  EXPECT_EQ(values["DRAM"], (std::vector<double>{0, 4, 9, 20, 27, 99, 3}));
}

// What Perfetto's importer asks of each phase: it drops events without these fields and takes process and thread 0 for
// the idle ones.
void expect_opens(const Json& trace) {
  ASSERT_TRUE(trace["traceEvents"].is_array());
  ASSERT_FALSE(trace["traceEvents"].empty());
  std::map<std::int64_t, std::int64_t> named;  // rows to their processes
  std::map<int, Json> arrows;
  std::map<std::string, double> last;
  std::vector<Json> slices;
  for (const Json& event : trace["traceEvents"]) {
    const std::string phase = event.at("ph");
    ASSERT_TRUE(event.at("name").is_string() && event.at("pid").is_number_integer()) << event;
    ASSERT_GT(event["pid"], 0) << event;
    if (phase == "M") {
      ASSERT_TRUE(event["args"]["name"].is_string()) << event;
      if (event["name"] == "thread_name") {
        ASSERT_GT(event.at("tid"), 0) << event;
        EXPECT_TRUE(named.emplace(event["tid"], event["pid"]).second) << "a second row of that number: " << event;
      }
      continue;
    }
    ASSERT_TRUE(event.at("ts").is_number() && event["ts"] >= 0) << event;
    if (phase == "C") {
      ASSERT_EQ(event.at("args").size(), 1u) << event;
      ASSERT_TRUE(event["args"].begin()->is_number()) << event;
      double& before = last.try_emplace(event["name"], -1).first->second;
      EXPECT_GT(event["ts"].get<double>(), before) << event;
      before = event["ts"];
      continue;
    }
    ASSERT_TRUE(event.at("tid").is_number_integer()) << event;
    if (phase == "X") {
      ASSERT_TRUE(event.at("dur").is_number() && event["dur"] >= 0) << event;
      ASSERT_EQ(named.count(event["tid"]), 1u) << "a row without a name: " << event;
      EXPECT_EQ(named[event["tid"]], event["pid"]) << event;
      slices.push_back(event);
    } else if (phase == "s") {
      arrows[event.at("id")] = event;
    } else {
      ASSERT_EQ(phase, "f") << event;
      ASSERT_EQ(arrows.count(event.at("id")), 1u) << "an arrow that ends without having begun: " << event;
      EXPECT_LE(arrows[event["id"]]["ts"], event["ts"]);
      EXPECT_EQ(event["bp"], "e") << "else it binds to the slice that comes next";
      const auto lands_in = [&](const Json& slice) {
        return slice["tid"] == event["tid"] && slice["pid"] == event["pid"] && slice["ts"] <= event["ts"] &&
               event["ts"].get<double>() <= slice["ts"].get<double>() + slice["dur"].get<double>();
      };
      EXPECT_TRUE(std::any_of(slices.begin(), slices.end(), lands_in)) << event;
    }
  }
}

TEST(Timeline, ChromeTraceOpens) { expect_opens(Json::parse(chrome_trace_json(example()))); }

// An H200's own, of flash_mla_split_kv at b=32, s=1, t=4096: the first three of ten runs.
TEST(Timeline, RecordedChromeTraceOpensAndItsTracksFollowItsKernels) {
  const Json trace = Json::parse(read_file(testing_support::checkout() / "tests/unit/recorded/chrome_trace.json"));
  expect_opens(trace);
  Timeline timeline;
  std::map<double, CounterSample> samples;
  auto nanoseconds = [](const Json& microseconds) {
    return std::uint64_t(std::llround(1e3 * microseconds.get<double>()));
  };
  for (const Json& event : trace["traceEvents"]) {
    if (event["ph"] == "C") {
      CounterSample& sample = samples[event["ts"]];
      sample.start = nanoseconds(event["ts"]);
      (event["name"] == "DRAM" ? sample.dram_pct : sample.tensor_pct) = event["args"]["%"];
    } else if (event["ph"] == "X" && event["pid"] == 1) {
      const std::uint64_t start = nanoseconds(event["ts"]);
      timeline.operations.push_back(
          kernel(event["name"], start, start + nanoseconds(event["dur"]), event["tid"], event["args"]["correlation"]));
    }
  }
  for (const auto& [time, sample] : samples) {
    if (!timeline.samples.empty()) timeline.samples.back().end = sample.start;
    timeline.samples.push_back(sample);
  }
  timeline.samples.pop_back();
  // Had samples and records been of different clocks, the busy samples would lie beside the kernels.
  const TimelineFigures figures = analyse(timeline);
  for (const TimelineFigures::Kernel& one : figures.kernels) {
    if (one.name != "flash_mla_split_kv") continue;
    EXPECT_GT(one.tensor_pct.value(), 10);
    EXPECT_LT(one.bubble_pct.value(), 30);
  }
  const auto resting = [&](const CounterSample& sample) {
    return std::none_of(timeline.operations.begin(), timeline.operations.end(), [&](const DeviceOperation& operation) {
      return sample.start < operation.end && operation.start < sample.end;
    });
  };
  int rests = 0;
  for (const CounterSample& sample : timeline.samples) {
    if (!resting(sample)) continue;
    ++rests;
    EXPECT_LT(sample.tensor_pct, 1) << sample.start;
  }
  EXPECT_GT(rests, 0);
}

TEST(Timeline, ApiTraceOfNsys) {
  const auto calls = parse_cuda_api_trace(
      "Start (ns),Duration (ns),Name,Result,CorrID,Pid,Tid,T-Pri,Thread Name\n"
      "100,25,cuLaunchKernelEx,0,5,42,43,20,main\n");
  ASSERT_EQ(calls.size(), 1u);
  EXPECT_EQ(calls[0].end, 125u);
  EXPECT_EQ(calls[0].correlation, 5u);
  EXPECT_EQ(calls[0].thread, 43u);
}

}  // namespace
}  // namespace hypermla::trace_test
