#include "hypermla/plan/executable.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "support.h"

namespace {
std::atomic<long> allocations{0};
}  // namespace

// Counted for the whole test program: run() must not allocate.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(bytes ? bytes : 1);
}
void* operator new(std::size_t bytes) {
  if (void* data = operator new(bytes, std::nothrow)) return data;
  throw std::bad_alloc();
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }

namespace hypermla::executable_test {
namespace {
namespace fs = std::filesystem;
using testing_support::contains;
using testing_support::error_of;
using testing_support::FakeDevice;
using testing_support::TempDir;
using testing_support::write_fake_compiler;

struct ScaleProblem {
  int n = 0;
  DType dtype = DType::float16;
  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("n", self.n, "");
    field("dtype", self.dtype, "");
  }
};
struct ScaleTiling {
  int Bm = 64;
  bool fast = false;
  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("Bm", self.Bm, "");
    field("fast", self.fast, "");
  }
};
using Spec = CtKernelSpec<ScaleProblem, ScaleTiling>;

const DeviceSpec kDevice = [] {
  DeviceSpec spec;
  spec.name = "round";
  spec.bfloat16_tflops = spec.float16_tflops = 1;  // 10^12 FLOP/s
  spec.peak_gbps = 1;                              // 10^9 B/s
  spec.sm_count = 10;
  return spec;
}();

Spec example(const std::string& name, int n = 1000) {
  Spec spec;
  spec.name = name;
  spec.header = "cutile/test/" + name + ".cuh";
  spec.problem = {.n = 0, .dtype = DType::bfloat16};
  spec.tiling = {.Bm = 64, .fast = true};
  spec.candidates = {{.Bm = 32, .fast = false}, {.Bm = 64, .fast = true}};
  spec.cost = {.flops = 2e12, .bytes = 1e9};  // two seconds, bound by arithmetic
  spec.grid = [n](const ScaleTiling& tiling) { return Grid{unsigned((n + tiling.Bm - 1) / tiling.Bm), 1, 1}; };
  spec.arguments = [n](const ScaleTiling& tiling) { return Arguments(n, tiling.Bm); };
  spec.executed = [](const ScaleTiling& tiling) { return Cost{2e12 * tiling.Bm / 64.0, 1e9}; };
  return spec;
}

// A compiler without compiler behind it, and a device that notes what is launched.
class ExecutableTest : public testing::Test {
 protected:
  ExecutableTest() {
    dir_.write("kernels/cutile/tile_host/entry.h", "");
    for (const char* name : {"first", "second", "third"})
      dir_.write("kernels/cutile/test/" + std::string(name) + ".cuh", name);
    CompilerConfig config;
    config.kernel_root = dir_.path() / "kernels";
    config.include_root = dir_.path() / "include";
    config.cache = dir_.path() / "cache";
    config.toolchain.cxx = write_fake_compiler(dir_, "Bm = 13,");
    compiler_ = std::make_unique<Compiler>(config);
    device_.on_launch = [this](const fs::path& artifact, Grid grid, void** arguments) {
      const std::string entry = artifact.parent_path().filename().string();
      launches_.push_back(entry.substr(0, entry.find('-')) + " " + std::to_string(grid.x) +
                          " blocks, n=" + std::to_string(*static_cast<int*>(arguments[0])) +
                          " Bm=" + std::to_string(*static_cast<int*>(arguments[1])));
    };
  }

  TempDir dir_;
  std::unique_ptr<Compiler> compiler_;
  FakeDevice device_;
  std::vector<std::string> launches_;
};

TEST(Executables, AKernelNamesItsInstance) {
  const CtKernel kernel(example("soft_max_v2"));
  const KernelSource source = kernel.source(kernel.tiling());
  EXPECT_EQ(source.name, "soft_max_v2");
  EXPECT_EQ(source.header, "cutile/test/soft_max_v2.cuh");
  EXPECT_EQ(source.instance,
            "hypermla::soft_max_v2<hypermla::executable_test::(anonymous namespace)::ScaleProblem{.n = 0, "
            ".dtype = hypermla::DType::bfloat16}, "
            "hypermla::executable_test::(anonymous namespace)::ScaleTiling{.Bm = 64, .fast = true}>");
  EXPECT_TRUE(contains(kernel.source({{"Bm", 16}, {"fast", false}}).instance, "{.Bm = 16, .fast = false}"));
  EXPECT_EQ(kernel.candidates(), (std::vector<Json>{{{"Bm", 32}, {"fast", false}}, {{"Bm", 64}, {"fast", true}}}));
}

TEST(Executables, ATilingIsSetByNameAndItsGridFollows) {
  CtKernel kernel(example("first"));
  EXPECT_EQ(kernel.grid().x, 16u);
  kernel.set_tiling({{"Bm", 100}});
  EXPECT_EQ(kernel.grid().x, 10u);
  EXPECT_EQ(kernel.tiling(), (Json{{"Bm", 100}, {"fast", true}}));  // what is not named keeps the plan's value
  kernel.set_tiling({{"fast", false}});
  EXPECT_EQ(kernel.tiling(), (Json{{"Bm", 64}, {"fast", false}}));
  const std::string message = error_of([&] { kernel.set_tiling({{"bm", 1}}); });
  EXPECT_TRUE(contains(message, "'bm'") && contains(message, "'Bm'")) << message;
  EXPECT_THROW(kernel.set_tiling({{"Bm", "many"}}), Error);
  EXPECT_EQ(kernel.tiling(), (Json{{"Bm", 64}, {"fast", false}}));  // as it was
}

TEST(Executables, PredictionsCountWholeWaves) {
  // Two seconds of work for 10 processors, with any number of blocks; one block too many costs another wave.
  for (const auto& [n, seconds] : std::vector<std::pair<int, double>>{{64 * 10, 2},
                                                                      {64 * 20, 2},
                                                                      {64 * 11, 2 * 2 / 1.1},
                                                                      {64 * 5, 2 * 1 / 0.5},
                                                                      {64, 2 * 1 / 0.1},
                                                                      {64 * 25, 2 * 3 / 2.5}}) {
    const CtKernel kernel(example("first", n));
    EXPECT_DOUBLE_EQ(kernel.predict_seconds({{"Bm", 64}, {"fast", true}}, kDevice, DType::bfloat16), seconds) << n;
    EXPECT_DOUBLE_EQ(kernel.predict(kDevice, DType::bfloat16).seconds, 2);  // the algorithm's own knows no waves
  }
  const CtKernel kernel(example("first", 64 * 10));
  EXPECT_DOUBLE_EQ(kernel.predict_seconds({{"Bm", 32}, {"fast", true}}, kDevice, DType::bfloat16), 1);  // executes half
  EXPECT_DOUBLE_EQ(kernel.predict_seconds({{"Bm", 16}, {"fast", true}}, kDevice, DType::bfloat16),
                   1);  // bound by memory
  DeviceSpec unknown = kDevice;
  unknown.sm_count = 0;
  EXPECT_DOUBLE_EQ(kernel.predict_seconds({{"Bm", 64}, {"fast", true}}, unknown, DType::bfloat16), 2);
}

TEST(Executables, ArgumentsLieWhereTheDriverLooks) {
  int target = 0;
  Arguments arguments(static_cast<void*>(&target), 7, 0.5f, static_cast<void*>(nullptr), -3);
  void** pointers = arguments.pointers();
  EXPECT_EQ(*static_cast<void**>(pointers[0]), &target);
  EXPECT_EQ(*static_cast<int*>(pointers[1]), 7);
  EXPECT_EQ(*static_cast<float*>(pointers[2]), 0.5f);
  EXPECT_EQ(*static_cast<void**>(pointers[3]), nullptr);
  EXPECT_EQ(*static_cast<int*>(pointers[4]), -3);
  Arguments moved = std::move(arguments);
  EXPECT_EQ(*static_cast<int*>(moved.pointers()[4]), -3);
}

TEST_F(ExecutableTest, RunsWithTheTilingOfTheLastPrepare) {
  CtKernel kernel(example("first"));
  EXPECT_FALSE(kernel.prepared());
  kernel.prepare(*compiler_, device_);
  EXPECT_TRUE(kernel.prepared());
  kernel.run(nullptr);
  kernel.set_tiling({{"Bm", 100}});
  kernel.run(nullptr);  // not prepared for it yet
  kernel.prepare(*compiler_, device_);
  kernel.run(nullptr);
  EXPECT_EQ(launches_, (std::vector<std::string>{"first 16 blocks, n=1000 Bm=64", "first 16 blocks, n=1000 Bm=64",
                                                 "first 10 blocks, n=1000 Bm=100"}));
  EXPECT_EQ(kernel.entry().report["instance"], kernel.source(kernel.tiling()).instance);
  const int loads = device_.loads;
  kernel.prepare(*compiler_, device_);
  EXPECT_EQ(device_.loads, loads);  // what is loaded is not loaded again
}

// A field that the kernel learns at run time is none of the source's, but all of the launch's.
TEST_F(ExecutableTest, TilingsThatDifferAtRunTimeOnlyShareACompilation) {
  Spec spec = example("first");
  spec.at_compile_time = [](ScaleTiling tiling) {
    tiling.Bm = 0;
    return tiling;
  };
  CtKernel kernel(spec);
  EXPECT_TRUE(contains(kernel.source(kernel.tiling()).instance, "{.Bm = 0, .fast = true}"));
  kernel.prepare(*compiler_, device_);
  kernel.run(nullptr);
  kernel.set_tiling({{"Bm", 100}});
  EXPECT_EQ(kernel.tiling()["Bm"], 100);
  kernel.prepare(*compiler_, device_);
  kernel.run(nullptr);
  EXPECT_EQ(launches_, (std::vector<std::string>{"first 16 blocks, n=1000 Bm=64", "first 10 blocks, n=1000 Bm=100"}));
  EXPECT_EQ(device_.loads, 1);
}

TEST_F(ExecutableTest, ATilingThatDoesNotCompileLeavesTheOldOneRunning) {
  CtKernel kernel(example("first"));
  kernel.prepare(*compiler_, device_);
  kernel.set_tiling({{"Bm", 13}});
  EXPECT_THROW(kernel.prepare(*compiler_, device_), Error);
  kernel.run(nullptr);
  EXPECT_EQ(launches_.back(), "first 16 blocks, n=1000 Bm=64");
}

// A kernel whose launch the plan shapes: bytes made on the host reach it, and no blocks mean no launch.
TEST_F(ExecutableTest, LaunchesAsThePlanSays) {
  const auto device = std::make_shared<FakeDevice>();
  CuteKernelSpec<ScaleProblem, ScaleTiling> spec;
  static_cast<KernelSpec<ScaleProblem, ScaleTiling>&>(spec) = example("first");
  spec.launch = [](const ScaleTiling& tiling) {
    KernelLaunch launch;
    launch.grid = {unsigned(tiling.Bm), tiling.Bm > 1 ? 2u : 0u, 1};
    launch.shape = {384, 1000u * unsigned(tiling.Bm), 2, true};
    launch.constants = "list of " + std::to_string(tiling.Bm) + '\0';
    launch.arguments = [](void* constants) { return Arguments(constants); };
    return launch;
  };
  CuteKernel kernel(spec);
  EXPECT_EQ(kernel.source(kernel.tiling()).instance,
            "hypermla::cute::first<hypermla::executable_test::(anonymous namespace)::ScaleProblem{.n = 0, .dtype = "
            "hypermla::DType::bfloat16}, "
            "hypermla::executable_test::(anonymous namespace)::ScaleTiling{.Bm = 64, .fast = true}>");
  std::vector<std::string> seen;
  device->on_launch = [&](const fs::path&, Grid grid, void** arguments) {
    seen.push_back(std::to_string(grid.x) + " " + *static_cast<const char**>(arguments[0]));
  };
  kernel.prepare(*compiler_, *device);
  EXPECT_EQ(device->loaded_shape, (LaunchShape{384, 64000, 2, true}));
  kernel.run(nullptr);
  kernel.set_tiling({{"Bm", 1}});
  kernel.prepare(*compiler_, *device);
  kernel.run(nullptr);
  EXPECT_EQ(kernel.predict_seconds(kernel.tiling(), kDevice, DType::bfloat16), 0);
  kernel.set_tiling({{"Bm", 2}});
  kernel.prepare(*compiler_, *device);
  kernel.run(nullptr);
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_EQ(seen[0].substr(0, 13), "64 list of 64");
  EXPECT_EQ(seen[1].substr(0, 11), "2 list of 2");
}

std::unique_ptr<Executable> nested() {
  std::vector<std::unique_ptr<Executable>> inner, outer;
  inner.push_back(std::make_unique<CtKernel>(example("second", 2000)));
  Spec memory = example("third", 3000);
  memory.cost = {.flops = 1e12, .bytes = 4e9};  // four seconds, bound by memory
  inner.push_back(std::make_unique<CtKernel>(memory));
  outer.push_back(std::make_unique<CtKernel>(example("first")));
  outer.push_back(std::make_unique<KernelPipeline>("inner", std::move(inner)));
  return std::make_unique<KernelPipeline>("outer", std::move(outer));
}

TEST_F(ExecutableTest, PipelinesRunInOrderHoweverNested) {
  const auto pipeline = nested();
  EXPECT_EQ(pipeline->name(), "outer");
  std::vector<std::string> names;
  for (TiledKernel* kernel : pipeline->kernels()) names.push_back(kernel->name());
  EXPECT_EQ(names, (std::vector<std::string>{"first", "second", "third"}));
  pipeline->prepare(*compiler_, device_);
  pipeline->run(nullptr);
  EXPECT_EQ(launches_, (std::vector<std::string>{"first 16 blocks, n=1000 Bm=64", "second 32 blocks, n=2000 Bm=64",
                                                 "third 47 blocks, n=3000 Bm=64"}));
}

TEST_F(ExecutableTest, PipelinesAddUp) {
  const auto pipeline = nested();
  EXPECT_DOUBLE_EQ(pipeline->cost().flops, 5e12);
  EXPECT_DOUBLE_EQ(pipeline->cost().bytes, 6e9);
  const Prediction prediction = pipeline->predict(kDevice, DType::bfloat16);
  EXPECT_DOUBLE_EQ(prediction.seconds, 2 + 2 + 4);  // stages do not overlap: more than the roofline of the sum
  EXPECT_DOUBLE_EQ(prediction.compute_seconds, 5);
  EXPECT_DOUBLE_EQ(prediction.memory_seconds, 6);
  EXPECT_EQ(prediction.bound, Bound::memory);
}

using Parts = std::vector<std::unique_ptr<Executable>>;

template <class... Ts>
Parts parts(std::unique_ptr<Ts>... each) {
  Parts all;
  (all.push_back(std::move(each)), ...);
  return all;
}
std::unique_ptr<Executable> kernel(const std::string& name, int n = 1000) {
  return std::make_unique<CtKernel>(example(name, n));
}
// Four seconds, bound by memory.
std::unique_ptr<Executable> slow_reader(const std::string& name) {
  Spec memory = example(name);
  memory.cost = {.flops = 1e12, .bytes = 4e9};
  return std::make_unique<CtKernel>(memory);
}
std::unique_ptr<ConcurrentKernels> group(Parts members, ConcurrentKernels::JointValidation validate = {},
                                         std::vector<int> partition = {}) {
  return std::make_unique<ConcurrentKernels>("paths", std::move(members), std::move(validate), std::move(partition));
}

TEST_F(ExecutableTest, MembersRunOnStreamsOfTheirOwn) {
  device_.note_streams = true;
  KernelPipeline pipeline("all", parts(kernel("first"), group(parts(kernel("second", 2000), kernel("third", 3000)))));
  ASSERT_EQ(pipeline.groups().size(), 1u);
  EXPECT_EQ(pipeline.groups()[0]->name(), "paths");
  EXPECT_EQ(pipeline.kernels()[2]->name(), "third");
  pipeline.prepare(*compiler_, device_);
  pipeline.prepare(*compiler_, device_);  // again, as after another tiling: with the same streams
  pipeline.run(device_.stream());
  EXPECT_EQ(device_.stream_events,
            (std::vector<std::string>{"a runs first", "b waits for a", "c waits for a", "b runs second", "c runs third",
                                      "a waits for b", "a waits for c"}));
  EXPECT_EQ(launches_[2], "third 47 blocks, n=3000 Bm=64");
}

TEST_F(ExecutableTest, GroupsNestInPipelinesAndInGroups) {
  device_.note_streams = true;
  const auto inner = [] { return group(parts(kernel("second"), kernel("third"))); };
  const auto outer = group(parts(kernel("first"), std::make_unique<KernelPipeline>("chain", parts(inner()))));
  EXPECT_EQ(outer->groups(), std::vector<ConcurrentKernels*>{outer.get()}) << "the outermost";
  outer->prepare(*compiler_, device_);
  outer->run(device_.stream());
  EXPECT_EQ(device_.stream_events,
            (std::vector<std::string>{"b waits for a", "c waits for a", "b runs first", "d waits for c",
                                      "e waits for c", "d runs second", "e runs third", "c waits for d",
                                      "c waits for e", "a waits for b", "a waits for c"}));
}

// At any depth, with any plans between: all on the SMs of the member that they are part of.
TEST_F(ExecutableTest, GroupsInAPartitionStayThere) {
  device_.note_streams = true;
  auto deepest = group(parts(kernel("second"), std::make_unique<KernelPipeline>("chain", parts(kernel("third")))));
  auto inner = group(parts(kernel("first"), std::make_unique<KernelPipeline>("way", parts(std::move(deepest)))));
  const auto outer = group(parts(kernel("first"), std::move(inner)), {}, {2, 8});
  const std::vector<TiledKernel*> kernels = outer->kernels();
  EXPECT_EQ(kernels[0]->processors(), 2);
  for (std::size_t i = 1; i < kernels.size(); ++i) EXPECT_EQ(kernels[i]->processors(), 8) << i;
  outer->prepare(*compiler_, device_);
  outer->run(device_.stream());
  // a: the device's; b, c: the partitions; d, e: inside c; f, g: inside e.
  EXPECT_EQ(device_.stream_events,
            (std::vector<std::string>{
                "d on the 8 SMs of c", "e on the 8 SMs of c", "f on the 8 SMs of e", "g on the 8 SMs of e",
                "b waits for a",       "c waits for a",       "b runs first",        "d waits for c",
                "e waits for c",       "d runs first",        "f waits for e",       "g waits for e",
                "f runs second",       "g runs third",        "e waits for f",       "e waits for g",
                "c waits for d",       "c waits for e",       "a waits for b",       "a waits for c"}));
}

TEST_F(ExecutableTest, AGroupOfWhichOneKernelIsLaunchedIsNone) {
  Spec nothing = example("second");
  nothing.grid = [](const ScaleTiling&) { return Grid{0, 1, 1}; };
  KernelPipeline pipeline("all", parts(group(parts(kernel("first"), std::make_unique<CtKernel>(nothing))),
                                       group(parts(kernel("first"), kernel("third")))));
  EXPECT_EQ(pipeline.groups().size(), 2u);
  ASSERT_EQ(launched_groups(pipeline).size(), 1u);
  EXPECT_EQ(launched_groups(pipeline)[0]->kernels()[1]->name(), "third");
}

TEST_F(ExecutableTest, TilingsThatDoNotGoTogetherAreRefusedBeforeAnythingIsCompiled) {
  int asked = 0;
  const auto paths =
      group(parts(kernel("first"), kernel("second", 2000)), [&](const std::vector<TiledKernel*>& kernels) {
        ++asked;
        require_resident_blocks(kernels, 48);
      });
  KernelPipeline pipeline("all", parts(std::make_unique<KernelPipeline>("inner", parts(kernel("third"))),
                                       group(parts(kernel("third"))), kernel("third")));
  EXPECT_NO_THROW(pipeline.validate_tilings());  // nothing to object to
  paths->prepare(*compiler_, device_);           // 16 and 32 blocks
  EXPECT_EQ(asked, 1);
  const int loads = device_.loads;
  paths->kernels()[1]->set_tiling({{"Bm", 32}});
  EXPECT_EQ(error_of([&] { paths->prepare(*compiler_, device_); }),
            "the blocks of 16 first and 63 second need 79 SMs at once, and there are 48; lower their budgets");
  EXPECT_EQ(device_.loads, loads);
  paths->run(device_.stream());
  EXPECT_EQ(launches_.back(), "second 32 blocks, n=2000 Bm=64") << "as prepared last";
}

struct PersistentTiling {
  int blocks = 8, occupancy = 1;
  template <class Self, class Visitor>
  static constexpr void fields(Self& self, Visitor&& field) {
    field("blocks", self.blocks, "");
    field("occupancy", self.occupancy, "");
  }
};
std::unique_ptr<Executable> persistent(const std::string& name, PersistentTiling tiling) {
  CtKernelSpec<ScaleProblem, PersistentTiling> spec;
  spec.name = name;
  spec.tiling = tiling;
  spec.grid = [](const PersistentTiling& at) { return Grid{unsigned(at.blocks), 1, 1}; };
  spec.executed = [](const PersistentTiling&) { return Cost{1e12, 1e9}; };
  spec.cost = {1e12, 1e9};
  return std::make_unique<CtKernel>(std::move(spec));
}

TEST(Executables, ResidentBlocksMustFitTheirSms) {
  auto refusal = [](PersistentTiling a, PersistentTiling b, std::vector<int> partition = {}) {
    const auto paths = group(
        parts(persistent("first", a), persistent("second", b)),
        [](const std::vector<TiledKernel*>& kernels) { require_resident_blocks(kernels, 10); }, std::move(partition));
    return error_of([&] { paths->validate_tilings(); });
  };
  EXPECT_EQ(refusal({6, 1}, {4, 1}), "");
  EXPECT_EQ(refusal({6, 1}, {8, 2}), "");
  EXPECT_EQ(refusal({6, 1}, {9, 2}),
            "the blocks of 6 first and 9 second need 11 SMs at once, and there are 10; lower their budgets");
  EXPECT_EQ(refusal({6, 1}, {8, 2}, {6, 4}), "");
  EXPECT_EQ(refusal({2, 1}, {9, 2}, {6, 4}),
            "second has 9 blocks, but its partition of 4 SMs holds 8; give it fewer blocks or more SMs");
  EXPECT_TRUE(contains(refusal({6, 1}, {8, 2}, {7, 4}), "need 11 SMs"));
}

TEST(Executables, PartitionsAreOnePerMember) {
  auto refusal = [](std::vector<int> partition, bool nest = false) {
    Parts members = parts(kernel("first"), nest ? group(parts(kernel("second"))) : kernel("second"));
    return error_of([&] { group(std::move(members), {}, partition); });
  };
  EXPECT_EQ(refusal({}), "");
  EXPECT_EQ(refusal({2, 8}), "");
  EXPECT_TRUE(contains(refusal({2, 8, 1}), "paths has 2 members and 3 partitions"));
  EXPECT_TRUE(contains(refusal({2, 0}), "paths gives second a partition of 0 SMs"));
  EXPECT_EQ(refusal({}, true), "");
  EXPECT_EQ(refusal({2, 8}, true), "");
  EXPECT_EQ(error_of([] {
              group(parts(kernel("first"), group(parts(kernel("second"), kernel("third")), {}, {4, 4})), {}, {2, 8});
            }),
            "paths in a partition of paths is divided once more; divide only one of them");
}

TEST(Executables, GroupsTakeTheLongestMemberOrTheWorkOfAll) {
  auto seconds = [](std::vector<int> partition) {
    return group(parts(kernel("first"), slow_reader("second")), {}, std::move(partition))
        ->predict(kDevice, DType::bfloat16);
  };
  // 2 s of arithmetic and 1 s of traffic beside 1 s and 4 s.
  EXPECT_DOUBLE_EQ(seconds({}).seconds, 5);
  EXPECT_DOUBLE_EQ(seconds({}).compute_seconds, 3);
  EXPECT_EQ(seconds({}).bound, Bound::memory);
  EXPECT_DOUBLE_EQ(seconds({5, 5}).seconds, 5);
  EXPECT_DOUBLE_EQ(seconds({2, 8}).seconds, 10) << "2 s of arithmetic on a fifth of the SMs";
  EXPECT_DOUBLE_EQ(seconds({9, 1}).seconds, 10) << "1 s of it on a tenth";
  // Stages of a member do not overlap each other.
  const auto chain = group(
      parts(kernel("first"), std::make_unique<KernelPipeline>("chain", parts(slow_reader("second"), kernel("third")))));
  EXPECT_DOUBLE_EQ(chain->predict(kDevice, DType::bfloat16).seconds, 6);
  EXPECT_DOUBLE_EQ(chain->cost().flops, 5e12);
  // The waves of a tiling are those of its partition, and so is its arithmetic.
  const auto confined = group(parts(kernel("first", 64 * 4), kernel("second")), {}, {2, 8});
  EXPECT_DOUBLE_EQ(confined->kernels()[0]->predict_seconds({{"Bm", 64}, {"fast", true}}, kDevice, DType::bfloat16), 10);
  EXPECT_DOUBLE_EQ(confined->kernels()[0]->predict_seconds({{"Bm", 128}, {"fast", true}}, kDevice, DType::bfloat16),
                   20);
  confined->kernels()[0]->confine(3);
  EXPECT_DOUBLE_EQ(confined->kernels()[0]->predict_seconds({{"Bm", 64}, {"fast", true}}, kDevice, DType::bfloat16),
                   2 / 0.3 * 2 / (4 / 3.0));
}

// On a CPU a launch is done when it returns: one after the other, in order, and a partition means nothing.
TEST(Executables, ACpuRunsMembersInOrder) {
  const auto device = make_cpu_device(3);
  for (const std::vector<int>& partition : {std::vector<int>{}, {1, 2}}) {
    const auto streams = device->streams(2, partition);
    streams->fork(nullptr);
    EXPECT_EQ(streams->stream(1), nullptr);
    EXPECT_EQ(streams->processors(0), 3);
    EXPECT_EQ(streams->inside(1, 2)->processors(1), 3);
    streams->join(nullptr);
  }
}

TEST_F(ExecutableTest, RunAllocatesNothing) {
  const auto pipeline = std::make_unique<KernelPipeline>(
      "all", parts(nested(), group(parts(kernel("first"), group(parts(kernel("second"), kernel("third")))))));
  pipeline->prepare(*compiler_, device_);
  int launched = 0;
  device_.on_launch = [&launched](const fs::path&, Grid, void**) { ++launched; };
  const long before = allocations;
  for (int i = 0; i < 3; ++i) pipeline->run(device_.stream());
  const long after = allocations;
  EXPECT_EQ(launched, 18);
  EXPECT_EQ(after, before);
  const auto something = std::make_unique<std::string>(100, 'x');
  EXPECT_GT(allocations, after);  // the counter counts
}

}  // namespace
}  // namespace hypermla::executable_test
