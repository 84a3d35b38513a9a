"""Forged checkpoints: headers, manifests and scalars that no trainer would write.

Digests are recomputed, so that the parsers are tested. Payloads are harmless: an unpickled
object creates a folder named MARKER.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from minillm_core.checkpoint import layout

__all__ = ["MARKER", "TARGETS", "mutate"]

MARKER = "code-was-run"
DEEP = 100_000  # levels of nesting
ODD: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**300),
    *(1.5, -0.0, 1e308, float("nan"), float("inf"), "1", "", None, True, [], {}, [1], [[1]]),
)
DTYPES = ("F64", "F16", "BF16", "I64", "I32", "U8", "BOOL", "C64", "F8_E4M3", "F4", "f32", "O", "")
NAMES = ("", "..", "../../evil", "/etc/passwd", "a/b", "a\\b", "model.\0", "\ud800", "__class__")

Header = list[tuple[str, Any]]  # pairs, to allow duplicate keys
Mutator = Callable[[random.Random, Header], None]


class _Payload:
    """An object whose unpickling has a side effect."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (MARKER,)


def files() -> dict[str, bytes]:
    """Create whole files of other kinds."""
    import io

    import numpy as np

    array = io.BytesIO()
    np.save(array, np.array([_Payload()], dtype=object), allow_pickle=True)
    return {
        "a pickle": pickle.dumps(_Payload()),
        "an array of pickles": array.getvalue(),
        "nothing": b"",
        "a zip's head": b"PK\x03\x04" + bytes(100),
        "a script": b"#!/bin/sh\nmkdir " + MARKER.encode() + b"\n",
        "deep JSON": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        "deep lists": b"[" * DEEP + b"]" * DEEP,
    }


def odd_shape(rng: random.Random, header: Header) -> None:
    """Draw a shape that is invalid, or does not match the data."""
    entry = _entry(rng, header)
    shape = list(entry["shape"])
    match rng.randrange(5):
        case 0:
            entry["shape"] = rng.choice(ODD)
        case 1:
            shape.insert(rng.randint(0, len(shape)), rng.choice(ODD))
            entry["shape"] = shape
        case 2 if shape:
            shape[rng.randrange(len(shape))] = rng.choice(ODD)
            entry["shape"] = shape
        case 3:  # the product overflows to the data's size
            entry["shape"] = [2**32, 2**32, *shape]
        case _:
            entry["shape"] = shape[::-1]


def odd_offsets(rng: random.Random, header: Header) -> None:
    """Set offsets outside, overlapping, reversed, or missing."""
    entry = _entry(rng, header)
    begin, end = entry["data_offsets"]
    entry["data_offsets"] = rng.choice(
        [
            [rng.choice(ODD), end],
            [begin, rng.choice(ODD)],
            [end, begin],
            [begin + (k := rng.randint(-9, 9)), end + k],
            list(_entry(rng, header)["data_offsets"]),
            [begin, end, end],
            rng.choice(ODD),
        ]
    )


def odd_dtype(rng: random.Random, header: Header) -> None:
    """Set another dtype, or none."""
    _entry(rng, header)["dtype"] = rng.choice((*DTYPES, *ODD))


def odd_name(rng: random.Random, header: Header) -> None:
    """Set another name, another tensor's, or a very long one."""
    place = rng.randrange(len(header))
    names = (*NAMES, "x" * 1_000_000, rng.choice(header)[0])
    header[place] = (rng.choice(names), header[place][1])


def odd_entries(rng: random.Random, header: Header) -> None:
    """Remove, duplicate or reorder tensors, or replace them by other values."""
    place = rng.randrange(len(header))
    match rng.randrange(5):
        case 0:
            header.pop(place)
        case 1:
            header.append(header[place])
        case 2:
            rng.shuffle(header)
        case 3:
            header.append((rng.choice(NAMES), rng.choice(ODD)))
        case _:
            header[place][1].update({rng.choice(("extra", "dtype", "")): rng.choice(ODD)})


def odd_metadata(rng: random.Random, header: Header) -> None:
    """Set missing or excessive metadata."""
    many = {str(n): "x" for n in range(20_000)}
    header.insert(0, ("__metadata__", rng.choice((*ODD, {"a": rng.choice(ODD)}, many))))


STRUCTURED: tuple[Mutator, ...] = (
    *(odd_shape, odd_shape, odd_offsets, odd_offsets),
    *(odd_dtype, odd_name, odd_entries, odd_metadata),
)


def tensors(rng: random.Random, good: bytes) -> bytes:
    """Create a safetensors file with another header, or with other bytes in its place."""
    length = struct.unpack("<Q", good[:8])[0]
    text, data = good[8 : 8 + length], good[8 + length :]
    how = rng.randrange(10)
    if how < 7:
        header = [(name, dict(entry)) for name, entry in json.loads(text).items()]
        for _ in range(rng.choice((1, 1, 2, 3))):
            header = [pair for pair in header if pair[0] != "__metadata__"] or header
            _try(rng, header)
        text = _rendered(header)
    elif how == 7:
        text = _scratched(rng, text)
    elif how == 8:
        wrong = rng.choice([n for n in ODD if type(n) is int and 0 <= n < 2**64])
        near = max(0, length + rng.randint(-8, 8))
        return struct.pack("<Q", rng.choice((wrong, near, len(good), len(good) - 8))) + good[8:]
    else:
        ends = (data[: rng.randrange(len(data) + 1)], data + bytes(rng.randint(1, 64)), b"")
        data = rng.choice(ends)
    return struct.pack("<Q", len(text)) + text + data


def manifest(rng: random.Random, good: dict[str, Any]) -> bytes:
    """Create an invalid manifest; four times in five with a valid digest."""
    document = json.loads(json.dumps(good))
    entry = rng.choice(document["files"])
    match rng.randrange(8):
        case 0:
            document[rng.choice(("format", "step", "files", "extra"))] = rng.choice(ODD)
        case 1:
            entry["name"] = rng.choice((*NAMES, *ODD, "x" * 10_000))
        case 2:
            entry["size"] = rng.choice(ODD)
        case 3:
            entry["xxh3_128"] = rng.choice((*ODD, "0" * 32, entry["xxh3_128"].upper()))
        case 4:
            document["files"].remove(entry)
        case 5:
            document["files"].append(rng.choice((entry, *ODD, dict(entry, name="evil.pkl"))))
        case 6:
            document["files"] = document["files"] * 2_000
        case _:
            document.pop(rng.choice(list(document)))
    if rng.random() < 0.2:
        return _scratched(rng, sealed(document))
    return sealed(document)


def scalars(rng: random.Random, good: bytes) -> bytes:
    """Create a state.json with other values, or with other bytes."""
    if rng.random() < 0.3:
        return _scratched(rng, good)
    document = json.loads(good)
    for _ in range(rng.choice((1, 1, 2))):
        document[rng.choice((*document, "extra"))] = rng.choice(ODD)
    if rng.random() < 0.2:
        document.pop(rng.choice(list(document)))
    return json.dumps(document).encode()


TARGETS = (layout.MODEL, layout.OPTIMIZER, layout.MANIFEST, layout.STATE)


def mutate(rng: random.Random, good: Path, bad: Path) -> str:
    """Write a changed copy of a checkpoint; return the description of the change.

    Args:
        rng: selects the change.
        good: a checkpoint.
        bad: the folder to write to, which exists and is empty.
    """
    contents = {name: (good / name).read_bytes() for name in layout.FILES}
    target = rng.choices(TARGETS, (4, 2, 3, 1))[0]
    if target != layout.MANIFEST:
        alien, change = rng.random() < 0.05, scalars if target == layout.STATE else tensors
        what = rng.choice(list(files())) if alien else "changed"
        contents[target] = files()[what] if alien else change(rng, contents[target])
    else:
        what = "changed"
    document = json.loads((good / layout.MANIFEST).read_bytes())
    for entry in document["files"]:
        data = contents[entry["name"]]
        entry |= {"size": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    changed = manifest(rng, document) if target == layout.MANIFEST else sealed(document)
    if target == layout.MANIFEST and rng.random() < 0.05:
        changed = files()[what := rng.choice(list(files()))]
    for name, data in {
        **contents,
        layout.MANIFEST: changed,
        "evil.pkl": files()["a pickle"],
    }.items():
        (bad / name).write_bytes(data)
    if rng.random() < 0.02:  # a link to a valid file
        name, what = rng.choice(layout.FILES), "a link"
        (bad / name).unlink()
        (bad / name).symlink_to(good / name)
    return f"{target}: {what}"


def sealed(document: dict[str, Any]) -> bytes:
    """Return a manifest with its own digest, as defined by the format."""
    bare = {key: value for key, value in document.items() if key != "xxh3_128"}
    try:
        body = json.dumps(bare, indent=1, sort_keys=True).encode()
    except (TypeError, ValueError):
        body = b""
    whole = {**bare, "xxh3_128": xxhash.xxh3_128_hexdigest(body)}
    return json.dumps(whole, indent=1, sort_keys=True).encode() + b"\n"


def _try(rng: random.Random, header: Header) -> None:
    # an earlier change may have removed it
    with suppress(TypeError, ValueError, KeyError, IndexError, AttributeError):
        rng.choice(STRUCTURED)(rng, header)


def _entry(rng: random.Random, header: Header) -> dict[str, Any]:
    return rng.choice(header)[1]


def _rendered(header: Header) -> bytes:
    pairs = (f"{json.dumps(name)}:{json.dumps(value)}" for name, value in header)
    return ("{" + ",".join(pairs) + "}").encode()


def _scratched(rng: random.Random, text: bytes) -> bytes:
    at = rng.randrange(len(text) + 1)
    changed = bytearray(text)
    match rng.randrange(7):
        case 0:
            return text[:at]
        case 1:
            for _ in range(rng.choice((1, 1, 4))):
                changed[rng.randrange(len(text))] = rng.randrange(256)
            return bytes(changed)
        case 2:
            return (
                text[:at] + rng.choice((b" ", b"\0", b"\xff", b"NaN", b"{", b"]", b",")) + text[at:]
            )
        case 3:
            return b"\xef\xbb\xbf" + text
        case 4:
            return text + b" " * rng.choice((1, 8, 1_000_000))
        case 5:
            return text.decode().encode("utf-16")
        case _:
            return rng.choice((b"", b"{}", b"[]", b"null", b'"x"', b"1", *files().values()))
