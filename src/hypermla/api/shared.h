// What all kernels of a process share: the environment is read and the compiler's threads are started once, and again
// in a forked child.
#pragma once

#include "hypermla/api/environment.h"
#include "hypermla/base/error.h"
#include "hypermla/base/per_process.h"
#include "hypermla/device/device.h"

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

// The caller's workspace or, where that is null, an own one that `own` keeps.
inline void* workspace_or_own(void* workspace, std::size_t bytes, const std::shared_ptr<Device>& device, Buffer& own) {
  if (reinterpret_cast<std::uintptr_t>(workspace) % 256) fail("the workspace must be aligned to 256 bytes");
  if (workspace) return workspace;
  own = Buffer(device, bytes);
  return own.data();
}

}  // namespace hypermla
