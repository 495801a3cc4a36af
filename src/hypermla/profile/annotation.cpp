#include "hypermla/base/error.h"
#include "hypermla/profile/counters.h"
#include "hypermla/profile/frame.h"
#include "hypermla/profile/metrics.h"
#include "hypermla/profile/ncu.h"
#include "hypermla/profile/perf_events.h"

namespace hypermla {
namespace {

// What an engine found: for every stage, or for every kernel, its counters.
struct StageCounters {
  Profile::Counters about;
  std::vector<std::map<std::string, double>> stages;
};

// Stages are launched one by one, not as a graph: CUPTI assigns a graph's kernels to ranges unreliably.
StageCounters by_cupti(const ProfileRequest& request) {
  const auto library = cupti::Library::load(request.tools.cupti);
  std::vector<CounterRange> ranges;
  for (TiledKernel* kernel : launched_kernels(request.executable))
    ranges.push_back({kernel->name(), [kernel](StreamHandle stream) { kernel->run(stream); }});
  const Counters counters = read_counters(*library, request.device, metric_names(), ranges);
  StageCounters all{{.chip = counters.chip,
                     .passes = counters.passes,
                     .unknown = counters.unknown,
                     .source = "CUPTI " + library->version_text()},
                    counters.ranges};
  // Kernels that run at once are one range; what goes wrong with it costs no other stage its counters.
  for (ConcurrentKernels* group : launched_groups(request.executable)) {
    all.stages.emplace_back();
    try {
      const CounterRange range{group->name(), [group](StreamHandle stream) { group->run(stream); }, false};
      all.stages.back() = read_counters(*library, request.device, metric_names(), {range}).ranges[0];
    } catch (const Error& error) {
      all.about.missing_groups[group->name()] = error.what();
    }
  }
  return all;
}

StageCounters by_ncu(const ProfileRequest& request) {
  return {{.source = ncu_version(request.tools.ncu)}, ncu_counters(request)};
}

StageCounters by_perf(const ProfileRequest& request) {
  StageCounters counters{{.source = "perf_event_open"}, {}};
  for (Executable* stage : profiled_stages(request.executable))
    counters.stages.push_back(count_cpu([&] {
      stage->run(request.device.stream());
      request.device.synchronize();
    }));
  return counters;
}

struct Engine {
  std::string prefix;  // of what it says when it fails
  StageCounters (*read)(const ProfileRequest&);
};

}  // namespace

ProfileResult annotation_profile(const ProfileRequest& request) {
  Frame frame(request, ProfileMode::annotation);
  frame.time(request.sustained_seconds);
  const bool is_gpu = request.device.is_gpu();
  const std::vector<Engine> engines =
      is_gpu ? std::vector<Engine>{{"CUPTI: ", by_cupti}, {"ncu: ", by_ncu}} : std::vector<Engine>{{"", by_perf}};
  StageCounters counters;
  std::vector<std::string> attempts;
  for (const Engine& engine : engines) {
    try {
      counters = engine.read(request);
      break;
    } catch (const Error& error) {
      attempts.push_back(engine.prefix + error.what());
    }
  }
  if (is_gpu && counters.stages.empty())
    frame.profile.missing = "no hardware counters, only times and static resources";
  frame.profile.counters = counters.about;
  frame.profile.counters->attempts = attempts;
  for (std::size_t i = 0; i < counters.stages.size(); ++i)
    frame.set_metrics(i, counters.stages[i], counters.about.source);
  frame.judge();
  frame.write("nsight_raw_metrics.csv", raw_metrics_csv(frame.profile));
  frame.write("nsight_formatted_metrics.csv", formatted_metrics_csv(frame.profile));
  frame.write("roofline_metrics.csv", roofline_metrics_csv(frame.profile));
  return frame.publish();
}

}  // namespace hypermla
