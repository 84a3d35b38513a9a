"""Batches: rows packed from the stream of tokens, and the check of those that a hook returns.

Rows are contiguous pieces of the stream, without overlap and without padding. Row r holds its
tokens [r T, r T + T); its labels are the tokens that follow, so one more token is read than is used
up. The stream is every epoch's documents, end to end, without a gap between epochs; labels
therefore cross documents and epochs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minillm_core.data.documents import Cursor, Documents, order
from minillm_core.errors import DataError

Batch = dict[str, np.ndarray]
"""ids, labels, documents, positions: int32 (rows, T), C-contiguous; and what on_batch adds."""

OnBatch = Callable[[Batch, str], Batch]
"""``on_batch(batch, phase) -> batch``; phase is "train" or "eval"."""

FIELDS = ("ids", "labels", "documents", "positions")


def checked(batch: Batch, vocab: int) -> Batch:
    """Check a hook's batch before a framework reads it: MLX reads ids out of range without an error.

    Raises:
        DataError: a field is missing, of another type or shape, or an id or label is not below
            vocab.
    """
    if not isinstance(batch, dict):
        raise _wrong(f"{type(batch).__name__}, not a dict of arrays")
    for name in FIELDS:
        field = batch.get(name)
        if not isinstance(field, np.ndarray):
            raise _wrong(f"no array {name!r}")
        if field.dtype != np.int32 or field.ndim != 2 or field.shape != batch["ids"].shape:
            raise _wrong(f"{name!r} as {field.dtype} {field.shape}, not int32 (rows, T)")
    for name in ("ids", "labels"):  # labels may be below 0: nothing is predicted there
        field = batch[name]
        if field.size and (field.max() >= vocab or (name == "ids" and field.min() < 0)):
            raise _wrong(f"{name!r} from {field.min()} to {field.max()}, model.vocab={vocab}")
    return batch


def _wrong(what: str) -> DataError:
    return DataError(
        f"on_batch returned {what}",
        where="the batch that on_batch returned",
        fix="return the batch it was given, with int32 ids and labels below model.vocab",
    )


class Stream:
    """An endless stream of a dataset's tokens, read forward from a cursor.

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
        self._rows: dict[int, Documents] = {}
        self._position = int(self._row_of(cursor.epoch).offsets[cursor.document]) + cursor.offset

    @property
    def cursor(self) -> Cursor:
        """Return the place of the next token; equal places have equal cursors."""
        document, offset = self._row_of(self._epoch).locate(self._position)
        return Cursor(self._fingerprint, self._epoch, document, offset)

    def read(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Read the next ``count`` tokens and one more, which stays to be read.

        Returns:
            ids int32 (count + 1,), and starts bool (count + 1,): True where a document begins.
        """
        ids, starts = np.empty(count + 1, np.int32), np.empty(count + 1, bool)
        filled, epoch, position = 0, self._epoch, self._position
        while filled < count + 1:
            row = self._row_of(epoch)
            filled += row.read(position, ids[filled:], starts[filled:])
            epoch, position = epoch + 1, 0
        self._position += count
        while self._position >= (tokens := self._row_of(self._epoch).tokens):
            self._position -= tokens
            self._rows.pop(self._epoch)
            self._epoch += 1
        return ids, starts

    def _row_of(self, epoch: int) -> Documents:
        if epoch not in self._rows:
            permutation = order(len(self._documents), self._seed, epoch)
            self._rows[epoch] = self._documents.ordered(permutation)
        return self._rows[epoch]


def pack(ids: np.ndarray, starts: np.ndarray, rows: int) -> dict[str, np.ndarray]:
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
