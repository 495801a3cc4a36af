"""FlashMLA's calls for decoding and for sparse prefill, with the signatures of its release 1.0.0 and of the wheel
sgl-flash-mla 1.0.0, on MlaDecode.

    import hypermla.compat.flash_mla as flash_mla      # in place of: import flash_mla

    metadata, num_splits = flash_mla.get_mla_metadata()                       # once per step
    for layer in layers:
        out, lse = flash_mla.flash_mla_with_kvcache(layer.q, layer.cache, block_table, lengths, 512, metadata,
                                                    num_splits, causal=True)

Tensors are PyTorch's; on a CPU NumPy's arrays, too. A step may be captured in a CUDA graph: give each graph metadata of
its own, and make one call of the same shape before the capture, which loads the kernels. What is wrong raises
hypermla.Error. docs/drop-ins.md says what differs.
"""

import collections
import math
import threading

from hypermla import _tensors
from hypermla._errors import booleans, raises_error
from hypermla._hypermla import Error
from hypermla._planned import parts
from hypermla.compat._queries import are_queries, each_part, positive, rounded, takeable
from hypermla.mla_decode import FP8_BYTES, LATENT, PAGES, ROPE, MlaDecode

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_decoding_metadata",
           "get_mla_metadata", "has_legacy", "load_sparse_kernels"]

_KEPT = 32  # objects that no graph uses, each with a workspace of its own
_BYTES = "uint8", "int8", "float8_e4m3fn"  # types of what is in FP8


class FlashMLASchedMeta:
    """The plan of a step, which the first call with it makes and the others share. All calls with it must have the same
    shapes, and `cache_seqlens` or `topk_length` the same values."""

    shapes = None  # of the first call
    plan = None  # what _Planned.plan is as long as that plan is its last one

    def __init__(self, have_initialized=False, config=None, tile_scheduler_metadata=None, num_splits=None):
        """FlashMLA's fields. What is assigned to one of them begins a new plan, as callers of sgl-flash-mla do who keep
        one object for all steps."""
        self.have_initialized, self.config = have_initialized, config
        self.tile_scheduler_metadata, self.num_splits = tile_scheduler_metadata, num_splits

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name not in ("shapes", "plan"):
            self.shapes = self.plan = None


class _Planned:
    """A MlaDecode and the plan that it holds. A caller that finds another's plan there makes a new one."""

    def __init__(self, decode, like):
        self.decode, self.plan = decode, None
        self.one = _tensors.empty(like, (1,), "float32")  # the factor where none is given
        self.one[...] = 1


# _Planned by capacity, stream and thread, since another thread may plan before this one runs; the least recently used
# first.
_eager = collections.OrderedDict()
_captured = {}  # by capacity; kept, because graphs hold their addresses


@raises_error
def get_mla_metadata(*args, **kwargs):
    """(metadata, None). Older callers' arguments are taken and not needed."""
    return FlashMLASchedMeta(), None


get_mla_decoding_metadata = get_mla_metadata  # SGLang's wheel has both; here the first call plans in any case


def has_legacy():
    """Whether there are kernels for Hopper and for dense decoding."""
    return True


@raises_error
def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
                           softmax_scale=None, causal=False, is_fp8_kvcache=None, indices=None, attn_sink=None,
                           extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
                           enable_batch_invariant=False, use_legacy=False, kv_format=None, descale_q=None,
                           descale_k=None, *, out=None):
    """Returns (out, lse): [batch, queries, heads, 512] and float32 [batch, heads, queries], natural; a query that sees
    no token has 0 and +inf.

    q: [batch, queries, heads, 576]. k_cache: [pages, page, kv heads, 576], page 1, 16, 32, 64 or 128; query head h
    reads kv head h // (heads / kv heads). block_table: int32 [batch, pages]; what is behind a request's end may be
    anything. cache_seqlens: int32 [batch], the new tokens included. softmax_scale: None: 1 / sqrt(576). causal: query i
    of n sees all tokens but the last n - 1 - i. attn_sink: float32 [heads]: a head's out is multiplied by exp(lse) /
    (exp(lse) + exp(attn_sink)). A cache in FP8 is [pages, page, kv heads, 576] of e4m3, which descale_k, float32 [1],
    multiplies, under q in bfloat16 or in e4m3, which descale_q multiplies; out is bfloat16 then. is_fp8_kvcache: None:
    as the cache's type says.

    With indices, int32 [batch, queries, top-k], attention is sparse: every query attends to the slots of its list, page
    * tokens of a page + the token in it, of one kv head; -1 and slots beyond the cache are no tokens. topk_length:
    int32 [batch], how many entries count. block_table and cache_seqlens are not read. A cache in FP8 is [pages, page,
    1, 656] of bytes, whose kv_format is "V32"; FlashMLA takes none in 16 bits. q may be the pair of its first 512 and
    its last 64 columns, which FlashMLA does not take, either.

    enable_batch_invariant: no request is cut, so the bits of its out do not depend on the others, for tables, or lists,
    of one width; few long requests take long. use_legacy: ignored. out: written and returned, if given.
    """
    fp8 = _tensors.dtype(k_cache) in _BYTES if is_fp8_kvcache is None else bool(is_fp8_kvcache)
    refused = {"extra_k_cache": extra_k_cache, "extra_indices_in_kvcache": extra_indices_in_kvcache,
               "extra_topk_length": extra_topk_length}
    refused |= {"topk_length without indices": topk_length} if indices is None else {
        "descale_q with indices": descale_q, "descale_k with indices": descale_k}
    for name, value in refused.items():
        if value is not None:
            raise Error(f"{name} is not supported; leave it out: attention is over one cache, topk_length is of lists, "
                        "and tokens that lists name have factors of their own")
    if kv_format not in (None, "V32") or kv_format and indices is None:
        raise Error(f"kv_format={kv_format} is not supported: lists are of V32, 656 bytes a token; leave it out")
    _check_metadata(tile_scheduler_metadata, num_splits)
    causal, = booleans(causal=causal)
    if indices is not None:
        return _sparse(q, k_cache, indices, topk_length, attn_sink, head_dim_v, softmax_scale, causal, fp8,
                       tile_scheduler_metadata, enable_batch_invariant, out)
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
    if attn_sink is not None and tuple(attn_sink.shape) != (heads,):
        raise Error(f"attn_sink must be [{heads}], not {list(attn_sink.shape)}")
    if batch > MlaDecode.MAX_REQUESTS or queries > MlaDecode.MAX_QUERIES:
        raise Error(f"{batch} requests of {queries} queries are not supported: a call takes up to "
                    f"{MlaDecode.MAX_REQUESTS} of up to {MlaDecode.MAX_QUERIES}; split the batch")
    if is_fp8_kvcache is not None and fp8 != (_tensors.dtype(k_cache) in _BYTES):
        raise Error(f"is_fp8_kvcache={is_fp8_kvcache} is not what k_cache is, of {_tensors.dtype(k_cache)}; leave it "
                    "out")
    fp8_queries = _tensors.dtype(q) in _BYTES
    if fp8_queries and not fp8 or not fp8 and (descale_q is not None or descale_k is not None):
        raise Error(f"q of {_tensors.dtype(q)} over a cache of {_tensors.dtype(k_cache)}, or a factor there, is not "
                    "supported: both factors are of a cache in FP8, and so are queries in FP8")
    for name, given in {"descale_q": descale_q, "descale_k": descale_k}.items():
        if given is not None and math.prod(given.shape) != 1:
            raise Error(f"{name} of {list(given.shape)} is not supported: it must be one factor for all, [1]")
    dtype = "bfloat16" if fp8 else _tensors.dtype(q)
    out = _output(out, q, (batch, queries, heads, LATENT), dtype)
    lse = _tensors.empty(q, (batch, heads, queries), "float32")
    if 0 in (batch, queries, heads, block_table.shape[1]):  # no token to see
        out[...], lse[...] = 0, float("inf")
        return out, lse
    if softmax_scale is None:
        softmax_scale = q.shape[3] ** -0.5
    planned = _planned(q, {"heads": heads // groups, "max_requests": rounded(batch), "max_queries": queries,
                           "max_tokens": min(rounded(block_table.shape[1] * page), MlaDecode.MAX_TOKENS), "page": page,
                           "dtype": dtype, "causal": causal, "scale": positive("softmax_scale", softmax_scale),
                           "empty_lse_positive": True, "cache_format": "fp8_576" if fp8 else "as_queries",
                           "fp8_queries": fp8_queries}, enable_batch_invariant)

    def make():
        _tensors.require_int32(block_table=block_table, cache_seqlens=cache_seqlens)
        planned.decode.plan(cache_seqlens)

    _plan(planned, tile_scheduler_metadata, make, (tuple(q.shape), page, groups, causal))
    its = heads // groups
    rows = [tensor.reshape(batch * queries, heads, -1) for tensor in (q, out)]
    factor = lambda given: planned.one if given is None else given.reshape(1)
    factors = {"cache_scale": factor(descale_k)} if fp8 else {}
    factors |= {"q_scale": factor(descale_q)} if fp8_queries else {}
    cache = _tensors.as_bytes(k_cache) if fp8 else k_cache
    for group in range(groups):
        own = slice(group * its, (group + 1) * its)
        planned.decode.run(takeable(rows[0][:, own]), cache[:, :, group], block_table, rows[1][:, own],
                           lse.swapaxes(1, 2)[..., own], sinks=None if attn_sink is None else attn_sink[own], **factors)
    _keep(rows[1], out)
    return out, lse


@raises_error
def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, out=None,
                         tile_scheduler_metadata=None, *, use_legacy=False, return_log2_lse=None):
    """Sparse prefill; returns (out, None, lse): [queries, heads, 512] and float32 [queries, heads], natural; a query
    that sees no token has 0 and +inf. In the place of None FlashMLA has each row's greatest score, which no kernel here
    keeps. return_log2_lse: True: lse in base 2; False: None in its place. use_legacy: ignored.

    q: [queries, heads, 576], or the pair of its first 512 and its last 64 columns, which FlashMLA does not take. kv:
    [tokens, 1, 576]. indices: int32 [queries, 1, top-k], tokens of kv; -1 and those beyond its end are none.
    attn_sink: float32 [heads]. topk_length: int32 [queries], how many entries of each list count. out: written and
    returned, if given, as vLLM's fork has it. tile_scheduler_metadata: of get_mla_metadata(); calls with it share a
    plan if they have up to 2048 queries, which FlashMLA's prefill has no need of.
    """
    if not are_queries(q, 3) or len(kv.shape) != 3 or kv.shape[1:] != (1, LATENT + ROPE) or d_v != LATENT:
        raise Error(f"q must be [queries, heads, {LATENT + ROPE}], kv [tokens, 1, {LATENT + ROPE}] and d_v {LATENT}, "
                    f"not {_shapes(q)}, {list(kv.shape)} and {d_v}")
    if tile_scheduler_metadata is not None:
        _check_metadata(tile_scheduler_metadata)
    like = parts(q)[0]
    queries, heads, _ = like.shape
    if len(indices.shape) != 3 or indices.shape[:2] != (queries, 1):
        raise Error(f"indices must be [{queries}, 1, top-k], not {list(indices.shape)}")
    out = _output(out, like, (queries, heads, LATENT))
    lse = _tensors.empty(like, (queries, heads), "float32")
    _attend(q, kv, indices[:, 0], _lengths(indices, topk_length), attn_sink, sm_scale, out, lse,
            tile_scheduler_metadata)
    if return_log2_lse:
        lse /= math.log(2)
    return out, None, None if return_log2_lse is False else lse


@raises_error
def load_sparse_kernels(device, heads, top_k, fp8=False, dtype="bfloat16"):
    """Compiles what the calls above will run for lists of so many entries, any number of them, so that a server's first
    requests neither wait for a compiler nor are the first to learn that there is none. Returns the kernels' names. They
    are the same for pages of any size. FlashMLA has no such function. dtype: of queries."""
    options = (_list_options(heads, 1 << bit, top_k, 1, dtype, fp8, 1.0)
               for bit in range(MlaDecode.MAX_REQUESTS.bit_length()))
    return list(dict.fromkeys(MlaDecode(device=device, **of).explain().partition(",")[0] for of in options))


def _shapes(q):
    return " and ".join(str(list(part.shape)) for part in parts(q) if part is not None)


def _check_metadata(metadata, num_splits=None):
    if not isinstance(metadata, FlashMLASchedMeta) or num_splits is not None:
        raise Error("the metadata must be what get_mla_metadata() of hypermla.compat.flash_mla returned, and "
                    "num_splits None; tensors of older releases of FlashMLA are not taken")


def _output(given, like, shape, dtype=None):
    """`out`, of a type that run() checks."""
    if given is None:
        return _tensors.empty(like, shape, dtype)
    if tuple(given.shape) != shape:
        raise Error(f"out must be {list(shape)}, not {list(given.shape)}")
    return given


def _keep(rows, out):
    """Rows of `out` that reshape() had to copy go to where they belong."""
    if _tensors.address(rows) != _tensors.address(out):
        out[...] = rows.reshape(out.shape)


def _sparse(q, k_cache, indices, topk_length, attn_sink, head_dim_v, softmax_scale, causal, fp8, metadata, invariant,
            out):
    """flash_mla_with_kvcache() with indices."""
    width = FP8_BYTES["fp8_656"] if fp8 else LATENT + ROPE
    if not are_queries(q, 4) or head_dim_v != LATENT:
        raise Error(f"q must be [batch, queries, heads, {LATENT + ROPE}] and head_dim_v {LATENT}, not {_shapes(q)} "
                    f"and {head_dim_v}")
    if len(k_cache.shape) != 4 or k_cache.shape[2:] != (1, width):
        raise Error(f"with indices and is_fp8_kvcache={bool(fp8)} k_cache must be [pages, page, 1, {width}], not "
                    f"{list(k_cache.shape)}")
    like = parts(q)[0]
    batch, queries, heads, _ = like.shape
    if len(indices.shape) != 3 or indices.shape[:2] != (batch, queries):
        raise Error(f"indices must be [{batch}, {queries}, top-k], not {list(indices.shape)}")
    if causal:
        raise Error("causal is not supported with indices: a list says which tokens a query sees")
    cache = _tensors.as_bytes(k_cache[:, :, 0]) if fp8 else k_cache[:, :, 0]
    out = _output(out, like, (batch, queries, heads, LATENT))
    lse = _tensors.empty(like, (batch, queries, heads), "float32")
    rows = lambda tensor: tensor.reshape(batch * queries, *tensor.shape[2:])
    own = rows(out)
    _attend(each_part(rows, q), *_rows(cache, rows(indices)), _lengths(indices, topk_length), attn_sink,
            (LATENT + ROPE) ** -0.5 if softmax_scale is None else softmax_scale, own, rows(lse), metadata, invariant)
    _keep(own, out)
    return out, lse.swapaxes(1, 2)


def _rows(cache, slots):
    """A cache of pages that lie apart, or of a size that MlaDecode has not, as one of tokens, [tokens, 1, columns], and
    the slots in it. Others stay."""
    pages, page, columns = cache.shape
    by_page, by_token, _ = _tensors.strides(cache)
    if pages < 2 or page == 1 or by_page == page * by_token:
        return cache if page in PAGES else cache.reshape(pages * page, 1, columns), slots
    if by_page < 1 or by_token < 1:
        raise Error("a cache whose tokens share memory is not supported; copy it first")
    apart = by_page // by_token
    if by_page % by_token:
        raise Error(f"pages that are {by_page} elements apart are not supported: make it a multiple of the {by_token} "
                    "from a token to the next")
    shape, strides = ((pages - 1) * apart + page, 1, columns), (by_token, by_token, 1)
    absent = (slots < 0) | (slots >= pages * page)  # which counted anew could become tokens
    moved = slots + slots // page * (apart - page)
    if _tensors.is_torch(cache):
        return cache.as_strided(shape, strides), moved.masked_fill(absent, -1)
    import numpy

    moved[absent] = -1
    return numpy.lib.stride_tricks.as_strided(cache, shape, [one * cache.itemsize for one in strides]), moved


def _lengths(indices, topk_length):
    """A function that makes the lists' lengths, int32 [lists], or None of lists as long as any may be. It copies only
    what it must, since a copy is one more node in a graph."""
    def made():
        _, each, width = indices.shape
        if topk_length is None and width == rounded(width):
            return None
        if topk_length is not None and each == 1 and _tensors.is_list_of("int32", topk_length, indices):
            return topk_length
        lengths = _tensors.empty(indices, tuple(indices.shape[:2]))
        lengths[...] = width if topk_length is None else topk_length[:, None]
        return lengths.reshape(-1)

    if topk_length is not None:
        if tuple(topk_length.shape) != (indices.shape[0],):
            raise Error(f"topk_length must be [{indices.shape[0]}], not {list(topk_length.shape)}")
        _tensors.require_int32(topk_length=topk_length)
    return made


def _attend(q, cache, slots, lengths, sinks, scale, out, lse, metadata=None, invariant=False):
    """Queries [queries, heads, 576], or a pair, over the lists [queries, top-k] of a cache [pages, page, columns]."""
    like = parts(q)[0]
    queries, heads, _ = like.shape
    if 0 in (queries, heads, cache.shape[0], slots.shape[1]):  # no token to see
        out[...], lse[...] = 0, float("inf")
        return
    planned = _planned(like, _list_options(heads, min(queries, MlaDecode.MAX_REQUESTS), slots.shape[1], cache.shape[1],
                                           _tensors.dtype(like), cache.shape[2] == FP8_BYTES["fp8_656"], scale),
                       invariant)
    if metadata is not None and queries <= MlaDecode.MAX_REQUESTS:
        _plan(planned, metadata, lambda: _plan_lists(planned, lengths(), slots),
              ((queries, heads, LATENT + ROPE), cache.shape[1], slots.shape[1]))
        planned.decode.run(takeable(q), cache, slots, out, lse, sinks=sinks)
        return
    lengths = lengths()
    for first in range(0, queries, MlaDecode.MAX_REQUESTS):
        own = slice(first, first + MlaDecode.MAX_REQUESTS)
        planned.plan = None
        _plan_lists(planned, None if lengths is None else lengths[own], slots[own])
        own_q = takeable(each_part(lambda part: part[own], q))
        planned.decode.run(own_q, cache, slots[own], out[own], lse[own], sinks=sinks)


def _list_options(heads, queries, top_k, page, dtype, fp8, scale):
    """Of the MlaDecode for so many lists."""
    return {"heads": heads, "max_requests": rounded(queries),
            "max_tokens": min(rounded(top_k), MlaDecode.MAX_TOKENS), "page": page, "dtype": dtype,
            "scale": positive("the scale of scores", scale), "sparse": True,
            "cache_format": "fp8_656" if fp8 else "as_queries", "empty_lse_positive": True}


def _plan_lists(planned, lengths, slots):
    _tensors.require_int32(indices=slots)
    planned.decode.plan(lengths, block_table=slots if lengths is None else None)


def _plan(planned, metadata, make, shapes):
    """make: a function that plans, unless that has been done."""
    if metadata.shapes not in (None, shapes):
        raise Error(f"the metadata was made for q, page and what else counts of {metadata.shapes}, not {shapes}; call "
                    "get_mla_metadata() again for another shape")
    if metadata.plan is None or planned.plan is not metadata.plan:
        planned.plan = None  # until it is made
        make()
        planned.plan = metadata.plan = object()
        metadata.shapes = shapes


def _planned(q, options, invariant=False):
    """The MlaDecode of these options on the stream and the device of q. Those that graphs have captured serve nothing
    else: a replay writes over their plans. invariant: one for any number of requests, which cuts none."""
    if invariant:  # 512 is the least `split` that there are kernels for
        options = options | {"max_requests": MlaDecode.MAX_REQUESTS, "split": max(options["max_tokens"], 512)}
    gpu = _tensors.is_torch(q) and q.is_cuda
    device = f"cuda:{q.device.index}" if gpu else "cpu"
    capacity = (device, *options.items())
    if gpu and _is_capturing():
        if capacity not in _captured:
            # Any stream's: nothing can be loaded now. The next call outside makes a new one.
            key = next((key for key in list(_eager) if key[0] == capacity), None)
            if key is None:
                raise Error("the first call of a shape loads its kernels, which a capture cannot: make the same call "
                            "once before it")
            _captured[capacity] = _eager.pop(key)
            _captured[capacity].plan = None  # the graph must make it, not only read it
        return _captured[capacity]
    key = capacity, _tensors.current_stream(q), threading.get_ident()
    planned = _eager.pop(key, None) or _Planned(MlaDecode(device=device, **options), q)
    _eager[key] = planned
    while len(_eager) > _KEPT:
        _eager.popitem(last=False)
    return planned


def _is_capturing():
    import torch

    return torch.cuda.is_current_stream_capturing()
