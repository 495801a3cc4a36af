#!/usr/bin/env python3
"""Decodes, or prefills, with the real SGLang engine, over a small model of DeepSeek-V3's shape with random weights: do
its attention backends agree, and how long does a step take?

    tests/engines/bench_sglang.py --record=sglang.json
    tests/engines/bench_sglang.py --engines fa3/1 hypermla/1 --heads 16 --batches 1 32
    tests/engines/bench_sglang.py --engines fa3/64/3 hypermla/64/3
    tests/engines/bench_sglang.py --sparse --kv fp8_e4m3 --contexts 8192
    tests/engines/bench_sglang.py --new 512 2048 --contexts 0 8192 --batches 1 8 --prefill=own --steps=8

An engine has an attention backend, a size of pages, and drafts or none; each runs by itself, once for each number of
heads. Agreement: greedy texts of 32 tokens and their log-probabilities, against the first engine of these heads, and of
prompts alone against the same prompts in one batch, which is the noise to compare with; with --new also of 40 tokens
behind contexts that the prefix cache keeps, against the same prompts as a whole. Times: medians of the steps, by
events around all that the runner does for a step, and the host's time in the backend's planning. In steps of their own:
kernels by PyTorch's profiler, then the replayed graph by events around it, behind a kernel that keeps the GPU busy
until the host has launched all three. All are taken inside of SGLang's scheduler, by a plug-in of this script.

Drafts are chains by the model's own layer for them, as DeepSeek-V3 has it (EAGLE of one branch). A step then drafts,
verifies and extends: graph_ms is the graph of the model, which verifies; draft_ms and extend_ms are those of the layer
that drafts, where the backend has them: SGLang extends without one under fa3.

Engines of as many heads as hypermla's are left out where none of these has started: there is nothing to compare.

With --new a step has prompts: so many new tokens of each request, behind contexts that the prefix cache keeps. Without
a context SGLang decompresses keys and values; behind one it does, or takes the absorbed form: --forms names those to be
measured, `chosen` is the engine's own choice, as it always is where prefill has graphs (hypermla/64/0/breakable). A
step begins when all of its requests are there.

With --sparse the model is of DeepSeek-V3.2's shape, and its indexer's weights are random, too. An engine's backend is
then `dsa`, what SGLang chooses for the cache; `hypermla`, the same with our plug-in for lists; or SGLang's name of the
kernels that shall decode. attention_kernels of a row are those that ran.

Needs a GPU, SGLang, and this package where Python finds it; lists need DeepGEMM and nvcc, too.
"""

import argparse
import collections
import itertools
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import vllm_model
import vllm_worker
from vllm_model import VOCABULARY, attention_shapes, mlp_shapes, spread_of
from vllm_worker import GREEDY_TOKENS, TEXT_PROMPTS, Shape, difference, median, missing_plugins, without_paths

CONTEXT = 16384
STEPS = "BENCH_SGLANG_STEPS"  # the file to which the scheduler writes what it measures
DRAFTS = "BENCH_SGLANG_DRAFTS"  # how many tokens a chain drafts
PROMPTS = "BENCH_SGLANG_PROMPTS"  # whether steps have prompts
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
CHOICE = "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill"
THRESHOLD = "SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD"  # tokens of context from which on SGLang decompresses
FORMS = {"decompressed": 1, "absorbed": 2 ** 31, "chosen": None}  # by it; None: as an engine has it
RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.execute"
SPECULATIVE = "sglang.srt.speculative."
WORKER = SPECULATIVE + "eagle_worker_v2.EAGLEWorkerV2.forward_batch_generation"
RUNNERS = {"graph": RUNNER, "draft": SPECULATIVE + "eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner.execute",
           "extend": SPECULATIVE + "eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner.execute"}
FIRST, LAST = 4, 12  # steps that are profiled; those before them begin the requests
FIRST_OF_PROMPTS, LAST_OF_PROMPTS = 2, 5
HELD = 10  # steps behind these, whose graphs are timed
HOLD = 1_000_000  # clocks of a GPU, half a millisecond
ENGINES = ["fa3/64", "hypermla/64", "flashmla/64", "fa3/1", "hypermla/1", "triton/64"]
SPARSE_ENGINES = ["dsa/64", "hypermla/64"]
PLUGINS = "hypermla,bench_sglang"
ENVIRONMENT = {"SGLANG_PLUGINS": PLUGINS, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
               "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo",
               "NCCL_SOCKET_IFNAME": "lo"}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}  # DeepSeek-V3's


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", help="backend/tokens of a page[/tokens of a draft[/graphs of prefill]];"
                        " SGLang's flashmla only has pages of 64 (default "
                        f"{' '.join(ENGINES)}; sparse: {' '.join(SPARSE_ENGINES)})")
    parser.add_argument("--sparse", action="store_true", help="DeepSeek-V3.2's attention, by lists of 2048 tokens")
    parser.add_argument("--kv", default="auto", help="the cache's type, as SGLang names it: bfloat16, fp8_e4m3")
    parser.add_argument("--heads", type=int, nargs="+", default=[128, 16])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096], help="tokens, at most 16000")
    parser.add_argument("--new", type=int, nargs="+", help="tokens of each request in a step of prompts; else steps "
                        "decode")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["decompressed", "absorbed"],
                        help="of attention to new tokens behind a context")
    parser.add_argument("--steps", type=int, default=40, help="that are timed")
    parser.add_argument("--prefill", default="fa3", help="the backend of prefill, for all alike; 'own': each its own")
    parser.add_argument("--at_once", type=int, default=1, help="engines that start together; they measure one by one")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory, as SGLang counts it")
    parser.add_argument("--seconds", type=float, default=1200, help="for everything; what is left out is said")
    parser.add_argument("--limit", type=float, default=180, help="seconds in which an engine must start, or measure")
    parser.add_argument("--record", help="file for all results, as JSON")
    parser.add_argument("--work", default=os.path.join(tempfile.gettempdir(), "bench_sglang"), help="models and logs")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    at = parser.parse_args(words)
    at.engines = at.engines or (SPARSE_ENGINES if at.sparse else ENGINES)
    if at.sparse and any_drafts(at):
        parser.error("--sparse takes no drafts: its model has no layer for them")
    return at


class Kind(NamedTuple):
    """Of an engine."""

    backend: str
    page: int  # tokens
    drafts: int = 0  # tokens of a draft; 0: none
    graphs: str | None = None  # of prefill, as SGLang names them; None: its choice

    def named(self, heads):
        """In its results."""
        return {name: value for name, value in self._asdict().items() if value} | {"heads": heads}


def kinds_of(at):
    words = [engine.split("/") for engine in at.engines]
    return [Kind(backend, *map(int, numbers[:2]), *numbers[2:]) for backend, *numbers in words]


def shapes_of(at):
    """Of steps of prompts. Long contexts first: the shorter ones are in the prefix cache then."""
    return [Shape(batch, context, new=new) for context in sorted(at.contexts, reverse=True)
            for batch in sorted(at.batches, reverse=True) for new in sorted(at.new, reverse=True)]


def forms_of(at, kind, shape):
    """The names of those that a step is measured in."""
    if kind.graphs:
        return ["chosen"]
    return at.forms if shape.context else ["decompressed"]


# --- the model ---


def weights_of(name, shape, layers):
    """The layer that drafts, which comes behind the others, sees the last token's embedding and attends as the first
    one does: some of its drafts are right."""
    import torch

    if len(shape) == 1:
        return (torch.zeros if "bias" in name else torch.ones)(shape)
    if "eh_proj" in name:
        return torch.eye(*shape)
    like = name.replace(f"layers.{layers}.self", "layers.0.self")
    generator = torch.Generator().manual_seed(zlib.crc32(like.encode()))
    return spread_of(name, shape[1]) * torch.randn(shape, generator=generator)


def any_drafts(at):
    return any(kind.drafts for kind in kinds_of(at))


def directory_of_models(at):
    return os.path.join(at.work, "drafts") if any_drafts(at) else at.work


def write_model(at, heads):
    """A directory with a checkpoint that SGLang takes for a DeepSeek-V3, or, sparse, for a V3.2, without experts;
    returns its name. Where an engine drafts, all of them have a layer for it, with experts, and more columns, as SGLang
    asks."""
    import torch
    from safetensors.torch import save_file

    drafts = any_drafts(at)
    own = {"num_nextn_predict_layers": 1, "hidden_size": 512, "intermediate_size": 1024} if drafts else {}
    directory = vllm_model.write_model(directory_of_models(at), heads, at.layers, CONTEXT, at.sparse,
                                       rope_parameters=YARN, rope_scaling=YARN, **own)
    with open(os.path.join(directory, "config.json")) as file:
        config = json.load(file)
    checkpoint = os.path.join(directory, "model.safetensors")
    if os.path.exists(checkpoint):
        return directory
    hidden, query = config["hidden_size"], config["q_lora_rank"]
    shapes = {"model.embed_tokens": (VOCABULARY, hidden), "lm_head": (VOCABULARY, hidden), "model.norm": (hidden,)}

    experts, of_expert = config["n_routed_experts"], config["moe_intermediate_size"]
    drafting = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), "shared_head.norm": (hidden,),
                "mlp.gate": (experts, hidden), "mlp.gate.e_score_correction_bias": (experts,),
                **mlp_shapes("mlp.shared_experts", hidden, of_expert * config["n_shared_experts"])}
    for expert in range(experts):
        drafting |= mlp_shapes(f"mlp.experts.{expert}", hidden, of_expert)
    inner = mlp_shapes("mlp", hidden, config["intermediate_size"])
    for layer in range(at.layers + drafts):
        own = attention_shapes(config) | (inner if layer < at.layers else drafting)
        if at.sparse:
            indexers, dim = config["index_n_heads"], config["index_head_dim"]
            own |= {"self_attn.indexer.wq_b": (indexers * dim, query), "self_attn.indexer.wk": (dim, hidden),
                    "self_attn.indexer.weights_proj": (indexers, hidden), "self_attn.indexer.k_norm": (dim,),
                    "self_attn.indexer.k_norm.bias": (dim,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    weights = {name if "bias" in name else name + ".weight": weights_of(name, shape, at.layers).to(torch.bfloat16)
               for name, shape in shapes.items()}
    save_file(weights, checkpoint + ".tmp", {"format": "pt"})
    os.replace(checkpoint + ".tmp", checkpoint)
    return directory


# --- in SGLang's scheduler: a plug-in ---


def watch():
    """SGLang finds it by an entry point of this script's. Each step, of prompts or of decoding, becomes a line of the
    file."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not os.environ.get(STEPS):
        return
    watch = _Watch(os.environ[STEPS])
    if watch.of_prompts:
        HookRegistry.register(CHOICE, watch.choice, HookType.AROUND)
        HookRegistry.register(FORWARD, watch.step_of_prompts, HookType.AROUND)
        return
    if not int(os.environ.get(DRAFTS, 0)):
        HookRegistry.register(RUNNER, watch.step, HookType.AROUND)
        return
    HookRegistry.register(WORKER, watch.step_with_drafts, HookType.AROUND)
    for name, runner in RUNNERS.items():
        HookRegistry.register(runner, watch.part(name), HookType.AROUND)


class _Watch:
    def __init__(self, path):
        self.path = path
        self.waiting = collections.deque()  # steps whose events may not have come yet
        self.file = self.profiler = None
        self.wrapped = []  # backends whose planning is timed
        self.replays = {}  # of this step: events around the graph, by its name
        self.name, self.planned, self.profiled = "graph", 0.0, 0
        self.of_prompts = bool(int(os.environ.get(PROMPTS, 0)))
        self.layers = None  # that have a threshold, and which; and that of the environment
        self.threshold = None  # that they have instead

    def step(self, execute, runner, forward_batch, *arguments, **keywords):
        self._time_planning(runner.attn_backend)
        self._time_replays()
        return self._measured({"requests": forward_batch.batch_size}, execute, runner, forward_batch, *arguments,
                              **keywords)

    def step_with_drafts(self, execute, worker, batch, *arguments, **keywords):
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return execute(worker, batch, *arguments, **keywords)
        self._time_replays()
        return self._measured({"requests": len(batch.seq_lens)}, execute, worker, batch, *arguments, **keywords)

    def choice(self, choose, scheduler, *arguments, **keywords):
        """Around the choice of what is prefilled next: nothing, until all requests that are asked for wait."""
        waiting = scheduler.waiting_queue
        if len(waiting) >= asked_of(self.path).get("requests", 0):
            return choose(scheduler, *arguments, **keywords)
        scheduler.waiting_queue = type(waiting)()
        try:
            return choose(scheduler, *arguments, **keywords)
        finally:
            scheduler.waiting_queue = waiting

    def step_of_prompts(self, forward, runner, batch, *arguments, **keywords):
        asked = asked_of(self.path)
        if not asked or not batch.forward_mode.is_extend():
            return forward(runner, batch, *arguments, **keywords)
        self._set_threshold(runner, asked["threshold"])
        about = {"requests": batch.batch_size, "queries": len(batch.input_ids) / batch.batch_size}
        return self._measured(about, forward, runner, batch, *arguments, **keywords)

    def _set_threshold(self, runner, threshold):
        """As if the environment had said so when the layers were made. None: as it was."""
        if self.layers is None:
            self.layers = [(layer, layer.chunked_prefix_cache_threshold) for layer in runner.model.modules()
                           if hasattr(layer, "chunked_prefix_cache_threshold")]
            self.environment = os.environ.get(THRESHOLD)
        if threshold == self.threshold:
            return
        self.threshold = threshold
        for layer, own in self.layers:
            layer.chunked_prefix_cache_threshold = own if threshold is None else threshold
        value = self.environment if threshold is None else str(threshold)
        os.environ.pop(THRESHOLD, None)
        os.environ.update({THRESHOLD: value} if value else {})

    def part(self, name):
        """Around a graph's runner: its replays are of this name."""
        def execute_as(execute, runner, *arguments, **keywords):
            self._time_planning(runner.attn_backend)
            before, self.name = self.name, name
            try:
                return execute(runner, *arguments, **keywords)
            finally:
                self.name = before

        return execute_as

    def _measured(self, about, execute, *arguments, **keywords):
        import torch

        if self.file is None:
            self.file = open(self.path, "a", buffering=1)
        try:
            self._profile(torch, about["requests"])
        except Exception as error:  # the engine lives on
            self.file.write(json.dumps({"profile": about["requests"], "error": repr(error)[:300]}) + "\n")
            self.profiler = None
            pathlib.Path(self.path + ".profile").unlink(missing_ok=True)
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.replays, self.planned = {}, 0.0
        begin = time.monotonic()
        ends[0].record()
        output = execute(*arguments, **keywords)
        ends[1].record()
        line = {"at": begin, **about, "host_us": 1e6 * (time.monotonic() - begin),
                "plan_us": 1e6 * self.planned, "held": self._is_held()}
        self.waiting.append((line, ends, self.replays))
        self.replays = {}
        while self.waiting and self.waiting[0][1][1].query():
            line, ends, replays = self.waiting.popleft()
            self.file.write(json.dumps({**line, "step_ms": ends[0].elapsed_time(ends[1]), **{
                f"{name}_ms": one.elapsed_time(other) for name, (one, other) in replays.items()}}) + "\n")
        return output

    def _is_held(self):
        """Whether this step's graph waits until the host has launched it."""
        return self.profiled > LAST

    def _time_replays(self):
        import torch

        replay = torch.cuda.CUDAGraph.replay
        if replay.__name__ == "timed":
            return

        def timed(graph):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            if self._is_held():
                torch.cuda._sleep(HOLD)
            marks[0].record()
            replay(graph)
            marks[1].record()
            self.replays[self.name] = marks

        torch.cuda.CUDAGraph.replay = timed

    def _time_planning(self, backend):
        if any(backend is one for one in self.wrapped):
            return
        self.wrapped.append(backend)
        plan = backend.init_forward_metadata_out_graph

        def timed(*arguments, **keywords):
            begin = time.perf_counter()
            plan(*arguments, **keywords)
            self.planned += time.perf_counter() - begin

        backend.init_forward_metadata_out_graph = timed

    def _profile(self, torch, requests):
        """Profiles some steps of this many requests, where a file asks for it, and has those behind them held."""
        wish = self.path + ".profile"
        if self.profiler is None and not os.path.exists(wish):
            self.profiled = 0
            return
        first, last = (FIRST_OF_PROMPTS, LAST_OF_PROMPTS) if self.of_prompts else (FIRST, LAST)
        self.profiled += 1
        if self.profiled == first:
            torch.cuda.synchronize()
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profiler.start()
        elif self.profiled == last and self.profiler:
            torch.cuda.synchronize()
            self.profiler.stop()
            spans = vllm_worker.spans_of(self.profiler)
            self.file.write(json.dumps({"profile": requests, **vllm_worker.times_of(
                spans, last - first, is_attention), "attention_kernels": names_of(spans)}) + "\n")
            self.profiler = None
            self.profiled = 0 if self.of_prompts else last  # the steps behind these are held


def is_attention(kernel):
    """Planning and the concatenation of queries count, writing the cache does not."""
    return vllm_worker.is_attention(kernel) and "kv_buffer" not in kernel


def names_of(spans):
    """Of attention's kernels, by which a record shows whose they were."""
    return sorted({name[:90] for _, _, name in spans if is_attention(name)})


# --- in a process of one engine ---


def ask(steps, **asked):
    """Of the scheduler, by a file beside that of its steps, about the next steps of prompts: how many requests one has,
    and from how much context on layers decompress it. Nothing: no more."""
    scratch = pathlib.Path(f"{steps}.asked.tmp")
    scratch.write_text(json.dumps(asked))
    scratch.replace(f"{steps}.asked")


def asked_of(steps):
    """What it finds there."""
    path = pathlib.Path(f"{steps}.asked")
    return json.loads(path.read_text()) if path.exists() else {}


class Engine:
    def __init__(self, at, kind, heads, number, steps):
        import sglang

        backend, page, drafts, graphs = kind
        if at.sparse:  # the model has one backend, of several kernels; graphs of prefill would only start later
            decode = None if backend in ("dsa", "hypermla") else backend
            attention = {"dsa_decode_backend": decode, "disable_prefill_cuda_graph": True}
        else:
            prefill = backend if at.prefill == "own" else at.prefill
            attention = {"attention_backend": backend, "prefill_attention_backend": prefill,
                         "decode_attention_backend": backend}
        batches = sorted({1, 2, 4, 8, *at.batches})
        tokens = max(at.batches) * (max(at.contexts) + 4 * max(at.steps, LAST + HELD) * (1 + drafts) + 4 * 64)
        if at.new:
            tokens = max(at.batches) * (max(at.contexts) + 4 * max(at.new))
        # Else the backend of prefill verifies.
        chains = {"speculative_algorithm": "EAGLE", "speculative_num_steps": drafts, "speculative_eagle_topk": 1,
                  "speculative_num_draft_tokens": drafts + 1, "speculative_attention_mode": "decode"} if drafts else {}
        captured = {}
        if graphs:
            sizes = {shape.batch * shape.new for shape in shapes_of(at)}
            captured = {"cuda_graph_backend_prefill": graphs, "cuda_graph_bs_prefill": sorted(sizes)}
        self.kind, self.drafts = kind, drafts
        self.llm = sglang.Engine(
            model_path=vllm_model.directory_of_model(directory_of_models(at), heads, at.layers, at.sparse),
            skip_tokenizer_init=True, dtype="bfloat16", kv_cache_dtype=at.kv, device=at.device, page_size=page,
            mem_fraction_static=at.memory, max_total_tokens=max(tokens, 2 * CONTEXT), context_length=CONTEXT,
            max_running_requests=max(batches), chunked_prefill_size=CONTEXT, cuda_graph_bs_decode=batches,
            cuda_graph_max_bs_decode=max(batches), sleep_on_idle=True, random_seed=1, log_level="info",
            port=30000 + 100 * number, **attention, **chains, **captured)
        self.sparse = at.sparse
        self.steps = pathlib.Path(steps)
        self.read = 0

    def describe(self):
        import sglang
        import torch

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        args = self.llm.server_args
        backends = {"prefill": args.prefill_attention_backend, "decode": args.decode_attention_backend}
        if self.sparse:
            backends = {"prefill": args.dsa_prefill_backend, "decode": args.dsa_decode_backend}
        return {"gpu": gpu, "sglang": sglang.__version__, "torch": torch.__version__, "page": args.page_size,
                **backends, "kv": args.kv_cache_dtype, "plugins": os.environ["SGLANG_PLUGINS"],
                "algorithm": args.speculative_algorithm}

    def forget(self):
        """Empties the prefix cache; SGLang refuses while it still ends a request."""
        while not self.llm.flush_cache().success:
            time.sleep(0.01)

    def generate(self, prompts, tokens, **how):
        return self.llm.generate(input_ids=prompts, sampling_params={
            "temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}, **how)

    def texts(self, prompts):
        """Greedy tokens, and the log-probabilities of the likeliest at each place."""
        texts = []
        for one in self.generate(prompts, GREEDY_TOKENS, return_logprob=True, top_logprobs_num=8):
            about = one["meta_info"]
            texts.append({"ids": [of[1] for of in about["output_token_logprobs"]],
                          "logprobs": [{str(of[1]): round(of[0], 5) for of in place}
                                       for place in about["output_top_logprobs"]]})
        return texts

    def _lines(self):
        """What the scheduler wrote since the last call."""
        text = self.steps.read_text() if self.steps.exists() else ""
        new, self.read = text[self.read:text.rfind("\n") + 1], text.rfind("\n") + 1
        return [json.loads(line) for line in new.splitlines()]

    def time_decode(self, prompts, steps):
        """Medians of decoding steps of all prompts at once, whose contexts the prefix cache keeps. Accepted: tokens
        that a step with drafts adds to a request, on average."""
        self.generate(prompts, 1)
        self.generate(prompts, 4)
        self._lines()
        # A step with drafts adds a token or several.
        about = [one["meta_info"] for one in self.generate(prompts, steps * (1 + self.drafts))]
        lines = [line for line in self._lines() if line.get("requests") == len(prompts)][3:]
        wall = [1e3 * (b["at"] - a["at"]) for a, b in zip(lines, lines[1:])]
        accepted = {}
        if self.drafts:
            lengths = [one.get("spec_accept_length", 1.0) for one in about]
            accepted = {"accepted": round(sum(lengths) / len(lengths), 3)}
        return {"steps": len(lines), "wall_ms": median(wall), **accepted,
                **{name: median([line[name] for line in lines]) for name in ("step_ms", "host_us", "plan_us")}}

    def time_prompts(self, prompts, shape, threshold, steps):
        """Medians of steps of prompts, until each request has its first token. prompts(): those of the next step."""
        lines = [line for line in self._steps_of(prompts, shape, threshold, 2 + steps) if "step_ms" in line][2:]
        found = {(line["requests"], line["queries"]) for line in lines}
        if found != {(shape.batch, shape.new)}:  # what the prefix cache had was not the context
            raise RuntimeError(f"steps of (requests, queries of each) {sorted(found)}")
        return {"steps": len(lines), "step_ms": median([line["step_ms"] for line in lines]),
                "host_us": median([line["host_us"] for line in lines])}

    def profile_prompts(self, prompts, shape, threshold):
        """What the scheduler found of their kernels."""
        profile = pathlib.Path(f"{self.steps}.profile")
        profile.touch()
        lines = self._steps_of(prompts, shape, threshold, LAST_OF_PROMPTS)
        profile.unlink(missing_ok=True)
        [*_, found] = [{}, *(line for line in lines if "profile" in line)]
        return {name: value for name, value in found.items() if name != "profile"}

    def _steps_of(self, prompts, shape, threshold, steps):
        self._lines()
        ask(self.steps, requests=shape.batch, threshold=threshold)
        for _ in range(steps):
            self.generate(prompts(), 1)
        ask(self.steps)
        return self._lines()

    def profile_decode(self, prompts):
        """Medians of replayed graphs, and what the scheduler found of its kernels."""
        wish = pathlib.Path(str(self.steps) + ".profile")
        wish.touch()
        self._lines()
        self.generate(prompts, (LAST + HELD) * (1 + self.drafts))
        wish.unlink(missing_ok=True)
        lines = self._lines()
        [*_, found] = [{}, *(line for line in lines if "profile" in line)]
        graphs = {name: median([line[name] for line in lines if line.get("held") and name in line])
                  for name in ("graph_ms", *(("draft_ms", "extend_ms") if self.drafts else ()))}
        return {**graphs, **{name: value for name, value in found.items() if name != "profile"}}


def measure_decoding(at, engine, rows, put):
    for context, batch in itertools.product(sorted(at.contexts), sorted(at.batches, reverse=True)):
        try:
            these = [row[:context] for row in rows[:batch]]
            put("decode", batch=batch, context=context, **engine.time_decode(these, at.steps),
                **engine.profile_decode(these))
        except Exception as error:  # the next shape may work
            put("decode", batch=batch, context=context, error=repr(error)[:500])


def measure_prompts(at, engine, rows, put):
    """Profiles behind all times, since a process that has profiled stays slower."""
    generator, found = random.Random(11), []
    for shape in shapes_of(at):
        contexts = [row[:shape.context] for row in rows[:shape.batch]]

        def prompts(contexts=contexts, new=shape.new):
            return [context + generator.choices(range(3, VOCABULARY), k=new) for context in contexts]

        for form in forms_of(at, engine.kind, shape):
            row = {"batch": shape.batch, "context": shape.context, "new": shape.new, "form": form}
            try:
                if shape.context:
                    engine.generate(contexts, 1)
                row |= engine.time_prompts(prompts, shape, FORMS[form], at.steps)
                found.append((row, prompts, shape, FORMS[form]))
            except Exception as error:  # the next shape may work
                put("prompts", **row, error=repr(error)[:500])
    for row, *how in found:
        try:
            if how[1].context:
                engine.generate([prompt[:how[1].context] for prompt in how[0]()], 1)
            put("prompts", **row, **engine.profile_prompts(*how))
        except Exception as error:  # the times stay
            put("prompts", **row, profile_error=repr(error)[:500])


def run_child(at):
    import torch

    *kind, heads, number, path = json.loads(at.child)
    kind = Kind(*kind)
    out = open(path, "w", buffering=1)

    def put(what, **result):
        out.write(json.dumps({"what": what, **kind.named(heads), **result}) + "\n")

    begin = time.monotonic()
    engine = Engine(at, kind, heads, number, os.environ[STEPS])
    put("engine", layers=at.layers, start_s=round(time.monotonic() - begin, 1), **engine.describe())
    sys.stdin.readline()  # until no other engine measures

    generator = torch.Generator().manual_seed(7)

    def tokens(count):
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    prompts = [tokens(count) for count in TEXT_PROMPTS]
    together = engine.texts(prompts)
    alone = []
    for prompt in prompts:
        engine.forget()
        alone += engine.texts([prompt])
    put("alone against batch", **difference(alone, together))
    if at.new:  # behind contexts that the cache keeps, and the same prompts as a whole
        behind = [prompt + tokens(40) for prompt in prompts[5:]]
        engine.forget()
        whole = engine.texts(behind)
        engine.forget()
        engine.generate(prompts[5:], 1)
        cached = engine.texts(behind)
        put("cached against whole", **difference(cached, whole))
        together += cached
    put("texts", texts=together)
    rows = [tokens(max(at.contexts)) for _ in range(max(at.batches))]
    (measure_prompts if at.new else measure_decoding)(at, engine, rows, put)
    put("done")
    out.close()
    engine.llm.shutdown()
    os._exit(0)


# --- over the processes ---


class Child:
    """A process with an engine."""

    def __init__(self, at, words, plugin, kind, heads, number):
        self.what = kind.named(heads)
        stem = os.path.join(at.work, "-".join(str(one) for one in (kind.backend, kind.page, heads, *kind[2:]) if one))
        self.path, self.log = stem + ".jsonl", stem + ".log"
        for old in (self.path, stem + ".steps", stem + ".steps.profile", stem + ".steps.asked"):
            pathlib.Path(old).unlink(missing_ok=True)
        environment = {**ENVIRONMENT, **os.environ, STEPS: stem + ".steps", DRAFTS: str(kind.drafts),
                       PROMPTS: str(int(bool(at.new)))}
        if at.sparse:  # whatever the caller's environment has, since nothing else tells the two apart
            environment["SGLANG_PLUGINS"] = PLUGINS + ",hypermla_sparse" * (kind.backend == "hypermla")
        found = [plugin, str(HERE), environment.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, found))
        command = [sys.executable, os.path.abspath(__file__), *words,
                   f"--child={json.dumps([*kind, heads, number, self.path])}"]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                                            env=environment, start_new_session=True, text=True)

    def results(self):
        if not os.path.exists(self.path):
            return []
        with open(self.path) as file:
            return [json.loads(line) for line in file if line.endswith("\n")]

    def wait_for(self, what, until):
        """Whether a result of this name came in time and in life."""
        while time.monotonic() < until:
            ended = self.process.poll() is not None or self._is_dying()
            if any(one["what"] == what for one in self.results()):
                return True
            if ended:
                return False
            time.sleep(0.2)
        return False

    def _is_dying(self):
        """Whether its scheduler has failed, after which SGLang waits a minute for a dump."""
        with open(self.log, errors="replace") as file:
            return "Scheduler hit an exception" in file.read()

    def measure(self, until):
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        self.wait_for("done", until)

    def end(self):
        """Its results; that it failed is one of them."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        results = self.results()
        if not any(one["what"] == "done" for one in results):
            with open(self.log, errors="replace") as file:
                lines = file.read().splitlines()
            said = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)][-3:] or lines[-5:]
            results.append({"what": "failed", **self.what, "said": [line[:300] for line in said]})
        return [one for one in results if one["what"] != "done"]


def write_plugin(work):
    """A distribution of nothing but an entry point, by which SGLang finds watch(). Returns where."""
    about = pathlib.Path(work) / "plugin" / "bench_sglang-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: bench_sglang\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[sglang.srt.plugins]\nbench_sglang = bench_sglang:watch\n")
    return str(about.parent)


def record_of(at, results):
    """What the file holds: no texts, and no files of the machine, which errors name."""
    kept = [dict(one) for one in results if one["what"] != "texts"]
    for one in kept:
        if "error" in one:
            one["error"] = without_paths(one["error"])
        if "said" in one:
            one["said"] = [without_paths(line) for line in one["said"]]
    return {"asked": {name: value for name, value in vars(at).items() if name not in ("child", "record", "work")},
            "results": kept}


def table(results):
    """Of steps that decode milliseconds of the replayed graph and of attention's kernels, microseconds of planning on
    the host; of prompts milliseconds of all kernels, of those of attention, and of the whole step."""
    rows, columns, values = {}, [], {"decode": ("graph_ms", "attention_ms", "plan_us"),
                                     "prompts": ("kernels_ms", "attention_ms", "step_ms")}
    for one in results:
        if one["what"] in values and "error" not in one:
            column = "/".join(str(one[name]) for name in (*Kind._fields, "form") if name in one)
            if column not in columns:
                columns.append(column)
            rows.setdefault((one["heads"], one["context"], one["batch"], one.get("new", 0)), {})[column] = one
    width = max([24, *map(len, columns)])
    lines = ["heads context batch   new | " + " | ".join(f"{name:>{width}}" for name in columns)]
    for shape, found in sorted(rows.items(), reverse=True):
        cells = [" ".join(f"{one.get(name) or 0:>7.3f}" for name in values[one["what"]])
                 if (one := found.get(column)) else "" for column in columns]
        lines.append("{:>5} {:>7} {:>5} {:>5} | ".format(*shape) + " | ".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join(lines)


def hopeless(one, engines, dead):
    """Whether an engine, (kind, heads), has nothing to be compared with: none of ours of as many heads starts."""
    ours = [(kind, heads) for kind, heads in engines if kind.backend == "hypermla" and heads == one[1]]
    return bool(ours) and one not in ours and dead.issuperset(ours)


def main():
    words = sys.argv[1:]
    at = parse(words)
    if at.child:
        return run_child(at)
    if any(kind.backend == "hypermla" for kind in kinds_of(at)) and missing_plugins("sglang.srt.plugins"):
        sys.exit(f"bench_sglang.py: {sys.executable} has no plug-ins of hypermla; install its wheel there, or name "
                 "other engines by --engines")
    os.makedirs(at.work, exist_ok=True)
    begin = time.monotonic()
    plugin, results = write_plugin(at.work), []
    engines = [(kind, heads) for heads in at.heads for kind in kinds_of(at)]
    for heads in at.heads:
        write_model(at, heads)
    dead = set()
    for first in range(0, len(engines), at.at_once):
        several = engines[first:first + at.at_once]
        left = at.seconds - (time.monotonic() - begin)
        out = {one: "the time is over" if left < 30 else "hypermla has failed" for one in several
               if left < 30 or hopeless(one, engines, dead)}
        children = {one: Child(at, words, plugin, *one, number) for number, one in enumerate(several, first)
                    if one not in out}
        started = time.monotonic() + min(at.limit, left)
        for one in sorted(children, key=lambda one: one[0].backend != "hypermla"):  # who decides about the others
            if hopeless(one, engines, dead):
                children[one].end()
                out[one] = "hypermla has failed"
            elif not children[one].wait_for("engine", started):
                dead.add(one)
        for one in several:
            left = at.seconds - (time.monotonic() - begin)
            if one in out:
                found = [{"what": "left out", **one[0].named(one[1]), "said": [out[one]]}]
            else:
                if one not in dead:
                    children[one].measure(time.monotonic() + min(at.limit, max(left, 0)))
                found = children[one].end()
            results += found
            for result in found:
                if result["what"] != "texts":
                    print(json.dumps(result), flush=True)
    texts = [one for one in results if one["what"] == "texts"]
    for heads in at.heads:
        reference, *others = [one for one in texts if one["heads"] == heads] or [None]
        for one in others:
            results.append({"what": "against", **{name: one[name] for name in (*Kind._fields, "heads") if name in one},
                            "reference": reference["backend"], "reference_page": reference["page"],
                            **({"reference_drafts": reference["drafts"]} if "drafts" in reference else {}),
                            **difference(one["texts"], reference["texts"])})
            print(json.dumps(results[-1]), flush=True)
    if at.record:
        scratch = at.record + ".tmp"
        with open(scratch, "w") as file:
            json.dump(record_of(at, results), file, indent=1)
            file.write("\n")
        os.replace(scratch, at.record)
    print(table(results), flush=True)
    return 0 if texts and not any(one["what"] == "failed" for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
