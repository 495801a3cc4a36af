#include "hypermla/profile/profilers.h"

#include <dlfcn.h>

#include <chrono>

#include "hypermla/base/error.h"
#include "hypermla/profile/frame.h"

namespace hypermla {
namespace {

constexpr const char* kModes[] = {"annotation", "event", "ncu", "nsys", "disabled"};

// What a call of run() costs the host: the mean over launches that the device has not caught up with.
double host_microseconds(Device& device, Executable& executable) {
  constexpr int kRuns = 100;
  executable.run(device.stream());
  device.synchronize();
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kRuns; ++i) executable.run(device.stream());
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  device.synchronize();
  return seconds / kRuns * 1e6;
}

// The driver's marks for profilers, declared in a header of their own (cudaProfiler.h); both do nothing when no
// profiler is attached.
void mark(Device& device, const char* function) {
  if (!device.is_gpu()) return;
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (auto call = driver ? reinterpret_cast<int (*)()>(dlsym(driver, function)) : nullptr) call();
}

}  // namespace

ProfileMode profile_mode_from_name(const std::string& name) {
  for (int i = 0; i < 5; ++i)
    if (name == kModes[i]) return ProfileMode(i);
  fail("unknown profiling mode '{}'; choose one of {}", name, fmt::join(kModes, ", "));
}

std::string profile_mode_name(ProfileMode mode) { return kModes[int(mode)]; }

ProfileResult event_profile(const ProfileRequest& request) {
  Frame frame(request, ProfileMode::event);
  frame.time(request.sustained_seconds);
  if (request.device.is_gpu()) frame.profile.host_us_per_run = host_microseconds(request.device, request.executable);
  frame.judge();
  return frame.publish();
}

ProfileResult profile(const ProfileRequest& request, ProfileMode mode) {
  switch (mode) {
    case ProfileMode::annotation:
      return annotation_profile(request);
    case ProfileMode::event:
      return event_profile(request);
    case ProfileMode::nsys:
      return nsys_profile(request);
    case ProfileMode::ncu:
      return ncu_profile(request);
    case ProfileMode::disabled:
      break;
  }
  fail("nothing is profiled in the mode disabled; choose annotation, event, ncu or nsys");
}

void require_utf8(std::string_view what, const std::string& text) {
  try {
    (void)Json(text).dump();
  } catch (const Json::exception&) {
    fail("{} is no UTF-8 text, which a profile could not hold; give it in UTF-8", what);
  }
}

std::vector<std::string> relaunch_command(const ProfileRequest& request) {
  if (request.tools.program.empty()) fail("it runs this kernel again in the program hypermla, which was not found");
  const KernelEntry& kernel = request.kernel;
  std::vector<std::string> command = {request.tools.program.string(), "kernel",
                                      kernel.language + "." + kernel.layer + "." + kernel.design, kernel.version};
  auto add = [&](const std::vector<FieldRef>& fields) {
    for (const FieldRef& field : fields) command.push_back(fmt::format("--{}={}", field.name, field.text()));
  };
  add(request.plan.problem_fields());
  if (request.tuning.stages.empty()) {
    add(request.plan.tiling_fields());
    command.push_back("--no_autotune");
  } else {
    command.push_back("--tune_max_iters=1");  // what was measured is remembered: nothing is measured again
  }
  command.push_back("--device=" + request.device_name);
  if (request.seed) command.push_back(fmt::format("--seed={}", request.seed));
  command.push_back("--prof_type=disabled");
  return command;
}

void run_for_profilers(Executable& executable, Device& device) {
  mark(device, "cuProfilerStart");
  executable.run(device.stream());
  device.synchronize();
  mark(device, "cuProfilerStop");
}

}  // namespace hypermla
