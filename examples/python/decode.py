"""A step of a serving engine: two requests, one with a draft, over a paged cache. On the CPU with NumPy, where uint16
stands for bfloat16; on a GPU the same calls take PyTorch's tensors."""

import hypermla
import numpy

HEADS, PAGE, LAYERS = 16, 64, 3
decode = hypermla.MlaDecode(heads=HEADS, max_requests=4, max_queries=2, max_tokens=256, page=PAGE, device="cpu")
# Requests of 100 and 30 tokens, the new ones included; the first has 2 queries. Pages 5, 2 and 7 of each layer's cache.
lengths = numpy.array([100, 30], numpy.int32)
query_starts = numpy.array([0, 2, 3], numpy.int32)
block_table = numpy.array([[5, 2], [7, 0]], numpy.int32)
q = numpy.full((3, HEADS, 576), 0x3F80, numpy.uint16)  # 1.0 in bfloat16

decode.plan(lengths, query_starts)
for layer in range(LAYERS):
    cache = numpy.full((8, PAGE, 576), 0x3C00, numpy.uint16)  # 2^-7
    o, lse = decode.run(q, cache, block_table)
print("lse", " ".join(f"{value:.4f}" for value in lse[:, 0]))  # 0.3248 + ln of 99, 100 and 30
