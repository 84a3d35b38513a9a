"""Validation: nats per token of the main target, and bits per byte of the text behind it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core.backends.base import Batch, Model
from minillm_core.backends.detect import choose, probe
from minillm_core.data import bytes_per_token, open_documents, validation_batches
from minillm_core.errors import Refusal
from minillm_core.train.events import Evaluated
from minillm_core.train.restore import Create, open_run

__all__ = ["Validation", "evaluate_run"]


class Validation:
    """Evaluates a model on a fixed list of batches.

    Args:
        model: evaluates.
        batches: the same every time; labels -1 where nothing is predicted.
        token_bytes: int (vocab,), UTF-8 bytes of each id, 0 for specials; None without a tokenizer.
        cancelled: asked before every batch.
        progress: is told before every batch how many predictions there were so far.
    """

    def __init__(
        self,
        model: Model,
        batches: Iterable[Batch],
        token_bytes: np.ndarray | None,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Callable[[int], None] = lambda predictions: None,
    ) -> None:
        self._model, self._batches, self._token_bytes = model, batches, token_bytes
        self._cancelled, self._progress = cancelled, progress
        self.predictions = 0

    def __call__(self, step: int) -> Evaluated | None:
        """Evaluate after ``step``; val_loss is NaN where nothing is predicted; None: cancelled."""
        total = Counter[str]()
        try:
            nats, self.predictions = self._model.evaluate(self._counted(total))
        except _Cancelled:
            return None
        loss = nats / self.predictions if self.predictions else math.nan
        rate = nats / math.log(2) / total["bytes"] if total["bytes"] else None
        return Evaluated(step, loss, rate)

    def _counted(self, total: Counter[str]) -> Iterator[Batch]:
        """The batches, the bytes of what they predict being added up as they go by."""
        for batch in self._batches:
            if self._cancelled():
                raise _Cancelled
            self._progress(total["predictions"])
            labels = batch["labels"]
            predicted = labels[labels >= 0]
            total["predictions"] += predicted.size
            if self._token_bytes is not None:
                total["bytes"] += int(self._token_bytes[predicted].sum(dtype=np.int64))
            yield batch


class _Cancelled(Exception):
    """Ends an evaluation from within its batches."""


def evaluate_run(
    out: Path,
    data: str | Sequence[str],
    *,
    seq_len: int | None = None,
    max_tokens: int | None = None,
    backend: str = "auto",
    device: str = "auto",
    plugins: Mapping[str, str] | None = None,
    cache: Path,
    say: Callable[[str], None],
    create: Create | None = None,
) -> dict[str, Any]:
    """What ``minillm eval OUT --data F`` reports.

    Args:
        out: a run's folder.
        data: files or folders of text or ids; all of it is read, in file order.
        seq_len: of the windows; default: the run's.
        max_tokens: how many predictions; default: all.
        backend: as for training; it need not be the run's.
        device: as for training.
        plugins: name -> what to load for it, for plugins that must be named again.
        cache: where tokens are kept.
        say: is told what a person should know.
        create: makes the backend; default: :func:`minillm_core.backends.create`.

    Returns:
        ``val_loss``, ``bits_per_byte`` (None without a tokenizer), ``tokens`` (predictions),
        ``step`` and ``checkpoint``.

    Raises:
        Refusal: OUT holds no run or no checkpoint, or anything given cannot be used.
        NoCheckpoint: none verifies.
    """
    data = [data] if isinstance(data, str) else list(data)
    detected = choose(probe(), backend, device)
    run = open_run(out, plugins=plugins, say=say)
    config, tokenizer = run.config, run.tokenizer
    length = seq_len or config.train.seq_len
    model = run.model(detected, max_positions=length, say=say, create=create)
    documents = open_documents(
        data, tokenizer=tokenizer, vocab=config.model.vocab, cache=cache, say=say
    )
    batches = validation_batches(
        documents,
        rows=config.train.rows,
        seq_len=length,
        tokens=max_tokens,
        seed=None,
        on_batch=run.batch_hook(),
    )
    if not len(batches):
        raise Refusal("there is nothing to predict", where=", ".join(data), fix="give more text")
    token_bytes = bytes_per_token(tokenizer, config.model.vocab) if tokenizer else None
    validation = Validation(model, batches, token_bytes)
    result = validation(run.checkpoint.step)
    assert result is not None  # nobody cancels it
    return {
        "val_loss": result.val_loss,
        "bits_per_byte": result.bits_per_byte,
        "tokens": validation.predictions,
        "step": run.checkpoint.step,
        "checkpoint": str(run.checkpoint.path),
    }
