"""The commands of README.md do what it says, on this machine's CPU."""

import re
import shlex
import unittest

from support import CHECKOUT, CommandCase

README = (CHECKOUT / "README.md").read_text()


class Readme(CommandCase):
    def test_commands(self):
        lines = re.findall(r"^    \./hypermla (.*)$", README, re.M)
        self.assertGreater(len(lines), 3)
        for line in lines:
            words = shlex.split(line, comments=True)
            if words[0] == "compile" and "tile       not found" in self.succeed("device").out:
                continue
            if words[0] == "kernel" and "--help" not in words:
                words += ["--device=cpu", "--bench_runs=1"]
                if "--no_autotune" not in words:
                    words.append("--tune_max_iters=1")
            with self.subTest(line):
                done = self.succeed(*words)
                if "--check" in words:
                    self.assertIn("check     passed", done.out)


if __name__ == "__main__":
    unittest.main()
