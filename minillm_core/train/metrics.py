"""metrics.jsonl: one event a line, written as it happens.

A run that returns to a checkpoint, on resume or at a spike, removes the lines of later steps, so that
each step is there once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from minillm_core import disk, strict
from minillm_core.disk import read_lines
from minillm_core.errors import MinillmError, Refusal
from minillm_core.text import finite
from minillm_core.train.events import Ended, Event, Rewound, Stepped
from minillm_core.train.record import unwritable

METRICS = "metrics.jsonl"
LONGEST = 1 << 20  # most bytes of a line to read; ours have a few hundred
LARGEST = 1 << 32  # most bytes of the file to read: some ten million steps
MOST = 50_000  # most events of steps, and of others, held in memory
FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def line(event: Event) -> bytes:
    """Encode the event as a line of JSON; numbers that are not finite become null."""
    return json.dumps(finite(event.data()), allow_nan=False).encode() + b"\n"


def events(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield the lines and their events, one at a time; None for a truncated line or no event.

    Raises:
        FileNotFoundError: there is no such file.
        Refusal: it is a link, not a regular file, or larger than a run can write.
    """
    try:
        for text in read_lines(path, longest=LONGEST, limit=LARGEST):
            event = None
            if text.endswith(b"\n"):
                with suppress(ValueError):
                    event = strict.parse(text)
            yield text, event
    except ValueError as error:
        raise Refusal(
            f"the events of the run cannot be read: {error}",
            where=str(path),
            fix="move it away: without it the run continues, and only its history is lost",
        ) from error


def read_events(out: Path) -> Iterator[Mapping[str, Any] | None]:
    """Yield the events of a run's metrics.jsonl; None for a truncated line.

    Raises:
        Refusal: the file is a link, not a regular file, or larger than a run can write.
    """
    try:
        yield from (event for _, event in events(out / METRICS))
    except FileNotFoundError:  # the run has not begun
        return


def truncate(path: Path, step: int) -> list[dict[str, Any]]:
    """Remove events of later steps, the end, and a truncated last line from the file.

    Readers see the old file or the new one. It may be large, and is not held in memory.

    Returns:
        The remaining events, in order; some of them, if there are very many.

    Raises:
        Refusal: as :func:`events`.
    """
    steps: list[tuple[int, dict[str, Any]]] = []
    others: list[tuple[int, dict[str, Any]]] = []

    def stay() -> Iterator[bytes]:
        for place, (text, event) in enumerate(events(path)):
            if event is None or event.get("event") == Ended.event or not _is_of(event, step):
                continue
            held = steps if event.get("event") == Stepped.event else others
            held.append((place, event))
            thin(held)
            yield text

    with unwritable(path), suppress(FileNotFoundError):
        disk.replace(path, stay())
    return [event for _, event in sorted(steps + others, key=lambda one: one[0])]


def thin(held: list[Any]) -> None:
    """Drop every second item of a list that is too long to hold; the newest stays."""
    if len(held) > MOST:
        del held[len(held) % 2 :: 2]


def add(path: Path, event: Mapping[str, Any]) -> None:
    """Append an event to those of a run, which may be training: each line is one write.

    Raises:
        OSError: the file cannot be written to, or is a link.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with open(os.open(path, flags), "r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
        file.write(b"\n" * torn + json.dumps(finite(event), allow_nan=False).encode() + b"\n")


class Metrics:
    """A writer that appends events to the file; a context manager.

    Args:
        path: the file.
        every: steps between step events; the first and the last one are always written.
    """

    def __init__(self, path: Path, *, every: int = 1) -> None:
        self._path = path
        self._file = self._open()
        self._every = every
        self._held: Stepped | None = None

    def _open(self) -> BinaryIO:
        # unbuffered: one write a line, so that a kill tears at most the last one
        return open(os.open(self._path, FLAGS, 0o666), "ab", buffering=0)

    def check(self) -> None:
        """Refuse to append to a file that no longer has its name in the folder.

        Raises:
            MinillmError: the file was removed, moved or replaced while it was open.
        """
        with suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(self._path.lstat(), os.fstat(self._file.fileno())):
                return
        raise MinillmError(
            f"{self._path} was removed or replaced while this run was training",
            where=str(self._path),
            fix="leave the files of a run alone while it lasts; --resume continues from the last "
            "checkpoint",
        )

    def __call__(self, event: Event) -> None:
        """Write an event.

        Raises:
            MinillmError: the disk refused.
        """
        if isinstance(event, Stepped):
            self._held = None if event.step == 1 or event.step % self._every == 0 else event
            if self._held is not None:
                return
        if isinstance(event, Rewound):
            self._held = None
            self._file.close()
            truncate(self._path, event.to)
            self._file = self._open()
        with unwritable(self._path):
            if isinstance(event, Ended) and self._held is not None:
                self._file.write(line(self._held))
            self._file.write(line(event))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _is_of(event: Mapping[str, Any], step: int) -> bool:
    """Return whether the state after ``step`` includes the event; a rewind only once a later step ran."""
    if event.get("event") == Rewound.event:
        return isinstance(event.get("to"), int) and event["to"] < step
    at = event.get("step", 0)
    return isinstance(at, int) and at <= step
