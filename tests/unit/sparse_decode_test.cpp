// MlaDecode where tokens are gathered: sparse, by lists of chosen tokens, some of which are none, in every format of
// the cache, with attention sinks; and dense over caches in FP8. On the CPU and on a Hopper GPU against double
// precision, and the kernels without spills.
#include <gtest/gtest.h>

#include <set>

#include "hypermla/api/environment.h"
#include "hypermla/device/device.h"
#include "hypermla/mla_decode.h"
#include "hypermla/plan/cases.h"
#include "hypermla/plan/decode_cases.h"
#include "hypermla/plan/registry.h"
#include "support.h"

namespace hypermla::sparse_decode_test {
namespace {

using testing_support::contains;
using testing_support::error_of;

using enum MlaCacheFormat;

MlaDecodeOptions options_for(MlaCacheFormat format, int heads, int queries, int top_k) {
  return {.heads = heads,
          .max_requests = queries,
          .max_tokens = top_k,
          .page = 16,
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

DecodeStep step_on(const std::shared_ptr<Device>& device, MlaDecodeOptions options, std::vector<int> lengths,
                   bool with_sinks) {
  settle(options);
  return {{options, std::move(lengths), {}, with_sinks}, device, 1};
}
// A MlaDecode plans and runs a step on its device.
void run(MlaDecode& decode, DecodeStep& step) {
  step.poison();
  decode.plan(step.lengths(), step.query_starts(), step.requests());
  decode.run(step.tensors());
  decode.run(step.tensors());
  decode.check();
  const CheckResult result = step.compare(1);
  EXPECT_TRUE(result.passed) << to_text(result);
}

TEST(SparseDecode, TheReferenceTakesListsWithHoles) {
  for (const MlaCacheFormat format : {as_queries, fp8_656, fp8_576})
    for (const bool sparse : {true, false}) {
      SCOPED_TRACE(testing::Message() << int(format) << (sparse ? " sparse" : " dense"));
      const MlaDecodeOptions options = (sparse ? options_for : dense_options)(format, 3, 5, 150);
      DecodeStep step = step_on(make_cpu_device(), options, {150, 130, 0, 1, 64}, true);
      MlaDecode decode(options, DeviceHandle("cpu"));
      run(decode, step);
    }
}

TEST(SparseDecode, TheReferenceTakesQueriesInFp8) {
  MlaDecodeOptions options = dense_options(fp8_576, 3, 5, 150);
  options.fp8_queries = true;
  DecodeStep step = step_on(make_cpu_device(), options, {150, 130, 0, 1, 64}, true);
  MlaDecode decode(options, DeviceHandle("cpu"));
  run(decode, step);
  MlaDecodeTensors all = step.tensors();
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
  const MlaDecodeOptions options = options_for(as_queries, 2, 2, 70);
  DecodeStep step = step_on(make_cpu_device(), options, {70, 70}, false);
  EXPECT_EQ(step.lengths(), nullptr);
  MlaDecode decode(options, DeviceHandle("cpu"));
  run(decode, step);
}

TEST(SparseDecode, ARefusedPlanLeavesTheLastOne) {
  const MlaDecodeOptions options = options_for(as_queries, 2, 2, 70);
  DecodeStep step = step_on(make_cpu_device(), options, {70, 5}, false);
  MlaDecode decode(options, DeviceHandle("cpu"));
  decode.plan(step.lengths(), nullptr, 2);
  const int wrong[] = {70, 71};
  EXPECT_TRUE(contains(error_of([&] { decode.plan(wrong, nullptr, 2); }), "lengths[1] is 71"));
  decode.run(step.tensors());
  EXPECT_TRUE(step.compare(1).passed);
}

TEST(SparseDecode, WhatHasNoMeaningIsRefused) {
  const DeviceHandle on_cpu("cpu");
  const auto made = [&](auto change) {
    MlaDecodeOptions at = options_for(fp8_656, 2, 2, 64);
    change(at);
    return error_of([&] { MlaDecode(at, on_cpu); });
  };
  EXPECT_TRUE(contains(made([](auto& at) { at.max_queries = 2; }), "max_queries=2"));
  EXPECT_TRUE(contains(made([](auto& at) { at.dtype = DType::float16; }), "bfloat16"));
  const DecodeStep step = step_on(make_cpu_device(), options_for(fp8_656, 2, 2, 64), {64, 64}, false);
  MlaDecode decode(options_for(fp8_656, 2, 2, 64), on_cpu);
  decode.plan(step.lengths(), nullptr, 2);
  MlaDecodeTensors all = step.tensors();
  all.latent_page_stride *= 2;
  EXPECT_TRUE(contains(error_of([&] { decode.run(all); }), "pages must follow each other"));
  all.latent_token_stride = 576;
  EXPECT_TRUE(contains(error_of([&] { decode.run(all); }), "latent_token_stride=576"));

  const DecodeStep dense = step_on(make_cpu_device(), dense_options(fp8_576, 2, 2, 64), {64, 64}, false);
  MlaDecode of_dense(dense_options(fp8_576, 2, 2, 64), on_cpu);
  of_dense.plan(dense.lengths(), nullptr, 2);
  all = dense.tensors();
  const float* const cache_scale = all.cache_scale;
  all.cache_scale = nullptr;
  EXPECT_TRUE(contains(error_of([&] { of_dense.run(all); }), "cache_scale is missing"));
  all.cache_scale = cache_scale;
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
      EXPECT_EQ(takes("cute.mla.flash_mla_v4", options), sparse || format != as_queries);
    }
  MlaDecodeOptions options = dense_options(fp8_576, 16, 4, 2048);
  options.fp8_queries = true;
  EXPECT_FALSE(takes("cute.mla.flash_mla", options));
  EXPECT_FALSE(takes("cute.mla.flash_mla_v1", options));
  EXPECT_FALSE(takes("cute.mla.flash_mla_v3", options));
  EXPECT_FALSE(takes("cute.mla.flash_mla_v4", options));
  EXPECT_TRUE(takes("cute.mla.flash_mla_v2", options));
  options.page = 1;
  EXPECT_FALSE(takes("cute.mla.flash_mla_v2", options));
  EXPECT_FALSE(takes("cute.mla.flash_mla_v2", dense_options(fp8_576, 16, 4, 2048)));
}

TEST(SparseDecode, FewRowsAreTakenSixteenAtATime) {
  const DeviceSpec h200 = DeviceTable::load(testing_support::checkout() / "conf/devices.json").find("NVIDIA H200");
  const auto fastest = [&](MlaCacheFormat format, int heads, int queries, bool sparse = true) {
    MlaDecodeOptions options = (sparse ? options_for : dense_options)(format, heads, queries, 2048);
    settle(options);
    std::pair<double, std::string> best = {INFINITY, ""};
    for (const char* name : {"cute.mla.flash_mla", "cute.mla.flash_mla_v3", "cute.mla.flash_mla_v4"}) {
      const std::unique_ptr<KernelPlan> plan = Registry::instance().find(name).make();
      DeviceInfo info;
      info.arch = "sm_90";
      info.processors = 132;
      plan->target = Target::of(info);
      if (const std::unique_ptr<DecodeKernels> kernels = plan->decode(options))
        best = std::min(best, {kernels->seconds(h200), name});
    }
    return best.second;
  };
  for (const int queries : {1, 8, 32, 128, 256}) {
    EXPECT_EQ(fastest(fp8_656, 16, queries), "cute.mla.flash_mla_v4") << queries;
    EXPECT_EQ(fastest(as_queries, 16, queries), "cute.mla.flash_mla_v4") << queries;
    EXPECT_EQ(fastest(fp8_576, 8, queries, false), "cute.mla.flash_mla_v4") << queries;
  }
  for (const int heads : {64, 128}) {
    EXPECT_EQ(fastest(fp8_656, heads, 1), "cute.mla.flash_mla_v4") << heads;
    EXPECT_EQ(fastest(fp8_656, heads, 32), "cute.mla.flash_mla_v3") << heads;
    EXPECT_EQ(fastest(as_queries, heads, 8), "cute.mla.flash_mla") << heads;
    EXPECT_EQ(fastest(as_queries, heads, 128), "cute.mla.flash_mla") << heads;
  }
}

// Lists of 0 to 1000 tokens.
void check_on_gpu(const std::shared_ptr<Device>& device, const MlaDecodeOptions& options, bool with_sinks) {
  SCOPED_TRACE(testing::Message() << int(options.cache_format) << (options.sparse ? " sparse " : " dense ")
                                  << options.heads << " heads, sinks " << with_sinks);
  DecodeStep step = step_on(device, options, {1000, 999, 0, 1, 64, 130, 300, 1000, 65}, with_sinks);
  MlaDecode decode(options, DeviceHandle("cuda"));
  run(decode, step);
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
