"""metrics.jsonl: one event a line, on the disk as soon as it happened.

A run that goes back to a checkpoint, in a new process or at a spike, takes back what it wrote of
later steps, so that each step is there once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from minillm_core.checkpoint import disk
from minillm_core.train.events import Ended, Event, Rewound, Stepped

__all__ = ["METRICS", "Metrics", "cut", "line"]

METRICS = "metrics.jsonl"


def line(event: Event) -> bytes:
    """The event as a line of JSON; what is not finite becomes null, which every reader knows."""
    return json.dumps(_finite(event.data()), allow_nan=False).encode() + b"\n"


def cut(path: Path, step: int) -> list[dict[str, Any]]:
    """Take out of the file what was told of later steps, the end, and a torn last line.

    Readers see the file as it was or as it is now.

    Returns:
        The events that stay.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    kept: list[dict[str, Any]] = []
    stay: list[bytes] = []
    for one in lines:
        try:
            event = json.loads(one)
        except ValueError:
            continue
        if not one.endswith(b"\n") or not isinstance(event, dict):
            continue
        if event.get("event") != Ended.event and _is_of(event, step):
            kept.append(event)
            stay.append(one)
    disk.replace(path, b"".join(stay))
    return kept


class Metrics:
    """Writes events behind those that are there; a context manager.

    Args:
        path: the file.
        every: steps between step events; the first and the last one are always there.
    """

    def __init__(self, path: Path, *, every: int = 1) -> None:
        self._path = path
        self._file = self._open()
        self._every = every
        self._held: Stepped | None = None

    def _open(self) -> BinaryIO:
        # unbuffered: one write a line, so that a kill tears at most the last one
        return self._path.open("ab", buffering=0)

    def __call__(self, event: Event) -> None:
        """Write an event."""
        if isinstance(event, Stepped):
            first_or_due = event.step == 1 or event.step % self._every == 0
            self._held = None if first_or_due else event
            if not first_or_due:
                return
        elif isinstance(event, Ended) and self._held is not None:
            self._file.write(line(self._held))
            self._held = None
        elif isinstance(event, Rewound):
            self._held = None
            self._file.close()
            cut(self._path, event.to)
            self._file = self._open()
        self._file.write(line(event))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def _is_of(event: Mapping[str, Any], step: int) -> bool:
    """Whether the state after ``step`` knows of the event: of going back, once it went on again."""
    if event.get("event") == Rewound.event:
        return isinstance(event.get("to"), int) and event["to"] < step
    at = event.get("step", 0)
    return isinstance(at, int) and at <= step


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(part) for part in value]
    return value
