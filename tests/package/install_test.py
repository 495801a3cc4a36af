"""`cmake --install`: what is installed works from wherever it lies, for the command line and for a C++ user."""

import ctypes
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cli"))
from support import BUILD, CHECKOUT

CXX = os.environ.get("CXX", "g++")


def run(*command, **options):
    return subprocess.run(command, text=True, check=False, capture_output=True, timeout=600, **options)


class Installation(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory(prefix="hypermla-test-")
        cls.directory = pathlib.Path(cls.temporary.name)
        first = cls.directory / "first"
        subprocess.run(["cmake", "--install", BUILD, "--prefix", first], check=True, stdout=subprocess.DEVNULL)
        # Moved, so that nothing can depend on where it was put first.
        cls.prefix = first.rename(cls.directory / "moved")
        cls.environment = {**os.environ, "HYPERMLA_CACHE_DIR": str(cls.directory / "cache")}
        cls.environment.pop("HYPERMLA_ROOT", None)

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def succeed(self, *command, **options):
        done = run(*command, env=self.environment, cwd=self.directory, **options)
        self.assertEqual(done.returncode, 0, f"{command}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def test_the_command_line_runs(self):
        out = self.succeed(self.prefix / "bin/hypermla", "kernel", "flash_attention", "--b=1", "--s=3", "--t=40",
                           "--h=1", "--device=cpu", "--no_autotune", "--check", "--prof_type=disabled")
        self.assertIn("check     passed", out)
        self.assertIn(f"kernels    {self.prefix}/share/hypermla/kernels\n",
                      self.succeed(self.prefix / "bin/hypermla", "device"))

    def test_what_is_not_built_is_said_before_anything_is_copied(self):
        script = (BUILD / "cmake_install.cmake").read_text()
        for file in ("bin/hypermla", "libhypermla.so"):
            one = self.directory / "install.cmake"
            one.write_text(script.replace(f'"{BUILD}/{file}', f'"{BUILD}/none/{file}'))
            prefix = self.directory / "nothing"
            done = run("cmake", f"-DCMAKE_INSTALL_PREFIX={prefix}", "-P", one, cwd=self.directory)
            self.assertNotEqual(done.returncode, 0, done)
            self.assertIn("is not built; run `cmake --build", " ".join(done.stderr.split()))
            self.assertFalse(prefix.exists())

    def test_only_what_is_used_is_installed(self):
        self.assertEqual({path.name.rstrip("64") for path in self.prefix.iterdir()}, {"bin", "lib", "include", "share"})
        for path in (self.prefix / "share/hypermla").rglob("*"):
            if path.is_file() and path.name != "LICENSE" and path.parent.name != "licenses":
                self.assertIn(path.suffix, {".h", ".cuh", ".json", ".md"}, path)
        self.assertEqual({path.name for path in (self.prefix / "include/hypermla").iterdir()},
                         {path.name for path in (CHECKOUT / "include/hypermla").iterdir()})

    def test_licenses_of_what_is_compiled_in_come_along(self):
        packages = ("libfmt-dev", "nlohmann-json3-dev", "libcli11-dev")
        notices = {name: pathlib.Path("/usr/share/doc", name, "copyright") for name in packages}
        own = self.prefix / "share/hypermla/licenses"
        self.assertEqual({name: (own / name).read_text() for name in packages if (own / name).exists()},
                         {name: notice.read_text() for name, notice in notices.items() if notice.exists()})

    def test_every_public_header_compiles_alone(self):
        for header in sorted((self.prefix / "include/hypermla").iterdir()):
            with self.subTest(header.name):
                self.succeed(CXX, "-std=c++20", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-x",
                             "c++", f"-I{self.prefix}/include", "-", input=f"#include <hypermla/{header.name}>\n")

    def test_the_library_exports_its_interface_only(self):
        (library,) = [path for path in self.prefix.rglob("libhypermla.so.*.*.*")]
        names = self.succeed("nm", "-D", "-C", "--defined-only", library).splitlines()
        own = [name for name in names if "hypermla" in name]
        self.assertTrue(any("hypermla::Kernel::run" in name for name in own))
        self.assertFalse([name for name in own if "hypermla::Compiler" in name or "hypermla::Registry" in name])

    def example(self, language, *flags):
        """The directory of a built example."""
        build = self.directory / f"example-{language}"
        self.succeed("cmake", "-G", "Ninja", "-S", CHECKOUT / "examples" / language, "-B", build,
                     f"-DCMAKE_PREFIX_PATH={self.prefix}", *flags)
        self.succeed("cmake", "--build", build)
        return build

    def test_the_c_example_builds_against_it_and_runs(self):
        build = self.example("c", "-DCMAKE_C_FLAGS=-Wall -Wextra -Wpedantic -Werror")  # standard C11
        self.assertRegex(self.succeed(build / "decode"),
                         r"^HyperMLA [\d.]+, .*reference.*\nlse 4\.9199 4\.9299 3\.7260\n$")
        self.assertEqual(self.succeed(build / "shared_prefix"), "lse 4.1589, o 3fc0 4000\n")
        self.assertEqual(self.succeed(build / "sparse"), "lse 1.3863 2.0794, o 3fe0 3f80\n")

    def test_other_languages_call_the_c_interface(self):
        (path,) = [path for path in self.prefix.rglob("libhypermla.so.*.*.*")]
        library = ctypes.CDLL(str(path))
        library.hypermla_version.restype = library.hypermla_last_error.restype = ctypes.c_char_p
        self.assertEqual(path.name, f"libhypermla.so.{library.hypermla_version().decode()}")
        self.assertEqual(library.hypermla_decode_create(None, b"cpu", None, ctypes.byref(ctypes.c_void_p())), 1)
        self.assertIn(b"options is NULL", library.hypermla_last_error())

    def test_the_example_builds_against_it_and_runs(self):
        build = self.example("cpp", "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror")
        self.assertRegex(self.succeed(build / "example"),
                         r"^flash_attention took [\d.]+ us on .+, see out/profiles/event/\S+/report\.md; "
                         r"an H200 would take [\d.]+ us\n$")
        self.assertEqual(len(list(self.directory.glob("out/profiles/event/*/*/*/profile.json"))), 1)
        self.assertRegex(self.succeed(build / "decode"), r"reference.*\nlse 4\.9199 4\.9299 3\.7260\n$")


if __name__ == "__main__":
    unittest.main()
