"""Throughput by this process's clock: real, padded and supervised tokens apart, warm-up excluded.

A device may still be busy when a step has been queued, and its figures are read one step late. So
the moment at which a step ended is taken from the read where the read had to wait, and from the
return of the queueing call where it had not (a CPU computes inside that call).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from minillm_core.train.events import Throughput

__all__ = ["Counts", "Figures", "Meter"]

WAITED = 0.1  # share of the time since queueing above which a read counts as having waited
SHORTEST = 1e-9  # seconds; a clock may stand still between two steps


@dataclass(frozen=True)
class Counts:
    """Tokens of one step."""

    real: int  # not padding
    padded: int  # all positions
    supervised: int  # labels >= 0


@dataclass(frozen=True)
class Figures:
    """A step's speed."""

    seconds: float  # of this step alone
    tokens_per_second: Throughput  # over the last steps
    mfu: float | None  # over the last steps; None where the peak is unknown


class Meter:
    """Measures a run's speed over its last steps, and over all of it.

    The first step compiles and allocates: its own figure is its own time, and no later one holds it.

    Args:
        flops_per_token: forward and backward, from the plan.
        peak_flops: the device's dense FLOP/s in the compute dtype, where known.
        window: how many steps a figure covers.
    """

    def __init__(
        self, *, flops_per_token: float = 0.0, peak_flops: float | None = None, window: int = 20
    ) -> None:
        self._flops, self._peak = flops_per_token, peak_flops
        self._recent: deque[tuple[float, Counts]] = deque(maxlen=window)
        self._ended = 0.0
        self._warm = False
        self._total = (0.0, Counts(0, 0, 0))

    def restart(self, now: float) -> None:
        """Steps follow from here on: what happened before (an evaluation, a save) is not theirs."""
        self._ended = now

    def add(self, counts: Counts, *, queued: float, asked: float, read: float) -> Figures:
        """A step's figures.

        Args:
            counts: its tokens.
            queued: when the call that queued it returned.
            asked: when its figures were asked for.
            read: when they were there.
        """
        waited = read - asked > WAITED * (read - queued)
        ended = max(read if waited else queued, self._ended + SHORTEST)
        seconds, self._ended = ended - self._ended, ended
        steps = [(seconds, counts)]
        if self._warm:
            self._recent.append(steps[0])
            self._total = _sum([self._total, steps[0]])
            steps = list(self._recent)
        self._warm = True
        rate = _rate(*_sum(steps))
        mfu = rate.real * self._flops / self._peak if self._peak else None
        return Figures(seconds, rate, mfu)

    def overall(self) -> Throughput | None:
        """Of all steps but the first; None when there was no other."""
        seconds, _ = self._total
        return _rate(*self._total) if seconds else None


def _sum(steps: list[tuple[float, Counts]]) -> tuple[float, Counts]:
    total = Counts(
        sum(counts.real for _, counts in steps),
        sum(counts.padded for _, counts in steps),
        sum(counts.supervised for _, counts in steps),
    )
    return sum(seconds for seconds, _ in steps), total


def _rate(seconds: float, counts: Counts) -> Throughput:
    return Throughput(counts.real / seconds, counts.padded / seconds, counts.supervised / seconds)
