// Requests that share decompressed prefixes: MlaDecode over their own tokens, the value projection, and MlaPrefill that
// accumulates, against direct attention over all tokens in double precision; on the CPU and on a Hopper GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>

#include "hypermla/mla_cache.h"
#include "hypermla/mla_decode.h"
#include "hypermla/mla_prefill.h"
#include "hypermla/plan/inputs.h"
#include "support.h"

namespace hypermla::shared_prefix_test {
namespace {

using testing_support::worse;

constexpr int kHeads = 3, kPage = 16, kLatent = 512, kRope = 64, kWidth = kLatent + kRope, kColumns = 128, kWide = 192;
constexpr std::uint16_t kNan = 0x7fc0;

using Bits = std::vector<std::uint16_t>;
double value(std::uint16_t bits) { return from_half_bits(bits, DType::bfloat16); }

// A step of requests in groups that are neighbours: each group shares a prefix or has none. In host memory.
struct Step {
  std::vector<int> own = {20, 9, 0, 15, 33},
                   queries = {3, 1, 0, 2, 2};                         // the first two share a prefix, the last has one
  std::vector<int> group_of = {0, 0, 1, 1, 2}, prefix = {37, 0, 50};  // tokens
  std::vector<int> starts = {0, 3, 4, 4, 6, 8}, group_starts = {0, 4, 6, 8}, prefix_starts = {0, 37, 37, 87};
  static constexpr int kRows = 9, kPages = 16, kTableWidth = 4;  // a row more than there are queries

  Step() {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const auto fill = [&](Bits& to, std::size_t first, std::size_t count, float scale) {
      for (std::size_t i = first; i < first + count; ++i) to[i] = to_half_bits(scale * normal(random), DType::bfloat16);
    };
    q.assign(kRows * kHeads * kWide, kNan);
    fill(q, 0, (kRows - 1) * kHeads * kWide, 1);
    w_uk.resize(kHeads * kColumns * kLatent), w_uv = w_uk;
    fill(w_uk, 0, w_uk.size(), 1 / std::sqrt(512.0f));
    fill(w_uv, 0, w_uv.size(), 1 / std::sqrt(512.0f));
    cache.assign(std::size_t(kPages) * kPage * kWidth, kNan);
    table.assign(own.size() * kTableWidth, 1 << 30);
    prefix_table.assign(prefix.size() * kTableWidth, 1 << 30);
    std::vector<int> free(kPages);
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), random);
    const auto place = [&](int tokens, int* pages) {
      for (int t = 0; t < tokens; ++t) {
        if (t % kPage == 0) pages[t / kPage] = free.back(), free.pop_back();
        fill(cache, (std::size_t(pages[t / kPage]) * kPage + t % kPage) * kWidth, kWidth, 1);
      }
    };
    for (std::size_t r = 0; r < own.size(); ++r) place(own[r], &table[r * kTableWidth]);
    for (std::size_t g = 0; g < prefix.size(); ++g) place(prefix[g], &prefix_table[g * kTableWidth]);
  }

  // The first 128 columns of the queries in the latent space, and the RoPE columns: [rows, heads, 576].
  Bits absorbed() const {
    Bits all(kRows * kHeads * kWidth, kNan);
    for (int row = 0; row < (kRows - 1) * kHeads; ++row) {
      const Bits::const_iterator from = q.begin() + row * kWide;
      for (int c = 0; c < kLatent; ++c) {
        double sum = 0;
        for (int d = 0; d < kColumns; ++d)
          sum += value(from[d]) * value(w_uk[(row % kHeads * kColumns + d) * kLatent + c]);
        all[row * kWidth + c] = to_half_bits(float(sum), DType::bfloat16);
      }
      std::copy_n(from + kColumns, kRope, &all[row * kWidth + kLatent]);
    }
    return all;
  }
  // Outputs [rows, heads, 512] times the value projection: [rows, heads, 128]. An engine has a product for it.
  Bits projected(const Bits& o) const {
    Bits all(kRows * kHeads * kColumns, kNan);
    for (int row = 0; row < (kRows - 1) * kHeads; ++row)
      for (int d = 0; d < kColumns; ++d) {
        double sum = 0;
        for (int c = 0; c < kLatent; ++c)
          sum += value(o[row * kLatent + c]) * value(w_uv[(row % kHeads * kLatent + c) * kColumns + d]);
        all[row * kColumns + d] = to_half_bits(float(sum), DType::bfloat16);
      }
    return all;
  }
  // Direct attention of a query of a request: o and the log-sum-exp.
  std::pair<std::vector<double>, double> expected(int request, int query, int head) const {
    const int row = (starts[request] + query) * kHeads + head, group = group_of[request];
    std::vector<std::size_t> tokens;
    const auto add = [&](int count, const int* pages) {
      for (int t = 0; t < count; ++t) tokens.push_back((std::size_t(pages[t / kPage]) * kPage + t % kPage) * kWidth);
    };
    add(prefix[group], &prefix_table[group * kTableWidth]);
    add(own[request] - queries[request] + query + 1, &table[request * kTableWidth]);
    double total = 0;
    std::vector<double> latent(kLatent), o(kColumns), q_latent(kLatent);
    for (int c = 0; c < kLatent; ++c)
      for (int d = 0; d < kColumns; ++d)
        q_latent[c] += value(q[row * kWide + d]) * value(w_uk[(head * kColumns + d) * kLatent + c]);
    for (const std::size_t at : tokens) {
      double score = 0;
      for (int c = 0; c < kLatent; ++c) score += q_latent[c] * value(cache[at + c]);
      for (int c = 0; c < kRope; ++c) score += value(q[row * kWide + kColumns + c]) * value(cache[at + kLatent + c]);
      const double weight = std::exp(score / std::sqrt(192.0));
      total += weight;
      for (int c = 0; c < kLatent; ++c) latent[c] += weight * value(cache[at + c]);
    }
    for (int d = 0; d < kColumns; ++d)
      for (int c = 0; c < kLatent; ++c) o[d] += latent[c] / total * value(w_uv[(head * kLatent + c) * kColumns + d]);
    return {o, std::log(total)};
  }

  Bits q, w_uk, w_uv, cache;  // [rows, heads, 192], [heads, 128, 512], [heads, 512, 128], [pages, page, 576]
  std::vector<int> table, prefix_table;
};

struct OnDevice : testing_support::DeviceMemory {
  OnDevice(std::shared_ptr<Device> device, const std::string& name) : DeviceMemory{std::move(device)}, name(name) {}

  void check() {
    const DeviceHandle handle(name);
    const auto ints = [](const Buffer& buffer) { return static_cast<const int*>(buffer.data()); };
    const Step step;
    const int requests = int(step.own.size()), groups = int(step.prefix.size()), tokens = step.prefix_starts.back() + 3;

    // Once: keys and values of the prefixes, one after the other. The last three tokens belong to no request.
    const Buffer cache = copy_of(step.cache), w_uk = copy_of(step.w_uk), w_uv = copy_of(step.w_uv);
    const Buffer k = copy_of(Bits(tokens * kHeads * kWide, kNan)), v = copy_of(Bits(tokens * kHeads * kColumns, kNan));
    const Buffer prefix_table = copy_of(step.prefix_table);
    MlaCacheOps ops(DType::bfloat16, handle);
    for (int g = 0; g < groups; ++g) {
      const std::int64_t first = step.prefix_starts[g] * kHeads;
      auto* const keys = static_cast<std::uint16_t*>(k.data()) + first * kWide;
      ops.decompress_prefix(
          {.cache = MlaCache::fused(cache.data(), Step::kPages, kPage),
           .block_table = ints(prefix_table) + g * Step::kTableWidth,
           .tokens = step.prefix[g],
           .heads = kHeads,
           .w_uk = {w_uk.data(), kColumns * kLatent, kLatent, 1},
           .w_uv = {w_uv.data(), kLatent * kColumns, kColumns, 1},
           .k = {keys, kHeads * kWide, kWide},
           .k_rope = {keys + kColumns, kHeads * kWide, kWide},
           .v = {static_cast<std::uint16_t*>(v.data()) + first * kColumns, kHeads * kColumns, kColumns}});
    }

    // Once per step: two plans.
    MlaDecode decode({.heads = kHeads, .max_requests = 8, .max_queries = 3, .max_tokens = 64, .page = kPage}, handle);
    MlaPrefill prefixes({.heads = kHeads,
                         .max_requests = 4,
                         .max_query_tokens = 12,
                         .max_tokens = 64,
                         .causal = false,
                         .accumulate = true},
                        handle);
    const Buffer lengths = copy_of(step.own), starts = copy_of(step.starts), table = copy_of(step.table);
    const Buffer group_starts = copy_of(step.group_starts), prefix_starts = copy_of(step.prefix_starts);
    decode.plan(ints(lengths), ints(starts), requests);
    prefixes.plan(ints(group_starts), ints(prefix_starts), groups);

    // Once per layer.
    const Buffer absorbed = copy_of(step.absorbed()), q = copy_of(step.q);
    const Buffer latent = copy_of(Bits(Step::kRows * kHeads * kLatent, kNan));
    const Buffer lse = copy_of(std::vector<float>(Step::kRows * kHeads, -5));
    decode.run(MlaDecodeTensors::fused(kHeads, kPage, absorbed.data(), Step::kRows, cache.data(), Step::kPages,
                                       ints(table), Step::kTableWidth, latent.data(), static_cast<float*>(lse.data())));
    device_->synchronize();
    const Bits own = step.projected(back<std::uint16_t>(latent));
    const auto own_lse = back<float>(lse);
    const Buffer o = copy_of(own);
    const MlaPrefillTensors tensors = MlaPrefillTensors::dense(kHeads, q.data(), Step::kRows, k.data(), v.data(),
                                                               tokens, o.data(), static_cast<float*>(lse.data()));
    prefixes.run(tensors);
    device_->synchronize();
    decode.check();
    prefixes.check();
    const auto got = back<std::uint16_t>(o);
    const auto got_lse = back<float>(lse);
    for (int r = 0; r < requests; ++r)
      for (int i = 0; i < step.queries[r]; ++i)
        for (int head = 0; head < kHeads; ++head) {
          const auto [wanted, wanted_lse] = step.expected(r, i, head);
          const int row = (step.starts[r] + i) * kHeads + head;
          EXPECT_TRUE(std::abs(got_lse[row] - wanted_lse) <= 0.02) << got_lse[row] << " " << wanted_lse;
          double worst = 0;
          for (int d = 0; d < kColumns; ++d) {
            const double difference = std::abs(value(got[row * kColumns + d]) - wanted[d]);
            worst = worse(worst, difference);
          }
          EXPECT_TRUE(worst <= 0.02) << "request " << r << " query " << i << " head " << head << ": " << worst;
        }
    // Requests 2 and 3 have no prefix, and the last row no request.
    expect_same(own, got, 4, 6);
    EXPECT_TRUE(std::equal(&own_lse[4 * kHeads], &own_lse[6 * kHeads], &got_lse[4 * kHeads]));
    EXPECT_EQ(got_lse.back(), -5);

    // A plan of fewer queries: what the one before it attended to the others with is not merged again.
    copy(o, own), copy(lse, own_lse);
    prefixes.plan(ints(group_starts), ints(prefix_starts), 1);
    prefixes.run(tensors);
    device_->synchronize();
    const auto fewer = back<std::uint16_t>(o);
    expect_same(got, fewer, 0, 4);
    expect_same(own, fewer, 4, 8);

    // Into nothing: the attention over the prefixes alone.
    copy(o, Bits(own.size(), kNan));
    copy(lse, std::vector<float>(own_lse.size(), INFINITY));
    prefixes.run(tensors);
    device_->synchronize();
    EXPECT_FALSE(std::isnan(value(back<std::uint16_t>(o)[0])));
    EXPECT_LT(back<float>(lse)[0], got_lse[0]);
    EXPECT_EQ(back<float>(lse).back(), -INFINITY);
  }
  static void expect_same(const Bits& one, const Bits& other, int first, int last) {
    const std::size_t row = kHeads * kColumns;
    EXPECT_TRUE(std::equal(one.begin() + first * row, one.begin() + last * row, other.begin() + first * row))
        << "rows " << first << " to " << last;
  }

  std::string name;
};

TEST(SharedPrefix, IsAttendedOnceForAllWhoShareIt) { OnDevice(make_cpu_device(), "cpu").check(); }

class SharedPrefixOnHopper : public testing_support::OnHopper {};
TEST_F(SharedPrefixOnHopper, IsAttendedOnceForAllWhoShareIt) { OnDevice(device_, "cuda").check(); }

TEST(SharedPrefix, TheWorkspaceHoldsAnOutput) {
  const MlaPrefillOptions plain = {.heads = 4, .max_requests = 3, .max_query_tokens = 10};
  MlaPrefillOptions accumulating = plain;
  accumulating.accumulate = true;
  const DeviceHandle cpu("cpu");
  EXPECT_GE(MlaPrefill::workspace_bytes(accumulating, cpu),
            MlaPrefill::workspace_bytes(plain, cpu) + 10 * 4 * (128 * 2 + 4));
  MlaPrefill prefill(accumulating, cpu);
  EXPECT_TRUE(testing_support::contains(prefill.explain(), "merged into what is there"));
  prefill.plan(nullptr, nullptr, 0);
  MlaPrefillTensors tensors;
  tensors.query_tokens = 1;
  EXPECT_TRUE(testing_support::contains(testing_support::error_of([&] { prefill.run(tensors); }), "q_nope"));
}

}  // namespace
}  // namespace hypermla::shared_prefix_test
