#!/usr/bin/env python3
"""Prefill as an engine calls it, beside other libraries: requests of any lengths, a plan outside the time.

    tests/benchmark/bench_prefill.py --fa3=<library> --record=prefill.json
    tests/benchmark/bench_prefill.py --rows='.*-h128' --rows='4x700over900-h8'

A row is a batch and its name says all of it: <requests>x<queries of each>[over<tokens of each>[-chunk]]-h<heads>, or
mixed-h<heads>. It is causal, except for a chunk: queries that see all tokens of a range, as of a prefix. All libraries
get the same tensors, with keys and values as engines have them: one [tokens, heads, 256], and RoPE keys of one head,
which are copied to every head for the others. "ours, dense" attends over that copy, too. A burst is one CUDA graph of
some milliseconds after a rest, a sustained time the same graph without a pause. Every output is compared with float32
at some queries. cuDNN takes the requests one after the other, by PyTorch.
"""

import datetime
import itertools
import math
import pathlib
import re
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import harness  # noqa: E402
from harness import SCALE, TOLERANCE, torch  # noqa: E402

MIXED = (4096, 37, 2500, 600, 150, 1200, 9, 75, 300, 1, 1800, 1024)
ROW = re.compile(r"(?:mixed|([1-9]\d*)x([1-9]\d*)(?:over([1-9]\d*)(-chunk)?)?)-h([1-9]\d*)")
ROWS = ("1x8192", "8x1024", "mixed", "1x512over16384-chunk", "1x16384", "4x4096", "32x256", "8x512over4096",
        "8x512over4096-chunk", "2x1over30000", "1x2048", "3x200over5000", "1x100over2000")


class Batch:
    """The tensors of a row."""

    def __init__(self, name):
        b, s, t, chunk, h = ROW.fullmatch(name).groups()
        self.name, self.heads, self.causal = name, int(h), not chunk
        self.queries = [int(s)] * int(b) if b else list(MIXED)
        self.tokens = [int(t)] * int(b) if t else list(self.queries)
        self.query_starts, self.token_starts = ([0, *itertools.accumulate(all)] for all in (self.queries, self.tokens))
        pairs = sum(n * m - (n * (n - 1) / 2 if self.causal else 0) for n, m in zip(self.queries, self.tokens))
        self.flops = 2 * self.heads * (192 + 128) * pairs

    def make(self):
        generator = torch.Generator("cuda").manual_seed(1)
        normal = lambda *shape: torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator)
        tokens = self.token_starts[-1]
        self.q = normal(self.query_starts[-1], self.heads, 192)
        self.k_nope, self.v = normal(tokens, self.heads, 256).split((128, 128), -1)
        self.k_rope = normal(tokens, 1, 64).expand(-1, self.heads, -1)
        self.k = torch.cat((self.k_nope, self.k_rope), -1)
        starts = lambda values: torch.tensor(values, dtype=torch.int32, device="cuda")
        self.device_query_starts, self.device_token_starts = starts(self.query_starts), starts(self.token_starts)

    def worst(self, o, lse):
        """How far outputs are from float32, at queries of every request and the first and last head."""
        worst = 0.0
        for n, m, query, token in zip(self.queries, self.tokens, self.query_starts, self.token_starts):
            rows = torch.tensor(sorted({min(n - 1, i * max(1, n // 23)) for i in range(24)} | {n - 1}), device="cuda")
            for head in {0, self.heads - 1}:
                q, k = self.q[query + rows, head].float(), self.k[token:token + m, head].float()
                scores = q @ k.T * SCALE
                if self.causal:
                    scores.masked_fill_(torch.arange(m, device="cuda") > (m - n + rows)[:, None], -math.inf)
                expected = scores.softmax(-1) @ self.v[token:token + m, head].float()
                off = (o[query + rows, head].float() - expected).abs().amax(-1) / expected.abs().amax(-1)
                worst = max([worst, *off.tolist()], key=lambda x: math.inf if math.isnan(x) else x)
                if lse is not None:
                    off = (lse[query + rows, head] - scores.logsumexp(-1)).abs()
                    worst = max([worst, *off.tolist()], key=lambda x: math.inf if math.isnan(x) else x)
        return worst


class Ours:
    title = "ours"

    def __init__(self, batch):
        self.batch = batch
        self.k = (batch.k_nope, batch.k_rope)
        self.prefill = harness.hypermla.MlaPrefill(
            heads=batch.heads, max_requests=len(batch.queries), max_query_tokens=batch.query_starts[-1],
            max_tokens=max(batch.tokens), causal=batch.causal, scale=SCALE, device="cuda")
        self.out = torch.full((len(batch.q), batch.heads, 128), math.nan, dtype=torch.bfloat16, device="cuda")
        self.lse = torch.full((len(batch.q), batch.heads), math.nan, device="cuda")
        self.plan()

    def plan(self, stream=None):
        self.prefill.plan(self.batch.device_query_starts, self.batch.device_token_starts,
                          stream and stream.cuda_stream)

    def run(self, stream=None):
        self.prefill.run(self.batch.q, self.k, self.batch.v, self.out, self.lse, stream and stream.cuda_stream)
        return self.out, self.lse


class OursDense(Ours):
    title = "ours, dense"

    def __init__(self, batch):
        super().__init__(batch)
        self.k = batch.k


class FlashAttention3:
    title = "FlashAttention-3"

    def __init__(self, batch):
        self.op = torch.ops._vllm_fa3_C.fwd.default
        self.arguments = harness.operator_arguments(self.op, {  # num_splits 0: its own choice, as vLLM has it
            "q": batch.q, "k": batch.k, "v": batch.v, "cu_seqlens_q": batch.device_query_starts,
            "cu_seqlens_k": batch.device_token_starts, "max_seqlen_q": max(batch.queries),
            "max_seqlen_k": max(batch.tokens), "softmax_scale": SCALE, "causal": batch.causal,
            "is_causal": batch.causal, "window_size_left": -1, "window_size_right": -1, "num_splits": 0,
            "cp_world_size": 1})

    def run(self, _=None):
        return self.op(*self.arguments)[0], None


class Cudnn:
    title = "cuDNN, request by request"

    def __init__(self, batch):
        if batch.causal and batch.queries != batch.tokens:
            raise ValueError("its causal mask begins at the first token")
        heads_first = lambda tensor, begin, end: tensor[begin:end].transpose(0, 1).unsqueeze(0)
        self.causal = batch.causal
        self.requests = [
            (heads_first(batch.q, *batch.query_starts[r:r + 2]), heads_first(batch.k, *batch.token_starts[r:r + 2]),
             heads_first(batch.v, *batch.token_starts[r:r + 2])) for r in range(len(batch.queries))]

    def run(self, _=None):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            self.parts = [torch.nn.functional.scaled_dot_product_attention(*one, is_causal=self.causal, scale=SCALE)
                          for one in self.requests]
        return self.parts, None


LIBRARIES = {"ours": Ours, "ours_dense": OursDense, "fa3": FlashAttention3, "cudnn": Cudnn}


def measure(machine, kind, batch):
    try:
        library = kind(batch)
        o, lse = library.run()
        if isinstance(o, list):
            o = torch.cat([part[0].transpose(0, 1) for part in o])
        torch.cuda.synchronize()
        worst = batch.worst(o, lse)
        found = {"correct": worst <= TOLERANCE, "difference": worst if math.isfinite(worst) else None}
        found["burst_us"], found["sustained_us"] = machine.measure(library.run)
        found["tflops"] = batch.flops / found["sustained_us"] / 1e6
        if kind is Ours:
            library.prefill.check()
            found["plan_us"] = machine.measure(library.plan)[0]
        return found
    except Exception as error:  # of any type: the other libraries have their turn
        return {"failed": (str(error) or type(error).__name__).splitlines()[0]}


def main():
    arguments = harness.row_parser(__doc__, "fa3", "FlashAttention-3").parse_args()
    known = [f"{row}-h{heads}" for heads in (128, 16) for row in ROWS]
    names = harness.rows_named(known, arguments.rows, ROW.fullmatch)
    if arguments.list:
        return print("\n".join(names))
    if not torch or not torch.cuda.is_available():
        harness.stop("it needs a GPU and a Python with PyTorch for it")
    libraries = dict(LIBRARIES)
    if why := harness.why_not_loaded("fa3", arguments.fa3):
        del libraries["fa3"]
        print(f"FlashAttention-3: skipped, {why}")
    machine = harness.Machine("cuda", arguments.seconds)
    table = harness.Table(f"Prefill on {machine.name}", arguments.out_dir,
                          ["row", "library", "burst_us", "sustained_us", "tflops", "plan_us", "note"])
    record = {"schema": 1, "kind": "prefill", "date": datetime.date.today().isoformat(),
              "device": {"name": machine.name}, "torch": torch.__version__, "rows": []}
    begin, ratios = time.monotonic(), []
    for name in names:
        if time.monotonic() - begin > arguments.limit:
            print(f"{name}: left out by --limit")
            continue
        batch = Batch(name)
        batch.make()
        found = {key: measure(machine, kind, batch) for key, kind in libraries.items()}
        peers = [one["sustained_us"] for key, one in found.items() if not key.startswith("ours") and one.get("correct")]
        row = {"row": name, "queries": batch.queries[:16], "tokens": batch.tokens[:16], "flops": batch.flops, **found}
        if peers and found["ours"].get("correct"):
            row["sustained_ratio"] = min(peers) / found["ours"]["sustained_us"]
            ratios.append(row["sustained_ratio"])
        record["rows"].append(row)
        for key, one in found.items():
            table.add(row=name, library=libraries[key].title, note=harness.row_note(one), **one)
        if arguments.record:
            harness.write_json(arguments.record, record)
        del batch, found
        torch.cuda.empty_cache()
    table.finish(*([f"best peer / ours, sustained: geometric mean {statistics.geometric_mean(ratios):.2f}, worst "
                    f"{min(ratios):.2f}"] if ratios else []))
    if wrong := [row["row"] for row in record["rows"]
                 if not all(row[key].get("correct", False) for key in ("ours", "ours_dense"))]:
        harness.stop(f"an output of ours is wrong or missing: {' '.join(wrong)}")


if __name__ == "__main__":
    main()
