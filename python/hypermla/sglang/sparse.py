"""Two methods of SGLang's backend for sparse attention (DeepseekSparseAttnBackend of 0.5.17 to 0.5.23: DeepSeek-V3.2,
GLM-5), by this library's kernels in the place of FlashMLA's. The indexer, its lists, the cache and graphs are SGLang's.
No head is padded, and a cache in 16 bits is read where it lies.
"""

from hypermla.compat.flash_mla import FlashMLASchedMeta, flash_mla_sparse_fwd, flash_mla_with_kvcache


def _lengths(lengths, queries):
    """None: the whole lists. A batch that is padded has lengths of its own."""
    return lengths if lengths is not None and lengths.shape[0] == queries else None


def forward_flashmla_sparse(self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, topk_length=None,
                            attn_sink=None):
    """q_all: [tokens, heads, 576]; kv_cache: [slots, 1, 576]; page_table_1: slots [tokens, top-k], -1: none; attn_sink:
    [heads], which SGLang gives since 0.5.20."""
    return flash_mla_sparse_fwd(q_all, kv_cache, page_table_1.unsqueeze(1), sm_scale, v_head_dim, attn_sink,
                                topk_length=_lengths(topk_length, len(q_all)))[0]


def forward_flashmla_kv(self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1):
    """The same over pages, in FP8 or 16 bits. Layers share a plan, which `metadata` keeps; since that of a graph serves
    more than one pass, the first layer of each plans."""
    q = q_all.view(-1, 1, layer.tp_q_head_num, layer.head_dim)
    kept = vars(metadata).get("hypermla")
    if kept is None or layer.layer_id <= kept[0]:
        kept = vars(metadata)["hypermla"] = layer.layer_id, FlashMLASchedMeta()
    return flash_mla_with_kvcache(q, kv_cache.view(-1, self.real_page_size, 1, self.kv_cache_dim), None, None,
                                  v_head_dim, kept[1], softmax_scale=sm_scale, indices=page_table_1.unsqueeze(1),
                                  is_fp8_kvcache=self.dsa_kv_cache_store_fp8,
                                  topk_length=_lengths(metadata.dsa_cache_seqlens_int32, len(q)))[0]
