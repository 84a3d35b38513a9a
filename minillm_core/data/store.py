"""Token ids on disk: written once, in a folder named by the digest of their inputs, then mapped.

An entry of the cache holds ``ids.bin`` (uint16 or uint32, little-endian), ``spans.npy`` (see
:class:`~minillm_core.data.documents.Documents`) and ``meta.json`` with a digest of both; and a tokenizer,
if one was trained for it. Digest, ids and spans are checked at every opening: a framework would read out
of bounds for a bad id. The digest detects damage, not malice, so only folders of this account (or root's)
are opened.

While an entry is written its process holds a lock on it; a folder without one was left by a dead process,
and is removed at the next start.
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

from minillm_core import disk, strict
from minillm_core.data.documents import IDS, Documents, MappedFile, column, digest
from minillm_core.data.formats import Progress, ticker
from minillm_core.data.sources import Source
from minillm_core.data.tokenizer import LARGEST_TOKENIZER, Tokenizer
from minillm_core.errors import DataError
from minillm_core.plugins.sourcing import Field

Values = Mapping[str, float | np.ndarray]
"""Field -> its values for some tokens."""

Bookmark = tuple[int, int]
"""A place to resume reading documents: the index of a file, or of a path whose files a plugin reads together,
and the number of documents before it there."""

BEGIN: Bookmark = 0, 0

_IDS, _SPANS, _META, _TOKENIZER = "ids.bin", "spans.npy", "meta.json", "tokenizer.json"
_NAME = re.compile(r"[0-9a-f]{32}(\.tmp-[0-9a-f]+)?")
_ABANDONED_SECONDS = 24 * 3600  # age limit if the file system has no locks
_LARGEST_META = 1 << 20  # bytes
_DIGESTS = "digests.json"
_HEX = re.compile("[0-9a-f]{32}")
_LARGEST_DIGESTS = 32 << 20  # bytes
_MOST_DIGESTS = 400_000
_SETTLED = 3.0  # seconds after which a further write must change a file's times
_ROOT = 0  # it may write anywhere, so its folders are as safe as one's own
_CHUNK = 1 << 22  # ids checked at once


@dataclass(frozen=True)
class Entry:
    """An open entry of the cache.

    Attributes:
        documents: mapped documents.
        end_of_text: the id that begins each.
        notes: "left out: ..." or "cut: ..." -> count.
        tokenizer: the tokenizer.json trained for them; None if one was given, or none was
            needed.
        sample: bytes of text that it was trained on, and of the whole text.
        paths: int64 (documents,): index of each document's path.
        place: place of the next documents, which another entry holds; None: there are none.
    """

    documents: Documents
    end_of_text: int
    notes: dict[str, int]
    tokenizer: Path | None
    sample: tuple[int, int]
    paths: np.ndarray
    place: Bookmark | None


class CacheWriter:
    """A writer of documents to a temporary folder, which :meth:`commit` renames to its final name.

    A context manager: it removes the folder at its end unless it was committed.

    Args:
        entry: the final folder.
        vocab: upper bound of ids; up to 65,536 they take two bytes each.
        origin: description of the documents' source.
        fields: further fields of each token, stored with its id.
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
        self.tokens = 0  # so far, without tokens of mapped shards
        self._lengths: list[int] = []
        self._mapped: list[np.ndarray] = []

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove the temporary folder unless it was committed."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._file.close()  # and its lock

    @property
    def documents(self) -> int:
        """The number of documents so far."""
        return len(self._lengths) + sum(map(len, self._mapped))

    def document(self, end_of_text: int, ids: np.ndarray, values: Values | None = None) -> None:
        """Add a document; prepend an end-of-text id, with zeros as values, unless it begins with one."""
        self._lengths.append(0)
        if not (len(ids) > 0 and int(ids[0]) == end_of_text):
            self.more(np.array([end_of_text]))
        self.more(ids, values)

    def more(self, ids: np.ndarray, values: Values | None = None) -> None:
        """Append further ids to the last document, with the values of their fields, default 0."""
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
        """Add the documents of a mapped shard, whose file stays in place."""
        ends = np.append(starts[1:], tokens)
        number = np.full_like(starts, len(self._mapped) + 1)
        self._mapped.append(np.stack([number, starts, ends], axis=1))

    def commit(self, tokenizer: Tokenizer | None, **facts: Any) -> None:
        """Finish the entry; if another process has committed one meanwhile, keep that.

        Args:
            tokenizer: the tokenizer trained for the documents, if any.
            facts: JSON about them: end_of_text, the id that begins each; notes of the reading; sample,
                the bytes of text that the tokenizer was trained on, and in all; paths, (index of a path,
                documents from it) in order; place, that of the next documents, None if there are none.

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
    """A cache of file digests by their device, inode, size and times, so that a later start reads no file again.

    A file's key is its device, inode, size, modification time and change time: a write sets the change time,
    and no program can set it back. A file that changed within the last seconds gets no entry, since another
    change might leave the same times.

    Args:
        folder: the folder of digests.json; invalid entries there are ignored.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._known, self._new = folder / _DIGESTS, dict[str, str](), dict[str, str]()
        with suppress(OSError, ValueError, RecursionError):
            _check_owner(folder)
            held = json.loads(disk.read_file(self._path, _LARGEST_DIGESTS))
            if isinstance(held, dict):
                self._known = {str(key): str(value) for key, value in held.items()}

    def of(self, source: Source, tick: Callable[[int], None]) -> str:
        """Return a file's digest from the cache, or by reading the file.

        Args:
            source: the file.
            tick: called with the number of bytes done.

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
            return self._new.setdefault(key, self._known[key])
        return source.digest(tick)

    def keep(self) -> None:
        """Write this start's digests first, then earlier ones, up to a limit.

        Raises:
            OSError: they cannot be written.
        """
        kept = [*{**self._new, **self._known}.items()]
        if self._new:
            disk.replace(self._path, json.dumps(dict(kept[:_MOST_DIGESTS])).encode())


def sweep(cache: Path) -> None:
    """Remove the leftovers of processes that died while writing."""
    with suppress(OSError), alone(cache):
        for folder in entry_folders(cache):
            if ".tmp-" in folder.name and abandoned(folder):
                disk.remove(folder)


def open_entry(folder: Path, say: Callable[[str], None], **given: Any) -> Entry | None:
    """Map an entry and validate all of it.

    Args:
        folder: of the entry.
        say: prints a line about a damaged entry.
        given: shards, vocab, content, progress and fields, see :func:`_checked`.

    Returns:
        None if there is no entry, or a damaged one, which is removed.

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
        say(f"the tokens kept in {folder} are damaged, so the text is tokenised again")
        disk.remove(folder)
        return None
    with suppress(OSError):
        os.utime(folder)  # time of last use
    return entry


def _checked(
    folder: Path,
    shards: Sequence[tuple[np.ndarray, MappedFile]],
    vocab: int,
    content: str,
    progress: Progress | None,
    fields: Sequence[Field],
) -> Entry:
    """Validate and map an entry.

    Args:
        folder: of the entry.
        shards: the arrays that its spans number from 1, and their files.
        vocab: upper bound of ids.
        content: digest of the shards, for the documents' digest.
        progress: of the check.
        fields: the fields that it was written with.

    Raises:
        ValueError and similar: it is damaged.
    """
    if folder.is_symlink():
        raise ValueError("a link")
    meta = read_meta(folder)
    if meta.pop("seal") != digest(json.dumps(meta)):
        raise ValueError("meta.json")
    dtype = _record(np.dtype({"<u2": "<u2", "<u4": "<u4"}[meta["dtype"]]), fields)
    place = place_of(meta)
    shards = () if place else shards  # mapped shards follow all other documents
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
    """Return the dtype of a token: an id, or a record of it and its fields."""
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
    """Yield the paths in the cache that have names of entries."""
    return (cache / name for name in sorted(os.listdir(cache)) if _NAME.fullmatch(name))


def read_meta(folder: Path) -> dict[str, Any]:
    """Read an entry's meta.json, without validation.

    Raises:
        OSError, ValueError: it cannot be read or parsed.
    """
    return strict.parse(disk.read_file(folder / _META, _LARGEST_META))


def place_of(meta: Mapping[str, Any]) -> Bookmark | None:
    """Return the place of the next documents from an entry's meta.json.

    Raises:
        KeyError, TypeError, ValueError: it holds no valid place.
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
    """Lock the cache briefly, so that a new entry is not swept before it is locked."""
    handle = os.open(cache, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def abandoned(folder: Path) -> bool:
    """Return whether the process that was writing an entry is gone."""
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
