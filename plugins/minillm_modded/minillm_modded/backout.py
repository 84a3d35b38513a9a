"""Backout: a fraction of the residual stream at two thirds of the depth is subtracted at the end.

    x <- x - lambda x_k            before the last norm; lambda = 1/2 at the start, learned

Information that early layers write for later layers to read disturbs the prediction; the end of
the model can remove it (modded-nanogpt, record 40, by classiclarryd).
"""

from __future__ import annotations

from minillm_core import Learned, PlanError, Plugin, option

__all__ = ["Backout"]


class Backout(Plugin, api=1):
    """A learned share of an earlier layer's stream is subtracted before the last norm."""

    layer: int | None = option(
        None, help="layer whose output is subtracted; none: at two thirds of the depth"
    )
    start: float = option(0.5, search=(0.25, 0.5), help="initial fraction that is subtracted")
    lr_mul: float = option(5.0, gt=0, help="factor on the learning rate of the fraction")

    def build_model(self, model):
        if model.layers < 2:
            raise PlanError(
                f"backout needs a layer before the last, but the model has {model.layers}",
                where=f"model.layers={model.layers}",
                fix="model.layers=2 or more, or leave backout out",
            )
        tap = model.tap(f"layers.{self._place(model.layers)}.out")
        model.residual("final", tap, Learned(-self.start, lr_mul=self.lr_mul))

    def _place(self, layers: int) -> int:
        """Return the index of the layer; never the last, whose output the last norm would rescale."""
        if self.layer is None:
            return min(2 * layers // 3, layers - 2)
        if not -layers <= self.layer < layers or self.layer % layers == layers - 1:
            raise PlanError(
                f"backout.layer={self.layer} is not before the last of {layers} layers",
                where=f"backout.layer={self.layer}",
                fix=f"a layer from 0 to {layers - 2}",
            )
        return self.layer % layers
