"""A checkpoint's files, each opened once.

What is read is what was verified, whatever happens to the names meanwhile: a trainer that removes
the checkpoint takes its name away, and the bytes stay until the last reader lets go of them.
"""

from __future__ import annotations

import os
import stat
import weakref
from pathlib import Path
from types import TracebackType

import xxhash

from minillm_core.checkpoint import layout

__all__ = ["Opened"]

CHUNK = 1 << 22  # bytes hashed at a time
FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # no link, and no pipe's wait


class Opened:
    """The files of a checkpoint's folder; closed at the latest when nobody refers to it.

    Args:
        folder: the checkpoint.

    Raises:
        ValueError: one of its files is missing or is no file; the reason.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handles: dict[str, int] = {}
        self._close = weakref.finalize(self, _close, self._handles)
        try:
            place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(f"{folder.name}: {error.strerror}") from error
        try:
            for name in (*layout.FILES, layout.MANIFEST):
                self._handles[name] = _open(name, place)
        except ValueError:
            self.close()
            raise
        finally:
            os.close(place)

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return os.fstat(self._handles[name]).st_size

    def fill(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with a file's bytes from ``offset`` on.

        Raises:
            ValueError: there are not so many, or they cannot be read.
        """
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._handles[name], [buffer[done:]], offset + done)
            except OSError as error:
                raise ValueError(f"{name}: {error.strerror}") from error
            if not count:
                raise ValueError(f"{name}: ends before byte {offset + len(buffer):,}")
            done += count

    def content(self, name: str, limit: int) -> bytes:
        """All of a small file.

        Raises:
            ValueError: it has more than ``limit`` bytes, or cannot be read.
        """
        size = self.size(name)
        if size > limit:
            raise ValueError(f"{name}: more than {limit:,} bytes")
        buffer = bytearray(size)
        self.fill(name, 0, memoryview(buffer))
        return bytes(buffer)

    def digest(self, name: str) -> str:
        """xxh3-128 of a file.

        Raises:
            ValueError: it cannot be read.
        """
        digest, size, place = xxhash.xxh3_128(), self.size(name), 0
        buffer = memoryview(bytearray(min(CHUNK, size)))
        while place < size:
            chunk = buffer[: size - place]
            self.fill(name, place, chunk)
            digest.update(chunk)
            place += len(chunk)
        return digest.hexdigest()

    def close(self) -> None:
        """Let go of the files."""
        self._close()

    def __enter__(self) -> Opened:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _open(name: str, folder: int) -> int:
    try:
        handle = os.open(name, FLAGS, dir_fd=folder)
    except FileNotFoundError:
        raise ValueError(f"{name}: missing") from None
    except OSError as error:
        raise ValueError(
            f"{name}: not a regular file, or not readable: {error.strerror}"
        ) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{name}: not a regular file")
    return handle


def _close(handles: dict[str, int]) -> None:
    while handles:
        os.close(handles.popitem()[1])
