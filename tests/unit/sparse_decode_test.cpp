// MlaDecode where tokens are gathered: sparse, by lists of chosen tokens, some of which are none, in every format of the
// cache, with attention sinks; and dense over caches in FP8. On the CPU and on a Hopper GPU against double precision,
// and the kernels without spills.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>

#include "hypermla/api/environment.h"
#include "hypermla/base/half.h"
#include "hypermla/device/device.h"
#include "hypermla/mla_decode.h"
#include "hypermla/plan/cases.h"
#include "hypermla/plan/decode.h"
#include "hypermla/plan/reference.h"
#include "hypermla/plan/registry.h"
#include "support.h"

namespace hypermla::sparse_decode_test {
namespace {

using testing_support::contains;
using testing_support::error_of;

constexpr int kLatent = 512, kRope = 64, kWidth = kLatent + kRope, kPage = 16;
using enum MlaCacheFormat;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

MlaDecodeOptions options_for(MlaCacheFormat format, int heads, int queries, int top_k) {
  return {.heads = heads,
          .max_requests = queries,
          .max_tokens = top_k,
          .page = kPage,
          .sparse = true,
          .cache_format = format,
          .empty_lse_positive = format == fp8_656};
}
MlaDecodeOptions dense_options(MlaCacheFormat format, int heads, int requests, int tokens) {
  MlaDecodeOptions at = options_for(format, heads, requests, tokens);
  at.sparse = false;
  at.causal = false;
  return at;
}

// The queries of a step. Slots that no list names are NaN, and so are outputs before a run. Of dense attention a list is
// what the pages of a request say, and there is one page between two of the cache.
struct Step {
  Step(const MlaDecodeOptions& options, std::vector<int> of_lists, bool with_sinks)
      : at(options), lengths(std::move(of_lists)) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const int queries = int(lengths.size()), width = at.max_tokens + 1;
    pages = at.sparse ? at.max_tokens / kPage + 3 : queries * (at.max_tokens / kPage + 1);
    const int slots = pages * kPage;
    const std::size_t bytes_of_token = fp8 ? fp8 : 2 * kWidth;
    std::vector<bool> named(slots);
    lists.assign(std::size_t(queries) * width, 5);  // behind the end: a slot that may be NaN
    std::vector<int> free;                          // pages
    for (int page = 0; !at.sparse && page < pages; ++page) free.push_back(page);
    std::shuffle(free.begin(), free.end(), random);
    tables.assign(std::size_t(queries) * width, -1);  // behind the end: no page
    for (int q = 0; q < queries; ++q)
      for (int i = 0; i < lengths[q]; ++i) {
        if (!at.sparse) {
          int& page = tables[std::size_t(q) * width + i / kPage];
          if (i % kPage == 0) page = free[std::size_t(q) * (at.max_tokens / kPage + 1) + i / kPage];
          lists[std::size_t(q) * width + i] = page * kPage + i % kPage;
          named[page * kPage + i % kPage] = true;
          continue;
        }
        int& slot = lists[std::size_t(q) * width + i];
        slot = int(random() % (slots - 8)) + 8;
        const bool block_without_tokens = q % 2 && i / 64 == 1;
        if (block_without_tokens || random() % 7 == 0) slot = random() % 2 ? -1 : slots + int(random() % 9);
        if (slot >= 0 && slot < slots) named[slot] = true;
      }
    tokens.resize(std::size_t(slots) * kWidth);
    cache.assign(between() * slots * bytes_of_token, 0xff);  // NaN in every type
    for (int slot = 0; slot < slots; ++slot) {
      if (!named[slot]) continue;
      float* const token = &tokens[std::size_t(slot) * kWidth];
      const std::size_t place = std::size_t(slot) + (between() - 1) * (slot / kPage) * kPage;
      unsigned char* const bytes = &cache[place * bytes_of_token];
      const auto store = [&](int c, std::size_t at_byte, float value) {
        const std::uint16_t bits = from_float(value, DType::bfloat16);
        token[c] = to_float(bits, DType::bfloat16);
        std::memcpy(bytes + at_byte, &bits, 2);
      };
      for (int c = 0; c < kWidth; ++c) {
        if (fp8 == 576) {
          bytes[c] = static_cast<unsigned char>(random() % 0x7f | (random() & 0x80));
          token[c] = e4m3_to_float(bytes[c]) * cache_scale;
          continue;
        }
        if (!fp8 || c >= kLatent) {
          store(c, fp8 ? std::size_t(528 + 2 * (c - kLatent)) : 2 * std::size_t(c), normal(random));
          continue;
        }
        const float factor = 0.003f * float(1 + c / 128);
        std::memcpy(bytes + kLatent + c / 128 * 4, &factor, 4);
        bytes[c] = static_cast<unsigned char>(random() % 0x7f | (random() & 0x80));  // any e4m3 but NaN
        token[c] = e4m3_to_float(bytes[c]) * factor;
      }
    }
    q.resize(std::size_t(queries) * at.heads * kWidth);
    for (std::uint16_t& one : q) one = from_float(normal(random), DType::bfloat16);
    if (at.fp8_queries)  // in the first half
      for (std::uint16_t& one : q)
        one = std::uint16_t(e4m3_from_float(normal(random) / q_scale) | e4m3_from_float(normal(random) / q_scale) << 8);
    o.assign(std::size_t(queries) * at.heads * kLatent, 0x7fc0);
    lse.assign(std::size_t(queries) * at.heads, std::nanf(""));
    for (int h = 0; with_sinks && h < at.heads; ++h) sinks.push_back(h == 0 ? kInfinity : normal(random) * 3);
  }

  MlaDecodeTensors tensors(const void* q, const void* cache, const void* lists, const void* sinks, void* o, void* lse,
                           const void* scale = nullptr, const void* tables = nullptr) const {
    MlaDecodeTensors all =
        MlaDecodeTensors::fused(at.heads, kPage, q, int(lengths.size()), cache, pages, static_cast<const int*>(lists),
                                at.max_tokens + 1, o, static_cast<float*>(lse), at.cache_format, at.fp8_queries);
    if (!at.sparse) all.block_table = static_cast<const int*>(tables);
    if (fp8) all.latent_page_stride *= std::int64_t(between());
    all.cache_scale = static_cast<const float*>(scale);
    if (scale && at.fp8_queries) all.q_scale = all.cache_scale + 1;
    all.sinks = this->sinks.empty() ? nullptr : static_cast<const float*>(sinks);
    return all;
  }

  void check(const std::vector<std::uint16_t>& got_o, const std::vector<float>& got_lse) const {
    for (std::size_t query = 0; query < lengths.size(); ++query) {
      std::vector<float> keys, values;
      for (int i = 0; i < lengths[query]; ++i) {
        const int slot = lists[query * (at.max_tokens + 1) + i];
        if (slot < 0 || slot >= pages * kPage) continue;
        const float* token = &tokens[std::size_t(slot) * kWidth];
        keys.insert(keys.end(), token, token + kWidth);
        values.insert(values.end(), token, token + kLatent);
      }
      const int count = int(keys.size() / kWidth);
      for (int head = 0; head < at.heads; ++head) {
        const std::size_t row = query * at.heads + head;
        std::vector<float> of_row;
        for (int c = 0; c < kWidth; ++c) of_row.push_back(query_element(row * kWidth + c));
        const AttentionReference expected =
            attention_reference(of_row, keys, values, 1, count, kWidth, kLatent, 1 / std::sqrt(192.0), false);
        if (count == 0)
          EXPECT_EQ(got_lse[row], at.empty_lse_positive ? kInfinity : -kInfinity);
        else
          EXPECT_TRUE(std::abs(got_lse[row] - expected.lse[0]) <= 2e-3) << got_lse[row] << " " << expected.lse[0];
        const double by = sinks.empty() || count == 0 ? 1 : 1 / (1 + std::exp(double(sinks[head]) - expected.lse[0]));
        double worst = 0;
        for (int c = 0; c < kLatent; ++c) {
          const double difference = std::abs(to_float(got_o[row * kLatent + c], DType::bfloat16) - expected.o[c] * by);
          if (!(difference <= worst)) worst = difference;
        }
        EXPECT_TRUE(worst <= 0.03) << "query " << query << " head " << head << ": " << worst;
      }
    }
  }

  float query_element(std::size_t i) const {
    return at.fp8_queries ? e4m3_to_float(reinterpret_cast<const unsigned char*>(q.data())[i]) * q_scale
                          : to_float(q[i], DType::bfloat16);
  }

  // Tokens from a page to the next, by those of a page.
  std::size_t between() const { return at.sparse ? 1 : 2; }

  MlaDecodeOptions at;
  int fp8 = fp8_bytes(at.cache_format);
  float cache_scale = 0.004f, q_scale = 0.01f;  // one after the other, as tensors() takes them
  std::vector<int> lengths, lists, tables;      // lists: slots; tables: pages
  int pages = 0;
  std::vector<float> tokens, sinks, lse;  // tokens: as the kernels see them
  std::vector<unsigned char> cache;
  std::vector<std::uint16_t> q, o;
};

TEST(SparseDecode, TheReferenceTakesListsWithHoles) {
  for (const MlaCacheFormat format : {as_queries, fp8_656, fp8_576})
    for (const bool sparse : {true, false}) {
      if (!sparse && format == as_queries) continue;
      SCOPED_TRACE(testing::Message() << int(format) << (sparse ? " sparse" : " dense"));
      Step step((sparse ? options_for : dense_options)(format, 3, 5, 150), {150, 130, 0, 1, 64}, true);
      MlaDecode decode(step.at, DeviceHandle("cpu"));
      decode.plan(step.lengths.data(), nullptr, 5);
      decode.run(step.tensors(step.q.data(), step.cache.data(), step.lists.data(), step.sinks.data(), step.o.data(),
                              step.lse.data(), &step.cache_scale, step.tables.data()));
      step.check(step.o, step.lse);
    }
}

TEST(SparseDecode, TheReferenceTakesQueriesInFp8) {
  MlaDecodeOptions options = dense_options(fp8_576, 3, 5, 150);
  options.fp8_queries = true;
  Step step(options, {150, 130, 0, 1, 64}, true);
  MlaDecode decode(step.at, DeviceHandle("cpu"));
  decode.plan(step.lengths.data(), nullptr, 5);
  MlaDecodeTensors all = step.tensors(step.q.data(), step.cache.data(), nullptr, step.sinks.data(), step.o.data(),
                                      step.lse.data(), &step.cache_scale, step.tables.data());
  decode.run(all);
  step.check(step.o, step.lse);
  all.q_latent.head_stride += 8;
  EXPECT_TRUE(contains(error_of([&] { decode.run(all); }), "q_latent.head_stride=584"));
  all.q_latent.head_stride -= 8;
  all.q_scale = nullptr;
  EXPECT_TRUE(contains(error_of([&] { decode.run(all); }), "q_scale is missing"));
  for (const bool sparse : {false, true}) {
    options.cache_format = sparse ? fp8_576 : fp8_656;
    options.sparse = sparse;
    EXPECT_TRUE(contains(error_of([&] { MlaDecode(options, DeviceHandle("cpu")); }), "leave fp8_queries out"));
  }
}

TEST(SparseDecode, WithoutLengthsListsAreWhole) {
  Step step(options_for(as_queries, 2, 2, 70), {70, 70}, false);
  MlaDecode decode(step.at, DeviceHandle("cpu"));
  decode.plan(nullptr, nullptr, 2);
  decode.run(
      step.tensors(step.q.data(), step.cache.data(), step.lists.data(), nullptr, step.o.data(), step.lse.data()));
  step.check(step.o, step.lse);
}

TEST(SparseDecode, ARefusedPlanLeavesTheLastOne) {
  Step step(options_for(as_queries, 2, 2, 70), {70, 5}, false);
  MlaDecode decode(step.at, DeviceHandle("cpu"));
  decode.plan(step.lengths.data(), nullptr, 2);
  const int wrong[] = {70, 71};
  EXPECT_TRUE(contains(error_of([&] { decode.plan(wrong, nullptr, 2); }), "lengths[1] is 71"));
  decode.run(
      step.tensors(step.q.data(), step.cache.data(), step.lists.data(), nullptr, step.o.data(), step.lse.data()));
  step.check(step.o, step.lse);
}

TEST(SparseDecode, WhatHasNoMeaningIsRefused) {
  const DeviceHandle cpu("cpu");
  const auto made = [&](auto change) {
    MlaDecodeOptions at = options_for(fp8_656, 2, 2, 64);
    change(at);
    return error_of([&] { MlaDecode(at, cpu); });
  };
  EXPECT_TRUE(contains(made([](auto& at) { at.max_queries = 2; }), "max_queries=2"));
  EXPECT_TRUE(contains(made([](auto& at) { at.dtype = DType::float16; }), "bfloat16"));
  Step step(options_for(fp8_656, 2, 2, 64), {64, 64}, false);
  MlaDecode decode(step.at, cpu);
  decode.plan(step.lengths.data(), nullptr, 2);
  MlaDecodeTensors all =
      step.tensors(step.q.data(), step.cache.data(), step.lists.data(), nullptr, step.o.data(), step.lse.data());
  all.latent_page_stride *= 2;
  EXPECT_TRUE(contains(error_of([&] { decode.run(all); }), "pages must follow each other"));
  all.latent_token_stride = 576;
  EXPECT_TRUE(contains(error_of([&] { decode.run(all); }), "latent_token_stride=576"));

  Step dense(dense_options(fp8_576, 2, 2, 64), {64, 64}, false);
  MlaDecode of_dense(dense.at, cpu);
  of_dense.plan(dense.lengths.data(), nullptr, 2);
  all = dense.tensors(dense.q.data(), dense.cache.data(), nullptr, nullptr, dense.o.data(), dense.lse.data(), nullptr,
                      dense.tables.data());
  EXPECT_TRUE(contains(error_of([&] { of_dense.run(all); }), "cache_scale is missing"));
  all.cache_scale = &dense.cache_scale;
  all.latent_page_stride += 16;
  EXPECT_TRUE(contains(error_of([&] { of_dense.run(all); }), "latent_page_stride="));
}

TEST(SparseDecode, KernelsCompileWithoutSpills) {
  const CompilerConfig config = Environment::detect().compiler_config();
  if (config.toolchain.cuda_root.empty()) GTEST_SKIP() << "there is no CUDA compiler";
  Compiler compiler(config);
  DeviceInfo h200;
  h200.arch = "sm_90";
  h200.processors = 132;
  for (const MlaCacheFormat format : {as_queries, fp8_656, fp8_576})
    for (const int heads : {16, 128, 640}) {
      if (format == fp8_576 && heads != 128) continue;  // which differs from 656 in the gather alone
      const char* const version = format == as_queries ? "v0" : "v3";
      const std::unique_ptr<KernelPlan> plan =
          Registry::instance().find("cute.mla.flash_mla", version, "sm_90", "cute").make();
      plan->target = Target::of(h200);
      MlaDecodeOptions options = options_for(format, heads, 4, 2048);
      settle(options);
      const std::unique_ptr<DecodeKernels> kernels = plan->decode(options);
      ASSERT_TRUE(kernels);
      for (const KernelSource& source : kernels->sources())
        EXPECT_EQ(compiler.compile(source, "sm_90").report.at("frame_bytes"), 0) << source.instance;
    }
}

TEST(SparseDecode, KernelsOfE4m3CompileWithoutSpills) {
  const CompilerConfig config = Environment::detect().compiler_config();
  if (config.toolchain.cuda_root.empty()) GTEST_SKIP() << "there is no CUDA compiler";
  Compiler compiler(config);
  const std::unique_ptr<KernelPlan> plan =
      Registry::instance().find("cute.mla.flash_mla", "v2", "sm_90", "cute").make();
  EXPECT_TRUE(contains(error_of([&] { plan->validate(); }), "only MlaDecode has"));
  std::set<std::string> attention;
  for (const KernelSource& source : decode_sources(*plan)) {
    if (source.name == "flash_mla_v2") attention.insert(source.instance);
    // Pages of 16 with shards and of 64 without: the others differ by constants.
    if (!contains(source.instance, contains(source.instance, ".shards = true") ? ".page = 16," : ".page = 64,"))
      continue;
    EXPECT_EQ(compiler.compile(source, "sm_90").report.at("frame_bytes"), 0) << source.instance;
  }
  EXPECT_EQ(attention.size(), 2u * 2 * 4);  // tilings, shards, pages
}

TEST(SparseDecode, AKernelTakesWhatItCan) {
  const auto takes = [](const char* name, MlaDecodeOptions options) {
    const std::unique_ptr<KernelPlan> plan = Registry::instance().find(name).make();
    DeviceInfo h200;
    h200.arch = "sm_90";
    h200.processors = 132;
    plan->target = Target::of(h200);
    settle(options);
    return plan->decode(options) != nullptr;
  };
  for (const MlaCacheFormat format : {as_queries, fp8_656, fp8_576})
    for (const bool sparse : {true, false}) {
      const MlaDecodeOptions options = (sparse ? options_for : dense_options)(format, 16, 4, 2048);
      EXPECT_EQ(takes("cute.mla.flash_mla", options), format == as_queries);
      EXPECT_EQ(takes("cute.mla.flash_mla_v1", options), !sparse && format == as_queries);
      EXPECT_EQ(takes("cute.mla.flash_mla_v3", options), format != as_queries);
      MlaDecodeOptions named = options;
      named.kernel = "cute.mla.flash_mla";
      EXPECT_TRUE(takes("cute.mla.flash_mla", named));
    }
  MlaDecodeOptions options = dense_options(fp8_576, 16, 4, 2048);
  options.fp8_queries = true;
  EXPECT_FALSE(takes("cute.mla.flash_mla", options));
  EXPECT_FALSE(takes("cute.mla.flash_mla_v1", options));
  EXPECT_FALSE(takes("cute.mla.flash_mla_v3", options));
  EXPECT_TRUE(takes("cute.mla.flash_mla_v2", options));
  options.page = 1;
  EXPECT_FALSE(takes("cute.mla.flash_mla_v2", options));
  EXPECT_FALSE(takes("cute.mla.flash_mla_v2", dense_options(fp8_576, 16, 4, 2048)));
}

// Lists of 0 to 1000 tokens on the GPU, in memory of their own.
void check_on_gpu(const std::shared_ptr<Device>& device, const MlaDecodeOptions& options, bool with_sinks) {
  const auto copy_of = [&](const auto& values) {
    Buffer buffer(device, values.size() * sizeof values[0] + 1);
    device->copy_to_device(buffer.data(), values.data(), values.size() * sizeof values[0]);
    return buffer;
  };
  SCOPED_TRACE(testing::Message() << int(options.cache_format) << (options.sparse ? " sparse " : " dense ")
                                  << options.heads << " heads, sinks " << with_sinks);
  Step step(options, {1000, 999, 0, 1, 64, 130, 300, 1000, 65}, with_sinks);
  MlaDecode decode(step.at, DeviceHandle("cuda"));
  const Buffer q = copy_of(step.q), cache = copy_of(step.cache), lists = copy_of(step.lists),
               sinks = copy_of(step.sinks), o = copy_of(step.o), lse = copy_of(step.lse),
               lengths = copy_of(step.lengths), tables = copy_of(step.tables),
               scale = copy_of(std::vector<float>{step.cache_scale, step.q_scale});
  const MlaDecodeTensors all = step.tensors(q.data(), cache.data(), lists.data(), sinks.data(), o.data(), lse.data(),
                                            scale.data(), tables.data());
  decode.plan(static_cast<const int*>(lengths.data()), nullptr, 9);
  decode.run(all);
  decode.run(all);
  decode.check();
  device->copy_to_host(step.o.data(), o.data(), step.o.size() * 2);
  device->copy_to_host(step.lse.data(), lse.data(), step.lse.size() * 4);
  step.check(step.o, step.lse);
}

TEST(SparseDecode, AGpuDoesTheSame) {
  if (const auto why = cuda_unavailable()) GTEST_SKIP() << *why;
  const std::shared_ptr<Device> device = make_cuda_device();
  if (device->info().arch != "sm_90") GTEST_SKIP() << "this GPU is " << device->info().arch;
  for (const MlaCacheFormat format : {as_queries, fp8_656, fp8_576})
    for (const bool sparse : {true, false})
      for (const int heads : {3, 16, 128})
        for (const bool with_sinks : {false, true})
          if (sparse || format != as_queries)
            check_on_gpu(device, (sparse ? options_for : dense_options)(format, heads, 9, 1000), with_sinks);
}

TEST(SparseDecode, AGpuMultipliesE4m3) {
  if (const auto why = cuda_unavailable()) GTEST_SKIP() << *why;
  const std::shared_ptr<Device> device = make_cuda_device();
  if (device->info().arch != "sm_90") GTEST_SKIP() << "this GPU is " << device->info().arch;
  for (const int heads : {3, 16, 128})
    for (const bool with_sinks : {false, true}) {
      MlaDecodeOptions options = dense_options(fp8_576, heads, 9, 1000);
      options.fp8_queries = true;
      options.kernel = "cute.mla.flash_mla_v2";
      check_on_gpu(device, options, with_sinks);
      options.kernel = "";
      EXPECT_TRUE(contains(error_of([&] { MlaDecode(options, DeviceHandle("cuda")); }),
                           "pin it by kernel=cute.mla.flash_mla_v2"));
    }
}

}  // namespace
}  // namespace hypermla::sparse_decode_test
