"""Decoding of requests that share a prefix whose keys and values are decompressed: the prefix is read once for all of
them, the rest of each request from its latent cache, and the two attentions become one. The result is compared with
MlaDecode over all tokens. On the CPU with NumPy; on a GPU the same calls take PyTorch's tensors."""

import sys

import hypermla
import numpy

HEADS, PAGE, PREFIX, LAYERS = 4, 16, 64, 2
OWN, QUERIES = (20, 7, 33), (1, 2, 1)  # tokens of each request behind the prefix, the new ones included; new ones
QUERY_STARTS = numpy.array([0, 1, 3, 4], numpy.int32)

decode = hypermla.MlaDecode(heads=HEADS, max_requests=8, max_queries=2, max_tokens=256, page=PAGE, dtype="float16",
                            device="cpu")
prefix = hypermla.MlaPrefill(heads=HEADS, max_requests=8, max_query_tokens=16, max_tokens=256, dtype="float16",
                             device="cpu", causal=False, accumulate=True)
dice = numpy.random.default_rng(1)
normal = lambda *shape: dice.standard_normal(shape, numpy.float32).astype(numpy.float16)
# Pages 0 to 3 hold the prefix, then every request has its own.
table = numpy.array([[0, 1, 2, 3, 9, 5, -1], [0, 1, 2, 3, 7, -1, -1], [0, 1, 2, 3, 4, 8, 6]], numpy.int32)
own = numpy.array(OWN, numpy.int32)
worst = 0.0
for layer in range(LAYERS):
    cache, q_nope, q_rope = normal(10, PAGE, 576), normal(4, HEADS, 128), normal(4, HEADS, 64)
    kv_b_proj = normal(HEADS, 256, 512) / numpy.float16(512**0.5)
    w_uk, w_uv = kv_b_proj[:, :128], kv_b_proj[:, 128:].transpose(0, 2, 1)
    absorbed = numpy.einsum("thc,hcl->thl", q_nope, w_uk), q_rope  # float16, in which NumPy adds up
    projected = lambda o: numpy.einsum("thl,hlc->thc", o.astype(numpy.float32), w_uv).astype(numpy.float16)

    # Once for a prefix, when it is new: an engine keeps k and v of each layer.
    k, v = hypermla.decompress_prefix(cache, table[0, :4], PREFIX, w_uk, w_uv)

    # Once per step; all layers share the plans.
    decode.plan(own, QUERY_STARTS)
    prefix.plan(numpy.array([0, 4], numpy.int32), numpy.array([0, PREFIX], numpy.int32))  # all queries, one prefix

    # Once per layer. The value projection comes before the merge: there outputs have 128 columns on both sides.
    o, lse = decode.run(absorbed, cache, table[:, 4:])
    o = projected(o)
    prefix.run((q_nope, q_rope), k, v, o, lse)

    decode.plan(own + PREFIX, QUERY_STARTS)
    expected, expected_lse = decode.run(absorbed, cache, table)
    difference = numpy.abs(o - projected(expected).astype(numpy.float32)).max()
    worst = numpy.max([worst, difference, numpy.abs(lse - expected_lse).max()])  # NaN stays
print(f"{len(OWN)} requests over a prefix of {PREFIX} tokens: differ from MlaDecode over all by at most {worst:.4f}")
sys.exit(not worst <= 0.01)
