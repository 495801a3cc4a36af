#!/usr/bin/env python3
"""mla_var6_plus v4, the two paths on streams of their own, over n, against v2 and the base version and the model.

    tests/benchmark/bench_mla_var6_plus_v4.py --s=16
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import versions  # noqa: E402

if __name__ == "__main__":
    versions.main(__doc__, "v4", ("v2", "v0"))
