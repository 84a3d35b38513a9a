"""A trainer stepped as the loop steps it: each step read while the next one runs."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from minillm_core.data import StepBatch
from minillm_core.plugins.blame import blaming
from minillm_core.train.feed import Feed
from minillm_core.train.job import Job

__all__ = ["PROGRESS", "Stepped", "Timed", "uncollected"]

PROGRESS = 0.5
"""Of the run: the schedules' values are those of its middle."""


@dataclass(frozen=True)
class Timed:
    """Some steps together."""

    seconds: float
    waited: float  # seconds of those, for data
    real: int  # tokens that are not padding


class Stepped:
    """A job's trainer and its data; a context manager.

    Args:
        job: the trainer, with the data that it is fed as in training.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._values = job.plan.values(PROGRESS)
        self._feed = Feed(job, None)

    def batch(self) -> StepBatch:
        """The next step's."""
        with blaming(self.job.plugins, "in a step"):
            return next(self._feed)

    def run(self, steps: int) -> Timed:
        """Run some steps and wait for the last."""
        trainer = self.job.trainer
        trainer.synchronize()
        waited, real = 0.0, 0
        before: Any = None
        with blaming(self.job.plugins, "in a step"):
            began = time.perf_counter()
            for _ in range(steps):
                asked = time.perf_counter()
                batch = next(self._feed)
                waited += time.perf_counter() - asked
                real += batch.real
                handle = trainer.step(batch.micro, self._values, batch.supervised)
                if before is not None:
                    trainer.read(before)
                before = handle
            trainer.read(before)
            trainer.synchronize()
            return Timed(time.perf_counter() - began, waited, real)

    def __enter__(self) -> Stepped:
        return self

    def __exit__(self, *exception: object) -> None:
        self._feed.__exit__(*exception)


@contextmanager
def uncollected() -> Iterator[None]:
    """Python's collector walks every object of a plan and a model: not while the clock runs."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
