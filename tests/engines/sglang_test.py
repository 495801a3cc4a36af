"""python/hypermla/sglang against SGLang's own classes, with a mock model runner, on a CPU. Skipped (77) where SGLang is
not installed; `./test --engines` installs it.

What needs a GPU there is stood in for: FlashMLA's kernels, which the backend replaces; FlashInfer's wrappers, by
hypermla.compat.flashinfer; the Triton kernels that write the cache, list its slots and merge attention; the kernel that
rounds queries; and pinned memory.
"""

import ast
import contextlib
import functools
import importlib.metadata
import inspect
import itertools
import json
import os
import pathlib
import sys
import tempfile
import tomllib
import types
import unittest
import weakref
from unittest import mock

import bench_sglang
import sglang_interface

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cli"))
from support import BUILD, CHECKOUT

try:
    importlib.metadata.version("sglang")
except importlib.metadata.PackageNotFoundError:
    print("SGLang is not installed")
    sys.exit(77)

import torch

sys.path.insert(0, str(BUILD / "python"))
sglang_interface.stand_in()

from sglang.kernels.ops.quantization import fp8_kernel
from sglang.srt import plugins, server_args
from sglang.srt.layers.attention import attention_registry, flashinfer_mla_backend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor import forward_batch_deepseek_mha_mixin as mha_batch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import context as breakable
from sglang.srt.models.deepseek_common import attention_backend_handler
from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mha
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.runtime_context import get_context, get_exec, get_parallel
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.test.kits.attention_unittest.attention_methods import mla_attention as kit

import hypermla.compat.flashinfer
import hypermla.sglang.absorbed
from hypermla.compat import flash_mla

flashinfer_mla_backend.BatchMLAPagedAttentionWrapper = hypermla.compat.flashinfer.BatchMLAPagedAttentionWrapper
flashinfer_mla_backend.BatchPrefillWithRaggedKVCacheWrapper = lambda *arguments, **options: None


def rounded(given, output, scale, is_static):
    assert is_static
    largest = torch.finfo(output.dtype).max
    output.copy_((given.float() / scale).clamp(-largest, largest))


fp8_kernel.sgl_per_tensor_quant_fp8 = rounded
zeros = torch.zeros
torch.zeros = lambda *sizes, pin_memory=False, **options: zeros(*sizes, **options)

# SGLang finds the plug-in as it finds that of an installed distribution.
with tempfile.TemporaryDirectory() as directory:
    about = pathlib.Path(directory) / "hypermla-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: hypermla\nVersion: 0\n")
    group = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["entry-points"]["sglang.srt.plugins"]
    (about / "entry_points.txt").write_text("[sglang.srt.plugins]\n" + "".join(
        f"{name} = {value}\n" for name, value in group.items()))
    sys.path.append(directory)
    plugins.load_plugins()
    sys.path.remove(directory)

alone = contextlib.ExitStack()  # of one device, which 0.5.17 asks a group that the kit does not make
alone.enter_context(get_parallel().override(attn_cp_size=1, attn_dcp_rank=0))

HEADS, CONTEXT = 4, 192
DTYPE = torch.bfloat16


def attended(q, tokens, scale):
    """Of one request: q [queries, heads, 576], the last query sees all tokens, each one before it one less."""
    rows = []
    for query, row in enumerate(q.float()):
        seen = tokens[:len(tokens) - len(q) + query + 1].float()
        rows.append((row @ seen.T * scale).softmax(-1) @ seen[:, :512])
    return torch.stack(rows)


class Pool(kit.MLATokenToKVPool):
    """Writes without Triton."""

    def set_mla_kv_buffer(self, layer, loc, nope, rope):
        loc = getattr(loc, "loc", loc)  # what SGLang's own backends give since 0.5.22
        self.kv_buffer[layer.layer_id][loc] = torch.cat([nope, rope], dim=-1).to(self.dtype).view(self.store_dtype)


class Runner(kit.MockMLAModelRunner):
    def __init__(self, page, requests, drafts=0, heads=HEADS, fp8=False, **changes):
        mode = ForwardMode.TARGET_VERIFY if drafts else ForwardMode.DECODE
        case = kit.MLAAttentionCase("", "hypermla", mode, heads, page, (1,) * requests, (drafts,) * requests)
        config = kit.TinyMLAModelConfig(num_heads=heads, kv_lora_rank=512, qk_rope_head_dim=64, hidden_size=64,
                                        context_len=CONTEXT)
        super().__init__(case=case, model_config=config, dtype=DTYPE, device="cpu", max_context_len=CONTEXT,
                         kv_lora_rank=512, qk_rope_head_dim=64, fp8_kv_cache=fp8)
        self.token_to_kv_pool.__class__ = Pool
        for name, value in changes.items():
            setattr(self, name, value)


class Case:
    """Requests with some tokens in the cache, in pages of random order; what is not theirs is NaN."""

    def __init__(self, page, lengths, drafts=0, backend=None, heads=HEADS, **changes):
        torch.manual_seed(len(lengths) * page)
        self.runner = runner = Runner(page, len(lengths) + 1, drafts, heads, **changes)
        self.heads = heads
        self.layer = RadixAttention(num_heads=heads, head_dim=576, scaling=0.09, num_kv_heads=1, layer_id=0,
                                    v_head_dim=512)
        self.cache = runner.token_to_kv_pool.get_key_buffer(0)
        self.cache.fill_(float("nan"))
        width = -(-CONTEXT // page)
        pages = 1 + torch.randperm(len(self.cache) // page - 1)[:len(lengths) * width].reshape(-1, width)
        self.requests = torch.randperm(len(lengths)) + 1  # rows of the pool of requests
        for request, own in zip(self.requests, pages):
            slots = (own[:, None] * page + torch.arange(page)).flatten()[:CONTEXT]
            runner.req_to_token_pool.req_to_token[request, :len(slots)] = slots.int()
        self.lengths = lengths
        for request, length in enumerate(lengths):
            self.put(request, length)
        self.backend = (backend or attention_registry.ATTENTION_BACKENDS["hypermla"])(runner)

    def put(self, request, length):
        rows, pool = torch.randn(length, 1, 576).to(DTYPE), self.runner.token_to_kv_pool
        pool.kv_buffer[0][self.slots(request)[:length]] = rows.to(pool.dtype).view(pool.store_dtype)

    def tokens(self, request, end):
        pool = self.runner.token_to_kv_pool
        return pool.kv_buffer[0][self.slots(request)[:end], 0].view(pool.dtype).float()

    def slots(self, request):
        return self.runner.req_to_token_pool.req_to_token[self.requests[request]].long()

    def batch(self, mode, lengths, new):
        """A batch whose requests have these lengths; the `new` last tokens of each go into the cache now."""
        ends = self.ends
        slots = torch.cat([self.slots(request)[end - new:end] for request, end in enumerate(ends)])
        lengths = torch.tensor(lengths)
        batch = ForwardBatch(forward_mode=mode, batch_size=len(lengths), input_ids=torch.zeros(len(slots)).long(),
                             req_pool_indices=self.requests, seq_lens=lengths, seq_lens_cpu=lengths,
                             out_cache_loc=slots, seq_lens_sum=int(lengths.sum()))
        batch.extend_seq_lens = torch.full_like(lengths, new)
        return batch

    def attend(self, mode, new, counted, apart, graph=False, cpu_lengths=True):
        """`new` tokens of each request, of which seq_lens counts `counted`. Returns what comes out and what should."""
        self.ends = [length + new for length in self.lengths]
        batch = self.batch(mode, [length + counted for length in self.lengths], new)
        if not cpu_lengths:
            batch.seq_lens_cpu = None
        if graph:
            self.backend.init_cuda_graph_state(len(self.lengths) + 1, 64)
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
            self.backend.init_forward_metadata_in_graph(batch)
        else:
            self.backend.init_forward_metadata(batch)
        rows = len(self.lengths) * new
        q, kv = torch.randn(rows, self.heads, 576).to(DTYPE), torch.randn(rows, 1, 576).to(DTYPE)
        if apart:  # the latent part as the product of a batch of heads leaves it
            latent = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
            given = (latent, kv[..., :512], kv[..., :512])
            parts = {"q_rope": q[..., 512:], "k_rope": kv[..., 512:]}
        else:
            given, parts = (q.flatten(1), kv, kv[..., :512]), {}
        with forward_context(ForwardContext(attn_backend=self.backend)):
            o = self.backend.forward(*given, self.layer, batch, **parts)
        if self.backend._rounds(self.backend._planned[0]):
            q = q.to(torch.float8_e4m3fn)
        expected = torch.cat([attended(own, self.tokens(request, end), self.layer.scaling)
                              for request, (own, end) in enumerate(zip(q.split(new), self.ends))])
        return o.view(rows, self.heads, 512).float(), expected


class Backend(unittest.TestCase):
    def assert_attends(self, case, *arguments, **options):
        o, expected = case.attend(*arguments, **options)
        torch.testing.assert_close(o, expected, atol=0.03, rtol=0)

    def test_it_decodes_with_pages_of_any_size(self):
        for page in (1, 2, 16, 32, 64):
            for apart in (False, True):
                for graph in (False, True):
                    with self.subTest(page=page, apart=apart, graph=graph):
                        self.assert_attends(Case(page, [70, 1, 63]), ForwardMode.DECODE, 1, 1, apart, graph)

    def test_it_reads_a_cache_in_fp8(self):
        """With many heads queries are rounded, too, where pages have more than one token. A checkpoint's k_scale
        counts for nothing, since the pool writes without it."""
        for page, heads, rounded in ((1, 4, False), (2, 64, False), (16, 4, False), (64, 64, True)):
            for apart, scaled in ((False, False), (True, True)):
                with self.subTest(page=page, heads=heads, apart=apart):
                    case = Case(page, [70, 1, 63], heads=heads, fp8=True)
                    if scaled:
                        case.layer.k_scale = torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)
                    self.assert_attends(case, ForwardMode.DECODE, 1, 1, apart, graph=apart)
                    self.assertEqual(case.backend._rounds(1), rounded)
        case = Case(16, [40, 100, 15], drafts=4, fp8=True)
        case.layer.k_scale = torch.nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.assert_attends(case, ForwardMode.TARGET_VERIFY, 4, 0, True)
        self.assertFalse(case.backend._rounds(4))
        case = Case(16, [40, 100, 15], heads=16, drafts=4, fp8=True)
        self.assert_attends(case, ForwardMode.TARGET_VERIFY, 4, 0, True)
        self.assertTrue(case.backend._rounds(4))

    def test_it_verifies_drafts(self):
        """seq_lens does not count the drafts."""
        for graph in (False, True):
            self.assert_attends(Case(16, [40, 100, 15], drafts=4), ForwardMode.TARGET_VERIFY, 4, 0, True, graph)

    def test_it_extends_drafts(self):
        """A window of 3 queries, which seq_lens counts."""
        for graph in (False, True):
            self.assert_attends(Case(64, [40, 100], drafts=3), ForwardMode.DRAFT_EXTEND_V2, 3, 3, False, graph)

    def test_one_object_serves_all_batch_sizes_of_a_graph(self):
        case = Case(16, [40, 100, 15])
        self.assert_attends(case, ForwardMode.DECODE, 1, 1, True, graph=True)
        steps = case.backend._steps[1]
        address = steps.table.data_ptr()
        case.lengths, case.requests = [120, 16], case.requests[:2].flip(0)
        for request, length in enumerate(case.lengths):
            case.put(request, length)
        batch_sizes = case.backend._graph_requests
        self.assert_attends(case, ForwardMode.DECODE, 1, 1, True, graph=True)
        self.assertEqual((case.backend._steps[1], steps.table.data_ptr(), batch_sizes), (steps, address, 4))

    def test_a_graph_may_be_padded_beyond_the_pool_of_requests(self):
        """As to a multiple of the devices of tensor parallelism."""
        case = Case(16, [40, 15])
        case.backend.init_cuda_graph_state(9, 9)
        case.lengths, case.requests = [40, 15] + [0] * 7, torch.cat([case.requests, torch.zeros(7).long()])
        self.assert_attends(case, ForwardMode.DECODE, 1, 1, True, graph=True)
        with self.assertRaisesRegex(ValueError, "graphs of up to 2048 requests, not 2056"):
            case.backend.init_cuda_graph_state(2056, 2056)

    def test_rows_behind_the_plan_are_0(self):
        case = Case(16, [40, 15])
        self.assert_attends(case, ForwardMode.DECODE, 1, 1, True)
        batch = case.batch(ForwardMode.DECODE, case.lengths, 1)
        with forward_context(ForwardContext(attn_backend=case.backend)):
            o = case.backend.forward(torch.ones(5, HEADS * 576, dtype=DTYPE), None, None, case.layer, batch)
        self.assertTrue(o[:2].abs().sum() > 0 and (o[2:] == 0).all())

    def test_layers_of_two_scales_are_refused(self):
        case = Case(16, [9])
        self.assert_attends(case, ForwardMode.DECODE, 1, 1, True)  # of another scale than the configuration's
        case.layer.scaling = 0.2
        with self.assertRaisesRegex(ValueError, "different scales"):
            self.assert_attends(case, ForwardMode.DECODE, 1, 1, True)

    def test_verification_waits_for_no_buffers(self):
        self.assertIsNone(Case(16, [9]).backend.update_verify_buffers_to_fill_after_draft(None, None))

    def test_an_idle_step_plans_nothing(self):
        case = Case(16, [9])
        batch = ForwardBatch(forward_mode=ForwardMode.IDLE, batch_size=0, input_ids=torch.zeros(0).long(),
                             req_pool_indices=case.requests[:0], seq_lens=torch.zeros(0).long(), out_cache_loc=None,
                             seq_lens_cpu=torch.zeros(0).long(), seq_lens_sum=0)
        case.backend.init_forward_metadata(batch)
        o = case.backend.forward(torch.zeros(0, HEADS * 576), None, None, case.layer, batch)
        self.assertEqual(tuple(o.shape), (0, HEADS * 512))

    def test_eager_steps_need_no_lengths_on_the_host(self):
        self.assertFalse(Case(64, [9]).backend.needs_cpu_seq_lens)
        self.assert_attends(Case(64, [9, 90]), ForwardMode.DECODE, 1, 1, True, cpu_lengths=False)

    def test_drafts_of_several_steps_see_those_before(self):
        """In step i the drafts 0 to i are in the cache, and seq_lens counts none of them."""
        factory = DraftBackendFactory.__new__(DraftBackendFactory)
        case = Case(16, [40, 3], drafts=4)
        factory.draft_model_runner, factory.topk, factory.speculative_num_steps = case.runner, 1, 4
        factory.draft_attn_backend, factory.server_args, factory.qsa_profile = "hypermla", None, None
        backend = factory.create_decode_backend()
        self.assertEqual(len(backend.attn_backends), 3)
        for step, its in enumerate(backend.attn_backends):
            case.backend = its
            self.assert_attends(case, ForwardMode.DECODE, 1, -step, True)
            case.lengths = [length + 1 for length in case.lengths]
        batch = case.batch(ForwardMode.DECODE, case.lengths, 1)
        batch.spec_info = types.SimpleNamespace()
        backend.init_cuda_graph_state(3, 64)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        tables = []
        for step, its in enumerate(backend.attn_backends):
            self.assertEqual(its._planned[1].tolist(), [length + step + 1 for length in case.lengths])
            tables.append(its._planned[2].data_ptr())
        self.assertEqual(len(set(tables)), 1)
        for request, length in enumerate(its._planned[1].tolist()):
            pages = case.slots(request)[:length:16] // 16
            self.assertEqual(its._planned[2][request, :len(pages)].tolist(), pages.tolist())
        one = case.backend.__class__(case.runner)
        self.assertIsNone(one._draft_step)
        factory.topk = 2
        with self.assertRaisesRegex(ValueError, "set --speculative-eagle-topk 1"):
            factory.create_decode_backend()

    def test_it_prefills(self):
        """By the absorbed path, with what stands for FlashInfer."""
        case = Case(1, [40, 9])
        case.ends = [44, 13]
        batch = case.batch(ForwardMode.EXTEND, case.ends, 4)
        batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = torch.tensor(case.lengths), case.lengths
        batch.attn_attend_prefix_cache = None
        seen = {}
        case.backend.forward_metadata = types.SimpleNamespace(use_ragged=False, prefill_wrapper=types.SimpleNamespace(
            run=lambda q, q_rope, ckv, kpe, out: seen.update(q=q, q_rope=q_rope, ckv=ckv, kpe=kpe) or out.zero_()))
        q, kv = torch.randn(8, HEADS, 576).to(DTYPE), torch.randn(8, 1, 576).to(DTYPE)
        case.backend.forward(q[..., :512], kv[..., :512], kv[..., :512], case.layer, batch, q_rope=q[..., 512:],
                             k_rope=kv[..., 512:])
        self.assertTrue(torch.equal(seen["q_rope"], q[..., 512:]) and torch.equal(seen["q"], q[..., :512]))
        self.assertTrue(torch.equal(seen["ckv"][batch.out_cache_loc], kv[..., :512]), "the new tokens are in the cache")

    def test_what_is_not_supported_is_said(self):
        unified = types.SimpleNamespace(reads_are_translated=True)
        for change, said in (({"kv_cache_dtype": torch.float8_e5m2}, "set --kv-cache-dtype auto"),
                             ({"kv_cache_dtype": torch.float8_e4m3fn, "dtype": torch.float16}, "e4m3 beside bfloat16"),
                             ({"kv_index_translator": unified}, "leave --enable-unified-memory off"),
                             ({"use_mla_backend": False}, "512 and 64 columns"),
                             ({"use_mla_backend": False, "is_draft_worker": True}, "draft-attention-backend fa3")):
            with self.assertRaisesRegex(ValueError, said):
                Case(64, [9], **change)
        for name, drafts in (("EAGLE", {"speculative_eagle_topk": 2}), ("NGRAM", {"speculative_eagle_topk": 1})):
            spec = types.SimpleNamespace(speculative_algorithm=name, **drafts)
            with (mock.patch("hypermla.sglang.backend.get_spec", lambda spec=spec: spec),
                  self.assertRaisesRegex(ValueError, "chains of drafts, not trees")):
                Case(64, [9])
        for dcp, cp, said in (2, 1, "decode context parallelism"), (1, 2, "context parallelism of prefills"):
            parallel = types.SimpleNamespace(attn_dcp_size=dcp, attn_cp_size=cp)
            with (mock.patch("hypermla.sglang.backend.get_parallel", lambda parallel=parallel: parallel),
                  self.assertRaisesRegex(ValueError, said)):
                Case(64, [9])
        same = types.SimpleNamespace(deterministic=types.SimpleNamespace(enable_deterministic_inference=True))
        with (mock.patch("hypermla.sglang.backend.get_exec", lambda: same),
              self.assertRaisesRegex(ValueError, "does not take --enable-deterministic-inference")):
            Case(64, [9])
        runner = Runner(64, 1)
        runner.model_config.hf_config = types.SimpleNamespace(text_config=types.SimpleNamespace(index_topk=2048))
        with self.assertRaisesRegex(ValueError, "start with SGLANG_PLUGINS=hypermla,hypermla_sparse"):
            attention_registry.ATTENTION_BACKENDS["hypermla"](runner)
        runner = Runner(64, 1)
        runner.model_config.kv_lora_rank = 256
        with self.assertRaisesRegex(ValueError, r"not \(256, 64\)"):
            attention_registry.ATTENTION_BACKENDS["hypermla"](runner)


class OnGrid:
    """Stands for a kernel of Triton."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        return self.function


def list_slots(req_to_token, requests, lengths, starts, firsts, slots, stride, **options):
    """Of the requests' tokens, one request after the other, each from its first token on."""
    for row, (request, length, start) in enumerate(zip(requests.tolist(), lengths.tolist(), starts.tolist())):
        first = 0 if firsts is None else int(firsts[row])
        slots[start:start + length] = req_to_token[request, first:first + length]


def list_chunk(req_to_token, requests, firsts, lengths, starts, slots, stride):
    list_slots(req_to_token, requests, lengths, starts, firsts, slots, stride)


def merge_state(one, one_lse, other, other_lse, out, lse):
    """What SGLang's kernel computes: log-sum-exps are natural, [tokens, heads]."""
    assert all(tensor.is_contiguous() for tensor in (one, one_lse, other, other_lse))
    lse.copy_(torch.logaddexp(one_lse, other_lse))
    out.copy_(one.float() * (one_lse - lse).exp()[..., None] + other.float() * (other_lse - lse).exp()[..., None])


class Layer(forward_mha.DeepseekMHAForwardMixin):
    """SGLang's attention of a layer in its MHA form, with given queries and latent tokens instead of projections."""

    def __init__(self, heads, scaling=0.07):
        self.rotary_emb = self.q_lora_rank = None
        self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = 512, 128, 64, 128
        self.qk_head_dim, self.num_local_heads, self.use_dsa, self.dcp_size = 192, heads, False, 1
        self.current_attention_backend, self.kv_cache_dtype = "hypermla", "auto"
        self.flashinfer_mla_disable_ragged, self.disable_chunked_prefix_cache = False, False
        self.chunked_prefix_cache_threshold = 1
        self.attn_mha = RadixAttention(num_heads=heads, head_dim=192, scaling=scaling, num_kv_heads=heads, layer_id=0,
                                       v_head_dim=128)
        self.weights = (torch.randn(512, heads * 256) / 20).to(DTYPE)
        self.kv_a_layernorm = lambda latent: latent
        self.q_proj, self.o_proj = lambda q: (q.clone(),), lambda o: (o, None)
        self.kv_b_proj = lambda latent: (latent @ self.weights,)

    def attend(self, q, tokens, batch):
        """As SGLang calls a layer. Returns the form that it takes, and the outputs [tokens, heads, 128]."""
        method = attention_backend_handler.AttentionBackendRegistry.get_handler("hypermla")(self, batch)
        form = {AttnForwardMethod.MHA_ONE_SHOT: "one_shot", AttnForwardMethod.MHA_CHUNKED_KV: "chunked_kv"}[method]
        self.kv_a_proj_with_mqa = lambda hidden: (tokens.clone(),)
        given = getattr(self, f"forward_normal_{form}_prepare")(None, q, batch, None)
        return form, getattr(self, f"forward_normal_{form}_core")(*given).view(-1, self.num_local_heads, 128)

    def direct(self, q, tokens):
        """Of one request, in double precision: q [queries, heads, 192], the last query sees all of the tokens."""
        kv = (tokens[:, :512].to(DTYPE) @ self.weights).view(-1, self.num_local_heads, 256).double()
        rope = tokens[:, None, 512:].double().expand(-1, self.num_local_heads, -1)
        k, v = torch.cat([kv[..., :128], rope], -1), kv[..., 128:]
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * self.attn_mha.scaling
        hidden = torch.arange(len(tokens)) > torch.arange(len(tokens) - len(q), len(tokens))[:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class Prefills(Case):
    """Requests with prefixes in the cache, and new tokens."""

    def __init__(self, prefixes, page=16, heads=HEADS, flags=None, **changes):
        def backend(runner):
            """SGLang's kit switches off what is to be seen here."""
            runner.model_config.qk_nope_head_dim = runner.model_config.v_head_dim = 128
            get_context().override("test", **{"flashinfer_mla_disable_ragged": False,
                                              "disable_chunked_prefix_cache": False, **(flags or {})})
            return attention_registry.ATTENTION_BACKENDS["hypermla"](runner)

        super().__init__(page, prefixes, heads=heads, backend=backend, **changes)

    def step(self, new, mode=ForwardMode.EXTEND, padding=0):
        """A batch of so many new tokens of each request, whose slots still hold NaN, and tokens that pad it."""
        ends = [length + more for length, more in zip(self.lengths, new)]
        slots = [self.slots(request)[end - more:end] for request, (end, more) in enumerate(zip(ends, new))]
        batch = ForwardBatch(
            forward_mode=mode, batch_size=len(new), input_ids=torch.zeros(sum(new)).long(),
            req_pool_indices=self.requests, seq_lens=torch.tensor(ends), seq_lens_cpu=torch.tensor(ends),
            out_cache_loc=torch.cat([*slots, torch.zeros(padding).long()]), seq_lens_sum=sum(ends))
        batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.tensor(new, dtype=torch.int32), list(new)
        batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = torch.tensor(self.lengths), list(self.lengths)
        return batch

    def run(self, new, batch=None, scalings=(0.07,), padding=0):
        """A step of a layer for each scale. Returns the forms that SGLang takes."""
        batch = batch or self.step(new, padding=padding)
        self.backend.init_forward_metadata(batch)
        return {self.layer_of(scaling, batch, new, padding) for scaling in scalings}

    def absorb(self, batch, scaling=0.07, apart=True, padding=0):
        """A layer in the absorbed form: the outputs, and what they should be."""
        new, layer = batch.extend_seq_lens_cpu, RadixAttention(self.heads, 576, scaling, 1, 0, v_head_dim=512)
        q, kv = (torch.randn(sum(new) + padding, heads, 576).to(DTYPE) for heads in (self.heads, 1))
        q[sum(new):] = torch.nan  # nobody may read it, and nothing may come of it
        with forward_context(ForwardContext(attn_backend=self.backend)):
            if apart:
                o = self.backend.forward(q[..., :512].flatten(1), kv[..., :512], kv[..., :512], layer, batch,
                                         q_rope=q[..., 512:], k_rope=kv[..., 512:])
            else:
                o = self.backend.forward(q, kv, kv[..., :512], layer, batch)
        own = [self.tokens(request, length + more) for request, (length, more) in enumerate(zip(self.lengths, new))]
        expected = [attended(*pair, scaling) for pair in zip(q[:sum(new)].split(new), own) if len(pair[0])]
        return o.view(-1, self.heads, 512).float(), torch.cat([*expected, torch.zeros(padding, self.heads, 512)])

    def layer_of(self, scaling, batch, new, padding=0):
        layer, count = Layer(self.heads, scaling), sum(new)
        q, tokens = torch.randn(count + padding, self.heads, 192).to(DTYPE), torch.randn(count + padding, 576).to(DTYPE)
        q[count:] = tokens[count:] = torch.nan  # nobody may read it, and nothing may come of it
        with forward_context(ForwardContext(attn_backend=self.backend)):
            form, o = layer.attend(q, tokens, batch)
        own = [self.tokens(request, length + more) for request, (length, more) in enumerate(zip(self.lengths, new))]
        expected = torch.cat([layer.direct(*pair) for pair in zip(q[:count].split(new), own)])
        torch.testing.assert_close(o[:count].double(), expected, atol=0.03, rtol=0)
        assert (o[count:] == 0).all()
        return form


class Prefill(unittest.TestCase):
    def setUp(self):
        stand_ins = contextlib.ExitStack()
        self.addCleanup(stand_ins.close)

        def stand_in(*names, **options):
            return stand_ins.enter_context(mock.patch.object(*names, **options))

        stand_in(mha_batch, "create_flashinfer_kv_indices_triton", OnGrid(list_slots))
        stand_in(mha_batch, "create_chunked_prefix_cache_kv_indices", OnGrid(list_chunk))
        stand_in(forward_mha, "merge_state_v2", merge_state, create=True)  # 0.5.17
        with contextlib.suppress(ImportError):  # later ones
            from sglang.srt.mem_cache import kv_index_translator

            stand_in(kv_index_translator, "create_flashinfer_kv_indices_triton", OnGrid(list_slots), create=True)
        merges = types.ModuleType("sglang.srt.layers.attention.merge_state")  # of which 0.5.20's wants a GPU's library
        merges.merge_state = merge_state
        stand_ins.enter_context(mock.patch.dict(sys.modules, {merges.__name__: merges}))
        self.flashinfer = stand_in(flashinfer_mla_backend.FlashInferMLAAttnBackend, "init_forward_metadata")  # plans
        of_limits = hypermla.sglang.absorbed  # which tests change
        stand_in(of_limits, "_attention", functools.cache(of_limits._Attention))
        self.plans, planned = [], hypermla.MlaPrefill.plan

        def plan(its, *starts):
            self.plans.append(tuple(part.tolist() for part in starts))
            planned(its, *starts)

        stand_in(hypermla.MlaPrefill, "plan", plan)
        self.enterContext(mock.patch.dict(os.environ, SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD="1"))  # all

    def capacity(self, tokens):
        """Up to so many tokens of prefixes are decompressed at once."""
        return mock.patch.dict(os.environ, SGLANG_MAX_KV_CHUNK_CAPACITY=str(tokens))

    def test_new_tokens(self):
        """One plan for all layers, and none of FlashInfer's."""
        for page in (1, 64):
            self.plans.clear()
            self.assertEqual(Prefills([0, 0, 0], page).run([70, 1, 33], scalings=[0.07] * 3), {"one_shot"})
            self.assertEqual(self.plans, [([0, 70, 71, 104],) * 2])
        with self.capacity(50):
            self.assertEqual(Prefills([0, 0]).run([40, 20]), {"chunked_kv"})  # without any chunk
        self.flashinfer.assert_not_called()

    def test_new_tokens_behind_prefixes_that_are_decompressed_with_them(self):
        self.assertEqual(Prefills([64, 0, 7]).run([30, 5, 60], scalings=[0.07] * 2), {"one_shot"})
        self.assertEqual(self.plans, [([0, 30, 35, 95], [0, 94, 99, 166])])
        case = Prefills([100, 17, 3])
        self.assertEqual(case.run([1, 40, 1], case.step([1, 40, 1], ForwardMode.MIXED)), {"one_shot"})
        self.flashinfer.assert_not_called()

    def test_prefixes_in_chunks(self):
        """Of which some have no tokens of a request. The chunks of a step share a MlaPrefill, which is planned for the
        one at hand; a single one is planned once."""
        with self.capacity(60):  # 20 tokens of each of three requests
            self.assertEqual(Prefills([64, 0, 25]).run([30, 5, 18], scalings=[0.07] * 2), {"chunked_kv"})
        new, chunks = [0, 30, 35, 53], ([0, 20, 20, 40], [0, 20, 20, 25], [0, 20, 20, 20], [0, 4, 4, 4])
        self.assertEqual(self.plans, [(new, new)] + [(new, chunk) for chunk in chunks] * 2)
        self.plans.clear()
        with self.capacity(80):
            self.assertEqual(Prefills([40, 3]).run([30, 20], scalings=[0.07] * 3), {"chunked_kv"})
        self.assertEqual(self.plans, [([0, 30, 50], [0, 30, 50]), ([0, 30, 50], [0, 40, 43])])
        self.flashinfer.assert_not_called()

    def test_a_batch_may_be_padded(self):
        """By tokens, whose rows come to 0, and by requests without queries. New memory may hold anything."""
        self.enterContext(mock.patch.object(
            torch.Tensor, "new_empty", lambda like, *shape, dtype=None: like.new_full(
                shape if isinstance(shape[0], int) else shape[0], torch.nan, dtype=dtype)))
        with self.capacity(60):
            self.assertEqual(Prefills([33, 20]).run([30, 5], padding=5), {"chunked_kv"})
        self.assertEqual(Prefills([0, 0]).run([30, 5], padding=5), {"one_shot"})
        case = Prefills([40, 3])
        batch = case.step([30, 20], padding=2)
        batch.extend_seq_lens = torch.cat([batch.extend_seq_lens, torch.zeros(2).int()])
        batch.seq_lens = torch.cat([batch.seq_lens, torch.ones(2).long()])
        slots = [case.slots(request)[:end] for request, end in enumerate((70, 23))]
        batch.mha_one_shot_kv_indices = torch.cat([*slots, torch.zeros(2).long()])
        self.assertEqual(case.run([30, 20], batch, padding=2), {"one_shot"})
        self.assertEqual(self.plans[-1], ([0, 30, 50, 50, 50], [0, 70, 93, 94, 95]))

    def test_a_cache_in_fp8(self):
        """From which tokens are decompressed at once with their prefixes."""
        case = Prefills([64, 0, 7], fp8=True)
        self.assertEqual(case.run([30, 5, 60]), {"one_shot"})
        self.assertTrue(case.backend.is_fp8_kvcache)

    def test_steps_follow_each_other(self):
        """Also of one batch with other contents, of two batches in turns, of one backend and of two, and with layers of
        different scales."""
        case = Prefills([0, 20])
        batch = case.step([30, 5])
        case.run([30, 5], batch)
        case.lengths = [30, 25]
        vars(batch).update({**vars(case.step([7, 9])), "mha_one_shot_kv_indices": None, "num_prefix_chunks": None})
        case.run([7, 9], batch, scalings=(0.07, 0.2))
        with self.capacity(40):
            cases = [Prefills([40, 3]), Prefills([5, 50])]
            batches = [case.step([11, 12]) for case in cases]
            for case, batch in zip(cases, batches):
                case.backend.init_forward_metadata(batch)
            for case, batch in [*zip(cases, batches)] * 2:
                self.assertEqual(case.layer_of(0.07, batch, [11, 12]), "chunked_kv")
        batches = [case.step(new) for new in ([5, 6], [8, 1])]
        for batch in batches:
            case.backend.init_forward_metadata(batch)
        for batch in batches:
            self.assertEqual(case.layer_of(0.07, batch, batch.extend_seq_lens_cpu), "one_shot")

    def test_a_step_is_forgotten_with_its_batch(self):
        """Its hidden states would take memory until the next prefill."""
        case = Prefills([20])
        batch = case.step([30])
        kept = weakref.ref(batch)
        case.run([30], batch)
        del batch
        self.assertIsNone(kept())

    def test_kernels_are_loaded_at_the_start(self):
        from hypermla.sglang import prefill

        prefill.say.cache_clear()
        with (self.assertLogs("hypermla.sglang.prefill", "INFO") as logs,
              mock.patch.object(prefill, "_attention", functools.cache(prefill._Attention)),
              mock.patch.object(hypermla.MlaPrefill, "__init__", autospec=True,
                                side_effect=hypermla.MlaPrefill.__init__) as made):
            causal = lambda: [call.kwargs["causal"] for call in made.call_args_list]
            cases = [Prefills([9], page) for page in (1, 16)]  # as of a target and of its drafter
            self.assertEqual(causal(), [True, False])
            with self.capacity(10):
                cases[0].run([5], scalings=[cases[0].runner.model_config.scaling])
            self.assertEqual(causal(), [True, False])
            Prefills([9], heads=2, flags={"disable_chunked_prefix_cache": True})
            self.assertEqual(causal(), [True, False, True])
        plain = "a plain reference in fp32: this device is a CPU"
        self.assertEqual([record.getMessage() for record in logs.records],
                         [f"HyperMLA prefills over decompressed keys and values: {plain}",
                          f"HyperMLA prefills in the absorbed form: {plain}"])

    def test_the_absorbed_form(self):
        """In pages of any size, of queries in one part and in two, of a cache in FP8, too. All layers share a plan of
        each scale, and none of FlashInfer's."""
        planned = self.enterContext(mock.patch.object(hypermla.MlaDecode, "plan", autospec=True,
                                                      side_effect=hypermla.MlaDecode.plan))
        for page in (1, 16, 64):
            case = Prefills([20, 0, 64], page, fp8=page == 64)
            batch = case.step([8, 1, 30], ForwardMode.MIXED if page == 1 else ForwardMode.EXTEND)
            case.backend.init_forward_metadata(batch)
            planned.reset_mock()
            for scaling, apart in ((0.07, True), (0.07, False), (0.2, True), (0.2, True)):
                torch.testing.assert_close(*case.absorb(batch, scaling, apart), atol=0.03, rtol=0)
            self.assertEqual(planned.call_count, 2)
        self.flashinfer.assert_not_called()
        self.assertEqual(self.plans, [])

    def test_the_absorbed_form_of_long_requests(self):
        """Whose queries are several requests there."""
        with mock.patch.object(hypermla.sglang.absorbed, "PIECE", 8):
            case = Prefills([20, 0, 64, 3], heads=2)
            for new in [8, 17, 9, 0], [1, 16, 30, 2]:
                batch = case.step(new, padding=3)
                case.backend.init_forward_metadata(batch)
                torch.testing.assert_close(*case.absorb(batch, padding=3), atol=0.03, rtol=0)
                case.lengths = [length + more for length, more in zip(case.lengths, new)]

    def test_the_absorbed_form_of_two_batches_by_turns(self):
        case = Prefills([20, 3])
        batches = [case.step(new) for new in ([5, 6], [8, 1])]
        for batch in batches:
            case.backend.init_forward_metadata(batch)
        for batch in batches * 2:
            torch.testing.assert_close(*case.absorb(batch), atol=0.03, rtol=0)

    def test_the_absorbed_form_sees_what_the_device_says(self):
        """The host's prefix of a request that decodes beside prefills may be one too long, in 0.5.17."""
        case = Prefills([20, 7])
        batch = case.step([9, 1], ForwardMode.MIXED)
        batch.extend_prefix_lens_cpu = [20, 8]
        case.backend.init_forward_metadata(batch)
        torch.testing.assert_close(*case.absorb(batch), atol=0.03, rtol=0)

    def test_the_absorbed_form_between_graphs(self):
        """FlashInfer plans nothing there either, and later steps are planned anew, also of one batch."""
        case = Prefills([0, 20])
        batch = case.step([30, 5])
        with mock.patch.object(breakable, "_in_breakable_cuda_graph", True):
            for new in [30, 5], [7, 9]:
                vars(batch).update(vars(case.step(new)))
                case.backend.init_forward_metadata(batch)
                for _ in range(2):
                    torch.testing.assert_close(*case.absorb(batch), atol=0.03, rtol=0)
                case.lengths = [length + more for length, more in zip(case.lengths, new)]
        self.flashinfer.assert_not_called()
        kept = weakref.ref(batch)
        del batch
        self.assertIsNone(kept())

    def test_what_the_absorbed_form_does_not_take_is_flashinfers(self):
        ours = hypermla.sglang.absorbed
        for its, limit, most in ((hypermla.MlaDecode, "MAX_REQUESTS", 2), (ours, "TOKENS", 13),
                                 (hypermla.MlaDecode, "MAX_TOKENS", 27), (ours, "ENTRIES", 5)):
            ours._attention.cache_clear()  # which knows the limit before
            with self.subTest(limit), mock.patch.object(its, limit, most):
                case = Prefills([20, 9, 4], heads=2)
                batch, takes = case.step([8, 4, 2]), case.backend._absorbed.takes
                self.assertFalse(takes(batch))
                case.backend._absorbed.begin()
                batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = [7, 4], [20, 9]
                self.assertTrue(takes(batch))
        ours._attention.cache_clear()
        case = Prefills([20, 9, 4], heads=2)
        for changes, taken in (({}, True), ({"extend_seq_lens_cpu": None}, False),
                               ({"extend_seq_lens_cpu": [0, 0, 0]}, False),
                               ({"forward_mode": ForwardMode.DLLM_EXTEND}, False),
                               ({"forward_mode": ForwardMode.TARGET_VERIFY}, False)):
            case.backend._absorbed.begin()
            batch = case.step([8, 4, 2])
            vars(batch).update(changes)
            self.assertEqual(case.backend._absorbed.takes(batch), taken, changes)
        batch = case.step([8, 4, 2])
        case.backend.init_forward_metadata(batch)
        with mock.patch.object(flashinfer_mla_backend.FlashInferMLAAttnBackend, "forward_extend") as flashinfers:
            for rows, calls in (14, 0), (13, 1):  # a layer's, fewer than planned
                q, kv = torch.zeros(rows, 2, 576, dtype=DTYPE), torch.zeros(rows, 1, 576, dtype=DTYPE)
                case.backend.forward_extend(q[..., :512], kv[..., :512], kv[..., :512], case.layer, batch,
                                            save_kv_cache=False, q_rope=q[..., 512:], k_rope=kv[..., 512:])
                self.assertEqual(flashinfers.call_count, calls)

    def test_flashinfer_has_what_is_left(self):
        """It plans when its first layer comes, once."""
        case = Prefills([20, 9])
        case.backend._absorbed = None
        batch, runs = case.step([8, 4]), mock.Mock(side_effect=lambda q, q_rope, ckv, kpe, out: out.zero_())
        case.backend.forward_metadata = types.SimpleNamespace(use_ragged=False,
                                                              prefill_wrapper=types.SimpleNamespace(run=runs))
        q, kv = torch.zeros(12, HEADS, 576, dtype=DTYPE), torch.zeros(12, 1, 576, dtype=DTYPE)
        for layers in 2, 3:
            case.backend.init_forward_metadata(batch)
            self.flashinfer.assert_not_called()
            for _ in range(layers):
                case.backend.forward(q, kv, kv[..., :512], case.layer, batch)
            self.flashinfer.assert_called_once_with(batch)
            self.assertEqual(runs.call_count, layers)
            self.flashinfer.reset_mock()
            runs.reset_mock()
        with mock.patch.object(breakable, "_in_breakable_cuda_graph", True):  # between graphs
            case.backend.init_forward_metadata(batch)
            self.flashinfer.assert_called_once_with(batch)
            case.backend.forward(q, kv, kv[..., :512], case.layer, batch)
        self.flashinfer.assert_called_once_with(batch)
        self.assertEqual(self.plans, [])

    def test_what_a_plan_does_not_take_is_flashinfers(self):
        """With a plan of its own for prefixes, at once and in chunks."""
        def flashinfers(q, k, v, layer, batch):
            o = q[..., :128].contiguous()
            return (o, q[..., 0].float().contiguous()) if batch.mha_return_lse else o

        for limit, changes in (("MAX_REQUESTS", {}), ("MAX_QUERY_TOKENS", {}), ("MAX_TOKENS", {}),
                               (None, {"logit_cap": 30.0})):
            for capacity, calls in (1000, 1), (40, 3):
                with (self.subTest(limit=limit, capacity=capacity), self.capacity(capacity),
                      mock.patch.object(hypermla.MlaPrefill, limit or "MAX_TOKENS", 2 if limit else 1000)):
                    case = Prefills([20, 9, 4])
                    batch, layer = case.step([8, 4, 2]), Layer(HEADS)
                    vars(layer.attn_mha).update(changes)
                    chunks = case.backend.mha_chunk_kv_cache = mock.Mock()
                    chunks.forward.side_effect = flashinfers
                    case.backend.init_forward_metadata(batch)
                    with forward_context(ForwardContext(attn_backend=case.backend)):
                        for _ in range(2):
                            layer.attend(torch.zeros(14, HEADS, 192).to(DTYPE), torch.zeros(14, 576).to(DTYPE), batch)
                    self.flashinfer.assert_called_once_with(batch)
                    chunks.update_wrapper.assert_called_once_with(batch, False)
                    self.assertEqual((chunks.forward.call_count, self.plans), (2 * calls, []))
                    self.flashinfer.reset_mock()

    def test_only_what_the_plan_says_is_taken(self):
        case = Prefills([20, 9])
        batch, layer = case.step([8, 4]), RadixAttention(HEADS, 192, 0.1, HEADS, 0, v_head_dim=128)
        batch.mha_one_shot = True
        q, k = torch.zeros(12, HEADS, 192, dtype=DTYPE), torch.zeros(41, HEADS, 192, dtype=DTYPE)
        takes = case.backend._prefill.takes
        self.assertTrue(takes(q, k, layer, batch))
        for given in (q[:11], k), (q, k[:40]), (q.half(), k), (q, None):
            self.assertFalse(takes(*given, layer, batch))
        batch.mha_one_shot = False
        self.assertTrue(takes(q, k[:12], layer, batch))
        self.assertFalse(takes(q, k[:11], layer, batch))
        for name, other in ("head_dim", 576), ("v_head_dim", 192), ("tp_k_head_num", 1), ("tp_q_head_num", 8):
            with mock.patch.object(layer, name, other):
                self.assertFalse(takes(q, k, layer, batch), name)
        for asked in {"save_kv_cache": True}, {"save_kv_cache": False, "q_rope": q}:  # other forms
            with mock.patch.object(flashinfer_mla_backend.FlashInferMLAAttnBackend, "forward_extend") as flashinfers:
                o = case.backend.forward_extend(q, k, k[..., :128], layer, batch, **asked)
            self.assertIs(o, flashinfers.return_value)

    def test_where_flashinfer_does_all(self):
        from hypermla.sglang import backend

        case = Prefills([9])
        here = lambda: {make(case.backend, case.runner) is not None for make in (backend._prefill, backend._absorbed)}
        self.assertEqual(here(), {True})
        its = case.backend.__class__(case.runner, skip_prefill=True)
        self.assertEqual((its._prefill, its._absorbed), (None, None))
        case.runner.prefill_attention_backend_str = "fa3"
        self.assertEqual(here(), {False})
        case.runner.prefill_attention_backend_str = "hypermla"
        self.assertEqual(here(), {True})
        with mock.patch.object(torch.cuda, "get_device_capability", lambda device: (10, 0)):
            case.backend.req_to_token = types.SimpleNamespace(device=torch.device("cuda"))
            self.assertEqual(here(), {False})
        with (mock.patch.object(backend.decompressed, "Prefill", side_effect=hypermla.Error("no compiler")),
              mock.patch.object(backend, "Absorbed", side_effect=hypermla.Error("no, none")),
              self.assertLogs("hypermla.sglang.backend", "WARNING") as logs):
            its = Prefills([9]).backend
        self.assertEqual((its._prefill, its._absorbed), (None, None))
        self.assertIn("HyperMLA leaves prefill over decompressed keys and values to FlashInfer: no compiler",
                      logs.output[0])
        self.assertIn("HyperMLA leaves prefill in the absorbed form to FlashInfer: no, none", logs.output[1])
        self.assertIsNone(Case(16, [9]).backend._prefill)  # values of 512 columns
        case = Prefills([9], flags={"flashinfer_mla_disable_ragged": True})
        self.assertIsNone(case.backend._prefill)
        self.assertIsNotNone(case.backend._absorbed)
        case.backend.init_forward_metadata(case.step([5]))
        self.flashinfer.assert_not_called()
        case.backend._absorbed = None
        case.backend.init_forward_metadata(case.step([5]))
        self.flashinfer.assert_called_once()
        with mock.patch.object(flashinfer_mla_backend.FlashInferMLAAttnBackend, "init_mha_chunk_metadata") as chunks:
            case.backend.init_mha_chunk_metadata("batch")
        chunks.assert_called_once_with("batch", False)


class Plugin(unittest.TestCase):
    def test_sglang_is_as_recorded(self):
        present = sglang_interface.of_engine()
        recorded = sglang_interface.recorded()
        self.assertIn(present["version"], list(recorded), "sglang_interface.py records it; see what differs")
        self.assertEqual(present, recorded[present["version"]])

    def test_sglang_knows_the_name(self):
        hypermla.sglang.register()  # again
        self.assertEqual(server_args.ATTENTION_BACKEND_CHOICES.count("hypermla"), 1)
        self.assertIn("hypermla", server_args.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS)

    def test_pages_have_64_tokens_where_none_are_named(self):
        from sglang.srt.arg_groups import overrides

        hypermla.sglang.register()
        plugins.HookRegistry.apply_hooks()
        view = types.SimpleNamespace(page_size=None, attention_backend="hypermla", decode_attention_backend=None)
        self.assertEqual(overrides._page_size_default(view), {"page_size": 64})
        view.attention_backend = "fa3"
        self.assertEqual(overrides._page_size_default(view), {"page_size": 1})
        view.page_size, view.attention_backend = 16, "hypermla"
        self.assertEqual(overrides._page_size_default(view), {})

    def test_as_many_requests_run_as_a_plan_takes(self):
        from sglang.srt.mem_cache import kv_cache_configurator

        hypermla.sglang.register()
        plugins.HookRegistry.apply_hooks()
        limit = kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs
        schedule = types.SimpleNamespace(max_running_requests=None)
        for backend, most in ("hypermla", 2048), ("fa3", 4096):
            its = types.SimpleNamespace(
                model_config=types.SimpleNamespace(context_len=1024), mambaish_config=None, attn_dp_size=1,
                ps=types.SimpleNamespace(attn_dp_size=1),
                server_args=types.SimpleNamespace(attention_backend=None, decode_attention_backend=backend))
            with mock.patch.object(kv_cache_configurator, "get_schedule", lambda: schedule):
                self.assertEqual(limit(its, 1 << 20), most)

    def test_layers_join_queries_that_have_a_factor_of_their_own(self):
        from sglang.srt.models.deepseek_common import utils

        runner = Runner(64, 1)
        runner.model_config.hf_config = types.SimpleNamespace(llama_4_scaling={"beta": 0.1})
        with mock.patch.object(utils, "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS", ["fa3", "hypermla"]) as names:
            for _ in range(2):
                attention_registry.ATTENTION_BACKENDS["hypermla"](runner)
            self.assertEqual(names, ["fa3"])

    def test_layers_hand_queries_in_two_parts(self):
        from sglang.srt.models.deepseek_common import utils

        Case(64, [9])
        self.assertIn("hypermla", utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS)

    def test_prefixes_are_decompressed_where_it_pays(self):
        """By the new tokens behind them, but for what the environment says, and what SGLang does not decompress."""
        one_shot, chunked, absorbed = (AttnForwardMethod.MHA_ONE_SHOT, AttnForwardMethod.MHA_CHUNKED_KV,
                                       AttnForwardMethod.MLA)

        plain, of_fp8 = Case(64, [9]).backend, Case(64, [9], fp8=True).backend

        def form(prefixes, new, layer=Layer(HEADS), mode=ForwardMode.EXTEND, backend=plain):
            batch = types.SimpleNamespace(
                forward_mode=mode, extend_prefix_lens_cpu=prefixes, extend_seq_lens_cpu=new, attn_cp_metadata=None,
                seq_lens_cpu=[sum(pair) for pair in zip(prefixes or [], new)], get_max_chunk_capacity=lambda: 131072)
            with forward_context(ForwardContext(attn_backend=backend)):
                return attention_backend_handler.AttentionBackendRegistry.get_handler("hypermla")(layer, batch)

        with mock.patch.dict(os.environ):
            os.environ.pop("SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD", None)
            for prefixes, new, expected in (
                    ([0, 0], [1, 7], one_shot), ([2048], [512], one_shot), ([2048], [128], absorbed),
                    ([8192] * 8, [16] * 8, absorbed), ([131072], [512], chunked), ([8192], [276], one_shot),
                    ([8192], [275], absorbed), ([64] * 9, [160] * 9, one_shot),
                    ([0, 8192], [512, 1], absorbed), ([0, 512], [640, 1], one_shot)):
                self.assertIs(form(prefixes, new), expected, (prefixes, new))
            self.assertIs(form([2048], [512], mode=ForwardMode.TARGET_VERIFY), absorbed)
            few = (([8192], [128]), ([2048] * 4, [1] * 4))
            for of_few in absorbed, one_shot:  # where FlashInfer would convert all of a cache in FP8
                for prefixes, new, expected in (([2048], [512], one_shot), ([2048], [128], absorbed),
                                                *((*lengths, of_few) for lengths in few)):
                    with mock.patch.object(hypermla.sglang.absorbed.Absorbed, "takes", lambda *_: of_few is absorbed):
                        self.assertIs(form(prefixes, new, backend=of_fp8), expected, (prefixes, new))
            of_fp8._absorbed = None
            self.assertIs(form([8192], [128], backend=of_fp8), one_shot)
            layer = Layer(HEADS)
            layer.disable_chunked_prefix_cache = True
            self.assertIs(form([2048], [512], layer), absorbed)
            self.assertIs(form([2048], [512], Layer(HEADS)), one_shot)
            os.environ["SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD"] = "1"
            self.assertIs(form([8192], [1], Layer(HEADS)), one_shot)
            layer = Layer(HEADS)
            layer.chunked_prefix_cache_threshold = 8192
            self.assertIs(form([2048], [512], layer), absorbed)


    def test_large_steps_leave_graphs_of_the_absorbed_form(self):
        """Where the command line leaves the graphs of prefill to SGLang."""
        backend = Prefills([9], heads=128).backend

        def captured(new, prefixes, of=backend):
            batch = types.SimpleNamespace(extend_seq_lens_cpu=new, extend_prefix_lens_cpu=prefixes, extend_lens=new,
                                          prefix_lens=prefixes)
            answers = {bool(of.can_run_prefill_cuda_graph(batch)), bool(of.vote_prefill_cuda_graph(batch))}
            self.assertEqual(len(answers), 1)
            return answers.pop()

        with mock.patch.dict(os.environ):
            os.environ.pop("SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD", None)
            for new, prefixes, stays in (
                    ([2047], [0], True), ([2048], [0], False), ([512] * 8, [0] * 8, False), ([2048], [8192], False),
                    ([128] * 16, [8192] * 16, True), (None, None, True), ([], [], True)):
                self.assertIs(captured(new, prefixes), stays, (new, prefixes))
            self.assertIs(captured([8192], [0], Prefills([9], heads=16).backend), True)
            self.assertIs(captured([8192], [0], Case(64, [9], heads=128).backend), True)  # does not prefill
            for flag, value in (("cuda_graph_max_bs_prefill", 8192), ("cuda_graph_backend_prefill", "breakable"),
                                ("cuda_graph_bs_prefill", [8192])):
                with get_exec().graph.override(**{flag: value}):
                    self.assertIs(captured([2048], [0]), True, flag)
            backend.enable_chunk_kv = False
            self.assertIs(captured([2048], [8192]), True)
            self.assertIs(captured([2048], [0]), False)
            backend.enable_chunk_kv = True
            os.environ["SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD"] = "1"
            self.assertIs(captured([2048], [0]), True)


class Sparse(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        for listed in "", "hypermla", "hypermla, hypermla_sparse":
            assert not any(name.startswith(hypermla.sglang.SPARSE) for name in plugins.HookRegistry._hooks), listed
            with mock.patch.dict(os.environ, SGLANG_PLUGINS=listed):
                hypermla.sglang.register_sparse()
        plugins.HookRegistry.apply_hooks()

    def setUp(self):
        from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

        self.backend = object.__new__(DeepseekSparseAttnBackend)  # what its methods read
        self.backend.real_page_size, self.backend.dsa_kv_cache_store_fp8, self.backend.kv_cache_dim = 64, True, 656
        random = torch.Generator().manual_seed(4)
        self.rows = torch.randn(4 * 64, 576, generator=random).bfloat16()
        self.counts = [40, 9, 0]
        self.slots = torch.randint(0, len(self.rows), (3, 40), generator=random, dtype=torch.int32)
        for row, count in zip(self.slots, self.counts):
            row[count:] = -1
        self.q = torch.randn(3, HEADS, 576, generator=random).bfloat16()
        self.lengths = torch.tensor(self.counts, dtype=torch.int32)

    def agree(self, o, tokens):
        for row, q, slots, count in zip(o, self.q, self.slots, self.counts):
            expected = attended(q[None], tokens[slots[:count].long()], 0.05)[0] if count else torch.zeros(HEADS, 512)
            self.assertTrue(torch.allclose(row.float(), expected, atol=0.02))

    def test_rows_of_slots(self):
        for lengths in self.lengths, None, torch.zeros(8, dtype=torch.int32):  # of a batch that is padded
            o = self.backend._forward_flashmla_sparse(q_all=self.q, kv_cache=self.rows[:, None], v_head_dim=512,
                                                      page_table_1=self.slots, sm_scale=0.05, topk_length=lengths)
            self.agree(o, self.rows)
        sinks = torch.tensor([-1e4, 1e4] * (HEADS // 2))  # of every second head, which takes all
        own = self.backend._forward_flashmla_sparse(q_all=self.q, kv_cache=self.rows[:, None], v_head_dim=512,
                                                    page_table_1=self.slots, sm_scale=0.05, attn_sink=sinks)
        self.assertTrue(torch.equal(own[:, ::2], o[:, ::2]) and not own[:, 1::2].any())

    def test_kernels_are_loaded_at_the_start(self):
        from hypermla.sglang import sparse

        its = types.SimpleNamespace(device="cpu", num_q_heads=HEADS, dsa_index_topk=64, dsa_kv_cache_store_fp8=True)
        made = []
        with self.assertLogs("hypermla.sglang.sparse", "INFO") as logs:
            for _ in range(2):  # as of a drafter's steps
                sparse.initialise(lambda *given, **named: made.append((given, named)), its, 1, two=2)
        self.assertEqual(made, [((its, 1), {"two": 2})] * 2)
        self.assertEqual(sorted("FP8" in line for line in logs.output), [False, True])

    def test_other_columns_are_left_to_sglang(self):
        from hypermla.sglang import sparse

        ever, q = (lambda its, **given: sorted(given)), self.q[..., :512]
        self.assertIn("page_table_1", sparse.forward_flashmla_sparse(
            ever, self.backend, q_all=q, kv_cache=None, v_head_dim=512, page_table_1=None, sm_scale=1.0))
        self.assertIn("metadata", sparse.forward_flashmla_kv(
            ever, self.backend, q_all=q, kv_cache=None, v_head_dim=512, sm_scale=1.0, metadata=None, page_table_1=None,
            layer=types.SimpleNamespace(head_dim=512)))

    def test_the_choice_for_decoding_over_16_bits(self):
        both = torch.empty(2, *self.rows.shape).bfloat16()  # of two layers
        both[:] = self.rows
        rope = torch.cat([self.q[..., :128], self.q[..., 512:]], -1)[..., 128:]
        self.backend.forward_metadata = types.SimpleNamespace()
        lengths = torch.cat([self.lengths, torch.full((5,), 40, dtype=torch.int32)])  # of a batch that is padded
        given = dict(q_rope=rope, v_head_dim=512, q_nope=self.q[..., :512], page_table=self.slots,
                     cache_seqlens=lengths, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=1, sm_scale=0.05,
                     logit_cap=0.0, page_size=1)
        with mock.patch.object(hypermla.MlaDecode, "plan", autospec=True,
                               side_effect=hypermla.MlaDecode.plan) as plan:
            for count in 1, 2:  # passes
                for rows in both:
                    self.agree(self.backend._forward_fa3(kv_cache=rows[:, None], **given), self.rows)
                self.assertEqual(plan.call_count, count)
        # A batch that was padded behind its plan has fewer lengths than lists, whose ends say -1.
        self.backend.forward_metadata = types.SimpleNamespace()
        padded = given | {"cache_seqlens": self.lengths[:1], "page_table": self.slots.masked_fill(
            torch.arange(self.slots.shape[1]) >= self.lengths[:, None], -1)}
        self.agree(self.backend._forward_fa3(kv_cache=self.rows[:, None], **padded), self.rows)
        self.backend.forward_metadata = types.SimpleNamespace()
        for other in {"logit_cap": 30.0}, {"max_seqlen_q": 2}, {"kv_cache": self.rows.half()[:, None]}:
            with self.subTest(other), mock.patch.object(sys.modules[type(self.backend).__module__],
                                                        "flash_attn_with_kvcache") as flash_attention:
                self.backend.num_splits, self.backend.dsa_index_kpool = 0, 1
                o = self.backend._forward_fa3(**{"kv_cache": self.rows[:, None], **given, "cache_seqlens": self.lengths,
                                                 **other})
                self.assertIs(o, flash_attention.return_value)

    def caches(self):
        """(cache, what its tokens are): in FP8, and in 16 bits."""
        cache = torch.zeros(4, 64, 656, dtype=torch.uint8)
        hypermla.append(self.rows, cache, torch.arange(len(self.rows)))
        packed = cache.view(-1, 656)
        latent = packed[:, :512].contiguous().view(torch.float8_e4m3fn).float()
        latent *= packed[:, 512:528].contiguous().view(torch.float32).repeat_interleave(128, 1)
        return (cache, torch.cat([latent, self.rows[:, 512:].float()], 1)), (self.rows, self.rows)

    def test_decodes_take_queries_in_two_parts(self):
        backend, module = self.backend, sys.modules[type(self.backend).__module__]
        backend.hisparse_coordinator, backend.use_fused_topk, backend.dsa_index_kpool = None, True, 1
        backend._get_fused_topk_page_table = lambda lists: lists
        layer = types.SimpleNamespace(tp_q_head_num=HEADS, head_dim=576, v_head_dim=512, scaling=0.05, logit_cap=0.0,
                                      layer_id=0, is_cross_attention=False)
        parts = self.q[..., :512].contiguous(), torch.cat([self.q[..., :128], self.q[..., 512:]], -1)[..., 128:]
        caches = self.caches()
        for kernels, (kept, tokens) in ("flashmla_kv", caches[0]), ("flashmla_sparse", caches[1]):
            backend.dsa_decode_impl, backend.dsa_kv_cache_store_fp8 = kernels, kept is caches[0][0]
            step = backend.forward_metadata = types.SimpleNamespace(
                dsa_cache_seqlens_int32=self.lengths, dsa_cu_seqlens_q=None, dsa_cu_seqlens_k=None, dsa_max_seqlen_q=1)
            rows = kept.view(len(self.rows), 1, -1)
            backend.kv_cache_dim = rows.shape[-1]
            backend.token_to_kv_pool = types.SimpleNamespace(get_key_buffer=lambda layer_id: rows)
            for q, rope in parts, (self.q, None):
                with mock.patch.object(module, "concat_mla_absorb_q_general") as join:
                    self.agree(backend.forward_decode(q, None, None, layer, None, q_rope=rope, topk_indices=self.slots),
                               tokens)
                join.assert_not_called()
                self.assertEqual(backend.dsa_decode_impl, kernels)
            step.dsa_max_seqlen_q = 2  # which forward_fa3() does not take
            with mock.patch.object(type(backend), f"_forward_{kernels}") as other:
                o = backend.forward_decode(parts[0], None, None, layer, None, q_rope=parts[1], topk_indices=self.slots)
            self.assertIs(o, other.return_value)

    def test_pages_in_fp8_and_in_16_bits(self):
        caches = self.caches()
        cache = caches[0][0]
        for kept, tokens in caches:
            self.backend.dsa_kv_cache_store_fp8 = kept is cache
            self.backend.kv_cache_dim = kept.shape[-1]
            metadata = types.SimpleNamespace(dsa_cache_seqlens_int32=self.lengths)
            with mock.patch.object(hypermla.MlaDecode, "plan", autospec=True,
                                   side_effect=hypermla.MlaDecode.plan) as plan:
                for layer_id in (3, 4, 3, 4):  # two passes, as when a graph is recorded behind a first run
                    layer = types.SimpleNamespace(tp_q_head_num=HEADS, head_dim=576, layer_id=layer_id)
                    o = self.backend._forward_flashmla_kv(q_all=self.q, kv_cache=kept, v_head_dim=512, sm_scale=0.05,
                                                          layer=layer, metadata=metadata, page_table_1=self.slots)
                    self.agree(o[:, 0], tokens)
            self.assertEqual(plan.call_count, 2)

    def test_flash_mlas_plans_are_made_once(self):
        rows, counted = lambda count: torch.zeros(count, dtype=torch.int32), []

        def planned(cache_seqlens, **others):
            counted.append(len(cache_seqlens))
            return torch.ones(132, 8, dtype=torch.int32), torch.arange(len(cache_seqlens) + 1)

        self.backend.flashmla_kv_num_q_heads, self.backend.dsa_index_topk, self.backend.qk_rope_head_dim = 128, 2048, 64
        with contextlib.ExitStack() as stack:
            for name in "sgl_kernel.flash_mla", "sglang.kernels.ops.attention.flash_mla_interface":
                stack.enter_context(mock.patch.object(sys.modules[name], "get_mla_metadata", planned))
            # Anew for more requests than before, and for another number of queries of a request.
            for count, queries in (4, 1), (2, 1), (4, 1), (6, 1), (5, 1), (2, 3), (1, 3):
                kept = self.backend._compute_flashmla_metadata(cache_seqlens=rows(count), seq_len_q=queries)
                self.assertEqual((kept.flashmla_metadata.shape, kept.num_splits.shape), ((132, 8), (count + 1,)))
                kept.copy_(self.backend._compute_flashmla_metadata(cache_seqlens=rows(count), seq_len_q=queries))
            self.assertEqual(counted, [4, 6, 2])
            with mock.patch.object(self.backend, "qk_rope_head_dim", 0):  # whose layers FlashMLA's kernels attend
                self.backend._compute_flashmla_metadata(cache_seqlens=rows(3), seq_len_q=1)
            self.assertEqual(counted, [4, 6, 2, 3])


class DropIns(unittest.TestCase):
    """For FlashMLA and FlashInfer as SGLang brings them, which cannot be imported without a GPU."""

    def functions(self, distribution, begin):
        """{class or None: {name: its parameters}} of a package's modules whose paths begin so, overloads last."""
        try:
            files = importlib.metadata.files(distribution)
        except importlib.metadata.PackageNotFoundError:
            self.skipTest(f"this SGLang comes without {distribution}")
        found = {}
        for file in [file for file in files if str(file).startswith(begin) and file.suffix == ".py"]:
            module = ast.parse(file.read_text())
            for of in [module, *(node for node in module.body if isinstance(node, ast.ClassDef))]:
                found.setdefault(getattr(of, "name", None), {}).update({
                    node.name: [one.arg for one in node.args.args + node.args.kwonlyargs]
                    for node in of.body if isinstance(node, ast.FunctionDef)})
        return found

    def takes(self, own, given, more=()):
        kinds = inspect.signature(own).parameters.values()
        if not more and any(kind.kind is inspect.Parameter.VAR_KEYWORD for kind in kinds):
            return  # anything
        self.assertLessEqual(set(given), {kind.name for kind in kinds} | set(more), own.__qualname__)

    def test_flash_mla(self):
        theirs = self.functions("sgl-flash-mla", "flash_mla/flash_mla_interface")[None]
        for name in "get_mla_metadata", "get_mla_decoding_metadata", "flash_mla_with_kvcache", "flash_mla_sparse_fwd":
            self.takes(getattr(flash_mla, name), theirs[name])

    def test_flashinfer(self):
        own, name = hypermla.compat.flashinfer, "BatchMLAPagedAttentionWrapper"
        theirs = self.functions("flashinfer-python", "flashinfer/mla")[name]
        for method in "__init__", "plan", "run":
            self.takes(getattr(getattr(own, name), method), theirs[method],
                       [*own._SUPPORTED, *own._ANY] if method == "plan" else ())


class Benchmark(unittest.TestCase):
    def test_its_models_are_what_sglang_takes_them_for(self):
        from safetensors import safe_open

        for words, kind, drafts, lists in (([], "DeepseekV3ForCausalLM", 0, False),
                                           (["--engines", "fa3/64/3"], "DeepseekV3ForCausalLM", 1, False),
                                           (["--sparse"], "DeepseekV32ForCausalLM", 0, True)):
            with self.subTest(words), tempfile.TemporaryDirectory() as work:
                directory = bench_sglang.write_model(
                    bench_sglang.parse([*words, "--layers=1", "--heads=2", f"--work={work}"]), 2)
                config = json.loads(pathlib.Path(directory, "config.json").read_text())
                self.assertEqual((config["architectures"], config["num_nextn_predict_layers"]), ([kind], drafts))
                with safe_open(pathlib.Path(directory, "model.safetensors"), "pt") as weights:
                    names = set(weights.keys())
                self.assertEqual({int(name.split(".")[2]) for name in names if ".layers." in name},
                                 set(range(1 + drafts)))
                self.assertEqual("model.layers.0.self_attn.indexer.wq_b.weight" in names, lists)

    def test_its_plugin_notes_the_steps_of_the_scheduler(self):
        """With events that take no GPU."""
        from sglang.srt.model_executor.runner import decode_cuda_graph_runner as runners
        from sglang.srt.plugins.hook_registry import HookRegistry

        clock = itertools.count()

        class Event:
            def record(self):
                self.time = next(clock)

            def query(self):
                return True

            def elapsed_time(self, later):
                return later.time - self.time

        planned = []
        backend = types.SimpleNamespace(init_forward_metadata_out_graph=planned.append)
        runner = types.SimpleNamespace(attn_backend=backend)

        def execute(self, forward_batch, pp_proxy_tensors=None):
            self.attn_backend.init_forward_metadata_out_graph(forward_batch)
            torch.cuda.CUDAGraph.replay(None)
            return "logits"

        with (tempfile.TemporaryDirectory() as directory, mock.patch.object(torch.cuda, "Event", lambda **_: Event()),
              mock.patch.object(torch.cuda.CUDAGraph, "replay", lambda graph: None),
              mock.patch.object(runners.DecodeCudaGraphRunner, "execute", execute),
              mock.patch.dict(os.environ, {bench_sglang.STEPS: directory + "/steps"})):
            bench_sglang.watch()
            HookRegistry.apply_hooks()
            for requests in (3, 3, 1):
                batch = types.SimpleNamespace(batch_size=requests)
                self.assertEqual(runners.DecodeCudaGraphRunner.execute(runner, batch, pp_proxy_tensors=None), "logits")
            steps = [json.loads(line) for line in pathlib.Path(directory, "steps").read_text().splitlines()]
        self.assertEqual([(step["requests"], step["step_ms"], step["graph_ms"]) for step in steps],
                         [(3, 3, 1), (3, 3, 1), (1, 3, 1)])
        self.assertEqual(len(planned), 3)


if __name__ == "__main__":
    unittest.main()
