// A latent kernel for Hopper over requests of several queries, run as plain C++, against the definition in double
// precision. Include it before the kernel, whose tiles are `rows` high.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "cute/latent/tensor_maps.h"
#include "emulated_hopper.h"
#include "mla/latent/latent.h"

// The rest of the kernels' headers, as a device compiler sees them. What they say outside of the wrappers by asm is for
// that compiler alone.
#define __CUDACC__
#define asm \
  if (false) asm
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#include "latent/arguments.h"

namespace hypermla::cute::latent_case {

constexpr int kLatent = 512, kRope = 64, kWidth = kLatent + kRope;

constexpr LatentProblem problem_of(int page, bool shards = false) {
  LatentProblem at{};
  at.b = at.s = at.t = at.h = at.d = 0;
  at.k = kLatent;
  at.p = kRope;
  at.causal = at.tokens_first = true;
  at.page = page;
  at.shards = shards;
  return at;
}

// Requests of which every one is a tile, and a work item of the one thread block or cut over several. By default their
// tokens are none, or fill one, two, three or five blocks of 64 but for the last.
struct Case {
  int page, heads;
  int fp8 = 0;         // bytes of a token in FP8, whose pages lie apart; 0: tokens in the type of the queries
  bool holes = false;  // of pages of 1 token: some are none
  std::vector<int> lengths = {150, 3, 100, 257, 0}, queries = {4, 3, 2, 2, 1};
  std::vector<int> parts = {1, 1, 1, 1,
                            1};  // into which a tile is cut, of a request of as many blocks of tokens at least
  int workers = 1;               // thread blocks, one after the other; each has some of the parts of all tiles
  bool joins = false;            // where there are two parts, of two thread blocks

  // Of a context that several share: what this one has, and the tokens of the requests in all of them.
  int shards = 1, shard = 0, interleave = 1;
  std::vector<int> whole = {};

  std::vector<int> before = {};  // token blocks of the requests that are attended to elsewhere: items begin behind them
  bool causal = true;
  bool fp8_queries = false;  // with fp8 = 576
  bool with_sinks = false;
  bool two_axes = false;  // of queries: heads, and queries
  bool positive = false;  // numbers of tokens in FP8: outputs add up
  float sharp = 1;        // by which queries in FP8 are larger: maxima rise late, and few weights count

  Case of_shard(int of, int count, int turn) const {
    Case part = *this;
    part.shards = count;
    part.shard = of;
    part.interleave = turn;
    part.whole = lengths;
    for (std::size_t r = 0; r < lengths.size(); ++r) part.lengths[r] = part.held(lengths[r]);
    return part;
  }
  // Of the first tokens of a request, those that are here.
  int held(int first) const {
    int count = 0;
    for (int token = 0; token < first; ++token) count += token / interleave % shards == shard;
    return count;
  }

  // Returns the cosine difference of all outputs, 1 - 2 xy / (xx + yy).
  // rows: of a tile; query_groups: of 64 columns, in a box of queries.
  template <class Kernel>
  double check(int rows, int query_groups, int threads, const Kernel& kernel) const {
    SCOPED_TRACE(testing::Message() << "page " << page << ", fp8 " << fp8 << ", shard " << shard << " of " << shards
                                    << " in turns of " << interleave);
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const auto value = [&] { return from_float(normal(random), DType::bfloat16); };
    const int requests = int(lengths.size()), width = *std::max_element(lengths.begin(), lengths.end()) / page + 1;
    const int apart = fp8 ? 2 : 1, token_bytes = fp8 ? fp8 : 2 * kWidth;  // apart: pages from one to the next
    const float cache_scale = 0.004f;
    int query_tokens = 0, pages = 1;
    std::vector<int> table(requests * width, 1 << 30);
    std::vector<std::vector<WorkItem>> work(workers);
    int slots = 0;
    for (int r = 0; r < requests; ++r) {
      for (int i = 0; i * page < lengths[r]; ++i)
        table[r * width + i] = holes && (random() % 5 == 0 || i / 64 == 1) ? -1 : pages++;
      EXPECT_LE(queries[r] * heads, rows);
      const int skipped = before.empty() ? 0 : before[r];
      const int blocks = std::max((lengths[r] + 63) / 64, 1) - skipped, of = parts[r];
      for (int part = 0; part < of; ++part) {
        const int join = !joins || of != 2 || workers < 2 ? kJoinsNone : part == 0 ? kTakesUp : kGives;
        work[(of - 1 - part) * workers / of].push_back(
            {r, 0, skipped + part * blocks / of, skipped + (part + 1) * blocks / of, lengths[r], of > 1 ? slots++ : -1,
             query_tokens * heads, queries[r], part, of, shards > 1 ? whole[r] : 0, join});
      }
      query_tokens += queries[r];
    }
    std::size_t rounds = 0;
    for (const auto& list : work) rounds = std::max(rounds, list.size() + 1);
    std::vector<WorkItem> items;  // [workers][rounds]
    for (auto& list : work) {
      list.resize(rounds);
      items.insert(items.end(), list.begin(), list.end());
    }
    std::vector<MergeState> merges(slots);
    std::vector<std::uint16_t> o_part(std::size_t(slots) * rows * kLatent, 0x7fc0);
    std::vector<float> lse_part(std::size_t(slots) * rows * part_row_floats(rows), std::nanf(""));
    const int o_stride = heads * kLatent + 64;  // from a query's to the next's
    std::vector<std::uint16_t> q(query_tokens * heads * kWidth), o(query_tokens * o_stride);
    std::vector<float> lse(query_tokens * heads, std::nanf(""));
    std::generate(q.begin(), q.end(), value);
    std::vector<unsigned char> narrow_q(q.size());
    const float q_scale = 0.01f * sharp;
    if (fp8_queries)
      for (std::size_t i = 0; i < q.size(); ++i) narrow_q[i] = e4m3_from_float(normal(random) / 0.01f);
    const auto query_element = [&](std::size_t i) {
      return fp8_queries ? e4m3_to_float(narrow_q[i]) * q_scale : to_float(q[i], DType::bfloat16);
    };
    // The cache, NaN where nothing is, and the numbers that its tokens stand for; those without a place are empty.
    std::vector<unsigned char> cache(std::size_t(pages) * apart * page * token_bytes, 0xff);
    std::vector<std::vector<std::vector<float>>> tokens(requests);
    for (int r = 0; r < requests; ++r)
      for (int t = 0; t < lengths[r]; ++t) {
        std::vector<float>& numbers = tokens[r].emplace_back();
        const int of_page = table[r * width + t / page];
        if (of_page < 0) continue;
        unsigned char* const at = &cache[std::size_t(of_page * apart * page + t % page) * token_bytes];
        numbers.resize(kWidth);
        for (int c = 0; c < kWidth; ++c) {
          const bool narrow = fp8 == 576 || (fp8 && c < kLatent);
          const float factor = fp8 == 576 ? cache_scale : 0.003f * float(1 + c / 128);
          if (narrow) {
            at[c] = static_cast<unsigned char>(random() % 0x7f | (random() & (positive ? 0 : 0x80)));  // but NaN
            numbers[c] = e4m3_to_float(at[c]) * factor;
            if (!fp8_queries) numbers[c] = to_float(from_float(numbers[c], DType::float16), DType::float16);
            if (fp8 == 656) std::memcpy(at + kLatent + c / 128 * 4, &factor, 4);
          } else {
            const std::uint16_t bits = value();
            numbers[c] = to_float(bits, DType::bfloat16);
            std::memcpy(at + (fp8 ? 528 + 2 * (c - kLatent) : 2 * c), &bits, 2);
          }
        }
      }

    // Numbers of queries in FP8, and of the tokens that they see, count by pairs.
    const int pair = fp8_queries ? 2 : 1;
    const auto query_map = [&](int column, int columns, int box_groups) {
      const void* const from = fp8_queries ? static_cast<const void*>(&narrow_q[column]) : &q[column];
      const int width = kWidth / pair;
      const RowAxes axes = two_axes ? RowAxes{heads, width, query_tokens, heads * width}
                                    : RowAxes{1, width, query_tokens * heads, width};
      return emulated::map_of(rows_source(DType::bfloat16, from, columns / pair, axes, rows, box_groups));
    };
    const auto token_map = [&](int column, int columns) {
      const CacheShape shape = {page, pages, page};
      return emulated::map_of(tokens_source(DType::bfloat16, &cache[2 / pair * column], columns / pair, shape,
                                            kWidth / pair, kWidth / pair * page * apart));
    };
    const float scale = 1 / std::sqrt(192.0f);
    std::vector<float> sinks(heads);
    for (float& one : sinks) one = 5 * normal(random);
    LatentArguments with;
    with.sinks = with_sinks ? sinks.data() : nullptr;
    with.qc_map = query_map(0, kLatent, query_groups);
    with.qpe_map = query_map(kLatent, kRope, 1);
    with.z_map = token_map(0, kLatent);
    with.kpe_map = token_map(kLatent, kRope);
    with.work = items.data();
    with.merges = merges.data();
    with.o_part = o_part.data();
    with.lse_part = lse_part.data();
    with.block_table = table.data();
    with.z = cache.data();
    with.kpe = cache.data() + 2 * kLatent;
    with.z_stride = with.kpe_stride = token_bytes;
    with.tokens = unsigned(pages * apart * page);
    with.o = o.data();
    with.lse = lse.data();
    with.o_rows = {Divisor(heads), o_stride, kLatent, 0};
    with.lse_rows = {Divisor(1), 1, 0, 0};
    with.scale_log2 = scale * kLog2e;
    with.lse_unit = kLn2;
    with.empty_lse = -kInfinity;
    with.query_inner = Divisor(two_axes ? heads : 1);
    with.query_places = two_axes ? query_tokens : query_tokens * heads;
    with.heads = heads;
    with.rounds = int(rounds);
    with.table_width = width;
    with.shards = Shards(shards, shard, interleave);
    with.page = Divisor(page);
    with.page_places = apart * page;
    with.cache_scale = &cache_scale;
    const races::Watched watched[] = {{o_part.data(), o_part.size() * 2},
                                      {lse_part.data(), lse_part.size() * 4},
                                      {o.data(), o.size() * 2},
                                      {lse.data(), lse.size() * 4},
                                      {merges.data(), merges.size() * sizeof merges[0]}};
    with.q_scale = fp8_queries ? &q_scale : nullptr;
    for (int run = 0; run < (workers > 1 ? 2 : 1); ++run) {  // the second finds what the first left of the merges
      std::fill(o.begin(), o.end(), 0x7fc0);
      emulated::run(workers, threads, [&] { kernel(with); });
      for (const MergeState& at : merges) {
        EXPECT_EQ(at.arrived << 1, 0u);  // all but the highest bit
        EXPECT_EQ(at.left, 0);
      }
    }

    bool kept = true;  // what lies between the outputs of two queries
    for (std::size_t i = 0; i < o.size(); ++i) kept &= int(i % o_stride) < heads * kLatent || o[i] == 0x7fc0;
    EXPECT_TRUE(kept);
    double product = 0, squares = 0;
    for (int r = 0, row = 0; r < requests; ++r)
      for (int i = 0; i < queries[r] * heads; ++i, ++row) {
        std::vector<double> expected(kLatent);
        double sum = 0;
        const int seen = causal ? held((shards > 1 ? whole : lengths)[r] - queries[r] + i / heads + 1) : lengths[r];
        for (int t = before.empty() ? 0 : 64 * before[r]; t < seen; ++t) {
          const std::vector<float>& token = tokens[r][t];
          if (token.empty()) continue;
          double score = 0;
          for (int c = 0; c < kWidth; ++c) score += query_element(row * kWidth + c) * token[c];
          const double weight = std::exp(score * scale);
          sum += weight;
          for (int c = 0; c < kLatent; ++c) expected[c] += weight * token[c];
        }
        const double expected_lse = std::log(sum);  // -infinity where nothing is seen
        if (with_sinks) sum += std::exp(double(sinks[i % heads]));
        // Of scales of 128 columns a kernel may round each to 11 bits before it multiplies. Of what adds up to a score
        // of e4m3 the tensor core keeps 13 bits at each step.
        const double of_scores = fp8_queries ? 2e-3 * (1 + std::abs(expected_lse)) : fp8 == 656 ? 2e-3 : 1e-3;
        EXPECT_TRUE(lse[row] == expected_lse ||
                    (std::isfinite(expected_lse) && std::abs(lse[row] - expected_lse) <= of_scores))
            << "request " << r << " row " << i << ": lse " << lse[row] << ", not " << expected_lse;
        double worst = 0;
        for (int c = 0; c < kLatent; ++c) {
          const double x = to_float(o[row / heads * o_stride + row % heads * kLatent + c], DType::bfloat16),
                       y = sum > 0 ? expected[c] / sum : 0;
          product += x * y;
          squares += x * x + y * y;
          const double off = std::abs(x - y);
          worst = std::isnan(off) ? HUGE_VAL : std::max(worst, off);  // a NaN stays the worst
        }
        // Weights in e4m3 are off by up to 1/16 each: of two tokens alike, 1/32 of what lies between their values.
        EXPECT_TRUE(worst <= (fp8_queries ? 0.08 : 0.03)) << "request " << r << " row " << i << ": " << worst;
      }
    return 1 - 2 * product / squares;
  }
};

}  // namespace hypermla::cute::latent_case
