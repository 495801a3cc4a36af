"""What bench_engine.py starts for each library: a process that makes the batches of rows, runs the library on them and
answers with times and with how far its outputs are from float32. It may run several, on the same tensors.

    engine_worker.py ours '{"library": null, "kernel": "", "seconds": 0.4}'
    engine_worker.py ours,known,dense '{"library": null, "kernel": "", "seconds": 0.4}'

Requests come on stdin and answers go to stdout, one JSON object a line each; the first answer is about the device.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import random
import re
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import harness  # noqa: E402
from harness import REST, SCALE, TOLERANCE, Graph, torch  # noqa: E402

# Where weights are rounded to e4m3, too, each by up to 1/16. The largest of 18400 rows of 500 tokens
# (b115-q4-t500-h40-e4m3) was 0.045 of FlashMLA's, 0.063 of ours.
E4M3_TOLERANCE = 0.08
MIXED = (1, 8, 2, 4, 3, 4, 6, 4)  # queries of requests in turn; 4 on average
SHORT = 1024  # tokens of all requests but the long one
LONGEST = 131072  # tokens that the engine is made for


@dataclasses.dataclass(frozen=True)
class Row:
    """A batch. t: tokens of each request, their mean (normal), four times the fewest (heavy) or the most (long). Of
    `shared` tokens, whole pages of them, all requests have the same ones."""

    name: str
    shape: str
    b: int
    q: int  # 0: MIXED
    t: int
    h: int
    page: int
    form: str = ""  # bfloat16; fp8: the cache is e4m3 with one factor; e4m3: the queries, too
    shared: int = 0

    @staticmethod
    def named(name):
        """The row of that name, None if it is no name."""
        size = r"([1-9]\d*)"
        found = re.fullmatch(rf"(?:(normal|heavy|long|mixed|shared{size})-)?b{size}-q(1to8|[1-9]\d*)-t{size}-h{size}"
                             rf"(?:-p{size})?(?:-(fp8|e4m3))?", name)
        if not found:
            return None
        shape, shared, *sizes, page, form = found.groups()
        b, q, t, h = (0 if size == "1to8" else int(size) for size in sizes)
        if int(shared or 0) >= t:
            return None
        return Row(name, shape or "", b, q, t, h, int(page or 64), form or "", int(shared or 0))

    def queries(self, alike):
        """Queries of each request; alike: as many in all, the same for each."""
        if self.q:
            return [self.q] * self.b
        mixed = list(itertools.islice(itertools.cycle(MIXED), self.b))
        return [max(1, round(sum(mixed) / self.b))] * self.b if alike else mixed

    def lengths(self):
        """Tokens of each request: the same for every number of heads, queries and tokens of a page."""
        dice = random.Random(f"{self.shape} {self.b} {self.t}")
        draw = {"normal": lambda i: round(dice.gauss(self.t, self.t / 2)),
                "heavy": lambda i: min(LONGEST, int(self.t / 4 * dice.paretovariate(1))),
                "long": lambda i: self.t if i == self.b // 2 else SHORT}.get(self.shape, lambda i: self.t)
        return [max(draw(i), self.q or max(MIXED)) for i in range(self.b)]


class Batch:
    """The tensors of a row: every process makes the same ones."""

    def __init__(self, row, alike):
        self.row, self.lengths, self.queries = row, row.lengths(), row.queries(alike)
        self.starts = [0, *itertools.accumulate(self.queries)]
        self.counts = [-(-length // row.page) for length in self.lengths]  # pages of each request
        shared = row.shared // row.page  # pages
        pages = shared + sum(count - shared for count in self.counts)
        bytes_of_layer = pages * row.page * 576 * (1 if row.form else 2)
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        self.layers = max(2, math.ceil(max(4 * l2, 240e6) / bytes_of_layer))
        dice = torch.Generator(device="cuda").manual_seed(7)
        normal = lambda shape, deviation: torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(
            0, deviation, generator=dice)
        # Where numbers are e4m3 these are their factors; 448 times them is 5 deviations.
        self.cache_scale, self.q_scale = (torch.full((1,), 5 * deviation / 448, device="cuda")
                                          for deviation in (0.1, 10))
        e4m3 = lambda values, scale: (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        self.caches = [normal((pages, row.page, 576), 0.1) for _ in range(self.layers)]
        if row.form:
            self.caches = [e4m3(cache, self.cache_scale) for cache in self.caches]
        self.q = normal((self.starts[-1], row.h, 576), 10)  # sharp enough that a missing token shows
        self.o = torch.empty_like(self.q[..., :512], memory_format=torch.contiguous_format)
        if row.form == "e4m3":
            self.q = e4m3(self.q, self.q_scale)
        self.lse = torch.empty((self.starts[-1], row.h), dtype=torch.float32, device="cuda")
        order = torch.randperm(pages, generator=dice, device="cuda").int()
        prefix, *own = order.split([shared, *(count - shared for count in self.counts)])
        self.tables = [torch.cat((prefix, one)) for one in own]  # pages of each request
        self.table = torch.nn.utils.rnn.pad_sequence(self.tables, batch_first=True)
        self.device_lengths, self.device_starts = (torch.tensor(values, dtype=torch.int32, device="cuda")
                                                   for values in (self.lengths, self.starts))

    def worst(self, layer, o, lse, tables):
        """Largest difference from attention in float32, as TOLERANCE counts it; tables: the pages of each request."""
        worst = torch.zeros((), device="cuda")
        for pages, length, queries, start in zip(tables, self.lengths, self.queries, self.starts):
            tokens = self.caches[layer].view(torch.uint8)[pages].view(self.caches[layer].dtype)  # no e4m3 is indexed
            tokens = tokens.view(-1, 576)[:length].float() * (self.cache_scale if self.row.form else 1)  # (length, 576)
            step = max(1, 2**27 // (self.row.h * length))  # queries at once: half a gigabyte of scores
            for first in range(0, queries, step):
                here = slice(start + first, start + min(first + step, queries))
                q = self.q[here].float() * (self.q_scale if self.row.form == "e4m3" else 1)
                scores = q @ tokens.T * SCALE  # (step, heads, length)
                last = length - queries + first + torch.arange(scores.shape[0], device="cuda")
                scores.masked_fill_(torch.arange(length, device="cuda") > last[:, None, None], -math.inf)
                expected = scores.softmax(-1) @ tokens[:, :512]
                share = (o[here] - expected).abs().amax(-1) / expected.abs().amax(-1)
                worst = torch.maximum(worst, share.max())
                if lse is not None:
                    worst = torch.maximum(worst, (lse[here] - scores.logsumexp(-1)).abs().max())
        return worst.item()


@functools.lru_cache(maxsize=1)
def batch_of(row, alike):
    """One for all libraries of a process that take the same."""
    return Batch(row, alike)


@functools.cache
def others():
    """What an engine runs between two layers, in small: a kernel that reads more than L2 holds, then a matrix product
    by which ours cannot start early, and some others. Instructions and numbers of a layer are cold behind them."""
    numbers = torch.ones(max(2 * torch.cuda.get_device_properties(0).L2_cache_size, 128 << 20) // 4, device="cuda")
    weights, few = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda"), torch.ones(64, 1024, device="cuda")
    one, out = weights[:1].clone(), torch.empty_like(weights[:1])

    def run():
        numbers.sum()
        few.sort()
        torch.layer_norm(few, (1024,))
        torch.mm(one, weights, out=out)

    run()
    return run


class Library:
    """What is measured: plan() divides the work of a batch, run(cache) returns outputs and log-sum-exps or None."""

    alike = True  # a batch has as many queries for each request
    refuses = staticmethod(lambda row: "bfloat16 only" if row.form else None)  # or why it cannot run the row

    @staticmethod
    def load(path):
        torch.ops.load_library(path)

    def __init__(self, batch, kernel):
        self.batch, self.row, self.causal = batch, batch.row, max(batch.queries) > 1
        self.tables = batch.tables  # pages of each request, where tokens are read

    def plan_us(self):
        """Microseconds of a plan, a few times; empty where there is none."""
        graph = Graph([self.plan] * 200)  # so many that the start of the graph counts little
        return [graph.burst() for _ in range(3)]

    def about(self):
        return {}


class Ours(Library):
    title, alike, shared_prefixes = "HyperMLA", False, False
    refuses = staticmethod(lambda row: None)
    load = staticmethod(lambda _: harness.hypermla.MlaDecode)  # throws where the package has none

    def __init__(self, batch, kernel):
        super().__init__(batch, kernel)
        self.decode = harness.hypermla.MlaDecode(
            heads=self.row.h, max_requests=self.row.b, max_queries=max(batch.queries),
            max_tokens=max(LONGEST, *batch.lengths), page=self.row.page, dtype="bfloat16", causal=True, scale=SCALE,
            split=0, kernel=kernel, cache_format="fp8_576" if self.row.form else "as_queries",
            fp8_queries=self.row.form == "e4m3", shared_prefixes=self.shared_prefixes)
        scales = {"cache_scale": batch.cache_scale, "q_scale": batch.q_scale if self.row.form == "e4m3" else None}
        self.scales = scales if self.row.form else {}
        self.starts = None if self.row.q else batch.device_starts

    def plan(self):
        self.decode.plan(self.batch.device_lengths, self.starts,
                         block_table=self.batch.table if self.shared_prefixes else None)

    def run(self, cache):
        batch = self.batch
        cache = cache.view(torch.uint8) if self.row.form else cache
        return self.decode.run(batch.q, cache, batch.table, out=batch.o, lse=batch.lse, **self.scales)

    def about(self):
        self.decode.check()
        return {"kernel": self.decode.explain(), "workspace_bytes": self.decode.workspace_bytes}


class OursShared(Ours):
    title, shared_prefixes = "HyperMLA, shared prefixes", True


class OursUniform(Ours):
    title, alike = "HyperMLA, as many queries of each request", True
    refuses = staticmethod(lambda row: "the queries are uniform" if row.q else None)


class OursKnown(Library):
    """The kernel of MlaDecode, or if only that calls it the fastest of the others, with a work list that the host made:
    a Kernel for each layer, and one workspace."""

    title, dense = "HyperMLA, lengths known to the host", False
    refuses = staticmethod(lambda row: "bfloat16, and as many queries and whole pages of each request, only"
                           if row.shape or row.form or not row.q or row.t % row.page else None)
    load = staticmethod(lambda _: harness.hypermla.Kernel)

    def __init__(self, batch, kernel):
        super().__init__(batch, kernel)
        row = self.row
        self.problem = {"b": row.b, "s": row.q, "t": row.t, "h": row.h, "dtype": "bfloat16", "causal": True,
                        "fused": True, "tokens_first": True, "page": 0 if self.dense else row.page}
        self.name = Ours(batch, kernel).decode.explain().split(",")[0]
        try:
            harness.hypermla.Kernel(self.name, **self.problem)
        except harness.hypermla.Error:
            sizes = {key: self.problem[key] for key in ("b", "s", "t", "h", "dtype", "causal", "page")}
            choices = harness.hypermla.choose(language="cute", **sizes)
            self.name = next(choice.kernel for choice in choices if choice.path == "latent")
        if self.dense:
            self.tables = torch.arange(len(batch.caches[0]), device="cuda").view(row.b, -1)
        self.kernels, self.workspace = {}, {}

    def plan(self):
        """Kernels have theirs when they are prepared."""

    def plan_us(self):
        return []

    def kernel_of(self, cache):
        batch, row = self.batch, self.row
        bound = {"q": batch.q.view(row.b, row.q, row.h, 576), "cache": cache, "block_table": batch.table,
                 "o": batch.o.view(row.b, row.q, row.h, 512), "lse": batch.lse.view(row.b, row.q, row.h)}
        if self.dense:
            bound["cache"] = cache.view(row.b, row.t, 576)
        kernel = harness.hypermla.Kernel(self.name, **self.problem)
        for info in kernel.tensors:
            if info.role == "workspace" and info.name not in self.workspace:
                self.workspace[info.name] = torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="cuda")
            kernel.bind(info.name, (self.workspace if info.role == "workspace" else bound)[info.name])
        kernel.prepare()
        return kernel

    def run(self, cache):
        key = cache.data_ptr()
        if key not in self.kernels:
            self.kernels[key] = self.kernel_of(cache)
        self.kernels[key].run(torch.cuda.current_stream())
        return self.batch.o, self.batch.lse

    def about(self):
        return {"kernel": self.name}


class OursDense(OursKnown):
    title, dense = "HyperMLA, a dense cache", True


class FlashMla(Library):
    title = "FlashMLA"
    refuses = staticmethod(lambda row: "bfloat16 only" if row.form else
                           None if row.page == 64 else "pages of 64 tokens only")

    def plan(self):
        self.work = self.splits = None  # the next run makes them

    def run(self, cache):
        batch = self.batch
        q = batch.q.view(self.row.b, -1, self.row.h, 576)
        o, _, self.work, self.splits = torch.ops._flashmla_C.dense_decode_fwd(
            q, cache.unsqueeze(2), 512, batch.device_lengths, batch.table, SCALE, self.causal, self.work, self.splits,
            None)
        return o.view(batch.o.shape), None

    def plan_us(self):
        def planned():
            self.plan()
            self.run(self.batch.caches[0])

        both, alone = Graph([planned] * 10), Graph([lambda: self.run(self.batch.caches[0])] * 10)
        return [both.burst() - alone.burst() for _ in range(3)]


class FlashMlaFp8(Library):
    """Queries and cache in e4m3: vLLM's fork, _flashmla_extension_C."""

    title = "FlashMLA, FP8"
    refuses = staticmethod(lambda row: "queries and caches in e4m3, pages of 64 tokens only"
                           if row.form != "e4m3" or row.page != 64 else None)

    def plan(self):
        rows = max(self.batch.queries) * self.row.h
        self.work = torch.ops._flashmla_extension_C.get_mla_decoding_metadata_dense_fp8(
            self.batch.device_lengths, rows, 1)

    def run(self, cache):
        batch = self.batch
        o, _ = torch.ops._flashmla_extension_C.fwd_kvcache_mla_fp8(
            batch.q.view(self.row.b, -1, self.row.h, 576), cache.unsqueeze(2), 512, batch.device_lengths, batch.table,
            SCALE, self.causal, *self.work, batch.q_scale, batch.cache_scale)
        return o.view(batch.o.shape), None


class FlashAttention3(Library):
    title = "FlashAttention-3, latent"

    def sizes(self):
        batch = self.batch
        return {"max_seqlen_q": max(batch.queries), "max_seqlen_k": max(batch.lengths), "is_causal": self.causal,
                "cu_seqlens_q": batch.device_starts, "seqused_k": batch.device_lengths, "window_size_left": -1,
                "window_size_right": -1}

    def plan(self):
        op = torch.ops._vllm_fa3_C.get_scheduler_metadata.default
        self.work = op(*harness.operator_arguments(op, {
            **self.sizes(), "batch_size": self.row.b, "num_heads": self.row.h, "num_heads_k": 1, "headdim": 64,
            "headdim_v": 512, "qkv_dtype": torch.bfloat16, "page_size": self.row.page}))

    def run(self, cache):
        op, (latent, rope) = torch.ops._vllm_fa3_C.fwd.default, cache.unsqueeze(2).split((512, 64), -1)
        q_latent, q_rope = self.batch.q.split((512, 64), -1)
        return op(*harness.operator_arguments(op, {
            **self.sizes(), "q": q_rope, "q_v": q_latent, "k": rope, "v": latent, "page_table": self.batch.table,
            "softmax_scale": SCALE, "scheduler_metadata": self.work, "cp_world_size": 1}))[0], None


class FlashInfer(Library):
    title = "FlashInfer"

    @staticmethod
    def load(path):
        """Its module for bfloat16 and sm_90 as its compiler leaves it; tvm_ffi is installed or lies beside it."""
        sys.path.append(str(pathlib.Path(path).resolve().parent))
        import tvm_ffi
        FlashInfer.module = tvm_ffi.load_module(str(path))

    def __init__(self, batch, kernel):
        super().__init__(batch, kernel)
        self.floats, self.integers = (torch.empty(size << 20, dtype=torch.uint8, device="cuda") for size in (256, 8))
        self.staging = torch.empty(self.integers.shape, dtype=torch.uint8, pin_memory=True)
        self.pages = torch.cat(batch.tables)
        self.host = [torch.tensor(values, dtype=torch.int32)
                     for values in (batch.starts, [0, *itertools.accumulate(batch.counts)], batch.lengths)]

    def plan(self):
        """On the host, which needs the lengths there."""
        self.work, used = self.module.plan(self.floats, self.integers, self.staging, *self.host, self.row.h, 512,
                                           self.causal)
        self.integers[:used].copy_(self.staging[:used], non_blocking=True)

    def plan_us(self):
        times = []
        for _ in range(4):
            begin = time.perf_counter()
            self.plan()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e6)
        return times[1:]

    def run(self, cache):
        batch = self.batch
        (q_latent, q_rope), (latent, rope) = (tensor.split((512, 64), -1) for tensor in (batch.q, cache))
        self.module.run(self.floats, self.integers, self.work, q_latent, q_rope, latent, rope, self.pages, batch.o,
                        None, int(self.causal), self.row.h, self.row.page, SCALE, True, 1.0, 1.0, None)
        return batch.o, None


FORMS = {"uniform": OursUniform, "known": OursKnown, "dense": OursDense}  # that ours is compared with
OURS = {"ours": Ours, "shared_prefixes": OursShared, **FORMS}
PEERS = {"flashmla": FlashMla, "flashmla_fp8": FlashMlaFp8, "fa3": FlashAttention3, "flashinfer": FlashInfer}
LIBRARIES = {**OURS, **PEERS}


class Job:
    """Answers requests about one library."""

    def __init__(self, key, library, kernel, seconds):
        self.kind, self.kernel, self.seconds = LIBRARIES[key], kernel, seconds
        self.library = self.graph = self.others = None
        self.kind.load(library)
        torch.cuda.init()

    def prepare(self, row):
        self.library = self.graph = self.others = None
        torch.cuda.empty_cache()
        row = Row.named(row)
        if why := self.kind.refuses(row):
            return {"refused": why}
        batch = batch_of(row, self.kind.alike and not row.q)
        self.library = self.kind(batch, self.kernel)
        self.library.plan()
        for cache in batch.caches:  # what is compiled, loaded or allocated once
            self.library.run(cache)
        walk = [lambda cache=cache: self.library.run(cache) for cache in batch.caches]
        self.graph = Graph(walk)
        self.graph.us()
        if (rounds := self.graph.rounds()) > 1:
            self.graph = Graph(walk * rounds)
        o, lse = self.graph.last
        for output in (o, lse) if lse is not None else (o,):
            output.fill_(math.nan)
        self.graph.us()
        worst = batch.worst(batch.layers - 1, o, lse, self.library.tables)
        answer = {"layers": batch.layers, "runs": self.graph.count, "queries": len(batch.q),
                  "correct": worst <= (E4M3_TOLERANCE if row.form == "e4m3" else TOLERANCE),
                  "difference": worst if math.isfinite(worst) else None}
        return {**answer, **self.library.about()}

    def burst(self):
        return {"us": [self.graph.burst()]}

    def sustained(self):
        time.sleep(REST)  # as all libraries, whatever ran before
        until = time.monotonic() + self.seconds
        while time.monotonic() < until:
            self.graph.us()
        return figures("sustained_us", [self.graph.us() for _ in range(7)])

    def between(self):
        """A run between others of an engine: what it adds to them, a few times after a rest."""
        if not self.others:
            q, spare, before = self.library.batch.q, self.library.batch.q.clone(), others()
            write = lambda: (before(), q.copy_(spare))  # an engine's queries have just been written
            runs = [lambda cache=cache: self.library.run(cache) for cache in self.library.batch.caches[:24]]
            self.others = Graph([write] * len(runs)), Graph([call for run in runs for call in (write, run)])
            self.others[1].us()
        alone, both = self.others
        time.sleep(REST)
        return {"us": [2 * both.us() - alone.us() for _ in range(3)]}  # us() is of one call; `both` has twice as many

    def plan(self):
        """The last of a row: the graph's work list is gone after it."""
        self.graph = self.others = None
        times = self.library.plan_us()
        return {"plan_us": statistics.median(times)} if times else {}


def figures(name, times):
    """Median and spread, the latter as a share of the median."""
    median = statistics.median(times)
    return {name: median, name.replace("_us", "_spread"): (max(times) - min(times)) / median}


def main(keys, options):
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer

    def answer(make):
        try:
            value = make()
        except Exception as error:  # the parent goes on without this row
            value = {"failed": (str(error) or type(error).__name__).splitlines()[0]}
        answers.write(json.dumps(value) + "\n")

    jobs = {}

    def start():
        jobs.update((key, Job(key, **json.loads(options))) for key in keys.split(","))
        return {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    answer(start)
    for line in sys.stdin:
        request = json.loads(line)
        answer(lambda: getattr(jobs[request.pop("key")], request.pop("do"))(**request))


if __name__ == "__main__":
    main(*sys.argv[1:])
