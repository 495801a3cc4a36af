"""A kernel that somebody broke, in a copy of the sources: each fault is a sentence that says where to look."""

import shutil
import unittest

from support import CHECKOUT, CommandCase

KERNEL = "kernels/cutile/mla/prefix_decompression/prefix_decompression/prefix_decompression.cuh"
PARAMETERS, BODY = "int b, int t, int h) {", "  using Element = element_t<problem.dtype>;\n"
RUN = ["kernel", "prefix_decompression", "--b=1", "--t=70", "--h=2", "--device=cpu", "--no_autotune",
       "--prof_type=disabled"]


class BrokenKernel(CommandCase):
    def setUp(self):
        super().setUp()
        self.root = self.directory / "root"
        for name in ("kernels", "include", "conf"):
            shutil.copytree(CHECKOUT / name, self.root / name)
        self.of_copy = {"HYPERMLA_ROOT": self.root, "HYPERMLA_CACHE_DIR": self.directory / "cache"}

    def change(self, parameters, body=""):
        text = (CHECKOUT / KERNEL).read_text()
        self.assertEqual((text.count(PARAMETERS), text.count(BODY)), (1, 1))
        (self.root / KERNEL).write_text(text.replace(PARAMETERS, parameters).replace(BODY, BODY + body))

    def test_arguments_that_are_not_the_kernels(self):
        """The plan passes eight."""
        for parameters, body, takes in ((PARAMETERS.replace(")", ", int more)"), "", "9 arguments of 8, .*, 4"),
                                        ("int b, int t) {", "  const int h = 2;\n", "7 arguments of 8, .*, 4")):
            self.change(parameters, body)
            said = self.refuse("verify", "prefix_decompression", "--device=cpu", **self.of_copy)
            self.assertRegex(said, f"^prefix_decompression takes {takes} bytes, but its plan passes 8 of .* bytes; "
                                   "give the plan's Arguments the order and the types of the parameters in .*cuh$")
            self.assertEqual(self.refuse(*RUN, **self.of_copy), said)


if __name__ == "__main__":
    unittest.main()
