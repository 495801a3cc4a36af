"""The benchmark of vLLM's engine without an engine: what it measures, in which order, and how its record grows."""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "engines")]
import bench_vllm
import vllm_worker

MACHINE = {"device": {"name": "a GPU", "driver": "1"}, "versions": {"vllm": "0.26.0"}}


class Bench(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.work = pathlib.Path(scratch.name)
        self.asked = []
        self.machine = MACHINE

    def process(self, part, backend, number, wanted, agreement, at, until):
        """In place of a process of the engine."""
        self.asked.append((part.name, backend, number, list(wanted), agreement))
        found = [{"what": "engine", **self.machine, "start_s": 20.0}]
        if agreement:
            text = [{"ids": [1, 2], "logprobs": [{"1": -0.5}, {"2": -0.25 if backend == "CUSTOM" else -0.5}]}]
            found += [{"what": "texts", "texts": text}, {"what": "alone", **vllm_worker.difference(text, text)}]
        for batch, context, mixed in wanted:
            if batch == 32 and self.broken:
                said = "exit status 1; FileNotFoundError: '/home/someone/a.json' is away"
                found.append({"what": "failed", "said": said})
                break
            found.append({"what": "row", "batch": batch, "context": context, "mixed": mixed, "replays": 1,
                          "graph_ms": [1.0, 2.0], "wall_ms": [2.0, 3.0]})
        return found

    def run_bench(self, *words, broken=False):
        self.broken = broken
        record = self.work / "record.json"
        words = [f"--work={self.work}", f"--record={record}", *words]
        with mock.patch.object(bench_vllm, "run_process", self.process), \
             mock.patch.object(sys, "argv", ["bench_vllm.py", *words]), \
             contextlib.redirect_stdout(io.StringIO()) as said:
            status = bench_vllm.main()
        return status, json.loads(record.read_text()) if record.exists() else None, said.getvalue()

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
        _, record, _ = self.run_bench("--parts", "h16-samples", "h16-samples-shared", "--backends", "CUSTOM")
        runs = {run["part"]: run for run in record["runs"] if run["round"] == 0}
        self.assertNotIn("against", runs["h16-samples"])
        self.assertEqual(runs["h16-samples-shared"]["against"]["prompts_equal"], 1)
        self.assertEqual([[name for name in ("samples", "shares") if name in runs[part]] for part in
                          ("h16-d0", "h16-samples", "h16-samples-shared")], [[], ["samples"], ["samples", "shares"]])
        plain, shared = (part for part in bench_vllm.PARTS if part.samples)
        self.assertEqual((plain.shares, shared.shares, plain.shapes), (False, True, shared.shapes))

    def test_samples_share_the_prompt_alone(self):
        self.assertEqual(vllm_worker.samples_of([1, 2], [[3], [4, 5]]), [[1, 2, 3], [1, 2, 4, 5]])

    def test_kernels_that_overlap_count_once(self):
        spans = [(0, 2000, "gemm"), (1000, 4000, "latent a"), (2000, 5000, "latent b"), (3000, 3500, "latent c"),
                 (8000, 9000, "gemm")]
        times = vllm_worker.times_of(spans, 2)
        self.assertEqual((times["kernels_ms"], times["attention_ms"]), (3.0, 2.0))
        self.assertEqual(times["longest"][:2], [["gemm", 1.5], ["latent a", 1.5]])

    def test_runs_on_a_slow_host_are_repeated(self):
        def chosen(*hosts, least=None):
            speeds = iter([one for one in hosts for _ in range(3)])
            with mock.patch.object(vllm_worker, "host_us", lambda: next(speeds)):
                found = vllm_worker.while_the_host_is_fast(dict, 3, least)
            return [one["host_us"] for one in found]

        self.assertEqual(chosen(10, 11, 12), [10, 11, 12])
        self.assertEqual(chosen(20, 10, 11, 19, 12), [10, 11, 12])
        self.assertEqual(chosen(20, 21, 22, 23, 11, 25, least=10), [23, 11, 25])  # slow throughout: the record says so

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
                         [(number, [(32, 4096, False), (1, 4096, False)], False) for number in (0, 1)])
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
        plain = {(part.heads, part.drafts, *shape) for part in bench_vllm.PARTS for shape in part.shapes
                 if part.graphs == bench_vllm.DECODE_GRAPHS}
        for heads in (16, 128):
            for batch in (1, 32, 128, 256):
                for context in (2048, 4096):
                    self.assertIn((heads, 0, batch, context, False), plain)
            self.assertIn((heads, 0, 1, 32768, False), plain)
            for drafts in (3, 7):
                self.assertIn((heads, drafts, 32, 4096, False), plain)
        self.assertTrue(any(mixed for part in bench_vllm.PARTS for _, _, mixed in part.shapes))
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


if __name__ == "__main__":
    unittest.main()
