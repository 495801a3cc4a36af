// MlaCacheOps: merge_states, append and decompress_prefix on the CPU against double precision, over random layouts;
// what is refused; and on a GPU the kernels against the same, in recordings whose contents change between replays.
#include <gtest/gtest.h>

#include "cache_cases.h"
#include "cutile/cache/decompress_plan.h"
#include "hypermla/api/environment.h"
#include "hypermla/api/shared.h"
#include "hypermla/plan/cache_ops.h"
#include "support.h"

namespace hypermla::cache_ops_test {
namespace {

using testing_support::contains;
using testing_support::error_of;

using namespace cache_cases;

MlaCacheOps& on_cpu(DType dtype) {
  static MlaCacheOps all[] = {MlaCacheOps(DType::bfloat16, DeviceHandle("cpu")),
                              MlaCacheOps(DType::float16, DeviceHandle("cpu"))};
  return all[dtype == DType::float16];
}
template <class C>
void check_on_cpu(C of) {
  std::vector<unsigned char> bytes = of.memory.bytes;
  of.run(on_cpu(of.dtype), reinterpret_cast<char*>(bytes.data()), nullptr);
  of.compare(bytes);
}

TEST(MlaCacheOps, MergesByLogSumExp) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    check_on_cpu(MergeCase(seed));
  }
}

TEST(MlaCacheOps, AppendsToTheSlots) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    check_on_cpu(AppendCase(seed));
  }
}

TEST(MlaCacheOps, AppendsInFp8) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    check_on_cpu(AppendCase(seed, 0, false, MlaCacheFormat::fp8_656));
  }
}

TEST(MlaCacheOps, AppendsInFp8WithOneFactor) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    check_on_cpu(AppendCase(seed, 0, false, MlaCacheFormat::fp8_576));
  }
}

// The kernels in CUDA Tile C++, which other GPUs than Hopper take, on the CPU. Of one type: they take long to compile.
TEST(MlaCacheOps, PortableKernelsDecompressAPrefix) {
  const std::shared_ptr<Device> device = make_cpu_device();
  PortableDecompress kernels(DType::bfloat16, shared().compiler, *device);
  for (unsigned seed = 0; seed < 16; ++seed) {
    SCOPED_TRACE(seed);
    DecompressCase of(seed, 0, seed % 8 ? 40 : 150);
    if (of.dtype != DType::bfloat16) continue;
    std::vector<unsigned char> bytes = of.memory.bytes;
    kernels.run(of.on(reinterpret_cast<char*>(bytes.data())), nullptr);
    of.compare(bytes);
  }
}

TEST(MlaCacheOps, DecompressesAPrefix) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(seed);
    check_on_cpu(DecompressCase(seed));
  }
}

TEST(MlaCacheOps, SplitsPrefixes) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    check_on_cpu(SplitCase(seed));
  }
}

TEST(MlaCacheOps, NothingToDoIsNoError) {
  MlaCacheOps& ops = on_cpu(DType::bfloat16);
  ops.merge_states({.heads = 128});
  ops.append({});
  ops.decompress_prefix({.heads = 128});
  ops.split_prefixes({.width = 1});
}

TEST(MlaCacheOps, WhatHasNoMeaningIsRefused) {
  EXPECT_EQ(error_of([] { MlaCacheOps(DType::float32, DeviceHandle("cpu")); }),
            "dtype=float32 is not supported: choose bfloat16 or float16");
  // A case whose results have memory of their own.
  unsigned seed = 0;
  while (MergeCase(seed).in_place || !MergeCase(seed).lse_wanted || MergeCase(seed).heads < 2) ++seed;
  MergeCase merge(seed);
  const std::vector<unsigned char> before = merge.memory.bytes;
  char* const base = reinterpret_cast<char*>(merge.memory.bytes.data());
  const auto refused_merge = [&](auto change) {
    MlaCacheOps::Merge with = merge.on(base);
    change(with);
    return error_of([&] { on_cpu(merge.dtype).merge_states(with); });
  };
  EXPECT_TRUE(contains(refused_merge([](auto& with) { with.width = 12; }), "width=12"));
  EXPECT_TRUE(contains(refused_merge([](auto& with) { with.width = 520; }), "width=520"));
  EXPECT_TRUE(contains(refused_merge([](auto& with) { with.tokens = -1; }), "tokens=-1"));
  EXPECT_TRUE(contains(refused_merge([](auto& with) { with.a.o.data = nullptr; }), "a.o must point"));
  EXPECT_TRUE(contains(refused_merge([](auto& with) { with.o.head_stride = 12; }), "o.head_stride=12"));
  EXPECT_TRUE(contains(refused_merge([](auto& with) { with.b.lse.token_stride = 0; }), "b.lse.token_stride=0"));
  EXPECT_TRUE(contains(refused_merge([](auto& with) { with.o.data = (char*)(with.a.o.data) + 16; }), "o overlaps a.o"));
  EXPECT_TRUE(contains(refused_merge([](auto& with) { with.o = {(void*)with.b.o.data, 4096, 1024}; }), "overlaps b.o"));
  EXPECT_TRUE(
      contains(refused_merge([](auto& with) { with.lse.data = (float*)with.a.lse.data + 1; }), "lse overlaps a"));
  EXPECT_TRUE(contains(refused_merge([](auto& with) { with.lse.data = (float*)with.b.o.data; }), "lse overlaps b.o"));
  EXPECT_TRUE(contains(refused_merge([](auto& with) { with.lse.data = (float*)with.o.data; }), "lse overlaps o"));
  EXPECT_TRUE(contains(refused_merge([](auto& with) { with.o.head_stride = with.o.token_stride = 8; }), "rows would"));
  EXPECT_TRUE(contains(refused_merge([](auto& with) { with.lse.head_stride = with.lse.token_stride; }), "rows would"));

  AppendCase append(1, 2, true);  // with slots that the cache does not have
  MlaCacheOps::Append appended = append.on(reinterpret_cast<char*>(append.memory.bytes.data()));
  const std::vector<unsigned char> cache_before = append.memory.bytes;
  const auto refused_append = [&](auto change) {
    MlaCacheOps::Append with = appended;
    change(with);
    return error_of([&] { on_cpu(append.dtype).append(with); });
  };
  EXPECT_TRUE(contains(refused_append([](auto&) {}), "the cache has slots 0 to"));
  EXPECT_TRUE(contains(refused_append([](auto& with) { with.rope = (char*)with.rope + 2; }), "rope must point"));
  EXPECT_TRUE(contains(refused_append([](auto& with) { with.latent_stride = 0; }), "latent_stride=0"));
  EXPECT_TRUE(contains(refused_append([](auto& with) { with.cache.format = MlaCacheFormat(77); }), "77 is no value"));
  EXPECT_TRUE(contains(refused_append([](auto& with) { with.cache.page = 0; }), "pages of 0 tokens"));
  EXPECT_TRUE(contains(refused_append([](auto& with) { with.cache.latent_token_stride = 8; }), "512 elements would"));
  EXPECT_TRUE(contains(refused_append([](auto& with) { with.cache.rope_page_stride = 56; }), "64 elements would"));
  EXPECT_TRUE(contains(refused_append([](auto& with) {
                         with.cache.page = with.cache.pages = 4;  // a page's second token is the next page's first
                         with.cache.latent_page_stride = with.cache.latent_token_stride;
                       }),
                       "512 elements would"));
  EXPECT_TRUE(contains(refused_append([](auto& with) { with.cache.rope = with.cache.latent; }), "cache.rope overlaps"));
  EXPECT_TRUE(contains(refused_append([](auto& with) {
                         with.cache.latent_token_stride = with.cache.rope_token_stride = 512;
                         with.cache.latent_page_stride = with.cache.rope_page_stride = 512 * with.cache.page;
                         with.cache.rope = static_cast<char*>(with.cache.latent) + 2 * 512;
                         with.cache.page = std::max(with.cache.page, 2);
                       }),
                       "cache.rope overlaps"));
  EXPECT_TRUE(contains(refused_append([](auto& with) { with.cache.pages = 1ll << 31; }), "2147483648 pages"));
  EXPECT_TRUE(append.memory.bytes == cache_before);
  AppendCase fp8(1, 2, false, MlaCacheFormat::fp8_656);
  appended = fp8.on(reinterpret_cast<char*>(fp8.memory.bytes.data()));
  EXPECT_TRUE(contains(refused_append([](auto& with) { with.cache.latent_token_stride = 648; }), "token_stride=648"));
  EXPECT_TRUE(contains(refused_append([](auto& with) { with.cache.latent_page_stride += 8; }), "16 bytes apart"));
  AppendCase one_factor(1, 2, false, MlaCacheFormat::fp8_576);
  appended = one_factor.on(reinterpret_cast<char*>(one_factor.memory.bytes.data()));
  EXPECT_TRUE(contains(refused_append([](auto& with) { with.cache_scale = nullptr; }), "cache_scale is missing"));
  EXPECT_TRUE(contains(refused_append([](auto& with) { with.cache_scale = (float*)((char*)with.cache_scale + 2); }),
                       "cache_scale must point"));
  EXPECT_TRUE(
      contains(refused_append([](auto& with) { with.cache.latent_token_stride = 560; }), "tokens of 576 bytes"));

  DecompressCase decompress(1);
  const auto refused_decompress = [&](auto change) {
    MlaCacheOps::Decompress with = decompress.on(reinterpret_cast<char*>(decompress.memory.bytes.data()));
    change(with);
    return error_of([&] { on_cpu(decompress.dtype).decompress_prefix(with); });
  };
  const int bad[] = {1 << 20};
  EXPECT_TRUE(contains(refused_decompress([&](auto& with) { with.block_table = bad; }), "block_table[0] is 1048576"));
  EXPECT_TRUE(contains(refused_decompress([](auto& with) { with.w_uk.row_stride = 3; }), "w_uk with strides"));
  EXPECT_TRUE(contains(refused_decompress([](auto& with) { with.w_uv.head_stride = 0; }), "w_uv with strides"));
  EXPECT_TRUE(contains(refused_decompress([](auto& with) { with.v.data = nullptr; }), "v must point"));
  EXPECT_TRUE(contains(refused_decompress([](auto& with) { with.heads = 1025; }), "heads=1025"));
  EXPECT_TRUE(contains(refused_decompress([](auto& with) { with.v = with.k; }), "v overlaps k"));
  EXPECT_TRUE(contains(refused_decompress([](auto& with) { with.k_rope = with.k; }), "k_rope overlaps k"));
  EXPECT_TRUE(contains(refused_decompress([](auto& with) { with.k.data = with.cache.latent; }), "k must have memory"));
  EXPECT_TRUE(
      contains(refused_decompress([](auto& with) { with.v.token_stride = with.v.head_stride = 64; }), "rows w"));
  EXPECT_TRUE(
      contains(refused_decompress([](auto& with) { with.cache.format = MlaCacheFormat::fp8_656; }), "656 bytes"));
  EXPECT_TRUE(
      contains(refused_decompress([](auto& with) { with.cache.format = MlaCacheFormat::fp8_576; }), "576 bytes"));

  unsigned split_seed = 0;
  while (SplitCase(split_seed).requests < 2 || SplitCase(split_seed).count < 2 || SplitCase(split_seed).tokens < 1)
    ++split_seed;
  SplitCase split(split_seed);
  const auto refused_split = [&](auto change) {
    MlaCacheOps::Split with = split.on(reinterpret_cast<char*>(split.memory.bytes.data()));
    change(with);
    return error_of([&] { on_cpu(split.dtype).split_prefixes(with); });
  };
  EXPECT_TRUE(contains(refused_split([](auto& with) { with.count = 17; }), "count=17"));
  EXPECT_TRUE(contains(refused_split([](auto& with) { with.width = 0; }), "0 pages of"));
  EXPECT_TRUE(contains(refused_split([](auto& with) { with.table_stride = with.width - 1; }), "table_stride="));
  EXPECT_TRUE(
      contains(refused_split([](auto& with) { with.own_table = (int*)with.block_table; }), "own_table overlaps"));
  EXPECT_TRUE(contains(refused_split([](auto& with) { with.own_lengths = (int*)with.lengths; }), "own_lengths overl"));
  EXPECT_TRUE(contains(refused_split([](auto& with) { with.found = nullptr; }), "found must point"));
  EXPECT_TRUE(contains(refused_split([](auto& with) { with.query_rows = nullptr; }), "query_rows must point"));
  EXPECT_TRUE(contains(refused_split([](auto& with) { with.owners = nullptr; }), "owners must point"));
  EXPECT_TRUE(contains(refused_split([](auto& with) { with.cache_pages = 0; }), "cache_pages=0"));
  EXPECT_TRUE(contains(refused_split([](auto& with) { with.prefix_pages_stride = 0; }), "prefix_pages_stride=0"));
  EXPECT_TRUE(contains(refused_split([](auto& with) { with.prefixes[1].pages = 99; }), "prefixes[1] has 99 pages"));
  EXPECT_TRUE(merge.memory.bytes == before);
}

TEST(MlaCacheOps, KernelsCompileWithoutSpills) {
  CompilerConfig config = Environment::detect().compiler_config();
  if (config.toolchain.cuda_root.empty()) GTEST_SKIP() << "there is no CUDA compiler";
  const testing_support::TempDir cache;
  config.cache = cache.path() / "cache";
  Compiler compiler(config);
  for (const std::string arch : {"sm_80", "sm_90", "sm_120"})
    for (const DType dtype : {DType::bfloat16, DType::float16}) {
      const std::vector<KernelSource> sources = cache_sources(dtype, arch);
      EXPECT_EQ(sources.size(), arch == "sm_90" ? 7u : 9u);
      for (const KernelSource& source : sources) {
        const CacheEntry entry = compiler.compile(source, arch);  // which compares the arguments
        EXPECT_EQ(entry.report.at("frame_bytes"), 0) << source.instance << " for " << arch;
      }
    }
}

class MlaCacheOnAGpu : public testing_support::OnAGpu {
 protected:
  void SetUp() override {
    OnAGpu::SetUp();
    if (!device_) return;
    for (const DType dtype : {DType::bfloat16, DType::float16}) ops_.emplace_back(dtype, DeviceHandle("cuda"));
  }
  // Records the first of some cases of the same shape, and replays it with the contents of each.
  template <class C>
  void check(std::vector<C> cases) {
    const C& first = cases.front();
    Buffer memory(device_, first.memory.bytes.size());
    const auto recording = device_->record([&](StreamHandle stream) {
      first.run(ops_[first.dtype == DType::float16], static_cast<char*>(memory.data()), stream);
    });
    for (C& one : cases) {
      std::vector<unsigned char> bytes = one.memory.bytes;
      ASSERT_EQ(bytes.size(), memory.bytes());
      device_->copy_to_device(memory.data(), bytes.data(), bytes.size());
      recording->replay(device_->stream());
      device_->synchronize();
      device_->copy_to_host(bytes.data(), memory.data(), bytes.size());
      one.compare(bytes);
    }
  }

  std::vector<MlaCacheOps> ops_;
};

TEST_F(MlaCacheOnAGpu, MergesByLogSumExp) {
  for (unsigned seed = 0; seed < 500 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    check<MergeCase>({MergeCase(seed), MergeCase(seed, 1)});
  }
}

TEST_F(MlaCacheOnAGpu, AppendsToTheSlots) {
  for (unsigned seed = 0; seed < 300 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    check<AppendCase>({AppendCase(seed), AppendCase(seed, 1, true), AppendCase(seed, 2)});
  }
}

TEST_F(MlaCacheOnAGpu, AppendsInFp8) {
  for (const MlaCacheFormat format : {MlaCacheFormat::fp8_656, MlaCacheFormat::fp8_576})
    for (unsigned seed = 0; seed < 40 && !HasFailure(); ++seed) {
      SCOPED_TRACE(testing::Message() << int(format) << ' ' << seed);
      check<AppendCase>({AppendCase(seed, 0, false, format), AppendCase(seed, 1, true, format)});
    }
}

TEST_F(MlaCacheOnAGpu, SplitsPrefixes) {
  for (unsigned seed = 0; seed < 400 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    check<SplitCase>({SplitCase(seed), SplitCase(seed, 1), SplitCase(seed, 2)});
  }
}

TEST_F(MlaCacheOnAGpu, DecompressesAPrefix) {
  if (device_->info().arch != "sm_90") GTEST_SKIP() << "this GPU is " << device_->info().arch;
  for (unsigned seed = 0; seed < 40 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    check<DecompressCase>({DecompressCase(seed), DecompressCase(seed, 1)});
  }
}

TEST_F(MlaCacheOnAGpu, PortableKernelsDecompressAPrefix) {
  std::vector<PortableDecompress> kernels;
  for (const DType dtype : {DType::bfloat16, DType::float16}) kernels.emplace_back(dtype, shared().compiler, *device_);
  for (unsigned seed = 0; seed < 40 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    DecompressCase one(seed, 0, seed % 4 ? 150 : 40);
    std::vector<unsigned char> bytes = one.memory.bytes;
    const Buffer memory = copy_of(bytes);
    kernels[one.dtype == DType::float16].run(one.on(static_cast<char*>(memory.data())), device_->stream());
    device_->synchronize();
    one.compare(back<unsigned char>(memory));
  }
}

// More tokens than a block has, and more heads than a multiprocessor takes at once, against the CPU.
TEST_F(MlaCacheOnAGpu, DecompressesALongPrefix) {
  if (device_->info().arch != "sm_90") GTEST_SKIP() << "this GPU is " << device_->info().arch;
  constexpr int kTokens = 1000, kHeads = 128, kPage = 64, kPages = 16;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> cache(kPages * kPage * 576), uk(kHeads * 128 * 512), uv(kHeads * 512 * 128);
  for (auto& x : cache) x = from_float(normal(random), DType::bfloat16);
  for (auto* w : {&uk, &uv})
    for (auto& x : *w) x = from_float(normal(random) / 22.6f, DType::bfloat16);
  std::vector<int> table(kPages);
  for (int i = 0; i < kPages; ++i) table[i] = (5 * i + 3) % kPages;
  std::vector<std::uint16_t> k(kTokens * kHeads * 192, 0xffff), v(kTokens * kHeads * 128, 0xffff), k_got = k, v_got = v;
  const auto run = [&](MlaCacheOps& ops, void* cache, const void* table, const void* uk, const void* uv, void* k,
                       void* v) {
    ops.decompress_prefix({.cache = MlaCache::fused(cache, kPages, kPage),
                           .block_table = static_cast<const int*>(table),
                           .tokens = kTokens,
                           .heads = kHeads,
                           .w_uk = {uk, 128 * 512, 512, 1},
                           .w_uv = {uv, 512 * 128, 128, 1},
                           .k = {k, kHeads * 192, 192},
                           .k_rope = {static_cast<std::uint16_t*>(k) + 128, kHeads * 192, 192},
                           .v = {v, kHeads * 128, 128}});
  };
  run(on_cpu(DType::bfloat16), cache.data(), table.data(), uk.data(), uv.data(), k.data(), v.data());
  const auto copy_of = [&](const auto& values) {
    Buffer buffer(device_, values.size() * sizeof values[0]);
    device_->copy_to_device(buffer.data(), values.data(), buffer.bytes());
    return buffer;
  };
  const Buffer on[] = {copy_of(cache), copy_of(table), copy_of(uk), copy_of(uv), copy_of(k_got), copy_of(v_got)};
  run(ops_[0], on[0].data(), on[1].data(), on[2].data(), on[3].data(), on[4].data(), on[5].data());
  device_->synchronize();
  device_->copy_to_host(k_got.data(), on[4].data(), on[4].bytes());
  device_->copy_to_host(v_got.data(), on[5].data(), on[5].bytes());
  const auto differing = [](const std::vector<std::uint16_t>& a, const std::vector<std::uint16_t>& b) {
    std::size_t count = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      const float x = to_float(a[i], DType::bfloat16), y = to_float(b[i], DType::bfloat16);
      count += !(std::abs(x - y) <= 1e-3f + 0x1p-7f * std::abs(y));
    }
    return count;
  };
  EXPECT_EQ(differing(k_got, k), 0u);
  EXPECT_EQ(differing(v_got, v), 0u);
}

// Pages further apart than 2^32 bytes.
TEST_F(MlaCacheOnAGpu, OffsetsGoBeyond32Bits) {
  constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 64;  // elements
  const Buffer cache(device_, 2 * (kFar + 576));
  std::vector<std::uint16_t> row(576);
  for (int i = 0; i < 576; ++i) row[i] = std::uint16_t(i);
  const std::int64_t slots[] = {1};
  Buffer rows(device_, 2 * 576), slot(device_, 8);
  device_->copy_to_device(rows.data(), row.data(), 2 * 576);
  device_->copy_to_device(slot.data(), slots, 8);
  MlaCache layout = MlaCache::fused(cache.data(), 2, 1);
  layout.latent_page_stride = layout.rope_page_stride = kFar;
  ops_[0].append({.latent = rows.data(),
                  .rope = static_cast<std::uint16_t*>(rows.data()) + 512,
                  .latent_stride = 576,
                  .rope_stride = 576,
                  .slots = static_cast<const std::int64_t*>(slot.data()),
                  .tokens = 1,
                  .cache = layout});
  device_->synchronize();
  std::vector<std::uint16_t> got(576);
  device_->copy_to_host(got.data(), static_cast<char*>(cache.data()) + 2 * kFar, 2 * 576);
  EXPECT_EQ(got, row);
}

}  // namespace
}  // namespace hypermla::cache_ops_test
