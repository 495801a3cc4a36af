"""Decode context parallelism: GPUs share the context of every request, over torch.distributed.

The tokens of a request are dealt to the ranks in turns. A rank attends to those in its cache with the queries of all
heads, the ranks exchange outputs and log-sum-exps, and merge_states() makes the attention of them. They exchange them
by NCCL or, --exchange=memory, each reads the other's memory over NVLink (PyTorch's symmetric memory). A request of many
tokens and a batch of requests with drafts are compared with one MlaDecode over the whole context. A difference ends the
program with status 1. On GPUs it says how long a layer takes.

    python context_parallel.py                                # NCCL and as many GPUs as ranks where there are, else CPU
    python context_parallel.py --tokens=1048576 --heads=128   # two GPUs
    python context_parallel.py --tokens=1048576 --heads=128 --exchange=memory
    python context_parallel.py --tokens=500 --requests=3 --batch_tokens=90 --heads=2 --interleave=16
"""

import argparse
import functools
import socket
import statistics
import sys

import torch
import torch.distributed as distributed
import torch.distributed._symmetric_memory as symmetric_memory
import torch.multiprocessing

import hypermla

LATENT, WIDTH, PAGE = 512, 576, 64
ROW = LATENT + 8  # of what ranks exchange: the columns of an output, then its log-sum-exp, where 8 columns are 16 bytes
TOLERANCE = 0.02  # of the largest output; of a log-sum-exp


def paged(contexts):
    """A cache [pages, PAGE, WIDTH] of the requests' tokens [tokens, WIDTH], and its block table."""
    pages = [-(-len(tokens) // PAGE) for tokens in contexts]
    cache = contexts[0].new_zeros(max(sum(pages), 1), PAGE, WIDTH)
    table = torch.zeros(len(contexts), max(*pages, 1), dtype=torch.int32)
    next_page = 0
    for row, tokens, count in zip(table, contexts, pages):
        cache[next_page:next_page + count].view(-1, WIDTH)[:len(tokens)] = tokens
        row[:count] = torch.arange(next_page, next_page + count)
        next_page += count
    return cache, table.to(cache.device)


class Gathered:
    """The ranks' rows, [tokens, heads, ROW] of each: copies, by a collective operation."""

    def __init__(self, ranks, *shape, **of):
        self.own = torch.zeros(shape, **of)
        self.all = torch.zeros(ranks, *shape, **of)

    def begin(self):
        """Where this rank writes its rows."""
        return self.own

    def end(self):
        """All ranks' rows."""
        distributed.all_gather_into_tensor(self.all.flatten(0, 1).view(torch.uint8), self.own.view(torch.uint8))
        return self.all


class InMemory:
    """The same where they were written. Two buffers in turn: when all ranks have written the second, none reads the
    first any more, so a layer has one barrier. A recording holds an even number of layers."""

    def __init__(self, ranks, *shape, **of):
        self.buffers = symmetric_memory.empty(2, *shape, **of)
        self.handle = symmetric_memory.rendezvous(self.buffers, distributed.group.WORLD)
        self.of_ranks = [[self.handle.get_buffer(rank, shape, self.buffers.dtype, turn * self.buffers[0].numel())
                          for rank in range(ranks)] for turn in range(2)]
        self.turn = 0

    def begin(self):
        self.turn = 1 - self.turn
        return self.buffers[self.turn]

    def end(self):
        self.handle.barrier()
        return self.of_ranks[self.turn]


EXCHANGES = {"nccl": Gathered, "memory": InMemory}


class Attention:
    """A step of one layer: the rank's share, or everything."""

    def __init__(self, contexts, queries, shards=1, shard=0, interleave=1, exchange=Gathered):
        """contexts: all tokens of the requests; queries: [requests, queries, heads, WIDTH]."""
        requests, each, heads, _ = queries.shape
        lengths = [len(tokens) for tokens in contexts]
        here = [tokens[torch.arange(len(tokens), device=tokens.device) // interleave % shards == shard]
                for tokens in contexts]
        self.cache, self.table = paged(here)
        self.q = queries.reshape(requests * each, heads, WIDTH)
        self.decode = hypermla.MlaDecode(heads=heads, max_requests=requests, max_queries=each, max_tokens=max(lengths),
                                         page=PAGE, dtype=queries.dtype, shards=shards, shard=shard,
                                         interleave=interleave, device=str(queries.device))
        # Both parts of a row are written where others get them from.
        self.exchange = exchange(shards, *self.q.shape[:2], ROW, dtype=queries.dtype, device=queries.device)
        self.merged = self.q.new_empty(*self.q.shape[:2], LATENT), self.q.new_empty(self.q.shape[:2],
                                                                                    dtype=torch.float32)
        self.decode.plan(torch.tensor(lengths, dtype=torch.int32, device=queries.device))  # of whole requests

    @staticmethod
    def outputs(rows):
        """(o, lse), views of [tokens, heads, ROW]"""
        return rows[..., :LATENT], rows.view(torch.float32)[..., LATENT // 2]

    def attend(self):
        o, lse = self.outputs(self.exchange.begin())
        return self.decode.run(self.q, self.cache, self.table, out=o, lse=lse)

    def attend_together(self):
        self.attend()
        first, *others = self.exchange.end()
        o, lse = self.merged
        merged = self.outputs(first)
        for rows in others:
            merged = hypermla.merge_states(*merged, *self.outputs(rows), out=o, lse=lse)
        return merged


def microseconds(call, calls=20, replays=11):
    """Of one call of a recording of many, on all GPUs at once; the median of its replays."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
        stream.synchronize()
        recording = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recording, stream=stream, capture_error_mode="thread_local"):
            for _ in range(calls):
                call()
        times = []
        for _ in range(replays):
            distributed.barrier()
            begin.record()
            recording.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def compare(contexts, queries, at, rank):
    """{figure: value} of one step: how far all ranks are from one that does everything, and times on GPUs."""
    shard = Attention(contexts, queries, at.ranks, rank, at.interleave, EXCHANGES[at.exchange])
    whole = Attention(contexts, queries)
    o, lse = shard.attend_together()
    expected, expected_lse = whole.attend()
    # Queries of drafts that are more than the tokens see none: no output, in all shards.
    seen = expected_lse.isfinite()
    same = bool((lse.isfinite() == seen).all())
    expected = expected.float()
    worst = torch.maximum((o.float() - expected).abs().max() / expected.abs().max(),
                          (lse - expected_lse)[seen].abs().max()).item()
    found = {"difference": worst if same and worst == worst else float("inf"),  # NaN is the largest, here and later
             "kernel": shard.decode.explain()}
    if queries.is_cuda:
        found |= {name: microseconds(call) for name, call in (
            ("whole_us", whole.attend), ("shard_us", shard.attend), ("together_us", shard.attend_together))}
    return found


def joined(rank, at, address):
    """The rank's device, when all ranks are there."""
    gpu = torch.cuda.device_count() >= at.ranks
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if gpu else "gloo", init_method=address, rank=rank, world_size=at.ranks)
    return device


def run_rank(rank, at, address):
    device = joined(rank, at, address)
    dice = torch.Generator(device).manual_seed(1)  # the same numbers on all ranks
    normal = functools.partial(torch.randn, generator=dice, device=device, dtype=torch.bfloat16)
    worst = 0.0
    lengths = torch.randint(1, at.batch_tokens + 1, (at.requests,), generator=torch.Generator().manual_seed(2))
    steps = {f"a request of {at.tokens} tokens": ([at.tokens], 1),
             f"{at.requests} requests of up to {at.batch_tokens} tokens, {at.drafts} drafts": (lengths, 1 + at.drafts)}
    for name, (tokens, queries) in steps.items():
        contexts = [normal(int(count), WIDTH) for count in tokens]
        found = compare(contexts, normal(len(contexts), queries, at.heads, WIDTH), at, rank)
        worst = max(worst, found["difference"])
        times = ""
        if "whole_us" in found:
            times = (f"; a layer takes {found['together_us']:.1f} us, {found['shard_us']:.1f} of them the rank's "
                     f"attention; one GPU for all takes {found['whole_us']:.1f}")
        if rank == 0:
            print(f"{name}: {at.ranks} ranks differ from one by at most {found['difference']:.4f}{times}", flush=True)
            print(f"  {found['kernel']}", flush=True)
    distributed.destroy_process_group()
    sys.exit(not worst <= TOLERANCE)


def start(function, at):
    """Calls function(rank, at, address) in a process for each rank."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"tcp://localhost:{free.getsockname()[1]}"
    torch.multiprocessing.start_processes(function, (at, address), at.ranks, start_method="spawn")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes, a GPU each")
    parser.add_argument("--heads", type=int, default=16, help="of all ranks together")
    parser.add_argument("--tokens", type=int, default=4096, help="of the long request")
    parser.add_argument("--requests", type=int, default=8, help="of the batch")
    parser.add_argument("--batch_tokens", type=int, default=512, help="of a request of the batch, at most")
    parser.add_argument("--drafts", type=int, default=3, help="of a request of the batch")
    parser.add_argument("--interleave", type=int, default=1, help="tokens of a rank's turn")
    parser.add_argument("--exchange", choices=EXCHANGES, default="nccl", help="of the ranks; memory needs GPUs")
    at = parser.parse_args()
    if at.exchange == "memory" and torch.cuda.device_count() < at.ranks:
        sys.exit(f"--exchange=memory needs {at.ranks} GPUs; leave it off, or say --ranks")
    start(run_rank, at)


if __name__ == "__main__":
    main()
