from hypermla import _tensors


def takeable(q):
    """Queries [tokens, heads, columns] of any strides as MlaDecode takes them: copied where a tile of its rows would
    not be a box."""
    _, heads, columns = q.shape
    token, head, _ = _tensors.strides(q)
    if token == heads * head or heads & (heads - 1) == 0 or heads % 64 == 0:
        return q
    rows = _tensors.empty(q, tuple(q.shape))
    rows[...] = q
    return rows
