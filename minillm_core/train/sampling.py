"""Drawing the next id from logits: temperature, then the k likeliest, then those that make up p."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from minillm_core.errors import NonFinite, Refusal

__all__ = ["Sampling"]


@dataclass(frozen=True)
class Sampling:
    """How an id is drawn.

    Args:
        temperature: logits are divided by it; 0: the likeliest is taken, nothing is drawn.
        top_k: only so many of the likeliest may be drawn; None: all.
        top_p: of those, only the fewest likeliest that have this probability together.

    Raises:
        Refusal: one of them is out of range.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise _refused(
                "temperature", self.temperature, "0 for the likeliest, or more, like 0.8"
            )
        if self.top_k is not None and self.top_k < 1:
            raise _refused("top-k", self.top_k, "1 or more, like 50")
        if not 0 < self.top_p <= 1:
            raise _refused("top-p", self.top_p, "more than 0 and at most 1, like 0.95")

    def draw(self, logits: np.ndarray, random: np.random.Generator) -> int:
        """An index of ``logits``.

        Args:
            logits: float (n,), n > 0.
            random: one number is drawn from it, none at temperature 0.

        Raises:
            NonFinite: a logit is not a number.
        """
        if not np.isfinite(logits).all():
            raise NonFinite(
                "the model's logits are not finite, so nothing can be drawn from them",
                fix="train it again, with a lower train.lr",
            )
        if self.temperature == 0:
            return int(np.argmax(logits))
        weights = self.weights(logits)
        (kept,) = np.nonzero(weights)
        edges = np.cumsum(weights[kept])
        return int(kept[np.searchsorted(edges, random.random() * edges[-1], side="right")])

    def weights(self, logits: np.ndarray) -> np.ndarray:
        """float64 (n,): proportional to the probability of being drawn, 0 where that cannot be.

        Args:
            logits: float (n,), finite; the temperature is above 0.
        """
        exact = logits.astype(np.float64)
        with np.errstate(over="ignore"):  # -inf: at this temperature it is never drawn
            weights = np.exp((exact - exact.max()) / self.temperature)
        if self.top_k is None and self.top_p == 1:
            return weights
        order = np.argsort(-exact, kind="stable")[: self.top_k]  # the likeliest first
        if self.top_p < 1:  # at 1 the rounding of sums must not take the least likely away
            before = np.cumsum(weights[order]) - weights[order]
            order = order[before < self.top_p * weights[order].sum()]
        kept = np.zeros_like(weights)
        kept[order] = weights[order]
        return kept


def _refused(name: str, given: float, fix: str) -> Refusal:
    return Refusal(f"{name} cannot be {given}", where=f"--{name}", fix=fix)
