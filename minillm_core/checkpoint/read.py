"""Reading checkpoints: only verified ones."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core import disk, strict
from minillm_core.checkpoint import best as marker
from minillm_core.checkpoint import layout, tensors
from minillm_core.checkpoint.manifest import Opened, reasons
from minillm_core.errors import MinillmError, NoCheckpoint, Refusal
from minillm_core.text import few, quoted

SHOWN = 8
"""Most unverifiable checkpoints that are named each on a line of its own."""


class Checkpoint:
    """A verified checkpoint; it stays readable when its trainer removes it.

    Args:
        path: its folder.
        step: number of optimizer steps taken.
        files: the verified files; default: opened at first use.
    """

    def __init__(self, path: Path, step: int, files: Opened | None = None) -> None:
        self.path, self.step = path, step
        self._files = files

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {self.step})"

    def arrays(self, prefix: str = "") -> dict[str, np.ndarray]:
        """Read the arrays whose full names start with ``prefix``, such as ``"model."``.

        Raises:
            NoCheckpoint: it was removed, or changed since it was verified.
        """
        return {name: np.asarray(one) for name, one in self.deferred(prefix).items()}

    def deferred(self, prefix: str = "") -> dict[str, Any]:
        """List the same arrays as deferred ones, which read rows at use; raises, also then, as :meth:`arrays`."""
        found = {}
        with self._reading() as files:
            for name in (name for name in files.names if name != layout.STATE):
                fill = partial(self._fill, name)
                for key, stored in tensors.header(fill, files.size(name)).items():
                    if key.startswith(prefix):
                        found[key] = tensors.read(fill, stored)
            return tensors.joined(found)

    def _fill(self, name: str, offset: int, buffer: memoryview) -> None:
        with self._reading() as files:
            files.fill(name, offset, buffer)

    @property
    def scalars(self) -> dict[str, Any]:
        """Read the scalars, as JSON; raises as :meth:`arrays`."""
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
                fix="try again: a running run removes old checkpoints once it has a newer one",
            ) from error


@contextmanager
def fitting(path: Path, what: str) -> Iterator[None]:
    """Refuse a checkpoint if its arrays or numbers do not fit ``what``: the model, or the run."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(
            f"the checkpoint does not fit the {what}: {type(error).__name__}: {error}",
            where=str(path),
            fix="use the versions of minillm and of the plugins that run.json names",
        ) from error


def newest(out: Path, say: Callable[[str], None] | None = None) -> Checkpoint | None:
    """Find the checkpoint of the greatest step that verifies, or None; changes no file.

    Args:
        out: the run's folder, in which a trainer may be saving and removing.
        say: prints a line for each newer one that fails verification, with the first reason.
    """
    return _search(out, say)[0]


def _search(
    out: Path, say: Callable[[str], None] | None
) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """Find the newest that verifies, and the newer ones that do not, with the first reason."""
    found, complete = None, False
    while not (found or complete):
        bad: list[tuple[Path, str]] = []
        for step, path in layout.folders(out):
            found, reason = _open(path, step)
            if found or not os.path.lexists(path):
                break  # removed in between, which happens once there is a newer one
            bad.append((path, reason))
        else:
            complete = True
    if say:
        for path, reason in bad[:SHOWN]:
            say(f"{path.name} does not verify and is skipped: {reason}")
        if len(bad) > SHOWN:
            say(f"... and so are {len(bad) - SHOWN:,} more, down to {bad[-1][0].name}")
    return found, bad


def _open(path: Path, step: int) -> tuple[Checkpoint | None, str]:
    """Open and verify a checkpoint; return it, or None and the first reason of the failure."""
    try:
        files = Opened(path)
    except ValueError as error:
        return None, str(error)
    if found := reasons(files):
        files.close()
        return None, found[0]
    return Checkpoint(path, step, files), ""


def newest_or_refuse(out: Path, say: Callable[[str], None] | None = None) -> Checkpoint:
    """Find the newest checkpoint as :func:`newest` does, or raise.

    Raises:
        Refusal: no checkpoint was ever written.
        NoCheckpoint: checkpoints exist, but none verifies.
    """
    found, bad = _search(out, say)
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
        fix="the first is saved after a twentieth of a run, none with checkpoint.every=0: "
        f"minillm train --resume --out {quoted(out)} continues training",
    )


def chosen_or_refuse(
    out: Path,
    say: Callable[[str], None] | None = None,
    *,
    step: int | None = None,
    best: bool = False,
    typed: str = "--step ",
) -> Checkpoint:
    """Open the checkpoint of a given step, the best, or the newest.

    Args:
        out: the run's folder.
        say: prints a line for each newer checkpoint that fails verification, if none was chosen.
        step: number of optimizer steps taken.
        best: open the checkpoint that the run marked, with ``checkpoint.best``.
        typed: what is typed in front of a step.

    Raises:
        Refusal: both are given, or there is no such checkpoint; the message lists the existing ones.
        NoCheckpoint: it fails verification.
    """
    steps = partial(_steps, out, typed)
    if best and step is not None:
        fix = "give one of them, or neither for the newest checkpoint"
        raise Refusal("step and best are both given", where=f"step={step}, best", fix=fix)
    if isinstance(step, str | float):
        raise Refusal(f"a step is a whole number, not {step!r}", where="step", fix=steps())
    if best:
        if (found := marker.read(out)) is None:
            raise Refusal(
                "the run has marked no checkpoint as its best",
                where=str(out / "checkpoints"),
                fix=f"train with checkpoint.best=true; or {steps()}",
            )
        step = found.step
    if step is None:
        return newest_or_refuse(out, say)
    path = layout.folder(out, step)
    if not os.path.lexists(path):
        what = f"the run has no checkpoint of step {step:,}"
        raise Refusal(what, where=str(out / "checkpoints"), fix=steps())
    opened, reason = _open(path, step)
    if opened is None:
        what = f"the checkpoint of step {step:,} does not verify: {reason}"
        raise NoCheckpoint(what, where=str(path), fix=steps(without=step))
    return opened


def _steps(out: Path, typed: str, without: int | None = None) -> str:
    """Return the fix of a refusal: the newest existing steps, and how one is typed."""
    there = [str(step) for step, _ in layout.folders(out) if step != without]
    if not there:
        return "wait until the run has saved one"
    return f"one of the steps {few(there, 8)}: {typed}{there[0]}"


def newest_and_set_aside(out: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """Find the checkpoint to resume from; rename newer ones that fail verification.

    Only the one trainer of ``out`` may call it: a reader must not rename.

    Args:
        out: the run's folder.
        say: prints a line for each that is set aside, with the first reason.

    Returns:
        None if none was ever written.

    Raises:
        NoCheckpoint: some were written, and none verifies, now or at an earlier try.
        MinillmError: one could not be renamed.
    """
    found, bad = _search(out, None)
    for place, (path, reason) in enumerate(bad):
        aside = _set_aside(path)
        if place < SHOWN:
            say(f"{path.name} does not verify and is now {aside.name}: {reason}")
    if len(bad) > SHOWN:
        say(f"... and {len(bad) - SHOWN:,} older ones that do not verify are renamed as well")
    if bad:
        disk.sync(out / "checkpoints")
    if found is None:
        _refuse_corrupt(out)
    return found


def _set_aside(path: Path) -> Path:
    """Rename a bad checkpoint, without waiting for the disk to sync the name."""
    names = (f"{path.name}.corrupt{f'-{n}' if n > 1 else ''}" for n in itertools.count(1))
    # a rename would silently replace an empty folder of that name
    aside = next(path.with_name(name) for name in names if not os.path.lexists(path.parent / name))
    try:
        disk.rename(path, aside, wait=False)
    except OSError as error:
        raise MinillmError(
            f"{path.name} does not verify and cannot be renamed: {error.strerror}",
            where=str(path),
            fix=f"rename it to {aside.name} yourself, then resume again",
        ) from error
    return aside


def _refuse_corrupt(out: Path) -> None:
    if corrupt := layout.corrupt(out):
        raise NoCheckpoint(
            f"no checkpoint verifies: only {few([path.name for path in corrupt])} "
            f"{'is' if len(corrupt) == 1 else 'are'} left",
            where=str(out / "checkpoints"),
            fix="restore a checkpoint from a copy; or delete these folders to start from step 0",
        )
