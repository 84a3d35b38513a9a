"""Tokenised documents, their shuffled order, and the cursor: the place reached in that order.

Documents are views into id arrays, most of them memory maps of files. One rule and one seed determine
their order; neither it nor a cursor depends on rows, gradient accumulation, sequence length, processes or
prefetching.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import numpy as np
import xxhash

from minillm_core.errors import DataError
from minillm_core.nn.reference import Function

if TYPE_CHECKING:
    from minillm_core.data.blocks import Blocks


def digest(*contents: str | np.ndarray) -> str:
    """Return the xxh3-128 digest of strings and arrays, in order: it detects damage, not attacks."""
    state = xxhash.xxh3_128()
    for content in contents:
        text = isinstance(content, str)
        state.update(content.encode() if text else np.ascontiguousarray(content).data)
    return state.hexdigest()


@dataclass(frozen=True)
class MappedFile:
    """A memory-mapped file, with its state when it was opened.

    It must not be written to while it is mapped: the ids would change under the run, and reading past the
    end of a truncated file kills the process (SIGBUS). A file that is deleted, or replaced by another of its
    name, stays unchanged for the processes that have mapped it.

    Attributes:
        path: of the file.
        size: its bytes.
        modified: its modification time, in nanoseconds.
        inode: device and inode number, which tell it from another file under its name.
    """

    path: Path
    size: int
    modified: int
    inode: tuple[int, int]

    @classmethod
    def of(cls, path: Path, status: os.stat_result) -> MappedFile:
        """Describe the file at ``path``, with a status that was taken while it was open."""
        return cls(path, status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino))

    def check_length(self) -> None:
        """Check that the file has not become shorter.

        Raises:
            DataError: it was truncated.
        """
        if (now := self._now()) and now.st_size < self.size:
            raise self._changed(f"cut short from {self.size:,} to {now.st_size:,} bytes")

    def check_unchanged(self) -> None:
        """Compare its size and time with those at opening.

        Raises:
            DataError: they differ.
        """
        now = self._now()
        if now and (now.st_size, now.st_mtime_ns) != (self.size, self.modified):
            raise self._changed("written to")

    def _now(self) -> os.stat_result | None:
        try:
            now = self.path.stat()
        except OSError:
            return None
        return now if (now.st_dev, now.st_ino) == self.inode else None

    def _changed(self, how: str) -> DataError:
        return DataError(
            f"the file was {how} while the run was reading it",
            where=str(self.path),
            fix="put it back as it was and resume from the last checkpoint, or start a new run; "
            "put new data in a new file",
        )


IDS = "ids"
"""Name of the ids among the columns of documents."""

Columns = dict[str, np.ndarray]
"""Columns of some tokens, (n,) each: ids, and a source's further fields."""


class Stretches(NamedTuple):
    """Stretches of documents laid end to end, and their places in columns: int64 (stretches,) each."""

    first: np.ndarray  # positions of their first tokens
    last: np.ndarray  # one past their last tokens
    at: np.ndarray  # offsets of their first tokens in the columns; they do not overlap there

    @classmethod
    def one(cls, first: int, last: int) -> Self:
        """Return the single stretch from ``first`` to ``last``, at the beginning of the columns."""
        return cls(np.array([first]), np.array([last]), np.zeros(1, np.int64))


def column(array: np.ndarray, name: str) -> np.ndarray:
    """Return one column of an array of records; a plain array of ids has only that one, other fields are 0."""
    if array.dtype.names:
        return array[name]
    return array if name == IDS else np.broadcast_to(array.dtype.type(0), array.shape)


@dataclass(frozen=True, eq=False)
class Documents:
    """Tokenised documents in file order, none of them empty.

    Documents made here begin with the end-of-text id; a piece of a document (the held-out tail of a
    stream, a shard that starts in the middle) does not.

    Attributes:
        arrays: 1-d arrays of ids, uint16, uint32 or int32, every id in 0 <= id < vocab; or of
            records: an id, ``ids``, and further fields of its token.
        spans: int64 (documents, 3): which array, first token, one past the last.
        vocab: ids are smaller than this.
        digest: identifies the content; the same text, tokenizer and split give the same digest.
        files: the files behind the arrays, None for an array in memory; empty if all are.
    """

    arrays: tuple[np.ndarray, ...]
    spans: np.ndarray
    vocab: int
    digest: str
    files: tuple[MappedFile | None, ...] = ()

    @classmethod
    def of(cls, documents: Sequence[Sequence[int] | np.ndarray], vocab: int) -> Documents:
        """Build documents from lists of ids, unchanged: no end-of-text id is added.

        Raises:
            ValueError: a document is empty or holds an id outside 0 <= id < vocab.
        """
        lengths = np.array([len(ids) for ids in documents], np.int64)
        if len(lengths) and lengths.min() == 0:
            raise ValueError("a document without a token")
        ids = np.concatenate([np.asarray(d, np.int64) for d in documents] or [np.zeros(0, int)])
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab):
            raise ValueError(f"an id outside 0 <= id < {vocab}")
        ends = np.cumsum(lengths)
        spans = np.stack([np.zeros_like(ends), ends - lengths, ends], axis=1)
        ids = ids.astype(np.int32)
        return cls((ids,), spans, vocab, digest(ids, spans))

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> np.ndarray:
        """Return a view of the ids of one document, (length,)."""
        array, first, last = self.spans[index].tolist()
        return column(self.arrays[array], IDS)[first:last]

    @cached_property
    def fields(self) -> dict[str, np.dtype]:
        """The fields of a token, name -> dtype: its id, int32, and further ones."""
        dtypes = (array.dtype for array in self.arrays)
        named = {name: dt[name] for dt in dtypes for name in dt.names or ()}
        return {**named, IDS: np.dtype(np.int32)}

    def room(self, tokens: int) -> Columns:
        """Return arrays of zeros for this many tokens, for :meth:`read`."""
        return {name: np.zeros(tokens, dtype) for name, dtype in self.fields.items()}

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each document: int64 (documents,)."""
        return self.spans[:, 2] - self.spans[:, 1]

    @cached_property
    def offsets(self) -> np.ndarray:
        """Each document's start when all are laid end to end, and the end: int64 (documents + 1,)."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])

    @property
    def tokens(self) -> int:
        """The number of tokens of all documents."""
        return int(self.offsets[-1])

    def block(self, number: int) -> Documents | None:
        """Return all documents as block 0, the only one: see :class:`Blocked`."""
        return None if number else self

    def part(self, name: str, spans: np.ndarray) -> Documents:
        """Return other spans of the same arrays as a dataset of its own, with ``name`` in its digest."""
        return replace(self, spans=spans, digest=digest(f"{self.digest} {name}", spans))

    def ordered(self, permutation: np.ndarray | None) -> Documents:
        """Return the documents in another order, int (documents,); None: unchanged."""
        return self if permutation is None else replace(self, spans=self.spans[permutation])

    def locate(self, position: int) -> tuple[int, int]:
        """Return the document at a position when laid end to end, and the offset within it."""
        document = int(np.searchsorted(self.offsets, position, side="right")) - 1
        return document, position - int(self.offsets[document])

    def read(self, position: int, columns: Columns, starts: np.ndarray) -> int:
        """Copy tokens from ``position`` on, as many as fit and exist; return their number.

        Args:
            position: of the first token, 0 <= position <= tokens.
            columns: from :meth:`room`, (n,) each; written.
            starts: bool (n,), written: True where a document begins.

        Raises:
            DataError: as :meth:`gather`.
        """
        count = min(len(starts), self.tokens - position)
        if count <= 0:
            return 0
        here = {name: out[:count] for name, out in columns.items()}
        starts[:count] = False
        self.gather(Stretches.one(position, position + count), here, starts[:count])
        return count

    def gather(self, stretches: Stretches, columns: Columns, starts: np.ndarray) -> None:
        """Copy stretches of tokens of the documents laid end to end.

        Args:
            stretches: their positions, first < last <= tokens, and their places.
            columns: (n,) each, written; ids elsewhere must be valid, as from :meth:`room`.
            starts: bool (n,), set where a document begins.

        Raises:
            DataError: a file changed since it was opened: it is too short, or holds an id outside the
                embedding, which a framework would read out of bounds.
        """
        first, last, at = stretches
        begin = np.searchsorted(self.offsets, first, side="right") - 1
        counts = np.searchsorted(self.offsets, last) - begin  # documents of each stretch
        stretch = np.repeat(np.arange(len(first)), counts)
        document = np.arange(len(stretch)) + np.repeat(begin - np.cumsum(counts) + counts, counts)
        opens, (array, base, _) = self.offsets[document], self.spans[document].T
        begin = np.maximum(first[stretch], opens)
        end = np.minimum(last[stretch], self.offsets[document + 1])
        to = at[stretch] + begin - first[stretch]
        starts[to[begin == opens]] = True
        found = {int(one): self.arrays[one] for one in np.unique(array)}
        files = [file for one in found if self.files and (file := self.files[one])]
        for file in files:
            file.check_length()
        source, until = begin + base - opens, end + base - opens
        places = [one.tolist() for one in (array, source, until, to, to + end - begin)]
        for name, out in columns.items():
            views = {number: column(one, name) for number, one in found.items()}
            for number, one, other, here, there in zip(*places, strict=True):
                out[here:there] = views[number][one:other]
        ids = columns[IDS]
        if ids.max() >= self.vocab or ids.min() < 0:
            for file in files:
                file.check_unchanged()
            raise DataError(
                f"an id outside 0 <= id < model.vocab={self.vocab} was read",
                where=", ".join(sorted(str(file.path) for file in files)) or "the documents",
                fix="the file has changed since it was opened: put it back as it was",
            )

    def check_unchanged(self) -> None:
        """Check that the files behind the documents have not changed since they were opened.

        Raises:
            DataError: one was written to.
        """
        for file in filter(None, self.files):
            file.check_unchanged()


Blocked: TypeAlias = "Documents | Blocks"
"""Documents that are read block by block; a text that is not in blocks is one block."""

RULE = "default_rng(seed + epoch).permutation(documents)"
"""Part of every fingerprint: a change of the rule changes the dataset."""


def order(documents: int, seed: int, epoch: int = 0, block: int = 0) -> np.ndarray:
    """Return the shuffled order of the documents of an epoch, or of a block of it.

    Returns:
        Their indices in training order, int64 (documents,).
    """
    key = (seed + epoch, block) if block else seed + epoch
    return np.random.default_rng(key).permutation(documents)


Arrangement = Mapping[str, Function]
"""The plugins' claims between documents and rows: "order", "packer", "windows"."""

PLAIN: Arrangement = {}


def fingerprint(documents: Blocked, seed: int, by: Arrangement = PLAIN) -> str:
    """Return the digest of dataset and order: 32 hex digits that change with any id, boundary, seed or rule.

    Plugins that arrange the documents are part of the rule.
    """
    rule = f"{RULE}, {dict(by)}" if by else RULE
    return digest(f"{rule}\n{seed}\n{documents.digest}")


def permutation(
    lengths: np.ndarray, seed: int, epoch: int, by: Arrangement, block: int = 0
) -> np.ndarray:
    """Return the order of the documents of an epoch, or of a block of it, by a plugin or by :func:`order`.

    Raises:
        PluginCodeError: the plugin returned no permutation.
    """
    if (claimed := by.get("order")) is None:
        return order(len(lengths), seed, epoch, block)
    return claimed_order(claimed, lengths.copy(), len(lengths), seed, epoch, "documents")


def claimed_order(
    claimed: Function, given: object, count: int, seed: int, epoch: int, what: str
) -> np.ndarray:
    """Call a plugin for an order of ``count`` items, described to it by ``given``: int64 (count,).

    Raises:
        PluginCodeError: it returned no permutation.
    """
    found = np.asarray(claimed.call(given, seed, epoch))
    if found.dtype.kind != "i" or not np.array_equal(np.sort(found), np.arange(count)):
        said = f"epoch {epoch}: not a permutation of the {count:,} {what}"
        raise claimed.broken(said, "return each index from 0 once, as an integer array")
    return found


def check_cursor(data: Mapping[str, Any], expected: str) -> None:
    """Compare a cursor's fingerprint with that of the current data.

    Raises:
        DataError: they differ.
    """
    if data.get("fingerprint") != expected:
        where = f"fingerprint {expected} now, {data.get('fingerprint')} in the cursor"
        fix = "restore the same files, tokenizer, data.val and data.seed, or start a new run"
        raise DataError("the data differ from those that the run was reading", where=where, fix=fix)


@dataclass(frozen=True)
class Cursor:
    """A place in the shuffled documents: that of the next token to read.

    Attributes:
        fingerprint: of the dataset and its order.
        epoch: from 0.
        document: index in the epoch's shuffled order.
        offset: tokens of that document already read; less than its length.
    """

    fingerprint: str
    epoch: int = 0
    document: int = 0
    offset: int = 0

    def data(self) -> dict[str, Any]:
        """Return the cursor as a JSON object."""
        return {**vars(self)}

    @classmethod
    def resume(cls, data: Mapping[str, Any], expected: str) -> Cursor:
        """Return the cursor of a :meth:`data` object, checked against the fingerprint of the current data.

        Raises:
            DataError: the data changed since, or the object is not a cursor.
        """
        names = ("epoch", "document", "offset")
        if not isinstance(data.get("fingerprint"), str) or not all(
            type(data.get(name)) is int and data[name] >= 0 for name in names
        ):
            where, fix = repr(dict(data))[:200], "continue from another checkpoint"
            raise DataError("the data cursor cannot be read", where=where, fix=fix)
        check_cursor(data, expected)
        return cls(data["fingerprint"], *(data[name] for name in names))
