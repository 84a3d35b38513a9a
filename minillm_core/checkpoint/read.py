"""Reading checkpoints: only those whose every byte is as it was written."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core.checkpoint import disk, layout, strict, tensors
from minillm_core.checkpoint.manifest import reasons
from minillm_core.checkpoint.opened import Opened
from minillm_core.errors import MinillmError, NoCheckpoint, Refusal
from minillm_core.text import few

__all__ = ["Checkpoint", "newest", "newest_and_set_aside", "newest_or_refuse"]


class Checkpoint:
    """A checkpoint that verified; it can be read even when its trainer has removed it since.

    Args:
        path: where it lies.
        step: how many optimizer steps it has seen.
        files: those that were verified; default: opened when they are first needed.
    """

    def __init__(self, path: Path, step: int, files: Opened | None = None) -> None:
        self.path, self.step = path, step
        self._files = files

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {self.step})"

    def arrays(self, prefix: str = "") -> dict[str, np.ndarray]:
        """The arrays whose full names start with ``prefix``, such as ``"model."``.

        Raises:
            NoCheckpoint: it is gone, or was changed since it verified.
        """
        found = {}
        with self._reading() as files:
            for name in (layout.MODEL, layout.OPTIMIZER):
                fill = partial(files.fill, name)
                for key, stored in tensors.header(fill, files.size(name)).items():
                    if key.startswith(prefix):
                        found[key] = tensors.read(fill, stored)
        return found

    @property
    def scalars(self) -> dict[str, Any]:
        """What was saved as JSON; raises as :meth:`arrays`."""
        with self._reading() as files:
            return strict.parse(files.content(layout.STATE, strict.LARGEST))

    @contextmanager
    def _reading(self) -> Iterator[Opened]:
        try:
            self._files = self._files or Opened(self.path)
            yield self._files
        except ValueError as error:
            raise NoCheckpoint(
                f"the checkpoint of step {self.step} cannot be read any more: {error}",
                where=str(self.path),
                fix="try again: a run that goes on removes old ones when it has a newer one",
            ) from error


def newest(out: Path, say: Callable[[str], None] | None = None) -> Checkpoint | None:
    """The checkpoint of the greatest step that verifies, or None; changes nothing.

    Args:
        out: the run's folder, in which a trainer may be saving and removing.
        say: is told of each newer one that does not verify, with the first reason.
    """
    found, bad = _search(out)
    _tell(bad, say)
    return found


def _tell(bad: list[tuple[Path, str]], say: Callable[[str], None] | None) -> None:
    for path, reason in bad:
        if say:
            say(f"{path.name} does not verify and is passed over: {reason}")


def _search(out: Path) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """The newest that verifies, and the newer ones that do not, with the first reason."""
    while True:
        bad: list[tuple[Path, str]] = []
        for step, path in layout.folders(out):
            found, reason = _open(path, step)
            if found:
                return found, bad
            if not os.path.lexists(path):
                break  # removed in between, which happens once there is a newer one
            bad.append((path, reason))
        else:
            return None, bad


def _open(path: Path, step: int) -> tuple[Checkpoint | None, str]:
    """The checkpoint with its files open; or None and the first reason why it does not verify."""
    try:
        files = Opened(path)
    except ValueError as error:
        return None, str(error)
    found = reasons(files)
    if found:
        files.close()
        return None, found[0]
    return Checkpoint(path, step, files), ""


def newest_or_refuse(out: Path, say: Callable[[str], None] | None = None) -> Checkpoint:
    """Like :func:`newest`, for a command that needs one.

    Raises:
        Refusal: no checkpoint was ever written.
        NoCheckpoint: none of those that are there verifies.
    """
    found, bad = _search(out)
    _tell(bad, say)
    if found:
        return found
    if bad:
        path, reason = bad[0]
        raise NoCheckpoint(
            f"none of the {len(bad)} checkpoints verifies; the newest: {reason}",
            where=str(path),
            fix=f"restore {path.name} or an older one from a copy",
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
        found, reason = _open(path, step)
        if found:
            return found
        aside = _set_aside(path)
        say(f"{path.name} does not verify and is now {aside.name}: {reason}")
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
            f"no checkpoint verifies: only {few([path.name for path in corrupt])} "
            f"{'is' if len(corrupt) == 1 else 'are'} left",
            where=str(out / "checkpoints"),
            fix="restore a checkpoint from a copy; or delete these folders to start from step 0",
        )
