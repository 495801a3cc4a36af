"""vLLM's backend FLASHMLA_SPARSE, which attends to the tokens that an indexer chose (DeepSeek-V3.2, GLM-5), with this
library's kernels in the place of FlashMLA's: 0.26 to 0.33 by one code path. It stands for FLASH_ATTN_MLA_SPARSE, too.

The indexer, the cache, its lists of slots and the division of a batch are vLLM's. No head is padded, as FlashMLA's are
to 64 or 128, and the two parts of queries are read where they lie, which FlashMLA's are joined for.
"""

import importlib
import inspect
from dataclasses import replace
from typing import ClassVar

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backends.mla.flashmla_sparse import (MIN_HEADS_FOR_BF16_PREFILL, FlashMLASparseBackend,
                                                             FlashMLASparseImpl, FlashMLASparseMetadataBuilder)

from hypermla._planned import HOPPER
from hypermla.compat._queries import takes_strides
from hypermla.compat.flash_mla import (FlashMLASchedMeta, flash_mla_sparse_fwd, flash_mla_with_kvcache,
                                       load_sparse_kernels)
from hypermla.mla_decode import LATENT, ROPE

logger = init_logger("vllm.hypermla")

# Since 0.33 the log-sum-exp is returned, too, and queries may have more heads than count.
_RETURNS_LSE = "actual_num_heads" in inspect.signature(FlashMLASparseImpl._bf16_flash_mla_kernel).parameters


class HyperMLASparseBackend(FlashMLASparseBackend):
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "fp8_ds_mla", "fp8"]  # fp8: fp8_ds_mla

    @staticmethod
    def get_impl_cls():
        return HyperMLASparseImpl

    @staticmethod
    def get_builder_cls():
        return HyperMLASparseMetadataBuilder

    @classmethod
    def customize_spec(cls, spec):
        """From 0.28 on. Tokens are whole ones apart, in FP8, too, whatever pages of other layers lie between: a spec
        knows of that from 0.31 on. Larger blocks than FlashMLA's, of 64 tokens, are whole ones of these apart in 0.33.
        """
        spec = super().customize_spec(spec)
        if hasattr(spec, "block_stride_alignment") and not (spec.block_size > 64 and spec.block_stride_alignment):
            spec = replace(spec, block_stride_alignment=spec.state_content_size_bytes)
        return spec

    @classmethod
    def get_supported_head_sizes(cls):
        return [LATENT + ROPE]

    @classmethod
    def supports_compute_capability(cls, capability):
        return (capability.major, capability.minor) == HOPPER


class HyperMLASparseMetadataBuilder(FlashMLASparseMetadataBuilder):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        one_batch = getattr(self, "fp8_use_mixed_batch", self.num_heads < MIN_HEADS_FOR_BF16_PREFILL)  # 0.33 says it
        self._decodes_apart = self.use_fp8_kv_cache and not one_batch
        if hasattr(FlashMLASparseMetadataBuilder, "update_draft_decode_metadata"):  # 0.33
            self.supports_draft_decode_metadata_update = not self.use_fp8_kv_cache and self.dcp_world_size == 1
        # Now, not when the first prompt waits for them, which no graph of decodes has in it.
        logger.info_once("HyperMLA loads its kernels for lists of tokens; those never compiled before take a few "
                         "seconds each")
        # Where decodes are apart, prefills attend to a copy of the cache in 16 bits.
        for fp8 in [self.use_fp8_kv_cache] + [False] * self._decodes_apart:
            logger.info_once("HyperMLA attends to lists of tokens in %s by %s", "FP8" if fp8 else "bfloat16",
                             " and ".join(load_sparse_kernels(device, self.num_heads, self.topk_tokens, fp8)))

    def update_draft_decode_metadata(self, metadata):
        """Within the graph that the steps of a drafter are: all that a step changes and that no buffer of vLLM's has in
        it is which request a token is of. FLASHMLA_SPARSE has no such graph, FLASH_ATTN_MLA_SPARSE has."""
        if tokens := metadata.num_decode_tokens:
            importlib.import_module("vllm.v1.attention.ops.metadata").compute_token_to_req_indices(
                metadata.query_start_loc, metadata.req_id_per_token, tokens, tokens)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        """Only decodes over FP8 that do not go as one batch with prefills are given as [requests, queries]. To look
        whether all have as many queries takes the host ten operations on tensors a step; if all requests have as many
        as the one that has most, as in plain decoding, their sum says so."""
        common = common_attn_metadata
        self.require_uniform_decodes = (self._decodes_apart
                                        and common.max_query_len * common.num_reqs != common.num_actual_tokens)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class HyperMLASparseImpl(FlashMLASparseImpl):
    _plans, _calls = None, 0  # of the pass and the layer at hand, where its cache is in 16 bits
    _parts = None  # of the queries at hand, [tokens, heads, 512] and [tokens, heads, 64], where they are not joined

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        """What vLLM hands from here to the kernels below in the place of joined queries are the first parts alone,
        whole or some tokens of them."""
        if not isinstance(q, tuple) or q[1].shape[-1] != ROPE or not takes_strides(*q):
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        columns = getattr(self, "q_head_size", None)  # 0.33 pads what has fewer
        self._parts, self.q_head_size = q, LATENT
        try:
            return super().forward_mqa(q[0], kv_c_and_k_pe_cache, attn_metadata, layer)
        finally:
            self._parts, self.q_head_size = None, columns

    def _both_parts(self, q):
        """q [tokens, heads, ..] or [requests, queries, heads, ..] with the second part beside it if there is one."""
        if self._parts is None:
            return q
        latent, rope = self._parts
        first = (q.data_ptr() - latent.data_ptr()) // (latent.stride(0) * latent.element_size())
        own = rope[first:first + q.shape[:-2].numel()]  # of another tensor none, which view() refuses
        return q, own.view(*q.shape[:-1], ROPE)

    def _of_pass(self, metadata, make):
        """What the layers of a pass share, kept in the metadata of the step. A layer that comes again begins another
        pass."""
        kept = getattr(metadata, "hypermla", None)
        if kept is None or kept[0] is self:
            kept = metadata.hypermla = self, make()
        return kept[1]

    def _forward_bf16_kv(self, q, kv_c_and_k_pe_cache, topk_indices, attn_metadata, actual_num_heads=None):
        """Every layer makes the same calls below, and as many of a list's entries count in all of them: the n-th calls
        of a pass's layers share a plan. Under context parallelism a rank has other numbers of them in each layer."""
        if self.total_cp_world_size == 1:
            self._plans, self._calls = self._of_pass(attn_metadata, dict), 0
        try:
            return super()._forward_bf16_kv(q, kv_c_and_k_pe_cache, topk_indices, attn_metadata,
                                            *(() if actual_num_heads is None else (actual_num_heads,)))
        finally:
            self._plans = None

    def _fp8_flash_mla_kernel(self, q, kv_c_and_k_pe_cache, topk_indices, kernel_metadata):
        """q: [requests, queries, heads, 576]; slots, -1: none. Returns o and lse [requests, heads, queries]."""
        q = self._both_parts(q)
        return flash_mla_with_kvcache(q, kv_c_and_k_pe_cache.view(torch.uint8).unsqueeze(-2), None, None, LATENT,
                                      self._of_pass(kernel_metadata, FlashMLASchedMeta),
                                      softmax_scale=self.softmax_scale, is_fp8_kvcache=True, indices=topk_indices)

    def _bf16_flash_mla_kernel(self, q, kv_c_and_k_pe_cache, topk_indices, topk_length=None, actual_num_heads=None,
                               out=None):
        """q: [tokens, heads, 576]; a cache of rows in 16 bits; what `out` is for, the caller copies."""
        metadata = None
        if self._plans is not None:
            metadata = self._plans.setdefault((self._calls, q.shape), FlashMLASchedMeta())
            self._calls += 1
        slots = topk_indices.view(len(q), 1, -1)
        q = self._both_parts(q[:, :actual_num_heads])
        o, _, lse = flash_mla_sparse_fwd(q, kv_c_and_k_pe_cache.view(-1, 1, LATENT + ROPE), slots, self.softmax_scale,
                                         topk_length=topk_length, tile_scheduler_metadata=metadata)
        return (o, lse) if _RETURNS_LSE else o
