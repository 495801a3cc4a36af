"""Decoding as a serving engine calls it: a plan per step, then one call per layer (include/hypermla/mla_decode.h)."""

from hypermla import _hypermla, _tensors
from hypermla._errors import booleans, integer, integers, raises_error
from hypermla._hypermla import Error
from hypermla._planned import Planned, parts

LATENT, ROPE = 512, 64
FP8_BYTES = {"as_queries": 0, "fp8_656": 656, "fp8_576": 576}  # of a token, by cache_format
PAGES = 128, 64, 32, 16, 1  # tokens of one, where pages are read by tables


class MlaDecode(Planned):
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
    requests at once), max_tokens (of a request): the capacity, at most MAX_HEADS and so on. page: tokens of a page of
    the cache, 1, 16, 32, 64 or 128. scale: of the scores; 0: 1 / sqrt(192). split: tokens after which every request is
    cut, so that the bits of its output do not depend on its batch; 0: free. lse_base2: the log-sum-exp in base 2.
    empty_lse_positive: +inf instead of -inf for a query that sees no token. kernel: pins one by its full name.
    workspace: a tensor of workspace_bytes of another MlaDecode of the same options, aligned to 256 bytes; None: memory
    of its own. device: "cpu", "cuda:1" or PyTorch's own; "auto": PyTorch's current GPU, else the first one, else the
    CPU.

    shards, shard, interleave: of several GPUs that share the context of every request, token i is in the cache of shard
    (i // interleave) % shards, in order, and this is one of them. Lengths and max_tokens count whole requests, and
    merge_states() makes the attention of the outputs of all.

    shared_prefixes: tokens that neighbouring requests have in common at their begin, as equal first entries of their
    rows of the block table say, are attended to once for all of these requests, where that saves enough. plan() gets
    the table that run() will get.

    sparse: every query attends to the tokens that an indexer chose for it. Then max_requests counts the queries of a
    step, max_queries is 1, max_tokens is the longest list, and block_table holds slots of the cache (page * the page's
    tokens + the token in it) instead of pages; negative ones and those beyond the cache are no tokens. cache_format:
    "as_queries"; "fp8_656", DeepSeek's 656 bytes a token (512 e4m3 | 4 fp32 factors, of 128 of these each | 64
    bfloat16 for RoPE); or "fp8_576", 576 e4m3 a token with one factor for all. In FP8 the cache is uint8 or
    torch.float8_e4m3fn [pages, page, 656 or 576], and queries and outputs are bfloat16. fp8_queries: queries in e4m3,
    too, of the same types, with one factor for all; for "fp8_576" without sparse.

    torch.compile() traces plan() and run(), with fullgraph=True, too, if PyTorch was imported before the MlaDecode was
    made: they are operators then (torch_operators.py).
    """

    (MAX_HEADS, MAX_REQUESTS, MAX_QUERIES, MAX_TOKENS,  # of a capacity
     MAX_SHARDS, MAX_INTERLEAVE) = _hypermla.DECODE_LIMITS

    @raises_error
    def __init__(self, heads=128, max_requests=1, max_queries=1, max_tokens=4096, page=64, dtype="bfloat16",
                 causal=True, scale=0.0, split=0, max_query_tokens=0, lse_base2=False, empty_lse_positive=False,
                 kernel="", device="auto", workspace=None, sparse=False, cache_format="as_queries",
                 shards=1, shard=0, interleave=1, shared_prefixes=False, fp8_queries=False):
        if cache_format not in FP8_BYTES:
            raise Error(f"cache_format={cache_format!r} is not supported: choose one of {', '.join(FP8_BYTES)}")
        self._workspace = workspace
        self._heads, self._sparse = heads, sparse
        self._fp8_cache, self._fp8_queries = FP8_BYTES[cache_format] > 0, fp8_queries
        self._take(_hypermla.MlaDecode(
            _tensors.device_name(device), workspace, _tensors.dtype_name(dtype), kernel,
            integers(heads=heads, max_requests=max_requests, max_queries=max_queries, max_query_tokens=max_query_tokens,
                     max_tokens=max_tokens, page=page, split=split), scale,
            booleans(causal=causal, lse_base2=lse_base2, empty_lse_positive=empty_lse_positive, sparse=sparse,
                     shared_prefixes=shared_prefixes, fp8_queries=fp8_queries), FP8_BYTES[cache_format],
            integers(shards=shards, shard=shard, interleave=interleave)))

    @staticmethod
    @raises_error
    def most_query_tokens(heads):
        """Queries of a step, at most, that Hopper's kernels take of so many heads: their largest max_query_tokens."""
        return _hypermla.MlaDecode.most_query_tokens(heads)

    @staticmethod
    @raises_error
    def fixed_split(workspace_bytes, heads=128, max_requests=1, max_queries=1, max_tokens=4096, device="auto"):
        """The least `split` with which such a MlaDecode takes at most so many bytes, else one that cuts no request: 512
        tokens times a power of two, which installations with compiled kernels bring."""
        workspace_bytes = integer("workspace_bytes", workspace_bytes, range(2**63), "be from 0 to 2^63 - 1")
        capacity = integers(heads=heads, max_requests=max_requests, max_queries=max_queries, max_tokens=max_tokens)
        return _hypermla.MlaDecode.fixed_split(_tensors.device_name(device), *capacity, workspace_bytes)

    def plan(self, lengths, query_starts=None, stream=None, block_table=None):
        """Divides a step's work. lengths: int32 [requests], the new tokens and those of other shards included; None:
        all lists are whole, with sparse. query_starts: int32 [requests + 1], the first 0; None: max_queries of each
        request. stream: an address or an object with .cuda_stream; None: PyTorch's current stream. block_table: as
        run() gets it; with shared_prefixes or without lengths, and only then."""
        if lengths is None and block_table is None and self._sparse:
            raise Error("lengths are missing: give them, or block_table=slots for lists that are all whole")
        if _tensors.is_compiling():
            return self._operators(stream).mla_decode_plan(self.handle, self.order, lengths, query_starts,
                                                          block_table)
        self._kernels.plan(lengths, query_starts, stream, block_table)

    def run(self, q, cache, block_table, out=None, lse=None, stream=None, sinks=None,
            cache_scale=None, q_scale=None):
        """Attention of one layer; returns (out, lse).

        q: [tokens, heads, 576], or the pair [tokens, heads, 512] and [tokens, heads, 64]. cache: [pages, page, 576], or
        the pair [pages, page, 512] and [pages, page, 64]. block_table: int32 [requests, pages], whose rows may
        be read up to their stride. out: [tokens, heads, 512]; lse: float32 [tokens, heads], or [requests, max_queries,
        heads]; both are made where they are not given. `out` must have memory of its own.
        sinks: float32 [heads], attention sinks: a head's output is multiplied by exp(lse) / (exp(lse) + exp(sink)).
        cache_scale: float32 [1], for cache_format="fp8_576": what the cache's numbers are multiplied by; positive.
        q_scale: float32 [1], for fp8_queries: what the queries' numbers are multiplied by; positive.
        """
        if self._fp8_cache:
            cache = _tensors.as_bytes(cache)
            if self._fp8_queries:
                q = tuple(map(_tensors.as_bytes, q)) if isinstance(q, tuple) else _tensors.as_bytes(q)
        if out is None or lse is None:
            out, lse = self._outputs(q, out, lse, stream)
        if _tensors.is_compiling():
            self._operators(stream).mla_decode_run(self.handle, self.order, *parts(q), *parts(cache), block_table, out,
                                                   lse, sinks, cache_scale, q_scale)
        else:
            self._kernels.run(q, cache, block_table, out, lse, stream, sinks, cache_scale, q_scale)
        return out, lse

    @raises_error
    def _outputs(self, q, out, lse, stream):
        """Those that are given, else new ones."""
        dtype = "bfloat16" if self._fp8_queries else None  # None: that of q
        q = parts(q)[0]
        tokens = _tensors.shape_of("q", q)[0]
        return (_tensors.empty(q, (tokens, self._heads, LATENT), dtype, stream) if out is None else out,
                _tensors.empty(q, (tokens, self._heads), "float32", stream) if lse is None else lse)

