"""Bits per byte of documents under a run's checkpoint, in batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from minillm_core import Refusal, Run
from minillm_core.documents import bytes_per_token

TOKENS = 2048
"""Maximum tokens measured per document, from its start."""

TOGETHER = 8192
"""Tokens per batch, padding included."""


def checkpoint_of(out: str | Path) -> str:
    """Return the name of a run's newest valid checkpoint, which :class:`Bits` reads.

    Raises:
        Refusal: the folder holds no run.
    """
    return str(Run.open(out).checkpoint)


class Bits:
    """A checkpoint that measures bits per byte of documents; a context manager.

    Args:
        out: the run's folder.

    Raises:
        Refusal: the folder holds no run, or the run has no tokenizer.
    """

    def __init__(self, out: str | Path) -> None:
        self._run = Run.open(out)
        if self._run.tokenizer is None:
            raise Refusal(
                "the run was trained on ids: it cannot read text",
                where=f"--model {out}",
                fix="name a run that was trained on text",
            )
        self._tokenizer, config = self._run.tokenizer, self._run.plan.config
        self._length = config.train.seq_len
        self._bytes = bytes_per_token(self._tokenizer, config.model.vocab)

    def __enter__(self) -> Bits:
        return self

    def __exit__(self, *exception: object) -> None:
        self._run.close()

    def __call__(self, texts: Sequence[str]) -> list[float]:
        """Compute the bits per byte of each document's start, as ``minillm eval`` does for a file.

        Args:
            texts: the documents' texts, none of them empty.

        Returns:
            Bits per byte over the first TOKENS tokens of each document.
        """
        encoded, start = self._tokenizer.encode(texts), [self._tokenizer.start]
        documents = [np.concatenate([start, ids[:TOKENS]]) for ids in encoded]
        rows = [
            (index, ids[first : first + self._length + 1])
            for index, ids in enumerate(documents)
            for first in range(0, len(ids) - 1, self._length)
        ]
        rows.sort(key=lambda row: -len(row[1]))  # similar lengths together: little padding
        nats = np.zeros(len(documents))
        while rows:
            several = max(1, TOGETHER // len(rows[0][1]))
            here, rows = rows[:several], rows[several:]
            for (index, _), found in zip(here, self._run.losses([r for _, r in here]), strict=True):
                nats[index] += found.sum(dtype=np.float64)
        spelt = [int(self._bytes[ids].sum(dtype=np.int64)) for ids in documents]
        return [float(n) / math.log(2) / max(b, 1) for n, b in zip(nats, spelt, strict=True)]
