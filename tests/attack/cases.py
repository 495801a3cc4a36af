"""Random cases: kernels and MlaDecode on the CPU against reference.py, and arguments that must be refused.

A case is a function of the seed and its number. GROUP cases in a row share what a kernel is compiled for, so that few
are compiled: b, s, t and h are known at run time only.
"""

import numpy
import subprocess

import hypermla
from reference import STORED, attention, causal_rows, difference, merge, numbers, rounded
from support import BINARY
from world import Fault, expect

GROUP = 50
GUARD = 4096  # bytes of NaN before and behind every tensor
EDGES = (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 255, 257, 333)


class Memory:
    """A tensor between two guards. All bits are 1, NaN in every type of numbers, until it is filled."""
    def __init__(self, shape, dtype):
        item = numpy.dtype(STORED[dtype])
        size = int(numpy.prod(shape)) * item.itemsize
        self.whole = numpy.full(2 * GUARD + size + 64, 0xFF, numpy.uint8)
        self.first = GUARD + -(self.whole.ctypes.data + GUARD) % 64
        self.bytes = self.whole[self.first:self.first + size]
        self.array = self.bytes.view(item).reshape(shape)
        self.before = None

    def keep(self):
        self.before = self.whole.copy()

    def untouched(self, name, written=False):
        if written:
            end = self.first + len(self.bytes)
            expect((self.whole[:self.first] == 255).all() and (self.whole[end:] == 255).all(),
                   f"memory around {name} was written")
        else:
            expect((self.whole == self.before).all(), f"the input {name} was written")


def pick(random, values):
    return values[random.integers(len(values))]


def extent(random, most):
    return min(pick(random, EDGES) if random.random() < 0.5 else int(random.integers(1, most + 1)), most)


# What queries and keys are like. "signs" are scores that are exact, however extreme: every column of a row is the same
# power of two, and tokens have one sign each, of which one outweighs the other. A merge of parts goes by log-sum-exps
# in fp32: there scores are at most such that a unit in the last place does not count.
def styled(random, dtype, merged=False):
    style = pick(random, ("normal", "normal", "growing", "large", "signs", "equal", "zeros"))
    least, most, total = (-4, 8, 16) if dtype == "float16" else (-58, 58, 116)
    of_tokens = int(random.integers(least, most + 1))
    both = int(random.integers(0, (2 if merged else total) + 1))
    powers = 2.0**min(both - of_tokens, 15 if dtype == "float16" else 100), 2.0**of_tokens

    def queries(shape):
        if style in ("signs", "equal"):
            return numpy.full(shape, powers[0])
        return random.standard_normal(shape) * (3 if style == "large" else 1)

    def tokens(shape):  # [.., tokens, columns]
        if style in ("signs", "equal"):
            sign = random.choice([-1.0, 1.0], shape[-2] if style == "signs" else 1)
            return numpy.full(shape, powers[1]) * sign[:, None]
        if style == "zeros":
            return numpy.zeros(shape)
        grown = numpy.linspace(1, 12, shape[-2])[:, None] if style == "growing" else 1
        return random.standard_normal(shape) * grown * (3 if style == "large" else 1)

    return queries, tokens


SIZES = ((128, 64, 512), (32, 16, 64))  # d, p, k
KERNELS = {
    "flash_attention": ("v0", ), "flash_mla": ("v0", ), "flash_mla_split_kv": ("v0", ),
    "output_decompression": ("v0", ), "decompress_combine": ("v0", ), "prefix_decompression": ("v0", ),
    "mla_var6_plus": ("v0", "v1", "v2", "v3", "v4")
}


class KernelCase:
    def __init__(self, random, name, version, dtype, causal, size):
        self.random, self.name, self.version, self.dtype, self.causal = random, name, version, dtype, causal
        self.d, self.p, self.k = size
        self.b, self.s = extent(random, 6), pick(random, (1, 1, 1, 2, 3, 5, 16, 17, 33))
        self.h = pick(random, (1, 1, 2, 3, 5, 7, 16, 19))
        self.t = extent(random, 350)
        while self.b * self.h * self.s * self.t * self.k > 2e7 and self.b * self.h > 1:
            self.b, self.h = (self.b + 1) // 2, (self.h + 1) // 2
        self.queries, self.tokens = styled(random, dtype, name in ("flash_mla_split_kv", "mla_var6_plus"))
        self.scale = (self.d + self.p)**-0.5

    def fields(self, *names, **more):
        return {**{name: getattr(self, name) for name in ("b", "s", "h", "d", "dtype", *names)}, **more}

    def fill(self, name, values):
        self.memory[name].array[...] = rounded(values, self.dtype) if values.dtype.kind == "f" and \
            self.types[name] == self.dtype else values.astype(STORED[self.types[name]])

    def read(self, name):
        return numbers(self.memory[name].array)

    def run(self):
        problem = getattr(self, self.name if self.name != "flash_mla_split_kv" else "flash_mla")()
        said = f"{self.name} {self.version} {problem}"
        try:
            self.kernel = hypermla.Kernel(self.name, self.version, "cpu", language="cutile", **problem)
            self.memory = {one.name: Memory(one.shape, one.dtype) for one in self.kernel.tensors}
            self.types = {one.name: one.dtype for one in self.kernel.tensors}
            self.shapes = {one.name: one.shape for one in self.kernel.tensors}
            expected = getattr(self, f"expect_{self.name}".replace("_split_kv", ""))()
            written = {one.name for one in self.kernel.tensors if one.role != "input"}
            for name, memory in self.memory.items():
                memory.keep()
                self.kernel.bind(name, memory.array)
            self.kernel.run()
            for name, memory in self.memory.items():
                memory.untouched(name, name in written)
            self.kernel.check()
        except hypermla.Error as error:
            raise Fault(f"{said}: {error}") from error
        except Fault as fault:
            raise Fault(f"{said}: {fault}") from fault
        for name, (values, reach) in expected.items():
            wrong = difference(name, self.memory[name].array, values, self.dtype, reach)
            expect(wrong is None, f"{said}: {wrong}")

    # Attention over decompressed tokens.
    def flash_attention(self):
        return self.fields("t", "p", "causal")

    def expect_flash_attention(self):
        for name in ("q", "qpe"):
            self.fill(name, self.queries(self.shapes[name]))
        for name in ("k", "kpe"):
            self.fill(name, self.tokens(self.shapes[name]))
        self.fill("v", self.random.standard_normal(self.shapes["v"]))
        q = numpy.concatenate([self.read("q"), self.read("qpe")], -1)
        k, v, kpe = self.read("k"), self.read("v"), self.read("kpe")
        seen = causal_rows(self.s, self.t, self.causal)
        return self.by_head(lambda r, head: attention(q[r, head], numpy.concatenate([k[r, head], kpe[r]], -1), v[
            r, head], self.scale, seen))

    # In the latent space.
    def flash_mla(self):
        return self.fields("t", "p", "k", "causal")

    def expect_flash_mla(self):
        for name in ("qc", "qpe"):
            self.fill(name, self.queries(self.shapes[name]))
        self.fill("z", self.tokens(self.shapes["z"]))
        self.fill("kpe", self.tokens(self.shapes["kpe"]))
        q = numpy.concatenate([self.read("qc"), self.read("qpe")], -1)
        z, kpe = self.read("z"), self.read("kpe")
        seen = causal_rows(self.s, self.t, self.causal)
        return self.by_head(
            lambda r, head: attention(q[r, head], numpy.concatenate([z[r], kpe[r]], -1), z[r], self.scale, seen))

    # Both in one softmax.
    def mla_var6_plus(self):
        self.n = pick(self.random, (0, self.t, extent(self.random, self.t), extent(self.random, self.t)))
        self.prefixes = int(self.random.integers(1, self.b + 1)) if self.random.random() < 0.4 else 0
        self.ragged, self.first = bool(self.random.random() < 0.5), bool(self.random.random() < 0.3)
        return self.fields("t", "p", "k", "n", "causal", "ragged", "prefixes", tokens_first=self.first)

    def expect_mla_var6_plus(self):
        random, o, n, stores = self.random, self.t - self.n, self.n, self.prefixes or self.b
        store = random.integers(0, stores, self.b) if self.prefixes else numpy.arange(self.b)
        latent = random.integers(0, o + 1, self.b) if self.ragged else numpy.full(self.b, o)
        decompressed = random.integers(0, n + 1, stores) if self.ragged else numpy.full(stores, n)
        for name in ("q", "qc", "qpe"):
            if name in self.memory:
                self.fill(name, self.queries(self.shapes[name]))
        for name in ("z", "kpe", "k", "kpe_new"):
            if name in self.memory:
                self.fill(name, self.tokens(self.shapes[name]))
        if n:
            self.fill("v", random.standard_normal(self.shapes["v"]))
        if o:
            self.fill("w", random.standard_normal(self.shapes["w"]) * self.k**-0.5)
        for name, values in (("lengths", latent), ("new_lengths", decompressed), ("prefix", store)):
            if name in self.memory:
                self.fill(name, values)
        nan = numpy.array(numpy.nan)
        for r in range(self.b if o else 0):
            for name in ("z", "kpe"):
                self.memory[name].array[r, latent[r]:] = rounded(nan, self.dtype)
        for g in range(stores if n else 0):
            used = decompressed[g] if g in store else 0  # a prefix that no request has
            for name in ("k", "v"):
                self.memory[name].array[g, :, used:] = rounded(nan, self.dtype)
            self.memory["kpe_new"].array[g, used:] = rounded(nan, self.dtype)
        nothing = numpy.zeros
        q = self.read("q") if n else nothing((self.b, self.h, self.s, self.d))
        qc = self.read("qc") if o else nothing((self.b, self.h, self.s, self.k))
        qpe, w = self.read("qpe"), self.read("w") if o else nothing((self.h, self.k, self.d))
        z, kpe = (self.read("z"), self.read("kpe")) if o else (None, None)
        k, v, kpe_new = (self.read("k"), self.read("v"), self.read("kpe_new")) if n else (None, None, None)

        def one(r, head):
            g, m, f = store[r], latent[r], decompressed[store[r]]
            rows = numpy.concatenate([qc[r, head], q[r, head], qpe[r, head]], -1)
            keys, values = numpy.zeros((m + f, self.k + self.d + self.p)), numpy.zeros((m + f, self.k + self.d))
            old = slice(f, f + m) if self.prefixes else slice(0, m)
            new = slice(0, f) if self.prefixes else slice(m, m + f)
            if m:
                keys[old, :self.k] = values[old, :self.k] = z[r, :m]
                keys[old, self.k + self.d:] = kpe[r, :m]
            if f:
                keys[new, self.k:self.k + self.d], values[new, self.k:] = k[g, head, :f], v[g, head, :f]
                keys[new, self.k + self.d:] = kpe_new[g, :f]
            o, lse, reach = attention(rows, keys, values, self.scale, causal_rows(self.s, m + f, self.causal))
            return o[:, :self.k] @ w[head] + o[:, self.k:], lse, reach

        return self.by_head(one, self.first)

    def by_head(self, one, tokens_first=False):
        """Outputs and log-sum-exps of all requests and heads, from those of one."""
        all = [[one(r, head) for head in range(self.h)] for r in range(self.b)]
        o, lse, reach = (numpy.array([[head[i] for head in r] for r in all]) for i in range(3))
        return {"o": (o.swapaxes(1, 2) if tokens_first else o, None), "lse": (lse, reach)}

    def output_decompression(self):
        return self.fields("k")

    def expect_output_decompression(self):
        for name in ("o_latent", "w"):
            self.fill(name, self.random.standard_normal(self.shapes[name]))
        return {"o": (numpy.einsum("bhsk,hkd->bhsd", self.read("o_latent"), self.read("w")), None)}

    def prefix_decompression(self):
        return {name: getattr(self, name) for name in ("b", "t", "h", "d", "k", "dtype")}

    def expect_prefix_decompression(self):
        for name in ("z", "wk", "wv"):
            self.fill(name, self.random.standard_normal(self.shapes[name]))
        z = self.read("z")
        return {out: (numpy.einsum("btk,hkd->bhtd", z, self.read(w)), None) for out, w in (("k", "wk"), ("v", "wv"))}

    def decompress_combine(self):
        latent, new = pick(self.random, ((0, 1), (1, 0), (1, 1), (2, 3), (5, 1), (0, 4), (7, 0)))
        self.first = bool(self.random.random() < 0.3)
        return self.fields("k", latent_parts=latent, decompressed_parts=new, tokens_first=self.first)

    def expect_decompress_combine(self):
        spread = pick(self.random, (1, 5, 40, 1e4))
        parts = {}
        for o, lse in (("o_latent", "lse_latent"), ("o_new", "lse_new")):
            if o in self.memory:
                self.fill(o, self.random.standard_normal(self.shapes[o]))
                sums = self.random.standard_normal(self.shapes[lse]) * spread
                sums[self.random.random(sums.shape) < 0.3] = -numpy.inf  # empty: what its output holds must not matter
                self.fill(lse, sums)
                self.memory[o].array[numpy.isneginf(sums)] = rounded(numpy.array(numpy.nan), self.dtype)
                parts[o] = [(numpy.nan_to_num(self.read(o)[i]), self.read(lse)[i]) for i in range(len(sums))]
        weights, total, lse = merge(sum(parts.values(), []))
        out = numpy.zeros((self.b, self.h, self.s, self.d))
        if "w" in self.memory:
            self.fill("w", self.random.standard_normal(self.shapes["w"]) * self.k**-0.5)
            latent = sum(weight[..., None] * o for weight, (o, _) in zip(weights, parts["o_latent"]))
            out += numpy.einsum("bhsk,hkd->bhsd", latent, self.read("w"))
        at = len(parts.get("o_latent", ()))
        for weight, (o, _) in zip(weights[at:], parts.get("o_new", ())):
            out += weight[..., None] * o
        out /= total[..., None]
        return {
            "o": (out.swapaxes(1, 2) if self.first else out, None),
            "lse": (lse, numpy.abs(numpy.nan_to_num(lse, neginf=0)))
        }


class DecodeCase:
    """One step of a serving engine, with tensors of all layouts."""
    def __init__(self, random):
        self.random = random
        self.options = {
            "heads": pick(random, (1, 2, 3, 5, 8, 16)), "max_requests": int(random.integers(1, 7)),
            "max_queries": int(random.integers(1, 6)), "max_tokens": extent(random, 200),
            "page": pick(random, (1, 16, 32, 64, 128)), "dtype": pick(random, ("bfloat16", "float16")),
            "causal": bool(random.random() < 0.7), "scale": pick(random, (0.0, 0.0, 0.01, 0.3)),
            "split": pick(random, (0, 64, 128)), "lse_base2": bool(random.random() < 0.3),
            "empty_lse_positive": bool(random.random() < 0.3)
        }
        self.queries, self.tokens = styled(random, self.options["dtype"])
        at = self.options
        requests = int(random.integers(0, at["max_requests"] + 1))
        self.lengths = random.integers(0, at["max_tokens"] + 1, requests).astype(numpy.int32)
        counts = random.integers(0, at["max_queries"] + 1, requests)
        padding = random.random(requests) < 0.2
        self.lengths[padding], counts[padding] = 0, 0
        if self.lengths.any() and random.random() < 0.3:
            self.lengths[random.integers(requests)] = at["max_tokens"]
        self.given = random.random() < 0.8  # query starts; else every request has max_queries
        if not self.given:
            counts[:] = at["max_queries"]
        self.starts = numpy.concatenate([[0], numpy.cumsum(counts)]).astype(numpy.int32)
        width = -(-at["max_tokens"] // at["page"])
        pages = max(requests * width, 1) + 2
        free = random.permutation(pages)
        # Entries that must not be followed, and slots that must not be read.
        self.table = numpy.full((max(requests, 1), width + int(random.integers(0, 3))), pick(random, (-1, 1 << 30)),
                                numpy.int32)
        self.rows = int(self.starts[-1] + random.integers(0, 3)) or 1
        h, dtype = at["heads"], at["dtype"]
        self.q = rounded(self.queries((self.rows, h, 576)), dtype)
        cache = numpy.full((pages, at["page"], 576), numpy.nan)
        next_page = 0
        for r, length in enumerate(self.lengths):
            for i in range(-(-int(length) // at["page"])):
                self.table[r, i] = free[next_page]
                used = min(at["page"], int(length) - i * at["page"])
                cache[free[next_page], :used] = self.tokens((used, 576))
                next_page += 1
        self.cache = rounded(cache, dtype)

    def laid_out(self, values, columns=None):
        """A tensor of these values with some layout, in memory with guards, and of only these columns."""
        values = values if columns is None else values[..., columns]
        a, b, width = values.shape
        layout = pick(self.random, ("dense", "wide", "swapped"))
        dtype = self.options["dtype"]
        if layout == "swapped":
            memory = Memory((b, a, width), dtype)
            view = memory.array.transpose(1, 0, 2)
        else:
            memory = Memory((a, b, width + (64 if layout == "wide" else 0)), dtype)
            view = memory.array[..., :width]
        view[...] = values
        return memory, view

    def inputs(self, values):
        """One tensor of 576 columns, or one of 512 and one of 64."""
        if self.random.random() < 0.5:
            memory, view = self.laid_out(values)
            return [memory], view
        pair = [self.laid_out(values, slice(0, 512)), self.laid_out(values, slice(512, 576))]
        return [memory for memory, _ in pair], tuple(view for _, view in pair)

    def outputs(self, rows):
        h, dtype = self.options["heads"], self.options["dtype"]
        poison = numpy.full((rows, h, 512), 0xFFFF, numpy.uint16).view(STORED[dtype])
        memory, out = self.laid_out(poison)
        lse_memory = Memory((rows, h, 2), "float32")
        lse = lse_memory.array[..., 0]
        if self.random.random() < 0.3:
            lse_memory = Memory((h, rows), "float32")
            lse = lse_memory.array.T
        return memory, out, lse_memory, lse

    def run(self):
        at = self.options
        said = f"MlaDecode({at}) lengths {self.lengths.tolist()} starts {self.starts.tolist()}"
        try:
            decode = hypermla.MlaDecode(device="cpu", **at)
            o, lse = self.step(decode, self.lengths, self.starts, self.table, self.q)
            wrong = self.compare(o, lse)
            expect(wrong is None, wrong)
            if at["split"] and len(self.lengths) > 1:
                r = int(self.random.integers(len(self.lengths)))
                first, last = self.starts[r], self.starts[r + 1]
                if last > first:
                    alone, alone_lse = self.step(decode, self.lengths[r:r + 1],
                                                 numpy.array([0, last - first], numpy.int32), self.table[r:r + 1],
                                                 self.q[first:last])
                    same = (alone.view(numpy.uint16) == o[first:last].view(numpy.uint16)).all() and \
                        (alone_lse.view(numpy.uint32) == lse[first:last].view(numpy.uint32)).all()
                    expect(same, f"the bits of request {r} depend on its batch")
        except (hypermla.Error, Fault) as error:
            raise Fault(f"{said}: {error}") from error

    def step(self, decode, lengths, starts, table, q):
        queries, q = self.inputs(q)
        tokens, cache = self.inputs(self.cache)
        out_memory, out, lse_memory, lse = self.outputs((q[0] if isinstance(q, tuple) else q).shape[0])
        for memory in queries + tokens:
            memory.keep()
        given = self.given or len(lengths) != len(self.lengths)
        decode.plan(lengths, starts if given else None)
        decode.run(q, cache, table, out=out, lse=lse)
        decode.check()
        for memory in queries + tokens:
            memory.untouched("q or cache")
        o, sums, used = out.copy(), lse.copy(), int(starts[-1])
        expect((out[used:].view(numpy.uint8) == 255).all() and numpy.isnan(lse[used:]).all(),
               "a row behind the last was written")
        out[...] = numpy.full_like(out, 0)
        lse[...] = 0
        for memory, view in ((out_memory, out), (lse_memory, lse)):  # what remains is not of the outputs
            ones = int((memory.whole == 255).sum())
            expect(ones == memory.whole.size - view.nbytes, "memory around an output was written")
        return o, sums

    def compare(self, o, lse):
        at, q, cache = self.options, numbers(self.q), numbers(self.cache)
        expected, sums = numpy.zeros((self.rows, at["heads"], 512)), numpy.full((self.rows, at["heads"]), numpy.nan)
        reach = numpy.zeros((self.rows, at["heads"]))
        unit = numpy.log2(numpy.e) if at["lse_base2"] else 1
        for r, length in enumerate(self.lengths):
            tokens = cache[self.table[r, :-(-int(length) // at["page"])]].reshape(-1, 576)[:length]
            rows = slice(self.starts[r], self.starts[r + 1])
            seen = causal_rows(rows.stop - rows.start, int(length), at["causal"])
            for head in range(at["heads"]):
                expected[rows, head], sums[rows, head], reach[rows,
                                                              head] = attention(q[rows, head], tokens, tokens[:, :512],
                                                                                at["scale"] or 192**-0.5, seen)
        used = self.starts[-1]
        if at["empty_lse_positive"]:
            sums[numpy.isneginf(sums)] = numpy.inf
        return difference("o", o[:used], expected[:used], at["dtype"]) or \
            difference("lse", lse[:used], sums[:used] * unit, at["dtype"], reach[:used] * unit)


def refused(call, said, also=()):
    """It must raise hypermla.Error with one sentence; for a wrong type of Python TypeError will do."""
    try:
        call()
    except hypermla.Error as error:
        text = str(error)
        expect(
            0 < len(text) < 800 and "\n" not in text and "json.exception" not in text and
            "--" not in text.split("`")[0], f"{said} raises no sentence: {text!r}")
    except also:
        pass
    else:
        raise Fault(f"{said} was accepted")


def wrong_argument(random):
    """A call with one wrong argument among good ones."""
    name = pick(random, [*KERNELS])
    small = {"b": 1, "s": 1, "h": 2} if name != "prefix_decompression" else {"b": 1, "t": 9, "h": 2}
    if name in ("flash_attention", "flash_mla", "flash_mla_split_kv", "mla_var6_plus"):
        small["t"] = 9
    field = pick(random, [*small])
    huge = int(random.integers(2**31, 2**63))
    kernel = lambda *words, **more: hypermla.Kernel(name, *words, **{"device": "cpu", **small, **more})
    bound = lambda: bind_all(kernel())
    word = "".join(pick(random, "abcdefgh_.0189 \"'{}[]%$`\\é") for _ in range(random.integers(1, 12)))
    choices = [(f"{name} {field}=0", lambda: kernel(**{field: 0})),
               (f"{name} {field}={-huge}", lambda: kernel(**{field: -huge})),
               (f"{name} {field}={huge}", lambda: kernel(**{field: huge})),
               (f"{name} {field}=2**31-1", lambda: bind_all(kernel(**{field: 2**31 - 1}), 16).run()),
               (f"{name} {field}={word!r}", lambda: kernel(**{field: word + "x"})),
               (f"{name} {field}=1.5", lambda: kernel(**{field: 1.5})),
               (f"{name} {field}=None", lambda: kernel(**{field: None})),
               (f"{name} {field}=''", lambda: kernel(**{field: ""})),
               (f"{name} x{word!r}=1", lambda: kernel(**{"x" + word: 1})), (f"{name} d=7", lambda: kernel(d=7)),
               (f"{name} dtype={word!r}", lambda: kernel(dtype=word)),
               (f"kernel {word!r}", lambda: hypermla.Kernel(word + "?", device="cpu")),
               (f"{name} version {word!r}", lambda: kernel(word + "?")),
               (f"device {word!r}", lambda: kernel(device=word + "?")),
               (f"language {word!r}", lambda: kernel(language=word)), ("run of nothing", lambda: kernel().run()),
               ("tune of nothing", lambda: kernel().tune()),
               ("bind of nothing", lambda: kernel().bind(word, numpy.zeros(3))),
               ("a misaligned address", lambda: kernel().bind("o", 16 * 1000 + int(random.integers(1, 16)))),
               ("address 0", lambda: kernel().bind("o", 0)),
               ("another type", lambda: kernel().bind("o", numpy.zeros(kernel().tensors[0].shape))),
               ("an array of another shape", lambda: kernel().bind("o", numpy.zeros(3, numpy.uint16))),
               ("an output in an input", lambda: alias(kernel()).run()),
               (f"tune({-huge})", lambda: bound().tune(-huge)), ("tune(-1)", lambda: bound().tune(-1)),
               (f"profile({word!r})", lambda: bound().profile(word)),
               ("bench_runs=0", lambda: bound().profile("event", bench_runs=0)),
               ("a label that is no text", lambda: bound().profile("event", label="\udcff")),
               (f"predicted_seconds({word!r})", lambda: kernel().predicted_seconds(word)),
               (f"choose({word!r})", lambda: hypermla.choose(word)),
               (f"choose(b={-huge})", lambda: hypermla.choose(b=-huge)),
               (f"choose(x{word!r})", lambda: hypermla.choose(**{"x" + word: 1})),
               ("choose(t=2**31-1)", lambda: hypermla.choose(b=2**31 - 1, t=2**31 - 1, s=2**31 - 1)),
               *wrong_hybrid(random), *wrong_decode(random, word)]
    said, call = pick(random, choices)
    refused(call, said, (TypeError, ))


def bind_all(kernel, address=None):
    kernel.memory = [] if address else [Memory(one.shape, one.dtype) for one in kernel.tensors]
    for i, one in enumerate(kernel.tensors):
        kernel.bind(one.name, address * (i + 1) if address else kernel.memory[i].array)
    return kernel


def alias(kernel):
    bind_all(kernel)
    first = next(one for one in kernel.tensors if one.role == "input")
    written = [one for one in kernel.tensors if one.role != "input"][-1]
    kernel.bind(written.name, kernel.memory[kernel.tensors.index(first)].array.ctypes.data)
    return kernel


def wrong_hybrid(random):
    """Lengths and prefixes that would lead a kernel out of its tensors."""
    def run(name, value):
        kernel = bind_all(
            hypermla.Kernel("mla_var6_plus", device="cpu", b=3, s=1, t=20, n=8, h=1, prefixes=2, ragged=True))
        arrays = {one.name: memory.array for one, memory in zip(kernel.tensors, kernel.memory)}
        for other in ("lengths", "new_lengths", "prefix"):
            arrays[other][:] = 0
        arrays[name][random.integers(len(arrays[name]))] = value
        kernel.run()

    for name, most in (("lengths", 12), ("new_lengths", 8), ("prefix", 1)):
        for value in (-1, most + 1, int(random.integers(most + 1, 2**31)), -(2**31)):
            yield f"{name} {value}", lambda name=name, value=value: run(name, value)


def wrong_decode(random, word):
    base = {"heads": 2, "max_requests": 3, "max_queries": 2, "max_tokens": 40, "page": 16, "device": "cpu"}
    make = lambda **more: hypermla.MlaDecode(**{**base, **more})
    q, cache = numpy.zeros((4, 2, 576), numpy.uint16), numpy.zeros((5, 16, 576), numpy.uint16)
    table, lengths = numpy.zeros((2, 3), numpy.int32), numpy.array([40, 17], numpy.int32)

    def step(q=q, cache=cache, table=table, lengths=lengths, starts=None, planned=True, **more):
        decode = make()
        if planned:
            decode.plan(lengths, starts)
        decode.run(q, cache, table, **more)

    integer = int(random.integers(41, 2**31))
    ints = lambda *values: numpy.array(values, numpy.int32)
    wild = table.copy()
    wild[1, 1] = pick(random, (-1, 5, integer, -(2**31)))
    odd = numpy.zeros((4, 2, 580), numpy.uint16)[..., :576]
    yield from [
        *[(f"MlaDecode {key}={value}", lambda key=key, value=value: make(**{key: value}))
          for key, value in (("heads", 0), ("heads", 1025), ("max_requests", -1), ("max_queries", 0),
                             ("max_tokens", 2**20 + 1), ("page", 7), ("page", 0), ("dtype", "float32"), ("dtype", word),
                             ("scale", -1.0), ("split", 65), ("scale", float("nan")), ("scale", float("inf")),
                             ("split", -64), ("kernel", "x" + word), ("max_query_tokens", 7), ("max_query_tokens", -1),
                             ("device", "x" + word), ("heads", 2**31))],
        ("a run without a plan", lambda: step(planned=False)),
        (f"a length {integer}", lambda: step(lengths=ints(3, integer))),
        ("a length -1", lambda: step(lengths=ints(-1, 3))),
        ("too many requests", lambda: step(lengths=ints(1, 1, 1, 1))),
        ("starts that fall", lambda: step(starts=ints(0, 2, 1))),
        ("starts that begin late", lambda: step(starts=ints(1, 2, 3))),
        ("too many queries", lambda: step(starts=ints(0, 3, 4))),
        ("too few rows", lambda: step(q=q[:3])),
        ("a page out of the cache", lambda: step(table=wild)),
        ("starts of another size", lambda: step(starts=ints(0, 1))),
        ("lengths of 64 bits", lambda: step(lengths=lengths.astype(numpy.int64))),
        ("q of fp32", lambda: step(q=q.astype(numpy.float32))),
        ("q with odd strides", lambda: step(q=odd)),
        ("a transposed q", lambda: step(q=numpy.zeros((4, 576, 2), numpy.uint16).swapaxes(1, 2))),
        ("a cache of other pages", lambda: step(cache=cache[:, :8])),
        ("out in q", lambda: step(out=q[..., :512])),
        ("out of other heads", lambda: step(out=numpy.zeros((4, 3, 512), numpy.uint16))),
        ("lse of another type", lambda: step(lse=numpy.zeros((4, 2)))),
        ("a misaligned q", lambda: step(q=numpy.zeros(4 * 2 * 576 + 8, numpy.uint16)[1:-7].reshape(4, 2, 576))),
    ]


def wrong_command(random):
    """A command line with one wrong word: status 2 and one line."""
    word = "".join(pick(random, "abcxyz_.019 \"'{}[]%$`\\") for _ in range(random.integers(1, 10)))
    number = str(pick(random, (0, -1, -(2**31), 2**31, 2**64, 1e9, "1.5", "nan", "0x10", "", " ")))
    kernel = ["kernel", pick(random, [*KERNELS]), "--device=cpu", "--no_autotune", "--prof_type=disabled"]
    words = pick(
        random,
        [[*kernel, f"--b={number}"], [*kernel, f"--h={number}"], [*kernel, f"--x{word}=1"], [*kernel, f"--Bm={number}"],
         [*kernel, "--dtype=x" + word], [*kernel, "--s=1", "--d=7"], [*kernel, "--b=2147483647", "--h=2147483647"],
         ["kernel", "x" + word], ["kernel", "flash_mla", "x" + word], ["x" + word], ["predict", "x" + word],
         ["kernel", "flash_mla", "--device=x" + word], ["kernel", "flash_attention", "--seed=-1"],
         ["kernel", "flash_attention", "--prof_type=x" + word], ["choose", f"--b={number}x"],
         ["choose", "--prefixes=3", "--b=2"], ["compile", "flash_mla", "--arch=x" + word], ["compare", "x" + word, "y"],
         ["verify", "x" + word], ["kernel", "flash_attention", "--out_dir=/proc/none/x"],
         ["verify", "--records_only", "--record=/dev/null"], ["choose", "--device_name=x" + word]])
    done = subprocess.run([BINARY, *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False)
    said = done.stderr.decode(errors="replace")
    expect(
        done.returncode == 2 and said.startswith("hypermla: ") and said.count("\n") == 1 and
        "json.exception" not in said, f"hypermla {words} ended with {done.returncode} and said {said!r}")


def run(seed, index, _directory):
    random = numpy.random.default_rng([seed, index])
    draw = random.random()
    if draw < 0.24:
        DecodeCase(random).run()
    elif draw < 0.32:
        wrong_argument(random)
    elif draw < 0.33:
        wrong_command(random)
    else:
        of_group = numpy.random.default_rng([seed, index // GROUP, 1])
        weights = numpy.array([2, 2, 2, 1, 2, 1, 5]) / 15
        name = [*KERNELS][of_group.choice(7, p=weights)]
        KernelCase(random, name, pick(of_group, KERNELS[name]), pick(of_group, ("bfloat16", "float16")),
                   bool(of_group.random() < 0.5), pick(of_group, SIZES)).run()
