"""Batches made ahead of time by one background thread."""

from __future__ import annotations

import contextvars
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minillm_core.data.batch import Batch, OnBatch, checked
from minillm_core.data.documents import Documents
from minillm_core.data.packing import Stream, pack
from minillm_core.data.shuffle import Cursor, fingerprint

__all__ = ["Cancelled", "Loader", "StepBatch"]

_POLL_SECONDS = 0.05


class Cancelled(Exception):
    """Nobody wants to wait for the next step any more."""


@dataclass(frozen=True, eq=False)
class StepBatch:
    """What one optimizer step is made from.

    Attributes:
        micro: the micro-batches, in order.
        supervised: labels >= 0 in all of them.
        real: positions that are not padding (documents >= 0).
        padded: all positions.
        cursor: the place after this step, as JSON; give it to a Loader to go on from there.
    """

    micro: tuple[Batch, ...]
    supervised: int
    real: int
    padded: int
    cursor: dict[str, Any]


class Loader(Iterator[StepBatch]):
    """An endless iterator of steps, and a context manager: leaving it ends its thread.

    A step takes the next rows x accumulate rows of the stream, however they are split.

    Args:
        documents: what is read.
        rows: of a micro-batch.
        accumulate: micro-batches in a step.
        seq_len: tokens in a row.
        seed: of the documents' order (data.seed).
        on_batch: ``(batch, "train") -> batch``, called for every micro-batch, in order, in the
            loader's thread.
        prefetch: steps made ahead.
        cursor: where an earlier Loader stopped; rows, accumulate and seq_len may be others.
        memory: what ``on_batch`` remembers from batch to batch, as JSON: cursors carry it.
        cancelled: asked while there is nothing to give.

    Raises:
        DataError: the cursor is not of these documents in this order.
        ValueError: there are no tokens.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        rows: int,
        accumulate: int,
        seq_len: int,
        seed: int,
        on_batch: OnBatch | None = None,
        prefetch: int = 2,
        cursor: Mapping[str, Any] | None = None,
        memory: Callable[[], Mapping[str, Any]] = dict,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._cancelled = cancelled
        if cursor is None:
            start = Cursor(fingerprint(documents, seed))
        else:
            start = Cursor.resume(cursor, documents, seed)
        stream = Stream(documents, seed, start)
        steps = _steps(stream, documents.vocab, rows, accumulate, seq_len, on_batch, memory)
        self._queue: queue.Queue[StepBatch | BaseException] = queue.Queue(max(prefetch, 1))
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        # The thread holds no reference to the loader, so that a forgotten one is collected,
        # and ends its thread then.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,  # whoever watches here watches there
            args=(_fill, steps, self._queue, self._stop),
            name="minillm-loader",
            daemon=True,
        )
        weakref.finalize(self, self._stop.set)
        self._thread.start()

    def __next__(self) -> StepBatch:
        """The next step; waits for it.

        Raises:
            StopIteration: the loader was closed.
            Cancelled: nobody wants to wait; the step will still come.
            BaseException: whatever the thread raised, with its traceback, now and ever after.
        """
        if self._failure:
            raise self._failure
        if self._stop.is_set():
            raise StopIteration
        item = self._get()
        if isinstance(item, BaseException):
            self._failure = item
            self.close()
            raise item
        return item

    def _get(self) -> StepBatch | BaseException:
        while True:
            try:
                return self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._cancelled():
                    raise Cancelled from None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self, wait: float | None = None) -> None:
        """End the thread and wait for it; a second call does nothing.

        Args:
            wait: seconds after which a thread that hangs is left to itself; None: never.
        """
        self._stop.set()
        self._thread.join(wait)


def _fill(
    steps: Iterator[StepBatch],
    made: queue.Queue[StepBatch | BaseException],
    stop: threading.Event,
) -> None:
    def put(item: StepBatch | BaseException) -> None:
        while not stop.is_set():
            try:
                return made.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue

    try:
        while not stop.is_set():
            put(next(steps))
    except BaseException as error:  # whatever it is, the consumer must see it
        put(error)


def _steps(
    stream: Stream,
    vocab: int,
    rows: int,
    accumulate: int,
    seq_len: int,
    on_batch: OnBatch | None,
    memory: Callable[[], Mapping[str, Any]],
) -> Iterator[StepBatch]:
    size = rows * seq_len
    while True:
        ids, starts = stream.read(accumulate * size)
        micro = []
        for first in range(0, accumulate * size, size):
            part = slice(first, first + size + 1)
            batch = pack(ids[part], starts[part], rows)
            micro.append(checked(on_batch(batch, "train"), vocab) if on_batch else batch)
        yield StepBatch(
            micro=tuple(micro),
            supervised=sum(int(np.count_nonzero(b["labels"] >= 0)) for b in micro),
            real=sum(int(np.count_nonzero(b["documents"] >= 0)) for b in micro),
            padded=sum(b["ids"].size for b in micro),
            cursor={**stream.cursor.data(), **memory()},
        )
