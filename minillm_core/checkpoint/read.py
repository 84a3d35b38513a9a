"""Reading checkpoints: only those whose every byte is as it was written."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from minillm_core.checkpoint import disk, layout
from minillm_core.checkpoint.manifest import verify
from minillm_core.errors import MinillmError, NoCheckpoint, Refusal

__all__ = ["Checkpoint", "newest", "newest_and_set_aside", "newest_or_refuse"]


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
    if written:
        step, path = written[0]
        raise NoCheckpoint(
            f"none of the {len(written)} checkpoints verifies; the newest: {verify(path)[0]}",
            where=str(path),
            fix=f"restore the folder of step {step} or an older one from a copy",
        )
    _refuse_corrupt(out)
    raise Refusal(
        "the run has no checkpoint",
        where=str(out / "checkpoints"),
        fix="train with checkpoint.every other than 0; a finished run then writes one",
    )


def newest_and_set_aside(out: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint to go on from; newer ones that do not verify are renamed.

    Only the one trainer of ``out`` may call it: a reader has no business renaming.

    Args:
        out: the run's folder.
        say: is told of each that was set aside, with the first reason.

    Returns:
        None if none was ever written.

    Raises:
        NoCheckpoint: none of those that were written verifies, now or at an earlier try.
        MinillmError: one could not be renamed.
    """
    for step, path in layout.folders(out):
        reasons = verify(path)
        if not reasons:
            return Checkpoint(path, step)
        aside = _set_aside(path)
        say(f"{path.name} does not verify and is now {aside.name}: {reasons[0]}")
    _refuse_corrupt(out)
    return None


def _set_aside(path: Path) -> Path:
    names = (f"{path.name}.corrupt{f'-{n}' if n > 1 else ''}" for n in itertools.count(1))
    # a rename would replace an empty folder of that name without a word
    aside = next(path.with_name(name) for name in names if not os.path.lexists(path.parent / name))
    try:
        disk.rename(path, aside)
    except OSError as error:
        raise MinillmError(
            f"{path.name} does not verify and cannot be renamed: {error.strerror}",
            where=str(path),
            fix=f"rename it to {aside.name} yourself, then resume again",
        ) from error
    return aside


def _refuse_corrupt(out: Path) -> None:
    corrupt = layout.corrupt(out)
    if corrupt:
        raise NoCheckpoint(
            f"no checkpoint verifies: only {_some([path.name for path in corrupt])} left",
            where=str(out / "checkpoints"),
            fix="restore a checkpoint from a copy; or delete these folders to start from step 0",
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    if len(names) > 3:
        shown += f" and {len(names) - 3} more"
    return f"{shown} {'is' if len(names) == 1 else 'are'}"
