#!/usr/bin/env python3
"""Decodes with the real vLLM engine, over a small model of DeepSeek-V3's shape with random weights: do its attention
backends agree, and how long does a step take?

    tests/engines/bench_vllm.py --record=vllm.json
    tests/engines/bench_vllm.py --backends CUSTOM FLASHMLA --heads=16 --batches 1 32 --contexts 4096 --drafts 0

Every backend and number of drafts is a process of its own. Agreement: log-probabilities of greedy texts of 32 tokens,
against the first backend, and of prompts alone against the same prompts in one batch, which is the noise to compare
with. Times: medians of the steps, by events around the replayed graph; attention by the kernels that PyTorch's profiler
sees, and the pauses around them; the host's time in the metadata builder. Needs a GPU, vLLM, and this package where
Python finds it; CUSTOM is ours.
"""

import argparse
import collections
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib

VOCABULARY = 1024
# One process, no network, nothing optional.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1",
               "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_PLUGINS": "hypermla",
               "VLLM_USE_DEEP_GEMM": "0", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
               "NCCL_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
# Parts of the names of kernels that are attention. Writing the cache is not.
ATTENTION = ("mla", "latent", "plan_requests", "flash_fwd", "FlashAttn", "prepare_varlen", "_fwd_grouped",
             "_fwd_kernel_stage", "combine")


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["CUSTOM", "FLASHMLA", "FLASH_ATTN_MLA"])
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16000], help="tokens, at most 16000")
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3], help="n-gram drafts of a step")
    parser.add_argument("--steps", type=int, default=40, help="that are timed")
    parser.add_argument("--block", type=int, default=64, help="tokens of a block of the cache")
    parser.add_argument("--graphs", default="FULL_DECODE_ONLY", help="vLLM's cudagraph_mode")
    parser.add_argument("--mixed", action="store_true", help="requests have 0, 1, .. and all drafts in turn")
    parser.add_argument("--rounds", type=int, default=1, help="of all processes; every second one in reverse order")
    parser.add_argument("--invariant", action="store_true", help="with VLLM_BATCH_INVARIANT=1; agreement only")
    parser.add_argument("--memory", type=float, default=0.3, help="share of the GPU's memory that vLLM takes")
    parser.add_argument("--seconds", type=float, default=540, help="for everything; what is left out is said")
    parser.add_argument("--limit", type=float, default=170, help="seconds for one process")
    parser.add_argument("--record", help="file for all results, as JSON")
    parser.add_argument("--work", default=os.path.join(tempfile.gettempdir(), "bench_vllm"), help="model and logs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(words)


# --- in a process of one backend ---


def write_model(at):
    """A directory that vLLM takes for a DeepSeek-V3, without experts."""
    directory = os.path.join(at.work, f"model-{at.heads}-{at.layers}")
    os.makedirs(directory, exist_ok=True)
    hidden = 256
    config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
              "vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 2 * hidden,
              "moe_intermediate_size": 128, "num_hidden_layers": at.layers, "num_attention_heads": at.heads,
              "num_key_value_heads": at.heads, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
              "n_group": 1, "topk_group": 1, "first_k_dense_replace": at.layers, "moe_layer_freq": 1,
              "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
              "routed_scaling_factor": 1.0, "q_lora_rank": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
              "qk_nope_head_dim": 128, "v_head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 32768,
              "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
              "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_scaling": None,
              "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
              "eos_token_id": 1, "pad_token_id": 2, "use_cache": True, "num_nextn_predict_layers": 0}
    with open(os.path.join(directory, "config.json"), "w") as file:
        json.dump(config, file, indent=1)
    return directory


def use_normal_weights():
    """vLLM's dummy weights are so small that attention would not reach the logits."""
    import torch
    from vllm.model_executor.model_loader import dummy_loader

    @torch.no_grad()
    def fill(model, *_, **__):
        if not hasattr(model, "lm_head"):
            return  # a part of the model, which was filled as a whole
        for name, weights in model.named_parameters():
            if not torch.is_floating_point(weights) or weights.device.type == "meta":
                continue
            if "norm" in name or weights.dim() < 2:
                weights.fill_(1.0 if "norm" in name else 0.0)
                continue
            # Attention that looks at some tokens more than at others, and logits that differ.
            spread = 1.0 if "embed_tokens" in name else weights.shape[-1] ** -0.5
            spread *= 2.5 if "q_b_proj" in name else 4.0 if "lm_head" in name else 1.0
            generator = torch.Generator(device=weights.device).manual_seed(zlib.crc32(name.encode()))
            weights.copy_(spread * torch.randn(weights.shape, generator=generator, device=weights.device))

    dummy_loader.initialize_dummy_weights = fill


class Engine:
    """vLLM's engine, with a watch on its steps."""

    def __init__(self, at, backend, drafts):
        import torch
        from vllm import LLM

        queries = 1 + drafts
        sizes = {queries * requests for requests in {1, 2, 4, 8, 16, *at.batches}}
        if at.mixed:
            sizes |= {sum(i % queries + 1 for i in range(requests)) for requests in at.batches}
        arguments = {"model": write_model(at), "load_format": "dummy", "skip_tokenizer_init": True,
                     "dtype": "bfloat16", "seed": 1, "gpu_memory_utilization": at.memory, "max_model_len": 16384,
                     "max_num_seqs": max(8, *at.batches), "max_num_batched_tokens": 16384, "block_size": at.block,
                     "enable_prefix_caching": True, "attention_config": {"backend": backend},
                     "compilation_config": {"mode": 0, "cudagraph_mode": at.graphs,
                                            "cudagraph_capture_sizes": sorted(sizes)}}
        if drafts:
            arguments["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts,
                                               "prompt_lookup_min": 1, "prompt_lookup_max": 2}
        use_normal_weights()
        self.torch, self.llm = torch, LLM(**arguments)
        self.config = self.llm.llm_engine.vllm_config
        self._watch()
        if at.mixed:
            self._mix(queries)

    def _mix(self, queries):
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        update = scheduler.update_draft_token_ids

        def shortened(drafts):
            for i, tokens in enumerate(drafts.draft_token_ids):
                del tokens[i % queries:]
            update(drafts)

        scheduler.update_draft_token_ids = shortened

    def _watch(self):
        self.replays, self.batches, self.steps, self.built = [], [], [], []
        self.after_step = lambda number: None
        events, engine = self.torch.cuda.Event, self.llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        layer = next(iter(self.config.compilation_config.static_forward_context.values()))
        builder = layer.attn_backend.get_builder_cls()
        replay, schedule, step, build = self.torch.cuda.CUDAGraph.replay, scheduler.schedule, engine.step, builder.build

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
            self.steps.append((time.perf_counter(), self.batches[-1] if self.batches else (0, 0), len(self.replays)))
            self.after_step(len(self.steps))
            return output

        def timed_build(*arguments, **keywords):
            begin = time.perf_counter()
            output = build(*arguments, **keywords)
            self.built.append(time.perf_counter() - begin)
            return output

        self.torch.cuda.CUDAGraph.replay, builder.build = timed_replay, timed_build
        scheduler.schedule, engine.step = noted_schedule, noted_step

    def describe(self):
        layers = list(self.config.compilation_config.static_forward_context.values())
        import vllm

        return {"gpu": self.torch.cuda.get_device_name(), "vllm": vllm.__version__, "torch": self.torch.__version__,
                "implementation": type(layers[0].impl).__name__, "block": self.config.cache_config.block_size,
                "graphs": str(self.config.compilation_config.cudagraph_mode),
                "runner_v2": bool(getattr(self.config, "use_v2_model_runner", False))}

    def generate(self, prompts, tokens, logprobs=None):
        from vllm import SamplingParams

        how = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs)
        return self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], how, use_tqdm=False)

    def texts(self, prompts, tokens):
        """Greedy tokens, and the log-probabilities of the likeliest at each place."""
        return [{"ids": list(one.outputs[0].token_ids),
                 "logprobs": [{str(token): round(of.logprob, 5) for token, of in place.items()}
                              for place in one.outputs[0].logprobs]}
                for one in self.generate(prompts, tokens, 8)]

    def clear(self):
        for noted in (self.replays, self.batches, self.steps, self.built):
            noted.clear()

    def time_decode(self, prompts, steps):
        """Medians of decoding steps of all prompts at once, whose contexts the prefix cache keeps."""
        self.generate(prompts, 1)
        self.clear()
        self.generate(prompts, steps)
        self.torch.cuda.synchronize()
        wall, graph, replays, queries = [], [], [], []
        pairs = list(zip(self.steps, self.steps[1:]))[3:]
        for (begin, before, first), (end, batch, last) in pairs:
            if before[0] != len(prompts) or batch[0] != len(prompts):
                continue
            wall.append(1e3 * (end - begin))
            replays.append(last - first)
            queries.append(batch[1] / len(prompts))
            if last > first:
                graph.append(sum(a.elapsed_time(b) for a, b in self.replays[first:last]))
        return {"steps": len(wall), "wall_ms": median(wall), "graph_ms": median(graph), "replays": median(replays),
                "queries": median(queries), "builder_us": median([1e6 * one for one in self.built])}

    def profile_decode(self, prompts, tokens):
        """Milliseconds of a decoding step in kernels and in those of attention, and the mean pauses, in microseconds,
        between these and the kernels before and behind them; negative where they overlap."""
        from torch.profiler import ProfilerActivity, profile

        first, last = 4, 12  # steps; those before them begin the requests
        profiler = profile(activities=[ProfilerActivity.CUDA])

        def between(number):
            if number in (first, last):
                self.torch.cuda.synchronize()
                (profiler.start if number == first else profiler.stop)()

        self.clear()
        self.after_step = between
        self.generate(prompts, last * tokens + 2)
        self.after_step = lambda number: None
        spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in profiler.events()
                       if "CUDA" in str(event.device_type))
        spans = [span for span in spans if not span[2].startswith(("Memcpy", "Memset"))]
        kernels, before, behind = collections.Counter(), [], []
        for i, (begin, end, name) in enumerate(spans):
            kernels[name] += (end - begin) / 1e3 / (last - first)
            if is_attention(name) and 0 < i < len(spans) - 1:
                before += [] if is_attention(spans[i - 1][2]) else [begin - spans[i - 1][1]]
                behind += [] if is_attention(spans[i + 1][2]) else [spans[i + 1][0] - end]
        return {"kernels_ms": round(sum(kernels.values()), 4),
                "attention_ms": round(sum(ms for name, ms in kernels.items() if is_attention(name)), 4),
                "pause_before_us": median(before), "pause_behind_us": median(behind),
                "longest": [[name[:90], round(ms, 4)] for name, ms in kernels.most_common(6)]}


def is_attention(kernel):
    return any(part in kernel for part in ATTENTION) and "cache" not in kernel


def median(values):
    return round(statistics.median(values), 4) if values else None


def run_child(at):
    backend, drafts, path = json.loads(at.child)
    out = open(path, "w", buffering=1)

    def put(what, **result):
        out.write(json.dumps({"what": what, "backend": backend, "drafts": drafts, **result}) + "\n")

    begin = time.monotonic()
    engine = Engine(at, backend, drafts)
    put("engine", heads=at.heads, layers=at.layers, start_s=round(time.monotonic() - begin, 1), **engine.describe())

    generator = engine.torch.Generator().manual_seed(7)

    def tokens(count):
        return engine.torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    prompts = [tokens(count) for count in (5, 17, 64, 65, 200, 777, 2048, 5000)]
    together = engine.texts(prompts, 32)
    alone = []
    for prompt in prompts:
        engine.llm.reset_prefix_cache()
        alone += engine.texts([prompt], 32)
    put("texts", texts=together)
    put("alone against batch", **difference(alone, together))
    if at.invariant:
        return
    # Every token occurs, so that an n-gram drafter always finds one.
    shuffled = [engine.torch.randperm(VOCABULARY, generator=generator).tolist() for _ in range(max(at.batches))]
    rows = [some + tokens(max(at.contexts)) for some in shuffled]
    for context, batch in itertools.product(sorted(at.contexts), sorted(at.batches, reverse=True)):
        try:
            these = [row[:context + 1] for row in rows[:batch]]
            result = engine.time_decode(these, at.steps)
            put("decode", heads=at.heads, layers=at.layers, batch=batch, context=context, **result,
                **engine.profile_decode(these, 1 + drafts))
        except Exception as error:  # the next shape may work
            put("decode", batch=batch, context=context, error=repr(error)[:500])


# --- over the processes ---


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


def run_process(at, words, backend, drafts, seconds):
    """The results of one process; an error is one of them."""
    path = os.path.join(at.work, f"{backend}-{drafts}.jsonl")
    log = os.path.splitext(path)[0] + ".log"
    if os.path.exists(path):
        os.remove(path)
    environment = {**ENVIRONMENT, "VLLM_CACHE_ROOT": os.path.join(at.work, "cache"), **os.environ}
    if at.invariant:
        environment["VLLM_BATCH_INVARIANT"] = "1"
    command = [sys.executable, os.path.abspath(__file__), *words, f"--child={json.dumps([backend, drafts, path])}"]
    with open(log, "w") as file:
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment,
                                 start_new_session=True)
        try:
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            status = f"stopped after {seconds:.0f} s"
    results = []
    if os.path.exists(path):
        with open(path) as file:
            results = [json.loads(line) for line in file if line.endswith("\n")]
    if status != 0:
        with open(log, errors="replace") as file:
            lines = file.read().splitlines()
        said = [line[-300:] for line in lines if "Error" in line or "error:" in line][-3:] or lines[-5:]
        results.append({"what": "failed", "backend": backend, "drafts": drafts, "status": status, "said": said})
    return results


def table(results):
    """Milliseconds of a step, graph and attention, by backend."""
    rows, backends = {}, []
    for one in results:
        if one["what"] != "decode" or "error" in one:
            continue
        if one["backend"] not in backends:
            backends.append(one["backend"])
        key = one["drafts"], one["context"], one["batch"]
        rows.setdefault(key, {}).setdefault(one["backend"], []).append(one)
    lines = ["drafts context batch | " + " | ".join(f"{name:>27}" for name in backends),
             "                     | " + " | ".join(f"{'graph  attention  builder us':>27}" for _ in backends)]
    for (drafts, context, batch), found in sorted(rows.items()):
        cells = []
        for name in backends:
            of = found.get(name, [])
            graph = median([one["graph_ms"] or one["wall_ms"] for one in of])
            builder = median([one["builder_us"] or 0 for one in of])
            cells.append(f"{graph:>8.3f} {median([one['attention_ms'] for one in of]):>9.3f} {builder:>8.0f}"
                         if of else "")
        lines.append(f"{drafts:>6} {context:>7} {batch:>5} | " + " | ".join(f"{cell:>27}" for cell in cells))
    return "\n".join(lines)


def main():
    words = sys.argv[1:]
    at = parse(words)
    if at.child:
        return run_child(at)
    os.makedirs(at.work, exist_ok=True)
    begin = time.monotonic()
    results = []
    for number in range(at.rounds):
        order = list(itertools.product(at.drafts, at.backends))
        for drafts, backend in order if number % 2 == 0 else order[::-1]:
            left = at.seconds - (time.monotonic() - begin)
            if left < 30:
                found = [{"what": "left out", "backend": backend, "drafts": drafts, "said": "the time is over"}]
            else:
                found = run_process(at, words, backend, drafts, min(at.limit, left))
            results += [{**one, "round": number} for one in found]
            for one in found:
                if one["what"] != "texts":
                    print(json.dumps(one), flush=True)
    texts = [one for one in results if one["what"] == "texts"]
    for one in texts[1:]:
        results.append({"what": "against", "reference": texts[0]["backend"], "backend": one["backend"],
                        "drafts": one["drafts"], **difference(one["texts"], texts[0]["texts"])})
        print(json.dumps(results[-1]), flush=True)
    if at.record:
        asked = {name: value for name, value in vars(at).items() if name not in ("child", "record", "work")}
        scratch = at.record + ".tmp"
        with open(scratch, "w") as file:
            json.dump({"asked": asked, "results": [one for one in results if one["what"] != "texts"]}, file, indent=1)
            file.write("\n")
        os.replace(scratch, at.record)
    if not at.invariant:
        print(table(results), flush=True)
    return 0 if texts and not any(one["what"] == "failed" for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
