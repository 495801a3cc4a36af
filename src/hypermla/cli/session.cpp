#include "hypermla/cli/session.h"

#include <algorithm>
#include <iostream>
#include <iterator>

#include "hypermla/base/error.h"
#include "hypermla/base/process.h"
#include "hypermla/cli/commands.h"
#include "hypermla/cli/signals.h"
#include "hypermla/compile/backends.h"

namespace hypermla {

CompilerConfig worker_config(const Environment& environment) {
  CompilerConfig config = environment.compiler_config();
  config.worker = std::filesystem::read_symlink("/proc/self/exe");
  return config;
}

DeviceTable known_devices(const Environment& environment) {
  DeviceTable devices = environment.devices();
  if (!devices.ignored().empty()) std::cerr << "hypermla: measured devices are left out: " << devices.ignored() << "\n";
  return devices;
}

Session::Session(const std::string& name)
    : environment(Environment::detect()),
      devices(known_devices(environment)),
      device(make_device(name)),
      planned(planned_device(devices, *device)),
      compiler(worker_config(environment)) {
  for (const std::string& kernel : environment.unbuilt_kernels())
    std::cerr << "hypermla: " << kernel << " is not part of this program: run ./hypermla, or build it with "
              << "-DHYPERMLA_KERNELS=" << shell_word(environment.own_kernels.string()) << "\n";
}

void Session::runs(const std::string& what) const {
  if (device->is_gpu()) return;
  std::string line = what.substr(0, what.find_last_not_of('\n') + 1);
  std::replace(line.begin(), line.end(), '\n', ',');
  say_where_it_crashes(
      fmt::format("a kernel crashed in {}; look in it and in its plan for an access outside of a tensor, for an array "
                  "that no stack has room for, or for a division by zero",
                  line));
}

int compile_job_command(const Words&) try {
  const Json job = Json::parse(std::string(std::istreambuf_iterator<char>(std::cin), {}));
  end_with_the_caller(job.at("caller"));
  run_compile_job(job);
  return 0;
} catch (const CompileError& error) {  // the parent process reports both as its own error
  std::cerr << error.what() << "\n";
  return kRefused;
} catch (const Error& error) {
  std::cerr << error.what() << "\n";
  return 2;
} catch (const Json::exception&) {
  fail("compile-job reads a job in JSON from this program itself; run `hypermla compile`");
}

}  // namespace hypermla
