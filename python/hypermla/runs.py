"""Calls that need no tensors: each makes random inputs of its own. What `hypermla --list`, `hypermla kernel --check`,
`hypermla verify` and `hypermla kernel --prof_type=<mode>` do in a shell."""

from typing import NamedTuple

import hypermla
from hypermla import _hypermla
from hypermla._errors import integer, raises_error


class ListedKernel(NamedTuple):
    """One version of one kernel."""

    name: str  # "flash_attention_v1": its design and version
    full_name: str  # "cutile.mla.flash_attention_v1"
    language: str  # "cute" or "cutile"
    version: str  # "v0", the base version, "v1", ...
    draft: bool  # not verified on a GPU yet
    summary: str


class CheckedOutput(NamedTuple):
    """One output for one kind of inputs, against the reference."""

    inputs: str  # "random inputs", "growing scores", "t=333"
    output: str  # "o"
    passed: bool
    relative_error: float  # the norm of the difference over the norm of the reference


class CheckResult(NamedTuple):
    """What check() found."""

    passed: bool  # all outputs
    kernel: str  # the version that ran: "cutile.mla.flash_attention"
    seed: int  # of the inputs
    outputs: tuple  # of CheckedOutput


class VerifyResult(NamedTuple):
    """What verify() found of one version."""

    kernel: str
    cases: int
    failed: int
    worst_relative_errors: dict  # by output
    failures: str  # some lines for each case that failed


@raises_error
def kernels(language=None):
    """All versions of all kernels; `language` leaves only those in "cute" or in "cutile"."""
    listed = (ListedKernel(*row) for row in _hypermla.kernels())
    return [kernel for kernel in listed if language in (None, kernel.language)]


def _seed(seed):
    return integer("seed", seed, range(2**64), "be from 0 to 2^64 - 1")


@raises_error
def check(name, version=None, device="auto", language=None, seed=0, tune=False, **problem):
    """Runs a kernel on random inputs and compares it with the reference: one call, no tensors.

    `name` to `language` and the problem's fields are those of Kernel(). `seed` draws the inputs; 0: fresh ones. `tune`
    as Kernel.tune() does; otherwise the kernel has its default tilings. What differs is in the result, not an Error.
    """
    passed, kernel, used, outputs = _hypermla.check(name, version or "", device, language or "",
                                                    hypermla._fields(problem), _seed(seed), tune)
    return CheckResult(passed, kernel, used, tuple(CheckedOutput(*row) for row in outputs))


@raises_error
def verify(name=None, version=None, device="auto", language=None, record=None):
    """Runs all correctness cases of a version or, without `name`, of every one that runs on the device.

    Takes seconds for a kernel on a GPU and minutes on a CPU. `record` names a file that receives the result in the form
    of results/verified.json; None: it is only returned. Of several, a version that cannot be compiled or run has
    failed, and is not recorded; of one this raises Error.
    """
    rows = _hypermla.verify(name or "", version or "", device, language or "", str(record or ""))
    return [VerifyResult(*row) for row in rows]


@raises_error
def profile(name, version=None, mode="annotation", device="auto", language=None, out_dir=None, label="", bench_runs=20,
            seed=0, tune=True, **problem):
    """Kernel.profile() on random inputs: one call, no tensors. The other arguments are those of check()."""
    return hypermla._profile(_hypermla.profile(name, version or "", device, language or "", hypermla._fields(problem),
                                               _seed(seed), tune, mode, str(out_dir or ""), label, bench_runs))
