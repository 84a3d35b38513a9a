"""Sparse attention gate: each head's output times a gate computed from a few features of its input.

    y_h <- y_h sigmoid(w_h . x[:12])                       w = 0 at the start: every gate is 1/2

A head can close for a token instead of attending to the first one (attention sink)
(gated attention: Qiu et al., arXiv:2505.06708; from 12 features: modded-nanogpt, record 28).
Reading twelve features costs almost nothing.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Layers, Linear, Module, PlanError, Plugin, option, zeros

__all__ = ["Gate", "SparseGate"]


class SparseGate(Plugin, api=1):
    """One gate per token and head on the attention output, read from 12 features."""

    width: int = option(
        12, ge=1, help="number of features of the layer's input that the gate reads"
    )
    lr_mul: float = option(1.0, gt=0, help="factor on the learning rate of the gates")
    layers: Layers = option("all", help='layers with gates: "all", [0, -1], "every:2"')

    def build_attention(self, attn):
        if attn.layer in self.layers.resolve(attn.layers):
            attn.out.gate(Gate, width=self.width, lr_mul=self.lr_mul)

    def build_model(self, model):
        if self.width > model.dim:
            raise PlanError(
                f"sparse_gate reads {self.width} features of a stream of {model.dim}",
                where=f"sparse_gate.width={self.width}",
                fix=f"sparse_gate.width={model.dim} at most",
            )


class Gate(Module):
    """A gate per head: y (B, T, H, D), x (B, T, C) -> y, each head times its gate."""

    def __init__(self, geometry: Any, width: int, lr_mul: float) -> None:
        super().__init__()
        self.width = width
        self.gate = Linear(
            width,
            geometry.heads,
            role="gate",
            axes=("heads", "gate"),
            init=zeros,
            lr_mul=lr_mul,
            wd_mul=0.0,
        )

    def forward(self, y: Any, x: Any) -> Any:
        """y (B, T, H, D), x (B, T, C) -> (B, T, H, D)."""
        gate = self.ops.sigmoid(self.gate(x[..., : self.width]))  # (B, T, H)
        return y * self.ops.expand_dims(gate, -1)
