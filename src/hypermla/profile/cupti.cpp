#include "hypermla/profile/cupti.h"

#include <dlfcn.h>

#include <mutex>

#include "hypermla/base/error.h"

namespace hypermla::cupti {
namespace {

constexpr int kHardwareBusy = 26, kNoPrivilege = 35, kOtherClient = 39, kNoPrivilegeInGuest = 40;

std::shared_ptr<Library> open(const std::filesystem::path& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) return nullptr;
  auto library = std::make_shared<Library>();
  library->path = path.string();
  bool complete = true;
  auto load = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
    complete = complete && function;
  };
  load(library->result_text, "cuptiGetResultString");
  load(library->version, "cuptiGetVersion");
  load(library->initialize, "cuptiProfilerInitialize");
  load(library->deinitialize, "cuptiProfilerDeInitialize");
  load(library->chip_name, "cuptiDeviceGetChipName");
  load(library->counter_availability, "cuptiProfilerGetCounterAvailability");
  load(library->host_initialize, "cuptiProfilerHostInitialize");
  load(library->host_deinitialize, "cuptiProfilerHostDeinitialize");
  load(library->host_add_metrics, "cuptiProfilerHostConfigAddMetrics");
  load(library->host_config_size, "cuptiProfilerHostGetConfigImageSize");
  load(library->host_config, "cuptiProfilerHostGetConfigImage");
  load(library->host_passes, "cuptiProfilerHostGetNumOfPasses");
  load(library->host_evaluate, "cuptiProfilerHostEvaluateToGpuValues");
  load(library->range_enable, "cuptiRangeProfilerEnable");
  load(library->range_disable, "cuptiRangeProfilerDisable");
  load(library->range_start, "cuptiRangeProfilerStart");
  load(library->range_stop, "cuptiRangeProfilerStop");
  load(library->range_push, "cuptiRangeProfilerPushRange");
  load(library->range_pop, "cuptiRangeProfilerPopRange");
  load(library->range_data_size, "cuptiRangeProfilerGetCounterDataSize");
  load(library->range_init_data, "cuptiRangeProfilerCounterDataImageInitialize");
  load(library->range_config, "cuptiRangeProfilerSetConfig");
  load(library->range_decode, "cuptiRangeProfilerDecodeData");
  load(library->range_count, "cuptiRangeProfilerGetCounterDataInfo");
  load(library->sample_availability, "cuptiPmSamplingGetCounterAvailability");
  load(library->sampling_enable, "cuptiPmSamplingEnable");
  load(library->sampling_disable, "cuptiPmSamplingDisable");
  load(library->sampling_config, "cuptiPmSamplingSetConfig");
  load(library->sampling_data_size, "cuptiPmSamplingGetCounterDataSize");
  load(library->sampling_init_data, "cuptiPmSamplingCounterDataImageInitialize");
  load(library->sampling_start, "cuptiPmSamplingStart");
  load(library->sampling_stop, "cuptiPmSamplingStop");
  load(library->sampling_decode, "cuptiPmSamplingDecodeData");
  load(library->sampling_count, "cuptiPmSamplingGetCounterDataInfo");
  load(library->sample_info, "cuptiPmSamplingCounterDataGetSampleInfo");
  load(library->activity_register, "cuptiActivityRegisterCallbacks");
  load(library->activity_enable, "cuptiActivityEnable");
  load(library->activity_disable, "cuptiActivityDisable");
  load(library->activity_flush, "cuptiActivityFlushAll");
  load(library->activity_next, "cuptiActivityGetNextRecord");
  load(library->activity_push_external, "cuptiActivityPushExternalCorrelationId");
  load(library->activity_pop_external, "cuptiActivityPopExternalCorrelationId");
  load(library->timestamp, "cuptiGetTimestamp");
  load(library->callback_name, "cuptiGetCallbackName");
  return complete ? library : nullptr;  // CUPTI of CUDA 12 and older lacks the range profiler and PM sampling
}

}  // namespace

std::shared_ptr<const Library> Library::load(const std::vector<std::filesystem::path>& candidates) {
  static std::mutex mutex;
  static std::shared_ptr<const Library> loaded;  // one CUPTI per process: two would fight over the hardware
  std::lock_guard lock(mutex);
  if (loaded) return loaded;
  for (const auto& candidate : candidates)
    if ((loaded = open(candidate))) return loaded;
  fail("no CUPTI 13 (libcupti.so.13) was found; run ./hypermla once, which installs its wheel, or install CUDA 13");
}

std::string Library::version_text() const {
  std::uint32_t number = 0;
  check(version(&number), "cuptiGetVersion");
  return fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
}

void Library::check(int result, const char* call) const {
  if (result == 0) return;
  const char* text = nullptr;
  result_text(result, &text);
  const char* advice = "";
  if (result == kNoPrivilege || result == kNoPrivilegeInGuest)
    advice = ": counters need root, CAP_SYS_ADMIN, or the driver's option NVreg_RestrictProfilingToAdminUsers=0";
  if (result == kOtherClient || result == kHardwareBusy) advice = ": another profiler uses the counters; end it first";
  fail("CUPTI's {} failed ({}){}", call, text ? text : std::to_string(result), advice);
}

}  // namespace hypermla::cupti
