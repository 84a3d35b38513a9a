"""The token cache: listing and removing its entries."""

from __future__ import annotations

import stat
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from minillm_core import DataError
from minillm_core.documents import (
    abandoned_entry,
    entry_folders,
    lock_cache,
    read_entry_facts,
    remove_path,
)


@dataclass(frozen=True)
class Kept:
    """A listed cache entry; fields missing in a damaged or unfinished entry are None.

    Attributes:
        key: the entry's name, a digest of its inputs.
        state: "complete", "damaged", "being written", or "left over" by a process that died.
        bytes: size on disk.
        origin: the name of its inputs when it was created.
        documents: number of documents.
        tokens: total number of tokens.
        vocab: upper bound of ids, exclusive.
        made: creation time, in seconds since 1970.
        used: time it was last opened, likewise.
    """

    key: str
    state: str
    bytes: int
    origin: str | None
    documents: int | None
    tokens: int | None
    vocab: int | None
    made: float
    used: float


def list_cache(cache: Path) -> list[Kept]:
    """List the entries of a cache, most recently used first.

    Raises:
        DataError: the cache cannot be read.
    """
    try:
        return sorted(map(_kept, entry_folders(cache)), key=lambda entry: -entry.used)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _not_cleared(cache, error, "read") from error


def clear_cache(cache: Path, key: str | None = None) -> list[Kept]:
    """Remove all entries of a cache, or one; runs keep the files that they have open.

    Args:
        cache: the folder.
        key: the key of a single entry, or a unique prefix of it.

    Returns:
        The removed entries; entries being written are kept.

    Raises:
        DataError: the key matches no entry or several, or an entry cannot be removed.
    """
    chosen = [entry for entry in list_cache(cache) if entry.key.startswith(key or "")]
    if key is not None and len(chosen) != 1:
        raise DataError(
            f"{len(chosen) or 'no'} entries of the cache begin with {key!r}",
            where=str(cache),
            fix="take a key from: minillm data cache list",
        )
    removed = []
    try:
        with lock_cache(cache) if chosen else nullcontext():
            for entry in chosen:
                if entry.state != "being written":
                    remove_path(cache / entry.key)
                    removed.append(entry)
    except OSError as error:
        raise _not_cleared(cache, error, "cleared") from error
    return removed


def _kept(folder: Path) -> Kept:
    own = folder.lstat()
    statuses = [own]
    for file in () if stat.S_ISLNK(own.st_mode) else folder.rglob("*"):
        with suppress(OSError):  # removed in the meantime
            statuses.append(file.lstat())
    state, meta = "damaged", {}
    if ".tmp-" in folder.name:
        state = "left over" if abandoned_entry(folder) else "being written"
    else:
        with suppress(OSError, ValueError, RecursionError, MemoryError):
            meta, state = read_entry_facts(folder), "complete"
    kinds = {"origin": str, "documents": int, "tokens": int, "vocab": int}
    return Kept(
        key=folder.name,
        state=state,
        bytes=sum(status.st_size for status in statuses),
        made=min(status.st_mtime for status in statuses),
        used=own.st_mtime,
        **{
            fact: meta[fact] if type(meta.get(fact)) is kind else None
            for fact, kind in kinds.items()
        },
    )


def _not_cleared(cache: Path, error: OSError, verb: str) -> DataError:
    return DataError(
        f"the cache cannot be {verb}: {error.strerror or error}",
        where=str(error.filename or cache),
        fix="check who owns it and its permissions",
    )
