#!/usr/bin/env python3
"""The templates of kernel files (docs/kernel-files.md), each checked and timed by `hypermla bench-file`, beside cuBLAS
through torch.matmul in the same run.

    tests/benchmark/bench_kernel_files.py --record=results/nvidia-h200/kernel_files.json

    tests/benchmark/bench_kernel_files.py --only=gemm_cutile -- --Bm=256 --Bn=128    # with sizes of the file

On a CPU the files run with small sizes, and those in CUDA C++ are only compiled.
"""

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import harness  # noqa: E402

FILES = harness.CHECKOUT / "examples/kernels"
PROGRAM = os.environ.get("HYPERMLA_TEST_BINARY", str(harness.CHECKOUT / "build/bin/hypermla"))
COMPILED_ONLY = 3  # status of bench-file where the file needs a GPU and none is here
GEMM = 8192


def bench(file, device, sizes):
    """The JSON that bench-file prints, or a row's note."""
    done = subprocess.run([PROGRAM, "bench-file", file, f"--device={device}", "--json", *sizes], capture_output=True,
                          text=True)
    if done.returncode == 0:
        return json.loads(done.stdout)
    return {"note": (done.stderr.splitlines() or [f"it ended with status {done.returncode}"])[-1],
            "failed": done.returncode != COMPILED_ONLY}


class Matmul:
    """c = a b^T of bfloat16 by torch, that is by cuBLAS."""

    def __init__(self, machine):
        self.a, self.b = (machine.tensor(name, (GEMM, GEMM), "bfloat16") for name in "ab")

    def run(self, _):
        harness.torch.matmul(self.a, self.b.T)


def main():
    flags = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flags.add_argument("--only", default="", help="a part of the files' names")
    flags.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    flags.add_argument("--seconds", type=float, default=1.0, help="busy time before a sustained figure")
    flags.add_argument("--out_dir", help="where comparison.* go (default out/tests/bench_kernel_files/<time>)")
    flags.add_argument("--record", type=harness.record_file, help="file for all figures, as JSON")
    flags.add_argument("sizes", nargs="*", help="behind --: sizes of the files")
    arguments = flags.parse_args()
    if not os.access(PROGRAM, os.X_OK):
        harness.stop(f"{PROGRAM} is not built; run ./hypermla once")
    machine = harness.Machine(arguments.device, arguments.seconds)
    table = harness.Table(f"Kernel files on {machine.name}", arguments.out_dir,
                          ("file", "burst_us", "sustained_us", "gbps", "tflops", "of_bandwidth", "of_arithmetic",
                           "note"))
    record = {"schema": 1, "kind": "kernel_files", "device": {"name": machine.name},
              "date": datetime.date.today().isoformat(), "rows": table.rows}
    failed = []

    def add(**row):
        table.add(**row)
        if arguments.record:
            harness.write_json(arguments.record, record)

    files = [file for file in sorted(FILES.glob("*.cu")) if arguments.only in file.stem]
    if not files:
        harness.stop(f"no file's name has '{arguments.only}' in it; see {FILES}")
    for file in files:
        found = bench(file, machine.device, [f"--seconds={arguments.seconds}", *arguments.sizes])
        if "note" in found:
            failed += [file.stem] if found["failed"] else []
            add(file=file.stem, note=found["note"])
            continue
        burst, rest = found["timing"]["burst"], found["timing"].get("sustained", {})
        percent = lambda key: f"{100 * burst[key]:.0f} %" if key in burst else None
        add(file=file.stem, burst_us=burst["median_us"], sustained_us=rest.get("median_us"), gbps=burst["GBps"],
            tflops=burst["tflops"], of_bandwidth=percent("of_bandwidth"), of_arithmetic=percent("of_arithmetic"),
            sizes=found["sizes"], registers=found["report"].get("registers"))
    if machine.gpu and any(file.stem.startswith("gemm") for file in files):
        row = {"file": "torch.matmul"}
        row["burst_us"], row["sustained_us"] = machine.measure(Matmul(machine).run)
        add(**row, tflops=2e-6 * GEMM**3 / row["burst_us"])
    table.finish("gbps, tflops and their parts of the device's ceilings are of the bursts.")
    if failed:
        harness.stop(f"wrong or not measured, and the notes say why: {' '.join(failed)}")


if __name__ == "__main__":
    main()
