#include "hypermla/profile/activity.h"

#include <cxxabi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "hypermla/base/error.h"
#include "hypermla/device/driver.h"
#include "hypermla/profile/sampling.h"

namespace hypermla {
namespace {

constexpr std::size_t kBufferBytes = 4 << 20;
constexpr CUpti_ExternalCorrelationKind kExternalKind = CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0;
constexpr CUpti_ActivityKind kKinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                         CUPTI_ACTIVITY_KIND_MEMCPY,
                                         CUPTI_ACTIVITY_KIND_MEMSET,
                                         CUPTI_ACTIVITY_KIND_DRIVER,
                                         CUPTI_ACTIVITY_KIND_RUNTIME,
                                         CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION};

std::string readable(const char* symbol) {
  int status = 0;
  char* text = abi::__cxa_demangle(symbol, nullptr, nullptr, &status);
  const std::string name = stage_name(status == 0 ? text : symbol);
  std::free(text);
  return name;
}

// CUPTI's callbacks carry no pointer of the caller's: one recording at a time.
struct ActivityLog {
  const cupti::Library* library = nullptr;
  Timeline timeline;
  std::vector<std::pair<std::uint64_t, std::uint32_t>> external;  // range and correlation
  std::size_t unreadable = 0;
};
std::mutex recording_mutex;
ActivityLog* recording = nullptr;

// Fields that both CUPTI's records of that kind and its older ones have; a record may end behind them.
template <class Record>
const Record& as(const CUpti_Activity* record) {
  return *reinterpret_cast<const Record*>(record);
}

template <class Record>
DeviceOperation operation_of(const Record& record, DeviceOperation::Kind kind, const std::string& name) {
  DeviceOperation operation;
  operation.name = name;
  operation.kind = kind;
  operation.start = record.start;
  operation.end = record.end;
  operation.device = record.deviceId;
  operation.context = record.contextId;
  operation.stream = record.streamId;
  operation.correlation = record.correlationId;
  return operation;
}

void add_record(ActivityLog& to, const CUpti_Activity* activity) {
  DeviceOperation operation;
  switch (activity->kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
      const auto& record = as<CUpti_ActivityKernel10>(activity);
      operation = operation_of(record, DeviceOperation::Kind::kernel, readable(record.name));
      const int grid[] = {record.gridX, record.gridY, record.gridZ};
      const int block[] = {record.blockX, record.blockY, record.blockZ};
      std::copy_n(grid, 3, operation.grid);
      std::copy_n(block, 3, operation.block);
      operation.registers = record.registersPerThread;
      operation.static_shared = record.staticSharedMemory;
      operation.dynamic_shared = record.dynamicSharedMemory;
      break;
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY: {
      const auto& record = as<CUpti_ActivityMemcpy6>(activity);
      operation = operation_of(record, DeviceOperation::Kind::copy, "[CUDA memcpy]");
      operation.bytes = record.bytes;
      break;
    }
    case CUPTI_ACTIVITY_KIND_MEMSET: {
      const auto& record = as<CUpti_ActivityMemset4>(activity);
      operation = operation_of(record, DeviceOperation::Kind::fill, "[CUDA memset]");
      operation.bytes = record.bytes;
      break;
    }
    case CUPTI_ACTIVITY_KIND_DRIVER:
    case CUPTI_ACTIVITY_KIND_RUNTIME: {
      const auto& record = as<CUpti_ActivityAPI>(activity);
      const bool is_driver = activity->kind == CUPTI_ACTIVITY_KIND_DRIVER;
      const char* name = nullptr;
      to.library->cuptiGetCallbackName(is_driver ? CUPTI_CB_DOMAIN_DRIVER_API : CUPTI_CB_DOMAIN_RUNTIME_API,
                                       record.cbid, &name);
      to.timeline.calls.push_back(
          {name ? name : "unknown call", record.start, record.end, record.threadId, record.correlationId});
      return;
    }
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: {
      const auto& record = as<CUpti_ActivityExternalCorrelation>(activity);
      to.external.emplace_back(record.externalId, record.correlationId);
      return;
    }
    default:
      return;
  }
  if (operation.end > operation.start)
    to.timeline.operations.push_back(operation);
  else
    ++to.unreadable;  // CUPTI ran out of device memory for time stamps
}

void buffer_requested(std::uint8_t** buffer, std::size_t* bytes, std::size_t* records) {
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(8, kBufferBytes));
  *bytes = *buffer ? kBufferBytes : 0;
  *records = 0;  // as many as fit
}

void buffer_completed(CUctx_st*, std::uint32_t, std::uint8_t* buffer, std::size_t, std::size_t valid) {
  {
    std::lock_guard lock(recording_mutex);
    CUpti_Activity* record = nullptr;
    while (recording && recording->library->cuptiActivityGetNextRecord(buffer, valid, &record) == 0)
      add_record(*recording, record);
  }
  std::free(buffer);
}

// Samples as dense as fit into what CUPTI keeps, with room for twice the expected time.
std::unique_ptr<Sampler> make_sampler(const cupti::Library& library, double expected_seconds) {
  constexpr std::size_t kCount = 8192;  // 24 KB of host memory each
  constexpr double kShortest = 2e-6;    // still without holes on an H200
  constexpr double kOverhead = 10e-3;   // of the first launches that are recorded, and of the host
  const double interval = std::max(kShortest, 2 * (expected_seconds + kOverhead) / kCount);
  CUdevice ordinal = 0;
  HYPERMLA_CUDA(cuCtxGetDevice(&ordinal));
  return std::make_unique<Sampler>(library, std::size_t(ordinal), std::uint64_t(interval * 1e9), kCount);
}

// Those while operations ran, and one more at either end, so that a track begins and ends at rest.
std::vector<CounterSample> around(const std::vector<CounterSample>& samples,
                                  const std::vector<DeviceOperation>& operations) {
  std::uint64_t begin = ~std::uint64_t{0}, end = 0;
  for (const DeviceOperation& operation : operations) {
    begin = std::min(begin, operation.start);
    end = std::max(end, operation.end);
  }
  auto first = std::find_if(samples.begin(), samples.end(), [&](auto& sample) { return sample.end > begin; });
  auto last = std::find_if(first, samples.end(), [&](auto& sample) { return sample.start >= end; });
  if (first == last) fail("its time stamps are not of the clock of the activity records");
  if (first != samples.begin()) --first;
  if (last != samples.end()) ++last;
  return {first, last};
}

}  // namespace

Timeline record_timeline(const cupti::Library& library, Device& device, const std::vector<NamedWork>& stages,
                         int repetitions) {
  ActivityLog result;
  result.library = &library;
  device.make_current();
  auto run_once = [&] {
    double seconds = 0;
    for (const NamedWork& stage : stages) seconds += device.time(stage.work);
    return seconds;
  };
  run_once();  // code is loaded before the clock runs
  const double expected_seconds = run_once() * repetitions;
  std::unique_ptr<Sampler> sampler;
  auto try_sampling = [&](auto step) {
    try {
      step();
    } catch (const Error& error) {
      sampler.reset();
      result.timeline.samples.clear();
      result.timeline.no_samples = fmt::format("PM sampling: {}", error.what());
    }
  };
  try_sampling([&] { sampler = make_sampler(library, expected_seconds); });
  {
    std::lock_guard lock(recording_mutex);
    if (recording) fail("a timeline is being recorded already; wait for it");
    recording = &result;
  }
  struct Stop {
    const cupti::Library& library;
    ~Stop() {
      for (auto kind : kKinds) library.cuptiActivityDisable(kind);
      library.cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
      std::lock_guard lock(recording_mutex);
      recording = nullptr;
    }
  };
  {
    const Stop stop{library};
    HYPERMLA_CUPTI(library, cuptiActivityRegisterCallbacks, buffer_requested, buffer_completed);
    for (auto kind : kKinds) HYPERMLA_CUPTI(library, cuptiActivityEnable, kind);
    if (sampler) try_sampling([&] { sampler->start(); });
    const auto process = std::uint32_t(::getpid()), thread = std::uint32_t(::syscall(SYS_gettid));
    for (int i = 0; i < repetitions; ++i)
      for (const NamedWork& stage : stages) {
        HostRange range{stage.name, 0, 0, process, thread, {}};
        library.cuptiGetTimestamp(&range.start);
        library.cuptiActivityPushExternalCorrelationId(kExternalKind, result.timeline.ranges.size());
        stage.work(device.stream());
        library.cuptiActivityPopExternalCorrelationId(kExternalKind, nullptr);
        library.cuptiGetTimestamp(&range.end);
        result.timeline.ranges.push_back(range);
      }
    device.synchronize();
    if (sampler) try_sampling([&] { result.timeline.samples = sampler->stop(); });
  }
  for (const auto& [range, correlation] : result.external)
    if (range < result.timeline.ranges.size()) result.timeline.ranges[range].correlations.push_back(correlation);
  if (result.timeline.operations.empty())
    fail("CUPTI recorded no operation{}; is another profiler attached?",
         result.unreadable ? fmt::format(" ({} without time stamps)", result.unreadable) : "");
  if (sampler)
    try_sampling([&] { result.timeline.samples = around(result.timeline.samples, result.timeline.operations); });
  return result.timeline;
}

}  // namespace hypermla
