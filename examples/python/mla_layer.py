"""A layer of Multi-head Latent Attention with random weights in the shapes of DeepSeek-V3 (arXiv 2412.19437, section
2.1.1), which decodes with drafts: in each step every request brings its next token and some drafts, a part of the
drafts is accepted, and the next step overwrites the others in the cache.

The layer works on latent vectors (the projections to keys and values are absorbed into queries and outputs) through
MlaDecode. Every output is compared with a direct computation, which decompresses keys and values of all heads from the
hidden states of the whole request, in double precision. A difference ends the program with status 1.

    python mla_layer.py                              # PyTorch and a GPU where there are, else NumPy and the CPU
    python mla_layer.py --arrays=numpy --hidden=256 --heads=4
"""

import argparse
import functools
import sys

import hypermla
import numpy

Q_RANK, LATENT, ROPE, NOPE, VALUE = 1536, 512, 64, 128, 128  # of DeepSeek-V3, as its 7168 hidden columns
PAGE, MOST_TOKENS = 64, 1024
TOLERANCE = 0.02  # of the largest output: queries, cache and latent outputs are bfloat16


class NumPyArrays:
    """NumPy on the CPU, where uint16 stands for bfloat16."""

    device, library = "cpu", numpy
    einsum = staticmethod(functools.partial(numpy.einsum, optimize=True))  # by BLAS where it can

    def array(self, values):
        return values

    def host(self, values):
        return values

    def to_bfloat16(self, values):
        bits = numpy.ascontiguousarray(values, numpy.float32).view(numpy.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(numpy.uint16)

    def to_float(self, values):
        return (values.astype(numpy.uint32) << 16).view(numpy.float32)


class TorchArrays:
    """PyTorch, on a GPU where there is one."""

    def __init__(self):
        import torch

        self.library, self.einsum = torch, torch.einsum
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def array(self, values):
        return self.library.from_numpy(numpy.ascontiguousarray(values)).to(self.device)

    def host(self, values):
        return values.cpu().numpy()

    def to_bfloat16(self, values):
        return values.bfloat16()

    def to_float(self, values):
        return values.float()


def random_weights(hidden, heads, dice):
    """Arrays by name, scaled so that what they give has a variance of about 1; and RoPE's frequencies."""
    shapes = {"q_down": (hidden, Q_RANK), "q_up": (Q_RANK, heads, NOPE + ROPE), "kv_down": (hidden, LATENT + ROPE),
              "k_up": (LATENT, heads, NOPE), "v_up": (LATENT, heads, VALUE), "out": (heads, VALUE, hidden)}
    inputs = {name: shape[0] * (VALUE if name == "out" else 1) for name, shape in shapes.items()}
    weights = {name: dice.standard_normal(shape, numpy.float32) / numpy.float32(inputs[name] ** 0.5)
               for name, shape in shapes.items()}
    return weights | {"frequencies": (10000.0 ** -(numpy.arange(0, ROPE, 2) / ROPE)).astype(numpy.float32)}


def normed(x):
    return x / ((x * x).mean(-1, keepdims=True) + 1e-6) ** 0.5


def rotated(library, rows, angles):
    """RoPE of (tokens, heads, 64) by the angles (tokens, 1, 32) of their positions."""
    cos, sin, first, second = library.cos(angles), library.sin(angles), rows[..., :ROPE // 2], rows[..., ROPE // 2:]
    return library.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def projected(arrays, weights, x, positions):
    """Queries (tokens, heads, 128) and (.., 64) and what the cache keeps of the tokens: (tokens, 512) and (.., 64)."""
    angles = (positions[:, None] * weights["frequencies"])[:, None, :]
    q = arrays.einsum("tr,rhc->thc", normed(x @ weights["q_down"]), weights["q_up"])
    kv = x @ weights["kv_down"]
    k_rope = rotated(arrays.library, kv[:, None, LATENT:], angles)[:, 0]
    return q[..., :NOPE], rotated(arrays.library, q[..., NOPE:], angles), normed(kv[:, :LATENT]), k_rope


def direct(weights, x, queries):
    """Outputs (queries, hidden) of the last tokens of a request, from the hidden states of all of them."""
    n, einsum = len(x), NumPyArrays.einsum
    q, q_rope, z, k_rope = projected(NumPyArrays(), weights, x.astype(numpy.float64), numpy.arange(n))
    k, v = (einsum("tr,rhc->thc", z, weights[name]) for name in ("k_up", "v_up"))
    scores = einsum("qhc,thc->hqt", q[-queries:], k) + einsum("qhc,tc->hqt", q_rope[-queries:], k_rope)
    scores *= (NOPE + ROPE) ** -0.5
    scores[:, numpy.arange(n) > numpy.arange(n - queries, n)[:, None]] = -numpy.inf
    share = numpy.exp(scores - scores.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    return einsum("qhv,hvo->qo", einsum("hqt,thv->qhv", share, v), weights["out"])


class Layer:
    """The layer in an engine: a paged cache of latent vectors and one MlaDecode."""

    def __init__(self, arrays, weights, requests, most_queries):
        self.arrays, self.requests = arrays, requests
        self.weights = {name: arrays.array(value) for name, value in weights.items()}
        pages = MOST_TOKENS // PAGE
        order = numpy.random.default_rng(7).permutation(requests * pages)  # an engine hands out pages as they get free
        self.table = order.reshape(requests, pages).astype(numpy.int32)
        self.block_table = arrays.array(self.table)
        empty = numpy.zeros((requests * pages, PAGE, LATENT + ROPE), numpy.float32)
        self.cache = arrays.to_bfloat16(arrays.array(empty))
        self.decode = hypermla.MlaDecode(heads=weights["k_up"].shape[1], max_requests=requests,
                                         max_queries=most_queries, max_tokens=MOST_TOKENS, page=PAGE,
                                         device=arrays.device)

    def append(self, request_of, positions, x):
        """Writes the tokens' latent vectors into the cache; returns the queries."""
        library, arrays = self.arrays.library, self.arrays
        *q, z, k_rope = projected(arrays, self.weights, arrays.array(x), arrays.array(positions))
        slots = self.table[request_of, positions // PAGE].astype(numpy.int64) * PAGE + positions % PAGE
        rows = self.cache.reshape(-1, LATENT + ROPE)
        rows[arrays.array(slots)] = arrays.to_bfloat16(library.concatenate([z, k_rope], -1))
        return q

    def step(self, lengths, queries, x):
        """Outputs (tokens, hidden) of the new tokens `x`: `queries` of each request, which had `lengths` so far."""
        arrays = self.arrays
        starts = numpy.concatenate([[0], numpy.cumsum(queries)]).astype(numpy.int32)
        request_of = numpy.repeat(numpy.arange(self.requests), queries)
        positions = numpy.arange(starts[-1]) - starts[request_of] + lengths[request_of]
        q, q_rope = self.append(request_of, positions, x)
        q_latent = arrays.einsum("thc,rhc->thr", q, self.weights["k_up"])  # keys are absorbed
        self.decode.plan(arrays.array((lengths + queries).astype(numpy.int32)), arrays.array(starts))
        o, _ = self.decode.run((arrays.to_bfloat16(q_latent), arrays.to_bfloat16(q_rope)),
                               (self.cache[..., :LATENT], self.cache[..., LATENT:]), self.block_table)
        values = arrays.einsum("thr,rhv->thv", arrays.to_float(o), self.weights["v_up"])  # and values
        return arrays.host(arrays.einsum("thv,hvo->to", values, self.weights["out"]))


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--hidden", type=int, default=7168)
    flags.add_argument("--heads", type=int, default=16)
    flags.add_argument("--requests", type=int, default=4)
    flags.add_argument("--drafts", type=int, default=3, help="of a request and step, at most")
    flags.add_argument("--steps", type=int, default=8)
    flags.add_argument("--arrays", choices=("numpy", "torch"), help="default: torch where it is installed")
    at = flags.parse_args()
    try:
        arrays = NumPyArrays() if at.arrays == "numpy" else TorchArrays()
    except ImportError:
        if at.arrays:
            raise
        arrays = NumPyArrays()

    dice = numpy.random.default_rng(1)
    weights = random_weights(at.hidden, at.heads, dice)
    layer = Layer(arrays, weights, at.requests, 1 + at.drafts)
    hidden_states = lambda tokens: dice.standard_normal((tokens, at.hidden), numpy.float32)
    accepted = [hidden_states(length) for length in dice.integers(1, 200, at.requests)]  # prompts
    for request, prompt in enumerate(accepted):
        layer.append(numpy.full(len(prompt), request), numpy.arange(len(prompt)), prompt)
    print(layer.decode.explain())

    worst, kept, rejected = 0.0, 0, 0
    for _ in range(at.steps):
        queries = 1 + dice.integers(0, at.drafts + 1, at.requests)  # the next token and its drafts
        x = hidden_states(queries.sum())
        outputs = layer.step(numpy.array([len(one) for one in accepted]), queries, x)
        parts = (numpy.split(of, numpy.cumsum(queries)[:-1]) for of in (x, outputs))
        for request, (new, given) in enumerate(zip(*parts)):
            expected = direct(weights, numpy.concatenate([accepted[request], new]), len(new))
            difference = numpy.abs(given - expected).max() / numpy.abs(expected).max()
            if not difference <= TOLERANCE:
                return f"request {request} at {len(accepted[request])} tokens: the outputs differ by {difference:.3f}"
            worst = max(worst, difference)
            keep = 1 + dice.integers(0, len(new))  # a sampler would say how many drafts are right
            accepted[request] = numpy.concatenate([accepted[request], new[:keep]])
            kept, rejected = kept + keep - 1, rejected + len(new) - keep
    layer.decode.check()
    print(f"{at.steps} steps of {at.requests} requests, {kept} drafts accepted and {rejected} rejected: outputs differ "
          f"from the direct computation by {worst:.4f} of the largest")


if __name__ == "__main__":
    sys.exit(main())
