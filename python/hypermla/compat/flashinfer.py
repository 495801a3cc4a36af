"""FlashInfer's attention over a paged latent cache, with the signatures of its release 0.6.18, on MlaDecode.

    from hypermla.compat.flashinfer import BatchMLAPagedAttentionWrapper    # in place of: from flashinfer.mla import ..

Tensors are PyTorch's; on a CPU NumPy's arrays, too. What is wrong raises hypermla.Error. docs/drop-ins.md says what
differs.
"""

import math

from hypermla import _tensors
from hypermla._errors import raises_error
from hypermla._hypermla import Error
from hypermla.compat._queries import takeable
from hypermla.mla_decode import LATENT, ROPE, MlaDecode

__all__ = ["BatchMLAPagedAttentionWrapper"]

_PAGES = 128, 64, 32, 16, 1  # MlaDecode's


class BatchMLAPagedAttentionWrapper:
    """One plan for all layers of a step.

    float_workspace_buffer: only its device is taken; the plan has memory of its own, so several wrappers may share one
    buffer. use_cuda_graph: run() may be captured, and plan() before a replay changes what it computes; the number of
    requests and the longest query are those of the first plan() or less. The buffers behind it need not be given, but
    kv_indices says how many tokens a request may have: its pages divided by the requests, or `max_tokens`, which is
    this library's own. backend: ignored.
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

    @raises_error
    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size,
             causal, sm_scale, q_data_type, kv_data_type, use_profiler=False):
        """Divides a step's work; waits for the tensors where they lie on the device.

        qo_indptr, kv_indptr: int32 [requests + 1], where the queries and the pages of a request begin; kv_indices:
        int32, the pages of all requests; kv_len_arr: int32 [requests], tokens. They may lie on the CPU. page_size: any.
        """
        if (head_dim_ckv, head_dim_kpe) != (LATENT, ROPE):
            raise Error(f"head_dim_ckv={head_dim_ckv} and head_dim_kpe={head_dim_kpe} are not supported: they must be "
                        f"{LATENT} and {ROPE}")
        if use_profiler:
            raise Error("use_profiler is not supported; `hypermla kernel flash_mla` profiles")
        if _tensors.dtype_name(q_data_type) != _tensors.dtype_name(kv_data_type):
            raise Error(f"queries of {q_data_type} over a cache of {kv_data_type} are not supported: both must be "
                        "bfloat16 or float16")
        if page_size < 1:
            raise Error(f"page_size={page_size} is not supported: it must be at least 1")
        starts, pages, lengths = qo_indptr.tolist(), kv_indptr.tolist(), kv_len_arr.tolist()
        requests = len(lengths)
        if len(starts) != requests + 1 or len(pages) != requests + 1 or pages[-1] > kv_indices.shape[0]:
            raise Error(f"{requests} lengths need qo_indptr and kv_indptr of {requests + 1} and as many kv_indices as "
                        f"kv_indptr ends with, not {len(starts)}, {len(pages)} and {kv_indices.shape[0]}")
        for request, length in enumerate(lengths):
            if (pages[request + 1] - pages[request]) * page_size < length:
                raise Error(f"request {request} has {length} tokens, but {pages[request + 1] - pages[request]} pages "
                            f"of {page_size}")
        page = next(one for one in _PAGES if page_size % one == 0)
        wanted = {"requests": requests, "tokens": max(lengths, default=0),
                  "queries": max((after - before for before, after in zip(starts, starts[1:])), default=0)}
        fixed = {"heads": num_heads, "page": page, "dtype": _tensors.dtype_name(q_data_type), "causal": bool(causal),
                 "scale": float(sm_scale), "lse_base2": True, "device": self.device}
        self._require_capacity(wanted, fixed, page_size)
        self._page, self._parts = page_size, page_size // page
        self._requests, self._queries = requests, starts[-1]
        self._fill_table(self._here(kv_indptr), self._here(kv_indices), max(map(int.__sub__, pages[1:], pages),
                                                                           default=0))
        self._decode.plan(self._here(kv_len_arr), self._here(qo_indptr))

    @raises_error
    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False, profiler_buffer=None,
            kv_len=None, page_table=None, return_lse_base_on_e=False, o_scale=None, *, ckv_scale=None,
            ckv_scale_arr=None, kpe_scale=None):
        """Attention of one layer: out, or with return_lse (out, lse).

        q_nope, out: [queries, heads, 512]; q_pe: [queries, heads, 64]; ckv_cache: [pages, page_size, 512]; kpe_cache:
        [pages, page_size, 64], which may be the columns of one tensor. lse: float32 [queries, heads], in base 2, or
        natural with return_lse_base_on_e; -inf for a query that sees no token, whose output is 0.
        """
        refused = {"profiler_buffer": profiler_buffer, "kv_len": kv_len, "page_table": page_table, "o_scale": o_scale,
                   "ckv_scale": ckv_scale, "ckv_scale_arr": ckv_scale_arr, "kpe_scale": kpe_scale}
        for name, value in refused.items():
            if value is not None:
                raise Error(f"{name} is not supported: caches and outputs have 16 bits, and plan() takes the lengths")
        if self._table is None:
            raise Error("run() needs a plan; call plan() first, once per step")
        if q_nope.shape[0] < self._queries:
            raise Error(f"q_nope has {q_nope.shape[0]} rows, but the plan has {self._queries} queries")
        if out is None:
            out = _tensors.empty(q_nope, tuple(q_nope.shape))
        if lse is None:
            lse = _tensors.empty(q_nope, tuple(q_nope.shape[:2]), "float32")
        caches = self._in_pages("ckv_cache", ckv_cache), self._in_pages("kpe_cache", kpe_cache)
        self._decode.run(takeable((q_nope, q_pe)), caches, self._table, out, lse)
        if return_lse and return_lse_base_on_e:
            lse *= math.log(2)
        return (out, lse) if return_lse else out

    def _require_capacity(self, wanted, fixed, page_size):
        """Makes the MlaDecode and the table, unless those that are there do."""
        if self._options == fixed and all(wanted[name] <= self._most[name] for name in wanted):
            return
        if self._use_cuda_graph:
            if self._decode is not None:
                raise Error(f"a captured run() cannot be planned for {_said(wanted, fixed)}: the first plan() was for "
                            f"{_said(self._most, self._options)}; make another wrapper, or give it max_tokens")
            tokens = self._max_tokens
            if tokens is None and self._all_pages is not None:
                tokens = self._all_pages // max(wanted["requests"], 1) * page_size
            if tokens is None or tokens < wanted["tokens"]:
                raise Error(f"a request has {wanted['tokens']} tokens, but kv_indices leaves room for {tokens or 0} of "
                            "each: make the wrapper with max_tokens, the most that a request will have")
            most = {**wanted, "tokens": min(tokens, MlaDecode.MAX_TOKENS)}
        else:
            most = {name: _rounded(count) for name, count in wanted.items()}
            most["tokens"] = max(wanted["tokens"], min(most["tokens"], MlaDecode.MAX_TOKENS))
        most = {name: max(count, 1) for name, count in most.items()}
        self._options = None  # until it is made
        self._decode = MlaDecode(max_requests=most["requests"], max_queries=most["queries"],
                                 max_tokens=most["tokens"], **fixed)
        width = -(-most["tokens"] // page_size) * (page_size // fixed["page"])
        self._table = self._zeros((most["requests"], width))
        self._most, self._options = most, fixed

    def _fill_table(self, kv_indptr, kv_indices, width):
        """Rows of pages from the list of all requests' pages."""
        width = min(width, self._table.shape[1] // self._parts)  # pages without tokens may follow
        if not width or not kv_indices.shape[0]:
            return
        places = kv_indptr[:-1, None] + self._arange(width)
        rows = kv_indices[places.clip(max=kv_indices.shape[0] - 1)]
        if self._parts > 1:
            rows = (rows[:, :, None] * self._parts + self._arange(self._parts)).reshape(rows.shape[0], -1)
        self._table[:rows.shape[0], :rows.shape[1]] = rows

    def _in_pages(self, name, cache):
        """The cache in pages that MlaDecode has."""
        if self._parts == 1:
            return cache
        page, token, _ = _tensors.strides(cache)
        if page != self._page * token:
            raise Error(f"{name} with pages of {self._page} tokens must have no room between pages; copy it first, or "
                        f"use pages of {', '.join(map(str, sorted(_PAGES)))}")
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


def _rounded(count):
    """So that few capacities serve all counts."""
    return 1 << max(count - 1, 0).bit_length()


def _said(counts, fixed):
    return ", ".join(f"{name}={value}" for name, value in {**counts, **fixed}.items())
