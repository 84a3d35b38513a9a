"""Axes: round ticks, units that keep their labels short, and where a number lies on paper."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["BYTES", "COUNT", "TIME", "Axis", "Scale", "number", "scale_of", "ticks"]

Units = Sequence[tuple[float, str]]  # (size, name), the largest first

COUNT: Units = ((1e12, "trillions"), (1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))
TIME: Units = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
BYTES: Units = ((2.0**30, "GiB"), (2.0**20, "MiB"))

_ROUND = (1.0, 2.0, 5.0, 10.0)
_NARROWEST = 1e-6  # of the numbers' size: closer than that floats have no ticks between them


@dataclass(frozen=True)
class Axis:
    """What an axis shows; its numbers are written in the largest unit that fits."""

    name: str  # "tokens", "held-out loss, nats a token"
    units: Units = ()

    def unit(self, largest: float) -> tuple[float, str]:
        """(size, heading) of the numbers up to ``largest``."""
        for size, name in self.units:
            if largest >= size:
                return size, f"{self.name}, {name}"
        if self.units and self.units is not COUNT:
            size, name = self.units[-1]
            return size, f"{self.name}, {name}"
        return 1.0, self.name


@dataclass(frozen=True)
class Scale:
    """Numbers in low..high to places in start..end, in a straight line."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Where a number lies."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def scale_of(values: Iterable[float], start: float, end: float, *, room: float = 0.05) -> Scale:
    """A scale that holds all values, with ``room`` at both ends, and is never without width."""
    found = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(found), max(found)
    size = max(abs(low), abs(high))
    least = (size * _NARROWEST if high > low else size / 10) or 1.0
    if high - low < least:
        middle = (low + high) / 2
        low, high = middle - least / 2, middle + least / 2
    spare = room * (high - low)
    return Scale(low - spare, high + spare, start, end)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """The multiples of 1, 2 or 5 times a power of ten within low..high, at most ``most`` + 1."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(by for by in _ROUND if by * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [min(max(n * step, low), high) for n in range(first, last + 1)]


def number(value: float, step: float) -> str:
    """A tick's label: as many decimals as ticks ``step`` apart need."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if decimals > 6 or abs(value) >= 1e9:
        digits = 1 + max(0, math.ceil(math.log10(max(abs(value), step) / step) - 1e-9))
        return f"{value if abs(value) > step / 2 else 0:.{digits}g}".replace("-", "−")
    told = f"{value:,.{decimals}f}"
    return told.lstrip("-") if not float(told.replace(",", "")) else told.replace("-", "−")
