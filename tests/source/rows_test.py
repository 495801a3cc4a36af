"""docs/rows*.md: what the original names has a row each, and the paths and tests that a row names exist."""

import pathlib
import re
import unittest

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ("rows", "rows-files", "rows-practice")
# Every row there must be, by kind: C1 to C13 and so on. A1f to A24f are artifacts: A1 to A8 are anti-patterns.
NUMBERS = {"C": 13, "K": 11, "R": 20, "A": 24, "X": 8, "B": 5, "D": 13, "W": 17, "L": 9, "V": 6, "P": 2}
# Rows of what is not taken over, with the reason in the row or below the table.
WITHOUT_TEST = {"X6", "D12"}
# What these hold is true of any page, so they show a row only if that is all that it says.
OF_ANY_PAGE = re.compile(r"source/documents: |cli/benchmark: help_needs_no_package$")
ABOUT_ANY_PAGE = {"D1"}


def rows(root=CHECKOUT):
    """(row, where, test) of every line of a table."""
    found = []
    for page in PAGES:
        for line in (root / f"docs/{page}.md").read_text().splitlines():
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            if line.startswith("| ") and re.fullmatch(r"[A-Z]\d+f?", cells[0]):
                assert len(cells) == 4, line
                found.append((cells[0], cells[2].strip("`"), cells[3].strip("`")))
    return found


def exists(where):
    return any((CHECKOUT / below / where).exists() for below in ("", "src/hypermla"))


def is_a_test(name):
    file, _, test = name.partition(": ")
    for path, pattern in ((CHECKOUT / f"tests/{file}_test.py", rf"def test_{test}\("),
                          (CHECKOUT / f"tests/{file}_test.cpp", rf"TEST(_F|_P)?\(\w+,\s*{test}\)")):
        if test and path.exists() and re.search(pattern, path.read_text()):
            return True
    return False


def wrong(row, where, test):
    """What is wrong with a row; empty: nothing."""
    if not exists(where):
        return f"there is no {where}"
    if row in WITHOUT_TEST:
        return "" if test == "-" else "has a test: take it out of WITHOUT_TEST"
    if OF_ANY_PAGE.match(test) and row not in ABOUT_ANY_PAGE:
        return f"{test} holds of any page; name the test that shows this row"
    return "" if is_a_test(test) else f"there is no test {test}"


class Rows(unittest.TestCase):
    def test_every_row_is_there_once(self):
        expected = [f"{kind}{number}{'f' if kind == 'A' else ''}"
                    for kind, count in NUMBERS.items() for number in range(1, count + 1)]
        self.assertEqual(sorted(row for row, _, _ in rows()), sorted(expected))

    def test_what_a_row_names_exists(self):
        self.assertEqual([f"{row}: {why}" for row, where, test in rows() if (why := wrong(row, where, test))], [])

    def test_the_rules_would_notice(self):
        self.assertEqual(wrong("C1", "cli/no_command.cpp", "unit/registry: FindsBySeveralSpellings"),
                         "there is no cli/no_command.cpp")
        self.assertEqual(wrong("C1", "cli/main.cpp", "unit/registry: FindsNothing"),
                         "there is no test unit/registry: FindsNothing")
        self.assertEqual(wrong("C1", "cli/main.cpp", "-"), "there is no test -")
        links = "source/documents: links_lead_somewhere"
        self.assertIn("holds of any page", wrong("D2", "docs/index.md", links))
        self.assertEqual(wrong("D1", "docs/index.md", links), "")
        self.assertIn("take it out", wrong("X6", "docs/index.md", "unit/registry: FindsBySeveralSpellings"))


if __name__ == "__main__":
    unittest.main()
