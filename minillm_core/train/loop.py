"""The only loop. It knows no framework: it queues steps, reads each one a step late, and tells.

    queue step n -> read step n - 1 -> tell -> (after some steps: read step n, save, evaluate)

Reading late keeps the device busy while the host looks at figures; it also bounds how far a run
that is limited by the clock can run ahead of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from minillm_core.backends.base import Batch, Trainer
from minillm_core.errors import DataError, Interrupted, MinillmError, NonFinite, Stopped
from minillm_core.train.budget import Budget, Cadence
from minillm_core.train.events import Ended, Evaluated, Event, Saved, Skipped, Stepped
from minillm_core.train.meter import Counts, Meter
from minillm_core.train.signals import StopRequest

__all__ = ["EMPTY_IN_A_ROW", "Loop", "Position", "StepBatch"]

EMPTY_IN_A_ROW = 100
"""Batches without a supervised token, one after the other, after which the data is at fault."""


class StepBatch(Protocol):
    """What the loader gives for one optimizer step."""

    @property
    def micro(self) -> tuple[Batch, ...]: ...  # noqa: D102
    @property
    def supervised(self) -> int: ...  # noqa: D102
    @property
    def real(self) -> int: ...  # noqa: D102
    @property
    def padded(self) -> int: ...  # noqa: D102
    @property
    def cursor(self) -> Mapping[str, Any]: ...  # noqa: D102


@dataclass
class Position:
    """How far a run has come: with the trainer's arrays, all that a checkpoint holds."""

    step: int = 0  # optimizer steps taken
    tokens: int = 0  # real ones so far
    elapsed: float = 0.0  # seconds of the budget
    skipped: int = 0  # batches without a supervised token
    saved: int | None = None  # step of the newest checkpoint
    cursor: Mapping[str, Any] = field(default_factory=dict)  # the data after ``step``


@dataclass(frozen=True)
class _Queued:
    """A step that the device may still be working on."""

    step: int
    handle: Any
    counts: Counts
    tokens: int
    lr: float
    queued: float


class Loop:
    """Trains until the budget is spent or somebody asks it to stop.

    Args:
        trainer: steps, reads and evaluates.
        batches: one :class:`StepBatch` a step, without end.
        values: progress in 0..1 -> the schedules' values; ``train.lr`` is among them.
        budget: how long.
        emit: is told every event, in order.
        cadence: when to evaluate and save on the way.
        evaluate: evaluates after a step; None: never.
        save: commits a checkpoint of a position; None: never.
        stop: asked before every step.
        meter: measures; it is given this loop's clock readings.
        position: where to start.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        trainer: Trainer,
        batches: Iterator[StepBatch],
        values: Callable[[float], Mapping[str, float]],
        budget: Budget,
        emit: Callable[[Event], None],
        *,
        cadence: Cadence | None = None,
        evaluate: Callable[[int], Evaluated] | None = None,
        save: Callable[[Position], Saved] | None = None,
        stop: StopRequest | None = None,
        meter: Meter | None = None,
        position: Position | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.trainer, self.batches, self.values = trainer, batches, values
        self.budget, self.emit, self.clock = budget, emit, clock
        self.cadence = cadence or Cadence()
        self.evaluate, self.save = evaluate, save
        self.stop = stop or StopRequest()
        self.meter = meter or Meter()
        self.position = position or Position()
        self._spent_before = self.position.elapsed
        self._clock_began: float | None = None  # set when the first step, which compiles, is over
        self._pending: _Queued | None = None
        self._evaluated: int | None = None

    def run(self) -> Position:
        """Train to the end, evaluate and save there.

        Raises:
            Stopped: a signal ended the run, and there is a checkpoint.
            Interrupted: a signal ended the run, and there is none.
            NonFinite: the loss is no number any more.
            DataError: nothing in the data is supervised.
        """
        began = self.clock()
        try:
            self._train()
        except BaseException as error:
            # the first error is the one to report, whatever observers make of the end
            told = self._stopped() if self._is_second_signal(error) else error
            unforeseen = 130 if isinstance(told, KeyboardInterrupt) else 1
            code = told.exit_code if isinstance(told, MinillmError) else unforeseen
            with suppress(Exception):
                self.emit(Ended(self.position.step, code, self.clock() - began))
            if told is error:
                raise
            raise told from None
        self.emit(Ended(self.position.step, 0, self.clock() - began))
        return self.position

    @property
    def progress(self) -> float:
        """Share of the budget that is spent, 0..1."""
        return self.budget.progress(self.position.step, self.elapsed)

    @property
    def elapsed(self) -> float:
        """Seconds of the budget that are spent: all but the first step of each process."""
        if self._clock_began is None:
            return self._spent_before
        return self._spent_before + self.clock() - self._clock_began

    def _train(self) -> None:
        self.meter.restart(self.clock())
        while not self.budget.spent(self.position.step, self.elapsed):
            if self.stop.requested:
                self._pause(save=True)
                raise self._stopped()
            self._step(self._next_batch())
            step = self.position.step
            save, evaluate = self.cadence.saves(step), self.cadence.evaluates(step)
            if save or evaluate:
                self._pause(save=save, evaluate=evaluate)
        self._pause(save=True, evaluate=True)

    def _next_batch(self) -> StepBatch:
        for _ in range(EMPTY_IN_A_ROW):
            batch = next(self.batches)
            if batch.supervised > 0:
                return batch
            self.position.skipped += 1
            self.emit(Skipped(self.position.step + 1, self.position.skipped))
        raise DataError(
            f"{EMPTY_IN_A_ROW} batches in a row hold nothing to learn from",
            where=f"the data, before step {self.position.step + 1}",
            fix="check the labels: each of these batches has -1 (unsupervised) everywhere",
        )

    def _step(self, batch: StepBatch) -> None:
        position = self.position
        step = position.step + 1
        values = self.values(self.budget.progress(step, self.elapsed))
        handle = self.trainer.step(batch.micro, values, batch.supervised)
        position.step, position.cursor = step, batch.cursor
        position.tokens += batch.real
        counts = Counts(batch.real, batch.padded, batch.supervised)
        before = self._pending
        self._pending = _Queued(
            step, handle, counts, position.tokens, values["train.lr"], self.clock()
        )
        if before is not None:
            self._read(before)

    def _read(self, queued: _Queued) -> None:
        asked = self.clock()
        result = self.trainer.read(queued.handle)
        read = self.clock()
        if self._clock_began is None:
            self._clock_began = read
        if not math.isfinite(result.loss):
            raise self._non_finite(queued.step, result.loss)
        figures = self.meter.add(queued.counts, queued=queued.queued, asked=asked, read=read)
        self.emit(
            Stepped(
                step=queued.step,
                loss=result.loss,
                lr=queued.lr,
                tokens=queued.tokens,
                tokens_per_second=figures.tokens_per_second,
                step_seconds=figures.seconds,
                mfu=figures.mfu,
                peak_bytes=self.trainer.peak_bytes(),
                grad_norm=result.grad_norm,
                terms=result.terms,
            )
        )

    def _pause(self, *, save: bool = False, evaluate: bool = False) -> None:
        """Read the step that is still open; then save first, since an evaluation may fail."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._read(pending)
        step = self.position.step
        self.position.elapsed = self.elapsed
        if save and self.save and step > 0 and self.position.saved != step:
            saved = self.save(self.position)
            self.position.saved = step
            self.emit(saved)
        if evaluate and self.evaluate and self._evaluated != step:
            evaluated = self.evaluate(step)
            self._evaluated = step
            self.emit(evaluated)
        self.meter.restart(self.clock())

    def _is_second_signal(self, error: BaseException) -> bool:
        return isinstance(error, KeyboardInterrupt) and self.stop.requested

    def _stopped(self) -> MinillmError:
        name = self.stop.signal.name if self.stop.signal else "a signal"
        if self.position.saved is None:
            return Interrupted(
                f"ended by {name} after step {self.position.step}; nothing was saved"
            )
        return Stopped(
            f"ended by {name} after step {self.position.step}; "
            f"the checkpoint of step {self.position.saved} is there"
        )

    def _non_finite(self, step: int, loss: float) -> NonFinite:
        last = self.position.saved
        kept = "no checkpoint was written" if last is None else f"the last good one: step {last}"
        return NonFinite(
            f"the loss of step {step} is {loss}",
            where=f"step {step}; {kept}",
            fix="lower train.lr, lengthen train.warmup, or set train.clip=1.0",
        )
