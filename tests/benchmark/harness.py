"""What the benchmarks share: kernels of this package and of others, on the same tensors, timed in the same way.
Tables are written row by row while the benchmark runs.

Burst: a few milliseconds after a rest. Sustained: after `seconds` without a pause, when a power cap has settled the
clocks. Both replay a CUDA graph. On a CPU, where neither matters, both are the median of a few runs.
"""

import argparse
import csv
import datetime
import importlib
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(pathlib.Path(os.environ.get("HYPERMLA_TEST_BUILD", CHECKOUT / "build")) / "python"))


def stop(sentence):
    sys.exit(f"{pathlib.Path(sys.argv[0]).name}: {sentence}")


class NoPackage:
    """Stands in for the package: --help and --list do without it. Its first use builds it, as ./hypermla builds the
    command line; not where a test names a build of its own."""

    package = None

    def __getattr__(self, name):
        if self.package is None:
            script = CHECKOUT / "scripts/build_package.sh"
            if "HYPERMLA_TEST_BUILD" in os.environ or subprocess.run([script]).returncode != 0:
                stop(f"the Python package is not built; run {script}, which builds it, or `pip install {CHECKOUT}`")
            importlib.invalidate_caches()  # its directory is new
            self.package = importlib.import_module("hypermla")
        return getattr(self.package, name)


try:
    import hypermla
except ImportError:
    hypermla = NoPackage()
try:
    import torch
except ImportError:
    torch = None

REST = 0.08  # seconds before a burst
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4}
FIELDS = ("b", "s", "t", "h", "d", "p", "k", "dtype", "causal")
SCALE = 192**-0.5  # of DeepSeek's scores: 128 columns and 64 RoPE columns
TOLERANCE = 0.02  # of the largest element of a query and head; and of exp(log-sum-exp)


class Machine:
    """Memory and clocks of the device that is measured."""

    def __init__(self, device, seconds):
        self.gpu = device != "cpu" and torch is not None and torch.cuda.is_available()
        if device == "cuda" and not self.gpu:
            stop("there is no GPU, or this Python has no PyTorch for it; take --device=cpu")
        self.device = "cuda" if self.gpu else "cpu"
        self.entry = "CPU" if device == "cpu" else None  # for choose(): a CPU beside a GPU, or the present device
        self.name = torch.cuda.get_device_name() if self.gpu else "CPU"
        self.seconds = seconds
        self._kept = {}  # tensors by what they are: kernels of one problem run on the same ones

    def forget(self):
        self._kept.clear()
        if self.gpu:
            torch.cuda.empty_cache()

    def tensor(self, name, shape, dtype, make=None):
        """The tensor of that name; `make` gives the values of integers."""
        key = (name, tuple(shape), dtype)
        if key not in self._kept:
            self._kept[key] = self._new(shape, dtype, make)
        return self._kept[key]

    def _new(self, shape, dtype, make):
        count = 1
        for extent in shape:
            count *= extent
        if self.gpu:
            if make:
                return torch.tensor([make(i) for i in range(count)], dtype=torch.int32, device="cuda").reshape(shape)
            if dtype == "int32":
                return torch.zeros(shape, dtype=torch.int32, device="cuda")
            return torch.empty(shape, dtype=getattr(torch, dtype), device="cuda").normal_()
        if make:
            return bytearray(b"".join(make(i).to_bytes(4, "little", signed=True) for i in range(count)))
        return bytearray((b"\0\x3c" * 2)[: ITEM_BYTES[dtype]] * count)  # small positive numbers of every type

    def measure(self, run):
        """(burst, sustained) microseconds of run(stream)."""
        if not self.gpu:
            run(None)
            times = []
            for _ in range(3):
                begin = time.perf_counter()
                run(None)
                times.append(time.perf_counter() - begin)
            us = statistics.median(times) * 1e6
            return us, us
        stream = torch.cuda.Stream()
        call = lambda: run(stream)
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
            graph = Graph([call], stream)
            graph.us()
            graph = Graph([call] * graph.rounds(), stream)
            graph.us()
            bursts = [graph.burst() for _ in range(4)]
            until = time.monotonic() + self.seconds
            while time.monotonic() < until:
                graph.us()
            return statistics.median(bursts), statistics.median(graph.us() for _ in range(7))


class Graph:
    """Calls in a CUDA graph."""

    def __init__(self, calls, stream=None):
        self.count, self.graph = len(calls), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()  # the tensors are there
        with torch.cuda.graph(self.graph, stream=stream):
            for call in calls:
                self.last = call()  # what the last one returned

    def us(self):
        """Microseconds of one call, in one replay."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / self.count

    def burst(self):
        time.sleep(REST)
        return self.us()

    def rounds(self):
        """How many of it are a burst of about 8 ms, so that the start of a graph, some 60 us, counts little."""
        return min(max(1, int(8e3 / (self.us() * self.count))), 2000)


def bound(machine, name, problem, given=None):
    """A kernel of the package over the machine's tensors, and its outputs; `given` replaces tensors by name."""
    kernel = hypermla.Kernel(name, device=machine.device, **problem)
    outputs = {}
    for info in kernel.tensors:
        make = None
        if info.dtype == "int32" and info.role == "input":
            values = {"prefix": lambda i: i % max(problem.get("prefixes", 1), 1)}
            make = values.get(info.name, lambda _: problem["t"])
        # Outputs and workspace belong to one kernel; inputs to all.
        owner = info.name if info.role == "input" else f"{name}.{info.name}"
        tensor = (given or {}).get(info.name)
        if tensor is None:
            tensor = machine.tensor(owner, info.shape, info.dtype, make)
        kernel.bind(info.name, tensor)
        outputs[info.name] = tensor
    return kernel, outputs


class One:
    """One kernel of the package, ready to run; `tensors`: what it is bound to."""

    def __init__(self, machine, name, problem, tune=0, given=None):
        self.kernel, self.tensors = bound(machine, name, problem, given)
        self.kernel.prepare()
        if tune:
            self.kernel.tune(tune)

    def run(self, stream):
        self.kernel.run(stream)


def projection(machine, name, problem, tune=0, given=None):
    """A kernel of the last step: latent outputs become outputs of the heads."""
    fields = {key: problem[key] for key in ("b", "s", "h", "d", "k", "dtype") if key in problem}
    return One(machine, name, fields, tune, given)


class Ours:
    """One way through the package: an attention kernel and, on the latent path, the output decompression."""

    def __init__(self, machine, choice, problem, tune=0):
        design = choice.kernel.split(".")[2]
        fields = {key: problem[key] for key in FIELDS if key in problem
                  and (key != "k" or not design.startswith("flash_attention"))}
        if design.startswith("mla_var6_plus"):
            fields["n"] = choice.n
            fields["prefixes"] = problem.get("prefixes", 1) if choice.path == "shared prefix" else 0
        self.kernels = [One(machine, choice.kernel, fields, tune)]
        if choice.path == "latent":
            given = {"o_latent": self.kernels[0].tensors["o"]}
            self.kernels.append(projection(machine, "output_decompression", problem, tune, given))

    def run(self, stream):
        for kernel in self.kernels:
            kernel.run(stream)


def operator_arguments(op, given):
    """For operators whose arguments changed often: known names get their values, others their default or a neutral
    one."""
    neutral = {"int": 0, "float": 0.0, "bool": False}
    return [given[argument.name] if argument.name in given else
            argument.default_value if argument.has_default_value() else neutral.get(str(argument.type))
            for argument in op._schema.arguments]


class FlashMla:
    """The binary of FlashMLA behind a torch operator, with pages of 64 tokens, and the projection by torch.bmm."""

    name, path = "FlashMLA + bmm", "latent"

    def __init__(self, machine, problem):
        b, s, t, h, k, p, d = (problem[key] for key in ("b", "s", "t", "h", "k", "p", "d"))
        if (k, p) != (512, 64):
            raise ValueError("it takes 512 latent and 64 rotary columns")
        dtype, pages = problem["dtype"], -(-t // 64)
        self.op = torch.ops._flashmla_C.dense_decode_fwd
        self.q = machine.tensor("flashmla.q", (b, s, h, k + p), dtype)
        shared = problem.get("prefix", 0) // 64  # whole pages that all requests have in common
        own = pages - shared
        self.cache = machine.tensor("flashmla.cache", (shared + b * own, 64, 1, k + p), dtype)
        self.w = machine.tensor("w", (h, k, d), dtype)
        self.lengths = machine.tensor("flashmla.lengths", (b,), "int32", lambda _: t)
        page = lambda i: i % pages if i % pages < shared else shared + i // pages * own + i % pages - shared
        self.table = machine.tensor("flashmla.table", (b, pages), "int32", page)
        self.scale, self.causal = (d + p) ** -0.5, bool(problem.get("causal", False))
        self.meta = self.splits = None
        self.rows, self.shape = b * s, (b, s, h, d)
        self.run(None)  # makes the work list once: it is not part of the time

    def run(self, _):
        out, _, self.meta, self.splits = self.op(self.q, self.cache, 512, self.lengths, self.table, self.scale,
                                                 self.causal, self.meta, self.splits, None)
        torch.bmm(out.view(self.rows, out.shape[2], out.shape[3]).transpose(0, 1), self.w)


class FlashAttention3:
    """The binary of FlashAttention-3 behind a torch operator: the rotary part of k copied to every head."""

    name, path = "FlashAttention-3", "decompressed"

    def __init__(self, machine, problem):
        b, s, t, h, p, d = (problem[key] for key in ("b", "s", "t", "h", "p", "d"))
        dtype = problem["dtype"]
        self.op = torch.ops._vllm_fa3_C.fwd.default
        starts = lambda name, step: machine.tensor(f"fa3.{name}", (b + 1,), "int32", lambda i: i * step)
        # Requests of variable length, stored one after the other: some builds have only this form and crash on others.
        given = {"q": machine.tensor("fa3.q", (b * s, h, d + p), dtype),
                 "k": machine.tensor("fa3.k", (b * t, h, d + p), dtype),
                 "v": machine.tensor("fa3.v", (b * t, h, d), dtype), "cu_seqlens_q": starts("q_starts", s),
                 "cu_seqlens_k": starts("k_starts", t), "max_seqlen_q": s, "max_seqlen_k": t,
                 "softmax_scale": (d + p) ** -0.5,
                 "causal": bool(problem.get("causal", False)), "is_causal": bool(problem.get("causal", False)),
                 "window_size_left": -1, "window_size_right": -1, "num_splits": 1, "cp_world_size": 1}
        self.arguments = operator_arguments(self.op, given)
        self.run(None)

    def run(self, _):
        self.op(*self.arguments)


class CudnnAttention:
    """cuDNN's attention through PyTorch, which brings it: the rotary part of k copied to every head."""

    name, path = "cuDNN", "decompressed"

    def __init__(self, machine, problem):
        b, s, t, h, p, d = (problem[key] for key in ("b", "s", "t", "h", "p", "d"))
        if problem.get("causal", False) and s != t:
            raise ValueError("its causal mask begins at the first token")
        dtype = problem["dtype"]
        self.tensors = [machine.tensor(f"cudnn.{name}", shape, dtype)
                        for name, shape in (("q", (b, h, s, d + p)), ("k", (b, h, t, d + p)), ("v", (b, h, t, d)))]
        self.causal, self.scale = bool(problem.get("causal", False)), (d + p) ** -0.5
        self.run(None)

    def run(self, _):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(*self.tensors, is_causal=self.causal, scale=self.scale)


PEERS = {"flashmla": FlashMla, "fa3": FlashAttention3, "cudnn": CudnnAttention}
LIBRARIES = ("flashmla", "fa3")  # come as a library with torch operators


def why_not_loaded(flag, library):
    """Loads a library of torch operators that was given by --<flag>. Returns why it could not, else None."""
    if not library:
        return f"no library given (--{flag}=<path>)"
    try:
        torch.ops.load_library(library)
    except (OSError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return None


def load_peers(machine, arguments):
    """The peers that can run: those whose library was given and loads, and PyTorch's. Prints why the others cannot."""
    found = []
    for key, peer in PEERS.items():
        if key in LIBRARIES and not getattr(arguments, key, None):
            why = why_not_loaded(key, None)
        elif not machine.gpu:
            why = "it needs a GPU"
        else:
            why = key in LIBRARIES and why_not_loaded(key, getattr(arguments, key))
        if why:
            print(f"{peer.name}: skipped, {why}")
        else:
            found.append(peer)
    return found


class Table:
    """The rows of one benchmark. Each row is written to the files as soon as it is measured."""

    def __init__(self, title, out_dir, columns):
        self.title, self.columns, self.rows, self.notes = title, columns, [], []
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        name = pathlib.Path(sys.argv[0]).stem
        self.directory = pathlib.Path(out_dir) if out_dir else pathlib.Path("out/tests") / name / stamp
        self.directory.mkdir(parents=True, exist_ok=True)

    def add(self, **row):
        self.rows.append(row)
        print("  ".join(f"{name}={_text(row.get(name))}" for name in self.columns), flush=True)
        self.write()

    def write(self):
        with open(self.directory / "comparison.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows({key: _text(value) for key, value in row.items()} for row in self.rows)
        lines = [f"# {self.title}", "", "| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(_text(row.get(name)) for name in self.columns) + " |" for row in self.rows]
        for note in self.notes:
            lines += ["", note]
        (self.directory / "comparison.md").write_text("\n".join(lines) + "\n")

    def finish(self, *notes):
        self.notes += notes
        self.write()
        for note in self.notes:
            print(note)
        print(f"report    {self.directory / 'comparison.md'}")


class Limit:
    """The time that --limit gives, from now on. The table says that it was over."""

    def __init__(self, seconds, table):
        self.end, self.table = time.monotonic() + seconds, table
        self.note = f"Stopped after {seconds:g} seconds (--limit)."

    def reached(self):
        """Whether nothing more is to be started."""
        over = time.monotonic() > self.end
        if over and self.note not in self.table.notes:
            self.table.notes.append(self.note)
        return over


def _text(value):
    if value is None:
        return ""
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def error_percent(predicted, measured):
    return 100 * (predicted / measured - 1) if measured else None


def measure_into(table, machine, make, **row):
    """Adds a row with the times of make().run, or with the sentence that says why there are none."""
    try:
        burst, sustained = machine.measure(make().run)
        row.update(burst_us=burst, sustained_us=sustained)
        if "predicted_us" in row:
            row["error"] = error_percent(row["predicted_us"], sustained)
    except Exception as error:  # of any type: the other backends have their turn
        row["note"] = (str(error) or type(error).__name__).splitlines()[0]
    table.add(**row)
    return row


def integers(text):
    """Whole numbers with commas between them, as a flag gives them."""
    try:
        return [int(word) for word in text.split(",") if word]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' must be whole numbers with commas between them, as 8,16") from None


def positive(text):
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' must be a whole number of at least 1")
    return int(text)


def regex(text):
    try:
        re.compile(text)
    except (re.error, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"'{text}' is no regular expression ({error}); --list shows the names that "
                                         "it is for") from None
    return text


def record_file(text):
    """A path that write_json can write."""
    path = pathlib.Path(text)
    try:
        if path.exists() and not path.is_file():
            raise argparse.ArgumentTypeError(f"'{text}' is a directory or device; name a file")
        within = next(one for one in path.absolute().parents if one.exists())
        if not within.is_dir() or not os.access(within, os.W_OK):
            raise argparse.ArgumentTypeError(f"no file can be made in {within}; name one elsewhere")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"'{text}' cannot be written ({error.strerror}); name another file") from None
    return path


def parser(description, **defaults):
    """Flags that all benchmarks have."""
    result = argparse.ArgumentParser(description=description.split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    problem = {"b": 32, "s": 16, "t": 4096, "h": 128, **defaults}
    for name, value in problem.items():
        result.add_argument(f"--{name}", type=int, default=value)
    result.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    result.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    result.add_argument("--seconds", type=float, default=1.0, help="busy time before a sustained figure")
    result.add_argument("--tune", type=int, default=0, help="tilings to try per kernel; 0: the default tiling")
    result.add_argument("--limit", type=float, default=600.0, help="seconds after which nothing more is started")
    result.add_argument("--out_dir",
                        help="where comparison.csv and comparison.md go (default out/tests/<benchmark>/<time>)")
    for key in LIBRARIES:
        result.add_argument(f"--{key}", metavar="PATH", help=f"library with the torch operators of {PEERS[key].name}")
    return result


def row_parser(description, peer, title):
    """Flags of the benchmarks whose problems are rows with a name, beside one peer."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--rows", action="append", type=regex, metavar="REGEX",
                        help="rows of this name, or any row's name")
    result.add_argument("--list", action="store_true", help="print the names of the rows and stop")
    result.add_argument("--seconds", type=float, default=0.4, help="busy time before a sustained figure (default 0.4)")
    result.add_argument("--limit", type=float, default=600.0, help="seconds after which no row is started")
    result.add_argument(f"--{peer}", metavar="PATH", help=f"library with the torch operators of {title}")
    result.add_argument("--record", type=record_file, help="file for what the table is made from")
    result.add_argument("--out_dir",
                        help=f"where the table goes (default out/tests/{pathlib.Path(sys.argv[0]).stem}/<time>)")
    return result


def rows_named(known, patterns, is_row):
    """The known rows that match a pattern, all without patterns; then patterns that are themselves names of rows."""
    names = [name for name in known if not patterns or any(re.fullmatch(one, name) for one in patterns)]
    for one in patterns or []:
        if is_row(one) and one not in names:
            names.append(one)
        elif not any(re.fullmatch(one, name) for name in names):
            stop(f"no row has such a name: '{one}'; --list shows names, and --help how others are made")
    return names


def row_note(found):
    """What a table says of one library's figures; empty where all is well."""
    if "failed" in found or found.get("correct", True):
        return found.get("failed", "")
    return f"WRONG by {found['difference'] or 'what is no number'}"


def problem_of(arguments, **changes):
    return {"b": arguments.b, "s": arguments.s, "t": arguments.t, "h": arguments.h, "d": 128, "p": 64, "k": 512,
            "dtype": arguments.dtype, **changes}


def in_words(problem):
    return ", ".join(f"{key}={value}" for key, value in problem.items())


def write_json(path, value):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".partial")
    try:
        aside.write_text(json.dumps(value, indent=1) + "\n")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
