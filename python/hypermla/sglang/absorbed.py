"""Prefill in the absorbed form by MlaDecode: of few new tokens behind long prefixes, and of what runs between SGLang's
graphs of prefill, whatever its lengths.

A step is planned when its first layer comes, because no earlier call says which form its layers have.
"""

import functools
import itertools
import weakref

import torch

from hypermla.mla_decode import MlaDecode
from hypermla.sglang.prefill import OncePerStep

# New tokens of a step, at most. Its list of work takes 12 KB for each of 128 heads, and SGLang's chunks have as many.
TOKENS = 8192

# Queries of what counts as a request there. All of these attend to as many tokens as the last one sees, so a request of
# more is several, which end one after the other.
PIECE = 64

# Entries of a step's table of pages, 64 MiB, which SGLang's budget of memory does not know. Few pages of 1 token and
# long prefixes have more.
ENTRIES = 1 << 24


class _Attention:
    """A MlaDecode, and the step that it was planned for last. Backends share it as they do MlaPrefill (prefill.py)."""

    def __init__(self, heads, requests, tokens, page, dtype, cache_format, scale, device):
        self.requests = min(requests + TOKENS // PIECE, MlaDecode.MAX_REQUESTS)
        self.queries = min(TOKENS, self.requests * PIECE, MlaDecode.most_query_tokens(heads))
        self.decode = MlaDecode(heads=heads, max_requests=self.requests, max_queries=PIECE,
                                max_query_tokens=self.queries, max_tokens=tokens, page=page, dtype=dtype,
                                cache_format=cache_format, scale=scale, device=device)
        self.tokens, self.page = tokens, page
        self.planned = lambda: None

    def plan(self, step):
        if self.planned() is not step:
            self.decode.plan(step.lengths, step.query_starts)
            self.planned = weakref.ref(step)


_attention = functools.cache(_Attention)


class _Step:
    """Of a batch, what all layers share."""

    def __init__(self, batch):
        new, prefixes = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
        self.pieces = None  # of each: its request, how many tokens it sees, its queries
        if new is None or prefixes is None:
            return
        self.pieces = [(request, prefix + min(begin + PIECE, own), min(PIECE, own - begin))
                       for request, (own, prefix) in enumerate(zip(new, prefixes)) for begin in range(0, own, PIECE)]
        self.queries = sum(new)
        self.longest = max((seen for _, seen, _ in self.pieces), default=0)
        self.table = None

    def prepare(self, batch, fill):
        """Tensors on the device, by one copy. fill: fills the table of pages of requests, of these lengths."""
        if self.table is None:
            requests, seen, queries = zip(*self.pieces)
            device = batch.req_pool_indices.device
            numbers = torch.tensor([*requests, *seen, *itertools.accumulate(queries, initial=0)], dtype=torch.int32,
                                   pin_memory=device.type == "cuda")  # else the host waits for all that is queued
            requests, seen, self.query_starts = numbers.to(device, non_blocking=True).split(
                (len(requests), len(requests), len(requests) + 1))
            # In 0.5.17 the host's prefix of a request that decodes beside prefills may be one too long.
            self.lengths = torch.minimum(seen, batch.seq_lens[requests].to(torch.int32))
            self.table = fill(batch.req_pool_indices[requests], self.lengths, self.longest)


class Absorbed(OncePerStep):
    """Of one backend. requests, tokens: at once, and of one of them, at most. scale: of the scores, as the model's
    configuration has it; its kernel is loaded now, not when the first request waits for it."""

    def __init__(self, heads, requests, tokens, page, dtype, cache_format, scale, device):
        super().__init__(_Step)
        self._capacity = heads, requests, tokens, page, dtype, cache_format
        self._device = device
        self._any = self._attention(scale)

    def explain(self):
        return self._any.decode.explain()

    def _attention(self, scale):
        return _attention(*self._capacity, scale, self._device)

    def takes(self, batch, rows=None):
        """Whether a step's attention in the absorbed form is planned here. rows: of a layer's queries."""
        step = self._step_of(batch)
        return ((batch.forward_mode.is_extend_without_speculative() and not batch.forward_mode.is_dllm_extend())
                and bool(step.pieces) and len(step.pieces) <= self._any.requests
                and step.queries <= self._any.queries and step.longest <= self._any.tokens
                and len(step.pieces) * -(-step.longest // self._any.page) <= ENTRIES
                and (rows is None or rows >= step.queries))

    def planned(self, batch, scale, fill):
        """A MlaDecode with the plan of a step that is taken, the table of pages, and how many queries are planned."""
        step, attention = self._step_of(batch), self._attention(scale)
        step.prepare(batch, fill)
        attention.plan(step)
        return attention.decode, step.table, step.queries
