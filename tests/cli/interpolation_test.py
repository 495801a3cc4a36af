"""The hybrid between its two paths: how many tokens it decompresses, and how that is checked."""

import json
import re
import unittest

from support import CommandCase

HYBRID = ["kernel", "mla_var6_plus", "v4", "--b=1", "--s=2", "--t=70", "--h=2", "--device=cpu", "--prof_type=disabled"]


class Interpolation(CommandCase):
    def test_n_is_measured_and_remembered(self):
        first = self.succeed(*HYBRID, "--retune")
        chosen = re.search(r"(?m)^chosen    n=(\d+), the fastest of those measured: (.*)$", first.out)
        self.assertTrue(chosen, first)
        times = {int(n): float(us) for n, us in re.findall(r"n=(\d+) ([\d.]+) us", chosen[2])}
        self.assertLessEqual({0, 70}, set(times), "both ends")
        self.assertTrue(any(0 < n < 70 for n in times), times)
        n = int(chosen[1])
        self.assertEqual(times[n], min(times.values()))
        if n in (0, 70):  # then with what interpolation would take
            between = min((us, one) for one, us in times.items() if 0 < one < 70)
            self.assertIn(f"all tokens {'decompressed' if n else 'latent'}: {times[n]:.1f} us, against "
                          f"{between[0]:.1f} us with the best n between the ends, {between[1]}", first.out)
        again = self.succeed(*HYBRID)
        self.assertEqual(again.out, first.out)
        self.assertNotIn("tuning", again.err)
        # A run of its own keeps how it was found.
        out = self.directory / "run"
        self.succeed(*HYBRID[:-1], "--prof_type=event", "--bench_runs=1", f"--out_dir={out}")
        self.assertEqual(json.loads((out / "params.json").read_text())["n"], n)
        measured = json.loads((out / "tiling/n/autotuning.json").read_text())
        self.assertEqual({entry["tiling"]["n"] for entry in measured}, set(times))

    def test_without_tuning_the_model_chooses(self):
        out = self.succeed(*HYBRID, "--no_autotune").out
        self.assertRegex(out, r"(?m)^chosen    n=\d+$")

    def test_roofline_is_a_word(self):
        out = self.succeed("predict", "mla_var6_plus", "v4", "--b=32", "--s=16", "--t=4096", "--n=roofline").out
        self.assertRegex(out, r"cutile\.mla\.mla_var6_plus_v4 b32_s16_t4096_n976_.*\nNVIDIA H200 ")
        self.assertRegex(self.succeed(*HYBRID, "--n=roofline", "--no_autotune").out, r"(?m)^chosen    n=\d+$")

    def test_the_merge_is_always_checked(self):
        for n in (0, 70):
            out = self.succeed(*HYBRID, f"--n={n}", "--no_autotune", "--check").out
            self.assertRegex(out, r"check     passed \(seed \d+, t=70, n=35\)")
        # Where the problem has tokens of both kinds, it is its own check.
        self.assertNotIn("t=70, n=35", self.succeed(*HYBRID, "--n=20", "--no_autotune", "--check").out)


class Heads(CommandCase):
    def test_heads_of_a_block(self):
        for kernel, version in (("flash_mla", "v0"), ("mla_var6_plus", "v2")):
            words = ["kernel", kernel, version, "--b=2", "--s=3", "--t=70", "--h=6", "--device=cpu", "--no_autotune",
                     "--language=cutile", "--prof_type=disabled", "--check"]
            if kernel == "mla_var6_plus":
                words.append("--n=30")
            self.assertIn("check     passed", self.succeed(*words, "--Bh=3").out)
            self.assertIn("--Bh=4 is not supported: it must divide the 6 heads", self.refuse(*words, "--Bh=4"))

    def test_clusters_need_a_gpu_that_has_them(self):
        sentence = self.refuse("kernel", "flash_mla", "v0", "--b=1", "--t=70", "--h=2", "--device=cpu",
                               "--language=cutile", "--no_autotune", "--num_ctas=2")
        self.assertIn("has no clusters of thread blocks", sentence)


if __name__ == "__main__":
    unittest.main()
