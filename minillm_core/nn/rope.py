"""Rotary position embedding (arXiv:2104.09864), in the halves convention of Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from minillm_core.errors import PlanError
from minillm_core.nn.module import Module
from minillm_core.nn.node import ModelShape, Node
from minillm_core.nn.param import Buffer
from minillm_core.nn.reference import Function
from minillm_core.ops.contract import Rotary


def llama_frequencies(head_dim: int, base: float) -> np.ndarray:
    """Compute base^(-2i/D), radians per position, float64 (D/2,)."""
    return base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


@dataclass(frozen=True)
class Staged:
    """An argument that is a staged value: a whole number that changes between stages of the run."""

    value: str  # the name of the staged value
    numbers: tuple[int, ...]  # all numbers that it takes

    @property
    def inputs(self) -> tuple[str, ...]:
        """The name of the staged value."""
        return (self.value,)


@dataclass(frozen=True)
class RopeSpec:
    """The claims on the rotary embedding; None: as in Llama."""

    base: float
    frequencies: Function | None = None
    scaling: Function | None = None
    positions: Node | None = None

    @property
    def staged(self) -> Staged | None:
        """The argument of ``scaling`` that is a staged value; None: no argument is."""
        arguments = () if self.scaling is None else self.scaling.arguments
        return next((value for _, value in arguments if isinstance(value, Staged)), None)

    @property
    def numbers(self) -> tuple[int | None, ...]:
        """The numbers that the staged argument of ``scaling`` takes; (None,) if there is none."""
        return (None,) if self.staged is None else self.staged.numbers

    def radians(self, head_dim: int, number: int | None = None) -> np.ndarray:
        """Compute the frequencies, claimed or Llama's, scaled for one of ``numbers``; float64 (D/2,).

        Raises:
            PlanError: a claimed function returned another shape, or numbers that are not finite.
        """
        if self.frequencies is None:
            theta = llama_frequencies(head_dim, self.base)
        else:
            theta = np.asarray(self.frequencies.call(head_dim), np.float64)
        if self.scaling is not None:
            given = ((k, number if isinstance(v, Staged) else v) for k, v in self.scaling.arguments)
            theta = np.asarray(
                self.scaling._replace(arguments=tuple(given)).call(theta), np.float64
            )
        if theta.shape != (head_dim // 2,):
            raise PlanError(f"rotary frequencies have shape {theta.shape}, not ({head_dim // 2},)")
        if not np.isfinite(theta).all():
            raise PlanError("rotary frequencies are NaN or infinite")
        return theta


class Rope(Module):
    """Tables of cos and sin for ``length`` positions; angles in float64, tables in float32.

    Args:
        theta: float64 (D/2,), radians per position.
        length: how many positions.
    """

    def __init__(self, theta: np.ndarray, length: int) -> None:
        super().__init__()
        half = len(theta)

        def angles() -> np.ndarray:
            return np.outer(np.arange(length), theta)  # (P, D/2)

        self.cos = Buffer((length, half), lambda: np.cos(angles()).astype(np.float32))
        self.sin = Buffer((length, half), lambda: np.sin(angles()).astype(np.float32))
        self.frequencies = Buffer((half,), lambda: theta.astype(np.float32))

    def forward(self, positions: Any) -> Rotary:
        """Return the tables for ``ops.rotate``, at positions None (0, 1, 2 ...), int32 (T,) or (B, T)."""
        return Rotary(self.cos, self.sin, self.frequencies, positions)

    def at(self, reads: Mapping[str, Any]) -> Self:
        """Return the tables of a step: this module, in every stage."""
        return self


class StagedRope(Module):
    """Tables for each number of a staged value: a compiled step contains only those of its stage."""

    def __init__(self, spec: RopeSpec, staged: Staged, head_dim: int, length: int) -> None:
        super().__init__()
        self.value = staged.value
        self.stages = {
            f"at_{number}": Rope(spec.radians(head_dim, number), length)
            for number in staged.numbers
        }

    def at(self, reads: Mapping[str, Any]) -> Any:
        """Return the :class:`Rope` of the step's stage."""
        return self.stages[f"at_{int(reads[self.value])}"]


def rope_of(geometry: ModelShape, spec: RopeSpec, length: int) -> Rope | StagedRope:
    """Build one layer's tables, for ``length`` positions."""
    if spec.staged is not None:
        return StagedRope(spec, spec.staged, geometry.head_dim, length)
    return Rope(spec.radians(geometry.head_dim), length)
