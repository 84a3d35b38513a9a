"""A run's checkpoints: written in the background, the best one kept, and rewound to at a spike."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from minillm_core.backends.base import StepResult, Trainer
from minillm_core.backends.ranks import ALONE, Ranks
from minillm_core.checkpoint import best, commit, layout
from minillm_core.checkpoint.manifest import verify
from minillm_core.checkpoint.read import Checkpoint
from minillm_core.checkpoint.writer import CheckpointWriter, Result
from minillm_core.config.schema import Config
from minillm_core.errors import MinillmError, NonFinite
from minillm_core.train.budget import REWINDABLE, Position
from minillm_core.train.errors import newest_checkpoint, unsaved
from minillm_core.train.events import Evaluated, Event, Guarded, Rewound, Saved, Unsaved
from minillm_core.train.feed import Feed
from minillm_core.train.resume import load


class Best:
    """The checkpoint with the lowest held-out loss among those on the disk.

    Its step is in ``OUT/checkpoints/best.json``, written after the checkpoint, which the writer never removes.

    Args:
        out: the run's folder.
        before: the evaluations that earlier processes of the run made.
    """

    def __init__(self, out: Path, before: Collection[Evaluated] = ()) -> None:
        self._out, self._before = out, before
        self._choose()

    def _choose(self) -> None:
        """Choose among the checkpoints on the disk, and mark the best."""
        self._marked = self._best = best.read(self._out)
        if self._marked is None:
            # a marker without its checkpoint would name a later one of its step
            best.clear(self._out)
        for one in self._before:
            if layout.folder(self._out, one.step).is_dir():
                self.update_if_better(one)
        self.mark()

    def protected(self) -> set[int]:
        """Return the steps whose checkpoints must stay, also while the best one is still being written."""
        self.mark()
        return {one.step for one in (self._marked, self._best) if one is not None}

    def update_if_better(self, evaluated: Evaluated) -> bool:
        """Set an evaluation's step as the best, if it is; step 0 has no checkpoint."""
        lowest = math.inf if self._best is None else self._best.loss
        if evaluated.step == 0 or not evaluated.val_loss < lowest:  # NaN is never the best
            return False
        self._best = best.Best(evaluated.step, evaluated.val_loss)
        return True

    def mark(self) -> None:
        """Write the marker of the best checkpoint, if it is on the disk and was not marked before."""
        found = self._best
        if found and found != self._marked and layout.folder(self._out, found.step).is_dir():
            best.mark(self._out, *found)
            self._marked = found

    def lost(self, step: int) -> None:
        """Return to the marked checkpoint if that of ``step``, which could not be written, was the best."""
        if self._best and self._best.step == step:
            self._best = self._marked

    def forget(self, *, after: int) -> None:
        """Choose another best if the run was rewound to a step before it."""
        if any(one and one.step > after for one in (self._marked, self._best)):
            best.clear(self._out)
            self._choose()


@dataclass(eq=False)
class CheckpointManager:
    """The manager of a training run's checkpoints; without a folder it writes none.

    Attributes:
        seconds: the duration of the last save, until it was on the disk.
    """

    emit: Callable[[Event], None] = lambda event: None  # takes an event for each save that ended
    say: Callable[[str], None] = lambda line: None
    check: Callable[[], None] = lambda: None  # raises if a save must not be written
    ranks: Ranks = ALONE  # the processes that train together
    trainer: Trainer | None = None  # its state is saved and restored
    writer: CheckpointWriter | None = None  # None: nothing is ever saved
    constants: Mapping[str, Any] = field(default_factory=dict)  # scalars of every checkpoint
    on_error: str = "stop"  # "continue": a checkpoint that cannot be written does not end the run
    best: Best | None = None  # None: only the newest checkpoints are kept
    begun: int | None = None  # the step of the last save
    back: int = 0  # fewest steps between a spike and the checkpoint to rewind to; 0: no spikes
    skip: int = 0  # steps whose batches are skipped, for each rewind to a checkpoint
    out: Path | None = None  # the run's folder
    feed: Feed | None = None  # the dataloader, set back at a spike
    seconds: float = 0.0
    # around each wait for a save under way
    waiting: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def open(
        self, out: Path, config: Config, constants: Mapping[str, Any], before: Collection[Evaluated]
    ) -> None:
        """Write checkpoints to a folder from here on, as the settings declare.

        Args:
            out: the run's folder, locked.
            config: the settings.
            constants: scalars that every checkpoint holds.
            before: the evaluations that earlier processes of the run made.
        """
        self.out, self.constants = out, constants
        self.back = config.train.rewind if config.train.spike else 0
        if config.checkpoint.every != 0:
            self.on_error = config.checkpoint.on_error
            self.best = Best(out, before) if config.checkpoint.best else None
            self.writer = CheckpointWriter(
                out, keep=config.checkpoint.keep, spare=lambda: self._spare(out)
            )
            # a kill may have prevented this after the last commit
            commit.retain(out, config.checkpoint.keep, spare=self._spare(out))

    def _spare(self, out: Path) -> set[int]:
        """Return the steps whose checkpoints stay: the best's, and those to rewind to."""
        chosen = self.best.protected() if self.best else best.protected(out)
        return chosen | self.to_rewind_to(step for step, _ in layout.folders(out))

    def to_rewind_to(self, steps: Iterable[int]) -> set[int]:
        """Choose checkpoints that stay, so that one is old enough: the first in each ``back`` steps, of three.

        Args:
            steps: of the checkpoints, the newest first.
        """
        first = {step // self.back: step for step in steps} if self.back else {}
        return {first[part] for part in sorted(first)[-REWINDABLE:]}

    def close(self, *, now: bool = False) -> None:
        """Wait for the save under way; ``now``: cancel it."""
        if self.writer:
            self.writer.close(now=now)

    def save(self, position: Position, *, due: bool = True) -> None:
        """Begin a save if it is due, unless this step has a checkpoint, or no step was finite yet.

        It takes a snapshot and queues it for writing, after waiting for the save before it.
        """
        if due:
            self.check()
        learnt = position.step > len(position.guarded)
        due = due and bool(self.writer) and learnt and self.begun != position.step
        if not (self.ranks.broadcast(due) if self.ranks.shard else due) or not self.trainer:
            return
        self.begun = position.step
        snapshot = self.trainer.snapshot()
        if not self.writer:
            return
        if snapshot.note:
            self.say(f"step {position.step}: {snapshot.note}")
        scalars = {**position.data(), **self.constants}
        with self.waiting:
            self.writer.submit(position.step, snapshot, scalars, snapshot.beside)

    def evaluated(self, position: Position, evaluated: Evaluated) -> None:
        """Save the step of an evaluation with the lowest loss so far, if the best is kept."""
        better = bool(self.best and self.best.update_if_better(evaluated))
        self.save(position, due=better)
        if self.best and better:
            self.best.mark()

    def report(self, position: Position, *, wait: bool = False, last: bool = False) -> None:
        """Emit an event for each save that ended, and record the newest.

        Args:
            position: the run's, where the step of the newest is set.
            wait: wait for the saves that are under way.
            last: no save follows, so that a failed one of this step is an error.

        Raises:
            Exception: a checkpoint could not be written, and checkpoint.on_error ends the run.
            MinillmError: the last one could not be written.
        """
        if self.writer is None:
            return
        with self.waiting:
            results = self.writer.wait() if wait else self.writer.finished()
        for result in results:
            event = self._event(result)
            if isinstance(event, Saved):
                position.saved, self.seconds = event.step, event.seconds
                if self.best:
                    self.best.mark()
            elif isinstance(event, Unsaved) and self.best:
                self.best.lost(event.step)
            self.emit(event)
            if isinstance(event, Unsaved) and last and event.step == position.step:
                raise unsaved(event.reason, position)

    def settle(self, position: Position, *, wait: bool = True) -> None:
        """Report saves after another failure, which stays the error to raise."""
        try:  # a save that is under way is worth waiting for, unless a second signal came
            self.report(position, wait=wait)
        except Exception as another:
            self.say(f"warning: {another}")

    def rewind(self, step: int, rewinds: int) -> tuple[Position, int] | None:
        """Rewind to a checkpoint before a spike, and skip the batches that led to it.

        Later checkpoints are removed: they lead to the spike again. Each further rewind to the same
        checkpoint skips as many batches more, since the same batches would lead there too.

        Args:
            step: of the spike.
            rewinds: number of rewinds before.

        Returns:
            The run's new position and the number of steps whose batches are skipped; None, with nothing
            changed, if no checkpoint that verifies is old enough.
        """
        if self.feed is None or self.trainer is None:
            return None
        there = layout.folders(self.out.absolute()) if self.out else ()  # of rank 0
        fits = ((n, str(at)) for n, at in there if n <= step - self.back and not verify(at))
        if (found := self.ranks.broadcast(next(fits, None))) is None:
            return None
        saved, path = found
        position = load(Checkpoint(Path(path), saved), self.trainer)
        if self.out:
            commit.discard(self.out, after=saved)
        skip = self.skip * (1 + rewinds - position.rewinds)
        position.cursor = self.feed.rewind(position.cursor, skip, saved)
        self.begun = saved
        if self.best:
            self.best.forget(after=saved)
        return position, skip

    def _event(self, result: Result) -> Event:
        if result.path is not None:
            if result.error is not None:  # the new one is saved; an old one costs only disk space
                self.say(f"warning: {result.error}")
            path = result.path.relative_to(self.out) if self.out else result.path
            return Saved(result.step, str(path), result.seconds)
        self.check()  # for a folder that is gone, the disk's own error is too vague
        error = result.error or MinillmError(f"the checkpoint of step {result.step} is lost")
        if self.on_error == "continue" and not isinstance(error, NonFinite):
            return Unsaved(result.step, str(error))
        raise error


WINDOW = 100
"""Steps in which those that were not finite are counted."""

LIMIT = 10
"""Number of non-finite steps among these that ends the run."""

MEMORY = 64
"""Losses whose median a spike is measured against."""

FEWEST = 16  # losses that a meaningful median needs

REWINDS = 10
"""Number of spikes after which the settings are at fault, and not the batches."""


def is_spike(loss: float, losses: Sequence[float], nats: float) -> bool:
    """Return whether a loss is more than ``nats`` above the median of the losses before it."""
    return len(losses) >= FEWEST and loss > median(losses) + nats


@dataclass(frozen=True)
class Guard:
    """A guard that counts non-finite steps and rewinds the run at a spike of the loss.

    The device skips an update by itself if the loss or a gradient is not finite; here such a step
    is counted, one step late.
    """

    checkpoints: CheckpointManager  # their events are emitted before a run ends or is rewound
    emit: Callable[[Event], None]  # takes every event, in order
    say: Callable[[str], None]
    spike: float  # nats above the median of the last losses at which the run is rewound; 0: never

    def take(
        self, position: Position, step: int, result: StepResult
    ) -> tuple[Position, Rewound] | None:
        """Check a step whose results were read.

        Args:
            position: the run's, perhaps one step ahead; its counts are updated.
            step: the number of the step.
            result: its loss and gradient norm.

        Returns:
            The earlier position and the event to emit; None: the run was not rewound.

        Raises:
            NonFinite: too many steps were not finite, or had a spike.
        """
        if result.skipped or not math.isfinite(result.loss):
            self._count(position, step, result)
            return None
        return self._spike(position, step, result.loss) if self.spike else None

    def end(self, position: Position) -> None:
        """Check, after the last step, that at least half of a short run's steps were finite.

        Raises:
            NonFinite: fewer were.
        """
        if 2 * len(position.guarded) > position.step:
            raise self._failed(
                f"{len(position.guarded)} of {position.step} steps were not finite", position
            )

    def _count(self, position: Position, step: int, result: StepResult) -> None:
        """Count a non-finite step; float16 overflows that only halve the loss scale are counted apart."""
        if result.overflow:
            return
        guarded = (*(one for one in position.guarded if one > step - WINDOW), step)
        position.guarded = guarded
        self.emit(Guarded(step, result.loss, result.grad_norm, len(guarded)))
        if len(guarded) >= LIMIT:
            raise self._failed(
                f"{len(guarded)} of the last {WINDOW} steps were not finite: the loss of "
                f"step {step} is {result.loss}, the norm of its gradients {result.grad_norm}",
                position,
            )

    def _spike(self, position: Position, step: int, loss: float) -> tuple[Position, Rewound] | None:
        """Rewind the run if the loss has a spike."""
        if is_spike(loss, position.losses, self.spike):
            if position.rewinds >= REWINDS:
                raise self._failed(
                    f"the loss had a spike at step {step}, after {position.rewinds} others: {loss:.4f}",
                    position,
                )
            self.checkpoints.report(position, wait=True)
            if (found := self.checkpoints.rewind(step, position.rewinds)) is not None:
                earlier, passed_over = found
                earlier.rewinds = position.rewinds + 1
                return earlier, Rewound(step, loss, earlier.step, passed_over)
            self.say(
                f"warning: the loss of step {step} is a spike ({loss:.4f}), but no checkpoint is "
                "old enough to go back to: the run continues"
            )
        position.losses = (*position.losses, loss)[-MEMORY:]
        return None

    def _failed(self, what: str, position: Position) -> NonFinite:
        self.checkpoints.settle(position)
        return NonFinite(what, where=newest_checkpoint(position))
