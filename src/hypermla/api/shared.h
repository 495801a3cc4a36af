// What all kernels of a process share: the environment is read and the compiler's threads are started once, and again
// in a forked child.
#pragma once

#include "hypermla/api/environment.h"
#include "hypermla/base/per_process.h"

namespace hypermla {

struct Shared {
  Environment environment = Environment::detect();
  DeviceTable devices = environment.devices();
  Compiler compiler{compiler_config()};

 private:
  // The program beside this library compiles: its jobs end with this process, even where that is killed and can end
  // nothing itself. Where the library is part of another program, this process compiles.
  CompilerConfig compiler_config() const {
    CompilerConfig config = environment.compiler_config();
    const std::filesystem::path& program = environment.profile_tools.program;
    std::error_code unknown;
    if (program != std::filesystem::read_symlink("/proc/self/exe", unknown)) config.worker = program;
    return config;
  }
};
inline Shared& shared() {
  static PerProcess<Shared> instance;
  return instance.get();
}

}  // namespace hypermla
