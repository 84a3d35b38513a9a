"""Saving in the background: training goes on while a snapshot becomes a checkpoint.

One save at a time. Handing in the next one waits for it, so that a disk slower than the interval
slows training down instead of filling the memory with snapshots.

How it ends is a matter of what a checkpoint is worth:

- ``close`` waits for the save under way, after an error too: it is the run's last good state;
- a KeyboardInterrupt while waiting loses nothing: what is under way goes on and is reported later;
- ``close(now=True)``, which is for a second signal, means now. The save gives up at the next tensor,
  removes what it wrote, and the one before it is the newest. Python waits for the thread when it exits,
  so that takes as long as the tensor or the fsync at hand. A daemon thread would be cut off inside the
  framework's or the disk's code, which may abort the process with another exit code than the one
  promised; and nothing can hurry an fsync.
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
    path: Path | None  # of the checkpoint; None: it was not written
    seconds: float  # from the snapshot to the end of the clean-up, in the background
    error: BaseException | None = None  # with a path: older checkpoints could not be removed


class Writer:
    """A writer of checkpoints in a thread of its own.

    Args:
        out: the run's folder.
        keep: how many checkpoints that verify to keep.
        spare: gives steps whose checkpoints stay in any case; called in the thread.
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
        """Save in the background; waits for an earlier save, and not for this one.

        Args:
            step: how many optimizer steps the state has seen.
            snapshot: brings the arrays to the host; called once, in the thread.
            scalars: whatever JSON can hold, as it is now: later changes are not saved.
            beside: other processes, which write their parts: see :func:`~minillm_core.checkpoint.commit.commit`.

        Raises:
            ValueError: JSON cannot hold the scalars.
        """
        frozen = json.dumps(dict(scalars), allow_nan=False)
        self._collect(wait=True)
        self._saving = self._pool.submit(self._save, step, snapshot, frozen, beside)

    def finished(self) -> list[Result]:
        """Return the saves that ended since the last call; does not wait."""
        self._collect(wait=False)
        results, self._results = self._results, []
        return results

    def wait(self) -> list[Result]:
        """Wait until nothing is under way, and return as :meth:`finished`."""
        self._collect(wait=True)
        return self.finished()

    def close(self, *, now: bool = False) -> None:
        """Take no more; wait for the save under way, or make it give up. Its result can still be read.

        Args:
            now: do not wait, and leave the save to its own clean-up.
        """
        if now:
            self._given_up.set()
        self._pool.shutdown(wait=not now)

    def _collect(self, *, wait: bool) -> None:
        if self._saving and (wait or self._saving.done()):
            # in this order, a KeyboardInterrupt in between can tell a result twice, not lose it
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
        except BaseException as raised:  # of a plugin's state, of a library: never lost
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
    """Let go of the arrays that the frames of a failed save hold for as long as its error lives."""
    while error:
        # of the frames below this one: they have returned
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
