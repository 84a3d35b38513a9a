"""Reading source files: opened through their compression, counted, every failure named."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from minillm_core.errors import DataError

Progress = Callable[[str, int, int], None]
"""``progress(what, done, total)``, in bytes; total 0: unknown. Called when a phase begins, with
nothing done, then several times a second, from one thread."""

PACKINGS: dict[str, Callable[[Any], io.BufferedIOBase]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw, mode="rb"),
    ".xz": lambda raw: lzma.LZMAFile(raw, "rb"),  # noqa: SIM115 (opened() closes it)
}
"""Suffix -> what unpacks it."""

_BUFFER = 1 << 18


def ticker(progress: Progress | None, what: str, total: int) -> Callable[[int], None]:
    """Begin a phase: the function to call with each number of bytes that is done, or with 0."""
    if progress is None:
        return lambda count: None
    done = 0

    def tick(count: int) -> None:
        nonlocal done
        done += count
        progress(what, done, total)

    tick(0)
    return tick


@dataclass
class Reading:
    """The state of reading files: the bound of ids, the progress, and the notes taken.

    Attributes:
        vocab: ids must be smaller.
        tick: called with the number of bytes just read from a file.
        notes: "left out: blank lines", "cut: ..." -> how often.
    """

    vocab: int
    tick: Callable[[int], None] = lambda count: None
    notes: Counter[str] = field(default_factory=Counter)


class _Counted(io.FileIO):
    """A file that reports how much of it was read."""

    def __init__(self, path: Path, tick: Callable[[int], None]) -> None:
        super().__init__(path, "rb")
        self._tick = tick

    def readinto(self, buffer, /) -> int | None:
        count = super().readinto(buffer)
        self._tick(count or 0)
        return count

    def readall(self) -> bytes:
        data = super().readall()
        self._tick(len(data))
        return data


@contextmanager
def opened(path: Path, packing: str, reading: Reading) -> Iterator[io.BufferedReader]:
    """Open a source file for its unpacked bytes.

    Args:
        path: a regular file.
        packing: a key of PACKINGS, or nothing for a file that is not packed.
        reading: whose ``tick`` counts the file's own bytes.

    Raises:
        DataError: it cannot be opened, read or unpacked.
    """
    try:
        with io.BufferedReader(_Counted(path, reading.tick), _BUFFER) as raw:
            if packing:
                with PACKINGS[packing](raw) as unpacked:
                    yield io.BufferedReader(unpacked, _BUFFER)  # type: ignore[arg-type]
            else:
                yield cast("io.BufferedReader", raw)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(
            f"the {packing} file is damaged or cut short: {error}",
            where=str(path),
            fix="fetch or pack it again",
        ) from error
    except OSError as error:
        raise DataError(
            f"the file cannot be read: {error.strerror or error}",
            where=str(path),
            fix="check that it exists and that you may read it",
        ) from error
