"""Loss scaling for float16 as a pure function of its state (arXiv:1710.03740)."""

from __future__ import annotations

import mlx.core as mx

from minillm_core.backends.figures import SMALLEST_SCALE

__all__ = ["judge", "start"]

START, LARGEST = 2.0**16, 2.0**24
GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000


def start() -> dict[str, mx.array]:
    """scale, good steps since it moved, steps skipped so far; all 0-d float32."""
    return {"scale": mx.array(START), "good": mx.array(0.0), "skipped": mx.array(0.0)}


def judge(state: dict[str, mx.array], found: mx.array) -> dict[str, mx.array]:
    """The state for the next step; ``found``: 0-d float32, 1 where this one is skipped."""
    good = (state["good"] + 1) * (1 - found)
    grow = (good >= INTERVAL).astype(mx.float32)
    factor = mx.where(found > 0, BACKOFF, 1 + grow * (GROWTH - 1))
    return {
        "scale": mx.clip(state["scale"] * factor, SMALLEST_SCALE, LARGEST),
        "good": good * (1 - grow),
        "skipped": state["skipped"] + found,
    }
