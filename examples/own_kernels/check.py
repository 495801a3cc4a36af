"""A kernel of one's own from Python: found by HYPERMLA_KERNELS, checked by one call. docs/own-kernels.md says how it is
built."""

import hypermla

for kernel in hypermla.kernels("cutile"):
    if kernel.version == "v20":
        print(kernel.full_name, "-", kernel.summary)
result = hypermla.check("cutile.mla.flash_attention", "v20", device="cpu", b=1, s=5, t=70, h=2)
print("passed" if result.passed else "FAILED", len(result.outputs), "outputs")
