#!/usr/bin/env python3
"""The base version of mla_var6_plus over n, in detail: the whole, its second kernel alone, and both ends, against the
model and other libraries.

    tests/benchmark/bench_mla_var6_plus.py --s=16

decompress_combine is the second kernel by itself, on the same tensors and with its own tiling; the rest is attention.
n = 0 and n = t run one path only. bench_envelope.py compares all kernels over s.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import versions  # noqa: E402

if __name__ == "__main__":
    versions.main(__doc__, "v0", ())
