"""The history of a run, read from its folder: while it trains, after its end, and after a kill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from minillm_core import (
    Ended,
    Evaluated,
    Guarded,
    Resumed,
    Rewound,
    Sampled,
    Skipped,
    Stepped,
    Unsaved,
)
from minillm_core.studies import read_events, read_record, thin

Json = Mapping[str, Any]
Point = tuple[float, float]

FEWEST = 5
"""Minimum points per mean in a smoothed line, so that its last point is not a raw value."""

SHOWN = {Stepped.event, Evaluated.event, Sampled.event, "judged"}
TROUBLE = {kind.event for kind in (Guarded, Resumed, Rewound, Skipped, Unsaved, Ended)}


@dataclass(frozen=True)
class Moment:
    """A step or an evaluation, with its position in the run."""

    step: int
    tokens: int
    seconds: float  # of training, summed over all processes of the run
    event: Json


@dataclass(frozen=True)
class History:
    """A run's record and events."""

    out: Path
    record: Json  # run.json
    steps: list[Moment] = field(default_factory=list)
    evaluations: list[Moment] = field(default_factory=list)
    samples: list[Json] = field(default_factory=list)  # text generated from prompts
    judged: list[Json] = field(default_factory=list)  # results of a later `minillm eval`
    notable: list[Json] = field(default_factory=list)  # warnings and errors
    torn: int = 0  # unparsable lines, such as the last one of a killed run
    strange: int = 0  # events without a name, or whose step, text or figures are of another type

    def series(self, key: str, x: str, *, evaluations: bool = False) -> list[Point]:
        """List (x, value of ``key``) of the events that have it; ``x``: tokens, seconds or step."""
        moments = self.evaluations if evaluations else self.steps
        return [
            (float(getattr(one, x)), float(number))
            for one in moments
            if isinstance(number := _at(one.event, key), int | float)
        ]


def read_history(out: Path) -> History:
    """Read run.json and metrics.jsonl; the second may be truncated or missing.

    Raises:
        Refusal: OUT holds no run, or a file is not in the format of a run.
    """
    history = History(out, read_record(out))
    torn = strange = 0
    seconds, tokens, last = 0.0, 0, 0
    for event in read_events(out):
        for held in (history.steps, history.evaluations, history.notable):
            thin(held)
        if event is None:
            torn += 1
            continue
        kind, step = event.get("event"), event.get("step")
        if not isinstance(kind, str):
            strange += 1
        elif kind == Stepped.event and isinstance(step, int):
            # if only every tenth step is logged, it represents those before it
            seconds += float(event.get("step_seconds") or 0.0) * (
                max(1, step - last) if last else 1
            )
            tokens, last = int(event.get("tokens") or 0), step
            history.steps.append(Moment(step, tokens, seconds, event))
        elif kind == Evaluated.event and isinstance(step, int):
            history.evaluations.append(Moment(step, tokens, seconds, event))
        elif kind == Sampled.event and isinstance(event.get("text"), str):
            history.samples.append(event)
        elif kind == "judged" and isinstance(event.get("figures"), Mapping):
            history.judged.append(event)
        elif kind in SHOWN:
            strange += 1
        elif kind in TROUBLE and not (kind == Ended.event and event.get("exit") == 0):
            history.notable.append(event)
    return replace(history, torn=torn, strange=strange)


def thinned(points: Sequence[Point], most: int = 240) -> list[Point]:
    """Downsample to at most 2 x ``most`` points, keeping local minima and maxima."""
    if len(points) <= 2 * most:
        return list(points)
    found: list[Point] = []
    for bucket in _buckets(points, most):
        low, high = min(bucket, key=_height), max(bucket, key=_height)
        found += sorted({low, high})
    return found


def smoothed(points: Sequence[Point], most: int = 24) -> list[Point]:
    """Average neighbours into at most ``most`` points; leave few points unchanged."""
    if len(points) < 2 * FEWEST:
        return list(points)
    return [
        (sum(x for x, _ in bucket) / len(bucket), sum(y for _, y in bucket) / len(bucket))
        for bucket in _buckets(points, min(most, len(points) // FEWEST))
    ]


def _buckets(points: Sequence[Point], most: int) -> Iterator[Sequence[Point]]:
    ends = [round(n * len(points) / most) for n in range(most + 1)]
    for start, end in pairwise(ends):
        yield points[start:end]


def _height(point: Point) -> float:
    return point[1]


def _at(event: Json, key: str) -> Any:
    """Look up a path such as ``tokens_per_second.real`` in an event."""
    found: Any = event
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return None if isinstance(found, bool) else found
