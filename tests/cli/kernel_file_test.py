"""Stand-alone kernel files: what verify-file finds, what it refuses, what bench-file says, and that the templates are
right. On a CPU, also where there is a GPU."""

import json
import os
import pathlib
import re
import tempfile
import unittest

from support import CHECKOUT, CommandCase, instructions, run

TEMPLATES = CHECKOUT / "examples/kernels"

# y = 2 x, and what may go wrong with it, by the argument `mode`.
KERNEL = """
#ifdef HYPERMLA_DEVICE
#include "tile.h"
using namespace hypermla;

__tile_global__ void twice(float* __restrict__ x_ptr, float* __restrict__ y_ptr, int rows, int mode) {
  constexpr auto dyn = ct::dynamic_extent;
  ct::partition_view x_view{ct::tensor_span{ct::assume_aligned<16>(x_ptr),
                                            ct::extents<unsigned, dyn, 64>{unsigned(rows)}},
                            ct::shape<8, 64>{}};
  ct::partition_view y_view{ct::tensor_span{ct::assume_aligned<16>(y_ptr),
                                            ct::extents<unsigned, dyn, 64>{unsigned(mode == 4 ? rows + 8 : rows)}},
                            ct::shape<8, 64>{}};
  const int i = ct::bid().x;
  auto x = x_view.load_masked(i, 0);
  auto y = x * 2.0f;
  if (mode == 1) y = x * 2.01f;
  if (mode == 2) y = x / (x - x);
  if (mode == 3 && i == 1) return;
  if (mode == 5) x_view.store_masked(y, i, 0);
  y_view.store_masked(y, i, 0);
}

#else
#include <cstdlib>
#include <stdexcept>

#include "hypermla/kernel_file.h"

static double shifted(std::int64_t, double normal) { return 3 + normal / 8; }

void describe(hypermla::KernelFile& file) {
  const auto rows = file.size("rows", 100, 21, "rows of 64 numbers");
  const auto columns = file.size("columns", 64, 64, "must be 64");
  const auto mode = file.size("mode", 6, 6, "what goes wrong: 1 to 5");
  const int x = file.input("x", hypermla::DType::float32, {rows, columns}, 4, shifted);
  const int y = file.output("y", hypermla::DType::float32, {rows, columns}, 4);
  if (mode == 15) std::exit(0);
  if (mode == 7) throw std::runtime_error("seven");
  if (mode == 8) file.output("z", hypermla::DType::float32, {rows + 1}, 1);
  file.kernel(mode == 9 ? "fortran" : "cutile", "twice");
  file.launch((rows + 7) / 8);
  file.pass(x);
  file.pass(y);
  file.pass_value(static_cast<int>(rows));
  if (mode != 10) file.pass_value(static_cast<int>(mode));
  file.work(1.0 * rows * columns, 8.0 * rows * columns);
}

void reference(const hypermla::Row& at) {
  if (at.size(2) == 11) throw std::runtime_error("eleven");
  if (at.size(2) == 12) at.input(1);
  if (at.size(2) == 13) *reinterpret_cast<volatile int*>(16) = 0;
  if (at.size(2) == 14) std::exit(0);
  for (std::int64_t j = 0; j < at.size(1); ++j) at.output(0)[j] = 2 * at.input(0)[at.row * at.size(1) + j];
}

HYPERMLA_KERNEL_FILE(describe, reference)
#endif
"""


def load_widths(cubin):
    """Bytes of each LDG instruction: the size in bits 73 to 75."""
    for low, high in instructions(cubin):
        if low & 0xFFF == 0x981:
            yield {4: 4, 5: 8, 6: 16}.get(high >> 9 & 7, 1)


class KernelFiles(CommandCase):
    @classmethod
    def setUpClass(cls):  # one file, so that it is compiled once
        directory = tempfile.TemporaryDirectory(prefix="hypermla-test-")
        cls.addClassCleanup(directory.cleanup)
        cls.file = pathlib.Path(directory.name) / "twice.cu"
        cls.file.write_text(KERNEL)
        cls.file.chmod(0o644)

    def write(self, text, name="twice.cu"):
        """A file of this test's own."""
        self.file = self.directory / name
        self.file.write_text(text)
        self.file.chmod(0o644)
        return self.file

    def verify(self, *words):
        return run("verify-file", self.file, "--device=cpu", *words, cwd=self.directory)

    def wrong(self, *words):
        """The check must fail with status 1 and one sentence, which is returned."""
        done = self.verify(*words)
        self.assertEqual(done.status, 1, done)
        self.assertIn("check     FAILED", done.out)
        self.assertEqual(len(done.err.splitlines()), 1, done)
        self.assertTrue(done.err.startswith("hypermla: twice.cu: "), done)
        return done.err

    def refused(self, *words):
        return self.refuse("verify-file", self.file, "--device=cpu", *words)

    def test_a_right_kernel_passes(self):
        done = self.verify()
        self.assertEqual(done.status, 0, done)
        self.assertIn("check     passed: rows=21 columns=64 mode=6, compared 21 of 21 rows", done.out)
        self.assertIn("output    y        [21, 64] float32, aligned to 16 bytes, moved by 4 (16 bytes)", done.out)
        self.assertIn("compared 100 of 100 rows", self.verify("--rows=100").out)

    def test_a_file_that_ends_the_program_has_not_passed(self):
        for command in "verify-file", "bench-file":
            for mode in 14, 15:
                done = run(command, self.file, "--device=cpu", f"--mode={mode}", cwd=self.directory)
                self.assertEqual(done.status, 2, done)
                self.assertRegex(done.err, r"^hypermla: the kernel file crashed or ended the program; [^\n]+\n$")

    def test_a_folder_with_the_name_of_a_header(self):
        self.write(KERNEL.replace("#include <cstdlib>", "#include <cstdlib>\n#include <new>"))
        (self.directory / "new").mkdir()
        self.assertEqual(self.verify().status, 0)

    def test_a_wrong_kernel_fails(self):
        sentence = self.wrong("--mode=1")
        self.assertRegex(sentence,
                         r"y differs from the reference at \[\d+, \d+\]: got [\d.]+, expected [\d.]+, allowed to "
                         r"differ by .*; 1344 of 1344 elements compared are wrong")
        self.assertEqual(self.verify("--mode=1", "--rtol=0.006", "--atol=0").status, 0)
        self.assertEqual(self.verify("--mode=1", "--rtol=0.004", "--atol=0").status, 1)
        # Where nothing is allowed, the worst is the largest difference, here that of the largest of 1344 numbers.
        largest = re.search(r"expected ([\d.]+),", self.wrong("--mode=1", "--rtol=0", "--atol=0"))[1]
        self.assertGreater(float(largest), 6.6)

    def test_integers_that_are_not_written_fail(self):
        """-1, all bits of which are set, is what lists of indices are filled up with."""
        self.write("""
            #ifdef HYPERMLA_DEVICE
            #include "tile.h"
            using namespace hypermla;
            __tile_global__ void indices(int* __restrict__ y_ptr, int n) {
              ct::extents<unsigned, ct::dynamic_extent> extents{unsigned(n)};
              ct::partition_view ys{ct::tensor_span{ct::assume_aligned<16>(y_ptr), extents}, ct::shape<16>{}};
              if (ct::bid().x == 0) ys.store_masked(ct::full<ct::tile<int, ct::shape<16>>>(7), 0);
            }
            #else
            #include "hypermla/kernel_file.h"
            void describe(hypermla::KernelFile& file) {
              const auto n = file.size("n", 64, 64, "elements");
              const int y = file.output("y", hypermla::DType::int32, {n}, 4);
              file.kernel("cutile", "indices");
              file.launch(n / 16);
              file.pass(y), file.pass_value(int(n));
              file.work(n, 4.0 * n);
            }
            void reference(const hypermla::Row& at) { at.output(0)[0] = at.row < 16 ? 7 : -1; }
            HYPERMLA_KERNEL_FILE(describe, reference)
            #endif
            """)
        self.assertIn("48 of 64 elements compared are wrong", self.wrong())

    def test_no_tolerance_passes_a_nan(self):
        self.assertRegex(self.wrong("--mode=2", "--rtol=1e30", "--atol=1e30"), r"got -?(nan|inf)")
        self.assertIn("got nan", self.wrong("--mode=3", "--rtol=1e30", "--atol=1e30"))  # rows 8 to 15 are never written

    def test_a_nan_is_found_in_a_sample(self):
        sentence = self.wrong("--mode=3", "--rows=4000", "--seconds=0")
        self.assertRegex(sentence, r"at \[(8|9|1[0-5]), \d+\]: got nan")

    def test_stores_beyond_the_end_are_found(self):
        self.assertIn("the kernel wrote behind y, ", self.wrong("--mode=4"))
        self.assertIn("the kernel changed its input x", self.wrong("--mode=5"))

    def test_extents_keep_vectors_aligned(self):
        self.assertIn("x has 63 elements in a row, but the kernel moves 4 of them (16 bytes) at once; choose a "
                      "multiple of 4", self.refused("--columns=63"))

    def test_what_a_file_says_wrong_is_a_sentence(self):
        for mode, sentence in ((7, "describe() threw: seven"), (8, "the outputs have 21 and 22 rows"),
                               (9, "the language 'fortran' is unknown"),
                               (10, "but describe() passes 3 of 8, 8, 4 bytes; give its calls of pass() the order"),
                               (11, "reference() threw at row "),
                               (12, "input(1) is not there: there are 1, which count from 0"),
                               (13, "the kernel file crashed")):
            with self.subTest(mode):
                self.assertIn(sentence, self.refused(f"--mode={mode}"))

    def test_a_stack_that_overflows_is_a_crash(self):
        deep = "volatile char deep[1 << 26];\n  for (int i = 0; i < 1 << 26; i += 4096) deep[i] = 1;\n"
        for function in "void describe(hypermla::KernelFile& file) {", "void reference(const hypermla::Row& at) {":
            with self.subTest(function):
                self.write(KERNEL.replace(function, f"{function}\n  {deep}"))
                self.assertIn("for an array that no stack has room for", self.refused())

    def test_a_file_that_is_not_there_is_named(self):
        self.write(KERNEL.replace('#include "tile.h"', '#include "tile.h"\n#include "typo.h"'))
        self.assertRegex(self.refused(), r"could not compile .*: .*typo\.h: No such file or directory")

    def test_bad_command_lines(self):
        self.assertIn("unknown flag --rowz; did you mean --rows?", self.refused("--rowz=3"))
        self.assertIn("--rows=0 is not supported: it must be from 1 to", self.refused("--rows=0"))
        self.assertIn("--rows=many is not supported: it must be a whole number", self.refused("--rows=many"))
        self.assertIn("--rtol", self.refused("--rtol=-1"))
        self.assertIn("which file?", self.refuse("verify-file"))
        self.assertIn("is no file", self.refuse("bench-file", "nothing.cu"))
        self.assertIn("cannot be compiled under this name",
                      self.refuse("verify-file", self.write(KERNEL, "two words.cu")))

    def test_help_names_the_sizes(self):
        self.assertIn("--rows INT", self.succeed("verify-file", self.file, "--help").out)

    def test_what_others_may_write_is_not_compiled(self):
        self.write(KERNEL).chmod(0o666)
        self.assertIn("may be written by other users", self.refused())
        self.write('#include "helper.h"\n' + KERNEL)
        helper = self.directory / "helper.h"
        helper.write_text("")
        helper.chmod(0o666)
        self.assertRegex(self.refused(), r"helper.h' may be written by other users")

    def test_what_does_not_compile_says_where(self):
        self.write(KERNEL.replace("2 * at.input(0)", "two * at.input(0)"))
        done = self.verify()
        self.assertEqual(done.status, 2, done)
        self.assertRegex(done.err, r"the host part of twice does not compile .*twice.cu:\d+:\d+: error: 'two'")
        self.write("int x;\n")
        self.assertIn("has no HYPERMLA_KERNEL_FILE(describe, reference)", self.refused())

    def test_bench_file_times_what_is_right(self):
        done = run("bench-file", self.file, "--device=cpu", "--rows=50", cwd=self.directory)
        self.assertEqual(done.status, 0, done)
        self.assertRegex(done.out,
                         r"burst +[\d.]+ us +[\d.]+ TFLOP/s +[\d.]+ GB/s.* \(7 runs, 5 to 95 %: [\d.]+ to [\d.]+ us\)")
        self.assertIn("note      the tensors are less than four times the cache", done.out)
        record = json.loads(run("bench-file", self.file, "--device=cpu", "--json").out)
        self.assertEqual((record["kernel"], record["sizes"]["rows"]), ("twice", 21))
        self.assertAlmostEqual(record["timing"]["burst"]["GBps"],
                               8 * 21 * 64 / record["timing"]["burst"]["median_us"] / 1e3, places=6)
        done = run("bench-file", self.file, "--device=cpu", "--mode=1")
        self.assertEqual(done.status, 1, done)
        self.assertNotIn("burst", done.out)


class Templates(CommandCase):
    def test_each_is_right_or_compiles_without_spills(self):
        files = sorted(TEMPLATES.glob("*.cu"))
        self.assertEqual(len(files), 6)
        no_compiler = "tile       not found" in self.succeed("device", "--device=cpu").out
        for file in files:
            with self.subTest(file.name):
                if file.stem.endswith("_cutile"):
                    self.assertIn("check     passed", self.succeed("verify-file", file, "--device=cpu").out)
                elif not no_compiler:
                    done = run("verify-file", file, "--device=cpu")
                    self.assertEqual(done.status, 3, done)
                    self.assertEqual(re.findall(r"compiled  .*?, (.*) frame", done.out), ["0 B", "0 B"])
                    self.assertIn("it was compiled for sm_90, but neither run nor checked", done.err)

    def test_ahead_of_time(self):
        if "tile       not found" in self.succeed("device", "--device=cpu").out:
            self.skipTest("no CUDA compilers here")
        done = self.succeed("verify-file", TEMPLATES / "reduction_cutile.cu", "--device=cpu", "--arch=sm_90", "--json")
        report = json.loads(done.out)["compiled_only"]
        self.assertEqual([one["sizes"]["columns"] for one in report], [1000, 8192])
        self.assertTrue(all(one["report"]["arch"] == "sm_90" and one["report"]["frame_bytes"] == 0 for one in report),
                        report)
        self.assertIn("is no GPU's", self.refuse("verify-file", TEMPLATES / "reduction_cutile.cu", "--arch=x86"))
        self.assertIn("unknown target 'sm_9'; choose one of cpu, sm_80, ",
                      self.refuse("verify-file", TEMPLATES / "reduction_cutile.cu", "--arch=sm_9"))

    def test_a_kernel_may_time_itself(self):
        """Two reads of the global timer stay what they are, but for kernels that ask where their code lies."""
        if "tile       not found" in self.succeed("device", "--device=cpu").out:
            self.skipTest("no CUDA compilers here")
        cache, file = self.directory / "cache", self.directory / "timed.cu"
        begin = "  constexpr int kElements = 8;"
        read = 'asm volatile("mov.u64 %0, %globaltimer;" : "=l"({}));'
        text = (TEMPLATES / "elementwise_cute.cu").read_text()
        self.assertEqual(text.count(begin), 1)
        timed = f"  long long a, b;\n  {read.format('a')}\n  {read.format('b')}\n  if (b - a > count) return;\n"
        file.write_text(text.replace(begin, timed + begin))
        self.succeed("verify-file", file, "--device=cpu", "--arch=sm_90", HYPERMLA_CACHE_DIR=cache)
        (cubin,) = cache.glob("kernels/timed-sm_90-*/kernel.cubin")
        operations = [low & 0xFFF for low, _ in instructions(cubin.read_bytes())]
        self.assertEqual((operations.count(0x805), operations.count(0x94E)), (2, 0))

    def test_vectors_are_moved_whole(self):
        """Every load from global memory in the machine code is of 16 bytes."""
        if "tile       not found" in self.succeed("device", "--device=cpu").out:
            self.skipTest("no CUDA compilers here")
        cache = self.directory / "cache"
        for name in ("elementwise_cute", "elementwise_cutile", "reduction_cute"):
            self.succeed("verify-file", TEMPLATES / f"{name}.cu", "--device=cpu", "--arch=sm_90",
                         HYPERMLA_CACHE_DIR=cache)
            for cubin in cache.glob(f"kernels/{name}-sm_90-*/kernel.cubin"):
                self.assertEqual(set(load_widths(cubin.read_bytes())), {16}, cubin)
        self.assertEqual(len(list(cache.glob("kernels/*/kernel.cubin"))), 4)  # those in cute are the same for all sizes

    def test_the_page_shows_a_file_that_works(self):
        page = (CHECKOUT / "docs/kernel-files.md").read_text()
        code = re.search(r"^    (#ifdef HYPERMLA_DEVICE.*?^    #endif)$", page, re.S | re.M)[1]
        body = re.sub(r"^    ", "", code, flags=re.M)
        kernel = """
  ct::extents<unsigned, ct::dynamic_extent> extents{unsigned(n)};
  ct::partition_view x_view{ct::tensor_span{ct::assume_aligned<16>(x), extents}, ct::shape<1024>{}};
  ct::partition_view y_view{ct::tensor_span{ct::assume_aligned<16>(y), extents}, ct::shape<1024>{}};
  y_view.store_masked(x_view.load_masked(ct::bid().x) * 2.0f, ct::bid().x);
"""
        self.assertIn("{ ... }", body)
        file = self.directory / "twice.cu"
        file.write_text(body.replace("{ ... }", "{" + kernel + "}", 1))
        os.chmod(file, 0o644)
        self.assertIn("compared 1000 of 1000 rows", self.succeed("verify-file", file, "--device=cpu").out)


if __name__ == "__main__":
    unittest.main()
