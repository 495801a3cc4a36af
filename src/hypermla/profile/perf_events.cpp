#include "hypermla/profile/perf_events.h"

#include <linux/perf_event.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"

namespace hypermla {
namespace {

struct Event {
  const char* name;
  std::uint64_t config;
};
constexpr Event kEvents[] = {{"cpu_cycles", PERF_COUNT_HW_CPU_CYCLES},
                             {"cpu_instructions", PERF_COUNT_HW_INSTRUCTIONS},
                             {"cpu_cache_misses", PERF_COUNT_HW_CACHE_MISSES},
                             {"cpu_branch_misses", PERF_COUNT_HW_BRANCH_MISSES}};

// One event on one thread, and on the threads that it starts from now on.
FileDescriptor open_event(std::uint64_t config, pid_t thread) {
  perf_event_attr attributes{};
  attributes.size = sizeof attributes;
  attributes.type = PERF_TYPE_HARDWARE;
  attributes.config = config;
  attributes.disabled = 1;
  attributes.inherit = 1;
  attributes.exclude_kernel = 1;
  attributes.exclude_hv = 1;
  attributes.read_format = PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING;
  return FileDescriptor(int(::syscall(SYS_perf_event_open, &attributes, thread, -1, -1, PERF_FLAG_FD_CLOEXEC)));
}

}  // namespace

std::map<std::string, double> count_cpu(const std::function<void()>& work) {
  std::map<std::string, double> counters;
  struct Open {
    const char* name;
    FileDescriptor file;
  };
  std::vector<Open> open;
  int error = 0;
  for (const Event& event : kEvents)
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      FileDescriptor file = open_event(event.config, std::stoi(task.path().filename().string()));
      if (file)
        open.push_back({event.name, std::move(file)});
      else
        error = errno;
    }
  for (const Open& one : open) ::ioctl(one.file.number(), PERF_EVENT_IOC_ENABLE, 0);
  work();
  for (const Open& one : open) ::ioctl(one.file.number(), PERF_EVENT_IOC_DISABLE, 0);
  for (const Open& one : open) {
    std::uint64_t value[3] = {};  // count, time enabled, time running
    if (::read(one.file.number(), value, sizeof value) == sizeof value && value[2] > 0)
      counters[one.name] += double(value[0]) * double(value[1]) / double(value[2]);
  }
  if (!counters.empty()) return counters;
  if (error == EACCES || error == EPERM)
    fail("perf_event_open is not permitted: lower /proc/sys/kernel/perf_event_paranoid to 2 or less");
  fail("this machine shows no hardware counters (perf_event_open: {})", error ? std::strerror(error) : "no event ran");
}

}  // namespace hypermla
