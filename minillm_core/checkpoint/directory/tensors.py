"""Tensors of safetensors files as float32: bfloat16 too, which NumPy does not know."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from minillm_core.errors import Refusal

__all__ = ["Stored", "regular", "stored_tensors"]


def _bfloat16(raw: np.ndarray) -> np.ndarray:
    return (raw.astype(np.uint32) << 16).view(np.float32)


# dtype -> how it lies on the disk, and how it becomes float32; each without any loss
WIDEN: Mapping[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "F32": ("<f4", lambda raw: raw.astype(np.float32, copy=False)),
    "F16": ("<f2", lambda raw: raw.astype(np.float32)),
    "BF16": ("<u2", _bfloat16),
}


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # in the file

    def read(self) -> np.ndarray:
        """float32, of ``shape``.

        Raises:
            Refusal: the file ends before it, or it holds a NaN or an infinity.
        """
        raw, widen = WIDEN[self.dtype]
        count = int(np.prod(self.shape, dtype=np.int64))
        array = np.fromfile(self.path, raw, count, offset=self.offset)
        if array.size != count:
            raise Refusal(f"{self.path.name} ends before {self.name} does", where=str(self.path))
        array = widen(array).reshape(self.shape)
        if not np.isfinite(array).all():
            raise Refusal(f"{self.name} holds a NaN or an infinity", where=str(self.path))
        return array


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Every tensor of a file, by name; the header is checked, the tensors are not read.

    Raises:
        Refusal: it is no safetensors file.
    """
    regular(path)
    try:
        with safe_open(path, framework="numpy") as file:
            names = set(file.keys())
        # What safetensors found sound; its own reading stops where NumPy has no such dtype.
        with path.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            header = json.loads(raw.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise Refusal(
            f"{path.name} is not a sound safetensors file: {error}",
            where=str(path),
            fix="fetch or write the directory again",
        ) from error
    return {
        name: Stored(
            path,
            name,
            header[name]["dtype"],
            tuple(header[name]["shape"]),
            8 + length + header[name]["data_offsets"][0],
        )
        for name in sorted(names)
    }


def regular(path: Path) -> None:
    """Refuse what is missing, or no file (reading a pipe would wait for ever).

    Raises:
        Refusal: so it is.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise Refusal(f"there is no {path.name}", where=str(path)) from error
    if not stat.S_ISREG(status.st_mode):
        raise Refusal(f"{path.name} is not a file", where=str(path))
