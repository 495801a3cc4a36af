"""Decode context parallelism: GPUs share the context of every request, over torch.distributed.

The tokens of a request are dealt to the ranks in turns. A rank attends to those in its cache with the queries of all
heads, the ranks exchange outputs and log-sum-exps, and merge_states() makes the attention of them. A request of many
tokens and a batch of requests with drafts are compared with one MlaDecode over the whole context. A difference ends the
program with status 1. On GPUs it says how long a layer takes.

    python context_parallel.py                                # NCCL and as many GPUs as ranks where there are, else CPU
    python context_parallel.py --tokens=1048576 --heads=128   # two GPUs
    python context_parallel.py --tokens=500 --requests=3 --batch_tokens=90 --heads=2 --interleave=16
"""

import argparse
import functools
import os
import socket
import sys

import torch
import torch.distributed as distributed
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


class Attention:
    """A step of one layer: the rank's share, or everything."""

    def __init__(self, contexts, queries, shards=1, shard=0, interleave=1):
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
        # Both parts of a row are written where they are sent from.
        self.own = self.q.new_zeros(requests * each, heads, ROW)
        self.all = self.q.new_zeros(shards, requests * each, heads, ROW)
        self.merged = self.q.new_empty(requests * each, heads, LATENT), self.own.new_empty(
            requests * each, heads, dtype=torch.float32)
        self.decode.plan(torch.tensor(lengths, dtype=torch.int32, device=queries.device))  # of whole requests

    @staticmethod
    def outputs(rows):
        """(o, lse), views of [tokens, heads, ROW]"""
        return rows[..., :LATENT], rows.view(torch.float32)[..., LATENT // 2]

    def attend(self):
        o, lse = self.outputs(self.own)
        return self.decode.run(self.q, self.cache, self.table, out=o, lse=lse)

    def attend_together(self):
        self.attend()
        distributed.all_gather_into_tensor(self.all.flatten(0, 1).view(torch.uint8), self.own.view(torch.uint8))
        o, lse = self.merged
        merged = self.outputs(self.all[0])
        for rows in self.all[1:]:
            merged = hypermla.merge_states(*merged, *self.outputs(rows), out=o, lse=lse)
        return merged


def microseconds(call, calls=50):
    """Of one call of many; on a GPU."""
    for _ in range(10):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / calls


def run_rank(rank, at, address):
    gpu = torch.cuda.device_count() >= at.ranks
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if gpu else "gloo", init_method=address, rank=rank, world_size=at.ranks)
    dice = torch.Generator(device).manual_seed(1)  # the same numbers on all ranks
    normal = functools.partial(torch.randn, generator=dice, device=device, dtype=torch.bfloat16)
    worst = 0.0
    lengths = torch.randint(1, at.batch_tokens + 1, (at.requests,), generator=torch.Generator().manual_seed(2))
    steps = {f"a request of {at.tokens} tokens": ([at.tokens], 1),
             f"{at.requests} requests of up to {at.batch_tokens} tokens, {at.drafts} drafts": (lengths, 1 + at.drafts)}
    for name, (tokens, queries) in steps.items():
        contexts = [normal(int(count), WIDTH) for count in tokens]
        q = normal(len(contexts), queries, at.heads, WIDTH)
        shard, whole = Attention(contexts, q, at.ranks, rank, at.interleave), Attention(contexts, q)
        o, lse = shard.attend_together()
        expected, expected_lse = whole.attend()
        # Queries of drafts that are more than the tokens see none: no output, in all shards.
        seen = expected_lse.isfinite()
        same = bool((lse.isfinite() == seen).all())
        expected = expected.float()
        difference = max(((o.float() - expected).abs().max() / expected.abs().max()).item(),
                         (lse - expected_lse)[seen].abs().max().item()) if same else float("inf")
        worst = max(worst, difference)
        times = ""
        if gpu:
            distributed.barrier()
            of_whole, of_shard, together = map(microseconds, (whole.attend, shard.attend, shard.attend_together))
            times = (f"; a layer takes {together:.1f} us, {of_shard:.1f} of them the rank's attention; one GPU for all "
                     f"takes {of_whole:.1f}")
        if rank == 0:
            print(f"{name}: {at.ranks} ranks differ from one by at most {difference:.4f}{times}", flush=True)
            print(f"  {shard.decode.explain()}", flush=True)
    distributed.destroy_process_group()
    sys.exit(not worst <= TOLERANCE)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes, a GPU each")
    parser.add_argument("--heads", type=int, default=16, help="of all ranks together")
    parser.add_argument("--tokens", type=int, default=4096, help="of the long request")
    parser.add_argument("--requests", type=int, default=8, help="of the batch")
    parser.add_argument("--batch_tokens", type=int, default=512, help="of a request of the batch, at most")
    parser.add_argument("--drafts", type=int, default=3, help="of a request of the batch")
    parser.add_argument("--interleave", type=int, default=1, help="tokens of a rank's turn")
    at = parser.parse_args()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"tcp://localhost:{free.getsockname()[1]}"
    torch.multiprocessing.start_processes(run_rank, (at, address), at.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
