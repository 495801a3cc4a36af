// The prefill kernel for Hopper, run as C++ threads: tiles of whole requests and tiles that are cut into parts, which
// thread blocks merge.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "emulated_hopper.h"

#include "decompressed/prefill.cuh"

namespace hypermla::cute {
namespace {

struct Request {
  int queries, tokens, parts;
};

// Requests one after the other, what lies between and behind them is NaN.
struct Case {
  std::vector<Request> requests;
  int heads = 2, blocks = 2;
  bool growing = false;  // the largest scores lie in the block that is walked last
  int seed = 0;          // of the rows in which queries lie, if the problem has any: 0: they follow each other

  template <PrefillProblem problem>
  void check() const {
    constexpr DType dtype = problem.dtype;
    constexpr std::uint16_t kNan = 0x7fff;
    const int rows = count(&Request::queries) + 5, tokens = count(&Request::tokens) + 9;
    std::vector<std::uint16_t> q(rows * heads * 192, kNan), kv(tokens * heads * 256, kNan), rope(tokens * 64, kNan),
        o(rows * heads * 128, kNan);
    std::vector<float> lse(rows * heads, std::nanf(""));
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::uint16_t* to, int n, float scale) {
      for (int i = 0; i < n; ++i) to[i] = from_float(scale * normal(random), dtype);
    };

    // Of each query its row; a few are left free before and between them.
    std::vector<int> places(rows);
    std::iota(places.begin(), places.end(), problem.rows ? 3 : 0);
    for (int& place : places) place %= rows;
    if (problem.rows && seed > 0) std::shuffle(places.begin(), places.end(), std::mt19937(unsigned(seed)));

    std::vector<PrefillList> memory(1 + (requests.size() * sizeof(PrefillItem) + 255) / 256);
    PrefillList& list = memory[0];
    list = {};
    auto* const items = reinterpret_cast<PrefillItem*>(&list + 1);
    int query = 0, token = 0, slots = 0;
    for (const Request& of : requests) {
      for (int i = 0; i < of.queries; ++i) fill(&q[places[query + i] * heads * 192], heads * 192, 1);
      for (int t = 0; t < of.tokens; ++t) {
        const float scale = growing ? 8 - 7.0f * float(t) / float(of.tokens) : 1;
        for (int head = 0; head < heads; ++head) {
          fill(&kv[((token + t) * heads + head) * 256], 128, scale);
          fill(&kv[((token + t) * heads + head) * 256 + 128], 128, 1);
        }
        fill(&rope[(token + t) * 64], 64, 1);
      }
      if (of.queries > 0) {
        const int tiles = prefill_row_tiles(of.queries) * heads * of.parts;
        items[list.items++] = {.first_tile = list.tiles,
                               .section = 1,
                               .query = query,
                               .queries = of.queries,
                               .token = token,
                               .tokens = of.tokens,
                               .parts = of.parts,
                               .first_slot = slots};
        list.tiles += tiles;
        if (of.parts > 1) slots += tiles;
      }
      query += of.queries;
      token += of.tokens;
    }

    std::vector<float> parts_o((slots + 1) * kRows * kPartColumns, std::nanf("")),
        parts_lse((slots + 1) * kRows, std::nanf(""));
    std::vector<unsigned long long> arrived(slots + 1);
    const auto box_map = [&](const std::uint16_t* data, int n, int stride, int columns, int box_rows, int box_groups) {
      return emulated::map_of(
          {dtype,
           data,
           {{{n, 2 * heads * stride, box_rows}, {columns / 64, 128, box_groups}, {heads, 2 * stride, 1}}}});
    };
    const auto map = [&](const std::uint16_t* data, int n, int stride, int columns) {
      return box_map(data, n, stride, columns, kRows, columns / 64);
    };
    PrefillArguments with;
    with.q_map = map(q.data(), rows, 192, 128);
    with.qpe_map = map(q.data() + 128, rows, 192, 64);
    with.k_map = map(kv.data(), tokens, 256, 128);
    with.kpe_map = emulated::map_of({dtype, rope.data(), {{{tokens, 128, kRows}, {1, 128, 1}, {1, 128, 1}}}});
    with.v_map = map(kv.data() + 128, tokens, 256, 128);
    with.query_rows = places.data();
    with.q_row_map = box_map(q.data(), rows, 192, 128, 1, 1);
    with.qpe_row_map = box_map(q.data() + 128, rows, 192, 64, 1, 1);
    with.list = &list;
    with.parts = {parts_o.data(), parts_lse.data(), arrived.data()};
    with.o = o.data();
    with.lse = lse.data();
    with.o_token_stride = heads * 128;
    with.o_head_stride = 128;
    with.lse_token_stride = heads;
    with.lse_head_stride = 1;
    with.scale_log2 = float(kScale * std::numbers::log2e);
    with.lse_unit = std::numbers::ln2_v<float>;
    with.empty_lse = -std::numeric_limits<float>::infinity();
    with.heads = heads;
    with.rope_heads = 1;
    with.query_tokens = rows;
    for (int launch = 0; launch < 2; ++launch) {  // the first leaves counters as it found them
      std::fill(o.begin(), o.end(), kNan);
      emulated::run(blocks, kTileThreads, [&] { prefill<problem>(with); });
      EXPECT_EQ(list.drawn, 0);
      for (const unsigned long long count : arrived) EXPECT_EQ(count, 0u);
      compare<problem>(q, kv, rope, o, lse, places);
    }
  }

 private:
  static constexpr double kScale = 0.07;

  int count(int Request::*of) const {
    int sum = 0;
    for (const Request& one : requests) sum += one.*of;
    return sum;
  }
  template <PrefillProblem problem>
  void compare(const std::vector<std::uint16_t>& q, const std::vector<std::uint16_t>& kv,
               const std::vector<std::uint16_t>& rope, const std::vector<std::uint16_t>& o,
               const std::vector<float>& lse, const std::vector<int>& places) const {
    const auto value = [](std::uint16_t x) { return double(to_float(x, problem.dtype)); };
    int query = 0, token = 0;
    for (const Request& of : requests) {
      for (int i = 0; i < of.queries; i += i < 3 || i > of.queries - 4 ? 1 : 29)
        for (int head = 0; head < heads; ++head) {
          const int seen = problem.causal ? std::max(0, of.tokens - of.queries + i + 1) : of.tokens;
          const int place = places[query + i];
          const std::uint16_t* const row = &q[(place * heads + head) * 192];
          std::vector<double> scores(seen), expected(128);
          double top = -1e300, sum = 0;
          for (int t = 0; t < seen; ++t) {
            for (int c = 0; c < 128; ++c)
              scores[t] += value(row[c]) * value(kv[((token + t) * heads + head) * 256 + c]);
            for (int c = 0; c < 64; ++c) scores[t] += value(row[128 + c]) * value(rope[(token + t) * 64 + c]);
            top = std::max(top, scores[t] *= kScale);
          }
          for (int t = 0; t < seen; ++t) {
            const double weight = std::exp(scores[t] - top);
            sum += weight;
            for (int c = 0; c < 128; ++c)
              expected[c] += weight * value(kv[((token + t) * heads + head) * 256 + 128 + c]);
          }
          for (int c = 0; c < 128; ++c) {
            const double got = value(o[(place * heads + head) * 128 + c]);
            const double wanted = seen ? expected[c] / sum : 0;
            ASSERT_TRUE(std::abs(got - wanted) <= 0.015 * (1 + std::abs(wanted)))
                << "query " << query + i << ", head " << head << ", column " << c << ": " << got << ", not " << wanted;
          }
          const float got = lse[place * heads + head];
          if (seen) {
            ASSERT_TRUE(std::abs(got - (top + std::log(sum))) <= 2e-3) << query + i;
          } else {
            ASSERT_EQ(got, -std::numeric_limits<float>::infinity());
          }
        }
      query += of.queries;
      token += of.tokens;
    }
    for (std::size_t free = query; free < places.size(); ++free)
      for (int i = 0; i < heads * 128; ++i) ASSERT_EQ(o[places[free] * heads * 128 + i], 0x7fff);
  }
};

constexpr PrefillProblem kCausal{DType::bfloat16, true}, kChunk{DType::float16, false},
    kOfRows{DType::bfloat16, false, true};

TEST(HopperKernels, PrefillIsTheDefinition) {
  const Case of{{{150, 300, 1}, {3, 0, 1}, {0, 40, 1}, {5, 131, 1}}};
  of.check<kCausal>();
  of.check<kChunk>();
}

// Tiles of up to 64 queries, which the second warpgroup lets go by, of 0 to 5 blocks, between others.
TEST(HopperKernels, PrefillTilesOfFewRows) {
  Case of{{{130, 300, 1},
           {64, 270, 1},
           {65, 140, 1},
           {3, 0, 1},
           {1, 129, 1},
           {66, 66, 1},
           {9, 9, 1},
           {7, 520, 1},
           {130, 512, 1},
           {64, 640, 1},
           {2, 3, 1}},
          1,
          1};
  of.check<kCausal>();
  of.check<kChunk>();
  of.growing = true;
  of.check<kCausal>();
}

// Tiles of one-row copies, and of boxes where the rows follow each other.
TEST(HopperKernels, PrefillQueriesAnywhere) {
  Case of{{{140, 300, 1}, {3, 0, 1}, {5, 131, 1}, {40, 700, 3}, {2, 520, 2}}};
  for (of.seed = 0; of.seed < 3; ++of.seed) of.check<kOfRows>();
}

TEST(HopperKernels, PrefillMergesParts) {
  Case of{{{131, 1300, 3}, {7, 100, 1}, {2, 520, 2}}};
  of.check<kCausal>();
  of.check<kChunk>();
  of.blocks = 3;
  of.growing = true;
  of.check<kCausal>();
  // A thread block for each part. Here none of them sees the others at work: the last one merges all shares.
  Case one{{{1, 1200, 9}}, 1, 9};
  one.check<kChunk>();
  Case more{{{100, 700, 3}, {2, 130, 2}}, 2, 10};
  more.check<kCausal>();
}

}  // namespace
}  // namespace hypermla::cute
