// The planner of the latent kernel for Hopper, run as plain C++: its lists must cover every token block of every row
// tile once, in parts that the merge finds, and must not be worse than the host's.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
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
    int load = 0;                         // of the busiest worker, in token blocks, each item `overhead` more
    int sum = 0;                          // of all workers
    int merges = 0;                       // row tiles that were cut
    int taken_up = 0;                     // of these, whose last part another thread block takes up
    std::vector<std::vector<int>> items;  // of all workers
  };

  // Plans, and checks the lists. `queries` of each request, `most` of them and tokens that one may have.
  template <int split>
  Result plan(const std::vector<int>& lengths, const std::vector<int>& queries, int heads, int tile_rows, int workers,
              int most_tokens, int most_queries) {
    const int b = int(lengths.size()), overhead = kCosts.overhead();
    const bool equal = std::all_of(queries.begin(), queries.end(), [&](int n) { return n == most_queries; });
    std::vector<int> starts(1, 0);
    for (int n : queries) starts.push_back(starts.back() + n);
    const auto tiles = [&](long long n) { return (n * heads + tile_rows - 1) / tile_rows; };
    const RequestListSizes sizes =
        request_list_sizes(workers, b, tiles(most_queries), tiles(starts.back()) + b, (most_tokens + 63) / 64, split,
                           overhead, kCosts.combine, kCosts.partial);
    const int rounds = int(sizes.rounds);
    std::vector<WorkItem> items(std::size_t(rounds) * workers, WorkItem{-7, -7, 1, -7, -7, -7, -7, -7, -7, -7, {}});
    std::vector<MergeState> merges(std::size_t(sizes.slots) + 1, MergeState{~0ull, 7});
    static constexpr PlanRequestsProblem problem{split};
    int status = -1;
    const PlanRequestsArguments arguments = {.lengths = lengths.data(),
                                             .query_starts = equal ? nullptr : starts.data(),
                                             .items = items.data(),
                                             .merges = merges.data(),
                                             .status = &status,
                                             .requests = b,
                                             .heads = heads,
                                             .tile_rows = tile_rows,
                                             .workers = workers,
                                             .rounds = rounds,
                                             .queries = most_queries,
                                             .max_tokens = most_tokens,
                                             .all_queries = starts.back(),
                                             .overhead = overhead,
                                             .merge_cost = float(kCosts.combine),
                                             .part_cost = float(kCosts.partial),
                                             .traffic = 0.012f,
                                             .joins = true};
    block_.run(kPlanRequestsBlocks, [&] { plan_requests<problem, kTiling>(arguments); });
    EXPECT_EQ(status, 0);

    Result result;
    std::map<std::pair<int, int>, std::map<int, WorkItem>> pieces;  // by begin
    std::map<int, int> workers_of;                                  // by slot
    std::set<int> not_last;                                         // slots of items with one behind
    std::set<int> slots;
    for (int w = 0; w < workers; ++w) {
      int load = 0;
      for (const WorkItem* item = &items[std::size_t(w) * rounds]; item->begin != item->end; ++item) {
        EXPECT_LT(item - &items[std::size_t(w) * rounds], rounds - 1);
        EXPECT_LT(item->begin, item->end);
        EXPECT_EQ(item->tokens, lengths.at(item->request));
        EXPECT_EQ(item->queries, queries.at(item->request));
        EXPECT_EQ(item->first_row, starts.at(item->request) * heads);
        auto& of_tile = pieces[std::pair(item->request, item->row_tile)];
        EXPECT_TRUE(of_tile.emplace(item->begin, *item).second);
        if (item->slot >= 0) {
          EXPECT_TRUE(slots.insert(item->slot).second) << "slot " << item->slot << " is used twice";
          workers_of[item->slot] = w;
          if (item[1].begin != item[1].end) not_last.insert(item->slot);
          EXPECT_LT(item->slot, sizes.slots);
          EXPECT_EQ(merges.at(item->slot).arrived, 0u);
          EXPECT_EQ(merges.at(item->slot).left, 0);
        }
        load += item->end - item->begin + overhead;
        result.items.push_back({w, item->request, item->row_tile, item->begin, item->end, item->slot, item->part});
        if (HasFailure()) return result;
      }
      result.load = std::max(result.load, load);
      result.sum += load;
    }
    EXPECT_EQ(merges.back().left, 7) << "written behind the end";
    std::size_t row_tiles = 0;
    for (int n : queries) row_tiles += tiles(n);
    EXPECT_EQ(pieces.size(), row_tiles);
    const int side = equal ? side_for(int(tiles(most_queries)), workers) : 1;
    for (const auto& [tile, list] : pieces) {
      EXPECT_LT(tile.second, tiles(queries[tile.first]));
      const int blocks = std::max(1, (lengths[tile.first] + 63) / 64);
      int at = 0, part = 0;
      for (const auto& [begin, item] : list) {
        EXPECT_EQ(begin, at);
        EXPECT_TRUE(!split || item.end == std::min(begin + split, blocks)) << "cut elsewhere, at " << item.end;
        EXPECT_EQ(item.part, part);
        EXPECT_EQ(item.parts, int(list.size()));
        EXPECT_EQ(item.slot, list.size() > 1 ? list.begin()->second.slot + part : -1);
        // Who gives has an item behind, by the plan. A pass that is not full has none for some workers of a group, but
        // for the first one. Where queries differ the groups are not known here.
        const WorkItem& first_part = list.begin()->second;
        const int first_slot = pieces.at({tile.first, tile.second - tile.second % side}).begin()->second.slot;
        const bool two = !split && list.size() == 2, behind = two && not_last.contains(first_slot + 1);
        const bool joins = equal ? behind : two && (behind || first_part.join != kJoinsNone);
        EXPECT_EQ(item.join, !joins ? kJoinsNone : part == 0 ? kTakesUp : kGives);
        EXPECT_TRUE(item.join != kTakesUp || workers_of.at(item.slot) > workers_of.at(item.slot + 1));
        result.taken_up += item.join == kTakesUp;
        at = item.end;
        ++part;
      }
      EXPECT_EQ(at, blocks);
      result.merges += list.size() > 1;
    }
    return result;
  }
  // Of requests of one query each, of `row_tiles` tiles.
  template <int split>
  Result plan(const std::vector<int>& lengths, int row_tiles, int workers, int most) {
    return plan<split>(lengths, std::vector<int>(lengths.size(), 1), 64 * row_tiles, 64, workers, most, 1);
  }

  // With the merge.
  static double cost_of(const Result& result) {
    const auto slots = std::count_if(result.items.begin(), result.items.end(), [](auto& item) { return item[5] >= 0; });
    return result.load + (slots ? kCosts.combine + kCosts.partial * double(slots) : 0);
  }

  device_threads::Block block_{kTiling.threads};
};

TEST(RequestSides, CoverAllRowTilesAndUseTheWorkers) {
  for (int row_tiles = 1; row_tiles < 700; ++row_tiles)
    for (int workers : {66, 132}) {
      const int side = side_for(row_tiles, workers), passes = (row_tiles + side - 1) / side;
      ASSERT_GE(side, 1);
      ASSERT_LE(side, workers);
      ASSERT_LT((side - 1) * passes, row_tiles);  // no side is idle in every pass
      const double use = double(row_tiles) / passes * (workers / side) / workers;
      ASSERT_GE(use, row_tiles < 8 ? 0.9 : 0.75) << row_tiles << " on " << workers;
    }
}

TEST_F(PlanRequests, EqualLengthsAreDividedAsTheHostWould) {
  const std::array<int, 3> shapes[] = {{1, 65536, 1},  {8, 32768, 1},  {32, 4096, 1},  {32, 4096, 2},
                                       {128, 4096, 1}, {128, 4096, 2}, {256, 2048, 1}, {64, 8192, 2},
                                       {16, 16384, 8}, {1, 4096, 2},   {2, 4096, 2},   {1, 256, 2}};
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
    EXPECT_LE(cost_of(device), 1.05 * host.cost) << "b=" << b << " t=" << t << " row tiles " << row_tiles;
    EXPECT_EQ(device.merges > 0, host.slots > 0) << "b=" << b << " t=" << t << " row tiles " << row_tiles;
  }
}

// Requests that are all alike are planned without sums and searches, with one of no queries beside them as any others.
TEST_F(PlanRequests, APaddingRequestChangesNothing) {
  for (int b : {1, 2, 31, 64, 127, 132, 133, 200, 256, 513})
    for (int t : {1, 1000, 4096, 65536})
      for (int heads : {16, 128, 272}) {
        SCOPED_TRACE(testing::Message() << "b=" << b << " t=" << t << ", " << heads << " heads");
        std::vector<int> lengths(b, t), queries(b, 1);
        const auto plan_both = [&] {
          return std::pair(plan<0>(lengths, queries, heads, 16, 132, t, 1).items,
                           plan<16>(lengths, queries, heads, 64, 132, t, 1).items);
        };
        const auto alike = plan_both();
        lengths.push_back(t / 2);
        queries.push_back(0);
        ASSERT_EQ(alike, plan_both());
      }
}

TEST_F(PlanRequests, PaddingChangesNothingBehindAnyBatch) {
  std::mt19937 random(6);
  const auto below = [&](int end) { return int(random() % unsigned(end)); };
  for (int i = 0; i < 60; ++i) {
    const int b = 1 + below(200), most = 1 << (6 + below(9)), most_queries = 1 + below(20), heads = 16 << below(4);
    const int common = i % 3 ? 0 : 1 + below(most_queries);  // queries of nearly all requests
    std::vector<int> lengths(b), queries(b);
    std::generate(lengths.begin(), lengths.end(), [&] { return below(3) ? below(most + 1) : below(65); });
    std::generate(queries.begin(), queries.end(), [&] {
      return i % 3 == 1 ? most_queries : common && below(20) ? common : below(most_queries + 1);
    });
    const auto plan_both = [&] {
      return std::pair(plan<0>(lengths, queries, heads, 64, 132, most, most_queries).items,
                       plan<8>(lengths, queries, heads, 16, 132, most, most_queries).items);
    };
    const auto alone = plan_both();
    lengths.resize(b + 1 + below(600));
    queries.resize(lengths.size());
    ASSERT_EQ(alone, plan_both()) << "b=" << b << " and " << lengths.size() - b << " that pad";
  }
}

TEST_F(PlanRequests, RequestsOfDifferentQueriesShareTheWorkersEvenly) {
  // No worker has more than 1.2 of its share of the work: groups of workers are whole.
  std::mt19937 random(3);
  for (int heads : {16, 64, 128})
    for (int b : {32, 128}) {
      std::vector<int> queries(b);
      long long work = 0;
      for (int& n : queries) n = 1 + int(random() % 8);
      for (int n : queries) work += (n * heads + 63) / 64 * (64 + kCosts.overhead());
      const Result mixed = plan<0>(std::vector<int>(b, 4096), queries, heads, 64, 132, 4096, 8);
      EXPECT_LE(mixed.load * 132, 1.2 * work) << heads << " heads, b=" << b;
    }
}

TEST_F(PlanRequests, TilesOfARequestReadItsTokensTogether) {
  // 4 queries on average. Tiles whose workers stand side by side and begin with the same block read once for all, so
  // the blocks of a request of up to kSides tiles should be read once, however the work is divided.
  const std::array<int, 8> in_turn = {1, 8, 2, 4, 3, 4, 6, 4};
  for (int heads : {16, 32, 64, 128}) {
    std::vector<int> queries(128);
    for (int r = 0; r < 128; ++r) queries[r] = in_turn[r % 8];
    const Result mixed = plan<0>(std::vector<int>(128, 4096), queries, heads, 64, 132, 4096, 8);
    std::map<std::array<int, 3>, int> workers;  // by request, row tile and begin
    for (const std::vector<int>& item : mixed.items) workers[{item[1], item[2], item[3]}] = item[0];
    int read = 0, least = 0;
    for (const std::vector<int>& item : mixed.items) {
      const auto beside = workers.find({item[1], item[2] - 1, item[3]});
      if (beside == workers.end() || beside->second != item[0] - 1) read += item[4] - item[3];
    }
    for (int n : queries) least += ((n * heads + 63) / 64 + kSides - 1) / kSides * 64;
    EXPECT_LE(read, 1.05 * least) << heads << " heads";
    EXPECT_LE(mixed.load * 132, 1.1 * mixed.sum) << heads << " heads";
  }
}

TEST_F(PlanRequests, ShortRequestsAreCutOnlyWhereMergesPay) {
  const auto merges = [&](int b, int tokens, int row_tiles) {
    return plan<0>(std::vector<int>(b, tokens), row_tiles, 132, tokens).merges;
  };
  EXPECT_EQ(merges(4, 128, 1), 0);
  EXPECT_EQ(merges(32, 256, 1), 0);
  EXPECT_EQ(merges(16, 512, 2), 32);
  EXPECT_EQ(merges(4, 4096, 1), 4);
}

// More requests than groups of workers, of any lengths, which to cut would cost as much as they take themselves.
TEST_F(PlanRequests, ShortRequestsAreDealtEvenly) {
  std::mt19937 random(8);
  for (int most : {256, 1024, 2048})
    for (int row_tiles : {1, 2, 16})
      for (int per_group : {110, 160, 195, 310, 480}) {  // hundredths
        const int b = 132 / std::min(row_tiles, 8) * per_group / 100;
        std::vector<int> lengths(b);
        for (int& n : lengths) n = 1 + int(random() % unsigned(most));
        const Result dealt = plan<0>(lengths, row_tiles, 132, most);
        const double longest = most / 64 + kCosts.overhead();
        EXPECT_LE(cost_of(dealt), 1.35 * std::max(dealt.sum / 132.0, longest))
            << b << " of up to " << most << " tokens, " << row_tiles << " row tiles";
      }
}

// Each group gets one of the long ones, and then as many of the short ones as any other.
TEST_F(PlanRequests, RequestsAreNotDealtWhereTheyFallEvenly) {
  for (const auto& [longs, blocks, shorts] : {std::array{44, 10, 352}, std::array{66, 16, 396}}) {
    std::vector<int> lengths(longs, 64 * blocks);
    lengths.resize(longs + shorts, 64);
    EXPECT_EQ(plan<0>(lengths, 1, 132, 64 * blocks).load, blocks + kCosts.overhead()) << longs << " long ones";
  }
}

TEST_F(PlanRequests, FewOtherRequestsDoNotChangeTheSide) {
  for (int common : {6, 9, 13, 20}) {
    std::vector<int> queries(200, common);
    queries[17] = 1;
    queries[117] = common + 2;
    const Result mixed = plan<0>(std::vector<int>(200, 32768), queries, 64, 64, 132, 32768, common + 2);
    EXPECT_LE(mixed.load * 132, 1.06 * mixed.sum) << common << " row tiles";
  }
}

TEST_F(PlanRequests, WrongLengthsAndQueriesAreCutAndReported) {
  std::vector<WorkItem> items(132 * 16);
  std::vector<MergeState> merges(264);
  int status = -1;
  auto status_of = [&](std::vector<int> lengths, std::vector<int> starts) {
    static constexpr PlanRequestsProblem problem;
    const PlanRequestsArguments arguments = {
        lengths.data(), starts.data(), items.data(), merges.data(), &status, 2, 16, 16, 132, 16, 2, 1000, 4, 2, 2,
        0.01f,          0.012f};
    block_.run(kPlanRequestsBlocks, [&] { plan_requests<problem, kTiling>(arguments); });
    for (int w = 0; w < 132; ++w)
      for (const WorkItem* item = &items[w * 16]; item->begin != item->end; ++item) {
        EXPECT_LE(item->tokens, 1000);
        EXPECT_LE(item->end, 16);
        EXPECT_LE(item->queries, 2);
        EXPECT_LE(item->first_row + item->queries * 16, 4 * 16);
      }
    return status;
  };
  EXPECT_EQ(status_of({1000, 0}, {0, 2, 4}), 0);
  EXPECT_EQ(status_of({1001, 0}, {0, 2, 4}), kWrongTokens);
  EXPECT_EQ(status_of({5, -1}, {0, 2, 4}), kWrongTokens);
  EXPECT_EQ(status_of({5, 1 << 30}, {0, 3, 4}), kWrongTokens | kWrongQueries);
  EXPECT_EQ(status_of({5, 5}, {0, 2, 1}), kWrongQueries);
  EXPECT_EQ(status_of({5, 5}, {3, 5, 5}), kWrongQueries);
  EXPECT_EQ(status_of({5, 5}, {-1, 0, 0}), kWrongQueries);
}

// Requests would share queries, so their row tiles could be more than the lists have room for.
TEST_F(PlanRequests, NothingIsPlannedWhereQueryStartsFall) {
  static constexpr PlanRequestsProblem problem;
  constexpr int b = 512, workers = 132, queries = 16, heads = 128, tokens = 4096, rounds = 40;
  std::vector<WorkItem> items(workers * rounds);
  std::vector<MergeState> merges(2 * workers);
  for (int rising = 1; rising <= 2; ++rising) {
    std::vector<int> lengths(b, tokens), starts;
    for (int r = 0; r <= b; ++r) starts.push_back(r % (rising + 1) * queries / rising);
    for (WorkItem& item : items) item.begin = -1;
    int status = -1;
    const PlanRequestsArguments arguments = {
        lengths.data(), starts.data(), items.data(), merges.data(), &status, b, heads, 64,    workers,
        rounds,         queries,       tokens,       2 * queries,   2,       2, 0.01f, 0.012f};
    block_.run(kPlanRequestsBlocks, [&] { plan_requests<problem, kTiling>(arguments); });
    EXPECT_EQ(status, kWrongQueries);
    for (int w = 0; w < workers; ++w) {
      EXPECT_EQ(items[w * rounds].begin, 0) << w;
      EXPECT_EQ(items[w * rounds].end, 0) << w;
      for (int i = 1; i < rounds; ++i) EXPECT_EQ(items[w * rounds + i].begin, -1) << w << ", " << i;
    }
  }
}

// Of a context that several share, the plan is that of the tokens which are here.
TEST_F(PlanRequests, AShardIsPlannedByItsTokens) {
  std::mt19937 random(4);
  auto below = [&](int end) { return int(random() % unsigned(end)); };
  for (int i = 0; i < 24; ++i) {
    const int shards = 2 + below(5), turn = 1 << below(6), shard = below(shards), b = 1 + below(40), most = 3000;
    std::vector<int> whole(b), here(b, 0), starts(1, 0);
    for (int r = 0; r < b; ++r) {
      whole[r] = below(4) ? below(most + 1) : below(2 * shards * turn);
      for (int token = 0; token < whole[r]; ++token) here[r] += token / turn % shards == shard;
      starts.push_back(starts.back() + below(5));
    }
    const auto items_of = [&](auto plan, const std::vector<int>& lengths) {
      std::vector<WorkItem> items(132 * 400);
      std::vector<MergeState> merges(4000);
      int status = -1;
      PlanRequestsArguments arguments = {lengths.data(),
                                         starts.data(),
                                         items.data(),
                                         merges.data(),
                                         &status,
                                         b,
                                         16,
                                         16,
                                         132,
                                         400,
                                         4,
                                         most,
                                         starts.back(),
                                         2,
                                         2.5f,
                                         0.03f,
                                         0.012f,
                                         Shards(shards, shard, turn)};
      block_.run(kPlanRequestsBlocks, [&] { plan(arguments); });
      EXPECT_EQ(status, 0);
      return items;
    };
    static constexpr PlanRequestsProblem of_shards{.shards = true}, of_all;
    const auto got = items_of([](auto& with) { plan_requests<of_shards, kTiling>(with); }, whole);
    const auto expected = items_of([](auto& with) { plan_requests<of_all, kTiling>(with); }, here);
    for (std::size_t item = 0; item < got.size(); ++item) {
      WorkItem local = got[item];
      EXPECT_EQ(local.whole, local.begin == local.end ? 0 : whole[local.request]);
      local.whole = 0;
      ASSERT_EQ(std::memcmp(&local, &expected[item], sizeof local), 0) << "item " << item;
    }
  }
}

// Where the line of requests is cut most tiles have two parts; of equal pieces none is written long before the other.
// 66 groups of two workers. One cut of a pass costs as much as an item; a pass in one piece has no parts.
TEST_F(PlanRequests, AFewPassesLessThanGroupsAreCutWhereLengthsDiffer) {
  std::vector<int> lengths(60);
  for (int i = 0; i < 60; ++i) lengths[i] = 64 * (1 + i * 7 % 20);  // 10.5 blocks on average
  const Result differ = plan<0>(lengths, 2, 132, 8192), equal = plan<0>(std::vector<int>(60, 64 * 11), 2, 132, 8192);
  EXPECT_GT(differ.taken_up, 30);
  EXPECT_LE(differ.load, 16);
  EXPECT_EQ(equal.merges, 0);
  EXPECT_EQ(equal.load, 11 + kCosts.overhead());
}

TEST_F(PlanRequests, PartsOfTheLineAreTakenUpAndPiecesAreMerged) {
  std::mt19937 random(7);
  std::vector<int> lengths(128);
  for (int& n : lengths) n = 1 + int(random() % 8192);
  const Result line = plan<0>(lengths, 1, 132, 8192);
  EXPECT_GT(2 * line.taken_up, line.merges);
  const Result pieces = plan<0>(std::vector<int>(32, 4096), 2, 132, 4096);
  EXPECT_EQ(pieces.merges, 64);
  EXPECT_EQ(pieces.taken_up, 0);
}

// 126 plans. Many more: kernels_tests --gtest_filter=PlanRequests.AnyLengths* --gtest_shuffle --gtest_random_seed=1
// --gtest_repeat=800 --gtest_brief, where every repetition has the next seed.
TEST_F(PlanRequests, AnyLengthsAreCoveredOnce) {
  const int seed = std::max(1, testing::UnitTest::GetInstance()->random_seed());
  std::mt19937 random(seed);
  auto below = [&](int end) { return int(random() % unsigned(end)); };
  for (int i = 0; i < 42 && !HasFailure(); ++i) {
    const int most = i >= 40 ? 1 << 20 : 1 << below(17), kind = below(6);
    const int most_queries = 1 + below(9), heads = 1 + below(130), tile_rows = 16 << below(3);
    const int row_tiles = below(4) == 0 ? 1 + below(300) : 1 + below(5);
    const int workers = below(3) ? 132 : 1 + below(kMaxWorkers);
    const int fits = (1 << 20) / (std::max(row_tiles, (most_queries * heads - 1) / tile_rows + 1) * (most / 64 + 1));
    const int b = std::min(i % 9 == 8   ? 1 + below(kMaxPlannedRequests)
                           : i % 3 == 0 ? 1 + below(8)
                                        : 1 + below(200),
                           std::max(fits, 1));
    auto length = [&] {
      switch (kind) {
        case 0:  // equal
          return most;
        case 1:  // few long ones among short ones
          return below(below(10) ? most / 16 + 1 : most);
        case 2:  // at the ends of blocks
          return std::clamp(64 * below(most / 64 + 1) + below(3) - 1, 0, most);
        case 3:  // heavy-tailed
          return most / (1 + below(most));
        case 4:  // one alone
          return 0;
        default:
          return below(most + 1);
      }
    };
    std::vector<int> lengths(b), queries(b);
    std::generate(lengths.begin(), lengths.end(), length);
    std::generate(queries.begin(), queries.end(), [&] { return below(most_queries + 1); });
    if (kind == 4) lengths[below(b)] = most;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", case " << i << ": b=" << b << " up to " << most
                                    << " tokens, kind " << kind << ", " << row_tiles << " row tiles on " << workers);
    if (i % 2) {
      plan<0>(lengths, row_tiles, workers, most);
      plan<2>(lengths, row_tiles, workers, most);
      plan<16>(lengths, row_tiles, workers, most);
    } else {
      plan<0>(lengths, queries, heads, tile_rows, workers, most, most_queries);
      plan<2>(lengths, queries, heads, tile_rows, workers, most, most_queries);
      plan<16>(lengths, queries, heads, tile_rows, workers, most, most_queries);
    }
  }
}

}  // namespace
}  // namespace hypermla::cute
