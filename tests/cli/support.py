"""Runs the program under test. ctest sets HYPERMLA_TEST_BINARY, HYPERMLA_TEST_BUILD and HYPERMLA_CACHE_DIR."""

import os
import pathlib
import struct
import subprocess
import tempfile
import unittest

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("HYPERMLA_TEST_BINARY", str(CHECKOUT / "build/bin/hypermla"))
BUILD = pathlib.Path(os.environ.get("HYPERMLA_TEST_BUILD", str(CHECKOUT / "build")))
os.environ.setdefault("HYPERMLA_CACHE_DIR", str(BUILD / "test-cache"))

# A problem so small that its kernels run in milliseconds on a CPU.
SMALL = ["--b=1", "--s=16", "--t=128", "--h=2", "--device=cpu"]


class Finished:
    def __init__(self, process):
        self.status, self.out, self.err = process.returncode, process.stdout, process.stderr

    def __repr__(self):
        return f"status {self.status}\n--- output ---\n{self.out}\n--- errors ---\n{self.err}"


def start(*arguments, cwd=None, **environment):
    """`environment` comes on top of the present one; None removes a variable."""
    variables = {**os.environ, **{key: str(value) for key, value in environment.items()}}
    for key in [key for key, value in environment.items() if value is None]:
        del variables[key]
    return subprocess.Popen(
        [BINARY, *arguments], cwd=cwd, env=variables, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process):
    process.stdout, process.stderr = process.communicate(timeout=600)
    return Finished(process)


def run(*arguments, cwd=None, **environment):
    return finish(start(*arguments, cwd=cwd, **environment))


def kernel_directories():
    """(language.layer.design, version, directory) of every kernel version in the checkout."""
    found = []
    for plan in sorted(CHECKOUT.glob("kernels/*/*/*/*/*.cpp")):
        directory = plan.parent
        if plan.stem != directory.name:
            continue
        design = directory.parent.name
        version = "v0" if directory.name == design else directory.name[len(design) + 1 :]
        found.append((f"{directory.parents[2].name}.{directory.parents[1].name}.{design}", version, directory))
    return found


def instructions(cubin):
    """The lower and upper half of each in a cubin, from Volta on: 16 bytes, the operation in bits 0 to 11."""
    offset, = struct.unpack_from("<Q", cubin, 0x28)
    entry, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, offset + i * entry) for i in range(count)]
    for name, _, _, _, start, size in sections:
        at = sections[names][4] + name
        if cubin[at:at + 6] == b".text.":
            yield from struct.iter_unpack("<QQ", cubin[start:start + size])


class CommandCase(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="hypermla-test-")
        self.addCleanup(temporary.cleanup)
        self.directory = pathlib.Path(temporary.name)

    def succeed(self, *arguments, **options):
        done = run(*arguments, cwd=options.pop("cwd", self.directory), **options)
        self.assertEqual(done.status, 0, done)
        return done

    def refuse(self, *arguments, **options):
        """The program must refuse with status 2 and one sentence; returns the sentence."""
        done = run(*arguments, cwd=options.pop("cwd", self.directory), **options)
        self.assertEqual(done.status, 2, done)
        lines = done.err.splitlines()
        self.assertEqual(len(lines), 1, done)
        self.assertTrue(lines[0].startswith("hypermla: "), done)
        return lines[0][len("hypermla: ") :]
