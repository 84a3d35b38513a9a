"""Turns: which of several sources the next row or document is of, so that shares hold all along."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction


def whole_shares(weights: Iterable[float]) -> list[int]:
    """Turn weights into whole numbers in exactly the same proportions.

    Sums of floats would depend on the machine.

    Args:
        weights: finite, above 0.
    """
    exact = [Fraction(weight) for weight in weights]
    unit = math.lcm(*(one.denominator for one in exact))
    return [int(one * unit) for one in exact]


def next_source(shares: Sequence[int], used: Sequence[int], sizes: Sequence[int]) -> int:
    """Choose the source of the next row or document.

    It is the rule of worst-case fair weighted fair queueing (Bennett and Zhang 1996): of the sources
    that are not ahead of their share, the one whose next row or document would end first. Each
    source's part of all is then its share to within about one of them, after any number.

    Args:
        shares: of each source, in any unit, above 0.
        used: tokens, bytes or rows that were taken of each.
        sizes: of the next row or document of each, in the same unit; above 0.

    Returns:
        Its number, the lowest where several end together. There is always one that is not ahead,
        since the shares of what was taken add up to all of it.
    """
    whole, total = sum(shares), sum(used)
    behind = [i for i, n in enumerate(used) if n * whole <= shares[i] * total]
    return min(behind, key=lambda i: Fraction(used[i] + sizes[i], shares[i]))
