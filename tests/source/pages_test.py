"""What pages are for: the facts without which one of them would not do. docs/rows-practice.md names these tests."""

import pathlib
import re
import unittest

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
DOCS = CHECKOUT / "docs"
EXAMPLES = "lib/python3*/site-packages/cutlass_library/source/examples"


def section(page, heading):
    """The text below a heading of a page, up to the next one."""
    found = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", (DOCS / page).read_text(), re.M | re.S)
    assert found, f"{page} has no section '{heading}'"
    return " ".join(found[1].split())


class Pages(unittest.TestCase):
    def test_the_language_page_is_whole(self):
        used = {name for path in (CHECKOUT / "kernels/cutile").rglob("*.cuh")
                for name in re.findall(r"\bct::(\w+)", re.sub(r"//[^\n]*", "", path.read_text()))}
        self.assertGreater(len(used), 20)
        page = (DOCS / "cuda-tile-subset.md").read_text()
        self.assertEqual([name for name in sorted(used) if not re.search(rf"\b{name}\b", page)], [])

    def test_kernels_have_pages_and_logs(self):
        pages = sorted((DOCS / "kernels").glob("*.md"))
        self.assertGreater(len(pages), 10)
        for page in pages:
            with self.subTest(page.name):
                text, log = page.read_text(), DOCS / "log" / page.name
                self.assertIn("\n## Design\n", text)
                self.assertRegex(text, r"\n## What it (should )?reach(es)?\n")
                self.assertIn(f"(../log/{log.name}", text)
                self.assertIn(f"(../kernels/{page.name}", log.read_text())

    def test_versions_are_named(self):
        text = section("kernels/mla-var6-plus.md", "Design")
        for directory in sorted((CHECKOUT / "kernels/cutile/mla/mla_var6_plus").iterdir()):
            version = re.search(r"_(v\d+)$", directory.name)
            self.assertRegex(text, rf"\| \[?{version[1] if version else 'base'}\b")

    def test_what_a_designer_hands_back(self):
        """Changes with reasons, files, whether the checks pass, trials, and the log entry."""
        hands_back = {"workflow.md": r"What the designer hands back:(.*)",
                      "../skills/design-kernel/SKILL.md": r"Return:(.*)",
                      "../.claude/agents/kernel-designer.md": r"Return:(.*)",
                      "../skills/orchestration-workflow/SKILL.md": r"Expect back from a designer:(.*)"}
        for page, pattern in hands_back.items():
            said = re.search(pattern, " ".join((DOCS / page).read_text().split()))
            for word in (r"chang", r"files", r"PASS or FAIL|correct or not", r"trials", r"log entry"):
                self.assertRegex(said[1] if said else "", word, page)


class Learning(unittest.TestCase):
    def test_six_steps(self):
        text = (DOCS / "learning/cute.md").read_text()
        steps = ["select", "read", "import", "profile", "extract", "document"]
        self.assertEqual(re.findall(r"(?m)^    (\d) (\w+) ", text), [(str(i), step) for i, step in enumerate(steps, 1)])
        done = " ".join(re.findall(r"(?m)^## (.*)$", (DOCS / "learning/cute-example.md").read_text())).lower()
        for step in steps:
            self.assertIn(step, done)

    def test_ten_patterns_in_every_example(self):
        patterns = ["pipeline", "roles", "Persistent", "softmax", "Accumulators", "Swizzle", "Cluster", "Epilogue",
                    "Boundaries", "Drain"]
        for page in ("learning/cute-example.md", "learning/cutlass-mla.md"):
            found = re.findall(r"(?<= )(\d+)\. \*\*([^*]*)\*\*", section(page, "2\\. Read"))
            self.assertEqual([int(number) for number, _ in found], list(range(1, 11)), page)
            for (_, title), pattern in zip(found, patterns):
                self.assertIn(pattern, title, page)

    def test_what_to_look_at_and_to_keep(self):
        text = section("learning/cute.md", "4 to 6\\. Profile, extract, document")
        for word in ("copies hidden", "warps wait", "tensor cores", "blocks per SM", "number of stages"):
            self.assertIn(word, text)
        for criterion in ("other kernels can use it", "official documentation does not say it", "a profile shows it"):
            self.assertIn(criterion, text)
        for place in ("languages/<language>/", "shared cards", "its log"):
            self.assertIn(place, text)

    def test_an_import_has_its_log(self):
        text = section("log/output-decompression.md", "cute V0, from CUTLASS")
        for part in ("Location: `kernels/cute/", "Source: CUTLASS", "Prediction", "Outcome", "| Metric", "Patterns:"):
            self.assertIn(part, text)

    def test_examples_are_in_the_package(self):
        """Three ways through them, and each exists where CUTLASS is installed."""
        named = re.findall(r"`((?:cute/|\d\d_)[\w/.]+)`", section("learning/cute.md", "1\\. Select"))
        self.assertGreater(len(named), 8)
        skill = (CHECKOUT / "skills/learn-from-cutlass/SKILL.md").read_text()
        for way in ("Fundamentals:", "Attention:", "Special techniques:"):
            self.assertIn(way, skill)
        for package in (CHECKOUT / ".venv").glob(EXAMPLES):
            self.assertEqual([name for name in named if not (package / name).exists()], [])


if __name__ == "__main__":
    unittest.main()
