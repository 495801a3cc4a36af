#!/usr/bin/env python3
"""Does vLLM's engine say the same with hypermla_prefix_cache as without, where prefixes come and go?

    tests/engines/vllm_churn.py --record=vllm_churn.json

Requests of a few prompts come in waves, each with a tail of its own, to an engine whose cache is so small that prompts
lose their pages, and requests that run are preempted and begin anew; prompts are cut into chunks. After each wave the
engine's pages are free and in order again, so that the next wave's first prompt gets those of the one before. Engines
start side by side, each a process: without the option; without it and with the requests of each wave in another order,
which is the noise to compare with; with it; and with it, blind: it is not told what steps write, so it takes pages for
a prefix that hold something else by now, which the comparison must notice. Prefixes are kept for fewer requests and
tokens than pay, so that many are.

Of two engines' greedy texts: what bench_vllm.py says of them, and `strange`: how many have a place, with the same
tokens before it, of whose 8 likeliest tokens less than half are the same. The exit status is 1 if an engine fails, if
nothing was shared, if texts with the option are strange, or if none are with it and blind. Needs a GPU, vLLM, and this
package where Python finds it.
"""

import argparse
import datetime
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

from bench_vllm import ENVIRONMENT, OURS, write_record
from vllm_model import VOCABULARY, use_normal_weights, write_checkpoint, write_model
from vllm_worker import difference, machine, missing_plugins

HEADS, LAYERS, PAGE = 16, 4, 64
PAGES = 180  # of the cache; the prompts have some 230, and 48 requests 150 of their own
WAVE = 80  # requests
RUNNING, TOKENS = 48, 4096
LEAST_QUERIES, LEAST_TOKENS = 4, 512  # for which a prefix is kept
ENGINES = {"without": {}, "another order": {"shuffled": True}, "with": {"hybrid": True},
           "with, blind": {"hybrid": True, "blind": True}}
MODES = {"plain": {}, "fp8": {"cache": "fp8"}, "mtp": {"drafts": 3}, "ngram": {"lookup": 3}}


# --- an engine ---


def requests_of(count, shuffled):
    """Waves, each of some of eight prompts: [step of the wave, number, tokens of the prompt, tokens to make]."""
    dice = random.Random(11)
    tokens = lambda number: [dice.randrange(3, VOCABULARY) for _ in range(number)]
    prompts = [tokens(PAGE * dice.randint(10, 40) + dice.randint(0, PAGE - 1)) for _ in range(8)]
    waves = []
    for begin in range(0, count, WAVE):
        wave, steps = [], []
        for number in range(begin, min(begin + WAVE, count)):
            steps.append(dice.choice((0, 0, 0, 1)) + (steps[-1] if steps else 0))
            prompt = prompts[(begin // WAVE + dice.choice((0, 0, 0, 1, 2))) % len(prompts)]
            wave.append([number, prompt + tokens(dice.randint(1, 90)), dice.randint(8, 110)])
        if shuffled:
            random.Random(begin).shuffle(wave)
        waves.append([[step, *one] for step, one in zip(steps, wave)])
    return waves


def free_in_order(scheduler):
    """Has nobody's pages be given as at the engine's start, whatever they hold."""
    pool = scheduler.kv_cache_manager.block_pool
    if not pool.reset_prefix_cache():
        raise RuntimeError("requests that have ended keep pages")
    pool.free_block_queue = type(pool.free_block_queue)([block for block in pool.blocks if not block.is_null])


class Watch:
    """What SharedPrefixes does, whose keeping is made cheap."""

    def __init__(self, blind):
        import torch

        from hypermla.vllm import prefixes

        self.kept = self.left = 0
        self.shared = self.steps = torch.zeros((), dtype=torch.int64, device="cuda")
        prefixes.STEPS, prefixes.QUIET = 2, 4
        prefixes.saved_us = lambda heads, queries, tokens, fp8: (
            queries * tokens / 100 if queries >= LEAST_QUERIES and tokens >= LEAST_TOKENS else 0)
        of = prefixes.SharedPrefixes
        plan, keep, leave = of.plan, of._keep, of._leave

        def watched_plan(this, block_table, lengths, query_starts, slots, decodes, *others):
            given = torch.full_like(slots, -1) if blind else slots
            table, own = plan(this, block_table, lengths, query_starts, given, decodes, *others)
            left_out = (lengths[:decodes] - own).sum()
            self.shared = self.shared + left_out
            self.steps = self.steps + (left_out > 0)
            return table, own

        def watched_keep(this, *arguments):
            self.kept += 1
            keep(this, *arguments)

        def watched_leave(this, number):
            self.left += 1
            leave(this, number)

        of.plan, of._keep, of._leave = watched_plan, watched_keep, watched_leave

    def counts(self):
        return {"prefixes_kept": self.kept, "prefixes_left": self.left, "steps_that_shared": self.steps.item(),
                "tokens_shared": self.shared.item()}


def run_engine(at):
    from vllm import LLM, SamplingParams

    watch = Watch(at["blind"]) if at["hybrid"] else None
    use_normal_weights(0)
    of_token = (576 if at["cache"] == "fp8" else 1152) * (LAYERS + bool(at["drafts"]))
    arguments = {"model": write_checkpoint(at["work"], HEADS, LAYERS, TOKENS) if at["drafts"]
                 else write_model(at["work"], HEADS, LAYERS, TOKENS, False),
                 "load_format": "auto" if at["drafts"] else "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
                 "seed": 1, "max_model_len": TOKENS, "kv_cache_memory_bytes": PAGES * PAGE * of_token,
                 "gpu_memory_utilization": 0.1, "max_num_seqs": RUNNING, "max_num_batched_tokens": 2048,
                 "block_size": PAGE, "enable_prefix_caching": True, "kv_cache_dtype": at["cache"],
                 "additional_config": {"hypermla_prefix_cache": 0.4 * at["hybrid"]},  # GiB
                 "attention_config": {"backend": OURS},
                 "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    if at["drafts"]:
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": at["drafts"]}
    elif at["lookup"]:
        arguments["speculative_config"] = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2,
                                           "num_speculative_tokens": at["lookup"]}
    engine = LLM(**arguments).llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def noted_preempt(request, *others, **named):
        preempted.append(request.request_id)
        return preempt(request, *others, **named)

    scheduler._preempt_request = noted_preempt
    texts, steps, begin = {}, 0, time.time()
    for waiting in requests_of(at["requests"], at["shuffled"]):
        step = 0
        while waiting or engine.has_unfinished_requests():
            while waiting and waiting[0][0] <= step:
                _, number, prompt, count = waiting.pop(0)
                engine.add_request(str(number), {"prompt_token_ids": prompt}, SamplingParams(
                    temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=8))
            for one in engine.step():
                if one.finished:
                    texts[int(one.request_id)] = {
                        "ids": list(one.outputs[0].token_ids),
                        "logprobs": [{str(token): round(of.logprob, 5) for token, of in place.items()}
                                     for place in one.outputs[0].logprobs]}
            step += 1
        steps += step
        free_in_order(scheduler)
    return {"texts": [text for _, text in sorted(texts.items())], **machine(),
            "counts": {"steps": steps, "seconds": round(time.time() - begin, 1), "preempted": len(preempted),
                       **(watch.counts() if watch else {})}}


# --- over the engines ---


def strange(one, other):
    """How many texts have a place, with the same tokens before it, of whose likeliest tokens less than half are the
    same."""
    found = 0
    for a, b in zip(one, other):
        same = next((i for i, (x, y) in enumerate(zip(a["ids"], b["ids"])) if x != y), len(a["ids"]))
        places = list(zip(a["logprobs"], b["logprobs"]))[:same + 1]
        found += any(2 * len(x.keys() & y.keys()) < min(len(x), len(y)) for x, y in places)
    return found


def start(mode, engine, at):
    name = "".join(letter if letter.isalnum() else "-" for letter in f"{mode}-{engine}")
    asked = {"cache": "auto", "drafts": 0, "lookup": 0, "hybrid": False, "blind": False, "shuffled": False,
             "requests": at.requests, "path": str(at.work / f"{name}.json"), "work": str(at.work / name),
             **MODES[mode], **ENGINES[engine]}
    pathlib.Path(asked["path"]).unlink(missing_ok=True)
    (at.work / name).mkdir(exist_ok=True)
    environment = {**ENVIRONMENT, "VLLM_CACHE_ROOT": str(at.work / "cache"), **os.environ}
    with open(at.work / f"{name}.log", "w") as log:
        return asked["path"], subprocess.Popen([sys.executable, __file__, json.dumps(asked)], stdout=log,
                                               stderr=subprocess.STDOUT, env=environment)


def result_of(path, process, end):
    """What an engine says; None if it has failed or takes longer."""
    try:
        process.wait(max(end - time.time(), 0))
    except subprocess.TimeoutExpired:
        process.kill()
    if process.returncode:
        return None
    with open(path) as file:
        return json.load(file)


def rows_of(mode, found):
    """Of the engines of a mode; and whether those with the option are as they should be."""
    base = found["without"]
    rows = [{"mode": mode, "engine": engine, **one["counts"],
             **({} if one is base else {"strange": strange(base["texts"], one["texts"]),
                                        **difference(base["texts"], one["texts"])})}
            for engine, one in found.items()]
    ours, blind = (next(row for row in rows if row["engine"] == name) for name in ("with", "with, blind"))
    return rows, ours["strange"] == 0 and ours["tokens_shared"] > 0 and blind["strange"] > 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", default="vllm_churn.json", type=pathlib.Path, help="file of all results")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="these alone")
    parser.add_argument("--requests", type=int, default=480, help="of an engine (default 480)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for all engines (default 300)")
    parser.add_argument("--work", default=os.path.join(tempfile.gettempdir(), "vllm_churn"), type=pathlib.Path,
                        help="models and logs")
    at = parser.parse_args()
    if missing_plugins("vllm.general_plugins"):
        sys.exit(f"vllm_churn.py: {sys.executable} has no plug-ins of hypermla; install its wheel there")
    at.work.mkdir(parents=True, exist_ok=True)
    record, wrong = {"schema": 1, "kind": "vllm_churn", "command": "tests/engines/vllm_churn.py", "rows": []}, 0
    started = {(mode, engine): start(mode, engine, at) for mode in at.modes for engine in ENGINES}
    end = time.time() + at.limit
    for mode in at.modes:
        found = {engine: result_of(*started[mode, engine], end) for engine in ENGINES}
        if None in found.values():
            failed = [engine for engine, one in found.items() if one is None]
            print(f"{mode}: {', '.join(failed)} failed or took longer than --limit; logs are in {at.work}", flush=True)
            wrong += 1
            continue
        record |= {name: found["with"][name] for name in ("device", "versions")}
        rows, right = rows_of(mode, found)
        wrong += not right
        record["rows"] += rows
        for row in rows:
            print(json.dumps(row), flush=True)
    if record["rows"]:
        write_record(at.record, record | {"date": datetime.date.today().isoformat()})
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        of_engine = json.loads(sys.argv[1])
        said = run_engine(of_engine)
        with open(of_engine["path"], "w") as out:
            json.dump(said, out)
    else:
        sys.exit(main())
