"""Decoding as a serving engine calls it: a plan per step, then one call per layer (include/hypermla/mla_decode.h)."""

import sys

from hypermla import _hypermla, _tensors
from hypermla._errors import raises_error
from hypermla._hypermla import Error

LATENT, ROPE = 512, 64


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

    torch.compile() traces plan() and run(), with fullgraph=True, too, if PyTorch was imported before the MlaDecode was
    made: they are operators then (torch_operators.py).
    """

    handle = order = None  # what torch_operators.py names it by

    @raises_error
    def __init__(self, heads=128, max_requests=1, max_queries=1, max_tokens=4096, page=64, dtype="bfloat16",
                 causal=True, scale=0.0, split=0, max_query_tokens=0, lse_base2=False, empty_lse_positive=False,
                 kernel="", device="auto", workspace=None):
        self._workspace = workspace
        self._decode = _hypermla.MlaDecode(
            device, 0 if workspace is None else _tensors.address(workspace), _tensors.dtype_name(dtype), kernel,
            (heads, max_requests, max_queries, max_query_tokens, max_tokens, page, split), scale,
            (causal, lse_base2, empty_lse_positive))
        self._heads = heads
        if "torch" in sys.modules:
            from hypermla import torch_operators

            torch_operators.adopt(self)

    @property
    def device(self):
        """"cpu" or "cuda:0"."""
        return self._decode.device()

    @property
    def workspace_bytes(self):
        return self._decode.workspace_bytes()

    def explain(self):
        """Which kernel runs, and why."""
        return self._decode.explain()

    def check(self):
        """Waits for the device; raises Error if the last plan() was given lengths or queries beyond the capacity."""
        self._decode.check()

    def plan(self, lengths, query_starts=None, stream=None):
        """Divides a step's work. lengths: int32 [requests], the new tokens included. query_starts: int32 [requests +
        1], the first 0; None: max_queries of each request. stream: an address or an object with .cuda_stream; None:
        PyTorch's current stream."""
        if _tensors.is_compiling():
            return _operators(self, stream).mla_decode_plan(self.handle, self.order, lengths, query_starts)
        self._decode.plan(lengths, query_starts, stream)

    def run(self, q, cache, block_table, out=None, lse=None, stream=None):
        """Attention of one layer; returns (out, lse).

        q: [tokens, heads, 576], or the pair [tokens, heads, 512] and [tokens, heads, 64]. cache: [pages, page, 576], or
        the pair [pages, page, 512] and [pages, page, 64]. block_table: int32 [requests, pages]. out: [tokens, heads,
        512]; lse: float32 [tokens, heads], or [requests, max_queries, heads]; both are made where they are not given.
        `out` must have memory of its own.
        """
        if out is None or lse is None:
            out, lse = self._outputs(q[0] if isinstance(q, tuple) else q, out, lse)
        if _tensors.is_compiling():
            (q, q_rope), (cache, cache_rope) = (one if isinstance(one, tuple) else (one, None) for one in (q, cache))
            _operators(self, stream).mla_decode_run(self.handle, self.order, q, q_rope, cache, cache_rope, block_table,
                                                    out, lse)
        else:
            self._decode.run(q, cache, block_table, out, lse, stream)
        return out, lse

    @raises_error
    def _outputs(self, q, out, lse):
        """Those that are given, else new ones."""
        return (_tensors.empty(q, (q.shape[0], self._heads, LATENT)) if out is None else out,
                _tensors.empty(q, (q.shape[0], self._heads), "float32") if lse is None else lse)


def _operators(decode, stream):
    """PyTorch's operators, under torch.compile()."""
    import torch

    if stream is not None:
        raise Error("torch.compile() has no streams: leave out `stream`, and PyTorch's current one is taken")
    if decode.handle is None:
        raise Error("torch.compile() cannot trace this MlaDecode; import torch before it is made")
    return torch.ops.hypermla
