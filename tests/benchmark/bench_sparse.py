#!/usr/bin/env python3
"""Sparse decoding: every query attends to the tokens that an indexer chose for it, beside FlashMLA.

    tests/benchmark/bench_sparse.py --flashmla=<library> --record=sparse.json
    tests/benchmark/bench_sparse.py --rows='q32-.*-bf16' --rows=q48-h24-bf16 --kernel=cute.mla.flash_mla

A row is q<queries of a step>-h<heads>-<bf16 or fp8>; every query has 2048 random slots of a pool of 262144 tokens.
fp8: tokens of 656 bytes (512 e4m3 with 4 fp32 factors, 64 bfloat16 of RoPE), which is all that FlashMLA takes; its
time also stands in the rows of bf16. It takes 64 and 128 heads: fewer are padded to 64 for it, as engines do. Lists are
planned outside the time. A burst is one CUDA graph of some milliseconds after a rest, a sustained time the same graph
without a pause. Every output is compared with float32, also with a tenth of the slots missing, lists of different
lengths and attention sinks.
"""

import datetime
import math
import pathlib
import re
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import harness  # noqa: E402
from harness import torch  # noqa: E402

SCALE = 192**-0.5
TOP_K, POOL, PAGE = 2048, 262144, 64
TOLERANCE = 0.02  # of the largest element of a query and head; and of exp(log-sum-exp)
QUERIES, HEADS = (1, 8, 32, 128, 256), (128, 64, 16)


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
        found = re.fullmatch(r"q(\d+)-h(\d+)-(bf16|fp8)", name)
        if not found:
            raise ValueError(f"'{name}' is no row; --help says what is")
        self.name, self.queries, self.heads, self.fp8 = name, int(found[1]), int(found[2]), found[3] == "fp8"
        generator = torch.Generator("cuda").manual_seed(2)
        self.q = torch.randn(self.queries, self.heads, 576, dtype=torch.bfloat16, device="cuda", generator=generator)
        self.slots = torch.randint(0, POOL, (self.queries, TOP_K), dtype=torch.int32, device="cuda",
                                   generator=generator)
        self.lengths = torch.full((self.queries,), TOP_K, dtype=torch.int32, device="cuda")
        self.sinks, self.pool = None, pool
        self.tokens = pool.widened if self.fp8 else pool.tokens
        self.cache = (pool.packed if self.fp8 else pool.tokens).view(POOL // PAGE, PAGE, -1)

    def spoil(self):
        """Makes lists of different lengths with slots that are none, and sinks."""
        generator = torch.Generator("cuda").manual_seed(3)
        random = lambda *shape: torch.rand(shape, device="cuda", generator=generator)
        none = random(self.queries, TOP_K) < 0.1
        beyond = torch.where(random(self.queries, TOP_K) < 0.5, -1, POOL + 5).int()
        self.slots = torch.where(none, beyond, self.slots)
        self.slots[::3, :200] = -1  # whole blocks without a token
        self.lengths = (random(self.queries) * (TOP_K + 1)).int()
        self.lengths[::5] = 0
        self.sinks = random(self.heads) * 4 + 2

    def worst(self, o, lse):
        worst = 0.0
        for query in range(0, self.queries, max(1, self.queries // 24)):
            slots = self.slots[query, :self.lengths[query]].long()
            tokens = self.tokens[slots[(slots >= 0) & (slots < POOL)]].float()
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
    title = "ours"
    kernel = ""  # by --kernel

    def __init__(self, batch):
        self.batch = batch
        self.decode = harness.hypermla.MlaDecode(
            heads=batch.heads, max_requests=batch.queries, max_tokens=TOP_K, page=PAGE, scale=SCALE, sparse=True,
            cache_format="fp8_656" if batch.fp8 else "as_queries", device="cuda", kernel=self.kernel)
        self.out = torch.full((batch.queries, batch.heads, 512), math.nan, dtype=torch.bfloat16, device="cuda")
        self.lse = torch.full((batch.queries, batch.heads), math.nan, device="cuda")
        self.plan()

    def plan(self, stream=None):
        self.decode.plan(self.batch.lengths, stream=stream and stream.cuda_stream)

    def run(self, stream=None):
        batch = self.batch
        return self.decode.run(batch.q, batch.cache, batch.slots, self.out, self.lse, stream and stream.cuda_stream,
                               batch.sinks)


class FlashMla:
    title = "FlashMLA, fp8"

    def __init__(self, batch):
        if batch.heads > 128:
            raise ValueError("at most 128 heads")
        self.heads = 64 if batch.heads <= 64 else 128
        padding = torch.zeros(batch.queries, self.heads - batch.heads, 576, dtype=torch.bfloat16, device="cuda")
        self.q = torch.cat((batch.q, padding), 1).unsqueeze(1)
        self.packed = batch.pool.packed.view(POOL // PAGE, PAGE, 1, -1).view(torch.float8_e4m3fn)
        self.slots, self.work = batch.slots.unsqueeze(1), (None, None)
        self.run()

    def run(self, _=None):
        o, lse, *self.work = torch.ops._flashmla_C.sparse_decode_fwd(
            self.q, self.packed, self.slots, None, None, *self.work, None, None, None, 512, SCALE, None)
        return o.squeeze(1), None


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
            again.decode.check()
            found = {"kernel": library.decode.explain(), "plan_us": machine.measure(library.plan)[0]}
        found |= {"correct": worst <= TOLERANCE, "difference": worst if math.isfinite(worst) else None}
        found["burst_us"], found["sustained_us"] = machine.measure(library.run)
        return found
    except Exception as error:  # of any type: the other libraries have their turn
        return {"failed": (str(error) or type(error).__name__).splitlines()[0]}


def main():
    parser = harness.row_parser(__doc__, "flashmla", "FlashMLA")
    parser.add_argument("--kernel", default="", help="pins ours by its full name, cute.mla.flash_mla for instance")
    arguments = parser.parse_args()
    Ours.kernel = arguments.kernel
    known = [f"q{queries}-h{heads}-{form}" for form in ("bf16", "fp8") for heads in HEADS for queries in QUERIES]
    names = harness.rows_named(known, arguments.rows)
    if arguments.list:
        return print("\n".join(names))
    if not torch or not torch.cuda.is_available():
        harness.stop("it needs a GPU and a Python with PyTorch for it")
    libraries = {"ours": Ours, "flashmla": FlashMla}
    if why := harness.why_not_loaded("flashmla", arguments.flashmla):
        del libraries["flashmla"]
        print(f"FlashMLA: skipped, {why}")
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
        for key, kind in libraries.items():
            batch.tokens = batch.tokens if key == "ours" else pool.widened
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
