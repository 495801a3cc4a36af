// Profilers that are there, that fail and that are absent; what they print, parsed; and the counters' names against
// the chip.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "hypermla/plan/configure.h"
#include "hypermla/profile/activity.h"
#include "hypermla/profile/counters.h"
#include "hypermla/profile/csv.h"
#include "hypermla/profile/metrics.h"
#include "hypermla/profile/ncu.h"
#include "hypermla/profile/perf_events.h"
#include "hypermla/profile/profilers.h"
#include "hypermla/profile/sampling.h"
#include "hypermla/roofline/device_spec.h"
#include "support.h"

namespace hypermla::profile_test {
namespace {
using testing_support::checkout;
using testing_support::contains;
using testing_support::error_of;
using testing_support::TempDir;

ProfileTools tools_of_this_machine() {
  std::vector<std::filesystem::path> roots;
  std::error_code absent;
  for (const auto& entry : std::filesystem::directory_iterator(checkout() / ".venv/lib", absent))
    roots.push_back(entry.path() / "site-packages/nvidia/cu13");
  if (const char* root = std::getenv("HYPERMLA_CUDA_ROOT")) roots.push_back(root);
  roots.push_back("/usr/local/cuda");
  return find_profile_tools(roots, "");
}

TEST(Metrics, EveryNameExistsOnTheH200) {
  std::shared_ptr<const cupti::Library> library;
  try {
    library = cupti::Library::load(tools_of_this_machine().cupti);
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  const MetricCheck check = check_metrics(*library, "GH100", metric_names());
  EXPECT_TRUE(check.unknown.empty()) << fmt::format("{}", fmt::join(check.unknown, ", "));
  EXPECT_GT(check.passes, 0);
  EXPECT_LE(check.passes, 20) << "a profile runs every stage this often";
  const MetricCheck sampled = check_metrics(*library, "GH100", sampled_metrics(), CUPTI_PROFILER_TYPE_PM_SAMPLING);
  EXPECT_TRUE(sampled.unknown.empty());
  EXPECT_EQ(sampled.passes, 1) << "a sample comes once";
  for (const std::string& name : sampled_metrics()) EXPECT_NE(find_counter(name), nullptr) << name;
  std::vector<std::string> misspelt = metric_names();
  misspelt.push_back("dram__bytes_raed.sum");
  EXPECT_EQ(check_metrics(*library, "GH100", misspelt).unknown, (std::vector<std::string>{"dram__bytes_raed.sum"}));
}

// Counters against known truth. On an H200: reads 0.01 % and writes 0.1 to 0.3 % above.
TEST(Counters, ACopyMovesItsBytes) {
  if (const auto why = cuda_unavailable()) GTEST_SKIP() << *why;
  const auto library = cupti::Library::load(tools_of_this_machine().cupti);
  const auto device = make_cuda_device();
  constexpr std::size_t kBytes = std::size_t{1} << 30;
  const Buffer from(device, kBytes), to(device, kBytes);
  const Counters counters =
      read_counters(*library, *device, {"dram__bytes_read.sum", "dram__bytes_write.sum"},
                    {{"copy", [&](StreamHandle) { device->copy(to.data(), from.data(), kBytes); }, false}});
  for (const char* name : {"dram__bytes_read.sum", "dram__bytes_write.sum"}) {
    EXPECT_NEAR(counters.ranges[0].at(name) / kBytes, 1, 0.02) << name;
    RecordProperty(name, std::to_string(counters.ranges[0].at(name)));  // for docs/profiling.md
  }
}

// A memory that is written at full speed, then left alone: the samples must rise and fall with the record.
TEST(Sampling, FollowsAFill) {
  if (const auto why = cuda_unavailable()) GTEST_SKIP() << *why;
  const auto library = cupti::Library::load(tools_of_this_machine().cupti);
  const auto device = make_cuda_device();
  const Work fills = [&](StreamHandle stream) {
    for (int i = 0; i < 20; ++i) device->flush_cache(stream);
  };
  const Timeline timeline = record_timeline(*library, *device, {{"fills", fills}}, 3);
  ASSERT_EQ(timeline.no_samples, "");
  double inside = 0, outside = 0;
  int counts[2] = {0, 0};
  for (const CounterSample& sample : timeline.samples) {
    bool within = false, touches = false;
    for (const DeviceOperation& operation : timeline.operations) {
      within = within || (operation.start <= sample.start && sample.end <= operation.end);
      touches = touches || (operation.start < sample.end && sample.start < operation.end);
    }
    if (within) inside += sample.dram_pct, ++counts[0];
    if (!touches) outside += sample.dram_pct, ++counts[1];
    EXPECT_LT(sample.tensor_pct, 1);
  }
  ASSERT_GT(counts[0], 20);
  EXPECT_GT(inside / counts[0], 40);
  ASSERT_GT(counts[1], 0);
  EXPECT_LT(outside / counts[1], 10);
}

// A CUPTI of three samples: one from before start(), an empty one, and one that counts.
struct FakeCupti {
  static inline CUptiResult denied = CUPTI_SUCCESS;
  static inline CUpti_PmSampling_DecodeStopReason stop_reason = CUPTI_PM_SAMPLING_DECODE_STOP_REASON_END_OF_RECORDS;
  static inline bool enabled = false;
  static inline std::size_t count = 3;
  static inline std::uint64_t interval = 0;

  static cupti::Library library() {
    denied = CUPTI_SUCCESS, stop_reason = CUPTI_PM_SAMPLING_DECODE_STOP_REASON_END_OF_RECORDS, enabled = false,
    count = 3;
    constexpr CUptiResult ok = CUPTI_SUCCESS;
    cupti::Library fake{};
    fake.cuptiGetResultString = [](CUptiResult, const char** text) {
      return *text = "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES", ok;
    };
    fake.cuptiProfilerInitialize = [](CUpti_Profiler_Initialize_Params*) { return ok; };
    fake.cuptiProfilerDeInitialize = [](CUpti_Profiler_DeInitialize_Params*) { return ok; };
    fake.cuptiDeviceGetChipName = [](CUpti_Device_GetChipName_Params* call) { return call->pChipName = "GH100", ok; };
    fake.cuptiProfilerHostInitialize = [](CUpti_Profiler_Host_Initialize_Params* call) {
      return call->profilerType == CUPTI_PROFILER_TYPE_PM_SAMPLING ? ok : CUPTI_ERROR_INVALID_PARAMETER;
    };
    fake.cuptiProfilerHostDeinitialize = [](CUpti_Profiler_Host_Deinitialize_Params*) { return ok; };
    fake.cuptiProfilerHostConfigAddMetrics = [](CUpti_Profiler_Host_ConfigAddMetrics_Params*) { return ok; };
    fake.cuptiProfilerHostGetConfigImageSize = [](CUpti_Profiler_Host_GetConfigImageSize_Params* call) {
      return call->configImageSize = 8, ok;
    };
    fake.cuptiProfilerHostGetConfigImage = [](CUpti_Profiler_Host_GetConfigImage_Params*) { return ok; };
    fake.cuptiProfilerHostGetNumOfPasses = [](CUpti_Profiler_Host_GetNumOfPasses_Params* call) {
      return call->numOfPasses = 1, ok;
    };
    fake.cuptiProfilerHostEvaluateToGpuValues = [](CUpti_Profiler_Host_EvaluateToGpuValues_Params* call) {
      call->pMetricValues[0] = 10. * double(call->rangeIndex);
      call->pMetricValues[1] = 20. * double(call->rangeIndex);
      return ok;
    };
    fake.cuptiPmSamplingGetCounterAvailability = [](CUpti_PmSampling_GetCounterAvailability_Params* call) {
      return call->counterAvailabilityImageSize = 8, denied;
    };
    fake.cuptiPmSamplingEnable = [](CUpti_PmSampling_Enable_Params*) { return enabled = true, ok; };
    fake.cuptiPmSamplingDisable = [](CUpti_PmSampling_Disable_Params*) { return enabled = false, ok; };
    fake.cuptiPmSamplingSetConfig = [](CUpti_PmSampling_SetConfig_Params* call) {
      return interval = call->samplingInterval, ok;
    };
    fake.cuptiPmSamplingGetCounterDataSize = [](CUpti_PmSampling_GetCounterDataSize_Params* call) {
      return call->counterDataSize = 8, ok;
    };
    fake.cuptiPmSamplingCounterDataImageInitialize = [](CUpti_PmSampling_CounterDataImage_Initialize_Params*) {
      return ok;
    };
    fake.cuptiPmSamplingStart = [](CUpti_PmSampling_Start_Params*) { return ok; };
    fake.cuptiPmSamplingStop = [](CUpti_PmSampling_Stop_Params*) { return ok; };
    fake.cuptiPmSamplingDecodeData = [](CUpti_PmSampling_DecodeData_Params* call) {
      return call->decodeStopReason = stop_reason, ok;
    };
    fake.cuptiPmSamplingGetCounterDataInfo = [](CUpti_PmSampling_GetCounterDataInfo_Params* call) {
      return call->numCompletedSamples = count, ok;
    };
    fake.cuptiPmSamplingCounterDataGetSampleInfo = [](CUpti_PmSampling_CounterData_GetSampleInfo_Params* call) {
      constexpr std::uint64_t kTimes[3][2] = {{7, 1010}, {1010, 1010}, {1010, 1020}};
      call->startTimestamp = kTimes[call->sampleIndex][0], call->endTimestamp = kTimes[call->sampleIndex][1];
      return ok;
    };
    fake.cuptiGetTimestamp = [](std::uint64_t* now) { return *now = 1000, ok; };
    return fake;
  }
};

TEST(Sampling, KeepsWhatWasSampledSinceTheStart) {
  const cupti::Library library = FakeCupti::library();
  {
    Sampler sampler(library, 0, 5000, 100);
    EXPECT_EQ(FakeCupti::interval, 5000u);
    sampler.start();
    const std::vector<CounterSample> samples = sampler.stop();
    ASSERT_EQ(samples.size(), 1u);
    EXPECT_EQ(samples[0].start, 1010u);
    EXPECT_EQ(samples[0].end, 1020u);
    EXPECT_DOUBLE_EQ(samples[0].tensor_pct, 20);
    EXPECT_DOUBLE_EQ(samples[0].dram_pct, 40);
  }
  EXPECT_FALSE(FakeCupti::enabled) << "the counters are free for the next one";
}

TEST(Sampling, SaysWhyThereAreNone) {
  const cupti::Library library = FakeCupti::library();
  FakeCupti::denied = CUPTI_ERROR_INSUFFICIENT_PRIVILEGES;
  EXPECT_TRUE(contains(error_of([&] { Sampler(library, 0, 5000, 100); }), "counters need root"));
  FakeCupti::denied = CUPTI_SUCCESS;
  FakeCupti::stop_reason = CUPTI_PM_SAMPLING_DECODE_STOP_REASON_COUNTER_DATA_FULL;
  Sampler sampler(library, 0, 5000, 100);
  sampler.start();
  EXPECT_TRUE(contains(error_of([&] { sampler.stop(); }), "more samples came than CUPTI keeps"));
  FakeCupti::stop_reason = CUPTI_PM_SAMPLING_DECODE_STOP_REASON_END_OF_RECORDS;
  FakeCupti::count = 1;
  EXPECT_TRUE(contains(error_of([&] { sampler.stop(); }), "no sample was taken")) << "but before the start";
}

TEST(Metrics, CsvFieldsSurvive) {
  for (const std::string text : {"plain", "a,b", "say \"no\"", "two\nlines", ""}) {
    const auto rows = parse_csv("first," + csv_field(text) + ",last\n");
    ASSERT_EQ(rows.size(), 1u) << text;
    EXPECT_EQ(rows[0], (std::vector<std::string>{"first", text, "last"}));
  }
  EXPECT_EQ(parse_csv("a,b\r\n1,2"), (std::vector<std::vector<std::string>>{{"a", "b"}, {"1", "2"}}));
  EXPECT_TRUE(parse_csv("").empty());
}

TEST(Metrics, TablesOfARecordedProfile) {
  const Profile profile = load_profile(checkout() / "tests/unit/recorded/flash_mla_split_kv.json");
  const auto raw = parse_csv(raw_metrics_csv(profile)), formatted = parse_csv(formatted_metrics_csv(profile));
  EXPECT_EQ(raw[0], (std::vector<std::string>{"stage", "metric", "value", "source"}));
  EXPECT_EQ(raw.size(), 1 + 2 * metric_names().size());
  ASSERT_EQ(raw.size(), formatted.size());
  const auto is_dram_read = [](const auto& row) { return row[1] == "dram__bytes_read.sum"; };
  const auto row = std::find_if(raw.begin(), raw.end(), is_dram_read);
  ASSERT_NE(row, raw.end());
  EXPECT_EQ((*row)[3], "CUPTI 13.0.1");
  const auto& shown = formatted[std::size_t(row - raw.begin())];
  EXPECT_EQ(shown[1], "DRAM read");
  EXPECT_NEAR(std::stod(shown[2]), std::stod((*row)[2]) * 1e-9, 1e-6);
  EXPECT_EQ(shown[3], "GB");
}

// Excerpts of what ncu 2025.3.1 printed on an H200.
const char* const kRaw = R"csv("ID","Process ID","Kernel Name","Device","dram__bytes_read.sum","gpu__time_duration.sum"
"","","","","byte","ns"
"0","721","void fill_kernel<float>(T1 *)","0","1","2"
"1","721","void flash_mla_split_kv<FlashMlaSplitKvProblem{0, 0}>(const ElementOf<(T1.dtype)>::type *)","0",)csv"
                         R"csv("155,773,952","86272"
"2","721","void flash_mla_split_kv_reduce<FlashMlaSplitKvProblem{0, 0}>(float *)","0","8434432","6,784"
)csv";

TEST(Ncu, RawPageByKernel) {
  const auto found = parse_ncu_raw(kRaw, {"flash_mla_split_kv", "flash_mla_split_kv_reduce"});
  ASSERT_EQ(found.size(), 2u);
  EXPECT_DOUBLE_EQ(found[0].at("dram__bytes_read.sum"), 155773952) << "thousands are separated";
  EXPECT_DOUBLE_EQ(found[1].at("gpu__time_duration.sum"), 6784);
  EXPECT_TRUE(contains(error_of([] { parse_ncu_raw(kRaw, {"flash_attention"}); }), "ncu saw 0 of the 1 kernels"));
  EXPECT_TRUE(contains(error_of([] { parse_ncu_raw("==PROF== nothing\n", {"x"}); }), "holds no launch"));
  EXPECT_TRUE(
      contains(error_of([] { parse_ncu_raw("ID,Function Name\n,\n0,x\n", {"x"}); }), "no column 'Kernel Name'"));
}

TEST(Ncu, AdviceByEstimate) {
  const std::vector<NcuAdvice> advice = parse_ncu_advice(
      R"csv("ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value","Rule Name","Rule Type",)csv"
      R"csv("Rule Description","Estimated Speedup Type","Estimated Speedup"
"0","k","GPU Speed Of Light Throughput","DRAM Frequency","hz","3.2"
"0","k","SpeedOfLight","","","","SOLBottleneck","OPT","This kernel grid is too small.","",""
"0","k","WarpStateStats","","","","CPIStall","OPT","On average, 2.9 cycles. A high number.","global","30.54"
"0","k","Occupancy","","","","TheoreticalOccupancy","OPT","The 3.00 theoretical warps.","local","63.56"
)csv");
  ASSERT_EQ(advice.size(), 3u);
  EXPECT_EQ(advice[0].rule, "TheoreticalOccupancy");
  EXPECT_DOUBLE_EQ(advice[1].gain_percent.value(), 30.54);
  EXPECT_FALSE(advice[2].gain_percent);
}

TEST(Ncu, SourceLinesAreMarked) {
  const auto files = parse_ncu_source(R"csv("File Path","/build/kernels/cutile/mla/x/x/x.cuh"
"Function Name","void hypermla::x<1>(float *)"
"Line No","Source","Address","Source","# Samples","Instructions Executed","stall_barrier","stall_long_sb",)csv"
                                      R"csv("stall_long_sb (Not Issued)"
"2","  load();","-","-","9,700","50","1","96","300"
"","","0x7f00","      LDG R1","9,700","50","1","96","300"
"3","  sync();","-","-","200","10","3","0","0"
"File Path","/usr/include/cuda_tile.h"
"Line No","Source","Address","Source","# Samples","Instructions Executed","stall_barrier","stall_long_sb",)csv"
                                      R"csv("stall_long_sb (Not Issued)"
"9","x","-","-","100","1","1","0","0"
)csv");
  ASSERT_EQ(files.size(), 2u);
  ASSERT_EQ(files[0].lines.size(), 2u);
  EXPECT_EQ(files[0].lines[0].stall, "long_sb");
  EXPECT_EQ(total_samples(files), 10000) << "of the kernel, in whichever file";
  EXPECT_EQ(annotate_source("void x() {\n  load();\n  sync();\n}\n", files[0], "x", total_samples(files)),
            "// x: 10000 samples of its warps, 9900 of them here. Columns: share of all, what they mostly wait for.\n"
            "                                           | void x() {\n"
            ">>  97.0 % waits for global memory         |   load();\n"
            "     2.0 % waits at a barrier              |   sync();\n"
            "                                           | }\n");
}

TEST(Tools, AreFoundWhereTheyAre) {
  const TempDir dir;
  dir.write("cuda/lib64/libcupti.so.13", "");
  dir.write("venv/lib/libcupti.so.13", "");
  dir.write_program("bin/ncu", "#!/bin/sh\n");
  dir.write("bin/nsys", "not executable");
  dir.write_program("cuda/bin/ncu", "#!/bin/sh\n");
  const ProfileTools tools =
      find_profile_tools({dir.path() / "venv", {}, dir.path() / "cuda"}, (dir.path() / "bin").string());
  EXPECT_EQ(tools.ncu, (dir.path() / "bin/ncu").string());
  EXPECT_EQ(tools.cupti,
            (std::vector<std::filesystem::path>{dir.path() / "venv/lib/libcupti.so.13",
                                                dir.path() / "cuda/lib64/libcupti.so.13", "libcupti.so.13"}));
  EXPECT_NE(tools.nsys, (dir.path() / "bin/nsys").string());
}

TEST(PerfEvents, CountOrSayWhyNot) {
  std::map<std::string, double> counters;
  const std::string why = error_of([&] {
    counters = count_cpu([] {
      volatile double sum = 0;
      for (int i = 0; i < 1'000'000; ++i) sum = sum + i;
    });
  });
  EXPECT_NE(counters.empty(), why.empty());
  EXPECT_TRUE(why.empty() || contains(why, "perf_event_open")) << why;
  for (const auto& [name, value] : counters) EXPECT_NE(find_counter(name), nullptr) << name;
  const auto instructions = counters.find("cpu_instructions");
  EXPECT_TRUE(instructions == counters.end() || instructions->second > 3e6);
}

// A plan of two stages on a device that says it is a GPU, where nothing that CUDA has is there.
class OnAGpu : public testing::Test {
 protected:
  struct Gpu : testing_support::FakeDevice {
    bool is_gpu() const override { return true; }
  };

  OnAGpu() : compiler(config()), entry(Registry::instance().find("cutile.mla.flash_mla_split_kv")), plan(entry.make()) {
    device.on_launch = [&](const std::filesystem::path&, Grid, void**) { device.now += 1e-3; };
    spec.name = "Fake 1";
    spec.bfloat16_tflops = 1;
    spec.peak_gbps = 100;
    set_problem(*plan, {{"b", 2}, {"s", 3}, {"t", 100}, {"h", 4}});
    executable = plan_empty(*plan);
    executable->prepare(compiler, device);
    tools.cupti = {dir.path() / "no-cupti.so"};
    tools.rules = checkout() / "conf/profile_rules.json";
    tools.program = "/bin/true";
  }
  CompilerConfig config() {
    CompilerConfig config;
    config.kernel_root = checkout() / "kernels";
    config.include_root = checkout() / "include";
    config.cache = dir.path() / "cache";
    config.toolchain.cxx = testing_support::write_fake_compiler(dir, "nothing is refused");
    return config;
  }
  ProfileResult run(ProfileMode mode) {
    std::filesystem::remove_all(dir.path() / "out");  // of the run before
    return profile({.kernel = entry,
                    .plan = *plan,
                    .executable = *executable,
                    .device = device,
                    .spec = spec,
                    .tuning = tuning,
                    .out_dir = dir.path() / "out",
                    .bench_runs = 1,
                    .sustained_seconds = 0,
                    .tools = tools},
                   mode);
  }
  bool has(const char* file) const { return std::filesystem::exists(dir.path() / "out" / file); }

  TempDir dir;
  Gpu device;
  Compiler compiler;
  KernelEntry entry;
  std::unique_ptr<KernelPlan> plan;
  std::unique_ptr<Executable> executable;
  DeviceSpec spec;
  AutotuneResult tuning;
  ProfileTools tools;
};

TEST_F(OnAGpu, AnnotationWithoutProfilersSaysSoAndKeepsTheTimes) {
  const ProfileResult result = run(ProfileMode::annotation);
  EXPECT_NE(result.profile.missing, "");
  EXPECT_NEAR(result.profile.timing.cold.median_us, 2000, 1e-3);
  const std::string report = read_file(result.directory / "report.md");
  EXPECT_TRUE(contains(report, "**Not measured: no hardware counters"));
  EXPECT_TRUE(contains(report, "ncu) was not found"));
  EXPECT_TRUE(has("nsight_raw_metrics.csv"));
  EXPECT_TRUE(has("params.json"));
  EXPECT_TRUE(result.profile.stages[0].metrics.empty());
  EXPECT_NE(result.profile.stages[0].bottleneck->confidence, "high") << "by time and cost alone";
}

// A group is a stage more: its members alone, and all at once.
TEST_F(OnAGpu, EventTimesGroupsAsAWhole) {
  const std::unique_ptr<KernelPlan> other = Registry::instance().find("cutile.mla.flash_attention").make();
  set_problem(*other, {{"b", 1}, {"s", 3}, {"t", 100}, {"h", 4}});
  std::vector<std::unique_ptr<Executable>> members, all;
  members.push_back(plan_empty(*other));
  members.push_back(plan_empty(*plan));
  all.push_back(std::make_unique<ConcurrentKernels>("paths", std::move(members), nullptr, std::vector{1, 3}));
  executable = std::make_unique<KernelPipeline>("all", std::move(all));
  executable->prepare(compiler, device);
  const ProfileResult result = run(ProfileMode::event);
  const std::vector<ProfileStage>& stages = result.profile.stages;
  ASSERT_EQ(stages.size(), 4u);
  const ProfileStage& group = stages[3];
  EXPECT_EQ(group.name, "paths");
  EXPECT_EQ(group.members,
            (std::vector<std::string>{"flash_attention", "flash_mla_split_kv", "flash_mla_split_kv_reduce"}));
  EXPECT_NEAR(group.burst.value().median_us, 3000, 1e-3);
  EXPECT_NEAR(stages[0].burst.value().median_us, 1000, 1e-3);
  EXPECT_EQ(stages[1].group, "paths");
  EXPECT_EQ(stages[1].processors, 3);
  const std::string report = read_file(result.directory / "report.md");
  EXPECT_TRUE(contains(report,
                       "they run at once, on 1 and 3 SMs of their own. Together 3000.0 us; each alone on the whole "
                       "device, in sum 3000.0 us."))
      << report;
}

// ncu as a script: it tells its version, "writes" the report and prints pages that were recorded.
TEST_F(OnAGpu, AnnotationFallsBackToNcu) {
  dir.write("raw.csv", kRaw);
  tools.ncu = dir.write_program("ncu", R"sh(#!/bin/sh
case "$*" in
  *--version*) echo "Version 2025.3.1.0 (build 1)" ;;
  *--import*) cat ")sh" + (dir.path() / "raw.csv").string() +
                                           R"sh(" ;;
  *) echo "$*" > ")sh" + (dir.path() / "asked").string() +
                                           R"sh("
     while [ "$1" != -o ]; do shift; done; touch "$2.ncu-rep" ;;
esac
)sh")
                  .string();
  const ProfileResult result = run(ProfileMode::annotation);
  EXPECT_EQ(result.profile.missing, "");
  const std::vector<ProfileStage>& stages = result.profile.stages;
  EXPECT_EQ(stages[0].metrics_source, "ncu 2025.3.1.0");
  EXPECT_DOUBLE_EQ(stages[0].metrics.at("dram__bytes_read.sum"), 155773952);
  EXPECT_DOUBLE_EQ(stages[1].metrics.at("gpu__time_duration.sum"), 6784);
  const std::string asked = read_file(dir.path() / "asked");
  EXPECT_TRUE(contains(asked, "--clock-control none")) << "clocks are never changed";
  EXPECT_TRUE(contains(asked, "--profile-from-start off"));
  for (const std::string& name : metric_names()) EXPECT_TRUE(contains(asked, name)) << name;
  EXPECT_TRUE(contains(read_file(result.directory / "nsight_raw_metrics.csv"),
                       "flash_mla_split_kv,dram__bytes_read.sum,155773952,ncu 2025.3.1.0"));
}

// What the mode ncu leaves, by an ncu that answers each page in a line or two.
TEST_F(OnAGpu, NcuLeavesItsReports) {
  dir.write("raw.csv", kRaw);
  const std::string columns = "Line No,Source,# Samples,stall_wait\n";
  dir.write("source.csv", "File Path,/b/kernels/a.cuh\n" + columns + "1,x,99,9\nFile Path,/b/kernels/b.cuh\n" +
                              columns + "7,y,1,1\nFile Path,/b/kernels/c.cuh\n" + columns + "2,z,0,0\n");
  for (const char* name : {"kernels/a.cuh", "kernels/b.cuh", "kernels/c.cuh"}) dir.write(name, "x\n");
  tools.kernel_roots = {dir.path() / "kernels"};
  tools.ncu = dir.write_program("ncu", R"sh(#!/bin/sh
case "$*" in
  *--version*) echo "Version 2025.3.1.0 (build 1)" ;;
  *"--page raw"*) cat ")sh" + (dir.path() / "raw.csv").string() +
                                           R"sh(" ;;
  *--print-details*) echo "every section" ;;
  *"--page details"*--kernel-name*)
     echo '"ID","Kernel Name","Section Name","Rule Name","Rule Type","Rule Description","Estimated Speedup"'
     echo '"0","k","Occupancy","TheoreticalOccupancy","OPT","Few warps. More","63.56"' ;;
  *"--print-source sass"*) echo "counters per instruction" ;;
  *"--page source"*) cat ")sh" + (dir.path() / "source.csv").string() +
                                           R"sh(" ;;
  *) while [ "$1" != -o ]; do shift; done; echo recorded > "$2.ncu-rep" ;;
esac
)sh")
                  .string();
  const ProfileResult result = run(ProfileMode::ncu);
  EXPECT_EQ(result.profile.missing, "");
  EXPECT_EQ(read_file(result.directory / "report.ncu-rep"), "recorded\n");
  EXPECT_TRUE(contains(read_file(result.directory / "report-verbose.md"), "every section"));
  const std::string report = read_file(result.directory / "report.md");
  EXPECT_TRUE(contains(report, "Few warps. (TheoreticalOccupancy, est. 64 %)"));
  EXPECT_TRUE(contains(report, "| 1 | 99 % | fixed latency |") && contains(report, "| 7 | 1 % |")) << report;
  for (const char* kernel : {"flash_mla_split_kv", "flash_mla_split_kv_reduce"}) {
    const auto below = result.directory / kernel;
    EXPECT_TRUE(contains(read_file(below / "ncu-details.csv"), "TheoreticalOccupancy")) << kernel;
    EXPECT_EQ(read_file(below / "sass-metrics.csv"), "counters per instruction\n") << kernel;
    EXPECT_TRUE(has(fmt::format("annotated-src/{}/a.cuh", kernel).c_str()));
    EXPECT_FALSE(has(fmt::format("annotated-src/{}/c.cuh", kernel).c_str())) << "no sample is of it";
  }
}

TEST_F(OnAGpu, ADeniedNcuIsQuoted) {
  tools.ncu = dir.write_program("ncu", R"(#!/bin/sh
[ "$1" = --version ] && { echo "Version 2025.3.1.0"; exit 0; }
echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"
exit 1
)")
                  .string();
  for (ProfileMode mode : {ProfileMode::annotation, ProfileMode::ncu}) {
    const ProfileResult result = run(mode);
    EXPECT_NE(result.profile.missing, "");
    EXPECT_TRUE(contains(read_file(result.directory / "report.md"), "ERR_NVGPUCTRPERM")) << profile_mode_name(mode);
  }
}

TEST_F(OnAGpu, AnErrorOfNcuWithoutAWordIsQuoted) {
  tools.ncu = dir.write_program("ncu",
                                "#!/bin/sh\n[ \"$1\" = --version ] && { echo Version 2; exit 0; }\n"
                                "echo ==ERROR==\nexit 1\n")
                  .string();
  EXPECT_TRUE(contains(read_file(run(ProfileMode::ncu).directory / "report.md"), "ncu: ==ERROR=="));
}

TEST_F(OnAGpu, NsysWithoutAnyEngineKeepsTheTimes) {
  const ProfileResult result = run(ProfileMode::nsys);
  EXPECT_NE(result.profile.missing, "");
  EXPECT_TRUE(contains(read_file(result.directory / "report.md"), "Nsight Systems (nsys) was not found"));
  EXPECT_FALSE(has("chrome_trace.json"));
}

// nsys as a script that leaves the files of `nsys stats`.
TEST_F(OnAGpu, RealNsysIsPreferred) {
  tools.nsys = dir.write_program("nsys", R"(#!/bin/sh
mode=$1
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
if [ "$mode" = profile ]; then touch "$out.nsys-rep"; exit; fi
printf 'Start (ns),Duration (ns),CorrId,GrdX,Bytes (MB),Strm,Name\n' > "${out}_cuda_gpu_trace.csv"
printf '10,100,1,132,,7,flash_mla_split_kv\n120,20,2,64,,7,reduce\n' >> "${out}_cuda_gpu_trace.csv"
printf 'Start (ns),Duration (ns),Name,Result,CorrID,Pid,Tid\n' > "${out}_cuda_api_trace.csv"
printf '1,5,cuLaunchKernelEx,0,1,2,3\n' >> "${out}_cuda_api_trace.csv"
printf 'Time (%%)\n' > "${out}_cuda_api_sum.csv"
)")
                   .string();
  const ProfileResult result = run(ProfileMode::nsys);
  EXPECT_EQ(result.profile.missing, "");
  EXPECT_EQ(result.profile.counters.value().source, "nsys");
  EXPECT_EQ(result.profile.timeline.value().operations, 2);
  EXPECT_TRUE(contains(read_file(result.directory / "report.md"), "No tracks of tensor pipe and DRAM"));
  EXPECT_TRUE(has("report.nsys-rep"));
  EXPECT_TRUE(has("chrome_trace.json"));
}

TEST_F(OnAGpu, LockedClocksAreNoted) {
  EXPECT_TRUE(contains(read_file(run(ProfileMode::event).directory / "report.md"), "Clocks not locked"));
  tools.clock_lock = dir.write("locked-clocks.json", R"({"sm_MHz": 2407, "memory_MHz": 14001})");
  EXPECT_TRUE(contains(read_file(run(ProfileMode::event).directory / "report.md"),
                       "Clocks locked at 2407 MHz (SM) and 14001 MHz (memory)."));
}

// What ncu and nsys start: the same problem and tilings, spelled out or as the tuner remembers them.
TEST_F(OnAGpu, TheSecondRunIsOfTheSameKernel) {
  tools.program = "/opt/hypermla";
  tools.ncu =
      dir.write_program("ncu", "#!/bin/sh\n[ \"$1\" = --version ] && { echo Version 1.0; exit; }\necho \"$*\" > " +
                                   (dir.path() / "asked").string() + "\nexit 1\n")
          .string();
  run(ProfileMode::ncu);
  const std::string asked = read_file(dir.path() / "asked");
  EXPECT_TRUE(contains(asked, "-- /opt/hypermla kernel cutile.mla.flash_mla_split_kv v0 --b=2 --s=3 --t=100 --h=4 "))
      << asked;
  EXPECT_TRUE(contains(asked, "--splits=")) << "the plan's own tiling: " << asked;
  EXPECT_TRUE(contains(asked, " --no_autotune --device=auto --prof_type=disabled\n")) << asked;

  tuning.stages.push_back(
      {"flash_mla_split_kv", executable->kernels()[0]->tiling(), dir.write("autotuning.json", "[]"), 3});
  run(ProfileMode::ncu);
  const std::string tuned = read_file(dir.path() / "asked");
  EXPECT_FALSE(contains(tuned, "--splits=")) << tuned;
  EXPECT_TRUE(contains(tuned, " --tune_max_iters=1 --device=auto --prof_type=disabled\n")) << tuned;
  EXPECT_TRUE(has("tiling/flash_mla_split_kv/autotuning.json"));

  tools.program.clear();
  EXPECT_TRUE(contains(run(ProfileMode::ncu).profile.counters.value().attempts[0], "hypermla, which was not found"));
}

TEST_F(OnAGpu, NothingIsMeasuredWhenDisabled) {
  EXPECT_TRUE(contains(error_of([&] { run(ProfileMode::disabled); }), "nothing is profiled"));
}

}  // namespace
}  // namespace hypermla::profile_test
