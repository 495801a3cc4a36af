"""Methods of SGLang's backend for sparse attention (DeepseekSparseAttnBackend of 0.5.17 to 0.5.23: DeepSeek-V3.2,
GLM-5), by this library's kernels in the place of FlashMLA's and FlashAttention-3's. The indexer, its lists, the cache
and graphs are SGLang's. No head is padded, a cache in 16 bits is read where it lies, and so are the queries of decodes.
"""

import functools
import logging

from hypermla.compat.flash_mla import (FlashMLASchedMeta, flash_mla_sparse_fwd, flash_mla_with_kvcache,
                                       load_sparse_kernels)
from hypermla.mla_decode import LATENT, ROPE

_log = logging.getLogger(__name__)


def _lengths(lengths, queries):
    """None: the whole lists. A batch that is padded has lengths of its own."""
    return lengths if lengths is not None and lengths.shape[0] == queries else None


def _plan_of_pass(metadata, name, layer, comes_again):
    """The plan that the layers of a pass share, kept by `metadata` under `name`. That of a graph serves more than one
    pass, so a layer plans if comes_again(the layer that planned last)."""
    kept = vars(metadata).get(name)
    if kept is None or comes_again(kept[0]):
        kept = vars(metadata)[name] = layer, FlashMLASchedMeta()
    return kept[1]


def _decodes(backend, columns, queries, logit_cap):
    """Whether ours decode, under any of SGLang's names: columns of values and of queries, queries of a list."""
    return (columns == (LATENT, LATENT + ROPE) and queries == 1 and not logit_cap
            and getattr(backend, "dsa_index_kpool", 1) <= 1)


@functools.cache
def _load(device, heads, top_k, fp8):
    _log.info("HyperMLA attends to lists of tokens in %s by %s", "FP8" if fp8 else "16 bits",
              " and ".join(load_sparse_kernels(device, heads, top_k, fp8)))


def initialise(default, self, *given, **named):
    """SGLang's, and our kernels are loaded then, not when the first requests wait for them. Over FP8 it attends to
    copies of prompts' tokens in 16 bits, too."""
    default(self, *given, **named)
    for fp8 in {bool(self.dsa_kv_cache_store_fp8), False}:
        _load(str(self.device), self.num_q_heads, self.dsa_index_topk, fp8)


def forward_flashmla_sparse(default, self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, topk_length=None,
                            **since_20):
    """q_all: [tokens, heads, 576]; kv_cache: [slots, 1, 576]; page_table_1: slots [tokens, top-k], -1: none. Since
    0.5.20 there is attn_sink, too: [heads]. What has other columns, as attention without RoPE, `default` does."""
    if (v_head_dim, q_all.shape[-1]) != (LATENT, LATENT + ROPE):
        return default(self, q_all=q_all, kv_cache=kv_cache, v_head_dim=v_head_dim, page_table_1=page_table_1,
                       sm_scale=sm_scale, topk_length=topk_length, **since_20)
    return flash_mla_sparse_fwd(q_all, kv_cache, page_table_1.unsqueeze(1), sm_scale, v_head_dim,
                                topk_length=_lengths(topk_length, len(q_all)), **since_20)[0]


def forward_flashmla_kv(default, self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1):
    """The same over pages, in FP8 or 16 bits. Layers share a plan."""
    if (v_head_dim, layer.head_dim) != (LATENT, LATENT + ROPE):
        return default(self, q_all=q_all, kv_cache=kv_cache, v_head_dim=v_head_dim, sm_scale=sm_scale, layer=layer,
                       metadata=metadata, page_table_1=page_table_1)
    q = q_all.view(-1, 1, layer.tp_q_head_num, layer.head_dim)
    plan = _plan_of_pass(metadata, "hypermla", layer.layer_id, lambda first: layer.layer_id <= first)
    return flash_mla_with_kvcache(q, kv_cache.view(-1, self.real_page_size, 1, self.kv_cache_dim), None, None,
                                  v_head_dim, plan, softmax_scale=sm_scale, indices=page_table_1.unsqueeze(1),
                                  is_fp8_kvcache=self.dsa_kv_cache_store_fp8,
                                  topk_length=_lengths(metadata.dsa_cache_seqlens_int32, len(q)))[0]


def forward_decode(default, self, q, k, v, layer, *given, **named):
    """SGLang's. It joins the two parts of queries for FlashMLA's kernels, but not for FlashAttention-3's. So it goes
    the latter's way, to forward_fa3(), unless what is asked for is FlashMLA's alone."""
    kernels = self.dsa_decode_impl
    if (kernels not in ("flashmla_sparse", "flashmla_kv") or named.get("attn_sink") is not None
            or not _decodes(self, (layer.v_head_dim, layer.head_dim), self.forward_metadata.dsa_max_seqlen_q,
                            layer.logit_cap)):
        return default(self, q, k, v, layer, *given, **named)
    self.dsa_decode_impl = "fa3"
    try:
        return default(self, q, k, v, layer, *given, **named)
    finally:
        self.dsa_decode_impl = kernels


def forward_fa3(default, self, q_rope, kv_cache, v_head_dim, q_nope, page_table, cache_seqlens, cu_seqlens_q,
                cu_seqlens_k, max_seqlen_q, sm_scale, logit_cap, page_size):
    """FlashAttention-3's, SGLang's choice for decoding over 16 bits: q_nope and q_rope [tokens, heads, 512 and 64],
    kv_cache [slots, 1, 576], page_table: slots [tokens, top-k], cache_seqlens: how many count. From forward_decode()
    the cache may be in FP8. What else it may be asked for `default` does. Layers, which are told apart by their caches,
    share a plan."""
    fp8 = self.dsa_kv_cache_store_fp8 and kv_cache.element_size() == 1
    if (not _decodes(self, (v_head_dim, v_head_dim + q_rope.shape[-1]), max_seqlen_q, logit_cap) or page_size != 1
            or q_nope.ndim != 3 or (kv_cache.dtype != q_nope.dtype and not fp8)):
        return default(self, q_rope=q_rope, kv_cache=kv_cache, v_head_dim=v_head_dim, q_nope=q_nope,
                       page_table=page_table, cache_seqlens=cache_seqlens, cu_seqlens_q=cu_seqlens_q,
                       cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, sm_scale=sm_scale, logit_cap=logit_cap,
                       page_size=page_size)
    layer = kv_cache.data_ptr(), q_nope.shape
    plan = _plan_of_pass(self.forward_metadata, "hypermla_lists", layer,
                         lambda first: layer[0] == first[0] or layer[1] != first[1])
    # Lists behind those that the step was planned for are of -1 alone.
    lists, lengths = page_table.unsqueeze(1), _lengths(cache_seqlens[:len(q_nope)], len(q_nope))
    if fp8:
        return flash_mla_with_kvcache((q_nope.unsqueeze(1), q_rope.unsqueeze(1)),
                                      kv_cache.view(-1, self.real_page_size, 1, self.kv_cache_dim), None, None,
                                      v_head_dim, plan, softmax_scale=sm_scale, indices=lists, is_fp8_kvcache=True,
                                      topk_length=lengths)[0].squeeze(1)
    return flash_mla_sparse_fwd((q_nope, q_rope), kv_cache, lists, sm_scale, topk_length=lengths,
                                tile_scheduler_metadata=plan)[0]


def compute_flashmla_metadata(default, self, cache_seqlens, seq_len_q):
    """FlashMLA's plan for so many requests, which SGLang makes and copies in each step over FP8. Its kernels alone read
    it, and ours are in their place, but in models without RoPE: so it is made once, for the most requests."""
    if self.qk_rope_head_dim != ROPE:
        return default(self, cache_seqlens=cache_seqlens, seq_len_q=seq_len_q)
    made, rows = vars(self).setdefault("hypermla_made", {}), cache_seqlens.shape[0] + 1
    if seq_len_q not in made or made[seq_len_q].num_splits.shape[0] < rows:
        made[seq_len_q] = default(self, cache_seqlens=cache_seqlens, seq_len_q=seq_len_q)
    return made[seq_len_q].slice(slice(0, rows))
