"""Residual decay: the stream is scaled by a learned factor at every sublayer.

    x <- lambda x + sublayer(norm(x))       one lambda for each attention and each MLP

A block can fade earlier contributions, or, above 1, amplify them: the records start at sqrt(1.1),
1.1 per block, and train it at 5 times the learning rate of their Adam without weight decay
(modded-nanogpt, records from 2025-11 on). The factors multiply over the depth: nanochat starts at 1
and trains them at a hundredth of its learning rate for scalars.
"""

from __future__ import annotations

from minillm_core import Layers, Learned, Plugin, option

__all__ = ["ResidualDecay"]


class ResidualDecay(Plugin, api=1):
    """The stream is scaled by a learned number at each sublayer."""

    start: float = option(1.1**0.5, gt=0, help="initial factor")
    lr_mul: float = option(5.0, gt=0, help="factor on the learning rate of the factors")
    layers: Layers = option("all", help='blocks with learned factors: "all", [0, -1], "every:2"')

    def build_model(self, model):
        for layer in self.layers.resolve(model.layers):
            for place in ("mid", "out"):
                scale = Learned(self.start, lr_mul=self.lr_mul)
                model.residual(f"layers.{layer}.{place}", "carry", scale)
