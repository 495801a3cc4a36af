"""`pip install .`: builds the wheel as a user would, into an environment of its own, and uses what it installed.

Skipped (77) without a package index. What the present build has compiled is not compiled again.
"""

import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cli"))
from reuse import LAUNCHER, settings
from support import BUILD, CHECKOUT

ENVIRONMENT = BUILD / "wheel-test"
PYTHON = ENVIRONMENT / "bin/python"
SOURCE = BUILD / "wheel-source"
NAMES = ["CMakeLists.txt", "LICENSE", "README.md", "cmake", "conf", "docs/knowledge", "include", "kernels",
         "pyproject.toml", "python", "requirements.txt", "scripts", "src"]


def run(*command, **environment):
    # Runs outside the checkout, so that no file of it is found by accident.
    variables = {key: value for key, value in os.environ.items() if not key.startswith("HYPERMLA_CUDA")}
    return subprocess.run(command, cwd=ENVIRONMENT.parent, text=True, check=False, capture_output=True, timeout=900,
                          env={**variables, **environment})


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not PYTHON.exists():
            subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
        shutil.rmtree(SOURCE, ignore_errors=True)
        SOURCE.mkdir()
        for name in NAMES:
            copy = shutil.copytree if (CHECKOUT / name).is_dir() else shutil.copy2
            (SOURCE / name).parent.mkdir(exist_ok=True)
            copy(CHECKOUT / name, SOURCE / name)
        project = tomllib.loads((SOURCE / "pyproject.toml").read_text())
        pip = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if run(*pip, "numpy", *project["build-system"]["requires"]).returncode != 0:
            print("no package index can be reached")
            sys.exit(77)
        # Without isolation: what the build requires was installed above.
        cls.installed = run(*pip, "--force-reinstall", "--no-build-isolation", SOURCE,
                            f"--config-settings=build-dir={BUILD / 'wheel'}",
                            f"--config-settings=cmake.define.CMAKE_CXX_COMPILER_LAUNCHER={LAUNCHER}",
                            CXX=settings(BUILD)["CMAKE_CXX_COMPILER"])

    def test_it_installs(self):
        self.assertEqual(self.installed.returncode, 0, self.installed.stdout + self.installed.stderr)

    def test_it_is_built_with_the_cupti_that_it_runs_with(self):
        """Whose structures grow: an older library refuses those of newer headers."""
        requires = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["build-system"]["requires"]
        [built_with] = re.findall(r"nvidia-cuda-cupti==(.*)\.\*$", "\n".join(requires), re.MULTILINE)
        pins = (CHECKOUT / "requirements.txt").read_text()
        [runs_with] = re.findall(r"^nvidia-cuda-cupti==(.*)$", pins, re.MULTILINE)
        self.assertEqual(runs_with.rpartition(".")[0], built_with)

    def test_its_compilers_are_what_requirements_txt_pins(self):
        """As an extra: without it nothing of an engine's environment is replaced."""
        script = "import importlib.metadata as m; print(*sorted(m.requires('hypermla')), sep='\\n')"
        lines = (CHECKOUT / "requirements.txt").read_text().splitlines()
        pinned = sorted(f"{line}; extra == 'compilers'" for line in lines
                        if "==" in line and not line.startswith("nvidia-cutlass"))
        self.assertEqual(run(PYTHON, "-c", script).stdout.replace('"', "'").splitlines(), pinned)

    def test_machines_with_an_older_glibc_run_it(self):
        """As manylinux_2_35 has it: Ubuntu 22.04, on which images of engines stand."""
        if tuple(map(int, platform.libc_ver()[1].split("."))) > (2, 36):
            self.skipTest("what is built here needs the glibc that is here")
        [package] = ENVIRONMENT.glob("lib/python3.*/site-packages/hypermla")
        binaries = [path for path in package.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"]
        self.assertGreaterEqual({path.name for path in binaries}, {"hypermla", "_hypermla.abi3.so"})
        for path in binaries:
            newest = max(int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", path.read_bytes()))
            self.assertLessEqual(newest, 35, path)

    def test_the_command_runs(self):
        done = run(ENVIRONMENT / "bin/hypermla", "kernel", "flash_attention", "--b=1", "--s=3", "--t=40", "--h=1",
                   "--device=cpu", "--no_autotune", "--check", "--prof_type=disabled")
        self.assertIn("check     passed", done.stdout, done.stderr)
        where = run(PYTHON, "-m", "hypermla", "device").stdout
        self.assertIn(f"kernels    {ENVIRONMENT}/lib", where)

    def test_the_package_works(self):
        done = run(PYTHON, pathlib.Path(__file__).with_name("python_test.py"), "-v", HYPERMLA_TEST_INSTALLED="1")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(set(re.findall("skipped '(.*)'", done.stderr)) - {"there is no GPU"}, set())


if __name__ == "__main__":
    unittest.main()
