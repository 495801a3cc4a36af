"""What an object says of its memory, for tensors without DLPack's C functions: NumPy's arrays and older PyTorch's
tensors (python/tensor_view.h reads the others); and new tensors like a given one."""

import functools
import re
import sys

from hypermla._hypermla import Error

_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4}  # DLPack's
_CPU, _CUDA = 1, 2


def is_compiling():
    """True while torch.compile() traces: torch_operators.py puts PyTorch's function here."""
    return False


def is_torch(tensor):
    return hasattr(tensor, "data_ptr")


def address(tensor):
    return tensor.data_ptr() if is_torch(tensor) else tensor.__array_interface__["data"][0]


def strides(tensor):
    """In elements."""
    if is_torch(tensor):
        return tensor.stride()
    if any(stride % tensor.itemsize for stride in tensor.strides):
        raise Error(f"an array whose elements lie {tensor.strides} bytes apart is not supported: these are no whole "
                    f"elements of {tensor.itemsize} bytes; copy it first")
    return tuple(stride // tensor.itemsize for stride in tensor.strides)


def dtype(tensor):
    return str(tensor.dtype).removeprefix("torch.").replace("uint16", "bfloat16")  # NumPy has no bfloat16


def require_int32(**tensors):
    for name, tensor in tensors.items():
        if dtype(tensor) != "int32":
            raise Error(f"{name} must be int32, not {tensor.dtype}")


def is_list_of(name, tensor, like):
    """Whether it has one dimension, dense, is of the type of that name and on the device of `like`."""
    device = lambda of: getattr(of, "device", "cpu")  # older NumPy's arrays do not say
    return dtype(tensor) == name and strides(tensor) == (1,) and device(tensor) == device(like)


def current_stream(tensor):
    """Of PyTorch, on the tensor's device; the default stream for everything else."""
    if not is_torch(tensor) or not tensor.is_cuda:
        return 0
    import torch

    return torch._C._cuda_getCurrentRawStream(tensor.device.index)


def described(name, tensor):
    """(address, DLPack's type code, bits, shape, strides, DLPack's device type, device id, current stream, whether it
    is read-only)"""
    try:
        known = re.fullmatch(r"([a-z]+?)(\d*)", dtype(tensor))
        if known is None:
            raise Error(f"{name} is of {tensor.dtype}, which is not supported")
        code, bits = known.groups()
        gpu = is_torch(tensor) and tensor.is_cuda
        return (address(tensor), _CODES.get(code, 255), min(int(bits or 0), 255), tuple(tensor.shape),
                tuple(strides(tensor)), _CUDA if gpu else _CPU, tensor.device.index if gpu else 0,
                current_stream(tensor), not is_torch(tensor) and not tensor.flags.writeable)
    except AttributeError as error:
        raise _no_tensor(name, tensor) from error
    except Error:  # which is a RuntimeError, too
        raise
    except RuntimeError as error:  # PyTorch's, of what is sparse or nested
        raise Error(f"{name} has no memory of its own to read; give a dense tensor ({error})") from error


def shape_of(name, tensor):
    if not hasattr(tensor, "shape"):
        raise _no_tensor(name, tensor)
    return tensor.shape


def _no_tensor(name, given):
    return TypeError(f"{name} is of type {type(given).__name__}; give a tensor, or an array of NumPy")


def device_name(device):
    """What the extension calls a device. Where PyTorch uses GPUs, "auto" and "cuda" are its current one."""
    torch, name = sys.modules.get("torch"), str(device)
    if name in ("auto", "cuda") and torch and torch.cuda.is_initialized():
        return f"cuda:{torch.cuda.current_device()}"
    return "cpu" if re.fullmatch(r"cpu:\d+", name) else name  # of CPUs there is one


def dtype_name(dtype):
    return str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")  # NumPy's types are classes


def as_bytes(tensor):
    """PyTorch's e4m3, and int8, as uint8, which DLPack knows."""
    if str(getattr(tensor, "dtype", None)).removeprefix("torch.") not in ("int8", "float8_e4m3fn"):
        return tensor
    if not is_torch(tensor):
        return tensor.view("uint8")
    import torch

    return tensor.view(torch.uint8)


def empty(like, shape, dtype=None, stream=None):
    """On the device of `like`; dtype: None, "bfloat16" or "float32"; stream: that writes it, None: the current one."""
    if is_torch(like):
        import torch

        new = functools.partial(like.new_empty, shape, dtype=dtype and getattr(torch, dtype))
        if stream is None or not like.is_cuda:
            return new()
        # PyTorch gives memory to the stream that is current; of another one it may still be in use.
        address = int(getattr(stream, "cuda_stream", stream))
        of = torch.cuda.ExternalStream(address, like.device) if address else torch.cuda.default_stream(like.device)
        with torch.cuda.stream(of):
            return new()
    import numpy

    return numpy.empty(shape, {None: like.dtype, "bfloat16": "uint16"}.get(dtype, dtype))
