"""metrics.jsonl: one event a line, on the disk as soon as it happened."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from minillm_core.train.events import Ended, Event, Stepped

__all__ = ["Metrics", "line"]


def line(event: Event) -> bytes:
    """The event as a line of JSON; what is not finite becomes null, which every reader knows."""
    return json.dumps(_finite(event.data()), allow_nan=False).encode() + b"\n"


class Metrics:
    """Writes events; a context manager.

    Args:
        path: the file, begun anew.
        every: steps between step events; the first and the last one are always there.
    """

    def __init__(self, path: Path, *, every: int = 1) -> None:
        # unbuffered: one write a line, so that a kill tears at most the last one
        self._file = path.open("wb", buffering=0)
        self._every = every
        self._held: Stepped | None = None

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


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(part) for part in value]
    return value
