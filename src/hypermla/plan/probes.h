// Kernels that measure the ceilings of a device. They register themselves beside their sources with one line, as
// versions of kernels do (registry.h):
//
//   HYPERMLA_PROBES(sources, measure)
#pragma once

#include <memory>
#include <vector>

#include "hypermla/compile/compiler.h"
#include "hypermla/device/device.h"

namespace hypermla {

struct Probes {
  // For compilation ahead of time.
  std::vector<KernelSource> (*sources)();
  // Figures of a device, by the keys of "measured" in roofline/device_spec.h.
  Json (*measure)(const std::shared_ptr<Device>& device, Compiler& compiler);
};

inline std::vector<Probes>& all_probes() {
  static std::vector<Probes> all;
  return all;
}

#define HYPERMLA_PROBES(...)                                                                          \
  namespace {                                                                                         \
  [[maybe_unused]] const bool registered = (::hypermla::all_probes().push_back({__VA_ARGS__}), true); \
  }

}  // namespace hypermla
