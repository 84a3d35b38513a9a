"""Loss scaling for float16 as a pure function of its state (arXiv:1710.03740)."""

from __future__ import annotations

import mlx.core as mx

__all__ = ["judge", "start"]

START, LARGEST = 2.0**16, 2.0**24
GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000


def start() -> dict[str, mx.array]:
    """scale, good steps since it moved, steps skipped so far; all 0-d float32."""
    return {"scale": mx.array(START), "good": mx.array(0.0), "skipped": mx.array(0.0)}


def judge(state: dict[str, mx.array], norm: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
    """1.0 where the norm is not finite, and the state for the next step."""
    found = 1.0 - mx.isfinite(norm).astype(mx.float32)
    good = (state["good"] + 1) * (1 - found)
    grow = (good >= INTERVAL).astype(mx.float32)
    factor = mx.where(found > 0, BACKOFF, 1 + grow * (GROWTH - 1))
    return found, {
        "scale": mx.clip(state["scale"] * factor, 1.0, LARGEST),
        "good": good * (1 - grow),
        "skipped": state["skipped"] + found,
    }
