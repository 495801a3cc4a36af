"""FlashInfer's attention over a paged latent cache, with the signatures of its releases 0.6.18 to 0.7.4, on MlaDecode.

    from hypermla.compat.flashinfer import BatchMLAPagedAttentionWrapper    # in place of: from flashinfer.mla import ..

Tensors are PyTorch's; on a CPU NumPy's arrays, too. What is wrong raises hypermla.Error. docs/drop-ins.md says what
differs.
"""

import math
from dataclasses import dataclass
from typing import Any

from hypermla import _tensors
from hypermla._errors import booleans, raises_error
from hypermla._hypermla import Error
from hypermla.compat._queries import each_part, positive, rounded, takeable
from hypermla.mla_decode import LATENT, PAGES, ROPE, MlaDecode

__all__ = ["BatchMLAPagedAttentionWrapper", "MLAPlanMetadata"]

_LISTS = "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"
_TABLE = "cum_seq_lens_q", "block_tables", "seq_lens"
# What plan() may be told beside that: what is supported of it, and what may be anything, since run() takes both layouts
# and returns the log-sum-exp that it is asked for.
_SUPPORTED = {"use_profiler": False, "output_scale": "none", "scale_mode": "default", "skip_softmax": False,
              "use_sinks": False}
_ANY = "query_layout", "kv_cache_layout", "lse_mode", "enable_pdl"


@dataclass(frozen=True)
class MLAPlanMetadata:
    """Of a step: lists of pages (csr), or a table of them (dense), which is taken where both are there (dual).

    qo_indptr, cum_seq_lens_q: int32 [requests + 1], where the queries of a request begin. kv_len_arr, seq_lens: int32
    [requests], tokens. kv_indptr: int32 [requests + 1], where the pages of a request begin in kv_indices, int32.
    block_tables: int32 [requests, pages], anything behind a request's. max_q_len: the most queries of a request that
    a captured run() will have; None: those that are there.
    """

    qo_indptr: Any = None
    kv_indptr: Any = None
    kv_indices: Any = None
    kv_len_arr: Any = None
    cum_seq_lens_q: Any = None
    block_tables: Any = None
    seq_lens: Any = None
    max_q_len: int | None = None

    @classmethod
    def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(cls, cum_seq_lens_q, block_tables, seq_lens, max_q_len=None):
        return cls(cum_seq_lens_q=cum_seq_lens_q, block_tables=block_tables, seq_lens=seq_lens, max_q_len=max_q_len)

    @classmethod
    def dual(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr, *, cum_seq_lens_q, block_tables, seq_lens,
             max_q_len=None):
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len)


class BatchMLAPagedAttentionWrapper:
    """One plan for all layers of a step.

    float_workspace_buffer: only its device is taken; the plan has memory of its own, so several wrappers may share one
    buffer. use_cuda_graph: run() may be captured, and plan() before a replay changes what it computes; the number of
    requests and the longest query are those of the first plan() or less. The buffers behind it need not be given. How
    many tokens a request may have the first plan()'s table says by its width, or kv_indices, by its pages divided by
    the requests, or `max_tokens`, which is this library's own. backend: ignored.
    """

    @raises_error
    def __init__(self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None,
                 kv_len_arr=None, backend="auto", *, max_tokens=None):
        self._like = float_workspace_buffer
        gpu = _tensors.is_torch(self._like) and self._like.is_cuda
        self.device = f"cuda:{self._like.device.index}" if gpu else "cpu"
        self._use_cuda_graph, self._max_tokens = use_cuda_graph, max_tokens
        self._all_pages = None if kv_indices is None else kv_indices.shape[0]
        self._options = self._decode = self._table = None
        self._queries = None  # of the plan; None: there is none

    @raises_error
    def plan(self, qo_indptr=None, kv_indptr=None, kv_indices=None, kv_len_arr=None, num_heads=None, head_dim_ckv=None,
             head_dim_kpe=None, page_size=None, causal=None, sm_scale=None, q_data_type=None, kv_data_type=None,
             use_profiler=False, *, metadata=None, cum_seq_lens_q=None, block_tables=None, seq_lens=None,
             max_q_len=None, output_dtype=None, **declared):
        """Divides a step's work; waits for the tensors where they lie on the device.

        The step is given as `metadata`, an MLAPlanMetadata or FlashInfer's, or by its fields, which may lie on the CPU.
        page_size: any. declared: query_layout and the like, which say what run() will get. A plan() that raises leaves
        none: run() asks for another.
        """
        self._queries = None
        flat = MLAPlanMetadata(qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens,
                               max_q_len)
        if metadata is not None and any(value is not None for value in vars(flat).values()):
            raise Error("the step is given twice, as metadata and by its fields; leave one of them out")
        if metadata is not None and not hasattr(metadata, "block_tables"):
            raise Error(f"metadata must be an MLAPlanMetadata, not {type(metadata).__name__}")
        required = {"num_heads": num_heads, "head_dim_ckv": head_dim_ckv, "head_dim_kpe": head_dim_kpe,
                    "page_size": page_size, "causal": causal, "sm_scale": sm_scale, "q_data_type": q_data_type,
                    "kv_data_type": kv_data_type}
        if missing := [name for name, value in required.items() if value is None]:
            raise Error(f"plan() needs {', '.join(missing)}, too")
        if (head_dim_ckv, head_dim_kpe) != (LATENT, ROPE):
            raise Error(f"head_dim_ckv={head_dim_ckv} and head_dim_kpe={head_dim_kpe} are not supported: they must be "
                        f"{LATENT} and {ROPE}")
        dtype = _tensors.dtype_name(q_data_type)
        if dtype != _tensors.dtype_name(kv_data_type):
            raise Error(f"queries of {q_data_type} over a cache of {kv_data_type} are not supported: both must be "
                        "bfloat16 or float16")
        if output_dtype is not None and _tensors.dtype_name(output_dtype) != dtype:
            raise Error(f"outputs of {output_dtype} are not supported: they are of the queries' type, {q_data_type}")
        for name, value in {"use_profiler": use_profiler, **declared}.items():
            if name not in _SUPPORTED and name not in _ANY:
                raise Error(f"plan() has no argument {name}")
            if name in _SUPPORTED and value != _SUPPORTED[name]:
                raise Error(f"{name}={value} is not supported; leave it out")
        if page_size < 1:
            raise Error(f"page_size={page_size} is not supported: it must be at least 1")
        page = next(one for one in PAGES if page_size % one == 0)
        step = _Step(flat if metadata is None else metadata, page_size, self._like)
        wanted = {"requests": len(step.lengths), "tokens": max(step.lengths, default=0), "queries": step.most_queries}
        fixed = {"heads": num_heads, "page": page, "dtype": dtype, "causal": booleans(causal=causal)[0],
                 "scale": positive("sm_scale", sm_scale), "lse_base2": True, "device": self.device}
        self._require_capacity(wanted, fixed, step)
        self._page, self._parts = page_size, page_size // page
        self._fill_table(step)
        self._decode.plan(self._here(step.lengths_given), self._here(step.starts_given))
        self._queries = step.starts[-1]

    @raises_error
    def run(self, q_nope=None, q_pe=None, ckv_cache=None, kpe_cache=None, out=None, lse=None, return_lse=False,
            profiler_buffer=None, kv_len=None, page_table=None, return_lse_base_on_e=False, o_scale=None, *, query=None,
            kv_cache=None, ckv_scale=None, ckv_scale_arr=None, kpe_scale=None, sinks=None,
            skip_softmax_threshold_scale_factor=None, bmm1_scale=None, bmm2_scale=None):
        """Attention of one layer: out, or with return_lse (out, lse).

        query: [queries, heads, 576], or the pair (q_nope, q_pe), [queries, heads, 512] and [queries, heads, 64];
        kv_cache: [pages, page_size, 576], or the pair (ckv_cache, kpe_cache), [pages, page_size, 512] and [pages,
        page_size, 64]. Pairs may be columns of one tensor, and be given by their names. out: [queries, heads, 512].
        lse: float32 [queries, heads], in base 2, or natural with return_lse_base_on_e; -inf for a query that sees no
        token, whose output is 0.
        """
        refused = {"profiler_buffer": profiler_buffer, "kv_len": kv_len, "page_table": page_table, "o_scale": o_scale,
                   "ckv_scale": ckv_scale, "ckv_scale_arr": ckv_scale_arr, "kpe_scale": kpe_scale, "sinks": sinks,
                   "skip_softmax_threshold_scale_factor": skip_softmax_threshold_scale_factor,
                   "bmm1_scale": bmm1_scale, "bmm2_scale": bmm2_scale}
        for name, value in refused.items():
            if value is not None:
                raise Error(f"{name} is not supported; leave it out: caches and outputs have 16 bits, without scales, "
                            "and plan() takes the lengths")
        if self._queries is None:
            raise Error("run() needs a plan; call plan() first, once per step")
        query = _one_of("query", query, q_nope, q_pe)
        kv_cache = _one_of("kv_cache", kv_cache, ckv_cache, kpe_cache)
        latent = query[0] if isinstance(query, tuple) else query
        if latent.shape[0] < self._queries:
            raise Error(f"query has {latent.shape[0]} rows, but the plan has {self._queries} queries")
        if out is None:
            out = _tensors.empty(latent, (*latent.shape[:2], LATENT))
        if lse is None:
            lse = _tensors.empty(latent, tuple(latent.shape[:2]), "float32")
        self._decode.run(takeable(query), each_part(self._in_pages, kv_cache), self._table, out, lse)
        if return_lse_base_on_e:
            lse *= math.log(2)
        return (out, lse) if return_lse else out

    def _require_capacity(self, wanted, fixed, step):
        """Makes the MlaDecode and the table, unless those that are there do."""
        table = {"page_size": step.page_size}
        if self._options == {**fixed, **table} and all(wanted[name] <= self._most[name] for name in wanted):
            return
        for name, most in (("requests", MlaDecode.MAX_REQUESTS), ("queries", MlaDecode.MAX_QUERIES)):
            if wanted[name] > most:
                raise Error(f"{wanted[name]} {name}{' of a request' * (name == 'queries')} are not supported: a plan "
                            f"takes up to {most}")
        if self._use_cuda_graph:
            if self._decode is not None:
                raise Error(f"a captured run() cannot be planned for {_said(wanted, fixed, table)}: the first plan() "
                            f"was for {_said(self._most, self._options)}; make another wrapper, or give it max_tokens")
            tokens = self._max_tokens
            if tokens is None and step.table is not None:
                tokens = step.width * step.page_size
            elif tokens is None and self._all_pages is not None:
                tokens = self._all_pages // max(wanted["requests"], 1) * step.page_size
            if tokens is None or tokens < wanted["tokens"]:
                raise Error(f"a request has {wanted['tokens']} tokens, but kv_indices leaves room for {tokens or 0} of "
                            "each: make the wrapper with max_tokens, the most that a request will have")
            most = {**wanted, "tokens": min(tokens, MlaDecode.MAX_TOKENS)}
        else:
            most = {name: rounded(count) for name, count in wanted.items()}
            most["tokens"] = max(wanted["tokens"], min(most["tokens"], MlaDecode.MAX_TOKENS))
        most = {name: max(count, 1) for name, count in most.items()}
        self._options = None  # until it is made
        self._decode = MlaDecode(max_requests=most["requests"], max_queries=most["queries"],
                                 max_tokens=most["tokens"], **fixed)
        width = -(-most["tokens"] // step.page_size) * (step.page_size // fixed["page"])
        self._table = self._zeros((most["requests"], width))
        self._most, self._options = most, {**fixed, **table}

    def _fill_table(self, step):
        """Rows of pages of the kind that MlaDecode has."""
        width = min(step.width, self._table.shape[1] // self._parts)  # pages without tokens may follow
        if not width or not step.lengths:
            return
        if step.table is not None:
            rows = self._here(step.table)[:, :width]
        else:
            indptr, indices = map(self._here, step.lists)
            rows = indices[(indptr[:-1, None] + self._arange(width)).clip(max=indices.shape[0] - 1)]
        if self._parts > 1:
            rows = (rows[:, :, None] * self._parts + self._arange(self._parts)).reshape(rows.shape[0], -1)
        self._table[:rows.shape[0], :rows.shape[1]] = rows

    def _in_pages(self, cache):
        """The cache, or a part of it, in pages that MlaDecode has."""
        if self._parts == 1:
            return cache
        page, token, _ = _tensors.strides(cache)
        if page != self._page * token:
            raise Error(f"a cache with pages of {self._page} tokens must have no room between pages; copy it first, or "
                        f"use pages of {', '.join(map(str, sorted(PAGES)))}")
        return cache.reshape(cache.shape[0] * self._parts, self._page // self._parts, cache.shape[2])

    def _here(self, tensor):
        return tensor.to(self._like.device) if _tensors.is_torch(tensor) else tensor

    def _arange(self, count):
        if _tensors.is_torch(self._like):
            import torch

            return torch.arange(count, device=self._like.device)
        import numpy

        return numpy.arange(count)

    def _zeros(self, shape):
        if _tensors.is_torch(self._like):
            import torch

            return torch.zeros(shape, dtype=torch.int32, device=self._like.device)
        import numpy

        return numpy.zeros(shape, numpy.int32)


class _Step:
    """A step as plan() is given it, checked: `table`, or `lists`, where pages begin and all of them; `width`, the most
    pages of a request. Its contents are checked here: on a GPU MlaDecode does not see them before it runs."""

    def __init__(self, given, page_size, like):
        self.table, self.page_size = given.block_tables, page_size
        names = _LISTS if self.table is None else _TABLE
        values = {name: getattr(given, name) for name in names}
        if missing := [name for name, value in values.items() if value is None]:
            raise Error(f"a step needs {', '.join(_LISTS)}, or {', '.join(_TABLE)}; {', '.join(missing)} "
                        f"{'is' if len(missing) == 1 else 'are'} missing")
        _tensors.require_int32(**values)
        for name, value in values.items():
            if _tensors.is_torch(value) != _tensors.is_torch(like):
                raise Error(f"{name} is of type {type(value).__name__}, but float_workspace_buffer of "
                            f"{type(like).__name__}; give both of one library")
            if name != "block_tables" and len(value.shape) != 1:
                raise Error(f"{name} must have one dimension, not the shape {list(value.shape)}")
        self.starts_given, *self.lists, self.lengths_given = values.values()
        self.starts, self.lengths = self.starts_given.tolist(), self.lengths_given.tolist()
        requests = len(self.lengths)
        if len(self.starts) != requests + 1:
            raise Error(f"{requests} lengths need {names[0]} of {requests + 1}, not {len(self.starts)}")
        if self.starts[0] != 0:
            raise Error(f"{names[0]} begins with {self.starts[0]}; it must begin with 0")
        if self.table is None:
            begins, all_pages = self.lists[0].tolist(), self.lists[1].shape[0]
            if len(begins) != requests + 1 or begins[-1] > all_pages:
                raise Error(f"{requests} lengths need kv_indptr of {requests + 1} and as many kv_indices as kv_indptr "
                            f"ends with, not {len(begins)} and {all_pages}")
            if begins[0] < 0:
                raise Error(f"kv_indptr begins with {begins[0]}; it must not be negative")
            pages = _counts("kv_indptr", begins)
        else:
            if len(self.table.shape) != 2 or self.table.shape[0] != requests:
                raise Error(f"{requests} lengths need block_tables of [{requests}, pages], not "
                            f"{list(self.table.shape)}")
            pages = [self.table.shape[1]] * requests
        self.width = max(pages, default=0)
        for request, (length, count) in enumerate(zip(self.lengths, pages)):
            if length < 0:
                raise Error(f"request {request} has {length} tokens; give 0 or more")
            if count * page_size < length:
                raise Error(f"request {request} has {length} tokens, but {count} pages of {page_size}")
        self.most_queries = max(max(_counts(names[0], self.starts), default=0), given.max_q_len or 0)


def _counts(name, starts):
    """How many each request has, by where those of each begin."""
    counts = [behind - begin for begin, behind in zip(starts, starts[1:])]
    for request, count in enumerate(counts):
        if count < 0:
            raise Error(f"{name} falls from {starts[request]} to {starts[request + 1]} at request {request}; it must "
                        "not fall")
    return counts


def _one_of(name, whole, *apart):
    """A tensor, or a pair of tensors, given as `whole` or apart. A tensor and a pair beside it are the same twice."""
    if whole is None:
        whole = apart
    elif any(part is not None for part in apart):
        raise Error(f"{name} is given twice, whole and in two parts; leave one of them out")
    if not isinstance(whole, tuple):
        return whole
    tensors = [part for part in whole if part is not None and not isinstance(part, tuple)]
    if len(whole) != 2 or not tensors or any(part is None for part in whole):
        raise Error(f"run() needs {name}: a tensor, or a pair of tensors")
    return whole if len(tensors) == 2 else tensors[0]


def _said(*options):
    return ", ".join(f"{name}={value}" for some in options for name, value in some.items())
