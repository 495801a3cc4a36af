"""Pictures and report.html, from a recorded profile, and how a browser shows them."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import unittest
import xml.etree.ElementTree

from support import CHECKOUT, CommandCase

SVG = "{http://www.w3.org/2000/svg}"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")


@unittest.skipUnless(importlib.util.find_spec("matplotlib"), "no matplotlib here")
class Pictures(CommandCase):
    def make(self, name, **problem):
        run = self.directory / f"{name}-{'-'.join(map(str, problem.values()))}"
        (run / f"tiling/{name}").mkdir(parents=True)
        profile = json.loads((CHECKOUT / f"tests/unit/recorded/{name}.json").read_text())
        profile["problem"].update(problem)
        (run / "profile.json").write_text(json.dumps(profile))
        (run / "report.md").write_text(
            "# Profile: some <kernel>\n\nBound by `memory` & **time**.\n\n1. First\n2. Second\n\n"
            "| a | b |\n|---|---|\n| 1 | 2 < 3 |\n")
        history = [{"tiling": {"Bm": m, "Bn": n, "num_warps": 4}, "seconds": [m * n * 1e-6]}
                   for m in (16, 64) for n in (32, 128)]
        history.append({"tiling": {"Bm": 256, "Bn": 32, "num_warps": 4}, "seconds": [], "rejected": "does not fit"})
        (run / f"tiling/{name}/autotuning.json").write_text(json.dumps(history))
        return run

    def plot(self, *runs):
        done = subprocess.run([sys.executable, CHECKOUT / "scripts/plot_profile.py", *runs], capture_output=True,
                              text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done)
        return done

    def texts(self, path):
        return [" ".join(element.itertext()).strip()
                for element in xml.etree.ElementTree.parse(path).iter(f"{SVG}text")]

    def test_every_picture_shows_what_was_measured(self):
        run = self.make("flash_attention", s=16)
        self.assertEqual(self.plot(run).stdout.split(), [str(run / "report.html")])
        roofline = self.texts(run / "roofline.svg")
        self.assertTrue(any(text.startswith("specified: 989 TFLOP/s, 4800 GB/s") for text in roofline), roofline)
        self.assertTrue(any(text.startswith("flash_attention: 90.7 TFLOP/s") for text in roofline), roofline)
        tuning = self.texts(run / "tuning-flash_attention.svg")
        for time in ("512", "2048", "8192"):  # Bm x Bn microseconds
            self.assertIn(time, tuning)
        self.assertIn("flash_attention: best us of 4 tilings", tuning)
        self.assertIn("flash_attention", self.texts(run / "stages.svg"))
        self.assertFalse((run / "crossover.svg").exists(), "one s has no crossover")

    def test_a_cpu_is_seen_by_its_small_figures(self):
        run = self.make("flash_attention", s=16)
        profile = json.loads((run / "profile.json").read_text())
        profile["roofline"] = {"peak_tflops": 0.384, "peak_gbps": 51.2, "ridge": 7.5, "predicted_us": 6.8,
                               "bound": "compute"}
        for time in [*profile["timing"].values(), *(stage["burst"] for stage in profile["stages"] if "burst" in stage)]:
            time["median_us"] = 1e7
        (run / "profile.json").write_text(json.dumps(profile))
        self.plot(run)
        texts = self.texts(run / "roofline.svg")
        self.assertFalse([text for text in texts if re.search(r"\b0 TFLOP/s", text)], texts)
        self.assertIn("0.384 TFLOP/s", texts)  # at the ceiling itself
        svg = (run / "roofline.svg").read_text()
        frame = re.search(r'<g id="patch_2">\s*<path d="M [\d.]+ ([\d.]+) \s*L [\d.]+ [\d.]+ \s*L [\d.]+ ([\d.]+)', svg)
        line = re.search(r'<path d="([^"]*)"[^>]*stroke: #000000; stroke-width: 1.5', svg)[1]
        ceiling = min(float(y) for y in re.findall(r"L [\d.]+ ([\d.]+)", line))
        self.assertGreater(ceiling, float(frame[2]) + 10, "the ceiling lies below the frame")
        texts = self.texts(run / "stages.svg")
        self.assertNotIn("timeline", texts)
        self.assertIn("stages, each by itself, against the roofline", texts)

    def test_crossover_needs_several_s_of_one_shape(self):
        runs = [self.make("flash_attention", s=16), self.make("flash_attention", s=32)]
        self.plot(*runs)
        self.assertIn("queries per request, s", self.texts(runs[1] / "crossover.svg"))
        other = self.make("flash_attention", s=64, b=1)
        self.plot(runs[0], other)
        self.assertFalse((other / "crossover.svg").exists())

    def test_a_timeline_has_a_row_per_stream(self):
        run = self.make("flash_attention", s=16)
        events = [{"ph": "X", "cat": "kernel", "name": name, "tid": stream, "ts": 10.0, "dur": 5.0}
                  for name, stream in (("latent", 7), ("tokens", 8))]
        (run / "chrome_trace.json").write_text(json.dumps({"traceEvents": events}))
        self.plot(run)
        texts = self.texts(run / "stages.svg")
        for word in ("latent", "tokens", "stream 7", "stream 8", "us"):
            self.assertIn(word, texts)
        self.assertNotIn("DRAM", texts)
        self.assertIn("timeline", texts)

    def test_a_timeline_has_its_counters_below(self):
        run = self.make("flash_mla_split_kv", s=1)
        shutil.copy(CHECKOUT / "tests/unit/recorded/chrome_trace.json", run)
        self.plot(run)
        texts = self.texts(run / "stages.svg")
        for word in ("flash_mla_split_kv_reduce", "stream 13", "tensor pipe", "DRAM", "% of peak", "us"):
            self.assertIn(word, texts)

    def test_the_page_needs_nothing_else(self):
        run = self.make("flash_attention", s=16)
        self.plot(run)
        page = (run / "report.html").read_text()
        self.assertIn("<h1>Profile: some &lt;kernel&gt;</h1>", page)
        self.assertIn("<td>2 &lt; 3</td>", page)
        self.assertEqual(re.findall(r"<(?:script|link|img|iframe)\b", page), [])
        self.assertEqual(re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)), [])
        ids = re.findall(r'\bid="([^"]+)"', page)
        self.assertEqual(len(ids), len(set(ids)))
        for target in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page):
            self.assertIn(target[0] or target[1], ids)

    def test_what_is_no_run_is_refused(self):
        done = subprocess.run([sys.executable, CHECKOUT / "scripts/plot_profile.py", self.directory],
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("is no run", done.stderr)

    @unittest.skipUnless(BROWSER, "no browser here")
    def test_a_browser_shows_it(self):
        run = self.make("flash_attention", s=16)
        self.plot(run)
        page = run / "report.html"
        # The browser's own view of the page, with the sizes that it gave to the pictures.
        probe = ("<script>document.body.dataset.sizes = [...document.querySelectorAll('figure svg')].map("
                 "s => Math.round(s.getBoundingClientRect().width) + 'x' + "
                 "Math.round(s.getBoundingClientRect().height)).join(' ');"
                 "document.body.dataset.rows = document.querySelectorAll('tbody tr').length;</script></body>")
        probed = self.directory / "probed.html"
        probed.write_text(page.read_text().replace("</body>", probe))
        done = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu",
                               f"--user-data-dir={self.directory}/browser", "--virtual-time-budget=5000",
                               "--dump-dom", probed.as_uri()], capture_output=True, text=True, timeout=120)
        sizes = re.search(r'data-sizes="([^"]*)"', done.stdout)
        self.assertTrue(sizes, done.stderr[-500:])
        shown = [tuple(map(int, size.split("x"))) for size in sizes[1].split()]
        self.assertEqual(len(shown), 3)
        for width, height in shown:
            self.assertGreater(width, 100)
            self.assertGreater(height, 60)
        self.assertIn('data-rows="1"', done.stdout)


if __name__ == "__main__":
    unittest.main()
