"""SwiGLU (arXiv:2002.05202), the plain model's MLP."""

from __future__ import annotations

from typing import Any

from minillm_core.nn.geometry import Geometry
from minillm_core.nn.init import fan_in_residual
from minillm_core.nn.linear import Linear, products
from minillm_core.nn.module import Module

__all__ = ["SwiGLU"]


class SwiGLU(Module):
    """x (B, T, C) -> down(silu(gate(x)) * up(x)) (B, T, C)."""

    joined = (("gate", "up"),)

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        dim, hidden = geometry.dim, geometry.hidden
        self.gate = Linear(dim, hidden, role="mlp.gate", axes=("hidden", "dim"))
        self.up = Linear(dim, hidden, role="mlp.up", axes=("hidden", "dim"))
        self.down = Linear(
            hidden,
            dim,
            role="mlp.down",
            axes=("dim", "hidden"),
            init=fan_in_residual(hidden, geometry.layers),
        )

    def forward(self, x: Any) -> Any:
        """x (B, T, C) -> (B, T, C)."""
        gate, up = products(x, self.gate, self.up)  # (B, T, hidden)
        return self.down(self.ops.swiglu(gate, up))
