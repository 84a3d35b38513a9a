"""safetensors files: written incrementally, and read only after the whole header is validated.

    8 bytes: length of the header | header: JSON | the tensors' bytes, without gaps
    {"model.norm": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, ...}

The format is that of the ``safetensors`` package, whose reader accepts every file that passes here. That
package copies all tensors before it writes the first, cannot be interrupted in between, and opens files
by name, so that the verified file and the read file may differ. MLX reads out of bounds on a false
header; so headers are checked before a framework reads the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from minillm_core import strict
from minillm_core.deferred import Deferred
from minillm_core.disk import Buffer

Read = Callable[[int, memoryview], None]
"""Fill the buffer with a file's bytes from an offset; ValueError if the file is too short."""

DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "U64": "<u8",
    "I32": "<i4",
    "U32": "<u4",
    "I16": "<i2",
    "U16": "<u2",
    "I8": "|i1",
    "U8": "|u1",
    "BOOL": "|b1",
}
NAMES = {np.dtype(code): name for name, code in DTYPES.items()}
OWN = {name: np.dtype(code).itemsize for name, code in DTYPES.items()}
"""Dtypes that this module writes -> bytes of an element."""
WIDTHS = {**OWN, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
"""Further dtypes, which only other programs write."""
METADATA = "__metadata__"
LONGEST = 512  # most characters of a name
DIMENSIONS = 16
LENGTH = 1 << 31  # limit of a dimension; MLX uses int32


@dataclass(frozen=True)
class Stored:
    """The location of a tensor in its file."""

    dtype: str  # as in the header: F32
    shape: tuple[int, ...]
    start: int
    stop: int


def parts(
    arrays: Mapping[str, np.ndarray],
    written_by: str = "np",
    codes: Mapping[np.dtype[Any], str] = NAMES,
) -> Iterator[Buffer]:
    """Yield the bytes of a file of ``arrays``, in order, copying one array at a time at most.

    Args:
        arrays: by name.
        written_by: the ``format`` of the metadata, which some readers check: np, pt or mlx.
        codes: dtype -> its name in the header; NumPy has no bfloat16, whose bits are uint16.

    Raises:
        ValueError: an array has a name or a dtype that could not be read back.
    """
    # wider ones first, as safetensors does: each starts at a multiple of its own width
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    entries: dict[str, Any] = {METADATA: {"format": written_by}}
    place = 0
    for name in names:
        array = arrays[name]
        code = codes.get(array.dtype.newbyteorder("<"))
        if code is None or _is_odd(name):
            raise ValueError(f"{name!r} of dtype {array.dtype} cannot be saved")
        stop = place + array.nbytes
        entries[name] = {"dtype": code, "shape": array.shape, "data_offsets": (place, stop)}
        place = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > strict.LARGEST:
        raise ValueError(f"{len(names):,} tensors are too many for one file")
    yield len(text).to_bytes(8, "little")
    yield text
    for name in names:
        array = np.ascontiguousarray(arrays[name], arrays[name].dtype.newbyteorder("<"))
        yield array.reshape(-1).view(np.uint8).data


def header(fill: Read, size: int, widths: Mapping[str, int] = OWN) -> dict[str, Stored]:
    """Read the location of each tensor in a file.

    Args:
        fill: reads the file.
        size: bytes of the file.
        widths: the allowed dtypes, with the bytes of an element.

    Raises:
        ValueError: the file is invalid, with the reason.
    """
    if size < 8:
        raise ValueError("too short for a header")
    length = int.from_bytes(_bytes(fill, 0, 8), "little")
    if length > min(size - 8, strict.LARGEST):
        raise ValueError(f"a header of {length:,} bytes")
    text = _bytes(fill, 8, length)
    if not text.startswith(b"{"):
        raise ValueError("the header is not a JSON object")
    try:
        entries = strict.parse(text)
    except ValueError as error:
        raise ValueError(f"header: {error}") from error
    held = entries.pop(METADATA, {})
    if not isinstance(held, dict) or not all(isinstance(each, str) for each in held.values()):
        raise ValueError("header: metadata other than text")
    found = {name: _stored(name, entry, 8 + length, widths) for name, entry in entries.items()}
    place = 8 + length
    for name, stored in sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)):
        if stored.start != place:
            raise ValueError(f"{name}: does not start where the one before it ends")
        place = stored.stop
    if place != size:
        raise ValueError(f"its tensors end at byte {place:,} of {size:,}")
    return found


def read(fill: Read, stored: Stored) -> Deferred:
    """Return a deferred tensor, which is read at use; ``fill`` reads its file."""
    dtype, inner = np.dtype(DTYPES[stored.dtype]), stored.shape[1:]

    def rows(first: int, count: int) -> np.ndarray:
        array = np.empty((count, *inner), dtype)
        place = stored.start + first * dtype.itemsize * math.prod(inner)
        fill(place, array.reshape(-1).view(np.uint8).data)
        return array

    return Deferred(stored.shape, dtype, rows)


ROW = "@"
"""Separates an array's name from the first row of a part of it, written by one of several processes."""


def joined(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Join parts of arrays, ``name@row``, without reading any; others are unchanged.

    Raises:
        ValueError: rows are missing or duplicated.
    """
    parts, found = dict[str, dict[int, Any]](), dict[str, Any]()
    for key, array in arrays.items():
        name, _, row = key.rpartition(ROW)
        if name and row.isdecimal():
            parts.setdefault(name, {})[int(row)] = array
        else:
            found[key] = array
    for name, rows in parts.items():
        held = [rows[row] for row in sorted(rows)]
        begins = [0, *accumulate(one.shape[0] for one in held)]
        if sorted(rows) != begins[:-1] or name in found:
            raise ValueError(f"{name}: its parts begin at rows {sorted(rows)[:8]}")
        shape = begins[-1], *held[0].shape[1:]
        found[name] = Deferred(shape, held[0].dtype, partial(_rows, held, begins))
    return found


def _rows(held: Sequence[Any], begins: Sequence[int], first: int, count: int) -> np.ndarray:
    """Read rows from the parts that hold them."""
    cuts = [(max(first - at, 0), max(first + count - at, 0)) for at in begins]
    return np.concatenate([one[a:b] for one, (a, b) in zip(held, cuts, strict=False)])


def _bytes(fill: Read, offset: int, count: int) -> bytes:
    buffer = bytearray(count)
    fill(offset, memoryview(buffer))
    return bytes(buffer)


def _stored(name: str, entry: Any, begin: int, widths: Mapping[str, int]) -> Stored:
    """Check one entry of a header."""
    if _is_odd(name):
        raise ValueError(f"header: {name[:40]!r} is not the name of a tensor")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name}: needs dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in widths:
        raise ValueError(f"{name}: has dtype {str(code)[:40]!r}")
    if not are_sizes(shape) or len(shape) > DIMENSIONS or any(n >= LENGTH for n in shape):
        raise ValueError(f"{name}: has no shape that we could have written")
    if not are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name}: has no place in the file")
    start, stop = offsets
    if stop - start != math.prod(shape) * widths[code]:
        raise ValueError(f"{name}: its shape and its bytes differ in size")
    # an array without elements still needs strides that fit
    if math.prod(n for n in shape if n) >= 1 << 48:
        raise ValueError(f"{name}: has no shape that we could have written")
    return Stored(code, tuple(shape), begin + start, begin + stop)


def _is_odd(name: str) -> bool:
    return not (0 < len(name) <= LONGEST and name.isprintable() and name != METADATA)


def are_sizes(value: Any) -> bool:
    """Return whether a value is a list of non-negative integers."""
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
