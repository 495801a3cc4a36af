// MlaPrefill: the plain reference on the CPU against attention_reference(), what is refused, the portable kernels on
// the CPU, and on a Hopper GPU both kernels against the reference, with requests that change between the replays of a
// recording.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "hypermla/api/shared.h"
#include "hypermla/device/device.h"
#include "hypermla/mla_prefill.h"
#include "hypermla/plan/cases.h"
#include "hypermla/plan/inputs.h"
#include "hypermla/plan/reference.h"
#include "hypermla/plan/registry.h"
#include "support.h"

namespace hypermla::prefill_test {
namespace {

using testing_support::contains;
using testing_support::error_of;
using testing_support::worse;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::uint16_t kNan = 0x7fff;  // in bfloat16 and in float16

// How the tensors of a layer lie in memory.
enum class Layout {
  dense,        // q and k [tokens, heads, 192], v [tokens, heads, 128]
  views,        // keys and values in one [tokens, heads, 256], RoPE keys [tokens, 64] for all heads
  heads_first,  // every tensor apart, [heads, tokens, ..] with gaps, and the log-sum-exps [heads, tokens]
};

// 16-bit memory in which some tensors lie.
struct Place {
  int buffer = 0;
  std::int64_t first = 0, token_stride = 0, head_stride = 0;
};

struct Sizes {
  std::vector<int> queries, tokens;    // of each request
  int query_rows = 0, token_rows = 0;  // of the tensors
};

// One step of an engine, in host memory: everything that must not be read is NaN, and outputs are poisoned.
struct Batch {
  Batch(const MlaPrefillOptions& options, Layout layout, const Sizes& of, unsigned seed, bool growing = false)
      : at(options), sizes(of) {
    for (std::size_t r = 0; r < of.queries.size(); ++r) {
      query_starts.push_back(query_starts.back() + of.queries[r]);
      token_starts.push_back(token_starts.back() + of.tokens[r]);
    }
    const int all = query_starts.back(), spare = of.query_rows - all;
    rows.resize(all);
    std::iota(rows.begin(), rows.end(), 0);
    if (options.query_rows) {  // rising with gaps, falling, one after the other, or anyhow
      std::mt19937 dice(seed);
      std::vector<int> places(of.query_rows);
      std::iota(places.begin(), places.end(), 0);
      if (seed % 4 != 2) std::shuffle(places.begin(), places.end(), dice);
      std::copy_n(places.begin() + (seed % 4 == 2 ? spare / 2 : 0), all, rows.begin());
      if (seed % 4 == 0) std::sort(rows.begin(), rows.end());
      if (seed % 4 == 1) std::sort(rows.rbegin(), rows.rend());
    }
    const std::int64_t h = at.heads, all_rows = of.query_rows, tokens = of.token_rows;
    const auto buffer = [&](std::int64_t elements) {
      buffers.emplace_back(elements, kNan);
      return int(buffers.size()) - 1;
    };
    if (layout == Layout::heads_first) {
      const auto apart = [&](std::int64_t n, int width) { return Place{buffer(h * n * width), 0, width, n * width}; };
      q_nope = apart(all_rows, 136), q_rope = apart(all_rows, 72), k_nope = apart(tokens, 128),
      k_rope = apart(tokens, 80);
      v = apart(tokens, 144), o = apart(all_rows, 136);
    } else {
      const int q = buffer(all_rows * h * 192);
      q_nope = {q, 0, h * 192, 192}, q_rope = {q, 128, h * 192, 192};
      if (layout == Layout::dense) {
        const int k = buffer(tokens * h * 192);
        k_nope = {k, 0, h * 192, 192}, k_rope = {k, 128, h * 192, 192}, v = {buffer(tokens * h * 128), 0, h * 128, 128};
      } else {
        const int kv = buffer(tokens * h * 256);
        k_nope = {kv, 0, h * 256, 256}, v = {kv, 128, h * 256, 256}, k_rope = {buffer(tokens * 64), 0, 64, 0};
      }
      o = {buffer(all_rows * h * 128), 0, h * 128, 128};
    }
    lse.assign(all_rows * h, std::nanf(""));
    lse_token_stride = layout == Layout::heads_first ? 1 : h;
    lse_head_stride = layout == Layout::heads_first ? all_rows : 1;

    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](const Place& place, int row, int head, int width, float scale) {
      for (int c = 0; c < width; ++c) *element(place, row, head, c) = to_half_bits(scale * normal(random), at.dtype);
    };
    for (std::size_t r = 0; r < of.queries.size(); ++r) {
      if (of.queries[r] == 0 || of.tokens[r] == 0) continue;  // the other side is not read
      for (int head = 0; head < at.heads; ++head) {
        for (int i = query_starts[r]; i < query_starts[r + 1]; ++i)
          fill(q_nope, rows[i], head, 128, 1), fill(q_rope, rows[i], head, 64, 1);
        // Blocks of tokens are walked backwards: the largest scores come last.
        for (int i = 0; i < of.tokens[r]; ++i) {
          const float scale = growing ? 1 + 7 * (1 - float(i) / of.tokens[r]) : 1;
          fill(k_nope, token_starts[r] + i, head, 128, scale);
          if (head == 0 || k_rope.head_stride > 0) fill(k_rope, token_starts[r] + i, head, 64, scale);
          fill(v, token_starts[r] + i, head, 128, 1);
        }
      }
    }
  }

  std::uint16_t* element(const Place& of, std::int64_t row, int head, int column) {
    return &buffers[of.buffer][of.first + row * of.token_stride + head * of.head_stride + column];
  }
  // Over these tensors, or copies of their buffers.
  MlaPrefillTensors tensors(const std::vector<void*>& memory, float* lse_memory) const {
    const auto rows = [&](const Place& of) {
      return MlaPrefillTensors::Rows{static_cast<std::uint16_t*>(memory[of.buffer]) + of.first, of.token_stride,
                                     of.head_stride};
    };
    return {.q_nope = rows(q_nope),
            .q_rope = rows(q_rope),
            .query_tokens = sizes.query_rows,
            .k_nope = rows(k_nope),
            .k_rope = rows(k_rope),
            .v = rows(v),
            .tokens = sizes.token_rows,
            .o = static_cast<std::uint16_t*>(memory[o.buffer]) + o.first,
            .o_token_stride = o.token_stride,
            .o_head_stride = o.head_stride,
            .lse = lse_memory,
            .lse_token_stride = lse_token_stride,
            .lse_head_stride = lse_head_stride};
  }
  MlaPrefillTensors tensors() {
    std::vector<void*> memory;
    for (auto& buffer : buffers) memory.push_back(buffer.data());
    return tensors(memory, lse.data());
  }
  // Attends on the CPU.
  void run() {
    MlaPrefill prefill(at, DeviceHandle("cpu"));
    const int requests = int(sizes.queries.size());
    if (at.query_rows)
      prefill.plan(query_starts.data(), token_starts.data(), requests, rows.data(), nullptr);
    else
      prefill.plan(query_starts.data(), token_starts.data(), requests);
    prefill.run(tensors());
  }
  // Compares the outputs with double precision.
  void check() {
    for (std::size_t r = 0; r < sizes.queries.size(); ++r)
      for (int head = 0; head < at.heads; ++head) {
        const int n = sizes.queries[r], m = sizes.tokens[r];
        const auto read = [&](const Place& of, int first, int count, int width) {
          std::vector<float> all;
          for (int i = first; i < first + count; ++i)
            for (int c = 0; c < width; ++c) all.push_back(from_half_bits(*element(of, i, head, c), at.dtype));
          return all;
        };
        const auto joined = [&](const Place& nope, const Place& rope, int first, int count) {
          return join_columns(read(nope, first, count, 128), read(rope, first, count, 64), 128, 64);
        };
        std::vector<float> q;
        for (int i = query_starts[r]; i < query_starts[r + 1]; ++i) {
          const std::vector<float> one = joined(q_nope, q_rope, rows[i], 1);
          q.insert(q.end(), one.begin(), one.end());
        }
        const AttentionReference expected =
            attention_reference(q, joined(k_nope, k_rope, token_starts[r], m), read(v, token_starts[r], m, 128), n, m,
                                192, 128, 1 / std::sqrt(192.0), at.causal);
        for (int i = 0; i < n; ++i) {
          const int row = rows[query_starts[r] + i];
          const double unit = at.lse_base2 ? 1 / std::log(2.0) : 1;
          const float got = lse[row * lse_token_stride + head * lse_head_stride];
          if (std::isinf(expected.lse[i]))
            EXPECT_EQ(got, at.empty_lse_positive ? kInfinity : -kInfinity);
          else
            EXPECT_TRUE(std::abs(got - expected.lse[i] * unit) <= 1e-3) << got << " " << expected.lse[i];
          double worst = 0;
          for (int c = 0; c < 128; ++c) {
            const double difference =
                std::abs(from_half_bits(*element(o, row, head, c), at.dtype) - expected.o[std::size_t(i) * 128 + c]);
            worst = worse(worst, difference);
          }
          EXPECT_TRUE(worst <= 0.02) << "request " << r << " query " << i << " head " << head << ": " << worst;
        }
      }
    for (std::int64_t row = 0; row < sizes.query_rows; ++row)
      EXPECT_TRUE(std::count(rows.begin(), rows.end(), row) || std::isnan(lse[row * lse_token_stride]))
          << "row " << row << " is no query's, and was written";
  }

  MlaPrefillOptions at;
  Sizes sizes;
  std::vector<int> query_starts = {0}, token_starts = {0};
  std::vector<int> rows;  // of the tensors, of each query
  std::vector<std::vector<std::uint16_t>> buffers;
  Place q_nope, q_rope, k_nope, k_rope, v, o;
  std::vector<float> lse;
  std::int64_t lse_token_stride = 0, lse_head_stride = 0;
};

TEST(MlaPrefill, TheReferenceAttendsToAnyMixOfRequestsAndLayouts) {
  for (const Layout layout : {Layout::dense, Layout::views, Layout::heads_first})
    for (const bool causal : {false, true}) {
      const MlaPrefillOptions options = {.heads = 3,
                                         .max_requests = 7,
                                         .max_query_tokens = 60,
                                         .max_tokens = 90,
                                         .dtype = layout == Layout::views ? DType::float16 : DType::bfloat16,
                                         .causal = causal,
                                         .lse_base2 = layout == Layout::dense,
                                         .empty_lse_positive = causal};
      // Among them requests without queries, without tokens, with fewer tokens than queries, and padding.
      Batch batch(options, layout, {{20, 0, 3, 9, 5, 0, 0}, {33, 8, 90, 4, 0, 0, 0}, 40, 140}, 1);
      batch.run();
      batch.check();
    }
}

TEST(MlaPrefill, QueriesMayLieAnywhere) {
  for (unsigned seed = 0; seed < 8; ++seed) {
    const MlaPrefillOptions options = {.heads = 2,
                                       .max_requests = 4,
                                       .max_query_tokens = 40,
                                       .max_tokens = 90,
                                       .causal = seed % 3 == 0,
                                       .query_rows = true};
    Batch batch(options, Layout(seed % 3), {{9, 0, 3, 12}, {33, 8, 90, 4}, 40, 140}, seed);
    batch.run();
    batch.check();
  }
}

TEST(MlaPrefill, RowsOfOthersKeepWhatTheyHold) {
  const MlaPrefillOptions options = {.heads = 2,
                                     .max_requests = 1,
                                     .max_query_tokens = 9,
                                     .max_tokens = 50,
                                     .causal = false,
                                     .accumulate = true,
                                     .query_rows = true};
  Batch batch(options, Layout::dense, {{5}, {50}, 9, 50}, 3), alone = batch;
  alone.at.accumulate = false;
  alone.run();
  for (int row = 0; row < 9; ++row)
    for (int head = 0; head < 2; ++head) {
      batch.lse[row * 2 + head] = float(row);
      std::fill_n(batch.element(batch.o, row, head, 0), 128, to_half_bits(1.0f, options.dtype));
    }
  batch.run();
  for (int row = 0; row < 9; ++row) {
    const bool own = std::count(batch.rows.begin(), batch.rows.end(), row);
    const float wanted = own ? std::log(std::exp(float(row)) + std::exp(alone.lse[row * 2])) : float(row);
    EXPECT_NEAR(batch.lse[row * 2], wanted, 1e-4) << row;
    const float share = own ? std::exp(alone.lse[row * 2] - wanted) : 0;
    const float other = own ? from_half_bits(*alone.element(alone.o, row, 0, 5), options.dtype) : 0;
    EXPECT_NEAR(from_half_bits(*batch.element(batch.o, row, 0, 5), options.dtype), 1 - share + share * other, 1e-2);
  }
}

TEST(MlaPrefill, PartsOfTheTokensMergeToTheWhole) {
  const MlaPrefillOptions options = {
      .heads = 2, .max_requests = 1, .max_query_tokens = 5, .max_tokens = 50, .dtype = DType::float16, .causal = false};
  Batch whole(options, Layout::dense, {{5}, {50}, 5, 50}, 2);
  Batch first = whole, second = whole;
  whole.run();
  first.sizes.tokens = {20};
  first.token_starts = {0, 20};
  first.run();
  second.token_starts = {20, 50};  // from where it lies
  second.run();
  for (int i = 0; i < 10; ++i) {
    const double a = std::exp(first.lse[i]), b = std::exp(second.lse[i]);
    EXPECT_NEAR(whole.lse[i], std::log(a + b), 1e-4);
    const double merged = (a * from_half_bits(*first.element(first.o, i / 2, i % 2, 7), options.dtype) +
                           b * from_half_bits(*second.element(second.o, i / 2, i % 2, 7), options.dtype)) /
                          (a + b);
    EXPECT_NEAR(from_half_bits(*whole.element(whole.o, i / 2, i % 2, 7), options.dtype), merged, 2e-3);
  }
}

// Queries, keys, values and outputs of two tokens that lie further apart than 2^32 bytes, all in one allocation.
void check_far_apart(const std::shared_ptr<Device>& device, const char* name) {
  constexpr std::int64_t kRow = (std::int64_t{1} << 31) + 64, kTensor = 1 << 12, kLse = 4 * kTensor;
  const MlaPrefillOptions options = {.heads = 2, .max_requests = 1, .max_query_tokens = 2, .max_tokens = 2};
  Batch batch(options, Layout::dense, {{2}, {2}, 2, 2}, 23);
  const testing_support::DeviceMemory on{device};
  const Buffer memory(device, 2 * (kRow + kLse + kTensor));
  const auto at = [&](std::int64_t element) { return static_cast<std::uint16_t*>(memory.data()) + element; };
  const auto elements = [&](int tensor) { return std::int64_t(batch.buffers[tensor].size()) / 2; };  // of a token
  for (int tensor = 0; tensor < 3; ++tensor)
    for (int i = 0; i < 2; ++i)
      device->copy_to_device(at(tensor * kTensor + i * kRow), &batch.buffers[tensor][i * elements(tensor)],
                             2 * elements(tensor));
  const Buffer starts = on.copy_of(batch.query_starts);
  MlaPrefill prefill(options, DeviceHandle(name));
  prefill.plan(static_cast<const int*>(starts.data()), static_cast<const int*>(starts.data()), 1);
  prefill.run({.q_nope = {at(0), kRow, 192},
               .q_rope = {at(128), kRow, 192},
               .query_tokens = 2,
               .k_nope = {at(kTensor), kRow, 192},
               .k_rope = {at(kTensor + 128), kRow, 192},
               .v = {at(2 * kTensor), kRow, 128},
               .tokens = 2,
               .o = at(3 * kTensor),
               .o_token_stride = kRow,
               .o_head_stride = 128,
               .lse = reinterpret_cast<float*>(at(kLse)),
               .lse_token_stride = kRow / 2,
               .lse_head_stride = 1});
  device->synchronize();
  for (int i = 0; i < 2; ++i) {
    device->copy_to_host(&batch.buffers[3][i * elements(3)], at(3 * kTensor + i * kRow), 2 * elements(3));
    device->copy_to_host(&batch.lse[i * options.heads], at(kLse + i * kRow), 4 * options.heads);
  }
  batch.check();
}

TEST(MlaPrefill, OffsetsGoBeyond32Bits) {
  const std::shared_ptr<Device> device = make_cpu_device();
  if (device->info().memory_bytes < std::size_t{8} << 30) GTEST_SKIP() << "of 4.3 GB little is touched, but all asked";
  check_far_apart(device, "cpu");
}

TEST(MlaPrefill, WhatHasNoMeaningIsRefused) {
  const auto refusal = [](MlaPrefillOptions options) {
    return error_of([&] { MlaPrefill(options, DeviceHandle("cpu")); });
  };
  EXPECT_TRUE(contains(refusal({.heads = 0}), "heads=0"));
  EXPECT_TRUE(contains(refusal({.max_requests = 2049}), "max_requests=2049"));
  EXPECT_TRUE(contains(refusal({.max_query_tokens = 0}), "max_query_tokens=0"));
  EXPECT_TRUE(contains(refusal({.max_tokens = (1 << 20) + 1}), "max_tokens=1048577"));
  EXPECT_EQ(refusal({.dtype = DType::float32}), "dtype=float32 is not supported: choose bfloat16 or float16");
  EXPECT_TRUE(contains(refusal({.scale = -1}), "scale=-1"));
  EXPECT_TRUE(contains(refusal({.scale = 1e-27f}), "2^-60 to 2^60"));
  EXPECT_TRUE(contains(refusal({.scale = 3e38f}), "2^-60 to 2^60"));

  const MlaPrefillOptions options = {.heads = 2, .max_requests = 2, .max_query_tokens = 4, .max_tokens = 20};
  Batch batch(options, Layout::dense, {{2, 2}, {20, 3}, 4, 23}, 3);
  MlaPrefill prefill(options, DeviceHandle("cpu"));
  EXPECT_TRUE(contains(error_of([&] { prefill.run(batch.tensors()); }), "call plan() first"));
  const auto refused_plan = [&](std::vector<int> query_starts, std::vector<int> token_starts) {
    return error_of([&] { prefill.plan(query_starts.data(), token_starts.data(), int(query_starts.size()) - 1); });
  };
  EXPECT_TRUE(contains(refused_plan({0, 2, 5}, {0, 20, 23}), "query_starts ends with 5"));
  EXPECT_TRUE(contains(refused_plan({0, 2, 1}, {0, 20, 23}), "query_starts[1]"));
  EXPECT_TRUE(contains(refused_plan({-1, 2, 3}, {0, 20, 23}), "query_starts[0]"));
  EXPECT_TRUE(contains(refused_plan({0, 2, 4}, {0, 21, 23}), "token_starts[0]"));
  EXPECT_TRUE(contains(refused_plan({0, 2, 4}, {3, 20, 19}), "token_starts[1]"));
  EXPECT_TRUE(contains(refused_plan({0, 1, 2, 3}, {0, 1, 2, 3}), "3 requests"));
  EXPECT_TRUE(contains(error_of([&] { prefill.plan(batch.query_starts.data(), nullptr, 1); }), "token_starts is"));
  prefill.plan(batch.query_starts.data(), batch.token_starts.data(), 2);
  const auto refused_run = [&](auto change) {
    MlaPrefillTensors tensors = batch.tensors();
    change(tensors);
    return error_of([&] { prefill.run(tensors); });
  };
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.o = nullptr; }), "o must point"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.lse = nullptr; }), "lse is missing"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.v.token_stride = 60; }), "v.token_stride=60"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.k_nope.head_stride = 0; }), "k_nope.head_stride=0"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.query_tokens = 3; }), "the plan has 4 queries"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.tokens = 22; }), "23 tokens"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.o = const_cast<void*>(with.v.data); }), "of its own"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.lse = reinterpret_cast<float*>(1); }), "to 4 bytes"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.o_head_stride = 120; }), "rows would overlap"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.lse_head_stride = 0; }), "a head stride of 0"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.lse = static_cast<float*>(with.o) + 1; }), "lse overlaps o"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.lse = (float*)with.q_nope.data; }), "lse must have memory"));
  EXPECT_TRUE(contains(refused_run([](auto& with) { with.lse_head_stride = 3; }), "lse with a token stride of 2"));
  EXPECT_EQ(refused_run([](auto&) {}), "");
  batch.check();

  MlaPrefill of_rows({.heads = 2, .max_requests = 2, .max_query_tokens = 4, .max_tokens = 20, .query_rows = true},
                     DeviceHandle("cpu"));
  const auto refused_rows = [&](MlaPrefill& with, const std::vector<int>& rows) {
    return error_of([&] {
      with.plan(batch.query_starts.data(), batch.token_starts.data(), 2, rows.empty() ? nullptr : rows.data(), nullptr);
    });
  };
  EXPECT_TRUE(contains(refused_rows(prefill, {3, 1, 0, 2}), "made without the option query_rows"));
  EXPECT_TRUE(contains(refused_rows(of_rows, {}), "query_rows is missing"));
  EXPECT_TRUE(contains(refused_rows(of_rows, {3, 1, 4, 2}), "query_rows[2] is 4"));
  EXPECT_TRUE(contains(refused_rows(of_rows, {3, 1, -1, 2}), "query_rows[2] is -1"));
  EXPECT_EQ(refused_rows(of_rows, {3, 1, 0, 2}), "");
  MlaPrefillTensors few = batch.tensors();
  few.query_tokens = 3;
  EXPECT_TRUE(contains(error_of([&] { of_rows.run(few); }), "the plan has 4 queries"));
}

TEST(MlaPrefill, AStepWithoutRequestsOrTokensIsNoError) {
  const MlaPrefillOptions options = {.heads = 2, .max_requests = 2, .max_query_tokens = 9};
  MlaPrefill prefill(options, DeviceHandle("cpu"));
  prefill.plan(nullptr, nullptr, 0);
  prefill.run({});
  MlaPrefillTensors tensors;
  tensors.query_tokens = 1;
  EXPECT_TRUE(contains(error_of([&] { prefill.run(tensors); }), "q_nope"));
  Batch batch(options, Layout::dense, {{4, 5}, {0, 0}, 9, 0}, 4);
  batch.run();
  batch.check();
}

TEST(MlaPrefill, KernelsAndWorkspaceFollowFromTheCapacity) {
  const std::unique_ptr<KernelPlan> plan = Registry::instance().find("cute.mla.flash_attention", "v0").make();
  MlaPrefillOptions options = {.max_requests = 100, .dtype = DType::float16};
  settle(options);
  const std::unique_ptr<PrefillKernels> kernels = plan->prefill(options);
  // On 132 multiprocessors, for three parts each: counters, log-sum-exps and outputs.
  EXPECT_EQ(kernels->workspace_bytes(), (256u + 100 * 32 + 396 * 8 + 255) / 256 * 256 + 396 * 128 * 129 * 4);
  options.batch_invariant = true;
  EXPECT_EQ(plan->prefill(options)->workspace_bytes(), (256u + 100 * 32 + 255) / 256 * 256);
  const std::vector<KernelSource> sources = kernels->sources();
  ASSERT_EQ(sources.size(), 2u);
  EXPECT_TRUE(contains(sources[0].instance, "plan_prefill<hypermla::cute::PlanPrefillTiling{"));
  EXPECT_TRUE(contains(sources[1].instance,
                       "prefill<hypermla::PrefillProblem{.dtype = hypermla::DType::float16, "
                       ".causal = true, .rows = false}>"));
  EXPECT_EQ(prefill_sources(*plan, DType::float16).size(), 6u);  // both of causal, not, and of rows
  EXPECT_FALSE(Registry::instance().find("cute.mla.flash_mla", "v0").make()->prefill(options));
}

// The kernels in CUDA Tile C++, which MlaPrefill takes on GPUs that have no others.
struct Portable {
  Portable(MlaPrefillOptions options, const std::shared_ptr<Device>& device) {
    settle(options);
    const std::unique_ptr<KernelPlan> plan = Registry::instance().find("cutile.mla.flash_attention", "v0").make();
    plan->target = Target::of(device->info());
    kernels = plan->prefill(options);
    workspace = Buffer(device, kernels->workspace_bytes());
    kernels->prepare(shared().compiler, *device, workspace.data());
  }
  void plan(const int* query_starts, const int* token_starts, int requests, StreamHandle stream = nullptr) {
    plan(query_starts, token_starts, requests, nullptr, stream);
  }
  void plan(const int* query_starts, const int* token_starts, int requests, const int* rows, StreamHandle stream) {
    kernels->plan({query_starts, token_starts, rows, requests}, stream);
  }
  void run(const MlaPrefillTensors& tensors, StreamHandle stream = nullptr) { kernels->run(tensors, stream); }
  void check() const { EXPECT_EQ(kernels->status(), 0); }

  std::unique_ptr<PrefillKernels> kernels;
  Buffer workspace;
};

TEST(PortablePrefill, AttendsToAnyMixOfRequestsAndLayouts) {
  const std::shared_ptr<Device> device = make_cpu_device();
  for (const Layout layout : {Layout::dense, Layout::views, Layout::heads_first})
    for (const bool causal : {false, true}) {
      const MlaPrefillOptions options = {.heads = 2,
                                         .max_requests = 40,
                                         .max_query_tokens = 400,
                                         .max_tokens = 300,
                                         .dtype = layout == Layout::views ? DType::float16 : DType::bfloat16,
                                         .causal = causal,
                                         .lse_base2 = layout == Layout::dense,
                                         .empty_lse_positive = causal};
      Portable prefill(options, device);
      // Tiles that end within a request and with it, requests without queries or tokens, fewer tokens than queries.
      for (const Sizes& sizes : {Sizes{{20, 0, 3, 130, 5, 64, 0}, {33, 8, 200, 140, 0, 30, 0}, 230, 420},
                                 Sizes{std::vector<int>(40, 1), std::vector<int>(40, 7), 50, 290},
                                 Sizes{{0, 0}, {5, 0}, 3, 9}, Sizes{{1, 200, 64, 128}, {300, 0, 64, 65}, 400, 440}}) {
        Batch batch(options, layout, sizes, 80);
        prefill.plan(batch.query_starts.data(), batch.token_starts.data(), int(sizes.queries.size()));
        prefill.run(batch.tensors());
        prefill.check();
        batch.check();
      }
    }
}

TEST(PortablePrefill, QueriesMayLieAnywhere) {
  const std::shared_ptr<Device> device = make_cpu_device();
  for (const Layout layout : {Layout::dense, Layout::heads_first}) {
    const MlaPrefillOptions options = {.heads = 2,
                                       .max_requests = 8,
                                       .max_query_tokens = 1500,
                                       .max_tokens = 300,
                                       .dtype = layout == Layout::dense ? DType::bfloat16 : DType::float16,
                                       .causal = layout == Layout::dense,
                                       .query_rows = true};
    Portable prefill(options, device);
    for (unsigned seed = 0; seed < 4; ++seed)
      for (const Sizes& sizes : {Sizes{{20, 0, 3, 130, 5, 64, 0, 0}, {33, 8, 200, 140, 0, 30, 0, 0}, 230, 420},
                                 Sizes{{1100}, {70}, 1300, 80}, Sizes{{0, 0}, {5, 0}, 3, 9}}) {
        Batch batch(options, layout, sizes, seed);
        const std::vector<int> rows = batch.rows;
        prefill.plan(batch.query_starts.data(), batch.token_starts.data(), int(sizes.queries.size()), rows.data(),
                     nullptr);
        prefill.run(batch.tensors());
        prefill.check();
        batch.check();
      }
    prefill.plan(nullptr, nullptr, 0);
    Batch none(options, layout, {{7}, {20}, 9, 20}, 1);
    const auto before = none.buffers[none.o.buffer];
    prefill.run(none.tensors());
    prefill.check();
    EXPECT_EQ(none.buffers[none.o.buffer], before);
  }
}

TEST(PortablePrefill, RowsThatDoNotExistAreReported) {
  const MlaPrefillOptions options = {
      .heads = 1, .max_requests = 3, .max_query_tokens = 70, .max_tokens = 100, .query_rows = true};
  Portable prefill(options, make_cpu_device());
  const std::vector<int> starts = {0, 2, 4}, tokens = {0, 50, 120};
  Batch batch(options, Layout::dense, {{2, 2}, {50, 70}, 6, 120}, 82);
  const auto status = [&](const std::vector<int>& rows) {
    prefill.plan(starts.data(), tokens.data(), 2, rows.data(), nullptr);
    prefill.run(batch.tensors());
    return prefill.kernels->status();
  };
  const auto before = batch.buffers[batch.o.buffer];
  EXPECT_EQ(status({9, 0, -1, 5}), kWrongQueryStarts);
  EXPECT_EQ(status({9, 0, 70, 5}), kWrongQueryStarts);
  EXPECT_EQ(batch.buffers[batch.o.buffer], before);
  EXPECT_EQ(status({9, 8, 7, 6}), 0);  // which these tensors do not have
  EXPECT_EQ(batch.buffers[batch.o.buffer], before);
}

TEST(PortablePrefill, WhatExceedsTheCapacityIsCutAndReported) {
  const MlaPrefillOptions options = {.heads = 1, .max_requests = 3, .max_query_tokens = 10, .max_tokens = 100};
  Portable prefill(options, make_cpu_device());
  const auto status = [&](const std::vector<int>& query_starts, const std::vector<int>& token_starts) {
    prefill.plan(query_starts.data(), token_starts.data(), 2);
    Batch batch(options, Layout::dense, {{4, 6}, {50, 70}, 10, 120}, 81);
    prefill.run(batch.tensors());
    return prefill.kernels->status();
  };
  EXPECT_EQ(status({0, 4, 10}, {0, 50, 120}), 0);
  EXPECT_EQ(status({0, 4, 11}, {0, 50, 120}), kWrongQueryStarts);
  EXPECT_EQ(status({0, 4, 3}, {0, 50, 120}), kWrongQueryStarts);
  EXPECT_EQ(status({-1, 4, 10}, {0, 50, 120}), kWrongQueryStarts);
  EXPECT_EQ(status({0, 4, 10}, {0, 101, 120}), kWrongTokenStarts);
  EXPECT_EQ(status({0, 4, 10}, {-3, 50, 20}), kWrongTokenStarts);
  EXPECT_EQ(status({0, 1 << 30, -(1 << 30)}, {1 << 30, -(1 << 30), 0}), kWrongQueryStarts | kWrongTokenStarts);
  EXPECT_EQ(status({5, 6, 7}, {2000000000, 2000000001, 2000000090}), 0);  // behind the tensors: nothing is read
}

class MlaPrefillOnHopper : public testing_support::OnHopper {
 protected:
  // A step on the device, recorded once for batches of the same sizes of tensors.
  struct Step {
    std::vector<Buffer> buffers;
    Buffer lse, query_starts, token_starts, rows;
    std::unique_ptr<Recording> recording;
  };
  template <class Prefill>
  Step record(Prefill& prefill, const Batch& batch) const {
    Step step;
    std::vector<void*> memory;
    for (const auto& buffer : batch.buffers) {
      step.buffers.push_back(buffer.empty() ? Buffer() : copy_of(buffer));
      memory.push_back(step.buffers.back().data());
    }
    step.lse = copy_of(batch.lse);
    step.query_starts = copy_of(batch.query_starts);
    step.token_starts = copy_of(batch.token_starts);
    if (batch.at.query_rows) step.rows = Buffer(device_, sizeof(int) * batch.sizes.query_rows);
    const MlaPrefillTensors tensors = batch.tensors(memory, static_cast<float*>(step.lse.data()));
    step.recording = device_->record([&prefill, tensors, requests = int(batch.sizes.queries.size()),
                                      query_starts = static_cast<const int*>(step.query_starts.data()),
                                      token_starts = static_cast<const int*>(step.token_starts.data()),
                                      rows = static_cast<const int*>(step.rows.data())](StreamHandle stream) {
      if (rows)
        prefill.plan(query_starts, token_starts, requests, rows, stream);
      else
        prefill.plan(query_starts, token_starts, requests, stream);
      for (int layer = 0; layer < 2; ++layer) prefill.run(tensors, stream);
    });
    return step;
  }
  // Replays over the contents of `batch`, which still has its poison, and compares with the CPU: what that leaves
  // untouched must have the bits of the poison.
  template <class Prefill>
  void compare(Prefill& prefill, const Step& step, Batch& batch) const {
    for (std::size_t i = 0; i < batch.buffers.size(); ++i)
      if (!batch.buffers[i].empty()) copy(step.buffers[i], batch.buffers[i]);
    copy(step.lse, batch.lse);
    copy(step.query_starts, batch.query_starts);
    copy(step.token_starts, batch.token_starts);
    if (batch.at.query_rows && !batch.rows.empty())
      device_->copy_to_device(step.rows.data(), batch.rows.data(), sizeof(int) * batch.rows.size());
    step.recording->replay(device_->stream());
    device_->synchronize();
    prefill.check();
    const auto got = back<std::uint16_t>(step.buffers[batch.o.buffer]);
    const auto got_lse = back<float>(step.lse);
    batch.run();
    const auto& expected = batch.buffers[batch.o.buffer];
    double worst = 0, worst_lse = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (expected[i] == kNan) {
        ASSERT_EQ(got[i], kNan) << "element " << i << " of o was written";
        continue;
      }
      const float wanted = from_half_bits(expected[i], batch.at.dtype);
      const double difference = std::abs(from_half_bits(got[i], batch.at.dtype) - wanted) / (1 + std::abs(wanted));
      worst = worse(worst, difference);
    }
    for (std::size_t i = 0; i < batch.lse.size(); ++i) {
      const float wanted = batch.lse[i];
      if (std::isfinite(wanted)) {
        const double difference = std::abs(got_lse[i] - wanted);
        worst_lse = worse(worst_lse, difference);
      } else {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(got_lse[i]), std::bit_cast<std::uint32_t>(wanted)) << "lse " << i;
      }
    }
    EXPECT_TRUE(worst <= 0.015) << "o is off by " << worst;
    EXPECT_TRUE(worst_lse <= 2e-3) << "lse is off by " << worst_lse;
  }
};

// Requests of all kinds that fill at most `query_rows` and `token_rows`; the others are padding.
Sizes random_sizes(std::mt19937& random, int requests, int query_rows, int token_rows) {
  auto below = [&](int end) { return int(random() % unsigned(end)); };
  Sizes sizes = {{}, {}, query_rows, token_rows};
  for (int r = 0; r < requests; ++r) {
    const int kind = below(8);
    const int queries = kind == 0 ? 0 : kind == 1 ? 1 : kind == 2 ? 128 * (1 + below(3)) : 1 + below(600);
    const int tokens = kind == 3   ? 0
                       : kind == 4 ? 1 + below(20)
                       : kind == 5 ? 128 * (1 + below(10))
                       : kind == 6 ? queries
                                   : 1 + below(3000);
    const bool fits = queries <= query_rows && tokens <= token_rows;
    sizes.queries.push_back(fits ? queries : 0);
    sizes.tokens.push_back(fits ? tokens : 0);
    query_rows -= sizes.queries.back();
    token_rows -= sizes.tokens.back();
  }
  return sizes;
}

TEST_F(MlaPrefillOnHopper, RandomBatchesAreAsOnTheCpu) {
  std::mt19937 random(1);
  for (int i = 0; i < 12; ++i) {
    const Layout layout = Layout(i % 3);
    const MlaPrefillOptions options = {.heads = i % 4 == 3 ? 1 : 2 + i % 2,
                                       .max_requests = 12,
                                       .max_query_tokens = 2000,
                                       .max_tokens = 3000,
                                       .dtype = i % 5 == 4 ? DType::float16 : DType::bfloat16,
                                       .causal = i % 2 == 0,
                                       .lse_base2 = i % 3 == 1,
                                       .empty_lse_positive = i % 4 == 1};
    SCOPED_TRACE(testing::Message() << "batch " << i);
    Batch batch(options, layout, random_sizes(random, 11, 1990, 9000), 10 + i, i % 3 == 2);
    MlaPrefill prefill(options, DeviceHandle("cuda"));
    const Step step = record(prefill, batch);
    compare(prefill, step, batch);
  }
}

TEST_F(MlaPrefillOnHopper, PortableKernelsAttendToTheSame) {
  std::vector<MlaPrefillOptions> options;
  std::vector<Portable> kernels;  // all are there before the first runs, for scripts/pack_gpu_checks.sh
  for (int i = 0; i < 8; ++i) {
    options.push_back({.heads = 1 + i % 3,
                       .max_requests = 12,
                       .max_query_tokens = i == 5 ? 60 : 2000,
                       .max_tokens = 3000,
                       .dtype = i == 4 || i == 7 ? DType::float16 : DType::bfloat16,
                       .causal = i % 2 == 0,
                       .lse_base2 = i % 3 == 1,
                       .empty_lse_positive = i == 2,
                       .query_rows = i >= 6});
    kernels.emplace_back(options.back(), device_);
  }
  std::mt19937 random(3);
  for (int i = 0; i < 8; ++i) {
    SCOPED_TRACE(testing::Message() << "batch " << i);
    const int rows = options[i].max_query_tokens - 10;
    const auto batch = [&](unsigned seed, bool growing) {
      return Batch(options[i], Layout(i % 3), random_sizes(random, 11, rows, 9000), seed, growing);
    };
    const Step step = record(kernels[i], batch(90, false));
    for (int round = 0; round < 3; ++round) {
      Batch now = batch(91 + round, round == 1);
      compare(kernels[i], step, now);
    }
  }
}

TEST_F(MlaPrefillOnHopper, OffsetsGoBeyond32Bits) { check_far_apart(device_, "cuda"); }

TEST_F(MlaPrefillOnHopper, ManyHeadsShareTheMultiprocessors) {
  for (const bool causal : {false, true}) {
    const MlaPrefillOptions options = {
        .heads = 72, .max_requests = 4, .max_query_tokens = 600, .max_tokens = 700, .causal = causal};
    Batch batch(options, Layout::views, {{300, 0, 17, 140}, {400, 0, 130, 140}, 460, 700}, 40);
    MlaPrefill prefill(options, DeviceHandle("cuda"));
    const Step step = record(prefill, batch);
    compare(prefill, step, batch);
  }
}

TEST_F(MlaPrefillOnHopper, ARecordingFollowsItsStarts) {
  std::mt19937 random(2);
  for (const bool causal : {false, true}) {
    const MlaPrefillOptions options = {
        .heads = 3, .max_requests = 40, .max_query_tokens = 2000, .max_tokens = 3000, .causal = causal};
    MlaPrefill prefill(options, DeviceHandle("cuda"));
    const auto batch = [&](const Sizes& sizes, unsigned seed) { return Batch(options, Layout::views, sizes, seed); };
    const Step step = record(prefill, batch(random_sizes(random, 40, 2000, 6000), 20));
    for (int round = 0; round < 4; ++round) {
      SCOPED_TRACE(testing::Message() << "round " << round);
      Sizes sizes = random_sizes(random, 40, 2000, 6000);
      if (round == 1) sizes.queries.assign(40, 0);  // nothing to do
      if (round == 2) sizes = {std::vector<int>(40, 1), std::vector<int>(40, 150), 2000, 6000};
      Batch now = batch(sizes, 30 + round);
      compare(prefill, step, now);
    }
  }
}

// Tiles of one-row copies and of whole boxes, whole and cut into parts.
TEST_F(MlaPrefillOnHopper, QueriesMayLieAnywhere) {
  std::mt19937 random(4);
  for (int i = 0; i < 4; ++i) {
    const MlaPrefillOptions options = {.heads = 1 + i,
                                       .max_requests = 12,
                                       .max_query_tokens = 2000,
                                       .max_tokens = 30000,
                                       .dtype = i == 1 ? DType::float16 : DType::bfloat16,
                                       .causal = false,
                                       .query_rows = true,
                                       .batch_invariant = i == 2};
    MlaPrefill prefill(options, DeviceHandle("cuda"));
    const auto batch = [&](const Sizes& sizes, unsigned seed) { return Batch(options, Layout(i % 3), sizes, seed); };
    const auto sizes = [&](int round) {
      if (round % 3 < 2) return random_sizes(random, 12, 2000, 31000);
      return Sizes{{0, 7, 0, 130, 0, 64, 0, 1, 0, 0, 0, 0}, {0, 8000, 0, 3000, 0, 5000, 0, 9000}, 2000, 31000};
    };
    const Step step = record(prefill, batch(random_sizes(random, 12, 2000, 31000), 100));
    for (int round = 0; round < 8; ++round) {
      SCOPED_TRACE(testing::Message() << "object " << i << ", round " << round);
      Sizes of = sizes(round);
      of.tokens.resize(12);
      Batch now = batch(of, 100 + round);
      compare(prefill, step, now);
    }
  }
}

TEST_F(MlaPrefillOnHopper, RowsBeyondTheCapacityAreReported) {
  const MlaPrefillOptions options = {
      .heads = 2, .max_requests = 2, .max_query_tokens = 10, .max_tokens = 100, .causal = false, .query_rows = true};
  MlaPrefill prefill(options, DeviceHandle("cuda"));
  const Buffer starts = copy_of(std::vector<int>{0, 4, 6}), tokens = copy_of(std::vector<int>{0, 90, 95});
  const auto reported = [&](const std::vector<int>& rows) {
    const Buffer on_device = copy_of(rows);
    prefill.plan(static_cast<const int*>(starts.data()), static_cast<const int*>(tokens.data()), 2,
                 static_cast<const int*>(on_device.data()), nullptr);
    return error_of([&] { prefill.check(); });
  };
  EXPECT_EQ(reported({9, 0, 3, 5, 1, 2}), "");
  EXPECT_TRUE(contains(reported({9, 0, 3, 5, 1, 10}), "query_rows"));
  EXPECT_TRUE(contains(reported({9, 0, -3, 5, 1, 2}), "query_rows"));
}

TEST_F(MlaPrefillOnHopper, AStepWithoutTokensIsAnswered) {
  const MlaPrefillOptions options = {.heads = 2, .max_requests = 3, .max_query_tokens = 200};
  Batch batch(options, Layout::dense, {{4, 130, 0}, {0, 0, 0}, 140, 0}, 60);
  MlaPrefill prefill(options, DeviceHandle("cuda"));
  const Step step = record(prefill, batch);
  compare(prefill, step, batch);
}

// Few tiles of many tokens: each is cut into up to 32 parts. The largest scores come last, or the first part has them.
TEST_F(MlaPrefillOnHopper, LongRequestsOfFewQueriesAreCut) {
  for (int i = 0; i < 6; ++i) {
    SCOPED_TRACE(testing::Message() << "batch " << i);
    const MlaPrefillOptions options = {.heads = 1 + i % 3,
                                       .max_requests = 8,
                                       .max_query_tokens = 700,
                                       .max_tokens = 30000,
                                       .dtype = i == 4 ? DType::float16 : DType::bfloat16,
                                       .causal = i % 2 == 0,
                                       .lse_base2 = i % 3 == 1};
    MlaPrefill prefill(options, DeviceHandle("cuda"));
    const auto batch = [&](const Sizes& sizes, bool growing) {
      return Batch(options, Layout(i % 3), sizes, 70 + i, growing);
    };
    const Step step = record(prefill, batch({{0, 300, 1, 200}, {0, 0, 0, 0}, 700, 31000}, false));
    for (const auto& [queries, tokens] :
         {std::pair<std::vector<int>, std::vector<int>>{{0, 1, 7, 0}, {0, 20000, 9000, 0}},
          {{300, 0, 1, 200}, {1500, 0, 17000, 300}},
          {{129, 5, 0, 3}, {5000, 7, 0, 1023}},
          {{0, 0, 3, 0}, {0, 0, 29999, 0}}}) {
      Batch now = batch({queries, tokens, 700, 31000}, i % 2 == 1);
      compare(prefill, step, now);
    }
  }
}

// Other work may use the workspace before a plan, and between a step's last run and the next plan.
TEST_F(MlaPrefillOnHopper, APlanNeedsNothingOfTheWorkspace) {
  const MlaPrefillOptions options = {.heads = 2, .max_requests = 4, .max_query_tokens = 400, .max_tokens = 20000};
  Buffer workspace(device_, MlaPrefill::workspace_bytes(options, DeviceHandle("cuda")));
  MlaPrefill prefill(options, DeviceHandle("cuda"), workspace.data());
  const auto batch = [&](unsigned seed) {
    return Batch(options, Layout::dense, {{3, 200}, {20000, 9000}, 400, 30000}, seed);
  };
  const Step step = record(prefill, batch(60));
  for (int i = 0; i < 3; ++i) {
    device_->fill(workspace.data(), 0xff >> i, prefill.workspace_bytes());
    Batch now = batch(61 + i);
    compare(prefill, step, now);
  }
}

TEST_F(MlaPrefillOnHopper, BitsDependOnNoNeighbour) {
  for (const bool causal : {false, true}) {
    const MlaPrefillOptions options = {.heads = 2,
                                       .max_requests = 3,
                                       .max_query_tokens = 400,
                                       .max_tokens = 900,
                                       .causal = causal,
                                       .batch_invariant = true};
    MlaPrefill prefill(options, DeviceHandle("cuda"));
    Batch alone(options, Layout::dense, {{200}, {700}, 200, 700}, 50);
    Batch batch(options, Layout::dense, {{50, 200, 128}, {300, 700, 900}, 400, 1900}, 51);
    // The next request's queries have large scores.
    for (int i = 250; i < 378; ++i)
      for (int c = 0; c < 2 * 192; ++c) {
        std::uint16_t& x = *batch.element(batch.q_nope, i, 0, c);
        x = to_half_bits(16 * from_half_bits(x, options.dtype), options.dtype);
      }
    const auto copy_rows = [&](const Place& to, const Place& from, int rows, int first, int width) {
      for (int i = 0; i < rows; ++i)
        std::copy_n(alone.element(from, i, 0, 0), 2 * width, batch.element(to, first + i, 0, 0));
    };
    copy_rows(batch.q_nope, alone.q_nope, 200, 50, 192);
    copy_rows(batch.k_nope, alone.k_nope, 700, 300, 192);
    copy_rows(batch.v, alone.v, 700, 300, 128);
    const Step one = record(prefill, alone);
    compare(prefill, one, alone);
    const auto bits = back<std::uint16_t>(one.buffers[alone.o.buffer]);
    const auto lse = back<float>(one.lse);
    const Step all = record(prefill, batch);
    compare(prefill, all, batch);
    const auto all_bits = back<std::uint16_t>(all.buffers[batch.o.buffer]);
    const auto all_lse = back<float>(all.lse);
    EXPECT_TRUE(std::equal(bits.begin(), bits.end(), &all_bits[std::size_t(50) * 2 * 128]));
    EXPECT_TRUE(std::equal(lse.begin(), lse.end(), &all_lse[50 * 2]));
  }
}

TEST_F(MlaPrefillOnHopper, WhatExceedsTheCapacityIsReported) {
  const MlaPrefillOptions options = {.heads = 2, .max_requests = 2, .max_query_tokens = 10, .max_tokens = 100};
  MlaPrefill prefill(options, DeviceHandle("cuda"));
  const auto reported = [&](const std::vector<int>& query_starts, const std::vector<int>& token_starts) {
    const Buffer queries = copy_of(query_starts), tokens = copy_of(token_starts);
    prefill.plan(static_cast<const int*>(queries.data()), static_cast<const int*>(tokens.data()), 2);
    return error_of([&] { prefill.check(); });
  };
  EXPECT_EQ(reported({0, 4, 10}, {0, 100, 101}), "");
  EXPECT_TRUE(contains(reported({0, 4, 11}, {0, 100, 101}), "max_query_tokens=10"));
  EXPECT_TRUE(contains(reported({0, 4, 10}, {0, 101, 102}), "max_tokens=100"));
}

}  // namespace
}  // namespace hypermla::prefill_test
