"""The benchmarks run on a machine without a GPU, and what they write is whole."""

import csv
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import unittest
import xml.etree.ElementTree

from support import BUILD, CHECKOUT, CommandCase

BENCHMARKS = CHECKOUT / "tests/benchmark"
TINY = ["--b=1", "--t=64", "--h=2", "--device=cpu", "--seconds=0"]


class FreshClone(CommandCase):
    def test_help_needs_no_package(self):
        for path in sorted([*BENCHMARKS.glob("bench_*.py"),
                            CHECKOUT / "tests/engines/bench_context_parallel.py"]):
            with self.subTest(path.name):
                environment = {**os.environ, "HYPERMLA_TEST_BUILD": str(self.directory), "PYTHONNOUSERSITE": "1"}
                done = subprocess.run([sys.executable, "-S", path, "--help"], env=environment, cwd=self.directory,
                                      text=True, capture_output=True, timeout=300)
                self.assertEqual(done.returncode, 0, done)
                self.assertIn("usage: " + path.name, done.stdout)
        for name in ("bench_engine", "bench_prefill"):
            listed = subprocess.run([sys.executable, "-S", BENCHMARKS / f"{name}.py", "--list"], env=environment,
                                    text=True, cwd=self.directory, capture_output=True, timeout=300)
            self.assertEqual((listed.returncode, listed.stderr), (0, ""))
            self.assertGreater(len(listed.stdout.splitlines()), 5)
        done = subprocess.run([sys.executable, "-S", BENCHMARKS / "bench_all_mla.py", *TINY], env=environment,
                              text=True, cwd=self.directory, capture_output=True, timeout=300)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr,
                         r"^bench_all_mla.py: the Python package is not built; run .*/scripts/build_package.sh")

    def test_the_first_use_builds_the_package(self):
        """In a clone whose build is replaced by a script that says so and makes a package of one function."""
        clone = self.directory / "clone"
        shutil.copytree(BENCHMARKS, clone / "tests/benchmark")
        script = clone / "scripts/build_package.sh"
        script.parent.mkdir()
        script.write_text('#!/bin/sh\necho building >&2\nmkdir -p "$PWD/clone/build/python/hypermla"\n'
                          'echo "def list(): return []" >"$PWD/clone/build/python/hypermla/__init__.py"\n')
        script.chmod(0o755)
        environment = {key: value for key, value in os.environ.items() if key != "HYPERMLA_TEST_BUILD"}

        def bench():
            return subprocess.run([sys.executable, "-S", clone / "tests/benchmark/bench_mla_var6_plus_v3.py", *TINY],
                                  env=environment, text=True, cwd=self.directory, capture_output=True, timeout=300)
        done = bench()
        self.assertIn("building\n", done.stderr)
        self.assertIn("bench_mla_var6_plus_v3.py: this build has no mla_var6_plus v3", done.stderr)  # it was asked
        self.assertNotIn("building", bench().stderr)
        shutil.rmtree(clone / "build")
        script.write_text("#!/bin/sh\nexit 1\n")
        self.assertRegex(bench().stderr, r"^bench_mla_var6_plus_v3.py: the Python package is not built; run .*\n$")


@unittest.skipUnless((BUILD / "python/hypermla/_hypermla.abi3.so").exists(), "this build has no Python package")
class Benchmarks(CommandCase):
    def bench(self, name, *words, status=0):
        done = subprocess.run([sys.executable, BENCHMARKS / f"{name}.py", *TINY, f"--out_dir={self.directory}", *words],
                              cwd=self.directory, capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, status, done)
        return done

    def rows(self):
        with open(self.directory / "comparison.csv", newline="") as file:
            return list(csv.DictReader(file))

    def test_all_kernels_of_one_shape(self):
        done = self.bench("bench_all_mla", "--s=1", "--only=cutile.mla.flash")
        rows = self.rows()
        self.assertEqual({row["kernel"] for row in rows},
                         {f"cutile.mla.{name}" for name in ("flash_mla", "flash_mla_split_kv", "flash_attention")})
        for row in rows:
            self.assertGreater(float(row["burst_us"]), 0, row)
            self.assertEqual(row["note"], "")
        self.assertIn("FlashMLA + bmm: skipped, no library given (--flashmla=<path>)", done.stdout)
        self.assertTrue((self.directory / "comparison.md").read_text().startswith("# b=1, s=1, t=64, h=2"))

    def test_the_envelope_and_its_record(self):
        record = self.directory / "envelope.json"
        done = self.bench("bench_envelope", "--s_values=1,4", "--no_prefixes", f"--record={record}", "--near=1")
        envelope = json.loads(record.read_text())
        self.assertEqual((envelope["kind"], envelope["problem"]["t"]), ("envelope", 64))
        for s in (1, 4):
            paths = {row["path"] for row in envelope["rows"] if row["s"] == s and "burst_us" in row}
            self.assertLessEqual({"latent", "decompressed"}, paths)
        self.assertIn("Mispredictions beyond 5 %:", done.stdout)  # the model was not fitted to this CPU
        if not importlib.util.find_spec("matplotlib"):
            self.skipTest("no matplotlib here")
        picture = self.directory / "time.svg"
        subprocess.run([sys.executable, CHECKOUT / "scripts/plot_envelope.py", record, picture], check=True,
                       stdout=subprocess.DEVNULL, timeout=300)
        texts = [" ".join(element.itertext()).strip()
                 for element in xml.etree.ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
        for word in ("HyperMLA, latent", "HyperMLA, decompressed", "queries per request, s"):
            self.assertTrue(any(text.startswith(word) for text in texts), texts)

    def drawn_and_shown(self, script, record, shown):
        """The texts of the picture that a script draws of a record, and of the one that pages show."""
        if not importlib.util.find_spec("matplotlib"):
            self.skipTest("no matplotlib here")
        picture = self.directory / shown
        subprocess.run([sys.executable, CHECKOUT / "scripts" / script, CHECKOUT / "results/nvidia-h200" / record,
                        picture], check=True, stdout=subprocess.DEVNULL, timeout=300)
        return [[" ".join(element.itertext()).strip()
                 for element in xml.etree.ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
                for path in (picture, CHECKOUT / "docs/results" / shown)]

    def test_the_picture_says_who_wins_where(self):
        texts, shown = self.drawn_and_shown("plot_envelope.py", "envelope.json", "time-over-s.svg")
        for text in ("fastest: latent", "fastest: decompressed", "HyperMLA, hybrid (fastest nowhere)",
                     "FlashAttention-3"):
            self.assertIn(text, texts)
        self.assertEqual(shown, texts, "the envelope's picture is of another record: draw it again")

    def test_the_picture_of_an_engines_batches_is_of_the_record(self):
        texts, shown = self.drawn_and_shown("plot_engine.py", "engine.json", "engine.svg")
        record = json.loads((CHECKOUT / "results/nvidia-h200/engine.json").read_text())
        rows = {row["row"]: row for row in record["rows"]}
        for row in (rows["b32-q1-t4096-h64"], rows["mixed-b32-q1to8-t4096-h16"]):
            self.assertIn(f"{row['h']} heads, {row['ours']['burst_us']:.1f} us", texts)
            for peer in ("flashmla", "fa3", "flashinfer"):
                self.assertIn(f"{row[peer]['burst_us'] / row['ours']['burst_us']:.2f}", texts)
        self.assertEqual(shown, texts, "README's picture is of another record: draw it again")

    def test_the_base_version_in_detail(self):
        self.bench("bench_mla_var6_plus", "--s=1", "--n_values=0,32,64")
        rows = self.rows()
        self.assertEqual([(row["version"], row["n"]) for row in rows],
                         [("v0", "0"), ("v0", "32"), ("v0", "64"), ("decompress_combine alone", "")])
        self.assertTrue(all(float(row["burst_us"]) > 0 for row in rows), rows)

    def test_versions_over_n(self):
        for version in ("v3", "v4"):
            done = self.bench(f"bench_mla_var6_plus_{version}", "--s=1", "--n_values=32")
            rows = self.rows()
            self.assertEqual([(row["version"], row["n"]) for row in rows],
                             [(version, "32"), ("v2", "32"), ("v0", "32"), ("decompress_combine alone", "")])
            self.assertTrue(all(float(row["burst_us"]) > 0 for row in rows), rows)
            self.assertRegex(done.stdout, rf"(?m)^{version}: best [\d.]+ us at n=32$")

    def test_kernel_files(self):
        record = self.directory / "record.json"
        done = subprocess.run([sys.executable, BENCHMARKS / "bench_kernel_files.py", "--device=cpu", "--only=reduction",
                               f"--out_dir={self.directory}", f"--record={record}", "--", "--rows=9"],
                              capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done)
        cute, cutile = json.loads(record.read_text())["rows"]
        self.assertIn("was compiled for sm_90, but neither run nor checked", cute["note"])
        self.assertEqual((cutile["file"], cutile["sizes"]["rows"]), ("reduction_cutile", 9))
        self.assertGreater(cutile["burst_us"], 0)

    def test_a_wrong_kernel_file_is_an_error(self):
        program, record = self.directory / "wrong", self.directory / "record.json"
        program.write_text("#!/bin/sh\necho hypermla: it differs >&2\nexit 1\n")
        program.chmod(0o755)
        done = subprocess.run([sys.executable, BENCHMARKS / "bench_kernel_files.py", "--device=cpu", "--only=reduction",
                               f"--out_dir={self.directory}", f"--record={record}"], capture_output=True, text=True,
                              env={**os.environ, "HYPERMLA_TEST_BINARY": str(program)}, timeout=300)
        self.assertEqual(done.returncode, 1, done)
        self.assertIn("the notes say why: reduction_cute reduction_cutile\n", done.stderr)
        self.assertEqual([row["note"] for row in json.loads(record.read_text())["rows"]], ["hypermla: it differs"] * 2)

    def test_a_limit_ends_it_with_what_there_is(self):
        done = self.bench("bench_envelope", "--s_values=1,4", "--limit=-1")
        self.assertIn("Stopped after -1 seconds (--limit).", done.stdout)
        self.assertEqual(self.rows(), [])

    def test_a_peer_needs_a_gpu(self):
        done = self.bench("bench_mla", "--s=1", "--flashmla=/nowhere.so")
        self.assertIn("FlashMLA + bmm: skipped, it needs a GPU", done.stdout)
        self.assertEqual({row["backend"] for row in self.rows()} - {"ours, hybrid"},
                         {"ours, latent", "ours, decompressed", "ours, decompression only"})

    def engine(self, *words, status=0):
        blind = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run([sys.executable, BENCHMARKS / "bench_engine.py", *words], cwd=self.directory, env=blind,
                              capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, status, done)
        return done

    def test_an_engines_rows_are_known_without_a_gpu(self):
        names = self.engine("--list").stdout.split()
        self.assertEqual(len(names), len(set(names)))
        for name in ("b32-q1-t4096-h128", "normal-b128-q1-t4096-h16-p16", "mixed-b32-q1to8-t4096-h128"):
            self.assertIn(name, names)
        of_fp8 = self.engine("--list", "--flashmla_fp8=/nowhere.so").stdout.split()
        self.assertEqual(len(of_fp8), len(set(of_fp8)))
        for form in ("e4m3", "fp8"):
            self.assertIn(f"b32-q16-t4096-h128-{form}", of_fp8)
            self.assertFalse([name for name in names if name.endswith(form)])
        self.assertEqual(self.engine("--list", "--heads=16", "--rows=b32-q[14]-.*").stdout.split(),
                         ["b32-q1-t4096-h16", "b32-q4-t4096-h16"])
        # Any name is a row, not only those of the list.
        self.assertEqual(self.engine("--list", "--rows=heavy-b7-q3-t999-h24").stdout.split(), ["heavy-b7-q3-t999-h24"])
        self.assertIn("no row has such a name", self.engine("--rows=b7", status=1).stderr)
        self.assertIn("it needs a GPU", self.engine("--rows=b32-.*", status=1).stderr)
        self.assertIn("[normal-|heavy-", self.engine("--help").stdout)
        samples = self.engine("--list", "--shared_prefixes").stdout.split()
        self.assertIn("shared8192-b512-q1-t8704-h16", samples)
        self.assertIn("no row has such a name: 'shared64-b2-q1-t64-h16'",  # none of its own
                      self.engine("--list", "--rows=shared64-b2-q1-t64-h16", status=1).stderr)
        forms = self.engine("--list", "--compare").stdout.split()
        self.assertEqual(len(forms), len(set(forms)))
        for name in ("mixed-b128-q1to8-t4096-h16", "b1-q4-t4096-h64", "b128-q1-t4096-h16-p1"):
            self.assertIn(name, forms)
        self.assertIn("it needs a GPU", self.engine("--compare", status=1).stderr)

    def test_flags_that_mean_nothing_are_refused(self):
        file = self.directory / "file"
        file.touch()
        for words, sentence in ((["--rows=("], "'(' is no regular expression"), (["--random=-3"], "of at least 1"),
                                (["--heads=x"], "'x' must be whole numbers with commas"),
                                ([f"--record={self.directory}"], "is a directory or device; name a file"),
                                ([f"--record={file}/record"], f"no file can be made in {file}")):
            self.assertIn(sentence, self.engine("--list", *words, status=2).stderr.splitlines()[-1])
        self.assertIn("that number of heads", self.engine("--list", "--heads=7", status=1).stderr)
        for name in ("b0-q1-t64-h16", "b1-q0-t64-h16", "b1-q1-t0-h16", "b1-q1-t64-h0", "b1-q1-t64-h16-p0"):
            self.assertIn(f"no row has such a name: '{name}'", self.engine(f"--rows={name}", status=1).stderr)
        for name, row in (("bench_prefill", "0x5-h16"), ("bench_sparse", "q0-h16-bf16")):
            for words in ([f"--rows={row}"], ["--list", "--rows=.*", "--rows=foo"]):
                done = subprocess.run([sys.executable, BENCHMARKS / f"{name}.py", *words], capture_output=True,
                                      text=True, cwd=self.directory, timeout=300)
                self.assertEqual((done.returncode, done.stdout), (1, ""))
                self.assertRegex(done.stderr, rf"^{name}.py: no row has such a name: '.*'; --list shows .*\n$")

    def test_a_record_that_cannot_be_written_leaves_nothing(self):
        sys.path.insert(0, str(BENCHMARKS))
        self.addCleanup(sys.path.remove, str(BENCHMARKS))
        import harness
        with self.assertRaises(OSError):
            harness.write_json(self.directory, {})
        self.assertEqual([one.name for one in self.directory.parent.glob(f"{self.directory.name}*")],
                         [self.directory.name])

    def test_a_form_that_fails_leaves_the_others(self):
        """With a worker of two libraries, of which one fails in its first burst."""
        sys.path.insert(0, str(BENCHMARKS))
        self.addCleanup(sys.path.remove, str(BENCHMARKS))
        import bench_engine
        worker = self.directory / "worker.py"
        worker.write_text("""
import json, sys
print("{}", flush=True)
ready = set()
for line in sys.stdin:
    request = json.loads(line)
    key, do = request["key"], request["do"]
    if do == "prepare":
        ready.add(key)
        answer = {"correct": True}
    elif key not in ready:
        answer = {"failed": "it was not prepared"}
    elif (key, do) == ("bad", "burst"):
        answer = {"failed": "bad indeed"}
    else:
        answer = {"burst": {"us": [7]}, "sustained": {"sustained_us": 8}, "plan": {"plan_us": 9}}[do]
    print(json.dumps(answer), flush=True)
""")
        process = bench_engine.Process(["bad"])
        process.words = [sys.executable, worker]
        self.addCleanup(process.stop)
        for _ in range(2):  # rows
            found = bench_engine.measure(bench_engine.Row.named("b1-q1-t64-h16"),
                                         {key: process for key in ("ours", "bad", "known")}, 2, False)
            good = {"correct": True, "burst_us": 7, "burst_spread": 0, "sustained_us": 8, "plan_us": 9}
            self.assertEqual(found, {"ours": good, "bad": {"correct": True, "failed": "bad indeed"}, "known": good})

    def test_ours_must_be_there_and_right(self):
        sys.path.insert(0, str(BENCHMARKS))
        self.addCleanup(sys.path.remove, str(BENCHMARKS))
        from bench_engine import ours_right, ratios
        good, failed = {"correct": True, "burst_us": 2}, {"correct": True, "burst_us": 1, "failed": "in a burst"}
        refused, wrong = {"refused": "no row of it"}, {"correct": False, "burst_us": 1}
        for found, right in (({"ours": good}, True), ({}, False), ({"fa3": good}, False), ({"ours": failed}, False),
                             ({"ours": refused}, False), ({"ours": good, "known": refused}, True),
                             ({"ours": good, "known": failed}, False), ({"ours": good, "known": wrong}, False),
                             ({"ours": good, "fa3": wrong}, True)):
            self.assertEqual(ours_right(found), right, found)
        self.assertEqual(ratios({"ours": good, "fa3": good, "flashmla": failed, "flashinfer": wrong}),
                         {"burst_ratio": 1})
        self.assertEqual(ratios({"ours": failed, "fa3": good}), {})

    def test_batches_drawn_at_random_are_those_of_the_record(self):
        names = self.engine("--list", "--random=90", "--seed=20261129").stdout.split()
        record = json.loads((CHECKOUT / "results/nvidia-h200/engine_random.json").read_text())
        self.assertEqual(sorted(names), sorted(row["row"] for row in record["rows"]))
        self.assertNotEqual(self.engine("--list", "--random=90").stdout.split(), names)

    def test_a_form_of_ours_refuses_rows_that_are_nothing_to_it(self):
        sys.path.insert(0, str(BENCHMARKS))
        self.addCleanup(sys.path.remove, str(BENCHMARKS))
        from bench_engine import rows_of_forms
        from engine_worker import FORMS, Row
        taken = {name: [key for key, form in FORMS.items() if not form.refuses(Row.named(name))]
                 for name in (*rows_of_forms(), "normal-b8-q1-t4096-h16", "b8-q1-t4090-h16", "b8-q1-t4096-h16-fp8")}
        self.assertEqual(taken["mixed-b32-q1to8-t4096-h16"], ["uniform"])
        self.assertEqual(taken["b128-q1-t4096-h16-p1"], ["known", "dense"])
        self.assertEqual([name for name, forms in taken.items() if not forms],
                         ["normal-b8-q1-t4096-h16", "b8-q1-t4090-h16", "b8-q1-t4096-h16-fp8"])

    def test_an_engines_batches_are_the_same_in_every_process(self):
        sys.path.insert(0, str(BENCHMARKS))
        self.addCleanup(sys.path.remove, str(BENCHMARKS))
        from engine_worker import Row
        row = Row.named("normal-b128-q2-t4096-h16")
        self.assertEqual(row.lengths(), Row.named("normal-b128-q2-t4096-h128-p1").lengths())
        self.assertGreater(max(row.lengths()), 8000)
        self.assertGreaterEqual(min(row.lengths()), 2)
        self.assertEqual(sorted(Row.named("long-b4-q1-t5000-h16").lengths()), [1024, 1024, 1024, 5000])
        shared = Row.named("shared8192-b64-q1-t8704-h16-p16")
        self.assertEqual((shared.shared, shared.page, set(shared.lengths())), (8192, 16, {8704}))
        mixed = Row.named("mixed-b32-q1to8-t4096-h128")
        self.assertEqual(set(mixed.queries(alike=False)), {1, 2, 3, 4, 6, 8})
        self.assertEqual(sum(mixed.queries(alike=False)), sum(mixed.queries(alike=True)))

    def test_what_is_no_record_is_refused(self):
        if not importlib.util.find_spec("matplotlib"):
            self.skipTest("no matplotlib here")
        for script, record in (("plot_envelope", self.directory), ("plot_engine", self.directory),
                               ("plot_engine", CHECKOUT / "results/nvidia-h200/envelope.json")):
            done = subprocess.run([sys.executable, CHECKOUT / f"scripts/{script}.py", record, "x.svg"],
                                  capture_output=True, text=True, timeout=300)
            self.assertEqual(done.returncode, 1)
            self.assertIn(f"is no record of {script.replace('plot', 'bench')}.py", done.stderr)


if __name__ == "__main__":
    unittest.main()
