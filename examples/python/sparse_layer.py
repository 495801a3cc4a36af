"""A layer of DeepSeek-V3.2's sparse attention (arXiv 2512.02556) with random weights: the layer of mla_layer.py, whose
queries attend to the tokens that a lightning indexer chooses for them.

The indexer scores every token that a query may see by sum over its heads of weight * relu(q k), and the query attends
to the top-k. It is written here plainly, with arrays; engines have kernels for it. append() and MlaDecode do the rest,
over a cache in bfloat16 and over those in FP8. Every choice and every output is compared with a direct computation in
double precision. A difference ends the program with status 1.

    python sparse_layer.py                           # PyTorch and a GPU where there are, else NumPy and the CPU
    python sparse_layer.py --arrays=numpy --hidden=256 --heads=2 --index_heads=4 --steps=2
"""

import argparse
import sys

import hypermla
import numpy
from mla_layer import (LATENT, MOST_TOKENS, NOPE, PAGE, Q_RANK, ROPE, NumPyArrays, TorchArrays, normed, projected,
                       random_weights, rotated)

INDEX_COLUMNS = 128  # of the indexer's queries and keys
TOLERANCES = {"as_queries": 0.02, "fp8_656": 0.1, "fp8_576": 0.1}  # of the largest output
BYTES = {"fp8_656": 656, "fp8_576": 576}
ONE_FACTOR = LATENT ** 0.5 / 448  # of "fp8_576": a normed vector has no number beyond 448 of it


def indexer_weights(hidden, heads, dice):
    shapes = {"index_q": (Q_RANK, heads, INDEX_COLUMNS), "index_k": (hidden, INDEX_COLUMNS),
              "index_weights": (hidden, heads)}
    return {name: dice.standard_normal(shape, numpy.float32) / numpy.float32(shape[0] ** 0.5)
            for name, shape in shapes.items()}


def turned(arrays, weights, rows, positions):
    """RoPE of the first 64 columns of (tokens, heads, 128)."""
    angles = (positions[:, None] * weights["frequencies"])[:, None, :]
    return arrays.library.concatenate([rotated(arrays.library, rows[..., :ROPE], angles), rows[..., ROPE:]], -1)


def index_queries(arrays, weights, x, positions):
    """The indexer's queries (tokens, heads, 128) and the weights of their heads (tokens, heads)."""
    q = arrays.einsum("tr,rhc->thc", normed(x @ weights["q_down"]), weights["index_q"])
    return (turned(arrays, weights, q, positions),
            x @ weights["index_weights"] * (q.shape[1] * INDEX_COLUMNS) ** -0.5)


def index_keys(arrays, weights, x, positions):
    """(tokens, 128)"""
    k = x @ weights["index_k"]
    k = normed(k - k.mean(-1, keepdims=True))
    return turned(arrays, weights, k[:, None], positions)[:, 0]


def index_scores(arrays, q, weights, k):
    """(queries, tokens) of queries (queries, heads, 128), weights (queries, heads) and keys (tokens, 128)."""
    return arrays.einsum("qh,qht->qt", weights, arrays.library.clip(arrays.einsum("qhc,tc->qht", q, k), 0, None))


def unseen(tokens, queries):
    """Which of the tokens the last queries may not see: those behind them (queries, tokens)."""
    return numpy.arange(tokens) > numpy.arange(tokens - queries, tokens)[:, None]


class SparseLayer:
    """The layer in an engine: a paged cache, the indexer's keys beside it, and one MlaDecode."""

    def __init__(self, arrays, weights, requests, most_queries, top_k, cache_format):
        self.arrays, self.requests, self.top_k = arrays, requests, top_k
        self.weights = {name: arrays.array(value) for name, value in weights.items()}
        pages = MOST_TOKENS // PAGE
        order = numpy.random.default_rng(7).permutation(requests * pages)
        self.slots = (order.reshape(requests, pages, 1) * PAGE + numpy.arange(PAGE)).reshape(requests, -1)
        self.factor = arrays.array(numpy.array([ONE_FACTOR], numpy.float32)) if cache_format == "fp8_576" else None
        if cache_format in BYTES:
            self.cache = arrays.array(numpy.zeros((requests * pages, PAGE, BYTES[cache_format]), numpy.uint8))
        else:
            empty = numpy.zeros((requests * pages, PAGE, LATENT + ROPE), numpy.float32)
            self.cache = arrays.to_bfloat16(arrays.array(empty))
        self.index_keys = arrays.array(numpy.zeros((requests * pages * PAGE, INDEX_COLUMNS), numpy.float32))
        self.decode = hypermla.MlaDecode(heads=weights["k_up"].shape[1], max_requests=requests * most_queries,
                                         max_tokens=top_k, page=PAGE, sparse=True, cache_format=cache_format,
                                         device=arrays.device)

    def append(self, request_of, positions, x):
        """Writes the tokens into the caches; returns the queries, and the indexer's with their weights."""
        arrays, given = self.arrays, (self.arrays, self.weights, self.arrays.array(x), self.arrays.array(positions))
        *q, z, k_rope = projected(*given)
        slots = arrays.array(self.slots[request_of, positions].astype(numpy.int64))
        hypermla.append((arrays.to_bfloat16(z), arrays.to_bfloat16(k_rope)), self.cache, slots,
                        cache_scale=self.factor)
        self.index_keys[slots] = index_keys(*given)
        return q, index_queries(*given)

    def choose(self, request, tokens, index_q, index_weights):
        """The tokens (queries, top-k) that the last queries of a request choose, and how many each."""
        arrays, queries = self.arrays, len(index_q)
        keys = self.index_keys[arrays.array(self.slots[request, :tokens])]
        scores = index_scores(arrays, index_q, index_weights, keys)
        scores[arrays.array(unseen(tokens, queries))] = -numpy.inf
        chosen = numpy.full((queries, self.top_k), -1)
        best = arrays.host(arrays.library.argsort(-scores, -1)[:, :self.top_k])
        chosen[:, :best.shape[1]] = best
        return chosen, numpy.minimum(numpy.arange(tokens - queries, tokens) + 1, self.top_k)

    def step(self, lengths, queries, x):
        """Outputs (tokens, hidden) of the new tokens `x`, `queries` of each request, which had `lengths` so far; and
        the tokens that each chose."""
        arrays, starts = self.arrays, numpy.concatenate([[0], numpy.cumsum(queries)])
        request_of = numpy.repeat(numpy.arange(self.requests), queries)
        positions = numpy.arange(starts[-1]) - starts[request_of] + lengths[request_of]
        (q, q_rope), index_q = self.append(request_of, positions, x)
        choices = [self.choose(request, lengths[request] + queries[request],
                               *(one[starts[request]:starts[request + 1]] for one in index_q))
                   for request in range(self.requests)]
        chosen, counts = (numpy.concatenate(one) for one in zip(*choices))
        slots = numpy.where(chosen < 0, -1, self.slots[request_of[:, None], chosen])
        self.decode.plan(arrays.array(counts.astype(numpy.int32)))
        q_latent = arrays.einsum("thc,rhc->thr", q, self.weights["k_up"])  # keys are absorbed
        o, _ = self.decode.run((arrays.to_bfloat16(q_latent), arrays.to_bfloat16(q_rope)), self.cache,
                               arrays.array(slots.astype(numpy.int32)), cache_scale=self.factor)
        values = arrays.einsum("thr,rhv->thv", arrays.to_float(o), self.weights["v_up"])  # and values
        outputs = arrays.host(arrays.einsum("thv,hvo->to", values, self.weights["out"]))
        return outputs, [row[:count] for row, count in zip(chosen, counts)]


def wrong_choice(weights, x, chosen, top_k):
    """What is wrong with the tokens that the last queries of hidden states x chose; None: nothing."""
    arrays, n, queries = NumPyArrays(), len(x), len(chosen)
    positions, x = numpy.arange(n), x.astype(numpy.float64)
    scores = index_scores(arrays, *index_queries(arrays, weights, x[-queries:], positions[-queries:]),
                          index_keys(arrays, weights, x, positions))
    for row, hidden, own in zip(scores, unseen(n, queries), chosen):
        seen = numpy.sort(row[~hidden])[::-1]
        least = seen[min(top_k, len(seen)) - 1] - 1e-5 * numpy.abs(seen).max()  # what it computes in float32 is close
        if len(set(own)) != min(top_k, len(seen)) or hidden[own].any() or not row[own].min() >= least:
            return f"of {len(seen)} tokens others have the best scores than those that were chosen"
    return None


def direct(weights, x, chosen):
    """Outputs (queries, hidden) of the last tokens of a request, which see the chosen ones."""
    n, queries, einsum = len(x), len(chosen), NumPyArrays.einsum
    q, q_rope, z, k_rope = projected(NumPyArrays(), weights, x.astype(numpy.float64), numpy.arange(n))
    k, v = (einsum("tr,rhc->thc", z, weights[name]) for name in ("k_up", "v_up"))
    scores = einsum("qhc,thc->hqt", q[-queries:], k) + einsum("qhc,tc->hqt", q_rope[-queries:], k_rope)
    scores *= (NOPE + ROPE) ** -0.5
    for query, own in enumerate(chosen):
        scores[:, query, numpy.setdiff1d(numpy.arange(n), own)] = -numpy.inf
    share = numpy.exp(scores - scores.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    return einsum("qhv,hvo->qo", einsum("hqt,thv->qhv", share, v), weights["out"])


def decode_steps(at, arrays, weights, dice, cache_format):
    """The largest difference of an output, of the largest one, or a sentence on what is wrong."""
    layer = SparseLayer(arrays, weights, at.requests, 2, at.top_k, cache_format)
    hidden_states = lambda tokens: dice.standard_normal((tokens, at.hidden), numpy.float32)
    tokens = [hidden_states(length) for length in dice.integers(1, 200, at.requests)]  # prompts
    for request, prompt in enumerate(tokens):
        layer.append(numpy.full(len(prompt), request), numpy.arange(len(prompt)), prompt)
    worst = 0.0
    for _ in range(at.steps):
        queries = dice.integers(1, 3, at.requests)
        x = hidden_states(queries.sum())
        outputs, chosen = layer.step(numpy.array([len(one) for one in tokens]), queries, x)
        ends = numpy.cumsum(queries)
        for request, end in enumerate(ends):
            own = slice(end - queries[request], end)
            tokens[request] = numpy.concatenate([tokens[request], x[own]])
            if wrong := wrong_choice(weights, tokens[request], chosen[own], at.top_k):
                return f"request {request}: {wrong}"
            expected = direct(weights, tokens[request], chosen[own])
            difference = numpy.abs(outputs[own] - expected).max() / numpy.abs(expected).max()
            if not difference <= TOLERANCES[cache_format]:
                return f"request {request} at {len(tokens[request])} tokens: the outputs differ by {difference:.3f}"
            worst = max(worst, difference)
    layer.decode.check()
    print(f"{cache_format}: {at.steps} steps of {at.requests} requests, top-{at.top_k}: outputs differ from the direct "
          f"computation by {worst:.4f} of the largest")
    return None


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--hidden", type=int, default=7168)
    flags.add_argument("--heads", type=int, default=16)
    flags.add_argument("--index_heads", type=int, default=64)
    flags.add_argument("--requests", type=int, default=4)
    flags.add_argument("--steps", type=int, default=4)
    flags.add_argument("--top_k", type=int, default=64)
    flags.add_argument("--arrays", choices=("numpy", "torch"), help="default: torch where it is installed")
    at = flags.parse_args()
    try:
        arrays = NumPyArrays() if at.arrays == "numpy" else TorchArrays()
    except ImportError:
        if at.arrays:
            raise
        arrays = NumPyArrays()
    dice = numpy.random.default_rng(1)
    weights = random_weights(at.hidden, at.heads, dice) | indexer_weights(at.hidden, at.index_heads, dice)
    for cache_format in TOLERANCES:
        if wrong := decode_steps(at, arrays, weights, dice, cache_format):
            return f"{cache_format}: {wrong}"
    return None


if __name__ == "__main__":
    sys.exit(main())
