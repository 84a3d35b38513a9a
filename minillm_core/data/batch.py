"""Batches and the dataloaders that make them.

Without a packer rows are contiguous pieces of the stream, without overlap and without padding. Row
r holds its tokens [r T, r T + T); its labels are the next tokens, so one token more is read than the
position advances, and labels cross documents and epochs.
"""

from __future__ import annotations

import contextvars
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minillm_core.data.documents import PLAIN, Arrangement, Blocked, Documents, order
from minillm_core.data.stream import Batch, joined, open_rows, pack
from minillm_core.errors import DataError
from minillm_core.nn.block import LABELS
from minillm_core.plugins.sourcing import WEIGHTS

_POLL_SECONDS = 0.05

OnBatch = Callable[[Batch, str], Batch]
"""``on_batch(batch, phase) -> batch``; the phase is "train", "eval" or "decode"."""

FIELDS = ("ids", "labels", "documents", "positions")
_DTYPES = {**dict.fromkeys(FIELDS, "int32"), "weights": "float32"}


def checked(batch: Batch, vocab: int) -> Batch:
    """Validate a hook's batch before a framework reads it: MLX reads out of bounds without an error.

    Raises:
        DataError: a field is missing or has another dtype or shape, or an id or label is not below
            vocab.
    """
    if not isinstance(batch, dict):
        raise _wrong(f"{type(batch).__name__}, not a dict of arrays")
    for name in dict.fromkeys((*FIELDS, *batch)):
        field, dtype = batch.get(name), _DTYPES.get(name)
        if not isinstance(field, np.ndarray):
            raise _wrong(f"no array {name!r}")
        if dtype and (field.dtype != dtype or field.ndim != 2 or field.shape != batch["ids"].shape):
            beside = f", beside 'ids' {batch['ids'].shape}" if name != "ids" else ""
            raise _wrong(f"{name!r} as {field.dtype} {field.shape}, not {dtype} (rows, T){beside}")
    for name in ("ids", "labels"):  # labels below 0 are valid: nothing is predicted there
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


def padded_rows(rows: Sequence[np.ndarray]) -> Batch:
    """Split n + 1 ids of each row into n inputs and n labels, padded to the longest row."""
    shape = len(rows), max(map(len, rows), default=1) - 1
    batch = {name: np.full(shape, -1, np.int32) for name in ("labels", "documents")}
    batch |= {"ids": np.zeros(shape, np.int32), "positions": np.indices(shape, np.int32)[1]}
    for index, ids in enumerate(rows):
        n = len(ids) - 1
        batch["ids"][index, :n], batch["labels"][index, :n] = ids[:-1], ids[1:]
        batch["documents"][index, :n] = 0
    return batch


class Cancelled(Exception):
    """The caller cancelled the wait for the next step."""


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The micro-batches of one optimizer step.

    Attributes:
        micro: this rank's micro-batches, in order.
        supervised: number of labels >= 0 in the micro-batches of all ranks.
        real: positions of all ranks that are not padding (documents >= 0).
        padded: number of all positions.
        cursor: the place after this step, as JSON; a Loader resumes from it.
    """

    micro: tuple[Batch, ...]
    supervised: int
    real: int
    padded: int
    cursor: dict[str, Any]


def part_of(micro: Sequence[Batch], ranks: int, rank: int) -> tuple[Batch, ...]:
    """Return a rank's part of a step: some of its micro-batches, or else some rows of each.

    Every rank makes the whole step, so that ``on_batch`` and its random streams do not depend on how
    many ranks there are.

    Raises:
        ValueError: neither the micro-batches nor their rows can be divided by ``ranks``.
    """
    count, rows = len(micro) // ranks, len(micro[0]["ids"]) // ranks
    if count * ranks == len(micro):
        return tuple(micro[rank * count : (rank + 1) * count])
    if rows * ranks != len(micro[0]["ids"]):
        held = f"{len(micro)} micro-batches of {len(micro[0]['ids'])} rows"
        raise ValueError(f"{held}, {ranks} ranks")
    mine = slice(rank * rows, (rank + 1) * rows)

    def part(one: Batch) -> Batch:
        labels = np.count_nonzero(one["labels"] >= 0) / ranks
        cut = {name: np.ascontiguousarray(array[mine]) for name, array in one.items()}
        return cut | {LABELS: np.full_like(cut["labels"], labels, np.float32)}

    return tuple(map(part, micro))


_Made = StepBatch | BaseException


class Loader(Iterator[StepBatch]):
    """The dataloader of training: an endless iterator of steps, and a context manager of its thread.

    A step takes the next rows x accumulate rows of the stream, in any split (gradient accumulation).

    Args:
        documents: the training documents.
        rows: rows of a micro-batch.
        accumulate: micro-batches in a step.
        seq_len: tokens in a row.
        shape_at: step, from 1 -> rows, accumulate and seq_len; replaces those three arguments, which
            hold for every step.
        step: training steps made before; batches without a supervised label do not count.
        seed: of the documents' order (data.seed).
        ranks: processes that train together, each with its part of a step: see :func:`part_of`.
        rank: of this process, from 0.
        columns: returns the process's columns of a batch of its rows.
        by: the order and packer that plugins claim.
        on_batch: ``(batch, "train") -> batch``, called for every micro-batch, in order, in the
            loader's thread.
        prefetch: steps made ahead.
        cursor: where an earlier Loader stopped; rows and accumulate may differ from its, and
            without a packer seq_len, too.
        parts: weight and documents of each source of a mixture; ``documents`` joins them.
        memory: state that ``on_batch`` keeps from batch to batch, as JSON; saved in cursors.
        cancelled: polled during a wait; True ends the wait.

    Raises:
        DataError: the cursor does not match these documents in this order.
        ValueError: there are no tokens.
    """

    def __init__(
        self,
        documents: Blocked,
        *,
        rows: int,
        accumulate: int,
        seq_len: int,
        seed: int,
        shape_at: Callable[[int], tuple[int, int, int]] | None = None,
        step: int = 0,
        ranks: int = 1,
        rank: int = 0,
        columns: Callable[[Batch], Batch] = lambda batch: batch,
        by: Arrangement = PLAIN,
        on_batch: OnBatch | None = None,
        prefetch: int = 2,
        cursor: Mapping[str, Any] | None = None,
        parts: Sequence[tuple[float, Documents]] = (),
        memory: Callable[[], Mapping[str, Any]] = dict,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._cancelled = cancelled
        source = open_rows(documents, seed, by, cursor, parts, size=seq_len)

        def made(height: int, width: int) -> Batch:
            batch = source.read(height, width)
            return checked(on_batch(batch, "train"), documents.vocab) if on_batch else batch

        def steps(done: int) -> Iterator[StepBatch]:
            same = rows, accumulate, seq_len
            while True:
                height, count, width = shape_at(done + 1) if shape_at else same
                micro = tuple(made(height, width) for _ in range(count))
                supervised = sum(int(np.count_nonzero(b["labels"] >= 0)) for b in micro)
                done += supervised > 0
                yield StepBatch(
                    micro=tuple(map(columns, part_of(micro, ranks, rank))),
                    supervised=supervised,
                    real=sum(int(np.count_nonzero(b["documents"] >= 0)) for b in micro),
                    padded=sum(b["ids"].size for b in micro),
                    cursor={**source.cursor(), **memory()},
                )

        self._queue: queue.Queue[_Made] = queue.Queue(max(prefetch, 1))
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        # The thread holds no reference to the loader (nor does ``steps``), so that a loader without
        # references is collected, which ends its thread.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,  # the caller's context, with its watch on plugin code
            args=(_fill, steps(step), self._queue, self._stop),
            name="minillm-loader",
            daemon=True,
        )
        weakref.finalize(self, self._stop.set)
        self._thread.start()

    def __next__(self) -> StepBatch:
        """Wait for the next step and return it.

        Raises:
            StopIteration: the loader was closed.
            Cancelled: the wait was cancelled; a later call returns the step.
            BaseException: any error of the thread, with its traceback, at this and every later call.
        """
        if self._failure:
            raise self._failure
        if self._stop.is_set():
            raise StopIteration
        item = None
        while item is None:
            try:
                item = self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._cancelled():
                    raise Cancelled from None
        if isinstance(item, BaseException):
            self._failure = item
            self.close()
            raise item
        return item

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self, wait: float | None = None) -> None:
        """End the thread and wait for it; idempotent.

        Args:
            wait: seconds after which a thread that hangs is abandoned; None: never.
        """
        self._stop.set()
        self._thread.join(wait)


def _fill(steps: Iterator[StepBatch], made: queue.Queue[_Made], stop: threading.Event) -> None:
    def put(item: _Made) -> None:
        while not stop.is_set():
            try:
                return made.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue

    try:
        while not stop.is_set():
            put(next(steps))
    except BaseException as error:  # any kind: the consumer must see it
        put(error)


class ValidationBatches(Sequence[Batch]):
    """The dataloader of validation: the first ``tokens`` predictions of documents laid end to end.

    Window w predicts the tokens w T + 1 ... w T + T from those before them in the window. Each batch is
    computed when it is indexed. All have the shape (rows, seq_len); positions without a prediction have
    label -1, and positions without a token have id 0 and document -1.

    Args:
        documents: at least two tokens.
        rows: of every batch; missing rows are padding.
        seq_len: predictions in a window.
        tokens: number of predictions; None, or more than there are: every one.
        seed: of the documents' order, as in training's first epoch; None for file order.
        on_batch: ``(batch, "eval") -> batch``.
        share: fraction of the windows, spread evenly over all of them; at least one is kept, and all if
            these have no label, as with few answers.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        rows: int,
        seq_len: int,
        tokens: int | None,
        seed: int | None,
        on_batch: OnBatch | None = None,
        share: float = 1.0,
    ) -> None:
        self._documents = documents.ordered(None if seed is None else order(len(documents), seed))
        self._rows, self._seq_len, self._on_batch = rows, seq_len, on_batch
        available = max(documents.tokens - 1, 0)
        self._end = available if tokens is None else min(tokens, available)
        count = -(-self._end // seq_len)
        taken = min(count, max(1, round(share * count)))
        part = [i * count // taken for i in range(taken)]
        labels = (self._row(window * seq_len)["labels"] for window in part)
        whole = taken == count or not any((row >= 0).any() for row in labels)
        self._windows = [*range(count)] if whole else part
        self.predictions: int = sum(min(seq_len, self._end - w * seq_len) for w in self._windows)

    def __len__(self) -> int:
        return -(-len(self._windows) // self._rows)

    def __getitem__(self, index: int) -> Batch:  # type: ignore[override]  # no slices
        index = range(len(self))[index]
        windows = self._windows[index * self._rows : (index + 1) * self._rows]
        after = range(windows[-1] + 1, windows[-1] + 1 + self._rows - len(windows))
        rows = [self._row(window * self._seq_len) for window in windows]
        rows += [self._row(max(window * self._seq_len, self._end)) for window in after]
        batch = joined(rows)
        if self._on_batch:
            batch = checked(self._on_batch(batch, "eval"), self._documents.vocab)
        return batch

    def _row(self, first: int) -> Batch:
        """Return the window that begins at a token; from the end on nothing is predicted."""
        columns, starts = self._documents.room(self._seq_len + 1), np.zeros(self._seq_len + 1, bool)
        filled = self._documents.read(first, columns, starts)
        follows = np.arange(-1, self._seq_len) < self._end - first
        laid = {name: array[None] for name, array in columns.items()}
        row = pack(laid, starts[None], follows[None])
        row.pop(WEIGHTS, None)  # used in training only
        row["documents"][0, filled:] = -1
        return row
