"""One version of mla_var6_plus over n, beside earlier ones: what bench_mla_var6_plus_v<N>.py run."""

import time

import harness

DESIGN = "cutile.mla.mla_var6_plus"


def name_of(version):
    return DESIGN if version == "v0" else f"{DESIGN}_{version}"


class Version:
    def __init__(self, machine, version, problem, n, tune):
        self.kernel, _ = harness.bound(machine, name_of(version), {**problem, "n": n})
        self.kernel.prepare()
        if tune:
            self.kernel.tune(tune)

    def run(self, stream):
        self.kernel.run(stream)


def main(description, version, others):
    flags = harness.parser(description)
    flags.add_argument("--n_values", type=lambda text: [int(word) for word in text.split(",")],
                       help="decompressed tokens (default: 0, t and seven between)")
    arguments = flags.parse_args()
    known = harness.hypermla.list()
    if f"mla_var6_plus_{version}" not in known:
        harness.stop(f"this build has no mla_var6_plus {version}; `hypermla --list` shows what it has")
    machine = harness.Machine(arguments.device, arguments.seconds)
    problem = harness.problem_of(arguments)
    table = harness.Table(f"mla_var6_plus {version} on {machine.name}: {harness.in_words(problem)}", arguments.out_dir,
                          ["version", "n", "burst_us", "sustained_us", "note"])
    begin = time.monotonic()
    t = problem["t"]
    for n in arguments.n_values or sorted({t * i // 8 // 64 * 64 for i in range(8)} | {t}):
        for one in (version, *others):
            if name_of(one).split(".")[2] not in known or time.monotonic() - begin > arguments.limit:
                continue
            harness.measure_into(table, machine, lambda: Version(machine, one, problem, n, arguments.tune), version=one, n=n)
    best = {}
    for row in table.rows:
        if "sustained_us" in row:
            best.setdefault(row["version"], []).append((row["sustained_us"], row["n"]))
    table.finish(*(f"{one}: best {min(times)[0]:.1f} us at n={min(times)[1]}" for one, times in best.items()))
