"""What the calls of a step ask of the CUDA driver, on a machine without a GPU: tests/stub_cuda says that it is an H200
and tells what it was asked. Tensors are plain objects that say where they are."""

import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cli"))
from support import BUILD

STUB = BUILD / "tests/stub_cuda"
PROLOGUE = """
import ctypes, threading
import hypermla
from hypermla import _hypermla, _tensors

driver = ctypes.CDLL("libcuda.so.1")
driver.stub_cuda_calls.restype = ctypes.c_char_p


def calls():  # a launch is "launch:132x1x1", by its grid
    return driver.stub_cuda_calls().decode().split()


def launches(count):  # all that was asked of the driver
    said = calls()
    assert len(said) == count and all(call.startswith("launch:") and "!" not in call for call in said), said
    return said


class Tensor:
    CODES = {"int32": (0, 32), "int64": (0, 64), "float32": (2, 32), "bfloat16": (4, 16)}  # DLPack's
    free = 1 << 40  # addresses that nothing is at

    def __init__(self, *shape, dtype="bfloat16", strides=None, data=None):
        self.dtype, self.shape, self.strides, self.data = dtype, shape, strides or [1] * len(shape), data
        for i in range(len(shape) - 2, -1, -1) if not strides else ():
            self.strides[i] = self.strides[i + 1] * shape[i + 1]
        if not data:
            self.data, Tensor.free = Tensor.free, Tensor.free + (1 << 30)


def described(name, tensor):
    stream, read_only = 7, False
    return (tensor.data, *Tensor.CODES[tensor.dtype], tuple(tensor.shape), tuple(tensor.strides), 2, 0, stream,
            read_only)


def integers(*shape):
    return Tensor(*shape, dtype="int32")


def floats(*shape, **more):
    return Tensor(*shape, dtype="float32", **more)


_tensors.described = described


def decoding(heads=16, **options):
    return hypermla.MlaDecode(heads=heads, max_requests=8, max_queries=2, max_tokens=4096, device="cuda", **options)


def layer(tokens=16, heads=16):
    return dict(q=Tensor(tokens, heads, 576), cache=Tensor(9, 64, 576), block_table=integers(8, 70),
                out=Tensor(tokens, heads, 512), lse=floats(tokens, heads))


def refused(call, said):
    calls()
    try:
        call()
    except hypermla.Error as error:
        assert said in str(error), error
        assert calls() == [], "nothing is launched before it is refused"
    else:
        raise AssertionError("not refused: " + said)
"""


class OnAStub(unittest.TestCase):
    def run_there(self, script, **variables):
        variables = {**os.environ, "PYTHONPATH": str(BUILD / "python"), "LD_LIBRARY_PATH": str(STUB), **variables}
        done = subprocess.run([sys.executable, "-c", PROLOGUE + textwrap.dedent(script)], env=variables, text=True,
                              capture_output=True, check=False, timeout=600)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))

    def test_decoding_launches_and_asks_nothing_else(self):
        """One kernel for a plan and one for a layer: no allocation, no copy, no synchronisation, whatever the step."""
        self.run_there("""
            for options, plans, runs in (({}, 1, 1), ({"split": 512}, 1, 1), ({"shared_prefixes": True}, 4, 3)):
                decode, table = decoding(**options), integers(8, 70)
                of_plan = table if options.get("shared_prefixes") else None
                calls()
                grids = set()
                for requests in (8, 1, 5, 0):
                    decode.plan(integers(requests), integers(requests + 1), block_table=of_plan)
                    grids.add((*launches(plans), ))
                    for _ in range(3):  # layers, and the last one twice
                        tensors = {**layer(), "block_table": table}
                        decode.run(**tensors)
                        grids.add((*launches(runs), ))
                    decode.run(**tensors)
                    grids.add((*launches(runs), ))
                assert len(grids) <= 2, grids
        """)

    def test_other_calls_of_a_step_do_so_too(self):
        self.run_there("""
            prefill = hypermla.MlaPrefill(heads=16, max_requests=8, max_query_tokens=100, device="cuda")
            prefill_tensors = [Tensor(60, 16, 192), Tensor(200, 16, 192), Tensor(200, 16, 128), Tensor(60, 16, 128),
                               floats(60, 16)]
            parts = [Tensor(60, 16, 512), floats(60, 16), Tensor(60, 16, 512), floats(60, 16)]
            rows, slots = Tensor(16, 576), Tensor(16, dtype="int64")
            weights = Tensor(16, 128, 512), Tensor(16, 512, 128)
            for call in (lambda: prefill.plan(integers(9), integers(9)), lambda: prefill.run(*prefill_tensors),
                         lambda: hypermla.merge_states(*parts, out=Tensor(60, 16, 512), lse=floats(60, 16)),
                         lambda: hypermla.append(rows, Tensor(9, 64, 576), slots),
                         lambda: hypermla.decompress_prefix(Tensor(9, 64, 576), integers(9), 500, *weights,
                                                            out=(Tensor(500, 16, 192), Tensor(500, 16, 128)))):
                call()  # MlaCacheOps is made by the first one
                calls()
                call()
                launches(1)
        """)

    def test_what_is_wrong_is_refused_before_anything_is_launched(self):
        self.run_there("""
            decode, tensors = decoding(), layer()
            refused(lambda: decode.run(**tensors), "call plan() first")
            refused(lambda: decode.plan(integers(9)), "max_requests=8")
            decode.plan(integers(8))
            refused(lambda: decode.run(**layer(tokens=15)), "query_tokens is 15, but the plan has 16 queries")
            with_one = lambda **other: lambda: decode.run(**{**tensors, **other})
            q, lse = tensors["q"], tensors["lse"]
            refused(with_one(out=Tensor(16, 16, 512, data=q.data)), "memory of its own")
            refused(with_one(lse=floats(16, 16, strides=(0, 1))), "lse with a token stride of 0")
            refused(with_one(block_table=integers(7, 70)), "the plan has 8 requests")
            refused(with_one(q=Tensor(16, 16, 576, data=q.data + 2)), "aligned to 16 bytes")
            odd = decoding(heads=20)
            odd.plan(integers(8))
            heads_first = [Tensor(16, 20, width, strides=(width, 16 * width, 1)) for width in (512, 64)]
            refused(lambda: odd.run(**{**layer(heads=20), "q": tuple(heads_first)}), "make it contiguous")
            calls()
            decode.run(**tensors)
            launches(1)
            prefill = hypermla.MlaPrefill(heads=16, max_requests=8, max_query_tokens=100, device="cuda")
            refused(lambda: prefill.run(Tensor(60, 16, 192), Tensor(9, 16, 192), Tensor(9, 16, 128),
                                        Tensor(60, 16, 128), floats(60, 16)), "call plan() first")
        """)

    def test_any_thread_may_call(self):
        """A new one has no context of CUDA; another device's stays what it was."""
        self.run_there("""
            decode, another, done = decoding(), [decoding()], []
            calls()

            def work():
                decode.plan(integers(8))
                decode.run(**layer())
                decode.check()
                another.clear()  # is destroyed
                decoding()
                said = calls()
                done.append("cuMemFree_v2" in said and not any("!" in call for call in said))

            def work_beside_another_device():
                driver.cuCtxSetCurrent(ctypes.c_void_p(64))
                decode.run(**layer())
                decode.check()
                decoding()
                current = ctypes.c_void_p()
                driver.cuCtxGetCurrent(ctypes.byref(current))
                done.append(current.value == 64)

            for target in (work, work_beside_another_device):
                thread = threading.Thread(target=target)
                thread.start()
                thread.join()
            assert done == [True, True], done
        """)

    def test_others_run_while_kernels_compile(self):
        """Several objects at once, into an empty cache."""
        with tempfile.TemporaryDirectory() as cache:
            self.run_there("""
                made, ticks = [], 0
                make = lambda causal: made.append(hypermla.MlaPrefill(heads=16, causal=causal, device="cuda"))
                threads = [threading.Thread(target=make, args=(causal, )) for causal in (True, False, True)]
                for thread in threads:
                    thread.start()
                while any(thread.is_alive() for thread in threads):
                    threads[0].join(0.01)
                    threads[-1].join(0.01)
                    ticks += 1
                assert len(made) == 3 and ticks > 10, (made, ticks)
            """, HYPERMLA_CACHE_DIR=cache)

    def test_the_default_is_pytorchs_current_gpu(self):
        self.run_there("""
            import sys, types
            sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: True,
                                                                                    current_device=lambda: 3))
            for made in (hypermla.MlaDecode, hypermla.MlaPrefill):
                refused(made, "there is no CUDA device 3")
                refused(lambda: made(device=types.SimpleNamespace()), "unknown device")
            refused(lambda: hypermla.MlaDecode.fixed_split(1 << 20), "there is no CUDA device 3")
        """)


if __name__ == "__main__":
    unittest.main()
