"""Reading checkpoints: only those whose every byte is as it was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from minillm_core.checkpoint import layout
from minillm_core.checkpoint.manifest import verify
from minillm_core.errors import NoCheckpoint, Refusal

__all__ = ["Checkpoint", "newest", "newest_or_refuse"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that verified."""

    path: Path
    step: int

    def arrays(self, prefix: str = "") -> dict[str, np.ndarray]:
        """The arrays whose full names start with ``prefix``, such as ``"model."``."""
        found = {}
        for file in (layout.MODEL, layout.OPTIMIZER):
            with safe_open(self.path / file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    if name.startswith(prefix):
                        found[name] = tensors.get_tensor(name)
        return found

    @property
    def scalars(self) -> dict[str, Any]:
        """What was saved as JSON."""
        return json.loads((self.path / layout.STATE).read_bytes())


def newest(out: Path, say: Callable[[str], None] | None = None) -> Checkpoint | None:
    """The checkpoint of the greatest step that verifies, or None; changes nothing.

    Args:
        out: the run's folder.
        say: is told of each newer one that does not verify, with the first reason.
    """
    for step, path in layout.folders(out):
        reasons = verify(path)
        if not reasons:
            return Checkpoint(path, step)
        if say:
            say(f"{path.name} does not verify and is passed over: {reasons[0]}")
    return None


def newest_or_refuse(out: Path, say: Callable[[str], None] | None = None) -> Checkpoint:
    """Like :func:`newest`, for a command that needs one.

    Raises:
        Refusal: no checkpoint was ever written.
        NoCheckpoint: none of those that are there verifies.
    """
    found = newest(out, say)
    if found:
        return found
    written = layout.folders(out)
    if not written:
        raise Refusal(
            "the run has no checkpoint",
            where=str(out / "checkpoints"),
            fix="train with checkpoint.every other than 0; a finished run then writes one",
        )
    step, path = written[0]
    raise NoCheckpoint(
        f"none of the {len(written)} checkpoints verifies; the newest: {verify(path)[0]}",
        where=str(path),
        fix=f"restore the folder of step {step} or an older one from a copy",
    )
