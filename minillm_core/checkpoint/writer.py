"""Saving in the background: training continues while a snapshot becomes a checkpoint.

One save at a time. Submitting the next one waits for it, so that a disk slower than the interval slows
training down instead of filling the memory with snapshots.

Rules for the end of a save:

- ``close`` waits for the save under way, after an error too: it is the run's last good state;
- a KeyboardInterrupt while waiting loses nothing: the save continues and is reported later;
- ``close(now=True)``, for a second signal, cancels the save. It stops at the next tensor and removes its
  files, and the checkpoint before it is the newest. Python waits for the thread at exit, so that takes as
  long as the current tensor or fsync. A daemon thread would be killed inside the framework's or the disk's
  code, which may abort the process with another exit code than the promised one; and nothing can speed
  up an fsync.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from traceback import clear_frames
from typing import Any

import numpy as np

from minillm_core.checkpoint.commit import Beside, commit, retain
from minillm_core.errors import MinillmError


@dataclass(frozen=True)
class Result:
    """The result of one save."""

    step: int
    path: Path | None  # the checkpoint's; None: it was not written
    seconds: float  # from the snapshot to the end of the clean-up, in the background
    error: BaseException | None = None  # with a path: older checkpoints could not be removed


class CheckpointWriter:
    """A writer of checkpoints in a thread of its own.

    Args:
        out: the run's folder.
        keep: how many checkpoints that verify to keep.
        spare: returns steps whose checkpoints always stay; called in the thread.
    """

    def __init__(
        self, out: Path, *, keep: int, spare: Callable[[], Collection[int]] = tuple
    ) -> None:
        self.out, self.keep, self.spare = out, keep, spare
        self._pool = futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: futures.Future[Result] | None = None
        self._results: list[Result] = []
        self._given_up = threading.Event()

    def submit(
        self,
        step: int,
        snapshot: Callable[[], Mapping[str, np.ndarray]],
        scalars: Mapping[str, Any],
        beside: Beside | None = None,
    ) -> None:
        """Save in the background; wait for the earlier save, but not for this one.

        Args:
            step: number of optimizer steps taken.
            snapshot: copies the arrays to the host; called once, in the thread.
            scalars: any JSON values; later changes to them are not saved.
            beside: other processes that write their parts: see :func:`~minillm_core.checkpoint.commit.commit`.

        Raises:
            ValueError: JSON cannot hold the scalars.
        """
        frozen = json.dumps(dict(scalars), allow_nan=False)
        self._collect(wait=True)
        self._saving = self._pool.submit(self._save, step, snapshot, frozen, beside)

    def finished(self) -> list[Result]:
        """Return the saves that ended since the last call, without waiting."""
        self._collect(wait=False)
        results, self._results = self._results, []
        return results

    def wait(self) -> list[Result]:
        """Wait for the save under way; return as :meth:`finished`."""
        self._collect(wait=True)
        return self.finished()

    def close(self, *, now: bool = False) -> None:
        """Accept no more saves; wait for the one under way, or cancel it. Its result can still be read.

        Args:
            now: do not wait; the save cancels itself and cleans up.
        """
        if now:
            self._given_up.set()
        self._pool.shutdown(wait=not now)

    def _collect(self, *, wait: bool) -> None:
        if self._saving and (wait or self._saving.done()):
            # in this order, a KeyboardInterrupt in between can repeat a result, not lose it
            self._results.append(self._saving.result())
            self._saving = None

    def _save(
        self,
        step: int,
        snapshot: Callable[[], Mapping[str, np.ndarray]],
        frozen: str,
        beside: Beside | None,
    ) -> Result:
        began = time.perf_counter()
        path = error = None
        try:
            scalars, given_up = json.loads(frozen), self._given_up.is_set
            path = commit(self.out, step, snapshot(), scalars, given_up=given_up, beside=beside)
            self._retain(step)
        except BaseException as raised:  # a plugin's or a library's error: always reported
            error = raised
            _release(error)
        return Result(step, path, time.perf_counter() - began, error)

    def _retain(self, step: int) -> None:
        try:
            retain(self.out, self.keep, self.spare())
        except OSError as raised:
            raise MinillmError(
                f"the checkpoint of step {step} is written, but an older one could not be removed: "
                f"{raised.strerror}",
                where=str(raised.filename or self.out),
                fix="make it removable; it is tried again after the next checkpoint",
            ) from raised


def _release(error: BaseException | None) -> None:
    """Release the arrays that a failed save's stack frames hold for as long as its error lives."""
    while error:
        # the frames below this one have returned
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
