"""XSA, exclusive self-attention: the component along a token's own value is removed (arXiv:2603.09078).

    y_h <- y_h - tanh(alpha_h) <y_h, v^> v^,   v^ = v / |v|     alpha = 0 at the start

v is the token's own value. The residual stream already has the token's own information, and a head's output
should add that of other tokens. The strength is learned, one number per head: in the record of
modded-nanogpt that introduced it, it ended between 0.08 and 0.96, different for each head. Heads that
share a value each use that one. The version of 2026-08 has it in layers 1, 3, 4 and 7 of
11 (``layers``), with a strength per token, a part of dense connections that are not
implemented here.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Layers, Module, Param, Plugin, option, zeros

__all__ = ["XSA", "Exclude"]

EPSILON = 1e-10
"""Added to the mean square of v, small enough for v to be divided by its own length."""


class XSA(Plugin, api=1, identity_at_init=True):
    """The part of a head's output along the token's own value is removed, with a learned strength."""

    lr_mul: float = option(1.0, gt=0, help="factor on the learning rate of the strengths")
    layers: Layers = option(
        "all", help='layers with exclusive self-attention: "all", [0, -1], "every:2"'
    )

    def build_attention(self, attn):
        if attn.layer in self.layers.resolve(attn.layers):
            attn.out.project_out(Exclude, lr_mul=self.lr_mul)


class Exclude(Module):
    """y (B, T, H, D), v (B, T, K, D) -> y without its component along v; head h uses v[h // (H / K)]."""

    def __init__(self, geometry: Any, lr_mul: float) -> None:
        super().__init__()
        self.groups = (geometry.kv_heads, geometry.heads // geometry.kv_heads)
        self.alpha = Param(
            (geometry.heads,), axes=("heads",), init=zeros, role="gate", lr_mul=lr_mul, wd_mul=0.0
        )

    def forward(self, y: Any, v: Any) -> Any:
        """y (B, T, H, D), v (B, T, K, D) -> (B, T, H, D)."""
        ops, (B, T, H, D) = self.ops, y.shape
        K, G = self.groups
        grouped = ops.reshape(y, (B, T, K, G, D))
        unit = ops.expand_dims(ops.rms_norm(v, None, EPSILON), 3)  # (B, T, K, 1, D), |unit|^2 = D
        along = ops.sum(grouped * unit, -1, keepdims=True) / D  # (B, T, K, G, 1)
        strength = ops.reshape(ops.tanh(self.alpha), (K, G, 1))
        return ops.reshape(grouped - strength * along * unit, (B, T, H, D))
