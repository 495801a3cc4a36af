"""One process of bench_vllm.py: vLLM's engine with one attention backend, over a small model of DeepSeek-V3's shape
with random weights. Does what the JSON lines of its standard input ask, a JSON line per result. Of an engine on several
GPUs it is the first's, and starts a process for each other one, which is told the same. Needs a GPU, vLLM, and this
package where Python finds it."""

import collections
import gc
import importlib.metadata
import json
import math
import os
import re
import select
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import NamedTuple

from vllm_model import VOCABULARY, drafter_in, use_normal_weights, write_checkpoint, write_model

GREEDY_TOKENS = 32
TEXT_PROMPTS = (5, 17, 64, 65, 200, 777, 2048, 5000)  # tokens of the prompts behind which texts are compared
DEFAULT_GRAPHS = "FULL_AND_PIECEWISE"  # vLLM's cudagraph_mode, where it is not asked for another
# Parts of the names of kernels that are attention. Writing the cache is not.
ATTENTION = ("mla", "latent", "plan_requests", "prefill", "flash_fwd", "FlashAttn", "prepare_varlen", "sparse_attn",
             "_fwd_grouped", "_fwd_kernel_stage", "combine")


class Shape(NamedTuple):
    """Of a step."""

    batch: int  # requests
    context: int  # tokens of each, which the prefix cache keeps
    mixed: bool = False  # requests have 0, 1, .. and all drafts in turn
    new: int = 0  # new tokens of each request in a step of prompts; 0: the step decodes


class Engine:
    """vLLM's engine, with a watch on its steps."""

    def __init__(self, at):
        import torch
        from vllm import LLM

        queries = 1 + at["drafts"]
        shapes = [Shape(*shape) for shape in at["shapes"]]
        batches = {shape.batch for shape in shapes}
        sizes = {queries * requests for requests in {1, 2, 4, 8, 16, *batches}}
        sizes |= {mixed_queries(shape.batch, queries) for shape in shapes if shape.mixed}
        tokens = max([16384, *(2048 + shape.context + shape.new for shape in shapes)])
        own = f"{at['path']}.model"  # where processes that write weights do not meet
        arguments = {"model": write_checkpoint(own, at["heads"], at["layers"], tokens, at["method"]) if at["method"]
                     else write_model(at["work"], at["heads"], at["layers"], tokens, at["sparse"]),
                     "load_format": "auto" if at["method"] else "dummy", "skip_tokenizer_init": True,
                     "dtype": "bfloat16", "seed": 1, "max_model_len": tokens,
                     # Engines that start side by side cannot look at what memory is free.
                     "kv_cache_memory_bytes": at["cache_bytes"], "gpu_memory_utilization": 0.1,
                     "max_num_seqs": max(8, *batches) if batches else 8,
                     "max_num_batched_tokens": 16384, "block_size": 64, "enable_prefix_caching": True,
                     "kv_cache_dtype": at["cache"].removesuffix("+queries"),
                     "additional_config": {"hypermla_shared_prefixes": at["shares"],
                                           # GiB, of layers that have some 9000 tokens of each prompt
                                           "hypermla_prefix_cache": (0.0044 * (at["layers"] + bool(at["method"]))
                                                                     * at["heads"] * at["hybrid"] * at["prompts"]),
                                           "hypermla_fp8_queries": at["cache"].endswith("+queries")},
                     "attention_config": {"backend": at["backend"]}}
        if at["graphs"] == "NONE":
            arguments["enforce_eager"] = True
        elif at["graphs"] != DEFAULT_GRAPHS:
            arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": at["graphs"],
                                               "cudagraph_capture_sizes": sorted(sizes)}
        if at["drafts"]:
            how = {"method": at["method"]} if at["method"] else {"method": "ngram", "prompt_lookup_min": 1,
                                                                 "prompt_lookup_max": 2}
            how |= {"model": drafter_in(arguments["model"], at["heads"])} if at["method"] in ("eagle", "eagle3") else {}
            how |= {"attention_backend": at["drafter"]} if at["drafter"] else {}
            arguments["speculative_config"] = how | {"num_speculative_tokens": at["drafts"]}
        if at["gpus"] > 1:
            arguments |= {"tensor_parallel_size": at["gpus"], "distributed_executor_backend": "external_launcher",
                          "decode_context_parallel_size": at["gpus"] if at["contexts_shared"] else 1,
                          "disable_custom_all_reduce": True}  # it starts processes that look at GPUs
        use_normal_weights(at["rank"])
        self.torch, self.llm, self.queries, self.mixed = torch, LLM(**arguments), queries, False
        self.config = self.llm.llm_engine.vllm_config
        self._watch()
        if at["drafts"]:
            self._mix()

    def _mix(self):
        """While self.mixed: requests have 0, 1, .. and all drafts in turn."""
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        update = scheduler.update_draft_token_ids

        def shortened(drafts):
            if self.mixed:
                for i, tokens in enumerate(drafts.draft_token_ids):
                    del tokens[i % self.queries:]
            update(drafts)

        scheduler.update_draft_token_ids = shortened

    def _watch(self):
        self.replays, self.batches, self.steps, self.built, self.forward = [], [], [], [], []
        self.after_step = lambda number: None
        events, engine = self.torch.cuda.Event, self.llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        layer = self.attention_layers()[0]
        replay, schedule, step = self.torch.cuda.CUDAGraph.replay, scheduler.schedule, engine.step

        def timed_replay(graph):
            begin, end = events(enable_timing=True), events(enable_timing=True)
            begin.record()
            replay(graph)
            end.record()
            self.replays.append((begin, end))

        def noted_schedule(*arguments, **keywords):
            output = schedule(*arguments, **keywords)
            self.batches.append((len(output.num_scheduled_tokens), output.total_num_scheduled_tokens))
            return output

        def noted_step():
            output = step()
            self.steps.append((time.perf_counter(), self.batches[-1] if self.batches else (0, 0), len(self.replays),
                               len(self.built), len(self.forward)))
            self.after_step(len(self.steps))
            return output

        def watched(of, name, seconds):
            call = getattr(of, name)

            def timed(*arguments, **keywords):
                begin = time.perf_counter()
                output = call(*arguments, **keywords)
                seconds.append(time.perf_counter() - begin)
                return output

            setattr(of, name, timed)

        watched(layer.attn_backend.get_builder_cls(), "build", self.built)
        watched(type(layer.impl), "forward_mqa", self.forward)
        self.torch.cuda.CUDAGraph.replay = timed_replay
        scheduler.schedule, engine.step = noted_schedule, noted_step

    def attention_layers(self):
        """Not an indexer's."""
        layers = self.config.compilation_config.static_forward_context.values()
        return [layer for layer in layers if hasattr(layer, "impl")]

    def describe(self):
        layers = self.attention_layers()
        return {"implementation": type(layers[0].impl).__name__,
                "implementation_of_last": type(layers[-1].impl).__name__,  # perhaps a drafter's
                "block": self.config.cache_config.block_size,
                "graphs_of_engine": str(self.config.compilation_config.cudagraph_mode).rpartition(".")[2],
                "largest_graph": self.config.compilation_config.max_cudagraph_capture_size,
                "runner_v2": bool(getattr(self.config, "use_v2_model_runner", False))}

    def generate(self, prompts, tokens, logprobs=None):
        from vllm import SamplingParams

        how = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs)
        return self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], how, use_tqdm=False)

    def texts(self, prompts):
        """Greedy tokens, and the log-probabilities of the likeliest at each place."""
        return [{"ids": list(one.outputs[0].token_ids),
                 "logprobs": [{str(token): round(of.logprob, 5) for token, of in place.items()}
                              for place in one.outputs[0].logprobs]}
                for one in self.generate(prompts, GREEDY_TOKENS, 8)]

    def tokens_a_step(self, texts):
        """With drafts, of so many texts one after the other, but for the prompts' steps and the tokens of these."""
        steps = sum(requests > 0 for requests, _ in self.batches) - texts
        return {"tokens_a_step": round(texts * (GREEDY_TOKENS - 1) / steps, 3)} if self.queries > 1 else {}

    def clear(self):
        for noted in (self.replays, self.batches, self.steps, self.built, self.forward):
            noted.clear()

    def time_decode(self, prompts, steps):
        """Of decoding steps of all prompts at once, whose contexts the prefix cache keeps: medians, of the host's time
        in the metadata builder and, without graphs, in one layer's forward call, too."""
        self.clear()
        self.generate(prompts, steps)
        self.torch.cuda.synchronize()
        wall, graph, replays, queries, built, forward = [], [], [], [], [], []
        for (begin, before, *first), (end, batch, *last) in list(zip(self.steps, self.steps[1:]))[3:]:
            if before[0] != len(prompts) or batch[0] != len(prompts):
                continue
            wall.append(1e3 * (end - begin))
            queries.append(batch[1] / len(prompts))
            replays.append(last[0] - first[0])
            if replays[-1]:
                graph.append(sum(a.elapsed_time(b) for a, b in self.replays[first[0]:last[0]]))
            built += self.built[first[1]:last[1]]
            forward += self.forward[first[2]:last[2]]
        return {"steps": len(wall), "wall_ms": median(wall), "graph_ms": median(graph), "replays": median(replays),
                "queries": median(queries), "builder_us": median([1e6 * one for one in built]),
                "forward_us": median([1e6 * one for one in forward])}

    def time_prompts(self, prompts):
        """Of prompts until each has its first token; in one step, if no more than max_num_batched_tokens are new."""
        self.clear()
        begin = time.perf_counter()
        self.generate(prompts, 1)
        self.torch.cuda.synchronize()
        wall = time.perf_counter() - begin
        steps = [tokens / requests for requests, tokens in self.batches if requests]
        return {"steps": len(steps), "wall_ms": round(1e3 * wall, 4), "graph_ms": None, "replays": 0,
                "queries": median(steps), "builder_us": median([1e6 * one for one in self.built]), "forward_us": None}

    def profile_prompts(self, prompts):
        """Milliseconds of time_prompts() in kernels, and in those of attention."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self.generate(prompts, 1)
            self.torch.cuda.synchronize()
        return times_of(spans_of(profiler), 1)

    def profile_decode(self, prompts):
        """Milliseconds of a decoding step in kernels and in those of attention, planners outside of the graph among
        them, and the mean pauses, in microseconds, between these and the kernels before and behind them; negative where
        they overlap."""
        from torch.profiler import ProfilerActivity, profile

        first, last = 4, 12  # steps; those before them begin the requests
        profiler = profile(activities=[ProfilerActivity.CUDA])

        def between(number):
            if number in (first, last):
                self.torch.cuda.synchronize()
                (profiler.start if number == first else profiler.stop)()

        self.clear()
        self.after_step = between
        try:
            self.generate(prompts, last * self.queries + 2)
        finally:
            self.after_step = lambda number: None
        spans, before, behind = spans_of(profiler), [], []
        for i, (begin, end, name) in enumerate(spans):
            if is_attention(name) and 0 < i < len(spans) - 1:
                before += [] if is_attention(spans[i - 1][2]) else [begin - spans[i - 1][1]]
                behind += [] if is_attention(spans[i + 1][2]) else [spans[i + 1][0] - end]
        return {**times_of(spans, last - first), "pause_before_us": median(before), "pause_behind_us": median(behind)}


def samples_of(prompts, tails):
    """Requests that begin with one of the prompts in turn, each with tokens of its own behind it. Entries of block
    tables for the whole pages of a prompt are equal, since its first request puts these into the prefix cache."""
    return [prompts[i % len(prompts)] + tail for i, tail in enumerate(tails)]


def missing_plugins(group):
    """Of this library's entry points those that no installed package has. An engine goes on without a plug-in that it
    is told to load and does not find: what it then measures is its own."""
    return {"hypermla", "hypermla_sparse"} - {one.name for one in importlib.metadata.entry_points(group=group)}


def is_attention(kernel):
    return any(part in kernel for part in ATTENTION) and "cache" not in kernel


def spans_of(profiler):
    """(begin, end, name) of every kernel, in microseconds, by their begins."""
    return sorted((event.time_range.start, event.time_range.end, event.name) for event in profiler.events()
                  if "CUDA" in str(event.device_type) and not event.name.startswith(("Memcpy", "Memset")))


def times_of(spans, steps, is_attention=is_attention):
    """Milliseconds of a step in kernels, in those of attention, and in the longest."""
    kernels = collections.Counter()
    for begin, end, name in spans:
        kernels[name] += (end - begin) / 1e3 / steps
    return {"kernels_ms": round(covered(spans) / 1e3 / steps, 4),
            "attention_ms": round(covered(span for span in spans if is_attention(span[2])) / 1e3 / steps, 4),
            "longest": [[name[:90], round(ms, 4)] for name, ms in kernels.most_common(6)]}


def covered(spans):
    """How long at least one of them lasts. A kernel that is launched before the one before it ends overlaps it."""
    total, until = 0, -math.inf
    for begin, end, *_ in spans:
        total += max(end - max(begin, until), 0)
        until = max(until, end)
    return total


def host_us():
    """Of a loop of Python: where it takes longer than before, so does all else that the host does."""
    begin = time.perf_counter()
    sum(i & 7 for i in range(50000))
    return round(1e6 * (time.perf_counter() - begin), 1)


def with_host_us(measure):
    """measure(), without Python's garbage collector, and host_us: the larger of before and behind it, each the least of
    three."""
    gc.collect()
    gc.disable()
    try:
        before = min(host_us() for _ in range(3))
        found = measure()
        return {**found, "host_us": max(before, min(host_us() for _ in range(3)))}
    finally:
        gc.enable()


def stay_on(cpus):
    """This thread on the first, all others of the process on the others."""
    for thread in map(int, os.listdir("/proc/self/task")):
        own = thread == threading.get_native_id()
        try:
            os.sched_setaffinity(thread, cpus[:1] if own else cpus[1:] or cpus)
        except ProcessLookupError:  # it has ended
            pass


def lines_until(end, others):
    """Those of the standard input, until nothing comes in the time; given on to the other processes."""
    while select.select([sys.stdin], [], [], max(end - time.time(), 0))[0] and (line := sys.stdin.readline()):
        for other in others:
            other.stdin.write(line)
            other.stdin.flush()
        yield line


def start_others(at):
    """Processes of an engine's other GPUs, each of a rank. They find each other by the environment, as vLLM asks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(at["gpus"]), MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(free.getsockname()[1]))
    return [subprocess.Popen([sys.executable, __file__, json.dumps({**at, "rank": rank, "path": os.devnull})],
                             env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
                             stdin=subprocess.PIPE)
            for rank in range(1, at["gpus"])]


def mixed_queries(requests, queries):
    return sum(i % queries + 1 for i in range(requests))


def median(values):
    return round(statistics.median(values), 4) if values else None


def difference(one, other):
    """How far texts agree: tokens up to the first that differs; log-probabilities of tokens that both list, at places
    with the same tokens before them."""
    equal = total = whole = 0
    apart = []
    for a, b in zip(one, other):
        same = next((i for i, (x, y) in enumerate(zip(a["ids"], b["ids"])) if x != y), len(a["ids"]))
        equal, total, whole = equal + same, total + len(a["ids"]), whole + (same == len(a["ids"]))
        for x, y in list(zip(a["logprobs"], b["logprobs"]))[:same + 1]:
            apart += [abs(x[token] - y[token]) for token in x if token in y]
    return {"prompts": len(one), "prompts_equal": whole, "tokens_before_parting": equal, "tokens": total,
            "logprob_max": round(max(apart, default=0), 5),
            "logprob_mean": round(sum(apart) / max(len(apart), 1), 6)}


def without_paths(text):
    """Errors name files of the machine."""
    return re.sub(r"(?<![\w<])~?(?:/[\w.+@~-]+){2,}/?", "<path>", text)


def driver_versions():
    """Of each GPU; [] where there is none."""
    try:
        found = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                               capture_output=True, text=True, timeout=20)
        return found.stdout.split() if found.returncode == 0 else []
    except (OSError, subprocess.SubprocessError):
        return []


def driver_version():
    return next(iter(driver_versions()), None)


def machine():
    """What a record says of where it was made."""
    import torch
    import vllm

    return {"device": {"name": torch.cuda.get_device_name(), "driver": driver_version()},
            "versions": {"vllm": vllm.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}}


def main():
    """usage: vllm_worker.py <JSON of what bench_vllm.py asks>"""
    at = json.loads(sys.argv[1])
    out = open(at["path"], "w", buffering=1)

    def put(what, **result):
        out.write(json.dumps({"what": what, **result}) + "\n")

    begin = time.monotonic()
    others = start_others(at) if at["gpus"] > 1 and at["rank"] == 0 else []

    def own(cpus):
        return cpus[at["rank"]::at["gpus"]] or cpus

    engine = Engine(at)
    torch = engine.torch
    put("engine", **machine(), start_s=round(time.monotonic() - begin, 1), **engine.describe())
    generator = torch.Generator().manual_seed(7)

    def tokens(count):
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    prompts = [tokens(count) for count in TEXT_PROMPTS]
    if at["samples"]:  # enough of them that what is shared is found
        prompts = samples_of([tokens(4096) for _ in range(at["prompts"])],
                             [tokens(1 + i % 70) for i in range(64 * at["prompts"])])
    if at["agreement"]:
        together = engine.texts(prompts)
        alone = []
        engine.clear()
        for prompt in prompts[:8]:  # of samples some are enough
            engine.llm.reset_prefix_cache()
            alone += engine.texts([prompt])
        put("texts", texts=together)
        put("alone", **difference(alone, together), **engine.tokens_a_step(len(alone)))
    # Every token occurs, so that an n-gram drafter always finds one.
    shapes = [Shape(*shape) for shape in at["shapes"]]
    most = max([shape.batch for shape in shapes], default=0)
    shuffled = [torch.randperm(VOCABULARY, generator=generator).tolist() for _ in range(most)]
    rows = [some + tokens(max(shape.context for shape in shapes)) for some in shuffled]
    gc.collect()
    gc.freeze()
    put("done")
    for line in lines_until(at["until"], others):
        asked = json.loads(line)
        if asked["do"] == "end":
            break
        stay_on(own(asked["cpus"]))
        batch, context, engine.mixed, new = Shape(*asked["shape"])
        these = [row[:context + 1] for row in rows[:batch]]
        if at["samples"]:
            these = samples_of([row[:context] for row in rows[:at["prompts"]]], [row[:1] for row in rows[:batch]])

        def unseen():
            """Prompts whose contexts the prefix cache has, and nothing behind them."""
            return [row[:context] + tokens(new) for row in rows[:batch]]

        def timed():
            return engine.time_prompts(unseen()) if new else engine.time_decode(these, at["steps"])

        try:
            if asked["do"] == "prepare":  # the prefix cache, and a run that does not count
                engine.generate(these, 1)
                timed()
            elif asked["do"] == "time":
                put("run", **with_host_us(timed))
            else:
                put("profile", **(engine.profile_prompts(unseen()) if new else engine.profile_decode(these)))
        except Exception as error:  # the next shape may work
            put("error", error=repr(error)[:500])
        put("done")
    put("end", seconds=round(time.monotonic() - begin, 1))


if __name__ == "__main__":
    main()
