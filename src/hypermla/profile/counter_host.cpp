#include "hypermla/profile/counter_host.h"

#include "hypermla/base/error.h"

namespace hypermla {

using cupti::Library;

CounterHost::CounterHost(const Library& library, CUpti_ProfilerType use, const std::string& chip,
                         const std::uint8_t* availability)
    : library_(library) {
  HYPERMLA_CUPTI_PARAMS(CUpti_Profiler_Host_Initialize, init);
  init.profilerType = use;
  init.pChipName = chip.c_str();
  init.pCounterAvailabilityImage = availability;
  HYPERMLA_CUPTI(library_, cuptiProfilerHostInitialize, &init);
  host_ = init.pHostObject;
}

CounterHost::~CounterHost() {
  HYPERMLA_CUPTI_PARAMS(CUpti_Profiler_Host_Deinitialize, end);
  end.pHostObject = host_;
  library_.cuptiProfilerHostDeinitialize(&end);
}

bool CounterHost::add(std::vector<const char*>& names) {
  HYPERMLA_CUPTI_PARAMS(CUpti_Profiler_Host_ConfigAddMetrics, add);
  add.pHostObject = host_;
  add.ppMetricNames = names.data();
  add.numMetrics = names.size();
  return library_.cuptiProfilerHostConfigAddMetrics(&add) == CUPTI_SUCCESS;
}

std::vector<std::uint8_t> CounterHost::configuration() const {
  HYPERMLA_CUPTI_PARAMS(CUpti_Profiler_Host_GetConfigImageSize, size);
  size.pHostObject = host_;
  HYPERMLA_CUPTI(library_, cuptiProfilerHostGetConfigImageSize, &size);
  std::vector<std::uint8_t> image(size.configImageSize);
  HYPERMLA_CUPTI_PARAMS(CUpti_Profiler_Host_GetConfigImage, config);
  config.pHostObject = host_;
  config.configImageSize = image.size();
  config.pConfigImage = image.data();
  HYPERMLA_CUPTI(library_, cuptiProfilerHostGetConfigImage, &config);
  return image;
}

int CounterHost::passes(std::vector<std::uint8_t>& configuration) const {
  HYPERMLA_CUPTI_PARAMS(CUpti_Profiler_Host_GetNumOfPasses, passes);
  passes.configImageSize = configuration.size();
  passes.pConfigImage = configuration.data();
  HYPERMLA_CUPTI(library_, cuptiProfilerHostGetNumOfPasses, &passes);
  return int(passes.numOfPasses);
}

std::vector<double> CounterHost::evaluate(const std::vector<std::uint8_t>& data, std::size_t range,
                                          std::vector<const char*>& names) const {
  std::vector<double> values(names.size());
  HYPERMLA_CUPTI_PARAMS(CUpti_Profiler_Host_EvaluateToGpuValues, evaluate);
  evaluate.pHostObject = host_;
  evaluate.pCounterDataImage = data.data();
  evaluate.counterDataImageSize = data.size();
  evaluate.rangeIndex = range;
  evaluate.ppMetricNames = names.data();
  evaluate.numMetrics = names.size();
  evaluate.pMetricValues = values.data();
  HYPERMLA_CUPTI(library_, cuptiProfilerHostEvaluateToGpuValues, &evaluate);
  return values;
}

std::unique_ptr<CounterHost> host_with(const Library& library, CUpti_ProfilerType use, const std::string& chip,
                                       const std::uint8_t* availability, const std::vector<std::string>& metrics,
                                       std::vector<const char*>& known, std::vector<std::string>& unknown) {
  auto fresh = [&] { return std::make_unique<CounterHost>(library, use, chip, availability); };
  for (const std::string& metric : metrics) known.push_back(metric.c_str());
  if (auto host = fresh(); host->add(known)) return host;
  known.clear();
  for (const std::string& metric : metrics) {
    std::vector<const char*> one = {metric.c_str()};
    if (fresh()->add(one))
      known.push_back(metric.c_str());
    else
      unknown.push_back(metric);
  }
  auto host = fresh();
  if (known.empty() || !host->add(known)) fail("none of the {} counters exists on {}", metrics.size(), chip);
  return host;
}

std::string chip_name(const Library& library, std::size_t device) {
  HYPERMLA_CUPTI_PARAMS(CUpti_Device_GetChipName, chip);
  chip.deviceIndex = device;
  HYPERMLA_CUPTI(library, cuptiDeviceGetChipName, &chip);
  return chip.pChipName;
}

ProfilerSession::ProfilerSession(const Library& library) : library_(library) {
  HYPERMLA_CUPTI_PARAMS(CUpti_Profiler_Initialize, begin);
  HYPERMLA_CUPTI(library_, cuptiProfilerInitialize, &begin);
}

ProfilerSession::~ProfilerSession() {
  HYPERMLA_CUPTI_PARAMS(CUpti_Profiler_DeInitialize, end);
  library_.cuptiProfilerDeInitialize(&end);
}

}  // namespace hypermla
