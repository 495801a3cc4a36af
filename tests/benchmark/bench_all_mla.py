#!/usr/bin/env python3
"""Every kernel and version that takes one problem, side by side, with the model's prediction.

    tests/benchmark/bench_all_mla.py --b=32 --s=16 --t=4096
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import harness  # noqa: E402


def main():
    flags = harness.parser(__doc__, prefix=0, prefixes=1)
    flags.add_argument("--only", default="", help="a part of the kernels' names")
    arguments = flags.parse_args()
    machine = harness.Machine(arguments.device, arguments.seconds)
    problem = harness.problem_of(arguments)
    shared = {"prefix": arguments.prefix, "prefixes": arguments.prefixes} if arguments.prefix else {}
    table = harness.Table(f"{harness.in_words({**problem, **shared})} on {machine.name}", arguments.out_dir,
                          ["path", "kernel", "n", "burst_us", "sustained_us", "predicted_us", "error", "note"])
    limit = harness.Limit(arguments.limit, table)
    for choice in harness.hypermla.choose(machine.entry, **problem, **shared):
        if arguments.only not in choice.kernel:
            continue
        if limit.reached():
            break
        harness.measure_into(table, machine,
                             lambda: harness.Ours(machine, choice, {**problem, **shared}, arguments.tune),
                             path=choice.path, kernel=choice.kernel, n=choice.n, predicted_us=choice.sustained_us)
    for peer in harness.load_peers(machine, arguments):
        if limit.reached():
            break
        harness.measure_into(table, machine, lambda: peer(machine, {**problem, **shared}), path=peer.path,
                             kernel=peer.name)
    table.finish()


if __name__ == "__main__":
    main()
