"""The Python package, from the build tree or, with HYPERMLA_TEST_INSTALLED=1, as installed beside the running
Python."""

import array
import json
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cli"))
from support import BINARY, BUILD, CHECKOUT, kernel_directories

if not os.environ.get("HYPERMLA_TEST_INSTALLED"):
    sys.path.insert(0, str(BUILD / "python"))
import hypermla

try:
    import numpy
except ImportError:
    numpy = None

SHAPE = {"b": 1, "s": 3, "t": 40, "h": 2, "device": "cpu"}
ITEM = {"bfloat16": 2, "float16": 2, "float32": 4}


def new_kernel(**fields):
    return hypermla.Kernel("flash_attention", **{**SHAPE, "dtype": "float16", **fields})


def byte_count(tensor):
    count = ITEM[tensor.dtype]
    for extent in tensor.shape:
        count *= extent
    return count


class Example(unittest.TestCase):
    def test_it_runs(self):
        variables = {**os.environ, "PYTHONPATH": str(pathlib.Path(hypermla.__file__).parents[1])}
        done = subprocess.run([sys.executable, CHECKOUT / "examples/python/attention.py"], env=variables, text=True,
                              check=False, capture_output=True, timeout=600)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertRegex(done.stdout, r"^lse 6\.9315, on an H200 in [\d.]+ us\n$")  # log(1024)


@unittest.skipUnless(numpy, "NumPy is not installed")
class Decode(unittest.TestCase):
    def decode(self, **options):
        return hypermla.MlaDecode(**{"heads": 2, "max_requests": 2, "max_tokens": 40, "page": 16, "device": "cpu", **options})

    def step(self):
        """Lengths, queries, cache and table of two requests."""
        random = numpy.random.default_rng(1)
        bits = lambda *shape: (random.standard_normal(shape, numpy.float32).view(numpy.uint32) >> 16).astype(numpy.uint16)
        table = numpy.array([[3, 1, 4], [0, 2, -1]], numpy.int32)
        return numpy.array([40, 17], numpy.int32), bits(2, 2, 576), bits(5, 16, 576), table

    def test_it_attends(self):
        lengths, q, cache, table = self.step()
        decode = self.decode()
        self.assertIn("reference", decode.explain())
        self.assertGreater(decode.workspace_bytes, 0)
        decode.plan(lengths)
        o, lse = decode.run(q, cache, table)
        decode.check()
        floats = lambda array: (array.astype(numpy.uint32) << 16).view(numpy.float32)
        for request, head in ((0, 1), (1, 0)):
            tokens = floats(cache)[table[request]].reshape(-1, 576)[:lengths[request]]
            scores = tokens @ floats(q)[request, head] / 192**0.5
            weights = numpy.exp(scores - scores.max())
            self.assertAlmostEqual(lse[request, head], scores.max() + numpy.log(weights.sum()), 4)
            expected = weights @ tokens[:, :512] / weights.sum()
            self.assertLessEqual(numpy.abs(floats(o)[request, head] - expected).max(), 0.02)

    def test_pairs_and_views_give_the_same_bits(self):
        lengths, q, cache, table = self.step()
        decode = self.decode()
        decode.plan(lengths, numpy.array([0, 1, 2], numpy.int32))
        o, lse = decode.run(q, cache, table)
        heads_first = q[..., :512].transpose(1, 0, 2).copy().transpose(1, 0, 2)
        wide = numpy.zeros((2, 2, 640), numpy.uint16)
        again, again_lse = decode.run((heads_first, q[..., 512:]), (cache[..., :512], cache[..., 512:]), table,
                                      out=wide[..., :512])
        self.assertTrue((again == o).all() and (again_lse == lse).all())
        self.assertTrue((wide[..., 512:] == 0).all())

    def test_what_does_not_fit_is_refused(self):
        lengths, q, cache, table = self.step()
        decode, latent = self.decode(), q[..., :512].copy()
        for wrong, said in ((lambda: self.decode(page=7), "page=7"), (lambda: self.decode(dtype="float32"), "float32"),
                            (lambda: decode.plan(lengths.astype(numpy.int64)), "int64"),
                            (lambda: decode.plan(lengths + 1), r"lengths\[0\] is 41"),
                            (lambda: decode.plan(lengths, lengths), "query_starts"),
                            (lambda: decode.run(q[:, :1], cache, table), "q must be"),
                            (lambda: decode.run(q, cache[:, :8], table), "cache must be"),
                            (lambda: decode.run(q, cache, table[0]), "block_table"),
                            (lambda: decode.run(q, cache, table, out=q), "out must be"),
                            (lambda: decode.run((latent, q[..., 512:].copy()), cache, table, out=latent), "memory of its own")):
            with self.assertRaisesRegex(hypermla.Error, said):
                decode.plan(lengths)
                wrong()

    def test_the_example_runs(self):
        variables = {**os.environ, "PYTHONPATH": str(pathlib.Path(hypermla.__file__).parents[1])}
        done = subprocess.run([sys.executable, CHECKOUT / "examples/python/decode.py"], env=variables, text=True, check=False,
                              capture_output=True, timeout=600)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "lse 4.9199 4.9299 3.7260\n", ""))


class Plan(unittest.TestCase):
    def test_list(self):
        names = {directory.name for _, _, directory in kernel_directories()}
        self.assertEqual(sorted(hypermla.list()), sorted(names))  # each once, whatever its languages
        self.assertIn("flash_attention", hypermla.list())

    def test_tensors(self):
        tensors = {tensor.name: tensor for tensor in new_kernel().tensors}
        self.assertEqual(tensors["q"], ("q", (1, 2, 3, 128), "float16", "input"))
        self.assertEqual(tensors["lse"], ("lse", (1, 2, 3), "float32", "output"))

    def test_a_prediction_needs_no_tensors(self):
        kernel = new_kernel()
        self.assertGreater(kernel.predicted_seconds("NVIDIA H200"), 0)
        self.assertGreater(kernel.predicted_seconds(), kernel.predicted_seconds("NVIDIA H200"))

    def test_the_command_line_predicts_the_same(self):
        problem = {"b": 32, "s": 16, "t": 4096}
        out = subprocess.run([BINARY, "predict", "mla_var6_plus",
                              *(f"--{name}={value}" for name, value in problem.items())],
                             text=True, check=True, capture_output=True, timeout=600).stdout
        kernel = hypermla.Kernel("mla_var6_plus", device="cpu", **problem)
        for device in ("NVIDIA H200", "NVIDIA GeForce RTX 5090"):
            said = re.search(rf"(?m)^{device} +([\d.]+) us  ", out)
            self.assertEqual(f"{kernel.predicted_seconds(device) * 1e6:.1f}", said[1], out)

    def test_a_choice_needs_no_device(self):
        ranking = hypermla.choose(device="NVIDIA H200", b=32, s=64)
        self.assertEqual(ranking, sorted(ranking, key=lambda choice: choice.sustained_us))
        self.assertEqual({choice.path for choice in ranking} - {"hybrid"}, {"latent", "decompressed"})
        best = next(choice for choice in ranking if not choice.draft)
        self.assertEqual((best.path, best.kernel, best.n), ("decompressed", "cutile.mla.flash_attention", 4096))
        self.assertTrue(all(choice.kernel.startswith("cutile.") for choice in hypermla.choose(b=1, h=2, s=3, t=40)))

    def test_a_language_is_a_keyword(self):
        self.assertEqual([tensor.name for tensor in new_kernel(language="cutile").tensors],
                         [tensor.name for tensor in new_kernel().tensors])
        with self.assertRaisesRegex(hypermla.Error, "is written for Hopper GPUs"):
            new_kernel(language="cute")
        for language in ("cute", "cutile"):
            ranking = hypermla.choose("NVIDIA H200", language=language, b=32, s=16)
            self.assertEqual({choice.kernel.split(".")[0] for choice in ranking}, {language})

    def test_errors_speak_python(self):
        for call, expected in {
            lambda: new_kernel(language="cute"): r'take language="cutile", which runs everywhere',
            lambda: new_kernel(dtype="float32"): r'^dtype="float32" is not supported: choose bfloat16 or float16$',
            lambda: new_kernel(b=0): r"^b=0 is not supported: it must be at least 1$",
            lambda: hypermla.choose("H200"): r"`hypermla device --measure` adds the present device",
        }.items():
            with self.subTest(expected), self.assertRaisesRegex(hypermla.Error, expected) as caught:
                call()
            self.assertNotIn("--", re.sub("`[^`]*`", "", str(caught.exception)))

    def test_what_python_raises_by_itself_is_an_error_too(self):
        for call in (lambda: new_kernel().tune(1 << 40), lambda: new_kernel().run(1 << 70),
                     lambda: new_kernel().profile(bench_runs=1 << 40), lambda: new_kernel().profile(label="\udcff"),
                     lambda: hypermla.Kernel("flash\0attention"), lambda: hypermla.Kernel("flash_attention", "\udcff"),
                     lambda: new_kernel(dtype="\udcff"), lambda: hypermla.choose(b="\udcff"),
                     lambda: new_kernel().predicted_seconds("\0"), lambda: hypermla.MlaDecode(heads=1 << 70, device="cpu")):
            with self.assertRaises(hypermla.Error):
                call()
        for call in (lambda: hypermla.Kernel(3), lambda: new_kernel().tune("many"), lambda: new_kernel().run("here"),
                     lambda: hypermla.MlaDecode(device="cpu").plan([1])):
            with self.assertRaises(TypeError):
                call()

    def test_errors_are_sentences(self):
        for call, expected in {
            lambda: hypermla.Kernel("flash_atention"): "did you mean flash_attention",
            lambda: hypermla.Kernel("flash_attention", "v77"): "no version 'v77'",
            lambda: hypermla.choose(perfix=3): "no field 'perfix'; did you mean prefix",
            lambda: hypermla.choose("No GPU"): "'No GPU' has no entry in devices.json",
            lambda: new_kernel(bb=3): "no field 'bb'",
            lambda: new_kernel(b=0): "at least 1",
            lambda: new_kernel(device="tpu"): "unknown device 'tpu'",
            lambda: new_kernel().predicted_seconds("No GPU"): "No GPU",
            lambda: new_kernel().run(): "is not bound",
            lambda: new_kernel().profile(): "is not bound",
            lambda: new_kernel().profile("events"): "choose one of annotation, event, ncu, nsys",
            lambda: new_kernel().profile(bench_runs=0): "at least 1",
            lambda: new_kernel().bind("nothing", 16): "no tensor 'nothing'; this kernel has q, ",
            lambda: new_kernel().bind("q", 17): "16-byte aligned",
            lambda: new_kernel().bind("q", "text"): "a str cannot be bound to 'q'",
            lambda: new_kernel().bind("q", bytearray(10)): "must be of 1536 bytes, not of 10",
            lambda: new_kernel().bind("q", array.array("f", bytes(4 * 768))): "must be of float16, not of float32",
            lambda: new_kernel().bind("o", bytes(1536)): "must be writable, not read-only",
        }.items():
            with self.subTest(expected), self.assertRaisesRegex(hypermla.Error, expected):
                call()


class Buffers(unittest.TestCase):
    def bound(self, kernel):
        for tensor in kernel.tensors:
            kernel.bind(tensor.name, bytearray(byte_count(tensor)))
        return kernel

    def test_ones_stay_ones(self):
        """Softmax weights sum to 1, so attention over values of 1 is 1, and lse is the score plus log(t)."""
        kernel = new_kernel()
        memory = {}
        for tensor in kernel.tensors:
            memory[tensor.name] = bytearray(byte_count(tensor))
            if tensor.role == "input":
                memory[tensor.name][:] = struct.pack("<e", 1.0 if tensor.name == "v" else 0.0) * (byte_count(tensor) // 2)
            kernel.bind(tensor.name, memory[tensor.name])
        kernel.run()
        self.assertEqual(set(memoryview(memory["o"]).cast("H")), {0x3C00})
        for value in memoryview(memory["lse"]).cast("f"):
            self.assertAlmostEqual(value, 3.6888794541, places=5)  # log(40)
        kernel.tune(max_iterations=1)
        memory["o"][:] = bytes(len(memory["o"]))
        kernel.run(stream=0)
        kernel.check()
        self.assertEqual(set(memoryview(memory["o"]).cast("H")), {0x3C00})

    def test_scores_far_below_zero_still_weigh(self):
        """Equal scores near the end of fp32 have equal weights: attention is the mean of the values."""
        words = {"q": 0xDD00, "qpe": 0xDD00, "k": 0x5D00, "kpe": 0x5D00, "v": 0x3F80}  # bfloat16: -2^59, 2^59 and 1
        kernel = new_kernel(dtype="bfloat16")
        memory = {tensor.name: bytearray(byte_count(tensor)) for tensor in kernel.tensors}
        for tensor in kernel.tensors:
            if tensor.role == "input":
                memory[tensor.name][:] = struct.pack("<H", words[tensor.name]) * (byte_count(tensor) // 2)
            kernel.bind(tensor.name, memory[tensor.name])
        kernel.run()
        self.assertEqual(set(memoryview(memory["o"]).cast("H")), {0x3F80})
        self.assertTrue(all(-1e38 < value < -1e35 for value in memoryview(memory["lse"]).cast("f")))

    def test_an_output_shares_no_memory(self):
        for name, other, start in (("o", "q", 0), ("o", "v", 64), ("lse", "o", 1520)):
            kernel = new_kernel()
            memory = {tensor.name: bytearray(byte_count(tensor) + 128) for tensor in kernel.tensors}
            address = {key: hypermla._hypermla.buffer_address(memoryview(value)) for key, value in memory.items()}
            for key, at in address.items():
                kernel.bind(key, at + -at % 16)
            kernel.bind(name, address[other] + -address[other] % 16 + start)
            with self.subTest(name), self.assertRaisesRegex(hypermla.Error, f"'(lse|o)' and '{other}|{name}' share memory"):
                kernel.run()
            kernel.bind(name, address[name] + -address[name] % 16)
            kernel.bind("k", address["v"] + -address["v"] % 16)  # inputs may
            kernel.run()

    # With a compiler that would take ten minutes: neither tune() nor the end of the program waits for it.
    def test_ctrl_c_or_a_kill_ends_tune_and_its_compilers(self):
        for number in (signal.SIGINT, signal.SIGKILL):
            with self.subTest(number), tempfile.TemporaryDirectory(prefix="hypermla-test-") as directory:
                self.end_tune(number, pathlib.Path(directory))

    def end_tune(self, number, directory):
        started, compiler = directory / "started", directory / "slow-c++"
        compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\necho $$ >>"{started}"\nexec sleep 600\n')
        compiler.chmod(0o755)
        script = ("import hypermla\nkernel = hypermla.Kernel('flash_attention', b=1, s=3, t=40, h=2, device='cpu')\n"
                  "for i, one in enumerate(kernel.tensors): kernel.bind(one.name, (i + 1) << 20)\n"
                  "kernel.tune(retune=True)")
        variables = {**os.environ, "PYTHONPATH": str(pathlib.Path(hypermla.__file__).parents[1]), "CXX": str(compiler),
                     "HYPERMLA_CACHE_DIR": f"{directory}/cache"}
        process = subprocess.Popen([sys.executable, "-c", script], env=variables, text=True, stderr=subprocess.PIPE)
        while not started.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        said = process.communicate(timeout=120)[1]
        self.assertEqual("KeyboardInterrupt" in said, number == signal.SIGINT, said)
        self.assertEqual(process.returncode, -number)
        for pid in started.read_text().split():
            for _ in range(1000):
                state = pathlib.Path(f"/proc/{pid}/status")
                if not state.exists() or "State:\tZ" in state.read_text():  # a zombie that nobody reaps
                    break
                time.sleep(0.01)
            else:
                os.kill(int(pid), signal.SIGKILL)
                self.fail("a compiler is still running")

    def test_bound_memory_is_kept(self):
        kernel = new_kernel()
        for tensor in kernel.tensors:
            kernel.bind(tensor.name, bytearray(byte_count(tensor)))
        kernel.run()
        held = bytearray(1536)
        kernel.bind("q", held)
        with self.assertRaises(BufferError):
            held.append(0)  # would move it
        del kernel
        held.append(0)

    def test_a_forked_child_runs(self):
        """Its parent's threads are not there: run() and the compilation of another kernel must not wait for them."""
        kernel = self.bound(new_kernel())
        kernel.run()
        child = os.fork()
        if child == 0:
            signal.alarm(120)
            status = 1
            try:
                kernel.run()
                self.bound(new_kernel(dtype="bfloat16")).run()
                status = 0
            finally:
                os._exit(status)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        kernel.run()

    def test_a_daemon_thread_may_outlive_the_interpreter(self):
        script = """
import threading, time
import hypermla

def memory(tensor):
    count = 4 if tensor.dtype == "float32" else 2
    for extent in tensor.shape:
        count *= extent
    return bytearray(count)

def forever():
    while True:
        kernel.run()

kernel = hypermla.Kernel("flash_attention", device="cpu", b=1, s=64, t=1024, h=4, dtype="float16")
for tensor in kernel.tensors:
    kernel.bind(tensor.name, memory(tensor))
kernel.run()
threading.Thread(target=forever, daemon=True).start()
time.sleep(0.2)
"""
        variables = {**os.environ, "PYTHONPATH": str(pathlib.Path(hypermla.__file__).parents[1])}
        for _ in range(3):
            done = subprocess.run([sys.executable, "-c", script], env=variables, text=True, check=False,
                                  capture_output=True, timeout=120)
            self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_one_kernel_serves_one_thread(self):
        kernel = new_kernel(s=64, t=4096, h=8)
        for tensor in kernel.tensors:
            kernel.bind(tensor.name, bytearray(byte_count(tensor)))
        kernel.prepare()
        running, refused = threading.Event(), []

        def other():
            running.wait()
            while not refused and thread.is_alive():
                try:
                    kernel.prepare()
                except hypermla.Error as error:
                    refused.append(str(error))

        def many():
            running.set()
            for _ in range(20):
                try:
                    kernel.run()
                except hypermla.Error as error:
                    refused.append(str(error))

        thread = threading.Thread(target=many)
        second = threading.Thread(target=other)
        second.start()
        thread.start()
        thread.join()
        second.join()
        self.assertTrue(any("another thread" in text for text in refused))


class Profile(unittest.TestCase):
    def test_it_says_what_its_file_says(self):
        kernel = new_kernel()
        for tensor in kernel.tensors:
            kernel.bind(tensor.name, bytearray(byte_count(tensor)))
        for mode in ("annotation", "event"):
            with self.subTest(mode), tempfile.TemporaryDirectory() as directory:
                out = pathlib.Path(directory) / mode
                profile = kernel.profile(mode, out, label="mine", bench_runs=3)
                self.assertEqual((profile.directory, profile.missing), (str(out), ""))
                self.assertIn("mine", (out / "report.md").read_text())
                written = json.loads((out / "profile.json").read_text())
                self.assertEqual(written["mode"], mode)
                for name in ("cold", "burst"):
                    times = getattr(profile, name)
                    self.assertLessEqual(times.low_us, times.median_us)
                    self.assertEqual(times._asdict(), {key: written["timing"][name][key] for key in times._fields})
                self.assertIsNone(profile.sustained, "of GPUs only")
                self.assertEqual(profile.bottleneck.kind, written["classification"]["class"])
                self.assertEqual([one._asdict() for one in profile.opportunities], written["opportunities"])
                (stage,) = profile.stages
                self.assertEqual((stage.name, stage.burst), ("flash_attention", None))
                self.assertEqual({metric.name: metric.value for metric in stage.metrics}, written["stages"][0].get("metrics", {}))
        with self.assertRaisesRegex(hypermla.Error, "the mode ncu looks into a GPU"):
            kernel.profile("ncu")


@unittest.skipIf(numpy is None, "NumPy is not installed")
class NumPy(unittest.TestCase):
    def arrays(self, kernel, dtypes):
        random = numpy.random.default_rng(1)
        arrays = {}
        for tensor in kernel.tensors:
            values = random.standard_normal(tensor.shape) if tensor.role == "input" else numpy.full(tensor.shape, numpy.nan)
            arrays[tensor.name] = values.astype(dtypes[tensor.dtype])
            kernel.bind(tensor.name, arrays[tensor.name])
        return arrays

    def test_attention(self):
        kernel = new_kernel(causal=True)
        x = self.arrays(kernel, {"float16": numpy.float16, "float32": numpy.float32})
        kernel.run()
        x = {name: value.astype(numpy.float64) for name, value in x.items()}
        score = x["q"] @ x["k"].swapaxes(2, 3) + x["qpe"] @ x["kpe"][:, None].swapaxes(2, 3)
        score /= (128 + 64) ** 0.5
        score[..., numpy.arange(40)[None, :] > 40 - 3 + numpy.arange(3)[:, None]] = -numpy.inf
        weight = numpy.exp(score - score.max(-1, keepdims=True))
        numpy.testing.assert_allclose(x["o"], weight / weight.sum(-1, keepdims=True) @ x["v"], atol=4e-3)
        numpy.testing.assert_allclose(x["lse"], numpy.log(numpy.exp(score).sum(-1)), atol=2e-3)

    def test_refusals(self):
        kernel = new_kernel()
        good = numpy.zeros((1, 2, 3, 128), numpy.float16)
        for value, expected in (
            (good.astype(numpy.float32), "must be of float16, not of float32"),
            (good[:, :, :2], r"must be of shape \[1, 2, 3, 128\], not \[1, 2, 2, 128\]"),
            (numpy.zeros((1, 2, 128, 3), numpy.float16).swapaxes(2, 3), "must be dense and row-major"),
            (good.astype(numpy.uint16), "must be of float16, not of bfloat16"),
        ):
            with self.assertRaisesRegex(hypermla.Error, expected):
                kernel.bind("q", value)
        good.setflags(write=False)
        kernel.bind("q", good)
        with self.assertRaisesRegex(hypermla.Error, "read-only|readonly"):
            kernel.bind("o", good)

    def test_integers_carry_bfloat16(self):
        kernel = new_kernel(dtype="bfloat16")
        kernel.bind("q", numpy.zeros((1, 2, 3, 128), numpy.uint16))


class Arrays(unittest.TestCase):
    """The two protocols of GPU tensors, whose memory a kernel of the CPU must refuse."""

    def test_a_cuda_array(self):
        class Tensor:
            __cuda_array_interface__ = {"data": (256, False), "shape": (1, 2, 3, 128), "typestr": "<f2", "version": 3}

        with self.assertRaisesRegex(hypermla.Error, "must be in the memory of the CPU"):
            new_kernel().bind("q", Tensor())
        Tensor.__cuda_array_interface__ = {**Tensor.__cuda_array_interface__, "strides": (1536, 768, 2, 6)}
        with self.assertRaisesRegex(hypermla.Error, "must be dense"):
            new_kernel().bind("q", Tensor())

    def test_a_capsule_that_is_none(self):
        class Tensor:
            def __dlpack_device__(self):
                return 1, 0

            def __dlpack__(self, **_):
                return 5

        with self.assertRaisesRegex(hypermla.Error, "cannot be bound"):
            new_kernel().bind("q", Tensor())


if __name__ == "__main__":
    unittest.main()
