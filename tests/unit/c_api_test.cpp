// The C interface: it computes what MlaDecode, MlaPrefill and MlaCacheOps compute, structs may be older or newer than
// the library, and what is wrong gives a status and a sentence.
#include "hypermla/c_api.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <thread>

#include "hypermla/base/half.h"
#include "hypermla/device/device.h"
#include "hypermla/mla_cache.h"
#include "hypermla/mla_decode.h"
#include "hypermla/mla_prefill.h"
#include "support.h"

namespace hypermla::c_api_test {
namespace {

using testing_support::contains;

hypermla_decode_options small_options() {
  hypermla_decode_options options;
  hypermla_decode_options_init(&options, sizeof options);
  options.heads = 2;
  options.max_requests = 2;
  options.max_queries = 2;
  options.max_tokens = 20;
  options.page = 16;
  return options;
}

// The sentence of a call that must have failed so.
std::string refusal(hypermla_status status) {
  EXPECT_EQ(status, HYPERMLA_ERROR);
  return hypermla_last_error();
}

// Numbers from 2^-7 to about 1, all of their bits different from their neighbours'.
std::vector<std::uint16_t> numbers(std::size_t count, int step) {
  std::vector<std::uint16_t> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = std::uint16_t(0x3c00 + i * step % 1024);
  return values;
}

class CApi : public testing::Test {
 protected:
  void SetUp() override {
    const hypermla_decode_options options = small_options();
    ASSERT_EQ(hypermla_decode_create(&options, "cpu", nullptr, &decode_), HYPERMLA_OK) << hypermla_last_error();
    hypermla_decode_tensors_init(&tensors_, sizeof tensors_);
    ASSERT_EQ(hypermla_decode_tensors_fused(&tensors_, 2, 16, q_.data(), 3, cache_.data(), 3, o_.data(), lse_.data()),
              HYPERMLA_OK);
    tensors_.block_table = table_.data();
    tensors_.table_stride = 2;
  }
  void TearDown() override { hypermla_decode_destroy(decode_); }

  std::vector<int> lengths_ = {20, 3}, starts_ = {0, 2, 3}, table_ = {2, 0, 1, -1};
  std::vector<std::uint16_t> q_ = std::vector<std::uint16_t>(3 * 2 * 576, 0x3f80);
  std::vector<std::uint16_t> cache_ = std::vector<std::uint16_t>(3 * 16 * 576, 0x3c00);
  std::vector<std::uint16_t> o_ = std::vector<std::uint16_t>(3 * 2 * 512);
  std::vector<float> lse_ = std::vector<float>(3 * 2);
  hypermla_decode* decode_ = nullptr;
  hypermla_decode_tensors tensors_;
};

TEST_F(CApi, ItGivesTheBitsOfMlaDecode) {
  std::ranges::copy(numbers(q_.size(), 7919), q_.begin());  // at the addresses that tensors_ has
  std::ranges::copy(numbers(cache_.size(), 6007), cache_.begin());
  ASSERT_EQ(hypermla_decode_plan(decode_, lengths_.data(), starts_.data(), 2, nullptr), HYPERMLA_OK);
  ASSERT_EQ(hypermla_decode_run(decode_, &tensors_, nullptr), HYPERMLA_OK) << hypermla_last_error();
  EXPECT_EQ(hypermla_decode_check(decode_), HYPERMLA_OK);

  std::vector<std::uint16_t> o(o_.size());
  std::vector<float> lse(lse_.size());
  MlaDecode decode({.heads = 2, .max_requests = 2, .max_queries = 2, .max_tokens = 20, .page = 16},
                   DeviceHandle("cpu"));
  decode.plan(lengths_.data(), starts_.data(), 2);
  decode.run(MlaDecodeTensors::fused(2, 16, q_.data(), 3, cache_.data(), 3, table_.data(), 2, o.data(), lse.data()));
  EXPECT_EQ(o_, o);
  EXPECT_EQ(lse_, lse);
  EXPECT_NE(lse[0], lse[5]);

  const char* text = nullptr;
  ASSERT_EQ(hypermla_decode_explain(decode_, &text), HYPERMLA_OK);
  EXPECT_EQ(text, decode.explain());
  std::size_t bytes = 0;
  const hypermla_decode_options options = small_options();
  ASSERT_EQ(hypermla_decode_workspace_bytes(&options, "cpu", &bytes), HYPERMLA_OK);
  EXPECT_EQ(bytes, decode.workspace_bytes());
  hypermla_decode_options longer = small_options();
  longer.max_tokens = 4096;
  int32_t split = -1;
  ASSERT_EQ(hypermla_decode_fixed_split(&longer, 1 << 20, "cpu", &split), HYPERMLA_OK);
  EXPECT_EQ(split, MlaDecode::fixed_split({.heads = 2, .max_requests = longer.max_requests, .max_tokens = 4096},
                                          1 << 20, DeviceHandle("cpu")));
  EXPECT_TRUE(contains(refusal(hypermla_decode_fixed_split(&longer, 1 << 20, "cpu", nullptr)), "split"));
}

TEST_F(CApi, EveryMemberOfTheOptionsArrives) {
  const auto refused = [](auto change) {
    hypermla_decode_options options = small_options();
    change(options);
    hypermla_decode* decode = nullptr;
    const std::string said = refusal(hypermla_decode_create(&options, "cpu", nullptr, &decode));
    EXPECT_EQ(decode, nullptr);
    return said;
  };
  EXPECT_TRUE(contains(refused([](auto& at) { at.heads = 0; }), "heads=0"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.max_requests = 2049; }), "max_requests=2049"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.max_queries = -1; }), "max_queries=-1"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.max_query_tokens = 5; }), "max_query_tokens=5"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.max_tokens = 0; }), "max_tokens=0"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.page = 48; }), "page=48"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.dtype = 2; }), "HYPERMLA_FLOAT16"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.scale = -1; }), "scale=-1"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.split = 100; }), "split=100"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.kernel = "cute.mla.flash_mla"; }), "kernel=cute.mla.flash_mla"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.reserved = 1; }), "options->reserved is 1"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.causal = 2; }), "causal=2 is not supported: it must be 0 or 1"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.lse_base2 = -1; }), "lse_base2=-1"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.empty_lse_positive = 2; }), "empty_lse_positive=2"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.sparse = 2; }), "sparse=2"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.shared_prefixes = 256; }), "shared_prefixes=256"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.fp8_queries = 2; }), "fp8_queries=2"));

  // Flags and the scale, by what they change: the last token counts, base 2, +infinity of an empty request, halves.
  hypermla_decode_options options = small_options();
  options.causal = 0;
  options.lse_base2 = options.empty_lse_positive = 1;
  options.dtype = HYPERMLA_FLOAT16;
  options.scale = 0.5f;
  hypermla_decode* decode = nullptr;
  ASSERT_EQ(hypermla_decode_create(&options, "cpu", nullptr, &decode), HYPERMLA_OK) << hypermla_last_error();
  lengths_[1] = 0;
  std::fill(q_.begin(), q_.end(), 0);
  ASSERT_EQ(hypermla_decode_plan(decode, lengths_.data(), starts_.data(), 2, nullptr), HYPERMLA_OK);
  ASSERT_EQ(hypermla_decode_run(decode, &tensors_, nullptr), HYPERMLA_OK) << hypermla_last_error();
  EXPECT_NEAR(lse_[0], std::log2(20.0), 1e-5);
  EXPECT_EQ(lse_[4], std::numeric_limits<float>::infinity());
  EXPECT_EQ(o_[0], 0x3c00);  // 1 as float16: the mean of what the cache holds
  hypermla_decode_destroy(decode);
}

// Lists with holes, both forms of the cache, sinks, and lists that are whole where no lengths are given.
TEST(CApiSparse, ItGivesTheBitsOfMlaDecode) {
  constexpr int kHeads = 3, kQueries = 2, kTopK = 5, kPage = 16, kPages = 2;
  const std::vector<std::uint16_t> q = numbers(kQueries * kHeads * 576, 7919);
  const std::vector<int> slots = {31, -1, 4, 32, 9, 0, 17, 17, 3, 30}, lengths = {5, 3};
  const std::vector<float> sinks = {0.5f, -2, 8};
  const float cache_scale = 0.01f;
  for (const int fp8 : {0, 1, 2}) {
    SCOPED_TRACE(fp8);
    const int token_bytes = fp8_bytes(MlaCacheFormat(fp8));
    std::vector<unsigned char> cache(kPages * kPage * (fp8 ? token_bytes : 1152));
    for (std::size_t i = 0; i < cache.size(); ++i) cache[i] = static_cast<unsigned char>(i * 37 % 61);
    hypermla_decode_options options;
    hypermla_decode_options_init(&options, sizeof options);
    EXPECT_EQ(options.sparse, 0);
    EXPECT_EQ(options.cache_format, HYPERMLA_CACHE_AS_QUERIES);
    options.heads = kHeads;
    options.max_requests = kQueries;
    options.max_tokens = kTopK;
    options.page = kPage;
    options.cache_format = fp8;
    hypermla_decode* decode = nullptr;
    if (fp8) {
      options.dtype = HYPERMLA_FLOAT16;
      EXPECT_TRUE(
          contains(refusal(hypermla_decode_create(&options, "cpu", nullptr, &decode)), "bfloat16 queries only"));
      options.dtype = HYPERMLA_BFLOAT16;
    }
    options.sparse = 1;
    ASSERT_EQ(hypermla_decode_create(&options, "cpu", nullptr, &decode), HYPERMLA_OK) << hypermla_last_error();

    std::vector<std::uint16_t> o(kQueries * kHeads * 512), expected_o(o.size());
    std::vector<float> lse(kQueries * kHeads), expected_lse(lse.size());
    hypermla_decode_tensors tensors;
    hypermla_decode_tensors_init(&tensors, sizeof tensors);
    const float* const scale = fp8 == HYPERMLA_CACHE_FP8_576 ? &cache_scale : nullptr;
    ASSERT_EQ(fp8 ? hypermla_decode_tensors_fused_fp8(&tensors, kHeads, kPage, q.data(), kQueries, cache.data(), kPages,
                                                      scale, o.data(), lse.data())
                  : hypermla_decode_tensors_fused(&tensors, kHeads, kPage, q.data(), kQueries, cache.data(), kPages,
                                                  o.data(), lse.data()),
              HYPERMLA_OK);
    tensors.block_table = slots.data();
    tensors.table_stride = kTopK;
    tensors.sinks = sinks.data();
    MlaDecode same({.heads = kHeads,
                    .max_requests = kQueries,
                    .max_tokens = kTopK,
                    .page = kPage,
                    .sparse = true,
                    .cache_format = MlaCacheFormat(fp8)},
                   DeviceHandle("cpu"));
    MlaDecodeTensors with =
        MlaDecodeTensors::fused(kHeads, kPage, q.data(), kQueries, cache.data(), kPages, slots.data(), kTopK,
                                expected_o.data(), expected_lse.data(), MlaCacheFormat(fp8));
    with.sinks = sinks.data();
    with.cache_scale = scale;
    std::vector<float> of_lengths;
    for (const int* some : {lengths.data(), static_cast<const int*>(nullptr)}) {
      ASSERT_EQ(hypermla_decode_plan(decode, some, nullptr, kQueries, nullptr), HYPERMLA_OK) << hypermla_last_error();
      ASSERT_EQ(hypermla_decode_run(decode, &tensors, nullptr), HYPERMLA_OK) << hypermla_last_error();
      same.plan(some, nullptr, kQueries);
      same.run(with);
      EXPECT_EQ(o, expected_o);
      EXPECT_EQ(lse, expected_lse);
      EXPECT_NE(lse, of_lengths);
      of_lengths = lse;
    }
    const std::vector<std::uint16_t> with_sinks = o;
    tensors.sinks = nullptr;
    ASSERT_EQ(hypermla_decode_run(decode, &tensors, nullptr), HYPERMLA_OK);
    EXPECT_NE(o, with_sinks);
    EXPECT_EQ(lse, of_lengths);
    options.cache_format = -1;
    EXPECT_TRUE(contains(refusal(hypermla_decode_create(&options, "cpu", nullptr, &decode)), "cache_format=-1"));
    options.cache_format = 0;
    options.max_queries = 2;
    EXPECT_TRUE(contains(refusal(hypermla_decode_create(&options, "cpu", nullptr, &decode)), "with sparse"));
    hypermla_decode_destroy(decode);
  }
}

TEST(CApiFp8, QueriesInFp8AreThoseOfMlaDecode) {
  constexpr int kHeads = 2, kPage = 16;
  std::vector<unsigned char> q(kHeads * 576), cache(2 * kPage * 576);
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = static_cast<unsigned char>(i * 29 % 61);
  for (std::size_t i = 0; i < cache.size(); ++i) cache[i] = static_cast<unsigned char>(i * 37 % 61);
  const std::vector<int> table = {1, 0}, lengths = {20};
  const float cache_scale = 0.01f, q_scale = 0.02f;
  hypermla_decode_options options;
  hypermla_decode_options_init(&options, sizeof options);
  EXPECT_EQ(options.fp8_queries, 0);
  options.heads = kHeads;
  options.max_tokens = 20;
  options.page = kPage;
  options.fp8_queries = 1;
  hypermla_decode* decode = nullptr;
  EXPECT_TRUE(contains(refusal(hypermla_decode_create(&options, "cpu", nullptr, &decode)), "leave fp8_queries out"));
  options.cache_format = HYPERMLA_CACHE_FP8_576;
  ASSERT_EQ(hypermla_decode_create(&options, "cpu", nullptr, &decode), HYPERMLA_OK) << hypermla_last_error();
  MlaDecode same(
      {.heads = kHeads, .max_tokens = 20, .page = kPage, .cache_format = MlaCacheFormat::fp8_576, .fp8_queries = true},
      DeviceHandle("cpu"));
  std::vector<std::uint16_t> o(kHeads * 512), expected_o(o.size());
  std::vector<float> lse(kHeads), expected_lse(kHeads);
  MlaDecodeTensors with =
      MlaDecodeTensors::fused(kHeads, kPage, q.data(), 1, cache.data(), 2, table.data(), 2, expected_o.data(),
                              expected_lse.data(), MlaCacheFormat::fp8_576, true);
  with.cache_scale = &cache_scale;
  with.q_scale = &q_scale;
  hypermla_decode_tensors tensors;
  hypermla_decode_tensors_init(&tensors, sizeof tensors);
  ASSERT_EQ(hypermla_decode_tensors_fused_fp8(&tensors, kHeads, kPage, q.data(), 1, cache.data(), 2, &cache_scale,
                                              o.data(), lse.data()),
            HYPERMLA_OK);
  tensors.q_rope = with.q_rope.data;  // queries of bytes
  tensors.block_table = table.data();
  tensors.table_stride = 2;
  ASSERT_EQ(hypermla_decode_plan(decode, lengths.data(), nullptr, 1, nullptr), HYPERMLA_OK) << hypermla_last_error();
  EXPECT_TRUE(contains(refusal(hypermla_decode_run(decode, &tensors, nullptr)), "q_scale is missing"));
  tensors.q_scale = &q_scale;
  ASSERT_EQ(hypermla_decode_run(decode, &tensors, nullptr), HYPERMLA_OK) << hypermla_last_error();
  same.plan(lengths.data(), nullptr, 1);
  same.run(with);
  EXPECT_EQ(o, expected_o);
  EXPECT_EQ(lse, expected_lse);
  hypermla_decode_destroy(decode);
}

TEST_F(CApi, ShardsAreThoseOfMlaDecode) {
  hypermla_decode_options options = small_options();
  EXPECT_EQ(options.shards, 1);
  EXPECT_EQ(options.shard, 0);
  EXPECT_EQ(options.interleave, 1);
  options.shards = 3;
  options.shard = 3;
  options.interleave = 4;
  hypermla_decode* decode = nullptr;
  EXPECT_TRUE(contains(refusal(hypermla_decode_create(&options, "cpu", nullptr, &decode)), "shard=3"));
  options.shard = 1;
  ASSERT_EQ(hypermla_decode_create(&options, "cpu", nullptr, &decode), HYPERMLA_OK) << hypermla_last_error();
  const char* text = nullptr;
  ASSERT_EQ(hypermla_decode_explain(decode, &text), HYPERMLA_OK);
  EXPECT_TRUE(contains(text, "shard 1 of 3, which take turns of 4 tokens")) << text;
  hypermla_decode_destroy(decode);
}

TEST_F(CApi, SharedPrefixesAreThoseOfMlaDecode) {
  ASSERT_EQ(hypermla_decode_plan(decode_, lengths_.data(), starts_.data(), 2, nullptr), HYPERMLA_OK);
  ASSERT_EQ(hypermla_decode_run(decode_, &tensors_, nullptr), HYPERMLA_OK) << hypermla_last_error();
  const auto o = o_;
  hypermla_decode_options options = small_options();
  EXPECT_EQ(options.shared_prefixes, 0);
  options.shared_prefixes = 1;
  hypermla_decode* decode = nullptr;
  ASSERT_EQ(hypermla_decode_create(&options, "cpu", nullptr, &decode), HYPERMLA_OK) << hypermla_last_error();
  EXPECT_TRUE(contains(refusal(hypermla_decode_plan(decode, lengths_.data(), starts_.data(), 2, nullptr)),
                       "block_table is missing"));
  ASSERT_EQ(hypermla_decode_plan_shared(decode, lengths_.data(), starts_.data(), 2, table_.data(), 2, nullptr),
            HYPERMLA_OK)
      << hypermla_last_error();
  std::fill(o_.begin(), o_.end(), 0);
  ASSERT_EQ(hypermla_decode_run(decode, &tensors_, nullptr), HYPERMLA_OK) << hypermla_last_error();
  EXPECT_EQ(o_, o);
  hypermla_decode_destroy(decode);
  EXPECT_TRUE(contains(
      refusal(hypermla_decode_plan_shared(nullptr, lengths_.data(), starts_.data(), 2, table_.data(), 2, nullptr)),
      "decode is NULL"));
}

TEST_F(CApi, AStructMayBeOlderOrNewerThanTheLibrary) {
  const std::size_t older = offsetof(hypermla_decode_options, page);
  hypermla_decode_options options;
  std::memset(&options, 0xff, sizeof options);
  hypermla_decode_options_init(&options, older);
  EXPECT_EQ(options.size, older);
  EXPECT_EQ(options.heads, MlaDecodeOptions().heads);
  EXPECT_EQ(options.page, -1) << "written behind the caller's struct";
  hypermla_decode* decode = nullptr;
  EXPECT_EQ(hypermla_decode_create(&options, "cpu", nullptr, &decode), HYPERMLA_OK) << hypermla_last_error();
  hypermla_decode_destroy(decode);

  struct Newer {
    hypermla_decode_options known;
    std::int64_t more;
  } newer;
  hypermla_decode_options_init(&newer.known, sizeof newer);
  EXPECT_EQ(newer.more, 0);
  EXPECT_EQ(hypermla_decode_create(&newer.known, "cpu", nullptr, &decode), HYPERMLA_OK) << hypermla_last_error();
  hypermla_decode_destroy(decode);
  newer.more = 1;
  EXPECT_TRUE(contains(refusal(hypermla_decode_create(&newer.known, "cpu", nullptr, &decode)), "does not know"));

  hypermla_decode_options blank;
  std::memset(&blank, 0, sizeof blank);
  EXPECT_TRUE(contains(refusal(hypermla_decode_create(&blank, "cpu", nullptr, &decode)), "options_init()"));
}

TEST_F(CApi, WhatIsWrongGivesAStatusAndASentence) {
  const hypermla_decode_options options = small_options();
  hypermla_decode* decode = nullptr;
  EXPECT_TRUE(contains(refusal(hypermla_decode_create(nullptr, "cpu", nullptr, &decode)), "options is NULL"));
  EXPECT_TRUE(contains(refusal(hypermla_decode_create(&options, "cpu", nullptr, nullptr)), "decode is NULL"));
  EXPECT_TRUE(contains(refusal(hypermla_decode_create(&options, "tpu", nullptr, &decode)), "tpu"));
  EXPECT_TRUE(contains(refusal(hypermla_decode_plan(nullptr, lengths_.data(), nullptr, 2, nullptr)), "decode is NULL"));
  EXPECT_TRUE(contains(refusal(hypermla_decode_run(decode_, &tensors_, nullptr)), "call plan() first"));
  EXPECT_TRUE(contains(refusal(hypermla_decode_plan(decode_, nullptr, nullptr, 2, nullptr)), "lengths is missing"));
  EXPECT_TRUE(contains(refusal(hypermla_decode_plan(decode_, lengths_.data(), nullptr, 3, nullptr)), "3 requests"));
  ASSERT_EQ(hypermla_decode_plan(decode_, lengths_.data(), starts_.data(), 2, nullptr), HYPERMLA_OK);
  EXPECT_TRUE(contains(refusal(hypermla_decode_run(decode_, nullptr, nullptr)), "tensors is NULL"));
  tensors_.o_head_stride = 60;
  EXPECT_TRUE(contains(refusal(hypermla_decode_run(decode_, &tensors_, nullptr)), "o_head_stride=60"));
  tensors_.o_head_stride = 512;
  tensors_.query_tokens = std::int64_t{1} << 32;
  EXPECT_TRUE(contains(refusal(hypermla_decode_run(decode_, &tensors_, nullptr)), "query_tokens=4294967296"));
  std::string others = "not asked";
  std::thread([&] { others = hypermla_last_error(); }).join();
  EXPECT_EQ(others, "") << "the sentence is this thread's";
  tensors_.query_tokens = 3;
  EXPECT_EQ(hypermla_decode_run(decode_, &tensors_, nullptr), HYPERMLA_OK);
  EXPECT_TRUE(contains(hypermla_last_error(), "query_tokens")) << "it stays";
}

hypermla_prefill_options small_prefill() {
  hypermla_prefill_options options;
  hypermla_prefill_options_init(&options, sizeof options);
  options.heads = 2;
  options.max_requests = 2;
  options.max_query_tokens = 5;
  options.max_tokens = 20;
  return options;
}

TEST(CApiPrefill, ItGivesTheBitsOfMlaPrefill) {
  const std::vector<int> query_starts = {0, 3, 5}, token_starts = {0, 20, 23};
  const std::vector<std::uint16_t> q = numbers(5 * 2 * 192, 7919), k = numbers(23 * 2 * 192, 6007),
                                   v = numbers(23 * 2 * 128, 5003);
  std::vector<std::uint16_t> o(5 * 2 * 128), expected_o(o.size());
  std::vector<float> lse(5 * 2), expected_lse(lse.size());

  const hypermla_prefill_options options = small_prefill();
  hypermla_prefill* prefill = nullptr;
  ASSERT_EQ(hypermla_prefill_create(&options, "cpu", nullptr, &prefill), HYPERMLA_OK) << hypermla_last_error();
  hypermla_prefill_tensors tensors;
  hypermla_prefill_tensors_init(&tensors, sizeof tensors);
  ASSERT_EQ(hypermla_prefill_tensors_dense(&tensors, 2, q.data(), 5, k.data(), v.data(), 23, o.data(), lse.data()),
            HYPERMLA_OK);
  EXPECT_TRUE(contains(refusal(hypermla_prefill_run(prefill, &tensors, nullptr)), "call plan() first"));
  ASSERT_EQ(hypermla_prefill_plan(prefill, query_starts.data(), token_starts.data(), 2, nullptr), HYPERMLA_OK);
  ASSERT_EQ(hypermla_prefill_run(prefill, &tensors, nullptr), HYPERMLA_OK) << hypermla_last_error();
  EXPECT_EQ(hypermla_prefill_check(prefill), HYPERMLA_OK);

  MlaPrefill same({.heads = 2, .max_requests = 2, .max_query_tokens = 5, .max_tokens = 20}, DeviceHandle("cpu"));
  same.plan(query_starts.data(), token_starts.data(), 2);
  same.run(MlaPrefillTensors::dense(2, q.data(), 5, k.data(), v.data(), 23, expected_o.data(), expected_lse.data()));
  EXPECT_EQ(o, expected_o);
  EXPECT_EQ(lse, expected_lse);
  EXPECT_NE(lse[0], lse[9]);

  const char* text = nullptr;
  ASSERT_EQ(hypermla_prefill_explain(prefill, &text), HYPERMLA_OK);
  EXPECT_EQ(text, same.explain());
  std::size_t bytes = 0;
  ASSERT_EQ(hypermla_prefill_workspace_bytes(&options, "cpu", &bytes), HYPERMLA_OK);
  EXPECT_EQ(bytes, same.workspace_bytes());

  tensors.v_token_stride = 60;
  EXPECT_TRUE(contains(refusal(hypermla_prefill_run(prefill, &tensors, nullptr)), "v.token_stride=60"));
  tensors.tokens = -1;
  EXPECT_TRUE(contains(refusal(hypermla_prefill_run(prefill, &tensors, nullptr)), "tokens=-1"));
  EXPECT_TRUE(contains(refusal(hypermla_prefill_run(prefill, nullptr, nullptr)), "tensors is NULL"));
  EXPECT_TRUE(contains(refusal(hypermla_prefill_plan(nullptr, nullptr, nullptr, 0, nullptr)), "prefill is NULL"));
  hypermla_prefill_destroy(prefill);
}

TEST(CApiPrefill, EveryMemberOfTheOptionsArrives) {
  const auto refused = [](auto change) {
    hypermla_prefill_options options = small_prefill();
    change(options);
    hypermla_prefill* prefill = nullptr;
    return refusal(hypermla_prefill_create(&options, "cpu", nullptr, &prefill));
  };
  EXPECT_TRUE(contains(refused([](auto& at) { at.heads = 0; }), "heads=0"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.max_requests = 2049; }), "max_requests=2049"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.max_query_tokens = 0; }), "max_query_tokens=0"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.max_tokens = -1; }), "max_tokens=-1"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.dtype = 2; }), "HYPERMLA_FLOAT16"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.scale = -1; }), "scale=-1"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.query_rows = 2; }), "query_rows=2"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.size = 0; }), "hypermla_prefill_options_init()"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.causal = 2; }), "causal=2 is not supported: it must be 0 or 1"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.lse_base2 = 2; }), "lse_base2=2"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.empty_lse_positive = -1; }), "empty_lse_positive=-1"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.accumulate = 2; }), "accumulate=2"));
  EXPECT_TRUE(contains(refused([](auto& at) { at.batch_invariant = 2; }), "batch_invariant=2"));

  // Flags by what they change: the last token counts, base 2, +infinity of an empty request; and merged into ones.
  hypermla_prefill_options options = small_prefill();
  options.causal = 0;
  options.lse_base2 = options.empty_lse_positive = options.accumulate = 1;
  options.dtype = HYPERMLA_FLOAT16;
  hypermla_prefill* prefill = nullptr;
  ASSERT_EQ(hypermla_prefill_create(&options, "cpu", nullptr, &prefill), HYPERMLA_OK) << hypermla_last_error();
  const std::vector<int> query_starts = {0, 1, 2}, token_starts = {0, 8, 8};
  const std::vector<std::uint16_t> q(2 * 2 * 192, 0), k(8 * 2 * 192, 0), v(8 * 2 * 128, 0x4000);  // 2 as float16
  std::vector<std::uint16_t> o(2 * 2 * 128, 0x3c00);                                              // 1
  std::vector<float> lse = {3, std::numeric_limits<float>::infinity(), 3, -std::numeric_limits<float>::infinity()};
  hypermla_prefill_tensors tensors;
  hypermla_prefill_tensors_init(&tensors, sizeof tensors);
  ASSERT_EQ(hypermla_prefill_tensors_dense(&tensors, 2, q.data(), 2, k.data(), v.data(), 8, o.data(), lse.data()),
            HYPERMLA_OK);
  ASSERT_EQ(hypermla_prefill_plan(prefill, query_starts.data(), token_starts.data(), 2, nullptr), HYPERMLA_OK);
  ASSERT_EQ(hypermla_prefill_run(prefill, &tensors, nullptr), HYPERMLA_OK) << hypermla_last_error();
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(lse, (std::vector<float>{4, 3, 3, infinity}));  // 2^3 and 8 tokens; 8 tokens; 2^3; nothing
  EXPECT_EQ(o[0], 0x3e00);                                  // 1.5
  EXPECT_EQ(o[128], 0x4000);
  EXPECT_EQ(o[2 * 128], 0x3c00);
  EXPECT_EQ(o[3 * 128], 0);
  hypermla_prefill_destroy(prefill);

  // The second query before the first.
  options.accumulate = 0;
  options.query_rows = 1;
  const std::vector<int> rows = {1, 0};
  ASSERT_EQ(hypermla_prefill_create(&options, "cpu", nullptr, &prefill), HYPERMLA_OK) << hypermla_last_error();
  ASSERT_EQ(hypermla_prefill_plan_rows(prefill, query_starts.data(), token_starts.data(), rows.data(), 2, nullptr),
            HYPERMLA_OK);
  ASSERT_EQ(hypermla_prefill_run(prefill, &tensors, nullptr), HYPERMLA_OK) << hypermla_last_error();
  EXPECT_EQ(lse, (std::vector<float>{infinity, infinity, 3, 3}));
  EXPECT_TRUE(contains(refusal(hypermla_prefill_plan(prefill, query_starts.data(), token_starts.data(), 2, nullptr)),
                       "query_rows is missing"));
  hypermla_prefill_destroy(prefill);
}

TEST(CApiPrefill, AStructMayBeOlderThanTheLibrary) {
  const std::size_t older = offsetof(hypermla_prefill_options, accumulate);
  hypermla_prefill_options options;
  std::memset(&options, 0xff, sizeof options);
  hypermla_prefill_options_init(&options, older);
  EXPECT_EQ(options.max_query_tokens, MlaPrefillOptions().max_query_tokens);
  EXPECT_EQ(options.accumulate, -1) << "written behind the caller's struct";
  hypermla_prefill* prefill = nullptr;
  ASSERT_EQ(hypermla_prefill_create(&options, "cpu", nullptr, &prefill), HYPERMLA_OK) << hypermla_last_error();
  hypermla_prefill_destroy(prefill);
}

class CApiCache : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(hypermla_cache_ops_create(HYPERMLA_BFLOAT16, "cpu", &ops_), HYPERMLA_OK) << hypermla_last_error();
  }
  void TearDown() override { hypermla_cache_ops_destroy(ops_); }
  hypermla_cache_ops* ops_ = nullptr;
  MlaCacheOps same_{DType::bfloat16, DeviceHandle("cpu")};
};

TEST_F(CApiCache, AppendWritesWhatMlaCacheOpsWrites) {
  const std::vector<std::uint16_t> rows = numbers(3 * 576, 7919);
  const std::vector<std::int64_t> slots = {17, -1, 2};
  std::vector<std::uint16_t> cache(2 * 16 * 576, 7), expected = cache;
  hypermla_append_arguments with;
  hypermla_append_arguments_init(&with, sizeof with);
  EXPECT_EQ(with.page, 64);
  with.latent = rows.data();
  with.rope = &rows[512];
  with.latent_stride = with.rope_stride = 576;
  with.slots = slots.data();
  with.tokens = 3;
  ASSERT_EQ(hypermla_append_arguments_fused(&with, cache.data(), 2, 16), HYPERMLA_OK);
  ASSERT_EQ(hypermla_append(ops_, &with, nullptr), HYPERMLA_OK) << hypermla_last_error();
  same_.append({.latent = rows.data(),
                .rope = &rows[512],
                .latent_stride = 576,
                .rope_stride = 576,
                .slots = slots.data(),
                .tokens = 3,
                .cache = MlaCache::fused(expected.data(), 2, 16)});
  EXPECT_EQ(cache, expected);
  EXPECT_EQ(cache[17 * 576 + 575], rows[575]);
  with.pages = 1;
  EXPECT_TRUE(contains(refusal(hypermla_append(ops_, &with, nullptr)), "slots[0] is 17"));
  EXPECT_TRUE(contains(refusal(hypermla_append(nullptr, &with, nullptr)), "ops is NULL"));
  with.size = 0;
  EXPECT_TRUE(contains(refusal(hypermla_append(ops_, &with, nullptr)), "hypermla_append_arguments_init()"));
}

// Rows of 576 columns for so many slots: C's arguments, but for the cache, and C++'s.
hypermla_append_arguments fused_rows(const std::vector<std::uint16_t>& rows, const std::vector<std::int64_t>& slots) {
  hypermla_append_arguments with;
  hypermla_append_arguments_init(&with, sizeof with);
  with.latent = rows.data();
  with.rope = &rows[512];
  with.latent_stride = with.rope_stride = 576;
  with.slots = slots.data();
  with.tokens = int(slots.size());
  return with;
}
MlaCacheOps::Append same_as(const std::vector<std::uint16_t>& rows, const std::vector<std::int64_t>& slots,
                            const MlaCache& cache, const float* cache_scale = nullptr) {
  return {.latent = rows.data(),
          .rope = &rows[512],
          .latent_stride = 576,
          .rope_stride = 576,
          .slots = slots.data(),
          .tokens = int(slots.size()),
          .cache = cache,
          .cache_scale = cache_scale};
}

TEST_F(CApiCache, AppendWritesInFp8WhatMlaCacheOpsWrites) {
  const std::vector<std::uint16_t> rows = numbers(2 * 576, 7919);
  const std::vector<std::int64_t> slots = {17, 2};
  std::vector<unsigned char> cache(2 * 16 * kFp8TokenBytes, 7), expected = cache;
  hypermla_append_arguments with = fused_rows(rows, slots);
  EXPECT_EQ(with.cache_format, HYPERMLA_CACHE_AS_QUERIES);
  with.cache_format = HYPERMLA_CACHE_FP8_656;
  ASSERT_EQ(hypermla_append_arguments_fused(&with, cache.data(), 2, 16), HYPERMLA_OK);
  ASSERT_EQ(hypermla_append(ops_, &with, nullptr), HYPERMLA_OK) << hypermla_last_error();
  same_.append(same_as(rows, slots, MlaCache::fused(expected.data(), 2, 16, MlaCacheFormat::fp8_656)));
  EXPECT_EQ(cache, expected);
  EXPECT_EQ(std::memcmp(&cache[17 * kFp8TokenBytes + 528], &rows[512], 128), 0);
  with.cache_format = 3;
  EXPECT_TRUE(contains(refusal(hypermla_append(ops_, &with, nullptr)), "cache_format=3"));
}

TEST_F(CApiCache, AppendWritesInFp8WithOneFactorWhatMlaCacheOpsWrites) {
  const std::vector<std::uint16_t> rows = numbers(2 * 576, 7919);
  const std::vector<std::int64_t> slots = {17, 2};
  const float cache_scale = 0.01f;
  std::vector<unsigned char> cache(2 * 16 * 576, 7), expected = cache;
  hypermla_append_arguments with = fused_rows(rows, slots);
  with.cache_format = HYPERMLA_CACHE_FP8_576;
  ASSERT_EQ(hypermla_append_arguments_fused(&with, cache.data(), 2, 16), HYPERMLA_OK);
  EXPECT_TRUE(contains(refusal(hypermla_append(ops_, &with, nullptr)), "cache_scale is missing"));
  with.cache_scale = &cache_scale;
  ASSERT_EQ(hypermla_append(ops_, &with, nullptr), HYPERMLA_OK) << hypermla_last_error();
  same_.append(same_as(rows, slots, MlaCache::fused(expected.data(), 2, 16, MlaCacheFormat::fp8_576), &cache_scale));
  EXPECT_EQ(cache, expected);
  EXPECT_EQ(cache[17 * 576 + 575], e4m3_from_float(to_float(rows[575], DType::bfloat16) / cache_scale));
  // A caller of before there was a cache_scale gives a smaller struct.
  with.size = offsetof(hypermla_append_arguments, cache_scale);
  EXPECT_TRUE(contains(refusal(hypermla_append(ops_, &with, nullptr)), "cache_scale is missing"));
}

TEST_F(CApiCache, PartsMergeAsMlaCacheOpsMergesThem) {
  const std::vector<std::uint16_t> a = numbers(3 * 2 * 128, 7919), b = numbers(3 * 2 * 128, 6007);
  const std::vector<float> a_lse = {1, 2, 3, 4, 5, 6}, b_lse = {2, 2, -INFINITY, 1, INFINITY, 6};
  std::vector<std::uint16_t> o(a.size()), expected(a.size());
  std::vector<float> lse(6), expected_lse(6);
  hypermla_merge_arguments with;
  hypermla_merge_arguments_init(&with, sizeof with);
  EXPECT_EQ(with.width, 512);
  with.a_o = a.data(), with.b_o = b.data(), with.o = o.data();
  with.a_o_token_stride = with.b_o_token_stride = with.o_token_stride = 2 * 128;
  with.a_o_head_stride = with.b_o_head_stride = with.o_head_stride = 128;
  with.a_lse = a_lse.data(), with.b_lse = b_lse.data(), with.lse = lse.data();
  with.a_lse_token_stride = with.b_lse_token_stride = with.lse_token_stride = 2;
  with.a_lse_head_stride = with.b_lse_head_stride = with.lse_head_stride = 1;
  with.tokens = 3;
  with.heads = 2;
  with.width = 128;
  with.lse_base2 = 1;
  ASSERT_EQ(hypermla_merge_states(ops_, &with, nullptr), HYPERMLA_OK) << hypermla_last_error();
  same_.merge_states({.a = {{a.data(), 256, 128}, {a_lse.data(), 2, 1}},
                      .b = {{b.data(), 256, 128}, {b_lse.data(), 2, 1}},
                      .o = {expected.data(), 256, 128},
                      .lse = {expected_lse.data(), 2, 1},
                      .tokens = 3,
                      .heads = 2,
                      .width = 128,
                      .lse_base2 = true});
  EXPECT_EQ(o, expected);
  EXPECT_EQ(lse, expected_lse);
  EXPECT_EQ(lse[1], 3) << "twice 2^2";
  with.width = 4;
  EXPECT_TRUE(contains(refusal(hypermla_merge_states(ops_, &with, nullptr)), "width=4"));
  with.lse_base2 = 2;
  EXPECT_TRUE(contains(refusal(hypermla_merge_states(ops_, &with, nullptr)), "lse_base2=2"));
  with.lse_base2 = 1;
  with.empty_lse_positive = 2;
  EXPECT_TRUE(contains(refusal(hypermla_merge_states(ops_, &with, nullptr)), "empty_lse_positive=2"));
}

TEST_F(CApiCache, APrefixIsDecompressedAsByMlaCacheOps) {
  const std::vector<std::uint16_t> cache = numbers(2 * 16 * 576, 7919), weights = numbers(2 * 256 * 512, 6007);
  const std::vector<int> table = {1, 0};
  std::vector<std::uint16_t> k(20 * 2 * 192, 7), v(20 * 2 * 128), expected_k = k, expected_v = v;
  hypermla_decompress_arguments with;
  hypermla_decompress_arguments_init(&with, sizeof with);
  ASSERT_EQ(hypermla_decompress_arguments_fused(&with, cache.data(), 2, 16), HYPERMLA_OK);
  with.block_table = table.data();
  with.tokens = 20;
  with.heads = 2;
  with.w_uk = weights.data();  // of [heads, 256, 512]: the first 128 rows, and the last ones transposed
  with.w_uk_head_stride = with.w_uv_head_stride = 256 * 512;
  with.w_uk_row_stride = with.w_uv_column_stride = 512;
  with.w_uk_column_stride = with.w_uv_row_stride = 1;
  with.w_uv = &weights[128 * 512];
  with.k = k.data(), with.k_rope = &k[128], with.v = v.data();
  with.k_token_stride = with.k_rope_token_stride = 2 * 192;
  with.k_head_stride = with.k_rope_head_stride = 192;
  with.v_token_stride = 2 * 128;
  with.v_head_stride = 128;
  ASSERT_EQ(hypermla_decompress_prefix(ops_, &with, nullptr), HYPERMLA_OK) << hypermla_last_error();
  same_.decompress_prefix({.cache = MlaCache::fused(const_cast<std::uint16_t*>(cache.data()), 2, 16),
                           .block_table = table.data(),
                           .tokens = 20,
                           .heads = 2,
                           .w_uk = {weights.data(), 256 * 512, 512, 1},
                           .w_uv = {&weights[128 * 512], 256 * 512, 1, 512},
                           .k = {expected_k.data(), 2 * 192, 192},
                           .k_rope = {&expected_k[128], 2 * 192, 192},
                           .v = {expected_v.data(), 2 * 128, 128}});
  EXPECT_EQ(k, expected_k);
  EXPECT_EQ(v, expected_v);
  EXPECT_EQ(k[191], cache[16 * 576 + 575]) << "the RoPE key of page 1's first token";
  with.tokens = std::int64_t{1} << 40;
  EXPECT_TRUE(contains(refusal(hypermla_decompress_prefix(ops_, &with, nullptr)), "tokens=1099511627776"));
}

TEST_F(CApiCache, AStepIsSplitAsByMlaCacheOps) {
  const std::vector<int> table = {3, 4, 7, 5, 4, 0}, lengths = {40, 20}, starts = {0, 1, 3}, pages = {3, 4};
  const std::vector<std::int64_t> slots = {7 * 16 + 7, 4 * 16 + 3};
  const std::vector<unsigned> owners = {0, 0, 0, 1, 1, 0, 0, 0};
  for (const std::int64_t tokens : {1, 2}) {  // the second slot is the prefix's
    std::vector<unsigned> found(2);
    std::vector<int> own_table(6), own(2), query_starts(2), token_starts(2), rows(3);
    alignas(16) MlaCacheOps::Prefix same_prefix = {2, 64, 1, 1};
    auto same_found = found;
    auto same_table = own_table, same_own = own, same_queries = query_starts, same_tokens = token_starts,
         same_rows = rows;
    hypermla_split_arguments with;
    hypermla_split_arguments_init(&with, sizeof with);
    EXPECT_EQ(with.page, 64);
    alignas(16) hypermla_prefix aligned = {2, 64, 1, 1};
    with.block_table = table.data(), with.table_stride = with.width = with.own_table_stride = 3;
    with.lengths = lengths.data(), with.query_starts = starts.data(), with.requests = 2;
    with.slots = slots.data(), with.tokens = tokens, with.page = 16;
    with.prefixes = &aligned, with.prefix_pages = pages.data(), with.prefix_pages_stride = 2, with.count = 1;
    with.owners = owners.data(), with.cache_pages = 8, with.found = found.data();
    with.own_table = own_table.data(), with.own_lengths = own.data(), with.query_rows = rows.data();
    with.shared_query_starts = query_starts.data(), with.shared_token_starts = token_starts.data();
    ASSERT_EQ(hypermla_split_prefixes(ops_, &with, nullptr), HYPERMLA_OK) << hypermla_last_error();
    same_.split_prefixes({.block_table = table.data(),
                          .table_stride = 3,
                          .width = 3,
                          .lengths = lengths.data(),
                          .query_starts = starts.data(),
                          .requests = 2,
                          .slots = slots.data(),
                          .tokens = int(tokens),
                          .page = 16,
                          .prefixes = &same_prefix,
                          .prefix_pages = pages.data(),
                          .prefix_pages_stride = 2,
                          .count = 1,
                          .owners = owners.data(),
                          .cache_pages = 8,
                          .found = same_found.data(),
                          .own_table = same_table.data(),
                          .own_table_stride = 3,
                          .own_lengths = same_own.data(),
                          .shared_query_starts = same_queries.data(),
                          .shared_token_starts = same_tokens.data(),
                          .query_rows = same_rows.data()});
    EXPECT_EQ(own, same_own);
    EXPECT_EQ(own_table, same_table);
    EXPECT_EQ(query_starts, same_queries);
    EXPECT_EQ(token_starts, same_tokens);
    EXPECT_EQ(rows, same_rows);
    EXPECT_EQ(aligned.valid, tokens < 2);
    EXPECT_EQ(own[0], tokens < 2 ? 8 : 40);
    with.count = 17;
    EXPECT_TRUE(contains(refusal(hypermla_split_prefixes(ops_, &with, nullptr)), "count=17"));
  }
}

class CApiOnHopper : public testing_support::OnHopper {};

TEST_F(CApiOnHopper, WorkspaceAndStreamAreTheCallers) {
  hypermla_decode_options options = small_options();
  options.heads = 16;
  std::size_t bytes = 0;
  ASSERT_EQ(hypermla_decode_workspace_bytes(&options, "cuda", &bytes), HYPERMLA_OK) << hypermla_last_error();
  const Buffer workspace(device_, bytes), q(device_, 3 * 16 * 576 * 2), cache(device_, 3 * 16 * 576 * 2),
      o(device_, 3 * 16 * 512 * 2), lse(device_, 3 * 16 * 4);
  const Buffer ints = copy_of(std::vector<int>{20, 3, /* query starts */ 0, 2, 3, /* pages */ 2, 0, 1, -1});
  device_->fill(q.data(), 0x3c, q.bytes());
  device_->fill(cache.data(), 0x3c, cache.bytes());
  device_->fill(workspace.data(), 0xff, bytes);
  const auto* lengths = static_cast<const int*>(ints.data());

  hypermla_decode* decode = nullptr;
  ASSERT_EQ(hypermla_decode_create(&options, "cuda", workspace.data(), &decode), HYPERMLA_OK) << hypermla_last_error();
  hypermla_decode_tensors tensors;
  hypermla_decode_tensors_init(&tensors, sizeof tensors);
  ASSERT_EQ(hypermla_decode_tensors_fused(&tensors, 16, 16, q.data(), 3, cache.data(), 3, o.data(),
                                          static_cast<float*>(lse.data())),
            HYPERMLA_OK);
  tensors.block_table = lengths + 5;
  tensors.table_stride = 2;
  // Only a stream that reaches the calls can be captured.
  const auto recording = device_->record([&](StreamHandle stream) {
    EXPECT_EQ(hypermla_decode_plan(decode, lengths, lengths + 2, 2, stream), HYPERMLA_OK) << hypermla_last_error();
    EXPECT_EQ(hypermla_decode_run(decode, &tensors, stream), HYPERMLA_OK) << hypermla_last_error();
  });
  recording->replay(device_->stream());
  EXPECT_EQ(hypermla_decode_check(decode), HYPERMLA_OK) << hypermla_last_error();
  const auto sums = back<float>(lse);
  // All scores are the same: a query of the first request sees 19 or 20 tokens, the second's 3.
  EXPECT_NEAR(sums[16] - sums[0], std::log(20.0 / 19), 1e-4);
  EXPECT_NEAR(sums[16] - sums[32], std::log(20.0 / 3), 1e-4);
  const auto left = back<unsigned char>(workspace);
  EXPECT_TRUE(std::any_of(left.begin(), left.end(), [](unsigned char byte) { return byte != 0xff; }));
  hypermla_decode_destroy(decode);
}

}  // namespace
}  // namespace hypermla::c_api_test
