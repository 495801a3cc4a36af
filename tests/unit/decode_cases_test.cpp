// The steps on which `hypermla verify` checks kernels as MlaDecode calls them: what they cover, that a right kernel
// passes all of them, and that a wrong one does not.
#include "hypermla/plan/decode_cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "hypermla/api/environment.h"
#include "hypermla/base/half.h"
#include "hypermla/plan/cases.h"
#include "hypermla/plan/verify.h"
#include "support.h"

namespace hypermla::decode_cases_test {
namespace {

using testing_support::contains;
using enum MlaCacheFormat;

std::vector<DecodeCase> cases_of(const KernelEntry& entry) { return decode_cases(entry.full_name(), *entry.make()); }
std::vector<DecodeCase> cases_of(const char* name) { return cases_of(Registry::instance().find(name)); }

TEST(DecodeCases, AVersionThatOnlyDecodesHasSomeAndOneThatDoesNotHasNone) {
  std::set<std::string> decoding;
  for (const KernelEntry& entry : Registry::instance().all()) {
    const std::vector<DecodeCase> cases = cases_of(entry);
    if (!cases.empty()) decoding.insert(entry.full_name());
    EXPECT_TRUE(!entry.make()->only_decodes() || cases.size() >= 7) << entry.full_name();
    std::set<std::string> texts;
    for (const DecodeCase& one : cases) EXPECT_TRUE(texts.insert(to_text(one)).second) << to_text(one);
  }
  EXPECT_EQ(decoding,
            (std::set<std::string>{"cute.mla.flash_mla", "cute.mla.flash_mla_v1", "cute.mla.flash_mla_v2",
                                   "cute.mla.flash_mla_v3", "cute.mla.flash_mla_v4", "cutile.mla.flash_mla_split_kv"}));
}

TEST(DecodeCases, CoverWhatAKernelTakes) {
  for (const char* name :
       {"cute.mla.flash_mla_v2", "cute.mla.flash_mla_v3", "cute.mla.flash_mla_v4", "cutile.mla.flash_mla_split_kv"}) {
    SCOPED_TRACE(name);
    std::map<std::string, std::set<int>> of;  // what options are
    int empty_requests = 0, without_queries = 0, ragged = 0, growing = 0, sinks = 0, whole = 0;
    for (const DecodeCase& one : cases_of(name)) {
      const MlaDecodeOptions& at = one.options;
      EXPECT_EQ(at.kernel, name);
      EXPECT_LT(int(one.lengths.size()), at.max_requests);
      for (const auto& [field, value] :
           std::map<std::string, int>{{"heads", at.heads},
                                      {"page", at.page},
                                      {"form", int(at.cache_format) * 4 + at.sparse * 2 + at.fp8_queries},
                                      {"shards", at.shards},
                                      {"causal", at.causal + 2 * at.sparse},
                                      {"split", at.split},
                                      {"base2", at.lse_base2},
                                      {"positive", at.empty_lse_positive}})
        of[field].insert(value);
      for (std::size_t r = 0; r < one.lengths.size(); ++r) {
        const int queries = one.queries.empty() ? at.max_queries : one.queries[r];
        empty_requests += one.lengths[r] == 0 && queries > 0;
        without_queries += queries == 0;
        ragged += queries > 0 && queries < at.max_queries;
      }
      growing += one.growing;
      sinks += one.sinks;
      whole += at.sparse && one.lengths == std::vector<int>(one.lengths.size(), at.max_tokens);
    }
    EXPECT_GE(std::min({empty_requests, without_queries, ragged, growing, sinks}), 2);
    for (const int heads : {3, 16, 64, 128}) EXPECT_TRUE(of["heads"].count(heads)) << heads;
    const bool of_e4m3 = contains(name, "_v2"), of_fp8 = contains(name, "_v3"), of_all = contains(name, "_v4");
    EXPECT_EQ(of["form"], of_e4m3  ? (std::set<int>{9})
                          : of_all ? (std::set<int>{0, 2, 4, 6, 8, 9, 10})
                          : of_fp8 ? (std::set<int>{4, 6, 8, 10})
                                   : (std::set<int>{0, 2}));
    EXPECT_EQ(of["shards"].count(3), contains(name, "cute."));
    EXPECT_EQ(of["page"].count(1), !of_e4m3);
    EXPECT_EQ(whole > 0, !of_e4m3);
    for (const int page : {16, 32, 64, 128}) EXPECT_TRUE(of["page"].count(page)) << page;
    EXPECT_TRUE(of["causal"].count(0) && of["causal"].count(1));
    EXPECT_TRUE(of["split"].count(0) && of["split"].count(128));
    EXPECT_EQ(of["base2"].size() * of["positive"].size(), 4u);
  }
  int shared = 0, halves = 0;
  for (const DecodeCase& one : cases_of("cute.mla.flash_mla_v1")) {
    shared += one.options.shared_prefixes && one.shared >= 512;
    halves += one.options.dtype == DType::float16;
  }
  EXPECT_GE(std::min(shared, halves), 1);
}

// `compile --cases` and `verify` ask for the same; records name all kernels of it.
TEST(DecodeCases, WhatTheyRunIsCompiledAheadAndRecorded) {
  const Compiler compiler(Environment::detect().compiler_config());
  for (const KernelEntry& entry : Registry::instance().all()) {
    if (entry.design != "flash_mla" && entry.design != "flash_mla_split_kv") continue;
    const std::unique_ptr<KernelPlan> plan = entry.make();
    plan->target = Target::of_arch("sm_90");
    std::set<std::string> ahead;
    for (const KernelSource& source : verification_sources(entry, plan->target))
      EXPECT_TRUE(ahead.insert(source.instance).second);
    const Json recorded = fingerprints(entry, compiler);
    for (const DecodeCase& one : decode_cases(entry.full_name(), *plan))
      for (const KernelSource& source : plan->decode(one.options)->sources()) {
        EXPECT_TRUE(ahead.count(source.instance)) << source.instance;
        EXPECT_TRUE(recorded.contains(source.name)) << source.name;
      }
  }
}

// The reference in fp32, which makes a mistake where a test says one.
struct Mistakes {
  std::function<void(MlaDecodeOptions&)> in_options = [](MlaDecodeOptions&) {};
  std::function<void(std::vector<int>& lengths)> in_lengths = [](std::vector<int>&) {};
  std::function<void(MlaDecodeTensors&)> in_tensors = [](MlaDecodeTensors&) {};
  std::function<void(const MlaDecodeTensors&)> behind_it = [](const MlaDecodeTensors&) {};
  int status = 0;
};
class Mistaken : public DecodeKernels {
 public:
  Mistaken(MlaDecodeOptions options, Mistakes mistakes) : options_(options), mistakes_(std::move(mistakes)) {
    mistakes_.in_options(options);
    right_ = make_decode_reference(options);
  }
  double seconds(const DeviceSpec&, int) const override { return 1; }
  std::string explain() const override { return ""; }
  std::size_t workspace_bytes() const override { return 256; }
  void prepare(Compiler& compiler, Device& device, void* workspace) override {
    right_->prepare(compiler, device, workspace);
  }
  void plan(const int* lengths, const int* starts, int requests, const int* table, std::int64_t stride,
            StreamHandle stream) override {
    std::vector<int> mine(lengths ? lengths : nullptr, lengths ? lengths + requests : nullptr);
    if (lengths) mistakes_.in_lengths(mine);
    right_->plan(lengths ? mine.data() : nullptr, starts, requests, table, stride, stream);
  }
  void run(const MlaDecodeTensors& tensors, StreamHandle stream) override {
    MlaDecodeTensors mine = tensors;
    mistakes_.in_tensors(mine);
    right_->run(mine, stream);
    mistakes_.behind_it(tensors);
  }
  int status() const override { return mistakes_.status; }

 private:
  MlaDecodeOptions options_;
  Mistakes mistakes_;
  std::unique_ptr<DecodeKernels> right_;
};

// A version that only decodes, what another does.
class DecodingPlan : public KernelPlan {
 public:
  DecodingPlan(std::string takes_as, Mistakes mistakes) : as_(std::move(takes_as)), mistakes_(std::move(mistakes)) {}
  std::vector<FieldRef> problem_fields() override { return {}; }
  std::vector<FieldRef> tiling_fields() override { return {}; }
  void use_default_tiling() override {}
  void validate() const override {}
  DType dtype() const override { return DType::bfloat16; }
  std::vector<TensorSpec> tensors() const override { return {}; }
  ReferenceShape reference_shape() const override { return {}; }
  ReferenceOutputs reference(std::int64_t, const InputReader&) const override { return {}; }
  std::unique_ptr<Executable> plan(const Tensors&) const override { return nullptr; }
  bool only_decodes() const override { return true; }
  std::unique_ptr<DecodeKernels> decode(const MlaDecodeOptions& options) const override {
    // Few tokens, so that a case takes milliseconds.
    const bool takes = options.max_tokens <= 1000 && options.heads <= 20 && options.max_requests < 100;
    if (!takes || !Registry::instance().find(as_).make()->decode(options)) return nullptr;
    return std::make_unique<Mistaken>(options, mistakes_);
  }

 private:
  std::string as_;
  Mistakes mistakes_;
};

struct Verified {
  Tally tally;
  std::string said;
};
Verified verified(const std::string& as, const Mistakes& mistakes) {
  KernelEntry entry;
  entry.language = "cute";
  entry.layer = "mla";
  entry.design = "decoding";
  entry.version = "v0";
  entry.make = [&] { return std::make_unique<DecodingPlan>(as, mistakes); };
  Compiler compiler(Environment::detect().compiler_config());
  Verified result;
  result.tally =
      verify(entry, make_cpu_device(), compiler, {.say = [&](const std::string& lines) { result.said += lines; }});
  return result;
}

TEST(DecodeCases, ARightKernelPassesAndAWrongOneDoesNot) {
  for (const char* as : {"cute.mla.flash_mla_v2", "cute.mla.flash_mla_v3", "cute.mla.flash_mla"}) {
    const Verified right = verified(as, {});
    EXPECT_GE(right.tally.cases, 3) << as;
    EXPECT_EQ(right.tally.failed, 0) << as << "\n" << right.said;
    EXPECT_EQ(right.tally.worst.size(), 2u);  // o and lse
  }
  const std::map<std::string, Mistakes> wrong = {
      {"the mask", {.in_options = [](auto& at) { at.causal = !at.causal; }}},
      {"the scale", {.in_options = [](auto& at) { at.scale *= 1.01f; }}},
      {"the base", {.in_options = [](auto& at) { at.lse_base2 = !at.lse_base2; }}},
      {"rows without tokens", {.in_options = [](auto& at) { at.empty_lse_positive = !at.empty_lse_positive; }}},
      {"the shard", {.in_options = [](auto& at) { at.shard += at.shards > 1; }}},
      {"a length", {.in_lengths = [](auto& lengths) { lengths[4] -= 1; }}},
      {"the sinks", {.in_tensors = [](auto& with) { with.sinks = nullptr; }}},
      {"the factor of the cache",
       {.in_tensors =
            [](auto& with) {
              static const float other = 0.0042f;
              if (with.cache_scale) with.cache_scale = &other;
            }}},
      {"a row that is not written", {.behind_it = [](auto& with) { with.lse[0] = std::nanf(""); }}},
      {"an element", {.behind_it = [](auto& with) { static_cast<std::uint16_t*>(with.o)[7] ^= 0x4000; }}},
      {"a row behind the last",
       {.behind_it = [](auto& with) { with.lse[(with.query_tokens - 1) * with.lse_token_stride] = 0; }}},
      {"the status", {.status = kWrongTokens}}};
  for (const auto& [what, mistakes] : wrong)
    for (const char* as : {"cute.mla.flash_mla_v2", "cute.mla.flash_mla_v3"}) {
      SCOPED_TRACE(what + " of " + as);
      const Verified result = verified(as, mistakes);
      EXPECT_GE(result.tally.failed, 1);
      EXPECT_TRUE(contains(result.said, "FAILED cute.mla.decoding decode heads=")) << result.said;
      EXPECT_EQ(std::isinf(result.tally.worst.at("lse")), what == "a row that is not written");
    }
}

// A head whose tokens weigh next to nothing beside its sink: their sum is fp32, and becomes infinite.
TEST(DecodeCases, ARowMayBeZerosWhereItsSinkIsAll) {
  DecodeCase one{{.heads = 128, .max_requests = 3, .max_tokens = 1, .sparse = true, .scale = 4}, {1, 1}, {}, true};
  settle(one.options);
  const std::shared_ptr<Device> device = make_cpu_device();
  const std::unique_ptr<DecodeKernels> right = make_decode_reference(one.options);
  Compiler compiler(Environment::detect().compiler_config());
  std::vector<std::uint64_t> workspace(right->workspace_bytes() / 8 + 1);
  right->prepare(compiler, *device, workspace.data());
  DecodeStep step(one, device, 3);
  EXPECT_TRUE(step.check(*right, 1).passed) << to_text(step.check(*right, 1));
  const MlaDecodeTensors tensors = step.tensors();
  const auto zero_rows = [&](float least, float most) {  // those of which the largest number is between
    int rows = 0;
    for (int row = 0; row < 2 * one.options.heads; ++row) {
      std::uint16_t* const of = static_cast<std::uint16_t*>(tensors.o) + row * 512;
      float largest = 0;
      for (int c = 0; c < 512; ++c) largest = std::max(largest, std::fabs(to_float(of[c], DType::bfloat16)));
      if (!(largest > least && largest < most)) continue;
      std::fill_n(of, 512, std::uint16_t{0});
      ++rows;
    }
    return rows;
  };
  EXPECT_GE(zero_rows(0, 0x1p-120f), 1);
  EXPECT_TRUE(step.compare(1).passed);
  EXPECT_GE(zero_rows(0x1p-112f, 0x1p-80f), 1);
  EXPECT_FALSE(step.compare(1).passed);
}

}  // namespace
}  // namespace hypermla::decode_cases_test
