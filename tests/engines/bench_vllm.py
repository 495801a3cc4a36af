#!/usr/bin/env python3
"""Decodes with the real vLLM engine, over a small model of DeepSeek-V3's shape with random weights: do its attention
backends agree, and how long does a step take?

    tests/engines/bench_vllm.py --list
    tests/engines/bench_vllm.py --record=vllm.json --seconds=540     # and once more: goes on where it stopped
    tests/engines/bench_vllm.py --parts h16-d0 --backends CUSTOM FLASHMLA --batches 1 32 --contexts 4096

The measurements are parts, the most telling first. Every backend of a part is a process of its own, in one order and
then in the reverse one. What the record holds is not measured again: where the time is over, the next call goes on.
Times: medians of 5 runs, each the median of its steps, by events around the replayed graph; attention by the kernels
that PyTorch's profiler sees, planners outside of the graph among them, those that overlap once, and the pauses around
them; the host's time in the metadata builder and, without graphs, in one layer's forward call. Runs before which the
host was slow (`host_us`, of a loop of Python) are repeated, as often as there are runs. Agreement: log-probabilities of
greedy texts of 32 tokens, against ours, and of prompts alone against the same prompts in one batch, which is the noise
to compare with. Needs a GPU, vLLM, and this package where Python finds it; CUSTOM is ours.
"""

import argparse
import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from vllm_worker import DEFAULT_GRAPHS, difference, median, without_paths

WORKER = pathlib.Path(__file__).resolve().with_name("vllm_worker.py")
LAYERS = 8
REPEATS, STEPS = 5, 20
LEAST_SECONDS = 45  # that a process needs to say anything
# One process, no network, nothing optional.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1",
               "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_PLUGINS": "hypermla",
               "VLLM_USE_DEEP_GEMM": "0", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
               "NCCL_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
DECODE_GRAPHS = "FULL_DECODE_ONLY"
OURS, FLASHMLA, FLASH_ATTN, TRITON = "CUSTOM", "FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA"


class Part(NamedTuple):
    """What processes measure that differ by their backend alone."""

    name: str
    heads: int
    drafts: int  # n-gram drafts of a step
    shapes: tuple  # (requests, tokens of context, whether requests have 0, 1, .. and all drafts in turn)
    backends: tuple = (OURS, FLASH_ATTN, FLASHMLA)
    graphs: str = DECODE_GRAPHS  # cudagraph_mode; NONE: without; DEFAULT_GRAPHS: as vLLM has it, torch.compile, too
    rounds: int = 2  # of all processes; the second in reverse order
    invariant: bool = False  # with VLLM_BATCH_INVARIANT=1
    samples: bool = False  # the requests are samples of one prompt, whose pages the prefix cache gives to all of them
    shares: bool = False  # with shared prefixes: docs/latent-prefixes.md
    layers: int = LAYERS
    cache: str = "auto"  # vLLM's kv_cache_dtype


def shapes(batches, contexts, mixed=(False,)):
    """Long contexts first: the shorter ones are in the prefix cache then."""
    return tuple((batch, context, one) for context in sorted(contexts, reverse=True)
                 for batch in sorted(batches, reverse=True) for one in mixed)


ALL = shapes((1, 8), (32768,)) + shapes((1, 32, 128, 256), (2048, 4096))
SOME = shapes((1, 32, 128), (4096,))
BOTH = shapes((32, 128), (4096,), (False, True))
SAMPLES = shapes((64, 128, 512), (8192,))
PARTS = (
    Part("h128-d0", 128, 0, ALL),
    Part("h16-d0", 16, 0, ALL),
    Part("h128-d3", 128, 3, SOME),
    Part("h128-d3-mixed", 128, 3, BOTH, (OURS,), "FULL"),
    Part("h128-host", 128, 0, shapes((1, 32), (2048,)), graphs="NONE", rounds=1),
    Part("h128-invariant", 128, 0, (), (OURS, FLASH_ATTN), rounds=1, invariant=True),
    Part("h16-d3", 16, 3, SOME),
    Part("h128-triton", 128, 0, shapes((1, 32), (4096,)), (TRITON,), rounds=1),
    Part("h128-d7", 128, 7, SOME),
    Part("h16-d7", 16, 7, SOME),
    Part("h16-d3-mixed", 16, 3, BOTH, (OURS,), "FULL"),
    Part("h128-d7-mixed", 128, 7, shapes((32,), (4096,), (False, True)), (OURS,), "FULL"),
    Part("h16-d7-mixed", 16, 7, BOTH, (OURS,), "FULL"),
    Part("h128-d3-mixed-others", 128, 3, BOTH, (FLASH_ATTN, FLASHMLA), rounds=1),
    Part("h16-triton", 16, 0, shapes((1, 32), (4096,)), (TRITON,), rounds=1),
    Part("h128-d0-deep", 128, 0, SOME, layers=16),  # whose steps the host does not bound
    Part("h16-d0-deep", 16, 0, SOME, layers=16),
    Part("h128-d0-fp8", 128, 0, SOME, (OURS, FLASHMLA), cache="fp8"),
    Part("h16-d0-fp8", 16, 0, SOME, (OURS, FLASHMLA), cache="fp8"),
    Part("h16-samples", 16, 0, SAMPLES, samples=True),
    Part("h16-samples-shared", 16, 0, SAMPLES, (OURS,), samples=True, shares=True),
    Part("h16-d3-default", 16, 3, BOTH, (OURS,), DEFAULT_GRAPHS, rounds=1),
)


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the parts and stop")
    parser.add_argument("--parts", nargs="+", metavar="NAME", choices=[part.name for part in PARTS], help="these alone")
    parser.add_argument("--backends", nargs="+", help="these alone")
    parser.add_argument("--batches", type=int, nargs="+", help="these alone, of a part's")
    parser.add_argument("--contexts", type=int, nargs="+", help="these alone, of a part's")
    parser.add_argument("--rounds", type=int, default=2, help="so many of a part's (default 2: all)")
    parser.add_argument("--seconds", type=float, default=540, help="for everything (default 540)")
    parser.add_argument("--limit", type=float, default=170, help="seconds for one process (default 170)")
    parser.add_argument("--record", default="vllm.json", help="file of all results, to which new ones are added")
    parser.add_argument("--work", default=os.path.join(tempfile.gettempdir(), "bench_vllm"), help="model and logs")
    return parser.parse_args(words)


def stop(sentence):
    sys.exit(f"bench_vllm.py: {sentence}")


# --- the record ---


def read_record(path):
    if not os.path.exists(path):
        return {"schema": 1, "kind": "vllm", "command": "tests/engines/bench_vllm.py", "runs": []}
    with open(path) as file:
        record = json.load(file)
    if (record.get("schema"), record.get("kind")) != (1, "vllm"):
        stop(f"{path} is no record of this benchmark; name another file by --record")
    return record


def write_record(path, record):
    scratch = f"{path}.tmp"
    with open(scratch, "w") as file:
        json.dump(record, file, indent=1)
        file.write("\n")
    os.replace(scratch, path)


def least_host_us(path):
    """Of all runs, as vllm_worker.host_us() has it; None where there is none yet."""
    return min((one for run in read_record(path)["runs"] for row in run["rows"] for one in row.get("host_us", ())),
               default=None)


def run_of(record, part, backend, number):
    """The run of a record, which has none of a key twice; None."""
    key = part, backend, number
    return next((run for run in record["runs"] if (run["part"], run["backend"], run["round"]) == key), None)


def shape_of(row):
    return row["batch"], row["context"], row["mixed"]


def missing(record, part, backend, number, at):
    """(shapes, whether agreement) that are asked for and that the record lacks."""
    run = run_of(record, part.name, backend, number) or {"rows": []}
    have = {shape_of(row) for row in run["rows"]}
    wanted = [shape for shape in part.shapes if (not at.batches or shape[0] in at.batches)
              and (not at.contexts or shape[1] in at.contexts)]
    agreement = number == 0 and part.graphs == DECODE_GRAPHS and part.layers == LAYERS and "alone" not in run
    return [shape for shape in wanted if shape not in have], agreement


def merge(record, part, backend, number, found):
    """Puts what a process found into the record. Its machine must be the record's."""
    engine = next((one for one in found if one["what"] == "engine"), None)
    if engine:
        for name in ("device", "versions"):
            if record.setdefault(name, engine[name]) != engine[name]:
                stop(f"the record is of {record[name]}, this machine has {engine[name]}; name another file by --record")
    run = run_of(record, part.name, backend, number)
    if run is None:
        run = {"part": part.name, "heads": part.heads, "drafts": part.drafts, "layers": part.layers, "backend": backend,
               "graphs": part.graphs, "round": number, "rows": []}
        run |= {name: True for name in ("samples", "shares") if getattr(part, name)}
        run |= {"cache": part.cache} if part.cache != "auto" else {}
        record["runs"].append(run)
    run["date"] = datetime.date.today().isoformat()
    run.pop("failed", None)
    rows = {shape_of(row): row for row in run["rows"]}
    for one in found:
        what, values = one["what"], {name: value for name, value in one.items() if name != "what"}
        if what == "engine":
            run |= {name: value for name, value in values.items() if name not in ("device", "versions")}
        elif what == "row" and "error" not in values:
            if "profile_error" in values:
                values["profile_error"] = without_paths(values["profile_error"])
            rows[shape_of(values)] = values
        elif what in ("alone", "against"):
            run[what] = values
        elif what in ("row", "failed"):
            run["failed"] = without_paths(values.get("error") or values["said"])
    run["rows"] = [rows[shape] for shape in sorted(rows)]


# --- over the processes ---


def run_process(part, backend, number, wanted, agreement, at, until):
    """What one process says; its failure is one of the results."""
    name = os.path.join(at.work, f"{part.name}-{backend}-{number}")
    asked = {"backend": backend, "heads": part.heads, "drafts": part.drafts, "layers": part.layers,
             "graphs": part.graphs, "cache": part.cache, "shapes": wanted, "agreement": agreement,
             "samples": part.samples, "shares": part.shares, "profile": number == 0, "repeats": REPEATS,
             "steps": STEPS, "work": at.work, "path": f"{name}.jsonl", "until": until - 15,
             "host_us": least_host_us(at.record)}
    environment = {**ENVIRONMENT, "VLLM_CACHE_ROOT": os.path.join(at.work, "cache"), **os.environ}
    if part.invariant:
        environment["VLLM_BATCH_INVARIANT"] = "1"
    open(asked["path"], "w").close()
    with open(f"{name}.log", "w") as log:
        child = subprocess.Popen([sys.executable, WORKER, json.dumps(asked)], stdout=log, stderr=subprocess.STDOUT,
                                 env=environment, start_new_session=True)
        try:
            status = f"exit status {child.wait(max(until - time.time(), 1))}"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            status = "stopped: the time is over"
    with open(asked["path"]) as file:
        found = [json.loads(line) for line in file if line.endswith("\n")]
    if not any(one["what"] == "end" for one in found):
        with open(f"{name}.log", errors="replace") as file:
            lines = [line for line in file.read().splitlines() if "Error" in line or "error:" in line]
        found.append({"what": "failed", "said": "; ".join([status, *(line[-300:] for line in lines[-2:])])})
    return found


def against_ours(part, backend, found, at):
    """Compares the texts of a process with ours of as many heads without drafts, which lie beside the model. Samples
    have other prompts."""
    path = os.path.join(at.work, f"texts-{part.heads}{'-samples' * part.samples}.json")
    for texts in [one["texts"] for one in found if one["what"] == "texts"]:
        if backend == OURS and part.drafts == 0 and part.cache == "auto" and not part.invariant and not part.shares:
            with open(path, "w") as file:
                json.dump(texts, file)
        elif os.path.exists(path):
            with open(path) as file:
                found.append({"what": "against", **difference(texts, json.load(file))})


def processes(at):
    """(part, backend, round), in the order in which they are run."""
    for part in PARTS:
        if at.parts and part.name not in at.parts:
            continue
        for number in range(min(part.rounds, at.rounds)):
            for backend in part.backends if number % 2 == 0 else part.backends[::-1]:
                if not at.backends or backend in at.backends:
                    yield part, backend, number


def told(one):
    """A line of the output for a result."""
    if one["what"] != "row" or "error" in one:
        return json.dumps(one)
    shown = ", ".join(f"{name} {median([value for value in one[name] if value is not None])}"
                      for name in ("graph_ms", "wall_ms") if any(one[name]))
    rest = ", ".join(f"{name} {one[name]}" for name in ("queries", "builder_us", "forward_us", "attention_ms",
                                                        "kernels_ms", "pause_before_us", "pause_behind_us")
                     if one.get(name) is not None)
    return f"b={one['batch']} context={one['context']}{' mixed' * one['mixed']}: {shown}, {rest}"


def main():
    at = parse(sys.argv[1:])
    if at.list:
        for part in PARTS:
            print(f"{part.name:22}{len(part.backends) * part.rounds} processes of {len(part.shapes)} shapes: "
                  f"{', '.join(part.backends)}")
        return 0
    os.makedirs(at.work, exist_ok=True)
    end = time.time() + at.seconds
    record, failed, left = read_record(at.record), 0, 0
    for part, backend, number in processes(at):
        wanted, agreement = missing(record, part, backend, number, at)
        if not wanted and not agreement:
            continue
        if end - time.time() < LEAST_SECONDS:
            left += 1
            continue
        found = run_process(part, backend, number, wanted, agreement, at, min(end, time.time() + at.limit))
        against_ours(part, backend, found, at)
        merge(record, part, backend, number, found)
        write_record(at.record, record)
        failed += any(one["what"] == "failed" or "error" in one for one in found)
        for one in [one for one in found if one["what"] != "texts"]:
            print(f"{part.name} {backend} {number}: {told(one)}", flush=True)
    print(f"{left} processes are left for the next call; {failed} failed", flush=True)
    return 1 if failed or not record["runs"] else 0


if __name__ == "__main__":
    sys.exit(main())
