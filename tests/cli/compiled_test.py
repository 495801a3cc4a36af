"""Kernels that an installation brings compiled: found without a compiler, read only, and not where others may write."""

import os
import pathlib
import shutil
import unittest

from support import CHECKOUT, CommandCase, instructions, run

WANTED = ["compile", "flash_mla", "v1", "--language=cute", "--arch=sm_90", "--ragged", "--page=64"]


class Compiled(CommandCase):
    def setUp(self):
        super().setUp()
        self.root, self.cache = self.directory / "root", self.directory / "cache"
        self.root.mkdir()
        for name in ("kernels", "include", "conf"):
            (self.root / name).symlink_to(CHECKOUT / name)
        self.succeed(*WANTED)  # into the cache that tests share
        present = pathlib.Path(os.environ["HYPERMLA_CACHE_DIR"]) / "kernels"
        for entry in present.iterdir():
            if entry.name.startswith(("flash_mla_v1-sm_90", "plan_requests-sm_90")):
                shutil.copytree(entry, self.root / "compiled" / entry.name)
        for path in [self.root / "compiled", *(self.root / "compiled").rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)

    def compile(self):
        return run(*WANTED, HYPERMLA_ROOT=self.root, HYPERMLA_CACHE_DIR=self.cache, HYPERMLA_CUDA_ROOT=self.root,
                   CUDA_HOME=self.root)

    def test_they_are_found_and_left_alone(self):
        before = sorted(self.root.rglob("*"))
        done = self.compile()
        self.assertEqual(done.status, 0, done)
        self.assertEqual(sorted(self.root.rglob("*")), before)
        self.assertFalse((self.cache / "kernels").exists())

    def test_they_find_their_own_code(self):
        """Two LEPC in a row, of the next instruction and of the function's end: kernels/cute/hopper/code.h."""
        self.succeed(*WANTED, HYPERMLA_CACHE_DIR=self.cache)
        (cubin,) = self.cache.glob("kernels/flash_mla_v1-*/kernel.cubin")
        code = [low for low, _ in instructions(cubin.read_bytes())]
        (at,) = [at for at, low in enumerate(code) if low & ~0xFFF000 == 0x94E]
        self.assertEqual(code[at + 1] & 0xFFF, 0x94E)
        self.assertEqual(code[at + 1] >> 24, 16 * (len(code) - at - 2))

    def test_kernels_of_prefill_and_caches_are_among_them(self):
        """On a GPU that has no kernels of its own: portable ones, which do not spill there."""
        done = self.succeed("compile", "all", "--decode", "--arch=sm_120", "--forbid_spills")
        self.assertEqual({line.split()[0] for line in done.out.splitlines()[:-1]},
                         {"append", "append_fp8", "append_fp8_576", "merge_states", "match_prefixes", "split_requests",
                          "decompress_pages", "repeat_rope", "plan_step", "attend_pages", "merge_parts",
                          "place_requests", "attend_requests"})

    def test_without_them_the_kernels_are_missed(self):
        shutil.rmtree(self.root / "compiled")
        if pathlib.Path("/usr/local/cuda/bin/tileiras").exists():
            self.skipTest("this machine has the compilers in /usr/local/cuda")
        self.assertIn("no CUDA Tile compiler was found", self.compile().out)

    def test_what_others_may_write_is_not_loaded(self):
        (self.root / "compiled").chmod(0o777)
        if pathlib.Path("/usr/local/cuda/bin/tileiras").exists():
            self.skipTest("this machine has the compilers in /usr/local/cuda")
        done = self.compile()
        self.assertEqual(done.status, 1, done)
        self.assertIn("may be written by other users", done.out)


if __name__ == "__main__":
    unittest.main()
