#!/usr/bin/env python3
"""Attacks MlaDecode: random steps of engines of random capacities, on a GPU or the CPU, against PyTorch in float32.

    tests/attack/decode_runs.py --runs=10000                  # on a GPU
    tests/attack/decode_runs.py --runs=60 --device=cpu
    tests/attack/decode_runs.py --seed=7 --only=123           # repeats one step
    tests/attack/decode_runs.py --compile                     # compiles its kernels, no more; PyTorch is not needed

A step has requests of any lengths and any numbers of queries, in any order: none, one, the most, at the ends of pages
and blocks. Scores are flat or sharp. Slots that no request uses are NaN, table entries behind a request's end name no
page or another's, outputs are poisoned. Tensors are dense, views or apart, at strides of their own. Some engines share
prefixes, of which neighbours have any. The last ones attend to lists of chosen tokens, some of which are none, or to
caches in FP8, under queries in FP8, too, with attention sinks. Then:

  compare  o and log-sum-exps with float32, as near as docs/checking.md asks; what was not asked for keeps its poison
  pad      the step again, padded to the capacity, on a GPU as a replay of one recording: the same bits
  alone    with fixed cuts a request alone, in other rows: the same bits

Every fault is printed with the command that repeats it, the totals as one line of JSON at the end; the exit status is 1
if there was a fault. It needs PyTorch. On a GPU kernels are compiled first, in processes side by side.
"""

import argparse
import concurrent.futures
import itertools
import json
import math
import os
import pathlib
import random
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "benchmark"))
import harness  # noqa: E402
from harness import hypermla, torch  # noqa: E402

LATENT, ROPE, WIDTH = 512, 64, 576
SCALE = 192**-0.5
UNIT = {"bfloat16": 2.0**-9, "float16": 2.0**-11}  # docs/checking.md
POISON = 0x7FA5  # NaN in both types
FORMS = ((True, "as_queries"), (True, "fp8_656"), (False, "fp8_656"), (False, "fp8_576"), (True, "fp8_576"))
PLAIN = 28
E4M3 = PLAIN + 2 * len(FORMS)  # the first engine with queries in FP8
OF_E4M3 = (("cute.mla.flash_mla_v2", 64, True), ("cute.mla.flash_mla_v4", 1, True),  # kernel, page, causal
           ("cute.mla.flash_mla_v2", 16, False), ("cute.mla.flash_mla_v4", 64, True), ("", 128, True))
ENGINES = E4M3 + len(OF_E4M3)
STEPS = 60  # of an engine, until the next one's turn
MOST_SCORES = 2**27  # of a piece of the reference
# What kernels are compiled for: few, so that compilation does not take longer than the runs.
COMPILED = ((64, "bfloat16", True), (16, "bfloat16", True), (1, "bfloat16", True), (64, "float16", True),
            (64, "bfloat16", False), (128, "bfloat16", True), (32, "float16", False))


class Engine:
    """A capacity, its MlaDecode, the memory of its steps and, on a GPU, a recording of one."""

    def __init__(self, seed, number, device):
        dice = random.Random(f"engine {seed} {number}")
        self.gpu, self.device = device == "cuda", device
        page, dtype, causal = COMPILED[number % len(COMPILED)]
        self.e4m3, kernel = number >= E4M3, ""
        if self.e4m3:
            kernel, page, causal = OF_E4M3[number - E4M3]
        self.sparse, self.form = ((False, "fp8_576") if self.e4m3 else
                                  FORMS[(number - PLAIN) % len(FORMS)] if number >= PLAIN else (False, "as_queries"))
        self.fp8 = hypermla.mla_decode.FP8_BYTES[self.form]
        if self.fp8:
            dtype = "bfloat16"
        heads = dice.choice((1, 2, 4, 8, 16, 16, 32, 64, 128, 128, dice.randint(1, 128)))
        queries = 1 if self.sparse else dice.choice((1, 1, 2, 3, 4, 8))
        requests = dice.choice((1, 5, 16, 48, 130, 300, 700))
        self.tokens = dice.choice((700, 3000, 9000, 20000))
        self.pool = 24576  # tokens that the cache has room for
        if not self.gpu:
            heads, requests, self.tokens, self.pool = min(heads, 3), min(requests, 5), 90, 512
        requests = max(1, min(requests, 40000 // (heads * queries)))
        self.options = {
            "heads": heads, "max_requests": requests, "max_queries": queries, "max_tokens": self.tokens, "page": page,
            "dtype": dtype, "causal": causal, "scale": SCALE, "split": dice.choice((0, 0, 128, 512)),
            "lse_base2": dice.random() < 0.3, "empty_lse_positive": dice.random() < 0.3, "device": device,
            "kernel": dice.choice(("", "", "cute.mla.flash_mla", "cute.mla.flash_mla_v1")) if self.gpu else ""}
        if number >= PLAIN:
            self.options |= {"sparse": self.sparse, "cache_format": self.form, "kernel": kernel if self.gpu else "",
                             "fp8_queries": self.e4m3}
            self.options["causal"] &= not self.sparse
        # Dice of its own: the other engines of a seed stay what they are.
        shares = (not self.options["split"] and number < PLAIN and
                  random.Random(f"shares {seed} {number}").random() < 0.5)
        self.options["shared_prefixes"] = self.shared_prefixes = shares
        self.layouts = [dice.choice(("dense", "views", "apart")) for _ in range(3)]  # queries, cache, outputs
        if heads & heads - 1:  # rows of other heads follow each other, see docs/serving.md
            self.layouts[0] = "dense"
        if self.sparse or (self.fp8 and self.layouts[1] == "apart"):
            self.layouts[1] = "dense"
        for name in ("heads", "max_requests", "max_queries", "page", "dtype", "causal", "split", "lse_base2",
                     "empty_lse_positive"):
            setattr(self, name, self.options[name])
        self.graph = None

    def make(self):
        self.decode = hypermla.MlaDecode(**self.options)

    def allocate(self):
        """Memory of the capacity, and what requests are filled with."""
        self.torch_dtype, self.rows = getattr(torch, self.dtype), self.max_requests * self.max_queries + 3
        dice = torch.Generator(self.device).manual_seed(5)
        new = lambda *shape, dtype=self.torch_dtype: torch.zeros(shape, dtype=dtype, device=self.device)
        self.pages = self.pool // self.page
        self.source = new(self.pool, WIDTH).normal_(generator=dice)
        self.source_q = new(self.rows, self.heads, WIDTH).normal_(generator=dice)
        self.sinks = self.cache_scale = self.q_scale = None
        if self.sparse or self.fp8:
            self.sinks = 4 * new(self.heads, dtype=torch.float32).normal_(generator=dice)
        if self.fp8:
            self.quantise(new)
        self.largest_key = self.source.float().norm(dim=-1).max()  # a bound of the reach of scores
        if self.e4m3:
            self.q_scale = torch.full((1,), 12 / 448, device=self.device)
        of_q = lambda *shape: new(*shape, dtype=torch.uint8 if self.e4m3 else self.torch_dtype)
        if self.layouts[0] == "dense":
            self.q = of_q(self.rows, self.heads, WIDTH)
            self.q_parts = self.q[..., :LATENT], self.q[..., LATENT:]
        else:  # heads first, or with gaps; RoPE columns as the last of 192
            latent = (of_q(self.heads, self.rows, LATENT).transpose(0, 1) if self.layouts[0] == "apart" else
                      of_q(self.rows, self.heads, LATENT + 64)[..., :LATENT])
            self.q = self.q_parts = latent, of_q(self.rows, self.heads, 192)[..., 128:]
        if self.fp8:  # bytes; of views, every second page
            apart = 1 + (self.layouts[1] == "views")
            self.cache = new(self.pages, apart, self.page, self.fp8, dtype=torch.uint8).fill_(255)[:, apart - 1]
        elif self.layouts[1] == "dense":
            self.cache = new(self.pages, self.page, WIDTH)
            self.cache_parts = self.cache[..., :LATENT], self.cache[..., LATENT:]
        elif self.layouts[1] == "views":  # layers side by side in a page
            self.whole_cache = new(self.pages, 2, self.page, WIDTH).fill_(math.nan)
            self.cache = self.whole_cache[:, 1]
            self.cache_parts = self.cache[..., :LATENT], self.cache[..., LATENT:]
        else:
            self.cache = self.cache_parts = (new(self.pages, self.page, LATENT),
                                             new(self.pages, self.page, 128)[..., 64:])
        shape = {"dense": (self.rows, self.heads, LATENT), "views": (self.rows, self.heads, LATENT + 64),
                 "apart": (self.heads, self.rows, LATENT)}[self.layouts[2]]
        self.whole_o = new(*shape)
        first = (lambda whole: whole.transpose(0, 1)) if self.layouts[2] == "apart" else lambda whole: whole
        self.o, self.o_bits = (first(one)[..., :LATENT] for one in (self.whole_o, self.whole_o.view(torch.int16)))
        self.whole_lse = new(*(reversed((self.rows, self.heads)) if self.layouts[2] == "apart" else
                               (self.rows, self.heads)), dtype=torch.float32)
        self.lse, self.lse_bits = (first(one) for one in (self.whole_lse, self.whole_lse.view(torch.int32)))
        self.width = self.tokens + 1 if self.sparse else -(-self.tokens // self.page) + 3
        integers = lambda *shape: new(*shape, dtype=torch.int32)
        self.lengths, self.starts = integers(self.max_requests), integers(self.max_requests + 1)
        self.table = integers(self.max_requests, self.width)

    def quantise(self, new):
        """The source as tokens in FP8, by append(), and as the numbers that these stand for."""
        if self.form == "fp8_576":
            self.cache_scale = torch.full((1,), 6 / 448, device=self.device)  # some are beyond 448 times it
        packed = new(self.pool, 1, self.fp8, dtype=torch.uint8)
        hypermla.append(self.source, packed, torch.arange(self.pool, device=self.device), cache_scale=self.cache_scale)
        self.packed = packed[:, 0]
        numbers = lambda columns: self.packed[:, columns].contiguous().view(torch.float8_e4m3fn).float()
        if self.form == "fp8_576":
            self.source = numbers(slice(0, WIDTH)) * self.cache_scale
            return
        factors = self.packed[:, LATENT:LATENT + 16].contiguous().view(torch.float32)
        latent = numbers(slice(0, LATENT)) * factors.repeat_interleave(128, 1)
        self.source = torch.cat([latent, self.packed[:, LATENT + 16:].contiguous().view(torch.bfloat16).float()], 1)

    def run(self, q, table, o, lse):
        self.decode.run(q, self.cache, table, o, lse, sinks=self.sinks, cache_scale=self.cache_scale,
                        q_scale=self.q_scale)

    def poison(self):
        self.whole_o.view(torch.int16).fill_(POISON)
        self.whole_lse.view(torch.int32).fill_(POISON << 16)

    def outputs(self, rows):
        """Bits of the first rows. Afterwards all is poison, or something else was written."""
        bits = self.o_bits[:rows].clone(), self.lse_bits[:rows].clone()
        self.o_bits[:rows] = POISON
        self.lse_bits[:rows] = POISON << 16
        clean = ((self.whole_o.view(torch.int16) == POISON).all() &
                 (self.whole_lse.view(torch.int32) == POISON << 16).all())
        return bits, clean

    def queries(self, first=0, last=None):
        here = slice(first, last)
        return tuple(one[here] for one in self.q) if isinstance(self.q, tuple) else self.q[here]

    def plan(self, lengths, starts):
        self.decode.plan(lengths, starts, block_table=self.table if self.shared_prefixes else None)

    def step_of_capacity(self):
        self.plan(self.lengths, self.starts)
        self.run(self.q, self.table, self.o, self.lse)

    def run_padded(self):
        """The step of the capacity, with what `lengths`, `starts` and `table` hold."""
        if not self.gpu:
            return self.step_of_capacity()
        if not self.graph:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step_of_capacity()
        self.graph.replay()


class Step:
    """Requests of an engine, in its memory."""

    def __init__(self, engine, seed, number):
        self.engine, dice = engine, random.Random(f"step {seed} {number}")
        self.dice = dice
        self.lengths = self.draw_lengths()
        self.requests = len(self.lengths)
        most, kind = engine.max_queries, dice.randrange(5)
        draw = (lambda: most, lambda: 1, lambda: dice.randint(0, most), lambda: dice.randint(1, most),
                lambda: dice.choice((0, most)))[kind]
        self.queries = [draw() for _ in self.lengths]
        if dice.random() < 0.2:  # requests that pad
            for i in dice.sample(range(self.requests), self.requests // 2):
                self.lengths[i] = self.queries[i] = 0
        self.starts = [0, *itertools.accumulate(self.queries)]
        self.rows = self.starts[-1]
        self.place(torch.Generator(engine.device).manual_seed(dice.getrandbits(40)))

    def draw_lengths(self):
        """Such that the pool has room for all."""
        engine, dice = self.engine, self.dice
        most, page = engine.tokens, engine.page
        requests = dice.choice((1, engine.max_requests, dice.randint(1, engine.max_requests)))
        fair = max(1, min(most, engine.pool // (2 * requests)))
        kind = dice.randrange(5)
        draw = (lambda: fair,
                lambda: dice.randint(0, fair),
                lambda: most if dice.random() < 0.03 else dice.randint(0, 1 + fair // 8),
                lambda: max(0, dice.choice((page, 64)) * dice.randint(0, 1 + fair // 64) + dice.randint(-1, 1)),
                lambda: min(most, int(fair / 4 * dice.paretovariate(1))))[kind]
        lengths, left = [], engine.pages * page
        for _ in range(requests):
            length = min(draw(), most, left // page * page)
            left -= -(-length // page) * page
            lengths.append(length)
        dice.shuffle(lengths)
        return lengths

    def place(self, generator):
        """Pages in random order, poison where nothing may be read, queries as sharp as they get."""
        engine, dice = self.engine, self.dice
        on, page = {"device": engine.device}, engine.page
        integers = lambda values: torch.tensor(values, dtype=torch.int32, **on)
        lengths = integers(self.lengths)
        counts = lengths if engine.sparse else integers([-(-length // page) for length in self.lengths])
        first, column = counts.cumsum(0) - counts, torch.arange(engine.width, **on)
        order = torch.randperm(engine.pages, generator=generator, **on).int()
        stale = dice.choice((2147480000, -1, -2**31, dice.randrange(engine.pages)))
        table = order[(first[:, None] + column).clamp_max(engine.pages - 1).long()]
        slots = engine.pages * page
        if engine.sparse:  # any, some twice; a share is none, at times for whole blocks
            table = torch.randint(0, slots, table.shape, generator=generator, dtype=torch.int32, **on)
            none = torch.rand(table.shape, generator=generator, **on) < dice.choice((0, 0.1, 0.9))
            none |= (column // 64 % 3 == 1) & (torch.arange(len(table), **on) % 4 == 1)[:, None]
            table[none] = dice.choice((-1, slots, 2**31 - 1, -2**31))
        if engine.shared_prefixes:
            self.share(table)
        engine.table.fill_(stale)
        engine.table[:self.requests] = torch.where(column < counts[:, None], table, stale)
        engine.lengths.zero_()
        engine.lengths[:self.requests] = lengths
        engine.starts.fill_(self.rows)
        engine.starts[:self.requests + 1] = integers(self.starts)
        # Where the tokens of a request lie, as rows of the source; -1 behind its end.
        token = torch.arange(max(1, *self.lengths), **on)
        place = table[:, token].long() if engine.sparse else table[:, token // page].long() * page + token % page
        self.tokens = torch.where((token < lengths[:, None]) & (place >= 0) & (place < slots), place, -1)
        used = torch.zeros(engine.pages * page + 1, dtype=torch.bool, **on)
        used[self.tokens.reshape(-1)] = True  # the last one: of no request
        shape = engine.pages, page
        if engine.fp8:
            engine.cache.copy_(torch.where(used[:-1].view(*shape, 1), engine.packed[:slots].view(*shape, -1), 255))
        else:
            for part, columns in zip(engine.cache_parts, (slice(LATENT), slice(LATENT, None))):
                part.copy_(torch.where(used[:-1].view(*shape, 1), engine.source[:slots, columns].view(*shape, -1),
                                       math.nan))
        # In FP8 scores are less exact the larger they are.
        self.q = given = engine.source_q[:self.rows] * dice.choice((0.1, 1, 1, 3, 3 if engine.fp8 else 10))
        if engine.e4m3:
            codes = (self.q.float() / engine.q_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            self.q, given = codes.float() * engine.q_scale, codes.view(torch.uint8)
        for part, columns in zip(engine.q_parts, (slice(LATENT), slice(LATENT, None))):
            part[:self.rows] = given[..., columns]
            part[self.rows:] = 255 if engine.e4m3 else math.nan  # which is NaN, too

    def share(self, table):
        """Runs of neighbours begin with the same pages; some end inside of them."""
        engine, dice, first = self.engine, random.Random(self.dice.random()), 0
        while first < self.requests:
            members = dice.choice((1, 2, 8, self.requests))
            most = self.lengths[first] // engine.page  # whole pages
            pages = dice.choice((most, most, dice.randint(0, most), min(most, 512 // engine.page)))
            for r in range(first + 1, min(first + members, self.requests)):
                both = min(pages, self.lengths[r] // engine.page)
                table[r, :both] = table[first, :both]
            first += members

    def expected(self):
        """o and natural log-sum-exps of all rows in float32, and a bound on the scores of each."""
        engine, on = self.engine, {"device": self.engine.device}
        heads = engine.heads
        o = torch.zeros(self.rows, heads, LATENT, **on)
        lse = torch.full((self.rows, heads), -math.inf, **on)
        order = sorted((r for r in range(self.requests) if self.queries[r] and self.lengths[r]),
                       key=lambda r: self.lengths[r])
        while order:
            longest, here = self.lengths[order[-1]], []
            while order and (len(here) + 1) * longest * (engine.max_queries * heads + WIDTH) <= MOST_SCORES or not here:
                here.append(order.pop())
            most = max(self.queries[r] for r in here)
            rows = torch.tensor([[min(self.starts[r] + i, self.rows - 1) for i in range(most)] for r in here], **on)
            exists = torch.tensor([[i < self.queries[r] for i in range(most)] for r in here], **on)
            seen = torch.tensor([[self.lengths[r] + (i + 1 - self.queries[r] if engine.causal else 0)
                                  for i in range(most)] for r in here], **on)
            tokens = self.tokens[here, :longest]
            keys = engine.source[tokens.clamp_min(0)].float()  # (here, longest, 576)
            scores = torch.bmm(self.q[rows].float().flatten(1, 2), keys.transpose(1, 2)).mul_(SCALE)
            unseen = torch.arange(longest, **on) >= seen[..., None, None]  # (here, most, 1, longest)
            unseen = unseen | (tokens < 0)[:, None, None]
            scores.view(len(here), most, heads, -1).masked_fill_(unseen, -math.inf)
            sums = scores.logsumexp(-1)
            of_sinks = 1 if engine.sinks is None else torch.sigmoid(sums - engine.sinks.repeat(most))[..., None]
            weights = scores.sub_(sums.nan_to_num(neginf=0)[..., None]).exp_() * of_sinks
            o[rows[exists]] = torch.bmm(weights, keys[..., :LATENT]).view(len(here), most, heads, LATENT)[exists]
            lse[rows[exists]] = sums.view(len(here), most, heads)[exists]
        return o, lse, SCALE * self.q.float().norm(dim=-1) * engine.largest_key

    def compare(self, bits):
        """Pairs of a name and a share of what is allowed, a scalar on the device."""
        engine = self.engine
        got, got_lse = bits[0].view(engine.torch_dtype).float(), bits[1].view(torch.float32)
        if engine.lse_base2:
            got_lse = got_lse * math.log(2)
        o, lse, reach = self.expected()
        unit, off = UNIT[engine.dtype], (got - o).abs()
        of_o, of_norm = (0.25, 2.0**-4) if engine.e4m3 else (12 * unit, 3 * unit)  # docs/checking.md, as below
        allowed = of_o * (o.abs() + o.square().mean(-1, keepdim=True).sqrt())
        worst = lambda share: share.amax() if share.numel() else torch.zeros((), device=engine.device)
        over = lambda off, allowed: torch.where(off <= allowed, off / allowed.clamp_min(1e-30), math.inf)  # not for NaN
        yield "o", worst(over(off, allowed))
        yield "o in norm", over(off.norm(), of_norm * o.norm())
        empty = lse.isneginf()
        right = got_lse == (math.inf if engine.empty_lse_positive else -math.inf)
        off = torch.where(empty, torch.where(right, 0, math.inf), (got_lse - lse).abs())
        share = 2.0**-12 if engine.e4m3 else 2.0**-13 if engine.form == "fp8_656" else 32 * 2.0**-24
        yield "log-sum-exp", worst(over(off, share * (1 + torch.where(empty, 0, lse.abs()) + reach)))

    def attack(self):
        """Returns how many runs were made, how far they were off as shares of what is allowed, and faults."""
        engine, dice, runs, faults, shares, wrong = self.engine, self.dice, 1, [], {}, {}
        given = min(engine.rows, self.rows + dice.choice((0, 0, 1, 3)))
        equal = all(n == engine.max_queries for n in self.queries) and dice.random() < 0.5
        engine.poison()
        engine.plan(engine.lengths[:self.requests], None if equal else engine.starts[:self.requests + 1])
        engine.run(engine.queries(0, given), engine.table, engine.o[:given], engine.lse[:given])
        bits, clean = engine.outputs(self.rows)
        wrong["something else was written"] = ~clean
        same = lambda others, first, last: ~((others[0] == bits[0][first:last]).all() &
                                             (others[1] == bits[1][first:last]).all())
        if dice.random() < 0.75:
            runs += 1
            engine.run_padded()
            padded, clean = engine.outputs(self.rows)
            wrong["padding changes bits"] = same(padded, 0, self.rows)
            wrong["something else was written, padded"] = ~clean
        some = [r for r in range(self.requests) if self.queries[r]]
        if engine.split and some:
            runs += 1
            r = dice.choice(some)
            n, first = self.queries[r], self.starts[r]
            rows = slice(0, n)
            engine.decode.plan(engine.lengths[r:r + 1],
                               torch.tensor([0, n], dtype=torch.int32, device=engine.device))
            engine.run(engine.queries(first, first + n), engine.table[r:r + 1], engine.o[rows], engine.lse[rows])
            alone, clean = engine.outputs(n)
            wrong[f"request {r} alone has other bits"] = same(alone, first, first + n)
            wrong["something else was written, alone"] = ~clean
        try:
            engine.decode.check()
        except hypermla.Error as error:
            faults.append(str(error))
        shares = dict(self.compare(bits))
        values = torch.stack([*shares.values(), *(one.float() for one in wrong.values())]).tolist()
        shares = dict(zip(shares, values))
        faults += [f"{name} is off by {share:.3g} of what is allowed" for name, share in shares.items()
                   if not share <= 1]
        faults += [what for what, is_wrong in zip(wrong, values[len(shares):]) if is_wrong]
        return runs, shares, faults


def compile_kernels(given):
    """In processes of their own, as many as there are cores."""
    words = [sys.executable, __file__, f"--seed={given.seed}", f"--device={given.device}"]
    compiled = lambda i: subprocess.run([*words, f"--make={i}"], text=True, capture_output=True, check=False)
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for i, done in enumerate(pool.map(compiled, range(ENGINES))):
            if done.returncode:
                harness.stop(f"engine {i} cannot be made: {(done.stderr or done.stdout).strip()}")


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--runs", type=int, default=10000, help="of MlaDecode, at least (default 10000)")
    flags.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    flags.add_argument("--only", type=int, metavar="STEP", help="one of the steps")
    flags.add_argument("--compile", action="store_true", help="only compile what the engines take")
    flags.add_argument("--make", type=int, help=argparse.SUPPRESS)
    given = flags.parse_args()
    if given.make is not None:
        return Engine(given.seed, given.make, given.device).make()
    if given.compile:
        given.device = given.device or "cuda"
        return compile_kernels(given)
    if not torch:
        harness.stop("it needs a Python with PyTorch")
    given.device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if given.device == "cuda" and not torch.cuda.is_available():
        harness.stop("there is no GPU; take --device=cpu")
    begin = time.monotonic()
    if given.device == "cuda" and given.only is None:
        compile_kernels(given)
    compiled, engines = time.monotonic(), {}
    totals = {"seed": given.seed, "device": given.device, "steps": 0, "runs": 0, "faults": 0, "worst": {}}
    steps = itertools.count() if given.only is None else (given.only,)
    for number in steps:
        if totals["runs"] >= given.runs:
            break
        which = number // STEPS % ENGINES  # one after the other, so that memory is that of one
        if which not in engines:
            engines = {which: Engine(given.seed, which, given.device)}
            engines[which].make()
            engines[which].allocate()
        engine = engines[which]
        runs, shares, faults = Step(engine, given.seed, number).attack()
        totals["steps"] += 1
        totals["runs"] += runs
        totals["faults"] += bool(faults)
        for name, share in shares.items():
            totals["worst"][name] = round(max(totals["worst"].get(name, 0), share), 3)
        for fault in faults:
            print(f"FAULT step {number}: {fault}\n  {engine.options} {engine.layouts}\n  again: "
                  f"{pathlib.Path(__file__)} --seed={given.seed} --device={given.device} --only={number}", flush=True)
    totals |= {"compiling_s": round(compiled - begin), "running_s": round(time.monotonic() - compiled)}
    print(json.dumps(totals))
    return 1 if totals["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
