// CUPTI, found at run time: the counters of a GPU (range profiler, PM sampling) and its timeline (activity records).
// Types come from its headers; functions are looked up by name, so a machine without CUPTI runs all that needs no
// counters.
//
// Every call of the profiler interfaces takes one structure that begins with its own size, so that newer libraries
// know which fields a caller has; results are 0 or an error.
#pragma once

#include <cupti_activity.h>
#include <cupti_pmsampling.h>
#include <cupti_profiler_host.h>
#include <cupti_profiler_target.h>
#include <cupti_range_profiler.h>
#include <cupti_target.h>
#include <cupti_version.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace hypermla::cupti {

// One line per function: the name under which the library exports it.
#define HYPERMLA_CUPTI_FUNCTIONS(X)                                                                                    \
  X(cuptiGetResultString)                                                                                              \
  X(cuptiGetVersion) X(cuptiGetTimestamp) X(cuptiGetCallbackName) X(cuptiDeviceGetChipName) X(cuptiProfilerInitialize) \
      X(cuptiProfilerDeInitialize) X(cuptiProfilerGetCounterAvailability) X(cuptiProfilerHostInitialize)               \
          X(cuptiProfilerHostDeinitialize) X(cuptiProfilerHostConfigAddMetrics) X(cuptiProfilerHostGetConfigImageSize) \
              X(cuptiProfilerHostGetConfigImage) X(cuptiProfilerHostGetNumOfPasses)                                    \
                  X(cuptiProfilerHostEvaluateToGpuValues) X(cuptiRangeProfilerEnable) X(cuptiRangeProfilerDisable)     \
                      X(cuptiRangeProfilerStart) X(cuptiRangeProfilerStop) X(cuptiRangeProfilerPushRange)              \
                          X(cuptiRangeProfilerPopRange) X(cuptiRangeProfilerGetCounterDataSize)                        \
                              X(cuptiRangeProfilerCounterDataImageInitialize) X(cuptiRangeProfilerSetConfig)           \
                                  X(cuptiRangeProfilerDecodeData) X(cuptiRangeProfilerGetCounterDataInfo)              \
                                      X(cuptiPmSamplingGetCounterAvailability) X(cuptiPmSamplingEnable)                \
                                          X(cuptiPmSamplingDisable) X(cuptiPmSamplingSetConfig)                        \
                                              X(cuptiPmSamplingGetCounterDataSize)                                     \
                                                  X(cuptiPmSamplingCounterDataImageInitialize) X(cuptiPmSamplingStart) \
                                                      X(cuptiPmSamplingStop) X(cuptiPmSamplingDecodeData)              \
                                                          X(cuptiPmSamplingGetCounterDataInfo) X(                      \
                                                              cuptiPmSamplingCounterDataGetSampleInfo)                 \
                                                              X(cuptiActivityRegisterCallbacks) X(cuptiActivityEnable) \
                                                                  X(cuptiActivityDisable) X(cuptiActivityFlushAll)     \
                                                                      X(cuptiActivityGetNextRecord)                    \
                                                                          X(cuptiActivityPushExternalCorrelationId)    \
                                                                              X(cuptiActivityPopExternalCorrelationId)

struct Library {
#define HYPERMLA_DECLARE(name) decltype(&::name) name = nullptr;
  HYPERMLA_CUPTI_FUNCTIONS(HYPERMLA_DECLARE)
#undef HYPERMLA_DECLARE

  // The first of `candidates` (paths, or names for the loader's own search) that loads. Throws Error saying where
  // CUPTI comes from when none does. Loaded once and kept.
  static std::shared_ptr<const Library> load(const std::vector<std::filesystem::path>& candidates);

  std::string version_text() const;
  // Throws Error with CUPTI's own words, and with what to do for the failures users meet: no permission, another
  // profiler.
  void check(CUptiResult result, const char* call) const;
};

// A call that fails throws: HYPERMLA_CUPTI(library, cuptiRangeProfilerStart, &call).
#define HYPERMLA_CUPTI(library, function, ...) (library).check((library).function(__VA_ARGS__), #function)

// A structure, zeroed, with its size set: HYPERMLA_CUPTI_PARAMS(CUpti_RangeProfiler_Start, call).
#define HYPERMLA_CUPTI_PARAMS(Type, name) \
  Type##_Params name{};                   \
  name.structSize = Type##_Params_STRUCT_SIZE

}  // namespace hypermla::cupti
