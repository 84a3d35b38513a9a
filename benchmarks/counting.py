"""Counters of torch operations: FLOPs of matrix products by torch's own formulas, and bytes.

Every operation is counted when torch dispatches it, on tensors with or without data.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

__all__ = ["PHASES", "Counts", "StepCounter"]

PHASES: tuple[str, ...] = ("forward", "backward", "optimizer")

aten = torch.ops.aten
LOOKUPS = (aten.embedding, aten.index_select, aten.index, aten.gather)
"""Ops that read only the rows that they return, not the whole table."""

FREE = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty)


class Counts:
    """Counts by phase."""

    def __init__(self) -> None:
        self.flops, self.least, self.apart = (dict.fromkeys(PHASES, 0.0) for _ in range(3))

    def add(self, other: Counts, share: float) -> None:
        """Add a fraction of other counts."""
        for ours, theirs in zip(
            (self.flops, self.least, self.apart),
            (other.flops, other.least, other.apart),
            strict=True,
        ):
            for phase, number in theirs.items():
                ours[phase] += share * number


class StepCounter(TorchDispatchMode):
    """A dispatch mode that counts every operation of a step; ``phase`` is set by the trainer's marks."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.phase = Counts(), ""

    def mark(self, phase: str) -> None:
        """Set the phase, in place of a trainer's ``mark``."""
        self.phase = phase

    def product(self, flops: float, *arrays: Tensor) -> None:
        """Return a kernel that counts a product and moves these arrays."""
        if self.phase:
            moved = sum(nbytes(array) for array in arrays)
            self.counts.flops[self.phase] += flops
            self.counts.least[self.phase] += moved
            self.counts.apart[self.phase] += moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operation."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        if not self.phase or func.is_view or packet in FREE:
            return out
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if packet in LOOKUPS:
            operands = results + operands[1:]
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
            self.product(flops, *operands, *results)
            return out
        moved = sum(nbytes(array) for array in (*operands, *results))
        self.counts.apart[self.phase] += moved
        if packet in LOOKUPS or packet is aten.embedding_dense_backward:
            self.counts.least[self.phase] += moved
        return out


def nbytes(array: Tensor) -> int:
    """Return the bytes in memory: a broadcast axis counts once."""
    held = prod(n for n, step in zip(array.shape, array.stride(), strict=True) if step or n == 0)
    return held * array.element_size()
