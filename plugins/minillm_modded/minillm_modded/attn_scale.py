"""Attention scale: sharper or softer attention by a constant factor, once q and k are normalised.

    softmax(scale q k^T)                                    instead of scale = D^-1/2

With QK-norm |q k^T| is at most D, and D^-1/2 leaves the softmax too flat to pick one key.
modded-nanogpt used 0.12 for heads of 128 (records of 2025, found by leloykun), later 0.1;
nanochat multiplies q and k by 1.2 each, 0.127 there. The option is a factor on D^-1/2, so that it
means the same at every head size: 1.36 is 0.12 at D = 128.
"""

from __future__ import annotations

from minillm_core import Layers, Plugin, option

__all__ = ["AttnScale"]


class AttnScale(Plugin, api=1):
    """Attention logits are 1.36 times as large: for use beside qk_norm."""

    factor: float = option(
        1.36,
        gt=0,
        search=(1.13, 1.36, 1.6),
        help="attention scale in units of D^-1/2; 1.13 is the later records' scale of 0.1",
    )
    layers: Layers = option("all", help='layers with this scale: "all", [0, -1], "every:2"')

    def build_attention(self, attn):
        if attn.layer in self.layers.resolve(attn.layers):
            attn.scale(self.factor * attn.head_dim**-0.5)
