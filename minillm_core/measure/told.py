"""Effects in digits: as many as keep a small one from being written as none."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["interval", "signed", "times"]

DECIMALS = 5
"""A difference that needs more is written with an exponent."""

FINEST = 9
"""Decimals of a ratio at most: of 80 GB a thousandth of a millionth is 80 bytes."""


def interval(
    form: Callable[[float], str], mean: float, low: float | None, high: float | None, unit: str = ""
) -> str:
    """``mean unit [low, high]``; without the interval where a single pair gave none."""
    told = f"{form(mean)}{unit}"
    return told if low is None or high is None else f"{told} [{form(low)}, {form(high)}]"


def signed(value: float) -> str:
    """A difference with its sign: four decimals, and two significant digits where those hold fewer."""
    if value == 0 or abs(value) >= 0.001:
        return f"{value or 0.0:+.4f}"  # 0 has no sign of its own
    short = f"{value:+.{DECIMALS}f}"
    return short if abs(value) >= 10 ** (1 - DECIMALS) else f"{value:+.1e}"


def times(value: float) -> str:
    """A ratio: three decimals, and more where those would make 1 of what is not 1."""
    apart = abs(value - 1)
    decimals = math.ceil(-math.log10(apart) - 1e-9) if apart else 0
    return f"{value:.{min(max(3, decimals), FINEST)}f}"
