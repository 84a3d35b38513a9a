"""Token ids on disk: written once, in a folder named by what they were made from, then mapped.

An entry of the cache holds ``ids.bin`` (uint16 or uint32, little-endian), ``spans.npy`` (see
:class:`~minillm_core.data.documents.Documents`) and ``meta.json`` with a digest of both; a tokenizer
trained for it lies beside them. Digest, ids and spans are checked every time it is opened: a
framework would read out of bounds what an id leads it to. The digest tells damage, not malice, so
that only folders of this account (or root's) are opened.

While an entry is written its process holds a lock on it; a folder without one was left by a
process that died, and goes at the next start.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from minillm_core import disk
from minillm_core.data.documents import IDS, Documents, MappedFile, column, digest
from minillm_core.data.formats import Progress, ticker
from minillm_core.data.sources import Source
from minillm_core.data.tokenizer import LARGEST_TOKENIZER, Tokenizer
from minillm_core.errors import DataError
from minillm_core.plugins.sourcing import Field

Values = Mapping[str, float | np.ndarray]
"""Field -> its value, of some tokens."""

Bookmark = tuple[int, int]
"""Where reading goes on among documents: the number of a file, or of a path whose files a plugin reads together, and
documents before it there."""

BEGIN: Bookmark = 0, 0

_IDS, _SPANS, _META, _TOKENIZER = "ids.bin", "spans.npy", "meta.json", "tokenizer.json"
_NAME = re.compile(r"[0-9a-f]{32}(\.tmp-[0-9a-f]+)?")
_ABANDONED_SECONDS = 24 * 3600  # where the file system knows no locks
_LARGEST_META = 1 << 20  # bytes
_DIGESTS = "digests.json"
_HEX = re.compile("[0-9a-f]{32}")
_LARGEST_DIGESTS = 32 << 20  # bytes
_MOST_DIGESTS = 400_000
_SETTLED = 3.0  # seconds after which another write must show in a file's times
_ROOT = 0  # may write anywhere, so that its folders are no worse than one's own
_CHUNK = 1 << 22  # ids looked at together


@dataclass(frozen=True)
class Entry:
    """An entry of the cache, opened.

    Attributes:
        documents: mapped.
        end_of_text: the id that they begin with.
        notes: "left out: ..." or "cut: ..." -> how often.
        tokenizer: the tokenizer.json that was trained for them; None where one was given, or none
            was needed.
        sample: bytes of text that it was trained on, and bytes of text in all.
        paths: int64 (documents,): the number of the path that each is from.
        place: of the documents behind these, which another entry holds; None: there are none.
    """

    documents: Documents
    end_of_text: int
    notes: dict[str, int]
    tokenizer: Path | None
    sample: tuple[int, int]
    paths: np.ndarray
    place: Bookmark | None


class Writer:
    """A writer of documents into a temporary folder, which :meth:`commit` renames into place.

    A context manager: what was not committed is gone when it ends.

    Args:
        entry: the folder to be.
        vocab: ids are smaller; up to 65,536 they take two bytes each.
        origin: what the documents come from, to be shown.
        fields: of each token, kept beside its id.
    """

    def __init__(
        self, entry: Path, vocab: int, origin: str = "", fields: Sequence[Field] = ()
    ) -> None:
        entry.parent.mkdir(parents=True, exist_ok=True)
        self._entry, self._vocab, self._origin = entry, vocab, origin
        self._folder = disk.aside(entry)
        self._ids = np.dtype("<u2" if vocab <= 65_536 else "<u4")
        self._dtype = _record(self._ids, fields)
        with alone(entry.parent):
            self._folder.mkdir()
            self._file = (self._folder / _IDS).open("xb")
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._content = xxhash.xxh3_128()
        self.tokens = 0  # so far, without those of mapped shards
        self._lengths: list[int] = []
        self._mapped: list[np.ndarray] = []

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave nothing behind but what was committed."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._file.close()  # and its lock

    @property
    def documents(self) -> int:
        """Count the documents so far."""
        return len(self._lengths) + sum(map(len, self._mapped))

    def document(self, end_of_text: int, ids: np.ndarray, values: Values | None = None) -> None:
        """Add a document; it gets its end-of-text id, with zeros as values, unless it begins with one."""
        self._lengths.append(0)
        if not (len(ids) > 0 and int(ids[0]) == end_of_text):
            self.more(np.array([end_of_text]))
        self.more(ids, values)

    def more(self, ids: np.ndarray, values: Values | None = None) -> None:
        """Add further ids to the last document, and the values of their fields, 0 where not given."""
        data = ids.astype(self._ids)
        if self._dtype.names:
            ids, data = data, np.zeros(len(data), self._dtype)
            for name, given in {**(values or {}), IDS: ids}.items():
                data[name] = given
        raw = data.view(np.uint8).data
        self._content.update(raw)
        self._file.write(raw)
        self._lengths[-1] += len(data)
        self.tokens += len(data)

    def shard(self, starts: np.ndarray, tokens: int) -> None:
        """Add the documents of a mapped shard, which stays where it is."""
        ends = np.append(starts[1:], tokens)
        number = np.full_like(starts, len(self._mapped) + 1)
        self._mapped.append(np.stack([number, starts, ends], axis=1))

    def commit(self, tokenizer: Tokenizer | None, **facts: Any) -> None:
        """Finish the entry; where another process was faster, keep that one's.

        Args:
            tokenizer: one that was trained for the documents.
            facts: of them, as JSON: end_of_text, the id that they begin with; notes of the reading;
                sample, the bytes of text that the tokenizer was trained on, and in all; paths, (number
                of a path, documents from it) in their order; place, that of the documents behind
                these, None where there are none.

        Raises:
            OSError, DataError: it cannot be written.
        """
        lengths = np.array(self._lengths, np.int64)
        ends = np.cumsum(lengths)
        read = np.stack([np.zeros_like(ends), ends - lengths, ends], axis=1)
        spans = np.concatenate([read, *self._mapped])
        self._content.update(spans.data)
        self._file.flush()
        np.save(self._folder / _SPANS, spans)
        if tokenizer:
            tokenizer.save(self._folder / _TOKENIZER)
        meta = {
            "digest": self._content.hexdigest(),
            "dtype": self._ids.str,
            "tokenizer": digest(tokenizer.text()) if tokenizer else None,
            **facts,
            "origin": self._origin,
            "vocab": self._vocab,
            "documents": len(spans),
            "tokens": int((spans[:, 2] - spans[:, 1]).sum()),
        }
        sealed = {**meta, "seal": digest(json.dumps(meta))}
        (self._folder / _META).write_text(json.dumps(sealed, indent=1), "utf-8")
        try:
            self._folder.rename(self._entry)
        except OSError:
            if not self._entry.is_dir():  # otherwise another process was faster
                raise


class Digests:
    """Digests of files by the time and place of their content, so that a later start reads no file again.

    A file's key is its device, inode, size, modification time and change time: a write sets the
    last one, and no program can set it back. A file that changed within the clock's last seconds gets no entry,
    since another change might leave the same times.

    Args:
        folder: keeps them, in digests.json; what is not understood there is read anew.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._known, self._new = folder / _DIGESTS, dict[str, str](), dict[str, str]()
        with suppress(OSError, ValueError, RecursionError):
            _check_owner(folder)
            held = json.loads(disk.read_file(self._path, _LARGEST_DIGESTS))
            if isinstance(held, dict):
                self._known = {str(key): str(value) for key, value in held.items()}

    def of(self, source: Source, tick: Callable[[int], None]) -> str:
        """Look a file's digest up, or read the file.

        Args:
            source: the file.
            tick: called with the bytes that are done.

        Raises:
            DataError: it cannot be read.
        """
        with suppress(OSError):
            found = source.path.stat()
            place = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
            key = digest(f"{place} {source.format.name} {source.packing}")
            if _HEX.fullmatch(self._known.get(key, "")):
                tick(source.size)
            elif time.time() - found.st_ctime < _SETTLED:
                return source.digest(tick)
            else:
                self._known[key] = source.digest(tick)
            self._new[key] = self._known[key]
            return self._known[key]
        return source.digest(tick)

    def keep(self) -> None:
        """Write those of this start first, then earlier ones, up to a bound.

        Raises:
            OSError: they cannot be written.
        """
        kept = [
            *self._new.items(),
            *(one for one in self._known.items() if one[0] not in self._new),
        ]
        if self._new:
            disk.replace(self._path, json.dumps(dict(kept[:_MOST_DIGESTS])).encode())


def sweep(cache: Path) -> None:
    """Remove the leftovers of processes that died while writing."""
    with suppress(OSError), alone(cache):
        for folder in entry_folders(cache):
            if ".tmp-" in folder.name and abandoned(folder):
                disk.remove(folder)


def open_entry(folder: Path, say: Callable[[str], None], **given: Any) -> Entry | None:
    """Map an entry and check all of it.

    Args:
        folder: of the entry.
        say: is given a line about a damaged entry.
        given: shards, vocab, content, progress and fields, see :func:`_checked`.

    Returns:
        None where there is no entry, or a damaged one, which is removed.

    Raises:
        DataError: the entry or the cache belongs to another account.
        OSError: a damaged entry cannot be removed.
    """
    if not os.path.lexists(folder):
        return None
    for place in (folder.parent, folder):
        _check_owner(place)
    try:
        entry = _checked(folder, **given)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, MemoryError, OverflowError):
        say(f"the tokens kept in {folder} are damaged: they are made again")
        disk.remove(folder)
        return None
    with suppress(OSError):
        os.utime(folder)  # when it was last used
    return entry


def _checked(
    folder: Path,
    shards: Sequence[tuple[np.ndarray, MappedFile]],
    vocab: int,
    content: str,
    progress: Progress | None,
    fields: Sequence[Field],
) -> Entry:
    """Check and map an entry.

    Args:
        folder: of the entry.
        shards: the arrays that its spans number from 1, and their files.
        vocab: ids are smaller.
        content: digest of the shards, for the documents' digest.
        progress: of the check.
        fields: that it was written with.

    Raises:
        ValueError and its like: it is damaged.
    """
    if folder.is_symlink():
        raise ValueError("a link")
    meta = read_meta(folder)
    if meta.pop("seal") != digest(json.dumps(meta)):
        raise ValueError("meta.json")
    dtype = _record(np.dtype({"<u2": "<u2", "<u4": "<u4"}[meta["dtype"]]), fields)
    place = place_of(meta)
    shards = () if place else shards  # they are behind all that is read
    ids = np.zeros(0, dtype)
    found, largest = xxhash.xxh3_128(), 0
    with open(disk.regular(_IDS, folder / _IDS), "rb") as file:
        mapped = MappedFile.of(folder / _IDS, os.fstat(file.fileno()))
        tick = ticker(progress, "checking the files", mapped.size)
        # Read and not mapped: every page of a mapping that was looked at counts as this process's.
        while len(chunk := np.fromfile(file, dtype, _CHUNK)):
            found.update(chunk.view(np.uint8).data)
            largest = max(largest, int(column(chunk, IDS).max()))
            tick(chunk.nbytes)
        if mapped.size:
            ids = np.asarray(np.memmap(file, dtype, "r"))
    with open(disk.regular(_SPANS, folder / _SPANS), "rb") as file:
        spans = np.load(file, allow_pickle=False)
    found.update(np.ascontiguousarray(spans).data)
    if found.hexdigest() != meta["digest"] or largest >= vocab:
        raise ValueError("ids")
    arrays = (ids, *(array for array, _ in shards))
    _check_spans(spans, arrays)
    tokenizer = folder / _TOKENIZER if meta["tokenizer"] else None
    if tokenizer:
        text = disk.read_file(tokenizer, LARGEST_TOKENIZER).decode("utf-8")
        if digest(text) != meta["tokenizer"]:
            raise ValueError("tokenizer.json")
    if not 0 <= int(meta["end_of_text"]) < vocab:
        raise ValueError("end_of_text")
    notes = {str(note): int(count) for note, count in dict(meta["notes"]).items()}
    drawn, total = map(int, meta["sample"])
    files = (mapped, *(file for _, file in shards))
    documents = Documents(arrays, spans, vocab, digest(meta["digest"], content), files)
    numbers, counts = np.array(meta["paths"], np.int64).T
    paths = np.repeat(numbers, counts)
    if len(paths) != len(spans):
        raise ValueError("paths")
    end_of_text = int(meta["end_of_text"])
    return Entry(documents, end_of_text, notes, tokenizer, (drawn, total), paths, place)


def _record(ids: np.dtype, fields: Sequence[Field]) -> np.dtype:
    """Return what one token takes: an id, or a record of it and its fields."""
    return np.dtype([(IDS, ids), *((one.name, one.dtype) for one in fields)]) if fields else ids


def _check_spans(spans: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
    if spans.dtype != np.int64 or spans.ndim != 2 or spans.shape[1] != 3 or not len(spans):
        raise ValueError("spans")
    number, first, end = spans.T
    if number.min() < 0 or number.max() >= len(arrays):
        raise ValueError("spans")
    sizes = np.array([len(array) for array in arrays])
    if first.min() < 0 or (first >= end).any() or (end > sizes[number]).any():
        raise ValueError("spans")


def entry_folders(cache: Path) -> Iterator[Path]:
    """Yield what is in the cache under a name that entries have."""
    return (cache / name for name in sorted(os.listdir(cache)) if _NAME.fullmatch(name))


def read_meta(folder: Path) -> dict[str, Any]:
    """Read what an entry says of itself, unchecked.

    Raises:
        OSError, ValueError: it says nothing that can be read.
    """
    meta = json.loads(disk.read_file(folder / _META, _LARGEST_META).decode("utf-8"))
    if not isinstance(meta, dict):
        raise ValueError("meta.json")
    return meta


def place_of(meta: Mapping[str, Any]) -> Bookmark | None:
    """Take the place of the documents behind an entry's out of what it says of itself.

    Raises:
        KeyError, TypeError, ValueError: it says nothing of that.
    """
    held = meta["place"]
    return None if held is None else (int(held[0]), int(held[1]))


def _check_owner(folder: Path) -> None:
    owner = folder.stat().st_uid if folder.exists() else folder.lstat().st_uid
    if owner not in (os.geteuid(), _ROOT):
        raise DataError(
            f"the cache belongs to another account (uid {owner})",
            where=str(folder),
            fix="name a folder of your own in MINILLM_CACHE, or remove this one",
        )


@contextmanager
def alone(cache: Path) -> Iterator[None]:
    """Hold the cache for a moment, so that a new entry is not swept before it is locked."""
    handle = os.open(cache, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def abandoned(folder: Path) -> bool:
    """Return whether no process is writing an entry any more."""
    try:
        handle = os.open(folder / _IDS, os.O_RDWR | os.O_NOFOLLOW | disk.FLAGS)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(handle).st_mtime > _ABANDONED_SECONDS
    finally:
        os.close(handle)
    return True
