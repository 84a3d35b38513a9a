"""The batches of a run: a dataloader that can be set back to a checkpoint's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from minillm_core.config.schema import Shape
from minillm_core.data import Loader, StepBatch
from minillm_core.plan import Plan
from minillm_core.plugins.streams import Streams
from minillm_core.train.job import Job

_GRACE = 2.0
"""Seconds that the end of a run waits for an ``on_batch`` which does not return."""


class StepProgress:
    """The step whose batch is being made, in the dataloader's thread, ahead of training.

    Args:
        plan: the run's.
        step: training steps before it.
    """

    def __init__(self, plan: Plan, step: int) -> None:
        self._plan, self._step = plan, step + 1

    def shape_at(self, step: int) -> Shape:
        """Set the step whose batch begins, from 1, and return its shape."""
        self._step = step
        return self._plan.shape_at(step)

    def progress(self) -> float:
        """Return the progress of the run at the step, 0..1."""
        steps = self._plan.config.train.steps
        return min(1.0, self._step / steps) if steps else 1.0


class Feed(Iterator[StepBatch]):
    """An iterator of the batches of the steps, from a cursor on; a context manager.

    Args:
        job: data, plugins and sizes.
        cursor: a checkpoint's; None: from the start.
        cancelled: polled while the next batch is awaited.
        step: the checkpoint's.
    """

    def __init__(
        self,
        job: Job,
        cursor: Mapping[str, Any] | None,
        cancelled: Callable[[], bool] = lambda: False,
        *,
        step: int = 0,
    ) -> None:
        self._job, self._cancelled = job, cancelled
        self._loader = self._open(cursor, step)

    def __next__(self) -> StepBatch:
        """Wait for the next step's batch.

        Raises:
            Cancelled: ``cancelled`` returned true.
        """
        return next(self._loader)

    def rewind(self, cursor: Mapping[str, Any], skip: int, step: int) -> dict[str, Any]:
        """Set the dataloader to ``cursor``, after ``step``, and skip ``skip`` steps; return the new cursor.

        A signal does not end it: model and position would be of different steps.
        """
        self._loader.close()
        self._loader = self._open(cursor, step, ends=False)
        for _ in range(skip):
            cursor = next(self._loader).cursor
        self._loader.close()
        self._loader = self._open(cursor, step)
        return dict(cursor)

    def _open(self, cursor: Mapping[str, Any] | None, step: int, *, ends: bool = True) -> Loader:
        job, config, begun = self._job, self._job.config, cursor or {}
        streams, place = Streams(config.seed, begun.get("random")), StepProgress(job.plan, step)
        on_batch = job.hook(streams=streams, progress=place.progress)
        return Loader(
            job.corpus.train,
            **config.train.shapes[-1]._asdict(),
            shape_at=place.shape_at,
            step=step,
            seed=config.data.seed,
            by=job.plan.arrangement,
            on_batch=on_batch,
            cursor=cursor,
            parts=[(one.weight, one.train) for one in job.corpus.parts],
            memory=(lambda: {"random": streams.data()}) if on_batch else dict,
            ranks=job.ranks.data_parallel[0],
            rank=job.ranks.data_parallel[1],
            columns=lambda batch: job.ranks.columns(batch, job.plan),
            cancelled=self._cancelled if ends else lambda: False,
        )

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exception: object) -> None:
        self._loader.close(_GRACE)
