"""Knowledge cards, development logs and the next step, as commands; and every command of the playbooks in skills/."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import unittest

from support import CHECKOUT, CommandCase, run

RECORD = CHECKOUT / "results/nvidia-h200/cute-flash_mla-b32-s1-h64-annotation.json"
# What makes a problem of the playbooks so small that a CPU runs it in milliseconds.
SIZES = {"--b": "1", "--s": "16", "--t": "128"}
PLACEHOLDERS = re.compile(r"<([\w ]+)>")  # runs, else a kernel
RUNS = ("run", "before", "after")
# Commands of which only the refusal is tested here: that they parse, and that nothing but the GPU is missing.
NEEDS_A_GPU = {"--prof_type=ncu": "looks into a GPU", "--prof_type=nsys": "looks into a GPU",
               "--language=cute": "is written for Hopper GPUs (sm_90)"}
ON_A_GPU = {"./hypermla kernel flash_attention --b=32 --s=16 --t=4096 --prof_type=ncu",
            "./hypermla kernel flash_attention --b=32 --s=16 --t=4096 --prof_type=nsys",
            "./hypermla kernel flash_mla --language=cute --b=32 --s=16 --t=4096 --check",
            "./hypermla kernel output_decompression --language=cute --b=32 --s=16"}


def commands(page):
    """The commands of a page, in blocks and between backquotes, that of this program as ./hypermla."""
    blocks = re.findall(r"^ {4,}((?:\./hypermla|\./test|scripts/)\S* ?.*)$", page, re.M)
    text = re.sub(r"<!--.*?-->|^ {4,}.*$", "", page, flags=re.M)
    spans = [" ".join(span.split()) for span in re.findall(r"`((?:(?:\./)?hypermla|\./test|scripts/)[^`]*)`", text)]
    return blocks + [re.sub(r"^hypermla|(?: \[\w+\])+$", lambda found: "./hypermla" if found[0][0] == "h" else "", span)
                     for span in spans]


class Knowledge(CommandCase):
    def test_the_cards_of_the_repository_are_right(self):
        self.assertRegex(self.succeed("kb", "lint").out, r"^\d+ cards, nothing is wrong\n$")

    def test_a_broken_card_is_named(self):
        shutil.copytree(CHECKOUT / "docs", self.directory / "docs")
        for name in ("kernels", "results", "src"):
            (self.directory / name).symlink_to(CHECKOUT / name)
        card = self.directory / "docs/knowledge/optimizations/cga.md"
        card.write_text(card.read_text().replace("memory_pct >= 60", "memory_cpt >= 60"))
        done = run("kb", "lint", f"--root={self.directory}")
        self.assertEqual(done.status, 1, done)
        self.assertIn("optimizations/cga.md: a trigger names the metric 'memory_cpt'", done.out)
        self.assertIn("did you mean 'memory_pct'?", done.out)

    def test_all_that_is_wrong_is_listed(self):
        """Whatever stops the index from being written, or a link from being followed."""
        shutil.copytree(CHECKOUT / "docs", self.directory / "docs")
        for name in ("kernels", "results", "src"):
            (self.directory / name).symlink_to(CHECKOUT / name)
        for name in ("cga", "split-kv"):
            card = self.directory / f"docs/knowledge/optimizations/{name}.md"
            card.write_text(re.sub('"id": "O', '"id": "X', card.read_text()))
        done = run("kb", "lint", "--fix", f"--root={self.directory}")
        self.assertEqual(done.status, 1, done)
        for name in ("cga", "split-kv"):
            self.assertEqual(done.out.count(f"optimizations/{name}.md: its id is 'X"), 1, done)

    def test_a_profile_without_stages_is_refused(self):
        profile = json.loads(RECORD.read_text())
        profile["stages"] = []
        (self.directory / "profile.json").write_text(json.dumps(profile))
        self.assertIn("has no stage; profile it again", self.refuse("kb", "match", self.directory))

    def test_a_new_card_is_listed_and_incomplete(self):
        shutil.copytree(CHECKOUT / "docs", self.directory / "docs")
        root = f"--root={self.directory}"
        self.succeed("kb", "add", "optimizations/my-idea", "--title=My idea", root)
        self.assertIn("My idea", self.succeed("kb", "list", root).out)
        self.assertIn("# My idea", self.succeed("kb", "show", "my-idea", root).out)
        done = run("kb", "lint", root)
        self.assertEqual(done.status, 1, done)
        self.assertIn("my-idea.md: its section 'Mechanism' is empty", done.out)
        self.assertIn("is there already", self.refuse("kb", "add", "optimizations/my-idea", "--title=Again", root))
        self.assertEqual(json.loads(self.succeed("kb", "list", "--json", root).out)[0]["id"], "O1")

    def test_refuted_advice_is_shown_as_refuted(self):
        out = self.succeed("kb", "match", RECORD).out
        self.assertRegex(out, r"O1 .*waves = 0.9697 < 1\n +REFUTED for this kernel: .*762.7 us instead of 751.7")
        self.assertRegex(out, r"(?m)^combine_parts, 8 % of the time:\n +O5 .* - est. 33 % of this stage, 2.5 % of all")
        (stage, merge) = json.loads(self.succeed("kb", "match", RECORD, "--json").out)["stages"]
        refuted = {card["id"] for card in stage["cards"] if "refuted" in card}
        self.assertEqual(refuted, {"O1", "O5", "O11"})
        # What one language adds, without a promise: reports leave it out.
        self.assertLessEqual({"cute-O3", "cute-A3"}, {card["id"] for card in stage["cards"]})
        self.assertLessEqual({"cute-O6", "O13"}, {card["id"] for card in merge["cards"]})
        self.assertIn("is not a profile", self.refuse("kb", "match", CHECKOUT / "conf/profile_rules.json"))

    def test_wrong_words_are_a_sentence(self):
        self.assertIn("did you mean match?", self.refuse("kb", "mach", "x"))
        self.assertIn("kb what? One of: list, show", self.refuse("kb"))
        self.assertIn("there is no card 'O77'", self.refuse("kb", "show", "O77"))
        self.assertIn("add KERNEL", self.succeed("devlog", "--help").out)


class Devlog(CommandCase):
    def test_every_version_has_its_entry(self):
        done = run("devlog", "lint", cwd=self.directory)
        self.assertEqual(done.status, 0, done)

    def test_logs_of_kernels_of_ones_own_lie_beside_them(self):
        own = self.directory / "project/kernels"
        shutil.copytree(CHECKOUT / "examples/own_kernels", own.parent)
        for path in (own, *own.rglob("*")):
            path.chmod(path.stat().st_mode & ~0o022)
        self.assertRegex(self.succeed("devlog", "lint", HYPERMLA_KERNELS=own).out,
                         r"^\d+ versions, each has its entry\n")
        log = own.parent / "docs/log/flash-attention.md"
        log.write_text(log.read_text().replace("- Not profiled", "- Why not"))
        done = run("devlog", "lint", HYPERMLA_KERNELS=own)
        self.assertEqual((done.status, done.out.count("\n")), (1, 1), done)
        self.assertIn(f"{log}: the entry of cutile.mla.flash_attention_v20 v20: it has no profile", done.out)
        log.unlink()
        done = run("devlog", "lint", HYPERMLA_KERNELS=own)
        self.assertEqual((done.status, done.out.count("\n")), (1, 1), done)
        self.assertIn(f"{log}: cutile.mla.flash_attention_v20 has no entry", done.out)
        self.succeed("devlog", "lint")

    def test_an_entry_is_added_and_its_figures_are_checked(self):
        words = ("devlog", "add", "flash_mla", f"--profile={RECORD}", f"--root={self.directory}", "--changed=Nothing.",
                 "--why=To test.")
        self.assertIn("which no profile of this entry holds", self.refuse(*words, "--insight=It takes 1.5 us."))
        self.assertFalse((self.directory / "docs").exists())
        self.assertIn("link it from docs/index.md", self.succeed(*words, "--insight=The tensor pipe is at 37 %.").out)
        text = (self.directory / "docs/log/cute-flash-mla.md").read_text()
        self.assertIn("## Version v0 of cute.mla.flash_mla\n", text)
        self.assertIn("| tensor pipe, % | 37.0 |", text)
        self.assertIn("has an entry", self.refuse(*words, "--insight=Again."))


class Next(CommandCase):
    def test_without_a_profile_it_says_what_to_run(self):
        self.assertIn("run `hypermla kernel flash_mla", self.refuse("next", "flash_mla"))
        self.assertIn("is a profile of cute.mla.flash_mla, not of flash_attention",
                      self.refuse("next", "flash_attention", RECORD))

    def test_versions_and_drafts_have_profiles_like_any_other(self):
        """The newest run of a design counts, whatever version made it."""
        listed = self.succeed("--list").out
        drafts = re.findall(r"^(\S+) +(v\d+) +draft: ", listed, re.M)
        design, draft = (drafts or re.findall(r"^(\S+) +(v[1-9]\d*) ", listed, re.M))[0]
        run_of = {}
        for time, version in (("20300101", "v0"), ("20300102", draft)):
            profile = json.loads(RECORD.read_text())
            profile.update(kernel=design if version == "v0" else f"{design}_{version}", version=version)
            run_of[version] = pathlib.Path("out/profiles/annotation") / profile["kernel"] / "b32" / time
            (self.directory / run_of[version]).mkdir(parents=True)
            (self.directory / run_of[version] / "profile.json").write_text(json.dumps(profile))
        name = design.split(".")[-1]
        for words, version in ((["next", name], draft), (["next", name, "v0"], "v0"), (["next", name, draft], draft),
                               (["next", name, run_of[draft]], draft), (["next", f"{design}_{draft}"], draft),
                               (["next", name, draft, run_of[draft], f"--baseline={run_of['v0']}"], draft)):
            with self.subTest(words):
                said = self.succeed(*words).out
                self.assertRegex(said, rf"^# Profile: {re.escape(design)}\w* {version} \|")
                self.assertIn(f"`{run_of[version]}`", said)
        self.assertIn("has no version 'v77'", self.refuse("next", name, "v77"))
        self.assertIn(f"not of {name} v0", self.refuse("next", name, "v0", run_of[draft]))
        self.assertIn("'y' is not expected here", self.refuse("next", name, "x", "y"))
        self.succeed("devlog", "add", name, f"--profile={run_of[draft]}", f"--root={self.directory}",
                     "--changed=Nothing.", "--why=To test.", "--insight=None.")


    def test_the_newest_run_with_counters_counts(self):
        """Whatever mode counted; and the tenth run of a second is newer than the second."""
        def add(mode, time, metrics):
            profile = json.loads(RECORD.read_text())
            for stage in profile["stages"] if not metrics else ():
                del stage["metrics"]
            place = self.directory / f"out/profiles/{mode}/cute.mla.flash_mla/b32/{time}"
            place.mkdir(parents=True)
            (place / "profile.json").write_text(json.dumps(profile))
        newest = lambda: json.loads(self.succeed("next", "flash_mla", "--json").out)["profile"]["run"]
        add("annotation", "20300102T000000Z", False)
        self.assertTrue(newest().endswith("20300102T000000Z"))
        for time in ("Z-2", "Z-10", "Z"):
            add("ncu", f"20300101T000000{time}", True)
        self.assertTrue(newest().endswith("ncu/cute.mla.flash_mla/b32/20300101T000000Z-10"), newest())

    def test_a_version_that_is_not_built_keeps_its_number(self):
        own = self.directory / "kernels"
        shutil.copytree(CHECKOUT / "examples/own_kernels/kernels", own)
        for path in (own, *own.rglob("*")):
            path.chmod(path.stat().st_mode & ~0o022)
        record = CHECKOUT / "results/nvidia-h200/flash_attention-b32-s32.json"
        task = json.loads(self.succeed("next", "flash_attention", record, "--json", HYPERMLA_KERNELS=own).out)["task"]
        self.assertIn("cutile.mla.flash_attention_v21", task["task"] + task["gates"][1]["command"])

    def test_the_sheet_says_how_to_start(self):
        task = json.loads(self.succeed("next", "flash_mla", RECORD, "--json").out)["task"]
        self.assertRegex(task["start"], r"^\./hypermla clone cute\.mla\.flash_mla v\d+$")
        self.assertIn(f"Start with `{task['start']}`", self.succeed("next", "flash_mla", RECORD).out)
        # An idea that places warps by hand, of a kernel that does not: the copy is one of the other language's.
        record = CHECKOUT / "results/nvidia-h200/mla_var6_plus-b32-s16-n976-annotation.json"
        task = json.loads(self.succeed("next", "mla_var6_plus", record, "--json").out)["task"]
        self.assertRegex(task["task"], r"^cutile\.mla\.mla_var6_plus -> cute\.mla\.mla_var6_plus_v\d+$")
        self.assertRegex(task["start"], r"^\./hypermla clone cute\.mla\.mla_var6_plus v\d+$")

    def test_it_tells_what_kb_match_tells(self):
        """What fires in a short stage counts by what that stage can gain of the whole."""
        fired = {(card["id"], stage["stage"], "refuted" in card): card["gain_percent_of_all"]
                 for stage in json.loads(self.succeed("kb", "match", RECORD, "--json").out)["stages"]
                 for card in stage["cards"] if card["gain_percent_of_all"] >= 1}
        said = json.loads(self.succeed("next", "flash_mla", RECORD, "--json").out)["profile"]
        shown = {(one["id"], one["stage"], refuted) for refuted, name in ((False, "opportunities"), (True, "refuted"))
                 for one in said[name]}
        self.assertEqual(shown, set(fired))
        self.assertIn(("O5", "combine_parts", False), shown)
        self.assertIn(("O5", "flash_mla", True), shown)
        for one in said["opportunities"]:
            self.assertAlmostEqual(one["gain_percent"], fired[one["id"], one["stage"], False])


class Playbooks(CommandCase):
    """Every command of skills/ runs here on the CPU, small; ON_A_GPU names those that only a GPU runs."""

    def setUp(self):
        super().setUp()
        shutil.copytree(CHECKOUT / "docs", self.directory / "checkout/docs")
        for log in (self.directory / "checkout/docs/log").iterdir():  # so that an entry can be added anew
            log.write_text(re.sub(r"^## Version .*?(?=^## |\Z)", "", log.read_text(), flags=re.M | re.S))
        self.profile, self.verified = None, set()

    def test_front_matter(self):
        skills = sorted((CHECKOUT / "skills").iterdir())
        self.assertGreaterEqual(len(skills), 9)
        for skill in skills:
            text = (skill / "SKILL.md").read_text()
            found = re.match(r"---\nname: (\S+)\ndescription: >-\n((?:  \S.*\n)+)---\n# \S", text)
            self.assertTrue(found, skill)
            self.assertEqual(found[1], skill.name)
            self.assertLess(len(found[2]), 1024, skill)

    def test_agents_follow_playbooks(self):
        agents = sorted((CHECKOUT / ".claude/agents").iterdir())
        self.assertEqual([agent.stem for agent in agents], ["kernel-designer", "profiler"])
        for agent in agents:
            found = re.match(r"---\nname: (\S+)\ndescription: >-\n(?:  \S.*\n)+skills: (.*)\n---\n", agent.read_text())
            self.assertTrue(found, agent)
            self.assertEqual(found[1], agent.stem)
            for skill in found[2].split(", "):
                self.assertTrue((CHECKOUT / ".claude/skills" / skill / "SKILL.md").exists(), skill)

    def test_commands_are_found_in_blocks_and_lines(self):
        page = ("Say `hypermla next <kernel> [version] [run]`,\n`./test\na.b`.\n\n   ./hypermla no\n\n"
                "       scripts/a.sh\n    ./hypermla b\n")
        self.assertEqual(commands(page + "<!-- `hypermla no` -->"),
                         ["scripts/a.sh", "./hypermla b", "./hypermla next <kernel>", "./test a.b"])

    def test_commands(self):
        pages = [*sorted((CHECKOUT / "skills").glob("*/SKILL.md")), CHECKOUT / "docs/knowledge/README.md",
                 CHECKOUT / "docs/workflow.md"]
        seen, self.refused = set(), set()
        self.shared_run()
        for page in pages:
            for line in commands(page.read_text()):
                line = PLACEHOLDERS.sub(lambda found: self.profile if found[1] in RUNS else "flash_attention", line)
                if line not in seen:
                    with self.subTest(f"{page.parent.name}: {line}"):
                        self.check(line)
                seen.add(line)
        self.assertGreater(len(seen), 45)
        self.assertEqual(self.refused, ON_A_GPU)

    def check(self, line):
        words = shlex.split(line, comments=True)
        if words[0].startswith("scripts/"):
            return self.dry_run(words[0]) if words[0].endswith("-clock.sh") else self.explains(words[0])
        if words[0] == "./test":  # this test is one of its own
            return self.assertIn(f"add_test(NAME {words[1]} ", (CHECKOUT / "tests/CMakeLists.txt").read_text())
        words = [str(CHECKOUT / word) if word.startswith("examples/") else word for word in words[1:]]
        if words in (["next"], ["kb", "add"], ["devlog", "add"], ["compare"]):  # its name only
            return self.succeed(*words, "--help")
        if words[:1] == ["verify"] and words != ["verify", "--records_only"]:
            words = ["verify", *(words[1:2] or ["flash_attention"]), "--device=cpu", "--seed=7"]
            if tuple(words) in self.verified:
                return None
            self.verified.add(tuple(words))
            return self.assertIn(", seed 7\n", self.succeed(*words).out)
        compiles = (words[0] == "compile" or any(word.startswith("--arch=") for word in words)
                    or "elementwise_cute" in line)
        if compiles and "tile       not found" in self.succeed("device", "--device=cpu").out:
            return None  # there are no CUDA compilers here
        if words[0] == "kernel" and "--help" not in words:
            on_gpu = next((why for word, why in NEEDS_A_GPU.items() if word in words), None)
            if on_gpu:
                self.refused.add(line)
                return self.assertIn(on_gpu, self.refuse(*words, "--device=cpu"))
            words = [f"{flag}={SIZES[flag]}" if (flag := word.split("=")[0]) in SIZES else word for word in words]
            words += ["--h=2", "--device=cpu"]
            words += [] if "--prof_type=disabled" in words else ["--bench_runs=1"]
            words += [] if "--no_autotune" in words else ["--tune_max_iters=1"]
            words = [word for word in words if word != "--bench_runs=50"]
        if words[0].endswith("-file") and "--help" not in words:
            words.append("--device=cpu")
        if words[:2] in (["kb", "add"], ["kb", "lint"], ["devlog", "add"], ["devlog", "lint"]):
            root = CHECKOUT if words[1] == "lint" else self.directory / "checkout"
            words.append(f"--root={root}")
        if words[0] == "clone":  # beside a project of one's own, so that nothing is written here
            (self.directory / "kernels").mkdir(mode=0o755, exist_ok=True)
            self.succeed(*words, HYPERMLA_KERNELS=self.directory / "kernels")
            return self.assertEqual(len(list(self.directory.glob(f"kernels/*/*/*/*_{words[-1]}/*.cuh"))), 1)
        return self.succeed(*words)

    def dry_run(self, script):
        """What locks and resets clocks says what it would do, with a stand-in for nvidia-smi that knows a name only."""
        tool = self.directory / "bin/nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text('#!/bin/sh\n[ "$1" = --query-gpu=name ] && echo "NVIDIA H200"\n')
        tool.chmod(0o755)
        path = f"{tool.parent}:/usr/bin:/bin"
        done = subprocess.run([CHECKOUT / script, "--dry-run"], env={**os.environ, "PATH": path}, text=True,
                              check=False, capture_output=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertRegex(done.stdout, r"^nvidia-smi --")

    def explains(self, script):
        """A script with a test of its own says what it is for."""
        done = subprocess.run([CHECKOUT / script, "--help"], text=True, check=False, capture_output=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn(script, done.stdout)

    def shared_run(self):
        """One profile for all commands, where `next` looks for it."""
        if not self.profile:
            self.succeed("kernel", "flash_attention", *(f"{flag}={size}" for flag, size in SIZES.items()), "--h=2",
                         "--device=cpu", "--bench_runs=7", "--tune_max_iters=1")
            (found,) = self.directory.glob("out/profiles/annotation/*/*/*/profile.json")
            self.profile = str(found.parent.relative_to(self.directory))
        return self.profile

if __name__ == "__main__":
    unittest.main()
