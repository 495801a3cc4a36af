"""scripts/cutlass_mla_decode.sh: CUTLASS' MLA decoding kernel compiles from the pinned package, without spills."""

import os
import re
import shutil
import subprocess
import unittest

from support import CHECKOUT, CommandCase


class Cutlass(CommandCase):
    def script(self, *arguments, **environment):
        """In a directory of its own with the checkout's packages, on a machine without a GPU."""
        (self.directory / "scripts").mkdir(exist_ok=True)
        shutil.copy(CHECKOUT / "scripts/cutlass_mla_decode.sh", self.directory / "scripts")
        shutil.copy(CHECKOUT / "requirements.txt", self.directory)
        return subprocess.run([self.directory / "scripts/cutlass_mla_decode.sh", *arguments], text=True, timeout=800,
                              env={"PATH": "/usr/bin:/bin", **environment}, check=False, capture_output=True)

    @unittest.skipUnless((CHECKOUT / ".venv").exists(), "it needs the packages that ./hypermla installs")
    def test_its_kernels_compile(self):
        """Its device code: linked with its host code it takes twice as long."""
        (self.directory / ".venv").symlink_to(os.path.realpath(CHECKOUT / ".venv"))
        for elements in ("fp16", "fp8"):
            with self.subTest(elements):
                done = self.script(elements, NVCC_APPEND_FLAGS="-cubin")
                self.assertEqual(done.returncode, 0, done)
                kernels = re.findall(r"^(\w+) tiles: (\d+) registers, 0 bytes of spills$", done.stdout, re.MULTILINE)
                self.assertEqual(sorted(name for name, _ in kernels), ["individual", "persistent"], done.stdout)
                self.assertIn("compiled only", done.stdout)
                cubin = (self.directory / f"build/cutlass/mla_decode_{elements}").read_bytes()
                self.assertTrue(cubin.startswith(b"\x7fELF"))
                self.assertIn(b"Sm100FmhaMlaKernelTmaWarpspecialized", cubin)
                self.assertEqual(b"float_e4m3_t" in cubin, elements == "fp8")  # what the names of its kernels say

    def test_what_is_missing_is_said(self):
        done = self.script("fp16")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("run ./hypermla once", done.stderr)
        self.assertFalse((self.directory / "build").exists())

    def test_the_elements_must_be_said(self):
        done = self.script("fp32")
        self.assertEqual(done.returncode, 1)
        self.assertIn("fp16 or fp8", done.stderr)


if __name__ == "__main__":
    unittest.main()
