#include "hypermla/roofline/roofline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <future>
#include <random>

#include "hypermla/base/error.h"
#include "hypermla/base/files.h"
#include "hypermla/roofline/device_spec.h"
#include "mla/attention_cost.h"

namespace hypermla::roofline_test {
namespace {

// b=32, t=4096, h=128, d=128, p=64, k=512, bfloat16: the setting of every table in docs/predictions.md.
AttentionShape table_shape(int s, int h = 128) { return {.b = 32, .s = s, .t = 4096, .h = h}; }

struct Peaks {
  const char* name;
  double tflops, gbps;
  double ridge() const { return tflops * 1e3 / gbps; }
  double microseconds(const Cost& cost) const { return predict(cost, tflops, gbps).seconds * 1e6; }
};
constexpr Peaks kRtx5090 = {"RTX 5090", 209.5, 1792};
constexpr Peaks kH200 = {"H200", 989, 4800};
constexpr Peaks kH200Effective = {"H200 effective", 650, 4200};  // what good kernels reach there, not what is specified

// n by trying every multiple of `tile`, and t.
int brute_force_n(const AttentionShape& shape, double ridge, int tile) {
  const auto time = [&](int n) {
    const Cost cost = mla_var6_plus_cost(shape, n);
    return std::max(cost.flops / ridge, cost.bytes);
  };
  int best = 0;
  for (int n = 0; n <= shape.t; n += tile)
    if (time(n) < time(best)) best = n;
  return time(shape.t) < time(best) ? shape.t : best;
}

struct TableRow {
  Peaks device;
  int s;
  long flash_attention, flash_mla, mla_var6_plus;  // predicted microseconds
  int n;                                           // decompressed tokens, a multiple of 16
};

const TableRow kTable[] = {
    {kRtx5090, 1, 5993, 174, 172, 64},
    {kRtx5090, 2, 5995, 349, 336, 208},
    {kRtx5090, 4, 5998, 697, 643, 448},
    {kRtx5090, 8, 6004, 1394, 1179, 896},
    {kRtx5090, 16, 6015, 2788, 2026, 1600},
    {kRtx5090, 32, 6039, 5576, 3175, 2512},
    {kRtx5090, 64, 6085, 11153, 4479, 3472},
    {kRtx5090, 128, 6560, 22305, 6560, 4096},
    {kRtx5090, 256, 13121, 44610, 13121, 4096},
    {kH200, 1, 2238, 37, 37, 0},
    {kH200, 2, 2238, 74, 73, 80},
    {kH200, 4, 2239, 148, 142, 224},
    {kH200, 8, 2241, 295, 270, 512},
    {kH200, 16, 2246, 591, 491, 976},
    {kH200, 32, 2254, 1181, 836, 1696},
    {kH200, 64, 2272, 2362, 1301, 2608},
    {kH200, 128, 2307, 4725, 1846, 3536},
    {kH200, 256, 2779, 9450, 2779, 4096},
    {kH200Effective, 1, 2557, 56, 56, 32},
    {kH200Effective, 2, 2558, 112, 110, 128},
    {kH200Effective, 4, 2559, 225, 212, 336},
    {kH200Effective, 8, 2562, 449, 396, 688},
    {kH200Effective, 16, 2567, 899, 703, 1264},
    {kH200Effective, 32, 2577, 1797, 1150, 2096},
    {kH200Effective, 64, 2596, 3595, 1706, 3056},
    {kH200Effective, 128, 2636, 7189, 2313, 3936},
    {kH200Effective, 256, 4229, 14378, 4229, 4096},
};

TEST(AttentionCost, PredictsTheTable) {
  for (const TableRow& row : kTable) {
    SCOPED_TRACE(testing::Message() << row.device.name << " s=" << row.s);
    const AttentionShape shape = table_shape(row.s);
    const int n = n_star(shape, row.device.ridge(), 16);
    EXPECT_EQ(n, row.n);
    EXPECT_EQ(std::lround(row.device.microseconds(flash_attention_cost(shape))), row.flash_attention);
    EXPECT_EQ(std::lround(row.device.microseconds(flash_mla_cost(shape))), row.flash_mla);
    EXPECT_EQ(std::lround(row.device.microseconds(mla_var6_plus_cost(shape, n))), row.mla_var6_plus);
  }
}

TEST(AttentionCost, ClosedFormsOfOneSmallShapeByHand) {
  const AttentionShape shape{.b = 2, .s = 3, .t = 5, .h = 7, .d = 4, .p = 2, .k = 8, .bytes_per_element = 2};
  EXPECT_EQ(flash_attention_cost(shape).flops, 2 * 2 * 7 * 3 * 5 * 10);
  EXPECT_EQ(flash_attention_cost(shape).bytes, 2 * 2 * 7 * 8 * 10);
  EXPECT_EQ(flash_mla_cost(shape).flops, 2 * 2 * 7 * 3 * 5 * 18);
  EXPECT_EQ(flash_mla_cost(shape).bytes, 2 * (2 * 7 * 3 * 18 + 2 * 5 * 10));
  // QPE 84, Q 168, Qc 336, Z of 3 tokens 48, KPE 20, K and V of 2 tokens 112 each, O_new 168, O_latent 336
  EXPECT_EQ(mla_var6_plus_cost(shape, 2).bytes, 2 * (84 + 168 + 336 + 48 + 20 + 112 + 112 + 168 + 336));
  EXPECT_EQ(mla_var6_plus_cost(shape, 2).flops, 2 * 2 * 7 * 3 * 5 * 2 + 4 * 2 * 7 * 3 * 2 * 4 + 4 * 2 * 7 * 3 * 3 * 8);
  EXPECT_EQ(output_decompression_cost(shape).flops, 2 * 2 * 7 * 3 * 8 * 4);
  EXPECT_EQ(output_decompression_cost(shape).bytes, 2 * (2 * 7 * 3 * 8 + 7 * 8 * 4 + 2 * 7 * 3 * 4));
}

TEST(AttentionCost, IntensityIsThatOfTheTwoRegimes) {
  EXPECT_NEAR(flash_attention_cost(table_shape(1)).intensity(), 1, 0.01);
  EXPECT_NEAR(flash_attention_cost(table_shape(1024)).intensity(), 1024.0 * 4096 / (1024 + 4096), 1e-9);
  EXPECT_NEAR(flash_mla_cost(table_shape(1)).intensity(), 228, 1);
  // 228 is above the RTX 5090's ridge of 117: even decode is bound by arithmetic there.
  EXPECT_EQ(predict(flash_mla_cost(table_shape(1)), kRtx5090.tflops, kRtx5090.gbps).bound, Bound::compute);
  EXPECT_EQ(predict(flash_attention_cost(table_shape(1)), kRtx5090.tflops, kRtx5090.gbps).bound, Bound::memory);
}

TEST(AttentionCost, AllOldAndAllNewTakeTheFlopsOfTheTwoKernels) {
  const AttentionShape shape = table_shape(16);
  EXPECT_EQ(mla_var6_plus_cost(shape, 0).flops, flash_mla_cost(shape).flops);
  EXPECT_EQ(mla_var6_plus_cost(shape, shape.t).flops, flash_attention_cost(shape).flops);
}

TEST(AttentionCost, OneMoreDecompressedTokenTradesFlopsForBytes) {
  const AttentionShape shape = table_shape(16);
  const Cost at = mla_var6_plus_cost(shape, 100), next = mla_var6_plus_cost(shape, 101);
  EXPECT_EQ(at.flops - next.flops, 4.0 * 32 * 128 * 16 * (512 - 128));
  EXPECT_EQ(next.bytes - at.bytes, 2.0 * 32 * (2 * 128 * 128 - 512));
}

TEST(NStar, IsWhatBruteForceFinds) {
  for (const TableRow& row : kTable) {
    const AttentionShape shape = table_shape(row.s);
    EXPECT_EQ(n_star(shape, row.device.ridge()), brute_force_n(shape, row.device.ridge(), 1))
        << row.device.name << " s=" << row.s;
  }
}

// Shapes of every kind, also those where a token costs fewer bytes decompressed, or a latent smaller than a head. The n
// may differ where times tie up to rounding, the times may not.
TEST(NStar, IsAsFastAsBruteForceOnRandomShapes) {
  std::mt19937 random(1);
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  int inside = 0;
  for (int i = 0; i < 2000; ++i) {
    const AttentionShape shape{.b = pick(1, 4),
                               .s = pick(1, 64),
                               .t = pick(1, 500),
                               .h = pick(1, 64),
                               .d = pick(1, 128),
                               .p = pick(1, 64),
                               .k = pick(1, 512),
                               .bytes_per_element = pick(0, 1) ? 2.0 : 1.0};
    const double ridge = pick(1, 400);
    const int tile = pick(1, 64);
    const auto time = [&](int n) {
      const Cost cost = mla_var6_plus_cost(shape, n);
      return std::max(cost.flops / ridge, cost.bytes);
    };
    const int n = n_star(shape, ridge, tile);
    inside += n > 0 && n < shape.t;
    ASSERT_TRUE(n == shape.t || n % tile == 0) << "n=" << n << " tile=" << tile << " t=" << shape.t;
    ASSERT_LE(time(n), time(brute_force_n(shape, ridge, tile)) * (1 + 1e-12)) << "case " << i;
  }
  EXPECT_GT(inside, 100);  // or the cases would prove nothing but the two ends
}

TEST(NStar, BalancesArithmeticAndTrafficAndDoesNotDependOnTheBatch) {
  AttentionShape shape = table_shape(16);
  const double n = n_balance(shape, kH200.ridge());
  EXPECT_NEAR(n, 982.3, 0.1);
  const Prediction balanced = predict(mla_var6_plus_cost(shape, 982), kH200.tflops, kH200.gbps);
  EXPECT_NEAR(balanced.compute_seconds / balanced.memory_seconds, 1, 1e-3);
  shape.b = 1;
  EXPECT_DOUBLE_EQ(n_balance(shape, kH200.ridge()), n);
}

TEST(NStar, GrowsWhenTheTensorRateFalls) {
  for (int s : {2, 4, 8, 16, 32, 64})
    EXPECT_GT(n_star(table_shape(s), kH200Effective.ridge()), n_star(table_shape(s), kH200.ridge())) << "s=" << s;
}

TEST(NStar, RefusesWhatHasNoMeaning) {
  EXPECT_THROW(n_star(table_shape(1), 0), Error);
  EXPECT_THROW(n_star(table_shape(1), std::nan("")), Error);
  EXPECT_THROW(n_star(table_shape(1), 100, 0), Error);
  EXPECT_THROW(n_star(table_shape(0), 100), Error);
  EXPECT_THROW(mla_var6_plus_cost(table_shape(1), -1), Error);
  EXPECT_THROW(mla_var6_plus_cost(table_shape(1), 4097), Error);
}

// The first s at which FlashMLA is predicted slower than FlashAttention.
int crossover(const Peaks& device) {
  int s = 1;
  while (device.microseconds(flash_mla_cost(table_shape(s))) <=
         device.microseconds(flash_attention_cost(table_shape(s))))
    ++s;
  return s;
}

TEST(Regimes, CrossoverOfFlashMlaAndFlashAttention) {
  EXPECT_EQ(crossover(kRtx5090), 35);
  EXPECT_EQ(crossover(kH200), 62);
  EXPECT_EQ(crossover(kH200Effective), 47);
}

// How many times faster mla_var6_plus is predicted than the better of the other two.
double gain(const Peaks& device, int s) {
  const AttentionShape shape = table_shape(s);
  const double better =
      std::min(device.microseconds(flash_mla_cost(shape)), device.microseconds(flash_attention_cost(shape)));
  return better / device.microseconds(mla_var6_plus_cost(shape, n_star(shape, device.ridge(), 16)));
}

TEST(Regimes, GainOverTheBetterKernel) {
  EXPECT_NEAR(gain(kRtx5090, 16), 1.38, 0.005);
  EXPECT_NEAR(gain(kH200, 16), 1.20, 0.005);
  EXPECT_NEAR(gain(kH200Effective, 16), 1.28, 0.005);
  EXPECT_NEAR(gain(kH200, 64), 1.75, 0.005);
  EXPECT_NEAR(gain(kH200Effective, 64), 1.52, 0.005);
}

// Kimi-K2 is DeepSeek-V3 with half the heads.
TEST(Regimes, HalfTheHeadsTakeHalfTheTimeAtNearlyTheSameN) {
  for (int s : {4, 8, 16, 32, 64}) {
    const double ridge = kH200.ridge();
    const int n128 = n_star(table_shape(s), ridge, 16), n64 = n_star(table_shape(s, 64), ridge, 16);
    EXPECT_LE(std::abs(n128 - n64), 64) << "s=" << s;
    const double us128 = kH200.microseconds(mla_var6_plus_cost(table_shape(s), n128));
    const double us64 = kH200.microseconds(mla_var6_plus_cost(table_shape(s, 64), n64));
    EXPECT_NEAR(us64 / us128, 0.5, 0.01) << "s=" << s;
  }
}

TEST(Roofline, TakesTheLargerOfArithmeticAndTraffic) {
  const Prediction compute = predict({.flops = 4e12, .bytes = 1e9}, 2, 1);
  EXPECT_DOUBLE_EQ(compute.seconds, 2);
  EXPECT_DOUBLE_EQ(compute.memory_seconds, 1);
  EXPECT_EQ(bound_name(compute.bound), "compute");
  const Prediction memory = predict({.flops = 2e12, .bytes = 3e9}, 2, 1);
  EXPECT_DOUBLE_EQ(memory.seconds, 3);
  EXPECT_EQ(bound_name(memory.bound), "memory");
  EXPECT_THROW(predict({.flops = 1, .bytes = 1}, 0, 1), Error);
  EXPECT_THROW(predict({.flops = 1, .bytes = 1}, 1, std::nan("")), Error);
}

TEST(Roofline, CostsOfStagesAddUp) {
  const Cost sum = Cost{.flops = 1, .bytes = 2} + Cost{.flops = 10, .bytes = 20};
  EXPECT_EQ(sum.flops, 11);
  EXPECT_EQ(sum.bytes, 22);
}

const std::filesystem::path kDevices =
    std::filesystem::path(__FILE__).parent_path() / ".." / ".." / "conf" / "devices.json";

// The message of the Error that `work` throws; empty when it throws none.
template <class Work>
std::string error_of(Work&& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(DeviceTable, HoldsTheDevicesOfTheDocumentation) {
  const DeviceTable table = DeviceTable::load(kDevices);
  const DeviceSpec& rtx = table.find("NVIDIA GeForce RTX 5090");
  EXPECT_EQ(rtx.peak_tflops(DType::bfloat16), 209.5);
  EXPECT_EQ(rtx.peak_tflops(DType::float16), 209.5);
  EXPECT_EQ(rtx.peak_gbps, 1792);
  EXPECT_NEAR(ridge(rtx, DType::bfloat16), 116.9, 0.05);
  const DeviceSpec& h200 = table.find("NVIDIA H200");
  EXPECT_EQ(h200.peak_tflops(DType::bfloat16), 989);
  EXPECT_EQ(h200.peak_gbps, 4800);
  EXPECT_EQ(h200.sm_count, 132);
  EXPECT_LT(h200.measured.at("matmul_sustained_tflops").get<double>(),
            h200.measured.at("matmul_burst_tflops").get<double>());
  EXPECT_DOUBLE_EQ(predict(flash_mla_cost(table_shape(16)), h200, DType::bfloat16).seconds * 1e6,
                   kH200.microseconds(flash_mla_cost(table_shape(16))));
  for (const std::string& name : table.names()) {
    for (DType dtype : {DType::bfloat16, DType::float16, DType::float32})
      EXPECT_GT(ridge(table.find(name), dtype), 0) << name;
  }
}

TEST(DeviceTable, AnUnknownDeviceIsAnErrorThatNamesTheNearest) {
  const DeviceTable table = DeviceTable::load(kDevices);
  EXPECT_FALSE(table.contains("NVIDIA H300"));
  const std::string message = error_of([&] { table.find("NVIDIA H300"); });
  EXPECT_NE(message.find("'NVIDIA H200'"), std::string::npos) << message;
  EXPECT_NE(message.find("--measure"), std::string::npos) << message;
}

class Overlay : public testing::Test {
 protected:
  void SetUp() override {
    directory_ = std::filesystem::path(testing::TempDir()) /
                 (std::string("hypermla_") + testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(directory_);
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::filesystem::path path() const { return directory_ / "devices.json"; }
  DeviceTable load() const { return DeviceTable::load(kDevices, path()); }
  void write(std::string_view text) const {
    make_directories(directory_);
    write_file_atomic(path(), text);
  }

 private:
  std::filesystem::path directory_;
};

TEST_F(Overlay, AMissingFileChangesNothing) { EXPECT_EQ(load().names(), DeviceTable::load(kDevices).names()); }

TEST_F(Overlay, AMeasuredCpuNeedsNoSpecifiedPeaks) {
  save_measured(path(), "Some CPU", {{"fma_gflops", 150.0}, {"read_GBps", 20.0}, {"date", "2026-11-21"}});
  const DeviceSpec cpu = load().find("Some CPU");
  for (DType dtype : {DType::bfloat16, DType::float16, DType::float32}) EXPECT_DOUBLE_EQ(cpu.peak_tflops(dtype), 0.15);
  EXPECT_DOUBLE_EQ(cpu.peak_gbps, 20);
}

TEST_F(Overlay, AMeasuredGpuTakesItsMatmulForTensorTypesAndItsVectorUnitsForFp32) {
  save_measured(path(), "Some GPU", {{"matmul_burst_tflops", 100.0}, {"fma_gflops", 20000.0}, {"read_GBps", 900.0}});
  const DeviceSpec gpu = load().find("Some GPU");
  EXPECT_DOUBLE_EQ(gpu.peak_tflops(DType::bfloat16), 100);
  EXPECT_DOUBLE_EQ(gpu.peak_tflops(DType::float32), 20);
}

TEST_F(Overlay, ReplacesTheMeasuredFiguresAsAWholeAndKeepsTheSpecifiedPeaks) {
  save_measured(path(), "NVIDIA H200", {{"read_GBps", 4500.0}});
  const DeviceSpec h200 = load().find("NVIDIA H200");
  EXPECT_EQ(h200.measured, (Json{{"read_GBps", 4500.0}}));
  EXPECT_EQ(h200.peak_tflops(DType::bfloat16), 989);
  EXPECT_EQ(h200.peak_gbps, 4800);
}

TEST_F(Overlay, SavingOneDeviceKeepsTheOthers) {
  save_measured(path(), "A", {{"read_GBps", 1.0}});
  save_measured(path(), "B", {{"read_GBps", 2.0}});
  save_measured(path(), "A", {{"read_GBps", 3.0}});
  EXPECT_EQ(load().find("A").peak_gbps, 3);
  EXPECT_EQ(load().find("B").peak_gbps, 2);
}

TEST_F(Overlay, SavingAtOnceLosesNothing) {
  const auto save = [&](const std::string& name) {
    for (int i = 0; i < 20; ++i) save_measured(path(), name + std::to_string(i), {{"read_GBps", 1.0}});
  };
  std::future<void> other = std::async(std::launch::async, save, "B");
  save("A");
  other.get();
  const DeviceTable table = load();
  for (int i = 0; i < 20; ++i)
    for (const char* name : {"A", "B"}) EXPECT_TRUE(table.contains(name + std::to_string(i))) << name << i;
}

TEST_F(Overlay, AUserMayWriteAnEntryByHand) {
  write(R"({"NVIDIA H200": {"peak_bfloat16_float32_tflops": 650, "peak_dram_bw_GBps": 4200}})");
  EXPECT_NEAR(ridge(load().find("NVIDIA H200"), DType::bfloat16), kH200Effective.ridge(), 1e-12);
}

TEST_F(Overlay, AFigureThatNobodyKnowsIsAnErrorNotAZero) {
  write(R"({"Bare": {"sm_count": 4}})");
  const DeviceTable table = load();
  EXPECT_NE(error_of([&] { ridge(table.find("Bare"), DType::bfloat16); }).find("peak_bfloat16_float32_tflops"),
            std::string::npos);
  save_measured(path(), "Bare", {{"fma_gflops", 5.0}});
  const DeviceTable measured = load();
  EXPECT_NE(error_of([&] { ridge(measured.find("Bare"), DType::bfloat16); }).find("peak_dram_bw_GBps"),
            std::string::npos);
}

// One bad generated file must not stop every command.
TEST_F(Overlay, ABadFileIsLeftOutAndSaysWhy) {
  const struct {
    const char* text;
    const char* message;
  } cases[] = {
      {"{", "not valid JSON"},
      {"[]", "must be a JSON object"},
      {R"({"X": 1})", "entry of 'X'"},
      {R"({"X": {"peak_dram_bw": 1}})", "did you mean 'peak_dram_bw_GBps'"},
      {R"({"X": {"peak_dram_bw_GBps": "fast"}})", "positive number"},
      {R"({"X": {"peak_dram_bw_GBps": -1}})", "positive number"},
      {R"({"X": {"note": 1}})", "must be a string"},
      {R"({"X": {"measured": {"read_GB": 1}}})", "did you mean 'read_GBps'"},
      {R"({"X": {"measured": 3}})", "measured is 3"},
      {R"({"X": {"measured": {"reach": 1}}})", "reach is 1"},
      {R"({"X": {"measured": {"reach": {"latant": {}}}}})", "did you mean 'latent'"},
      {R"({"X": {"measured": {"reach": {"latent": 0.5}}}})", "reach of latent is 0.5"},
      {R"({"X": {"measured": {"reach": {"latent": {"tensors": 1}}}}})", "did you mean 'tensor'"},
      {R"({"X": {"measured": {"reach": {"latent": {"tensor": 0}}}}})", "positive number"},
      {R"({"X": {"sm_count": 1e300}})", "no device has so many"},
      {"{\"\xff\": {}}", "not valid JSON"},
  };
  for (const auto& [text, message] : cases) {
    write(text);
    const DeviceTable table = load();
    EXPECT_EQ(table.names(), DeviceTable::load(kDevices).names()) << text;
    const std::string& found = table.ignored();
    EXPECT_NE(found.find(message), std::string::npos) << text << ": " << found;
    EXPECT_EQ(found.rfind(path().string(), 0), 0u) << "it names the file: " << found;
    EXPECT_EQ(found.find("json.exception"), std::string::npos) << found;
    EXPECT_NE(error_of([&] { DeviceTable::load(path()); }).find(message), std::string::npos)
        << "shipped, it is an error";
  }
  save_measured(path(), "X", {{"read_GBps", 5.0}});
  EXPECT_EQ(load().find("X").peak_gbps, 5);
  EXPECT_TRUE(std::filesystem::exists(path().string() + ".unusable"));
  EXPECT_EQ(load().ignored(), "");
  EXPECT_THROW(save_measured(path(), "X", {{"speed", 1.0}}), Error);
}

}  // namespace
}  // namespace hypermla::roofline_test
