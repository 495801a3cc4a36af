"""FlashMLA's calls for dense decoding, with the signatures of its release 1.0.0, on MlaDecode.

    import hypermla.compat.flash_mla as flash_mla      # in place of: import flash_mla

    metadata, num_splits = flash_mla.get_mla_metadata()                       # once per step
    for layer in layers:
        out, lse = flash_mla.flash_mla_with_kvcache(layer.q, layer.cache, block_table, lengths, 512, metadata,
                                                    num_splits, causal=True)

Tensors are PyTorch's; on a CPU NumPy's arrays, too. A step may be captured in a CUDA graph: give each graph metadata of
its own, and make one call of the same shape before the capture, which loads the kernels. What is wrong raises
hypermla.Error. Caches in FP8, sparse attention and sinks are refused. docs/drop-ins.md says what differs.
"""

import collections

from hypermla import _tensors
from hypermla._errors import raises_error
from hypermla._hypermla import Error
from hypermla.compat._queries import takeable
from hypermla.mla_decode import LATENT, ROPE, MlaDecode

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]

_KEPT = 32  # objects that no graph uses, each with a workspace of its own


class FlashMLASchedMeta:
    """The plan of a step, which the first call with it makes and the others share. All calls with it must have the same
    shapes, and `cache_seqlens` the same values."""

    shapes = None  # of the first call
    plan = None  # what _Planned.plan is as long as that plan is its last one


class _Planned:
    """A MlaDecode and the plan that it holds. Whoever finds another's plan there makes its own."""

    def __init__(self, decode):
        self.decode, self.plan = decode, None


_eager = collections.OrderedDict()  # _Planned by capacity and stream; the least recently used first
_captured = {}  # by capacity; kept, because graphs hold their addresses


@raises_error
def get_mla_metadata(*args, **kwargs):
    """(metadata, None). Older callers' arguments are taken and not needed."""
    return FlashMLASchedMeta(), None


@raises_error
def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
                           softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None,
                           extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None,
                           extra_topk_length=None):
    """Returns (out, lse): [batch, queries, heads, 512] and float32 [batch, heads, queries], natural; a query that sees
    no token has 0 and +inf.

    q: [batch, queries, heads, 576]. k_cache: [pages, page, kv heads, 576], page 1, 16, 32, 64 or 128; query head h
    reads kv head h // (heads / kv heads). block_table: int32 [batch, pages]; what is behind a request's end may be
    anything. cache_seqlens: int32 [batch], the new tokens included. softmax_scale: None: 1 / sqrt(576). causal: query i
    of n sees all tokens but the last n - 1 - i.
    """
    refused = {"is_fp8_kvcache": is_fp8_kvcache or None, "indices": indices, "attn_sink": attn_sink,
               "extra_k_cache": extra_k_cache, "extra_indices_in_kvcache": extra_indices_in_kvcache,
               "topk_length": topk_length, "extra_topk_length": extra_topk_length}
    for name, value in refused.items():
        if value is not None:
            raise Error(f"{name} is not supported: this is attention over every token of a cache in 16 bits")
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta) or num_splits is not None:
        raise Error("the metadata must be what get_mla_metadata() of hypermla.compat.flash_mla returned, and "
                    "num_splits None; tensors of older releases of FlashMLA are not taken")
    if len(q.shape) != 4 or len(k_cache.shape) != 4 or q.shape[3] != LATENT + ROPE or head_dim_v != LATENT:
        raise Error(f"q must be [batch, queries, heads, {LATENT + ROPE}], k_cache [pages, page, kv heads, "
                    f"{LATENT + ROPE}] and head_dim_v {LATENT}, not {list(q.shape)}, {list(k_cache.shape)} and "
                    f"{head_dim_v}")
    if block_table is None or cache_seqlens is None or len(block_table.shape) != 2:
        raise Error("block_table, [batch, pages], and cache_seqlens, [batch], are missing")
    batch, queries, heads, _ = q.shape
    page, groups = k_cache.shape[1:3]
    if groups == 0 or heads % groups:
        raise Error(f"{heads} heads over {groups} kv heads are not supported: each must serve as many")
    if tuple(cache_seqlens.shape) != (batch,) or block_table.shape[0] != batch:
        raise Error(f"cache_seqlens and block_table must have a row for each of {batch} requests, not "
                    f"{list(cache_seqlens.shape)} and {list(block_table.shape)}")
    out = _tensors.empty(q, (batch, queries, heads, LATENT))
    lse = _tensors.empty(q, (batch, heads, queries), "float32")
    if 0 in (batch, queries, heads, block_table.shape[1]):  # no token to see
        out[...], lse[...] = 0, float("inf")
        return out, lse
    if softmax_scale is None:
        softmax_scale = q.shape[3] ** -0.5
    planned = _planned(q, {"heads": heads // groups, "max_requests": _rounded(batch), "max_queries": queries,
                           "max_tokens": min(_rounded(block_table.shape[1] * page), MlaDecode.MAX_TOKENS), "page": page,
                           "dtype": _tensors.dtype(q), "causal": bool(causal), "scale": float(softmax_scale),
                           "empty_lse_positive": True})
    _plan(planned, tile_scheduler_metadata, cache_seqlens, (tuple(q.shape), page, groups, bool(causal)))
    its = heads // groups
    rows = [tensor.reshape(batch * queries, heads, -1) for tensor in (q, out)]
    for group in range(groups):
        own = slice(group * its, (group + 1) * its)
        planned.decode.run(takeable(rows[0][:, own]), k_cache[:, :, group], block_table, rows[1][:, own],
                           lse.swapaxes(1, 2)[..., own])
    return out, lse


def _plan(planned, metadata, cache_seqlens, shapes):
    if metadata.shapes is None:
        metadata.shapes = shapes
    elif metadata.shapes != shapes:
        raise Error(f"the metadata was made for q, page, kv heads and causal of {metadata.shapes}, not {shapes}; call "
                    "get_mla_metadata() again for another shape")
    if metadata.plan is None or planned.plan is not metadata.plan:
        planned.plan = None  # until it is made
        planned.decode.plan(cache_seqlens)
        planned.plan = metadata.plan = object()


def _planned(q, options):
    """The MlaDecode of these options on the stream and the device of q. Those that graphs have captured serve nothing
    else: a replay writes over their plans."""
    gpu = _tensors.is_torch(q) and q.is_cuda
    device = f"cuda:{q.device.index}" if gpu else "cpu"
    capacity = (device, *options.values())
    if gpu and _is_capturing():
        if capacity not in _captured:
            # Any stream's: nothing can be loaded now. The next call outside makes a new one.
            key = next((key for key in _eager if key[0] == capacity), None)
            if key is None:
                raise Error("the first call of a shape loads its kernels, which a capture cannot: make the same call "
                            "once before it")
            _captured[capacity] = _eager.pop(key)
            _captured[capacity].plan = None  # the graph must make it, not only read it
        return _captured[capacity]
    key = capacity, _tensors.current_stream(q)
    planned = _eager.pop(key, None) or _Planned(MlaDecode(device=device, **options))
    _eager[key] = planned
    while len(_eager) > _KEPT:
        _eager.popitem(last=False)
    return planned


def _is_capturing():
    import torch

    return torch.cuda.is_current_stream_capturing()


def _rounded(count):
    """So that few capacities serve all counts."""
    return 1 << (count - 1).bit_length()
