// The portable decoding kernels (kernels/cutile/decode), run on this CPU, against MlaDecode's plain reference: any
// lengths, queries, pages, strides and lists. What must not be read is NaN; what must not be written stays as it was.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>

#include "hypermla/base/half.h"
#include "hypermla/mla_decode.h"
#include "hypermla/plan/decode.h"
#include "hypermla/plan/registry.h"
#include "support.h"

namespace hypermla::paged_decode_test {
namespace {

using testing_support::contains;
using testing_support::error_of;
using testing_support::worse;

constexpr const char* kKernel = "cutile.mla.flash_mla_split_kv";
constexpr int kLatent = 512, kRope = 64;

// A step of an engine with strides of its own: heads before tokens or behind them, pages apart, a wide table.
struct Step {
  Step(const MlaDecodeOptions& options, unsigned seed) : at(options), random(seed) {
    const int requests = 1 + below(at.max_requests);
    for (int r = 0; r < requests; ++r) {
      lengths.push_back(below(5) == 0 ? 0 : below(3) == 0 ? at.max_tokens : below(at.max_tokens + 1));
      starts.push_back(starts.back() + (at.max_queries == 1 ? int(below(4) > 0) : below(at.max_queries + 1)));
    }
    tokens = starts.back() + 1;  // a row more, which must not be written
    heads_first = below(2);
    const int gap = 8 * below(3);
    width = (at.sparse ? at.max_tokens : (at.max_tokens + at.page - 1) / at.page) + 2;
    const std::int64_t token_stride = kLatent + kRope + (at.sparse ? 0 : gap);
    page_stride = at.page * token_stride + (at.sparse ? 0 : 64 * below(2));
    pages = at.sparse ? 9 : requests * width;
    cache.assign(std::size_t(pages * page_stride), nan());
    table.assign(std::size_t(requests) * width, 1 << 30);
    std::vector<int> free(pages);
    for (int i = 0; i < pages; ++i) free[i] = i;
    std::shuffle(free.begin(), free.end(), random);
    for (int r = 0; r < requests; ++r)
      for (int i = 0; i < lengths[r]; ++i) {
        int slot;
        if (at.sparse) {
          slot = table[std::size_t(r) * width + i] = below(5) ? below(pages * at.page) : -1;
          if (below(9) == 0) slot = table[std::size_t(r) * width + i] = pages * at.page + below(3);
          if (slot < 0 || slot >= pages * at.page) continue;
        } else {
          int& page = table[std::size_t(r) * width + i / at.page];
          if (i % at.page == 0) page = free.back(), free.pop_back();
          slot = page * at.page + i % at.page;
        }
        auto* token = &cache[std::size_t(slot / at.page * page_stride + slot % at.page * token_stride)];
        if (token[0] == nan())
          for (int c = 0; c < kLatent + kRope; ++c) token[c] = value();
      }
    const std::size_t rows = std::size_t(tokens) * at.heads;
    latent.resize(rows * kLatent);
    rope.resize(rows * 3 * kRope);  // the last third of rows of 192
    for (auto* all : {&latent, &rope})
      for (auto& one : *all) one = value();
    sinks.resize(at.heads);
    for (float& sink : sinks) sink = normal(random);
    const std::int64_t heads = at.heads;
    tensors.q_latent = {latent.data(), heads_first ? kLatent : heads * kLatent,
                        heads_first ? tokens * kLatent : kLatent};
    tensors.q_rope = {&rope[2 * kRope], heads * 3 * kRope, 3 * kRope};
    tensors.query_tokens = tokens;
    tensors.cache_latent = cache.data();
    tensors.cache_rope = cache.data() + kLatent;
    tensors.latent_page_stride = tensors.rope_page_stride = page_stride;
    tensors.latent_token_stride = tensors.rope_token_stride = token_stride;
    tensors.pages = pages;
    tensors.block_table = table.data();
    tensors.table_stride = width;
    tensors.o_head_stride = kLatent + gap;
    tensors.o_token_stride = heads * tensors.o_head_stride;
    tensors.lse_head_stride = heads_first ? at.max_queries : 1;
    tensors.lse_token_stride = heads_first ? 1 : heads;
    tensors.lse_request_stride = heads_first ? heads * at.max_queries : 0;
    if (below(2)) tensors.sinks = sinks.data();
  }
  // The outputs, behind a poison.
  std::pair<std::vector<std::uint16_t>, std::vector<float>> run(MlaDecode& decode) {
    std::vector<std::uint16_t> o(std::size_t(tokens * tensors.o_token_stride), nan());
    std::vector<float> lse(std::size_t(std::max<std::size_t>(tokens, lengths.size() * at.max_queries)) * at.heads,
                           7e7f);
    tensors.o = o.data();
    tensors.lse = lse.data();
    decode.plan(lengths.data(), starts.data(), int(lengths.size()));
    decode.run(tensors);
    decode.check();
    return {o, lse};
  }

  int below(int end) { return int(random() % unsigned(end)); }
  std::uint16_t nan() const { return at.dtype == DType::bfloat16 ? 0x7fc0 : 0x7e00; }
  std::uint16_t value() { return from_float(normal(random), at.dtype); }

  MlaDecodeOptions at;
  std::mt19937 random;
  std::normal_distribution<float> normal;
  std::vector<int> lengths, starts = {0}, table;
  int tokens = 0, width = 0, pages = 0;
  bool heads_first = false;
  std::int64_t page_stride = 0;
  std::vector<std::uint16_t> latent, rope, cache;
  std::vector<float> sinks;
  MlaDecodeTensors tensors;
};

class PagedDecode : public testing::Test {
 protected:
  // Before the library first looks at them: what it compiles here need not be fast. ctest says which cache.
  PagedDecode() {
    setenv("HYPERMLA_CACHE_DIR", directory.path().c_str(), 0);
    setenv("HYPERMLA_HOST_FLAGS", "-O1", 0);
  }
  static MlaDecodeOptions portable(MlaDecodeOptions options) {
    options.kernel = kKernel;
    return options;
  }
  void compare(const MlaDecodeOptions& options, int steps) {
    MlaDecode expected(options, DeviceHandle("cpu")), decode(portable(options), DeviceHandle("cpu"));
    for (int seed = 1; seed <= steps; ++seed) {
      Step step(options, unsigned(seed));
      SCOPED_TRACE(testing::Message() << "step " << seed);
      const auto [want_o, want_lse] = step.run(expected);
      const auto [o, lse] = step.run(decode);
      double worst = 0;
      for (std::size_t i = 0; i < o.size(); ++i) {
        if (want_o[i] == step.nan()) {
          EXPECT_EQ(o[i], want_o[i]) << "written where there is no output, at " << i;
          continue;
        }
        const double off = std::abs(to_float(o[i], options.dtype) - to_float(want_o[i], options.dtype));
        worst = worse(worst, off);
      }
      EXPECT_TRUE(worst <= 0.03) << worst;
      for (std::size_t i = 0; i < lse.size(); ++i)
        if (std::isinf(want_lse[i]) || want_lse[i] == 7e7f)
          EXPECT_EQ(lse[i], want_lse[i]) << i;
        else
          EXPECT_TRUE(std::abs(lse[i] - want_lse[i]) <= 1e-3) << i << ": " << lse[i] << ", not " << want_lse[i];
    }
  }

  testing_support::TempDir directory;
};

TEST_F(PagedDecode, AttendsToPagesOfAnySize) {
  compare({.heads = 3, .max_requests = 5, .max_queries = 5, .max_tokens = 300, .page = 16}, 8);
  compare({.heads = 70,
           .max_requests = 4,
           .max_queries = 2,
           .max_tokens = 500,
           .page = 128,
           .dtype = DType::float16,
           .causal = false,
           .split = 128,
           .lse_base2 = true,
           .empty_lse_positive = true},
          4);
}

TEST_F(PagedDecode, GathersTokens) {
  compare({.heads = 20, .max_requests = 4, .max_queries = 3, .max_tokens = 200, .page = 1}, 5);
  compare({.heads = 40, .max_requests = 5, .max_tokens = 200, .page = 16, .sparse = true}, 5);
}

// The last request of a step alone, and behind the others.
TEST_F(PagedDecode, FixedCutsGiveTheSameBitsInAnyBatch) {
  const MlaDecodeOptions options = {
      .heads = 3, .max_requests = 5, .max_queries = 5, .max_tokens = 300, .page = 16, .split = 64};
  MlaDecode decode(portable(options), DeviceHandle("cpu"));
  int compared = 0;
  for (unsigned seed = 1; seed <= 6; ++seed) {
    Step step(options, seed);
    const auto [o, lse] = step.run(decode);
    const std::size_t last = step.lengths.size() - 1, first = step.starts[last];
    const std::int64_t rows = step.starts[last + 1] - step.starts[last], o_stride = step.tensors.o_token_stride;
    step.lengths = {step.lengths[last]};
    step.starts = {0, int(rows)};
    step.tensors.block_table += last * step.width;
    const auto* const latent = static_cast<const std::uint16_t*>(step.tensors.q_latent.data);
    step.tensors.q_latent.data = latent + first * step.tensors.q_latent.token_stride;
    const auto* const rope = static_cast<const std::uint16_t*>(step.tensors.q_rope.data);
    step.tensors.q_rope.data = rope + first * step.tensors.q_rope.token_stride;
    const auto [own_o, own_lse] = step.run(decode);
    EXPECT_TRUE(std::equal(own_o.begin(), own_o.begin() + rows * o_stride, o.begin() + first * o_stride)) << seed;
    compared += int(rows);
  }
  EXPECT_GT(compared, 4);
}

TEST_F(PagedDecode, SaysWhatItCutsAndWhatItDoesNotTake) {
  const MlaDecodeOptions options = {.heads = 3, .max_requests = 5, .max_queries = 5, .max_tokens = 300, .page = 16};
  MlaDecode decode(portable(options), DeviceHandle("cpu"));
  EXPECT_TRUE(contains(decode.explain(), kKernel)) << decode.explain();
  const std::vector<int> lengths = {301, 3}, starts = {0, 2, 3}, falling = {0, 2, 1}, many = {0, 6};
  decode.plan(lengths.data(), starts.data(), 2);
  EXPECT_TRUE(contains(error_of([&] { decode.check(); }), "more than max_tokens=300"));
  for (const int* wrong : {&falling[1], &many[0]}) {
    decode.plan(&lengths[1], wrong, 1);
    EXPECT_TRUE(contains(error_of([&] { decode.check(); }), "those requests were left out"));
  }
  decode.plan(&lengths[1], starts.data(), 1);
  decode.check();
  const auto refusal = [](MlaDecodeOptions options) {
    return error_of([&] { MlaDecode(portable(options), DeviceHandle("cpu")); });
  };
  EXPECT_TRUE(contains(refusal({.shards = 2}), "cannot decode"));
  EXPECT_TRUE(contains(refusal({.cache_format = MlaCacheFormat::fp8_656}), "cannot decode"));
  EXPECT_TRUE(contains(refusal({.max_tokens = 1 << 20, .split = 64}), "split=64"));
}

// GPUs without kernels of their own decode with it; on Hopper it must be named.
TEST(PagedDecodeChoice, IsForGpusThatHaveNoKernelOfTheirOwn) {
  std::map<std::string, std::set<std::string>> decoding;
  for (const KernelEntry& entry : Registry::instance().all())
    for (const char* arch : {"sm_80", "sm_89", "sm_90", "sm_100", "sm_120"}) {
      if (!entry.runs_on(arch) || entry.draft) continue;
      const std::unique_ptr<KernelPlan> plan = entry.make();
      plan->target = Target::of_arch(arch);
      MlaDecodeOptions options;
      settle(options);
      if (plan->decode(options)) decoding[arch].insert(entry.full_name());
    }
  for (const char* arch : {"sm_80", "sm_89", "sm_100", "sm_120"})
    EXPECT_EQ(decoding[arch], std::set<std::string>{kKernel}) << arch;
  EXPECT_FALSE(decoding["sm_90"].count(kKernel));
  EXPECT_TRUE(decoding["sm_90"].count("cute.mla.flash_mla"));
}

}  // namespace
}  // namespace hypermla::paged_decode_test
