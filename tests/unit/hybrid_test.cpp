// The shared half of the hybrid: what holds for all its kernels.
#include <gtest/gtest.h>

#include <random>

#include "mla/hybrid/hybrid_plan.h"
#include "support.h"

namespace hypermla::hybrid_test {
namespace {

using testing_support::contains;
using testing_support::error_of;

// A small one, where nothing else is said.
struct Problem {
  int b = 2, s = 3, t = 9, n = 4, h = 2, d = 16, p = 16, k = 32;
  DType dtype = DType::bfloat16;
  bool causal = false, ragged = false;
  int prefixes = 0;
  bool tokens_first = false;

  operator HybridProblem() const { return {b, s, t, n, h, d, p, k, dtype, causal, ragged, prefixes, tokens_first}; }
};

// Tensors in which the decompressed tokens are what the latents make of them: k = z wk, v = z w, qc = q wk^T. Then it
// must not matter how many tokens are decompressed.
class AbsorbedTensors {
 public:
  explicit AbsorbedTensors(const Problem& at) : at_(at) {
    std::mt19937 bits(7);
    std::normal_distribution<float> normal;
    auto draw = [&](std::int64_t count) {
      std::vector<float> values(count);
      for (float& value : values) value = normal(bits) / 4;
      return values;
    };
    q = draw(at.b * at.h * at.s * at.d);
    qpe = draw(at.b * at.h * at.s * at.p);
    z = draw(at.b * at.t * at.k);
    kpe = draw(at.b * at.t * at.p);
    wk = draw(at.h * at.k * at.d);
    w = draw(at.h * at.k * at.d);
  }

  // Of the problem with n decompressed tokens; with prefixes every request is its own prefix.
  InputReader reader(Problem at) const {
    return [this, at](const std::string& name, std::int64_t first, std::int64_t count) {
      const int o = latent_tokens(at), n = at.n, first_latent = at.prefixes ? n : 0,
                first_decompressed = at.prefixes ? 0 : o;
      std::vector<float> values;
      for (std::int64_t i = first; i < first + count; ++i) {
        auto token = [&](int tokens, int width) { return int(i / width % tokens); };
        auto request = [&](int tokens, int width) { return int(i / width / tokens); };
        if (name == "q") values.push_back(q[i]);
        if (name == "qpe") values.push_back(qpe[i]);
        if (name == "w") values.push_back(w[i]);
        if (name == "prefix") values.push_back(float(i));
        if (name == "z")
          values.push_back(z[(request(o, at.k) * at.t + first_latent + token(o, at.k)) * at.k + i % at.k]);
        if (name == "kpe")
          values.push_back(kpe[(request(o, at.p) * at.t + first_latent + token(o, at.p)) * at.p + i % at.p]);
        if (name == "kpe_new")
          values.push_back(kpe[(request(n, at.p) * at.t + first_decompressed + token(n, at.p)) * at.p + i % at.p]);
        if (name == "qc") {
          const int row = int(i / at.k), head = row / at.s % at.h;
          double sum = 0;
          for (int c = 0; c < at.d; ++c) sum += double(q[row * at.d + c]) * wk[(head * at.k + i % at.k) * at.d + c];
          values.push_back(float(sum));
        }
        if (name == "k" || name == "v") {
          const int head = request(n, at.d) % at.h, store = request(n, at.d) / at.h;
          double sum = 0;
          for (int c = 0; c < at.k; ++c)
            sum += double(z[(store * at.t + first_decompressed + token(n, at.d)) * at.k + c]) *
                   (name == "k" ? wk : w)[(head * at.k + c) * at.d + i % at.d];
          values.push_back(float(sum));
        }
      }
      EXPECT_EQ(std::int64_t(values.size()), count) << name;
      return values;
    };
  }

 private:
  Problem at_;
  std::vector<float> q, qpe, z, kpe, wk, w;
};

TEST(Hybrid, ItsReferenceDoesNotDependOnHowManyTokensAreDecompressed) {
  for (const bool causal : {false, true})
    for (const int prefixes : {0, 2}) {
      Problem at{.n = 0, .causal = causal, .prefixes = prefixes};
      const AbsorbedTensors tensors(at);
      const ReferenceOutputs latent = reference_of(at, 3, tensors.reader(at));
      for (const int n : {1, 4, 8, 9}) {
        at.n = n;
        const ReferenceOutputs mixed = reference_of(at, 3, tensors.reader(at));
        for (const char* name : {"o", "lse"})
          for (std::size_t i = 0; i < latent.at(name).size(); ++i)
            EXPECT_NEAR(mixed.at(name)[i], latent.at(name)[i], 1e-5) << name << " n=" << n << " causal=" << causal;
      }
    }
}

TEST(Hybrid, TokensFirstIsTheSameInAnotherOrder) {
  Problem at{.causal = true};
  const AbsorbedTensors tensors(at);
  const ReferenceOutputs heads[] = {reference_of(at, 2, tensors.reader(at)), reference_of(at, 3, tensors.reader(at))};
  at.tokens_first = true;
  const ReferenceOutputs request = reference_of(at, 1, tensors.reader(at));
  for (int head = 0; head < 2; ++head)
    for (int i = 0; i < at.s; ++i) {
      EXPECT_EQ(request.at("lse")[head * at.s + i], heads[head].at("lse")[i]);
      for (int c = 0; c < at.d; ++c)
        EXPECT_EQ(request.at("o")[(i * at.h + head) * at.d + c], heads[head].at("o")[i * at.d + c]);
    }
}

TEST(Hybrid, ItsCostIsTheOneOfTheTable) {
  for (const int n : {1, 100, 976, 4095}) {
    const Problem at{.b = 32, .s = 16, .t = 4096, .n = n, .h = 128, .d = 128, .p = 64, .k = 512};
    const Cost table = mla_var6_plus_cost({.b = 32, .s = 16, .t = 4096, .h = 128, .d = 128, .p = 64, .k = 512}, n);
    const double rows = 32.0 * 16 * 128, lse = 2 * 4 * rows;
    EXPECT_DOUBLE_EQ(hybrid_attention_cost(at).flops, table.flops);
    EXPECT_DOUBLE_EQ(hybrid_attention_cost(at).bytes, table.bytes + lse);
    // In one launch: no partial outputs, but w, o and one log-sum-exp; and the product with w.
    EXPECT_DOUBLE_EQ(hybrid_cost(at).bytes,
                     table.bytes - 2 * rows * (512 + 128) + 2.0 * 128 * 512 * 128 + rows * (2 * 128 + 4));
    EXPECT_DOUBLE_EQ(hybrid_cost(at).flops, table.flops + 2 * rows * 512 * 128);
  }
}

TEST(Hybrid, SharedTokensCountOnce) {
  const Problem own{.b = 8, .s = 1, .t = 300, .n = 200, .h = 4};
  Problem shared = own;
  shared.prefixes = 1;
  EXPECT_EQ(hybrid_cost(own).flops, hybrid_cost(shared).flops);
  EXPECT_DOUBLE_EQ(hybrid_cost(own).bytes - hybrid_cost(shared).bytes, 7 * 2.0 * 200 * (2 * 4 * 16 + 16) - 4 * 8);
}

TEST(Hybrid, PairsOfBothPartsAreAllPairs) {
  for (const bool ragged : {false, true})
    for (const int prefixes : {0, 1, 3}) {
      Problem at{.b = 7, .s = 20, .t = 33, .n = 15, .causal = true, .ragged = ragged, .prefixes = prefixes};
      const HybridSample sample = hybrid_sample(at);
      double all = 0;
      for (int r = 0; r < at.b; ++r)
        all += at.s * mean_tokens_seen(at.s, sample.lengths[r] + sample.decompressed_lengths[sample.store[r]], true);
      const HybridPairs pairs = hybrid_pairs(at);
      EXPECT_GT(pairs.latent, 0);
      EXPECT_GT(pairs.decompressed, 0);
      EXPECT_DOUBLE_EQ(pairs.latent + pairs.decompressed, all);
    }
}

TEST(Hybrid, ItsSampleHasEmptyRequestsAndEveryPrefix) {
  const HybridSample own = hybrid_sample(Problem{.b = 5, .t = 100, .n = 50, .ragged = true});
  EXPECT_EQ(own.lengths[2] + own.decompressed_lengths[2], 0);
  const HybridSample seven = hybrid_sample(Problem{.b = 7, .t = 100, .n = 50, .ragged = true});
  EXPECT_TRUE(seven.lengths[2] == 0 && seven.decompressed_lengths[2] > 0);
  EXPECT_TRUE(seven.lengths[4] > 0 && seven.decompressed_lengths[4] == 0);
  const std::vector<int> store = hybrid_sample(Problem{.b = 7, .prefixes = 3}).store;
  for (int g = 0; g < 3; ++g) EXPECT_GE(std::count(store.begin(), store.end(), g), 2);
  EXPECT_FALSE(std::is_sorted(store.begin(), store.end()));
}

TEST(Hybrid, WhatItLeavesToTheCostModel) {
  Problem at{.b = 32, .s = 16, .t = 4096, .n = -1, .h = 128, .d = 128, .p = 64, .k = 512};
  EXPECT_EQ(decompressed_tokens(at),
            n_star({.b = 32, .s = 16, .t = 4096, .h = 128, .d = 128, .p = 64, .k = 512}, kHybridRidge, 64));
  EXPECT_GT(decompressed_tokens(at), 0);
  EXPECT_EQ(latent_tokens(at) + decompressed_tokens(at), at.t);
  at.prefixes = 2;
  EXPECT_TRUE(contains(error_of([&] { validate_hybrid(at); }), "give it as --n"));
  EXPECT_TRUE(contains(error_of([&] { validate_hybrid(Problem{.n = 10}); }), "from 0 to t=9"));
}

}  // namespace
}  // namespace hypermla::hybrid_test
