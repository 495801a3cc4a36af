"""What damaged files and kills have in common: a cache, a profile and records that are in order, and a program that
must cope with what became of them."""

import json
import os
import shutil
import subprocess

from support import BINARY, CHECKOUT

KERNEL = ["kernel", "flash_attention", "--b=1", "--s=3", "--t=40", "--h=2", "--device=cpu", "--seed=1"]
CHECK = [*KERNEL, "--no_autotune", "--check", "--prof_type=disabled"]
TUNE = [*KERNEL, "--tune_max_iters=2", "--check", "--prof_type=disabled"]
PROFILE = [*KERNEL, "--no_autotune", "--bench_runs=2", "--prof_type=event"]

# Compiles a source once and then gives the same library again, after a pause and in two pieces: what a compiler does in
# seconds. The last words of a compilation are `source -o library`.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec "$REAL_CXX" --version
for word; do source=$flag; flag=$library; library=$word; done
kept={store}/$(cksum <"$source" | tr ' ' -)
if [ ! -f "$kept" ]; then
  "$REAL_CXX" "$@" || exit
  cp "$library" "$kept.$$" && exec mv "$kept.$$" "$kept"
fi
head -c 9000 "$kept" >"$library"
sleep "${{ATTACK_PAUSE:-0}}"
exec cp "$kept" "$library"
"""


class Fault(Exception):
    """What must not be."""


def expect(good, sentence):
    if not good:
        raise Fault(sentence)


def environment(directory, cache, **more):
    variables = {
        **os.environ, "CXX": str(directory / "c++"), "REAL_CXX": os.environ.get("CXX") or "g++",
        "HYPERMLA_CACHE_DIR": str(cache)
    }
    return {**variables, **{key: str(value) for key, value in more.items()}}


class Done:
    def __init__(self, words, variables, cwd):
        self.words = words
        finished = subprocess.run([BINARY, *words], env=variables, cwd=cwd, stdin=subprocess.DEVNULL,
                                  capture_output=True, timeout=120, check=False)
        self.status = finished.returncode
        self.out, self.err = (text.decode(errors="replace") for text in (finished.stdout, finished.stderr))
        self.said = [line for line in self.err.splitlines() if line.startswith("hypermla: ")]

    def __str__(self):
        return f"`hypermla {' '.join(map(str, self.words))}` ended with {self.status} and said {self.err[-600:]!r}"

    def expect_sentence(self, name):
        """Status 2, and one sentence that names the file."""
        last = self.said[-1] if self.said else ""
        expect(
            self.status == 2 and name in last and len(last) < 1500 and "json.exception" not in self.err and
            self.err.endswith(last + "\n"), f"no sentence about {name}: {self}")


def make(directory):
    """directory/pristine: cache, profile, record, overlay and root (of the sources)."""
    pristine = directory / "pristine"
    (directory / "store").mkdir()
    compiler = directory / "c++"
    compiler.write_text(COMPILER.format(store=directory / "store"))
    compiler.chmod(0o755)
    pristine.mkdir()
    variables = environment(directory, pristine / "cache")
    for words in (TUNE, CHECK, [*PROFILE, f"--out_dir={pristine}/profile"]):
        done = Done(words, variables, directory)
        expect(done.status == 0, str(done))
    shutil.copy(CHECKOUT / "results/verified.json", pristine / "record.json")
    name = json.loads((pristine / "profile/profile.json").read_text())["device"]["name"]
    measured = {"read_GBps": 11.5, "fma_gflops": 61.25, "copy_GBps": 8.5, "date": "2026-01-01T00:00:00Z"}
    (pristine / "devices.json").write_text(
        json.dumps(
            {
                name: {"measured": measured}, "Some GPU": {
                    "arch": "sm_90", "sm_count": 100, "peak_dram_bw_GBps": 3000, "peak_bfloat16_float32_tflops": 900
                }
            }, indent=2))
    root = pristine / "root"
    for name in ("conf", "docs/knowledge"):
        shutil.copytree(CHECKOUT / name, root / name)
    for name in ("kernels", "include"):
        (root / name).symlink_to(CHECKOUT / name)
