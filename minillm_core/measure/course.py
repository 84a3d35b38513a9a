"""The runs of an ablation: one that is planned, and where among the others the one that goes on is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from minillm_core.text import counted

__all__ = ["Going", "Planned", "stem"]


@dataclass(frozen=True)
class Planned:
    """A run to make."""

    variant: str
    seed: int
    steps: int

    @property
    def file(self) -> str:
        """Where it is kept."""
        return f"{stem(self.variant, self.seed)}-{self.steps}.json"

    @property
    def label(self) -> str:
        """What it is called while it goes on."""
        return f"{self.variant}, seed {self.seed}, {counted(self.steps, 'step')}"


@dataclass(frozen=True)
class Going:
    """A run that goes on, and what is known to come after it."""

    run: Planned
    number: int = 1  # from 1, those that were there already included
    ahead: tuple[Planned, ...] = ()  # that are still to be made, in their order
    runs: int = 1  # in all, as far as they are known

    @classmethod
    def of(cls, run: Planned, course: Sequence[Planned], done: Collection[Planned]) -> Going:
        """Where a run is in its course; alone where it is not in there.

        Args:
            run: the one that goes on.
            course: all runs in their order.
            done: those that are made.
        """
        if run not in course:
            return cls(run)
        at = course.index(run)
        ahead = tuple(one for one in course[at + 1 :] if one not in done)
        return cls(run, at + 1, ahead, len(course))


def stem(variant: str, seed: int) -> str:
    """How the files of a variant's runs begin; the sign of its name is spelt out."""
    signs = {"+": "with-", "-": "without-"}
    return f"{signs.get(variant[0], variant[0])}{variant[1:]}-seed{seed}"
