// The parts of a tile of the prefill kernel, each a thread of the system: whoever waits, leaves or comes last, every
// share of the rows is merged once, and the counter is 0 behind it.
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "decompressed/prefill_arrival.cuh"

namespace hypermla::cute {
namespace {

// Who merged what: by share, how often.
std::vector<int> merged_by(unsigned parts, bool together, unsigned long long& arrived, std::mt19937& random) {
  std::vector<std::atomic<int>> merged(parts);
  std::vector<std::thread> threads;
  for (unsigned part = 0; part < parts; ++part) {
    // Some come later than others wait.
    const auto late = std::chrono::microseconds(random() % 3 ? 0 : random() % 150);
    threads.emplace_back([&, part, late] {
      if (late.count() > 0) std::this_thread::sleep_for(late);
      PrefillTile tile = {};
      tile.part = part;
      tile.parts = parts;
      tile.together = together;
      const PartsLeft found = arrive(&arrived, tile);
      if (!found.complete) {
        EXPECT_EQ(found.shares_of, 0u);
        return;
      }
      for (unsigned share = 0; share < parts; ++share)
        if (!together || share == part || found.shares_of >> share & 1) ++merged[share];
    });
  }
  for (std::thread& thread : threads) thread.join();
  return {merged.begin(), merged.end()};
}

TEST(PrefillArrival, EveryShareIsMergedOnce) {
  std::mt19937 random(7);
  unsigned long long arrived = 0;
  for (int round = 0; round < 400; ++round) {
    const unsigned parts = 2 + random() % (round % 20 ? 6 : 31);
    for (const bool together : {true, false}) {
      ASSERT_EQ(merged_by(parts, together, arrived, random), std::vector<int>(parts, 1)) << parts << together;
      ASSERT_EQ(arrived, 0u);
    }
  }
}

}  // namespace
}  // namespace hypermla::cute
