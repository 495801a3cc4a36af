import builtins
import os
from typing import Any, NamedTuple

__version__: str

class Error(RuntimeError): ...

class TensorInfo(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str

class Choice(NamedTuple):
    path: str
    kernel: str
    n: int
    burst_us: float
    sustained_us: float
    limit: str
    draft: bool

class Times(NamedTuple):
    median_us: float
    low_us: float
    high_us: float
    tflops: float
    gbps: float
    roofline_fraction: float

class Metric(NamedTuple):
    name: str
    label: str
    unit: str
    value: float

class Bottleneck(NamedTuple):
    kind: str
    confidence: str
    why: str

class Opportunity(NamedTuple):
    id: str
    name: str
    gain_percent: float
    trigger: str
    why: str
    card: str
    refuted: str
    stage: str

class StageProfile(NamedTuple):
    name: str
    burst: Times | None
    metrics: tuple[Metric, ...]

class Profile(NamedTuple):
    directory: str
    missing: str
    cold: Times
    burst: Times
    sustained: Times | None
    bottleneck: Bottleneck
    opportunities: tuple[Opportunity, ...]
    stages: tuple[StageProfile, ...]

class Kernel:
    def __init__(
        self, name: str, version: str | None = None, device: str = "auto", language: str | None = None,
        **problem: int | float | bool | str
    ) -> None: ...
    @property
    def tensors(self) -> tuple[TensorInfo, ...]: ...
    @property
    def is_gpu(self) -> bool: ...
    def bind(self, name: str, tensor: Any) -> None: ...
    def tune(self, max_iterations: int = 0, retune: bool = False) -> None: ...
    def prepare(self) -> None: ...
    def run(self, stream: Any = None) -> None: ...
    def check(self) -> None: ...
    def profile(
        self, mode: str = "annotation", out_dir: str | os.PathLike[str] | None = None, label: str = "",
        bench_runs: int = 20
    ) -> Profile: ...
    def predicted_seconds(self, device: str | None = None) -> float: ...

def choose(
    device: str | None = None, language: str | None = None, **problem: int | bool | str
) -> builtins.list[Choice]: ...
def list() -> builtins.list[str]: ...

class ListedKernel(NamedTuple):
    name: str
    full_name: str
    language: str
    version: str
    draft: bool
    summary: str

class CheckedOutput(NamedTuple):
    inputs: str
    output: str
    passed: bool
    relative_error: float

class CheckResult(NamedTuple):
    passed: bool
    kernel: str
    seed: int
    outputs: tuple[CheckedOutput, ...]

class VerifyResult(NamedTuple):
    kernel: str
    cases: int
    failed: int
    worst_relative_errors: dict[str, float]
    failures: str

def kernels(language: str | None = None) -> builtins.list[ListedKernel]: ...
def check(
    name: str, version: str | None = None, device: str = "auto", language: str | None = None, seed: int = 0,
    tune: bool = False, **problem: int | float | bool | str
) -> CheckResult: ...
def verify(
    name: str | None = None, version: str | None = None, device: str = "auto", language: str | None = None,
    record: str | os.PathLike[str] | None = None
) -> builtins.list[VerifyResult]: ...
def profile(
    name: str, version: str | None = None, mode: str = "annotation", device: str = "auto", language: str | None = None,
    out_dir: str | os.PathLike[str] | None = None, label: str = "", bench_runs: int = 20, seed: int = 0,
    tune: bool = True, **problem: int | float | bool | str
) -> Profile: ...

def merge_states(
    o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, out: Any = None, lse: Any = None, lse_base2: bool = False,
    empty_lse_positive: bool = False, stream: Any = None
) -> tuple[Any, Any]: ...
def append(rows: Any, cache: Any, slots: Any, stream: Any = None, cache_scale: Any = None) -> None: ...
def decompress_prefix(
    cache: Any, block_table: Any, tokens: int, w_uk: Any, w_uv: Any, out: tuple[Any, Any] | None = None,
    rope: bool = True, stream: Any = None
) -> tuple[Any, Any]: ...
def split_prefixes(
    block_table: Any, lengths: Any, query_starts: Any, slots: Any, prefixes: Any, prefix_pages: Any, owners: Any,
    found: Any, own_table: Any, own_lengths: Any, shared_starts: Any, query_rows: Any, requests: int | None = None,
    page: int = 64, stream: Any = None
) -> None: ...

class MlaDecode:
    MAX_HEADS: int
    MAX_REQUESTS: int
    MAX_QUERIES: int
    MAX_TOKENS: int
    MAX_SHARDS: int
    MAX_INTERLEAVE: int
    handle: int | None
    order: Any
    def __init__(self, heads: int = 128, max_requests: int = 1, max_queries: int = 1, max_tokens: int = 4096,
                 page: int = 64, dtype: Any = "bfloat16", causal: bool = True, scale: float = 0.0, split: int = 0,
                 max_query_tokens: int = 0, lse_base2: bool = False, empty_lse_positive: bool = False,
                 kernel: str = "", device: Any = "auto", workspace: Any = None, sparse: bool = False,
                 cache_format: str = "as_queries", shards: int = 1, shard: int = 0, interleave: int = 1,
                 shared_prefixes: bool = False, fp8_queries: bool = False) -> None: ...
    @property
    def device(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    def explain(self) -> str: ...
    def check(self) -> None: ...
    @staticmethod
    def most_query_tokens(heads: int) -> int: ...
    @staticmethod
    def fixed_split(workspace_bytes: int, heads: int = 128, max_requests: int = 1, max_queries: int = 1,
                    max_tokens: int = 4096, device: Any = "auto") -> int: ...
    def plan(self, lengths: Any, query_starts: Any = None, stream: Any = None,
             block_table: Any = None) -> None: ...
    def run(self, q: Any, cache: Any, block_table: Any, out: Any = None, lse: Any = None,
            stream: Any = None, sinks: Any = None, cache_scale: Any = None,
            q_scale: Any = None) -> tuple[Any, Any]: ...

class MlaPrefill:
    MAX_HEADS: int
    MAX_REQUESTS: int
    MAX_QUERY_TOKENS: int
    MAX_TOKENS: int
    handle: int | None
    order: Any
    def __init__(self, heads: int = 128, max_requests: int = 1, max_query_tokens: int = 8192, max_tokens: int = 131072,
                 dtype: Any = "bfloat16", causal: bool = True, scale: float = 0.0, lse_base2: bool = False,
                 empty_lse_positive: bool = False, device: Any = "auto", workspace: Any = None,
                 accumulate: bool = False, batch_invariant: bool = False, query_rows: bool = False) -> None: ...
    @property
    def device(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    def explain(self) -> str: ...
    def check(self) -> None: ...
    def plan(self, query_starts: Any, token_starts: Any, stream: Any = None, query_rows: Any = None) -> None: ...
    def run(self, q: Any, k: Any, v: Any, out: Any = None, lse: Any = None,
            stream: Any = None) -> tuple[Any, Any]: ...
