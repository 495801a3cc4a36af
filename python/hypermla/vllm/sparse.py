"""vLLM's backend FLASHMLA_SPARSE, which attends to the tokens that an indexer chose (DeepSeek-V3.2, GLM-5), with this
library's kernels in the place of FlashMLA's: 0.26 to 0.33 by one code path.

The indexer, the cache, its lists of slots and the division of a batch are vLLM's. No head is padded: those of FlashMLA
are, to 64 or 128.
"""

import inspect
from typing import ClassVar

import torch
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend, FlashMLASparseImpl

from hypermla.compat.flash_mla import FlashMLASchedMeta, flash_mla_sparse_fwd, flash_mla_with_kvcache
from hypermla.mla_decode import LATENT, ROPE

# Since 0.33 the log-sum-exp is returned, too, and queries may have more heads than count.
_RETURNS_LSE = "actual_num_heads" in inspect.signature(FlashMLASparseImpl._bf16_flash_mla_kernel).parameters


class HyperMLASparseBackend(FlashMLASparseBackend):
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "fp8_ds_mla", "fp8"]  # fp8: fp8_ds_mla

    @staticmethod
    def get_impl_cls():
        return HyperMLASparseImpl

    @classmethod
    def get_supported_head_sizes(cls):
        return [LATENT + ROPE]

    @classmethod
    def supports_compute_capability(cls, capability):
        return (capability.major, capability.minor) == (9, 0)


class HyperMLASparseImpl(FlashMLASparseImpl):
    def _fp8_flash_mla_kernel(self, q, kv_c_and_k_pe_cache, topk_indices, kernel_metadata):
        """q: [requests, queries, heads, 576]; slots, -1: none. Returns o and lse [requests, heads, queries]."""
        if not hasattr(kernel_metadata, "hypermla"):  # of a step, whose layers share a plan
            kernel_metadata.hypermla = FlashMLASchedMeta()
        return flash_mla_with_kvcache(q, kv_c_and_k_pe_cache.view(torch.uint8).unsqueeze(-2), None, None, LATENT,
                                      kernel_metadata.hypermla, softmax_scale=self.softmax_scale, is_fp8_kvcache=True,
                                      indices=topk_indices)

    def _bf16_flash_mla_kernel(self, q, kv_c_and_k_pe_cache, topk_indices, topk_length=None, actual_num_heads=None,
                               out=None):
        """q: [tokens, heads, 576]; a cache of rows in 16 bits; what `out` is for, the caller copies."""
        o, _, lse = flash_mla_sparse_fwd(q[:, :actual_num_heads], kv_c_and_k_pe_cache.view(-1, 1, LATENT + ROPE),
                                         topk_indices.view(len(q), 1, -1), self.softmax_scale, topk_length=topk_length)
        return (o, lse) if _RETURNS_LSE else o
