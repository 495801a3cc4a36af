"""A new version of a kernel is one directory and nothing else, here or in a directory of one's own: `hypermla clone`
makes it, and it is built, listed, chosen and checked. And the commands of docs/tutorial.md.

All are configured and built in a copy of the sources, as a developer would; only what the present build has not
compiled is compiled.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cli"))
from reuse import LAUNCHER, settings
from support import BINARY, BUILD, CHECKOUT

FIGURE, FASTER = ".sustained = 0.825", ".sustained = 0.9"  # what the kernel reaches with tiles of 128 rows
PART, FASTER_PART = ".sustained = 0.97", ".sustained = 1.1"
SOURCES = ["CMakeLists.txt", "CMakePresets.json", "cmake", "conf", "docs", "hypermla", "include", "kernels", "python",
           "requirements.txt", "scripts", "src"]
# A kernel, a pipeline, one for Hopper with a kernel and names besides its own, and a part of the hybrids for Hopper.
CLONES = ["cutile.mla.flash_attention", "cutile.mla.mla_var6_plus_v4", "cute.mla.flash_attention", "cute.mla.flash_mla"]
SHAPE = ["--b=1", "--s=5", "--t=70", "--h=2", "--device=cpu"]


def commands(text):
    """The blocks of code of a page, a command for each line that no backslash continues."""
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    return [line for line in re.sub(r"\\\n *", "", "\n".join(lines)).splitlines() if line]


class Versions(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory(prefix="hypermla-test-")
        cls.addClassCleanup(temporary.cleanup)
        cls.root = pathlib.Path(temporary.name)
        cls.checkout = cls.root / "checkout"
        cls.checkout.mkdir()
        for name in SOURCES:
            copy = shutil.copytree if (CHECKOUT / name).is_dir() else shutil.copy
            copy(CHECKOUT / name, cls.checkout / name)
        present = settings(BUILD)
        include = present["HYPERMLA_CUDA_INCLUDE"]
        # The launcher installs nothing: there is a CUDA root already.
        cls.variables = {**os.environ, "HYPERMLA_CUDA_ROOT": str(pathlib.Path(include).parent)}
        cls.variables.pop("HYPERMLA_KERNELS", None)
        for kernel in CLONES:
            cls.run_in(BINARY, "clone", kernel, "v9", HYPERMLA_ROOT=str(cls.checkout))
        plan = cls.checkout / "kernels/cutile/mla/flash_attention/flash_attention_v9/flash_attention_v9.cpp"
        assert FIGURE in plan.read_text()
        plan.write_text(plan.read_text().replace(FIGURE, FASTER))
        part = cls.checkout / "kernels/cute/mla/flash_mla/flash_mla_v9/flash_mla_v9.cpp"
        assert PART in part.read_text()
        text = part.read_text().replace(PART, FASTER_PART)
        part.write_text(text.replace("HYPERMLA_REGISTER_DRAFT", "HYPERMLA_REGISTER"))
        cls.run_in("cmake", "--preset", "default", "-DHYPERMLA_BUILD_TESTS=OFF", "-DHYPERMLA_BUILD_PYTHON=ON",
                   f"-DHYPERMLA_CUDA_INCLUDE={include}", f"-DPython_EXECUTABLE={present['Python_EXECUTABLE']}",
                   f"-DCMAKE_CXX_COMPILER_LAUNCHER={LAUNCHER}")
        cls.run_in("cmake", "--build", "build", "--target", "hypermla_cli")
        (cls.checkout / "build/built").touch()

    @classmethod
    def run_in(cls, *command, statuses=(0,), **variables):
        """Runs a command in the copy and returns what it prints."""
        done = subprocess.run(command, cwd=cls.checkout, text=True, check=False, capture_output=True, timeout=600,
                              env={**cls.variables, **variables})
        if done.returncode not in statuses:
            raise AssertionError(f"{command}\nstatus {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def hypermla(self, *words, **variables):
        return self.run_in("./hypermla", *words, **variables)

    def test_clones_are_listed_and_ranked(self):
        listed = self.hypermla("--list")
        for design in ("cutile.mla.flash_attention", "cutile.mla.mla_var6_plus", "cute.mla.flash_attention"):
            self.assertRegex(listed, rf"(?m)^{re.escape(design)} +v9 +draft: ")  # no record is asked of it
        # Ranked by its own figures: at s = 128 the larger one counts.
        chosen = self.hypermla("choose", "--s=128", "--device_name=NVIDIA H200", "--json")
        times = {row["kernel"]: row["sustained_us"] for row in json.loads(chosen)["ranking"]}
        self.assertLess(times["cutile.mla.flash_attention_v9"], 0.95 * times["cutile.mla.flash_attention"])

    def test_a_hybrid_takes_the_fastest_version_for_its_parts(self):
        for version in ("v0", "v5"):
            said = self.hypermla("kernel", "mla_var6_plus", version, "--language=cute", "--b=32", "--s=16", "--n=2304",
                                 "--help")
            self.assertRegex(said, r"--latent_version INT .*\(default 9\)")

    def test_clones_pass_untouched(self):
        cache = self.root / "cache"
        done = self.hypermla("kernel", "flash_attention", "v9", *SHAPE, "--check", "--tune_max_iters=1",
                             f"--out_dir={self.root}/out", "--bench_runs=1", HYPERMLA_CACHE_DIR=str(cache))
        self.assertIn("cutile.mla.flash_attention_v9 v9 on ", done)
        self.assertIn("check     passed", done)
        entries = [path.name for path in (cache / "kernels").iterdir()]
        self.assertTrue(entries and all(name.startswith("flash_attention_v9-") for name in entries), entries)
        # The original is untouched, and both kernels of the pipeline are the copy's own.
        for kernel in ("flash_attention", "mla_var6_plus_v9"):
            done = self.hypermla("kernel", kernel, *SHAPE, *(["--n=30"] if "plus" in kernel else []), "--check",
                                 "--no_autotune", "--prof_type=disabled")
            self.assertIn("check     passed", done)
        self.assertIn("tiling    mla_var6_plus_v9_latent:", done)
        self.assertIn("tiling    mla_var6_plus_v9_decompressed:", done)
        # Without a GPU one for Hopper compiles, and its kernel takes what its plan passes.
        if "tile       not found" not in self.hypermla("device"):
            done = self.hypermla("compile", "cute.mla.flash_attention", "v9", "--arch=sm_90")
            self.assertRegex(done, r"(?s)^flash_attention_v9 .*\n1 compiled, 0 failed")

    def test_a_kernel_of_ones_own(self):
        own = self.root / "project/kernels"
        shutil.copytree(CHECKOUT / "examples/own_kernels", own.parent)
        for path in (own, *own.rglob("*")):
            path.chmod(path.stat().st_mode & ~0o022)
        where = {"HYPERMLA_KERNELS": str(own)}
        listed = self.hypermla("--list", **where)
        self.assertRegex(listed, r"(?m)^cutile\.mla\.flash_attention +v20 +draft: an example of a version outside")
        self.assertEqual(len(listed.splitlines()), len({plan.parent for root in (self.checkout / "kernels", own)
                                                        for plan in root.glob("*/mla/*/*/*.cpp")}))
        done = self.hypermla("kernel", "flash_attention", "v20", *SHAPE, "--check", "--no_autotune",
                             "--prof_type=disabled", **where)
        self.assertIn("check     passed", done)
        self.assertRegex(self.hypermla("verify", "flash_attention", "v20", "--records_only", **where),
                         "a draft, not recorded")
        self.logs_of_kernels_of_ones_own(own, where)
        # The program that was built with it says what is missing where the variable is not set.
        said = subprocess.run([self.checkout / "build/bin/hypermla", "kernel", "flash_attention", "v20", *SHAPE],
                              env=self.variables, text=True, capture_output=True, check=False)
        self.assertEqual(said.returncode, 2)
        self.assertIn("point HYPERMLA_KERNELS at its directory", said.stderr)

        self.run_in("cmake", "--build", "build", "--target", "hypermla_python", **where)
        done = self.run_in(sys.executable, CHECKOUT / "examples/own_kernels/check.py",
                           PYTHONPATH=str(self.checkout / "build/python"), **where)
        self.assertEqual(done.splitlines()[0].partition(" - ")[0], "cutile.mla.flash_attention_v20")
        self.assertRegex(done.splitlines()[1], r"^passed \d outputs$")

        own.chmod(0o777)
        said = subprocess.run(["cmake", "."], cwd=self.checkout / "build", env={**self.variables, **where}, text=True,
                              capture_output=True, check=False)
        own.chmod(0o755)
        self.assertNotEqual(said.returncode, 0)
        self.assertIn("chmod -R go-w", " ".join(said.stderr.split()))  # CMake breaks lines

    def logs_of_kernels_of_ones_own(self, own, where):
        """They lie beside the kernels, and each place is looked at for its own versions."""
        log = own.parent / "docs/log/flash-attention.md"
        before = {path: path.read_text() for path in (self.checkout / "docs/log").iterdir()}
        lint = ["build/bin/hypermla", "devlog", "lint"]
        # The clones have no entries, and this copy has no results/. The kernel outside of it is not looked for in it.
        self.assertEqual(self.run_in(*lint, statuses=(1,), **where), self.run_in(*lint, statuses=(1,)))
        log.unlink()
        self.assertIn(f"{log}: cutile.mla.flash_attention_v20 has no entry", self.run_in(*lint, statuses=(1,), **where))
        self.assertNotIn("v20", self.run_in(*lint, statuses=(1,)))
        run = own.parent / "results/run"
        self.hypermla("kernel", "flash_attention", "v20", *SHAPE, "--no_autotune", "--prof_type=event",
                      "--bench_runs=1", f"--out_dir={run}", **where)
        add = ["build/bin/hypermla", "devlog", "add", "flash_attention", "v20", f"--profile={run}",
               "--changed=Heads side by side.", "--why=To see.", "--insight=None."]
        self.run_in(*add, statuses=(2,))  # this program knows the version, and not where it lies
        self.assertEqual(self.run_in(*add, **where), f"added to {log}\n")
        self.assertIn("[profile](../../results/run/profile.json)", log.read_text())
        self.assertNotIn("v20", self.run_in(*lint, statuses=(1,), **where))
        self.assertEqual(before, {path: path.read_text() for path in (self.checkout / "docs/log").iterdir()})
        step = json.loads(self.hypermla("next", "flash_attention", "v20", str(run), "--json", **where))["task"]
        self.assertEqual(step["from"], str(own / "cutile/mla/flash_attention/flash_attention_v20"))
        self.assertIn("flash_attention_v21", step["task"])

    def test_the_tutorial(self):
        steps = re.split(r"(?m)^## ", (CHECKOUT / "docs/tutorial.md").read_text())[1:]
        word = re.compile(r"^\./hypermla \w+|^sed| v\d\b| --check| add\b")
        # What each step of the page runs; one that is left out or put elsewhere fails here.
        self.assertEqual([(step.splitlines()[0].split(",")[0], [" ".join(word.findall(one)) for one in commands(step)])
                          for step in steps],
                         [("1. Clone", ["./hypermla clone  v7"]), ("2. One idea", ["sed"] * 3),
                          ("3. Check", ["./hypermla kernel  v7  --check"]),
                          ("4. Profile both", ["./hypermla kernel  v0", "./hypermla kernel  v7"]),
                          ("5. Compare", ["./hypermla compare"]), ("6. Log", ["./hypermla devlog  add  v7"]),
                          ("What comes next", [])])
        for command in commands((CHECKOUT / "docs/tutorial.md").read_text()):
            # SLOWER and UNCLEAR are answers, too.
            said = self.run_in("bash", "-c", command, statuses=(0, 1, 3) if "hypermla compare" in command else (0,))
            if "--check" in command:
                self.assertIn("check     passed", said)
            if "hypermla compare" in command:
                self.assertRegex(said, r"SAME|FASTER|SLOWER|UNCLEAR")
        log = (self.checkout / "docs/log/flash-attention.md").read_text()
        self.assertIn("## Version v7 of cutile.mla.flash_attention_v7\n", log)
        self.assertRegex(log, r"- Baseline: cutile\.mla\.flash_attention, .*not kept here")
        self.assertNotIn("flash_attention_v7", self.run_in("./hypermla", "devlog", "lint", statuses=(0, 1)))
        # The step from a draft's profile to the next version.
        sheet = self.hypermla("next", "flash_attention", "v7", "out/after", "--baseline=out/before")
        self.assertIn("Start with `./hypermla clone cutile.mla.flash_attention_v7 v", sheet)
        self.assertEqual(sheet, self.hypermla("next", "flash_attention", "out/after", "--baseline=out/before"))
        made = self.checkout / "kernels/cutile/mla/flash_attention/flash_attention_v7/flash_attention_v7"
        base = self.checkout / "kernels/cutile/mla/flash_attention/flash_attention/flash_attention"
        for file in (".cpp", ".cuh"):  # both edits of the page have changed something
            text = pathlib.Path(f"{made}{file}").read_text().replace("_v7", "").replace("V7", "").replace("_DRAFT", "")
            self.assertNotEqual(text, pathlib.Path(f"{base}{file}").read_text())


if __name__ == "__main__":
    unittest.main()
