"""The manifest: a checkpoint's files with their digests, so that verification detects a flipped bit.

    {"format": 1, "step": 100, "files": [{"name", "size", "xxh3_128"}, ...], "xxh3_128": "..."}

Its own digest is that of the same document without it. A manifest has only one valid encoding, and
verification compares bytes, so a flipped bit in the manifest itself is detected too.

A checkpoint's files are opened once, so the bytes that are read are those that were verified, whatever
happens to the names meanwhile: a trainer that removes the checkpoint unlinks its name, and the bytes
stay until the last reader closes them.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from minillm_core import disk, strict
from minillm_core.checkpoint import layout, tensors
from minillm_core.disk import Written

FORMAT = 1
LARGEST = 1 << 20  # most bytes of a manifest; one process writes under a thousand, others 120 each
CHUNK = 1 << 22  # bytes hashed at a time


def encode(step: int, written: Mapping[str, Written]) -> bytes:
    """Encode the manifest of written files, given by name."""
    names = (*layout.FILES, *sorted(written.keys() - layout.FILES))
    files = [{"name": name, **written[name]._asdict()} for name in names]
    return _sealed({"format": FORMAT, "step": step, "files": files})


def verify(folder: Path) -> list[str]:
    """List the reasons why a checkpoint fails verification; empty when every byte is as written."""
    try:
        with closing(Opened(folder)) as files:
            return reasons(files)
    except ValueError as error:
        return [str(error)]


def reasons(files: Opened) -> list[str]:
    """List the same reasons as :func:`verify`, for files that stay open."""
    found = []
    try:
        step, written = _read(files)
    except ValueError as error:
        return [_named(layout.MANIFEST, error)]
    if files.folder.name != layout.folder(files.folder, step).name:
        found.append(f"{layout.MANIFEST}: belongs to step {step}")
    for name, expected in written.items():
        try:
            _check(files, name, expected)
        except ValueError as error:
            found.append(_named(name, error))
    return found


def _named(name: str, error: ValueError) -> str:
    return f"{name}: {str(error).removeprefix(f'{name}: ')}"


def _read(files: Opened) -> tuple[int, dict[str, Written]]:
    """Read and check the manifest: the step, and each file's size and digest by name."""
    data = files.content(layout.MANIFEST, LARGEST)
    document = strict.parse(data)
    if (format := document.get("format")) != FORMAT:
        raise ValueError(f"format {str(format)[:40]}, this version reads {FORMAT}")
    document.pop("xxh3_128", None)
    if data != _sealed(document):
        raise ValueError("its own digest does not match")
    _check_keys(document, {"format", "step", "files"})
    step, entries = document["step"], document["files"]
    if not (tensors.are_sizes([step]) and isinstance(entries, list)):
        raise ValueError("needs a step from 0 on, and a list of files")
    for entry in entries:
        _check_keys(entry, {"name", "size", "xxh3_128"})
        if entry["name"] not in files.names:
            raise ValueError(
                f"{str(entry['name'])[:40]!r} is not a file of a checkpoint, or missing"
            )
        if not tensors.are_sizes([entry["size"]]):
            raise ValueError(f"{entry['name']}: needs its size in bytes")
    names = [entry["name"] for entry in entries]
    for name in files.names:
        if names.count(name) != 1:
            raise ValueError(f"lists {name} {names.count(name)} times")
    return step, {entry.pop("name"): Written(**entry) for entry in entries}


def _check_keys(table: Any, keys: set[str]) -> None:
    if not isinstance(table, dict) or table.keys() != keys:
        wrong = min(table.keys() ^ keys) if isinstance(table, dict) else type(table).__name__
        raise ValueError(f"{wrong[:40]}: {', '.join(sorted(keys))} are needed, and nothing else")


def _sealed(document: Mapping[str, Any]) -> bytes:
    body = json.dumps(document, indent=1, sort_keys=True).encode()
    sealed = {**document, "xxh3_128": xxhash.xxh3_128_hexdigest(body)}
    return json.dumps(sealed, indent=1, sort_keys=True).encode() + b"\n"


def _check(files: Opened, name: str, expected: Written) -> None:
    size = files.size(name)
    if size != expected.size:
        raise ValueError(f"{size:,} bytes, {expected.size:,} were written")
    if files.digest(name) != expected.xxh3_128:
        raise ValueError("its content changed since it was written")
    # A matching digest proves that the file is the written one, not that it is harmless.
    if name == layout.STATE:
        strict.parse(files.content(name, strict.LARGEST))
    else:
        tensors.header(partial(files.fill, name), size)


class Opened:
    """The open files of a checkpoint's folder, closed at the latest on garbage collection.

    Args:
        folder: the checkpoint.

    Raises:
        ValueError: one of its files is missing or is not a regular file, with the reason.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handles: dict[str, int] = {}
        self.close = weakref.finalize(self, _close, self._handles)
        try:
            place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(f"{folder.name}: {error.strerror}") from error
        try:
            others = filter(layout.OF_RANK.fullmatch, os.listdir(place))
            self.names = (*layout.FILES, *sorted(others))
            for name in (*self.names, layout.MANIFEST):
                self._handles[name] = disk.regular(name, name, place)
        except FileNotFoundError:
            self.close()
            raise ValueError(f"{name}: missing") from None
        except ValueError:
            self.close()
            raise
        finally:
            os.close(place)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return os.fstat(self._handles[name]).st_size

    def fill(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with a file's bytes starting at ``offset``.

        Raises:
            ValueError: the file is too short, or cannot be read.
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
        """Read all of a small file.

        Raises:
            ValueError: it has more than ``limit`` bytes, or cannot be read.
        """
        if (size := self.size(name)) > limit:
            raise ValueError(f"{name}: more than {limit:,} bytes")
        buffer = bytearray(size)
        self.fill(name, 0, memoryview(buffer))
        return bytes(buffer)

    def digest(self, name: str) -> str:
        """Return the xxh3-128 of a file.

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


def _close(handles: dict[str, int]) -> None:
    while handles:
        os.close(handles.popitem()[1])
