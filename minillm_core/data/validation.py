"""Held-out text as windows that do not overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from minillm_core.data.batch import Batch, OnBatch, checked
from minillm_core.data.documents import Documents, Layout
from minillm_core.data.packing import pack
from minillm_core.data.shuffle import order

__all__ = ["ValidationBatches", "validation_batches"]


def validation_batches(
    documents: Documents,
    *,
    rows: int,
    seq_len: int,
    tokens: int | None,
    seed: int | None,
    on_batch: OnBatch | None = None,
) -> ValidationBatches:
    """The first ``tokens`` predictions of the documents laid end to end, as batches.

    Window w predicts the tokens w T + 1 ... w T + T from those before them in the window.

    Args:
        documents: at least two tokens.
        rows: of every batch; missing rows are padding.
        seq_len: predictions in a window.
        tokens: predictions in all; None, or more than there are: every one.
        seed: of the documents' order, as in training's first epoch; None for file order.
        on_batch: ``(batch, "eval") -> batch``.

    Returns:
        A sequence that makes its batches when they are asked for, as often as they are. All have
        the shape (rows, seq_len); where nothing is to be predicted labels are -1, and where there
        is no token ids are 0 and documents -1.
    """
    return ValidationBatches(documents, rows, seq_len, tokens, seed, on_batch)


class ValidationBatches(Sequence[Batch]):
    """See :func:`validation_batches`."""

    def __init__(
        self,
        documents: Documents,
        rows: int,
        seq_len: int,
        tokens: int | None,
        seed: int | None,
        on_batch: OnBatch | None,
    ) -> None:
        permutation = None if seed is None else order(len(documents), seed)
        self._layout, self._vocab = Layout(documents, permutation), documents.vocab
        self._rows, self._seq_len, self._on_batch = rows, seq_len, on_batch
        available = max(self._layout.tokens - 1, 0)
        self.predictions: int = available if tokens is None else min(tokens, available)

    def __len__(self) -> int:
        return -(-self.predictions // (self._rows * self._seq_len))

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | list[Batch]:
        if isinstance(index, slice):
            return [self._batch(i) for i in range(len(self))[index]]
        return self._batch(range(len(self))[index])

    def _batch(self, index: int) -> Batch:
        size = self._rows * self._seq_len
        first = index * size
        ids, starts = np.zeros(size + 1, np.int32), np.zeros(size + 1, bool)
        filled = self._layout.read(first, ids, starts)
        batch = pack(ids, starts, self._rows)
        flat = {name: field.reshape(-1) for name, field in batch.items()}  # views
        flat["documents"][filled:] = -1
        flat["labels"][max(self.predictions - first, 0) :] = -1
        return checked(self._on_batch(batch, "eval"), self._vocab) if self._on_batch else batch
