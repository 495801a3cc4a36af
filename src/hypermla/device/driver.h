// The CUDA driver API and NVML, found at run time. Types come from the CUDA headers; functions are looked up by name,
// so a machine without a driver runs everything that needs no GPU.
#pragma once

#include <cuda.h>

#include <optional>
#include <string>

#include "hypermla/device/device.h"

namespace hypermla {

// One line per function: the name under which the driver exports it.
#define HYPERMLA_CUDA_FUNCTIONS(X)                                                                               \
  X(cuInit)                                                                                                      \
  X(cuDriverGetVersion)                                                                                          \
  X(cuGetErrorString) X(cuDeviceGetCount) X(cuDeviceGet) X(cuDeviceGetName) X(cuDeviceGetAttribute)              \
      X(cuDeviceTotalMem) X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) X(cuCtxGetCurrent) X(cuCtxGetDevice)    \
          X(cuCtxSynchronize) X(cuMemAlloc) X(cuMemFree) X(cuMemGetInfo) X(cuMemcpyHtoD) X(cuMemcpyDtoH)         \
              X(cuMemcpyDtoD) X(cuMemsetD8) X(cuMemsetD32Async) X(cuModuleLoadData) X(cuModuleGetFunction)       \
                  X(cuFuncLoad) X(cuFuncGetAttribute) X(cuFuncSetAttribute) X(cuLaunchKernelEx)                  \
                      X(cuTensorMapEncodeTiled) X(cuStreamCreate) X(cuStreamDestroy) X(cuStreamSynchronize)      \
                          X(cuStreamWaitEvent) X(cuCtxPushCurrent) X(cuCtxPopCurrent) X(cuCtxFromGreenCtx)       \
                              X(cuGreenCtxCreate) X(cuGreenCtxDestroy) X(cuGreenCtxStreamCreate)                 \
                                  X(cuDeviceGetDevResource) X(cuDevSmResourceSplitByCount)                       \
                                      X(cuDevResourceGenerateDesc) X(cuStreamBeginCapture) X(cuStreamEndCapture) \
                                          X(cuGraphInstantiate) X(cuGraphLaunch) X(cuGraphDestroy)               \
                                              X(cuGraphExecDestroy) X(cuEventCreate) X(cuEventDestroy)           \
                                                  X(cuEventRecord) X(cuEventSynchronize) X(cuEventElapsedTime)

struct CudaDriver {
#define HYPERMLA_DECLARE(name) decltype(&::name) name = nullptr;
  HYPERMLA_CUDA_FUNCTIONS(HYPERMLA_DECLARE)
#undef HYPERMLA_DECLARE

  // The driver, initialised; throws Error with the reason when there is none.
  static const CudaDriver& get();
};

// Throws Error in a process that was forked after another initialised the driver.
void require_own_driver();
// Throws Error naming the call and the driver's own words.
void cuda_check(CUresult result, const char* call);
#define HYPERMLA_CUDA(call) ::hypermla::cuda_check(::hypermla::CudaDriver::get().call, #call)

// NVML for one board, by CUDA ordinal. Absent library or permission: no samples, no error.
class PowerMeter {
 public:
  explicit PowerMeter(const std::string& pci_bus_id);
  std::optional<PowerSample> sample() const;
  std::string driver_version() const;

 private:
  void* board_ = nullptr;
};

}  // namespace hypermla
