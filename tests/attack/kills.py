"""Kills at random moments: the next run works, nothing half written is taken, and no compiler goes on."""

import contextlib
import json
import os
import pathlib
import random as randomness
import shutil
import signal
import subprocess
import sys
import time

from support import BINARY, BUILD
from world import CHECK, PROFILE, TUNE, Done, environment, expect

# In Python, where the process itself starts the compilers.
IN_PYTHON = """import hypermla
kernel = hypermla.Kernel("flash_attention", device="cpu", b=1, s=3, t=40, h=2)
memory = [bytearray(1 << 16) for _ in kernel.tensors]
for one, its in zip(kernel.tensors, memory):
    kernel.bind(one.name, hypermla._hypermla.buffer_address(memoryview(its)) + 15 & -16)
kernel.tune(max_iterations=2)
kernel.run()
"""
# What to do, how long it takes about, and whether the cache is warm.
KINDS = [("compile", 0.8, False), ("ahead", 0.8, False), ("tune", 1.5, False), ("tune", 0.6, True),
         ("profile", 0.5, True), ("python", 1.2, False)]
SLOW = {12: ("verify", 1.5, True), 18: ("measure", 3.0, True)}  # of 25


def processes(token):
    """Those that were started with it in their environment."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if token in (path / "environ").read_bytes():
                found.append(int(path.name))
    return found


def expect_whole(own):
    """What another program would find."""
    for entry in own.glob("cache/kernels/*"):
        if entry.suffix != ".tmp":
            for name, its in json.loads((entry / "report.json").read_text())["files"].items():
                expect((entry / name).stat().st_size == its["bytes"], f"{entry} is half an entry")
    for name in ("cache/kernel-autotune/*/*/*/autotuning.json", "cache/devices.json", "record.json",
                 "out/profile.json"):
        for path in own.glob(name):
            json.loads(path.read_text())


def run(seed, index, directory):
    random = randomness.Random(f"{seed}:{index}")
    kind, seconds, warm = SLOW.get(index % 25) or random.choice(KINDS)
    own = directory / "kill"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    if warm:
        shutil.copytree(directory / "pristine/cache", own / "cache")
        shutil.rmtree(own / "cache/kernel-autotune")
    shutil.copy(directory / "pristine/record.json", own)
    token = f"{os.getpid()}-{index}-{random.random()}"
    alone = random.random() < 0.2  # a compiler is killed alone, as when memory is short
    variables = environment(directory, own / "cache", HYPERMLA_ATTACK=token, PYTHONPATH=BUILD / "python",
                            ATTACK_PAUSE=0.3 if alone else random.choice((0.1, 0.3, 20)))
    if index % 25 == 24:  # the real compiler, whose own processes must end, too
        variables["CXX"] = variables["REAL_CXX"]
        seconds += 3
    words = {"compile": CHECK,
             "ahead": ["compile", "flash_attention", "--arch=cpu", "--s=3"],
             "tune": TUNE,
             "verify": ["verify", "prefix_decompression", "--device=cpu", "--record=record.json"],
             "measure": ["device", "--device=cpu", "--measure"],
             "profile": [*PROFILE, "--out_dir=out"],
             "python": [sys.executable, "-c", IN_PYTHON]}[kind]
    command = words if kind == "python" else [BINARY, *words]
    process = subprocess.Popen(command, cwd=own, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE)
    time.sleep(random.random() * seconds)
    said = f"{kind}, killed"
    others = [pid for pid in processes(token.encode()) if pid != process.pid]
    if others and alone:
        said = f"{kind}, a compiler killed"
        with contextlib.suppress(ProcessLookupError):
            os.kill(random.choice(others), signal.SIGKILL)
        err = process.communicate(timeout=120)[1].decode(errors="replace")
        expect(process.returncode in (0, 1, 2) and "json.exception" not in err,
               f"{said}: status {process.returncode}, {err!r}")
    else:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 5
    while (left := processes(token.encode())) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        with contextlib.suppress(OSError):
            said += f"; left running: {pathlib.Path(f'/proc/{pid}/cmdline').read_bytes()[:200]}"
            os.kill(pid, signal.SIGKILL)
    expect(not left, said)
    expect_whole(own)
    variables["ATTACK_PAUSE"] = "0.1"
    if kind == "python":
        done = subprocess.run(command, cwd=own, env=variables, capture_output=True, timeout=120, check=False)
        expect(done.returncode == 0, f"{said}; afterwards {done.stderr[-500:]!r}")
    else:
        words = [*PROFILE, "--out_dir=again"] if kind == "profile" else words
        done = Done(words, variables, own)
        expect(done.status == 0 and "FAILED" not in done.out, f"{said}; afterwards {done}")
    expect_whole(own)
    done = Done(CHECK, variables, own)  # which compiles at once what a kill left out
    expect(done.status == 0 and "check     passed" in done.out, f"{said}; afterwards {done}")
    left = [path.name for path in own.glob("cache/kernels/*.tmp")]
    expect(not left or warm, f"{said}; left in the cache: {left}")
