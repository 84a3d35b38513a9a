"""How long an ablation still takes, from the runs that it has made and the one that goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from minillm_core.measure.course import Going, Planned

__all__ = ["Left"]

KNOWN = 0.1
"""Share of the first run after which its speed is known well enough to be told."""


class Left:
    """Times the runs of an ablation.

    A run's steps are timed apart from what lies between two runs: validation, and, where another
    variant begins, its compilation, which with few seeds is as long as a run.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._going: Going | None = None
        self._first = self._last = (clock(), 0.0)  # time and share of the run that goes on
        self._paces: list[float] = []  # seconds a step
        # seconds before a run's first step was over, and the steps that were made by then
        self._within: list[tuple[float, float]] = []  # between two runs of a variant
        self._between: list[tuple[float, float]] = []  # before the first of a variant

    def told(self, going: Going, share: float) -> bool:
        """A step of a run is over; whether it is the first one that is told of the run.

        Args:
            going: the run, and those that are ahead.
            share: of the run, 0..1.
        """
        now, before = self._clock(), self._going
        begins = before is None or going.run != before.run
        if begins:
            if (pace := self._timed()) is not None:
                self._paces.append(pace)
            same = before is not None and before.run.variant == going.run.variant
            gaps = self._within if same else self._between
            gaps.append((now - self._last[0], share * going.run.steps))
            self._first = now, share
        self._going, self._last = going, (now, share)
        return begins

    @property
    def known(self) -> bool:
        """Whether the first run is far enough for its speed to be told."""
        return bool(self._paces) or self._last[1] >= KNOWN

    @property
    def seconds(self) -> float | None:
        """Until all runs that are known to come are made; None: no two steps have been timed."""
        pace = median(self._paces) if self._paces else self._timed()
        if self._going is None or pace is None:
            return None
        run = self._going.run
        left = pace * run.steps * (1 - self._last[1])
        for ahead in self._going.ahead:
            left += pace * ahead.steps + self._gap(run, ahead, pace)
            run = ahead
        return left

    def _timed(self) -> float | None:
        """Seconds a step of the run that goes on."""
        (first, done), (last, share) = self._first, self._last
        if self._going is None or share <= done:
            return None
        return (last - first) / (share - done) / self._going.run.steps

    def _gap(self, run: Planned, ahead: Planned, pace: float) -> float:
        known = self._within if run.variant == ahead.variant else self._between
        return max(0.0, median(took - pace * steps for took, steps in known)) if known else 0.0
