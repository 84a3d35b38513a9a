"""Files of a run: written atomically, read in bounded time and memory.

On macOS ``os.fsync`` hands the data to the drive without flushing the drive's own cache; a power
loss there can still cost the newest checkpoint, never an older one.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

Buffer = bytes | memoryview

FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: opening a pipe does not block
KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode), "a device"),
)


class Written(NamedTuple):
    """The size and digest of a file that was written."""

    size: int  # bytes
    xxh3_128: str


def write(path: Path, data: bytes) -> None:
    """Write a new file and wait until the disk has it."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def stream(path: Path, parts: Iterable[Buffer]) -> Written:
    """Write a new file part by part, and wait until the disk has it.

    The digest is of the bytes in memory, so that corruption on the way to the disk is detected.
    """
    digest, size = xxhash.xxh3_128(), 0
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return Written(size, digest.hexdigest())


def aside(path: Path, why: str = "tmp") -> Path:
    """Return an unused path beside a file or folder: ``<name>.<why>-<16 hex digits>``."""
    return path.with_name(f"{path.name}.{why}-{secrets.token_hex(8)}")


def sync(path: Path) -> None:
    """Wait until the disk has a file's content, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename(source: Path, target: Path, *, wait: bool = True) -> None:
    """Rename a file or folder to its final name, and wait until the disk has the name."""
    source.rename(target)
    if wait:
        sync(target.parent)


def replace(path: Path, data: bytes | Iterable[Buffer]) -> None:
    """Replace a file atomically: readers see the old or the new content, never a mixture.

    Args:
        path: the file.
        data: its content, whole or part by part.
    """
    temporary = aside(path)
    try:
        if isinstance(data, bytes):
            write(temporary, data)
        else:
            stream(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content; of a link only the link."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def read_file(path: Path, limit: int, *, links: bool = False) -> bytes:
    """Read a small untrusted file whole, in bounded time and memory, whatever its kind.

    Args:
        path: the file.
        limit: largest size in bytes.
        links: follow symbolic links; otherwise they are refused.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is a folder, a pipe or a device, has more than ``limit`` bytes, or cannot be
            read; with the reason.
    """
    with open(regular(path.name, path, links=links), "rb") as file:
        _check_size(path, file.fileno(), limit)
        try:
            data = file.read(limit + 1)
        except OSError as error:
            raise ValueError(f"{path.name}: {error.strerror}") from error
    if len(data) > limit:  # it grew, or the system does not know its size
        raise ValueError(f"{path.name}: more than {limit:,} bytes")
    return data


def read_lines(path: Path, *, longest: int, limit: int) -> Iterator[bytes]:
    """Yield the lines of an untrusted file, with line ends; one line at a time is in memory.

    Args:
        path: the file.
        longest: largest size of a line in bytes.
        limit: largest size of all lines in bytes.

    Raises:
        FileNotFoundError, ValueError: as :func:`read_file`, or a line is too long.
    """
    with open(regular(path.name, path), "rb") as file:
        _check_size(path, file.fileno(), limit)
        while line := file.readline(longest + 1):
            if len(line) > longest:
                raise ValueError(f"{path.name}: a line of more than {longest:,} bytes")
            yield line


def _check_size(path: Path, handle: int, limit: int) -> None:
    if (size := os.fstat(handle).st_size) > limit:
        raise ValueError(f"{path.name}: {size:,} bytes, more than {limit:,}")


def regular(name: str, path: str | Path, folder: int | None = None, *, links: bool = False) -> int:
    """Open a regular file for reading; return its descriptor.

    Args:
        name: the file's name in errors.
        path: the file.
        folder: descriptor of the folder that ``path`` starts from.
        links: follow symbolic links; otherwise they are refused.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not a regular file, or cannot be opened; with the reason.
    """
    try:
        handle = os.open(path, FLAGS if links else FLAGS | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise ValueError(f"{name}: not a regular file, or not readable: {why}") from error
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = next((word for is_one, word in KINDS if is_one(mode)), "something else")
        raise ValueError(f"{name}: not a regular file: it is {kind}")
    return handle
