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
    HYPERMLA_CUPTI_PARAMS(CUpti_RangeProfiler_Enable, enable);
    enable.ctx = context;
    HYPERMLA_CUPTI(library_, cuptiRangeProfilerEnable, &enable);
    object_ = enable.pRangeProfilerObject;
  }
  RangeSession(const RangeSession&) = delete;
  ~RangeSession() {
    HYPERMLA_CUPTI_PARAMS(CUpti_RangeProfiler_Disable, disable);
    disable.pRangeProfilerObject = object_;
    library_.cuptiRangeProfilerDisable(&disable);
  }

  // Runs the range once for every pass and returns the raw data.
  std::vector<std::uint8_t> collect(Device& device, const std::vector<std::uint8_t>& configuration,
                                    std::vector<const char*>& names, const CounterRange& range) {
    std::vector<std::uint8_t> data = make_image(names);
    configure(configuration, data, range.one_kernel);
    for (bool done = false; !done;) {
      device.flush_cache(device.stream());
      device.synchronize();
      HYPERMLA_CUPTI_PARAMS(CUpti_RangeProfiler_Start, call);
      call.pRangeProfilerObject = object_;
      HYPERMLA_CUPTI(library_, cuptiRangeProfilerStart, &call);
      if (!range.one_kernel) {
        HYPERMLA_CUPTI_PARAMS(CUpti_RangeProfiler_PushRange, push);
        push.pRangeProfilerObject = object_;
        push.pRangeName = range.name.c_str();
        HYPERMLA_CUPTI(library_, cuptiRangeProfilerPushRange, &push);
      }
      range.work(device.stream());
      if (!range.one_kernel) {
        HYPERMLA_CUPTI_PARAMS(CUpti_RangeProfiler_PopRange, pop);
        pop.pRangeProfilerObject = object_;
        HYPERMLA_CUPTI(library_, cuptiRangeProfilerPopRange, &pop);
      }
      HYPERMLA_CUPTI_PARAMS(CUpti_RangeProfiler_Stop, stop);
      stop.pRangeProfilerObject = object_;
      HYPERMLA_CUPTI(library_, cuptiRangeProfilerStop, &stop);
      done = stop.isAllPassSubmitted;
    }
    HYPERMLA_CUPTI_PARAMS(CUpti_RangeProfiler_DecodeData, decode);
    decode.pRangeProfilerObject = object_;
    HYPERMLA_CUPTI(library_, cuptiRangeProfilerDecodeData, &decode);
    if (decode.numOfRangeDropped)
      fail("CUPTI dropped {} ranges of {}: is it one kernel?", decode.numOfRangeDropped, range.name);
    return data;
  }

 private:
  std::vector<std::uint8_t> make_image(std::vector<const char*>& names) const {
    HYPERMLA_CUPTI_PARAMS(CUpti_RangeProfiler_GetCounterDataSize, size);
    size.pRangeProfilerObject = object_;
    size.pMetricNames = names.data();
    size.numMetrics = names.size();
    size.maxNumOfRanges = 1;
    size.maxNumRangeTreeNodes = 1;
    HYPERMLA_CUPTI(library_, cuptiRangeProfilerGetCounterDataSize, &size);
    std::vector<std::uint8_t> data(size.counterDataSize);
    HYPERMLA_CUPTI_PARAMS(CUpti_RangeProfiler_CounterDataImage_Initialize, init);
    init.pRangeProfilerObject = object_;
    init.counterDataSize = data.size();
    init.pCounterData = data.data();
    HYPERMLA_CUPTI(library_, cuptiRangeProfilerCounterDataImageInitialize, &init);
    return data;
  }

  void configure(const std::vector<std::uint8_t>& configuration, std::vector<std::uint8_t>& data, bool one_kernel) {
    HYPERMLA_CUPTI_PARAMS(CUpti_RangeProfiler_SetConfig, config);
    config.pRangeProfilerObject = object_;
    config.configSize = configuration.size();
    config.pConfig = configuration.data();
    config.counterDataImageSize = data.size();
    config.pCounterDataImage = data.data();
    config.range = one_kernel ? CUPTI_AutoRange : CUPTI_UserRange;  // around every kernel, or where the caller says
        // By us: CUPTI's own replay would save and restore all memory around every pass.
    config.replayMode = CUPTI_UserReplay;
    config.maxRangesPerPass = 1;
    config.numNestingLevels = 1;
    config.minNestingLevel = 1;
    config.targetNestingLevel = one_kernel ? 0 : 1;
    HYPERMLA_CUPTI(library_, cuptiRangeProfilerSetConfig, &config);
  }

  const Library& library_;
  CUpti_RangeProfiler_Object* object_ = nullptr;
};

std::size_t range_count(const Library& library, const std::vector<std::uint8_t>& data) {
  HYPERMLA_CUPTI_PARAMS(CUpti_RangeProfiler_GetCounterDataInfo, count);
  count.pCounterDataImage = data.data();
  count.counterDataImageSize = data.size();
  HYPERMLA_CUPTI(library, cuptiRangeProfilerGetCounterDataInfo, &count);
  return count.numTotalRanges;
}

std::vector<std::uint8_t> availability(const Library& library, CUcontext context) {
  HYPERMLA_CUPTI_PARAMS(CUpti_Profiler_GetCounterAvailability, call);
  call.ctx = context;
  HYPERMLA_CUPTI(library, cuptiProfilerGetCounterAvailability,
                 &call);  // the first call that shows a lack of permission
  std::vector<std::uint8_t> image(call.counterAvailabilityImageSize);
  call.pCounterAvailabilityImage = image.data();
  HYPERMLA_CUPTI(library, cuptiProfilerGetCounterAvailability, &call);
  return image;
}

}  // namespace

Counters read_counters(const Library& library, Device& device, const std::vector<std::string>& metrics,
                       const std::vector<CounterRange>& ranges) {
  CUcontext context = nullptr;
  CUdevice ordinal = 0;
  device.make_current();
  HYPERMLA_CUDA(cuCtxGetCurrent(&context));
  HYPERMLA_CUDA(cuCtxGetDevice(&ordinal));
  const ProfilerSession session(library);

  Counters result;
  result.chip = chip_name(library, std::size_t(ordinal));
  const std::vector<std::uint8_t> available = availability(library, context);
  std::vector<const char*> names;
  const auto host = host_with(library, CUPTI_PROFILER_TYPE_RANGE_PROFILER, result.chip, available.data(), metrics,
                              names, result.unknown);
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
                          CUpti_ProfilerType use) {
  HYPERMLA_CUPTI_PARAMS(CUpti_Profiler_Initialize, begin);
  library.cuptiProfilerInitialize(&begin);  // fails without a driver, and the host's side works all the same
  MetricCheck check;
  std::vector<const char*> names;
  const auto host = host_with(library, use, chip, nullptr, metrics, names, check.unknown);
  std::vector<std::uint8_t> configuration = host->configuration();
  check.passes = host->passes(configuration);
  return check;
}

}  // namespace hypermla
