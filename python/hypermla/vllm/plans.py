"""Which MlaDecode attends a step of an engine, and when it is planned. Nothing of vLLM is here."""

from typing import NamedTuple

from hypermla.mla_decode import MlaDecode


class Capacity(NamedTuple):
    """Of steps that one MlaDecode can attend."""

    requests: int  # of a step, padding included
    queries: int  # of a request
    query_tokens: int  # queries of all requests
    tokens: int  # of a request
    split: int = 0  # tokens after which every request is cut; 0: free
    shards: int = 1  # GPUs that share the context of every request, which of them this is, and tokens of a turn
    shard: int = 0
    interleave: int = 1
    shared_prefixes: bool = False


class _Planned:
    """A MlaDecode, and the step that it was last planned for."""

    def __init__(self, decode):
        self.decode = decode
        self.step = None

    def plan(self, step):
        self.step = None  # of which nothing is true if plan() throws
        table = {"block_table": step.block_table} if step.capacity.shared_prefixes else {}
        self.decode.plan(step.seq_lens if step.capacity.shards == 1 else step.dcp_tot_seq_lens, step.query_start_loc,
                         **table)
        self.step = step


class Plans:
    """The MlaDecodes of one stream of steps, made when they are first asked for.

    A step is any object with seq_lens, query_start_loc and block_table, as MlaDecode.plan() and run() take them, its
    `capacity` and whether it is `causal`. If GPUs share its contexts, dcp_tot_seq_lens has the lengths of all of
    their tokens, and seq_lens is not read. Layers of a kind are those of one (heads, page, dtype of outputs, scale,
    cache_format, fp8_queries of MlaDecode).

    plan() divides a step's work for a kind of layers. A CUDA graph that is recorded behind it holds the layers alone:
    before each replay plan() is called, with a step of as many requests and its lengths of that time. attend() plans a
    step for which plan() was not called, or of which forget() said that its lengths have changed; if that is recorded,
    every replay plans anew.
    """

    def __init__(self, device):
        self._device = device
        self._planned = {}

    def decode(self, capacity, causal, *kind):
        """The MlaDecode for a capacity and a kind of layers."""
        return self._of(capacity, causal, *kind).decode

    def plan(self, step, *kind):
        """Divides the work of a step for a kind of layers, in the current stream."""
        self._of(step.capacity, step.causal, *kind).plan(step)

    def attend(self, step, q, cache, dtype, scale, cache_scale=None, q_scale=None):
        """Attention of one layer over a step; (o, lse) as of MlaDecode.run(), which says what q, cache and the factors
        are. dtype: of the outputs. With cache_scale the cache is in fp8_576, with q_scale queries are in FP8, too."""
        latent = q[0] if isinstance(q, tuple) else q
        planned = self._of(step.capacity, step.causal, latent.shape[1], cache.shape[1], dtype, scale,
                           "as_queries" if cache_scale is None else "fp8_576", q_scale is not None)
        if planned.step is not step:
            planned.plan(step)
        return planned.decode.run(q, cache, step.block_table, cache_scale=cache_scale, q_scale=q_scale)

    def forget(self):
        """The contents of the steps' tensors have changed: the next layer plans."""
        for planned in self._planned.values():
            planned.step = None

    def _of(self, capacity, causal, heads, page, dtype, scale, cache_format="as_queries", fp8_queries=False):
        key = capacity, causal, heads, page, dtype, scale, cache_format, fp8_queries
        planned = self._planned.get(key)
        if planned is None:
            planned = self._planned[key] = _Planned(MlaDecode(
                heads=heads, max_requests=capacity.requests, max_queries=capacity.queries,
                max_query_tokens=capacity.query_tokens, max_tokens=capacity.tokens, page=page, dtype=dtype,
                causal=causal, scale=scale, split=capacity.split, shards=capacity.shards, shard=capacity.shard,
                interleave=capacity.interleave, shared_prefixes=capacity.shared_prefixes,
                cache_format=cache_format, fp8_queries=fp8_queries, device=self._device))
        return planned
