#include "hypermla/base/error.h"
#include "hypermla/profile/counters.h"
#include "hypermla/profile/frame.h"
#include "hypermla/profile/metrics.h"
#include "hypermla/profile/ncu.h"
#include "hypermla/profile/perf_events.h"

namespace hypermla {
namespace {

struct StageCounters {
  std::string source;  // "CUPTI 13.0.1"
  std::vector<std::map<std::string, double>> stages;
  Json details = Json::object();
};

// Stages are launched one by one, not as a graph: CUPTI assigns a graph's kernels to ranges unreliably.
StageCounters by_cupti(const ProfileRequest& request) {
  const auto library = cupti::Library::load(request.tools.cupti);
  std::vector<CounterRange> ranges;
  for (TiledKernel* kernel : launched_kernels(request.executable))
    ranges.push_back({kernel->name(), [kernel](StreamHandle stream) { kernel->run(stream); }});
  const Counters counters = read_counters(*library, request.device, metric_names(), ranges);
  StageCounters all{"CUPTI " + library->version_text(),
                    counters.ranges,
                    {{"chip", counters.chip}, {"passes", counters.passes}, {"unknown", counters.unknown}}};
  // Kernels that run at once are one range; what goes wrong with it costs no other stage its counters.
  for (ConcurrentKernels* group : launched_groups(request.executable)) {
    all.stages.emplace_back();
    try {
      const CounterRange range{group->name(), [group](StreamHandle stream) { group->run(stream); }, false};
      all.stages.back() = read_counters(*library, request.device, metric_names(), {range}).ranges[0];
    } catch (const Error& error) {
      all.details["missing_groups"][group->name()] = error.what();
    }
  }
  return all;
}

StageCounters by_ncu(const ProfileRequest& request) {
  std::vector<std::string> kernels;
  for (TiledKernel* kernel : launched_kernels(request.executable)) kernels.push_back(kernel->name());
  return {ncu_version(request.tools.ncu), ncu_counters(request.tools, metric_names(), kernels), {}};
}

StageCounters by_perf(const ProfileRequest& request, std::string& missing) {
  StageCounters counters{"perf_event_open", {}, {}};
  const std::vector<TiledKernel*> kernels = launched_kernels(request.executable);
  std::vector<Executable*> stages(kernels.begin(), kernels.end());
  for (ConcurrentKernels* group : launched_groups(request.executable)) stages.push_back(group);
  for (Executable* stage : stages) {
    CpuCounters one = count_cpu([&] {
      stage->run(request.device.stream());
      request.device.synchronize();
    });
    if (!one.missing.empty()) {
      missing = one.missing;
      return {};
    }
    counters.stages.push_back(one.values);
  }
  return counters;
}

}  // namespace

ProfileResult annotation_profile(const ProfileRequest& request) {
  Frame frame(request, ProfileMode::annotation);
  frame.time(request.sustained_seconds);
  StageCounters counters;
  Json attempts = Json::array();
  if (!request.device.is_gpu()) {
    std::string missing;
    counters = by_perf(request, missing);
    if (!missing.empty()) attempts.push_back(missing);
  } else {
    const std::pair<const char*, StageCounters (*)(const ProfileRequest&)> engines[] = {{"CUPTI", by_cupti},
                                                                                        {"ncu", by_ncu}};
    for (const auto& [name, read] : engines) {
      try {
        counters = read(request);
        break;
      } catch (const Error& error) {
        attempts.push_back(fmt::format("{}: {}", name, error.what()));
      }
    }
    if (counters.stages.empty()) frame.give_up("no hardware counters, only times and static resources");
  }
  frame.profile["counters"] = counters.details;
  frame.profile["counters"]["source"] = counters.stages.empty() ? "none" : counters.source;
  if (!attempts.empty()) frame.profile["counters"]["attempts"] = attempts;
  for (std::size_t i = 0; i < counters.stages.size(); ++i) {
    if (counters.stages[i].empty()) continue;
    frame.profile["stages"][i]["metrics"] = counters.stages[i];
    frame.profile["stages"][i]["metrics_source"] = counters.source;
  }
  ProfileResult result = frame.finish();
  frame.write("nsight_raw_metrics.csv", raw_metrics_csv(result.json()));
  frame.write("nsight_formatted_metrics.csv", formatted_metrics_csv(result.json()));
  frame.write("roofline_metrics.csv", roofline_metrics_csv(result.json()));
  return result;
}

}  // namespace hypermla
