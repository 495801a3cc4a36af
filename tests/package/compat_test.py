"""hypermla.compat.flash_mla and .flashinfer against a direct computation, on NumPy's arrays and, where PyTorch is
installed, on its tensors, on the CPU and on the GPU that is there."""

import math
import os
import pathlib
import subprocess
import sys
import threading
import unittest
from unittest import mock

import numpy

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cli"))
from support import BUILD

sys.path.insert(0, str(BUILD / "python"))
try:
    import torch
except ImportError:
    torch = None
import hypermla
from hypermla.compat import flash_mla, flashinfer

LATENT, WIDTH, PAGE = 512, 576, 64


class Numpy:
    """bfloat16 as integers of 16 bits."""

    device = "cpu"

    def bfloat16(self, array):
        bits = array.astype(numpy.float32).view(numpy.uint32)
        rounded = ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(numpy.uint16)
        return numpy.where(numpy.isnan(array), numpy.uint16(0x7fc0), rounded)

    def float16(self, array):
        return array.astype(numpy.float16)

    def int64(self, values):
        return numpy.array(values, numpy.int64)

    def int32(self, values):
        return numpy.asarray(values, numpy.int32)

    def uint8(self, array):
        return array

    def fp8(self, array):
        """A cache in FP8 as FlashMLA is given it."""
        return array

    def same_float32(self, array):
        return array.astype(numpy.float32)

    def float32(self, array):
        if array.dtype == numpy.uint16:
            return (array.astype(numpy.uint32) << 16).view(numpy.float32)
        return array.astype(numpy.float32)

    def dtype(self, name):
        return name


class Torch:
    def __init__(self, device="cpu"):
        self.device = device

    def bfloat16(self, array):
        return torch.tensor(array, dtype=torch.bfloat16, device=self.device)

    def float16(self, array):
        return torch.tensor(array, dtype=torch.float16, device=self.device)

    def int64(self, values):
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def int32(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def uint8(self, array):
        return torch.tensor(array, device=self.device)

    def fp8(self, array):
        return self.uint8(array).view(torch.float8_e4m3fn)

    def same_float32(self, array):
        return torch.tensor(array, dtype=torch.float32, device=self.device)

    def float32(self, tensor):
        return tensor.float().cpu().numpy()

    def dtype(self, name):
        return getattr(torch, name)


def of_e4m3(bits):
    exponent, mantissa = bits >> 3 & 15, bits & 7
    number = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0 ** -6
    return -number if bits & 128 else number


E4M3 = numpy.array([of_e4m3(bits) for bits in range(256)])  # but for NaN, 127 and 255


def attended(q, tokens, causal, scale):
    """o [queries, heads, 512] and lse [queries, heads] of q [queries, heads, 576] over tokens [kv heads, tokens, 576],
    by the definition; +inf where no token is seen."""
    queries, heads, _ = q.shape
    o, lse = numpy.zeros((queries, heads, LATENT)), numpy.full((queries, heads), numpy.inf)
    for query in range(queries):
        for head in range(heads):
            length = tokens.shape[1]
            most = max(length - queries + query + 1, 0) if causal else length
            seen = tokens[head // (heads // tokens.shape[0]), :most]
            if not len(seen):
                continue
            scores = seen.astype(numpy.float64) @ q[query, head] * scale
            weights = numpy.exp(scores - scores.max())
            o[query, head] = weights @ seen[:, :LATENT] / weights.sum()
            lse[query, head] = math.log(weights.sum()) + scores.max()
    return o, lse


class Cases:
    """For each kind of arrays."""

    def assert_close(self, given, wanted, tolerance):
        given = self.xp.float32(given)
        self.assertEqual(given.shape, wanted.shape)
        numpy.testing.assert_allclose(given, wanted, rtol=0, atol=tolerance)

    # Blocks in a random order; what no request may read is NaN, and the table's tail is far outside of the cache.
    def cache(self, lengths, groups, dtype, page=PAGE):
        random = numpy.random.default_rng(5)
        width = max(-(-max(lengths) // page), 1) + 1
        table = random.permutation(len(lengths) * width).reshape(-1, width)
        cache = random.standard_normal((table.size, page, groups, WIDTH)).astype(numpy.float32)
        for row, length in zip(table, lengths):
            slots = numpy.arange(width * page).reshape(width, page)
            cache[row] = numpy.where((slots < length)[..., None, None], cache[row], numpy.nan)
            row[-(-length // page):] = 2147480000
        return getattr(self.xp, dtype)(cache), table

    def tokens_of(self, cache, row, length):
        """[kv heads, tokens, 576]"""
        page = cache.shape[1]
        pages = self.xp.float32(cache)[row[:-(-length // page)]]
        return pages.reshape(-1, *pages.shape[2:])[:length].transpose(1, 0, 2)

    def decode(self, lengths, queries, heads, groups=1, causal=True, dtype="bfloat16", q=None, **options):
        xp = self.xp
        cache, table = self.cache(lengths, groups, dtype)
        if q is None:
            random = numpy.random.default_rng(7)
            q = getattr(xp, dtype)(random.standard_normal((len(lengths), queries, heads, WIDTH)) / 4)
        metadata, splits = flash_mla.get_mla_metadata()
        out, lse = flash_mla.flash_mla_with_kvcache(q, cache, xp.int32(table), xp.int32(lengths), LATENT, metadata,
                                                    splits, causal=causal, **options)
        self.assertEqual(tuple(lse.shape), (len(lengths), heads, queries))
        for request, length in enumerate(lengths):
            o, sums = attended(xp.float32(q)[request], self.tokens_of(cache, table[request], length), causal,
                               options.get("softmax_scale") or WIDTH ** -0.5)
            self.assert_close(out[request], o, 0.02 if dtype == "bfloat16" else 0.005)
            self.assert_close(lse[request], sums.T, 2e-3)

    def test_flash_mla(self):
        for case in ({"lengths": [20], "queries": 1, "heads": 1}, {"lengths": [20, 1], "queries": 2, "heads": 3},
                     {"lengths": [130, 65], "queries": 4, "heads": 2, "causal": False},
                     {"lengths": [70, 3], "queries": 1, "heads": 9, "groups": 3, "dtype": "float16"},
                     {"lengths": [70, 9], "queries": 2, "heads": 8, "groups": 8},
                     {"lengths": [40, 2], "queries": 2, "heads": 6, "groups": 2, "softmax_scale": 0.1}):
            with self.subTest(case):
                self.decode(**case)

    def test_queries_without_tokens(self):
        self.decode([0, 3, 0], queries=2, heads=3)
        self.decode([1, 0], queries=4, heads=2, causal=True)
        self.decode([0, 0], queries=1, heads=2, causal=False)

    def test_queries_with_room_between_them(self):
        wide = numpy.random.default_rng(3).standard_normal((2, 3, 5, WIDTH + 64))
        for heads in (3, 4):
            self.decode([20, 17], 2, heads, q=self.xp.bfloat16(wide)[:, :2, :heads, :WIDTH])

    def test_one_plan_serves_all_layers(self):
        xp, (cache, table) = self.xp, self.cache([50, 20], 1, "bfloat16")
        q = xp.bfloat16(numpy.random.default_rng(1).standard_normal((2, 1, 2, WIDTH)))
        call = lambda metadata, lengths: flash_mla.flash_mla_with_kvcache(
            q, cache, xp.int32(table), xp.int32(lengths), LATENT, metadata, None)[1]
        same = lambda one, other: self.assertTrue(numpy.array_equal(xp.float32(one), xp.float32(other)))
        first, second = flash_mla.get_mla_metadata(xp.int32([50, 20]), 2, 1)[0], flash_mla.get_mla_metadata()[0]
        whole, cut = call(first, [50, 20]), call(second, [40, 20])
        self.assertFalse(numpy.array_equal(xp.float32(whole), xp.float32(cut)))
        same(call(second, [1, 1]), cut)  # the lengths were read by the first call
        same(call(first, [50, 20]), whole)  # its plan was written over, and is made again
        first.tile_scheduler_metadata, first.num_splits = flash_mla.get_mla_decoding_metadata()  # for another step
        same(call(first, [40, 20]), cut)
        same(call(flash_mla.FlashMLASchedMeta(tile_scheduler_metadata=None, num_splits=None), [50, 20]), whole)
        takeable, thread = flash_mla.takeable, threading.Thread(target=lambda: call(second, [1, 1]))

        def interrupted(q):  # behind the plan, before the run
            if thread.ident is None:
                thread.start()
                thread.join()
            return takeable(q)

        with mock.patch.object(flash_mla, "takeable", interrupted):
            same(call(flash_mla.get_mla_metadata()[0], [50, 20]), whole)
        self.assertIsNotNone(thread.ident)
        with self.assertRaisesRegex(hypermla.Error, "call get_mla_metadata.. again"):
            flash_mla.flash_mla_with_kvcache(q, cache, xp.int32(table), xp.int32([4, 4]), LATENT, first, causal=True)

    def test_what_flash_mla_refuses(self):
        xp, (cache, table) = self.xp, self.cache([50], 1, "bfloat16")
        q = xp.bfloat16(numpy.zeros((1, 1, 2, WIDTH)))
        given = (q, cache, xp.int32(table), xp.int32([50]), LATENT)
        metadata = flash_mla.get_mla_metadata()[0]
        for change, said in (({"is_fp8_kvcache": True}, "is_fp8_kvcache=True is not what k_cache is"),
                             ({"attn_sink": xp.same_float32(numpy.ones(3))}, r"attn_sink must be \[2\], not \[3\]"),
                             ({"softmax_scale": 0.0}, "softmax_scale=0.0 is not supported: it must be positive"),
                             ({"causal": "yes"}, "causal cannot be 'yes'; give it True or False"),
                             ({"indices": xp.int64([[[1]]])}, "indices must be int32, not .*int64"),
                             ({"descale_k": xp.same_float32(numpy.ones(1))}, "both factors are of a cache in FP8"),
                             ({"kv_format": "V32"}, "kv_format=V32 is not supported"),
                             ({"indices": xp.int32([[[1]]]), "kv_format": "V4"}, "kv_format=V4 is not supported"),
                             ({"indices": xp.int32([[[1]]]), "descale_q": xp.same_float32(numpy.ones(1))},
                              "descale_q with indices"),
                             ({"topk_length": xp.int32([1])}, "topk_length without indices is not supported"),
                             ({"extra_k_cache": cache}, "extra_k_cache is not supported"),
                             ({"indices": xp.int32([[1]])}, r"indices must be \[1, 1, top-k\], not \[1, 1\]"),
                             ({"indices": xp.int32([[[1]]]), "causal": True}, "causal is not supported with indices"),
                             ({"indices": xp.int32([[[1]]]), "is_fp8_kvcache": True}, "page, 1, 656.*, not .*576"),
                             ({"indices": xp.int32([[[1]]]), "topk_length": xp.int32([1, 1])}, r"topk_length must be"),
                             ({"indices": xp.int32([[[1]]]), "topk_length": xp.int64([1])},
                              "topk_length must be int32, not .*int64"),
                             ({"tile_scheduler_metadata": xp.int32([1])}, "older releases"),
                             ({"num_splits": xp.int32([1])}, "older releases")):
            with self.assertRaisesRegex(hypermla.Error, said):
                flash_mla.flash_mla_with_kvcache(*given, **{"tile_scheduler_metadata": metadata, **change})
        with self.assertRaisesRegex(TypeError, r"flash_mla_with_kvcache\(\) was given an object of a wrong type"):
            flash_mla.flash_mla_with_kvcache([1], [2], None, None, LATENT, metadata)
        with self.assertRaisesRegex(hypermla.Error, "head_dim_v 512, not"):
            flash_mla.flash_mla_with_kvcache(*given[:4], 256, metadata)
        with self.assertRaisesRegex(hypermla.Error, "2 heads over 4 kv heads"):
            flash_mla.flash_mla_with_kvcache(q, xp.bfloat16(numpy.zeros((1, 64, 4, WIDTH))), *given[2:], metadata)
        with self.assertRaisesRegex(hypermla.Error, "for each of 1 requests"):
            flash_mla.flash_mla_with_kvcache(*given[:3], xp.int32([1, 2]), LATENT, metadata)
        with self.assertRaisesRegex(hypermla.Error, "cache_seqlens must be int32, not .*int64"):
            flash_mla.flash_mla_with_kvcache(*given[:3], xp.int64([50]), LATENT, flash_mla.get_mla_metadata()[0])
        with self.assertRaisesRegex(hypermla.Error, "2049 requests of 1 queries are not supported"):
            flash_mla.flash_mla_with_kvcache(xp.bfloat16(numpy.zeros((2049, 1, 2, WIDTH))), cache,
                                             xp.int32([[0]] * 2049), xp.int32([1] * 2049), LATENT, metadata)
        with self.assertRaisesRegex(hypermla.Error, "page=48 is not supported"):
            flash_mla.flash_mla_with_kvcache(q, xp.bfloat16(numpy.zeros((2, 48, 1, WIDTH))), *given[2:], metadata)

    def test_dense_caches_in_fp8(self):
        xp, random, lengths = self.xp, numpy.random.default_rng(2), [130, 5]
        bits = lambda *shape: (random.integers(0, 0x50, shape) | random.integers(0, 2, shape) << 7).astype(numpy.uint8)
        raw, narrow = bits(8, PAGE, 1, WIDTH), bits(2, 3, 4, WIDTH)
        table = random.permutation(8).reshape(2, 4)
        wide = xp.bfloat16(random.standard_normal(narrow.shape) / 4)
        for q, q_factor, factor, said in ((wide, None, 0.03, None), (wide, None, None, True),
                                          (xp.fp8(narrow), 0.05, 0.03, None), (xp.fp8(narrow), None, None, True)):
            given = [None if of is None else xp.same_float32(numpy.array([of])) for of in (q_factor, factor)]
            out, lse = flash_mla.flash_mla_with_kvcache(
                q, xp.fp8(raw), xp.int32(table), xp.int32(lengths), LATENT, flash_mla.get_mla_metadata()[0],
                softmax_scale=0.02, causal=True, is_fp8_kvcache=said, descale_q=given[0], descale_k=given[1])
            numbers = xp.float32(q) if q is wide else E4M3[narrow] * (q_factor or 1)
            for request, length in enumerate(lengths):
                tokens = (E4M3[raw[table[request]]] * (factor or 1)).reshape(1, -1, WIDTH)[:, :length]
                o, sums = attended(numbers[request], tokens, True, 0.02)
                self.assert_close(out[request], o, 0.02 * (factor or 1) / 0.03)
                # Sums of queries in FP8 are cut to 13 bits on a GPU, docs/checking.md.
                reach = 0.02 * (numpy.abs(numbers[request]).reshape(-1, WIDTH) @ numpy.abs(tokens[0]).T).max()
                self.assert_close(lse[request], sums.T, 2e-3 if q is wide else max(2e-3, 2 ** -12 * reach))

    def test_a_batch_changes_no_bit_where_it_may_not(self):
        for lengths in [150], [150, 20, 0]:
            self.decode(lengths, queries=2, heads=3, enable_batch_invariant=True)
        xp, random = self.xp, numpy.random.default_rng(4)
        tokens, lists = xp.bfloat16(random.standard_normal((2 * PAGE, 1, WIDTH))), random.integers(-1, 130, (5, 1, 70))
        q = xp.bfloat16(random.standard_normal((5, 1, 2, WIDTH)) / 4)
        made = []
        with mock.patch.object(hypermla.MlaDecode, "__init__", autospec=True,
                               side_effect=hypermla.MlaDecode.__init__) as make:
            for count in 5, 2:
                made.append(flash_mla.flash_mla_with_kvcache(
                    q[:count], tokens.reshape(2, PAGE, 1, WIDTH), None, None, LATENT, flash_mla.get_mla_metadata()[0],
                    indices=xp.int32(lists[:count]), enable_batch_invariant=True)[0])
        self.assertLessEqual(make.call_count, 1)  # one of any number of requests
        with mock.patch.object(hypermla.MlaDecode, "__init__", autospec=True,
                               side_effect=hypermla.MlaDecode.__init__) as make:
            for invariant in True, False:
                flash_mla.flash_mla_with_kvcache(
                    q, tokens.reshape(2, PAGE, 1, WIDTH), None, None, LATENT, flash_mla.get_mla_metadata()[0],
                    softmax_scale=0.0371, indices=xp.int32(lists), enable_batch_invariant=invariant)
        first, second = (call.kwargs for call in make.call_args_list)
        self.assertEqual((first["split"], first["max_requests"]), (512, hypermla.MlaDecode.MAX_REQUESTS))
        self.assertEqual((second.get("split", 0), second["max_requests"]), (0, 8))
        self.assertTrue(numpy.array_equal(xp.float32(made[0])[:2], xp.float32(made[1])))

    def test_what_a_newer_flash_mla_has(self):
        self.assertTrue(flash_mla.has_legacy())
        metadata, splits = flash_mla.get_mla_decoding_metadata(self.xp.int32([50]), 2, 1, 2, use_legacy=True)
        self.assertIsInstance(metadata, flash_mla.FlashMLASchedMeta)
        self.assertIsNone(splits)
        self.decode([50], queries=1, heads=2, use_legacy=True)
        xp, random = self.xp, numpy.random.default_rng(4)
        q, kv = xp.bfloat16(random.standard_normal((3, 2, WIDTH))), xp.bfloat16(random.standard_normal((9, 1, WIDTH)))
        lists = xp.int32(random.integers(0, 9, (3, 1, 5)))
        sums = lambda of: flash_mla.flash_mla_sparse_fwd(q, kv, lists, 0.06, return_log2_lse=of, use_legacy=True)[2]
        natural, base2, none = map(sums, (None, True, False))
        numpy.testing.assert_allclose(xp.float32(natural), xp.float32(base2) * math.log(2), rtol=1e-5)
        self.assertIsNone(none)

    def chosen(self, tokens, lists, lengths):
        """What each query of lists [queries, top-k] sees of tokens [tokens, 576]: those that there are."""
        return [tokens[[slot for slot in row[:length] if 0 <= slot < len(tokens)]]
                for row, length in zip(lists, lengths)]

    def lists(self, random, slots, *shape):
        """Some of their entries are none."""
        lists = random.integers(8, slots, shape).astype(numpy.int32)
        return numpy.where(random.random(shape) < 0.15, random.choice([-1, -77, slots, 2147480000], shape), lists)

    def packed(self, random, pages, page):
        """A cache [pages, page, 1, 656] in FP8 and its tokens. Between its pages there is room."""
        codes = random.integers(0, 127, (pages * page, 512)) | random.choice([0, 128], (pages * page, 512))
        factors = (random.random((pages * page, 4)) / 100 + 0.002).astype(numpy.float32)
        rope = random.standard_normal((pages * page, 64)).astype(numpy.float32).view(numpy.uint32) >> 16 << 16
        magnitudes = numpy.arange(128)
        magnitudes = numpy.where(magnitudes < 8, magnitudes / 512, (8 + magnitudes % 8) * 2.0 ** (magnitudes // 8 - 10))
        latent = numpy.where(codes > 127, -1, 1) * magnitudes[codes & 127] * factors.repeat(128, 1)
        bytes_of = lambda array: numpy.ascontiguousarray(array).view(numpy.uint8)
        cache = numpy.full((pages, page + 1, 1, 656), 0x7f, numpy.uint8)  # NaN
        cache[:, :page] = numpy.concatenate([codes.astype(numpy.uint8), bytes_of(factors), bytes_of(
            (rope >> 16).astype(numpy.uint16))], 1).reshape(pages, page, 1, 656)
        return cache, numpy.concatenate([latent, rope.view(numpy.float32)], 1)

    def check_sparse(self, out, lse, q, seen, scale, sinks):
        """NumPy's out [queries, heads, 512], lse [queries, heads] and q."""
        for query, tokens in enumerate(seen):
            o, sums = attended(q[query][None], tokens[None], False, scale)
            o = o if sinks is None else o / (1 + numpy.exp(sinks - sums))[..., None]
            numpy.testing.assert_allclose(out[query], o[0], rtol=0, atol=0.02)
            numpy.testing.assert_allclose(lse[query], sums[0], rtol=0, atol=2e-3)

    def test_sparse_decoding(self):
        xp = self.xp
        for batch, queries, heads, fp8, with_lengths, with_sinks in ((3, 1, 2, True, True, True),
                                                                     (2, 3, 5, True, False, False),
                                                                     (2, 2, 2, False, True, True)):
            with self.subTest(queries=queries, fp8=fp8):
                random = numpy.random.default_rng(batch)
                cache, tokens = self.packed(random, 3, PAGE)
                if not fp8:
                    tokens = random.standard_normal((2 * PAGE, WIDTH)).astype(numpy.float32)
                    tokens[:8] = numpy.nan
                width = 40 if with_lengths else 64
                lists = self.lists(random, len(tokens), batch, queries, width)
                lists[0, 0] = -1  # a query without tokens
                lengths = random.integers(1, width + 1, batch) if with_lengths else numpy.full(batch, width)
                q = xp.bfloat16(random.standard_normal((batch, queries, heads, WIDTH)) / 4)
                sinks = random.standard_normal(heads) if with_sinks else None
                metadata = flash_mla.get_mla_metadata()[0]
                given = xp.fp8(cache)[:, :PAGE] if fp8 else xp.bfloat16(tokens.reshape(2, PAGE, 1, WIDTH))
                call = lambda q=q: flash_mla.flash_mla_with_kvcache(
                    q, given, None, None, LATENT, metadata, softmax_scale=0.07, is_fp8_kvcache=fp8,
                    indices=xp.int32(lists), attn_sink=None if sinks is None else xp.same_float32(sinks),
                    topk_length=xp.int32(lengths) if with_lengths else None)
                (out, lse), (again, _) = (map(xp.float32, call()) for _ in range(2))
                self.assertEqual(lse.shape, (batch, heads, queries))
                self.assertTrue(numpy.array_equal(out, again))
                self.assertTrue(numpy.array_equal(out, xp.float32(call((q[..., :LATENT], q[..., LATENT:]))[0])))
                if with_lengths:  # of any strides
                    apart = xp.int32(numpy.stack([lengths, lengths], 1))[:, 0]
                    strided, _ = flash_mla.flash_mla_with_kvcache(
                        q, given, None, None, LATENT, flash_mla.get_mla_metadata()[0], softmax_scale=0.07,
                        is_fp8_kvcache=fp8, indices=xp.int32(lists), topk_length=apart,
                        attn_sink=None if sinks is None else xp.same_float32(sinks))
                    self.assertTrue(numpy.array_equal(out, xp.float32(strided)))
                for request in range(batch):
                    seen = self.chosen(tokens if fp8 else xp.float32(xp.bfloat16(tokens)), lists[request],
                                       [lengths[request]] * queries)
                    self.check_sparse(out[request], lse[request].T, xp.float32(q)[request], seen, 0.07, sinks)

    def test_slots_beyond_pages_that_lie_apart_are_no_tokens(self):
        xp = self.xp
        layers = numpy.random.default_rng(1).standard_normal((4, 4, PAGE, 1, WIDTH))  # 4: slots wrap to tokens
        q = xp.bfloat16(numpy.ones((1, 1, 2, WIDTH)) / 16)
        call = lambda cache, slots: xp.float32(flash_mla.flash_mla_with_kvcache(
            q, cache, None, None, LATENT, flash_mla.get_mla_metadata()[0], indices=xp.int32(numpy.array([[slots]])))[1])
        apart, beyond = xp.bfloat16(layers)[:, 1], [1 << 30, (1 << 30) + PAGE, (1 << 31) - 1, -(1 << 31), 4 * PAGE]
        self.assertTrue((call(apart, [5, 6, *beyond]) == call(apart, [5, 6, *[-1] * 5])).all())
        # As of pages without gaps, the first slot and the last too.
        ends = [0, 4 * PAGE - 1]
        self.assertTrue((call(apart, ends) == call(xp.bfloat16(layers[:, 1]), ends)).all())
        flat = xp.bfloat16(numpy.zeros(4 * (PAGE * WIDTH + 8)))
        with self.assertRaisesRegex(hypermla.Error, r"^pages that are 36872 elements apart are not supported: make it "
                                                    r"a multiple of the 576 from a token to the next$"):
            call(flat.reshape(4, -1)[:, :PAGE * WIDTH].reshape(4, PAGE, 1, WIDTH), [5, 6])

    def test_lists_take_pages_of_any_size(self):
        xp, random = self.xp, numpy.random.default_rng(2)
        tokens, slots = xp.bfloat16(random.standard_normal((122, 1, 1, WIDTH)) / 4), xp.int32([[[5, 121, 61, -1, 122]]])
        q, out = xp.bfloat16(random.standard_normal((1, 1, 2, WIDTH)) / 4), xp.bfloat16(numpy.zeros((1, 1, 2, LATENT)))
        call = lambda cache, **options: flash_mla.flash_mla_with_kvcache(
            q, cache, None, None, LATENT, flash_mla.get_mla_metadata()[0], indices=slots, **options)[0]
        expected = xp.float32(call(tokens))
        for page in (2, 61, 122):
            self.assertTrue(numpy.array_equal(xp.float32(call(tokens.reshape(-1, page, 1, WIDTH))), expected), page)
        self.assertIs(call(tokens, out=out), out)
        self.assertTrue(numpy.array_equal(xp.float32(out), expected))
        with self.assertRaisesRegex(hypermla.Error, r"^out must be \[1, 1, 2, 512\], not \[1, 2, 512\]$"):
            call(tokens, out=out[0])

    def test_outputs_with_gaps_are_written(self):
        xp, random, (cache, table) = self.xp, numpy.random.default_rng(4), self.cache([50, 20], 1, "bfloat16")
        q = xp.bfloat16(random.standard_normal((2, 3, 2, WIDTH)) / 4)
        slots = xp.int32(table[0][0] * PAGE + random.integers(0, 50, (2, 3, 5)))
        for given in ((xp.int32(table), xp.int32([50, 20])), (None, None)):
            lists = {} if given[0] is not None else {"indices": slots}
            call = lambda **options: flash_mla.flash_mla_with_kvcache(
                q, cache, *given, LATENT, flash_mla.get_mla_metadata()[0], **lists, **options)[0]
            out = xp.bfloat16(numpy.zeros((2, 4, 2, LATENT)))
            expected = xp.float32(call())
            self.assertTrue(numpy.array_equal(xp.float32(call(out=out[:, :3])), expected))
            self.assertTrue((xp.float32(out)[:, 3] == 0).all())

    def test_pages_of_one_token_have_no_stride_within(self):
        xp = self.xp
        kv = numpy.random.default_rng(1).standard_normal((8, 1, 1, WIDTH))
        q, slots = xp.bfloat16(numpy.ones((1, 1, 2, WIDTH)) / 16), xp.int32([[[5, 6, 9]]])
        call = lambda cache: flash_mla.flash_mla_with_kvcache(
            q, cache, None, None, LATENT, flash_mla.get_mla_metadata()[0], indices=slots)[1]
        one = xp.bfloat16(kv)
        expected = xp.float32(call(one))
        for cache in (one.reshape(1, 8, 1, WIDTH).swapaxes(0, 1), one.reshape(8, WIDTH)[:, None, None]):
            self.assertTrue(numpy.array_equal(xp.float32(call(cache)), expected))
        self.assertTrue(numpy.isinf(xp.float32(call(xp.bfloat16(numpy.zeros((0, PAGE, 1, WIDTH)))))).all())

    def test_a_call_without_metadata_leaves_no_plan(self):
        xp, random = self.xp, numpy.random.default_rng(4)
        q, kv = (xp.bfloat16(random.standard_normal(shape) / 4) for shape in ((3, 2, WIDTH), (90, 1, WIDTH)))
        lists, metadata = random.integers(0, 90, (3, 1, 20)), flash_mla.get_mla_metadata()[0]
        call = lambda lengths, metadata: xp.float32(flash_mla.flash_mla_sparse_fwd(
            q, kv, xp.int32(lists), 0.061, topk_length=xp.int32(lengths), tile_scheduler_metadata=metadata)[2])
        first = call([20, 3, 7], metadata)
        self.assertFalse(numpy.array_equal(call([1, 1, 1], None), first))
        self.assertTrue(numpy.array_equal(call([20, 3, 7], metadata), first))

    def test_lists_of_a_power_of_two_have_lengths(self):
        xp, random, lengths = self.xp, numpy.random.default_rng(4), [3, 16, 0]
        tokens, lists = xp.bfloat16(random.standard_normal((90, 1, WIDTH))), self.lists(random, 90, 3, 16)
        q = xp.bfloat16(random.standard_normal((3, 2, WIDTH)) / 4)
        out, _, lse = flash_mla.flash_mla_sparse_fwd(q, tokens, xp.int32(lists[:, None]), 0.06,
                                                     topk_length=xp.int32(lengths))
        seen = self.chosen(xp.float32(tokens)[:, 0], lists, lengths)
        self.check_sparse(xp.float32(out), xp.float32(lse), xp.float32(q), seen, 0.06, None)

    def test_what_is_left_out_of_sparse_decoding(self):
        xp, random = self.xp, numpy.random.default_rng(4)
        tokens, lists = xp.bfloat16(random.standard_normal((2, PAGE, 1, WIDTH))), random.integers(0, 99, (1, 1, 9))
        q = xp.bfloat16(random.standard_normal((1, 1, 2, WIDTH)) / 4)
        out, lse = flash_mla.flash_mla_with_kvcache(q, tokens, None, None, LATENT, flash_mla.get_mla_metadata()[0],
                                                    indices=xp.int32(lists), kv_format="V32")
        seen = self.chosen(xp.float32(tokens).reshape(-1, WIDTH), lists[0], [9])
        self.check_sparse(xp.float32(out)[0], xp.float32(lse)[0].T, xp.float32(q)[0], seen, WIDTH ** -0.5, None)

    def test_calls_that_differ_share_no_plan(self):
        xp, (cache, table) = self.xp, self.cache([50], 1, "bfloat16")
        q = xp.bfloat16(numpy.random.default_rng(1).standard_normal((1, 2, 2, WIDTH)) / 4)
        lse = {causal: xp.float32(flash_mla.flash_mla_with_kvcache(
            q, cache, xp.int32(table), xp.int32([50]), LATENT, flash_mla.get_mla_metadata()[0], softmax_scale=0.0421,
            causal=causal)[1])[0] for causal in (False, True)}
        self.assertTrue((lse[False][:, 0] > lse[True][:, 0]).all())
        self.assertTrue((lse[False][:, 1] == lse[True][:, 1]).all())

    def test_metadata_of_a_call_that_failed_takes_another_shape(self):
        xp, (cache, table) = self.xp, self.cache([50, 20], 1, "bfloat16")
        q, metadata = xp.bfloat16(numpy.zeros((2, 1, 2, WIDTH))), flash_mla.get_mla_metadata()[0]
        call = lambda count, lengths: flash_mla.flash_mla_with_kvcache(
            q[:count], cache, xp.int32(table[:count]), lengths, LATENT, metadata)
        with self.assertRaisesRegex(hypermla.Error, "cache_seqlens must be int32"):
            call(2, xp.int64([50, 20]))
        call(1, xp.int32([50]))
        with self.assertRaisesRegex(hypermla.Error, "call get_mla_metadata.. again"):
            call(2, xp.int32([50, 20]))

    def test_few_objects_are_kept(self):
        xp, (cache, table) = self.xp, self.cache([5], 1, "bfloat16")
        q = xp.bfloat16(numpy.zeros((1, 1, 1, WIDTH)))
        for i in range(flash_mla._KEPT + 3):
            flash_mla.flash_mla_with_kvcache(q, cache, xp.int32(table), xp.int32([5]), LATENT,
                                             flash_mla.get_mla_metadata()[0], softmax_scale=1 + i / 64)
        self.assertEqual(len(flash_mla._eager), flash_mla._KEPT)
        scales = [dict(options)["scale"] for (_, *options), *_ in flash_mla._eager]
        self.assertIn(1 + (flash_mla._KEPT + 2) / 64, scales)
        self.assertNotIn(1.0, scales)

    def test_nothing_to_attend_to(self):
        xp = self.xp
        zeros = lambda *shape: xp.bfloat16(numpy.zeros(shape))
        none = numpy.zeros((0, 1), int)
        for q, table, lengths in ((zeros(0, 1, 2, WIDTH), none, none[:, 0]),
                                  (zeros(1, 1, 2, WIDTH), numpy.zeros((1, 0), int), [0])):
            out, lse = flash_mla.flash_mla_with_kvcache(q, zeros(1, PAGE, 1, WIDTH), xp.int32(table), xp.int32(lengths),
                                                        LATENT, flash_mla.get_mla_metadata()[0])
            self.assertEqual(tuple(lse.shape), (len(q), 2, 1))
            self.assertTrue(numpy.isinf(xp.float32(lse)).all() and not xp.float32(out).any())
        for tokens, width in ((0, 3), (5, 0)):
            out, _, lse = flash_mla.flash_mla_sparse_fwd(zeros(1, 2, WIDTH), zeros(tokens, 1, WIDTH),
                                                         xp.int32(numpy.zeros((1, 1, width), int)), 0.06)
            self.assertTrue(numpy.isinf(xp.float32(lse)).all() and not xp.float32(out).any())

    def test_sparse_prefill(self):
        xp, random = self.xp, numpy.random.default_rng(4)
        for queries, heads, width, with_lengths in ((7, 3, 20, True), (5, 2, 20, False),
                                                    (2050, 1, 20, True), (2050, 1, 16, False)):  # in two parts
            with self.subTest(queries=queries, width=width):
                tokens = random.standard_normal((90, WIDTH)).astype(numpy.float32)
                lists = self.lists(random, 90, queries, width)
                lengths = random.integers(0, width + 1, queries) if with_lengths else numpy.full(queries, width)
                q, kv = xp.bfloat16(random.standard_normal((queries, heads, WIDTH)) / 4), xp.bfloat16(tokens[:, None])
                sinks = random.standard_normal(heads) if with_lengths else None
                out, none, lse = flash_mla.flash_mla_sparse_fwd(
                    q, kv, xp.int32(lists[:, None]), 0.06, LATENT, None if sinks is None else xp.same_float32(sinks),
                    xp.int32(lengths) if with_lengths else None)
                self.assertIsNone(none)
                room = xp.bfloat16(numpy.zeros((queries, heads + 1, LATENT)))[:, :heads]
                again, *_ = flash_mla.flash_mla_sparse_fwd(
                    q, kv, xp.int32(lists[:, None]), 0.06, LATENT, None if sinks is None else xp.same_float32(sinks),
                    xp.int32(lengths) if with_lengths else None, room)
                self.assertIs(again, room)
                metadata, _ = flash_mla.get_mla_metadata()
                with mock.patch.object(hypermla.MlaDecode, "plan", autospec=True,
                                       side_effect=hypermla.MlaDecode.plan) as plan:
                    for own in q, (q[..., :LATENT], q[..., LATENT:]):  # of layers
                        shared, *_ = flash_mla.flash_mla_sparse_fwd(
                            own, kv, xp.int32(lists[:, None]), 0.06, LATENT,
                            None if sinks is None else xp.same_float32(sinks),
                            xp.int32(lengths) if with_lengths else None, tile_scheduler_metadata=metadata)
                self.assertEqual(plan.call_count, 1 if queries <= hypermla.MlaDecode.MAX_REQUESTS else 4)
                self.assertTrue(numpy.array_equal(xp.float32(shared), xp.float32(out)))
                self.assertTrue(numpy.array_equal(xp.float32(room), xp.float32(out)))
                some = numpy.arange(0, queries, 1 if queries < 100 else 149)
                some = numpy.unique([*some, queries - 1])
                seen = self.chosen(xp.float32(kv)[:, 0], lists[some], lengths[some])
                self.check_sparse(xp.float32(out)[some], xp.float32(lse)[some], xp.float32(q)[some], seen, 0.06, sinks)
        with self.assertRaisesRegex(hypermla.Error, "indices must be .2050, 1, top-k., not .2050, 16."):
            flash_mla.flash_mla_sparse_fwd(q, kv, xp.int32(lists), 0.06)
        with self.assertRaisesRegex(hypermla.Error, "the metadata must be what get_mla_metadata"):
            flash_mla.flash_mla_sparse_fwd(q, kv, xp.int32(lists[:, None]), 0.06, tile_scheduler_metadata=q)
        with self.assertRaisesRegex(hypermla.Error, "d_v 512, not .* and 256"):
            flash_mla.flash_mla_sparse_fwd(q, kv, xp.int32(lists[:, None]), 0.06, 256)
        for pair in (q, q[..., LATENT:]), (q[..., :LATENT], q[:1, :, LATENT:]), (q[..., :LATENT],):
            with self.assertRaisesRegex(hypermla.Error, "q must be .queries, heads, 576., .* not "):
                flash_mla.flash_mla_sparse_fwd(pair, kv, xp.int32(lists[:, None]), 0.06)

    def test_kernels_of_lists_are_loaded_ahead(self):
        with mock.patch.object(flash_mla, "MlaDecode", wraps=hypermla.MlaDecode) as make:
            make.MAX_REQUESTS, make.MAX_TOKENS = hypermla.MlaDecode.MAX_REQUESTS, hypermla.MlaDecode.MAX_TOKENS
            flash_mla.load_sparse_kernels(self.xp.device, 16, 2048)
        self.assertEqual([call.kwargs["max_requests"] for call in make.call_args_list], [1 << i for i in range(12)])
        self.assertEqual({(call.kwargs["max_tokens"], call.kwargs["heads"], call.kwargs["device"])
                          for call in make.call_args_list}, {(2048, 16, self.xp.device)})
        kernels = flash_mla.load_sparse_kernels(self.xp.device, 16, 2048, fp8=True)
        self.assertTrue(all("cute.mla.flash_mla" in name or "plain reference" in name for name in kernels))
        with self.assertRaisesRegex(hypermla.Error, "heads=0 is not supported"):
            flash_mla.load_sparse_kernels(self.xp.device, 0, 2048)

    def test_sinks_of_dense_decoding(self):
        xp, (cache, table) = self.xp, self.cache([70, 3], 2, "bfloat16")
        q = xp.bfloat16(numpy.random.default_rng(1).standard_normal((2, 1, 4, WIDTH)) / 4)
        call = lambda sinks: flash_mla.flash_mla_with_kvcache(
            q, cache, xp.int32(table), xp.int32([70, 3]), LATENT, flash_mla.get_mla_metadata()[0], attn_sink=sinks)
        sinks = numpy.array([1.0, -3.0, 4.0, -numpy.inf])
        (plain, lse), (out, same) = call(None), call(xp.same_float32(sinks))
        share = 1 / (1 + numpy.exp(sinks[None, :, None] - xp.float32(lse)))
        self.assert_close(out, xp.float32(plain) * share.swapaxes(1, 2)[..., None], 0.02)
        self.assertTrue(numpy.array_equal(xp.float32(lse), xp.float32(same)))

    def attend(self, wrapper, lengths, starts, page, heads=2, causal=True, dtype="bfloat16", natural=False, form=None):
        """form: of FlashInfer 0.7's, the function of MLAPlanMetadata that makes the step."""
        xp = self.xp
        cache, table = self.cache(lengths, 1, dtype, page)
        cache = cache[:, :, 0]
        counts = [-(-length // page) for length in lengths]
        pages = [0, *numpy.cumsum(counts).tolist()]
        indices = numpy.concatenate([row[:count] for row, count in zip(table, counts)])
        q = getattr(xp, dtype)(numpy.random.default_rng(9).standard_normal((starts[-1], heads, WIDTH)) / 4)
        starts_given, lengths_given = xp.int32(starts), xp.int32(lengths)
        lists = starts_given, xp.int32(pages), xp.int32(indices), lengths_given
        if form is None:
            wrapper.plan(*lists, heads, 512, 64, page, causal, 0.07, xp.dtype(dtype), xp.dtype(dtype))
            given = q[..., :LATENT], q[..., LATENT:], cache[..., :LATENT], cache[..., LATENT:]
            out, lse = wrapper.run(*given, return_lse=True, return_lse_base_on_e=natural)
        else:
            dense = {"cum_seq_lens_q": starts_given, "block_tables": xp.int32(table), "seq_lens": lengths_given}
            metadata = {"csr": lambda of: of.csr(*lists), "dense": lambda of: of.dense(**dense),
                        "dual": lambda of: of.dual(*lists, **dense)}[form](flashinfer.MLAPlanMetadata)
            wrapper.plan(metadata=metadata, num_heads=heads, head_dim_ckv=512, head_dim_kpe=64, page_size=page,
                         causal=causal, sm_scale=0.07, q_data_type=xp.dtype(dtype), kv_data_type=xp.dtype(dtype),
                         lse_mode="basee" if natural else "base2", output_dtype=xp.dtype(dtype), enable_pdl=True)
            pair = cache[..., :LATENT], cache[..., LATENT:]
            kv_cache = {"csr": cache, "dense": pair, "dual": (pair, cache)}[form]
            out, lse = wrapper.run(query=(q, (q[..., :LATENT], q[..., LATENT:])) if form == "dual" else q,
                                   kv_cache=kv_cache, return_lse=True, return_lse_base_on_e=natural)
        for request, length in enumerate(lengths):
            own = slice(starts[request], starts[request + 1])
            tokens = self.tokens_of(cache[:, :, None], table[request], length)
            o, sums = attended(xp.float32(q)[own], tokens, causal, 0.07)
            sums = numpy.where(numpy.isinf(sums), -numpy.inf, sums if natural else sums / math.log(2))
            self.assert_close(out[own], o, 0.02)
            self.assert_close(lse[own], sums, 2e-3)

    def wrapper(self, **options):
        return flashinfer.BatchMLAPagedAttentionWrapper(self.xp.int32([0] * 16), **options)

    def test_flashinfer_with_pages_of_any_size(self):
        wrapper = self.wrapper(backend="fa3")
        for page in (1, 2, 16, 48, 64, 256):
            with self.subTest(page):
                self.attend(wrapper, [130, 9, 64], [0, 1, 4, 5], page)
        for before, page in ((16, 48), (1, 24)):  # the table of the first has no room for the second
            wrapper = self.wrapper()
            self.attend(wrapper, [64], [0, 1], before)
            self.attend(wrapper, [64], [0, 1], page)
        wrapper = self.wrapper(use_cuda_graph=True, max_tokens=100)
        self.attend(wrapper, [100], [0, 1], 1)
        with self.assertRaisesRegex(hypermla.Error, "page_size=8: the first plan.. was for .*page_size=1"):
            self.attend(wrapper, [100], [0, 1], 8)

    def test_flashinfer_with_metadata(self):
        wrapper = self.wrapper()
        for form in ("csr", "dense", "dual"):
            for page in (1, 48, 64):
                with self.subTest(form=form, page=page):
                    self.attend(wrapper, [130, 9, 64], [0, 1, 4, 5], page, form=form, natural=page == 48)
        wrapper = self.wrapper(use_cuda_graph=True)  # the table says how long requests may be
        self.attend(wrapper, [80, 70], [0, 2, 3], 16, form="dense")
        self.attend(wrapper, [1, 80], [0, 1, 3], 16, form="csr")
        with self.assertRaisesRegex(hypermla.Error, "a captured run.. cannot be planned for requests=2, tokens=97"):
            self.attend(wrapper, [97, 1], [0, 1, 3], 16, form="dense")

    def test_flashinfer_with_other_arguments(self):
        wrapper = self.wrapper()
        self.attend(wrapper, [30, 20], [0, 2, 2], 16, heads=3, causal=False, dtype="float16", natural=True)
        self.attend(wrapper, [0, 3], [0, 1, 5], 1, causal=True)  # queries before the first token
        self.attend(wrapper, [0], [0, 2], 8, causal=False)
        self.attend(wrapper, [700, 3, 9], [0, 3, 4, 5], 64)
        self.attend(wrapper, [5000, 3], [0, 1, 2], 64)
        self.attend(wrapper, [32], [0, 1], 16, form="dense")  # whose table has room for more than the capacity

    def test_flashinfer_writes_what_it_is_given(self):
        xp, wrapper = self.xp, self.wrapper()
        wrapper.plan(xp.int32([0, 1]), xp.int32([0, 1]), xp.int32([0]), xp.int32([1]), 2, 512, 64, 16, True, 0.1,
                     xp.dtype("float16"), xp.dtype("float16"))
        zeros = lambda *shape: xp.float16(numpy.zeros(shape, numpy.float32))
        out, cache = xp.float16(numpy.ones((1, 2, LATENT))), (zeros(1, 16, 512), zeros(1, 16, 64))
        self.assertIs(wrapper.run(zeros(1, 2, 512), zeros(1, 2, 64), *cache, out=out), out)
        self.assert_close(out, numpy.zeros((1, 2, LATENT)), 0)
        wrapper.plan(xp.int32([0, 1]), xp.int32([0, 1]), xp.int32([0]), xp.int32([2]), 2, 512, 64, 16, True, 0.1,
                     xp.dtype("float16"), xp.dtype("float16"))
        lse = xp.same_float32(numpy.zeros((1, 2)))
        self.assertIs(wrapper.run(zeros(1, 2, 512), zeros(1, 2, 64), *cache, lse=lse, return_lse=True)[1], lse)
        self.assert_close(lse, numpy.ones((1, 2)), 1e-6)  # of 2 tokens in base 2

    def test_a_step_of_flashinfer_by_its_fields(self):
        xp = self.xp
        said = {"num_heads": 2, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 16, "causal": True,
                "sm_scale": 0.1, "q_data_type": xp.dtype("float16"), "kv_data_type": xp.dtype("float16"),
                "query_layout": "any", "kv_cache_layout": "any"}
        table, step = xp.int32([[0, 1]]), lambda queries, **more: {
            "cum_seq_lens_q": xp.int32([0, queries]), "block_tables": table, "seq_lens": xp.int32([20]), **more}
        wrapper, graph = self.wrapper(), self.wrapper(use_cuda_graph=True)
        wrapper.plan(**said, **step(1))
        zeros = lambda *shape: xp.float16(numpy.zeros(shape, numpy.float32))
        lse = wrapper.run(query=zeros(1, 2, WIDTH), kv_cache=zeros(2, 16, WIDTH), return_lse=True)[1]
        self.assert_close(lse, numpy.full((1, 2), math.log2(20)), 1e-5)
        graph.plan(**said, **step(1, max_q_len=4))
        graph.plan(**said, **step(4, max_q_len=4))
        with self.assertRaisesRegex(hypermla.Error, "a captured run.. cannot be planned for .*queries=5"):
            graph.plan(**said, **step(5))

    def test_what_flashinfer_refuses(self):
        xp, wrapper = self.xp, self.wrapper()
        given = {"qo_indptr": xp.int32([0, 1]), "kv_indptr": xp.int32([0, 1]), "kv_indices": xp.int32([0]),
                 "kv_len_arr": xp.int32([5]), "num_heads": 2, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 8,
                 "causal": True, "sm_scale": 0.1, "q_data_type": "bfloat16", "kv_data_type": "bfloat16"}
        for change, said in (({"head_dim_kpe": 0}, "head_dim_kpe=0 are not supported"),
                             ({"kv_data_type": "float8_e4m3fn"}, "cache of float8_e4m3fn"),
                             ({"kv_len_arr": xp.int32([9])}, "request 0 has 9 tokens, but 1 pages of 8"),
                             ({"kv_indptr": xp.int32([0, 2])}, "as many kv_indices"),
                             ({"kv_indptr": xp.int32([0, 1, 1])}, "kv_indptr of 2"),
                             ({"qo_indptr": xp.int32([0, 1, 2]), "kv_indptr": xp.int32([0, 1, 2]),
                               "kv_indices": xp.int32([0, 0]), "kv_len_arr": xp.int32([5, 9])},
                              "request 1 has 9 tokens, but 1 pages of 8"),
                             ({"sm_scale": 0}, "sm_scale=0 is not supported"),
                             ({"causal": "no"}, "causal cannot be 'no'; give it True or False"),
                             ({"use_profiler": True}, "use_profiler"), ({"page_size": 0}, "page_size=0"),
                             ({"kv_len_arr": xp.int32([5, 5])}, "2 lengths need qo_indptr of 3, not 2"),
                             ({"kv_indices": None}, "a step needs qo_indptr, .*; kv_indices is missing"),
                             ({"sm_scale": None, "causal": None}, "plan.. needs causal, sm_scale, too"),
                             ({"use_sinks": True}, "use_sinks=True is not supported"),
                             ({"output_dtype": "float16"}, "outputs of float16 are not supported"),
                             ({"page_sizes": 1}, "plan.. has no argument page_sizes"),
                             ({"metadata": flashinfer.MLAPlanMetadata()}, "the step is given twice"),
                             ({"kv_len_arr": xp.int64([5])}, "kv_len_arr must be int32, not .*int64"),
                             ({"kv_indptr": xp.int64([0, 1])}, "kv_indptr must be int32, not .*int64"),
                             ({"kv_indices": xp.float16(numpy.float32([7.6]))}, "kv_indices must be int32"),
                             ({"kv_indices": xp.int32([[0]])}, "kv_indices must have one dimension, not .*1, 1"),
                             ({"kv_indices": self.of_the_other_library([0])}, "kv_indices is of type .* one library"),
                             ({"kv_len_arr": xp.int32([-1])}, "request 0 has -1 tokens; give 0 or more"),
                             ({"qo_indptr": xp.int32([1, 2])}, "qo_indptr begins with 1; it must begin with 0"),
                             ({"qo_indptr": xp.int32([0, -1])}, "qo_indptr falls from 0 to -1 at request 0"),
                             ({"kv_indptr": xp.int32([-1, 1]), "kv_indices": xp.int32([7, 5])},
                              "kv_indptr begins with -1; it must not be negative"),
                             ({"qo_indptr": xp.int32([0, 1, 2]), "kv_indptr": xp.int32([0, 1, 0]),
                               "kv_len_arr": xp.int32([5, 0])}, "kv_indptr falls from 1 to 0 at request 1"),
                             ({"qo_indptr": xp.int32([0, 1025])}, "1025 queries of a request are not supported"),
                             ({"block_tables": xp.int32([[0]])}, "cum_seq_lens_q, seq_lens are missing")):
            with self.assertRaisesRegex(hypermla.Error, said):
                wrapper.plan(**{**given, **change})
        step = lambda *table: flashinfer.MLAPlanMetadata.dense(xp.int32([0, 1]), xp.int32(table), xp.int32([5]))
        others = {name: value for name, value in given.items() if "indptr" not in name and not name.startswith("kv_i")
                  and name != "kv_len_arr"}
        for metadata, said in ((flashinfer.MLAPlanMetadata.dense(xp.int32([0, 1]), self.of_the_other_library([[0]]),
                                                                 xp.int32([5])), "block_tables is of type"),
                               (step([0], [0]), "1 lengths need block_tables of .1, pages., not .2, 1."),
                               (step([]), "request 0 has 5 tokens, but 0 pages of 8"),
                               (7, "metadata must be an MLAPlanMetadata, not int")):
            with self.assertRaisesRegex(hypermla.Error, said):
                wrapper.plan(metadata=metadata, **others)
        zeros = lambda *shape: xp.bfloat16(numpy.zeros(shape, numpy.float32))
        q, cache = (zeros(1, 2, 512), zeros(1, 2, 64)), (zeros(1, 8, 512), zeros(1, 8, 64))
        with self.assertRaisesRegex(hypermla.Error, "needs a plan"):
            wrapper.run(*q, *cache)
        wrapper.plan(**given)
        for wrong in ({"query": q}, {"query": (q[0],), "kv_cache": cache}, {"q_nope": q[0], "kv_cache": cache}):
            with self.assertRaisesRegex(hypermla.Error, "run.. needs (query|kv_cache): a tensor, or a pair of tensors"):
                wrapper.run(**wrong)
        with self.assertRaisesRegex(hypermla.Error, "query is given twice"):
            wrapper.run(*q, query=q, kv_cache=cache)
        with self.assertRaisesRegex(hypermla.Error, "ckv_scale is not supported"):
            wrapper.run(*q, *cache, ckv_scale=1.0)
        with self.assertRaisesRegex(hypermla.Error, "no room between pages"):
            wrapper.run(*q, zeros(1, 9, 512)[:, :8], zeros(1, 8, 64))

    def of_the_other_library(self, values):
        """int32, of NumPy where the others are PyTorch's; else what says that it is PyTorch's."""
        array = numpy.array(values, numpy.int32)
        return array if isinstance(self.xp, Torch) else mock.Mock(dtype="torch.int32", shape=array.shape)

    def test_a_plan_of_flashinfer_that_fails_leaves_none(self):
        xp, wrapper = self.xp, self.wrapper()
        step = xp.int32([0, 1]), xp.int32([0, 1]), xp.int32([0]), xp.int32([5])
        rest = 2, 512, 64, 16, True, 0.1, xp.dtype("float16"), xp.dtype("float16")
        zeros = lambda *shape: xp.float16(numpy.zeros(shape, numpy.float32))
        run = lambda: wrapper.run(query=zeros(1, 2, WIDTH), kv_cache=zeros(1, 16, WIDTH), return_lse=True)[1]
        for _ in range(2):  # the first plan, then one behind another
            with mock.patch.object(wrapper, "_here", side_effect=hypermla.Error("no room")):
                with self.assertRaisesRegex(hypermla.Error, "no room"):
                    wrapper.plan(*step, *rest)
            with self.assertRaisesRegex(hypermla.Error, "run.. needs a plan; call plan.. first"):
                run()
            wrapper.plan(*step, *rest)
            self.assert_close(run(), numpy.full((1, 2), math.log2(5)), 1e-5)

    def test_a_wrapper_for_graphs_keeps_its_capacity(self):
        with self.assertRaisesRegex(hypermla.Error, "make the wrapper with max_tokens"):
            self.attend(self.wrapper(use_cuda_graph=True), [30], [0, 1], 16)
        with self.assertRaisesRegex(hypermla.Error, "leaves room for 16 of each"):
            self.attend(self.wrapper(use_cuda_graph=True, max_tokens=16), [30], [0, 1], 16)
        wrapper = self.wrapper(use_cuda_graph=True, max_tokens=80)
        self.attend(wrapper, [3, 2], [0, 1, 2], 16, form="dense")
        self.attend(wrapper, [80, 2], [0, 1, 2], 16)
        wrapper = self.wrapper(use_cuda_graph=True, kv_indices=self.xp.int32([0] * 10))
        self.attend(wrapper, [30, 70], [0, 2, 3], 16)
        self.attend(wrapper, [80, 1], [0, 1, 3], 16)  # of the first one's decode object and table
        with self.assertRaisesRegex(hypermla.Error, "a captured run.. cannot be planned for requests=2, tokens=81"):
            self.attend(wrapper, [81, 1], [0, 1, 3], 16)


class WithNumpy(Cases, unittest.TestCase):
    xp = Numpy()


@unittest.skipUnless(torch, "PyTorch is not installed")
class WithTorch(Cases, unittest.TestCase):
    xp = Torch()


@unittest.skipUnless(torch and torch.cuda.is_available(), "there is no GPU")
class OnAGpu(Cases, unittest.TestCase):
    xp = Torch("cuda")

    def test_a_graph_makes_the_plan_anew(self):
        cache, table = self.cache([50, 20], 1, "bfloat16")
        q = self.xp.bfloat16(numpy.random.default_rng(1).standard_normal((2, 1, 2, WIDTH)))
        table, lengths = self.xp.int32(table), self.xp.int32([50, 20])
        call = lambda metadata: flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, LATENT, metadata)
        call(flash_mla.get_mla_metadata()[0])
        graph, metadata = torch.cuda.CUDAGraph(), flash_mla.get_mla_metadata()[0]
        with torch.cuda.graph(graph):
            captured = call(metadata)
        lengths.copy_(self.xp.int32([20, 3]))
        expected = call(flash_mla.get_mla_metadata()[0])
        lengths.copy_(self.xp.int32([50, 1]))
        other = call(flash_mla.get_mla_metadata()[0])[1]
        lengths.copy_(self.xp.int32([20, 3]))
        graph.replay()
        for one, of in zip(captured, expected):
            self.assertTrue(torch.equal(one, of))
        self.assertFalse(torch.equal(captured[1], other))


    def test_a_captured_run_follows_the_plan(self):
        integers, random = self.xp.int32, numpy.random.default_rng(2)
        q, cache = (self.xp.bfloat16(random.standard_normal(shape)) for shape in ((2, 2, WIDTH), (20, 16, WIDTH)))
        tensors = q[..., :LATENT], q[..., LATENT:], cache[..., :LATENT], cache[..., LATENT:]
        plan = lambda wrapper, lengths, pages, indices: wrapper.plan(
            integers([0, 1, 2]), integers(pages), integers(indices), integers(lengths), 2, 512, 64, 16, True, 0.05,
            torch.bfloat16, torch.bfloat16)
        captured = self.wrapper(use_cuda_graph=True, kv_indices=integers([0] * 20))
        plan(captured, [30, 70], [0, 2, 7], [3, 4, 9, 8, 7, 6, 5])
        captured.run(*tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = captured.run(*tensors, return_lse=True)
        for step in (([100, 5], [0, 7, 8], [1, 3, 5, 7, 9, 11, 13, 2]), ([1, 160], [0, 1, 11], [19, *range(10)])):
            plan(captured, *step)
            graph.replay()
            direct = self.wrapper()
            plan(direct, *step)
            for one, other in zip((out, lse), direct.run(*tensors, return_lse=True)):
                torch.testing.assert_close(one, other, atol=0.02, rtol=0)


class Imports(unittest.TestCase):
    def test_nothing_imports_torch(self):
        script = ("import sys, hypermla.compat.flash_mla, hypermla.compat.flashinfer\n"
                  "print('torch' in sys.modules, 'numpy' in sys.modules)")
        done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(BUILD / "python")},
                              text=True, capture_output=True, check=False, timeout=120)
        self.assertEqual((done.stdout, done.stderr), ("False False\n", ""))


if __name__ == "__main__":
    unittest.main()
