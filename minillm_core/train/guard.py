"""Steps that went wrong: how many that were not finite a run bears, and when a loss is a spike.

The device leaves an update out by itself where the loss or a gradient is not finite; here it is
counted, one step late.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

__all__ = ["LIMIT", "MEMORY", "REWINDS", "WINDOW", "is_spike", "recent"]

WINDOW = 100
"""Steps that are looked back on."""

LIMIT = 10
"""Of these many that were not finite end the run."""

MEMORY = 64
"""Losses whose median a spike is measured against."""

FEWEST = 16  # losses that a median is worth something of

REWINDS = 10
"""Spikes after which the settings are at fault, and not the batches."""


def recent(guarded: Sequence[int], step: int) -> tuple[int, ...]:
    """Those of the steps ``guarded`` that are among the hundred up to ``step``."""
    return tuple(one for one in guarded if one > step - WINDOW)


def is_spike(loss: float, losses: Sequence[float], nats: float) -> bool:
    """Whether a loss is more than ``nats`` over the median of those before it."""
    return len(losses) >= FEWEST and loss > median(losses) + nats
