"""Throttle: pauses between steps, so that a machine stays cool and usable while it trains.

Steps take ``share`` of the time, and the rest of it the machine has for itself: with 0.5 a step of a second
is followed by a pause of a second. How long a step takes is measured at full speed, at the start and every
100 steps, since on a GPU the next step is computed while the one before is read. What is computed stays the
same; speed and remaining time that a run shows are those with pauses. The first Ctrl-C waits for the end of
a pause. Evaluations and checkpoints are not slowed down. Where only other programs are to go first, ``nice
minillm train`` costs no time.
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
"""Steps at full speed; the first of them follows a pause, or compiles, and is not counted."""

EVERY = 100
"""Steps after which it is measured anew: a machine that is in use is slower."""


class Throttle(Plugin, api=1):
    """Pauses between steps, which take a share of the time: a cool and usable machine."""

    share: float = option(0.5, gt=0, lt=1, help="of the time that steps take; the rest is pauses")

    _pace: Pace = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Make the pace; it is measured by steps."""
        self._pace = Pace(self.share)

    def on_event(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self._pace.step()


class Pace:
    """The time from one step to the next: a step's own, measured at full speed, over a share.

    Args:
        share: of the time that steps take.
        clock: seconds that never go back.
        sleep: waits for seconds.
    """

    def __init__(
        self,
        share: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.share, self.clock, self.sleep = share, clock, sleep
        self.last: float | None = None  # when the step before, or the pause behind it, was over
        self.free: list[float] = []  # seconds of the steps at full speed that are being measured
        self.seconds = 0.0  # of a step at full speed
        self.left = 0  # steps until it is measured anew

    def step(self) -> None:
        """Note the end of a step, and pause."""
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
