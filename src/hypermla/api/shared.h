// What all kernels of a process share: the environment is read and the compiler's threads are started once, and again
// in a forked child.
#pragma once

#include "hypermla/api/environment.h"
#include "hypermla/base/per_process.h"

namespace hypermla {

struct Shared {
  Environment environment = Environment::detect();
  DeviceTable devices = environment.devices();
  Compiler compiler{environment.compiler_config()};
};
inline Shared& shared() {
  static PerProcess<Shared> instance;
  return instance.get();
}

}  // namespace hypermla
