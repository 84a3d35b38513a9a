"""Tokenised documents: views into id arrays, most of them memory maps of files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from minillm_core.data.digest import digest

__all__ = ["Documents", "Layout"]


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents in the order of their files, none of them empty.

    Those made here begin with the end-of-text id; a piece of a document (the held-out tail of a
    stream, a shard that starts in the middle) does not.

    Attributes:
        arrays: 1-d arrays of ids, uint16, uint32 or int32, every id in 0 <= id < vocab.
        spans: int64 (documents, 3): which array, first token, one past the last.
        vocab: ids are smaller than this.
        digest: names the content; the same text, tokenizer and split give the same digest.
    """

    arrays: tuple[np.ndarray, ...]
    spans: np.ndarray
    vocab: int
    digest: str

    @classmethod
    def of(cls, documents: Sequence[Sequence[int] | np.ndarray], vocab: int) -> Documents:
        """Documents from lists of ids, as they are: no end-of-text id is added.

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
        """The ids of one document: a view, (length,)."""
        array, first, last = self.spans[index].tolist()
        return self.arrays[array][first:last]

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 (documents,): tokens in each."""
        return self.spans[:, 2] - self.spans[:, 1]

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 (documents + 1,): where each would start, were they laid end to end."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])

    @property
    def tokens(self) -> int:
        """Tokens in all documents."""
        return int(self.offsets[-1])

    def select(self, indices: np.ndarray, part: str) -> Documents:
        """Some of the documents, in the order of ``indices``; ``part`` names them in the digest."""
        return self.replace(self.spans[indices], part)

    def replace(self, spans: np.ndarray, part: str) -> Documents:
        """Other spans of the same arrays."""
        return Documents(self.arrays, spans, self.vocab, digest(f"{self.digest} {part}", spans))


class Layout:
    """Documents laid end to end in a given order: one long row of ``tokens`` ids.

    Args:
        documents: what is laid out.
        order: int (documents,), a permutation of their indices; None for file order.
    """

    def __init__(self, documents: Documents, order: np.ndarray | None = None) -> None:
        spans = documents.spans if order is None else documents.spans[order]
        self._arrays, self._spans = documents.arrays, spans
        lengths = spans[:, 2] - spans[:, 1]
        self.offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        self.tokens = int(self.offsets[-1])

    def locate(self, position: int) -> tuple[int, int]:
        """The document at a position, counted in this order, and the offset within it."""
        document = int(np.searchsorted(self.offsets, position, side="right")) - 1
        return document, position - int(self.offsets[document])

    def read(self, position: int, ids: np.ndarray, starts: np.ndarray) -> int:
        """Copy tokens from ``position`` on, as many as fit and exist; returns how many.

        Args:
            position: of the first token, 0 <= position <= tokens.
            ids: int32 (n,), written.
            starts: bool (n,), written: True where a document begins.
        """
        count = min(len(ids), self.tokens - position)
        if count <= 0:
            return 0
        starts[:count] = False
        document, offset = self.locate(position)
        filled = 0
        while filled < count:
            array, first, last = self._spans[document].tolist()
            taken = min(last - first - offset, count - filled)
            begin = first + offset
            ids[filled : filled + taken] = self._arrays[array][begin : begin + taken]
            starts[filled] = offset == 0
            filled, document, offset = filled + taken, document + 1, 0
        return count
