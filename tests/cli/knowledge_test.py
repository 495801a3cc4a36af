"""Knowledge cards, development logs and the next step, as commands; and every command of the playbooks in skills/."""

import json
import re
import shlex
import shutil
import subprocess
import unittest

from support import CHECKOUT, CommandCase, run

RECORD = CHECKOUT / "results/nvidia-h200/cute-flash_mla-b32-s1-h64-annotation.json"
# What makes a problem of the playbooks so small that a CPU runs it in milliseconds.
SIZES = {"--b": "1", "--s": "16", "--t": "128"}


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
        (stage, _) = json.loads(self.succeed("kb", "match", RECORD, "--json").out)["stages"]
        refuted = {card["id"] for card in stage["cards"] if "refuted" in card}
        self.assertEqual(refuted, {"O1", "O5", "O11"})
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


class Playbooks(CommandCase):
    """Every command of skills/ runs here on the CPU; what needs a GPU or minutes is checked against the help."""

    def setUp(self):
        super().setUp()
        shutil.copytree(CHECKOUT / "docs", self.directory / "checkout/docs")
        for log in (self.directory / "checkout/docs/log").iterdir():  # so that an entry can be added anew
            log.write_text(re.sub(r"^## Version .*?(?=^## |\Z)", "", log.read_text(), flags=re.M | re.S))
        self.profile = None

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

    def test_commands(self):
        pages = [*sorted((CHECKOUT / "skills").glob("*/SKILL.md")), CHECKOUT / "docs/knowledge/README.md"]
        seen = set()
        self.shared_run()
        for page in pages:
            lines = re.findall(r"^ {4,}(\./hypermla .*|scripts/.*)$", page.read_text(), re.M)
            self.assertTrue(lines, page)
            for line in lines:
                if line not in seen:
                    with self.subTest(f"{page.parent.name}: {line}"):
                        self.check(line)
                seen.add(line)
        self.assertGreater(len(seen), 40)

    def check(self, line):
        words = shlex.split(line, comments=True)
        if words[0].startswith("scripts/"):
            return self.assertEqual(subprocess.run(["bash", "-n", CHECKOUT / words[0]], check=False).returncode, 0)
        words = [re.sub("<run>", self.shared_run(), word) if "<run>" in word else word for word in words[1:]]
        flags = {word.split("=")[0]: word for word in words if word.startswith("--")}
        on_gpu = flags.get("--prof_type") in ("--prof_type=ncu", "--prof_type=nsys") or "--language=cute" in words
        if words[0] in ("kernel", "compile") and (on_gpu or words[0] == "compile") or words[:2] == ["verify", "flash_attention"]:
            return self.check_flags(words, flags)
        if words[0] == "kernel" and "--help" not in words:
            words = [f"{flag}={SIZES[flag]}" if (flag := word.split("=")[0]) in SIZES else word for word in words]
            words += ["--h=2", "--device=cpu"]
            words += [] if "--prof_type=disabled" in words else ["--bench_runs=1"]
            words += [] if "--no_autotune" in words else ["--tune_max_iters=1"]
            words = [word for word in words if word != "--bench_runs=50"]
        if words[:2] in (["kb", "add"], ["kb", "lint"], ["devlog", "add"], ["devlog", "lint"]):
            root = CHECKOUT if words[1] == "lint" else self.directory / "checkout"
            words.append(f"--root={root}")
        self.succeed(*words)

    def shared_run(self):
        """One profile for all commands, where `next` looks for it."""
        if not self.profile:
            self.succeed("kernel", "flash_attention", *(f"{flag}={size}" for flag, size in SIZES.items()), "--h=2",
                         "--device=cpu", "--bench_runs=1", "--tune_max_iters=1")
            (found,) = self.directory.glob("out/profiles/annotation/*/*/*/profile.json")
            self.profile = str(found.parent.relative_to(self.directory))
        return self.profile

    def check_flags(self, words, flags):
        if words[0] == "kernel":
            known = self.succeed(*[word for word in words[:2]], *[flags[name] for name in ("--language",) if name in flags],
                                 "--help").out
        else:
            known = self.succeed(words[0], "--help").out
            if words[0] == "compile":
                known += self.succeed("kernel", words[1], "--help").out
        for flag in flags:
            self.assertRegex(known, re.escape(flag) + r"(?![\w-])", words)


if __name__ == "__main__":
    unittest.main()
