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
        for path in sorted(BENCHMARKS.glob("bench_*.py")):
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

    def test_the_picture_says_who_wins_where(self):
        if not importlib.util.find_spec("matplotlib"):
            self.skipTest("no matplotlib here")
        picture = self.directory / "time.svg"
        subprocess.run([sys.executable, CHECKOUT / "scripts/plot_envelope.py",
                        CHECKOUT / "results/nvidia-h200/envelope.json", picture], check=True,
                       stdout=subprocess.DEVNULL, timeout=300)
        texts, shown = ([" ".join(element.itertext()).strip()
                         for element in xml.etree.ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
                        for path in (picture, CHECKOUT / "docs/results/time-over-s.svg"))
        for text in ("fastest: latent", "fastest: decompressed", "HyperMLA, hybrid (fastest nowhere)",
                     "FlashAttention-3"):
            self.assertIn(text, texts)
        self.assertEqual(shown, texts, "the README's picture is of another record: draw it again")

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
        self.assertEqual(self.engine("--list", "--rows=shared64-b2-q1-t64-h16").stdout, "\n")  # none of its own
        forms = self.engine("--list", "--compare").stdout.split()
        self.assertEqual(len(forms), len(set(forms)))
        for name in ("mixed-b128-q1to8-t4096-h16", "b1-q4-t4096-h64", "b128-q1-t4096-h16-p1"):
            self.assertIn(name, forms)
        self.assertIn("it needs a GPU", self.engine("--compare", status=1).stderr)

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
        done = subprocess.run([sys.executable, CHECKOUT / "scripts/plot_envelope.py", self.directory, "x.svg"],
                              capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 1)
        self.assertIn("is no record of bench_envelope.py", done.stderr)


if __name__ == "__main__":
    unittest.main()
