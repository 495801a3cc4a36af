#include "hypermla/compile/compiler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "hypermla/compile/backends.h"
#include "hypermla/compile/source_text.h"
#include "support.h"

namespace hypermla::compiler_test {
namespace {
namespace fs = std::filesystem;
using testing_support::checkout;
using testing_support::contains;
using testing_support::error_of;
using testing_support::TempDir;
using testing_support::write_fake_compiler;

const char* const kArch = "generic";

// A checkout with one kernel, which includes files in every way there is.
class CompilerTest : public testing::Test {
 protected:
  CompilerTest() { write_checkout("checkout"); }

  void write_checkout(const std::string& name) {
    const std::string cutile = name + "/kernels/cutile/";
    dir_.write(cutile + "tile_host/entry.h", "#include \"host/pool.h\"\n");
    dir_.write(cutile + "tile_host/host/pool.h", "// threads\n");
    dir_.write(cutile + "tile_host/cuda_tile.h", "// the language on a CPU\n");
    dir_.write(cutile + "tile.h", "#include <cuda_tile.h>\n  #include \"hypermla/dtype.h\"\n");
    dir_.write(name + "/include/hypermla/dtype.h", "enum class DType {};\n");
    dir_.write(cutile + "mla/a/a/a.h", "struct ATiling { int Bm; };\n");
    dir_.write(cutile + "mla/a/a/a.cuh", "#include <tile.h>\n#include <vector>\n#include \"a.h\"\nkernel body\n");
    dir_.write(cutile + "mla/b/b/b.cuh", "another kernel\n");
  }

  CompilerConfig config(const std::string& name = "checkout") const {
    CompilerConfig config;
    config.kernel_root = dir_.path() / name / "kernels";
    config.include_root = dir_.path() / name / "include";
    config.cache = dir_.path() / "cache";
    return config;
  }
  CompilerConfig with_compiler(const std::string& name = "checkout") const {
    CompilerConfig with = config(name);
    with.toolchain.cxx = write_fake_compiler(dir_, "REFUSED");
    return with;
  }

  static KernelSource source(const std::string& instance = "a<1>") { return {"a", "cutile/mla/a/a/a.cuh", instance}; }
  // Names the cache entry: the key.
  static std::string key(CompilerConfig config, const KernelSource& source = CompilerTest::source(),
                         const std::string& arch = kArch) {
    return Compiler(std::move(config)).compile(source, arch).dir.filename().string();
  }
  std::vector<std::string> cached() const {
    std::vector<std::string> names;
    std::error_code absent;
    for (const auto& item : fs::directory_iterator(dir_.path() / "cache", absent))
      names.push_back(item.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }

  TempDir dir_;
};

TEST_F(CompilerTest, AnEntryExplainsItself) {
  const CacheEntry entry = Compiler(with_compiler()).compile(source(), kArch);
  EXPECT_EQ(entry.report["name"], "a");
  EXPECT_EQ(entry.report["instance"], "a<1>");
  EXPECT_EQ(entry.report["arch"], kArch);
  EXPECT_EQ(entry.report["compiler"], "fake compiler 1.0");
  EXPECT_TRUE(contains(read_file(entry.path("kernel.cu")), "#include \"cutile/mla/a/a/a.cuh\""));
  EXPECT_TRUE(fs::exists(entry.path(entry.report.at("artifact"))));
  EXPECT_EQ(cached().size(), 1u);  // nothing but the entry
}

TEST_F(CompilerTest, TheKeyDependsOnEveryFileOfTheProjectThatIsIncluded) {
  const std::string before = key(with_compiler());
  for (const char* file : {"kernels/cutile/mla/a/a/a.cuh", "kernels/cutile/mla/a/a/a.h", "kernels/cutile/tile.h",
                           "include/hypermla/dtype.h", "kernels/cutile/tile_host/cuda_tile.h",
                           "kernels/cutile/tile_host/entry.h", "kernels/cutile/tile_host/host/pool.h"}) {
    const std::string name = std::string("checkout/") + file, text = read_file(dir_.path() / name);
    dir_.write(name, text + "// edited\n");
    EXPECT_NE(key(with_compiler()), before) << file;
    dir_.write(name, text);
    EXPECT_EQ(key(with_compiler()), before) << file;
  }
  dir_.write("checkout/kernels/cutile/mla/b/b/b.cuh", "edited\n");  // of no concern
  EXPECT_EQ(key(with_compiler()), before);
}

TEST_F(CompilerTest, TheKeyDependsOnInstanceTargetAndFlags) {
  const std::string before = key(with_compiler());
  EXPECT_NE(key(with_compiler(), source("a<2>")), before);
  EXPECT_NE(key(with_compiler(), source(), "x86-64-v3"), before);
  CompilerConfig flags = with_compiler();
  flags.host_flags = {"-DDEBUG"};
  EXPECT_NE(key(flags), before);
  flags.host_flags = {"-D", "DEBUG"};
  EXPECT_NE(key(flags), key(with_compiler()));
}

TEST_F(CompilerTest, TheKeyDoesNotDependOnThePlace) {
  const std::string here = key(with_compiler());
  write_checkout("somewhere/else");
  EXPECT_EQ(key(with_compiler("somewhere/else")), here);
  EXPECT_EQ(key(config()), here);  // and needs no compiler then
}

// Another compiler, or another version of one, may make other code of the same source.
TEST_F(CompilerTest, OnACpuTheKeyDependsOnTheCompiler) {
  const CompilerConfig first = with_compiler();
  const std::string before = key(first), script = read_file(first.toolchain.cxx);
  CompilerConfig other = first;
  other.toolchain.cxx = dir_.write_program("other-c++", script);
  const std::string with_other = key(other);
  EXPECT_NE(with_other, before);
  std::string newer = script;
  newer.replace(newer.find("compiler 1.0"), 12, "compiler 1.1");
  dir_.write_program("other-c++", newer);
  EXPECT_NE(key(other), with_other);
  EXPECT_EQ(key(first), before);
  EXPECT_EQ(cached().size(), 3u);
}

TEST_F(CompilerTest, AGpuEntryIsServedWithoutAnyToolchain) {
  CompilerConfig without = config();
  without.toolchain.searched = {"/a/cuda", "/b"};
  Compiler compiler(without);
  EXPECT_FALSE(compiler.available(source(), "sm_90"));
  const std::string missing = error_of([&] { compiler.compile(source(), "sm_90"); });
  EXPECT_TRUE(contains(missing, "a is not in the cache " + config().cache.string() + " for sm_90, or not whole there"))
      << missing;
  EXPECT_TRUE(contains(missing, "no CUDA Tile compiler was found in /a/cuda, /b; ")) << missing;
  EXPECT_TRUE(contains(missing, "HYPERMLA_CUDA_ROOT")) << missing;
}

// What "compile elsewhere, run here" rests on.
TEST_F(CompilerTest, ACachedEntryIsServedWithoutACompiler) {
  const CacheEntry made = Compiler(with_compiler()).compile(source(), kArch);
  Compiler bare(config());
  EXPECT_TRUE(bare.available(source(), kArch));
  EXPECT_FALSE(bare.available(source("a<2>"), kArch));
  const CacheEntry served = bare.compile(source(), kArch);
  EXPECT_EQ(served.dir, made.dir);
  EXPECT_EQ(served.report, made.report);
  const std::string message = error_of([&] { bare.compile(source("a<2>"), kArch); });
  EXPECT_EQ(message, "a is not in the cache for this CPU and no C++ compiler was found; install g++ or set CXX");
  EXPECT_TRUE(Compiler(with_compiler()).available(source("a<2>"), kArch));
}

TEST_F(CompilerTest, TheFingerprintFollowsWhatAGpuCompilerReads) {
  const std::string header = source().header;
  const std::string before = Compiler(config()).fingerprint(header);
  EXPECT_EQ(before.size(), 32u);
  dir_.write("checkout/kernels/cutile/tile_host/cuda_tile.h", "// another CPU implementation\n");
  EXPECT_EQ(Compiler(config()).fingerprint(header), before);
  write_checkout("moved");
  EXPECT_EQ(Compiler(config("moved")).fingerprint(header), before);
  const std::string tile = read_file(dir_.path() / "checkout/kernels/cutile/tile.h");
  dir_.write("checkout/kernels/cutile/tile.h", "// A comment changes no machine code.\n" + tile + "\n");
  EXPECT_EQ(Compiler(config()).fingerprint(header), before);
  dir_.write("checkout/kernels/cutile/tile.h", tile + "int changed;\n");
  EXPECT_NE(Compiler(config()).fingerprint(header), before);
  EXPECT_NE(Compiler(config("moved")).fingerprint("cutile/mla/b/b/b.cuh"), before);
}

TEST(SourceText, LosesCommentsAndTheSpaceThatSeparatesNothing) {
  const std::pair<const char*, const char*> same[] = {
      {"int a = 1;  // one\nint b;", "int a=1;\n\n  int b ;"},
      {"f(\n  (a),\n  b)", "f((a), b)"},
      {"int /* why */ a;", "int a;"},
      {"// a comment \\\nthat goes on\nint a;", "int a;"},
      {"int a; // no end", "int a;"},
      {"#define F(x) /* x */ (x)\nint a;", "#define F(x) (x)\n  int a;"},
      {"#define LONG a \\\n  b\n", "#define LONG a b\n"},
      {"int a;\n  #if B  // or not\n#endif", "int a;\n#if B\n#endif"},
      {"1'000'000 /**/;", "1'000'000;"},
      {"R\"(//)\" // x", "R\"(//)\""},
  };
  for (const auto& [one, other] : same) EXPECT_EQ(without_comments(one), without_comments(other)) << one;
  const std::pair<const char*, const char*> different[] = {
      {"int a;", "inta;"},
      {"a - -b", "a--b"},
      {"\"// no comment\"", "\"\""},
      {"\"a  b\"", "\"a b\""},
      {"'\\'' + \"//\"", "'\\'' + \"/\""},
      {"R\"x(\"//)x\" + 1", "R\"x(\"/)x\" + 1"},
      {"#define F (x)", "#define F(x)"},
      {"#define A\nB", "#define A B"},
      {"#define A\nb c", "#define A b\nc"},
      {"a /* b */ c", "ac"},
      {"a = b / *c;", "a = b /*c;*/;"},
  };
  for (const auto& [one, other] : different) EXPECT_NE(without_comments(one), without_comments(other)) << one;
}

TEST_F(CompilerTest, AnErrorIsTheCompilersOwnAndLeavesNothing) {
  Compiler compiler(with_compiler());
  const std::string message = error_of([&] { compiler.compile(source("a<REFUSED>"), kArch); });
  EXPECT_TRUE(
      contains(message, "a<REFUSED> does not compile for generic: kernel.cpp:1:1: error: this tiling is refused"))
      << message;
  EXPECT_EQ(cached(), std::vector<std::string>{});
  EXPECT_NO_THROW(compiler.compile(source(), kArch));  // and the next one compiles
  EXPECT_EQ(cached().size(), 1u);
}

// A wrong name in a plan is not a directory of kernels that is missing.
TEST_F(CompilerTest, AHeaderThatIsMissingIsLookedForWhereItBelongs) {
  auto refusal = [&](const CompilerConfig& config, const std::string& header) {
    return error_of([&] { Compiler(config).compile({"a", header, "a<1>"}, kArch); });
  };
  CompilerConfig own = with_compiler();
  own.own_kernel_root = dir_.path() / "mine/kernels";
  dir_.write("mine/kernels/cutile/mla/a/a_v9/a_v9.cpp", "the plan");
  for (const CompilerConfig& one : {with_compiler(), own}) {
    const std::string wrong_name = refusal(one, "cutile/mla/a/a/b.cuh");
    EXPECT_TRUE(
        contains(wrong_name, "a plan names b.cuh, which is not in " + (one.kernel_root / "cutile/mla/a/a").string()));
    EXPECT_TRUE(contains(wrong_name, "correct the name in the plan")) << wrong_name;
    EXPECT_FALSE(contains(wrong_name, "HYPERMLA_KERNELS")) << wrong_name;
  }
  const std::string missing = refusal(own, "cutile/mla/a/a_v9/a_v9.cuh");
  EXPECT_TRUE(contains(
      missing, "a plan names a_v9.cuh, which is not in " + (own.own_kernel_root / "cutile/mla/a/a_v9").string()));
  EXPECT_FALSE(contains(missing, "HYPERMLA_KERNELS")) << missing;
  // Here the variable is not set, or names another directory.
  EXPECT_TRUE(contains(refusal(with_compiler(), "cutile/mla/a/a_v9/a_v9.cuh"),
                       "if it is a kernel of your own, point HYPERMLA_KERNELS at its directory `kernels`"));
  EXPECT_TRUE(contains(refusal(own, "cutile/mla/a/a_v8/a_v8.cuh"),
                       "point HYPERMLA_KERNELS at the directory that this program was built with"));
}

// g++ says nothing of a flag -Wno-... that it does not know, until there is an error: then that comes first.
TEST_F(CompilerTest, AnErrorOnACpuIsThatOfTheSourceAlone) {
  const char* path = ::getenv("PATH");
  CompilerConfig config = with_compiler();
  for (const char* name : {"g++", "clang++"}) {
    config.toolchain = Toolchain::find({}, {name}, path ? path : "");
    if (config.toolchain.cxx.empty()) continue;
    dir_.write("checkout/kernels/cutile/mla/b/b/b.cuh", "[[nobody::knows]] int attribute;\nint wrong = \"text\";\n");
    const std::string said = error_of([&] { Compiler(config).compile({"b", "cutile/mla/b/b/b.cuh", "b<1>"}, kArch); });
    EXPECT_TRUE(contains(said, "b.cuh:2:")) << said;
    for (const char* word : {"-Wno", "unrecognized", "nobody"}) EXPECT_FALSE(contains(said, word)) << said;
  }
}

// What g++ 12, NVRTC 13.5 and tileiras 13.5 write when they fail.
TEST(CompileVerdict, IsWhatHasAPlaceInTheSource) {
  const BackendInput input{"", "a<1>", "generic", {}, {}};
  auto message = [&](bool verdict, int status, const std::string& log) {
    try {
      fail_compilation(input, "compiler", status, log);
    } catch (const CompileError& error) {
      EXPECT_TRUE(verdict) << log;
      return std::string(error.what());
    } catch (const Error& error) {
      EXPECT_FALSE(verdict) << log;
      return std::string(error.what());
    }
    return std::string();
  };
  for (const char* log :
       {"a.cuh:1:26: error: static assertion failed: no\n", "a.cuh:7: error: wrong\n",
        "kernel.cu(1): error: no \"y\"\n",
        "ptxas error   : Entry function 'f' uses too much shared data (0x61a80 bytes, 0x38c00 max)\n",
        "ptxas application ptx input, line 23; error   : Unknown modifier\n", "error[]: tile too large\n"}) {
    EXPECT_TRUE(contains(message(true, 1, std::string("In file included from b.h\n") + log),
                         "a<1> does not compile for generic: " + std::string(log).substr(0, 10)));
    message(false, 128 + 9, log);  // it was killed: there may be more to say
  }
  for (const char* log :
       {"a.cpp:4:89: fatal error: error writing to /tmp/a.s: No space left on device\n",
        "/usr/bin/ld: final link failed: No space left on device\ncollect2: error: ld returned 1 exit status\n",
        "{standard input}: Fatal error: can't write 312 bytes to section .text of a.o: 'No space left on device'\n",
        "LLVM ERROR: IO failure on output stream: No space left on device\n"})
    EXPECT_TRUE(contains(message(false, 1, std::string("a.h:1:1: warning: odd\n") + log), "No space left on device"));
  for (const char* log :
       {"g++: error: unrecognized command-line option '-funknown'\n",
        "virtual memory exhausted: Cannot allocate memory\n",
        "cc1plus: error: bad value 'x86-64-v9' for '-march=' switch\n", "g++: fatal error: Killed signal terminated\n",
        "a.h:1:10: fatal error: x.h: No such file or directory\n", "nvrtc: error: unrecognized option -foo found\n",
        "kernel.cu(1): catastrophic error: could not open source file\n", "error: failed to compile Tile IR program\n",
        "a.cpp:3:4: internal compiler error: Segmentation fault\n", "ptxas fatal   : Memory allocation failure\n"})
    EXPECT_TRUE(contains(message(false, 1, log), std::string(log, 20)));
  EXPECT_TRUE(contains(message(false, 137, ""), "it ended with status 137 and said nothing"));
}

TEST_F(CompilerTest, AWorkersVerdictIsAVerdict) {
  for (const int status : {1, 2}) {
    CompilerConfig failing = with_compiler();
    failing.worker = dir_.write_program("worker", fmt::format("#!/bin/sh\necho no >&2\nexit {}\n", status));
    try {
      Compiler(failing).compile(source(), kArch);
      ADD_FAILURE();
    } catch (const CompileError&) {
      EXPECT_EQ(status, kRefused);
    } catch (const Error&) {
      EXPECT_NE(status, kRefused);
    }
  }
}

TEST_F(CompilerTest, SweepsWhatKilledCompilationsLeft) {
  const fs::path left = dir_.path() / "cache/compile.999999999.0123456789abcdef.tmp";
  dir_.write(fs::relative(left / "kernel.cpp", dir_.path()), "");
  Compiler(with_compiler()).compile(source(), kArch);
  EXPECT_FALSE(fs::exists(left));
}

TEST_F(CompilerTest, AMissingHeaderIsAnError) {
  Compiler compiler(with_compiler());
  EXPECT_TRUE(contains(error_of([&] { compiler.compile({"c", "cutile/mla/c/c/c.cuh", "c<1>"}, kArch); }), "c.cuh"));
}

TEST_F(CompilerTest, CompilesAheadInTheBackgroundAndOnlyOnce) {
  CompilerConfig two = with_compiler();
  two.jobs = 2;
  dir_.write_program("counting", "#!/bin/sh\n[ \"$1\" = --version ] || echo x >> '" + (dir_.path() / "calls").string() +
                                     "'\nexec '" + two.toolchain.cxx.string() + "' \"$@\"\n");
  two.toolchain.cxx = dir_.path() / "counting";
  Compiler compiler(two);
  std::vector<std::shared_future<CacheEntry>> entries;
  for (int i = 0; i < 3; ++i)
    for (const char* instance : {"a<1>", "a<2>", "a<REFUSED>"})
      entries.push_back(compiler.compile_ahead(source(instance), kArch));
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (i % 3 == 2)
      EXPECT_THROW(entries[i].get(), Error);
    else
      EXPECT_EQ(entries[i].get().report["instance"], i % 3 == 0 ? "a<1>" : "a<2>");
  }
  EXPECT_EQ(read_file(dir_.path() / "calls").size(), 2u * 3);
}

TEST_F(CompilerTest, AJobSurvivesItsJson) {
  CompilerConfig given = with_compiler();
  given.host_flags = {"-DX=\"a b\""};
  run_compile_job(Json::parse(to_json(source(), kArch, given).dump()));
  CompilerConfig bare = config();
  bare.host_flags = given.host_flags;
  EXPECT_TRUE(Compiler(bare).available(source(), kArch));
}

// Workers below stand in for the program that compiles one job in a process of its own.
TEST_F(CompilerTest, ADeadWorkerIsAnErrorNotACrash) {
  CompilerConfig crashing = with_compiler();
  crashing.worker = dir_.write_program("worker", "#!/bin/sh\ncat > /dev/null\nkill -SEGV $$\n");
  const std::string message = error_of([&] { Compiler(crashing).compile(source(), kArch); });
  EXPECT_EQ(message, "the compiler process for a died (status 139)");
  EXPECT_EQ(cached(), std::vector<std::string>{});
}

TEST_F(CompilerTest, AWorkersWordsAreTheError) {
  CompilerConfig failing = with_compiler();
  failing.worker =
      dir_.write_program("worker", "#!/bin/sh\n[ \"$1\" = compile-job ] && echo 'no room left' >&2\nexit 1\n");
  EXPECT_EQ(error_of([&] { Compiler(failing).compile(source(), kArch); }), "no room left");
}

TEST_F(CompilerTest, AWorkerThatMadeNothingIsAnError) {
  CompilerConfig idle = with_compiler();
  idle.worker = dir_.write_program("worker", "#!/bin/sh\nexit 0\n");
  EXPECT_TRUE(contains(error_of([&] { Compiler(idle).compile(source(), kArch); }), "its cache entry is gone"));
  idle.worker = dir_.path() / "absent";
  EXPECT_TRUE(contains(error_of([&] { Compiler(idle).compile(source(), kArch); }), "could not start"));
}

TEST_F(CompilerTest, AWorkerGetsTheWholeJob) {
  CompilerConfig with = with_compiler();
  with.worker = dir_.write_program("worker", "#!/bin/sh\ncat > '" + (dir_.path() / "job").string() + "'\nexit 0\n");
  EXPECT_THROW(Compiler(with).compile(source(), kArch), Error);
  const Json job = Json::parse(read_file(dir_.path() / "job"));
  run_compile_job(job);
  EXPECT_TRUE(Compiler(config()).available(source(), kArch));
}

// A kernel in the language of the checkout's: block i sums the tiles i, i + blocks, ... of data [rows, 64].
const char* const kSumTiles = R"cuh(
#pragma once
#include "tile.h"
namespace hypermla {
struct SumTiling { int Br; };
template <SumTiling tiling>
__tile_global__ void sum_tiles(const float* __restrict__ data_ptr, float* __restrict__ sum_ptr, int rows) {
  constexpr auto dyn = ct::dynamic_extent;
  const int block = ct::bid().x, blocks = ct::num_blocks().x;
  ct::partition_view data{ct::tensor_span{ct::assume_aligned<16>(data_ptr),
                                          ct::extents<unsigned, dyn, 64>{unsigned(rows)}},
                          ct::shape<tiling.Br, 64>{}};
  ct::partition_view sums{ct::tensor_span{ct::assume_aligned<16>(sum_ptr),
                                          ct::extents<unsigned, dyn, 1>{unsigned(blocks)}},
                          ct::shape<1, 1>{}};
  auto total = ct::zeros<ct::tile<float, ct::shape<tiling.Br, 64>>>();
  for (int i = block; i < rows / tiling.Br; i += blocks) total = total + data.load(i, 0);
  auto of_rows = ct::sum(total, ct::integral_constant<1>{});
  sums.store(ct::sum(of_rows, ct::integral_constant<0>{}), block, 0);
}
}  // namespace hypermla
)cuh";

// The real thing: compiled for this CPU and run.
TEST(HostBackend, CompilesAKernelThatTheCpuRuns) {
  const TempDir dir;
  dir.write("kernels/cutile/test/sum_tiles.cuh", kSumTiles);
  fs::copy(checkout() / "kernels/cutile/tile_host", dir.path() / "kernels/cutile/tile_host",
           fs::copy_options::recursive);
  fs::copy(checkout() / "kernels/cutile/tile.h", dir.path() / "kernels/cutile/tile.h");
  CompilerConfig config;
  config.kernel_root = dir.path() / "kernels";
  config.include_root = checkout() / "include";
  config.cache = dir.path() / "cache";
  const char* path = ::getenv("PATH");
  config.toolchain = Toolchain::find({}, {"g++", "c++", "clang++"}, path ? path : "");
  if (config.toolchain.cxx.empty()) GTEST_SKIP() << "no C++ compiler";
  Compiler compiler(config);
  const auto device = make_cpu_device(2);
  const KernelSource source{"sum_tiles", "cutile/test/sum_tiles.cuh",
                            "hypermla::sum_tiles<hypermla::SumTiling{.Br = 2}>"};
  const CacheEntry entry = compiler.compile(source, device->info().arch);
  EXPECT_FALSE(entry.report.at("compiler").get<std::string>().empty());
  const auto kernel = device->load(entry.path(entry.report.at("artifact")), entry.report.at("function"));

  constexpr int kRows = 12, kColumns = 64;
  constexpr unsigned kBlocks = 4;
  const Buffer data(device, kRows * kColumns * sizeof(float)), sums(device, kBlocks * sizeof(float));
  float* values = static_cast<float*>(data.data());
  for (int i = 0; i < kRows * kColumns; ++i) values[i] = float(i % 13);
  void* data_pointer = data.data();
  void* sum_pointer = sums.data();
  int rows = kRows;
  void* arguments[] = {&data_pointer, &sum_pointer, &rows};
  device->fill(sums.data(), 0xff, sums.bytes());
  kernel->launch({kBlocks, 1, 1}, arguments, device->stream());
  for (unsigned block = 0; block < kBlocks; ++block) {
    float expected = 0;  // tiles of two rows, dealt out in turn
    for (int tile = int(block); tile < kRows / 2; tile += kBlocks)
      expected = std::accumulate(values + tile * 2 * kColumns, values + (tile + 1) * 2 * kColumns, expected);
    EXPECT_EQ(static_cast<const float*>(sums.data())[block], expected) << "block " << block;
  }

  EXPECT_TRUE(
      contains(error_of([&] { device->load(entry.path("kernel.cpp"), "hypermla_run_block"); }), "does not load"));
  EXPECT_TRUE(contains(error_of([&] { device->load(entry.path("kernel.so"), "absent"); }), "has no absent"));
  // What a plan passes is compared with what the library says of its kernel.
  const auto passed = [&](std::vector<int> arguments) {
    return error_of([&] {
      compiler.compile({source.name, source.header, source.instance, std::move(arguments)}, device->info().arch);
    });
  };
  EXPECT_EQ(passed({8, 8, 4}), "");
  for (const std::vector<int>& others : {std::vector<int>{8, 8}, {8, 8, 4, 4}, {8, 8, 8}})
    EXPECT_TRUE(contains(passed(others), "sum_tiles takes 3 arguments of 8, 8, 4 bytes, but its plan passes "));
  const KernelSource wrong{source.name, source.header, "hypermla::no_such_kernel<1>"};
  const std::string message = error_of([&] { compiler.compile(wrong, device->info().arch); });
  EXPECT_TRUE(contains(message, "hypermla::no_such_kernel<1> does not compile for ")) << message;
  EXPECT_TRUE(contains(message, "no_such_kernel")) << message;
}

TEST(HostBackend, SaysWhatIsNotForCpus) {
  const TempDir dir;
  dir.write("kernels/cute/test/warps.cuh", "");
  dir.write("kernels/cutile/tile_host/entry.h", "");
  CompilerConfig config;
  config.kernel_root = dir.path() / "kernels";
  config.include_root = checkout() / "include";
  config.cache = dir.path() / "cache";
  config.toolchain.cxx = "/bin/true";
  Compiler compiler(config);
  const std::string message = error_of([&] {
    compiler.compile({"warps", "cute/test/warps.cuh", "hypermla::cute::warps<1>"}, "x86-64-v3");
  });
  EXPECT_TRUE(contains(message, "--language=cutile")) << message;
}

}  // namespace
}  // namespace hypermla::compiler_test
