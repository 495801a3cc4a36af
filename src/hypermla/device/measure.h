// Timing a piece of work on a device.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "hypermla/device/device.h"

namespace hypermla {

// Between two values: linear. Throws Error when there is none.
double quantile(std::vector<double> values, double q);

// Seconds of one run, from several repetitions.
struct Timing {
  std::vector<double> seconds;          // each repetition, in order
  std::optional<double> sm_mhz, watts;  // means over the measurement, where the board tells

  double median() const;
  double low() const;  // 5th and 95th percentile: the spread
  double high() const;
};

// Both flavours replay a recording (a CUDA graph), so the host's cost of a launch is not in the figure.

// Every run finds the cache flushed: its data comes from memory.
Timing measure_cold(Device& device, const Work& work, int repetitions);
// Runs follow one another: data may stay in the cache. Each repetition takes the mean of the runs that fit into 20 ms.
Timing measure_hot(Device& device, const Work& work, int repetitions);
// As hot, but every repetition is short and starts from rest: clocks that a power cap would lower soon are still high.
Timing measure_burst(Device& device, const Work& work, int repetitions);
// As hot, but without pause for `seconds` first: clocks and power have settled at what the board can keep up.
Timing measure_sustained(Device& device, const Work& work, double seconds);

}  // namespace hypermla
