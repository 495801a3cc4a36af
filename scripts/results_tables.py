#!/usr/bin/env python3
"""The tables of README.md and of docs/ that show measurements, made from the records in results/.

    scripts/results_tables.py            # writes every table anew
    scripts/results_tables.py --check    # writes nothing; exit status 1 and the names of tables that differ

A table stands between two lines of a page and belongs to this program; edit the record or this program, not the table:

    <!-- table: engine_equal -->
    ...
    <!-- end of table -->

`<!-- table: runs flash_attention-b32-* -->` shows runs of `hypermla kernel`, by the names of their records.
`<!-- table: engine_equal of nvidia-h100-80gb-hbm3 -->` takes records from that folder of results/, not an H200's.
"""

import argparse
import json
import math
import operator
import pathlib
import re
import statistics
import sys
import textwrap

CHECKOUT = pathlib.Path(__file__).resolve().parents[1]
DEVICE = "nvidia-h200"  # the folder whose records a table shows that names none
BLOCK = re.compile(r"^( *)(<!-- table: (\w+)((?: [\w.*-]+)*?)(?: of ([\w-]+))? -->)\n.*?^ *<!-- end of table -->$",
                   re.S | re.M)
LOADS = ("burst_us", "sustained_us")
ENGINE_PEERS = {"flashmla": "FlashMLA", "fa3": "FlashAttention-3", "flashinfer": "FlashInfer"}


class Shown:
    """The device whose records the table at hand shows; renewed() says which."""

    device = DEVICE


def folder(device=None):
    return CHECKOUT / "results" / (device or Shown.device)


def record(name, device=None):
    return json.loads((folder(device) / f"{name}.json").read_text())


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(cells) + " |" for cells in rows]


def both(values, form):
    """A burst, and in brackets the same sustained."""
    return f"{values[0]:{form}} ({values[1]:{form}})"


def mean(values):
    return math.exp(statistics.fmean(map(math.log, values)))


def in_short(ratios):
    return f"{mean(ratios):.2f}, at worst {min(ratios):.2f}, below 1 in {sum(ratio < 1 for ratio in ratios)}"


# ---- The envelope: bench_envelope.py.


def fastest(rows):
    return min(rows, key=lambda row: row["burst_us"], default=None)


class Envelope:
    """The rows of the record by case: s=<s> or a shared prefix."""

    def __init__(self):
        of = record("envelope")
        self.t, self.cases = of["problem"]["t"], {}
        for row in of["rows"]:
            if row["case"].startswith(("s=", "prefix")):
                self.cases.setdefault(row["case"], []).append(row)

    def sweep(self):
        """(s, measured rows), s growing."""
        found = [(rows[0]["s"], [row for row in rows if "sustained_us" in row]) for case, rows in self.cases.items()
                 if case.startswith("s=")]
        return sorted(found, key=lambda one: one[0])

    @staticmethod
    def of(rows, path, kernel=""):
        return fastest([row for row in rows if row["path"] == path and kernel in row["kernel"]])


def times(row, note=""):
    return both([row[load] for load in LOADS], ".0f") + note if row else ""


def peer_over_ours(rows):
    """(burst, sustained): the best peer's time over the best of this library's; None without a peer."""
    peers, own = ([row for row in rows if (row["path"] == "peer") == is_peer] for is_peer in (True, False))
    return [min(row[load] for row in peers) / min(row[load] for row in own) for load in LOADS] if peers else None


def envelope_peers():
    names = ("FlashMLA + bmm", "FlashAttention-3", "cuDNN")
    return table(["s", *names], [[str(s), *(times(Envelope.of(rows, "peer", name)) for name in names)]
                                 for s, rows in Envelope().sweep()])


def version_of(kernel):
    language, _, name = kernel.split(".")
    version = re.search(r"_(v\d+)$", name)
    return f"{language} {version[1] if version else 'v0'}"


def envelope_ours():
    envelope, lines = Envelope(), []
    for s, rows in envelope.sweep():
        between = fastest([row for row in rows if row["path"] == "hybrid" and 0 < row["n"] < envelope.t])
        lines.append([str(s), times(Envelope.of(rows, "latent")), times(Envelope.of(rows, "decompressed")),
                      times(between, f", {version_of(between['kernel'])}, n = {between['n']}" if between else ""),
                      both(peer_over_ours(rows), ".2f")])
    return table(["s", "latent", "decompressed", "hybrid, 0 < n < t", "best peer / best of ours"], lines)


def prefix_cases(envelope):
    """(b, s, tokens of the prefix, of each request, heads, rows), as measured."""
    for case, rows in envelope.cases.items():
        match = re.fullmatch(r"prefix (\d+) \+ (\d+), b=(\d+), s=(\d+), h=(\d+)", case)
        if match:
            prefix, own, b, s, h = map(int, match.groups())
            yield b, s, prefix, own, h, [row for row in rows if "sustained_us" in row]


def envelope_prefixes():
    lines = []
    for b, s, prefix, own, h, rows in prefix_cases(Envelope()):
        peer, shared = Envelope.of(rows, "peer"), Envelope.of(rows, "shared prefix")
        ratio = both([peer[load] / shared[load] for load in LOADS], ".2f") if peer else ""
        lines.append([f"{b}, {s}, {prefix} + {own}, {h}", times(peer) or "not run: time limit",
                      times(Envelope.of(rows, "latent")), times(shared), ratio])
    return table(["case: b, s, shared + own tokens, heads", "FlashMLA + bmm", "latent only", "shared prefix",
                  "ratio to FlashMLA"], lines)


# ---- Decoding as an engine calls it: bench_engine.py.


def engine_rows(name="engine", device=None):
    """Those of the record that a peer runs, too."""
    return [row for row in record(name, device)["rows"] if "burst_ratio" in row]


def engine_device(device):
    """The record's: H200."""
    return record("engine", device)["device"]["name"].removeprefix("NVIDIA ").split()[0]


def engine_ratios(rows, peer=None):
    """[(burst, sustained)] of the rows: the time of a peer, or of the best, over ours."""
    if peer is None:
        return [(row["burst_ratio"], row["sustained_ratio"]) for row in rows if "burst_ratio" in row]
    return [tuple(row[peer][load] / row["ours"][load] for load in LOADS)
            for row in rows if row.get(peer, {}).get("correct") and all(load in row[peer] for load in LOADS)]


def engine_in_all(drawn=""):
    """drawn: engine_random, for a line of those drawn at random."""
    rows = engine_rows()
    tokens = lambda row: int(re.search(r"-t(\d+)-", row["row"])[1])  # of each request, their mean, or the most
    short, long = ([row for row in rows if (tokens(row) <= 1024) == yes] for yes in (True, False))
    lines = []
    for name, those, key in (("best of the three", rows, None),
                             ("the same, up to 1024 tokens a request", short, None),
                             ("the same, more tokens", long if short else [], None),
                             ("best of the three, drawn at random", engine_rows(drawn) if drawn else [], None),
                             *((name, rows, key) for key, name in ENGINE_PEERS.items())):
        if ratios := engine_ratios(those, key):
            lines.append([name, str(len(ratios)), *map(in_short, zip(*ratios))])
    return table(["its time over ours", "rows", "bursts: geometric mean", "sustained"], lines)


def engine_best(*devices):
    """What the best peer of each batch takes of our time, by the records of these devices."""
    lines = []
    for device in devices:
        rows = engine_rows(device=device)
        lines.append([f"{engine_device(device)}, {len(rows)}"])
        for load in ("burst", "sustained", "between"):
            lines[-1].append(in_short([row[f"{load}_ratio"] for row in rows if f"{load}_ratio" in row]))
    return table(["best of the three over ours, batches", "bursts", "sustained", "between other kernels"], lines)


def engine_how():
    of = record("engine")
    device = of["device"]["name"].removeprefix("NVIDIA ")
    return textwrap.wrap(f"**How it was measured**: {of['date']}, one {device}, driver {of['device']['driver']}, "
                         f"torch {of['torch']}; {of['versions']}; {len(engine_rows())} batches.",
                         120, break_on_hyphens=False)


def engine_plans():
    """Microseconds of a plan alone, the median and the range, of all batches and of each kind. FlashMLA's is a
    difference of two times: where noise has made it negative it says nothing and is left out."""
    kinds = {"all": "", "equal lengths": r"b\d", "lengths that differ": r"(?!b\d)(?!.*-q1to)",
             "mixed queries": r".*-q1to"}
    lines, rows = [], engine_rows()
    for key, name in (("ours", "HyperMLA"), *ENGINE_PEERS.items()):
        lines.append([name])
        for kind in kinds.values():
            found = [us for row in rows
                     if re.match(kind, row["row"]) and (us := row.get(key, {}).get("plan_us", 0.0)) > 0]
            lines[-1].append(f"{statistics.median(found):.1f}, {span(found, '.1f')}" if found else "")
    return table(["a plan, us: median, from, to", *kinds], lines)


def engine_behind(name="engine", least=1):
    """The batches in which a peer takes less than so much of our time, in bursts or sustained."""
    lines = [[f"`{row['row']}`", both(engine_ratios([row])[0], ".3f")] for row in engine_rows(name)
             if min(row["burst_ratio"], row["sustained_ratio"]) < float(least)]
    return table(["batch", "best peer / ours"], lines) if lines else ["None."]


def engine_between(*devices):
    """Between an engine's other kernels, by these records: how many rows, what a library takes of our time, and how
    many us more than in bursts, where these take it 75 us at most."""
    lines = []
    for device in devices:
        rows = [row for row in engine_rows(device=device) if "between_ratio" in row]
        for key, name in ((None, "best of the three"), *ENGINE_PEERS.items(), ("ours", "HyperMLA")):
            those = [row for row in rows if key is None or "between_us" in row.get(key, {})]
            found = [row["between_ratio"] if key is None else row[key]["between_us"] / row["ours"]["between_us"]
                     for row in those]
            ratios = [f"{mean(found):.2f}", span(found), str(sum(one < 1 for one in found))]
            short = [row[key] for row in those if key and row[key]["burst_us"] <= 75]
            lines.append([f"{engine_device(device)}: {name}", str(len(found)),
                          *(ratios if key != "ours" else [""] * len(ratios)),
                          span([of["between_us"] - of["burst_us"] for of in short], ".1f") if short else ""])
    return table(["its time over ours", "rows", "geometric mean", "from, to", "below 1 in", "adds, us"], lines)


def engine_cell(row, load=""):
    if not row or load and f"{load}_ratio" not in row:
        return ""
    if load:
        return f"{row['ours'][f'{load}_us']:.1f} ({row['ours']['burst_us']:.1f}), {row[f'{load}_ratio']:.2f}"
    return f"{row['ours']['burst_us']:.1f}, {both((row['burst_ratio'], row['sustained_ratio']), '.2f')}"


EQUAL = re.compile(r"b(\d+)-q(\d+)-t(\d+)-h(\d+)")


def engine_equal(load=""):
    """load: between, for the times between other kernels, the burst in brackets."""
    cells = {}
    for row in engine_rows():
        if match := EQUAL.fullmatch(row["row"]):
            b, q, t, h = map(int, match.groups())
            cells.setdefault((q, t, b), {})[h] = row
    heads = (128, 64, 32, 16)
    return table(["b, queries, t", *(f"{h} heads" for h in heads)],
                 [[f"{b}, {q}, {t}", *(engine_cell(of.get(h), load) for h in heads)]
                  for (q, t, b), of in sorted(cells.items()) if any(h in of for h in heads)])


def engine_few(h, *devices):
    """The equal lengths of so few heads that the tables of all batches have no column for them, by these records."""
    cells, lines = {}, []
    for device in devices:
        rows = {row["row"]: row for row in engine_rows(device=device) if row["h"] == int(h)}
        cells.update({name: ", ".join(EQUAL.match(name).group(1, 2, 3)) for name in rows})
        for load, note in (("", ""), ("between", ", between other kernels")):
            lines.append([engine_device(device) + note, *(engine_cell(rows.get(name), load) for name in cells)])
    return table([f"{h} heads: b, queries, t", *cells.values()], lines)


def engine_other(load=""):
    cells = {}
    for row in engine_rows():
        if not EQUAL.fullmatch(row["row"]):
            h = int(re.search(r"-h(\d+)", row["row"])[1])
            cells.setdefault(re.sub(r"-h\d+", "", row["row"]), {})[h] = row
    heads = sorted({h for of in cells.values() for h in of}, reverse=True)
    return table(["row", *(f"{h} heads" for h in heads)],
                 [[f"`{name}`", *(engine_cell(of.get(h), load) for h in heads)] for name, of in cells.items()])


def engine_fp8():
    cells = {}
    for row in record("engine_fp8")["rows"]:
        batch, form = row["row"].rsplit("-", 1)
        cells.setdefault(batch, {})[form] = row

    def ours(row):
        version = re.search(r"flash_mla_(v\d)", row["ours"]["kernel"])[1]
        return f"{version} {times(row['ours'])}"

    return table(["row", "queries in e4m3", "FlashMLA, FP8", "FlashMLA / ours", "queries in bfloat16"],
                 [[f"`{batch}`", ours(of["e4m3"]), times(of["e4m3"]["flashmla_fp8"]),
                   both(engine_ratios([of["e4m3"]], "flashmla_fp8")[0], ".2f"), ours(of["fp8"])]
                  for batch, of in cells.items()])


def pair_ratios(rows, form):
    """{row: (burst, sustained)} of our time over that of another form of ours."""
    return {row["row"]: [row["ours"][load] / row[form][load] for load in LOADS] for row in rows
            if all(row[key].get("correct") and load in row[key] for key in ("ours", form) for load in LOADS)}


def engine_pairs_in_all():
    """Beside each form: how many rows, and how the ratios spread."""
    lines, rows = [], record("engine_pairs")["rows"]
    for form, name, bar in (("uniform", "as many queries of each request", 1.05),
                            ("known", "lengths known to the host", 1.03), ("dense", "these, and a dense cache", 1.03)):
        ratios = list(pair_ratios(rows, form).values())
        lines.append([name, str(len(ratios))])
        for one in zip(*ratios):
            above = sum(ratio > bar for ratio in one)
            lines[-1].append(f"{mean(one):.3f}, {span(one, '.3f')}, {above} above {bar}")
    return table(["ours over ours with", "rows", "bursts: geometric mean, from, to", "sustained"], lines)


def engine_pairs(form):
    """Our time in a burst, and over that of the form; sustained in brackets."""
    cells, rows = {}, record("engine_pairs")["rows"]
    ratios = pair_ratios(rows, form)
    for row in rows:
        if row["row"] in ratios:
            cell = f"{row['ours']['burst_us']:.1f}, {both(ratios[row['row']], '.3f')}"
            cells.setdefault(re.sub(r"-h\d+", "", row["row"]), {})[row["h"]] = cell
    heads = sorted({h for of in cells.values() for h in of}, reverse=True)
    return table(["row", *(f"{h} heads" for h in heads)],
                 [[f"`{name}`", *(cells[name].get(h, "") for h in heads)]
                  for name in sorted(cells, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])])


# ---- Prefill, and the operations around attention.


def prefill_ratios(row):
    return [row["fa3"][load] / row["ours"][load] for load in LOADS]


def prefill():
    """A line for each batch, with all heads of it."""
    cells = {}
    for row in record("prefill")["rows"]:
        batch, heads = row["row"].rsplit("-h", 1)
        cells.setdefault(batch, {})[heads] = f"{times(row['ours'])}, {both(prefill_ratios(row), '.2f')}"
    heads = list(dict.fromkeys(h for of in cells.values() for h in of))
    return table(["batch", *(f"{h} heads" for h in heads)],
                 [[f"`{batch}`", *(of.get(h, "") for h in heads)] for batch, of in cells.items()])


def cache():
    """Our rows beside the ceiling of their run, a copy of as many bytes or the product alone."""
    return table(["call", "bytes moved", "GFLOP", "us", "of a copy or product of the run"],
                 [[f"`{row['row']}`", f"{row['bytes'] / 1e6:.1f} MB",
                   f"{row['flops'] / 1e9:.0f}" if row["flops"] else "", f"{row['burst_us']:.1f}", row["of_ceiling"]]
                  for row in record("cache")["rows"] if row["way"] == "ours" and not row["row"].startswith("shared")])


def cache_shared():
    """Decoding over a shared prefix, ours beside MlaDecode over all tokens."""
    found = {(row["row"], row["way"]): row for row in record("cache")["rows"]}
    names = dict.fromkeys(name for name, _ in found if name.startswith("shared prefix"))
    cells = {name: [found[name, way]["burst_us"] for way in ("ours", "MlaDecode over all")] for name in names}
    return table(["requests, prefix + own tokens", "us", "MlaDecode over all tokens, us"],
                 [[name.removeprefix("shared prefix ").replace(" ", ", "), f"{ours:.0f}", f"{whole:.0f}"]
                  for name, (ours, whole) in cells.items()])


def sparse():
    """Ours in both forms of the cache, and FlashMLA's kernel for FP8."""
    cells = {}
    for row in record("sparse")["rows"]:
        if row["row"].startswith("prefill-"):
            continue
        form = row["row"].rsplit("-", 1)[1]
        cells.setdefault((-row["heads"], row["queries"]), {})[form] = row
    lines = []
    for (heads, queries), of in sorted(cells.items()):
        ours = [of.get(form, {}).get("ours", {}) for form in ("bf16", "fp8")]
        peer = next((row["flashmla"] for row in of.values() if "burst_us" in row.get("flashmla", {})), {})
        ratio = [both([peer[load] / one[load] for load in LOADS], ".2f") if peer and "burst_us" in one else "-"
                 for one in ours]
        shown = [both([one[load] for load in LOADS], ".1f") if "burst_us" in one else "-" for one in (*ours, peer)]
        lines.append([f"{-heads}, {queries}", *shown, *ratio])
    return table(["heads, queries", "bfloat16", "FP8", "FlashMLA, FP8", "FlashMLA / ours in bfloat16", "in FP8"], lines)


def sparse_bf16():
    """Ours over caches in bfloat16 beside libraries that take pages of one token, and FlashMLA's for bfloat16."""
    rows, lines = [row for row in record("sparse")["rows"] if row["row"].endswith("-bf16")], []
    peers = {"flashmla_prefill": "FlashMLA, bf16", "fa3": "FlashAttention-3", "flashinfer": "FlashInfer"}
    peers = {key: name for key, name in peers.items() if any(key in row for row in rows)}
    for row in rows:
        found = [row.get(key, {}) for key in ("ours", *peers)]
        best = [min(one[load] for one in found[1:] if load in one) / found[0][load] for load in LOADS]
        prefill = "prefill, " if row["row"].startswith("prefill-") else ""
        lines.append([f"{prefill}{row['heads']}, {row['queries']}",
                      *(both([one[load] for load in LOADS], ".1f") if LOADS[0] in one else "" for one in found),
                      both(best, ".2f")])
    return table(["heads, queries", "ours", *peers.values(), "best of them / ours"], lines)


def context_parallel():
    """A layer by one GPU, a rank's share of it, and what the exchange adds to that."""
    lines = []
    for row in record("context_parallel")["rows"]:
        of = [row["nccl"], row["memory"]]
        whole, shard = (min(one[name] for one in of) for name in ("whole_us", "shard_us"))
        added = [f"{one['together_us']:.1f}, +{one['together_us'] - one['shard_us']:.1f}" for one in of]
        lines.append([f"{row['heads']}, {row['requests']}, {row['queries']}, {row['tokens']}", f"{whole:.1f}",
                      f"{shard:.1f}", *added, f"{whole / of[1]['together_us']:.2f}",
                      f"{max(one['difference'] for one in of):.4f}"])
    return table(["heads, requests, queries, tokens", "one GPU", "a share", "two, NCCL", "two, memory",
                  "one / memory", "difference"], lines)


def kernel_files():
    """Each template, and beside a matrix product its part of torch.matmul of the same run."""
    rows = {row["file"]: row for row in record("kernel_files")["rows"]}
    lines = []
    for name, row in rows.items():
        if "burst_us" not in row:
            continue
        product = name.startswith("gemm") and "torch.matmul" in rows
        lines.append([f"`{name}`", times(row) if row.get("sustained_us") else f"{row['burst_us']:.0f}",
                      f"{row['gbps']:.0f}" if "gbps" in row else "", f"{row['tflops']:.0f}",
                      f"{rows['torch.matmul']['burst_us'] / row['burst_us']:.2f} of torch.matmul" if product else
                      f"{row['of_bandwidth']} of the read ceiling" if row.get("of_bandwidth") else ""])
    return table(["file", "us", "GB/s", "TFLOP/s", "reaches"], lines)


def waiting():
    """Kernels that changed where there was no GPU: `hypermla verify --awaits_gpu`."""
    kernels = {}
    for kernel, devices in json.loads((CHECKOUT / "results/verified.json").read_text()).items():
        if said := devices.get("awaits a GPU"):
            kernels.setdefault((said["date"][:10], said["why"]), []).append(f"`{kernel}`")
    lines = [f"- since {date}, {', '.join(names)}: {why}" for (date, why), names in kernels.items()] or ["None."]
    return [part for line in lines for part in textwrap.wrap(line, 120, subsequent_indent="  ", break_on_hyphens=False)]


# What a run's command need not say: the defaults.
COMMON = {"t": 4096, "h": 128, "d": 128, "p": 64, "k": 512, "dtype": "bfloat16", "parts": 1, "latent_parts": 1,
          "decompressed_parts": 1}


def runs(*patterns):
    """Profiles of kernels, with the command that makes one: its tilings are the tuner's."""
    lines, profiles = [], {}
    for pattern in patterns:
        found = {path.stem: record(path.stem) for path in folder().glob(f"{pattern}.json")}
        if not found:
            raise ValueError(f"no record is called {pattern}")
        profiles.update(found)
    for name, profile in sorted(profiles.items(), key=lambda one: list(one[1]["problem"].values())[:3]):
        words = [profile["kernel"]]
        words += ["--" + field if value is True else f"--{field}={value}" for field, value in profile["problem"].items()
                  if field == "n" or value and value != COMMON.get(field)]
        burst, sustained = (profile["timing"][load] for load in ("burst", "sustained"))
        lines.append([f"`{' '.join(words)}`", both([burst["median_us"], sustained["median_us"]], ".1f"),
                      f"{burst['tflops']:.0f}", f"{burst['gbps']:.0f}", f"`{name}`"])
    return table(["`hypermla kernel`", "us, burst (sustained)", "TFLOP/s", "GB/s", "record"], lines)


# ---- Decoding in vLLM: tests/engines/bench_vllm.py.

VLLM_BACKENDS = ("CUSTOM", "CUSTOM/FLASH_ATTN_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA")


VLLM_DECODE, VLLM_ANY, VLLM_DEFAULT = "FULL_DECODE_ONLY", "FULL", "FULL_AND_PIECEWISE"  # cudagraph_mode
VLLM_DRAFTERS = ("mtp", "eagle", "eagle3")  # methods whose drafts are a layer's
# Which runs of a record: what they have that is not as usual.
VLLM_USUAL = {"layers": 8, "cache": "auto", "sparse": False, "samples": False, "gpus": 1, "contexts_shared": False,
              **dict.fromkeys(VLLM_DRAFTERS, False)}
VLLM_KINDS = {"plain": {}, "deep": {"layers": 16}, "fp8": {"cache": "fp8"}, "fp8_queries": {"cache": "fp8+queries"},
              "sparse": {"sparse": True}, "sparse_fp8": {"sparse": True, "cache": "fp8_ds_mla"}, "two": {"gpus": 2},
              "two_contexts": {"gpus": 2, "contexts_shared": True},
              **{method: {method: True, "graphs": VLLM_DEFAULT} for method in VLLM_DRAFTERS}}


def vllm_runs(name, graphs, kind="plain"):
    """Those of requests that have nothing in common."""
    wanted = VLLM_USUAL | {"graphs": graphs} | VLLM_KINDS[kind]
    return [run for run in record(name)["runs"]
            if all((VLLM_USUAL | run)[key] == value for key, value in wanted.items())]


def vllm_decodes(run):
    """Its rows of decoding whose requests have as many queries as each other."""
    return [row for row in run["rows"] if not row["mixed"] and not row.get("new")]


def vllm_middle(values):
    """The median of rounds, each the median of its runs."""
    found = [statistics.median(one) for one in values if one and None not in one]
    return statistics.median(found) if found else None


def vllm_all_graphs(row):
    """Whether most of its steps replay a graph; one in which a request has fewer drafts may have none."""
    return row["replays"] == 1


def vllm_steps_of(runs):
    """{(heads, drafts, requests, context): {backend: (milliseconds, "all")}}: of the graph of a step where all or
    some steps have one, of the whole step where none has."""
    found = {}
    for run in runs:
        for row in vllm_decodes(run):
            shape = -run["heads"], run["drafts"], row["context"], row["batch"]
            found.setdefault(shape, {}).setdefault(run["backend"], []).append(row)
    steps = {}
    for (heads, drafts, context, batch), of in sorted(found.items()):
        cells = steps[-heads, drafts, batch, context] = {}
        for backend, rows in of.items():
            graph_ms = vllm_middle([row["graph_ms"] for row in rows])
            graphs = "none" if graph_ms is None else "all" if all(map(vllm_all_graphs, rows)) else "some"
            cells[backend] = vllm_middle([row["wall_ms"] for row in rows]) if graph_ms is None else graph_ms, graphs
    return steps


def vllm_cells(cells):
    """{backend: milliseconds}, the least of several in bold."""
    best = min(ms for ms, _ in cells.values()) if len(cells) > 1 else None
    return {name: (f"**{ms:.3f}**" if ms == best else f"{ms:.3f}")
            + {"all": "", "some": " (some)", "none": " (no graph)"}[graphs] for name, (ms, graphs) in cells.items()}


def vllm_steps():
    """All but TRITON_MLA's, those of another number of heads behind."""
    steps, lines = vllm_steps_of(vllm_runs("vllm", VLLM_DECODE)), {}
    columns = [(heads, name) for heads in sorted({shape[0] for shape in steps}, reverse=True)
               for name in VLLM_BACKENDS if name != "TRITON_MLA"
               if any(name in cells for shape, cells in steps.items() if shape[0] == heads)]
    for (heads, *shape), cells in steps.items():
        lines.setdefault((shape[0], shape[2], shape[1]), {}).update({(heads, name): text for name, text
                                                                     in vllm_cells(cells).items()})
    return table(["drafts, context, requests",
                  *(f"{heads}: {name}" if name == "CUSTOM" else name for heads, name in columns)],
                 [[", ".join(map(str, shape)), *(cells.get(column, "") for column in columns)]
                  for shape, cells in sorted(lines.items())])


def vllm(name):
    """Some, without drafts and with 4096 tokens of context."""
    steps = {shape: vllm_cells(cells) for shape, cells in vllm_steps_of(vllm_runs(name, VLLM_DECODE)).items()
             if shape[1] == 0 and shape[2] in (1, 32, 128) and shape[3] == 4096}
    backends = [name for name in VLLM_BACKENDS if any(name in cells for cells in steps.values())]
    return table(["heads, requests", *backends], [[f"{heads}, {batch}", *(cells.get(name, "") for name in backends)]
                                                  for (heads, _, batch, _), cells in steps.items()])


def spread(ratios):
    if len(ratios) < 2:
        return "".join(f"{one:.2f} (1)" for one in ratios)
    return f"{span(ratios)}, mean {mean(ratios):.2f} ({len(ratios)})"


def vllm_over(theirs, own):
    """Of a value of each round. Where that is a list it is of turns, in which the host was alike for both."""
    if isinstance(own[0], list):
        return statistics.median(statistics.median(map(operator.truediv, *turns)) for turns in zip(theirs, own))
    return statistics.median(theirs) / statistics.median(own)


def vllm_ratios(name="vllm", kind="plain"):
    """The time of other backends over ours: range and geometric mean of the shapes that both have."""
    found = {}  # what: {(heads, drafts): {shape: {backend: [a value of each round]}}}
    for run in vllm_runs(name, VLLM_DECODE, kind):
        for row in run["rows"]:
            if row["mixed"]:
                continue
            values = {"the graph": statistics.median(row["graph_ms"])}
            if vllm_all_graphs(row):
                values["the whole step"] = row["wall_ms"] if "turns" in row else statistics.median(row["wall_ms"])
            # Some profiles hold more than decoding steps: far more than a graph takes.
            if row.get("attention_ms") and row["kernels_ms"] < 1.5 * values["the graph"]:
                values["attention"] = row["attention_ms"]
            for what, value in values.items():
                shapes = found.setdefault(what, {}).setdefault((-run["heads"], run["drafts"]), {})
                shapes.setdefault((row["batch"], row["context"]), {}).setdefault(run["backend"], []).append(value)
    measured = {name for groups in found.values() for shapes in groups.values() for of in shapes.values()
                for name in of}
    lines, peers = [], [name for name in VLLM_BACKENDS[1:] if name in measured]
    for what, groups in found.items():
        for (heads, drafts), shapes in sorted(groups.items()):
            ratios = [[vllm_over(of[peer], of["CUSTOM"]) for of in shapes.values() if peer in of and "CUSTOM" in of]
                      for peer in peers]
            if any(ratios):
                lines.append([what, f"{-heads}, {drafts}", *map(spread, ratios)])
    return table(["of", "heads, drafts", *peers], lines)


def vllm_mixed(name="vllm"):
    """Queries of a request, and milliseconds of graph, attention and whole step: all requests with all drafts, and
    mixed. Ours with graphs of any batch, asked for or by default, the others with graphs of equal requests."""
    found = {}
    for graphs in (VLLM_ANY, VLLM_DEFAULT, VLLM_DECODE):
        for run in vllm_runs(name, graphs):
            if graphs == VLLM_DECODE and "mixed" not in run["part"]:
                continue
            backend = VLLM_BACKENDS.index(run["backend"]), graphs == VLLM_DEFAULT
            for row in run["rows"]:
                shape = -run["heads"], run["drafts"], row["batch"], row["context"], backend
                found.setdefault(shape, ([], []))[row["mixed"]].append(row)

    def cell(rows):
        graph, wall = (vllm_middle([row[key] for row in rows]) for key in ("graph_ms", "wall_ms"))
        attention = statistics.median(row["attention_ms"] for row in rows if "attention_ms" in row)
        return f"{rows[0]['queries']:.2f}: {f'{graph:.3f}' if graph else 'no graph'}, {attention:.3f}, {wall:.2f}"

    return table(["heads, drafts, requests, context", "backend", "all drafts", "mixed"],
                 [[f"{-heads}, {drafts}, {batch}, {context}", VLLM_BACKENDS[backend] + ", by default" * default,
                   *map(cell, of)]
                  for (heads, drafts, batch, context, (backend, default)), of in sorted(found.items()) if all(of)])


def vllm_host():
    """Microseconds of the host: the builder of a step, and without graphs the forward call of a layer."""
    found = {}
    for run in record("vllm")["runs"]:
        for row in run["rows"] if not run.get("samples") and "cache" not in run else []:
            if not row["mixed"]:
                shape = -run["heads"], run["drafts"], row["batch"]
                of = found.setdefault(shape, {}).setdefault(run["backend"], ([], []))
                of[0].append(row["builder_us"])
                of[1].extend([row["forward_us"]] if run["graphs"] == "NONE" else [])
    backends = [name for name in VLLM_BACKENDS if any(name in of for of in found.values())]
    return table(["heads, drafts, requests", *backends],
                 [[f"{-heads}, {drafts}, {batch}", *(f"{statistics.median(of[name][0]):.0f}" + (
                     f", {statistics.median(of[name][1]):.1f}" if of[name][1] else "") if name in of else ""
                     for name in backends)] for (heads, drafts, batch), of in sorted(found.items())])


def agreement(of):
    """Equal texts, and the mean and the greatest difference of log-probabilities."""
    return f"{of['prompts_equal']} of {of['prompts']}, {of['logprob_mean']:.3f} ({of['logprob_max']:.2f})"


def vllm_agreement(name="vllm"):
    lines = []
    for run in record(name)["runs"]:
        if "alone" in run and not run.get("samples") and (run["drafts"] == 0 or run["backend"] == "CUSTOM"):
            shown = [agreement(run[key]) if key in run else "" for key in ("alone", "against")]
            backend = run["backend"] + ", batch-invariant" * ("invariant" in run["part"])
            backend += f", {run['cache']}" if "cache" in run else ""
            backend += ", contexts shared" * run.get("contexts_shared", False)
            lines.append([f"{run['heads']}, {run['drafts']}", backend, *shown])
    return table(["heads, drafts", "backend", "alone against in a batch", "against ours without drafts"], lines)


def vllm_whole(of):
    """{column: "graph, whole step, builder"} of {column: rows}: milliseconds, the least graph in bold, and microseconds
    of the host."""
    graphs = {column: vllm_middle([row["graph_ms"] for row in rows]) for column, rows in of.items()}
    best = min((graph for graph in graphs.values() if graph), default=None)
    return {column: ("no graph" if not graph else f"**{graph:.3f}**" if graph == best else f"{graph:.3f}")
            + f", {vllm_middle([row['wall_ms'] for row in of[column]]):.2f}"
            + f", {statistics.median(row['builder_us'] for row in of[column]):.0f}" for column, graph in graphs.items()}


def samples_kind(run):
    """Of samples: over which cache, and by which drafter."""
    return "".join(f", {name}" for name in ("FP8" * ("cache" in run), "MTP" * run.get("mtp", False)) if name)


def vllm_samples(name="vllm", heads="16", other=""):
    """Samples of one prompt: ours without and with its options for them, and the others; and how far texts agree.
    other: those over caches in FP8 or with drafts, and no others."""
    shapes, texts = {}, {}
    for run in record(name)["runs"]:
        if run.get("samples") and run["heads"] == int(heads) and bool(samples_kind(run)) == bool(other):
            backend = run["backend"].replace("/", ", ") + ", shared prefixes" * run.get("shares", False)
            said = {key: agreement(run[key]) for key in ("alone", "against") if key in run}
            if "prompts" not in run:
                texts.setdefault(samples_kind(run), {}).setdefault(backend, {}).update(said)
            for row in run["rows"]:
                shape = samples_kind(run), run.get("prompts", 1), row["batch"]
                shapes.setdefault(shape, {}).setdefault(backend, []).append(row)
    rows = [(samples_said(*shape) + kind, vllm_whole(of)) for (kind, *shape), of in sorted(shapes.items())]
    rows += [(name + kind, {backend: said[key] for backend, said in of.items() if key in said})
             for kind, of in sorted(texts.items())
             for key, name in (("alone", "alone, in a batch"), ("against", "against CUSTOM"))]
    columns = list(dict.fromkeys(backend for of in shapes.values() for backend in of))
    return table(["samples", *columns], [[name, *(of.get(backend, "") for backend in columns)] for name, of in rows])


def samples_said(prompts, batch):
    return f"{batch} of {prompts}" if prompts > 1 else str(batch)


def vllm_samples_attention(name, other=""):
    """Samples of one prompt: milliseconds of attention in a step, and over those with a prefix cache; `other` as of
    vllm_samples()."""
    shapes = {}
    for run in record(name)["runs"]:
        wanted = run.get("samples") and bool(samples_kind(run)) == bool(other)
        for row in [row for row in run["rows"] if wanted and "attention_ms" in row]:  # else its profile had no time
            of = shapes.setdefault((samples_kind(run), -run["heads"], run.get("prompts", 1), row["batch"]), {})
            of[run["backend"].replace("/", ", ")] = row["attention_ms"]
    columns = list(dict.fromkeys(column for of in shapes.values() for column in of))
    least = next(column for column in columns if "cache" in column)
    return table(["heads, samples", *columns],
                 [[f"{-heads}, {samples_said(*samples)}{kind}",
                   *("" if one not in of else f"{of[one]:.3f}" + f", {of[one] / of[least]:.2f}" * (one != least)
                     for one in columns)] for (kind, heads, *samples), of in sorted(shapes.items())])


def vllm_engine(name, kind="plain"):
    """Another record of vLLM's engine: graph, whole step and builder of each row without mixed drafts."""
    shapes = {}
    for run in vllm_runs(name, VLLM_DECODE, kind):
        for row in vllm_decodes(run):
            shape = -run["heads"], run["drafts"], row["context"], row["batch"]
            shapes.setdefault(shape, {}).setdefault(run["backend"], []).append(row)
    backends = [name for name in VLLM_BACKENDS if any(name in of for of in shapes.values())]
    return table(["heads, drafts, context, requests", *backends],
                 [[f"{-heads}, {drafts}, {context}, {batch}", *(vllm_whole(of).get(name, "") for name in backends)]
                  for (heads, drafts, context, batch), of in sorted(shapes.items())])


def vllm_prompts(name, kind="plain"):
    """Steps of prompts: milliseconds in kernels, the least of several in bold, in attention, and of the whole step."""
    shapes = {}
    for run in vllm_runs(name, VLLM_DECODE, kind):
        for row in run["rows"]:
            if row.get("new"):
                shape = -run["heads"], row["context"], row["batch"], row["new"]
                shapes.setdefault(shape, {}).setdefault(run["backend"], []).append(row)
    backends, lines = [name for name in VLLM_BACKENDS if any(name in of for of in shapes.values())], []
    for (heads, context, batch, new), of in sorted(shapes.items()):
        kernels, attention = ({backend: next((row[key] for row in rows if key in row), None)
                               for backend, rows in of.items()} for key in ("kernels_ms", "attention_ms"))
        least = min((ms for ms in kernels.values() if ms is not None), default=None)
        cells = []
        for backend in backends:
            ms = kernels.get(backend)
            bold = "**" if ms == least else ""
            cells.append("" if ms is None else f"{bold}{ms:.2f}{bold} ({attention[backend]:.2f}), "
                         f"{vllm_middle([row['wall_ms'] for row in of[backend]]):.1f}")
        lines.append([f"{-heads}, {batch} x {new}" + (f" over {context}" if context else ""), *cells])
    return table(["heads, requests x new tokens", *backends], lines)


def vllm_server():
    """The server by HTTP: milliseconds until all requests have a first token, and of each token behind it."""
    runs = record("vllm_server")["runs"]
    lines = [[run["server"], f"{run['start_s']:.0f} s"]
             + [", ".join(f"{statistics.median(row[name]):.{places}f}" for name, places in (("first_ms", 1),
                                                                                        ("token_ms", 2)))
                for row in run["rows"]] for run in runs]
    return table(["server", "started in", *(f"{row['requests']} requests" if row["requests"] > 1 else "1 request"
                                            for row in runs[0]["rows"])], lines)


def vllm_attention(config):
    """vLLM's own benchmark of attention alone, the batches of one of its files: microseconds of a layer with ours, and
    of the faster of the other backends over ours."""
    found = {}
    for row in record("vllm26_own")["rows"]:
        if row["config"] == config and row["us"] is not None:
            found.setdefault(row["spec"], {}).setdefault(row["heads"], {})[row["backend"]] = row["us"]
    heads, lines = sorted({heads for of in found.values() for heads in of}, reverse=True), []
    for spec, of in found.items():
        lines.append([f"`{spec}`"])
        for us in (of.get(count, {}) for count in heads):
            ours = us.pop("CUSTOM", None)
            lines[-1].append(f"{ours:.1f}, {min(us.values()) / ours:.2f}" if ours and len(us) == 2 else "")
    return table(["batch", *(f"{count} heads" for count in heads)], lines)


def vllm_churn(*names):
    """Texts of an engine with the prefix cache, and of others, against those of one without."""
    modes = {"plain": "", "fp8": ", FP8", "mtp": ", MTP", "ngram": ", n-grams"}
    lines, columns = [], ("another order", "with", "with, blind")
    for name in names:
        version = record(name)["versions"]["vllm"]
        for mode, said in modes.items():
            of = {row["engine"]: row for row in record(name)["rows"] if row["mode"] == mode}
            if of:
                ours = of["with"]
                lines.append([version + said, f"{ours['steps_that_shared']} of {ours['steps']}",
                              f"{ours['prefixes_kept']}, {ours['preempted']}",
                              *(f"{of[one]['logprob_mean']:.3f} ({of[one]['logprob_max']:.2f}), {of[one]['strange']}"
                                for one in columns)])
    return table(["vLLM", "steps that shared", "prefixes kept, preempted", *columns], lines)


# ---- Decoding and prefill in SGLang: tests/engines/bench_sglang.py.


def sglang_engine(one):
    return (f"{one['backend']}, pages of {one['page']}" + (f", {one['drafts']} drafts" if one.get("drafts") else "")
            + (f", {one['graphs']} graphs" if one.get("graphs") else ""))


def sglang_found(name, what):
    """{(heads, requests, tokens of context): {engine: the result}}"""
    found = {}
    for one in record(name)["results"]:
        if one["what"] == what:
            shape = -one["heads"], one.get("batch", 0), one.get("context", 0)
            found.setdefault(shape, {})[sglang_engine(one)] = one
    return sorted(found.items())


def sglang_engines(found):
    """Those of sglang_found(), ours first."""
    return sorted(dict.fromkeys(engine for _, of in found for engine in of),
                  key=lambda engine: not engine.startswith("hypermla"))


SGLANG_OF_DRAFTS = {"draft_ms": ("draft", ".3f"), "extend_ms": ("extend", ".3f"), "accepted": ("accepted", ".2f")}


def sglang_steps(name="sglang"):
    """Milliseconds of the graph and of attention's kernels, of the whole step, microseconds of planning on the host;
    with drafts, milliseconds of the drafting layer's graphs, and tokens that a step adds. Ours first; in bold the
    shortest graph of several with as many drafts."""
    found = sglang_found(name, "decode")
    engines = sglang_engines(found)
    more = SGLANG_OF_DRAFTS if any("accepted" in one for _, of in found for one in of.values()) else {}
    lines = []
    for (heads, batch, _), of in found:
        for engine in engines:
            if engine in of:
                one = of[engine]
                peers = [other["graph_ms"] for other in of.values() if other.get("drafts") == one.get("drafts")]
                is_best = len(peers) > 1 and one["graph_ms"] == min(peers)
                graph = f"**{one['graph_ms']:.3f}**" if is_best else f"{one['graph_ms']:.3f}"
                lines.append([f"{-heads}, {batch}", engine, graph, f"{one['attention_ms']:.3f}",
                              f"{one['wall_ms']:.2f}", f"{one['plan_us']:.0f}",
                              *("" if one.get(key) is None else f"{one[key]:{form}}"
                                for key, (_, form) in more.items())])
    return table(["heads, requests", "backend", "graph, ms", "attention, ms", "whole step, ms", "planning, us",
                  *(head for head, _ in more.values())], lines)


def sglang_beside(name):
    """Graph, attention and whole step in milliseconds, planning in microseconds, the engines side by side; the shortest
    graph in bold."""
    found = sglang_found(name, "decode")
    engines = sglang_engines(found)
    lines = []
    for (heads, batch, _), of in found:
        best = min(one["graph_ms"] for one in of.values())
        cells = {engine: ("**{graph_ms:.3f}**" if one["graph_ms"] == best else "{graph_ms:.3f}").format(**one)
                 + ", {attention_ms:.3f}, {wall_ms:.2f}, {plan_us:.0f}".format(**one) for engine, one in of.items()}
        lines.append([f"{-heads}, {batch}", *(cells.get(engine, "") for engine in engines)])
    return table(["heads, requests", *engines], lines)


def sglang_prompts(*names):
    """Steps of prompts: milliseconds in kernels, the least of several in bold, in attention, and of the whole step. Of
    a row that several records have, the last one's."""
    shapes, columns, is_chosen = {}, {}, record(names[0])["asked"].get("forms") == ["chosen"]
    for one in (one for name in names for one in record(name)["results"]):
        if one["what"] == "prompts" and "kernels_ms" in one:
            form, graphs = "chosen" if is_chosen else one["form"], one.get("graphs", "no") + " graphs" * is_chosen
            column = one["backend"] != "hypermla", one["backend"], form != "decompressed", graphs != "no graphs", graphs
            columns[column] = f"{one['backend']}, {graphs if is_chosen else form}"
            shape = -one["heads"], one["context"], one["batch"], one["new"]
            shapes.setdefault(shape, {})[column] = one
    lines = []
    for (heads, context, batch, new), of in sorted(shapes.items()):
        least = min(one["kernels_ms"] for one in of.values())
        cells = []
        for column in sorted(columns):
            one = of.get(column)
            if one is None:
                cells.append("")
                continue
            kernels, attention, step = (f"{one[key]:.{(one[key] < 100) + (one[key] < 10 and key != 'step_ms')}f}"
                                        for key in ("kernels_ms", "attention_ms", "step_ms"))
            bold = "**" if one["kernels_ms"] == least else ""
            cells.append(f"{bold}{kernels}{bold} ({attention}), {step}")
        lines.append([f"{-heads}, {batch} x {new}" + (f" over {context}" if context else ""), *cells])
    return table(["heads, requests x new tokens", *(columns[column] for column in sorted(columns))], lines)


def sglang_agreement(name="sglang"):
    lines, against = [], {(one["heads"], sglang_engine(one)): one for one in record(name)["results"]
                          if one["what"] == "against"}
    for _, of in sglang_found(name, "alone against batch"):
        for engine, one in of.items():
            other = against.get((one["heads"], engine))
            lines.append([str(one["heads"]), engine, agreement(one), agreement(other) if other else ""])
    return table(["heads", "backend", "alone against in a batch", "against the first of these heads"], lines)


# ---- README.


def span(values, form=".2f"):
    return f"{min(values):{form}} to {max(values):{form}}"


def gains():
    few, many, shared = [], [], []
    envelope = Envelope()
    for s, rows in envelope.sweep():
        (few if s <= 32 else many).append(peer_over_ours(rows)[1])
    for b, *_, rows in prefix_cases(envelope):
        peer, own = Envelope.of(rows, "peer"), Envelope.of(rows, "shared prefix")
        if peer:
            shared.append(peer["sustained_us"] / own["sustained_us"])
    rows = record("engine")["rows"]
    beside = [[burst for burst, _ in engine_ratios(rows, key)] for key in ENGINE_PEERS]
    engine = [f"{mean(bursts):.2f} of {len(bursts)}" for bursts in beside]
    prefills = [prefill_ratios(row)[1] for row in record("prefill")["rows"]]
    return table(
        ["form of attention", "against FlashMLA", "FlashAttention-3", "FlashInfer"],
        [["lengths known to the host, few queries (s = 1 to 32)", span(few), "", "not measured"],
         ["lengths known to the host, many queries (s = 48 to 256)", "", span(many), "not measured"],
         ["prompt of 8192 tokens shared by 32 or 128 requests", span(shared, ".1f"), "", "not measured"],
         ["an engine's: paged cache, lengths on the device, bursts, mean of its batches", *engine],
         [f"an engine's prefill, sustained, {len(prefills)} batches", "", span(prefills), "not measured"]])


TABLES = {make.__name__: make for make in (gains, envelope_peers, envelope_ours, envelope_prefixes, engine_best,
                                           engine_how, engine_in_all, engine_behind, engine_plans, engine_equal,
                                           engine_other, engine_few, engine_between, engine_pairs_in_all,
                                           engine_pairs, engine_fp8, prefill, cache, cache_shared, sparse, kernel_files,
                                           vllm, vllm_steps, vllm_ratios, vllm_mixed, vllm_host, vllm_agreement,
                                           vllm_samples, vllm_samples_attention, vllm_engine, vllm_prompts,
                                           vllm_server, vllm_attention, vllm_churn, sglang_steps, sglang_beside,
                                           sglang_prompts, sglang_agreement, sparse_bf16, context_parallel, waiting,
                                           runs)}
OPTIONAL = {"kernel_files"}  # no page need show them


def pages():
    return [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]


def renewed(text, found):
    """The page with its tables made anew; the names of its tables go to `found`."""
    def make(match):
        indent, head, name, words, device = match.group(1, 2, 3, 4, 5)
        Shown.device = device or DEVICE
        if name not in TABLES:
            raise KeyError(name)
        found.append(name)
        lines = [head, *TABLES[name](*words.split()), "<!-- end of table -->"]
        return "\n".join(indent + line for line in lines)
    return BLOCK.sub(make, text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a table differs")
    arguments = parser.parse_args()
    found, different = [], []
    for page in pages():
        text = page.read_text()
        try:
            new = renewed(text, found)
        except (KeyError, TypeError, ValueError, OSError) as error:
            sys.exit(f"results_tables.py: {page.relative_to(CHECKOUT)}: no table can be made ({error!r}); name one of "
                     f"{', '.join(TABLES)}, and give it its record")
        if new != text:
            different.append(str(page.relative_to(CHECKOUT)))
            if not arguments.check:
                page.write_text(new)
    if missing := set(TABLES) - OPTIONAL - set(found):
        sys.exit(f"results_tables.py: no page shows {', '.join(sorted(missing))}; add `<!-- table: name -->` to one")
    if arguments.check and different:
        sys.exit(f"results_tables.py: tables differ from their records in {', '.join(different)}; run "
                 "scripts/results_tables.py")
    print(f"{len(found)} tables {'match their records' if arguments.check else 'written'}")


if __name__ == "__main__":
    main()
