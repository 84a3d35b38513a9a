"""Logits and losses of rows of ids, by a model with its current weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from minillm_core.backends.base import Batch, Model, lone_row
from minillm_core.config.schema import Config
from minillm_core.data import OnBatch, Tokenizer
from minillm_core.data.batch import padded_rows
from minillm_core.errors import DataError, Refusal

Rows = Sequence[Sequence[int] | np.ndarray]


@dataclass(frozen=True)
class Predictor:
    """A model with its current weights, that computes logits and losses of rows of ids."""

    model: Model
    config: Config
    tokenizer: Tokenizer | None  # the run's; None: it was trained on ids
    hook: OnBatch | None = None  # the plugins' on_batch

    def logits(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Compute the logits of the next token after each prefix.

        Args:
            ids: int (T,), the tokens of one row, 1 <= T <= train.seq_len.

        Returns:
            float32 (T, V).

        Raises:
            DataError: an id is outside the vocabulary, ids are not int (T,), or the row is too long.
        """
        row = lone_row(row_of_ids(ids, "logits"))
        if self.hook is not None:
            row = self.hook(dict(row), "decode")
        decoding = self.model.decoding()
        columns = [
            {name: array[:, t : t + 1] for name, array in row.items()}
            for t in range(row["ids"].shape[1])
        ]
        return np.stack([decoding.feed(column) for column in columns])

    def losses(self, rows: Rows) -> list[np.ndarray]:
        """Compute the loss of each token of some rows, as one batch.

        Shorter rows are padded to the longest: pass rows of similar length together.

        Args:
            rows: int (n,) each, 2 <= n <= train.seq_len + 1.

        Returns:
            float32 (n - 1,) for each row: nats of each token but the first, given those before it.

        Raises:
            DataError: an id is outside the vocabulary, or a row is too long or too short.
        """
        found = self.model.losses(self._batch(rows, "losses"))
        return [nats[: len(ids) - 1] for nats, ids in zip(found, rows, strict=True)]

    def scores(self, rows: Rows) -> list[tuple[np.ndarray, np.ndarray]]:
        """Compute the loss of each token of some rows, and whether it is the argmax there.

        Args:
            rows: as for :meth:`losses`; the logits of all of them are held at once.

        Returns:
            For each row float32 (n - 1,), as of :meth:`losses`, and bool (n - 1,).

        Raises:
            DataError: as of :meth:`losses`.
        """
        nats, below = self.model.scores(self._batch(rows, "scores"))
        return [
            (nats[index, : len(ids) - 1], below[index, : len(ids) - 1] <= 0)
            for index, ids in enumerate(rows)
        ]

    def _batch(self, rows: Rows, where: str) -> Batch:
        """Pad rows to one batch, after the plugins' ``on_batch``."""
        config, rows = self.config, [*rows] if isinstance(rows, Iterable) else [rows]
        given = [row_of_ids(ids, where) for ids in rows or [()]]
        for ids in given:
            if not 2 <= len(ids) <= config.train.seq_len + 1 or not (
                0 <= ids.min() <= ids.max() < config.model.vocab
            ):
                raise DataError(
                    f"a row of {len(ids)} ids from {min(ids, default=0)} to {max(ids, default=0)}",
                    where=where,
                    fix=f"2 to {config.train.seq_len + 1} ids below {config.model.vocab}",
                )
        batch = padded_rows(given)
        return batch if self.hook is None else self.hook(batch, "eval")


def require(allowed: object, name: str, given: object, fix: str) -> None:
    """Refuse the value given for an argument if it is not allowed."""
    if not allowed:
        raise Refusal(f"{name} cannot be {given!r}", where=name, fix=fix)


def require_counts(least: int = 1, **counts: object) -> None:
    """Refuse arguments that are not whole numbers of at least ``least``; None is allowed."""
    for name, count in counts.items():
        allowed = count is None or (isinstance(count, int | np.integer) and count >= least)
        require(allowed, name, count, f"a whole number, {least} or more")


def row_of_ids(ids: Sequence[int] | np.ndarray, where: str) -> np.ndarray:
    """Return the ids of a row as an array, int (T,), T >= 1."""
    row = np.asarray(ids)
    if row.dtype.kind in "iu":  # else 2**32 would be id 0
        row = row.clip(-1, 2**31 - 1)
    if row.ndim != 1 or not row.size or row.dtype.kind not in "iu":
        raise DataError(
            f"{row.dtype} {row.shape} where the ids of a row are needed",
            where=where,
            fix="int (T,), T >= 1, such as run.tokenizer.encode([text])[0]",
        )
    return row
