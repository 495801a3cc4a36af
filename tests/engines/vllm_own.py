#!/usr/bin/env python3
"""What vLLM itself has to say of a backend, with this library's: its benchmark of attention, its test of latent
attention's backends, its tests of batch invariance. Their files are taken as they are from vLLM's source, which its
source package on PyPI contains.

    tests/engines/vllm_own.py --source=vllm-0.26.0 --record=vllm_own.json benchmark backends determinism

benchmark    benchmarks/attention_benchmarks: all batches of mla_decode.yaml, with 128, 64, 32 and 16 heads, and of
             speculative_decode.yaml, by each backend with its own threshold of queries, which batches decode. 60 layers
             in a graph over one cache; us and min_us: median and least time of a layer. What the record holds is not
             measured again.
backends     tests/v1/attention/test_mla_backends.py, ours in FLASHMLA's place.
determinism  tests/v1/determinism/test_batch_invariance.py for --backends, with a small model of random weights whose
             tokens are bytes. Engines share the GPU, so each has 3 GiB of cache; their graphs are of decoding alone.

Tests are run by pytest, --processes at a time by pytest-xdist. Needs a GPU, vLLM, and this package where Python finds
it; CUSTOM is ours.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from xml.etree import ElementTree

from bench_vllm import ENVIRONMENT, FLASH_ATTN, FLASHMLA, OURS, write_record
from vllm_worker import machine, missing_plugins, without_paths

BENCHMARK = "benchmarks/attention_benchmarks"
TESTS = {"backends": "tests/v1/attention/test_mla_backends.py",
         "determinism": "tests/v1/determinism/test_batch_invariance.py"}
# DeepSeek-R1, of whose configuration test_mla_backends.py asks for these.
R1 = {"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
      "q_lora_rank": 1536, "vocab_size": 129280, "max_position_embeddings": 163840}
CACHE_BYTES = 3 << 30


# --- the plug-in of pytest: `-p vllm_own` ---


def pytest_addoption(parser):
    parser.addoption("--vllm_own", help="which tests, and the backends to try")


def pytest_configure(config):
    what, *backends = config.getoption("vllm_own").split()
    import hypermla.vllm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    hypermla.vllm.register()
    if what == "backends":
        register_backend(AttentionBackendEnum.FLASHMLA, hypermla.vllm.BACKEND)
        return
    import vllm.config  # first: what the next one imports imports it in a circle

    import utils  # the tests', which lists the backends that they try

    utils.BACKENDS[:] = backends

    class Small(vllm.LLM):
        """Engines that start side by side cannot look at what memory is free. One test names FLASH_ATTN, which is no
        backend of latent attention."""

        def __init__(self, **arguments):
            asked = arguments["attention_config"]
            if asked["backend"] not in backends:
                arguments |= {"attention_config": asked | {"backend": backends[0]}}
            super().__init__(**arguments | {
                "kv_cache_memory_bytes": CACHE_BYTES, "gpu_memory_utilization": 0.1,
                "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}})

    vllm.LLM = Small


# --- the tests ---


def write_byte_tokenizer(directory, longest):
    """For a model's directory: a token for each byte, and some that no text has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from vllm_model import VOCABULARY

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = letters + [f"<{i}>" for i in range(len(letters), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(os.path.join(directory, "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest}
    pathlib.Path(directory, "tokenizer_config.json").write_text(json.dumps(settings))


def run_tests(what, at):
    """The row of a record."""
    from vllm_model import write_checkpoint, write_model

    test, environment = at.source / TESTS[what], ENVIRONMENT | os.environ
    places = [str(place) for place in (pathlib.Path(__file__).resolve().parent, at.source, test.parent)]
    if what == "backends":
        # Its tests name the model, which is looked for below the working directory before it is on the network.
        model = pathlib.Path(write_model(at.work, 128, 61, 4096, False, **R1))
        named = at.work / "deepseek-ai/DeepSeek-R1"
        named.parent.mkdir(exist_ok=True)
        if not named.exists():
            named.symlink_to(model)
    else:
        model = write_checkpoint(at.work, at.heads, 2, 8192)
        write_byte_tokenizer(model, 8192)
        environment |= {"VLLM_TEST_MODEL": model, "VLLM_BATCH_INVARIANT": "1"}
    report, log = at.work / f"{what}.xml", at.work / f"{what}.log"
    report.unlink(missing_ok=True)
    (at.work / "pytest.ini").write_text("[pytest]\n")  # not vLLM's, which asks for plug-ins
    begin = time.time()
    with log.open("w") as file:
        ended = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:0] = {places}; import pytest; sys.exit(pytest.main())",
             "-p", "vllm_own", "--vllm_own", " ".join([what, *at.backends]), "-p", "no:cacheprovider",
             "-c", at.work / "pytest.ini", f"--confcutdir={at.source}/tests", f"--junitxml={report}", "-q",
             "-n", str(at.processes), *(["-k", at.only] if at.only else []), test],
            cwd=at.work, env=environment, stdout=file, stderr=subprocess.STDOUT)
    if not report.exists():
        stop(f"pytest ended with {ended.returncode} and no report; {log} says why")
    row = {"what": what, "file": TESTS[what], "seconds": round(time.time() - begin), "passed": 0, "failed": 0,
           "skipped": 0, "failures": {}}
    if what == "determinism":
        row |= {"heads": at.heads, "tests": {}}
    for case in ElementTree.parse(report).iter("testcase"):
        wrong = [one for one in case if one.tag in ("failure", "error")]
        outcome = "failed" if wrong else "skipped" if case.find("skipped") is not None else "passed"
        row[outcome] += 1
        if wrong:
            row["failures"][case.get("name")] = without_paths((wrong[0].get("message") or "").split("\n")[0][:200])
        if "tests" in row:
            row["tests"][case.get("name")] = outcome
    if at.only:
        row["only"] = at.only
    return row


# --- the benchmark ---


def cases_of(source):
    """(file of batches, batch, heads) of all that is measured."""
    import yaml

    for name, heads in (("mla_decode", (128, 64, 32, 16)), ("speculative_decode", (128, 16))):
        for spec in yaml.safe_load((source / BENCHMARK / "configs" / f"{name}.yaml").read_text())["batch_specs"]:
            yield from ((name, spec, count) for count in heads)


def measure(at, record, end):
    """Adds rows to the record until `end`; the number of those left."""
    import hypermla.vllm

    sys.path.insert(0, str(at.source / BENCHMARK))
    from common import BenchmarkConfig
    from mla_runner import run_mla_benchmark

    hypermla.vllm.register()
    rows = record["rows"]
    done, left = {(row["config"], row["spec"], row["heads"], row["backend"]) for row in rows}, 0
    for number, case in enumerate(cases_of(at.source)):
        name, spec, heads = case
        turn = number % len(at.backends)  # each is the first in turn
        for backend in at.backends[turn:] + at.backends[:turn]:
            if (*case, backend) in done:
                continue
            if time.time() > end:
                left += 1
                continue
            row = {"config": name, "spec": spec, "heads": heads, "backend": backend, "us": None, "min_us": None}
            asked = BenchmarkConfig(backend=backend, batch_spec=spec, num_layers=60, head_dim=576, num_q_heads=heads,
                                    num_kv_heads=1, block_size=128, device="cuda:0", kv_lora_rank=512,
                                    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
            try:
                found = dataclasses.asdict(run_mla_benchmark(backend, asked))
                row |= {"us": round(1e6 * found["median_time"], 2), "min_us": round(1e6 * found["min_time"], 2)}
            except Exception as error:  # whatever a backend does not do
                row["error"] = without_paths(str(error).split("\n")[0][:200])
            rows.append(row)
            write_record(at.record, record)
            print(json.dumps(row), flush=True)
    return left


# --- the program ---


def stop(sentence):
    sys.exit(f"vllm_own.py: {sentence}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["benchmark", *TESTS])
    parser.add_argument("--source", required=True, type=pathlib.Path, help="vLLM's source, of the version installed")
    parser.add_argument("--record", default="vllm_own.json", type=pathlib.Path, help="file of all results")
    parser.add_argument("--backends", nargs="+", help="of benchmark (default CUSTOM FLASHMLA FLASH_ATTN_MLA) and of "
                        "determinism (default CUSTOM)")
    parser.add_argument("--heads", type=int, default=16, help="of determinism's model (default 16)")
    parser.add_argument("--only", help="tests whose names match, as pytest's -k")
    parser.add_argument("--processes", type=int, default=8, help="of tests at a time (default 8)")
    parser.add_argument("--seconds", type=float, default=540, help="when benchmark stops (default 540)")
    parser.add_argument("--work", default=os.path.join(tempfile.gettempdir(), "vllm_own"), type=pathlib.Path,
                        help="models and logs")
    at = parser.parse_args()
    at.source, at.work, asked = at.source.resolve(), at.work.resolve(), at.backends
    for path in [BENCHMARK, *TESTS.values()]:
        if not (at.source / path).exists():
            stop(f"{at.source} has no {path}; unpack vLLM's source package and name its directory by --source")
    try:
        record = json.loads(at.record.read_text())
    except FileNotFoundError:
        record = {"schema": 1, "kind": "vllm_own", "command": "tests/engines/vllm_own.py", "rows": [], "tests": []}
    if record.get("kind") != "vllm_own":
        stop(f"{at.record} is no record of this program; name another file by --record")
    if missing_plugins("vllm.general_plugins"):
        stop(f"{sys.executable} has no plug-ins of hypermla; install its wheel there")
    at.work.mkdir(parents=True, exist_ok=True)
    record |= machine() | {"date": datetime.date.today().isoformat()}
    failed, end = 0, time.time() + at.seconds
    for what in at.what:
        at.backends = asked or ([OURS, FLASHMLA, FLASH_ATTN] if what == "benchmark" else [OURS])
        if what == "benchmark":
            left = measure(at, record, end)
            print(f"{left} rows are left for the next call", flush=True)
            continue
        row = run_tests(what, at)
        record["tests"] = [one for one in record["tests"]
                           if any(one.get(key) != row.get(key) for key in ("what", "heads", "only"))] + [row]
        write_record(at.record, record)
        print(json.dumps(row), flush=True)
        failed += row["failed"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
