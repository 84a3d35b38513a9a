"""QK-norm: queries and keys have unit RMS before they are rotated (Dehghani et al., arXiv:2302.05442).

    q <- q / sqrt(mean(q^2) + eps),  k <- k / sqrt(mean(k^2) + eps)        over each head's D

Attention logits are then cosines times D: they cannot grow with the weights of q and k, which allows
a higher learning rate (modded-nanogpt, record 5, by Grad62304977). RMS without gains, as
in the records; ``gains`` trains one for each of the D features, as Qwen3 does
(arXiv:2505.09388). Either can be exported in Qwen3's layout.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Layers, Module, Param, Plugin, ones, option

__all__ = ["Norm", "QKNorm"]


class QKNorm(Plugin, api=1, export="qwen3"):
    """Queries and keys are normalised before the rotation."""

    gains: bool = option(False, help="train a gain for each feature of a head, as Qwen3 does")
    layers: Layers = option("all", help='layers with QK-norm: "all", [0, -1], "every:2"')

    def build_attention(self, attn):
        if attn.layer in self.layers.resolve(attn.layers):
            attn.qk.norm(Norm, gains=self.gains)


class Norm(Module):
    """Normalisation to unit RMS over D, times gains (D,): q (B, T, H, D), k (B, T, K, D) -> both."""

    def __init__(self, geometry: Any, gains: bool) -> None:
        super().__init__()
        self.eps = geometry.norm_eps  # Qwen3's layout has a single epsilon for all norms
        self.q = gain(geometry.head_dim) if gains else None
        self.k = gain(geometry.head_dim) if gains else None

    def forward(self, q: Any, k: Any) -> Any:
        """q (B, T, H, D), k (B, T, K, D) -> (q, k)."""
        return self.ops.rms_norm(q, self.q, self.eps), self.ops.rms_norm(k, self.k, self.eps)


def gain(head_dim: int) -> Param:
    """Declare a gain (D,), initialised to ones."""
    return Param((head_dim,), axes=("head_dim",), init=ones, role="norm", wd_mul=0.0)
