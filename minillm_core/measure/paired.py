"""The effect of a change from paired runs: its mean, a 95 % interval, and how many pairs would tell.

Student's t on the differences of pairs (same seed, same data, with and without the change): what
both runs of a pair share, the luck of a seed above all, drops out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["MOST_PAIRS", "Effect", "effect_of", "quantile"]

MOST_PAIRS = 1000
"""More than these are not worth naming."""

_EXACT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""The 97.5 % quantiles of Student's t with 1, 2, ... 20 degrees of freedom."""


@dataclass(frozen=True)
class Effect:
    """What a change does to a figure: variant minus baseline, over pairs."""

    effect: float  # the mean difference
    low: float | None  # of the 95 % interval; None: one pair has none
    high: float | None
    pairs: int
    distinguishable: bool  # the interval leaves 0 out
    pairs_needed: int | None  # that would tell it from 0; None: it does, or more than MOST_PAIRS

    def data(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def effect_of(differences: Sequence[float]) -> Effect:
    """The effect behind the differences of pairs.

    Args:
        differences: variant minus baseline, one a pair; at least one.

    Raises:
        ValueError: there is none, or one is not finite.
    """
    n = len(differences)
    if not n or not all(map(math.isfinite, differences)):
        raise ValueError(f"an effect needs finite differences, not {list(differences)}")
    mean = math.fsum(differences) / n
    if n == 1:
        return Effect(mean, None, None, 1, False, None)
    spread = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1))
    half = quantile(n - 1) * spread / math.sqrt(n)
    tells = abs(mean) > half
    return Effect(mean, mean - half, mean + half, n, tells, None if tells else needed(mean, spread))


def needed(mean: float, spread: float) -> int | None:
    """The fewest pairs whose interval would leave 0 out, were mean and spread as they are."""
    for n in range(2, MOST_PAIRS + 1):
        if quantile(n - 1) * spread / math.sqrt(n) < abs(mean):
            return n
    return None


def quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t.

    From a table up to 20 degrees of freedom; beyond them by Cornish and Fisher's expansion around
    the normal's, which is off by less than 1e-5 there.
    """
    if freedom <= len(_EXACT):
        return _EXACT[freedom - 1]
    z = 1.959963985
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
