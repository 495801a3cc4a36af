#!/usr/bin/env python3
"""The envelope: the best kernel of each path over the queries per request, the hybrid, shared prefixes and the errors
of the model.

    tests/benchmark/bench_envelope.py --record=results/nvidia-h200/envelope.json --seconds=0.4 --limit=110

Rows are written as they are measured. Mispredictions beyond 5 % and wrong choices are listed at the end.
scripts/plot_envelope.py draws the record: time over s for latent, decompressed, hybrid and peers.
"""

import datetime
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import harness  # noqa: E402

# The most important values first: a time limit cuts off the rest.
QUERIES = (16, 1, 64, 32, 128, 48, 4, 96, 256, 8, 2)
# Shared prefixes: (b, s, h, tokens of the prefix, tokens of each request); the last is TyphoonMLA's prompt A.
PREFIXES = ((32, 4, 128, 8192, 1024), (128, 4, 128, 8192, 1024), (128, 1, 128, 8192, 1024), (256, 1, 64, 26472, 512))
COLUMNS = ["case", "s", "path", "kernel", "n", "burst_us", "sustained_us", "predicted_us", "error", "note"]


class Envelope:
    def __init__(self, arguments):
        self.arguments = arguments
        self.machine = harness.Machine(arguments.device, arguments.seconds)
        self.peers = harness.load_peers(self.machine, arguments)
        self.table = harness.Table(f"Envelope on {self.machine.name}: b={arguments.b}, t={arguments.t}, "
                                   f"h={arguments.h}, {arguments.dtype}", arguments.out_dir, COLUMNS)
        self.limit = harness.Limit(arguments.limit, self.table)
        self.rows = []

    def record(self):
        if not self.arguments.record:
            return
        arguments = self.arguments
        harness.write_json(arguments.record, {
            "schema": 1, "kind": "envelope", "date": datetime.date.today().isoformat(),
            "device": {"name": self.machine.name},
            "problem": {key: getattr(arguments, key) for key in ("b", "t", "h", "dtype")}, "rows": self.rows})

    def measure(self, case, make, **row):
        made = harness.measure_into(self.table, self.machine, make, case=case, **row)
        self.rows.append({key: value for key, value in made.items() if value is not None})
        self.record()
        return "burst_us" in made

    def wanted(self, ranking):
        """The best of each path and language, and every kernel predicted within `near` times the best."""
        best = ranking[0].sustained_us
        firsts = set()
        for choice in ranking:
            kind = (choice.path, choice.kernel.split(".")[0] if choice.path == "hybrid" else "")
            if kind not in firsts or choice.sustained_us <= self.arguments.near * best:
                firsts.add(kind)
                yield choice

    def case(self, name, problem, shared=None):
        self.machine.forget()
        ranking = harness.hypermla.choose(self.machine.entry, **problem, **(shared or {}))
        if shared:  # the other paths would give every request a copy of the prefix
            ranking = [choice for choice in ranking if choice.path in ("latent", "shared prefix")]
        for choice in self.wanted(ranking):
            if self.limit.reached():
                return
            self.measure(name, lambda: harness.Ours(self.machine, choice, {**problem, **(shared or {})},
                                                    self.arguments.tune),
                         s=problem["s"], path=choice.path, kernel=choice.kernel, n=choice.n,
                         predicted_us=choice.sustained_us, predicted_burst_us=choice.burst_us)
        best = ranking[0].sustained_us
        for peer in self.peers:
            # Do not measure a peer whose path is predicted to be several times slower than the best.
            predicted = min((choice.sustained_us for choice in ranking if choice.path == peer.path),
                            default=float("inf"))
            if predicted < 3 * best and not self.limit.reached():
                self.measure(name, lambda: peer(self.machine, {**problem, **(shared or {})}), s=problem["s"],
                             path="peer", kernel=peer.name)

    def ends(self, s):
        """The hybrids at n = 0 and n = t against their best n between, in the same run."""
        problem = harness.problem_of(self.arguments, s=s)
        seen = set()
        for choice in harness.hypermla.choose(self.machine.entry, **problem):
            if choice.path != "hybrid" or choice.kernel in seen:
                continue
            seen.add(choice.kernel)
            for n in (0, choice.n, problem["t"]):
                if self.limit.reached():
                    return
                self.measure(f"n of {choice.kernel}", lambda: harness.Ours(self.machine, choice._replace(n=n), problem),
                             s=s, path="hybrid", kernel=choice.kernel, n=n)

    def report(self):
        notes = []
        wrong = []
        for row in self.rows:
            for load in ("burst", "sustained"):
                predicted = row.get("predicted_us" if load == "sustained" else "predicted_burst_us")
                error = harness.error_percent(predicted, row[f"{load}_us"]) if predicted and f"{load}_us" in row else 0
                if abs(error) > 5:
                    wrong.append(f"- {row['case']}, {row['kernel']}, n={row['n']}, {load}: predicted "
                                 f"{predicted:.1f} us, measured {row[f'{load}_us']:.1f} us, {error:+.1f} %")
        notes.append("Mispredictions beyond 5 %:\n\n" + "\n".join(wrong) if wrong else "No misprediction beyond 5 %.")
        choices = []
        for case in dict.fromkeys(row["case"] for row in self.rows):
            rows = [row for row in self.rows if row["case"] == case and "sustained_us" in row]
            own = [row for row in rows if "predicted_us" in row]
            if not own:
                continue
            taken, fastest = (min(own, key=lambda row: row[key]) for key in ("predicted_us", "sustained_us"))
            loss = taken["sustained_us"] / fastest["sustained_us"]
            if loss > 1.05:
                choices.append(f"- {case}: {taken['kernel']} n={taken['n']} is {loss:.2f}x {fastest['kernel']} "
                               f"n={fastest['n']}")
            others = [row for row in rows if row["path"] == "peer"]
            if others:
                ratios = [min(row[f"{load}_us"] for row in others) / min(row[f"{load}_us"] for row in own)
                          for load in ("burst", "sustained")]
                choices.append(f"- {case}: best of the peers over best of ours {ratios[0]:.2f} burst, {ratios[1]:.2f} "
                               "sustained")
        notes.append("Choices:\n\n" + "\n".join(choices) if choices else "Every choice was within 5 % of the fastest.")
        self.table.finish(*notes)


def main():
    flags = harness.parser(__doc__)
    flags.add_argument("--s_values", type=harness.integers, default=list(QUERIES),
                       help="queries per request, in the order to measure")
    flags.add_argument("--near", type=float, default=1.15,
                       help="measure also what is predicted within this of the best")
    flags.add_argument("--no_prefixes", action="store_true", help="leave out the shared prefixes")
    flags.add_argument("--ends", type=harness.integers, default=[],
                       help="values of s for which hybrids run at n = 0 and n = t, too")
    flags.add_argument("--record", type=harness.record_file, help="file for what the figure is drawn from")
    arguments = flags.parse_args()
    envelope = Envelope(arguments)
    for s in arguments.s_values:
        if not envelope.limit.reached():
            envelope.case(f"s={s}", harness.problem_of(arguments, s=s))
    for b, s, h, prefix, own in () if arguments.no_prefixes else PREFIXES:
        if not envelope.limit.reached():
            problem = {**harness.problem_of(arguments), "b": b, "s": s, "h": h, "t": prefix + own}
            envelope.case(f"prefix {prefix} + {own}, b={b}, s={s}, h={h}", problem, {"prefix": prefix, "prefixes": 1})
    for s in arguments.ends:
        envelope.ends(s)
    envelope.record()
    envelope.report()


if __name__ == "__main__":
    main()
