"""The manifest: what a checkpoint consists of, so that one changed bit is noticed.

    {"format": 1, "step": 100, "files": [{"name", "size", "xxh3_128"}, ...], "xxh3_128": "..."}

Its own digest is that of the same document without it. There is one way to write a manifest, and
verifying compares bytes, so a flipped bit in the manifest itself is noticed too.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from minillm_core.checkpoint import layout

__all__ = ["FORMAT", "encode", "read", "verify"]

FORMAT = 1
LARGEST = 1 << 20  # bytes of a manifest; ours has under a thousand
CHUNK = 1 << 22  # bytes hashed at a time
NUMBER = {"F64", "F32", "F16", "I64", "U64", "I32", "U32", "I16", "U16", "I8", "U8", "BOOL"}


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


def encode(folder: Path, step: int) -> bytes:
    """The manifest of the files that lie in ``folder`` now."""
    files = [
        Entry(name=name, size=(folder / name).stat().st_size, xxh3_128=_digest(folder / name))
        for name in layout.FILES
    ]
    return _sealed(Manifest(format=FORMAT, step=step, files=files))


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint, itself intact; its files are not looked at.

    Raises:
        ValueError: the reason why it cannot be trusted.
    """
    data = _content(folder / layout.MANIFEST, LARGEST)
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
    return manifest


def verify(folder: Path) -> list[str]:
    """Why a checkpoint cannot be trusted; empty when every byte is as it was written."""
    try:
        manifest = read(folder)
    except ValueError as error:
        return [str(error)]
    reasons = []
    if folder.name != layout.folder(folder, manifest.step).name:
        reasons.append(f"{layout.MANIFEST}: is that of step {manifest.step}")
    names = [entry.name for entry in manifest.files]
    reasons += [f"{name}: not in the manifest" for name in layout.FILES if name not in names]
    if len(set(names)) < len(names):
        reasons.append(f"{layout.MANIFEST}: lists a file twice")
    for entry in manifest.files:
        try:
            _check(folder, entry)
        except ValueError as error:
            reasons.append(str(error))
    return reasons


def _sealed(manifest: Manifest) -> bytes:
    document: dict[str, Any] = manifest.model_dump(exclude={"xxh3_128"})
    body = json.dumps(document, indent=1, sort_keys=True).encode()
    document["xxh3_128"] = xxhash.xxh3_128_hexdigest(body)
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


def _check(folder: Path, entry: Entry) -> None:
    name = entry.name
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"{layout.MANIFEST}: {name!r} is not the name of a file in this folder")
    path = folder / name
    size = _regular(path).st_size
    if size != entry.size:
        raise ValueError(f"{name}: {size:,} bytes, {entry.size:,} were written")
    if _digest(path) != entry.xxh3_128:
        raise ValueError(f"{name}: its content changed since it was written")
    if name.endswith(".safetensors"):
        _check_header(path)


def _check_header(path: Path) -> None:
    # A digest proves that the file is the one that was written, not that it is harmless: MLX reads
    # out of range where this parser refuses.
    try:
        with safe_open(path, framework="numpy") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a mapping
                dtype = tensors.get_slice(key).get_dtype()
                if dtype not in NUMBER:
                    raise ValueError(f"{path.name}: {key} has dtype {dtype}")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path.name}: {error}") from error


def _regular(path: Path) -> os.stat_result:
    try:
        status = path.lstat()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name}: missing") from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name}: not a regular file")
    return status


def _content(path: Path, limit: int) -> bytes:
    if _regular(path).st_size > limit:
        raise ValueError(f"{path.name}: more than {limit:,} bytes")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path.name}: {error.strerror}") from error


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise ValueError(f"{path.name}: {error.strerror}") from error
    return digest.hexdigest()
