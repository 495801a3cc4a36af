"""What every kernel must compute, in double precision, and how far it may be from that. Written from the documentation
alone: nothing here comes from the library."""

import numpy

# Half a last place, relative, of each type (docs/checking.md).
UNIT = {"bfloat16": 2.0**-9, "float16": 2.0**-11}
STORED = {"bfloat16": numpy.uint16, "float16": numpy.float16, "float32": numpy.float32, "int32": numpy.int32}


def rounded(values, dtype):
    """Numbers as a tensor of that type stores them: NumPy has no bfloat16, so its bits are uint16."""
    if dtype != "bfloat16":
        return values.astype(STORED[dtype])
    bits = values.astype(numpy.float32).view(numpy.uint32)
    nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(numpy.uint16)
    return numpy.where(numpy.isnan(values), numpy.uint16(0x7FC0), nearest)


def numbers(stored):
    """The other way, in double precision."""
    if stored.dtype == numpy.uint16:
        stored = (stored.astype(numpy.uint32) << 16).view(numpy.float32)
    return stored.astype(numpy.float64)


def attention(q, k, v, scale, seen):
    """Row i of q [n, e] attends to the first seen[i] of k [t, e] and v [t, w]: o [n, w], lse [n], and a bound on the
    scores that lse was made from, [n]."""
    o, lse, reach = numpy.zeros((len(q), v.shape[1])), numpy.full(len(q), -numpy.inf), numpy.zeros(len(q))
    if len(k) == 0:
        return o, lse, reach
    scores = q @ k.T * scale
    scores[numpy.arange(len(k)) >= numpy.asarray(seen)[:, None]] = -numpy.inf
    some = numpy.asarray(seen) > 0
    most = scores[some].max(1)
    weights = numpy.exp(scores[some] - most[:, None])
    o[some] = weights @ v / weights.sum(1)[:, None]
    lse[some] = most + numpy.log(weights.sum(1))
    reach[some] = scale * numpy.linalg.norm(q[some], axis=1) * numpy.linalg.norm(k, axis=1).max()
    return o, lse, reach


def causal_rows(s, tokens, causal):
    """How many of `tokens` each of the last s queries sees."""
    return numpy.clip(tokens - s + numpy.arange(s) + 1, 0, tokens) if causal else numpy.full(s, tokens)


def merge(parts):
    """Normalised partial outputs (o, lse) of the same rows: what their sum of weights makes of them, and of a row
    without any."""
    most = numpy.max([lse for _, lse in parts], axis=0)
    safe = numpy.where(numpy.isneginf(most), 0, most)
    weights = [numpy.exp(lse - safe) for _, lse in parts]
    total = numpy.sum(weights, axis=0)
    with numpy.errstate(divide="ignore"):
        return weights, numpy.where(total > 0, total, 1), safe + numpy.log(total)


def difference(name, got, expected, dtype, reach=None):
    """A sentence, or None where `got` is as near as docs/checking.md asks. `reach`: of a log-sum-exp."""
    got = numbers(got)
    finite = numpy.isfinite(expected)
    if not (numpy.isfinite(got) == finite).all() or not (got[~finite] == expected[~finite]).all():
        where = numpy.argwhere((numpy.isfinite(got) != finite) | ~finite & (got != expected))[0]
        return f"{name}{where.tolist()} is {got[tuple(where)]}, expected {expected[tuple(where)]}"
    off, exact = numpy.abs(got[finite] - expected[finite]), numpy.abs(expected[finite])
    if off.size == 0:
        return None
    if reach is not None:
        allowed = 32 * 2.0**-24 * (1 + exact + numpy.broadcast_to(reach, expected.shape)[finite])
    else:
        rms = numpy.sqrt((expected**2).mean(-1, keepdims=True))
        allowed = 12 * UNIT[dtype] * (numpy.abs(expected) + rms)[finite]
        norm, limit = numpy.linalg.norm(off), 3 * UNIT[dtype] * numpy.linalg.norm(exact)
        if not norm <= limit:
            return f"{name} is off by {norm:.3g} in norm, allowed {limit:.3g}"
    worst = (off - allowed).argmax()
    if not off[worst] <= allowed[worst]:
        where = numpy.argwhere(finite)[worst]
        return f"{name}{where.tolist()} is {got[tuple(where)]}, expected {expected[tuple(where)]}"
    return None
