#include <gtest/gtest.h>

#include "hypermla/plan/configure.h"
#include "hypermla/profile/frame.h"
#include "support.h"

namespace hypermla::report_test {
namespace {
using testing_support::contains;
using testing_support::error_of;

const char* const kProfile = R"json({
  "schema": 1, "mode": "event", "date": "2030-01-02T03:04:05Z",
  "kernel": "cutile.mla.flash_mla_split_kv_v3", "version": "v3",
  "problem": {"b": 32, "s": 16, "dtype": "bfloat16", "causal": false},
  "device": {"name": "NVIDIA H200", "arch": "sm_90", "processors": 132, "driver": "13.0 (580.1)"},
  "roofline": {"peak_tflops": 989.0, "peak_gbps": 4800.0, "ridge": 206.04, "predicted_us": 592.26, "bound": "compute"},
  "cost": {"flops": 585.7e9, "bytes": 0.2997e9, "intensity": 1954.3},
  "timing": {
    "cold": {"median_us": 1000.04, "low_us": 990.06, "high_us": 1100, "repetitions": 20, "tflops": 585.7, "gbps": 299.7,
             "roofline_fraction": 0.59226},
    "burst": {"median_us": 950, "low_us": 949, "high_us": 951, "repetitions": 20, "tflops": 616.5, "gbps": 315.4,
              "roofline_fraction": 0.6234, "sm_MHz": 1974.6, "watts": 650.2}
  },
  "stages": [
    {"name": "flash_mla_split_kv_v3", "tiling": {"Bm": 64, "fast": true}, "grid": [32, 1, 4], "registers": 255,
     "frame_bytes": 0, "shared_bytes": 180224, "flops": 585.7e9, "bytes": 0.2e9, "predicted_us": 592.2,
     "bound": "compute",
     "burst": {"median_us": 900.25, "low_us": 900, "high_us": 901, "repetitions": 5, "tflops": 650, "gbps": 222,
               "roofline_fraction": 0.66}},
    {"name": "reduce", "tiling": {"Bm": 4}, "grid": [128, 1, 1], "flops": 0, "bytes": 1e8, "predicted_us": 20.8,
     "bound": "memory"}
  ]
})json";

TEST(Report, IsAPureFunctionOfTheProfile) {
  EXPECT_EQ(render_report(profile_from_json(Json::parse(kProfile))),
            R"md(# Profile: cutile.mla.flash_mla_split_kv_v3 (v3)

2030-01-02T03:04:05Z on NVIDIA H200 (sm_90, driver 13.0 (580.1)), event mode.

Configuration: b=32, s=16, dtype=bfloat16, causal=false

Roofline: 586 GFLOP and 0.3 GB, 1954.3 FLOP/byte; at 989 TFLOP/s and 4800 GB/s (ridge 206.0) that is )md"
            R"md(592.3 us, compute bound.

| time | runs | median us | 5 to 95 % | TFLOP/s | GB/s | of roofline | clock and power |
|---|---|---|---|---|---|---|---|
| cold | 20 | 1000.0 | 990.1 to 1100.0 | 585.7 | 300 | 59.2 % | |
| burst | 20 | 950.0 | 949.0 to 951.0 | 616.5 | 315 | 62.3 % | 1975 MHz, 650 W |

| stage | grid | tiling | registers | frame B/thread | shared B | burst us | 5 to 95 % |
|---|---|---|---|---|---|---|---|
| flash_mla_split_kv_v3 | [32,1,4] | Bm=64, fast=true | 255 | 0 | 180224 | 900.2 | 900.0 to 901.0 |
| reduce | [128,1,1] | Bm=4 | - | - | - | - | - |

Cold: the cache is flushed before each run. Burst: a few runs back to back after a rest. )md"
            R"md(Sustained: after the board was kept busy. Graph replays, events. Clocks as found.
)md");
}

TEST(Report, NamesADriverOnlyWhereThereIsOne) {
  Profile profile = profile_from_json(Json::parse(kProfile));
  profile.device = {"AMD EPYC", "x86-64-v4", 2, ""};
  EXPECT_TRUE(contains(render_report(profile), "on AMD EPYC (x86-64-v4), event mode."));
}

// Seed, check and rejected tilings, through the file; and the grid of an older record, whose blocks are 132.0.
TEST(Report, SaysWhatWasRun) {
  Json json = Json::parse(kProfile);
  json["stages"][1]["grid"] = {132.0, 1, 1};
  Profile profile = profile_from_json(json);
  EXPECT_TRUE(contains(render_report(profile), "| reduce | [132,1,1] |"));
  EXPECT_FALSE(contains(render_report(profile), "Inputs:")) << "they were the caller's";
  profile.seed = 18446744073709551615u;
  EXPECT_TRUE(contains(render_report(profile), "seed 18446744073709551615. Check: not asked for (--check)."));
  profile.check = Profile::Check{true, {{"o", 2.11e-3}, {"lse", 3e-8}}};
  profile.stages[0].rejected = {{"it does not compile", 2}};
  const std::string report = render_report(profile_from_json(to_json(profile)));
  EXPECT_TRUE(contains(report, "seed 18446744073709551615. Check: passed (relative error lse 3.0e-08, o 2.1e-03)."));
  EXPECT_TRUE(contains(report, "flash_mla_split_kv_v3: 2 tilings rejected, because it does not compile."));
}

TEST(Report, OfACpuSpeaksOfNoBoard) {
  Profile profile = profile_from_json(Json::parse(kProfile));
  profile.device = {"AMD EPYC", "x86-64-v4", 2, ""};
  profile.timing.cold.tflops = 0.0213;
  const std::string report = render_report(profile);
  for (const char* word : {"board", "Graph", "Clocks", "events"}) EXPECT_FALSE(contains(report, word)) << word;
  EXPECT_TRUE(contains(report, "| 0.021 |"));
}

TEST(Report, ModesHaveNames) {
  for (const char* name : {"annotation", "event", "ncu", "nsys", "disabled"})
    EXPECT_EQ(profile_mode_name(profile_mode_from_name(name)), name);
  EXPECT_EQ(profile_mode_from_name("ncu"), ProfileMode::ncu);
  for (const char* wrong : {"", "events", "Event"})
    EXPECT_EQ(
        error_of([&] { profile_mode_from_name(wrong); }),
        "unknown profiling mode '" + std::string(wrong) + "'; choose one of annotation, event, ncu, nsys, disabled");
}

TEST(EventProfile, TimesAreInMicroseconds) {
  const Timing timing{{1e-6, 2e-6, 3e-6}, 1980, 650};
  const Times times = times_of(timing, {.flops = 4e6, .bytes = 2e3}, 1);
  EXPECT_DOUBLE_EQ(times.median_us, 2);
  EXPECT_DOUBLE_EQ(times.low_us, 1.1);
  EXPECT_DOUBLE_EQ(times.high_us, 2.9);
  EXPECT_EQ(times.repetitions, 3);
  EXPECT_EQ(times.sm_mhz, 1980);
  EXPECT_EQ(times.watts, 650);
  EXPECT_DOUBLE_EQ(times.tflops, 2);
  EXPECT_DOUBLE_EQ(times.gbps, 1);
  EXPECT_DOUBLE_EQ(times.roofline_fraction, 0.5);
}

// A real plan of two stages, compiled by a stand-in and launched on a device where each launch takes a millisecond.
TEST(EventProfile, WritesWhatItMeasured) {
  const testing_support::TempDir dir;
  CompilerConfig config;
  config.kernel_root = testing_support::checkout() / "kernels";
  config.include_root = testing_support::checkout() / "include";
  config.cache = dir.path() / "cache";
  config.toolchain.cxx = testing_support::write_fake_compiler(dir, "nothing is refused");
  Compiler compiler(config);
  testing_support::FakeDevice device;
  device.on_launch = [&](const std::filesystem::path&, Grid, void**) { device.now += 1e-3; };
  device.on_flush = [&] { device.now += 1; };
  DeviceSpec spec;
  spec.name = "Fake 1";
  spec.bfloat16_tflops = 1;
  spec.peak_gbps = 100;

  const KernelEntry entry = Registry::instance().find("cutile.mla.flash_mla_split_kv");
  const auto plan = entry.make();
  set_problem(*plan, {{"b", 2}, {"s", 3}, {"t", 100}, {"h", 4}});
  const auto executable = plan_empty(*plan);
  executable->prepare(compiler, device);
  const AutotuneResult untuned;
  const auto [measured, directory] = profile({.kernel = entry,
                                              .plan = *plan,
                                              .executable = *executable,
                                              .device = device,
                                              .spec = spec,
                                              .tuning = untuned,
                                              .out_dir = dir.path() / "out",
                                              .bench_runs = 3},
                                             ProfileMode::event);
  const Json json = to_json(measured);
  EXPECT_EQ(json["kernel"], "cutile.mla.flash_mla_split_kv");
  EXPECT_EQ(json["problem"], to_json(plan->problem_fields()));
  EXPECT_EQ(json["device"]["name"], "Fake 1");
  const Cost cost = executable->cost();
  const double predicted = executable->predict(spec, plan->dtype()).seconds;
  EXPECT_FALSE(json["timing"].contains("sustained"));  // of GPUs only
  for (const char* flavour : {"cold", "burst"}) {
    const Json& timing = json["timing"][flavour];
    EXPECT_NEAR(timing["median_us"].get<double>(), 2000, 1e-3) << flavour;
    EXPECT_EQ(timing["repetitions"], 3);
    EXPECT_NEAR(timing["tflops"].get<double>(), cost.flops / 2e-3 * 1e-12, 1e-9);
    EXPECT_NEAR(timing["gbps"].get<double>(), cost.bytes / 2e-3 * 1e-9, 1e-6);
    EXPECT_NEAR(timing["roofline_fraction"].get<double>(), predicted / 2e-3, 1e-9);
  }
  EXPECT_EQ(json["files"]["params.json"], std::filesystem::file_size(directory / "params.json"));
  for (const auto& [name, bytes] : json["files"].items())
    EXPECT_EQ(std::filesystem::file_size(directory / name), bytes) << name;
  ASSERT_EQ(json["stages"].size(), 2u);
  for (int i = 0; i < 2; ++i) {
    const Json& stage = json["stages"][i];
    const TiledKernel& kernel = *executable->kernels()[i];
    EXPECT_EQ(stage["name"], kernel.name());
    EXPECT_EQ(stage["tiling"], kernel.tiling());
    EXPECT_EQ(stage["grid"], (Json{kernel.grid().x, kernel.grid().y, kernel.grid().z}));
    EXPECT_NEAR(stage["burst"]["median_us"].get<double>(), 1000, 1e-3);
    EXPECT_EQ(Json::parse(read_file(directory / "tiling" / (kernel.name() + ".json"))), kernel.tiling());
    EXPECT_EQ(read_file(directory / "compiled" / kernel.name() / "kernel.cu"),
              read_file(kernel.entry().path("kernel.cu")));
  }
  EXPECT_EQ(directory, dir.path() / "out");
  EXPECT_EQ(Json::parse(read_file(directory / "profile.json")), json);
  EXPECT_EQ(Json::parse(read_file(directory / "params.json")), json["problem"]);
  EXPECT_EQ(read_file(directory / "report.md"), render_report(measured));
}

// What lies in results/ and what the tests recorded is read as it is, and comes out as it went in.
TEST(ProfileJson, RecordsOfOlderRunsAreRead) {
  int records = 0;
  for (const char* place : {"results", "tests/unit/recorded"})
    for (const auto& file : std::filesystem::recursive_directory_iterator(testing_support::checkout() / place)) {
      if (file.path().extension() != ".json") continue;
      const Json json = Json::parse(read_file(file.path()));
      if (!json.contains("stages")) continue;
      ++records;
      EXPECT_EQ(nlohmann::json(to_json(load_profile(file.path()))), nlohmann::json(json)) << file.path();
    }
  EXPECT_GT(records, 50);
}

// A label that JSON cannot hold is refused before it can spoil the file.
TEST(ProfileJson, TextsAreUtf8) {
  EXPECT_EQ(error_of([] { require_utf8("the label", "\xff"); }),
            "the label is no UTF-8 text, which a profile could not hold; give it in UTF-8");
  EXPECT_NO_THROW(require_utf8("the label", "\u00e9"));
}

TEST(ProfileJson, WhatIsNoneIsRefusedByName) {
  const testing_support::TempDir dir;
  auto refusal = [&](const std::function<void(Json&)>& spoil) {
    Json json = Json::parse(kProfile);
    spoil(json);
    return error_of([&] { load_profile(dir.write("spoilt.json", json.dump())); });
  };
  for (const auto& [spoil, expected] : std::vector<std::pair<std::function<void(Json&)>, std::string>>{
           {[](Json& json) { json = Json::object(); },
            "spoilt.json is not a profile (it has no 'schema'); give the dir"},
           {[](Json& json) { json = nullptr; }, "it has no 'schema'"},
           {[](Json& json) { json["stages"][1].erase("grid"); }, "spoilt.json is not a profile (it has no 'grid')"},
           {[](Json& json) { json["timing"]["cold"]["median_us"] = "fast"; },
            "spoilt.json is not a profile (its 'median_us' is of another type)"},
           {[](Json& json) { json["schema"] = 99; }, "its schema is 99, and this program reads 1 to 2"},
           {[](Json& json) { json["problem"] = 3; }, "its 'problem' is of another type"},
           {[](Json& json) {
              json["stages"][0]["tiling"] = {1, 2};
            },
            "its 'tiling' is of another type"},
           {[](Json& json) { json["stages"] = 5; }, "spoilt.json is not a profile"}})
    EXPECT_TRUE(contains(refusal(spoil), expected) && !contains(refusal(spoil), "json.exception")) << refusal(spoil);
  EXPECT_TRUE(contains(error_of([&] { load_profile(dir.write("torn.json", "{\"schema\": 2,")); }), "is not a profile"));
  EXPECT_TRUE(contains(error_of([&] { load_profile(dir.path()); }), "profile.json"));
  dir.write("run/profile.json", kProfile);
  EXPECT_EQ(load_profile(dir.path() / "run").timing.cold.median_us, 1000.04);
}

}  // namespace
}  // namespace hypermla::report_test
