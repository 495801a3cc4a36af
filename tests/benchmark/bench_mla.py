#!/usr/bin/env python3
"""The best kernel of each path beside other libraries, over a sweep of shapes. All times include the
output decompression.

    tests/benchmark/bench_mla.py --s_values=1,4,16,64 --b_values=1,32 --flashmla=<library> --fa3=<library>

The libraries are the torch operators of FlashMLA and FlashAttention-3, such as _flashmla_C.abi3.so.

Also the output decompression alone, against torch.bmm.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import harness  # noqa: E402


class Bmm:
    """The output decompression by torch."""

    def __init__(self, machine, problem):
        b, s, h, d, k = (problem[key] for key in ("b", "s", "h", "d", "k"))
        # As FlashMLA leaves its output: tokens before heads.
        self.rows = machine.tensor("bmm.o_latent", (b * s, h, k), problem["dtype"]).transpose(0, 1)
        self.w = machine.tensor("w", (h, k, d), problem["dtype"])

    def run(self, _):
        harness.torch.bmm(self.rows, self.w)


def main():
    flags = harness.parser(__doc__)
    flags.add_argument("--s_values", type=harness.integers, help="instead of --s: 1,4,16")
    flags.add_argument("--b_values", type=harness.integers, help="instead of --b")
    flags.add_argument("--t_values", type=harness.integers, help="instead of --t")
    arguments = flags.parse_args()
    machine = harness.Machine(arguments.device, arguments.seconds)
    peers = harness.load_peers(machine, arguments)
    table = harness.Table(f"Backends on {machine.name}, h={arguments.h}, {arguments.dtype}", arguments.out_dir,
                          ["b", "s", "t", "backend", "kernel", "burst_us", "sustained_us", "predicted_us", "error",
                           "note"])
    limit = harness.Limit(arguments.limit, table)
    for b in arguments.b_values or [arguments.b]:
        for t in arguments.t_values or [arguments.t]:
            for s in arguments.s_values or [arguments.s]:
                if limit.reached():
                    break
                machine.forget()
                problem = harness.problem_of(arguments, b=b, s=s, t=t)
                row = {"b": b, "s": s, "t": t}
                seen = set()
                for choice in harness.hypermla.choose(machine.entry, **problem):
                    if choice.path in seen or limit.reached():
                        continue
                    made = harness.measure_into(
                        table, machine, lambda: harness.Ours(machine, choice, problem, arguments.tune), **row,
                        backend=f"ours, {choice.path}", kernel=choice.kernel, predicted_us=choice.sustained_us)
                    if "burst_us" in made:  # else the next best of this path has its turn
                        seen.add(choice.path)
                if limit.reached():
                    break
                last = "output_decompression"
                harness.measure_into(
                    table, machine, lambda: harness.projection(machine, last, problem, arguments.tune), **row,
                    backend="ours, decompression only", kernel=last)
                if machine.gpu:
                    harness.measure_into(table, machine, lambda: Bmm(machine, problem), **row,
                                         backend="torch.bmm, decompression only")
                for peer in peers:
                    if limit.reached():
                        break
                    harness.measure_into(table, machine, lambda: peer(machine, problem), **row, backend=peer.name)
    table.finish()


if __name__ == "__main__":
    main()
