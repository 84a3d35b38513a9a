"""U-net skips: each block of the second half also reads the output of its mirror block in the first half.

    x <- x + w_i x_(L-1-i)        before block i, i >= L - L // 2; x_j: the stream after block j

The last block reads the first, the last but one the second, and so on (modded-nanogpt, record
11, by brendanh0gan; after U-Net, arXiv:1505.04597). The weights start at 1 and are trained at 5
times the learning rate of the records' Adam. Later records keep a single skip from a
quarter to the middle of the depth, ``skips = [[3, 6]]`` of 11, which starts at sigmoid(-1.5), half of
that in 2026-08 (``start = 0.18`` and ``0.09``), times a gate per token; here a weight is a single
number.

Since record 17 the layer after the turn has no attention: 7 of 12, 6 of 11.
"""

from __future__ import annotations

from typing import Literal

from minillm_core import Learned, PlanError, Plugin, option

__all__ = ["UNetSkip"]


class UNetSkip(Plugin, api=1):
    """Blocks of the second half add the stream of their mirror images, with learned weights."""

    skips: Literal["mirror"] | list[tuple[int, int]] = option(
        "mirror",
        help='"mirror", or pairs of blocks: [[3, 6]] adds the output of block 3 to the input of '
        "block 6",
    )
    start: float = option(1.0, search=(0.0, 0.5, 1.0), help="initial weight of every skip")
    attention: bool = option(
        True, help="keep the attention of the layer after the turn, L // 2 + 1"
    )
    lr_mul: float = option(5.0, gt=0, help="factor on the learning rate of the weights")

    def build_model(self, model):
        for source, target in self._pairs(model.layers):
            tap = model.tap(f"layers.{source}.out")
            model.residual(f"layers.{target}.in", tap, Learned(self.start, lr_mul=self.lr_mul))
        if not self.attention:
            model.attention(min(model.layers // 2 + 1, model.layers - 1), None)

    def _pairs(self, layers: int) -> list[tuple[int, int]]:
        """Return the pairs (source block, block whose input it is added to) that the options define."""
        if self.skips == "mirror":
            if layers < 2:
                raise PlanError(
                    f"unet_skip needs two blocks, but the model has {layers}",
                    where=f"model.layers={layers}",
                    fix="model.layers=2 or more, or leave unet_skip out",
                )
            return [(layers - 1 - i, i) for i in range(layers - layers // 2, layers)]
        for source, target in self.skips:
            if not 0 <= source < target < layers:
                raise PlanError(
                    f"unet_skip cannot lead from block {source} to block {target} of {layers}",
                    where=f"unet_skip.skips={[list(pair) for pair in self.skips]}",
                    fix=f"pairs with 0 <= from < to <= {layers - 1}",
                )
        return list(self.skips)
