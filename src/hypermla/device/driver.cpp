#include "hypermla/device/driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>

#include "hypermla/base/error.h"

namespace hypermla {
namespace {

std::atomic<pid_t> g_process = 0;  // that initialised the driver; 0: none yet

#define HYPERMLA_TEXT(name) #name
#define HYPERMLA_SYMBOL(name) HYPERMLA_TEXT(name)  // expanded first: the headers version names by macro

CudaDriver load_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library)
    fail(
        "no CUDA driver (libcuda.so.1) on this machine; choose the device cpu (--device=cpu), or install NVIDIA's "
        "driver");
  CudaDriver driver;
#define HYPERMLA_LOAD(name)                                                                     \
  driver.name = reinterpret_cast<decltype(driver.name)>(dlsym(library, HYPERMLA_SYMBOL(name))); \
  if (!driver.name) fail("the CUDA driver lacks {}; update it to release 580 or newer", HYPERMLA_SYMBOL(name));
  HYPERMLA_CUDA_FUNCTIONS(HYPERMLA_LOAD)
#undef HYPERMLA_LOAD
  if (CUresult result = driver.cuInit(0); result != CUDA_SUCCESS) {
    const char* text = nullptr;
    driver.cuGetErrorString(result, &text);
    fail("the CUDA driver does not start ({}); choose the device cpu (--device=cpu), or check nvidia-smi",
         text ? text : "unknown");
  }
  g_process = ::getpid();
  return driver;
}

// NVML's C interface needs three structs of integers. They are declared here because no package holds only its header.
using NvmlDevice = void*;
struct Nvml {
  int (*init)() = nullptr;
  int (*by_pci)(const char*, NvmlDevice*) = nullptr;
  int (*clock)(NvmlDevice, int, unsigned*) = nullptr;
  int (*power)(NvmlDevice, unsigned*) = nullptr;
  int (*temperature)(NvmlDevice, int, unsigned*) = nullptr;
  int (*driver)(char*, unsigned) = nullptr;
  bool usable = false;
};
constexpr int kSmClock = 1;
constexpr int kGpuTemperature = 0;

const Nvml& nvml() {
  static const Nvml instance = [] {
    Nvml n;
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return n;
    auto load = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      return function != nullptr;
    };
    n.usable = load(n.init, "nvmlInit_v2") && load(n.by_pci, "nvmlDeviceGetHandleByPciBusId_v2") &&
               load(n.clock, "nvmlDeviceGetClockInfo") && load(n.power, "nvmlDeviceGetPowerUsage") &&
               load(n.temperature, "nvmlDeviceGetTemperature") && load(n.driver, "nvmlSystemGetDriverVersion") &&
               n.init() == 0;
    return n;
  }();
  return instance;
}

}  // namespace

const CudaDriver& CudaDriver::get() {
  static const CudaDriver driver = load_driver();
  return driver;
}

void require_own_driver() {
  if (const pid_t process = g_process; process != 0 && process != ::getpid())
    fail(
        "this process was forked from one that uses a GPU, and CUDA does not follow a fork: start it afresh (in Python "
        "multiprocessing.set_start_method(\"spawn\")), or fork before the first use");
}

void cuda_check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  require_own_driver();
  const char* text = nullptr;
  CudaDriver::get().cuGetErrorString(result, &text);
  fail("CUDA call failed: {}: {}", call, text ? text : "unknown error");
}

PowerMeter::PowerMeter(const std::string& pci_bus_id) {
  if (nvml().usable && nvml().by_pci(pci_bus_id.c_str(), &board_) != 0) board_ = nullptr;
}

std::optional<PowerSample> PowerMeter::sample() const {
  if (!board_) return std::nullopt;
  unsigned clock = 0, milliwatts = 0, celsius = 0;
  if (nvml().clock(board_, kSmClock, &clock) != 0 || nvml().power(board_, &milliwatts) != 0) return std::nullopt;
  nvml().temperature(board_, kGpuTemperature, &celsius);
  return PowerSample{double(clock), milliwatts / 1000.0, double(celsius)};
}

std::string PowerMeter::driver_version() const {
  char version[96] = "";
  if (!nvml().usable || nvml().driver(version, sizeof version) != 0) return "";
  return version;
}

}  // namespace hypermla
