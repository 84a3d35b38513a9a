"""The few ways in which a run touches the disk; each is complete when it returns.

On macOS ``os.fsync`` hands the data to the drive without flushing the drive's own cache; a power
loss there can still cost the newest checkpoint, never an older one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import xxhash

__all__ = ["Buffer", "Written", "aside", "rename", "replace", "stream", "sync", "write"]

Buffer = bytes | memoryview


class Written(NamedTuple):
    """What went to the disk."""

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

    The digest is that of the bytes in memory: those that go wrong on their way are noticed too.
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
    """A name beside a file or folder that is nobody's yet: ``<name>.<why>-<16 hex digits>``."""
    return path.with_name(f"{path.name}.{why}-{secrets.token_hex(8)}")


def sync(path: Path) -> None:
    """Wait until the disk has a file's content, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename(source: Path, target: Path) -> None:
    """Give a file or folder its final name, and wait until the disk has the name."""
    source.rename(target)
    sync(target.parent)


def replace(path: Path, data: bytes) -> None:
    """Write a file that readers see either as it was or as it is now, never half of it."""
    temporary = aside(path)
    try:
        write(temporary, data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)
