// A CUDA driver for machines without a GPU: it says that it is an H200, gives the host's memory and runs nothing. A
// program on it asks for the kernels that it would ask for on an H200, so that they are compiled; what it computes is
// wrong. scripts/pack_gpu_checks.sh runs tests on it, and tests/package/driver_test.py asks what it was asked.
//
// cuda.h names newer variants of functions by macro, here as in driver.cpp, which looks them up.
#include <cuda.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr unsigned kProcessors = 132, kProcessorsOfAGroup = 8;
constexpr std::size_t kMemory = 150'000'000'000, kCache = 60 << 20;
constexpr std::size_t kMostMoved = 256 << 20;  // bytes; what is larger is left out: the host may lack the memory

std::mutex g_mutex;
std::map<CUdeviceptr, std::size_t> g_memory;  // bytes of every allocation
std::string g_calls;  // since they were last asked for, each with a space behind it; "!": without a context
thread_local CUcontext t_context = nullptr;      // what is current
thread_local std::vector<CUcontext> t_contexts;  // below it

void note(const char* call, const char* behind = " ") {
  std::lock_guard lock(g_mutex);
  g_calls.append(call).append(behind);
}
// Of what works only where a context is current.
CUresult in_context(const char* call = __builtin_FUNCTION()) {
  note(call, t_context ? " " : "! ");
  return t_context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

char g_object;  // behind every handle
template <class Handle>
CUresult give(Handle* handle, const char* call = __builtin_FUNCTION()) {
  *handle = reinterpret_cast<Handle>(&g_object);
  note(call);
  return CUDA_SUCCESS;
}

void* host(CUdeviceptr data) { return reinterpret_cast<void*>(data); }

CUresult move(void* to, const void* from, std::size_t bytes, const char* call = __builtin_FUNCTION()) {
  if (bytes <= kMostMoved) std::memcpy(to, from, bytes);
  return in_context(call);
}

}  // namespace

extern "C" {

// Every call since the last time.
const char* stub_cuda_calls() {
  static std::string calls;
  std::lock_guard lock(g_mutex);
  calls = std::exchange(g_calls, {});
  return calls.c_str();
}

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}
#define HYPERMLA_NOTHING(name, ...) \
  CUresult name(__VA_ARGS__) { return in_context(); }
HYPERMLA_NOTHING(cuCtxSynchronize)
HYPERMLA_NOTHING(cuFuncLoad, CUfunction)
HYPERMLA_NOTHING(cuFuncSetAttribute, CUfunction, CUfunction_attribute, int)
HYPERMLA_NOTHING(cuStreamDestroy, CUstream)
HYPERMLA_NOTHING(cuStreamSynchronize, CUstream)
HYPERMLA_NOTHING(cuStreamWaitEvent, CUstream, CUevent, unsigned)
HYPERMLA_NOTHING(cuStreamBeginCapture, CUstream, CUstreamCaptureMode)
HYPERMLA_NOTHING(cuGreenCtxDestroy, CUgreenCtx)
HYPERMLA_NOTHING(cuGraphLaunch, CUgraphExec, CUstream)
HYPERMLA_NOTHING(cuGraphDestroy, CUgraph)
HYPERMLA_NOTHING(cuGraphExecDestroy, CUgraphExec)
HYPERMLA_NOTHING(cuEventDestroy, CUevent)
HYPERMLA_NOTHING(cuEventRecord, CUevent, CUstream)
HYPERMLA_NOTHING(cuEventSynchronize, CUevent)
#undef HYPERMLA_NOTHING
CUresult cuLaunchKernelEx(const CUlaunchConfig* how, CUfunction, void**, void**) {
  return in_context(("launch:" + std::to_string(how->gridDimX) + "x" + std::to_string(how->gridDimY) + "x" +
                     std::to_string(how->gridDimZ))
                        .c_str());
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return give(context); }
CUresult cuCtxSetCurrent(CUcontext context) {
  t_context = context;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = t_context;
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext context) {
  t_contexts.push_back(std::exchange(t_context, context));
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext* context) {
  *context = std::exchange(t_context, t_contexts.back());
  t_contexts.pop_back();
  return CUDA_SUCCESS;
}
CUresult cuCtxFromGreenCtx(CUcontext* context, CUgreenCtx) { return give(context); }
CUresult cuGreenCtxCreate(CUgreenCtx* context, CUdevResourceDesc, CUdevice, unsigned) { return give(context); }
CUresult cuGreenCtxStreamCreate(CUstream* stream, CUgreenCtx, unsigned, int) { return give(stream); }
CUresult cuDevResourceGenerateDesc(CUdevResourceDesc* described, CUdevResource*, unsigned) { return give(described); }
CUresult cuModuleLoadData(CUmodule* module, const void*) { return give(module); }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) { return give(function); }
CUresult cuStreamCreate(CUstream* stream, unsigned) { return give(stream); }
CUresult cuStreamEndCapture(CUstream, CUgraph* graph) { return give(graph); }
CUresult cuGraphInstantiate(CUgraphExec* recording, CUgraph, unsigned long long) { return give(recording); }
CUresult cuEventCreate(CUevent* event, unsigned) { return give(event); }

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "the stub of a driver refuses";
  return CUDA_SUCCESS;
}
// Nothing of this library calls it, but the device compilers do where they find a driver, unlooked at.
CUresult cuGetExportTable(const void** table, const CUuuid*) {
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}
CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  *count = 1;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int) {
  *device = 0;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* device) { return cuDeviceGet(device, 0); }
CUresult cuDeviceGetName(char* name, int size, CUdevice) {
  std::snprintf(name, size, "NVIDIA H200");
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = 9;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = 0;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = kProcessors;
      break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
      *value = int(kCache);
      break;
    default:
      *value = 1;
  }
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction) {
  *value = 0;
  return CUDA_SUCCESS;
}
CUresult cuEventElapsedTime(float* milliseconds, CUevent, CUevent) {
  *milliseconds = 0.1f;
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(std::size_t* bytes, CUdevice) {
  *bytes = kMemory;
  return CUDA_SUCCESS;
}
CUresult cuMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = *total = kMemory;
  return CUDA_SUCCESS;
}
// Pages that are never written take no memory.
CUresult cuMemAlloc(CUdeviceptr* data, std::size_t bytes) {
  void* pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *data = reinterpret_cast<CUdeviceptr>(pages);
  {
    std::lock_guard lock(g_mutex);
    g_memory[*data] = bytes;
  }
  return in_context();
}
CUresult cuMemFree(CUdeviceptr data) {
  if (in_context() != CUDA_SUCCESS) return CUDA_ERROR_INVALID_CONTEXT;
  std::lock_guard lock(g_mutex);
  const auto found = g_memory.find(data);
  if (found == g_memory.end()) return CUDA_ERROR_INVALID_VALUE;
  ::munmap(host(data), found->second);
  g_memory.erase(found);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, std::size_t bytes) { return move(host(to), from, bytes); }
CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, std::size_t bytes) { return move(to, host(from), bytes); }
CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) { return move(host(to), host(from), bytes); }
CUresult cuMemsetD8(CUdeviceptr data, unsigned char byte, std::size_t bytes) {
  if (bytes <= kMostMoved) std::memset(host(data), byte, bytes);
  return in_context();
}
CUresult cuMemsetD32Async(CUdeviceptr data, unsigned word, std::size_t count, CUstream) {
  if (count <= kMostMoved / sizeof word) std::fill_n(static_cast<unsigned*>(host(data)), count, word);
  return in_context();
}

CUresult cuDeviceGetDevResource(CUdevice, CUdevResource* resource, CUdevResourceType) {
  std::memset(resource, 0, sizeof *resource);
  resource->sm.smCount = kProcessors;
  return CUDA_SUCCESS;
}
CUresult cuDevSmResourceSplitByCount(CUdevResource* part, unsigned* parts, const CUdevResource* whole,
                                     CUdevResource* rest, unsigned, unsigned least) {
  const unsigned count = (least + kProcessorsOfAGroup - 1) / kProcessorsOfAGroup * kProcessorsOfAGroup;
  if (count >= whole->sm.smCount) return CUDA_ERROR_INVALID_VALUE;
  *parts = 1;
  *part = *rest = *whole;
  part->sm.smCount = count;
  rest->sm.smCount = whole->sm.smCount - count;
  return CUDA_SUCCESS;
}

}  // extern "C"
