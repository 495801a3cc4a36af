#!/usr/bin/env python3
"""append, merge_states, decompress_prefix, split_prefixes and decoding over a shared prefix as an engine calls them,
beside PyTorch and this device's ceilings.

    tests/benchmark/bench_cache.py --record=out/bench_cache.json

Every operation runs over several sets of tensors in turn, four times L2 in all, so that it finds nothing in the cache
that an engine would not find there. A burst is one CUDA graph of some milliseconds after a rest, a sustained time the
same graph without a pause. The ceilings are of the same run: copying as many bytes, and torch.matmul of the products of
decompress_prefix. Outputs are compared with float32, those over a shared prefix with MlaDecode's over all tokens, which
is the other way of that row. On a CPU it runs a 64th of the tokens, to try the program.
"""

import argparse
import datetime
import itertools
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import harness  # noqa: E402
from harness import hypermla, torch  # noqa: E402

CACHED = 4 * 50e6  # bytes of all sets of tensors of a row, at least


def normal(device, *shape, scale=1.0):
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=scale)


def worst(*differences):
    """The largest of all their elements; NaN where one is NaN, which max() of Python would drop."""
    return torch.stack([one.abs().max() for one in differences]).max().item()


class Merge:
    def __init__(self, device, tokens, heads, width):
        self.o_a, self.o_b, self.out = (normal(device, tokens, heads, width) for _ in range(3))
        self.lse_a, self.lse_b, self.lse = (torch.randn(tokens, heads, device=device) for _ in range(3))
        self.bytes, self.flops = 3 * (self.out.nbytes + self.lse.nbytes), 0
        self.outputs = [self.out, self.lse]
        self.ways = {"ours": self.ours, "torch": self.torch}

    def ours(self):
        hypermla.merge_states(self.o_a, self.lse_a, self.o_b, self.lse_b, out=self.out, lse=self.lse)

    def torch(self):
        torch.logaddexp(self.lse_a, self.lse_b, out=self.lse)
        share = torch.exp(self.lse_a - self.lse)[..., None].to(self.out.dtype)
        torch.lerp(self.o_b, self.o_a, share, out=self.out)

    def error(self):
        lse = torch.logaddexp(self.lse_a, self.lse_b)
        a, b = (torch.exp(of - lse)[..., None] for of in (self.lse_a, self.lse_b))
        return worst(self.out - (a * self.o_a.float() + b * self.o_b.float()), self.lse - lse)


class Append:
    def __init__(self, device, tokens):
        pages = 4 * tokens // 64 + 1
        self.cache = normal(device, pages, 64, 576)
        self.kv_c, self.k_pe = normal(device, tokens, 512), normal(device, tokens, 64)
        self.slots = torch.randperm(pages * 64, device=device)[:tokens]
        self.bytes, self.flops = 2 * (self.kv_c.nbytes + self.k_pe.nbytes) + self.slots.nbytes, 0
        self.outputs = [self.cache]
        self.ways = {"ours": self.ours, "torch": self.torch}

    def ours(self):
        hypermla.append((self.kv_c, self.k_pe), self.cache, self.slots)

    def torch(self):
        rows = self.cache.view(-1, 576)
        rows[:, :512].index_copy_(0, self.slots, self.kv_c)
        rows[:, 512:].index_copy_(0, self.slots, self.k_pe)

    def error(self):
        return worst(self.cache.view(-1, 576)[self.slots] - torch.cat((self.kv_c, self.k_pe), 1))


class AppendFp8(Append):
    """Into a cache of 656 bytes a token; as many bytes of it are wrong as error() says."""
    WIDTH, scale = 656, None

    def __init__(self, device, tokens):
        super().__init__(device, tokens)
        self.cache = torch.zeros(len(self.cache), 64, self.WIDTH, dtype=torch.uint8, device=device)
        self.largest = torch.full((), 448.0, device=device)  # PyTorch would multiply by the inverse of a number
        self.outputs = [self.cache]
        self.bytes = self.kv_c.nbytes + self.k_pe.nbytes + tokens * self.WIDTH + self.slots.nbytes

    def rounded(self):
        groups = self.kv_c.float().view(-1, 4, 128)
        factors = groups.abs().amax(-1) / self.largest
        codes = (groups / factors[..., None]).to(torch.float8_e4m3fn).view(-1, 512).view(torch.uint8)
        return torch.cat((codes, factors.view(torch.uint8), self.k_pe.view(torch.uint8)), 1)

    def ours(self):
        hypermla.append((self.kv_c, self.k_pe), self.cache, self.slots, cache_scale=self.scale)

    def torch(self):
        self.cache.view(-1, self.WIDTH).index_copy_(0, self.slots, self.rounded())

    def error(self):
        return (self.cache.view(-1, self.WIDTH)[self.slots] != self.rounded()).sum().item()


class AppendFp8OneFactor(AppendFp8):
    """Into a cache of 576 bytes a token."""
    WIDTH = 576

    def __init__(self, device, tokens):
        super().__init__(device, tokens)
        self.scale = torch.full((1,), 0.01, device=device)  # some values are beyond 448 of it

    def rounded(self):
        quotients = torch.cat((self.kv_c, self.k_pe), 1).float() / self.scale
        return quotients.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


class Decompress:
    def __init__(self, device, tokens, heads):
        pages = -(-tokens // 64)
        self.tokens, self.heads = tokens, heads
        self.cache = normal(device, pages, 64, 576)
        self.table = torch.randperm(pages, dtype=torch.int32, device=device)
        self.weight = normal(device, heads, 256, 512, scale=512**-0.5)  # kv_b_proj's
        self.uk, self.uv = self.weight[:, :128], self.weight[:, 128:].transpose(1, 2)
        self.k, self.v = normal(device, tokens, heads, 192), normal(device, tokens, heads, 128)
        self.outputs = [self.k, self.v]
        self.z, self.both = self.gathered()[:, :512].contiguous(), normal(device, tokens, heads * 256)
        self.flops = 2 * tokens * heads * 256 * 512
        self.bytes = tokens * 1152 + self.weight.nbytes + self.k.nbytes + self.v.nbytes
        # As an engine does it: gather, one product, keys joined with the rotary part. And the product alone.
        self.ways = {"ours": self.ours, "torch, three steps": self.torch, "torch.matmul": self.product}

    def gathered(self):
        return self.cache[self.table.long()].view(-1, 576)[:self.tokens]

    def ours(self):
        hypermla.decompress_prefix(self.cache, self.table, self.tokens, self.uk, self.uv, out=(self.k, self.v))

    def torch(self):
        rows = self.gathered()
        both = torch.matmul(rows[:, :512], self.weight.view(-1, 512).T).view(self.tokens, self.heads, 256)
        torch.cat((both[..., :128], rows[:, None, 512:].expand(-1, self.heads, -1)), -1, out=self.k)
        self.v.copy_(both[..., 128:])

    def product(self):
        torch.matmul(self.z, self.weight.view(-1, 512).T, out=self.both)

    def error(self):
        rows = self.gathered().float()
        both = torch.matmul(rows[:, :512], self.weight.float().view(-1, 512).T).view(-1, self.heads, 256)
        return worst(self.k[..., :128] - both[..., :128], self.v - both[..., 128:],
                     self.k[..., 128:] - rows[:, None, 512:])


class Split:
    """A step of requests of one query each, of which three of four share a prefix, wherever they are."""

    def __init__(self, device, requests, prefix, own):
        pages, self.own_pages = -(-prefix // 64), -(-own // 64)
        integers = lambda values: torch.tensor(values, dtype=torch.int32, device=device)
        zeros = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=device)
        cached, self.whole = pages + requests * (pages + self.own_pages), pages * 64
        order = torch.randperm(cached, dtype=torch.int32, device=device)
        self.table = order[pages:].view(requests, -1).clone()
        self.shares = torch.arange(requests, device=device) % 4 > 0
        self.table[self.shares, :pages] = order[:pages]
        self.lengths, self.starts = integers([pages * 64 + own] * requests), integers(range(requests + 1))
        last = self.table[:, pages + self.own_pages - 1].long()
        self.slots = last * 64 + (own - 1) % 64
        self.prefixes, self.pages = integers([[pages, 0, 1, 1]]), order[None, :pages].clone()
        self.owners = zeros(cached).index_fill_(0, order[:pages].long(), 1)
        self.found, self.own_table, self.own = zeros(requests), zeros(requests, pages + self.own_pages), zeros(requests)
        self.shared_starts, self.rows = zeros(2, 2), zeros(requests)
        self.flops, self.bytes = 0, self.table.nbytes + requests * (self.own_pages * 4 + 24)
        self.outputs = [self.own_table, self.own, self.shared_starts, self.rows]
        self.ways = {"ours": self.ours, "torch": self.torch}

    def ours(self):
        hypermla.split_prefixes(self.table, self.lengths, self.starts, self.slots, self.prefixes, self.pages,
                                self.owners, self.found, self.own_table, self.own, self.shared_starts, self.rows)

    def torch(self):
        """The same for one prefix, whose valid mark it leaves alone."""
        pages = self.pages.shape[1]
        has = ((self.table[:, :pages] == self.pages).all(1)
               & (self.lengths - self.starts.diff() >= self.whole)).to(torch.int32)
        self.written = self.owners[self.slots // 64].any()
        torch.sub(self.lengths, has * self.whole, out=self.own)
        columns = torch.arange(self.table.shape[1], device=self.table.device) + (has * pages)[:, None]
        torch.gather(self.table, 1, columns.clamp_(max=self.table.shape[1] - 1), out=self.own_table)
        self.order = torch.argsort(has, descending=True, stable=True)
        self.shared_starts[0, 1:] = has.sum()
        self.shared_starts[1, 1:] = self.whole

    def error(self):
        """How many integers are wrong."""
        pages, count = self.pages.shape[1], int(self.shares.sum())
        begins = torch.where(self.shares, pages, 0)
        columns = torch.arange(self.own_pages, device=self.table.device) + begins[:, None]
        return sum((one != other).sum().item() for one, other in (
            (self.own, self.lengths - begins * 64), (self.own_table[:, :self.own_pages], self.table.gather(1, columns)),
            (self.rows[:count], self.shares.nonzero()[:, 0]), (self.shared_starts[0], torch.tensor(
                [0, count], device=self.table.device)), (self.prefixes[:, 3], 1)))


class SharedPrefix:
    """Decoding of requests of one query each: docs/shared-prefixes.md."""

    def __init__(self, device, requests, prefix, own, heads):
        pages, own_pages = -(-prefix // 64), -(-own // 64)
        integers = lambda values: torch.tensor(values, dtype=torch.int32, device=device)
        self.cache = normal(device, pages + requests * own_pages, 64, 576)
        order = torch.randperm(pages + requests * own_pages, dtype=torch.int32, device=device)
        self.table = torch.cat((order[:pages].expand(requests, -1), order[pages:].view(requests, -1)), 1)
        self.own_table = self.table[:, pages:]
        weight = normal(device, heads, 256, 512, scale=512**-0.5)
        uk, self.uv = weight[:, :128], weight[:, 128:].transpose(1, 2)
        self.k, self.v = hypermla.decompress_prefix(self.cache, order[:pages], prefix, uk, self.uv)
        self.q = normal(device, requests, heads, 128), normal(device, requests, heads, 64)
        self.absorbed = torch.einsum("thc,hcl->thl", self.q[0], uk), self.q[1]
        self.latent = normal(device, requests, heads, 512)
        self.o, self.whole_o = (normal(device, heads, requests, 128) for _ in range(2))
        self.lse, self.whole_lse = (torch.zeros(requests, heads, device=device) for _ in range(2))
        self.outputs = [self.latent, self.o, self.whole_o, self.lse, self.whole_lse]
        decode = lambda tokens: hypermla.MlaDecode(heads=heads, max_requests=requests, max_tokens=tokens, device=device)
        self.decode, self.decode_own = decode(pages * 64 + own), decode(own)
        self.prefix = hypermla.MlaPrefill(heads=heads, max_query_tokens=requests, max_tokens=prefix, causal=False,
                                          accumulate=True, device=device)
        self.plans = (integers([pages * 64 + own] * requests), integers([own] * requests), integers([0, requests]),
                      integers([0, prefix]))
        self.decode.plan(self.plans[0])
        self.decode_own.plan(self.plans[1])
        self.prefix.plan(*self.plans[2:])
        self.flops = 2 * requests * heads * (prefix * 320 + own * 1088 + 512 * 128)
        self.bytes = self.k.nbytes + self.v.nbytes + requests * own * 1152
        self.ways = {"ours": self.ours, "MlaDecode over all": self.whole}

    def ours(self):
        self.decode_own.run(self.absorbed, self.cache, self.own_table, self.latent, self.lse)
        torch.bmm(self.latent.transpose(0, 1), self.uv, out=self.o)
        self.prefix.run(self.q, self.k, self.v, self.o.transpose(0, 1), self.lse)

    def whole(self):
        self.decode.run(self.absorbed, self.cache, self.table, self.latent, self.whole_lse)
        torch.bmm(self.latent.transpose(0, 1), self.uv, out=self.whole_o)

    def error(self):
        self.whole()
        return worst(self.o.float() - self.whole_o.float(), self.lse - self.whole_lse)


class Copy:
    """As many bytes, half of them read and half written."""

    def __init__(self, device, count):
        self.source, self.target = (torch.empty(int(count) // 2, dtype=torch.uint8, device=device) for _ in range(2))

    def run(self):
        self.target.copy_(self.source)


def rows(device, part):
    """Names, how a set of tensors is made, and how far ours may be off: half a unit in the last place of the output."""
    shape = lambda count: max(1, count // part)
    yield "merge_states 128x128x512", lambda: Merge(device, shape(128), 128, 512), 0.04
    yield "merge_states 8192x128x128", lambda: Merge(device, shape(8192), 128, 128), 0.04
    yield "append 256", lambda: Append(device, shape(256)), 0
    yield "append 8192", lambda: Append(device, shape(8192)), 0
    yield "append in FP8 256", lambda: AppendFp8(device, shape(256)), 0
    yield "append in FP8 8192", lambda: AppendFp8(device, shape(8192)), 0
    yield "append in FP8 of one factor 256", lambda: AppendFp8OneFactor(device, shape(256)), 0
    yield "append in FP8 of one factor 8192", lambda: AppendFp8OneFactor(device, shape(8192)), 0
    heads = 128 if part == 1 else 4
    for requests in (32, 128):
        yield (f"shared prefix {requests} 8192+1024",
               lambda requests=requests: SharedPrefix(device, shape(requests), shape(8192), shape(1024), heads), 0.01)
    for requests in (32, 512):
        yield (f"split_prefixes {requests} 8192+1024",
               lambda requests=requests: Split(device, shape(requests), shape(8192), shape(1024)), 0)
    yield "decompress_prefix 8192x128", lambda: Decompress(device, shape(8192), heads), 0.04


def in_turn(calls):
    """Takes the next of the calls each time."""
    turn = itertools.cycle(calls)
    return lambda _stream=None: next(turn)()


def why(failure):
    """A note: the package refuses a call that this device does not have; anything else has failed."""
    what = "refused" if isinstance(failure, hypermla.Error) else "failed"
    return f"{what}: {(str(failure) or type(failure).__name__).splitlines()[0]}"


def measured(machine, name, make, tolerance):
    """A row of each way; ours has a note where it is wrong or missing."""
    try:
        machine.forget()
        first = make()
        sets = [first] + [make() for _ in range(min(64, math.ceil(CACHED / first.bytes)) - 1 if machine.gpu else 0)]
        copies = [Copy(machine.device, first.bytes) for _ in sets]
        for output in first.outputs:
            output.view(torch.uint8).fill_(255)  # NaN in every type: what ours never writes is wrong
        first.ours()
        error = first.error()
    except Exception as failure:  # of any type: the other rows have their turn
        return [{"row": name, "way": "ours", "note": why(failure)}]
    found, times = {}, {}
    ways = {"copy": [copy.run for copy in copies], **{way: [one.ways[way] for one in sets] for way in first.ways}}
    for way, calls in ways.items():
        row = {"row": name, "way": way, "bytes": first.bytes, "flops": first.flops, "sets": len(sets),
               "error": f"{error:.2g}" if way == "ours" else None}
        try:
            row["burst_us"], row["sustained_us"] = machine.measure(in_turn(calls))
            times[way] = row["burst_us"]
            row["gbps"] = first.bytes / row["burst_us"] / 1e3
            row["tflops"] = first.flops / row["burst_us"] / 1e6 if first.flops and way != "copy" else None
        except Exception as failure:  # of any type, as what PyTorch cannot capture or allocate
            row["note"] = why(failure)
        found[way] = row
    ceiling = max((times[way] for way in ("copy", "torch.matmul") if way in times), default=None)
    for row in found.values():
        if ceiling and "burst_us" in row:
            row["of_ceiling"] = f"{ceiling / row['burst_us']:.2f}"
    if not error <= tolerance:
        found["ours"]["note"] = f"wrong: off by {error:.2g}"
    return found.values()


def main():
    flags = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flags.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    flags.add_argument("--seconds", type=float, default=1.0, help="busy time before a sustained figure")
    flags.add_argument("--out_dir", help="where comparison.* go (default out/tests/bench_cache/<time>)")
    flags.add_argument("--record", type=harness.record_file, help="file for all figures, as JSON")
    arguments = flags.parse_args()
    if torch is None:
        harness.stop("it needs PyTorch; install it beside the package")
    machine = harness.Machine(arguments.device, arguments.seconds)
    table = harness.Table(f"Around attention, on {machine.name}", arguments.out_dir,
                          ("row", "way", "burst_us", "sustained_us", "gbps", "tflops", "of_ceiling", "error", "note"))
    torch.manual_seed(1)
    for name, make, tolerance in rows(machine.device, 1 if machine.gpu else 64):
        for row in measured(machine, name, make, tolerance):
            table.add(**row)
        if arguments.record:
            harness.write_json(arguments.record, {"kind": "cache", "device": machine.name, "torch": torch.__version__,
                                                  "date": datetime.date.today().isoformat(), "rows": table.rows})
    table.finish("gbps and tflops are of the bursts; of_ceiling is the time of the copy or, where it is longer, of the "
                 "product over the row's.")
    if wrong := [row["row"] for row in table.rows if row["way"] == "ours" and "note" in row]:
        harness.stop(f"ours is wrong or missing, and the notes say why: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
