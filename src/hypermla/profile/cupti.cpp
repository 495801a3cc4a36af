#include "hypermla/profile/cupti.h"

#include <dlfcn.h>

#include <mutex>

#include "hypermla/base/error.h"

namespace hypermla::cupti {
namespace {

std::shared_ptr<Library> open(const std::filesystem::path& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) return nullptr;
  auto library = std::make_shared<Library>();
  bool complete = true;
  auto load = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
    complete = complete && function;
  };
#define HYPERMLA_LOAD(name) load(library->name, #name);
  HYPERMLA_CUPTI_FUNCTIONS(HYPERMLA_LOAD)
#undef HYPERMLA_LOAD
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
  HYPERMLA_CUPTI(*this, cuptiGetVersion, &number);
  return fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
}

void Library::check(CUptiResult result, const char* call) const {
  if (result == CUPTI_SUCCESS) return;
  const char* text = nullptr;
  cuptiGetResultString(result, &text);
  const char* advice = "";
  if (result == CUPTI_ERROR_INSUFFICIENT_PRIVILEGES || result == CUPTI_ERROR_VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES)
    advice = ": counters need root, CAP_SYS_ADMIN, or the driver's option NVreg_RestrictProfilingToAdminUsers=0";
  if (result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED || result == CUPTI_ERROR_HARDWARE_BUSY)
    advice = ": another profiler uses the counters; end it first";
  fail("CUPTI's {} failed ({}){}", call, text ? text : std::to_string(result), advice);
}

}  // namespace hypermla::cupti
