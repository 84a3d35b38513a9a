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
from typing import Any

from minillm_core.errors import DataError

__all__ = ["PACKINGS", "Progress", "Reading", "opened"]

Progress = Callable[[str, int, int], None]
"""``progress(what, done, total)``, in bytes of source files; called often, from one thread."""

PACKINGS: dict[str, Callable[[Any], io.BufferedIOBase]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw, mode="rb"),
    ".xz": lambda raw: lzma.LZMAFile(raw, "rb"),  # noqa: SIM115 (opened() closes it)
}
"""Suffix -> what unpacks it."""

_BUFFER = 1 << 20


@dataclass
class Reading:
    """What every reader needs to know, and what it found that somebody should be told.

    Attributes:
        vocab: ids must be smaller.
        tick: called with the number of bytes just read from a file.
        notes: what was left out -> how often.
    """

    vocab: int
    tick: Callable[[int], None] = lambda count: None
    notes: Counter[str] = field(default_factory=Counter)


class _Counted(io.FileIO):
    """A file that tells how much of it was read."""

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
def opened(path: Path, packing: str, reading: Reading) -> Iterator[io.BufferedIOBase]:
    """A source file's bytes, unpacked.

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
                yield raw
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
