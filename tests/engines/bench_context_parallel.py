#!/usr/bin/env python3
"""Decode context parallelism over the GPUs of one machine: what a layer takes when ranks share the context, and
whether they compute what one GPU does.

    tests/engines/bench_context_parallel.py --record=results/nvidia-h200/context_parallel.json

A row is a batch: heads, requests, queries of each, tokens of each. The ranks' layer is that of
examples/python/context_parallel.py, which exchanges whole partial results, by NCCL and by memory that GPUs share over
NVLink. Microseconds of one layer in a recording of 20, medians of 11 replays, which all ranks begin together; every
figure is the slowest rank's. whole_us: one GPU attends to everything; shard_us: a rank to its share, without exchange.
The cache of a layer is larger than L2, the rank's share, too.
"""

import argparse
import datetime
import functools
import json
import pathlib
import sys
import types

from vllm_worker import driver_version

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples/python"))
missing = None
try:
    import torch
    from torch import distributed

    import context_parallel
except ModuleNotFoundError as error:
    missing = error.name  # which --help does not need

# (heads, requests, queries of each, tokens of each)
ROWS = ((128, 1, 1, 1 << 20), (16, 1, 1, 1 << 20), (128, 1, 1, 1 << 18), (16, 1, 1, 1 << 18), (128, 1, 4, 1 << 20),
        (128, 32, 1, 16384), (16, 32, 1, 16384), (128, 32, 4, 16384))


def run_rank(rank, at, address):
    device = context_parallel.joined(rank, at, address)
    rows = []
    for heads, requests, queries, tokens in at.rows:
        dice = torch.Generator(device).manual_seed(1)  # the same numbers on all ranks
        normal = functools.partial(torch.randn, generator=dice, device=device, dtype=torch.bfloat16)
        contexts = [normal(tokens, context_parallel.WIDTH) for _ in range(requests)]
        q = normal(requests, queries, heads, context_parallel.WIDTH)
        row = {"heads": heads, "requests": requests, "queries": queries, "tokens": tokens}
        for exchange in context_parallel.EXCHANGES:
            one = types.SimpleNamespace(ranks=at.ranks, interleave=1, exchange=exchange)
            found = [None] * at.ranks
            distributed.all_gather_object(found, context_parallel.compare(contexts, q, one, rank))
            of_ranks = {key: [value[key] for value in found] for key in found[0]}
            row[exchange] = {key: value[0] if key == "kernel" else max(value) for key, value in of_ranks.items()}
        rows.append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)
            record = {"schema": 1, "kind": "context_parallel", "date": datetime.date.today().isoformat(),
                      "device": {"name": torch.cuda.get_device_name(), "driver": at.driver, "of_these": at.ranks},
                      "torch": torch.__version__, "rows": rows}
            pathlib.Path(at.record).write_text(json.dumps(record, indent=1) + "\n")
        del contexts, q
        torch.cuda.empty_cache()
    distributed.destroy_process_group()
    sys.exit(any(not row[name]["difference"] <= context_parallel.TOLERANCE
                 for row in rows for name in context_parallel.EXCHANGES))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs")
    parser.add_argument("--rows", type=int, default=len(ROWS), help="the first of them, so many (default all)")
    parser.add_argument("--record", default="context_parallel.json", help="file of all results")
    at = parser.parse_args()
    if missing:
        sys.exit(f"bench_context_parallel.py: Python does not find {missing}; install it, then run this again")
    if torch.cuda.device_count() < at.ranks:
        sys.exit(f"bench_context_parallel.py: it needs {at.ranks} GPUs, and PyTorch finds {torch.cuda.device_count()}")
    at.driver, at.rows = driver_version(), ROWS[:at.rows]
    context_parallel.start(run_rank, at)


if __name__ == "__main__":
    main()
