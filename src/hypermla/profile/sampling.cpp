#include "hypermla/profile/sampling.h"

#include "hypermla/base/error.h"

namespace hypermla {
namespace {

constexpr int kEveryNanoseconds = 1;  // the trigger: a fixed clock, not the one that varies with the load
constexpr int kKeepOldest = 0;
constexpr int kImageFull = 1;
constexpr std::size_t kRawBytesPerSample = 8192;  // 4.3 KB were seen on GH100; CUPTI does not tell

std::vector<std::uint8_t> availability(const cupti::Library& library, std::size_t device) {
  HYPERMLA_CUPTI_PARAMS(SampleAvailability, call, image);
  call.device = device;
  HYPERMLA_CUPTI(library, sample_availability, &call);
  std::vector<std::uint8_t> image(call.image_size);
  call.image = image.data();
  HYPERMLA_CUPTI(library, sample_availability, &call);
  return image;
}

}  // namespace

std::vector<std::string> sampled_metrics() {
  return {"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
          "dram__throughput.avg.pct_of_peak_sustained_elapsed"};
}

struct Sampler::Enabled {
  Enabled(const cupti::Library& owner, std::size_t device) : library(owner) {
    HYPERMLA_CUPTI_PARAMS(SamplingEnable, enable, object);
    enable.device = device;
    HYPERMLA_CUPTI(library, sampling_enable, &enable);
    HYPERMLA_CUPTI_PARAMS(SamplingCall, with_size, object);
    call = with_size;
    call.object = enable.object;
  }
  Enabled(const Enabled&) = delete;
  ~Enabled() { library.sampling_disable(&call); }

  const cupti::Library& library;
  cupti::SamplingCall call;
};

Sampler::Sampler(const cupti::Library& library, std::size_t device, std::uint64_t interval, std::size_t count)
    : library_(library), session_(library) {
  const std::vector<std::uint8_t> available = availability(library_, device);
  std::vector<std::string> unknown;
  const std::string chip = chip_name(library_, device);
  host_ = host_with(library_, CounterHost::kSamples, chip, available.data(), metrics_, names_, unknown);
  if (!unknown.empty()) fail("{} cannot sample {}", chip, unknown[0]);
  configuration_ = host_->configuration();
  if (const int passes = host_->passes(configuration_); passes != 1)
    fail("{} needs {} passes for the counters, and samples come in one", chip, passes);
  enabled_ = std::make_unique<Enabled>(library_, device);

  HYPERMLA_CUPTI_PARAMS(SamplingConfig, config, append_mode);
  config.object = enabled_->call.object;
  config.config_size = configuration_.size();
  config.config = configuration_.data();
  config.buffer_size = count * kRawBytesPerSample;
  config.interval = interval;
  config.trigger = kEveryNanoseconds;
  config.append_mode = kKeepOldest;
  HYPERMLA_CUPTI(library_, sampling_config, &config);

  HYPERMLA_CUPTI_PARAMS(SamplingDataSize, size, data_size);
  size.object = enabled_->call.object;
  size.names = names_.data();
  size.count = names_.size();
  size.samples = std::uint32_t(count);
  HYPERMLA_CUPTI(library_, sampling_data_size, &size);
  data_.resize(size.data_size);
  HYPERMLA_CUPTI_PARAMS(SamplingInitData, init, data);
  init.object = enabled_->call.object;
  init.data_size = data_.size();
  init.data = data_.data();
  HYPERMLA_CUPTI(library_, sampling_init_data, &init);
}

Sampler::~Sampler() = default;

void Sampler::start() {
  HYPERMLA_CUPTI(library_, timestamp, &begin_);
  HYPERMLA_CUPTI(library_, sampling_start, &enabled_->call);
}

std::vector<CounterSample> Sampler::stop() {
  HYPERMLA_CUPTI(library_, sampling_stop, &enabled_->call);
  HYPERMLA_CUPTI_PARAMS(SamplingDecode, decode, overflow);
  decode.object = enabled_->call.object;
  decode.data = data_.data();
  decode.data_size = data_.size();
  HYPERMLA_CUPTI(library_, sampling_decode, &decode);
  if (decode.overflow || decode.stop_reason == kImageFull)
    fail("more samples came than CUPTI keeps; use fewer --bench_runs");
  HYPERMLA_CUPTI_PARAMS(SamplingCount, count, completed);
  count.data = data_.data();
  count.data_size = data_.size();
  HYPERMLA_CUPTI(library_, sampling_count, &count);

  std::vector<CounterSample> samples;
  for (std::size_t i = 0; i < count.completed; ++i) {
    HYPERMLA_CUPTI_PARAMS(SampleInfo, info, end);
    info.object = enabled_->call.object;
    info.data = data_.data();
    info.data_size = data_.size();
    info.index = i;
    HYPERMLA_CUPTI(library_, sample_info, &info);
    // The first sample of a process begins when its counters were last read, which may be seconds ago.
    if (info.start < begin_ || info.end <= info.start) continue;
    const std::vector<double> values = host_->evaluate(data_, i, names_);
    samples.push_back({info.start, info.end, values[0], values[1]});
  }
  return samples;
}

}  // namespace hypermla
