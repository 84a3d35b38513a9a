"""Throttle: pauses between steps, so that a machine stays cool and usable while it trains.

Steps take ``share`` of the time, pauses the rest: with 0.5 a step of one second is followed by a pause of
one second. The step time is measured at full speed, at the start and every 100 steps, since on a GPU the
next step is computed while the previous one is read. Results do not change; the displayed speed and
remaining time include the pauses. The first Ctrl-C waits for the end of a pause. Evaluations and
checkpoints are not throttled. If other programs only need priority, ``nice minillm train`` costs no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from pydantic import PrivateAttr

from minillm_core import Event, Plugin, Stepped, option

__all__ = ["Pace", "Throttle"]

MEASURED = 4
"""Steps at full speed per measurement; the first follows a pause, or compiles, and is not counted."""

EVERY = 100
"""Steps between measurements, repeated because other programs may slow the machine down."""


class Throttle(Plugin, api=1):
    """Pauses between steps, so that the machine stays cool and usable."""

    share: float = option(
        0.5, gt=0, lt=1, help="fraction of the time spent in steps; the rest is pauses"
    )

    _pace: Pace = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Create the pace; it measures the steps."""
        self._pace = Pace(self.share)

    def on_event(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self._pace.step()


class Pace:
    """The step interval: the step time, measured at full speed, divided by the share.

    Args:
        share: share of the time that steps take.
        clock: a monotonic clock, in seconds.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self,
        share: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.share, self.clock, self.sleep = share, clock, sleep
        self.last: float | None = None  # end of the previous step, or of the pause after it
        self.free: list[float] = []  # seconds of the current measurement's steps
        self.seconds = 0.0  # of a step at full speed
        self.left = 0  # steps until the next measurement

    def step(self) -> None:
        """Record the end of a step, and pause."""
        now = self.clock()
        if self.last is not None and self.left == 0:
            self.free.append(now - self.last)
            if len(self.free) == MEASURED:
                self.seconds, self.left = median(self.free[1:]), EVERY
                self.free.clear()
        elif self.last is not None:
            self.left -= 1
            if (pause := self.last + self.seconds / self.share - now) > 0:
                self.sleep(pause)
        self.last = self.clock()
