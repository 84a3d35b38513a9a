"""What happened before a run was resumed, from the metrics.jsonl in its folder.

A tracker hears of a step once. Where it writes late, a kill takes what it had heard, and the run
that goes on from a checkpoint would never tell of those steps again. minillm's own file has them:
it is written line by line, and cut to the checkpoint before anybody is told that the run goes on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from minillm_core import (
    Ended,
    Evaluated,
    Event,
    Guarded,
    Resumed,
    Rewound,
    Sampled,
    Saved,
    Skipped,
    Stepped,
    Throughput,
    Unsaved,
)

__all__ = ["recorded"]

KINDS: Mapping[str, type[Event]] = {
    kind.event: kind
    for kind in (
        Stepped,
        Evaluated,
        Sampled,
        Saved,
        Unsaved,
        Resumed,
        Skipped,
        Guarded,
        Rewound,
        Ended,
    )
}
MEASURED = ("loss", "grad_norm", "val_loss")
"""Numbers that every event of theirs has; where they were not finite, the file has null."""


def recorded(out: str) -> list[Event]:
    """The events of the run in ``out`` so far, in order; none where there is no file."""
    path = Path(out) / "metrics.jsonl"
    if not path.exists():
        return []
    return list(_events(path.read_text("utf-8").splitlines()))


def _events(lines: list[str]) -> Iterator[Event]:
    for line in lines:
        data = json.loads(line)
        kind = KINDS.get(data["event"])
        if kind is not None:
            yield kind(**{one.name: _value(one.name, data[one.name]) for one in fields(kind)})


def _value(name: str, value: Any) -> Any:
    if name == "tokens_per_second":
        return Throughput(**value)
    return math.nan if value is None and name in MEASURED else value
