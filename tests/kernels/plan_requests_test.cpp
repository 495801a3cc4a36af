// The planner of the latent kernel for Hopper, run as C++ threads: its lists must cover every token block of every row
// tile once, in parts that the merge finds, and must not be worse than the host's.
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <random>
#include <set>

#include "latent/plan_requests.cuh"
#include "latent/work_plan.h"

namespace hypermla::cute {
namespace {

constexpr WorkCosts kCosts;
constexpr PlanRequestsTiling kTiling;

class PlanRequests : public testing::Test {
 protected:
  struct Result {
    int load = 0;    // of the busiest worker, in token blocks, each item `overhead` more
    int merges = 0;  // row tiles that were cut
  };

  // Plans, and checks the lists. `most`: tokens that a request may have.
  template <int split>
  Result plan(const std::vector<int>& lengths, int row_tiles, int workers, int most) {
    const int b = int(lengths.size()), overhead = kCosts.overhead();
    const RequestSchedule on = schedule_requests(row_tiles, workers);
    const RequestListSizes sizes =
        request_list_sizes(on, b, (most + 63) / 64, split, overhead, kCosts.combine, kCosts.partial);
    const int rounds = int(sizes.rounds), combines = int(sizes.combines), slots_per_tile = int(sizes.slots_per_tile);
    std::vector<WorkItem> items(std::size_t(rounds) * on.workers(), WorkItem{-7, -7, 1, -7, -7, -7, {}});
    std::vector<CombineItem> merges(combines + 1, CombineItem{-7, -7, -7, -7});
    static constexpr PlanRequestsProblem problem{split};
    block_.run([&] {
      plan_requests<problem, kTiling>(lengths.data(), items.data(), merges.data(), b, row_tiles, on.side, on.passes,
                                      on.groups, rounds, overhead, float(kCosts.combine), float(kCosts.partial),
                                      slots_per_tile, combines);
    });

    Result result;
    std::map<std::pair<int, int>, std::map<int, std::pair<int, int>>> pieces;  // begin -> end, slot
    std::set<int> slots;
    for (int w = 0; w < on.workers(); ++w) {
      int load = 0;
      for (const WorkItem* item = &items[std::size_t(w) * rounds]; item->begin != item->end; ++item) {
        EXPECT_LT(item - &items[std::size_t(w) * rounds], rounds);
        EXPECT_LT(item->begin, item->end);
        EXPECT_EQ(item->tokens, lengths.at(item->request));
        auto& of_tile = pieces[std::pair(item->request, item->row_tile)];
        EXPECT_TRUE(of_tile.emplace(item->begin, std::pair(item->end, item->slot)).second);
        if (item->slot >= 0) {
          EXPECT_TRUE(slots.insert(item->slot).second) << "slot " << item->slot << " is used twice";
          EXPECT_LT(item->slot, on.side * slots_per_tile);
        }
        load += item->end - item->begin + overhead;
      }
      result.load = std::max(result.load, load);
    }
    EXPECT_EQ(merges[combines].slots, -7) << "written behind the end";
    std::map<std::pair<int, int>, CombineItem> merge_of;
    for (int i = 0; i < combines; ++i) {
      if (merges[i].slots == 0) continue;
      EXPECT_TRUE(merge_of.emplace(std::pair(merges[i].request, merges[i].row_tile), merges[i]).second);
    }
    EXPECT_EQ(pieces.size(), std::size_t(b) * row_tiles);
    for (const auto& [tile, list] : pieces) {
      int at = 0, slot = merge_of.count(tile) ? merge_of[tile].first_slot : -1;
      for (const auto& [begin, end_and_slot] : list) {
        EXPECT_EQ(begin, at);
        EXPECT_EQ(end_and_slot.second, slot);
        at = end_and_slot.first;
        slot += slot >= 0;
      }
      EXPECT_EQ(at, std::max(1, (lengths[tile.first] + 63) / 64));
      EXPECT_EQ(merge_of.count(tile) ? merge_of[tile].slots : 1, int(list.size()));
      result.merges += list.size() > 1;
    }
    EXPECT_EQ(merge_of.size(), std::size_t(result.merges));
    return result;
  }

  device_threads::Block block_{kTiling.threads};
};

TEST_F(PlanRequests, EqualLengthsAreDividedAsTheHostWould) {
  const std::array<int, 3> shapes[] = {{1, 65536, 1},  {8, 32768, 1}, {32, 4096, 1},  {32, 4096, 2}, {128, 4096, 1},
                                       {128, 4096, 2}, {256, 2048, 1}, {64, 8192, 2}, {16, 16384, 8}};
  for (const auto& [b, t, row_tiles] : shapes) {
    const std::vector<int> lengths(b, t);
    const Result device = plan<0>(lengths, row_tiles, 132, t);
    const WorkPlan host = plan_work(lengths, row_tiles, 132);
    int most = 0;
    for (int w = 0; w < host.grid; ++w) {
      int load = 0;
      for (const WorkItem* item = &host.items[std::size_t(w) * host.rounds]; item->begin != item->end; ++item)
        load += item->end - item->begin + kCosts.overhead();
      most = std::max(most, load);
    }
    EXPECT_LE(device.load, most + kCosts.overhead()) << "b=" << b << " t=" << t << " row tiles " << row_tiles;
    EXPECT_EQ(device.merges > 0, !host.combines.empty()) << "b=" << b << " t=" << t << " row tiles " << row_tiles;
  }
}

TEST_F(PlanRequests, AnyLengthsAreCoveredOnce) {
  std::mt19937 random(1);
  auto below = [&](int end) { return int(random() % unsigned(end)); };
  for (int i = 0; i < 60 && !HasFailure(); ++i) {
    const int b = i % 9 == 8 ? 1 + below(kMaxPlannedRequests) : i % 3 == 0 ? 1 + below(8) : 1 + below(200);
    const int most = 1 << below(17), kind = below(4);
    std::vector<int> lengths(b, 0);  // equal, any, few long ones among short ones, one alone
    for (int& length : lengths)
      length = kind == 0 ? most : kind == 1 ? below(most + 1) : kind == 2 ? below(below(10) ? most / 16 + 1 : most) : 0;
    if (kind == 3) lengths[below(b)] = most;
    const int row_tiles = below(4) == 0 ? 1 + below(300) : 1 + below(5);
    const int workers = below(3) == 0 ? 8 * (1 + below(16)) : 132;
    SCOPED_TRACE(testing::Message() << "case " << i << ": b=" << b << " up to " << most << " tokens, kind " << kind
                                    << ", " << row_tiles << " row tiles on " << workers);
    plan<0>(lengths, row_tiles, workers, most);
    plan<2>(lengths, row_tiles, workers, most);
    plan<16>(lengths, row_tiles, workers, most);
  }
}

}  // namespace
}  // namespace hypermla::cute
