// How many tokens a hybrid decompresses, measured: the tuner varies n as it varies tilings, and remembers it with them.
#pragma once

#include <optional>
#include <vector>

#include "hypermla/plan/configure.h"
#include "hypermla/tune/autotune.h"

namespace hypermla {

struct TunedN {
  struct Point {
    int n;
    double seconds;  // of the whole executable, the median, each kernel with its best tiling
  };
  std::vector<Point> measured;  // by n; those of earlier calls included
  int n = 0;                    // the fastest
  AutotuneResult::Stage stage;  // named "n"; its tiling is {"n": n}
};

// What is measured, ascending: n = 0 and n = t; what choose_n() takes, the best n between the ends by the same model
// and the n of the roofline; and the neighbours of the first two, a sixteenth of the tokens away.
std::vector<int> n_to_measure(KernelPlan& plan, const DeviceSpec& device);

// `problem` has every field of the kernel's, with an n below 0. Each n gets tensors of its own, drawn from `seed`, and
// its kernels their best tilings. An n whose tensors do not fit the device, or that the plan refuses, is left out, with
// the reason. Throws Error when none is left.
TunedN tune_n(const KernelEntry& entry, const PlannedDevice& planned, const Json& problem,
              const std::shared_ptr<Device>& device, Compiler& compiler, std::uint64_t seed,
              const AutotuneOptions& options);

// The fastest n that earlier calls measured; empty where there was none.
std::optional<int> remembered_n(const KernelEntry& entry, const PlannedDevice& planned, const Json& problem,
                                const Device& device, const Compiler& compiler,
                                const std::filesystem::path& history_root);

}  // namespace hypermla
