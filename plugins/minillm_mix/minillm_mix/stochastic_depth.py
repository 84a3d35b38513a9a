"""Stochastic depth: blocks are skipped at random in training, later ones more often (arXiv:1603.09382).

    x <- x + b_l / (1 - p_l) (attention, then MLP)       b_l ~ Bernoulli(1 - p_l), per row
    p_l = drop l / (L - 1)                               layers l = 0 .. L - 1: the first is never skipped

Every depth up to the full one is trained, so that no block depends on its predecessor alone: a
regulariser for repeated texts. Division by 1 - p_l keeps a block's expected contribution,
and evaluation and generation use the full model. ``rescale=false`` does not divide, and
``by="batch"`` draws once per micro-batch, as in slowrun, whose runs read 100 million tokens
repeatedly.

Draws are functions of the run's seed, batch by batch, in the dataloader's thread: a resumed run has the same.
A skipped block is computed anyway, and multiplied by 0: no time is saved.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from minillm_core import Layers, Module, PlanError, Plugin, option, random_stream

__all__ = ["Kept", "StochasticDepth"]

FIELD = "depth_drawn"


class StochasticDepth(Plugin, api=1, unweighted=True):
    """Rows skip blocks at random in training, the last ones most often."""

    drop: float = option(
        0.1,
        gt=0,
        lt=1,
        search=(0.05, 0.1, 0.2),
        help="probability that the last block is skipped; rises linearly from 0 at the first",
    )
    by: Literal["row", "batch"] = option(
        "row", help="unit of the random draw: row or micro-batch (batch)"
    )
    rescale: bool = option(True, help="divide a block's output by its probability of being kept")
    layers: Layers = option("all", help='layers that may be skipped: "all", [-1], "every:2"')

    def build_data(self, data):
        data.field(FIELD, "float32")

    def on_batch(self, batch, phase):
        shape = batch["ids"].shape
        if phase != "train":
            return {**batch, FIELD: np.ones(shape, np.float32)}  # above every drop fraction
        drawn = random_stream().random(shape if self.by == "row" else (1, shape[1]), np.float32)
        return {**batch, FIELD: np.broadcast_to(drawn, shape).copy()}

    def build_model(self, model):
        late = [layer for layer in self.layers.resolve(model.layers) if layer > 0]
        if not late:
            raise PlanError(
                "stochastic_depth skips no block: the first is never skipped",
                where=f"stochastic_depth.layers={self.layers} model.layers={model.layers}",
                fix="more layers, or leave stochastic_depth out",
            )
        for layer in late:
            share = self.drop * layer / (model.layers - 1)
            given = {"share": share, "column": layer, "rescale": self.rescale}
            model.residual(f"layers.{layer}.mid", "sublayer", Kept, **given)
            model.residual(f"layers.{layer}.out", "sublayer", Kept, **given)


class Kept(Module):
    """A block's coefficient (B, 1, 1): 0 where it is skipped; from depth_drawn float32 (B, T), uniform on [0, 1).

    Args:
        share: fraction of rows that skip the block.
        column: the column with the block's draw; rows with fewer columns wrap around.
        rescale: divide kept blocks by 1 - share.
    """

    def __init__(self, share: float, column: int, rescale: bool) -> None:
        super().__init__()
        self.share, self.column, self.rescale = share, column, rescale

    def forward(self, x: Any, depth_drawn: Any) -> Any:
        """Return (B, 1, 1) of x (B, T, C), depth_drawn (B, T)."""
        ops: Any = self.ops
        column = self.column % depth_drawn.shape[1]
        drawn = depth_drawn[:, column : column + 1, None]
        kept = ops.where(drawn >= 1.0, 1.0, 1.0 / (1.0 - self.share) if self.rescale else 1.0)
        return ops.astype_like(ops.where(drawn < self.share, 0.0, kept), x)
