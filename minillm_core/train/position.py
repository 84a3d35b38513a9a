"""How far a run has come: with the trainer's arrays, all that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

__all__ = ["Position"]


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
        """As JSON."""
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
        """The inverse of :meth:`data`, of a checkpoint's scalars.

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
