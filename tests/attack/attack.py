"""Attacks the library on the CPU: random cases against NumPy, damaged files, and kills at random moments.

    tests/attack/attack.py --seed=7 --cases=10000 --files=1000 --kills=500    # about an hour of one core
    tests/attack/attack.py --seed=7 --only=case:123                           # repeats one of them

It runs the Python package and the program of the build. Every fault is printed with the command that repeats it, the
totals as one line of JSON at the end; the exit status is 1 if there was a fault. Random cases need NumPy.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "cli"))
import world
from support import BUILD

sys.path.insert(0, str(BUILD / "python"))
PER_PROCESS = 300  # cases
PATIENCE = 300  # seconds for one of anything, compilation included


def work(kind, seed, first, count, directory):
    """Makes some attacks. Says which one begins and what went wrong, a line of JSON each."""
    os.chdir(directory)
    run = importlib.import_module({"case": "cases", "file": "damage", "kill": "kills"}[kind]).run
    for index in range(first, first + count):
        print(json.dumps({"index": index}), flush=True)
        try:
            run(seed, index, directory)
        except Exception as error:  # of any type: the others are tried
            print(json.dumps({"index": index, "fault": f"{type(error).__name__}: {error}"}), flush=True)


class Watchdog:
    """Runs attacks of one kind in processes of their own, and notices when one of them crashes or hangs."""
    def __init__(self, kind, seed, directory):
        self.kind, self.seed, self.directory, self.faults = kind, seed, directory, 0

    def fault(self, index, what):
        self.faults += 1
        print(f"FAULT {what}\n  again: {pathlib.Path(__file__)} --seed={self.seed} --only={self.kind}:{index}",
              flush=True)

    def run(self, first, last):
        while first < last:
            first = self.run_some(first, min(PER_PROCESS, last - first))

    def run_some(self, first, count):
        """Returns the first attack that was not made."""
        words = [
            sys.executable, __file__, f"--seed={self.seed}", f"--worker={self.kind}:{first}:{count}:{self.directory}"
        ]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                                   start_new_session=True)
        lines, index = queue.Queue(), first - 1
        threading.Thread(target=lambda: [*map(lines.put, process.stdout), lines.put("")], daemon=True).start()
        try:
            for line in iter(lambda: lines.get(timeout=PATIENCE), ""):
                said = json.loads(line)
                index = said["index"]
                if "fault" in said:
                    self.fault(index, said["fault"])
            if process.wait() != 0:
                if index < first:
                    raise SystemExit(f"no attack can be made: {words} ended with status {process.returncode}")
                self.fault(index, f"the process ended with status {process.returncode}")
        except queue.Empty:
            self.fault(index, f"no end after {PATIENCE} s")
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it left running, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return index + 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=0, help="random cases against NumPy, wrong arguments among them")
    parser.add_argument("--files", type=int, default=0, help="damaged files")
    parser.add_argument("--kills", type=int, default=0, help="kills at random moments")
    parser.add_argument("--only", metavar="KIND:INDEX", help="one of them: case:12, file:3 or kill:4")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        kind, first, count, directory = given.worker.split(":", 3)
        return work(kind, given.seed, int(first), int(count), pathlib.Path(directory))
    ranges = {"case": (0, given.cases), "file": (0, given.files), "kill": (0, given.kills)}
    if given.only:
        kind, index = given.only.split(":")
        ranges = {kind: (int(index), int(index) + 1)}
    if "case" in ranges and ranges["case"][1] and not importlib.util.find_spec("numpy"):
        print("random cases are left out: NumPy is not installed")
        del ranges["case"]
    totals = {"seed": given.seed}
    with tempfile.TemporaryDirectory(prefix="hypermla-attack-") as directory:
        for kind, (first, last) in ranges.items():
            begin, watchdog = time.monotonic(), Watchdog(kind, given.seed, directory)
            if last > first and kind != "case" and not (pathlib.Path(directory) / "pristine").exists():
                world.make(pathlib.Path(directory))
            watchdog.run(first, last)
            totals[f"{kind}s"] = {
                "made": last - first, "faults": watchdog.faults, "seconds": round(time.monotonic() - begin)
            }
    print(json.dumps(totals))
    return 1 if any(total["faults"] for total in totals.values() if isinstance(total, dict)) else 0


if __name__ == "__main__":
    sys.exit(main())
