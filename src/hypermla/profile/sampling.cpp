#include "hypermla/profile/sampling.h"

#include "hypermla/base/error.h"

namespace hypermla {
namespace {

constexpr std::size_t kRawBytesPerSample = 8192;  // 4.3 KB were seen on GH100; CUPTI does not tell

std::vector<std::uint8_t> availability(const cupti::Library& library, std::size_t device) {
  HYPERMLA_CUPTI_PARAMS(CUpti_PmSampling_GetCounterAvailability, call);
  call.deviceIndex = device;
  HYPERMLA_CUPTI(library, cuptiPmSamplingGetCounterAvailability, &call);
  std::vector<std::uint8_t> image(call.counterAvailabilityImageSize);
  call.pCounterAvailabilityImage = image.data();
  HYPERMLA_CUPTI(library, cuptiPmSamplingGetCounterAvailability, &call);
  return image;
}

}  // namespace

std::vector<std::string> sampled_metrics() {
  return {"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
          "dram__throughput.avg.pct_of_peak_sustained_elapsed"};
}

struct Sampler::Enabled {
  Enabled(const cupti::Library& owner, std::size_t device) : library(owner) {
    HYPERMLA_CUPTI_PARAMS(CUpti_PmSampling_Enable, enable);
    enable.deviceIndex = device;
    HYPERMLA_CUPTI(library, cuptiPmSamplingEnable, &enable);
    object = enable.pPmSamplingObject;
  }
  Enabled(const Enabled&) = delete;
  ~Enabled() {
    HYPERMLA_CUPTI_PARAMS(CUpti_PmSampling_Disable, disable);
    disable.pPmSamplingObject = object;
    library.cuptiPmSamplingDisable(&disable);
  }

  const cupti::Library& library;
  CUpti_PmSampling_Object* object = nullptr;
};

Sampler::Sampler(const cupti::Library& library, std::size_t device, std::uint64_t interval, std::size_t count)
    : library_(library), session_(library) {
  const std::vector<std::uint8_t> available = availability(library_, device);
  std::vector<std::string> unknown;
  const std::string chip = chip_name(library_, device);
  host_ = host_with(library_, CUPTI_PROFILER_TYPE_PM_SAMPLING, chip, available.data(), metrics_, names_, unknown);
  if (!unknown.empty()) fail("{} cannot sample {}", chip, unknown[0]);
  configuration_ = host_->configuration();
  if (const int passes = host_->passes(configuration_); passes != 1)
    fail("{} needs {} passes for the counters, and samples come in one", chip, passes);
  enabled_ = std::make_unique<Enabled>(library_, device);

  HYPERMLA_CUPTI_PARAMS(CUpti_PmSampling_SetConfig, config);
  config.pPmSamplingObject = enabled_->object;
  config.configSize = configuration_.size();
  config.pConfig = configuration_.data();
  config.hardwareBufferSize = count * kRawBytesPerSample;
  config.samplingInterval = interval;
  // A fixed clock, not the one that varies with the load.
  config.triggerMode = CUPTI_PM_SAMPLING_TRIGGER_MODE_GPU_TIME_INTERVAL;
  config.hwBufferAppendMode = CUPTI_PM_SAMPLING_HARDWARE_BUFFER_APPEND_MODE_KEEP_OLDEST;
  HYPERMLA_CUPTI(library_, cuptiPmSamplingSetConfig, &config);

  HYPERMLA_CUPTI_PARAMS(CUpti_PmSampling_GetCounterDataSize, size);
  size.pPmSamplingObject = enabled_->object;
  size.pMetricNames = names_.data();
  size.numMetrics = names_.size();
  size.maxSamples = std::uint32_t(count);
  HYPERMLA_CUPTI(library_, cuptiPmSamplingGetCounterDataSize, &size);
  data_.resize(size.counterDataSize);
  HYPERMLA_CUPTI_PARAMS(CUpti_PmSampling_CounterDataImage_Initialize, init);
  init.pPmSamplingObject = enabled_->object;
  init.counterDataSize = data_.size();
  init.pCounterData = data_.data();
  HYPERMLA_CUPTI(library_, cuptiPmSamplingCounterDataImageInitialize, &init);
}

Sampler::~Sampler() = default;

void Sampler::start() {
  HYPERMLA_CUPTI(library_, cuptiGetTimestamp, &begin_);
  HYPERMLA_CUPTI_PARAMS(CUpti_PmSampling_Start, call);
  call.pPmSamplingObject = enabled_->object;
  HYPERMLA_CUPTI(library_, cuptiPmSamplingStart, &call);
}

std::vector<CounterSample> Sampler::stop() {
  HYPERMLA_CUPTI_PARAMS(CUpti_PmSampling_Stop, call);
  call.pPmSamplingObject = enabled_->object;
  HYPERMLA_CUPTI(library_, cuptiPmSamplingStop, &call);
  HYPERMLA_CUPTI_PARAMS(CUpti_PmSampling_DecodeData, decode);
  decode.pPmSamplingObject = enabled_->object;
  decode.pCounterDataImage = data_.data();
  decode.counterDataImageSize = data_.size();
  HYPERMLA_CUPTI(library_, cuptiPmSamplingDecodeData, &decode);
  if (decode.overflow || decode.decodeStopReason == CUPTI_PM_SAMPLING_DECODE_STOP_REASON_COUNTER_DATA_FULL)
    fail("more samples came than CUPTI keeps; use fewer --bench_runs");
  HYPERMLA_CUPTI_PARAMS(CUpti_PmSampling_GetCounterDataInfo, count);
  count.pCounterDataImage = data_.data();
  count.counterDataImageSize = data_.size();
  HYPERMLA_CUPTI(library_, cuptiPmSamplingGetCounterDataInfo, &count);

  std::vector<CounterSample> samples;
  for (std::size_t i = 0; i < count.numCompletedSamples; ++i) {
    HYPERMLA_CUPTI_PARAMS(CUpti_PmSampling_CounterData_GetSampleInfo, info);
    info.pPmSamplingObject = enabled_->object;
    info.pCounterDataImage = data_.data();
    info.counterDataImageSize = data_.size();
    info.sampleIndex = i;
    HYPERMLA_CUPTI(library_, cuptiPmSamplingCounterDataGetSampleInfo, &info);
    // The first sample of a process begins when its counters were last read, which may be seconds ago.
    if (info.startTimestamp < begin_ || info.endTimestamp <= info.startTimestamp) continue;
    const std::vector<double> values = host_->evaluate(data_, i, names_);
    samples.push_back({info.startTimestamp, info.endTimestamp, values[0], values[1]});
  }
  if (samples.empty()) fail("no sample was taken while the kernels ran");
  return samples;
}

}  // namespace hypermla
