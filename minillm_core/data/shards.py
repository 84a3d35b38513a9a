r"""Token shards of llm.c and modded-nanogpt: mapped, checked, written.

A header of 256 little-endian int32, [0] = 20240520, [1] = version, [2] = tokens, the rest 0, then
the tokens: version 1 in two bytes each (vocabularies up to 65,536), version 2 in four.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from minillm_core import disk
from minillm_core.data.documents import MappedFile
from minillm_core.errors import DataError

MAGIC = 20240520
HEADER_BYTES = 256 * 4
_DTYPES = {1: np.dtype("<u2"), 2: np.dtype("<u4")}
_CHUNK = 1 << 22


def map_shard(path: Path) -> tuple[np.ndarray, MappedFile]:
    """Map a shard's tokens read-only, uint16 or uint32 (tokens,); return them and the file behind them.

    Raises:
        DataError: it cannot be read, is not a shard, is of another version, empty or cut short.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(
            f"the shard cannot be read: {error.strerror}", where=str(path), fix="check the path"
        ) from error
    with file:
        return _map(file, path), MappedFile.of(path, os.fstat(file.fileno()))


def _map(file: BinaryIO, path: Path) -> np.ndarray:
    def refusal(what: str, byte: int) -> DataError:
        fix = "write it again with minillm_core.data.write_shard, or remove it"
        return DataError(what, where=f"{path}, byte {byte}", fix=fix)

    head, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    if len(head) < HEADER_BYTES:
        raise refusal(f"not a token shard: {size} bytes, less than its header's {HEADER_BYTES}", 0)
    magic, version, tokens = np.frombuffer(head, "<i4")[:3].tolist()
    if magic != MAGIC:
        raise refusal(f"not a token shard: it begins with {magic}, not {MAGIC}", 0)
    if version not in _DTYPES:
        known = ", ".join(map(str, _DTYPES))
        raise refusal(f"token shard of version {version}; versions {known} are read", 4)
    dtype = _DTYPES[version]
    expected = HEADER_BYTES + tokens * dtype.itemsize
    if tokens < 1 or size != expected:
        raise refusal(
            f"the shard is {'cut short' if size < expected else 'wrong'}: its header says {tokens} "
            f"tokens, {max(expected, 0)} bytes in all, and it has {size}",
            min(size, expected) if tokens > 0 else 8,
        )
    return np.asarray(np.memmap(file, dtype, "r", HEADER_BYTES, (tokens,)))


def check_ids(
    ids: np.ndarray, vocab: int, path: Path, tick: Callable[[int], None] = lambda count: None
) -> None:
    """Check every id of a shard once; ``tick`` is called with each number of bytes.

    Raises:
        DataError: one is not in 0 <= id < vocab; names the shard, the token and its byte.
    """
    for first in range(0, len(ids), _CHUNK):
        chunk = ids[first : first + _CHUNK]
        tick(chunk.nbytes)
        if int(chunk.max()) >= vocab:
            index = first + int(np.argmax(chunk >= vocab))
            raise DataError(
                f"id {int(ids[index])} is outside 0 <= id < model.vocab={vocab}",
                where=f"{path}, token {index}, byte {HEADER_BYTES + index * ids.itemsize}",
                fix="use the tokenizer that the shard was made with, and a model.vocab that holds "
                "it",
            )


def starts(ids: np.ndarray, end_of_text: int) -> np.ndarray:
    """Find where documents begin, int64: at each end-of-text id, and at 0, where one may only continue."""
    found = [
        first + np.flatnonzero(ids[first : first + _CHUNK] == end_of_text)
        for first in range(0, len(ids), _CHUNK)
    ]
    return np.unique(np.concatenate([np.zeros(1, np.int64), *found]))


def write_shard(path: Path, ids: np.ndarray, vocab: int) -> None:
    """Write one shard; readers see all of it or nothing.

    Args:
        path: of the shard, by custom ``*.bin``.
        ids: int (tokens,), documents beginning with the end-of-text id.
        vocab: entries of the tokenizer; up to 65,536 make a version 1 shard.

    Raises:
        ValueError: no ids, more than a header can count, or an id outside 0 <= id < vocab.
        OSError: the shard cannot be written.
    """
    ids = np.asarray(ids)
    if not 0 < len(ids) < 2**31:
        raise ValueError(f"a shard of {len(ids)} tokens; it holds 1 to 2**31 - 1")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise ValueError(f"an id outside 0 <= id < {vocab}")
    version = 1 if vocab <= 65_536 else 2
    header = np.zeros(256, "<i4")
    header[:3] = MAGIC, version, len(ids)
    tokens = np.ascontiguousarray(ids, _DTYPES[version])
    disk.replace(path, [header.tobytes(), tokens.data.cast("B")])
