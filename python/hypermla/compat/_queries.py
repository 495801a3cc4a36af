from hypermla import _tensors

# Heads on a GPU from which on engines' queries are rounded to e4m3 beside a cache in FP8: products bind there.
ROUNDED_HEADS = 64


def takes_strides(*parts):
    """Whether MlaDecode reads queries [tokens, heads, columns], of one part or two, where they lie: a tile of its rows
    is a box where heads divide it or it divides them, and where all rows are at one distance."""
    heads = parts[0].shape[1]
    if heads % 64 == 0 or 64 % heads == 0:
        return True
    strides = [_tensors.strides(part) for part in parts]
    return all(token == heads * head for token, head, _ in strides)


def takeable(q):
    """Queries [tokens, heads, columns] of any strides as MlaDecode takes them: copied where it cannot read them."""
    if takes_strides(q):
        return q
    rows = _tensors.empty(q, tuple(q.shape))
    rows[...] = q
    return rows
