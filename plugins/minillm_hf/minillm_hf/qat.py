"""Quantisation-aware training: weight matrices are rounded to a few levels in the forward pass.

    s_r = max_c |W_rc| / (2^(bits - 1) - 1)      one scale per row
    Q   = s round(W / s)
    y   = x Q^T,  dL/dW = dL/dQ                  straight-through (arXiv:1308.3432)

The model learns weights that lose nothing when stored in ``bits`` bits (arXiv:1712.05877; per channel
and symmetric, the format of int8 and int4 kernels). Master weights stay float32.
``minillm export`` writes Q: a plain model whose matrices have at most 2^bits - 1 levels per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from minillm_core import Layers, Module, Plugin, option
from minillm_hf.lora import TARGETS, Target

__all__ = ["QAT", "Rounded"]

LEAVES: Mapping[str, tuple[Target, ...]] = {
    "attention": ("q", "k", "v", "o"),
    "mlp": ("gate", "up", "down"),
}


class QAT(Plugin, api=1, export="llama", surrogate=True):
    """Trains with weight matrices rounded to a few bits; the export has the rounded ones."""

    bits: int = option(8, ge=2, le=8, help="bits per weight, including the sign")
    targets: Annotated[tuple[Target, ...], Field(min_length=1)] = option(
        TARGETS,
        help="matrices that are rounded: q, k, v, o of attention, gate, up, down of the MLP",
    )
    layers: Layers = option("all", help='layers with rounded matrices: "all", [0, -1], "every:2"')

    def build_model(self, model):
        for layer in self.layers.resolve(model.layers):
            for part, leaves in LEAVES.items():
                for leaf in leaves:
                    if leaf in self.targets:
                        model.linear(f"layers.{layer}.{part}.{leaf}", Rounded, bits=self.bits)


class Rounded(Module):
    """A linear layer's product with rounded weights: x (..., I), weight (O, I) -> (..., O).

    Args:
        bits: per weight.
    """

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.top = 2.0 ** (bits - 1) - 1

    def forward(self, x: Any, weight: Any) -> Any:
        """x (..., I), weight (O, I) -> (..., O)."""
        ops = self.ops
        exact = ops.astype(weight, "float32")
        largest = ops.max(ops.abs(exact), -1, keepdims=True)  # (O, 1)
        scale = ops.maximum(largest, 1e-12) / self.top
        rounded = ops.astype_like(ops.round(exact / scale) * scale, weight)  # (O, I)
        return ops.linear(x, weight + ops.stop_gradient(rounded - weight))

    def folded(self, weight: np.ndarray, own: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the rounded weight (O, I), float32: its plain product equals this module's."""
        scale = np.maximum(np.abs(weight).max(-1, keepdims=True), 1e-12) / self.top
        return (np.round(weight / scale) * scale).astype(np.float32)
