"""Prefill as a serving engine calls it: a plan per step, then one call per layer (include/hypermla/mla_prefill.h)."""

from hypermla import _hypermla, _tensors
from hypermla._errors import booleans, integers, raises_error
from hypermla._hypermla import Error
from hypermla._planned import Planned, parts

NOPE, VALUE = 128, 128  # columns of a head


class MlaPrefill(Planned):
    """Attention over decompressed keys and values of requests of any lengths, for a capacity.

        prefill = hypermla.MlaPrefill(heads=128, max_requests=64, max_query_tokens=8192, max_tokens=131072)
        prefill.plan(query_starts, token_starts)                # once per step
        for layer in layers:
            o, lse = prefill.run(layer.q, layer.k, layer.v)     # once per layer

    Tensors are PyTorch's, on the device; on a CPU NumPy's arrays, too, where uint16 stands for bfloat16. Strides are
    taken from them; the last dimension is dense. plan() and run() neither allocate (give `out` and `lse`) nor
    synchronise, and may be captured in a CUDA graph. What is wrong raises hypermla.Error; an argument of a wrong type
    raises TypeError.

    heads: of queries, keys and values on this device. max_requests, max_query_tokens (of a step), max_tokens (of a
    request): the capacity, at most MAX_HEADS and so on; on Hopper the largest costs 64 KB. causal: query i of the n of
    a request with m tokens sees the first m - n + i + 1. scale: of the scores; 0: 1 / sqrt(192). lse_base2: the
    log-sum-exp in base 2. empty_lse_positive: +inf instead of -inf for a query that sees no token. accumulate: run()
    merges into what `out` and `lse` hold, attention of the same queries over other tokens. batch_invariant: the bits of
    a request's output do not depend on its batch; else tokens are cut where a step has few queries and heads, for which
    there are 26 MB on 132 multiprocessors. query_rows: plan() is told in which rows of the tensors its queries are.
    workspace: a tensor of workspace_bytes of another MlaPrefill of the same options, aligned to 256 bytes; None: memory
    of its own. device: as MlaDecode's.

    torch.compile() traces plan() and run(), with fullgraph=True, too, if PyTorch was imported before the MlaPrefill was
    made: they are operators then (torch_operators.py).
    """

    MAX_HEADS, MAX_REQUESTS, MAX_QUERY_TOKENS, MAX_TOKENS = _hypermla.PREFILL_LIMITS  # of a capacity

    @raises_error
    def __init__(self, heads=128, max_requests=1, max_query_tokens=8192, max_tokens=131072, dtype="bfloat16",
                 causal=True, scale=0.0, lse_base2=False, empty_lse_positive=False, device="auto", workspace=None,
                 accumulate=False, batch_invariant=False, query_rows=False):
        self._workspace = workspace
        self._heads, self._accumulate = heads, accumulate
        self._take(_hypermla.MlaPrefill(
            _tensors.device_name(device), workspace, _tensors.dtype_name(dtype),
            integers(heads=heads, max_requests=max_requests, max_query_tokens=max_query_tokens, max_tokens=max_tokens),
            scale, booleans(causal=causal, lse_base2=lse_base2, empty_lse_positive=empty_lse_positive,
                            accumulate=accumulate, batch_invariant=batch_invariant, query_rows=query_rows)))

    def plan(self, query_starts, token_starts, stream=None, query_rows=None):
        """Divides a step's work. query_starts, token_starts: int32 [requests + 1], as engines' cu_seqlens_q and
        cu_seqlens_k. query_rows: with the option of that name, int32: the row of q, out and lse of each query, in any
        order. stream: an address or an object with .cuda_stream; None: PyTorch's current stream."""
        if _tensors.is_compiling():
            return self._operators(stream).mla_prefill_plan(self.handle, self.order, query_starts, token_starts,
                                                            query_rows)
        self._kernels.plan(query_starts, token_starts, stream, query_rows)

    def run(self, q, k, v, out=None, lse=None, stream=None):
        """Attention of one layer; returns (out, lse).

        q: [query_tokens, heads, 192], or the pair [.., 128] and [.., 64]; k: the same over tokens, where the 64 columns
        may be one head that is expanded to all. v: [tokens, heads, 128]. out: [query_tokens, heads, 128]; lse: float32
        [query_tokens, heads] by any strides; both are made where they are not given. `out` must have memory of its own.
        """
        if out is None or lse is None:
            out, lse = self._outputs(q, out, lse, stream)
        if _tensors.is_compiling():
            self._operators(stream).mla_prefill_run(self.handle, self.order, *parts(q), *parts(k), v, out, lse)
        else:
            self._kernels.run(q, k, v, out, lse, stream)
        return out, lse

    @raises_error
    def _outputs(self, q, out, lse, stream):
        """Those that are given, else new ones."""
        if self._accumulate:
            raise Error("a MlaPrefill that accumulates needs `out` and `lse`: what is there already")
        q = parts(q)[0]
        tokens = _tensors.shape_of("q", q)[0]
        return (_tensors.empty(q, (tokens, self._heads, VALUE), None, stream) if out is None else out,
                _tensors.empty(q, (tokens, self._heads), "float32", stream) if lse is None else lse)
