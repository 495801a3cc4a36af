#!/usr/bin/env python3
"""Decodes and prefills with the real vLLM engine, over a small model of DeepSeek-V3's shape with random weights: do its
attention backends agree, and how long does a step take?

    tests/engines/bench_vllm.py --list
    tests/engines/bench_vllm.py --record=vllm.json --seconds=540     # and once more: goes on where it stopped
    tests/engines/bench_vllm.py --parts h16-d0 --backends CUSTOM FLASHMLA --batches 1 32 --contexts 4096

The measurements are parts, the most telling first. The backends of a part are processes, each with an engine, that
start side by side and take turns: a run of one decodes 20 steps while the others wait; a turn is a run of each, every
second one in the reverse order. Rounds are processes anew, in the reverse order. What the record holds is not measured
again: where the time is over, the next call goes on; a row that one backend lacks is measured with all that are asked
for. Where ours fails the others stop, and where it does not start the part's other rounds are left, too: there is
nothing to compare.

Hosts differ from core to core and from second to second. So a loop of Python is timed on every core, at the start and
before every eighth turn: all main threads, of which one works at a time, are put on the fastest, their other threads on
the next three, on one hardware thread of each. The loop is timed before and behind each run, too: `host_us`, the larger
of both. A turn is fast if those of its runs are within 10 % of each other, and within 30 % of the least that this call
has seen on any core, since a slow host takes 1.7 times as long. A row has the runs of 8 turns, the same of all
backends: fast ones first, then those whose slowest host_us is the least, of as many turns as it takes to have 8 fast
ones, but 20 turns or 20 seconds of them at most. `turns` says how many there were, `fast` how many of the 8 are fast:
where it is less than 8, the whole step says little.

Times: medians of runs, each the median of its steps, by events around the replayed graph; the host's time in the
metadata builder and, without graphs, in one layer's forward call. Steps of prompts, new tokens of each request behind
contexts that the prefix cache keeps, are timed as a whole. Behind all runs, since a process that has profiled
stays slower: attention by the kernels that PyTorch's profiler sees, planners outside of the graph among them, those
that overlap once, and the pauses around them. Agreement: log-probabilities of greedy texts of 32 tokens, against ours,
and of prompts alone against the same prompts in one batch, which is the noise to compare with. With drafts,
tokens_a_step is how many tokens a step of a prompt alone makes.

An engine on two GPUs is a process for each, which share those cores; its times are the first's. Such parts are left out
where there is one GPU. Needs a GPU, vLLM, and this package where Python finds it; CUSTOM is ours. Sparse parts need
DeepGEMM and what it compiles with, nvcc or NVRTC.
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from vllm_worker import (DEFAULT_GRAPHS, Shape, difference, driver_versions, host_us, median, missing_plugins,
                         without_paths)

WORKER = pathlib.Path(__file__).resolve().with_name("vllm_worker.py")
LAYERS = 8
STEPS = 20  # of a run
TURNS, MOST_TURNS, TURN_SECONDS = 8, 20, 20  # of a row
EVEN, FAST = 1.1, 1.3  # the largest host_us of a turn over its least, and over the least of all
CORES = 4
CACHE_BYTES = 72 << 30  # of the GPU, for the contexts of all engines that live at once
LEAST_SECONDS = 60  # that processes need to say anything
OVER = "stopped: the time is over"
# One process, no network, nothing optional. One thread for PyTorch's work on the CPU, as in processes that vLLM starts:
# several would wait for each other on the few cores that all but the main thread are put on, 0.1 s in a builder.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0",
               "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
               "VLLM_PLUGINS": "hypermla", "VLLM_USE_DEEP_GEMM": "0", "VLLM_HOST_IP": "127.0.0.1",
               "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false",
               "PYTHONUNBUFFERED": "1"}
DECODE_GRAPHS = "FULL_DECODE_ONLY"
OURS, FLASHMLA, FLASH_ATTN, TRITON = "CUSTOM", "FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA"
OURS_BUT_DRAFTER = f"{OURS}/{FLASH_ATTN}"  # behind the slash: a drafter's backend, where it is not the engine's choice
# Or an option of ours: docs/latent-prefixes.md, docs/shared-prefixes.md.
SHARED, HYBRID = "shared prefixes", "prefix cache"
OURS_SHARED, OURS_HYBRID = f"{OURS}/{SHARED}", f"{OURS}/{HYBRID}"
SPARSE = {OURS: None, FLASHMLA: "FLASHMLA_SPARSE", FLASH_ATTN: "FLASH_ATTN_MLA_SPARSE"}  # None: vLLM's choice, replaced


class Part(NamedTuple):
    """What processes measure that differ by their backend alone."""

    name: str
    heads: int
    drafts: int  # of a step
    shapes: tuple  # of Shape
    backends: tuple = (OURS, FLASH_ATTN, FLASHMLA)
    graphs: str = DECODE_GRAPHS  # cudagraph_mode; NONE: without; DEFAULT_GRAPHS: as vLLM has it, torch.compile, too
    rounds: int = 2  # of all processes; the second in reverse order
    invariant: bool = False  # with VLLM_BATCH_INVARIANT=1
    samples: bool = False  # the requests are samples of one prompt, whose pages the prefix cache gives to all of them
    prompts: int = 1  # or of several, in turn
    layers: int = LAYERS
    cache: str = "auto"  # vLLM's kv_cache_dtype; "fp8+queries": ours rounds queries, too, as others do it by themselves
    sparse: bool = False  # DeepSeek-V3.2's attention, by the backends of SPARSE
    gpus: int = 1  # of an engine, a process each, which share the heads
    contexts_shared: bool = False  # and the contexts: decode context parallelism
    method: str = ""  # drafts are n-grams; or by a layer, over a checkpoint: mtp, eagle, eagle3


def shapes(batches, contexts, mixed=(False,), new=0):
    """Long contexts first: the shorter ones are in the prefix cache then."""
    return tuple(Shape(batch, context, one, new) for context in sorted(contexts, reverse=True)
                 for batch in sorted(batches, reverse=True) for one in mixed)


ALL = shapes((1, 8), (32768,)) + shapes((1, 32, 128, 256), (2048, 4096))
SOME = shapes((1, 32, 128), (4096,))
SHORT = shapes((1, 8, 32), (4096,))
BOTH = shapes((32, 128), (4096,), (False, True))
SAMPLES = shapes((64, 128, 512), (8192,))
LISTS = shapes((1, 32, 128), (8192,))  # of 2048 tokens
LONG = shapes((1, 8), (65536,)) + shapes((32,), (8192,))
BEHIND = shapes((1, 8), (8192,), new=512)
PROMPTS = (shapes((1, 8), (8192, 32768), new=512) + shapes((1,), (0,), new=16384) + shapes((1, 8), (0,), new=2048)
           + shapes((64,), (0,), new=256))
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
    Part("h128-d0-fp8-queries", 128, 0, SOME, (OURS, FLASHMLA), cache="fp8+queries"),
    Part("h128-d3-fp8-queries", 128, 3, SOME, (OURS, FLASHMLA), cache="fp8+queries"),
    Part("h16-d3-fp8-queries", 16, 3, SOME, (OURS, FLASHMLA), cache="fp8+queries"),
    *(Part(f"h{heads}-samples", heads, 0, SAMPLES, (OURS, OURS_SHARED, OURS_HYBRID, FLASH_ATTN, FLASHMLA), samples=True)
      for heads in (16, 128)),
    *(Part(f"h{heads}-samples-2", heads, 0, SAMPLES, (OURS, OURS_SHARED, OURS_HYBRID, FLASH_ATTN, FLASHMLA),
           samples=True, prompts=2) for heads in (16, 128)),
    *(Part(f"h{heads}-samples-fp8", heads, 0, SAMPLES, (OURS, OURS_HYBRID, FLASHMLA), samples=True, cache=cache)
      for heads, cache in ((16, "fp8"), (128, "fp8+queries"))),  # as ours rounds queries by itself
    *(Part(f"h{heads}-samples-mtp3", heads, 3, shapes((32, 128), (8192,)), (OURS, OURS_HYBRID, FLASH_ATTN),
           samples=True, method="mtp") for heads in (16, 128)),
    Part("h128-sparse", 128, 0, LISTS, sparse=True),
    Part("h128-sparse-fp8", 128, 0, LISTS, (OURS, FLASHMLA), cache="fp8_ds_mla", sparse=True),
    Part("h16-sparse", 16, 0, LISTS, sparse=True),
    Part("h16-sparse-fp8", 16, 0, LISTS, (OURS, FLASHMLA), cache="fp8_ds_mla", sparse=True),
    Part("h16-d3-default", 16, 3, BOTH, (OURS,), DEFAULT_GRAPHS, rounds=1),
    Part("h128-prompts", 128, 0, PROMPTS),
    Part("h16-prompts", 16, 0, PROMPTS),
    Part("h128-prompts-fp8", 128, 0, BEHIND, (OURS, FLASHMLA), rounds=1, cache="fp8"),
    Part("h16-prompts-fp8", 16, 0, BEHIND, (OURS, FLASHMLA), rounds=1, cache="fp8"),
    *(Part(f"h{heads}-mtp3", heads, 3, SHORT, (OURS, FLASH_ATTN, OURS_BUT_DRAFTER, FLASHMLA), DEFAULT_GRAPHS, rounds=1,
           method="mtp") for heads in (128, 16)),
    *(Part(f"h{heads}-{method}-d3", heads, 3, SHORT, (OURS, FLASH_ATTN, FLASHMLA), DEFAULT_GRAPHS, rounds=1,
           method=method) for heads in (128, 16) for method in ("eagle", "eagle3")),
    Part("h128-two", 128, 0, LONG, rounds=1, gpus=2),
    Part("h128-two-contexts", 128, 0, LONG, rounds=1, gpus=2, contexts_shared=True),
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
    parser.add_argument("--limit", type=float, default=240, help="seconds for a part's processes (default 240)")
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


def run_of(record, part, backend, number):
    """The run of a record, which has none of a key twice; None."""
    key = part, backend, number
    return next((run for run in record["runs"] if (run["part"], run["backend"], run["round"]) == key), None)


def shape_of(row):
    return Shape(row["batch"], row["context"], row["mixed"], row.get("new", 0))


def missing(record, part, backend, number, at):
    """(shapes, whether agreement) that are asked for and that the record lacks."""
    run = run_of(record, part.name, backend, number) or {"rows": []}
    have = {shape_of(row) for row in run["rows"]}
    wanted = [shape for shape in part.shapes if (not at.batches or shape.batch in at.batches)
              and (not at.contexts or shape.context in at.contexts)]
    agreement = (number == 0 and (part.graphs == DECODE_GRAPHS or part.method) and part.layers == LAYERS
                 and "alone" not in run)
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
        run |= {name: True for name in ("samples", "sparse") if getattr(part, name)}
        run |= {"prompts": part.prompts} if part.prompts > 1 else {}
        run |= {part.method: True} if part.method else {}
        run |= {"cache": part.cache} if part.cache != "auto" else {}
        run |= {"gpus": part.gpus, "contexts_shared": part.contexts_shared} if part.gpus > 1 else {}
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


# --- the host ---


class Host:
    """The least host_us that this call has seen, and the cores to use: one hardware thread of each, fastest first."""

    least, cpus = math.inf, ()

    def seen(self, us):
        self.least = min(self.least, us)

    def look(self):
        allowed, found = os.sched_getaffinity(0), {}
        for cpu in sorted(allowed):
            os.sched_setaffinity(0, [cpu])
            found[cpu] = median([host_us() for _ in range(9)])
        os.sched_setaffinity(0, allowed)
        print("host_us of cores:", ", ".join(f"{cpu}: {us:.0f}" for cpu, us in found.items()), flush=True)
        self.seen(min(found.values()))
        cores = {}
        for cpu in sorted(found, key=found.get):
            cores.setdefault(siblings(cpu), cpu)
        self.cpus = list(cores.values())[:CORES]


def siblings(cpu):
    """The hardware threads of its core, as Linux writes them."""
    path = pathlib.Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return path.read_text() if path.exists() else str(cpu)


def host_of(turn, least):
    """Whether it is not fast, and its slowest host_us: the less, the better."""
    speeds = [run["host_us"] for run in turn.values()] or [math.inf]
    return max(speeds) > EVEN * min(speeds) or max(speeds) > FAST * least, max(speeds)


def chosen(turns, least):
    """Of turns, {backend: run} each, those of a row; and how many of them are fast."""
    best = sorted(turns, key=lambda turn: host_of(turn, least))[:TURNS]
    return best, sum(not host_of(turn, least)[0] for turn in best)


def row_of(runs, **counts):
    """A row of the record, but for its shape."""
    row = {name: [one[name] for one in runs] for name in ("wall_ms", "graph_ms", "host_us")}
    return counts | row | {name: median([one[name] for one in runs if one[name] is not None])
                           for name in ("steps", "replays", "queries", "builder_us", "forward_us")}


# --- over the processes ---


class Worker:
    """A process, what it has found, and, once it has ended, why."""

    def __init__(self, part, backend, number, wanted, agreement, at, host, until):
        name = f"{part.name}-{backend}-{number}".replace("/", "-").replace(" ", "-")
        attends, _, more = backend.partition("/")
        self.name, self.until, self.found = os.path.join(at.work, name), until, []
        asked = {"backend": SPARSE[attends] if part.sparse else attends, "sparse": part.sparse, "heads": part.heads,
                 "drafts": part.drafts, "layers": part.layers, "graphs": part.graphs, "cache": part.cache,
                 "shapes": wanted, "agreement": agreement, "samples": part.samples, "prompts": part.prompts,
                 "shares": more == SHARED, "hybrid": more == HYBRID, "gpus": part.gpus, "rank": 0,
                 "contexts_shared": part.contexts_shared, "method": part.method,
                 "drafter": "" if more in (SHARED, HYBRID) else more,
                 "steps": STEPS * (2 if part.method else 1),  # tokens, of which such a step makes up to two
                 "work": at.work, "path": f"{self.name}.jsonl", "until": until,
                 "cache_bytes": CACHE_BYTES // len(part.backends)}
        environment = {**ENVIRONMENT, "VLLM_CACHE_ROOT": os.path.join(at.work, "cache"), **os.environ}
        if part.invariant:
            environment["VLLM_BATCH_INVARIANT"] = "1"
        if part.sparse:  # whatever the caller's environment has, since nothing else tells the two apart
            environment["VLLM_PLUGINS"] = "hypermla,hypermla_sparse" if backend == OURS else "hypermla"
        open(asked["path"], "w").close()
        self._results = open(asked["path"])
        with open(f"{self.name}.log", "w") as log:
            self._child = subprocess.Popen([sys.executable, WORKER, json.dumps(asked)], stdin=subprocess.PIPE,
                                           stdout=log, stderr=subprocess.STDOUT, env=environment,
                                           start_new_session=True)
        self.host, self.ended = host, None

    def wait(self):
        """Until the engine has started, or has failed to."""
        self._hear()

    def stop(self):
        self.until = 0
        self.end()

    def ask(self, what, shape=None):
        """What it finds, {} if nothing, an "error" among it; None if it has ended."""
        if not self.ended:
            try:
                line = json.dumps({"do": what, "shape": shape, "cpus": self.host.cpus})
                os.write(self._child.stdin.fileno(), line.encode() + b"\n")
            except BrokenPipeError:
                pass  # _hear() says why
            heard = self._hear()
        return None if self.ended else heard[-1] if heard else {}

    def end(self):
        """All that it found but what it was asked for. Its failure is one of the results."""
        self.ask("end")
        self._child.stdin.close()
        self._results.close()
        if self.ended != "end":
            with open(f"{self.name}.log", errors="replace") as file:
                lines = [line for line in file.read().splitlines() if "Error" in line or "error:" in line]
            said = "; ".join([self.ended, *(line[-300:] for line in lines[-2:])])
            self.found.append({"what": "failed", "said": said})
        return self.found

    def _hear(self):
        """What it answers, until it is done or has ended."""
        heard, line, status = [], "", None
        while True:
            line += self._results.readline()
            if line.endswith("\n"):
                one, line = json.loads(line), ""
                if one["what"] == "done":
                    return heard
                (heard if one["what"] in ("run", "profile", "error") else self.found).append(one)
            elif status is not None:
                self.ended = "end" if any(one["what"] == "end" for one in self.found) else f"exit status {status}"
                return heard
            else:
                status = self._child.poll()
                if status is None and time.time() > self.until:
                    os.killpg(self._child.pid, signal.SIGKILL)
                    self._child.wait()
                    self.ended = OVER
                    return heard
                time.sleep(0.01 if status is None else 0)


def ours_failed(workers):
    return OURS in workers and workers[OURS].ended not in (None, "end", OVER)


def take_turns(workers, shape, host, until):
    """{backend: its row}; of processes that end, none, and where ours has failed, of none."""
    of_shape = {name: value for name, value in shape._asdict().items() if name != "new" or value}
    errors, turns = {}, []

    def ask(what, backends):
        found = {backend: workers[backend].ask(what, shape) for backend in backends if backend not in errors}
        errors.update({backend: one for backend, one in found.items() if one is None or "error" in one})
        return found

    order = list(workers)
    ask("prepare", order)  # which may take longer than all turns
    begin = time.time()
    while len(errors) < len(order) and len(turns) < MOST_TURNS and (
            not turns or time.time() < min(begin + TURN_SECONDS, until)):
        if len(turns) % TURNS == 0:
            host.look()
        turns.append(ask("time", order[::-1 if len(turns) % 2 else 1]))  # none is always first, or behind another
        for turn in turns:  # without those that have failed
            for backend in errors.keys() & turn.keys():
                del turn[backend]
        for run in turns[-1].values():
            host.seen(run["host_us"])
        if ours_failed(workers):
            return {}
        if chosen(turns, host.least)[1] == TURNS:
            break
    best, fast = chosen(turns, host.least)
    rows = {backend: {**of_shape, "error": one["error"]} for backend, one in errors.items() if one}
    return rows | {backend: of_shape | row_of([turn[backend] for turn in best], turns=len(turns), fast=fast)
                   for backend in order if backend not in errors}


def run_together(part, number, backends, wanted, agreement, at, host, until):
    """{backend: what its process says}; agreement: the backends that are asked for it."""
    rows = {}
    host.look()
    workers = {backend: Worker(part, backend, number, wanted, backend in agreement, at, host, until)
               for backend in backends}
    for backend in sorted(backends, key=lambda one: one != OURS):  # without ours there is nothing to compare
        if ours_failed(workers):
            workers.pop(backend).stop()
        else:
            workers[backend].wait()
    for shape in wanted:
        alive = {backend: worker for backend, worker in workers.items() if not worker.ended}
        if alive and time.time() < until - 15 and not ours_failed(workers):
            rows[shape] = take_turns(alive, shape, host, until - 15)
    if ours_failed(workers):
        print(f"{part.name} {number}: {OURS} has failed, so {', '.join(backends)} measure no more", flush=True)
    for shape, of in rows.items():
        for backend, row in of.items():
            if number == 0 and "error" not in row and time.time() < until - 10:
                found = workers[backend].ask("profile", shape) or {"error": "its process ended"}
                row |= {"profile_error": found["error"]} if "error" in found else found  # the times stay
            workers[backend].found.append({**row, "what": "row"})
    return {backend: worker.end() for backend, worker in workers.items()}


def against_ours(part, backend, found, at):
    """Compares the texts of a process with ours of as many heads and GPUs without drafts, or with drafts by the
    same method, which lie beside the model. Samples have other prompts, several GPUs and checkpoints other weights; of
    samples those over a cache in FP8 are compared with ours over one."""
    kind = (f"{f'-samples-{part.prompts}-{part.cache}' * part.samples}{'-sparse' * part.sparse}"
            f"{f'-{part.gpus}' * (part.gpus > 1)}{f'-{part.method}' * bool(part.method)}")
    path = os.path.join(at.work, f"texts-{part.heads}{kind}.json")
    for texts in [one["texts"] for one in found if one["what"] == "texts"]:
        if (backend == OURS and (part.drafts == 0 or part.method) and (part.cache == "auto" or part.samples)
                and not part.invariant and not part.contexts_shared):
            with open(path, "w") as file:
                json.dump(texts, file)
        elif os.path.exists(path):
            with open(path) as file:
                found.append({"what": "against", **difference(texts, json.load(file))})


def groups(at):
    """(part, round, backends), in the order in which they are run."""
    gpus = len(driver_versions())
    for part in PARTS:
        if at.parts and part.name not in at.parts:
            continue
        if part.gpus > max(gpus, 1):
            print(f"{part.name}: left out, since it needs {part.gpus} GPUs and nvidia-smi lists {gpus}", flush=True)
            continue
        backends = [backend for backend in part.backends if not at.backends or backend in at.backends]
        for number in range(min(part.rounds, at.rounds)) if backends else ():
            yield part, number, backends[::-1 if number % 2 else 1]


def told(one):
    """A line of the output for a result."""
    if one["what"] != "row" or "error" in one:
        return json.dumps(one)
    shown = ", ".join(f"{name} {median([value for value in one[name] if value is not None])}"
                      for name in ("graph_ms", "wall_ms") if any(one[name]))
    rest = ", ".join(f"{name} {one[name]}" for name in ("queries", "builder_us", "forward_us", "turns", "fast",
                                                        "attention_ms", "kernels_ms", "pause_before_us",
                                                        "pause_behind_us") if one.get(name) is not None)
    new = f" new={one['new']}" if one.get("new") else ""
    return f"b={one['batch']} context={one['context']}{new}{' mixed' * one['mixed']}: {shown}, {rest}"


def main():
    at = parse(sys.argv[1:])
    if at.list:
        for part in PARTS:
            count = len(part.backends) * part.rounds * part.gpus
            print(f"{part.name:22}{count} processes of {len(part.shapes)} shapes: {', '.join(part.backends)}")
        return 0
    os.makedirs(at.work, exist_ok=True)
    end, host = time.time() + at.seconds, Host()
    record, failed, left, hopeless = read_record(at.record), 0, 0, set()
    for part, number, backends in groups(at):
        lacks = {backend: missing(record, part, backend, number, at) for backend in backends}
        wanted = [shape for shape in part.shapes if any(shape in shapes for shapes, _ in lacks.values())]
        agreement = [backend for backend, (_, asked) in lacks.items() if asked]
        backends = backends if wanted else agreement
        if not backends:
            continue
        if end - time.time() < LEAST_SECONDS or part.name in hopeless:
            left += len(backends)
            continue
        if OURS in backends and missing_plugins("vllm.general_plugins"):
            stop(f"{sys.executable} has no plug-ins of hypermla; install its wheel there, or name others by --backends")
        together = run_together(part, number, backends, wanted, agreement, at, host, min(end, time.time() + at.limit))
        if together.get(OURS) and not any(one["what"] == "engine" for one in together[OURS]):
            hopeless.add(part.name)
        for backend in part.backends:
            found = together.get(backend, [])
            against_ours(part, backend, found, at)
            if found:
                merge(record, part, backend, number, found)
            failed += any(one["what"] == "failed" or "error" in one for one in found)
            for one in [one for one in found if one["what"] != "texts"]:
                print(f"{part.name} {backend} {number}: {told(one)}", flush=True)
        write_record(at.record, record)
    print(f"{left} processes are left for the next call; {failed} failed", flush=True)
    return 1 if failed or not record["runs"] else 0


if __name__ == "__main__":
    sys.exit(main())
