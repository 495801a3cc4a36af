// Timing, on a device whose clock moves only as the test says.
#include "hypermla/device/measure.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "support.h"

namespace hypermla::measure_test {
namespace {
using testing_support::FakeDevice;

TEST(Measure, QuantilesInterpolate) {
  Timing timing;
  for (const double value : {3.0, 1.0, 2.0, 5.0, 4.0}) timing.seconds.push_back(value);
  EXPECT_DOUBLE_EQ(timing.median(), 3);
  EXPECT_DOUBLE_EQ(timing.low(), 1.2);
  EXPECT_DOUBLE_EQ(timing.high(), 4.8);
  EXPECT_EQ(timing.seconds.front(), 3);  // in order of time still
  timing.seconds = {1, 2};
  EXPECT_DOUBLE_EQ(timing.median(), 1.5);
  timing.seconds = {7};
  EXPECT_DOUBLE_EQ(timing.low(), 7);
  EXPECT_DOUBLE_EQ(timing.high(), 7);
}

TEST(Measure, ColdFlushesBeforeEveryRepetitionAndTimesOnlyTheWork) {
  FakeDevice device;
  bool cold = false;
  int flushes = 0, runs = 0, warm_runs = 0;
  device.on_flush = [&] {
    ++flushes;
    cold = true;
    device.now += 100;  // must not be in the figure
  };
  const Timing timing = measure_cold(
      device,
      [&](StreamHandle stream) {
        EXPECT_EQ(stream, device.stream());
        warm_runs += !cold;
        device.now += cold ? 5 + runs : 1;
        cold = false;
        ++runs;
      },
      4);
  EXPECT_EQ(flushes, 4);
  EXPECT_EQ(runs, 5);
  EXPECT_EQ(warm_runs, 1);  // the one that warms up is not counted
  EXPECT_EQ(timing.seconds, (std::vector<double>{6, 7, 8, 9}));
  EXPECT_EQ(device.records, 1);
}

TEST(Measure, HotDividesByTheRunsOfOneRecording) {
  for (const auto& [seconds, per_recording] :
       std::vector<std::pair<double, int>>{{1e-3, 20}, {1e-5, 50}, {0.0078125, 2}, {1.0, 1}}) {
    FakeDevice device;
    device.on_flush = [] { FAIL() << "hot runs find the cache as they left it"; };
    int runs = 0;
    const double once = seconds;
    const Timing timing = measure_hot(
        device,
        [&](StreamHandle) {
          ++runs;
          device.now += once;
        },
        3);
    ASSERT_EQ(timing.seconds.size(), 3u);
    for (const double value : timing.seconds) EXPECT_NEAR(value, once, once * 1e-6);
    EXPECT_EQ(runs, 2 + 3 * per_recording) << seconds;  // one warms up and one tells how long it takes
  }
}

TEST(Measure, BurstsAreShortAndStartFromRest) {
  struct Gpu : FakeDevice {
    bool is_gpu() const override { return true; }
    void synchronize() override { rested = std::chrono::steady_clock::now(); }
    std::chrono::steady_clock::time_point rested;
  } device;
  int runs = 0;
  std::vector<double> pauses;  // from the last synchronize() to each run
  const Timing timing = measure_burst(
      device,
      [&](StreamHandle) {
        ++runs;
        device.now += 0.0029;
        pauses.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - device.rested).count());
      },
      2);
  ASSERT_EQ(timing.seconds.size(), 2u);
  for (const double value : timing.seconds) EXPECT_NEAR(value, 0.0029, 1e-9);
  EXPECT_EQ(runs, 2 + 2 * 2);  // one warms up, one tells how long it takes; then two in 6 ms, twice
  for (std::size_t i = 2; i < pauses.size(); ++i) EXPECT_GT(pauses[i], 0.1);
}

TEST(Measure, SustainedKeepsTheDeviceBusyFirst) {
  FakeDevice device;
  int runs = 0;
  const Timing timing = measure_sustained(
      device,
      [&](StreamHandle) {
        ++runs;
        device.now += runs < 100 ? 1 : 2;  // clocks settle
      },
      0.01);
  EXPECT_EQ(timing.seconds.size(), 15u);
  EXPECT_GT(runs, 100 + 15);
  EXPECT_DOUBLE_EQ(timing.median(), 2);
}

TEST(Measure, PowerIsAveragedWhereTheBoardTells) {
  FakeDevice device;
  device.on_power = [] { return PowerSample{1500, 300, 50}; };
  const Timing timing = measure_hot(
      device,
      [&](StreamHandle) {
        device.now += 1;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // time for a sample
      },
      4);
  ASSERT_TRUE(timing.watts && timing.sm_mhz);
  EXPECT_DOUBLE_EQ(*timing.watts, 300);
  EXPECT_DOUBLE_EQ(*timing.sm_mhz, 1500);
  FakeDevice silent;
  EXPECT_FALSE(measure_cold(
                   silent, [&](StreamHandle) { silent.now += 1; }, 2)
                   .watts);
}

}  // namespace
}  // namespace hypermla::measure_test
