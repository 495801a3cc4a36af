"""The attention backend behind `--attention-backend hypermla`, of SGLang 0.5.17 to 0.5.23: decoding, verification of
drafts and extension of drafts by MlaDecode; prefill by MlaPrefill over decompressed keys and values (prefill.py) and by
MlaDecode in the absorbed form (absorbed.py). What these do not take FlashInfer does, as in SGLang's own FlashMLA
backend.

A step is planned once, outside of the CUDA graph and on the device, and all layers of the graph run that plan. One
MlaDecode for each number of queries (1, and that of drafts) serves every batch size, because its kernel, grid and
workspace follow from its capacity alone.
"""

import functools
import logging
import sys
import weakref

import torch
from sglang.kernels.ops.quantization.fp8_kernel import scaled_fp8_quant
from sglang.srt.environ import envs
from sglang.srt.layers.attention.flashmla_backend import FlashMLABackend, FlashMLAMultiStepDraftBackend
from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import is_in_breakable_cuda_graph
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import is_in_tc_piecewise_cuda_graph
from sglang.srt.models.deepseek_common import utils as deepseek
from sglang.srt.models.deepseek_common.attention_backend_handler import (AttentionBackendRegistry,
                                                                         handle_attention_flashinfer)
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec

try:
    from sglang.kernels.ops.attention.kv_indices import (create_flashmla_kv_indices_triton,
                                                         get_num_kv_index_blocks_flashmla)
except ImportError:  # before 0.5.23
    from sglang.kernels.ops.attention.utils import (create_flashmla_kv_indices_triton, get_num_kv_index_blocks_flashmla)

import hypermla
from hypermla._planned import HOPPER
from hypermla.compat._queries import ROUNDED_ROWS, takeable
from hypermla.mla_decode import LATENT, PAGES, ROPE
from hypermla.mla_prefill import NOPE, VALUE
from hypermla.sglang import NAME
from hypermla.sglang import prefill as decompressed
from hypermla.sglang.absorbed import Absorbed

_log = logging.getLogger(__name__)

# Which layers hand queries to this backend in two parts, latent and rotary: nothing needs to be concatenated.
if NAME not in deepseek.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
    deepseek.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(NAME)


def _chooses_form(new, prefixes):
    """Whether a step's form is the plug-in's choice: where the host knows its lengths, and the environment does not say
    from how many tokens of prefixes on these are decompressed."""
    return None not in (new, prefixes) and not envs.SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD.is_set()


@functools.cache
def _has_kernels(device):
    """Whether prefill there has kernels of Hopper, or the CPU's reference."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == HOPPER


def _form(layer, forward_batch):
    """Which form a layer's attention has in a step: what SGLang chooses for FlashInfer, which computes the absorbed
    one. But by its own choice the plug-in decompresses prefixes where it pays; of a cache in FP8, all of which
    FlashInfer's absorbed form converts, also where SGLang does it."""
    lengths = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
    if _chooses_form(*lengths):
        # The layer's own kv_cache_dtype is the command line's: "auto" where a checkpoint asks for FP8.
        absorbed = getattr(get_attn_backend(), "_absorbed", None)
        converts = get_token_to_kv_pool().dtype == torch.float8_e4m3fn and not (
            absorbed is not None and absorbed.takes(forward_batch))
        otherwise = envs.SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD.get() if converts else sys.maxsize
        layer.chunked_prefix_cache_threshold = 1 if decompressed.pays(*lengths) else otherwise
    return handle_attention_flashinfer(layer, forward_batch)


AttentionBackendRegistry.register(NAME, _form)


class _Steps:
    """What the steps of one number of queries a request share: the plan, and the memory that graphs see."""

    def __init__(self, decode, heads, requests, queries, device):
        self.decode = decode
        self.lse = torch.empty((requests * queries, heads), dtype=torch.float32, device=device)  # never read
        self.table = None  # of graphs, [requests, pages]
        self.rows = {}  # its first rows, by their number

    def rows_of_graphs(self, requests):
        if requests not in self.rows:
            self.rows[requests] = self.table[:requests]
        return self.rows[requests]


def _first(tensor, rows):
    """Without a view where that is all of it, as where a graph's runner calls: views cost the host's time."""
    return tensor if tensor.size(0) == rows else tensor[:rows]


def _parts(q, q_rope, layer):
    """A layer's queries, [tokens, heads, columns], latent and rotary."""
    heads, rope = layer.tp_q_head_num, layer.head_dim - layer.v_head_dim
    if q_rope is None:
        return q.view(-1, heads, layer.head_dim).split((layer.v_head_dim, rope), dim=-1)
    return q.view(-1, heads, layer.v_head_dim), q_rope.view(-1, heads, rope)


class HyperMlaBackend(FlashMLABackend):
    """draft_step: of the model that drafts, which of its steps this backend serves, from 0 on; else None."""

    supports_ragged_verify_graph = False
    needs_cpu_seq_lens = False

    def __init__(self, model_runner, skip_prefill=False, kv_indptr_buf=None, draft_step=None):
        _require_supported(model_runner)
        if getattr(_text_config(model_runner), "llama_4_scaling", None) is not None:
            # Layers that hand over two parts leave out this factor of queries, which Mistral-Large-3 has.
            deepseek.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS[:] = [
                name for name in deepseek.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS if name != NAME]
        super().__init__(model_runner, skip_prefill, kv_indptr_buf)
        self._draft_step = draft_step
        self._page = next(page for page in PAGES if self.page_size % page == 0)
        self._one = torch.ones(1, dtype=torch.float32, device=self.device) if self.is_fp8_kvcache else None
        self._cache_format = "fp8_576" if self.is_fp8_kvcache else "as_queries"
        self._max_tokens = min(self.req_to_token.shape[1], hypermla.MlaDecode.MAX_TOKENS)
        # The base's, which before 0.5.18 did not count those that pad a batch for several devices; graphs may come with
        # more.
        most, devices = len(self.kv_indptr) - 1, get_parallel().attn_tp_size
        self._max_requests = min(-(-most // devices) * devices, hypermla.MlaDecode.MAX_REQUESTS)
        self._graph_requests = 0
        self._scale = self._configured_scale = model_runner.model_config.scaling
        self._steps = {}  # by queries of a request
        self._planned = None  # queries, lengths and table of the step
        self.lender = None  # another backend, planned for the same batch before, whose table has all pages of this one
        self._prefill = _prefill(self, model_runner)  # None: in the absorbed form alone
        self._absorbed = _absorbed(self, model_runner)  # None: by FlashInfer
        self._waiting = []  # plans of FlashInfer: the base's methods, and for which batches

    # --- planning: outside of graphs ---

    def init_forward_metadata(self, forward_batch):
        if self._is_prefill(forward_batch):
            return self._begin_prefill(forward_batch)
        queries, lengths = self._queries_and_lengths(forward_batch, eager=True)

        def table():
            if forward_batch.seq_lens_cpu is None:
                most = self._max_tokens
            else:
                most = int(forward_batch.seq_lens_cpu.max()) + self._room()
            width = -(-min(max(most, 1), self._max_tokens) // self._page)
            return self._eager_block_kv_indices(len(lengths), width)

        self._plan(forward_batch, queries, lengths, table)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        if self._is_prefill(forward_batch):
            return super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        queries, lengths = self._queries_and_lengths(forward_batch, eager=False)

        def table():
            steps = self._of(queries)
            if steps.table is None:
                steps.table = torch.zeros((self._graph_requests, -(-self._max_tokens // self._page)), dtype=torch.int32,
                                          device=self.device)
            return steps.rows_of_graphs(lengths.size(0))

        self._plan(forward_batch, queries, lengths, table)

    def init_cuda_graph_state(self, max_bs, max_num_tokens, block_kv_indices=None):
        if max_bs > hypermla.MlaDecode.MAX_REQUESTS:
            raise ValueError(f"--attention-backend {NAME} takes graphs of up to {hypermla.MlaDecode.MAX_REQUESTS} "
                             f"requests, not {max_bs}: set a smaller --cuda-graph-max-bs")
        if max_bs > (self._graph_requests or self._max_requests):
            self._max_requests, self._steps = max(max_bs, self._max_requests), {}
        self._graph_requests = max(max_bs, self._graph_requests)
        if self.num_draft_tokens:
            self._verify_mask = _verify_mask(self, max_bs)

    def init_mha_chunk_metadata(self, forward_batch, disable_flashinfer_ragged=False):
        """Before the first layer that has a prefix decompressed, at once or in chunks."""
        if self._prefill is None:
            super().init_mha_chunk_metadata(forward_batch, disable_flashinfer_ragged)
        else:
            self._waiting.append((FlashMLABackend.init_mha_chunk_metadata, weakref.ref(forward_batch)))

    def can_run_prefill_cuda_graph(self, forward_batch):
        """SGLang 0.5.23 asks it of a step that it has captured."""
        return self._stays_captured(forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu)

    def vote_prefill_cuda_graph(self, batch):
        """The same of a step that is scheduled, whose graph all ranks of data parallelism replay, or none."""
        return self._stays_captured(batch.extend_lens, batch.prefix_lens)

    def _stays_captured(self, new, prefixes):
        graphs = get_exec().graph
        asked_for = (graphs.cuda_graph_backend_prefill, graphs.cuda_graph_max_bs_prefill, graphs.cuda_graph_bs_prefill)
        return (self._prefill is None or asked_for != (None, None, None) or not _chooses_form(new, prefixes)
                or (sum(prefixes) and not self.enable_chunk_kv)
                or not decompressed.beats_graphs(self.num_local_heads, new, prefixes))

    def _begin_prefill(self, forward_batch):
        """FlashInfer's plans wait for the device, and most steps need none: each is made when a layer asks for it. But
        now for what runs between graphs, whose form is the absorbed one, where that is FlashInfer's."""
        self._waiting = []
        for ours in self._prefill, self._absorbed:
            if ours is not None:
                ours.begin()
        between_graphs = is_in_tc_piecewise_cuda_graph() or is_in_breakable_cuda_graph()
        absorbs = self._absorbed is not None and self._absorbed.takes(forward_batch)
        if absorbs or (self._prefill is not None and not between_graphs):
            self._waiting.append((FlashMLABackend.init_forward_metadata, weakref.ref(forward_batch)))
        else:
            super().init_forward_metadata(forward_batch)

    def _is_prefill(self, forward_batch):
        mode = forward_batch.forward_mode
        return not (mode.is_decode_or_idle() or mode.is_target_verify() or mode.is_draft_extend_v2())

    def _room(self):
        """Tokens of a step that seq_lens_cpu may not count."""
        return (self.num_draft_tokens or 0) + (0 if self._draft_step is None else self._draft_step + 1)

    def _queries_and_lengths(self, forward_batch, eager):
        """Queries of each request, and the tokens that it then has, int32 on the device."""
        mode, drafts = forward_batch.forward_mode, self.num_draft_tokens
        lengths = _first(forward_batch.seq_lens, forward_batch.batch_size)
        if mode.is_target_verify():
            return drafts, (lengths + drafts).to(torch.int32)
        if mode.is_draft_extend_v2():  # a window of `drafts` queries, which graphs' lengths count already
            if eager:
                lengths = lengths - forward_batch.extend_seq_lens + drafts
            return drafts, lengths.to(torch.int32)
        if self._draft_step is not None:  # the drafts of the steps before this one, and its own, are in the cache
            lengths = lengths + (self._draft_step + 1)
        return 1, lengths.to(torch.int32)

    def _plan(self, forward_batch, queries, lengths, table):
        """table: makes the one to be filled, [requests, pages]."""
        count = lengths.size(0)
        if not count:  # an idle step, whose layers call nothing
            return
        if self.lender is None:
            pages = self._filled(_first(forward_batch.req_pool_indices, count), lengths, table())
        else:
            pages = self.lender._planned[2]
        self._of(queries).decode.plan(lengths)
        self._planned = queries, lengths, pages

    def _filled(self, requests, lengths, table):
        """The pages of requests with these rows of SGLang's pool."""
        count = lengths.size(0)
        if table.is_cuda:
            blocks = get_num_kv_index_blocks_flashmla(table.shape[1], self._page)
            create_flashmla_kv_indices_triton[count, blocks](
                self.req_to_token, requests, lengths, None, table, self.req_to_token.stride(0), table.stride(0),
                PAGED_SIZE=self._page)
        else:
            table.copy_(self.req_to_token[requests, :table.shape[1] * self._page:self._page] // self._page)
        return table

    def _rounds(self, queries):
        """To e4m3, as SGLang's own FlashMLA does with all queries beside a cache in FP8. Pages of 1 token have no
        kernel that gains by it."""
        return self.is_fp8_kvcache and self._page > 1 and self.num_local_heads * queries >= ROUNDED_ROWS

    def _of(self, queries):
        if queries not in self._steps:
            decode = hypermla.MlaDecode(
                heads=self.num_local_heads, max_requests=self._max_requests, max_queries=queries,
                max_tokens=self._max_tokens, page=self._page, dtype=self.q_data_type, scale=self._scale,
                cache_format=self._cache_format, fp8_queries=self._rounds(queries),
                device=str(self.req_to_token.device))
            _log.info("HyperMLA decodes requests of %d queries: %s", queries, decode.explain())
            self._steps[queries] = _Steps(decode, self.num_local_heads, self._max_requests, queries, self.device)
        return self._steps[queries]

    # --- attention of a layer ---

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, q_rope=None, k_rope=None):
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, q_rope=None, k_rope=None):
        if self._is_prefill(forward_batch):
            if (self._prefill is not None and q_rope is None and not save_kv_cache
                    and self._prefill.takes(q, k, layer, forward_batch)):
                return self._prefill.run(q, k, v, layer, forward_batch)
            if self._absorbed is not None and layer.head_dim == LATENT + ROPE and not layer.logit_cap:
                parts = _parts(q, q_rope, layer)
                if self._absorbed.takes(forward_batch, len(parts[0])):
                    return self._absorb(parts, k, v, layer, forward_batch, save_kv_cache, k_rope)
            waiting, self._waiting = self._waiting, []
            for plan, batch in waiting:
                plan(self, batch() or forward_batch)
            # Not FlashMLA's, which takes queries in one part only.
            return super(FlashMLABackend, self).forward_extend(q, k, v, layer, forward_batch, save_kv_cache,
                                                               q_rope=q_rope, k_rope=k_rope)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope)

    def _attend(self, q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope):
        if save_kv_cache:
            self._save(k, v, layer, forward_batch, k_rope)
        if layer.scaling != self._scale:
            self._rescale(layer.scaling)
        queries, lengths, table = self._planned
        steps = self._steps[queries]
        return self._run(steps.decode, _parts(q, q_rope, layer), layer, table, len(lengths) * queries,
                         rounds=self._rounds(queries), room=steps.lse)

    def _absorb(self, parts, k, v, layer, forward_batch, save_kv_cache, k_rope):
        """Of a prefill."""
        if save_kv_cache:
            self._save(k, v, layer, forward_batch, k_rope)
        decode, table, queries = self._absorbed.planned(forward_batch, layer.scaling, self._pages_of)
        return self._run(decode, parts, layer, table, queries, rounds=False)

    def _pages_of(self, requests, lengths, longest):
        return self._filled(requests, lengths, self._eager_block_kv_indices(len(lengths), -(-longest // self._page)))

    def _save(self, k, v, layer, forward_batch, k_rope):
        if k is None:
            return
        if k_rope is not None:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)
        else:
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)

    def _run(self, decode, parts, layer, table, planned, rounds, room=None):
        """planned: so many queries come first, others pad them. rounds: queries to e4m3. room: for log-sum-exps, which
        nobody reads."""
        cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        pages = cache.shape[0] // self._page
        cache = cache[:pages * self._page].view(pages, self._page, layer.head_dim)
        # SGLang writes numbers as they are, whatever k_scale a checkpoint has, and its prefill reads them so.
        factor = self._one
        if self.is_fp8_kvcache:
            cache = cache.view(torch.uint8)
        if rounds:
            q = torch.cat(parts, dim=-1)
            q, q_factor = scaled_fp8_quant(q.flatten(0, 1), factor)[0].view(q.shape), factor
        else:
            q, q_factor = takeable(parts), None
        tokens, heads, columns = parts[0].shape
        lse = room[:tokens] if room is not None and tokens <= len(room) else None
        o, _ = decode.run(q, cache, table, lse=lse, out=parts[0].new_empty((tokens, heads, columns)),
                          cache_scale=factor, q_scale=q_factor)
        if tokens > planned:  # a batch that was padded behind its plan
            o[planned:] = 0
        return o.view(-1, heads * columns)

    def update_verify_buffers_to_fill_after_draft(self, spec_info, cuda_graph_bs):
        """Nothing: what a chain verifies is planned by its lengths alone."""

    def _rescale(self, scale):
        """The layers' scale is not the model's configuration's: seen in the first forward pass, the warm-up."""
        if self._scale != self._configured_scale:
            raise ValueError(f"layers with different scales of their scores ({self._scale}, {scale}) are not supported "
                             "by the attention backend 'hypermla'; take another one")
        tables = {queries: steps.table for queries, steps in self._steps.items()}
        self._scale, self._steps = scale, {}
        for queries, table in tables.items():
            self._of(queries).table = table
        queries, lengths, _ = self._planned
        self._of(queries).decode.plan(lengths)


class HyperMlaMultiStepDraftBackend(FlashMLAMultiStepDraftBackend):
    """Of a model that drafts several tokens, one after the other: a backend for each."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner, topk, speculative_num_steps):
        if topk > 1:
            raise ValueError(_TREES)
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        self.attn_backends = [HyperMlaBackend(model_runner, skip_prefill=True, draft_step=step)
                              for step in range(speculative_num_steps - 1)]

    def common_template(self, forward_batch, call_fn):
        """Plans all steps. The last one has the longest requests, so it comes first, and its table serves all."""
        for step, backend in reversed([*enumerate(self.attn_backends)]):
            backend.lender = None if backend is self.attn_backends[-1] else self.attn_backends[-1]
            try:
                call_fn(step, forward_batch)
            finally:
                backend.lender = None


_TREES = (f"--attention-backend {NAME} takes chains of drafts, not trees, as n-gram drafts are, too: set "
          "--speculative-eagle-topk 1 with another algorithm, or choose another backend")


def _text_config(runner):
    config = getattr(runner.model_config, "hf_config", None)
    return getattr(config, "text_config", config)


def _prefills(backend, runner):
    """Whether prefill is the backend's, on a device with kernels for it."""
    return not backend.skip_prefill and _has_kernels(backend.req_to_token.device) and (
        getattr(runner, "prefill_attention_backend_str", NAME) == NAME)  # not SGLang's hybrid mode


def _prefill(backend, runner):
    """What MlaPrefill does of a backend's prefill; None: nothing of it."""
    config, device = runner.model_config, backend.req_to_token.device
    columns = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    if (not _prefills(backend, runner) or columns != (NOPE, ROPE, VALUE)
            or get_exec().kernel.flashinfer_mla_disable_ragged):  # all in the absorbed form
        return None
    try:
        return decompressed.Prefill(backend.num_local_heads, backend.q_data_type, config.scaling, str(device),
                                    chunks=backend.enable_chunk_kv)
    except hypermla.Error as error:  # an installation without these kernels and without compilers
        _log.warning("HyperMLA leaves prefill over decompressed keys and values to FlashInfer: %s", error)
        return None


def _absorbed(backend, runner):
    """What MlaDecode does of a backend's prefill, in the absorbed form; None: nothing of it."""
    if not _prefills(backend, runner):
        return None
    try:
        absorbed = Absorbed(backend.num_local_heads, backend._max_requests, backend._max_tokens, backend._page,
                            backend.q_data_type, backend._cache_format, runner.model_config.scaling,
                            str(backend.req_to_token.device))
    except hypermla.Error as error:
        _log.warning("HyperMLA leaves prefill in the absorbed form to FlashInfer: %s", error)
        return None
    decompressed.say(f"HyperMLA prefills in the absorbed form: {absorbed.explain()}")
    return absorbed


def _require_supported(runner):
    """Raises ValueError, which SGLang shows before it serves, for a model or flags that the backend does not take."""
    config = runner.model_config
    if getattr(_text_config(runner), "index_topk", None) is not None:
        raise ValueError(f"--attention-backend {NAME} attends to all tokens, but this model's indexer chooses some: "
                         "leave the flag out, and start with SGLANG_PLUGINS=hypermla,hypermla_sparse")
    dims = getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None)
    if not runner.use_mla_backend or dims != (512, 64):
        another = ("add --speculative-draft-attention-backend fa3 for the drafter" if runner.is_draft_worker else
                   "choose another backend")
        raise ValueError(f"--attention-backend {NAME} is for latent attention with 512 and 64 columns, as DeepSeek-V3 "
                         f"and Kimi-K2 have it, not {dims}; {another}")
    types = runner.kv_cache_dtype, runner.dtype
    if types not in ((torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.float8_e4m3fn, torch.bfloat16)):
        raise ValueError(f"--attention-backend {NAME} takes a cache of bfloat16 or float16, the model's type, or of "
                         f"e4m3 beside bfloat16, not {types[0]} beside {types[1]}; set --kv-cache-dtype auto")
    if getattr(getattr(runner, "kv_index_translator", None), "reads_are_translated", False):
        raise ValueError(f"--attention-backend {NAME} does not take the unified memory pool; leave "
                         "--enable-unified-memory off")
    if get_parallel().attn_cp_size > 1:  # queries would be those of a rank, lengths those of all
        raise ValueError(f"--attention-backend {NAME} does not take context parallelism of prefills; leave it off")
    if get_parallel().attn_dcp_size > 1:
        raise ValueError(f"--attention-backend {NAME} does not take decode context parallelism yet; leave it off")
    if get_exec().deterministic.enable_deterministic_inference:  # SGLang asks for one of two backends alone
        raise ValueError(f"--attention-backend {NAME} does not take --enable-deterministic-inference: the form of a "
                         "prefill and the parts of a decode follow from the batch; leave it off")
    # An n-gram drafter fills up its drafts with more first ones: a tree, also with one branch.
    if (get_spec().speculative_eagle_topk or 0) > 1 or get_spec().speculative_algorithm == "NGRAM":
        raise ValueError(_TREES)


def _verify_mask(backend, max_requests):
    from sglang.srt.layers.attention.verify_mask import maybe_create_verify_mask

    return maybe_create_verify_mask(
        is_draft_runner=backend.is_draft_runner, skip_prefill=backend.skip_prefill, max_bs=max_requests,
        max_context_len=backend.max_context_len, num_draft_tokens=backend.num_draft_tokens, device=backend.device,
        is_read=False)
