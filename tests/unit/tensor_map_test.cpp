// Maps of tensors are made once for each tensor, and never taken for another one's.
#include <gtest/gtest.h>

#include "hypermla/base/error.h"
#include "hypermla/device/tensor_map.h"

namespace hypermla::tensor_map_test {
namespace {

// Numbers the maps that are made; no driver is asked.
struct Counted {
  unsigned long long made = 0;
  TensorMapCache cache{[this](const TensorMapSource&) { return TensorMap{{++made}}; }};
  unsigned long long of(const TensorMapSource& source) { return cache.of(source).opaque[0]; }
};

TensorMapSource source_at(std::uintptr_t address) {
  return {DType::bfloat16, reinterpret_cast<const void*>(address), {{{64, 1152, 64}, {8, 128, 2}, {10, 73728, 1}}}};
}

TEST(TensorMapCache, AMapIsMadeOncePerTensor) {
  Counted counted;
  for (int step = 0; step < 3; ++step)
    for (std::uintptr_t layer = 0; layer < 61; ++layer)
      EXPECT_EQ(counted.of(source_at((layer + 1) << 30)), layer + 1) << "step " << step;
  EXPECT_EQ(counted.made, 61u);
}

TEST(TensorMapCache, EverythingThatAMapIsMadeFromCounts) {
  const TensorMapSource first = source_at(4096);
  std::vector<TensorMapSource> all(12, first);
  all[1].dtype = DType::float16;
  all[2].data = reinterpret_cast<const void*>(4112);
  for (int axis = 0; axis < 3; ++axis) {
    ++all[3 + axis].axes[axis].extent;
    all[6 + axis].axes[axis].stride_bytes += 16;
    ++all[9 + axis].axes[axis].box;
  }
  Counted counted;
  for (int round = 0; round < 2; ++round)
    for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(counted.of(all[i]), i + 1);
}

TEST(TensorMapCache, TensorsThatAlwaysLieElsewhereDoNotFillTheMemory) {
  Counted counted;
  for (unsigned i = 1; i <= TensorMapCache::kMost; ++i) counted.of(source_at(i * 4096));
  EXPECT_EQ(counted.of(source_at(4096)), 1u);
  const auto after = counted.of(source_at(0));
  EXPECT_EQ(after, TensorMapCache::kMost + 1);
  EXPECT_EQ(counted.of(source_at(0)), after);
  EXPECT_EQ(counted.of(source_at(4096)), after + 1);  // forgotten
}

TEST(TensorMapCache, AMapThatWasRefusedIsNotKept) {
  bool refuses = true;
  TensorMapCache cache([&](const TensorMapSource&) -> TensorMap {
    if (refuses) fail("the driver refused");
    return {{7}};
  });
  EXPECT_THROW(cache.of(source_at(4096)), Error);
  refuses = false;
  EXPECT_EQ(cache.of(source_at(4096)).opaque[0], 7u);
}

}  // namespace
}  // namespace hypermla::tensor_map_test
