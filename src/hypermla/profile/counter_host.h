// The host's side of CUPTI's counters, which ranges (counters.h) and samples (sampling.h) share: names of metrics, the
// configuration of a chip's counters, values out of raw data. Needs neither a GPU nor a driver.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hypermla/profile/cupti.h"

namespace hypermla {

class CounterHost {
 public:
  // `availability`: what the device lets us count; null for all that the chip can.
  CounterHost(const cupti::Library& library, CUpti_ProfilerType use, const std::string& chip,
              const std::uint8_t* availability);
  CounterHost(const CounterHost&) = delete;
  ~CounterHost();

  // Together, because that is how CUPTI packs counters into few passes. False: the chip lacks one of them, and this
  // object accepts no more.
  bool add(std::vector<const char*>& names);
  std::vector<std::uint8_t> configuration() const;
  int passes(std::vector<std::uint8_t>& configuration) const;
  // `range`: or the number of the sample.
  std::vector<double> evaluate(const std::vector<std::uint8_t>& data, std::size_t range,
                               std::vector<const char*>& names) const;

 private:
  const cupti::Library& library_;
  CUpti_Profiler_Host_Object* host_ = nullptr;
};

// A host that has all the metrics that the chip knows; `known` gets them, `unknown` the others.
std::unique_ptr<CounterHost> host_with(const cupti::Library& library, CUpti_ProfilerType use, const std::string& chip,
                                       const std::uint8_t* availability, const std::vector<std::string>& metrics,
                                       std::vector<const char*>& known, std::vector<std::string>& unknown);

std::string chip_name(const cupti::Library& library, std::size_t device);  // "GH100"

// Counters may be used from construction to destruction.
class ProfilerSession {
 public:
  explicit ProfilerSession(const cupti::Library& library);
  ProfilerSession(const ProfilerSession&) = delete;
  ~ProfilerSession();

 private:
  const cupti::Library& library_;
};

}  // namespace hypermla
