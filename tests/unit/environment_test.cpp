// Where the library finds its files and compilers, in trees made here.
#include "hypermla/api/environment.h"

#include <gtest/gtest.h>
#include <pwd.h>
#include <stdlib.h>
#include <unistd.h>

#include <iostream>
#include <map>
#include <optional>

#include "hypermla/base/process.h"
#include "hypermla/roofline/roofline.h"
#include "support.h"

namespace hypermla::environment_test {
namespace {
namespace fs = std::filesystem;
using testing_support::contains;
using testing_support::error_of;
using testing_support::TempDir;

constexpr const char* kVariables[] = {"HYPERMLA_ROOT",
                                      "HYPERMLA_CACHE_DIR",
                                      "HYPERMLA_KERNELS",
                                      "HYPERMLA_CUDA_ROOT",
                                      "HYPERMLA_HOST_FLAGS",
                                      "CUDA_HOME",
                                      "CXX",
                                      "XDG_CACHE_HOME",
                                      "HOME",
                                      "PATH"};

// Starts without any variable that is read, and puts all back at the end.
class EnvironmentTest : public testing::Test {
 protected:
  EnvironmentTest() {
    for (const char* name : kVariables) {
      if (const char* value = ::getenv(name)) before_[name] = value;
      ::unsetenv(name);
    }
    fs::current_path(dir_.path());
  }
  ~EnvironmentTest() override {
    fs::current_path(directory_);
    for (const char* name : kVariables) {
      if (before_.count(name))
        ::setenv(name, before_[name].c_str(), 1);
      else
        ::unsetenv(name);
    }
  }
  static void set(const char* name, const fs::path& value) { ::setenv(name, value.c_str(), 1); }

  fs::path tree(const std::string& name, bool is_checkout) {
    dir_.write(name + "/kernels/cutile/tile.h", "");
    if (is_checkout) dir_.write(name + "/CMakeLists.txt", "");
    return dir_.path() / name;
  }
  fs::path toolkit(const std::string& name) {
    dir_.write(name + "/bin/tileiras", "");
    dir_.write(name + "/lib/libnvrtc.so.13", "");
    return dir_.path() / name;
  }

  fs::path directory_ = fs::current_path();
  TempDir dir_;
  std::map<std::string, std::string> before_;
};

TEST_F(EnvironmentTest, TakesTheRootItIsGiven) {
  const fs::path root = tree("checkout", true);
  set("HYPERMLA_ROOT", root);
  const Environment found = Environment::detect();
  EXPECT_EQ(found.root, root);
  EXPECT_EQ(found.cache, root / ".cache");
  EXPECT_EQ(found.kernel_root(), root / "kernels");
  EXPECT_EQ(found.history_root(), root / ".cache/kernel-autotune");
  EXPECT_EQ(found.measured_devices(), root / ".cache/devices.json");
  const CompilerConfig config = found.compiler_config();
  EXPECT_EQ(config.kernel_root, root / "kernels");
  EXPECT_EQ(config.include_root, root / "include");
  EXPECT_EQ(config.cache, root / ".cache/kernels");
  EXPECT_EQ(config.shipped, root / "compiled");
  EXPECT_GE(config.jobs, 1);
}

// The process may change its directory later, as Python programs do.
TEST_F(EnvironmentTest, ARelativeRootIsMadeAbsolute) {
  const fs::path root = tree("checkout", true);
  set("HYPERMLA_ROOT", "checkout");
  EXPECT_EQ(Environment::detect().root, root);
  EXPECT_EQ(Environment::detect().cache, root / ".cache");
}

TEST_F(EnvironmentTest, TakesKernelsOfOnesOwn) {
  const fs::path root = tree("checkout", true), own = dir_.path() / "project/kernels";
  set("HYPERMLA_ROOT", root);
  EXPECT_TRUE(Environment::detect().own_kernels.empty());
  KernelEntry entry{"cutile", "mla", "mine", "v0", "cutile/mla/mine/mine", "", {}, false};
  dir_.write("project/kernels/cutile/mla/mine/mine/mine.cuh", "");
  fs::permissions(own, fs::perms::group_write | fs::perms::others_write, fs::perm_options::remove);
  for (const auto& one : fs::recursive_directory_iterator(own))
    fs::permissions(one.path(), fs::perms::group_write | fs::perms::others_write, fs::perm_options::remove);
  set("HYPERMLA_KERNELS", own / "");
  const Environment found = Environment::detect();
  EXPECT_EQ(found.own_kernels, own);
  EXPECT_EQ(found.compiler_config().own_kernel_root, own);
  EXPECT_EQ(found.record_of(entry), own / "verified.json");
  entry.directory = "cutile/mla/theirs/theirs";
  EXPECT_EQ(found.record_of(entry), root / "results/verified.json");
  fs::permissions(own / "cutile/mla/mine/mine/mine.cuh", fs::perms::others_write, fs::perm_options::add);
  EXPECT_TRUE(contains(error_of([] { Environment::detect(); }), "chmod -R go-w"));
  fs::create_directory(dir_.path() / "linked");
  fs::create_directory_symlink(own, dir_.path() / "linked/kernels");
  set("HYPERMLA_KERNELS", dir_.path() / "linked/kernels");
  EXPECT_TRUE(contains(error_of([] { Environment::detect(); }), "is a link"));
}

// A version that the program was built without lies where versions do; other sources are helpers of versions.
TEST_F(EnvironmentTest, OfKernelsOfOnesOwnOnlyVersionsAwaitABuild) {
  set("HYPERMLA_ROOT", tree("checkout", true));
  const fs::path own = dir_.path() / "project/kernels";
  for (const char* file : {"cutile/mla/mine/mine_v2/mine_v2.cpp", "cutile/mla/mine/mine/mine.cpp", "util/util.cpp",
                           "cutile/mla/mine/v22/v22.cpp", "cutile/mla/mine/mine_v2/parts/parts.cpp",
                           "cutile/mla/mine/mine_v02/mine_v02.cpp", "cutile/mla/mine/mine_v3/other.cpp"})
    dir_.write((fs::path("project/kernels") / file).string(), "");
  fs::permissions(own, fs::perms::group_write | fs::perms::others_write, fs::perm_options::remove);
  for (const auto& one : fs::recursive_directory_iterator(own))
    fs::permissions(one.path(), fs::perms::group_write | fs::perms::others_write, fs::perm_options::remove);
  set("HYPERMLA_KERNELS", own);
  std::vector<std::string> unbuilt = Environment::detect().unbuilt_kernels();
  std::sort(unbuilt.begin(), unbuilt.end());
  EXPECT_EQ(unbuilt, (std::vector<std::string>{"cutile/mla/mine/mine", "cutile/mla/mine/mine_v2"}));
}

TEST_F(EnvironmentTest, RefusesARootWithoutKernels) {
  set("HYPERMLA_ROOT", dir_.path());
  const std::string message = error_of([] { Environment::detect(); });
  EXPECT_TRUE(contains(message, "HYPERMLA_ROOT=" + dir_.path().string())) << message;
}

TEST_F(EnvironmentTest, AnInstallationCachesInTheUsersDirectory) {
  set("HYPERMLA_ROOT", tree("share/hypermla", false));
  if (const passwd* user = ::getpwuid(::geteuid()))
    EXPECT_EQ(Environment::detect().cache, fs::path(user->pw_dir) / ".cache/hypermla");
  else
    EXPECT_TRUE(contains(error_of([] { Environment::detect(); }), "HYPERMLA_CACHE_DIR"));
  set("HOME", dir_.path() / "home");
  EXPECT_EQ(Environment::detect().cache, dir_.path() / "home/.cache/hypermla");
  set("XDG_CACHE_HOME", dir_.path() / "xdg");
  EXPECT_EQ(Environment::detect().cache, dir_.path() / "xdg/hypermla");
  set("HYPERMLA_CACHE_DIR", dir_.path() / "mine");
  EXPECT_EQ(Environment::detect().cache, dir_.path() / "mine");
  EXPECT_FALSE(fs::exists(dir_.path() / "mine"));  // looking around creates nothing
}

TEST_F(EnvironmentTest, RefusesACacheThatDependsOnWhereItIsStarted) {
  set("HYPERMLA_ROOT", tree("share/hypermla", false));
  for (const char* name : {"HOME", "XDG_CACHE_HOME", "HYPERMLA_CACHE_DIR"}) {
    set(name, "mine");
    const std::string message = error_of([] { Environment::detect(); });
    EXPECT_TRUE(contains(message, std::string(name) + "=mine is not an absolute path")) << message;
  }
}

TEST_F(EnvironmentTest, RefusesACacheThatOthersMayWrite) {
  set("HYPERMLA_ROOT", tree("checkout", true));
  const fs::path cache = dir_.path() / "checkout/.cache";
  fs::create_directory(cache);
  Environment::detect();
  fs::permissions(cache, fs::perms(0777));
  const std::string message = error_of([] { Environment::detect(); });
  EXPECT_TRUE(contains(message, cache.string() + "' may be written by other users")) << message;
}

TEST_F(EnvironmentTest, FindsToolkitsInTheirOrder) {
  const fs::path root = tree("checkout", true);
  set("HYPERMLA_ROOT", root);
  set("CUDA_HOME", toolkit("home"));
  EXPECT_EQ(Environment::detect().toolchain.cuda_root, dir_.path() / "home");
  const fs::path wheels = toolkit("checkout/.venv/lib/python3.11/site-packages/nvidia/cu13");
  EXPECT_EQ(Environment::detect().toolchain.cuda_root, wheels);
  set("HYPERMLA_CUDA_ROOT", toolkit("mine"));
  EXPECT_EQ(Environment::detect().toolchain.cuda_root, dir_.path() / "mine");
}

// Where one is named, no other is taken for it; what the cache holds runs without any.
TEST_F(EnvironmentTest, AToolkitThatIsNotThereIsMissedWhereACompilerIsNeeded) {
  set("HYPERMLA_ROOT", tree("checkout", true));
  set("CUDA_HOME", toolkit("home"));
  set("HYPERMLA_CUDA_ROOT", dir_.path() / "absent");
  const Toolchain found = Environment::detect().toolchain;
  EXPECT_EQ(found.cuda_root, "");
  EXPECT_EQ(found.searched, std::vector<fs::path>{dir_.path() / "absent"});
}

TEST_F(EnvironmentTest, RefusesAToolkitThatDependsOnWhereItIsStarted) {
  set("HYPERMLA_ROOT", tree("checkout", true));
  toolkit("mine");
  for (const char* name : {"CUDA_HOME", "HYPERMLA_CUDA_ROOT"}) {
    set(name, "mine");
    const std::string message = error_of([] { Environment::detect(); });
    EXPECT_TRUE(contains(message, std::string(name) + "=mine is not an absolute path")) << message;
  }
}

TEST_F(EnvironmentTest, RefusesARootBelowADirectoryOfAll) {
  const fs::path root = tree("open/checkout", true), open = dir_.path() / "open";
  set("HYPERMLA_ROOT", root);
  set("HYPERMLA_CACHE_DIR", dir_.path() / "cache");
  fs::permissions(open, fs::perms(01777));
  EXPECT_EQ(Environment::detect().root, root);
  fs::permissions(open, fs::perms(0777));
  const std::string message = error_of([] { Environment::detect(); });
  EXPECT_TRUE(contains(message, root.string() + "' is not used, because another user may write '" + open.string()))
      << message;
  EXPECT_TRUE(contains(message, "chmod o-w '" + open.string() + "'")) << message;
}

// The libraries of one are loaded, and its programs started.
TEST_F(EnvironmentTest, RefusesAToolkitThatOthersMayWrite) {
  const fs::path root = tree("checkout", true);
  set("HYPERMLA_ROOT", root);
  const fs::path wheels = toolkit("checkout/.venv/lib/python3.11/site-packages/nvidia/cu13"),
                 mine = toolkit("open/mine");
  for (const fs::path& one : {wheels / "lib/libnvrtc.so.13", wheels / "bin", wheels}) {
    fs::permissions(one, fs::perms(0777));
    const std::string message = error_of([] { Environment::detect(); });
    EXPECT_TRUE(contains(message, one.string() + "' is not used, because another user may write it")) << message;
    EXPECT_TRUE(contains(message, "chmod -R go-w '" + wheels.string() + "'`, or set HYPERMLA_CUDA_ROOT")) << message;
    fs::permissions(one, fs::perms(0755));
  }
  set("HYPERMLA_CUDA_ROOT", mine);
  EXPECT_EQ(Environment::detect().toolchain.cuda_root, mine);
  fs::permissions(mine.parent_path(), fs::perms(0777));
  const std::string message = error_of([] { Environment::detect(); });
  EXPECT_TRUE(contains(message, "may write '" + mine.parent_path().string() + "'")) << message;
}

TEST_F(EnvironmentTest, ProfilersAreNotTakenFromAToolkitThatOthersMayWrite) {
  set("HYPERMLA_ROOT", tree("checkout", true));
  set("HYPERMLA_CUDA_ROOT", toolkit("mine"));
  const fs::path wheels = toolkit("checkout/.venv/lib/python3.11/site-packages/nvidia/cu13"),
                 cupti = dir_.write_program(wheels / "lib/libcupti.so.13", "");
  const auto found = [&] {
    const std::vector<fs::path> all = Environment::detect().profile_tools.cupti;
    return std::find(all.begin(), all.end(), cupti) != all.end();
  };
  EXPECT_TRUE(found());
  fs::permissions(cupti, fs::perms(0777));
  EXPECT_FALSE(found());
}

TEST_F(EnvironmentTest, FindsTheCompilerAndItsFlags) {
  set("HYPERMLA_ROOT", tree("checkout", true));
  set("PATH", dir_.path() / "bin");
  EXPECT_EQ(Environment::detect().toolchain.cxx, "");
  const fs::path clang = dir_.write_program("bin/clang++", "#!/bin/sh\n");
  EXPECT_EQ(Environment::detect().toolchain.cxx, clang);
  const fs::path gxx = dir_.write_program("bin/g++", "#!/bin/sh\n");
  EXPECT_EQ(Environment::detect().toolchain.cxx, gxx);
  set("CXX", "clang++");
  for (const fs::path& absent : {fs::path("icpx"), dir_.path() / "absent/g++"}) {
    set("CXX", absent);
    const std::string message = error_of([] { Environment::detect(); });
    EXPECT_TRUE(contains(message, "CXX=" + absent.string() + " is no program")) << message;
  }
  set("CXX", "clang++");
  set("HYPERMLA_HOST_FLAGS", "  -DA=1\t-g ");
  EXPECT_EQ(Environment::detect().toolchain.cxx, clang);
  EXPECT_EQ(Environment::detect().compiler_config().host_flags, (std::vector<std::string>{"-DA=1", "-g"}));
}

TEST_F(EnvironmentTest, MeasuredDevicesLieOverTheTable) {
  const fs::path root = tree("checkout", true);
  set("HYPERMLA_ROOT", root);
  dir_.write("checkout/conf/devices.json", R"({"A": {"peak_dram_bw_GBps": 10}, "CPU": {"peak_dram_bw_GBps": 20}})");
  save_measured(Environment::detect().measured_devices(), "B", {{"read_GBps", 30.0}});
  const DeviceTable table = Environment::detect().devices();
  EXPECT_EQ(table.find("A").peak_gbps, 10);
  EXPECT_EQ(table.find("B").peak_gbps, 30);
}

// Run by the test below, in a copy of this program elsewhere.
TEST(EnvironmentProbe, DISABLED_SaysWhereItIs) { std::cout << "root=" << Environment::detect().root.string() << "\n"; }

// A program that was copied with its files finds those beside it, not those of the checkout that built it.
TEST(Relocation, ACopiedProgramFindsItsOwnFiles) {
  const TempDir dir;
  dir.write("prefix/share/hypermla/kernels/cutile/tile.h", "");
  make_directories(dir.path() / "prefix/bin");
  const fs::path program = dir.path() / "prefix/bin/moved";
  fs::copy_file(fs::read_symlink("/proc/self/exe"), program);
  const ProcessOptions options{.environment = {{"HYPERMLA_ROOT", ""}, {"HYPERMLA_CACHE_DIR", dir.path().string()}}};
  const std::vector<std::string> command = {program.string(), "--gtest_also_run_disabled_tests",
                                            "--gtest_filter=EnvironmentProbe.*"};
  const ProcessResult result = run_process(command, options);
  EXPECT_EQ(result.status, 0) << result.out << result.err;
  EXPECT_TRUE(contains(result.out, "root=" + (dir.path() / "prefix/share/hypermla").string() + "\n")) << result.out;

  // By another name, from elsewhere.
  fs::create_symlink(program, dir.path() / "other");
  const ProcessResult linked = run_process({(dir.path() / "other").string(), command[1], command[2]}, options);
  EXPECT_TRUE(contains(linked.out, "root=" + (dir.path() / "prefix/share/hypermla").string() + "\n")) << linked.out;

  fs::remove_all(dir.path() / "prefix/share");
  const ProcessResult lost = run_process(command, options);
  EXPECT_NE(lost.status, 0);
  EXPECT_TRUE(contains(lost.out, "set HYPERMLA_ROOT")) << lost.out;
}

TEST(SpecFor, ADeviceOfTheTableIsItself) {
  const TempDir dir;
  const auto path =
      dir.write("devices.json", R"({"Fake 1": {"peak_dram_bw_GBps": 10}, "CPU": {"peak_dram_bw_GBps": 20}})");
  const DeviceTable table = DeviceTable::load(path);
  testing_support::FakeDevice device;
  EXPECT_EQ(spec_for(table, device).peak_gbps, 10);
  EXPECT_EQ(spec_for(table, device).sm_count, 4);  // the entry does not say; the device does
}

struct Gpu : testing_support::FakeDevice {
  bool is_gpu() const override { return true; }
};

TEST(SpecFor, AMeasuredDeviceKeepsItsArchitecture) {
  const TempDir dir;
  const DeviceTable table =
      DeviceTable::load(dir.write("devices.json", R"({"CPU": {}})"),
                        dir.write("measured.json", R"({"Fake 1": {"measured": {"read_GBps": 7}}})"));
  const DeviceSpec spec = spec_for(table, Gpu());
  EXPECT_EQ(spec.arch, "generic");  // without which no kernel's time is known
  EXPECT_EQ(spec.peak_gbps, 7);
}

// An entry adds to what is known without it, and takes nothing away.
TEST(SpecFor, AnEntryWithoutFiguresHasThoseOfTheOthers) {
  const TempDir dir;
  const DeviceTable table = DeviceTable::load(
      dir.write("devices.json", R"({"CPU": {"peak_dram_bw_GBps": 20, "peak_float32_float32_tflops": 2}})"),
      dir.write("measured.json", R"({"Fake 1": {"measured": {}}})"));
  testing_support::FakeDevice cpu;
  EXPECT_EQ(spec_for(table, cpu).name, "Fake 1");
  EXPECT_EQ(spec_for(table, cpu).peak_gbps, 20);
  EXPECT_EQ(spec_for(table, cpu).peak_tflops(DType::float32), 2);
  EXPECT_GT(ridge(spec_for(table, Gpu()), DType::bfloat16), 0);
}

TEST(SpecFor, AnUnknownGpuIsAsThoseOfItsArchitecture) {
  const TempDir dir;
  const DeviceTable table = DeviceTable::load(dir.write("devices.json", R"({"CPU": {}, "A": {"arch": "generic",
      "peak_bfloat16_float32_tflops": 80, "peak_dram_bw_GBps": 30, "sm_count": 8, "measured": {"read_GBps": 20}},
      "B": {"arch": "generic", "peak_dram_bw_GBps": 10}, "C": {"arch": "sm_90", "peak_dram_bw_GBps": 90}})"));
  const DeviceSpec spec = spec_for(table, Gpu());  // of 4 multiprocessors
  EXPECT_EQ(spec.name, "Fake 1");
  EXPECT_EQ(spec.bfloat16_tflops, 40);
  EXPECT_EQ(spec.peak_gbps, 30);
  EXPECT_EQ(spec.sm_count, 4);
  EXPECT_TRUE(spec.measured.empty());
  EXPECT_TRUE(contains(spec.note, "a guess, A: ")) << spec.note;
}

TEST(SpecFor, AnUnknownDeviceIsAGuess) {
  const TempDir dir;
  const DeviceTable table = DeviceTable::load(dir.write("devices.json", R"({"CPU": {"peak_dram_bw_GBps": 20}})"));
  testing_support::FakeDevice cpu;
  EXPECT_EQ(spec_for(table, cpu).name, "Fake 1");
  EXPECT_EQ(spec_for(table, cpu).peak_gbps, 20);
  EXPECT_EQ(spec_for(table, cpu).sm_count, 4);
  const DeviceSpec gpu = spec_for(table, Gpu());
  EXPECT_EQ(gpu.sm_count, 4);
  EXPECT_GT(ridge(gpu, DType::bfloat16), 0);
  EXPECT_TRUE(contains(gpu.note, "guess"));
}

}  // namespace
}  // namespace hypermla::environment_test
