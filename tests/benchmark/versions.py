"""One version of mla_var6_plus over n, beside earlier ones, the model and other libraries: what
bench_mla_var6_plus[_v<N>].py run."""

import harness

DESIGN = "cutile.mla.mla_var6_plus"
COMBINE = "cutile.mla.decompress_combine"  # the second kernel of every version


def name_of(version):
    return DESIGN if version == "v0" else f"{DESIGN}_{version}"


def predictions(machine, version, problem):
    """The model's microseconds by n, where it ranks the version."""
    return {choice.n: choice.sustained_us for choice in harness.hypermla.choose(machine.entry, **problem)
            if choice.kernel == name_of(version)}


def main(description, version, others):
    flags = harness.parser(description)
    flags.add_argument("--n_values", type=harness.integers,
                       help="decompressed tokens (default: 0, t, seven between and the model's choice)")
    arguments = flags.parse_args()
    known = harness.hypermla.list()
    if name_of(version).split(".")[2] not in known:
        harness.stop(f"this build has no mla_var6_plus {version}; `hypermla --list` shows what it has")
    machine = harness.Machine(arguments.device, arguments.seconds)
    problem = harness.problem_of(arguments)
    table = harness.Table(f"mla_var6_plus {version} on {machine.name}: {harness.in_words(problem)}", arguments.out_dir,
                          ["version", "n", "burst_us", "sustained_us", "predicted_us", "error", "note"])
    limit = harness.Limit(arguments.limit, table)
    others = [one for one in others if name_of(one).split(".")[2] in known]
    t, predicted = problem["t"], predictions(machine, version, problem)
    for n in arguments.n_values or sorted({t * i // 8 // 64 * 64 for i in range(8)} | {t, *predicted}):
        for one in (version, *others):
            if limit.reached():
                break
            model = {"predicted_us": predicted[n]} if one == version and n in predicted else {}
            harness.measure_into(
                table, machine, lambda: harness.One(machine, name_of(one), {**problem, "n": n}, arguments.tune),
                version=one, n=n, **model)
    if not limit.reached():
        harness.measure_into(table, machine, lambda: harness.projection(machine, COMBINE, problem, arguments.tune),
                             version="decompress_combine alone")
    for peer in harness.load_peers(machine, arguments):
        if not limit.reached():
            harness.measure_into(table, machine, lambda: peer(machine, problem), version=peer.name)
    best = {}
    for row in table.rows:
        if "sustained_us" in row and "n" in row:
            best.setdefault(row["version"], []).append((row["sustained_us"], row["n"]))
    table.finish(*(f"{one}: best {min(times)[0]:.1f} us at n={min(times)[1]}" for one, times in best.items()))
