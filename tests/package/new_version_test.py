"""A new version of a kernel is one directory and nothing else: clones one by substituting its name, and uses the clone.

The clone is configured and built in a copy of the sources, as a developer would; only what the present build has not
compiled is compiled.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cli"))
from reuse import LAUNCHER, settings
from support import BUILD, CHECKOUT

OLD, NEW = "flash_attention", "flash_attention_v9"
OLD_TYPE, NEW_TYPE = "FlashAttention", "FlashAttentionV9"
FIGURE, FASTER = ".sustained = 0.825", ".sustained = 0.9"  # what the kernel reaches with tiles of 128 rows
SOURCES = ["CMakeLists.txt", "CMakePresets.json", "cmake", "conf", "docs/knowledge", "include", "kernels", "src"]


class NewVersion(unittest.TestCase):
    def run_in(self, directory, *command):
        done = subprocess.run(command, cwd=directory, text=True, check=False, capture_output=True, timeout=600,
                              env={**os.environ, "HYPERMLA_CACHE_DIR": str(self.root / "cache")})
        self.assertEqual(done.returncode, 0, f"{command}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def test_a_clone_builds_lists_is_ranked_and_passes(self):
        temporary = tempfile.TemporaryDirectory(prefix="hypermla-test-")
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name)
        checkout, build = self.root / "checkout", self.root / "checkout/build"
        checkout.mkdir()
        for name in SOURCES:
            copy = shutil.copytree if (CHECKOUT / name).is_dir() else shutil.copy
            (checkout / name).parent.mkdir(exist_ok=True)
            copy(CHECKOUT / name, checkout / name)

        design = checkout / "kernels/cutile/mla" / OLD
        (design / NEW).mkdir()
        for file in (design / OLD).iterdir():
            text = file.read_text().replace(OLD, NEW).replace(OLD_TYPE, NEW_TYPE)
            if file.suffix == ".cpp":
                self.assertIn(FIGURE, text)
                text = text.replace(FIGURE, FASTER).replace("HYPERMLA_REGISTER(", "HYPERMLA_REGISTER_DRAFT(")
            (design / NEW / file.name.replace(OLD, NEW)).write_text(text)

        self.run_in(checkout, "cmake", "--preset", "default", "-DHYPERMLA_BUILD_TESTS=OFF",
                    f"-DHYPERMLA_CUDA_INCLUDE={settings(BUILD)['HYPERMLA_CUDA_INCLUDE']}",
                    f"-DCMAKE_CXX_COMPILER_LAUNCHER={LAUNCHER}")
        self.run_in(checkout, "cmake", "--build", build, "--target", "hypermla_cli")

        binary = build / "bin/hypermla"
        listed = self.run_in(checkout, binary, "--list")
        self.assertRegex(listed, r"(?m)^cutile\.mla\.flash_attention +v9 +draft: ")  # no record is asked of it
        self.assertEqual(len(listed.splitlines()), len({plan.parent for plan in checkout.glob("kernels/*/mla/*/*/*.cpp")}))
        # Ranked by its own figures: at s = 128 the larger one counts.
        chosen = self.run_in(checkout, binary, "choose", "--s=128", "--device_name=NVIDIA H200", "--json")
        times = {row["kernel"]: row["sustained_us"] for row in json.loads(chosen)["ranking"]}
        self.assertLess(times[f"cutile.mla.{NEW}"], 0.95 * times[f"cutile.mla.{OLD}"])

        shape = ["--b=1", "--s=5", "--t=70", "--h=2", "--device=cpu"]
        done = self.run_in(checkout, binary, "kernel", "flash_attention", "v9", *shape, "--check", "--tune_max_iters=1",
                           f"--out_dir={self.root}/out", "--bench_runs=1")
        self.assertIn("cutile.mla.flash_attention_v9 v9 on ", done)
        self.assertIn("check     passed", done)
        entries = [path.name for path in (self.root / "cache/kernels").iterdir()]
        self.assertTrue(entries and all(name.startswith(NEW + "-") for name in entries), entries)
        self.assertIn("check     passed", self.run_in(checkout, binary, "kernel", "flash_attention", *shape, "--check",
                                                      "--no_autotune", "--prof_type=disabled"))


if __name__ == "__main__":
    unittest.main()
