"""The wait while steps are compiled and nothing trains, in the progress of a study."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from minillm_core.commands import duration

QUIET = 9.0
"""Seconds between two lines about one wait, if there is no terminal: ten on a busy machine."""


class CompilationWait:
    """The time since steps began to be compiled.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waits = False
        self._began = self._said = 0.0

    def note(self, *, waits: bool) -> bool:
        """Record whether steps are compiled now, and return that."""
        if waits and not self._waits:
            self._began, self._said = self._clock(), -math.inf
        self._waits = waits
        return waits

    def due(self) -> bool:
        """Return whether a line is due if there is no terminal; it counts as printed then."""
        due = self._clock() - self._said >= QUIET
        if due:
            self._said = self._clock()
        return due

    @property
    def elapsed(self) -> str:
        """The time since the wait began: ``0:45``."""
        return duration(self._clock() - self._began)
