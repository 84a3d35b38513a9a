"""A sequence being continued, on any framework."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minillm_core.backends.base import Batch, Decoding
from minillm_core.errors import DataError
from minillm_core.nn.decoding import Past
from minillm_core.nn.geometry import Geometry

__all__ = ["Continuation", "LastLogits", "check_row"]

LastLogits = Callable[[Batch, Callable[..., object]], np.ndarray]
"""(batch, what makes the scope of it) -> float32 (V,): the logits after the last column."""


class Continuation(Decoding):
    """One sequence, fed from its start.

    Args:
        last_logits: the model.
        geometry: its sizes, within which ids and positions are kept.
    """

    def __init__(self, last_logits: LastLogits, geometry: Geometry) -> None:
        self.last_logits, self.geometry = last_logits, geometry
        self.past = Past()

    def feed(self, batch: Batch) -> np.ndarray:
        """See the base, and :func:`check_row`; a feed that raises leaves the sequence as it was."""
        check_row(batch, self.geometry, earlier=self.past.columns)
        logits = self.last_logits(batch, self.past.scope)
        self.past.commit()
        return logits


def check_row(batch: Batch, sizes: Geometry, *, earlier: int = 0) -> None:
    """One row that the model's tables hold: MLX reads out of range without a word.

    Args:
        batch: the columns to come.
        sizes: the model's.
        earlier: columns before them.

    Raises:
        DataError: more columns than the model has positions for, or ids outside its vocabulary.
        ValueError: not one row of one column or more.
    """
    ids = batch["ids"]
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] < 1:
        raise ValueError(f"ids have shape {ids.shape}, not (1, T): one row of T >= 1 columns")
    if (columns := earlier + ids.shape[1]) > sizes.positions:
        raise DataError(
            f"a sequence of {columns} tokens, and the model was made for {sizes.positions}",
            where="decoding",
            fix="fewer tokens, or a model made with a larger max_positions",
        )
    wrong = ids[(ids < 0) | (ids >= sizes.vocab)]
    if wrong.size:
        raise DataError(
            f"id {wrong[0]} is outside the model's vocabulary of {sizes.vocab}",
            where="decoding",
            fix="the tokenizer that the model was trained with",
        )
