// Compilers are looked for in directories made here; none of them is started but a stand-in.
#include "hypermla/compile/toolchain.h"

#include <gtest/gtest.h>

#include "support.h"

namespace hypermla::toolchain_test {
namespace {
namespace fs = std::filesystem;
using testing_support::TempDir;

class ToolchainTest : public testing::Test {
 protected:
  fs::path toolkit(const std::string& name, const std::string& library = "lib") {
    dir_.write(name + "/bin/tileiras", "");
    dir_.write(name + "/" + library + "/libnvrtc.so.13", "");
    return dir_.path() / name;
  }
  fs::path program(const std::string& name) {
    return dir_.write_program(name, "#!/bin/sh\necho \"stand-in 7\"\necho more\n");
  }

  TempDir dir_;
};

TEST_F(ToolchainTest, TakesTheFirstCompleteToolkit) {
  dir_.write("no_nvrtc/bin/tileiras", "");
  dir_.write("no_tileiras/lib/libnvrtc.so.13", "");
  dir_.write("old/bin/tileiras", "");
  dir_.write("old/lib/libnvrtc.so.12", "");
  const fs::path first = toolkit("first", "lib64"), second = toolkit("second");
  const std::vector<fs::path> roots = {
      "",    dir_.path() / "absent", dir_.path() / "no_nvrtc", dir_.path() / "no_tileiras", dir_.path() / "old", first,
      second};
  const Toolchain found = Toolchain::find(roots, {}, "");
  EXPECT_EQ(found.cuda_root, first);
  // The sentence about a missing compiler may name all places that were searched, and none that is empty.
  EXPECT_EQ(found.searched, std::vector<fs::path>(roots.begin() + 1, roots.begin() + 6));
  EXPECT_EQ(Toolchain::find({second, first}, {}, "").cuda_root, second);
}

TEST_F(ToolchainTest, FindsNothingWhereNothingIs) {
  const Toolchain found = Toolchain::find({dir_.path() / "absent"}, {"g++", "c++"}, dir_.path().string());
  EXPECT_TRUE(found.cuda_root.empty());
  EXPECT_TRUE(found.cxx.empty());
  EXPECT_EQ(describe(found), (Json{{"cuda_root", ""}, {"nvrtc", ""}, {"cxx", ""}, {"cxx_version", ""}}));
}

TEST_F(ToolchainTest, ARootThatCannotBeLookedAtIsPassedOver) {
  const fs::path good = toolkit("good");
  const fs::path too_long = dir_.path() / std::string(300, 'x');  // no file system takes the name
  Toolchain found;
  EXPECT_NO_THROW(found = Toolchain::find({too_long, good}, {}, ""));
  EXPECT_EQ(found.cuda_root, good);
}

TEST_F(ToolchainTest, TakesTheFirstCompilerOnThePath) {
  const fs::path plain = dir_.write("a/g++", "not a program");  // not executable
  const fs::path gxx = program("b/g++"), later = program("c/g++"), clang = program("c/clang++");
  const std::string path =
      (dir_.path() / "a").string() + ":" + (dir_.path() / "b").string() + "::" + (dir_.path() / "c").string();
  EXPECT_EQ(Toolchain::find({}, {"", "g++", "clang++"}, path).cxx, gxx);
  EXPECT_EQ(Toolchain::find({}, {"clang++", "g++"}, path).cxx, clang);
  EXPECT_EQ(Toolchain::find({}, {"icpx", "g++"}, path).cxx, gxx);
  EXPECT_EQ(Toolchain::find({}, {later.string(), "g++"}, path).cxx, later);      // a path is not looked for on PATH
  EXPECT_EQ(Toolchain::find({}, {plain.string(), "clang++"}, path).cxx, clang);  // and must be executable
  EXPECT_EQ(Toolchain::find({}, {(dir_.path() / "x/g++").string()}, path).cxx, "");
}

TEST_F(ToolchainTest, DescribesTheCompilerByItsFirstLine) {
  const Toolchain found = Toolchain::find({}, {program("c++").string()}, "");
  const Json description = describe(found);
  EXPECT_EQ(description["cxx"], found.cxx.string());
  EXPECT_EQ(description["cxx_version"], "stand-in 7");
}

}  // namespace
}  // namespace hypermla::toolchain_test
