#include "hypermla/device/measure.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "hypermla/base/error.h"

namespace hypermla {
namespace {

using Clock = std::chrono::steady_clock;

// Samples clock and power from a thread of its own as long as it lives.
class Sampler {
 public:
  explicit Sampler(Device& device) {
    if (!device.power()) return;
    thread_ = std::thread([this, &device] {
      while (!stop_) {
        if (auto sample = device.power()) {
          mhz_ += sample->sm_mhz;
          watts_ += sample->watts;
          ++count_;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    });
  }
  ~Sampler() { finish(); }
  void into(Timing& timing) {
    finish();
    if (count_ == 0) return;
    timing.sm_mhz = mhz_ / count_;
    timing.watts = watts_ / count_;
  }

 private:
  void finish() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  std::atomic<bool> stop_{false};
  double mhz_ = 0, watts_ = 0;
  int count_ = 0;
  std::thread thread_;
};

// Many runs recorded as one, so that the ends of a measurement do not matter: as many as fit into `seconds`, at most
// 50.
class Train {
 public:
  Train(Device& device, const Work& work, double seconds) : device_(device) {
    auto one = device.record(work);
    one->replay(device.stream());
    device.synchronize();
    const double of_one = device.time([&](StreamHandle stream) { one->replay(stream); });
    runs_ = std::clamp(int(seconds / std::max(of_one, 1e-7)), 1, 50);
    recording_ = device.record([&](StreamHandle stream) {
      for (int i = 0; i < runs_; ++i) work(stream);
    });
  }
  // Seconds of one run.
  double time() {
    return device_.time([&](StreamHandle stream) { recording_->replay(stream); }) / runs_;
  }

 private:
  Device& device_;
  int runs_ = 1;
  std::unique_ptr<Recording> recording_;
};

// A GPU's clocks and temperature recover within a fraction of a second.
void rest(Device& device) {
  device.synchronize();
  if (device.is_gpu()) std::this_thread::sleep_for(std::chrono::milliseconds(200));
}

}  // namespace

double quantile(std::vector<double> values, double q) {
  if (values.empty()) fail("nothing was measured: ask for at least one repetition");
  std::sort(values.begin(), values.end());
  const double at = q * double(values.size() - 1);
  const std::size_t below = std::size_t(at);
  const std::size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (at - double(below)) * (values[above] - values[below]);
}

double Timing::median() const { return quantile(seconds, 0.5); }
double Timing::low() const { return quantile(seconds, 0.05); }
double Timing::high() const { return quantile(seconds, 0.95); }

Timing measure_cold(Device& device, const Work& work, int repetitions) {
  auto recording = device.record(work);
  recording->replay(device.stream());
  device.synchronize();
  Timing timing;
  Sampler sampler(device);
  for (int i = 0; i < repetitions; ++i) {
    // The flush is still running when the timed work is enqueued: the device never waits for the host in between.
    device.flush_cache(device.stream());
    timing.seconds.push_back(device.time([&](StreamHandle stream) { recording->replay(stream); }));
  }
  sampler.into(timing);
  return timing;
}

Timing measure_hot(Device& device, const Work& work, int repetitions) {
  Train train(device, work, 0.02);
  Timing timing;
  Sampler sampler(device);
  for (int i = 0; i < repetitions; ++i) timing.seconds.push_back(train.time());
  sampler.into(timing);
  return timing;
}

Timing measure_burst(Device& device, const Work& work, int repetitions) {
  Train train(device, work, 0.006);
  Timing timing;
  for (int i = 0; i < repetitions; ++i) {
    rest(device);
    timing.seconds.push_back(train.time());
  }
  return timing;
}

Timing measure_sustained(Device& device, const Work& work, double seconds) {
  Train train(device, work, 0.02);
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  do train.time();
  while (Clock::now() < end);
  Timing timing;
  Sampler sampler(device);
  for (int i = 0; i < 15; ++i) timing.seconds.push_back(train.time());
  sampler.into(timing);
  return timing;
}

}  // namespace hypermla
