// MlaDecode: the plain reference on the CPU against attention_reference(), what is refused, and on a Hopper GPU the
// kernels against the reference, with contents that change between the replays of a recording.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <tuple>

#include "hypermla/device/device.h"
#include "hypermla/mla_cache.h"
#include "hypermla/mla_decode.h"
#include "hypermla/mla_prefill.h"
#include "hypermla/plan/cases.h"
#include "hypermla/plan/decode.h"
#include "hypermla/plan/reference.h"
#include "hypermla/plan/registry.h"
#include "support.h"

namespace hypermla::decode_test {
namespace {

using testing_support::contains;
using testing_support::error_of;
using testing_support::worse;

constexpr int kLatent = 512, kRope = 64, kWidth = kLatent + kRope;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::uint16_t bfloat16(float value) { return std::uint16_t(std::bit_cast<std::uint32_t>(value) >> 16); }
float to_float(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

// One step of an engine, in host memory: everything that no request uses is NaN, and outputs are poisoned.
struct Step {
  Step(const MlaDecodeOptions& options, std::vector<int> of_tokens, const std::vector<int>& queries, unsigned seed)
      : at(options), lengths(std::move(of_tokens)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int n : queries) starts.push_back(starts.back() + n);
    width = (at.max_tokens + at.page - 1) / at.page + 3;
    std::vector<int> free;
    for (int length : lengths) pages += (length + at.page - 1) / at.page;
    for (int i = 0; i < pages; ++i) free.push_back(i);
    std::shuffle(free.begin(), free.end(), random);
    table.assign(lengths.size() * width, 1 << 30);
    cache.assign(std::size_t(std::max(pages, 1)) * at.page * kWidth, 0x7fc0);
    for (std::size_t r = 0; r < lengths.size(); ++r)
      for (int token = 0; token < lengths[r]; ++token) {
        int& page = table[r * width + token / at.page];
        if (token % at.page == 0) page = free.back(), free.pop_back();
        for (int c = 0; c < kWidth; ++c)
          cache[(std::size_t(page) * at.page + token % at.page) * kWidth + c] = bfloat16(normal(random));
      }
    q.assign(std::size_t(starts.back() + 1) * at.heads * kWidth, 0x7fc0);
    for (std::size_t i = 0; i < std::size_t(starts.back()) * at.heads * kWidth; ++i) q[i] = bfloat16(normal(random));
    o.assign(std::size_t(starts.back() + 1) * at.heads * kLatent, 0x7fc0);
    lse.assign(std::size_t(starts.back() + 1) * at.heads, std::nanf(""));
  }
  MlaDecodeTensors tensors() {
    return MlaDecodeTensors::fused(at.heads, at.page, q.data(), starts.back() + 1, cache.data(), std::max(pages, 1),
                                   table.data(), width, o.data(), lse.data());
  }
  // Compares o and lse with double precision.
  void check(const std::vector<std::uint16_t>& got_o, const std::vector<float>& got_lse) const {
    for (std::size_t r = 0; r < lengths.size(); ++r)
      for (int head = 0; head < at.heads; ++head) {
        const int n = starts[r + 1] - starts[r];
        if (n == 0) continue;
        std::vector<float> rows, keys, values;
        for (int i = starts[r]; i < starts[r + 1]; ++i)
          for (int c = 0; c < kWidth; ++c) rows.push_back(to_float(q[(std::size_t(i) * at.heads + head) * kWidth + c]));
        for (int token = 0; token < lengths[r]; ++token) {
          const auto* row =
              &cache[(std::size_t(table[r * width + token / at.page]) * at.page + token % at.page) * kWidth];
          for (int c = 0; c < kWidth; ++c) keys.push_back(to_float(row[c]));
          for (int c = 0; c < kLatent; ++c) values.push_back(to_float(row[c]));
        }
        const AttentionReference expected =
            attention_reference(rows, keys, values, n, lengths[r], kWidth, kLatent, 1 / std::sqrt(192.0), at.causal);
        for (int i = 0; i < n; ++i) {
          const std::size_t row = std::size_t(starts[r] + i) * at.heads + head;
          const float empty = at.empty_lse_positive ? kInfinity : -kInfinity;
          if (std::isinf(expected.lse[i]))
            EXPECT_EQ(got_lse[row], empty);
          else
            EXPECT_TRUE(std::abs(got_lse[row] - expected.lse[i]) <= 1e-3) << got_lse[row] << " " << expected.lse[i];
          double worst = 0;
          for (int c = 0; c < kLatent; ++c) {
            const double difference =
                std::abs(to_float(got_o[row * kLatent + c]) - expected.o[std::size_t(i) * kLatent + c]);
            worst = worse(worst, difference);
          }
          EXPECT_TRUE(worst <= 0.03) << "request " << r << " query " << i << " head " << head << ": " << worst;
        }
      }
    for (std::size_t i = std::size_t(starts.back()) * at.heads; i < got_lse.size(); ++i)
      EXPECT_TRUE(std::isnan(got_lse[i])) << "written behind the last query";
  }

  MlaDecodeOptions at;
  std::vector<int> lengths, starts = {0}, table;
  int width = 0, pages = 0;
  std::vector<std::uint16_t> q, cache, o;
  std::vector<float> lse;
};

TEST(MlaDecode, TheReferenceAttendsToAnyMixOfQueries) {
  for (const bool causal : {false, true}) {
    const MlaDecodeOptions options = {.heads = 3,
                                      .max_requests = 6,
                                      .max_queries = 4,
                                      .max_tokens = 90,
                                      .page = 16,
                                      .causal = causal,
                                      .empty_lse_positive = causal};
    Step step(options, {33, 0, 1, 90, 16, 0}, {4, 2, 3, 1, 0, 0}, 1);
    MlaDecode decode(options, DeviceHandle("cpu"));
    decode.plan(step.lengths.data(), step.starts.data(), 6);
    decode.run(step.tensors());
    step.check(step.o, step.lse);
    decode.check();
  }
}

TEST(MlaDecode, StridesTakeAnyViewOfQueriesAndOutputs) {
  const MlaDecodeOptions options = {.heads = 2, .max_requests = 2, .max_queries = 2, .max_tokens = 40, .page = 16};
  Step step(options, {40, 17}, {2, 2}, 2);
  MlaDecode decode(options, DeviceHandle("cpu"));
  decode.plan(step.lengths.data(), nullptr, 2);
  decode.run(step.tensors());
  // The heads first, RoPE columns as the last of 192, outputs with gaps, lse [requests, heads, queries].
  std::vector<std::uint16_t> latent(2 * 5 * kLatent), rope(5 * 2 * 192), o(5 * 2 * 640, 0x7fc0);
  std::vector<float> lse(2 * 2 * 2);
  for (int t = 0; t < 5; ++t)
    for (int h = 0; h < 2; ++h) {
      std::copy_n(&step.q[(t * 2 + h) * kWidth], kLatent, &latent[(h * 5 + t) * kLatent]);
      std::copy_n(&step.q[(t * 2 + h) * kWidth + kLatent], kRope, &rope[(t * 2 + h) * 192 + 128]);
    }
  MlaDecodeTensors views = step.tensors();
  views.q_latent = {latent.data(), kLatent, 5 * kLatent};
  views.q_rope = {&rope[128], 2 * 192, 192};
  views.o = o.data();
  views.o_token_stride = 2 * 640;
  views.o_head_stride = 640;
  views.lse = lse.data();
  views.lse_request_stride = 4;
  views.lse_head_stride = 2;
  views.lse_token_stride = 1;
  decode.run(views);
  for (int t = 0; t < 4; ++t)
    for (int h = 0; h < 2; ++h) {
      EXPECT_TRUE(std::equal(&o[(t * 2 + h) * 640], &o[(t * 2 + h) * 640] + kLatent, &step.o[(t * 2 + h) * kLatent]));
      EXPECT_EQ(lse[t / 2 * 4 + h * 2 + t % 2], step.lse[t * 2 + h]);
    }
  // A step of one query each needs room for one.
  const int starts[] = {0, 1, 2};
  decode.plan(step.lengths.data(), starts, 2);
  views.lse_request_stride = 2;
  views.lse_head_stride = 1;
  decode.run(views);
  decode.run(step.tensors());
  EXPECT_TRUE(std::equal(&lse[0], &lse[4], &step.lse[0]));
}

// A request whose pages, queries and outputs lie further apart than 2^32 bytes, all in one allocation.
void check_far_apart(const std::shared_ptr<Device>& device, const char* name, const char* kernel, int page) {
  SCOPED_TRACE(testing::Message() << kernel << " page " << page);
  constexpr std::int64_t kPage = (1 << 29) + 64, kRow = (std::int64_t{1} << 31) + 64, kMost = kRow + (1 << 23);
  constexpr std::int64_t kQ = 1 << 20, kO = 1 << 21, kLse = 1 << 22;  // behind the first page; all count elements
  const MlaDecodeOptions options = {
      .heads = 16, .max_requests = 6, .max_queries = 3, .max_tokens = 700, .page = page, .kernel = kernel};
  const int row = options.heads * kLatent;
  Step step(options, {page + (page + 1) / 2}, {2}, 22);
  const testing_support::DeviceMemory on{device};
  const Buffer memory(device, 2 * kMost);
  const auto at = [&](std::int64_t element) { return static_cast<std::uint16_t*>(memory.data()) + element; };
  for (int i = 0; i < 2; ++i) {
    device->copy_to_device(at(4 * i * kPage), &step.cache[i * page * kWidth], 2 * page * kWidth);
    device->copy_to_device(at(kQ + i * kRow), &step.q[i * options.heads * kWidth], 2 * options.heads * kWidth);
  }
  for (int& entry : step.table) entry = entry < 2 ? 4 * entry : entry;
  const Buffer lengths = on.copy_of(step.lengths), starts = on.copy_of(step.starts), table = on.copy_of(step.table);
  MlaDecode decode(options, DeviceHandle(name));
  decode.plan(static_cast<const int*>(lengths.data()), static_cast<const int*>(starts.data()), 1);
  decode.run({.q_latent = {at(kQ), kRow, kWidth},
              .q_rope = {at(kQ + kLatent), kRow, kWidth},
              .query_tokens = 2,
              .cache_latent = at(0),
              .cache_rope = at(kLatent),
              .latent_page_stride = kPage,
              .latent_token_stride = kWidth,
              .rope_page_stride = kPage,
              .rope_token_stride = kWidth,
              .pages = 5,
              .block_table = static_cast<const int*>(table.data()),
              .table_stride = step.width,
              .o = at(kO),
              .o_token_stride = kRow,
              .o_head_stride = kLatent,
              .lse = reinterpret_cast<float*>(at(kLse)),
              .lse_token_stride = kRow / 2,
              .lse_head_stride = 1});
  device->synchronize();
  for (int i = 0; i < 2; ++i) {
    device->copy_to_host(&step.o[i * row], at(kO + i * kRow), 2 * row);
    device->copy_to_host(&step.lse[i * options.heads], at(kLse + i * kRow), 4 * options.heads);
  }
  for (int& entry : step.table) entry = entry < 5 ? entry / 4 : entry;
  step.check(step.o, step.lse);
}

TEST(MlaDecode, OffsetsGoBeyond32Bits) {
  const std::shared_ptr<Device> device = make_cpu_device();
  if (device->info().memory_bytes < std::size_t{8} << 30) GTEST_SKIP() << "of 4.3 GB little is touched, but all asked";
  for (const char* kernel : {"", "cutile.mla.flash_mla_split_kv"})
    for (const int page : {64, 1}) check_far_apart(device, "cpu", kernel, page);
}

TEST(MlaDecode, ThePortableKernelTakesAPageThatIsNoneForZeros) {
  MlaDecodeOptions options = {.heads = 3, .max_tokens = 90, .page = 16};
  options.kernel = "cutile.mla.flash_mla_split_kv";
  Step step(options, {40}, {1}, 1);
  std::fill_n(&step.cache[std::size_t(step.table[1]) * 16 * kWidth], 16 * kWidth, std::uint16_t{0});
  MlaDecode decode(options, DeviceHandle("cpu"));
  decode.plan(step.lengths.data(), nullptr, 1);
  const std::vector<int> table = step.table;
  for (const int none : {-1, step.pages, 1 << 30, std::numeric_limits<int>::min()}) {
    step.table[1] = none;
    decode.run(step.tensors());
    step.table = table;
    step.check(step.o, step.lse);
  }
}

TEST(MlaDecode, OneHeadHasAnyStride) {
  for (const char* kernel : {"", "cutile.mla.flash_mla_split_kv"}) {
    MlaDecodeOptions options = {.heads = 1, .max_requests = 2, .max_queries = 2, .max_tokens = 40, .page = 16};
    options.kernel = kernel;
    Step step(options, {40, 17}, {2, 1}, 4);
    MlaDecode decode(options, DeviceHandle("cpu"));
    decode.plan(step.lengths.data(), step.starts.data(), 2);
    MlaDecodeTensors tensors = step.tensors();
    tensors.q_latent.head_stride = tensors.q_rope.head_stride = tensors.o_head_stride = 8;
    decode.run(tensors);
    step.check(step.o, step.lse);
    if (!*kernel) continue;
    tensors.latent_token_stride = std::int64_t{1} << 33;
    EXPECT_TRUE(contains(error_of([&] { decode.run(tensors); }), "latent_token_stride=8589934592"));
  }
}

// What one of several that share the contexts of a step has of it.
Step shard_of(const Step& step, int shards, int shard, int interleave) {
  MlaDecodeOptions at = step.at;
  at.shards = shards;
  at.shard = shard;
  at.interleave = interleave;
  std::vector<int> here(step.lengths.size(), 0), queries;
  std::vector<std::vector<int>> tokens(here.size());
  for (std::size_t r = 0; r < here.size(); ++r) {
    queries.push_back(step.starts[r + 1] - step.starts[r]);
    for (int token = 0; token < step.lengths[r]; ++token)
      if (token / interleave % shards == shard) tokens[r].push_back(token);
    here[r] = int(tokens[r].size());
  }
  Step part(at, here, queries, unsigned(1 + shard));  // with a cache of so many tokens
  const auto place = [](const Step& of, std::size_t r, int token) {
    return (std::size_t(of.table[r * of.width + token / of.at.page]) * of.at.page + token % of.at.page) * kWidth;
  };
  for (std::size_t r = 0; r < here.size(); ++r)
    for (int i = 0; i < here[r]; ++i)
      std::copy_n(&step.cache[place(step, r, tokens[r][i])], kWidth, &part.cache[place(part, r, i)]);
  part.q = step.q;
  part.lengths = step.lengths;
  return part;
}

// The outputs of all shards of a step, merged.
void merge_shards(const Step& step, std::vector<Step>& parts) {
  MlaCacheOps ops(step.at.dtype, DeviceHandle("cpu"));
  const std::int64_t heads = step.at.heads;
  Step& all = parts.front();
  for (std::size_t i = 1; i < parts.size(); ++i)
    ops.merge_states({.a = {{all.o.data(), heads * kLatent, kLatent}, {all.lse.data(), heads, 1}},
                      .b = {{parts[i].o.data(), heads * kLatent, kLatent}, {parts[i].lse.data(), heads, 1}},
                      .o = {all.o.data(), heads * kLatent, kLatent},
                      .lse = {all.lse.data(), heads, 1},
                      .tokens = step.starts.back(),
                      .heads = int(heads),
                      .empty_lse_positive = step.at.empty_lse_positive});
  step.check(all.o, all.lse);
}

TEST(MlaDecode, ShardsOfAContextMergeIntoTheWhole) {
  std::mt19937 random(11);
  const auto below = [&](int end) { return int(random() % unsigned(end)); };
  for (int i = 0; i < 24; ++i) {
    const int shards = 2 + below(4), interleave = i % 3 ? 1 << below(5) : 1;
    const MlaDecodeOptions options = {.heads = 1 + below(3),
                                      .max_requests = 6,
                                      .max_queries = 5,
                                      .max_tokens = 150,
                                      .page = 16,
                                      .causal = i % 4 != 3,
                                      .empty_lse_positive = i % 2 == 0};
    std::vector<int> lengths, queries;
    for (int r = 0; r < 6; ++r) {
      lengths.push_back(below(3) ? below(151) : below(interleave + 2));
      queries.push_back(below(6));
    }
    SCOPED_TRACE(testing::Message() << i << ": " << shards << " shards, turns of " << interleave);
    const Step step(options, lengths, queries, unsigned(i));
    std::vector<Step> parts;
    for (int shard = 0; shard < shards; ++shard) {
      Step& part = parts.emplace_back(shard_of(step, shards, shard, interleave));
      MlaDecode decode(part.at, DeviceHandle("cpu"));
      decode.plan(part.lengths.data(), part.starts.data(), int(lengths.size()));
      decode.run(part.tensors());
    }
    merge_shards(step, parts);
  }
}

// The same first pages for all of some neighbours, as prefix caching leaves them; the last pages are their own.
void share_pages(Step& step, int first, int requests, int tokens) {
  for (int r = first + 1; r < first + requests; ++r)
    std::copy_n(&step.table[first * step.width], tokens / step.at.page, &step.table[r * step.width]);
}

TEST(MlaDecode, SharedPrefixesChangeNoOutput) {
  MlaDecodeOptions options = {.heads = 2, .max_requests = 5, .max_queries = 2, .max_tokens = 200, .page = 16};
  Step step(options, {150, 140, 200, 70, 0}, {1, 2, 1, 2, 0}, 12);
  share_pages(step, 0, 3, 128);
  MlaDecode plain(options, DeviceHandle("cpu"));
  EXPECT_TRUE(contains(
      error_of([&] { plain.plan(step.lengths.data(), step.starts.data(), 5, nullptr, step.table.data(), step.width); }),
      "block_table has no meaning in plan() without shared_prefixes"));
  options.shared_prefixes = true;
  MlaDecode decode(options, DeviceHandle("cpu"));
  EXPECT_TRUE(contains(error_of([&] { decode.plan(step.lengths.data(), step.starts.data(), 5); }),
                       "with shared_prefixes plan() takes the table of the step, too"));
  decode.plan(nullptr, nullptr, 0);
  decode.plan(step.lengths.data(), step.starts.data(), 5, nullptr, step.table.data(), step.width);
  decode.run(step.tensors());
  step.check(step.o, step.lse);
}

TEST(MlaDecode, AStepWithoutRequestsIsNoError) {
  MlaDecode decode({.heads = 1}, DeviceHandle("cpu"));
  decode.plan(nullptr, nullptr, 0);
  MlaDecodeTensors tensors;
  decode.run(tensors);
  tensors.query_tokens = 1;
  EXPECT_TRUE(contains(error_of([&] { decode.run(tensors); }), "pages=0"));
  tensors.pages = 1;
  EXPECT_TRUE(contains(error_of([&] { decode.run(tensors); }), "q_latent"));
}

// What an installation brings compiled is what a MlaDecode of any capacity asks for.
TEST(MlaDecode, WhatIsCompiledAheadIsWhatRuns) {
  // Of v0 and v1 tilings, types, pages, causal or not; those of shards; of v0 tilings and types of sparse attention, of
  // v1 what it takes of v0 for shared prefixes; what is around these. Of v3 tilings and forms of FP8, causal or not;
  // those of shards. Planners without and with cuts, and of shards.
  constexpr std::size_t of_v0 = 3 * 4 + 2;  // tilings and pages; with pages of 1 one tiling less
  for (const auto& [version, kernels] :
       std::map<std::string, std::size_t>{{"v0", of_v0 * 2 * 2 + of_v0 + 2 * 2 + 2 * 4 + 3 + 1 + 1},
                                          {"v1", 2 * 2 * 5 * 2 + 2 * 5 + of_v0 + 3 + 1 + 12 + 1},
                                          {"v3", 2 * 2 * 2 + 2 * 2 + 12 + 1 + 1}}) {
    SCOPED_TRACE(version);
    const std::unique_ptr<KernelPlan> plan =
        Registry::instance().find("cute.mla.flash_mla", version, "sm_90", "cute").make();
    plan->target = Target::of_arch("sm_90");
    std::set<std::string> ahead;
    for (const KernelSource& source : decode_sources(*plan)) EXPECT_TRUE(ahead.insert(source.instance).second);
    EXPECT_EQ(ahead.size(), kernels);
    const bool of_fp8 = version == "v3";
    for (const int heads : {1, 8, 16, 20, 64, 128})
      for (const int queries : {1, 2, 8, 128})
        for (const int requests : {1, 7, 256})
          for (const int split : {0, 4096}) {
            MlaDecodeOptions options = {.heads = heads,
                                        .max_requests = requests,
                                        .max_queries = queries,
                                        .max_tokens = 16384,
                                        .page = 16,
                                        .split = split};
            settle(options);
            const auto expect = [&] {
              const std::unique_ptr<DecodeKernels> decode = plan->decode(options);
              ASSERT_EQ(decode != nullptr, of_fp8 == (options.cache_format != MlaCacheFormat::as_queries));
              if (!decode) return;
              for (const KernelSource& source : decode->sources())
                EXPECT_TRUE(ahead.count(source.instance)) << heads << " " << queries << " " << source.instance;
            };
            for (const bool causal : {false, true}) {
              options.causal = causal;
              expect();
              for (const MlaCacheFormat format : {MlaCacheFormat::fp8_656, MlaCacheFormat::fp8_576}) {
                options.cache_format = format;
                expect();
              }
              options.cache_format = MlaCacheFormat::as_queries;
            }
            if (split == 0) {
              options.shards = 2 + heads % 3;
              options.interleave = queries % 5 + 1;
              for (const MlaCacheFormat format :
                   {MlaCacheFormat::fp8_656, MlaCacheFormat::fp8_576, MlaCacheFormat::as_queries}) {
                options.cache_format = format;
                expect();
              }
              options.shards = options.interleave = 1;
              options.shared_prefixes = queries <= 8;
              expect();
              options.shared_prefixes = false;
            }
            if (queries != 1) continue;
            options.sparse = true;
            for (const MlaCacheFormat format :
                 {MlaCacheFormat::as_queries, MlaCacheFormat::fp8_656, MlaCacheFormat::fp8_576}) {
              options.cache_format = format;
              settle(options);
              const std::unique_ptr<DecodeKernels> decode = plan->decode(options);
              ASSERT_EQ(decode != nullptr, format == MlaCacheFormat::as_queries ? version == "v0" : of_fp8);
              if (!decode) continue;
              for (const KernelSource& source : decode->sources())
                EXPECT_TRUE(ahead.count(source.instance)) << heads << " " << source.instance;
            }
          }
  }
}

TEST(MlaDecode, AFixedSplitFitsItsWorkspace) {
  const std::unique_ptr<KernelPlan> plan = Registry::instance().find("cute.mla.flash_mla", "v0").make();
  plan->target = Target::of_arch("sm_90");
  const auto bytes_of = [&](const MlaDecodeOptions& with) { return plan->decode(with)->workspace_bytes(); };
  const std::vector<int> splits = fixed_splits();
  constexpr std::size_t kMost = 288 << 20;
  for (const auto& [heads, requests, queries, tokens] :
       {std::tuple{128, 256, 1, 131072}, {16, 1024, 4, 163840}, {128, 2048, 8, 1 << 20}, {16, 1, 1, 4096}}) {
    MlaDecodeOptions options = {.heads = heads, .max_requests = requests, .max_queries = queries, .max_tokens = tokens};
    settle(options);
    const int split = fixed_split(options, kMost, bytes_of);
    EXPECT_NE(std::find(splits.begin(), splits.end(), split), splits.end()) << split;
    options.split = split;
    if (split < tokens) {
      EXPECT_LE(bytes_of(options), kMost);
    }
    options.split = split / 2;
    if (split > 512) {
      EXPECT_TRUE(!error_of([&] { bytes_of(options); }).empty() || bytes_of(options) > kMost) << split;
    }
  }
  EXPECT_GE(splits.back(), MlaDecode::kMaxTokens);
  EXPECT_EQ(MlaDecode::fixed_split({.max_tokens = 4096}, kMost, DeviceHandle("cpu")), 512);
  EXPECT_EQ(MlaDecode::fixed_split({.max_tokens = 4096}, 0, DeviceHandle("cpu")), 4096);
}

TEST(MlaDecode, WhatHasNoMeaningIsRefused) {
  const auto refusal = [](MlaDecodeOptions options) {
    return error_of([&] { MlaDecode(options, DeviceHandle("cpu")); });
  };
  EXPECT_TRUE(contains(refusal({.heads = 0}), "heads=0"));
  EXPECT_TRUE(contains(refusal({.max_requests = 2049}), "max_requests=2049"));
  EXPECT_TRUE(contains(refusal({.page = 48}), "page=48"));
  EXPECT_EQ(refusal({.dtype = DType::float32}), "dtype=float32 is not supported: choose bfloat16 or float16");
  EXPECT_TRUE(contains(refusal({.dtype = DType(77)}), "77 is no value of DType"));
  EXPECT_TRUE(contains(refusal({.cache_format = MlaCacheFormat(77)}), "77 is no value of MlaCacheFormat"));
  EXPECT_TRUE(contains(refusal({.scale = -1}), "scale=-1"));
  EXPECT_TRUE(contains(refusal({.scale = 1e-27f}), "2^-60 to 2^60"));
  EXPECT_TRUE(contains(refusal({.scale = 3e38f}), "2^-60 to 2^60"));
  EXPECT_TRUE(contains(refusal({.split = 100}), "split=100"));
  EXPECT_TRUE(contains(refusal({.kernel = "cute.mla.flash_mla"}), "kernel=cute.mla.flash_mla cannot decode on"));
  EXPECT_TRUE(contains(refusal({.shards = 0}), "shards=0"));
  EXPECT_TRUE(contains(refusal({.shards = 33}), "from 1 to 32"));
  EXPECT_TRUE(contains(refusal({.shards = 2, .shard = 2}), "shard=2 is not supported with shards=2"));
  EXPECT_TRUE(contains(refusal({.shards = 2, .interleave = 129}), "interleave=129"));
  EXPECT_TRUE(contains(refusal({.interleave = 16}), "shards=1"));
  EXPECT_TRUE(contains(refusal({.sparse = true, .shards = 2}), "not supported with sparse"));
  const auto sharing = [&](MlaDecodeOptions options) {
    options.shared_prefixes = true;
    return refusal(options);
  };
  EXPECT_TRUE(contains(sharing({.sparse = true}), "shared_prefixes is not supported with sparse"));
  EXPECT_TRUE(contains(sharing({.cache_format = MlaCacheFormat::fp8_656}), "with a cache in FP8"));
  EXPECT_TRUE(contains(sharing({.split = 512}), "with split"));
  EXPECT_TRUE(contains(sharing({.shards = 2}), "with shards"));
  EXPECT_TRUE(contains(sharing({.heads = 128, .max_requests = 2048, .max_queries = 16}), "max_query_tokens=32768"));
  EXPECT_EQ(sharing({.heads = 128, .max_requests = 2048, .max_queries = 15}), "");
  MlaDecode shard({.heads = 1, .shards = 4, .shard = 3, .interleave = 16}, DeviceHandle("cpu"));
  EXPECT_TRUE(contains(shard.explain(), "shard 3 of 4, which take turns of 16 tokens")) << shard.explain();
  const float sink = 0;
  MlaDecodeTensors of_sinks;
  of_sinks.query_tokens = 1;
  of_sinks.sinks = &sink;
  shard.plan(nullptr, nullptr, 0);
  EXPECT_TRUE(contains(error_of([&] { shard.run(of_sinks); }), "sinks are not supported with shards"));
  MlaDecode shares({.heads = 1, .shared_prefixes = true}, DeviceHandle("cpu"));
  shares.plan(nullptr, nullptr, 0);
  EXPECT_TRUE(contains(error_of([&] { shares.run(of_sinks); }), "sinks are not supported with shared_prefixes"));

  const MlaDecodeOptions options = {.heads = 1, .max_requests = 2, .max_queries = 2, .max_tokens = 20, .page = 16};
  Step step(options, {20, 3}, {2, 1}, 3);
  MlaDecode decode(options, DeviceHandle("cpu"));
  EXPECT_TRUE(contains(error_of([&] { decode.run(step.tensors()); }), "call plan() first"));
  const auto refused_plan = [&](std::vector<int> lengths, std::vector<int> starts) {
    return error_of([&] { decode.plan(lengths.data(), starts.data(), int(lengths.size())); });
  };
  EXPECT_TRUE(contains(refused_plan({21, 3}, {0, 2, 3}), "lengths[0] is 21"));
  EXPECT_TRUE(contains(refused_plan({20, -1}, {0, 2, 3}), "lengths[1] is -1"));
  EXPECT_TRUE(contains(refused_plan({20, 3}, {0, 3, 3}), "3 queries"));
  EXPECT_TRUE(contains(refused_plan({20, 3}, {0, 2, 1}), "-1 queries"));
  EXPECT_TRUE(contains(refused_plan({20, 3, 1}, {0, 1, 2, 3}), "3 requests"));
  EXPECT_TRUE(contains(error_of([&] { decode.plan(reinterpret_cast<const int*>(1), step.starts.data(), 2); }),
                       "lengths must point to memory of the device that is aligned to 4 bytes"));
  decode.plan(step.lengths.data(), step.starts.data(), 2);
  const auto refused_run = [&](auto change) {
    MlaDecodeTensors tensors = step.tensors();
    change(tensors);
    return error_of([&] { decode.run(tensors); });
  };
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.o = nullptr; }), "o must point"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.q_rope.head_stride = 60; }), "q_rope.head_stride=60"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.query_tokens = 2; }), "query_tokens is 2"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.pages = 1; }), "the cache has 1 pages"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.o = const_cast<void*>(with.q_latent.data); }), "of its own"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.o = const_cast<void*>(with.cache_latent); }), "of its own"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.o = const_cast<void*>(with.q_rope.data); }), "of its own"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.lse = (float*)with.q_latent.data; }), "lse must have memory"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.lse = (float*)with.block_table; }), "lse must have memory"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.o = const_cast<int*>(with.block_table); }), "of its own"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.lse = static_cast<float*>(with.o) + 1; }), "lse overlaps o"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.lse_request_stride = -8; }), "lse with strides of -8"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.lse_request_stride = 8, with.lse_token_stride = 0; }),
                       "they must be positive"));
  const MlaDecodeOptions two = {.heads = 2, .max_requests = 2, .max_queries = 2, .max_tokens = 20, .page = 16};
  Step of_two(two, {20, 3}, {2, 1}, 3);
  MlaDecode decodes_two(two, DeviceHandle("cpu"));
  decodes_two.plan(of_two.lengths.data(), of_two.starts.data(), 2);
  for (const auto& [request, head, taken] : {std::tuple(1, 1, false), {2, 2, false}, {4, 1, true}, {4, 2, true}}) {
    MlaDecodeTensors tensors = of_two.tensors();
    tensors.lse_request_stride = request, tensors.lse_head_stride = head, tensors.lse_token_stride = 3 - head;
    const std::string said = error_of([&] { decodes_two.run(tensors); });
    EXPECT_EQ(said.empty(), taken) << said;
    EXPECT_EQ(contains(said, "rows would overlap"), !taken) << said;
  }
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.pages = 0, with.cache_latent = nullptr; }), "pages=0 is"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.pages = -1; }), "pages=-1 is not supported"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.lse = reinterpret_cast<float*>(1); }), "to 4 bytes"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.o_token_stride = 8; }), "rows would overlap"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.lse_token_stride = 0; }), "lse with a token stride of 0"));
  std::swap(step.table[step.width], step.table.back());  // the page of the second request
  EXPECT_TRUE(contains(refused_run([](auto&) {}), "block_table[1][0] is"));
  std::swap(step.table[step.width], step.table.back());
  EXPECT_TRUE(std::all_of(step.o.begin(), step.o.end(), [](std::uint16_t bits) { return bits == 0x7fc0; }))
      << "written by a run that was refused";
  EXPECT_EQ(refused_run([](auto&) {}), "");
  step.check(step.o, step.lse);
}

TEST(MlaDecode, WhatWasMovedFromSaysSo) {
  DeviceHandle device("cpu"), moved_device = std::move(device);
  EXPECT_FALSE(device.is_gpu());  // a handle is copied
  MlaDecode decode({.heads = 1}, device), decode_to = std::move(decode);
  MlaPrefill prefill({.heads = 1}, device), prefill_to = std::move(prefill);
  Kernel kernel("flash_mla", {}, device), kernel_to = std::move(kernel);
  MlaDecodeTensors decoded;
  MlaPrefillTensors prefilled;
  decoded.query_tokens = prefilled.query_tokens = 1;
  const std::function<void()> uses[] = {[&] { decode.run(decoded); },
                                        [&] { decode.plan(nullptr, nullptr, 0); },
                                        [&] { decode.check(); },
                                        [&] { decode.explain(); },
                                        [&] { decode.workspace_bytes(); },
                                        [&] { prefill.run(prefilled); },
                                        [&] { prefill.explain(); },
                                        [&] { prefill.plan(nullptr, nullptr, 0); },
                                        [&] { prefill.check(); },
                                        [&] { kernel.bind("q", nullptr); },
                                        [&] { kernel.run(); }};
  for (const auto& use : uses) EXPECT_TRUE(contains(error_of(use), "this object was moved from"));
  decode = std::move(decode_to);
  EXPECT_TRUE(contains(decode.explain(), "reference"));
}

class DecodeOnHopper : public testing_support::OnHopper {
 protected:
  // The bits of the last run's outputs. On `stream`, or as a recording.
  std::pair<std::vector<std::uint16_t>, std::vector<float>> run(MlaDecode& decode, Step& step,
                                                                StreamHandle stream = nullptr) {
    const Buffer q = copy_of(step.q), cache = copy_of(step.cache), table = copy_of(step.table), o = copy_of(step.o),
                 lse = copy_of(step.lse), lengths = copy_of(step.lengths), starts = copy_of(step.starts);
    const MlaDecodeTensors tensors = MlaDecodeTensors::fused(
        step.at.heads, step.at.page, q.data(), step.starts.back() + 1, cache.data(), std::max(step.pages, 1),
        static_cast<const int*>(table.data()), step.width, o.data(), static_cast<float*>(lse.data()));
    const auto work = [&](StreamHandle stream) {
      const int* const of_plan = step.at.shared_prefixes ? tensors.block_table : nullptr;
      decode.plan(static_cast<const int*>(lengths.data()), static_cast<const int*>(starts.data()),
                  int(step.lengths.size()), stream, of_plan, of_plan ? step.width : 0);
      for (int layer = 0; layer < 2; ++layer) decode.run(tensors, stream);
    };
    if (stream)
      work(stream);
    else
      device_->record(work)->replay(device_->stream());
    device_->synchronize();
    decode.check();
    return {back<std::uint16_t>(o), back<float>(lse)};
  }

  void mix_queries(const char* kernel) {
    for (const int page : {64, 16, 1})
      for (const int heads : {16, 128}) {
        const MlaDecodeOptions options = {
            .heads = heads, .max_requests = 6, .max_queries = 3, .max_tokens = 700, .page = page, .kernel = kernel};
        SCOPED_TRACE(testing::Message() << kernel << " page " << page << " heads " << heads);
        MlaDecode decode(options, DeviceHandle("cuda"));
        Step step(options, {700, 0, 65, 1, 300, 0}, {1, 2, 3, 1, 2, 0}, 4);
        const auto [o, lse] = run(decode, step);
        step.check(o, lse);
      }
  }
};

TEST_F(DecodeOnHopper, EveryKernelTakesAnyMixOfQueries) {
  for (const char* kernel : {"cute.mla.flash_mla", "cute.mla.flash_mla_v1"}) mix_queries(kernel);
}

TEST_F(DecodeOnHopper, PortableKernelsTakeAnyMixOfQueries) { mix_queries("cutile.mla.flash_mla_split_kv"); }

TEST_F(DecodeOnHopper, OffsetsGoBeyond32Bits) {
  for (const char* kernel : {"cute.mla.flash_mla", "cute.mla.flash_mla_v1", "cutile.mla.flash_mla_split_kv"})
    for (const int page : {64, 16, 1}) check_far_apart(device_, "cuda", kernel, page);
}

TEST_F(DecodeOnHopper, ShardsOfAContextMergeIntoTheWhole) {
  for (const char* kernel : {"cute.mla.flash_mla", "cute.mla.flash_mla_v1"})
    for (const int interleave : {1, 16})
      for (const int page : {64, 16, 1}) {
        SCOPED_TRACE(testing::Message() << kernel << " page " << page << " turns of " << interleave);
        const MlaDecodeOptions options = {
            .heads = 16, .max_requests = 7, .max_queries = 5, .max_tokens = 9000, .page = page, .kernel = kernel};
        const Step step(options, {700, 0, 258, 1, 9000, 7, 0}, {1, 2, 5, 1, 4, 5, 0}, 9);
        std::vector<Step> parts;
        for (const int shard : {0, 1, 2}) {
          Step& part = parts.emplace_back(shard_of(step, 3, shard, interleave));
          MlaDecode decode(part.at, DeviceHandle("cuda"));
          std::tie(part.o, part.lse) = run(decode, part);
        }
        merge_shards(step, parts);
      }
}

// Two groups, requests beside them, drafts and padding. Of 128 heads every request fills its row tiles: nothing is
// shared, and the bits are those of a MlaDecode without the option.
TEST_F(DecodeOnHopper, SharedPrefixesAreAttendedToOnce) {
  for (const auto& [page, heads] : {std::pair{64, 8}, {16, 4}, {1, 2}, {64, 128}}) {
    SCOPED_TRACE(testing::Message() << "page " << page << " heads " << heads);
    const MlaDecodeOptions options = {
        .heads = heads, .max_requests = 130, .max_queries = 2, .max_tokens = 830, .page = page};
    std::vector<int> lengths, queries;
    for (int r = 0; r < 118; ++r) lengths.push_back(707 + r), queries.push_back(1 + r % 7 / 6);
    lengths.insert(lengths.end(), {300, 1, 0, 0});
    queries.insert(queries.end(), {2, 1, 1, 0});
    Step step(options, lengths, queries, 13);
    share_pages(step, 0, 70, 640);
    share_pages(step, 73, 45, 704);
    MlaDecode plain(options, DeviceHandle("cuda"));
    const auto [plain_o, plain_lse] = run(plain, step);
    step.at.shared_prefixes = true;
    MlaDecode decode(step.at, DeviceHandle("cuda"));
    const auto [o, lse] = run(decode, step);
    EXPECT_EQ(o == plain_o, heads == 128);  // what is merged is rounded once more
    if (heads < 128) step.check(o, lse);
    EXPECT_EQ(run(decode, step).first, o);
  }
}

TEST_F(DecodeOnHopper, ARecordingFollowsWhoSharesPrefixes) {
  const MlaDecodeOptions options = {
      .heads = 4, .max_requests = 120, .max_queries = 2, .max_tokens = 830, .shared_prefixes = true};
  std::vector<int> lengths, queries;
  for (int r = 0; r < 120; ++r) lengths.push_back(707 + r), queries.push_back(1 + r % 7 / 6);
  Step one(options, lengths, queries, 14);
  std::reverse(lengths.begin(), lengths.end());  // of as many pages
  Step other(options, lengths, queries, 15), alone(options, lengths, queries, 16);
  share_pages(one, 0, 120, 640);
  share_pages(other, 10, 50, 704);
  share_pages(other, 65, 50, 640);
  MlaDecode decode(options, DeviceHandle("cuda"));
  const Buffer q = copy_of(one.q), cache = copy_of(one.cache), table = copy_of(one.table), o = copy_of(one.o),
               lse = copy_of(one.lse), of_lengths = copy_of(one.lengths), starts = copy_of(one.starts);
  const auto recording = device_->record([&](StreamHandle stream) {
    decode.plan(static_cast<const int*>(of_lengths.data()), static_cast<const int*>(starts.data()), 120, stream,
                static_cast<const int*>(table.data()), one.width);
    decode.run(MlaDecodeTensors::fused(4, 64, q.data(), one.starts.back() + 1, cache.data(), one.pages,
                                       static_cast<const int*>(table.data()), one.width, o.data(),
                                       static_cast<float*>(lse.data())),
               stream);
  });
  for (const Step* step : {&one, &other, &alone, &one}) {
    copy(q, step->q), copy(cache, step->cache), copy(table, step->table), copy(o, step->o);
    copy(lse, step->lse), copy(of_lengths, step->lengths);
    recording->replay(device_->stream());
    device_->synchronize();
    step->check(back<std::uint16_t>(o), back<float>(lse));
  }
}

// Plans are made by another thread, which has no context of CUDA yet.
TEST_F(DecodeOnHopper, ARecordingOfRunsFollowsLaterPlans) {
  const MlaDecodeOptions options = {.heads = 16, .max_requests = 6, .max_queries = 3, .max_tokens = 700};
  Step one(options, {700, 0, 65, 1, 300, 0}, {1, 2, 3, 1, 2, 0}, 19);
  Step other(options, {1, 64, 300, 0, 700, 1}, {3, 1, 2, 0, 1, 2}, 20);  // of as many pages and queries
  MlaDecode decode(options, DeviceHandle("cuda"));
  const Buffer q = copy_of(one.q), cache = copy_of(one.cache), table = copy_of(one.table), o = copy_of(one.o),
               lse = copy_of(one.lse), lengths = copy_of(one.lengths), starts = copy_of(one.starts);
  const auto plan = [&] {
    decode.plan(static_cast<const int*>(lengths.data()), static_cast<const int*>(starts.data()), 6, device_->stream());
  };
  plan();
  const auto recording = device_->record([&](StreamHandle stream) {
    decode.run(MlaDecodeTensors::fused(16, 64, q.data(), one.starts.back() + 1, cache.data(), one.pages,
                                       static_cast<const int*>(table.data()), one.width, o.data(),
                                       static_cast<float*>(lse.data())),
               stream);
  });
  for (const Step* step : {&other, &one, &other}) {
    copy(q, step->q), copy(cache, step->cache), copy(table, step->table), copy(o, step->o);
    copy(lse, step->lse), copy(lengths, step->lengths), copy(starts, step->starts);
    std::thread(plan).join();
    recording->replay(device_->stream());
    device_->synchronize();
    step->check(back<std::uint16_t>(o), back<float>(lse));
  }
}

TEST_F(DecodeOnHopper, FixedCutsGiveTheSameBitsInAnyBatch) {
  const MlaDecodeOptions options = {.heads = 64, .max_requests = 9, .max_queries = 4, .max_tokens = 3000, .split = 512};
  MlaDecode decode(options, DeviceHandle("cuda"));
  Step alone(options, {2500}, {2}, 5);
  const auto [o, lse] = run(decode, alone);
  // The same request behind others of other lengths and numbers of queries, and before padding.
  Step batch(options, {3000, 17, 2500, 640, 0, 0}, {4, 1, 2, 3, 0, 0}, 6);
  for (int token = 0; token < 2500; ++token)
    std::copy_n(&alone.cache[(std::size_t(alone.table[token / 64]) * 64 + token % 64) * kWidth], kWidth,
                &batch.cache[(std::size_t(batch.table[2 * batch.width + token / 64]) * 64 + token % 64) * kWidth]);
  std::copy_n(&alone.q[0], 2 * 64 * kWidth, &batch.q[std::size_t(5) * 64 * kWidth]);
  const auto [all_o, all_lse] = run(decode, batch);
  EXPECT_TRUE(std::equal(&o[0], &o[0] + 2 * 64 * kLatent, &all_o[std::size_t(5) * 64 * kLatent]));
  EXPECT_TRUE(std::equal(&lse[0], &lse[0] + 2 * 64, &all_lse[5 * 64]));
  batch.check(all_o, all_lse);
}

// A list of more cut items than a thread block looks at at a time.
TEST_F(DecodeOnHopper, ManyCutsGiveTheSameBits) {
  const MlaDecodeOptions options = {
      .heads = 128, .max_requests = 13, .max_queries = 4, .max_tokens = 3000, .split = 64};
  MlaDecode decode(options, DeviceHandle("cuda"));
  Step alone(options, {3000}, {1}, 5);
  const auto [o, lse] = run(decode, alone);
  alone.check(o, lse);
  Step batch(options, std::vector<int>(13, 3000), {4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 1}, 6);
  for (int token = 0; token < 3000; ++token)
    std::copy_n(&alone.cache[(std::size_t(alone.table[token / 64]) * 64 + token % 64) * kWidth], kWidth,
                &batch.cache[(std::size_t(batch.table[12 * batch.width + token / 64]) * 64 + token % 64) * kWidth]);
  std::copy_n(&alone.q[0], 128 * kWidth, &batch.q[std::size_t(48) * 128 * kWidth]);
  const auto [all_o, all_lse] = run(decode, batch);
  EXPECT_TRUE(std::equal(&o[0], &o[0] + 128 * kLatent, &all_o[std::size_t(48) * 128 * kLatent]));
  EXPECT_TRUE(std::equal(&lse[0], &lse[0] + 128, &all_lse[48 * 128]));
}

// Tiles of some parts and of many, which teams of two to eight warps merge, follow each other in a thread block.
TEST_F(DecodeOnHopper, TeamsOfAllSizesFollowEachOther) {
  struct Case {
    const char* kernel;
    std::vector<int> parts;  // of the requests in turn
  };
  for (const auto& [kernel, parts] :
       {Case{"cute.mla.flash_mla_v1", {20, 60, 10}}, Case{"cute.mla.flash_mla", {30, 100, 60}}}) {
    SCOPED_TRACE(kernel);
    std::vector<int> lengths;
    for (int r = 0; r < 12; ++r) lengths.push_back(64 * parts[r % 3]);
    const MlaDecodeOptions options = {
        .heads = 4, .max_requests = 12, .max_tokens = 6400, .split = 64, .kernel = kernel};
    MlaDecode decode(options, DeviceHandle("cuda"));
    Step step(options, lengths, std::vector<int>(12, 1), 8);
    const auto first = run(decode, step);
    step.check(first.first, first.second);
    for (int again = 0; again < 20; ++again) EXPECT_TRUE(run(decode, step).first == first.first) << "run " << again;
  }
}

// Thread blocks that wait for others leave them room in the end.
TEST_F(DecodeOnHopper, AStreamOfFewerProcessorsMergesWhatWasCut) {
  const auto streams = device_->streams(2, {32, device_->info().processors - 32});
  for (const char* kernel : {"cute.mla.flash_mla", "cute.mla.flash_mla_v1"}) {
    SCOPED_TRACE(kernel);
    const MlaDecodeOptions options = {.heads = 16, .max_requests = 3, .max_tokens = 9000, .kernel = kernel};
    MlaDecode decode(options, DeviceHandle("cuda"));
    Step step(options, {9000, 5000, 70}, {1, 1, 1}, 7);
    const auto [o, lse] = run(decode, step, streams->stream(0));
    step.check(o, lse);
  }
}

TEST_F(DecodeOnHopper, LengthsBeyondTheCapacityAreReported) {
  const MlaDecodeOptions options = {.heads = 16, .max_requests = 2, .max_tokens = 100};
  MlaDecode decode(options, DeviceHandle("cuda"));
  const Buffer lengths = copy_of(std::vector<int>{5, 101}), starts = copy_of(std::vector<int>{0, 2, 2});
  decode.plan(static_cast<const int*>(lengths.data()), nullptr, 2);
  EXPECT_TRUE(contains(error_of([&] { decode.check(); }), "max_tokens=100"));
  decode.plan(static_cast<const int*>(lengths.data()), static_cast<const int*>(starts.data()), 1);
  EXPECT_TRUE(contains(error_of([&] { decode.check(); }), "max_queries=1"));
}

}  // namespace
}  // namespace hypermla::decode_test
