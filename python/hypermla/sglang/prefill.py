"""Prefill over decompressed keys and values by MlaPrefill, as the MHA path of SGLang's DeepSeek models asks for it: of
new tokens, of these behind a prefix that is decompressed with them, and of chunks of a prefix, which SGLang merges by
their natural log-sum-exps.

A step is planned when its first layer comes, because no earlier call says which of the three it is, or whether it is
none of them.
"""

import functools
import logging
import weakref

import torch

from hypermla.mla_decode import ROPE
from hypermla.mla_prefill import NOPE, VALUE, MlaPrefill

_log = logging.getLogger(__name__)

# From so many pairs for each token of a prefix on, some new tokens, attention over decompressed tokens saves more than
# decompressing the prefix costs: both grow with its length. On an H200 they were even at 258 to 292 with 128 heads and
# at 297 to 334 with 16, by lines through 128 and 512 new tokens: 2048 and 8192 tokens of prefix, 1 and 8 requests
# (results/nvidia-h200/sglang_prompts.json).
NEW = 280


def pays(new, prefixes):
    """Whether decompressing the prefixes of a batch takes less time than the absorbed form of its attention: its pairs
    of queries and tokens decide, of which causality takes half among the new tokens."""
    return sum(more * (prefix + more / 2) for more, prefix in zip(new, prefixes)) >= NEW * sum(prefixes)


# Heads times new tokens of a step from which on its attention over decompressed tokens saves more than the host's time
# that a graph in the absorbed form saves: with graphs whole steps took a third at 2^17, 1.0 to 1.5 of those without at
# 2^18 and 2^19, with a slow host (results/nvidia-h200/sglang_prompts_chosen.json).
LARGE = 1 << 18


def beats_graphs(heads, new, prefixes):
    """Whether a step that SGLang may replay in the absorbed form is better off without its graph."""
    return heads * sum(new) >= LARGE and pays(new, prefixes)


class _Attention:
    """A MlaPrefill, and what it was planned for last. Layers of several backends (of the drafter, of the two batches
    that SGLang overlaps) follow each other on one stream, so that one workspace is enough for them: who finds another's
    plan makes his own again, in a few microseconds."""

    def __init__(self, heads, dtype, scale, device, causal):
        self.prefill = MlaPrefill(heads=heads, max_requests=MlaPrefill.MAX_REQUESTS,
                                  max_query_tokens=MlaPrefill.MAX_QUERY_TOKENS, max_tokens=MlaPrefill.MAX_TOKENS,
                                  dtype=dtype, scale=scale, device=device, causal=causal)
        self.planned = None

    def plan(self, step, which, batch):
        if self.planned != (step, which):
            self.prefill.plan(step.query_starts, step.token_starts(which, batch))
            self.planned = step, which


_attention = functools.cache(_Attention)


@functools.cache
def say(text):
    """Once a process, however many backends there are."""
    _log.info(text)


def _starts(lengths):
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=starts[1:])
    return starts


class OncePerStep:
    """A part of a backend that derives something from a batch once a step, for all layers: make(batch), which must keep
    nothing alive that belongs to the batch."""

    def __init__(self, make):
        self._make = make
        self.begin()

    def begin(self):
        """A step begins, maybe of a batch that was there before, with other contents."""
        self._batch, self._step = None, None

    def _step_of(self, batch):
        if self._batch is None or self._batch() is not batch:
            self._batch, self._step = weakref.ref(batch), self._make(batch)
        return self._step


class _Step:
    """Of a batch, what all of its plans share."""

    def __init__(self, batch):
        new, prefixes = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
        self.fits = False
        if new is None or prefixes is None or len(batch.extend_seq_lens) > MlaPrefill.MAX_REQUESTS:
            return
        self.queries, self.tokens = sum(new), sum(new) + sum(prefixes)
        most = max((one + before for one, before in zip(new, prefixes)), default=0)
        self.fits = self.queries <= MlaPrefill.MAX_QUERY_TOKENS and most <= MlaPrefill.MAX_TOKENS
        self.query_starts = _starts(batch.extend_seq_lens)

    def token_starts(self, which, batch):
        if which == "new":
            return self.query_starts
        if which == "whole":
            return _starts(batch.seq_lens[:len(batch.extend_seq_lens)])
        return batch.prefix_chunk_cu_seq_lens[which]

    def tokens_of(self, which, batch):
        """At least so many keys and values there are."""
        if which == "new":
            return self.queries
        return self.tokens if which == "whole" else batch.prefix_chunk_num_tokens[which]


def _which(batch):
    """Whose keys and values a layer hands over: of "new" tokens, of "whole" requests, or of the chunk of that number of
    their prefixes."""
    if batch.attn_attend_prefix_cache:
        return batch.prefix_chunk_idx
    return "whole" if batch.mha_one_shot else "new"


class Prefill(OncePerStep):
    """Of one backend. scale: of the scores, as the model's configuration has it. chunks: whether prefixes may come in
    chunks. Their kernels are loaded now, not when the first request waits for them."""

    def __init__(self, heads, dtype, scale, device, chunks):
        super().__init__(_Step)
        self._heads, self._dtype, self._device, self._chunks = heads, dtype, device, chunks
        for causal in (True, False)[:1 + chunks]:
            explained = self._attention(scale, causal).prefill.explain()
            say(f"HyperMLA prefills over decompressed keys and values: {explained}")

    def _attention(self, scale, causal):
        return _attention(self._heads, self._dtype, scale, self._device, causal)

    def takes(self, q, k, layer, batch):
        """Whether run() does this call."""
        if (k is None or (layer.head_dim, layer.v_head_dim) != (NOPE + ROPE, VALUE) or layer.logit_cap
                or {layer.tp_q_head_num, layer.tp_k_head_num} != {self._heads} or q.dtype != self._dtype):
            return False
        which, step = _which(batch), self._step_of(batch)
        return (step.fits and (self._chunks or not batch.attn_attend_prefix_cache)
                and len(q) >= step.queries and len(k) >= step.tokens_of(which, batch))

    def run(self, q, k, v, layer, batch):
        """The attention of a layer: [tokens, heads, 128]; with float32 [tokens, heads] where SGLang merges it."""
        which, step = _which(batch), self._step_of(batch)
        attention = self._attention(layer.scaling, causal=not batch.attn_attend_prefix_cache)
        attention.plan(step, which, batch)
        q = q.view(-1, self._heads, NOPE + ROPE)
        k, v = k.view(-1, self._heads, NOPE + ROPE).to(q.dtype), v.view(-1, self._heads, VALUE).to(q.dtype)
        out = q.new_empty((len(q), self._heads, VALUE))
        lse = q.new_empty((len(q), self._heads), dtype=torch.float32)
        attention.prefill.run(q, k, v, out=out, lse=lse)
        if len(q) > step.queries:  # what pads a batch; later layers compute with it
            out[step.queries:] = 0
            lse[step.queries:] = 0
        return (out, lse) if batch.mha_return_lse else out
