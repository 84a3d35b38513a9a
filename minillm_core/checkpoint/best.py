"""The marker of the checkpoint with the lowest held-out loss: OUT/checkpoints/best.json, written atomically."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from minillm_core import disk, strict
from minillm_core.checkpoint import layout


class Best(NamedTuple):
    """The best checkpoint, as named by the marker."""

    step: int
    loss: float


def mark(out: Path, step: int, loss: float) -> None:
    """Mark the checkpoint of a step as the best."""
    document = json.dumps({"step": step, "val_loss": loss}).encode() + b"\n"
    disk.replace(out / "checkpoints" / layout.BEST, document)


def read(out: Path) -> Best | None:
    """Read the marker; None if there is none, or its checkpoint was removed."""
    try:
        found = strict.parse(disk.read_file(out / "checkpoints" / layout.BEST, 4096))
    except (FileNotFoundError, ValueError):
        return None
    step, loss = found.get("step"), found.get("val_loss")
    if type(step) is not int or not isinstance(loss, int | float):
        return None
    return Best(step, float(loss)) if layout.folder(out, step).is_dir() else None


def protected(out: Path) -> set[int]:
    """Return the marked step, if any, in the form that :func:`retain` takes."""
    found = read(out)
    return {found.step} if found else set()


def clear(out: Path) -> None:
    """Remove the marker: the run was rewound to before the checkpoint that it names."""
    (out / "checkpoints" / layout.BEST).unlink(missing_ok=True)
