#include "hypermla/profile/counters.h"

#include "hypermla/base/error.h"
#include "hypermla/device/driver.h"
#include "hypermla/profile/counter_host.h"

namespace hypermla {
namespace {

using cupti::Library;

// The counters of a context, ours from construction to destruction.
class RangeSession {
 public:
  RangeSession(const Library& library, CUcontext context) : library_(library) {
    HYPERMLA_CUPTI_PARAMS(RangeEnable, enable, object);
    enable.context = context;
    HYPERMLA_CUPTI(library_, range_enable, &enable);
    object_ = enable.object;
  }
  RangeSession(const RangeSession&) = delete;
  ~RangeSession() {
    HYPERMLA_CUPTI_PARAMS(RangeCall, disable, object);
    disable.object = object_;
    library_.range_disable(&disable);
  }

  // Runs the range once for every pass and returns the raw data.
  std::vector<std::uint8_t> collect(Device& device, const std::vector<std::uint8_t>& configuration,
                                    std::vector<const char*>& names, const CounterRange& range) {
    std::vector<std::uint8_t> data = make_image(names);
    configure(configuration, data, range.one_kernel);
    for (bool done = false; !done;) {
      device.flush_cache(device.stream());
      device.synchronize();
      HYPERMLA_CUPTI_PARAMS(RangeCall, call, object);
      call.object = object_;
      HYPERMLA_CUPTI(library_, range_start, &call);
      if (!range.one_kernel) {
        HYPERMLA_CUPTI_PARAMS(RangePush, push, name);
        push.object = object_;
        push.name = range.name.c_str();
        HYPERMLA_CUPTI(library_, range_push, &push);
      }
      range.work(device.stream());
      if (!range.one_kernel) HYPERMLA_CUPTI(library_, range_pop, &call);
      HYPERMLA_CUPTI_PARAMS(RangeStop, stop, all_passes_submitted);
      stop.object = object_;
      HYPERMLA_CUPTI(library_, range_stop, &stop);
      done = stop.all_passes_submitted;
    }
    HYPERMLA_CUPTI_PARAMS(RangeDecode, decode, dropped);
    decode.object = object_;
    HYPERMLA_CUPTI(library_, range_decode, &decode);
    if (decode.dropped) fail("CUPTI dropped {} ranges of {}: is it one kernel?", decode.dropped, range.name);
    return data;
  }

 private:
  std::vector<std::uint8_t> make_image(std::vector<const char*>& names) const {
    HYPERMLA_CUPTI_PARAMS(RangeDataSize, size, data_size);
    size.object = object_;
    size.names = names.data();
    size.count = names.size();
    size.ranges = 1;
    size.nodes = 1;
    HYPERMLA_CUPTI(library_, range_data_size, &size);
    std::vector<std::uint8_t> data(size.data_size);
    HYPERMLA_CUPTI_PARAMS(RangeInitData, init, data);
    init.object = object_;
    init.data_size = data.size();
    init.data = data.data();
    HYPERMLA_CUPTI(library_, range_init_data, &init);
    return data;
  }

  void configure(const std::vector<std::uint8_t>& configuration, std::vector<std::uint8_t>& data, bool one_kernel) {
    HYPERMLA_CUPTI_PARAMS(RangeConfig, config, target_level);
    config.object = object_;
    config.config_size = configuration.size();
    config.config = configuration.data();
    config.data_size = data.size();
    config.data = data.data();
    config.range = one_kernel ? 1 : 2;  // around every kernel, or where the caller says
    config.replay = 3;                  // by us: CUPTI's own replay would save and restore all memory around every pass
    config.ranges_per_pass = 1;
    config.nesting_levels = 1;
    config.first_level = 1;
    config.target_level = one_kernel ? 0 : 1;
    HYPERMLA_CUPTI(library_, range_config, &config);
  }

  const Library& library_;
  cupti::RangeObject* object_ = nullptr;
};

std::size_t range_count(const Library& library, const std::vector<std::uint8_t>& data) {
  HYPERMLA_CUPTI_PARAMS(RangeCount, count, ranges);
  count.data = data.data();
  count.data_size = data.size();
  HYPERMLA_CUPTI(library, range_count, &count);
  return count.ranges;
}

std::vector<std::uint8_t> availability(const Library& library, CUcontext context) {
  HYPERMLA_CUPTI_PARAMS(CounterAvailability, call, image);
  call.context = context;
  HYPERMLA_CUPTI(library, counter_availability, &call);  // the first call that shows a lack of permission
  std::vector<std::uint8_t> image(call.image_size);
  call.image = image.data();
  HYPERMLA_CUPTI(library, counter_availability, &call);
  return image;
}

}  // namespace

Counters read_counters(const Library& library, Device& device, const std::vector<std::string>& metrics,
                       const std::vector<CounterRange>& ranges) {
  CUcontext context = nullptr;
  CUdevice ordinal = 0;
  HYPERMLA_CUDA(cuCtxGetCurrent(&context));
  HYPERMLA_CUDA(cuCtxGetDevice(&ordinal));
  const ProfilerSession session(library);

  Counters result;
  result.chip = chip_name(library, std::size_t(ordinal));
  const std::vector<std::uint8_t> available = availability(library, context);
  std::vector<const char*> names;
  const auto host =
      host_with(library, CounterHost::kRanges, result.chip, available.data(), metrics, names, result.unknown);
  std::vector<std::uint8_t> configuration = host->configuration();
  result.passes = host->passes(configuration);

  for (const CounterRange& range : ranges) range.work(device.stream());  // warm: code loaded, pages touched
  device.synchronize();
  for (const CounterRange& range : ranges) {
    const std::vector<std::uint8_t> data = RangeSession(library, context).collect(device, configuration, names, range);
    if (range_count(library, data) != 1)
      fail("CUPTI counted {} ranges in {} instead of one", range_count(library, data), range.name);
    const std::vector<double> values = host->evaluate(data, 0, names);
    std::map<std::string, double>& named = result.ranges.emplace_back();
    for (std::size_t i = 0; i < names.size(); ++i) named[names[i]] = values[i];
  }
  return result;
}

MetricCheck check_metrics(const Library& library, const std::string& chip, const std::vector<std::string>& metrics,
                          CounterHost::Use use) {
  HYPERMLA_CUPTI_PARAMS(Initialize, begin, reserved);
  library.initialize(&begin);  // fails without a driver, and the host's side works all the same
  MetricCheck check;
  std::vector<const char*> names;
  const auto host = host_with(library, use, chip, nullptr, metrics, names, check.unknown);
  std::vector<std::uint8_t> configuration = host->configuration();
  check.passes = host->passes(configuration);
  return check;
}

}  // namespace hypermla
