"""`hypermla choose`: the ranking for a named device, measured here, as JSON, and what it refuses."""

import json
import unittest

from support import CommandCase, run

H200 = "--device_name=NVIDIA H200"
ROW = r"(?m)^{path} +{kernel}( \(draft\))? +{n} +[\d.]+ +[\d.]+  (tensor|memory|power|launches) *$"


class Ranking(CommandCase):
    def ranking(self, *words):
        return json.loads(self.succeed("choose", *words, "--json").out)

    def test_every_path_is_in_the_table(self):
        out = self.succeed("choose", "--b=32", "--s=16", H200).out
        self.assertTrue(out.startswith("NVIDIA H200 (sm_90): b=32 s=16 t=4096 h=128 "), out)
        self.assertRegex(out, ROW.format(path="latent", kernel=r"cutile\.mla\.flash_mla", n=0))
        self.assertRegex(out, ROW.format(path="latent", kernel=r"cute\.mla\.flash_mla", n=0))
        self.assertRegex(out, ROW.format(path="decompressed", kernel=r"cutile\.mla\.flash_attention", n=4096))
        self.assertRegex(out.splitlines()[-1], r"^choice        \S+, latent path$")

    def test_json_says_the_same(self):
        found = self.ranking("--b=32", "--s=64", H200)
        self.assertEqual(found["problem"]["s"], 64)
        times = [row["sustained_us"] for row in found["ranking"]]
        self.assertEqual(times, sorted(times))
        self.assertEqual(found["choice"], {"kernel": "cutile.mla.flash_attention", "n": 4096})
        drafts = {row["kernel"]: row["draft"] for row in found["ranking"]}
        self.assertFalse(drafts[found["choice"]["kernel"]])

    def test_a_card_without_wgmma_has_no_kernel_for_it(self):
        kernels = [row["kernel"] for row in self.ranking("--s=16", "--device_name=NVIDIA GeForce RTX 5090")["ranking"]]
        self.assertTrue(kernels)
        self.assertEqual([kernel for kernel in kernels if not kernel.startswith("cutile.")], [])

    def test_one_language(self):
        rows = self.ranking("--s=16", "--language=cute", H200)["ranking"]
        self.assertEqual({row["kernel"].split(".")[0] for row in rows}, {"cute"})

    def test_a_prefix_and_private_tokens_make_t(self):
        self.assertEqual(self.ranking("--prefix=8192", "--private=1024", H200)["problem"]["t"], 9216)

    def test_measured_here(self):
        words = ["choose", "--b=1", "--s=2", "--t=64", "--h=2", "--device=cpu", "--measure"]
        rows = json.loads(self.succeed(*words, "--json").out)["ranking"]
        measured = [row for row in rows if "measured_burst_us" in row]
        self.assertGreaterEqual({row["path"] for row in measured}, {"latent", "decompressed"})
        for row in measured:
            self.assertGreater(row["measured_burst_us"], 0)
        self.assertRegex(self.succeed(*words).out, r"(?m)^latent +cutile\.mla\.flash_mla .* [\d.]+ +[+-][\d.]+% ")

    def test_what_cannot_run_is_a_row_that_says_so(self):
        done = self.succeed("choose", "--b=1", "--s=2", "--t=64", "--h=2", "--device=cpu", "--measure",
                            CXX="/bin/false", HYPERMLA_CACHE_DIR=self.directory / "cache")
        self.assertIn("not measured: ", done.out)

    def test_a_kernel_without_a_tiling_that_fits_is_left_out(self):
        for extent in "--d=1000", "--p=1000":
            done = run("choose", "--b=1", "--s=1", "--t=256", extent, H200)
            self.assertNotIn("mla_var6_plus_v3", done.out)
            self.assertIn(done.status, (0, 2), done)
        self.assertIn("is not supported: it must be a power of two",
                      self.refuse("predict", "mla_var6_plus_v3", "--p=1000"))

    def test_refusals(self):
        for words, sentence in {
            ("--device_name=H200",): "device 'H200' has no entry in devices.json; did you mean 'NVIDIA H200'?",
            ("--language=cuda", H200): "no kernel in the language 'cuda' for sm_90 takes this problem",
            ("--device_name=NVIDIA H300",):
                "device 'NVIDIA H300' has no entry in devices.json; did you mean 'NVIDIA H200'?",
            ("--prefix=5000",): "--prefix=5000 is not supported: requests have only --t=4096 tokens; or set --private",
            ("--prefixes=0",): "--prefixes=0 is not supported: it must be from 1 to the 32 requests",
            ("--page=3", H200): "takes this problem: --page=3 is not supported: choose 1, 16, 32, 64 or 128",
            ("--page=-1",): "--page=-1 is not supported: choose 1, 16, 32, 64 or 128",
            ("--t=4096", "--prefix=2", "--private=3"): "--t=4096 is not what --prefix=2 and --private=3 add up to",
            ("--prefixes=3",): "--prefixes=3 says how many prefixes there are; add --prefix",
            ("--b=0",): "--b=0 is not supported: it must be at least 1",
            ("--dtype=float32", H200): "no kernel for sm_90 takes this problem",
            ("--measure", H200): "--measure runs on the present device: choose one of them",
            ("--perfix=3",): "unknown flag --perfix; did you mean --prefix? See hypermla choose --help",
        }.items():
            with self.subTest(words):
                self.assertIn(sentence, self.refuse("choose", *words))


if __name__ == "__main__":
    unittest.main()
