"""The manifest: what a checkpoint consists of, so that one changed bit is noticed.

    {"format": 1, "step": 100, "files": [{"name", "size", "xxh3_128"}, ...], "xxh3_128": "..."}

Its own digest is that of the same document without it. There is one way to write a manifest, and
verifying compares bytes, so a flipped bit in the manifest itself is noticed too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from minillm_core.checkpoint import layout, strict, tensors
from minillm_core.checkpoint.disk import Written
from minillm_core.checkpoint.opened import Opened

__all__ = ["FORMAT", "encode", "reasons", "verify"]

FORMAT = 1
LARGEST = 1 << 16  # bytes of a manifest; ours has under a thousand


class Entry(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    size: int = Field(ge=0)
    xxh3_128: str


class Manifest(BaseModel):
    """A checkpoint's list of files."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: int
    step: int = Field(ge=0)
    files: list[Entry]
    xxh3_128: str = ""


def encode(step: int, written: Mapping[str, Written]) -> bytes:
    """The manifest of files, by name."""
    files = [
        Entry(name=name, size=written[name].size, xxh3_128=written[name].xxh3_128)
        for name in layout.FILES
    ]
    return _sealed(Manifest(format=FORMAT, step=step, files=files))


def verify(folder: Path) -> list[str]:
    """Why a checkpoint cannot be trusted; empty when every byte is as it was written."""
    try:
        with Opened(folder) as files:
            return reasons(files)
    except ValueError as error:
        return [str(error)]


def reasons(files: Opened) -> list[str]:
    """:func:`verify` for files that stay open."""
    try:
        manifest = _read(files)
    except ValueError as error:
        return [str(error)]
    found = []
    if files.folder.name != layout.folder(files.folder, manifest.step).name:
        found.append(f"{layout.MANIFEST}: is that of step {manifest.step}")
    for entry in manifest.files:
        try:
            _check(files, entry)
        except ValueError as error:
            found.append(str(error))
    return found


def _read(files: Opened) -> Manifest:
    """The manifest, itself intact; the files that it lists are not looked at."""
    data = files.content(layout.MANIFEST, LARGEST)
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"])) or "document"
        raise ValueError(f"{layout.MANIFEST}: {place}: {problem['msg']}") from error
    if manifest.format != FORMAT:
        raise ValueError(
            f"{layout.MANIFEST}: format {manifest.format}, this version reads {FORMAT}"
        )
    if data != _sealed(manifest):
        raise ValueError(f"{layout.MANIFEST}: its own digest does not match")
    names = [entry.name for entry in manifest.files]
    for name in names:
        if name not in layout.FILES:
            raise ValueError(f"{layout.MANIFEST}: {name[:40]!r} is no file of a checkpoint")
    for name in layout.FILES:
        if names.count(name) != 1:
            raise ValueError(f"{layout.MANIFEST}: lists {name} {names.count(name)} times")
    return manifest


def _sealed(manifest: Manifest) -> bytes:
    document: dict[str, Any] = manifest.model_dump(exclude={"xxh3_128"})
    body = json.dumps(document, indent=1, sort_keys=True).encode()
    document["xxh3_128"] = xxhash.xxh3_128_hexdigest(body)
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


def _check(files: Opened, entry: Entry) -> None:
    name, size = entry.name, files.size(entry.name)
    if size != entry.size:
        raise ValueError(f"{name}: {size:,} bytes, {entry.size:,} were written")
    if files.digest(name) != entry.xxh3_128:
        raise ValueError(f"{name}: its content changed since it was written")
    # A digest proves that the file is the one that was written, not that it is harmless.
    try:
        if name == layout.STATE:
            strict.parse(files.content(name, strict.LARGEST))
        else:
            tensors.header(partial(files.fill, name), size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
