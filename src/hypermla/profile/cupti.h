// CUPTI, found at run time: the counters of a GPU (range profiler, PM sampling) and its timeline (activity records).
// Only what this layer calls is declared here, after the reference of CUPTI 13.0 (docs.nvidia.com/cupti): a build
// needs no CUPTI, and neither does a machine where nobody profiles.
//
// Every call of the profiler interfaces takes one structure that begins with its own size, so that newer libraries
// know which fields a caller has; results are 0 or an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

struct CUctx_st;

namespace hypermla::cupti {

struct HostObject;
struct RangeObject;
struct SamplingObject;

// The first two fields of all structures below. `size` ends with the last field, without the padding behind it.
struct Header {
  std::size_t size;
  void* reserved;
};
struct Initialize : Header {};
struct ChipName : Header {
  std::size_t device;
  const char* name;
};
struct CounterAvailability : Header {
  CUctx_st* context;
  std::size_t image_size;
  std::uint8_t* image;
};
struct HostInitialize : Header {
  int type;  // 0: range profiler, 1: PM sampling
  const char* chip;
  const std::uint8_t* availability;  // null: all that the chip can count
  HostObject* host;
};
struct HostDeinitialize : Header {
  HostObject* host;
};
struct HostAddMetrics : Header {
  HostObject* host;
  const char** names;
  std::size_t count;
};
struct HostConfigSize : Header {
  HostObject* host;
  std::size_t image_size;
};
struct HostConfig : Header {
  HostObject* host;
  std::size_t image_size;
  std::uint8_t* image;
};
struct HostPasses : Header {
  std::size_t image_size;
  std::uint8_t* image;
  std::size_t passes;
};
struct HostEvaluate : Header {
  HostObject* host;
  const std::uint8_t* data;
  std::size_t data_size;
  std::size_t range;
  const char** names;
  std::size_t count;
  double* values;
};
struct RangeEnable : Header {
  CUctx_st* context;
  RangeObject* object;
};
struct RangeCall : Header {  // Disable, Start, PopRange
  RangeObject* object;
};
struct RangeDataSize : Header {
  RangeObject* object;
  const char** names;
  std::size_t count;
  std::size_t ranges;
  std::uint32_t nodes;
  std::size_t data_size;
};
struct RangeInitData : Header {
  RangeObject* object;
  std::size_t data_size;
  std::uint8_t* data;
};
struct RangeConfig : Header {
  RangeObject* object;
  std::size_t config_size;
  const std::uint8_t* config;
  std::size_t data_size;
  std::uint8_t* data;
  int range;   // 1: around every kernel, 2: the caller says where
  int replay;  // 3: the caller repeats the work for every pass
  std::size_t ranges_per_pass;
  std::uint16_t nesting_levels;
  std::uint16_t first_level;
  std::size_t pass;
  std::uint16_t target_level;
};
struct RangeStop : Header {
  RangeObject* object;
  std::size_t pass;
  std::size_t target_level;
  std::uint8_t all_passes_submitted;
};
struct RangePush : Header {
  RangeObject* object;
  const char* name;
};
struct RangeDecode : Header {
  RangeObject* object;
  std::size_t dropped;
};
struct RangeCount : Header {
  const std::uint8_t* data;
  std::size_t data_size;
  std::size_t ranges;
};
struct SampleAvailability : Header {
  std::size_t device;
  std::size_t image_size;
  std::uint8_t* image;
};
struct SamplingEnable : Header {
  std::size_t device;
  SamplingObject* object;
};
struct SamplingCall : Header {  // Disable, Start, Stop
  SamplingObject* object;
};
struct SamplingConfig : Header {
  SamplingObject* object;
  std::size_t config_size;
  const std::uint8_t* config;
  std::size_t buffer_size;  // on the device, for raw samples
  std::uint64_t interval;
  int trigger;      // 0: every `interval` system clocks, 1: nanoseconds
  int append_mode;  // 0: a full buffer keeps the oldest samples, 1: the latest
};
struct SamplingDataSize : Header {
  SamplingObject* object;
  const char** names;
  std::size_t count;
  std::uint32_t samples;
  std::size_t data_size;
};
struct SamplingInitData : Header {
  SamplingObject* object;
  std::size_t data_size;
  std::uint8_t* data;
};
struct SamplingDecode : Header {
  SamplingObject* object;
  std::uint8_t* data;
  std::size_t data_size;
  int stop_reason;  // 0: other, 1: `data` is full, 2: all was read
  std::uint8_t overflow;
};
struct SamplingCount : Header {
  const std::uint8_t* data;
  std::size_t data_size;
  std::size_t total, populated, completed;
};
struct SampleInfo : Header {
  SamplingObject* object;
  const std::uint8_t* data;
  std::size_t data_size;
  std::size_t index;
  std::uint64_t start, end;  // of the clock of the activity records
};
// Activity records: what the GPU and the driver did, and when (nanoseconds of one clock).
enum ActivityKind : std::uint32_t { kMemcpy = 1, kMemset = 2, kDriver = 4, kRuntime = 5, kKernel = 10, kExternal = 39 };
#define HYPERMLA_RECORD __attribute__((packed, aligned(8)))
struct HYPERMLA_RECORD KernelRecord {  // CUpti_ActivityKernel10, its beginning
  std::uint32_t kind;
  std::uint8_t cache_config, shared_config;
  std::uint16_t registers;
  std::uint32_t cache_requested, cache_executed;
  std::uint64_t start, end, completed;
  std::uint32_t device, context, stream;
  std::int32_t grid[3], block[3];
  std::int32_t static_shared, dynamic_shared;
  std::uint32_t local_per_thread, local_total, correlation;
  std::int64_t grid_id;
  const char* name;
};
struct HYPERMLA_RECORD MemcpyRecord {  // CUpti_ActivityMemcpy6, its beginning
  std::uint32_t kind;
  std::uint8_t copy_kind, from_kind, to_kind, flags;
  std::uint64_t bytes, start, end;
  std::uint32_t device, context, stream, correlation;
};
struct HYPERMLA_RECORD MemsetRecord {  // CUpti_ActivityMemset4, its beginning
  std::uint32_t kind, value;
  std::uint64_t bytes, start, end;
  std::uint32_t device, context, stream, correlation;
};
struct HYPERMLA_RECORD CallRecord {  // CUpti_ActivityAPI
  std::uint32_t kind, callback;
  std::uint64_t start, end;
  std::uint32_t process, thread, correlation, result;
};
struct HYPERMLA_RECORD ExternalRecord {  // CUpti_ActivityExternalCorrelation
  std::uint32_t kind, external_kind;
  std::uint64_t external;
  std::uint32_t correlation, reserved;
};
#undef HYPERMLA_RECORD

struct Library {
  int (*result_text)(int, const char**);              // cuptiGetResultString
  int (*version)(std::uint32_t*);                     // cuptiGetVersion
  int (*initialize)(Initialize*);                     // cuptiProfilerInitialize
  int (*deinitialize)(Initialize*);                   // cuptiProfilerDeInitialize
  int (*chip_name)(ChipName*);                        // cuptiDeviceGetChipName
  int (*counter_availability)(CounterAvailability*);  // cuptiProfilerGetCounterAvailability
  int (*host_initialize)(HostInitialize*);            // cuptiProfilerHostInitialize
  int (*host_deinitialize)(HostDeinitialize*);        // cuptiProfilerHostDeinitialize
  int (*host_add_metrics)(HostAddMetrics*);           // cuptiProfilerHostConfigAddMetrics
  int (*host_config_size)(HostConfigSize*);           // cuptiProfilerHostGetConfigImageSize
  int (*host_config)(HostConfig*);                    // cuptiProfilerHostGetConfigImage
  int (*host_passes)(HostPasses*);                    // cuptiProfilerHostGetNumOfPasses
  int (*host_evaluate)(HostEvaluate*);                // cuptiProfilerHostEvaluateToGpuValues
  int (*range_enable)(RangeEnable*);                  // cuptiRangeProfilerEnable
  int (*range_disable)(RangeCall*);                   // cuptiRangeProfilerDisable
  int (*range_start)(RangeCall*);                     // cuptiRangeProfilerStart
  int (*range_stop)(RangeStop*);                      // cuptiRangeProfilerStop
  int (*range_push)(RangePush*);                      // cuptiRangeProfilerPushRange
  int (*range_pop)(RangeCall*);                       // cuptiRangeProfilerPopRange
  int (*range_data_size)(RangeDataSize*);             // cuptiRangeProfilerGetCounterDataSize
  int (*range_init_data)(RangeInitData*);             // cuptiRangeProfilerCounterDataImageInitialize
  int (*range_config)(RangeConfig*);                  // cuptiRangeProfilerSetConfig
  int (*range_decode)(RangeDecode*);                  // cuptiRangeProfilerDecodeData
  int (*range_count)(RangeCount*);                    // cuptiRangeProfilerGetCounterDataInfo
  int (*sample_availability)(SampleAvailability*);    // cuptiPmSamplingGetCounterAvailability
  int (*sampling_enable)(SamplingEnable*);            // cuptiPmSamplingEnable
  int (*sampling_disable)(SamplingCall*);             // cuptiPmSamplingDisable
  int (*sampling_config)(SamplingConfig*);            // cuptiPmSamplingSetConfig
  int (*sampling_data_size)(SamplingDataSize*);       // cuptiPmSamplingGetCounterDataSize
  int (*sampling_init_data)(SamplingInitData*);       // cuptiPmSamplingCounterDataImageInitialize
  int (*sampling_start)(SamplingCall*);               // cuptiPmSamplingStart
  int (*sampling_stop)(SamplingCall*);                // cuptiPmSamplingStop
  int (*sampling_decode)(SamplingDecode*);            // cuptiPmSamplingDecodeData
  int (*sampling_count)(SamplingCount*);              // cuptiPmSamplingGetCounterDataInfo
  int (*sample_info)(SampleInfo*);                    // cuptiPmSamplingCounterDataGetSampleInfo
  int (*activity_register)(void (*)(std::uint8_t**, std::size_t*, std::size_t*),
                           void (*)(CUctx_st*, std::uint32_t, std::uint8_t*, std::size_t, std::size_t));
  int (*activity_enable)(std::uint32_t);
  int (*activity_disable)(std::uint32_t);
  int (*activity_flush)(std::uint32_t);  // 1: also records not finished
  int (*activity_next)(std::uint8_t*, std::size_t, std::uint8_t**);
  int (*activity_push_external)(int, std::uint64_t);
  int (*activity_pop_external)(int, std::uint64_t*);
  int (*timestamp)(std::uint64_t*);
  int (*callback_name)(int, std::uint32_t, const char**);  // domain 1: driver, 2: runtime

  std::string path;

  // The first of `candidates` (paths, or names for the loader's own search) that loads. Throws Error saying where
  // CUPTI comes from when none does. Loaded once and kept.
  static std::shared_ptr<const Library> load(const std::vector<std::filesystem::path>& candidates);

  std::string version_text() const;
  // Throws Error with CUPTI's own words, and with what to do for the failures users meet: no permission, another
  // profiler.
  void check(int result, const char* call) const;
};

// A call that fails throws: HYPERMLA_CUPTI(library, range_start, &call).
#define HYPERMLA_CUPTI(library, function, ...) (library).check((library).function(__VA_ARGS__), #function)

// A structure, zeroed, with its size set. `last` is its last field.
#define HYPERMLA_CUPTI_PARAMS(Type, name, last) \
  ::hypermla::cupti::Type name{};               \
  name.size = std::size_t(reinterpret_cast<char*>(&name.last) - reinterpret_cast<char*>(&name)) + sizeof name.last

}  // namespace hypermla::cupti
