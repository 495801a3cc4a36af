"""The Python package, from the build tree or, with HYPERMLA_TEST_INSTALLED=1, as installed beside the running
Python."""

import array
import gc
import json
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import weakref

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cli"))
from support import BINARY, BUILD, CHECKOUT, kernel_directories

if not os.environ.get("HYPERMLA_TEST_INSTALLED"):
    sys.path.insert(0, str(BUILD / "python"))
import hypermla

try:
    import numpy
except ImportError:
    numpy = None
try:
    import torch
except ImportError:
    torch = None

SHAPE = {"b": 1, "s": 3, "t": 40, "h": 2, "device": "cpu"}
ITEM = {"bfloat16": 2, "float16": 2, "float32": 4}


def new_kernel(**fields):
    return hypermla.Kernel("flash_attention", **{**SHAPE, "dtype": "float16", **fields})


def byte_count(tensor):
    count = ITEM[tensor.dtype]
    for extent in tensor.shape:
        count *= extent
    return count


class Example(unittest.TestCase):
    def test_it_runs(self):
        variables = {**os.environ, "PYTHONPATH": str(pathlib.Path(hypermla.__file__).parents[1])}
        done = subprocess.run([sys.executable, CHECKOUT / "examples/python/attention.py"], env=variables, text=True,
                              check=False, capture_output=True, timeout=600)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertRegex(done.stdout, r"^lse 6\.9315, on an H200 in [\d.]+ us\n$")  # log(1024)


class Shards(unittest.TestCase):
    def test_they_reach_the_library(self):
        decode = hypermla.MlaDecode(device="cpu", shards=3, shard=1, interleave=4)
        self.assertIn("shard 1 of 3, which take turns of 4 tokens", decode.explain())
        for wrong, said in ((dict(shard=1), "shard=1 is not supported with shards=1"),
                            (dict(shards=hypermla.MlaDecode.MAX_SHARDS + 1), "from 1 to 32"),
                            (dict(shards=2, interleave=hypermla.MlaDecode.MAX_INTERLEAVE + 1), "from 1 to 128"),
                            (dict(shards=2, sparse=True), "not supported with sparse")):
            with self.assertRaisesRegex(hypermla.Error, said):
                hypermla.MlaDecode(device="cpu", **wrong)


@unittest.skipUnless(numpy, "NumPy is not installed")
class Decode(unittest.TestCase):
    def decode(self, **options):
        return hypermla.MlaDecode(**{"heads": 2, "max_requests": 2, "max_tokens": 40, "page": 16, "device": "cpu",
                                     **options})

    def step(self):
        """Lengths, queries, cache and table of two requests."""
        random = numpy.random.default_rng(1)
        bits = lambda *shape: (random.standard_normal(shape, numpy.float32).view(numpy.uint32)
                               >> 16).astype(numpy.uint16)
        table = numpy.array([[3, 1, 4], [0, 2, -1]], numpy.int32)
        return numpy.array([40, 17], numpy.int32), bits(2, 2, 576), bits(5, 16, 576), table

    def test_it_attends(self):
        lengths, q, cache, table = self.step()
        decode = self.decode()
        self.assertIn("reference", decode.explain())
        self.assertGreater(decode.workspace_bytes, 0)
        decode.plan(lengths)
        o, lse = decode.run(q, cache, table)
        decode.check()
        floats = lambda array: (array.astype(numpy.uint32) << 16).view(numpy.float32)
        for request, head in ((0, 1), (1, 0)):
            tokens = floats(cache)[table[request]].reshape(-1, 576)[:lengths[request]]
            scores = tokens @ floats(q)[request, head] / 192**0.5
            weights = numpy.exp(scores - scores.max())
            self.assertAlmostEqual(lse[request, head], scores.max() + numpy.log(weights.sum()), 4)
            expected = weights @ tokens[:, :512] / weights.sum()
            self.assertLessEqual(numpy.abs(floats(o)[request, head] - expected).max(), 0.02)

    def test_shared_prefixes_need_the_table_in_plan(self):
        lengths, q, cache, table = self.step()
        table[1, 0] = table[0, 0]  # 16 tokens of both
        plain, shared = self.decode(), self.decode(shared_prefixes=True)
        plain.plan(lengths)
        with self.assertRaisesRegex(hypermla.Error, "block_table is missing"):
            shared.plan(lengths)
        for wrong, error in ((table[:1], "block_table has 1 rows, but lengths has 2"), (table[0], "block_table")):
            with self.assertRaisesRegex(hypermla.Error, error):
                shared.plan(lengths, block_table=wrong)
        with self.assertRaisesRegex(hypermla.Error, "no meaning in plan"):
            plain.plan(lengths, block_table=table)
        shared.plan(lengths, block_table=table)
        self.assertTrue((shared.run(q, cache, table)[0] == plain.run(q, cache, table)[0]).all())

    def test_pages_that_lie_apart_are_a_view_of_single_tokens(self):
        lengths, q, cache, _ = self.step()
        slots = numpy.random.default_rng(2).integers(0, 80, (2, 40)).astype(numpy.int32)
        decode, of_tokens = (self.decode(sparse=True, page=page) for page in (16, 1))
        decode.plan(lengths)
        expected = decode.run(q, cache, slots)
        several = numpy.full((5, 3, 16, 576), 0x7FC0, numpy.uint16)  # of 3 layers
        several[:, 1] = cache
        with self.assertRaisesRegex(hypermla.Error, "pages must follow each other"):
            decode.run(q, several[:, 1], slots)
        of_tokens.plan(lengths)
        view = several.reshape(-1, 1, 576)[16:]
        again = of_tokens.run(q, view, slots // 16 * 48 + slots % 16)
        self.assertTrue((again[0] == expected[0]).all() and (again[1] == expected[1]).all())

    def test_pages_of_one_token_lie_as_far_apart_as_they_say(self):
        lengths, q, cache, table = self.step()
        tokens = numpy.full((80, 1, 640), 0x7FC0, numpy.uint16)  # NaN behind each
        tokens[:, 0, :576] = cache.reshape(80, 576)
        slots = (table[:, :, None] * 16 + numpy.arange(16, dtype=numpy.int32)).reshape(2, 48)
        expected = self.decode()
        expected.plan(lengths)
        for options in {}, {"sparse": True}:
            decode = self.decode(page=1, **options)
            decode.plan(lengths)
            o, lse = decode.run(q, tokens[..., :576], slots)
            self.assertTrue((o == expected.run(q, cache, table)[0]).all())

    def test_lists_without_lengths_are_whole(self):
        lengths, q, cache, _ = self.step()
        slots = numpy.random.default_rng(3).integers(-1, 80, (2, 40)).astype(numpy.int32)
        decode = self.decode(sparse=True, max_tokens=40)
        decode.plan(numpy.full(2, 40, numpy.int32))
        expected = decode.run(q, cache, slots)
        decode.plan(lengths)
        decode.plan(None, block_table=slots)
        again = decode.run(q, cache, slots)
        self.assertTrue((again[0] == expected[0]).all() and (again[1] == expected[1]).all())
        with self.assertRaisesRegex(hypermla.Error, "block_table has 39 columns, but .* max_tokens=40"):
            decode.plan(None, block_table=slots[:, :39])
        with self.assertRaisesRegex(hypermla.Error, "lengths is missing"):
            self.decode().plan(None, block_table=slots)
        with self.assertRaisesRegex(hypermla.Error, r"^block_table must be int32 \[requests, pages\], not int32 \[\]"):
            decode.plan(None, numpy.array([0, 1], numpy.int32), block_table=numpy.array(1, numpy.int32))
        with self.assertRaisesRegex(hypermla.Error, "^lengths are missing: give them, or block_table=slots .*[^.]$"):
            decode.plan(None)
        with self.assertRaisesRegex(TypeError, "lengths is of type NoneType; give a tensor, or an array of NumPy"):
            self.decode().plan(None)

    def test_what_is_no_tensor_is_named(self):
        lengths, q, cache, table = self.step()
        decode = self.decode()
        decode.plan(lengths)
        for call, said in [
                (lambda: decode.plan(lengths.tolist()), "lengths is of type list"),
                (lambda: decode.plan(lengths, (0, 1, 2)), "query_starts is of type tuple"),
                (lambda: decode.run(None, cache, table), "q is of type NoneType"),
                (lambda: decode.run(q, "cache", table), "cache is of type str"),
                (lambda: decode.run((q[..., :512], 1), cache, table), r"q\[1\] is of type int"),
                (lambda: decode.run(q, cache, table.tolist()), "block_table is of type list"),
                (lambda: decode.run(q, cache, table, out=3), "out is of type int"),
                (lambda: decode.run(q, cache, table, sinks=[1, 2]), "sinks is of type list"),
                (lambda: hypermla.merge_states([1], None, q, None), "o_a is of type list"),
                (lambda: hypermla.append(q[:, 0], cache, [1]), "slots is of type list"),
                (lambda: hypermla.decompress_prefix([1], table[0], 4, q, q), "cache is of type list"),
                (lambda: self.decode(workspace=[1]), "the workspace is of type list")]:
            with self.assertRaisesRegex(TypeError, f"^{said}; give a tensor, or an array of NumPy$"):
                call()
        with self.assertRaisesRegex(hypermla.Error, "^q has 12 dimensions; a tensor has at most 8 here$"):
            decode.run(q.reshape((1,) * 9 + q.shape), cache, table, out=q, lse=q)

    def test_what_is_no_integer_is_named(self):
        for make in (self.decode, lambda **given: hypermla.MlaPrefill(device="cpu", **given),
                     lambda **given: hypermla.MlaDecode.fixed_split(1 << 20, device="cpu", **given)):
            with self.assertRaisesRegex(TypeError, "^heads is of type str; give an integer$"):
                make(heads="2")
            with self.assertRaisesRegex(TypeError, "^max_tokens is of type float; give an integer$"):
                make(max_tokens=4096.0)
            with self.assertRaisesRegex(hypermla.Error, f"^max_tokens={2**31} is not supported: it must fit 31 bits$"):
                make(max_tokens=2**31)
        with self.assertRaisesRegex(TypeError, "^workspace_bytes is of type str; give an integer$"):
            hypermla.MlaDecode.fixed_split("1", device="cpu")
        self.assertEqual(self.decode(heads=numpy.int64(2)).workspace_bytes, self.decode(heads=2).workspace_bytes)

    def test_a_workspace_is_kept(self):
        for make in self.decode, lambda **given: hypermla.MlaPrefill(device="cpu", **given):
            room = numpy.zeros(make().workspace_bytes + 256, numpy.uint8)
            room = room[-room.ctypes.data % 256:][:make().workspace_bytes]
            seen, used = weakref.ref(room), make(workspace=room)
            del room
            gc.collect()
            self.assertIsNotNone(seen())
            del used

    def test_a_kernel_and_the_queries_of_a_step(self):
        with self.assertRaisesRegex(hypermla.Error, "nonsense"):
            self.decode(kernel="nonsense")
        lengths, q, cache, table = self.step()
        portable = self.decode(kernel="cutile.mla.flash_mla_split_kv", max_tokens=40)
        portable.plan(lengths + numpy.array([60, 0], numpy.int32))  # is cut, so that three pages are enough
        portable.run(q, cache, table)
        with self.assertRaisesRegex(hypermla.Error, "max_tokens"):
            portable.check()
        with self.assertRaisesRegex(hypermla.Error, "max_query_tokens=3"):
            self.decode(max_query_tokens=3).plan(numpy.array([9, 9], numpy.int32), numpy.array([0, 2, 4], numpy.int32))
        with self.assertRaisesRegex(hypermla.Error, "a value that cannot be"):
            self.decode().run((), None, None)

    def test_the_package_says_its_version(self):
        self.assertRegex(hypermla.__version__, r"^\d+\.\d+\.\d+$")

    def test_types_are_named_by_numpys_classes_too(self):
        half = self.decode(dtype=numpy.float16)
        self.assertEqual(half.workspace_bytes, self.decode(dtype="float16").workspace_bytes)
        lengths, q, cache, table = self.step()
        decode = self.decode()
        decode.plan(lengths)
        with self.assertRaisesRegex(hypermla.Error, "^q is of >u2, which is not supported$"):
            decode.run(q.astype(">u2"), cache, table)

    def test_the_largest_capacity_and_fixed_splits(self):
        self.decode(max_requests=hypermla.MlaDecode.MAX_REQUESTS)
        with self.assertRaisesRegex(hypermla.Error, "max_requests=2049"):
            self.decode(max_requests=hypermla.MlaDecode.MAX_REQUESTS + 1)
        self.assertEqual([hypermla.MlaDecode.most_query_tokens(heads) for heads in (1, 16, 128)],
                         [(1 << 31) - 1, (1 << 24) - 1, (1 << 18) - 1])
        for heads in 0, 1025:
            with self.assertRaisesRegex(hypermla.Error, f"^heads={heads} is not supported: it must be from 1 to 1024$"):
                hypermla.MlaDecode.most_query_tokens(heads)
        with self.assertRaisesRegex(hypermla.Error, "most_query_tokens.. was given a value that cannot be"):
            hypermla.MlaDecode.most_query_tokens(2**70)
        fixed_split = hypermla.MlaDecode.fixed_split
        self.assertEqual([fixed_split(room, max_tokens=5000, device="cpu") for room in (1 << 20, 0)], [512, 8192])
        with self.assertRaisesRegex(hypermla.Error, "max_tokens=0"):
            fixed_split(1 << 20, max_tokens=0, device="cpu")

    def test_pairs_and_views_give_the_same_bits(self):
        lengths, q, cache, table = self.step()
        decode = self.decode()
        decode.plan(lengths, numpy.array([0, 1, 2], numpy.int32))
        o, lse = decode.run(q, cache, table)
        heads_first = q[..., :512].transpose(1, 0, 2).copy().transpose(1, 0, 2)
        wide = numpy.zeros((2, 2, 640), numpy.uint16)
        again, again_lse = decode.run((heads_first, q[..., 512:]), (cache[..., :512], cache[..., 512:]), table,
                                      out=wide[..., :512])
        self.assertTrue((again == o).all() and (again_lse == lse).all())
        self.assertTrue((wide[..., 512:] == 0).all())

    def test_the_log_sum_exp_may_be_by_requests(self):
        lengths, q, cache, table = self.step()
        decode = self.decode(max_queries=3)
        decode.plan(lengths, numpy.array([0, 0, 2], numpy.int32))  # the second request's are the first two rows
        o, lse = decode.run(q, cache, table)
        by_request = numpy.zeros((2, 2, 3), numpy.float32)  # [requests, heads, queries]
        again, _ = decode.run(q, cache, table, lse=by_request.transpose(0, 2, 1))
        self.assertTrue((again == o).all() and (by_request[1, :, :2].T == lse).all())
        self.assertTrue((by_request[0] == 0).all() and (by_request[:, :, 2] == 0).all())

    def test_pytorch_may_be_blocked(self):
        script = ("import sys; sys.modules['torch'] = None; import hypermla; "
                  "print(hypermla.MlaDecode(device='cpu').device)")
        done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(BUILD / "python")},
                              text=True, capture_output=True, timeout=120)
        self.assertEqual((done.stdout, done.stderr), ("cpu\n", ""))

    def test_what_does_not_fit_is_refused(self):
        lengths, q, cache, table = self.step()
        decode, latent = self.decode(), q[..., :512].copy()
        shard, chosen = self.decode(shards=3, shard=1, interleave=4, max_tokens=56), self.decode(sparse=True)
        shard.plan(numpy.array([52, 3], numpy.int32))  # of 52 tokens 16 are here, of 56 are 20
        shard.run(q, cache, table[:, :1])
        shard.plan(numpy.array([56, 3], numpy.int32))
        chosen.plan(lengths)
        by_request = lambda *shape: numpy.zeros(shape, numpy.float32)
        read_only = numpy.zeros_like(latent)
        read_only.flags.writeable = False
        overlapping = numpy.lib.stride_tricks.as_strided(by_request(1, 1, 2), (2, 1, 2), (0, 8, 4))
        odd = numpy.zeros((2, 2), [("lse", "f4"), ("other", "i2")])["lse"]
        for wrong, said in ((lambda: self.decode(page=7), "page=7"), (lambda: self.decode(dtype="float32"), "float32"),
                            (lambda: self.decode(causal="no"), "^causal cannot be 'no'; give it True or False$"),
                            (lambda: self.decode(sparse=None), "^sparse cannot be None"),
                            (lambda: self.decode(causal=numpy.ones(2, bool)), "^causal cannot be array"),
                            (lambda: self.decode(heads=-1), "^heads=-1 is not supported: it must be from 1"),
                            *((lambda dtype=dtype: decode.run(numpy.zeros(q.shape, dtype), cache, table, latent,
                                                              by_request(1, 1, 2)), "^q must be .*not another type")
                              for dtype in (bool, "clongdouble", "complex64", object)),
                            (lambda: decode.plan(lengths.astype(numpy.int64)), "int64"),
                            (lambda: decode.plan(lengths + 1), r"lengths\[0\] is 41"),
                            (lambda: decode.plan(lengths, lengths), "query_starts"),
                            (lambda: decode.run(q[:, :1], cache, table), "q must be"),
                            (lambda: decode.run(q, cache[:, :8], table), "cache must be"),
                            (lambda: decode.plan(numpy.repeat(lengths, 2)[::2]), "lengths must be dense"),
                            (lambda: decode.run((q[..., :512],) * 3, cache, table), "q must be a tensor or a pair"),
                            (lambda: decode.run((q[..., :512], q[:1, :, 512:]), cache, table), r"q\[1\] must be"),
                            (lambda: decode.run(q.copy("F"), cache, table), "q must be dense"),
                            (lambda: decode.run(q, cache, table[0]), "block_table"),
                            (lambda: decode.run(q, cache, table[:1]), "1 rows, but the plan has 2 requests"),
                            (lambda: decode.run(q, cache, table[:, :2]), "2 columns, but a request of the plan has 3"),
                            (lambda: shard.run(q, cache, table[:, :1]), "1 columns, but a request of the plan has 2"),
                            (lambda: chosen.run(q, cache, table), "3 columns, but a request of the plan has 40"),
                            (lambda: decode.run(q, cache, table, out=q), "out must be"),
                            (lambda: decode.run(q, cache, table, lse=by_request(2, 2, 2)), r"requests, 1, 2\]"),
                            (lambda: decode.run(q, cache, table, lse=by_request(1, 1, 2)), "lse has 1 rows"),
                            (lambda: decode.run((latent, q[..., 512:].copy()), cache, table, out=latent),
                             "memory of its own"),
                            (lambda: decode.run(q, cache, table, out=read_only), "out is written and must not be"),
                            (lambda: decode.run(q, cache, table, lse=overlapping), "places of their own"),
                            (lambda: decode.run(q, cache, table, lse=odd), "no whole elements of 4 bytes"),
                            (lambda: decode.plan(lengths, stream=1 << 70), "stream is no address"),
                            (lambda: self.decode(workspace=numpy.zeros(3, numpy.uint8)), "the workspace has 3 bytes"),
                            (lambda: self.decode(scale=1e-50), "scale=1e-50 is not supported: it is 0 in 32 bits"),
                            (lambda: hypermla.check("flash_attention", device="cpu", seed=-1), "seed=-1"),
                            (lambda: hypermla.check("flash_attention", device="cpu", seed=1 << 64), "to 2.64 - 1"),
                            (lambda: hypermla.MlaDecode.fixed_split(-1, device="cpu"), "workspace_bytes=-1")):
            with self.assertRaisesRegex(hypermla.Error, said):
                decode.plan(lengths)
                wrong()
        for wrong in (lambda: decode.plan(None), lambda: decode.run(q, cache, 7),
                      lambda: decode.run(None, cache, table), lambda: decode.run(q, cache, table, stream="x")):
            with self.assertRaises(TypeError):
                wrong()

    def test_the_example_runs(self):
        variables = {**os.environ, "PYTHONPATH": str(pathlib.Path(hypermla.__file__).parents[1])}
        done = subprocess.run([sys.executable, CHECKOUT / "examples/python/decode.py"], env=variables, text=True,
                              check=False, capture_output=True, timeout=600)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "lse 4.9199 4.9299 3.7260\n", ""))

    def test_a_layer_decodes_with_drafts(self):
        variables = {**os.environ, "PYTHONPATH": str(pathlib.Path(hypermla.__file__).parents[1])}
        small = ["--arrays=numpy", "--hidden=256", "--heads=2", "--steps=4"]
        done = subprocess.run([sys.executable, CHECKOUT / "examples/python/mla_layer.py", *small], env=variables,
                              text=True, check=False, capture_output=True, timeout=600)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertRegex(done.stdout, r"\n4 steps of 4 requests, \d+ drafts accepted and [1-9]\d* rejected: outputs ")


@unittest.skipUnless(numpy, "NumPy is not installed")
class Prefill(unittest.TestCase):
    HEADS = 2
    QUERIES, TOKENS = (numpy and numpy.array(starts, numpy.int32) for starts in ([0, 3, 7], [0, 9, 20]))

    def prefill(self, **options):
        return hypermla.MlaPrefill(**{"heads": self.HEADS, "max_requests": 2, "max_query_tokens": 7, "max_tokens": 11,
                                      "dtype": "float16", "device": "cpu", **options})

    def tensors(self):
        """Queries; keys and values as views of one tensor, and RoPE keys of one head, as engines have them."""
        random = numpy.random.default_rng(1)
        normal = lambda *shape: random.standard_normal(shape, numpy.float32).astype(numpy.float16)
        kv = normal(20, self.HEADS, 256)
        q, rope = normal(7, self.HEADS, 192), numpy.broadcast_to(normal(20, 1, 64), (20, self.HEADS, 64))
        return q, (kv[..., :128], rope), kv[..., 128:]

    def test_it_attends(self):
        q, k, v = self.tensors()
        prefill = self.prefill()
        self.assertIn("reference", prefill.explain())
        self.assertGreater(prefill.workspace_bytes, 0)
        prefill.plan(self.QUERIES, self.TOKENS)
        o, lse = prefill.run(q, k, v)
        prefill.check()
        floats = lambda array: array.astype(numpy.float64)
        for query, head, first, end in ((1, 1, 0, 8), (6, 0, 9, 20)):  # the middle one of three sees 8 of 9 tokens
            keys = floats(numpy.concatenate(k, -1))[first:end, head]
            scores = keys @ floats(q)[query, head] / 192**0.5
            weights = numpy.exp(scores - scores.max())
            self.assertAlmostEqual(lse[query, head], scores.max() + numpy.log(weights.sum()), 4)
            expected = weights @ floats(v)[first:end, head] / weights.sum()
            self.assertLessEqual(numpy.abs(o[query, head] - expected).max(), 2e-3)

    def test_options_reach_the_library(self):
        q, k, v = self.tensors()
        results = []
        for options in {}, {"scale": 0.1}, {"lse_base2": True}:
            prefill = self.prefill(**options)
            prefill.plan(self.QUERIES, self.TOKENS)
            results.append(prefill.run(q, k, v)[1])
        natural, scaled, base2 = results
        keys = numpy.concatenate(k, -1).astype(numpy.float64)[9:20, 0]
        scores = keys @ q.astype(numpy.float64)[6, 0] * 0.1
        self.assertAlmostEqual(scaled[6, 0], numpy.log(numpy.exp(scores).sum()), 4)
        numpy.testing.assert_allclose(base2 * numpy.log(2), natural, rtol=1e-5)
        for positive in False, True:
            prefill = self.prefill(empty_lse_positive=positive)
            prefill.plan(self.QUERIES, numpy.array([0, 0, 11], numpy.int32))
            lse = prefill.run(q, (k[0][:11], k[1][:11]), v[:11])[1]
            self.assertTrue((lse[:3] == (numpy.inf if positive else -numpy.inf)).all())

    def test_pairs_and_outputs_by_strides_give_the_same_bits(self):
        q, k, v = self.tensors()
        prefill = self.prefill()
        prefill.plan(self.QUERIES, self.TOKENS)
        o, lse = prefill.run(q, k, v)
        wide = numpy.zeros((7, self.HEADS, 160), numpy.float16)
        heads_first = numpy.zeros((self.HEADS, 7), numpy.float32)
        again, again_lse = prefill.run((q[..., :128].copy(), q[..., 128:]), numpy.concatenate(k, -1), v,
                                       out=wide[..., :128], lse=heads_first.T)
        self.assertTrue((again == o).all() and (again_lse == lse).all() and (wide[..., 128:] == 0).all())

    def test_the_example_of_a_shared_prefix_runs(self):
        variables = {**os.environ, "PYTHONPATH": str(pathlib.Path(hypermla.__file__).parents[1])}
        done = subprocess.run([sys.executable, CHECKOUT / "examples/python/shared_prefix.py"], env=variables, text=True,
                              check=False, capture_output=True, timeout=600)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done)

    def test_tokens_in_two_parts_accumulate(self):
        q, k, v = self.tensors()
        whole, first = self.prefill(causal=False), self.prefill(causal=False)
        second = self.prefill(causal=False, accumulate=True)
        integers = lambda *values: numpy.array(values, numpy.int32)
        whole.plan(self.QUERIES, integers(0, 9, 20))
        first.plan(self.QUERIES, integers(0, 4, 4))  # of the second request nothing
        second.plan(self.QUERIES, integers(4, 9, 20))
        (o, lse), parts = whole.run(q, k, v), first.run(q, k, v)
        again, again_lse = second.run(q, k, v, *parts)
        self.assertIs(again, parts[0])
        self.assertLessEqual(numpy.abs(again_lse - lse).max(), 1e-4)
        self.assertLessEqual(numpy.abs(again.astype(numpy.float32) - o.astype(numpy.float32)).max(), 4e-3)

    def test_queries_lie_anywhere(self):
        q, k, v = self.tensors()
        prefill, anywhere = self.prefill(), self.prefill(query_rows=True, max_query_tokens=9)
        prefill.plan(self.QUERIES, self.TOKENS)
        o, lse = prefill.run(q, k, v)
        rows = numpy.array([4, 8, 0, 1, 7, 2, 3, 77], numpy.int32)  # of seven queries
        scattered, out, its_lse = (numpy.full((9, *one.shape[1:]), 7, one.dtype) for one in (q, o, lse))
        scattered[rows[:7]] = q
        anywhere.plan(self.QUERIES, self.TOKENS, query_rows=rows)
        anywhere.run(scattered, k, v, out, its_lse)
        self.assertTrue((out[rows[:7]] == o).all() and (its_lse[rows[:7]] == lse).all())
        self.assertTrue((out[5:7] == 7).all() and (its_lse[5:7] == 7).all())
        for wrong, said in ((lambda: prefill.plan(self.QUERIES, self.TOKENS, query_rows=rows), "made without"),
                            (lambda: anywhere.plan(self.QUERIES, self.TOKENS), "query_rows is missing"),
                            (lambda: anywhere.plan(self.QUERIES, self.TOKENS, query_rows=rows + 2), r"\[1\] is 10"),
                            (lambda: anywhere.plan(self.QUERIES, self.TOKENS, query_rows=rows * 1.0), "must be int32"),
                            (lambda: self.prefill(query_rows="x"), "^query_rows cannot be 'x'")):
            with self.assertRaisesRegex(hypermla.Error, said):
                wrong()

    def test_one_token_with_a_rope_key_of_all_heads(self):
        q, k, v = self.tensors()
        prefill = self.prefill()
        one = numpy.array([0, 1], numpy.int32)
        prefill.plan(one, one)
        o, _ = prefill.run(q[:1], tuple(part[:1] for part in k), v[:1])
        self.assertTrue((o == v[:1]).all())

    def test_a_step_without_requests_is_no_error(self):
        q, k, v = self.tensors()
        prefill = self.prefill()
        prefill.plan(self.QUERIES[:1], self.TOKENS[:1])
        o, lse = prefill.run(q[:0], k, v)
        self.assertEqual((o.shape, lse.shape), ((0, self.HEADS, 128), (0, self.HEADS)))

    def test_what_does_not_fit_is_refused(self):
        q, k, v = self.tensors()
        prefill = self.prefill()
        for wrong, said in ((lambda: self.prefill(heads=0), "heads=0"),
                            (lambda: self.prefill(accumulate=2), "^accumulate cannot be 2; give it True or False$"),
                            (lambda: self.prefill(batch_invariant=None), "^batch_invariant cannot be None"),
                            (lambda: self.prefill(dtype="float32"), "float32"),
                            (lambda: prefill.plan(self.QUERIES.astype(numpy.int64), self.TOKENS), "int64"),
                            (lambda: prefill.plan(self.QUERIES, self.TOKENS[:2]), "token_starts must be"),
                            (lambda: prefill.plan(self.QUERIES, self.TOKENS * 2), r"token_starts\[0\]"),
                            (lambda: prefill.run(q[..., :190], k, v), r"q must be float16 \[query_tokens, 2, 192\]"),
                            (lambda: prefill.run(q[:, :1], k, v), "q must be float16"),
                            (lambda: prefill.run((q[..., :128], q[:6, :, 128:]), k, v),
                             r"q\[1\] must be float16 \[7, 2"),
                            (lambda: prefill.run(q, k[0], v), "k must be"),
                            (lambda: prefill.run(q, k, v[:5]), r"v must be float16 \[20, 2, 128\]"),
                            (lambda: prefill.run(q, k, v.transpose(1, 0, 2)), "v must be"),
                            (lambda: prefill.run(q, k, v[..., ::-1]), "v must be dense in its last dimension"),
                            (lambda: self.prefill(accumulate=True).run(q, k, v), "needs `out` and `lse`"),
                            (lambda: prefill.run(q, k, v.astype(numpy.float32)), "v must be"),
                            (lambda: prefill.run(q, k, v, lse=numpy.zeros((7, 1), numpy.float32)), "lse must be"),
                            (lambda: prefill.run((v[:7].copy(), q[..., 128:]), k, v, out=v[:7]), "memory of its own"),
                            (lambda: prefill.run(q, k, v, out=v[9:16]), "out shares memory with v"),
                            (lambda: prefill.run(q[:6], k, v), "the plan has 7 queries")):
            with self.assertRaisesRegex(hypermla.Error, said):
                prefill.plan(self.QUERIES, self.TOKENS)
                wrong()


@unittest.skipUnless(numpy, "NumPy is not installed")
class CacheOperations(unittest.TestCase):
    """append, decompress_prefix, merge_states and split_prefixes on NumPy's arrays and, where it is installed,
    PyTorch's tensors."""

    def bits(self, *shape):
        values = numpy.random.default_rng(sum(shape)).standard_normal(shape, numpy.float32)
        return (values.view(numpy.uint32) >> 16).astype(numpy.uint16)

    def floats(self, array):
        return (array.astype(numpy.uint32) << 16).view(numpy.float32)

    def libraries(self):
        """How each library makes a tensor of an array, sharing its memory."""
        yield "numpy", lambda array: array
        if torch is not None:
            yield "torch", lambda array: (torch.from_numpy(array.view(numpy.int16)).view(torch.bfloat16)
                                          if array.dtype == numpy.uint16 else torch.from_numpy(array))

    def test_append_writes_slots(self):
        for name, tensor in self.libraries():
            with self.subTest(name):
                cache, rows = numpy.full((3, 16, 576), 0x7FC0, numpy.uint16), self.bits(5, 640)[:, :576]
                expected = cache.copy()
                slots = numpy.array([17, -1, 47, 0], numpy.int64)  # the fifth row pads
                for row, slot in enumerate(slots):
                    if slot >= 0:
                        expected[slot // 16, slot % 16] = rows[row]
                hypermla.append(tensor(rows), tensor(cache), tensor(slots))
                self.assertTrue((cache == expected).all())
                pair = numpy.zeros((3, 16, 512), numpy.uint16), numpy.zeros((3, 16, 64), numpy.uint16)
                hypermla.append((tensor(rows[:, :512]), tensor(rows[:, 512:])), tuple(map(tensor, pair)), tensor(slots))
                self.assertTrue((numpy.concatenate(pair, 2)[1, 1] == rows[0]).all() and not pair[0][0, 1].any())

    def test_append_rounds_to_fp8(self):
        rows, slots = self.bits(4, 576), numpy.array([17, -1, 33], numpy.int64)
        groups = self.floats(rows)[:3, :512].reshape(3, 4, 128)
        factors = numpy.abs(groups).max(-1) / numpy.float32(448)
        magnitudes = numpy.arange(128)  # of e4m3 by their codes
        magnitudes = numpy.where(magnitudes < 8, magnitudes / 512, (8 + magnitudes % 8) * 2.0 ** (magnitudes // 8 - 10))
        for name, tensor in self.libraries():
            with self.subTest(name):
                cache = numpy.full((3, 16, 672), 7, numpy.uint8)
                hypermla.append(tensor(rows), tensor(cache[..., :656]), tensor(slots))
                for row, slot in ((0, 17), (2, 33)):
                    token = cache[slot // 16, slot % 16]
                    self.assertTrue((token[512:528].view(numpy.float32) == factors[row]).all())
                    values = magnitudes[token[:512] & 127] * numpy.where(token[:512] > 127, -1, 1)
                    off = numpy.abs(values.reshape(4, 128) * factors[row][:, None] - groups[row])
                    spacing = numpy.maximum(numpy.abs(groups[row]) / 8, factors[row][:, None] / 512)
                    self.assertTrue((off <= spacing / 2 * 1.001).all())
                    self.assertTrue((token[528:656].view(numpy.uint16) == rows[row, 512:]).all())
                    cache[slot // 16, slot % 16] = 7
                self.assertTrue((cache == 7).all())
        with self.assertRaisesRegex(hypermla.Error,
                                    r"cache must be uint8 \[pages, page, 656\], not uint8 \[3, 16, 672\]"):
            hypermla.append(rows, cache, slots)
        packed, scale = cache[..., :576], numpy.ones(1, numpy.float32)
        for wrong, said in ((None, "cache_scale is missing"), (scale.astype("float64"), "cache_scale must be float32"),
                            (scale.repeat(2), r"cache_scale must be float32 \[1\], not float32 \[2\]")):
            with self.subTest(said), self.assertRaisesRegex(hypermla.Error, said):
                hypermla.append(rows, packed, slots, cache_scale=wrong)
        with self.assertRaisesRegex(hypermla.Error, "cache must be of bfloat16 or float16, not uint8"):
            hypermla.decompress_prefix(cache, slots, 3, rows, rows, out=(rows, rows))

    def test_append_rounds_to_fp8_with_one_factor(self):
        rows, slots = self.bits(4, 576), numpy.array([17, -1, 33], numpy.int64)
        rows[2, 7], rows[2, 570], rows[2, 8] = 0x7F80, 0xFF80, 0x7FC0  # infinities, NaN
        scale = numpy.array([7 / 128], numpy.float32)  # with which there are ties
        codes = numpy.arange(127)  # of e4m3, without NaN
        values = numpy.where(codes < 8, codes / 512, (8 + codes % 8) * 2.0 ** (codes // 8 - 10))
        quotients = numpy.abs(self.floats(rows[[0, 2]]).astype(numpy.float64)) / scale[0]
        # Codes are in the order of their values; a tie goes to the even one.
        above = numpy.minimum(numpy.searchsorted(values, quotients), 126)
        below = numpy.maximum(above - 1, 0)
        middle = (values[above] + values[below]) / 2
        nearest = numpy.where((quotients > middle) | (quotients == middle) & (above % 2 == 0), above, below)
        expected = nearest + 128 * (rows[[0, 2]] >> 15)
        expected[1, 8] = 127
        for name, tensor in self.libraries():
            with self.subTest(name):
                cache = numpy.full((3, 16, 592), 7, numpy.uint8)
                hypermla.append(tensor(rows), tensor(cache[..., :576]), tensor(slots), cache_scale=tensor(scale))
                for row, slot in enumerate((17, 33)):
                    self.assertEqual(cache[slot // 16, slot % 16, :576].tolist(), expected[row].tolist())
                    cache[slot // 16, slot % 16, :576] = 7
                self.assertTrue((cache == 7).all())

    def test_a_prefix_is_decompressed(self):
        cache, weight = self.bits(4, 16, 576), self.bits(2, 256, 512)  # kv_b_proj: keys and values of each head
        table = numpy.array([2, 0, 77], numpy.int32)
        z = self.floats(cache)[[2, 0]].reshape(32, 576)[:20]
        for name, tensor in self.libraries():
            for w_uv in (weight[:, 128:].swapaxes(1, 2), weight[:, 128:].swapaxes(1, 2).copy()):
                with self.subTest(name, dense=w_uv.flags.c_contiguous):
                    given = tensor(cache), tensor(table), 20, tensor(weight[:, :128]), tensor(w_uv)
                    k, heads_first = (numpy.zeros(shape, numpy.uint16) for shape in ((20, 2, 192), (2, 20, 128)))
                    v = heads_first.swapaxes(0, 1)
                    hypermla.decompress_prefix(*given, out=(tensor(k), tensor(v)))
                    expected = numpy.einsum("tc,hdc->thd", z[:, :512], self.floats(weight))
                    for got, want in ((k[..., :128], expected[..., :128]), (v, expected[..., 128:])):
                        self.assertLessEqual(numpy.abs(self.floats(got) - want).max(), 0.5)  # of values around 22
                    self.assertTrue((k[..., 128:] == cache[[2, 0]].reshape(32, 576)[:20, None, 512:]).all())
                    self.assertEqual(tuple(hypermla.decompress_prefix(*given, rope=False)[0].shape), (20, 2, 128))

    def step_with_prefixes(self):
        """Five requests, whose pages have 16 tokens: prefix 0 is shared by the first and the fourth, prefix 1, which
        begins like it, by the third and the last, which has no room for its query behind it. The second has none."""
        integers = lambda values: numpy.array(values, numpy.int32)
        zeros = lambda *shape: numpy.zeros(shape, numpy.int32)
        given = dict(
            block_table=integers([[3, 4, 7, 8], [5, 4, 0, 1], [3, 4, 6, 2], [3, 4, 9, 9], [3, 4, 6, 9]]),
            lengths=integers([50, 20, 49, 40, 48]), query_starts=integers([0, 1, 2, 3, 5, 6]),
            slots=numpy.array([8 * 16 + 1, 4 * 16 * 9, -1]), prefixes=integers([[2, 48, 1, 1], [3, 0, 1, 1]]),
            prefix_pages=integers([[3, 4, 0], [3, 4, 6]]), owners=integers([0, 0, 0, 3, 3, 0, 2, 0, 0, 0]))
        results = dict(found=zeros(5), own_table=zeros(6, 5), own_lengths=zeros(5), shared_starts=zeros(2, 4),
                       query_rows=zeros(9))
        return given, results

    def test_a_step_is_split_at_its_prefixes(self):
        for name, tensor in self.libraries():
            with self.subTest(name):
                given, results = self.step_with_prefixes()
                tensors = {key: tensor(array) for key, array in (given | results).items()}
                hypermla.split_prefixes(**tensors, page=16)
                self.assertEqual(results["own_lengths"].tolist(), [18, 20, 1, 8, 16])
                self.assertEqual([row[:2] for row in results["own_table"][:5].tolist()],
                                 [[7, 8], [5, 4], [2, 0], [9, 0], [6, 0]])
                # By rising first token: prefix 1, then prefix 0, which the last request shares, too.
                self.assertEqual(results["shared_starts"].tolist(), [[0, 1, 1, 5], [0, 48, 48, 80]])
                self.assertEqual(results["query_rows"][:5].tolist(), [2, 0, 3, 4, 5])
                self.assertEqual(given["prefixes"][:, 3].tolist(), [1, 1])
                given["slots"][2] = 6 * 16  # of prefix 1
                hypermla.split_prefixes(**tensors, page=16, requests=4)
                self.assertEqual(given["prefixes"][:, 3].tolist(), [1, 0])
                self.assertEqual(results["own_lengths"].tolist(), [18, 20, 17, 8, 16])
                self.assertEqual(results["shared_starts"].tolist(), [[0, 0, 0, 4], [0, 48, 48, 80]])
                self.assertEqual(results["query_rows"][:4].tolist(), [0, 2, 3, 4])
                for nothing in ("prefixes", "prefix_pages"):
                    tensors[nothing] = tensors[nothing][:0]
                tensors["shared_starts"] = tensors["shared_starts"][:, :0]
                hypermla.split_prefixes(**tensors, page=16)
                self.assertEqual(results["own_lengths"].tolist(), given["lengths"].tolist())
                self.assertEqual(results["own_table"][0, :4].tolist(), given["block_table"][0].tolist())

    def test_what_cannot_be_split_is_refused(self):
        for change, said in ((dict(requests=6), "block_table has room for 0 to 5"), (dict(page=0), "pages of 0 tokens"),
                             (dict(page="x"), "page"), (dict(requests=-1), "requests=-1"),
                             (dict(prefixes=numpy.zeros((2, 5), numpy.int32)), "prefixes must be"),
                             (dict(owners=numpy.zeros(9)), "owners must be int32"),
                             (dict(slots=numpy.zeros(2, numpy.int32)), "slots must be int64"),
                             (dict(own_table=numpy.zeros((4, 4), numpy.int32)), "own_table has room for 0 to 4"),
                             (dict(shared_starts=numpy.zeros((2, 2), numpy.int32)), "shared_starts must be")):
            given, results = self.step_with_prefixes()
            with self.subTest(said), self.assertRaisesRegex((hypermla.Error, TypeError), said):
                hypermla.split_prefixes(**(given | results | dict(page=16) | change))
            self.assertFalse(any(array.any() for array in results.values()))

    def test_states_merge(self):
        a, b = self.bits(5, 3, 128), self.bits(5, 3, 136)[..., :128]
        a[0] = 0x7FC0  # an empty part may hold anything
        lse_a, lse_b = (numpy.random.default_rng(seed).standard_normal((3, 5), numpy.float32).T for seed in (1, 2))
        lse_a[0] = -numpy.inf
        x, y = numpy.exp(lse_a)[..., None], numpy.exp(lse_b)[..., None]
        expected = (x * numpy.nan_to_num(self.floats(a)) + y * self.floats(b)) / (x + y)
        for name, tensor in self.libraries():
            with self.subTest(name):
                out, lse = hypermla.merge_states(tensor(a), tensor(lse_a), tensor(b), tensor(lse_b))
                again = a.copy()
                hypermla.merge_states(tensor(again), tensor(lse_a), tensor(b), tensor(lse_b), out=tensor(again))
                self.assertLessEqual(numpy.abs(self.floats(again) - expected).max(), 0.02)
                self.assertTrue(bool((lse == tensor(lse_b))[0].all()))
                self.assertTrue(bool((out == tensor(again)).all()))

    def test_states_merge_in_either_base(self):
        o, empty = numpy.ones((1, 1, 8), numpy.uint16), numpy.full((1, 1), -numpy.inf, numpy.float32)
        one, two = (numpy.full((1, 1), value, numpy.float32) for value in (1, 2))
        room = numpy.zeros((1, 1), numpy.float32)
        merged = lambda a, b, **options: hypermla.merge_states(o, a, o, b, **options)[1]
        self.assertAlmostEqual(merged(one, two).item(), 2.31326, 4)
        self.assertAlmostEqual(merged(one, two, lse_base2=True).item(), 2.58496, 4)
        self.assertEqual(merged(empty, empty).item(), -numpy.inf)
        self.assertEqual(merged(empty, empty, empty_lse_positive=True).item(), numpy.inf)
        self.assertIs(merged(one, two, lse=room), room)
        self.assertAlmostEqual(room.item(), 2.31326, 4)

    @unittest.skipUnless(torch is not None and torch.cuda.is_available(), "there is no GPU")
    def test_a_graph_of_a_gpu_follows_the_contents(self):
        def inputs(seed, device):
            torch.manual_seed(seed)
            tensors = [torch.randn(shape) for shape in ((9, 5, 128), (9, 5, 128), (50, 576), (6, 16, 576))]
            tensors.append(torch.randn(5, 256, 512) / 512**0.5)
            lse = [torch.where(torch.rand(9, 5) < 0.2, -torch.inf, torch.randn(9, 5)) for _ in range(2)]
            indices = torch.randperm(96)[:50], torch.randperm(6, dtype=torch.int32)
            return [tensor.to(device) for tensor in (*(tensor.bfloat16() for tensor in tensors), *lse, *indices)]

        def step(a, b, rows, cache, weight, lse_a, lse_b, slots, table):
            hypermla.append(rows, cache, slots)
            keys_and_values = hypermla.decompress_prefix(cache, table, 90, weight[:, :128], weight[:, 128:].mT)
            return *keys_and_values, *hypermla.merge_states(a, lse_a, b, lse_b), cache

        given = inputs(0, "cuda")
        step(*given)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = step(*given)
        for seed in (1, 2):
            for tensor, new in zip(given, inputs(seed, "cuda")):
                tensor.copy_(new)
            graph.replay()
            for one, expected in zip(got, step(*inputs(seed, "cpu"))):
                torch.testing.assert_close(one.cpu(), expected, atol=0.01, rtol=0.01)

    def test_what_does_not_fit_is_refused(self):
        a, lse = self.bits(2, 3, 128), numpy.zeros((2, 3), numpy.float32)
        cache, slots = self.bits(2, 16, 576), numpy.zeros(2, numpy.int64)
        table, uk = numpy.zeros(1, numpy.int32), self.bits(2, 128, 512)
        shifted = a.reshape(-1)[64:448].reshape(1, 3, 128)
        for wrong, said in ((lambda: hypermla.merge_states(a, lse, a[:1], lse), "o_b must be"),
                            (lambda: hypermla.merge_states(a, lse.astype("float64"), a, lse), "lse_a must be float32"),
                            (lambda: hypermla.merge_states(a[..., ::2], lse, a[..., ::2], lse), "dense in its last"),
                            (lambda: hypermla.merge_states(a[:1], lse[:1], a[:1], lse[:1], out=shifted), "overlaps"),
                            (lambda: hypermla.merge_states(a, lse, a, lse, lse_base2="no"), "^lse_base2 cannot be"),
                            (lambda: hypermla.merge_states(a, lse, a, lse, empty_lse_positive=lse), "^empty_lse_pos"),
                            (lambda: hypermla.append(cache[0, :2], cache, slots + 32), r"slots\[0\] is 32"),
                            (lambda: hypermla.append(cache[0, :1], cache, slots), "2 slots for 1 rows"),
                            (lambda: hypermla.append(cache[0, :2], cache, table), "slots must be int64"),
                            (lambda: hypermla.append(lse, cache, slots), "float32"),
                            (lambda: hypermla.decompress_prefix(cache, table, 17, uk, uk.swapaxes(1, 2)), "17"),
                            (lambda: hypermla.decompress_prefix(cache, table, -1, uk, uk), "tokens=-1 is not"),
                            (lambda: hypermla.decompress_prefix(cache, table, 3, uk, uk), "w_uv must be"),
                            (lambda: hypermla.decompress_prefix(
                                cache, table, 3, uk, uk.swapaxes(1, 2),
                                out=(cache.reshape(-1)[8:1160].reshape(3, 2, 192), self.bits(3, 2, 128))),
                             "k shares memory with the cache"),
                            (lambda: hypermla.Kernel("mla_var6_plus", prefixes=-1, device="cpu"), "prefixes=-1 is")):
            with self.subTest(said), self.assertRaisesRegex(hypermla.Error, said):
                wrong()


class Plan(unittest.TestCase):
    def test_list(self):
        names = {directory.name for _, _, directory in kernel_directories()}
        self.assertEqual(sorted(hypermla.list()), sorted(names))  # each once, also one of two languages
        self.assertIn("flash_attention", hypermla.list())

    def test_tensors(self):
        tensors = {tensor.name: tensor for tensor in new_kernel().tensors}
        self.assertEqual(tensors["q"], ("q", (1, 2, 3, 128), "float16", "input"))
        self.assertEqual(tensors["lse"], ("lse", (1, 2, 3), "float32", "output"))

    def test_a_prediction_needs_no_tensors(self):
        kernel = new_kernel()
        self.assertGreater(kernel.predicted_seconds("NVIDIA H200"), 0)
        self.assertGreater(kernel.predicted_seconds(), kernel.predicted_seconds("NVIDIA H200"))

    def test_the_command_line_predicts_the_same(self):
        problem = {"b": 32, "s": 16, "t": 4096}
        out = subprocess.run([BINARY, "predict", "mla_var6_plus",
                              *(f"--{name}={value}" for name, value in problem.items())],
                             text=True, check=True, capture_output=True, timeout=600).stdout
        kernel = hypermla.Kernel("mla_var6_plus", device="cpu", **problem)
        for device in ("NVIDIA H200", "NVIDIA GeForce RTX 5090"):
            said = re.search(rf"(?m)^{device} +([\d.]+) us  ", out)
            self.assertEqual(f"{kernel.predicted_seconds(device) * 1e6:.1f}", said[1], out)

    def test_a_choice_needs_no_device(self):
        ranking = hypermla.choose(device="NVIDIA H200", b=32, s=64)
        self.assertEqual(ranking, sorted(ranking, key=lambda choice: choice.sustained_us))
        self.assertEqual({choice.path for choice in ranking} - {"hybrid"}, {"latent", "decompressed"})
        best = next(choice for choice in ranking if not choice.draft)
        self.assertEqual((best.path, best.kernel, best.n), ("decompressed", "cutile.mla.flash_attention", 4096))
        self.assertTrue(all(choice.kernel.startswith("cutile.") for choice in hypermla.choose(b=1, h=2, s=3, t=40)))

    def test_a_language_is_a_keyword(self):
        self.assertEqual([tensor.name for tensor in new_kernel(language="cutile").tensors],
                         [tensor.name for tensor in new_kernel().tensors])
        with self.assertRaisesRegex(hypermla.Error, "is written for Hopper GPUs"):
            new_kernel(language="cute")
        for language in ("cute", "cutile"):
            ranking = hypermla.choose("NVIDIA H200", language=language, b=32, s=16)
            self.assertEqual({choice.kernel.split(".")[0] for choice in ranking}, {language})

    def test_errors_speak_python(self):
        for call, expected in {
            lambda: new_kernel(language="cute"): r"take cutile.mla.flash_attention, which runs everywhere",
            lambda: new_kernel(dtype="float32"): r'^dtype="float32" is not supported: choose bfloat16 or float16$',
            lambda: new_kernel(b=0): r"^b=0 is not supported: it must be at least 1$",
            lambda: hypermla.choose("H200"): r"`hypermla device --measure` adds the present device",
        }.items():
            with self.subTest(expected), self.assertRaisesRegex(hypermla.Error, expected) as caught:
                call()
            self.assertNotIn("--", re.sub("`[^`]*`", "", str(caught.exception)))

    def test_what_python_raises_by_itself_is_an_error_too(self):
        for call in (lambda: new_kernel().tune(1 << 40), lambda: new_kernel().run(1 << 70),
                     lambda: new_kernel().profile(bench_runs=1 << 40), lambda: new_kernel().profile(label="\udcff"),
                     lambda: hypermla.Kernel("flash\0attention"), lambda: hypermla.Kernel("flash_attention", "\udcff"),
                     lambda: new_kernel(dtype="\udcff"), lambda: hypermla.choose(b="\udcff"),
                     lambda: new_kernel().predicted_seconds("\0"),
                     lambda: hypermla.MlaDecode(heads=1 << 70, device="cpu")):
            with self.assertRaises(hypermla.Error):
                call()
        for call in (lambda: hypermla.Kernel(3), lambda: new_kernel().tune("many"), lambda: new_kernel().run("here"),
                     lambda: hypermla.MlaDecode(device="cpu").plan([1])):
            with self.assertRaises(TypeError):
                call()

    def test_errors_are_sentences(self):
        for call, expected in {
            lambda: hypermla.Kernel("flash_atention"): "did you mean flash_attention",
            lambda: hypermla.Kernel("flash_attention", "v77"): "no version 'v77'",
            lambda: hypermla.choose(perfix=3): "no field 'perfix'; did you mean prefix",
            lambda: hypermla.choose("No GPU"): "'No GPU' has no entry in devices.json",
            lambda: new_kernel(bb=3): "no field 'bb'",
            lambda: new_kernel(b=0): "at least 1",
            lambda: new_kernel(device="tpu"): "unknown device 'tpu'",
            lambda: new_kernel().predicted_seconds("No GPU"): "No GPU",
            lambda: new_kernel().run(): "is not bound",
            lambda: new_kernel().profile(): "is not bound",
            lambda: new_kernel().profile("events"): "choose one of annotation, event, ncu, nsys",
            lambda: new_kernel().profile(bench_runs=0): "at least 1",
            lambda: new_kernel().bind("nothing", 16): "no tensor 'nothing'; this kernel has q, ",
            lambda: new_kernel().bind("q", 17): "16-byte aligned",
            lambda: new_kernel().bind("q", "text"): "a str cannot be bound to 'q'",
            lambda: new_kernel().bind("q", bytearray(10)): "must be of 1536 bytes, not of 10",
            lambda: new_kernel().bind("q", array.array("f", bytes(4 * 768))): "must be of float16, not of float32",
            lambda: new_kernel().bind("o", bytes(1536)): "must be writable, not read-only",
        }.items():
            with self.subTest(expected), self.assertRaisesRegex(hypermla.Error, expected):
                call()


class OneCall(unittest.TestCase):
    """check(), verify() and profile() make their own inputs."""

    def test_kernels_are_listed_with_their_languages(self):
        expected = {(f"{design.rpartition('.')[0]}.{directory.name}", version)
                    for design, version, directory in kernel_directories()}
        self.assertEqual({(kernel.full_name, kernel.version) for kernel in hypermla.kernels()}, expected)
        self.assertEqual(len(hypermla.kernels()), len(kernel_directories()))
        for language in ("cute", "cutile"):
            names = [kernel.full_name for kernel in hypermla.kernels(language)]
            self.assertTrue(names and all(name.startswith(f"{language}.mla.") for name in names), names)
        self.assertEqual(hypermla.kernels("fortran"), [])
        said = subprocess.run([BINARY, "--list"], text=True, check=True, capture_output=True).stdout
        for kernel in hypermla.kernels():
            self.assertRegex(said, rf"(?m) {kernel.version} +{'draft: ' * kernel.draft}{re.escape(kernel.summary)}$")

    def test_one_call_checks(self):
        result = hypermla.check("flash_attention", seed=7, **SHAPE)
        self.assertEqual((result.passed, result.kernel, result.seed), (True, "cutile.mla.flash_attention", 7))
        self.assertEqual({(one.inputs, one.output) for one in result.outputs},
                         {(inputs, output) for inputs in ("random inputs", "growing scores", "t=39")
                          for output in ("o", "lse")})
        self.assertTrue(all(one.passed and 0 < one.relative_error < 0.01 for one in result.outputs), result)
        self.assertNotEqual(hypermla.check("flash_attention", **SHAPE).seed, 0)
        with self.assertRaisesRegex(hypermla.Error, "^b=0 is not supported"):
            hypermla.check("flash_attention", **{**SHAPE, "b": 0})
        with self.assertRaisesRegex(hypermla.Error, "GB, but this device has"):
            hypermla.check("flash_attention", device="cpu", b=60000, t=4096, h=128)

    def test_a_wrong_kernel_does_not_pass(self):
        """In a copy of the sources, whose kernel forgets a query."""
        with tempfile.TemporaryDirectory(prefix="hypermla-test-") as directory:
            root = pathlib.Path(directory)
            for name in ("kernels", "include", "conf"):
                shutil.copytree(CHECKOUT / name, root / name)
            kernel = root / "kernels/cutile/mla/flash_attention/flash_attention/flash_attention.cuh"
            right = "DecompressedUnit{request, head, m, 0}"
            self.assertIn(right, kernel.read_text())
            kernel.write_text(kernel.read_text().replace(right, "DecompressedUnit{request, head, m + 1, 0}"))
            script = (f"import hypermla\nresult = hypermla.check('flash_attention', **{SHAPE})\n"
                      "print(result.passed, {one.passed for one in result.outputs})")
            variables = {**os.environ, "PYTHONPATH": str(pathlib.Path(hypermla.__file__).parents[1]),
                         "HYPERMLA_ROOT": directory, "HYPERMLA_CACHE_DIR": f"{directory}/cache"}
            done = subprocess.run([sys.executable, "-c", script], env=variables, text=True, check=False,
                                  capture_output=True)
        self.assertEqual((done.stdout, done.stderr), ("False {False}\n", ""))

    def test_one_call_verifies(self):
        with tempfile.TemporaryDirectory(prefix="hypermla-test-") as directory:
            record = pathlib.Path(directory) / "verified.json"
            (result,) = hypermla.verify("output_decompression", device="cpu", record=record)
            (said,) = json.loads(record.read_text())["cutile.mla.output_decompression"].values()
        self.assertEqual((result.kernel, result.failed, result.failures), ("cutile.mla.output_decompression", 0, ""))
        self.assertGreater(result.cases, 10)
        self.assertEqual(said["cases"], result.cases)
        self.assertEqual(said["worst_relative_error"], result.worst_relative_errors)
        self.assertEqual(set(result.worst_relative_errors), {"o"})
        with self.assertRaisesRegex(hypermla.Error, "did you mean output_decompression"):
            hypermla.verify("output_decompresion", device="cpu")

    def test_one_call_verifies_those_behind_broken_ones(self):
        """In a copy of the sources without any kernel in CUDA Tile C++ but one."""
        kept = "prefix_decompression.cuh"
        with tempfile.TemporaryDirectory(prefix="hypermla-test-") as directory:
            root = pathlib.Path(directory) / "root"
            for name in ("kernels", "include", "conf"):
                shutil.copytree(CHECKOUT / name, root / name)
            for kernel in root.glob("kernels/cutile/[mh]*/**/*.cuh"):
                if kernel.name != kept:
                    kernel.unlink()
            code = """import hypermla
for one in hypermla.verify(device="cpu", record="verified.json"):
    print(one.kernel, one.cases, one.failed, one.failures.count(" names "))
try:
    hypermla.verify("flash_mla", device="cpu")
except hypermla.Error as error:
    print(error)"""
            done = subprocess.run([sys.executable, "-c", code], cwd=directory, text=True, capture_output=True, env={
                **os.environ, "PYTHONPATH": str(pathlib.Path(hypermla.__file__).parents[1]), "HYPERMLA_ROOT": str(root),
                "HYPERMLA_CACHE_DIR": str(root / "cache")})
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            recorded = json.loads((pathlib.Path(directory) / "verified.json").read_text())
        *all_of_them, last = done.stdout.splitlines()
        passed = [line for line in all_of_them if not line.endswith(" 0 1 1")]
        self.assertGreater(len(all_of_them), 5)
        self.assertEqual(len(passed), 1)
        self.assertRegex(passed[0], r"^cutile\.mla\.prefix_decompression \d+ 0 0$")
        self.assertEqual(list(recorded), ["cutile.mla.prefix_decompression"])
        self.assertRegex(last, r"^a plan names \w+\.cuh, which is not in")

    def test_one_call_profiles(self):
        with tempfile.TemporaryDirectory(prefix="hypermla-test-") as directory:
            out = pathlib.Path(directory) / "run"
            profile = hypermla.profile("flash_attention", mode="event", out_dir=out, label="mine", bench_runs=3,
                                       tune=False, **SHAPE)
            said = json.loads((out / "profile.json").read_text())
        self.assertEqual((profile.directory, profile.missing), (str(out), ""))
        self.assertGreater(profile.burst.median_us, 0)
        self.assertEqual(said["label"], "mine")
        with self.assertRaisesRegex(hypermla.Error, "choose one of annotation, event, ncu, nsys"):
            hypermla.profile("flash_attention", mode="events", **SHAPE)


class Buffers(unittest.TestCase):
    def bound(self, kernel):
        for tensor in kernel.tensors:
            kernel.bind(tensor.name, bytearray(byte_count(tensor)))
        return kernel

    def test_ones_stay_ones(self):
        """Softmax weights sum to 1, so attention over values of 1 is 1, and lse is the score plus log(t)."""
        kernel = new_kernel()
        memory = {}
        for tensor in kernel.tensors:
            memory[tensor.name] = bytearray(byte_count(tensor))
            if tensor.role == "input":
                value = struct.pack("<e", 1.0 if tensor.name == "v" else 0.0)
                memory[tensor.name][:] = value * (byte_count(tensor) // 2)
            kernel.bind(tensor.name, memory[tensor.name])
        kernel.run()
        self.assertEqual(set(memoryview(memory["o"]).cast("H")), {0x3C00})
        for value in memoryview(memory["lse"]).cast("f"):
            self.assertAlmostEqual(value, 3.6888794541, places=5)  # log(40)
        kernel.tune(max_iterations=1)
        memory["o"][:] = bytes(len(memory["o"]))
        kernel.run(stream=0)
        kernel.check()
        self.assertEqual(set(memoryview(memory["o"]).cast("H")), {0x3C00})

    def test_scores_far_below_zero_still_weigh(self):
        """Equal scores near the end of fp32 have equal weights: attention is the mean of the values."""
        words = {"q": 0xDD00, "qpe": 0xDD00, "k": 0x5D00, "kpe": 0x5D00, "v": 0x3F80}  # bfloat16: -2^59, 2^59 and 1
        kernel = new_kernel(dtype="bfloat16")
        memory = {tensor.name: bytearray(byte_count(tensor)) for tensor in kernel.tensors}
        for tensor in kernel.tensors:
            if tensor.role == "input":
                memory[tensor.name][:] = struct.pack("<H", words[tensor.name]) * (byte_count(tensor) // 2)
            kernel.bind(tensor.name, memory[tensor.name])
        kernel.run()
        self.assertEqual(set(memoryview(memory["o"]).cast("H")), {0x3F80})
        self.assertTrue(all(-1e38 < value < -1e35 for value in memoryview(memory["lse"]).cast("f")))

    def test_an_output_shares_no_memory(self):
        for name, other, start in (("o", "q", 0), ("o", "v", 64), ("lse", "o", 1520)):
            kernel = new_kernel()
            memory = {tensor.name: bytearray(byte_count(tensor) + 128) for tensor in kernel.tensors}
            address = {key: hypermla._hypermla.buffer_address(memoryview(value)) for key, value in memory.items()}
            for key, at in address.items():
                kernel.bind(key, at + -at % 16)
            kernel.bind(name, address[other] + -address[other] % 16 + start)
            with self.subTest(name), self.assertRaisesRegex(hypermla.Error,
                                                            f"'(lse|o)' and '{other}|{name}' share memory"):
                kernel.run()
            kernel.bind(name, address[name] + -address[name] % 16)
            kernel.bind("k", address["v"] + -address["v"] % 16)  # inputs may
            kernel.run()

    # With a compiler that would take ten minutes: neither tune() nor the end of the program waits for it.
    def test_ctrl_c_or_a_kill_ends_tune_and_its_compilers(self):
        for number in (signal.SIGINT, signal.SIGKILL):
            # What started the compilers may be tidying up there still.
            with self.subTest(number), tempfile.TemporaryDirectory(prefix="hypermla-test-",
                                                                   ignore_cleanup_errors=True) as directory:
                self.end_tune(number, pathlib.Path(directory))

    def end_tune(self, number, directory):
        started, compiler = directory / "started", directory / "slow-c++"
        compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\necho $$ >>"{started}"\nexec sleep 600\n')
        compiler.chmod(0o755)
        script = ("import hypermla\nkernel = hypermla.Kernel('flash_attention', b=1, s=3, t=40, h=2, device='cpu')\n"
                  "for i, one in enumerate(kernel.tensors): kernel.bind(one.name, (i + 1) << 20)\n"
                  "kernel.tune(retune=True)")
        variables = {**os.environ, "PYTHONPATH": str(pathlib.Path(hypermla.__file__).parents[1]), "CXX": str(compiler),
                     "HYPERMLA_CACHE_DIR": f"{directory}/cache"}
        process = subprocess.Popen([sys.executable, "-c", script], env=variables, text=True, stderr=subprocess.PIPE)
        while not started.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        said = process.communicate(timeout=120)[1]
        self.assertEqual("KeyboardInterrupt" in said, number == signal.SIGINT, said)
        self.assertEqual(process.returncode, -number)
        for pid in started.read_text().split():
            for _ in range(1000):
                state = pathlib.Path(f"/proc/{pid}/status")
                if not state.exists() or "State:\tZ" in state.read_text():  # a zombie: no parent waits for it
                    break
                time.sleep(0.01)
            else:
                os.kill(int(pid), signal.SIGKILL)
                self.fail("a compiler is still running")

    def test_bound_memory_is_kept(self):
        kernel = new_kernel()
        for tensor in kernel.tensors:
            kernel.bind(tensor.name, bytearray(byte_count(tensor)))
        kernel.run()
        held = bytearray(1536)
        kernel.bind("q", held)
        with self.assertRaises(BufferError):
            held.append(0)  # would move it
        del kernel
        held.append(0)

    def test_a_forked_child_runs(self):
        """Its parent's threads are not there: run() and the compilation of another kernel must not wait for them."""
        kernel = self.bound(new_kernel())
        kernel.run()
        child = os.fork()
        if child == 0:
            signal.alarm(120)
            status = 1
            try:
                kernel.run()
                self.bound(new_kernel(dtype="bfloat16")).run()
                status = 0
            finally:
                os._exit(status)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        kernel.run()

    def test_a_daemon_thread_may_outlive_the_interpreter(self):
        script = """
import threading, time
import hypermla

def memory(tensor):
    count = 4 if tensor.dtype == "float32" else 2
    for extent in tensor.shape:
        count *= extent
    return bytearray(count)

def forever():
    while True:
        kernel.run()

kernel = hypermla.Kernel("flash_attention", device="cpu", b=1, s=64, t=1024, h=4, dtype="float16")
for tensor in kernel.tensors:
    kernel.bind(tensor.name, memory(tensor))
kernel.run()
threading.Thread(target=forever, daemon=True).start()
time.sleep(0.2)
"""
        variables = {**os.environ, "PYTHONPATH": str(pathlib.Path(hypermla.__file__).parents[1])}
        for _ in range(3):
            done = subprocess.run([sys.executable, "-c", script], env=variables, text=True, check=False,
                                  capture_output=True, timeout=120)
            self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_one_kernel_serves_one_thread(self):
        kernel = new_kernel(s=64, t=4096, h=8)
        for tensor in kernel.tensors:
            kernel.bind(tensor.name, bytearray(byte_count(tensor)))
        kernel.prepare()
        running, refused = threading.Event(), []

        def other():
            running.wait()
            while not refused and thread.is_alive():
                try:
                    kernel.prepare()
                except hypermla.Error as error:
                    refused.append(str(error))

        def many():
            running.set()
            for _ in range(20):
                try:
                    kernel.run()
                except hypermla.Error as error:
                    refused.append(str(error))

        thread = threading.Thread(target=many)
        second = threading.Thread(target=other)
        second.start()
        thread.start()
        thread.join()
        second.join()
        self.assertTrue(any("another thread" in text for text in refused))


class Profile(unittest.TestCase):
    def test_it_says_what_its_file_says(self):
        kernel = new_kernel()
        for tensor in kernel.tensors:
            kernel.bind(tensor.name, bytearray(byte_count(tensor)))
        for mode in ("annotation", "event"):
            with self.subTest(mode), tempfile.TemporaryDirectory() as directory:
                out = pathlib.Path(directory) / mode
                profile = kernel.profile(mode, out, label="mine", bench_runs=3)
                self.assertEqual((profile.directory, profile.missing), (str(out), ""))
                self.assertIn("mine", (out / "report.md").read_text())
                written = json.loads((out / "profile.json").read_text())
                self.assertEqual(written["mode"], mode)
                for name in ("cold", "burst"):
                    times = getattr(profile, name)
                    self.assertLessEqual(times.low_us, times.median_us)
                    self.assertEqual(times._asdict(), {key: written["timing"][name][key] for key in times._fields})
                self.assertIsNone(profile.sustained, "of GPUs only")
                self.assertEqual(profile.bottleneck.kind, written["classification"]["class"])
                self.assertEqual([{key: value for key, value in one._asdict().items() if value != ""}
                                  for one in profile.opportunities], written["opportunities"])
                (stage,) = profile.stages
                self.assertEqual((stage.name, stage.burst), ("flash_attention", None))
                self.assertEqual({metric.name: metric.value for metric in stage.metrics},
                                 written["stages"][0].get("metrics", {}))
        with self.assertRaisesRegex(hypermla.Error, "the mode ncu looks into a GPU"):
            kernel.profile("ncu")


@unittest.skipIf(numpy is None, "NumPy is not installed")
class NumPy(unittest.TestCase):
    def arrays(self, kernel, dtypes):
        random = numpy.random.default_rng(1)
        arrays = {}
        for tensor in kernel.tensors:
            values = (random.standard_normal(tensor.shape) if tensor.role == "input"
                      else numpy.full(tensor.shape, numpy.nan))
            arrays[tensor.name] = values.astype(dtypes[tensor.dtype])
            kernel.bind(tensor.name, arrays[tensor.name])
        return arrays

    def test_attention(self):
        kernel = new_kernel(causal=True)
        x = self.arrays(kernel, {"float16": numpy.float16, "float32": numpy.float32})
        kernel.run()
        x = {name: value.astype(numpy.float64) for name, value in x.items()}
        score = x["q"] @ x["k"].swapaxes(2, 3) + x["qpe"] @ x["kpe"][:, None].swapaxes(2, 3)
        score /= (128 + 64) ** 0.5
        score[..., numpy.arange(40)[None, :] > 40 - 3 + numpy.arange(3)[:, None]] = -numpy.inf
        weight = numpy.exp(score - score.max(-1, keepdims=True))
        numpy.testing.assert_allclose(x["o"], weight / weight.sum(-1, keepdims=True) @ x["v"], atol=4e-3)
        numpy.testing.assert_allclose(x["lse"], numpy.log(numpy.exp(score).sum(-1)), atol=2e-3)

    def test_refusals(self):
        kernel = new_kernel()
        good = numpy.zeros((1, 2, 3, 128), numpy.float16)
        for value, expected in (
            (good.astype(numpy.float32), "must be of float16, not of float32"),
            (good[:, :, :2], r"must be of shape \[1, 2, 3, 128\], not \[1, 2, 2, 128\]"),
            (numpy.zeros((1, 2, 128, 3), numpy.float16).swapaxes(2, 3), "must be dense and row-major"),
            (good.astype(numpy.uint16), "must be of float16, not of bfloat16"),
        ):
            with self.assertRaisesRegex(hypermla.Error, expected):
                kernel.bind("q", value)
        good.setflags(write=False)
        kernel.bind("q", good)
        with self.assertRaisesRegex(hypermla.Error, "read-only|readonly"):
            kernel.bind("o", good)

    def test_integers_carry_bfloat16(self):
        kernel = new_kernel(dtype="bfloat16")
        kernel.bind("q", numpy.zeros((1, 2, 3, 128), numpy.uint16))


class Arrays(unittest.TestCase):
    """The two protocols of GPU tensors, whose memory a kernel of the CPU must refuse."""

    def test_a_cuda_array(self):
        class Tensor:
            __cuda_array_interface__ = {"data": (256, False), "shape": (1, 2, 3, 128), "typestr": "<f2", "version": 3}

        with self.assertRaisesRegex(hypermla.Error, "must be in the memory of the CPU"):
            new_kernel().bind("q", Tensor())
        Tensor.__cuda_array_interface__ = {**Tensor.__cuda_array_interface__, "strides": (1536, 768, 2, 6)}
        with self.assertRaisesRegex(hypermla.Error, "must be dense"):
            new_kernel().bind("q", Tensor())

    def test_a_capsule_that_is_none(self):
        class Tensor:
            def __dlpack_device__(self):
                return 1, 0

            def __dlpack__(self, **_):
                return 5

        with self.assertRaisesRegex(hypermla.Error, "cannot be bound"):
            new_kernel().bind("q", Tensor())


if __name__ == "__main__":
    unittest.main()
