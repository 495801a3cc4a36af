"""vLLM's three classes of an attention backend, over MlaDecode: 0.26 to 0.33 by one code path.

vLLM's common classes of MLA do all that is not attention: they divide a batch into decodes and prefills, write the
cache, and project. Requests with at most reorder_batch_threshold queries are decodes. What differs between the
releases is looked for where it is used, never by a version's number. Prefills are MlaPrefill's (prefill.py) unless
attention_config names another backend of prefills.
"""

import copy
import math
import re
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from vllm import envs
from vllm.config import CUDAGraphMode, get_current_vllm_config_or_none
from vllm.distributed import get_dcp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import (MLAAttention, MLACommonBackend,
                                                                MLACommonDecodeMetadata, MLACommonImpl,
                                                                MLACommonMetadata, MLACommonMetadataBuilder,
                                                                QueryLenSupport)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

from hypermla import _tensors
from hypermla._planned import HOPPER
from hypermla.compat._queries import ROUNDED_ROWS, takes_strides
from hypermla.mla_decode import LATENT, ROPE, MlaDecode
from hypermla.mla_prefill import NOPE, VALUE, MlaPrefill
from hypermla.vllm import BACKEND, PREFILL_BACKEND
from hypermla.vllm.plans import Capacity, Plans
from hypermla.vllm.prefill import HyperMLAPrefill
from hypermla.vllm.prefixes import LEAST_TOKENS, Decompressed, SharedPrefixes, bytes_of_token

logger = init_logger("vllm.hypermla")  # below the one that vLLM shows

FIXED_SPLIT_BYTES = 288 << 20  # for partial outputs, where every request is cut at fixed places
# Requests of so many queries are decodes, too: short continuations of a long context, of which the latent path reads
# the cache once and the decompressed path decompresses all.
SHORT_EXTEND = 128


def _is_portable():
    """Whether the GPU at hand has the portable kernels alone, which run from compute capability 8.0 on."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() != HOPPER


_named = False  # whether _prefill_too(), not the command line, has named our backend of prefills


def _prefill_too(config, dimensions):
    """Has layers of these columns (NoPE, RoPE, values) prefill by our kernels, too, on Hopper and unless the command
    line names a backend; a drafter's of others, which inherits that, by vLLM's own. vLLM chooses one after it has made
    a layer's implementation. Returns whether it will be ours."""
    global _named
    custom, attention_config = MLAPrefillBackendEnum.CUSTOM, config.attention_config
    ours = custom.is_overridden() and custom.get_path() == PREFILL_BACKEND
    fits = dimensions == (NOPE, ROPE, VALUE)
    if (attention_config.mla_prefill_backend is None and fits and ours and torch.cuda.is_available()
            and not _is_portable()):
        logger.info_once("""HyperMLA prefills, too; -ac '{"mla_prefill_backend": "FLASH_ATTN"}' declines""")
        attention_config.mla_prefill_backend, _named = custom, True
    elif attention_config.mla_prefill_backend is custom and not fits and ours and _named:
        logger.info_once("vLLM prefills layers of %d + %d and %d columns by a backend of its own", *dimensions)
        attention_config.mla_prefill_backend = None
    return fits and ours and attention_config.mla_prefill_backend is custom


def _draft_too(config):
    """Has a drafter of latent attention, an MTP layer above all, attend by our kernels, too, where they were chosen for
    the model and the command line names none for the drafter: vLLM would choose anew. It makes the drafter after the
    model's layers."""
    speculative_config, chosen = config.speculative_config, config.attention_config.backend
    if (speculative_config is None or speculative_config.method not in MODELS or chosen is None
            or chosen.get_path() != BACKEND):
        return
    drafter = speculative_config.draft_model_config
    if (speculative_config.attention_backend is None and speculative_config.kv_cache_dtype is None
            and not speculative_config.parallel_drafting
            and drafter.use_mla and drafter.get_head_size() == LATENT + ROPE):
        logger.info_once("""HyperMLA drafts, too; "attention_backend": "FLASH_ATTN_MLA" in --speculative-config """
                         "declines")
        speculative_config.attention_backend = chosen


def _drafted_queries(config):
    """Queries of a request that decodes with drafts, as vLLM's builders count them."""
    if config.speculative_config is None or config.speculative_config.num_speculative_tokens is None:
        return 1
    together = 2 if config.speculative_config.parallel_drafting else 1
    return 1 + together * config.speculative_config.num_speculative_tokens


FP8 = "fp8", "fp8_e4m3"  # caches of e4m3, with one factor for all tokens
# Drafters that find more drafts for one request than for another.
LOOKUPS = "ngram", "ngram_gpu", "suffix"
LAYERS = "mtp", "eagle", "eagle3"  # drafters whose layers vLLM counts on behind the model's
MODELS = *LAYERS, "draft_model"  # drafters with layers of attention like a model's


def _largest_graph(config):
    """Tokens of the largest graph; vLLM may round them up to whole requests. None where it is not known."""
    largest, queries = config.compilation_config.max_cudagraph_capture_size, _drafted_queries(config)
    return None if largest is None else -(-largest // queries) * queries


def _add_graphs_of_whole_batches(config):
    """Where vLLM chose the sizes of graphs, these end at 512 tokens: 64 requests with 7 drafts each. Adds larger ones,
    as far as requests and drafts go, in steps of 8 requests."""
    compilation_config, queries = config.compilation_config, _drafted_queries(config)
    most = min(config.scheduler_config.max_num_seqs * queries, config.scheduler_config.max_num_batched_tokens,
               MlaDecode.MAX_QUERIES)
    largest, sizes = most // queries * queries, compilation_config.cudagraph_capture_sizes or []
    if queries > 1 and largest > 512 and sizes[-3:] == [480, 496, 512]:
        compilation_config.cudagraph_capture_sizes = sizes + sorted(range(largest, 512, -8 * queries))
        compilation_config.max_cudagraph_capture_size = largest
        logger.info_once("HyperMLA adds CUDA graphs of up to %d tokens, of %d requests with all of their drafts; "
                         "cudagraph_capture_sizes of your own decline", largest, largest // queries)


def _of_another_backend(layer):
    """Whether a layer of attention is another backend's. One that does not say whose it is, like the mocks in vLLM's
    own tests, counts as another's."""
    try:
        return hasattr(layer, "get_attn_backend") and layer.get_attn_backend() is not HyperMLABackend
    except NotImplementedError:
        return True


def _settle_graphs(config):
    """Settles which graphs there are, and returns whether one of them serves every batch of as many tokens, prompts
    included, as with cudagraph_mode=FULL. Ours can, since all of its requests are decodes: none has more queries than
    the largest graph has tokens. vLLM's own choice, FULL_AND_PIECEWISE, has whole graphs for equal numbers of drafts
    alone: where a drafter's differ it becomes FULL, unless layers of another backend, which vLLM asks too, would take
    that back."""
    largest = _largest_graph(config)
    if (_is_portable() or envs.VLLM_BATCH_INVARIANT or config.parallel_config.decode_context_parallel_size > 1
            or config.parallel_config.prefill_context_parallel_size > 1
            or largest is None or largest > MlaDecode.MAX_QUERIES):
        return False
    layers = config.compilation_config.static_forward_context.values()
    if (config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE
            and config.speculative_config is not None and config.speculative_config.method in LOOKUPS
            and not any(map(_of_another_backend, layers))):
        logger.info_once("HyperMLA takes cudagraph_mode=FULL: requests have different numbers of drafts, and so their "
                         "steps stay in graphs; cudagraph_mode=FULL_DECODE_ONLY declines")
        config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    if config.compilation_config.cudagraph_mode != CUDAGraphMode.FULL:
        return False
    _add_graphs_of_whole_batches(config)
    return True


def _scheduled_elsewhere(config):
    """Whether the scheduler has a configuration of its own, in another process."""
    return config.parallel_config.distributed_executor_backend not in ("uni", "external_launcher")


def _keep_prompts_whole(config):
    """Under batch invariance. vLLM attends tokens of a prompt that follow others in the cache in two parts, which it
    merges: other bits than those of a prompt that is prefilled at once. Which follow depends on what ran before, by the
    prefix cache, and on what else is in a step, whose last prompt is cut. vLLM, too, does without prefix caching for
    those of its backends whose prompts and decodes always have different kernels."""
    if config.cache_config.enable_prefix_caching:
        logger.warning_once("HyperMLA turns prefix caching off for VLLM_BATCH_INVARIANT=1: a prompt of which the cache "
                            "has a part rounds differently")
        config.cache_config.enable_prefix_caching = False
    if config.scheduler_config.enable_chunked_prefill:
        logger.warning_once("With VLLM_BATCH_INVARIANT=1 a prompt that is cut because a step is full rounds "
                            "differently; --no-enable-chunked-prefill keeps prompts whole")


class HyperMLABackend(MLACommonBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16", *FP8]

    @staticmethod
    def get_name():
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return HyperMLAImpl

    @staticmethod
    def get_builder_cls():
        return HyperMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [64, 128, 32, 16]

    @classmethod
    def get_preferred_block_size(cls, default_block_size):
        return max(default_block_size, 64)  # smaller pages cost more loads

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        # Blocks first: those of all layers may lie side by side.
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @classmethod
    def customize_spec(cls, spec):
        """From 0.28 on. Tokens in FP8 are whole ones apart, whatever pages of other layers lie between: a spec knows
        of that from 0.31 on, and until 0.28 indexes_kv_by_block_stride() says it."""
        spec = super().customize_spec(spec)
        if spec.dtype.itemsize == 1 and hasattr(spec, "block_stride_alignment"):
            spec = replace(spec, block_stride_alignment=LATENT + ROPE)
        return spec

    @classmethod
    def indexes_kv_by_block_stride(cls):
        """Until 0.28: whether pages may be padded to the bytes of other layers', which in FP8 need not be whole
        tokens."""
        config = get_current_vllm_config_or_none()
        if config is not None and config.cache_config.cache_dtype in FP8:
            return False
        return super().indexes_kv_by_block_stride()

    @classmethod
    def get_supported_head_sizes(cls):
        return [LATENT + ROPE]

    @classmethod
    def supports_compute_capability(cls, capability):
        return (capability.major, capability.minor) >= (8, 0)

    @classmethod
    def supports_batch_invariance(cls):
        return True

    @classmethod
    def supports_non_causal(cls):
        # Where vLLM's common builder sends blocks of drafts that see each other to the decodes.
        return hasattr(MLACommonMetadataBuilder, "supports_non_causal_multi_token_decode")

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls):
        return True  # the device's query_start_loc alone is believed

    @classmethod
    def supports_combination(cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse,
                             use_mm_prefix, device_capability):
        if not use_mla:
            return ("this layer, perhaps a drafter's, has no latent attention, which HyperMLA is for; in place of "
                    """--attention-backend give -ac '{"backend_per_kind": {"mla_attention": "CUSTOM"}}'""")
        if use_sparse:
            return "HyperMLA's plug-in has dense attention only; sparse models need a *_SPARSE backend"
        if has_sink or use_mm_prefix:
            return f"HyperMLA's plug-in has no {'attention sinks' if has_sink else 'bidirectional prefixes'}"
        if kv_cache_dtype in FP8 and dtype != torch.bfloat16:
            return f"HyperMLA reads caches in FP8 for models of bfloat16, not of {dtype}; leave --kv-cache-dtype out"
        if kv_cache_dtype not in (None, "auto", str(dtype).removeprefix("torch."), *FP8):
            return (f"HyperMLA reads a cache of the model's type, {dtype}, or fp8, not kv_cache_dtype={kv_cache_dtype};"
                    " leave --kv-cache-dtype out")
        if head_size != LATENT + ROPE:
            return f"HyperMLA's kernels are made for 512 latent and 64 RoPE columns, not for {head_size} in all"
        if device_capability is not None and not cls.supports_compute_capability(device_capability):
            return "HyperMLA's decoding kernels run from compute capability 8.0 on"
        portable = device_capability is not None and (device_capability.major, device_capability.minor) != HOPPER
        if portable and kv_cache_dtype in FP8:
            return "HyperMLA reads caches in FP8 on Hopper only; leave --kv-cache-dtype out"
        config = get_current_vllm_config_or_none()
        if config is None or config.model_config is None:
            return None
        if _asked(config, "fp8_queries") and kv_cache_dtype not in FP8:
            return "hypermla_fp8_queries rounds queries beside a cache in FP8; add --kv-cache-dtype fp8"
        if _asked(config, "fp8_queries") and envs.VLLM_BATCH_INVARIANT:
            return "with VLLM_BATCH_INVARIANT=1 queries stay as they are; leave hypermla_fp8_queries out"
        if portable and config.parallel_config.decode_context_parallel_size > 1:
            return "HyperMLA shares a context among Hopper GPUs only; leave --decode-context-parallel-size out"
        for option in ("shared_prefixes", "prefix_cache"):
            if portable and _asked(config, option):
                return f"hypermla_{option} needs a Hopper GPU; leave it out"
        drafter = config.speculative_config
        apart = {"VLLM_BATCH_INVARIANT=1": envs.VLLM_BATCH_INVARIANT,
                 "decode context parallelism": config.parallel_config.decode_context_parallel_size > 1}
        for option, more in (("shared_prefixes", {"a cache in FP8": kv_cache_dtype in FP8}), ("prefix_cache", {
                "hypermla_shared_prefixes": _asked(config, "shared_prefixes"),
                "a cache that other engines fill": getattr(config, "kv_transfer_config", None) is not None,
                "micro-batches": getattr(config.parallel_config, "use_ubatching", False),
                "sleep mode": any(getattr(config.model_config, f"enable_{name}", False)
                                  for name in ("sleep_mode", "cumem_allocator")),
                "drafters but MTP, EAGLE and lookups": (drafter is not None and (
                    drafter.method not in (*LOOKUPS, *LAYERS) or drafter.parallel_drafting))})):
            if wrong := [name for name, asked in (apart | more).items() if asked and _asked(config, option)]:
                return f"hypermla_{option} is not for {wrong[0]}; leave one of them out"
        if config.scheduler_config.max_num_seqs > MlaDecode.MAX_REQUESTS:
            return f"HyperMLA decodes at most {MlaDecode.MAX_REQUESTS} requests at once; lower --max-num-seqs to that"
        if config.model_config.max_model_len > MlaDecode.MAX_TOKENS:
            return f"HyperMLA's requests have at most {MlaDecode.MAX_TOKENS} tokens; lower --max-model-len to that"
        if config.parallel_config.decode_context_parallel_size > MlaDecode.MAX_SHARDS:
            return (f"HyperMLA shares a context among at most {MlaDecode.MAX_SHARDS} GPUs; lower "
                    "--decode-context-parallel-size to that")
        if config.parallel_config.cp_kv_cache_interleave_size > MlaDecode.MAX_INTERLEAVE:
            return (f"HyperMLA shares a context in turns of at most {MlaDecode.MAX_INTERLEAVE} tokens; lower "
                    "--cp-kv-cache-interleave-size to that")
        if envs.VLLM_BATCH_INVARIANT and config.cache_config.enable_prefix_caching and _scheduled_elsewhere(config):
            return ("with VLLM_BATCH_INVARIANT=1 a prompt of which the cache has a part would round differently; add "
                    "--no-enable-prefix-caching")
        return None


def _asked(config, option, otherwise=False):
    """Whether --additional-config asks for one of ours; `otherwise`, where it says nothing of it."""
    asked = config.additional_config
    return bool(asked.get("hypermla_" + option, otherwise)) if isinstance(asked, dict) else otherwise


def _rounds_queries(config, heads, cache):
    """Whether queries are rounded to e4m3 beside a cache of that type, as vLLM's FLASHMLA has them: where those of a
    request fill a tile of rows products bind, and those of e4m3 have twice the rate."""
    many = heads * _drafted_queries(config) >= ROUNDED_ROWS
    return cache in FP8 and _asked(config, "fp8_queries", many and not envs.VLLM_BATCH_INVARIANT)


def _most_tokens(config):
    """Queries of a step, at most. A model that drafts gets one more of each request than the scheduler counts."""
    drafts = config.scheduler_config.max_num_seqs if config.speculative_config is not None else 0
    return max(config.scheduler_config.max_num_batched_tokens + drafts, _largest_graph(config) or 0)


def _longest_decode(config, any_batch, heads):
    """Queries of the longest request that decodes; heads: those of all shards."""
    usual = _drafted_queries(config)
    if envs.VLLM_BATCH_INVARIANT:  # one kernel for all, where bits may not depend on which other requests a step has
        return usual
    if _is_portable():  # whose blocks are those of the capacity, most of which longer requests would leave idle
        return usual
    if any_batch:
        return max(usual, SHORT_EXTEND, _largest_graph(config) or 0)
    # As long as MlaDecode takes it: the planner counts up to 2^30 blocks of all row tiles, which have 16 rows at least.
    longest, requests, most = max(usual, SHORT_EXTEND), config.scheduler_config.max_num_seqs, _most_tokens(config)
    blocks, taken = config.model_config.max_model_len // 64 + 64, MlaDecode.most_query_tokens(heads)
    while longest > usual and (min(requests * longest, most) > taken or (
            min(requests * longest, most) * heads // 16 + requests) * blocks > 1 << 30):
        longest = max(longest // 2, usual)
    return longest


def _capacities(config, any_batch, heads, shards, device):
    """Of usual steps, and of those with longer requests; heads: those of all shards."""
    requests, tokens = config.scheduler_config.max_num_seqs, config.model_config.max_model_len
    usual, longest = _drafted_queries(config), _longest_decode(config, any_batch, heads)
    # The GPUs that share the context of every request: lengths of whole requests tell what a draft sees of a shard.
    interleave = config.parallel_config.cp_kv_cache_interleave_size if shards > 1 else 1
    shard_of = shards, get_dcp_group().rank_in_group if shards > 1 else 0, interleave
    most = _most_tokens(config)
    of_shard = -(-tokens // (shards * interleave)) * interleave
    split = MlaDecode.fixed_split(FIXED_SPLIT_BYTES, heads, requests, usual, of_shard,
                                  device) if envs.VLLM_BATCH_INVARIANT else 0
    shares = _asked(config, "shared_prefixes")
    short = Capacity(requests, usual, requests * usual, tokens, split, *shard_of, shares)
    # Requests of many queries fill their row tiles: to share prefixes saves nothing there.
    long = short if longest == usual else Capacity(requests, longest, min(requests * longest, most), tokens, 0,
                                                   *shard_of, shares and any_batch)
    taken = MlaDecode.most_query_tokens(heads)
    if max(short.query_tokens, long.query_tokens) > taken:
        raise ValueError(f"HyperMLA decodes at most {taken} tokens of {heads} heads in a step; lower "
                         f"--max-num-seqs, now {requests}, or --max-num-batched-tokens")
    return long if any_batch else short, long  # a graph may be recorded with short queries and replayed with long ones


def _kind(config, heads, page, scale, cache, rounded):
    """Of layers, as Plans has it, over a cache of that type; rounded: whether their queries are."""
    return heads, page, config.model_config.dtype, scale, "fp8_576" if cache in FP8 else "as_queries", rounded


def _prefix_of_layer(config, heads, dimensions):
    """A layer's part of the room for decompressed prefixes that --additional-config asks for, in GiB of all layers of
    this device; None: it does not. dimensions: columns of NoPE, RoPE and values."""
    if config is None or config.model_config is None or not _asked(config, "prefix_cache"):
        return None
    if dimensions != (NOPE, ROPE, VALUE):
        raise ValueError(f"hypermla_prefix_cache is for layers of {NOPE}, {ROPE} and {VALUE} columns, not of "
                         f"{dimensions}; leave it out")
    asked, model = config.additional_config["hypermla_prefix_cache"], config.model_config
    layers = model.get_num_layers(config.parallel_config)
    if config.speculative_config is not None and config.speculative_config.method in LAYERS:
        drafter = config.speculative_config.draft_model_config
        layers += drafter.get_num_layers(config.parallel_config)
    if not isinstance(asked, (int, float)):
        raise ValueError(f"hypermla_prefix_cache={asked!r} is no number; give it GiB, as 4 or 0.5")
    tokens = min(int(asked * 2**30 / layers / bytes_of_token(heads)), MlaPrefill.MAX_TOKENS)
    if tokens < LEAST_TOKENS:
        least = LEAST_TOKENS * bytes_of_token(heads) * layers / 2**30
        raise ValueError(f"hypermla_prefix_cache={asked} has room for {tokens} tokens in each of {layers} layers; give "
                         f"it {math.ceil(100 * least) / 100} GiB at least, for {LEAST_TOKENS} tokens, or leave it out")
    return Decompressed(tokens, heads, model.dtype, config.device_config.device)


# What HyperMLAImpl.reserve_workspace() holds until there is a builder: Plans by device, and backends of prefills.
_reserved = {}


def _is_drafters(config, layer_name):
    """Whether vLLM made a layer for a drafter of LAYERS."""
    number, model = re.search(r"\blayers\.(\d+)\.", layer_name), config.model_config
    return number is not None and int(number[1]) >= model.get_total_num_hidden_layers()


def _add_prefix(layer, shared):
    """Has a layer add the SharedPrefixes of a step to the outputs of its decodes, behind its projection of values."""
    again = layer.impl.prefix.shared is not None  # vLLM may make a builder to measure, and then another
    layer.impl.prefix.shared = shared
    if again:
        return
    attend, loaded = layer.forward_impl, layer.process_weights_after_loading

    def forward_impl(q, k_c_normed, k_pe, kv_cache, attn_metadata, output, **named):
        given = attend(q, k_c_normed, k_pe, kv_cache, attn_metadata, output=output, **named)
        prefix = attn_metadata.decode.prefix if attn_metadata is not None and attn_metadata.num_decode_tokens else None
        if prefix is not None:
            if output.dtype != q.dtype:
                raise NotImplementedError(f"hypermla_prefix_cache adds to outputs of {q.dtype}, not of {output.dtype}; "
                                          "leave it out")
            count = attn_metadata.num_decode_tokens
            prefix.attend(layer.impl.prefix, q[:count], output[:count].view(count, -1, VALUE), layer.impl.lse)
        return given

    def process_weights_after_loading(*arguments, **named):
        loaded(*arguments, **named)
        layer.impl.prefix.shared.drop()  # keys and values are those of other weights

    layer.forward_impl, layer.process_weights_after_loading = forward_impl, process_weights_after_loading


@dataclass
class HyperMLADecodeMetadata(MLACommonDecodeMetadata):
    """A step, as Plans wants it."""

    query_start_loc: torch.Tensor
    capacity: Capacity
    causal: bool
    plans: Plans
    prefix: SharedPrefixes | None = None  # what the tables and lengths leave out


class HyperMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    supports_non_causal_multi_token_decode: ClassVar[bool] = True
    supports_non_causal_multi_token_dcp: ClassVar[bool] = True

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
        if _settle_graphs(vllm_config):
            return AttentionCGSupport.ALWAYS
        return cls._cudagraph_support

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config, kv_cache_spec):
        return _drafted_queries(vllm_config)

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        any_batch = _settle_graphs(vllm_config)
        layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
        # Of this device: a layer may have those of all devices, as Kimi-K3's.
        heads = next(of.num_heads for of in (getattr(layers[0], "impl", None), layers[0]) if hasattr(of, "num_heads"))
        # Loads the kernels now, not when the first request waits for them; of prefill, in vLLM's own constructor.
        logger.info_once("HyperMLA loads its kernels; those never compiled before take a few seconds each")
        # Before that constructor, which makes the one of prefills, and reads the threshold.
        _reserved.clear()  # for what is made here
        for layer in layers:
            if hasattr(layer, "impl"):
                layer.impl.reserves = False
        self.reorder_batch_threshold = _longest_decode(
            vllm_config, any_batch, heads * vllm_config.parallel_config.decode_context_parallel_size)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, supports_dcp_with_varlen=True)
        shards = self.dcp_world_size
        heads *= shards
        name = _tensors.device_name(device)
        self._usual, self._long = _capacities(vllm_config, any_batch, heads, shards, name)
        self._causal = True
        self.supports_draft_decode_metadata_update = shards == 1
        self._layers_pass = all(isinstance(layer, MLAAttention) for layer in layers)  # by HyperMLAImpl.forward_mha()
        self._plans = Plans(name)
        if _is_portable():
            logger.warning_once("HyperMLA decodes by portable kernels here, which an H200 alone has verified; "
                                "`hypermla verify cutile.mla.flash_mla_split_kv` does so on this GPU")
        cache = FP8[0] if kv_cache_spec.dtype.itemsize == 1 else "auto"
        # As the layers have decided, whose configuration a drafter may not share with this one.
        rounds = _rounds_queries(vllm_config, heads, cache)
        kinds = {(float(layer.scale), getattr(getattr(layer, "impl", None), "supports_quant_query_input", rounds))
                 for layer in layers if hasattr(layer, "scale")}
        self._kinds = [_kind(vllm_config, heads, self.page_size, scale, cache, rounded) for scale, rounded in kinds]
        for kind in self._kinds:
            for capacity in dict.fromkeys((self._usual, self._long)):
                decode = self._plans.decode(capacity, True, *kind)
                logger.info_once("HyperMLA decodes requests of up to %d queries: %s", capacity.queries,
                                 decode.explain())

        self._prefix, rows = None, [getattr(getattr(layer, "impl", None), "prefix", None) for layer in layers]
        if all(_is_drafters(vllm_config, of) for of in layer_names):
            pass  # its layers add prefixes in steps of the model's builder alone: not all of theirs are built
        elif rows and None not in rows and self._layers_pass and len(self._kinds) == 1:
            self._layers = layers
            self._prefix = SharedPrefixes(
                heads, self._usual.requests, self._usual.query_tokens, -(-self._usual.tokens // self.page_size),
                self.page_size, self._kinds[0][2], self._kinds[0][3], rows[0].tokens, name, cache in FP8)
            for layer in layers:
                _add_prefix(layer, self._prefix)
            logger.info_once("HyperMLA keeps shared prefixes decompressed, of %d tokens in all", rows[0].tokens)
        elif any(one is not None for one in rows):
            logger.warning_once("HyperMLA leaves hypermla_prefix_cache alone: layers differ, or attend by themselves")
            for layer in layers:
                layer.impl.prefix = None

    def _fill_prefix(self, pages, first_token):
        for layer in self._layers:
            layer.impl.prefix.fill(layer.kv_cache, pages, first_token, lambda latents: layer.impl.kv_b_proj(latents)[0],
                                   layer._k_scale if layer.impl.kv_cache_dtype in FP8 else None)
        logger.info_once("HyperMLA has decompressed its first shared prefix")
        return len(layer.kv_cache)

    def _split(self, decodes, fits=True):
        """The tables and lengths of a step's first requests, which decode, without what MlaPrefill attends to. Every
        step comes by, since it may write to the pages of a prefix."""
        common = self._common
        return self._prefix.plan(common.block_table_tensor, common.seq_lens, common.query_start_loc,
                                 common.slot_mapping, decodes, self._fill_prefix, fits)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = self._common = common_attn_metadata
        self._causal, self._longest = common.causal is not False, common.max_query_len
        if not (self._causal and self._longest <= self.reorder_batch_threshold and self.dcp_world_size == 1
                and not self.use_pcp and common.num_reqs == common.seq_lens.size(0)
                == common.block_table_tensor.size(0) == common.query_start_loc.size(0) - 1):
            prefill = getattr(self, "_prefill_backend", None)
            if self._layers_pass and isinstance(prefill, HyperMLAPrefill) and not self.use_pcp:
                common = prefill.take_contexts(common, self.reorder_batch_threshold, self.chunked_prefill_workspace)
            metadata = super().build(common_prefix_len, common, fast_build)
            if self._prefix is not None and not metadata.num_decodes:
                self._split(0)
            return metadata
        # Nothing but decodes: what vLLM's builder makes of them, without views of tensors that are whole.
        decode = self._build_decode(common.block_table_tensor, common.seq_lens, common.query_start_loc_cpu,
                                    common.query_start_loc, None)
        return self.metadata_cls(num_reqs=common.num_reqs, max_query_len=self._longest, max_seq_len=common.max_seq_len,
                                 num_actual_tokens=common.num_actual_tokens, query_start_loc=common.query_start_loc,
                                 slot_mapping=common.slot_mapping, num_decodes=common.num_reqs,
                                 num_decode_tokens=common.num_actual_tokens, num_prefills=0, decode=decode)

    def _build_decode(self, block_table_tensor, seq_lens_device, query_start_loc_cpu, query_start_loc_device,
                      dcp_tot_seq_lens_device, **unused):
        capacity = self._usual
        if self._longest > capacity.queries:  # perhaps of a prompt, which is no decode
            starts = query_start_loc_cpu.numpy()
            longest = int((starts[1:] - starts[:-1]).max())
            if longest > self._long.queries:
                raise ValueError(f"HyperMLA decodes requests of up to {self._long.queries} queries, not of {longest}: "
                                 "reorder_batch_threshold was changed after the builder was made")
            if longest > self._usual.queries:
                capacity = self._long
        if self._prefix is not None:
            fits = capacity is self._usual or int(query_start_loc_cpu[-1]) <= self._usual.query_tokens
            block_table_tensor, seq_lens_device = self._split(len(seq_lens_device), fits)
        step = HyperMLADecodeMetadata(block_table=block_table_tensor, seq_lens=seq_lens_device,
                                      dcp_tot_seq_lens=dcp_tot_seq_lens_device,
                                      query_start_loc=query_start_loc_device, capacity=capacity, causal=self._causal,
                                      plans=self._plans, prefix=self._prefix)
        # vLLM builds every step, also before it replays a graph, which so need not hold the planner.
        for kind in self._kinds:
            self._plans.plan(step, *kind)
        return step

    def update_draft_decode_metadata(self, metadata):
        """vLLM 0.33: a drafter's steps in one graph that nothing is built for, each with longer requests than the one
        before. So the graph plans them."""
        self._plans.forget()


class HyperMLAImpl(MLACommonImpl[MLACommonMetadata]):
    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    supports_pcp: bool = False
    _keys_in_parts = False  # in layers, as Kimi-K3's, that do not attend by forward_mha()

    def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
                 logits_soft_cap, attn_type, kv_sharing_target_layer_name, **mla_args):
        super().__init__(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
                         logits_soft_cap, attn_type, kv_sharing_target_layer_name, **mla_args)
        refused = [name for name, value in (("alibi_slopes", alibi_slopes), ("sliding_window", sliding_window),
                                            ("logits_soft_cap", logits_soft_cap)) if value]
        if attn_type != AttentionType.DECODER:
            refused.append(f"attention of type {attn_type}")
        if (self.kv_lora_rank, self.qk_rope_head_dim) != (LATENT, ROPE):
            refused.append(f"{self.kv_lora_rank} latent and {self.qk_rope_head_dim} RoPE columns")
        if refused:
            raise NotImplementedError(f"HyperMLA does not support {', '.join(refused)}; choose another attention "
                                      "backend for this model")
        self.reserves = True
        self.lse = None  # of the last decodes, where a prefix is added to them
        config = get_current_vllm_config_or_none()
        # Else queries stay bfloat16 beside a cache in FP8, too.
        self.supports_quant_query_input = config is not None and _rounds_queries(
            config, num_heads * config.parallel_config.decode_context_parallel_size, self.kv_cache_dtype)
        dimensions = self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        self.prefix = _prefix_of_layer(config, num_heads, dimensions)
        self._prefills = config is not None and _prefill_too(config, dimensions)
        if config is not None:
            _draft_too(config)
        if envs.VLLM_BATCH_INVARIANT and config is not None:
            _keep_prompts_whole(config)  # before there is a scheduler, as vLLM's own layer does it

    def reserve_workspace(self):
        """vLLM 0.33, of every layer, also while it measures what memory it can leave to the cache: makes what a builder
        will make, which comes after that, and has it held until then. The first layer of a kind makes it for all."""
        config = get_current_vllm_config_or_none()
        if config is None or not self.reserves:
            return
        config = copy.copy(config)
        config.compilation_config = copy.copy(config.compilation_config)  # which is not to change yet
        shards = config.parallel_config.decode_context_parallel_size
        heads, name = self.num_heads * shards, _tensors.device_name(config.device_config.device)
        page = math.gcd(config.cache_config.block_size, 128)  # of the kernel, as vLLM chooses it
        kind = _kind(config, heads, page, float(self.scale), self.kv_cache_dtype, self.supports_quant_query_input)
        for capacity in _capacities(config, _settle_graphs(config), heads, shards, name):
            _reserved.setdefault(name, Plans(name)).decode(capacity, True, *kind)
        at = name, self.num_heads, self.scale
        if self._prefills and at not in _reserved:
            _reserved[at] = HyperMLAPrefill(self.num_heads, self.scale, self.kv_lora_rank, self.qk_nope_head_dim,
                                            self.qk_rope_head_dim, self.v_head_dim, config).clone()

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        """q: [tokens, heads, 576], or the pair of 512 and 64 columns, of any strides, in FP8 where they are rounded.
        Returns o [tokens, heads, 512] and lse [tokens, heads] in the natural logarithm, -inf of a query that sees no
        token."""
        step = attn_metadata.decode
        if isinstance(q, tuple) and not takes_strides(*q):
            q = torch.cat(q, dim=-1)
        if self.kv_cache_dtype in FP8:
            o, lse = step.plans.attend(step, q, kv_c_and_k_pe_cache.view(torch.uint8), torch.bfloat16, self.scale,
                                       layer._k_scale.view(1),
                                       layer._q_scale.view(1) if self.supports_quant_query_input else None)
        else:
            o, lse = step.plans.attend(step, q, kv_c_and_k_pe_cache, kv_c_and_k_pe_cache.dtype, self.scale)
        if step.prefix is not None:
            self.lse = lse
        return o, lse

    def forward_mha(self, q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale=None):
        """Attention of prompts, decompressed, by vLLM where contexts come in chunks. Our backend of prefills reads
        keys in the two parts in which they are, where others want a copy with the RoPE columns of every head, and
        writes outputs to their place."""
        prefill = attn_metadata.prefill
        backend = prefill.prefill_backend
        self._keys_in_parts = isinstance(backend, HyperMLAPrefill)
        if not self._keys_in_parts or prefill.chunked_context is not None:
            return super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output,
                                       output_scale)
        out = output.view(-1, self.num_heads, VALUE)
        for number, one in enumerate(backend.passes):
            rows = one.gather(prefill.block_table, kv_c_and_k_pe_cache, self.kv_cache_dtype, k_scale)
            if self.kv_cache_dtype in FP8:
                one.put_new(kv_c_normed, k_pe)
            keys, values = self._decompressed(rows[:, :LATENT], rows[:, None, LATENT:])
            backend.run_pass(number, q[one.queries], keys, values, out[one.queries])
        if not backend.passes:
            keys, values = self._decompressed(kv_c_normed, k_pe)
            backend.run_prefill_new_tokens(q, keys, values, False, out=out)

    def _decompressed(self, latents, rope):
        """Keys, in two parts, and values."""
        both = self.kv_b_proj(latents)[0].view(-1, self.num_heads, NOPE + VALUE)
        return (both[..., :NOPE], rope), both[..., NOPE:]

    def _concat_k_nope_k_pe(self, k_nope, k_pe):
        """What vLLM's forward_mha() hands to the backend of prefills as keys."""
        return (k_nope, k_pe) if self._keys_in_parts else super()._concat_k_nope_k_pe(k_nope, k_pe)
