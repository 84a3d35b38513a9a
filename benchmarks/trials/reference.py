"""The uninterrupted run that every disturbed and resumed one must equal."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.trials.compare import differences, events
from benchmarks.trials.forked import import_all, modules_of
from benchmarks.trials.tiny_run import TinyRun

__all__ = ["Reference", "make_reference", "watch_checkpoints"]

TOUCHES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
"""Audit events: the ways in which Python code opens or changes files and folders."""


@dataclass(frozen=True)
class Reference:
    """The facts of the reference run.

    Attributes:
        run: starts another one.
        out: its folder.
        seconds: from the fork to its end.
        touches: number of audit events on its checkpoints.
        saves: number of checkpoints that it wrote.
        save_seconds: median of a save.
    """

    run: TinyRun
    out: Path
    seconds: float
    touches: int
    saves: int
    save_seconds: float


def make_reference(run: TinyRun) -> Reference:
    """Run it twice: a cold run whose imports this process repeats, then the reference; they must agree.

    Raises:
        RuntimeError: they differ, or a run failed.
    """
    scout, out = (run.folder / f"{name}-{run.backend}" for name in ("scout", "reference"))
    modules, touches = run.folder / "modules.json", run.folder / "touches.json"
    _to_the_end(run, scout, last=partial(modules_of, modules))
    import_all(json.loads(modules.read_text()))

    counted = count(1)

    def note(number: int) -> None:
        next(counted)

    child = run.start(
        out,
        first=lambda: watch_checkpoints(out, note),
        last=lambda: touches.write_text(str(next(counted) - 1)),
    )
    _check(run, out, child.wait())
    number = int(touches.read_text())
    seconds = min(_to_the_end(run, run.folder / f"timed-{n}-{run.backend}") for n in range(2))
    if different := differences(scout, out):
        raise RuntimeError(f"two uninterrupted runs differ: {different[0]}")
    saves = [event["seconds"] for event in events(out, "save")]
    return Reference(run, out, seconds, number, len(saves), statistics.median(saves))


def watch_checkpoints(out: Path, note: Callable[[int], None]) -> None:
    """Call ``note(n)`` before the n-th access to OUT/checkpoints by this process, from 1."""
    folder, numbers = str(out / "checkpoints"), count(1)

    def hook(event: str, arguments: tuple) -> None:
        if event in TOUCHES and _concerns(folder, event, arguments):
            note(next(numbers))

    import sys

    sys.addaudithook(hook)


def _concerns(folder: str, event: str, arguments: tuple) -> bool:
    if event in ("os.remove", "os.rmdir") and arguments[1] != -1:
        return True  # by a descriptor of its folder, as in rmtree
    paths = (
        os.fsdecode(one) for one in arguments[:2] if isinstance(one, (str, bytes, os.PathLike))
    )
    return any(path.startswith(folder) for path in paths)


def _to_the_end(run: TinyRun, out: Path, last: Callable[[], None] = lambda: None) -> float:
    import time

    began = time.perf_counter()
    _check(run, out, run.start(out, last=last).wait())
    return time.perf_counter() - began


def _check(run: TinyRun, out: Path, code: int) -> None:
    if code:
        raise RuntimeError(f"an uninterrupted run ended with {code}:\n{run.said(out)}")
