// How busy the tensor pipe and the memory of a GPU are while kernels run: CUPTI's PM sampling, in this process.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hypermla/profile/counter_host.h"
#include "hypermla/profile/cupti.h"
#include "hypermla/profile/timeline.h"

namespace hypermla {

// The two counters of a CounterSample. A chip must count all in one pass: samples are not repeated.
std::vector<std::string> sampled_metrics();

// Samples a device (by its CUDA ordinal) from start() to stop(). Kernels run as without it, and activity records may be
// taken at the same time: CUPTI converts the time stamps of both to the host's clock by the same rule, so that samples
// and records lie on one time line (on an H200 a fill of 118 us and its samples of 2 us agree to one sample at both
// ends).
class Sampler {
 public:
  // `interval`: nanoseconds; `count`: as many samples as can come between start() and stop(), since CUPTI drops what
  // exceeds it. Throws Error saying why there can be no samples: no permission, another profiler, a chip without them.
  Sampler(const cupti::Library& library, std::size_t device, std::uint64_t interval, std::size_t count);
  Sampler(const Sampler&) = delete;
  ~Sampler();

  void start();
  std::vector<CounterSample> stop();

 private:
  struct Enabled;  // the device's sampler

  const cupti::Library& library_;
  ProfilerSession session_;
  std::vector<std::string> metrics_ = sampled_metrics();
  std::vector<const char*> names_;
  std::unique_ptr<CounterHost> host_;
  std::vector<std::uint8_t> configuration_;  // CUPTI keeps the pointer
  std::unique_ptr<Enabled> enabled_;
  std::vector<std::uint8_t> data_;
  std::uint64_t begin_ = 0;
};

}  // namespace hypermla
