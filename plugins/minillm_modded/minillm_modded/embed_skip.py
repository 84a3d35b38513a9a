"""Embedding skip: every block's input is a learned combination of the residual stream and the embedding.

    x <- lambda_i x + mu_i x0            before block i; lambda = 1 and mu = 0 at the start

x0 is the input of the first block. A deep layer has access to the token's identity without the stream
having to carry it (modded-nanogpt, record 9, by Grad62304977). The records train these coefficients at
5 times the learning rate of their Adam, without weight decay.
"""

from __future__ import annotations

from minillm_core import Layers, Learned, Plugin, option

__all__ = ["EmbedSkip"]


class EmbedSkip(Plugin, api=1, identity_at_init=True):
    """The token's embedding is mixed into the stream before each block, with learned weights."""

    lr_mul: float = option(
        5.0,
        gt=0,
        search=(1.0, 5.0, 10.0),
        help="factor on the learning rate of the two coefficients",
    )
    layers: Layers = option("all", help='blocks with an embedding skip: "all", [0, -1], "every:2"')

    def build_model(self, model):
        for layer in self.layers.resolve(model.layers):
            site = f"layers.{layer}.in"
            model.residual(site, "carry", Learned(1.0, lr_mul=self.lr_mul))
            model.residual(site, "x0", Learned(0.0, lr_mul=self.lr_mul))
