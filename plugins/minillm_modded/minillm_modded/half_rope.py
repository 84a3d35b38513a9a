"""Half-truncated RoPE: half of each head's features are rotated, the other half are not.

    theta_i = base^(-i / (D/4 - 1)),  i = 0 ... D/4 - 1;  0 for the other D/4 pairs

Frequencies from 1 to 1 / base, evenly spaced in the exponent, both ends included; the D/2 features
without rotation match only by content, whatever the distance (modded-nanogpt, record 17, by
YouJiacheng; base 1,024 suits rows of a few thousand tokens).
"""

from __future__ import annotations

import numpy as np

from minillm_core import Layers, PlanError, Plugin, option

__all__ = ["HalfRope", "half_truncated"]


class HalfRope(Plugin, api=1):
    """Rotary position embedding on half of each head's features, base 1,024."""

    base: float = option(
        1024.0,
        gt=1,
        search=(1024.0, 10_000.0),
        help="reciprocal of the lowest frequency (in radians per position)",
    )
    layers: Layers = option(
        "all", help='layers with half-truncated RoPE: "all", [0, -1], "every:2"'
    )

    def build_attention(self, attn):
        if attn.layer not in self.layers.resolve(attn.layers):
            return
        if attn.head_dim % 4 or attn.head_dim < 8:
            raise PlanError(
                f"half_rope cannot halve the {attn.head_dim // 2} pairs of a head of "
                f"{attn.head_dim} features",
                where=f"layers.{attn.layer}.attention.rope.frequencies",
                fix="model.dim / model.heads a multiple of 4, from 8 on",
            )
        attn.rope.frequencies(half_truncated, base=self.base)


def half_truncated(head_dim: int, base: float) -> np.ndarray:
    """Return float64 (D/2,): radians per position, D/4 from 1 down to 1 / base, then D/4 zeros."""
    quarter = head_dim // 4
    turning = base ** -np.linspace(0.0, 1.0, quarter)
    return np.concatenate([turning, np.zeros(quarter)])
