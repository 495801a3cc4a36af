"""The library's calls as operators of PyTorch, for torch.compile(), torch.export() and passes over graphs.

    torch.ops.hypermla.mla_decode_plan(decode.handle, decode.order, lengths, query_starts)
    torch.ops.hypermla.mla_decode_run(decode.handle, decode.order, q, None, cache, None, block_table, out, lse)

`handle` is an integer that names a living MlaDecode. `order` is one element on its device: both operators say that they
write it, so no compiler drops a plan or moves a run before it. Nothing does write it. `q_rope` and `cache_rope` are the
second tensors of pairs. MlaDecode.plan() and run() take these operators by themselves while torch.compile() traces; the
rest of the time they call the library directly, which costs less. This module imports PyTorch, and MlaDecode imports it
only where PyTorch is imported already.
"""

import itertools
import weakref

import torch

from hypermla import _hypermla, _tensors
from hypermla._hypermla import Error

_handles = itertools.count(1)
_living = weakref.WeakValueDictionary()  # MlaDecode by its handle
_library = torch.library.Library("hypermla", "FRAGMENT")


def adopt(decode):
    """Gives a MlaDecode its handle, where PyTorch knows its device."""
    if decode.device == "cpu" or torch.cuda.is_available():
        decode.handle, decode.order = next(_handles), torch.zeros(1, device=decode.device)
        _living[decode.handle] = decode


def _named(handle):
    try:
        return _living[handle]._decode
    except KeyError:
        raise Error(f"handle {handle} names no MlaDecode; keep it alive as long as what was compiled for it") from None


def _pair(one, other):
    return one if other is None else (one, other)


def _plan(handle, order, lengths, query_starts):
    _named(handle).plan(lengths, query_starts, None)


def _run(handle, order, q, q_rope, cache, cache_rope, block_table, out, lse):
    _named(handle).run(_pair(q, q_rope), _pair(cache, cache_rope), block_table, out, lse, None)


def _merge_states(*arguments):
    _hypermla.merge_states(*arguments, None)


def _append(rows, rows_rope, cache, cache_rope, slots):
    _hypermla.append(_pair(rows, rows_rope), _pair(cache, cache_rope), slots, None)


def _decompress_prefix(cache, cache_rope, *arguments):
    _hypermla.decompress_prefix(_pair(cache, cache_rope), *arguments, None)


def _define(name, arguments, kernel):
    _library.define(f"{name}({arguments}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hypermla::{name}", lambda *arguments: None, lib=_library)


_define("mla_decode_plan", "SymInt handle, Tensor(a!) order, Tensor lengths, Tensor? query_starts", _plan)
_define("mla_decode_run", "SymInt handle, Tensor(a!) order, Tensor q, Tensor? q_rope, Tensor cache, "
        "Tensor? cache_rope, Tensor block_table, Tensor(b!) out, Tensor(c!) lse", _run)
_define("merge_states", "Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b, Tensor(a!) out, Tensor(b!) lse, "
        "bool lse_base2, bool empty_lse_positive", _merge_states)
_define("append", "Tensor rows, Tensor? rows_rope, Tensor(a!) cache, Tensor(b!)? cache_rope, Tensor slots", _append)
_define("decompress_prefix", "Tensor cache, Tensor? cache_rope, Tensor block_table, SymInt tokens, Tensor w_uk, "
        "Tensor w_uv, Tensor(a!) k, Tensor(b!) v", _decompress_prefix)
_tensors.is_compiling = torch.compiler.is_compiling
