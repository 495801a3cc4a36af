// What all kernels of a process share: the environment is read and the compiler's threads are started once.
#pragma once

#include "hypermla/api/environment.h"

namespace hypermla {

struct Shared {
  Environment environment = Environment::detect();
  DeviceTable devices = environment.devices();
  Compiler compiler{environment.compiler_config()};
};
inline Shared& shared() {
  static Shared instance;
  return instance;
}

}  // namespace hypermla
