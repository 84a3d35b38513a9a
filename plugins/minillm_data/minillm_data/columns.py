"""Columns: growing files of fixed-size records that survive a kill of the command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Self

import numpy as np

from minillm_core import DataError


class Column:
    """A growing file of records; a context manager.

    Appended records are durable once :meth:`sync` has returned and the caller has recorded ``length``.

    Args:
        path: the file; created if missing.
        dtype: dtype of a record's numbers.
        width: numbers per record.
        length: recorded number of records; any further ones, left by a kill, are truncated.

    Attributes:
        length: current number of records.

    Raises:
        DataError: the file holds fewer than ``length`` records.
        OSError: the file cannot be opened.
    """

    def __init__(
        self, path: Path, dtype: type[np.generic], width: int = 1, length: int = 0
    ) -> None:
        self.path, self.length = path, length
        self._dtype, self._width = np.dtype(dtype), width
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        self._record = self._dtype.itemsize * width
        if os.fstat(self._file).st_size < length * self._record:
            os.close(self._file)
            raise DataError(
                "a file of the unfinished work was cut short",
                where=str(path),
                fix=f"remove {path.parent} and start again",
            )
        os.ftruncate(self._file, length * self._record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._file)

    def append(self, records: np.ndarray) -> None:
        """Append records: (n,), or (n, width).

        Raises:
            OSError: they cannot be written.
        """
        self.put(self.length, records)
        self.length += len(records)

    def put(self, start: int, records: np.ndarray) -> None:
        """Overwrite records from index ``start`` on.

        Raises:
            OSError: they cannot be written.
        """
        data = np.ascontiguousarray(records, self._dtype).reshape(-1).view(np.uint8).data
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], start * self._record + done)

    def sync(self) -> None:
        """Flush all records to disk (fsync)."""
        os.fsync(self._file)

    def read(self, start: int = 0, end: int | None = None) -> np.ndarray:
        """Read records into memory: (n,), or (n, width).

        Raises:
            OSError: they cannot be read.
        """
        count = (self.length if end is None else end) - start
        found = np.empty((count, self._width) if self._width > 1 else count, self._dtype)
        data, done = found.reshape(-1).view(np.uint8).data, 0
        while done < len(data):
            got = os.preadv(self._file, [data[done:]], start * self._record + done)
            if not got:
                raise OSError(f"{self.path} was cut short")
            done += got
        return found

    def mapped(self, mode: Literal["r", "r+"] = "r") -> np.ndarray:
        """Memory-map the records, by default read-only: (length, width)."""
        shape = (self.length, self._width)
        if not self.length:
            return np.zeros(shape, self._dtype)
        return np.asarray(np.memmap(self.path, self._dtype, mode, shape=shape))
