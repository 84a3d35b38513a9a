"""Crossings of a target by a curve of held-out losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["crossings"]


def crossings(
    curve: Sequence[Mapping[str, Any]], targets: Sequence[float]
) -> dict[str, dict[str, float] | None]:
    """Map targets to seconds and tokens where the curve last falls below it; None: never.

    Args:
        curve: points with ``seconds``, ``tokens`` and ``val_loss``, in order. Between two of them
            the loss is interpolated linearly; the last point counts if it is below.
        targets: nats.
    """
    return {f"{target:g}": crossing(curve, target) for target in targets}


def crossing(curve: Sequence[Mapping[str, Any]], target: float) -> dict[str, float] | None:
    """Compute the crossing of one target."""
    if not curve or curve[-1]["val_loss"] > target:
        return None
    above = [index for index, point in enumerate(curve) if point["val_loss"] > target]
    if not above:
        return {"seconds": curve[0]["seconds"], "tokens": curve[0]["tokens"]}
    before, after = curve[above[-1]], curve[above[-1] + 1]
    share = (before["val_loss"] - target) / (before["val_loss"] - after["val_loss"])
    return {
        key: round(before[key] + share * (after[key] - before[key]), 3)
        for key in ("seconds", "tokens")
    }
