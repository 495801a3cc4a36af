// Kernels that ask a device for what it can do at best. They register themselves beside their sources, as versions of kernels
// do (registry.h), with one line:
//
//   HYPERMLA_PROBES(sources, measure)
#pragma once

#include <memory>
#include <vector>

#include "hypermla/compile/compiler.h"
#include "hypermla/device/device.h"

namespace hypermla {

struct Probes {
  // To be compiled ahead of time.
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
