"""Embedding gradient shrink: the lookup's gradient is multiplied by alpha (GLM-130B, arXiv:2210.02414).

    x <- sg(x) + alpha (x - sg(x))              sg: stop-gradient

The value is x, bitwise; the gradient of the looked-up rows is multiplied by alpha. Gradients of an embedding are
the largest and most uneven of a model early in training, and precede loss spikes; alpha 0.1 stabilised the
130 billion parameters. With a tied head (``model.tied``), only the lookup's part is scaled.
AdamW divides by a gradient's usual magnitude: there alpha only affects the global norm used for
clipping (``train.clip``), and the sum with a tied head's gradient. alpha 1 has no effect.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Module, Plugin, option

__all__ = ["EmbedGradShrink", "Shrunk"]


class EmbedGradShrink(Plugin, api=1, export="llama", identity_at_init=True, surrogate=True):
    """The gradient of the embedding's lookup is multiplied by a number below 1."""

    alpha: float = option(
        0.1,
        ge=0,
        le=1,
        search=(0.1, 0.3),
        help="factor on the gradient of the looked-up embeddings",
    )

    def build_model(self, model):
        model.embed.mix(Shrunk, alpha=self.alpha, before=("smear",))


class Shrunk(Module):
    """The identity x (B, T, C) -> x, with its gradient times alpha."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, x: Any) -> Any:
        """x (B, T, C) -> (B, T, C)."""
        stopped = self.ops.stop_gradient(x)
        return stopped + (x - stopped) * self.alpha
