// Shared prefixes on the device, run as plain C++: what find_prefixes decides, the lists of both planners as move_items
// leaves them, and the merge, against attention to every request's tokens one by one.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <numbers>
#include <random>

#include "hopper/fragments.h"  // stands in for CUDA, which the kernels below need

#include "latent/find_prefixes.cuh"
#include "latent/merge_prefixes.cuh"
#include "latent/move_items.cuh"
#include "latent/work_plan.h"

namespace hypermla::cute {
namespace {

constexpr int kWorkers = 132, kColumns = 512;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr WorkCosts kCosts;
constexpr PlanRequestsTiling kTiling;
constexpr PlanRequestsProblem kProblem;

// What decides whether a group is worth it.
struct Costs {
  int least_blocks = 1, tile_cost = 0, least_gain = 0;
};

// A step, whose rows of the table hold entries that must not be read behind a request's end.
struct Step {
  int heads = 16, page = 64, own_rows = 16, most_queries = 1, most_tokens = 4096;
  int room = 0;  // queries of a step beyond those that there are
  bool equal_queries = false;
  std::vector<int> lengths = {}, queries = {};
  std::vector<std::vector<int>> pages = {};  // of each request, from the first token on

  int requests() const { return int(lengths.size()); }
};

class FindPrefixes : public testing::Test {
 protected:
  struct List {
    std::vector<WorkItem> items;
    int rounds = 0;
  };
  struct Found {
    std::vector<int> own_lengths, prefix_blocks, prefix_lengths, prefix_starts;
    std::vector<PrefixGroup> group;
    std::vector<QueryPlace> places;
    int groups = 0;
    List own, prefixes;
  };

  Found find(const Step& at, const Costs& costs) {
    const int b = at.requests(), width = at.most_tokens / at.page + 3;
    starts_.assign(1, 0);
    for (int n : at.queries) starts_.push_back(starts_.back() + n);
    table_.assign(std::size_t(std::max(b, 1)) * width, -5);
    for (int r = 0; r < b; ++r) {
      std::copy(at.pages[r].begin(), at.pages[r].end(), &table_[std::size_t(r) * width]);
      // Behind the end every row holds the same, as what another request has left there.
      for (std::size_t i = at.pages[r].size(); i < std::size_t(width); ++i) table_[std::size_t(r) * width + i] = 7;
    }
    const int all_queries = starts_.back() + at.room, most_groups = b / 2;
    Found found;
    found.own_lengths.assign(b + 1, -7);
    found.prefix_blocks.assign(b + 1, -7);
    found.prefix_lengths.assign(most_groups + 1, -7);
    found.prefix_starts.assign(most_groups + 2, -7);
    found.group.assign(most_groups + 1, {-7, -7});
    found.places.assign(all_queries + 1, {-7, -7});
    const FindPrefixesArguments with = {.lengths = at.lengths.data(),
                                        .query_starts = at.equal_queries ? nullptr : starts_.data(),
                                        .block_table = table_.data(),
                                        .table_stride = width,
                                        .own_lengths = found.own_lengths.data(),
                                        .prefix_blocks = found.prefix_blocks.data(),
                                        .prefix_lengths = found.prefix_lengths.data(),
                                        .prefix_starts = found.prefix_starts.data(),
                                        .group = found.group.data(),
                                        .places = found.places.data(),
                                        .requests = b,
                                        .groups = most_groups,
                                        .heads = at.heads,
                                        .page = at.page,
                                        .queries = at.most_queries,
                                        .max_tokens = at.most_tokens,
                                        .all_queries = all_queries,
                                        .own_rows = at.own_rows,
                                        .prefix_rows = 64,
                                        .least_blocks = costs.least_blocks,
                                        .tile_cost = costs.tile_cost,
                                        .least_gain = costs.least_gain};
    finder_.run(1, [&] { find_prefixes(with); });
    EXPECT_EQ(found.own_lengths.back(), -7);
    EXPECT_EQ(found.prefix_blocks.back(), -7);
    EXPECT_EQ(found.prefix_lengths.back(), -7);
    EXPECT_EQ(found.prefix_starts.back(), -7);
    EXPECT_EQ(found.group.back().request, -7);
    EXPECT_EQ(found.places.back().request, -7);
    while (found.groups < most_groups && found.prefix_lengths[found.groups] > 0) ++found.groups;

    found.own = plan(found.own_lengths.data(), with.query_starts, b, at, at.own_rows, at.most_queries, all_queries);
    found.prefixes =
        plan(found.prefix_lengths.data(), found.prefix_starts.data(), most_groups, at, 64, all_queries, all_queries);
    const MoveItemsArguments move = {.own = found.own.items.data(),
                                     .prefixes = found.prefixes.items.data(),
                                     .prefix_blocks = found.prefix_blocks.data(),
                                     .group = found.group.data(),
                                     .own_workers = kWorkers,
                                     .own_rounds = found.own.rounds,
                                     .prefix_rounds = found.prefixes.rounds,
                                     .heads = at.heads};
    mover_.run(2 * kWorkers, [&] { move_items(move); });
    return found;
  }

  List plan(const int* lengths, const int* query_starts, int requests, const Step& at, int rows, int queries,
            int all_queries) {
    const long long row_tiles = (queries * at.heads + rows - 1) / rows;
    const long long tiles = (all_queries * at.heads + rows - 1) / rows + requests;
    const RequestListSizes sizes =
        request_list_sizes(kWorkers, std::max(requests, 1), row_tiles, tiles, (at.most_tokens + 63) / 64, 0,
                           kCosts.overhead(), kCosts.combine, kCosts.partial);
    // Stale items of another step behind those that close the lists.
    List list{std::vector<WorkItem>(std::size_t(sizes.rounds) * kWorkers, WorkItem{1 << 28, 0, 0, 1, 0, 0, 0, 0, 0, 0}),
              int(sizes.rounds)};
    std::vector<MergeState> merges(sizes.slots);
    int status = -1;
    const PlanRequestsArguments with = {.lengths = lengths,
                                        .query_starts = query_starts,
                                        .items = list.items.data(),
                                        .merges = merges.data(),
                                        .status = &status,
                                        .requests = requests,
                                        .heads = at.heads,
                                        .tile_rows = rows,
                                        .workers = kWorkers,
                                        .rounds = list.rounds,
                                        .queries = queries,
                                        .max_tokens = at.most_tokens,
                                        .all_queries = all_queries,
                                        .overhead = kCosts.overhead(),
                                        .merge_cost = float(kCosts.combine),
                                        .part_cost = float(kCosts.partial),
                                        .traffic = 0.012f};
    planner_.run(kPlanRequestsBlocks, [&] { plan_requests<kProblem, kTiling>(with); });
    EXPECT_EQ(status, 0);
    return list;
  }

  // What is decided must be possible: members share the pages of their prefix, and every query sees all of it.
  void check(const Step& at, const Found& found) const {
    const int b = at.requests();
    int member = 0, in_groups = 0;  // requests that have been looked at; queries of the groups before
    for (int g = 0; g < found.groups; ++g) {
      const int first = found.group[g].request, blocks = found.prefix_lengths[g] / 64;
      ASSERT_GE(first, member);
      for (; member < first; ++member) ASSERT_EQ(found.prefix_blocks[member], 0) << member;
      ASSERT_EQ(found.group[g].query, starts_[first]);
      ASSERT_EQ(found.prefix_starts[g], in_groups);
      const int end = g + 1 < found.groups ? found.group[g + 1].request : b;
      for (; member < end && found.prefix_blocks[member] > 0; ++member) {
        ASSERT_EQ(found.prefix_blocks[member], blocks);
        ASSERT_GT(at.queries[member], 0);
        ASSERT_GE(at.lengths[member] - 64 * blocks, at.queries[member]);
        for (int entry = 0; entry * at.page < 64 * blocks; ++entry)
          ASSERT_EQ(at.pages[member][entry], at.pages[first][entry]);
        in_groups += at.queries[member];
      }
      ASSERT_GE(member - first, 2);
    }
    for (; member < b; ++member) ASSERT_EQ(found.prefix_blocks[member], 0) << member;
    for (int g = found.groups; g <= b / 2; ++g) ASSERT_EQ(found.prefix_starts[g], in_groups);
    for (int r = 0; r < b; ++r) {
      ASSERT_EQ(found.own_lengths[r], at.lengths[r] - 64 * found.prefix_blocks[r]);
      for (int query = starts_[r]; query < starts_[r + 1]; ++query) {
        ASSERT_EQ(found.places[query].request, found.prefix_blocks[r] ? r : -1);
        ASSERT_EQ(found.places[query].query, query - starts_[r]);
      }
    }
    for (int query = starts_.back(); query < starts_.back() + at.room; ++query)
      ASSERT_EQ(found.places[query].request, -1);
  }

  // Attention as the kernels have it, from the work lists: rows of request and tile, tokens of the blocks by the item's
  // row of the table, masked by the item's tokens. A token is 8 numbers, repeated; keys and values are the same.
  struct State {
    double most = -INFINITY, sum = 0, o[8] = {};
    int tokens = 0;
  };
  void attend(const Step& at, const List& list, int rows, bool causal, std::vector<State>& states) const {
    const int width = at.most_tokens / at.page + 3;
    for (int worker = 0; worker < kWorkers; ++worker)
      for (const WorkItem* item = &list.items[std::size_t(worker) * list.rounds]; item->begin != item->end; ++item)
        for (int row = item->row_tile * rows; row < std::min((item->row_tile + 1) * rows, item->queries * at.heads);
             ++row) {
          State& state = states.at(item->first_row + row);
          const int query = row / at.heads, seen = item->tokens - (causal ? item->queries - query - 1 : 0);
          for (int token = 64 * item->begin; token < std::min({64 * item->end, seen, item->tokens}); ++token)
            add(state, item->first_row + row, table_.at(item->request * width + token / at.page), token % at.page);
        }
  }
  static double number(int seed, int column) { return std::sin(0.37 * seed + 1.3 * column); }
  static void add(State& state, int row, int page, int slot) {
    double score = 0, token[8];
    for (int c = 0; c < 8; ++c) {
      token[c] = number(977 * page + 13 * slot, c);
      score += 2 * number(31 * row, c) * token[c];
    }
    const double most = std::max(state.most, score), by = std::exp(state.most - most), weight = std::exp(score - most);
    state.sum = state.sum * by + weight;
    for (int c = 0; c < 8; ++c) state.o[c] = state.o[c] * by + weight * token[c];
    state.most = most;
    ++state.tokens;
  }

  // Both attentions and their merge, for all queries.
  void attend_and_merge(const Step& at, const Found& found, bool by_request, bool base2, bool positive) {
    const int queries = starts_.back(), rows = queries * at.heads, b = at.requests();
    std::vector<State> own(rows), prefixes(rows), expected(rows);
    attend(at, found.own, at.own_rows, true, own);
    attend(at, found.prefixes, 64, false, prefixes);
    const int o_head = kColumns + 8, o_token = at.heads * o_head + 16, lse_head = by_request ? at.most_queries : 1;
    const int lse_token = by_request ? 1 : at.heads + 1, lse_request = by_request ? at.heads * at.most_queries + 5 : 0;
    const float unit = base2 ? std::numbers::log2e_v<float> : 1.0f, empty = positive ? kInf : -kInf;
    constexpr std::uint16_t kPoison = 0x7fc1;
    std::vector<std::uint16_t> o(std::size_t(queries + 1) * o_token, kPoison),
        prefix_o(std::size_t(rows) * kColumns + 8, 0x7fc0);
    std::vector<float> lse(by_request ? b * lse_request + 1 : queries * lse_token + 1, 12345.0f);
    std::vector<float> prefix_lse(rows + 1, std::nanf(""));
    const auto lse_place = [&](int r, int query, int head) {
      return by_request ? r * lse_request + query * lse_token + head * lse_head
                        : (starts_[r] + query) * lse_token + head * lse_head;
    };
    for (int r = 0; r < b; ++r)
      for (int query = 0; query < at.queries[r]; ++query)
        for (int head = 0; head < at.heads; ++head) {
          const int token = starts_[r] + query, row = token * at.heads + head;
          const auto write = [&](const State& state, std::uint16_t* to, float& lse, float unit, float empty) {
            for (int c = 0; c < kColumns; ++c)
              to[c] = from_float(state.sum > 0 ? float(state.o[c % 8] / state.sum) : 0, DType::bfloat16);
            lse = state.sum > 0 ? float(state.most + std::log(state.sum)) * unit : empty;
          };
          write(own[row], &o[std::size_t(token) * o_token + head * o_head], lse[lse_place(r, query, head)], unit,
                empty);
          if (found.prefix_blocks[r])  // what nothing attends to has no output
            write(prefixes[row], &prefix_o[std::size_t(row) * kColumns], prefix_lse[row], std::numbers::log2e_v<float>,
                  -kInf);
          EXPECT_EQ(prefixes[row].tokens, 64 * found.prefix_blocks[r]);
          for (int t = 0; t < at.lengths[r] - at.queries[r] + query + 1; ++t)
            add(expected[row], row, at.pages[r][t / at.page], t % at.page);
        }
    const std::vector<std::uint16_t> o_before = o;
    const MergePrefixesArguments with = {.prefix_o = prefix_o.data(),
                                         .prefix_lse = prefix_lse.data(),
                                         .places = found.places.data(),
                                         .o = o.data(),
                                         .o_token_stride = o_token,
                                         .o_head_stride = o_head,
                                         .lse = lse.data(),
                                         .lse_token_stride = lse_token,
                                         .lse_head_stride = lse_head,
                                         .lse_request_stride = lse_request,
                                         .to_log2 = base2 ? 1 : std::numbers::log2e_v<float>,
                                         .from_log2 = base2 ? 1 : std::numbers::ln2_v<float>,
                                         .empty_lse = empty,
                                         .heads = at.heads,
                                         .blocks = (at.heads + kMergePrefixHeads - 1) / kMergePrefixHeads};
    merger_.run((queries + at.room) * with.blocks, [&] { merge_prefixes<DType::bfloat16>(with); });

    for (int r = 0; r < b; ++r)
      for (int query = 0; query < at.queries[r]; ++query)
        for (int head = 0; head < at.heads; ++head) {
          const int token = starts_[r] + query;
          const State& state = expected[token * at.heads + head];
          const float got = lse[lse_place(r, query, head)];
          if (state.tokens == 0) {
            ASSERT_EQ(got, empty);
          } else {
            ASSERT_TRUE(std::abs(got - (state.most + std::log(state.sum)) * unit) <= 2e-4) << r << " " << query;
          }
          const std::uint16_t* row = &o[std::size_t(token) * o_token + head * o_head];
          for (int c = 0; c < kColumns; ++c) {
            const double want = state.tokens ? state.o[c % 8] / state.sum : 0;
            ASSERT_TRUE(std::abs(to_float(row[c], DType::bfloat16) - want) <= 0.006) << r << " " << query << " " << c;
          }
        }
    for (std::size_t i = 0; i < o.size(); ++i)
      if (o_before[i] == kPoison) {
        ASSERT_EQ(o[i], kPoison) << "written between rows";
      }
    ASSERT_EQ(lse.back(), 12345.0f);
  }

  std::vector<int> starts_, table_;
  device_threads::Block finder_{kFindThreads}, planner_{kTiling.threads}, mover_{32}, merger_{kMergePrefixThreads};
};

// `members` of each group share so many tokens, and then have pages of their own.
Step groups_of(const std::vector<std::pair<int, int>>& members_and_shared, int own_tokens, Step at = {}) {
  int page = 100;
  for (const auto& [members, shared] : members_and_shared) {
    std::vector<int> prefix(shared / at.page);
    for (int& one : prefix) one = page++;
    for (int i = 0; i < members; ++i) {
      at.lengths.push_back(shared + own_tokens);
      at.queries.push_back(at.most_queries);
      at.pages.push_back(prefix);
      while (int(at.pages.back().size()) * at.page < at.lengths.back()) at.pages.back().push_back(page++);
    }
  }
  at.most_tokens = std::max(at.most_tokens, *std::max_element(at.lengths.begin(), at.lengths.end()));
  return at;
}

using Groups = std::vector<std::array<int, 2>>;  // first request and tokens
Groups groups_in(const auto& found) {
  Groups groups;
  for (int g = 0; g < found.groups; ++g) groups.push_back({found.group[g].request, found.prefix_lengths[g]});
  return groups;
}

TEST_F(FindPrefixes, SamplesOfOnePromptAreAGroup) {
  for (const int samples : {64, 512, 2048}) {
    const Step at = groups_of({{samples, 1024}}, 100);
    const Found found = find(at, {.least_blocks = 8, .tile_cost = 6, .least_gain = 4 * kWorkers});
    check(at, found);
    EXPECT_EQ(groups_in(found), (Groups{{0, 1024}})) << samples;
  }
}

// The requests behind the last group have nothing to attend to; all workers share what the groups have.
TEST_F(FindPrefixes, TheWorkersShareThePrefixesEvenly) {
  for (const auto& [groups, samples] : {std::pair{1, 64}, {1, 128}, {1, 512}, {2, 64}, {8, 16}, {64, 8}}) {
    const std::vector<std::pair<int, int>> members(groups, {samples, 8192});
    const Found found = find(groups_of(members, 512), {});
    ASSERT_EQ(found.groups, groups);
    int busiest = 0, all = 0;
    for (int worker = 0; worker < kWorkers; ++worker) {
      int load = 0;
      for (const WorkItem* item = &found.prefixes.items[std::size_t(worker) * found.prefixes.rounds];
           item->begin != item->end; ++item)
        load += item->end - item->begin;
      busiest = std::max(busiest, load);
      all += load;
    }
    EXPECT_EQ(all, groups * ((samples * 16 + 63) / 64) * 128);
    EXPECT_LE(busiest * kWorkers, 1.05 * all) << groups << " groups of " << samples;
  }
}

TEST_F(FindPrefixes, WhatSavesTooLittleIsNotShared) {
  const Costs costs = {.least_blocks = 8, .tile_cost = 6, .least_gain = 4 * kWorkers};
  EXPECT_EQ(find(groups_of({{20, 512}}, 100), costs).groups, 0);   // 15 row tiles of 8 blocks: less than a step costs
  EXPECT_EQ(find(groups_of({{90, 512}}, 100), costs).groups, 0);   // 67 of 8, but 23 cost 6 each: 398 of 528 blocks
  EXPECT_EQ(find(groups_of({{140, 512}}, 100), costs).groups, 1);  // 630
  EXPECT_EQ(find(groups_of({{400, 448}}, 100), costs).groups, 0);  // shorter than 8 blocks
  // Of 128 heads every request fills its tiles.
  EXPECT_EQ(find(groups_of({{512, 1024}}, 100, {.heads = 128, .own_rows = 64}), costs).groups, 0);
  EXPECT_EQ(find(groups_of({{512, 1024}}, 100, {.own_rows = 64, .most_queries = 4}), costs).groups, 0);
}

TEST_F(FindPrefixes, TheLongerPrefixOfFewerIsTakenWhereItSavesMore) {
  // Questions of 8 samples each, behind a system prompt of 1024 tokens that all have.
  const auto with_system_prompt = [&](int questions, int samples, int of_question) {
    Step at = groups_of(std::vector<std::pair<int, int>>(questions, {samples, 1024 + of_question}), 100);
    for (auto& pages : at.pages)
      for (int i = 0; i < 16; ++i) pages[i] = 50 + i;
    const Found found = find(at, {});
    check(at, found);
    return found;
  };
  // Each question: 8 tiles become 2, of 48 blocks. All together: 128 become 32, of 16.
  EXPECT_EQ(with_system_prompt(16, 8, 2048).groups, 16);
  EXPECT_EQ(groups_in(with_system_prompt(16, 8, 0)), (Groups{{0, 1024}}));
  // 2 samples share 20 blocks and become one tile: 20 saved, of 64 questions 1280; all, 16 blocks, of 96 tiles: 1536.
  EXPECT_EQ(groups_in(with_system_prompt(64, 2, 256)), (Groups{{0, 1024}}));
}

TEST_F(FindPrefixes, GroupsAndOthersStandBesideEachOther) {
  Step at = groups_of({{1, 1024}, {4, 640}, {1, 64}, {1, 1024}, {3, 128}, {5, 128}}, 70);
  at.room = 3;
  const Found found = find(at, {});
  check(at, found);
  EXPECT_EQ(groups_in(found), (Groups{{1, 640}, {7, 128}, {10, 128}}));
}

TEST_F(FindPrefixes, NewTokensAreNeverShared) {
  // Both have the same pages to the end: 130 tokens, of which the last three are new.
  Step at = {.most_queries = 3, .lengths = {130, 130}, .queries = {3, 3}, .pages = {{1, 2, 3}, {1, 2, 3}}};
  EXPECT_EQ(groups_in(find(at, {})), (Groups{{0, 64}}));
  at.lengths = {131, 131};  // 128 before the new ones
  EXPECT_EQ(groups_in(find(at, {})), (Groups{{0, 128}}));
  at.queries = {3, 0};  // the other pads
  EXPECT_EQ(find(at, {}).groups, 0);
}

TEST_F(FindPrefixes, AStepThatIsWrongSharesNothing) {
  Step at = groups_of({{4, 640}}, 70);
  at.lengths[1] = at.most_tokens + 1;  // only this request is left out
  std::vector<int> own(4), blocks(4), lengths(2), starts = {0, 1, 2, 3, 4}, of_groups(3);
  std::vector<PrefixGroup> group(2);
  std::vector<QueryPlace> places(6, {-7, -7});
  std::vector<int> table;
  for (const auto& pages : at.pages) table.insert(table.end(), pages.begin(), pages.end());
  FindPrefixesArguments with = {.lengths = at.lengths.data(),
                                .query_starts = starts.data(),
                                .block_table = table.data(),
                                .table_stride = int(at.pages[0].size()),
                                .own_lengths = own.data(),
                                .prefix_blocks = blocks.data(),
                                .prefix_lengths = lengths.data(),
                                .prefix_starts = of_groups.data(),
                                .group = group.data(),
                                .places = places.data(),
                                .requests = 4,
                                .groups = 2,
                                .heads = 16,
                                .page = 64,
                                .queries = 1,
                                .max_tokens = at.most_tokens,
                                .all_queries = 6,
                                .own_rows = 16,
                                .prefix_rows = 64,
                                .least_blocks = 1};
  const auto groups = [&] {
    finder_.run(1, [&] { find_prefixes(with); });
    return std::count_if(lengths.begin(), lengths.end(), [](int tokens) { return tokens > 0; });
  };
  EXPECT_EQ(groups(), 1);
  EXPECT_EQ(group[0].request, 2);
  EXPECT_EQ(own, (std::vector{710, at.most_tokens + 1, 70, 70}));
  for (const std::vector<int>& wrong : {std::vector{0, 1, 0, 3, 4},
                                        {0, 1, 3, 4, 5},
                                        {0, 1, 2, 3, 7},
                                        {1, 2, 3, 4, 5},
                                        {-1, 0, 1, 2, 3},
                                        {0, 1, 2, 3, 1 << 30},
                                        {0, 1, 1 << 30, -(1 << 30), 4}}) {
    starts = wrong;
    std::fill(places.begin(), places.end(), QueryPlace{-7, -7});
    EXPECT_EQ(groups(), 0);
    EXPECT_EQ(own, at.lengths);
    EXPECT_EQ(of_groups, (std::vector{0, 0, 0}));
    for (const QueryPlace& place : places) EXPECT_EQ(place.request, -1);
  }
  with.requests = with.groups = 0;
  std::fill(places.begin(), places.end(), QueryPlace{-7, -7});
  finder_.run(1, [&] { find_prefixes(with); });
  EXPECT_EQ(of_groups[0], 0);
  for (const QueryPlace& place : places) EXPECT_EQ(place.request, -1);
}

// 60 steps. Many more: kernels_tests --gtest_filter=FindPrefixes.Any* --gtest_shuffle --gtest_random_seed=1
// --gtest_repeat=100 --gtest_brief, where every repetition has the next seed.
TEST_F(FindPrefixes, AnyStepIsAttendedToAsWithoutThem) {
  const int seed = std::max(1, testing::UnitTest::GetInstance()->random_seed());
  std::mt19937 random(seed);
  const auto below = [&](int end) { return int(random() % unsigned(end)); };
  int shared = 0;
  for (int i = 0; i < 60 && !HasFailure(); ++i) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", step " << i);
    Step at = {.heads = 1 + below(below(4) ? 9 : 40),
               .page = std::array{1, 16, 32, 64, 128}[below(5)],
               .own_rows = 16 << below(3),
               .most_queries = below(2) ? 1 : 1 + below(4),
               .most_tokens = 700,
               .room = below(3)};
    at.equal_queries = below(4) == 0;
    const int b = below(8) ? 1 + below(14) : 1 + below(60);
    // A tree of prompts: a request goes on as its neighbour did up to some token, and may end before it.
    int page = 1;
    std::vector<int> line;
    for (int r = 0; r < b; ++r) {
      if (below(3) == 0) line.resize(below(4) ? below(int(line.size()) + 1) : 0);
      const int length = below(6) ? below(at.most_tokens + 1) : below(at.most_queries + 2);
      std::vector<int> pages = line;
      while (int(pages.size()) * at.page < length) pages.push_back(page++);
      if (below(3)) line = pages;
      pages.resize((length + at.page - 1) / at.page);
      at.lengths.push_back(length);
      at.queries.push_back(at.equal_queries ? at.most_queries : below(at.most_queries + 1));
      at.pages.push_back(pages);
      if (below(10) == 0) at.lengths.back() = 0, at.pages.back().clear();  // it pads
    }
    const Found found = find(at, {.least_blocks = 1 + below(3), .tile_cost = below(2), .least_gain = below(2)});
    check(at, found);
    if (!HasFailure()) attend_and_merge(at, found, below(2), below(2), below(2));
    shared += found.groups;
  }
  if (!HasFailure()) {
    EXPECT_GT(shared, 20);
  }
}

// Parts without a weight: where all scores are -infinity, and NaN that they leave.
TEST_F(FindPrefixes, MergesWhatHasNoWeight) {
  std::vector<std::uint16_t> prefix_o(4 * kColumns, 0x7fc0), o(4 * kColumns, 0x3f80);  // NaN, and 1
  std::vector<float> prefix_lse = {-kInf, 2, kInf, 3}, lse = {1, -kInf, -kInf, kInf};
  std::fill(&prefix_o[kColumns], &prefix_o[2 * kColumns], 0x4000);  // 2
  std::fill(&prefix_o[3 * kColumns], &prefix_o[4 * kColumns], 0x4040);
  std::fill(&o[kColumns], &o[4 * kColumns], 0x7fc0);
  const QueryPlace place = {0, 0};
  const MergePrefixesArguments with = {.prefix_o = prefix_o.data(),
                                       .prefix_lse = prefix_lse.data(),
                                       .places = &place,
                                       .o = o.data(),
                                       .o_token_stride = 4 * kColumns,
                                       .o_head_stride = kColumns,
                                       .lse = lse.data(),
                                       .lse_token_stride = 4,
                                       .lse_head_stride = 1,
                                       .to_log2 = 1,
                                       .from_log2 = 1,
                                       .empty_lse = kInf,
                                       .heads = 4,
                                       .blocks = 1};
  merger_.run(1, [&] { merge_prefixes<DType::bfloat16>(with); });
  EXPECT_EQ(lse, (std::vector{1.0f, 2.0f, kInf, 3.0f}));
  for (const auto& [row, value] : {std::pair{0, 0x3f80}, {1, 0x4000}, {2, 0}, {3, 0x4040}})
    for (int c = 0; c < kColumns; ++c) ASSERT_EQ(o[row * kColumns + c], value) << row;
}

}  // namespace
}  // namespace hypermla::cute
