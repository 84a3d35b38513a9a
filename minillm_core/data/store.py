"""Token ids on disk: written once, in a folder named by what they were made from, then mapped.

An entry of the cache holds ``ids.bin`` (uint16 or uint32, little-endian), ``spans.npy`` (see
:class:`~minillm_core.data.documents.Documents`) and ``meta.json`` with a digest of both, which is
checked every time the entry is opened; a tokenizer trained for it lies beside them.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core.data.digest import Digest, digest
from minillm_core.data.documents import Documents
from minillm_core.data.tokenizer import Tokenizer

__all__ = ["Writer", "open_entry", "sweep"]

_IDS, _SPANS, _META, _TOKENIZER = "ids.bin", "spans.npy", "meta.json", "tokenizer.json"
_ABANDONED_SECONDS = 24 * 3600


class Writer:
    """Collects documents into a temporary folder; :meth:`commit` renames it into place.

    A context manager: what was not committed is gone when it ends.

    Args:
        entry: the folder to be.
        vocab: ids are smaller; up to 65,536 they take two bytes each.
    """

    def __init__(self, entry: Path, vocab: int) -> None:
        entry.parent.mkdir(parents=True, exist_ok=True)
        self._entry = entry
        self._folder = entry.with_name(f"{entry.name}.tmp-{secrets.token_hex(4)}")
        self._folder.mkdir()
        self._dtype = np.dtype("<u2" if vocab <= 65_536 else "<u4")
        self._file = (self._folder / _IDS).open("xb")
        self._content = Digest()
        self._lengths: list[int] = []
        self._mapped: list[np.ndarray] = []

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave nothing behind but what was committed."""
        self._file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def documents(self) -> int:
        """How many there are so far."""
        return len(self._lengths) + sum(map(len, self._mapped))

    def document(self, end_of_text: int, ids: np.ndarray) -> None:
        """Add a document; it gets its end-of-text id unless it begins with one."""
        marked = len(ids) > 0 and int(ids[0]) == end_of_text
        data = np.empty(len(ids) + (not marked), self._dtype)
        data[0] = end_of_text
        data[len(data) - len(ids) :] = ids
        self._content.update(data)
        self._file.write(data)
        self._lengths.append(len(data))

    def shard(self, starts: np.ndarray, tokens: int) -> None:
        """Add the documents of a mapped shard, which stays where it is."""
        ends = np.append(starts[1:], tokens)
        number = np.full_like(starts, len(self._mapped) + 1)
        self._mapped.append(np.stack([number, starts, ends], axis=1))

    def commit(self, meta: dict[str, Any], tokenizer: Tokenizer | None) -> None:
        """Finish the entry; where another process was faster, keep that one's."""
        ends = np.cumsum(np.array(self._lengths, np.int64))
        first = np.stack([np.zeros_like(ends), ends - np.array(self._lengths, np.int64), ends], 1)
        spans = np.concatenate([first, *self._mapped])
        self._content.update(spans)
        self._file.close()
        np.save(self._folder / _SPANS, spans)
        if tokenizer:
            tokenizer.save(self._folder / _TOKENIZER)
        meta = {**meta, "dtype": self._dtype.str, "digest": self._content.hex()}
        (self._folder / _META).write_text(json.dumps(meta, indent=1, sort_keys=True), "utf-8")
        try:
            self._folder.rename(self._entry)
        except OSError:
            if not self._entry.is_dir():
                raise


def sweep(cache: Path) -> None:
    """Remove what processes left that died while writing, more than a day ago."""
    if cache.is_dir():
        for folder in cache.glob("*.tmp-*"):
            if time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def open_entry(
    entry: Path,
    shards: Sequence[np.ndarray],
    vocab: int,
    content: str,
    say: Callable[[str], None],
) -> tuple[Documents, dict[str, Any]] | None:
    """Map an entry.

    Args:
        entry: its folder.
        shards: the arrays that its spans number from 1.
        vocab: ids are smaller.
        content: digest of the shards, for the documents' digest.
        say: told of a damaged entry.

    Returns:
        The documents and the entry's meta.json; None where there is none, or a damaged one, which
        is removed.
    """
    if not entry.is_dir():
        return None
    try:
        meta = json.loads((entry / _META).read_text("utf-8"))
        path, dtype = entry / _IDS, np.dtype(meta["dtype"])
        ids = np.zeros(0, dtype)
        if path.stat().st_size:
            ids = np.asarray(np.memmap(path, dtype, "r"))
        spans = np.load(entry / _SPANS, allow_pickle=False)
        intact = digest(ids, spans) == meta["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        say(f"the cached tokens in {entry} are damaged: they are made again")
        shutil.rmtree(entry)
        return None
    return Documents((ids, *shards), spans, vocab, digest(meta["digest"], content)), meta
