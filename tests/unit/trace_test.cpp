// The timeline: from records to files and figures.
#include <gtest/gtest.h>

#include "hypermla/profile/metrics.h"
#include "hypermla/profile/timeline.h"
#include "support.h"

namespace hypermla {
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
  timeline.calls = {{"cuLaunchKernelEx", 990'000, 994'000, 42, 43, 1},
                    {"cuLaunchKernelEx", 996'000, 998'000, 42, 43, 2},
                    {"cuLaunchKernelEx", 998'500, 999'500, 42, 43, 3},
                    {"cuCtxSynchronize", 999'600, 1'199'600, 42, 43, 9}};
  timeline.ranges = {{"mla", 989'000, 999'550, 42, 43, {1, 2, 3}}};
  return timeline;
}

TEST(Timeline, Figures) {
  const Json figures = analyse(example());
  EXPECT_EQ(figures["operations"], 4);
  EXPECT_EQ(figures["streams"], 2);
  EXPECT_DOUBLE_EQ(figures["span_us"], 200);
  EXPECT_DOUBLE_EQ(figures["busy_us"], 170);
  EXPECT_DOUBLE_EQ(figures["idle_us"], 30);
  EXPECT_DOUBLE_EQ(figures["sum_us"], 190);
  EXPECT_NEAR(figures["concurrency"].get<double>(), 190.0 / 170, 1e-12);
  ASSERT_EQ(figures["overlaps"].size(), 3u);
  for (const Json& pair : figures["overlaps"]) {
    const bool both = pair["a"] == "latent" && pair["b"] == "tokens";
    EXPECT_DOUBLE_EQ(pair["us"], both ? 20 : 0) << pair;
    EXPECT_NEAR(pair["share"].get<double>(), both ? 20.0 / 60 : 0, 1e-12) << pair;
  }
  ASSERT_EQ(figures["gaps"].size(), 1u);
  EXPECT_DOUBLE_EQ(figures["gaps"][0]["us"], 30);
  EXPECT_EQ(figures["gaps"][0]["after"], "tokens");
  EXPECT_EQ(figures["gaps"][0]["before"], "combine");
  std::vector<std::string> path;
  for (const Json& step : figures["critical_path"]) path.push_back(step["name"]);
  EXPECT_EQ(path.back(), "combine");
  EXPECT_EQ(path[path.size() - 2], "tokens") << "the one that ended last before combine began";
  EXPECT_DOUBLE_EQ(figures["critical_path"].back()["waited_us"], 30);
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
  EXPECT_EQ(analyse({read, {}, {}})["overlaps"], analyse(timeline)["overlaps"]);
  EXPECT_TRUE(contains(error_of([] { parse_cuda_gpu_trace("a,b\n1,2\n"); }), "no column 'Start (ns)'"));
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
    if (event["ph"] == "M" && event["name"] == "thread_name" && event["pid"] == 0) ++rows;
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
}  // namespace hypermla
