"""Checkpoints that all ranks write in parallel: each rank its own arrays, rank 0 the manifest, last.

    step-00000100.tmp-.../
        model.safetensors, optimizer.safetensors, state.json    rank 0: its parts, and replicated arrays
        rank-00001.safetensors, ...                             the other ranks' parts
        manifest.json                                           rank 0, once it has every file's size and digest

A part is whole rows of an array, ``model.layers.0.attn.q@128`` from row 128 on, so any reader can concatenate
parts, and no rank waits for another one's arrays. There are no collectives: ranks write in threads while
training continues, and communicate through the rendezvous store. Rank 0 publishes the number of a save and its
temporary folder once that exists; each other rank answers with the size and digest of its file, or an error.
A save is cancelled if rank 0 publishes another number or folder; the folder gets its final name only after
all ranks have answered.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, Protocol

from minillm_core import Interrupted, MinillmError, NonFinite
from minillm_core.inspection import (
    Snapshot,
    Written,
    non_finite,
    rank_file,
    stream_file,
    tensor_file,
)
from minillm_mesh.collectives import Ended, met

EVERY = 0.02
"""Seconds between two polls of the store."""

CLEARING = 10.0
"""Seconds that rank 0 waits for others to stop writing, before it removes a cancelled save."""

NOW = "now"
"""The key of the current save: its number and temporary folder; "" if it was cancelled."""


class Store(Protocol):
    """A key-value store shared by all processes."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return a value, waiting until it is set."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys are set."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Remove a value."""
        ...


class PartReport(NamedTuple):
    """A rank's report on its file: size and digest, or an error."""

    written: tuple[int, str] = (0, "")
    error: str = ""
    finite: bool = True  # False: the error is a NaN or an infinity


class PartWriter:
    """A process's part in writing checkpoints.

    Args:
        store: a separate connection: threads of a save block on it.
        rank: of this process.
        size: number of processes.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._number = 0  # of saves so far, equal on all ranks
        self._over, self._lost = Event(), Event()
        self._thread: ThreadPoolExecutor | None = None
        if rank == 0:
            store.set(NOW, json.dumps([0, ""]))

    def add(self, snapshot: Snapshot) -> Snapshot:
        """Take over a snapshot of this rank's arrays; every rank must call it for the same saves.

        Returns:
            On rank 0 the snapshot to commit; on other ranks the given one, which a thread here writes.
        """
        self._number += 1
        if self._rank == 0:
            return replace(snapshot, beside=partial(self._beside, self._number))
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._thread.submit(self._write, self._number, snapshot)
        return snapshot

    def give_up(self) -> None:
        """Stop waiting for other ranks: one has ended."""
        self._lost.set()

    def close(self) -> None:
        """Wait for the part being written, if rank 0 still needs it."""
        self._over.set()
        if self._thread is not None:
            self._thread.shutdown()

    # rank 0

    @contextmanager
    def _beside(
        self, number: int, folder: Path, given_up: Callable[[], bool]
    ) -> Iterator[Callable[[], Mapping[str, Any]]]:
        """Let the other ranks write into ``folder`` within the context; an error cancels it. See ``commit``."""
        with met():  # the store ends with the process that serves it
            self._store.set(NOW, json.dumps([number, str(folder.absolute())]))
            try:
                yield partial(self._answers, number, given_up)
            except BaseException:
                self._store.set(NOW, json.dumps([number, ""]))
                late = time.monotonic() + CLEARING
                while not (
                    self._lost.is_set() or self._all_there(number) or time.monotonic() > late
                ):
                    time.sleep(EVERY)
                raise
            finally:
                for key in self._keys(number).values():
                    self._store.delete_key(key)

    def _answers(self, number: int, given_up: Callable[[], bool]) -> dict[str, Any]:
        """Wait for the other ranks; return size and digest of each file by name.

        Raises:
            NonFinite: an array of another rank is not finite.
            OSError: another rank could not write.
            Interrupted: the save is cancelled.
            Ended: another rank has ended.
        """
        while not self._all_there(number):
            if given_up():
                raise Interrupted("the checkpoint was abandoned")
            if self._lost.is_set():
                raise Ended(
                    "another process of the run has ended, so its part is missing",
                    fix="its own message says why; --resume continues from the previous checkpoint",
                )
            time.sleep(EVERY)
        found: dict[str, Any] = {}
        for rank, key in self._keys(number).items():
            answer = PartReport(*json.loads(self._store.get(key)))
            if answer.error:
                raise (OSError if answer.finite else NonFinite)(f"rank {rank}: {answer.error}")
            found[rank_file(rank)] = Written(*answer.written)
        return found

    def _all_there(self, number: int) -> bool:
        return self._store.check([*self._keys(number).values()])

    def _keys(self, number: int) -> dict[int, str]:
        return {rank: f"{number}/{rank}" for rank in range(1, self._size)}

    # the others

    def _write(self, number: int, snapshot: Snapshot) -> None:
        """Write this rank's part once rank 0 has published the folder, and answer."""
        while (under_way := self._under_way())[0] < number:
            if self._over.wait(EVERY):  # rank 0 may begin it yet, and would wait for this part
                self._answer(
                    number,
                    PartReport(error="the process ended before rank 0 began this checkpoint"),
                )
                return
        if under_way[0] > number:
            return
        try:
            answer = self._written(snapshot(), under_way)
        except BaseException as error:  # of any kind: rank 0 waits for it, and raises it
            what = error.what if isinstance(error, MinillmError) else str(error)
            answer = PartReport(error=what or type(error).__name__)
        self._answer(number, answer)

    def _answer(self, number: int, answer: PartReport) -> None:
        self._store.set(self._keys(number)[self._rank], json.dumps(answer))

    def _written(self, arrays: Mapping[str, Any], under_way: tuple[int, str]) -> PartReport:
        """Write this rank's file, unless rank 0 cancels the save."""
        if not under_way[1]:
            raise Interrupted("rank 0 has abandoned it")
        if found := non_finite(arrays):
            return PartReport(error=f"{found} is no longer finite; it was not saved", finite=False)

        def wanted() -> Iterator[Any]:
            for part in tensor_file(arrays):
                if self._under_way() != under_way:
                    raise Interrupted("rank 0 has abandoned it")
                yield part

        return PartReport(stream_file(Path(under_way[1]) / rank_file(self._rank), wanted()))

    def _under_way(self) -> tuple[int, str]:
        """Return the number and folder of rank 0's latest save; "": it was cancelled."""
        number, folder = json.loads(self._store.get(NOW))
        return number, folder


__all__ = ["PartWriter"]
