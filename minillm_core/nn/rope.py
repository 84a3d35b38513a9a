"""Rotary position embedding (arXiv:2104.09864), in the halves convention of Llama."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from minillm_core.errors import PlanError
from minillm_core.nn.geometry import Geometry
from minillm_core.nn.module import Module
from minillm_core.nn.node import Node
from minillm_core.nn.param import Buffer
from minillm_core.nn.reference import call_reference
from minillm_core.ops.contract import Rotary

__all__ = ["Rope", "RopeSpec", "llama_frequencies"]


def llama_frequencies(head_dim: int, base: float) -> np.ndarray:
    """float64 (D/2,): base^(-2i/D), radians a position."""
    return base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


Claimed = tuple[str, str, tuple[tuple[str, Any], ...]]
"""owner, reference, arguments."""


@dataclass(frozen=True)
class RopeSpec:
    """What plugins claimed of the rotary embedding; None: Llama's."""

    base: float
    frequencies: Claimed | None = None
    scaling: Claimed | None = None
    positions: Node | None = None

    def radians(self, head_dim: int) -> np.ndarray:
        """float64 (D/2,): the frequencies, claimed or Llama's, then scaled.

        Raises:
            PlanError: a claimed function gave another shape.
        """
        if self.frequencies is None:
            theta = llama_frequencies(head_dim, self.base)
        else:
            _, reference, arguments = self.frequencies
            theta = np.asarray(call_reference(reference, head_dim, **dict(arguments)), np.float64)
        if self.scaling is not None:
            _, reference, arguments = self.scaling
            theta = np.asarray(call_reference(reference, theta, **dict(arguments)), np.float64)
        if theta.shape != (head_dim // 2,):
            raise PlanError(f"rotary frequencies have shape {theta.shape}, not ({head_dim // 2},)")
        return theta


class Rope(Module):
    """Tables of cos and sin for ``length`` positions; angles in float64, tables in float32."""

    def __init__(self, geometry: Geometry, spec: RopeSpec, length: int) -> None:
        super().__init__()
        theta = spec.radians(geometry.head_dim)
        half = geometry.head_dim // 2

        def angles() -> np.ndarray:
            return np.outer(np.arange(length), theta)  # (P, D/2)

        self.cos = Buffer((length, half), lambda: np.cos(angles()).astype(np.float32))
        self.sin = Buffer((length, half), lambda: np.sin(angles()).astype(np.float32))
        self.frequencies = Buffer((half,), lambda: theta.astype(np.float32))

    def forward(self, positions: Any) -> Rotary:
        """positions None (0, 1, 2 ...), int32 (T,) or (B, T) -> what ``ops.rotate`` takes."""
        return Rotary(self.cos, self.sin, self.frequencies, positions)
