// MlaDecode where tokens are gathered: sparse, by lists of chosen tokens, some of which are none, in every format of
// the cache, with attention sinks; and dense over caches in FP8. On the CPU and on a Hopper GPU against double
// precision, and the kernels without spills.
#include <gtest/gtest.h>

#include <array>
#include <set>

#include "hypermla/api/environment.h"
#include "hypermla/device/device.h"
#include "hypermla/mla_decode.h"
#include "hypermla/plan/cases.h"
#include "hypermla/plan/choice.h"
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

// As engines ask for lists, by the plug-ins.
TEST(SparseDecode, WhatIsCompiledAheadIsWhatRuns) {
  for (const char* version : {"v0", "v3", "v4"}) {
    const std::unique_ptr<KernelPlan> plan =
        Registry::instance().find("cute.mla.flash_mla", version, "sm_90", "cute").make();
    plan->target = Target::of_arch("sm_90");
    std::set<std::string> ahead;
    for (const KernelSource& source : decode_sources(*plan)) ahead.insert(source.instance);
    int asked = 0;
    for (const int heads : {1, 8, 12, 16, 24, 32, 64, 96, 128})
      for (int requests = 1; requests <= 2048; requests *= 2)
        for (const int page : {1, 64})
          for (const MlaCacheFormat format : {as_queries, fp8_656}) {
            MlaDecodeOptions options = options_for(format, heads, requests, 2048);
            options.page = page;
            settle(options);
            const std::unique_ptr<DecodeKernels> decode = plan->decode(options);
            if (!decode) continue;
            ++asked;
            for (const KernelSource& source : decode->sources())
              EXPECT_TRUE(ahead.count(source.instance)) << version << " " << heads << " " << source.instance;
          }
    EXPECT_GT(asked, 0) << version;
  }
}

TEST(SparseDecode, KernelsOfE4m3CompileWithoutSpills) {
  const CompilerConfig config = Environment::detect().compiler_config();
  if (config.toolchain.cuda_root.empty()) GTEST_SKIP() << "there is no CUDA compiler";
  Compiler compiler(config);
  const std::unique_ptr<KernelPlan> plan =
      Registry::instance().find("cute.mla.flash_mla", "v2", "sm_90", "cute").make();
  EXPECT_TRUE(contains(error_of([&] { plan->validate(); }), "add --fp8=656 or 576"));
  std::set<std::string> attention;
  for (const KernelSource& source : decode_sources(*plan)) {
    if (source.name == "flash_mla_v2") attention.insert(source.instance);
    // Pages of 16 with shards and of 64 without: the others differ by constants.
    if (!contains(source.instance, contains(source.instance, ".shards = true") ? ".page = 16," : ".page = 64,"))
      continue;
    EXPECT_EQ(compiler.compile(source, "sm_90").report.at("frame_bytes"), 0) << source.instance;
  }
  EXPECT_EQ(attention.size(), 5u * 3 * 4);  // tilings; causal, not causal, shards; pages
}

std::unique_ptr<KernelPlan> plan_of(const char* name, const Json& problem) {
  std::unique_ptr<KernelPlan> plan = Registry::instance().find(name).make();
  Json all = to_json(plan->problem_fields());
  all.update(problem);
  set_problem(*plan, all);
  plan->validate();
  return plan;
}
const std::pair<const char*, Json> kCommands[] = {
    {"flash_mla_v3", {{"b", 3}, {"s", 1}, {"t", 130}, {"h", 20}, {"fp8", 656}, {"page", 1}, {"pages", 900}}},
    {"flash_mla_v3",
     {{"b", 4}, {"s", 1}, {"t", 150}, {"h", 3}, {"fp8", 576}, {"page", 16}, {"ragged", true}, {"fused", true}}},
    {"flash_mla_v2", {{"b", 3}, {"s", 1}, {"t", 150}, {"h", 16}, {"fp8", 576}, {"page", 32}, {"fp8_queries", true}}},
    {"flash_mla_v2",
     {{"b", 3},
      {"s", 3},
      {"t", 90},
      {"h", 5},
      {"fp8", 576},
      {"page", 16},
      {"fp8_queries", true},
      {"fused", true},
      {"tokens_first", true},
      {"causal", true}}},
    {"flash_mla_v4", {{"b", 3}, {"s", 1}, {"t", 150}, {"h", 20}, {"fp8", 576}, {"page", 1}, {"fp8_queries", true}}},
    {"flash_mla_v4",
     {{"b", 3},
      {"s", 3},
      {"t", 90},
      {"h", 5},
      {"fp8", 576},
      {"page", 64},
      {"fp8_queries", true},
      {"fused", true},
      {"tokens_first", true},
      {"causal", true}}},
    {"flash_mla_v3",
     {{"b", 3}, {"s", 2}, {"t", 70}, {"h", 5}, {"fp8", 656}, {"page", 64}, {"causal", true}, {"tokens_first", true}}}};
std::unique_ptr<KernelPlan> plan_of(const std::pair<const char*, Json>& command) {
  return plan_of((std::string("cute.mla.") + command.first).c_str(), command.second);
}

// `hypermla kernel` with --fp8: its inputs are what an engine gives, and the kernel is the one that an engine runs.
TEST(SparseDecode, ACommandOverACacheInFp8ComputesWhatMlaDecodeDoes) {
  const std::shared_ptr<Device> device = make_cpu_device();
  for (const auto& command : kCommands) {
    const auto& [name, problem] = command;
    SCOPED_TRACE(problem.dump());
    const std::unique_ptr<KernelPlan> plan = plan_of(command);
    AllocatedTensors memory(*plan, device, 1);
    const Tensors& all = memory.tensors();
    const int heads = problem.at("h"), page = problem.at("page"), bytes = problem.at("fp8");
    const bool fused = problem.value("fused", false), fp8_queries = problem.value("fp8_queries", false);
    MlaDecodeOptions options = {.heads = heads,
                                .max_requests = problem.at("b"),
                                .max_queries = problem.at("s"),
                                .max_tokens = problem.at("t"),
                                .page = page,
                                .causal = problem.value("causal", false),
                                .sparse = page == 1 && !fp8_queries,
                                .cache_format = bytes == 656 ? fp8_656 : fp8_576,
                                .fp8_queries = fp8_queries};
    settle(options);
    MlaDecodeTensors with = MlaDecodeTensors::fused(
        heads, page, all.at(fused ? "q" : "qc").data, options.max_query_tokens, all.at("cache").data,
        all.at("cache").shape[0], static_cast<const int*>(all.at("block_table").data), all.at("block_table").shape[1],
        all.at("o").data, static_cast<float*>(all.at("lse").data), options.cache_format, fp8_queries);
    if (!fused)
      with.q_latent = {all.at("qc").data, heads * 512, 512}, with.q_rope = {all.at("qpe").data, heads * 64, 64};
    if (bytes == 576) with.cache_scale = static_cast<const float*>(all.at("cache_scale").data);
    if (fp8_queries) with.q_scale = static_cast<const float*>(all.at("q_scale").data);
    MlaDecode decode(options, DeviceHandle("cpu"));
    const std::vector<int> whole(options.max_requests, options.max_tokens);
    decode.plan(problem.value("ragged", false) ? static_cast<const int*>(all.at("lengths").data) : whole.data(),
                nullptr, options.max_requests);
    decode.run(with);
    const CheckResult result = check_outputs(*plan, memory, *device, 1);
    EXPECT_TRUE(result.passed) << to_text(result);

    const auto attention = [&, name = std::string(name)](const std::vector<KernelSource>& sources) {
      std::set<std::string> instances;
      for (const KernelSource& source : sources)
        if (source.name == name) instances.insert(source.instance);
      return instances;
    };
    EXPECT_EQ(attention(kernel_sources(*plan, false)), attention(plan->decode(options)->sources()));
  }
}

// One tile of as few rows as hold all of a request, which is compiled ahead. Where heads divide 64, or 64 divides them,
// queries may lie on two axes (takes_strides() in compat/_queries.py): heads divide the tile, or it divides them.
TEST(SparseDecode, QueriesInE4m3HaveTilesOfTheirRows) {
  const std::unique_ptr<KernelPlan> plan = Registry::instance().find("cute.mla.flash_mla_v2").make();
  plan->target = Target::of_arch("sm_90");
  std::set<std::string> ahead;
  for (const KernelSource& source : decode_sources(*plan)) EXPECT_TRUE(ahead.insert(source.instance).second);
  for (int heads = 1; heads <= 128; ++heads)
    for (int queries = 1; queries <= 16; ++queries) {
      SCOPED_TRACE(fmt::format("{} heads, {} queries", heads, queries));
      const int all = heads * queries, rows = all > 48 ? 64 : (all + 15) / 16 * 16;
      MlaDecodeOptions options = dense_options(fp8_576, heads, 4, 4096);
      options.max_queries = queries;
      options.fp8_queries = true;
      options.causal = heads % 2;
      options.shards = heads % 4 == 1 ? 2 : 1;
      settle(options);
      const std::unique_ptr<DecodeKernels> decode = plan->decode(options);
      EXPECT_TRUE(contains(decode->explain(), fmt::format("in tiles of {},", rows))) << decode->explain();
      for (const KernelSource& source : decode->sources()) EXPECT_TRUE(ahead.count(source.instance)) << source.instance;
      EXPECT_TRUE(heads % rows == 0 || rows % heads == 0 || (heads % 64 && 64 % heads));
    }
  const auto refused = [](int rows) {
    const std::unique_ptr<KernelPlan> plan = plan_of("cute.mla.flash_mla_v2", kCommands[2].second);  // of 16 rows
    plan->use_default_tiling();
    EXPECT_EQ(to_json(plan->tiling_fields()).at("rows"), 16);
    Json tiling = to_json(plan->tiling_fields());
    tiling["rows"] = rows;
    from_json(plan->tiling_fields(), tiling);
    return error_of([&] { plan->validate(); });
  };
  for (const int rows : {-16, 0, 1, 17, 80})
    EXPECT_TRUE(contains(refused(rows), fmt::format("--rows={} is not supported: choose 16 or 32 or 48 or 64", rows)));
  for (const int rows : {16, 48, 64}) EXPECT_EQ(refused(rows), "") << rows;
}

TEST(SparseDecode, ACommandOverACacheInFp8SaysWhatItNeeds) {
  const auto refused = [](const char* name, Json change) {
    Json problem = std::rbegin(kCommands)->second;
    problem.update(change);
    return error_of([&] { plan_of(name, problem); });
  };
  EXPECT_TRUE(contains(refused("cute.mla.flash_mla_v3", {{"fp8", 0}}), "add --fp8=656 or 576"));
  EXPECT_TRUE(contains(refused("cute.mla.flash_mla_v3", {{"fp8", 600}}), "choose 656 or 576"));
  EXPECT_TRUE(contains(refused("cute.mla.flash_mla_v3", {{"page", 0}}), "add --page=64"));
  EXPECT_TRUE(contains(refused("cute.mla.flash_mla_v3", {{"tokens_first", false}}), "add --tokens_first"));
  EXPECT_TRUE(contains(refused("cute.mla.flash_mla_v3", {{"dtype", "float16"}}), "choose bfloat16"));
  EXPECT_TRUE(contains(refused("cute.mla.flash_mla_v3", {{"after", 3}}), "--after=0"));
  for (const char* other : {"cute.mla.flash_mla", "cute.mla.flash_mla_v1"})
    EXPECT_TRUE(contains(refused(other, Json::object()), "--fp8=656 --page=64 is not supported by this version"));
  EXPECT_TRUE(contains(refused("cute.mla.flash_mla_v2", {{"fp8_queries", true}}), "add --fp8=576"));
  EXPECT_TRUE(contains(refused("cute.mla.flash_mla_v2", {{"fp8_queries", true}, {"fp8", 576}, {"page", 1}}),
                       "--fp8=576 --fp8_queries --page=1 is not supported by this version"));
  EXPECT_TRUE(contains(refused("cute.mla.flash_mla_v3", {{"fp8_queries", true}, {"fp8", 576}}), "--fp8_queries"));
}

// Where no version is named, and by `hypermla choose`, that one runs which takes the cache.
TEST(SparseDecode, ACacheInFp8ChoosesItsKernel) {
  const PlannedDevice h200{Target::of_arch("sm_90"),
                           DeviceTable::load(testing_support::checkout() / "conf/devices.json").find("NVIDIA H200")};
  const auto takes_fp8 = [](const KernelEntry& entry) { return entry.make()->only_decodes(); };
  for (const int page : {1, 64}) {
    const Json problem = {{"b", 128}, {"t", 2048}, {"fp8", 656}, {"page", page}};
    const std::vector<KernelEntry> versions = Registry::instance().find_all("flash_mla", "", "sm_90");
    EXPECT_TRUE(takes_fp8(configure(versions, h200, {.problem = problem}).entry));
    const std::vector<RankedKernel> ranking =
        rank_kernels(Registry::instance(), {.b = 128, .t = 2048, .page = page, .fp8 = 656}, h200);
    EXPECT_TRUE(std::all_of(ranking.begin(), ranking.end(), [&](const auto& one) { return takes_fp8(one.entry); }));
  }
  for (const int lists : {1, 2, 8, 128})
    for (const int heads : {8, 16, 64, 128}) {
      const ChoiceProblem of{.b = lists, .t = 2048, .h = heads, .page = 1};
      const bool few = heads <= 16 || (heads == 64 && lists == 1);  // as MlaDecode takes them; v1 never, which is slow
      if (heads == 64 && lists == 2) continue;                      // alike
      EXPECT_EQ(choice(rank_kernels(Registry::instance(), of, h200)).entry.full_name(),
                few ? "cute.mla.flash_mla_v4" : "cute.mla.flash_mla")
          << lists << " lists, " << heads << " heads";
    }
  const std::vector<RankedKernel> e4m3 =
      rank_kernels(Registry::instance(), {.page = 64, .fp8 = 576, .fp8_queries = true}, h200);
  EXPECT_TRUE(std::all_of(e4m3.begin(), e4m3.end(), [&](const auto& one) { return takes_fp8(one.entry); }));
  ChoiceProblem wrong{.page = 64, .fp8 = 656, .fp8_queries = true};
  EXPECT_TRUE(contains(error_of([&] { wrong.settle(); }), "add --fp8=576"));
  ChoiceProblem dense{.fp8 = 656};
  EXPECT_TRUE(contains(error_of([&] { dense.settle(); }), "add --page=64"));
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
  EXPECT_TRUE(takes("cute.mla.flash_mla_v4", options));
  EXPECT_TRUE(takes("cute.mla.flash_mla_v2", options));
  options.page = 1;
  EXPECT_FALSE(takes("cute.mla.flash_mla_v2", options));
  EXPECT_TRUE(takes("cute.mla.flash_mla_v4", options));
  EXPECT_FALSE(takes("cute.mla.flash_mla_v2", dense_options(fp8_576, 16, 4, 2048)));
}

TEST(SparseDecode, TheFastestIsTaken) {
  const DeviceTable devices = DeviceTable::load(testing_support::checkout() / "conf/devices.json");
  const auto fastest_for = [&](MlaDecodeOptions options, const char* device = "NVIDIA H200") {
    settle(options);
    std::pair<double, std::string> best = {INFINITY, ""};
    for (const char* name : {"cute.mla.flash_mla", "cute.mla.flash_mla_v1", "cute.mla.flash_mla_v2",
                             "cute.mla.flash_mla_v3", "cute.mla.flash_mla_v4"}) {
      const std::unique_ptr<KernelPlan> plan = Registry::instance().find(name).make();
      DeviceInfo info;
      info.arch = "sm_90";
      info.processors = 132;
      plan->target = Target::of(info);
      if (const std::unique_ptr<DecodeKernels> kernels = plan->decode(options))
        best = std::min(best, {usual_seconds(*kernels, devices.find(device), options), name});
    }
    return best.second;
  };
  const auto fastest = [&](MlaCacheFormat format, int heads, int queries, bool sparse = true) {
    return fastest_for((sparse ? options_for : dense_options)(format, heads, queries, 2048));
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
  // Shorter requests count as well.
  const auto of_e4m3 = [&](int heads, int requests, const char* device = "NVIDIA H200") {
    MlaDecodeOptions options = dense_options(fp8_576, heads, requests, 131072);
    options.fp8_queries = true;
    return fastest_for(options, device);
  };
  for (const int heads : {8, 16, 40, 64})
    for (const int requests : {1, 4, 32, 128})
      for (const char* device : {"NVIDIA H200", "NVIDIA H100 80GB HBM3"})
        EXPECT_EQ(of_e4m3(heads, requests, device), "cute.mla.flash_mla_v2") << heads << " " << requests;
  for (const int requests : {1, 128}) {
    EXPECT_EQ(fastest_for(dense_options(as_queries, 16, requests, 131072)), "cute.mla.flash_mla_v1");
    EXPECT_EQ(fastest_for(dense_options(as_queries, 128, requests, 131072)), "cute.mla.flash_mla");
  }
  for (const int heads : {48, 64, 96}) {
    EXPECT_EQ(fastest_for(dense_options(as_queries, heads, 1, 131072)), "cute.mla.flash_mla_v1") << heads;
    EXPECT_EQ(fastest_for(dense_options(as_queries, heads, 8, 131072)), "cute.mla.flash_mla") << heads;
  }
}

// As measured in docs/log/cute-flash-mla-v1.md; with fixed cuts a tile has the same rows in any batch.
TEST(SparseDecode, FewRequestsHaveShortTiles) {
  const std::unique_ptr<KernelPlan> plan = Registry::instance().find("cute.mla.flash_mla", "v1").make();
  plan->target = Target::of_arch("sm_90");
  const auto tile_of = [&](int heads, int requests, int split = 0) {
    MlaDecodeOptions options = dense_options(as_queries, heads, requests, 131072);
    options.split = split;
    settle(options);
    const std::string said = plan->decode(options)->explain();
    for (const int rows : {16, 32})
      if (said.find("in tiles of " + std::to_string(rows) + ",") != std::string::npos) return rows;
    return 0;
  };
  const std::array<int, 3> rows[] = {{16, 128, 16}, {24, 5, 16}, {32, 4, 16}, {32, 5, 32},
                                     {48, 2, 16},   {48, 3, 32}, {64, 1, 32}, {128, 1, 32}};
  for (const auto& [heads, requests, tile] : rows)
    EXPECT_EQ(tile_of(heads, requests), tile) << heads << " " << requests;
  for (const int requests : {1, 8}) EXPECT_EQ(tile_of(32, requests, 4096), 32);
}

// What MlaDecode promises of every form: a request alone has the bits that it has in a batch, where cuts are fixed, and
// a recording follows the lengths.
void check_bits(const std::shared_ptr<Device>& device, const std::string& name, MlaDecodeOptions options) {
  SCOPED_TRACE(testing::Message() << int(options.cache_format) << (options.sparse ? " sparse " : " dense ")
                                  << (options.fp8_queries ? "e4m3 " : "") << options.heads << " heads on " << name
                                  << " " << options.kernel);
  options.split = 128;
  const std::vector<int> lengths = {1000, 999, 0, 1, 64, 130, 300, 1000, 65};
  DecodeStep step = step_on(device, options, lengths, true);
  MlaDecode decode(options, DeviceHandle(name));
  run(decode, step);
  const MlaDecodeTensors all = step.tensors();
  const auto read = [&](const void* o, const void* lse, int queries) {
    std::pair<std::vector<std::uint16_t>, std::vector<std::uint32_t>> bits;
    bits.first.resize(std::size_t(queries) * options.heads * 512);
    bits.second.resize(std::size_t(queries) * options.heads);
    device->synchronize();
    device->copy_to_host(bits.first.data(), o, bits.first.size() * 2);
    device->copy_to_host(bits.second.data(), lse, bits.second.size() * 4);
    return bits;
  };
  const auto [o, lse] = read(all.o, all.lse, 9);
  const Buffer own_o(device, std::size_t(options.heads) * 1024), own_lse(device, std::size_t(options.heads) * 4);
  for (const int request : {0, 2, 5, 7}) {
    const auto moved = [&](const void* q) {
      return static_cast<const char*>(q) + std::size_t(request) * options.heads * (options.fp8_queries ? 576 : 1152);
    };
    MlaDecodeTensors one = all;
    one.q_latent.data = moved(all.q_latent.data);
    one.q_rope.data = moved(all.q_rope.data);
    one.query_tokens = 1;
    one.block_table += request * all.table_stride;
    one.o = own_o.data();
    one.lse = static_cast<float*>(own_lse.data());
    decode.plan(step.lengths() + request, nullptr, 1);
    decode.run(one);
    const auto [alone_o, alone_lse] = read(one.o, one.lse, 1);
    EXPECT_TRUE(std::equal(alone_o.begin(), alone_o.end(), &o[request * alone_o.size()])) << request;
    EXPECT_TRUE(std::equal(alone_lse.begin(), alone_lse.end(), &lse[request * alone_lse.size()])) << request;
  }
  const auto work = [&](StreamHandle stream) {
    decode.plan(step.lengths(), nullptr, 9, stream);
    decode.run(all, stream);
  };
  const std::unique_ptr<Recording> recording = device->record(work);
  std::vector<int> fewer = lengths;
  for (int& length : fewer) length = length * 2 / 3;
  device->copy_to_device(const_cast<int*>(step.lengths()), fewer.data(), fewer.size() * sizeof(int));
  recording->replay(device->stream());
  const auto replayed = read(all.o, all.lse, 9);
  step.poison();
  work(device->stream());
  EXPECT_TRUE(read(all.o, all.lse, 9) == replayed);
  EXPECT_FALSE(replayed.first == o);
}

// Sparse in all formats of the cache, and dense over FP8.
void check_bits_of_all_forms(const std::shared_ptr<Device>& device, const std::string& name, int heads) {
  for (const MlaCacheFormat format : {as_queries, fp8_656, fp8_576})
    for (const bool sparse : {true, false})
      if (sparse || format != as_queries)
        check_bits(device, name, (sparse ? options_for : dense_options)(format, heads, 9, 1000));
}

// Dense over FP8 under queries in e4m3: on a GPU by both kernels that take them.
void check_bits_of_e4m3(const std::shared_ptr<Device>& device, const std::string& name, int heads,
                        const std::string& kernel) {
  MlaDecodeOptions options = dense_options(fp8_576, heads, 9, 1000);
  options.fp8_queries = true;
  options.kernel = kernel;
  check_bits(device, name, options);
}

TEST(SparseDecode, BitsDependNeitherOnTheBatchNorOnARecording) {
  check_bits_of_all_forms(make_cpu_device(), "cpu", 2);
  check_bits_of_e4m3(make_cpu_device(), "cpu", 2, "");
}
TEST(SparseDecode, OnAGpuBitsDependNeitherOnTheBatchNorOnARecording) {
  if (const auto why = cuda_unavailable()) GTEST_SKIP() << *why;
  const std::shared_ptr<Device> device = make_cuda_device();
  if (device->info().arch != "sm_90") GTEST_SKIP() << "this GPU is " << device->info().arch;
  for (const int heads : {12, 128}) {
    check_bits_of_all_forms(device, "cuda", heads);
    for (const char* kernel : {"cute.mla.flash_mla_v2", "cute.mla.flash_mla_v4"})
      check_bits_of_e4m3(device, "cuda", heads, kernel);
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
      for (const int heads : {1, 3, 8, 12, 16, 24, 96, 128})
        for (const bool with_sinks : {false, true})
          if (sparse || format != as_queries)
            check_on_gpu(device, (sparse ? options_for : dense_options)(format, heads, 9, 1000), with_sinks);
}

TEST(SparseDecode, AGpuRunsCommandsOverCachesInFp8) {
  if (const auto why = cuda_unavailable()) GTEST_SKIP() << *why;
  const std::shared_ptr<Device> device = make_cuda_device();
  if (device->info().arch != "sm_90") GTEST_SKIP() << "this GPU is " << device->info().arch;
  Compiler compiler(Environment::detect().compiler_config());
  for (const auto& command : kCommands) {
    SCOPED_TRACE(command.second.dump());
    const std::unique_ptr<KernelPlan> plan = plan_of(command);
    AllocatedTensors memory(*plan, device, 1);
    const std::unique_ptr<Executable> executable = plan->plan(memory.tensors());
    executable->prepare(compiler, *device);
    const CheckResult result = check(*plan, *executable, memory, *device, 1);
    EXPECT_TRUE(result.passed) << to_text(result);
  }
}

TEST(SparseDecode, AGpuMultipliesE4m3) {
  if (const auto why = cuda_unavailable()) GTEST_SKIP() << *why;
  const std::shared_ptr<Device> device = make_cuda_device();
  if (device->info().arch != "sm_90") GTEST_SKIP() << "this GPU is " << device->info().arch;
  for (const char* kernel : {"cute.mla.flash_mla_v2", "cute.mla.flash_mla_v4"})
    for (const int heads : {3, 16, 24, 40, 128})
      for (const bool with_sinks : {false, true}) {
        MlaDecodeOptions options = dense_options(fp8_576, heads, 9, 1000);
        options.fp8_queries = true;
        options.kernel = kernel;
        check_on_gpu(device, options, with_sinks);
      }
}

}  // namespace
}  // namespace hypermla::sparse_decode_test
