"""Rows cut out of the stream: contiguous, without overlap, without padding.

Row r covers the stream's tokens [r T, r T + T); its labels are the tokens that follow, so one more
is read than is used up. The stream is every epoch's documents, end to end, without a gap between
epochs; labels therefore cross documents and epochs.
"""

from __future__ import annotations

import numpy as np

from minillm_core.data.documents import Documents, Layout
from minillm_core.data.shuffle import Cursor, order

__all__ = ["Stream", "pack"]


class Stream:
    """The endless stream of a dataset's tokens, read forward from a cursor.

    Args:
        documents: at least one token in all.
        seed: of the order.
        cursor: where to begin.
    """

    def __init__(self, documents: Documents, seed: int, cursor: Cursor) -> None:
        if not documents.tokens:
            raise ValueError("a stream of no tokens")
        self._documents, self._seed = documents, seed
        self._fingerprint, self._epoch = cursor.fingerprint, cursor.epoch
        self._layouts: dict[int, Layout] = {}
        self._position = int(self._layout(cursor.epoch).offsets[cursor.document]) + cursor.offset

    @property
    def cursor(self) -> Cursor:
        """The next token; equal places have equal cursors."""
        document, offset = self._layout(self._epoch).locate(self._position)
        return Cursor(self._fingerprint, self._epoch, document, offset)

    def read(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The next ``count`` tokens and one more, which stays to be read.

        Returns:
            ids int32 (count + 1,), and starts bool (count + 1,): True where a document begins.
        """
        ids, starts = np.empty(count + 1, np.int32), np.empty(count + 1, bool)
        filled, epoch, position = 0, self._epoch, self._position
        while filled < count + 1:
            layout = self._layout(epoch)
            filled += layout.read(position, ids[filled:], starts[filled:])
            epoch, position = epoch + 1, 0
        self._advance(count)
        return ids, starts

    def _advance(self, count: int) -> None:
        self._position += count
        while self._position >= (tokens := self._layout(self._epoch).tokens):
            self._position -= tokens
            self._layouts.pop(self._epoch)
            self._epoch += 1

    def _layout(self, epoch: int) -> Layout:
        if epoch not in self._layouts:
            permutation = order(len(self._documents), self._seed, epoch)
            self._layouts[epoch] = Layout(self._documents, permutation)
        return self._layouts[epoch]


def pack(ids: np.ndarray, starts: np.ndarray, rows: int) -> dict[str, np.ndarray]:
    """One micro-batch.

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
