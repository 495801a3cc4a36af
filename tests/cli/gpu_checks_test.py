"""scripts/pack_gpu_checks.sh and scripts/gpu_checks.sh: what they would do; and the stub of a driver that they use."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import unittest

from support import BUILD, CHECKOUT, CommandCase

VOIDED = "kernels/cutile/mla/prefix_decompression/prefix_decompression/prefix_decompression.cuh"
STUB = BUILD / "tests/stub_cuda"
NOT_RECORDED = ("cute.mla.a", "cute.mla.b", "cute.mla.c", "cute.mla.d", "cute.mla.flash_mla")

# Each says what it was asked, and fails where FAIL says so. The first also damages the records of the others.
PROGRAM = f"""#!/bin/bash
if [[ $2 == --records_only ]]; then
  printf '%-40s NOT RECORDED: run it\\n' {" ".join(NOT_RECORDED[:-1])}
  printf '%-40s awaits a GPU since 2026-11-23: a change\\n' {NOT_RECORDED[-1]}
  echo 'cute.mla.e recorded'
  exit 1
fi
echo "verifying $2"
echo "{{\\"$2\\": {{\\"written by\\": \\"$2\\"}}, \\"cute.mla.flash_attention\\": 0}}" >"${{3#--record=}}"
[[ " $FAIL " != *" $2 "* ]]
"""
TESTS = """#!/bin/bash
echo '[       OK ] Suite.Passes (0 ms)'
if [[ $1 == *Counters* && $1 != *:-* && $1 != *-Counters* ]]; then echo '[  SKIPPED ] Suite.IsSkipped (0 ms)'; fi
[[ $FAIL != *Beyond32Bits* || $1 != '--gtest_filter=*Beyond32Bits' ]] || {
  echo '[  FAILED  ] Suite.Fails (0 ms)'
  echo '[  FAILED  ] Suite.Fails'
  exit 1
}
"""


class GpuChecks(CommandCase):
    def script(self, name, *arguments, status=0, **environment):
        done = subprocess.run([CHECKOUT / "scripts" / name, *arguments], capture_output=True, text=True, timeout=600,
                              env={**os.environ, "HYPERMLA_TEST_BUILD": str(BUILD), **environment}, check=False)
        self.assertEqual(done.returncode, status, done)
        return done

    def test_help_names_steps_and_files(self):
        for words in (["--help"], ["-h"]):
            said = self.script("gpu_checks.sh", *words).stdout
            self.assertEqual(re.findall(r"^  (\w+)  +[^ ]", said, re.MULTILINE),
                             ["unit", "verify", "python", "runs", "sanitize"])
            self.assertIn("gpu_checks.tar.xz", self.script("pack_gpu_checks.sh", *words).stdout)

    def test_a_list_names_the_kernels_whose_records_do_not_match(self):
        """In a copy of the sources in which the device code of one kernel is another."""
        for name in ("kernels", "include", "conf", "results"):
            shutil.copytree(CHECKOUT / name, self.directory / name)
        root = {"HYPERMLA_ROOT": str(self.directory)}

        def listed(script="gpu_checks.sh", *arguments):
            lines = self.script(script, "--list", *arguments, **root).stdout.splitlines()
            return [line.split(maxsplit=1) for line in lines if not line.startswith("#")]

        before = listed()
        self.assertEqual(list(dict(before)),
                         [step for step in ("unit", "verify", "python", "runs") if step in dict(before)])
        self.assertNotIn(["verify", "cutile.mla.prefix_decompression"], before)
        with open(self.directory / VOIDED, "a", encoding="utf-8") as kernel:
            kernel.write("constexpr int of_another_version = 1;\n")
        after = listed()
        self.assertEqual(list(dict(after)), ["unit", "verify", "python", "runs"])
        self.assertEqual([line for line in after if line not in before],
                         [["verify", "cutile.mla.prefix_decompression"]])
        self.assertEqual(listed("pack_gpu_checks.sh"), after)
        self.assertEqual(list(dict(listed("gpu_checks.sh", "runs", "unit"))), ["unit", "runs"])
        self.assertEqual(list(dict(listed("gpu_checks.sh", "sanitize"))), ["sanitize"])

    def test_refusals(self):
        self.assertIn("no step 'verfy'", self.script("gpu_checks.sh", "verfy", status=2).stderr)
        bare = self.directory / "bare"  # of all that is needed but one program
        bare.mkdir()
        for name in ("bash", "dirname", "readlink", "awk"):
            (bare / name).symlink_to(shutil.which(name))
        if not pathlib.Path("/usr/local/cuda/bin/compute-sanitizer").exists():
            self.assertIn("compute-sanitizer is not found",
                          self.script("gpu_checks.sh", "sanitize", status=2, PATH=str(bare)).stderr)
        nothing = self.script("gpu_checks.sh", status=2, HYPERMLA_TEST_BUILD=str(self.directory)).stderr
        self.assertIn("unpack gpu_checks.tar.xz", nothing)
        self.assertIn("say the folder", self.script("pack_gpu_checks.sh", status=1).stderr)

    @unittest.skipUnless((STUB / "libcuda.so.1").exists(), "the stub of a driver is not built")
    def test_the_stub_is_an_h200(self):
        """It has every function that the library looks up."""
        path = {"LD_LIBRARY_PATH": str(STUB)}
        self.assertRegex(self.succeed("device", **path).out, r"NVIDIA H200: sm_90, 132 SMs, 150\.0 GB, 60 MB")
        # The device compilers look at it, too.
        if "tile       not found" not in self.succeed("device", **path).out:
            compiled = self.succeed("compile", "cute.mla.decompress_combine", "--arch=sm_90", **path,
                                    HYPERMLA_CACHE_DIR=self.directory / "cache").out
            self.assertRegex(compiled, r"[1-9]\d* compiled, 0 failed")

    def check(self, *steps, status=0, **environment):
        """Runs the script on a build of which the programs are PROGRAM and TESTS; returns what it left."""
        for name, text in (("bin/hypermla", PROGRAM), ("tests/unit_tests", TESTS)):
            program = self.directory / "build" / name
            program.parent.mkdir(parents=True, exist_ok=True)
            program.write_text(text)
            program.chmod(0o755)
        out = self.directory / "out"
        self.script("gpu_checks.sh", f"--out={out}", *steps, status=status,
                    HYPERMLA_TEST_BUILD=str(self.directory / "build"), **environment)
        table = dict(re.findall(r"^(\w+ [\w.-]+) +(passed|FAILED|STOPPED) +[\d.]+ s$", (out / "table.txt").read_text(),
                                re.MULTILINE))
        return out, table

    def test_records_are_those_that_each_kernel_wrote(self):
        before = json.loads((CHECKOUT / "results/verified.json").read_text())
        out, table = self.check("verify")
        self.assertEqual(table, {f"verify {name}": "passed" for name in NOT_RECORDED})
        after = json.loads((out / "verified.json").read_text())
        self.assertEqual(after, {**before, **{name: {"written by": name} for name in NOT_RECORDED}})
        text = (CHECKOUT / "results/verified.json").read_text()
        self.assertEqual(json.dumps(before, indent=2) + "\n", text, "the program and the script write other layouts")

    def test_what_fails_is_in_the_table(self):
        out, table = self.check("unit", "verify")
        self.assertEqual(set(table.values()), {"passed"})
        self.assertIn("9 passed, 1 skipped", (out / "table.txt").read_text())
        out, table = self.check("unit", "verify", status=1, FAIL="Beyond32Bits cute.mla.b")
        self.assertEqual({name for name, said in table.items() if said != "passed"},
                         {"unit large", "verify cute.mla.b"})
        self.assertIn("FAILED Suite.Fails\n", (out / "table.txt").read_text())
        self.assertIn("verifying cute.mla.b", (out / "verify.log").read_text())

    def test_sanitizers_run_unit_tests(self):
        """memcheck over all of them, and both fail with what they find."""
        tools = self.directory / "tools"
        tools.mkdir()
        sanitizer = tools / "compute-sanitizer"
        sanitizer.write_text('#!/bin/bash\n[[ $FAIL != "$2" ]] && exec "${@:7}"\n')
        sanitizer.chmod(0o755)
        path = {"PATH": f"{tools}:{os.environ['PATH']}"}
        _, table = self.check("sanitize", **path)
        self.assertEqual(set(table.values()), {"passed"})
        self.assertEqual({name.split("-")[0] for name in table}, {"sanitize memcheck", "sanitize synccheck"})
        _, table = self.check("sanitize", status=1, FAIL="synccheck", **path)
        failed = {name.split("-")[0] for name, said in table.items() if said == "FAILED"}
        self.assertEqual(failed, {"sanitize synccheck"})


if __name__ == "__main__":
    unittest.main()
