"""At which lengths a set of plugins is trained, so that its loss in the time of others is known.

The set that all others are held against is trained for a few lengths more. Each is the number of
steps that it makes in the time of one of the others, which makes the loss there a measurement. In
between, where lengths lie close, the loss is taken to be a straight line in the logarithm of the
steps, which is prolonged by a hair where somebody is faster by as much; further out nothing is said.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping

__all__ = ["GAP", "loss_at", "neighbours", "rungs"]

GAP = 1.25
"""Trained lengths that a loss is read between differ by this factor at most.

With loss = a steps^-b the line is too high by at most (b log GAP)^2 / 8 of the part that still falls:
0.2 % of it at b = 0.5.
"""

BEYOND = 1.02
"""A line through two trained lengths is prolonged by this factor at most."""


def rungs(steps: int, wanted: Iterable[int]) -> list[int]:
    """The wanted lengths to train, so that every other one can be read between two: few of them.

    Args:
        steps: the length that is trained anyway.
        wanted: lengths at which the loss is to be known.

    Returns:
        Lengths to train beside ``steps``, shortest first. One or two are all of the wanted ones,
        unless they lie on the same side.
    """
    chosen: list[int] = []
    for side in (
        sorted({one for one in wanted if one > steps}),
        sorted({one for one in wanted if one < steps}, reverse=True),
    ):
        if all(neighbours(one, {steps, *chosen}) for one in side):
            continue
        last, left = steps, side
        while left:
            near = [one for one in left if _near(last, one)]
            last = near[-1] if near else left[0]
            left = left[left.index(last) + 1 :]
            chosen.append(last)
    return sorted(chosen)


def neighbours(steps: int, trained: Collection[int]) -> tuple[int, int] | None:
    """Two trained lengths whose line tells of another one: those around it, or the next two.

    Returns:
        The same twice where it was trained itself. None where there are none that are close.
    """
    if steps in trained:
        return steps, steps
    ordered = sorted(trained)
    for below, above in itertools.pairwise(ordered):
        first = below / BEYOND if below == ordered[0] else below
        last = above * BEYOND if above == ordered[-1] else above
        if first <= steps <= last and _near(below, above):
            return below, above
    return None


def loss_at(steps: int, losses: Mapping[int, float], between: tuple[int, int]) -> float:
    """The loss after ``steps``, on the line between two lengths, in the logarithm of the steps."""
    below, above = between
    if below == above:
        return losses[below]
    share = math.log(steps / below) / math.log(above / below)
    return (1 - share) * losses[below] + share * losses[above]


def _near(one: int, other: int) -> bool:
    return max(one, other) <= GAP * min(one, other)
