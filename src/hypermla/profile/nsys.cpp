#include <algorithm>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/base/process.h"
#include "hypermla/profile/activity.h"
#include "hypermla/profile/frame.h"

namespace hypermla {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::minutes kTracePatience{2};

// Nsight Systems over a second run of this program: report.nsys-rep and its statistics. Throws Error with its own
// words.
Timeline by_nsys(const ProfileRequest& request, const fs::path& directory) {
  const ProfileTools& tools = request.tools;
  if (tools.nsys.empty()) fail("Nsight Systems (nsys) was not found");
  const std::string report = (directory / "report").string(), stats = (directory / "stats/report").string();
  std::vector<std::string> collect = {tools.nsys,
                                      "profile",
                                      "-t",
                                      "cuda,nvtx",
                                      "--sample=none",
                                      "--cpuctxsw=none",
                                      "--capture-range=cudaProfilerApi",
                                      "--capture-range-end=stop",
                                      "-f",
                                      "true",
                                      "-o",
                                      report};
  const std::vector<std::string> again = relaunch_command(request);
  collect.insert(collect.end(), again.begin(), again.end());
  const ProcessResult collected = run_process(collect, {.timeout = kTracePatience});
  if (!fs::exists(report + ".nsys-rep"))
    fail("it wrote no report (status {}{})", collected.status,
         collected.timed_out ? ", given up after two minutes" : "");
  make_directories(directory / "stats");
  const ProcessResult exported = run_process({tools.nsys, "stats", "--force-export=true", "-q", "-r",
                                              "cuda_gpu_trace,nvtx_gpu_proj_trace,cuda_api_sum,cuda_api_trace", "-f",
                                              "csv", "--force-overwrite=true", "-o", stats, report + ".nsys-rep"},
                                             {.timeout = kTracePatience});
  for (const char* name : {"_cuda_gpu_trace.csv", "_cuda_api_sum.csv", "_cuda_api_trace.csv"})
    if (!fs::exists(stats + name)) fail("its statistics lack report{} (status {})", name, exported.status);
  Timeline timeline;
  timeline.operations = parse_cuda_gpu_trace(read_file(stats + "_cuda_gpu_trace.csv"));
  timeline.calls = parse_cuda_api_trace(read_file(stats + "_cuda_api_trace.csv"));
  timeline.no_samples = "they come from CUPTI, which cannot run beside Nsight Systems";
  return timeline;
}

Timeline by_cupti(const ProfileRequest& request, const Frame& frame) {
  const auto library = cupti::Library::load(request.tools.cupti);
  const Timeline timeline =
      record_timeline(*library, request.device,
                      {{request.executable.name(), [&](StreamHandle stream) { request.executable.run(stream); }}},
                      std::min(request.bench_runs, 10));
  frame.write("stats/report_cuda_gpu_trace.csv", cuda_gpu_trace_csv(timeline));
  frame.write("stats/report_cuda_api_sum.csv", cuda_api_sum_csv(timeline));
  frame.write("stats/report_nvtx_gpu_proj_trace.csv", nvtx_gpu_proj_trace_csv(timeline));
  return timeline;
}

}  // namespace

ProfileResult nsys_profile(const ProfileRequest& request) {
  if (!request.device.is_gpu()) fail("the mode nsys looks into a GPU; on a CPU use annotation or event");
  Frame frame(request, ProfileMode::nsys);
  frame.time(0);
  Profile::Counters& counters = frame.profile.counters.emplace();
  Timeline timeline;
  try {
    timeline = by_nsys(request, frame.directory);
    counters.source = "nsys";
  } catch (const Error& error) {
    counters.attempts.push_back(fmt::format("nsys: {}", error.what()));
    try {
      timeline = by_cupti(request, frame);
      counters.source = timeline.samples.empty() ? "CUPTI activity records" : "CUPTI activity records and PM sampling";
    } catch (const Error& second) {
      counters.attempts.push_back(fmt::format("CUPTI: {}", second.what()));
      frame.profile.missing = "no timeline, only times";
    }
  }
  if (frame.profile.missing.empty()) {
    frame.write("chrome_trace.json", chrome_trace_json(timeline));
    frame.profile.timeline = analyse(timeline);
  }
  frame.judge();
  return frame.publish();
}

}  // namespace hypermla
