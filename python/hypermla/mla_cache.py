"""What an engine does around attention: merge_states, append and decompress_prefix (include/hypermla/mla_cache.h).

Tensors are PyTorch's, on one device; on a CPU NumPy's arrays, too, where uint16 stands for bfloat16. Strides are taken
from them: the last dimension of 16-bit tensors is dense, their other strides are multiples of 8. Calls neither allocate
(give `out` and `lse`) nor synchronise, and may be captured in a CUDA graph. The first call for a device and a dtype
compiles and loads the kernels: make it, or a MlaCacheOps, before a capture. `stream` is an address; None: PyTorch's
current stream.
"""

from hypermla import _hypermla
from hypermla._errors import raises_error
from hypermla._hypermla import Error

LATENT, ROPE, HEAD = 512, 64, 128


def _is_torch(tensor):
    return hasattr(tensor, "data_ptr")


def _address(tensor):
    return tensor.data_ptr() if _is_torch(tensor) else tensor.__array_interface__["data"][0]


def _strides(tensor):
    """In elements."""
    return tensor.stride() if _is_torch(tensor) else tuple(stride // tensor.itemsize for stride in tensor.strides)


def _dtype(tensor):
    return str(tensor.dtype).removeprefix("torch.").replace("uint16", "bfloat16")  # NumPy has no bfloat16


def _device(tensor):
    return tensor.device if _is_torch(tensor) else "cpu"


def _first(tensors):
    return tensors[0] if isinstance(tensors, tuple) else tensors


def _stream(tensor, stream):
    if stream is not None or not _is_torch(tensor) or not tensor.is_cuda:
        return stream or 0
    import torch

    return torch._C._cuda_getCurrentRawStream(tensor.device.index)


def _empty(like, shape, dtype=None):
    if _is_torch(like):
        import torch

        return like.new_empty(shape, dtype=torch.float32 if dtype else None)
    import numpy

    return numpy.empty(shape, dtype or like.dtype)


def _rows(tensor):
    """Address and strides of [tokens, heads, ..]."""
    return _address(tensor), *_strides(tensor)[:2]


def _pair(tensors):
    """Latent and rotary parts with their addresses: of a pair, or of one tensor that holds both."""
    if isinstance(tensors, tuple):
        return *tensors, *map(_address, tensors)
    return tensors, tensors, _address(tensors), _address(tensors) + 2 * LATENT


class MlaCacheOps:
    """The three operations for a dtype and a device, compiled and loaded. The functions keep one for each."""

    @raises_error
    def __init__(self, dtype="bfloat16", device="auto"):
        self._dtype = str(dtype).removeprefix("torch.")
        self._ops = _hypermla.MlaCacheOps(self._dtype, device)
        self._seen = set()  # names, types and shapes that were checked

    def _check(self, **wanted):
        """Of each tensor its shape and dtype; 0 stands for any extent."""
        signature = tuple((name, tensor.shape, tensor.dtype, _device(tensor), shape)
                          for name, (tensor, shape, _) in wanted.items())
        if signature not in self._seen:
            first = _device(next(iter(wanted.values()))[0])
            for name, (tensor, shape, dtype) in wanted.items():
                name, dtype = name.replace("__", "."), dtype or self._dtype
                if _dtype(tensor) != dtype or len(tensor.shape) != len(shape) or any(
                        want not in (0, extent) for want, extent in zip(shape, tensor.shape)):
                    raise Error(f"{name} must be {dtype} {[extent or 'any' for extent in shape]}, not {_dtype(tensor)} "
                                f"{list(tensor.shape)}")
                if _device(tensor) != first:
                    raise Error(f"{name} is on {_device(tensor)} and other tensors are on {first}; move it there")
            self._seen.add(signature)
        for name, (tensor, shape, dtype) in wanted.items():
            if dtype != "float32" and tensor.shape[-1] > 1 and _strides(tensor)[-1] != 1 and not name.startswith("w_"):
                raise Error(f"{name.replace('__', '.')} must be dense in its last dimension; copy it first")

    @raises_error
    def merge_states(self, o_a, lse_a, o_b, lse_b, out=None, lse=None, lse_base2=False, empty_lse_positive=False,
                     stream=None):
        """Merges two attentions of the same queries over different tokens; returns (out, lse).

        o_a, o_b, out: [tokens, heads, width], width a multiple of 8 up to 512. lse_a, lse_b, lse: float32 [tokens,
        heads], natural, or in base 2 with lse_base2. A part whose log-sum-exp is infinite, of either sign, is empty and
        changes nothing; where both are, out is 0 and lse is -inf, or +inf with empty_lse_positive. `out` may be o_a or
        o_b, and `lse` the log-sum-exp of that part; otherwise they must not overlap the parts.
        """
        tokens, heads, width = o_a.shape
        out = _empty(o_a, o_a.shape) if out is None else out
        lse = _empty(o_a, (tokens, heads), "float32") if lse is None else lse
        rows, sums = (tokens, heads, width), (tokens, heads)
        self._check(o_a=(o_a, rows, None), lse_a=(lse_a, sums, "float32"), o_b=(o_b, rows, None),
                    lse_b=(lse_b, sums, "float32"), out=(out, rows, None), lse=(lse, sums, "float32"))
        self._ops.merge_states(*_rows(o_a), *_rows(lse_a), *_rows(o_b), *_rows(lse_b), *_rows(out), *_rows(lse), tokens,
                               heads, width, lse_base2, empty_lse_positive, _stream(o_a, stream))
        return out, lse

    def _cache(self, cache):
        z, rope, z_address, rope_address = _pair(cache)
        widths = (LATENT, ROPE) if isinstance(cache, tuple) else (LATENT + ROPE,) * 2
        self._check(cache=(z, (0, 0, widths[0]), None), cache__rope=(rope, (z.shape[0], z.shape[1], widths[1]), None))
        return z_address, rope_address, *_strides(z)[:2], *_strides(rope)[:2], z.shape[0], z.shape[1]

    @raises_error
    def append(self, rows, cache, slots, stream=None):
        """Writes rows of new tokens into the paged cache.

        rows: [tokens, 576], or the pair [tokens, 512] and [tokens, 64]. cache: [pages, page, 576], or the pair [pages,
        page, 512] and [pages, page, 64]. slots: int64, page * (tokens of a page) + token in it for each of the first
        rows; -1 skips one. Slots that the cache does not have are skipped on a GPU and raise Error on a CPU.
        """
        latent, rope, latent_address, rope_address = _pair(rows)
        widths = (LATENT, ROPE) if isinstance(rows, tuple) else (LATENT + ROPE,) * 2
        self._check(rows=(latent, (0, widths[0]), None), rows__rope=(rope, (0, widths[1]), None),
                    slots=(slots, (0,), "int64"))
        tokens = slots.shape[0]
        if tokens > min(latent.shape[0], rope.shape[0]):
            raise Error(f"there are {tokens} slots for {min(latent.shape[0], rope.shape[0])} rows; give a row for each")
        if _device(slots) != _device(_first(cache)):
            raise Error(f"slots are on {_device(slots)} and the cache is on {_device(_first(cache))}; move them there")
        self._ops.append(*self._cache(cache), latent_address, _strides(latent)[0], rope_address, _strides(rope)[0],
                         _address(slots), tokens, _stream(latent, stream))

    @raises_error
    def decompress_prefix(self, cache, block_table, tokens, w_uk, w_uv, out=None, rope=True, stream=None):
        """Keys and values of the first `tokens` tokens of a request, for all heads; returns (k, v).

        cache: as append()'s. block_table: int32 [pages], the request's row. w_uk: [heads, 128, 512]; w_uv: [heads, 512,
        128]; either of the inner dimensions of each is dense. out: the pair k [tokens, heads, 192], whose last 64
        columns are the rotary part, or [tokens, heads, 128] without it, and v [tokens, heads, 128]. Where they are
        made, `rope` says which k. GPUs: Hopper.
        """
        heads = w_uk.shape[0]
        if out is None:
            out = tuple(_empty(_first(cache), (tokens, heads, columns)) for columns in (HEAD + ROPE * bool(rope), HEAD))
        k, v = out
        rope = k.shape[2] != HEAD
        given = self._cache(cache)
        self._check(block_table=(block_table, (0,), "int32"), w_uk=(w_uk, (heads, HEAD, LATENT), None),
                    w_uv=(w_uv, (heads, LATENT, HEAD), None), k=(k, (tokens, heads, HEAD + ROPE * rope), None),
                    v=(v, (tokens, heads, HEAD), None))
        if block_table.shape[0] * given[-1] < tokens:
            raise Error(f"block_table has {block_table.shape[0]} pages of {given[-1]} tokens; the prefix has {tokens}")
        if _device(v) != _device(_first(cache)):
            raise Error(f"the cache is on {_device(_first(cache))} and others are on {_device(v)}; move it there")
        k_rope = (_address(k) + 2 * HEAD, *_strides(k)[:2]) if rope else (0, 0, 0)
        self._ops.decompress_prefix(*given, _address(block_table), tokens, heads, _address(w_uk), *_strides(w_uk),
                                    _address(w_uv), *_strides(w_uv), *_rows(k), *k_rope, *_rows(v), _stream(v, stream))
        return k, v


_kept = {}


def _ops_for(tensors):
    tensor = _first(tensors)
    key = tensor.dtype, _device(tensor)
    if key not in _kept:
        _kept[key] = MlaCacheOps(_dtype(tensor), str(key[1]))
    return _kept[key]


@raises_error
def merge_states(o_a, *arguments, **keywords):
    return _ops_for(o_a).merge_states(o_a, *arguments, **keywords)


@raises_error
def append(rows, *arguments, **keywords):
    return _ops_for(rows).append(rows, *arguments, **keywords)


@raises_error
def decompress_prefix(cache, *arguments, **keywords):
    return _ops_for(cache).decompress_prefix(cache, *arguments, **keywords)


for _function in (merge_states, append, decompress_prefix):
    _function.__doc__ = getattr(MlaCacheOps, _function.__name__).__doc__
