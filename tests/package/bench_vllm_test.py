"""The benchmark of vLLM's engine without an engine: what it measures, in which order, and how its record grows."""

import contextlib
import io
import json
import math
import os
import pathlib
import sys
import tempfile
import time
import unittest
from unittest import mock

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "engines")]
import bench_vllm
import bench_vllm_server
import vllm_churn
import vllm_worker

MACHINE = {"device": {"name": "a GPU", "driver": "1"}, "versions": {"vllm": "0.26.0"}}


class Bench(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.work = pathlib.Path(scratch.name)
        self.asked = []
        self.machine, self.missing = MACHINE, set()

    def together(self, part, number, backends, wanted, agreement, *_):
        """In place of the processes of a part."""
        return {backend: self.process(part, backend, number, wanted, backend in agreement) for backend in backends}

    def process(self, part, backend, number, wanted, agreement):
        self.asked.append((part.name, backend, number, list(wanted), agreement))
        found = [{"what": "engine", **self.machine, "start_s": 20.0}]
        if agreement:
            text = [{"ids": [1, 2], "logprobs": [{"1": -0.5}, {"2": -0.25 if backend == "CUSTOM" else -0.5}]}]
            found += [{"what": "texts", "texts": text}, {"what": "alone", **vllm_worker.difference(text, text)}]
        for shape in wanted:
            if shape.batch == 32 and self.broken:
                said = "exit status 1; FileNotFoundError: '/home/someone/a.json' is away"
                found.append({"what": "failed", "said": said})
                break
            found.append({"what": "row", **shape._asdict(), "replays": 1, "graph_ms": [1.0, 2.0],
                          "wall_ms": [2.0, 3.0]})
        return found

    def run_bench(self, *words, broken=False, gpus=1):
        self.broken = broken
        record = self.work / "record.json"
        words = [f"--work={self.work}", f"--record={record}", *words]
        with mock.patch.object(bench_vllm, "run_together", self.together), \
             mock.patch.object(bench_vllm, "driver_versions", lambda: ["1"] * gpus), \
             mock.patch.object(bench_vllm, "missing_plugins", lambda group: self.missing), \
             mock.patch.object(sys, "argv", ["bench_vllm.py", *words]), \
             contextlib.redirect_stdout(io.StringIO()) as said:
            status = bench_vllm.main()
        return status, json.loads(record.read_text()) if record.exists() else None, said.getvalue()

    def test_what_would_measure_the_engine_alone_is_refused(self):
        self.missing = vllm_worker.missing_plugins("no group of anyone's")
        self.assertEqual(self.missing, {"hypermla", "hypermla_sparse"})
        with self.assertRaisesRegex(SystemExit, "has no plug-ins of hypermla; install its wheel there"):
            self.run_bench("--parts", "h16-d3")
        self.assertEqual(self.run_bench("--parts", "h16-d3", "--rounds=1", "--backends", "FLASHMLA")[0], 0)
        self.assertEqual({backend for _, backend, *_ in self.asked}, {"FLASHMLA"})

    def test_a_part_is_measured_in_both_orders(self):
        status, record, _ = self.run_bench("--parts", "h16-d3")
        self.assertEqual(status, 0)
        self.assertEqual([one[:3] for one in self.asked],
                         [("h16-d3", backend, 0) for backend in ("CUSTOM", "FLASH_ATTN_MLA", "FLASHMLA")] +
                         [("h16-d3", backend, 1) for backend in ("FLASHMLA", "FLASH_ATTN_MLA", "CUSTOM")])
        self.assertEqual([one[4] for one in self.asked], [True] * 3 + [False] * 3)
        self.assertEqual((record["device"], record["versions"]), (MACHINE["device"], MACHINE["versions"]))
        self.assertEqual(len(record["runs"]), 6)

    def test_one_round_alone(self):
        self.run_bench("--parts", "h16-d3", "--backends", "CUSTOM", "--rounds=1")
        self.assertEqual([one[:3] for one in self.asked], [("h16-d3", "CUSTOM", 0)])

    def test_backends_are_compared_with_ours(self):
        _, record, _ = self.run_bench("--parts", "h16-d0", "--batches", "1")
        runs = {run["backend"]: run for run in record["runs"] if run["round"] == 0}
        self.assertNotIn("against", runs["CUSTOM"])
        self.assertEqual(runs["FLASHMLA"]["against"]["logprob_max"], 0.25)
        self.assertEqual(runs["FLASHMLA"]["alone"]["prompts_equal"], 1)

    def test_samples_are_compared_with_samples_that_share_nothing(self):
        self.run_bench("--parts", "h16-d0", "--backends", "CUSTOM", "--batches", "1")
        backends = "CUSTOM", "CUSTOM/shared prefixes", "CUSTOM/prefix cache"
        _, record, _ = self.run_bench("--parts", "h16-samples", "--backends", *backends)
        runs = {run["backend"]: run for run in record["runs"] if run["round"] == 0 and run["part"] == "h16-samples"}
        self.assertNotIn("against", runs["CUSTOM"])
        for backend in backends:
            self.assertTrue(runs[backend]["samples"])
            if backend != "CUSTOM":
                self.assertEqual(runs[backend]["against"]["prompts_equal"], 1)

    def test_drafts_of_layers_are_compared_with_ours_by_the_same_method(self):
        self.run_bench("--parts", "h16-d0", "--backends", "CUSTOM", "--batches", "1")
        _, record, _ = self.run_bench("--parts", "h16-mtp3", "h16-eagle-d3", "--backends", "CUSTOM", "FLASHMLA")
        runs = {(run["part"], run["backend"]): run for run in record["runs"] if run["round"] == 0}
        for part, method in (("h16-mtp3", "mtp"), ("h16-eagle-d3", "eagle")):
            self.assertIs(runs[part, "CUSTOM"][method], True)
            self.assertNotIn("against", runs[part, "CUSTOM"])
            self.assertEqual(runs[part, "FLASHMLA"]["against"]["logprob_max"], 0.25)

    def test_tokens_of_a_step_are_those_behind_the_prompts(self):
        engine = vllm_worker.Engine.__new__(vllm_worker.Engine)
        engine.queries, engine.batches = 4, [(1, 5), *[(1, 4)] * 20, (0, 0), (1, 9), *[(1, 4)] * 11]
        self.assertEqual(engine.tokens_a_step(2), {"tokens_a_step": 2.0})
        engine.queries = 1
        self.assertEqual(engine.tokens_a_step(2), {})

    def test_samples_share_the_prompt_alone(self):
        self.assertEqual(vllm_worker.samples_of([[1, 2]], [[3], [4, 5]]), [[1, 2, 3], [1, 2, 4, 5]])
        self.assertEqual(vllm_worker.samples_of([[1], [2]], [[3], [4], [5]]), [[1, 3], [2, 4], [1, 5]])

    def test_engines_on_two_gpus_where_there_are_two(self):
        words = ["--parts", "h128-two", "h128-two-contexts", "--backends", "CUSTOM", "--batches", "1"]
        status, record, said = self.run_bench(*words, gpus=1)
        self.assertEqual((status, record, self.asked), (1, None, []))
        self.assertIn("h128-two-contexts: left out, since it needs 2 GPUs and nvidia-smi lists 1", said)
        _, record, _ = self.run_bench(*words, gpus=2)
        own, shared = record["runs"]
        self.assertEqual([(run["gpus"], run["contexts_shared"]) for run in (own, shared)], [(2, False), (2, True)])
        self.assertNotIn("against", own)
        self.assertEqual(shared["against"]["prompts_equal"], 1)

    def test_processes_of_other_gpus_are_told_what_the_first_is(self):
        class Process:
            def __init__(self, command, env, **_):
                self.at, self.stdin = json.loads(command[2]), io.StringIO()
                self.ranks = env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]

        with mock.patch.dict("os.environ"), mock.patch.object(vllm_worker.subprocess, "Popen", Process):
            others = vllm_worker.start_others({"gpus": 3, "rank": 0, "heads": 16, "path": "results"})
        self.assertEqual([other.ranks for other in others], [("1", "1", "3"), ("2", "2", "3")])
        self.assertEqual([other.at for other in others],
                         [{"gpus": 3, "rank": rank, "heads": 16, "path": "/dev/null"} for rank in (1, 2)])
        with open(self.work / "asked", "w+") as asked, mock.patch.object(sys, "stdin", asked):
            asked.write("time\nend\n")
            asked.seek(0)
            with mock.patch.object(vllm_worker.select, "select", lambda *_: ([asked], [], [])):
                self.assertEqual(list(vllm_worker.lines_until(math.inf, others)), ["time\n", "end\n"])
        self.assertEqual([other.stdin.getvalue() for other in others], ["time\nend\n"] * 2)

    def test_kernels_that_overlap_count_once(self):
        spans = [(0, 2000, "gemm"), (1000, 4000, "latent a"), (2000, 5000, "latent b"), (3000, 3500, "latent c"),
                 (8000, 9000, "gemm")]
        times = vllm_worker.times_of(spans, 2)
        self.assertEqual((times["kernels_ms"], times["attention_ms"]), (3.0, 2.0))
        self.assertEqual(times["longest"][:2], [["gemm", 1.5], ["latent a", 1.5]])

    def take_turns(self, hosts, failing=None, **limits):
        """Rows of two processes whose runs have these host_us, in turn; failing: the place of a run that does not
        work."""
        speeds, runs = iter(hosts), []

        class Worker:
            def __init__(self, backend):
                self.backend, self.ended = backend, None

            def ask(self, what, shape):
                if what == "prepare":
                    return {}
                runs.append(self.backend)
                if len(runs) - 1 == failing:
                    return {"what": "error", "error": "it broke"}
                times = {name: len(runs) for name in ("wall_ms", "graph_ms", "steps", "replays", "queries",
                                                      "builder_us", "forward_us")}
                return {"what": "run", **times, "host_us": next(speeds)}

        host, self.looks = bench_vllm.Host(), []
        host.look = lambda: self.looks.append(len(runs))
        with mock.patch.multiple(bench_vllm, **{"TURNS": 2, "MOST_TURNS": 4, **limits}):
            rows = bench_vllm.take_turns({one: Worker(one) for one in "ab"}, bench_vllm.Shape(1, 4096), host, math.inf)
        return rows, "".join(runs)

    def test_backends_take_turns_until_enough_are_fast(self):
        rows, runs = self.take_turns([10, 10, 10, 11])
        self.assertEqual(runs, "abba")  # none is always behind the same other
        self.assertEqual((rows["a"]["host_us"], rows["b"]["host_us"]), ([10, 11], [10, 10]))
        self.assertEqual((rows["a"]["wall_ms"], rows["b"]["wall_ms"]), ([1, 4], [2, 3]))
        self.assertEqual((rows["a"]["turns"], rows["a"]["fast"], bench_vllm.shape_of(rows["a"])),
                         (2, 2, bench_vllm.Shape(1, 4096)))

    def test_a_step_of_prompts_is_another_row(self):
        self.run_bench("--parts", "h16-prompts", "--backends", "CUSTOM", "--rounds=1", "--batches", "1")
        self.assertEqual([(shape.context, shape.new) for shape in self.asked[0][3]],
                         [(32768, 512), (8192, 512), (0, 16384), (0, 2048)])
        self.assertEqual(bench_vllm.shape_of({"batch": 1, "context": 0, "mixed": False, "new": 9}).new, 9)

    def test_a_turn_that_is_slow_for_one_counts_for_none(self):
        rows, runs = self.take_turns([10, 19, 10, 10, 10, 10])
        self.assertEqual(runs, "abbaab")
        self.assertEqual((rows["a"]["wall_ms"], rows["b"]["wall_ms"]), ([4, 5], [3, 6]))
        self.assertEqual((rows["b"]["turns"], rows["b"]["fast"]), (3, 2))

    def test_a_row_says_how_few_turns_were_fast(self):
        rows, runs = self.take_turns([10, 10, 20, 21, 10, 11.5, 22, 22])
        self.assertEqual(runs, "abbaabba")
        self.assertEqual((rows["a"]["host_us"], rows["b"]["host_us"]), ([10, 10], [10, 11.5]))
        self.assertEqual((rows["a"]["turns"], rows["a"]["fast"], self.looks), (4, 1, [0, 4]))

    def test_a_backend_that_fails_does_not_stop_the_others(self):
        rows, runs = self.take_turns([10, 10, 10, 10], failing=2)
        self.assertEqual(runs, "abba")
        self.assertEqual(rows["b"], {"batch": 1, "context": 4096, "mixed": False, "error": "it broke"})
        self.assertEqual((rows["a"]["wall_ms"], rows["a"]["fast"]), ([1, 4], 2))
        self.assertEqual(self.take_turns([10], failing=0, TURN_SECONDS=0)[1], "ab")

    def run_together(self, backends, fails):
        """What its processes are asked for and what they found; fails: the backend and where: at its start, with a
        shape or in none, and how it ends."""
        asked, (failing, at, how) = [], fails

        class Worker:
            def __init__(self, part, backend, *_):
                asked.append((backend, "start"))
                self.backend, self.ended, self.found = backend, None, []

            def wait(self):
                asked.append((self.backend, "wait"))
                self.ended = how if (self.backend, at) == (failing, "start") else None

            def stop(self):
                asked.append((self.backend, "stop"))

            def ask(self, what, shape):
                asked.append((self.backend, what, shape.batch))
                if self.ended or (self.backend, what, shape.batch) == (failing, "time", at):
                    self.ended = self.ended or how
                    return None
                names = "wall_ms", "graph_ms", "steps", "replays", "queries", "builder_us", "forward_us"
                return {**dict.fromkeys(names, 1), "host_us": 10} if what == "time" else {}

            def end(self):
                return self.found

        host = bench_vllm.Host()
        host.look = lambda: None
        part = next(part for part in bench_vllm.PARTS if part.name == "h16-d3")
        with mock.patch.multiple(bench_vllm, Worker=Worker, TURNS=2), contextlib.redirect_stdout(io.StringIO()) as said:
            found = bench_vllm.run_together(part, 1, backends, part.shapes, [], None, host, math.inf)
        return asked, {backend: [row["batch"] for row in rows] for backend, rows in found.items()}, said.getvalue()

    def test_where_ours_fails_the_others_stop(self):
        ours, other, failed = "CUSTOM", "FLASHMLA", "CUSTOM has failed, so "
        asked, found, said = self.run_together([ours, other], (ours, "start", "exit status 1"))
        self.assertEqual((asked, found), ([(ours, "start"), (other, "start"), (ours, "wait"), (other, "stop")],
                                          {ours: []}))
        self.assertIn(failed, said)
        asked, found, said = self.run_together([other, ours], (ours, "start", "exit status 1"))
        self.assertEqual((asked, found), ([(other, "start"), (ours, "start"), (ours, "wait"), (other, "stop")],
                                          {ours: []}))
        self.assertIn(failed, said)
        asked, found, said = self.run_together([ours, other], (ours, 32, "exit status 1"))
        self.assertEqual((found, {one[2] for one in asked[4:]}), ({ours: [128], other: [128]}, {128, 32}))
        self.assertEqual(asked.count((other, "time", 32)), 1)
        self.assertIn(failed, said)
        for fails in (other, 32, "exit status 1"), (ours, 32, bench_vllm.OVER), (None, None, None):
            asked, found, said = self.run_together([ours, other], fails)
            whole = {ours: [128, 32, 1], other: [128, 32, 1]}
            self.assertEqual((found, said), (whole | {fails[0]: [128]} if fails[0] else whole, ""))

    def test_engines_start_side_by_side_and_ours_is_waited_for_first(self):
        asked, _, _ = self.run_together(["FLASHMLA", "CUSTOM"], (None, None, None))
        self.assertEqual([one[:2] for one in asked[:6]],
                         [("FLASHMLA", "start"), ("CUSTOM", "start"), ("CUSTOM", "wait"), ("FLASHMLA", "wait"),
                          ("FLASHMLA", "prepare"), ("CUSTOM", "prepare")])

    def test_where_ours_does_not_start_other_rounds_are_left(self):
        process = self.process
        self.process = lambda part, backend, *rest: [{"what": "failed", "said": "exit status 1"}] if (
            backend == "CUSTOM" and part.name == "h16-d3") else process(part, backend, *rest)
        status, record, said = self.run_bench("--parts", "h16-d3", "h16-d3-mixed")
        self.assertEqual((status, [one[:3] for one in self.asked]),
                         (1, [("h16-d3", backend, 0) for backend in ("FLASH_ATTN_MLA", "FLASHMLA")] +
                             [("h16-d3-mixed", "CUSTOM", number) for number in (0, 1)]))
        self.assertIn("3 processes are left for the next call; 1 failed", said)

    def test_the_fastest_cores_one_thread_of_each(self):
        times, here = {4: 20, 5: 10, 6: 11, 7: 12}, []
        with mock.patch.multiple(bench_vllm, host_us=lambda: times[here[-1]], siblings=lambda cpu: cpu // 2), \
             mock.patch.object(bench_vllm.os, "sched_getaffinity", lambda _: set(times)), \
             mock.patch.object(bench_vllm.os, "sched_setaffinity", lambda _, cpus: here.append(min(cpus))), \
             contextlib.redirect_stdout(io.StringIO()):
            host = bench_vllm.Host()
            host.look()
        self.assertEqual((host.cpus, host.least), ([5, 6], 10))

    def test_the_host_is_looked_at_before_and_behind(self):
        for hosts, said in (((10, 12, 11, 9, 30, 31), 10), ((10, 12, 11, 22, 21, 23), 21)):
            with mock.patch.object(vllm_worker, "host_us", iter(hosts).__next__):
                self.assertEqual(vllm_worker.with_host_us(lambda: {"wall_ms": 1}), {"wall_ms": 1, "host_us": said})

    def test_deep_models_are_no_texts_of_others(self):
        self.run_bench("--parts", "h16-d0-deep", "--backends", "CUSTOM")
        self.assertEqual({one[4] for one in self.asked}, {False})
        self.assertEqual([part.layers for part in bench_vllm.PARTS if "deep" in part.name], [16, 16])

    def test_a_second_call_measures_what_is_missing(self):
        words = ["--parts", "h16-d3", "--backends", "CUSTOM"]
        status, record, _ = self.run_bench(*words, broken=True)
        self.assertEqual(status, 1)
        self.assertEqual([row["batch"] for row in record["runs"][0]["rows"]], [128])
        self.assertEqual(record["runs"][0]["failed"], "exit status 1; FileNotFoundError: '<path>' is away")
        self.asked.clear()
        status, record, said = self.run_bench(*words)
        self.assertEqual(status, 0)
        self.assertEqual([one[2:] for one in self.asked],
                         [(number, [*map(bench_vllm.Shape, (32, 1), (4096, 4096))], False) for number in (0, 1)])
        self.assertEqual([row["batch"] for row in record["runs"][0]["rows"]], [1, 32, 128])
        self.assertNotIn("failed", record["runs"][0])
        self.assertIn("0 processes are left", said)
        self.asked.clear()
        self.run_bench(*words)
        self.assertEqual(self.asked, [])

    def test_the_time_is_kept(self):
        status, record, said = self.run_bench("--parts", "h16-d3", "--seconds=10")
        self.assertEqual((status, record, self.asked), (1, None, []))
        self.assertIn("6 processes are left", said)

    def test_records_of_other_machines_and_kinds_are_refused(self):
        self.run_bench("--parts", "h128-invariant")
        self.machine = MACHINE | {"versions": {"vllm": "0.33.0"}}
        with self.assertRaisesRegex(SystemExit, "name another file"):
            self.run_bench("--parts", "h16-d3")
        (self.work / "record.json").write_text('{"schema": 1, "kind": "sparse"}')
        with self.assertRaisesRegex(SystemExit, "no record of this benchmark"):
            self.run_bench("--parts", "h16-d3")

    def test_what_the_parts_cover(self):
        plain = {(part.heads, part.drafts, shape) for part in bench_vllm.PARTS for shape in part.shapes
                 if part.graphs == bench_vllm.DECODE_GRAPHS}
        for heads in (16, 128):
            for batch in (1, 32, 128, 256):
                for context in (2048, 4096):
                    self.assertIn((heads, 0, bench_vllm.Shape(batch, context)), plain)
            self.assertIn((heads, 0, bench_vllm.Shape(1, 32768)), plain)
            for context in (0, 8192):
                self.assertTrue(any((heads, 0, context) == (*one[:2], one[2].context) and one[2].new for one in plain))
            for drafts in (3, 7):
                self.assertIn((heads, drafts, bench_vllm.Shape(32, 4096)), plain)
        self.assertTrue(any(shape.mixed for part in bench_vllm.PARTS for shape in part.shapes))
        self.assertEqual(len({part.name for part in bench_vllm.PARTS}), len(bench_vllm.PARTS))

    def test_texts_are_compared_up_to_where_they_part(self):
        place = lambda value: {"7": value, "8": -1.0}
        one = [{"ids": [7, 7, 7], "logprobs": [place(-1.0), place(-1.0), place(-1.0)]}]
        other = [{"ids": [7, 8, 7], "logprobs": [place(-1.0), place(-1.5), place(-9.0)]}]
        found = vllm_worker.difference(one, other)
        self.assertEqual((found["prompts_equal"], found["tokens_before_parting"], found["logprob_max"]), (0, 1, 0.5))

    def test_errors_name_no_files_of_the_machine(self):
        for text, clean in (("No such file: '/root/a/b.so'", "No such file: '<path>'"),
                            ("~/x/y.py:3: 1/2 of it", "<path>:3: 1/2 of it"), ("heads/queries", "heads/queries")):
            self.assertEqual(vllm_worker.without_paths(text), clean)


# Answers as `vllm serve` does: tokens that follow from the prompt, half of the drafts accepted.
SERVER = '''
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        name = "vllm:spec_decode_num_%s_tokens_total{engine=\\"0\\"} %s.0"
        self.answer(name % ("draft", 30) + "\\n" + name % ("accepted", 15) if self.path == "/metrics" else "")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = [(sum(asked["prompt"]) + i) % 1024 for i in range(asked["max_tokens"])]
        places = [{f"token_id:{token}": -0.5} for token in ids]
        self.answer(json.dumps({"choices": [{"token_ids": ids, "logprobs": {"top_logprobs": places}}]}))

if "CUSTOM" in str(sys.argv) and "silent" not in sys.argv[2]:
    print("HyperMLA decodes requests of up to 1 queries", "HyperMLA prefills new tokens", sep="\\n", flush=True)
if "dead" in sys.argv[2]:
    sys.exit("RuntimeError: no GPU")
port = next(int(word[7:]) for word in sys.argv if word.startswith("--port="))
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
'''


class ServerBench(unittest.TestCase):
    """The benchmark of vLLM's server, with one that only answers."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.work = pathlib.Path(scratch.name)
        module = self.work / "vllm/entrypoints/cli/main.py"
        module.parent.mkdir(parents=True)
        for folder in (module.parent, *module.parent.parents[:2]):
            (folder / "__init__.py").touch()
        module.write_text(SERVER)
        self.servers = []
        self.addCleanup(lambda: [server.end() for server in self.servers])

    def measured(self, *kinds, checkpoint="model", requests=(1, 3), seconds=60):
        at = bench_vllm_server.parse([f"--work={self.work}"])
        with mock.patch.dict(os.environ, {"PYTHONPATH": str(self.work)}), contextlib.redirect_stdout(io.StringIO()):
            self.servers += [bench_vllm_server.Server(checkpoint, kind, at) for kind in kinds]
            return bench_vllm_server.measured(self.servers, requests, time.time() + seconds)

    def test_servers_are_asked_in_turns(self):
        ours, drafts = self.measured("CUSTOM", "FLASHMLA/3")
        self.assertEqual([row["requests"] for row in ours["rows"]], [1, 3])
        self.assertEqual([len(row["first_ms"]) for row in drafts["rows"]], [bench_vllm_server.TURNS] * 2)
        self.assertEqual((drafts["accepted"], drafts["drafts"], drafts["against"]["prompts_equal"]), (15, 30, 8))
        self.assertFalse({"accepted", "against"} & ours.keys())

    def test_loads_beyond_the_time_are_left_out(self):
        self.assertEqual(self.measured("CUSTOM", requests=())[0]["rows"], [])
        with contextlib.redirect_stdout(io.StringIO()) as said:
            self.assertEqual(bench_vllm_server.rows_of(self.servers, 1, time.time() - 1), {})
        self.assertIn("requests=1: left out", said.getvalue())

    def test_servers_that_do_not_start_or_use_others_kernels_end_it(self):
        with self.assertRaisesRegex(SystemExit, "the server CUSTOM ended with status 1: .*no GPU"):
            self.measured("CUSTOM", checkpoint="dead")
        self.servers.clear()
        with self.assertRaisesRegex(SystemExit, "the server CUSTOM/3 does not say that it uses ours"):
            self.measured("CUSTOM/3", checkpoint="silent")


class Churn(unittest.TestCase):
    def test_both_orders_have_the_same_requests(self):
        waves, others = vllm_churn.requests_of(200, False), vllm_churn.requests_of(200, True)
        self.assertEqual(sum(map(len, waves)), 200)
        for one, other in zip(waves, others, strict=True):
            self.assertNotEqual([request[1] for request in one], [request[1] for request in other])
            self.assertEqual([request[1:] for request in one], sorted(request[1:] for request in other))
            self.assertEqual([request[0] for request in one], [request[0] for request in other])
            self.assertEqual(one, sorted(one))
            self.assertGreater(vllm_churn.TOKENS, max(len(prompt) + count for *_, prompt, count in one))

    def test_what_is_strange(self):
        likely = lambda *tokens: {str(token): -1.0 for token in tokens}
        text = {"ids": [1, 2, 3], "logprobs": [likely(1, 5, 6, 7), likely(2, 5, 6, 7), likely(3, 5, 6, 7)]}
        for ids, changed, found in (([1, 2, 3], {}, 0), ([1, 2, 3], {1: likely(2, 5, 8, 9)}, 0),
                                    ([1, 2, 3], {1: likely(2, 8, 9, 10)}, 1),
                                    ([1, 4, 3], {1: likely(4, 8, 9, 10)}, 1),  # where they part
                                    ([1, 4, 3], {2: likely(8, 9, 10, 11)}, 0)):  # behind that
            other = {"ids": ids, "logprobs": [changed.get(i, one) for i, one in enumerate(text["logprobs"])]}
            self.assertEqual(vllm_churn.strange([text, text], [text, other]), found, (ids, changed))

    def test_what_is_shared_and_never_strange_is_right(self):
        text = {"ids": [1], "logprobs": [{"1": -1.0, "2": -2.0, "3": -3.0}]}
        wrong = {"ids": [4], "logprobs": [{"4": -1.0, "5": -2.0, "6": -3.0}]}
        for said, blind, shared, right in ((text, wrong, 10, True), (text, wrong, 0, False), (wrong, wrong, 10, False),
                                           (text, text, 10, False)):
            texts = {"with": said, "with, blind": blind}
            found = {engine: {"texts": [texts.get(engine, text)], "counts": {"tokens_shared": shared}}
                     for engine in vllm_churn.ENGINES}
            rows, verdict = vllm_churn.rows_of("plain", found)
            self.assertEqual(verdict, right)
            self.assertEqual([row["engine"] for row in rows], list(vllm_churn.ENGINES))
            self.assertNotIn("strange", rows[0])


if __name__ == "__main__":
    unittest.main()
