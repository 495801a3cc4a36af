#!/usr/bin/env python3
"""Time of the host in a call of MlaDecode and MlaPrefill, beside an empty operator of PyTorch and torch.empty.

    tests/benchmark/bench_host.py --record=host.json

Each figure is the median over bursts of calls, between which the device is waited for, so no queue is full. The same
call is timed for one layer, whose tensors do not change, and for 61 layers in turn, which have a cache, queries and
outputs each. The time of an empty call of Python is taken off. C and C++ are measured by the C interface
(include/hypermla/c_api.h) from ctypes, less the time of its empty call. On a CPU all requests are padding, so that
nothing is attended to.
"""

import argparse
import ctypes
import datetime
import itertools
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import harness  # noqa: E402
from harness import hypermla, torch  # noqa: E402

LAYERS, REQUESTS, HEADS, PAGE, TOKENS = 61, 8, 16, 64, 64
CALLS = 50  # of a burst: with a few launches each, fewer than a stream holds


class Options(ctypes.Structure):  # hypermla_decode_options
    _fields_ = [("size", ctypes.c_size_t)] + [
        (name, ctypes.c_float if name == "scale" else ctypes.c_int32)
        for name in ("heads", "max_requests", "max_queries", "max_query_tokens", "max_tokens", "page", "dtype",
                     "causal", "scale", "split", "lse_base2", "empty_lse_positive")] + [("kernel", ctypes.c_char_p)]


class Tensors(ctypes.Structure):  # hypermla_decode_tensors: addresses and 64-bit integers
    _fields_ = [("size", ctypes.c_size_t)] + [
        (name, ctypes.c_int64)
        for name in ("q_latent", "q_latent_token_stride", "q_latent_head_stride", "q_rope", "q_rope_token_stride",
                     "q_rope_head_stride", "query_tokens", "cache_latent", "latent_page_stride", "latent_token_stride",
                     "cache_rope", "rope_page_stride", "rope_token_stride", "pages", "block_table", "table_stride", "o",
                     "o_token_stride", "o_head_stride", "lse", "lse_token_stride", "lse_head_stride",
                     "lse_request_stride")]


class Layer:
    def __init__(self, device):
        new = lambda *shape, dtype=torch.bfloat16: torch.zeros(shape, dtype=dtype, device=device)
        self.q, self.cache = new(REQUESTS, HEADS, 576), new(REQUESTS, PAGE, 576)
        self.pairs = [(one[..., :512], one[..., 512:]) for one in (self.q, self.cache)]
        self.o, self.lse = new(REQUESTS, HEADS, 512), new(REQUESTS, HEADS, dtype=torch.float32)
        keys = new(REQUESTS, HEADS, 256), new(REQUESTS, 1, 64).expand(REQUESTS, HEADS, 64)
        self.prefill = new(REQUESTS, HEADS, 192), (keys[0][..., :128], keys[1]), keys[0][..., 128:], new(
            REQUESTS, HEADS, 128), self.lse


class CInterface:
    """The same MlaDecode by libhypermla.so."""

    def __init__(self, path, device):
        self.library = ctypes.CDLL(path)
        self.library.hypermla_last_error.restype = ctypes.c_char_p
        options, self.handle = Options(), ctypes.c_void_p()
        self.library.hypermla_decode_options_init(ctypes.byref(options), ctypes.c_size_t(ctypes.sizeof(options)))
        options.heads, options.max_requests, options.page, options.max_tokens = HEADS, REQUESTS, PAGE, TOKENS
        self.must(self.library.hypermla_decode_create(ctypes.byref(options), device.encode(), None,
                                                      ctypes.byref(self.handle)))

    def must(self, status):
        if status:
            harness.stop(self.library.hypermla_last_error().decode())

    def plan(self, lengths, starts, stream):
        self.must(self.library.hypermla_decode_plan(self.handle, ctypes.c_void_p(lengths.data_ptr()),
                                                    ctypes.c_void_p(starts.data_ptr()), REQUESTS, stream))

    def tensors(self, layer, table):
        tensors = Tensors()
        init, fused = self.library.hypermla_decode_tensors_init, self.library.hypermla_decode_tensors_fused
        init(ctypes.byref(tensors), ctypes.c_size_t(ctypes.sizeof(tensors)))
        address = lambda tensor: ctypes.c_void_p(tensor.data_ptr())
        self.must(fused(ctypes.byref(tensors), HEADS, PAGE, address(layer.q), ctypes.c_int64(REQUESTS),
                        address(layer.cache), ctypes.c_int64(REQUESTS), address(layer.o), address(layer.lse)))
        tensors.block_table, tensors.table_stride = table.data_ptr(), table.stride(0)
        return tensors


def calls(device, library):
    """(name, function of a layer's number, name of what is taken off)"""
    layers = [Layer(device) for _ in range(LAYERS)]
    integers = lambda values: torch.tensor(values, dtype=torch.int32, device=device)
    attends = device != "cpu"
    lengths = integers([TOKENS] * REQUESTS)
    starts, table = integers([i * attends for i in range(REQUESTS + 1)]), integers([[i] for i in range(REQUESTS)])
    decode = hypermla.MlaDecode(heads=HEADS, max_requests=REQUESTS, page=PAGE, max_tokens=TOKENS, device=device)
    decode.plan(lengths, starts)
    for layer in layers:
        decode.run(layer.q, layer.cache, table, layer.o, layer.lse)

    prefill = hypermla.MlaPrefill(heads=HEADS, max_requests=REQUESTS, max_query_tokens=REQUESTS, max_tokens=1,
                                  device=device)
    prefill.plan(starts, starts)
    for layer in layers:
        prefill.run(*layer.prefill)

    own = torch.library.Library("hypermla_bench", "FRAGMENT")
    own.define("empty(SymInt handle, Tensor q, Tensor cache, Tensor block_table, Tensor(a!) out, Tensor(b!) lse) -> ()")
    own.impl("empty", lambda *_: None, "CompositeExplicitAutograd")
    empty, run = torch.ops.hypermla_bench.empty, torch.ops.hypermla.mla_decode_run

    @torch.library.custom_op("hypermla_bench::decorated", mutates_args=("out", "lse"))
    def decorated(handle: int, q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, out: torch.Tensor,
                  lse: torch.Tensor) -> None:
        pass

    def of(function):
        def call(i):
            layer = layers[i]
            function(layer.q, layer.cache, table, layer.o, layer.lse)
        return call

    yield "a call of Python", of(lambda *_: None), None
    yield "MlaDecode.run", of(decode.run), "a call of Python"
    yield "MlaDecode.run of pairs", lambda i: decode.run(
        *layers[i].pairs, table, layers[i].o, layers[i].lse), "a call of Python"
    yield "MlaDecode.run that makes its outputs", of(
        lambda q, cache, *_: decode.run(q, cache, table)), "a call of Python"
    yield "MlaDecode.plan", lambda i: decode.plan(lengths, starts), "a call of Python"
    yield "MlaPrefill.run", lambda i: prefill.run(*layers[i].prefill), "a call of Python"
    yield "MlaPrefill.plan", lambda i: prefill.plan(starts, starts), "a call of Python"
    yield "torch.ops.hypermla.mla_decode_run", of(lambda q, cache, *rest: run(
        decode.handle, decode.order, q, None, cache, None, *rest)), "a call of Python"
    yield "an empty operator (torch.library.Library)", of(lambda *all: empty(1, *all)), "a call of Python"
    yield "an empty operator (torch.library.custom_op)", of(lambda *all: decorated(1, *all)), "a call of Python"
    yield "torch.empty of the output", lambda i: torch.empty(
        (REQUESTS, HEADS, 512), dtype=torch.bfloat16, device=device), "a call of Python"
    if not library.exists():
        print(f"C interface: skipped, {library} is not there (--library)")
        return
    c = CInterface(str(library), device)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if attends else None)
    c.plan(lengths, starts, stream)
    kept = [c.tensors(layer, table) for layer in layers]
    prepared = [ctypes.byref(one) for one in kept]
    c_run, c_nothing = c.library.hypermla_decode_run, c.library.hypermla_version
    c.must(c_run(c.handle, prepared[0], stream))
    yield "a call of ctypes", lambda i: c_nothing(c.handle, prepared[i], stream), None
    yield "hypermla_decode_run, C and C++", lambda i: c_run(c.handle, prepared[i], stream), "a call of ctypes"


def measured(call, layers, bursts, wait):
    """Microseconds of a call: all bursts."""
    taken, number = [], itertools.cycle(range(layers))
    for _ in range(bursts + 3):
        order = [next(number) for _ in range(CALLS)]
        wait()
        begin = time.perf_counter()
        for i in order:
            call(i)
        taken.append((time.perf_counter() - begin) / CALLS * 1e6)
    wait()
    return taken[3:]  # the first ones fill caches


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    flags.add_argument("--bursts", type=harness.positive, default=200, help=f"of {CALLS} calls (default 200)")
    flags.add_argument("--library", type=pathlib.Path, help="libhypermla.so (default: beside the Python package)")
    flags.add_argument("--record", type=harness.record_file, help="file for the figures")
    at = flags.parse_args()
    if not torch:
        harness.stop("it needs a Python with PyTorch")
    library = at.library or pathlib.Path(hypermla.__file__).parents[2] / "libhypermla.so"
    device = at.device or ("cuda" if torch.cuda.is_available() else "cpu")
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    rows, medians = [], {}
    print(f"microseconds of the host, {name}, torch {torch.__version__}\n{'one layer':>10}{'61 layers':>11}")
    for what, call, base in calls(device, library):
        row = {"call": what}
        for key, layers in (("one_layer_us", 1), ("layers_us", LAYERS)):
            medians[what, key] = statistics.median(measured(call, layers, at.bursts, wait))
            row[key] = round(medians[what, key] - (medians[base, key] if base else 0), 3)
        rows.append(row)
        print(f"{row['one_layer_us']:10.2f}{row['layers_us']:11.2f}  {what}", flush=True)
    if at.record:
        harness.write_json(at.record, {"schema": 1, "kind": "host", "date": datetime.date.today().isoformat(),
                                       "device": name, "torch": torch.__version__, "rows": rows})


if __name__ == "__main__":
    main()
