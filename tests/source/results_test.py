"""The tables that pages show are those of their records."""

import json
import pathlib
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


class Results(unittest.TestCase):
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
            record = root / "results/nvidia-h200/prefill.json"
            record.write_text(record.read_text().replace('"sustained_us": 190.44444296095105', '"sustained_us": 170.0'))
            done = tables(root, "--check")
            self.assertEqual(done.returncode, 1)
            for name in ("README.md", "docs/prefill.md", "docs/results/engine.md"):
                self.assertIn(name, done.stderr)
            self.assertEqual(before, readme.read_text())  # a check writes nothing
            self.assertEqual(tables(root).returncode, 0)
            self.assertIn("1.05 to 1.41 |", readme.read_text().split("an engine's prefill")[1].splitlines()[0])
            self.assertEqual(tables(root, "--check").returncode, 0)
            page.write_text("<!-- table: nothing -->\n<!-- end of table -->\n")
            self.assertIn("no table can be made", tables(root, "--check").stderr)


if __name__ == "__main__":
    unittest.main()
