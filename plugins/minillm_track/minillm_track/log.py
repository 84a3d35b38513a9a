"""The event log that feeds a tracker: opened once, each step sent once, closed at the end."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

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
    Started,
    Stepped,
    Throughput,
    Unsaved,
)
from minillm_track.entries import figures, line

__all__ = ["KINDS", "Log", "Sink", "identity", "inside", "recorded"]

LONGEST = 1024
"""Maximum bytes of the file that holds a run's name."""

_NAME = re.compile(r"[^\x00-\x1f\x7f/]{0,255}-[0-9a-f]{8}")


KINDS: Mapping[str, type[Event]] = {
    kind.event: kind
    for kind in (
        *(Stepped, Evaluated, Sampled, Saved, Unsaved),
        *(Resumed, Skipped, Guarded, Rewound, Ended),
    )
}
_MEASURED = ("loss", "grad_norm", "val_loss")
"""Fields that are always numbers; metrics.jsonl has null for a non-finite value."""


def recorded(out: str) -> list[Event]:
    """Read the events so far of the run in ``out``, in order; empty without a metrics.jsonl.

    A run sends each step to a tracker once. If the tracker buffers writes, a kill loses the unwritten
    steps, and the resumed run does not send them again. metrics.jsonl has them: it is written line by
    line, and truncated to the checkpoint before the event of a resume.
    """
    path = Path(out) / "metrics.jsonl"
    if not path.exists():
        return []
    return list(_events(path.read_text("utf-8").splitlines()))


def _events(lines: list[str]) -> Iterator[Event]:
    for text in lines:
        data = json.loads(text)
        kind = KINDS.get(data["event"])
        if kind is not None:
            known = [one.name for one in fields(kind) if one.name in data]  # others keep defaults
            yield kind(**{name: _value(name, data[name]) for name in known})


def _value(name: str, value: Any) -> Any:
    if name == "tokens_per_second":
        return Throughput(**value)
    return math.nan if value is None and name in _MEASURED else value


class Sink(Protocol):
    """A tracker's open run.

    Attributes:
        forgets: whether entries from before a resume may be lost, so that they are sent again.
    """

    forgets: bool

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the numbers of a step."""

    def line(self, kind: str, step: int, text: str) -> None:
        """Log a line of text at a step; ``kind`` is the event's name.

        Lines of one kind arrive in order of steps. A checkpoint's line arrives late, once the checkpoint
        is on disk.
        """

    def back(self, step: int, to: int) -> None:
        """Revoke the entries after step ``to``: the run, at ``step``, rewinds to it."""

    def close(self, code: int) -> None:
        """Close the run; ``code`` is its exit code."""


class Log:
    """A filter that forwards events to a sink, opened at the first event after the run's start.

    Steps are those of metrics.jsonl: the first, every ``log.every``-th, and the last. Events without
    a preceding start of a run, such as an ablation's, are not logged.

    Args:
        open_run: opens the tracker's run, given the start event and the step to continue from, 0 for a
            new run.
    """

    def __init__(self, open_run: Callable[[Started, int], Sink]) -> None:
        self._open = open_run
        self._started: Started | None = None
        self._resumed: Resumed | None = None  # of this run
        self._sink: Sink | None = None
        self._held: Stepped | None = None  # the last step, if it was not due

    def __call__(self, event: Event) -> None:
        """Log one event."""
        if isinstance(event, Started):
            self._started, self._resumed, self._sink, self._held = event, None, None, None
            return
        if self._started is None:
            return
        if isinstance(event, Resumed):
            self._resumed = event
        if self._sink is None:
            self._sink = self._open(self._started, self._resumed.step if self._resumed else 0)
            if self._resumed and self._sink.forgets:
                self._send_again(self._sink, self._started.out, event)
        if isinstance(event, Stepped) and not self._due(event):
            self._held = event
            return
        if isinstance(event, Ended) and self._held is not None:
            self._send(self._sink, self._held)
        if isinstance(event, (Stepped, Rewound, Ended)):
            self._held = None
        self._send(self._sink, event)
        if isinstance(event, Ended):
            self._started = None
            self._sink.close(event.exit)

    def _send_again(self, sink: Sink, out: str, current: Event) -> None:
        """Resend the events before the current one, which is omitted where the file already has it."""
        earlier = recorded(out)
        if earlier and _place(earlier[-1]) == _place(current):
            earlier.pop()
        for event in earlier:
            self._send(sink, event)

    def _due(self, event: Stepped) -> bool:
        every = self._started.settings.get("log", {}).get("every", 1) if self._started else 1
        return event.step == 1 or event.step % every == 0

    def _send(self, sink: Sink, event: Event) -> None:
        step = getattr(event, "step", 0)
        if isinstance(event, Rewound):  # one that is sent again too: W&B's counter is ahead by it
            sink.back(event.step, event.to)
            step = event.to
        if numbers := figures(event):
            sink.figures(step, numbers)
        if text := line(event):
            sink.line(event.event, step, text)


def _place(event: Event) -> tuple[str, int]:
    """Return an event's kind and step: its numbers may differ in the file, as a NaN does from itself."""
    return event.event, getattr(event, "step", 0)


def inside(out: str, name: str) -> Path:
    """Return a path in a run's folder; symlinks may not lead out of it, as the folder may be untrusted.

    Raises:
        ValueError: a link leads out of the folder.
    """
    folder = Path(out).resolve()
    if not (folder / name).resolve().is_relative_to(folder):
        raise ValueError(f"{folder / name} leads out of the run's folder: nothing is written there")
    return Path(out) / name


def identity(out: str, tracker: str) -> str:
    """Return the tracker's name of the run in ``out``: generated once, stored there, and read on resume.

    Raises:
        ValueError: the stored file was not written by this function.
    """
    file = Path(out) / f"{tracker}.id"
    name = f"{Path(out).resolve().name}-{uuid4().hex[:8]}"
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # follows no link
    except FileExistsError:
        return _kept(file)
    with open(handle, "w", encoding="utf-8") as kept:
        kept.write(f"{name}\n")
    return name


def _kept(file: Path) -> str:
    """Read a run's name from a file, in bounded time; validate it, since a tracker deletes runs by name."""
    handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as kept:
        data = kept.read(LONGEST) if stat.S_ISREG(os.fstat(handle).st_mode) else b""
    name = data.decode("utf-8", "replace").strip()
    if not _NAME.fullmatch(name):
        raise ValueError(f"{file} does not hold the name of a run: delete it for a new one")
    return name
