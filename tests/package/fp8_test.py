#!/usr/bin/env python3
"""What a cache in FP8 costs in accuracy, on the CPU: the table of docs/fp8.md, which must be true; and the example of a
sparse layer, which reads all forms of a cache.

    tests/package/fp8_test.py --table      # prints the table
"""

import importlib
import math
import os
import pathlib
import re
import subprocess
import sys
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cli"))
from support import BUILD, CHECKOUT

try:
    import numpy
except ImportError:
    print("NumPy is not installed")
    sys.exit(77)
sys.path.insert(0, str(BUILD / "python"))
import hypermla

PAGE, PAGES, QUERIES, HEADS, TOP_K, SCALE = 64, 48, 8, 4, 2048, 192**-0.5


def bfloat16(values):
    bits = numpy.ascontiguousarray(values, numpy.float32).view(numpy.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(numpy.uint16)


def floats(bits):
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)


def e4m3_codes(values):
    """To nearest, ties to even, of magnitudes up to 448."""
    magnitudes = numpy.abs(values).astype(numpy.float64)
    exponents = numpy.maximum(numpy.frexp(magnitudes)[1] - 1, -6)
    codes = (exponents + 6) * 8 + numpy.rint(magnitudes * 2.0 ** (3 - exponents)).astype(int)
    return (codes | numpy.where(numpy.signbit(values), 128, 0)).astype(numpy.uint8)


def e4m3_values(codes):
    magnitudes = (codes & 127).astype(int)
    magnitudes = numpy.where(magnitudes < 8, magnitudes / 512, (8 + magnitudes % 8) * 2.0 ** (magnitudes // 8 - 10))
    return numpy.where(codes > 127, -magnitudes, magnitudes)


def latent_of(cache, scale):
    """What the 512 values of each token of a cache in FP8 stand for, as the kernels read them."""
    if cache.shape[2] == 576:
        return floats(bfloat16(e4m3_values(cache.reshape(-1, 576)[:, :512]) * scale))
    tokens = numpy.ascontiguousarray(cache.reshape(-1, 656))
    factors = tokens[:, 512:528].copy().view(numpy.float32).repeat(128, 1)
    return floats(bfloat16(e4m3_values(tokens[:, :512]) * factors))


def with_powers_of_two(cache, rows):
    """The cache with factors rounded up to powers of two."""
    tokens = cache.reshape(-1, 656).copy()
    factors = 2.0 ** numpy.ceil(numpy.log2(tokens[:, 512:528].copy().view(numpy.float32)))
    tokens[:, :512] = e4m3_codes(floats(rows[:, :512]) / factors.repeat(128, 1))
    tokens[:, 512:528] = factors.astype(numpy.float32).view(numpy.uint8)
    return tokens.reshape(cache.shape)


def data(random):
    """Tokens [PAGES * PAGE, 576] by the name of what they are like."""
    normal = random.standard_normal((PAGES * PAGE, 576))
    heavy = random.standard_t(3, normal.shape) / 3**0.5  # of variance 1
    outliers = normal.copy()
    outliers[:, random.choice(512, 4, replace=False)] *= 50
    return {"normal": normal, "heavy tails: Student's t, 3 degrees": heavy,
            "outliers: 4 of 512 columns times 50": outliers}


def scale_of_queries(q):
    return numpy.float32([numpy.abs(floats(q)).max() / 448])


def decoded_with_fp8_queries(cache, q, slots, scale):
    """Dense, where pages are single tokens: the same, which is not offered for sparse attention."""
    q_scale = scale_of_queries(q)
    decode = hypermla.MlaDecode(heads=HEADS, max_requests=QUERIES, max_tokens=TOP_K, page=1, scale=SCALE, causal=False,
                                cache_format="fp8_576", fp8_queries=True, device="cpu")
    decode.plan(numpy.full(QUERIES, TOP_K, numpy.int32))
    return decode.run(e4m3_codes(floats(q) / q_scale), cache.reshape(-1, 1, 576), slots, cache_scale=scale,
                      q_scale=q_scale)


def decoded_as_v2(cache, q, slots, scale):
    """As flash_mla_v2 does it in one part: a score at the running maximum of its row weighs 2^7, weights are rounded to
    e4m3, and the maximum rises with the first block of 64 tokens in which a row of its warp exceeds it by more than
    1.75, in units of log2. All heads of a query are in one warp. Sums are exact here."""
    top_weight, lag, q_scale = 2.0**7, 1.75, scale_of_queries(q)
    queries, tokens = e4m3_values(e4m3_codes(floats(q) / q_scale)), e4m3_values(cache.reshape(-1, 576))
    o, lse = numpy.zeros((QUERIES, HEADS, 512)), numpy.zeros((QUERIES, HEADS))
    for query in range(QUERIES):
        seen = tokens[slots[query]]
        scores = queries[query] @ seen.T * (SCALE / numpy.log(2) * float(q_scale[0]) * float(scale[0]))
        maximum, sums, of_rounded = numpy.full(HEADS, -numpy.inf), numpy.zeros(HEADS), numpy.zeros(HEADS)
        for at in range(0, TOP_K, 64):
            block = scores[:, at:at + 64]
            if (block.max(-1) - maximum > lag).any():
                higher = numpy.maximum(maximum, block.max(-1))
                factors, maximum = 2.0 ** (maximum - higher), higher
                sums, of_rounded, o[query] = sums * factors, of_rounded * factors, o[query] * factors[:, None]
            weights = top_weight * 2.0 ** (block - maximum[:, None])
            rounded = e4m3_values(e4m3_codes(weights))
            sums, of_rounded = sums + weights.sum(-1), of_rounded + rounded.sum(-1)
            o[query] += rounded @ seen[at:at + 64, :512]
        o[query] *= scale / of_rounded[:, None]
        lse[query] = (maximum + numpy.log2(sums / top_weight)) * numpy.log(2)
    return bfloat16(o), lse


def decoded(cache, q, slots, scale):
    cache_format = {numpy.dtype("uint16"): "as_queries"}.get(cache.dtype, f"fp8_{cache.shape[2]}")
    decode = hypermla.MlaDecode(heads=HEADS, max_requests=QUERIES, max_tokens=TOP_K, page=PAGE, scale=SCALE,
                                sparse=True, cache_format=cache_format, device="cpu")
    decode.plan(numpy.full(QUERIES, TOP_K, numpy.int32))
    return decode.run(q, cache, slots, cache_scale=scale if cache_format == "fp8_576" else None)


def measured():
    """Rows (data, form, error of the latent values, largest of these, error of o, largest of the log-sum-exp)."""
    random = numpy.random.default_rng(1)
    rms = lambda values: float(numpy.sqrt(numpy.mean(numpy.square(values, dtype=numpy.float64))))
    for name, tokens in data(random).items():
        rows = bfloat16(tokens)
        exact = floats(rows).astype(numpy.float64)
        # Queries whose scores are those of normal tokens, for any magnitudes of the columns.
        q = bfloat16(random.standard_normal((QUERIES, HEADS, 576)) / numpy.sqrt(numpy.mean(exact**2, 0)))
        slots = numpy.stack([random.permutation(len(rows))[:TOP_K] for _ in range(QUERIES)]).astype(numpy.int32)
        scores = numpy.einsum("qhc,qtc->qht", floats(q).astype(numpy.float64), exact[slots]) * SCALE
        top = scores.max(-1, keepdims=True)
        share = numpy.exp(scores - top)
        lse = numpy.log(share.sum(-1)) + top[..., 0]
        o = numpy.einsum("qht,qtc->qhc", share / share.sum(-1, keepdims=True), exact[slots][..., :512])

        packed = numpy.zeros((PAGES, PAGE, 656), numpy.uint8)
        hypermla.append(rows, packed, numpy.arange(len(rows)))
        one_factor, scale = numpy.zeros((PAGES, PAGE, 576), numpy.uint8), numpy.float32([numpy.abs(exact).max() / 448])
        hypermla.append(rows, one_factor, numpy.arange(len(rows)), cache_scale=scale)
        caches = {"bfloat16": rows.reshape(PAGES, PAGE, 576), "FP8": packed,
                  "FP8, powers of two": with_powers_of_two(packed, rows), "FP8, one factor": one_factor,
                  "FP8, one factor, queries too": one_factor, "FP8, one factor, queries too, v2": one_factor}
        decodes = {"FP8, one factor, queries too": decoded_with_fp8_queries,
                   "FP8, one factor, queries too, v2": decoded_as_v2}
        for form, cache in caches.items():
            of_form = decodes.get(form, decoded)
            got_o, got_lse = of_form(cache, q, slots, scale)
            off = (latent_of(cache, scale) if form != "bfloat16" else exact[:, :512]) - exact[:, :512]
            # By column, so that small ones count as much as outliers.
            by_column = numpy.sqrt(numpy.mean(exact[:, :512]**2, 0))
            yield (name, form, rms(off / by_column), float(numpy.abs(off / by_column).max()),
                   rms((floats(got_o) - o) / numpy.sqrt(numpy.mean(o**2, (0, 1)))),
                   float(numpy.abs(got_lse - lse).max()))


def table():
    return ["| data | cache | latent values, rms | largest | output, rms | log-sum-exp, largest |",
            "|---|---|---|---|---|---|",
            *(f"| {name} | {form} | " + " | ".join(f"{value:.2g}" for value in values) + " |"
              for name, form, *values in measured())]


class OneFactorForAll(unittest.TestCase):
    def test_dense_decoding_reads_the_576_bytes_of_append(self):
        random = numpy.random.default_rng(3)
        lengths = numpy.array([70, 3], numpy.int32)
        cache = numpy.zeros((9, PAGE, 576), numpy.uint8)
        table = numpy.array([[7, 2], [4, -1]], numpy.int32)
        q, rows = bfloat16(random.standard_normal((2, HEADS, 576))), bfloat16(random.standard_normal((9 * PAGE, 576)))
        scale = numpy.array([0.01], numpy.float32)
        with self.assertRaisesRegex(hypermla.Error, "cache_scale is missing"):
            hypermla.append(rows, cache, numpy.arange(9 * PAGE))
        hypermla.append(rows, cache, numpy.arange(9 * PAGE), cache_scale=scale)
        decode = hypermla.MlaDecode(heads=HEADS, max_requests=2, max_tokens=100, page=PAGE, cache_format="fp8_576",
                                    device="cpu")
        decode.plan(lengths)
        with self.assertRaisesRegex(hypermla.Error, "cache_scale is missing"):
            decode.run(q, cache, table)
        o, lse = decode.run(q, cache, table, cache_scale=scale)
        for request, length in enumerate(lengths):
            tokens = e4m3_values(cache[table[request]].reshape(-1, 576)[:length]) * float(scale[0])
            scores = floats(q[request]).astype(numpy.float64) @ tokens.T * SCALE
            weights = numpy.exp(scores - scores.max(-1, keepdims=True))
            expected = weights @ tokens[:, :512] / weights.sum(-1, keepdims=True)
            self.assertLessEqual(numpy.abs(floats(o[request]) - expected).max(), 0.005 * numpy.abs(expected).max())
            of_lse = numpy.log(weights.sum(-1)) + scores.max(-1)
            self.assertLessEqual(numpy.abs(lse[request] - of_lse).max(), 1e-4)

    def test_queries_may_be_in_fp8(self):
        random = numpy.random.default_rng(4)
        values, tokens = random.standard_normal((2, HEADS, 576)), random.standard_normal((2 * PAGE, 576))
        q, cache = e4m3_codes(values * 50), e4m3_codes(tokens * 100).reshape(2, PAGE, 576)
        q_scale, scale = numpy.array([0.02], numpy.float32), numpy.array([0.01], numpy.float32)
        decode = hypermla.MlaDecode(heads=HEADS, max_requests=2, max_tokens=100, page=PAGE, cache_format="fp8_576",
                                    fp8_queries=True, device="cpu")
        table, lengths = numpy.array([[1, 0], [0, 1]], numpy.int32), numpy.array([70, 3], numpy.int32)
        decode.plan(lengths)
        with self.assertRaisesRegex(hypermla.Error, "q_scale is missing"):
            decode.run(q, cache, table, cache_scale=scale)
        with self.assertRaisesRegex(hypermla.Error, "q must be uint8"):
            decode.run(bfloat16(values), cache, table, cache_scale=scale, q_scale=q_scale)
        o, lse = decode.run(q, cache, table, cache_scale=scale, q_scale=q_scale)
        self.assertEqual(o.dtype, numpy.uint16)
        pair = numpy.ascontiguousarray(q[..., :512]), numpy.ascontiguousarray(q[..., 512:])
        apart, of_apart = decode.run(pair, cache, table, cache_scale=scale, q_scale=q_scale)
        self.assertTrue((apart == o).all() and (of_apart == lse).all())
        same = hypermla.MlaDecode(heads=HEADS, max_requests=2, max_tokens=100, page=PAGE, cache_format="fp8_576",
                                  device="cpu", scale=SCALE * float(q_scale[0]))
        same.plan(lengths)  # e4m3 numbers are exact in bfloat16
        expected, of_expected = same.run(bfloat16(e4m3_values(q)), cache, table, cache_scale=scale)
        self.assertLessEqual(numpy.abs(floats(o) - floats(expected)).max(), 0.01 * numpy.abs(floats(expected)).max())
        self.assertLessEqual(numpy.abs(lse - of_expected).max(), 1e-4)

    def test_what_has_no_meaning_is_refused(self):
        one, slots = numpy.ones(1, numpy.float32), numpy.zeros(1, numpy.int64)
        q, table = numpy.zeros((1, 2, 576), numpy.uint16), numpy.zeros((1, 1), numpy.int32)
        for cache_format, width in (("as_queries", 576), ("fp8_656", 656)):
            cache = numpy.zeros((1, PAGE, width), numpy.uint16 if width == 576 else numpy.uint8)
            decode = hypermla.MlaDecode(heads=2, max_tokens=PAGE, page=PAGE, cache_format=cache_format, device="cpu")
            decode.plan(numpy.ones(1, numpy.int32))
            for factor in "cache_scale", "q_scale":
                with self.assertRaisesRegex(hypermla.Error, f"{factor} has no meaning"):
                    decode.run(q, cache, table, **{factor: one})
            with self.assertRaisesRegex(hypermla.Error, "cache_scale has no meaning"):
                hypermla.append(q[:, 0], cache, slots, cache_scale=one)
        for factor in 0, -1, numpy.nan, numpy.inf:
            with self.assertRaisesRegex(hypermla.Error, "cache_scale is .*; it must be a positive number"):
                hypermla.append(q[:, 0], numpy.zeros((1, PAGE, 576), numpy.uint8), slots,
                                cache_scale=numpy.full(1, factor, numpy.float32))
        with self.assertRaisesRegex(hypermla.Error, "leave fp8_queries out"):
            hypermla.MlaDecode(cache_format="fp8_656", fp8_queries=True, device="cpu")
        with self.assertRaisesRegex(hypermla.Error, "bfloat16 queries only"):
            hypermla.MlaDecode(cache_format="fp8_576", dtype="float16", device="cpu")
        with self.assertRaisesRegex(hypermla.Error, "cache_format='fp8'"):
            hypermla.MlaDecode(cache_format="fp8", device="cpu")


class Accuracy(unittest.TestCase):
    def test_the_table_is_true(self):
        text = (CHECKOUT / "docs/fp8.md").read_text()
        rows = re.findall(r"^\| (\w.*?) \| ([bF][^|]*?) \| (.+) \|$", text, re.M)
        expected = list(measured())
        self.assertEqual([row[:2] for row in rows], [row[:2] for row in expected])
        for (*_, values), (name, form, *wanted) in zip(rows, expected):
            for value, one in zip(values.split(" | "), wanted, strict=True):
                with self.subTest(name, form=form):
                    self.assertLessEqual(abs(float(value) - one), 0.1 * one + 1e-7)  # two digits, and another BLAS

    def test_v2_adds_the_rounding_of_weights(self):
        random = numpy.random.default_rng(5)
        rows = bfloat16(random.standard_normal((PAGES * PAGE, 576)))
        q = bfloat16(random.standard_normal((QUERIES, HEADS, 576)))
        cache, scale = numpy.zeros((PAGES, PAGE, 576), numpy.uint8), numpy.array([0.01], numpy.float32)
        hypermla.append(rows, cache, numpy.arange(len(rows)), cache_scale=scale)
        slots = numpy.stack([random.permutation(len(rows))[:TOP_K] for _ in range(QUERIES)]).astype(numpy.int32)
        o, lse = decoded_with_fp8_queries(cache, q, slots, scale)
        v2_o, v2_lse = decoded_as_v2(cache, q, slots, scale)
        self.assertLessEqual(numpy.abs(v2_lse - lse).max(), 1e-4)
        off = numpy.sqrt(numpy.mean((floats(v2_o) - floats(o)) ** 2) / numpy.mean(floats(o) ** 2))
        self.assertTrue(0.01 <= off <= 0.03, off)  # of weights 0.026 each

    def test_append_writes_the_nearest_codes(self):
        rows = bfloat16(numpy.random.default_rng(2).standard_t(3, (64, 576)))
        cache = numpy.zeros((1, 64, 656), numpy.uint8)
        hypermla.append(rows, cache, numpy.arange(64))
        factors = numpy.abs(floats(rows[:, :512])).reshape(64, 4, 128).max(-1) / numpy.float32(448)
        self.assertTrue((cache[0, :, 512:528].copy().view(numpy.float32) == factors).all())
        self.assertTrue((cache[0, :, :512] == e4m3_codes(floats(rows[:, :512]) / factors.repeat(128, 1))).all())
        cache, scale = numpy.zeros((1, 64, 576), numpy.uint8), numpy.array([7 / 4096], numpy.float32)
        hypermla.append(rows, cache, numpy.arange(64), cache_scale=scale)
        quotients = floats(rows) / scale
        self.assertGreater(numpy.abs(quotients).max(), 448)
        self.assertTrue((cache[0] == e4m3_codes(numpy.clip(quotients, -448, 448))).all())


class Example(unittest.TestCase):
    def test_its_indexer_is_the_formula(self):
        """Of DeepSeek-V3.2 (arXiv 2512.02556): the sum over heads of weight * relu(q k), in plain loops."""
        rank, hidden, heads, columns, tokens, top_k = 6, 8, 3, 128, 7, 3
        random = numpy.random.default_rng(6)
        weights = {"q_down": random.standard_normal((hidden, rank)),
                   "index_q": random.standard_normal((rank, heads, columns)),
                   "index_k": random.standard_normal((hidden, columns)),
                   "index_weights": random.standard_normal((hidden, heads)),
                   "frequencies": 10000.0 ** -(numpy.arange(32) / 32)}
        x = random.standard_normal((tokens, hidden)).tolist()
        sum_of = lambda row, matrix, *at: sum(value * float(line[at]) for value, line in zip(row, matrix, strict=True))

        def normed(row):
            root = math.sqrt(sum(value * value for value in row) / len(row) + 1e-6)
            return [value / root for value in row]

        def turned(row, position):  # RoPE of pairs of columns 32 apart, of the first 64
            row = list(row)
            for i, frequency in enumerate(weights["frequencies"]):
                cos, sin = math.cos(position * frequency), math.sin(position * frequency)
                row[i], row[i + 32] = row[i] * cos - row[i + 32] * sin, row[i + 32] * cos + row[i] * sin
            return row

        def key(position):
            row = [sum_of(x[position], weights["index_k"], c) for c in range(columns)]
            return turned(normed([value - sum(row) / columns for value in row]), position)

        scores = numpy.zeros((tokens, tokens))  # [query, token]
        for t in range(tokens):
            low = normed([sum_of(x[t], weights["q_down"], r) for r in range(rank)])
            for head in range(heads):
                query = turned([sum_of(low, weights["index_q"], head, c) for c in range(columns)], t)
                weight = sum_of(x[t], weights["index_weights"], head) / math.sqrt(heads * columns)
                for s in range(tokens):
                    product = sum(a * b for a, b in zip(query, key(s), strict=True))
                    scores[t, s] += weight * max(product, 0.0)

        with mock.patch.object(sys, "path", [str(CHECKOUT / "examples/python"), *sys.path]):
            layer = importlib.import_module("sparse_layer")
        arrays, positions, x = layer.NumPyArrays(), numpy.arange(tokens), numpy.array(x)
        own = layer.index_scores(arrays, *layer.index_queries(arrays, weights, x, positions),
                                 layer.index_keys(arrays, weights, x, positions))
        self.assertLessEqual(numpy.abs(own - scores).max(), 1e-10 * numpy.abs(scores).max())
        # Each of the last four queries attends to the best of the tokens up to its own.
        chosen = [sorted(range(t + 1), key=lambda s, t=t: -scores[t, s])[:top_k] for t in range(3, tokens)]
        self.assertIsNone(layer.wrong_choice(weights, x, chosen, top_k))
        chosen[0] = sorted(range(4), key=lambda s: scores[3, s])[:top_k]
        self.assertRegex(layer.wrong_choice(weights, x, chosen, top_k), "^of 4 tokens others have the best scores")

    def test_a_sparse_layer_decodes(self):
        """With PyTorch where it is installed, and on a GPU where there is one; else with NumPy."""
        small = ["--hidden=256", "--heads=2", "--index_heads=4", "--requests=2", "--steps=2"]
        done = subprocess.run([sys.executable, CHECKOUT / "examples/python/sparse_layer.py", *small], text=True,
                              env={**os.environ, "PYTHONPATH": str(BUILD / "python")}, capture_output=True, check=False,
                              timeout=600)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertRegex(done.stdout,
                         r"(?s)^as_queries: 2 steps .* by 0\.00\d+ .*\nfp8_656: 2 steps .* by 0\.0[1-9]\d+ of"
                         r".*\nfp8_576: 2 steps .* by 0\.0[1-9]\d+ of")


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        print("\n".join(table()))
    else:
        unittest.main()
