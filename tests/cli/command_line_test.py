"""What the command line says: help, lists, and the sentence for everything that is wrong."""

import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

from support import BINARY, CHECKOUT, SMALL, CommandCase, kernel_directories, run

USAGE = """\
HyperMLA: Multi-head Latent Attention kernels, and the framework they are written, tuned and checked in.

Usage: hypermla <command> [arguments]      hypermla <command> --help      hypermla --list

Commands:
  kernel      run, tune, check and profile one kernel: hypermla kernel <kernel> [version] [flags]
  predict     roofline time of a kernel on every known device, without running it
  choose      which kernel, and how many decompressed tokens, for a problem
  clone       begin a new version of a kernel as a copy of another
  compile     compile kernels ahead of time, for any GPU, without one
  verify      run the correctness cases on this device and record the result
  verify-file check a stand-alone kernel file against the reference in it
  bench-file  time a stand-alone kernel file against this device's ceilings
  compare     two profiles: is the second SAME, FASTER or SLOWER, and what changed
  kb          knowledge cards: list, show, match a profile, lint, add
  next        what bounds a kernel and the task for its next version, from a profile
  devlog      development logs: add a version's entry from its profile, lint
  device      what was found: devices, driver, toolchain; --measure adds this machine

Options:
  --list     all kernels and versions
  --version  the version of this program
  --help     this text
"""


def camel_case(name):
    return "".join(part.capitalize() for part in name.split("_"))


def fields(header, struct):
    """[(name, default, help)] of a struct in a header."""
    text = header.read_text()
    start = text.index(f"struct {struct} ")
    body = text[start : text.index("\n};", start)]
    defaults = dict(re.findall(r"^  \w+ (\w+) = ([\w.:-]+);", body, re.M))
    return [
        (name, defaults[name].split("::")[-1], re.sub(r'"\s*"', "", text))
        for name, text in re.findall(r'field\("(\w+)", self\.\w+,\s*"((?:[^"]|"\s*")*)"\)', body)
    ]


def included_plans(source):
    """The headers that plans share, as far as a plan includes them."""
    text = "".join((CHECKOUT / "kernels" / name).read_text()
                   for name in re.findall(r'#include "(cu\w+/\w+/\w+_(?:plan|time).h)"', source))
    return text + included_plans(text) if text else ""


def differences(plan):
    """What a version says of its form's problem: the fields that it does not offer, and defaults of its own."""
    text = plan + included_plans(plan)
    withheld = re.search(r"AttentionPlan(?:<[\w, ]+>)?\((?:\{(.*?)\}|(\w+))\) \{", text)
    if withheld and withheld[2]:
        latent = (CHECKOUT / "kernels/mla/latent/latent_plan.h").read_text()
        withheld = re.search(rf"{withheld[2]} = \{{(.*?)\}}", latent, re.S)
    constructors = "".join(re.findall(r"Plan\(\)[^\n]*\{ (problem\.[^}]*)\}", text))
    defaults = dict(re.findall(r"problem\.(\w+) = (\w+)", constructors))
    return re.findall(r'"(\w+)"', withheld[1]) if withheld else [], defaults


class Help(CommandCase):
    def test_without_words_and_with_help_the_usage(self):
        for words in ([], ["--help"], ["-h"], ["help"]):
            self.assertEqual(self.succeed(*words).out, USAGE)
        for words in (["--help", "--help"], ["help", "help"], ["--help", "-h"]):
            self.assertIn(f"'{words[1]}' is not expected here; see hypermla --help", self.refuse(*words))

    def test_every_command_has_help(self):
        for command in re.findall(r"^  (\w+)  ", USAGE.split("Options:")[0], re.M):
            with self.subTest(command):
                self.assertIn(f"hypermla {command}", self.succeed(command, "--help").out)

    def test_version_is_that_of_the_project(self):
        version = re.search(r"project\(hypermla VERSION ([\d.]+)", (CHECKOUT / "CMakeLists.txt").read_text())[1]
        self.assertEqual(self.succeed("--version").out, f"hypermla {version}\n")

    def test_list_is_what_the_kernel_directories_are(self):
        rows = [line.split()[:2] for line in self.succeed("--list").out.splitlines()]
        expected = [[name, version] for name, version, _ in kernel_directories()]
        self.assertTrue(expected)
        self.assertEqual(sorted(rows), sorted(expected))

    def test_kernel_help_shows_every_field_in_its_group(self):
        # The hybrid's plans say more of n than its header, which compilers of kernels read.
        retold = dict((name, re.sub(r'"\s*"', "", text)) for name, text in re.findall(
            r'field\.name != "(\w+)"\) continue;\s*field\.help =\s*"((?:[^"]|"\s*")*)";',
            (CHECKOUT / "kernels/mla/hybrid/hybrid_time.h").read_text()))
        self.assertEqual(list(retold), ["n"])
        for name, version, directory in kernel_directories():
            with self.subTest(f"{name} {version}"):
                text = self.succeed("kernel", name, version, "--help").out
                of_plan = text.split("Problem:")[1].split("Run:")[0]
                problem, _, tiling = of_plan.partition("Tiling (with --no_autotune):")  # which a kernel may lack
                plan = (directory / f"{directory.name}.cpp").read_text()
                header = directory / f"{directory.name}.h"
                if not header.exists():  # the kernel is shared with other versions, or with the stages of others
                    shared = re.search(rf'"({name.split(".")[0]}/\w+/\w+)_plan.h"', plan)[1]
                    header = CHECKOUT / f"kernels/{shared}.h"
                # A hybrid includes the forms of its stages, too.
                forms = re.findall(r'"mla/(\w+)/\w+_(?:plan|time).h"', plan + included_plans(plan))
                form = "hybrid" if "hybrid" in forms else forms and forms[0]
                problem_header = CHECKOUT / f"kernels/mla/{form}/{form}.h" if form else header
                listed = fields(problem_header, camel_case(problem_header.stem) + "Problem")
                self.assertTrue(listed)
                withheld, defaults = differences(plan)
                for field, default, words in listed:
                    if field in withheld:
                        self.assertNotIn(f"--{field} ", problem)
                    else:
                        default = defaults.get(field, default)
                        words = retold.get(field, words) if form == "hybrid" else words
                        self.assertRegex(problem, rf"--{field} \w+ +{re.escape(words)} \(default {default}\)")
                derived = re.search(r'AttendBothPathsPlan\([^{;]*\{(.*?)\}', plan)
                for field, _, words in fields(header, camel_case(header.stem) + "Tiling"):
                    if derived and f'"{field}"' in derived[1]:
                        self.assertNotIn(f"--{field} ", tiling)
                        continue
                    self.assertRegex(tiling, rf"--{field} \w+ +{re.escape(words)} \(default ")
                for flag in ("device", "check", "seed", "no_autotune", "retune", "tune_max_iters", "prof_type",
                             "bench_runs", "label", "out_dir"):
                    self.assertIn(f"--{flag}", text)


    def test_the_defaults_of_a_tiling_are_those_of_the_problem(self):
        for words in (["flash_attention", *SMALL], ["flash_mla", "--s=3", "--h=2", "--t=70", "--b=1", "--device=cpu"]):
            text = self.succeed("kernel", *words, "--help").out
            shown = dict(re.findall(r"--(\w+) \w+ .*\(default (\S+)\)",
                                    text.split("Tiling (with --no_autotune):")[1].split("Run:")[0]))
            used = self.succeed("kernel", *words, "--no_autotune", "--prof_type=disabled").out
            self.assertEqual(shown, dict(re.findall(r"(\w+)=(\S+)", re.search(r"tiling .*", used)[0])))
        self.assertIn("Usage:", self.succeed("kernel", "flash_attention", "--nonsense", "--b=x", "--help").out)
        hint = "On a Hopper GPU kernels in cute are the fast ones, whose flags --language=cute --help says."
        self.assertIn(hint, self.succeed("kernel", "flash_mla", "--help").out)
        self.assertNotIn(hint, self.succeed("kernel", "flash_mla", "--language=cute", "--help").out)
        self.assertNotIn(hint, self.succeed("kernel", "prefix_decompression", "--help").out)


class Refusals(CommandCase):
    def check(self, expected, *words):
        self.assertEqual(self.refuse(*words), expected)

    def test_unknown_words_name_the_nearest_known(self):
        with open("/dev/full", "w") as full:  # nothing can be said there
            self.assertEqual(subprocess.run([BINARY, "kernl"], stderr=full).returncode, 2)
        closed = subprocess.run(["sh", "-c", '"$0" kernl 2>&-', BINARY], capture_output=True)
        self.assertEqual((closed.returncode, closed.stdout), (2, b""))
        self.check("unknown command 'kernl'; did you mean kernel? `hypermla --help` lists all", "kernl")
        self.check("unknown command '--lst'; did you mean --list? `hypermla --help` lists all", "--lst")
        self.check("unknown kernel 'flash-atention'; did you mean flash_attention? `hypermla --list` shows all",
                   "kernel", "flash-atention")
        self.assertIn("flash_attention has no version 'v77'; did you mean v",
                      self.refuse("kernel", "flash_attention", "v77"))
        self.check("unknown flag --caussal; did you mean --causal? See hypermla kernel flash_attention --help",
                   "kernel", "flash_attention", "--caussal")
        self.check("'stray' is not expected here; see hypermla kernel flash_attention --help",
                   "kernel", "flash_attention", "v0", "stray")

    def test_sources_that_others_may_write_are_not_used(self):
        with tempfile.TemporaryDirectory() as place:
            program, root = pathlib.Path(place, "tools/bin/hypermla"), pathlib.Path(place, "share/hypermla")
            program.parent.mkdir(parents=True)
            shutil.copy(BINARY, program)
            for name in "kernels", "include", "conf":
                shutil.copytree(CHECKOUT / name, root / name)
            run_it = lambda: subprocess.run([program, "device"], capture_output=True, text=True,
                                            env={**os.environ, "HYPERMLA_ROOT": ""})
            self.assertEqual(run_it().returncode, 0)
            (root / "kernels/cutile/tile.h").chmod(0o646)
            done = run_it()
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertRegex(done.stderr, r"^hypermla: '.*/tile\.h' is not used, because another user may .*\n$")

    def test_bad_values(self):
        for flag, expected in {
            "--b=0": "--b=0 is not supported: it must be at least 1",
            "--s=-1": "--s=-1 is not supported: it must be at least 1",
            "--b=x": "b cannot be 'x'; give it an integer of 32 bits",
            "--b=1.5": "b cannot be '1.5'; give it an integer of 32 bits",
            "--b=99999999999": "b cannot be '99999999999'; give it an integer of 32 bits",
            "--d=100": "--d=100 is not supported: it must be a power of two from 16 to 256",
            "--dtype=int8": "dtype cannot be 'int8'; give it bfloat16 or float16",
            "--causal=maybe": "causal cannot be 'maybe'; give it true or false",
            "--Bm=3": "--Bm=3 is not supported: it must be a power of two from 16 to 256",
            "--device=tpu": "unknown device 'tpu'; choose auto, cpu, cuda or cuda:N",
            "--b=": "--b needs a value; see hypermla kernel flash_attention --help",
            "--causal=": "--causal needs a value; see hypermla kernel flash_attention --help",
            "--seed=-1": "--seed=-1 is not supported: it must be a whole number from 0 to 18446744073709551615",
            "--seed=18446744073709551616": "--seed=18446744073709551616 is not supported: it must be a whole number "
                                           "from 0 to 18446744073709551615",
            "--seed=1x": "--seed=1x is not supported: it must be a whole number from 0 to 18446744073709551615",
            "--label=\udcff": "--label is no UTF-8 text, which a profile could not hold; give it in UTF-8",
            "--prof_type=some": "unknown profiling mode 'some'; choose one of annotation, event, ncu, nsys, disabled",
        }.items():
            with self.subTest(flag):
                self.check(expected, "kernel", "flash_attention", "--no_autotune", flag)

    def test_flags_that_would_do_nothing(self):
        for flag in ("--out_dir=x", "--label=x", "--bench_runs=3"):
            self.check(f"{flag.split('=')[0]} does nothing with --prof_type=disabled: leave out one of the two",
                       "kernel", "flash_attention", *SMALL, "--prof_type=disabled", flag)
        for flag in ("--retune", "--tune_max_iters=3"):
            self.check(f"{flag.split('=')[0]} does nothing with --no_autotune: leave out one of the two", "kernel",
                       "flash_attention", *SMALL, "--no_autotune", flag)
        self.check("--Bm is for --no_autotune: add that, or leave out --Bm and let the tuner choose", "kernel",
                   "flash_attention", *SMALL, "--Bm=16")

    def test_a_version_that_runs_nowhere_else(self):
        self.assertIn("this version exists for no other target, but cutile.mla.flash_attention runs "
                      "everywhere", self.refuse("kernel", "flash_attention", "v1", "--device=cpu"))
        self.assertIn("There are: cute v0, cute v1, ", self.refuse("kernel", "flash_mla", "v77"))

    def test_a_bad_table_of_measured_devices_stops_nothing(self):
        (self.directory / "devices.json").write_text('{"NVIDIA H200": {"peak_dram_bw_GBps": "fast"}}')
        shape = ["choose", "--b=32", "--s=16", "--device_name=NVIDIA H200"]
        done = self.succeed(*shape, HYPERMLA_CACHE_DIR=self.directory)
        self.assertEqual(done.out, self.succeed(*shape).out)
        self.assertRegex(done.err, rf"^hypermla: measured devices are left out: {self.directory}/devices.json: device "
                                   "'NVIDIA H200': peak_dram_bw_GBps is \"fast\"[^\n]*\n$")

    def test_a_cache_of_another_user(self):
        cache = self.directory / "cache"
        cache.mkdir(mode=0o700 if os.geteuid() == 0 else 0)
        self.directory.chmod(0o755)
        user = {"user": 65534} if os.geteuid() == 0 else {}
        try:
            done = subprocess.run([BINARY, "choose", "--b=4"], cwd="/", capture_output=True, text=True, **user,
                                  env={**os.environ, "HYPERMLA_CACHE_DIR": str(cache)})
        except PermissionError:
            self.skipTest("other users cannot read the program")
        self.assertEqual(done.stderr, f"hypermla: measured devices are left out: '{cache}' cannot be looked into; set "
                                      "HYPERMLA_CACHE_DIR to a directory of your own\n")
        self.assertEqual(done.returncode, 0)

    def test_a_key_of_megabytes_is_cut(self):
        cache = self.directory / "cache"
        cache.mkdir(mode=0o700)
        (cache / "devices.json").write_text('{"A GPU": {"' + "x" * (4 << 20) + '": 1}}')
        done = self.succeed("choose", "--b=4", HYPERMLA_CACHE_DIR=cache)
        self.assertIn("has no key 'xxx", done.err)
        self.assertLess(len(done.err), 1000)

    def test_a_file_that_holds_no_records(self):
        """Refused before a case is run, and left as it is."""
        path = self.directory / "records.json"
        for text in ("", "{", "[1]", '{"a": 1}', '{"a": {"b": []}}'):
            path.write_text(text)
            for words in (["--records_only"], ["prefix_decompression", "--device=cpu"]):
                sentence = self.refuse("verify", *words, f"--record={path}")
                self.assertIn(f"{path} holds no records of `hypermla verify`", sentence)
            self.assertEqual(path.read_text(), text)
        path.write_text('{"cutile.mla.flash_mla": {"A GPU": {}}}')
        self.assertEqual(run("verify", "flash_mla", "v0", "--records_only", f"--record={path}").status, 1)

    def test_what_a_cpu_verified_is_no_record(self):
        path = self.directory / "records.json"
        words = ["verify", "prefix_decompression", f"--record={path}"]
        self.succeed(*words, "--device=cpu")
        self.assertIn("NOT RECORDED", run(*words, "--records_only").out)
        text = path.read_text()
        path.write_text(re.sub(r'"arch": "[^"]*"', '"arch": 90', text))  # nor is what some other program wrote
        self.assertIn("NOT RECORDED", run(*words, "--records_only").out)
        path.write_text(re.sub(r'"arch": "[^"]*"', '"arch": "sm_90"', text))
        self.assertIn("recorded", self.succeed(*words, "--records_only").out)

    def test_a_record_is_of_the_launches_too(self):
        """One that does not say what was launched, as those of before, stands for any."""
        path = self.directory / "records.json"
        words = ["verify", "prefix_decompression", f"--record={path}"]
        self.succeed(*words, "--device=cpu")
        (of_kernel,) = json.loads(path.read_text()).values()
        (record,) = of_kernel.values()
        self.assertRegex(record["launches"], "^[0-9a-f]{32}$")
        for launches, status in ((record["launches"], 0), ("0" * 32, 1), (None, 0)):
            now = {**record, "arch": "sm_90", "launches": launches}
            path.write_text(json.dumps({"cutile.mla.prefix_decompression": {
                "A GPU": {key: value for key, value in now.items() if value is not None}}}))
            self.assertEqual(run(*words, "--records_only").status, status)

    def test_a_kernel_that_awaits_a_gpu(self):
        """It passes as waiting while its source is the one that was spoken of."""
        path = self.directory / "records.json"
        words = ["verify", "flash_mla", "v0", f"--record={path}"]
        self.assertIn(f"there is no {path}", self.refuse(*words, "--records_only"))
        self.assertIn("awaits a GPU since 20", self.succeed(*words, "--awaits_gpu=no machine had one").out)
        self.assertIn(": no machine had one", self.succeed(*words, "--records_only").out)
        records = json.loads(path.read_text())
        (waiting,) = (one["awaits a GPU"] for one in records.values())
        waiting["fingerprint"] = {name: "0" * 32 for name in waiting["fingerprint"]}
        path.write_text(json.dumps(records))
        changed = run(*words, "--records_only")
        self.assertEqual(changed.status, 1)
        self.assertIn("NOT RECORDED", changed.out)

    def test_of_records_written_at_once_none_is_lost(self):
        path = self.directory / "records.json"
        kernels = ("cute.mla.flash_mla", "cutile.mla.flash_mla", "cute.mla.flash_attention", "cute.mla.flash_mla_v1")
        with concurrent.futures.ThreadPoolExecutor(len(kernels)) as pool:
            for done in pool.map(lambda name: run("verify", name, "--awaits_gpu=all", f"--record={path}"), kernels):
                self.assertEqual(done.status, 0, done)
        self.assertEqual(sorted(json.loads(path.read_text())), sorted(kernels))

    def test_what_verify_cannot_do_is_said_before_its_cases(self):
        words = "verify", "prefix_decompression", "--device=cpu"
        self.assertIn("could not write '/proc/x'", self.refuse(*words, "--record=/proc/x/y"))
        for why in "", " ":
            self.assertIn("--awaits_gpu", self.refuse("verify", f"--awaits_gpu={why}"))
        self.assertIn("leave one of them out", self.refuse("verify", "--awaits_gpu=x", "--records_only"))
        self.assertIn("no UTF-8 text", self.refuse("verify", "--awaits_gpu=\udcff"))

    def test_numbers_are_numbers(self):
        for count in "1.5", "x", "1e3", "-1":
            self.assertIn(f"{count} is no whole number from 0 to 1000000",
                          self.refuse("kernel", "flash_attention", "--device=cpu", f"--tune_max_iters={count}"))
        self.assertIn("n cannot be '-2'; give it an integer of 32 bits, or roofline",
                      self.refuse("predict", "mla_var6_plus", "--n=-2"))
        for words in (["choose", "--b=4", "--measure", "--seconds=nan"], ["compare", "a", "b", "--noise=nan"]):
            self.assertIn("nan is no number from 0 to", self.refuse(*words))
        for seed in "-1", "0x10", "9" * 30:
            self.assertIn(f"--seed={seed} is not supported", self.refuse("verify", f"--seed={seed}"))

    def test_words_that_say_nothing(self):
        for words in (["--list", "x"], ["--version", "x"], ["help", "kernel", "x"], ["compile", "all", "x"]):
            self.assertIn("'x' is not expected here", self.refuse(*words))
        self.assertEqual(self.succeed("help", "compare").out, self.succeed("compare", "--help").out)
        self.assertIn("leave one of them out", self.refuse("choose", "--device_name=NVIDIA H200", "--device=cpu"))
        self.assertIn("add --measure", self.refuse("choose", "--seconds=5"))

    def test_a_root_that_is_not_there(self):
        root = self.directory / "absent"
        for words in (["kb", "list"], ["kb", "lint"], ["devlog", "lint"]):
            self.assertIn(f"--root={root} is no directory", self.refuse(*words, f"--root={root}"))
        self.assertFalse(root.exists())

    def test_flags_of_what_does_not_run_here(self):
        self.assertIn("--page is a flag of cute.mla.flash_mla, which does not run on this device",
                      self.refuse("kernel", "flash_mla", "--device=cpu", "--page=16"))

    def test_each_target_has_its_own_language(self):
        words = ["compile", "flash_mla", "--s=1", "--t=64", "--h=4"]

        def compiled(*archs):
            return sorted(line[:line.index(" shared")] for line in self.succeed(*words, *archs).out.splitlines()[:-1])

        alone = sorted(compiled("--arch=cpu") + compiled("--arch=sm_90"))
        for archs in ["--arch=cpu", "--arch=sm_90"], ["--arch=sm_90,cpu"], ["--arch", "sm_90", "cpu"]:
            self.assertEqual(compiled(*archs), alone)
        self.assertIn("written for Hopper GPUs",
                      self.refuse("compile", "cute.mla.flash_mla", "v0", "--arch=sm_90", "--arch=sm_80"))

    def test_what_only_decodes_is_verified_on_a_gpu(self):
        for version in "v2", "v3":
            self.assertIn("is written for Hopper GPUs", self.refuse("verify", "flash_mla", version, "--device=cpu"))
        self.assertIn("MlaDecode", self.succeed("verify", "--help").out)

    def test_what_only_decodes_is_compiled_for_the_problem_that_was_said(self):
        words = ["compile", "cute.mla.flash_mla_v3", "--arch=sm_90"]
        done = self.succeed(*words, "--fp8=576", "--ragged", "--page=64", "--rows=32")
        self.assertIn("2 compiled, 0 failed", done.out)  # the planner's, too
        self.assertIn("add --fp8=656 or 576, and --page=64", self.refuse(*words, "--b=3"))
        for flag in "--cases", "--decode":
            self.assertIn(f"--b says a problem, but {flag} compiles those that its runs take",
                          self.refuse(*words, "--b=3", flag))
        self.assertIn("--cases and --decode", self.refuse(*words, "--cases", "--decode"))
        self.assertIn("--candidates out", self.refuse(*words, "--cases", "--candidates"))
        self.assertIn("there is no language 'foo'", self.refuse("compile", "all", "--language=foo", "--arch=sm_90"))
        self.assertIn("no kernel in the language 'cute' is for sm_120",
                      self.refuse("compile", "all", "--language=cute", "--arch=sm_120"))

    def test_products_in_fp8_have_twice_the_rate(self):
        """The floor lies below what an H200 was measured to reach (results/nvidia-h200/engine_fp8.json)."""
        words = ["predict", "flash_mla", "--fp8=576", "--page=64", "--tokens_first", "--b=32", "--s=16"]
        floors = [float(re.search(r"(?m)^NVIDIA H200 +([\d.]+) us  compute bound", self.succeed(*all_words).out)[1])
                  for all_words in (words, [*words, "--fp8_queries"])]
        self.assertAlmostEqual(floors[0], 2 * floors[1], delta=0.2)
        self.assertIn("the kernel comes first", self.refuse("predict", "--b=32", "flash_mla"))

    def test_a_problem_that_no_tiling_divides(self):
        for kernel, words in {
            "cute.mla.mla_var6_plus": ["--s=0", "--n=100", "--prefixes=1"],
            "cute.mla.output_decompression": ["--h=0"],
            "cute.mla.flash_mla_v1": ["--b=-1", "--s=3"],
            "cutile.mla.flash_mla_split_kv": ["--t=-1000"],
        }.items():
            with self.subTest(kernel):
                self.check(f"{words[0]} is not supported: it must be at least 1", "compile", kernel, *words,
                           "--arch=sm_120" if "cutile" in kernel else "--arch=sm_90")

    def test_what_a_gather_has_no_room_for(self):
        for word in "--prefetch=2", "--spare":
            self.assertIn(f"{word} is not supported here: it needs a dense cache or pages of 16 tokens or more",
                          self.refuse("compile", "cute.mla.flash_mla", "v0", "--arch=sm_90", "--page=1", word))

    def test_a_flag_given_twice(self):
        self.check("--prof_type is given twice; leave one out", "kernel", "flash_attention", "--device=cpu",
                   "--prof_type=event", "--prof_type", "disabled")

    def test_a_flag_with_a_value_that_it_does_not_take(self):
        self.assertIn("--check = maybe is neither true nor false",
                      self.refuse("kernel", "flash_attention", "--device=cpu", "--check=maybe"))

    def test_an_empty_word(self):
        """Not as if it were left out: the variable of a script may not be set."""
        for words in (["kernel", "flash_attention", ""], ["predict", "flash_mla", ""], ["compile", "flash_mla", ""]):
            self.assertIn("an argument is empty", self.refuse(*words))

    def test_a_job_of_nobody(self):
        self.assertIn("run `hypermla compile`", self.refuse("compile-job"))

    def test_a_flag_without_its_value(self):
        self.assertIn("hypermla kernel flash_attention --help", self.refuse("kernel", "flash_attention", "--b"))
        self.assertIn("--bench_runs", self.refuse("kernel", "flash_attention", "--bench_runs=0"))

    def test_a_problem_that_does_not_fit(self):
        sentence = self.refuse("kernel", "flash_attention", "--device=cpu", "--b=10000", "--t=1000000", "--h=64")
        self.assertRegex(sentence,
                         r"^the tensors need [\d.e+]+ GB, but this device has [\d.]+ GB; choose a smaller b, h or t$")
        for words in (["kernel", "flash_attention", "--device=cpu"], ["choose"]):  # before anything is planned
            self.check("--b=2147483647 is not supported: it must be at most 65535", *words, "--b=2147483647")

    def test_a_missing_gpu(self):
        if "GPU        none" not in run("device").out:
            self.skipTest("this machine has a GPU")
        self.assertIn("--device=cpu", self.refuse("kernel", "flash_attention", "--device=cuda"))

    def test_ceilings_that_could_not_be_kept_are_not_measured(self):
        self.assertIn("could not write '/proc/none'",
                      self.refuse("device", "--measure", "--device=cpu", HYPERMLA_CACHE_DIR="/proc/none"))

    def test_profilers_of_gpus_on_a_cpu(self):
        for mode in ("ncu", "nsys"):
            self.check(f"--prof_type={mode} looks into a GPU, and this kernel would run on the CPU; use "
                       "--prof_type=annotation or --prof_type=event", "kernel", "flash_attention", "--device=cpu",
                       f"--prof_type={mode}")


class FullDevice(unittest.TestCase):
    def test_lost_output_is_an_error(self):
        for words in (["--list"], ["--help"], ["predict", "flash_mla"]):
            with self.subTest(words), open("/dev/full", "w") as full:
                done = subprocess.run([BINARY, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
                self.assertEqual(done.returncode, 2)
                self.assertEqual(done.stderr, "hypermla: could not write the output (No space left on device)\n")


class Spellings(CommandCase):
    def prediction(self, *words):
        return self.succeed("predict", *words).out

    def test_equals_sign_or_blank(self):
        shape = ["--s=16", "--t=4096"]
        self.assertEqual(self.prediction("flash_mla", "--b=32", *shape),
                         self.prediction("flash_mla", "--b", "32", *shape))
        self.assertNotEqual(self.prediction("flash_mla", "--b=32", *shape),
                            self.prediction("flash_mla", "--b=16", *shape))

    def test_a_bool_needs_no_value(self):
        self.assertEqual(self.prediction("flash_mla", "--causal"), self.prediction("flash_mla", "--causal=true"))
        self.assertNotEqual(self.prediction("flash_mla", "--causal"), self.prediction("flash_mla", "--causal=false"))

    def test_hyphens_full_names_and_v0(self):
        shape = SMALL + ["--no_autotune", "--prof_type=disabled", "--check", "--seed=1"]
        outputs = {
            self.succeed(*words, *shape).out
            for words in (["kernel", "flash_attention"], ["kernel", "flash-attention", "v0"],
                          ["kernel", "cutile.mla.flash_attention"], ["kernel.cutile.mla.flash_attention", "v0"])
        }
        self.assertEqual(len(outputs), 1, outputs)


class Predictions(CommandCase):
    def test_known_shapes(self):
        # docs/predictions.md: 584.1 GFLOP at 989 TFLOP/s; the same latent attention for one query is bound by memory.
        many = self.succeed("predict", "flash_mla", "--b=32", "--s=16", "--t=4096").out
        self.assertIn("584.1 GFLOP, 0.2939 GB, 1987.7 FLOP/byte", many)
        self.assertRegex(many, r"\nNVIDIA H200 +590\.6 us  compute bound, ridge 206\.0\n")
        one = self.succeed("predict", "flash_mla", "--b=32", "--s=1", "--t=4096").out
        self.assertRegex(one, r"\nNVIDIA H200 +\d+\.\d us  (compute|memory) bound")

    def test_every_known_device_has_a_row(self):
        import json

        text = self.succeed("predict", "flash_attention").out
        for name in json.loads((CHECKOUT / "conf/devices.json").read_text()):
            self.assertIn(f"\n{name} ", text)


if __name__ == "__main__":
    unittest.main()
