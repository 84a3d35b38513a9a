"""The source of a mixture's next row or document, chosen so that the shares hold throughout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction


def whole_shares(weights: Iterable[float]) -> list[int]:
    """Convert weights to integers in exactly the same proportions.

    Sums of floats would depend on the machine.

    Args:
        weights: finite, above 0.
    """
    exact = [Fraction(weight) for weight in weights]
    unit = math.lcm(*(one.denominator for one in exact))
    return [int(one * unit) for one in exact]


def next_source(shares: Sequence[int], used: Sequence[int], sizes: Sequence[int]) -> int:
    """Choose the source of the next row or document.

    The rule is worst-case fair weighted fair queueing (Bennett and Zhang 1996): of the sources that are not
    ahead of their share, the one whose next row or document would end first. Each source's part of the whole
    is then its share to within about one item, after any number.

    Args:
        shares: of each source, in any unit, above 0.
        used: tokens, bytes or rows taken of each so far.
        sizes: sizes of the next row or document of each, in the same unit; above 0.

    Returns:
        The index of the source, the lowest in a tie. At least one source is not ahead, since the shares
        of what was taken add up to all of it.
    """
    whole, total = sum(shares), sum(used)
    behind = [i for i, n in enumerate(used) if n * whole <= shares[i] * total]
    return min(behind, key=lambda i: Fraction(used[i] + sizes[i], shares[i]))
