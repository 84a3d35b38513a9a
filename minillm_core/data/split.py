"""What is held out for validation.

Whole documents where there are at least 20, chosen by the seed; otherwise the tail of the token
stream, which may begin in the middle of a document. Never less than one window.
"""

from __future__ import annotations

import numpy as np

from minillm_core.data.documents import Documents
from minillm_core.data.shuffle import order
from minillm_core.errors import DataError

__all__ = ["FEW", "check_fraction", "check_length", "held_out", "split"]

FEW = 20
"""With fewer documents than this, the tail of the stream is held out."""


def check_fraction(fraction: float) -> None:
    """Refuse what is no fraction to hold out.

    Raises:
        DataError: it is not in 0 <= fraction < 1.
    """
    if not 0 <= fraction < 1:
        raise DataError(
            "the held-out part must be a fraction from 0 up to, but not, 1",
            where=f"data.val={fraction}",
            fix="set data.val=0.05, or give a path: data.val=valid.txt",
        )


def held_out(documents: int, fraction: float, seed: int) -> np.ndarray:
    """int64: the documents held out, the first ones of a seeded permutation; at least one."""
    count = min(max(round(fraction * documents), 1), documents - 1)
    return order(documents, seed)[:count]


def split(
    documents: Documents, fraction: float, seed: int, seq_len: int, where: str
) -> tuple[Documents, Documents]:
    """The training part in the order of the files, the held-out part in the order it was drawn.

    Raises:
        DataError: there is not enough for one window of each.
    """
    if len(documents) >= FEW:
        train, val = _by_document(documents, fraction, seed, seq_len)
    else:
        train, val = _by_tail(documents, fraction, seq_len)
    if min(train.tokens, val.tokens) <= seq_len:
        raise DataError(
            f"train.seq_len={seq_len} is longer than the data: {documents.tokens} tokens, of which "
            f"{seq_len + 1} are needed to train on and as many to hold out",
            where=where,
            fix="give more text, or set a smaller train.seq_len",
        )
    return train, val


def check_length(documents: Documents, seq_len: int, where: str, purpose: str) -> None:
    """Refuse documents that do not fill one window and the label of its last token.

    Raises:
        DataError: they hold fewer than seq_len + 1 tokens.
    """
    if documents.tokens <= seq_len:
        raise DataError(
            f"train.seq_len={seq_len} is longer than the data: it takes {seq_len + 1} tokens "
            f"{purpose}, and there are {documents.tokens}",
            where=where,
            fix="give more text, or set a smaller train.seq_len",
        )


def _by_document(
    documents: Documents, fraction: float, seed: int, seq_len: int
) -> tuple[Documents, Documents]:
    chosen = held_out(len(documents), fraction, seed)
    ends = np.cumsum(documents.lengths[order(len(documents), seed)])
    enough = int(np.searchsorted(ends, seq_len + 1)) + 1  # documents until the first whole window
    if enough > len(chosen):
        chosen = order(len(documents), seed)[:enough]
    mask = np.zeros(len(documents), bool)
    mask[chosen] = True
    return (
        documents.select(np.flatnonzero(~mask), "train"),
        documents.select(chosen, "held out"),
    )


def _by_tail(documents: Documents, fraction: float, seq_len: int) -> tuple[Documents, Documents]:
    held = max(round(fraction * documents.tokens), seq_len + 1)
    cut = max(documents.tokens - held, 0)
    before, after = documents.spans.copy(), documents.spans.copy()
    position = documents.spans[:, 1] + np.clip(cut - documents.offsets[:-1], 0, documents.lengths)
    before[:, 2], after[:, 1] = position, position
    return (
        documents.replace(before[before[:, 2] > before[:, 1]], "train"),
        documents.replace(after[after[:, 2] > after[:, 1]], "held out"),
    )
