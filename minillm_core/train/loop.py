"""The training loop. It is framework-independent: it queues steps, reads each one a step late, and emits events.

    queue step n -> read step n - 1 -> emit -> (after some steps: read step n, save, evaluate)

Reading late keeps the device busy while the host handles results; it also bounds how far a run that
is limited by the clock can run ahead of it. Checkpoints are written in the background: the loop hands
over a snapshot, and emits an event when it is on the disk.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from minillm_core.backends.base import Trainer
from minillm_core.backends.ranks import ALONE, Ranks
from minillm_core.data import Cancelled, StepBatch
from minillm_core.errors import DataError, PluginCodeError
from minillm_core.plugins.watch import running
from minillm_core.train.budget import EVALUATIONS, Budget, Cadence, LastSave, Position
from minillm_core.train.checkpoints import CheckpointManager, Guard
from minillm_core.train.errors import exit_code, stopped
from minillm_core.train.events import Ended, Evaluated, Event, Skipped, Stepped, Throughput
from minillm_core.train.progress import Display, LineDisplay
from minillm_core.train.signals import StopRequest

_SLOWER = 5
"""Multiple of the slowest step so far after which a step's slow plugin code is looked for."""


@dataclass(frozen=True)
class _Queued:
    """A step that the device may still be working on."""

    step: int
    handle: Any
    counts: Counts
    tokens: int
    lr: float
    queued: float


@dataclass(eq=False)
class Loop:
    """A training loop: until the budget is spent or a signal stops it."""

    trainer: Trainer  # steps, reads and evaluates
    batches: Iterator[StepBatch]  # one a step, endless
    values: Callable[[float], Mapping[str, float]]  # progress in 0..1 -> schedules' values
    budget: Budget
    emit: Callable[[Event], None]  # takes every event, in order
    _: KW_ONLY
    cadence: Cadence = field(default_factory=Cadence)  # when to evaluate and save on the way
    # evaluates after a step, returns None if cancelled; None: never
    evaluate: Callable[[int], Evaluated | None] | None = None
    # yields samples as events, after an evaluation and at the end (True)
    samples: Callable[[int, bool], Iterable[Event]] = lambda step, last: ()
    checkpoints: CheckpointManager = field(default_factory=CheckpointManager)
    spike: float = 0.0  # nats above the median of the last losses; 0: the run is never rewound
    stop: StopRequest = field(default_factory=StopRequest)  # polled before every micro-batch
    meter: Meter = field(default_factory=lambda: Meter())  # takes this loop's clock readings
    position: Position = field(default_factory=Position)  # where to start
    evaluated: int | None = None  # the step of the last evaluation, which is not repeated
    stopped: str = ""  # why a plugin ends the run at this step; empty: it does not
    # wraps the whole loop: turns exceptions into attributed errors
    contain: Callable[[], AbstractContextManager[None]] = nullcontext
    # owner of the code that a slow step (``at step 7``) runs; None: the core
    at_work: Callable[[str], str | None] = lambda when: None
    shown: Display = field(default_factory=lambda: LineDisplay(lambda line: None))  # has the clock
    ranks: Ranks = ALONE  # the processes that train together: all do the same at the same step

    def __post_init__(self) -> None:
        self.clock, self.say = self.shown.clock, self.shown.say
        self.guard = Guard(self.checkpoints, self.emit, self.say, self.spike)
        self._spent_before = self.position.elapsed
        self._clock_began: float | None = None  # set after the first step, which compiles
        self._shared = (self._spent_before, False)  # seconds of the budget, whether a signal came
        self._pending: _Queued | None = None
        self._part = self.budget.part(EVALUATIONS, self.position.step, self.position.elapsed)
        self._at = f"at step {self.position.step + 1}"  # the work under way, for errors
        self._slowest = 0.0
        self._saved_share = self.progress
        self._saved_at = self._looked = self.clock()  # time of the last save, and of the last check

    def steps(self, *, evaluate_first: bool = False) -> Generator[None]:
        """Train to the end, evaluate and save there; yields between two optimizer steps.

        A caller that closes the iterator leaves the model after the last step that was queued.

        Args:
            evaluate_first: the evaluation that is due at the first step is still missing.

        Raises:
            Stopped: a signal ended the run, and there is a checkpoint.
            Interrupted: a signal ended the run, and there is none.
            NonFinite: too many steps were not finite, or all of them, or had a spike.
            DataError: nothing in the data is supervised.
        """
        began = self.clock()
        try:
            with self.contain():
                yield from self._train(evaluate_first)
        except GeneratorExit:
            self._read_pending()
            self.checkpoints.settle(self.position)
            raise
        except BaseException as error:
            if isinstance(error, PluginCodeError):
                error.happened(self._at)
            if isinstance(error, DataError) and self.position.step:
                error.exit_code = 1  # 2 means that nothing was started
            # the first error is the one to report, whatever errors the end raises
            ending, at_once = error, isinstance(error, KeyboardInterrupt) and self.stop.requested
            self.checkpoints.settle(self.position, wait=not at_once)
            if at_once:
                ending = stopped(self.stop, self.position)
            with suppress(Exception):
                self.emit(Ended(self.position.step, exit_code(ending), self.clock() - began))
            if ending is error:
                raise
            raise ending from None
        self.emit(Ended(self.position.step, 0, self.clock() - began))

    def save(self) -> None:
        """Save the model between two steps, and wait until it is on the disk.

        Raises:
            MinillmError: it could not be written.
        """
        self._pause(save=True)
        self.checkpoints.report(self.position, wait=True)

    def spent(self, step: int) -> bool:
        """Return whether the run ends after ``step`` steps: its budget is spent, or a plugin ends it."""
        return bool(self.stopped) or self.budget.spent(step, self.elapsed)

    @property
    def progress(self) -> float:
        """Share of the budget that is spent, 0..1."""
        return self.budget.progress(self.position.step, self.elapsed)

    @property
    def elapsed(self) -> float:
        """Seconds of the budget when the last step was queued: all but the first step of each process.

        A pause after the step does not move it, so that a checkpoint and the end agree on it.
        """
        return self._shared[0]

    @property
    def ending(self) -> bool:
        """Whether a signal asks the run to end; with several ranks, as they agreed after the step."""
        return self._shared[1] if self.ranks.size > 1 else self.stop.requested

    def _agree(self) -> bool:
        """Read the clock and the signals after a step, alike on all ranks; return whether to save."""
        began = self._clock_began
        elapsed = self._spent_before + (0.0 if began is None else self._now() - began)
        save = self._is_to_be_saved(self.position.step, elapsed)
        found = self.ranks.all_gather([elapsed, self.stop.requested, save])
        self._shared = found[0][0], any(one[1] for one in found)
        return bool(found[0][2])

    def _now(self) -> float:
        """Read the training clock, which stands still while a step's graph is compiled on the way."""
        return self.clock() - self.trainer.compile_seconds

    def _train(self, evaluate_first: bool) -> Iterator[None]:
        self.meter.restart(self._now())
        self._pause(evaluate=evaluate_first)
        self._agree()  # a signal on the way here: the first step may compile for minutes
        yield
        while not self._is_over():
            if self.ending:
                self._end_early()
            self._at = f"at step {self.position.step + 1}"
            try:
                batch, skipped = next_supervised_batch(
                    self.batches, self.position.step + 1, self.position.skipped, self.emit
                )
                if not self._step(batch, skipped):
                    continue  # a signal arrived between two micro-batches: the step is dropped
            except Cancelled:
                continue  # a signal arrived while its batch was waited for
            step = self.position.step
            self.checkpoints.report(self.position)
            save, evaluate = self._agree(), self._evaluates(step)
            if save or evaluate:
                self._pause(save=save, evaluate=evaluate)
            yield
        self._read_pending()
        self.guard.end(self.position)
        self._pause(save=True, evaluate=True)
        if self.ending and self.evaluate and self.evaluated != self.position.step:
            self._end_early()  # all steps are done, but the last evaluation is missing
        with self.shown.phase("saving the last checkpoint"):
            self.checkpoints.report(self.position, wait=True, last=True)
        self._sample(last=True)

    def _evaluates(self, step: int) -> bool:
        """Return whether an evaluation on the way follows ``step``; the last one is made elsewhere."""
        before, self._part = self._part, self.budget.part(EVALUATIONS, step, self.elapsed)
        return self.cadence.evaluates(step, sixth=self._part > before) and not self.spent(step)

    def _sample(self, *, last: bool = False) -> None:
        for event in self.samples(self.position.step, last):
            self.emit(event)

    def _is_to_be_saved(self, step: int, elapsed: float) -> bool:
        now = self.clock()
        took, self._looked = now - self._looked, now
        last = LastSave(self._saved_share, now - self._saved_at, took + self.checkpoints.seconds)
        return self.cadence.saves(step, self.budget.progress(step, elapsed), last)

    def _is_over(self) -> bool:
        """Return whether the budget is spent after the last step is read too, which may be a spike."""
        if not self.spent(self.position.step):
            return False
        self._read_pending()
        return self.spent(self.position.step)

    def _end_early(self) -> None:
        if self.checkpoints.writer and self.stop.signal:
            again = "press Ctrl-C again to stop"
            if self.stop.signal is not signal.SIGINT:
                again = f"{self.stop.signal.name}, and a second signal stops"
            self.say(f"saving step {self.position.step:,}; {again} without saving")
        with self.shown.phase(f"saving step {self.position.step:,}"):
            self.save()
        self.position.saved = self.ranks.broadcast(self.position.saved)  # rank 0 alone writes
        raise stopped(self.stop, self.position)

    def _step(self, batch: StepBatch, skipped: int) -> bool:
        """Queue a step and read the one before; False if a signal cut it short."""
        position = self.position
        step = position.step + 1
        values = self.values(self.budget.progress(step, self.elapsed))
        with self._watched():
            handle = self.trainer.step(batch.micro, values, batch.supervised, lambda: self.ending)
        if handle is None:
            return False
        position.step, position.cursor, position.skipped = step, batch.cursor, skipped
        position.tokens += batch.real
        counts = Counts(batch.real, batch.padded, batch.supervised)
        before = self._pending
        self._pending = _Queued(
            step, handle, counts, position.tokens, values["train.lr"], self._now()
        )
        if before is not None:
            self._read(before)
        return True

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Watch plugins' nodes and stages inside the block, on a machine that may be slow."""
        began = time.monotonic()
        with running(lambda: self.at_work(self._at), after=_SLOWER * self._slowest):
            yield
        self._slowest = max(self._slowest, time.monotonic() - began)

    def _read_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._read(pending)

    def _read(self, queued: _Queued) -> None:
        asked = self._now()
        with self._watched():
            result = self.trainer.read(queued.handle)
        read = self._now()
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
        if (gone_back := self.guard.take(self.position, queued.step, result)) is not None:
            self.position, rewound = gone_back
            self._pending, self.evaluated = None, self.position.step
            self._saved_share, self._saved_at = self.progress, self.clock()
            self.emit(rewound)
            self.meter.restart(self._now())

    def _pause(self, *, save: bool = False, evaluate: bool = False) -> None:
        """Read the pending step; then save before evaluating, since an evaluation may fail."""
        self._read_pending()
        step = self.position.step
        self.position.elapsed = self.elapsed
        if save:
            self.checkpoints.save(self.position)
            self._saved_share, self._saved_at = self.progress, self.clock()
        ends = self.ranks.size > 1 and self.ending  # a rank without a batch would not cancel it
        if evaluate and not ends and self.evaluate and self.evaluated != step:
            self._at = f"in the evaluation after step {step}"
            with self._watched():
                evaluated = self.evaluate(step)
            if evaluated is not None:
                self.evaluated, self.stopped = step, evaluated.stop
                self.emit(evaluated)
                self.checkpoints.evaluated(self.position, evaluated)
                if not self.spent(step):
                    self._sample()
        self._looked = self.clock()
        self.meter.restart(self._now())


EMPTY_IN_A_ROW = 100
"""Consecutive batches without a supervised token after which the run ends."""


def next_supervised_batch(
    batches: Iterator[StepBatch], step: int, skipped: int, emit: Callable[[Event], None]
) -> tuple[StepBatch, int]:
    """Return the next batch with a supervised token, and the number of batches skipped so far.

    Args:
        batches: one a step, endless.
        step: the step that the batch is for.
        skipped: batches skipped before this call.
        emit: takes an event for each skipped batch.

    Raises:
        DataError: too many batches in a row have no supervised token.
    """
    for _ in range(EMPTY_IN_A_ROW):
        with running(f"step {step} waits for its batch", waits=True):
            batch = next(batches)
        if batch.supervised > 0:
            return batch, skipped
        skipped += 1
        emit(Skipped(step, skipped))
    what = f"{EMPTY_IN_A_ROW} batches in a row hold no supervised token: every label is -1"
    fix = "check the text and the on_batch of each plugin"
    if step > 1:
        fix += "; then --resume continues from the last checkpoint"
    raise DataError(what, where=f"the data, before step {step}", fix=fix)


WAITED = 0.1  # share of the time since queueing above which a read counts as blocking
SHORTEST = 1e-9  # seconds; a clock may stand still between two steps


class Counts(NamedTuple):
    """Tokens of one step."""

    real: int  # not padding
    padded: int  # all positions
    supervised: int  # labels >= 0


@dataclass(frozen=True)
class Figures:
    """A step's speed."""

    seconds: float  # of this step alone
    tokens_per_second: Throughput  # over the last steps
    mfu: float | None  # over the last steps; None if the peak is unknown


class Meter:
    """A meter of a run's throughput over its last steps, and over all of them.

    The first step compiles and allocates: its time counts for itself alone, and in no later figure.

    Args:
        flops_per_token: forward and backward, from the plan.
        flops_per_label: the part of these that a token costs only if it is supervised.
        peak_flops: the device's dense FLOP/s in the compute dtype, if known.
        window: number of steps that a figure covers.
    """

    def __init__(
        self,
        *,
        flops_per_token: float = 0.0,
        flops_per_label: float = 0.0,
        peak_flops: float | None = None,
        window: int = 20,
    ) -> None:
        self._flops, self._peak = (flops_per_token - flops_per_label, flops_per_label), peak_flops
        self._recent: deque[np.ndarray] = deque(maxlen=window)  # seconds and counts of steps
        self._ended = 0.0
        self._warm = False
        self._total = np.zeros(1 + len(Counts._fields))

    def restart(self, now: float) -> None:
        """Restart the clock here: time before it (an evaluation, a save) belongs to no step."""
        self._ended = now

    def add(self, counts: Counts, *, queued: float, asked: float, read: float) -> Figures:
        """Add a step, and return its figures.

        Args:
            counts: its tokens.
            queued: when the call that queued it returned.
            asked: when the read of its figures began.
            read: when it ended.
        """
        waited = read - asked > WAITED * (read - queued)
        ended = max(read if waited else queued, self._ended + SHORTEST)
        seconds, self._ended = ended - self._ended, ended
        step = np.array([seconds, *counts])
        if self._warm:
            self._recent.append(step)
            self._total += step
        rate = _rate(sum(self._recent, np.zeros_like(step)) if self._warm else step)
        self._warm = True
        token, label = self._flops
        mfu = (rate.real * token + rate.supervised * label) / self._peak if self._peak else None
        return Figures(seconds, rate, mfu)

    def overall(self) -> Throughput | None:
        """Return the throughput of all steps but the first; None when there was no other."""
        return _rate(self._total) if self._total[0] else None


def _rate(total: np.ndarray) -> Throughput:
    """Divide the token counts of some steps by their seconds, the first entry."""
    return Throughput(*(total[1:] / total[0]).tolist())
