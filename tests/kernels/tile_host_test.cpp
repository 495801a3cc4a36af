// CUDA Tile C++ on the CPU (kernels/cutile/tile_host): what each operation means, against scalar definitions.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "entry.h"
#include "hypermla/device/pool.h"

namespace ct = cuda::tiles;
using namespace ct::literals;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

template <class E, std::size_t... sizes>
using Tile = ct::tile<E, ct::shape<sizes...>>;

// The elements in row-major order.
template <class E, class S>
std::vector<E> values(const ct::tile<E, S>& tile) {
  const auto dense = tile.dense();
  return std::vector<E>(dense.data(), dense.data() + dense.kSize);
}

template <class T>
T from(const std::vector<ct::tile_element_t<T>>& values) {
  T result = T::make();
  EXPECT_EQ(values.size(), T::kSize);
  std::copy(values.begin(), values.end(), result.data());
  return result;
}

template <class T>
T random_tile(unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  T result = T::make();
  for (std::size_t i = 0; i < T::kSize; ++i)
    result.data()[i] = ct::host::cast<ct::tile_element_t<T>>(normal(generator));
  return result;
}

TEST(TileHostElement, Bfloat16RoundsToNearestEvenAndKeepsSpecialValues) {
  EXPECT_EQ(__nv_bfloat16(1.0f).bits, 0x3f80);
  EXPECT_EQ(__nv_bfloat16(1.00390625f).bits, 0x3f80);  // 1 + 2^-8, a tie: to even
  EXPECT_EQ(__nv_bfloat16(1.01171875f).bits, 0x3f82);  // 1 + 3 * 2^-8, a tie: to even
  EXPECT_EQ(float(__nv_bfloat16(-kInf)), -kInf);
  EXPECT_TRUE(std::isnan(float(__nv_bfloat16(std::bit_cast<float>(0x7f800001)))));
  EXPECT_EQ(float(__nv_bfloat16(3.4e38f)), kInf);
}

TEST(TileHostElement, HalfAndTf32Round) {
  EXPECT_EQ(float(__half(1.0f + 1.0f / 2048)), 1.0f);
  EXPECT_EQ(float(__half(70000.0f)), kInf);
  EXPECT_EQ(float(__nv_tf32(1.0f + 1.0f / 2048)), 1.0f);
  EXPECT_EQ(float(__nv_tf32(1.0f + 3.0f / 2048)), 1.0f + 4.0f / 2048);
  EXPECT_TRUE(std::isnan(float(__nv_tf32(kNaN))));
}

TEST(TileHostElementwise, BroadcastIsMutualAndRightAligned) {
  const auto column = ct::reshape(ct::iota<Tile<int, 4>>(), ct::shape<4, 1>{});
  const auto row = ct::iota<Tile<int, 2>>();
  const auto sum = column * 10 + row;
  static_assert(std::is_same_v<decltype(sum), const Tile<int, 4, 2>>);
  EXPECT_EQ(values(sum), (std::vector{0, 1, 10, 11, 20, 21, 30, 31}));
  const auto cube = ct::reshape(ct::iota<Tile<int, 4>>(), ct::shape<2, 1, 2>{}) - ct::reshape(row, ct::shape<2, 1>{});
  static_assert(std::is_same_v<decltype(cube), const Tile<int, 2, 2, 2>>);
  EXPECT_EQ(values(cube), (std::vector{0, 1, -1, 0, 2, 3, 1, 2}));
}

template <class A, class B>
concept adds = requires(A a, B b) {
  a + b;
};
template <class A, class B>
concept compares = requires(A a, B b) {
  a < b;
};

TEST(TileHostElementwise, ScalarsTakeTheTilesElementTypeUnlessThatNarrows) {
  static_assert(std::is_same_v<decltype(Tile<float, 2>{} * 2), Tile<float, 2>>);
  static_assert(std::is_same_v<decltype(Tile<float, 2>{} + Tile<__half, 2>{}), Tile<float, 2>>);
  static_assert(std::is_same_v<decltype(Tile<int, 2>{} < 3), Tile<bool, 2>>);
  static_assert(!adds<Tile<float, 2>, double>);
  static_assert(!adds<Tile<__nv_bfloat16, 2>, float>);
  static_assert(!adds<Tile<__nv_bfloat16, 2>, Tile<__half, 2>>);
  static_assert(!adds<Tile<int, 2>, float>);
  static_assert(!adds<Tile<int, 2>, unsigned>);
  static_assert(!compares<Tile<int, 2>, unsigned>);
  static_assert(std::is_convertible_v<Tile<__half, 2>, Tile<float, 2>>);
  static_assert(!std::is_convertible_v<Tile<float, 2>, Tile<__half, 2>>);
  EXPECT_EQ(values(ct::iota<Tile<int, 4>>() * 2 - 1), (std::vector{-1, 1, 3, 5}));
  EXPECT_EQ(values(1.0f / ct::full<Tile<float, 2>>(4.0f)), (std::vector{0.25f, 0.25f}));
}

TEST(TileHostElementwise, TilesAreValues) {
  const auto a = ct::full<Tile<float, 16>>(1.0f);
  auto b = a;
  b = b + 1.0f;
  auto c = std::move(b) * 3.0f;
  const auto d = ct::exp2(c - 5.0f) + c;
  EXPECT_EQ(values(a), std::vector<float>(16, 1.0f));
  EXPECT_EQ(values(c), std::vector<float>(16, 6.0f));
  EXPECT_EQ(values(d), std::vector<float>(16, 8.0f));
}

TEST(TileHostElementwise, ComparesSelectsAndNegates) {
  const auto i = ct::iota<Tile<int, 8>>();
  const auto odd = i % 2 == 1, high = i >= 4;
  EXPECT_EQ(values(ct::select(odd && !high, i, -i)), (std::vector{0, 1, -2, 3, -4, -5, -6, -7}));
  EXPECT_EQ(values(ct::select(odd || high, i, ct::full<Tile<int, 8>>(9))), (std::vector{9, 1, 9, 3, 4, 5, 6, 7}));
  // The condition broadcasts.
  const auto grid =
      ct::select(ct::iota<Tile<int, 2>>() < 1, ct::ones<Tile<float, 2, 2>>(), ct::zeros<Tile<float, 2, 2>>());
  EXPECT_EQ(values(grid), (std::vector{1.0f, 0.0f, 1.0f, 0.0f}));
  EXPECT_EQ(values((i << 2) >> 1 & 4), (std::vector{0, 0, 4, 4, 0, 0, 4, 4}));
  EXPECT_EQ(values(ct::element_cast<float>(i) / 2.0f)[3], 1.5f);
  EXPECT_EQ(values(ct::element_cast<int>(ct::full<Tile<float, 2>>(-2.7f))), (std::vector{-2, -2}));
}

TEST(TileHostElementwise, MaximumPrefersNumbersToNaN) {
  const auto a = from<Tile<float, 4>>({1.0f, kNaN, -kInf, kNaN}), b = from<Tile<float, 4>>({kNaN, 2.0f, 3.0f, kNaN});
  const auto larger = values(ct::max(a, b)), smaller = values(ct::min(a, b));
  EXPECT_EQ(std::vector(larger.begin(), larger.begin() + 3), (std::vector{1.0f, 2.0f, 3.0f}));
  EXPECT_EQ(std::vector(smaller.begin(), smaller.begin() + 3), (std::vector{1.0f, 2.0f, -kInf}));
  EXPECT_TRUE(std::isnan(larger[3]) && std::isnan(smaller[3]));
  EXPECT_EQ(ct::max(3, 4), 4);
  EXPECT_EQ(ct::ceildiv(7, 4), 2);
  EXPECT_EQ(values(ct::abs(from<Tile<float, 2>>({-2.5f, -0.0f}))), (std::vector{2.5f, 0.0f}));
  EXPECT_EQ(values(ct::sqrt(ct::full<Tile<float, 2>>(9.0f)))[1], 3.0f);
  EXPECT_EQ(values(ct::isnan(a)), (std::vector<bool>{false, true, false, true}));
  EXPECT_EQ(values(ct::isinf(a)), (std::vector<bool>{false, false, true, false}));
}

TEST(TileHostMath, Exp2AndLog2AreAccurate) {
  for (int block = 0; block < 2000; ++block) {
    auto x = Tile<float, 128>::make();
    for (int i = 0; i < 128; ++i) x.data()[i] = -126.0f + 253.9f * static_cast<float>(block * 128 + i) / 256000;
    const auto y = ct::exp2(x), z = ct::log2(y);
    for (int i = 0; i < 128; ++i) {
      const double exact = std::exp2(static_cast<double>(x.data()[i])),
                   log = std::log2(static_cast<double>(y.data()[i]));
      ASSERT_TRUE(std::abs(y.data()[i] / exact - 1) <= 2e-7) << "exp2 of " << x.data()[i] << ": " << y.data()[i];
      if (log != 0) {
        ASSERT_TRUE(std::abs(z.data()[i] / log - 1) <= 3e-7) << "log2 of " << y.data()[i] << ": " << z.data()[i];
      }
    }
  }
}

TEST(TileHostMath, Exp2AndLog2OfSpecialValues) {
  const auto x = from<Tile<float, 8>>({-kInf, kInf, kNaN, 0.0f, -149.0f, -1e30f, 128.0f, 127.0f});
  const auto y = values(ct::exp2(x));
  EXPECT_EQ(y[0], 0.0f);
  EXPECT_EQ(y[1], kInf);
  EXPECT_TRUE(std::isnan(y[2]));
  EXPECT_EQ(y[3], 1.0f);
  EXPECT_EQ(y[4], std::numeric_limits<float>::denorm_min());
  EXPECT_EQ(y[5], 0.0f);
  EXPECT_EQ(y[6], kInf);
  EXPECT_EQ(y[7], std::exp2(127.0f));
  EXPECT_EQ(values(ct::exp2(x, ct::round_subnormals_to_zero_t{}))[4], 0.0f);
  const auto z = values(ct::log2(from<Tile<float, 8>>({0.0f, -1.0f, kInf, kNaN, 1.0f, 8.0f, 1e-40f, -0.0f})));
  EXPECT_EQ(z[0], -kInf);
  EXPECT_TRUE(std::isnan(z[1]));
  EXPECT_EQ(z[2], kInf);
  EXPECT_TRUE(std::isnan(z[3]));
  EXPECT_EQ(z[4], 0.0f);
  EXPECT_EQ(z[5], 3.0f);
  EXPECT_NEAR(z[6], std::log2(1e-40), 1e-4);
  EXPECT_EQ(z[7], -kInf);
  EXPECT_EQ(values(ct::exp2(ct::full<Tile<float, 2>>(3.0f))), (std::vector{8.0f, 8.0f}));  // narrower than a vector
  EXPECT_EQ(float(values(ct::exp2(ct::full<Tile<__half, 2>>(3.0f)))[1]), 8.0f);
}

TEST(TileHostReduce, EveryDimensionInBothForms) {
  const auto x = ct::reshape(ct::iota<Tile<int, 16>>(), ct::shape<2, 4, 2>{});
  EXPECT_EQ(values(ct::sum<0>(x)), (std::vector{8, 10, 12, 14, 16, 18, 20, 22}));
  EXPECT_EQ(values(ct::sum(x, 1_ic)), (std::vector{12, 16, 44, 48}));
  static_assert(std::is_same_v<decltype(ct::sum(x, 1_ic)), Tile<int, 2, 1, 2>>);
  EXPECT_EQ(values(ct::reduce_max<2>(x)), (std::vector{1, 3, 5, 7, 9, 11, 13, 15}));
  EXPECT_EQ(values(ct::reduce_min(x, ct::integral_constant<1>{})), (std::vector{0, 1, 8, 9}));
  EXPECT_EQ(values(ct::prod<1>(x))[2], 8 * 10 * 12 * 14);
  EXPECT_EQ(values(ct::any_of<2>(x > 14)), (std::vector<bool>{false, false, false, false, false, false, false, true}));
  EXPECT_EQ(values(ct::all_of<1>(x > 0)), (std::vector<bool>{false, true, true, true}));
}

TEST(TileHostReduce, RowsOfFloats) {
  auto x = random_tile<Tile<float, 4, 64>>(1);
  x.data()[5] = kNaN;
  x.data()[64 + 63] = 100.0f;
  const auto highest = values(ct::reduce_max<1>(x));
  EXPECT_EQ(highest[1], 100.0f);
  EXPECT_EQ(highest[0],
            *std::max_element(x.data(), x.data() + 64, [](float a, float b) { return std::fmax(b, -kInf) > a; }));
  const auto sums = values(ct::sum<1>(x));
  EXPECT_TRUE(std::isnan(sums[0]));
  double exact = 0;
  for (int i = 0; i < 64; ++i) exact += x.data()[192 + i];
  EXPECT_NEAR(sums[3], exact, 1e-5);
  EXPECT_EQ(values(ct::sum<1>(ct::ones<Tile<float, 2, 4>>())), (std::vector{4.0f, 4.0f}));  // narrower than a vector
}

TEST(TileHostLayout, TransposeSwapsTheFirstTwoDimensionsAtAnyRank) {
  const auto x = ct::reshape(ct::iota<Tile<int, 8>>(), ct::shape<2, 4>{});
  const auto t = ct::transpose(x);
  static_assert(std::is_same_v<decltype(t), const Tile<int, 4, 2>>);
  EXPECT_EQ(values(t), (std::vector{0, 4, 1, 5, 2, 6, 3, 7}));
  EXPECT_EQ(values(ct::transpose(t)), values(x));
  EXPECT_EQ(values(ct::reshape(t, ct::shape<8>{})), values(t));
  EXPECT_EQ(values(t + 1)[1], 5);
  EXPECT_EQ(values(ct::sum<0>(t)), (std::vector{6, 22}));
  const auto cube = ct::transpose(ct::reshape(x, ct::shape<2, 2, 2>{}));
  EXPECT_EQ(values(cube), (std::vector{0, 1, 4, 5, 2, 3, 6, 7}));
}

TEST(TileHostLayout, CatPutsTheSecondBehindTheFirst) {
  const auto a = ct::reshape(ct::iota<Tile<int, 4>>(), ct::shape<2, 2>{}), b = a + 10;
  EXPECT_EQ(values(ct::cat(a, b, 0_ic)), (std::vector{0, 1, 2, 3, 10, 11, 12, 13}));
  EXPECT_EQ(values(ct::cat<1>(a, ct::transpose(b))), (std::vector{0, 1, 10, 12, 2, 3, 11, 13}));
}

TEST(TileHostLayout, PermuteBroadcastExtract) {
  const auto x = ct::reshape(ct::iota<Tile<int, 8>>(), ct::shape<2, 2, 2>{});
  EXPECT_EQ(values(ct::permute(x, ct::dimension_map{0_ic, 2_ic, 1_ic})), (std::vector{0, 2, 1, 3, 4, 6, 5, 7}));
  EXPECT_EQ(values(ct::permute<ct::dimension_map<2, 0, 1>>(x)), (std::vector{0, 2, 4, 6, 1, 3, 5, 7}));
  const auto column = ct::reshape(ct::iota<Tile<int, 2>>(), ct::shape<2, 1>{});
  EXPECT_EQ(values(ct::broadcast(column, ct::shape<2, 2, 2>{})), (std::vector{0, 0, 1, 1, 0, 0, 1, 1}));
  EXPECT_EQ(values(ct::extract(ct::reshape(x, ct::shape<2, 4>{}), ct::shape<1, 2>{}, 1, 1)), (std::vector{6, 7}));
  EXPECT_THROW(ct::extract(ct::reshape(x, ct::shape<2, 4>{}), ct::shape<1, 2>{}, 1, 2), ct::Trap);
}

class TileHostView : public testing::Test {
 protected:
  TileHostView() : data(3 * 5) {
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i);
  }
  // 3 x 5 elements in tiles of 2 x 4
  auto view() {
    ct::extents<unsigned, ct::dynamic_extent, 5> extents{3u};
    return ct::partition_view{ct::tensor_span{data.data(), extents}, ct::shape<2, 4>{}};
  }
  std::vector<float> data;
};

TEST_F(TileHostView, IndicesCountTiles) {
  const ct::extents<unsigned, ct::dynamic_extent, ct::dynamic_extent> extents{3, 5};
  ct::partition_view single{ct::tensor_span{data.data(), extents}, ct::shape<1, 2>{}};
  EXPECT_EQ(values(single.load(2, 1)), (std::vector{12.0f, 13.0f}));
  EXPECT_EQ(values(view().load(0, 0)), (std::vector{0.0f, 1.0f, 2.0f, 3.0f, 5.0f, 6.0f, 7.0f, 8.0f}));
}

TEST_F(TileHostView, ExtentsTakeTheDynamicSizesOrAll) {
  const ct::extents<unsigned, 7, ct::dynamic_extent> some{5}, all{7, 5};
  EXPECT_EQ(some.extent(0), 7u);
  EXPECT_EQ(some.extent(1), 5u);
  EXPECT_EQ(all.extent(1), 5u);
  static_assert(std::is_same_v<decltype(ct::extents{4_ic, 8u}), ct::extents<std::uint32_t, 4, ct::dynamic_extent>>);
}

TEST_F(TileHostView, MaskedLoadPads) {
  EXPECT_EQ(values(view().load_masked(1, 1)), (std::vector{14.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}));
  EXPECT_EQ(values(view().load_masked<ct::view_padding::negative_inf>(1, 0))[4], -kInf);
  EXPECT_EQ(values(view().load_masked(ct::view_padding_positive_inf_t{}, 0, 1)),
            (std::vector{4.0f, kInf, kInf, kInf, 9.0f, kInf, kInf, kInf}));
  EXPECT_TRUE(std::isnan(values(view().load_masked<ct::view_padding::nan>(1, 0))[7]));
  EXPECT_TRUE(std::signbit(values(view().load_masked<ct::view_padding::negative_zero>(1, 0))[7]));
  EXPECT_EQ(values(view().load_masked(5, 0)), std::vector<float>(8, 0.0f));  // wholly outside
}

// The outer strides of tile and tensor agree, yet most of the tile lies beyond an inner edge.
TEST_F(TileHostView, ATileOverAnInnerEdgeIsNoSingleRun) {
  const ct::extents<unsigned, 1, 4, 1, 2> extents{};  // 4 heads of 1 query
  ct::partition_view queries{ct::tensor_span{data.data(), extents}, ct::shape<1, 1, 4, 2>{}};
  EXPECT_EQ(values(queries.load_masked(0, 1, 0, 0)), (std::vector{2.0f, 3.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}));
  queries.store_masked(ct::full<Tile<float, 1, 1, 4, 2>>(-1.0f), 0, 1, 0, 0);
  EXPECT_EQ(std::count(data.begin(), data.end(), -1.0f), 2);
}

// Rows of 2 elements that overlap, 1 apart, in pages that are 5 apart.
TEST_F(TileHostView, StridesMayBeAny) {
  const ct::extents<unsigned, ct::dynamic_extent, ct::dynamic_extent, 2> extents{3u, 3u};
  const ct::strides<unsigned, ct::dynamic_extent, ct::dynamic_extent, 1> strides{5u, 1u};
  const ct::tensor_span span{data.data(), ct::layout_strided_mapping{extents, strides}};
  ct::partition_view rows{span, ct::shape<1, 2, 2>{}};
  EXPECT_EQ(values(rows.load(1, 0, 0)), (std::vector{5.0f, 6.0f, 6.0f, 7.0f}));
  EXPECT_EQ(values(rows.load_masked(2, 1, 0)), (std::vector{12.0f, 13.0f, 0.0f, 0.0f}));
  EXPECT_EQ(values(rows.load_masked(3, 0, 0)), std::vector<float>(4, 0.0f));
  rows.store_masked(ct::full<Tile<float, 1, 2, 2>>(-1.0f), 0, 1, 0);
  EXPECT_EQ(std::count(data.begin(), data.end(), -1.0f), 2);
}

TEST_F(TileHostView, MaskedStoreLeavesOutWhatIsOutside) {
  view().store_masked(ct::full<Tile<float, 2, 4>>(-1.0f), 1, 1);
  EXPECT_EQ(data[14], -1.0f);
  EXPECT_EQ(std::count(data.begin(), data.end(), -1.0f), 1);
  view().store_masked(ct::full<Tile<float, 2, 4>>(-1.0f), 2, 0);
  EXPECT_EQ(std::count(data.begin(), data.end(), -1.0f), 1);
  view().store(ct::transpose(ct::full<Tile<float, 4, 2>>(-2.0f)), 0, 0);
  EXPECT_EQ(std::count(data.begin(), data.end(), -2.0f), 8);
}

TEST_F(TileHostView, UnmaskedAccessBeyondTheEdgeIsATrap) {
  EXPECT_THROW(view().load(1, 0), ct::Trap);
  EXPECT_THROW(view().load(0, 1), ct::Trap);
  EXPECT_THROW(view().store(ct::zeros<Tile<float, 2, 4>>(), 1, 0), ct::Trap);
  EXPECT_THROW(view().load_masked(-1, 0), ct::Trap);
  EXPECT_EQ(data[10], 10.0f);
}

TEST(TileHostTrap, UninitialisedTilesAndBrokenPromises) {
  Tile<float, 4, 4> nothing;
  EXPECT_THROW(nothing + 1.0f, ct::Trap);
  EXPECT_THROW(ct::mma(nothing, nothing, ct::zeros<Tile<float, 4, 4>>()), ct::Trap);
  EXPECT_THROW(ct::transpose(nothing), ct::Trap);
  alignas(16) char bytes[32];
  EXPECT_EQ(ct::assume_aligned<16>(bytes), bytes);
  EXPECT_THROW(ct::assume_aligned<16>(bytes + 8), ct::Trap);
  EXPECT_THROW(ct::assume_divisible<8>(12), ct::Trap);
  EXPECT_THROW(ct::irange(0, 4, 0), ct::Trap);
}

TEST(TileHostPointers, GatherAndScatterUnderAMask) {
  std::vector<int> data{10, 11, 12, 13};
  const auto i = ct::iota<Tile<int, 4>>();
  EXPECT_EQ(values(ct::load(data.data() + (3 - i))), (std::vector{13, 12, 11, 10}));
  EXPECT_EQ(values(ct::load_masked(data.data() + i * 2, i < 2, -1)), (std::vector{10, 12, -1, -1}));
  ct::store_masked(data.data() + i * 2, i, i < 2);
  EXPECT_EQ(data, (std::vector{0, 11, 1, 13}));
  ct::store(data.data() + i, i + 5);
  EXPECT_EQ(data, (std::vector{5, 6, 7, 8}));
  ct::store(data.data(), ct::load(data.data() + 1));
  EXPECT_EQ(data[0], 6);
}

TEST(TileHostRange, StepsAndStops) {
  std::vector<int> seen;
  for (auto i : ct::irange(1, 8, 3)) seen.push_back(i);
  for (auto i : ct::irange(5, 2)) seen.push_back(i);
  EXPECT_EQ(seen, (std::vector{1, 4, 7}));
}

// mma against the definition in double. The operands are given whole or as transposes, which mma reads in place.
template <class E, std::size_t M, std::size_t N, std::size_t K>
void check_mma() {
  const auto a = random_tile<Tile<E, M, K>>(1);
  const auto b = random_tile<Tile<E, K, N>>(2);
  const auto c = random_tile<Tile<float, M, N>>(3);
  const auto a_turned = ct::transpose(from<Tile<E, K, M>>(values(ct::transpose(a))));
  const auto b_turned = ct::transpose(from<Tile<E, N, K>>(values(ct::transpose(b))));
  ASSERT_TRUE(a_turned.swapped() && b_turned.swapped());
  const auto before = values(c);
  const Tile<float, M, N> results[] = {ct::mma(a, b, c), ct::mma(a, b_turned, c), ct::mma(a_turned, b, c),
                                       ct::mma(a_turned, b_turned, c)};
  EXPECT_EQ(values(c), before) << "mma wrote to an accumulator that is still in use";
  for (std::size_t m = 0; m < M; ++m) {
    for (std::size_t n = 0; n < N; ++n) {
      double exact = before[m * N + n], scale = std::abs(exact);
      for (std::size_t k = 0; k < K; ++k) {
        const double product = static_cast<double>(float(a.data()[m * K + k])) * float(b.data()[k * N + n]);
        exact += product;
        scale += std::abs(product);
      }
      for (std::size_t i = 0; i < 4; ++i) {
        const double error = std::abs(results[i].data()[m * N + n] - exact);
        ASSERT_TRUE(error <= 1e-6 * scale) << M << "x" << N << "x" << K << " form " << i << " at " << m << ", " << n;
      }
    }
  }
}

template <class E>
class TileHostMma : public testing::Test {};
using MmaElements = testing::Types<__nv_bfloat16, __half, __nv_tf32, float>;
TYPED_TEST_SUITE(TileHostMma, MmaElements);

TYPED_TEST(TileHostMma, MatchesTheDefinition) {
  check_mma<TypeParam, 16, 64, 128>();
  check_mma<TypeParam, 64, 16, 32>();
  check_mma<TypeParam, 64, 64, 16>();
  check_mma<TypeParam, 32, 32, 8>();
  check_mma<TypeParam, 16, 16, 1>();
  check_mma<TypeParam, 1, 128, 64>();
  check_mma<TypeParam, 2, 8, 16>();
  check_mma<TypeParam, 128, 4, 64>();
  check_mma<TypeParam, 8, 256, 2>();
}

TEST(TileHostMmaBatch, RankThreeAndRepeatedOperands) {
  const auto a = random_tile<Tile<__nv_bfloat16, 2, 16, 32>>(1);
  const auto b = random_tile<Tile<__nv_bfloat16, 1, 16, 32>>(2);
  const auto result =
      values(ct::mma(a, ct::permute<ct::dimension_map<0, 2, 1>>(b), ct::zeros<Tile<float, 2, 16, 16>>()));
  for (std::size_t i = 0; i < 2; ++i) {
    const auto one = from<Tile<__nv_bfloat16, 16, 32>>({a.data() + i * 512, a.data() + (i + 1) * 512});
    const auto expected =
        values(ct::mma(one, ct::transpose(ct::reshape(b, ct::shape<16, 32>{})), ct::zeros<Tile<float, 16, 16>>()));
    EXPECT_EQ(std::vector(result.begin() + i * 256, result.begin() + (i + 1) * 256), expected);
  }
}

TEST(TileHostMmaSpecial, InfinityAndNaNReachTheirRowOnly) {
  auto a = ct::ones<Tile<__nv_bfloat16, 16, 32>>();
  a.data()[3 * 32 + 7] = __nv_bfloat16(kInf);
  a.data()[5 * 32 + 1] = __nv_bfloat16(kNaN);
  const auto result = values(ct::mma(a, ct::ones<Tile<__nv_bfloat16, 32, 16>>(), ct::zeros<Tile<float, 16, 16>>()));
  for (std::size_t m = 0; m < 16; ++m) {
    if (m == 5) {
      EXPECT_TRUE(std::isnan(result[m * 16]));
    } else {
      EXPECT_EQ(result[m * 16], m == 3 ? kInf : 32.0f);
    }
  }
}

template <int factor>
__tile_global__ void count_blocks(int* counts, int size, float value) {
  const auto index = ct::bid().x + ct::num_blocks().x * (ct::bid().y + ct::num_blocks().y * ct::bid().z);
  ct::partition_view view{ct::tensor_span{counts, ct::extents<unsigned, ct::dynamic_extent>{size}}, ct::shape<1>{}};
  view.store(view.load(index) + factor * static_cast<int>(value), index);
}

}  // namespace

HYPERMLA_TILE_HOST_ENTRY((count_blocks<2>))

namespace {

std::string launch(hypermla::Pool& pool, void** args, std::array<unsigned, 3> grid, int threads) {
  return pool.run(grid[0] * grid[1] * grid[2], threads,
                  [&](std::uint64_t block) { return hypermla_run_block(args, grid.data(), block); });
}

TEST(TileHostLaunch, RunsEveryBlockOnceOnAnyNumberOfThreads) {
  hypermla::Pool pool;
  for (int threads : {4, 1, 3, 2}) {
    std::vector<int> counts(3 * 5 * 7);
    int* data = counts.data();
    int size = static_cast<int>(counts.size());
    float value = 4.0f;
    void* args[] = {&data, &size, &value};
    EXPECT_EQ(launch(pool, args, {3, 5, 7}, threads), "");
    EXPECT_EQ(counts, std::vector<int>(counts.size(), 8));
  }
}

TEST(TileHostLaunch, ReportsATrapWithItsBlockAndRunsAgain) {
  std::vector<int> counts(4);
  int* data = counts.data();
  int size = 3;
  float value = 1.0f;
  void* args[] = {&data, &size, &value};
  hypermla::Pool pool;
  EXPECT_EQ(launch(pool, args, {4, 1, 1}, 2),
            "block (3, 0, 0): tile 3 of 1 elements along dimension 0 is outside of the tensor, which has 3");
  size = 4;
  EXPECT_EQ(launch(pool, args, {4, 1, 1}, 2), "");
}

}  // namespace
