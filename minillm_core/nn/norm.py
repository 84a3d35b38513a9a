"""RMSNorm (arXiv:1910.07467)."""

from __future__ import annotations

from typing import Any

from minillm_core.nn.geometry import Geometry
from minillm_core.nn.init import ones
from minillm_core.nn.module import Module
from minillm_core.nn.param import Param

__all__ = ["EPSILON", "RMSNorm"]

EPSILON = 1e-5  # Llama's


class RMSNorm(Module):
    """x (..., C) -> x / sqrt(mean(x^2) + eps) * weight, float32 inside."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.weight = Param((geometry.dim,), axes=("dim",), init=ones, role="norm", wd_mul=0.0)

    def forward(self, x: Any) -> Any:
        """x (..., C) -> (..., C)."""
        return self.ops.rms_norm(x, self.weight, EPSILON)
