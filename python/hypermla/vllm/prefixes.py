"""The hybrid: of prefixes that many requests of a step share, keys and values are decompressed once and attended for
all of their queries at once, and MlaDecode attends to what lies behind them (docs/prefix-cache.md). Nothing of vLLM is
here.
"""

import bisect
from dataclasses import dataclass

import numpy
import torch

from hypermla.mla_cache import MAX_PREFIXES, split_prefixes
from hypermla.mla_decode import LATENT, ROPE
from hypermla.mla_prefill import NOPE, VALUE, MlaPrefill

LEAST_TOKENS = 1024  # for which there must be room
STEPS = 16  # from one look at what requests share to the next
QUIET = 8  # times as many, where a look found nothing new, and since then no request began or ended
BETTER = 1.25  # by so much more time saved another prefix takes the place of those that are still shared
LENGTHS = 16  # of prefixes that a look compares, at most twice as many
PAID_AFTER = 100  # steps that save what it takes to fill the room of a prefix, which else is not worth it
FILL_US = 5.2e-4  # of a token and head: 2^17 products at 500 TFLOP/s
FILLED_AT_ONCE = 1024  # tokens


def bytes_of_token(heads):
    """Of a layer, in 16 bits."""
    return 2 * (heads * (NOPE + VALUE) + ROPE)


def saved_us(heads, queries, tokens, fp8):
    """By a prefix of so many tokens that so many queries share, in a layer on an H200. MlaDecode takes 0.9 to 1.4 us
    for 64 tokens and a tile of rows on each of 132 multiprocessors, over a cache in FP8 1.1 (docs/log/engine.md); the
    hybrid reads keys and values at 4 TB/s or multiplies at 550 TFLOP/s, and has some launches more."""
    of_tile = 1.1 if fp8 else 0.9 if heads <= 16 else 1.4
    decoded = queries * tokens * of_tile * -(-heads // 64) / (64 * 132)
    read, multiplied = tokens * bytes_of_token(heads) / 4e6, queries * tokens * heads * 640 / 550e6
    return decoded - max(read, multiplied) - 8


class Decompressed:
    """A layer's room for keys and values of prefixes."""

    def __init__(self, tokens, heads, dtype, device):
        self.both = torch.empty(tokens, heads, NOPE + VALUE, dtype=dtype, device=device)
        self.rope = torch.empty(tokens, 1, ROPE, dtype=dtype, device=device)
        self.shared = None  # the SharedPrefixes whose it is

    @property
    def tokens(self):
        return len(self.both)

    def fill(self, cache, pages, first_token, project, factor=None):
        """From first_token on, with the tokens of these pages of a cache [pages, page, 576]. project: a function of
        latents [tokens, 512] to keys without RoPE and values, [tokens, heads * 256]. factor: of a cache in e4m3."""
        each = max(FILLED_AT_ONCE // cache.shape[1], 1)
        for begin in range(0, len(pages), each):
            rows = cache[pages[begin:begin + each]].flatten(0, 1)
            if factor is not None:
                rows = (rows.view(torch.float8_e4m3fn).float() * factor).to(self.both.dtype)
            at = slice(first_token, first_token + len(rows))
            first_token += len(rows)
            self.both[at] = project(rows[:, :LATENT]).view(len(rows), *self.both.shape[1:])
            self.rope[at, 0] = rows[:, LATENT:]


@dataclass
class Kept:
    """A prefix, as the host knows it."""

    pages: numpy.ndarray
    first_token: int
    used: int  # at which step it saved time last
    queries: int = 0  # that share it, by the last look, and the us of a layer which that saves
    saved: float = 0.0


class SharedPrefixes:
    """The prefixes of a stream of steps. plan() takes a step's requests and returns what MlaDecode is to attend to;
    attend() adds the prefixes to a layer's outputs.

    Which prefixes are kept follows from block tables that were copied to the host some steps before, so that nothing
    waits. Whether a request has one of them is seen on the device in each step, by split_prefixes(). Keys and values
    are right until a step writes to the prefix's pages, which the device sees, too; so every step must come by. A
    prefix that nobody has any more stays until another wants its room: what was used least recently goes first.
    """

    def __init__(self, heads, requests, query_tokens, width, page, dtype, scale, tokens, device, fp8=False):
        """query_tokens: of a step that shares prefixes, at most. width: pages of a block table, at most. tokens: for
        which each layer's Decompressed has room. fp8: whether the cache is in FP8."""
        self._heads, self._page, self._room, self._fp8 = heads, page, tokens // page, fp8
        self._most_queries = query_tokens
        most = min(self._room, width)  # pages of a prefix
        zeros = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=device)
        self._kept = {}  # by number: Kept
        # Of each its pages, first token, least queries, and whether it is valid.
        self._prefixes, self._pages = zeros(MAX_PREFIXES, 4), zeros(MAX_PREFIXES, most)
        self._owners = zeros(1)  # of each page of the cache
        self._found, self._table, self._lengths = zeros(requests), zeros(requests, width), zeros(requests)
        self._starts, self._rows = zeros(2, 2 * MAX_PREFIXES), zeros(query_tokens)
        self._of_prefixes = self._starts.unbind()
        self._returned, self._views = None, None  # of how many requests and pages
        self._without = self._prefixes[:0], self._pages[:0], self._starts[:, :0]
        self._copies, self._steps, self._planned = None, 0, False
        self._looked, self._decodes, self._quiet = -STEPS, 0, False  # at which step, for how many, and what it brought
        self._on_gpu = self._lengths.is_cuda
        self._prefill = MlaPrefill(heads=heads, max_requests=2 * MAX_PREFIXES - 1, max_query_tokens=query_tokens,
                                   max_tokens=most * page, dtype=dtype, causal=False, scale=scale, accumulate=True,
                                   query_rows=True, device=str(self._lengths.device) if self._on_gpu else "cpu")
        self._plan_prefill()

    def _plan_prefill(self):
        self._prefill.plan(*self._of_prefixes, query_rows=self._rows)

    def drop(self):
        """Forgets all prefixes, as for new weights."""
        self._kept, self._copies, self._looked, self._quiet = {}, None, self._steps - STEPS, False
        self._prefixes.zero_()
        self._owners.zero_()

    def plan(self, block_table, lengths, query_starts, slots, decodes, fill, fits=True):
        """Of a step: int32 [requests, pages], [requests] and [requests + 1], and the int64 slots of the cache that it
        writes; the first requests are decodes. Returns a block table and lengths of these without what is shared, in
        memory that does not change. fill: a function that is called with the pages of a new prefix and its first token,
        and returns how many pages the cache has. fits: whether the decodes have no more than query_tokens queries; else
        they share nothing."""
        self._look(block_table, lengths, query_starts, decodes, fill)

        def split(requests, prefixes, pages, starts):
            split_prefixes(block_table, lengths, query_starts, slots, prefixes, pages, self._owners, self._found,
                           self._table, self._lengths, starts, self._rows, requests, self._page)

        if self._kept:
            split(decodes if fits else 0, self._prefixes, self._pages, self._starts)
        if not (self._kept and fits):
            split(decodes, *self._without)
        if self._kept or self._planned:
            if not self._kept:
                self._starts.zero_()
            self._plan_prefill()
            self._planned = bool(self._kept)
        wanted = decodes, min(block_table.shape[1], self._table.shape[1])
        if wanted != self._returned:
            self._returned, self._views = wanted, (self._table[:decodes, :wanted[1]], self._lengths[:decodes])
        return self._views

    def attend(self, layer, q, out, lse):
        """Adds the prefixes of a layer, a Decompressed, to what the requests' other tokens gave: out [queries, heads,
        128] behind the value projection and lse [queries, heads] in the natural logarithm. q: [queries, heads, 192]."""
        keys = layer.both[..., :NOPE], layer.rope.expand(-1, layer.both.shape[1], -1)
        self._prefill.run((q[..., :NOPE], q[..., NOPE:]), keys, layer.both[..., NOPE:], out=out, lse=lse)

    # --- which prefixes ---

    def _look(self, block_table, lengths, query_starts, decodes, fill):
        if self._copies is not None and self._arrived():
            found = self._choose(*(copy.numpy() for copy in self._copies[:4]))
            self._copies = None
            if found is not None:
                self._keep(*found, fill)
                self._quiet = False
        changes = decodes != self._decodes or len(lengths) > decodes  # which start to decode soon
        self._decodes, self._quiet = decodes, self._quiet and not changes
        due = self._steps >= self._looked + STEPS * (QUIET if self._quiet else 1)
        if self._copies is None and due and decodes > 1:
            self._looked, self._quiet = self._steps, not changes  # unless something is found
            of_step = (block_table[:decodes, :self._pages.shape[1]], lengths[:decodes], query_starts[:decodes + 1],
                       self._prefixes)
            self._copies = [torch.empty(one.shape, dtype=one.dtype, device="cpu", pin_memory=self._on_gpu)
                            for one in of_step]
            for copy, one in zip(self._copies, of_step):
                copy.copy_(one, non_blocking=True)
            if self._on_gpu:
                event = torch.cuda.Event()
                event.record()
                self._copies.append(event)
        self._steps += 1

    def _arrived(self):
        return not self._on_gpu or self._copies[-1].query()

    def _keep(self, pages, first_token, fill):
        number = next(i for i in range(MAX_PREFIXES) if i not in self._kept)
        on_device = self._pages[number, :len(pages)]
        on_device.copy_(torch.from_numpy(pages))
        cache_pages = fill(on_device, first_token)
        if len(self._owners) != cache_pages:
            self._owners = torch.zeros(cache_pages, dtype=torch.int32, device=self._pages.device)
        self._owners[on_device] |= 1 << number
        of_prefix = [len(pages), first_token, self._least_queries(len(pages)), 1]
        self._prefixes[number].copy_(torch.tensor(of_prefix, dtype=torch.int32))
        self._kept[number] = Kept(pages, first_token, self._steps)

    def _leave(self, number):
        del self._kept[number]
        self._prefixes[number].zero_()
        self._owners &= ~(1 << number)

    def _choose(self, table, lengths, query_starts, prefixes):
        """Of a step's copies: the pages of the prefix that saves most beside those that are kept, and its first token,
        if it saves any time and there is room. What is not valid or stands in its way is not kept any more."""
        for number in [number for number in self._kept if not prefixes[number, 3]]:
            self._leave(number)
        queries = query_starts[1:] - query_starts[:-1]
        whole = ((lengths - queries) // self._page).clip(0, table.shape[1])  # pages before the queries
        served, kept_pages = self._serve(table, whole, queries)
        # Neighbours in this order begin alike, and a request shares its first pages with the one before it.
        order = numpy.array(sorted(range(len(table)), key=[row.tobytes() for row in table].__getitem__))
        table, whole, queries, served, kept_pages = (of[order] for of in (table, whole, queries, served, kept_pages))
        differ = table[1:] != table[:-1]
        alike = numpy.where(differ.any(1), differ.argmax(1), table.shape[1])
        alike = alike.clip(max=whole[1:]).clip(max=whole[:-1])
        before = numpy.concatenate(([0], queries.cumsum()))
        all_saved = sum(one.saved for one in self._kept.values())
        best, chosen, counts = 0, None, numpy.unique(alike[alike > 0])
        for count in counts[::-max(len(counts) // LENGTHS, 1)].tolist():
            shares = numpy.diff(alike >= count, prepend=False, append=False).nonzero()[0]
            shares = shares.reshape(-1, 2)  # requests, the last one included
            enough = before[shares[:, 1] + 1] - before[shares[:, 0]] >= self._least_queries(count)
            for begin, end in shares[enough]:
                more = kept_pages[begin:end + 1] < count  # who shares a longer one already
                own, those = queries[begin:end + 1][more], served[begin:end + 1][more]
                # Of each kept prefix, what it goes on saving if these share the new one instead.
                left = {number: self._saved(len(one.pages), one.queries - own[those == number].sum())
                        for number, one in self._kept.items()}
                saved = self._saved(count, own.sum()) + sum(left.values()) - all_saved
                if saved > max(best, self._heads * count * self._page * FILL_US / PAID_AFTER):
                    best, chosen = saved, (table[begin, :count].copy(), left)
        if chosen is None:
            return None
        pages, left = chosen
        first_page = self._make_room(len(pages), best, left)
        return None if first_page is None else (pages, first_page * self._page)

    def _least_queries(self, pages):
        """That have to share a prefix of so many pages, so that it saves time."""
        tokens = pages * self._page
        return 1 + bisect.bisect_left(range(1, self._most_queries + 1), True,
                                      key=lambda queries: saved_us(self._heads, queries, tokens, self._fp8) > 0)

    def _saved(self, pages, queries):
        """By a prefix of so many pages that so many queries share, which is attended to only where that saves time."""
        return max(saved_us(self._heads, int(queries), pages * self._page, self._fp8), 0)

    def _serve(self, table, whole, queries):
        """Which kept prefix each request shares, -1: none, and how many pages that has. Notes who shares them, and what
        that saves."""
        served, kept_pages = numpy.full(len(table), -1), numpy.zeros(len(table), dtype=int)
        for number, one in sorted(self._kept.items(), key=lambda item: len(item[1].pages)):
            has = (table[:, :len(one.pages)] == one.pages).all(1) & (whole >= len(one.pages))
            served[has], kept_pages[has] = number, len(one.pages)
        for number, one in self._kept.items():
            one.queries = queries[served == number].sum()
            one.saved = self._saved(len(one.pages), one.queries)
            if one.saved > 0:
                one.used = self._steps
        return served, kept_pages

    def _make_room(self, count, saved, left):
        """The first of so many free pages for a prefix that saves so much. What was used least recently makes room, if
        what it would go on saving is less. None: there is no room."""
        oldest = sorted(self._kept, key=lambda number: (self._kept[number].used, left[number]))
        for going in range(len(oldest) + 1):
            stays = [self._kept[number] for number in oldest[going:]]
            if going and BETTER * sum(left[number] for number in oldest[:going]) >= saved:
                return None
            taken = sorted((one.first_token // self._page, len(one.pages)) for one in stays)
            begins = [0, *(first + pages for first, pages in taken)]
            ends = [*(first for first, _ in taken), self._room]
            free = [begin for begin, end in zip(begins, ends) if end - begin >= count]
            if free and len(stays) < MAX_PREFIXES:
                for number in oldest[:going]:
                    self._leave(number)
                return free[0]
        return None
