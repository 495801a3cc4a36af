#!/usr/bin/env python3
"""Decoding as an engine calls it, beside other libraries: lengths on the device, a paged cache for every layer, one
plan a step outside the time.

    tests/benchmark/bench_engine.py --flashmla=<library> --fa3=<library> --flashinfer=<library> --limit=500
    tests/benchmark/bench_engine.py --rows='b32-q1-.*-h16' --rows=normal-b7-q3-t999-h24-p16
    tests/benchmark/bench_engine.py --flashmla_fp8=<library>
    tests/benchmark/bench_engine.py --random=90 --flashmla=<library> --fa3=<library> --flashinfer=<library>
    tests/benchmark/bench_engine.py --shared_prefixes
    tests/benchmark/bench_engine.py --compare

A row is a batch and its name says all of it: [normal-|heavy-|long-|mixed-|shared<tokens of all>-]b<requests>-q<queries
of each, or 1to8>-t<tokens>-h<heads>[-p<tokens of a page>][-fp8|-e4m3]. fp8: the cache is e4m3 with one factor for all;
e4m3: queries are, too. Each library runs in a process of its own, since one may crash; all get the same tensors and
take turns, a burst each. The caches of the layers hold four times L2 at least. A burst is one CUDA graph of some
milliseconds after a rest, a sustained time the same graph without a pause, from a rest on; with --between also what a
run adds, in bursts, where it follows other kernels, as it does in an engine: they leave instructions and numbers cold,
and write the queries. Every output is compared with float32. Batches of 1to8 queries are ours alone: the others get the
same number of queries, as many for each request. With --flashmla_fp8 the rows are those over caches in FP8. --random
draws rows that nobody has chosen; they depend on the seed alone. With --shared_prefixes ours runs twice, without and
with that option; unless --rows says others, the rows are those of many samples of one prompt, and two that share
nothing. With --compare ours runs beside other forms of itself, in one process on the same tensors: batches of 1to8
queries beside uniform ones of as many (uniform), lengths on the device beside such that the host knew when it planned
(known), and these on pages beside a dense cache (dense).

scripts/plot_engine.py draws some rows of the record, for README.
"""

import argparse
import datetime
import json
import math
import pathlib
import random
import select
import signal
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import harness  # noqa: E402
from engine_worker import FORMS, LIBRARIES, LONGEST, OURS, PEERS, SHORT, Row, figures  # noqa: E402

LOADS = ("burst", "sustained", "between")
PATIENCE = 120  # seconds without an answer after which a library is given up for a row


def all_rows():
    """Names, the most important first: a time limit cuts off the rest."""
    core = ((32, 1, 4096), (128, 1, 4096), (1, 1, 65536), (8, 1, 32768), (16, 4, 16384), (64, 2, 8192), (256, 1, 2048))
    ragged = (("normal", 128, 1, 4096), ("heavy", 96, 1, 4096), ("normal", 128, 2, 4096), ("heavy", 96, 4, 4096),
              ("normal", 128, 1, 16384), ("normal", 128, 2, 16384))
    for h in (128, 16, 64, 32):
        yield from (f"b{b}-q{q}-t{t}-h{h}" for b, q, t in core)
    for h in (128, 16):
        yield from (f"{shape}-b{b}-q{q}-t{t}-h{h}" for shape, b, q, t in ragged)
        yield from (f"mixed-b32-q1to8-t4096-h{h}", f"long-b64-q1-t{LONGEST}-h{h}")
    yield from ("b32-q16-t4096-h128", "b32-q64-t4096-h128", "b4-q128-t8192-h128")
    for h in (128, 16, 64):  # of short contexts, as chats have them
        yield from (f"{shape}b{b}-q1-t{t}-h{h}" for shape, b, t in (("", 128, 512), ("", 256, 1024),
                                                                  ("normal-", 256, 512), ("normal-", 256, 1024)))
    yield "mixed-b128-q1to8-t512-h128"
    for h in (128, 16):
        yield from (f"b128-q1-t4096-h{h}-p{page}" for page in (1, 16))
        yield f"normal-b128-q1-t4096-h{h}-p16"
        yield from (f"b{b}-q1-t4096-h{h}" for b in (1, 8, 512, 64, 2, 4, 16, 256))
    yield from (f"b{b}-q{q}-t4096-h8" for b, q in ((32, 1), (128, 1), (64, 2), (32, 8)))
    yield from (f"b32-q{q}-t4096-h{h}" for h in (128, 16) for q in (2, 4, 8))
    yield from ("normal-b128-q1-t4096-h64", "heavy-b96-q1-t4096-h64", "normal-b64-q1to8-t8192-h128")


def random_rows(count, seed):
    """Names of batches that nobody chose, of up to 1.5 million tokens and 1.5 TFLOP."""
    dice, names = random.Random(seed), []
    size = lambda least, most: round(math.exp(dice.uniform(math.log(least), math.log(most))))
    while len(names) < count:
        shape = dice.choice(("", "", "", "normal-", "normal-", "heavy-", "mixed-", "long-"))
        h = dice.choice((8, 16, 16, 32, 64, 128, 128, 24, 12, 40, 96, 48))
        b, q, t = size(1, 512), dice.choice((1, 1, 1, 1, 2, 3, 4, 5, 6, 8)), size(200, 65536)
        page = dice.choice((64, 64, 64, 32, 128, 16))
        if shape == "long-" and dice.random() < 0.3:
            t = LONGEST
        tokens, queries = (b * SHORT + t, q) if shape == "long-" else (b * t, 4 if shape == "mixed-" else q)
        if tokens <= 1.5e6 and 2 * queries * h * 1088 * tokens <= 1.5e12 and (shape != "long-" or t >= 2 * SHORT):
            names.append(f"{shape}b{b}-q{'1to8' if shape == 'mixed-' else q}-t{t}-h{h}" +
                         (f"-p{page}" if page != 64 else ""))
    return names


def rows_of_fp8():
    """Caches in FP8, under queries in FP8, which FlashMLA takes, and in bfloat16."""
    for batch in (*(f"b{b}-q1-t4096-h{h}" for b in (128, 32) for h in (128, 64, 32, 16)), "b32-q4-t4096-h128",
                  "b32-q16-t4096-h128", "b1-q1-t8192-h16", "b8-q1-t4096-h16", "b8-q1-t4096-h32", "b10-q1-t2828-h32",
                  "b3-q1-t894-h40", "b8-q3-t4096-h16", "b32-q3-t4096-h16", "b16-q1-t1024-h128",
                  "normal-b128-q1-t4096-h16", "normal-b40-q1-t1500-h128", "heavy-b96-q1-t4096-h64",
                  "mixed-b32-q1to8-t4096-h16"):
        yield from (f"{batch}-{form}" for form in ("e4m3", "fp8"))


def rows_of_samples():
    """Samples of one prompt of 8192 tokens, 512 tokens on; and what the option costs where nothing is shared."""
    for h in (16, 128):
        yield from (f"shared8192-b{b}-q1-t8704-h{h}" for b in (128, 64, 256, 512))
        yield f"b128-q1-t4096-h{h}"
    yield "shared8192-b128-q2-t8704-h16"


def rows_of_forms():
    """What ours does in other forms, too."""
    for h in (128, 16, 64):
        yield from (f"mixed-b{b}-q1to8-t4096-h{h}" for b in (32, 128))
        yield from (f"b{b}-q1-t4096-h{h}" for b in (32, 128))
    for h in (128, 16):
        yield from (f"b{b}-q1-t4096-h{h}-p{page}" for page in (16, 1) for b in (128, 32))
    for h in (128, 16, 64):
        yield from (f"b{b}-q{q}-t4096-h{h}" for b, q in ((1, 1), (32, 4), (128, 4), (1, 4)))


class Process:
    """Libraries in a process of its own. The failure of one ends it; the next request starts it again, and the others
    prepare their row once more."""

    def __init__(self, keys, **options):
        worker = pathlib.Path(__file__).with_name("engine_worker.py")
        words = [",".join(keys), json.dumps(options)]
        self.words, self.child, self.hello = [sys.executable, worker, *words], None, None
        self.row, self.ready = None, set()  # the row, and whose graphs of it are there

    def start(self):
        """What it says of itself, or of why it cannot."""
        if not self.child:
            self.child = subprocess.Popen(self.words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.hello = self.answer()
        return self.hello

    def ask(self, key, do, **request):
        hello = self.start()
        if "failed" in hello:
            return hello
        if do == "prepare":
            self.row = request["row"]
            self.ready.add(key)
        elif key not in self.ready and "failed" in (again := self.ask(key, "prepare", row=self.row)):
            return again
        try:
            self.child.stdin.write(json.dumps({"key": key, "do": do, **request}) + "\n")
            self.child.stdin.flush()
        except OSError:
            pass  # it died; the answer says of what
        return self.answer()

    def answer(self):
        line = None
        if select.select([self.child.stdout], [], [], PATIENCE)[0]:
            line = self.child.stdout.readline()
        if line:
            value = json.loads(line)
        else:
            if line is None:
                self.child.kill()
            status = self.child.wait()
            value = {"failed": f"no answer in {PATIENCE} seconds" if line is None else
                     f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"}
        if "failed" in value:
            self.stop()  # a device error stays in a process
        return value

    def stop(self):
        if self.child:
            self.child.kill()
            self.child.communicate()
            self.child = None
            self.ready.clear()


def measure(row, processes, bursts, between):
    """Figures of a row by library; one that fails keeps those it has got so far, and the others do not notice."""
    found = {key: process.ask(key, "prepare", row=row.name) for key, process in processes.items()}
    able = lambda: [key for key in found if "failed" not in found[key] and "refused" not in found[key]]

    def in_turns(load, rounds):
        """Each library after the same rest: one that ran in another's heat would be measured at a lower clock."""
        times = {key: [] for key in able()}
        for _ in range(rounds):
            for key in able():
                answer = processes[key].ask(key, load)
                found[key].update(answer if "failed" in answer else {})
                times[key] += answer.get("us", [])
        for key in times:
            found[key].update(figures(f"{load}_us", times[key]) if times[key] else {})

    in_turns("burst", bursts)
    if between:
        in_turns("between", min(bursts, 3))
    for request in ("sustained", "plan"):
        for key in able():
            found[key].update(processes[key].ask(key, request))
    return found


def right(found):
    """Whether a library's outputs are right and none of its requests failed."""
    return found.get("correct", False) and "failed" not in found


def ours_right(found):
    """Whether ours is there and right, and its other forms are, where they take the row."""
    ours = {"ours": {}, **{key: found[key] for key in OURS if key in found}}
    return all(right(one) or key in FORMS and "refused" in one for key, one in ours.items())


def ratios(found):
    """Time of the best correct peer over ours, for each load."""
    result = {}
    for load in LOADS:
        name = f"{load}_us"
        times = {key: value[name] for key, value in found.items() if right(value) and name in value}
        peers = [time for key, time in times.items() if key in PEERS]
        if "ours" in times and peers:
            result[f"{load}_ratio"] = min(peers) / times["ours"]
    return result


def name_of(key, load):
    """Of a column: of a library's times, or with an empty key of the ratios."""
    if key:
        return f"{key}_us" if load == "burst" else f"{key}_{load}"
    return "ratio" if load == "burst" else f"{load}_ratio"


def cells(found, ratio):
    """A row's times by library, plans in the libraries' order, and the ratios."""
    row = {"plan_us": " ".join(f"{value['plan_us']:.1f}" if "plan_us" in value else "-" for value in found.values())}
    for key, value in found.items():
        row |= {name_of(key, load): value.get(f"{load}_us") for load in LOADS if f"{load}_us" in value}
    for load in LOADS:
        row |= {name_of("", load): f"{ratio[f'{load}_ratio']:.2f}"} if f"{load}_ratio" in ratio else {}
    return row


def notes_of(found):
    for key, value in found.items():
        if key in FORMS and "refused" in value:
            continue  # the row is nothing to that form
        if why := value.get("failed") or value.get("refused"):
            yield f"{key}: {why}"
        elif not value["correct"]:
            yield f"{key}: WRONG by {value['difference'] or 'what is no number'}"


def summary(rows):
    """Geometric mean, worst row and rows behind, for each number of heads and all."""
    for load in LOADS:
        known = [(row[f"{load}_ratio"], row["h"], row["row"]) for row in rows if f"{load}_ratio" in row]
        for h in [*sorted({one[1] for one in known}), None] if known else []:
            those = [one for one in known if h in (None, one[1])]
            mean, worst = statistics.geometric_mean([one[0] for one in those]), min(those)
            yield (f"best peer / ours, {load:9}  heads {h or 'all':>3}:  geometric mean {mean:.2f}, worst "
                   f"{worst[0]:.2f} in {worst[2]}, behind in {sum(one[0] < 1 for one in those)} of {len(those)}")


def summary_of_forms(rows):
    """Geometric mean and the ends of our time over that of each form."""
    for load in ("burst", "sustained"):
        for form in FORMS:
            known = [(row["ours"][f"{load}_us"] / row[form][f"{load}_us"], row["row"]) for row in rows
                     if all(right(row.get(key, {})) and f"{load}_us" in row[key] for key in ("ours", form))]
            if known:
                (least, _), (most, worst) = min(known), max(known)
                mean = statistics.geometric_mean([one for one, _ in known])
                yield f"ours / {form:7}, {load:9}  {mean:.3f}, from {least:.3f} to {most:.3f} in {worst}"


def flags():
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--rows", action="append", type=harness.regex, metavar="REGEX",
                        help="rows of this name, or any row's name")
    result.add_argument("--heads", type=harness.integers, help="rows of these numbers of heads: 8,16")
    result.add_argument("--random", type=harness.positive, metavar="COUNT", help="so many rows, drawn at random")
    result.add_argument("--seed", type=int, default=1, help="of --random (default 1)")
    result.add_argument("--list", action="store_true", help="print the names of the rows and stop")
    result.add_argument("--bursts", type=harness.positive, default=5, help="of each library and row (default 5)")
    result.add_argument("--seconds", type=float, default=0.4, help="busy time before a sustained figure (default 0.4)")
    result.add_argument("--between", action="store_true", help="also runs between other kernels, as in an engine")
    result.add_argument("--limit", type=float, default=600.0, help="seconds in which all rows must end (default 600)")
    result.add_argument("--shared_prefixes", action="store_true", help="ours without and with it")
    result.add_argument("--compare", action="store_true", help="ours beside other forms of it")
    result.add_argument("--kernel", default="", help="pins the kernel of ours")
    result.add_argument("--record", type=harness.record_file,
                        help="file for what the table and the figure are made from")
    result.add_argument("--versions", default="", help="what the record says of the libraries' versions")
    result.add_argument("--out_dir", help="where the table goes (default out/tests/bench_engine/<time>)")
    for key, kind in PEERS.items():
        result.add_argument(f"--{key}", metavar="PATH", help=f"library of {kind.title}")
    return result


def wanted(arguments):
    names = list(random_rows(arguments.random, arguments.seed) if arguments.random else
                 rows_of_samples() if arguments.shared_prefixes else
                 rows_of_forms() if arguments.compare else
                 rows_of_fp8() if arguments.flashmla_fp8 else all_rows())
    rows = map(Row.named, harness.rows_named(names, arguments.rows, Row.named))
    return [row for row in rows if not arguments.heads or row.h in arguments.heads]


def loaded(arguments):
    """The processes of the libraries that load. Prints why others do not."""
    keys = ["ours", *(key for key in LIBRARIES if getattr(arguments, key, None))]  # shared_prefixes is a flag, too
    processes = {key: Process([key], library=getattr(arguments, key, None), kernel=arguments.kernel,
                              seconds=arguments.seconds) for key in keys}
    if arguments.compare:
        forms = Process(["ours", *FORMS], library=None, kernel=arguments.kernel, seconds=arguments.seconds)
        processes |= dict.fromkeys(["ours", *FORMS], forms)
    for key in list(processes):
        hello = processes[key].start()
        if "failed" in hello:
            print(f"{LIBRARIES[key].title}: skipped, {hello['failed']}")
            del processes[key]
    return processes


def driver():
    try:
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(words, capture_output=True, text=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.TimeoutExpired):
        return ""


def main():
    arguments = flags().parse_args()
    rows = wanted(arguments)
    if not rows:
        harness.stop("no such row has that number of heads; --list without --heads shows them")
    if arguments.list:
        return print("\n".join(row.name for row in rows))
    if not harness.torch or not harness.torch.cuda.is_available():
        harness.stop("it needs a GPU and a Python with PyTorch for it")
    begin, taken, left = time.monotonic(), [], []
    processes = loaded(arguments)
    if not processes:
        harness.stop("no library could be loaded")
    hello = next(iter(processes.values())).hello
    loads = LOADS if arguments.between else LOADS[:2]
    columns = ["row", *(name_of(key, load) for load in loads for key in (*processes, "")), "plan_us", "note"]
    table = harness.Table(f"An engine's decoding on {hello['device']}", arguments.out_dir, columns)
    record = {"schema": 1, "kind": "engine", "date": datetime.date.today().isoformat(),
              "device": {"name": hello["device"], "driver": driver()}, "torch": hello["torch"],
              "versions": arguments.versions, "rows": []}
    for row in rows:
        started = time.monotonic()
        if started - begin + (2 * statistics.median(taken) if taken else 0) > arguments.limit:
            left.append(row.name)
            continue
        found = measure(row, processes, arguments.bursts, arguments.between)
        taken.append(time.monotonic() - started)
        ratio = ratios(found)
        lengths = row.lengths()
        record["rows"].append({"row": row.name, "h": row.h, "tokens": sum(lengths), "longest": max(lengths),
                               "queries": row.queries(False)[:8], "peers_queries": row.queries(True)[0],
                               **ratio, **found})
        table.add(row=row.name, note="; ".join(notes_of(found)), **cells(found, ratio))
        if arguments.record:
            harness.write_json(arguments.record, record)
    for process in processes.values():
        process.stop()
    table.finish(*([f"Left out by --limit: {' '.join(left)}"] if left else []), *summary(record["rows"]),
                 *summary_of_forms(record["rows"]))
    if wrong := [row["row"] for row in record["rows"] if not ours_right(row)]:
        harness.stop(f"an output of ours is wrong or missing: {' '.join(wrong)}")


if __name__ == "__main__":
    main()
