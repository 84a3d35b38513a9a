"""The order of the documents, and the place that has been reached in it.

The order is one rule and one seed; it does not depend on rows, accumulation, sequence length,
processes or prefetching, and neither does a cursor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from minillm_core.data.digest import digest
from minillm_core.data.documents import Documents
from minillm_core.errors import DataError

__all__ = ["RULE", "Cursor", "fingerprint", "order"]

RULE = "default_rng(seed + epoch).permutation(documents)"
"""Part of every fingerprint: another rule is another dataset."""


def order(documents: int, seed: int, epoch: int = 0) -> np.ndarray:
    """int64 (documents,): the documents of an epoch, by index, in the order of training."""
    return np.random.default_rng(seed + epoch).permutation(documents)


def fingerprint(documents: Documents, seed: int) -> str:
    """32 hexadecimal digits that change with any id, any boundary, the seed and the rule."""
    return digest(f"{RULE}\n{seed}\n{documents.digest}")


@dataclass(frozen=True)
class Cursor:
    """The next token to be read.

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
        """The cursor as a JSON object."""
        return asdict(self)

    @classmethod
    def resume(cls, data: Mapping[str, Any], documents: Documents, seed: int) -> Cursor:
        """The inverse of :meth:`data`, checked against the documents it is to go on with.

        Raises:
            DataError: the data changed since, or this is no place in them.
        """
        names = ("epoch", "document", "offset")
        if not isinstance(data.get("fingerprint"), str) or not all(
            type(data.get(name)) is int and data[name] >= 0 for name in names
        ):
            raise DataError(
                "the data cursor is not one",
                where=repr(dict(data))[:200],
                fix="continue from another checkpoint",
            )
        expected = fingerprint(documents, seed)
        if data["fingerprint"] != expected:
            raise DataError(
                "the data are not those that the run was reading",
                where=f"fingerprint {expected} now, {data['fingerprint']} in the cursor",
                fix="give back the same files, tokenizer, data.val and data.seed, or start a new run",
            )
        cursor = cls(data["fingerprint"], *(data[name] for name in names))
        if cursor.document < len(documents):
            index = order(len(documents), seed, cursor.epoch)[cursor.document]
            if cursor.offset < documents.lengths[index]:
                return cursor
        raise DataError(
            "the data cursor points past the end of the data",
            where=f"epoch {cursor.epoch}, document {cursor.document}, token {cursor.offset}",
            fix="continue from another checkpoint",
        )
