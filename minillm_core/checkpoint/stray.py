"""Checkpoints of no run that is known: kept, out of the way of the run that starts."""

from __future__ import annotations

from pathlib import Path

from minillm_core.checkpoint import disk, layout

__all__ = ["put_away"]


def put_away(out: Path) -> Path | None:
    """Give OUT/checkpoints another name where anything committed is in it; what it is called now."""
    held = out / "checkpoints"
    if not layout.folders(out) and not any(held.glob("*.corrupt*")):
        return None
    n = 1
    while (target := out / f"checkpoints.before-{n}").exists():
        n += 1
    disk.rename(held, target)
    return target
