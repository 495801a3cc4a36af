"""The plug-in for vLLM against vLLM's own base classes, on a CPU: its builder divides batches, plans and attends
layers. Skipped (77) where vLLM is not installed; `./test --engines` installs it."""

import copy
import gc
import importlib.util
import itertools
import math
import os
import pathlib
import sys
import types
import unittest
import weakref
from unittest import mock

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "cli")]
import vllm_interface
from support import BUILD

if importlib.util.find_spec("vllm") is None:
    print("vLLM is not installed")
    sys.exit(77)

sys.path.insert(0, str(BUILD / "python"))
import hypermla.vllm
from hypermla import MlaDecode, MlaPrefill

assert not {"vllm", "torch"} & set(sys.modules), "the package imports an engine or PyTorch before it is used"

import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.model_executor.layers.attention import mla_attention
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.spec_decode.utils import extend_all_queries_by_N


hypermla.vllm.register()
hypermla.vllm.register()
SPARSE = [AttentionBackendEnum[name] for name in hypermla.vllm.REPLACED]
Sparse = AttentionBackendEnum.FLASHMLA_SPARSE
Backend = AttentionBackendEnum.CUSTOM.get_class()
Builder, Impl = Backend.get_builder_cls(), Backend.get_impl_cls()

HEADS, NOPE, LATENT, ROPE, MODEL_TOKENS = 4, 128, 512, 64, 512
SCALE = 1 / math.sqrt(NOPE + ROPE)


def config_of(drafts=0, graphs=CUDAGraphMode.FULL_AND_PIECEWISE, shards=1, interleave=1, method="mtp",
              cache="auto", requests=8, largest=32, sizes=None, executor="uni", **asked):
    """What the classes ask a VllmConfig for. largest: tokens of a graph; sizes: of graphs; asked: options of ours."""
    model = types.SimpleNamespace(
        dtype=torch.bfloat16, max_model_len=MODEL_TOKENS, get_num_attention_heads=lambda parallel: HEADS,
        get_num_layers=lambda parallel: 2, get_total_num_hidden_layers=lambda: 2,
        get_head_size=lambda: LATENT + ROPE, use_mla=True,
        hf_text_config=types.SimpleNamespace(q_lora_rank=None, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE,
                                             qk_rope_head_dim=ROPE, v_head_dim=128))
    return types.SimpleNamespace(
        model_config=model, use_v2_model_runner=False,
        parallel_config=types.SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=shards,
                                              cp_kv_cache_interleave_size=interleave,
                                              distributed_executor_backend=executor),
        compilation_config=types.SimpleNamespace(cudagraph_mode=graphs, max_cudagraph_capture_size=largest,
                                                 cudagraph_capture_sizes=sizes or [1, 2, 4, 8, 16, largest],
                                                 static_forward_context={}),
        cache_config=types.SimpleNamespace(cache_dtype=cache, block_size=16, enable_prefix_caching=True),
        scheduler_config=types.SimpleNamespace(max_num_seqs=requests, max_num_batched_tokens=max(256, 8 * requests),
                                               enable_chunked_prefill=True),
        additional_config=asked, device_config=types.SimpleNamespace(device=torch.device("cpu")),
        speculative_config=types.SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False, method=method,
                                                 attention_backend=None, kv_cache_dtype=None,
                                                 draft_model_config=model)
        if drafts else None,
        attention_config=types.SimpleNamespace(use_prefill_query_quantization=False, mla_prefill_backend=None,
                                               backend=AttentionBackendEnum.CUSTOM))


def reasons(capability=(9, 0), **changed):
    """Why the backend is refused; changed: what is asked for."""
    asked = dict(head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=64, use_mla=True,
                 has_sink=False, use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False,
                 attn_type="decoder", use_batch_invariant=True)
    return " ".join(Backend.validate_configuration(device_capability=DeviceCapability(*capability),
                                                   **{**asked, **changed}))


def impl_of(config, kv_b_proj=None, nope=NOPE, value=128):
    with set_current_vllm_config(config):
        return Impl(HEADS, LATENT + ROPE, SCALE, 1, None, None, config.cache_config.cache_dtype, None, "decoder", None,
                    q_lora_rank=None, kv_lora_rank=LATENT, qk_nope_head_dim=nope, qk_rope_head_dim=ROPE,
                    qk_head_dim=nope + ROPE, v_head_dim=value, kv_b_proj=kv_b_proj)


class NoPrefill:
    """In place of a backend of prefills, where there are none."""

    def clone(self):
        return self

    def get_name(self):
        return "none"

    def prepare_metadata(self, metadata):
        pass


def dcp_manager():
    """What the builder wants, from 0.27 on, of a layer whose context is shared. It serves prefills."""
    manager = getattr(mla_attention, "MLADCPManager", None)
    return manager and mock.create_autospec(manager, instance=True)


def builder_of(config, block=16, heads=HEADS, kind=Builder, impl=None, prefill=None,
               layers=mla_attention.MLAAttention):
    names = ["layer.0", "layer.1"]
    for name in names:
        layer = config.compilation_config.static_forward_context[name] = layers.__new__(layers)
        vars(layer).update(
            prefill_backend=prefill or NoPrefill(), scale=SCALE, num_heads=heads, q_lora_rank=None, kv_lora_rank=LATENT,
            qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=128, dcp_manager=dcp_manager(),
            impl=impl or types.SimpleNamespace(num_heads=heads), attn_backend=Backend)
    dtype = torch.bfloat16 if config.cache_config.cache_dtype == "auto" else torch.uint8
    spec = types.SimpleNamespace(block_size=block, dtype=dtype)
    return kind(spec, names, config, torch.device("cpu"))


class Batch:
    """A step: its requests' tokens, the new ones included, and their queries. `pad`: requests of no queries behind
    them, and rows that belong to none."""

    def __init__(self, tokens, queries, block=16, pad=0, rows=0, causal=True):
        self.tokens, self.queries, self.block = list(tokens) + [0] * pad, list(queries) + [0] * pad, block
        self.rows = rows or sum(queries)
        self.causal = causal
        generator = torch.Generator().manual_seed(len(tokens))
        self.width = MODEL_TOKENS // block
        self.blocks = len(self.tokens) * self.width + 1
        pages = torch.randperm(self.blocks - 1, generator=generator).to(torch.int32) + 1
        self.table = pages[:len(self.tokens) * self.width].view(len(self.tokens), self.width).clone()
        for row, length in zip(self.table, self.tokens):
            row[-(-length // block):] = 2**31 - 1  # nothing follows these
        self.generator = generator

    def common(self):
        starts = torch.tensor([0] + self.queries).cumsum(0).to(torch.int32)
        lengths = torch.tensor(self.tokens, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts.clone(), seq_lens=lengths, num_reqs=len(self.tokens),
            num_actual_tokens=self.rows, max_query_len=max(self.queries), max_seq_len=MODEL_TOKENS,
            block_table_tensor=self.table, slot_mapping=torch.zeros(self.rows, dtype=torch.int64),
            causal=self.causal, **{"seq_lens_cpu_upper_bound": lengths.clone()})

    def layer(self):
        """Queries as vLLM's layer gives them, transposed and as a part of wider rows; a cache among other layers'."""
        def normal(*shape):
            return torch.randn(shape, generator=self.generator).bfloat16()

        latent = normal(HEADS, self.rows, LATENT).transpose(0, 1)
        rope = normal(self.rows, HEADS, NOPE + ROPE)[..., NOPE:]
        cache = normal(self.blocks, 3, self.block, LATENT + ROPE)[:, 1]
        return (latent, rope), cache

    def expected(self, q, cache):
        q = torch.cat(q, -1).float() if isinstance(q, tuple) else q.float()
        o = torch.zeros(self.rows, HEADS, LATENT)
        lse = torch.full((self.rows, HEADS), -math.inf)
        row = 0
        for request, (length, queries) in enumerate(zip(self.tokens, self.queries)):
            pages = self.table[request][:-(-length // self.block)].long()
            rows = cache[pages].float().reshape(-1, LATENT + ROPE)[:length]
            for i in range(queries):
                seen = rows[:length - queries + i + 1] if self.causal else rows
                scores = q[row] @ seen.T * SCALE
                o[row], lse[row] = scores.softmax(-1) @ seen[:, :LATENT], scores.logsumexp(-1)
                row += 1
        return o[:row], lse[:row]


class Recorded:
    """What a CUDA graph does: the library's calls within it, and them again on the same tensors."""

    def __enter__(self):
        self.calls, self.plans = [], 0
        plan, run = MlaDecode.plan, MlaDecode.run

        def noted_plan(decode, *arguments):
            self.plans += 1
            self.calls.append(lambda: plan(decode, *arguments))
            return plan(decode, *arguments)

        def noted_run(decode, *arguments, **named):
            outputs = run(decode, *arguments, **named)
            self.calls.append(lambda: run(decode, *arguments, *outputs, **named))
            return outputs

        self.patches = [mock.patch.object(MlaDecode, "plan", noted_plan),
                        mock.patch.object(MlaDecode, "run", noted_run)]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()

    def replay(self):
        for call in self.calls:
            call()


class EngineTest(unittest.TestCase):
    def test_the_interface_is_the_recorded_one(self):
        present = vllm_interface.of_engine()
        recorded = vllm_interface.recorded()
        self.assertIn(present["version"], list(recorded), "vllm_interface.py records it; see what differs")
        self.assertEqual(present, recorded[present["version"]])

    def agree(self, batch, impl, metadata, q, cache):
        o, lse = impl.forward_mqa(q, cache, metadata, None)
        expected_o, expected_lse = batch.expected(q, cache)
        rows = len(expected_o)
        self.assertEqual(tuple(o.shape), (batch.rows, HEADS, LATENT))
        self.assertTrue(torch.allclose(o[:rows].float(), expected_o, atol=1e-2, rtol=1e-2))
        self.assertTrue(torch.allclose(lse[:rows], expected_lse, atol=1e-3, rtol=1e-3))

    def run_step(self, builder, impl, batch):
        metadata = builder.build(0, batch.common())
        self.assertEqual(metadata.num_prefills, 0)
        self.assertEqual(metadata.num_decodes, len(batch.tokens))
        for _ in range(2):
            self.agree(batch, impl, metadata, *batch.layer())
        return metadata

    def test_steps(self):
        config = config_of(drafts=3)
        builder, impl = builder_of(config), impl_of(config)
        for batch in (Batch([40], [1]),
                      Batch([300, 17, 1, 512], [1, 1, 1, 1]),
                      Batch([300, 17, 4, 129], [4, 4, 4, 4]),  # drafts
                      Batch([300, 17, 4, 129], [4, 1, 2, 3]),  # of which some were dropped
                      Batch([300, 17, 4], [4, 4, 4], pad=3, rows=24),  # padded to a graph's size
                      Batch([300, 200], [1, 40]),  # a short continuation
                      Batch([300], [4])):
            with self.subTest(tokens=batch.tokens, queries=batch.queries):
                self.run_step(builder, impl, batch)

    def test_block_sizes(self):
        for block in (16, 32, 64, 128):
            with self.subTest(block=block):
                config = config_of()
                self.run_step(builder_of(config, block), impl_of(config), Batch([300, 17], [1, 1], block))

    @unittest.skipUnless(Backend.supports_non_causal(), "0.33's")
    def test_drafts_that_see_each_other(self):
        config = config_of(drafts=3)
        builder, impl = builder_of(config), impl_of(config)
        builder.non_causal_multi_token_decode = True  # of a layer of such a drafter
        for _ in range(2):
            self.run_step(builder, impl, Batch([300, 17, 4], [4, 4, 4], pad=1, rows=16, causal=False))
            self.run_step(builder, impl, Batch([300, 17], [4, 3]))

    def test_caches_in_fp8(self):
        layer = types.SimpleNamespace(_k_scale=torch.tensor(0.25))
        for cache_dtype in ("fp8", "fp8_e4m3"):
            config = config_of(drafts=3, cache=cache_dtype)
            builder, impl, batch = builder_of(config), impl_of(config), Batch([300, 17, 4], [4, 1, 2])
            metadata = builder.build(0, batch.common())
            q, cache = batch.layer()
            cache = (cache / 0.25).to(torch.float8_e4m3fn)
            self.assertFalse(impl.supports_quant_query_input)
            o, lse = impl.forward_mqa(q, cache, metadata, layer)
            expected_o, expected_lse = batch.expected(q, cache.bfloat16() * 0.25)
            self.assertTrue(torch.allclose(o.float(), expected_o, atol=1e-2, rtol=1e-2))
            self.assertTrue(torch.allclose(lse, expected_lse, atol=1e-3, rtol=1e-3))
            self.assertEqual(len(builder._plans._planned), 2, "what was loaded at the start")

    def test_queries_in_fp8(self):
        layer = types.SimpleNamespace(_k_scale=torch.tensor(0.25), _q_scale=torch.tensor(0.5))
        self.assertFalse(impl_of(config_of(hypermla_fp8_queries=True)).supports_quant_query_input)
        config = config_of(drafts=3, cache="fp8", hypermla_fp8_queries=True)
        builder, impl, batch = builder_of(config), impl_of(config), Batch([300, 17, 4], [4, 1, 2])
        self.assertTrue(impl.supports_quant_query_input)  # so vLLM's layer joins and rounds them
        metadata = builder.build(0, batch.common())
        q, cache = batch.layer()
        q = (torch.cat(q, -1) / 0.5).to(torch.float8_e4m3fn)
        cache = (cache / 0.25).to(torch.float8_e4m3fn)
        o, lse = impl.forward_mqa(q, cache, metadata, layer)
        expected_o, expected_lse = batch.expected(q.bfloat16() * 0.5, cache.bfloat16() * 0.25)
        self.assertEqual(o.dtype, torch.bfloat16)
        self.assertTrue(torch.allclose(o.float(), expected_o, atol=1e-2, rtol=1e-2))
        self.assertTrue(torch.allclose(lse, expected_lse, atol=1e-3, rtol=1e-3))
        self.assertEqual(len(builder._plans._planned), 2, "what was loaded at the start")

    def test_which_queries_are_rounded(self):
        """Those of layers whose requests decode with 64 rows, of 4 heads here, and plans are the layers', whatever the
        builder's configuration says: vLLM makes a drafter's layers with another one."""
        for drafts, rounded in (0, False), (14, False), (15, True):
            config = config_of(drafts=drafts, cache="fp8")
            layer = impl_of(config)
            self.assertEqual(layer.supports_quant_query_input, rounded)
            for builder in builder_of(config), builder_of(config_of(cache="fp8"), impl=layer):
                self.assertEqual([kind[-1] for kind in builder._kinds], [rounded], drafts)

    def test_a_drafter_of_latent_attention_is_ours_too(self):
        """Unless the command line names a backend for it, or another for the model; vLLM would choose one anew."""
        custom = AttentionBackendEnum.CUSTOM

        def chosen(config):
            impl_of(config)
            return config.speculative_config.attention_backend

        for method in "mtp", "eagle", "eagle3":
            self.assertIs(chosen(config_of(drafts=3, method=method)), custom)
        self.assertIsNone(chosen(config_of(drafts=3, method="ngram")))
        flash = AttentionBackendEnum.FLASH_ATTN_MLA
        for of, name, value, expected in (
                ("speculative_config", "attention_backend", flash, flash),
                ("speculative_config", "kv_cache_dtype", "fp8", None),
                ("speculative_config", "parallel_drafting", True, None),
                ("model_config", "use_mla", False, None),  # here the drafter's, too
                ("model_config", "get_head_size", lambda: 128, None),
                ("attention_config", "backend", flash, None),
                ("attention_config", "backend", None, None)):
            config = config_of(drafts=3)
            setattr(getattr(config, of), name, value)
            self.assertIs(chosen(config), expected, (of, name, value))
        with mock.patch.object(hypermla.vllm.backend, "BACKEND", "another.Backend"):
            self.assertIsNone(chosen(config_of(drafts=3)))

    def test_one_tensor_of_queries(self):  # as context parallelism gives it
        config = config_of()
        builder, impl, batch = builder_of(config), impl_of(config), Batch([300, 17], [1, 1])
        metadata = builder.build(0, batch.common())
        (latent, rope), cache = batch.layer()
        self.agree(batch, impl, metadata, torch.cat((latent, rope), -1), cache)

    def test_one_plan_a_step(self):
        config = config_of()
        builder, impl = builder_of(config), impl_of(config)
        first, second = Batch([300, 17], [1, 1]), Batch([40, 30, 20], [1, 1, 1])
        planned = []
        [holder] = [one for key, one in builder._plans._planned.items() if key[0] is builder._usual]
        plan = holder.decode.plan
        holder.decode.plan = lambda *arguments: (planned.append(arguments), plan(*arguments))
        builder.build(0, first.common())
        self.assertEqual(len(planned), 1)  # before any layer
        planned.clear()
        step = self.run_step(builder, impl, first)  # two layers
        self.assertEqual(len(planned), 1)
        self.run_step(builder, impl, second)
        self.assertEqual(len(planned), 2)
        self.agree(first, impl, step, *first.layer())  # a step that was left for another
        self.assertEqual(len(planned), 3)
        step.decode.seq_lens[0] = first.tokens[0] = 299
        builder.update_draft_decode_metadata(step)  # a drafter that advances its requests in a graph
        self.agree(first, impl, step, *first.layer())
        self.assertEqual(len(planned), 4)

    def test_a_prefix_is_decompressed_and_added(self):
        for cache_dtype, drafts in (("auto", 0), ("fp8", 0), ("auto", 3)):
            with self.subTest(cache_dtype=cache_dtype, drafts=drafts):
                self.prefix_is_added(cache_dtype, drafts)

    def prefix_is_added(self, cache_dtype, drafts):
        from hypermla.vllm import prefixes

        config = config_of(hypermla_prefix_cache=0.02, cache=cache_dtype, drafts=drafts)
        w_uk, w_uv = torch.randn(HEADS, NOPE, LATENT).bfloat16() / 23, torch.randn(HEADS, LATENT, 128).bfloat16() / 23
        project = torch.cat((w_uk, w_uv.transpose(1, 2)), 1).flatten(0, 1).T
        impl = impl_of(config, lambda latents: (latents @ project, None))
        projected = lambda o: torch.einsum("thl,hlv->thv", o.float(), w_uv.float()).bfloat16()

        def attend(layer, q, k_c_normed, k_pe, cache, metadata, output, **named):
            if metadata is not None:  # else vLLM measures memory
                absorbed = torch.einsum("thc,hcl->thl", q[..., :NOPE].float(), w_uk.float()).bfloat16()
                o, _ = layer.impl.forward_mqa((absorbed, q[..., NOPE:]), cache, metadata, layer)
                output[:] = projected(o).flatten(1)
            return output

        batch = Batch([300, 310, 290, 17], [1, 2, 1, 1])
        batch.table[1:3, :10] = batch.table[0, :10]
        _, cache = batch.layer()
        given, factor = cache, torch.tensor(0.25)
        if cache_dtype == "fp8":
            rounded = (cache / factor).to(torch.float8_e4m3fn)
            given, cache = rounded.view(torch.uint8), rounded.float() * factor
        q, output = torch.randn(5, HEADS, NOPE + ROPE).bfloat16(), torch.zeros(5, HEADS * 128).bfloat16()
        absorbed = torch.einsum("thc,hcl->thl", q[..., :NOPE].float(), w_uk.float()).bfloat16()
        expected = projected(batch.expected((absorbed, q[..., NOPE:]), cache)[0])
        with (mock.patch.object(prefixes, "saved_us", lambda heads, queries, tokens, fp8: queries * tokens - 100),
              mock.patch.multiple(mla_attention.MLAAttention, forward_impl=attend,
                                  process_weights_after_loading=lambda *_: None)):
            builder_of(config, impl=impl)  # which vLLM makes to measure memory
            layers = config.compilation_config.static_forward_context
            spec = types.SimpleNamespace(block_size=16, dtype=given.dtype)
            new = lambda names: Builder(spec, names, config, torch.device("cpu"))
            drafter = [f"model.layers.{number}.self_attn.attn" for number in (2, 3)[:drafts]]
            layers |= {name: copy.copy(layers["layer.0"]) for name in drafter}
            builder = new(list(layers))
            drafters = new(drafter) if drafts else None
            layer = layers["layer.0"]
            for each in layers.values():
                vars(each).update(kv_cache=given, _k_scale=factor)
            most = config.scheduler_config.max_num_seqs * (1 + drafts)
            for shared, written in ((0, None), (160, None), (160, 0), (0, int(batch.table[0, 3]))):
                if shared:  # a step of more queries than requests share prefixes for
                    many = Batch([300, 310, 290, 17], [1, most, 1, 1])
                    many.table = batch.table
                    self.assertEqual(builder.build(0, many.common()).decode.seq_lens.tolist(), many.tokens)
                if written is not None:  # a step of prompts alone, by which page
                    prompts = Batch([300], [300]).common()
                    prompts.slot_mapping.fill_(16 * written + 5)
                    with WithoutGpu():
                        builder.build(0, prompts)
                metadata = builder.build(0, batch.common())
                left_out = torch.tensor(batch.tokens) - metadata.decode.seq_lens
                self.assertEqual(left_out.tolist(), [shared] * 3 + [0])
                steps = [(layer, metadata)]
                if drafts:  # whose first pass may have the model's step, and others have their own builder's
                    steps += [(layers[drafter[0]], metadata), (layers[drafter[0]], drafters.build(0, batch.common()))]
                    self.assertEqual(steps[-1][1].decode.seq_lens.tolist(), batch.tokens)
                for of, step in steps:
                    output.fill_(math.nan)
                    of.forward_impl(q, None, None, given, step, output=output)
                    self.assertTrue(torch.allclose(output.view(5, HEADS, 128).float(), expected.float(), atol=2e-2))
            layer.forward_impl(q, None, None, given, None, output=output)
            self.assertTrue(builder._prefix._kept)
            layer.process_weights_after_loading(torch.bfloat16)  # new ones
            self.assertFalse(builder._prefix._kept)
            with self.assertRaisesRegex(NotImplementedError, "adds to outputs of torch.bfloat16, not of"):
                layer.forward_impl(q, None, None, given, metadata, output=output.to(torch.float8_e4m3fn))

    def test_a_step_of_decodes_is_as_vllm_makes_it(self):
        builder = builder_of(config_of(drafts=3))
        for lengths, queries in (([300, 17, 4], [4, 1, 3]), ([300, 17], [4, 40]), ([300, 9], [4, 0])):
            common = Batch(lengths, queries).common()
            ours, theirs = builder.build(0, common), super(Builder, builder).build(0, common)
            for one, other in ((ours, theirs), (ours.decode, theirs.decode)):
                for name, value in vars(one).items():
                    expected = getattr(other, name)
                    if isinstance(value, torch.Tensor):
                        self.assertEqual((value.data_ptr(), value.shape), (expected.data_ptr(), expected.shape), name)
                    elif name not in ("decode", "head_dim"):  # which nothing but its check reads
                        self.assertEqual(value, expected, name)

    def record_and_replay(self, config, recorded, steps):
        """Recorded for padding, replayed for batches in as many rows; lengths, tables and query starts lie where they
        lay."""
        builder, impl = builder_of(config), impl_of(config)
        common = recorded.common()
        metadata = builder.build_for_cudagraph_capture(common)
        q, cache = recorded.layer()
        with Recorded() as graph:
            o, lse = impl.forward_mqa(q, cache, metadata, None)
        self.assertEqual(graph.plans, 0)  # before each replay instead
        for lengths, queries in steps:
            batch = Batch(lengths, queries, pad=len(recorded.tokens) - len(lengths), rows=recorded.rows)
            fresh = batch.common()
            recorded.table[:] = batch.table
            for name in ("seq_lens", "query_start_loc", "query_start_loc_cpu"):
                getattr(common, name)[:] = getattr(fresh, name)
            common.max_query_len = fresh.max_query_len
            builder.build(0, common)
            graph.replay()
            expected_o, expected_lse = batch.expected(q, cache)
            self.assertTrue(torch.allclose(o[:len(expected_o)].float(), expected_o, atol=1e-2, rtol=1e-2))
            self.assertTrue(torch.allclose(lse[:len(expected_o)], expected_lse, atol=1e-3, rtol=1e-3))

    def test_a_graph_holds_no_plan(self):
        self.record_and_replay(config_of(drafts=3), Batch([4] * 4, [4] * 4),
                               (([300, 17, 129, 9], [4, 4, 4, 4]), ([512, 40], [4, 3])))

    def test_a_graph_of_mixed_drafts(self):
        """vLLM's own choice of graphs, and drafts that an n-gram drafter found: one graph for every batch of as many
        tokens, prompts among them."""
        config = config_of(drafts=3, method="ngram")
        self.assertEqual(Builder.get_cudagraph_support(config, None), AttentionCGSupport.ALWAYS)
        self.record_and_replay(config, Batch([2] * 8, [2] * 8),
                               (([300, 17, 129, 9], [4, 1, 2, 3]), ([512, 16], [1, 15]), ([40] * 8, [1] * 8)))

    def test_a_graph_of_a_drafters_steps_plans_each(self):
        config = config_of()
        builder, impl, batch = builder_of(config), impl_of(config), Batch([300, 17], [1, 1])
        common = batch.common()
        metadata = builder.build(0, common)
        q, cache = batch.layer()
        with Recorded() as graph:
            builder.update_draft_decode_metadata(metadata)
            o, _ = impl.forward_mqa(q, cache, metadata, None)
        self.assertEqual(graph.plans, 1)
        batch.tokens = [299, 16]
        metadata.decode.seq_lens[:] = torch.tensor(batch.tokens)
        graph.replay()  # nothing was built
        self.assertTrue(torch.allclose(o.float(), batch.expected(q, cache)[0], atol=1e-2, rtol=1e-2))

    @mock.patch("vllm.model_executor.layers.attention.mla_attention.PIN_MEMORY", False, create=True)  # no GPU
    def test_a_batch_with_prompts(self):
        config = config_of(drafts=3)
        builder, impl = builder_of(config), impl_of(config)
        metadata = builder.build(0, Batch([300, 30, 140], [4, 1, 140]).common())
        self.assertEqual((metadata.num_decodes, metadata.num_prefills, metadata.num_decode_tokens), (2, 1, 5))
        self.assertEqual(metadata.decode.capacity, builder._usual)  # though the batch has a longer query
        batch = Batch([300, 30], [4, 1])
        metadata.decode.block_table = batch.table
        self.agree(batch, impl, metadata, *batch.layer())

    def test_a_threshold_that_was_changed_is_refused(self):
        builder = builder_of(config_of())
        builder.reorder_batch_threshold = 1024
        with self.assertRaisesRegex(ValueError, "up to 128 queries, not of 200"):
            builder.build(0, Batch([300, 30], [200, 1]).common())

    def test_graphs(self):
        cases = ((dict(), AttentionCGSupport.UNIFORM_BATCH, 1, 128),
                 (dict(drafts=3), AttentionCGSupport.UNIFORM_BATCH, 4, 128),
                 (dict(graphs=CUDAGraphMode.FULL), AttentionCGSupport.ALWAYS, 128, 128),
                 (dict(drafts=3, method="ngram"), AttentionCGSupport.ALWAYS, 128, 128),
                 (dict(drafts=3, method="ngram", graphs=CUDAGraphMode.FULL_DECODE_ONLY),
                  AttentionCGSupport.UNIFORM_BATCH, 4, 128),
                 (dict(drafts=3, method="ngram", shards=2), AttentionCGSupport.UNIFORM_BATCH, 4, 128),
                 (dict(shards=2, drafts=3), AttentionCGSupport.UNIFORM_BATCH, 4, 128))
        for case, support, usual, longest in cases:
            with self.subTest(case):
                config = config_of(**case)
                builder = builder_of(config)
                self.assertEqual(Builder.get_cudagraph_support(config, None), support)
                self.assertEqual(builder._usual.queries, usual)
                self.assertEqual(builder.reorder_batch_threshold, longest)
        for backend in (dict(), dict(side_effect=NotImplementedError)):  # another's; not said, as in vLLM's own tests
            config = config_of(drafts=3, method="ngram")
            layer = mock.Mock(get_attn_backend=mock.Mock(**backend))
            config.compilation_config.static_forward_context["another layer"] = layer
            self.assertEqual(Builder.get_cudagraph_support(config, None), AttentionCGSupport.UNIFORM_BATCH)
            self.assertEqual(config.compilation_config.cudagraph_mode, CUDAGraphMode.FULL_AND_PIECEWISE)
            builder_of(config)
        batch = Batch([40, 30, 20, 10], [1, 1, 1, 1])
        config = config_of(drafts=3)
        self.assertEqual(Builder.get_varlen_cudagraph_max_query_len(config, None), 4)
        metadata = builder_of(config).build_for_cudagraph_capture(batch.common())
        self.assertEqual(metadata.num_decode_tokens, 4)

    def test_graphs_hold_whole_requests(self):
        """128 requests with 7 drafts each stay in graphs, whose sizes vLLM chooses or a user does."""
        own = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
        cases = ((128, own, 512, 1024, 1024), (100, own, 512, 800, 800), (256, own, 512, 1024, 1024),
                 (64, own, 512, 512, 512), (128, [8, 1024], 1024, 1024, 1024), (128, [8, 512], 512, 512, 512),
                 (128, [8, 100], 100, 100, 128))
        for requests, sizes, largest, graph, longest in cases:
            with self.subTest(requests=requests, sizes=sizes[-2:]):
                config = config_of(drafts=7, method="ngram", requests=requests, largest=largest, sizes=list(sizes))
                self.assertEqual(Builder.get_cudagraph_support(config, None), AttentionCGSupport.ALWAYS)
                found = config.compilation_config
                self.assertEqual((found.max_cudagraph_capture_size, found.cudagraph_capture_sizes[-1]), (graph, graph))
                self.assertEqual(found.cudagraph_capture_sizes[:len(sizes)], sizes)
                added = found.cudagraph_capture_sizes[len(sizes):]
                self.assertEqual(added, sorted(set(added)))
                self.assertTrue(all(size > 512 and size % 8 == 0 for size in added))
                self.assertEqual(builder_of(config).reorder_batch_threshold, longest)
        config = config_of(drafts=7, method="ngram", requests=128, largest=1025, sizes=[8, 1025])
        self.assertEqual(Builder.get_cudagraph_support(config, None), AttentionCGSupport.UNIFORM_BATCH)

    def test_memory_is_taken_while_vllm_measures_it(self):
        full, made, alive = CUDAGraphMode.FULL, [], weakref.WeakSet()

        def make(**options):
            decode = MlaDecode(**options)
            made.append((options, len(alive)))
            alive.add(decode)
            return decode

        lookups = {"drafts": 7, "method": "ngram", "requests": 100, "largest": 512, "sizes": [480, 496, 512]}
        for options, block, page in (({}, 16, 16), ({}, 192, 64), ({"graphs": full}, 64, 64), ({"drafts": 3}, 256, 128),
                                     ({"cache": "fp8"}, 16, 16), (lookups, 16, 16),
                                     ({"cache": "fp8", "hypermla_fp8_queries": True}, 16, 16)):
            with self.subTest(**options, block=block), mock.patch("hypermla.vllm.plans.MlaDecode", make):
                made.clear()
                config = config_of(**options)
                config.cache_config.block_size = block
                compilation = copy.deepcopy(config.compilation_config)
                layers = [impl_of(config) for _ in range(2)]
                with set_current_vllm_config(config):
                    for impl in layers:
                        impl.reserve_workspace()
                self.assertEqual(config.compilation_config, compilation)
                held = [one for one, _ in made]
                self.assertEqual(len(alive), len(held))
                builder = builder_of(config, page, impl=layers[0])
                self.assertEqual([one for one, _ in made[len(held):]], held, "the builder makes others")
                self.assertEqual(made[len(held)][1], 0, "what was held is there while the builder makes its own")
                with set_current_vllm_config(config):
                    layers[0].reserve_workspace()  # as each pass without a step asks
                self.assertEqual(len(made), 2 * len(held))
                del builder
                gc.collect()
                self.assertEqual(len(alive), 0)

    def test_ranks_share_contexts(self):
        """The layers of all ranks, each with the queries of all heads, merge into those of one."""
        for ranks, interleave in ((2, 1), (2, 4), (4, 16)):
            batch = Batch([300, 17, 1, 512, 129], [4, 1, 1, 2, 4])
            config = config_of(drafts=3, shards=ranks, interleave=interleave)
            q, cache = batch.layer()
            q = torch.cat(q, -1)
            outputs, lses = [], []
            for rank in range(ranks):
                group = mock.Mock(return_value=types.SimpleNamespace(world_size=ranks, rank_in_group=rank))
                with (mock.patch("vllm.model_executor.layers.attention.mla_attention.get_dcp_group", group),
                      mock.patch("vllm.v1.attention.backends.utils.get_dcp_group", group, create=True),
                      mock.patch("hypermla.vllm.backend.get_dcp_group", group)):
                    builder, impl = builder_of(config, heads=HEADS // ranks), impl_of(config)
                self.assertTrue(impl.supports_mtp_with_cp_non_trivial_interleave_size and impl.supports_dcp)
                common = batch.common()
                here = [torch.arange(length) // interleave % ranks == rank for length in batch.tokens]
                common.dcp_local_seq_lens = torch.tensor([int(of.sum()) for of in here], dtype=torch.int32)
                part = torch.full_like(cache, math.nan)
                for row, length, mine in zip(batch.table, batch.tokens, here):
                    pages = row[:-(-length // batch.block)].long()
                    rows = cache[pages].reshape(-1, LATENT + ROPE)[:length][mine]
                    for i, token in enumerate(rows):
                        part[row[i // batch.block], i % batch.block] = token
                metadata = builder.build(0, common)
                self.assertEqual(metadata.num_decodes, len(batch.tokens))
                o, lse = impl.forward_mqa(q, part, metadata, None)
                outputs.append(o.float())
                lses.append(lse)
            lses = torch.stack(lses)
            lse = lses.logsumexp(0)
            o = sum(weight[..., None] * one for weight, one in zip((lses - lse).exp(), outputs))
            expected_o, expected_lse = batch.expected(q, cache)
            self.assertTrue(torch.allclose(o, expected_o, atol=1e-2, rtol=1e-2))
            self.assertTrue(torch.allclose(lse, expected_lse, atol=1e-3, rtol=1e-3))
            self.assertTrue(lses.isinf().any())  # of the request of one token

    def turn_on_batch_invariance(self):
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
        self.addCleanup(os.environ.pop, "VLLM_BATCH_INVARIANT")

    def test_batch_invariance(self):
        self.turn_on_batch_invariance()
        config = config_of(drafts=3)
        builder = builder_of(config)
        self.assertEqual(builder.reorder_batch_threshold, 4)
        self.assertIs(builder._long, builder._usual)
        self.assertEqual(builder._usual.split, 512)
        self.run_step(builder, impl_of(config), Batch([300, 17, 4], [4, 1, 2]))

    def test_batch_invariant_prompts_stay_whole(self):
        """What follows others in the cache is prefilled in two parts, with other bits."""
        def parts(config):
            with mock.patch.object(hypermla.vllm.backend.logger, "warning_once") as warned:
                for _ in range(2):  # layers
                    impl_of(config)
            return config.cache_config.enable_prefix_caching, " ".join(call.args[0] for call in warned.call_args_list)

        self.assertEqual(parts(config_of()), (True, ""))
        self.turn_on_batch_invariance()
        config = config_of()
        cached, said = parts(config)
        self.assertFalse(cached)
        self.assertIn("turns prefix caching off", said)
        self.assertIn("--no-enable-chunked-prefill keeps", said)
        config.scheduler_config.enable_chunked_prefill = False
        self.assertEqual(parts(config), (False, ""))
        for executor in ("uni", "mp", "ray"):  # the workers of the latter have copies of what the scheduler reads
            config = config_of(executor=executor)
            with self.subTest(executor), set_current_vllm_config(config):
                said = reasons()
                self.assertEqual("add --no-enable-prefix-caching" in said, executor != "uni", said)
                config.cache_config.enable_prefix_caching = False
                self.assertEqual(reasons(), "")

    def test_tokens_in_fp8_are_whole_ones_apart(self):
        """Whatever pages of other layers lie between."""
        if hasattr(Backend.__mro__[1], "indexes_kv_by_block_stride"):  # until 0.28
            for cache, any_stride in ("auto", True), ("fp8", False):
                with set_current_vllm_config(config_of(cache=cache)):
                    self.assertEqual(Backend.indexes_kv_by_block_stride(), any_stride)
        if not hasattr(Backend.__mro__[1], "customize_spec"):  # before 0.28
            return
        from vllm.v1.kv_cache_interface import MLAAttentionSpec

        for dtype, alignment in (torch.bfloat16, 1), (torch.uint8, 576):
            spec = Backend.customize_spec(MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=dtype))
            if hasattr(spec, "block_stride_alignment"):  # from 0.31 on
                self.assertEqual(spec.block_stride_alignment or 1, alignment)

    def test_heads_are_those_of_this_device(self):
        config = config_of()
        builder = builder_of(config, impl=types.SimpleNamespace(num_heads=1))
        self.assertEqual({kind[0] for kind in builder._kinds}, {1})

    def test_long_requests_decode_as_far_as_the_planner_counts(self):
        from hypermla.vllm.backend import _longest_decode

        for tokens, batched, longest in (4096, 8192, 128), (131072, 16384, 128), (1 << 20, 16384, 16):
            config = config_of()
            config.model_config.max_model_len, config.scheduler_config.max_num_batched_tokens = tokens, batched
            config.scheduler_config.max_num_seqs = 256
            self.assertEqual(_longest_decode(config, False, 128), longest)

    def test_steps_have_as_many_tokens_as_mla_decode_takes(self):
        """Of 128 heads fewer than 262144. Where a graph serves any batch, requests cannot be made shorter."""
        from hypermla.vllm.backend import _capacities, _longest_decode

        for batched, longest in (262143, 128), (262144, 64):
            config = config_of(requests=2048)
            config.scheduler_config.max_num_batched_tokens = batched
            self.assertEqual(_longest_decode(config, False, 128), longest)
            self.assertLess(_capacities(config, False, 128, 1, "cpu")[1].query_tokens, 262144)
            if longest == 64:
                with self.assertRaisesRegex(ValueError, "262143 tokens of 128 heads .+; lower --max-num-seqs, "):
                    _capacities(config, True, 128, 1, "cpu")
            else:
                self.assertEqual(_capacities(config, True, 128, 1, "cpu")[1].query_tokens, batched)

    def test_other_gpus_than_hopper_decode_without_long_requests(self):
        from hypermla.vllm.backend import _longest_decode, _settle_graphs

        for capability, longest, any_batch in ((9, 0), 128, True), ((8, 9), 4, False), ((12, 0), 4, False):
            with (mock.patch("torch.cuda.is_available", return_value=True),
                  mock.patch("torch.cuda.get_device_capability", return_value=capability)):
                config = config_of(drafts=3, graphs=CUDAGraphMode.FULL)
                self.assertEqual(_longest_decode(config, False, 128), longest)
                self.assertEqual(_settle_graphs(config), any_batch)

    def test_what_is_refused(self):
        self.assertEqual(reasons(), "")
        with set_current_vllm_config(config_of(hypermla_fp8_queries=True)):
            self.assertEqual(reasons(kv_cache_dtype="fp8"), "")
            self.assertIn("add --kv-cache-dtype fp8", reasons())
            with mock.patch.dict(os.environ, VLLM_BATCH_INVARIANT="1"):
                self.assertIn("leave hypermla_fp8_queries out", reasons(kv_cache_dtype="fp8"))
        for block in (16, 32, 64, 128, 256):
            self.assertEqual(reasons(block_size=block), "")
        for cache in ("bfloat16", "fp8", "fp8_e4m3"):
            self.assertEqual(reasons(kv_cache_dtype=cache), "")
        for wrong, said in ((dict(kv_cache_dtype="fp8_e5m2"), "kv_cache_dtype=fp8_e5m2; leave"),
                            (dict(kv_cache_dtype="fp8", dtype=torch.float16), "not of torch.float16; leave"),
                            (dict(kv_cache_dtype="float16"), "kv_cache_dtype=float16; leave"),
                            (dict(use_sparse=True), "dense attention only"),
                            (dict(use_mla=False, head_size=128), "in place of --attention-backend give -ac"),
                            (dict(has_sink=True), "no attention sinks"),
                            (dict(head_size=320), "not for 320"),
                            (dict(block_size=8), "block_size not supported"),
                            (dict(capability=(7, 5)), "from compute capability 8.0 on"),
                            (dict(capability=(8, 9), kv_cache_dtype="fp8"), "in FP8 on Hopper only"),
                            (dict(use_pcp=True), "PCP not supported")):
            with self.subTest(wrong):
                self.assertIn(said, reasons(**wrong))
        for wrong, said in ((dict(shards=2, interleave=128), ""), (dict(shards=33), "among at most 32 GPUs"),
                            (dict(shards=2, interleave=256), "turns of at most 128 tokens"), (dict(requests=2048), ""),
                            (dict(requests=2049), "at most 2048 requests"), (dict(hypermla_shared_prefixes=True), "")):
            with self.subTest(wrong), set_current_vllm_config(config_of(**wrong)):
                found = reasons()
                self.assertIn(said, found)
                self.assertEqual(bool(found), bool(said))
        for capability in (8, 0), (8, 9), (10, 0), (12, 0):
            self.assertEqual(reasons(capability), "")
            for wrong, said in ((dict(shards=2), "among Hopper GPUs only"),
                                (dict(hypermla_shared_prefixes=True), "needs a Hopper GPU"),
                                (dict(hypermla_prefix_cache=1), "hypermla_prefix_cache needs a Hopper GPU")):
                with set_current_vllm_config(config_of(**wrong)):
                    self.assertIn(said, reasons(capability))
        self.assertEqual(Backend.get_preferred_block_size(16), 64)
        with set_current_vllm_config(config_of(hypermla_shared_prefixes=True)):
            self.assertIn("hypermla_shared_prefixes is not for a cache in FP8", reasons(kv_cache_dtype="fp8"))
        for option in "hypermla_shared_prefixes", "hypermla_prefix_cache":
            with set_current_vllm_config(config_of(shards=2, **{option: 1})):
                self.assertIn(f"{option} is not for decode context", reasons())
        for wrong, name in ((dict(hypermla_shared_prefixes=True), "hypermla_shared_prefixes"),
                            (dict(drafts=3, method="draft_model"), "drafters but MTP, EAGLE and lookups")):
            with set_current_vllm_config(config_of(**wrong, hypermla_prefix_cache=1)):
                self.assertIn(f"hypermla_prefix_cache is not for {name}", reasons())
        for drafts in dict(), dict(drafts=3, method="ngram"), dict(drafts=3, method="mtp"):
            config = config_of(**drafts, hypermla_prefix_cache=1)
            with set_current_vllm_config(config):
                self.assertEqual(reasons() + reasons(kv_cache_dtype="fp8"), "")
        with set_current_vllm_config(config):
            config.speculative_config.parallel_drafting = True
            self.assertIn("drafters but MTP, EAGLE and lookups", reasons())
            config.speculative_config.parallel_drafting = False
            config.model_config.enable_sleep_mode = True
            self.assertIn("hypermla_prefix_cache is not for sleep mode", reasons())
        with self.assertRaisesRegex(ValueError, "hypermla_prefix_cache='4 GB' is no number; give it GiB"):
            impl_of(config_of(hypermla_prefix_cache="4 GB"))
        with self.assertRaisesRegex(ValueError, "room for 246 tokens in each of 2 layers; give it 0.01 GiB at least"):
            impl_of(config_of(hypermla_prefix_cache=0.001))
        with self.assertRaisesRegex(ValueError, r"for layers of 128, 64 and 128 columns, not of \(192, 64, 256\)"):
            impl_of(config_of(hypermla_prefix_cache=1), nope=192, value=256)
        with self.assertRaisesRegex(NotImplementedError, "sliding_window"):
            config = config_of()
            with set_current_vllm_config(config):
                Impl(HEADS, 576, SCALE, 1, None, 128, "auto", None, "decoder", None, q_lora_rank=None, kv_lora_rank=512,
                     qk_nope_head_dim=128, qk_rope_head_dim=64, qk_head_dim=192, v_head_dim=128, kv_b_proj=None)


class WithoutGpu:
    """What vLLM's classes call on GPUs alone while they prefill, in PyTorch."""

    MODULE = "vllm.model_executor.layers.attention.mla_attention"

    def __enter__(self):
        from vllm import _custom_ops

        empty, zeros = torch.empty, torch.zeros
        unpinned = lambda make: lambda *shape, pin_memory=False, **options: make(*shape, **options)
        self.patches = [mock.patch.object(torch, "empty", unpinned(empty)),
                        mock.patch.object(torch, "zeros", unpinned(zeros)),
                        mock.patch(f"{self.MODULE}.PIN_MEMORY", False, create=True),
                        mock.patch("vllm.utils.torch_utils.PIN_MEMORY", False, create=True),
                        mock.patch("vllm.utils.torch_utils.is_pin_memory_available", lambda: False, create=True),
                        mock.patch.object(_custom_ops, "gather_and_maybe_dequant_cache", self.gather),
                        mock.patch(f"{self.MODULE}.merge_attn_states", self.merge),
                        mock.patch(f"{self.MODULE}.mask_empty_context", self.require_masked, create=True)]
        for patch in self.patches:
            patch.start()

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()

    @staticmethod
    def gather(src_cache, dst, block_table, cu_seq_lens, token_to_seq, num_tokens, kv_cache_dtype, scale,
               seq_starts=None):
        for i in range(num_tokens):
            request = token_to_seq[i]
            at = int(i - cu_seq_lens[request] + seq_starts[request])
            dst[i] = src_cache[block_table[request, at // src_cache.shape[1]], at % src_cache.shape[1]]

    @staticmethod
    def require_masked(lse, output, query_starts, token_starts):
        """0.26 masks rows without a token; ours are."""
        for begin, end, tokens in zip(query_starts, query_starts[1:], token_starts.diff()):
            assert tokens or (torch.isneginf(lse[:, begin:end]).all() and not output[begin:end].any())

    @staticmethod
    def merge(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None,
              prefill_tokens_with_context=None):
        lse = torch.logaddexp(prefix_lse, suffix_lse)
        parts = [(torch.exp(of - lse).nan_to_num(0).T[..., None] * o)  # of -inf and -inf
                 for o, of in ((prefix_output.float(), prefix_lse), (suffix_output.float(), suffix_lse))]
        merged = sum(parts)
        if prefill_tokens_with_context is not None:  # behind them the prefix has none
            merged[prefill_tokens_with_context:] = suffix_output[prefill_tokens_with_context:]
        output.copy_(merged)
        if output_lse is not None:
            output_lse.copy_(lse)


class OthersBuilder(mla_attention.MLACommonMetadataBuilder):
    """As one of another backend of decoding."""

    query_len_support, reorder_batch_threshold = Builder.query_len_support, 128


class PrefillTest(unittest.TestCase):
    def setUp(self):
        self.Prefill = MLAPrefillBackendEnum.CUSTOM.get_class()
        self.generator = torch.Generator().manual_seed(5)
        self.weights = self.normal(HEADS * (NOPE + 128), LATENT) / math.sqrt(LATENT)

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator).bfloat16()

    def made(self, config):
        return self.Prefill(num_heads=HEADS, scale=SCALE, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE,
                            qk_rope_head_dim=ROPE, v_head_dim=128, vllm_config=config)

    def impl_of(self, config):
        project = mock.Mock(side_effect=lambda rows: (rows @ self.weights.T,), weight=self.weights)
        impl = impl_of(config, project)
        impl.dcp_world_size = 1  # vLLM's layer sets it
        return impl

    def decompressed(self, rows):
        """Keys [tokens, heads, 192] and values [tokens, heads, 128] of latent rows [tokens, 576]."""
        both = (rows[:, :LATENT] @ self.weights.T).float().view(-1, HEADS, NOPE + 128)
        rope = rows[:, None, LATENT:].float().expand(-1, HEADS, -1)
        return torch.cat([both[..., :NOPE], rope], dim=-1), both[..., NOPE:]

    def run_step(self, builder, impl, batch):
        """The prompts of a step, behind its decodes, through vLLM's calls, against a direct computation."""
        cache = self.normal(batch.blocks, 3, batch.block, LATENT + ROPE)[:, 1]
        new = self.normal(sum(batch.queries), LATENT + ROPE)
        q = self.normal(len(new), HEADS, NOPE + ROPE)
        output = torch.full((len(new), HEADS * 128), math.nan).bfloat16()
        decodes = sum(queries <= 128 for queries in batch.queries)
        first = sum(batch.queries[:decodes])
        ends = itertools.accumulate(batch.queries)
        for pages, tokens, queries, end in zip(batch.table.long(), batch.tokens, batch.queries, ends):
            at = torch.arange(tokens - queries, tokens)  # vLLM has written them before
            rounds = impl.kv_cache_dtype != "auto"  # and what is rounded is not to be used
            cache[pages[at // batch.block], at % batch.block] = math.nan if rounds else new[end - queries:end]
        with WithoutGpu():
            metadata = builder.build(0, batch.common())
            self.assertEqual((metadata.num_decodes, metadata.num_prefills), (decodes, len(batch.tokens) - decodes))
            for _ in range(2):  # layers
                impl.forward_mha(q[first:], new[first:, :LATENT], new[first:, None, LATENT:], cache, metadata,
                                 torch.ones(1), output=output[first:])
        row = first
        for request, (tokens, queries) in list(enumerate(zip(batch.tokens, batch.queries)))[decodes:]:
            context = tokens - queries
            pages = batch.table[request][:-(-tokens // batch.block)].long()
            rows = torch.cat([cache[pages].reshape(-1, LATENT + ROPE)[:context], new[row:row + queries]])
            k, v = self.decompressed(rows)
            scores = torch.einsum("qhd,khd->hqk", q[row:row + queries].float(), k) * SCALE
            seen = torch.ones(queries, tokens, dtype=torch.bool).tril(context)
            expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)
            found = output[row:row + queries].view(queries, HEADS, 128).float()
            self.assertTrue(torch.allclose(found, expected, atol=2e-2, rtol=2e-2), f"request {request}")
            row += queries
        return metadata

    def step(self, tokens, queries, workspace=None, cache="auto", ours=True):
        config = config_of()
        config.cache_config.cache_dtype = cache
        impl = self.impl_of(config)
        builder = builder_of(config, prefill=self.made(config), impl=impl, kind=Builder if ours else OthersBuilder)
        if workspace:
            builder.chunked_prefill_workspace_size = workspace
            builder.chunked_prefill_workspace = builder.chunked_prefill_workspace[:workspace]
        with mock.patch.object(MlaPrefill, "plan", autospec=True, side_effect=MlaPrefill.plan) as plan:
            metadata = self.run_step(builder, impl, Batch(tokens, queries))
        self.passes = [one.requests.stop - one.requests.start for one in metadata.prefill.prefill_backend.passes]
        return plan.call_count

    def test_new_prompts(self):
        self.assertEqual(self.step([140, 200, 131], [140, 200, 131]), 1)  # a plan for both layers

    def test_contexts(self):
        """Decompressed with the new tokens of all requests, by one plan for both layers, where there is room for all;
        else in passes, each with a plan for both."""
        tokens, queries = [500, 333, 131], [140, 300, 131]
        self.assertEqual(self.step(tokens, queries), 1)
        self.assertEqual(self.passes, [3])
        self.assertEqual(self.step(tokens, queries, workspace=sum(tokens)), 1)
        self.assertEqual(self.step(tokens, queries, workspace=sum(tokens) - 1), 2)
        self.assertEqual(self.passes, [1, 2])
        self.assertEqual(self.step(tokens, queries, cache="fp8"), 1)
        self.assertEqual(self.step(tokens, queries, workspace=640, cache="fp8"), 2)
        self.assertEqual(self.passes, [1, 2])
        with mock.patch.dict(os.environ, VLLM_BATCH_INVARIANT="1"):
            self.assertEqual(self.step(tokens, queries), 2)
        for tokens, queries, room in (([129, 200, 400], [129, 200, 140], 900),  # one of three has a context
                                      ([400, 200, 400], [140, 200, 140], 1200),  # between those that have one
                                      ([500, 160, 160], [140] * 3, 900)):  # in two chunks, if they were apart
            self.assertEqual(self.step(tokens, queries, workspace=room), 1)
            self.assertEqual(self.passes, [3])
        tokens, queries = [300, 480, 500, 333], [1, 128, 140, 300]  # two of these decode, and take no room
        self.assertEqual(self.step(tokens, queries, workspace=833), 1)
        self.assertEqual(self.passes, [2])
        self.assertEqual(self.step(tokens, queries, workspace=832), 2)
        self.assertEqual(self.passes, [1, 1])

    def test_passes_have_alike_many_tokens(self):
        """Where that takes no more of them, and all of a step's requests, which do not begin with a prefill."""
        for tokens, queries, room, passes in (
                ([400] * 5 + [200], [140, 150, 160, 170, 180, 200], 1600, [3, 3]),  # not the first four
                ([160, 500, 200, 200], [160, 180, 140, 150], 700, [2, 2]),
                ([150, 500, 200, 430], [20, 180, 140, 150], 640, [1, 2])):
            self.assertEqual(self.step(tokens, queries, workspace=room), len(passes))
            self.assertEqual(self.passes, passes)

    def test_more_than_two_passes_take_turns(self):
        """At the second one's MlaPrefill, which is planned anew for each, in both layers: what each has is memory."""
        plans = self.step([400] * 4, [140] * 4, workspace=600)  # where two chunks were enough
        self.assertEqual(self.passes, [1] * 4)
        self.assertEqual(plans, 2 + 2 + 3)

    def test_contexts_are_those_of_their_step(self):
        """What one step takes is nothing to the next, which has none or has no room; its metadata stays as it was."""
        config = config_of()
        impl = self.impl_of(config)
        builder = builder_of(config, prefill=self.made(config), impl=impl)
        common = Batch([500, 333], [140, 300]).common()
        lengths = common.seq_lens_cpu_upper_bound.clone()
        with WithoutGpu():
            metadata = builder.build(0, common)
        self.assertIsNone(metadata.prefill.chunked_context, "vLLM cuts nothing into chunks")
        self.assertTrue(torch.equal(common.seq_lens_cpu_upper_bound, lengths))
        for tokens, workspace in ([140, 300], None), ([500, 333], 700), ([500, 333], None):
            if workspace:
                builder.chunked_prefill_workspace_size = workspace
                builder.chunked_prefill_workspace = builder.chunked_prefill_workspace[:workspace]
            self.run_step(builder, impl, Batch(tokens, [140, 300]))

    def test_decodes_have_no_passes(self):
        """Of which vLLM may not say how long they are."""
        config = config_of()
        builder = builder_of(config, prefill=self.made(config), impl=self.impl_of(config))
        common = Batch([300, 480], [1, 128]).common()
        common.seq_lens_cpu_upper_bound = None
        prefill = builder._prefill_backend
        self.assertIs(prefill.take_contexts(common, 128, builder.chunked_prefill_workspace), common)
        self.assertEqual(len(prefill.passes), 0)

    def test_contexts_beside_another_backend_of_decoding(self):
        """Whose layers know nothing of tokens that are gathered."""
        with mock.patch.multiple(Impl, forward_mha=Impl.__mro__[1].forward_mha,
                                 _concat_k_nope_k_pe=Impl.__mro__[1]._concat_k_nope_k_pe,
                                 _use_flashinfer_concat_mla_k=False, create=True):
            self.assertEqual(self.step([500, 333, 131], [140, 300, 131], ours=False), 2)

    def test_layers_that_attend_by_themselves(self):
        """As Kimi-K3's from vLLM 0.27 on, which know of chunks alone, and call vLLM's part of forward_mha()."""
        config = config_of()
        impl = self.impl_of(config)
        builder = builder_of(config, prefill=self.made(config), impl=impl, layers=types.SimpleNamespace)
        batch = Batch([500, 333], [140, 300])
        with WithoutGpu():
            metadata = builder.build(0, batch.common())
        self.assertIsNotNone(metadata.prefill.chunked_context)
        self.assertEqual(len(metadata.prefill.prefill_backend.passes), 0)
        k_nope, k_pe = self.normal(3, HEADS, NOPE), self.normal(3, 1, ROPE)
        with mock.patch.object(impl, "_use_flashinfer_concat_mla_k", False, create=True):
            self.assertEqual(impl._concat_k_nope_k_pe(k_nope, k_pe).shape, (3, HEADS, NOPE + ROPE))

    def test_drafters_that_lengthen_requests(self):
        """Of which the lengths on the CPU, by which contexts are cut, say nothing."""
        for changed in dict(method="draft_model"), dict(parallel_drafting=True):
            for cache in "auto", "fp8":
                config = config_of(drafts=3, cache=cache)
                vars(config.speculative_config).update(changed)
                impl = self.impl_of(config)
                builder = builder_of(config, prefill=self.made(config), impl=impl)
                longer, first = Batch([141, 201], [141, 201]), Batch([140, 200], [140, 200]).common()
                first.block_table_tensor = longer.table
                slots, at = torch.zeros(longer.rows, dtype=torch.int64), torch.arange(8, dtype=torch.int32)
                with mock.patch.object(longer, "common", lambda: extend_all_queries_by_N(first, 1, at, slots)):
                    self.run_step(builder, impl, longer)

    def test_contexts_in_chunks(self):
        """Each has a plan of its own in each layer; requests without a context, and some that have ended."""
        plans = self.step([500, 160, 131], [140, 140, 131], workspace=256)  # no room for the first alone
        self.assertEqual(self.passes, [])
        self.assertGreaterEqual(plans, 1 + 2 * 2)

    def test_a_builder_loads_the_kernels(self):
        config = config_of()
        layers = self.made(config)
        with mock.patch.object(self.Prefill, "_prefill", autospec=True, side_effect=self.Prefill._prefill) as made:
            builder_of(config, prefill=layers)
            self.assertEqual(made.call_count, 3)
        self.assertNotIn("_causal", vars(layers))

    def test_memory_is_taken_while_vllm_measures_it(self):
        """Of what is ours alone."""
        made, alive = [], weakref.WeakSet()

        def make(**options):
            prefill = MlaPrefill(**options)
            made.append((options, len(alive)))
            alive.add(prefill)
            return prefill

        for named, count in (MLAPrefillBackendEnum.CUSTOM, 3), (MLAPrefillBackendEnum.FLASH_ATTN, 0):
            with self.subTest(named), mock.patch("hypermla.vllm.prefill.MlaPrefill", mock.Mock(wraps=make)) as of:
                of.MAX_REQUESTS, of.MAX_QUERY_TOKENS, of.MAX_TOKENS = 2048, 1 << 20, 1 << 20
                made.clear()
                config = config_of()
                config.attention_config.mla_prefill_backend = named
                layers = [impl_of(config) for _ in range(2)]
                with set_current_vllm_config(config):
                    for impl in layers:
                        impl.reserve_workspace()
                held = [one for one, _ in made]
                self.assertEqual((len(held), len(alive)), (count, count))
                builder = builder_of(config, impl=layers[0], prefill=self.made(config))
                self.assertEqual([one for one, _ in made[-3:]], [one for one, _ in made[:3]])
                self.assertEqual(made[-3][1], 0, "what was held is there while the builder makes its own")
                del builder
                gc.collect()
                self.assertEqual(len(alive), 0)

    def test_batch_invariance(self):
        for invariant in False, True:
            with (mock.patch("vllm.envs.VLLM_BATCH_INVARIANT", invariant),
                  mock.patch.object(MlaPrefill, "__init__", autospec=True, side_effect=MlaPrefill.__init__) as made):
                self.made(config_of()).clone()
            self.assertEqual([(call.kwargs["causal"], call.kwargs["batch_invariant"]) for call in made.call_args_list],
                             [(True, True), (False, True)] if invariant else [(True, False)] * 2 + [(False, False)])

    def test_keys_and_outputs_of_other_backends_are_vllms(self):
        """Such as a command line names."""
        class Other(NoPrefill):
            def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
                self.keys, self.out = k, out
                return torch.zeros(*q.shape[:2], 128, dtype=q.dtype)

        config = config_of()
        other, impl = Other(), self.impl_of(config)
        builder = builder_of(config, prefill=other, impl=impl)
        new, q, output = self.normal(140, LATENT + ROPE), self.normal(140, HEADS, NOPE + ROPE), torch.ones(140, 512)
        with WithoutGpu():
            metadata = builder.build(0, Batch([140], [140]).common())
            impl.forward_mha(q, new[:, :LATENT], new[:, None, LATENT:], None, metadata, torch.ones(1), output=output)
        self.assertEqual(tuple(other.keys.shape), (140, HEADS, NOPE + ROPE))
        self.assertFalse(output.any())

    def test_it_is_the_default_on_hopper(self):
        custom, flash = MLAPrefillBackendEnum.CUSTOM, MLAPrefillBackendEnum.FLASH_ATTN

        def chosen(capability, named=None):
            config = config_of()
            config.attention_config.mla_prefill_backend = named
            with (mock.patch("torch.cuda.is_available", return_value=capability is not None),
                  mock.patch("torch.cuda.get_device_capability", return_value=capability)):
                impl_of(config)
            return config.attention_config.mla_prefill_backend

        self.assertEqual(chosen((9, 0)), custom)
        self.assertEqual(chosen((9, 0), flash), flash)
        self.assertIsNone(chosen((10, 0)))
        self.assertIsNone(chosen(None))
        with mock.patch.object(hypermla.vllm.backend, "PREFILL_BACKEND", "another.Prefill"):
            self.assertIsNone(chosen((9, 0)))

    def test_drafters_of_other_columns_are_left_to_vllm(self):
        """Which inherit the choice that was made for the model's layers. What a command line names stays."""
        custom = MLAPrefillBackendEnum.CUSTOM
        with (mock.patch.object(hypermla.vllm.backend, "_named", False),
              mock.patch("torch.cuda.is_available", return_value=True),
              mock.patch("torch.cuda.get_device_capability", return_value=(9, 0))):
            config = config_of()
            config.attention_config.mla_prefill_backend = custom
            impl_of(config, nope=192, value=256)
            self.assertEqual(config.attention_config.mla_prefill_backend, custom)
            config.attention_config.mla_prefill_backend = None
            impl_of(config)
            for columns in (192, 256), (64, 128):
                drafter = copy.copy(config)
                drafter.attention_config = copy.copy(config.attention_config)
                self.assertEqual(drafter.attention_config.mla_prefill_backend, custom)
                impl_of(drafter, None, *columns)
                self.assertIsNone(drafter.attention_config.mla_prefill_backend)
            impl_of(drafter)
            self.assertEqual(drafter.attention_config.mla_prefill_backend, custom)
        with self.assertRaisesRegex(ValueError, "of 128 .+ and 128 columns, not of 192 .+ and 256, .+FLASH_ATTN"):
            self.Prefill(num_heads=HEADS, scale=SCALE, kv_lora_rank=LATENT, qk_nope_head_dim=192,
                         qk_rope_head_dim=ROPE, v_head_dim=256, vllm_config=config)

    def test_what_is_refused(self):
        from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
        from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig

        def refused(capability=(9, 0), columns=(NOPE, ROPE, 128), requests=8, dtype=torch.bfloat16):
            names = "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
            with set_current_vllm_config(config_of(requests=requests)):
                return " ".join(self.Prefill.validate_configuration(
                    DeviceCapability(*capability),
                    MLAPrefillSelectorConfig(dtype=dtype, mla_dimensions=MLADimensions(**dict(zip(names, columns))))))

        self.assertEqual(refused(), "")
        self.assertEqual(refused(dtype=torch.float16), "")
        self.assertIn("compute capability 10.0", refused((10, 0)))
        self.assertIn("qk_nope_head_dim=192", refused(columns=(192, 64, 256)))
        self.assertIn("float32", refused(dtype=torch.float32))
        self.assertIn("lower --max-num-seqs", refused(requests=2049))


class SparseTest(unittest.TestCase):
    def setUp(self):
        with mock.patch.dict(os.environ, VLLM_PLUGINS="hypermla,hypermla_sparse"):
            hypermla.vllm.register_sparse()
        for backend in SPARSE:
            self.addCleanup(backend.clear_override)
        self.impl = object.__new__(Sparse.get_class().get_impl_cls())  # what its kernels read
        self.impl.softmax_scale, self.impl.num_heads, self.impl.total_cp_world_size = SCALE, HEADS, 1
        random = torch.Generator().manual_seed(3)
        self.rows = torch.randn(5 * 64, 576, generator=random).bfloat16()
        self.slots = torch.randint(0, len(self.rows), (6, 40), generator=random, dtype=torch.int32)
        self.slots[1, 7:20] = self.slots[3, :] = -1
        self.q = torch.randn(6, HEADS, 576, generator=random).bfloat16()

    def agree(self, o, lse, tokens, counts, tolerance):
        for query, count in enumerate(counts):
            slots = self.slots[query, :count]
            seen = tokens[slots[slots >= 0].long()].double()
            scores = self.q[query].double() @ seen.T * SCALE
            expected = scores.softmax(-1) @ seen[:, :LATENT]
            self.assertTrue(torch.allclose(o[query].double(), expected, atol=tolerance))
            wanted = scores.logsumexp(-1) if len(seen) else torch.full((HEADS,), math.inf)
            self.assertTrue(torch.allclose(lse[query].double(), wanted.double(), atol=tolerance))

    def test_tokens_are_whole_ones_apart(self):
        """Where a version knows of it, and in larger blocks whole pages of 64 where vLLM has them so."""
        if not hasattr(Backend.__mro__[1], "customize_spec"):  # before 0.28
            return
        from vllm.v1.kv_cache_interface import MLAAttentionSpec

        sparse = Sparse.get_class()
        others = sparse.__mro__[1]
        for block in 64, 128:
            spec = MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
            theirs, ours = others.customize_spec(spec), sparse.customize_spec(spec)
            if not hasattr(spec, "block_stride_alignment"):  # until 0.30
                self.assertEqual(ours, theirs)
            elif block > 64 and theirs.block_stride_alignment:
                self.assertEqual(ours, theirs)
            else:
                self.assertEqual(ours.block_stride_alignment, spec.state_content_size_bytes)

    def test_it_takes_the_place_of_vllms_where_it_is_asked_for(self):
        self.assertEqual({backend.get_path() for backend in SPARSE}, {hypermla.vllm.SPARSE_BACKEND})
        self.assertEqual(Sparse.get_class().get_name(), "FLASHMLA_SPARSE")
        for backend in SPARSE:
            backend.clear_override()
        for plugins in {}, {"VLLM_PLUGINS": "hypermla"}:
            with mock.patch.dict(os.environ, plugins, clear=not plugins):
                hypermla.vllm.register_sparse()
            self.assertFalse(any(backend.is_overridden() for backend in SPARSE))

    def test_what_is_refused(self):
        backend = Sparse.get_class()
        self.assertEqual([backend.supports_compute_capability(DeviceCapability(*of)) for of in ((9, 0), (10, 0))],
                         [True, False])
        self.assertEqual(backend.get_supported_head_sizes(), [576])
        self.assertTrue(backend.supports_kv_cache_dtype("fp8_ds_mla"))
        self.assertFalse(backend.supports_kv_cache_dtype("nvfp4_ds_mla"))

    def test_which_decodes_must_have_as_many_queries(self):
        kind = Sparse.get_class().get_builder_cls()
        base = kind.__mro__[1]
        mixed, uniform = ([200, 90, 64], [1, 3, 1]), ([200, 90, 64], [2, 2, 2])

        def made(builder, *_):
            vars(builder).update(said, use_fp8_kv_cache=fp8, num_heads=heads, topk_tokens=40, dcp_world_size=1)

        for fp8, heads, said, batch, decodes in ((False, 128, {}, mixed, 3), (True, 16, {}, mixed, 3),
                                                 (True, 128, {}, mixed, 1), (True, 128, {}, uniform, 3),
                                                 (True, 16, {"fp8_use_mixed_batch": False}, mixed, 1)):  # 0.33
            with self.subTest(fp8=fp8, heads=heads, batch=batch, **said), \
                    mock.patch.object(base, "__init__", made), \
                    mock.patch.object(base, "build", lambda builder, *given: super(base, builder).build(*given)), \
                    mock.patch.object(sys.modules[kind.__module__], "load_sparse_kernels", return_value=["a"]) as load:
                builder = kind(types.SimpleNamespace(block_size=64), [], None, "cpu")
                apart = fp8 and (heads == 128 or bool(said))
                self.assertEqual([call.args for call in load.mock_calls],
                                 [("cpu", heads, 40, kind) for kind in [fp8] + [False] * apart])
                for name, value in {"reorder_batch_threshold": 4, "use_pcp": False, "_prefill_backend": None,
                                    "kv_cache_spec": types.SimpleNamespace(block_size=64), "topk_tokens": 40,
                                    "cp_kv_cache_interleave_size": 1, "device": "cpu",
                                    "_build_req_id_per_token": lambda common: None}.items():
                    setattr(builder, name, value)
                step = builder.build(0, Batch(*batch).common())
                self.assertEqual((step.num_decodes, step.num_prefills), (decodes, 3 - decodes))
                self.assertEqual(builder.require_uniform_decodes, decodes == 1)  # else it does not look
                renews = hasattr(base, "update_draft_decode_metadata") and not fp8  # 0.33
                self.assertEqual(getattr(builder, "supports_draft_decode_metadata_update", False), renews)

    def test_a_cache_in_fp8(self):
        cache = torch.zeros(5, 64, 656, dtype=torch.uint8)
        hypermla.append(self.rows, cache, torch.arange(len(self.rows)))
        packed = cache.view(-1, 656)
        latent = packed[:, :512].contiguous().view(torch.float8_e4m3fn).float()
        latent *= packed[:, 512:528].contiguous().view(torch.float32).repeat_interleave(128, 1)
        tokens = torch.cat([latent, self.rows[:, 512:].float()], 1)
        metadata = types.SimpleNamespace()
        with mock.patch.object(MlaDecode, "plan", autospec=True, side_effect=MlaDecode.plan) as plan:
            for layer in self.impl, copy.copy(self.impl):  # decodes of 3 requests, then all as one batch
                o, lse = layer._fp8_flash_mla_kernel(self.q.view(3, 2, HEADS, 576), cache, self.slots.view(3, 2, 40),
                                                     metadata)
        self.assertEqual((tuple(o.shape), tuple(lse.shape)), ((3, 2, HEADS, 512), (3, HEADS, 2)))
        self.assertEqual(plan.call_count, 1)
        self.agree(o.reshape(6, HEADS, 512), lse.transpose(1, 2).reshape(6, HEADS), tokens, [40] * 6, 0.02)
        mixed, _ = self.impl._fp8_flash_mla_kernel(self.q[None], cache, self.slots[None], types.SimpleNamespace())
        self.assertTrue(torch.equal(mixed[0], o.reshape(6, HEADS, 512)))

    def test_a_cache_in_16_bits(self):
        counts = [40, 30, 1, 40, 0, 7]
        given = (self.rows.view(5, 64, 576), self.slots, torch.tensor(counts, dtype=torch.int32))
        found = self.impl._bf16_flash_mla_kernel(self.q, *given)
        o, lse = found if isinstance(found, tuple) else (found, None)
        if lse is not None:  # 0.33, which gives queries of more heads
            wide = torch.cat([self.q, torch.full((6, 60, 576), math.nan, dtype=torch.bfloat16)], 1)
            self.assertTrue(torch.equal(self.impl._bf16_flash_mla_kernel(wide, *given, HEADS)[0], o))
        else:
            lse = hypermla.compat.flash_mla.flash_mla_sparse_fwd(self.q, self.rows[:, None], self.slots[:, None], SCALE,
                                                                 topk_length=given[2])[2]
        self.agree(o, lse, self.rows, counts, 0.02)

    def test_queries_in_two_parts_are_read_where_they_lie(self):
        latent = self.q[..., :LATENT].transpose(0, 1).contiguous().transpose(0, 1)  # as vLLM's product leaves them
        parts = latent, torch.cat([self.q[..., :NOPE], self.q[..., LATENT:]], -1)[..., NOPE:]
        module = sys.modules[type(self.impl).__mro__[1].__module__]
        packed = torch.zeros(5, 64, 656, dtype=torch.uint8)
        hypermla.append(self.rows, packed, torch.arange(len(self.rows)))
        kind = module.FlashMLASparseMetadata.FP8SeparatePrefillDecode
        chunk = kind.Prefill.Chunk(slice(2, 6), *[mock.MagicMock()] * 3, chunk_tot_seqlen=len(self.rows))
        decodes = [kind(num_decodes=count, num_prefill_tokens=6 - tokens, num_decode_tokens=tokens,
                        decode=kind.Decode(None, types.SimpleNamespace(), tokens // count),
                        prefill=kind.Prefill(None, None, [chunk])) for count, tokens in ((3, 6), (1, 2))]
        counts = torch.tensor([40, 40, 30, 1, 40, 7], dtype=torch.int32)
        convert = lambda *given, return_valid_counts=False, **named: (
            (self.slots, counts) if return_valid_counts else self.slots)
        joined = torch.zeros(6, 48, 576, dtype=torch.bfloat16)
        self.impl.topk_indices_buffer = self.slots
        vars(self.impl).update(kv_lora_rank=LATENT, prefill_bf16_workspace=self.rows, q_concat_buffer=joined)
        vars(self.impl).update(  # of 0.33
            q_head_size=576, index_group=None, pcp_dcp_kv_gather=False, need_to_return_lse_for_decode=False,
            dcp_world_size=1, workspace_specs=[], _convert_logical_to_physical_topk=convert)
        room = types.SimpleNamespace(get_simultaneous=lambda: (
            joined, self.rows, None, joined[..., :LATENT], torch.zeros(6, HEADS, LATENT, dtype=torch.bfloat16)))
        cases = [("auto", self.rows.view(5, 64, 576), {}), ("fp8_ds_mla", packed, {"fp8_use_mixed_batch": True})]
        cases += [("fp8_ds_mla", packed, {"fp8_extra_metadata": of}) for of in decodes]
        with mock.patch.object(module, "triton_convert_req_index_to_global_index", convert), \
                mock.patch.object(module, "current_workspace_manager", lambda: room), \
                mock.patch.object(module, "ops"):  # which would join queries
            for self.impl.kv_cache_dtype, cache, asked in cases:
                with self.subTest(**asked):
                    mixed = module.FlashMLASparseMetadata.FP8KernelMetadata(None, None, None)
                    step = types.SimpleNamespace(req_id_per_token=counts, block_table=None, block_size=64,
                                                 num_decode_tokens=6, num_actual_tokens=6,
                                                 **{"fp8_use_mixed_batch": False, "fp8_extra_metadata": mixed, **asked})
                    whole, _ = self.impl.forward_mqa(self.q, cache, step, None)
                    apart, _ = self.impl.forward_mqa(parts, cache, step, None)
                    self.assertEqual(module.ops.concat_mla_q.mock_calls, [])
                    self.assertTrue(torch.equal(apart, whole))
                    self.assertFalse(apart.isnan().any())
            wide = parts[0].repeat(1, 12, 1).transpose(0, 1).contiguous().transpose(0, 1), parts[1].repeat(1, 12, 1)
            self.impl.kv_cache_dtype, self.impl.num_heads = "auto", 48
            self.impl.forward_mqa(wide, self.rows.view(5, 64, 576), step, None)  # 48 heads that cannot be read there
            self.assertEqual(len(module.ops.concat_mla_q.mock_calls), 1)

    def test_layers_of_a_cache_in_16_bits_share_plans(self):
        calls = ((self.q, self.slots, [40, 30, 1, 40, 0, 7]), (self.q[:2], self.slots[4:], [3, 40]))

        def layer(impl, q, cache, slots, metadata, *others):  # vLLM's, but for how slots are found
            return [impl._bf16_flash_mla_kernel(q, cache, slots, torch.tensor(counts, dtype=torch.int32), *others)
                    for q, slots, counts in calls]

        base = type(self.impl).__mro__[1]
        heads = (HEADS,) if "actual_num_heads" in vllm_interface.parameters(base._forward_bf16_kv) else ()  # 0.33
        with mock.patch.object(base, "_forward_bf16_kv", layer), \
                mock.patch.object(MlaDecode, "plan", autospec=True, side_effect=MlaDecode.plan) as plan:
            alone = [self.impl._bf16_flash_mla_kernel(q, self.rows.view(5, 64, 576), slots,
                                                      torch.tensor(counts, dtype=torch.int32), *heads)
                     for q, slots, counts in calls]
            layers = [copy.copy(self.impl) for _ in range(3)]
            step = types.SimpleNamespace()
            for metadata in step, step, types.SimpleNamespace():  # passes
                plan.reset_mock()
                for impl in layers:
                    found = impl._forward_bf16_kv(None, self.rows.view(5, 64, 576), None, metadata, *heads)
                self.assertEqual(plan.call_count, len(calls))
            plan.reset_mock()
            for impl in layers:  # of a rank that has some of the tokens
                impl.total_cp_world_size = 2
                impl._forward_bf16_kv(None, self.rows.view(5, 64, 576), None, metadata, *heads)
            self.assertEqual(plan.call_count, len(layers) * len(calls))
        for one, other in zip(found, alone):
            one, other = (of[0] if isinstance(of, tuple) else of for of in (one, other))
            self.assertTrue(torch.equal(one, other))


if __name__ == "__main__":
    unittest.main()
