"""The launcher ./hypermla, with replacements for the tools it calls: when it builds, what it says when it cannot."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import time
import unittest

from support import CHECKOUT

PROGRAM = '#!/bin/sh\necho "program: $*"\nexit 3\n'
TOOLS = ["bash", "cat", "cmp", "cp", "dirname", "env", "find", "flock", "grep", "head", "mkdir", "mv", "readlink",
         "sed", "sh", "sleep", "tail", "tee", "touch", "wc"]


class Launcher(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="hypermla-test-")
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name).resolve() / "a $checkout"
        for name in ("src", "kernels", "include", "cmake", "build/bin", ".venv/bin"):
            (self.root / name).mkdir(parents=True)
        shutil.copy(CHECKOUT / "hypermla", self.root)
        shutil.copytree(CHECKOUT / "scripts", self.root / "scripts")
        self.source = self.write("src/some.cpp", "")
        self.write("CMakeLists.txt", "")
        self.write("requirements.txt", "some==1\n")
        self.write(".venv/installed.txt", "some==1\n")
        self.write("build/build.ninja", "")
        self.write("build/CMakeCache.txt", f"CMAKE_HOME_DIRECTORY:INTERNAL={self.root}\n")
        self.binary = self.program("build/bin/hypermla", PROGRAM)
        self.tools = self.root.parent / "tools"
        self.tools.mkdir()
        for tool in TOOLS:
            (self.tools / tool).symlink_to(shutil.which(tool))
        self.calls = self.root.parent / "calls"
        for tool in ("cmake", "ninja"):
            self.program(self.tools / tool, f'#!/bin/sh\necho "{tool} $*" >>"{self.calls}"\n')
        self.program(self.tools / "g++", "#!/bin/sh\ncat >/dev/null\n")
        time.sleep(0.01)
        self.write("build/built", "")

    def write(self, name, text):
        path = self.root / name
        path.write_text(text)
        return path

    def program(self, name, text):
        path = self.write(name, text)
        path.chmod(0o755)
        return path

    def launch(self, *words, **variables):
        done = subprocess.run([self.root / "hypermla", *words], text=True, check=False, capture_output=True, timeout=60,
                              cwd=self.root.parent, env={"PATH": str(self.tools), **variables})
        self.called = self.calls.read_text() if self.calls.exists() else ""
        return done

    def edit(self):
        time.sleep(0.01)
        self.source.write_text("// new\n")

    def expect_program(self, done):
        self.assertEqual((done.stdout, done.returncode), ("program: a b c\n", 3), done.stderr)

    def test_up_to_date_it_only_starts(self):
        done = self.launch("a", "b c")
        self.expect_program(done)
        self.assertEqual((done.stderr, self.called), ("", ""))

    def test_compilers_that_are_missing_are_installed(self):
        """Also where the program is up to date; without a network it runs without them."""
        for status, said in (1, "where there is a network, .*\nhypermla: running without compilers\n"), (0, ""):
            (self.root / ".venv/installed.txt").unlink()
            self.program(".venv/bin/python", f'#!/bin/sh\ncase "$*" in *install*) exit {status} ;; esac\n')
            done = self.launch("a", "b c")
            self.expect_program(done)
            self.assertRegex(done.stderr, rf"(?s)^hypermla: installing the CUDA Tile compilers .*{said}$")
            self.assertEqual((self.root / ".venv/installed.txt").exists(), not status)
            self.write(".venv/installed.txt", "some==1\n")
        (self.root / ".venv/installed.txt").unlink()
        for variables in {"HYPERMLA_CUDA_ROOT": "/nonexistent"}, {"HYPERMLA_CUDA_ROOT": "/usr"}:
            self.assertEqual(self.launch("a", "b c", **variables).stderr, "")
        self.assertEqual(self.called, "")

    def test_a_compiler_with_flags_is_refused(self):
        self.binary.unlink()
        done = self.launch("a", CXX="g++ -O1")
        self.assertEqual((done.returncode, self.called), (1, ""))
        self.assertRegex(done.stderr, r"^hypermla: CXX=g\+\+ -O1 is no program that can be run; .*without flags.*\n$")

    def test_through_a_link(self):
        link = self.tools / "link"
        link.symlink_to(self.root / "hypermla")
        done = subprocess.run([link, "a b c"], text=True, check=False, capture_output=True,
                              env={"PATH": str(self.tools)})
        self.expect_program(done)

    def test_from_any_directory_by_any_words(self):
        """`cd` with CDPATH may print where it goes, and a script that bash is given by its name has no directory."""
        for cwd, words in ((self.root, ["bash", "hypermla"]), (self.root, ["bash", "./hypermla"]),
                           (self.root.parent, ["bash", f"{self.root.name}/hypermla"]),
                           (self.root / "src", ["../hypermla"])):
            with self.subTest(words):
                done = subprocess.run([*words, "a", "b c"], text=True, check=False, capture_output=True, cwd=cwd,
                                      env={"PATH": str(self.tools), "CDPATH": f".:{self.root.parent}"})
                self.expect_program(done)

    def test_a_path_that_cmake_cannot_take_is_a_sentence(self):
        self.root = self.root.rename(self.root.parent / "a${b}")
        (self.root / "build/build.ninja").unlink()
        (self.root / "build/built").unlink()
        done = self.launch("a")
        self.assertEqual((done.returncode, self.called), (1, ""))
        self.assertRegex(done.stderr, r"^hypermla: CMake takes \$\{ in a path .*; rename a directory of .*\n$")

    def test_a_newer_source_is_built_once(self):
        self.edit()
        self.expect_program(self.launch("a", "b c"))
        self.assertEqual(self.called, f"cmake --build {self.root}/build --target hypermla_cli\n")
        self.calls.unlink()
        self.expect_program(self.launch("a", "b c"))
        self.assertEqual(self.called, "")

    def test_kernels_of_ones_own_are_built_and_left_out_again(self):
        own = self.root.parent / "project/kernels"
        own.mkdir(parents=True)
        cache = self.root / "build/CMakeCache.txt"
        known = cache.read_text()
        for text, variables, setting in ((known, {"HYPERMLA_KERNELS": str(own)}, own),
                                         (known + f"HYPERMLA_KERNELS:PATH={own}\n", {}, "")):
            cache.write_text(text)
            self.expect_program(self.launch("a", "b c", **variables))
            self.assertEqual(self.called, f"cmake -S {self.root} -B {self.root}/build -DHYPERMLA_KERNELS={setting}\n"
                                          f"cmake --build {self.root}/build --target hypermla_cli\n")
            self.calls.unlink()
        cache.write_text(known + f"HYPERMLA_KERNELS:PATH={own}\n")
        for end in "", "/", "//":
            self.expect_program(self.launch("a", "b c", HYPERMLA_KERNELS=f"{own}{end}"))
            self.assertEqual(self.called, "")
        done = self.launch("a", HYPERMLA_KERNELS="project/kernels")
        self.assertEqual((done.returncode, done.stdout, self.called), (1, "", ""))
        self.assertRegex(done.stderr, r"^hypermla: HYPERMLA_KERNELS=project/kernels is not an absolute path; .*\n$")
        time.sleep(0.01)
        (own / "mine.cpp").touch()
        self.expect_program(self.launch("a", "b c", HYPERMLA_KERNELS=str(own)))
        self.assertEqual(self.called, f"cmake --build {self.root}/build --target hypermla_cli\n")

    def test_the_python_package_for_the_benchmarks(self):
        done = subprocess.run([self.root / "scripts/build_package.sh"], text=True, capture_output=True, timeout=60,
                              cwd=self.root.parent, env={"PATH": str(self.tools)})
        self.assertEqual(done.returncode, 0, done)
        configured, built = self.calls.read_text().splitlines()
        self.assertIn("-DHYPERMLA_BUILD_PYTHON=ON", configured)
        self.assertTrue(built.endswith("--target hypermla_cli hypermla_python"), built)

    def test_what_is_edited_during_a_build_is_built_next_time(self):
        self.edit()
        self.program(self.tools / "cmake",
                     f'#!/bin/sh\necho "$*" >>"{self.calls}"\nsleep 0.05\ntouch "{self.source}"\n')
        self.launch("a")
        first = self.called
        self.launch("a")
        self.assertEqual(self.called, first * 2)

    def test_a_removed_source_is_noticed(self):
        time.sleep(0.01)
        self.source.unlink()
        self.launch("a")
        self.assertIn("cmake --build", self.called)

    def test_an_interrupted_build_is_resumed(self):
        (self.root / "build/built").unlink()
        self.expect_program(self.launch("a", "b c"))
        self.assertIn("cmake --build", self.called)

    def test_an_interrupted_configuration_starts_afresh(self):
        (self.root / "build/built").unlink()
        (self.root / "build/build.ninja").unlink()
        self.launch("a")
        self.assertIn("--fresh --preset default", self.called)

    def test_a_moved_checkout_starts_afresh(self):
        self.root = self.root.rename(self.root.parent / "moved")
        (self.root / "build/built").unlink()
        self.launch("a")
        self.assertIn(f"cmake -S {self.root} -B {self.root}/build --fresh", self.called)

    def test_a_failed_build_is_a_sentence_and_is_tried_again(self):
        self.program(self.tools / "cmake", "#!/bin/sh\necho 'some.cpp:1: error: wrong'\nexit 1\n")
        self.edit()
        for _ in range(2):
            done = self.launch("a")
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertIn("some.cpp:1: error: wrong", done.stderr)
            self.assertIn("hypermla: the build failed; the lines above say why\n", done.stderr)

    def test_without_tools_it_runs_what_there_is(self):
        self.edit()
        (self.tools / "cmake").unlink()
        done = self.launch("a", "b c")
        self.expect_program(done)
        self.assertEqual(len(done.stderr.splitlines()), 1)
        self.assertIn("nothing to build with", done.stderr)

    def missing_cmake(self):
        self.binary.unlink()
        (self.tools / "cmake").unlink()

    def test_without_debian_it_names_what_is_missing(self):
        self.missing_cmake()
        done = self.launch("a")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r"^hypermla: missing: cmake \(Debian's names\); install them .*\n$")

    def test_without_a_network_it_says_what_to_run(self):
        self.missing_cmake()
        self.program(self.tools / "apt-get", "#!/bin/sh\necho 'E: Failed to fetch http://a.host/x'\nexit 100\n")
        done = self.launch("a")
        self.assertEqual(done.returncode, 1)
        self.assertNotIn("a.host", done.stderr)
        line = "apt-get install -y cmake"
        if os.geteuid() == 0:
            self.assertIn(f"hypermla: apt-get failed; run `apt-get update && {line}` where there is a network",
                          done.stderr)
        else:
            self.assertEqual(done.stderr, f"hypermla: missing packages; run `sudo {line}`, then run this again\n")

    def test_a_second_run_of_the_tests_waits_for_the_first(self):
        shutil.copy(CHECKOUT / "test", self.root)
        (self.tools / "nproc").symlink_to(shutil.which("nproc"))
        self.program(self.tools / "chromium", "#!/bin/sh\n")
        go = self.root.parent / "go"
        self.program(self.tools / "ctest", f'#!/bin/sh\necho begin >>"{self.calls}"\n'
                                           f'until [ -e "{go}" ]; do sleep 0.01; done\necho end >>"{self.calls}"\n')

        def start(word):
            return subprocess.Popen([self.root / "test", word], text=True, stderr=subprocess.PIPE,
                                    env={"PATH": str(self.tools)})

        with start("one") as one:
            while not self.calls.exists() or "begin" not in self.calls.read_text():
                self.assertIsNone(one.poll())
                time.sleep(0.01)
            with start("other") as other:
                said = next((line for line in other.stderr if "waiting" in line), "")
                go.touch()
        self.assertEqual(said, "hypermla: waiting for another ./test\n")
        self.assertEqual((one.returncode, other.returncode), (0, 0))
        lines = self.calls.read_text().splitlines()
        self.assertEqual([line for line in lines if line in ("begin", "end")], ["begin", "end", "begin", "end"])

    def test_wheels_that_cannot_be_had(self):
        self.binary.unlink()
        self.write("requirements.txt", "other==2\n")
        self.program(".venv/bin/python",
                     '#!/bin/sh\n[ "$3" = --version ] || { echo "ERROR: no https://a.host/other"; exit 1; }\n')
        done = self.launch("a")
        self.assertEqual(done.returncode, 1)
        self.assertNotIn("a.host", done.stderr)
        self.assertIn("hypermla: the wheels of requirements.txt could not be installed; run this again where there is "
                      "a network", done.stderr)
        self.assertEqual((self.root / ".venv/installed.txt").read_text(), "some==1\n")


if __name__ == "__main__":
    unittest.main()
