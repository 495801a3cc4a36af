"""The hybrid: of the prefix that most requests of a step share, keys and values are decompressed once and attended for
all of their queries at once, and MlaDecode attends to what lies behind it (docs/shared-prefixes.md). Nothing of vLLM is
here.
"""

import numpy
import torch

from hypermla.mla_decode import LATENT, ROPE
from hypermla.mla_prefill import NOPE, VALUE, MlaPrefill

LEAST_TOKENS = 1024  # for which there must be room
STEPS = 16  # from one look at what requests share to the next
BETTER = 1.25  # by so much more time saved another prefix takes the place of one that is still shared
LENGTHS = 16  # of prefixes that a look compares, at most twice as many
FILLED_AT_ONCE = 1024  # tokens


def bytes_of_token(heads):
    """Of a layer, in 16 bits."""
    return 2 * (heads * (NOPE + VALUE) + ROPE)


def saved_us(heads, queries, tokens):
    """By a prefix of so many tokens that so many queries share, in a layer on an H200. MlaDecode takes 0.9 to 1.4 us
    for 64 tokens and a tile of rows on each of 132 multiprocessors (docs/log/engine.md); the hybrid reads keys and
    values at 4 TB/s or multiplies at 550 TFLOP/s, and has some launches more."""
    decoded = queries * tokens * (0.9 if heads <= 16 else 1.4 * -(-heads // 64)) / (64 * 132)
    read, multiplied = tokens * bytes_of_token(heads) / 4e6, queries * tokens * heads * 640 / 550e6
    return decoded - max(read, multiplied) - 8


class Decompressed:
    """A layer's room for the keys and values of a prefix."""

    def __init__(self, tokens, heads, dtype, device):
        self.both = torch.empty(tokens, heads, NOPE + VALUE, dtype=dtype, device=device)
        self.rope = torch.empty(tokens, 1, ROPE, dtype=dtype, device=device)
        self.shared = None  # the SharedPrefix whose it is

    @property
    def tokens(self):
        return len(self.both)

    def fill(self, cache, pages, project):
        """With the tokens of these pages of a cache [pages, page, 576]. project: a function of latents [tokens, 512] to
        keys without RoPE and values, [tokens, heads * 256]."""
        each = max(FILLED_AT_ONCE // cache.shape[1], 1)
        for begin in range(0, len(pages), each):
            rows = cache[pages[begin:begin + each]].flatten(0, 1)
            at = slice(begin * cache.shape[1], begin * cache.shape[1] + len(rows))
            self.both[at] = project(rows[:, :LATENT]).view(len(rows), *self.both.shape[1:])
            self.rope[at, 0] = rows[:, LATENT:]


class SharedPrefix:
    """The prefix of a stream of steps. plan() takes a step's requests and returns what MlaDecode is to attend to;
    attend() adds the prefix to a layer's outputs.

    Which prefix it is follows from block tables that were copied to the host some steps before, so that nothing waits.
    Whether a request still has it is seen on the device in each step, by the pages at the begin of its block table. A
    page that some request keeps from step to step is not written again. One that nobody kept may be, and another
    request, which has it from vLLM's prefix cache, may decode in the step that writes it. So keys and values are right
    as long as each step has a request that shares them and none that has the pages and not yet their tokens; from the
    first other step on they are not used any more.
    """

    def __init__(self, heads, requests, query_tokens, width, page, dtype, scale, tokens, device):
        """tokens: for which each layer's Decompressed has room; width: pages of a block table, at most."""
        self._heads, self._page = heads, page
        most = min(tokens // page, width)  # pages
        zeros = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=device)
        # A step as it was given, how many requests that are none lie behind it, and what is left for MlaDecode.
        self._given = zeros(requests, width), zeros(requests), zeros(requests + 1)
        self._table, self._lengths, self._before = zeros(requests, width), zeros(requests), 0
        self._decodes, self._host_decodes = zeros(), 0  # of the requests that were given: the first ones
        # Two groups of queries, of which the second has the prefix.
        self._query_starts, self._token_starts = zeros(3), zeros(3)
        # The prefix's pages, how many there are, and whether keys and values are theirs.
        self._pages, self._count, self._holds = zeros(most), zeros(), zeros()
        self._numbers, self._columns = torch.arange(requests, device=device), torch.arange(width, device=device)
        self._host_pages, self._steps, self._copies = None, 0, None  # None: there is no prefix
        self._on_gpu = self._lengths.is_cuda
        self._prefill = MlaPrefill(heads=heads, max_requests=2, max_query_tokens=query_tokens, max_tokens=most * page,
                                   dtype=dtype, causal=False, scale=scale, accumulate=True,
                                   device=str(self._lengths.device) if self._on_gpu else "cpu")
        self._divide()
        self._divides = None
        if self._on_gpu:  # one launch, where the host would need longer for all of them than a layer takes
            self._divides = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._divides, capture_error_mode="thread_local"):
                self._divide()

    def _divide(self):
        """Plans the prefix for the step that was given, and leaves the rest to MlaDecode."""
        (table, lengths, starts), at, tokens = self._given, self._numbers, self._count * self._page
        others = self._columns[:len(self._pages)] >= self._count
        has = ((table[:, :len(self._pages)] == self._pages) | others).all(1) & (lengths > 0)
        computed = lengths - starts.diff() >= tokens
        shares = has & computed & (at < self._decodes)
        self._holds.logical_and_(~(has & ~computed).any())  # some request writes the pages
        # Neighbours alone are one group: the longest run of them.
        run, end = (at - torch.where(shares, -1, at).cummax(0).values).max(0)
        self._holds.logical_and_(run > 0)
        run = run * self._holds
        begin = end + 1 - run
        inside = (at >= begin) & (at < begin + run)
        self._lengths.copy_(lengths - inside * tokens)
        columns = self._columns + (inside * self._count)[:, None]
        torch.gather(table, 1, columns.clamp_(max=len(self._columns) - 1), out=self._table)
        self._query_starts[1:] = starts[torch.stack((begin, begin + run))]
        self._token_starts[2:] = tokens
        self._prefill.plan(self._query_starts, self._token_starts)

    def drop(self):
        """For a step that plan() is not called for, and that so has no request that shares the prefix."""
        self._steps = 0  # who comes next may share another
        if self._host_pages is not None:
            self._host_pages = None
            self._holds.zero_()
            self._given[2].zero_()  # a later step may have fewer queries
            self._replay()  # nothing is added any more

    def _replay(self):
        self._divides.replay() if self._divides else self._divide()

    def plan(self, block_table, lengths, query_starts, decodes, fill):
        """Of a step: int32 [requests, pages], [requests] and [requests + 1]; the first requests are decodes. Returns a
        block table and lengths of these without the prefix, in memory that does not change. fill: a function that is
        called with the pages of a new prefix."""
        block_table = block_table[:, :self._table.shape[1]]
        self._look(block_table[:decodes], lengths[:decodes], query_starts[:decodes + 1], fill)
        requests, width = block_table.shape
        own_table, own = self._table[:decodes, :width], self._lengths[:decodes]
        if self._host_pages is None:
            own_table.copy_(block_table[:decodes])
            own.copy_(lengths[:decodes])
            return own_table, own
        given_table, given, starts = self._given
        given_table[:requests, :width].copy_(block_table)
        given[:requests].copy_(lengths)
        starts[:requests + 1].copy_(query_starts)
        if requests < self._before:
            given[requests:self._before].zero_()
        self._before = requests
        if decodes != self._host_decodes:
            self._decodes.fill_(decodes)
            self._host_decodes = decodes
        self._replay()
        return own_table, own

    def attend(self, layer, q, out, lse):
        """Adds the prefix of a layer, a Decompressed, to what the requests' other tokens gave: out [queries, heads,
        128] behind the value projection and lse [queries, heads] in the natural logarithm. q: [queries, heads, 192]."""
        keys = layer.both[..., :NOPE], layer.rope.expand(-1, layer.both.shape[1], -1)
        self._prefill.run((q[..., :NOPE], q[..., NOPE:]), keys, layer.both[..., NOPE:], out=out, lse=lse)

    # --- which prefix ---

    def _look(self, block_table, lengths, query_starts, fill):
        if self._copies is not None and self._arrived():
            found = self._best(*(copy.numpy() for copy in self._copies[:4]))
            self._copies = None
            if found is not None:
                self._host_pages, pages = found, self._pages[:len(found)]
                pages.copy_(torch.from_numpy(found))
                fill(pages)
                self._count.fill_(len(found))
                self._holds.fill_(1)
        looks = self._copies is None and self._steps % STEPS == 0
        self._steps += 1
        if looks and len(lengths) > 1:
            of_step = block_table[:, :len(self._pages)], lengths, query_starts, self._holds
            self._copies = [torch.empty(one.shape, dtype=one.dtype, device="cpu", pin_memory=self._on_gpu)
                            for one in of_step]
            for copy, one in zip(self._copies, of_step):
                copy.copy_(one, non_blocking=True)
            if self._on_gpu:
                event = torch.cuda.Event()
                event.record()
                self._copies.append(event)

    def _arrived(self):
        return not self._on_gpu or self._copies[-1].query()

    def _best(self, table, lengths, query_starts, holds):
        """Of a step's copies: the pages of the prefix that pays most, if it pays and is not the one that is there."""
        queries = query_starts[1:] - query_starts[:-1]
        whole = ((lengths - queries) // self._page).clip(0, table.shape[1])  # pages before the queries
        # The first pages that a request shares with the one before it.
        differ = table[1:] != table[:-1]
        alike = numpy.where(differ.any(1), differ.argmax(1), table.shape[1])
        alike = alike.clip(max=whole[1:]).clip(max=whole[:-1])
        best, pages, counts = 0, None, numpy.unique(alike[alike > 0])
        for count in counts[::-max(len(counts) // LENGTHS, 1)].tolist():
            shares = numpy.diff(alike >= count, prepend=False, append=False).nonzero()[0]
            for begin, end in shares.reshape(-1, 2):  # requests, the last one included
                saved = saved_us(self._heads, int(query_starts[end + 1] - query_starts[begin]), count * self._page)
                if saved > best:
                    best, pages = saved, table[begin, :count]
        if self._host_pages is not None:
            count = len(self._host_pages)
            has = (table[:, :count] == self._host_pages).all(1) & (whole >= count)
            saved = saved_us(self._heads, int(queries[has].sum()), count * self._page)
            if not holds or saved <= 0:
                self.drop()
            elif best <= BETTER * saved:
                return None
        return None if pages is None else pages.copy()
