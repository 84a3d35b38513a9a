"""The only loop. It knows no framework: it queues steps, reads each one a step late, and tells.

    queue step n -> read step n - 1 -> tell -> (after some steps: read step n, save, evaluate)

Reading late keeps the device busy while the host looks at figures; it also bounds how far a run
that is limited by the clock can run ahead of it. Checkpoints are written in the background: the
loop hands over a snapshot, and is told later what became of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minillm_core.backends.base import Trainer
from minillm_core.data import Cancelled, StepBatch
from minillm_core.errors import PluginCodeError
from minillm_core.plugins.watch import running
from minillm_core.train.budget import Budget, Cadence
from minillm_core.train.ending import exit_code, stopped
from minillm_core.train.events import Ended, Evaluated, Event, Stepped
from minillm_core.train.guard import Guard, Rewinding
from minillm_core.train.keeper import Keeper
from minillm_core.train.learnable import next_learnable
from minillm_core.train.meter import Counts, Meter
from minillm_core.train.position import Position
from minillm_core.train.signals import StopRequest

if TYPE_CHECKING:
    from minillm_core.train.saving import Saves

__all__ = ["Loop"]

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
        rewind: puts trainer and batches back to a checkpoint.
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
        rewind: Rewinding = lambda step, rewinds: None,
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
        self.evaluate = evaluate
        self.stop = stop or StopRequest()
        self.contain, self.at_work = contain, at_work
        self.meter = meter or Meter()
        self.position = position or Position()
        self.keeper = Keeper(saves, self.position, emit, say)
        self.guard = Guard(self.keeper, emit, say, spike=spike, rewind=rewind)
        self._spent_before = self.position.elapsed
        self._clock_began: float | None = None  # set when the first step, which compiles, is over
        self._pending: _Queued | None = None
        self._evaluated = evaluated
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
            self.keeper.settle(self.position, wait=not at_once)
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
            self._at = f"at step {self.position.step + 1}"
            try:
                batch, skipped = next_learnable(
                    self.batches, self.position.step + 1, self.position.skipped, self.emit
                )
                if not self._step(batch, skipped):
                    continue  # a signal came between two micro-batches: the step is dropped
            except Cancelled:
                continue  # or while its batch was waited for
            step = self.position.step
            self.keeper.tell(self.position)
            save, evaluate = self.cadence.saves(step), self.cadence.evaluates(step)
            if save or evaluate:
                self._pause(save=save, evaluate=evaluate)
        self._read_pending()
        self.guard.end(self.position)
        self._pause(save=True, evaluate=True)
        if self.stop.requested and self.evaluate and self._evaluated != self.position.step:
            self._end_early()  # all steps are done, and the last evaluation is not
        self.keeper.tell(self.position, wait=True, last=True)

    def _is_over(self) -> bool:
        """Whether the budget is spent, and still is once the last step, maybe a spike, is read."""
        if not self.budget.spent(self.position.step, self.elapsed):
            return False
        self._read_pending()
        return self.budget.spent(self.position.step, self.elapsed)

    def _end_early(self) -> None:
        if self.keeper.saves and self.stop.signal:
            self.say(
                f"{self.stop.signal.name}: saving step {self.position.step}; "
                "a second signal ends the run at once"
            )
        self._pause(save=True)
        self.keeper.tell(self.position, wait=True)
        raise stopped(self.stop, self.position)

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
        gone_back = self.guard.take(self.position, queued.step, result)
        if gone_back is not None:
            self.position, told = gone_back
            self._pending, self._evaluated = None, self.position.step
            self.keeper.went_back(self.position)
            self.emit(told)
            self.meter.restart(self.clock())

    def _pause(self, *, save: bool = False, evaluate: bool = False) -> None:
        """Read the step that is still open; then save first, since an evaluation may fail."""
        self._read_pending()
        step = self.position.step
        self.position.elapsed = self.elapsed
        if save:
            self.keeper.save(self.position)
        if evaluate and self.evaluate and self._evaluated != step:
            self._at = f"in the evaluation after step {step}"
            with self._watched():
                evaluated = self.evaluate(step)
            if evaluated is not None:
                self._evaluated = step
                self.emit(evaluated)
        self.meter.restart(self.clock())

    def _is_second_signal(self, error: BaseException) -> bool:
        return isinstance(error, KeyboardInterrupt) and self.stop.requested
