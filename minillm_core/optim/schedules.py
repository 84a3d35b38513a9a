"""Schedules as values: a schedule may be used wherever a number may.

Knots are fractions of the run. *Dynamic* values become 0-d float32 inputs of the compiled step;
*staged* values (windows, depths) form a finite list, with one compiled callable for each, except for
windows that the kernel takes as inputs (``Binding.inputs``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from minillm_core.nn.reference import Function


@dataclass(frozen=True)
class TrainSchedule:
    """The run's learning-rate schedule, as a factor of the peak: warm-up and decay."""

    shape: str  # a key of SHAPES
    warmup: float  # fraction of the run
    cooldown: float = 0.2  # fraction of the run after the warm-up, for shapes with a cooldown
    curve: Function | None = None  # a plugin's function that replaces the shape
    rates: Schedule | None = None  # a plugin's further factor

    def factor(self, progress: float) -> float:
        """Return the factor at ``progress`` in (0, 1]."""
        more = 1.0 if self.rates is None else self.rates.at(progress, self)
        if progress < self.warmup:
            return progress / self.warmup * more
        rest = 1.0 - self.warmup
        x = (progress - self.warmup) / rest if rest else 0.0
        if self.curve is not None:
            return self.curve.call(x) * more
        return SHAPES[self.shape](x, self.cooldown) * more


def _cosine(x: float, cooldown: float) -> float:
    """Decay from 1 to 0.1 along half a cosine."""
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(x, 1.0)))


def _wsd(x: float, cooldown: float) -> float:
    """Hold 1, then decay linearly to 0 at the end (warm-up, stable, decay: arXiv:2404.06395)."""
    return min(1.0, (1.0 - x) / cooldown)


SHAPES: Mapping[str, Callable[[float, float], float]] = {
    "constant": lambda x, cooldown: 1.0,
    "cosine": _cosine,
    "wsd": _wsd,
}


@dataclass(frozen=True)
class Schedule:
    """Base of all schedule values."""

    def at(self, progress: float, run: TrainSchedule) -> float:
        """Return the number at ``progress`` in (0, 1]."""
        raise NotImplementedError

    @property
    def least(self) -> float:
        """The smallest of the numbers that define the schedule."""
        return min(number for _, number in vars(self).get("knots", vars(self).items()))

    def data(self) -> dict[str, Any]:
        """Return the schedule as JSON."""
        return {"schedule": type(self).__name__.lower(), **asdict(self)}


@dataclass(frozen=True)
class Piecewise(Schedule):
    """A schedule that is linear between knots (fraction of the run, number), and constant outside them."""

    knots: tuple[tuple[float, float], ...]

    def at(self, progress: float, run: TrainSchedule) -> float:
        """Return the number at ``progress``."""
        first, last = self.knots[0], self.knots[-1]
        if progress <= first[0]:
            return first[1]
        for (start, old), (end, new) in pairwise(self.knots):
            if progress <= end:
                return old + (progress - start) / (end - start) * (new - old)
        return last[1]


@dataclass(frozen=True)
class Cosine(Schedule):
    """A schedule from ``start`` to ``end`` along half a cosine over the whole run."""

    start: float
    end: float

    def at(self, progress: float, run: TrainSchedule) -> float:
        """Return the number at ``progress``."""
        return self.end + (self.start - self.end) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Scheduled(Schedule):
    """A schedule that is ``peak`` times the run's own warm-up and decay."""

    peak: float

    def at(self, progress: float, run: TrainSchedule) -> float:
        """Return the number at ``progress``."""
        return self.peak * run.factor(progress)


@dataclass(frozen=True)
class Plateaus(Schedule):
    """A step function: knots (fraction of the run from which the number holds, number)."""

    knots: tuple[tuple[float, float], ...]

    def at(self, progress: float, run: TrainSchedule) -> float:
        """Return the number of the last knot before ``progress``; exactly at a knot, the previous number."""
        return [number for start, number in self.knots if start < progress or start == 0][-1]


@dataclass(frozen=True)
class Stages(Plateaus):
    """A staged value: a step function of whole numbers, each baked into a compiled step."""

    knots: tuple[tuple[float, int], ...]

    def all(self) -> tuple[int, ...]:
        """Return every number that occurs, sorted."""
        return tuple(sorted({number for _, number in self.knots}))


def piecewise(*knots: tuple[float, float]) -> Piecewise:
    """Make a schedule that is linear between ``(fraction of the run, number)`` knots.

    Raises:
        ValueError: no knots, fractions that do not rise, or a number that is not finite.
    """
    _check(knots)
    return Piecewise(tuple((float(x), float(y)) for x, y in knots))


def cosine(start: float, end: float) -> Cosine:
    """Make a schedule from ``start`` to ``end`` along half a cosine."""
    return Cosine(float(start), float(end))


def scheduled(peak: float) -> Scheduled:
    """Make a schedule of ``peak`` times the run's own warm-up and decay, like train.lr."""
    return Scheduled(float(peak))


def plateaus(*knots: tuple[float, float]) -> Plateaus:
    """Make a step function of any numbers, each from its fraction of the run; the first fraction is 0.

    Raises:
        ValueError: no knots, fractions that do not rise, a first fraction that is not 0, or a number
            that is not finite.
    """
    _check_held(knots)
    return Plateaus(tuple((float(x), float(y)) for x, y in knots))


def stages(*knots: tuple[float, int]) -> Stages:
    """Make a staged value: whole numbers, each from its fraction of the run; the first fraction is 0.

    Raises:
        ValueError: no knots, fractions that do not rise, a first fraction that is not 0, or numbers
            that are not whole.
    """
    _check_held(knots)
    if any(int(y) != y for _, y in knots):
        raise ValueError(f"stages are whole numbers, not {[y for _, y in knots]}")
    return Stages(tuple((float(x), int(y)) for x, y in knots))


def _check_held(knots: tuple[tuple[float, float], ...]) -> None:
    _check(knots)
    if knots[0][0] != 0:
        raise ValueError("the first stage begins at 0")


def _check(knots: tuple[tuple[float, float], ...]) -> None:
    places = [place for place, _ in knots]
    if not places or places != sorted(set(places)) or not 0 <= places[0] <= places[-1] <= 1:
        raise ValueError(f"knots need rising fractions of the run between 0 and 1, not {places}")
    if not all(math.isfinite(number) for _, number in knots):
        raise ValueError(f"knots need finite numbers, not {[number for _, number in knots]}")
