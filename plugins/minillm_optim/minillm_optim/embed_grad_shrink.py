"""Embedding gradient shrink: the table's gradient from the lookup is multiplied by alpha (GLM-130B, arXiv:2210.02414).

    x <- sg(x) + alpha (x - sg(x))              sg: no gradient flows through it

The value is x, bit by bit; the gradient of what is looked up is alpha times its own. Gradients of an embedding are
the largest and the least even of a model early on, and go before a spike of the loss; alpha 0.1 kept them of
130 billion parameters down. Where the head is the embedding (``model.tied``), only the lookup's part is shrunk.
AdamW divides by a gradient's usual size: what is left there of alpha is its part in the global norm that is
clipped (``train.clip``), and in the sum with a tied head's. alpha 1 changes nothing.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Module, Plugin, option

__all__ = ["EmbedGradShrink", "Shrunk"]


class EmbedGradShrink(Plugin, api=1, export="llama", identity_at_init=True, surrogate=True):
    """The gradient of the embedding's lookup is multiplied by a number below 1."""

    alpha: float = option(
        0.1, ge=0, le=1, search=(0.1, 0.3), help="factor on the gradient of what is looked up"
    )

    def build_model(self, model):
        model.embed.mix(Shrunk, alpha=self.alpha, before=("smear",))


class Shrunk(Module):
    """x (B, T, C) -> x, its gradient times alpha."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, x: Any) -> Any:
        """x (B, T, C) -> (B, T, C)."""
        stopped = self.ops.stop_gradient(x)
        return stopped + (x - stopped) * self.alpha
