"""How long an ablation still takes, from the runs that it has made and the one that goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

__all__ = ["Left", "runs_of"]

KNOWN = 0.1
"""Share of the first run after which its speed is known well enough to be told."""


def runs_of(judged: Sequence[str], seeds: Sequence[int], *, leave_one_out: bool) -> list[str]:
    """The runs at equal tokens in their order, as they are called while they go on.

    One that turns out not to be plannable is among them.
    """
    first, sign = ("all", "-") if leave_one_out else ("baseline", "+")
    variants = [first, *(f"{sign}{name}" for name in judged)]
    return [f"{variant}, seed {seed}" for variant in variants for seed in seeds]


class Left:
    """Counts the runs of an ablation and their seconds.

    A run's steps are timed apart from what lies between two runs: validation, and, where another
    variant begins, its compilation, which with few seeds is as long as a run. Runs at equal seconds
    are not foreseen: their number depends on speeds that are measured last.

    Args:
        runs: those at equal tokens, in order, from :func:`runs_of`.
        steps: of each; None: as many as the first that is told of.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        runs: Sequence[str],
        steps: int | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runs, self._clock = list(runs), clock
        self._label = ""
        self._steps = "" if steps is None else f"{steps} steps"
        self._began = clock()
        self._first = self._last = (self._began, 0.0)  # time and share of the run's steps
        self._paces: list[float] = []
        # seconds before a run's first step was over, and that step's share of the run
        self._within: list[tuple[float, float]] = []  # between two runs of a variant
        self._between: list[tuple[float, float]] = []  # before the first of a variant

    def told(self, label: str, share: float) -> bool:
        """A step of a run is over; whether it is the first one that is told of the run.

        Args:
            label: ``+muon, seed 1, 200 steps``.
            share: of the run, 0..1.
        """
        now, begins = self._clock(), label != self._label
        if begins:
            self._close(label, now, share)
            self._label, self._first = label, (now, share)
        self._last = now, share
        return begins

    @property
    def runs(self) -> int:
        """How many there are at equal tokens."""
        return len(self._runs)

    @property
    def number(self) -> int | None:
        """Of the run that goes on among those at equal tokens, from 1; None: it is none of them."""
        run, _, steps = self._label.rpartition(", ")
        return self._runs.index(run) + 1 if run in self._runs and steps == self._steps else None

    @property
    def known(self) -> bool:
        """Whether the first run is far enough for its speed to be told."""
        return bool(self._paces) or self._last[1] >= KNOWN

    @property
    def seconds(self) -> float | None:
        """Until all runs at equal tokens are made; of another run, until that one is.

        None: no two steps have been timed.
        """
        pace = self._pace()
        if pace is None:
            return None
        left = pace * (1 - self._last[1])
        if self.number is None:
            return left
        here, *ahead = self._runs[self.number - 1 :]
        for last, run in zip([here, *ahead], ahead, strict=False):
            left += pace + self._gap(_variant(last) == _variant(run), pace)
        return left

    def _close(self, label: str, now: float, share: float) -> None:
        """Learn from the run that is over, and from the time until another's first step."""
        run, _, steps = label.rpartition(", ")
        if run not in self._runs:  # a step is being timed, to know how many there will be
            return
        self._steps = self._steps or steps
        if self._label.rpartition(", ")[0] not in self._runs:
            self._between.append((now - self._began, share))
            return
        if (pace := self._timed()) is not None:
            self._paces.append(pace)
        same = _variant(self._label) == _variant(label)
        (self._within if same else self._between).append((now - self._last[0], share))

    def _pace(self) -> float | None:
        """Seconds of a run's steps."""
        return self._timed() if not self._paces else median(self._paces)

    def _timed(self) -> float | None:
        (first, done), (last, share) = self._first, self._last
        return (last - first) / (share - done) if share > done else None

    def _gap(self, same: bool, pace: float) -> float:
        known = self._within if same else self._between
        return max(0.0, median(took - share * pace for took, share in known)) if known else 0.0


def _variant(run: str) -> str:
    return run.partition(", ")[0]
