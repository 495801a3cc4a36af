// The latent kernel's work list: every row tile meets every token block once, for any lengths.
#include "cute/latent/work_plan.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <set>

#include "cute/latent/decode_plan.h"
#include "hypermla/plan/configure.h"
#include "hypermla/plan/registry.h"

namespace hypermla::cute::work_plan_test {
namespace {

struct Case {
  std::vector<int> lengths;
  int row_tiles, split;
};

std::vector<Case> cases() {
  const std::vector<std::vector<int>> lengths = {{1},
                                                 {0},
                                                 {4096},
                                                 {0, 64, 65, 1, 5000},
                                                 std::vector<int>(32, 4096),
                                                 std::vector<int>(200, 130),
                                                 {131072, 1, 1, 1, 1, 700}};
  std::vector<Case> all;
  for (const auto& one : lengths)
    for (int row_tiles : {1, 2, 5, 32, 130, 200})
      for (int split : {0, 2, 16}) all.push_back({one, row_tiles, split});
  return all;
}

TEST(WorkPlan, CoversEveryTileOnce) {
  int taken_up = 0;
  for (const Case& one : cases()) {
    const WorkPlan plan = plan_work(one.lengths, one.row_tiles, 132, one.split, {}, 0, 0, true);
    ASSERT_LE(plan.grid, 132);
    ASSERT_EQ(plan.items.size(), std::size_t(plan.grid) * plan.rounds);
    std::map<std::pair<int, int>, std::vector<std::pair<int, int>>> ranges;  // (request, row tile) -> token blocks
    std::map<std::pair<int, int>, std::map<int, WorkItem>> parts;            // by begin
    std::set<int> all_slots;
    std::map<int, int> workers_of;  // by slot
    std::set<int> not_last;         // slots of items with one behind
    for (int worker = 0; worker < plan.grid; ++worker) {
      const WorkItem* item = &plan.items[std::size_t(worker) * plan.rounds];
      for (; item->begin != item->end; ++item) {
        ranges[{item->request, item->row_tile}].push_back({item->begin, item->end});
        ASSERT_EQ(item->tokens, one.lengths[item->request]);
        parts[{item->request, item->row_tile}][item->begin] = *item;
        if (item->slot < 0) continue;
        ASSERT_TRUE(all_slots.insert(item->slot).second);
        workers_of[item->slot] = worker;
        if (item[1].begin != item[1].end) not_last.insert(item->slot);
      }
      ASSERT_LT(item, &plan.items[std::size_t(worker) * plan.rounds] + plan.rounds);  // the list is closed
    }
    ASSERT_EQ(ranges.size(), one.lengths.size() * one.row_tiles);
    for (auto& [tile, pieces] : ranges) {
      std::sort(pieces.begin(), pieces.end());
      int at = 0;
      for (const auto& [begin, end] : pieces) {
        ASSERT_EQ(begin, at);
        if (one.split) {
          ASSERT_EQ(begin % one.split, 0);
          ASSERT_LE(end - begin, one.split);
        }
        at = end;
      }
      ASSERT_EQ(at, std::max(1, (one.lengths[tile.first] + 63) / 64));
      int part = 0;
      for (const auto& [begin, item] : parts[tile]) {
        ASSERT_EQ(item.part, part);
        ASSERT_EQ(item.parts, int(pieces.size()));
        ASSERT_EQ(item.slot, pieces.size() > 1 ? parts[tile].begin()->second.slot + part : -1);
        const bool joins = !one.split && pieces.size() == 2 && not_last.contains(parts[tile].begin()->second.slot + 1);
        ASSERT_EQ(item.join, !joins ? kJoinsNone : part == 0 ? kTakesUp : kGives);
        ASSERT_TRUE(item.join != kTakesUp || workers_of.at(item.slot) > workers_of.at(item.slot + 1));
        taken_up += item.join == kTakesUp;
        ++part;
      }
    }
    ASSERT_EQ(int(all_slots.size()), plan.slots);
  }
  EXPECT_GT(taken_up, 0);
}

// Where a request is cut depends on nothing but its own length.
TEST(WorkPlan, FixedCutsDoNotDependOnTheBatch) {
  auto cuts = [](const std::vector<int>& lengths, int request) {
    const WorkPlan plan = plan_work(lengths, 2, 132, 16);
    std::set<std::pair<int, int>> pieces;
    for (const WorkItem& item : plan.items)
      if (item.begin != item.end && item.request == request) pieces.insert({item.begin, item.end});
    return pieces;
  };
  EXPECT_EQ(cuts({9000}, 0), cuts({1, 9000, 70000}, 1));
  EXPECT_EQ(cuts({9000}, 0).size(), 9u);
}

TEST(WorkPlan, EvenWorkIsCutEvenly) {
  const WorkPlan plan = plan_work(std::vector<int>(32, 4096), 2, 132);
  std::vector<int> load;
  for (int worker = 0; worker < plan.grid; ++worker) {
    int blocks = 0;
    for (int i = 0; i < plan.rounds; ++i) {
      const WorkItem& item = plan.items[std::size_t(worker) * plan.rounds + i];
      blocks += item.end - item.begin;
    }
    load.push_back(blocks);
  }
  EXPECT_GE(plan.grid, 128);
  EXPECT_LE(*std::max_element(load.begin(), load.end()),
            1.1 * std::accumulate(load.begin(), load.end(), 0) / load.size());
}

TEST(BlocksAhead, AreAskedForWhereAStepHasFewRowTiles) {
  LatentVersion version, always;
  version.ahead = 2;
  version.ahead_tiles = 44;
  always.rows = 16;
  always.ahead = 3;
  EXPECT_EQ(blocks_ahead(version, 22, 128, 1), 2);
  EXPECT_EQ(blocks_ahead(version, 23, 128, 1), 0);
  EXPECT_EQ(blocks_ahead(version, 44, 16, 4), 2);
  EXPECT_EQ(blocks_ahead(version, 44, 16, 5), 0);
  EXPECT_EQ(blocks_ahead(always, 2048, 16, 1), 3);
  EXPECT_EQ(blocks_ahead(LatentVersion{}, 1, 16, 1), 0);
}

}  // namespace
}  // namespace hypermla::cute::work_plan_test
