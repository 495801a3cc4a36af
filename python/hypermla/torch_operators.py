"""The library's calls as operators of PyTorch, for torch.compile(), torch.export() and passes over graphs.

    torch.ops.hypermla.mla_decode_plan(decode.handle, decode.order, lengths, query_starts)
    torch.ops.hypermla.mla_decode_run(decode.handle, decode.order, q, None, cache, None, block_table, out, lse, sinks)
    torch.ops.hypermla.mla_prefill_plan(prefill.handle, prefill.order, query_starts, token_starts)
    torch.ops.hypermla.mla_prefill_run(prefill.handle, prefill.order, q, None, k, None, v, out, lse)

`handle` is an integer that names a living MlaDecode or MlaPrefill. `order` is one element on its device: both operators
say that they write it, so no compiler drops a plan or moves a run before it. Nothing does write it. `q_rope`, `k_rope`
and `cache_rope` are the second tensors of pairs. plan() and run() take these operators by themselves while
torch.compile() traces; the rest of the time they call the library directly, which costs less. This module imports
PyTorch, and the classes import it only where PyTorch is imported already.

To torch.export() `decode.order` is a constant, and a program in which one is written can be called, but neither
decomposed nor compiled ahead. For that a module calls the operators itself, with a buffer of its own in its place:

    self.register_buffer("order", torch.zeros(1, device=decode.device))                      # in __init__()
    torch.ops.hypermla.mla_decode_plan(decode.handle, self.order, lengths, query_starts)     # in forward()
"""

import itertools
import weakref

import torch

from hypermla import _hypermla, _tensors
from hypermla._hypermla import Error

_handles = itertools.count(1)
_living = weakref.WeakValueDictionary()  # MlaDecode and MlaPrefill by their handles
_library = torch.library.Library("hypermla", "FRAGMENT")


def adopt(planned):
    """Gives a MlaDecode or MlaPrefill its handle, where PyTorch knows its device."""
    if planned.device == "cpu" or torch.cuda.is_available():
        with torch.inference_mode(False):  # operators write it, which inference alone may do to its own tensors
            planned.handle, planned.order = next(_handles), torch.zeros(1, device=planned.device)
        _living[planned.handle] = planned


def _named(handle, kind):
    kernels = getattr(_living.get(handle), "_kernels", None)
    if not isinstance(kernels, kind):
        raise Error(f"handle {handle} names no {kind.__name__}; keep it alive as long as what was compiled for it")
    return kernels


def _pair(one, other):
    return one if other is None else (one, other)


def _decode_plan(handle, order, lengths, query_starts, block_table=None):
    _named(handle, _hypermla.MlaDecode).plan(lengths, query_starts, None, block_table)


def _decode_run(handle, order, q, q_rope, cache, cache_rope, block_table, out, lse, sinks=None,
                cache_scale=None, q_scale=None):
    decode = _named(handle, _hypermla.MlaDecode)
    decode.run(_pair(q, q_rope), _pair(cache, cache_rope), block_table, out, lse, None, sinks, cache_scale,
               q_scale)


def _prefill_plan(handle, order, query_starts, token_starts, query_rows=None):
    _named(handle, _hypermla.MlaPrefill).plan(query_starts, token_starts, None, query_rows)


def _prefill_run(handle, order, q, q_rope, k, k_rope, v, out, lse):
    _named(handle, _hypermla.MlaPrefill).run(_pair(q, q_rope), _pair(k, k_rope), v, out, lse, None)


def _merge_states(*arguments):
    _hypermla.merge_states(*arguments, None)


def _append(rows, rows_rope, cache, cache_rope, slots, cache_scale=None):
    _hypermla.append(_pair(rows, rows_rope), _pair(cache, cache_rope), slots, None, cache_scale)


def _decompress_prefix(cache, cache_rope, *arguments):
    _hypermla.decompress_prefix(_pair(cache, cache_rope), *arguments, None)


def _split_prefixes(*arguments):
    _hypermla.split_prefixes(*arguments, None)


def _define(name, arguments, kernel):
    _library.define(f"{name}({arguments}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hypermla::{name}", lambda *arguments: None, lib=_library)


_define("mla_decode_plan", "SymInt handle, Tensor(a!) order, Tensor? lengths, Tensor? query_starts, "
        "Tensor? block_table=None", _decode_plan)
_define("mla_decode_run", "SymInt handle, Tensor(a!) order, Tensor q, Tensor? q_rope, Tensor cache, "
        "Tensor? cache_rope, Tensor block_table, Tensor(b!) out, Tensor(c!) lse, Tensor? sinks=None, "
        "Tensor? cache_scale=None, Tensor? q_scale=None", _decode_run)
_define("mla_prefill_plan", "SymInt handle, Tensor(a!) order, Tensor query_starts, Tensor token_starts, "
        "Tensor? query_rows=None", _prefill_plan)
_define("mla_prefill_run", "SymInt handle, Tensor(a!) order, Tensor q, Tensor? q_rope, Tensor k, Tensor? k_rope, "
        "Tensor v, Tensor(b!) out, Tensor(c!) lse", _prefill_run)
_define("merge_states", "Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b, Tensor(a!) out, Tensor(b!) lse, "
        "bool lse_base2, bool empty_lse_positive", _merge_states)
_define("append", "Tensor rows, Tensor? rows_rope, Tensor(a!) cache, Tensor(b!)? cache_rope, Tensor slots, "
        "Tensor? cache_scale=None", _append)
_define("decompress_prefix", "Tensor cache, Tensor? cache_rope, Tensor block_table, SymInt tokens, Tensor w_uk, "
        "Tensor w_uv, Tensor(a!) k, Tensor(b!) v", _decompress_prefix)
_define("split_prefixes", "Tensor block_table, Tensor lengths, Tensor query_starts, SymInt requests, Tensor slots, "
        "SymInt page, Tensor(a!) prefixes, Tensor prefix_pages, Tensor owners, Tensor(b!) found, "
        "Tensor(c!) own_table, Tensor(d!) own_lengths, Tensor(e!) shared_starts, Tensor(f!) query_rows",
        _split_prefixes)
_tensors.is_compiling = torch.compiler.is_compiling
