"""Rearranged rows: tokens moved and special tokens inserted, with labels and fields to match."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from minillm_core import DataError

Batch = dict[str, np.ndarray]

_OF_ROWS = (
    "positions",
    "source",
)  # independent of the tokens: per position, or constant over a row
_PLAIN = ("ids", "labels", "documents", *_OF_ROWS)
_TARGET = "target_"


@dataclass(frozen=True)
class Layout:
    """A segment of one document in its new order.

    Attributes:
        take: int (n,), source index in the row of each token; a special token: -1 - its id.
        predicted: bool (n,), whether the token is predicted from the one before it.
        ends: whether the segment's last label is kept; else it is -1.
    """

    take: np.ndarray
    predicted: np.ndarray
    ends: bool = True


def stretches(documents: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the start and end (exclusive) of each document of a row, skipping padding (-1).

    Args:
        documents: int32 (T,), the document number of each position.
    """
    cuts = np.flatnonzero(np.diff(documents)) + 1
    for first, end in zip([0, *cuts], [*cuts, len(documents)], strict=True):
        if documents[first] >= 0:
            yield int(first), int(end)


def as_it_is(first: int, end: int) -> Layout:
    """Return the layout that leaves ``[first, end)`` unchanged."""
    return Layout(np.arange(first, end), np.ones(end - first, bool))


def relaid(batch: Batch, rows: Sequence[Sequence[Layout]]) -> Batch:
    """Rearrange every row; tokens beyond the row's end are cut.

    A token whose prediction was masked (the label before it was -1) stays masked in its new position.

    Args:
        batch: the batch of on_batch; of extra fields only those of a source or a mixture are allowed.
        rows: the segments of each row, in order.

    Raises:
        DataError: another plugin added a field that cannot be moved with the tokens.
    """
    names = [name for name in batch if name not in _PLAIN and not name.startswith(_TARGET)]
    for name in names:
        if name == "weights" or _TARGET + name not in batch or batch[name].ndim != 2:
            raise DataError(
                f"the rows cannot be laid out anew with the field '{name}'",
                where="on_batch",
                fix="leave out the plugin that writes it, or this one",
            )
    found = {name: np.zeros_like(array) for name, array in batch.items()}
    found["labels"][...], found["documents"][...] = -1, -1
    found |= {name: batch[name] for name in _OF_ROWS if name in batch}
    for row, laid in enumerate(rows):
        at, room = 0, batch["ids"].shape[1]
        for number, one in enumerate(laid):
            count = min(len(one.take), room - at)
            if count <= 0:
                break
            _fill(batch, found, names, row, at, count, number, one)
            at += count
    return found


def _fill(
    batch: Batch,
    found: Batch,
    names: Sequence[str],
    row: int,
    at: int,
    count: int,
    number: int,
    one: Layout,
) -> None:
    """Write one segment's first ``count`` tokens into a row, from position ``at`` on."""
    take, here = one.take, slice(at, at + count)
    old = np.maximum(take, 0)
    ids = np.where(take < 0, -1 - take, batch["ids"][row, old])
    found["ids"][row, here], found["documents"][row, here] = ids[:count], number
    if at and found["labels"][row, at - 1] != ids[0]:  # the next token changed
        found["labels"][row, at - 1] = -1
    last = int(old.max())  # the segment's last token, in the old row
    labels = np.append(np.where(one.predicted[1:], ids[1:], -1), -1)
    unlabelled = np.zeros(len(take), bool)  # tokens that were not predicted in the old row
    unlabelled[take > 0] = batch["labels"][row, take[take > 0] - 1] < 0
    labels[:-1][unlabelled[1:]] = -1
    if one.ends:
        labels[-1] = batch["labels"][row, last]
    found["labels"][row, here] = labels[:count]
    for name in names:
        values = np.where(take < 0, 0, batch[name][row, old]).astype(batch[name].dtype)
        after = batch[_TARGET + name][row, last] if one.ends else 0
        found[name][row, here] = values[:count]
        found[_TARGET + name][row, here] = np.append(values[1:], after)[:count]
