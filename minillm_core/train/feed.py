"""The batches of a run: a loader that can be put back to where a checkpoint was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from minillm_core.config.schema import TrainConfig
from minillm_core.data import Loader, StepBatch
from minillm_core.errors import DataError
from minillm_core.plugins.streams import Streams
from minillm_core.plugins.watch import running
from minillm_core.train.events import Event, Skipped
from minillm_core.train.hooks import plan_hook
from minillm_core.train.job import Job

_GRACE = 2.0
"""Seconds that the end of a run waits for an ``on_batch`` which does not return."""


class Place:
    """The place of each micro-batch in the run: counted in the loader's thread, ahead of training.

    Args:
        train: steps of the run, and micro-batches of a step.
        cursor: where the count goes on from.
    """

    def __init__(self, train: TrainConfig, cursor: Mapping[str, Any]) -> None:
        self._train, self._begun, self._micro = train, int(cursor.get("step", 0)), 0

    @property
    def step(self) -> int:
        """The steps whose batches are whole."""
        return self._begun + self._micro // self._train.accumulate

    def progress(self) -> float:
        """Count one micro-batch, and give its step (from 1) over all steps of the run, 0..1."""
        self._micro += 1
        step = self._begun - (-self._micro // self._train.accumulate)
        return min(1.0, step / self._train.steps) if self._train.steps else 1.0


class Feed(Iterator[StepBatch]):
    """One step's batch after the other, from a cursor on; a context manager.

    Args:
        job: data, plugins and sizes.
        cursor: of a checkpoint; None: from the start.
        cancelled: polled while the next batch is awaited.
    """

    def __init__(
        self,
        job: Job,
        cursor: Mapping[str, Any] | None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._job, self._cancelled = job, cancelled
        self._loader = self._open(cursor)

    def __next__(self) -> StepBatch:
        """Wait for the next step's batch.

        Raises:
            Cancelled: ``cancelled`` returned true.
        """
        return next(self._loader)

    def rewind(self, cursor: Mapping[str, Any], skip: int) -> dict[str, Any]:
        """Go back to ``cursor`` and pass over ``skip`` steps' batches; the cursor after them."""
        self._loader.close()
        self._loader = self._open(cursor)
        for _ in range(skip):
            cursor = next(self._loader).cursor
        return dict(cursor)

    def _open(self, cursor: Mapping[str, Any] | None) -> Loader:
        job, config, begun = self._job, self._job.config, cursor or {}
        streams, place = Streams(config.seed, begun.get("random")), Place(config.train, begun)
        on_batch = plan_hook(job.plan, seen=job.seen, streams=streams, progress=place.progress)
        return Loader(
            job.corpus.train,
            rows=config.train.rows,
            accumulate=config.train.accumulate,
            seq_len=config.train.seq_len,
            seed=config.data.seed,
            by=job.plan.arrangement,
            on_batch=on_batch,
            cursor=cursor,
            parts=[(one.weight, one.train) for one in job.corpus.parts],
            memory=(lambda: {"random": streams.data(), "step": place.step}) if on_batch else dict,
            cancelled=self._cancelled,
        )

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exception: object) -> None:
        self._loader.close(_GRACE)


EMPTY_IN_A_ROW = 100
"""Consecutive batches without a supervised token after which the run ends."""


def next_supervised_batch(
    batches: Iterator[StepBatch], step: int, skipped: int, emit: Callable[[Event], None]
) -> tuple[StepBatch, int]:
    """Take the next batch with a supervised token; gives it and the batches skipped so far.

    Args:
        batches: one a step, without end.
        step: the step that the batch is for.
        skipped: batches skipped before this call.
        emit: takes an event for each batch that is skipped.

    Raises:
        DataError: too many batches in a row have none.
    """
    for _ in range(EMPTY_IN_A_ROW):
        with running(f"step {step} waits for its batch", waits=True):
            batch = next(batches)
        if batch.supervised > 0:
            return batch, skipped
        skipped += 1
        emit(Skipped(step, skipped))
    raise DataError(
        f"{EMPTY_IN_A_ROW} batches in a row hold no supervised token: every label is -1",
        where=f"the data, before step {step}",
        fix="check the text and the on_batch of each plugin; then --resume goes on from the last "
        "checkpoint"
        if step > 1
        else "check the text and the on_batch of each plugin",
    )
