#!/usr/bin/env python3
"""Sparse attention: every query attends to the tokens that an indexer chose for it, beside FlashMLA and, by pages of
one token, FlashAttention-3 and FlashInfer.

    tests/benchmark/bench_sparse.py --flashmla=<library> --record=sparse.json
    tests/benchmark/bench_sparse.py --rows='q32-.*-bf16' --rows=q48-h24-bf16 --kernel=cute.mla.flash_mla
    tests/benchmark/bench_sparse.py --rows='prefill-.*' --flashmla=<library>

A row is q<queries of a step>-h<heads>-<bf16 or fp8>; every query has 2048 random slots of a pool of 262144 tokens.
fp8: tokens of 656 bytes (512 e4m3 with 4 fp32 factors, 64 bfloat16 of RoPE), which is all that FlashMLA's kernel for
decoding takes; its time also stands in the rows of bf16, beside FlashMLA's kernel for prefill, by which engines decode
over bf16. Both take 64 and 128 heads: fewer are padded for them. The others take bf16. prefill-..: of the first 32768
tokens. Lists are planned outside the time. A burst is one CUDA graph of some milliseconds after a rest, a sustained
time the same graph without a pause. Every output is compared with float32, also with a tenth of the slots missing,
lists of different lengths and attention sinks.
"""

import datetime
import math
import pathlib
import re
import sys
import time
import types

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import engine_worker  # noqa: E402
import harness  # noqa: E402
from harness import SCALE, TOLERANCE, torch  # noqa: E402

TOP_K, POOL, PAGE = 2048, 262144, 64
QUERIES, HEADS = (1, 8, 32, 128, 256), (128, 64, 16)
ROW = re.compile(r"(prefill-)?q([1-9]\d*)-h([1-9]\d*)-(bf16|fp8)")
PREFILLS, PREFILL_POOL = ("prefill-q4096-h128-bf16", "prefill-q4096-h64-bf16"), 32768


def quantised(tokens):
    """Tokens of 576 numbers in the form of 656 bytes."""
    groups = tokens[:, :512].float().view(-1, 4, 128)
    factors = groups.abs().amax(-1).clamp(min=1e-6) / 448
    codes = (groups / factors.unsqueeze(-1)).to(torch.float8_e4m3fn).view(-1, 512).view(torch.uint8)
    return torch.cat((codes, factors.view(torch.uint8), tokens[:, 512:].contiguous().view(torch.uint8)), -1)


def widened(packed):
    """The numbers that such tokens stand for, as the kernels round them."""
    codes = packed[:, :512].contiguous().view(torch.float8_e4m3fn).float().view(-1, 4, 128)
    factors = packed[:, 512:528].contiguous().view(torch.float32)
    latent = (codes * factors.unsqueeze(-1)).view(-1, 512).half()
    return torch.cat((latent, packed[:, 528:].contiguous().view(torch.bfloat16).half()), -1)


class Pool:
    """The cache of all rows, in both forms."""

    def __init__(self):
        generator = torch.Generator("cuda").manual_seed(1)
        self.tokens = torch.randn(POOL, 576, dtype=torch.bfloat16, device="cuda", generator=generator)
        self.packed = quantised(self.tokens)
        self.widened = widened(self.packed)


class Batch:
    def __init__(self, name, pool):
        found = ROW.fullmatch(name)
        self.name, self.queries, self.heads, self.fp8 = name, int(found[2]), int(found[3]), found[4] == "fp8"
        self.prefill, self.slots_of_pool = bool(found[1]), PREFILL_POOL if found[1] else POOL
        generator = torch.Generator("cuda").manual_seed(2)
        self.q = torch.randn(self.queries, self.heads, 576, dtype=torch.bfloat16, device="cuda", generator=generator)
        self.slots = torch.randint(0, self.slots_of_pool, (self.queries, TOP_K), dtype=torch.int32, device="cuda",
                                   generator=generator)
        self.lengths = torch.full((self.queries,), TOP_K, dtype=torch.int32, device="cuda")
        self.sinks, self.pool = None, pool
        self.tokens = pool.widened if self.fp8 else pool.tokens
        self.cache = (pool.packed if self.fp8 else pool.tokens)[:self.slots_of_pool].view(-1, PAGE,
                                                                                          656 if self.fp8 else 576)

    def spoil(self):
        """Makes lists of different lengths with slots that are none, and sinks."""
        generator = torch.Generator("cuda").manual_seed(3)
        random = lambda *shape: torch.rand(shape, device="cuda", generator=generator)
        none = random(self.queries, TOP_K) < 0.1
        beyond = torch.where(random(self.queries, TOP_K) < 0.5, -1, self.slots_of_pool + 5).int()
        self.slots = torch.where(none, beyond, self.slots)
        self.slots[::3, :200] = -1  # whole blocks without a token
        self.lengths = (random(self.queries) * (TOP_K + 1)).int()
        self.lengths[::5] = 0
        self.sinks = random(self.heads) * 4 + 2

    def worst(self, o, lse):
        worst = 0.0
        for query in range(0, self.queries, max(1, self.queries // 24)):
            slots = self.slots[query, :self.lengths[query]].long()
            tokens = self.tokens[slots[(slots >= 0) & (slots < self.slots_of_pool)]].float()
            if len(tokens) == 0:
                fits = not o[query].any() and torch.isneginf(lse[query]).all()
                worst = max(worst, 0.0 if fits else math.inf)
                continue
            scores = self.q[query].float() @ tokens.T * SCALE
            of_lse = scores.logsumexp(-1)
            expected = scores.softmax(-1) @ tokens[:, :512]
            if self.sinks is not None:
                expected *= torch.sigmoid(of_lse - self.sinks).unsqueeze(-1)
            off = (o[query].float() - expected).abs().amax(-1) / expected.abs().amax(-1)
            for one in [*off.tolist(), *((lse[query] - of_lse).abs().tolist() if lse is not None else [])]:
                worst = max(worst, math.inf if math.isnan(one) else one)
        return worst


class Ours:
    """More queries than a MlaDecode plans are several steps."""

    title = "ours"
    kernel = ""  # by --kernel
    refuses = staticmethod(lambda batch: None)

    def __init__(self, batch):
        self.batch = batch
        most = harness.hypermla.MlaDecode.MAX_REQUESTS
        self.steps = [(slice(first, first + most), harness.hypermla.MlaDecode(
            heads=batch.heads, max_requests=min(most, batch.queries - first), max_tokens=TOP_K, page=PAGE, scale=SCALE,
            sparse=True, cache_format="fp8_656" if batch.fp8 else "as_queries", device="cuda", kernel=self.kernel))
            for first in range(0, batch.queries, most)]
        self.out = torch.full((batch.queries, batch.heads, 512), math.nan, dtype=torch.bfloat16, device="cuda")
        self.lse = torch.full((batch.queries, batch.heads), math.nan, device="cuda")
        self.plan()

    def plan(self, stream=None):
        for own, decode in self.steps:
            decode.plan(self.batch.lengths[own], stream=stream and stream.cuda_stream)

    def run(self, stream=None):
        batch = self.batch
        for own, decode in self.steps:
            decode.run(batch.q[own], batch.cache, batch.slots[own], self.out[own], self.lse[own],
                       stream and stream.cuda_stream, batch.sinks)
        return self.out, self.lse

    def check(self):
        for _, decode in self.steps:
            decode.check()

    def explain(self):
        return self.steps[0][1].explain()


def padded(batch):
    """Its queries with 64 or 128 heads."""
    padding = torch.zeros(batch.queries, (64 if batch.heads <= 64 else 128) - batch.heads, 576, dtype=torch.bfloat16,
                          device="cuda")
    return torch.cat((batch.q, padding), 1)


class FlashMla:
    title = "FlashMLA, fp8"
    refuses = staticmethod(lambda batch: "for decoding" if batch.prefill else
                           "at most 128 heads" if batch.heads > 128 else None)

    def __init__(self, batch):
        batch.tokens = batch.pool.widened
        self.q = padded(batch).unsqueeze(1)
        self.packed = batch.pool.packed.view(POOL // PAGE, PAGE, 1, -1).view(torch.float8_e4m3fn)
        self.slots, self.work = batch.slots.unsqueeze(1), (None, None)
        self.op = torch.ops._flashmla_C.sparse_decode_fwd.default
        self.run()

    def run(self, _=None):
        given = self.q, self.packed, self.slots, None, None, *self.work, None, None, None, 512, SCALE, None, False
        o, lse, *self.work = self.op(*given[:len(self.op._schema.arguments)])  # batch invariance came with vLLM 0.33
        return o.squeeze(1), None


class FlashMlaPrefill:
    title = "FlashMLA, bf16"
    refuses = staticmethod(lambda batch: "caches in 16 bits only" if batch.fp8 else
                           "at most 128 heads" if batch.heads > 128 else None)

    def __init__(self, batch):
        self.op = torch.ops._flashmla_C.sparse_prefill_fwd.default
        given = padded(batch), batch.cache.view(-1, 1, 576), batch.slots.unsqueeze(1), SCALE, 512, None, None, None
        self.given = given[:len(self.op._schema.arguments)]  # sinks, lengths and outputs came later

    def run(self, _=None):
        return self.op(*self.given)[0], None


class PagesOfOne:
    """A library of bench_engine.py, for which a list is a request with pages of 1 token."""

    refuses = staticmethod(lambda batch: "caches in 16 bits only" if batch.fp8 else None)

    def __init__(self, batch):
        counts, starts = [TOP_K] * batch.queries, list(range(batch.queries + 1))
        integers = lambda values: torch.tensor(values, dtype=torch.int32, device="cuda")
        self.cache = batch.cache.view(-1, 1, 576)
        self.library = self.kind(types.SimpleNamespace(
            row=engine_worker.Row.named(f"b{batch.queries}-q1-t{TOP_K}-h{batch.heads}-p1"), queries=[1] * batch.queries,
            lengths=counts, counts=counts, starts=starts, device_lengths=integers(counts),
            device_starts=integers(starts), table=batch.slots, tables=list(batch.slots), q=batch.q,
            o=torch.empty_like(batch.q[..., :512], memory_format=torch.contiguous_format)), "")
        self.library.plan()

    def run(self, _=None):
        return self.library.run(self.cache)


class FlashAttention3(PagesOfOne):
    title, kind = "FlashAttention-3", engine_worker.FlashAttention3


class FlashInfer(PagesOfOne):
    title, kind = "FlashInfer", engine_worker.FlashInfer


PEERS = {"flashmla": FlashMla, "flashmla_prefill": FlashMlaPrefill, "fa3": FlashAttention3, "flashinfer": FlashInfer}


def why_not_loaded(key, arguments):
    """Loads a peer. Returns why it could not, else None."""
    if key != "flashinfer":
        key = key.removesuffix("_prefill")
        return harness.why_not_loaded(key, getattr(arguments, key))
    if not arguments.flashinfer:
        return "no library given (--flashinfer=<path>)"
    try:
        engine_worker.FlashInfer.load(arguments.flashinfer)
    except Exception as error:  # of any type: the others have their turn
        return str(error).splitlines()[0]


def measure(machine, kind, batch):
    try:
        library = kind(batch)
        o, lse = library.run()
        torch.cuda.synchronize()
        worst = batch.worst(o[:, :batch.heads], lse)
        found = {}
        if kind is Ours:
            spoilt = Batch(batch.name, batch.pool)
            spoilt.spoil()
            again = Ours(spoilt)
            worst = max(worst, spoilt.worst(*again.run()))
            again.check()
            found = {"kernel": library.explain(), "plan_us": machine.measure(library.plan)[0]}
        found |= {"correct": worst <= TOLERANCE, "difference": worst if math.isfinite(worst) else None}
        found["burst_us"], found["sustained_us"] = machine.measure(library.run)
        return found
    except Exception as error:  # of any type: the other libraries have their turn
        return {"failed": (str(error) or type(error).__name__).splitlines()[0]}


def main():
    parser = harness.row_parser(__doc__, "flashmla", "FlashMLA")
    parser.add_argument("--fa3", metavar="PATH", help="library with the torch operators of FlashAttention-3")
    parser.add_argument("--flashinfer", metavar="PATH", help="FlashInfer's module, as bench_engine.py takes it")
    parser.add_argument("--kernel", default="", help="pins ours by its full name, cute.mla.flash_mla for instance")
    arguments = parser.parse_args()
    Ours.kernel = arguments.kernel
    known = [f"q{queries}-h{heads}-{form}" for form in ("bf16", "fp8") for heads in HEADS for queries in QUERIES]
    names = harness.rows_named([*known, *PREFILLS], arguments.rows, ROW.fullmatch)
    if arguments.list:
        return print("\n".join(names))
    if not torch or not torch.cuda.is_available():
        harness.stop("it needs a GPU and a Python with PyTorch for it")
    libraries = {"ours": Ours}
    for key, peer in PEERS.items():
        if why := why_not_loaded(key, arguments):
            print(f"{peer.title}: skipped, {why}")
        else:
            libraries[key] = peer
    machine, pool, begin = harness.Machine("cuda", arguments.seconds), Pool(), time.monotonic()
    table = harness.Table(f"Sparse decoding on {machine.name}", arguments.out_dir,
                          ["row", "library", "burst_us", "sustained_us", "plan_us", "note"])
    record = {"schema": 1, "kind": "sparse", "date": datetime.date.today().isoformat(),
              "device": {"name": machine.name}, "torch": torch.__version__, "rows": []}
    wrong, left = [], []
    for name in names:
        if time.monotonic() - begin > arguments.limit:
            left.append(name)
            continue
        batch, found = Batch(name, pool), {}
        own = batch.tokens
        for key, kind in libraries.items():
            if kind.refuses(batch):
                continue
            batch.tokens = own  # which FlashMLA, in FP8, reads in another form
            found[key] = one = measure(machine, kind, batch)
            table.add(row=name, library=kind.title, note=harness.row_note(one), **one)
        wrong += [name] if not found["ours"].get("correct") else []
        record["rows"].append({"row": name, "queries": batch.queries, "heads": batch.heads, **found})
        if arguments.record:
            harness.write_json(arguments.record, record)
    table.finish(*([f"Left out by --limit: {' '.join(left)}"] if left else []))
    if wrong:
        harness.stop(f"an output of ours is wrong or missing: {' '.join(wrong)}")


if __name__ == "__main__":
    main()
