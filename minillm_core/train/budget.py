"""How long a run lasts, and how often it evaluates and saves."""

from __future__ import annotations

from dataclasses import dataclass

from minillm_core.errors import ConfigError

__all__ = ["Budget", "Cadence"]


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

    def progress(self, step: int, elapsed: float) -> float:
        """Where the schedules stand at a step (from 1) that begins after ``elapsed`` seconds, 0..1."""
        return min(1.0, max(self._shares(step, elapsed)))

    def spent(self, step: int, elapsed: float) -> bool:
        """Whether the run is over after ``step`` steps and ``elapsed`` seconds."""
        return max(self._shares(step, elapsed)) >= 1.0

    def _shares(self, step: int, elapsed: float) -> list[float]:
        shares = []
        if self.steps is not None:
            shares.append(step / self.steps)
        if self.minutes is not None:
            shares.append(elapsed / (60.0 * self.minutes))
        return shares


@dataclass(frozen=True)
class Cadence:
    """Steps between evaluations and between checkpoints; 0: only at the end."""

    evaluate: int = 0
    save: int = 0

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation follows ``step``."""
        return self.evaluate > 0 and step % self.evaluate == 0

    def saves(self, step: int) -> bool:
        """Whether a checkpoint follows ``step``."""
        return self.save > 0 and step % self.save == 0
