#!/usr/bin/env python3
"""The host's time in the metadata builder of a step, ours and FLASHMLA's, in vLLM's classes on a CPU; and in vLLM's
common builder, on which both stand, alone.

    python3 tests/engines/bench_builder.py

Microseconds: the least of 7 loops, and the median of calls behind others' work, which leaves caches cold, as a step of
the engine does. Launches are not in it: our planners', and FLASHMLA's, which its first layer plans; nor, of prompts
behind contexts, vLLM's copies of the chunks that it cuts them into. Needs vLLM.
"""

import importlib.util
import json
import pathlib
import statistics
import sys
import time
import types

import vllm_test as fakes  # before PyTorch

import torch
import vllm
from vllm.v1.attention.backends.mla import flashmla

BLOCK = 64


def flashmla_builder():
    """FLASHMLA's, with the calls of its library that need no GPU."""
    sys.modules.setdefault("vllm._flashmla_C", types.ModuleType("vllm._flashmla_C"))
    path = pathlib.Path(vllm.__file__).parent / "third_party/flashmla/flash_mla_interface.py"
    spec = importlib.util.spec_from_file_location("flash_mla_interface", path)
    interface = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(interface)
    flashmla.get_mla_metadata, flashmla.num_compute_units = interface.get_mla_metadata, lambda device: 132
    return flashmla.FlashMLAMetadataBuilder


def in_a_loop(call, calls=2000):
    found = []
    for _ in range(7):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - begin) / calls)
    return 1e6 * min(found)


def cold(call, calls=150):
    memory, objects, found = torch.zeros(8 << 20), [object() for _ in range(300000)], []
    for i in range(calls):
        memory.add_(1)
        json.loads(json.dumps({i: [one is None for one in objects[:1000]]}))
        any(one is None for one in objects)
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(found)


class NoPlan:
    """In place of a MlaPrefill, whose plan() is a launch."""

    def plan(self, query_starts, token_starts):
        pass


def prompts():
    """Of steps of prompts whose contexts are in the cache."""
    fakes.MODEL_TOKENS, new = 16384, 512
    for requests, tokens in (1, new), (1, 8192 + new), (8, 8192 + new):
        common = fakes.Batch([tokens] * requests, [new] * requests, BLOCK).common()
        said, ours = [], fakes.PrefillTest()
        ours.setUp()
        for name, kind in (("CUSTOM", fakes.Builder), ("common", fakes.OthersBuilder)):
            config = fakes.config_of()
            with fakes.WithoutGpu():
                builder = fakes.builder_of(config, BLOCK, kind=kind, prefill=ours.made(config))
                builder._prefill_backend._causal = [NoPlan(), NoPlan()]
                builder.chunked_prefill_workspace_size = 1 << 16  # as an engine has for such models
                builder.chunked_prefill_workspace = torch.empty(1 << 16, 1)
                call = lambda: builder.build(0, common)  # noqa: E731
                said.append(f"{name} {in_a_loop(call, 300):.1f}, cold {cold(call):.0f}")
        print(f"{requests} prompts of {new} tokens behind {tokens - new}: {'; '.join(said)}", flush=True)


def main():
    torch.set_num_threads(1)
    builders = {"CUSTOM": fakes.Builder, "FLASHMLA": flashmla_builder(), "common": fakes.OthersBuilder}
    for requests, drafts in ((1, 0), (32, 0), (128, 0), (32, 3), (128, 7)):
        common = fakes.Batch([300] * requests, [1 + drafts] * requests, BLOCK).common()
        said = []
        for name, kind in builders.items():
            config = fakes.config_of(drafts)
            config.scheduler_config.max_num_seqs = 128
            builder = fakes.builder_of(config, BLOCK, kind=kind)
            call = lambda: builder.build(0, common)  # noqa: E731
            said.append(f"{name} {in_a_loop(call):.1f}, cold {cold(call):.0f}")
        print(f"vLLM {vllm.__version__}, {requests} requests, {drafts} drafts: {'; '.join(said)}", flush=True)
    prompts()


if __name__ == "__main__":
    main()
