"""A tracker's entries: an event's metrics by name, its line of text, a run's settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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
    Unsaved,
)

__all__ = ["figures", "flat", "line"]


def figures(event: Event) -> dict[str, float]:
    """Return the metrics of a step or an evaluation by name, omitting unknown values."""
    if isinstance(event, Stepped):
        found = {
            "train/loss": event.loss,
            "train/lr": event.lr,
            "train/grad_norm": event.grad_norm,
            "train/tokens": event.tokens,
            **{f"train/terms/{key}": value for key, value in event.terms.items()},
            "speed/tokens_per_second": event.tokens_per_second.real,
            "speed/step_seconds": event.step_seconds,
            "speed/mfu": event.mfu,
            "memory/peak_bytes": event.peak_bytes,
        }
    elif isinstance(event, Evaluated):
        found = {"val/loss": event.val_loss, "val/bits_per_byte": event.bits_per_byte}
    else:
        found = {}
    return {name: float(value) for name, value in found.items() if value is not None}


_LINES: Mapping[type[Event], Callable[[Any], str]] = {
    Sampled: lambda e: f"sample at step {e.step}: {e.prompt!r} is continued with {e.text!r}",
    Saved: lambda e: f"checkpoint {e.path} ({e.seconds:.1f} s)",
    Unsaved: lambda e: f"no checkpoint: {e.reason}",
    Resumed: lambda e: f"resumed from {e.path}",
    Skipped: lambda e: f"a batch without a label was passed over ({e.skipped} so far)",
    Guarded: lambda e: f"no update: loss {e.loss:g}, gradients' norm {e.grad_norm:g}",
    Rewound: lambda e: f"loss {e.loss:g}: back to step {e.to}, {e.skipped} batches passed over",
    Ended: lambda e: f"ended after {e.seconds:.0f} s, exit {e.exit}",
}


def line(event: Event) -> str | None:
    """Describe an event in a line of text; None for events that have metrics."""
    describe = _LINES.get(type(event))
    return describe(event) if describe else None


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, bool | float | str]:
    """Flatten settings: ``{"train": {"lr": 0.1}}`` -> ``{"train.lr": 0.1}``; lists and None as JSON."""
    found: dict[str, bool | float | str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            plain = isinstance(value, (bool, int, float, str))
            found[prefix + key] = value if plain else json.dumps(value)
    return found
