"""What an engine does around attention: merge_states, append, decompress_prefix and split_prefixes
(include/hypermla/mla_cache.h).

Tensors are PyTorch's, on one device; on a CPU NumPy's arrays, too, where uint16 stands for bfloat16. Strides are taken
from them: the last dimension of 16-bit tensors is dense, their other strides are multiples of 8. Calls neither allocate
(give `out` and `lse`) nor synchronise, and may be captured in a CUDA graph. The first call for a device and a dtype
compiles and loads the kernels: make one before a capture, without tokens if there is nothing to do. `stream` is an
address or an object with .cuda_stream; None: PyTorch's current stream. torch.compile() traces the calls, with
fullgraph=True, too, if PyTorch was imported before this package or a MlaDecode was made.
"""

import sys

from hypermla import _hypermla, _tensors
from hypermla._errors import booleans, integers, raises_error
from hypermla._hypermla import Error
from hypermla._planned import parts

if sys.modules.get("torch"):
    import hypermla.torch_operators  # noqa: F401

MAX_PREFIXES = _hypermla.MAX_PREFIXES  # of split_prefixes()
_HEAD, _ROPE = 128, 64


def _operators(stream):
    """PyTorch's operators, under torch.compile()."""
    if stream is not None:
        raise Error("torch.compile() has no streams: leave out `stream`, and PyTorch's current one is taken")
    import torch

    return torch.ops.hypermla


@raises_error
def _outputs(o, out, lse, stream):
    """Those that are given, else new ones."""
    shape = tuple(_tensors.shape_of("o_a", o))
    return (_tensors.empty(o, shape, None, stream) if out is None else out,
            _tensors.empty(o, shape[:2], "float32", stream) if lse is None else lse)


def merge_states(o_a, lse_a, o_b, lse_b, out=None, lse=None, lse_base2=False, empty_lse_positive=False, stream=None):
    """Merges two attentions of the same queries over different tokens; returns (out, lse).

    o_a, o_b, out: [tokens, heads, width], width a multiple of 8 up to 512. lse_a, lse_b, lse: float32 [tokens, heads],
    natural, or in base 2 with lse_base2. A part whose log-sum-exp is infinite, of either sign, is empty and changes
    nothing; where both are, out is 0 and lse is -inf, or +inf with empty_lse_positive. `out` may be o_a or o_b, and
    `lse` the log-sum-exp of a part; otherwise they must not overlap the parts.
    """
    if out is None or lse is None:
        out, lse = _outputs(o_a, out, lse, stream)
    if _tensors.is_compiling():
        _operators(stream).merge_states(o_a, lse_a, o_b, lse_b, out, lse, lse_base2, empty_lse_positive)
    else:
        flags = booleans(lse_base2=lse_base2, empty_lse_positive=empty_lse_positive)
        _hypermla.merge_states(o_a, lse_a, o_b, lse_b, out, lse, *flags, stream)
    return out, lse


def append(rows, cache, slots, stream=None, cache_scale=None):
    """Writes rows of new tokens into the paged cache.

    rows: [tokens, 576], or the pair [tokens, 512] and [tokens, 64]. cache: [pages, page, 576], or the pair [pages,
    page, 512] and [pages, page, 64]; or uint8 or torch.float8_e4m3fn, into which rows are rounded (docs/fp8.md):
    [pages, page, 656], DeepSeek's FP8 form, or [pages, page, 576] with one factor for all, `cache_scale`, positive,
    float32 [1].
    slots: int64, page * (tokens of a page) + token in it for each of the first rows; -1 skips one. Slots that the cache
    does not have are skipped on a GPU and raise Error on a CPU.
    """
    if getattr(cache, "itemsize", 2) == 1:  # no pair, and not of 16 bits
        cache = _tensors.as_bytes(cache)
    if _tensors.is_compiling():
        _operators(stream).append(*parts(rows), *parts(cache), slots, cache_scale)
    else:
        _hypermla.append(rows, cache, slots, stream, cache_scale)


@raises_error
def decompress_prefix(cache, block_table, tokens, w_uk, w_uv, out=None, rope=True, stream=None):
    """Keys and values of the first `tokens` tokens of a request, for all heads; returns (k, v).

    cache: as append()'s. block_table: int32 [pages], the request's row. w_uk: [heads, 128, 512]; w_uv: [heads, 512,
    128]; either of the inner dimensions of each is dense. out: the pair k [tokens, heads, 192], whose last 64 columns
    are the rotary part, or [tokens, heads, 128] without it, and v [tokens, heads, 128]. Where they are made, `rope`
    says which k.
    """
    tokens, = integers(tokens=tokens)
    if out is None:
        if tokens < 0:
            raise Error(f"tokens={tokens} is not supported: it must not be negative")
        like = cache[0] if isinstance(cache, tuple) else cache
        _tensors.shape_of("cache", like)
        heads = _tensors.shape_of("w_uk", w_uk)[0]
        widths = _HEAD + _ROPE * bool(rope), _HEAD
        out = tuple(_tensors.empty(like, (tokens, heads, width), None, stream) for width in widths)
    k, v = out
    if _tensors.is_compiling():
        _operators(stream).decompress_prefix(*parts(cache), block_table, tokens, w_uk, w_uv, k, v)
    else:
        _hypermla.decompress_prefix(cache, block_table, tokens, w_uk, w_uv, k, v, stream)
    return k, v


def split_prefixes(block_table, lengths, query_starts, slots, prefixes, prefix_pages, owners, found, own_table,
                   own_lengths, shared_starts, query_rows, requests=None, page=64, stream=None):
    """Divides the requests of a step that decode between prefixes that are kept decompressed and the tokens behind
    them: once per step, before MlaDecode.plan() and MlaPrefill.plan() (docs/shared-prefixes.md).

    The step: block_table: int32 [requests, pages] of any row stride; lengths: int32 [requests], the step's tokens
    included; query_starts: int32 [requests + 1]; slots: int64, which the step writes, as append() has them.
    requests: how many decode, the first ones; None: all.
    The prefixes, up to MAX_PREFIXES: prefixes: int32 [count, 4]: pages (0: there is none), first token among the kept
    keys and values, least queries for which it is attended to, and whether it is valid, which becomes 0 where a slot is
    one of its pages; prefix_pages: int32 [count, pages]; owners: int32, for each page of the cache the bits of the
    prefixes that have it.
    What is written: found: int32 [requests], for the call itself; own_table and own_lengths: those behind the prefixes;
    shared_starts: int32 [2, 2 * count], query and token starts for MlaPrefill.plan(); query_rows: int32, room for all
    queries, its rows. They may be larger than a step is.
    """
    if requests is None:
        requests = _tensors.shape_of("lengths", lengths)[0]
    requests, page = integers(requests=requests, page=page)
    if _tensors.is_compiling():
        _operators(stream).split_prefixes(block_table, lengths, query_starts, requests, slots, page, prefixes,
                                          prefix_pages, owners, found, own_table, own_lengths, shared_starts,
                                          query_rows)
    else:
        _hypermla.split_prefixes(block_table, lengths, query_starts, requests, slots, page, prefixes, prefix_pages,
                                 owners, found, own_table, own_lengths, shared_starts, query_rows, stream)
