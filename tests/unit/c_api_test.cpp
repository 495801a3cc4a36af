// The C interface: what it computes is what MlaDecode computes, structs may be older or newer than the library, and what
// is wrong gives a status and a sentence.
#include "hypermla/c_api.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <thread>

#include "hypermla/device/device.h"
#include "hypermla/mla_decode.h"
#include "support.h"

namespace hypermla {
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

  // The sentence of a call that must have failed so.
  static std::string refusal(hypermla_status status) {
    EXPECT_EQ(status, HYPERMLA_ERROR);
    return hypermla_last_error();
  }

  std::vector<int> lengths_ = {20, 3}, starts_ = {0, 2, 3}, table_ = {2, 0, 1, -1};
  std::vector<std::uint16_t> q_ = std::vector<std::uint16_t>(3 * 2 * 576, 0x3f80);
  std::vector<std::uint16_t> cache_ = std::vector<std::uint16_t>(3 * 16 * 576, 0x3c00);
  std::vector<std::uint16_t> o_ = std::vector<std::uint16_t>(3 * 2 * 512);
  std::vector<float> lse_ = std::vector<float>(3 * 2);
  hypermla_decode* decode_ = nullptr;
  hypermla_decode_tensors tensors_;
};

TEST_F(CApi, ItGivesTheBitsOfMlaDecode) {
  for (std::size_t i = 0; i < q_.size(); ++i) q_[i] = std::uint16_t(0x3c00 + i * 7919 % 1024);
  for (std::size_t i = 0; i < cache_.size(); ++i) cache_[i] = std::uint16_t(0x3c00 + i * 6007 % 1024);
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

TEST(CApiOnAGpu, WorkspaceAndStreamAreTheCallers) {
  if (const auto why = cuda_unavailable()) GTEST_SKIP() << *why;
  const auto device = make_cuda_device();
  if (device->info().arch != "sm_90") GTEST_SKIP() << "this GPU is " << device->info().arch;
  hypermla_decode_options options = small_options();
  options.heads = 16;
  std::size_t bytes = 0;
  ASSERT_EQ(hypermla_decode_workspace_bytes(&options, "cuda", &bytes), HYPERMLA_OK) << hypermla_last_error();
  const Buffer workspace(device, bytes), ints(device, 4096), q(device, 3 * 16 * 576 * 2),
      cache(device, 3 * 16 * 576 * 2), o(device, 3 * 16 * 512 * 2), lse(device, 3 * 16 * 4);
  const int host[] = {20, 3, /* query starts */ 0, 2, 3, /* pages */ 2, 0, 1, -1};
  device->copy_to_device(ints.data(), host, sizeof host);
  device->fill(q.data(), 0x3c, q.bytes());
  device->fill(cache.data(), 0x3c, cache.bytes());
  device->fill(workspace.data(), 0xff, bytes);
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
  const auto recording = device->record([&](StreamHandle stream) {
    EXPECT_EQ(hypermla_decode_plan(decode, lengths, lengths + 2, 2, stream), HYPERMLA_OK) << hypermla_last_error();
    EXPECT_EQ(hypermla_decode_run(decode, &tensors, stream), HYPERMLA_OK) << hypermla_last_error();
  });
  recording->replay(device->stream());
  EXPECT_EQ(hypermla_decode_check(decode), HYPERMLA_OK) << hypermla_last_error();
  std::vector<float> sums(3 * 16);
  device->copy_to_host(sums.data(), lse.data(), lse.bytes());
  // All scores are the same: a query of the first request sees 19 or 20 tokens, the second's 3.
  EXPECT_NEAR(sums[16] - sums[0], std::log(20.0 / 19), 1e-4);
  EXPECT_NEAR(sums[16] - sums[32], std::log(20.0 / 3), 1e-4);
  std::vector<unsigned char> left(bytes);
  device->copy_to_host(left.data(), workspace.data(), bytes);
  EXPECT_TRUE(std::any_of(left.begin(), left.end(), [](unsigned char byte) { return byte != 0xff; }));
  hypermla_decode_destroy(decode);
}

}  // namespace
}  // namespace hypermla
