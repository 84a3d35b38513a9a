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
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minillm_core.data.digest import Digest, digest
from minillm_core.data.documents import Documents
from minillm_core.data.tokenizer import Tokenizer

__all__ = ["Entry", "Writer", "open_entry", "sweep"]

_IDS, _SPANS, _META, _TOKENIZER = "ids.bin", "spans.npy", "meta.json", "tokenizer.json"
_ABANDONED_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Entry:
    """What the cache held.

    Attributes:
        documents: mapped.
        end_of_text: the id that they begin with.
        notes: what was left out -> how often.
        tokenizer: the tokenizer.json that was trained for them; None where one was given, or none
            was needed.
    """

    documents: Documents
    end_of_text: int
    notes: dict[str, int]
    tokenizer: Path | None


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
        self._file.write(data.data)
        self._lengths.append(len(data))

    def shard(self, starts: np.ndarray, tokens: int) -> None:
        """Add the documents of a mapped shard, which stays where it is."""
        ends = np.append(starts[1:], tokens)
        number = np.full_like(starts, len(self._mapped) + 1)
        self._mapped.append(np.stack([number, starts, ends], axis=1))

    def commit(self, end_of_text: int, notes: dict[str, int], tokenizer: Tokenizer | None) -> None:
        """Finish the entry; where another process was faster, keep that one's.

        Raises:
            OSError: it cannot be written.
        """
        lengths = np.array(self._lengths, np.int64)
        ends = np.cumsum(lengths)
        read = np.stack([np.zeros_like(ends), ends - lengths, ends], axis=1)
        spans = np.concatenate([read, *self._mapped])
        self._file.close()
        np.save(self._folder / _SPANS, spans)
        if tokenizer:
            tokenizer.save(self._folder / _TOKENIZER)
        meta = {
            "digest": self._content.update(spans).hex(),
            "dtype": self._dtype.str,
            "end_of_text": end_of_text,
            "notes": notes,
            "tokenizer": _file_digest(self._folder / _TOKENIZER) if tokenizer else None,
        }
        sealed = {**meta, "seal": digest(json.dumps(meta))}
        (self._folder / _META).write_text(json.dumps(sealed, indent=1), "utf-8")
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
    folder: Path,
    shards: Sequence[np.ndarray],
    vocab: int,
    content: str,
    say: Callable[[str], None],
) -> Entry | None:
    """Map an entry.

    Args:
        folder: of the entry.
        shards: the arrays that its spans number from 1.
        vocab: ids are smaller.
        content: digest of the shards, for the documents' digest.
        say: told of a damaged entry.

    Returns:
        None where there is no entry, or a damaged one, which is removed.
    """
    if not folder.is_dir():
        return None
    try:
        meta = json.loads((folder / _META).read_text("utf-8"))
        intact = meta.pop("seal") == digest(json.dumps(meta))
        dtype = np.dtype(meta["dtype"])
        ids = np.zeros(0, dtype)
        if (folder / _IDS).stat().st_size:
            ids = np.asarray(np.memmap(folder / _IDS, dtype, "r"))
        spans = np.load(folder / _SPANS, allow_pickle=False)
        tokenizer = folder / _TOKENIZER if meta["tokenizer"] else None
        intact &= digest(ids, spans) == meta["digest"]
        intact &= tokenizer is None or _file_digest(tokenizer) == meta["tokenizer"]
        if intact:
            whole = digest(meta["digest"], content)
            documents = Documents((ids, *shards), spans, vocab, whole)
            return Entry(documents, meta["end_of_text"], meta["notes"], tokenizer)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # damaged as well
    say(f"the tokens kept in {folder} are damaged: they are made again")
    shutil.rmtree(folder)
    return None


def _file_digest(path: Path) -> str:
    return Digest().update(path.read_bytes()).hex()
