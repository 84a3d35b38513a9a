"""The only loop. It knows no framework: it queues steps, reads each one a step late, and tells.

    queue step n -> read step n - 1 -> tell -> (after some steps: read step n, save, evaluate)

Reading late keeps the device busy while the host looks at figures; it also bounds how far a run
that is limited by the clock can run ahead of it. Checkpoints are written in the background: the
loop hands over a snapshot, and is told later what became of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minillm_core.backends.base import StepResult, Trainer
from minillm_core.data import Cancelled, StepBatch
from minillm_core.errors import DataError, NonFinite, PluginCodeError
from minillm_core.plugins.watch import running
from minillm_core.train import guard
from minillm_core.train.budget import Budget, Cadence
from minillm_core.train.ending import exit_code, not_finite, stopped, unsaved
from minillm_core.train.events import (
    Ended,
    Evaluated,
    Event,
    Guarded,
    Rewound,
    Saved,
    Skipped,
    Stepped,
    Unsaved,
)
from minillm_core.train.meter import Counts, Meter
from minillm_core.train.position import Position
from minillm_core.train.signals import StopRequest

if TYPE_CHECKING:
    from minillm_core.train.saving import Saves

__all__ = ["EMPTY_IN_A_ROW", "Loop"]

EMPTY_IN_A_ROW = 100
"""Batches without a supervised token, one after the other, after which the data is at fault."""

_SLOWER = 5
"""Times the slowest step so far that one may last before somebody is looked for."""


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
        evaluate: evaluates after a step, or gives None where it was cut short; None: never.
        saves: writes checkpoints; None: never.
        stop: asked before every micro-batch.
        spike: nats over the median of the last losses from which on the run goes back; 0: never.
        rewind: puts trainer and batches back to a checkpoint that is old enough for a spike at a
            step, of a run that went back so often before; gives its position and how many steps'
            batches it passed over, or None where no checkpoint is old enough.
        meter: measures; it is given this loop's clock readings.
        position: where to start.
        evaluated: the step that was evaluated last; the evaluation of that one is not made again.
        contain: around everything: makes errors of what they are by nature.
        at_work: whose code a step (``at step 7``) is in, if it takes long; None: the core's.
        say: prints a line.
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
        evaluate: Callable[[int], Evaluated | None] | None = None,
        saves: Saves | None = None,
        stop: StopRequest | None = None,
        spike: float = 0.0,
        rewind: Callable[[int, int], tuple[Position, int] | None] = lambda step, rewinds: None,
        meter: Meter | None = None,
        position: Position | None = None,
        evaluated: int | None = None,
        contain: Callable[[], AbstractContextManager[None]] = nullcontext,
        at_work: Callable[[str], str | None] = lambda when: None,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.trainer, self.batches, self.values = trainer, batches, values
        self.budget, self.emit, self.clock, self.say = budget, emit, clock, say
        self.cadence = cadence or Cadence()
        self.evaluate, self.saves = evaluate, saves
        self.stop = stop or StopRequest()
        self.spike, self.rewind = spike, rewind
        self.contain, self.at_work = contain, at_work
        self.meter = meter or Meter()
        self.position = position or Position()
        self._spent_before = self.position.elapsed
        self._clock_began: float | None = None  # set when the first step, which compiles, is over
        self._pending: _Queued | None = None
        self._evaluated = evaluated
        self._submitted = self.position.saved
        self._at = f"at step {self.position.step + 1}"  # what is being done, for errors
        self._slowest = 0.0

    def run(self, *, evaluate_first: bool = False) -> Position:
        """Train to the end, evaluate and save there.

        Args:
            evaluate_first: the evaluation that was due at the start is still to be made.

        Raises:
            Stopped: a signal ended the run, and there is a checkpoint.
            Interrupted: a signal ended the run, and there is none.
            NonFinite: too many steps were not finite, or all of them, or had a spike.
            DataError: nothing in the data is supervised.
        """
        began = self.clock()
        try:
            with self.contain():
                self._train(evaluate_first)
        except BaseException as error:
            if isinstance(error, PluginCodeError):
                error.happened(self._at)
            # the first error is the one to report, whatever observers make of the end
            told, at_once = error, self._is_second_signal(error)
            self._settle(wait=not at_once)
            if at_once:
                told = stopped(self.stop, self.position)
            with suppress(Exception):
                self.emit(Ended(self.position.step, exit_code(told), self.clock() - began))
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

    def _train(self, evaluate_first: bool) -> None:
        self.meter.restart(self.clock())
        self._pause(evaluate=evaluate_first)
        while not self._is_over():
            if self.stop.requested:
                self._end_early()
            try:
                if not self._step(*self._next_batch()):
                    continue  # a signal came between two micro-batches: the step is dropped
            except Cancelled:
                continue  # or while its batch was waited for
            step = self.position.step
            self._tell_saves()
            save, evaluate = self.cadence.saves(step), self.cadence.evaluates(step)
            if save or evaluate:
                self._pause(save=save, evaluate=evaluate)
        self._read_pending()
        if 0 < self.position.step == len(self.position.guarded):
            raise self._failed(
                f"none of the {self.position.step} steps was finite: nothing was learnt"
            )
        self._pause(save=True, evaluate=True)
        if self.stop.requested and self.evaluate and self._evaluated != self.position.step:
            self._end_early()  # all steps are done, and the last evaluation is not
        self._tell_saves(wait=True, last=True)

    def _is_over(self) -> bool:
        """Whether the budget is spent, and still is once the last step, maybe a spike, is read."""
        if not self.budget.spent(self.position.step, self.elapsed):
            return False
        self._read_pending()
        return self.budget.spent(self.position.step, self.elapsed)

    def _end_early(self) -> None:
        if self.saves and self.stop.signal:
            self.say(
                f"{self.stop.signal.name}: saving step {self.position.step}; "
                "a second signal ends the run at once"
            )
        self._pause(save=True)
        self._tell_saves(wait=True)
        raise stopped(self.stop, self.position)

    def _next_batch(self) -> tuple[StepBatch, int]:
        """The next one that can be learnt from, and how many could not be by then."""
        skipped = self.position.skipped
        self._at = f"at step {self.position.step + 1}"
        for _ in range(EMPTY_IN_A_ROW):
            with running(f"step {self.position.step + 1} waits for its batch", waits=True):
                batch = next(self.batches)
            if batch.supervised > 0:
                return batch, skipped
            skipped += 1
            self.emit(Skipped(self.position.step + 1, skipped))
        raise DataError(
            f"{EMPTY_IN_A_ROW} batches in a row hold nothing to learn from",
            where=f"the data, before step {self.position.step + 1}",
            fix="check the labels: each of these batches has -1 (unsupervised) everywhere",
        )

    def _step(self, batch: StepBatch, skipped: int) -> bool:
        """Queue a step and read the one before; False where a signal cut it short."""
        position = self.position
        step = position.step + 1
        values = self.values(self.budget.progress(step, self.elapsed))
        with self._watched():
            handle = self.trainer.step(
                batch.micro, values, batch.supervised, lambda: self.stop.requested
            )
        if handle is None:
            return False
        position.step, position.cursor, position.skipped = step, batch.cursor, skipped
        position.tokens += batch.real
        counts = Counts(batch.real, batch.padded, batch.supervised)
        before = self._pending
        self._pending = _Queued(
            step, handle, counts, position.tokens, values["train.lr"], self.clock()
        )
        if before is not None:
            self._read(before)
        return True

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Around what plugins' nodes and stages run in, on a machine that may be slow."""
        began = time.monotonic()
        with running(lambda: self.at_work(self._at), after=_SLOWER * self._slowest):
            yield
        self._slowest = max(self._slowest, time.monotonic() - began)

    def _read_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._read(pending)

    def _read(self, queued: _Queued) -> None:
        asked = self.clock()
        with self._watched():
            result = self.trainer.read(queued.handle)
        read = self.clock()
        if self._clock_began is None:
            self._clock_began = read
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
        if result.skipped or not math.isfinite(result.loss):
            self._guard(queued.step, result)
        elif self.spike:
            self._watch(queued.step, result.loss)

    def _guard(self, step: int, result: StepResult) -> None:
        """Count a step that was not finite; float16's own overflows, which halve a scale, apart."""
        if result.overflow:
            return
        guarded = (*guard.recent(self.position.guarded, step), step)
        self.position.guarded = guarded
        self.emit(Guarded(step, result.loss, result.grad_norm, len(guarded)))
        if len(guarded) >= guard.LIMIT:
            raise self._failed(
                f"{len(guarded)} of the last {guard.WINDOW} steps were not finite: the loss of "
                f"step {step} is {result.loss}, the norm of its gradients {result.grad_norm}"
            )

    def _watch(self, step: int, loss: float) -> None:
        """Go back where the loss has a spike."""
        position = self.position
        if not guard.is_spike(loss, position.losses, self.spike):
            position.losses = (*position.losses, loss)[-guard.MEMORY :]
            return
        if position.rewinds >= guard.REWINDS:
            raise self._failed(
                f"the loss had a spike at step {step}, after {position.rewinds} others: {loss:.4f}"
            )
        self._tell_saves(wait=True)
        found = self.rewind(step, position.rewinds)
        if found is None:
            self.say(
                f"warning: the loss of step {step} is a spike ({loss:.4f}), and no checkpoint is "
                "old enough to go back to: the run goes on"
            )
            position.losses = (*position.losses, loss)[-guard.MEMORY :]
            return
        earlier, passed_over = found
        earlier.rewinds = position.rewinds + 1
        self._pending, self._evaluated = None, earlier.step
        self.position, self._submitted = earlier, earlier.step
        self.emit(Rewound(step, loss, earlier.step, passed_over))
        self.meter.restart(self.clock())

    def _pause(self, *, save: bool = False, evaluate: bool = False) -> None:
        """Read the step that is still open; then save first, since an evaluation may fail."""
        self._read_pending()
        step = self.position.step
        self.position.elapsed = self.elapsed
        if save and self.saves and step > 0 and self._submitted != step:
            self._submitted = step
            self.saves.begin(self.position)
        if evaluate and self.evaluate and self._evaluated != step:
            self._at = f"in the evaluation after step {step}"
            with self._watched():
                evaluated = self.evaluate(step)
            if evaluated is not None:
                self._evaluated = step
                self.emit(evaluated)
        self.meter.restart(self.clock())

    def _tell_saves(self, *, wait: bool = False, last: bool = False) -> None:
        """Tell of the saves that ended; after the last one nobody comes to write what it lacks."""
        if self.saves is None:
            return
        for event in self.saves.wait() if wait else self.saves.finished():
            if isinstance(event, Saved):
                self.position.saved = event.step
            self.emit(event)
            if isinstance(event, Unsaved) and last and event.step == self.position.step:
                raise unsaved(event.reason, self.position)

    def _settle(self, *, wait: bool = True) -> None:
        """Tell of the saves where something else failed, which stays the error to report."""
        try:  # a save that is under way is worth waiting for, unless somebody is in a hurry
            self._tell_saves(wait=wait)
        except Exception as another:
            self.say(f"warning: {another}")

    def _is_second_signal(self, error: BaseException) -> bool:
        return isinstance(error, KeyboardInterrupt) and self.stop.requested

    def _failed(self, what: str) -> NonFinite:
        self._settle()
        return not_finite(what, self.position)
