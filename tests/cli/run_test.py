"""Runs of a kernel on the CPU: checks, tilings, profiles, and caches that are shared, cold, warm, absent or broken."""

import contextlib
import fcntl
import json
import os
import pathlib
import pty
import re
import shutil
import signal
import struct
import subprocess
import termios
import time
import unittest

from support import BINARY, SMALL, CommandCase, finish, kernel_directories, run, start

KERNEL = ["kernel", "flash_attention", *SMALL]
QUICK = [*KERNEL, "--no_autotune", "--prof_type=disabled", "--check"]


def entries(cache):
    return sorted(path.name for path in (cache / "kernels").iterdir() if (path / "report.json").exists())


class Check(CommandCase):
    def test_every_kernel_passes(self):
        for name, version, _ in kernel_directories():
            with self.subTest(f"{name} {version}"):
                if name.startswith("cute."):
                    sentence = self.refuse("kernel", name, version, "--device=cpu")
                    self.assertIn("is written for Hopper GPUs (sm_90)", sentence)
                    continue
                flags = self.succeed("kernel", name, version, "--help").out
                small = {"b": 1, "s": 5, "h": 2, "t": 70}
                shape = [f"--{flag}={value}" for flag, value in small.items() if f"--{flag} " in flags]
                done = self.succeed("kernel", name, version, *shape, "--device=cpu", "--no_autotune", "--check",
                                    "--prof_type=disabled")
                self.assertIn("check     passed", done.out)

    def test_a_seed_repeats_a_run(self):
        outputs = {self.succeed(*QUICK, f"--seed={seed}").out for seed in (7, 7, 8)}
        self.assertEqual(len(outputs), 2)

    def test_what_runs_where_is_said_first(self):
        first = self.succeed(*QUICK).out.splitlines()[0]
        self.assertRegex(first, r"^cutile\.mla\.flash_attention v0 on .+ \(.+, \d+ cores\)$")


class Profile(CommandCase):
    def test_each_mode_writes_its_files(self):
        for mode in ("annotation", "event"):
            with self.subTest(mode):
                self.check_files(mode)

    def check_files(self, mode):
        out = self.directory / mode
        done = self.succeed("kernel", "flash_mla_split_kv", "--b=1", "--s=1", "--t=256", "--h=2", "--device=cpu",
                            "--tune_max_iters=1", "--bench_runs=3", f"--out_dir={out}", f"--prof_type={mode}",
                            "--label=mine")
        self.assertIn(f"report    {out}/report.md\n", done.out)
        profile = json.loads((out / "profile.json").read_text())
        params = json.loads((out / "params.json").read_text())
        self.assertEqual((params["b"], params["s"], params["t"], params["h"]), (1, 1, 256, 2))
        self.assertEqual(params, profile["problem"])
        self.assertEqual(profile["kernel"], "cutile.mla.flash_mla_split_kv")
        self.assertEqual((profile["mode"], profile["label"]), (mode, "mine"))
        self.assertIn("class", profile["classification"])
        stages = [stage["name"] for stage in profile["stages"]]
        self.assertEqual(stages, ["flash_mla_split_kv", "flash_mla_split_kv_reduce"])
        for stage in profile["stages"]:
            name = stage["name"]
            self.assertEqual(json.loads((out / f"tiling/{name}.json").read_text()), stage["tiling"])
            self.assertTrue(json.loads((out / f"tiling/{name}/autotuning.json").read_text()))
            report = json.loads((out / f"compiled/{name}/report.json").read_text())
            self.assertEqual(report["name"], name)
            self.assertTrue((out / f"compiled/{name}" / report["artifact"]).stat().st_size > 0)
        for timing in profile["timing"].values():
            self.assertGreater(timing["median_us"], 0)
            self.assertLessEqual(timing["low_us"], timing["median_us"])
            self.assertLessEqual(timing["median_us"], timing["high_us"])
            self.assertEqual(timing["repetitions"], 3)  # --bench_runs
        report = (out / "report.md").read_text()
        self.assertIn("# Profile: cutile.mla.flash_mla_split_kv (v0)", report)
        self.assertIn("b=1, s=1, t=256, h=2", report)
        self.assertIn("## Bottleneck", report)
        self.assertRegex(report, r"Inputs: random, seed \d+\. Check: not asked for \(--check\)\.")
        if mode == "annotation":
            for name in ("nsight_raw_metrics.csv", "nsight_formatted_metrics.csv", "roofline_metrics.csv"):
                self.assertTrue((out / name).read_text().startswith("stage,"), name)
            roofline = (out / "roofline_metrics.csv").read_text().splitlines()
            self.assertEqual([row.split(",")[0] for row in roofline[1:]], stages)
            # Either the counters of the CPU, or a sentence that says why there are none.
            counted = [stage for stage in profile["stages"] if "metrics" in stage]
            self.assertEqual(profile["counters"]["source"], "perf_event_open" if counted else "none")
            self.assertTrue(counted or profile["counters"]["attempts"])

    def test_compare(self):
        runs = [self.directory / name for name in ("a", "b")]
        for directory in runs:
            self.succeed(*KERNEL, "--no_autotune", "--bench_runs=7", "--prof_type=event", f"--out_dir={directory}")
        self.assertTrue(self.succeed("compare", runs[0], runs[0]).out.startswith("SAME: cold "))
        profile = json.loads((runs[0] / "profile.json").read_text())
        for factor, verdict, status in ((0.5, "FASTER", 0), (2, "SLOWER", 1)):
            for timing in profile["timing"].values():
                timing.update({"low_us": 99 * factor, "median_us": 100 * factor, "high_us": 101 * factor})
            (runs[1] / "profile.json").write_text(json.dumps(profile))
            reference = json.loads(json.dumps(profile))
            for timing in reference["timing"].values():
                timing.update({"low_us": 99, "median_us": 100, "high_us": 101})
            (runs[0] / "profile.json").write_text(json.dumps(reference))
            done = run("compare", runs[0], runs[1])
            self.assertEqual((done.status, done.out.split(":")[0]), (status, verdict), done)
        self.assertEqual(json.loads(run("compare", "--json", runs[0], runs[1]).out)["verdict"], "SLOWER")
        for timing in profile["timing"].values():
            timing.update({"low_us": 90, "median_us": 105, "high_us": 120})
        (runs[1] / "profile.json").write_text(json.dumps(profile))
        self.assertEqual(run("compare", runs[0], runs[1]).status, 3)
        self.assertIn("is not a profile", self.refuse("compare", runs[0] / "params.json", runs[1]))

    def test_without_out_dir_a_new_directory_below_out(self):
        self.succeed(*KERNEL, "--no_autotune", "--bench_runs=1")
        made = list(self.directory.glob("out/profiles/annotation/cutile.mla.flash_attention/b1_s16_t128_h2_*/*/"
                                        "profile.json"))
        self.assertEqual(len(made), 1)

    def test_an_out_dir_that_will_not_do_is_refused_first(self):
        """Before anything is compiled: /bin/false would fail."""
        used = self.directory / "used"
        used.mkdir()
        (used / "report.md").write_text("of another run")
        cache = {"CXX": "/bin/false", "HYPERMLA_CACHE_DIR": self.directory / "cache"}
        for out, why in ((used, "holds files already"), (used / "report.md", "Not a directory"),
                         (used / "report.md/below", "Not a directory")):
            self.assertIn(why, self.refuse(*KERNEL, f"--out_dir={out}", **cache))
        (self.directory / "out").write_text("in the way")
        self.assertIn("Not a directory", self.refuse(*KERNEL, **cache))

    def test_a_run_that_ends_before_leaves_no_profile(self):
        words = [*KERNEL, "--no_autotune", "--prof_type=event"]
        self.succeed(*words, "--bench_runs=1", "--out_dir=whole")
        there = self.directory / "there"
        there.mkdir()
        for out in "new", "there", "new/":
            with self.subTest(out):
                before = len(list(self.directory.rglob("params.json")))
                interrupted = start(*words, "--bench_runs=1000000", f"--out_dir={out}", cwd=self.directory)
                while len(list(self.directory.rglob("params.json"))) == before:
                    self.assertIsNone(interrupted.poll())
                interrupted.send_signal(signal.SIGINT)
                self.assertEqual(finish(interrupted).status, -signal.SIGINT)
                self.assertFalse((self.directory / out / "params.json").exists())
                limited = subprocess.run(["sh", "-c", 'ulimit -f 1; exec "$0" "$@"', BINARY, *words, "--bench_runs=1",
                                          f"--out_dir={out}"], cwd=self.directory, capture_output=True, text=True)
                self.assertEqual(limited.returncode, 2, limited)
                self.assertIn("raise the file size limit", limited.stderr)
                self.succeed(*words, "--bench_runs=1", f"--out_dir={out}")
                files = [sorted(str(path.relative_to(top)) for path in top.rglob("*"))
                         for top in (self.directory / "whole", self.directory / out)]
                self.assertEqual(*files)
                self.assertEqual([(self.directory / out).stat().st_mode], [there.stat().st_mode])
                self.assertEqual(list(self.directory.rglob("*.tmp")), [])
                if out == "new":
                    shutil.rmtree(self.directory / out)

    def test_disabled_writes_nothing(self):
        self.succeed(*QUICK)
        self.assertEqual(list(self.directory.iterdir()), [])

    def test_tiling_flags_take_effect(self):
        for bm in (16, 32):
            out = self.directory / str(bm)
            self.succeed(*KERNEL, "--no_autotune", f"--Bm={bm}", "--Bn=32", "--bench_runs=1", f"--out_dir={out}")
            tiling = json.loads((out / "tiling/flash_attention.json").read_text())
            self.assertEqual((tiling["Bm"], tiling["Bn"]), (bm, 32))
            self.assertIn(f".Bm = {bm}, .Bn = 32", (out / "compiled/flash_attention/kernel.cu").read_text())


class Tuning(CommandCase):
    def test_what_was_measured_is_remembered(self):
        cache = self.directory / "cache"
        first = self.succeed(*KERNEL, "--prof_type=disabled", "--tune_max_iters=2", HYPERMLA_CACHE_DIR=cache)
        self.assertRegex(first.err.splitlines()[-1],
                         r"^tuning flash_attention: 2 of 2 tilings measured, best [\d.]+ us$")
        histories = list(cache.glob("kernel-autotune/*/*/*/autotuning.json"))
        self.assertEqual(len(histories), 1)
        before = histories[0].read_bytes()
        again = self.succeed(*KERNEL, "--prof_type=disabled", "--tune_max_iters=2", HYPERMLA_CACHE_DIR=cache)
        self.assertEqual(again.out, first.out)
        self.assertEqual(again.err, "")
        self.assertEqual(histories[0].read_bytes(), before)
        shown = self.on_terminal(60, *KERNEL, "--prof_type=disabled", "--tune_max_iters=2", "--retune",
                                 HYPERMLA_CACHE_DIR=cache)
        # One line, rewritten, that fits the terminal, until the end of the tuning; the counts never pass the limit.
        rewritten = [part for part in re.split(r"[\r\n]+", shown) if part.startswith(("[", "tuning"))]
        self.assertGreater(len(rewritten), 4, shown)
        for part in rewritten[:-1]:
            self.assertLess(len(part), 60, part)
            self.assertLessEqual(int(re.search(r": (\d+) of 2 ", part)[1]), 2)
        self.assertRegex(rewritten[-1], r"^tuning flash_attention: 2 of 2 tilings measured, best [\d.]+ us$")
        self.assertEqual(shown[: shown.index(rewritten[-1])].count("\n"), 1, shown)  # behind the kernel's name

    def on_terminal(self, columns, *words, **environment):
        """What the program writes to a terminal of that width, without the codes that clear a line."""
        pid, terminal = pty.fork()
        if pid == 0:
            time.sleep(0.1)  # until the terminal has its width
            os.execve(BINARY, [BINARY, *words],
                      {**os.environ, **{key: str(value) for key, value in environment.items()}})
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        said = b""
        with contextlib.suppress(OSError):  # Linux ends a terminal with an error
            while part := os.read(terminal, 1 << 16):
                said += part
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0, said)
        return said.decode().replace("\033[K", "")

    def test_rejected_tilings_are_said(self):
        # Anew: a history outlives the kernels it is of, when a comment in a header changes.
        self.succeed(*KERNEL, "--retune", "--tune_max_iters=2", "--bench_runs=1", "--out_dir=first")
        found = (self.directory / "first/tiling/flash_attention/autotuning.json").read_text()
        histories = pathlib.Path(os.environ["HYPERMLA_CACHE_DIR"]).glob("kernel-autotune/*/*/*/autotuning.json")
        history = next(path for path in histories if path.read_text() == found)
        self.addCleanup(history.write_text, found)
        best, *others = sorted(json.loads(found), key=lambda entry: entry["median_seconds"])
        others[0].update({"seconds": [], "rejected": "of a test"})
        history.write_text(json.dumps([best, others[0]]))
        # Without a compiler, whose verdict it was does not matter.
        bare = {"PATH": self.directory, "CXX": None, "HYPERMLA_CUDA_ROOT": None}
        done = self.succeed(*KERNEL, "--tune_max_iters=1", "--bench_runs=1", "--out_dir=second", **bare)
        self.assertRegex(done.out, r"tuning    1 tiling of flash_attention rejected \(.*\), because of a test\n")
        self.assertIn("flash_attention: 1 tiling rejected, because of a test.",
                      (self.directory / "second/report.md").read_text())


class Caches(CommandCase):
    def test_a_warm_cache_needs_no_compiler(self):
        cache = self.directory / "cache"
        cold = self.succeed(*QUICK, "--seed=1", HYPERMLA_CACHE_DIR=cache)
        bare = {"HYPERMLA_CACHE_DIR": cache, "PATH": self.directory, "CXX": None, "HYPERMLA_CUDA_ROOT": None}
        begin = time.monotonic()
        warm = self.succeed(*QUICK, "--seed=1", **bare)
        self.assertEqual(warm.out, cold.out)
        self.assertLess(time.monotonic() - begin, 5)
        sentence = self.refuse(*QUICK, "--Bn=32", **bare)
        self.assertIn("no C++ compiler was found; install g++ or set CXX", sentence)

    def test_a_cache_that_cannot_be_written(self):
        (self.directory / "file").write_text("in the way")
        sentence = self.refuse(*QUICK, HYPERMLA_CACHE_DIR=self.directory / "file/cache")
        self.assertIn(str(self.directory / "file"), sentence)

    def test_a_read_only_cache(self):
        cache = self.directory / "cache"
        self.succeed(*QUICK, HYPERMLA_CACHE_DIR=cache)
        everything = [cache, *cache.rglob("*")]
        for path in everything:
            path.chmod(path.stat().st_mode & ~0o222)
        try:
            self.succeed(*QUICK, HYPERMLA_CACHE_DIR=cache)
            if os.access(cache, os.W_OK):
                self.skipTest("root writes everywhere")
            self.assertIn(str(cache), self.refuse(*QUICK, "--Bn=32", HYPERMLA_CACHE_DIR=cache))
        finally:
            for path in everything:
                path.chmod(path.stat().st_mode | 0o700)

    def test_a_damaged_entry_is_compiled_again(self):
        cache = self.directory / "cache"
        self.succeed(*QUICK, HYPERMLA_CACHE_DIR=cache)
        (entry,) = entries(cache)
        artifact = cache / "kernels" / entry / "kernel.so"
        whole = artifact.read_bytes()
        artifact.write_bytes(whole[: len(whole) // 2])
        self.succeed(*QUICK, HYPERMLA_CACHE_DIR=cache)
        self.assertEqual(entries(cache), [entry])
        self.assertEqual(len(artifact.read_bytes()), len(whole))

    def test_two_processes_at_once(self):
        cache = self.directory / "cache"
        running = [start(*QUICK, "--seed=1", cwd=self.directory, HYPERMLA_CACHE_DIR=cache) for _ in range(2)]
        done = [finish(process) for process in running]
        for one in done:
            self.assertEqual(one.status, 0, one)
        self.assertEqual(done[0].out, done[1].out)
        self.assertEqual(len(entries(cache)), 1)

    def test_a_killed_process_leaves_a_usable_cache(self):
        cache = self.directory / "cache"
        for delay in (0.05, 0.6):  # before and during the compilation
            process = start(*QUICK, cwd=self.directory, HYPERMLA_CACHE_DIR=cache)
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            self.assertEqual(process.returncode, -signal.SIGKILL)
        self.assertIn("check     passed", self.succeed(*QUICK, HYPERMLA_CACHE_DIR=cache).out)
        self.assertEqual(len(entries(cache)), 1)


class Interruption(CommandCase):
    """A compiler that would take ten minutes ends with the program that started it."""

    def interrupt(self, number):
        pid = self.directory / "pid"
        compiler = self.directory / "slow-c++"
        compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\necho $$ >"{pid}.new"\nmv "{pid}.new" "{pid}"\n'
                            "exec sleep 600\n")
        compiler.chmod(0o755)
        process = start(*QUICK, cwd=self.directory, CXX=compiler, HYPERMLA_CACHE_DIR=self.directory / "cache")
        while not pid.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        process.communicate(timeout=60)
        self.assertEqual(process.returncode, -number)
        self.expect_end(int(pid.read_text()))

    def expect_end(self, pid):
        for _ in range(1000):
            try:
                if pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":  # ended, but no parent waits for it
                    return
            except FileNotFoundError:
                return
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        self.fail("the compiler is still running")

    def test_a_signal(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(number):
                self.interrupt(number)
                (self.directory / "pid").unlink()

    def test_a_kill(self):
        self.interrupt(signal.SIGKILL)

    def test_a_kill_before_a_job_has_begun(self):
        """A compilation whose caller, here this test's own parent, is not the parent of its process."""
        job = json.dumps({"caller": os.getppid()})
        done = subprocess.run([BINARY, "compile-job"], input=job, text=True, check=False, capture_output=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn(f"the program that asked for this has ended (process {os.getppid()})", done.stderr)


class Compilation(CommandCase):
    """For a GPU, without one."""

    def setUp(self):
        super().setUp()
        if "tile       not found" in self.succeed("device").out:
            self.skipTest("no CUDA Tile compiler here")

    def test_an_entry_explains_itself(self):
        for language, instance, file, says in (
                ("cutile", "hypermla::flash_attention<", "kernel.tileir.txt", "mmaf"),
                ("cute", "hypermla::cute::flash_attention<", "kernel.ptx", "wgmma.mma_async")):
            with self.subTest(language):
                self.check_entry(language, instance)
                (path,) = (self.directory / language / "kernels").glob(f"*/{file}")
                self.assertTrue(says in path.read_text(), f"{path} has no {says}")

    def check_entry(self, language, instance):
        cache = self.directory / language
        words = ("compile", "flash_attention", "v0", f"--language={language}", "--s=16", "--arch=sm_90")
        done = self.succeed(*words, HYPERMLA_CACHE_DIR=cache)
        self.assertRegex(done.out, r"(?m)^flash_attention +sm_90 +\d+ registers +0 B frame +\d+ B shared +\{")
        self.assertIn("1 compiled, 0 failed, 0 with a stack frame", done.out)
        (name,) = entries(cache)
        entry = cache / "kernels" / name
        self.assertTrue(name.startswith("flash_attention-sm_90-"))
        self.assertEqual((entry / "kernel.cubin").read_bytes()[:4], b"\x7fELF")
        self.assertGreater((entry / "remarks.txt").stat().st_size, 0)
        self.assertIn(instance, (entry / "kernel.cu").read_text())
        report = json.loads((entry / "report.json").read_text())
        self.assertEqual((report["arch"], report["artifact"]), ("sm_90", "kernel.cubin"))
        self.assertGreater(report["registers"], 0)
        again = self.succeed(*words, HYPERMLA_CACHE_DIR=cache, PATH=self.directory)
        self.assertEqual(again.out, done.out)

    def test_the_present_device_is_the_default_target(self):
        done = self.succeed("compile", "flash_attention", "--language=cutile", "--s=16",
                            HYPERMLA_CACHE_DIR=self.directory / "cache")
        self.assertIn("1 compiled, 0 failed", done.out)

    def test_a_tiling_is_compiled_as_it_is_said(self):
        words = ("compile", "flash_attention", "v0", "--language=cutile", "--s=16", "--arch=sm_90", "--Bn=32")
        self.assertIn(".Bn = 32", self.succeed(*words).out)
        self.assertIn("--Bn says a tiling, but --cases", self.refuse(*words, "--cases"))

    def test_a_failure_is_a_row_and_status_1(self):
        done = run("compile", "flash_attention", "--arch=cpu", cwd=self.directory, CXX="/bin/false",
                   HYPERMLA_CACHE_DIR=self.directory / "cache")
        self.assertEqual(done.status, 1, done)
        self.assertRegex(done.out,
                         r"(?m)^flash_attention +\S+ +FAILED /bin/false could not compile hypermla::flash_attention<")
        self.assertIn("0 compiled, 1 failed", done.out)

    def test_an_unknown_target_is_a_sentence(self):
        done = run("compile", "flash_attention", "--arch=sm_12", cwd=self.directory)
        self.assertEqual(done.status, 2, done)
        self.assertRegex(done.err, r"^hypermla: unknown target 'sm_12'; choose one of cpu, sm_80, .*sm_121\n$")


class DeviceReport(CommandCase):
    def test_what_was_found(self):
        out = self.succeed("device", "--device=cpu").out
        for row in ("device", "tile", r"c\+\+", "kernels", "cache", "roofline"):
            self.assertRegex(out, rf"(?m)^{row} +\S")
        self.assertRegex(out, r"(?m)^roofline .*TFLOP/s bfloat16, .*GB/s, ridge .* FLOP/byte$")

    def test_measure_adds_what_kernels_reach(self):
        kernels = pathlib.Path(os.environ["HYPERMLA_CACHE_DIR"]) / "kernels"
        if kernels.exists():  # compiled by other tests
            shutil.copytree(kernels, self.directory / "kernels",
                            ignore=lambda _, names: [name for name in names if "-sm_" in name])
        cache = {"HYPERMLA_CACHE_DIR": self.directory}
        name = re.search(r"(?m)^device     (.*): ", self.succeed("device", "--device=cpu").out)[1]
        (self.directory / "devices.json").write_text(json.dumps({name: {"measured": {}}}))  # of no use, and no harm
        out = self.succeed("device", "--device=cpu", "--measure", **cache).out
        self.assertRegex(out,
                         r"(?m)^reach      latent tensor [\d.]+: cutile\.mla\.flash_mla\S* took [\d.]+ us for b1_s16_")
        added = json.loads(pathlib.Path(re.search(r"(?m)^added to   (.+)$", out)[1]).read_text())
        (entry,) = added.values()
        reach = entry["measured"]["reach"]
        self.assertLessEqual({"latent", "decompressed"}, set(reach), reach)
        # The model now predicts here what was measured here.
        words = ["choose", "--b=1", "--s=16", "--t=512", "--h=16", "--device=cpu", "--json"]
        (before,), (after,) = ([row["burst_us"] for row in json.loads(self.succeed(*words, **where).out)["ranking"]
                                if row["kernel"] == "cutile.mla.flash_mla"] for where in ({}, cache))
        took = float(re.search(r"latent tensor .* took ([\d.]+) us", out)[1])
        self.assertLess(abs(after / took - 1), 0.5, (before, after, took))
        # What is interrupted loses nothing of it.
        again = start("device", "--device=cpu", "--measure", **cache)
        while not again.stdout.readline().startswith("measured   date"):
            self.assertIsNone(again.poll())
        again.send_signal(signal.SIGINT)
        finish(again)
        (entry,) = json.loads((self.directory / "devices.json").read_text()).values()
        self.assertEqual(entry["measured"]["reach"], reach)


if __name__ == "__main__":
    unittest.main()
