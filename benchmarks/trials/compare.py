"""Comparison of two runs: weights, optimizer state, scalars and losses, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core.checkpoint import layout
from minillm_core.checkpoint.manifest import verify
from minillm_core.checkpoint.read import Checkpoint

__all__ = ["broken", "differences", "events", "identical", "newest_step", "of_checkpoints", "state"]

CLOCK = {"elapsed_seconds"}
"""Scalars of a checkpoint that are measured times."""

MEASURED = {"tokens_per_second", "step_seconds", "mfu", "peak_bytes"}
"""Measured fields of a step event."""


def differences(reference: Path, out: Path) -> list[str]:
    """List the differences of an interrupted and resumed run from an uninterrupted one."""
    return [
        *of_checkpoints(reference, out, _of_pair),
        *_of_events(reference, out, "step"),
        *_of_events(reference, out, "eval"),
        *_of_the_rest(reference, out),
    ]


def state(out: Path) -> str:
    """Return the state of a run's checkpoints: ``none``, ``whole``, or ``corrupt`` if any does not verify."""
    found = [path for _, path in layout.folders(out)]
    if any(verify(path) for path in found):
        return "corrupt"
    return "whole" if found else "none"


def newest_step(out: Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    return max((step for step, _ in layout.folders(out)), default=0)


def broken(out: Path) -> list[str]:
    """List faults that a kill must never cause: an invalid checkpoint, or fewer than were announced."""
    wrong = ["a checkpoint under its final name does not verify"] if state(out) == "corrupt" else []
    told = max((event["step"] for event in events(out, "save")), default=0)
    if newest_step(out) < told:
        wrong.append(f"step {told} was told as saved, the newest is {newest_step(out)}")
    return wrong


def events(out: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of one name in metrics.jsonl, without a truncated last line."""
    path = out / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == name]


def of_checkpoints(
    reference: Path, out: Path, of_pair: Callable[[Checkpoint, Checkpoint], Iterable[str]]
) -> Iterator[str]:
    """List the differences of two runs' checkpoints: existence, damage, and the results of ``of_pair``."""
    wanted, found = (
        {path.name: Checkpoint(path, step) for step, path in layout.folders(each)}
        for each in (reference, out)
    )
    if wanted.keys() != found.keys():
        yield f"checkpoints {', '.join(found) or 'none'} instead of {', '.join(wanted)}"
    for name in sorted(wanted.keys() & found.keys()):
        if reasons := verify(found[name].path):
            yield f"{name} does not verify: {reasons[0]}"
            continue
        yield from (f"{name}: {text}" for text in of_pair(wanted[name], found[name]))


def _of_pair(reference: Checkpoint, checkpoint: Checkpoint) -> Iterator[str]:
    wanted, found = reference.arrays(), checkpoint.arrays()
    if wanted.keys() != found.keys():
        yield f"other arrays: {sorted(wanted.keys() ^ found.keys())}"
    for name in sorted(wanted.keys() & found.keys()):
        if not identical(wanted[name], found[name]):
            yield f"{name} differs"
    a, b = (
        {key: value for key, value in one.scalars.items() if key not in CLOCK}
        for one in (reference, checkpoint)
    )
    changed = [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]
    yield from (f"{key} is {b.get(key)}, not {a.get(key)}" for key in changed)


def identical(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays are bitwise equal, including dtype and shape."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _of_events(reference: Path, out: Path, name: str) -> Iterator[str]:
    wanted, found = (
        [{k: v for k, v in event.items() if k not in MEASURED} for event in events(each, name)]
        for each in (reference, out)
    )
    numbers = [[event["step"] for event in each] for each in (wanted, found)]
    if numbers[0] != numbers[1]:
        yield f"metrics.jsonl: {name} events of steps {numbers[1]}"
        return
    for a, b in zip(wanted, found, strict=True):
        if a != b:
            yield f"metrics.jsonl: {b} instead of {a}"


def _of_the_rest(reference: Path, out: Path) -> Iterator[str]:
    a, b = ((each / "tokenizer.json").read_bytes() for each in (reference, out))
    if a != b:
        yield "tokenizer.json differs"
    if (code := json.loads((out / "run.json").read_bytes())["exit"]) != 0:
        yield f"run.json: exit {code}"
    left = [str(path.relative_to(out)) for path in out.rglob("*.tmp-*")]
    if left:
        yield f"left over: {', '.join(sorted(left))}"
