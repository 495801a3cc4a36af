"""Prefill as a serving engine calls it: a plan per step, then one call per layer (include/hypermla/mla_prefill.h)."""

from hypermla import _hypermla
from hypermla._errors import raises_error
from hypermla._hypermla import Error
from hypermla._tensors import address, current_stream, dtype_name, empty, strides
from hypermla._tensors import dtype as dtype_of

NOPE, ROPE, VALUE = 128, 64, 128


class MlaPrefill:
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
    request): the capacity. causal: query i of the n of a request with m tokens sees the first m - n + i + 1. scale: of
    the scores; 0: 1 / sqrt(192). lse_base2: the log-sum-exp in base 2. empty_lse_positive: +inf instead of -inf for a
    query that sees no token. workspace: a tensor of workspace_bytes of another MlaPrefill of the same options; None:
    memory of its own.
    """

    @raises_error
    def __init__(self, heads=128, max_requests=1, max_query_tokens=8192, max_tokens=131072, dtype="bfloat16",
                 causal=True, scale=0.0, lse_base2=False, empty_lse_positive=False, device="auto", workspace=None):
        self._workspace = workspace
        self._prefill = _hypermla.MlaPrefill(
            device, 0 if workspace is None else address(workspace), dtype_name(dtype),
            (heads, max_requests, max_query_tokens, max_tokens), scale, (causal, lse_base2, empty_lse_positive))
        self._heads, self._dtype = heads, dtype_name(dtype)
        self._seen = None  # the last call's tensors, which were checked

    @property
    def workspace_bytes(self):
        return self._prefill.workspace_bytes()

    def explain(self):
        """Which kernel runs, and why."""
        return self._prefill.explain()

    def check(self):
        """Waits for the device; raises Error if the last plan() was given starts beyond the capacity."""
        self._prefill.check()

    @raises_error
    def plan(self, query_starts, token_starts, stream=None):
        """Divides a step's work. query_starts, token_starts: int32 [requests + 1], as engines' cu_seqlens_q and
        cu_seqlens_k. stream: an address; None: PyTorch's current stream."""
        for name, tensor in (("query_starts", query_starts), ("token_starts", token_starts)):
            if (dtype_of(tensor) != "int32" or len(tensor.shape) != 1 or tensor.shape[0] != query_starts.shape[0]
                    or tensor.shape[0] == 0 or strides(tensor)[0] != 1):
                raise Error(f"{name} must be dense int32 [requests + 1], not {_said(tensor)}")
        self._require_memory(query_starts, token_starts)
        self._prefill.plan(address(query_starts), address(token_starts), query_starts.shape[0] - 1,
                           current_stream(query_starts) if stream is None else stream)

    @raises_error
    def run(self, q, k, v, out=None, lse=None, stream=None):
        """Attention of one layer; returns (out, lse).

        q: [query_tokens, heads, 192], or the pair [.., 128] and [.., 64]; k: the same over tokens, where the 64 columns
        may be one head that is expanded to all. v: [tokens, heads, 128]. out: [query_tokens, heads, 128]; lse: float32
        [query_tokens, heads] by any strides; both are made where they are not given.
        """
        (q_nope, q_rope), (k_nope, k_rope) = _pair(q), _pair(k)
        if out is None:
            out = empty(q_nope, (q_nope.shape[0], self._heads, VALUE))
        if lse is None:
            lse = empty(q_nope, (q_nope.shape[0], self._heads), "float32")
        tensors = (q_nope, q_rope, k_nope, k_rope, v, out, lse)
        seen = tuple((one.shape, one.dtype, strides(one), getattr(one, "device", None)) for one in tensors)
        if seen != self._seen:
            self._check(*tensors)
            self._seen = seen
        if q_nope.shape[0] and address(out) in (address(q_nope), address(k_nope), address(v)):
            raise Error("out must have memory of its own: blocks read q, k and v after others have written")
        self._prefill.run(*((address(tensor), *strides(tensor)[:2]) for tensor in tensors), q_nope.shape[0],
                          v.shape[0], current_stream(q_nope) if stream is None else stream)
        return out, lse

    def _check(self, q_nope, q_rope, k_nope, k_rope, v, out, lse):
        queries, tokens = q_nope.shape[0], v.shape[0]
        wanted = (("q's first columns", q_nope, queries, NOPE), ("q's RoPE columns", q_rope, queries, ROPE),
                  ("k's first columns", k_nope, tokens, NOPE), ("k's RoPE columns", k_rope, tokens, ROPE),
                  ("v", v, tokens, VALUE), ("out", out, queries, VALUE))
        for name, tensor, rows, width in wanted:
            shape = (rows, self._heads, width)
            if tuple(tensor.shape) != shape or dtype_of(tensor) != self._dtype:
                raise Error(f"{name} must be {self._dtype} {list(shape)}, not {_said(tensor)}")
            if rows and strides(tensor)[-1] != 1:
                raise Error(f"{name} must be dense in the last dimension; copy it first")
        self._require_memory(q_nope, q_rope, k_nope, k_rope, v, out, lse)
        if tuple(lse.shape) != (queries, self._heads) or dtype_of(lse) != "float32":
            raise Error(f"lse must be float32 {[queries, self._heads]}, not {_said(lse)}")

    def _require_memory(self, *tensors):
        if any(getattr(tensor, "is_cuda", False) != self._prefill.is_gpu() for tensor in tensors):
            raise Error(f"all tensors must be in the memory of the {'GPU' if self._prefill.is_gpu() else 'CPU'}")


def _pair(tensor):
    """The two parts of queries or keys."""
    if isinstance(tensor, tuple):
        return tensor
    if len(tensor.shape) != 3 or tensor.shape[2] != NOPE + ROPE:
        raise Error(f"queries and keys must be [tokens, heads, {NOPE + ROPE}] or a pair of {NOPE} and {ROPE} columns, "
                    f"not {_said(tensor)}")
    return tensor[..., :NOPE], tensor[..., NOPE:]


def _said(tensor):
    return f"{dtype_of(tensor)} {list(tensor.shape)}"
