"""How long a run lasts, how far it has come, and when it evaluates and saves on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from minillm_core.config.schema import TrainConfig
from minillm_core.errors import ConfigError

EVALUATIONS = 6
"""Parts of a run with an evaluation after each, where no number of steps is given."""


@dataclass(frozen=True)
class Budget:
    """So many steps, or so many minutes; with both, whichever is over first."""

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ConfigError(
                "nothing says how long to train",
                where="train.steps, train.minutes",
                fix="train.steps=1000, or train.minutes=10",
            )

    @classmethod
    def of(cls, train: TrainConfig) -> Self:
        """Give the budget of the settings.

        Raises:
            ConfigError: there is none.
        """
        return cls(train.steps, train.minutes)

    def progress(self, step: int, elapsed: float) -> float:
        """Give the schedules' progress, 0..1, at a step (from 1) that begins after ``elapsed`` seconds."""
        return min(1.0, max(self._shares(step, elapsed)))

    def spent(self, step: int, elapsed: float) -> bool:
        """Tell whether the run is over after ``step`` steps and ``elapsed`` seconds."""
        return max(self._shares(step, elapsed)) >= 1.0

    def part(self, parts: int, step: int, elapsed: float) -> int:
        """Find which of so many equal parts of the run is over after ``step`` steps, 0..parts."""
        found = [0]
        if self.steps is not None:
            found.append(parts * step // self.steps)
        if self.minutes is not None:
            found.append(int(parts * elapsed / (60.0 * self.minutes)))
        return min(parts, max(found))

    def _shares(self, step: int, elapsed: float) -> list[float]:
        shares = []
        if self.steps is not None:
            shares.append(step / self.steps)
        if self.minutes is not None:
            shares.append(elapsed / (60.0 * self.minutes))
        return shares


SAVES = 20
"""Checkpoints of a whole run, where no number of steps is given.

Training waits for the save before the last one, so a kill costs two of these parts at most: a tenth.
"""

SETTLE = 1.0
"""Seconds between two of them at least, unless a whole tenth of the run lies between them."""


@dataclass(frozen=True)
class Last:
    """The last save, as far as the next one depends on it."""

    share: float = 0.0  # of the run that was done
    since: float = 0.0  # seconds ago
    ahead: float = 0.0  # seconds that the next step and a save will take, by the last ones


@dataclass(frozen=True)
class Cadence:
    """The times at which a run evaluates and saves on the way; with zeros only at its end.

    Args:
        evaluate: steps between evaluations; None: a sixth of the run.
        save: steps between checkpoints; None: a twentieth of the run.
        minutes: most minutes between two checkpoints beside that; 0: not by the clock.
        settle: seconds between two that a share of the run asks for.
    """

    evaluate: int | None = 0
    save: int | None = 0
    minutes: float = 0.0
    settle: float = SETTLE

    def evaluates(self, step: int, *, sixth: bool = False) -> bool:
        """Tell whether an evaluation follows ``step``, with which a sixth of the run may be over."""
        if self.evaluate is None:
            return sixth
        return self.evaluate > 0 and step % self.evaluate == 0

    def saves(self, step: int, share: float, last: Last) -> bool:
        """Tell whether a checkpoint follows ``step``, where ``share`` of the run is done; at all of it
        the run ends with one anyway.
        """
        if self.minutes and last.since + last.ahead >= 60.0 * self.minutes:
            return True
        if self.save is not None:
            return self.save > 0 and step % self.save == 0
        parts, before = (int(SAVES * done + 1e-9) for done in (share, last.share))
        return share < 1.0 and parts > before and (last.since >= self.settle or parts - before > 1)


@dataclass
class Position:
    """A place between two optimizer steps."""

    step: int = 0  # optimizer steps taken
    tokens: int = 0  # real ones so far
    elapsed: float = 0.0  # seconds of the budget
    skipped: int = 0  # batches without a supervised token
    cursor: Mapping[str, Any] = field(default_factory=dict)  # the data after ``step``
    guarded: tuple[int, ...] = ()  # of the last hundred steps those that were not finite
    losses: tuple[float, ...] = ()  # the last ones, where spikes are looked for
    rewinds: int = 0
    saved: int | None = None  # step of the newest checkpoint; no part of one

    def data(self) -> dict[str, Any]:
        """Give it as JSON."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "elapsed_seconds": self.elapsed,
            "skipped": self.skipped,
            "cursor": dict(self.cursor),
            "guarded": list(self.guarded),
            "losses": list(self.losses),
            "rewinds": self.rewinds,
        }

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """Read it from a checkpoint's scalars: the inverse of :meth:`data`.

        Raises:
            KeyError, TypeError, ValueError: they are not those of a position.
        """
        return cls(
            step=int(data["step"]),
            tokens=int(data["tokens"]),
            elapsed=float(data["elapsed_seconds"]),
            skipped=int(data["skipped"]),
            cursor=dict(data["cursor"]),
            guarded=tuple(map(int, data["guarded"])),
            losses=tuple(map(float, data["losses"])),
            rewinds=int(data["rewinds"]),
            saved=int(data["step"]),
        )
