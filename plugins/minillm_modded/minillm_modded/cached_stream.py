"""Cached stream: the last attentions all read the residual stream at one block (modded-nanogpt, record 77).

    attention_i reads norm_i(x_f)        i > f, x_f: the input of block f

MLPs and residual sums are unchanged. The last layers' queries can be computed from the stream at two thirds of
the depth; later updates serve the prediction and disturb attention. f is 8 of 11 in the record, where this
replaced hyper-connections.
"""

from __future__ import annotations

from minillm_core import PlanError, Plugin, option

__all__ = ["CachedStream"]


class CachedStream(Plugin, api=1):
    """One stream for the attention of all layers after a block: the stream that entered it."""

    first: int | None = option(
        None, help="block whose input all later attentions read; none: at two thirds of the depth"
    )

    def build_model(self, model):
        if model.layers < 2:
            raise PlanError(
                f"cached_stream needs an attention after another, but the model has {model.layers}",
                where=f"model.layers={model.layers}",
                fix="model.layers=2 or more, or leave cached_stream out",
            )
        first = self._first(model.layers)
        cached = model.tap(f"layers.{first}.in")
        for layer in range(first + 1, model.layers):
            model.input(f"layers.{layer}.attention", "carry", 0.0)
            model.input(f"layers.{layer}.attention", cached)

    def _first(self, layers: int) -> int:
        """Return the index of the block; never the last, after which there is none."""
        if self.first is None:
            return min(2 * layers // 3 + 1, layers - 2)
        if not -layers <= self.first < layers or self.first % layers == layers - 1:
            raise PlanError(
                f"cached_stream.first={self.first} is not before the last of {layers} blocks",
                where=f"cached_stream.first={self.first}",
                fix=f"a block from 0 to {layers - 2}",
            )
        return self.first % layers
