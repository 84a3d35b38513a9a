"""The next batch that there is something to learn from."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from minillm_core.data import StepBatch
from minillm_core.errors import DataError
from minillm_core.plugins.watch import running
from minillm_core.train.events import Event, Skipped

__all__ = ["EMPTY_IN_A_ROW", "next_learnable"]

EMPTY_IN_A_ROW = 100
"""Batches without a supervised token, one after the other, after which the data is at fault."""


def next_learnable(
    batches: Iterator[StepBatch], step: int, skipped: int, emit: Callable[[Event], None]
) -> tuple[StepBatch, int]:
    """The next one that can be learnt from, and how many could not be by then.

    Args:
        batches: one a step, without end.
        step: which it is for.
        skipped: how many could not be learnt from before.
        emit: is told of each that is passed over.

    Raises:
        DataError: nothing in the data is supervised.
    """
    for _ in range(EMPTY_IN_A_ROW):
        with running(f"step {step} waits for its batch", waits=True):
            batch = next(batches)
        if batch.supervised > 0:
            return batch, skipped
        skipped += 1
        emit(Skipped(step, skipped))
    raise DataError(
        f"{EMPTY_IN_A_ROW} batches in a row hold nothing to learn from",
        where=f"the data, before step {step}",
        fix="check the labels: each of these batches has -1 (unsupervised) everywhere",
    )
