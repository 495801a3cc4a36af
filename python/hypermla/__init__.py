"""HyperMLA: Multi-head Latent Attention kernels.

    import hypermla
    kernel = hypermla.Kernel("flash_attention", b=1, s=16, t=1024, h=8)    # the first GPU, else the CPU
    for tensor in kernel.tensors:
        kernel.bind(tensor.name, torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="cuda"))
    kernel.tune()
    kernel.run(torch.cuda.current_stream())

One call that makes its own random inputs: hypermla.check() compares a kernel with the reference, hypermla.verify() runs
all its correctness cases, hypermla.profile() measures it, and hypermla.kernels() lists what there is.

run() neither allocates nor synchronises, and may be captured in a CUDA graph. What is wrong raises hypermla.Error, a
RuntimeError whose message says what to do next; but an argument of a wrong Python type raises TypeError, and where
memory is short MemoryError comes.
"""

import warnings
from typing import NamedTuple

from hypermla import _hypermla
from hypermla._errors import raises_error
from hypermla._hypermla import Error, list
from hypermla.mla_cache import append, decompress_prefix, merge_states, split_prefixes
from hypermla.mla_decode import MlaDecode
from hypermla.mla_prefill import MlaPrefill
from hypermla.runs import CheckedOutput, CheckResult, ListedKernel, VerifyResult, check, kernels, profile, verify

__version__ = _hypermla.VERSION

__all__ = ["Bottleneck", "CheckResult", "CheckedOutput", "Choice", "Error", "Kernel", "ListedKernel", "Metric",
           "MlaDecode", "MlaPrefill", "Opportunity", "Profile", "StageProfile", "TensorInfo", "Times", "VerifyResult",
           "append", "check", "choose", "decompress_prefix", "kernels", "list", "merge_states", "profile",
           "split_prefixes", "verify"]


class TensorInfo(NamedTuple):
    """A tensor that a kernel reads or writes: dense, row-major, 16-byte aligned."""

    name: str
    shape: tuple
    dtype: str  # "bfloat16", "float16", "float32" or "int32"
    role: str  # "input", "output" or "workspace"


class Choice(NamedTuple):
    """One kernel that can do a piece of attention, with the time that the model predicts."""

    path: str  # "latent", "decompressed", "hybrid" or "shared prefix"
    kernel: str  # for Kernel(); the latent path runs output_decompression behind it
    n: int  # decompressed tokens of a request
    burst_us: float
    sustained_us: float
    limit: str  # "tensor", "memory", "power" or "launches"
    draft: bool  # not verified on a GPU yet


class Times(NamedTuple):
    """The time of a piece of work, in microseconds, and what follows from it."""

    median_us: float
    low_us: float  # the 5th percentile of the repetitions
    high_us: float  # the 95th
    tflops: float  # the algorithm's work in the median
    gbps: float  # its bytes
    roofline_fraction: float  # predicted over measured time


class Metric(NamedTuple):
    """One counter of the hardware."""

    name: str  # as the profilers call it: "dram__bytes_read.sum"
    label: str  # "DRAM read"
    unit: str  # of the value: "GB"; empty for a plain count
    value: float


class Bottleneck(NamedTuple):
    """What bounds a kernel, by the rules of conf/profile_rules.json."""

    kind: str  # "memory-bound"
    confidence: str  # "high", "medium" or "low"
    why: str


class Opportunity(NamedTuple):
    """What to try next: a knowledge card that the profile fires."""

    id: str  # "O7", of the cards in docs/knowledge
    name: str
    gain_percent: float  # of the time of all stages, at most
    trigger: str  # "xu_pct = 81 >= 70"
    why: str
    card: str  # "docs/knowledge/optimizations/fast-math-online-softmax.md"
    refuted: str  # the figure, and where it is logged, if the idea lost on this kernel; else empty
    stage: str  # that fires it, where there are several


class StageProfile(NamedTuple):
    """One kernel, or several that run at once."""

    name: str
    burst: Times  # None where it is the only stage
    metrics: tuple  # of Metric; empty where no counters were read


class Profile(NamedTuple):
    """What Kernel.profile() measured; all of it is in profile.json of the directory, too."""

    directory: str  # holds report.md, profile.json and the files of the mode
    missing: str  # why the mode's own numbers are not there; empty when they are
    cold: Times  # every run finds the cache flushed
    burst: Times  # a few runs back to back after a rest
    sustained: Times  # on a board that was kept busy; modes annotation and event on GPUs, else None
    bottleneck: Bottleneck
    opportunities: tuple  # of Opportunity: the three best, by their estimates; then all that were refuted
    stages: tuple  # of StageProfile


def _profile(row):
    directory, missing, cold, burst, sustained, bottleneck, opportunities, stages = row
    return Profile(
        directory,
        missing,
        Times(*cold),
        Times(*burst),
        sustained and Times(*sustained),
        Bottleneck(*bottleneck),
        tuple(Opportunity(*one) for one in opportunities),
        tuple(StageProfile(name, times and Times(*times), tuple(Metric(*one) for one in metrics))
              for name, times, metrics in stages),
    )


@raises_error
def choose(device=None, language=None, **problem):
    """All kernels that take a problem on a device of conf/devices.json, fastest first; None: the present device.

    `language` leaves only the kernels in "cute" or in "cutile".
    The problem's fields are keywords: b, s, t, h, d, p, k, dtype, causal, prefix, prefixes, private.
    """
    return [Choice(*row) for row in _hypermla.choose(_fields(problem), device or "", language or "")]


class _Memory(NamedTuple):
    """What an object says of its memory; None: it does not say."""

    address: int
    keep: object  # what must live as long as the memory is used
    gpu: object = None  # True or False
    ordinal: object = None  # of the GPU
    shape: object = None
    dtypes: tuple = None  # names that its elements may stand for
    dense: bool = True
    read_only: bool = False
    bytes: int = None


# Integers of 16 bits carry bfloat16, which neither NumPy nor the buffer protocol has.
_DLPACK = {(2, 16): ("float16",), (4, 16): ("bfloat16",), (2, 32): ("float32",), (1, 16): ("bfloat16",),
           (0, 32): ("int32",)}
_LETTERS = {"e": ("float16",), "f": ("float32",), "H": ("bfloat16",), "i": ("int32",)}
_TYPESTR = {"f2": ("float16",), "f4": ("float32",), "u2": ("bfloat16",), "V2": ("bfloat16",), "i4": ("int32",)}
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4}
_CPU, _CUDA, _CUDA_MANAGED = 1, 2, 13  # DLDeviceType


def _dense(shape, strides):
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _from_dlpack(tensor):
    device, _ = tensor.__dlpack_device__()
    # -1: no synchronisation; the caller orders its streams.
    stream = {"stream": -1} if device == _CUDA else {}
    try:
        capsule = tensor.__dlpack__(max_version=(1, 0), **stream)
    except TypeError:  # an older producer
        capsule = tensor.__dlpack__(**stream)
    address, device, ordinal, code, bits, lanes, shape, strides, read_only = _hypermla.read_dlpack(capsule)
    return _Memory(
        address,
        (tensor, capsule),
        gpu=None if device == _CUDA_MANAGED else device == _CUDA,
        ordinal=ordinal if device == _CUDA else None,
        shape=shape,
        dtypes=_DLPACK.get((code, bits), ()) if lanes == 1 else (),
        dense=strides is None or _dense(shape, strides),
        read_only=read_only,
    )


def _from_cuda_array(tensor):
    said = tensor.__cuda_array_interface__
    address, read_only = said["data"]
    shape, strides = tuple(said["shape"]), said.get("strides")
    item = int(said["typestr"][2:])
    return _Memory(
        address,
        tensor,
        gpu=True,
        shape=shape,
        dtypes=_TYPESTR.get(said["typestr"][1:], ()),
        dense=strides is None or _dense(shape, [stride / item for stride in strides]),
        read_only=read_only,
    )


def _from_buffer(tensor):
    view = memoryview(tensor)
    raw = view.itemsize == 1  # bytes have no type of their own: only their number is compared
    return _Memory(
        _hypermla.buffer_address(view),
        view,
        gpu=False,
        shape=None if raw else view.shape,
        dtypes=None if raw else _LETTERS.get(view.format.lstrip("@=<"), ()),
        dense=view.c_contiguous,
        read_only=view.readonly,
        bytes=view.nbytes,
    )


def _memory(tensor):
    if isinstance(tensor, int):
        return _Memory(tensor, None)
    if hasattr(tensor, "__cuda_array_interface__"):
        return _from_cuda_array(tensor)
    if hasattr(tensor, "__dlpack__"):
        try:
            return _from_dlpack(tensor)
        except BufferError:  # NumPy before 2.1 exports no read-only array in this way, but every array is a buffer
            if not hasattr(tensor, "__array_interface__"):
                raise
    return _from_buffer(tensor)


class Kernel:
    """One kernel for one problem on one device. Use it from one thread at a time.

    `name` and `version` as on the command line: "flash_attention", "v1". `device` is "cpu", "cuda", "cuda:1" or "auto":
    the first GPU, else the CPU. `language` pins "cute" or "cutile"; None: the faster one for the problem that runs on
    the device. The problem's fields are keywords (`hypermla kernel <name> --help` lists them); those not given keep
    their defaults.
    """

    @raises_error
    def __init__(self, name, version=None, device="auto", language=None, **problem):
        self._kernel = _hypermla.Kernel(name, version or "", device, language or "", _fields(problem))
        self._ordinal = int(device.partition(":")[2] or 0)
        self._tensors = tuple(TensorInfo(*row) for row in self._kernel.tensors())
        self._bound = {}

    @property
    def tensors(self):
        """All tensors of the kernel, in the order of its documentation."""
        return self._tensors

    @property
    def is_gpu(self):
        return self._kernel.is_gpu()

    @raises_error
    def bind(self, name, tensor):
        """Gives a tensor its memory and keeps `tensor` alive.

        `tensor` is anything with __dlpack__, __cuda_array_interface__ or the buffer protocol, and then its type, shape,
        layout and device are checked; or an address, and then nothing is. Unsigned integers of 16 bits count as
        bfloat16, and a buffer of bytes as any type. What the kernel writes must share memory with no other tensor.
        """
        info = next((info for info in self._tensors if info.name == name), None)
        if info is None:
            names = ", ".join(info.name for info in self._tensors)
            raise Error(f"there is no tensor '{name}'; this kernel has {names}")
        try:
            memory = _memory(tensor)
        except (TypeError, BufferError, KeyError, ValueError) as error:
            raise Error(
                f"a {type(tensor).__name__} cannot be bound to '{name}' ({error}); give it an array or tensor with "
                "DLPack, a CUDA array, a buffer or an address"
            ) from error
        self._check(info, memory)
        self._kernel.bind(name, memory.address)
        self._bound[name] = memory.keep

    def _check(self, info, memory):
        def wants(what, given):
            raise Error(f"tensor '{info.name}' must be {what}, not {given}")

        if memory.dtypes is not None and info.dtype not in memory.dtypes:
            wants(f"of {info.dtype}", f"of {' or '.join(memory.dtypes) or 'another type'}")
        if memory.shape is not None and tuple(memory.shape) != info.shape:
            wants(f"of shape {_text(info.shape)}", _text(memory.shape))
        if memory.shape is None and memory.bytes is not None:
            size = _ITEM_BYTES[info.dtype]
            for extent in info.shape:
                size *= extent
            if memory.bytes != size:
                wants(f"of {size} bytes", f"of {memory.bytes}")
        if not memory.dense:
            wants("dense and row-major", "strided; copy it first")
        if memory.read_only and info.role != "input":
            wants("writable", "read-only")
        if memory.gpu is not None and memory.gpu != self.is_gpu:
            wants("in the memory of " + ("the GPU" if self.is_gpu else "the CPU"), "elsewhere; copy it first")
        if memory.ordinal is not None and memory.ordinal != self._ordinal:
            wants(f"on GPU {self._ordinal}", f"on GPU {memory.ordinal}")

    @raises_error
    def tune(self, max_iterations=0, retune=False):
        """Chooses the tilings for this device: remembered ones, else measured now on the bound tensors, whose outputs
        it writes. `max_iterations` limits the candidates per kernel; 0: all. `retune` forgets what was measured, and
        which tilings were rejected, before. Without it, run() uses the defaults. Warns of tilings that were left out
        because they do not compile or run, or could not be compiled now."""
        for remark in self._kernel.tune(max_iterations, retune):
            warnings.warn(remark, stacklevel=2)

    def prepare(self):
        """Compiles and loads, which the first run() otherwise does."""
        self._kernel.prepare()

    @raises_error
    def run(self, stream=None):
        """Enqueues the kernel on `stream`: an address or an object with .cuda_stream, such as PyTorch's; None is the
        default stream. On the CPU it returns when the work is done.

        Kernels follow the int32 inputs: lengths are from 0 to the tokens that their tensors hold, `prefix` is from 0 to
        prefixes - 1, and block_table names pages of the pool for as many tokens as a request has. On the CPU other
        lengths and prefixes raise Error. On a GPU flash_mla, alone and in a hybrid, cuts `lengths` to these limits, and
        check() says so; nothing looks at the others, except in MlaDecode."""
        self._kernel.run(0 if stream is None else getattr(stream, "cuda_stream", stream))

    def check(self):
        """Waits for the device; raises Error if the last run() over the bound tensors, or the last replay of its
        recording, was given `lengths` beyond their limits and cut them. On a CPU, where run() raises, it does
        nothing."""
        self._kernel.check()

    @raises_error
    def profile(self, mode="annotation", out_dir=None, label="", bench_runs=20):
        """Measures the kernel on the bound tensors, whose outputs it writes, and sets that against the roofline.

        Modes: "annotation" (counters of the hardware), "event" (times only), "ncu" (Nsight Compute) and "nsys" (the
        timeline). `out_dir`, a new or empty directory, receives report.md, profile.json and the files of the mode;
        None: out/profiles/... below the working directory. `label` is a word of yours, kept in the profile. A profiler
        that is absent, denied or fails leaves the times and says why in `missing`. ncu and nsys watch a second run, of
        random inputs, in the program `hypermla`.
        """
        return _profile(self._kernel.profile(mode, str(out_dir or ""), label, bench_runs))

    @raises_error
    def predicted_seconds(self, device=None):
        """Roofline time on a device of conf/devices.json; None: the kernel's own. Needs no tensors."""
        return self._kernel.predicted_seconds(device or "")


def _fields(problem):
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in problem.items()}


def _text(shape):
    return "[" + ", ".join(str(extent) for extent in shape) + "]"
