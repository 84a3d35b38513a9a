"""The ops on NumPy: the float64 reference itself, forward only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from minillm_core.ops import reference
from minillm_core.ops.reference_arrays import NumPyArrays
from minillm_core.ops.select import Candidate

__all__ = ["CANDIDATES", "NumPyOps"]

Kernel = Callable[..., Any]
OPS = tuple(name for name in reference.__all__ if name != "visible")


class NumPyOps(NumPyArrays):
    """What model code calls ``self.ops`` on NumPy.

    Args:
        kernels: op -> function: ops that plugins declare, or replacements.
    """

    name = "numpy"

    linear: Kernel
    embedding: Kernel
    rms_norm: Kernel
    rotate: Kernel
    attention: Kernel
    swiglu: Kernel
    logits: Kernel
    linear_cross_entropy: Kernel

    def __init__(self, kernels: Mapping[str, Kernel] | None = None) -> None:
        for op in OPS:
            setattr(self, op, getattr(reference, op))
        for op, kernel in (kernels or {}).items():
            setattr(self, op, kernel)


CANDIDATES: tuple[Candidate, ...] = tuple(
    Candidate(op, "reference", ("numpy",), f"minillm_core.ops.reference:{op}", plain=True)
    for op in OPS
)
