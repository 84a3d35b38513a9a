"""The endless stream of a dataset's tokens, and the rows that are cut from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minillm_core.data.documents import PLAIN, Arrangement, Cursor, Documents, permutation
from minillm_core.plugins.packing import Piece

Batch = dict[str, np.ndarray]
"""ids, labels, documents, positions: int32 (rows, T), C-contiguous; and what on_batch adds."""


class Stream:
    """An endless stream of a dataset's tokens, read forward from a cursor.

    It is every epoch's documents, end to end, without a gap between epochs.

    Args:
        documents: at least one token in all.
        seed: of the order.
        cursor: where to begin.
        by: gives each epoch's order.
    """

    def __init__(
        self, documents: Documents, seed: int, cursor: Cursor, by: Arrangement = PLAIN
    ) -> None:
        if not documents.tokens:
            raise ValueError("a stream of no tokens")
        self._documents, self._seed, self._by = documents, seed, by
        self._fingerprint = cursor.fingerprint
        self._epochs: dict[int, Documents] = {}
        offset = int(self._epoch(cursor.epoch).offsets[cursor.document]) + cursor.offset
        self.position = cursor.epoch * documents.tokens + offset  # of the next token

    @property
    def cursor(self) -> Cursor:
        """Return the place of the next token; equal places have equal cursors."""
        epoch, place = divmod(self.position, self._documents.tokens)
        return Cursor(self._fingerprint, epoch, *self._epoch(epoch).locate(place))

    def read(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Read the next ``count`` tokens and one more, which stays to be read.

        Returns:
            ids int32 (count + 1,), and starts bool (count + 1,): True where a document begins.
        """
        found = self.at(self.position, count + 1)
        self.position += count
        self.forget()
        return found

    def at(self, position: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Look up ``count`` tokens from a position on; as :meth:`read`, without reading on."""
        ids, starts, filled = np.empty(count, np.int32), np.empty(count, bool), 0
        while filled < count:
            epoch, place = divmod(position + filled, self._documents.tokens)
            filled += self._epoch(epoch).read(place, ids[filled:], starts[filled:])
        return ids, starts

    def take(self) -> Piece:
        """Take the document that begins here, whole."""
        epoch, place = divmod(self.position, self._documents.tokens)
        documents, first = self._epoch(epoch), self.position
        self.position += int(documents.lengths[documents.locate(place)[0]])
        return Piece(first, self.position)

    def forget(self, position: int | None = None) -> None:
        """Drop the orders of epochs that were over at a position; None: where the next token is."""
        epoch = (self.position if position is None else position) // self._documents.tokens
        self._epochs = {number: one for number, one in self._epochs.items() if number >= epoch}

    def _epoch(self, epoch: int) -> Documents:
        if epoch not in self._epochs:
            order = permutation(self._documents.lengths, self._seed, epoch, self._by)
            self._epochs[epoch] = self._documents.ordered(order)
        return self._epochs[epoch]


def pack(ids: np.ndarray, starts: np.ndarray, rows: int) -> Batch:
    """Pack one micro-batch.

    Args:
        ids: int32 (rows * T + 1,), the last one only as a label.
        starts: bool (rows * T + 1,), True where a document begins.
        rows: of the batch.

    Returns:
        ids, labels, documents, positions, each int32 (rows, T) and contiguous. documents numbers
        the documents within a row: 0 for the one that the row begins in, then 1, 2, ...
        positions is 0..T-1 in every row.
    """
    length = (len(ids) - 1) // rows
    begins = starts[:-1].reshape(rows, length).copy()
    begins[:, 0] = False
    return {
        "ids": ids[:-1].reshape(rows, length).copy(),
        "labels": ids[1:].reshape(rows, length).copy(),
        "documents": np.cumsum(begins, axis=1, dtype=np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    }


def joined(parts: Sequence[Batch]) -> Batch:
    """Put the rows of several batches below each other."""
    return {name: np.concatenate([one[name] for one in parts]) for name in parts[0]}
