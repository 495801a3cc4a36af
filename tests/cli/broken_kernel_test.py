"""Kernels that somebody broke, in a copy of the sources: each fault is a sentence that says where to look."""

import shutil
import unittest

from support import CHECKOUT, CommandCase, kernel_directories, run

KERNEL = "kernels/cutile/mla/prefix_decompression/prefix_decompression/prefix_decompression.cuh"
NAME = "cutile.mla.prefix_decompression"
PARAMETERS, BODY = "int b, int t, int h) {", "  using Element = element_t<problem.dtype>;\n"
RUN = ["kernel", "prefix_decompression", "--b=1", "--t=70", "--h=2", "--device=cpu", "--no_autotune",
       "--prof_type=disabled"]


class BrokenKernel(CommandCase):
    def setUp(self):
        super().setUp()
        self.root = self.directory / "root"
        for name in ("kernels", "include", "conf"):
            shutil.copytree(CHECKOUT / name, self.root / name)
        self.of_copy = {"HYPERMLA_ROOT": self.root, "HYPERMLA_CACHE_DIR": self.directory / "cache"}

    def change(self, parameters, body=""):
        text = (CHECKOUT / KERNEL).read_text()
        self.assertEqual((text.count(PARAMETERS), text.count(BODY)), (1, 1))
        (self.root / KERNEL).write_text(text.replace(PARAMETERS, parameters).replace(BODY, BODY + body))

    def test_arguments_that_are_not_the_kernels(self):
        """The plan passes eight."""
        for parameters, body, takes in ((PARAMETERS.replace(")", ", int more)"), "", "9 arguments of 8, .*, 4"),
                                        ("int b, int t) {", "  const int h = 2;\n", "7 arguments of 8, .*, 4")):
            self.change(parameters, body)
            done = run("verify", "prefix_decompression", "--device=cpu", **self.of_copy)
            said = self.refuse(*RUN, **self.of_copy)
            self.assertRegex(said, f"^prefix_decompression takes {takes} bytes, but its plan passes 8 of .* bytes; "
                                   "give the plan's Arguments the order and the types of the parameters in .*cuh$")
            self.assertEqual((done.status, done.out.splitlines()[1:]), (1, [f"FAILED {NAME}: {said}"]), done)

    def test_those_behind_broken_ones(self):
        """All kernels in CUDA Tile C++ but the last one are gone. It is verified, and records are looked at."""
        for kernel in self.root.glob("kernels/cutile/[mh]*/**/*.cuh"):
            if kernel != self.root / KERNEL:
                kernel.unlink()
        of_cutile = [name for name, _, _ in kernel_directories() if name.startswith("cutile.")]
        done = run("verify", "--device=cpu", **self.of_copy)
        self.assertEqual((done.status, done.err), (1, ""), done)
        _, *failed, passed = done.out.splitlines()
        self.assertEqual(len(failed), len(of_cutile) - 1)
        for line in failed:
            self.assertRegex(line, r"^FAILED cutile\.mla\.\w+: a plan names \w+\.cuh, which is not in .*; write ")
        self.assertRegex(passed, rf"^{NAME} +\d+ cases, 0 failed")

        (self.root / "results").mkdir()
        shutil.copy(CHECKOUT / "results/verified.json", self.root / "results")
        done = run("verify", "--records_only", **self.of_copy)
        self.assertEqual((done.status, done.err), (1, ""), done)
        lines = done.out.splitlines()
        self.assertEqual(len(lines), len(kernel_directories()))
        self.assertEqual(sum(" FAILED, so NOT RECORDED: a plan names " in line for line in lines), len(of_cutile) - 1)

    def test_a_kernel_that_crashes(self):
        """By any signal, with what ran and behind what was printed before."""
        ran = r"prefix_decompression b1_t70_h2_\w+,  prefix_decompression \{\"Bm\":64,.*\}; look in it and in its plan "
        for crash in ("*reinterpret_cast<volatile int*>(8) = 1;", "__builtin_trap();", "std::abort();",
                      "volatile char deep[1 << 26]; for (int i = 0; i < 1 << 26; i += 4096) deep[i] = 1;"):
            self.change(PARAMETERS, f"  {crash}\n")
            for words in (RUN, [word for word in RUN if word != "--no_autotune"]):
                with self.subTest(f"{crash} {len(words)}"):
                    done = run(*words, **self.of_copy)
                    self.assertEqual(done.status, 2, done)
                    self.assertRegex(done.err.splitlines()[-1], rf"^hypermla: a kernel crashed in cutile\.mla\.{ran}")
                    self.assertRegex(done.out, rf"^{NAME} v0 on .*\n" + ("tiling " if words == RUN else "$"))
        done = run("verify", "prefix_decompression", "--device=cpu", **self.of_copy)
        self.assertEqual((done.status, len(done.err.splitlines())), (2, 1), done)
        self.assertRegex(done.err, rf"^hypermla: a kernel crashed in {NAME} b1_t1_h1_\w+,  prefix_decompression \{{")
        self.assertRegex(done.out, "^verifying on ")


if __name__ == "__main__":
    unittest.main()
