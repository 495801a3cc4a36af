// The objects that every command that runs kernels needs.
#pragma once

#include <memory>
#include <string>

#include "hypermla/api/environment.h"

namespace hypermla {

struct Session {
  // `device` as in make_device().
  explicit Session(const std::string& device);

  // To be told before kernels run, and what: on a CPU one that crashes ends this program, which then says so.
  void runs(const std::string& what) const;

  Environment environment;
  DeviceTable devices;
  std::shared_ptr<Device> device;
  PlannedDevice planned;  // the device, as plans see it
  Compiler compiler;
};

// The table of devices; says on standard error where the measured ones had to be left out.
DeviceTable known_devices(const Environment& environment);

// The compiler of a command: its jobs are processes of this very program.
CompilerConfig worker_config(const Environment& environment);

}  // namespace hypermla
