"""What a batch is, and what a hook may hand back for one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minillm_core.errors import DataError

__all__ = ["FIELDS", "Batch", "OnBatch", "checked"]

Batch = dict[str, np.ndarray]
"""ids, labels, documents, positions: int32 (rows, T), C-contiguous; and what on_batch adds."""

OnBatch = Callable[[Batch, str], Batch]
"""``on_batch(batch, phase) -> batch``; phase is "train" or "eval"."""

FIELDS = ("ids", "labels", "documents", "positions")


def checked(batch: Batch, vocab: int) -> Batch:
    """A hook's batch, if a framework can be trusted with it: MLX reads ids out of range as they
    come, and gives a number.

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
    for name, least in (("ids", 0), ("labels", None)):
        field = batch[name]
        if field.size and (field.max() >= vocab or (least is not None and field.min() < least)):
            raise _wrong(f"{name!r} from {field.min()} to {field.max()}, model.vocab={vocab}")
    return batch


def _wrong(what: str) -> DataError:
    return DataError(
        f"on_batch returned {what}",
        where="the batch that on_batch returned",
        fix="return the batch it was given, with int32 ids and labels below model.vocab",
    )
