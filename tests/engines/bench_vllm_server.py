#!/usr/bin/env python3
"""`vllm serve` as users start it, over a small checkpoint of DeepSeek-V3's shape with random weights: does it serve by
our kernels, do the texts of backends agree, how long do a start, prompts and tokens take?

    tests/engines/bench_vllm_server.py --record=vllm_server.json
    tests/engines/bench_vllm_server.py --servers CUSTOM FLASHMLA CUSTOM/3 --heads 16

A server is `vllm serve <checkpoint> --attention-backend <backend>` with vLLM's own settings, torch.compile and graphs
of prompts among them; what is added bounds memory, so that all servers live at once on one GPU, and drafts of the
checkpoint's MTP layer. They start side by side, each with empty caches, then answer by HTTP in turns, all on the same
few cores, the fastest at the moment, since one works at a time. `first_ms` is the time until all of some requests have
a first token, behind prompts of 2048 that the server has not seen; `token_ms` that of each of 129 tokens behind the
same prompts, which the prefix cache has. Both hold all that the server does.

The checkpoint has a tokenizer and weights by which some tokens follow from the last one, as an MTP layer guesses them,
and others from attention: some drafts are accepted, others not. Greedy texts of 32 tokens are compared with ours
without drafts, and those of prompts alone with the same prompts together, which is the noise to compare with.

Needs a GPU, vLLM, and this package where Python finds it; CUSTOM is ours.
"""

import argparse
import concurrent.futures
import datetime
import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

from bench_vllm import ENVIRONMENT, FLASH_ATTN, FLASHMLA, OURS, Host, write_record
from vllm_model import VOCABULARY, write_checkpoint
from vllm_worker import GREEDY_TOKENS, TEXT_PROMPTS, difference, machine, median, missing_plugins

LAYERS = 4
TOKENS = 16384  # a model's longest
TIMED_TOKENS = 128
PROMPT_TOKENS = 2048
TURNS = 5
SERVERS = [f"{backend}{drafts}" for drafts in ("", "/3") for backend in (OURS, FLASH_ATTN, FLASHMLA)]
OURS_SAY = ("HyperMLA decodes requests", "HyperMLA prefills")  # in the log of a server that uses ours


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", metavar="BACKEND[/DRAFTS]", default=SERVERS,
                        help=f"drafts are the MTP layer's (default: {' '.join(SERVERS)})")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="at once")
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=400, help="for everything (default 400)")
    parser.add_argument("--record", default="vllm_server.json", help="file of the results, which is replaced")
    parser.add_argument("--work", default=os.path.join(tempfile.gettempdir(), "bench_vllm_server"),
                        help="checkpoint, caches and logs")
    return parser.parse_args(words)


def stop(sentence):
    sys.exit(f"bench_vllm_server.py: {sentence}")


# --- a server ---


class Server:
    def __init__(self, checkpoint, kind, at):
        self.kind, (backend, _, drafts) = kind, kind.partition("/")
        self.drafts = int(drafts or 0)
        self.name = os.path.join(at.work, kind.replace("/", "-"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        words = ["serve", checkpoint, "--attention-backend", backend, "--host=127.0.0.1", f"--port={self.port}",
                 f"--max-model-len={TOKENS}", "--max-num-seqs=64", "--gpu-memory-utilization=0.08",
                 f"--kv-cache-memory-bytes={2 << 30}", "--served-model-name=small"]
        if self.drafts:
            words.append("--speculative-config=" + json.dumps({"method": "mtp", "num_speculative_tokens": self.drafts}))
        environment = {**ENVIRONMENT, **os.environ, "VLLM_CACHE_ROOT": f"{self.name}.cache",
                       "TORCHINDUCTOR_CACHE_DIR": f"{self.name}.inductor", "TRITON_CACHE_DIR": f"{self.name}.triton"}
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # a server has its engine in a process of its own
        self.begin = time.monotonic()
        with open(f"{self.name}.log", "w") as log:
            self.child = subprocess.Popen([sys.executable, "-m", "vllm.entrypoints.cli.main", *words], stdout=log,
                                          stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        self.start_s = None

    def log(self):
        with open(f"{self.name}.log", errors="replace") as file:
            return file.read()

    def get(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def ready(self):
        """Whether it answers. It notes when that was so first; where it has ended, the benchmark stops."""
        if self.start_s is not None:
            return True
        if self.child.poll() is not None:
            said = [line for line in self.log().splitlines() if "Error" in line or "error:" in line]
            stop(f"the server {self.kind} ended with status {self.child.returncode}: {said[-1:]}; "
                 f"its log is {self.name}.log")
        try:
            if self.get("/health")[0] != 200:
                return False
        except OSError:
            return False
        self.start_s = round(time.monotonic() - self.begin, 1)
        return True

    def complete(self, prompt, tokens, logprobs=None):
        body = {"model": "small", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "logprobs": logprobs, "return_tokens_as_token_ids": True, "return_token_ids": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        said = answer.read().decode()
        if answer.status != 200:
            stop(f"the server {self.kind} answered {answer.status}: {said[:300]}")
        return json.loads(said)["choices"][0]

    def at_once(self, prompts, tokens, logprobs=None):
        """Milliseconds until all are answered, and the answers."""
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as threads:
            begin = time.perf_counter()
            found = list(threads.map(lambda prompt: self.complete(prompt, tokens, logprobs), prompts))
            return 1e3 * (time.perf_counter() - begin), found

    def texts(self, prompts):
        """As difference() takes them."""
        number = lambda token: token.removeprefix("token_id:")
        return [{"ids": one["token_ids"],
                 "logprobs": [{number(token): value for token, value in of.items()}
                              for of in one["logprobs"]["top_logprobs"]]}
                for one in self.at_once(prompts, GREEDY_TOKENS, 8)[1]]

    def accepted(self):
        """How many drafts were accepted, and how many there were, by the server's own counters."""
        counts = dict(re.findall(r"^vllm:spec_decode_num_(\w+)_tokens_total\S* ([\d.e+]+)$", self.get("/metrics")[1],
                                 re.MULTILINE))
        return [int(float(counts[name])) for name in ("accepted", "draft")]

    def stay_on(self, cpus):
        """All threads of its processes, which share a session."""
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if os.getsid(int(process.name)) == self.child.pid:
                    for thread in os.listdir(process / "task"):
                        os.sched_setaffinity(int(thread), cpus)
            except (ProcessLookupError, FileNotFoundError):  # it has ended
                pass

    def end(self):
        if self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()


# --- what is asked ---


def drawn(seed, count):
    dice = random.Random(seed)
    return [dice.randrange(3, VOCABULARY) for _ in range(count)]


def rows_of(servers, requests, end):
    """{server: its row} of so many requests, in turns; {} where the time does not last."""
    rows, host = {server: {"requests": requests, "first_ms": [], "token_ms": []} for server in servers}, Host()
    host.look()
    for server in servers:
        server.stay_on(host.cpus)
    for turn in range(-1, TURNS):  # the first does not count
        prompts = [drawn(f"{turn} {requests} {i}", PROMPT_TOKENS) for i in range(requests)]
        for server in servers[::-1 if turn % 2 else 1]:
            if time.time() > end:
                print(f"requests={requests}: left out, since the time is over; give more by --seconds", flush=True)
                return {}
            first, _ = server.at_once(prompts, 1)
            whole, _ = server.at_once(prompts, TIMED_TOKENS + 1)
            if turn >= 0:
                rows[server]["first_ms"].append(round(first, 2))
                rows[server]["token_ms"].append(round(whole / (TIMED_TOKENS + 1), 4))
    for server, row in rows.items():
        print(f"{server.kind} requests={requests}: "
              + ", ".join(f"{name} {median(row[name])}" for name in ("first_ms", "token_ms")), flush=True)
    return rows


def measured(servers, requests, end):
    while not all([server.ready() for server in servers]):
        if time.time() > end:
            late = ", ".join(one.kind for one in servers if one.start_s is None)
            stop(f"the time is over before all servers have started: {late}; give more by --seconds")
        time.sleep(0.2)
    for server in servers:
        lines = [line.strip() for line in server.log().splitlines() if "HyperMLA" in line]
        if server.kind.startswith(OURS) and not all(any(says in line for line in lines) for says in OURS_SAY):
            stop(f"the server {server.kind} does not say that it uses ours; its log is {server.name}.log")
        print(f"{server.kind}: started in {server.start_s} s", flush=True)
    prompts = [drawn(f"text {count}", count) for count in TEXT_PROMPTS]
    found = {server: server.texts(prompts) for server in servers}
    ours = next((one for one in servers if one.kind == OURS), servers[0])
    runs = []
    for server in servers:
        alone = [server.texts([prompt[::-1]])[0] for prompt in prompts]
        together = server.texts([prompt[::-1] for prompt in prompts])
        runs.append({"server": server.kind, "start_s": server.start_s, "alone": difference(alone, together),
                     "rows": []})
        if server is not ours:
            runs[-1]["against"] = difference(found[server], found[ours])
        print(json.dumps(runs[-1]), flush=True)
    for rows in (rows_of(servers, count, end) for count in requests):
        for server, run in zip(servers, runs):
            run["rows"] += [rows[server]] if rows else []
    for server, run in zip(servers, runs):
        if server.drafts:
            run["accepted"], run["drafts"] = server.accepted()
    return runs


def main():
    at = parse(sys.argv[1:])
    if any(kind.startswith(OURS) for kind in at.servers) and missing_plugins("vllm.general_plugins"):
        stop(f"{sys.executable} has no plug-ins of hypermla; install its wheel there, or name others by --servers")
    import torch

    if not torch.cuda.is_available():
        stop("PyTorch finds no GPU here; run it on a machine that has one")
    end = time.time() + at.seconds
    os.makedirs(at.work, exist_ok=True)
    checkpoint = write_checkpoint(at.work, at.heads, LAYERS, TOKENS)
    record = {"schema": 1, "kind": "vllm_server", "command": "tests/engines/bench_vllm_server.py",
              "date": datetime.date.today().isoformat(), **machine(),
              "heads": at.heads, "layers": LAYERS, "prompt_tokens": PROMPT_TOKENS, "runs": []}
    servers = []
    try:
        servers += [Server(checkpoint, kind, at) for kind in at.servers]
        record["runs"] = measured(servers, at.requests, end)
    finally:
        for server in servers:
            server.end()
    write_record(at.record, record)


if __name__ == "__main__":
    main()
