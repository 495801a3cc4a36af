from hypermla import _tensors
from hypermla._hypermla import Error
from hypermla._planned import parts
from hypermla.mla_decode import LATENT, ROPE

# Rows of a request that decodes, its queries of all heads on a GPU, from which on engines' queries are rounded to e4m3
# beside a cache in FP8: products bind there.
ROUNDED_ROWS = 64


def takes_strides(*rows):
    """Whether MlaDecode reads queries [tokens, heads, columns], of one part or two, where they lie: a tile of its rows
    is a box where heads divide it or it divides them, and where all rows are at one distance."""
    heads = rows[0].shape[1]
    if heads % 64 == 0 or 64 % heads == 0:
        return True
    strides = [_tensors.strides(part) for part in rows]
    return all(token == heads * head for token, head, _ in strides)


def positive(name, value):
    """As a float. MlaDecode takes 0 for a scale of its own."""
    if not value > 0:
        raise Error(f"{name}={value} is not supported: it must be positive")
    return float(value)


def rounded(count):
    """A capacity for so many or more: few of them serve all counts."""
    return 1 << max(count - 1, 0).bit_length()


def each_part(change, q):
    """Of a tensor, or of both of a pair."""
    return tuple(map(change, q)) if isinstance(q, tuple) else change(q)


def are_queries(q, dimensions):
    """Whether q has so many dimensions, the last one of 576 columns, or is a pair of 512 and of 64."""
    shapes = [tuple(part.shape) for part in parts(q) if part is not None]
    return ([shape[-1:] for shape in shapes] in ([(LATENT + ROPE,)], [(LATENT,), (ROPE,)])
            and all(len(shape) == dimensions and shape[:-1] == shapes[0][:-1] for shape in shapes))


def takeable(q):
    """Queries [tokens, heads, columns], or a pair, of any strides as MlaDecode takes them: copied where it cannot read
    them."""
    if isinstance(q, tuple):
        return each_part(takeable, q)
    if takes_strides(q):
        return q
    rows = _tensors.empty(q, tuple(q.shape))
    rows[...] = q
    return rows
