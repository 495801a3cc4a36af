"""What MlaDecode and MlaPrefill have in common: an object of the extension, and a name for PyTorch's operators."""

import sys

from hypermla._hypermla import Error


HOPPER = 9, 0  # the compute capability that the kernels in CUDA C++ are for


class Planned:
    handle = order = None  # what torch_operators.py names it by

    def _take(self, kernels):
        """An object of the extension, which does the work."""
        self._kernels = kernels
        if sys.modules.get("torch"):  # None where its import is blocked
            from hypermla import torch_operators

            torch_operators.adopt(self)

    @property
    def device(self):
        """"cpu" or "cuda:0"."""
        return self._kernels.device()

    @property
    def workspace_bytes(self):
        return self._kernels.workspace_bytes()

    def explain(self):
        """Which kernel runs, and why."""
        return self._kernels.explain()

    def check(self):
        """Waits for the device; raises Error if the last plan() was given what exceeds the capacity."""
        self._kernels.check()

    def _operators(self, stream):
        """PyTorch's operators, under torch.compile()."""
        import torch

        if stream is not None:
            raise Error("torch.compile() has no streams: leave out `stream`, and PyTorch's current one is taken")
        if self.handle is None:
            raise Error(f"torch.compile() cannot trace this {type(self).__name__}; import torch before it is made")
        return torch.ops.hypermla


def parts(tensors):
    """The two parts of a pair; a tensor alone has no second one."""
    return tensors if isinstance(tensors, tuple) else (tensors, None)
