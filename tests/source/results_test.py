"""The tables that pages show are those of their records."""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]


def tables(root, *words):
    return subprocess.run([sys.executable, root / "scripts/results_tables.py", *words], capture_output=True, text=True,
                          timeout=60)


# What a run under a profiler leaves, as patterns of the names in profile.json; docs/profiling.md describes the files.
LEFT_BY = {
    "ncu": ("report.ncu-rep", "report-verbose.md", "*/ncu-details.csv", "*/sass-metrics.csv", "annotated-src/*/*"),
    "nsys": ("chrome_trace.json", "stats/report_cuda_gpu_trace.csv", "stats/report_cuda_api_sum.csv",
             "stats/report_nvtx_gpu_proj_trace.csv"),
}


# A table with figures of time, and what says where they come from: a record, a command, a test's vectors, a log.
GENERATED = re.compile(r"<!-- table: .*?<!-- end of table -->", re.S)
TIMES = re.compile(r"\d(?: us| ms)\b|\b(?:us|ms|burst)\b[^|\n]*\|")
NUMBER = re.compile(r"\| \W*\d")
SOURCE = re.compile(r"results/[\w/*.-]+|\bhypermla \w+|tests/(?:benchmark|engines|unit)/\w+|\blog/[\w.-]+\.md")


def tables_without_a_source(root):
    """Sections that show times in a table of their own, and name nothing that these come from."""
    found = []
    for page in sorted((root / "docs").rglob("*.md")):
        if "log" in page.parts or "knowledge" in page.parts:
            continue
        text = page.read_text()
        for section in re.split(r"^(?=## )", text, flags=re.M):
            section = GENERATED.sub("", section)
            tables = re.findall(r"(?:^ *\|.*\n)+", section, re.M)
            if any(TIMES.search(table) and NUMBER.search(table) for table in tables) and not SOURCE.search(section):
                found.append(f"{page.relative_to(root)}: {section.splitlines()[0]}")
    return found


def missing_records(root):
    """Records that a page names, one or a pattern of some, and that are not there."""
    return [f"{page.relative_to(root)}: {name}" for page in sorted((root / "docs").rglob("*.md"))
            if "log" not in page.parts  # those of a version that was taken out stand in its log only
            for name in re.findall(r"\bresults/nvidia-[\w-]+/[\w*.-]+(?![\w*.{-])", page.read_text())
            if not any(root.glob(name.rstrip("."))) and not any(root.glob(f"{name}.json"))]


class Results(unittest.TestCase):
    def test_figures_in_tables_say_where_they_come_from(self):
        self.assertEqual(tables_without_a_source(CHECKOUT), [])

    def test_records_that_pages_name_exist(self):
        self.assertEqual(missing_records(CHECKOUT), [])

    def test_what_has_no_source_is_found(self):
        with tempfile.TemporaryDirectory() as directory:
            root = pathlib.Path(directory)
            (root / "docs").mkdir()
            table = "| case | burst |\n|---|---|\n| s = 1 | 5 us |\n"
            page = root / "docs" / "a.md"
            name = page.relative_to(root)
            page.write_text(f"# A\n\nBy `hypermla kernel a`.\n\n{table}\n## B\n\n{table}\n## C\n\n"
                            f"<!-- table: runs a -->\n{table}<!-- end of table -->\n| s | n |\n|---|---|\n")
            self.assertEqual(tables_without_a_source(root), [f"{name}: ## B"])
            records = [f"results/{device}/gone-*.json" for device in ("nvidia-h200", "nvidia-h100-80gb-hbm3")]
            page.write_text(" and ".join(f"`{record}`" for record in records))
            self.assertEqual(missing_records(root), [f"{name}: {record}" for record in records])

    def test_runs_under_profilers_left_their_files(self):
        """results/<device>/<mode>-<kernel>.json is the profile.json of such a run."""
        for mode, patterns in LEFT_BY.items():
            records = list(CHECKOUT.glob(f"results/*/{mode}-*.json"))
            if not records:
                self.skipTest(f"there is no record of {mode}")
            for record in records:
                profile = json.loads(record.read_text())
                self.assertEqual((profile["mode"], profile.get("missing", "")), (mode, ""), record)
                for pattern in patterns:
                    sizes = [size for name, size in profile["files"].items() if pathlib.PurePath(name).match(pattern)]
                    self.assertTrue(sizes and min(sizes) > 0, f"{record}: {pattern}")

    def test_pages_show_what_the_records_hold(self):
        done = tables(CHECKOUT, "--check")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_the_check_would_notice(self):
        with tempfile.TemporaryDirectory() as directory:
            root = pathlib.Path(directory)
            for name in ("scripts", "docs", "results"):
                shutil.copytree(CHECKOUT / name, root / name)
            shutil.copy(CHECKOUT / "README.md", root)
            page, readme = root / "docs/results/engine.md", root / "README.md"
            page.write_text(page.read_text().replace(" (1.", " (7.", 1))
            before = readme.read_text()
            other = root / "results/nvidia-h100-80gb-hbm3/engine.json"
            ratios = json.loads(other.read_text())
            row = next(row for row in ratios["rows"] if row["row"] == "b32-q1-t4096-h128")
            row["sustained_ratio"] = 9.5
            other.write_text(json.dumps(ratios))
            record = root / "results/nvidia-h200/prefill.json"
            prefill = json.loads(record.read_text())
            first = prefill["rows"][0]
            first["ours"]["sustained_us"] = first["fa3"]["sustained_us"] / 0.25
            record.write_text(json.dumps(prefill))
            done = tables(root, "--check")
            self.assertEqual(done.returncode, 1)
            for name in ("README.md", "docs/prefill.md", "docs/results/engine.md", "docs/results/engine-h100.md"):
                self.assertIn(name, done.stderr)
            self.assertEqual(before, readme.read_text())  # a check writes nothing
            self.assertEqual(tables(root).returncode, 0)
            most = max(one["fa3"]["sustained_us"] / one["ours"]["sustained_us"] for one in prefill["rows"])
            self.assertIn(f"0.25 to {most:.2f} |", readme.read_text().split("an engine's prefill")[1].splitlines()[0])
            self.assertIn(f"| {row['ours']['burst_us']:.1f}, {row['burst_ratio']:.2f} (9.50) |",
                          (root / "docs/results/engine-h100.md").read_text())
            self.assertEqual(tables(root, "--check").returncode, 0)
            page.write_text("<!-- table: nothing -->\n<!-- end of table -->\n")
            self.assertIn("no table can be made", tables(root, "--check").stderr)


if __name__ == "__main__":
    unittest.main()
