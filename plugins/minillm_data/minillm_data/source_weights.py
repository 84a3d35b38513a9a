"""Loss weights for the sources of a mixture."""

from __future__ import annotations

from typing import Any

import numpy as np

from minillm_core import ConfigError, Plugin, option


class SourceWeights(Plugin, api=1):
    """Weighs the loss of each source of a mixture: domain reweighting by the loss, not by sampling.

    The weights are normalised to a mean of 1 over the sources. Without any, all are 1, and a program
    that steps a trainer itself may set others in the batch, as DoReMi does (arXiv:2305.10429).
    """

    weights: tuple[float, ...] = option(
        (), help="loss weights, one per --data PATH:WEIGHT, in the same order"
    )

    def build_data(self, data: Any) -> None:
        if self.weights and len(self.weights) != data.sources:
            raise ConfigError(
                f"weights: {len(self.weights)}, sources of --data: {data.sources}",
                where="source_weights.weights",
                fix="a weight for each --data PATH:WEIGHT, in their order",
            )
        least = min(self.weights, default=0.0)
        if least < 0 or (self.weights and not any(self.weights)):
            raise ConfigError(
                f"the weight {least:g} is below 0" if least < 0 else "all weights are 0",
                where="source_weights.weights",
                fix="0 or more for each source, and above 0 for at least one, such as [1.5,0.5]",
            )

    def on_batch(self, batch: Any, phase: str) -> Any:
        if phase != "train":
            return batch
        weights = batch.get("weights", np.ones(batch["ids"].shape, np.float32))
        if self.weights:
            given = np.array(self.weights) / max(self.weights)  # whose sum is finite
            weights = weights * (given / given.mean()).astype(np.float32)[batch["source"]]
        return {**batch, "weights": weights}
