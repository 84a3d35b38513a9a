"""A run's events, in the order in which a tracker wants them: opened once, each step once, closed."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from minillm_core import Ended, Event, Resumed, Rewound, Started, Stepped
from minillm_track.before import recorded
from minillm_track.told import figures, line

__all__ = ["Log", "Sink", "identity", "inside"]

LONGEST = 1024
"""Bytes of a file with a name."""

_NAME = re.compile(r"[^\x00-\x1f\x7f/]{0,255}-[0-9a-f]{8}")


class Sink(Protocol):
    """One tracker's run, open.

    Attributes:
        forgets: what was told before a run was resumed may not be there: it is told again.
    """

    forgets: bool

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Numbers of a step."""

    def line(self, kind: str, step: int, text: str) -> None:
        """What happened at a step, in words; ``kind`` is the event's name.

        Those of one kind come in the order of their steps; a checkpoint is told of late.
        """

    def back(self, step: int, to: int) -> None:
        """The run is at ``step`` and goes back to ``to``: what was told of later steps is void."""

    def close(self, code: int) -> None:
        """The run ended with an exit code."""


class Log:
    """Passes events on to a sink, which is opened at the first one behind the run's start.

    Steps are those of metrics.jsonl: the first, every ``log.every``-th, and the last. What comes
    from no run of its own, such as an ablation's steps, is not logged.

    Args:
        open_run: opens the tracker's run, given the run's start and the step that it goes on
            from: 0 for a new one.
    """

    def __init__(self, open_run: Callable[[Started, int], Sink]) -> None:
        self._open = open_run
        self._started: Started | None = None
        self._sink: Sink | None = None
        self._held: Stepped | None = None  # the last step, where it was not due

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, Started):
            self._started, self._sink, self._held = event, None, None
            return
        if self._started is None:
            return
        if self._sink is None:
            self._sink = self._open(self._started, event.step if isinstance(event, Resumed) else 0)
            if isinstance(event, Resumed) and self._sink.forgets:
                self._tell_again(self._sink, self._started.out, event)
        if isinstance(event, Stepped) and not self._due(event):
            self._held = event
            return
        if isinstance(event, Ended) and self._held is not None:
            self._tell(self._sink, self._held)
        if isinstance(event, (Stepped, Rewound, Ended)):
            self._held = None
        if isinstance(event, Rewound):
            self._sink.back(event.step, event.to)
        self._tell(self._sink, event)
        if isinstance(event, Ended):
            self._started = None
            self._sink.close(event.exit)

    def _tell_again(self, sink: Sink, out: str, resumed: Resumed) -> None:
        """All that happened before; the event in hand, which is in the file by now, is told as ever."""
        earlier = recorded(out)
        if earlier and earlier[-1] == resumed:
            earlier.pop()
        for event in earlier:
            self._tell(sink, event)

    def _due(self, event: Stepped) -> bool:
        every = self._started.settings.get("log", {}).get("every", 1) if self._started else 1
        return event.step == 1 or event.step % every == 0

    def _tell(self, sink: Sink, event: Event) -> None:
        step = event.to if isinstance(event, Rewound) else getattr(event, "step", 0)
        if numbers := figures(event):
            sink.figures(step, numbers)
        if text := line(event):
            sink.line(event.event, step, text)


def inside(out: str, name: str) -> Path:
    """A path in a run's folder, which may be somebody else's: no link leads out of it.

    Raises:
        ValueError: one does.
    """
    folder = Path(out).resolve()
    if not (folder / name).resolve().is_relative_to(folder):
        raise ValueError(f"{folder / name} leads out of the run's folder: nothing is written there")
    return Path(out) / name


def identity(out: str, tracker: str) -> str:
    """The tracker's name for the run in ``out``: made once, kept there, found again on resuming.

    Raises:
        ValueError: the file that keeps it is none that this function wrote.
    """
    file = Path(out) / f"{tracker}.id"
    name = f"{Path(out).resolve().name}-{uuid4().hex[:8]}"
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # no link is followed
    except FileExistsError:
        return _kept(file)
    with open(handle, "w", encoding="utf-8") as kept:
        kept.write(f"{name}\n")
    return name


def _kept(file: Path) -> str:
    """The name in a file, in bounded time; trackers find a run by it, and one of them removes it."""
    handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as kept:
        data = kept.read(LONGEST) if stat.S_ISREG(os.fstat(handle).st_mode) else b""
    name = data.decode("utf-8", "replace").strip()
    if not _NAME.fullmatch(name):
        raise ValueError(f"{file} does not hold the name of a run: delete it for a new one")
    return name
