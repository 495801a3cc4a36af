"""MlaDecode with PyTorch's tensors and under torch.compile(). Skipped (77) where PyTorch is not installed."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import types
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cli"))
from support import BUILD, CHECKOUT

try:
    import torch
except ImportError:
    print("PyTorch is not installed")
    sys.exit(77)

sys.path.insert(0, str(BUILD / "python"))
import hypermla
from hypermla import _tensors

HEADS, PAGE = 2, 16


def new_decode(**options):
    return hypermla.MlaDecode(**{"heads": HEADS, "max_requests": 2, "max_queries": 2, "max_tokens": 40, "page": PAGE,
                                 "device": "cpu", **options})


def step():
    """Lengths, query starts, queries, cache and table of two requests."""
    torch.manual_seed(1)
    integers = lambda *values: torch.tensor(values, dtype=torch.int32)
    bfloat16 = lambda *shape: torch.randn(shape).bfloat16()
    return (integers(40, 17), integers(0, 2, 3), bfloat16(3, HEADS, 576), bfloat16(5, PAGE, 576),
            integers([3, 1, 4], [0, 2, -1]))


# Not in one piece: PyTorch quotes the line that it traces, which would match itself.
NOT_ADOPTED = " ".join(("import torch", "before it is made"))


class Older:
    """A tensor without DLPack's C functions, as those of PyTorch before 2.10."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __getattr__(self, name):
        return getattr(self.tensor, name)


class Tensors(unittest.TestCase):
    def setUp(self):
        self.lengths, self.starts, self.q, self.cache, self.table = step()
        self.decode = new_decode()
        self.decode.plan(self.lengths, self.starts)

    def same(self, *outputs):
        for one in outputs[1:]:
            self.assertTrue(torch.equal(one[0], outputs[0][0]) and torch.equal(one[1], outputs[0][1]))

    def test_it_attends(self):
        o, lse = self.decode.run(self.q, self.cache, self.table)
        self.assertEqual((o.dtype, lse.dtype), (torch.bfloat16, torch.float32))
        for request, length in enumerate((40, 17)):
            tokens = self.cache[self.table[request, :-(-length // PAGE)].long()].reshape(-1, 576)[:length].float()
            for row in range(self.starts[request], self.starts[request + 1]):
                seen = tokens[:length - int(self.starts[request + 1]) + row + 1]
                scores = self.q[row].float() @ seen.T / 192**0.5
                torch.testing.assert_close(lse[row], scores.logsumexp(-1), atol=1e-4, rtol=0)
                torch.testing.assert_close(o[row].float(), scores.softmax(-1) @ seen[:, :512], atol=0.03, rtol=0)

    def test_any_strides_give_the_same_bits(self):
        q, cache = self.q, self.cache
        heads_first = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
        wide = torch.zeros(3, HEADS, 640, dtype=torch.bfloat16)
        self.same(self.decode.run(q, cache, self.table),
                  self.decode.run((heads_first, q[..., 512:]), (cache[..., :512], cache[..., 512:]), self.table,
                                  out=wide[..., :512]),
                  self.decode.run(q, cache, torch.cat([self.table, self.table], 1)[:, :3]),
                  self.decode.run(Older(q), Older(cache), Older(self.table),
                                  torch.empty(3, HEADS, 512, dtype=torch.bfloat16), torch.empty(3, HEADS)),
                  self.decode.run(torch.nn.Parameter(q, requires_grad=False), cache, self.table))
        self.assertEqual(wide[..., 512:].abs().max(), 0)

    def test_outputs_of_older_pytorch_are_written(self):
        o, lse = torch.zeros(3, HEADS, 512, dtype=torch.bfloat16), torch.zeros(3, HEADS)
        self.decode.run(self.q, self.cache, self.table, Older(o), Older(lse))
        self.same((o, lse), self.decode.run(self.q, self.cache, self.table))

    def test_older_tensors_say_where_on_a_gpu_they_lie(self):
        tensor = types.SimpleNamespace(data_ptr=lambda: 4096, dtype=torch.float16, shape=(2, 3), stride=lambda: (3, 1),
                                       is_cuda=True, device=torch.device("cuda:1"))
        with mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, create=True):
            self.assertEqual(_tensors.described("q", tensor), (4096, 2, 16, (2, 3), (3, 1), 2, 1, 71, False))

    def test_the_current_device_is_pytorchs_where_it_uses_gpus(self):
        def names(initialized, *given):
            with mock.patch.object(torch.cuda, "is_initialized", lambda: initialized), \
                    mock.patch.object(torch.cuda, "current_device", lambda: 3):
                return [_tensors.device_name(one) for one in given]

        self.assertEqual(names(True, "auto", "cuda", torch.device("cuda"), "cuda:1", "cpu", torch.device("cpu")),
                         ["cuda:3", "cuda:3", "cuda:3", "cuda:1", "cpu", "cpu"])
        self.assertEqual(names(False, "auto", "cuda"), ["auto", "cuda"])
        with mock.patch.dict(sys.modules):
            del sys.modules["torch"]
            self.assertEqual(names(True, "auto"), ["auto"])

    def test_a_list_of_a_type_lies_where_the_others_do(self):
        self.assertTrue(_tensors.is_list_of("int32", self.lengths, self.lengths))
        self.assertFalse(_tensors.is_list_of("int32", self.lengths.long(), self.lengths))
        self.assertFalse(_tensors.is_list_of("int32", self.lengths, torch.empty(1, device="meta")))

    def test_bytes_are_of_int8_and_e4m3_alone(self):
        for cache in torch.zeros(2, 3, dtype=torch.int8), torch.zeros(2, 3).to(torch.float8_e4m3fn):
            self.assertEqual(_tensors.as_bytes(cache).dtype, torch.uint8)
        other = torch.zeros(2).to(torch.float8_e5m2)
        self.assertIs(_tensors.as_bytes(other), other)

    def test_what_is_made_in_inference_is_compiled_outside_too(self):
        with torch.inference_mode():
            decode = new_decode()
        compiled = torch.compile(lambda: (decode.plan(self.lengths, self.starts),
                                          decode.run(self.q, self.cache, self.table))[1],
                                 fullgraph=True, backend="aot_eager")
        expected = self.decode.run(self.q, self.cache, self.table)
        self.same(expected, compiled())
        with torch.inference_mode():
            self.same(expected, compiled())

    def test_the_stride_of_a_single_element_does_not_matter(self):
        one = new_decode(max_requests=1, max_queries=1)
        one.plan(self.lengths[1:])
        odd = self.q[:1].as_strided((1, HEADS, 576), (3, 576, 1))
        self.same(one.run(self.q[:1], self.cache, self.table[1:]), one.run(odd, self.cache, self.table[1:]))

    def test_a_step_without_requests_is_no_error(self):
        self.decode.plan(self.lengths[:0], self.starts[:1])
        o, lse = self.decode.run(self.q[:0], self.cache, self.table)
        self.assertEqual((o.shape, lse.shape), ((0, HEADS, 512), (0, HEADS)))

    def test_what_does_not_fit_is_refused(self):
        q, cache, table = self.q, self.cache, self.table
        for wrong, said in ((lambda: self.decode.plan(self.lengths.long()), "lengths must be int32"),
                            (lambda: self.decode.plan(self.lengths, self.starts[:2]), "query_starts must be"),
                            (lambda: self.decode.run(q.float(), cache, table), "q must be bfloat16 .* not float32"),
                            (lambda: self.decode.run(q.half(), cache, table), "q must be bfloat16 .* not float16"),
                            (lambda: self.decode.run(q, cache[:, :, :512], table), "cache must be"),
                            (lambda: self.decode.run(q, cache, table.long()), "block_table must be int32"),
                            (lambda: self.decode.run(q, cache, table, lse=torch.empty(2, HEADS)), "lse must be"),
                            (lambda: self.decode.plan(self.lengths, self.starts.to("meta")), "no memory of its own"),
                            (lambda: self.decode.run(q, cache, table, lse=q.view(torch.float32)[..., 0]),
                             "lse shares memory with q"),
                            (lambda: self.decode.run(q[:, None].expand(3, 9, HEADS, 576)[:, 0], cache,
                                                     table, out=q[..., :512]), "memory of its own")):
            with self.assertRaisesRegex(hypermla.Error, said):
                wrong()

    def test_sparse_tensors_are_refused(self):
        with self.assertRaisesRegex(hypermla.Error, "^lengths has no memory of its own to read; give a dense tensor"):
            self.decode.plan(self.lengths.to_sparse(), self.starts)
        self.decode.plan(self.lengths, self.starts)
        with self.assertRaisesRegex(hypermla.Error, "^q has no memory of its own to read; give a dense tensor"):
            self.decode.run(self.q.to_sparse(), self.cache, self.table)

    def test_nothing_imports_torch(self):
        script = "import sys, hypermla; hypermla.MlaDecode(device='cpu'); print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(BUILD / "python")},
                              text=True, capture_output=True, check=False, timeout=120)
        self.assertEqual((done.stdout, done.stderr), ("False\n", ""))


class Example(unittest.TestCase):
    def test_a_layer_decodes_with_drafts(self):
        """On a GPU where there is one."""
        small = ["--arrays=torch", "--hidden=256", "--heads=2", "--steps=4"]
        done = subprocess.run([sys.executable, CHECKOUT / "examples/python/mla_layer.py", *small], text=True,
                              env={**os.environ, "PYTHONPATH": str(BUILD / "python")}, capture_output=True,
                              check=False, timeout=600)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertRegex(done.stdout, r"\n4 steps of 4 requests, \d+ drafts accepted and [1-9]\d* rejected: outputs ")

    def test_ranks_share_a_context(self):
        for interleave in (1, 16):
            small = ["--ranks=2", "--tokens=500", "--requests=4", "--batch_tokens=90", "--heads=2",
                     f"--interleave={interleave}"]
            done = subprocess.run([sys.executable, CHECKOUT / "examples/python/context_parallel.py", *small], text=True,
                                  env={**os.environ, "PYTHONPATH": str(BUILD / "python")}, capture_output=True,
                                  check=False, timeout=600)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertRegex(done.stdout, r"^a request of 500 tokens: 2 ranks differ from one by at most 0\.0")
            self.assertRegex(done.stdout, r"\n4 requests of up to 90 tokens, 3 drafts: 2 ranks differ from one by ")
            self.assertRegex(done.stdout, f"shard 0 of 2, which take turns of {interleave} token")


class HostTime(unittest.TestCase):
    def test_the_benchmark_writes_its_record(self):
        with tempfile.TemporaryDirectory() as directory:
            record = pathlib.Path(directory) / "host.json"
            words = [CHECKOUT / "tests/benchmark/bench_host.py", "--device=cpu", "--bursts=3", f"--record={record}"]
            done = subprocess.run([sys.executable, *words], text=True, capture_output=True, check=False, timeout=600)
            self.assertEqual(done.returncode, 0, done)
            times = {row["call"]: row["layers_us"] for row in json.loads(record.read_text())["rows"]}
        # 0.6 us against 13 where nothing else runs.
        self.assertLess(times["MlaDecode.run"], times["an empty operator (torch.library.custom_op)"])
        if (BUILD / "libhypermla.so").exists():
            self.assertIn("hypermla_decode_run, C and C++", times)


class Attack(unittest.TestCase):
    def test_a_short_one_finds_nothing(self):
        """On the CPU; docs/checking.md has the totals of a long one on a GPU."""
        forms = [(f"--only={60 * engine}", 1) for engine in range(28, 33)]  # lists, and caches in FP8
        for what, runs in (("--runs=150", 150), *forms):
            with self.subTest(what):
                words = [CHECKOUT / "tests/attack/decode_runs.py", "--device=cpu", what]
                done = subprocess.run([sys.executable, *words], text=True, capture_output=True, check=False,
                                      timeout=600)
                self.assertEqual(done.returncode, 0, done)
                totals = json.loads(done.stdout)
                self.assertGreaterEqual(totals["runs"], runs)
                self.assertGreater(totals["worst"]["o"], 0)


class Prefill(unittest.TestCase):
    """Its tensors and operators."""
    DEVICE = "cpu"

    def setUp(self):
        torch.manual_seed(3)
        on = {"device": self.DEVICE}
        integers = lambda *values: torch.tensor(values, dtype=torch.int32, **on)
        bfloat16 = lambda *shape: torch.randn(shape).bfloat16().to(self.DEVICE)
        self.queries, self.tokens = integers(0, 3, 7), integers(0, 9, 20)
        self.q, kv, self.k_rope = bfloat16(7, HEADS, 192), bfloat16(20, HEADS, 256), bfloat16(20, 1, 64)
        self.k, self.v = (kv[..., :128], self.k_rope.expand(20, HEADS, 64)), kv[..., 128:]
        self.prefill = self.new_prefill()

    def new_prefill(self, **options):
        return hypermla.MlaPrefill(**{"heads": HEADS, "max_requests": 2, "max_query_tokens": 7, "max_tokens": 20,
                                      "device": self.DEVICE, **options})

    def same(self, *outputs):
        for one in outputs[1:]:
            self.assertTrue(torch.equal(one[0], outputs[0][0]) and torch.equal(one[1], outputs[0][1]))

    def test_it_attends(self):
        self.prefill.plan(self.queries, self.tokens)
        o, lse = self.prefill.run(self.q, self.k, self.v)
        self.prefill.check()
        keys = torch.cat(self.k, -1)
        for query, first, end in ((1, 0, 8), (6, 9, 20)):  # the middle one of three sees 8 of 9 tokens
            scores = torch.einsum("hc,thc->ht", self.q[query].float(), keys[first:end].float()) / 192**0.5
            torch.testing.assert_close(lse[query], scores.logsumexp(-1), atol=1e-3, rtol=0)
            expected = torch.einsum("ht,thc->hc", scores.softmax(-1), self.v[first:end].float())
            torch.testing.assert_close(o[query].float(), expected, atol=0.02, rtol=0)

    def test_any_strides_give_the_same_bits(self):
        self.prefill.plan(self.queries, self.tokens)
        apart = self.q.transpose(0, 1).contiguous().transpose(0, 1)
        wide = torch.zeros(7, HEADS, 192, dtype=torch.bfloat16, device=self.DEVICE)
        lse = torch.zeros(HEADS, 7, device=self.DEVICE).T
        self.same(self.prefill.run(self.q, self.k, self.v),
                  self.prefill.run((apart[..., :128], self.q[..., 128:]), torch.cat(self.k, -1), self.v.contiguous(),
                                   out=wide[..., :128], lse=lse),
                  self.prefill.run(Older(self.q), tuple(Older(one) for one in self.k), Older(self.v),
                                   torch.empty_like(wide[..., :128]), torch.empty_like(lse)))
        self.assertEqual(wide[..., 128:].abs().max(), 0)

    def test_the_operators_pass_the_checks_of_pytorch(self):
        ops, keys = torch.ops.hypermla, torch.cat(self.k, -1)
        out = torch.zeros(7, HEADS, 128, dtype=torch.bfloat16, device=self.DEVICE)
        lse = torch.zeros(7, HEADS, device=self.DEVICE)
        named = self.prefill.handle, self.prefill.order
        torch.library.opcheck(ops.mla_prefill_plan.default, (*named, self.queries, self.tokens))
        of_rows = self.new_prefill(causal=False, query_rows=True)
        rows = torch.tensor([6, 0, 1, 2, 3, 4, 5], dtype=torch.int32, device=self.DEVICE)
        torch.library.opcheck(ops.mla_prefill_plan.default,
                              (of_rows.handle, of_rows.order, self.queries, self.tokens, rows))
        pairs = (self.q[..., :128], self.q[..., 128:]), (self.k[0], self.k[1].contiguous())
        for q, k in (((self.q, None), (keys, None)), pairs):
            torch.library.opcheck(ops.mla_prefill_run.default, (*named, *q, *k, self.v, out, lse))

    def test_a_compiled_step_gives_the_same(self):
        """Two plans in one graph, and a run that merges into the outputs of the one before."""
        more = self.new_prefill(causal=False, accumulate=True, query_rows=True)
        rows = torch.arange(6, -1, -1, dtype=torch.int32, device=self.DEVICE)

        def step(q, tokens):
            self.prefill.plan(self.queries, tokens)
            o, lse = self.prefill.run(q, self.k, self.v)
            more.plan(self.queries, tokens, query_rows=rows)
            more.run(q * 2, torch.cat(self.k, -1), self.v, o, lse)
            self.prefill.plan(self.queries, tokens // 2)
            return self.prefill.run((q[..., :128], q[..., 128:]), self.k, self.v)[0] * 2, o, lse

        expected = step(self.q, self.tokens)
        for backend in ("aot_eager", "inductor"):
            with self.subTest(backend):
                torch._dynamo.reset()
                compiled = torch.compile(step, fullgraph=True, backend=backend)
                for _ in range(2):
                    for one, other in zip(compiled(self.q, self.tokens), expected):
                        self.assertTrue(torch.equal(one, other))

    def test_what_cannot_be_traced_is_said(self):
        for change, said in ((lambda: self.prefill.plan(self.queries, self.tokens, stream=1), "leave out `stream`"),
                             (lambda: setattr(self.prefill, "handle", None) or self.prefill.plan(
                                 self.queries, self.tokens), NOT_ADOPTED)):
            torch._dynamo.reset()
            with self.assertRaisesRegex(Exception, said):
                torch.compile(change, fullgraph=True, backend="aot_eager")()
        decode = new_decode()
        with self.assertRaisesRegex(hypermla.Error, f"handle {decode.handle} names no MlaPrefill"):
            torch.ops.hypermla.mla_prefill_plan(decode.handle, decode.order, self.queries, self.tokens)


@unittest.skipUnless(torch.cuda.is_available(), "there is no GPU")
class PrefillOnAGpu(Prefill):
    """The same, where calls find PyTorch's stream."""
    DEVICE = "cuda"

    def test_a_graph_of_a_side_stream_gives_the_same_bits(self):
        o = torch.zeros(7, HEADS, 128, dtype=torch.bfloat16, device="cuda")
        lse = torch.zeros(7, HEADS, device="cuda")
        more = self.new_prefill(causal=False, accumulate=True)

        def call():
            self.prefill.plan(self.queries, self.tokens)
            self.prefill.run(self.q, self.k, self.v, o, lse)
            more.plan(self.queries, self.tokens)
            more.run(self.q, self.k, self.v, o, lse)

        call()
        expected = o.clone(), lse.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        o.zero_(), lse.zero_()
        graph.replay()
        self.same(expected, (o, lse))


class SGLangPrefill(unittest.TestCase):
    """The calls of SGLang's layers, without SGLang: tests/engines/sglang_test.py has them."""
    DEVICE, HEADS, PREFIXES, NEW = "cpu", 2, (64, 0, 25, 9), (30, 5, 18, 1)
    SCALE, PADDING = 0.1, 3

    def setUp(self):
        from hypermla.sglang.prefill import Prefill

        torch.manual_seed(4)
        self.prefill = Prefill(self.HEADS, torch.bfloat16, self.SCALE, self.DEVICE, chunks=True)
        self.layer = types.SimpleNamespace(head_dim=192, v_head_dim=128, logit_cap=0.0, tp_q_head_num=self.HEADS,
                                           tp_k_head_num=self.HEADS, scaling=self.SCALE)
        self.tokens = [old + new for old, new in zip(self.PREFIXES, self.NEW)]
        self.k, self.v = ([self.rows(count, columns) for count in self.tokens] for columns in (192, 128))
        self.q = self.rows(sum(self.NEW) + self.PADDING, 192)
        self.q[sum(self.NEW):] = torch.nan

    def rows(self, count, columns):
        return torch.randn((count, self.HEADS, columns), device=self.DEVICE).bfloat16()

    def begin(self, **more):
        """A batch. SGLang keeps it while its layers run, and says by its attributes what a layer asks for."""
        class Batch(types.SimpleNamespace):
            pass  # with weak references

        lengths = lambda values: torch.tensor(values, dtype=torch.int32, device=self.DEVICE)
        self.prefill.begin()
        return Batch(**{"extend_seq_lens": lengths(self.NEW), "extend_seq_lens_cpu": list(self.NEW),
                        "extend_prefix_lens_cpu": list(self.PREFIXES), "seq_lens": lengths(self.tokens),
                        "attn_attend_prefix_cache": False, "mha_one_shot": False, "mha_return_lse": False,
                        "prefix_chunk_idx": None, "prefix_chunk_cu_seq_lens": None, "prefix_chunk_num_tokens": None,
                        **more})

    def call(self, batch, first, counts):
        """Over so many tokens of each request from its `first` one on. NaN lies behind the last one."""
        parts = [torch.cat([*(one[begin:begin + count] for one, begin, count in zip(of, first, counts)),
                            of[0].new_full((5, *of[0].shape[1:]), torch.nan)]) for of in (self.k, self.v)]
        self.assertTrue(self.prefill.takes(self.q, parts[0], self.layer, batch))
        return self.prefill.run(self.q, *parts, self.layer, batch)

    def agree(self, o):
        self.assertFalse(o[sum(self.NEW):].any())  # which pads the batch
        for rows, q, k, v, new in zip(o[:sum(self.NEW)].split(self.NEW), self.q[:sum(self.NEW)].split(self.NEW), self.k,
                                      self.v, self.NEW):
            scores = torch.einsum("qhc,thc->hqt", q.float(), k.float()) * self.SCALE
            seen = torch.ones_like(scores[0], dtype=torch.bool).tril(len(k) - new)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            expected = torch.einsum("hqt,thc->qhc", weights, v.float())
            torch.testing.assert_close(rows.float(), expected, atol=0.03, rtol=0)

    def test_prefixes_are_decompressed_with_new_tokens(self):
        batch = self.begin(mha_one_shot=True)
        for _ in range(2):  # layers
            self.agree(self.call(batch, [0] * 4, self.tokens))

    def test_prefixes_come_in_chunks(self):
        size = max(self.PREFIXES) // 3 + 1
        firsts = [[min(i * size, prefix) for prefix in self.PREFIXES] for i in range(4)]
        counts = [[end - first for first, end in zip(*two)] for two in zip(firsts, firsts[1:])]
        starts = torch.tensor([[0, *row] for row in counts], device=self.DEVICE).cumsum(1).int()
        batch = self.begin(mha_return_lse=True, prefix_chunk_cu_seq_lens=starts,
                           prefix_chunk_num_tokens=[sum(row) for row in counts])
        for _ in range(2):
            batch.attn_attend_prefix_cache = False
            o, lse = self.call(batch, self.PREFIXES, self.NEW)
            batch.attn_attend_prefix_cache = True
            for batch.prefix_chunk_idx, (first, count) in enumerate(zip(firsts, counts)):
                more, of_more = self.call(batch, first, count)
                merged = torch.logaddexp(lse, of_more)
                o = o * (lse - merged).exp()[..., None] + more * (of_more - merged).exp()[..., None]
                lse = merged
            self.agree(o)


@unittest.skipUnless(torch.cuda.is_available(), "there is no GPU")
class SGLangPrefillOnAGpu(SGLangPrefill):
    DEVICE, HEADS, PREFIXES, NEW = "cuda:0", 128, (3000, 0, 700, 129), (1500, 257, 1, 900)


class CacheOperators(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(2)
        bfloat16 = lambda *shape: torch.randn(shape).bfloat16()
        self.states = bfloat16(3, HEADS, 128), torch.randn(3, HEADS), bfloat16(3, HEADS, 128), torch.randn(3, HEADS)
        self.rows, self.cache, self.slots = bfloat16(4, 576), bfloat16(3, PAGE, 576), torch.tensor([5, -1, 40, 17])
        self.table, weight = torch.tensor([2, 0], dtype=torch.int32), bfloat16(HEADS, 256, 512)
        self.weights = weight[:, :128], weight[:, 128:].transpose(1, 2)

    def test_they_pass_the_checks_of_pytorch(self):
        ops = torch.ops.hypermla
        out, lse = torch.zeros(3, HEADS, 128).bfloat16(), torch.zeros(3, HEADS)
        k, v = (torch.zeros(20, HEADS, columns).bfloat16() for columns in (192, 128))
        torch.library.opcheck(ops.merge_states.default, (*self.states, out, lse, False, False))
        torch.library.opcheck(ops.append.default, (self.rows, None, self.cache, None, self.slots))
        split = self.cache[..., :512].clone(), self.cache[..., 512:].clone()
        torch.library.opcheck(ops.append.default, (self.rows[:, :512], self.rows[:, 512:], *split, self.slots))
        packed = torch.zeros(3, PAGE, 656, dtype=torch.uint8)
        torch.library.opcheck(ops.append.default, (self.rows, None, packed, None, self.slots))
        torch.library.opcheck(ops.append.default,
                              (self.rows, None, packed[..., :576].clone(), None, self.slots, torch.ones(1)))
        torch.library.opcheck(ops.decompress_prefix.default, (self.cache, None, self.table, 20, *self.weights, k, v))
        integers = lambda values: torch.tensor(values, dtype=torch.int32)
        torch.library.opcheck(ops.split_prefixes.default, (
            integers([[2, 0], [2, 1]]), integers([20, 30]), integers([0, 1, 2]), 2, torch.tensor([3, 21]), PAGE,
            integers([[1, 0, 1, 1]]), integers([[2]]), integers([0, 0, 1]), *(torch.zeros(shape, dtype=torch.int32)
                                                                             for shape in (2, (2, 2), 2, (2, 2), 2))))

    def test_a_compiled_step_gives_the_same(self):
        """What is appended is decompressed, and a state is merged in place: nothing may be dropped or moved."""
        def step(cache, o, lse):
            hypermla.append(self.rows, cache, self.slots)
            k, v = hypermla.decompress_prefix(cache, self.table, 20, *self.weights)
            merged, total = hypermla.merge_states(o, lse, *self.states[2:], out=o)
            return k, v, merged.clone(), total

        given = lambda: [tensor.clone() for tensor in (self.cache, *self.states[:2])]
        expected = step(*given())
        for backend in ("aot_eager", "inductor"):
            with self.subTest(backend):
                torch._dynamo.reset()
                compiled = torch.compile(step, fullgraph=True, backend=backend)
                for one, other in zip(compiled(*given()), expected):
                    self.assertTrue(torch.equal(one, other))


class SparseOperators(unittest.TestCase):
    """Lists of slots, caches in each form, sinks."""
    DEVICE, FP8_BYTES = "cpu", (0, 656, 576)  # of a token

    def setUp(self):
        torch.manual_seed(3)
        self.q, self.rows = torch.randn(2, HEADS, 576).bfloat16(), torch.randn(30, 576).bfloat16()
        self.places, self.lengths = torch.arange(30) + 9, torch.tensor([12, 5], dtype=torch.int32)
        self.slots = torch.randint(9, 39, (2, 12), dtype=torch.int32)
        self.slots[0, 3], self.sinks, self.scale = -1, torch.tensor([0.5, -torch.inf]), torch.tensor([0.01])
        for name in ("q", "rows", "places", "lengths", "slots", "sinks", "scale"):
            setattr(self, name, getattr(self, name).to(self.DEVICE))

    def of_format(self, fp8):
        decode = new_decode(max_queries=1, max_tokens=12, sparse=True, device=self.DEVICE,
                            cache_format=f"fp8_{fp8}" if fp8 else "as_queries")
        dtype, width = (torch.uint8, fp8) if fp8 else (torch.bfloat16, 576)
        return decode, torch.zeros(3, PAGE, width, dtype=dtype, device=self.DEVICE)

    def test_queries_may_be_in_fp8(self):
        if self.DEVICE != "cpu":
            self.skipTest("no recorded kernel takes them")
        decode = new_decode(max_queries=1, cache_format="fp8_576", fp8_queries=True)
        cache, table = torch.randint(0, 120, (3, PAGE, 576), dtype=torch.uint8), torch.tensor([[2, 0], [1, 0]]).int()
        q, of_q = (self.q / self.scale).to(torch.float8_e4m3fn), dict(cache_scale=self.scale, q_scale=self.scale)
        decode.plan(self.lengths)
        expected, of_expected = decode.run(q.view(torch.uint8), cache, table, **of_q)
        out, lse = torch.compile(decode.run, fullgraph=True, backend="aot_eager")(q, cache, table, **of_q)
        self.assertEqual(expected.dtype, torch.bfloat16)
        self.assertTrue(torch.equal(out, expected) and torch.equal(lse, of_expected))

    def test_caches_may_be_of_pytorchs_e4m3(self):
        def step(decode, cache, scale):
            hypermla.append(self.rows, cache, self.places, cache_scale=scale)
            return decode.run(self.q, cache, self.slots, cache_scale=scale)

        for fp8 in self.FP8_BYTES[1:]:
            decode, cache = self.of_format(fp8)
            decode.plan(self.lengths)
            with_scale = self.scale if fp8 == 576 else None
            expected = step(decode, cache, with_scale)
            self.assertTrue(cache.any())
            for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
                of_type = torch.zeros_like(cache).view(torch.float8_e4m3fn)
                for one, other in zip(run(decode, of_type, with_scale), expected):
                    self.assertTrue(torch.equal(one, other))
                self.assertTrue(torch.equal(of_type.view(torch.uint8), cache))

    def test_of_other_types_than_their_own_caches_are_refused(self):
        decode, cache = self.of_format(0)
        decode.plan(self.lengths)
        for wrong in torch.float8_e4m3fn, torch.float8_e5m2:
            with self.assertRaisesRegex(hypermla.Error, "cache must be bfloat16"):
                decode.run(self.q, torch.zeros_like(cache, dtype=wrong), self.slots)
        decode, cache = self.of_format(self.FP8_BYTES[1])
        decode.plan(self.lengths)
        wrong = cache.view(torch.float8_e5m2)
        with self.assertRaisesRegex(hypermla.Error, "cache must be uint8"):
            decode.run(self.q, wrong, self.slots)
        with self.assertRaisesRegex(hypermla.Error, "cache must be bfloat16"):
            hypermla.append(self.rows, wrong, self.places)

    def test_they_pass_the_checks_of_pytorch(self):
        out = torch.zeros(2, HEADS, 512, dtype=torch.bfloat16, device=self.DEVICE)
        lse = torch.zeros(2, HEADS, device=self.DEVICE)
        for fp8 in self.FP8_BYTES:
            decode, cache = self.of_format(fp8)
            named = decode.handle, decode.order
            torch.library.opcheck(torch.ops.hypermla.mla_decode_plan.default, (*named, self.lengths, None))
            decode.plan(self.lengths)
            for sinks in (self.sinks, None):
                torch.library.opcheck(torch.ops.hypermla.mla_decode_run.default,
                                      (*named, self.q, None, cache, None, self.slots, out, lse, sinks,
                                       self.scale if fp8 == 576 else None))

    def test_a_compiled_step_gives_the_same(self):
        """Tokens are appended, and queries attend to some of them: the order must stay."""
        for fp8 in self.FP8_BYTES:
            decode, _ = self.of_format(fp8)
            scale = self.scale if fp8 == 576 else None

            def step(cache, q, sinks):
                hypermla.append(self.rows, cache, self.places, cache_scale=scale)
                decode.plan(self.lengths)
                first = decode.run(q, cache, self.slots, sinks=sinks, cache_scale=scale)
                hypermla.append(self.rows * 2, cache, self.places, cache_scale=scale)
                return *first, *decode.run(q, cache, self.slots, cache_scale=scale), cache

            expected = step(self.of_format(fp8)[1], self.q, self.sinks)
            self.assertFalse(torch.equal(expected[0], expected[2]))
            for backend in ("aot_eager", "inductor"):
                with self.subTest(backend, fp8=fp8):
                    torch._dynamo.reset()
                    compiled = torch.compile(step, fullgraph=True, backend=backend)
                    for one, other in zip(compiled(self.of_format(fp8)[1], self.q, self.sinks), expected):
                        self.assertTrue(torch.equal(one, other))

    def test_it_attends_to_the_chosen_tokens(self):
        decode, cache = self.of_format(0)
        hypermla.append(self.rows, cache, self.places)
        decode.plan(self.lengths)
        o, lse = decode.run(self.q, cache, self.slots, sinks=self.sinks)
        for query, length in enumerate(self.lengths):
            slots = self.slots[query, :length]
            tokens = cache.view(-1, 576)[slots[slots >= 0].long()].float()
            scores = self.q[query].float() @ tokens.T / 192**0.5
            torch.testing.assert_close(lse[query], scores.logsumexp(-1), atol=1e-4, rtol=0)
            expected = scores.softmax(-1) @ tokens[:, :512] * torch.sigmoid(lse[query] - self.sinks)[:, None]
            torch.testing.assert_close(o[query].float(), expected, atol=0.03, rtol=0)


@unittest.skipUnless(torch.cuda.is_available(), "there is no GPU")
class SparseOperatorsOnAGpu(SparseOperators):
    DEVICE, FP8_BYTES = "cuda", (0, 656)  # 576: of a draft only

    def test_append_in_fp8_gives_the_bytes_of_the_cpu(self):
        for width in (656, 576):
            for rows in (self.rows, self.rows.half(), self.rows * 100):
                caches = [torch.zeros(3, PAGE, width, dtype=torch.uint8, device=device) for device in ("cuda", "cpu")]
                scale = self.scale if width == 576 else None
                hypermla.append(rows, caches[0], self.places, cache_scale=scale)
                hypermla.append(rows.cpu(), caches[1], self.places.cpu(),
                                cache_scale=None if scale is None else scale.cpu())
                self.assertTrue(torch.equal(caches[0].cpu(), caches[1]))


class Operators(unittest.TestCase):
    def test_they_pass_the_checks_of_pytorch(self):
        lengths, starts, q, cache, table = step()
        decode = new_decode()
        ops = torch.ops.hypermla
        out, lse = torch.zeros(3, HEADS, 512, dtype=torch.bfloat16), torch.zeros(3, HEADS)
        for query_starts in (starts, None):
            torch.library.opcheck(ops.mla_decode_plan.default, (decode.handle, decode.order, lengths, query_starts))
        decode.plan(lengths, starts)
        pairs = (q[..., :512], q[..., 512:]), (cache[..., :512], cache[..., 512:])
        for of_q, of_cache in (((q, None), (cache, None)), pairs):
            torch.library.opcheck(ops.mla_decode_run.default,
                                  (decode.handle, decode.order, *of_q, *of_cache, table, out, lse))

    def test_compiled_steps_give_the_same(self):
        """Two plans in one graph: if one were dropped, or a run moved before it, the numbers would differ."""
        lengths, starts, q, cache, table = step()
        decode = new_decode()

        def two_steps(lengths, q):
            decode.plan(lengths, starts)
            first, first_lse = decode.run(q, cache, table)
            decode.plan(lengths - 3, starts)
            out = torch.zeros(3, HEADS, 512, dtype=torch.bfloat16)
            decode.run((q[..., :512] * 2, q[..., 512:]), (cache[..., :512], cache[..., 512:]), table, out=out)
            return first.float() * 2 + out.float(), first_lse

        expected, (_, left) = two_steps(lengths, q), decode.run(q, cache, table)
        for backend in ("aot_eager", "inductor"):
            with self.subTest(backend):
                torch._dynamo.reset()
                compiled = torch.compile(two_steps, fullgraph=True, backend=backend)
                for _ in range(2):
                    decode.plan(lengths, starts)
                    for one, other in zip(compiled(lengths, q), expected):
                        self.assertTrue(torch.equal(one, other))
                    self.assertTrue(torch.equal(decode.run(q, cache, table)[1], left), "the last plan stays")

    def test_one_compiled_step_serves_several_objects(self):
        lengths, starts, q, cache, table = step()
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, backend="aot_eager")
        def compiled(decode, q):
            decode.plan(lengths, starts)
            return decode.run(q, cache, table)[1]

        for scale in (0.0, 0.1, 0.2):
            decode = new_decode(scale=scale)
            decode.plan(lengths, starts)
            self.assertTrue(torch.equal(compiled(decode, q), decode.run(q, cache, table)[1]))

    def test_one_graph_takes_any_number_of_tokens(self):
        lengths, starts, q, cache, table = step()
        decode = new_decode()
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
        def compiled(starts, q):
            decode.plan(lengths, starts)
            return decode.run(q, cache, table)[1]

        with torch._dynamo.config.patch(error_on_recompile=True):
            for counts in ((0, 2, 3), (0, 2, 4), (0, 1, 3), (0, 0, 1)):
                starts = torch.tensor(counts, dtype=torch.int32)
                rows = torch.cat([q, q])[:counts[-1] + 1]  # one that pads
                decode.plan(lengths, starts)
                expected = decode.run(rows, cache, table)[1]
                self.assertTrue(torch.equal(compiled(starts, rows)[:counts[-1]], expected[:counts[-1]]), counts)

    def test_an_exported_program_gives_the_same(self):
        lengths, starts, *tensors = step()
        decode = new_decode()

        class Step(torch.nn.Module):
            def forward(self, lengths, q, cache, table):
                decode.plan(lengths, starts)
                return decode.run(q, cache, table)

        for one, other in zip(torch.export.export(Step(), (lengths, *tensors)).module()(lengths - 3, *tensors),
                              Step()(lengths - 3, *tensors)):
            self.assertTrue(torch.equal(one, other))

    def test_an_exported_program_with_an_order_of_its_own_is_decomposed(self):
        lengths, starts, *tensors = step()
        decode = new_decode()

        class Step(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("order", torch.zeros(1, device=decode.device))

            def forward(self, lengths, q, cache, table):
                torch.ops.hypermla.mla_decode_plan(decode.handle, self.order, lengths, starts)
                out, lse = q.new_empty(len(q), HEADS, 512), q.new_empty(q.shape[:2], dtype=torch.float32)
                torch.ops.hypermla.mla_decode_run(decode.handle, self.order, q, None, cache, None, table, out, lse)
                return out, lse

        program = torch.export.export(Step(), (lengths, *tensors)).run_decompositions()
        decode.plan(lengths - 3, starts)
        expected = decode.run(*tensors)
        decode.plan(lengths, starts)
        for one, other in zip(program.module()(lengths - 3, *tensors), expected):
            self.assertTrue(torch.equal(one, other))

    def test_what_cannot_be_traced_is_said(self):
        lengths, *_ = step()
        decode = new_decode()
        for change, said in ((lambda: decode.plan(lengths, stream=1), "leave out `stream`"),
                             (lambda: setattr(decode, "handle", None) or decode.plan(lengths), NOT_ADOPTED)):
            torch._dynamo.reset()
            with self.assertRaisesRegex(Exception, said):
                torch.compile(change, fullgraph=True, backend="aot_eager")()

    def test_an_object_that_is_gone_is_said(self):
        lengths, starts, *_ = step()
        handle, order = (decode := new_decode()).handle, decode.order
        del decode
        with self.assertRaisesRegex(hypermla.Error, f"handle {handle} names no MlaDecode"):
            torch.ops.hypermla.mla_decode_plan(handle, order, lengths, starts)


@unittest.skipUnless(torch.cuda.is_available(), "there is no GPU")
class OnAGpu(unittest.TestCase):
    def setUp(self):
        self.host = step()
        self.lengths, self.starts, self.q, self.cache, self.table = (one.cuda() for one in self.host)
        self.decode = new_decode(heads=HEADS, device="cuda")

    def test_it_attends_as_the_cpu(self):
        lengths, starts, q, cache, table = self.host
        reference = new_decode()
        reference.plan(lengths, starts)
        self.decode.plan(self.lengths, self.starts)
        for one, other in zip(self.decode.run(self.q, self.cache, self.table), reference.run(q, cache, table)):
            torch.testing.assert_close(one.cpu(), other, atol=0.03, rtol=0)
        self.decode.check()

    def test_a_graph_of_a_side_stream_and_compiled_code_give_the_same_bits(self):
        o, lse = torch.zeros(3, HEADS, 512, dtype=torch.bfloat16, device="cuda"), torch.zeros(3, HEADS, device="cuda")

        def call(lengths):
            self.decode.plan(lengths, self.starts)
            return self.decode.run(self.q, self.cache, self.table, out=o, lse=lse)

        expected = [one.clone() for one in call(self.lengths)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # on a stream of its own, which the calls find
            call(self.lengths)
        for run in (graph.replay, lambda: torch.compile(call, fullgraph=True)(self.lengths)):
            o.zero_(), lse.zero_()
            run()
            self.assertTrue(torch.equal(o, expected[0]) and torch.equal(lse, expected[1]))

    def test_a_step_without_requests_leaves_the_next_one_right(self):
        self.decode.plan(self.lengths, self.starts)
        expected = self.decode.run(self.q, self.cache, self.table)
        self.decode.plan(self.lengths[:0], self.starts[:1])
        self.decode.run(self.q[:0], self.cache, self.table)
        self.decode.check()
        self.decode.plan(self.lengths, self.starts)
        for one, other in zip(self.decode.run(self.q, self.cache, self.table), expected):
            self.assertTrue(torch.equal(one, other))

    def test_sums_of_many_numbers_in_e4m3_are_kept(self):
        """All tokens weigh the same, so outputs are means, and there are so many requests that none is cut. The tensor
        core's own sums are a quarter short here."""
        tokens, requests = 16384, 2 * torch.cuda.get_device_properties(0).multi_processor_count
        torch.manual_seed(1)
        cache = (1 + 0.5 * torch.randn(tokens // 64, 64, 576, device="cuda")).to(torch.float8_e4m3fn)
        expected = cache.float().view(-1, 576)[:, :512].mean(0)
        one = torch.ones(1, device="cuda")
        table = torch.arange(tokens // 64, dtype=torch.int32, device="cuda").repeat(requests, 1)
        for heads in (16, 32, 48, 128):
            decode = new_decode(heads=heads, max_requests=requests, max_queries=1, max_tokens=tokens, page=64,
                                cache_format="fp8_576", fp8_queries=True, device="cuda")
            decode.plan(torch.full((requests,), tokens, dtype=torch.int32, device="cuda"))
            q = torch.zeros(requests, heads, 576, dtype=torch.uint8, device="cuda")
            o, _ = decode.run(q, cache.view(torch.uint8), table, cache_scale=one, q_scale=one)
            self.assertLessEqual(((o - expected).abs().max() / expected.abs().max()).item(), 0.006, decode.explain())

    def test_tensors_of_the_other_memory_are_refused(self):
        with self.assertRaisesRegex(hypermla.Error, "lengths must be on GPU 0, not in the memory of the CPU"):
            self.decode.plan(self.host[0])
        self.decode.plan(self.lengths, self.starts)
        with self.assertRaisesRegex(hypermla.Error, "block_table must be on GPU 0"):
            self.decode.run(self.q, self.cache, self.host[4])
        with self.assertRaisesRegex(hypermla.Error, "lengths must be in the memory of the CPU, not on GPU 0"):
            new_decode().plan(self.lengths)


if __name__ == "__main__":
    unittest.main()
