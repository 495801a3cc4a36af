"""Three methods of SGLang's backend for sparse attention (DeepseekSparseAttnBackend of 0.5.17 to 0.5.23: DeepSeek-V3.2,
GLM-5), by this library's kernels in the place of FlashMLA's and FlashAttention-3's. The indexer, its lists, the cache
and graphs are SGLang's. No head is padded, and a cache in 16 bits is read where it lies.
"""

from hypermla.compat.flash_mla import FlashMLASchedMeta, flash_mla_sparse_fwd, flash_mla_with_kvcache
from hypermla.mla_decode import LATENT, ROPE


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


def forward_flashmla_sparse(self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, topk_length=None,
                            attn_sink=None):
    """q_all: [tokens, heads, 576]; kv_cache: [slots, 1, 576]; page_table_1: slots [tokens, top-k], -1: none; attn_sink:
    [heads], which SGLang gives since 0.5.20."""
    return flash_mla_sparse_fwd(q_all, kv_cache, page_table_1.unsqueeze(1), sm_scale, v_head_dim, attn_sink,
                                topk_length=_lengths(topk_length, len(q_all)))[0]


def forward_flashmla_kv(self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1):
    """The same over pages, in FP8 or 16 bits. Layers share a plan."""
    q = q_all.view(-1, 1, layer.tp_q_head_num, layer.head_dim)
    plan = _plan_of_pass(metadata, "hypermla", layer.layer_id, lambda first: layer.layer_id <= first)
    return flash_mla_with_kvcache(q, kv_cache.view(-1, self.real_page_size, 1, self.kv_cache_dim), None, None,
                                  v_head_dim, plan, softmax_scale=sm_scale, indices=page_table_1.unsqueeze(1),
                                  is_fp8_kvcache=self.dsa_kv_cache_store_fp8,
                                  topk_length=_lengths(metadata.dsa_cache_seqlens_int32, len(q)))[0]


def forward_fa3(default, self, q_rope, kv_cache, v_head_dim, q_nope, page_table, cache_seqlens, cu_seqlens_q,
                cu_seqlens_k, max_seqlen_q, sm_scale, logit_cap, page_size):
    """FlashAttention-3's, SGLang's choice for decoding over 16 bits: q_nope and q_rope [tokens, heads, 512 and 64],
    kv_cache [slots, 1, 576], page_table: slots [tokens, top-k], cache_seqlens: how many count. What else it may be
    asked for `default` does. Layers, which are told apart by their caches, share a plan."""
    if ((max_seqlen_q, page_size, v_head_dim, q_rope.shape[-1]) != (1, 1, LATENT, ROPE) or q_nope.ndim != 3
            or logit_cap or kv_cache.dtype != q_nope.dtype or getattr(self, "dsa_index_kpool", 1) > 1):
        return default(self, q_rope=q_rope, kv_cache=kv_cache, v_head_dim=v_head_dim, q_nope=q_nope,
                       page_table=page_table, cache_seqlens=cache_seqlens, cu_seqlens_q=cu_seqlens_q,
                       cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, sm_scale=sm_scale, logit_cap=logit_cap,
                       page_size=page_size)
    layer = kv_cache.data_ptr(), q_nope.shape
    plan = _plan_of_pass(self.forward_metadata, "hypermla_lists", layer,
                         lambda first: layer[0] == first[0] or layer[1] != first[1])
    return flash_mla_sparse_fwd((q_nope, q_rope), kv_cache, page_table.unsqueeze(1), sm_scale,
                                topk_length=cache_seqlens[:len(q_nope)], tile_scheduler_metadata=plan)[0]
