// The part that attention plans share, against enumeration and against the cost models of mla/attention_cost.h.
#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "cutile/mla/flash_mla/flash_mla/flash_mla.h"
#include "hypermla/plan/configure.h"
#include "mla/attention_cost.h"
#include "mla/decompressed/decompressed_plan.h"
#include "mla/latent/latent_plan.h"
#include "support.h"

namespace hypermla::attention_test {
namespace {
using testing_support::contains;
using testing_support::error_of;

double bytes_of(const std::vector<TensorSpec>& specs) {
  double bytes = 0;
  for (const TensorSpec& spec : specs) bytes += double(Tensor({nullptr, spec.dtype, spec.shape}).bytes());
  return bytes;
}

// Every (query, token) pair that attention looks at, counted.
double pairs(int s, int t, bool causal) {
  double count = 0;
  for (int i = 0; i < s; ++i)
    for (int j = 0; j < t; ++j) count += !causal || j <= t - s + i;
  return count;
}

TEST(AttentionForms, MeanTokensSeenIsWhatEnumerationCounts) {
  for (const int s : {1, 2, 3, 16, 17})
    for (const int t : {1, 2, 15, 16, 17, 40})
      for (const bool causal : {false, true})
        EXPECT_DOUBLE_EQ(mean_tokens_seen(s, t, causal) * s, pairs(s, t, causal)) << s << " " << t << " " << causal;
}

TEST(AttentionForms, DecompressedCostIsArithmeticOfTheSeenAndEveryTensorOnce) {
  for (const bool causal : {false, true}) {
    for (const int s : {1, 5, 33}) {
      const DecompressedProblem problem{
          .b = 3, .s = s, .t = 20, .h = 7, .d = 64, .p = 32, .dtype = DType::float16, .causal = causal};
      const Cost cost = decompressed_cost(problem);
      EXPECT_DOUBLE_EQ(cost.flops, 3 * 7 * pairs(s, 20, causal) * 2 * (64 + 32 + 64));
      EXPECT_DOUBLE_EQ(cost.bytes, bytes_of(tensors_of(problem)));
      if (!causal) {
        EXPECT_DOUBLE_EQ(cost.flops, flash_attention_cost({.b = 3, .s = s, .t = 20, .h = 7, .d = 64, .p = 32}).flops);
      }
    }
  }
}

TEST(AttentionForms, LatentCostIsThatOfFlashMlaAndTheLogSumExp) {
  for (const bool causal : {false, true}) {
    for (const int s : {1, 5, 33}) {
      const LatentProblem problem{.b = 3, .s = s, .t = 20, .h = 7, .p = 32, .k = 256, .causal = causal};
      const Cost cost = latent_cost(problem);
      EXPECT_DOUBLE_EQ(cost.flops, 3 * 7 * pairs(s, 20, causal) * 2 * (256 + 32 + 256));
      EXPECT_DOUBLE_EQ(cost.bytes, bytes_of(tensors_of(problem)));
      const Cost model = flash_mla_cost({.b = 3, .s = s, .t = 20, .h = 7, .p = 32, .k = 256});
      EXPECT_DOUBLE_EQ(cost.bytes, model.bytes + 4.0 * 3 * 7 * s);
      if (!causal) {
        EXPECT_DOUBLE_EQ(cost.flops, model.flops);
      }
    }
  }
}

TEST(AttentionForms, LatentExecutedCountsEveryBlock) {
  const LatentProblem problem{.b = 2, .s = 5, .t = 20, .h = 7, .p = 32, .k = 256};  // 35 rows of one batch element
  for (const auto& [Bm, Bn] : {std::pair(16, 16), std::pair(32, 16), std::pair(64, 64)})
    for (const int Bv : {64, 128, 256}) {
      double flops = 0;
      for (int block = 0; block * Bm < 35; ++block)
        for (int column = 0; column < 256; column += Bv)  // each makes the scores anew, and Bv columns of the output
          for (int token = 0; token < 20; token += Bn) flops += 2.0 * 2 * Bm * Bn * (256 + 32 + Bv);
      EXPECT_DOUBLE_EQ(latent_executed(problem, Bm, Bn, Bv).flops, flops) << Bm << " " << Bv;
      EXPECT_DOUBLE_EQ(latent_executed(problem, Bm, Bn, Bv).bytes, latent_cost(problem).bytes);
    }
}

// With one column of ones as values the output is one, and with equal keys the log-sum-exp is score + log(seen).
TEST(AttentionForms, DecompressedReferenceReadsItsOwnHead) {
  const DecompressedProblem problem{.b = 2, .s = 3, .t = 4, .h = 2, .d = 16, .p = 16, .causal = true};
  const std::int64_t group = 3;  // the second head of the second batch element
  const InputReader input = [&](const std::string& name, std::int64_t first, std::int64_t count) {
    std::vector<float> values(std::size_t(count), 0.0f);
    for (std::int64_t i = 0; i < count; ++i) {
      if (name == "q" || name == "k") values[i] = first == group * (name == "q" ? 3 : 4) * 16 ? 1.0f : NAN;
      if (name == "qpe") values[i] = first == group * 3 * 16 ? 2.0f : NAN;
      if (name == "kpe") values[i] = first == 1 * 4 * 16 ? 1.0f : NAN;
      if (name == "v") values[i] = first == group * 4 * 16 ? float(i / 16) : NAN;  // the token's number
    }
    return values;
  };
  const ReferenceOutputs outputs = reference_of(problem, group, input);
  const double score = (16 * 1 + 16 * 2) / std::sqrt(32.0);
  for (int i = 0; i < 3; ++i) {
    const int seen = 4 - 3 + i + 1;
    EXPECT_NEAR(outputs.at("lse")[i], score + std::log(seen), 1e-6);
    EXPECT_NEAR(outputs.at("o")[i * 16 + 5], (seen - 1) / 2.0, 1e-12);
  }
}

TEST(AttentionForms, LatentReferenceSharesItsTokensBetweenHeads) {
  const LatentProblem problem{.b = 2, .s = 1, .t = 4, .h = 3, .d = 128, .p = 16, .k = 32};
  const std::int64_t group = 4;  // the second head of the second batch element
  const InputReader input = [&](const std::string& name, std::int64_t first, std::int64_t count) {
    std::vector<float> values(std::size_t(count), 0.0f);
    for (std::int64_t i = 0; i < count; ++i) {
      if (name == "qc") values[i] = first == group * 32 ? 0.0f : NAN;
      if (name == "qpe") values[i] = first == group * 16 ? 1.0f : NAN;
      if (name == "z") values[i] = first == 1 * 4 * 32 ? float(i / 32) : NAN;
      if (name == "kpe") values[i] = first == 1 * 4 * 16 ? 3.0f : NAN;
    }
    return values;
  };
  const ReferenceOutputs outputs = reference_of(problem, group, input);
  EXPECT_NEAR(outputs.at("lse")[0], 16 * 3 / std::sqrt(128.0 + 16) + std::log(4.0), 1e-6);  // d sets the scale
  EXPECT_NEAR(outputs.at("o")[31], 1.5, 1e-12);
}

TEST(TypedPlan, PreconditionsNameTheFieldAndWhatIsSupported) {
  EXPECT_NO_THROW(require_positive("b", 1));
  EXPECT_EQ(error_of([] { require_positive("b", 0); }), "--b=0 is not supported: it must be at least 1");
  for (const int good : {16, 32, 256}) EXPECT_NO_THROW(require_power_of_two("d", good, 16, 256));
  for (const int bad : {-16, 0, 8, 24, 255, 512})
    EXPECT_EQ(error_of([&] { require_power_of_two("d", bad, 16, 256); }),
              "--d=" + std::to_string(bad) + " is not supported: it must be a power of two from 16 to 256");
  EXPECT_NO_THROW(require_half_precision(DType::float16));
  EXPECT_TRUE(contains(error_of([] { require_half_precision(DType::float32); }), "choose bfloat16 or float16"));
  EXPECT_EQ(ceil_div(1, 16), 1u);
  EXPECT_EQ(ceil_div(16, 16), 1u);
  EXPECT_EQ(ceil_div(17, 16), 2u);
  EXPECT_FLOAT_EQ(softmax_scale(128, 64), 0.07216878f);
}

TEST(TypedPlan, TheProblemKeyNamesWhatItMust) {
  struct Plan : AttentionPlan<LatentProblem, FlashMlaTiling> {
    Plan() : AttentionPlan(kLatentServing) {}
    void use_default_tiling() override { tiling.Bm = problem.s; }
    void validate() const override {}
    std::unique_ptr<Executable> plan(const Tensors&) const override { return nullptr; }
  } plan;
  set_problem(plan, {{"b", 32}, {"s", 16}, {"dtype", "float16"}, {"causal", true}});
  EXPECT_EQ(problem_key(plan), "b32_s16_t4096_h128_d128_p64_k512_float16_causal=true");
  EXPECT_EQ(plan.tiling.Bm, 16);  // the default tiling follows the problem
  EXPECT_EQ(plan.dtype(), DType::float16);
  for (const char* name : {"heads", "page"})  // a field that no version has, and one that this version does not offer
    EXPECT_TRUE(contains(error_of([&] { set_problem(plan, {{name, 4}}); }), name));
  const Tensors tensors = empty_tensors(plan);
  EXPECT_EQ(tensors.at("qc").shape, (std::vector<std::int64_t>{32, 128, 16, 512}));
  EXPECT_EQ(tensors.at("lse").dtype, DType::float32);
  EXPECT_EQ(tensors.at("z").data, nullptr);
}

}  // namespace
}  // namespace hypermla::attention_test
