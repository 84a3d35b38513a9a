"""What a run's folder tells of it, while it goes on, after it, and after a kill."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm_core.train.events import (
    Ended,
    Evaluated,
    Guarded,
    Resumed,
    Rewound,
    Skipped,
    Stepped,
    Unsaved,
)
from minillm_core.train.metrics import METRICS
from minillm_core.train.record import read_record

__all__ = ["History", "read_history", "smoothed", "thinned"]

Json = Mapping[str, Any]
Point = tuple[float, float]

TROUBLE = {kind.event for kind in (Guarded, Resumed, Rewound, Skipped, Unsaved, Ended)}


@dataclass(frozen=True)
class Told:
    """A step or an evaluation, and how far the run was."""

    step: int
    tokens: int
    seconds: float  # of training, added up over all processes
    event: Json


@dataclass(frozen=True)
class History:
    """A run as its files tell it."""

    out: Path
    record: Json  # run.json
    steps: list[Told] = field(default_factory=list)
    evaluations: list[Told] = field(default_factory=list)
    notable: list[Json] = field(default_factory=list)  # what went otherwise than it should
    torn: int = 0  # lines that are no events, as the last one of a run that was killed

    def series(self, key: str, x: str, *, evaluations: bool = False) -> list[Point]:
        """(x, a number of the events), where there is one; ``x``: tokens, seconds or step."""
        told = self.evaluations if evaluations else self.steps
        return [
            (float(getattr(one, x)), float(number))
            for one in told
            if isinstance(number := _at(one.event, key), int | float)
        ]


def read_history(out: Path) -> History:
    """Read run.json and metrics.jsonl; the second may be torn, or not be there yet.

    Raises:
        Refusal: OUT holds no run.
    """
    history = History(out, read_record(out))
    torn = 0
    seconds, tokens, last = 0.0, 0, 0
    for event in _events(out / METRICS):
        if event is None:
            torn += 1
            continue
        kind, step = event.get("event"), event.get("step")
        if kind == Stepped.event and isinstance(step, int):
            # where only every tenth step is written it stands for those before it
            seconds += float(event.get("step_seconds") or 0.0) * max(1, step - last)
            tokens, last = int(event.get("tokens") or 0), step
            history.steps.append(Told(step, tokens, seconds, event))
        elif kind == Evaluated.event and isinstance(step, int):
            history.evaluations.append(Told(step, tokens, seconds, event))
        elif kind in TROUBLE and not (kind == Ended.event and event.get("exit") == 0):
            history.notable.append(event)
    return History(out, history.record, history.steps, history.evaluations, history.notable, torn)


def thinned(points: Sequence[Point], most: int = 240) -> list[Point]:
    """At most 2 x ``most`` points that reach as far up and down as all of them do."""
    if len(points) <= 2 * most:
        return list(points)
    found: list[Point] = []
    for bucket in _buckets(points, most):
        low, high = min(bucket, key=_height), max(bucket, key=_height)
        found += sorted({low, high})
    return found


def smoothed(points: Sequence[Point], most: int = 80) -> list[Point]:
    """Means of neighbours, at most ``most``; the points themselves where there are few."""
    if len(points) <= most:
        return list(points)
    return [
        (sum(x for x, _ in bucket) / len(bucket), sum(y for _, y in bucket) / len(bucket))
        for bucket in _buckets(points, most)
    ]


def _buckets(points: Sequence[Point], most: int) -> Iterator[Sequence[Point]]:
    size = -(-len(points) // most)
    for start in range(0, len(points), size):
        yield points[start : start + size]


def _height(point: Point) -> float:
    return point[1]


def _at(event: Json, key: str) -> Any:
    """``tokens_per_second.real`` of an event."""
    found: Any = event
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return None if isinstance(found, bool) else found


def _events(path: Path) -> Iterator[Json | None]:
    """The lines as events; None for one that is none."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        yield event if isinstance(event, dict) and line.endswith(b"\n") else None
