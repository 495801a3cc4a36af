// The planner of the prefill kernel for Hopper, run as C++ threads: every tile of 128 queries of every head must be
// drawn once, with the tokens that its queries see, or in parts that have each of these tokens once.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "decompressed/plan_prefill.cuh"
#include "decompressed/prefill_items.cuh"

namespace hypermla::cute {
namespace {

constexpr PlanPrefillTiling kTiling{.threads = 160};  // fewer than on a GPU: threads of a CPU meet slowly

class PlanPrefill : public testing::Test {
 protected:
  // Plans requests that begin at `starts`; returns the items.
  std::vector<PrefillItem> plan(const std::vector<int>& query_starts, const std::vector<int>& token_starts, int heads,
                                int all_queries, int max_tokens, bool causal = true) {
    const int b = int(query_starts.size()) - 1;
    memory_.assign(2 + (b + 1) * sizeof(PrefillItem) / sizeof(PrefillList), PrefillList{});
    list_ = memory_.data();
    auto* const items = reinterpret_cast<PrefillItem*>(list_ + 1);
    items[b].query = -7;
    std::vector<unsigned long long> arrived(slots_ + 1, 7);
    const PlanPrefillArguments arguments = {.query_starts = query_starts.data(),
                                            .token_starts = token_starts.data(),
                                            .list = list_,
                                            .arrived = arrived.data(),
                                            .requests = b,
                                            .heads = heads,
                                            .all_queries = all_queries,
                                            .max_tokens = max_tokens,
                                            .causal = causal,
                                            .processors = processors_,
                                            .slots = slots_};
    block_.run(1, [&] { plan_prefill<kTiling>(arguments); });
    EXPECT_EQ(items[b].query, -7) << "written behind the end";
    EXPECT_EQ(list_->drawn, 0);
    EXPECT_EQ(std::count(arrived.begin(), arrived.end(), 0u), slots_);
    EXPECT_EQ(arrived.back(), 7u);
    return {items, items + list_->items};
  }

  // Draws all tiles, and checks each.
  void check(const std::vector<int>& query_starts, const std::vector<int>& token_starts, int heads, bool causal) {
    int max_tokens = 1;
    for (std::size_t r = 0; r + 1 < token_starts.size(); ++r)
      max_tokens = std::max(max_tokens, token_starts[r + 1] - token_starts[r]);
    const std::vector<PrefillItem> items =
        plan(query_starts, token_starts, heads, std::max(1, query_starts.back()), max_tokens, causal);
    EXPECT_EQ(list_->status, 0);
    for (std::size_t i = 1; i < items.size(); ++i)
      EXPECT_LE(items[i].tokens, items[i - 1].tokens * 9 / 8 + 128) << "long requests come first";
    // As thread blocks would: each goes on from the item of its last tile.
    std::map<int, int> item_of;
    block_.run(1, [&] {
      if (threadIdx.x >= 32) return;
      for (int first : {0, 5})
        for (int index = first, at = 0; index < list_->tiles; index += 1 + list_->tiles / 8) {
          at = prefill_item_of(list_, index, at);
          if (threadIdx.x == 0) item_of[index] = at;
        }
    });
    std::map<int, std::size_t> at_query;  // the items
    for (std::size_t i = 0; i < items.size(); ++i) at_query[items[i].query] = i;
    long long tiles = 0;
    std::size_t requests = 0;
    for (std::size_t r = 0; r + 1 < query_starts.size(); ++r) {
      if (query_starts[r + 1] == query_starts[r]) continue;
      ++requests;
      ASSERT_TRUE(at_query.count(query_starts[r]));
      const PrefillItem& item = items[at_query[query_starts[r]]];
      ASSERT_TRUE(item.parts >= 1 && item.parts <= kMaxPrefillParts);
      tiles += (query_starts[r + 1] - query_starts[r] + 127) / 128 * heads * item.parts;
    }
    ASSERT_EQ(list_->tiles, tiles);
    ASSERT_EQ(items.size(), requests);
    std::set<std::pair<int, int>> drawn;  // first query, head
    std::set<int> slots;
    std::size_t i = 0;
    int blocks = 1 << 30, first_head = 0, attended = 0;  // `attended`: blocks of a tile's parts before this one
    for (int index = 0; index < tiles; ++index) {
      while (i + 1 < items.size() && items[i + 1].first_tile <= index) ++i, blocks = 1 << 30;
      if (item_of.count(index)) {
        ASSERT_EQ(item_of[index], int(i));
      }
      const int part = (index - items[i].first_tile) % items[i].parts,
                number = (index - items[i].first_tile) / items[i].parts;
      PrefillTile tile = prefill_tile(items[i], number, heads, causal);
      if (items[i].parts > 1) cut_tile(tile, items[i], number, part, false);
      const auto r = std::find(query_starts.rbegin(), query_starts.rend(), items[i].query).base() -
                     query_starts.begin() - 1;  // the last that begins there: those before it have no queries
      const int row = tile.query - query_starts[r];
      const int queries = query_starts[r + 1] - query_starts[r], tokens = token_starts[r + 1] - token_starts[r];
      ASSERT_EQ(row % 128, 0);
      ASSERT_EQ(tile.rows, std::min(128, queries - row));
      ASSERT_GT(tile.rows, 0);
      ASSERT_TRUE(tile.head >= 0 && tile.head < heads);
      ASSERT_EQ(int(tile.parts), items[i].parts);
      ASSERT_EQ(int(tile.part), part);
      if (tile.part == 0) {
        ASSERT_TRUE(drawn.emplace(tile.query, tile.head).second);
        attended = 0;
      }
      ASSERT_TRUE(drawn.count({tile.query, tile.head})) << "a tile's parts follow each other";
      ASSERT_EQ(tile.tokens, tokens - attended * 128);
      ASSERT_EQ(tile.token, token_starts[r] + attended * 128);
      if (tile.parts > 1) {
        const int slot = int(tile.first_slot + tile.part);
        ASSERT_TRUE(slot < slots_ && slots.insert(slot).second);
        ASSERT_GE(tile.blocks, 1);
      }
      int seen = 0;  // by some query of the tile
      for (int j = 0; j < tile.rows; ++j) {
        const int of_query = causal ? std::max(0, tokens - queries + row + j + 1) : tokens;
        if (causal) {
          ASSERT_EQ(std::max(0, attended * 128 + std::min(tile.tokens, tile.diagonal + j + 1)), of_query);
        }
        seen = std::max(seen, of_query);
      }
      attended += tile.blocks;
      if (tile.part + 1 < tile.parts) continue;
      ASSERT_EQ(attended, (seen + 127) / 128);
      // A section's tiles of one row stand side by side, the longest row first.
      if (tile.head < first_head || tile.head >= first_head + items[i].section) blocks = 1 << 30;
      if (blocks == 1 << 30) first_head = tile.head;
      ASSERT_LE(attended, blocks);
      blocks = attended;
    }
  }

  int processors_ = 132, slots_ = prefill_slots(132);
  device_threads::Block block_{kTiling.threads};
  std::vector<PrefillList> memory_;
  PrefillList* list_ = nullptr;
};

TEST_F(PlanPrefill, EveryTileIsDrawnOnce) {
  std::mt19937 random(1);
  auto below = [&](int end) { return int(random() % unsigned(end)); };
  for (int i = 0; i < 40 && !HasFailure(); ++i) {
    const int b = i % 10 == 9 ? 1 + below(kMaxPlannedRequests) : 1 + below(i % 3 ? 100 : 4);
    const int most_queries = 1 << below(b > 100 ? 8 : 13), most_tokens = 1 << below(18), heads = 1 + below(130);
    std::vector<int> query_starts = {below(3) * 100}, token_starts = {below(3) * 100};
    for (int r = 0; r < b; ++r) {
      query_starts.push_back(query_starts.back() + (below(4) ? below(most_queries + 1) : 0));
      token_starts.push_back(token_starts.back() + (below(6) ? below(most_tokens + 1) : 0));
    }
    SCOPED_TRACE(testing::Message() << "case " << i << ": b=" << b << ", up to " << most_queries << " queries and "
                                    << most_tokens << " tokens, " << heads << " heads");
    check(query_starts, token_starts, heads, i % 2);
  }
}

TEST_F(PlanPrefill, TokensAreCutWhereTilesAreFew) {
  // Requests alike on 132 thread blocks, and into how many parts their tokens should be cut.
  struct Case {
    int requests, queries, tokens, heads, parts;
    bool causal = false;
  };
  for (const Case& of : {Case{1, 512, 16384, 16, 2},  // 64 tiles of 128 blocks
                         {1, 512, 16384, 16, 2, true},
                         {2, 1, 30000, 16, 4},           // 32 of 235
                         {1, 1, 1 << 20, 1, 5},          // as many as there are warps to try lengths, on a GPU 32
                         {1, 512, 16384, 128, 1},        // 512: nearly four rounds
                         {8, 1024, 1024, 128, 1, true},  // tiles enough
                         {1, 1, 128, 16, 1},             // short ones
                         {1, 1, 1024, 16, 4},
                         {1, 55, 1243, 16, 5},
                         {1, 128, 512, 16, 1},            // a merge of all rows takes longer
                         {1, 4096, 4096, 1, 1, true}}) {  // the first tile sees little
    std::vector<int> query_starts = {0}, token_starts = {0};
    for (int r = 1; r <= of.requests; ++r) {
      query_starts.push_back(r * of.queries);
      token_starts.push_back(r * of.tokens);
    }
    SCOPED_TRACE(testing::Message() << of.requests << "x" << of.queries << " over " << of.tokens << ", " << of.heads);
    check(query_starts, token_starts, of.heads, of.causal);
    EXPECT_EQ(reinterpret_cast<const PrefillItem*>(list_ + 1)->parts, of.parts);
    slots_ = 0;
    check(query_starts, token_starts, of.heads, of.causal);
    EXPECT_EQ(reinterpret_cast<const PrefillItem*>(list_ + 1)->parts, 1);
    slots_ = prefill_slots(processors_);
  }
  // A long request among short ones: only its tokens are cut.
  const std::vector<PrefillItem> items = plan({0, 128, 528, 656}, {0, 400, 800, 100800}, 16, 656, 1 << 20, true);
  ASSERT_EQ(items.size(), 3u);
  EXPECT_EQ(items[0].tokens, 100000);
  EXPECT_GE(items[0].parts, 4);
  EXPECT_EQ(items[1].parts + items[2].parts, 2);
  // 128 tiles of its parts are one round: ten short requests fill what that leaves, they do not make more of them.
  std::vector<int> query_starts = {0}, token_starts = {0};
  for (int r = 0; r <= 10; ++r) {
    query_starts.push_back(query_starts.back() + 128);
    token_starts.push_back(token_starts.back() + (r ? 128 : 5600));
  }
  EXPECT_EQ(plan(query_starts, token_starts, 32, query_starts.back(), 5600).at(0).parts, 4);
}

TEST_F(PlanPrefill, HeadsOfASectionFitTheCache) {
  for (const auto& [tokens, section] : {std::pair(8192, 8), {16384, 4}, {1 << 20, 1}, {100, 128}, {0, 128}})
    EXPECT_EQ(plan({0, 1}, {0, tokens}, 128, 1, 1 << 20).at(0).section, section) << tokens;
  EXPECT_EQ(plan({0, 1}, {0, 6000}, 32, 1, 1 << 20).at(0).section, 8);  // not 10, 10, 10 and 2
}

TEST_F(PlanPrefill, WhatExceedsTheCapacityIsCutAndReported) {
  const auto status_of = [&](const std::vector<int>& query_starts, const std::vector<int>& token_starts) {
    for (const PrefillItem& item : plan(query_starts, token_starts, 4, 300, 1000)) {
      EXPECT_GE(item.query, 0);
      EXPECT_LE(item.query + item.queries, 300);
      EXPECT_TRUE(item.tokens >= 0 && item.tokens <= 1000);
    }
    return list_->status;
  };
  EXPECT_EQ(status_of({0, 200, 300}, {0, 1000, 1000}), 0);
  EXPECT_EQ(status_of({0, 200, 301}, {0, 1000, 1000}), kWrongQueryStarts);
  EXPECT_EQ(status_of({0, 200, 100}, {0, 1000, 1000}), kWrongQueryStarts);
  EXPECT_EQ(status_of({-5, 200, 300}, {0, 1000, 1000}), kWrongQueryStarts);
  EXPECT_EQ(status_of({0, 1, 2}, {0, 1001, 1001}), kWrongTokenStarts);
  EXPECT_EQ(status_of({0, 1, 2}, {0, 5, 4}), kWrongTokenStarts);
  EXPECT_EQ(status_of({0, 1, 2}, {-2, 5, 6}), kWrongTokenStarts);
  EXPECT_EQ(status_of({0, -0x7fffffff - 1, 0x7fffffff}, {0x7fffffff, -0x7fffffff, 0}),
            kWrongQueryStarts | kWrongTokenStarts);
  // Where query starts fall there are no tiles: their sum could be more than an integer holds.
  std::vector<int> falling, tokens(kMaxPlannedRequests + 1, 0);
  for (int r = 0; r <= kMaxPlannedRequests; ++r) falling.push_back(r % 2 * (1 << 20));
  EXPECT_TRUE(plan(falling, tokens, 1024, 1 << 20, 1000).empty());
  EXPECT_EQ(list_->tiles, 0);
  EXPECT_EQ(list_->status, kWrongQueryStarts);
  // The others are as they were.
  const std::vector<PrefillItem> items = plan({0, 200, 500, 501}, {0, 7, 14, 21}, 4, 300, 1000);
  ASSERT_EQ(items.size(), 1u);
  EXPECT_EQ(items[0].queries, 200);
  EXPECT_EQ(items[0].tokens, 7);
}

}  // namespace
}  // namespace hypermla::cute
