"""Decoding as a serving engine calls it: a plan per step, then one call per layer (include/hypermla/mla_decode.h)."""

from hypermla import _hypermla
from hypermla._errors import raises_error
from hypermla._hypermla import Error

LATENT, ROPE = 512, 64


def _is_torch(tensor):
    return hasattr(tensor, "data_ptr")


def _address(tensor):
    return tensor.data_ptr() if _is_torch(tensor) else tensor.__array_interface__["data"][0]


def _strides(tensor):
    """In elements."""
    return tensor.stride() if _is_torch(tensor) else tuple(stride // tensor.itemsize for stride in tensor.strides)


def _dtype(tensor):
    return str(tensor.dtype).removeprefix("torch.").replace("uint16", "bfloat16")  # NumPy has no bfloat16


def _current_stream(tensor):
    """Of PyTorch, on the tensor's device; the default stream for everything else."""
    if not _is_torch(tensor) or not tensor.is_cuda:
        return 0
    import torch

    return torch._C._cuda_getCurrentRawStream(tensor.device.index)


class MlaDecode:
    """Attention over a paged latent cache, for a capacity.

        decode = hypermla.MlaDecode(heads=128, max_requests=256, max_queries=2, max_tokens=131072)
        decode.plan(lengths, query_starts)                      # once per step
        for layer in layers:
            o, lse = decode.run(layer.q, layer.cache, block_table)   # once per layer

    Tensors are PyTorch's, on the device; on a CPU NumPy's arrays, too, where uint16 stands for bfloat16. Strides are
    taken from them; the last dimension is dense. plan() and run() neither allocate (give `out` and `lse`) nor
    synchronise, and may be captured in a CUDA graph. What is wrong raises hypermla.Error; an argument of a wrong type
    raises TypeError.

    heads: query heads on this device. max_requests, max_queries (of a request), max_query_tokens (of a step; 0: of all
    requests at once), max_tokens (of a request): the capacity. page: tokens of a page of the cache, 1, 16, 32, 64 or
    128. scale: of the scores; 0: 1 / sqrt(192). split: tokens after which every request is cut, so that the bits of its
    output do not depend on its batch; 0: free. lse_base2: the log-sum-exp in base 2. empty_lse_positive: +inf instead
    of -inf for a query that sees no token. kernel: pins one by its full name. workspace: a tensor of workspace_bytes of
    another MlaDecode of the same options; None: memory of its own.
    """

    @raises_error
    def __init__(self, heads=128, max_requests=1, max_queries=1, max_tokens=4096, page=64, dtype="bfloat16",
                 causal=True, scale=0.0, split=0, max_query_tokens=0, lse_base2=False, empty_lse_positive=False,
                 kernel="", device="auto", workspace=None):
        self._workspace = workspace
        self._decode = _hypermla.MlaDecode(
            device, 0 if workspace is None else _address(workspace), _name(dtype), kernel,
            (heads, max_requests, max_queries, max_query_tokens, max_tokens, page, split), scale,
            (causal, lse_base2, empty_lse_positive))
        self._heads, self._page, self._dtype = heads, page, _name(dtype)
        self._seen = set()  # types and shapes that were checked

    @property
    def workspace_bytes(self):
        return self._decode.workspace_bytes()

    def explain(self):
        """Which kernel runs, and why."""
        return self._decode.explain()

    def check(self):
        """Waits for the device; raises Error if the last plan() was given lengths or queries beyond the capacity."""
        self._decode.check()

    @raises_error
    def plan(self, lengths, query_starts=None, stream=None):
        """Divides a step's work. lengths: int32 [requests], the new tokens included. query_starts: int32 [requests +
        1], the first 0; None: max_queries of each request. stream: an address; None: PyTorch's current stream."""
        for name, tensor, size in (("lengths", lengths, 0), ("query_starts", query_starts, 1)):
            if tensor is not None and (_dtype(tensor) != "int32" or tensor.shape != (lengths.shape[0] + size,)
                                       or not _is_dense(tensor)):
                raise Error(f"{name} must be dense int32 [requests{' + 1' if size else ''}], not {_said(tensor)}")
        self._decode.plan(_address(lengths), 0 if query_starts is None else _address(query_starts), lengths.shape[0],
                          _current_stream(lengths) if stream is None else stream)

    @raises_error
    def run(self, q, cache, block_table, out=None, lse=None, stream=None):
        """Attention of one layer; returns (out, lse).

        q: [tokens, heads, 576], or the pair [tokens, heads, 512] and [tokens, heads, 64]. cache: [pages, page, 576], or
        the pair [pages, page, 512] and [pages, page, 64]. block_table: int32 [requests, pages]. out: [tokens, heads,
        512]; lse: float32 [tokens, heads]; both are made where they are not given. `out` must have memory of its own.
        """
        q_latent, q_rope = q if isinstance(q, tuple) else (q, q)
        z, k_rope = cache if isinstance(cache, tuple) else (cache, cache)
        if out is None:
            out = _empty(q_latent, (q_latent.shape[0], self._heads, LATENT))
        if lse is None:
            lse = _empty(q_latent, (q_latent.shape[0], self._heads), "float32")
        signature = (q_latent.shape, q_rope.shape, z.shape, k_rope.shape, block_table.shape, out.shape, lse.shape,
                     q_latent.dtype, z.dtype, out.dtype)
        if signature not in self._seen:
            self._check(q_latent, q_rope, z, k_rope, block_table, out, lse)
            self._seen.add(signature)
        behind = 2 * LATENT
        q_strides, rope_strides, z_strides, k_strides = map(_strides, (q_latent, q_rope, z, k_rope))
        o_strides, lse_strides = _strides(out), _strides(lse)
        z_address, o_address = _address(z), _address(out)
        q_address = _address(q_latent)
        if o_address == q_address or o_address == z_address:
            raise Error("out must have memory of its own: blocks read q and the cache after others have written")
        self._decode.run(
            q_address, q_strides[0], q_strides[1],
            q_address + behind if q_rope is q_latent else _address(q_rope), rope_strides[0], rope_strides[1],
            q_latent.shape[0],
            z_address, z_address + behind if k_rope is z else _address(k_rope),
            z_strides[0], z_strides[1], k_strides[0], k_strides[1], z.shape[0],
            _address(block_table), _strides(block_table)[0],
            o_address, o_strides[0], o_strides[1],
            _address(lse), lse_strides[0], lse_strides[1], 0,
            _current_stream(q_latent) if stream is None else stream)
        return out, lse

    def _check(self, q_latent, q_rope, z, k_rope, block_table, out, lse):
        tokens, pages = q_latent.shape[0], z.shape[0]
        width = LATENT + ROPE
        q_widths = (width, width) if q_rope is q_latent else (LATENT, ROPE)
        z_widths = (width, width) if k_rope is z else (LATENT, ROPE)
        wanted = (
            ("q" if q_rope is q_latent else "q[0]", q_latent, (tokens, self._heads, q_widths[0]), self._dtype),
            ("q[1]", q_rope, (tokens, self._heads, q_widths[1]), self._dtype),
            ("cache" if k_rope is z else "cache[0]", z, (pages, self._page, z_widths[0]), self._dtype),
            ("cache[1]", k_rope, (pages, self._page, z_widths[1]), self._dtype),
            ("out", out, (tokens, self._heads, LATENT), self._dtype),
            ("lse", lse, (tokens, self._heads), "float32"),
            ("block_table", block_table, (block_table.shape[0], block_table.shape[-1]), "int32"),
        )
        for name, tensor, shape, dtype in wanted:
            if tuple(tensor.shape) != shape or _dtype(tensor) != dtype:
                raise Error(f"{name} must be {dtype} {list(shape)}, not {_said(tensor)}")
            if name != "lse" and _strides(tensor)[-1] != 1:
                raise Error(f"{name} must be dense in its last dimension; copy it first")


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _said(tensor):
    return f"{_dtype(tensor)} {list(tensor.shape)}"


def _is_dense(tensor):
    return tensor.shape[0] <= 1 or _strides(tensor)[0] == 1


def _empty(like, shape, dtype=None):
    if _is_torch(like):
        import torch

        return like.new_empty(shape, dtype=torch.float32 if dtype else None)
    import numpy

    return numpy.empty(shape, dtype or like.dtype)
