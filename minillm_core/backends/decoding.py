"""A sequence being continued, on any framework."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minillm_core.backends.base import Batch, Decoding
from minillm_core.errors import DataError
from minillm_core.nn.decoding import Past
from minillm_core.nn.geometry import Geometry

__all__ = ["Continuation", "LastLogits"]

LastLogits = Callable[[Batch, Callable[..., object]], np.ndarray]
"""(batch, what makes the scope of it) -> float32 (V,): the logits after the last column."""


class Continuation(Decoding):
    """One sequence, fed from its start.

    Args:
        last_logits: the model.
        geometry: its sizes: ids and positions are kept within them, since MLX reads out of range.
    """

    def __init__(self, last_logits: LastLogits, geometry: Geometry) -> None:
        self.last_logits, self.geometry = last_logits, geometry
        self.past = Past()

    def feed(self, batch: Batch) -> np.ndarray:
        """See the base; a feed that raises leaves the sequence as it was.

        Raises:
            DataError: more columns than the model has positions for, or ids outside its vocabulary.
            ValueError: not one row of one column or more.
        """
        self._check(batch)
        logits = self.last_logits(batch, self.past.scope)
        self.past.commit()
        return logits

    def _check(self, batch: Batch) -> None:
        ids, sizes = batch["ids"], self.geometry
        if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] < 1:
            raise ValueError(f"ids have shape {ids.shape}, not (1, T): one row of T >= 1 columns")
        if (columns := self.past.columns + ids.shape[1]) > sizes.positions:
            raise DataError(
                f"a sequence of {columns} tokens, and the model is made for {sizes.positions}",
                where="decoding",
                fix="fewer tokens, or a model made with a larger max_positions",
            )
        if ids.min() < 0 or ids.max() >= sizes.vocab:
            wrong = int(ids[(ids < 0) | (ids >= sizes.vocab)][0])
            raise DataError(
                f"id {wrong} is outside the model's vocabulary of {sizes.vocab}",
                where="decoding",
                fix="the tokenizer that the model was trained with",
            )
