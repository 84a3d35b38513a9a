"""The commit protocol: write all files into a temporary folder, the manifest last, then rename it once."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core import disk, strict
from minillm_core.checkpoint import layout, manifest, tensors
from minillm_core.errors import Interrupted, MinillmError, NonFinite

Beside = Callable[
    [Path, Callable[[], bool]], AbstractContextManager[Callable[[], Mapping[str, disk.Written]]]
]
"""Context manager of the files of other processes. Entered with the temporary folder and ``given_up``, it
waits for the files and returns them by name; when an error leaves it, the other processes give up."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def commit(
    out: Path,
    step: int,
    arrays: Mapping[str, np.ndarray],
    scalars: Mapping[str, Any],
    *,
    given_up: Callable[[], bool] = lambda: False,
    beside: Beside | None = None,
) -> Path:
    """Write a checkpoint; a kill at any moment leaves earlier ones intact.

    Args:
        out: the run's folder.
        step: number of optimizer steps taken.
        arrays: by name; ``model.*`` go to a file of their own.
        scalars: any JSON values.
        given_up: called between tensors; True ends the save.
        beside: other processes that write their parts at the same time; None: there are none.

    Returns:
        OUT/checkpoints/step-<step>.

    Raises:
        NonFinite: an array holds a NaN or an infinity.
        Interrupted: ``given_up`` returned True; no file of it is left on the disk.
        MinillmError: the disk refused; no file of it is left either.
    """
    if found := non_finite(arrays):
        raise NonFinite(f"{found} is no longer finite after step {step}; it was not saved")
    target = layout.folder(out, step)
    temporary = disk.aside(target)
    state = json.dumps(dict(scalars), indent=1, sort_keys=True, allow_nan=False).encode()
    if len(state) > strict.LARGEST:
        raise ValueError(f"{len(state):,} bytes of scalars could not be read back; save arrays")
    contents: dict[str, Iterable[disk.Buffer]] = {
        name: tensors.parts({n: a for n, a in arrays.items() if n.startswith("model.") == model})
        for name, model in ((layout.MODEL, True), (layout.OPTIMIZER, False))
    }
    contents[layout.STATE] = [state]

    def wanted(parts: Iterable[disk.Buffer]) -> Iterator[disk.Buffer]:
        for part in parts:
            if given_up():
                raise Interrupted(f"the checkpoint of step {step} was abandoned")
            yield part

    try:
        if not target.parent.is_dir():
            target.parent.mkdir()  # not its parents: a deleted run folder is not created again
            disk.sync(out)
        temporary.mkdir()
        with nullcontext(dict) if beside is None else beside(temporary, given_up) as theirs:
            written = {
                name: disk.stream(temporary / name, wanted(parts))
                for name, parts in contents.items()
            }
            written |= theirs()
        disk.write(temporary / layout.MANIFEST, manifest.encode(step, written))
        disk.sync(temporary)
        _give_name(temporary, target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, (Interrupted, NonFinite)) or not isinstance(error, Exception):
            raise
        size = sum(array.nbytes for array in arrays.values()) + len(state)
        raise _unwritten(target, step, size, error) from error
    return target


def _give_name(temporary: Path, target: Path) -> None:
    """Rename a complete checkpoint to its final name, replacing one that has the name already.

    A folder cannot replace another in one step. A kill between the two renames leaves both complete, and
    :func:`sweep` gives the old one its name back.
    """
    if not os.path.lexists(target):
        disk.rename(temporary, target)
        return
    old = disk.aside(target, "old")
    disk.rename(target, old)
    try:
        disk.rename(temporary, target)
    except BaseException:
        if not os.path.lexists(target):
            old.rename(target)
        raise
    disk.remove(old)


def _unwritten(target: Path, step: int, size: int, error: Exception) -> MinillmError:
    what = f"the checkpoint of step {step} could not be written: "
    if isinstance(error, MinillmError):  # another process has ended: the disk is not at fault
        return MinillmError(what + error.what, where=error.where or str(target), fix=error.fix)
    where = f"{target}; {size / 1e6:,.1f} MB are needed"
    with suppress(OSError):
        parent = target.parent if target.parent.is_dir() else target.parents[2]
        where += f", {shutil.disk_usage(parent).free / 1e6:,.1f} MB are free"
    full = any(os.strerror(code) in str(error) for code in FULL)  # also in another rank's words
    way = "make room (a lower checkpoint.keep needs less)" if full else "remove the cause"
    fix = f"earlier ones are intact; {way} and --resume, or continue training without it: "
    return MinillmError(what + str(error), where=where, fix=fix + "checkpoint.on_error=continue")


def retain(out: Path, keep: int, spare: Collection[int] = ()) -> list[Path]:
    """Remove checkpoints older than the newest ``keep`` that verify; return the removed paths.

    Those of the steps ``spare`` always stay.

    A checkpoint that does not verify is not counted, and is removed only once that many good ones exist.
    Every byte of the counted ones is read again each time: an earlier check proves nothing about the disk
    now, and an older checkpoint that is still good may be the last.
    """
    committed = layout.folders(out)
    good = 0
    for place, (_, path) in enumerate(committed):
        if len(committed) <= keep:
            return []
        if good == keep:
            return [_remove(old) for step, old in committed[place:] if step not in spare]
        good += not manifest.verify(path)
    return []


def discard(out: Path, after: int) -> list[Path]:
    """Remove the checkpoints of steps greater than ``after``, which a rewound run writes again.

    The newest goes first: a kill in between leaves the run closer to its target step.
    """
    return [_remove(path) for step, path in layout.folders(out) if step > after]


def sweep(out: Path) -> list[Path]:
    """Remove the leftovers in ``out`` of processes that died while saving; only its one trainer may."""
    for step, old in layout.replaced(out):
        target = layout.folder(out, step)
        if not os.path.lexists(target):
            disk.rename(old, target)  # the newer one never got its name
    found = layout.leftovers(out)
    for path in found:
        disk.remove(path)
    return found


def _remove(path: Path) -> Path:
    # renamed first: a kill in between leaves a folder to sweep, not half a checkpoint
    doomed = disk.aside(path)
    disk.rename(path, doomed)
    disk.remove(doomed)
    return path


def non_finite(arrays: Mapping[str, np.ndarray]) -> str | None:
    """Return the name of the first array that holds a NaN or an infinity."""
    for name, array in arrays.items():
        # min and max propagate NaN and need no mask as large as the array
        floats = array.dtype.kind == "f" and array.size
        if floats and not np.isfinite((array.min(), array.max())).all():
            return name
    return None


def archive_orphans(out: Path) -> Path | None:
    """Rename OUT/checkpoints if it holds checkpoints without a run; return its new path.

    They are kept, out of the way of the new run.
    """
    held = out / "checkpoints"
    if not layout.folders(out) and not any(held.glob("*.corrupt*")):
        return None
    n = 1
    while (target := out / f"checkpoints.before-{n}").exists():
        n += 1
    disk.rename(held, target)
    return target
