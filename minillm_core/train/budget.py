"""The budget of a run: when it ends, its progress, and when it evaluates and saves on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from minillm_core.config.schema import TrainConfig
from minillm_core.errors import ConfigError

EVALUATIONS = 6
"""Evaluations of a run, evenly spaced, if eval.every is not set."""


@dataclass(frozen=True)
class Budget:
    """A budget of steps, or of minutes."""

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            what, where = "exactly one setting says how long to train", "train.steps, train.minutes"
            raise ConfigError(what, where=where, fix="train.steps=1000, or train.minutes=10")

    @classmethod
    def of(cls, train: TrainConfig) -> Self:
        """Return the budget that the settings declare.

        Raises:
            ConfigError: they declare none.
        """
        return cls(train.steps, train.minutes)

    def progress(self, step: int, elapsed: float) -> float:
        """Return the schedules' progress, above 0, up to 1, at a step (from 1) that begins after ``elapsed`` seconds."""
        return min(1.0, self._share(step, elapsed))

    def spent(self, step: int, elapsed: float) -> bool:
        """Return whether the budget is spent after ``step`` steps and ``elapsed`` seconds."""
        return self._share(step, elapsed) >= 1.0

    def part(self, parts: int, step: int, elapsed: float) -> int:
        """Return how many of ``parts`` equal parts of the run are over after ``step`` steps, 0..parts."""
        return min(parts, int(parts * self._share(step, elapsed) + 1e-9))

    def _share(self, step: int, elapsed: float) -> float:
        if self.steps is not None:
            return step / self.steps
        assert self.minutes is not None
        # the clock begins once the first step has been read, and rates divide by the progress
        return max(elapsed, 1e-6) / (60.0 * self.minutes)


SAVES = 20
"""Checkpoints of a whole run if checkpoint.every is not set.

Training waits for the save before the last one, so a kill costs two of these parts at most: a tenth.
"""

REWINDABLE = 3
"""Most checkpoints that ``train.spike`` keeps besides those of checkpoint.keep, so that one is old enough."""

SETTLE = 1.0
"""Fewest seconds between two checkpoints, unless a tenth of the run lies between them."""


@dataclass(frozen=True)
class LastSave:
    """The last save, as far as the time of the next one depends on it."""

    share: float = 0.0  # share of the run that was done then
    since: float = 0.0  # seconds ago
    ahead: float = 0.0  # expected seconds of the next step and a save, from the last ones


@dataclass(frozen=True)
class Cadence:
    """The schedule of evaluations and checkpoints during a run; 0: only at its end.

    Args:
        evaluate: steps between evaluations; None: a sixth of the run.
        save: steps between checkpoints; None: a twentieth of the run.
        minutes: most minutes between two checkpoints, beside ``save``; 0: no limit by the clock.
        settle: fewest seconds between two checkpoints that a share of the run triggers.
    """

    evaluate: int | None = 0
    save: int | None = 0
    minutes: float = 0.0
    settle: float = SETTLE

    def evaluates(self, step: int, *, sixth: bool = False) -> bool:
        """Return whether the run evaluates after ``step``; ``sixth``: a sixth of the run ends there."""
        if self.evaluate is None:
            return sixth
        return self.evaluate > 0 and step % self.evaluate == 0

    def saves(self, step: int, share: float, last: LastSave) -> bool:
        """Return whether the run saves after ``step``, with ``share`` of it done; its end saves anyway."""
        if self.minutes and last.since + last.ahead >= 60.0 * self.minutes:
            return True
        if self.save is not None:
            return self.save > 0 and step % self.save == 0
        parts, before = (int(SAVES * done + 1e-9) for done in (share, last.share))
        return share < 1.0 and parts > before and (last.since >= self.settle or parts - before > 1)


@dataclass
class Position:
    """The state of a run between two optimizer steps."""

    step: int = 0  # optimizer steps taken
    tokens: int = 0  # real tokens so far, without padding
    elapsed: float = 0.0  # seconds of the budget
    skipped: int = 0  # batches without a supervised token
    cursor: Mapping[str, Any] = field(default_factory=dict)  # the data after ``step``
    guarded: tuple[int, ...] = ()  # steps among the last hundred that were not finite
    losses: tuple[float, ...] = ()  # of the last steps, to detect spikes
    rewinds: int = 0
    before: int = 0  # tokens of another text, which the branched run read
    saved: int | None = None  # step of the newest checkpoint; not written into one

    def data(self) -> dict[str, Any]:
        """Return the position as a JSON object."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "tokens_before": self.before,
            "elapsed_seconds": self.elapsed,
            "skipped": self.skipped,
            "cursor": dict(self.cursor),
            "guarded": list(self.guarded),
            "losses": list(self.losses),
            "rewinds": self.rewinds,
        }

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """Read a position from a checkpoint's scalars: the inverse of :meth:`data`.

        Raises:
            KeyError, TypeError, ValueError: the scalars do not describe a position.
        """
        return cls(
            step=int(data["step"]),
            tokens=int(data["tokens"]),
            before=int(data.get("tokens_before", 0)),  # older checkpoints have none
            elapsed=float(data["elapsed_seconds"]),
            skipped=int(data["skipped"]),
            cursor=dict(data["cursor"]),
            guarded=tuple(map(int, data["guarded"])),
            losses=tuple(map(float, data["losses"])),
            rewinds=int(data["rewinds"]),
            saved=int(data["step"]),
        )
