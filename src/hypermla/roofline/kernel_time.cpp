#include "hypermla/roofline/kernel_time.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "hypermla/base/error.h"
#include "hypermla/device/architecture.h"

namespace hypermla {
namespace {

Reach reach_of(const DeviceSpec& device, const char* path) {
  const Json of = device.measured.value("reach", Json::object()).value(path, Json::object());
  return {of.value("tensor", 1.0), of.value("memory", 1.0), of.value("overlap", 1.0)};
}

}  // namespace

Ceilings ceilings_of(const DeviceSpec& device, DType dtype, Load load) {
  const bool tensor = dtype == DType::bfloat16 || dtype == DType::float16;
  const double measured =
      tensor ? device.measured_or(load == Load::burst ? "matmul_burst_tflops" : "matmul_sustained_tflops", 0) : 0;
  const double tflops = measured > 0 ? measured : device.peak_tflops(dtype);
  const double gbps = device.measured_or("read_GBps", device.peak_gbps);
  predict({.flops = 1, .bytes = 1}, device, dtype);  // says what is missing
  return {.flops = tflops * 1e12,
          .bytes = gbps * 1e9,
          .power_share = device.measured_or("power_share", 0),
          .launch = device.measured_or("launch_us", 0) * 1e-6,
          .processors = std::max(device.sm_count, 1),
          .tall_tiles = architecture(device.arch).has_large_blocks(),
          .load = load,
          .latent = reach_of(device, "latent"),
          .decompressed = reach_of(device, "decompressed"),
          .hybrid = reach_of(device, "hybrid")};
}

double power_share_of(double both, double tensor, double reads) {
  return std::clamp((both - tensor) / reads, 0.01, 1.0);
}

std::string_view limit_name(Limit limit) {
  constexpr std::string_view kNames[] = {"tensor", "memory", "power", "launches"};
  return kNames[int(limit)];
}

WorkTimes& WorkTimes::operator+=(const WorkTimes& other) {
  tensor += other.tensor;
  memory += other.memory;
  traffic += other.traffic;
  launches += other.launches;
  return *this;
}

WorkTimes times_of(const Figures& figures, const TiledWork& work, const Ceilings& ceilings, const Reach& reach) {
  const double waves = work.tiles / figures.tiles_of_block / ceilings.processors;
  const double rate = figures.elsewhere > 0 && !ceilings.tall_tiles ? figures.elsewhere
                      : ceilings.load == Load::burst                ? figures.burst
                                                                    : figures.sustained;
  const auto& [full, half, few] = figures.launches;
  const bool whole = figures.readers > 0;
  WorkTimes times;
  times.tensor = work.cost.flops / (ceilings.flops * rate * reach.tensor) * (whole ? std::ceil(waves) / waves : 1);
  times.traffic = work.cost.bytes / ceilings.bytes;
  times.memory = times.traffic / (figures.memory * reach.memory) * std::max(1.0, figures.readers / waves);
  times.launches = ceilings.launch * (waves >= 0.9 ? full : waves >= 0.45 ? half : few);
  return times;
}

WorkTimes best_times(const std::vector<Figures>& figures, const std::function<TiledWork(int rows)>& work,
                     const Ceilings& ceilings, const Reach& reach) {
  if (figures.empty()) fail("there are no figures of a kernel: it cannot be set against others");
  WorkTimes best;
  std::pair<double, double> least = {INFINITY, INFINITY};
  for (const Figures& one : figures) {
    const WorkTimes times = times_of(one, work(one.rows), ceilings, reach);
    const std::pair seconds = {estimate(times, ceilings).seconds, times.tensor};
    if (seconds < least) least = seconds, best = times;
  }
  return best;
}

TimeEstimate estimate(const WorkTimes& times, const Ceilings& ceilings, double overlap) {
  const double shared = times.tensor + ceilings.power_share * times.traffic;
  const double busy = std::max(times.memory, shared) / overlap;
  TimeEstimate result{busy + times.launches, Limit::power};
  if (times.launches > busy)
    result.limit = Limit::launches;
  else if (times.memory >= shared)
    result.limit = Limit::memory;
  else if (times.tensor >= 0.9 * shared)
    result.limit = Limit::tensor;
  return result;
}

TimeEstimate in_turn(const TimeEstimate& first, const TimeEstimate& second) {
  return {first.seconds + second.seconds, first.seconds >= second.seconds ? first.limit : second.limit};
}

}  // namespace hypermla
