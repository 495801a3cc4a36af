"""`hypermla clone` makes a whole new version or nothing, in a copy of the kernels' sources."""

import os
import re
import shutil
import unittest

from support import CHECKOUT, CommandCase, kernel_directories, run


def pascal(name):
    return "".join(word[0].upper() + word[1:] for word in name.split("_") if word)


def tokens(text):
    return text.replace("//", " ").split()


class Clone(CommandCase):
    def setUp(self):
        super().setUp()
        self.root = self.directory / "checkout"
        for name in ("kernels", "include", "src"):
            shutil.copytree(CHECKOUT / name, self.root / name)
        (self.root / "CMakeLists.txt").touch()

    def clone(self, *words, **variables):
        return self.succeed("clone", *words, HYPERMLA_ROOT=self.root, **variables)

    def refuse_clone(self, *words, **variables):
        before = sorted(self.root.rglob("*"))
        said = self.refuse("clone", *words, HYPERMLA_ROOT=self.root, **variables)
        self.assertEqual(sorted(self.root.rglob("*")), before)
        return said

    def test_every_version_has_a_copy_that_differs_by_its_name_only(self):
        for design, version, directory in kernel_directories():
            with self.subTest(design, version=version):
                said = self.clone(design, version, "v77").out
                old, new = directory.name, directory.parent.name + "_v77"
                copy = self.root / directory.relative_to(CHECKOUT).parent / new
                self.assertIn(f"as {design} v77, a draft", said)
                self.assertIn(f"./hypermla devlog add {design} v77 ", said)
                self.assertEqual(sorted(path.name.replace(new, old) for path in copy.iterdir()),
                                 sorted(path.name for path in directory.iterdir()))
                suffix = "" if version == "v0" else "_" + version
                for file in directory.iterdir():
                    renamed = copy / (new + file.name[len(old):] if file.name.startswith(old) else file.name)
                    text, original = renamed.read_text(), file.read_text()
                    self.assertIn(str(renamed), said)
                    if file.suffix == ".cpp":
                        self.assertIn(f"HYPERMLA_REGISTER_DRAFT({pascal(new)}Plan,", text)
                        self.assertNotIn(f"{pascal(old)}Plan", text)
                    if file.suffix == ".cuh" and file.stem == old:
                        self.assertRegex(text, rf"\b{new}\(")
                        self.assertNotRegex(text, rf"\b{old}\(")
                    text, original = (one.replace("HYPERMLA_REGISTER_DRAFT(", "HYPERMLA_REGISTER(")
                                      for one in (text, original))  # a draft may be copied, too
                    back = text.replace("_v77", suffix).replace("V77", pascal(suffix[1:]))
                    # The line behind the name is indented as far as the name of the macro is long, and what the
                    # longer name makes too long is broken.
                    self.assertEqual(tokens(back), tokens(original))
                    self.assertEqual([line for line in renamed.read_text().splitlines() if len(line) > 120], [])
                shutil.rmtree(copy)

    def test_the_names_that_its_headers_declare_are_new(self):
        """Host code of two versions that gave one name to two things would be linked to one of them."""
        self.clone("cute.mla.flash_attention", "v77")
        copy = self.root / "kernels/cute/mla/flash_attention/flash_attention_v77"
        declared = r"(?m)^(?:struct|class) (?:alignas\(\d+\) )?(\w+)|^constexpr \w+ (\w+)\("
        names = {a or b for header in copy.glob("*.h") for a, b in re.findall(declared, header.read_text())}
        self.assertLess({"ChunkV77", "chunk_at_v77", "PlanPrefixesTilingV77", "FlashAttentionV77Tiling"}, names)
        self.assertTrue(all(name.endswith(("V77", "_v77")) or "V77" in name for name in names), names)
        self.assertIn("kMaxPrefixRequestsV77", (copy / "plan_prefixes.cuh").read_text())

    def test_the_published_algorithm_keeps_its_name(self):
        self.clone("cutile.mla.flash_attention", "v77")
        copy = self.root / "kernels/cutile/mla/flash_attention/flash_attention_v77"
        self.assertRegex((copy / "flash_attention_v77.cuh").read_text(), r"^// FlashAttention \(Dao")
        self.assertIn("class FlashAttentionV77Plan ", (copy / "flash_attention_v77.cpp").read_text())

    def test_lines_are_broken_where_cpp_may_be(self):
        for design in ("cutile.mla.flash_mla_split_kv", "cute.mla.output_decompression", "cute.mla.flash_mla"):
            self.clone(design, "v999999")
        copies = [path.read_text() for path in self.root.glob("kernels/*/mla/*/*_v999999/*")]
        self.assertEqual([line for text in copies for line in text.splitlines() if len(line) > 120], [])
        for broken in (r'\(FlashMlaSplitKvV999999Plan,\n +"flash_mla with the tokens split over blocks, ',
                       r"\n// grid = any multiple of the cluster[^\n]* dynamic shared\n// memory\.",
                       r"\n__global__ [^\n]*\n    OutputDecompressionV999999Arguments with\) \{"):
            self.assertTrue(any(re.search(broken, text) for text in copies), broken)

    def test_what_the_form_declares_keeps_its_name(self):
        self.clone("output_decompression", "v3")
        copy = self.root / "kernels/cutile/mla/output_decompression/output_decompression_v3"
        text = (copy / "output_decompression_v3.cpp").read_text()
        self.assertIn('#include "mla/output_decompression/output_decompression_plan.h"', text)
        self.assertIn("output_decompression_cost(", text)
        self.assertIn("OutputDecompressionProblem", text)
        self.assertIn('#include "output_decompression_v3.h"', text)

    def test_a_name_alone_is_the_base_version_that_runs_everywhere(self):
        for words, original in ((["flash-attention", "v8"], "cutile.mla.flash_attention"),
                                (["flash_attention", "v9", "--language=cute"], "cute.mla.flash_attention"),
                                (["flash_mla_v1", "v8"], "cute.mla.flash_mla_v1"),
                                (["mla_var6_plus_v2", "v8"], "cutile.mla.mla_var6_plus_v2"),
                                (["mla_var6_plus", "v3", "v9"], "cutile.mla.mla_var6_plus_v3")):
            self.assertRegex(self.clone(*words).out, f"^cloned    {original} as ")

    def test_what_exists_is_not_overwritten(self):
        self.assertIn("flash_attention v1 exists already", self.refuse_clone("cute.mla.flash_attention", "v1"))
        self.clone("flash_attention", "v7")
        self.assertIn("flash_attention v7 exists already, in ", self.refuse_clone("flash_attention", "v7"))
        self.assertIn("mla_var6_plus v4 exists already", self.refuse_clone("mla_var6_plus_v2", "v4"))

    def test_wrong_names_are_refused(self):
        for suffix in ("7", "v0", "v07", "fast", "v1000000", "v1/../x", "_v7", "v7.tmp"):
            with self.subTest(suffix):
                self.assertIn("take v1, v2, ...", self.refuse_clone("flash_attention", suffix))
        self.assertIn("did you mean flash_attention", self.refuse_clone("flash_atention", "v7"))
        self.assertIn("no version 'v55'", self.refuse_clone("flash_attention", "v55", "v7"))
        self.assertIn("required", self.refuse_clone("flash_attention"))

    def test_nothing_is_left_where_it_fails(self):
        shutil.rmtree(self.root / "kernels/cutile/mla/flash_attention/flash_attention")
        self.assertIn("it was moved or removed after the build", self.refuse_clone("flash_attention", "v7"))
        (self.root / "CMakeLists.txt").unlink()
        self.assertIn("an installation holds no plans", self.refuse_clone("flash_attention", "v7"))
        if os.geteuid() != 0:  # root may write everywhere
            design = self.root / "kernels/cutile/mla/flash_mla"
            design.chmod(0o555)
            self.addCleanup(design.chmod, 0o755)
            self.assertIn("could not write", self.refuse_clone("flash_mla", "v7"))

    def test_a_directory_that_was_renamed_is_named(self):
        """Built again, it is the version of its new name, with files of the old one."""
        directory = self.root / "kernels/cute/mla/flash_attention/flash_attention_v1"
        (directory / "flash_attention_v1.cpp").rename(directory / "flash_attention_v9.cpp")
        said = self.refuse_clone("cute.mla.flash_attention", "v1", "v7")
        self.assertIn("flash_attention_v1 holds flash_attention_v9.cpp and no flash_attention_v1.cpp: was the", said)

    def test_a_directory_of_ones_own(self):
        own = self.directory / "project/kernels"
        own.mkdir(parents=True)
        own.chmod(0o755)
        before = sorted(self.root.rglob("*"))
        self.clone("flash_attention", "v7", HYPERMLA_KERNELS=own)
        copy = own / "cutile/mla/flash_attention/flash_attention_v7"
        self.assertEqual({path.name for path in copy.iterdir()},
                         {f"flash_attention_v7.{end}" for end in ("cpp", "cuh", "h")})
        self.assertEqual(sorted(self.root.rglob("*")), before)
        self.assertEqual([path for path in [own, *own.rglob("*")] if path.stat().st_mode & 0o022], [])
        self.assertIn("exists already, in ", self.refuse_clone("flash_attention", "v7", HYPERMLA_KERNELS=own))
        said = run("kernel", "flash_attention", "v7", HYPERMLA_KERNELS=own)
        self.assertRegex(said.err,
                         r"flash_attention_v7 is not part of this program: run \./hypermla.*\n.*no version 'v7'")
        self.assertEqual([path.name for path in own.parent.iterdir()], ["kernels"])

    def test_paths_with_blanks_are_quoted(self):
        own = self.directory / "a project/kernels"
        own.mkdir(parents=True)
        own.chmod(0o755)
        copy = own / "cutile/mla/flash_attention/flash_attention_v7"
        self.assertIn(f"clang-format -i '{copy}'/*\n",
                      self.clone("flash_attention", "v7", HYPERMLA_KERNELS=own).out)
        self.assertIn(f"-DHYPERMLA_KERNELS='{own}'\n", run("device", HYPERMLA_KERNELS=own).err)

    def test_where_others_may_write_is_no_place(self):
        own = self.directory / "project/kernels"
        (own / "cutile").mkdir(parents=True)
        own.chmod(0o755)
        for path, said in ((own, "may be written by other users"), (own / "cutile", "other users may write it")):
            path.chmod(0o777)
            self.assertIn(said, self.refuse_clone("flash_attention", "v7", HYPERMLA_KERNELS=own))
            self.assertIn("chmod -R go-w", self.refuse("kernel", "flash_attention", HYPERMLA_KERNELS=own))
            path.chmod(0o755)
        self.assertIn("not an absolute path", self.refuse("device", HYPERMLA_KERNELS="kernels", cwd=own.parent))
        self.assertIn("of the name kernels", self.refuse("device", HYPERMLA_KERNELS=own.parent))


if __name__ == "__main__":
    unittest.main()
